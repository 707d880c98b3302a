"""Inverses of unit lower triangular matrices, in the ways in which kernels compute them (chapters 20 and 21).

A chunk of the delta rule needs Y = (I + A)^-1, A strictly lower triangular `[..., n, n]`: row i of Y has the influence
of earlier tokens' writes on the write of token i. All functions are exact on paper. They differ in the number of steps
that wait for each other, in the share of matrix products, and in their rounding errors::

    function         steps        products of what                          FLOPs
    substitution     n            a row of A and the rows of Y so far       n^3 / 3, none in matrix products
    elimination      n            a column of A and a row of Y              n^3 / 3, none in matrix products
    blocked          c + log n/c  blocks of c inverted, then merged         n c^2 / 3 + products of blocks
    halves           log n        the same down to single numbers           n^3 / 3 and less, nearly all in products
    doubling         log n        powers of A, whose entries may explode    4 n^3 log n, all in products

`doubling` is kept as the form that breaks: with keys that resemble each other the powers of A grow like binomial
coefficients and cancel in the end.
"""

import torch
from torch import Tensor

from ._contract import check_chunk, has_values

__all__ = ["blocked", "check_triangle", "doubling", "elimination", "halves", "merge", "substitution"]


def check_triangle(A: Tensor) -> None:
    """A is a square, strictly lower triangular matrix in its last two axes; else a ValueError."""
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"A: expected shape [..., n, n], got {list(A.shape)}")
    if has_values(A) and A.triu().count_nonzero():
        raise ValueError("A: expected zeros on and above the diagonal, got others")


def substitution(A: Tensor) -> Tensor:
    """Row after row: y_i = e_i less the sum of A_ij y_j over j < i (forward substitution).

    Args:
        A: strictly lower triangular, `[..., n, n]`.

    Returns:
        Y = (I + A)^-1, `[..., n, n]`.

    Raises:
        ValueError: A is no such matrix.
    """
    check_triangle(A)
    n = A.shape[-1]
    rows = list(torch.eye(n, dtype=A.dtype, device=A.device).expand(A.shape).unbind(-2))
    for i in range(1, n):
        so_far = torch.stack(rows[:i], -2)  # [... i n]
        rows[i] = rows[i] - (A[..., i, :i, None] * so_far).sum(-2)
    return torch.stack(rows, -2)


def elimination(A: Tensor) -> Tensor:
    """Column after column: as soon as y_j is known it is taken from all rows below. As :func:`substitution`."""
    check_triangle(A)
    Y = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape)
    for j in range(A.shape[-1] - 1):
        Y = Y - A[..., :, j, None] * Y[..., j, None, :]  # column j of A is 0 down to row j
    return Y


def merge(Y_1: Tensor, A_21: Tensor, Y_2: Tensor) -> Tensor:
    """The inverse of a triangle of four blocks, from the inverses of the two on the diagonal.

    .. math:: (I + A)^{-1} = [[Y_1, 0], [-Y_2 A_{21} Y_1, Y_2]]
    """
    above = torch.zeros_like(A_21.mT)
    return torch.cat([torch.cat([Y_1, above], -1), torch.cat([-(Y_2 @ (A_21 @ Y_1)), Y_2], -1)], -2)


def blocked(A: Tensor, c: int = 16) -> Tensor:
    """Blocks of c on the diagonal by :func:`substitution`, then two and two merged, c to 2 c to 4 c. As there.

    Raises:
        ValueError: c is not a positive integer.
    """
    check_triangle(A)
    check_chunk(c=c)
    n = A.shape[-1]
    sizes = [min(c, n - i) for i in range(0, n, c)]
    starts = list(range(0, n, c))
    blocks = [substitution(A[..., i : i + m, i : i + m]) for i, m in zip(starts, sizes, strict=True)]
    while len(blocks) > 1:
        merged, places = [], []
        for i, Y_1, Y_2 in zip(starts[::2], blocks[::2], blocks[1::2], strict=False):
            j = i + Y_1.shape[-1]
            merged.append(merge(Y_1, A[..., j : j + Y_2.shape[-1], i:j], Y_2))
            places.append(i)
        if len(blocks) % 2:  # the last has no partner yet
            merged.append(blocks[-1])
            places.append(starts[-1])
        blocks, starts = merged, places
    return blocks[0]


def halves(A: Tensor) -> Tensor:
    """Two halves, each by two halves, down to single numbers. As :func:`substitution`."""
    check_triangle(A)
    return blocked(A, 1)


def doubling(A: Tensor) -> Tensor:
    """The Neumann series in log2(n) factors, (I - A)(I + A^2)(I + A^4)...; exact on paper, since A^n = 0.

    Kept as the form that breaks: its powers of A cancel in the end, and what they have lost by then does not come back.
    Argument, result and errors as in :func:`substitution`.
    """
    check_triangle(A)
    power, Y, size = -A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) - A, 2
    while size < A.shape[-1]:
        power, size = power @ power, 2 * size
        Y = Y + Y @ power
    return Y
