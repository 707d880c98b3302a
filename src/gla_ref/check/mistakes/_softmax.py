"""Mistakes of softmax attention: scores, mask, running statistics (chapters 1, 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._calls import Attention, C
from ._core import SOFTMAX, mistake, simple

SCORES, MASK, CACHE = ("x_ij = scale q_i k_j", "x_ij = -inf for j > i", "the cache of keys and values")
MAX, SUM, OUT = "m = max(m', x)", "d = d' exp(m' - m) + sum exp(x - m)", "o = o' exp(m' - m) + p v"
DIVIDE, HEADS, PACKED = "o / d", "which head, which batch", "where a packed sequence begins"

# -- scores ------------------------------------------------------------------------------------
for name, scale in {
    "scores without scale": lambda c: 1.0,
    "scale applied twice to the scores": lambda c: c.s**2,
    "scale of the scores: the caller's ignored": lambda c: None,
    "scale of the scores from V instead of K": lambda c: c.v.shape[-1] ** -0.5 if c.scale is None else c.scale,
    "exp2 taken for exp: scores in the wrong base": lambda c: c.s * log(2),
    "factor 1 / ln 2 applied twice to the scores": lambda c: c.s / log(2),
}.items():
    simple(name, SCORES, lambda c, scale=scale: {"scale": scale(c)}, SOFTMAX)
simple("queries and keys exchanged", SCORES, lambda c: {"q": c.k, "k": c.q}, SOFTMAX)


def scored(name: str, line: str, change: Callable[[Attention], Tensor]) -> None:
    """A softmax over other scores."""
    mistake(name, line, SOFTMAX)(lambda c: c.weigh(change(c).softmax(-1)))


scored("causal mask forgotten", MASK, lambda c: c.scores(ahead=c.k.shape[1]))
scored("causal mask one too wide: a query sees the next key", MASK, lambda c: c.scores(ahead=1))
scored("mask as a product: later keys count with score 0", MASK, lambda c: c.scores().nan_to_num(neginf=0.0))


@mistake("causal mask strict: a query does not see its own key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=-1).softmax(-1).nan_to_num(0.0))


@mistake("mask counted from the cache's first key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=-c.k0.shape[1]).softmax(-1).nan_to_num(0.0))


@mistake("keys that fill the last tile up count with score 0", MASK, SOFTMAX)
def _(c):
    x = pad(c.scores(), (0, -(c.k0.shape[1] + c.k.shape[1]) % C))
    return c.weigh(x.softmax(-1)[..., : c.cache[0].shape[1]])


@mistake("last tile of keys lost", MASK, SOFTMAX)
def _(c):
    x = c.scores()
    whole = torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // C * C
    return c.weigh(x.masked_fill(~whole, -torch.inf).softmax(-1).nan_to_num(0.0))


@mistake("last tile of queries lost", MASK, SOFTMAX)
def _(c):
    o, cache = c.run()
    return torch.cat([o[:, : o.shape[1] // C * C], 0 * o[:, o.shape[1] // C * C :]], 1), cache


# -- running statistics ------------------------------------------------------------------------
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
online("running output rescaled twice", OUT, lambda d, o, r, s, pv: (d * r + s, o * r * r + pv))
online("running output of the last tile only", OUT, lambda d, o, r, s, pv: (d * r + s, pv))


def shifted(name: str, shift: Callable[[Tensor], Tensor | float]) -> None:
    """Another shift than the maximum: the same on paper, so it is the range of float32 that tells."""

    def variant(c):
        x = c.scores()
        p = (x - shift(x.amax(-1, keepdim=True))).float().exp()
        return c.weigh((p / p.sum(-1, keepdim=True)).to(x.dtype))

    mistake(name, MAX, SOFTMAX)(variant)


shifted("running maximum begins with 0", lambda m: m.clamp_min(0))
shifted("no maximum subtracted", lambda m: 0.0)


@mistake("output not divided by the sum", DIVIDE, SOFTMAX)
def _(c):
    x = c.scores()
    return c.weigh((x - x.amax(-1, keepdim=True)).exp())


@mistake("output divided by the sum twice", DIVIDE, SOFTMAX)
def _(c):
    x = c.scores()
    p = (x - x.amax(-1, keepdim=True)).exp()
    return c.weigh(p / p.sum(-1, keepdim=True) ** 2)
