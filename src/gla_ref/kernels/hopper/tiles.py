"""Tiles of a head on Hopper: how kernels in Gluon find, clear, round and send them (chapter 22).

portable/tiles.py and portable/segments.py have the same for kernels in Triton.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.plan import Box, Spec, boxed
from .gluon import copy_out, fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
BOUNDARIES = gl.constexpr(256)  # read at a time, in packed sequences


class Part(NamedTuple):
    """The chunks and columns of a program."""

    i_s: object  # slot of the segment
    i_b: object  # batch row
    i_h: object  # head, in the delta rules and KDA a value head
    i_k: object  # its key head
    i_c: object  # slot of the first chunk
    o_v: object  # first column
    begin: object  # first token
    end: object  # the token after the last one
    n: object  # chunks; none in a spare slot
    T: object  # tokens of a batch row
    HV: object  # heads, as i_h


# a chunk of a head: batch row, (value) head, first token, the token after the sequence's last one; sizes of the tensor
Chunk = namedtuple("Chunk", "i_b i_h o_t stop T HV")


@gluon.jit
def which_segment(cu, i_s, N, T, L, W: gl.constexpr):
    """(sequence, batch row, the sequence's start and stop, the segment's start) of slot i_s (portable/segments.py)."""
    # i_s * 0: a zero of i_s's type, since both branches must return the same types
    if cu is None:
        n_s = gl.cdiv(T, L)
        return i_s // n_s, i_s // n_s, i_s * 0, i_s * 0 + T, i_s % n_s * L
    else:
        of_vector: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
        i_n = i_s * 0 - 1
        for o in range(0, N, BOUNDARIES):
            o_n = o + gl.arange(0, BOUNDARIES, layout=of_vector)
            b_cu = gl.load(cu + o_n, mask=o_n < N, other=0).to(gl.int32)
            i_n += gl.sum(((b_cu // L + o_n <= i_s) & (o_n < N)).to(gl.int32), 0)
        start, stop = gl.load(cu + i_n).to(gl.int32), gl.load(cu + i_n + 1).to(gl.int32)
        return i_n, i_s * 0, start, stop, start + (i_s - start // L - i_n) * L


@gluon.jit
def part_of(cu, i_s, i_h, o_v, N, T, L, H, C: gl.constexpr, W: gl.constexpr):
    """The part of a program: slot i_s, a head, the columns o_v on."""
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, W)
    end = gl.minimum(begin + L, stop)
    n = gl.cdiv(gl.maximum(end - begin, 0), C)
    i_c = (start // C + i_n if cu is not None else i_n * gl.cdiv(T, C)) + (begin - start) // C
    return Part(i_s, i_b, i_h, i_h, i_c, o_v, begin, end, n, T, H)


@gluon.jit
def which_chunk(pid, cu, N, T, HV, C: gl.constexpr, W: gl.constexpr):
    """The chunk of a program: neighbours are heads of the same tokens."""
    i_h, i_s = pid % HV, pid // HV
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, W)
    return Chunk(i_b, i_h, o_t, stop, T, HV)


@gluon.jit
def add(x, y):
    """For running sums, by a scan."""
    return x + y


@gluon.jit
def exclusive(sum_x, x, sum_y, y):
    """For exclusive sums, by a scan: of two runs of numbers (sum of all but the last, the last), the same of both."""
    return sum_x + x + sum_y, y


@gluon.jit
def keep_rows(tile, remaining, layout: gl.constexpr):
    """Zeros from row `remaining` on, in place: those rows are another sequence's."""
    x = tile.load(layout)
    rows = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((rows < remaining)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def scaled(tile, factors, layout: gl.constexpr):
    """A tile times factors, in place."""
    tile.store((tile.load(layout).to(gl.float32) * factors).to(tile.dtype))


Sums = namedtuple("Sums", "signs halves g_16")  # by which tensor cores add up gates; room for 16 bits of float32 ones


@gluon.jit
def fill_sums(signs, halves, W: gl.constexpr):
    """Fill signs [C, C] by 1/2 up to the diagonal and -1/2 above it, halves [C, 16] by 1/2."""
    C: gl.constexpr = signs.shape[0]
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    i = gl.arange(0, C, layout=gl.SliceLayout(1, by_rows))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, by_rows))[None, :]
    signs.store(gl.where(i >= j, 0.5, -0.5).to(signs.dtype))
    halves.store(gl.full([C, 16], 0.5, signs.dtype, gl.BlockedLayout([1, 8], [16, 2], [W, 1], [1, 0])))


@gluon.jit
def gate_sums(b_g, sums, layout: gl.constexpr, W: gl.constexpr):
    """(b - r [C, BK] in `layout`, r [BK]) of a chunk's gates in 16 bits, as products that tensor cores add up.

    signs g: row i is sum_(j <= i) g_j / 2 - sum_(j > i) g_j / 2 = b_i - r. g^T halves is r in each of 16 columns: a sum
    over the rows of a tile would go from warp to warp.
    """
    of_r: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 16, 16])
    C: gl.constexpr = b_g.shape[0]
    BK: gl.constexpr = b_g.shape[1]
    zeros, zeros_r = gl.zeros([C, BK], gl.float32, layout), gl.zeros([BK, 16], gl.float32, of_r)
    x = warpgroup_mma(sums.signs, b_g, zeros, use_acc=False, is_async=True)
    r = warpgroup_mma(b_g.permute((1, 0)), sums.halves, zeros_r, use_acc=False, is_async=True)
    x, r = warpgroup_mma_wait(0, deps=[x, r])
    return x, gl.max(r, 1)  # all 16 columns are alike, so this takes one


@gluon.jit
def operand(x, dtype: gl.constexpr, LEAST: gl.constexpr = -40.0):
    """x in a product's precision, and the factor that the product then lacks (portable/tiles.py).

    float16 ends at 65504, so x is divided by the power of 2 that leaves it at most 2^15: 2^LEAST at least, so that sums
    that are added to the product, divided too, stay finite.
    """
    if dtype == gl.float16:
        most = gl.max(gl.max(gl.abs(x), 1), 0)
        power = gl.maximum(gl.ceil(gl.log2(gl.maximum(most, 1e-30))) - 15.0, LEAST)
        return (x * gl.exp2(-power)).to(dtype), gl.exp2(power)
    else:
        return x.to(dtype), 1.0


@gluon.jit
def store_box(x, tile, box, i_0, i_h, i_1, i_2):
    """x by way of a tile to a box of [.., H, .., ..], by the copy engine; it leaves out what lies beyond the tensor."""
    tma.store_wait(0)  # all earlier copies of this program have read their tiles
    tile.reshape(x.shape).store(x)
    fence_async_shared()
    copy_out(box, [i_0, i_h, i_1, i_2], tile)


@gluon.jit
def store_part(p_x, x, tile, box, o_t, part, V, layout: gl.constexpr, PACKED: gl.constexpr):
    """x to rows o_t ... of a part, up to its end: in a packed sequence the rows from there on are the next one's.

    By `store_box` if all rows are the part's own, else to the tensor that p_x points to.
    """
    C: gl.constexpr = x.shape[0]
    BV: gl.constexpr = x.shape[1]
    if not PACKED:
        store_box(x, tile, box, part.i_b, part.i_h, o_t, part.o_v)
    elif part.end - o_t >= C:
        store_box(x, tile, box, 0, part.i_h, o_t, part.o_v)
    else:
        rows = o_t + gl.arange(0, C, layout=gl.SliceLayout(1, layout))
        columns = part.o_v + gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
        p = p_x + ((rows.to(gl.int64) * part.HV + part.i_h) * V)[:, None] + columns[None, :]
        gl.store(p, x, mask=(rows < part.end)[:, None] & (columns < V)[None, :])


@gluon.jit
def store_own_rows(p, x, chunk, o_v, V: gl.constexpr, layout: gl.constexpr):
    """x [C, BV] to a chunk's rows of p [B, T, H, V], up to the sequence's stop, by threads."""
    rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    p += ((chunk.i_b.to(gl.int64) * chunk.T + chunk.o_t) * chunk.HV + chunk.i_h) * V + o_v
    gl.store(p + (rows * (chunk.HV * V) + columns), x.to(p.dtype.element_ty), mask=rows < chunk.stop - chunk.o_t)


# The plan.


@functools.cache
def swizzled(bytes_: int, bits: int) -> gl.NVMMASharedLayout:
    """The layout in which WGMMA reads a tile with rows of so many bytes, at most 128 side by side.

    Made once, since a layout checks itself for longer than the rest of a plan takes.
    """
    return gl.NVMMASharedLayout(min(128, bytes_), bits, 4)


def box(x: Spec, rows: int, width: int) -> Box:
    """The box of a tile of `rows` and `width` for the copy engine."""
    size = x.dtype.itemsize
    return boxed(x, rows, width)._replace(layout=swizzled(width * size, 8 * size))


def blocks_of_16(width: int) -> gl.DistributedLinearLayout:
    """The layout of [4, 16, width] that a product's sums [64, width] have, or its first operand: a warp has a block."""
    registers = [[0, 0, 1], [0, 8, 0], *([0, 0, n] for n in (8, 16, 32) if n < width)]
    lanes, warps = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 16, width])
