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
def tile(i_b, i_h, t, i_d, T, H, D, C: tl.constexpr, BD: tl.constexpr):
    """Where C tokens and BD channels of a tensor [B, T, H, D] lie, and which of them there are."""
    i, d = t + tl.arange(0, C)[:, None], i_d + tl.arange(0, BD)[None, :]
    return ((i_b * T + i).to(tl.int64) * H + i_h) * D + d, (i < T) & (d < D)


@triton.jit
def add_up(which, x, dtype: tl.constexpr):
    """The rows of x [C, D] that each row of `which` [C, C] marks, added up: by products, faster than tl.cumsum."""
    high = x.to(dtype)  # in bf16 with the rest, rounded too: to 2^-17
    b_sum = tl.dot(which.to(dtype), high, input_precision="ieee")
    return tl.dot(which.to(dtype), (x - high).to(dtype), b_sum, input_precision="ieee")


@triton.jit
def local(
    q, k, g, dq, dk, dg, v, do, states, dstates, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # which tile: channels from i_k on of chunk i_c of head i_h of sequence i_b
    n_k, i_c, i_b = tl.cdiv(K, BK), tl.program_id(1), tl.program_id(2)
    i_k, i_h = tl.program_id(0) % n_k * BK, tl.program_id(0) // n_k
    n = (i_b * H + i_h) * tl.num_programs(1) + i_c  # of all states
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    # compute: sums over V. Loads by pointers: by descriptors each would wait for the one before
    A, kept = tl.zeros([C, C], tl.float32), tl.zeros([BK], tl.float32)
    read, write = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for i_v in tl.range(0, V, BV):
        at, m = tile(i_b, i_h, i_c * C, i_v, T, H, V, C, BV)
        b_v = tl.load(v + at, mask=m, other=0.0)  # [C, BV]
        b_do = tl.load(do + at, mask=m, other=0.0)  # [C, BV]
        at, m = tile(n, 0, i_k, i_v, K, 1, V, BK, BV)
        S = tl.load(states + at, mask=m, other=0.0)  # [BK, BV]
        R = tl.load(dstates + at, mask=m, other=0.0)  # [BK, BV]
        # again, from L2: Triton refills a buffer that serves products and registers while products still read it
        S_2 = tl.load(states + at, mask=m, other=0.0, eviction_policy="evict_first")
        R_2 = tl.load(dstates + at, mask=m, other=0.0, eviction_policy="evict_first")
        A = tl.dot(b_do, b_v.T, A, input_precision="ieee")  # (3)
        read += tl.dot(b_do, S.T, input_precision="ieee")
        write += tl.dot(b_v, R.T, input_precision="ieee")
        kept += tl.sum(S_2.to(tl.float32) * R_2, 1)

    # load
    at, m = tile(i_b, i_h, i_c * C, i_k, T, H, K, C, BK)
    b_q = tl.load(q + at, mask=m, other=0.0)  # [C, BK]
    b_k = tl.load(k + at, mask=m, other=0.0)  # [C, BK]
    b_g = tl.load(g + at, mask=m, other=0.0)  # [C, BK]

    # compute
    up, down, e_r = decays(b_g, LIMIT)
    A = tl.where(i >= j, A, 0.0).to(b_q.dtype)  # (3)
    b_q, b_k = (b_q * up).to(b_g.dtype), (b_k * down).to(b_g.dtype)  # q', k'
    write *= e_r[None, :]  # (3)
    b_dq = read * e_r[None, :] + tl.dot(A, b_k, input_precision="ieee")  # (4)
    b_dk = tl.dot(A.T, b_q, input_precision="ieee")  # [C, BK]
    b_net, b_later = b_q * b_dq - b_k * b_dk, b_k * write  # [C, BK], i = j cancels in b_net

    # store: (4) and (5)
    tl.store(dq + at, (b_dq * up * scale).to(b_g.dtype), mask=m)
    tl.store(dk + at, ((b_dk + write) * down * scale).to(b_g.dtype), mask=m)
    b_dg = add_up(i <= j, b_net, b_g.dtype) + add_up(i > j, b_later, b_g.dtype)  # [C, BK]
    b_dg = (b_dg + (kept * e_r * e_r)[None, :]) * scale  # (5)
    tl.store(dg + at, b_dg.to(b_g.dtype), mask=m)


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
    S, R = v.new_empty(2, B * H * N, K, V)
    d_S, d_R = (TensorDescriptor(x, x.shape, [K * V, V, 1], [1, BK, BV]) for x in (S, R))
    grid = triton.cdiv(V, BV), H, B
    options = {"C": C, "BV": BV, "LIMIT": limit, "num_warps": 4}
    walk[grid](
        None, d_k, d_g, d_v, None, d_S, T, H, scale, BK=BK, BACK=False, num_stages=2, **options
    )
    walk[grid](
        d_k, d_q, d_g, d_do, d_dv, d_R, T, H, scale, BK=BK, BACK=True, num_stages=2, **options
    )
    local[triton.cdiv(K, 64) * H, N, B](
        q, k, g, dq, dk, dg, v, do, S, R, T, H, K, V, scale,
        BK=64, num_stages=3 if V > BV and limit == 80 else 1, **options,
    )  # fmt: skip
    return dq, dk, dv, dg
