"""Gated Linear Attention with a second gate, on the value axis: forward and gradient (chapter 13).

    S_t = (alpha_t^T alpha^v_t) * S_(t-1) + k_t^T v_t

g_v fades values and outputs as g fades keys and queries. With w the running sum of g_v in the
chunk and u = w_C / 2, the chunk of gla_forward.py becomes:

    v' = v e^(u - w),  S'' = e^r S e^u,  o = scale * (q' S'' + tril(q' k'^T) v') e^(w - u)      (1)
    S <- e^(b_C - r) (S'' + k'^T v') e^(w_C - u)                                                (2)

A chunk is strong if either gate is strong in it. `prepare` always makes q' and k'. Each sequence is walked in one go,
whatever `path` asks for. The models of the GLA paper do not use this form, and no other kernel builds on this file.

The kernels, and the number of programs of each (N sequences)::

    prepare                            as in gla_forward.py
    walk       V tiles * H * N         a head's chunks: o, or states
    mend       H * chunks / 16         adds to o the pairs of strong tiles
    gradients  tiles * H * chunks      dq, dk, dg; and with the two axes exchanged do, dv, dg_v

Reference: :mod:`gla_ref.gla`; GLA paper, section 4.1, general form. Limits: K <= 256, V <= 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, Spec, boxes, cdiv, next_power_of_2
from . import gla_forward
from ._arguments import stride_patterns
from .gla_forward import GlaCall, Readers, chunk_decays, clamped, gates_to_border, to_border
from .gla_gradient import GRADIENTS, across, crossing, one_half, pairs
from .segments import which_segment, which_sequence
from .tiles import VARYING, load_tile, operand, pattern, product, store_tile, which_tile

# as in gla_forward.py and gla_gradient.py, except tiles that would spill
TILES = gla_forward.WALK | {
    ("ampere", 16): {64: (16, 32, 4, 1, 1), 128: (16, 32, 4, 1, 1), 256: (16, 32, 8, 1, 1)}
}
GRADIENT_TILES = GRADIENTS | {("ampere", 16): (32, 8, 1)}


@triton.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, g_v, factors, strong_k, strong, o, S_in, S_out, states, cu,
    s_q, s_k, s_v, s_gv, s_o, s_S, N, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TMA: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, LIMIT: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Walk a sequence like `gla_forward.walk`; `strong` [chunks, H, NV] has a flag for each V tile."""
    # which tile
    i_v, i_h, i_n = which_tile(H, V, BV)
    i_b, begin, end = which_sequence(cu, i_n, T, PACKED)
    n_c = tl.cdiv(end - begin, C)
    i_0 = begin // C + i_n if PACKED else i_n * tl.cdiv(T, C)
    o_k, o_c = tl.arange(0, BK), tl.arange(0, C)
    seen = o_c[:, None] <= o_c[None, :] if REVERSE else o_c[:, None] >= o_c[None, :]  # [C, C]
    FLOAT16: tl.constexpr = (v.dtype if TMA else v.dtype.element_ty) == tl.float16
    FIRST: tl.constexpr = 2 if REVERSE and FLOAT16 else 0  # the place of a chunk's rows of `factors`
    LAST: tl.constexpr = 2 if FLOAT16 and not REVERSE else 0

    # load
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += load_tile(S_in, s_S, i_n, i_h, 0, K, i_v * BV, V, BK, BV, False)  # [BK, BV]

    for i in tl.range(0, n_c):
        i_c = n_c - 1 - i if REVERSE else i
        i_d = ((i_0 + i_c) * H + i_h).to(tl.int64)
        o_t = begin + i_c * C

        # load
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, end, i_v * BV, V, C, BV, False)  # [C, BV]
        p_d = factors + i_d * 3 * K + o_k
        first = tl.load(p_d + FIRST * K, mask=o_k < K, other=1.0)  # [BK]
        through = tl.load(p_d + K, mask=o_k < K, other=1.0)  # [BK]
        last = tl.load(p_d + LAST * K, mask=o_k < K, other=1.0)  # [BK]

        # compute
        read_v, write_v, first_v, last_v, through_v, mild_v = chunk_decays(b_gv, LIMIT, FAST_SUMS, REVERSE, b_v.dtype)
        mild = (tl.load(strong_k + i_d) == 0) & mild_v
        b_v = (b_v * write_v).to(b_v.dtype)
        if states is not None:
            store_tile(states, b_S, s_S, i_0 + i_c, i_h, 0, K, i_v * BV, V, BK, BV, TMA)
        b_S = b_S * first[:, None] * first_v[None, :]
        if o is not None:  # (1)
            b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
            b_o = product(b_q, b_S)  # [C, BV]
            b_o = product(tl.where(seen & mild, b_P, 0.0), b_v, b_o) * read_v
            store_tile(o, b_o * scale, s_o, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)
            tl.store(strong + i_d * NV + i_v, (mild == 0).to(tl.int8))
        b_S *= through[:, None] * through_v[None, :]  # (2)
        b_S = tl.dot(b_k.T, b_v, b_S, input_precision="ieee")
        b_S = b_S * last[:, None] * last_v[None, :]

    # store
    if S_out is not None:
        store_tile(S_out, b_S, s_S, i_n, i_h, 0, K, i_v * BV, V, BK, BV, False)


@triton.jit(do_not_specialize=VARYING)
def mend(
    q, k, v, g, g_v, o, strong, cu, s_q, s_k, s_v, s_g, s_gv, s_o, N, T, H, K, V, scale, n_flags,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    NV: tl.constexpr, PACKED: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Add to o the pairs of strong tiles; `strong` [n_flags, NV]."""
    # which chunks: BN of them, most of them not strong
    first = tl.program_id(0) * BN
    o_f, o_n = first * NV + tl.arange(0, BN * NV), tl.arange(0, NV)
    if tl.max(tl.load(strong + o_f, mask=o_f < n_flags * NV, other=0).to(tl.int32)) == 0:
        return
    for i in tl.range(first, tl.minimum(first + BN, n_flags)):
        flags = tl.load(strong + i * NV + o_n).to(tl.int32)
        if tl.max(flags) != 0:
            i_h, i_s = i % H, i // H
            i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
            b_P = tl.zeros([C, C], dtype=tl.float32)
            for o_k in tl.range(0, K, BK):
                b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_P += scores(b_q, b_k, clamped(b_g), LEVELS, FAST_SUMS)
            for i_v in tl.range(0, tl.cdiv(V, BV)):
                if tl.max(tl.where(o_n == i_v, flags, 0)) != 0:
                    o_v = i_v * BV
                    b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                    b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, stop, o_v, V, C, BV, False)
                    b_o = load_tile(o, s_o, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                    b_o += weighted(b_P, b_v, clamped(b_gv), LEVELS, FAST_SUMS) * scale
                    store_tile(o, b_o, s_o, i_b, i_h, o_t, stop, o_v, V, C, BV, False)


@triton.jit
def scores(b_q, b_k, b_g, LEVELS: tl.constexpr, FAST: tl.constexpr):
    """Scores [C, C] of a strong chunk: of each token with itself, then level by level."""
    C: tl.constexpr = b_q.shape[0]
    o_c = tl.arange(0, C)
    b_own = tl.dot(b_q, b_k.T, input_precision="ieee")
    b_P = tl.where(o_c[:, None] == o_c[None, :], b_own, 0.0)
    for level in tl.range(0, LEVELS):
        b_E = to_border(b_g, gates_to_border(level, C), FAST)  # [C, D]
        b_l, of_l = one_half(b_q * b_E, level, 1, b_q.dtype)
        b_r, of_r = one_half(b_k * b_E, level, 0, b_k.dtype)
        b_pairs = tl.dot(b_l, b_r.T, input_precision="ieee") * (of_l * of_r)
        b_P += tl.where(across(level, C), b_pairs, 0.0)
    return b_P


@triton.jit
def weighted(b_P, b_v, b_g, LEVELS: tl.constexpr, FAST: tl.constexpr):
    """P v of a strong chunk, [C, D], with every value's decay from token to token."""
    o_c = tl.arange(0, b_v.shape[0])
    b_o = product(tl.where(o_c[:, None] == o_c[None, :], b_P, 0.0), b_v)
    for level in tl.range(0, LEVELS):
        b_E = to_border(b_g, gates_to_border(level, b_v.shape[0]), FAST)  # [C, D]
        b_A = tl.where(across(level, b_v.shape[0]), b_P, 0.0)
        b_o += product(b_A, (b_v * b_E).to(b_v.dtype)) * b_E
    return b_o


@triton.jit(do_not_specialize=VARYING)
def gradients(
    q, k, v, do, g, g_v, S, R, dq, dk, dg, cu, s_q, s_k, s_v, s_do, s_g, s_gv, s_d, s_S,
    N, T, H, K, V, scale, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Make gradients like `gla_gradient.gradients`; with (q, k, g) and (do, v, g_v) exchanged: do, dv and dg_v."""
    # which tile: BK channels of a chunk of a head
    i_k, i_h, i_s = which_tile(H, K, BK)
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return

    # compute: over all of V
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    b_read, b_write = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_kept = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_S = load_tile(S, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
        b_R = load_tile(R, s_S, i_s, i_h, i_k * BK, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
        b_gv = load_tile(g_v, s_gv, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        read_v, write_v, first_v, last_v, through_v, mild_v = chunk_decays(b_gv, LIMIT, FAST_SUMS, False, b_v.dtype)
        if mild_v:
            b_l, b_r = (b_do * read_v).to(b_do.dtype), (b_v * write_v).to(b_v.dtype)
            b_dP = tl.dot(b_l, b_r.T, b_dP, input_precision="ieee")
        else:
            b_dP += scores(b_do, b_v, clamped(b_gv), LEVELS, FAST_SUMS)
        b_SR = b_S.to(tl.float32) * b_R * (first_v * last_v * through_v)[None, :]
        b_l, of_l = operand(b_do * read_v, b_do.dtype, -100.0, True)  # [C, BV]; rows are scaled one by one
        b_r, of_r = operand(b_v * write_v, b_v.dtype, -100.0, True)
        b_S, of_S = operand((b_S * first_v[None, :]).to(S.dtype.element_ty), b_do.dtype)
        b_R, of_R = operand((b_R * last_v[None, :]).to(R.dtype.element_ty), b_do.dtype)
        b_read += tl.dot(b_l, b_S.T, input_precision="ieee") * (of_l * of_S)
        b_write += tl.dot(b_r, b_R.T, input_precision="ieee") * (of_r * of_R)
        b_kept += tl.sum(b_SR, 1)

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


def launch_walk(
    call: GlaCall, g_v: Spec, x: Readers, v: Spec, reverse: bool, S_in, S_out, o=None, strong=None, states=None
) -> None:
    """Launch `walk` over all sequences; with o, `walk` sets flags in `strong`."""
    C, BK, BV, H, K, V = call.C, call.BK, call.BV, call.H, call.K, call.V
    q = x.q if o else None
    engine, s = call.by_engine(q, x.k, v), stride_patterns(q=q, k=x.k, v=v, gv=g_v, o=o)
    q, k, v, o = boxes(engine, C, (q, BK), (x.k, BK), (v, BV), (o, BV))
    call.launch(
        walk, cdiv(V, BV) * H * call.N,
        q=q, k=k, v=v, g_v=g_v, factors=x.factors, strong_k=x.strong, strong=strong, o=o, S_in=S_in, S_out=S_out,
        states=boxes(engine, BK, (states, BV))[0], **s, s_S=pattern(H * K * V, V, K * V, 1),
        NV=tiles_of_v(call), TMA=engine, REVERSE=reverse, LIMIT=call.limit,
        num_warps=call.warps, num_stages=call.stages[int(states is not None)],
    )


def tiles_of_v(call: GlaCall) -> int:
    """The number of a chunk's flags: one for each tile of V, rounded up to a power of two."""
    return next_power_of_2(cdiv(call.V, call.BV))


def launch_gradients(call: GlaCall, q, k, v, do, g, g_v, S, R, dq: str, dk: str, dg: str) -> tuple:
    """Launch `gradients`: dq, dk and dg by their names; without a name for dg, no dg."""
    draft, K, V = call.draft, q.shape[-1], v.shape[-1]  # of the exchanged axes
    dq, dk, dg = draft.like(dq, q), draft.like(dk, k), draft.like(dg, g) if dg else None
    B, warps, _ = GRADIENT_TILES[draft.hardware.family, 8 * q.dtype.itemsize]
    call.launch(
        gradients, cdiv(K, B) * call.H * call.chunks,
        q=q, k=k, v=v, do=do, g=g, g_v=g_v, S=S, R=R, dq=dq, dk=dk, dg=dg,
        **stride_patterns(q=q, k=k, v=v, do=do, g=g, gv=g_v, d=dq, S=S), K=K, V=V,
        LEVELS=call.levels, BK=B, BV=B, LIMIT=call.limit,
        # one stage: Triton would refill v's buffer before the strong branch reads it
        num_warps=warps, num_stages=1,
    )
    return dq, dk, dg


def start(draft: Draft, call) -> GlaCall:
    """Begin a call whose plan is `draft`."""
    shared = gla_forward.begin(draft, call.q, call.v, call.cu_seqlens, call.scale, "fused", TILES)
    draft.because("gates on values: each sequence in one go")
    return shared._replace(limit=shared.limit / 2)  # k'^T v' has the factors of both gates


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, final state, None)."""
    draft, q, k, v, g, g_v = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.g_v
    shared, S_in = start(draft, call), draft.contiguous(call.initial_state, torch.float32)
    x, H, K, V, NV = gla_forward.prepared(shared, q, k, g), shared.H, shared.K, shared.V, tiles_of_v(shared)
    # zeros: no program writes the flags of spare slots, or flags beyond the last tile of V
    strong = draft.new("strong_v", shared.chunks, H, NV, dtype=torch.int8, zero=True)
    o, S = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", shared.N, H, K, V)
    launch_walk(shared, g_v, x, v, False, S_in, S, o, strong)
    shared.launch(
        mend, cdiv(shared.chunks * H, 16),
        q=q, k=k, v=v, g=g, g_v=g_v, o=o, strong=strong, **stride_patterns(q=q, k=k, v=v, g=g, gv=g_v, o=o),
        n_flags=shared.chunks * H, LEVELS=shared.levels, BK=min(gla_forward.MEND[hardware.family], shared.BK),
        BN=16, NV=NV, num_warps=4, num_stages=1,
    )
    return draft.plan("portable", o, S, None)


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dg_v, dS0); None for a tensor not given and a dg not needed."""
    draft, q, k, v, g, g_v = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.g_v
    S, (shared, do, R) = call.initial_state, gla_forward.begin_backward(start(draft, call), v, call.do, call.dS)
    x, S_in = gla_forward.prepared(shared, q, k, g), draft.contiguous(S, torch.float32)
    states, dstates = (gla_forward.kept_states(shared, name, v) for name in ("states", "dstates"))
    R_0 = draft.new("R_0", shared.N, shared.H, shared.K, shared.V) if S else None
    launch_walk(shared, g_v, x, v, False, S_in, None, states=states)
    launch_walk(shared, g_v, x._replace(q=x.k, k=x.q), do, True, R, R_0, states=dstates)
    # exchange keys and values, in the states too: [..., V, H, K]
    of_v = [y.transposed(1, 3) for y in (states, dstates)]
    _, dv, dg_v = launch_gradients(shared, do, v, k, q, g_v, g, *of_v, "_do", "dv", "dg_v")
    dq, dk, dg = launch_gradients(shared, q, k, v, do, g, g_v, states, dstates, "dq", "dk", "dg" * call.need_dg)
    dS0 = draft.compute("dS0", torch.mul, R_0, shared.scale)
    return draft.plan("portable", dq, dk, dv, dg, dg_v, dS0)
