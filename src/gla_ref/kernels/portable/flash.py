"""Causal softmax attention without the T x T matrix, forward and backward: FlashAttention-2 (chapter 3).

    o_i = sum_j p_ij v_j,   p_ij = exp(scale q_i k_j - lse_i),   lse_i = log sum_j exp(scale q_i k_j),   j <= i

and, with delta_i = o_i . do_i and ds_ij = p_ij (do_i . v_j - delta_i),

    dv_j = sum_i p_ij do_i,   dk_j = scale sum_i ds_ij q_i,   dq_i = scale sum_j ds_ij k_j

Reference: :func:`gla_ref.softmax_attention.recurrent`; Dao 2023, algorithms 1 and 2. Programs, all independent:

=========  ============================  =====================  ================================  ==================
kernel     one program                   walks over             FLOPs a pair of tiles             bytes a step
=========  ============================  =====================  ================================  ==================
`fwd`      BM queries of a head          keys up to its end     2 BM BN (K + V)                   2 BN (K + V)
`bwd_dq`   BM queries of a head          keys up to its end     2 BM BN (2 K + V)                 2 BN (K + V)
`bwd_dkv`  BN keys of a head             later queries          2 BM BN (2 K + 2 V)               2 BM (K + V) + 8 BM
=========  ============================  =====================  ================================  ==================

The backward computes 7 products where 5 would do: s and do . v once for dq, and once for dk and dv. So results are
bitwise equal in every run: with shared products, programs would add to dq atomically, in any order. A step's bytes come
from the L2 cache, because programs that run at the same time belong to the same few heads. The forward pass saves lse
to base 2, rounded to float32. For float32 operands it saves the two terms of lse, the maximum and log2 of the sum,
because a rounded lse would give all p of a row a common factor with an error of up to lse times 2^-24. Limits: K, V <=
256, float32 (ieee products), float16, bfloat16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import _contract as contract
from ..launch.hardware import Hardware, tiles
from ..launch.plan import Draft, Plan, Spec, boxes, describable, next_power_of_2, strides_of
from ._arguments import strides
from .segments import sequences, slots, which_segment
from .tiles import load_tile, store_tile

# (BM, BN, warps, stages) for K and V up to the width, of all three kernels in float32, which tensor cores do not
# multiply
SMALL = {
    ("hopper", 32): {64: (32, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 32, 4, 1)},
    ("ampere", 32): {64: (32, 32, 4, 2), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
    ("turing", 16): {64: (32, 32, 8, 1), 128: (16, 16, 8, 1)},
    ("turing", 32): {64: (32, 32, 8, 1), 128: (16, 16, 8, 1)},
}
# the same for each kernel in 16 bits. Hopper's tiles were the fastest; lab/flash_attention.md lists the other ones
# tried
FWD = SMALL | {
    ("hopper", 16): {64: (64, 128, 4, 2), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    ("ampere", 16): {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)},
}
BWD_DQ = SMALL | {
    ("hopper", 16): {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 4, 2)},
    ("ampere", 16): {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 8, 1)},
    ("ampere", 32): {64: (32, 32, 4, 2), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
}
BWD_DKV = SMALL | {
    ("hopper", 16): {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
    ("ampere", 16): {64: (32, 64, 4, 2), 128: (32, 32, 4, 2), 256: (32, 32, 8, 1)},
}
# arguments that change from call to call, which Triton must not specialise on 1 and multiples of 16. Triton specialises
# on T, for wide accesses to rows of lse (a fifth of the backward's time at K = 128); `twin` compiles both variants at
# once
VARYING = ("N", "S", "H", "slots")


@triton.jit
def load_rows(
    x, s, i_b, i_h, o_t, end, D, BT: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr, CLIP: tl.constexpr,
):
    """Rows o_t ... o_t + BT - 1 of x[i_b, :, i_h, :] as [BT, BD], zero from row `end` and column D on.

    The copy engine reads zeros beyond a tensor, but not beyond a packed sequence: CLIP masks those rows.
    """
    b = load_tile(x, s, i_b, i_h, o_t, end, 0, D, BT, BD, TMA)
    if TMA and CLIP:  # a neighbour's inf times 0 would be NaN
        b = tl.where((o_t + tl.arange(0, BT) < end)[:, None], b, 0.0)
    return b


@triton.jit
def which_rows(cu, N, T, S, H, slots, BT: tl.constexpr, PACKED: tl.constexpr):
    """Head and tile of this program: (i_b, i_h, i_tile, the sequence's first row, its queries, its keys).

    A spare slot of a packed batch (`which_segment`) gets a tile beyond the sequence's end.
    """
    i_p = tl.program_id(0)
    i_t, i_bh = i_p % slots, i_p // slots  # tiles of one head run together and share its keys in L2
    if PACKED:
        i_n, i_b, start, stop, begin = which_segment(cu, i_t, N, T, BT, PACKED)
        return i_b, i_bh, (begin - start) // BT, start, stop - start, stop - start
    else:
        return i_bh // H, i_bh % H, i_t, i_bh * 0, T, S


@triton.jit
def fwd_keys(
    b_o, b_l, b_m, b_q, k, v, s_k, s_v, i_b, i_h, start, end, o_i, lo, hi, K, V, scale2,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, CLIP: tl.constexpr, MASK: tl.constexpr,
):
    """Add keys lo to hi to a tile of queries: the outputs, not yet divided, the sums and the maxima (chapter 2)."""
    for o_n in tl.range(lo, hi, BN):
        b_k = load_rows(k, s_k, i_b, i_h, start + o_n, end, K, BN, BK, TMA, CLIP)  # [BN, BK]
        b_v = load_rows(v, s_v, i_b, i_h, start + o_n, end, V, BN, BV, TMA, CLIP)  # [BN, BV]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BM, BN]
        if MASK:  # once: a second mask, of p, takes registers from the loop of all other tiles too
            b_s = tl.where(o_i[:, None] >= (o_n + tl.arange(0, BN))[None, :], b_s, float("-inf"))
        b_mn = tl.maximum(b_m, tl.max(b_s, 1) * scale2)  # [BM]
        # scale and shift are one fused multiply-add per element, rounded once, here and in the backward
        b_p = tl.exp2(b_s * scale2 - b_mn[:, None])  # [BM, BN]
        b_r = tl.exp2(b_m - b_mn)  # [BM], the factor of sums over earlier tiles
        b_l = b_l * b_r + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_r[:, None], input_precision="ieee")  # [BM, BV]
        b_m = b_mn
    return b_o, b_l, b_m


@triton.jit(do_not_specialize=VARYING)
def fwd(
    q, k, v, o, lse, low, cu, s_q, s_k, s_v, s_o, N, T, S, H, K, V, slots, rows, scale2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr, SIGN: tl.constexpr,
):
    # which tile: programs with the most keys start first, so that none of them runs alone at the end
    i_b, i_h, i_t, start, T, S = which_rows(cu, N, T, S, H, slots, BM, PACKED)
    o_m = (tl.cdiv(T, BM) - 1 - i_t) * BM
    if o_m < 0:
        return
    o_i = o_m + tl.arange(0, BM) + (S - T)  # [BM], position among the keys
    o_row = (i_b * H + i_h).to(tl.int64) * rows + start + o_m + tl.arange(0, BM)
    m_row = o_m + tl.arange(0, BM) < T

    # load
    b_q = load_rows(q, s_q, i_b, i_h, start + o_m, start + T, K, BM, BK, TMA, False)  # [BM, BK]
    if SIGN <= 0:  # with a scale above 0 the largest product is the largest score, and a masked one stays -inf
        b_q = b_q * SIGN
        scale2 = -scale2 if SIGN < 0 else 1.0

    # compute: keys that every query of the tile sees, then the diagonal, where a mask is needed
    b_o = tl.zeros([BM, BV], dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    full = (o_m + S - T + 1) // BN * BN
    b_o, b_l, b_m = fwd_keys(
        b_o, b_l, b_m, b_q, k, v, s_k, s_v, i_b, i_h, start, start + S, o_i, 0, full, K, V, scale2,
        BN, BK, BV, TMA, False, False,
    )
    b_o, b_l, b_m = fwd_keys(
        b_o, b_l, b_m, b_q, k, v, s_k, s_v, i_b, i_h, start, start + S, o_i,
        full, tl.minimum(o_m + BM + S - T, S), K, V, scale2, BN, BK, BV, TMA, PACKED, True,
    )

    # store: lse in base 2, which the backward reads; for float32 its two terms
    store_tile(o, b_o / b_l[:, None], s_o, i_b, i_h, start + o_m, start + T, 0, V, BM, BV, False)
    if low is None:
        tl.store(lse + o_row, b_m + tl.log2(b_l), mask=m_row)
    else:
        tl.store(lse + o_row, b_m, mask=m_row)
        tl.store(low + o_row, tl.log2(b_l), mask=m_row)


@triton.jit
def dq_keys(
    b_dq, b_q, b_do, b_lse, b_low, b_delta, k, v, s_k, s_v, i_b, i_h, start, end, o_i, lo, hi, K, V, scale2,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, CLIP: tl.constexpr, MASK: tl.constexpr,
):
    for o_n in tl.range(lo, hi, BN):
        b_k = load_rows(k, s_k, i_b, i_h, start + o_n, end, K, BN, BK, TMA, CLIP)  # [BN, BK]
        b_v = load_rows(v, s_v, i_b, i_h, start + o_n, end, V, BN, BV, TMA, CLIP)  # [BN, BV]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BM, BN]
        b_dp = tl.dot(b_do, b_v.T, input_precision="ieee")  # [BM, BN]
        b_s = b_s * scale2 - b_lse[:, None]
        b_p = tl.exp2(b_s if b_low is None else b_s - b_low[:, None])
        if MASK:
            o_j = o_n + tl.arange(0, BN)
            b_p = tl.where(o_i[:, None] >= o_j[None, :], b_p, 0.0)
        b_ds = (b_p * (b_dp - b_delta[:, None])).to(b_k.dtype)  # [BM, BN]
        b_dq = tl.dot(b_ds, b_k, b_dq, input_precision="ieee")  # [BM, BK]
    return b_dq


@triton.jit(do_not_specialize=VARYING)
def bwd_dq(
    q, k, v, o, do, lse, low, delta, dq, cu, s_q, s_k, s_v, s_o, s_do, s_dq,
    N, T, S, H, K, V, slots, rows, scale, scale2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
):
    # which tile, as in fwd
    i_b, i_h, i_t, start, T, S = which_rows(cu, N, T, S, H, slots, BM, PACKED)
    o_m = (tl.cdiv(T, BM) - 1 - i_t) * BM
    if o_m < 0:
        return
    o_i = o_m + tl.arange(0, BM) + (S - T)  # [BM]
    o_row = (i_b * H + i_h).to(tl.int64) * rows + start + o_m + tl.arange(0, BM)
    m_row = o_m + tl.arange(0, BM) < T

    # load; make delta here, where o and do are both loaded, for bwd_dkv too
    b_o = load_rows(o, s_o, i_b, i_h, start + o_m, start + T, V, BM, BV, TMA, False)  # [BM, BV]
    b_do = load_rows(do, s_do, i_b, i_h, start + o_m, start + T, V, BM, BV, TMA, False)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BM]
    tl.store(delta + o_row, b_delta, mask=m_row)
    b_q = load_rows(q, s_q, i_b, i_h, start + o_m, start + T, K, BM, BK, TMA, False)  # [BM, BK]
    b_lse = tl.load(lse + o_row, mask=m_row, other=float("inf"))  # p = 0 beyond the end
    b_low = None if low is None else tl.load(low + o_row, mask=m_row, other=0.0)

    # compute
    b_dq = tl.zeros([BM, BK], dtype=tl.float32)
    full = (o_m + S - T + 1) // BN * BN
    b_dq = dq_keys(
        b_dq, b_q, b_do, b_lse, b_low, b_delta, k, v, s_k, s_v, i_b, i_h, start, start + S, o_i,
        0, full, K, V, scale2, BN, BK, BV, TMA, False, False,
    )
    b_dq = dq_keys(
        b_dq, b_q, b_do, b_lse, b_low, b_delta, k, v, s_k, s_v, i_b, i_h, start, start + S, o_i,
        full, tl.minimum(o_m + BM + S - T, S), K, V, scale2, BN, BK, BV, TMA, PACKED, True,
    )

    # store
    store_tile(dq, b_dq * scale, s_dq, i_b, i_h, start + o_m, start + T, 0, K, BM, BK, False)


@triton.jit
def load_statistics(lse, delta, o_head, o_m, T, BM: tl.constexpr):
    o_i = o_m + tl.arange(0, BM)
    b_lse = tl.load(lse + o_head + o_i, mask=o_i < T, other=float("inf"))  # p = 0 beyond the end
    return b_lse, tl.load(delta + o_head + o_i, mask=o_i < T, other=0.0)


@triton.jit
def dkv_queries(
    b_dk, b_dv, b_k, b_v, q, do, lse, low, delta, s_q, s_do, i_b, i_h, o_head, start, T, o_j, lo, hi, K, V, scale2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TMA: tl.constexpr, AHEAD: tl.constexpr, CLIP: tl.constexpr, MASK: tl.constexpr,
):
    b_lse, b_delta = load_statistics(lse, delta, o_head, lo, T, BM)  # [BM] each
    for o_m in tl.range(lo, hi, BM):
        b_q = load_rows(q, s_q, i_b, i_h, start + o_m, start + T, K, BM, BK, TMA, CLIP)  # [BM, BK]
        b_do = load_rows(do, s_do, i_b, i_h, start + o_m, start + T, V, BM, BV, TMA, CLIP)  # [BM, BV]
        if AHEAD:  # small tiles leave registers for the next rows, which are loaded ahead
            b_lse_next, b_delta_next = load_statistics(lse, delta, o_head, o_m + BM, T, BM)
        else:
            b_lse, b_delta = load_statistics(lse, delta, o_head, o_m, T, BM)
        # transposed tiles: p and ds are left operands of both sums and stay in registers
        b_s = tl.dot(b_k, b_q.T, input_precision="ieee")  # [BN, BM]
        # the sum starts at -delta: subtracting delta takes no operation, and delta no registers
        b_dp = tl.broadcast_to(-b_delta[None, :], [BN, BM])
        b_dp = tl.dot(b_v, b_do.T, b_dp, input_precision="ieee")  # [BN, BM]
        o_i = o_m + tl.arange(0, BM)
        b_s = b_s * scale2 - b_lse[None, :]
        if low is not None:
            b_s -= tl.load(low + o_head + o_i, mask=o_i < T, other=0.0)[None, :]
        b_p = tl.exp2(b_s)
        if MASK:
            b_p = tl.where(o_i[None, :] >= o_j[:, None], b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")  # [BN, BV]
        b_dk = tl.dot((b_p * b_dp).to(b_q.dtype), b_q, b_dk, input_precision="ieee")  # [BN, BK]
        if AHEAD:
            b_lse, b_delta = b_lse_next, b_delta_next
    return b_dk, b_dv


@triton.jit(do_not_specialize=VARYING)
def bwd_dkv(
    q, k, v, do, lse, low, delta, dk, dv, cu, s_q, s_k, s_v, s_do, s_dk, s_dv,
    N, T, S, H, K, V, slots, rows, scale, scale2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):
    # which tile: the first keys come first, because most queries see them
    i_b, i_h, i_t, start, T, S = which_rows(cu, N, T, S, H, slots, BN, PACKED)
    o_n = i_t * BN
    if o_n >= S:
        return
    o_j = o_n + tl.arange(0, BN) - (S - T)  # [BN], the first query that sees the key
    o_head = (i_b * H + i_h).to(tl.int64) * rows + start

    # load
    b_k = load_rows(k, s_k, i_b, i_h, start + o_n, start + S, K, BN, BK, TMA, False)  # [BN, BK]
    b_v = load_rows(v, s_v, i_b, i_h, start + o_n, start + S, V, BN, BV, TMA, False)  # [BN, BV]

    # compute: queries on the diagonal, those that see every key of the tile, and the last few
    b_dk = tl.zeros([BN, BK], dtype=tl.float32)
    b_dv = tl.zeros([BN, BV], dtype=tl.float32)
    first = tl.maximum(o_n - (S - T), 0) // BM * BM
    full = tl.cdiv(tl.maximum(o_n + BN - 1 - (S - T), 0), BM) * BM
    full = tl.minimum(full, tl.cdiv(T, BM) * BM)
    last = tl.maximum(T // BM * BM, full) if PACKED else tl.cdiv(T, BM) * BM
    b_dk, b_dv = dkv_queries(
        b_dk, b_dv, b_k, b_v, q, do, lse, low, delta, s_q, s_do, i_b, i_h, o_head, start, T, o_j,
        first, full, K, V, scale2, BM, BN, BK, BV, TMA, AHEAD, PACKED, True,
    )
    b_dk, b_dv = dkv_queries(
        b_dk, b_dv, b_k, b_v, q, do, lse, low, delta, s_q, s_do, i_b, i_h, o_head, start, T, o_j,
        full, last, K, V, scale2, BM, BN, BK, BV, TMA, AHEAD, False, False,
    )
    if PACKED:
        b_dk, b_dv = dkv_queries(
            b_dk, b_dv, b_k, b_v, q, do, lse, low, delta, s_q, s_do, i_b, i_h, o_head, start, T, o_j,
            last, T, K, V, scale2, BM, BN, BK, BV, TMA, AHEAD, True, False,
        )

    # store
    store_tile(dk, b_dk * scale, s_dk, i_b, i_h, start + o_n, start + S, 0, K, BN, BK, False)
    store_tile(dv, b_dv, s_dv, i_b, i_h, start + o_n, start + S, 0, V, BN, BV, False)


class FlashCall(NamedTuple):
    """The sizes, tiles and tensors that the launches of one call share."""

    draft: Draft
    cu: Spec | None
    B: int
    T: int
    S: int  # keys
    H: int
    K: int
    V: int
    N: int  # packed sequences
    BK: int
    BV: int
    scale: float
    engine: bool  # the copy engine loads q, k and v
    dtype: torch.dtype  # the dtype by which tiles are looked up

    def tiles(self, table: dict) -> tuple[int, int, int, int]:
        """BM, BN, warps and stages."""
        return tiles(table, self.draft.hardware, self.dtype, K=self.K, V=self.V)


def begin(hardware: Hardware, call) -> FlashCall:
    """Begin the plan of a call, forward or backward."""
    draft, q, k, v = Draft(hardware, *call), call.q, call.k, call.v
    (B, T, H, K), S, V = q.shape, k.shape[1], v.shape[-1]
    cu, (BK, BV) = draft.contiguous(call.cu_seqlens, torch.int32), (max(16, next_power_of_2(n)) for n in (K, V))
    dtype = torch.float32 if hardware.interpreted else q.dtype  # small tiles are interpreted sooner
    engine, scale = all(describable(x, hardware) for x in (q, k, v)), contract.check_scale(call.scale, K)
    return FlashCall(draft, cu, B, T, S, H, K, V, sequences(0, cu), BK, BV, scale, engine, dtype)


def launch(call: FlashCall, kernel, length: int, rows: int, loaded: dict, *, warps: int, stages: int, **named):
    """Launch a program of `kernel` for each `rows` of `length` tokens; a program loads tiles (tensor, rows, width)."""
    n = slots(1, length, call.cu, rows)
    named |= {name: boxes(call.engine, m, (x, width))[0] for name, (x, m, width) in loaded.items()}
    call.draft.launch(
        kernel, n * call.B * call.H, cu=call.cu, N=call.N, T=call.T, S=call.S, H=call.H, K=call.K, V=call.V,
        rows=call.T, slots=n, scale2=call.scale / math.log(2), BK=call.BK, BV=call.BV, TMA=call.engine,
        PACKED=call.cu is not None, **named, num_warps=warps, num_stages=stages,
    )


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, lse, low); low, the second term of lse, is made for float32 only."""
    q, k, v, call = call.q, call.k, call.v, begin(hardware, call)
    B, T, H, _ = q.shape
    o = call.draft.new("o", B, T, H, v.shape[-1], dtype=v.dtype)
    lse = call.draft.new("lse", B, H, T)
    low = call.draft.new("low", B, H, T) if q.dtype == torch.float32 else None
    BM, BN, warps, stages = call.tiles(FWD)
    launch(
        call, fwd, T, BM, {"q": (q, BM, call.BK), "k": (k, BN, call.BK), "v": (v, BN, call.BV)}, o=o, lse=lse, low=low,
        **strides(q=q, k=k, v=v, o=o), BM=BM, BN=BN, SIGN=(call.scale > 0) - (call.scale < 0),
        warps=warps, stages=stages,
    )
    return call.draft.plan("portable", o, lse, low)


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv)."""
    q, k, v, o, lse, low, do = call.q, call.k, call.v, call.o, call.lse, call.low, call.do
    call = begin(hardware, call)
    dq, dk, dv = (call.draft.like(f"d{x.name}", x) for x in (q, k, v))
    delta = call.draft.like("delta", lse)
    if call.engine and not describable(do, hardware):  # the gradient of a sum has strides of 0
        do = call.draft.contiguous(do)
    rows, BK, BV = {"lse": lse, "low": low, "delta": delta}, call.BK, call.BV
    BM, BN, warps, stages = call.tiles(BWD_DQ)
    launch(
        call, bwd_dq, call.T, BM,
        {"q": (q, BM, BK), "k": (k, BN, BK), "v": (v, BN, BV), "o": (o, BM, BV), "do": (do, BM, BV)},
        **rows, dq=dq, **strides(q=q, k=k, v=v, o=o, do=do, dq=dq), scale=call.scale, BM=BM, BN=BN,
        warps=warps, stages=stages,
    )
    BM, BN, warps, stages = call.tiles(BWD_DKV)
    launch(
        call, bwd_dkv, k.shape[1], BN, {"q": (q, BM, BK), "k": (k, BN, BK), "v": (v, BN, BV), "do": (do, BM, BV)},
        **rows, dk=dk, dv=dv, **strides(q=q, k=k, v=v, do=do, dk=dk, dv=dv), scale=call.scale, BM=BM, BN=BN,
        AHEAD=max(BK, BV) <= 64, warps=warps, stages=stages,
    )
    return call.draft.plan("portable", dq, dk, dv)


def twin(call):
    """Return the call at another length: a multiple of 16 if this length is none, else none."""
    T = call.q.shape[1]
    more = 1 if T % 16 == 0 else -T % 16

    def longer(x):
        if type(x) is not Spec or x.name == "cu_seqlens":
            return x
        axis = 1 if len(x.shape) == 4 else 2  # the axis of tokens in lse
        shape = (*x.shape[:axis], x.shape[axis] + more, *x.shape[axis + 1 :])
        return x._replace(shape=shape, strides=strides_of(shape) if x.contiguous else x.strides)

    return call._make(map(longer, call))
