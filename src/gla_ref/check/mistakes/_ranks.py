"""The mistake of functions whose tokens are split over ranks: what comes back over a border (chapter 25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._calls import GATED, GRADIENT, Call, Mistake


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
    """The mistake of a function whose tokens are split into `pieces(T, boundaries)`, one for each rank."""

    def head_0(c: Call, ends: list[int] | None):
        split = cut(c, ends, pieces(c.q.shape[1], None if ends is None else tuple(ends)))
        made = [carried_back(parts, S) if parts else (c.v[:, :0], S) for parts, S in split]
        return torch.cat([o for o, _ in made], 1), torch.cat([S for _, S in made])

    name = "gate of head 0 shared by all heads, where the gradient of the state crosses the border between two ranks"
    return [Mistake(name, GRADIENT, head_0, GATED, whole=True)]
