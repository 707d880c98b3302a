"""Tensors of a delta rule's chunks that its walks read: P and Y of each head, and factors of each token."""

from __future__ import annotations

import triton
import triton.language as tl

# rows of `factors`: write strength; decay since the chunk began and until it ends; the gates' sums in two parts
BETA, SINCE, UNTIL, COARSE, FINE = map(tl.constexpr, range(5))
ROWS = 5


@triton.jit
def square(x, i_t, i_h, H, C: tl.constexpr):
    """Pointers to the square [C, C] of a chunk of a head."""
    o_c = tl.arange(0, C)
    return x + (i_t * H + i_h).to(tl.int64) * C * C + o_c[:, None] * C + o_c[None, :]


@triton.jit
def factor(factors, i_t, i_h, H, C: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to the first row of a chunk's factors; row r begins r C numbers later."""
    return factors + (i_t * H + i_h).to(tl.int64) * ROWS * C + tl.arange(0, C)


@triton.jit
def load_whole_decay(factors, i_t, i_h, H, C: tl.constexpr, ROWS: tl.constexpr):
    """e^(b_C) of a chunk, the last number of SINCE: rows beyond a sequence's end add no gate."""
    return tl.load(factors + ((i_t * H + i_h).to(tl.int64) * ROWS + SINCE) * C + C - 1)


@triton.jit
def load_channels(through, i_t, i_h, H, K, BK: tl.constexpr):
    """e^(b_C) of a chunk in each channel, [BK]; through [chunks, H, K]."""
    o_k = tl.arange(0, BK)
    return tl.load(through + (i_t * H + i_h).to(tl.int64) * K + o_k, mask=o_k < K, other=0.0)
