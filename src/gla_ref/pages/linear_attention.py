"""Linear attention on a page: the state stays in registers while the program walks over the tokens (chapter 7).

Computes::

    S_t = S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

Chunk by chunk, with q, k and v of C tokens and S the state before them::

    o  = scale (q S + tril(q k^T) v)                                                     (1)
    S <- S + k^T v                                                                       (2)

Reference: :func:`gla_ref.linear_attention.recurrent`. A program owns BV columns of the state of one head and walks over
the chunks of its sequence: V / BV * H * B programs. A chunk moves 2 C (2 K + 2 BV) bytes in bf16 and costs
2 C (C (BK + BV) + 2 BK BV) FLOPs, BK = max(K, 64), BV = max(V, 64): memory limits the time. In float32 C = BV = 16.

Left out: packed sequences, initial states, normalisation, gradients, float16 (a state may be too large for it), other
sizes than 16, 32, 64 and 128. For few heads, which leave multiprocessors idle, see
:mod:`gla_ref.pages.linear_attention_segments`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def walk(
    q, k, v, o, S_last, T, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    # which tile: columns from i_v on of head i_h of sequence i_b. b_ is a block, in registers
    i_v, i_h, i_b = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    S = tl.zeros([BK, BV], tl.float32)

    for t in tl.range(0, T, C):
        b_S = S.to(q.dtype)  # [BK, BV], rounded while the loads are on their way
        # load: descriptors know where the tensors end, and read 0 beyond, which adds nothing to S
        b_q = q.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_k = k.load([i_b, i_h, t, 0]).reshape(C, BK)  # [C, BK]
        b_v = v.load([i_b, i_h, t, i_v]).reshape(C, BV)  # [C, BV]

        # compute: sums in float32, operands in the dtype of the inputs; "ieee": float32 is not rounded to TF32
        P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
        P = tl.where(i >= j, P, 0.0).to(b_v.dtype)  # token i reads tokens j <= i
        b_o = tl.dot(b_q, b_S, input_precision="ieee")  # [C, BV]
        b_o = tl.dot(P, b_v, b_o, input_precision="ieee") * scale  # (1)
        # store: nothing is written beyond the end
        o.store([i_b, i_h, t, i_v], b_o.to(b_v.dtype).reshape(1, 1, C, BV))
        # compute: once o has left its registers
        S = tl.dot(b_k.T, b_v, S, input_precision="ieee")  # (2)
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


def linear_attention(q, k, v, scale=None):
    """o [B, T, H, V] and the state after the last token, float32 [B, H, K, V].

    q and k [B, T, H, K], v [B, T, H, V]; scale is K^-0.5 when None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    # at least 64 channels: narrower tiles of bf16 were wrong (Triton 3.6); those beyond K and V are zeros
    C, BV = (64, max(V, 64)) if q.dtype == torch.bfloat16 else (16, 16)
    o, S, BK = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32), max(K, 64)
    keys = [descriptor(n, x, (B, T, H, K), q, C, BK) for n, x in (("q", q), ("k", k))]
    values = [descriptor(n, x, (B, T, H, V), q, C, BV) for n, x in (("v", v), ("o", o))]
    state = TensorDescriptor(S, S.shape, S.stride(), [1, 1, BK, BV])
    walk[triton.cdiv(V, BV), H, B](
        *keys, *values, state, T, K**-0.5 if scale is None else scale,
        C=C, BK=BK, BV=BV, num_warps=4, num_stages=3,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.linear_attention: is it right here, and how fast
    from gla_ref._commands.page import run

    run(linear_attention)
