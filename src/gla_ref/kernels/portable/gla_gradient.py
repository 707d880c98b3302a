"""The gradient of Gated Linear Attention, chunk by chunk (chapter 15).

With S the state before a chunk, R the gradient of the state after it (over scale, so that scale may
come last), and P, q', k', r, b as in gla_forward.py::

    dP = do v^T, strictly lower triangular, and D its diagonal
    dq = scale * e^(b - r) (do (e^r S)^T + dP k' + D k')                                        (1)
    dk = scale * e^(r - b) (dP^T q' + v (e^(b_C - r) R)^T + D q')                               (2)
    dg_t = the paths across t: reads in the chunk from t on, writes in it before t for later    (3)
           chunks, and from state to state: sum_v e^(b_C) S R

A pair i = j crosses no token. In (3) it would add the same number to both sides of a difference, and if g = -20, the
rounding of these numbers would be larger than dg; so the kernel keeps such pairs apart.

dv is a walk backwards with q and k exchanged, `walk(k, q, do)`, which stores every R. A walk forward stores every S,
from the states that the forward pass has found for its segments. All other steps are local to a chunk. Reference:
:mod:`gla_ref.gradients.gla`.

The kernel, and its programs::

    gradients    K tiles * H * chunks    dq, dk, dg from S and R
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, cdiv
from . import gla_forward
from ._arguments import stride_patterns
from .gla_forward import chunk_decays, clamped, gates_to_border, sums, to_border
from .segments import which_segment
from .tiles import VARYING, load_tile, operand, store_tile, which_tile

# BK = BV, warps and the largest number of stages of `gradients`
GRADIENTS = {
    ("hopper", 16): (64, 4, 3),
    ("hopper", 32): (16, 4, 1),
    ("ampere", 16): (64, 8, 1),
    ("ampere", 32): (16, 4, 1),
    ("turing", 16): (32, 4, 1),
    ("turing", 32): (16, 4, 1),
}


@triton.jit(do_not_specialize=VARYING)
def gradients(
    q, k, v, do, g, S, R, dq, dk, dg, cu, s_q, s_k, s_v, s_do, s_g, s_d, s_S, N, T, H, K, V, scale,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, LIMIT: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Make dq, dk and dg of a chunk, [B, T, H, K] with strides s_d; dg is None if the caller needs none."""
    # which tile: BK channels of a chunk of a head
    i_k, i_h, i_s = which_tile(H, K, BK)
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return

    # compute: over all of V
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    # do S^T, v R^T and, from state to state, the row sums of S * R
    b_read, b_write = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_kept = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_S = load_tile(S, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
        b_R = load_tile(R, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
        # load v once more, from L2: Triton gives a tile that goes to products and into registers one
        # buffer only, and refills it without a wait while products still read it (lab/known.md)
        b_S2 = load_tile(S, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False, True)
        b_R2 = load_tile(R, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False, True)
        b_dP = tl.dot(b_do, b_v.T, b_dP, input_precision="ieee")
        b_S, of_S = operand(b_S, b_do.dtype)
        b_R, of_R = operand(b_R, b_do.dtype)
        b_read += tl.dot(b_do, b_S.T, input_precision="ieee") * of_S
        b_write += tl.dot(b_v, b_R.T, input_precision="ieee") * of_R
        b_kept += tl.sum(b_S2.to(tl.float32) * b_R2, 1)

    # load
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]

    # compute: over the chunk's pairs
    read, write, first, last, through, mild = chunk_decays(b_g, LIMIT, FAST_SUMS, False, b_q.dtype)
    b_dq, b_dk, b_net, b_later = pairs(
        b_q, b_k, b_g, b_dP, b_read * first[None, :], b_write * last[None, :], read, write, mild, LEVELS, FAST_SUMS
    )

    # store
    store_tile(dq, b_dq * scale, s_d, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    store_tile(dk, b_dk * scale, s_d, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    if dg is not None:
        b_d = crossing(b_net, b_later, b_kept * first * last * through, b_g, FAST_SUMS) * scale
        store_tile(dg, b_d, s_d, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)


@triton.jit
def pairs(b_q, b_k, b_g, b_dP, b_read, b_write, read, write, mild, LEVELS: tl.constexpr, FAST: tl.constexpr):
    """dq, dk and, for (3), b_net = q dq - k (dk of pairs) and b_later = k (dk of later chunks), all [C, BK]."""
    C: tl.constexpr = b_q.shape[0]
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # a pair i = j has no decay: leave it out of the products and of dg
    b_own = tl.sum(tl.where(o_i == o_j, b_dP, 0.0), 1)[:, None]  # [C, 1]
    if mild:
        b_A, of_A = operand(tl.where(o_i > o_j, b_dP, 0.0), b_q.dtype)  # [C, C]
        b_l, b_r = (b_q * read).to(b_q.dtype), (b_k * write).to(b_k.dtype)
        b_dq = b_read + tl.dot(b_A, b_r, input_precision="ieee") * of_A
        b_dk = tl.dot(b_A.T, b_l, input_precision="ieee") * of_A
        # use the rounded factors of the products, so that pairs on one side of a token cancel
        b_net, b_later = b_l * b_dq - b_r * b_dk, b_r * b_write
        # (1), (2); of rounded factors too, which are at hand: for q and k themselves registers are short
        b_dq, b_dk = (b_dq + b_own * b_r) * read, (b_dk + b_write + b_own * b_l) * write
    else:
        b_dq, b_write = b_read * read, b_write * write
        b_dk = tl.zeros(b_q.shape, dtype=tl.float32)
        for level in tl.range(0, LEVELS):
            b_E = to_border(clamped(b_g), gates_to_border(level, C), FAST)  # [C, BK]
            b_l, of_l = one_half(b_q * b_E, level, 1, b_q.dtype)
            b_r, of_r = one_half(b_k * b_E, level, 0, b_k.dtype)
            b_A, of_A = operand(tl.where(across(level, C), b_dP, 0.0), b_q.dtype, -100.0)
            b_dq += tl.dot(b_A, b_r, input_precision="ieee") * (b_E * (of_A * of_r))
            b_dk += tl.dot(b_A.T, b_l, input_precision="ieee") * (b_E * (of_A * of_l))
        b_net, b_later = b_q * b_dq - b_k * b_dk, b_k * b_write
        b_dq, b_dk = b_dq + b_own * b_k, b_dk + b_write + b_own * b_q
    return b_dq, b_dk, b_net, b_later


@triton.jit
def across(level, C: tl.constexpr):
    """Mask [C, C] of the pairs (i, j) that meet at this level: i in the second half of a block, j in the first half."""
    o_i, o_j = (tl.arange(0, C) >> level)[:, None], (tl.arange(0, C) >> level)[None, :]
    return (o_i == (o_j | 1)) & (o_i > o_j)


@triton.jit
def one_half(x, level, half, dtype: tl.constexpr):
    """`operand` of rows x [C, D] decayed by `to_border`; a level needs one half of each block, 1 for the second.

    In float16 the other half must not set the operand's size, because its factors may be far larger.
    """
    if dtype == tl.float16:
        o_c = tl.arange(0, x.shape[0])
        x = tl.where((((o_c >> level) & 1) == half)[:, None], x, 0.0)
    return operand(x, dtype, -100.0)


@triton.jit
def crossing(b_net, b_later, b_kept, b_g, FAST: tl.constexpr):
    """(3): in row t, the sum of b_net from t on, of b_later before t, and b_kept; no pair crosses a gate of -inf."""
    o_i, o_j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    b_d = sums(o_i <= o_j, b_net, FAST) + sums(o_i > o_j, b_later, FAST) + b_kept[None, :]
    return tl.where(b_g == float("-inf"), 0.0, b_d)


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, None, dS0); None for a tensor not given and a dg not needed. `starts` may be None."""
    draft, q, k, v, g, S = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.initial_state
    shared = gla_forward.begin(draft, q, v, call.cu_seqlens, call.scale, call.path)
    shared, do, R = gla_forward.begin_backward(shared, v, call.do, call.dS)
    x, S_in = gla_forward.readers(shared, q, k, g), draft.contiguous(S, torch.float32)
    S_all = gla_forward.walks(shared, x, v, S_in, states="states", starts=call.starts).states
    turned, R_0 = x._replace(q=x.k, k=x.q), "R_0" if S else ""
    back = gla_forward.walks(shared, turned, do, R, o="dv", S=R_0, states="dstates", reverse=True)
    gla_forward.mend_strong(shared, k, q, do, g, back.o, x.strong, reverse=True)
    dq, dk = draft.like("dq", q), draft.like("dk", k)
    dg = draft.like("dg", g) if call.need_dg else None
    B, warps, stages = GRADIENTS[hardware.family, 8 * q.dtype.itemsize]
    if S_all.dtype != torch.bfloat16:
        stages = min(stages, 2)  # states in float32 leave no room for more stages
    shared.launch(
        gradients, cdiv(shared.K, B) * shared.H * shared.chunks,
        q=q, k=k, v=v, do=do, g=g, S=S_all, R=back.states, dq=dq, dk=dk, dg=dg,
        **stride_patterns(q=q, k=k, v=v, do=do, g=g, d=dq, S=S_all), LEVELS=shared.levels, BK=B, BV=B,
        LIMIT=shared.limit, num_warps=warps, num_stages=stages if shared.half and shared.V > B else 1,
    )
    dS0 = draft.compute("dS0", torch.mul, back.S if S else None, shared.scale)
    return draft.plan("portable", dq, dk, back.o, dg, None, dS0)
