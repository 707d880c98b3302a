"""Both walks of KDA's gradient in one launch: states of chunks forwards, their gradients backwards (chapter 24).

With S the state before a chunk, R the gradient of the state after it (over scale), and q^, k~, W, U, P of
kda_prepare.py::

    forwards     w = U - W S                  S <- diag(e^(b_C)) S + k~^T w                                  (1)
    backwards    d = P^T do + k~ R            R <- diag(e^(b_C)) R + q^^T do - W^T d                         (2)

d is the gradient of w. The walk forwards, `walker` of kda_forward.py, stores w and the state before each chunk, the
walk backwards e = -d and the R after each chunk: what they store is rounded to bfloat16, and products read the same
numbers. The two do not wait for each other, and columns of V never meet: the first programs of a launch go forwards,
V / 64 of them per value head, the others backwards, whose round i is chunk n - 1 - i. Roles, barriers and what lies in
registers are those of kda_forward.py; a state leaves when a round begins, and has been read when `store_wait` in the
middle of that round returns.

Bytes per chunk and value head at K = V = 128: forwards 48 KiB in, backwards 72, each 48 out. Shared memory: 218 KiB.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .delta_chunk import VARYING, C, barrier
from .delta_walks import BV, Results, load_state, state_rows, which_part
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .kda_forward import STAGES, Barriers, Tiles, keep_state, walker
from .kda_forward import loader as forward_loader
from .ring import invalidate, new_barriers
from .tiles import keep_rows


@gluon.jit
def back_loader(boxes, tiles, bars, part):
    """Bring each chunk, the last one first; boxes.U is do."""
    of_k: gl.constexpr = boxes.k.block_type.nbytes  # bytes of a tile; q and W have as many
    others: gl.constexpr = boxes.U.block_type.nbytes + boxes.P.block_type.nbytes + boxes.through.block_type.nbytes
    for i in range(part.n):
        c = part.n - 1 - i
        s, i_t = i % STAGES, (part.i_c + c) * part.HV + part.i_h
        mbarrier.wait(bars.done.index(s), ((i // STAGES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, 3 * of_k + others)
        copy_in(boxes.k, [i_t, 0, 0, 0], bar, tiles.k.index(s))
        copy_in(boxes.U, [part.i_b, part.i_h, part.begin + c * C, part.o_v], bar, tiles.U.index(s))
        copy_in(boxes.P, [i_t, 0, 0, 0], bar, tiles.P.index(s))
        copy_in(boxes.through, [i_t, 0, 0, 0], bar, tiles.through.index(s))
        copy_in(boxes.q, [i_t, 0, 0, 0], bar, tiles.q.index(s))
        copy_in(boxes.W, [i_t, 0, 0, 0], bar, tiles.W.index(s))


@gluon.jit
def back_walker(results, tiles, bars, part, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr):
    """(2) for a part."""
    dtype: gl.constexpr = tiles.k.dtype
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_R: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    none = gl.zeros([BV, C], gl.float32, narrow)
    R = load_state(results.first, part, K, V, wide, None)
    for i in range(part.n):
        s, c = i % STAGES, part.n - 1 - i
        o_t, i_t = part.begin + c * C, (part.i_c + c) * part.HV + part.i_h
        b_k, b_q = tiles.k.index(s).reshape([C, K]), tiles.q.index(s).reshape([C, K])
        b_do, b_P = tiles.U.index(s).reshape([C, BV]), tiles.P.index(s).reshape([C, C])
        low = R.to(dtype)
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        if PACKED and part.end - o_t < C:  # the rest is another sequence's
            keep_rows(b_do, part.end - o_t, narrow)
            fence_async_shared()
        x = warpgroup_mma(gl.convert_layout(low, left), b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        x = warpgroup_mma(b_do.permute((1, 0)), b_P, x, is_async=True)  # d^T
        keep_state(results.d_states, tiles.state, low, i_t, part.o_v)
        R *= tiles.through.index(s).reshape([1, K]).load(wide)
        R = warpgroup_mma(b_do.permute((1, 0)), b_q, R, is_async=True)
        x = warpgroup_mma_wait(1, deps=[x])
        e = (-x).to(dtype)
        tma.store_wait(0)  # R and the last e have been read
        tiles.rows.reshape([C, BV]).permute((1, 0)).store(e)
        R = warpgroup_mma_wait(0, deps=[R])
        R = warpgroup_mma(gl.convert_layout(e, left_R), tiles.W.index(s).reshape([C, K]), R, is_async=True)
        R = warpgroup_mma_wait(0, deps=[R])
        fence_async_shared()
        barrier()  # all warps' products have read the stage, and all threads' stores are fenced
        mbarrier.arrive(bars.done.index(s), count=1)
        copy_out(results.d_rows, [i_t, 0, 0, part.o_v], tiles.rows)
    tma.store_wait(0)
    if results.last is not None:
        gl.store(state_rows(results.last, part.i_s, part, K, V, wide), R)


@gluon.jit
def either_walker(
    back, forwards, backwards, tiles, bars, part, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr
):
    if back:
        back_walker(backwards, tiles, bars, part, K, V, PACKED)
    else:
        walker(forwards, tiles, bars, part, 1.0, K, V, V, PACKED)


@gluon.jit
def either_loader(back, forwards, backwards, tiles, bars, part):
    if back:
        back_loader(backwards, tiles, bars, part)
    else:
        forward_loader(forwards, tiles, bars, part)


@gluon.jit(do_not_specialize=VARYING)
def walks(
    q, k, d_W, d_U, d_P, through, do, S_in, d_states, d_w, R_in, R_out, d_dstates, d_e, cu, n_forwards, N, T, L, HV,
    K: gl.constexpr, V: gl.constexpr, REGISTERS: gl.constexpr,
):
    """64 columns of a value head, n_forwards programs forwards, as many others backwards.

    q to do are boxes, and so are d_states and d_dstates [slots, K, 1, V], d_w and d_e [slots, C, 1, V], with a slot for
    each chunk of a head. S_in and R_in (or None, zeros) are [N, HV, K, V], as is R_out (or None), the R of the first
    state.
    """
    PACKED: gl.constexpr = cu is not None
    back = gl.program_id(0) >= n_forwards
    pid = gl.program_id(0) - gl.where(back, n_forwards, 0)
    part = which_part(pid, cu, N, T, L, HV, 1, V)

    # shared memory
    t_q = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_W = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], d_W.layout)
    t_U = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, BV], d_U.layout)
    t_P = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, C], d_P.layout)
    t_through = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 1, K], through.layout)
    t_state = gl.allocate_shared_memory(k.dtype, [1, 1, K, BV], d_states.layout)
    t_rows = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], d_w.layout)
    bars = Barriers(new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    fence_async_shared()

    tiles = Tiles(t_q, t_k, t_W, t_U, t_P, t_through, t_state, t_rows)
    boxes = Tiles(None, k, d_W, d_U, None, through)
    forwards = Results(S_in, None, None, None, d_states, d_w)
    backwards = Results(R_in, R_out, None, None, d_dstates, d_e)
    gl.warp_specialize(
        [
            (either_walker, (back, forwards, backwards, tiles, bars, part, K, V, PACKED)),
            (either_loader, (back, boxes, Tiles(q, k, d_W, do, d_P, through), tiles, bars, part)),
        ],
        [4],
        [REGISTERS],
    )
    invalidate(bars)
