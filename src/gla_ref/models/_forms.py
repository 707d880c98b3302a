"""Which form of a mechanism a model runs; softmax attention with a cache is PyTorch's, which mixers.py calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import FORMS

if TYPE_CHECKING:
    from ..over_ranks.pieces import Pieces

REFERENCE = {"softmax_attention": "parallel"}  # all other mechanisms: "chunkwise"
# a chunk of GLA or KDA takes C x C x K exponentials, so short chunks are faster on a CPU. GLA's "chunkwise_two_level"
# adds into slices of one tensor, and the gradient of every slice is as long as the text: its time grows with T squared
OPTIONS = {("gla", "chunkwise"): {"C": 16}, ("kda", "chunkwise"): {"C": 16}}


def choose(mechanism: str, device: torch.device, dtype: torch.dtype, T: int, gradient: bool) -> str:
    """Return the name of a form: the mechanism's kernel on a GPU, a reference elsewhere.

    In float64 a reference runs on a GPU too. A single token has forms of its own; the one-token kernels, which not all
    mechanisms have, need a call without gradients.
    """
    if device.type == "cuda" and dtype != torch.float64:
        return "triton_recurrent" if T == 1 and not gradient and "triton_recurrent" in FORMS[mechanism] else "triton"
    return "recurrent" if T == 1 else REFERENCE.get(mechanism, "chunkwise")


def attend(mechanism: str, *tensors: Tensor, initial_state, cu_seqlens: Tensor | None, pieces: Pieces | None = None):
    """Return (o, state) from tensors as `gla_ref.FORMS` takes them; with `pieces`, over all ranks."""
    q, gradient = tensors[0], torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    options = {}
    if pieces is not None:
        form = pieces.form(mechanism)
    else:
        name = choose(mechanism, q.device, q.dtype, q.shape[1], gradient)
        form, options = FORMS[mechanism][name], OPTIONS.get((mechanism, name), {})
    return form(*tensors, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)


def owners(cu_seqlens: Tensor, T: int) -> Tensor:
    """`[T]`: the sequence of each token of a packed batch."""
    # not cu_seqlens[1:]: compiled code searches a slice from the start of its base tensor (PyTorch's issue 182343)
    return torch.searchsorted(cu_seqlens, torch.arange(T, device=cu_seqlens.device), right=True) - 1


def places(cu_seqlens: Tensor, T: int) -> Tensor:
    """`[T]`: each token's place in its own sequence, from 0."""
    return torch.arange(T, device=cu_seqlens.device) - cu_seqlens[owners(cu_seqlens, T)]
