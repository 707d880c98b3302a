"""The last launch of delta_backward.py: gradients of a chunk, from what both walks stored (chapter 20).

With S, R, w and r of delta_walks.py, b and E of delta_solve.py, and scale left out until results are stored::

    F = tril(do w^T * E)                   G = -beta tril(r w^T * E, -1)              dv = beta r          (3)
    dq = e^b (do S^T) + F k                                                                               (4)
    dk = F^T q + (G + G^T) k - e^b beta (r S^T) + e^(b_C - b) (w R^T)                                     (5)
    dbeta_i = r_i v_i - e^b k_i (r S^T)_i + sum_j G_ij (k_i k_j) / beta_i                                 (6)
    dg_t = the paths across t, from j < t to i >= t:                                                      (7)
        pairs        sum of A_ij,  A = F * q k^T + G * k k^T
        reads        sum over i of q_i e^b (do S^T)_i - beta k_i e^b (r S^T)_i
        writes       sum over j of k_j e^(b_C - b) (w R^T)_j
        the state    e^(b_C) sum(S R)

The code never divides by beta. portable/delta_gradient.py has the same equations, and their numbers.

A program has a chunk of a key head and takes that head's value heads in turn. It has one role of four warps: two
programs share a multiprocessor, and one of them computes while the other one's tiles come. All is in tiles of 64 x 64.
The copy engine brings them, and the warps wait at three barriers::

    keys      once                        q and k, which stay
    tokens    once per turn               do, w and r of a value head
    states    N_K * N_V times per turn    one block of S and one of R

Nobody waits for the warps: they ask for the next tiles themselves, after `barrier`, when all warps' products have read
the last ones. So phase n of `tokens` is turn n, and phase n of `states` is the n-th block of all turns. The tiles of
the next value head are asked for when the last product of do, w, r, S and R is over.

dq and dk are sums over value heads in their order: between turns they lie in memory in float32 (`sums`), where each
thread finds the numbers that it wrote. After the last turn 64 channels of them leave by way of the tiles of q and k,
which all products have read by then.

Bytes per chunk in bf16: per value head 8 C V + 4 K V in and 2 C V out, per key head 4 C K in and out. `sums`, 8 C K per
key head, are written and read once per value head after the first. Shared memory at K = V = 128: 112 KB, so that two
programs share a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..launch.plan import Spec
from ..portable.delta_forward import BETA, COARSE, FINE, SINCE, DeltaCall
from ..portable.delta_forward import ROWS as FACTORS
from ..portable.delta_gradient import Local, Made
from .delta_chunk import VARIABLE, barrier, load_tokens, reinterpret, row_column, strides
from .delta_solve import C, load_decays, load_strengths
from .gla_backward import _add as add
from .gla_backward import _behind as behind
from .gluon_names import named
from .tiles import box, keep_rows, store_own_rows, which_segment

copy_in, copy_out = named("copy_in"), named("copy_out")

BLOCK = gl.constexpr(64)  # rows and columns of a tile
ROWS = gl.constexpr(FACTORS)  # of `factors`
DBETA, READS, WRITES, KEPT = (gl.constexpr(i) for i in range(4))  # sums of rows on their way out


class Tiles(NamedTuple):
    """The tiles in shared memory."""

    q: object  # 64 channels each, all of them
    k: object
    do: object  # 64 columns each, all of them
    w: object
    r: object
    S: object  # one block
    R: object


class Barriers(NamedTuple):
    """The warps wait until the copies have come."""

    keys: object  # of q and k
    tokens: object  # of do, w and r
    states: object  # of S and R


@gluon.jit
def load_keys(q, k, tiles, bar, i_b, i_k, o_t):
    """Bring q and k of a chunk of a key head."""
    TILES: gl.constexpr = tiles.q.shape[0]
    mbarrier.expect(bar, 2 * TILES * k.block_type.nbytes)
    for n in gl.static_range(TILES):
        copy_in(k, [i_b, i_k, o_t, n * BLOCK], bar, tiles.k.index(n))
        copy_in(q, [i_b, i_k, o_t, n * BLOCK], bar, tiles.q.index(n))


@gluon.jit
def load_rows(do, w, r, tiles, bar, i_b, i_h, o_t):
    """Bring do, w and r of a chunk of a value head."""
    TILES: gl.constexpr = tiles.r.shape[0]
    mbarrier.expect(bar, 3 * TILES * r.block_type.nbytes)
    for n in gl.static_range(TILES):
        copy_in(r, [i_b, i_h, o_t, n * BLOCK], bar, tiles.r.index(n))
        copy_in(w, [i_b, i_h, o_t, n * BLOCK], bar, tiles.w.index(n))
        copy_in(do, [i_b, i_h, o_t, n * BLOCK], bar, tiles.do.index(n))


@gluon.jit
def load_states(S, R, tiles, bar, i_s, i_h, n):
    """Bring block n of S and of R: 64 rows and columns, all columns of the first rows first."""
    N_V: gl.constexpr = tiles.r.shape[0]
    mbarrier.expect(bar, 2 * S.block_type.nbytes)
    copy_in(S, [i_s, i_h, n // N_V * BLOCK, n % N_V * BLOCK], bar, tiles.S)
    copy_in(R, [i_s, i_h, n // N_V * BLOCK, n % N_V * BLOCK], bar, tiles.R)


@gluon.jit
def load_row_column(p, layout: gl.constexpr):
    """C numbers as a column [C, 1] and as a row [1, C]."""
    o_i, o_j = gl.arange(0, C, layout=gl.SliceLayout(1, layout)), gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return gl.load(p + o_i)[:, None], gl.load(p + o_j)[None, :]


@gluon.jit
def over_blocks(x, y, none):
    """Begin x y^T of tiles [n, 1, 1, C, BLOCK], side by side."""
    total = none
    TILES: gl.constexpr = x.shape[0]
    for n in gl.static_range(TILES):
        b_x, b_y = x.index(n).reshape([C, BLOCK]), y.index(n).reshape([C, BLOCK])
        total = warpgroup_mma(b_x, b_y.permute((1, 0)), total, use_acc=n > 0, is_async=True)
    return total


@gluon.jit
def make_dv(p_dv, p_v, s_vt, t_r, b_beta, o_t, stop, rows, columns, HV, scale, V: gl.constexpr, by_rows: gl.constexpr):
    """Store dv of a chunk, up to row `stop`; return r_i v_i of each row."""
    found = gl.zeros([C], gl.float32, gl.SliceLayout(1, by_rows))
    TILES: gl.constexpr = t_r.shape[0]
    for n in gl.static_range(TILES):
        b_r = t_r.index(n).reshape([C, BLOCK]).load(by_rows).to(gl.float32)
        own, o_c = rows < stop - o_t, n * BLOCK + columns
        b_v = gl.load(p_v + (rows * s_vt + o_c), mask=own, other=0.0).to(gl.float32)
        found += gl.sum(b_r * b_v, 1)
        b_dv = (b_r * (b_beta * scale)[:, None]).to(p_dv.dtype.element_ty)
        gl.store(p_dv + (rows * (HV * V) + o_c), b_dv, mask=own)
    return found


@gluon.jit
def send_columns(
    p, box_, tile, x, i_b, i_k, o_t, stop, o_k, T, H, K: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr
):
    """dq or dk of 64 channels: by the copy engine, by way of a tile that all products have read, or by threads."""
    if PACKED:
        if stop - o_t < C:
            store_own_rows(p, x, i_b, i_k, o_t, stop, o_k, T, H, K, layout)
        else:
            send_tile(box_, tile, x, i_b, i_k, o_t, o_k)
    else:
        send_tile(box_, tile, x, i_b, i_k, o_t, o_k)


@gluon.jit
def send_tile(box_, tile, x, i_b, i_k, o_t, o_k):
    """x to a box, by way of a tile."""
    tile.reshape([C, BLOCK]).store(x.to(box_.dtype))
    fence_async_shared()
    barrier()  # all threads' stores are fenced
    copy_out(box_, [i_b, i_k, o_t, o_k], tile)


@gluon.jit
def across(lines, t_pairs, through, line: gl.constexpr):
    """(7) of each row, from sums in shared memory: sums of the terms that count, never a total less others.

    READS sums a row's reads, of the state and of earlier rows; t_pairs sums the reads that later rows make of it.
    """
    total = gl.associative_scan(lines.index(READS).load(line), 0, add, reverse=True)
    total = total - gl.associative_scan(t_pairs.load(line), 0, add, reverse=True)
    writes = lines.index(WRITES).load(line)
    before, _ = gl.associative_scan((gl.zeros_like(writes), writes), 0, behind)
    return total + before + gl.sum(lines.index(KEPT).load(line), 0) * through


@gluon.jit(do_not_specialize=VARIABLE)
def gradients(
    q, k, do, w, r, S, R, v, s_vb, s_vt, s_vh, g, s_gb, s_gt, s_gh, factors, d_dq, d_dk, sums, dq, dk, dv, dg, dbeta,
    cu, N, T, HV, G, scale, K: gl.constexpr, V: gl.constexpr,
):
    """(3) to (7) for a chunk of a key head, in bf16; dg is None where it is not needed.

    q ... R, d_dq and d_dk are boxes of 64 x 64 numbers, S the state before the chunk, R the gradient of the state after
    it. `sums` [slots, H, 2, K / 64, C, 64] keeps dq and dk of the value heads so far, in float32; None if there is one.
    """
    PACKED: gl.constexpr = cu is not None
    N_K: gl.constexpr = K // BLOCK
    N_V: gl.constexpr = V // BLOCK
    TO_DK: gl.constexpr = N_K * C * BLOCK  # from dq of a chunk in `sums`
    # this program's chunk of a key head, and its value heads, one a turn
    turns = 1 if sums is None else G
    pid, H = gl.program_id(0), HV // turns
    i_k, i_s = pid % H, pid // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, 4)

    # shared memory, in tiles of 64 x 64
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, wide)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_q = gl.allocate_shared_memory(q.dtype, [N_K, 1, 1, C, BLOCK], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [N_K, 1, 1, C, BLOCK], k.layout)
    t_do = gl.allocate_shared_memory(do.dtype, [N_V, 1, 1, C, BLOCK], do.layout)
    t_w = gl.allocate_shared_memory(w.dtype, [N_V, 1, 1, C, BLOCK], w.layout)
    t_r = gl.allocate_shared_memory(r.dtype, [N_V, 1, 1, C, BLOCK], r.layout)
    t_S = gl.allocate_shared_memory(S.dtype, [1, 1, BLOCK, BLOCK], S.layout)
    t_R = gl.allocate_shared_memory(R.dtype, [1, 1, BLOCK, BLOCK], R.layout)
    if dg is not None:
        t_pairs = gl.allocate_shared_memory(gl.float32, [C], flat)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(ready.index(n), count=1)
    tiles = Tiles(t_q, t_k, t_do, t_w, t_r, t_S, t_R)
    bars = Barriers(ready.index(0), ready.index(1), ready.index(2))
    fence_async_shared()
    barrier()

    # load
    load_rows(do, w, r, tiles, bars.tokens, i_b, i_k * turns, o_t)
    load_keys(q, k, tiles, bars.keys, i_b, i_k, o_t)
    load_states(S, R, tiles, bars.states, i_s, i_k * turns, 0)
    rows, columns = row_column(C, by_rows)
    i, j = row_column(C, wide)
    none = gl.zeros([C, C], gl.float32, wide)
    mbarrier.wait(bars.keys, 0)
    if PACKED:
        if stop - o_t < C:  # the rest is another sequence's
            for n in gl.static_range(N_K):
                keep_rows(t_k.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                keep_rows(t_q.index(n).reshape([C, BLOCK]), stop - o_t, wide)
            fence_async_shared()

    for turn in range(turns):
        # load
        i_h = i_k * turns + turn
        i_t = i_s * HV + i_h
        p_f = factors + i_t.to(gl.int64) * ROWS * C
        beta = load_strengths(factors, i_t, BETA, ROWS, wide)
        p_v = v + i_b.to(gl.int64) * s_vb + o_t.to(gl.int64) * s_vt + i_h.to(gl.int64) * s_vh
        p_dv = dv + ((i_b.to(gl.int64) * T + o_t) * HV + i_h) * V
        b_beta = gl.load(p_f + BETA * C + gl.arange(0, C, layout=gl.SliceLayout(1, by_rows)))
        mbarrier.wait(bars.tokens, turn & 1)
        if PACKED:
            if stop - o_t < C:
                for n in gl.static_range(N_V):
                    keep_rows(t_r.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                    keep_rows(t_w.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                    keep_rows(t_do.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                fence_async_shared()

        # compute: dv, and r v of (6)
        b_dbeta = make_dv(p_dv, p_v, s_vt, t_r, b_beta, o_t, stop, rows, columns, HV, scale, V, by_rows)
        b_dbeta = gl.convert_layout(b_dbeta, of_rows)

        # compute: G over V and k k^T over K, then F and q k^T
        M = over_blocks(t_r, t_w, none)
        A = over_blocks(t_k, t_k, none)
        if g is not None:
            since, until, through = load_decays(factors, i_t, SINCE, ROWS, wide)
            coarse_i, coarse_j = load_row_column(p_f + COARSE * C, wide)
            fine_i, fine_j = load_row_column(p_f + FINE * C, wide)
            E = gl.exp2((coarse_i - coarse_j) + (fine_i - fine_j))  # above the diagonal it may be infinite
        M, A = warpgroup_mma_wait(0, deps=[M, A])
        if g is not None:
            M = M * E
        M = gl.where(i > j, -M, 0.0)  # G is beta M
        A = A * M
        low_G = (M * beta[:, None]).to(k.dtype)
        b_dbeta += gl.sum(A, 1)
        F = over_blocks(t_do, t_w, none)
        if dg is not None:
            P = over_blocks(t_q, t_k, none)
            A = A * beta[:, None]
            F, P = warpgroup_mma_wait(0, deps=[F, P])
        else:
            F = warpgroup_mma_wait(0, deps=[F])
        if g is not None:
            F = F * E
        F = gl.where(i >= j, F, 0.0)
        if dg is not None:
            A += gl.where(i > j, F * P, 0.0)  # i = j crosses no gate
            b_reads = gl.sum(A, 1)
            t_pairs.store(gl.sum(A, 0))
            b_writes = gl.zeros([C], gl.float32, of_rows)
            b_kept = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, by_rows))
        # allocated here, since sums over rows need memory, too, and two programs share a multiprocessor's
        t_F = gl.allocate_shared_memory(k.dtype, [C, C], gl.NVMMASharedLayout(128, 16, 2))
        t_G = gl.allocate_shared_memory(k.dtype, [C, C], gl.NVMMASharedLayout(128, 16, 2))
        t_F.store(F.to(k.dtype))
        t_G.store(low_G)
        fence_async_shared()

        # compute: dq and dk of 64 channels, in a loop that is not unrolled: else ptxas keeps descriptors of all tiles
        if sums is not None:
            earlier = gl.full([C, BLOCK], turn, gl.int32, wide) > 0
            later = gl.full([C, BLOCK], turn, gl.int32, wide) + 1 < turns
        for m in range(N_K):
            b_q, b_k = t_q.index(m).reshape([C, BLOCK]), t_k.index(m).reshape([C, BLOCK])
            b_S, b_R = t_S.reshape([BLOCK, BLOCK]), t_R.reshape([BLOCK, BLOCK])
            b_dq, b_rS, b_dk = none, none, none
            for n_v in gl.static_range(N_V):
                mbarrier.wait(bars.states, (turn * (N_K * N_V) + m * N_V + n_v) & 1)
                S_T, R_T = b_S.permute((1, 0)), b_R.permute((1, 0))
                b_dq = warpgroup_mma(t_do.index(n_v).reshape([C, BLOCK]), S_T, b_dq, use_acc=n_v > 0, is_async=True)
                b_rS = warpgroup_mma(t_r.index(n_v).reshape([C, BLOCK]), S_T, b_rS, use_acc=n_v > 0, is_async=True)
                b_dk = warpgroup_mma(t_w.index(n_v).reshape([C, BLOCK]), R_T, b_dk, use_acc=n_v > 0, is_async=True)
                if dg is not None:
                    b_kept += gl.sum(b_S.load(by_rows).to(gl.float32) * b_R.load(by_rows).to(gl.float32), 1)
                b_dq, b_rS, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_rS, b_dk])
                fence_async_shared()  # before the copy engine writes where threads have read
                barrier()  # all warps have read S and R, and in the last round do, w and r
                if m * N_V + n_v + 1 < N_K * N_V:
                    load_states(S, R, tiles, bars.states, i_s, i_h, m * N_V + n_v + 1)
                elif turn + 1 < turns:
                    load_rows(do, w, r, tiles, bars.tokens, i_b, i_h + 1, o_t)
                    load_states(S, R, tiles, bars.states, i_s, i_h + 1, 0)
            low_k = b_k.load(wide).to(gl.float32)
            if g is not None:
                b_dq = b_dq * since[:, None]
                b_rS = b_rS * since[:, None]
                b_dk = b_dk * until[:, None]
            b_found = gl.sum(low_k * b_rS, 1)
            b_dbeta -= b_found
            if dg is not None:
                b_reads += gl.sum(b_q.load(wide).to(gl.float32) * b_dq, 1) - beta * b_found
                b_writes += gl.sum(low_k * b_dk, 1)
            b_dk = b_dk - b_rS * beta[:, None]
            b_dq = warpgroup_mma(t_F, b_k, b_dq, is_async=True)
            b_dk = warpgroup_mma(t_F.permute((1, 0)), b_q, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G, b_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G.permute((1, 0)), b_k, b_dk, is_async=True)
            if sums is not None:  # each thread reads and writes numbers of its own
                p_dq = sums + (pid.to(gl.int64) * (2 * N_K) + m) * (C * BLOCK) + (i * BLOCK + j)
            b_dq, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_dk])
            if sums is not None:
                b_dq += gl.load(p_dq, mask=earlier, other=0.0)
                b_dk += gl.load(p_dq + TO_DK, mask=earlier, other=0.0)
                gl.store(p_dq, b_dq, mask=later)
                gl.store(p_dq + TO_DK, b_dk, mask=later)
            barrier()  # all warps' products have read F and G, and q and k of these channels
            if turn + 1 == turns:
                send_columns(
                    dq, d_dq, t_q.index(m), b_dq * scale, i_b, i_k, o_t, stop, m * BLOCK, T, H, K, wide, PACKED
                )
                send_columns(
                    dk, d_dk, t_k.index(m), b_dk * scale, i_b, i_k, o_t, stop, m * BLOCK, T, H, K, wide, PACKED
                )

        # store: sums of rows, one row per thread pair, by way of the memory of F
        lines = reinterpret(t_F, gl.float32, [C // 2, C], flat)
        lines.index(DBETA).store(b_dbeta)
        o_r = o_t + gl.arange(0, C, layout=line)
        p_d = (i_b.to(gl.int64) * T + o_r) * HV + i_h
        if dg is not None:
            lines.index(READS).store(b_reads)
            lines.index(WRITES).store(b_writes)
            lines.index(KEPT).store(b_kept)
        gl.store(dbeta + p_d, (lines.index(DBETA).load(line) * scale).to(dbeta.dtype.element_ty), mask=o_r < stop)
        if dg is not None:
            total = across(lines, t_pairs, through, line) * scale
            b_g = load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_r, stop)
            total = gl.where(b_g == float("-inf"), 0.0, total)  # nothing crosses it
            gl.store(dg + p_d, total.to(dg.dtype.element_ty), mask=o_r < stop)
    tma.store_wait(0)
    for n in gl.static_range(3):
        mbarrier.invalidate(ready.index(n))


# The plan.


def make_gradients(call: DeltaCall, x: Local, beta: Spec, need_dg: bool) -> Made:
    """The results of `gradients`, in bf16; dg is None unless needed."""
    draft, H = call.draft, call.H // call.G
    dq, dk = (draft.new(f"d{n}", *y.shape, dtype=y.dtype) for n, y in (("q", x.q), ("k", x.k)))
    made = Made(dq, dk, draft.like("dv", x.v), draft.like("dg", x.g) if need_dg else None, draft.like("dbeta", beta))
    tokens = (box(y, C.value, BLOCK.value) for y in (x.q, x.k, x.do, x.writes, x.r))
    states = (box(y.transposed(1, 2), BLOCK.value, BLOCK.value) for y in (x.states, x.dstates))
    d_dq, d_dk = (box(y, C.value, BLOCK.value) for y in (dq, dk))
    sums = draft.new("sums", call.chunks, H, 2, C.value, call.K) if call.G > 1 else None
    draft.launch(
        gradients, H * call.chunks,
        *tokens, *states, x.v, *x.v.strides[:3], x.g, *strides(x.g), call.factors, d_dq, d_dk, sums, *made, call.cu,
        call.N, call.T, call.H, call.G, call.scale, K=call.K, V=call.V, num_warps=4, maxnreg=256,
    )
    return made
