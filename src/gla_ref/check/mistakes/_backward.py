"""Mistakes of every mechanism with a state: gradients, packed sequences, strides (chapters 15 and 11)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ._core import GATED, GRADIENT, LINEAR, PACK, READ, Contiguous, backward, gradient, mistake, state_term


# -- gradients ---------------------------------------------------------------------------------
@mistake("gradient of the final state ignored", GRADIENT)
def _(c):
    o, S = c.run()
    return o, backward(S, torch.zeros_like)


@mistake("gradient of the initial state lost", GRADIENT)
def _(c):
    return c.run(S=backward(c.S, torch.zeros_like))


@mistake("gradient of the initial state without the reads", GRADIENT)
def _(c):
    return c.run(S=c.S.detach())[0], c.run()[1]


gradient("dq without scale", "q", lambda d, c: d / c.s)
gradient("dk with scale twice", "k", lambda d, c: d * c.s)
gradient("dv added twice", "v", lambda d, c: 2 * d)
# of o alone: what comes back from the final state has no scale
for name, tensor in (("dk", "k"), ("dv", "v"), ("gate's gradient", "g"), ("gradient of the initial state", "S")):

    @mistake(f"{name} without scale", GRADIENT, GATED if tensor == "g" else LINEAR)
    def _(c, tensor=tensor):
        return c.run(**{tensor: backward(getattr(c, tensor), lambda d: d / c.s)})[0], c.run()[1]


for name, tensor in (("dq", "q"), ("gate's gradient", "g")):

    @mistake(f"{name} without what the initial state adds", GRADIENT, GATED if tensor == "g" else LINEAR)
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


# -- packed sequences, strides -----------------------------------------------------------------
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


@mistake("strides ignored: q read as if contiguous", READ, whole=True)
def _(c, ends):
    return replace(c, q=Contiguous.apply(c.q)).each(ends)
