"""Gated linear attention on a page: one product a chunk, anchored in the middle (chapter 11).

Chunk by chunk, with b the running sum of the log gates g in the chunk and r = b_C / 2, half of its total::

    q' = q e^(b - r)    k' = k e^(r - b)    S' = e^r S                                   (1)
    o  = scale (q' S' + tril(q' k'^T) v)                                                 (2)
    S <- e^r (S' + k'^T v)                                                               (3)

Reference: :func:`gla_ref.gla.recurrent`. A program owns BV columns of the state of one head, keeps them in registers
and walks over the chunks of its sequence: V / BV * H * B programs. A chunk moves 2 C (3 K + 2 BV) bytes in bf16 and
costs 2 C (C (2 K + BV) + 2 K BV) FLOPs, of which the product that sums the gates has 2 C C K.

Left out: packed sequences, initial states, gradients, gates on values, float16, sizes other than 16, 32, 64 and 128.
k' may be k times e^40 in bf16 and e^2 in float32, which is how far a channel may decay in half a chunk. If one decays
by more, all outputs of its head are NaN from that chunk on, and so is the channel's row of the state. There is no such
limit in :mod:`gla_ref.pages.gla_levels`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def walk(
    q, k, g, v, o, S_T, T, H, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # which tile: columns from i_v on of head i_h of sequence i_b
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # of g / 2: the sum up to a token less the sum after it is b - r
    since = tl.where(i >= j, 1.0, -1.0).to(g.dtype)  # [C, C]
    ones = tl.full([C, 16], 1.0, g.dtype)  # [C, 16], the narrowest product that there is
    S = tl.zeros([BK, BV], tl.float32)

    for t in tl.range(0, T, C):
        # load: descriptors know where the tensors end, and read 0 beyond
        b_h = g.load([i_b, i_h, t, 0]).reshape(C, BK) * 0.5  # [C, BK], exact
        b_q = q.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]

        # compute: a product sums faster than tl.cumsum and tl.sum, and leaves r where the rows of S are
        x = tl.dot(since, b_h, input_precision="ieee") * LOG2E  # [C, BK]
        r = tl.max(tl.dot(b_h.T, ones, input_precision="ieee"), 1)  # [BK], all columns alike
        e_r = tl.where(r >= -LIMIT / 2, tl.exp2(r * LOG2E), float("nan"))[:, None]  # [BK, 1]
        b_q = (b_q * tl.exp2(x)).to(b_v.dtype)  # (1)
        b_k = (b_k * tl.exp2(-x)).to(b_v.dtype)  # (1)
        S *= e_r  # (1)
        P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
        P = tl.where(i >= j, P, 0.0).to(b_v.dtype)  # where: above the diagonal it may be infinite
        b_o = tl.dot(b_q, S.to(b_v.dtype), input_precision="ieee")  # [C, BV]
        b_o = tl.dot(P, b_v, b_o, input_precision="ieee") * scale  # (2)
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee") * e_r  # (3)

        # store: by pointers, since what a descriptor stores waits in shared memory, of which two programs share one
        row = ((i_b * T + t + i).to(tl.int64) * H + i_h) * V  # [C, 1]
        column = i_v + tl.arange(0, BV)[None, :]  # [1, BV]
        tl.store(o + row + column, b_o.to(b_v.dtype), mask=(t + i < T) & (column < V))
    S_T.store([i_b, i_h, 0, i_v], S.reshape(1, 1, BK, BV))


def tiles(name, x, shape, like, *box):
    """x [B, T, H, D] for the copy engine, in boxes of some tokens and channels of a head; refuses what is left out."""
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
    o, S, BK = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32), max(K, 64)
    keys = [tiles(n, x, (B, T, H, K), q, C, BK) for n, x in (("q", q), ("k", k), ("g", g))]
    values = tiles("v", v, (B, T, H, V), q, C, BV)
    state = TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV])
    walk[triton.cdiv(V, BV), H, B](
        *keys, values, o, state, T, H, V, K**-0.5 if scale is None else scale,
        C=C, BK=BK, BV=BV, LIMIT=limit, num_warps=4, num_stages=3 if K <= 64 else 2,
    )  # fmt: skip
    return o, S
