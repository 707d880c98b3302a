"""Prefix sums: sequential, in two steps over chunks, and as parallel scans (chapter 6)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ._contract import check_chunk

__all__ = ["Chunked", "blelloch", "chunked", "hillis_steele", "sequential"]

Tensors = tuple[Tensor, ...]
Combine = Callable[[Tensors, Tensors], Tensors]


def sequential(x: Tensor, dim: int) -> Tensor:
    """Inclusive prefix sum, one step after the other: y_t = y_{t-1} + x_t, T - 1 sums.

    Args:
        x: any shape and dtype, at least one element along `dim`.
        dim: the axis to sum along, counted from the front.

    Returns:
        The sums, in the shape and dtype of `x`.

    Raises:
        TypeError: `x` is no tensor.
        ValueError: `dim` does not exist or is empty.
    """
    _length(x, dim)
    rows = list(x.unbind(dim))
    for t in range(1, len(rows)):
        rows[t] = rows[t - 1] + rows[t]
    return torch.stack(rows, dim)


class Chunked(NamedTuple):
    """The rows of the two-step prefix sum, in the order in which they are computed."""

    local: Tensor  # [T, ...] prefix sums inside each chunk (step 1, chunks independent)
    carry: Tensor  # [N, ...] what the chunks before hand over: exclusive sums of chunk totals
    result: Tensor  # [T, ...] local + carry of its chunk (step 2)


def chunked(x: Tensor, C: int) -> Chunked:
    """Inclusive prefix sum along the first axis, first inside chunks and then across them.

    Args:
        x: `[T, ...]`, any dtype, T >= 1; the last chunk may be shorter than C.
        C: chunk length, at least 1.

    Returns:
        `Chunked(local, carry, result)`, with N = ceil(T / C) carries.

    Raises:
        ValueError: `x` has no first axis or an empty one, or C < 1.
    """
    T = _length(x, 0)
    check_chunk(C=C)
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -T % C))
    local = rearrange(padded, "(N C) ... -> N C ...", C=C).cumsum(1)
    totals = local[:, -1]
    carry = torch.cat([torch.zeros_like(totals[:1]), totals[:-1].cumsum(0)])
    result = local + carry[:, None]
    return Chunked(local.flatten(0, 1)[:T], carry, result.flatten(0, 1)[:T])


def hillis_steele(combine: Combine, xs: Sequence[Tensor], dim: int = 1) -> Tensors:
    """Inclusive scan in ceil(log2 T) rounds: in round r, position t takes in position t - 2^r.

    Shortest depth, about T log2 T combinations of work (Hillis and Steele 1986, partial sums).

    Args:
        combine: associative `combine(left, right) -> tuple`; `left` is earlier in time. It gets
            tuples like `xs`, of any length along `dim`, and returns one of the same shapes.
        xs: tensors of equal length T >= 1 along `dim`; their other axes may differ.
        dim: the time axis, counted from the front.

    Returns:
        The tuple of scanned tensors: element t is x_1 combined with ... combined with x_t.

    Raises:
        ValueError: `xs` is empty, or a tensor has no axis `dim`, an empty one or another length.
    """
    T, xs, step = _length(xs, dim), tuple(xs), 1
    while step < T:
        new = combine(_cut(xs, dim, 0, T - step), _cut(xs, dim, step, T))
        xs = _join(_cut(xs, dim, 0, step), new, dim)
        step *= 2
    return xs


def blelloch(combine: Combine, xs: Sequence[Tensor], dim: int = 1) -> Tensors:
    """Inclusive scan in at most 2 T combinations: up a tree of pairs, then down again.

    Depth about 2 log2 T (Blelloch 1990, section 1.2; here inclusive, so that no identity element
    is needed). Arguments, result and errors are those of `hillis_steele`.
    """
    T, xs = _length(xs, dim), tuple(xs)
    if T == 1:
        return xs
    even = tuple(x.index_select(dim, torch.arange(0, T, 2, device=x.device)) for x in xs)
    odd = tuple(x.index_select(dim, torch.arange(1, T, 2, device=x.device)) for x in xs)
    # up: (x_0 x_1), (x_2 x_3), ...; scanned, these are already the results at odd positions
    odd = blelloch(combine, combine(_cut(even, dim, 0, T // 2), odd), dim)
    # down: position 2 i takes the result at 2 i - 1 and its own element
    first, later = _cut(even, dim, 0, 1), (T - 1) // 2
    if later:
        even = _join(first, combine(_cut(odd, dim, 0, later), _cut(even, dim, 1, later + 1)), dim)
    t = torch.arange(T)
    order = torch.where(t % 2 == 0, t // 2, (T + 1) // 2 + t // 2)
    return tuple(y.index_select(dim, order.to(y.device)) for y in _join(even, odd, dim))


def _length(x: Tensor | Sequence[Tensor], dim: int) -> int:
    """The common length along `dim`, checked."""
    named = [(f"xs[{i}]", y) for i, y in enumerate(x)] if isinstance(x, list | tuple) else [("x", x)]
    if not named:
        raise ValueError("xs: expected at least one tensor, got none")
    lengths = []
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if not 0 <= dim < x.ndim:
            raise ValueError(f"dim: expected an axis of {name}, shape {list(x.shape)}, got {dim}")
        lengths.append(x.shape[dim])
        if lengths[-1] != lengths[0] or lengths[0] == 0:
            want = lengths[0] or "at least 1"
            raise ValueError(f"{name}: expected length {want} along axis {dim}, got shape {list(x.shape)}")
    return lengths[0]


def _cut(xs: Tensors, dim: int, start: int, end: int) -> Tensors:
    return tuple(x.narrow(dim, start, end - start) for x in xs)


def _join(first: Tensors, second: Tensors, dim: int) -> Tensors:
    return tuple(torch.cat(pair, dim) for pair in zip(first, second, strict=True))
