"""Gated linear attention on a page, one token: a model that answers runs this step for every token (chapter 16).

Computes::

    S <- diag(e^g) S + k^T v                                                             (1)
    o  = scale q S                                                                       (2)

Reference: one step of :func:`gla_ref.gla.recurrent`, in float32, without chunks or products of matrices, right for
every log gate in [-inf, 0]. A program owns BV columns of the state of one head: V / BV * H * B programs. Each reads its
part of the state and writes it back, 8 K BV bytes, for 5 K BV FLOPs: memory limits the time. The other inputs, 2 (3 K +
BV) bytes in bf16, hardly count.

Left out: several tokens in a call, gates on values, gradients, other sizes than powers of two from 16 to 256.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def step(
    q, k, v, g, S, o, S_next, q_stride, k_stride, v_stride, g_stride, H, scale,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):
    # which tile: columns o_v of the state of head i_h of sequence i_b
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)  # many states may have more than 2^31 numbers
    o_k, o_v = tl.arange(0, K), tl.program_id(0) * BV + tl.arange(0, BV)
    o_S = ((i_b * H + i_h) * K + o_k[:, None]) * V + o_v[None, :]  # [K, BV]

    # load: b_ is a block, in registers
    b_S = tl.load(S + o_S)  # [K, BV]
    b_q = tl.load(q + i_b * q_stride + i_h * K + o_k).to(tl.float32)  # [K]
    b_k = tl.load(k + i_b * k_stride + i_h * K + o_k).to(tl.float32)  # [K]
    b_g = tl.load(g + i_b * g_stride + i_h * K + o_k).to(tl.float32)  # [K]
    b_v = tl.load(v + i_b * v_stride + i_h * V + o_v).to(tl.float32)  # [BV]

    # compute
    b_S = b_S * tl.exp2(b_g * LOG2E)[:, None] + b_k[:, None] * b_v[None, :]  # (1)
    b_o = tl.sum(b_q[:, None] * b_S, 0) * scale  # (2), [BV]

    # store
    tl.store(o + (i_b * H + i_h) * V + o_v, b_o.to(o.dtype.element_ty))
    tl.store(S_next + o_S, b_S)


def check(name, x, shape, dtypes, like):
    """Refuse arguments that this page leaves out."""
    sizes = (16, 32, 64, 128, 256)
    if x.shape != shape or min(shape) < 1 or x.shape[-1] not in sizes:
        raise ValueError(f"{name}: expected {shape}, last one of {sizes}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {', '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != like.device or not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: expected all tensors on one GPU, got {x.device}")
    if not x[0].is_contiguous():  # the batch may have any stride, such as that of one token among many
        raise ValueError(f"{name}: expected each x[b] contiguous, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")


def gla_step(q, k, v, g, S, scale=None):
    """o [B, H, V] and the next state, float32 [B, H, K, V]; S, the state before, is left as it is.

    q, k and log gates g [B, H, K], v [B, H, V], in bfloat16, float16 or float32; scale is K^-0.5 when None.
    """
    if q.ndim != 3 or v.ndim != 3:
        raise ValueError(f"q, v: expected [B, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, H, K), V = q.shape, v.shape[2]
    any_float = torch.bfloat16, torch.float16, torch.float32
    for name, x, D in (("q", q, K), ("k", k, K), ("v", v, V), ("g", g, K)):
        check(name, x, (B, H, D), any_float, q)
    check("S", S, (B, H, K, V), (torch.float32,), q)
    if not S.is_contiguous():
        raise ValueError(f"S: expected contiguous, got strides {S.stride()}")
    o, S_next = v.new_empty(B, H, V), torch.empty_like(S)
    BV = min(V, 32)  # 32 columns: one line of memory
    step[V // BV, H, B](
        q, k, v, g, S, o, S_next, *(x.stride(0) for x in (q, k, v, g)), H,
        K**-0.5 if scale is None else scale, K=K, V=V, BV=BV, num_warps=8 if K <= 128 else 4,
    )
    return o, S_next


if __name__ == "__main__":  # python -m gla_ref.pages.gla_step: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gla_step)
