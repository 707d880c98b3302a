"""The gradient of Gated Linear Attention on Hopper: one walk backwards that makes all of it (chapter 15).

With S the state before a chunk, R the gradient of the state after it (over scale, which comes last), and P, q', k', r,
b as in gla_forward.py, except that here a strong chunk keeps its mild channels' factors (a channel is strong or mild)::

    dP  = do v^T    D_i = dP_ii    R' = e^r R    dP below is strictly lower triangular, P lower triangular
    dv  = scale * (P^T do + k' R')                                                              (1)
    dq  = scale * e^(b - r) (do (e^r S)^T + dP k' + D k')                                       (2)
    dk  = scale * e^(r - b) (dP^T q' + v R'^T + D q')                                           (3)
    dg_t = scale * (sum over i >= t of q'_i (do (e^r S)^T + dP k')_i - k'_i (dP^T q')_i
                  + sum over j < t of k'_j (v R'^T)_j + sum_v e^(2 r) S R)                      (4)
    R  <- e^r (R' + q'^T do)                                                                    (5)

(4) counts the paths that cross token t, as portable/gla_gradient.py does, which says why pairs i = j stay apart.
Reference: :mod:`gla_ref.gradients.gla`.

First `walk` of gla_forward.py stores the state before each chunk in 16 bits (k, v, g in, states out: 5 units, of one
tensor's bytes, at K = V = 128). Then `unwind` goes from the last chunk to the first (q, k, v, g, do, states in; dq, dk,
dv, dg out: 11 units). It has three roles, which work on different chunks at the same time::

    loader        1 warp     asks the copy engine (TMA) for what a tile has room for
    transformer   4 warps    before: q', k', the state's factors, is the chunk strong?   after: e^(b - r), e^(r - b) of
                             (2) and (3), the sums of (4); dq, dk, dg out
    multiplier    4 or 8     nine products (WGMMA), R in its registers; dv out

Shared memory decides the rest, at K = V = 128: q, k, g have two stages, since the transformer is a chunk ahead; v, do
and S have one. What is made goes where something has been read: dv into the tile of v, dq and dk into those of q' and
k', dg into that of g. The sums of (4) are over rows, which lie in many threads of the multiplier and in one thread of
the transformer (a channel each), so their terms cross over in float32: those of pairs and reads (`net`) through
the memory of S, those of writes (`later`) through that of R' in 16 bits.

The roles meet at `Barriers`, in rounds i = 0, 1, ... (chunk n - 1 - i); phases are counted as in ring.py, and what
belongs to a stage lies in stage i % 2.

*Why nobody waits for ever.* The loader asks for x of round 0, then for v, do, S of round i and x of round i + 1; the
transformer makes `hat` of round i + 1, then finishes round i. Each waits only for what comes earlier in these orders.
tests/test_kernels_hopper.py plays this file on a CPU, in any order of steps that the barriers allow.

*Products.* A product has read its operands when it has been waited for, but only for
the warps that waited: `barrier` stands between that and a store into its operands' memory.

*Strong chunks.* `unwind` leaves out their pairs, i = j too, and `mend_gradient` adds them, level by level, to all four.

The kernels, and the number of programs of each (N sequences)::

    walk            H * segments         states before each chunk
    unwind          H * segments         dq, dk, dv, dg
    mend_gradient   H * chunks / 16      adds to them the pairs of strong chunks

Limits: tokens in bfloat16, gates of 16 bits, K <= 128, V <= 128. It takes half of the portable kernel's memory. A plan
takes it from Triton 3.9 on, by which it is faster (FASTER in __init__.py), before only where it is asked for
(`kernel="hopper"`).
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, cdiv
from ..portable import gla_forward as portable
from ..portable.gla_forward import Readers, both_halves, clamped, gates_to_all_borders, meetings, sums, to_border
from ..portable.segments import carry_states, slots, which_segment
from ..portable.tiles import FLOOR, STAY, VARYING, load_tile, operand, patterns, product, store_tile
from .gla_forward import Roles, Sizes, on_hopper
from .gluon import (
    barrier,
    copy_in,
    copy_out,
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .ring import invalidate, new_barriers
from .tiles import LOG2E, Sums, add, box, exclusive, fill_sums, gate_sums, keep_rows, part_of, scaled, store_part

# the tensors that the copy engine brings, as boxes; or their tiles in shared memory, two of q, k and g
Tiles = namedtuple("Tiles", "q k g v do S")
# tiles by which transformer and multiplier tell each other about a chunk
Sides = namedtuple("Sides", "factors flags net later kept")
Copies = namedtuple("Copies", "P dP R")  # the multiplier's tiles in 16 bits
Gradients = namedtuple("Gradients", "q k v g")  # of these, as boxes or as pointers


class Barriers(NamedTuple):
    """Who waits for whom: `has` until tiles are filled, `free` until they may be filled again."""

    has_x: object  # copy engine -> transformer: q, k, g of a stage have come
    has_v: object  # copy engine -> multiplier, as the next two
    has_do: object
    has_S: object
    hat: object  # transformer -> multiplier: q', k' and factors of a stage are in place
    has_later: object  # multiplier -> transformer: v R'^T is done with R', `later` is written; None without dg
    has_net: object  # multiplier -> transformer: all products are done, `net`, dq', dk' are written
    free_x: object  # transformer -> loader: dq, dk, dg have left the stage
    free_v: object  # multiplier -> loader: dv has left v
    free_do: object  # multiplier -> loader: the products have read do
    free_S: object  # transformer -> loader: `net` has been read
    free_R: object  # transformer -> multiplier: `later` has been read; None without dg


@gluon.jit
def loader(boxes, tiles, bars, part, C: gl.constexpr):
    """Bring each tile as soon as there is room; what lies beyond the tensor comes as zeros."""
    i_b, i_h, i_c, begin, n = part.i_b, part.i_h, part.i_c, part.begin, part.n
    for i in range(n + 1):
        if i > 0:  # of round i - 1
            o_t = begin + (n - i) * C
            odd = i & 1  # parity of round i - 2
            mbarrier.wait(bars.free_v, odd)
            mbarrier.expect(bars.has_v, boxes.v.block_type.nbytes)
            copy_in(boxes.v, [i_b, i_h, o_t, 0], bars.has_v, tiles.v)
            mbarrier.wait(bars.free_do, odd)
            mbarrier.expect(bars.has_do, boxes.do.block_type.nbytes)
            copy_in(boxes.do, [i_b, i_h, o_t, 0], bars.has_do, tiles.do)
            mbarrier.wait(bars.free_S, odd)
            mbarrier.expect(bars.has_S, boxes.S.block_type.nbytes)
            copy_in(boxes.S, [i_c + n - i, i_h, 0, 0], bars.has_S, tiles.S)
        if i < n:
            o_t, s = begin + (n - 1 - i) * C, i % 2
            mbarrier.wait(bars.free_x.index(s), ((i // 2) & 1) ^ 1)
            bar = bars.has_x.index(s)
            mbarrier.expect(bar, 2 * boxes.k.block_type.nbytes + boxes.g.block_type.nbytes)
            copy_in(boxes.g, [i_b, i_h, o_t, 0], bar, tiles.g.index(s))
            copy_in(boxes.k, [i_b, i_h, o_t, 0], bar, tiles.k.index(s))
            copy_in(boxes.q, [i_b, i_h, o_t, 0], bar, tiles.q.index(s))


@gluon.jit
def transformer(
    boxes, tiles, sides, bars, sums, gradients, strong, part, sizes,
    C: gl.constexpr, BK: gl.constexpr, LIMIT: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr,
):
    """`transform` of each round, a round ahead of `finish`."""
    for i in range(part.n + 1):
        if i < part.n:
            transform(tiles, sides, bars, sums, strong, i, part, sizes, C, BK, LIMIT, PACKED, W)
        if i > 0:
            finish(boxes, tiles, sides, bars, sums, gradients, i - 1, part, sizes, C, BK, PACKED, W)


@gluon.jit
def transform(
    tiles, sides, bars, sums, strong, i, part, sizes,
    C: gl.constexpr, BK: gl.constexpr, LIMIT: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr,
):
    """q' and k' in place of q and k, the factors of the state and of a strong chunk's channels, and its flag."""
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BK * 4 // W, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, tile))[:, None]
    s = i % 2
    mbarrier.wait(bars.has_x.index(s), (i // 2) & 1)
    b_q = tiles.q.index(s).reshape([C, BK])
    b_k = tiles.k.index(s).reshape([C, BK])
    b_g = tiles.g.index(s).reshape([C, BK])
    c = part.n - 1 - i
    left = part.end - part.begin - c * C
    if PACKED and left < C:  # the rest is another sequence's
        keep_rows(b_q, left, tile)
        keep_rows(b_k, left, tile)
        keep_rows(b_g, left, tile)
        fence_async_shared()
    x, r = gate_sums(b_g, sums, tile, W)
    mild = gl.min(r, 0) >= LIMIT * 0.5
    if mild:
        x = x * LOG2E
        sides.factors.index(3 * s).store(gl.exp2(r * LOG2E))
        sides.factors.index(3 * s + 1).store(gl.full([BK], 1.0, gl.float32, one))
        sides.factors.index(3 * s + 2).store(gl.full([BK], 0.0, gl.float32, one))
        scaled(b_k, gl.exp2(-x), tile)
        scaled(b_q, gl.exp2(x), tile)
    else:
        gates = b_g.load(tile).to(gl.float32)
        b_g.store(gl.where(gates < FLOOR, FLOOR, gates).to(b_g.dtype))
        fence_async_shared()
        x = warpgroup_mma(sums.signs, b_g, gl.zeros([C, BK], gl.float32, tile), use_acc=False) * LOG2E
        half = gl.sum(gl.where(rows == C - 1, x, 0.0), 0)  # r by columns of x: its last row
        # a strong channel's q decays from the start, its k to the end, the state in between
        mild_channels = half >= LIMIT * 0.5 * LOG2E
        edge, rest = gl.where(mild_channels, half, 0.0), gl.where(mild_channels, 0.0, half)
        sides.factors.index(3 * s).store(gl.exp2(edge))
        sides.factors.index(3 * s + 1).store(gl.exp2(2.0 * rest))
        sides.factors.index(3 * s + 2).store(rest)
        scaled(b_k, gl.exp2(rest[None, :] - x), tile)
        scaled(b_q, gl.exp2(rest[None, :] + x), tile)
    is_strong = 1 - mild.to(gl.int32)
    sides.flags.index(s).store(gl.full([1], 1, gl.int32, one) * is_strong)
    gl.store(strong + (part.i_c + c).to(gl.int64) * sizes.H + part.i_h, is_strong.to(gl.int8))
    fence_async_shared()
    mbarrier.arrive(bars.hat.index(s), count=1)


@gluon.jit
def finish(
    boxes, tiles, sides, bars, sums, gradients, i, part, sizes,
    C: gl.constexpr, BK: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr,
):
    """dq, dk of dq', dk', which lie in the place of q', k'; dg, into the place of g."""
    dg, scale, i_b, i_h = gradients.g, sizes.scale, part.i_b, part.i_h
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BK * 4 // W, 16])
    columns: gl.constexpr = gl.BlockedLayout([C, 1], [1, 32], [1, W], [0, 1])  # a thread has a channel
    s = i % 2
    b_q = tiles.q.index(s).reshape([C, BK])
    b_k = tiles.k.index(s).reshape([C, BK])
    b_g = tiles.g.index(s).reshape([C, BK])
    if dg is not None:  # (4)
        mbarrier.wait(bars.has_later.index(0), i & 1)
        b_later = sides.later.load(columns)
        # of the rows before, and not of all less this one: what decays strongly is far smaller than the rest
        total, _ = gl.associative_scan((gl.zeros_like(b_later), b_later), 0, exclusive)
        mbarrier.arrive(bars.free_R.index(0), count=1)
    mbarrier.wait(bars.has_net, i & 1)
    if dg is not None:
        total = total + gl.associative_scan(sides.net.load(columns), 0, add, reverse=True)
        total = (total + sides.kept.load(gl.SliceLayout(0, columns))[None, :]) * scale
        b_d = total.to(dg.dtype.element_ty)
        fence_async_shared()  # `net` has been read before the copy engine writes there
    mbarrier.arrive(bars.free_S, count=1)
    x = warpgroup_mma(sums.signs, b_g, gl.zeros([C, BK], gl.float32, tile), use_acc=False) * LOG2E
    barrier()
    rest = sides.factors.index(3 * s + 2).load(gl.SliceLayout(0, tile))[None, :]
    scaled(b_q, gl.exp2(rest + x) * scale, tile)
    scaled(b_k, gl.exp2(rest - x) * scale, tile)
    if dg is not None:
        b_g.store(b_d)
    o_t = part.begin + (part.n - 1 - i) * C
    if PACKED and part.end - o_t < C:  # after the last row there is the next sequence
        tile_rows(gradients.q, b_q, i_h, o_t, part.end, sizes, tile)
        tile_rows(gradients.k, b_k, i_h, o_t, part.end, sizes, tile)
        if dg is not None:
            tile_rows(dg, b_g, i_h, o_t, part.end, sizes, tile)
    else:
        fence_async_shared()
        barrier()  # all threads' stores are fenced
        copy_out(boxes.q, [i_b, i_h, o_t, 0], tiles.q.index(s))
        copy_out(boxes.k, [i_b, i_h, o_t, 0], tiles.k.index(s))
        if dg is not None:
            copy_out(boxes.g, [i_b, i_h, o_t, 0], tiles.g.index(s))
        tma.store_wait(0)  # the copy engine has read them
    mbarrier.arrive(bars.free_x.index(s), count=1)


@gluon.jit
def tile_rows(x, tile, i_h, o_t, end, sizes, layout: gl.constexpr):
    """The rows of a tile before `end`, by threads."""
    C: gl.constexpr = tile.shape[0]
    BD: gl.constexpr = tile.shape[1]
    rows = o_t + gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BD, layout=gl.SliceLayout(0, layout))
    p = x + ((rows.to(gl.int64) * sizes.H + i_h) * sizes.K)[:, None] + columns[None, :]
    gl.store(p, tile.load(layout), mask=(rows < end)[:, None] & (columns < sizes.K)[None, :])
    fence_async_shared()  # the copy engine will write here


@gluon.jit
def multiplier(
    boxes, gradients, tiles, sides, copies, bars, R_in, R_out, part, sizes,
    C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr,
):
    """(1) to (3) but for what the transformer does, and (5), from R_in to R_out."""
    i_h, end, n, H, K, V, scale = part.i_h, part.end, part.n, sizes.H, sizes.K, sizes.V, sizes.scale
    t_P, t_dP, t_R = copies
    NEED_DG: gl.constexpr = gradients.g is not None
    # R: 16 rows a warp; all others: 64 rows are four warps', further warps share columns
    of_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BV * 4 // W, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BK * 4 // W, 16])
    of_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, C * 4 // W, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, of_R))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, of_R))
    p_R = ((part.i_s * H + i_h).to(gl.int64) * K + o_k)[:, None] * V + o_v[None, :]
    m_R = (o_k < K)[:, None] & (o_v < V)[None, :]
    if R_in is not None:
        R = gl.load(R_in + p_R, mask=m_R, other=0.0)
    else:
        R = gl.zeros([BK, BV], gl.float32, of_R)
    i_P = gl.arange(0, C, layout=gl.SliceLayout(1, of_P))[:, None]
    j_P = gl.arange(0, C, layout=gl.SliceLayout(0, of_P))[None, :]
    b_v = tiles.v.reshape([C, BV])
    b_do = tiles.do.reshape([C, BV])
    b_S = tiles.S.reshape([BK, BV])
    for i in range(n):
        s, odd = i % 2, i & 1
        o_t = part.begin + (n - 1 - i) * C
        b_q = tiles.q.index(s).reshape([C, BK])
        b_k = tiles.k.index(s).reshape([C, BK])
        # P and k' R'. Barriers are waited for while no product runs: ptxas would let all of them run one by one
        mbarrier.wait(bars.hat.index(s), (i // 2) & 1)
        if NEED_DG:
            mbarrier.wait(bars.free_R.index(0), odd ^ 1)  # `sides.later` of the round before
        strong = gl.sum(sides.flags.index(s).load(one), 0)
        P = warpgroup_mma(
            b_q, b_k.permute((1, 0)), gl.zeros([C, C], gl.float32, of_P), use_acc=False, is_async=True
        )
        first = sides.factors.index(3 * s).load(gl.SliceLayout(1, of_R))
        R = R * first[:, None]
        t_R.store(R.to(b_k.dtype))
        fence_async_shared()
        b_dv = warpgroup_mma(b_k, t_R, gl.zeros([C, BV], gl.float32, of_v), use_acc=False, is_async=True)
        P = warpgroup_mma_wait(1, deps=[P])
        # by where: what is left out may be infinite; of a strong chunk all
        t_P.store(gl.where((i_P >= j_P) & (strong == 0), P, 0.0).to(b_k.dtype))
        b_dv = warpgroup_mma_wait(0, deps=[b_dv])
        fence_async_shared()  # not right before the wait, of which ptxas 12.8 may die

        # (1), dP and v R'^T
        mbarrier.wait(bars.has_v, odd)
        mbarrier.wait(bars.has_do, odd)
        if PACKED and end - o_t < C:
            keep_rows(b_v, end - o_t, of_v)
            keep_rows(b_do, end - o_t, of_v)
            fence_async_shared()
        dP = warpgroup_mma(
            b_do, b_v.permute((1, 0)), gl.zeros([C, C], gl.float32, of_P), use_acc=False, is_async=True
        )
        b_dv = warpgroup_mma(t_P.permute((1, 0)), b_do, b_dv, is_async=True)
        dP = warpgroup_mma_wait(1, deps=[dP])
        dP = gl.where(strong == 0, dP, 0.0)
        own = gl.sum(gl.where(i_P == j_P, dP, 0.0), 1)
        own = gl.convert_layout(own, gl.SliceLayout(1, of_k))[:, None]
        t_dP.store(gl.where(i_P > j_P, dP, 0.0).to(b_k.dtype))
        b_dv = warpgroup_mma_wait(0, deps=[b_dv])
        fence_async_shared()
        low_dv = (b_dv * scale).to(b_k.dtype)
        b_write = warpgroup_mma(b_v, t_R.permute((1, 0)), gl.zeros([C, BK], gl.float32, of_k), use_acc=False)
        barrier()  # all warps' products have read v and R'
        store_part(gradients.v, low_dv, tiles.v, boxes.v, o_t, part, V, of_v, PACKED)
        if NEED_DG:
            sides.later.store(b_k.load(of_k).to(gl.float32) * b_write)
            mbarrier.arrive(bars.has_later.index(0), count=1)

        # dq' of (2), and what crosses a token from state to state
        mbarrier.wait(bars.has_S, odd)
        b_dq = warpgroup_mma(
            b_do, b_S.permute((1, 0)), gl.zeros([C, BK], gl.float32, of_k), use_acc=False, is_async=True
        )
        if NEED_DG:
            through = sides.factors.index(3 * s + 1).load(gl.SliceLayout(1, of_R))
            sides.kept.store(gl.sum(b_S.load(of_R).to(gl.float32) * R, 1) * first * through)
        b_dq = warpgroup_mma_wait(0, deps=[b_dq])
        b_dq = b_dq * sides.factors.index(3 * s).load(gl.SliceLayout(0, of_k))[None, :]
        b_dq = warpgroup_mma(t_dP, b_k, b_dq)
        barrier()  # all warps' products have read S
        if NEED_DG:
            sides.net.store(b_q.load(of_k).to(gl.float32) * b_dq)
        low_dq = (b_dq + own * b_k.load(of_k).to(gl.float32)).to(b_k.dtype)
        tma.store_wait(0)  # dv has been read
        mbarrier.arrive(bars.free_v, count=1)

        # dk' of (3) and R of (5)
        if strong != 0:
            R = R * sides.factors.index(3 * s + 1).load(gl.SliceLayout(1, of_R))[:, None]
        b_dk = warpgroup_mma(
            t_dP.permute((1, 0)), b_q, gl.zeros([C, BK], gl.float32, of_k), use_acc=False, is_async=True
        )
        R = warpgroup_mma(b_q.permute((1, 0)), b_do, R, is_async=True)
        b_dk = warpgroup_mma_wait(1, deps=[b_dk])
        if NEED_DG:
            sides.net.store(sides.net.load(of_k) - b_k.load(of_k).to(gl.float32) * b_dk)
        low_dk = (b_dk + b_write + own * b_q.load(of_k).to(gl.float32)).to(b_k.dtype)
        R = warpgroup_mma_wait(0, deps=[R])
        R = R * first[:, None]
        mbarrier.arrive(bars.free_do, count=1)  # and all warps' products have read q'
        b_q.store(low_dq)
        b_k.store(low_dk)
        fence_async_shared()
        mbarrier.arrive(bars.has_net, count=1)
    tma.store_wait(0)
    if R_out is not None:
        gl.store(R_out + p_R, R, mask=m_R)


@gluon.jit(do_not_specialize=("N", "T", "L", "H"))
def unwind(
    q, k, v, g, do, S, d_dq, d_dk, d_dv, d_dg, dq, dk, dv, dg, strong, R_in, R_out, cu,
    N, T, L, H, K, V, scale,
    C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, W: gl.constexpr, WT: gl.constexpr,
    LIMIT: gl.constexpr, REGISTERS: gl.constexpr,
):
    """A segment of a head, from its last chunk to its first, and from R_in after it to R_out before it.

    q ... S are boxes, and so are d_dq ... of the tensors dq ...; d_dg and dg may be None, R_in and R_out too.
    """
    PACKED: gl.constexpr = cu is not None
    # which tile
    pid = gl.program_id(0)
    i_h, i_s = pid % H, pid // H
    part = part_of(cu, i_s, i_h, 0, N, T, L, H, C, W)

    # shared memory
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    all_q = gl.allocate_shared_memory(q.dtype, [2, 1, 1, C, BK], q.layout)
    all_k = gl.allocate_shared_memory(k.dtype, [2, 1, 1, C, BK], k.layout)
    all_g = gl.allocate_shared_memory(g.dtype, [2, 1, 1, C, BK], g.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [1, 1, C, BV], v.layout)
    t_do = gl.allocate_shared_memory(do.dtype, [1, 1, C, BV], do.layout)
    # S and `net`, R' and `later` take turns: a tile of float32 [C, BK] is 128 // BV of 16 bits [BK, BV]
    turns_S = gl.allocate_shared_memory(S.dtype, [128 // BV, 1, 1, BK, BV], S.layout)
    turns_R = gl.allocate_shared_memory(k.dtype, [128 // BV, BK, BV], square)
    # threads write it by rows of 8 numbers, and read it by columns
    terms: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    net = reinterpret(turns_S, gl.float32, [C, BK], terms)
    later = reinterpret(turns_R, gl.float32, [C, BK], terms)
    t_P = gl.allocate_shared_memory(k.dtype, [C, C], square)
    t_dP = gl.allocate_shared_memory(k.dtype, [C, C], square)
    signs = gl.allocate_shared_memory(g.dtype, [C, C], square)
    halves = gl.allocate_shared_memory(g.dtype, [C, 16], gl.NVMMASharedLayout(32, 16, 2))
    factors = gl.allocate_shared_memory(gl.float32, [6, BK], line)  # two stages of first, through, rest
    kept = gl.allocate_shared_memory(gl.float32, [BK], line)
    flags = gl.allocate_shared_memory(gl.int32, [2, 1], line)
    fill_sums(signs, halves, W)
    sums = Sums(signs, halves, None)

    # barriers
    has_x, hat, free_x, singles = new_barriers(2, 1), new_barriers(2, 1), new_barriers(2, 1), new_barriers(7, 1)
    has_later, free_R = (new_barriers(1, 1), new_barriers(1, 1)) if dg is not None else (None, None)
    bars = Barriers(
        has_x=has_x, has_v=singles.index(0), has_do=singles.index(1), has_S=singles.index(2), hat=hat,
        has_later=has_later, has_net=singles.index(3), free_x=free_x, free_v=singles.index(4),
        free_do=singles.index(5), free_S=singles.index(6), free_R=free_R,
    )
    fence_async_shared()

    boxes, tiles = Tiles(q, k, g, v, do, S), Tiles(all_q, all_k, all_g, t_v, t_do, turns_S.index(0))
    sides, copies = Sides(factors, flags, net, later, kept), Copies(t_P, t_dP, turns_R.index(0))
    to, gradients, sizes = Gradients(d_dq, d_dk, d_dv, d_dg), Gradients(dq, dk, dv, dg), Sizes(H, K, V, scale)
    gl.warp_specialize(
        [
            (multiplier, (to, gradients, tiles, sides, copies, bars, R_in, R_out, part, sizes, C, BK, BV, PACKED, W)),
            (transformer, (to, tiles, sides, bars, sums, gradients, strong, part, sizes, C, BK, LIMIT, PACKED, WT)),
            (loader, (boxes, tiles, bars, part, C)),
        ],
        [WT, 1],
        [REGISTERS, 24],
    )
    # all roles are done: until here the barriers' bytes are theirs (ring.py)
    invalidate((has_x, hat, free_x, singles))
    if dg is not None:
        invalidate((has_later, free_R))


@triton.jit(do_not_specialize=VARYING)
def mend_gradient(
    q, k, v, do, g, dq, dk, dv, dg, strong, cu, s_q, s_k, s_v, s_do, s_g, s_d, s_dv, N, T, H, K, V, scale, n_flags,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Add to dq, dk, dv and dg (None where it is not needed) the pairs of strong chunks, level by level.

    With dP' = dP below the diagonal and dP^T above it, and a level's tile X (gla_forward.py), (dP' of the level) X is
    dq in second halves of blocks and dk in first halves. `strong` [n_flags] has one flag for each chunk of a head;
    dq, dk and dg have strides s_d.
    """
    # which chunks: BN of them, of which most have nothing to do
    first = tl.program_id(0) * BN
    o_n = first + tl.arange(0, BN)
    if tl.max(tl.load(strong + o_n, mask=o_n < n_flags, other=0).to(tl.int32)) == 0:
        return
    # once for all chunks
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    masks, meeting = gates_to_all_borders(LEVELS, C, FAST_SUMS), meetings(LEVELS, C)
    for i in tl.range(first, tl.minimum(first + BN, n_flags), disable_licm=STAY):
        if tl.load(strong + i) != 0:
            i_h, i_s = i % H, i // H
            i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)

            # compute: the diagonal of dP, and dP'
            b_dP = tl.zeros([C, C], dtype=tl.float32)
            for o_v in tl.range(0, V, BV):
                b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_dP = tl.dot(b_do, b_v.T, b_dP, input_precision="ieee")
            b_own = tl.sum(tl.where(o_i == o_j, b_dP, 0.0), 1)[:, None]  # [C, 1]
            b_dP, of_dP = operand(tl.where(o_i > o_j, b_dP, b_dP.T), q.dtype.element_ty, -100.0)

            # compute: dq, dk, dg of BK channels; of all, P with P^T above its diagonal
            b_P = tl.zeros([C, C], dtype=tl.float32)
            for o_k in tl.range(0, K, BK, disable_licm=STAY):
                b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_f = clamped(b_g)
                b_P += tl.where(o_i == o_j, tl.dot(b_k, b_q.T, input_precision="ieee"), 0.0)
                b_dq, b_dk = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
                for level in tl.static_range(LEVELS):
                    b_E = to_border(b_f, masks[level], FAST_SUMS)  # [C, BK]
                    b_x, of_q, of_k = both_halves(b_q, b_k, b_E, level)
                    # o_k // K is 0. The compiler does not know; else it would keep b_A of all levels in registers
                    here = meeting == level + o_k // K
                    b_A = tl.where(here, b_dP, 0.0)
                    b_pairs = tl.dot(b_x, b_x.T, input_precision="ieee") * (of_q * of_k)
                    b_P = tl.where(here, b_P + b_pairs, b_P)
                    b_d = tl.dot(b_A, b_x, input_precision="ieee") * (b_E * of_dP)
                    later = ((o_i >> level) & 1) != 0  # [C, 1]
                    b_dq = tl.where(later, b_dq + b_d * of_k, b_dq)
                    b_dk = tl.where(later, b_dk, b_dk + b_d * of_q)
                b_u = load_tile(dq, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # asked for before any store
                b_w = load_tile(dk, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                if dg is not None:  # i = j crosses no gate; nothing crosses -inf
                    b_d = load_tile(dg, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                    b_d += sums(o_i <= o_j, b_q * b_dq - b_k * b_dk, FAST_SUMS) * scale
                    b_d = tl.where(b_g == float("-inf"), 0.0, b_d)
                    store_tile(dg, b_d, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                b_u += (b_dq + b_own * b_k) * scale
                b_w += (b_dk + b_own * b_q) * scale
                store_tile(dq, b_u, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                store_tile(dk, b_w, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)

            # compute: dv
            b_P = tl.where(o_i <= o_j, b_P, 0.0)  # P^T
            for o_v in tl.range(0, V, BV):
                b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_dv = load_tile(dv, s_dv, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_dv += product(b_P, b_do) * scale
                store_tile(dv, b_dv, s_dv, i_b, i_h, o_t, stop, o_v, V, C, BV, False)


# The plan.

ROLES = {64: Roles(4, 4, 2, 128, 160), 128: Roles(8, 4, 2, 128, 152)}  # by BK


def plan_backward(hardware: Hardware, call) -> Plan:
    """(dq, dk, dv, dg, None, dS0); None for what is not given or, of dg, not needed. `starts` may be None."""
    draft, q, k, v, g, S = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.initial_state
    shared = on_hopper(portable.begin(draft, q, v, call.cu_seqlens, call.scale, call.path))
    shared, do, R = portable.begin_backward(shared, v, call.do, call.dS)
    draft.because("one walk backwards for all gradients: the Hopper kernel, in Gluon")
    S_in = draft.contiguous(S, torch.float32)
    states = portable.walks(shared, Readers(None, k, g=g), v, S_in, states="states", starts=call.starts).states
    dq, dk, dv = (draft.like(f"d{x.name}", x) for x in (q, k, v))
    dg = draft.like("dg", g) if call.need_dg else None
    # spare slots are nobody's: their flags must be zeros
    strong = draft.new("strong", shared.chunks, shared.H, dtype=torch.int8, zero=shared.cu is not None)
    R_0 = draft.new("R_0", shared.N, shared.H, shared.K, shared.V) if S else None
    L, _ = shared.segment()
    n = slots(shared.B, shared.T, shared.cu, L)
    R_in, R_out = R, R_0
    if L <= shared.T:  # first each segment's share of R, then the R that it begins with
        ends, decay = draft.new("ends", n, shared.H, shared.K, shared.V), draft.new("decay", n, shared.H, shared.K)
        R_0 = R_0 or draft.new("R_0", shared.N, shared.H, shared.K, shared.V)
        shared.launch_walk(Readers(None, q, g=g), do, True, L, None, ends, decay=decay)
        carry_states(draft, ends, decay, R, R_0, shared.cu, shared.T, L, True)
        R_in, R_out = ends, None
    C, BK, BV, roles = shared.C, shared.BK, shared.BV, ROLES[shared.BK]
    draft.launch(
        unwind, shared.H * n,
        q=box(q, C, BK), k=box(k, C, BK), v=box(v, C, BV), g=box(g, C, BK), do=box(do, C, BV), S=box(states, BK, BV),
        d_dq=box(dq, C, BK), d_dk=box(dk, C, BK), d_dv=box(dv, C, BV), d_dg=box(dg, C, BK) if dg else None,
        dq=dq, dk=dk, dv=dv, dg=dg, strong=strong, R_in=R_in, R_out=R_out, cu=shared.cu,
        N=shared.N, T=shared.T, L=L, H=shared.H, K=shared.K, V=shared.V, scale=shared.scale,
        C=C, BK=BK, BV=BV, W=roles.multiplier, WT=roles.transformer, LIMIT=shared.limit,
        REGISTERS=roles.of_transformer, num_warps=roles.multiplier, num_stages=2, maxnreg=roles.registers,
    )
    # tiles of 64 channels spill what fills registers, of 32 hardly; older assemblers read unset registers there
    # (lab/known.md)
    BK, BV = (32, shared.BV) if STAY else (64, 64)
    s_q, s_k, s_v, s_do, s_g, s_d, s_dv = patterns(q, k, v, do, g, dq, dv)
    draft.launch(
        mend_gradient, cdiv(shared.chunks * shared.H, 16),
        q=q, k=k, v=v, do=do, g=g, dq=dq, dk=dk, dv=dv, dg=dg, strong=strong, cu=shared.cu,
        s_q=s_q, s_k=s_k, s_v=s_v, s_do=s_do, s_g=s_g, s_d=s_d, s_dv=s_dv,
        N=shared.N, T=shared.T, H=shared.H, K=shared.K, V=shared.V, scale=shared.scale,
        n_flags=shared.chunks * shared.H, LEVELS=shared.levels, BK=BK, BV=BV, BN=16, **shared.same,
        num_warps=4, num_stages=1,
    )
    dS0 = draft.compute("dS0", torch.mul, R_0 if S else None, shared.scale)
    return draft.plan("hopper", dq, dk, dv, dg, None, dS0)
