"""The gradient of Kimi Delta Attention, chunk by chunk (chapter 24).

With S the state before a chunk, R the gradient of the state after it (over scale, which comes last), and the names of
kda_forward.py::

    d = P^T do + k~ R        r = Y^T d        dv = beta r                                                   (1)
    R <- diag(e^(b_C)) R + q^^T do - k^^T dv                                                                (2)
    F = tril(do w^T)         G = -tril(r w^T, -1)                                                           (3)
    dq_i = scale * (sum_j F_ij d_ij k_j + e^(b_i) (do S^T)_i)                                               (4)
    x_i = sum_(j < i) G_ij d_ij k_j - e^(b_i) (r S^T)_i            what k_i reads, over beta_i              (5)
    dk_j = scale * (beta_j x_j + sum_i d_ij (F_ij q_i + G_ij beta_i k_i) + e^(b_C - b_j) (w R^T)_j)         (6)
    dbeta_i = scale * (r_i v_i + k_i x_i)                                                                   (7)
    dg_t = scale * (the paths across t: pairs j < t <= i of F and G, reads of the state from t on, writes   (8)
           before t for later chunks, and from state to state e^(b_C) sum_v S R)

A gradient passes the inverse by one more product with it, Y^T d, as in delta_gradient.py, whose `walk_back` makes (1)
without dv, and (2). Pairs of keys are not needed again. Pairs of (4) to (6) have the anchors of kda_forward.py. In (8)
those that meet at a border are rows from t on or columns before t, sums of what counts; those that are anchored in the
middle of a block are rows less columns, both of the same rounded numbers, which cancel to float32.

The kernels, in addition to those of kda_forward.py and delta_gradient.py (H value heads)::

    gradients    K tiles * H * chunks    (3) to (8), and dv
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, cdiv
from ._arguments import stride_patterns
from ._factors import BETA, factor, square
from .delta_forward import DeltaCall, state_strides
from .delta_gradient import GRADIENTS, Local, Made, both_walks, finish, over_states, over_values
from .gla_forward import clamped, gates_to_border, sums, to_border
from .gla_gradient import across, one_half
from .kda_forward import constants, from_middle, prepare_all, since_until
from .segments import which_segment
from .tiles import FLOOR, STAY, VARYING, load_tile, operand, store_tile, which_tile


@triton.jit
def of_pairs(b_F, b_G, right, left_q, left_k, dtype: tl.constexpr):
    """F right, G right, F^T left_q + G^T left_k; a factor in float16 is (rounded, its size)."""
    b_F, of_F = operand(b_F, dtype, -100.0)
    b_G, of_G = operand(b_G, dtype, -100.0)
    x_q = tl.dot(b_F, right[0], input_precision="ieee") * (of_F * right[1])
    x_k = tl.dot(b_G, right[0], input_precision="ieee") * (of_G * right[1])
    x_w = tl.dot(b_F.T, left_q[0], input_precision="ieee") * (of_F * left_q[1])
    x_w += tl.dot(b_G.T, left_k[0], input_precision="ieee") * (of_G * left_k[1])
    return x_q, x_k, x_w


@triton.jit
def crossed_at_border(level, C: tl.constexpr):
    """Mask [C, C] of the rows from t on, or the columns before t, of the half of its block that t is in."""
    o_c = tl.arange(0, C)
    t, s = o_c[:, None], o_c[None, :]
    second = ((t >> level) & 1) == 1
    return ((t >> level) == (s >> level)) & ((second & (s >= t)) | ((second == 0) & (s < t)))


@triton.jit
def at_border(b_dq, b_x, b_dk, b_dg, b_F, b_G, b_q, b_k, b_kb, b_g, level, FAST: tl.constexpr):
    """Add the pairs that meet at a level to dq, x, dk and dg; b_kb is beta k."""
    C: tl.constexpr = b_q.shape[0]
    dtype: tl.constexpr = b_q.dtype
    met, b_E = across(level, C), to_border(b_g, gates_to_border(level, C), FAST)  # [C, C], [C, BK]
    right = one_half(b_k * b_E, level, 0, dtype)
    left_q, left_k = one_half(b_q * b_E, level, 1, dtype), one_half(b_kb * b_E, level, 1, dtype)
    x_q, x_k, x_w = of_pairs(tl.where(met, b_F, 0.0), tl.where(met, b_G, 0.0), right, left_q, left_k, dtype)
    x_q, x_k, x_w = x_q * b_E, x_k * b_E, x_w * b_E
    b_dg += sums(crossed_at_border(level, C), b_q * x_q + b_kb * x_k + b_k * x_w, FAST)
    return b_dq + x_q, b_x + x_k, b_dk + x_w, b_dg


@triton.jit(do_not_specialize=VARYING)
def gradients(
    q, k, v, do, g, factors, writes, r, states, dstates, dq, dk, dv, dg, dbeta, cu,
    s_q, s_k, s_v, s_do, s_g, s_w, s_d, s_S, B, N, T, H, G, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Make (3) to (8) of a chunk; dg is None if the caller needs none. dbeta [K tiles, B, T, H] are parts of a sum."""
    # which tile: BK channels of a chunk of a value head
    i_k, i_h, i_s = which_tile(H, K, BK)
    o_k = i_k * BK
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]
    o_r = o_t + o_c
    dtype: tl.constexpr = q.dtype.element_ty
    b_beta = tl.load(factor(factors, i_s, i_h, H, C, ROWS) + BETA * C)  # [C]

    # compute: (3), dv and r v of (7), over V
    b_F, b_G, b_dbeta = over_values(
        v, do, writes, r, dv, s_v, s_do, s_w, i_b, i_h, o_t, stop, V, b_beta * scale, i_k == 0, dtype, C, BV
    )
    b_own = tl.sum(tl.where(i == j, b_F, 0.0), 1)[:, None]  # i = j crosses no gate
    b_F, b_G = tl.where(i > j, b_F, 0.0), tl.where(i > j, b_G, 0.0)

    # (4) to (8)
    b_dq, b_x, b_dk, b_kept = over_states(
        do, writes, r, states, dstates, s_do, s_w, s_S, i_b, i_h, i_s, o_t, stop, o_k, K, V, dtype, C, BK, BV
    )
    b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
    b_raw = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
    b_g, b_kb = clamped(b_raw), b_k.to(tl.float32) * b_beta[:, None]
    # the state
    since, until, through = since_until(b_g, FAST_SUMS)
    b_dq, b_x, b_dk = b_dq * since, b_x * since, b_dk * until
    b_dg = sums(i <= j, b_q * b_dq + b_kb * b_x, FAST_SUMS) + sums(i > j, b_k * b_dk, FAST_SUMS)
    b_dg += (b_kept * through)[None, :]
    # pairs of a block of 16, then pairs that meet at borders between blocks
    z, total = from_middle(b_g, FAST_SUMS)
    if tl.min(tl.min(total, 1), 0) >= LIMIT:
        same, E_i, E_j = (i >> 4) == (j >> 4), tl.exp2(z), tl.exp2(-z)
        q_i, k_i, k_j = operand(b_q * E_i, dtype), operand(b_kb * E_i, dtype), operand(b_k * E_j, dtype)
        x_q, x_k, x_w = of_pairs(tl.where(same, b_F, 0.0), tl.where(same, b_G, 0.0), k_j, q_i, k_i, dtype)
        b_net = x_q * q_i[0] * q_i[1] + x_k * k_i[0] * k_i[1] - x_w * k_j[0] * k_j[1]
        b_dg += sums(same & (i <= j), b_net, FAST_SUMS)
        b_dq, b_x, b_dk = b_dq + E_i * x_q, b_x + E_i * x_k, b_dk + E_j * x_w
    else:
        for level in tl.range(0, 4):
            b_dq, b_x, b_dk, b_dg = at_border(
                b_dq, b_x, b_dk, b_dg, b_F, b_G, b_q, b_k, b_kb, b_g, level, FAST_SUMS
            )
    for level in tl.range(4, LEVELS):
        b_dq, b_x, b_dk, b_dg = at_border(b_dq, b_x, b_dk, b_dg, b_F, b_G, b_q, b_k, b_kb, b_g, level, FAST_SUMS)
    b_dbeta += tl.sum(b_k * b_x, 1)
    b_dq, b_dk = b_dq + b_own * b_k, b_dk + b_own * b_q + b_x * b_beta[:, None]
    # store
    store_tile(dq, b_dq * scale, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
    store_tile(dk, b_dk * scale, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
    if dg is not None:  # no path crosses g = -inf
        b_dg = tl.where(b_raw == float("-inf"), 0.0, b_dg * scale)
        store_tile(dg, b_dg, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
    p_dbeta = dbeta + ((i_k * B + i_b).to(tl.int64) * T + o_r) * H + i_h
    tl.store(p_dbeta, b_dbeta * scale, mask=o_r < stop)


@triton.jit(do_not_specialize=VARYING)
def mend_gradients(
    q, k, g, do, Ts, w, e, is_mild, strong, dq, dk, dg, cu, s_q, s_k, s_g, s_do, s_d,
    n_flags, n_programs, N, T, H, G, scale,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
):
    """Add what hopper/kda_gradients.py leaves out: the own pairs of strong blocks; dg of closed gates becomes 0.

    Ts, w, e [chunks * H, C, ...] are T, w and -dw of chunks, `is_mild` [chunks * H, C / 16, K] is 0 where pairs are
    left out, `strong` [n_flags] is 1 for a chunk that has such blocks.
    """
    # which chunks: at most 64, most of them not strong, far apart since neighbours are often strong together
    i_0 = tl.program_id(0)
    o_n = i_0 + n_programs * tl.arange(0, 64)
    if tl.max(tl.load(strong + o_n, mask=o_n < n_flags, other=0)) == 0:
        return
    o_c, o_v = tl.arange(0, C), tl.arange(0, V)
    i, j = o_c[:, None], o_c[None, :]
    for n in tl.range(i_0, n_flags, n_programs):
        if tl.load(strong + n) != 0:
            i_h, i_s = n % H, n // H
            i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
            # compute: F and G, from -dv
            o_w = (i_s * H + i_h).to(tl.int64) * C * V + i * V + o_v[None, :]
            b_w, b_e = tl.load(w + o_w), tl.load(e + o_w)  # [C, V]
            b_e = tl.dot(tl.trans(tl.load(square(Ts, i_s, i_h, H, C))), b_e, input_precision="ieee").to(b_w.dtype)
            b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, 0, V, C, V, False)  # [C, V]
            b_F = tl.where(i > j, tl.dot(b_do, b_w.T, input_precision="ieee"), 0.0)
            b_G = tl.where(i > j, tl.dot(b_e, b_w.T, input_precision="ieee"), 0.0)
            for o_k in tl.range(0, K, BK):
                b_raw = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                p_mild = is_mild + ((i_s * H + i_h).to(tl.int64) * (C // 16) + (i >> 4)) * K
                left_out = tl.load(p_mild + (o_k + tl.arange(0, BK))[None, :]) == 0  # [C, BK]
                b_q, b_k = tl.where(left_out, b_q, 0.0).to(b_w.dtype), tl.where(left_out, b_k, 0.0).to(b_w.dtype)
                b_dq, b_x = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
                b_dk, b_dg = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
                for level in tl.range(0, 4):
                    b_dq, b_x, b_dk, b_dg = at_border(
                        b_dq, b_x, b_dk, b_dg, b_F, b_G, b_q, b_k, b_k, clamped(b_raw), level, True
                    )
                b_dq, b_dk, b_dg = b_dq * scale, (b_dk + b_x) * scale, b_dg * scale
                b_dq += load_tile(dq, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                b_dk += load_tile(dk, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                store_tile(dq, b_dq, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                store_tile(dk, b_dk, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                if dg is not None:  # no path crosses a gate below FLOOR
                    b_dg += load_tile(dg, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
                    b_dg = tl.where(b_raw.to(tl.float32) < FLOOR, 0.0, b_dg)
                    store_tile(dg, b_dg, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)


def launch_mend(draft: Draft, q, k, g, do, Ts, w, e, is_mild, strong, dq, dk, dg, cu, N: int, G: int, scale) -> None:
    """`mend_gradients`. Older assemblers misplace operands of products of 32 channels (lab/known.md)."""
    n, C, (_, T, H, K), V = strong.shape[0], w.shape[1], dq.shape, do.shape[3]
    n_programs = max(cdiv(n, 64), min(n, 2 * draft.hardware.multiprocessors))
    draft.launch(
        mend_gradients, n_programs,
        q=q, k=k, g=g, do=do, Ts=Ts, w=w, e=e, is_mild=is_mild, strong=strong, dq=dq, dk=dk, dg=dg, cu=cu,
        **stride_patterns(q=q, k=k, g=g, do=do, d=dq), n_flags=n, n_programs=n_programs, N=N, T=T, H=H, G=G,
        scale=scale, C=C, K=K, V=V, BK=32 if STAY else 64, PACKED=cu is not None, num_warps=4, num_stages=1,
    )


def launch_gradients(call: DeltaCall, x: Local, made: Made) -> None:
    """`gradients` of all chunks."""
    BK, BV, warps = GRADIENTS[call.draft.hardware.family, 8 * x.q.dtype.itemsize]
    call.launch(
        gradients, cdiv(call.K, BK) * call.H * call.chunks, **x._asdict(), **made._asdict(),
        **stride_patterns(q=x.q, k=x.k, v=x.v, do=x.do, g=x.g, w=x.writes, d=made.dq), s_S=state_strides(x.states),
        BK=BK, BV=BV, **constants(call, x.q.dtype), num_warps=warps, num_stages=1,
    )


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dbeta, dS0); None for a tensor that is not given, and for a dg that is not needed."""
    draft = Draft(hardware, *call)
    x = prepare_all(draft, call.q, call.k, call.v, call.g, call.beta, call.cu_seqlens, call.scale, call.path)
    solved, local, R_0 = both_walks(call, x.call, x.q, x.k)
    BK, _, _ = GRADIENTS[hardware.family, 8 * call.q.dtype.itemsize]
    dbeta = draft.new("dbeta", cdiv(solved.K, BK), *call.beta.shape)
    made = finish(solved._replace(G=x.G), local, dbeta, call.need_dg, launch_gradients)
    dtype, shape = call.beta.dtype, call.beta.shape
    dbeta = draft.compute("dbeta of all channels", _added, dbeta, dtype, shape=shape, dtype=dtype)
    return draft.plan("portable", *made._replace(dbeta=dbeta), draft.compute("dS0", torch.mul, R_0, solved.scale))


def _added(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0).to(dtype)
