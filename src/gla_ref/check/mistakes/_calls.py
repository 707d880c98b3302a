"""What a mistake is made of: a call of a mechanism, right by itself, to be cut and changed (chapters 1 and 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import gla
from ..._contract import per_sequence
from ...mechanisms import MECHANISMS

C = 64  # the chunk, or tile of keys, that mistakes at chunk boundaries assume; a diagnosis tries others, too


@dataclass(frozen=True)
class Call:
    """A call of gated linear attention: its tensors, scale, the state S before the first token; right by itself.

    Mechanisms with one gate a head, or none, are calls whose g `[B, T, H, K]` is the same for all channels, or 0.
    C is the chunk of a mistake at chunk boundaries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float | None
    S: Tensor
    C: int = C

    @property
    def tokens(self) -> dict[str, Tensor]:
        """What has a time axis, by name."""
        return {n: getattr(self, n) for n in MECHANISMS["gla"].required}

    @property
    def s(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def own(self) -> Tensor:
        """What a token reads of its own write."""
        return self.s * (self.q * self.k).sum(-1, keepdim=True) * self.v

    def run(self, **changes) -> tuple[Tensor, Tensor]:
        c = replace(self, **changes)
        if not c.q.shape[1]:
            return c.v, c.S
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
            o, S = (variant or Call.run)(replace(self, **x, S=S))
            return (o,), (S,)

        (o,), (S,) = per_sequence(one, ends, self.tokens, {"S": self.S})
        return o, S


@dataclass(frozen=True)
class Attention:
    """A call of softmax attention: q, k, v, scale, and the cache before the first token (of no tokens if none)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    k0: Tensor
    v0: Tensor

    s = Call.s

    @property
    def tokens(self) -> dict[str, Tensor]:
        """What has a time axis, by name."""
        return {n: getattr(self, n) for n in MECHANISMS["softmax_attention"].required}

    @property
    def cache(self) -> tuple[Tensor, Tensor]:
        """All keys and values, as the call returns them."""
        return torch.cat([self.k0, self.k], 1), torch.cat([self.v0, self.v], 1)

    def scores(self, ahead: int = 0) -> Tensor:
        """scale q k^T `[B, H, T, S]`, -inf where a key is more than `ahead` tokens later than the query."""
        x = self.s * torch.einsum("bihk,bjhk->bhij", self.q, self.cache[0])
        seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        return x.masked_fill(~seen.tril(x.shape[-1] - x.shape[-2] + ahead), -torch.inf)

    def weigh(self, p: Tensor) -> tuple[Tensor, tuple]:
        """p v, and the cache."""
        return torch.einsum("bhij,bjhv->bihv", p, self.cache[1]), self.cache

    def run(self, **changes) -> tuple[Tensor, tuple]:
        c = replace(self, **changes)
        return c.weigh(c.scores().softmax(-1))

    def each(self, ends: list[int] | None, variant: Callable | None = None) -> tuple[Tensor, tuple]:
        def one(**x):
            o, cache = (variant or Attention.run)(replace(self, **x))
            return (o, *cache), ()

        (o, *cache), _ = per_sequence(one, ends, self.tokens, {})
        return o, tuple(cache)
