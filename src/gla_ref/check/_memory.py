"""Where a kernel finds its inputs, and what it finds where nobody has written (appendix "Check your kernel")."""

from __future__ import annotations

import contextlib
import math
import warnings

import torch
from torch import Tensor

AROUND = 2**16  # elements of NaN before and behind a tensor: of a tile that reaches beyond its last row, too

FUSED = 3  # tensors that a projection makes at once: q, k and v, the first of a call


@contextlib.contextmanager
def poisoned(device: str):
    """Uninitialised memory holds NaN: through PyTorch's own switch, and on a GPU in freed blocks too."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import PyTorch's compiler
        if torch.device(device).type == "cuda":
            blocks = [torch.full((n,), math.nan, device=device) for n in (1 << 10, 1 << 16, 1 << 22, 1 << 26)]
            del blocks
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def placed(x: Tensor, strides: str, i: int) -> Tensor:
    """Place these values in the midst of NaN: in order, rows apart (NaN between them), tokens apart, one element off a
    16-byte boundary, channels apart, or all along an axis of equal values at one address.

    How far apart, an odd number, differs for every tensor i of a call: one that takes another's strides reads NaN.
    """
    order, sizes, extra = [*range(x.ndim)], [*x.shape], 0
    if strides == "strided":
        order[:2], extra = [1, 0], x.shape[-1] + 2 * i + 1
    elif strides == "transposed":
        order[1], order[-1] = order[-1], order[1]
    elif strides == "expanded":
        sizes = [1 if x.narrow(d, 0, 1).expand_as(x).equal(x) else n for d, n in enumerate(sizes)]
    steps, n = [0] * x.ndim, 1
    for d in reversed(order):
        steps[d] = n
        n = n * sizes[d] + extra * (d == order[-1])
        n *= FUSED if strides == "fused" and d == 2 and i < FUSED else 1
    room = x.new_full((AROUND + n + AROUND,), math.nan)
    view = room.as_strided(sizes, steps, AROUND + (strides == "misaligned"))
    return view.copy_(x[tuple(slice(n) for n in sizes)]).expand_as(x)
