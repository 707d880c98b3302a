"""Mistakes of every mechanism with a state: gradients, packed sequences, strides (chapters 15 and 11)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ._core import (
    CHANNELS,
    GATES,
    GRADIENT,
    PACK,
    READ,
    STATES,
    Misread,
    backward,
    contiguous,
    gradient,
    mistake,
    state_term,
)
from ._linear import decay, read


# -- gradients ---------------------------------------------------------------------------------
@mistake("gradient of the final state ignored", GRADIENT)
def _(c):
    o, S = c.run()
    return o, backward(S, torch.zeros_like)


@mistake("gradient of the final state ignored", GRADIENT, whole=True)
def _(c, ends):  # also that of a sequence without tokens
    o, S = c.each(ends)
    return o, backward(S, torch.zeros_like)


@mistake("gradient of the initial state lost", GRADIENT)
def _(c):
    return c.run(S=backward(c.S, torch.zeros_like))


@mistake("gradient of the initial state without the reads", GRADIENT)
def _(c):
    return c.run(S=c.S.detach())[0], c.run()[1]


gradient("dq without scale", "q", lambda d, c: d / c.s)
gradient("dk with scale twice", "k", lambda d, c: d * c.s)
gradient("dk with the default scale", "k", lambda d, c: d / c.s * c.q.shape[-1] ** -0.5)
gradient("dv added twice", "v", lambda d, c: 2 * d)
# of o alone: what comes back from the final state has no scale
for name, tensor in (("dk", "k"), ("dv", "v"), ("gate's gradient", "g"), ("gradient of the initial state", "S")):

    @mistake(f"{name} without scale", GRADIENT, GATES if tensor == "g" else STATES)
    def _(c, tensor=tensor):
        return c.run(**{tensor: backward(getattr(c, tensor), lambda d: d / c.s)})[0], c.run()[1]


for name, tensor in (("dq", "q"), ("gate's gradient", "g")):

    @mistake(f"{name} without what the initial state adds", GRADIENT, GATES if tensor == "g" else STATES)
    def _(c, tensor=tensor):
        written = c.run(S=torch.zeros_like(c.S))
        carried = c.run(v=torch.zeros_like(c.v), **{tensor: getattr(c, tensor).detach()})
        return written[0] + carried[0], written[1] + carried[1]


state_term("dv without the final state term", "v")
state_term("dk without the final state term", "k")


@mistake("last token of do ignored", GRADIENT)
def _(c):
    o, S = c.run()
    return backward(o, lambda d: torch.cat([d[:, :-1], 0 * d[:, -1:]], 1)), S


@mistake("gradient of the state without scale where a chunk reads it", GRADIENT, chunked=True)
def _(c):
    def turn(c, o, S):
        q = c.s * c.q * c.g.cumsum(1).exp()
        return o + read(q, backward(c.S, lambda d: d / c.s)) - read(q, c.S), S

    return c.chunks(turn)


@mistake("gradient of the state not decayed from chunk to chunk", GRADIENT, GATES, chunked=True)
def _(c):
    def turn(c, o, S):
        kept = decay(c.g)
        return o, S + backward(c.S, lambda d: (1 - kept) * d) - c.S.detach()

    return c.chunks(turn)


@mistake("gradient of the initial state not taken through the first chunk", GRADIENT, chunked=True)
def _(c):
    first, S = c.cut(0, c.C, S=c.S.detach()).run()
    rest, S = c.cut(c.C, None, S=S + c.S - c.S.detach()).run()
    return torch.cat([first, rest], 1), S


@mistake("a chunk reads the state behind it, not the one before", READ, chunked=True)
def _(c):
    return c.chunks(lambda c, o, S: (o + c.s * read(c.q * c.g.cumsum(1).exp(), S - c.S), S))


@mistake("the first chunk does not read the initial state", READ, chunked=True)
def _(c):
    o, S = c.run()
    n = c.cut(0, c.C)
    return torch.cat([o[:, : c.C] - c.s * read(n.q * n.g.cumsum(1).exp(), c.S), o[:, c.C :]], 1), S


@mistake("final state without the last chunk", "S_T", chunked=True)
def _(c):  # stored wrong, its gradient is right
    o, S = c.run()
    early = c.cut(0, (c.q.shape[1] - 1) // c.C * c.C).run()[1]
    return o, S + (early - S).detach()


@mistake("final state without the last partial chunk", "S_T", chunked=True)
def _(c):
    return c.run()[0], c.cut(0, c.q.shape[1] // c.C * c.C).run()[1]


@mistake("final state without the last partial chunk", "S_T", chunked=True)
def _(c):  # stored wrong, its gradient is right
    o, S = c.run()
    early = c.cut(0, c.q.shape[1] // c.C * c.C).run()[1]
    return o, S + (early - S).detach()


@mistake("the state's part of dq decayed to the chunk's end instead of from its start", GRADIENT, GATES, chunked=True)
def _(c):
    def turn(c, o, S):
        right, wrong = c.q * c.g.cumsum(1).exp(), c.q * (c.g.flip(1).cumsum(1).flip(1) - c.g).exp()
        return o + c.s * (read(wrong + (right - wrong).detach(), c.S) - read(right, c.S)), S

    return c.chunks(turn)


# -- packed sequences, strides -----------------------------------------------------------------
@mistake("gate's gradient summed across packed sequences", GRADIENT, GATES, whole=True)
def _(c, ends):
    def change(d):
        pieces = d.split([b - a for a, b in zip(ends, ends[1:], strict=False)], 1)
        terms = [x - torch.cat([x[:, 1:], 0 * x[:, :1]], 1) for x in pieces]
        return torch.cat(terms, 1).flip(1).cumsum(1).flip(1)

    return c.each(ends) if ends is None else replace(c, g=backward(c.g, change)).each(ends)


@mistake("packed sequences leak into each other", PACK, whole=True)
def _(c, ends):
    if ends is None:
        return c.run()
    S, outs, finals = c.S[:1], [], []
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        S = c.S[:1] if n == 0 else S
        o, S = c.cut(a, b, S=S).run()
        outs.append(o)
        finals.append(S)
    return torch.cat(outs, 1), torch.cat(finals)


@mistake("initial state of sequence 0 for every sequence", PACK, whole=True)
def _(c, ends):
    return replace(c, S=c.S[:1].expand_as(c.S)).each(ends)


@mistake("final state of an empty sequence is zero", PACK, whole=True)
def _(c, ends):
    o, S = c.each(ends)
    if ends is not None:
        full = [float(a < b) for a, b in zip(ends, ends[1:], strict=False)]
        S = S * torch.tensor(full, dtype=S.dtype, device=S.device)[:, None, None, None]
    return o, S


for name, by in (("late", 1), ("early", -1)):

    @mistake(f"boundaries of packed sequences one token too {name}", PACK, whole=True)
    def _(c, ends, by=by):
        if ends is not None:
            ends = [0, *(min(max(end + by, 0), ends[-1]) for end in ends[1:-1]), ends[-1]]
        return c.each(ends)


for n, mechanisms in (("q", STATES), ("k", STATES), ("v", STATES), ("g", CHANNELS)):

    @mistake(f"strides ignored: {n} read as if contiguous", READ, mechanisms, whole=True, astray=True)
    def _(c, ends, n=n):
        x = getattr(c, n)
        return replace(c, **{n: Misread.apply(x, contiguous(x))}).each(ends)

    @mistake(f"batch and head of {n} taken apart in the wrong order", READ, GATES if n == "g" else STATES)
    def _(c, n=n):
        x = getattr(c, n)
        B, _, H, _ = x.shape
        program = torch.arange(B * H, device=x.device).view(B, H)
        return c.run(**{n: x[program % B, :, program // B].transpose(1, 2)})


for n, mechanisms in (("k", STATES), ("g", CHANNELS)):

    @mistake(f"strides of q taken for those of {n}", READ, mechanisms, whole=True, astray=True)
    def _(c, ends, n=n):
        return replace(c, **{n: Misread.apply(getattr(c, n), c.q.stride())}).each(ends)
