"""The delta rules, forward, on Hopper, for few heads: T of all chunks before the walk (chapters 20 and 23).

Equations (1) to (3) are those of delta_chunk.py. (1) needs no state, so `solve` of delta_solve.py makes T, P and the
decays of all chunks at once, with a program per chunk and value head, and leaves them in memory. `walk` has only the
chain from state to state left, (2) and (3). Columns of V never meet, so a head has V / BV programs, which is how few
heads keep many multiprocessors at work. For still fewer heads there are segments. A program has two roles of four
warps::

    loader    asks the copy engine (TMA) for q, k, v, T, P of a chunk           waits for `done`
    walker    (2) and (3) for BV columns of V; S in its registers; o out        waits for `ready`

`Barriers` has the kinds of barriers in the order of ring.py; a round is a chunk.

*Segments.* A segment maps the state S to M S + X (portable/delta_forward.py). `walk` without q, P and o makes X
and M, BV columns per program: X from a state of zeros, M from the columns of the unit matrix with values of zero, since
the copy engine reads zeros beyond the columns of v. `carry_maps` of that file turns them into the state before each
segment, and `walk` makes o from there. In one go, a sequence is one segment. Programs count segments by slots, as
`which_segment` does; a spare slot has no chunks. Without q, P and o, and with e^(b_C - b) w in place of v', a program
of 64 columns and three stages takes 112 KiB, and two of them share a multiprocessor. `choose` cuts sequences where a
model says that segments are faster.

Packed sequences: `solve` overwrites the next sequence's rows with zeros in its own tiles of q and k, the walker in its
tiles of k and v. The decays (float32) go from memory to the walker's registers a chunk before
it needs them.

Bytes per chunk and value head: `solve` reads 4 C K and writes 4 C^2 + 12 C; each program of `walk` reads
4 C K + 2 C BV + 4 C^2 + 12 C and writes 2 C BV, for X and M it reads half as much and writes nothing. Programs of a
head share in L2 what they read. Shared memory at K = 128: `solve` 35 KiB, four programs per multiprocessor; `walk` with
BV = 64 and three stages 192 KiB.

Limits: tokens of 16 bits, K and V of 64 or 128. A plan takes these kernels where `whole_duration` is less than
delta_fused.py's, and wherever a path is asked for.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Box, Plan, Spec, cdiv
from ..portable.delta_forward import launch_carry_maps
from ..portable.segments import slots
from . import delta_chunk
from .delta_chunk import VARYING, C, Chunk, Decays, Results, Shared, load_state, read, state_columns, write
from .delta_solve import launch_solve, load_decays, load_divisors
from .gluon import copy_in, fence_async_shared, mbarrier, tma
from .ring import invalidate, new_barriers
from .tiles import Part, box, keep_rows, store_part, which_segment

# rows of a chunk's `decays`, which are `factors` of delta_solve.py
SINCE, UNTIL, DIVISORS = (gl.constexpr(i) for i in range(3))
ROWS = gl.constexpr(3)


# boxes, or tiles in shared memory, that the copy engine fills, and u of `write`; q, P and u only with o
Tiles = namedtuple("Tiles", "q k v T P u", defaults=(None,))


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each stage."""

    ready: object  # copy engine -> walker: the chunk has come
    done: object  # walker -> loader: the chunk has been read


@gluon.jit
def loader(boxes, tiles, bars, part, STAGES: gl.constexpr):
    """Bring each chunk; what lies beyond a tensor comes as zeros."""
    i_b, i_h, i_k = part.i_b, part.i_h, part.i_k
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q has as many, P as many as T
    of_v: gl.constexpr = boxes.v.block_type.nbytes
    of_T: gl.constexpr = boxes.T.block_type.nbytes
    of_o: gl.constexpr = of_k + of_T if boxes.q is not None else 0  # q and P
    for c in range(part.n):
        s, o_t, i_t = c % STAGES, part.begin + c * C, (part.i_c + c) * part.HV + i_h
        mbarrier.wait(bars.done.index(s), ((c // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, of_k + of_v + of_T + of_o)
        copy_in(boxes.k, [i_b, i_k, o_t, 0], bar, tiles.k.index(s))
        if boxes.q is not None:
            copy_in(boxes.q, [i_b, i_k, o_t, 0], bar, tiles.q.index(s))
        copy_in(boxes.v, [i_b, i_h, o_t, part.o_v], bar, tiles.v.index(s))
        copy_in(boxes.T, [i_t, 0, 0, 0], bar, tiles.T.index(s))
        if boxes.P is not None:
            copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))


@gluon.jit
def walker(
    results, decays, tiles, bars, t_S, part, scale,
    V: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PACKED: gl.constexpr,
):
    """(2) and (3) for columns o_v on, from S_in to S_out."""
    o, S_out, i_c, i_h, n, end = results.o, results.S_out, part.i_c, part.i_h, part.n, part.end
    K: gl.constexpr = t_S.shape[0]
    BV: gl.constexpr = t_S.shape[1]
    FLOAT16: gl.constexpr = t_S.dtype == gl.float16
    of_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    S, factor = load_state(results.S_in, part, t_S, W, of_S, V if o is None else None)
    if GATED:
        since, until, through = load_decays(decays, i_c * part.HV + i_h, SINCE, ROWS, of_S)
    if FLOAT16:
        of_T, of_P = load_divisors(decays, i_c * part.HV + i_h, DIVISORS, ROWS)
    for c in range(n):
        s, o_t = c % STAGES, part.begin + c * C
        i_next = (i_c + gl.minimum(c + 1, n - 1)) * part.HV + i_h  # decays are asked for a chunk before they are needed
        b_k, b_v = tiles.k.index(s).reshape([C, K]), tiles.v.index(s).reshape([C, BV])
        b_T = tiles.T.index(s).reshape([C, C])
        mbarrier.wait(bars.ready.index(s), (c // STAGES) & 1)
        if PACKED and end - o_t < C:  # the rest is another sequence's
            keep_rows(b_k, end - o_t, of_k)
            keep_rows(b_v, end - o_t, of_S)
            fence_async_shared()
        x = read(b_k, t_S, of_S)
        if o is not None:
            b_o = read(tiles.q.index(s).reshape([C, K]), t_S, of_S)
            chunk = Chunk(b_k, b_v, b_T, tiles.P.index(s).reshape([C, C]), tiles.u.reshape([C, BV]))
        else:
            b_o: gl.constexpr = None
            chunk = Chunk(b_k, b_v, b_T, None, None)
        if GATED:
            b_decays = Decays(since, until, through)
            since, until, through = load_decays(decays, i_next, SINCE, ROWS, of_S)
        else:
            b_decays: gl.constexpr = None
        if FLOAT16:
            divisors = of_T, of_P
            of_T, of_P = load_divisors(decays, i_next, DIVISORS, ROWS)
        else:
            divisors: gl.constexpr = None
        S, factor, b_o = write(S, factor, x, b_o, chunk, t_S, divisors, b_decays, of_S)
        mbarrier.arrive(bars.done.index(s), count=1)
        if o is not None:
            store_part(o, (b_o * scale).to(t_S.dtype), tiles.u, results.d_o, o_t, part, V, of_S, PACKED)
    tma.store_wait(0)
    if S_out is not None:
        gl.store(state_columns(S_out, part, K, W, BV, of_S), S)


@gluon.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, d_T, d_P, decays, d_o, o, S_in, S_out, cu, N, T, L, HV, G, scale,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """BV columns of a segment of a value head, chunk by chunk, from the state in S_in (or zeros) to S_out.

    States are [slots, HV, K, W]. q, k, v, d_T, d_P are boxes, and so is d_o, of the tensor o. q, d_P, d_o and o may be
    None: then the columns of S_out are those of X and, after them, of M.
    """
    PACKED: gl.constexpr = cu is not None
    # this program's tile: neighbours share what they read in L2
    N_V: gl.constexpr = (V if o is not None else W) // BV
    pid = gl.program_id(0)
    o_v, i_h, i_s = pid % N_V * BV, pid // N_V % HV, pid // N_V // HV
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, 4)
    begin = gl.minimum(begin, stop)  # a spare slot has no chunks
    end = gl.minimum(begin + L, stop)
    n = gl.cdiv(end - begin, C)
    i_c = (start // C + i_n if PACKED else i_n * gl.cdiv(T, C)) + (begin - start) // C

    # shared memory
    square: gl.constexpr = gl.NVMMASharedLayout(2 * BV, 16, 2)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C, BV], v.layout)
    t_T = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_T.layout)
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout) if o is not None else None
    t_P = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_P.layout) if o is not None else None
    t_u = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], d_o.layout) if o is not None else None
    t_S = gl.allocate_shared_memory(k.dtype, [K, BV], square)
    bars = Barriers(new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    fence_async_shared()

    tiles = Tiles(t_q, t_k, t_v, t_T, t_P, t_u)
    part, results = Part(i_s, i_b, i_h, i_h // G, i_c, o_v, begin, end, n, T, HV), Results(o, d_o, S_in, S_out)
    gl.warp_specialize(
        [
            (walker, (results, decays, tiles, bars, t_S, part, scale, V, W, STAGES, GATED, PACKED)),
            (loader, (Tiles(q, k, v, d_T, d_P), tiles, bars, part, STAGES)),
        ],
        [4],
        [REGISTERS],
    )
    invalidate(bars)


# The plan.


class Setup(NamedTuple):
    """How `solve` and `walk` are launched."""

    columns: int  # BV
    stages: int  # chunks of `walk` that lie in shared memory
    registers: int  # a thread of `walk`, at entry; the walker gets what the loader leaves of them
    of_solve: int  # a thread of `solve`
    chunk: float  # microseconds of a chunk of `walk`, where few programs run


WIDE, NARROW = Setup(64, 3, 128, 168, 1.75), Setup(32, 4, 128, 168, 1.2)
L2 = 4.4e6  # bytes per microsecond for the programs of all multiprocessors together
CARRY, LAUNCHES = 6.0, 10.0  # microseconds of `carry_maps` per segment, and of two more launches: estimates
SHORTEST = 8  # chunks of a segment
SOLVE = 2.0  # microseconds of a chunk of `solve` per multiprocessor


def duration(hardware: Hardware, setup: Setup, K: int, V: int, heads: int, chunks: int, length: int) -> float:
    """Microseconds of all walks over `heads` sequences of `chunks` chunks in segments of `length`, by a model.

    Programs run in rounds, as many at once as shared memory and registers have room for. A chunk takes as long as its
    chain of products, or as L2 needs for the bytes of the round's programs. lab/delta_rules.md has the measurements.
    """
    segments, BV = cdiv(chunks, length), setup.columns

    def walk(columns: int, read: int, written: int) -> float:
        """A walk that reads and writes rows of so many numbers."""
        shared = 2 * (setup.stages * C.value * read + K * BV + C.value * written) + 1024
        at_once = hardware.multiprocessors * max(1, min(2, hardware.shared_memory // shared))
        programs = columns // BV * heads * segments
        bytes_ = min(programs, at_once) * 2 * C.value * (read + written)
        return cdiv(programs, at_once) * length * max(setup.chunk, bytes_ / L2)

    last = walk(V, 2 * K + BV + 2 * C.value, BV)
    if segments == 1:
        return last
    return walk(V + K, K + BV + C.value, 0) + segments * CARRY + LAUNCHES + last


def lengths_of_segments(hardware: Hardware, chunks: int, path: str | None) -> list[int]:
    """The chunks of a segment among which the least time decides; all chunks mean: in one go.

    `path` may ask for one go or for segments; a short sequence then has three.
    """
    if path == "fused":
        return [chunks]
    lengths = [cdiv(chunks, n) for n in range(1, min(chunks // SHORTEST, hardware.multiprocessors) + 1)] or [chunks]
    return lengths[1:] or [cdiv(chunks, 3)] if path == "segmented" else lengths


def choose(hardware: Hardware, K: int, V: int, heads: int, chunks: int, path: str | None) -> tuple[Setup, int]:
    """The tiles, and the chunks of a segment, that take the least time by `duration`.

    heads: of all sequences. chunks: of each sequence; of the mean sequence if sequences are packed.
    """
    lengths = lengths_of_segments(hardware, chunks, path)
    ways = [(setup, length) for length in lengths for setup in ((NARROW, WIDE) if V == 128 else (WIDE,))]
    return min(ways, key=lambda way: duration(hardware, way[0], K, V, heads, chunks, way[1]))


def whole_duration(hardware: Hardware, K: int, V: int, heads: int, chunks: int, path: str | None) -> float:
    """Microseconds of `solve` and the fastest walks."""
    setup, length = choose(hardware, K, V, heads, chunks, path)
    solve = cdiv(heads * chunks, hardware.multiprocessors) * SOLVE
    return solve + duration(hardware, setup, K, V, heads, chunks, length)


def launch_walks(shared: Shared, launch_walk: Callable, L: int, o: Spec, S_T: Spec) -> None:
    """Walk over segments of L tokens, first for their maps, or over each sequence in one go if L is more than T.

    `launch_walk(L, W, S_in, S_out, o)` walks over segments whose states have W columns; without o, it makes maps.
    """
    draft, T, cu, K, V = shared.draft, shared.T, shared.cu, shared.K, shared.V
    if L > T:
        return launch_walk(L, V, shared.S_in, S_T, o)
    part = draft.new("part", slots(shared.B, T, cu, L), shared.H, K, V + K)
    launch_walk(L, V + K, None, part, None)
    launch_carry_maps(draft, part, shared.S_in, S_T, cu, T, L, reverse=False)
    launch_walk(L, V + K, part, None, o)


def launch_maps(
    shared: Shared, launch_walk: Callable, k: Spec, BV: int, reads: bool
) -> tuple[Spec, Spec | None, Spec | None]:
    """Walk over each sequence in one go for its map: X, M and, with `reads`, `written`'s reads; M may lie behind X.

    `launch_walk` is that of `launch_walks`, with a box of other values at the end. Reads are the o of the columns of M:
    they start from the unit matrix, and their values are zeros, as is all that lies beyond a box.
    """
    draft, T, H, K, V, N = shared.draft, shared.T, shared.H, shared.K, shared.V, shared.N
    X = draft.new("X", N, H, K, V if reads else V + K)
    launch_walk(T + 1, X.shape[3], None, X, None)
    if not reads:
        return X, None, None
    M = draft.compute("M", _units, k, N, H, shape=(N, H, K, K))
    o = draft.new("reads", N, T, H, K, dtype=k.dtype)
    zeros = box(draft.new("zeros", 1, C.value, 1, BV, dtype=k.dtype, zero=True), C.value, BV)
    launch_walk(T + 1, K, M, M, o, zeros)
    return X, M, o


def _units(k: Tensor, N: int, H: int) -> Tensor:
    """The unit matrix for each head, [N, H, K, K]."""
    return torch.eye(k.shape[3], device=k.device).repeat(N, H, 1, 1)


def solved(shared: Shared, call, setup: Setup) -> Callable:
    """Launch `solve` for a call; return `launch_walk(L, W, S_in, S_out, o)` of `launch_walks`, of values of its own."""
    q, k, v, g, beta, draft, K, H, N, T = *call[:5], shared.draft, shared.K, shared.H, shared.N, shared.T
    BV, n = setup.columns, shared.slots
    squares = (draft.new(name, n, C.value, 1, C.value, dtype=q.dtype) for name in "TP")
    d_T, d_P = (box(x, C.value, C.value) for x in squares)
    decays = draft.new("decays", n, ROWS.value, C.value)
    d_q, d_k, d_v = (box(x, C.value, width) for x, width in ((q, K), (k, K), (v, BV)))
    launch_solve(
        shared, d_q, d_k, g, beta, d_T, d_P, decays, setup.of_solve,
        SINCE=SINCE.value, UNTIL=UNTIL.value, DIVISORS=DIVISORS.value,
    )

    def launch_walk(
        L: int, W: int, S_in: Spec | None, S_out: Spec | None, o: Spec | None, d_v: Box = d_v
    ) -> None:
        """`walk` over segments of L tokens, whose states have W columns; without o, their maps."""
        V, d_o = (o.shape[3], box(o, C.value, BV)) if o else (shared.V, None)
        draft.launch(
            walk, (V if o else W) // BV * H * slots(shared.B, T, shared.cu, L),
            q=d_q if o else None, k=d_k, v=d_v, d_T=d_T, d_P=d_P if o else None, decays=decays, d_o=d_o, o=o,
            S_in=S_in, S_out=S_out, cu=shared.cu, N=N, T=T, L=L, HV=H, G=shared.G, scale=shared.scale,
            K=K, V=V, W=W, BV=BV, STAGES=setup.stages, GATED=g is not None, REGISTERS=24, num_warps=4,
            maxnreg=setup.registers,
        )

    return launch_walk


def plan_forward(hardware: Hardware, call) -> Plan:
    """(o, final state)."""
    shared, v = delta_chunk.begin(hardware, call), call.v
    draft, K, V, H, N = shared.draft, shared.K, shared.V, shared.H, shared.N
    setup, length = choose(hardware, K, V, H * N, shared.chunks, call.path)
    BV = setup.columns
    draft.because(f"T of all chunks first, then a program for each {BV} columns of V: Hopper kernels, in Gluon")
    L = shared.segment(length, call.path, V // BV * H * N)
    launch_walk = solved(shared, call, setup)
    o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", N, H, K, V)
    launch_walks(shared, launch_walk, L, o, S_T)
    return draft.plan("hopper_ahead", o, S_T)


def plan_maps(hardware: Hardware, call) -> Plan:
    """(X, M, reads) of `launch_maps`."""
    shared = delta_chunk.begin(hardware, call)
    setup, _ = choose(hardware, shared.K, shared.V, shared.H * shared.N, shared.chunks, "fused")
    launch_walk = solved(shared, call, setup)
    return shared.draft.plan("hopper_ahead", *launch_maps(shared, launch_walk, call.k, setup.columns, call.reads))
