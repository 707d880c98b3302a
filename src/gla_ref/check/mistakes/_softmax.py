"""Mistakes of softmax attention: scores, mask, running statistics, cache, gradients (chapters 1, 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import torch

from ._calls import GRADIENT, SOFTMAX, C, mistake, simple

SCORES, MASK, CACHE = ("x_ij = scale q_i k_j", "x_ij = -inf for j > i", "the cache of keys and values")
MAX, SUM, OUT = "m = max(m', x)", "d = d' exp(m' - m) + sum exp(x - m)", "o = o' exp(m' - m) + p v"

for name, scale in {
    "scores without scale": lambda c: 1.0,
    "scale of the scores: the caller's ignored": lambda c: None,
    "scale of the scores from V instead of K": lambda c: c.v.shape[-1] ** -0.5 if c.scale is None else c.scale,
    "exp2 taken for exp: scores in the wrong base": lambda c: c.s * log(2),
}.items():
    simple(name, SCORES, lambda c, scale=scale: {"scale": scale(c)}, SOFTMAX)


@mistake("causal mask one too wide: a query sees the next key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=1).softmax(-1))


@mistake("causal mask strict: a query does not see its own key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=-1).softmax(-1).nan_to_num(0.0))


@mistake("mask counted from the cache's first key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=-c.k0.shape[1]).softmax(-1).nan_to_num(0.0))


@mistake("last tile of keys lost", MASK, SOFTMAX)
def _(c):
    x = c.scores()
    whole = torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // C * C
    return c.weigh(x.masked_fill(~whole, -torch.inf).softmax(-1).nan_to_num(0.0))


for n in (2, 4, 8, 16):

    @mistake(f"mask for groups of {n}", MASK, SOFTMAX)
    def _(c, n=n):
        x = c.scores(ahead=n)
        past = c.k0.shape[1]
        i, j = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        seen = j - past <= (i // n * n + n - 1)[:, None]
        return c.weigh(x.masked_fill(~seen, -torch.inf).softmax(-1))


def online(name: str, line: str, turn: Callable) -> None:
    """Tile by tile of keys; `turn(d, o, r, total, pv)` returns (d, o), r = exp(m' - m), as the mistake has it."""

    def variant(c):
        x, m, d, o = c.scores(), torch.full_like(c.q[..., :1].transpose(1, 2), -torch.inf), 0, 0
        for a in range(0, x.shape[-1], C):
            tile = x[..., a : a + C]
            m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
            p = (tile - m_new).exp()
            pv = p @ c.cache[1][:, a : a + C].transpose(1, 2)
            d, o = turn(d, o, (m - m_new).exp(), p.sum(-1, keepdim=True), pv)
            m = m_new
        return (o / d).transpose(1, 2), c.cache

    mistake(name, line, SOFTMAX)(variant)


online("running sum not rescaled to the new maximum", SUM, lambda d, o, r, s, pv: (d + s, o * r + pv))
online("running output not rescaled to the new maximum", OUT, lambda d, o, r, s, pv: (d * r + s, o + pv))
online("nothing rescaled to the new maximum", MAX, lambda d, o, r, s, pv: (d + s, o + pv))


@mistake("no maximum subtracted", MAX, SOFTMAX)
def _(c):  # the same on paper: the range of float32 tells
    p = c.scores().float().exp()
    return c.weigh((p / p.sum(-1, keepdim=True)).to(c.q.dtype))


@mistake("cache ignored", CACHE, SOFTMAX)
def _(c):
    return replace(c, k0=c.k0[:, :0], v0=c.v0[:, :0]).run()[0], c.cache


@mistake("sequences in a pack see each other", "where a packed sequence begins", SOFTMAX, whole=True)
def _(c, ends):
    return c.run()


@mistake("ds without the row sum D = o . do", GRADIENT, SOFTMAX)
def _(c):
    x = c.scores()
    p = (x - x.amax(-1, keepdim=True).detach()).exp()
    return c.weigh(p / p.sum(-1, keepdim=True).detach())
