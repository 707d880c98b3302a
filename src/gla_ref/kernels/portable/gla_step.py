"""GLA, the delta rules and KDA token by token, for decoding; right for any gate (chapters 16, 20 and 24).

    S <- e^g S        w = v, or of a delta rule beta (v - k S)        S <- S + k^T w        o = scale * q S

g has a gate for each row of S (GLA, KDA) or one for all (the gated delta rule), g_v one for each column. References:
`recurrent` of :mod:`gla_ref.gla`, :mod:`gla_ref.delta_rule`, :mod:`gla_ref.gated_delta_rule` and :mod:`gla_ref.kda`.
The kernel computes their recurrence in float32, without chunks, triangles or products of matrices. A program holds BV
columns of one head's state in registers and walks over the tokens of its sequence; value head h reads key head h // G::

    step    V tiles * heads * sequences    reads and writes its part of the state once

For one token that is 8 K V bytes per head and little else (q, k, g, v and o of GLA are 2 (3 K + 2 V) bytes in bf16),
for 5 K V FLOPs, 7 K V of a delta rule: memory limits the time, as in every model that answers token by token. For many
tokens use :mod:`gla_ref.kernels.gla`, :mod:`gla_ref.kernels.delta` or :mod:`gla_ref.kernels.kda`, which take and return
the same state. Forward only. Limits: K <= 256, V <= 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import _contract as contract
from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, Spec, cdiv, next_power_of_2
from ._arguments import stride_patterns
from .segments import sequences, which_sequence
from .tiles import load_tile, patterns, store_tile, which_tile

BV = 32  # columns: a row of the tile is 128 bytes, one line of memory, and the tile at most 64 registers a thread
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row(x, s, i_b, t, i_h, o_d, D, BD: tl.constexpr):
    """Load x[i_b, t, i_h, o_d:] as [BD] in float32."""
    return load_tile(x, s, i_b, i_h, t, t + 1, o_d, D, 1, BD, False).reshape(BD).to(tl.float32)


@triton.jit  # unlike other kernels this one is compiled apart for T = 1, which needs no loop and half the registers
def step(
    q, k, v, g, g_v, beta, o, S_in, S_out, cu, s_q, s_k, s_v, s_g, s_gv, s_beta, s_o, s_in, s_S, T, H, G, K, V, scale,
    BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr, PACKED: tl.constexpr,
):
    """Each of g, g_v, beta may be None; g is [B, T, H, K], or [B, T, H, 1] if BG is 1, as beta always is."""
    # which tile: BV columns of the state of a head of a sequence
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
        b_w = row(v, s_v, i_b, t, i_h, o_v, V, BV)  # [BV]

        # compute
        if g is not None:
            b_S *= tl.exp2(row(g, s_g, i_b, t, i_h, 0, K, BG) * LOG2E)[:, None]  # a gate, or BK of them
        if g_v is not None:
            b_S *= tl.exp2(row(g_v, s_gv, i_b, t, i_h, o_v, V, BV) * LOG2E)[None, :]
        if beta is not None:
            b_w = row(beta, s_beta, i_b, t, i_h, 0, 1, 1) * (b_w - tl.sum(b_k[:, None] * b_S, 0))
        b_S += b_k[:, None] * b_w[None, :]
        b_o = tl.sum(b_q[:, None] * b_S, 0) * scale  # [BV]

        # store
        store_tile(o, b_o[None, :], s_o, i_b, i_h, t, stop, o_v, V, 1, BV, False)

    # store
    store_tile(S_out, b_S, s_S, i_n, i_h, 0, K, o_v, V, BK, BV, False)


def of_heads(x: Spec | None) -> tuple[int, ...] | None:
    """The strides of gates or strengths: [B, T, H] as [B, T, H, 1]."""
    if x is None or len(x.shape) == 4:
        return patterns(x)[0]
    return *x.strides, 1


def plan_step(hardware: Hardware, call) -> Plan:
    """Plan (o, final state) of a call of GLA or of a delta rule."""
    draft, q, k, v, g = Draft(hardware, *call), call.q, call.k, call.v, call.g
    g_v, beta = (call._asdict().get(name) for name in ("g_v", "beta"))
    (B, T, heads, K), (H, V) = q.shape, v.shape[2:]
    N, scale = sequences(B, call.cu_seqlens), contract.check_scale(call.scale, K)
    S, cu = draft.contiguous(call.initial_state, torch.float32), draft.contiguous(call.cu_seqlens, torch.int32)
    o, S_T = draft.like("o", v), draft.new("S_T", N, H, K, V)
    S_in, S_out = (x if x is None else x.transposed(1, 2) for x in (S, S_T))
    BK, channels = next_power_of_2(K), g is not None and len(g.shape) == 4
    draft.launch(
        step, cdiv(V, BV) * H * N,
        q=q, k=k, v=v, g=g, g_v=g_v, beta=beta, o=o, S_in=S_in, S_out=S_out, cu=cu,
        **stride_patterns(q=q, k=k, v=v, gv=g_v, o=o, S=S_out), s_g=of_heads(g), s_beta=of_heads(beta),
        s_in=patterns(S_in)[0], T=T, H=H, G=H // heads, K=K, V=V, scale=scale,
        BK=BK, BV=BV, BG=BK if channels else 1, PACKED=cu is not None, num_warps=8 if BK <= 128 else 4,
    )
    return draft.plan("recurrent", o, S_T)
