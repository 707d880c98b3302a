"""Mistakes that are right on paper: what float32 and less do to them is wrong (chapters 10, 11 and 12)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ...rounding import Products
from .._emulate import Product, two_level
from ._calls import CARRY, DECAY, GATED, LINEAR, READ, Call, at_most_0, backward, later, mistake, read, write
from ._states import end_of_sums

CHUNKS = (16, 32, 64, 128, 10**9)  # a kernel's own is not known


# -- exponents ---------------------------------------------------------------------------------
def factored(c: Call, C: int, anchor: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Pairs of a chunk as one product of q e^(b_i - r) and k e^(r - b_j), r the anchor of the running sums b."""
    S, outs = c.S, []
    for a in range(0, c.q.shape[1], C):
        n = c.cut(a, a + C)
        b = n.g.cumsum(1)
        r, end = anchor(b), b[:, -1:]
        q, k = n.q * (b - r).exp(), n.k * (r - b).exp()
        P = torch.einsum("bihk,bjhk->bhij", q, k).tril()
        outs.append(c.s * (torch.einsum("bhij,bjhv->bihv", P, n.v) + read(n.q * b.exp(), S)))
        S = end[:, 0, ..., None].exp() * S + write(k * (end - r).exp(), n.v)
    return torch.cat(outs, 1), S


def differences(c: Call, C: int) -> tuple[Tensor, Tensor]:
    """Decays between tokens as differences of running sums: -inf less -inf after a reset."""
    S, outs = c.S, []
    for a in range(0, c.q.shape[1], C):
        n = c.cut(a, a + C)
        b = n.g.cumsum(1)
        i = torch.arange(b.shape[1], device=b.device)
        seen = (i[:, None] >= i)[:, :, None, None]
        D = torch.where(seen, b[:, :, None] - b[:, None], -torch.inf).exp()
        P = torch.einsum("bihk,bjhk,bijhk->bhij", n.q, n.k, D)
        outs.append(c.s * (torch.einsum("bhij,bjhv->bihv", P, n.v) + read(n.q * b.exp(), S)))
        S = b[:, -1, ..., None].exp() * S + write(n.k * (b[:, -1:] - b).exp(), n.v)
    return torch.cat(outs, 1), S


RATIO = "decays as a ratio, e^b_i times e^-b_j: it overflows in strong chunks"
MIDDLE = "one anchor for a whole chunk, in its middle: it overflows in strong chunks"
DIFFERENCES = "decays as differences of running sums: not a number after a reset"
for C in CHUNKS:
    mistake(RATIO, DECAY, GATED, overflow=True)(partial(factored, C=C, anchor=torch.zeros_like))
    mistake(MIDDLE, DECAY, GATED, overflow=True)(partial(factored, C=C, anchor=lambda b: b[:, -1:] / 2))
for C in CHUNKS[:-1]:
    mistake(DIFFERENCES, DECAY, GATED, overflow=True)(partial(differences, C=C))


def in_log_space(c: Call, decays: Callable[[Tensor], tuple]) -> tuple[Tensor, Tensor]:
    """Chunks by log decays of their gates: from the start to i, from j to the end, from j to i, from start to end."""
    S, outs = c.S, []
    for a in range(0, c.q.shape[1], c.C):
        n = c.cut(a, a + c.C)
        since, until, between, whole = decays(n.g)
        P = torch.einsum("bihk,bjhk,bijhk->bhij", n.q, n.k, between.exp()).tril()
        outs.append(c.s * (torch.einsum("bhij,bjhv->bihv", P, n.v) + read(n.q * since.exp(), S)))
        S = whole.exp()[..., None] * S + write(n.k * until.exp(), n.v)
    return torch.cat(outs, 1), S


def cut_off(g: Tensor, least: float, carried: bool) -> tuple[Tensor, ...]:
    b = g.cumsum(1).clamp_min(least)
    return b, b[:, -1:] - b, at_most_0(b[:, :, None] - b[:, None]), b[:, -1] if carried else g.sum(1)


def from_the_end(g: Tensor, least: float) -> tuple[Tensor, ...]:
    g = g.clamp_min(least)
    b = g.sum(1, keepdim=True) - (g.flip(1).cumsum(1).flip(1) - g)
    return b, b[:, -1:] - b, at_most_0(b[:, :, None] - b[:, None]), b[:, -1]


def nothing_after_resets(g: Tensor, carried: bool) -> tuple[Tensor, ...]:
    """Differences of running sums, NaN from a reset on and taken for decays of 0; if `carried`, to the end, too."""

    def lost(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=-torch.inf, neginf=-torch.inf)

    b, until = g.cumsum(1), later(g.flip(1)).cumsum(1).flip(1)
    earlier = torch.ones(2 * [g.shape[1]], dtype=torch.bool, device=g.device).tril()[..., None, None]
    between = torch.where(earlier, b[:, :, None] - b[:, None], -torch.inf)
    return b, lost(b[:, -1:] - b) if carried else until, lost(between), b[:, -1]


for carried in (False, True):
    mistake("NaN after a gate of -inf (-inf minus -inf) taken for a decay to nothing", DECAY, GATED, chunked=True)(
        partial(in_log_space, decays=partial(nothing_after_resets, carried=carried))
    )


def clipped(c: Call, most: float) -> tuple[Tensor, Tensor]:
    """The ratio form whose growing exponential stays below e^most."""

    def turn(c, o, S):
        b = c.g.cumsum(1)
        P = torch.einsum("bihk,bjhk->bhij", c.q * b.exp(), c.k * (-b).clamp_max(most).exp()).tril()
        return c.s * (torch.einsum("bhij,bjhv->bihv", P, c.v) + read(c.q * b.exp(), c.S)), S

    return c.chunks(turn)


LEAST = (20.0, 60.0, 80.0, 88.0)  # where authors cut exponents off
for x in LEAST:
    mistake("decays as a ratio whose growing exponential is cut off", DECAY, GATED, chunked=True)(
        partial(clipped, most=x)
    )
    for carried in (False, True):
        mistake(f"running sums of gates cut off at -{x:g}", DECAY, GATED, chunked=True)(
            partial(in_log_space, decays=partial(cut_off, least=-x, carried=carried))
        )
FROM_THE_END = "running sums of gates made from the chunk's end: later gates change earlier tokens"
for least in (-1e3, -1e4, -torch.inf):
    kind = "rounding" if least > -torch.inf else "overflow"
    mistake(FROM_THE_END, DECAY, GATED, chunked=True, **{kind: True})(
        partial(in_log_space, decays=partial(from_the_end, least=least))
    )


# -- operands and states -----------------------------------------------------------------------
def tf32(x: Tensor) -> Tensor:
    """The nearest number with 10 bits of fraction."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class Low(torch.autograd.Function):
    """A product of rounded operands, as its gradients are; sums in float32."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return tf32(x) @ tf32(y)

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        return tf32(d) @ tf32(y.mT), tf32(x.mT) @ tf32(d)


def rounded(c: Call, multiply: Callable) -> tuple[Tensor, Tensor]:
    x = {"state": c.S, "scale": c.s, "dtype": torch.float32}
    return two_level(c.q, c.k, c.v, c.g, **x, C=64, mode=Products(multiply))


mistake("products in TF32, which Triton takes for float32 (or float16)", READ, LINEAR, rounding=True)(
    partial(rounded, multiply=Low.apply)
)
mistake("operands of products in bfloat16", READ, LINEAR, rounding=True)(
    partial(rounded, multiply=lambda x, y: Product.apply(x, y, torch.bfloat16))
)


def stored(c: Call, dtype: torch.dtype, first: bool, last: bool, back: bool) -> tuple[Tensor, Tensor]:
    """States of 16 bits between chunks, of which gates' gradients are made, too.

    Also the `first` and the `last` state, and, `back` through them, their gradients.
    """

    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype)

    def change(d: Tensor) -> Tensor:
        return low(d) if back else d

    T, S, outs = c.q.shape[1], c.S, []
    S = backward(S + (low(S) - S).detach() if first else S, change)
    for a in range(0, T, c.C):
        o, S, at_end = end_of_sums(c.cut(a, a + c.C, S=S))
        outs.append(o)
        kept = low(S).detach()
        S = (S + (kept - S.detach()) if last or a + c.C < T else S) + kept * at_end
        S = backward(S, change)
    return torch.cat(outs, 1), S


ENDS = ((False, False), (True, False), (True, True))  # whether the first state is of 16 bits, and the last
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
for name, dtype in LOW.items():
    for (first, last), back in product(ENDS, (False, True)):
        mistake(f"state kept in {name} between chunks", CARRY, LINEAR, rounding=True, chunked=True)(
            partial(stored, dtype=dtype, first=first, last=last, back=back)
        )
