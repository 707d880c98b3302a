"""The delta rule, the gated one and KDA token by token, for decoding; right for any gate (chapter 20).

    S <- e^g S        w = beta (v - k S)        S <- S + k^T w        o = scale * q S

References: `recurrent` of :mod:`gla_ref.delta_rule`, :mod:`gla_ref.gated_delta_rule` and, with a gate for each row of
S, :mod:`gla_ref.kda`. The kernel computes their recurrence in float32, without chunks or a triangle. A program holds BV
columns of one value head's state in registers and walks over the tokens of its sequence::

    step    V tiles * value heads * sequences    reads and writes its part of the state once

For one token that is 8 K V bytes per head and little else, for 7 K V FLOPs: memory limits the time. For many tokens use
:mod:`gla_ref.kernels.delta` or :mod:`gla_ref.kernels.kda`, which take and return the same state. Forward only. Limits:
K <= 256, V <= 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import _contract as contract
from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, cdiv, next_power_of_2
from .gla_step import BV, LOG2E, row
from .segments import sequences, which_sequence
from .tiles import load_tile, patterns, store_tile, which_tile


@triton.jit  # unlike other kernels this one is compiled apart for T = 1, which needs no loop
def step(
    q, k, v, g, beta, o, S_in, S_out, cu, s_q, s_k, s_v, s_g, s_beta, s_o, s_in, s_S, T, H, G, K, V, scale,
    BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr, PACKED: tl.constexpr,
):
    # which tile: BV columns of the state of a value head of a sequence
    i_v, i_h, i_n = which_tile(H, V, BV)
    i_b, start, stop = which_sequence(cu, i_n, T, PACKED)
    o_v = i_v * BV

    # load: states are [N, K, H, V] here
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += load_tile(S_in, s_in, i_n, i_h, 0, K, o_v, V, BK, BV, False)  # [BK, BV]

    for t in tl.range(start, stop):
        # load
        b_q = row(q, s_q, i_b, t, i_h // G, 0, K, BK)  # [BK]
        b_k = row(k, s_k, i_b, t, i_h // G, 0, K, BK)  # [BK]
        b_v = row(v, s_v, i_b, t, i_h, o_v, V, BV)  # [BV]
        b_beta = row(beta, s_beta, i_b, t, i_h * 0, i_h, H, 1)  # [1]: heads are the last axis of [B, T, 1, H]

        # compute
        if g is not None:
            b_S *= tl.exp2(row(g, s_g, i_b, t, i_h, 0, K, BG) * LOG2E)[:, None]  # a gate, or BK of them
        b_w = b_beta * (b_v - tl.sum(b_k[:, None] * b_S, 0))  # [BV]
        b_S += b_k[:, None] * b_w[None, :]
        b_o = tl.sum(b_q[:, None] * b_S, 0) * scale  # [BV]

        # store
        store_tile(o, b_o[None, :], s_o, i_b, i_h, t, stop, o_v, V, 1, BV, False)

    # store
    store_tile(S_out, b_S, s_S, i_n, i_h, 0, K, o_v, V, BK, BV, False)


def plan_step(hardware: Hardware, call) -> Plan:
    """Plan (o, final state)."""
    draft, q, k, v, g, beta = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.beta
    (B, T, heads, K), (H, V) = q.shape, v.shape[2:]
    N, scale = sequences(B, call.cu_seqlens), contract.check_scale(call.scale, K)
    S, cu = draft.contiguous(call.initial_state, torch.float32), draft.contiguous(call.cu_seqlens, torch.int32)
    o, S_T = draft.like("o", v), draft.new("S_T", N, H, K, V)
    states = [x if x is None else x.transposed(1, 2) for x in (S, S_T)]
    of_beta = (*beta.strides[:2], 0, beta.strides[2])  # [B, T, H] as [B, T, 1, H]
    channels = g is not None and len(g.shape) == 4
    of_gates = g if g is None else patterns(g)[0] if channels else (*g.strides, 1)  # [B, T, H] as [B, T, H, 1]
    BK = next_power_of_2(K)
    draft.launch(
        step, cdiv(V, BV) * H * N,
        q, k, v, g, beta, o, *states, cu, *patterns(q, k, v), of_gates, of_beta, *patterns(o, *states),
        T, H, H // heads, K, V, scale,
        BK=BK, BV=BV, BG=BK if channels else 1, PACKED=cu is not None, num_warps=8 if BK <= 128 else 4,
    )
    return draft.plan("recurrent", o, S_T)
