"""Mistakes of delta rules: what a key finds, the triangle and its inverse, strengths, value heads (chapters 20, 21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ...chunks import heads_first, scores
from ...gates import decay_from_start, decay_to_end
from ...rounding import Products
from ...triangular import doubling
from .._emulate import Product
from .._emulate import corrected as emulated
from ._calls import CARRY, DECAY, DELTA, GATES, READ, Call, backward, corrected, eliminated, mistake, simple, write
from ._rounding import CHUNKS, DIFFERENCES, ENDS, LOW, MIDDLE, RATIO, Low

SOLVE, FIND, HEADS = "(I + A) v^ = beta (v - K S)", "v_t - k_t S_{t-1}", "value head h reads key head h // (HV / H)"
STRENGTH = "S_t = ... + beta_t k_t^T (v_t - k_t S_{t-1})"
GATED = tuple(m for m in DELTA if m in GATES)


class Chunk:
    """The tensors of a chunk's call, heads first."""

    def __init__(self, n: Call):
        self.q, self.k, self.v, self.g = (heads_first(getattr(n, name)) for name in ("q", "k", "v", "g"))
        self.beta = heads_first(n.beta[..., None])


def step(name: str, line: str, mechanisms: tuple[str, ...] = DELTA, **steps: Callable) -> None:
    """A delta rule with a wrong step, in chunks of the kernel's own length."""
    mistake(name, line, mechanisms, chunked=True)(lambda c: corrected(c, c.C, **steps)[:2])


def eye(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


# -- what a key finds, and the triangle ----------------------------------------------------------
step("what a chunk's keys find in the state before it not subtracted", FIND, found=lambda n, x: 0 * x)
step("sign of A: earlier corrections of the chunk added, not subtracted", SOLVE, triangle=lambda n, A: -A)
step("A without beta", SOLVE, triangle=lambda n, A: scores(Chunk(n).k, Chunk(n).k, Chunk(n).g).tril(-1))
step(
    "A with the strength of the key that wrote",
    SOLVE,
    triangle=lambda n, A: (Chunk(n).beta.mT * scores(Chunk(n).k, Chunk(n).k, Chunk(n).g)).tril(-1),
)
step("inverse of the triangle transposed", SOLVE, invert=lambda A: eliminated(A).mT)
step("values not corrected within a chunk: the state at its start serves all its keys", SOLVE, invert=eye)
step("triangle inverted to first order: I - A", SOLVE, invert=lambda A: eye(A) - A)


def by_powers(A: Tensor, last: int) -> Tensor:
    """The sum of (-A)^n up to n = last, one less than a power of two, by doubling."""
    Y, P, n = eye(A) - A, A @ A, 1
    while n < last:
        Y, P, n = Y @ (eye(A) + P), P @ P, 2 * n + 1
    return Y


for last in (3, 7, 15, 31):
    step(f"triangle inverted by its powers up to A^{last} only", SOLVE, invert=partial(by_powers, last=last))


@mistake("keys find the state before the gate", FIND, GATED)
def _(c):
    S, outs = c.S, []
    for q, k, v, g, beta in zip(*(x.unbind(1) for x in (c.q, c.k, c.v, c.g, c.beta)), strict=True):
        found = (k[..., None] * S).sum(-2)
        S = g.exp()[..., None] * S + (beta[..., None] * k)[..., None] * (v - found)[..., None, :]
        outs.append(c.s * (q[..., None] * S).sum(-2))
    return (torch.stack(outs, 1), S) if outs else (c.v, S)


@mistake("log gate taken for alpha", DECAY, GATED)
def _(c):
    return c.run(g=c.g.log())


@mistake("values carried to the next chunk instead of corrections", CARRY, DELTA, chunked=True)
def _(c):
    def turn(c, o, S):
        k = c.k * decay_to_end(c.g.transpose(1, 2)).transpose(1, 2).exp()
        return o, S + write(k, c.v - c.written)

    return c.chunks(turn)


# -- gates, strengths, heads, gradients ----------------------------------------------------------
step(
    "Gamma left out of A: pairs not decayed",
    SOLVE,
    GATED,
    triangle=lambda n, A: (Chunk(n).beta * (Chunk(n).k @ Chunk(n).k.mT)).tril(-1),
)
step(
    "Gamma left out of the scores: pairs not decayed",
    READ,
    GATED,
    weights=lambda n, P: (Chunk(n).q @ Chunk(n).k.mT).tril(),
)
step(
    "keys find the state of the chunk's start undecayed",
    FIND,
    GATED,
    found=lambda n, x: Chunk(n).beta * (Chunk(n).k @ n.S),
)
step("beta left out of what is written", STRENGTH, stored=lambda n, x: heads_first(n.v))
step("beta twice in what is written", STRENGTH, stored=lambda n, x: Chunk(n).beta * x)
simple(
    "beta left out of what is erased",
    STRENGTH,
    lambda c: {"v": c.beta[..., None] * c.v, "beta": torch.ones_like(c.beta)},
    DELTA,
)
simple("strengths clamped to 1", STRENGTH, lambda c: {"beta": c.beta.clamp_max(1)}, DELTA)
simple("keys normalised again", FIND, lambda c: {"k": c.k / c.k.norm(dim=-1, keepdim=True).clamp_min(1e-6)}, DELTA)


@mistake("value heads grouped wrongly: h reads key head h mod H", HEADS, DELTA, whole=True)
def _(c, ends):
    n = c.v.shape[2] // c.q.shape[2]
    return replace(c, q=c.q.repeat(1, 1, n, 1), k=c.k.repeat(1, 1, n, 1)).each(ends)


def erased(n: Call, k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The triangle and what is found in the state, by keys that search and strengths of their own."""
    it = Chunk(n)
    return (beta * scores(k, it.k, it.g)).tril(-1), beta * ((k * decay_from_start(it.g).exp()) @ n.S)


for name, own in (
    ("gradient of beta without what is erased", lambda it: (it.k, it.beta.detach())),
    ("dk without what the keys erase", lambda it: (it.k.detach(), it.beta)),
):
    step(
        name,
        "the backward pass",
        triangle=lambda n, A, own=own: erased(n, *own(Chunk(n)))[0],
        found=lambda n, x, own=own: erased(n, *own(Chunk(n)))[1],
    )
step("no gradient through the inverse", "the backward pass", invert=lambda A: eliminated(A).detach())
step(
    "gradient of the inverse with the wrong sign",
    "the backward pass",
    invert=lambda A: eliminated(backward(A, lambda d: -d)),
)


# -- right on paper ------------------------------------------------------------------------------
def anchored(c: Call, C: int, anchor: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Pairs as products of what is decayed from an anchor r of the running sums b: e^(b_i - r) e^(r - b_j)."""

    def parts(n):
        it = Chunk(n)
        b = it.g.cumsum(-2)
        return it, (b - anchor(b)).exp(), it.k * (anchor(b) - b).exp(), b[..., -1:, :], anchor(b)

    def triangle(n, A):
        it, up, down, *_ = parts(n)
        return (it.beta * ((it.k * up) @ down.mT)).tril(-1)

    def weights(n, P):
        it, up, down, *_ = parts(n)
        return ((it.q * up) @ down.mT).tril()

    def after(n, S, w):
        _, _, down, end, r = parts(n)
        return end.exp().mT * n.S + (down * (end - r).exp()).mT @ w

    return corrected(c, C, triangle=triangle, weights=weights, after=after)[:2]


def by_differences(c: Call, C: int, decays: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Decays of pairs of differences of running sums, and of the mask."""

    def between(n):
        b = Chunk(n).g.cumsum(-2)
        i = torch.arange(b.shape[-2], device=b.device)
        return decays(b[..., :, None, :] - b[..., None, :, :], (i[:, None] >= i)[..., None])

    def pairs(x, n):
        return (x[..., :, None, :] * Chunk(n).k[..., None, :, :] * between(n)).sum(-1)

    def triangle(n, A):
        return (Chunk(n).beta * pairs(Chunk(n).k, n)).tril(-1)

    return corrected(c, C, triangle=triangle, weights=lambda n, P: pairs(Chunk(n).q, n))[:2]


def masked(x: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, x, -torch.inf).exp()


OUTSIDE = "gate outside the mask: above the diagonal infinity times 0"
for C in CHUNKS[:-1]:
    mistake(RATIO, DECAY, GATED, overflow=True)(partial(anchored, C=C, anchor=torch.zeros_like))
    mistake(MIDDLE, DECAY, GATED, overflow=True)(partial(anchored, C=C, anchor=lambda b: b[..., -1:, :] / 2))
    mistake(DIFFERENCES, DECAY, GATED, overflow=True)(partial(by_differences, C=C, decays=masked))
    mistake(OUTSIDE, DECAY, GATED, overflow=True)(partial(by_differences, C=C, decays=lambda x, seen: x.exp() * seen))


def doubled(A: Tensor, dtype: torch.dtype) -> Tensor:
    with Products(lambda x, y: Product.apply(x, y, dtype)):
        return doubling(A)


for name, dtype in LOW.items():
    for invert in (partial(doubled, dtype=dtype), lambda A, dtype=dtype: doubling(A.to(dtype)).to(A.dtype)):
        mistake(f"triangle inverted by doubling with operands in {name}", SOLVE, DELTA, rounding=True, chunked=True)(
            lambda c, invert=invert: corrected(c, c.C, invert=invert)[:2]
        )


def rounded(c: Call, multiply: Callable) -> tuple[Tensor, Tensor]:
    x = {"state": c.S, "scale": c.s, "dtype": torch.float32}
    return emulated(c.q, c.k, c.v, c.beta, c.g, **x, C=64, mode=Products(multiply))


mistake("products in TF32, which Triton takes for float32 (or float16)", READ, DELTA, rounding=True)(
    partial(rounded, multiply=Low.apply)
)
mistake("operands of products in bfloat16", READ, DELTA, rounding=True)(
    partial(rounded, multiply=lambda x, y: Product.apply(x, y, torch.bfloat16))
)


def kept(c: Call, dtype: torch.dtype, first: bool, last: bool, back: bool) -> tuple[Tensor, Tensor]:
    """States of 16 bits between chunks, also the `first` and the `last` one, and, `back` through them, gradients."""

    def low(S: Tensor) -> Tensor:
        S = S + (S.to(dtype).to(S.dtype) - S).detach()
        return backward(S, lambda d: d.to(dtype).to(d.dtype)) if back else S

    T, S, outs = c.q.shape[1], low(c.S) if first else c.S, []
    for a in range(0, T, c.C):
        o, S = c.cut(a, a + c.C, S=S).run()
        outs.append(o)
        S = low(S) if last or a + c.C < T else S
    return torch.cat(outs, 1) if outs else c.v, S


for name, dtype in LOW.items():
    for (first, last), back in product(ENDS, (False, True)):
        mistake(f"state kept in {name} between chunks", CARRY, DELTA, rounding=True, chunked=True)(
            partial(kept, dtype=dtype, first=first, last=last, back=back)
        )
