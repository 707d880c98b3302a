"""Kimi Delta Attention, forward, on Hopper: all of a chunk that needs no state, then the walk (chapter 24).

kda_prepare.py makes q^, k~, W, U, P and e^(b_C) of all chunks at once. `walk` has only the chain from state to state
left,

    w = U - W S        o = scale * (q^ S + P w)        S <- diag(e^(b_C)) S + k~^T w                          (1)

two products that wait for one another, where T v' of the delta rules (delta_ahead.py) makes three: here T is multiplied
into both sides before. Columns of V never meet, so a head has V / 64 programs. A program has two roles of four warps::

    loader    asks the copy engine (TMA) for the tiles of a chunk              waits for `done`
    walker    (1) for 64 columns of V; S^T in its registers; o out             waits for `ready`

Barriers, in the order of ring.py, with chunks for rounds::

    ready    copy engine -> walker    the announced bytes    the chunk is there
    done     walker -> loader         1 arrival              the chunk has been read

*All of it transposed*, as in delta_walks.py: S^T, w^T and o^T have a row for each column of V and stay in registers,
from which products take their first operands; only o passes through shared memory. Segments, packed sequences and the
maps of segments (`walk` without q, P and o) are those of delta_ahead.py.

Bytes per chunk and value head at K = V = 128: each program of `walk` reads 64 KiB and writes 8, for maps it reads 40.
Shared memory: 202 KiB, three stages. Limits: tokens in bfloat16, K and V of 64 or 128.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Box, Plan, Spec, boxed, cdiv
from ..portable.segments import slots
from . import delta_ahead, delta_chunk
from .delta_ahead import Barriers
from .delta_chunk import VARYING, C, barrier
from .delta_walks import BV, Results, load_state, send_rows, state_rows, which_part
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .kda_prepare import launch_prepare
from .ring import invalidate, new_barriers
from .tiles import box

STAGES = gl.constexpr(3)  # chunks in shared memory
REGISTERS = 128  # a thread at entry; the walker gets what the loader leaves


class Tiles(NamedTuple):
    """What the copy engine moves of a chunk, as boxes of tensors or as tiles in shared memory; no q and P for maps."""

    q: object
    k: object
    W: object
    U: object
    P: object
    through: object
    state: object = None  # of the walks of kda_walks.py, which keep states
    rows: object = None  # of o, or of w


@gluon.jit
def loader(boxes, tiles, bars, part):
    """Bring each chunk; columns beyond U come as zeros."""
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q and W have as many
    of_U: gl.constexpr = boxes.U.block_type.nbytes + boxes.through.block_type.nbytes
    of_o: gl.constexpr = of_k + boxes.P.block_type.nbytes if boxes.q is not None else 0  # q and P
    for i in range(part.n):
        s, i_t = i % STAGES, (part.i_c + i) * part.HV + part.i_h
        mbarrier.wait(bars.done.index(s), ((i // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, 2 * of_k + of_U + of_o)
        copy_in(boxes.W, [i_t, 0, 0, 0], bar, tiles.W.index(s))
        if boxes.q is not None:
            copy_in(boxes.q, [i_t, 0, 0, 0], bar, tiles.q.index(s))
        copy_in(boxes.U, [i_t, 0, 0, part.o_v], bar, tiles.U.index(s))
        copy_in(boxes.through, [i_t, 0, 0, 0], bar, tiles.through.index(s))
        copy_in(boxes.k, [i_t, 0, 0, 0], bar, tiles.k.index(s))
        if boxes.q is not None:
            copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))


@gluon.jit
def keep_state(box, tile, low, i_t, o_v):
    """The state of a chunk, transposed [BV, K], to columns o_v on of a tensor [slots, K, 1, V], by way of a tile."""
    tile.reshape([low.shape[1], low.shape[0]]).permute((1, 0)).store(low)
    fence_async_shared()
    barrier()
    copy_out(box, [i_t, 0, 0, o_v], tile)


@gluon.jit
def walker(
    results, tiles, bars, part, scale, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, PACKED: gl.constexpr
):
    """(1) for a part, from the first state to the last: o, or w and the states before chunks, or a map."""
    READ: gl.constexpr = 1 if results.rows is not None else 0  # products for o, under way after the state's
    KEPT: gl.constexpr = results.d_states is not None
    dtype: gl.constexpr = tiles.k.dtype
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_S: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    none = gl.zeros([BV, C], gl.float32, narrow)
    S = load_state(results.first, part, K, W, wide, None if READ or KEPT else V)
    for i in range(part.n):
        s, o_t = i % STAGES, part.begin + i * C
        b_k, b_W = tiles.k.index(s).reshape([C, K]), tiles.W.index(s).reshape([C, K])
        low_S = S.to(dtype)
        low = gl.convert_layout(low_S, left)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        x = warpgroup_mma(low, b_W.permute((1, 0)), none, use_acc=False, is_async=True)  # (W S)^T
        if READ:
            b_q = tiles.q.index(s).reshape([C, K])
            b_o = warpgroup_mma(low, b_q.permute((1, 0)), none, use_acc=False, is_async=True)  # (q^ S)^T
        if KEPT:
            keep_state(results.d_states, tiles.state, low_S, (part.i_c + i) * part.HV + part.i_h, part.o_v)
        u = tiles.U.index(s).reshape([C, BV]).permute((1, 0)).load(narrow)
        S *= tiles.through.index(s).reshape([1, K]).load(wide)
        x = warpgroup_mma_wait(READ, deps=[x])
        w = (u.to(gl.float32) - x).to(dtype)
        S = warpgroup_mma(gl.convert_layout(w, left_S), b_k, S, is_async=True)
        if READ:
            b_P = tiles.P.index(s).reshape([C, C])
            b_o = warpgroup_mma(gl.convert_layout(w, left), b_P.permute((1, 0)), b_o, is_async=True)
            S, b_o = warpgroup_mma_wait(0, deps=[S, b_o])
            b_o *= scale
            tma.store_wait(0)  # the last o has been read
            tiles.rows.reshape([C, BV]).permute((1, 0)).store(b_o.to(dtype))
        else:
            if KEPT:
                tma.store_wait(0)  # the state and the last w have been read
                tiles.rows.reshape([C, BV]).permute((1, 0)).store(w)
            S = warpgroup_mma_wait(0, deps=[S])
        fence_async_shared()
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        if READ:
            send_rows(results, tiles.rows, b_o, o_t, part, V, narrow, PACKED)
        if KEPT:
            copy_out(results.d_rows, [(part.i_c + i) * part.HV + part.i_h, 0, 0, part.o_v], tiles.rows)
    tma.store_wait(0)
    if results.last is not None:
        gl.store(state_rows(results.last, part.i_s, part, K, W, wide), S)


@gluon.jit(do_not_specialize=VARYING)
def walk(
    q, k, d_W, d_U, d_P, through, d_o, o, S_in, S_out, cu, N, T, L, HV, scale,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, REGISTERS: gl.constexpr,
):
    """64 columns of a segment of a value head, chunk by chunk, from the state in S_in (or zeros) to S_out.

    States are [slots, HV, K, W]. Without o (and q, d_P, d_o) the columns of S_out are those of X and, after them, of M.
    """
    part = which_part(gl.program_id(0), cu, N, T, L, HV, 1, V if o is not None else W)

    # shared memory
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_W = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], d_W.layout)
    t_U = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, BV], d_U.layout)
    t_through = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 1, K], through.layout)
    if o is not None:
        t_q = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], q.layout)
        t_P = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_P.layout)
        t_o = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], d_o.layout)
        tiles = Tiles(t_q, t_k, t_W, t_U, t_P, t_through, None, t_o)
    else:
        tiles = Tiles(None, t_k, t_W, t_U, None, t_through, None, None)
    bars = Barriers(new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    fence_async_shared()

    results, boxes = Results(S_in, S_out, None, o, None, d_o), Tiles(q, k, d_W, d_U, d_P, through)
    gl.warp_specialize(
        [
            (walker, (results, tiles, bars, part, scale, K, V, W, cu is not None)),
            (loader, (boxes, tiles, bars, part)),
        ],
        [4],
        [REGISTERS],
    )
    invalidate(bars)


# The plan.

CHUNK = 1.0  # microseconds of a chunk of `walk`, where few programs run
L2 = 6.5e6  # bytes per microsecond for the programs of all multiprocessors together
CARRY, LAUNCHES = 8.0, 8.0  # microseconds of `carry_maps` per segment, and of two more launches: estimates
ROW = gl.NVMMASharedLayout(0, 32, 4)  # of numbers in float32, in their order

Prepared = namedtuple("Prepared", "q k d_W d_U d_P through")  # boxes of q^, k~, W, U, P, e^(b_C), as walks take them


def duration(hardware: Hardware, K: int, V: int, heads: int, chunks: int, length: int) -> float:
    """Microseconds of all walks over `heads` sequences of `chunks` chunks in segments of `length`, by a model."""
    segments = cdiv(chunks, length)

    def walk(columns: int, numbers: int) -> float:
        """A walk that moves rows of so many numbers."""
        programs = columns // BV.value * heads * segments
        bytes_ = min(programs, hardware.multiprocessors) * 2 * C.value * numbers
        return cdiv(programs, hardware.multiprocessors) * length * max(CHUNK, bytes_ / L2)

    last = walk(V, 3 * K + 2 * BV.value + C.value)
    if segments == 1:
        return last
    return walk(V + K, 2 * K + BV.value) + segments * CARRY + LAUNCHES + last


def choose(hardware: Hardware, K: int, V: int, heads: int, chunks: int, path: str | None) -> int:
    """The chunks of a segment that take the least time by `duration`; arguments as of `choose` in delta_ahead.py."""
    lengths = delta_ahead.lengths_of_segments(hardware, chunks, path)
    return min(lengths, key=lambda length: duration(hardware, K, V, heads, chunks, length))


def prepared(
    shared: delta_chunk.Shared, q: Spec, k: Spec, v: Spec, g: Spec, beta: Spec,
    inverses: Spec | None = None, LEAST: float = 0.0,
) -> Prepared:
    """Launch `prepare` and `mend` of all chunks; `inverses` get T."""
    draft, K, V, n = shared.draft, shared.K, shared.V, shared.slots
    q_hat, k_til, W = (draft.new(name, n, C.value, 1, K, dtype=q.dtype) for name in ("q_hat", "k_til", "W"))
    U, P = draft.new("U", n, C.value, 1, V, dtype=q.dtype), draft.new("P", n, C.value, 1, C.value, dtype=q.dtype)
    through, strong = draft.new("through", n, 1, 1, K), draft.new("strong", n, dtype=torch.int32)
    halves = {"q": q, "k": k, "v": v, "g": g, "k_til": k_til, "d_W": W, "d_U": U, "d_P": P, "d_T": inverses}
    s_bb, s_bt, s_bh = beta.strides
    launch_prepare(
        draft, box(q_hat, C.value, 64), through, strong,
        **{name: box(x, C.value, 64) if x else None for name, x in halves.items()},
        beta=beta, s_bb=s_bb, s_bt=s_bt, s_bh=s_bh, cu=shared.cu,
        N=shared.N, T=shared.T, HV=shared.H, G=shared.G, K=K, V=V, LEAST=LEAST,
    )
    return boxes_of(q_hat, k_til, W, U, P, through)


def boxes_of(q_hat: Spec, k_til: Spec, W: Spec, U: Spec, P: Spec, through: Spec) -> Prepared:
    """What `prepare` makes, as boxes of a walk."""
    K = W.shape[3]
    widths = (q_hat, K), (k_til, K), (W, K), (U, BV.value), (P, C.value)
    return Prepared(*(box(x, C.value, width) for x, width in widths), boxed(through, 1, K)._replace(layout=ROW))


def launcher(shared: delta_chunk.Shared, boxes: Prepared) -> Callable:
    """`launch_walk` of delta_ahead.py's `launch_walks` and `launch_maps`, from the boxes of `prepared`."""

    def launch_walk(
        L: int, columns: int, S_in: Spec | None, S_out: Spec | None, o: Spec | None, d_U: Box = boxes.d_U
    ) -> None:
        """`walk` over segments of L tokens, whose states have so many columns; without o, their maps."""
        V, d_o = (o.shape[3], box(o, C.value, BV.value)) if o else (shared.V, None)
        read = boxes._replace(d_U=d_U) if o else boxes._replace(q=None, d_P=None)
        shared.draft.launch(
            walk, (V if o else columns) // BV.value * shared.H * slots(shared.B, shared.T, shared.cu, L),
            **read._asdict(), d_o=d_o, o=o, S_in=S_in, S_out=S_out,
            cu=shared.cu, N=shared.N, T=shared.T, L=L, HV=shared.H, scale=shared.scale,
            K=shared.K, V=V, W=columns, REGISTERS=24, num_warps=4, maxnreg=REGISTERS,
        )

    return launch_walk


def plan_forward(hardware: Hardware, call) -> Plan:
    """(o, final state)."""
    shared, v = delta_chunk.begin(hardware, call), call.v
    draft, K, V, H, N = shared.draft, shared.K, shared.V, shared.H, shared.N
    draft.because(f"all chunks first, then a program for each {BV.value} columns of V: Hopper kernels, in Gluon")
    length = choose(hardware, K, V, H * N, shared.chunks, call.path)
    L = shared.segment(length, call.path, V // BV.value * H * N)
    launch_walk = launcher(shared, prepared(shared, *call[:5]))
    o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", N, H, K, V)
    delta_ahead.launch_walks(shared, launch_walk, L, o, S_T)
    return draft.plan("hopper", o, S_T)


def plan_maps(hardware: Hardware, call) -> Plan:
    """(X, M, reads) of `launch_maps`, and all that `plan_resumed` takes."""
    shared = delta_chunk.begin(hardware, call)
    boxes = prepared(shared, *call[:5])
    maps = delta_ahead.launch_maps(shared, launcher(shared, boxes), call.k, BV.value, call.reads)
    return shared.draft.plan("hopper", *maps, *(x.tensor for x in boxes))


def plan_resumed(hardware: Hardware, call) -> Plan:
    """(o, final state) of a call whose chunks `plan_maps` has prepared, in one go."""
    shared, boxes = delta_chunk.begin(hardware, call), boxes_of(*call[6:12])
    o, S_T = shared.draft.like("o", call.v), shared.draft.like("S_T", call.initial_state)
    launcher(shared, boxes)(shared.T + 1, shared.V, shared.S_in, S_T, o)
    return shared.draft.plan("hopper", o, S_T)
