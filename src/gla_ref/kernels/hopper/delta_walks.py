"""Both walks of delta_backward.py in one launch: states of chunks forwards, their gradients backwards (chapter 20).

With S the state before a chunk, R the gradient of the state after it (over scale), and b, Y, P of delta_solve.py::

    forwards     w = Y (beta (v - e^b (k S)))               S <- e^(b_C) S + k^T (e^(b_C - b) w)                   (1)
    backwards    d = e^(b_C - b) (k R) + P^T do             R <- e^(b_C) R + q^T (e^b do) - k^T (e^b beta r)       (2)
                 r = Y^T d

d is the gradient of w, r the gradient of the factor that Y multiplies. Y's ones are left out of what `solve` stores:
products with it begin with that factor in float32. So where gates let nothing else through, w and r are rounded once,
when they are stored, not before the product as well; delta_gradients.py divides both by beta.

The walk forwards stores w and the state before each chunk, the walk backwards dv = scale beta r (or r) and the R after
each chunk; its round i is chunk n - 1 - i. The two do not wait for each other, and columns of V never meet in (1) and
(2): the first programs of a launch go forwards, V / BV of them per value head, the others backwards. A program has two
roles of four warps::

    loader    asks the copy engine (TMA) for the tiles of a chunk, stores its rows' factors    waits for `done`
    walker    (1) or (2) for BV columns; results out                             waits for `ready` and `loaded`

The kinds of barriers, in the order of ring.py: `ready`, `loaded`, `done`; a round is a chunk, i.

*All of it transposed.* S^T and R^T [BV, K] stay in registers, and all products but P^T do have a first operand there:
only results pass through shared memory. A copy in 16 bits leaves when a round begins, and has been read when
`store_wait` in the middle of the round returns. w and dv leave from a tile of their own, which the same wait frees. A
copy begins after `barrier`, since each thread's fence is for its own stores. The rows after a sequence's last one
belong to the next sequence, where sequences are packed: threads store a last chunk that is not whole. Where results are
kept in float32 (delta_backward.py) threads store all of them.

*Maps.* Without results, a walk makes maps of segments, BV columns per program: X or X' from a state of zeros, M from
the columns of the unit matrix. Their v are zeros, since the copy engine reads zeros beyond the columns of V. M^T needs
no walk.

Bytes per chunk and value head in bf16: forwards 2 C (K + V) + 2 C^2 in, backwards 2 C (2 K + V) + 4 C^2; each 2 C V +
2 K V out. Shared memory at K = V = 128: 195 KiB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.plan import Box, Spec
from ..portable.delta_forward import BETA, SINCE, UNTIL, DeltaCall
from ..portable.delta_forward import ROWS as FACTORS
from .delta_chunk import VARYING, barrier
from .delta_solve import C, load_divisors
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate, new_barriers
from .tiles import Part, box, keep_rows, operand, which_segment

DIVISORS = gl.constexpr(FACTORS)  # float16's row of `factors`, after those of the portable kernels
BV, STAGES = gl.constexpr(64), gl.constexpr(3)
FROM_V, STRENGTH, TO_END, TO_DV = (gl.constexpr(i) for i in range(4))  # rows of Tiles.factors


class Tiles(NamedTuple):
    """The tensors that the copy engine brings, as boxes; or their tiles in shared memory, and those of results."""

    q: object  # forwards no box, as of P
    k: object
    v: object  # do backwards
    Y: object
    P: object
    factors: object = None  # [4 * stages, C]: forwards beta, backwards e^b; e^b beta; e^(b_C - b); backwards scale beta
    state: object = None
    rows: object = None


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each stage."""

    ready: object  # the walker: until the copies have come
    loaded: object  # the walker: until the factors are there
    done: object  # the loader: until the walker has read a stage


class Results(NamedTuple):
    """Where a walk begins, and where its results go."""

    first: object  # states [slots, HV, K, W], or None for zeros
    last: object  # the same, or None
    states: object  # pointers to the states of chunks; None where a walk makes maps
    rows: object  # pointers to [B, T, HV, V]: w, or dv or r
    d_states: object  # the same two as boxes of the copy engine; None in float32
    d_rows: object


@gluon.jit
def which_part(pid, cu, N, T, L, HV, G, columns):
    """The part of a program, in a walk over so many columns."""
    n_v = columns // BV  # neighbours share what they read in L2
    o_v, i_h, i_s = pid % n_v * BV, pid // n_v % HV, pid // n_v // HV
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, 4)
    begin = gl.minimum(begin, stop)  # a spare slot has no chunks
    end = gl.minimum(begin + L, stop)
    i_c = start // C + i_n if cu is not None else i_n * gl.cdiv(T, C)
    i_c, n = i_c + (begin - start) // C, gl.cdiv(end - begin, C)
    return Part(i_s, i_b, i_h, i_h // G, i_c, o_v, begin, end, n, T, HV)


@gluon.jit
def loader(boxes, factors, tiles, bars, part, scale, ROWS: gl.constexpr):
    """Bring the tiles of each round; what lies beyond a tensor comes as zeros."""
    BACK: gl.constexpr = boxes.q is not None
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q has as many, P as many as Y
    of_v: gl.constexpr = boxes.v.block_type.nbytes
    of_Y: gl.constexpr = boxes.Y.block_type.nbytes
    o_c = gl.arange(0, C, layout=line)
    for i in range(part.n):
        c = part.n - 1 - i if BACK else i
        s, o_t, i_t = i % STAGES, part.begin + c * C, (part.i_c + c) * part.HV + part.i_h
        p = factors + i_t.to(gl.int64) * ROWS * C + o_c
        beta, since, until = gl.load(p + BETA * C), gl.load(p + SINCE * C), gl.load(p + UNTIL * C)
        mbarrier.wait(bars.done.index(s), ((i // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        if BACK:
            mbarrier.expect(bar, 2 * of_k + of_v + 2 * of_Y)
        else:
            mbarrier.expect(bar, of_k + of_v + of_Y)
        copy_in(boxes.k, [part.i_b, part.i_k, o_t, 0], bar, tiles.k.index(s))
        copy_in(boxes.v, [part.i_b, part.i_h, o_t, part.o_v], bar, tiles.v.index(s))
        if BACK:
            copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))
        copy_in(boxes.Y, [i_t, 0, 0, 0], bar, tiles.Y.index(s))
        if BACK:
            copy_in(boxes.q, [part.i_b, part.i_k, o_t, 0], bar, tiles.q.index(s))
        tiles.factors.index(4 * s + FROM_V).store(since if BACK else beta)
        tiles.factors.index(4 * s + STRENGTH).store(beta * since)
        tiles.factors.index(4 * s + TO_END).store(until)
        if BACK:
            tiles.factors.index(4 * s + TO_DV).store(beta * scale)
        barrier()
        mbarrier.arrive(bars.loaded.index(s), count=1)


@gluon.jit
def state_rows(x, i_s, part, K: gl.constexpr, W: gl.constexpr, layout: gl.constexpr, ROWS: gl.constexpr = 64):
    """Pointers to the columns of a part in slot i_s of states x [slots, HV, K, W], as rows [ROWS, K]."""
    o_c, o_k = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    # not a sum of integers first, of which one for each pointer would stay in registers
    return x + (i_s * part.HV + part.i_h).to(gl.int64) * K * W + part.o_v + o_c[:, None] + o_k[None, :] * W


@gluon.jit
def load_state(x, part, K: gl.constexpr, W: gl.constexpr, layout: gl.constexpr, UNIT: gl.constexpr):
    """The first state, transposed; without x it is zeros, and from column UNIT on the unit matrix."""
    if x is not None:
        S = gl.load(state_rows(x, part.i_s, part, K, W, layout))
    else:
        S = gl.zeros([BV, K], gl.float32, layout)
    if UNIT is not None:
        o_c, o_k = gl.arange(0, BV, layout=gl.SliceLayout(1, layout)), gl.arange(0, K, layout=gl.SliceLayout(0, layout))
        S = gl.where((UNIT + o_k)[None, :] == (part.o_v + o_c)[:, None], 1.0, S)
    return S


@gluon.jit
def send_state(results, tile, low, S, i_c, part, V: gl.constexpr, layout: gl.constexpr):
    """Store the state of chunk i_c: by the copy engine, by way of `tile`, or in float32 by threads."""
    K: gl.constexpr = S.shape[1]
    if results.d_states is not None:
        tile.reshape([BV, K]).store(low)
        fence_async_shared()
        barrier()
        copy_out(results.d_states, [i_c, part.i_h, part.o_v, 0], tile)
    else:
        gl.store(state_rows(results.states, i_c, part, K, V, layout), S)


@gluon.jit
def store_own_columns(p, x, o_t, part, V: gl.constexpr, layout: gl.constexpr):
    """x [BV, C] transposed to rows o_t ... of p [B, T, HV, V], up to the part's end, by threads."""
    o_c, o_r = gl.arange(0, BV, layout=gl.SliceLayout(1, layout)), gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    rows = (o_t + o_r)[None, :]  # with o_t, so that nobody holds offsets from chunk to chunk
    p += (part.i_b.to(gl.int64) * part.T * part.HV + part.i_h) * V + part.o_v
    p += rows.to(gl.int64) * (part.HV * V) + o_c[:, None]
    gl.store(p, x.to(p.dtype.element_ty), mask=(rows < part.end) & (o_c >= 0)[:, None])


@gluon.jit
def send_rows(results, tile, x, o_t, part, V: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr):
    """Store the rows of a chunk: by the copy engine from `tile` or, in float32 or at an end, by threads from x."""
    if results.d_rows is None:
        store_own_columns(results.rows, x, o_t, part, V, layout)
    elif PACKED and part.end - o_t < C:
        store_own_columns(results.rows, x, o_t, part, V, layout)
    else:
        copy_out(results.d_rows, [part.i_b, part.i_h, o_t, part.o_v], tile)


@gluon.jit
def walk(
    results, factors, tiles, bars, part,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, PACKED: gl.constexpr,
):
    """(1) for a part."""
    i_h, i_c, n, HV = part.i_h, part.i_c, part.n, part.HV
    dtype: gl.constexpr = tiles.k.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    MAPS: gl.constexpr = results.rows is None
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_S: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    column: gl.constexpr = gl.SliceLayout(0, narrow)
    none = gl.zeros([BV, C], gl.float32, narrow)
    S = load_state(results.first, part, K, W, wide, V if MAPS else None)
    p_t = factors + (SINCE * C + (C - 1))  # e^(b_C)
    through = gl.load(p_t + (i_c * HV + i_h).to(gl.int64) * (ROWS * C))
    for i in range(n):
        s, o_t = i % STAGES, part.begin + i * C
        b_k, b_v = tiles.k.index(s).reshape([C, K]), tiles.v.index(s).reshape([C, BV])
        b_Y, t_f = tiles.Y.index(s).reshape([C, C]), tiles.factors
        low, of_S = operand(S, dtype)
        if FLOAT16:
            of_Y, _ = load_divisors(factors, (i_c + i) * HV + i_h, DIVISORS, ROWS)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        if PACKED and part.end - o_t < C:  # the rest is another sequence's
            keep_rows(b_k, part.end - o_t, wide)
            keep_rows(b_v, part.end - o_t, narrow)
            fence_async_shared()

        # w: v' = beta (v - e^b (k S)) is the first operand
        x = warpgroup_mma(gl.convert_layout(low, left), b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        if not MAPS:
            send_state(results, tiles.state, low, S, i_c + i, part, V, wide)
        mbarrier.wait(bars.loaded.index(s), (i // STAGES) & 1)
        v = b_v.permute((1, 0)).load(narrow).to(gl.float32) * t_f.index(4 * s + FROM_V).load(column)[None, :]
        strength = t_f.index(4 * s + STRENGTH).load(column)[None, :]
        x = warpgroup_mma_wait(0, deps=[x])
        if FLOAT16:
            x = x * of_S
        w = v - x * strength
        x, of_x = operand(w, dtype)
        if FLOAT16:
            w = w / (of_x * of_Y)
        w = warpgroup_mma(gl.convert_layout(x, left), b_Y.permute((1, 0)), w, is_async=True)
        S = S * through
        through = gl.load(p_t + ((i_c + gl.minimum(i + 1, n - 1)) * HV + i_h).to(gl.int64) * (ROWS * C))
        until = t_f.index(4 * s + TO_END).load(column)[None, :]
        w = warpgroup_mma_wait(0, deps=[w])
        if FLOAT16:
            w = w * (of_x * of_Y)

        # S
        u, of_u = operand(w * until, dtype)
        if FLOAT16:
            S = S / of_u
        S = warpgroup_mma(gl.convert_layout(u, left_S), b_k, S, is_async=True)
        if results.d_rows is not None:
            tma.store_wait(0)  # the state and the last w have been read
            tiles.rows.reshape([C, BV]).permute((1, 0)).store(w.to(dtype))
        S = warpgroup_mma_wait(0, deps=[S])
        fence_async_shared()  # by Triton 3.6.0 ptxas dies of a fence right before a wait
        if FLOAT16:
            S = S * of_u
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        if not MAPS:
            send_rows(results, tiles.rows, w, o_t, part, V, narrow, PACKED)
    tma.store_wait(0)
    if results.last is not None:
        gl.store(state_rows(results.last, part.i_s, part, K, W, wide), S)


@gluon.jit
def walk_back(
    results, factors, tiles, bars, part,
    K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, PACKED: gl.constexpr,
):
    """(2) for a part."""
    i_h, i_c, n, HV = part.i_h, part.i_c, part.n, part.HV
    dtype: gl.constexpr = tiles.k.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    MAPS: gl.constexpr = results.rows is None
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_R: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    column: gl.constexpr = gl.SliceLayout(0, narrow)
    none = gl.zeros([BV, C], gl.float32, narrow)
    R = load_state(results.first, part, K, V, wide, None)
    p_t = factors + (SINCE * C + (C - 1))  # e^(b_C)
    through = gl.load(p_t + ((i_c + gl.maximum(n - 1, 0)) * HV + i_h).to(gl.int64) * (ROWS * C))
    for i in range(n):
        s, c = i % STAGES, n - 1 - i
        o_t = part.begin + c * C
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_do, t_f = tiles.v.index(s).reshape([C, BV]), tiles.factors
        b_Y, b_P = tiles.Y.index(s).reshape([C, C]), tiles.P.index(s).reshape([C, C])
        low, of_R = operand(R, dtype)
        if FLOAT16:
            of_Y, of_P = load_divisors(factors, (i_c + c) * HV + i_h, DIVISORS, ROWS)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        if PACKED and part.end - o_t < C:  # the rest is another sequence's
            keep_rows(b_q, part.end - o_t, wide)
            keep_rows(b_k, part.end - o_t, wide)
            keep_rows(b_do, part.end - o_t, narrow)
            fence_async_shared()

        # d, and e^b do for R
        x = warpgroup_mma(gl.convert_layout(low, left), b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        y = warpgroup_mma(b_do.permute((1, 0)), b_P, none, use_acc=False, is_async=True)
        if not MAPS:
            send_state(results, tiles.state, low, R, i_c + c, part, V, wide)
        mbarrier.wait(bars.loaded.index(s), (i // STAGES) & 1)
        e = b_do.permute((1, 0)).load(narrow).to(gl.float32) * t_f.index(4 * s + FROM_V).load(column)[None, :]
        e, of_e = operand(e, dtype)
        e = gl.convert_layout(e, left_R)
        until = t_f.index(4 * s + TO_END).load(column)[None, :]
        x, y = warpgroup_mma_wait(0, deps=[x, y])
        if FLOAT16:
            x = x * of_R
            y = y * of_P

        # r, while R takes e^b do
        r = x * until + y
        d, of_d = operand(r, dtype)
        if FLOAT16:
            r = r / (of_d * of_Y)
        r = warpgroup_mma(gl.convert_layout(d, left), b_Y, r, is_async=True)
        R = R * through
        if FLOAT16:
            R = R / of_e
        through = gl.load(p_t + ((i_c + gl.maximum(c - 1, 0)) * HV + i_h).to(gl.int64) * (ROWS * C))
        R = warpgroup_mma(e, b_q, R, is_async=True)
        strength = t_f.index(4 * s + STRENGTH).load(column)[None, :]
        to_dv = t_f.index(4 * s + TO_DV).load(column)[None, :]
        r, R = warpgroup_mma_wait(0, deps=[r, R])
        if FLOAT16:
            r = r * (of_d * of_Y)

        # R
        z, of_z = operand(r * -strength, dtype)
        if FLOAT16:
            R = R * (of_e / of_z)
        R = warpgroup_mma(gl.convert_layout(z, left_R), b_k, R, is_async=True)
        if results.d_rows is not None:
            tma.store_wait(0)  # R and the last dv have been read
            r = r * to_dv
            tiles.rows.reshape([C, BV]).permute((1, 0)).store(r.to(dtype))
        R = warpgroup_mma_wait(0, deps=[R])
        fence_async_shared()  # not before the wait, as above
        if FLOAT16:
            R = R * of_z
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        if not MAPS:
            send_rows(results, tiles.rows, r, o_t, part, V, narrow, PACKED)
    tma.store_wait(0)
    if results.last is not None:
        gl.store(state_rows(results.last, part.i_s, part, K, V, wide), R)


@gluon.jit
def either_walk(
    back, forwards, backwards, factors, tiles, bars, part,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, PACKED: gl.constexpr,
):
    if back:
        walk_back(backwards, factors, tiles, bars, part, K, V, ROWS, PACKED)
    else:
        walk(forwards, factors, tiles, bars, part, K, V, W, ROWS, PACKED)


@gluon.jit
def either_loader(back, forwards, backwards, factors, tiles, bars, part, scale, ROWS: gl.constexpr):
    if back:
        loader(backwards, factors, tiles, bars, part, scale, ROWS)
    else:
        loader(forwards, factors, tiles, bars, part, scale, ROWS)


@gluon.jit(do_not_specialize=VARYING)
def walks(
    q, k, v, do, d_Y, d_P, factors, S_in, S_out, states, writes, d_states, d_writes,
    R_in, R_out, dstates, rows, d_dstates, d_rows, cu, n_forwards, N, T, L, HV, G, scale,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, n_forwards programs forwards, as many as there are others backwards.

    The walk forwards goes from the state in S_in (or zeros) to S_out, both [slots, HV, K, W], the walk backwards from
    R_in to R_out, [slots, HV, K, V]. q ... d_P are boxes, and so are d_states ... of `states` ... in 16 bits. Without
    those four the columns of S_out are those of X and, after them, of M, and those of R_out are of X'.
    """
    PACKED: gl.constexpr = cu is not None
    back = gl.program_id(0) >= n_forwards
    pid = gl.program_id(0) - gl.where(back, n_forwards, 0)
    columns = gl.where(back, V, W if writes is None else V)
    part = which_part(pid, cu, N, T, L, HV, G, columns)

    # shared memory
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C, BV], v.layout)
    t_Y = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_Y.layout)
    t_P = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_P.layout)
    t_factors = gl.allocate_shared_memory(gl.float32, [4 * STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    t_state = gl.allocate_shared_memory(k.dtype, [1, 1, BV, K], k.layout) if d_writes is not None else None
    t_rows = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], v.layout) if d_writes is not None else None
    bars = Barriers(new_barriers(STAGES, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    fence_async_shared()

    tiles = Tiles(t_q, t_k, t_v, t_Y, t_P, t_factors, t_state, t_rows)
    boxes = Tiles(None, k, v, d_Y, None)
    forwards = Results(S_in, S_out, states, writes, d_states, d_writes)
    backwards = Results(R_in, R_out, dstates, rows, d_dstates, d_rows)
    gl.warp_specialize(
        [
            (either_walk, (back, forwards, backwards, factors, tiles, bars, part, K, V, W, ROWS, PACKED)),
            (either_loader, (back, boxes, Tiles(q, k, do, d_Y, d_P), factors, tiles, bars, part, scale, ROWS)),
        ],
        [4],
        [REGISTERS],
    )
    invalidate(bars)


# The plan.


class Walk(NamedTuple):
    """The tensors of one way: as in Results, with those of all chunks or with none."""

    first: Spec | None
    last: Spec | None
    states: Spec | None = None
    rows: Spec | None = None


def launch_walks(call: DeltaCall, tokens: dict[str, Box], forwards: Walk, backwards: Walk) -> None:
    """Both walks over all segments; `tokens`: the boxes q to d_P of `walks`. Without results, their maps."""
    W = call.V + call.K if call.L <= call.T else call.V
    heads, maps = call.H * call.segments, forwards.rows is None
    n, n_back = (W if maps else call.V) // BV.value * heads, call.V // BV.value * heads

    def results(way: Walk, *names: str) -> dict:
        """The arguments of `walks` for one way: its tensors, then boxes of the states and rows in 16 bits."""
        d_states = d_rows = None
        if not maps and call.kept != torch.float32:
            d_states = box(way.states.transposed(1, 2), BV.value, call.K)
            d_rows = box(way.rows, C.value, BV.value)
        return dict(zip(names, (*way, d_states, d_rows), strict=True))

    call.draft.launch(
        walks, n + n_back, **tokens, factors=call.factors,
        **results(forwards, "S_in", "S_out", "states", "writes", "d_states", "d_writes"),
        **results(backwards, "R_in", "R_out", "dstates", "rows", "d_dstates", "d_rows"),
        cu=call.cu, n_forwards=n, N=call.N, T=call.T, L=call.L, HV=call.H, G=call.G, scale=call.scale,
        K=call.K, V=call.V, W=W, ROWS=call.factors.shape[2], REGISTERS=24, num_warps=4, maxnreg=128,
    )
