"""Mistakes of softmax attention: its mask and its cache (chapters 1, 2 and 16)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ._calls import SOFTMAX, mistake

MASK, CACHE = "x_ij = -inf for j > i", "the cache of keys and values"


@mistake("mask counted from the cache's first key", MASK, SOFTMAX)
def _(c):
    return c.weigh(c.scores(ahead=-c.k0.shape[1]).softmax(-1).nan_to_num(0.0))


for n in (2, 4, 8, 16):

    @mistake(f"mask for groups of {n}", MASK, SOFTMAX)
    def _(c, n=n):
        x = c.scores(ahead=n)
        past = c.k0.shape[1]
        i, j = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        seen = j - past <= (i // n * n + n - 1)[:, None]
        return c.weigh(x.masked_fill(~seen, -torch.inf).softmax(-1))


@mistake("cache ignored", CACHE, SOFTMAX)
def _(c):
    return replace(c, k0=c.k0[:, :0], v0=c.v0[:, :0]).run()[0], c.cache
