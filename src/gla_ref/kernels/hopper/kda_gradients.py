"""The last launches of KDA's gradient on Hopper: all gradients of a chunk, from what both walks stored (chapter 24).

With S, R, w and e = -d of kda_walks.py, T of kda_prepare.py, d_ij of ../portable/kda_forward.py, and scale left out
until the end::

    dv = -T^T e            dbeta_i = dv_i w_i / beta_i^2                                                      (3)
    F = tril(do w^T)       G = -tril(dv w^T, -1)                                                              (4)
    dq_i = sum_j F_ij d_ij k_j + e^(b_i) (do S^T)_i                                                           (5)
    x_i  = sum_j G_ij d_ij k_j - e^(b_i) (dv S^T)_i                what k_i reads                             (6)
    dk_j = x_j + sum_i d_ij (F_ij q_i + G_ij k_i) + e^(b_C - b_j) (w R^T)_j                                   (7)
    dg_t = the paths across t: rows of (5), (6) from t on, less columns of pairs of (7) from t on, ends of    (8)
           (7) before t, and from state to state e^(b_C) sum_v S R

U = T v and W = T k^ are all of w that knows T, so no v, no inverse and no pair of keys is needed; beta is in dv. (3)
divides by beta: `prepare` counts a strength below 2^-40 in size as 2^-40.

*Anchors.* A chunk has blocks J of 16 tokens, x is the sum of gates from the block's first token to i, D_J the block's
sum, h = D_J / 2, or 0 in a strong channel of the block (D_J < LIMIT). Left operands are q e^(x - h), k e^(x - h), right
ones k e^(D - x - h), and a pair of blocks J < I meets by one number of each channel::

    e^(h_I + D_(I - 1) + ... + D_(J + 1) + h_J)        in the own block e^-h e^h, or 0 in a strong channel

of which e^h of the block that is read for comes in the end. `weights` has the rest for what I reads of J and what is
read of J by I: row J, columns of all blocks. Exponents are <= 0 but for the own block's. Channels do not meet in a
gradient, so each block and channel is strong or not on its own: own pairs of strong ones are left out, and
`mend_gradients` of ../portable/kda_gradient.py adds them by levels. Pairs of (8) are made of the same rounded operands
on both sides, so they cancel to float32. i = j is left out of F and added in float32.

A program has one role of four warps for a chunk of a value head, 32 channels at a time; a warp has a block of 16
tokens. It waits at four barriers, one each for T, e, w; for do; for q, k, g; for S, R, and no role waits for it.
Packed sequences: rows of the next sequence are overwritten with zeros, and threads store a last chunk that is not
whole. If value heads share key heads, each has its own dq and dk, and PyTorch adds them up. Shared memory: 113 KiB,
two programs a multiprocessor. They leave 28 KiB of L1, so what is spilled comes back from L2. Therefore indices in the
loop depend on `never`, a zero that the compiler does not know: descriptors and addresses that it takes out of the loop
are spilled. And waits name the sums so far among what must be there (`deps`), so that a block's sums are finished one
block later.

Nothing of the forward pass is kept but its inputs. Each sequence is walked in one go.
"""

from __future__ import annotations

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Plan
from ..portable.delta_gradient import gradient_of_state, of_key_heads
from ..portable.kda_gradient import launch_mend
from ..portable.tiles import FLOOR
from . import delta_chunk
from .delta_chunk import VARYING, C, barrier, load_tokens, row_column
from .delta_inverse import reinterpret
from .delta_walks import BV
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .kda_forward import prepared
from .kda_prepare import FLAT, FLAT_2, LIMIT, SQUARE, WIDE
from .kda_walks import walks
from .ring import invalidate_stages, new_barriers
from .tiles import LOG2E, Chunk, add, blocks_of_16, box, exclusive, keep_rows, store_own_rows, which_chunk

BK = gl.constexpr(32)  # channels at a time
LEAST = gl.constexpr(2.0**-40)  # strengths below it in size count as it
REGISTERS = 255  # of a thread: two programs share a multiprocessor

# layouts of registers. A product's sums of 64 tokens: of 64 columns (WIDE), of BK, and the latter as [4, 16, BK]
THIN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK.value, 16]))
ACC = gl.constexpr(blocks_of_16(BK.value))
LEFT = gl.constexpr(gl.DotOperandLayout(0, THIN.value, 2))  # a product's first operand
COL = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [4, 1], [1, 0]))  # [64, BK]: a thread has 16 tokens of a block
THREE = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0]))  # the same as [4, 16, BK]
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # states [BK, 64]
OF_ROW = gl.constexpr(gl.SliceLayout(1, WIDE.value))  # [64]
OF_ACC = gl.constexpr(gl.SliceLayout(1, ACC.value))  # [4, BK]
OF_THREE = gl.constexpr(gl.SliceLayout(1, THREE.value))  # [4, BK]
OF_D = gl.constexpr(gl.SliceLayout(0, OF_THREE.value))  # [BK]
OF_S = gl.constexpr(gl.SliceLayout(1, BY_ROWS.value))  # [BK]
# layouts of shared memory
SPREAD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, BK.value // 8, [1, 0]))
NARROW = gl.constexpr(gl.NVMMASharedLayout(2 * BK.value, 16, 2))


Tiles = namedtuple("Tiles", "do w e FG own q k gates xs S R lq lk rk table weights tails kept")  # shared memory
Inputs = namedtuple("Inputs", "q k g do w e T S R")  # boxes
Outputs = namedtuple("Outputs", "q k v")  # gradients of these, as boxes or as pointers
# a step's view of BK channels: tokens, tables (whole or by rows) and blocks of tokens
Channels = namedtuple(
    "Channels", "g x q k lq lk rk tables table tail tails weights rows_F rows_G rows_lq rows_lk rows_rk"
)


@gluon.jit
def allocate(boxes, dv, N_V: gl.constexpr):
    """A program's shared memory: tiles of a chunk, then those of BK channels at a time. dv is a box."""
    q, k, g, do = boxes.q, boxes.k, boxes.g, boxes.do
    t_do = gl.allocate_shared_memory(do.dtype, [N_V, 1, 1, C, 64], do.layout)
    t_w = gl.allocate_shared_memory(do.dtype, [N_V, 1, 1, C, 64], boxes.w.layout)
    t_e = gl.allocate_shared_memory(do.dtype, [N_V, 1, 1, C, 64], boxes.e.layout)  # then -dv / scale
    t_FG = gl.allocate_shared_memory(do.dtype, [2, 1, 1, C, C], dv.layout)  # T and dv, then F and G
    t_q = gl.allocate_shared_memory(q.dtype, [1, 1, 1, C, BK], q.layout)
    t_k = gl.allocate_shared_memory(q.dtype, [1, 1, 1, C, BK], k.layout)
    # gates, then sums in float32: gates of 16 bits fill half. Allocated as the copy engine's, which aligns it
    gates = gl.allocate_shared_memory(g.dtype, [(C * BK * 4) // g.block_type.nbytes, 1, 1, C, BK], g.layout)
    xs = reinterpret(gates, gl.float32, [1, C, BK], SPREAD)
    t_S = gl.allocate_shared_memory(q.dtype, [N_V, 1, 1, BK, 64], boxes.S.layout)
    t_R = gl.allocate_shared_memory(q.dtype, [N_V, 1, 1, BK, 64], boxes.R.layout)
    t_lq = gl.allocate_shared_memory(q.dtype, [1, 1, 1, C, BK], q.layout)  # left operands, then dq and dk
    t_lk = gl.allocate_shared_memory(q.dtype, [1, 1, 1, C, BK], q.layout)
    t_rk = gl.allocate_shared_memory(q.dtype, [1, 1, 1, C, BK], q.layout)  # right operands
    table = gl.allocate_shared_memory(gl.float32, [1, 16, BK], FLAT_2)  # this and the next two: see `make_decays`
    weights = gl.allocate_shared_memory(gl.float32, [1, 16, BK], FLAT_2)
    tails = gl.allocate_shared_memory(gl.float32, [1, 4, BK], FLAT_2)
    own = gl.allocate_shared_memory(gl.float32, [C], FLAT)  # F_ii
    kept = gl.allocate_shared_memory(gl.float32, [BK], FLAT)  # sum_v S R
    operands = t_lq, t_lk, t_rk
    return Tiles(t_do, t_w, t_e, t_FG, own, t_q, t_k, gates, xs, t_S, t_R, *operands, table, weights, tails, kept)


@gluon.jit
def channels(tiles, n):
    """The tiles of the channels at work; n is 0."""
    g, x, q, k = tiles.gates.index(n), tiles.xs.index(n), tiles.q.index(n), tiles.k.index(n)
    lq, lk, rk = tiles.lq.index(n), tiles.lk.index(n), tiles.rk.index(n)
    table, tails = tiles.table.index(n), tiles.tails.index(n)
    return Channels(
        g=g, x=x, q=q, k=k, lq=lq, lk=lk, rk=rk,
        tables=reinterpret(table, gl.float32, [4, 4, BK], FLAT_2),
        table=reinterpret(table, gl.float32, [16, BK], FLAT),
        tail=reinterpret(tails, gl.float32, [4, BK], FLAT), tails=tails,
        weights=reinterpret(tiles.weights.index(n), gl.float32, [4, 4, BK], FLAT_2),
        rows_F=reinterpret(tiles.FG.index(n), q.dtype, [4, 16, C], SQUARE),
        rows_G=reinterpret(tiles.FG.index(n + 1), q.dtype, [4, 16, C], SQUARE),
        rows_lq=reinterpret(lq, q.dtype, [4, 16, BK], NARROW), rows_lk=reinterpret(lk, q.dtype, [4, 16, BK], NARROW),
        rows_rk=reinterpret(rk, q.dtype, [4, 16, BK], NARROW),
    )


@gluon.jit
def over_blocks(x, y, none, first):
    """Begin x y^T of tiles [n, 1, 1, rows, 64], side by side; `first` is 0."""
    total = none
    TILES: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = y.shape[3]
    for n in gl.static_range(TILES):
        b_x, b_y = x.index(first + n).reshape([C, 64]), y.index(first + n).reshape([ROWS, 64])
        total = warpgroup_mma(b_x, b_y.permute((1, 0)), total, use_acc=n > 0, is_async=True)
    return total


@gluon.jit
def four(x):
    """The blocks of 16 columns of x [64, 64], as left operands in registers."""
    y = x.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2))
    even, odd = gl.split(y)  # [64, 16, 2], by the last axis: blocks 0, 2 and 1, 3
    x_0, x_2 = gl.split(even)
    x_1, x_3 = gl.split(odd)
    x_0, x_1 = gl.convert_layout(x_0, LEFT), gl.convert_layout(x_1, LEFT)
    return x_0, x_1, gl.convert_layout(x_2, LEFT), gl.convert_layout(x_3, LEFT)


@gluon.jit
def blocks(x):
    """[64, BK] as [4, 16, BK]: no number moves."""
    return gl.convert_layout(x.reshape([4, 16, BK]), ACC)


@gluon.jit
def load_blocks(tile):
    """A tile [1, 1, 64, BK] as [4, 16, BK], in float32."""
    return blocks(tile.reshape([C, BK]).load(THIN).to(gl.float32))


@gluon.jit
def store_blocks(tile, x):
    """x [4, 16, BK] to a tile [1, 1, 64, BK]."""
    tile.reshape([C, BK]).store(gl.convert_layout(x.reshape([C, BK]), THIN).to(tile.dtype))


@gluon.jit
def row(table, n: gl.constexpr):
    """[1, BK]"""
    return table.index(n).load(OF_D)[None, :]


@gluon.jit
def load_tiles(box, at_0, at_1, at_2, o, bar, tiles):
    """Bring blocks of 64 columns."""
    TILES: gl.constexpr = tiles.shape[0]
    for n in gl.static_range(TILES):
        copy_in(box, [at_0, at_1, at_2, o + n * 64], bar, tiles.index(n))


@gluon.jit
def bring_keys(boxes, bar, t_q, t_k, t_g, chunk, G, m):
    """Ask for q, k and gates of the channels m BK on; a phase of `bar` ends when all are there."""
    i_b, i_h, o_t = chunk.i_b, chunk.i_h, chunk.o_t
    mbarrier.expect(bar, 2 * boxes.q.block_type.nbytes + boxes.g.block_type.nbytes)
    copy_in(boxes.g, [i_b, i_h, o_t, m * BK], bar, t_g)
    copy_in(boxes.k, [i_b, i_h // G, o_t, m * BK], bar, t_k)
    copy_in(boxes.q, [i_b, i_h // G, o_t, m * BK], bar, t_q)


@gluon.jit
def bring_states(boxes, bar, tiles, pid, m):
    """Ask for S and R of the channels m BK on."""
    N_V: gl.constexpr = tiles.S.shape[0]
    mbarrier.expect(bar, 2 * N_V * boxes.S.block_type.nbytes)
    for n in gl.static_range(N_V):
        copy_in(boxes.S, [pid, 0, m * BK, n * 64], bar, tiles.S.index(n))
        copy_in(boxes.R, [pid, 0, m * BK, n * 64], bar, tiles.R.index(n))


@gluon.jit
def make_dv(tiles, box, dv, at_e, chunk, scale, V: gl.constexpr, PACKED: gl.constexpr):
    """(3): dv goes out, -dv / scale into the place of e. Returns the sums of dv w / -scale over rows, [C]."""
    none = gl.zeros([C, C], gl.float32, WIDE)
    b_T = tiles.FG.index(0).reshape([C, C]).permute((1, 0))
    sums = gl.zeros([C], gl.float32, gl.SliceLayout(1, WIDE))
    mbarrier.wait(at_e, 0)
    for n in gl.static_range(V // 64):
        b_e, b_dv = tiles.e.index(n).reshape([C, 64]), tiles.FG.index(1 - n)
        x_v = warpgroup_mma(b_T, b_e, none, use_acc=False, is_async=True)
        b_w = tiles.w.index(n).reshape([C, 64]).load(WIDE).to(gl.float32)
        x_v = warpgroup_mma_wait(0, deps=[x_v])
        sums += gl.sum(x_v * b_w, 1)
        barrier()  # all warps' products have read e, and at last T
        b_e.store(x_v.to(b_e.dtype))
        b_dv.reshape([C, 64]).store((x_v * -scale).to(b_e.dtype))
        fence_async_shared()
        barrier()  # all threads' stores are fenced
        if PACKED and chunk.stop - chunk.o_t < C:
            store_own_rows(dv, x_v * -scale, chunk, n * 64, V, WIDE)
        else:
            copy_out(box, [chunk.i_b, chunk.i_h, chunk.o_t, n * 64], b_dv)
    return sums


@gluon.jit
def make_pairs(tiles, at_do, rows, i, j, N_V: gl.constexpr, PACKED: gl.constexpr):
    """(4): F and G as tiles in the place of T and dv, to be read transposed. Returns the four blocks of each."""
    mbarrier.wait(at_do, 0)
    if PACKED and rows < C:  # the rest is another sequence's
        for n in gl.static_range(N_V):
            keep_rows(tiles.do.index(n).reshape([C, 64]), rows, WIDE)
        fence_async_shared()
        barrier()
    none = gl.zeros([C, C], gl.float32, WIDE)
    G = over_blocks(tiles.e, tiles.w, none, 0)
    F = over_blocks(tiles.do, tiles.w, none, 0)
    F, G = warpgroup_mma_wait(0, deps=[F, G])
    tiles.own.store(gl.sum(gl.where(i == j, F, 0.0), 1))  # i = j crosses no gate
    F, G = gl.where(i > j, F, 0.0).to(tiles.FG.dtype), gl.where(i > j, G, 0.0).to(tiles.FG.dtype)
    tma.store_wait(0)  # dv has been read
    tiles.FG.index(0).reshape([C, C]).store(F)
    tiles.FG.index(1).reshape([C, C]).store(G)
    fence_async_shared()
    return four(F), four(G)


@gluon.jit
def over_states(tiles, bar, none, m, never):
    """do S^T, e S^T and w R^T of BK channels [C, BK]; sum_v S R goes into `kept`."""
    mbarrier.wait(bar, m & 1)
    b_q = over_blocks(tiles.do, tiles.S, none, never)
    b_k = over_blocks(tiles.e, tiles.S, none, never)
    b_v = over_blocks(tiles.w, tiles.R, none, never)
    kept = gl.zeros([BK], gl.float32, OF_S)
    N_V: gl.constexpr = tiles.S.shape[0]
    for n in gl.static_range(N_V):
        b_S = tiles.S.index(never + n).reshape([BK, 64]).load(BY_ROWS).to(gl.float32)
        kept += gl.sum(b_S * tiles.R.index(never + n).reshape([BK, 64]).load(BY_ROWS).to(gl.float32), 1)
    tiles.kept.store(kept)
    return warpgroup_mma_wait(0, deps=[b_q, b_k, b_v])


@gluon.jit
def sum_gates(tiles, bar, rows, m, PACKED: gl.constexpr):
    """Running sums of each block's gates in base 2, [4, 16, BK]; zeros into the tiles from row `rows` on."""
    mbarrier.wait(bar, m & 1)
    if PACKED and rows < C:  # the rest is another sequence's
        keep_rows(tiles.g.reshape([C, BK]), rows, COL)
        keep_rows(tiles.k.reshape([C, BK]), rows, COL)
        keep_rows(tiles.q.reshape([C, BK]), rows, COL)
    x = tiles.g.reshape([C, BK]).load(COL).to(gl.float32)
    x = gl.convert_layout(x.reshape([4, 16, BK]), THREE)
    x = gl.where(x < FLOOR, FLOOR, x) * LOG2E  # NaN is not below, and stays
    return gl.associative_scan(x, 1, add)


@gluon.jit
def make_decays(tiles, x, mild, D, h, o_f):
    """Anchors, and what meets by them, of the sums of gates x [4, 16, BK]: D [4, BK] in all, h about the middle.

    `tables`, four of [4, BK]: e^h, e^(D of all earlier blocks), e^D, D - 2 h. `tails`: e^(D of all later blocks).
    `weights`: row J, columns of all blocks. `x`: x - h.
    """
    table, tables, weights, tails = tiles.table, tiles.tables, tiles.weights, tiles.tails
    tables.index(0).store(gl.exp2(h))
    tables.index(2).store(gl.exp2(D))
    tables.index(3).store(D - 2.0 * h)
    tiles.x.store(gl.convert_layout((x - h[:, None, :]).reshape([C, BK]), COL))
    H_0, H_1, H_2, H_3 = row(table, 0), row(table, 1), row(table, 2), row(table, 3)
    A_0, A_1, A_2, A_3 = row(table, 8), row(table, 9), row(table, 10), row(table, 11)
    A_12, own = A_1 * A_2, gl.where(mild, gl.exp2(-h), 0.0)
    # from block J (a row) to each block on either side
    w_0 = H_0 * gl.where(o_f == 3, A_12, gl.where(o_f == 2, A_1, 1.0))
    w_3 = H_3 * gl.where(o_f == 0, A_12, gl.where(o_f == 1, A_2, 1.0))
    weights.index(0).store(gl.where(o_f == 0, own, w_0))
    weights.index(1).store(gl.where(o_f == 1, own, H_1 * gl.where(o_f == 3, A_2, 1.0)))
    weights.index(2).store(gl.where(o_f == 2, own, H_2 * gl.where(o_f == 0, A_1, 1.0)))
    weights.index(3).store(gl.where(o_f == 3, own, w_3))
    begin = gl.where(o_f == 1, A_0, gl.where(o_f == 2, A_0 * A_1, A_0 * A_12))
    tables.index(1).store(gl.where(o_f == 0, 1.0, begin))
    tail = gl.where(o_f == 0, A_12 * A_3, gl.where(o_f == 1, A_2 * A_3, A_3))
    tails.store(gl.where(o_f == 3, 1.0, tail))


@gluon.jit
def make_operands(tiles):
    """q e^(x - h), k e^(x - h) and k e^(D - x - h) as tiles. Returns both factors, and e^h of each block."""
    z = blocks(tiles.x.load(THIN))
    half = tiles.tables.index(0).load(OF_ACC)[:, None, :]
    of_left, of_right = gl.exp2(z), gl.exp2(tiles.tables.index(3).load(OF_ACC)[:, None, :] - z)
    x_k = load_blocks(tiles.k)
    x_q = load_blocks(tiles.q)
    tma.store_wait(0)  # dq and dk of the channels before have been read
    store_blocks(tiles.lq, x_q * of_left)
    store_blocks(tiles.lk, x_k * of_left)
    store_blocks(tiles.rk, x_k * of_right)
    fence_async_shared()
    barrier()  # operands are there, and all warps have read S, R, q, k and x
    return of_left, of_right, half


@gluon.jit
def from_ends(tiles, b_q, b_k, b_v, half):
    """The products with S and R by blocks, decayed from the chunk's begin or to its end; the writes of (8) into x."""
    begin = tiles.tables.index(1).load(OF_ACC)[:, None, :]
    b_q, b_k = blocks(b_q) * begin, blocks(b_k) * begin
    b_v = blocks(b_v) * tiles.tails.load(OF_ACC)[:, None, :]
    writes = load_blocks(tiles.rk) * (half * b_v)
    tiles.x.store(gl.convert_layout(writes.reshape([C, BK]), THIN))
    return b_q, b_k, b_v


@gluon.jit
def add_pairs(tiles, b_q, b_k, left_F, left_G, none):
    """Block by block, what each reads of earlier ones and of itself, added to b_q and b_k, and what is read of it."""
    p = gl.zeros([4, 16, BK], gl.float32, ACC)
    lq, lk, rk = tiles.rows_lq, tiles.rows_lk, tiles.rows_rk
    for n in gl.static_range(4):
        y_q = warpgroup_mma(left_F[n], rk.index(n), none, use_acc=False, is_async=True)
        y_k = warpgroup_mma(left_G[n], rk.index(n), none, use_acc=False, is_async=True)
        b_F, b_G = tiles.rows_F.index(n).permute((1, 0)), tiles.rows_G.index(n).permute((1, 0))
        y = warpgroup_mma(b_F, lq.index(n), none, use_acc=False, is_async=True)
        y = warpgroup_mma(b_G, lk.index(n), y, is_async=True)
        w = tiles.weights.index(n).load(OF_ACC)[:, None, :]
        if n == 0:
            y_q, y_k, y = warpgroup_mma_wait(0, deps=[y_q, y_k, y])
        else:
            y_q, y_k, y, b_q, b_k, p = warpgroup_mma_wait(0, deps=[y_q, y_k, y, b_q, b_k, p])
        b_q, b_k = b_q + blocks(y_q) * w, b_k + blocks(y_k) * w
        p = p + blocks(y) * w
    return b_q, b_k, p


@gluon.jit
def make_dq_dk(tiles, own, b_q, b_k, b_v, p, of_left, of_right, half, scale):
    """(5), and (7) with (6): dq and dk in the places of left operands. Returns y_e and y_n of `over_gates`."""
    z = load_blocks(tiles.lq) * b_q + load_blocks(tiles.lk) * b_k
    z = (z - load_blocks(tiles.rk) * p) * half
    own = reinterpret(own, gl.float32, [4, 16], FLAT_2).load(gl.SliceLayout(2, ACC))[:, :, None]
    own = gl.convert_layout(own, ACC) * scale
    x_k = load_blocks(tiles.k)
    x_q = load_blocks(tiles.q)
    of_left, of_right = of_left * (half * scale), of_right * (half * scale)
    b_q = of_left * b_q + own * x_k
    b_k = of_left * b_k + of_right * (p + b_v) + own * x_q
    y_e = gl.convert_layout(tiles.x.load(COL).reshape([4, 16, BK]), THREE)
    tiles.x.store(gl.convert_layout(z.reshape([C, BK]), THIN))
    barrier()  # all warps' products have read lq, lk, rk
    store_blocks(tiles.lq, b_q)
    store_blocks(tiles.lk, b_k)
    y_n = gl.convert_layout(tiles.x.load(COL).reshape([4, 16, BK]), THREE)
    fence_async_shared()
    barrier()  # all threads' stores are fenced, and all have read q, k and x
    return y_e, y_n


@gluon.jit
def over_gates(tiles, y_e, y_n, o_f, kept):
    """(8) / scale, [4, 16, BK]: writes y_e before t, less columns of pairs y_n from t on, what is kept of a state."""
    table, tail = tiles.table, tiles.tail
    all_e, all_n = gl.sum(y_e, 1), gl.sum(y_n, 1)  # [4, BK]
    y_e = y_e - y_n
    # in t's block: writes before t, less all but the reads from t on
    before, _ = gl.associative_scan((gl.zeros_like(y_e), y_e), 1, exclusive)
    tiles.tables.index(3).store(all_e)
    tiles.tails.store(all_n)
    e_0, e_1, e_2 = table.index(12).load(OF_D), table.index(13).load(OF_D), table.index(14).load(OF_D)
    n_1, n_2, n_3 = tail.index(1).load(OF_D), tail.index(2).load(OF_D), tail.index(3).load(OF_D)
    e_1, n_2 = e_0 + e_1, n_2 + n_3
    e_2, n_1 = e_1 + e_2, n_1 + n_2
    earlier = gl.where(o_f == 2, e_1[None, :], gl.where(o_f == 3, e_2[None, :], 0.0))
    earlier = gl.where(o_f == 1, e_0[None, :], earlier)
    later = gl.where(o_f == 1, n_2[None, :], gl.where(o_f == 0, n_1[None, :], 0.0))
    later = gl.where(o_f == 2, n_3[None, :], later)
    return before + (earlier + later + all_n + kept[None, :])[:, None, :]


@gluon.jit
def send(boxes, gradients, tiles, chunk, m, K: gl.constexpr, PACKED: gl.constexpr):
    """dq and dk of the channels m BK on, by the copy engine if all rows are the chunk's."""
    if PACKED and chunk.stop - chunk.o_t < C:
        own_q, own_k = tiles.lq.reshape([C, BK]).load(THIN), tiles.lk.reshape([C, BK]).load(THIN)
        store_own_rows(gradients.q, own_q, chunk, m * BK, K, THIN)
        store_own_rows(gradients.k, own_k, chunk, m * BK, K, THIN)
    else:
        copy_out(boxes.q, [chunk.i_b, chunk.i_h, chunk.o_t, m * BK], tiles.lq)
        copy_out(boxes.k, [chunk.i_b, chunk.i_h, chunk.o_t, m * BK], tiles.lk)


@gluon.jit(do_not_specialize=VARYING)
def gradients(
    q, k, g, do, d_w, d_e, d_T, d_S, d_R, beta, s_bb, s_bt, s_bh, d_dq, d_dk, d_dv, dq, dk, dv, dg, dbeta, is_mild,
    strong, cu, N, T, HV, G, scale, zero, K: gl.constexpr, V: gl.constexpr,
):
    """(3) to (8) of a chunk of a value head, but for the own pairs of strong blocks.

    q, k, g, d_dq, d_dk are boxes of BK columns, d_S and d_R of BK x 64, do to d_T and d_dv of 64. `is_mild`
    [slots, 4, K] is 0 where a block's own pairs are left out, `strong` [slots] is 1 if there are any. dg may be
    None, `zero` is 0.
    """
    PACKED: gl.constexpr = cu is not None
    N_K: gl.constexpr = K // BK
    N_V: gl.constexpr = V // 64
    pid = gl.program_id(0)
    chunk = which_chunk(pid, cu, N, T, HV, C, 4)
    i_b, i_h, o_t, stop = chunk.i_b, chunk.i_h, chunk.o_t, chunk.stop

    inputs = Inputs(q, k, g, do, d_w, d_e, d_T, d_S, d_R)
    boxes, results = Outputs(d_dq, d_dk, d_dv), Outputs(dq, dk, dv)
    tiles = allocate(inputs, d_dv, N_V)
    ready = new_barriers(4, 1)  # T, e and w have come; do; q, k and gates; S and R
    fence_async_shared()
    barrier()
    of_e, of_do, of_keys, of_states = ready.index(0), ready.index(1), ready.index(2), ready.index(3)

    # load
    mbarrier.expect(of_e, 2 * N_V * d_e.block_type.nbytes + d_T.block_type.nbytes)
    copy_in(d_T, [pid, 0, 0, 0], of_e, tiles.FG.index(0))
    load_tiles(d_e, pid, 0, 0, 0, of_e, tiles.e)
    load_tiles(d_w, pid, 0, 0, 0, of_e, tiles.w)
    mbarrier.expect(of_do, N_V * do.block_type.nbytes)
    load_tiles(do, i_b, i_h, o_t, 0, of_do, tiles.do)
    bring_keys(inputs, of_keys, tiles.q.index(0), tiles.k.index(0), tiles.gates.index(0), chunk, G, 0)
    mbarrier.expect(of_states, 2 * N_V * d_S.block_type.nbytes)
    load_tiles(d_S, pid, 0, 0, 0, of_states, tiles.S)
    load_tiles(d_R, pid, 0, 0, 0, of_states, tiles.R)
    i, j = row_column(C, WIDE)
    o_r = o_t + gl.arange(0, C, layout=OF_ROW)
    b_beta = load_tokens(beta, (s_bb, s_bt, s_bh), i_b, i_h, o_r, stop)
    # rounded as on T's diagonal, since dv and w both have that factor
    b_beta = gl.where(gl.abs(b_beta) < LEAST, LEAST, b_beta).to(q.dtype).to(gl.float32)

    # compute
    sums = make_dv(tiles, d_dv, dv, of_e, chunk, scale, V, PACKED)
    b_dbeta = (sums / b_beta) * (-scale / b_beta)
    p_b = dbeta + (i_b.to(gl.int64) * T + o_r) * HV + i_h
    gl.store(p_b, b_dbeta.to(dbeta.dtype.element_ty), mask=o_r < stop)

    left_F, left_G = make_pairs(tiles, of_do, stop - o_t, i, j, N_V, PACKED)

    none_k = gl.zeros([C, BK], gl.float32, THIN)
    o_f = gl.arange(0, 4, layout=gl.SliceLayout(1, OF_THREE))[:, None]
    o_d = gl.arange(0, BK, layout=OF_D)
    least = gl.zeros([4, BK], gl.float32, OF_THREE)
    for m in range(N_K):
        never = m & zero
        these = channels(tiles, never)
        b_q, b_k, b_v = over_states(tiles, of_states, none_k, m, never)  # (5) to (7), of S and R
        x = sum_gates(these, of_keys, stop - o_t, m, PACKED)
        D = gl.min(x, 1)  # [4, BK]: the last row
        least = gl.where(D < least, D, least)
        mild = D >= LIMIT * LOG2E
        h = gl.where(mild, D * 0.5, 0.0)
        gl.store(is_mild + (pid.to(gl.int64) * 4 + o_f) * K + (m * BK + o_d)[None, :], mild.to(gl.int8))
        make_decays(these, x, mild, D, h, o_f)
        of_left, of_right, half = make_operands(these)
        if m + 1 < N_K:
            bring_states(inputs, of_states, tiles, pid, m + 1)
        b_q, b_k, b_v = from_ends(these, b_q, b_k, b_v, half)
        b_q, b_k, p = add_pairs(these, b_q, b_k, left_F, left_G, none_k)  # (5) to (7), of pairs
        y_e, y_n = make_dq_dk(these, tiles.own, b_q, b_k, b_v, p, of_left, of_right, half, scale)
        send(boxes, results, these, chunk, m, K, PACKED)
        kept = these.table.index(8).load(OF_D) * these.table.index(9).load(OF_D) * these.table.index(10).load(OF_D)
        kept = kept * these.table.index(11).load(OF_D) * tiles.kept.load(OF_D)
        if m + 1 < N_K:
            bring_keys(inputs, of_keys, these.q, these.k, these.g, chunk, G, m + 1)
        if dg is not None:
            b_dg = over_gates(these, y_e, y_n, o_f, kept) * scale
            b_dg = gl.convert_layout(b_dg.reshape([C, BK]), COL)
            store_own_rows(dg, b_dg, Chunk(i_b, i_h, o_t, stop + never, T, HV + never), m * BK, K, COL)
    tma.store_wait(0)  # before sums over warps may take the memory of a tile that is on its way
    mild_all = gl.min(gl.min(least, 1), 0) >= LIMIT * LOG2E
    gl.store(strong + pid, 1 - mild_all.to(gl.int32))
    invalidate_stages(ready)


# The plan.


def plan_backward(hardware: Hardware, call) -> Plan:
    """(dq, dk, dv, dg, dbeta, dS0); None for what is not given or, of dg, not needed."""
    shared, q, k, v, g, beta = delta_chunk.begin(hardware, call), call.q, call.k, call.v, call.g, call.beta
    draft, K, V, H, N, T, cu = shared.draft, shared.K, shared.V, shared.H, shared.N, shared.T, shared.cu
    draft.because(f"all chunks first, then two walks at once, a program for each {BV.value} columns of V: in Gluon")
    do, scale = draft.gradient_of_o(v, call.do, shared.scale)
    n, low, c = shared.slots, q.dtype, C.value
    Ts = draft.new("T", n, c, 1, c, dtype=low)
    boxes = prepared(shared, q, k, v, g, beta, Ts, LEAST.value)
    w, e = (draft.new(name, n, c, 1, V, dtype=low) for name in "we")
    states, dstates = (draft.new(name, n, K, 1, V, dtype=low) for name in ("states", "dstates"))
    R_0 = draft.new("R_0", N, H, K, V) if call.initial_state else None
    R_in, programs = gradient_of_state(draft, call.dS, scale), V // BV.value * H * N
    draft.launch(
        walks, 2 * programs, **boxes._asdict(), do=box(do, c, BV.value),
        S_in=shared.S_in, d_states=box(states, K, BV.value), d_w=box(w, c, BV.value),
        R_in=R_in, R_out=R_0, d_dstates=box(dstates, K, BV.value), d_e=box(e, c, BV.value),
        cu=cu, n_forwards=programs, N=N, T=T, L=T + 1, HV=H, K=K, V=V, REGISTERS=24, num_warps=4, maxnreg=128,
    )
    dq, dk = (draft.new(f"d{name}", *v.shape[:3], K, dtype=low) for name in "qk")
    dv, dbeta, dg = draft.new("dv", *v.shape, dtype=low), draft.like("dbeta", beta), None
    if call.need_dg:
        dg = draft.new("dg", *g.shape, dtype=g.dtype)
    is_mild, strong = draft.new("is_mild", n, 4, K, dtype=torch.int8), draft.new("strong_too", n, dtype=torch.int32)
    (s_bb, s_bt, s_bh), width = beta.strides, BK.value
    draft.launch(
        gradients, n, q=box(q, c, width), k=box(k, c, width), g=box(g, c, width), do=box(do, c, 64),
        d_w=box(w, c, 64), d_e=box(e, c, 64), d_T=box(Ts, c, 64), d_S=box(states, width, 64),
        d_R=box(dstates, width, 64), beta=beta, s_bb=s_bb, s_bt=s_bt, s_bh=s_bh, d_dq=box(dq, c, width),
        d_dk=box(dk, c, width), d_dv=box(dv, c, 64), dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta, is_mild=is_mild,
        strong=strong, cu=cu, N=N, T=T, HV=H, G=shared.G, scale=scale, zero=0,
        K=K, V=V, num_warps=4, maxnreg=REGISTERS,
    )
    launch_mend(draft, q, k, g, do, Ts, w, e, is_mild, strong, dq, dk, dg, cu, N, shared.G, scale)
    if shared.G > 1:
        dq, dk = (
            draft.compute(f"{y.name} of key heads", of_key_heads, y, low, shared.G, shape=x.shape, dtype=low)
            for y, x in ((dq, q), (dk, k))
        )
    return draft.plan("hopper", dq, dk, dv, dg, dbeta, draft.compute("dS0", torch.mul, R_0, scale))
