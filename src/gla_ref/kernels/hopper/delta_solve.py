"""The first launch of delta_ahead.py and delta_backward.py: all of a chunk that needs no state (chapters 20 and 23).

That is P of (1) in delta_chunk.py and, with Y = (I - N)^-1, either T = Y diag(beta) for delta_ahead.py, or Y - I for a
gradient, whose walks add what I multiplies themselves. `solve` has a program for each chunk of a value head.

A program has one role of four warps. The copy engine brings q and k while they make the decays; they wait at `ready`,
once, and nobody waits for them. When products have read q and k, the inverse (delta_inverse.py) takes their bytes.
Packed sequences: rows of the next sequence become zeros in the program's own tiles.

*factors* has rows of C numbers for each chunk of a value head. The plan says which row is which, and which there are::

    BETA            beta; of a size below LEAST, LEAST in its place
    SINCE, UNTIL    e^b and e^(b_C - b), one after the other; ones without gates
    COARSE, FINE    b in two parts (`summed` of delta_chunk.py); zeros without gates
    DIVISORS        the powers of 2 that float16's Y and P were divided by, two numbers

Bytes per chunk and value head: 4 C K in, 4 C^2 out, and 4 C for each row. Shared memory at K = 128: 34 KiB, four
programs per multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.plan import Box, Spec
from ..portable.delta_forward import DeltaCall
from .delta_chunk import VARYING, C, Shared, barrier, decays, load_tokens, row_column, since_until, strides, summed
from .delta_inverse import allocate_scratch, eliminate, inverse, spread
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .tiles import keep_rows, operand, which_segment


@gluon.jit(do_not_specialize=VARYING)
def solve(
    q, k, g, beta, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, d_Y, d_P, factors, cu, N, T, HV, G,
    K: gl.constexpr, ROWS: gl.constexpr, BETA: gl.constexpr, SINCE: gl.constexpr, UNTIL: gl.constexpr,
    COARSE: gl.constexpr, FINE: gl.constexpr, DIVISORS: gl.constexpr, LEAST: gl.constexpr,
):
    """Y and P of a chunk of a value head, and its `factors` [slots, HV, ROWS, C]. q, k, d_Y and d_P are boxes.

    A row that is not kept is None. What is stored as Y is Y - I or, without BETA, T, with beta in it.
    """
    PACKED: gl.constexpr = cu is not None
    # this program's tile: neighbours are value heads of one key head, which share what they read in L2
    pid = gl.program_id(0)
    i_h, i_s = pid % HV, pid // HV
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, 4)

    # shared memory
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    t_q = gl.allocate_shared_memory(q.dtype, [1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [1, 1, C, K], k.layout)
    t_sums = gl.allocate_shared_memory(gl.float32, [3, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    barrier()

    # load
    mbarrier.expect(ready, 2 * k.block_type.nbytes)
    copy_in(k, [i_b, i_h // G, o_t, 0], ready, t_k)
    copy_in(q, [i_b, i_h // G, o_t, 0], ready, t_q)
    o_c = gl.arange(0, C, layout=line)
    p = factors + pid.to(gl.int64) * ROWS * C
    b_beta = load_tokens(beta, (s_bb, s_bt, s_bh), i_b, i_h, o_t + o_c, stop)
    b_beta = gl.where(gl.abs(b_beta) < LEAST, LEAST, b_beta)
    if g is not None:
        coarse, fine = summed(load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_t + o_c, stop))
    else:
        coarse, fine = gl.zeros_like(b_beta), gl.zeros_like(b_beta)
    t_sums.index(0).store(coarse)
    t_sums.index(1).store(fine)
    t_sums.index(2).store(b_beta)
    since, until = since_until(coarse, fine, C, line)
    gl.store(p + SINCE * C + o_c, since)
    gl.store(p + UNTIL * C + o_c, until)
    if BETA is not None:
        gl.store(p + BETA * C + o_c, b_beta)
        gl.store(p + COARSE * C + o_c, coarse)
        gl.store(p + FINE * C + o_c, fine)
    b_q, b_k = t_q.reshape([C, K]), t_k.reshape([C, K])
    mbarrier.wait(ready, 0)
    if PACKED and stop - o_t < C:  # the rest is another sequence's
        keep_rows(b_q, stop - o_t, of_k)
        keep_rows(b_k, stop - o_t, of_k)
        fence_async_shared()

    # compute
    none = gl.zeros([C, C], gl.float32, wide)
    N = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
    P = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
    i, j = row_column(C, wide)
    E = decays(t_sums, wide)
    strength = t_sums.index(2).load(gl.SliceLayout(1, wide))[:, None]
    N, P = warpgroup_mma_wait(0, deps=[N, P])
    barrier()  # all warps' products have read q and k, whose bytes serve what follows
    t_P = gl.allocate_shared_memory(k.dtype, [1, 1, C, C], d_P.layout)
    scratch = allocate_scratch()
    P, of_P = operand(gl.where(i >= j, P * E, 0.0), k.dtype)
    t_P.reshape([C, C]).store(P)
    spread(gl.where(i >= j, N * E * -strength, 0.0), scratch, 1)
    eliminate(scratch, 0, 1)
    Y = inverse(scratch, 1, wide)
    if BETA is None:
        Y = Y * t_sums.index(2).load(gl.SliceLayout(0, wide))[None, :]
    else:
        Y = gl.where(i > j, Y, 0.0)
    Y, of_Y = operand(Y, k.dtype)
    t_Y = gl.allocate_shared_memory(k.dtype, [1, 1, C, C], d_Y.layout)
    t_Y.reshape([C, C]).store(Y)

    # store
    fence_async_shared()
    barrier()
    copy_out(d_P, [pid, 0, 0, 0], t_P)
    copy_out(d_Y, [pid, 0, 0, 0], t_Y)
    if k.dtype == gl.float16:
        ones, o_1 = gl.full([1], 1.0, gl.float32, one), gl.arange(0, 1, layout=one)
        gl.store(p + DIVISORS * C + o_1, ones * of_Y)
        gl.store(p + DIVISORS * C + 1 + o_1, ones * of_P)
    tma.store_wait(0)
    mbarrier.invalidate(ready)


@gluon.jit
def load_decays(factors, i_t, SINCE: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """(e^b, e^(b_C - b)) of the rows of chunk i_t, and e^(b_C)."""
    o_c = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    p = factors + i_t.to(gl.int64) * ROWS * C + SINCE * C
    return gl.load(p + o_c), gl.load(p + C + o_c), gl.load(p + (C - 1))


@gluon.jit
def load_divisors(factors, i_t, DIVISORS: gl.constexpr, ROWS: gl.constexpr):
    """The divisors of float16's Y (or T) and P of chunk i_t."""
    p = factors + i_t.to(gl.int64) * ROWS * C + DIVISORS * C
    return gl.load(p), gl.load(p + 1)


# The plan.


def launch_solve(
    call: Shared | DeltaCall, q: Box, k: Box, g: Spec | None, beta: Spec, Y: Box, P: Box, factors: Spec,
    registers: int, least: float = 0.0, **rows: int,
) -> None:
    """`solve` of all chunks of a call; `rows`: the number of each row of `factors` that is kept, by its name."""
    call.draft.launch(
        solve, Y.tensor.shape[0],
        q, k, g, beta, *strides(g), *strides(beta), d_Y=Y, d_P=P, factors=factors,
        cu=call.cu, N=call.N, T=call.T, HV=call.H, G=call.G, K=call.K, ROWS=factors.shape[-2], LEAST=least,
        **dict.fromkeys(("BETA", "SINCE", "UNTIL", "COARSE", "FINE", "DIVISORS")) | rows,
        num_warps=4, maxnreg=registers,
    )
