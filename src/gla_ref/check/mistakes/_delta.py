"""Mistakes of delta rules: the triangle and its inverse, what a key finds, value heads (chapters 20 and 21)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...rounding import Products
from ...triangular import doubling
from .._emulate import Product
from ._calls import DELTA, DELTA_GATED, Line, in_steps, mistake


def step(name: str, line: str, mechanisms: tuple[str, ...] = DELTA, **steps: Callable) -> None:
    """A delta rule with a wrong step, in chunks of the kernel's own length."""
    mistake(name, line, mechanisms, chunked=True)(lambda c: in_steps(c, c.C, **steps)[:2])


# -- the triangle, and what a key finds ---------------------------------------------------------
def by_powers(A: Tensor, last: int) -> Tensor:
    """The sum of (-A)^n up to n = last, one less than a power of two, by doubling."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Y, P, n = eye - A, A @ A, 1
    while n < last:
        Y, P, n = Y @ (eye + P), P @ P, 2 * n + 1
    return Y


step(
    "sign of A: earlier corrections of the chunk added, not subtracted",
    Line.SOLVE,
    triangle=lambda n: -(n.beta * n.weights(n.k)).tril(-1),
)
for last in (3, 7, 15, 31):
    step(f"triangle inverted by its powers up to A^{last} only", Line.SOLVE, inverse=partial(by_powers, last=last))


@mistake("keys find the state before the gate", Line.FIND, DELTA_GATED)
def _(c):
    S, outs = c.S, []
    for q, k, v, g, beta in zip(*(x.unbind(1) for x in (c.q, c.k, c.v, c.g, c.beta)), strict=True):
        found = (k[..., None] * S).sum(-2)
        S = g.exp()[..., None] * S + (beta[..., None] * k)[..., None] * (v - found)[..., None, :]
        outs.append(c.s * (q[..., None] * S).sum(-2))
    return (torch.stack(outs, 1), S) if outs else (c.v, S)


step("Gamma left out of the scores: pairs not decayed", Line.READ, DELTA_GATED, pairs=lambda n: (n.q @ n.k.mT).tril())


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

    step(name, Line.GRADIENT, triangle=triangle, found=found)


# -- right on paper ------------------------------------------------------------------------------
def doubled(A: Tensor, dtype: torch.dtype) -> Tensor:
    with Products(lambda x, y: Product.apply(x, y, dtype)):
        return doubling(A)


for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
    for inverse in (partial(doubled, dtype=dtype), lambda A, dtype=dtype: doubling(A.to(dtype)).to(A.dtype)):
        mistake(
            f"triangle inverted by doubling with operands in {name}", Line.SOLVE, DELTA, rounding=True, chunked=True
        )(lambda c, inverse=inverse: in_steps(c, c.C, inverse=inverse)[:2])
