"""Mistakes that are right on paper: what float32 and less do to them is wrong (chapters 10, 11 and 13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...rounding import Products
from .._emulate import Product, two_level
from ._calls import Call
from ._core import CARRY, DECAY, GATED, LINEAR, READ, mistake
from ._linear import read, write

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
for C in CHUNKS:
    mistake(RATIO, DECAY, GATED, overflow=True)(partial(factored, C=C, anchor=torch.zeros_like))
    mistake(MIDDLE, DECAY, GATED, overflow=True)(partial(factored, C=C, anchor=lambda b: b[:, -1:] / 2))
for C in CHUNKS[:-1]:
    mistake("decays as differences of running sums: not a number after a reset", DECAY, GATED, overflow=True)(
        partial(differences, C=C)
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


def rounded(c: Call, product: Callable) -> tuple[Tensor, Tensor]:
    x = {"state": c.S, "scale": c.s, "dtype": torch.float32}
    return two_level(c.q, c.k, c.v, c.g, **x, C=64, mode=Products(product))


mistake("products in TF32, which Triton takes for float32 (or float16)", READ, LINEAR, rounding=True)(
    partial(rounded, product=Low.apply)
)
mistake("operands of products in bfloat16", READ, LINEAR, rounding=True)(
    partial(rounded, product=lambda x, y: Product.apply(x, y, torch.bfloat16))
)


def stored(c: Call, C: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    S, outs = c.S, []
    for a in range(0, c.q.shape[1], C):
        o, S = c.cut(a, a + C, S=S).run()
        outs.append(o)
        S = S + (S.to(dtype).to(S.dtype) - S).detach()
    return torch.cat(outs, 1), S


for C in CHUNKS[:-1]:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        mistake(f"state kept in {name} between chunks", CARRY, LINEAR, rounding=True)(partial(stored, C=C, dtype=dtype))
