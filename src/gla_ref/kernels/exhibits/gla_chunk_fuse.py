"""The original GLA implementation in its four kernels and a sum, forward only: "chunk fuse" (chapter 14).

    o_i = scale * (q_i * 2^b_i) S + sum over j <= i of A_ij v_j      A_ij = scale * sum over K of q_i k_j 2^(b_i - b_j)
    S <- 2^b_C * S + (k * 2^(b_C - b))^T v                           b the running sum of g / ln 2 in the chunk of C

References: :mod:`gla_ref.kernels.exhibits.reference`, step by step, and :func:`gla_ref.gla.recurrent` for the
whole. Programs:

    fwd_decay_cumsum             NK, N, B H                            gates in, b out
    prepare_qg_kg                NK, N, B H    q, k, b in, decayed q and k out
    fused_chunk_gla_fwd_kernel   NK, NV, B H   walks over the chunks with BK x BV of the state on chip: q S out
    fwd_inner_chunk              NK, N, B H    C x C scores out, one row at a time, no matrix product
    combine                      PyTorch       sums what the NK blocks of channels left, adds A v

with N = ceil(T / C) chunks, NK = ceil(K / BK), NV = ceil(V / BV) and BK, BV <= 64. Bytes and FLOPs of each:
:func:`gla_ref.kernels.exhibits.reference.steps`. Any K and V. Limits, those of the description: no gradients, no packed
sequences, no gate on V; gates of -inf make NaN, and a strong gate costs the decays after it their low bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _contract as contract
from ...mechanisms import Argument
from ..gla import Call
from ..launch.checks import check_call, check_forward_only, check_launch
from ..launch.program import FUSED
from .reference import combine, tile

__all__ = ["decay_cumsum", "gla_chunk_fuse", "inner_scores", "qg_kg", "read_states"]

WARPS = {16: (1, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)}  # C: of the three kernels; 16 is the original
GATE = Argument("g", "B T H K", "gate")


@triton.jit
def fwd_decay_cumsum(
    p_g, p_b,  # [B, T, H, K] each, with their strides
    s_gb, s_gt, s_gh, s_gk, s_bb, s_bt, s_bh, s_bk,
    T, H, K,
    C: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, INV_LN2: tl.constexpr,
):
    # which tile
    i_k, i_c, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_c = tl.arange(0, BC)  # [BC], the power of two that covers the chunk
    o_t = i_c.to(tl.int64) * C + o_c  # [BC]
    o_k = i_k.to(tl.int64) * BK + tl.arange(0, BK)  # [BK]
    m = (o_c < C)[:, None] & (o_t < T)[:, None] & (o_k < K)[None, :]  # [BC, BK]

    # load: tokens beyond the chunk or the sequence are gates of 0, which forget nothing
    p = p_g + i_b * s_gb + i_h * s_gh + o_t[:, None] * s_gt + o_k[None, :] * s_gk
    b_g = tl.load(p, mask=m, other=0.0).to(tl.float32)  # [BC, BK]

    # compute: scale after the sum, one rounding more for each result instead of one for each term
    b_b = tl.cumsum(b_g, axis=0) * INV_LN2  # [BC, BK]

    # store
    p = p_b + i_b * s_bb + i_h * s_bh + o_t[:, None] * s_bt + o_k[None, :] * s_bk
    tl.store(p, b_b, mask=m)


def decay_cumsum(g: Tensor, *, C: int = 16) -> Tensor:
    """Base-2 running sums of the gates inside each chunk: `exp2` of the result is the decay since the chunk's start.

    Its reference is :func:`gla_ref.gates.chunk_cumsum` with base2=True. Six bytes an element for bfloat16 gates, and
    log2 C additions and one product, so memory bandwidth is all that counts.

    Args:
        g: natural log gates `[B, T, H, K]` in [-inf, 0], float32, float16 or bfloat16, any strides.
        C: chunk length, at most 256 (16 in the four-kernel implementation that this step comes from).

    Returns:
        b, float32 `[B, T, H, K]`.

    Raises:
        TypeError: g is no tensor, or has another dtype.
        ValueError: a shape, device or C that does not fit; or g needs a gradient, which this kernel has not.

    Source: the notes on the four-kernel implementation of GLA, step 1.
    """
    sizes = contract.check_tensors({"g": g}, (GATE,))
    contract.check_chunk(C=C)
    if C > 256:
        raise ValueError(f"C: expected at most 256, got {C}")
    check_launch({"g": g}, (GATE,))
    check_forward_only({"g": g}, "decay_cumsum")
    B, T, H, K = sizes["B"], sizes["T"], sizes["H"], sizes["K"]
    b = torch.empty(B, T, H, K, dtype=torch.float32, device=g.device)
    BK = min(64, triton.next_power_of_2(K))
    grid = (triton.cdiv(K, BK), triton.cdiv(T, C), B * H)
    if max(grid[1:]) > 65535:  # CUDA's limit on the second and third axis of a grid
        raise ValueError(f"g: expected at most 65535 chunks and 65535 heads in all, got {grid[1]} and {grid[2]}")
    fwd_decay_cumsum[grid](
        g, b, *g.stride(), *b.stride(), T, H, K,
        C=C, BC=triton.next_power_of_2(C), BK=BK, INV_LN2=1 / math.log(2), num_warps=1 if C <= 16 else 4, **FUSED,
    )
    return b


@triton.jit
def at(x, s, i_b, i_h, o_t, o_d):
    """Pointers to rows o_t and columns o_d of x [B, T, H, D] with strides s."""
    return x + i_b * s[0] + o_t.to(tl.int64) * s[1] + i_h * s[2] + o_d.to(tl.int64) * s[3]


@triton.jit
def prepare_qg_kg(q, k, b, q_g, k_g, s_q, s_k, s_b, T, H, K, scale, BT: tl.constexpr, BK: tl.constexpr):
    # which tile
    i_k, i_c, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_t = (i_c * BT + tl.arange(0, BT))[:, None]  # [BT, 1]
    o_k = (i_k * BK + tl.arange(0, BK))[None, :]  # [1, BK]
    m = (o_t < T) & (o_k < K)  # [BT, BK]

    # load
    b_q = tl.load(at(q, s_q, i_b, i_h, o_t, o_k), mask=m, other=0.0).to(tl.float32)  # [BT, BK]
    b_k = tl.load(at(k, s_k, i_b, i_h, o_t, o_k), mask=m, other=0.0).to(tl.float32)  # [BT, BK]
    b_g = tl.load(at(b, s_b, i_b, i_h, o_t, o_k), mask=m, other=0.0)  # [BT, BK]
    last = tl.minimum(i_c * BT + BT, T) - 1  # the chunk's last token
    last_decay = tl.load(at(b, s_b, i_b, i_h, last, o_k), mask=o_k < K, other=0.0)  # [1, BK]

    # compute: k from its own token to the chunk's end passes the gates after it, b_C - b_j
    b_q *= tl.exp2(b_g) * scale
    b_k *= tl.exp2(last_decay - b_g)

    # store
    tl.store(at(q_g, s_b, i_b, i_h, o_t, o_k), b_q.to(q_g.dtype.element_ty), mask=m)
    tl.store(at(k_g, s_b, i_b, i_h, o_t, o_k), b_k.to(k_g.dtype.element_ty), mask=m)


@triton.jit
def fused_chunk_gla_fwd_kernel(
    q_g, k_g, v, b, o, S_in, S_out, s_b, s_v, s_o, T, H, K, V,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    # which tile: BK rows and BV columns of one head's state
    i_k, i_v, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, BT)
    o_S = i_bh * K * V + o_k[:, None] * V + o_v[None, :]  # [BK, BV]
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    # each block of channels has an output of its own: they are summed later
    o += i_k.to(tl.int64) * s_o[0]

    # load
    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_h += tl.load(S_in + o_S, mask=m_S, other=0.0)

    # compute
    for i_t in range(0, T, BT):
        o_t = i_t + o_c
        m_k = (o_k < K)[:, None] & (o_t < T)[None, :]  # [BK, BT]
        m_v = (o_t < T)[:, None] & (o_v < V)[None, :]  # [BT, BV]
        b_q = tl.load(at(q_g, s_b, i_b, i_h, o_t[:, None], o_k[None, :]), mask=m_k.T, other=0.0)
        b_k = tl.load(at(k_g, s_b, i_b, i_h, o_t[None, :], o_k[:, None]), mask=m_k, other=0.0)
        b_v = tl.load(at(v, s_v, i_b, i_h, o_t[:, None], o_v[None, :]), mask=m_v, other=0.0)
        last = tl.minimum(i_t + BT, T) - 1
        d_b = tl.load(at(b, s_b, i_b, i_h, last, o_k), mask=o_k < K, other=0.0)  # [BK]
        b_o = tl.dot(b_q, b_h.to(b_q.dtype), input_precision="ieee")  # [BT, BV]
        tl.store(at(o, s_o[1:], i_b, i_h, o_t[:, None], o_v[None, :]), b_o, mask=m_v)
        b_h = b_h * tl.exp2(d_b)[:, None] + tl.dot(b_k, b_v, input_precision="ieee")  # [BK, BV]

    # store
    tl.store(S_out + o_S, b_h, mask=m_S)


@triton.jit
def fwd_inner_chunk(q, k, b, A, s_q, s_k, s_b, T, H, K, scale, BT: tl.constexpr, BK: tl.constexpr):
    # which tile
    i_k, i_c, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_i = tl.arange(0, BT)
    o_t, o_k = (i_c * BT + o_i)[:, None], (i_k * BK + tl.arange(0, BK))[None, :]
    m = (o_t < T) & (o_k < K)  # [BT, BK]
    p_A = A + ((i_k * tl.num_programs(2) + i_bh) * tl.num_programs(1) + i_c) * BT * BT + o_i

    # load
    b_k = tl.load(at(k, s_k, i_b, i_h, o_t, o_k), mask=m, other=0.0).to(tl.float32)  # [BT, BK]
    b_g = tl.load(at(b, s_b, i_b, i_h, o_t, o_k), mask=m, other=0.0)  # [BT, BK]

    for i in range(BT):  # one query with all keys of the chunk
        t = i_c * BT + i
        m_q = o_k < tl.where(t < T, K, 0)  # [1, BK]
        _q = tl.load(at(q, s_q, i_b, i_h, t, o_k), mask=m_q, other=0.0).to(tl.float32)  # [1, BK]
        gq = tl.load(at(b, s_b, i_b, i_h, t, o_k), mask=m_q, other=float("-inf"))  # [1, BK]

        # compute: the mask goes onto the exponent, which is positive above the diagonal
        b_d = tl.where((o_i <= i)[:, None], gq - b_g, float("-inf"))  # [BT, BK]
        score = tl.sum(_q * scale * b_k * tl.exp2(b_d), axis=1)  # [BT]

        # store
        tl.store(p_A + i * BT, score)


def warps(C: int) -> tuple[int, int, int]:
    """Return the warps of the three kernels for chunks of C tokens; ValueError for a length that they do not have."""
    if C not in WARPS:
        raise ValueError(f"C: expected 16, 32 or 64, got {C!r}")
    return WARPS[C]


def _grid(x: Tensor, C: int) -> tuple[int, int, int]:
    B, T, H, K = x.shape
    return triton.cdiv(K, tile(K)), triton.cdiv(T, C), B * H


def qg_kg(q: Tensor, k: Tensor, b: Tensor, scale: float, C: int = 16) -> tuple[Tensor, Tensor]:
    """Decayed q and k `[B, T, H, K]` in their dtype; b is what `decay_cumsum` returns for the same C."""
    B, T, H, K = q.shape
    q_g, k_g = (torch.empty(B, T, H, K, dtype=q.dtype, device=q.device) for _ in "qk")
    prepare_qg_kg[_grid(q, C)](
        q, k, b, q_g, k_g, q.stride(), k.stride(), b.stride(), T, H, K, scale,
        BT=C, BK=tile(K), num_warps=warps(C)[0], **FUSED,
    )
    return q_g, k_g


def read_states(
    q_g: Tensor, k_g: Tensor, v: Tensor, b: Tensor, S: Tensor | None = None, C: int = 16
) -> tuple[Tensor, Tensor]:
    """(o `[NK, B, T, H, V]`, final state `[B, H, K, V]`), float32: what tokens read of the past chunks."""
    (B, T, H, K), V = q_g.shape, v.shape[-1]
    BK, BV = tile(K), tile(V)
    NK, NV = triton.cdiv(K, BK), triton.cdiv(V, BV)
    o = torch.empty(NK, B, T, H, V, dtype=torch.float32, device=v.device)
    S_out = torch.empty(B, H, K, V, dtype=torch.float32, device=v.device)
    fused_chunk_gla_fwd_kernel[NK, NV, B * H](
        q_g, k_g, v, b, o, S, S_out, q_g.stride(), v.stride(), o.stride(), T, H, K, V,
        BT=C, BK=BK, BV=BV, num_warps=warps(C)[1], **FUSED,
    )
    return o, S_out


def inner_scores(q: Tensor, k: Tensor, b: Tensor, scale: float, C: int = 16) -> Tensor:
    """A `[NK, B, H, N, C, C]` in float32: the scores inside each chunk, a part for each block of channels."""
    (NK, N, _), (B, T, H, K) = _grid(q, C), q.shape
    A = torch.empty(NK, B, H, N, C, C, dtype=torch.float32, device=q.device)
    fwd_inner_chunk[_grid(q, C)](
        q, k, b, A, q.stride(), k.stride(), b.stride(), T, H, K, scale,
        BT=C, BK=tile(K), num_warps=warps(C)[2], **FUSED,
    )
    return A


def gla_chunk_fuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_v: None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: None = None,
    C: int = 16,
) -> tuple[Tensor, Tensor]:
    """GLA by the four kernels of its original implementation. Forward only, and for mild gates: see the module.

    Arguments, results and errors are those of :func:`gla_ref.kernels.gla.gla`, for any K and V, except:

    Args:
        g_v: refused: these kernels have no gate on the values.
        cu_seqlens: refused: the sequences of these kernels have one length.
        C: chunk length, 16 (the original's BT), 32 or 64.

    Raises:
        ValueError: a tensor needs a gradient.
    """
    call = Call(q=q, k=k, v=v, g=g, g_v=None, initial_state=initial_state, cu_seqlens=None, scale=scale)
    sizes = check_call(call)
    warps(C)  # refuses other lengths
    for name, x in (("g_v", g_v), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            raise ValueError(f"{name}: expected None, which is all these kernels know, got a value")
    check_forward_only({"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state}, "gla_chunk_fuse")
    scale, S = contract.check_scale(scale, sizes["K"]), initial_state
    S = S if S is None else S.float().contiguous()
    b = decay_cumsum(g, C=C)
    q_g, k_g = qg_kg(q, k, b, scale, C)
    o, S = read_states(q_g, k_g, v, b, S, C)
    A = inner_scores(q, k, b, scale, C)
    with contract.outside_autocast(v):
        return combine(o, A, v), S
