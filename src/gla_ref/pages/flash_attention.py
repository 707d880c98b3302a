"""FlashAttention on a page: causal softmax attention without the T x T matrix (chapter 4).

Token i attends to all j <= i; its row of scores comes in tiles, with a running maximum m and sum d::

    s_ij = scale q_i k_j                                                                 (1)
    m'   = max(m, max_j s_ij)                                                            (2)
    p_ij = e^(s_ij - m')      r = e^(m - m')                                             (3)
    d   <- r d + sum_j p_ij   o <- r o + sum_j p_ij v_j                                  (4)

and in the end o / d. Reference: :func:`gla_ref.softmax_attention.recurrent`; Dao 2023, algorithm 1. A program owns BM
queries of one head and walks over the keys, BN at a time, up to its last query: T / BM * H * B programs. A pair of
tiles costs 2 BM BN (K + V) FLOPs, BM BN exponentials and 2 BN (K + V) bytes in bf16, which mostly come from L2, since
programs that run together belong to the same few heads.

Left out: packed sequences, a cache of older keys, gradients, scales of 0 and below, sizes other than 16, 32, 64, 128.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def keys(
    b_q, b_o, d, m, k, v, i_b, i_h, o_i, first, last, scale,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DIAGONAL: tl.constexpr,
):
    """o [BM, BV], d and m [BM] after the keys from `first` to `last`."""
    for j in tl.range(first, last, BN):
        # load: 0 beyond the end, where no query sees a key
        b_k = k.load([i_b, i_h, j, 0]).reshape(BN, BK)  # [BN, BK]
        b_v = v.load([i_b, i_h, j, 0]).reshape(BN, BV)  # [BN, BV]
        # compute, to base 2: e^x = 2^(x log2(e)), and log2(e) is in scale; "ieee": no TF32 in float32
        s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BM, BN], over scale
        if DIAGONAL:  # elsewhere every query sees every key
            s = tl.where(o_i[:, None] >= j + tl.arange(0, BN)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)  # (2)
        p = tl.exp2(s * scale - m_new[:, None])  # (1) and (3), a fused multiply-add each
        r = tl.exp2(m - m_new)  # (3), the factor by which sums of earlier keys shrink
        d = r * d + tl.sum(p, 1)  # (4)
        b_o = tl.dot(p.to(b_v.dtype), b_v, b_o * r[:, None], input_precision="ieee")  # (4)
        m = m_new
    return b_o, d, m


@triton.jit
def attend(
    q, k, v, o, T, scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    # which tile: the last queries come first, because they have the most keys to read
    i_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    o_i = i_m + tl.arange(0, BM)  # [BM]

    # load: b_ is a block, in registers; numbers beyond the end are read as 0
    b_q = q.load([i_b, i_h, i_m, 0]).reshape(BM, BK)  # [BM, BK]

    # compute: keys that all BM queries see, then the diagonal
    b_o = tl.zeros([BM, BV], tl.float32)
    d, m = tl.zeros([BM], tl.float32), tl.full([BM], float("-inf"), tl.float32)
    seen, end = (i_m + 1) // BN * BN, tl.minimum(i_m + BM, T)
    b_o, d, m = keys(b_q, b_o, d, m, k, v, i_b, i_h, o_i, 0, seen, scale, BN, BK, BV, False)
    b_o, d, m = keys(b_q, b_o, d, m, k, v, i_b, i_h, o_i, seen, end, scale, BN, BK, BV, True)

    # store: nothing beyond the end
    o.store([i_b, i_h, i_m, 0], (b_o / d[:, None]).to(b_q.dtype).reshape(1, 1, BM, BV))


def descriptor(name, x, shape, like, *box):
    """A TMA descriptor of x as [B, H, T, D]; box: tokens, channels of a load. Refuses a tensor the page cannot take."""
    B, T, H, D = shape
    if x.shape != shape or min(shape) < 1 or D not in (16, 32, 64, 128):
        raise ValueError(f"{name}: expected {shape}, last 16, 32, 64 or 128, got {tuple(x.shape)}")
    if x.dtype != like.dtype or x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, all alike, got {x.dtype}")
    if x.device != like.device or not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: expected all tensors on one GPU, got {x.device}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous, 16-byte aligned, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, *box])


def flash_attention(q, k, v, scale=None):
    """o [B, T, H, V] of q and k [B, T, H, K], v [B, T, H, V]; scale is K^-0.5 when None."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    scale = K**-0.5 if scale is None else scale
    if not scale > 0:  # (2) takes the largest product for the largest score
        raise ValueError(f"scale: expected more than 0, got {scale}")
    o, BK, BV = torch.empty_like(v), max(K, 64), max(V, 64)
    # the fastest of those tried: a large tile waits less for keys, a small one leaves room for a second program
    BM, BN, warps, stages = (128, 128, 8, 3) if max(BK, BV) == 128 else (64, 128, 4, 2)
    if q.dtype == torch.float32:
        BM, BN, warps, stages = 32, 32, 4, 2
    d_q, d_k = (
        descriptor("q", q, (B, T, H, K), q, BM, BK),
        descriptor("k", k, (B, T, H, K), q, BN, BK),
    )
    d_v, d_o = (
        descriptor("v", v, (B, T, H, V), q, BN, BV),
        descriptor("o", o, (B, T, H, V), q, BM, BV),
    )
    attend[triton.cdiv(T, BM), H, B](
        d_q, d_k, d_v, d_o, T, scale * LOG2E,
        BM=BM, BN=BN, BK=BK, BV=BV, num_warps=warps, num_stages=stages,
    )
    return o


if __name__ == "__main__":  # python -m gla_ref.pages.flash_attention: is it right here, and how fast
    from gla_ref._commands.page import run

    run(flash_attention)
