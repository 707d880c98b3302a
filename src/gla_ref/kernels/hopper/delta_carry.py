"""The states between segments of delta_backward.py, forwards and backwards in one launch (chapter 20).

A segment maps the state S before it to M S + X, and the gradient R after it to M^T R + X'. As `carry` of
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
    for i in range(0, n_s):
        i_s = (i_0 + (n_s - 1 - i if REVERSE else i)) * H + i_h
        p_M = part + i_s.to(tl.int64) * K * (V + K) + V
        if REVERSE:  # M^T
            p_M += o_k[:, None] + o_j[None, :] * (V + K)
            STEP: tl.constexpr = HALF * (V + K)
        else:
            p_M += o_k[:, None] * (V + K) + o_j[None, :]
            STEP: tl.constexpr = HALF
        M_0, M_1 = tl.load(p_M), tl.load(p_M + STEP)  # [K, K / 2]
        p = X + i_s.to(tl.int64) * K * W
        p_X = p + o_k[:, None] * W + o_v[None, :]
        b_X = tl.load(p_X)  # [K, BV]
        # store
        tl.store(p_X, b_S)
        tl.debug_barrier()  # below, other threads than those that stored rows of S read them
        # compute
        p_S = p + o_j[:, None] * W + o_v[None, :]
        b_S = tl.dot(M_0, tl.load(p_S), b_X, input_precision="ieee")
        b_S = tl.dot(M_1, tl.load(p_S + HALF * W), b_S, input_precision="ieee")
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
        part, part_back, S_in, R_in, R_0, call.cu, call.N, call.T, call.L, call.H,
        K=call.K, V=call.V, BV=BV, PACKED=call.cu is not None, num_warps=8, num_stages=1,
    )
