"""The states between segments of delta_backward.py, forwards and backwards in one launch (chapter 20).

A segment maps the state S before it to M S + X, and the gradient R after it to M^T R + X'. As `carry_maps` of
../portable/delta_forward.py, a program has BV columns of a sequence's head and goes from segment to segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.plan import Spec
from ..portable.delta_forward import DeltaCall
from ..portable.segments import which_sequence

BV = 16


@triton.jit
def load_segment(
    part, X, i_s, i_h, i_v, H,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):
    """The halves [K, K / 2] of a segment's M, or M^T, and BV columns of its X."""
    HALF: tl.constexpr = K // 2
    o_k, o_v, o_j = tl.arange(0, K)[:, None], i_v * BV + tl.arange(0, BV)[None, :], tl.arange(0, HALF)[None, :]
    i_s = (i_s * H + i_h).to(tl.int64)
    p_M = part + i_s * K * (V + K) + V
    if REVERSE:  # M^T
        p_M += o_k + o_j * (V + K)
        STEP: tl.constexpr = HALF * (V + K)
    else:
        p_M += o_k * (V + K) + o_j
        STEP: tl.constexpr = HALF
    return tl.load(p_M), tl.load(p_M + STEP), tl.load(X + i_s * K * W + o_k * W + o_v)


@triton.jit
def through_segments(
    part, X, first, last, cu, i_v, i_h, i_n, T, L, H,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):
    """Replace each segment's X [slots, H, K, W] by the state that the segment starts from; M lies in `part`."""
    HALF: tl.constexpr = K // 2
    o_k, o_v, o_j = tl.arange(0, K), i_v * BV + tl.arange(0, BV), tl.arange(0, HALF)
    _, start, stop = which_sequence(cu, i_n, T, PACKED)
    i_0 = start // L + i_n if PACKED else i_n * tl.cdiv(T, L)
    n_s = tl.cdiv(stop - start, L)
    o_S = (i_n * H + i_h).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]

    # load
    b_S = tl.zeros([K, BV], dtype=tl.float32)
    if first is not None:
        b_S += tl.load(first + o_S)
    i_s = i_0 + (tl.maximum(n_s - 1, 0) if REVERSE else 0)
    M_0, M_1, b_X = load_segment(part, X, i_s, i_h, i_v, H, K, V, W, BV, REVERSE)
    for i in range(0, n_s):
        i_s = i_0 + (n_s - 1 - i if REVERSE else i)
        p = X + (i_s * H + i_h).to(tl.int64) * K * W
        # store
        tl.store(p + o_k[:, None] * W + o_v[None, :], b_S)
        tl.debug_barrier()  # below, other threads than those that stored rows of S read them
        # load: the next segment's numbers are asked for before this one's products
        p_S = p + o_j[:, None] * W + o_v[None, :]
        S_0, S_1 = tl.load(p_S), tl.load(p_S + HALF * W)
        i_next = i_s + (tl.where(i + 1 < n_s, -1, 0) if REVERSE else tl.where(i + 1 < n_s, 1, 0))
        next_0, next_1, next_X = load_segment(part, X, i_next, i_h, i_v, H, K, V, W, BV, REVERSE)
        # compute
        b_S = tl.dot(M_0, S_0, b_X, input_precision="ieee")
        b_S = tl.dot(M_1, S_1, b_S, input_precision="ieee")
        M_0, M_1, b_X = next_0, next_1, next_X
    # store
    if last is not None:
        tl.store(last + o_S, b_S)


@triton.jit(do_not_specialize=("N", "T", "L", "H"))
def carry_both(
    part, part_back, S_in, R_in, R_0, cu, N, T, L, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):
    """`part` [slots, H, K, V + K] has X and M of each segment, part_back [slots, H, K, V] has X'."""
    # which tile: BV columns of the state of a head, forwards in the first half of the programs
    pid, n = tl.program_id(0), V // BV * H * N
    back = pid >= n
    pid = pid % n
    i_v, i_h, i_n = pid % (V // BV), pid // (V // BV) % H, pid // (V // BV) // H
    if back:
        through_segments(part, part_back, R_in, R_0, cu, i_v, i_h, i_n, T, L, H, K, V, V, BV, PACKED, True)
    else:
        through_segments(part, part, S_in, None, cu, i_v, i_h, i_n, T, L, H, K, V, V + K, BV, PACKED, False)


# The plan.


def launch_carry(call: DeltaCall, part: Spec, part_back: Spec, S_in: Spec | None, R_in: Spec | None, R_0: Spec | None):
    """`carry_both` over all segments; R_0 gets the gradient of the initial state, where it is wanted."""
    call.draft.launch(
        carry_both, 2 * (call.V // BV) * call.H * call.N,
        part=part, part_back=part_back, S_in=S_in, R_in=R_in, R_0=R_0,
        cu=call.cu, N=call.N, T=call.T, L=call.L, H=call.H,
        K=call.K, V=call.V, BV=BV, PACKED=call.cu is not None, num_warps=8, num_stages=1,
    )
