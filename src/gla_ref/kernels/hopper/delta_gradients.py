"""The last launch of delta_backward.py: gradients of a chunk, from what both walks stored (chapter 20).

With S, R, w and dv of delta_walks.py, b and E of delta_solve.py, and scale left out of dq, dk, dg until the end::

    F = tril(do w^T * E)                   G = -tril(dv w^T * E, -1) / scale                              (3)
    dq = e^b (do S^T) + F k                                                                               (4)
    dk = F^T q + (G + G^T) k - e^b (dv S^T) / scale + e^(b_C - b) (w R^T)                                 (5)
    dbeta_i = dv_i w_i / beta_i^2                                                                         (6)
    dg_t = the paths across t, from j < t to i >= t:                                                      (7)
        pairs        sum of A_ij,  A = F * q k^T + G * k k^T
        reads        sum over i of q_i e^b (do S^T)_i - k_i e^b (dv S^T)_i / scale
        writes       sum over j of k_j e^(b_C - b) (w R^T)_j
        the state    e^(b_C) sum(S R)

(3) to (5) and (7) are those of ../portable/delta_gradient.py with dv = scale beta r. (6) holds since w_i = beta_i x_i
and dbeta_i = scale r_i x_i, with x_i what is left of v_i; `solve` sees to it that no beta is 0. dv_i w_i is the
diagonal of dv w^T, which is there for G, and sum(S R) that of S R^T, a product of its own: cheaper than S and R in
registers.

A program takes chunks of key heads, one after another, and of each the value heads in turn. dq and dk of a key head
stay in registers over its turns, F and G do not: each group stores its own, and both read both in the same turn. Tiles
fill shared memory, so that 28 KiB are left for L1, and what a thread spills comes back from L2, 300 clocks or more
later. So all waits name what must be there before the next products (`deps`), and `never`, a zero that the compiler
does not know, keeps it from holding one turn's addresses and masks for the next. Roles::

    group 0     4 warps    G and its sums, of dv w^T and k k^T; then channels 0 to 63 of K:
                           w R^T, dv S^T, do S^T, S R^T, and products with F and G
    group 1     4 warps    F and its sums, of do w^T and q k^T; then channels 64 to 127
    loader      1 warp     brings do, w, dv and factors (two stages), S and R, q and k; sends dq and dk
    finisher    1 warp     dg and dbeta of sums of rows of both groups

Barriers, in the order of ring.py; rounds are turns n, and key heads `it` of G turns each; D is a group::

    rows_ready[n % 2]       do, w and dv have come
    states_ready[D]         S and R of a group's channels
    keys_ready              q and k
    factors_ready[n % 2]    e^b, e^(b_C - b) and b for groups
    both_ready              F and G
    states_done[D]          a group has read its S and R, and F and G
    rows_done[n % 2]        groups have read do, w and dv, and their sums are there
    sums_done[n % 2]        the finisher has read sums
    keys_done               groups have read q and k
    results_ready[it % 2]   dq and dk lie in the last turn's tiles of do and dv, from where the loader sends them

A group writes its F or G once states_done of the other's turn before has ended, and dq and dk once rows_done of a key
head's last turn has. The next phase of the first needs that F or G, the next of the second its own arrival: (b).

*Packed sequences*: the loader waits for the tiles of a chunk that is not whole, overwrites the next sequence's rows
with zeros and then gives `factors_ready`; it stores such a chunk's dq and dk itself. *K of 64*: the copy engine reads
zeros beyond them, so the second group then makes F and zeros.

Bytes per chunk in bf16: per value head 6 C V + 4 K V in, per key head 4 C K in and out. Shared memory: 218 KiB.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.plan import Spec
from ..portable.delta_forward import BETA, COARSE, FINE, SINCE, UNTIL, DeltaCall
from ..portable.delta_forward import ROWS as FACTORS
from ..portable.delta_gradient import Made
from .delta_chunk import C, barrier, load_tokens, row_column, strides
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate, new_barriers
from .tiles import Chunk, add, box, exclusive, keep_rows, store_own_rows, which_chunk

BLOCK = gl.constexpr(64)  # rows and columns of a tile
ROWS = gl.constexpr(FACTORS)  # of `factors`
OWN, READS, WRITES, KEPT = (gl.constexpr(i) for i in range(4))  # sums of rows of a group
SUMS = gl.constexpr(4)


class Tiles(NamedTuple):
    """Tiles of 64 x 64 in shared memory, and rows of 64 numbers; or the first seven's boxes."""

    q: object  # 2: channels
    k: object
    do: object  # stages * 2: columns
    w: object
    dv: object
    S: object  # 2 * 2: channels, columns
    R: object
    FG: object = None  # F, G
    factors: object = None  # [2 * 3, C]: turn; e^b, e^(b_C - b), b
    sums: object = None  # [2 * 2 * SUMS, C]: turn, group, which
    pairs: object = None  # [2 * 2, 4, C]: turn, group; sums of columns over a warp's rows


QK = namedtuple("QK", "q k")
Barriers = namedtuple(  # as in the docstring above
    "Barriers",
    "rows_ready states_ready keys_ready factors_ready both_ready "
    "states_done rows_done sums_done keys_done results_ready",
)


class Work(NamedTuple):
    """The chunks of key heads of all programs."""

    cu: object
    N: object  # sequences
    T: object
    H: object  # key heads
    items: object
    programs: object


@gluon.jit
def nth_chunk(work, it):
    """(slot, key heads' chunk) that a program takes as its it-th."""
    item = gl.program_id(0) + it * work.programs
    return item // work.H, which_chunk(item, work.cu, work.N, work.T, work.H, C, 1)


@gluon.jit
def clear_rows(tile, remaining):
    """Zeros from row `remaining` on, by a warp, 16 rows at a time."""
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for r in gl.static_range(0, C, 16):
        keep_rows(tile.reshape([C, BLOCK]).slice(r, 16), remaining - r, by_rows)


@gluon.jit
def send(p, box_, tile, chunk, o_k, K: gl.constexpr, PACKED: gl.constexpr):
    """A tile of dq or dk: by the copy engine, or at the end of a packed sequence by a warp, 16 rows at a time."""
    if PACKED and chunk.stop - chunk.o_t < C:
        by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
        for r in gl.static_range(0, C, 16):
            x = tile.reshape([C, BLOCK]).slice(r, 16).load(by_rows)
            rows = Chunk(chunk.i_b, chunk.i_h, chunk.o_t + r, chunk.stop, chunk.T, chunk.HV)
            store_own_rows(p, x, rows, o_k, K, by_rows)
    else:
        copy_out(box_, [chunk.i_b, chunk.i_h, chunk.o_t, o_k], tile)


@gluon.jit
def give_factors(tiles, bars, s, since, until, b):
    """Let groups have what rows are multiplied by."""
    tiles.factors.index(3 * s).store(since)
    tiles.factors.index(3 * s + 1).store(until)
    tiles.factors.index(3 * s + 2).store(b)
    barrier()
    mbarrier.arrive(bars.factors_ready.index(s), count=1)


@gluon.jit
def loader(boxes, to, results, factors, tiles, bars, work, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Bring the tiles of each turn, and send dq and dk of each key head, two turns after its last. One warp."""
    PACKED: gl.constexpr = work.cu is not None
    N_V: gl.constexpr = V // BLOCK
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    of_tile: gl.constexpr = boxes.q.block_type.nbytes
    o_c = gl.arange(0, C, layout=line)
    turns = gl.cdiv(work.items - gl.program_id(0), work.programs) * G
    for n in range(turns + 2):
        s, it = n % 2, gl.minimum(n, turns - 1) // G
        i_s, chunk = nth_chunk(work, it)
        i_b, i_k, o_t, stop = chunk.i_b, chunk.i_h, chunk.o_t, chunk.stop
        i_h = i_k * G + n % G
        p_f = factors + (i_s * (work.H * G) + i_h).to(gl.int64) * ROWS * C + o_c
        since, until = gl.load(p_f + SINCE * C), gl.load(p_f + UNTIL * C)
        b = gl.load(p_f + COARSE * C) + gl.load(p_f + FINE * C)
        mbarrier.wait(bars.rows_done.index(s), ((n // 2) & 1) ^ 1)
        if (n > 1) & ((n - 1) % G == 0):  # turn n - 2 was the last one of a key head
            last = (n - 2) // G
            mbarrier.wait(bars.results_ready.index(last % 2), (last // 2) & 1)
            _, done = nth_chunk(work, last)
            for m in gl.static_range(K // BLOCK):
                send(results.q, to.q, tiles.do.index(2 * s + m), done, m * BLOCK, K, PACKED)
                send(results.k, to.k, tiles.dv.index(2 * s + m), done, m * BLOCK, K, PACKED)
            if PACKED:
                fence_async_shared()  # before the copy engine writes where threads have read
            tma.store_wait(0)
        if n < turns:
            bar = bars.rows_ready.index(s)
            mbarrier.expect(bar, 3 * N_V * of_tile)
            for m in gl.static_range(N_V):
                copy_in(boxes.w, [i_b, i_h, o_t, m * BLOCK], bar, tiles.w.index(2 * s + m))
                copy_in(boxes.dv, [i_b, i_h, o_t, m * BLOCK], bar, tiles.dv.index(2 * s + m))
                copy_in(boxes.do, [i_b, i_h, o_t, m * BLOCK], bar, tiles.do.index(2 * s + m))
            if not PACKED:
                give_factors(tiles, bars, s, since, until, b)
            for D in gl.static_range(2):
                mbarrier.wait(bars.states_done.index(D), (n & 1) ^ 1)
                bar = bars.states_ready.index(D)
                mbarrier.expect(bar, 2 * N_V * of_tile)
                for m in gl.static_range(N_V):
                    copy_in(boxes.R, [i_s, i_h, m * BLOCK, D * BLOCK], bar, tiles.R.index(2 * D + m))
                    copy_in(boxes.S, [i_s, i_h, m * BLOCK, D * BLOCK], bar, tiles.S.index(2 * D + m))
            if n % G == 0:
                mbarrier.wait(bars.keys_done.index(0), (it & 1) ^ 1)
                mbarrier.expect(bars.keys_ready.index(0), 4 * of_tile)
                for m in gl.static_range(2):
                    copy_in(boxes.k, [i_b, i_k, o_t, m * BLOCK], bars.keys_ready.index(0), tiles.k.index(m))
                    copy_in(boxes.q, [i_b, i_k, o_t, m * BLOCK], bars.keys_ready.index(0), tiles.q.index(m))
            if PACKED:
                if stop - o_t < C:  # the rest is another sequence's
                    mbarrier.wait(bars.rows_ready.index(s), (n // 2) & 1)
                    for m in gl.static_range(N_V):
                        clear_rows(tiles.w.index(2 * s + m), stop - o_t)
                        clear_rows(tiles.dv.index(2 * s + m), stop - o_t)
                        clear_rows(tiles.do.index(2 * s + m), stop - o_t)
                    if n % G == 0:
                        mbarrier.wait(bars.keys_ready.index(0), it & 1)
                        for m in gl.static_range(2):
                            clear_rows(tiles.k.index(m), stop - o_t)
                            clear_rows(tiles.q.index(m), stop - o_t)
                    fence_async_shared()
                give_factors(tiles, bars, s, since, until, b)


@gluon.jit
def both_sums(tiles, o_s, which: gl.constexpr, layout: gl.constexpr):
    """Sums of rows of both groups."""
    return tiles.sums.index(o_s + which).load(layout) + tiles.sums.index(o_s + SUMS + which).load(layout)


@gluon.jit
def finisher(tiles, bars, g, s_g, factors, dg, dbeta, work, scale, G: gl.constexpr):
    """dg and dbeta of each turn, of both groups' sums. One warp."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lines: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    HV, o_c = work.H * G, gl.arange(0, C, layout=line)
    for it in range(gl.cdiv(work.items - gl.program_id(0), work.programs)):
        i_s, chunk = nth_chunk(work, it)
        i_b, i_k, o_t, stop = chunk.i_b, chunk.i_h, chunk.o_t, chunk.stop
        for turn in range(G):
            n = it * G + turn
            s, i_h = n % 2, i_k * G + turn
            o_s = s * 2 * SUMS
            p_f = factors + (i_s * HV + i_h).to(gl.int64) * ROWS * C
            p_d = (i_b.to(gl.int64) * work.T + o_t + o_c) * HV + i_h
            b_beta, through = gl.load(p_f + BETA * C + o_c), gl.load(p_f + (SINCE * C + (C - 1)))  # e^(b_C)
            if dg is not None:
                b_g = load_tokens(g, s_g, i_b, i_h, o_t + o_c, stop)
            mbarrier.wait(bars.rows_done.index(s), (n // 2) & 1)
            own = tiles.sums.index(o_s + OWN).load(line)
            if dg is not None:
                reads, writes = both_sums(tiles, o_s, READS, line), both_sums(tiles, o_s, WRITES, line)
                kept = both_sums(tiles, o_s, KEPT, line)
                crossed = tiles.pairs.index(2 * s).load(lines) + tiles.pairs.index(2 * s + 1).load(lines)
                crossed = gl.convert_layout(gl.sum(crossed, 0), line)
            barrier()
            mbarrier.arrive(bars.sums_done.index(s), count=1)
            gl.store(dbeta + p_d, (own / b_beta / b_beta).to(dbeta.dtype.element_ty), mask=o_t + o_c < stop)
            if dg is not None:
                # (7) of each row: sums of the terms that count, never a total less others
                total = gl.associative_scan(reads, 0, add, reverse=True)
                total = total - gl.associative_scan(crossed, 0, add, reverse=True)
                before, _ = gl.associative_scan((gl.zeros_like(writes), writes), 0, exclusive)
                total = (total + before + gl.sum(kept, 0) * through) * scale
                total = gl.where(b_g == float("-inf"), 0.0, total)  # nothing crosses it
                gl.store(dg + p_d, total.to(dg.dtype.element_ty), mask=o_t + o_c < stop)


@gluon.jit
def over(x, y, i, j, N: gl.constexpr, layout: gl.constexpr, X_T: gl.constexpr = False, Y_T: gl.constexpr = False):
    """Begin x y over N tiles each, from tiles i and j on; X_T, Y_T: of tiles transposed."""
    total = gl.zeros([C, BLOCK], gl.float32, layout)
    for m in gl.static_range(N):
        b_x, b_y = x.index(i + m).reshape([C, BLOCK]), y.index(j + m).reshape([BLOCK, BLOCK])
        if X_T:
            b_x = b_x.permute((1, 0))
        if Y_T:
            b_y = b_y.permute((1, 0))
        total = warpgroup_mma(b_x, b_y, total, use_acc=m > 0, is_async=True)
    return total


@gluon.jit
def rows_and_columns(never, layout: gl.constexpr):
    """`row_column` of a tile whose numbers the compiler cannot keep from turn to turn: `never` is 0."""
    # Bits 1 and 2 of a column's number come from the lane (mask 6), all others from the register (57): only what the
    # lane decides gets `never`, the rest stays constants
    i, j = row_column(C, layout)
    return i + never, ((j & 6) + never) | (j & 57)


@gluon.jit
def group(
    tiles, bars, work, scale, unscale, zero,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, DG: gl.constexpr,
):
    """Channels 64 D on of K: dq and dk, and sums of rows for `finisher`."""
    N_K: gl.constexpr = K // BLOCK
    N_V: gl.constexpr = V // BLOCK
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, wide)
    of_column: gl.constexpr = gl.SliceLayout(0, wide)
    none = gl.zeros([C, BLOCK], gl.float32, wide)
    of_M = -unscale if D == 0 else 1.0
    for it in range(gl.cdiv(work.items - gl.program_id(0), work.programs)):
        b_dq, b_dk = none, none
        for turn in range(G):
            n = it * G + turn
            s = n % 2
            o_s = (s * 2 + D) * SUMS
            never = n & zero
            mbarrier.wait(bars.sums_done.index(s), ((n // 2) & 1) ^ 1)
            mbarrier.wait(bars.factors_ready.index(s), (n // 2) & 1)
            mbarrier.wait(bars.rows_ready.index(s), (n // 2) & 1)
            mbarrier.wait(bars.keys_ready.index(0), it & 1)

            # compute: pairs, over V and over K
            M = over(tiles.dv if D == 0 else tiles.do, tiles.w, 2 * s, 2 * s, N_V, wide, Y_T=True)
            i, j = rows_and_columns(never, wide)
            if DG:
                A = over(tiles.k if D == 0 else tiles.q, tiles.k, never, never, N_K, wide, Y_T=True)
                M, A = warpgroup_mma_wait(0, deps=[M, A])
            else:
                M = warpgroup_mma_wait(0, deps=[M])
            t_b = tiles.factors.index(3 * s + 2)
            # b in one number: b_i - b_j is wrong by 2^-24 of b, 6e-4 if 64 gates are closed; F, G are rounded to 2^-9
            E = gl.exp2(t_b.load(of_row)[:, None] - t_b.load(of_column)[None, :])  # above the diagonal perhaps infinite
            if D == 0:
                tiles.sums.index(o_s + OWN).store(gl.sum(gl.where(i == j, M, 0.0), 1))  # dv_i w_i
            M = gl.where(i > j if D == 0 else i >= j, M * E, 0.0)  # G is of_M M
            mbarrier.wait(bars.states_done.index(1 - D), (n & 1) ^ 1)  # the other group has read F and G
            t_own = tiles.FG.index(1 - D + never)
            t_own.store((M * of_M).to(t_own.dtype))
            if DG:
                A = A * M
                if D == 1:
                    A = gl.where(i > j, A, 0.0)  # i = j crosses no gate
                b_reads = gl.sum(A, 1) * of_M
                tiles.pairs.index(2 * s + D).store(gl.sum(A.reshape([4, 16, C]), 1) * of_M)  # a warp has 16 rows
            fence_async_shared()
            barrier()
            mbarrier.arrive(bars.both_ready.index(0), count=1)
            mbarrier.wait(bars.states_ready.index(D), n & 1)
            never = (n + 1) & zero

            # compute: what reads and writes states
            x_w = over(tiles.w, tiles.R, 2 * s, 2 * D + never, N_V, wide)
            x_v = over(tiles.dv, tiles.S, 2 * s, 2 * D + never, N_V, wide)
            since = tiles.factors.index(3 * s).load(of_row)
            until = tiles.factors.index(3 * s + 1).load(of_row)
            since_v = -since * unscale
            x_w, x_v = warpgroup_mma_wait(0, deps=[x_w, x_v])
            mbarrier.wait(bars.both_ready.index(0), n & 1)
            if DG:
                low = tiles.k.index(D + never).reshape([C, BLOCK]).load(wide)
                tiles.sums.index(o_s + WRITES).store(gl.sum(low.to(gl.float32) * x_w, 1) * until)
                b_reads += gl.sum(low.to(gl.float32) * x_v, 1) * since_v
            b_dk = b_dk + x_w * until[:, None]
            b_dk = b_dk + x_v * since_v[:, None]
            never = (n + 2) & zero
            b_q, b_k = tiles.q.index(D + never).reshape([C, BLOCK]), tiles.k.index(D + never).reshape([C, BLOCK])
            t_F, t_G = tiles.FG.index(never), tiles.FG.index(1 + never)
            if DG:
                b_dk, b_reads = warpgroup_mma_wait(0, deps=[b_dk, b_reads])
                x_q = over(tiles.do, tiles.S, 2 * s, 2 * D + never, N_V, wide)
                kept = over(tiles.S, tiles.R, 2 * D + never, 2 * D + never, N_V, wide, X_T=True)  # diagonal: sum(S R)
            else:
                b_dk = warpgroup_mma_wait(0, deps=[b_dk])
                x_q = over(tiles.do, tiles.S, 2 * s, 2 * D + never, N_V, wide)
            b_dq = warpgroup_mma(t_F, b_k, b_dq, is_async=True)
            b_dk = warpgroup_mma(t_F.permute((1, 0)), b_q, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G, b_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G.permute((1, 0)), b_k, b_dk, is_async=True)
            if DG:
                x_q, kept, b_dq, b_dk = warpgroup_mma_wait(0, deps=[x_q, kept, b_dq, b_dk])
            else:
                x_q, b_dq, b_dk = warpgroup_mma_wait(0, deps=[x_q, b_dq, b_dk])
            barrier()  # all warps' products have read S and R of these channels, F and G
            mbarrier.arrive(bars.states_done.index(D), count=1)
            b_dq = b_dq + x_q * since[:, None]
            never = (n + 3) & zero
            if DG:
                i, j = rows_and_columns(never, wide)
                tiles.sums.index(o_s + KEPT).store(gl.sum(gl.where(i == j, kept, 0.0), 1))
                low = tiles.q.index(D + never).reshape([C, BLOCK]).load(wide)
                tiles.sums.index(o_s + READS).store(b_reads + gl.sum(low.to(gl.float32) * x_q, 1) * since)
            b_dq = warpgroup_mma_wait(0, deps=[b_dq])
            barrier()  # all warps' products have read do, w and dv, and all sums are there
            mbarrier.arrive(bars.rows_done.index(s), count=1)

        # dq and dk of the key head leave by way of the last turn's tiles, once both groups have read them
        fence_async_shared()  # threads have read q and k
        barrier()
        mbarrier.arrive(bars.keys_done.index(0), count=1)
        n = it * G + G - 1
        s = n % 2
        mbarrier.wait(bars.rows_done.index(s), (n // 2) & 1)
        tiles.do.index(2 * s + D).reshape([C, BLOCK]).store((b_dq * scale).to(tiles.do.dtype))
        tiles.dv.index(2 * s + D).reshape([C, BLOCK]).store((b_dk * scale).to(tiles.dv.dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.results_ready.index(it % 2), count=1)


@gluon.jit(do_not_specialize=("s_gb", "s_gt", "s_gh", "N", "T", "H", "n_items", "n_programs", "zero"))
def gradients(
    q, k, do, w, dv, S, R, g, s_gb, s_gt, s_gh, factors, d_dq, d_dk, dq, dk, dg, dbeta, cu, N, T, H,
    n_items, n_programs, scale, unscale, zero,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, R_GROUP: gl.constexpr, R_OTHER: gl.constexpr,
):
    """(3) to (7), in bf16; dg is None where it is not needed.

    q ... R, d_dq and d_dk are boxes of 64 x 64 numbers; S and R are [V, K]. unscale is 1 / scale.
    """
    t_q = gl.allocate_shared_memory(q.dtype, [2, 1, 1, C, BLOCK], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [2, 1, 1, C, BLOCK], k.layout)
    t_do = gl.allocate_shared_memory(do.dtype, [4, 1, 1, C, BLOCK], do.layout)
    t_w = gl.allocate_shared_memory(w.dtype, [4, 1, 1, C, BLOCK], w.layout)
    t_dv = gl.allocate_shared_memory(dv.dtype, [4, 1, 1, C, BLOCK], dv.layout)
    t_S = gl.allocate_shared_memory(S.dtype, [4, 1, 1, BLOCK, BLOCK], S.layout)
    t_R = gl.allocate_shared_memory(R.dtype, [4, 1, 1, BLOCK, BLOCK], R.layout)
    t_FG = gl.allocate_shared_memory(k.dtype, [2, C, C], gl.NVMMASharedLayout(128, 16, 2))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_factors = gl.allocate_shared_memory(gl.float32, [2 * 3, C], flat)
    t_sums = gl.allocate_shared_memory(gl.float32, [4 * SUMS, C], flat)
    t_pairs = gl.allocate_shared_memory(gl.float32, [4, 4, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bars = Barriers(
        rows_ready=new_barriers(2, 1), states_ready=new_barriers(2, 1), keys_ready=new_barriers(1, 1),
        factors_ready=new_barriers(2, 1), both_ready=new_barriers(1, 2), states_done=new_barriers(2, 1),
        rows_done=new_barriers(2, 2), sums_done=new_barriers(2, 1), keys_done=new_barriers(1, 2),
        results_ready=new_barriers(2, 2),
    )
    fence_async_shared()
    tiles = Tiles(t_q, t_k, t_do, t_w, t_dv, t_S, t_R, t_FG, t_factors, t_sums, t_pairs)
    boxes, work = Tiles(q, k, do, w, dv, S, R), Work(cu, N, T, H, n_items, n_programs)
    DG: gl.constexpr = dg is not None
    gl.warp_specialize(
        [
            (group, (tiles, bars, work, scale, unscale, zero, G, K, V, 0, DG)),
            (group, (tiles, bars, work, scale, unscale, zero, G, K, V, 1, DG)),
            (loader, (boxes, QK(d_dq, d_dk), QK(dq, dk), factors, tiles, bars, work, G, K, V)),
            (finisher, (tiles, bars, g, (s_gb, s_gt, s_gh), factors, dg, dbeta, work, scale, G)),
        ],
        [4, 1, 1],
        [R_GROUP, R_OTHER, R_OTHER],
    )
    invalidate(bars)


# The plan.


class Local(NamedTuple):
    """The tensors that `gradients` reads; states are [slots, HV, V, K]."""

    q: Spec
    k: Spec
    g: Spec | None
    do: Spec
    states: Spec  # before each chunk
    writes: Spec
    dstates: Spec  # after each chunk
    dv: Spec


def make_gradients(call: DeltaCall, x: Local, beta: Spec, need_dg: bool) -> Made:
    """The results of `gradients`, and dv; dg is None unless needed."""
    draft, H = call.draft, call.H // call.G
    dq, dk = (draft.new(f"d{n}", *y.shape, dtype=y.dtype) for n, y in (("q", x.q), ("k", x.k)))
    made = Made(dq, dk, x.dv, draft.like("dg", x.g) if need_dg else None, draft.like("dbeta", beta))
    tokens = {"q": x.q, "k": x.k, "do": x.do, "w": x.writes, "dv": x.dv, "d_dq": dq, "d_dk": dk}
    states = {"S": x.states, "R": x.dstates}
    items, (s_gb, s_gt, s_gh) = H * call.chunks, strides(x.g)
    programs = min(items, draft.hardware.multiprocessors)
    others = 24 if call.G > 1 and call.cu is None else 40  # groups spill at G > 1, packed sequences' loader too
    draft.launch(
        gradients, programs,
        **{name: box(y, C.value, BLOCK.value) for name, y in tokens.items()},
        **{name: box(y.transposed(1, 2), BLOCK.value, BLOCK.value) for name, y in states.items()},
        g=x.g, s_gb=s_gb, s_gt=s_gt, s_gh=s_gh, factors=call.factors, dq=dq, dk=dk, dg=made.dg, dbeta=made.dbeta,
        cu=call.cu, N=call.N, T=call.T, H=H, n_items=items, n_programs=programs, scale=call.scale,
        unscale=1 / call.scale, zero=0, G=call.G, K=call.K, V=call.V,
        R_GROUP=(504 - others) // 2, R_OTHER=others, num_warps=4, maxnreg=168,
    )
    return made
