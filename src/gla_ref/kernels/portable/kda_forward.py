"""Kimi Delta Attention, forward, in chunks, for every log gate in [-inf, 0] (chapter 24).

With b the running sum of a chunk's gates (K numbers a token), b_C its last row, and d_ij = e^(b_i - b_j) by channel,

    A = tril(beta_i sum_d k_id k_jd d_ijd, -1)      Y = (I + A)^-1      P = tril(sum_d q_id k_jd d_ijd)      (1)
    q^ = q e^b        k^ = k e^b        k~ = k e^(b_C - b)                                                  (2)
    w = Y (beta (v - k^ S))        o = scale * (q^ S + P w)        S <- diag(e^(b_C)) S + k~^T w            (3)

`prepare` makes (1) and (2) of all chunks at once; (3) is the `walk` of delta_forward.py, with its segments and packed
sequences, and Y is the inverse of that file. References: :mod:`gla_ref.kda`; Kimi Linear, 2025, section 3. Value head h
reads key head h // G, G value heads to a key head; its gates are its own, and so are q^, k^ and k~.

*Decays of pairs* do not leave the sum over channels in (1), so each product has an anchor. Tokens i > j in different
blocks of 16 meet at a border, the middle of the smallest block of 2^n tokens that holds both: k_j decays up to the
border, q_i and k_i from there on, and no exponent is above 0. Tokens of one block are anchored in its middle: their
exponents are within half of the block's sum, 40 nats for gates above -5 (LIMIT of gla_forward.py, here for 16 tokens).
If a channel's gates sum to less in a block, the chunk is strong in the channels of that product: there tokens of a
block meet at borders too, in four more levels. So nothing is clamped in a mild chunk, and every gate is exact.

The kernel, and its programs (H value heads)::

    prepare    H * chunks    (1) and (2)

It reads 2 C K tokens and C K gates, and writes 3 C K + 2 C^2 numbers. Limits: those of delta_forward.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, Spec
from . import delta_forward
from ._arguments import stride_patterns, token_strides
from ._factors import factor
from .delta_forward import DeltaCall, invert_and_store, walks
from .gla_forward import LIMIT, LOG2E, clamped, gates_to_border, sums, to_border
from .segments import which_segment
from .tiles import VARYING, load_tile, load_tokens, operand, store_tile

WARPS = {64: 8, 32: 8, 16: 4}  # of `prepare`, by C


@triton.jit
def scores(x, y, dtype: tl.constexpr):
    """x y^T of float32 rows, rounded to the product's precision: in float16 each row has its own size."""
    x, of_x = operand(x, dtype, -100.0, True)
    y, of_y = operand(y, dtype, -100.0, True)
    b = tl.dot(x, y.T, input_precision="ieee")
    if dtype == tl.float16:
        b *= of_x * tl.trans(of_y)
    return b


@triton.jit
def add_pairs(b_P, b_A, b_q, b_k, E_i, E_j, met):
    """Add the pairs in `met` to (P, A): q_i and k_i decay by E_i, k_j by E_j."""
    b_r = b_k * E_j
    b_P += tl.where(met, scores(b_q * E_i, b_r, b_k.dtype), 0.0)
    b_A += tl.where(met, scores(b_k * E_i, b_r, b_k.dtype), 0.0)
    return b_P, b_A


@triton.jit
def from_middle(b_g, FAST: tl.constexpr):
    """(Exponents of base 2 [C, D] of each token from the middle of its block of 16, the blocks' sums in nats)."""
    o_i, o_j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    same = (o_i >> 4) == (o_j >> 4)
    return sums(tl.where(same, tl.where(o_i >= o_j, 0.5, -0.5), 0.0), b_g, FAST) * LOG2E, sums(same, b_g, FAST)


@triton.jit
def since_until(b_g, FAST: tl.constexpr):
    """(e^b, e^(b_C - b)) [C, D], and e^(b_C) [D]."""
    o_i, o_j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    since = tl.exp2(sums(o_i >= o_j, b_g, FAST) * LOG2E)
    until = tl.exp2(sums(o_i < o_j, b_g, FAST) * LOG2E)
    return since, until, tl.sum(tl.where(o_i == b_g.shape[0] - 1, since, 0.0), 0)


@triton.jit(do_not_specialize=VARYING)
def prepare(
    q, k, g, beta, q_hat, k_hat, k_til, through, P, Y, factors, cu, s_q, s_k, s_g, s_hat, s_bb, s_bt, s_bh,
    N, T, H, G, K,
    C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Make (1), (2), the strengths in `factors` [chunks, H, 1, C] and e^(b_C) in `through` [chunks, H, K]."""
    # which tile: a chunk of a value head
    i_h, i_s = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]

    # load
    o_r = o_t + o_c
    b_beta = load_tokens(beta, (s_bb, s_bt, s_bh), i_b, i_h, o_r, stop)  # [C]
    b_P = tl.zeros([C, C], dtype=tl.float32)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for o_k in tl.range(0, K, BK):
        b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_g = clamped(load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False))  # [C, BK]

        # compute: (1), a token with itself, which crosses no gate, then pairs of a block of 16, then pairs that meet at
        # borders between blocks
        b_P += tl.where(i == j, tl.sum(b_q.to(tl.float32) * b_k, 1)[:, None], 0.0)
        z, total = from_middle(b_g, FAST_SUMS)
        if tl.min(tl.min(total, 1), 0) >= LIMIT:
            met = ((i >> 4) == (j >> 4)) & (i != j)
            b_P, b_A = add_pairs(b_P, b_A, b_q, b_k, tl.exp2(z), tl.exp2(-z), met)
        else:
            for level in tl.range(0, 4):
                b_E = to_border(b_g, gates_to_border(level, C), FAST_SUMS)  # [C, BK]
                b_P, b_A = add_pairs(b_P, b_A, b_q, b_k, b_E, b_E, ((i ^ j) >> level) == 1)
        for level in tl.range(4, LEVELS):
            b_E = to_border(b_g, gates_to_border(level, C), FAST_SUMS)  # [C, BK]
            b_P, b_A = add_pairs(b_P, b_A, b_q, b_k, b_E, b_E, ((i ^ j) >> level) == 1)

        # (2)
        since, until, all_of_it = since_until(b_g, FAST_SUMS)
        o_d = o_k + tl.arange(0, BK)
        # store
        store_tile(q_hat, b_q * since, s_hat, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
        store_tile(k_hat, b_k * since, s_hat, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
        store_tile(k_til, b_k * until, s_hat, i_b, i_h, o_t, stop, o_k, K, C, BK, False)
        tl.store(through + (i_s * H + i_h).to(tl.int64) * K + o_d, all_of_it, mask=o_d < K)

    invert_and_store(P, Y, factor(factors, i_s, i_h, H, C, ROWS), b_P, b_A, b_beta, i_s, i_h, H)


# The plan.


class Prepared(NamedTuple):
    """A call whose chunks are prepared, as a walk takes it."""

    call: DeltaCall  # each value head reads its own q^ and k^: G = 1
    q: Spec  # q^
    k: Spec  # k^
    G: int


def constants(call: DeltaCall, dtype: torch.dtype) -> dict:
    """Constants of the kernels that make decays."""
    hardware, half = call.draft.hardware, dtype != torch.float32
    # makes products of bf16, which Triton's interpreter gets wrong
    fast = half and hardware.matrix_units and not hardware.interpreted
    return {"LEVELS": call.C.bit_length() - 1, "LIMIT": LIMIT[dtype], "FAST_SUMS": fast}


def prepare_all(draft: Draft, q, k, v, g, beta, cu, scale, path) -> Prepared:
    """Begin a call whose plan is `draft`: prepare all chunks."""
    # a walk's stages hold three tiles of keys; 64 tokens of K = 256 would take 254 to 280 KiB (Triton 3.9)
    most = 64 if q.shape[3] <= 128 else 32
    call = delta_forward.begin(draft, q, k, v, cu, scale, path, 1, most)
    G, (B, T, H) = call.G, v.shape[:3]
    # float16 has no range for e^b: these stay float32, and a walk gives each tile a size of its own
    q_hat, k_hat, k_til = (draft.new(name, B, T, H, call.K, dtype=call.kept) for name in ("q_hat", "k_hat", "k_til"))
    call = call._replace(G=1, k_til=k_til, through=draft.new("through", call.chunks, H, call.K))
    BK = 32 if q.dtype == torch.float16 else 64  # float16's sizes of rows take registers
    call.launch(
        prepare, H * call.chunks, q=q, k=k, g=g, beta=beta, q_hat=q_hat, k_hat=k_hat,
        **stride_patterns(q=q, k=k, g=g, hat=q_hat), **token_strides(b=beta),
        G=G, BK=min(BK, call.BK), **constants(call, q.dtype), num_warps=WARPS[call.C], num_stages=1,
    )
    return Prepared(call, q_hat, k_hat, G)


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, final state)."""
    draft = Draft(hardware, *call)
    x = prepare_all(draft, call.q, call.k, call.v, call.g, call.beta, call.cu_seqlens, call.scale, call.path)
    walked = walks(x.call, x.q, x.k, call.v, draft.contiguous(call.initial_state, torch.float32), o="o", S="S_T")
    return draft.plan("portable", walked.o, walked.S)
