"""The inverse of a chunk's triangle on Hopper, for four warps (chapter 21).

(I - N)^-1 of N [64, 64] below its diagonal is made of::

    blocks of 8     inverted in float32, a thread per row: `eliminate`
    blocks of 16    D + D L D, with D two such inverses and L the block between them, a warp per block
    columns of 16   Y_j = D_j + (sum_(m > j) Y_m N_mj) D_j from the last to the first, a warp per 16 rows

A warp needs no other warp's rows of Y_j, so the products of columns exchange nothing. They have operands of 16 bits.
PAIRS = 0: float16, one product each. That errs by 1.3e-3 if no N_ij is above 1 in size, beta_i k_i . k_i counted in as
N_ii, and by 0.07 to 0.29 if N_ij is 2 and keys are alike. PAIRS = 1: an operand x = high + low is a pair of bfloat16,
and a product three of them. Pairs keep 16 bits of mantissa and float32's range, so keys may have any length.
`is_strong` tells from the data which of the two a chunk needs.

`spread` puts N into shared memory, `eliminate` and `inverse` go on from there. A NaN stays one: `cut` turns the NaN
whose bits are all ones into -0, but then low = x - high is NaN, and so is the sum.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from .gluon import reinterpret

MILD = gl.constexpr(1.0625)  # the largest |N_ij| of a chunk for which float16 is enough: keys in bfloat16 exceed 1


class Scratch(NamedTuple):
    """Shared memory of an inverse, 26 KiB."""

    E: object  # [8, 8, 8] float32: E[m, b, j] is element (m, j) of block b of 8 on the diagonal
    N: object  # blocks of 16 of N in two parts; those of D_j take the place of blocks that nobody reads
    L: object  # the lower left quarters of the blocks of 16 on the diagonal, in two parts
    D: object  # the inverses of blocks of 8, two in a block of 16, in two parts


@gluon.jit
def allocate_scratch():
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    t_E = gl.allocate_shared_memory(gl.float32, [8, 8, 8], flat)
    t_N = gl.allocate_shared_memory(gl.float16, [32, 16, 16], rows)
    t_L = gl.allocate_shared_memory(gl.float16, [8, 16, 16], rows)
    t_D = gl.allocate_shared_memory(gl.float16, [8, 16, 16], rows)
    return Scratch(t_E, t_N, t_L, t_D)


@gluon.jit
def cut(x):
    """x rounded to the precision of bf16 by integers."""
    return ((x.to(gl.int32, bitcast=True) + 32768) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def high_low(x, PAIRS: gl.constexpr):
    """x in 16 bits, and the rest in 16 bits, which only pairs need."""
    if PAIRS:
        high = cut(x)
        return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)
    else:
        high = x.to(gl.float16)
        return high, high


@gluon.jit
def part(tile, n: gl.constexpr, PAIRS: gl.constexpr):
    """Part n of a tile [2 * blocks, 16, 16], as a tile [blocks, 16, 16]."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    BLOCKS: gl.constexpr = tile.shape[0] // 2
    return reinterpret(tile, gl.bfloat16 if PAIRS else gl.float16, [2, BLOCKS, 16, 16], rows).index(n)


@gluon.jit
def store_parts(tile, x, PAIRS: gl.constexpr):
    """x [blocks, 16, 16] to a tile in two parts."""
    high, low = high_low(x, PAIRS)
    part(tile, 0, PAIRS).store(high)
    if PAIRS:
        part(tile, 1, PAIRS).store(low)


@gluon.jit
def store_diagonal(tile, x, PAIRS: gl.constexpr):
    """x [4, 16, 16] to the blocks 0 to 3 of N's tile: they are on or above its diagonal, and nobody reads them."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    fours = reinterpret(tile, gl.bfloat16 if PAIRS else gl.float16, [8, 4, 16, 16], rows)
    high, low = high_low(x, PAIRS)
    fours.index(0).store(high)
    if PAIRS:
        fours.index(4).store(low)


@gluon.jit
def product(x, y, x_low, y_low, acc, PAIRS: gl.constexpr):
    """acc + x y. Products of parts do not wait for each other; low low is left out."""
    if PAIRS:
        return mma_v2(x, y, acc) + mma_v2(x, y_low, mma_v2(x_low, y, gl.zeros_like(acc)))
    else:
        return mma_v2(x, y, acc)


@gluon.jit
def times(x, tile, n: gl.constexpr, acc, mma: gl.constexpr, PAIRS: gl.constexpr):
    """acc + x B of rows x [64, 16] and block n."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    blocks = reinterpret(tile, gl.bfloat16 if PAIRS else gl.float16, tile.shape, rows)
    high, low = high_low(x, PAIRS)
    B = blocks.index(n).load(right)
    B_low = blocks.index(tile.shape[0] // 2 + n).load(right) if PAIRS else B
    return product(gl.convert_layout(high, left), B, gl.convert_layout(low, left), B_low, acc, PAIRS)


@gluon.jit
def spread(N, scratch, PAIRS: gl.constexpr):
    """N to shared memory; zeros above the diagonal, and on it -beta_i |k_i|^2 or zeros, which only `largest` sees."""
    # blocks of 16 on the diagonal [block, row, column]: a warp has all blocks of its rows, and picks one
    four: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, four)))[:, None, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, four)))[None, None, :]
    even, odd = gl.split(N.reshape([4, 16, 2, 2, 16]).permute((0, 1, 4, 2, 3)))
    N_0, N_2 = gl.split(even)
    N_1, N_3 = gl.split(odd)
    N_0, N_1 = gl.convert_layout(N_0, four), gl.convert_layout(N_1, four)
    N_2, N_3 = gl.convert_layout(N_2, four), gl.convert_layout(N_3, four)
    G = gl.where(b < 2, gl.where(b == 0, N_0, N_1), gl.where(b == 2, N_2, N_3))
    # their blocks of 8 on the diagonal: the others are zeros here, so a sum picks them
    E = gl.sum(gl.where((i // 8 == j // 8) & (i > j), G, 0.0).reshape([4, 2, 8, 2, 8]), 3).reshape([8, 8, 8])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    reinterpret(scratch.E, gl.float32, [8, 8, 8], flat).store(E.permute((1, 0, 2)))
    store_parts(scratch.L, gl.where((i >= 8) & (j < 8), G, 0.0), PAIRS)
    # block 4 m + j of t_N is N_mj
    store_parts(scratch.N, N.reshape([4, 16, 4, 16]).permute((0, 2, 1, 3)).reshape([16, 16, 16]), PAIRS)


@gluon.jit
def largest(N):
    """The largest |N_ij| of each thread, as a tile [64, 4]."""
    return gl.max(gl.max(gl.abs(N).reshape([64, 8, 4, 2]), 3), 1)


@gluon.jit
def is_strong(most):
    """Whether an N needs pairs: one vote of all threads."""
    return gl.max(gl.max(most, 1), 0) > MILD


@gluon.jit
def eliminate(scratch, never, PAIRS: gl.constexpr):
    """The inverses of the blocks of 8 on the diagonal of I - N. `never` is 0, which a loop's compiler does not know."""
    # side by side, a thread per row: y (I - N) = e_i, from the last column to the first
    eight: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [2, 2, 1], [2, 1, 0])
    b = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, eight)))[:, None, None] + never
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, eight)))[None, :, None] + never
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, eight)))[None, None, :]
    Y = gl.where(i == j, 1.0, gl.zeros([8, 8, 8], gl.float32, eight))
    for n in gl.static_range(7):
        y = gl.sum(gl.where(j == 7 - n, Y, 0.0), 2)  # the register 7 - n
        Y += y[:, :, None] * scratch.E.index(7 - n).load(gl.SliceLayout(1, eight))[:, None, :]
    # rows of 16, zeros beside the block: of even blocks behind, of odd ones before
    is_odd = (b % 2).to(gl.float32)
    even, odd = Y * (1.0 - is_odd), Y * is_odd
    store_parts(scratch.D, gl.join(even, odd).permute((0, 1, 3, 2)).reshape([4, 16, 16]), PAIRS)


@gluon.jit
def inverse(scratch, PAIRS: gl.constexpr, layout: gl.constexpr):
    """(I - N)^-1 [64, 64] of the N that has been spread, after `eliminate`."""
    four: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, four, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, four, 2)
    low: gl.constexpr = 1 if PAIRS else 0
    # blocks of 16: D + D L D
    D, D_right, L = part(scratch.D, 0, PAIRS), part(scratch.D, low, PAIRS), part(scratch.L, 0, PAIRS)
    L_low = part(scratch.L, low, PAIRS).load(right)
    none = gl.zeros([4, 16, 16], gl.float32, four)
    X = product(D.load(left), L.load(right), D_right.load(left), L_low, none, PAIRS)
    X, X_low = high_low(X, PAIRS)
    D_16 = D.load(four).to(gl.float32)
    if PAIRS:
        D_16 += D_right.load(four).to(gl.float32)
    X, X_low = gl.convert_layout(X, left), gl.convert_layout(X_low, left)
    D_16 = product(X, D.load(right), X_low, D_right.load(right), D_16, PAIRS)
    store_diagonal(scratch.N, D_16, PAIRS)

    # columns of blocks
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    D_16 = gl.convert_layout(D_16.reshape([64, 16]), mma)
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))[:, None] // 16
    none = gl.zeros([64, 16], gl.float32, mma)
    t_N = scratch.N
    Y_3 = gl.where(m == 3, D_16, none)
    Z_2 = times(Y_3, t_N, 14, none, mma, PAIRS)
    Y_2 = times(Z_2, t_N, 2, gl.where(m == 2, D_16, none), mma, PAIRS)
    Z_1 = times(Y_2, t_N, 9, times(Y_3, t_N, 13, none, mma, PAIRS), mma, PAIRS)
    Z_0 = times(Y_2, t_N, 8, times(Y_3, t_N, 12, none, mma, PAIRS), mma, PAIRS)
    Y_1 = times(Z_1, t_N, 1, gl.where(m == 1, D_16, none), mma, PAIRS)
    Z_0 = times(Y_1, t_N, 4, Z_0, mma, PAIRS)
    Y_0 = times(Z_0, t_N, 0, gl.where(m == 0, D_16, none), mma, PAIRS)
    joined = gl.join(gl.join(Y_0, Y_1), gl.join(Y_2, Y_3))  # [64, 16, 2, 2]
    return gl.convert_layout(joined.permute((0, 3, 2, 1)).reshape([64, 64]), layout)
