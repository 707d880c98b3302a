"""The parts of a mistake: a call of a mechanism, right by itself, to be cut and changed (chapters 1 and 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import gla
from ..._contract import compute_dtype, per_sequence, state_shape
from ...chunks import heads_first
from ...gates import decay_from_start, decay_to_end, segment_sum
from ...mechanisms import MECHANISMS
from ...triangular import elimination
from .. import _mechanisms
from .._cases import C
from .._emulate import by_channel

KINDS = _mechanisms.MECHANISMS
SOFTMAX = tuple(m for m, kind in KINDS.items() if kind.cache)
# one state, and writes that do not depend on it
LINEAR = tuple(m for m, kind in KINDS.items() if not kind.cache and not kind.named("strength"))
DELTA = tuple(m for m, kind in KINDS.items() if kind.named("strength"))  # writes that correct the state
STATES = LINEAR + DELTA
GATED = tuple(m for m in LINEAR if KINDS[m].named("gate"))
ANY_GATED = tuple(m for m in STATES if KINDS[m].named("gate"))
DELTA_GATED = tuple(m for m in DELTA if m in ANY_GATED)


class Line:
    """The lines of the recurrence that mistakes touch, as a report names them."""

    DECAY, READ, WRITE = "S_t = exp(g_t) S_{t-1} + ...", "o_t = scale q_t S_t", "S_t = ... + k_t^T v_t"
    CARRY, GRADIENT, PACK = "S_[n+1] from S_[n]: chunk to chunk", "the backward pass", "S_0 of each sequence"
    FINAL, SOLVE, FIND = "S_T", "(I + A) v^ = beta (v - K S)", "v_t - k_t S_{t-1}"
    SUM, MASK = "o_t / (q_t z_t), z_t = z_{t-1} + k_t", "x_ij = -inf for j > i"
    GROUP, HEAD = "value head h reads key head h // (HV / H)", "which head, which batch entry"
    CACHE = "the cache of keys and values"


@dataclass(frozen=True)
class Mistake:
    """Its name, the line of the recurrence it touches, the wrong variant, and how it wants to be called."""

    name: str
    line: str
    variant: Callable | None = None  # none where a report makes up a name for what it sees
    mechanisms: tuple[str, ...] = ()
    whole: bool = False  # it gets all packed sequences at once, with their boundaries
    rounding: bool = False  # right in float64: it is how float32 rounds there that is too wrong
    fine: bool = False  # nothing but float32 is exact enough to show it
    overflow: bool = False  # right in float64: what float32 cannot hold is not finite
    chunked: bool = False  # it happens at the boundaries of chunks, whose length is the kernel's own
    long: bool = False  # it shows in long sequences only

    @property
    def right_on_paper(self) -> bool:
        """Whether it is right in float64."""
        return self.rounding or self.overflow


MISTAKES: list[Mistake] = []


def mistake(name: str, line: str, mechanisms: tuple[str, ...] = STATES, **more: bool):
    def add(variant):
        MISTAKES.append(Mistake(name, line, variant, mechanisms, **more))
        return variant

    return add


def simple(name: str, line: str, changes: Callable[[Call], dict], mechanisms=STATES, **more: bool) -> None:
    """A mistake that is the right computation on wrong arguments."""
    mistake(name, line, mechanisms, **more)(lambda c: c.run(**changes(c)))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return ctx.change(d), None


def backward(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """x, with another gradient."""
    return _Backward.apply(x, change)


def at_most_0(x: Tensor) -> Tensor:
    """min(x, 0) with a gradient of 1 everywhere; `clamp_max` passes none at 0 in some releases of PyTorch."""
    return x - x.detach().clamp_min(0)


def decay(g: Tensor) -> Tensor:
    """Total decay of a chunk, `[B, H, K, 1]`."""
    return g.sum(1)[..., None].exp()


def write(k: Tensor, v: Tensor) -> Tensor:
    """The sum of k^T v over a chunk."""
    return torch.einsum("bthk,bthv->bhkv", k, v)


def read(q: Tensor, S: Tensor) -> Tensor:
    return torch.einsum("bthk,bhkv->bthv", q, S)


@dataclass(frozen=True)
class Call:
    """A call of a linear mechanism: its tensors, scale, the state S before the first token; right by itself.

    Mechanisms with one gate a head, or none, are calls whose g `[B, T, H, K]` is the same for all channels, or 0.
    C is the chunk of a mistake at chunk boundaries. Only a delta rule has a beta. Its keys are repeated for their value
    heads in the calls that each sequence makes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float | None
    S: Tensor
    C: int = C
    beta: Tensor | None = None

    @property
    def tokens(self) -> dict[str, Tensor]:
        """The tensors with a time axis, by name."""
        names = MECHANISMS["gla" if self.beta is None else "kda"].required
        return {n: getattr(self, n) for n in names}

    @property
    def s(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def written(self) -> Tensor:
        """The values that tokens add to the state under their keys; with a beta, the corrections."""
        return self.v if self.beta is None else in_steps(self)[2]

    @property
    def own(self) -> Tensor:
        """The output that a token reads from its own write."""
        return self.s * (self.q * self.k).sum(-1, keepdim=True) * self.written

    @property
    def wide(self) -> Call:
        """The same with each key head repeated for the value heads that read it."""
        n = self.v.shape[2] // self.q.shape[2]
        return self if n == 1 else replace(self, q=self.q.repeat_interleave(n, 2), k=self.k.repeat_interleave(n, 2))

    def run(self, **changes) -> tuple[Tensor, Tensor]:
        c = replace(self, **changes)
        if not c.q.shape[1]:
            return c.v, c.S
        if c.beta is not None:
            return in_steps(c)[:2]
        return gla.chunkwise.__wrapped__(c.q, c.k, c.v, c.g, scale=c.s, initial_state=c.S, C=16)

    def cut(self, a: int, b: int | None, **changes) -> Call:
        return replace(self, **{n: x[:, a:b] for n, x in self.tokens.items()}, **changes)

    def chunks(self, turn: Callable) -> tuple[Tensor, Tensor]:
        """Chunk by chunk; `turn(c, o, S)` gets each chunk's call and right results and returns (o, S) to go on with."""
        S, outs = self.S, []
        for a in range(0, self.q.shape[1], self.C):
            c = self.cut(a, a + self.C, S=S)
            o, S = turn(c, *c.run())
            outs.append(o)
        return torch.cat(outs, 1), S

    def each(self, ends: list[int] | None, variant: Callable | None = None) -> tuple[Tensor, Tensor]:
        """A variant, or the right computation, of every packed sequence by itself."""

        def one(S, **x):
            o, S = (variant or Call.run)(replace(self, **x, S=S).wide)
            return (o,), (S,)

        (o,), (S,) = per_sequence(one, ends, self.tokens, {"S": self.S})
        return o, S


def decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log decays of a chunk's gates: from its start to i, from j to its end, from j to i, from start to end."""
    return decay_from_start(g), decay_to_end(g), segment_sum(g), g.sum(-2, keepdim=True)


class Chunk:
    """A chunk of a call of C tokens, the last one of fewer: `[B, H, C, ...]`, its log :func:`decays`, right steps."""

    def __init__(self, c: Call, C: int, decays: Callable):
        self.q, self.k, self.v, self.g = (heads_first(getattr(c, name)) for name in ("q", "k", "v", "g"))
        self.beta = None if c.beta is None else heads_first(c.beta[..., None])
        self.S, self.C = c.S, C
        self.since, self.until, self.between, self.whole = decays(self.g)

    def weights(self, q: Tensor) -> Tensor:
        """The weights of keys, for queries or for keys that search."""
        return (q[..., :, None, :] * self.k[..., None, :, :] * self.between.exp()).sum(-1)

    def pairs(self) -> Tensor:
        return self.weights(self.q)

    def triangle(self) -> Tensor:
        return (self.beta * self.weights(self.k)).tril(-1)

    def found(self) -> Tensor:
        """The values that keys find in the state before the chunk, times beta."""
        return self.beta * ((self.k * self.since.exp()) @ self.S)

    def read(self, S: Tensor) -> Tensor:
        return (self.q * self.since.exp()) @ S

    def keys(self) -> Tensor:
        """Keys decayed to the end of the chunk."""
        return self.k * self.until.exp()


def in_steps(
    c: Call,
    C: int = 16,
    *,
    decays: Callable[[Tensor], tuple] = decays,
    pairs: Callable[[Chunk], Tensor] = Chunk.pairs,
    triangle: Callable[[Chunk], Tensor] = Chunk.triangle,
    inverse: Callable[[Tensor], Tensor] = elimination,
    found: Callable[[Chunk], Tensor] = Chunk.found,
    read: Callable[[Chunk, Tensor], Tensor] = Chunk.read,
    keys: Callable[[Chunk], Tensor] = Chunk.keys,
    seen: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]] = lambda states, totals, added: states,
) -> tuple[Tensor, Tensor, Tensor]:
    """A call in chunks of C, by steps that a mistake replaces: o, the final state, each token's write `[B, T, HV, V]`.

    What a token writes is its value; with a beta the correction that the triangle gives. The chunks read the states
    that are `seen`, made of those before each chunk and after the last, each chunk's log decay and what it adds.
    """
    c = c.wide
    chunks, writes, states, added = [], [], [c.S], []
    for a in range(0, c.q.shape[1], C):
        n = Chunk(c.cut(a, a + C, S=states[-1]), C, decays)
        chunks.append(n)
        writes.append(n.v if n.beta is None else inverse(triangle(n)) @ (n.beta * n.v - found(n)))
        added.append(keys(n).mT @ writes[-1])
        states.append(n.whole.exp().mT * n.S + added[-1])
    states = seen(states, [n.whole[..., 0, :] for n in chunks], added)
    outs = [  # without rows that fill up a chunk
        c.s * (read(n, S) + (pairs(n) @ write)[..., : n.v.shape[-2], :])
        for n, S, write in zip(chunks, states, writes, strict=False)
    ]
    o, write = (torch.cat([c.v[:, :0], *(x.transpose(1, 2) for x in parts)], 1) for parts in (outs, writes))
    return o, states[-1], write


def causal(i: Tensor, j: Tensor, past: int) -> Tensor:
    return j <= i + past


def attention(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None, sees: Callable = causal):
    """o and the cache of softmax attention: query i of a sequence sees the keys j of `sees`, `past` of them cached."""
    k0, v0 = initial_state or (k[:, :0], v[:, :0])
    s = q.shape[-1] ** -0.5 if scale is None else scale

    def one(q, k, v):
        k, v = torch.cat([k0, k], 1), torch.cat([v0, v], 1)
        i, j = (torch.arange(x.shape[1], device=x.device) for x in (q, k))
        x = s * torch.einsum("bihk,bjhk->bhij", q, k)
        p = x.masked_fill(~sees(i[:, None], j, k0.shape[1]), -torch.inf).softmax(-1).nan_to_num(0.0)
        return (torch.einsum("bhij,bjhv->bihv", p, v), k, v), ()

    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    (o, *cache), _ = per_sequence(one, ends, {"q": q, "k": k, "v": v}, {})
    return o, tuple(cache)


def apply(mechanism: str, m: Mistake | None, C: int = C) -> Callable:
    """A kernel with that mistake (None: without one) and chunks of C, under the contract, in at least float32."""
    kind = KINDS[mechanism]

    def fn(*tokens, scale=None, initial_state=None, cu_seqlens=None):
        x = dict(zip(kind.arguments, tokens, strict=True))
        dtype, result = compute_dtype(*(x[n] for n in kind.named("token"))), x["v"].dtype
        x = {n: y.to(dtype) for n, y in x.items()}
        if kind.cache:
            kernel = m.variant if m else attention
            o, state = kernel(*x.values(), scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
            return o.to(result), tuple(x.to(result) for x in state)
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        N, sizes = len(x["q"]) if ends is None else len(ends) - 1, kind.sizes(x)
        S = x["q"].new_zeros(state_shape(kind.mechanism, sizes, N))
        S = S if initial_state is None else initial_state.to(dtype)
        k = x["k"].repeat_interleave(x["v"].shape[2] // x["k"].shape[2], 2)
        c = Call(**x | {"g": by_channel(x.get("g"), k)}, scale=scale, S=S, C=C)
        if m is None:
            o, state = c.each(ends)
        else:
            o, state = m.variant(c, ends) if m.whole else c.each(ends, m.variant)
        return o.to(result), state

    return fn
