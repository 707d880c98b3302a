"""Mistakes of every mechanism with a state: reads, writes, chunks, states (chapters 5, 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._calls import Call
from ._core import CARRY, LINEAR, PACK, READ, STATES, WRITE, later, mistake, simple


def decay(g: Tensor) -> Tensor:
    """Total decay of a chunk, `[B, H, K, 1]`."""
    return g.sum(1)[..., None].exp()


def write(k: Tensor, v: Tensor) -> Tensor:
    """The sum of k^T v over a chunk."""
    return torch.einsum("bthk,bthv->bhkv", k, v)


def read(q: Tensor, S: Tensor) -> Tensor:
    return torch.einsum("bthk,bhkv->bthv", q, S)


def carry(name: str, wrong: Callable[[Call, Tensor], Tensor], mechanisms=STATES) -> None:
    mistake(name, CARRY, mechanisms, chunked=True)(lambda c: c.chunks(lambda c, o, S: (o, wrong(c, S))))


# -- reads and writes --------------------------------------------------------------------------
@mistake("mask strict instead of inclusive: a token does not see itself", READ)
def _(c):
    o, S = c.run()
    return o - c.own, S


@mistake("causal mask one too wide: a token sees the next one", READ)
def _(c):
    o, S = c.run()
    ahead = c.s * (c.q[:, :-1] * c.k[:, 1:]).sum(-1, keepdim=True) * c.written[:, 1:]
    return o + torch.cat([ahead, torch.zeros_like(o[:, :1])], 1), S


simple("scale forgotten", READ, lambda c: {"scale": 1.0})
simple("scale applied twice", READ, lambda c: {"scale": c.s * c.s})
simple("scale given by the caller ignored", READ, lambda c: {"scale": None})
simple("scale from V instead of K", READ, lambda c: {"scale": c.v.shape[-1] ** -0.5 if c.scale is None else c.scale})
simple("scale on k: the state carries it", READ, lambda c: {"k": c.s * c.k, "scale": 1.0})


simple("k of head 0 for every head", WRITE, lambda c: {"k": c.k[:, :, :1].expand_as(c.k)})
simple("k of batch 0 for every batch", WRITE, lambda c: {"k": c.k[:1].expand_as(c.k)})
simple("v of batch 0 for every batch", WRITE, lambda c: {"v": c.v[:1].expand_as(c.v)})
simple("q and k exchanged", READ, lambda c: {"q": c.k, "k": c.q})
simple("k of the previous token", WRITE, lambda c: {"k": later(c.k)})


@mistake("last column of v masked off", WRITE)
def _(c):
    keep = torch.arange(c.v.shape[-1], device=c.v.device) < c.v.shape[-1] - 1
    o, S = c.run(v=c.v * keep)
    return o * keep, S


@mistake("last channel of k masked off", WRITE)
def _(c):
    return c.run(k=c.k * (torch.arange(c.k.shape[-1], device=c.k.device) < c.k.shape[-1] - 1))


TILES = (16, 32, 64, 128)


def tail(name: str, kept: Callable[[int, int], int], tile: int) -> None:
    """Channels from kept(size, tile) on, of values or keys, that no program computes: 0 or never written."""

    def keep(x: Tensor) -> Tensor:
        n = x.shape[-1]
        return torch.arange(n, device=x.device) < kept(n, tile)

    @mistake(f"{name} of V left out", WRITE)
    def _(c):
        o, S = c.run(v=c.v * keep(c.v))
        return o, S

    @mistake(f"{name} of V left out", WRITE)
    def _(c):  # of the state, too
        return c.run(v=c.v * keep(c.v), S=c.S * keep(c.v))

    @mistake(f"{name} of V never written", WRITE)
    def _(c):
        o, S = c.run(v=c.v * keep(c.v))
        return o.masked_fill(~keep(c.v), torch.nan), S.masked_fill(~keep(c.v), torch.nan)

    @mistake(f"{name} of K left out", WRITE)
    def _(c):
        return c.run(q=c.q * keep(c.q), k=c.k * keep(c.k), S=c.S * keep(c.k)[:, None])


for n in TILES:
    tail(f"the tail beyond whole tiles of {n}", lambda size, n: size // n * n, n)
    tail(f"the tail beyond whole tiles of {n}", lambda size, n: size // n * n or size, n)
    tail(f"channels beyond the first {n}", min, n)


@mistake("scale missing where the state is read", READ, chunked=True)
def _(c):
    return c.chunks(lambda c, o, S: (o + (1 - c.s) * read(c.q * c.g.cumsum(1).exp(), c.S), S))


# -- from chunk to chunk -----------------------------------------------------------------------
@mistake("state reset between chunks", CARRY, chunked=True)
def _(c):
    first, S = c.cut(0, c.C).run()
    if c.q.shape[1] <= c.C:
        return first, S
    rest, S = c.cut(c.C, None, S=torch.zeros_like(c.S)).chunks(lambda c, o, S: c.run(S=torch.zeros_like(c.S)))
    return torch.cat([first, rest], 1), S


for n in (2, 3, 4):

    @mistake(f"state lost after {n} chunks", CARRY, chunked=True)
    def _(c, n=n):
        first, S = c.cut(0, n * c.C).run()
        rest, S = c.cut(n * c.C, None, S=0 * S if c.q.shape[1] > n * c.C else S).run()
        return torch.cat([first, rest], 1), S


carry("last token of a chunk lost from the state", lambda c, S: S - write(c.k[:, -1:], c.written[:, -1:]))
carry(
    "first token of a chunk lost from the state",
    lambda c, S: S - decay(c.g[:, 1:]) * write(c.k[:, :1], c.written[:, :1]),
)
carry("state kept in bfloat16 between chunks", lambda c, S: S + (S.to(torch.bfloat16).to(S.dtype) - S).detach(), LINEAR)
carry("gradient stops at chunk boundaries", lambda c, S: S.detach() if c.q.shape[1] == c.C else S)


@mistake("tail chunk lost", CARRY, chunked=True)
def _(c):
    T = c.q.shape[1] // c.C * c.C
    o, S = c.cut(0, T).run()
    return torch.cat([o, 0 * c.v[:, T:]], 1), S


@mistake("tail chunk unmasked: filled up with its last token", CARRY, LINEAR, chunked=True)
def _(c):
    n = -c.q.shape[1] % c.C
    o, S = c.run()
    return o, S + n * write(c.k[:, -1:], c.v[:, -1:])


@mistake("chunk boundary off by one: its first token unseen by the others", READ, LINEAR, chunked=True)
def _(c):
    def turn(c, o, S):
        first = c.s * read(c.q[:, 1:] * c.g[:, 1:].cumsum(1).exp(), write(c.k[:, :1], c.v[:, :1]))
        return torch.cat([o[:, :1], o[:, 1:] - first], 1), S

    return c.chunks(turn)


# -- states ------------------------------------------------------------------------------------
simple("initial state ignored", PACK, lambda c: {"S": torch.zeros_like(c.S)})
for n in (4, 8, 16):
    simple(f"initial state of head h mod {n}", PACK, lambda c, n=n: {"S": c.S[:, torch.arange(c.S.shape[1]) % n]})
simple("initial state read as V x K", PACK, lambda c: {"S": c.S.reshape(*c.S.shape[:2], *c.S.shape[:1:-1]).mT})


@mistake("initial state read but not carried to the end", PACK)
def _(c):
    return c.run()[0], c.run(S=torch.zeros_like(c.S))[1]


@mistake("initial state carried but not read", PACK)
def _(c):
    return c.run(S=torch.zeros_like(c.S))[0], c.run()[1]


@mistake("final state stored as V x K", "S_T")
def _(c):
    o, S = c.run()
    return o, S.mT.reshape(S.shape)


@mistake("final state without the last token", "S_T")
def _(c):
    return c.run()[0], c.cut(0, c.q.shape[1] - 1).run()[1]


@mistake("final state multiplied by scale", "S_T")
def _(c):
    o, S = c.run()
    return o, c.s * S


@mistake("last token of the sequence lost", WRITE)
def _(c):
    o, S = c.cut(0, c.q.shape[1] - 1).run()
    return torch.cat([o, 0 * c.v[:, -1:]], 1), S
