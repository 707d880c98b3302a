"""Mistakes that are right on paper: what float32 and less do to them is wrong (chapters 10, 11 and 12)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...gates import decay_to_end
from ...rounding import Products, tf32
from .._emulate import Product, corrected, two_level
from ._calls import ANY_GATED, DELTA_GATED, GATED, Call, Chunk, Line, at_most_0, in_steps, mistake


# -- exponents ---------------------------------------------------------------------------------
def anchored(c: Call, C: int, anchor: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Pairs of a chunk as one product of q e^(b_i - r) and k e^(r - b_j), r the anchor of the running sums b."""

    def up(n: Chunk) -> Tensor:
        return (n.since - anchor(n.since)).exp()

    def down(n: Chunk) -> Tensor:
        return n.k * (anchor(n.since) - n.since).exp()

    return in_steps(
        c,
        C,
        pairs=lambda n: ((n.q * up(n)) @ down(n).mT).tril(),
        triangle=lambda n: (n.beta * ((n.k * up(n)) @ down(n).mT)).tril(-1),
        keys=lambda n: down(n) * (n.since[..., -1:, :] - anchor(n.since)).exp(),
    )[:2]


RATIO = "decays as a ratio, e^b_i times e^-b_j: it overflows in strong chunks"
MIDDLE = "one anchor for a whole chunk, in its middle: it overflows in strong chunks"
for name, anchor in ((RATIO, torch.zeros_like), (MIDDLE, lambda b: b[..., -1:, :] / 2)):
    mistake(name, Line.DECAY, ANY_GATED, overflow=True, chunked=True)(lambda c, anchor=anchor: anchored(c, c.C, anchor))
    mistake(name, Line.DECAY, GATED, overflow=True)(partial(anchored, C=10**9, anchor=anchor))  # all tokens at once


def in_log_space(name: str, decays: Callable[[Tensor], tuple], mechanisms=GATED, **more: bool) -> None:
    """A mistake in a chunk's log decays; those from j to i are of all pairs, and earlier tokens see no later ones."""

    def unseen(g: Tensor) -> tuple[Tensor, ...]:
        since, until, between, whole = decays(g)
        return since, until, seen(between), whole

    mistake(name, Line.DECAY, mechanisms, chunked=True, **more)(lambda c: in_steps(c, c.C, decays=unseen)[:2])


def seen(between: Tensor, other: float = -torch.inf) -> Tensor:
    """The log decays of pairs, -inf (or what is given) for a token that is later than the one that reads it."""
    earlier = torch.ones(between.shape[-3:-1], dtype=torch.bool, device=between.device).tril()[..., None]
    return torch.where(earlier, between, other)


def differences(b: Tensor) -> Tensor:
    return b[..., :, None, :] - b[..., None, :, :]


def running_sums(g: Tensor) -> tuple[Tensor, ...]:
    b = g.cumsum(-2)
    return b, b[..., -1:, :] - b, differences(b), b[..., -1:, :]


def cut_off(g: Tensor, least: float, carried: bool) -> tuple[Tensor, ...]:
    b = g.cumsum(-2).clamp_min(least)
    whole = b[..., -1:, :] if carried else g.sum(-2, keepdim=True)
    return b, b[..., -1:, :] - b, at_most_0(differences(b)), whole


def from_the_end(g: Tensor, least: float) -> tuple[Tensor, ...]:
    g = g.clamp_min(least)
    b = g.sum(-2, keepdim=True) - (g.flip(-2).cumsum(-2).flip(-2) - g)
    return b, b[..., -1:, :] - b, at_most_0(differences(b)), b[..., -1:, :]


def nothing_after_resets(g: Tensor, carried: bool) -> tuple[Tensor, ...]:
    """Differences of running sums, NaN from a reset on and taken for decays of 0; if `carried`, to the end, too."""

    def lost(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=-torch.inf, neginf=-torch.inf)

    b, until, between, whole = running_sums(g)
    return b, lost(until) if carried else decay_to_end(g), lost(seen(between)), whole


in_log_space(
    "decays as differences of running sums: not a number after a reset", running_sums, ANY_GATED, overflow=True
)
for carried in (False, True):
    in_log_space(
        "NaN after a gate of -inf (-inf minus -inf) taken for a decay to nothing",
        partial(nothing_after_resets, carried=carried),
    )


@mistake(
    "gate outside the mask: above the diagonal infinity times 0", Line.DECAY, DELTA_GATED, overflow=True, chunked=True
)
def _(c):
    def pairs(n: Chunk, x: Tensor) -> Tensor:
        D = differences(n.since).exp() * seen(torch.ones_like(n.between), 0.0)
        return (x[..., :, None, :] * n.k[..., None, :, :] * D).sum(-1)

    return in_steps(c, c.C, pairs=lambda n: pairs(n, n.q), triangle=lambda n: (n.beta * pairs(n, n.k)).tril(-1))[:2]


def clipped(c: Call, most: float) -> tuple[Tensor, Tensor]:
    """The ratio form whose growing exponential stays below e^most."""
    return in_steps(
        c, c.C, pairs=lambda n: ((n.q * n.since.exp()) @ (n.k * (-n.since).clamp_max(most).exp()).mT).tril()
    )[:2]


for x in (20.0, 60.0, 80.0, 88.0):  # where authors cut exponents off
    mistake("decays as a ratio whose growing exponential is cut off", Line.DECAY, GATED, chunked=True)(
        partial(clipped, most=x)
    )
    for carried in (False, True):
        in_log_space(f"running sums of gates cut off at -{x:g}", partial(cut_off, least=-x, carried=carried))
for least in (-1e3, -1e4, -torch.inf):
    in_log_space(
        "running sums of gates made from the chunk's end: later gates change earlier tokens",
        partial(from_the_end, least=least),
        **{"rounding" if least > -torch.inf else "overflow": True},
    )


# -- operands ----------------------------------------------------------------------------------
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


def with_products(c: Call, multiply: Callable) -> tuple[Tensor, Tensor]:
    x = {"state": c.S, "scale": c.s, "dtype": torch.float32, "C": 64, "mode": Products(multiply)}
    if c.beta is None:
        return two_level(c.q, c.k, c.v, c.g, **x)
    return corrected(c.q, c.k, c.v, c.beta, c.g, **x)


mistake("products in TF32, which Triton takes for float32 (or float16)", Line.READ, rounding=True)(
    partial(with_products, multiply=Low.apply)
)
mistake("operands of products in bfloat16", Line.READ, rounding=True)(
    partial(with_products, multiply=lambda x, y: Product.apply(x, y, torch.bfloat16))
)
