"""Chunk-local running sum of log gates, natural log in, base 2 out: `fwd_decay_cumsum` (chapter 14).

    b_t = (1 / ln 2) * sum of g_l over l from the first token of t's chunk to t

Reference: :func:`gla_ref.gates.chunk_cumsum` with base2=True. Programs: one for each (block of BK
channels, chunk, sequence and head), grid (ceil(K / BK), ceil(T / C), B * H), all independent. A program
reads C * BK gates and writes as many float32 numbers: for bfloat16 gates 6 bytes an element, against
log2 C additions and one product, so memory bandwidth is all that counts. Any T, C <= 256, any K.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._contract import check_chunk, check_tensors
from ...mechanisms import Argument
from ..launch.checks import check_forward_only, check_launch
from ..launch.program import FUSED

__all__ = ["decay_cumsum"]

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
    sizes = check_tensors({"g": g}, (GATE,))
    check_chunk(C=C)
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
