"""Where a kernel finds its inputs, and what it finds where nobody has written (appendix "Check your kernel")."""

from __future__ import annotations

import contextlib
import math
import warnings

import torch
from torch import Tensor


@contextlib.contextmanager
def poisoned(device: str):
    """Uninitialised memory holds NaN: through PyTorch's own switch, and on a GPU in freed blocks too."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        if torch.device(device).type == "cuda":
            blocks = [torch.full((n,), math.nan, device=device) for n in (1 << 10, 1 << 16, 1 << 22, 1 << 26)]
            del blocks
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def placed(x: Tensor, strides: str, i: int) -> Tensor:
    """The same values at other addresses: rows apart (NaN between them), one element off a 16-byte boundary, channels
    apart, or all along an axis of equal values at one address.

    How far apart, an odd number, differs for every tensor i of a call: one that takes another's strides reads NaN.
    """
    if strides == "strided":
        room = (
            x.new_full((*x.shape[:-1], 2 * (x.shape[-1] + i) + 1), math.nan)
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)
        )
        view = room[..., : x.shape[-1]]
    elif strides == "transposed":
        view = torch.empty_like(x.transpose(1, -1), memory_format=torch.contiguous_format)
        view = view.transpose(1, -1)
    elif strides == "expanded":
        view = x
        for dim in range(x.ndim):
            first = view.narrow(dim, 0, min(1, x.shape[dim]))
            view = first if first.expand_as(view).equal(view) else view
        room = x.new_full((x.numel(),), math.nan)  # NaN where its own strides do not lead
        return room[: view.numel()].copy_(view.flatten()).view(view.shape).expand_as(x)
    elif strides == "misaligned":
        view = x.new_full((x.numel() + 1,), math.nan)[1:].view(x.shape)
    else:
        return x
    view.copy_(x)
    return view
