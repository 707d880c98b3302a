"""Gradients of gated linear attention on a page: states both ways, then each chunk by itself (chapter 12).

Chunk by chunk, b the running sum of the log gates g, r = b_C / 2, q' = q e^(b - r) and k' = k e^(r - b), S the state
before a chunk and R the gradient of the state after it::

    S <- e^r (e^r S + k'^T v)  forwards           R <- e^r (e^r R + q'^T do)  backwards  (1)
    dv = k' e^r R + tril(q' k'^T)^T do                                                   (2)
    A  = tril(do v^T)                             D  = v (e^r R)^T                       (3)
    dq = e^(b - r) (do (e^r S)^T + A k')          dk = e^(r - b) (A^T q' + D)            (4)
    dg = sum from t on of q dq - k' (A^T q')  +  sum before t of k' D  +  rowsum(S * e^(2 r) R)  (5)

and scale times all but R. The three parts of dg cross token t: read in the chunk; written there, read later; written
earlier, read later. Reference: :mod:`gla_ref.gla_backward`. Programs: V / BV * H * B of each `walk`, which stores a
state a chunk, and K / 64 * T / C * H * B of `local`, with 2 C (C V + 2 BK V + 2 C BK) FLOPs each.

Left out: packed sequences, a gradient of the final state, gates on values, float16, sizes other than 16, 32, 64, 128.
Of a channel that decays by more than 80 nats in a chunk (float32: 4), dq is NaN from there on, dk and all of dv up to
there, dg everywhere.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decays(b_g, LIMIT: tl.constexpr):
    """e^(b - r) and e^(r - b) [C, BK], e^r [BK]."""
    i, j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    b_h, ones = b_g * 0.5, tl.full([b_g.shape[0], 16], 1.0, b_g.dtype)  # [C, BK], [C, 16]
    since = tl.where(i >= j, 1.0, -1.0).to(b_g.dtype)  # [C, C]
    x = tl.dot(since, b_h, input_precision="ieee") * LOG2E  # [C, BK], b - r
    r = tl.max(tl.dot(b_h.T, ones, input_precision="ieee"), 1)  # [BK]
    e_r = tl.where(r >= -LIMIT / 2, tl.exp2(r * LOG2E), float("nan"))
    return tl.exp2(x), tl.exp2(-x), e_r


@triton.jit
def walk(
    reads, writes, g, x, y, states, T, H, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Forwards, S of what k and x = v write. Backwards, R of what q and x = do write, and y = dv, which k reads."""
    # which tile: columns from i_v on of head i_h of sequence i_b
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    S, n = tl.zeros([BK, BV], tl.float32), tl.cdiv(T, C)
    for c in tl.range(0, n):
        t = (n - 1 - c if BACK else c) * C
        b_g = g.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_w = writes.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_x = x.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        states.store([(i_b * H + i_h) * n + t // C, 0, i_v], S.to(b_x.dtype).reshape(1, BK, BV))
        up, down, e_r = decays(b_g, LIMIT)
        b_w = (b_w * (up if BACK else down)).to(b_x.dtype)  # k', backwards q'
        S *= e_r[:, None]
        if BACK:
            b_k = (reads.load([i_b, i_h, t, 0]).reshape(C, BK) * down).to(b_x.dtype)  # k'
            P = tl.where(i <= j, tl.dot(b_k, b_w.T, input_precision="ieee"), 0.0)  # [C, C]
            b_y = tl.dot(b_k, S.to(b_x.dtype), input_precision="ieee")  # [C, BV]
            b_y = tl.dot(P.to(b_x.dtype), b_x, b_y, input_precision="ieee") * scale  # (2)
            y.store([i_b, i_h, t, i_v], b_y.to(b_x.dtype).reshape(1, 1, C, BV))
        S = tl.dot(b_w.T, b_x, S, input_precision="ieee") * e_r[:, None]  # (1)


@triton.jit
def local(
    q, k, g, dq, dk, dg, v, do, states, dstates, H, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # which tile: channels from i_k on of the chunk of head i_h of sequence i_b that starts at t
    i_k, i_h, i_b = tl.program_id(0) * BK, tl.program_id(2) % H, tl.program_id(2) // H
    t, n = tl.program_id(1) * C, tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    # compute: sums over V
    A, kept = tl.zeros([C, C], tl.float32), tl.zeros([BK], tl.float32)
    read, write = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=1):  # S and R go to products and registers: no refills
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        b_do = do.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        S = states.load([n, i_k, i_v]).reshape(BK, BV)  # [BK, BV]
        R = dstates.load([n, i_k, i_v]).reshape(BK, BV)  # [BK, BV]
        A = tl.dot(b_do, b_v.T, A, input_precision="ieee")  # (3)
        read = tl.dot(b_do, S.T, read, input_precision="ieee")
        write = tl.dot(b_v, R.T, write, input_precision="ieee")
        kept += tl.sum(S.to(tl.float32) * R, 1)

    # load
    b_g = g.load([i_b, i_h, t, i_k]).reshape(C, BK)  # [C, BK]
    b_q = q.load([i_b, i_h, t, i_k]).reshape(C, BK)  # [C, BK]
    b_k = k.load([i_b, i_h, t, i_k]).reshape(C, BK)  # [C, BK]

    # compute
    up, down, e_r = decays(b_g, LIMIT)
    b_q, b_k = (b_q * up).to(v.dtype), (b_k * down).to(v.dtype)  # q', k'
    A = tl.where(i >= j, A, 0.0).to(v.dtype)  # (3)
    write *= e_r[None, :]  # (3)
    b_dq = tl.dot(A, b_k, read * e_r[None, :], input_precision="ieee")  # (4)
    b_dk = tl.dot(A.T, b_q, input_precision="ieee")  # [C, BK]
    b_net, b_later = b_q * b_dq - b_k * b_dk, b_k * write  # [C, BK], i = j cancels in b_net
    b_dg = tl.cumsum(b_net, 0, reverse=True) + tl.cumsum(b_later, 0) - b_later  # (5)
    b_dg += (kept * e_r * e_r)[None, :]  # (5)

    # store: (4) and (5)
    dq.store([i_b, i_h, t, i_k], (b_dq * up * scale).to(v.dtype).reshape(1, 1, C, BK))
    dk.store([i_b, i_h, t, i_k], ((b_dk + write) * down * scale).to(v.dtype).reshape(1, 1, C, BK))
    dg.store([i_b, i_h, t, i_k], (b_dg * scale).to(v.dtype).reshape(1, 1, C, BK))


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


def gla_gradient(q, k, v, g, do, scale=None):
    """dq, dk, dv and dg of :func:`gla_ref.pages.gla.gla`, given the gradient do [B, T, H, V] of its output o."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    C, BV, limit = (64, 64, 80.0) if q.dtype == torch.bfloat16 else (16, 16, 4.0)
    scale, BK, N = K**-0.5 if scale is None else scale, max(K, 64), triton.cdiv(T, C)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    keys, values = (("q", q), ("k", k), ("g", g)), (("v", v), ("do", do), ("dv", dv))
    d_q, d_k, d_g = (tiles(n, x, (B, T, H, K), q, C, BK) for n, x in keys)
    d_v, d_do, d_dv = (tiles(n, x, (B, T, H, V), q, C, BV) for n, x in values)
    parts = [tiles("", x, q.shape, q, C, 64) for x in (q, k, g, dq, dk, dg)]
    S, R = v.new_empty(2, B * H * N, K, V)
    d_S, d_R = (TensorDescriptor(x, x.shape, [K * V, V, 1], [1, BK, BV]) for x in (S, R))
    both = (TensorDescriptor(x, x.shape, [K * V, V, 1], [1, 64, BV]) for x in (S, R))
    grid = triton.cdiv(V, BV), H, B
    options = {"C": C, "BV": BV, "LIMIT": limit, "num_warps": 4, "num_stages": 2}
    walk[grid](None, d_k, d_g, d_v, None, d_S, T, H, scale, BK=BK, BACK=False, **options)
    walk[grid](d_k, d_q, d_g, d_do, d_dv, d_R, T, H, scale, BK=BK, BACK=True, **options)
    local[triton.cdiv(K, 64), N, B * H](*parts, d_v, d_do, *both, H, V, scale, BK=64, **options)
    return dq, dk, dv, dg
