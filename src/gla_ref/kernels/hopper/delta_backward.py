"""The gradient of the delta rules on Hopper, in the portable kernel's order (chapter 20).

Equations, names and the reason for each step are those of ../portable/delta_gradient.py. With S the state before a
chunk, R the gradient of the state after it (over scale) and Y, P, b of delta_chunk.py, but Y without beta::

    w = Y (beta (v - e^b (k S)))                          S <- e^(b_C) S + k^T (e^(b_C - b) w)                 (1)
    d = e^(b_C - b) (k R) + P^T do      r = Y^T d         R <- e^(b_C) R + q^T (e^b do) - k^T (e^b beta r)     (2)

Nothing of the forward pass is kept but its inputs. `solve` makes Y, P and the decays of all chunks at once. `walk` goes
from the first chunk to the last and stores w and the state before each chunk, `walk_back` goes from the last chunk to
the first and stores r and the R after each chunk. `gradients` makes all else, a chunk per program.

*Walks.* Columns of V never meet in (1) and (2), so a walk has V / BV programs per value head. A program has two roles
of four warps::

    loader    asks the copy engine (TMA) for the tiles of a chunk                        waits for `done`
    walker    (1) or (2) for BV columns of V; the state in its registers; results out    waits for `ready`

Stages, the two barriers of each, and why no role waits for ever or is two phases late: delta_ahead.py. Both walks go
through their chunks in rounds; round i of `walk_back` is chunk n - 1 - i.

*Results by the copy engine.* The copy of the state in 16 bits, from which products read, is the one that is stored: it
leaves for memory when a round begins, and has been read when `store_wait` in the middle of the round returns, before
the next state is written there. w and r leave from tiles of their own, which the same wait frees. A copy begins after
`barrier`, since each thread's fence is for its own stores. The rows behind a sequence's last one belong to the next
sequence, where sequences are packed: threads store a last chunk that is not whole.

*Segments.* A segment maps S to M S + X and R to M^T R + X'. Without results, walks make maps, BV columns per program:
X and X' from a state of zeros, M from the columns of the unit matrix, whose v are zeros: the copy engine reads zeros
beyond the columns of V. M^T needs no walk. `carry` of ../portable/delta_forward.py makes the states between segments of
maps. Segments and columns are those that `choose` of delta_ahead.py takes, by its model of the forward pass.

*gradients* has no roles: two programs share a multiprocessor, and one of them computes while the other one's tiles
come. All is in tiles of 64 x 64. A program has a chunk of a key head and takes that head's value heads in turn. The
tiles of q and k stay; do, w and r stay for a turn; S and R come by blocks, one block of each at a time. The tiles of
the next value head are asked for when the last product of do, w, r, S and R is over. dq and dk are sums over value
heads in their order: between turns they lie in memory in float32, where each thread finds the numbers that it wrote.
After the last turn 64 channels of them leave by way of the tiles of q and k, which all products have read by then.

*float16* ends at 65504, so sums of products pass through memory in float32, as in the portable kernel: threads store
them, and the portable `gradients` reads them. Operands are divided by powers of 2 (`operand`); the divisors of Y and P
are in `divisors`.

Bytes per chunk and value head in bf16: `solve` reads 4 C K and writes 4 C^2 + 20 C; `walk` reads 2 C (K + V) + 2 C^2
and writes 2 C V + 2 K V; `walk_back` reads 2 C (2 K + V) + 4 C^2 and writes 2 C V + 2 K V; `gradients` reads
8 C V + 4 K V and writes 2 C V, and per key head reads and writes 4 C K. Its sums, 8 C K per key head, are written and
read once per value head after the first. Shared memory at K = V = 128 and BV = 64: `walk` with two stages 88 KB
and `gradients` 112 KB, so that two programs share a multiprocessor; `walk_back` with three stages 200 KB.

Limits: tokens of 16 bits, K and V of 64 or 128. No plan takes this gradient unless it is asked for (`kernel="hopper"`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ... import _contract as contract
from ..launch.hardware import Hardware
from ..launch.plan import Box, Draft, Plan, Spec, cdiv
from ..portable.delta_forward import ROWS as FACTORS
from ..portable.delta_forward import DeltaCall, carry_states
from ..portable.delta_gradient import Local, Made, finish, gradient_of_state
from ..portable.segments import sequences, slots
from . import delta_ahead
from .delta_chunk import (
    VARIABLE,
    allocate_scratch,
    barrier,
    inverse,
    load_state,
    load_tokens,
    pairs,
    read,
    reinterpret,
    row_column,
    since_until,
    state_columns,
    strides,
    summed,
)
from .gla_backward import _add as add
from .gla_backward import _behind as behind
from .gluon_names import named
from .tiles import box, keep_rows, operand, which_segment

copy_in, copy_out = named("copy_in"), named("copy_out")

C = gl.constexpr(64)  # tokens of a chunk
BLOCK = gl.constexpr(64)  # rows and columns of the tiles of `gradients`
ROWS = gl.constexpr(FACTORS)  # a chunk's rows in `factors`: beta; e^b; e^(b_C - b); the sums of gates in two parts


@gluon.jit(do_not_specialize=VARIABLE)
def solve(
    q,
    k,
    g,
    beta,
    s_gb,
    s_gt,
    s_gh,
    s_bb,
    s_bt,
    s_bh,
    d_Y,
    d_P,
    factors,
    divisors,
    cu,
    N,
    T,
    HV,
    G,
    K: gl.constexpr,
    W: gl.constexpr,
):
    """Y and P of a chunk of a value head, and its `factors` [slots, HV, ROWS, C]. q, k, d_Y and d_P are boxes.

    `divisors` [slots, HV, 2] of Y and P are float16's; else None.
    """
    PACKED: gl.constexpr = cu is not None
    # this program's tile: neighbours are value heads of one key head, which share what they read in L2
    pid = gl.program_id(0)
    i_h, i_s = pid % HV, pid // HV
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, W)

    # shared memory
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [W], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, K, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, C, 16])
    t_q = gl.allocate_shared_memory(q.dtype, [1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [1, 1, C, K], k.layout)
    t_Y = gl.allocate_shared_memory(k.dtype, [1, 1, C, C], d_Y.layout)
    t_P = gl.allocate_shared_memory(k.dtype, [1, 1, C, C], d_P.layout)
    t_beta = gl.allocate_shared_memory(gl.float32, [C], flat)
    t_ones = gl.allocate_shared_memory(gl.float32, [C], flat)
    scratch = allocate_scratch()
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    barrier()

    # load
    mbarrier.expect(ready, 2 * k.block_type.nbytes)
    copy_in(k, [i_b, i_h // G, o_t, 0], ready, t_k)
    copy_in(q, [i_b, i_h // G, o_t, 0], ready, t_q)
    o_c = gl.arange(0, C, layout=line)
    b_beta = load_tokens(beta, (s_bb, s_bt, s_bh), i_b, i_h, o_t + o_c, stop)
    t_beta.store(b_beta)
    t_ones.store(gl.full([C], 1.0, gl.float32, line))
    p = factors + pid.to(gl.int64) * ROWS * C
    gl.store(p + o_c, b_beta)
    if g is not None:
        t_sums = gl.allocate_shared_memory(gl.float32, [2, C], flat)
        coarse, fine = summed(load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_t + o_c, stop))
        t_sums.index(0).store(coarse)
        t_sums.index(1).store(fine)
        since, until = since_until(coarse, fine, C, line)
        gl.store(p + C + o_c, since)
        gl.store(p + 2 * C + o_c, until)
        gl.store(p + 3 * C + o_c, coarse)
        gl.store(p + 4 * C + o_c, fine)
    else:
        t_sums: gl.constexpr = None
    b_q, b_k = t_q.reshape([C, K]), t_k.reshape([C, K])
    mbarrier.wait(ready, 0)
    if PACKED:
        if stop - o_t < C:  # the rest is another sequence's
            keep_rows(b_q, stop - o_t, of_k)
            keep_rows(b_k, stop - o_t, of_k)
            fence_async_shared()

    # compute
    A, P, of_P = pairs(b_q, b_k, t_sums, t_beta, wide)
    t_P.reshape([C, C]).store(P)
    Y, of_Y = operand(inverse(A, t_ones, scratch, wide), k.dtype)
    t_Y.reshape([C, C]).store(Y)

    # store
    fence_async_shared()
    barrier()
    copy_out(d_P, [pid, 0, 0, 0], t_P)
    copy_out(d_Y, [pid, 0, 0, 0], t_Y)
    if divisors is not None:
        ones, o_1 = gl.full([1], 1.0, gl.float32, one), gl.arange(0, 1, layout=one)
        gl.store(divisors + pid.to(gl.int64) * 2 + o_1, ones * of_Y)
        gl.store(divisors + pid.to(gl.int64) * 2 + 1 + o_1, ones * of_P)
    tma.store_wait(0)
    mbarrier.invalidate(ready)


class Boxes(NamedTuple):
    """The tensors that the copy engine brings; `walk` has no q and P."""

    q: object
    k: object
    v: object  # do in `walk_back`
    Y: object
    P: object


class Tiles(NamedTuple):
    """Their tiles in shared memory, of several chunks."""

    q: object
    k: object
    v: object
    Y: object
    P: object


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each stage."""

    ready: object  # the walker: until the copies have come
    done: object  # the loader: until the walker has read a stage


class Walked(NamedTuple):
    """The results of a walk; None where it makes maps."""

    states: object  # pointers to [slots, HV, K, V], in the precision in which sums pass through memory
    rows: object  # pointers to [B, T, HV, V]: w or r
    d_states: object  # the same as boxes of the copy engine; None in float16
    d_rows: object


@gluon.jit
def loader(boxes, tiles, bars, i_b, i_h, i_k, i_c, o_v, begin, n, HV, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """Bring the tiles of each round; what lies beyond a tensor comes as zeros."""
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q has as many, P as many as Y
    of_v: gl.constexpr = boxes.v.block_type.nbytes
    of_Y: gl.constexpr = boxes.Y.block_type.nbytes
    for i in range(n):
        c = n - 1 - i if REVERSE else i
        s, o_t, i_t = i % STAGES, begin + c * C, (i_c + c) * HV + i_h
        mbarrier.wait(bars.done.index(s), ((i // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        if boxes.q is not None:
            mbarrier.expect(bar, 2 * of_k + of_v + 2 * of_Y)
        else:
            mbarrier.expect(bar, of_k + of_v + of_Y)
        copy_in(boxes.k, [i_b, i_k, o_t, 0], bar, tiles.k.index(s))
        copy_in(boxes.v, [i_b, i_h, o_t, o_v], bar, tiles.v.index(s))
        if boxes.P is not None:
            copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))
        copy_in(boxes.Y, [i_t, 0, 0, 0], bar, tiles.Y.index(s))
        if boxes.q is not None:
            copy_in(boxes.q, [i_b, i_k, o_t, 0], bar, tiles.q.index(s))


@gluon.jit
def load_strengths(factors, i_t, layout: gl.constexpr):
    """beta of a chunk's rows."""
    o_c = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    return gl.load(factors + i_t.to(gl.int64) * ROWS * C + o_c)


@gluon.jit
def load_decays(factors, i_t, layout: gl.constexpr):
    """(e^b, e^(b_C - b)) of a chunk's rows, and e^(b_C)."""
    o_c = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    p = factors + i_t.to(gl.int64) * ROWS * C + C
    return gl.load(p + o_c), gl.load(p + C + o_c), gl.load(p + (C - 1))


@gluon.jit
def load_divisors(divisors, i_t):
    """The divisors of a chunk's Y and P in float16."""
    p = divisors + i_t.to(gl.int64) * 2
    return gl.load(p), gl.load(p + 1)


@gluon.jit
def send_state(made, t_S, S, i_c, i_h, o_v, HV, V: gl.constexpr, layout: gl.constexpr):
    """The state of chunk i_c to memory: what t_S has of it or, where float32 is kept, S itself."""
    if made.d_states is not None:
        copy_out(made.d_states, [i_c, i_h, 0, o_v], t_S)
    else:
        K: gl.constexpr = S.shape[0]
        gl.store(state_columns(made.states, i_c, i_h, o_v, HV, K, V, S.shape[1], layout), S)


@gluon.jit
def send_rows(
    made, tile, x, i_b, i_h, o_t, end, o_v, T, HV, V: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr
):
    """w or r of a chunk to memory: what `tile` has of it or, by threads, x."""
    if made.d_rows is not None:
        if PACKED:
            if end - o_t < C:
                store_rows(made.rows, x, i_b, i_h, o_t, end, o_v, T, HV, V, layout)
            else:
                copy_out(made.d_rows, [i_b, i_h, o_t, o_v], tile)
        else:
            copy_out(made.d_rows, [i_b, i_h, o_t, o_v], tile)
    else:
        store_rows(made.rows, x, i_b, i_h, o_t, end, o_v, T, HV, V, layout)


@gluon.jit
def store_rows(p, x, i_b, i_h, o_t, end, o_v, T, HV, V: gl.constexpr, layout: gl.constexpr):
    """x [C, BV] to rows o_t ... of p [B, T, HV, V], up to row `end`, by threads."""
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    p += ((i_b.to(gl.int64) * T + o_t) * HV + i_h) * V + o_v
    gl.store(p + (rows * (HV * V) + columns), x.to(p.dtype.element_ty), mask=rows < end - o_t)


@gluon.jit
def walker(
    made,
    ends,
    factors,
    divisors,
    tiles,
    bars,
    own,
    which,
    V: gl.constexpr,
    W: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    PACKED: gl.constexpr,
):
    """(1) for columns o_v on, from the state in S_in to S_out."""
    S_in, S_out = ends
    t_S, t_w = own
    i_s, i_b, i_h, i_c, o_v, begin, end, n, T, HV = which
    K: gl.constexpr = t_S.shape[2]
    BV: gl.constexpr = t_S.shape[3]
    FLOAT16: gl.constexpr = t_S.dtype == gl.float16
    MAPS: gl.constexpr = made.rows is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    b_S = t_S.reshape([K, BV])
    none = gl.zeros([C, BV], gl.float32, layout)
    S, of_S = load_state(S_in, i_s, i_h, o_v, b_S, HV, W, layout, V if MAPS else None)
    barrier()  # all threads' stores are fenced
    beta = load_strengths(factors, i_c * HV + i_h, layout)
    if GATED:
        since, until, through = load_decays(factors, i_c * HV + i_h, layout)
    if FLOAT16:
        of_Y, _ = load_divisors(divisors, i_c * HV + i_h)
    for i in range(n):
        s, o_t = i % STAGES, begin + i * C
        i_next = (i_c + gl.minimum(i + 1, n - 1)) * HV + i_h  # factors are asked for a chunk before they are needed
        b_k, b_v = tiles.k.index(s).reshape([C, K]), tiles.v.index(s).reshape([C, BV])
        b_Y = tiles.Y.index(s).reshape([C, C])
        if not MAPS:
            send_state(made, t_S, S, i_c + i, i_h, o_v, HV, V, layout)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        if PACKED:
            if end - o_t < C:  # the rest is another sequence's
                keep_rows(b_k, end - o_t, of_k)
                keep_rows(b_v, end - o_t, layout)
                fence_async_shared()

        # w, in v's tile beta (v - e^b (k S)), then e^(b_C - b) w
        x = read(b_k, b_S, layout)
        v = b_v.load(layout).to(gl.float32)
        b_beta = beta[:, None]
        beta = load_strengths(factors, i_next, layout)
        x = warpgroup_mma_wait(0, deps=[x])
        if FLOAT16:
            x = x * of_S
        if GATED:
            x = x * since[:, None]
        low, of_x = operand((v - x) * b_beta, b_k.dtype)
        b_v.store(low)
        fence_async_shared()
        w = warpgroup_mma(b_Y, b_v, none, use_acc=False, is_async=True)
        if GATED:
            S = S * through
        w = warpgroup_mma_wait(0, deps=[w])
        if FLOAT16:
            w = w * (of_x * of_Y)
            of_Y, _ = load_divisors(divisors, i_next)
        if GATED:
            low, of_w = operand(w * until[:, None], b_k.dtype)
            since, until, through = load_decays(factors, i_next, layout)
        else:
            low, of_w = operand(w, b_k.dtype)
        tma.store_wait(0)  # the state and the last w have been read
        if made.d_rows is not None:
            t_w.reshape([C, BV]).store(w.to(b_k.dtype))
        barrier()  # all warps' products have read S and v's tile
        b_v.store(low)
        fence_async_shared()

        # S
        if FLOAT16:
            S = S / of_w
        S = warpgroup_mma(b_k.permute((1, 0)), b_v, S)
        if FLOAT16:
            S = S * of_w
        low, of_S = operand(S, b_k.dtype)
        b_S.store(low)
        fence_async_shared()
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        if not MAPS:
            send_rows(made, t_w, w, i_b, i_h, o_t, end, o_v, T, HV, V, layout, PACKED)
    tma.store_wait(0)
    if S_out is not None:
        gl.store(state_columns(S_out, i_s, i_h, o_v, HV, K, W, BV, layout), S)


@gluon.jit
def back_walker(
    made,
    ends,
    factors,
    divisors,
    tiles,
    bars,
    own,
    which,
    V: gl.constexpr,
    W: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    PACKED: gl.constexpr,
):
    """(2) for columns o_v on, from the R in R_in to R_out."""
    R_in, R_out = ends
    t_R, t_d, t_e = own
    i_s, i_b, i_h, i_c, o_v, begin, end, n, T, HV = which
    K: gl.constexpr = t_R.shape[2]
    BV: gl.constexpr = t_R.shape[3]
    FLOAT16: gl.constexpr = t_R.dtype == gl.float16
    MAPS: gl.constexpr = made.rows is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    b_R, b_d, b_e = t_R.reshape([K, BV]), t_d.reshape([C, BV]), t_e.reshape([C, BV])
    none = gl.zeros([C, BV], gl.float32, layout)
    R, of_R = load_state(R_in, i_s, i_h, o_v, b_R, HV, W, layout)
    barrier()  # all threads' stores are fenced
    i_t = (i_c + gl.maximum(n - 1, 0)) * HV + i_h
    beta = load_strengths(factors, i_t, layout)
    if GATED:
        since, until, through = load_decays(factors, i_t, layout)
    if FLOAT16:
        of_Y, of_P = load_divisors(divisors, i_t)
    for i in range(n):
        s, c = i % STAGES, n - 1 - i
        o_t = begin + c * C
        i_next = (i_c + gl.maximum(c - 1, 0)) * HV + i_h  # factors are asked for a chunk before they are needed
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_do = tiles.v.index(s).reshape([C, BV])
        b_Y, b_P = tiles.Y.index(s).reshape([C, C]), tiles.P.index(s).reshape([C, C])
        if not MAPS:
            send_state(made, t_R, R, i_c + c, i_h, o_v, HV, V, layout)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        if PACKED:
            if end - o_t < C:  # the rest is another sequence's
                keep_rows(b_q, end - o_t, of_k)
                keep_rows(b_k, end - o_t, of_k)
                keep_rows(b_do, end - o_t, layout)
                fence_async_shared()

        # d, and e^b do for R
        x = read(b_k, b_R, layout)
        y = warpgroup_mma(b_P.permute((1, 0)), b_do, none, use_acc=False, is_async=True)
        e = b_do.load(layout).to(gl.float32)
        if GATED:
            e = e * since[:, None]
        low, of_e = operand(e, b_k.dtype)
        b_e.store(low)
        x, y = warpgroup_mma_wait(0, deps=[x, y])
        if FLOAT16:
            x = x * of_R
            y = y * of_P
        if GATED:
            x = x * until[:, None]
        low, of_d = operand(x + y, b_k.dtype)
        tma.store_wait(0)  # R and the last r have been read
        b_d.store(low)
        fence_async_shared()

        # r, while the reads of R run
        r = warpgroup_mma(b_Y.permute((1, 0)), b_d, none, use_acc=False, is_async=True)
        if GATED:
            R = R * through
        if FLOAT16:
            R = R / of_e
        R = warpgroup_mma(b_q.permute((1, 0)), b_e, R, is_async=True)
        strength = beta
        beta = load_strengths(factors, i_next, layout)
        if GATED:
            strength = strength * since
            since, until, through = load_decays(factors, i_next, layout)
        r = warpgroup_mma_wait(1, deps=[r])
        if FLOAT16:
            r = r * (of_d * of_Y)
            of_Y, of_P = load_divisors(divisors, i_next)
        low, of_r = operand(r * -strength[:, None], b_k.dtype)
        barrier()  # all warps' products have read d, do and R
        b_do.store(low)
        if made.d_rows is not None:
            b_d.store(r.to(b_k.dtype))
        fence_async_shared()

        # R
        R = warpgroup_mma_wait(0, deps=[R])
        if FLOAT16:
            R = R * (of_e / of_r)
        R = warpgroup_mma(b_k.permute((1, 0)), b_do, R)
        if FLOAT16:
            R = R * of_r
        low, of_R = operand(R, b_k.dtype)
        b_R.store(low)
        fence_async_shared()
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        if not MAPS:
            send_rows(made, t_d, r, i_b, i_h, o_t, end, o_v, T, HV, V, layout, PACKED)
    tma.store_wait(0)
    if R_out is not None:
        gl.store(state_columns(R_out, i_s, i_h, o_v, HV, K, W, BV, layout), R)


@gluon.jit
def which_columns(cu, N, T, L, HV, columns: gl.constexpr, BV: gl.constexpr):
    """A program's segment, batch row, head, first chunk's slot, first column, first token, end and number of chunks."""
    N_V: gl.constexpr = columns // BV
    pid = gl.program_id(0)  # neighbours share what they read in L2
    o_v, i_h, i_s = pid % N_V * BV, pid // N_V % HV, pid // N_V // HV
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, 4)
    begin = gl.minimum(begin, stop)  # a spare slot has no chunks
    end = gl.minimum(begin + L, stop)
    if cu is not None:
        i_c = start // C + i_n
    else:
        i_c = i_n * gl.cdiv(T, C)
    return i_s, i_b, i_h, i_c + (begin - start) // C, o_v, begin, end, gl.cdiv(end - begin, C), T, HV


@gluon.jit(do_not_specialize=VARIABLE)
def walk(
    k,
    v,
    d_Y,
    factors,
    divisors,
    d_states,
    d_writes,
    states,
    writes,
    S_in,
    S_out,
    cu,
    N,
    T,
    L,
    HV,
    G,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, first chunk first, from the state in S_in (or zeros) to S_out.

    States are [slots, HV, K, W]. k, v, d_Y are boxes, and so are d_states and d_writes, of `states` and `writes` in 16
    bits. Without those two the columns of S_out are those of X and, behind them, of M.
    """
    PACKED: gl.constexpr = cu is not None
    which = which_columns(cu, N, T, L, HV, V if writes is not None else W, BV)
    i_s, i_b, i_h, i_c, o_v, begin, end, n, _, _ = which

    # shared memory
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C, BV], v.layout)
    t_Y = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_Y.layout)
    t_S = gl.allocate_shared_memory(k.dtype, [1, 1, K, BV], v.layout)
    if d_writes is not None:
        t_w = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], v.layout)
    else:
        t_w: gl.constexpr = None
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(done.index(s), count=1)
    fence_async_shared()

    tiles, bars = Tiles(None, t_k, t_v, t_Y, None), Barriers(ready, done)
    made, own, ends = Walked(states, writes, d_states, d_writes), (t_S, t_w), (S_in, S_out)
    boxes, i_k = Boxes(None, k, v, d_Y, None), i_h // G
    gl.warp_specialize(
        [
            (walker, (made, ends, factors, divisors, tiles, bars, own, which, V, W, STAGES, GATED, PACKED)),
            (loader, (boxes, tiles, bars, i_b, i_h, i_k, i_c, o_v, begin, n, HV, STAGES, False)),
        ],
        [4],
        [REGISTERS],
    )
    # all roles are done: until here the barriers' bytes are theirs
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(done.index(s))


@gluon.jit(do_not_specialize=VARIABLE)
def walk_back(
    q,
    k,
    do,
    d_Y,
    d_P,
    factors,
    divisors,
    d_dstates,
    d_r,
    dstates,
    r,
    R_in,
    R_out,
    cu,
    N,
    T,
    L,
    HV,
    G,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, last chunk first, from the R in R_in (or zeros) to R_out.

    As `walk`, but without `dstates` and `r` the columns of R_out are those of X' alone.
    """
    PACKED: gl.constexpr = cu is not None
    which = which_columns(cu, N, T, L, HV, V, BV)
    i_s, i_b, i_h, i_c, o_v, begin, end, n, _, _ = which

    # shared memory
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_do = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, C, BV], do.layout)
    t_Y = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_Y.layout)
    t_P = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_P.layout)
    t_R = gl.allocate_shared_memory(k.dtype, [1, 1, K, BV], do.layout)
    t_d = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], do.layout)
    t_e = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], do.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(done.index(s), count=1)
    fence_async_shared()

    tiles, bars = Tiles(t_q, t_k, t_do, t_Y, t_P), Barriers(ready, done)
    made, own, ends = Walked(dstates, r, d_dstates, d_r), (t_R, t_d, t_e), (R_in, R_out)
    boxes, i_k = Boxes(q, k, do, d_Y, d_P), i_h // G
    gl.warp_specialize(
        [
            (back_walker, (made, ends, factors, divisors, tiles, bars, own, which, V, W, STAGES, GATED, PACKED)),
            (loader, (boxes, tiles, bars, i_b, i_h, i_k, i_c, o_v, begin, n, HV, STAGES, True)),
        ],
        [4],
        [REGISTERS],
    )
    # all roles are done: until here the barriers' bytes are theirs
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(done.index(s))


# The gradients, chunk by chunk


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
def send_columns(
    p, box_, tile, x, i_b, i_k, o_t, stop, o_k, T, H, K: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr
):
    """dq or dk of 64 channels: by the copy engine, by way of a tile that all products have read, or by threads."""
    if PACKED:
        if stop - o_t < C:
            store_rows(p, x, i_b, i_k, o_t, stop, o_k, T, H, K, layout)
        else:
            send_tile(box_, tile, x, i_b, i_k, o_t, o_k)
    else:
        send_tile(box_, tile, x, i_b, i_k, o_t, o_k)


@gluon.jit
def send_tile(box_, tile, x, i_b, i_h, o_t, o_k):
    tile.reshape([C, BLOCK]).store(x.to(box_.dtype))
    fence_async_shared()
    barrier()  # all threads' stores are fenced
    copy_out(box_, [i_b, i_h, o_t, o_k], tile)


@gluon.jit(do_not_specialize=VARIABLE)
def gradients(
    q,
    k,
    do,
    w,
    r,
    S,
    R,
    v,
    s_vb,
    s_vt,
    s_vh,
    g,
    s_gb,
    s_gt,
    s_gh,
    factors,
    d_dq,
    d_dk,
    sums,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    cu,
    N,
    T,
    HV,
    G,
    scale,
    K: gl.constexpr,
    V: gl.constexpr,
):
    """(3) to (7) of portable/delta_gradient.py for a chunk of a key head, in bf16; dg is None where it is not needed.

    q ... R, d_dq and d_dk are boxes of 64 x 64 numbers, S the state before the chunk, R the gradient of the state after
    it. `sums` [slots, H, 2, K / 64, C, 64] keeps dq and dk of the value heads so far, in float32; None if there is one.
    """
    PACKED: gl.constexpr = cu is not None
    N_K: gl.constexpr = K // BLOCK
    N_V: gl.constexpr = V // BLOCK
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
        t_column = gl.allocate_shared_memory(gl.float32, [C], flat)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(ready.index(n), count=1)
    of_keys, of_tokens, of_states = ready.index(0), ready.index(1), ready.index(2)
    fence_async_shared()
    barrier()

    # load
    load_rows(r, w, do, t_r, t_w, t_do, of_tokens, i_b, i_k * turns, o_t)
    mbarrier.expect(of_keys, 2 * N_K * k.block_type.nbytes)
    for n in gl.static_range(N_K):
        copy_in(k, [i_b, i_k, o_t, n * BLOCK], of_keys, t_k.index(n))
        copy_in(q, [i_b, i_k, o_t, n * BLOCK], of_keys, t_q.index(n))
    load_states(S, R, t_S, t_R, of_states, i_s, i_k * turns, 0, N_V)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, by_rows))[:, None]
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, by_rows))[None, :]
    i, j = row_column(C, wide)
    none = gl.zeros([C, C], gl.float32, wide)
    mbarrier.wait(of_keys, 0)
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
        beta = load_strengths(factors, i_t, wide)
        p_v = v + i_b.to(gl.int64) * s_vb + o_t.to(gl.int64) * s_vt + i_h.to(gl.int64) * s_vh
        p_dv = dv + ((i_b.to(gl.int64) * T + o_t) * HV + i_h) * V
        b_beta = gl.load(p_f + gl.arange(0, C, layout=gl.SliceLayout(1, by_rows)))
        mbarrier.wait(of_tokens, turn & 1)
        if PACKED:
            if stop - o_t < C:
                for n in gl.static_range(N_V):
                    keep_rows(t_r.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                    keep_rows(t_w.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                    keep_rows(t_do.index(n).reshape([C, BLOCK]), stop - o_t, wide)
                fence_async_shared()

        # compute: dv and of dbeta r v
        found = gl.zeros([C], gl.float32, gl.SliceLayout(1, by_rows))
        for n in gl.static_range(N_V):
            b_r = t_r.index(n).reshape([C, BLOCK]).load(by_rows).to(gl.float32)
            m_v, o_c = rows < stop - o_t, n * BLOCK + columns
            b_v = gl.load(p_v + (rows * s_vt + o_c), mask=m_v, other=0.0).to(gl.float32)
            found += gl.sum(b_r * b_v, 1)
            b_dv = (b_r * (b_beta * scale)[:, None]).to(dv.dtype.element_ty)
            gl.store(p_dv + (rows * (HV * V) + o_c), b_dv, mask=m_v)
        b_dbeta = gl.convert_layout(found, of_rows)

        # compute: G over V and k k^T over K, then F and q k^T
        M = over_blocks(t_r, t_w, none)
        A = over_blocks(t_k, t_k, none)
        if g is not None:
            since, until, through = load_decays(factors, i_t, wide)
            coarse_i, coarse_j = load_row_column(p_f + 3 * C, wide)
            fine_i, fine_j = load_row_column(p_f + 4 * C, wide)
            E = gl.exp2((coarse_i - coarse_j) + (fine_i - fine_j))  # above the diagonal it may be infinite
        M, A = warpgroup_mma_wait(0, deps=[M, A])
        if g is not None:
            M = M * E
        M = gl.where(i > j, -M, 0.0)
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
            b_row = gl.sum(A, 1)
            t_column.store(gl.sum(A, 0))
            b_write = gl.zeros([C], gl.float32, of_rows)
            b_kept = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, by_rows))
        # allocated here, since sums over rows need memory, too, and two programs share a multiprocessor's
        t_F = gl.allocate_shared_memory(k.dtype, [C, C], gl.NVMMASharedLayout(128, 16, 2))
        t_G = gl.allocate_shared_memory(k.dtype, [C, C], gl.NVMMASharedLayout(128, 16, 2))
        t_F.store(F.to(k.dtype))
        t_G.store(low_G)
        fence_async_shared()

        # compute: dq and dk of 64 channels, in loops that are not unrolled: else ptxas keeps descriptors of all tiles
        if sums is not None:
            earlier = gl.full([C, BLOCK], turn, gl.int32, wide) > 0
            later = gl.full([C, BLOCK], turn, gl.int32, wide) + 1 < turns
        for m in range(N_K):
            b_q, b_k = t_q.index(m).reshape([C, BLOCK]), t_k.index(m).reshape([C, BLOCK])
            b_S, b_R = t_S.reshape([BLOCK, BLOCK]), t_R.reshape([BLOCK, BLOCK])
            b_dq, b_rS, b_dk = none, none, none
            for n_v in range(N_V):
                mbarrier.wait(of_states, (turn * (N_K * N_V) + m * N_V + n_v) & 1)
                S_T, R_T = b_S.permute((1, 0)), b_R.permute((1, 0))
                b_dq = warpgroup_mma(t_do.index(n_v).reshape([C, BLOCK]), S_T, b_dq, use_acc=n_v > 0, is_async=True)
                b_rS = warpgroup_mma(t_r.index(n_v).reshape([C, BLOCK]), S_T, b_rS, use_acc=n_v > 0, is_async=True)
                b_dk = warpgroup_mma(t_w.index(n_v).reshape([C, BLOCK]), R_T, b_dk, use_acc=n_v > 0, is_async=True)
                if dg is not None:
                    b_kept += gl.sum(b_S.load(by_rows).to(gl.float32) * b_R.load(by_rows).to(gl.float32), 1)
                b_dq, b_rS, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_rS, b_dk])
                if m * N_V + n_v + 1 < N_K * N_V:
                    barrier()  # all warps have read S and R
                    load_states(S, R, t_S, t_R, of_states, i_s, i_h, m * N_V + n_v + 1, N_V)
                elif turn + 1 < turns:
                    barrier()  # all warps have read r, w, do, S and R
                    load_rows(r, w, do, t_r, t_w, t_do, of_tokens, i_b, i_h + 1, o_t)
                    load_states(S, R, t_S, t_R, of_states, i_s, i_h + 1, 0, N_V)
            low_k = b_k.load(wide).to(gl.float32)
            if g is not None:
                b_dq = b_dq * since[:, None]
                b_rS = b_rS * since[:, None]
                b_dk = b_dk * until[:, None]
            b_found = gl.sum(low_k * b_rS, 1)
            b_dbeta -= b_found
            if dg is not None:
                b_row += gl.sum(b_q.load(wide).to(gl.float32) * b_dq, 1) - beta * b_found
                b_write += gl.sum(low_k * b_dk, 1)
            b_dk = b_dk - b_rS * beta[:, None]
            b_dq = warpgroup_mma(t_F, b_k, b_dq, is_async=True)
            b_dk = warpgroup_mma(t_F.permute((1, 0)), b_q, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G, b_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(t_G.permute((1, 0)), b_k, b_dk, is_async=True)
            if sums is not None:  # each thread reads and writes numbers of its own
                p_m = sums + (pid.to(gl.int64) * (2 * N_K) + m) * (C * BLOCK) + (i * BLOCK + j)
            b_dq, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_dk])
            if sums is not None:
                b_dq += gl.load(p_m, mask=earlier, other=0.0)
                b_dk += gl.load(p_m + N_K * C * BLOCK, mask=earlier, other=0.0)
                gl.store(p_m, b_dq, mask=later)
                gl.store(p_m + N_K * C * BLOCK, b_dk, mask=later)
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
        lines.index(0).store(b_dbeta)
        o_r = o_t + gl.arange(0, C, layout=line)
        p_d = (i_b.to(gl.int64) * T + o_r) * HV + i_h
        if dg is not None:
            lines.index(1).store(b_row)
            lines.index(2).store(b_write)
            lines.index(3).store(b_kept)
        gl.store(dbeta + p_d, (lines.index(0).load(line) * scale).to(dbeta.dtype.element_ty), mask=o_r < stop)
        if dg is not None:  # sums of the terms that count, never a total less others; nothing crosses g = -inf
            total = gl.associative_scan(lines.index(1).load(line), 0, add, reverse=True)
            total = total - gl.associative_scan(t_column.load(line), 0, add, reverse=True)
            b_write = lines.index(2).load(line)
            before, _ = gl.associative_scan((gl.zeros_like(b_write), b_write), 0, behind)
            total = (total + before + gl.sum(lines.index(3).load(line), 0) * through) * scale
            b_g = load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_r, stop)
            total = gl.where(b_g == float("-inf"), 0.0, total)
            gl.store(dg + p_d, total.to(dg.dtype.element_ty), mask=o_r < stop)
    tma.store_wait(0)
    for n in gl.static_range(3):
        mbarrier.invalidate(ready.index(n))


@gluon.jit
def load_rows(r, w, do, t_r, t_w, t_do, bar, i_b, i_h, o_t):
    """Bring r, w and do of a chunk of a value head."""
    TILES: gl.constexpr = t_r.shape[0]
    mbarrier.expect(bar, 3 * TILES * r.block_type.nbytes)
    for n in gl.static_range(TILES):
        copy_in(r, [i_b, i_h, o_t, n * BLOCK], bar, t_r.index(n))
        copy_in(w, [i_b, i_h, o_t, n * BLOCK], bar, t_w.index(n))
        copy_in(do, [i_b, i_h, o_t, n * BLOCK], bar, t_do.index(n))


@gluon.jit
def load_states(S, R, t_S, t_R, bar, i_s, i_h, n, N_V: gl.constexpr):
    """Bring block n of S and of R: 64 rows and columns, all columns of the first rows first."""
    mbarrier.expect(bar, 2 * S.block_type.nbytes)
    copy_in(S, [i_s, i_h, n // N_V * BLOCK, n % N_V * BLOCK], bar, t_S)
    copy_in(R, [i_s, i_h, n // N_V * BLOCK, n % N_V * BLOCK], bar, t_R)


# The plan.


class Setup(NamedTuple):
    """How the programs of both walks are made, by columns per program."""

    forward: int  # stages of `walk`
    back: int  # stages of `walk_back`
    registers: int  # a thread, at entry; the walker gets what the loader leaves of them


SETUPS = {64: Setup(2, 3, 128), 32: Setup(4, 3, 128)}
OF_SOLVE = 168  # registers of a thread of `solve`


class Solved(NamedTuple):
    """The boxes and factors of all chunks, by `solve`, that walks share, and how their programs are made."""

    d_Y: Box
    d_P: Box
    factors: Spec
    divisors: Spec | None
    how: Setup
    BV: int


def state_box(x: Spec, BV: int) -> Box:
    """States [slots, HV, K, V] in boxes of BV columns of one head."""
    return box(x.transposed(1, 2), x.shape[2], BV)


def launch(
    call: DeltaCall, solved: Solved, kernel, tokens: tuple[Box, ...], S_in: Spec | None, S_out: Spec | None,
    states: Spec | None = None, rows: Spec | None = None,
) -> None:  # fmt: skip
    """A walk over all segments, `walk` of k, v, Y or `walk_back` of q, k, do, Y, P; without results, their maps."""
    maps, BV = rows is None and kernel is walk, solved.BV
    W = call.V + call.K if call.L <= call.T else call.V
    low = rows is not None and rows.dtype == call.kept != torch.float32
    call.draft.launch(
        kernel,
        (W if maps else call.V) // BV * call.H * call.segments,
        *tokens,
        solved.factors,
        solved.divisors,
        state_box(states, BV) if low else None,
        box(rows, C.value, BV) if low else None,
        states,
        rows,
        S_in,
        S_out,
        call.cu,
        call.N,
        call.T,
        call.L,
        call.H,
        call.G,
        K=call.K,
        V=call.V,
        W=W,
        BV=BV,
        STAGES=solved.how.back if kernel is walk_back else solved.how.forward,
        GATED=call.gated,
        REGISTERS=24,
        num_warps=4,
        maxnreg=solved.how.registers,
    )


def make_gradients(call: DeltaCall, x: Local, beta: Spec, need_dg: bool) -> Made:
    """The results of `gradients`, in bf16; dg is None unless needed."""
    draft, H = call.draft, call.H // call.G
    dq, dk = (draft.new(f"d{n}", *y.shape, dtype=y.dtype) for n, y in (("q", x.q), ("k", x.k)))
    made = Made(dq, dk, draft.like("dv", x.v), draft.like("dg", x.g) if need_dg else None, draft.like("dbeta", beta))
    tokens = (box(y, C.value, BLOCK.value) for y in (x.q, x.k, x.do, x.writes, x.r))
    states = (box(y.transposed(1, 2), BLOCK.value, BLOCK.value) for y in (x.states, x.dstates))
    draft.launch(
        gradients,
        H * call.chunks,
        *tokens,
        *states,
        x.v,
        *x.v.strides[:3],
        x.g,
        *strides(x.g),
        call.factors,
        *(box(y, C.value, BLOCK.value) for y in (dq, dk)),
        draft.new("sums", call.chunks, H, 2, C.value, call.K) if call.G > 1 else None,
        *made,
        call.cu,
        call.N,
        call.T,
        call.H,
        call.G,
        call.scale,
        K=call.K,
        V=call.V,
        num_warps=4,
        maxnreg=256,
    )
    return made


def plan_backward(hardware: Hardware, q, k, v, g, beta, S, cu, do, dS, scale, path, need_dg) -> Plan:
    """(dq, dk, dv, dg, dbeta, dS0); None for what is not given or, of dg, not needed."""
    draft = Draft(hardware, q, k, v, g, beta, S, cu, do, dS)
    (B, T, heads, K), (H, V) = q.shape, v.shape[2:]
    G, cu, N = H // heads, draft.contiguous(cu, torch.int32), sequences(B, cu)
    do, scale = draft.gradient_of_o(v, do, contract.check_scale(scale, K))
    chunks, n = cdiv(T, C.value), slots(B, T, cu, C.value)
    each = cdiv(chunks, N) if cu else chunks
    how, length = delta_ahead.choose(hardware, K, V, H * N, each, path)
    BV = how.columns
    L = C.value * length if path == "segmented" or length < each else T + 1
    cut = L <= T  # a sequence of less than one segment is walked in one go
    draft.because(f"T of all chunks first, then walks with a program for each {BV} columns of V: Hopper, in Gluon")
    who = "it was asked for" if path else f"{V // BV * H * N} programs for {hardware}"
    draft.because(f"each sequence in {f'segments of {length} of its {chunks} chunks' if cut else 'one go'}: {who}")

    kept = q.dtype if q.dtype == torch.bfloat16 else torch.float32  # as the portable kernel's, which reads it
    Y, P = (draft.new(name, n * H, C.value, 1, C.value, dtype=q.dtype) for name in "YP")
    factors = draft.new("factors", n, H, ROWS.value, C.value)
    divisors = draft.new("divisors", n, H, 2) if q.dtype == torch.float16 else None
    call = DeltaCall(
        draft, cu, B, T, H, K, V, G, N, scale, g is not None, kept, C.value, L, K, BV, n, 4, 1, P, Y, factors
    )
    solved = Solved(box(Y, C.value, C.value), box(P, C.value, C.value), factors, divisors, SETUPS[BV], BV)
    d_q, d_k, d_v, d_do = (box(x, C.value, width) for x, width in ((q, K), (k, K), (v, BV), (do, BV)))
    draft.launch(
        solve,
        n * H,
        d_q,
        d_k,
        g,
        beta,
        *strides(g),
        *strides(beta),
        solved.d_Y,
        solved.d_P,
        factors,
        divisors,
        cu,
        N,
        T,
        H,
        G,
        K=K,
        W=4,
        num_warps=4,
        maxnreg=OF_SOLVE,
    )

    def walked(kernel, tokens: tuple[Box, ...], first: Spec | None, part: Spec | None, after: Spec | None, names):
        """(states, rows) of a walk from state `first`; `part` gets the state of each segment, `after` the last one."""
        out = after
        if cut:
            launch(call, solved, kernel, tokens, None, part)
            carry_states(draft, part, first, after, cu, T, L, reverse=kernel is walk_back)
            first, out = part, None
        states, rows = draft.new(names[0], n, H, K, V, dtype=kept), draft.new(names[1], *v.shape, dtype=kept)
        launch(call, solved, kernel, tokens, first, out, states, rows)
        return states, rows

    S_in, R = draft.contiguous(S, torch.float32), gradient_of_state(draft, dS, scale)
    part = draft.new("part", call.segments, H, K, V + K) if cut else None
    S_T = draft.new("S_T", N, H, K, V) if cut else None
    states, writes = walked(walk, (d_k, d_v, solved.d_Y), S_in, part, S_T, ("states", "writes"))
    part = draft.compute("part back", _turned, part, V)
    R_0 = draft.new("R_0", N, H, K, V) if S or cut else None
    dstates, r = walked(walk_back, (d_q, d_k, d_do, solved.d_Y, solved.d_P), R, part, R_0, ("dstates", "r"))
    local = Local(q, k, v, g, do, states, writes, dstates, r)
    made = (make_gradients if kept == q.dtype else finish)(call, local, beta, need_dg)
    dS0 = draft.compute("dS0", torch.mul, R_0 if S else None, scale)
    return draft.plan("hopper", *made, dS0)


def _turned(part: Tensor, V: int) -> Tensor:
    """Maps [slots, H, K, V + K] of the way back: M^T, and room for X'."""
    found = torch.empty_like(part)
    found[..., V:] = part[..., V:].mT
    return found
