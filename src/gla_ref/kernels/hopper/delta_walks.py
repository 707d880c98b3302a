"""Two launches of delta_backward.py: forwards for the state of each chunk, backwards for its gradient (chapter 20).

With S the state before a chunk, R the gradient of the state after it (over scale), and b, Y, P of delta_solve.py::

    walk         w = Y (beta (v - e^b (k S)))               S <- e^(b_C) S + k^T (e^(b_C - b) w)                   (1)
    walk_back    d = e^(b_C - b) (k R) + P^T do             R <- e^(b_C) R + q^T (e^b do) - k^T (e^b beta r)       (2)
                 r = Y^T d

d is the gradient of w, r the gradient of the factor that Y multiplies. `walk` stores w and the state before each chunk.
`walk_back` stores r and the R after each chunk; its round i is chunk n - 1 - i. Columns of V never meet in (1) and (2),
so a walk has V / BV programs per value head. A program has two roles of four warps::

    loader                   asks the copy engine (TMA) for the tiles of a chunk                     waits for `done`
    walker or back_walker    (1) or (2) for BV columns; the state in its registers; results out      waits for `ready`

Stages, the two barriers of each, and why no role waits for ever or is two phases late: delta_ahead.py.

*Results by the copy engine.* The copy of the state in 16 bits, from which products read, is the one that is stored: it
leaves for memory when a round begins, and has been read when `store_wait` in the middle of the round returns, before
the next state is written there. w and r leave from tiles of their own, which the same wait frees. A copy begins after
`barrier`, since each thread's fence is for its own stores. The rows after a sequence's last one belong to the next
sequence, where sequences are packed: threads store a last chunk that is not whole. In float16 threads store all
results, in float32.

*Maps.* Without results, a walk makes maps of segments, BV columns per program: X or X' from a state of zeros, M from
the columns of the unit matrix. Their v are zeros, since the copy engine reads zeros beyond the columns of V. M^T needs
no walk.

Bytes per chunk and value head in bf16: `walk` reads 2 C (K + V) + 2 C^2 and writes 2 C V + 2 K V; `walk_back` reads
2 C (2 K + V) + 4 C^2 and writes 2 C V + 2 K V. Shared memory at K = V = 128 and BV = 64: `walk` with two stages 88 KB,
so that two programs share a multiprocessor; `walk_back` with three stages 200 KB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..launch.plan import Box, Spec
from ..portable.delta_forward import BETA, SINCE, DeltaCall
from ..portable.delta_forward import ROWS as FACTORS
from .delta_chunk import VARIABLE, barrier, load_state, read, state_columns
from .delta_solve import C, load_decays, load_divisors, load_strengths
from .gluon_names import named
from .tiles import box, keep_rows, operand, store_own_rows, which_segment

copy_in, copy_out = named("copy_in"), named("copy_out")

DIVISORS = gl.constexpr(FACTORS)  # float16's row of `factors`, after those of the portable kernels


class Part(NamedTuple):
    """The chunks and columns of a program."""

    i_s: object  # slot of the segment
    i_b: object  # batch row
    i_h: object  # value head
    i_k: object  # its key head
    i_c: object  # slot of the first chunk
    o_v: object  # first column
    begin: object  # first token
    end: object  # the token after the last one
    n: object  # chunks
    T: object  # tokens of a batch row
    HV: object  # value heads


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


class Results(NamedTuple):
    """Where the results of each chunk go; None where a walk makes maps."""

    states: object  # pointers to [slots, HV, K, V], in the precision in which sums pass through memory
    rows: object  # pointers to [B, T, HV, V]: w or r
    d_states: object  # the same two as boxes of the copy engine; None in float16
    d_rows: object


@gluon.jit
def which_part(cu, N, T, L, HV, G, columns: gl.constexpr, BV: gl.constexpr):
    """The part of this program, in a walk over so many columns."""
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
    i_c, n = i_c + (begin - start) // C, gl.cdiv(end - begin, C)
    return Part(i_s, i_b, i_h, i_h // G, i_c, o_v, begin, end, n, T, HV)


@gluon.jit
def loader(boxes, tiles, bars, part, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """Bring the tiles of each round; what lies beyond a tensor comes as zeros."""
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q has as many, P as many as Y
    of_v: gl.constexpr = boxes.v.block_type.nbytes
    of_Y: gl.constexpr = boxes.Y.block_type.nbytes
    for i in range(part.n):
        c = part.n - 1 - i if REVERSE else i
        s, o_t, i_t = i % STAGES, part.begin + c * C, (part.i_c + c) * part.HV + part.i_h
        mbarrier.wait(bars.done.index(s), ((i // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        if boxes.q is not None:
            mbarrier.expect(bar, 2 * of_k + of_v + 2 * of_Y)
        else:
            mbarrier.expect(bar, of_k + of_v + of_Y)
        copy_in(boxes.k, [part.i_b, part.i_k, o_t, 0], bar, tiles.k.index(s))
        copy_in(boxes.v, [part.i_b, part.i_h, o_t, part.o_v], bar, tiles.v.index(s))
        if boxes.P is not None:
            copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))
        copy_in(boxes.Y, [i_t, 0, 0, 0], bar, tiles.Y.index(s))
        if boxes.q is not None:
            copy_in(boxes.q, [part.i_b, part.i_k, o_t, 0], bar, tiles.q.index(s))


@gluon.jit
def send_state(made, t_S, S, i_c, part, V: gl.constexpr, layout: gl.constexpr):
    """Store the state of chunk i_c: by the copy engine from t_S or, in float32, by threads from S."""
    if made.d_states is not None:
        copy_out(made.d_states, [i_c, part.i_h, 0, part.o_v], t_S)
    else:
        K: gl.constexpr = S.shape[0]
        gl.store(state_columns(made.states, i_c, part.i_h, part.o_v, part.HV, K, V, S.shape[1], layout), S)


@gluon.jit
def send_rows(made, tile, x, o_t, part, V: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr):
    """Store w or r of a chunk: by the copy engine from `tile` or, in float32 or at an end, by threads from x."""
    i_b, i_h, o_v, end, T, HV = part.i_b, part.i_h, part.o_v, part.end, part.T, part.HV
    if made.d_rows is not None:
        if PACKED:
            if end - o_t < C:
                store_own_rows(made.rows, x, i_b, i_h, o_t, end, o_v, T, HV, V, layout)
            else:
                copy_out(made.d_rows, [i_b, i_h, o_t, o_v], tile)
        else:
            copy_out(made.d_rows, [i_b, i_h, o_t, o_v], tile)
    else:
        store_own_rows(made.rows, x, i_b, i_h, o_t, end, o_v, T, HV, V, layout)


@gluon.jit
def walker(
    made, S_in, S_out, factors, tiles, bars, t_S, t_w, part,
    V: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    PACKED: gl.constexpr,
):
    """(1) for a part, from the state in S_in (or zeros) to S_out. Results leave by way of t_S and t_w."""
    i_h, i_c, o_v, begin, end, n, HV = part.i_h, part.i_c, part.o_v, part.begin, part.end, part.n, part.HV
    K: gl.constexpr = t_S.shape[2]
    BV: gl.constexpr = t_S.shape[3]
    FLOAT16: gl.constexpr = t_S.dtype == gl.float16
    MAPS: gl.constexpr = made.rows is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    b_S = t_S.reshape([K, BV])
    none = gl.zeros([C, BV], gl.float32, layout)
    S, of_S = load_state(S_in, part.i_s, i_h, o_v, b_S, HV, W, layout, V if MAPS else None)
    barrier()  # all threads' stores are fenced
    beta = load_strengths(factors, i_c * HV + i_h, BETA, ROWS, layout)
    if GATED:
        since, until, through = load_decays(factors, i_c * HV + i_h, SINCE, ROWS, layout)
    if FLOAT16:
        of_Y, _ = load_divisors(factors, i_c * HV + i_h, DIVISORS, ROWS)
    for i in range(n):
        s, o_t = i % STAGES, begin + i * C
        i_next = (i_c + gl.minimum(i + 1, n - 1)) * HV + i_h  # factors are asked for a chunk before they are needed
        b_k, b_v = tiles.k.index(s).reshape([C, K]), tiles.v.index(s).reshape([C, BV])
        b_Y = tiles.Y.index(s).reshape([C, C])
        if not MAPS:
            send_state(made, t_S, S, i_c + i, part, V, layout)
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
        beta = load_strengths(factors, i_next, BETA, ROWS, layout)
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
            of_Y, _ = load_divisors(factors, i_next, DIVISORS, ROWS)
        if GATED:
            low, of_w = operand(w * until[:, None], b_k.dtype)
            since, until, through = load_decays(factors, i_next, SINCE, ROWS, layout)
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
            send_rows(made, t_w, w, o_t, part, V, layout, PACKED)
    tma.store_wait(0)
    if S_out is not None:
        gl.store(state_columns(S_out, part.i_s, i_h, o_v, HV, K, W, BV, layout), S)


@gluon.jit
def back_walker(
    made, R_in, R_out, factors, tiles, bars, t_R, t_d, t_e, part,
    V: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    PACKED: gl.constexpr,
):
    """(2) for a part, from the R in R_in (or zeros) to R_out. Results leave by way of t_R and t_d; t_e has e^b do."""
    i_h, i_c, o_v, begin, end, n, HV = part.i_h, part.i_c, part.o_v, part.begin, part.end, part.n, part.HV
    K: gl.constexpr = t_R.shape[2]
    BV: gl.constexpr = t_R.shape[3]
    FLOAT16: gl.constexpr = t_R.dtype == gl.float16
    MAPS: gl.constexpr = made.rows is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    b_R, b_d, b_e = t_R.reshape([K, BV]), t_d.reshape([C, BV]), t_e.reshape([C, BV])
    none = gl.zeros([C, BV], gl.float32, layout)
    R, of_R = load_state(R_in, part.i_s, i_h, o_v, b_R, HV, W, layout)
    barrier()  # all threads' stores are fenced
    i_t = (i_c + gl.maximum(n - 1, 0)) * HV + i_h
    beta = load_strengths(factors, i_t, BETA, ROWS, layout)
    if GATED:
        since, until, through = load_decays(factors, i_t, SINCE, ROWS, layout)
    if FLOAT16:
        of_Y, of_P = load_divisors(factors, i_t, DIVISORS, ROWS)
    for i in range(n):
        s, c = i % STAGES, n - 1 - i
        o_t = begin + c * C
        i_next = (i_c + gl.maximum(c - 1, 0)) * HV + i_h  # factors are asked for a chunk before they are needed
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_do = tiles.v.index(s).reshape([C, BV])
        b_Y, b_P = tiles.Y.index(s).reshape([C, C]), tiles.P.index(s).reshape([C, C])
        if not MAPS:
            send_state(made, t_R, R, i_c + c, part, V, layout)
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
        beta = load_strengths(factors, i_next, BETA, ROWS, layout)
        if GATED:
            strength = strength * since
            since, until, through = load_decays(factors, i_next, SINCE, ROWS, layout)
        r = warpgroup_mma_wait(1, deps=[r])
        if FLOAT16:
            r = r * (of_d * of_Y)
            of_Y, of_P = load_divisors(factors, i_next, DIVISORS, ROWS)
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
            send_rows(made, t_d, r, o_t, part, V, layout, PACKED)
    tma.store_wait(0)
    if R_out is not None:
        gl.store(state_columns(R_out, part.i_s, i_h, o_v, HV, K, W, BV, layout), R)


@gluon.jit(do_not_specialize=VARIABLE)
def walk(
    k, v, d_Y, factors, d_states, d_writes, states, writes, S_in, S_out, cu, N, T, L, HV, G,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, first chunk first, from the state in S_in (or zeros) to S_out.

    States are [slots, HV, K, W]. k, v, d_Y are boxes, and so are d_states and d_writes, of `states` and `writes` in 16
    bits. Without those two the columns of S_out are those of X and, after them, of M.
    """
    PACKED: gl.constexpr = cu is not None
    part = which_part(cu, N, T, L, HV, G, V if writes is not None else W, BV)

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

    boxes, tiles = Boxes(None, k, v, d_Y, None), Tiles(None, t_k, t_v, t_Y, None)
    bars, made = Barriers(ready, done), Results(states, writes, d_states, d_writes)
    gl.warp_specialize(
        [
            (walker, (made, S_in, S_out, factors, tiles, bars, t_S, t_w, part, V, W, ROWS, STAGES, GATED, PACKED)),
            (loader, (boxes, tiles, bars, part, STAGES, False)),
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
    q, k, do, d_Y, d_P, factors, d_dstates, d_r, dstates, r, R_in, R_out, cu, N, T, L, HV, G,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, last chunk first, from the R in R_in (or zeros) to R_out.

    As `walk`, but without `dstates` and `r` the columns of R_out are those of X' alone.
    """
    PACKED: gl.constexpr = cu is not None
    part = which_part(cu, N, T, L, HV, G, V, BV)

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

    boxes, tiles = Boxes(q, k, do, d_Y, d_P), Tiles(t_q, t_k, t_do, t_Y, t_P)
    bars, made = Barriers(ready, done), Results(dstates, r, d_dstates, d_r)
    gl.warp_specialize(
        [
            (
                back_walker,
                (made, R_in, R_out, factors, tiles, bars, t_R, t_d, t_e, part, V, W, ROWS, STAGES, GATED, PACKED),
            ),
            (loader, (boxes, tiles, bars, part, STAGES, True)),
        ],
        [4],
        [REGISTERS],
    )
    # all roles are done: until here the barriers' bytes are theirs
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(done.index(s))


# The plan.


class Setup(NamedTuple):
    """How the programs of both walks are made, by columns per program."""

    forward: int  # stages of `walk`
    back: int  # stages of `walk_back`
    registers: int  # a thread, at entry; the walker gets what the loader leaves of them


SETUPS = {64: Setup(2, 3, 128), 32: Setup(4, 3, 128)}


def launch_walk(
    call: DeltaCall, kernel, tokens: tuple[Box, ...], S_in: Spec | None, S_out: Spec | None,
    states: Spec | None = None, rows: Spec | None = None,
) -> None:
    """A walk over all segments, `walk` of k, v, Y or `walk_back` of q, k, do, Y, P; without results, their maps."""
    back, BV, how = kernel is walk_back, call.BV, SETUPS[call.BV]
    W = call.V + call.K if call.L <= call.T else call.V
    columns = call.V if rows or back else W
    low = rows is not None and rows.dtype == call.kept != torch.float32
    d_states = box(states.transposed(1, 2), call.K, BV) if low else None
    d_rows = box(rows, C.value, BV) if low else None
    call.draft.launch(
        kernel, columns // BV * call.H * call.segments,
        *tokens, call.factors, d_states, d_rows, states, rows, S_in, S_out, call.cu, call.N, call.T, call.L, call.H,
        call.G, K=call.K, V=call.V, W=W, BV=BV, ROWS=call.factors.shape[2], STAGES=how.back if back else how.forward,
        GATED=call.gated, REGISTERS=24, num_warps=4, maxnreg=how.registers,
    )
