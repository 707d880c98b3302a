"""Mistakes of softmax attention beside the softmax: cache, heads, memory, backward (chapters 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ._calls import Attention
from ._core import GRADIENT, SOFTMAX, Misread, backward, contiguous, gradient, mistake
from ._softmax import CACHE, HEADS, OUT, PACKED, SCORES


# -- cache, heads, memory ----------------------------------------------------------------------
@mistake("cache ignored", CACHE, SOFTMAX)
def _(c):
    return replace(c, k0=c.k0[:, :0], v0=c.v0[:, :0]).run()[0], c.cache


@mistake("cache put behind the new tokens", CACHE, SOFTMAX)
def _(c):
    return c.run()[0], (torch.cat([c.k, c.k0], 1), torch.cat([c.v, c.v0], 1))


@mistake("gradient of the returned cache ignored", GRADIENT, SOFTMAX)
def _(c):
    o, cache = c.run()
    return o, tuple(backward(x, torch.zeros_like) for x in cache)


@mistake("sequences in a pack see each other", PACKED, SOFTMAX, whole=True)
def _(c, ends):
    return c.run()


@mistake("strides of q ignored: read as if contiguous", HEADS, SOFTMAX, whole=True)
def _(c, ends):
    return replace(c, q=Misread.apply(c.q, contiguous(c.q))).each(ends)


KEYS, VALUES = ("k", "k0"), ("v", "v0")
for name, those, axis in (
    ("keys of batch 0 for every batch", KEYS, 0),
    ("values of batch 0 for every batch", VALUES, 0),
    ("keys of head 0 for every head", KEYS, 2),
    ("values of head 0 for every head", VALUES, 2),
):

    @mistake(name, HEADS, SOFTMAX)
    def _(c, those=those, axis=axis):
        own = {n: getattr(c, n) for n in those}
        first = {n: x.narrow(axis, 0, 1).expand_as(x) for n, x in own.items()}
        return c.run(**first)[0], c.cache


@mistake("last channel of the keys masked off", SCORES, SOFTMAX)
def _(c):
    keep = torch.arange(c.k.shape[-1], device=c.k.device) < c.k.shape[-1] - 1
    return c.run(q=c.q * keep)


@mistake("last column of the values masked off", OUT, SOFTMAX)
def _(c):
    keep = torch.arange(c.v.shape[-1], device=c.v.device) < c.v.shape[-1] - 1
    o, cache = c.run()
    return o * keep, cache


# -- backward ----------------------------------------------------------------------------------
gradient("dq of attention without scale", "q", lambda d, c: d / c.s, SOFTMAX)


def without_cache(c: Attention, change: Callable[[Tensor], Tensor], n: str) -> tuple:
    """o with another gradient for one tensor; what the cache adds to it is right."""
    return c.run(**{n: backward(getattr(c, n), change)})[0], c.cache


@mistake("dk of attention without scale", GRADIENT, SOFTMAX)
def _(c):
    return without_cache(c, lambda d: d / c.s, "k")


@mistake("dv of attention added twice", GRADIENT, SOFTMAX)
def _(c):
    return without_cache(c, lambda d: 2 * d, "v")


@mistake("ds without the row sum D = o . do", GRADIENT, SOFTMAX)
def _(c):
    x = c.scores()
    p = (x - x.amax(-1, keepdim=True).detach()).exp()
    return c.weigh(p / p.sum(-1, keepdim=True).detach())


@mistake("D added to dp instead of subtracted", GRADIENT, SOFTMAX)
def _(c):
    x = c.scores()
    p = (x - x.amax(-1, keepdim=True).detach()).exp()
    total = p.sum(-1, keepdim=True)
    return c.weigh(p * total / total.detach() ** 2)


@mistake("do of the last query ignored", GRADIENT, SOFTMAX)
def _(c):
    o, cache = c.run()
    return backward(o, lambda d: torch.cat([d[:, :-1], 0 * d[:, -1:]], 1)), cache
