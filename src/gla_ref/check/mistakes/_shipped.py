"""Mistakes that public libraries have shipped, as the museum tells (appendix "Bugs that shipped")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...gates import segment_sum
from ._calls import Call
from ._core import CARRY, DECAY, GATED, GRADIENT, PACK, READ, SOFTMAX, mistake, simple
from ._linear import carry, decay, read, write


# -- decays ------------------------------------------------------------------------------------
def along_channels(c: Call) -> Tensor:
    """The decay of the d-th token to its chunk's end, in channel d of every key."""
    rest = pad(c.g[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1).exp()
    d = torch.arange(c.k.shape[-1], device=c.k.device)
    return rest[:, d % c.k.shape[1], :, d].permute(1, 2, 0)[:, None]


carry("writes' decay laid along channels", lambda c, S: decay(c.g) * c.S + write(c.k * along_channels(c), c.v), GATED)


simple("log gate taken for alpha", DECAY, lambda c: {"g": c.g.log()}, GATED)


def by_pairs(c: Call, pairs: Callable[[Call, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Chunks in which the tokens read one another by `pairs(c, D)` `[B, H, C, C]`, D the log decays between them."""

    def turn(c, o, S):
        P = pairs(c, segment_sum(c.g.transpose(1, 2)))
        own = torch.einsum("bhij,bjhv->bihv", P, c.v)[:, : c.v.shape[1]]
        return c.s * (own + read(c.q * c.g.cumsum(1).exp(), c.S)), S

    return c.chunks(turn)


def weights(c: Call, D: Tensor) -> Tensor:
    return torch.einsum("bihk,bjhk,bhijk->bhij", c.q, c.k, D.exp())


def one_for_zero(c: Call, D: Tensor, block: int) -> Tensor:
    """Weights of a chunk in which no decay of 1 passes the border between two blocks of tokens."""
    at = torch.arange(D.shape[2], device=D.device) // block
    across = (at[:, None] > at)[..., None]
    return weights(c, D.masked_fill(across & (D == 0), -torch.inf))


for parts in (2, 4, 16):
    mistake("decay of 1 taken for 0", DECAY, GATED, chunked=True)(
        lambda c, parts=parts: by_pairs(c, lambda n, D: one_for_zero(n, D, max(c.C // parts, 1)))
    )


@mistake("rows that fill up a chunk have a decay", DECAY, GATED, overflow=True, chunked=True)
def _(c):
    def pairs(n, D):
        rows = c.C - D.shape[2]
        b = n.g.transpose(1, 2).cumsum(2)
        D = torch.cat([D, -b[:, :, None].expand(-1, -1, rows, -1, -1)], 2)
        return weights(replace(n, q=pad(n.q, (0, 0, 0, 0, 0, rows))), D)

    return by_pairs(c, pairs)


def late(c: Call, D: Tensor, sub: int) -> Tensor:
    """Weights of a chunk whose sub-chunks read the tokens before them about their second token, not the first."""
    q, k, P, n = c.q.transpose(1, 2), c.k.transpose(1, 2), weights(c, D), D.shape[2]
    blocks = [P[:, :, :sub]]
    for a in range(sub, n, sub):
        b = min(a + 1, n - 1)
        since = torch.cat([-D[:, :, b, a:b], D[:, :, b : a + sub, b]], 2)
        before = (q[:, :, a : a + sub] * since.exp()) @ (k[:, :, :a] * D[:, :, b, :a].exp()).mT
        blocks.append(torch.cat([before, P[:, :, a : a + sub, a:]], -1))
    return torch.cat(blocks, 2)


for sub in (8, 16, 32):
    mistake("anchor of a sub-chunk one token late: it overflows", DECAY, GATED, overflow=True, chunked=True)(
        lambda c, sub=sub: by_pairs(c, lambda n, D: late(n, D, sub))
    )


# -- states ------------------------------------------------------------------------------------
for square in (False, True):  # a kernel may read other states right, or not take them

    @mistake("states read as V x K, carried right", READ, chunked=True)
    def _(c, square=square):
        def turn(c, o, S):
            K, V = c.S.shape[-2:]
            turned = c.S if square and K != V else c.S.reshape(*c.S.shape[:-2], V, K).mT
            return o + c.s * read(c.q * c.g.cumsum(1).exp(), turned - c.S), S

        return c.chunks(turn)


@mistake("chunk states summed over the wrong axis", CARRY, chunked=True)
def _(c):
    parts = [c.cut(a, a + c.C, S=torch.zeros_like(c.S)) for a in range(0, c.q.shape[1], c.C)]
    made = [n.run() for n in parts]
    totals = torch.stack([n.g.sum(1) for n in parts], 2)
    M = segment_sum(pad(totals, (0, 0, 1, 0))).exp()  # from chunk f to chunk t
    states = torch.einsum("bhtfk,fbhkv->fbhkv", M, torch.stack([c.S, *(S for _, S in made)]))
    o = [own + n.s * read(n.q * n.g.cumsum(1).exp(), S) for n, (own, _), S in zip(parts, made, states, strict=False)]
    return torch.cat(o, 1), states[-1]


def alone(name: str, wrong: Callable[[Call], tuple[Tensor, Tensor]], **more: bool) -> None:
    """A mistake about an initial state that is made where there is one sequence, packed or not."""

    @mistake(f"{name}, only where there is one sequence", PACK, whole=True, **more)
    def _(c, ends):
        return c.each(ends, wrong if len(c.S) == 1 else None)


def first_read(c: Call) -> tuple[Tensor, Tensor]:
    o, S = c.run()
    n = c.cut(0, c.C)
    return torch.cat([o[:, : c.C] - c.s * read(n.q * n.g.cumsum(1).exp(), c.S), o[:, c.C :]], 1), S


alone("initial state ignored", lambda c: c.run(S=torch.zeros_like(c.S)))
alone("the first chunk does not read the initial state", first_read, chunked=True)


# -- packed sequences --------------------------------------------------------------------------
@mistake("decays counted from the chunk's start, not the sequence's", PACK, GATED, whole=True, chunked=True)
def _(c, ends):
    spans = [*pairwise(ends or ())]
    kept = [c.g[:, a // c.C * c.C : a].sum(1).exp()[..., None] if a < e else torch.ones_like(c.S[:1]) for a, e in spans]
    return replace(c, S=c.S * torch.cat([x.expand_as(c.S[:1]) for x in kept]) if kept else c.S).each(ends)


@mistake("state from the pack's chunk grid", PACK, whole=True, chunked=True)
def _(c, ends):
    o, S = c.each(ends)
    spans, finals = [*pairwise(ends or ())], []
    for a, e in spans:
        whole = (e - a) // c.C * c.C
        at = a // c.C * c.C + whole
        n, (start, _) = max((n, span) for n, span in enumerate(spans) if span[0] <= at)
        taken = c.cut(start, at, S=c.S[n : n + 1]).run()[1]
        finals.append(c.cut(a + whole, e, S=taken).run()[1])
    return o, torch.cat(finals) if finals else S


def uphill(c: Call) -> tuple[Tensor, Tensor]:
    """Chunks whose writes have the gradient of k times a log decay."""

    def turn(c, o, S):
        rest = pad(c.g[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1).clamp_min(-1e6)  # o stays finite
        wrong = write(c.k * rest, c.v.detach()) - write(c.k * rest.exp(), c.v.detach())
        return o, S + (wrong - wrong.detach())

    return c.chunks(turn)


@mistake("dk with the log decay for the decay", GRADIENT, GATED, chunked=True)
def _(c):
    return uphill(c)


@mistake("dk with the log decay for the decay", GRADIENT, GATED, whole=True, chunked=True)
def _(c, ends):  # in packed sequences only
    return c.each(ends, uphill if ends else None)


# -- softmax attention, and what divides linear attention ----------------------------------------
for n in (2, 4, 8, 16):

    @mistake(f"mask for groups of {n}", "x_ij = -inf for j > i", SOFTMAX)
    def _(c, n=n):
        x = c.scores(ahead=n)
        past = c.k0.shape[1]
        i, j = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        seen = j - past <= (i // n * n + n - 1)[:, None]
        return c.weigh(x.masked_fill(~seen, -torch.inf).softmax(-1))


@mistake("normaliser summed over heads instead of time", "o_t / (q_t z_t), z_t = z_{t-1} + k_t", ("linear_attention",))
def _(c):
    o, S = c.run()
    over_time, over_heads = ((c.q * c.k.cumsum(axis)).sum(-1, keepdim=True) for axis in (1, 2))
    return o * over_time / over_heads, S
