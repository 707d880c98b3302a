"""A segment among all tokens: which packed sequences begin or end in it, and which cross its borders (chapter 25).

Sequences packed with `cu_seqlens` need no algebra of their own: only the sequence that lies across a border sends its
state over it. For the map of a segment all other tokens are zeros: a token of zeros neither writes, reads nor forgets.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .maps import Maps, Tokens

Rows = Tensor | slice  # part of a tensor [N, ...] of states, one row for each sequence


class Edge(NamedTuple):
    """A segment as one direction of the exchange crosses it: a state comes in at one border and leaves at the other."""

    entering: Rows  # the sequence at the border where a state comes in
    goes_on: bool | Tensor  # whether that sequence has tokens on both sides of the border: the state is its own
    leaving: Rows  # the sequence at the border where a state leaves
    passes: bool | Tensor  # whether a state passes through: that sequence does not start (backwards: stop) in here
    tokens: Tensor | None  # which tokens belong to that sequence, [T]; None for all


class Segment:
    """Tokens `start` to `end` of all. Nothing here waits for a GPU.

    Without `cu` there are B sequences that cross every border, and the host knows all of this. With `cu` [N + 1] it is
    in tensors: [1] for a border, [N] for the sequences, [T] for the tokens from `start` to `end`. If these are
    5 and 12, and cu = 0 3 9 30, `left` is 3-9, which began before `start` and stops here; `right` is 9-30, which starts
    here and goes on after `end`.

    Attributes:
        left, right: the sequences that hold the token before `start`, and the token before `end`.
        from_left: whether `left` goes on after `start`.
        to_right: whether `right` goes on after `end`.
        right_from_before: whether `right` is `left`, so does not start in here, and `start` is not 0.
        left_from_after: whether `left` is `right`, so does not stop in here, and `end` is not the end of all. (If both
            are the sequence that stops at `end`, nothing comes in there either.)
        begin_here, end_here: whether the first token of a sequence, or its last, is in here; for an empty sequence
            whether the next token is.
        of_left, of_right: whether a token belongs to `left`, or to `right`; None for all tokens.
        cu: the boundaries among the segment's own tokens; None without `cu`.
    """

    def __init__(self, start: int, end: int, is_first: bool, is_last: bool, total: int, cu: Tensor | None):
        if cu is None:
            self.cu = self.of_left = self.of_right = None
            self.left = self.right = slice(None)
            self.begin_here, self.end_here = is_first, is_last
            self.from_left = self.right_from_before = not is_first
            self.to_right = self.left_from_after = not is_last
            return
        self.left, self.right = ((cu < x).sum().sub(1).clamp(min=0).view(1) for x in (start, end))
        self.from_left = start > 0 and cu[self.left + 1] > start
        self.to_right = cu[self.right + 1] > end
        same = self.left == self.right
        self.right_from_before, self.left_from_after = same & (start > 0), same & (end < total)
        here, stop = torch.arange(start, end, device=cu.device), math.inf if is_last else end
        self.of_left, self.of_right = here < cu[self.left + 1], here >= cu[self.right]
        self.begin_here = (cu[:-1] >= start) & (cu[:-1] < stop)
        last = torch.maximum(cu[1:] - 1, cu[:-1])
        self.end_here = (last >= start) & (last < stop)
        self.cu = (cu - start).clamp(0, end - start)
        if start == end:
            self.cu[-1] = 1  # the token of zeros that stands for none

    def edge(self, backwards: bool) -> Edge:
        """The borders as a state crosses from left to right, or backwards from right to left."""
        if backwards:
            return Edge(self.right, self.to_right, self.left, self.left_from_after, self.of_left)
        return Edge(self.left, self.from_left, self.right, self.right_from_before, self.of_right)


def zero_elsewhere(x: Tensor | None, where: bool | Tensor) -> Tensor | None:
    """x with zeros in all rows but those of `where`; None for zeros that the host knows of."""
    if x is None or where is False:
        return None
    return x if where is True else torch.where(where.view(-1, *[1] * (x.ndim - 1)), x, 0)


def own_rows(states: Tensor, where: Sequence[bool | Tensor]) -> Tensor:
    """Pick from states [N, n, ...] of n segments the rows that `where` names, none of two segments: [N, ...]."""
    rows = [zero_elsewhere(S, here) for S, here in zip(states.unbind(1), where, strict=True)]
    rows = [S for S in rows if S is not None]
    return sum(rows[1:], rows[0]) if rows else torch.zeros_like(states[:, 0])


def with_own_states(maps: Maps, own: Sequence[Tensor | None], edges: Sequence[Edge]) -> Maps:
    """The maps of n segments; the states `own` of sequences that start in each reach the state that leaves it, too.

    If no state passes through a segment, its M is zeros.
    """
    each = []
    for i, (S, edge) in enumerate(zip(own, edges, strict=True)):
        m = maps.one(i)
        X = m.X if S is None else m.X + m.through(S[edge.leaving])
        M = (torch.zeros_like(y) if edge.passes is False else zero_elsewhere(y, edge.passes) for y in m.M)
        each.append((*M, X))
    *M, X = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
    return Maps(tuple(M), X)


def with_entering(own: Sequence[Tensor | None], states: Tensor, edges: Sequence[Edge], sequences: int) -> Tensor:
    """The states that each segment's sequences start from, `[N_seq, n, H, K, V]`.

    They are the segment's own, and for the sequence that goes on there the one of `states` [N, n, H, K, V] that enters.
    """
    zeros, each = states.new_zeros(sequences, *states.shape[2:]), []
    for S, entering, edge in zip(own, states.unbind(1), edges, strict=True):
        S, entering = zeros if S is None else S, zero_elsewhere(entering, edge.goes_on)
        if entering is not None:
            S = S.clone()
            S[edge.entering] += entering
        each.append(S)
    return torch.stack(each, 1)


def only_tokens(x: Tokens, where: Tensor | None) -> Tokens:
    """Tokens [B, T, ...] with zeros outside `where` [T]; None for all."""
    if where is None or len(where) == 0:
        return x
    return {name: torch.where(where.view(1, -1, *[1] * (y.ndim - 2)), y, 0) for name, y in x.items()}


def at_least_one_token(x: Tensor) -> Tensor:
    """x [B, T, ...]; one token of zeros if it has none."""
    return x if x.shape[1] else torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)
