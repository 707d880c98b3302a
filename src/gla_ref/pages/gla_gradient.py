"""Gradients of gated linear attention on a page: states both ways, then each chunk by itself (chapter 15).

Of :mod:`gla_ref.pages.gla`, chunk by chunk: b is the running sum of the log gates g, each token's own included,
r = b_C / 2, q' = q e^(b - r) and k' = k e^(r - b), S the state before a chunk, R the gradient of the state after it::

    S <- e^r (e^r S + k'^T v)  forwards           R <- e^r (e^r R + q'^T do)  backwards  (1)
    dv = k' e^r R + tril(q' k'^T)^T do                                                   (2)
    A  = tril(do v^T)                             D  = v (e^r R)^T                       (3)
    dq = e^(b - r) (do (e^r S)^T + A k')          dk = e^(r - b) (A^T q' + D)            (4)
    dg = sum from t on of q dq - k' (A^T q')  +  sum before t of k' D  +  rowsum(S * e^(2 r) R)  (5)

and all results except R times scale. dg_t sums paths across token t: reads of the chunk, writes for later chunks, and
the way from state to state. Reference: :mod:`gla_ref.gradients.gla`. Programs: V / BV * H * B of each `walk`, which
stores a state per chunk, and K / 64 * H * T / C * B of `local`, 2 C (C V + 2 BK V + (9 C + 16) BK) FLOPs each in bf16.
Left out: packed sequences, a gradient of the final state, gates on values, float16, sizes other than 16, 32, 64, 128.
If a channel's log gates sum to less than -80 in a chunk (bf16; -4 in float32), its dq is NaN from that chunk on, its dk
and all of dv up to it, its dg everywhere. For few heads: :mod:`gla_ref.pages.linear_attention_segments`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decays(b_g, LIMIT: tl.constexpr):
    """e^(b - r) and e^(r - b) [C, BK], e^r [BK]; x is (b - r) log2 e."""
    i, j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    half_g, ones = b_g * 0.5, tl.full([b_g.shape[0], 16], 1.0, b_g.dtype)  # [C, BK], [C, 16]
    x = tl.dot(tl.where(i >= j, 1.0, -1.0).to(b_g.dtype), half_g, input_precision="ieee") * LOG2E
    r = tl.max(tl.dot(half_g.T, ones, input_precision="ieee"), 1)  # [BK], all columns are alike
    e_r = tl.where(r >= -LIMIT / 2, tl.exp2(r * LOG2E), float("nan"))
    return tl.exp2(x), tl.exp2(-x), e_r


@triton.jit
def walk(
    reads, writes, x, g, y, states, T, H, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr, BACK: tl.constexpr,
):
    """Forwards, k and x = v write the state S. Backwards, q and x = do write R, and k reads y = dv from it."""
    # which tile: columns from i_v on of head i_h of sequence i_b. b_ is a block, in registers
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
    """The places of C tokens and BD channels of a tensor [B, T, H, D], and the mask of those inside the tensor."""
    i, d = t + tl.arange(0, C)[:, None], i_d + tl.arange(0, BD)[None, :]
    return ((i_b * T + i).to(tl.int64) * H + i_h) * D + d, (i < T) & (d < D)


@triton.jit
def local(
    q, k, v, g, do, S_all, R_all, dq, dk, dg, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):
    # which tile: channels from i_k on of chunk i_c of head i_h of sequence i_b
    n_k, i_c, i_b = tl.cdiv(K, BK), tl.program_id(1), tl.program_id(2)
    i_k, i_h = tl.program_id(0) % n_k * BK, tl.program_id(0) // n_k
    n = (i_b * H + i_h) * tl.num_programs(1) + i_c  # the number of this state
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # compute: sums over V. By pointers: in a short program nothing hides how long the copy engine takes to start
    A, kept = tl.zeros([C, C], tl.float32), tl.zeros([BK], tl.float32)
    read, write = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for i_v in tl.range(0, V, BV):
        at, m = tile(i_b, i_h, i_c * C, i_v, T, H, V, C, BV)
        b_v, b_do = tl.load(v + at, mask=m, other=0.0), tl.load(do + at, mask=m, other=0.0)
        at, m = tile(n, 0, i_k, i_v, K, 1, V, BK, BV)
        S, R = tl.load(S_all + at, mask=m, other=0.0), tl.load(R_all + at, mask=m, other=0.0)
        # again, from L2: a buffer that serves products and registers is refilled too early (Triton 3.6)
        S_2 = tl.load(S_all + at, mask=m, other=0.0, eviction_policy="evict_first")
        R_2 = tl.load(R_all + at, mask=m, other=0.0, eviction_policy="evict_first")
        A = tl.dot(b_do, b_v.T, A, input_precision="ieee")  # "ieee": no TF32 in float32
        read += tl.dot(b_do, S.T, input_precision="ieee")
        write += tl.dot(b_v, R.T, input_precision="ieee")
        kept += tl.sum(S_2.to(tl.float32) * R_2, 1)
    # load
    at, m = tile(i_b, i_h, i_c * C, i_k, T, H, K, C, BK)
    b_q, b_k = tl.load(q + at, mask=m, other=0.0), tl.load(k + at, mask=m, other=0.0)  # [C, BK]
    b_g = tl.load(g + at, mask=m, other=0.0)  # [C, BK]
    # compute
    up, down, e_r = decays(b_g, LIMIT)
    b_q, b_k = (b_q * up).to(b_g.dtype), (b_k * down).to(b_g.dtype)  # q', k'
    A, write = tl.where(i >= j, A, 0.0).to(b_g.dtype), write * e_r[None, :]  # (3)
    b_dq = read * e_r[None, :] + tl.dot(A, b_k, input_precision="ieee")  # (4)
    b_dk = tl.dot(A.T, b_q, input_precision="ieee")  # [C, BK]
    b_net, b_later = b_q * b_dq - b_k * b_dk, b_k * write  # [C, BK], i = j cancels in b_net
    # store: (4) and (5)
    tl.store(dq + at, (b_dq * up * scale).to(b_g.dtype), mask=m)
    tl.store(dk + at, ((b_dk + write) * down * scale).to(b_g.dtype), mask=m)
    # by products, since tl.cumsum is slow; bf16x3: of sums of two bf16 numbers, to 2^-16
    exact: tl.constexpr = "bf16x3" if b_g.dtype == tl.bfloat16 else "ieee"
    b_dg = tl.dot((i <= j).to(tl.float32), b_net, input_precision=exact)  # [C, BK]
    b_dg = tl.dot((i > j).to(tl.float32), b_later, b_dg, input_precision=exact)
    tl.store(dg + at, ((b_dg + (kept * e_r * e_r)[None, :]) * scale).to(b_g.dtype), mask=m)


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


def gla_gradient(q, k, v, g, do, scale=None):
    """dq, dk, dv and dg of :func:`gla_ref.pages.gla.gla`, given the gradient do [B, T, H, V] of its output o."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    C, BV, limit, stages = (64, 64, 80.0, 3) if q.dtype == torch.bfloat16 else (16, 16, 4.0, 1)
    scale, BK, N = K**-0.5 if scale is None else scale, max(K, 64), triton.cdiv(T, C)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    keys, values = (("q", q), ("k", k), ("g", g)), (("v", v), ("do", do), ("dv", dv))
    d_q, d_k, d_g = (descriptor(n, x, (B, T, H, K), q, C, BK) for n, x in keys)
    d_v, d_do, d_dv = (descriptor(n, x, (B, T, H, V), q, C, BV) for n, x in values)
    S, R = v.new_empty(2, B * H * N, K, V)
    d_S, d_R = (TensorDescriptor(x, x.shape, x.stride(), [1, BK, BV]) for x in (S, R))
    grid = triton.cdiv(V, BV), H, B
    options = {"C": C, "BK": BK, "BV": BV, "LIMIT": limit, "num_stages": 2}
    walk[grid](None, d_k, d_v, d_g, None, d_S, T, H, scale, BACK=False, **options)
    walk[grid](d_k, d_q, d_do, d_g, d_dv, d_R, T, H, scale, BACK=True, **options)
    local[triton.cdiv(K, 64) * H, N, B](
        q, k, v, g, do, S, R, dq, dk, dg, T, H, K, V, scale,
        **options | {"BK": 64, "num_stages": stages if V > BV else 1},
    )
    return dq, dk, dv, dg


if __name__ == "__main__":  # python -m gla_ref.pages.gla_gradient: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gla_gradient)
