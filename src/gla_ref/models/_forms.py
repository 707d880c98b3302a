"""The one place that says which form of a mechanism a model runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import FORMS

if TYPE_CHECKING:
    from ..over_ranks.pieces import Pieces

REFERENCE = {"softmax_attention": "parallel"}  # the others: "chunkwise"
# GLA has C x C x K exponentials in a chunk, so short ones are faster on a CPU. Not "chunkwise_two_level": it adds into
# slices of one tensor, and the gradient of every slice is as long as the text, so that its time grows with T squared
OPTIONS = {("gla", "chunkwise"): {"C": 16}}


def choose(mechanism: str, device: torch.device, dtype: torch.dtype, T: int, gradient: bool) -> str:
    """The name of a form: the mechanism's kernel on a GPU, a reference elsewhere.

    Where a mechanism has no kernel in `FORMS`, and in float64, its reference runs on a GPU too. A single
    token has forms of its own, that of GLA's kernels only where no gradient is needed.
    """
    forms = FORMS[mechanism]
    if device.type == "cuda" and dtype != torch.float64 and "triton" in forms:
        return "triton_recurrent" if T == 1 and not gradient and "triton_recurrent" in forms else "triton"
    return "recurrent" if T == 1 else REFERENCE.get(mechanism, "chunkwise")


def attend(mechanism: str, *tensors: Tensor, initial_state, cu_seqlens: Tensor | None, pieces: Pieces | None = None):
    """(o, state) of tensors as :data:`gla_ref.FORMS` takes them; of `pieces`, by all ranks together.

    Autocast ends here: forms have a precision of their own, which the dtypes of their inputs decide.
    """
    q, gradient = tensors[0], torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    options = {}
    if pieces is not None:
        form = pieces.form(mechanism)
    else:
        name = choose(mechanism, q.device, q.dtype, q.shape[1], gradient)
        form, options = FORMS[mechanism][name], OPTIONS.get((mechanism, name), {})
    with torch.autocast(q.device.type, enabled=False):
        return form(*tensors, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)


def owners(cu_seqlens: Tensor, T: int) -> Tensor:
    """`[T]`: which sequence each token of a packed batch belongs to."""
    # not in cu_seqlens[1:]: compiled code has searched a slice from the start of its base (PyTorch's issue 182343)
    return torch.searchsorted(cu_seqlens, torch.arange(T, device=cu_seqlens.device), right=True) - 1


def places(cu_seqlens: Tensor, T: int) -> Tensor:
    """`[T]`: each token's place in its own sequence, from 0."""
    return torch.arange(T, device=cu_seqlens.device) - cu_seqlens[owners(cu_seqlens, T)]
