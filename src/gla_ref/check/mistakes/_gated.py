"""Mistakes with gates: when, where and how often a decay applies (chapters 9, 10 and 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from .._emulate import Decayed
from ._calls import Call
from ._core import (
    CHANNELS,
    DECAY,
    GATED,
    GATES,
    GRADIENT,
    READ,
    Total,
    at_most_0,
    backward,
    gradient,
    later,
    mistake,
    simple,
    state_term,
)
from ._linear import carry, decay, read, write

simple("gate applied after the update instead of before", DECAY, lambda c: {"k": c.k * c.g.exp()}, GATED)
simple("gate forgotten", DECAY, lambda c: {"g": 0 * c.g.clamp_min(-1)}, GATES)
simple("gate of the previous token", DECAY, lambda c: {"g": later(c.g)}, GATES)
simple(
    "gate of the next token", DECAY, lambda c: {"g": torch.cat([c.g[:, 1:], torch.zeros_like(c.g[:, :1])], 1)}, GATES
)
simple("natural log read as base 2", DECAY, lambda c: {"g": c.g * log(2)}, GATES)
simple("factor 1 / ln 2 applied twice", DECAY, lambda c: {"g": c.g / log(2)}, GATES)
CONSTANTS = {f"{x} taken for log2(e)": x * log(2) for x in (1.4, 1.44, 1.442, 1.443, 1.4426, 1.45)}
CONSTANTS |= {f"{x} taken for ln 2": log(2) / x for x in (0.69, 0.693, 0.7)}
for name, times in CONSTANTS.items():
    simple(name, DECAY, lambda c, times=times: {"g": c.g * times}, GATES, fine=True)
simple("every decay applied twice", DECAY, lambda c: {"g": 2 * c.g}, GATES)
simple("gate of head 0 shared by all heads", DECAY, lambda c: {"g": c.g[:, :, :1].expand_as(c.g)}, GATES)
simple("gate of the head before", DECAY, lambda c: {"g": c.g.roll(1, 2)}, GATES)
simple("gate of the next head", DECAY, lambda c: {"g": c.g.roll(-1, 2)}, GATES)
simple("gate of batch 0 for every batch", DECAY, lambda c: {"g": c.g[:1].expand_as(c.g)}, GATES)
simple("one gate a head: channel 0 for all channels", DECAY, lambda c: {"g": c.g[..., :1].expand_as(c.g)}, CHANNELS)
simple("gate averaged over channels", DECAY, lambda c: {"g": c.g.mean(-1, keepdim=True).expand_as(c.g)}, CHANNELS)
simple("channels of the gate in reverse order", DECAY, lambda c: {"g": c.g.flip(-1)}, CHANNELS)
for least in (-1, -2, -5, -10):  # from about -15 on float32 cannot tell
    simple(f"strong gates cut off at {least}", DECAY, lambda c, least=least: {"g": c.g.clamp_min(least)}, GATES)
simple("gate -inf taken as no gate", DECAY, lambda c: {"g": c.g.masked_fill(c.g.isneginf(), 0)}, GATES)


@mistake("running sum of gates in bfloat16", DECAY, GATES)
def _(c):
    b = c.g.clamp_min(-1e4).cumsum(1)
    b = b + (b.to(torch.bfloat16).to(b.dtype) - b).detach()
    return c.run(g=at_most_0(torch.cat([b[:, :1], b.diff(dim=1)], 1)))


@mistake("decay of the current token lost in the read", READ, GATES)
def _(c):
    o, S = c.run(q=torch.cat([c.q[:, 1:], c.q[:, :1]], 1))  # at t: q_{t+1} S_t
    before = torch.cat([c.s * read(c.q[:, :1], c.S), o[:, :-1]], 1)
    return before + c.own, S


@mistake("decay of the current token doubled in the read", READ, GATES)
def _(c):
    again = replace(c, q=c.q * c.g.exp())
    o, S = again.run()
    return o - again.own + c.own, S


@mistake("the state read before its update", READ, GATES)
def _(c):
    o, S = c.run(q=torch.cat([c.q[:, 1:], c.q[:, :1]], 1))
    return torch.cat([c.s * read(c.q[:, :1], c.S), o[:, :-1]], 1), S


def inter(name: str, wrong: Callable[[Call], Tensor]) -> None:
    """A wrong factor on q where a chunk reads the state before it."""
    mistake(name, READ, GATES, chunked=True)(
        lambda c: c.chunks(lambda c, o, S: (o + c.s * read(c.q * (wrong(c) - c.g.cumsum(1).exp()), c.S), S))
    )


carry("state not decayed from chunk to chunk", lambda c, S: S + (1 - decay(c.g)) * c.S, GATES)
carry("state decayed twice from chunk to chunk", lambda c, S: S + decay(c.g) * (decay(c.g) - 1) * c.S, GATES)
carry("state's decay from chunk to chunk in base 2", lambda c, S: S + (decay(c.g * log(2)) - decay(c.g)) * c.S, GATES)
carry("writes not decayed to the end of their chunk", lambda c, S: decay(c.g) * c.S + write(c.k, c.written), GATES)
carry(
    "writes decayed by an inclusive sum: once too often",
    lambda c, S: decay(c.g) * c.S + write(c.k * c.g.flip(1).cumsum(1).flip(1).exp(), c.written),
    GATES,
)
carry(
    "state's decay from chunk to chunk stops one token early",
    lambda c, S: S + (decay(c.g[:, :-1]) - decay(c.g)) * c.S,
    GATES,
)
carry(
    "writes decayed from their chunk's start",
    lambda c, S: decay(c.g) * c.S + write(c.k * c.g.cumsum(1).exp(), c.written),
    GATES,
)
inter(
    "first gate of a chunk left out of the read",
    lambda c: torch.cat([torch.zeros_like(c.g[:, :1]), c.g[:, 1:]], 1).cumsum(1).exp(),
)
inter("exclusive instead of inclusive sum of gates in the read", lambda c: later(c.g).cumsum(1).exp())
inter("state read without its decay", lambda c: torch.ones_like(c.g))

gradient(
    "reverse sum of the gate's gradient not reversed",
    "g",
    lambda d, c: (d - torch.cat([d[:, 1:], 0 * d[:, :1]], 1)).cumsum(1),
    GATES,
)
gradient("gate's gradient one token late", "g", lambda d, c: later(d), GATES)
gradient("gate's gradient in base 2", "g", lambda d, c: d * log(2), GATES)
gradient("gate's gradient with the wrong sign", "g", lambda d, c: -d, GATES)
state_term("gate's gradient without the final state term", "g", GATES)


def summed(c: Call, g: Tensor) -> tuple[Tensor, Tensor]:
    """A call whose gates' gradient is made of q dq - k dk, summed to its end: o and S."""
    b = g.cumsum(1)
    q, k = Decayed.apply(c.q, b, c.q.dtype), Decayed.apply(c.k, -b, c.q.dtype)
    return c.run(q=q, k=k, g=c.g.detach())


@mistake("gate's gradient summed to the end of the sequence, not of a chunk", GRADIENT, GATED, rounding=True)
def _(c):
    g = c.g.clamp_min(-1e4)  # finite, so that the sum of all less itself is 0
    o, S = summed(c, g)
    total = g.sum(1)
    return o, (total - total.detach()).exp()[..., None] * S


def end_of_sums(c: Call, own: Callable[[Tensor], Tensor] = lambda d: d) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk whose gates' gradient is made of q dq - k dk, summed to its end (and changed by `own`): o, S, and 0.

    Times a state, and added to what leaves the chunk, that 0 brings the gradient what this state adds at the end.
    """
    return *summed(c, backward(c.g, own)), Total.apply(c.g)[..., None]


def by_sums(c: Call, own: Callable[[Tensor], Tensor], end: float) -> tuple[Tensor, Tensor]:
    """Chunks whose gates' gradient is made of a sum over the chunk's own terms, and `end` times what its state adds."""

    def turn(c, o, S):
        o, S, change = end_of_sums(c, own)
        return o, S + end * change * S.detach()

    return c.chunks(turn)


def forwards(d: Tensor) -> Tensor:
    """The sum over a token's terms and those before it, made of that over its own and those behind it."""
    return (d - torch.cat([d[:, 1:], 0 * d[:, :1]], 1)).cumsum(1)


for name, own, end in (
    ("gate's gradient without what comes after its chunk", lambda d: d, 0.0),
    ("gate's gradient summed from its chunk's first token on", forwards, 1.0),
    ("gate's gradient summed from its chunk's first token on, without what comes after", forwards, 0.0),
):
    mistake(name, GRADIENT, GATED, chunked=True)(lambda c, own=own, end=end: by_sums(c, own, end))
