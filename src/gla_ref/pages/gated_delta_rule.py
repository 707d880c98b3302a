"""The gated delta rule on a page: solve a triangle, write, read (chapter 20).

Computes, for log gates g <= 0 and write strengths beta, a number for each token and value head::

    S_t = e^g_t (I - beta_t k_t^T k_t) S_(t-1) + beta_t k_t^T v_t        o_t = scale q_t S_t

Chunk by chunk, with b_i = g_1 + ... + g_i in the chunk and D_ij = e^(g_(j+1) + ... + g_i) for j <= i, else 0::

    A = tril(beta_i (k_i k_j^T) D_ij, -1)        P = (q k^T) * D                         (1)
    Y = (I + A)^-1                                                                       (2)
    write = Y beta (v - e^b (k S))                                                       (3)
    o = scale (e^b (q S) + P write)                                                      (4)
    S <- e^(b_C) S + k^T (e^(b_C - b) write)                                             (5)

Reference: :func:`gla_ref.gated_delta_rule.recurrent`. `solve` makes (1) and (2) of all chunks at once, in HV T / C
programs. Then a program of `walk` owns BV columns of the state of one head and walks over the chunks of its sequence:
V / BV * HV * B programs, with C = BV = 64 in bf16, 32 and 16 in float32. A chunk moves 2 C (2 K + 2 BV + 2 C) bytes in
bf16, and costs 2 C (2 C BV + 3 K BV) FLOPs. The delta rule is g = 0.

Left out: packed sequences, initial states, gradients, segments for few heads, float16, sizes other than 16, 32, 64 and
128. Keys should have length 1: they are taken as they are.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def inverse(A):
    """(I + A)^-1 of A [C, C] below the diagonal: of the two blocks on the diagonal, then the block between them."""
    n: tl.constexpr = A.shape[0] // 2
    i, j, m = tl.arange(0, n)[None, :, None], tl.arange(0, n)[None, None, :], tl.arange(0, 2)
    A = A.reshape(2, n, 2, n)
    own, below = m[:, None, None, None] == m[None, None, :, None], m[:, None, None, None] > m[None, None, :, None]
    halves = tl.sum(tl.where(own, A, 0.0), 2)  # [2, n, n]
    Y = tl.where(i == j, 1.0, tl.zeros_like(halves))
    for t in tl.range(0, n - 1):  # elimination: row t is done, and is taken from the rows below it
        column, row = tl.sum(tl.where(j == t, halves, 0.0), 2), tl.sum(tl.where(i == t, Y, 0.0), 1)  # [2, n]
        Y -= column[:, :, None] * row[:, None, :]
    A_21 = tl.sum(tl.sum(tl.where(below, A, 0.0), 2), 0)  # [n, n]
    Y_1, Y_2 = tl.sum(tl.where(m[:, None, None] == 0, Y, 0.0), 0), tl.sum(tl.where(m[:, None, None] == 1, Y, 0.0), 0)
    Y_21 = -tl.dot(Y_2, tl.dot(A_21, Y_1, input_precision="ieee"), input_precision="ieee")
    Y = tl.where(own, Y[:, :, None, :], tl.where(below, Y_21[None, :, None, :], 0.0))  # [2, n, 2, n]
    return Y.reshape(2 * n, 2 * n)


@triton.jit
def solve(q, k, g, beta, P, Y, decay, T, HV, G, C: tl.constexpr, BK: tl.constexpr):
    # which tile: chunk i_n of value head i_h of sequence i_b; b_ is a block, in registers
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_c = tl.arange(0, C)
    i, j, t = o_c[:, None], o_c[None, :], i_n * C + o_c

    # load: 0 beyond T, where it changes nothing
    b_q = q.load([i_b, i_h // G, i_n * C, 0]).reshape(C, BK)  # [C, BK]
    b_k = k.load([i_b, i_h // G, i_n * C, 0]).reshape(C, BK)  # [C, BK]
    o_g = (i_b * T + t).to(tl.int64) * HV + i_h
    b_g = tl.load(g + o_g, mask=t < T, other=0.0).to(tl.float32) * LOG2E  # [C]
    b_beta = tl.load(beta + o_g, mask=t < T, other=0.0).to(tl.float32)  # [C]

    # compute: sums of just the gates between; differences of sums would be NaN after g = -inf
    between = tl.cumsum(tl.where(i > j, b_g[:, None], 0.0), 0)  # [C, C]
    D = tl.exp2(tl.where(i >= j, between, float("-inf")))  # 0 above the diagonal
    b_P = tl.dot(b_q, b_k.T, input_precision="ieee") * D  # (1)
    A = tl.where(i > j, tl.dot(b_k, b_k.T, input_precision="ieee") * D, 0.0) * b_beta[:, None]  # (1)
    b_Y = inverse(A) * b_beta[None, :]  # (2), and beta of (3): stored as Y

    # store
    chunk = ((i_b * HV + i_h) * tl.num_programs(0) + i_n).to(tl.int64)
    tl.store(P + chunk * C * C + i * C + j, b_P.to(P.dtype.element_ty))
    tl.store(Y + chunk * C * C + i * C + j, b_Y.to(Y.dtype.element_ty))
    tl.store(decay + chunk * 2 * C + o_c, tl.exp2(tl.cumsum(b_g, 0)))  # e^b
    tl.store(decay + chunk * 2 * C + C + o_c, tl.sum(tl.where(i == C - 1, D, 0.0), 0))  # e^(b_C - b)


@triton.jit
def walk(q, k, v, P, Y, decay, o, S_last, T, scale, G, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    # which tile: columns from i_v on of value head i_h of sequence i_b
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    o_c = tl.arange(0, C)
    square = o_c[:, None] * C + o_c[None, :]
    first = ((i_b * tl.num_programs(1) + i_h) * tl.cdiv(T, C)).to(tl.int64)
    S = tl.zeros([BK, BV], tl.float32)

    for t in tl.range(0, T, C):
        # load
        chunk = first + t // C
        b_q = q.load([i_b, i_h // G, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h // G, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        b_P, b_Y = tl.load(P + chunk * C * C + square), tl.load(Y + chunk * C * C + square)  # [C, C]
        since, until = tl.load(decay + chunk * 2 * C + o_c), tl.load(decay + chunk * 2 * C + C + o_c)  # [C]
        through = tl.load(decay + chunk * 2 * C + C - 1)  # e^(b_C)

        # compute: sums in float32, operands in the dtype of the inputs; "ieee": float32 is not rounded to TF32
        b_S = S.to(b_k.dtype)  # [BK, BV]
        x = b_v - tl.dot(b_k, b_S, input_precision="ieee") * since[:, None]  # [C, BV]
        write = tl.dot(b_Y, x.to(b_k.dtype), input_precision="ieee")  # (3), [C, BV]
        b_o = tl.dot(b_q, b_S, input_precision="ieee") * since[:, None]  # [C, BV]
        b_o = tl.dot(b_P, write.to(b_k.dtype), b_o, input_precision="ieee") * scale  # (4)
        o.store([i_b, i_h, t, i_v], b_o.to(b_k.dtype).reshape(1, 1, C, BV))  # nothing beyond the end
        S = tl.dot(b_k.T, (write * until[:, None]).to(b_k.dtype), S * through, input_precision="ieee")  # (5)
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


def gated_delta_rule(q, k, v, g, beta, scale=None):
    """o [B, T, HV, V] and the state after the last token, float32 [B, HV, K, V].

    q and k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV], HV a multiple of H; scale is K^-0.5 when None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), (HV, V), sizes = q.shape, v.shape[2:], (16, 32, 64, 128)
    for name, n in (("q", K), ("v", V)):
        if n not in sizes:
            raise ValueError(f"{name}: expected last one of {sizes}, got {n}")
    if HV % H:
        raise ValueError(f"v: expected heads a multiple of {H}, got {HV}")
    floats = torch.bfloat16, torch.float32
    for name, x, shape in (("q", q, q.shape), ("k", k, q.shape), ("v", v, (B, T, HV, V))):
        check(name, x, shape, q, floats if name == "q" else (q.dtype,))
    for name, x in (("g", g), ("beta", beta)):
        check(name, x, (B, T, HV), q, floats)
    # at least 64 channels: narrower tiles of bf16 were wrong (Triton 3.6); those beyond K and V are zeros
    C, BV, warps = (64, 64, 4) if q.dtype == torch.bfloat16 else (32, 16, 16)
    BK, N = max(K, 64), triton.cdiv(T, C)
    o, S = torch.empty_like(v), v.new_empty(B, HV, K, V, dtype=torch.float32)
    P, Y = (q.new_empty(B, HV, N, C, C) for _ in "PY")
    decay = q.new_empty(B, HV, N, 2, C, dtype=torch.float32)

    def heads(x, width):  # [B, H, T, D] in boxes of C tokens
        D, n = x.shape[3], x.shape[2]
        return TensorDescriptor(x, [B, n, T, D], [T * n * D, D, n * D, 1], [1, 1, C, width])

    d_q, d_k, d_v, d_o = heads(q, BK), heads(k, BK), heads(v, BV), heads(o, BV)
    d_S = TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV])
    solve[N, HV, B](d_q, d_k, g, beta, P, Y, decay, T, HV, HV // H, C=C, BK=BK, num_warps=warps)
    walk[triton.cdiv(V, BV), HV, B](
        d_q, d_k, d_v, P, Y, decay, d_o, d_S, T, K**-0.5 if scale is None else scale, HV // H,
        C=C, BK=BK, BV=BV, num_warps=warps, num_stages=2,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gated_delta_rule: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gated_delta_rule)
