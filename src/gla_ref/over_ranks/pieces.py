"""A rank's tokens: the sequences that begin or end among them, and the sequences that cross a border (chapter 24).

Sequences packed with `cu_seqlens` need no algebra of their own: only the sequence across a border sends its state over
the border. For the map of a piece, tokens of other sequences become zeros: such a token neither writes, reads nor
forgets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .maps import Maps, Tokens


class Segment:
    """Tokens a to e of all ranks' tokens. No method waits for a GPU.

    If sequences are packed by `cu` [N + 1], `left` and `right` are the places [1] of the sequences that hold the tokens
    before a and before e. Without `cu` there are B sequences, and all of them cross every border; then all attributes
    except `left` and `right` are known to the host.
    """

    def __init__(self, a: int, e: int, first: bool, final: bool, total: int, cu: Tensor | None):
        self.enters = a > 0 if cu is not None else not first
        if cu is None:
            self.cu = self.of_left = self.of_right = None
            self.left = self.right = slice(None)
            self.begins = self.starts = first
            self.ends = self.stops = final
            self.crosses = not final
            return
        self.left, self.right = ((cu < x).sum().sub(1).clamp(min=0).view(1) for x in (a, e))
        self.crosses = cu[self.right + 1] > e
        # whether the sequence at the right border starts in this segment, and the sequence at the left border stops in
        # it
        another = self.left != self.right
        self.starts, self.stops = another | (a == 0), another | (e == total)
        here, stop = torch.arange(a, e, device=cu.device), math.inf if final else e
        self.of_right, self.of_left = here >= cu[self.right], here < cu[self.left + 1]  # [T]
        # for every sequence; an empty sequence begins and ends at the next token
        self.begins = (cu[:-1] >= a) & (cu[:-1] < stop)
        last = torch.maximum(cu[1:] - 1, cu[:-1])
        self.ends = (last >= a) & (last < stop)
        self.cu = (cu - a).clamp(0, e - a)
        if a == e:
            self.cu[-1] = 1  # the token of zeros that an empty piece gets


def only(where: bool | Tensor, x: Tensor | None) -> Tensor | None:
    """Return x where `where` holds (a bool, or one per row), zeros elsewhere; None if the host knows only of zeros."""
    if x is None or where is False:
        return None
    return x if where is True else torch.where(where.view(-1, *[1] * (x.ndim - 1)), x, 0)


def starting(m: Maps, here: bool | Tensor, S: Tensor | None) -> Maps:
    """Return a segment's map m if the sequence does not start `here`, else the constant map to M S + X."""
    X = m.X if S is None else m.X + m.keep(S)
    if here is False:
        return Maps(m.M, X)
    return Maps(tuple(torch.zeros_like(y) if here is True else only(~here, y) for y in m.M), X)


def neutral(x: Tokens, keep: Tensor | None) -> Tokens:
    """Set tokens [B, T, ...] to zeros except where `keep` [T]; a token of zeros neither writes, reads nor forgets."""
    if keep is None or len(keep) == 0:
        return x
    return {name: torch.where(keep.view(1, -1, *[1] * (y.ndim - 2)), y, 0) for name, y in x.items()}


def some(x: Tensor) -> Tensor:
    """Return x [B, T, ...]; if x has no tokens, one token of zeros."""
    return x if x.shape[1] else torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)
