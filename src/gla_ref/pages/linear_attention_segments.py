"""Linear attention on a page, for few heads and long sequences: in segments, by three short kernels (chapter 7).

Computes::

    S_t = S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

One program a head leaves most of a chip idle when there are few heads. So a sequence is cut into N segments::

    delta_n = sum of k^T v over segment n         `add_up`, all segments at once           (1)
    S_n = delta_1 + ... + delta_(n-1)             `carry`, a scan over N states            (2)
    o  = scale (q S + tril(q k^T) v)              `walk`, all segments at once, each       (3)
    S <- S + k^T v                                from its own S_n, chunk by chunk         (4)

Reference: :func:`gla_ref.linear_attention.recurrent`. Programs: V / BV * H * B * N of `add_up` and of `walk`, which own
BV columns of a state, and K V / 1024 * H * B of `carry`. `add_up` reads k and v once more than a single walk, 1.5 times
the bytes in all, for N times the programs. Each state moves four times, 4 K V bytes each time. A chunk of `walk` has
2 C (C (BK + BV) + 2 BK BV) FLOPs, BK = max(K, 64), a chunk of `add_up` 2 C BK BV.

Left out: packed sequences, initial states, normalisation, gradients, float16 (a state may be too large for it), other
sizes than 16, 32, 64 and 128. If heads give a program to more than half of the multiprocessors,
:mod:`gla_ref.pages.linear_attention` is faster.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def add_up(k, v, delta, T, length, H, N, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    # which tile: columns from i_v on of segment n of head i_h of sequence i_b. b_ is a block, in registers
    i_v, i_h, i_n = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i_b, n = i_n // N, i_n % N
    S = tl.zeros([BK, BV], tl.float32)
    for t in tl.range(n * length, tl.minimum(n * length + length, T), C):
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee")  # (1)
    delta.store([(i_b * H + i_h) * N + n, 0, i_v], S.reshape(1, BK, BV))


@triton.jit
def carry(delta, S_last, N, KV, BLOCK: tl.constexpr):
    # which tile: BLOCK numbers of the state of a head
    i_h, o = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    S = tl.zeros([BLOCK], tl.float32)
    for n in range(0, N):  # replace delta_n by S_n
        p = delta + (i_h * N + n) * KV + o
        b_delta = tl.load(p, mask=o < KV)  # [BLOCK]
        tl.store(p, S, mask=o < KV)
        S += b_delta  # (2)
    tl.store(S_last + i_h * KV + o, S, mask=o < KV)


@triton.jit
def walk(q, k, v, delta, o, T, length, H, N, scale, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    # which tile, as in add_up
    i_v, i_h, i_n = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i_b, n = i_n // N, i_n % N
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    S = delta.load([(i_b * H + i_h) * N + n, 0, i_v]).reshape(BK, BV)  # [BK, BV]
    for t in tl.range(n * length, tl.minimum(n * length + length, T), C):
        b_S = S.to(q.dtype)  # [BK, BV], rounded while the loads are on their way
        # load: 0 beyond T, which adds nothing to S
        b_q = q.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]
        # compute
        P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
        P = tl.where(i >= j, P, 0.0).to(b_v.dtype)  # token i reads tokens j <= i
        b_o = tl.dot(b_q, b_S, input_precision="ieee")  # [C, BV]
        b_o = tl.dot(P, b_v, b_o, input_precision="ieee") * scale  # (3)
        # store: nothing beyond T
        o.store([i_b, i_h, t, i_v], b_o.to(b_v.dtype).reshape(1, 1, C, BV))
        # compute: once o has left its registers
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee")  # (4)


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


def linear_attention(q, k, v, scale=None, segment=None):
    """o [B, T, H, V] and the state after the last token, float32 [B, H, K, V].

    q and k [B, T, H, K], v [B, T, H, V]; scale is K^-0.5 when None. `segment` is a number of tokens, a multiple of a
    chunk's; None makes one program for each multiprocessor, but segments of at least 8 chunks.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    C, BV = (64, max(V, 64)) if q.dtype == torch.bfloat16 else (16, 16)
    o, S, BK = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32), max(K, 64)
    d_q, d_k = (descriptor(n, x, (B, T, H, K), q, C, BK) for n, x in (("q", q), ("k", k)))
    d_v, d_o = (descriptor(n, x, (B, T, H, V), q, C, BV) for n, x in (("v", v), ("o", o)))
    if segment is None:
        n = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        segments = max(1, n // (triton.cdiv(V, BV) * H * B))
        segment = C * max(8, triton.cdiv(triton.cdiv(T, C), segments))
    if segment < 1 or segment % C:
        raise ValueError(f"segment: expected a multiple of {C} tokens, got {segment}")
    N, scale = triton.cdiv(T, segment), K**-0.5 if scale is None else scale
    delta = v.new_empty(B * H * N, K, V, dtype=torch.float32)
    d_delta = TensorDescriptor(delta, delta.shape, delta.stride(), [1, BK, BV])
    grid = triton.cdiv(V, BV), H, B * N
    options = {"C": C, "BK": BK, "BV": BV, "num_warps": 4, "num_stages": 3}
    add_up[grid](d_k, d_v, d_delta, T, segment, H, N, **options)
    carry[triton.cdiv(K * V, 1024), B * H](delta, S, N, K * V, BLOCK=1024)
    walk[grid](d_q, d_k, d_v, d_delta, d_o, T, segment, H, N, scale, **options)
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.linear_attention_segments: is it right here, and how fast
    from gla_ref._commands.page import run

    run(linear_attention)
