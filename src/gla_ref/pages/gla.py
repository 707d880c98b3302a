"""Gated linear attention on a page: all scores of a chunk from one product, q' k'^T (chapter 13).

Computes, for log gates g <= 0::

    S_t = diag(e^g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

Chunk by chunk, b [C, K] is the running sum of g, each token's own gate included, b_C its last row, and r = b_C / 2 [K]
one exponent for each row of S [K, V]::

    q' = q e^(b - r)    k' = k e^(r - b)    S' = e^r S                                   (1)
    o  = scale (q' S' + tril(q' k'^T) v)                                                 (2)
    S <- e^r (S' + k'^T v)                                                               (3)

Why r: b - r lies between b_C / 2 and -b_C / 2. Without it, k e^(-b) would reach e^(-b_C). Reference:
:func:`gla_ref.gla.recurrent`.

A program owns BV columns of the state of one head, keeps them in registers and walks over the chunks of its sequence:
ceil(V / BV) * H * B programs, with C = BV = 64 in bf16 and 16 in float32. A chunk moves 2 C (3 K + 2 BV) bytes in bf16
and costs 2 C (C (2 BK + BV) + 2 BK BV + 16 BK) FLOPs, BK = max(K, 64). Of these, 2 C BK (C + 16) sum the gates, in the
products with `sign` and `ones` below.

Left out: packed sequences, initial states, gradients, gates on values, float16, sizes other than 16, 32, 64 and 128.
Few heads leave multiprocessors idle; :mod:`gla_ref.pages.linear_attention_segments` has a remedy, without gates. If any
channel's log gates sum to less than -80 in a chunk (bf16; -4 in float32), o of that head is NaN from that chunk on, and
so is that channel's row of the state. So q' and k' are at most e^40 (e^2) times q and k, and their products are far
from the largest number. The limit for float32 is lower because the error of e^x, x / 2^24, would show; bf16 hides it.
:mod:`gla_ref.pages.gla_levels` takes every gate.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def walk(
    q, k, v, g, o, S_last, T, H, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):
    # q, k, v, g and S_last are descriptors, made below; o is a pointer
    # which tile: columns from i_v on of head i_h of sequence i_b. Below, b_q, b_k, b_v, b_o are the chunk's blocks of
    # q, k, v, o, in registers (the running sum b of the docstring is in `exponent`)
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # sum_(j <= i) g_j / 2 - sum_(j > i) g_j / 2 = (b_i - (b_C - b_i)) / 2 = b_i - r
    sign = tl.where(i >= j, 1.0, -1.0).to(g.dtype)  # [C, C]
    ones = tl.full([C, 16], 1.0, g.dtype)  # [C, 16]: a product has at least 16 columns
    S = tl.zeros([BK, BV], tl.float32)

    for t in tl.range(0, T, C):
        # load: 0 beyond T, where it changes nothing: g = 0 keeps the state, k = 0 adds nothing to it
        half_g = g.load([i_b, i_h, t, 0]).reshape(C, BK) * 0.5  # [C, BK], exact
        b_q = q.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]

        # compute. "ieee": float32 is not rounded to TF32; for bf16 it changes nothing.
        # Sums over tokens are products too: faster than tl.cumsum and tl.sum
        exponent = tl.dot(sign, half_g, input_precision="ieee") * LOG2E  # [C, BK], (b - r) log2 e
        # half of all gates is r, in the threads that hold the rows of S: nothing moves. All 16 columns are alike, and
        # the maximum takes one. LIMIT bounds the whole sum, so half of it bounds r
        r = tl.max(tl.dot(half_g.T, ones, input_precision="ieee"), 1)  # [BK]
        e_r = tl.where(r >= -LIMIT / 2, tl.exp2(r * LOG2E), float("nan"))[:, None]  # [BK, 1]
        b_q = (b_q * tl.exp2(exponent)).to(b_v.dtype)  # q' of (1)
        b_k = (b_k * tl.exp2(-exponent)).to(b_v.dtype)  # k' of (1)
        S *= e_r  # S' of (1)
        P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C], q' k'^T
        P = tl.where(i >= j, P, 0.0).to(b_v.dtype)  # tril: above the diagonal P may be huge
        b_o = tl.dot(b_q, S.to(b_v.dtype), input_precision="ieee")  # [C, BV], q' S'
        b_o = tl.dot(P, b_v, b_o, input_precision="ieee") * scale  # (2)
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee") * e_r  # (3)

        # store by pointers: a store by descriptor goes through a buffer [C, BV] in shared memory, and with it a second
        # program no longer fits on the multiprocessor. (S_last is stored after the loop, whose buffers are free then.)
        # int64: more than 2^31 numbers (not tokens) may lie before a row
        row = ((i_b * T + t + i).to(tl.int64) * H + i_h) * V  # [C, 1]
        column = i_v + tl.arange(0, BV)[None, :]  # [1, BV]
        tl.store(o + row + column, b_o.to(b_v.dtype), mask=(t + i < T) & (column < V))
    S_last.store([i_b, i_h, 0, i_v], S.reshape(1, 1, BK, BV))


def descriptor(name, x, shape, like, *box):
    """A TMA descriptor of x as [B, H, T, D]; box: tokens, channels of a load. Refuses a tensor the page cannot take."""
    B, T, H, D = shape
    if x.shape != shape or min(shape) < 1 or D not in (16, 32, 64, 128):
        raise ValueError(f"{name}: expected {shape}, last 16, 32, 64 or 128, got {tuple(x.shape)}")
    if x.dtype != like.dtype or x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{name}: expected bfloat16 or float32, all of one dtype, got {x.dtype}")
    if x.device != like.device or not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: expected all tensors on one GPU, got {x.device}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous, 16-byte aligned, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, *box])


def gla(q, k, v, g, scale=None):
    """o [B, T, H, V] and the state after the last token, float32 [B, H, K, V].

    q, k and log gates g [B, T, H, K], v [B, T, H, V]; scale is K^-0.5 when None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    C, BV, limit = (64, 64, 80.0) if q.dtype == torch.bfloat16 else (16, 16, 4.0)
    BK = max(K, 64)  # narrower tiles gave wrong results in bf16 (Triton 3.6); channels beyond K are zeros
    o, S = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32)
    keys = ("q", q), ("k", k), ("g", g)
    d_q, d_k, d_g = (descriptor(n, x, (B, T, H, K), q, C, BK) for n, x in keys)
    d_v = descriptor("v", v, (B, T, H, V), q, C, BV)
    d_S = TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV])
    walk[triton.cdiv(V, BV), H, B](
        d_q, d_k, d_v, d_g, o, d_S, T, H, V, K**-0.5 if scale is None else scale,
        C=C, BK=BK, BV=BV, LIMIT=limit, num_warps=4,
        num_stages=3 if K <= 64 else 2,  # chunks in shared memory: what two programs have room for
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gla: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gla)
