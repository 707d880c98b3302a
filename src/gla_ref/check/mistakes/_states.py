"""Mistakes of mechanisms with a state: reads, writes, decays, chunks, packs, gradients (chapters 5 to 15)."""

from collections.abc import Callable
from itertools import pairwise
from math import log

import torch
from torch import Tensor

from .._emulate import Decayed
from ._calls import ANY_GATED, GATED, Call, Line, at_most_0, backward, decay, mistake, read, simple, write


# -- reads and writes --------------------------------------------------------------------------
@mistake("mask strict instead of inclusive: a token does not see itself", Line.READ)
def _(c):
    o, S = c.run()
    return o - c.own, S


simple("scale given by the caller ignored", Line.READ, lambda c: {"scale": None})
simple(
    "scale from V instead of K", Line.READ, lambda c: {"scale": c.v.shape[-1] ** -0.5 if c.scale is None else c.scale}
)

for n in (16, 32, 64, 128):

    @mistake(f"channels of K beyond the first {n} left out", Line.WRITE)
    def _(c, n=n):
        keep = torch.arange(c.k.shape[-1], device=c.k.device) < n
        return c.run(q=c.q * keep, k=c.k * keep, S=c.S * keep[:, None])


@mistake("normaliser summed over heads instead of time", Line.SUM, ("linear_attention",))
def _(c):
    o, S = c.run()
    over_time, over_heads = ((c.q * c.k.cumsum(axis)).sum(-1, keepdim=True) for axis in (1, 2))
    return o * over_time / over_heads, S


# -- decays ------------------------------------------------------------------------------------
simple("gate applied after the update instead of before", Line.DECAY, lambda c: {"k": c.k * c.g.exp()}, GATED)
simple("gate forgotten", Line.DECAY, lambda c: {"g": 0 * c.g.clamp_min(-1)}, ANY_GATED)
simple("natural log read as base 2", Line.DECAY, lambda c: {"g": c.g * log(2)}, ANY_GATED)
simple("1.44 taken for log2(e)", Line.DECAY, lambda c: {"g": c.g * (1.44 * log(2))}, ANY_GATED, fine=True)
simple("log gate taken for alpha", Line.DECAY, lambda c: {"g": c.g.log()}, ANY_GATED)


@mistake("running sum of gates in bfloat16", Line.DECAY, ANY_GATED)
def _(c):
    b = c.g.clamp_min(-1e4).cumsum(1)
    b = b + (b.to(torch.bfloat16).to(b.dtype) - b).detach()
    return c.run(g=at_most_0(torch.cat([b[:, :1], b.diff(dim=1)], 1)))


# -- from chunk to chunk -----------------------------------------------------------------------
def carry(name: str, wrong: Callable[[Call, Tensor], Tensor]) -> None:
    mistake(name, Line.CARRY, ANY_GATED, chunked=True)(lambda c: c.chunks(lambda c, o, S: (o, wrong(c, S))))


carry("writes not decayed to the end of their chunk", lambda c, S: decay(c.g) * c.S + write(c.k, c.written))
carry("state's decay from chunk to chunk in base 2", lambda c, S: S + (decay(c.g * log(2)) - decay(c.g)) * c.S)


@mistake("tail chunk lost", Line.CARRY, chunked=True)
def _(c):
    T = c.q.shape[1] // c.C * c.C
    o, S = c.cut(0, T).run()
    return torch.cat([o, 0 * c.v[:, T:]], 1), S


# -- initial and final states ------------------------------------------------------------------
simple("initial state ignored", Line.PACK, lambda c: {"S": torch.zeros_like(c.S)})


@mistake("final state not decayed through the last chunk", Line.FINAL, ANY_GATED, chunked=True)
def _(c):
    o, S = c.run()
    if not c.q.shape[1]:
        return o, S
    last = (c.q.shape[1] - 1) // c.C * c.C
    return o, S + (1 - decay(c.g[:, last:])) * c.cut(0, last).run()[1]


for name, last in (
    ("final state without the last chunk", lambda T, C: (T - 1) // C * C),
    ("final state without the last partial chunk", lambda T, C: T // C * C),
):
    for right_gradient in (False, True):

        @mistake(name, Line.FINAL, chunked=True)
        def _(c, last=last, right_gradient=right_gradient):
            o, S = c.run()
            early = c.cut(0, last(c.q.shape[1], c.C)).run()[1]
            return o, S + (early - S).detach() if right_gradient else early


# -- packed sequences --------------------------------------------------------------------------
@mistake("packed sequences leak into each other", Line.PACK, whole=True)
def _(c, ends):
    if ends is None:
        return c.run()
    S, outs, finals = c.S[:1], [], []
    for a, b in pairwise(ends):
        o, S = c.cut(a, b, S=S).run()
        outs.append(o)
        finals.append(S)
    return torch.cat(outs, 1), torch.cat(finals)


@mistake("boundaries of packed sequences one token too late", Line.PACK, whole=True)
def _(c, ends):
    if ends is not None:
        ends = [0, *(min(end + 1, ends[-1]) for end in ends[1:-1]), ends[-1]]
    return c.each(ends)


# -- gradients ---------------------------------------------------------------------------------
def without_dS(o: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    return o, backward(S, torch.zeros_like)


IGNORED = "gradient of the final state ignored"  # the second, also that of a sequence without tokens
mistake(IGNORED, Line.GRADIENT)(lambda c: without_dS(*c.run()))
mistake(IGNORED, Line.GRADIENT, whole=True)(lambda c, ends: without_dS(*c.each(ends)))


@mistake("dq without what the initial state adds", Line.GRADIENT)
def _(c):
    written, carried = c.run(S=torch.zeros_like(c.S)), c.run(v=torch.zeros_like(c.v), q=c.q.detach())
    return written[0] + carried[0], written[1] + carried[1]


@mistake("gate's gradient without S_T dS_T, with which its reverse sum begins", Line.GRADIENT, ANY_GATED)
def _(c):
    pulled: list[Tensor] = []

    def note(d: Tensor) -> Tensor:
        pulled.append(d)
        return d

    def change(d: Tensor) -> Tensor:
        return d - (S.detach() * pulled[0]).sum(-1)[:, None] if pulled else d

    o, S = c.run(g=backward(c.g, change))
    return o, backward(S, note)


@mistake("gradient of the state without scale where a chunk reads it", Line.GRADIENT, chunked=True)
def _(c):
    def turn(c, o, S):
        q = c.s * c.q * c.g.cumsum(1).exp()
        return o + read(q, backward(c.S, lambda d: d / c.s)) - read(q, c.S), S

    return c.chunks(turn)


@mistake("gradient of the state not decayed from chunk to chunk", Line.GRADIENT, ANY_GATED, chunked=True)
def _(c):
    def turn(c, o, S):
        kept = decay(c.g)
        return o, S + backward(c.S, lambda d: (1 - kept) * d) - c.S.detach()

    return c.chunks(turn)


# -- the gates' gradient by sums of q dq - k dk ------------------------------------------------
def summed(c: Call, g: Tensor) -> tuple[Tensor, Tensor]:
    """A call whose gates' gradient is made of q dq - k dk, summed to its end: o and S."""
    b = g.cumsum(1)
    q, k = Decayed.apply(c.q, b, c.q.dtype), Decayed.apply(c.k, -b, c.q.dtype)
    return c.run(q=q, k=k, g=c.g.detach())


@mistake(
    "gate's gradient summed to the end of the sequence, not of a chunk", Line.GRADIENT, GATED, rounding=True, long=True
)
def _(c):
    g = c.g.clamp_min(-1e4)  # finite, so that the sum of all less itself is 0
    o, S = summed(c, g)
    total = g.sum(1)
    return o, (total - total.detach()).exp()[..., None] * S


@mistake("gate's gradient without what comes after its chunk", Line.GRADIENT, GATED, chunked=True)
def _(c):
    return c.chunks(lambda c, o, S: summed(c, c.g))
