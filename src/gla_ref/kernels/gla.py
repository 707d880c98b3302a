"""Gated Linear Attention for every log gate in [-inf, 0] (chapters 11 and 12).

    o = scale * (q' S + tril(q' k'^T) v)    q' = q e^(b - r),  k' = k e^(r - b)
    S <- e^(b_C - r) (S + k'^T v)           S in both lines already times e^r

b is the running sum of g in the chunk, r = b_C / 2; g is on the key axis, and
g_v on the value axis is treated alike. Reference: :mod:`gla_ref.gla`
(`recurrent`), :mod:`gla_ref.gla_backward`; GLA paper, section 4.

One product a chunk is gated attention at the price of ungated, as long as
e^(b_C / 2) is a number (pairs j > i, which are masked, may be infinite). Of a
channel whose decay in a chunk is beyond LIMIT, q decays from the chunk's start
instead and k to its end (exponents <= 0): right for the state, useless for
pairs inside the chunk. A chunk with such a channel is strong: its pairs are
made in levels instead. Tokens j < i meet at the border in the middle of the
smallest block of 2^n tokens that holds both, to which k_j decays and from which
q_i does; a level (one n) is one product, of which the blocks' lower left quarters
count. No exponent is above 0, every sum is one of just the gates between: exact
for every gate, no loop over pairs.

The kernels, and the number of programs of each::

    prepare    K tiles * H * chunks    q', k' once for all V tiles (16 bits, K > 64)
    walk       V tiles * H * segments  a head's chunks: o, or states
    carry      K V / 1024 * H * N      segments' states (few heads, large T)
    mend       H * chunks / 16         adds to o the pairs of strong chunks
    gradients  K tiles * H * chunks    dq, dk, dg from states at chunks' ends

Backward: dv is a walk backwards with q and k exchanged, `walk(k, q, do)`, and
stores R, the gradient of the state after each chunk (over scale, so that scale
may come last); a walk forward stores S before each, from the states that the
forward pass has found for its segments; the rest is local. With g_v, keys and
values play the same part: dv and dg_v are `gradients` with the two exchanged,
and the walk backwards is for R alone.

A walk moves 2 C (2 K + 2 BV) bytes a chunk (bf16; 2 C K more where it loads g)
for 2 C (C (K + BV) + 2 K BV) FLOPs. Limits: K <= 256, V <= 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _contract as contract
from ..mechanisms import MECHANISMS
from ._hardware import Hardware, tiles
from ._launch import KERNELS, Operator, check_call, check_choice, given
from ._plan import Draft, Plan, Spec, boxes, cdiv, describable, next_power_of_2
from ._program import Planned
from ._segments import carry_states, segment_length, sequences, slots, which_segment
from ._tiles import VARYING, load_tile, operand, patterns, size, sizes_of, store_tile
from ._vector_gates import (
    across,
    chunk_decays,
    clamped,
    no_decays,
    one_half,
    prepare_all,
    scores,
    sums,
    to_border,
    weighted,
)

__all__ = ["gla"]

# by family and bits, K up to: (C, BV, warps, stages, stages when states are stored) of a walk. Hopper's were fastest;
# benchmarks/LAB.md says what else was tried, and why float32 is not pipelined. The others' are the largest that
# hardly spill, as tools/compile_kernels.py shows
WALK = {
    ("hopper", 16): {64: (64, 64, 4, 3, 3), 128: (64, 64, 4, 2, 3), 256: (64, 64, 4, 1, 1)},
    ("hopper", 32): {64: (16, 32, 4, 1, 1), 128: (16, 16, 4, 1, 1), 256: (16, 32, 8, 1, 1)},
    ("ampere", 16): {64: (32, 32, 4, 2, 2), 128: (32, 32, 4, 2, 1), 256: (32, 32, 8, 1, 1)},
    ("ampere", 32): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1), 256: (16, 16, 8, 1, 1)},
    ("turing", 16): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1)},
    ("turing", 32): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1)},
}
# BK = BV, warps and most stages of `gradients`
GRADIENTS = {
    ("hopper", 16): (64, 4, 3),
    ("hopper", 32): (16, 4, 1),
    ("ampere", 16): (64, 8, 1),
    ("ampere", 32): (16, 4, 1),
    ("turing", 16): (32, 4, 1),
    ("turing", 32): (16, 4, 1),
}
MEND = {"hopper": 64, "ampere": 32, "turing": 32}  # most of BK in `mend`
# walk and gradients with g_v
WALK_BOTH = WALK | {
    ("ampere", 16): {64: (16, 32, 4, 1, 1), 128: (16, 32, 4, 1, 1), 256: (16, 32, 8, 1, 1)}
}
GRADIENTS_BOTH = GRADIENTS | {("ampere", 16): (32, 8, 1)}
# nats of decay in a chunk up to which one product is exact: half of it must be far from the dtype's largest number.
# float32 could bear 80, but differences of larger sums cost it digits. Keys and values share it, since k'^T v' has both
LIMIT = {torch.bfloat16: -80.0, torch.float16: -6.0, torch.float32: -4.0}
PATHS = ("fused", "segmented")


@triton.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, g, g_v, decay, strong_k, o, S_in, S_out, states, strong, all_k, all_v, cu, s_q, s_k, s_v, s_g, s_gv, s_o,
    s_S, N, T, L, H, sizes, scale, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """q reads, k and v write. For a walk backwards (REVERSE) the caller exchanges them: walk(k, q, do).

    Either g is there, or `decay` and `strong_k` (a flag a chunk and head) with q' and k', as `prepare` left them.
    States are [..., H, K, V] in memory and seen as [..., K, H, V], so that `load_tile` fits them.
    Strides (s_q, ...) and sizes (K and V) are as `patterns` has them.
    """
    # which tile: V tiles of a head are neighbours and share q and k in L2
    K, V = size(sizes, 0), size(sizes, 1)
    n_v = tl.cdiv(V, BV)
    i_v, i_h = tl.program_id(0) % n_v, tl.program_id(0) // n_v % H
    i_s = tl.program_id(0) // n_v // H
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    m_P = o_c[:, None] <= o_c[None, :] if REVERSE else o_c[:, None] >= o_c[None, :]  # [C, C]

    FP16: tl.constexpr = (v.dtype if TMA else v.dtype.element_ty) == tl.float16
    ROW: tl.constexpr = 2 if REVERSE and FP16 else 0  # of `decay`, that of `first`

    # load
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += load_tile(S_in, s_S, i_s, i_h, 0, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
    # decay of the whole segment
    b_all_k, b_all_v = tl.full([BK], 1.0, dtype=tl.float32), tl.full([BV], 1.0, dtype=tl.float32)

    # compute
    n_c = tl.cdiv(end - begin, C)  # not above 0 in a spare slot
    # i_t, the chunk's slot: the sequence's first one, the segment's start, and backwards the segment's last chunk
    i_t = (start // C + i_n if PACKED else i_n * tl.cdiv(T, C)) + (begin - start) // C
    i_t += n_c - 1 if REVERSE else 0
    if decay is not None:  # `first` of slot i_t, a chunk ahead: nothing can begin before it
        p_d = decay + ((i_t * H + i_h).to(tl.int64) * 3 + ROW) * K + o_k
        next_first = tl.load(p_d, mask=o_k < tl.where(n_c > 0, K, 0), other=1.0)  # [BK]
    for i_c in tl.range(0, n_c):
        o_t = begin + (n_c - 1 - i_c if REVERSE else i_c) * C
        i_chunk = i_t  # in states
        i_d = (i_t * H + i_h).to(tl.int64)  # the chunk of this head, in decay and flags
        i_t += -1 if REVERSE else 1  # the next chunk's from here on
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        if o is not None:
            b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        if g is not None:
            b_g = load_tile(g, s_g, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            read, write, first, last, through, mild_k = chunk_decays(b_g, LIMIT, LOW, REVERSE, b_v.dtype)  # fmt: skip
            b_k = (b_k * write).to(b_v.dtype)
            if o is not None:
                b_q = (b_q * read).to(b_v.dtype)
        else:
            first, last = next_first, next_first
            p_d = decay + ((i_t * H + i_h).to(tl.int64) * 3 + ROW) * K + o_k
            next_first = tl.load(p_d, mask=o_k < tl.where(i_c + 1 < n_c, K, 0), other=1.0)  # [BK]
            mild_k = tl.load(strong_k + i_d) == 0
        if states is not None:
            store_tile(states, b_S, s_S, i_chunk, i_h, 0, K, i_v * BV, V, BK, BV, TMA)
        if g_v is not None:
            b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, end, i_v * BV, V, C, BV, False)  # [C, BV]
            read_v, write_v, first_v, last_v, through_v, mild_v = chunk_decays(
                b_gv, LIMIT, LOW, REVERSE, b_v.dtype
            )
            b_v = (b_v * write_v).to(b_v.dtype)
        else:
            read_v, first_v, last_v, through_v, mild_v = no_decays(C, BV)
        mild = mild_k & mild_v
        b_S = b_S * first[:, None] * first_v[None, :]  # half way, of mild channels
        if o is not None:
            b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
            b_low, of_S = operand(b_S, b_v.dtype)
            b_o = tl.dot(b_q, b_low, input_precision="ieee") * of_S  # [C, BV]
            # by where: what is left out may be infinite
            b_P, of_P = operand(tl.where(m_P & mild, b_P, 0.0), b_v.dtype)
            b_o = tl.dot(b_P, b_v, b_o / of_P, input_precision="ieee") * of_P
            # store
            store_tile(o, b_o * read_v * scale, s_o, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)
            tl.store(strong + i_d * NV + i_v, (mild == 0).to(tl.int8))
        # strong channels: all the way through; then writes; then the other half of mild ones
        if not mild_k:  # to load `through` no more than needed
            if decay is not None:
                p_c = decay + i_d * 3 * K + o_k
                through = tl.load(p_c + K, mask=o_k < K, other=1.0)  # [BK]
                last = tl.load(p_c + (2 - ROW) * K, mask=o_k < K, other=1.0) if FP16 else last
            b_S *= through[:, None]
            if all_k is not None:
                b_all_k *= through
        b_S = tl.dot(b_k.T, b_v, b_S * through_v[None, :], input_precision="ieee")
        b_S = b_S * last[:, None] * last_v[None, :]
        if all_k is not None:
            b_all_k *= first * last
            b_all_v *= first_v * last_v * through_v

    # store
    if S_out is not None:
        store_tile(S_out, b_S, s_S, i_s, i_h, 0, K, i_v * BV, V, BK, BV, False)
    if all_k is not None:
        tl.store(all_k + (i_s * H + i_h) * K + o_k, b_all_k, mask=o_k < tl.where(i_v == 0, K, 0))
        if all_v is not None:
            tl.store(all_v + (i_s * H + i_h) * V + o_v, b_all_v, mask=o_v < V)


@triton.jit(do_not_specialize=VARYING)
def mend(
    q, k, v, g, g_v, o, strong, cu, s_q, s_k, s_v, s_g, s_gv, s_o, N, T, H, sizes, scale, n_c, reverse,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    NV: tl.constexpr, PACKED: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Give o the pairs that `walk` has left out of strong tiles; `strong` [slots, H, NV]. Never `reverse` with g_v."""
    # which tiles: those of BN chunks; most find nothing to do
    K, V = size(sizes, 0), size(sizes, 1)
    first = tl.program_id(0) * BN
    o_f, o_n = first * NV + tl.arange(0, BN * NV), tl.arange(0, NV)
    if tl.max(tl.load(strong + o_f, mask=o_f < n_c * NV, other=0).to(tl.int32)) == 0:
        return
    for i in tl.range(first, tl.minimum(first + BN, n_c)):
        flags = tl.load(strong + i * NV + o_n).to(tl.int32)
        if tl.max(flags) != 0:
            i_h, i_s = i % H, i // H
            i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
            b_P = tl.zeros([C, C], dtype=tl.float32)
            for o_k in tl.range(0, K, BK):
                b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_P += scores(b_q, b_k, clamped(b_g), LEVELS, LOW, reverse)
            b_low, of_P = operand(b_P, v.dtype.element_ty)
            for i_v in tl.range(0, tl.cdiv(V, BV)):
                if tl.max(tl.where(o_n == i_v, flags, 0)) != 0:
                    b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)
                    if g_v is None:
                        b_o = tl.dot(b_low, b_v, input_precision="ieee") * of_P  # [C, BV]
                    else:
                        b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)
                        b_o = weighted(b_P, b_v, clamped(b_gv), LEVELS, LOW)  # [C, BV]
                    # store
                    b_o = b_o * scale + load_tile(o, s_o, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # fmt: skip
                    store_tile(o, b_o, s_o, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)


@triton.jit(do_not_specialize=VARYING)
def gradients(
    q, k, v, do, g, g_v, S, R, dq, dk, dg, cu, s_q, s_k, s_v, s_do, s_g, s_gv, s_dq, s_dk, s_dg, s_S,
    N, T, H, sizes, scale, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of a chunk from S before it and R, the gradient of the state after it, over scale."""
    # which tile: BK channels of a chunk of a head
    K, V = size(sizes, 0), size(sizes, 1)
    n_k = tl.cdiv(K, BK)
    i_k, i_h = tl.program_id(0) % n_k, tl.program_id(0) // n_k % H
    i_s = tl.program_id(0) // n_k // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

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
        # loaded once more, from L2: Triton gives a tile that goes to products and into registers one buffer only, and
        # refills it without a wait while products are still reading it (benchmarks/LAB.md)
        b_S2 = load_tile(S, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False, True)
        b_R2 = load_tile(R, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False, True)
        b_SR = b_S2.to(tl.float32) * b_R2  # [BK, BV]
        of_do, of_v = 1.0, 1.0
        if g_v is None:
            b_dP = tl.dot(b_do, b_v.T, b_dP, input_precision="ieee")
        else:
            b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
            up_v, down_v, first_v, last_v, through_v, mild_v = chunk_decays(
                b_gv, LIMIT, LOW, False, b_v.dtype
            )
            b_do_hat, of_do = operand(b_do * up_v, b_do.dtype, -100.0, True)
            b_v_hat, of_v = operand(b_v * down_v, b_v.dtype, -100.0, True)
            if mild_v:
                b_l, b_r = (b_do * up_v).to(b_do.dtype), (b_v * down_v).to(b_v.dtype)
                b_dP = tl.dot(b_l, b_r.T, b_dP, input_precision="ieee")
            else:
                b_dP += scores(b_do, b_v, clamped(b_gv), LEVELS, LOW)
            b_do, b_v = b_do_hat, b_v_hat
            b_S, b_R = (b_S * first_v[None, :]).to(b_S.dtype), (b_R * last_v[None, :]).to(b_R.dtype)
            b_SR *= (first_v * last_v * through_v)[None, :]
        b_S, of_S = operand(b_S, b_do.dtype)
        b_R, of_R = operand(b_R, b_do.dtype)
        b_read += tl.dot(b_do, b_S.T, input_precision="ieee") * (of_do * of_S)
        b_write += tl.dot(b_v, b_R.T, input_precision="ieee") * (of_v * of_R)
        b_kept += tl.sum(b_SR, 1)

    # load
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]

    # compute: over the chunk's pairs. For dg: b_net = q dq - k (dk of pairs), summed from t on: the paths that cross t
    # and are read in the chunk; b_later = k (dk of later chunks), summed before t: those read later (all [C, BK])
    up, down, first, last, through, mild = chunk_decays(b_g, LIMIT, LOW, False, b_q.dtype)
    b_read, b_write = b_read * first[None, :], b_write * last[None, :]
    b_A, of_A = operand(tl.where(o_i >= o_j, b_dP, 0.0), b_q.dtype)  # [C, C]
    if mild:
        b_l, b_r = (b_q * up).to(b_q.dtype), (b_k * down).to(b_k.dtype)
        b_dq = b_read + tl.dot(b_A, b_r, input_precision="ieee") * of_A
        b_dk = tl.dot(b_A.T, b_l, input_precision="ieee") * of_A
        # with the rounded factors of the products, so that what i = j adds to both sides cancels exactly
        b_net, b_later = b_l * b_dq - b_r * b_dk, b_r * b_write
        b_dq, b_dk = b_dq * up, (b_dk + b_write) * down
    else:  # i = j has no decay: it is in no level, and not in dg
        b_own = tl.sum(tl.where(o_i == o_j, b_dP, 0.0), 1)[:, None]
        b_dq, b_write = b_read * up, b_write * down
        b_dk = tl.zeros([C, BK], dtype=tl.float32)
        for level in tl.range(0, LEVELS):
            b_E = to_border(clamped(b_g), level, LOW)  # [C, BK]
            b_l, of_l = one_half(b_q * b_E, level, 1, b_q.dtype)
            b_r, of_r = one_half(b_k * b_E, level, 0, b_k.dtype)
            b_low, of_low = operand(tl.where(across(level, C), b_dP, 0.0), b_q.dtype, -100.0)
            b_dq += tl.dot(b_low, b_r, input_precision="ieee") * (b_E * (of_low * of_r))
            b_dk += tl.dot(b_low.T, b_l, input_precision="ieee") * (b_E * (of_low * of_l))
        b_net, b_later = b_q * b_dq - b_k * b_dk, b_k * b_write
        b_dq, b_dk = b_dq + b_own * b_k, b_dk + b_write + b_own * b_q

    # store
    store_tile(dq, b_dq * scale, s_dq, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    store_tile(dk, b_dk * scale, s_dk, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    if dg is not None:
        # of row t, the paths that cross t: read in the chunk, at or after t; written before t for later; state to state
        b_d = sums(o_i <= o_j, b_net, LOW) + sums(o_i > o_j, b_later, LOW)
        b_d = (b_d + (b_kept * first * last * through)[None, :]) * scale
        b_d = tl.where(b_g == float("-inf"), 0.0, b_d)
        store_tile(dg, b_d, s_dg, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)


class _Call:
    """The launches of one call, which share its sizes, its packing and its chunk length."""

    def __init__(self, hardware: Hardware, inputs: tuple[Spec | None, ...], scale, path):
        self.draft = Draft(hardware, *inputs)
        q, _, v, _, g_v, _, cu, *_ = inputs
        (self.B, self.T, self.H, self.K), self.V = q.shape, v.shape[-1]
        self.scale, self.path = contract.check_scale(scale, self.K), path
        self.cu, self.N = self.draft.contiguous(cu, torch.int32), sequences(self.B, cu)
        self.sizes = sizes_of(self.K, self.V)
        self.half, self.limit = q.dtype != torch.float32, LIMIT[q.dtype] / (1 if g_v is None else 2)
        # of bf16, tiles of 16 channels come out wrong with gates (Triton 3.6; benchmarks/LAB.md)
        least = 64 if self.half else 16
        self.BK, wide = (max(least, next_power_of_2(D)) for D in (self.K, self.V))
        self.C, BV, self.warps, *self.stages = tiles(
            WALK if g_v is None else WALK_BOTH, hardware, q.dtype, K=self.K
        )
        self.BV, self.n = min(BV, wide), slots(self.B, self.T, cu, self.C)
        self.NV = next_power_of_2(cdiv(self.V, self.BV))  # strong flags of a chunk
        # products of bf16, which the interpreter gets wrong
        low = self.half and hardware.matrix_units and not hardware.interpreted
        self.same = {"C": self.C, "PACKED": cu is not None, "LOW": low}

    def prepare(self, q: Spec, k: Spec, g: Spec) -> tuple:
        """q, k, g and (None, None) for a walk that makes q' and k' itself, else q', k', None, (decay, strong)."""
        if not self.half or self.K <= 64:
            return q, k, g, (None, None)
        self.draft.because("q' and k' are made once, for all tiles of V: K > 64")
        low = self.same["LOW"]
        q_hat, k_hat, *decay = prepare_all(self.draft, q, k, g, self.cu, self.C, self.limit, low)
        return q_hat, k_hat, None, decay

    def walk(
        self,
        q,
        k,
        v,
        g,
        g_v,
        decay,
        S_in,
        names: str,
        reverse=False,
        states=False,
        final=True,
        starts=None,
    ) -> tuple:
        """(o, final state, the states before each chunk (backwards: after it), strong tiles, starts); no o without q.

        `names` are those of the outputs, `final` says whether the final state is needed, and `starts` are the states
        that segments start from, if an earlier walk has found them; None where sequences are walked in one go.
        """
        draft, C, BV, N, T, H, K, V = (
            self.draft, self.C, self.BV, self.N, self.T, self.H, self.K, self.V,
        )  # fmt: skip
        o, S, stored, strong = names.split()
        engine = self.cu is None and all(describable(x, draft.hardware) for x in (q, k, v, g) if x)
        if q is None:
            o = strong = None
        else:
            o = draft.new(o, self.B, T, H, V, dtype=v.dtype)
            # what no program of a walk comes by: spare slots, and flags beyond the last tile of V
            unwritten = self.cu is not None or self.NV * BV >= V + BV
            strong = draft.new(strong, self.n, H, self.NV, dtype=torch.int8, zero=unwritten)
        # float16 may be too small for sums
        kept = k.dtype if k.dtype == torch.bfloat16 else torch.float32
        stored = draft.new(stored, self.n, H, K, V, dtype=kept).transposed(1, 2) if states else None
        programs = cdiv(V, BV) * H * N
        L = C * segment_length(draft, self.path, programs, cdiv(T, C))
        S = draft.new(S, N, H, K, V) if final or L <= T and starts is None else None
        s_S = Spec("", (N, H, K, V), (H * K * V, K * V, V, 1), torch.float32).transposed(1, 2)

        def walk_all(L, q, o, S_in, S_out, stored=None, all_k=None, all_v=None):
            S_in, S_out = (x if x is None else x.transposed(1, 2) for x in (S_in, S_out))
            draft.launch(
                walk, cdiv(V, BV) * H * slots(self.B, T, self.cu, L),
                *boxes(engine, C, (q, self.BK), (k, self.BK), (v, BV), (g, self.BK)), g_v, *decay,
                *boxes(engine, C, (o, BV)), S_in, S_out, *boxes(engine, self.BK, (stored, BV)), strong, all_k, all_v,
                self.cu, *patterns(self.sizes, q, k, v, g, g_v, o, s_S), N, T, L, H, self.sizes,
                self.scale, BK=self.BK, BV=BV, NV=self.NV, TMA=engine, REVERSE=reverse, LIMIT=self.limit, **self.same,
                num_warps=self.warps, num_stages=self.stages[int(states)],
            )  # fmt: skip

        if L > T:  # in one go
            walk_all(L, q, o, S_in, S, stored)
            return o, S, stored, strong, None
        if (
            starts is None
        ):  # what each segment adds to the state, and what carrying that on makes of it
            n = slots(self.B, T, self.cu, L)
            starts, all_k = (
                draft.new("starts", n, H, K, V),
                draft.new("all_k", n, H, K),
            )
            all_v = None if g_v is None else draft.new("all_v", n, H, V)
            walk_all(L, None, None, None, starts, None, all_k, all_v)
            carry_states(draft, starts, all_k, all_v, S_in, S, self.cu, T, L, reverse)
        walk_all(L, q, o, starts, None, stored)
        return o, S, stored, strong, starts

    def mend(self, q, k, v, g, g_v, o, strong, reverse=False) -> None:
        """Adds to o what `walk` has left out."""
        self.draft.launch(
            mend, cdiv(self.n * self.H, 16),
            q, k, v, g, g_v, o, strong, self.cu, *patterns(self.sizes, q, k, v, g, g_v, o), self.N, self.T, self.H,
            self.sizes, self.scale, self.n * self.H, int(reverse), LEVELS=self.C.bit_length() - 1,
            BK=min(MEND[self.draft.hardware.family], self.BK), BV=self.BV, BN=16, NV=self.NV, **self.same,
            num_warps=4, num_stages=1,
        )  # fmt: skip

    def gradients(self, q, k, v, do, g, g_v, S, R, names: str, need_dg: bool) -> tuple:
        """dq, dk and dg (None when not needed) from the states at every chunk's ends, [..., K, H, V]."""
        K, V, draft = q.shape[-1], v.shape[-1], self.draft
        sizes = sizes_of(K, V)
        table = GRADIENTS if g_v is None else GRADIENTS_BOTH
        B, warps, most = table[draft.hardware.family, 8 * q.dtype.itemsize]
        stages = 1
        # not with g_v: Triton would refill v's buffer before the strong branch reads it
        if self.half and V > B and g_v is None:
            # for states in float32 there is no room
            stages = min(most, 3 if S.dtype == torch.bfloat16 else 2)
        dq, dk, dg = names.split()
        dq, dk, dg = draft.like(dq, q), draft.like(dk, k), draft.like(dg, g) if need_dg else None
        draft.launch(
            gradients, cdiv(K, B) * self.H * self.n,
            q, k, v, do, g, g_v, S, R, dq, dk, dg, self.cu, *patterns(sizes, q, k, v, do, g, g_v, dq, dk, dg, S),
            self.N, self.T, self.H, sizes, self.scale, LEVELS=self.C.bit_length() - 1, BK=B, BV=B,
            LIMIT=self.limit, **self.same, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return dq, dk, dg


def plan_forward(hardware: Hardware, q, k, v, g, g_v, S, cu, scale, path, kernel) -> Plan:
    """(o, final state, starts) of specs of the tensors; `kernel` has one choice today."""
    call = _Call(hardware, (q, k, v, g, g_v, S, cu), scale, path)
    S_in = call.draft.contiguous(S, torch.float32)
    q_hat, k_hat, g_hat, decay = call.prepare(q, k, g)
    names = "o S_T _ strong"
    o, S_T, _, strong, starts = call.walk(q_hat, k_hat, v, g_hat, g_v, decay, S_in, names)
    call.mend(q, k, v, g, g_v, o, strong)
    return call.draft.plan("portable", o, S_T, starts)


def plan_backward(
    hardware: Hardware, q, k, v, g, g_v, S, cu, starts, do, dS, scale, path, kernel, need_dg
) -> Plan:
    """(dq, dk, dv, dg, dg_v, dS0); None for what is not given or, of dg, not needed. `starts` may be None."""
    call = _Call(hardware, (q, k, v, g, g_v, S, cu, starts, do, dS), scale, path)
    draft = call.draft
    # the gradient of a sum has strides of 0
    if describable(v, hardware) and not describable(do, hardware):
        do = draft.contiguous(do)
    if call.scale == 0:  # then o says nothing, the final state all the same
        do, call.scale = draft.new("0", *do.shape, dtype=do.dtype, zero=True), 1.0
    # all that a walk reads is multiplied by scale, which dS has no part in
    R = None if dS is None else draft.compute(draft.spec("R", *dS.shape), _over, dS, call.scale)
    q_hat, k_hat, g_hat, decay = call.prepare(q, k, g)
    S_in = draft.contiguous(S, torch.float32)
    _, _, states, _, _ = call.walk(
        None,
        k_hat,
        v,
        g_hat,
        g_v,
        decay,
        S_in,
        "_ S_T states _",
        states=True,
        final=False,
        starts=starts,
    )
    reads = k_hat if g_v is None else None
    dv, R_0, dstates, strong, _ = call.walk(
        reads, q_hat, do, g_hat, g_v, decay, R, "dv R_0 dstates strong", reverse=True, states=True,
        final=S is not None,
    )  # fmt: skip
    dg_v = None
    if g_v is None:
        call.mend(k, q, do, g, g_v, dv, strong, True)
    else:  # keys and values exchanged, and in the states too: [..., V, H, K]
        turned = [x.transposed(1, 3) for x in (states, dstates)]
        _, dv, dg_v = call.gradients(do, v, k, q, g_v, g, *turned, "_do dv dg_v", True)
    dq, dk, dg = call.gradients(q, k, v, do, g, g_v, states, dstates, "dq dk dg", need_dg)
    dS0 = None
    if S is not None:
        dS0 = draft.compute(draft.spec("dS0", *R_0.shape), torch.mul, R_0, call.scale)
    return draft.plan("portable", dq, dk, dv, dg, dg_v, dS0)


def _over(dS: Tensor, scale: float) -> Tensor:
    return (dS / scale).contiguous()


def check(q, k, v, g, g_v, initial_state, cu_seqlens, scale, path, kernel) -> None:
    """What a call of a new signature is held against.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    tensors = q, k, v, g, g_v
    check_call("gla", tensors, initial_state, cu_seqlens, scale, {"K": 256, "V": 512})
    check_choice("path", path, PATHS)
    check_choice("kernel", kernel, KERNELS)


TENSORS = (*(x.name for x in MECHANISMS["gla"].arguments), "initial_state", "cu_seqlens")
CHOICES = ("scale", "path", "kernel")
forward = Planned(plan_forward, TENSORS, CHOICES, check)
backward = Planned(plan_backward, (*TENSORS, "starts", "do", "dS"), (*CHOICES, "need_dg"))
ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? g_v, Tensor? S, Tensor? cu"
OPTIONS = "float? scale, str? path, str? kernel"
_forward = Operator("gla", forward, f"({ARGUMENTS}, {OPTIONS}) -> (Tensor, Tensor)")
_backward = Operator(
    "gla_backward",
    backward,
    f"({ARGUMENTS}, Tensor? starts, Tensor do, Tensor? dS, {OPTIONS}, bool need_dg) -> Tensor[]",
)


@_forward.register_fake
def _(q, k, v, g, g_v, S, cu, scale, path, kernel):
    N = q.shape[0] if cu is None else cu.shape[0] - 1
    return v.new_empty(v.shape), q.new_empty(N, *q.shape[2:], v.shape[-1], dtype=torch.float32)


@_backward.register_fake
def _(q, k, v, g, g_v, S, cu, starts, do, dS, scale, path, kernel, need_dg):
    like = [q, k, v, g if need_dg else None, g_v]
    dS0 = None if S is None else S.new_empty(S.shape, dtype=torch.float32)
    return given([*(x if x is None else x.new_empty(x.shape) for x in like), dS0], q)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.path, ctx.kernel = inputs
    _, _, *starts = output
    ctx.save_for_backward(*tensors, *starts or [None])
    ctx.set_materialize_grads(False)  # the final state seldom has a gradient


def _gradients(ctx, do, dS):
    saved = ctx.saved_tensors
    _, _, v, _, g_v, S, *_ = saved
    do, need_dg = torch.zeros_like(v) if do is None else do, ctx.needs_input_grad[3]
    dq, dk, dv, dg, dg_v, dS0 = _backward(*saved, do, dS, ctx.scale, ctx.path, ctx.kernel, need_dg)
    return (
        dq, dk, dv, dg if need_dg else None, None if g_v is None else dg_v, None if S is None else dS0,
        *[None] * 4,
    )  # fmt: skip


_forward.register_autograd(_save, _gradients)


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, g_v: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, path: str | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gated Linear Attention, differentiable; right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 512.
        g: natural log gates on the key axis, `[B, T, H, K]`, in any of the three dtypes.
        g_v: natural log gates on the value axis, `[B, T, H, V]`, or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and g_v, are looked at under GLA_REF_DEBUG=1 only.
        path: "fused" (a sequence in one go) or "segmented"; None chooses by
            :func:`gla_ref.kernels.linear_attention.choose_path`.
        kernel: "portable"; None lets the plan choose, which :func:`gla_ref.kernels.explain` prints.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.
        float16 bears q and k (with g_v, v and the gradient of o too) up to 3000 in size, since a mild chunk's decay
        multiplies them by up to e^3; scores and states may be of any size that float32 bears. In a strong chunk
        a token reads 0 of what has decayed to less than 6e-8 since the chunk's first token.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    scale = scale if scale is None else contract.check_scale(scale, 1)
    o, S, *_ = _forward(q, k, v, g, g_v, initial_state, cu_seqlens, scale, path, kernel)
    return o, S
