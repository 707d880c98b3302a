"""The gradient of the delta rule and the gated delta rule, chunk by chunk (chapter 20).

With S the state before a chunk, R the gradient of the state after it (over scale, so that scale may come last), and P,
Y, E, b and w as in delta_forward.py::

    d = P^T do + e^(b_C - b) (k R)        r = Y^T d        dv = beta r                               (1)
    R <- e^(b_C) R + (e^b q)^T do - (e^b k)^T dv                                                     (2)
    F = tril(do w^T * E)                  G = -beta tril(r w^T * E, -1)                              (3)
    dq = scale * (e^b (do S^T) + F k)                                                                (4)
    dk = scale * (F^T q + (G + G^T) k - e^b beta (r S^T) + e^(b_C - b) (w R^T))                      (5)
    dbeta_i = scale * (r_i v_i - e^b k_i (r S^T)_i + sum_j G_ij (k_i k_j) / beta_i)                  (6)
    dg_t = scale * (the paths across t: pairs j < t <= i of F and G, reads of the state from t on,   (7)
           writes before t for later chunks, and from state to state e^(b_C) S R)

where the code never divides by beta. The gradient passes the inverse by one more product with the inverse, Y^T d. A
walk forward stores every S and w, a walk backward every R and r; all other steps are local to a chunk. The forward pass
saves only its inputs. Reference: :mod:`gla_ref.gradients.delta_rule`.

The kernels, in addition to those of delta_forward.py, and the number of programs of each (H value heads)::

    walk_back    V tiles * H * segments  (1) without dv, and (2)
    gradients    H * chunks              (3) to (7), and dv

If value heads share key heads, each value head has its own dq and dk in float32, and PyTorch adds them up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, Spec, boxes, cdiv
from ._arguments import stride_patterns, token_strides
from ._factors import BETA, COARSE, FINE, SINCE, UNTIL, factor, load_channels, load_whole_decay, square
from .delta_forward import DeltaCall, launch_carry_maps, load_first, solve_all, state_strides, store_state, walks
from .scalar_gates import log_decay
from .segments import which_segment
from .tiles import VARYING, load_tile, load_tokens, low, operand, product, store_tile, times, which_tile

# BK, BV and warps of `gradients`
GRADIENTS = {
    ("hopper", 16): (64, 64, 8),
    ("hopper", 32): (16, 16, 4),
    ("ampere", 16): (64, 32, 8),
    ("ampere", 32): (16, 16, 4),
    ("turing", 16): (32, 32, 4),
    ("turing", 32): (16, 16, 4),
}


@triton.jit(do_not_specialize=VARYING)
def walk_back(
    q, k, do, r, P, Y, factors, k_til, through, R_in, R_out, dstates, cu, s_q, s_k, s_do, s_r, s_in,
    N, T, L, H, G, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
    GATED: tl.constexpr, MAP: tl.constexpr, ROWS: tl.constexpr,
):
    """Walk a segment of a head, last chunk first, from R in R_in to R_out; MAP as in `walk`.

    Each result may be None: r of each token; `dstates`, the R after each chunk.
    """
    # which tile: BV columns
    i_v, i_h, i_s = which_tile(H, tl.cdiv(V, BV) * BV + (K if MAP else 0), BV)
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    first = start // C + i_n if PACKED else i_n * tl.cdiv(T, C)  # chunk of the sequence
    dtype: tl.constexpr = do.dtype if TMA else do.dtype.element_ty

    # load
    b_R, o_v, m_R = load_first(R_in, s_in, i_s, i_h, i_v, K, V, BK, BV, MAP)

    n_c = tl.cdiv(end - begin, C)  # at most 0 in a spare slot
    for i in tl.range(0, n_c):
        o_t = begin + (n_c - 1 - i) * C
        i_t = first + (o_t - start) // C

        # load
        b_q = load_tile(q, s_q, i_b, i_h // G, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        b_P = tl.load(square(P, i_t, i_h, H, C))  # [C, C]
        b_Y = tl.load(square(Y, i_t, i_h, H, C))  # [C, C]
        p_f = factor(factors, i_t, i_h, H, C, ROWS)
        b_beta = tl.load(p_f + BETA * C)  # [C]

        # compute: (1)
        b_low, of_R = operand(b_R, dtype)
        b_k, of_k = low(b_k, dtype)
        if k_til is not None:
            b_t, of_t = low(load_tile(k_til, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA), dtype)  # [C, BK]
        else:
            b_t, of_t = b_k, of_k
        b_d = tl.dot(b_t, b_low, input_precision="ieee") * (of_t * of_R)  # [C, BV]
        if GATED:
            b_since = tl.load(p_f + SINCE * C)  # [C]
            b_until = tl.load(p_f + UNTIL * C)  # [C]
            b_d *= b_until[:, None]
        b_d += times(tl.trans(b_P), b_do, dtype)
        b_r = times(tl.trans(b_Y), b_d, dtype)  # [C, BV]
        b_dv = b_r * b_beta[:, None]
        # store
        if dstates is not None:
            store_state(dstates, b_R, i_t * H + i_h, o_v, m_R, K, V)
        if r is not None:
            store_tile(r, b_r, s_r, i_b, i_h, o_t, end, i_v * BV, V, C, BV, False)

        # compute: (2)
        if GATED:
            b_R *= load_whole_decay(factors, i_t, i_h, H, C, ROWS)
            b_dv *= b_since[:, None]
            b_R = product((b_q.to(tl.float32) * b_since[:, None]).T, b_do, b_R)
        else:
            if k_til is not None:
                b_R *= load_channels(through, i_t, i_h, H, K, BK)[:, None]
                b_dv *= of_k
            b_R = product(b_q.T, b_do, b_R)
        b_R = product(b_k.T, -b_dv, b_R)

    # store
    if R_out is not None:
        store_state(R_out, b_R, i_s * H + i_h, o_v, m_R, K, V + K if MAP else V)


@triton.jit
def over_values(
    v, do, writes, r, dv, s_v, s_do, s_w, i_b, i_h, o_t, stop, V, b_strength, first, dtype: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr,
):
    """(3) of all pairs without decays, [C, C], and r v of (6) [C]; only the `first` program of a chunk stores dv."""
    b_F, b_G = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    for o_v in tl.range(0, V, BV):
        b_w = load_tile(writes, s_w, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_r = load_tile(r, s_w, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_F += times(b_do, b_w.T, dtype)
        b_G -= times(b_r, b_w.T, dtype)
        b_r = b_r.to(tl.float32)
        if first:
            b_dbeta += tl.sum(b_r * b_v.to(tl.float32), 1)
            store_tile(dv, b_r * b_strength[:, None], s_w, i_b, i_h, o_t, stop, o_v, V, C, BV, False)
    return b_F, b_G, b_dbeta


@triton.jit
def over_states(
    do, writes, r, states, dstates, s_do, s_w, s_S, i_b, i_h, i_s, o_t, stop, o_k, K, V, dtype: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """(do S^T, -r S^T, w R^T) of channels o_k on, [C, BK], and the sums of S R over V, [BK]."""
    b_dq, b_x = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_dk, b_kept = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([BK], dtype=tl.float32)
    for o_v in tl.range(0, V, BV):
        b_w = load_tile(writes, s_w, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_r = load_tile(r, s_w, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
        b_S = load_tile(states, s_S, i_s, i_h, o_k, K, o_v, V, BK, BV, False)  # [BK, BV]
        b_R = load_tile(dstates, s_S, i_s, i_h, o_k, K, o_v, V, BK, BV, False)  # [BK, BV]
        b_dq += times(b_do, b_S.T, dtype)
        b_x -= times(b_r, b_S.T, dtype)
        b_dk += times(b_w, b_R.T, dtype)
        b_kept += tl.sum(b_S.to(tl.float32) * b_R.to(tl.float32), 1)
    return b_dq, b_x, b_dk, b_kept


@triton.jit(do_not_specialize=VARYING)
def gradients(
    q, k, v, do, g, factors, writes, r, states, dstates, dq, dk, dv, dg, dbeta, cu,
    s_q, s_k, s_v, s_do, s_w, s_d, s_S, s_gb, s_gt, s_gh, N, T, H, G, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):
    """Make (3) to (7) of a chunk; dg is None if the caller needs none."""
    # which tile: a chunk of a value head
    i_h, i_s = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]
    o_r = o_t + o_c
    dtype: tl.constexpr = q.dtype.element_ty
    p_f = factor(factors, i_s, i_h, H, C, ROWS)
    b_beta = tl.load(p_f + BETA * C)  # [C]

    # compute: (3) and dv, over V
    b_F, b_G, b_dbeta = over_values(
        v, do, writes, r, dv, s_v, s_do, s_w, i_b, i_h, o_t, stop, V, b_beta * scale, True, dtype, C, BV
    )
    # over K: q k^T and k k^T
    b_P, b_A = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for o_k in tl.range(0, K, BK):
        b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_P = tl.dot(b_q, b_k.T, b_P, input_precision="ieee")
        b_A = tl.dot(b_k, b_k.T, b_A, input_precision="ieee")
    if g is not None:
        b_since, b_until = tl.load(p_f + SINCE * C), tl.load(p_f + UNTIL * C)  # [C]
        b_D = log_decay(tl.load(p_f + COARSE * C), tl.load(p_f + FINE * C))
        b_E = tl.exp2(tl.where(i >= j, b_D, float("-inf")))  # [C, C], masked before it could overflow
        b_F *= b_E
        b_G *= b_E
    else:
        b_since, b_until = tl.full([C], 1.0, dtype=tl.float32), tl.full([C], 1.0, dtype=tl.float32)
    b_F, b_G = tl.where(i >= j, b_F, 0.0), tl.where(i > j, b_G, 0.0)
    b_A *= b_G
    b_dbeta += tl.sum(b_A, 1)
    # pairs of (7); i = j crosses no gate
    b_A = b_A * b_beta[:, None] + tl.where(i > j, b_F * b_P, 0.0)
    b_row, b_column = tl.sum(b_A, 1), tl.sum(b_A, 0)  # [C]
    b_G *= b_beta[:, None]
    b_G += tl.trans(b_G)

    # (4) to (6), over K
    b_write, kept = tl.zeros([C], dtype=tl.float32), 0.0
    for o_k in tl.range(0, K, BK):
        b_dq, b_x, b_dk, b_kept = over_states(
            do, writes, r, states, dstates, s_do, s_w, s_S, i_b, i_h, i_s, o_t, stop, o_k, K, V, dtype, C, BK, BV
        )
        if dg is not None:
            kept += tl.sum(b_kept)
        b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_dq *= b_since[:, None]
        b_x *= b_since[:, None]
        b_dk *= b_until[:, None]
        b_read = tl.sum(b_k.to(tl.float32) * b_x, 1)  # [C]
        b_dbeta += b_read
        if dg is not None:
            b_row += tl.sum(b_q.to(tl.float32) * b_dq, 1) + b_beta * b_read
            b_write += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        b_dq += times(b_F, b_k, dtype)
        b_dk += times(tl.trans(b_F), b_q, dtype) + times(b_G, b_k, dtype) + b_x * b_beta[:, None]
        # store
        store_tile(dq, b_dq * scale, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
        store_tile(dk, b_dk * scale, s_d, i_b, i_h, o_t, stop, o_k, K, C, BK, False)

    # store
    o_d = (i_b.to(tl.int64) * T + o_r) * H + i_h
    tl.store(dbeta + o_d, (b_dbeta * scale).to(dbeta.dtype.element_ty), mask=o_r < stop)
    if dg is not None:  # (7): sum only pairs that cross t, without a difference of sums; no pair crosses g = -inf
        b_g = load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_r, stop)  # [C]
        b_dg = tl.sum(tl.where(i >= j, b_row[:, None], 0.0), 0) - tl.sum(tl.where(i >= j, b_column[:, None], 0.0), 0)
        b_dg += tl.sum(tl.where(i >= j, 0.0, b_write[:, None]), 0)
        b_dg += kept * load_whole_decay(factors, i_s, i_h, H, C, ROWS)
        b_dg = tl.where(b_g == float("-inf"), 0.0, b_dg * scale)
        tl.store(dg + o_d, b_dg.to(dg.dtype.element_ty), mask=o_r < stop)


def launch_walk_back(
    call: DeltaCall, q: Spec, k: Spec, do: Spec, R_in: Spec | None, R_out: Spec | None, r: Spec | None = None,
    dstates: Spec | None = None, maps: bool = False,
) -> None:
    """Launch `walk_back` over all segments; with `maps`, R_out gets each segment's map."""
    BK, BV, engine = call.BK, call.BV, call.by_engine(q, k, do)
    s = stride_patterns(q=q, k=k, do=do, r=r)
    q, k, do, k_til = boxes(engine, call.C, (q, BK), (k, BK), (do, BV), (call.k_til, BK))
    call.launch(
        walk_back, (cdiv(call.V, BV) + cdiv(call.K, BV) * maps) * call.H * call.segments,
        q=q, k=k, do=do, r=r, k_til=k_til, R_in=R_in, R_out=R_out, dstates=dstates,
        **s, s_in=state_strides(R_in), TMA=engine, GATED=call.gated, MAP=maps,
        num_warps=call.warps, num_stages=call.stages,
    )


def walk_backwards(call: DeltaCall, q: Spec, k: Spec, do: Spec, R: Spec | None, with_R_0: bool):
    """Make (r, the gradient of the initial state over scale, the R after each chunk), as `walks` does forward."""
    draft, V, K = call.draft, call.V, call.K
    R_0 = draft.new("R_0", call.N, call.H, K, V) if with_R_0 or call.L <= call.T else None
    R_out = R_0
    if call.L <= call.T:
        part = draft.new("part", call.segments, call.H, K, V + K)
        launch_walk_back(call, q, k, do, None, part, maps=True)
        launch_carry_maps(draft, part, R, R_0, call.cu, call.T, call.L, reverse=True)
        R, R_out = part, None
    r = draft.new("r", *do.shape, dtype=call.kept)
    dstates = draft.new("dstates", call.chunks, call.H, K, V, dtype=call.kept)
    launch_walk_back(call, q, k, do, R, R_out, r, dstates)
    return r, R_0, dstates


def gradient_of_state(draft: Draft, dS: Spec | None, scale: float) -> Spec | None:
    """The R after the last chunk: a walk multiplies all that it reads by scale, which dS has no part in."""
    return draft.compute("R", torch.div, draft.contiguous(dS, torch.float32), scale)


class Local(NamedTuple):
    """The tensors that `gradients` reads."""

    q: Spec
    k: Spec
    v: Spec
    g: Spec | None
    do: Spec
    states: Spec  # before each chunk
    writes: Spec
    dstates: Spec  # after each chunk
    r: Spec


class Made(NamedTuple):
    """The tensors that `gradients` writes; dq and dk are of value heads here, of key heads on Hopper in bf16."""

    dq: Spec
    dk: Spec
    dv: Spec
    dg: Spec | None
    dbeta: Spec


def launch_gradients(call: DeltaCall, x: Local, made: Made) -> None:
    """`gradients` of all chunks."""
    BK, BV, warps = GRADIENTS[call.draft.hardware.family, 8 * x.q.dtype.itemsize]
    call.launch(
        gradients, call.H * call.chunks, **x._asdict(), **made._asdict(),
        **stride_patterns(q=x.q, k=x.k, v=x.v, do=x.do, w=x.writes, d=made.dq), s_S=state_strides(x.states),
        **token_strides(g=x.g), BK=BK, BV=BV, num_warps=warps, num_stages=1,
    )


def finish(call: DeltaCall, x: Local, dbeta: Spec, need_dg: bool, launch=launch_gradients) -> Made:
    """Launch `gradients` over all chunks and return its results: dq and dk of key heads, dg if needed."""
    draft, shared = call.draft, call.G > 1
    shape, dtype = (*x.v.shape[:3], call.K), torch.float32 if shared else x.q.dtype
    dq, dk = (draft.new(f"d{n}", *shape, dtype=dtype) for n in "qk")
    made = Made(dq, dk, draft.like("dv", x.v), draft.like("dg", x.g) if need_dg else None, dbeta)
    launch(call, x, made)
    if not shared:
        return made
    dq, dk = (
        draft.compute(f"{y.name} of key heads", of_key_heads, y, z.dtype, call.G, shape=z.shape, dtype=z.dtype)
        for y, z in ((dq, x.q), (dk, x.k))
    )
    return made._replace(dq=dq, dk=dk)


def both_walks(call, solved: DeltaCall, q: Spec, k: Spec) -> tuple[DeltaCall, Local, Spec | None]:
    """Walk over q and k both ways.

    Returns:
        `solved` with the scale of the gradients, what `gradients` reads, and the gradient of the initial state over
        scale, None without that state.
    """
    draft, v, S = solved.draft, call.v, call.initial_state
    do, scale = draft.gradient_of_o(v, call.do, solved.scale)
    solved = solved._replace(scale=scale)
    R = gradient_of_state(draft, call.dS, scale)
    walked = walks(solved, q, k, v, draft.contiguous(S, torch.float32), states="states", writes="writes")
    r, R_0, dstates = walk_backwards(solved, q, k, do, R, S is not None)
    local = Local(call.q, call.k, v, call.g, do, walked.states, walked.writes, dstates, r)
    return solved, local, R_0 if S else None


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dbeta, dS0); None for a tensor that is not given, and for a dg that is not needed."""
    draft, q, k = Draft(hardware, *call), call.q, call.k
    solved = solve_all(draft, q, k, call.v, call.g, call.beta, call.cu_seqlens, call.scale, call.path)
    solved, local, R_0 = both_walks(call, solved, q, k)
    made = finish(solved, local, draft.like("dbeta", call.beta), call.need_dg)
    return draft.plan("portable", *made, draft.compute("dS0", torch.mul, R_0, solved.scale))


def of_key_heads(x: Tensor, dtype: torch.dtype, G: int) -> Tensor:
    """The sum over the G value heads that read each key head."""
    return x.unflatten(2, (-1, G)).sum(3).to(dtype)
