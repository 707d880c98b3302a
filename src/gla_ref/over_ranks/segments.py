"""A segment among all tokens: which packed sequences begin or end in it, and which cross its borders (chapter 25).

Sequences packed with `cu_seqlens` need no algebra of their own: only the sequence that lies across a border sends its
state over it. For the map of a segment all other tokens are zeros: a token of zeros neither writes, reads nor forgets.
"""

import math
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
    closed: bool | Tensor  # whether that sequence starts (backwards: stops) in here: no state passes through


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
        right_starts_here: whether `right` is another sequence than `left`, so starts in here, or `start` is 0.
        left_stops_here: whether `left` is another sequence than `right`, so stops in here, or `end` is the end of all.
            (If both are the sequence that stops at `end`, nothing comes in there either.)
        begin_here, end_here: whether the first token of a sequence, or its last, is in here; for an empty sequence
            whether the next token is.
        of_left, of_right: whether a token belongs to `left`, or to `right`; None for all tokens.
        cu: the boundaries among the segment's own tokens; None without `cu`.
    """

    def __init__(self, start: int, end: int, is_first: bool, is_last: bool, total: int, cu: Tensor | None):
        if cu is None:
            self.cu = self.of_left = self.of_right = None
            self.left = self.right = slice(None)
            self.begin_here = self.right_starts_here = is_first
            self.end_here = self.left_stops_here = is_last
            self.from_left, self.to_right = not is_first, not is_last
            return
        self.left, self.right = ((cu < x).sum().sub(1).clamp(min=0).view(1) for x in (start, end))
        self.from_left = start > 0 and cu[self.left + 1] > start
        self.to_right = cu[self.right + 1] > end
        another = self.left != self.right
        self.right_starts_here, self.left_stops_here = another | (start == 0), another | (end == total)
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
            return Edge(self.right, self.to_right, self.left, self.left_stops_here)
        return Edge(self.left, self.from_left, self.right, self.right_starts_here)


def zero_elsewhere(x: Tensor | None, where: bool | Tensor) -> Tensor | None:
    """x with zeros in all rows but those of `where`; None for zeros that the host knows of."""
    if x is None or where is False:
        return None
    return x if where is True else torch.where(where.view(-1, *[1] * (x.ndim - 1)), x, 0)


def with_own_state(m: Maps, S: Tensor | None, edge: Edge) -> Maps:
    """Map m of one segment, and the share that sequences starting in it, with states S, have in the state that leaves.

    If no state passes through, M is zeros.
    """
    X = m.X if S is None else m.X + m.through(S[edge.leaving])
    if edge.closed is False:
        return Maps(m.M, X)
    zero = edge.closed is True
    return Maps(tuple(torch.zeros_like(y) if zero else zero_elsewhere(y, ~edge.closed) for y in m.M), X)


def only_tokens(x: Tokens, where: Tensor | None) -> Tokens:
    """Tokens [B, T, ...] with zeros outside `where` [T]; None for all."""
    if where is None or len(where) == 0:
        return x
    return {name: torch.where(where.view(1, -1, *[1] * (y.ndim - 2)), y, 0) for name, y in x.items()}


def at_least_one_token(x: Tensor) -> Tensor:
    """x [B, T, ...]; one token of zeros if it has none."""
    return x if x.shape[1] else torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)
