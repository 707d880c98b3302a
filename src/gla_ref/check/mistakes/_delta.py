"""Mistakes of delta rules: what a key finds, the triangle and its inverse, strengths, value heads (chapters 20, 21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...gates import decay_to_end
from ...rounding import Products
from ...triangular import doubling
from .._emulate import Product
from ._calls import CARRY, DECAY, DELTA, READ, backward, eliminated, in_steps, mistake, simple, write
from ._calls import DELTA_GATED as GATED
from ._rounding import LOW

SOLVE, FIND, HEADS = "(I + A) v^ = beta (v - K S)", "v_t - k_t S_{t-1}", "value head h reads key head h // (HV / H)"
STRENGTH = "S_t = ... + beta_t k_t^T (v_t - k_t S_{t-1})"


def step(name: str, line: str, mechanisms: tuple[str, ...] = DELTA, **steps: Callable) -> None:
    """A delta rule with a wrong step, in chunks of the kernel's own length."""
    mistake(name, line, mechanisms, chunked=True)(lambda c: in_steps(c, c.C, **steps)[:2])


def eye(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


# -- what a key finds, and the triangle ----------------------------------------------------------
step("what a chunk's keys find in the state before it not subtracted", FIND, found=lambda n: 0 * n.v)
step("sign of A: earlier corrections of the chunk added, not subtracted", SOLVE, triangle=lambda n: -n.triangle())
step("A without beta", SOLVE, triangle=lambda n: n.weights(n.k).tril(-1))
step("A with the strength of the key that wrote", SOLVE, triangle=lambda n: (n.beta.mT * n.weights(n.k)).tril(-1))
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
step("Gamma left out of A: pairs not decayed", SOLVE, GATED, triangle=lambda n: (n.beta * (n.k @ n.k.mT)).tril(-1))
step("Gamma left out of the scores: pairs not decayed", READ, GATED, pairs=lambda n: (n.q @ n.k.mT).tril())
step("keys find the state of the chunk's start undecayed", FIND, GATED, found=lambda n: n.beta * (n.k @ n.S))
step("beta left out of what is written", STRENGTH, stored=lambda n: n.v)
step("beta twice in what is written", STRENGTH, stored=lambda n: n.beta**2 * n.v)
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


for name, own in (
    ("gradient of beta without what is erased", lambda n: (n.k, n.beta.detach())),
    ("dk without what the keys erase", lambda n: (n.k.detach(), n.beta)),
):

    def triangle(n, own=own):
        k, beta = own(n)
        return (beta * n.weights(k)).tril(-1)

    def found(n, own=own):
        k, beta = own(n)
        return beta * ((k * n.since.exp()) @ n.S)

    step(name, "the backward pass", triangle=triangle, found=found)
step("no gradient through the inverse", "the backward pass", invert=lambda A: eliminated(A).detach())
step(
    "gradient of the inverse with the wrong sign",
    "the backward pass",
    invert=lambda A: eliminated(backward(A, lambda d: -d)),
)


# -- right on paper ------------------------------------------------------------------------------
def doubled(A: Tensor, dtype: torch.dtype) -> Tensor:
    with Products(lambda x, y: Product.apply(x, y, dtype)):
        return doubling(A)


for name, dtype in LOW.items():
    for invert in (partial(doubled, dtype=dtype), lambda A, dtype=dtype: doubling(A.to(dtype)).to(A.dtype)):
        mistake(f"triangle inverted by doubling with operands in {name}", SOLVE, DELTA, rounding=True, chunked=True)(
            lambda c, invert=invert: in_steps(c, c.C, invert=invert)[:2]
        )
