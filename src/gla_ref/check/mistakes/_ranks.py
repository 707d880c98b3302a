"""Mistakes of functions whose tokens are split over ranks: states that cross borders (chapter 24)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._calls import Call
from ._core import GATED, GRADIENT, LINEAR, PACK, Mistake

CROSS = "S across the border between two ranks"


class Piece(NamedTuple):
    """What a rank's tokens of one sequence do to a state that crosses them, S -> M S + X; and how many they are."""

    M: Tensor
    X: Tensor
    tokens: int


# The state that comes into a rank: of the pieces before it, nearest last, and of the state S before all of them. The
# same from right to left for gradients. `own` is the rank's piece.
Fold = Callable[[Sequence[Piece], Tensor, Piece], Tensor]


def right(before: Sequence[Piece], S: Tensor, own: Piece | None = None) -> Tensor:
    for p in before:
        S = p.M * S + p.X
    return S


FOLDS: dict[str, tuple[Fold, tuple[str, ...]]] = {
    "nothing crosses the border between two ranks": (
        lambda before, S, own: torch.zeros_like(S) if before else S,
        LINEAR,
    ),
    "state of the wrong rank: each starts from the end of its own piece": (
        lambda before, S, own: right([*before, own], S) if before else S,
        LINEAR,
    ),
    "state of the wrong rank: the nearest piece is left out": (lambda before, S, own: right(before[:-1], S), LINEAR),
    "decay of the pieces between two ranks forgotten": (
        lambda before, S, own: right(before[:1], S) + sum(p.X for p in before[1:]),
        GATED,
    ),
    "a rank without tokens lets no state through": (
        lambda before, S, own: right([p if p.tokens else p._replace(M=torch.zeros_like(p.M)) for p in before], S),
        LINEAR,
    ),
    "the state before all tokens is added on every rank": (
        lambda before, S, own: right(before, S) + S if before else S,
        LINEAR,
    ),
}


class Crossing(torch.autograd.Function):
    """The states that come into each piece; gradients of them stop here, but for the initial state's."""

    @staticmethod
    def forward(ctx, fold: Fold, maps: Sequence[Piece], S: Tensor) -> tuple[Tensor, ...]:
        return tuple(fold(maps[:r], S, own).clone() for r, own in enumerate(maps))

    @staticmethod
    def backward(ctx, *d: Tensor):
        return None, None, d[0]


class Returning(torch.autograd.Function):
    """(fold, from the first rank on?, pieces, reads, o and state of each piece) -> these; gradients cross here."""

    @staticmethod
    def forward(ctx, fold: Fold, forwards: bool, maps: Sequence[Piece], reads: Sequence[Tensor], *made: Tensor):
        ctx.fold, ctx.forwards, ctx.maps, ctx.reads = fold, forwards, maps, reads
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    @once_differentiable
    def backward(ctx, *d: Tensor):
        n = len(ctx.maps)
        do, dS = d[:n], d[-1]  # the last piece's state is the sequence's own
        found = zip(ctx.maps, ctx.reads, do, strict=True)
        maps = [p._replace(X=torch.einsum("bthk,bthv->bhkv", q, x)) for p, q, x in found]
        if ctx.forwards:
            states = [*(ctx.fold(maps[:r], torch.zeros_like(dS), own) for r, own in enumerate(maps[:-1])), dS]
        else:
            states = [ctx.fold(maps[:r:-1], dS, maps[r]) for r in range(n)]
        return None, None, None, None, *do, *states


def whole(parts: Sequence[Call], S: Tensor, fold: Fold, back: Fold, forwards: bool = False) -> tuple[Tensor, Tensor]:
    """One sequence, piece by piece as ranks have it."""
    with torch.no_grad():
        zeros, maps, reads = torch.zeros_like(S), [], []
        for c in parts:
            n = c.q.shape[1]
            maps.append(Piece(c.g.sum(1).exp()[..., None], c.run(S=zeros)[1], n))
            reads.append(c.s * c.q * c.g.cumsum(1).exp())
    starts = Crossing.apply(fold, maps, S)
    made = [c.run(S=x) for c, x in zip(parts, starts, strict=True)]
    made = Returning.apply(back, forwards, maps, reads, *(o for o, _ in made), *(x for _, x in made))
    return torch.cat(made[: len(parts)], 1), made[-1]


def carried_back(parts: Sequence[Call], S: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, piece by piece, through which the gradient of the state goes back by the gates of head 0."""
    o, S = parts[0].run(S=S)
    outs = [o]
    for c in parts[1:]:
        o, after = c.run(S=S.detach())
        g = c.g[:, :, :1].detach().expand_as(c.g)
        unwritten = {"q": c.q.detach(), "k": 0 * c.k.detach(), "v": 0 * c.v.detach(), "g": g}
        o_back, S_back = c.run(**unwritten, S=S - S.detach())
        outs.append(o + o_back)
        S = after + S_back
    return torch.cat(outs, 1), S


def cut(c: Call, ends: list[int] | None, lengths: Sequence[int]) -> list[tuple[list[Call], Tensor]]:
    """(pieces, the state before them) of each sequence: of all ranks, or of those from its first token to its last."""
    borders = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    if ends is None:
        return [([c.cut(a, b) for a, b in zip(borders, borders[1:], strict=False)], c.S)]
    found = []
    for n, (a, e) in enumerate(zip(ends, ends[1:], strict=False)):
        those = [r for r, b in enumerate(borders[:-1]) if a < e and b < e and borders[r + 1] >= a]
        spans = [(max(a, borders[r]), min(e, borders[r + 1])) for r in those]
        while spans and spans[0][0] == spans[0][1]:
            spans.pop(0)
        found.append(([c.cut(i, j) for i, j in spans], c.S[n : n + 1]))
    return found


def over_ranks(pieces: Callable[[int, tuple[int, ...] | None], Sequence[int]]) -> list[Mistake]:
    """The mistakes of a function whose tokens are split into `pieces(T, boundaries)`, one for each rank."""

    def split(c: Call, ends: list[int] | None) -> list[tuple[list[Call], Tensor]]:
        return cut(c, ends, pieces(c.q.shape[1], None if ends is None else tuple(ends)))

    def by_fold(fold: Fold, back: Fold, forwards: bool = False) -> Callable:
        def variant(c: Call, ends: list[int] | None):
            made = [whole(parts, S, fold, back, forwards) if parts else (c.v[:, :0], S) for parts, S in split(c, ends)]
            return torch.cat([o for o, _ in made], 1), torch.cat([S for _, S in made])

        return variant

    found = []
    for name, (fold, mechanisms) in FOLDS.items():
        found.append(Mistake(name, CROSS, by_fold(fold, fold), mechanisms, whole=True))
        found.append(Mistake(f"{name}, in the forward pass only", CROSS, by_fold(fold, right), mechanisms, whole=True))
        found.append(
            Mistake(f"{name}, in the backward pass only", GRADIENT, by_fold(right, fold), mechanisms, whole=True)
        )
    backwards = by_fold(right, right, forwards=True)
    name = "the gradient of the state goes from the first rank to the last"
    found.append(Mistake(name, GRADIENT, backwards, LINEAR, whole=True))

    def head_0(c: Call, ends: list[int] | None):
        made = [carried_back(parts, S) if parts else (c.v[:, :0], S) for parts, S in split(c, ends)]
        return torch.cat([o for o, _ in made], 1), torch.cat([S for _, S in made])

    name = "gate of head 0 shared by all heads, where the gradient of the state crosses the border between two ranks"
    found.append(Mistake(name, GRADIENT, head_0, GATED, whole=True))

    def leaks(c: Call, ends: list[int] | None):
        lengths = pieces(c.q.shape[1], None if ends is None else tuple(ends))
        borders, before, made = {sum(lengths[:r]) for r in range(1, len(lengths))}, None, []
        for n, (a, e) in enumerate(zip(ends or (), (ends or ())[1:], strict=False)):
            S = c.S[n : n + 1]
            if a < e and a in borders and before is not None:
                S = S + before
            o, S = c.cut(a, e).run(S=S)
            before = S if a < e else before
            made.append((o, S))
        if ends is None:
            return c.run()
        return torch.cat([o for o, _ in made], 1), torch.cat([S for _, S in made])

    name = "a sequence that begins on a border goes on from the one before it"
    found.append(Mistake(name, PACK, leaks, LINEAR, whole=True))

    def lost(c: Call, ends: list[int] | None):
        o, S = c.each(ends)
        if ends is None:
            return o, S
        lengths = pieces(c.q.shape[1], tuple(ends))
        borders = {sum(lengths[:r]) for r in range(1, len(lengths))}
        keep = [not (a < e and e in borders) for a, e in zip(ends, ends[1:], strict=False)]
        return o, S * torch.tensor(keep, device=S.device)[:, None, None, None]

    name = "the final state of a sequence that ends on a border is lost"
    found.append(Mistake(name, PACK, lost, LINEAR, whole=True))
    return found
