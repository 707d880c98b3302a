"""A scalar gate in chunks: its running sums, and its gradient (chapters 7 to 9).

    b_i = g_1 + ... + g_i within a chunk        decay from token j to token i = e^(b_i - b_j)

Reference: :mod:`gla_ref.simple_gla`. For linear.py `sum_gates` runs once before the kernels that walk over chunks, and
writes 8 bytes per token and head: a scan inside the walk's loop would add its whole latency. `gate_gradient` works on
all chunks at once, with their states. delta_forward.py and delta_gradient.py take the sums and decays from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Spec, cdiv, next_power_of_2
from ._arguments import token_strides
from .segments import sequences, slots, which_segment
from .tiles import VARYING, load_tile, load_tokens, operand

# by family and bits, the tokens of a chunk in linear.py and delta_forward.py; 16 elsewhere
CHUNK = {("hopper", 16): 64, ("ampere", 16): 32}


@triton.jit(do_not_specialize=VARYING)
def sum_gates(g, sums, cu, s_gb, s_gt, s_gh, N, T, H, C: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr):
    """Write the running sums of every chunk's gates in base 2, each as two float32 numbers: sums [chunks, H, 2, C].

    A decay between two tokens is exp2 of a difference of sums. After a strong gate the difference of plain float32
    sums has lost its low bits. The coarse part, multiples of 1/512 up to 64 * 150, sums exactly; the fine part is
    below 1/16. The decay of a gate below -150 (-104 nats, -inf) is 0 in float32, so such a gate becomes -150.
    """
    # which tile: one chunk of BH heads
    i_s = tl.program_id(0)
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    o_c, o_h = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)

    # load
    o_r, m_h = o_t + o_c, o_h < H
    p_g = g + i_b.to(tl.int64) * s_gb + o_r[:, None].to(tl.int64) * s_gt + o_h[None, :].to(tl.int64) * s_gh
    b_g = tl.load(p_g, mask=(o_r < stop)[:, None] & m_h[None, :], other=0.0)  # [C, BH]

    # compute
    b_coarse, b_fine = summed(b_g)

    # store: beyond the end the sums stay constant, so the last sum is always the total
    p = sums + (i_s.to(tl.int64) * H + o_h[None, :]) * 2 * C + o_c[:, None]
    tl.store(p, b_coarse, mask=m_h[None, :])
    tl.store(p + C, b_fine, mask=m_h[None, :])


@triton.jit
def summed(b_g):
    """(coarse, fine) running sums of a chunk's gates [C, ...], as in `sum_gates`."""
    b_g = b_g.to(tl.float32) * 1.4426950408889634
    b_g = tl.maximum(b_g, -150.0, propagate_nan=tl.PropagateNan.ALL)
    b_coarse = tl.floor(b_g * 512 + 0.5) / 512
    return tl.cumsum(b_coarse, 0), tl.cumsum(b_g - b_coarse, 0)


@triton.jit
def load_sums(sums, i_s, i_h, H, C: tl.constexpr):
    """(coarse [C], fine [C], their totals) of chunk i_s."""
    p = sums + (i_s.to(tl.int64) * H + i_h) * 2 * C
    o_c = tl.arange(0, C)
    return tl.load(p + o_c), tl.load(p + C + o_c), tl.load(p + C - 1), tl.load(p + 2 * C - 1)


@triton.jit
def log_decay(b_coarse, b_fine):
    """The log2 of the decay from token j (column) to token i (row), [C, C]."""
    return (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])


@triton.jit(do_not_specialize=VARYING)
def gate_gradient(
    q, k, v, do, g, sums, states, dstates, dg, cu, s_q, s_k, s_v, s_do,
    s_gb, s_gt, s_gh, s_db, s_dt, s_dh, N, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):
    """Make dg of one chunk: all paths across token t, write to read, state to read, write to state, state to state."""
    # which tile
    i_h, i_s = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)

    # load
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, 0, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, 0, K, C, BK, False)  # [C, BK]
    o_r = o_t + o_c
    b_g = load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_r, stop)  # [C]
    b_coarse, b_fine, coarse, fine = load_sums(sums, i_s, i_h, H, C)

    # compute
    b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    b_read, b_write = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    b_kept = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        o_R = (i_s * H + i_h).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
        o_S = (i_s * H + i_h).to(tl.int64) * K * V + o_k[:, None] + o_v[None, :] * K  # [V, K] in memory
        m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_S = tl.load(states + o_S, mask=m_S, other=0.0)  # [BK, BV]
        b_R = tl.load(dstates + o_R, mask=m_S, other=0.0)  # [BK, BV], the gradient of the state after
        b_dP = tl.dot(b_do, b_v.T, b_dP, input_precision="ieee")
        b_kept += tl.sum(b_S.to(tl.float32) * b_R, 1)
        b_S, of_S = operand(b_S, b_q.dtype)
        b_R, of_R = operand(b_R, b_q.dtype)
        b_read += tl.sum(tl.dot(b_q, b_S, input_precision="ieee") * b_do, 1) * of_S
        b_write += tl.sum(tl.dot(b_k, b_R, input_precision="ieee") * b_v, 1) * of_R
    b_read *= tl.exp2(b_coarse + b_fine)
    b_write *= tl.exp2((coarse - b_coarse) + (fine - b_fine))
    kept = tl.sum(b_kept) * tl.exp2(coarse + fine)
    m_below = o_c[:, None] > o_c[None, :]  # without pairs i = j, which cross no gate
    b_A = b_P * b_dP * tl.exp2(tl.where(m_below, log_decay(b_coarse, b_fine), float("-inf")))
    # a pair crosses t if j < t <= i; sum only such pairs, without a difference of sums
    b_row = tl.sum(b_A, 1) + b_read  # [C]
    b_col = tl.sum(b_A, 0)  # [C]
    m_from = o_c[:, None] >= o_c[None, :]  # row i at or after column t
    b_dg = tl.sum(tl.where(m_from, b_row[:, None], 0.0), 0) - tl.sum(tl.where(m_from, b_col[:, None], 0.0), 0)
    b_dg += tl.sum(tl.where(m_from, 0.0, b_write[:, None]), 0) + kept

    # store: no path crosses g = -inf
    b_dg = tl.where(b_g == float("-inf"), 0.0, b_dg * scale)
    p_dg = dg + i_b.to(tl.int64) * s_db + o_r.to(tl.int64) * s_dt + i_h.to(tl.int64) * s_dh
    tl.store(p_dg, b_dg.to(dg.dtype.element_ty), mask=o_r < stop)


def chunk_length(hardware: Hardware, x: Spec) -> int:
    return CHUNK.get((hardware.family, 8 * x.dtype.itemsize), 16)


def running_sums(draft: Draft, g: Spec, cu: Spec | None, C: int) -> Spec:
    """Launch `sum_gates` on g [B, T, H] in chunks of C tokens: [chunks, H, 2, C]."""
    B, T, H = g.shape
    chunks = slots(B, T, cu, C)
    sums = draft.new("sums", chunks, H, 2, C)
    BH = min(32, next_power_of_2(H))
    draft.launch(
        sum_gates, (chunks, cdiv(H, BH)),
        g=g, sums=sums, cu=cu, **token_strides(g=g), N=sequences(B, cu), T=T, H=H, C=C, BH=BH, PACKED=cu is not None,
    )
    return sums
