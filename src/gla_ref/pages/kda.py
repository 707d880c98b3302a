"""Kimi Delta Attention on a page: anchors, solve, walk (chapter 24).

Computes, for log gates g <= 0, a number for each token, value head and channel, and write strengths beta::

    S_t = (I - beta_t k_t^T k_t) diag(e^g_t) S_(t-1) + beta_t k_t^T v_t        o_t = scale q_t S_t

Chunk by chunk, with b_i = g_1 + ... + g_i in the chunk, a row of K numbers for each token::

    A_ij = beta_i sum_a k_ia k_ja e^(b_ia - b_ja), j < i      P_ij = sum_a q_ia k_ja e^(b_ia - b_ja), j <= i   (1)
    Y = (I + A)^-1        U = Y beta v        W = Y beta (e^b k)                                               (2)
    w = U - W S                                                                                                (3)
    o = scale ((e^b q) S + P w)                                                                                (4)
    S <- e^(b_C) S + (e^(b_C - b) k)^T w                                                                       (5)

(1) is a product for each block of 16 writers j, anchored at r, the middle of the block's decay: e^(b - r) for readers,
e^(r - b) for the 16 keys. `prepare` makes (1) and (2) of all chunks at once, in HV T / C programs. Then a program of
`walk` owns BV columns of the state of one head and walks over its chunks: V / BV * HV * B programs, with C = BV = 64 in
bf16, 32 and 16 in float32. A chunk of `walk` moves 2 C (3 K + 2 BV + C) bytes in bf16, and costs 2 C (C BV + 3 K BV)
FLOPs. Reference: :func:`gla_ref.kda.recurrent`.

Left out: packed sequences, initial states, gradients, segments for few heads, float16, sizes other than 16, 32, 64 and
128. If any channel's log gates sum to less than -80 in a block (bf16; -4 in float32), o of that head is NaN from that
chunk on, and so is its state: gates above -5 never do in bf16. Keys should have length 1: they are taken as they are.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def inverse(A):
    """(I + A)^-1 of A [C, C] below the diagonal, by elimination: row t is done, and is taken from the rows below it."""
    i, j = tl.arange(0, A.shape[0])[:, None], tl.arange(0, A.shape[0])[None, :]
    Y = tl.where(i == j, 1.0, tl.zeros_like(A))
    for t in tl.range(0, A.shape[0] - 1):
        column, row = tl.sum(tl.where(j == t, A, 0.0), 1), tl.sum(tl.where(i == t, Y, 0.0), 0)  # [C]
        Y -= column[:, None] * row[None, :]
    return Y


@triton.jit
def prepare(
    q, k, v, g, beta, q_since, k_until, U, W, P, through, T, HV, G, K, V,
    C: tl.constexpr, BD: tl.constexpr, LIMIT: tl.constexpr,
):
    # which tile: chunk i_n of value head i_h of sequence i_b; b_ is a block, in registers
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], i_n * C
    A, b_P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for i_d in tl.range(0, K, BD):
        # load: 0 beyond T and K, where it changes nothing
        b_q = q.load([i_b, i_h // G, t, i_d]).reshape(C, BD)  # [C, BD]
        b_k = k.load([i_b, i_h // G, t, i_d]).reshape(C, BD)  # [C, BD]
        b_g = g.load([i_b, i_h, t, i_d]).reshape(C, BD).to(tl.float32) * LOG2E  # [C, BD]
        b = tl.cumsum(b_g, 0)
        for n in tl.range(0, C, 16):  # the block of 16 tokens from n on writes, it and all later ones read
            block = (i >= n) & (i < n + 16)
            decay, middle = tl.sum(tl.where(block, b_g, 0.0), 0), (i == n - 1) | (i == n + 15)  # [BD]
            r = tl.where(decay >= -LIMIT * LOG2E, tl.sum(tl.where(middle, b, 0.0), 0) / 2, float("nan"))
            up = tl.exp2(tl.where(i >= n, b - r, float("-inf")))  # 0 for earlier readers
            down = tl.exp2(tl.where(block, r - b, float("-inf")))
            y = (b_k * down).to(b_k.dtype).T  # [BD, C]
            b_P = tl.dot((b_q * up).to(b_k.dtype), y, b_P, input_precision="ieee")  # (1)
            A = tl.dot((b_k * up).to(b_k.dtype), y, A, input_precision="ieee")  # (1)
    o_t = t + tl.arange(0, C)
    b_beta = tl.load(beta + (i_b * T + o_t).to(tl.int64) * HV + i_h, mask=o_t < T, other=0.0).to(tl.float32)  # [C]
    Y = (inverse(tl.where(i > j, A * b_beta[:, None], 0.0)) * b_beta[None, :]).to(q.dtype)  # (2)
    P.store([i_b, i_h, t, 0], tl.where(i >= j, b_P, 0.0).to(q.dtype).reshape(1, 1, C, C))
    for i_d in tl.range(0, K, BD):
        b_q = q.load([i_b, i_h // G, t, i_d]).reshape(C, BD)  # [C, BD]
        b_k = k.load([i_b, i_h // G, t, i_d]).reshape(C, BD)  # [C, BD]
        b_g = g.load([i_b, i_h, t, i_d]).reshape(C, BD).to(tl.float32) * LOG2E  # [C, BD]
        b, total = tl.cumsum(b_g, 0), tl.sum(b_g, 0)  # [C, BD], [BD]
        since, until = tl.exp2(b), tl.exp2(total - b)  # at most 1
        q_since.store([i_b, i_h, t, i_d], (b_q * since).to(q.dtype).reshape(1, 1, C, BD))
        k_until.store([i_b, i_h, t, i_d], (b_k * until).to(q.dtype).reshape(1, 1, C, BD))
        b_W = tl.dot(Y, (b_k * since).to(q.dtype), input_precision="ieee")  # (2)
        W.store([i_b, i_h, t, i_d], b_W.to(q.dtype).reshape(1, 1, C, BD))
        through.store([i_b, i_h, i_n, i_d], tl.exp2(total).reshape(1, 1, 1, BD))
    for i_d in tl.range(0, V, BD):
        b_U = tl.dot(Y, v.load([i_b, i_h, t, i_d]).reshape(C, BD), input_precision="ieee")  # (2)
        U.store([i_b, i_h, t, i_d], b_U.to(q.dtype).reshape(1, 1, C, BD))


@triton.jit
def walk(q_since, k_until, U, W, P, through, o, S_last, T, scale, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    # which tile: columns from i_v on of value head i_h of sequence i_b
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    S = tl.zeros([BK, BV], tl.float32)
    for t in tl.range(0, T, C):
        # load
        b_q = q_since.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k_until.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_W = W.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_U = U.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        b_P = P.load([i_b, i_h, t, 0]).reshape(C, C)  # [C, C]
        b_through = through.load([i_b, i_h, t // C, 0]).reshape(BK)  # [BK]

        # compute: sums in float32, operands in the dtype of the inputs; "ieee": float32 is not rounded to TF32
        b_S = S.to(b_k.dtype)  # [BK, BV]
        w = (b_U - tl.dot(b_W, b_S, input_precision="ieee")).to(b_k.dtype)  # (3), [C, BV]
        b_o = tl.dot(b_q, b_S, input_precision="ieee")  # [C, BV]
        b_o = tl.dot(b_P, w, b_o, input_precision="ieee") * scale  # (4)
        o.store([i_b, i_h, t, i_v], b_o.to(b_k.dtype).reshape(1, 1, C, BV))  # nothing beyond the end
        S = tl.dot(b_k.T, w, S * b_through[:, None], input_precision="ieee")  # (5)
    S_last.store([i_b, i_h, 0, i_v], S.reshape(1, 1, BK, BV))


def check(name, x, shape, like, dtypes):
    """Refuse arguments that this page leaves out."""
    if x.shape != shape or min(shape) < 1:
        raise ValueError(f"{name}: expected {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {', '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != like.device or not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: expected all tensors on one GPU, got {x.device}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous, 16-byte aligned, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")


def kda(q, k, v, g, beta, scale=None):
    """o [B, T, HV, V] and the last state, float32 [B, HV, K, V], of q and k [B, T, H, K], v [B, T, HV, V],
    g [B, T, HV, K] and beta [B, T, HV], HV a multiple of H; scale is K^-0.5 when None."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), (HV, V), sizes = q.shape, v.shape[2:], (16, 32, 64, 128)
    for name, n in (("q", K), ("v", V)):
        if n not in sizes:
            raise ValueError(f"{name}: expected last one of {sizes}, got {n}")
    if HV % H:
        raise ValueError(f"v: expected heads a multiple of {H}, got {HV}")
    for name, x, shape in (("q", q, q.shape), ("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        check(name, x, shape, q, (torch.bfloat16, torch.float32))
    for name, x, shape in (("k", k, q.shape), ("v", v, (B, T, HV, V))):
        check(name, x, shape, q, (q.dtype,))
    C, BV, limit, warps = (64, 64, 80.0, 4) if q.dtype == torch.bfloat16 else (32, 16, 4.0, 16)
    BK, N = max(K, 64), triton.cdiv(T, C)  # narrower tiles of bf16 were wrong (Triton 3.6); zeros beyond K and V
    o, S = torch.empty_like(v), v.new_empty(B, HV, K, V, dtype=torch.float32)
    q_since, k_until, U, W, P = (q.new_empty(B, T, HV, n) for n in (K, K, V, K, C))
    through = S.new_empty(B, N, HV, K)

    def heads(x, tokens, width):  # [B, H, T, D] in boxes
        B, T, H, D = x.shape
        return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, tokens, width])

    prepare[N, HV, B](
        *(heads(x, C, 64) for x in (q, k, v, g)), beta, *(heads(x, C, 64) for x in (q_since, k_until, U, W)),
        heads(P, C, C), heads(through, 1, 64), T, HV, HV // H, K, V, C=C, BD=64, LIMIT=limit, num_warps=warps,
    )
    walk[triton.cdiv(V, BV), HV, B](
        *(heads(x, C, BK) for x in (q_since, k_until)), heads(U, C, BV), heads(W, C, BK), heads(P, C, C),
        heads(through, 1, BK), heads(o, C, BV), TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV]),
        T, K**-0.5 if scale is None else scale, C=C, BK=BK, BV=BV, num_warps=warps, num_stages=2,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.kda: is it right here, and how fast
    from gla_ref._commands.page import run

    run(kda)
