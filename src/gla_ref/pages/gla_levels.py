"""Gated linear attention on a page, for every log gate in [-inf, 0]: pairs of strong chunks in levels (chapter 13).

Computes::

    S_t = diag(e^g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

Chunk by chunk, b is the running sum of g, each token's own gate included. One product a chunk, as in
:mod:`gla_ref.pages.gla`, holds in *mild* chunks, where b_C is at least -80 (float32: -4) in all channels. In a *strong*
chunk, all others, reads decay from its start and writes to its end instead::

    mild    q' = q e^(b - b_C / 2)   k' = k e^(b_C / 2 - b)   S' = e^(b_C / 2) S, before and after     (1)
    strong  q' = q e^b               k' = k e^(b_C - b)       S' = e^(b_C) S, in between               (2)
    o  = scale (q' S' + P v)         S <- S' + k'^T v                                                  (3)

P is tril(q' k'^T) in a mild chunk. In a strong one, tokens j < i meet at the border in the middle of the smallest block
of 2^l tokens that holds both: k_j decays up to the border and q_i from there on, one product for each level l::

    P_ij = q_i E_i . k_j E_j         E the decay between a token and the border of its block           (4)

No exponent is above 0, and each is the sum of just the gates between: right for every gate. Programs: V / BV * H * B
of `walk`, each for BV columns of a state, and T / (16 C) * H * B of `levels`, which adds P v of strong chunks to o, for
2 C C (13 K + V) FLOPs each in bf16: six levels of two products, and the diagonal. Reference:
:func:`gla_ref.gla.recurrent`. Left out: packed sequences, initial states, gradients, gates on values, float16, sizes
other than 16, 32, 64 and 128. For few heads, see :mod:`gla_ref.pages.linear_attention_segments`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def clamped(b_g):
    """Clamp gates: e^-104 is 0 in float32, so -104 stands for all lower gates."""
    return tl.maximum(b_g.to(tl.float32), -104.0, propagate_nan=tl.PropagateNan.ALL).to(b_g.dtype)


@triton.jit
def tile(i_b, i_h, t, i_d, T, H, D, C: tl.constexpr, BD: tl.constexpr):
    """The places of C tokens and BD channels of a tensor [B, T, H, D], and the mask of those inside the tensor."""
    i, d = t + tl.arange(0, C)[:, None], i_d + tl.arange(0, BD)[None, :]
    return ((i_b * T + i).to(tl.int64) * H + i_h) * D + d, (i < T) & (d < D)


@triton.jit
def walk(
    q, k, v, g, o, S_last, strong, T, H, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
):
    # which tile: columns from i_v on of head i_h of sequence i_b. b_ is a block, in registers
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ones = tl.full([C, 16], 1.0, g.dtype)  # [C, 16]
    S = tl.zeros([BK, BV], tl.float32)
    for t in tl.range(0, T, C):
        # load: 0 beyond T, where it changes nothing: g = 0 keeps the state, k = 0 adds nothing to it
        b_g = clamped(g.load([i_b, i_h, t, 0]).reshape(C, BK))  # [C, BK]
        b_q = q.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]

        # compute. "ieee": float32 is not rounded to TF32
        total = tl.max(tl.dot(b_g.T, ones, input_precision="ieee"), 1) * LOG2E  # [BK], b_C
        mild = tl.min(total) >= -LIMIT * LOG2E
        anchor = tl.where(mild, total / 2, 0.0)  # [BK]
        if g.dtype == tl.bfloat16:  # one product: half of the sum before less half of that after
            x = tl.dot(tl.where(i >= j, 0.5, -0.5).to(g.dtype), b_g) * LOG2E  # [C, BK]
            up, down = (total / 2 - anchor)[None, :] + x, (total / 2 - anchor)[None, :] - x
        else:  # each summed on its own: a strong gate must not take digits from the gates after it
            up = tl.dot((i >= j).to(g.dtype), b_g, input_precision="ieee") * LOG2E  # [C, BK]
            down = tl.dot((i < j).to(g.dtype), b_g, input_precision="ieee") * LOG2E  # [C, BK]
            up, down = tl.where(mild, (up - down) / 2, up), tl.where(mild, (down - up) / 2, down)
        b_q, b_k = (b_q * tl.exp2(up)).to(v.dtype), (b_k * tl.exp2(down)).to(v.dtype)  # (1), (2)
        S *= tl.exp2(anchor)[:, None]  # (1)
        P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
        P = tl.where(j <= tl.where(mild, i, -1), P, 0.0).to(b_v.dtype)  # no pairs of a strong chunk
        b_o = tl.dot(b_q, S.to(b_v.dtype), input_precision="ieee")  # [C, BV]
        b_o = tl.dot(P, b_v, b_o, input_precision="ieee") * scale  # (3)
        S *= tl.exp2(total - 2 * anchor)[:, None]  # (2), 1 in a mild chunk
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee") * tl.exp2(anchor)[:, None]  # (3), (1)

        # store
        at, m = tile(i_b, i_h, t, i_v, T, H, V, C, BV)
        tl.store(o + at, b_o.to(b_v.dtype), mask=m)
        tl.store(strong + (i_b * H + i_h) * tl.cdiv(T, C) + t // C, mild == 0)
    S_last.store([i_b, i_h, 0, i_v], S.reshape(1, 1, BK, BV))


@triton.jit
def levels(
    q, k, v, g, o, strong, T, H, N, K, V, scale, LEVELS: tl.constexpr, MANY: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    # which tile: strong ones of MANY chunks from `first` on of head i_h of sequence i_b; most have none
    first, i_h, i_b = tl.program_id(0) * MANY, tl.program_id(1), tl.program_id(2)
    i, j, n = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], first + tl.arange(0, MANY)
    flags = strong + (i_b * H + i_h) * N
    if tl.max(tl.load(flags + n, mask=n < N, other=0).to(tl.int32), 0) == 0:
        return
    for c in tl.range(first, tl.minimum(first + MANY, N)):
        if tl.load(flags + c) != 0:
            P = tl.zeros([C, C], tl.float32)
            for i_k in tl.range(0, K, BK):
                # load, by pointers: nothing would hide how long the copy engine takes to start
                at, m = tile(i_b, i_h, c * C, i_k, T, H, K, C, BK)
                b_q, b_k = tl.load(q + at, mask=m, other=0.0), tl.load(k + at, mask=m, other=0.0)
                b_g = clamped(tl.load(g + at, mask=m, other=0.0))  # [C, BK]
                # compute: each token with itself, which nothing decays, then level by level
                P += tl.where(i == j, tl.dot(b_q, b_k.T, input_precision="ieee"), 0.0)
                for l in tl.range(0, LEVELS):
                    border = ((i >> l) | 1) << l  # where the second half of a block begins
                    between = (j <= i) & (j >= border) | (j > i) & (j < border)  # [C, C]
                    E = tl.exp2(tl.dot(between.to(b_g.dtype), b_g, input_precision="ieee") * LOG2E)
                    x, y = (b_q * E).to(b_q.dtype), (b_k * E).to(b_q.dtype)  # [C, BK]
                    meet = ((i >> l) == ((j >> l) | 1)) & ((i >> l) > (j >> l))  # [C, C]
                    P += tl.where(meet, tl.dot(x, y.T, input_precision="ieee"), 0.0)  # (4)
            for i_v in tl.range(0, V, BV):
                at, m = tile(i_b, i_h, c * C, i_v, T, H, V, C, BV)
                b_v, b_o = tl.load(v + at, mask=m, other=0.0), tl.load(o + at, mask=m, other=0.0)
                b_o += tl.dot(P.to(b_v.dtype), b_v, input_precision="ieee") * scale  # (3)
                tl.store(o + at, b_o.to(b_v.dtype), mask=m)


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
    """o [B, T, H, V] and the state after the last token, of q, k, v and log gates g, as in :mod:`gla_ref.pages.gla`."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    C, BV, limit = (64, 64, 80.0) if q.dtype == torch.bfloat16 else (16, 16, 4.0)
    o, S, BK = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32), max(K, 64)
    keys = ("q", q), ("k", k), ("g", g)
    d_q, d_k, d_g = (descriptor(n, x, (B, T, H, K), q, C, BK) for n, x in keys)
    d_v = descriptor("v", v, (B, T, H, V), q, C, BV)
    N, scale = triton.cdiv(T, C), K**-0.5 if scale is None else scale
    strong = S.new_empty(B, H, N, dtype=torch.int8)
    walk[triton.cdiv(V, BV), H, B](
        d_q, d_k, d_v, d_g, o, TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV]), strong, T, H, V, scale,
        C=C, BK=BK, BV=BV, LIMIT=limit, num_warps=4, num_stages=3 if K <= 64 else 2,
    )
    levels[triton.cdiv(N, 16), H, B](
        q, k, v, g, o, strong, T, H, N, K, V, scale, LEVELS=C.bit_length() - 1, MANY=16,
        C=C, BK=64, BV=BV, num_warps=4, num_stages=1,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gla_levels: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gla)
