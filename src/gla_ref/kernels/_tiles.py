"""Tiles of a head, which piece of which sequence a program has, states from segment to segment (chapter 6).

Shared by the kernels that walk over chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._launch import launch

# arguments that change from call to call, and of which 1 and multiples of 16 shall not be compiled apart
VARYING = ("N", "T", "L", "H", "n_c", "reverse")


@triton.jit
def stride(s, axis: tl.constexpr):
    """An axis' stride of a tensor, of its `strides` or `patterns`."""
    return s[axis] >> 4 if len(s) == 5 and axis < 3 else s[axis]


@triton.jit
def size(sizes, axis: tl.constexpr):
    """K (axis 0) or V (1) of `sizes_of`."""
    return sizes[axis] >> 4 if len(sizes) == 3 else sizes[axis]


@triton.jit
def load_tile(
    x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr,
    LAST: tl.constexpr = False,
):  # fmt: skip
    """Rows o_t ... of x[i_b, :, i_h, o_d:] as [C, BD]; zero from row `end` and column D on.

    LAST: nobody will read them again, so that L2 need not keep them.
    """
    if TMA:  # the copy engine: no addresses to compute, and it knows where the tensor ends
        b = x.load([i_b, i_h, o_t, o_d]).reshape(C, BD)
    else:
        o_r, o_c = o_t + tl.arange(0, C), o_d + tl.arange(0, BD)
        p = x + i_b.to(tl.int64) * stride(s, 0) + i_h.to(tl.int64) * stride(s, 2)
        p += o_r[:, None].to(tl.int64) * stride(s, 1) + o_c[None, :].to(tl.int64) * stride(s, 3)
        m = (o_r < end)[:, None] & (o_c < D)[None, :]
        b = tl.load(p, mask=m, other=0.0, eviction_policy="evict_first" if LAST else "")
    return b


@triton.jit
def store_tile(
    x, b, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):
    """b [C, BD], in x's precision, to rows o_t ... of x[i_b, :, i_h, o_d:], up to row `end` and column D."""
    if TMA:
        x.store([i_b, i_h, o_t, o_d], b.to(x.dtype).reshape(1, 1, C, BD))
    else:
        o_r, o_c = o_t + tl.arange(0, C), o_d + tl.arange(0, BD)
        p = x + i_b.to(tl.int64) * stride(s, 0) + i_h.to(tl.int64) * stride(s, 2)
        p += o_r[:, None].to(tl.int64) * stride(s, 1) + o_c[None, :].to(tl.int64) * stride(s, 3)
        tl.store(p, b.to(x.dtype.element_ty), mask=(o_r < end)[:, None] & (o_c < D)[None, :])


@triton.jit
def operand(x, dtype: tl.constexpr, LEAST: tl.constexpr = -40.0, ROWS: tl.constexpr = False):
    """x in a product's precision, and what to multiply the product by (ROWS: each of its rows).

    float16 ends at 65504 and at 6e-8. Sums (scores, states) may be larger or smaller, and are divided by a power of 2:
    2^LEAST at least, so that what is added to the product, divided too, stays finite.
    """
    if dtype == tl.float16:
        most = tl.max(tl.abs(x), 1)[:, None] if ROWS else tl.max(tl.abs(x))
        most = tl.log2(tl.maximum(most, 1e-30))
        size = tl.exp2(tl.maximum(tl.ceil(most) - 15.0, LEAST))
        return (x / size).to(dtype), size
    else:
        return x.to(dtype), 1.0


@triton.jit
def which_segment(cu, i_s, N, T, L, PACKED: tl.constexpr):
    """(sequence, batch row, the sequence's start and stop, the segment's start) of slot i_s.

    Packed, sequence n owns the slots from cu[n] // L + n on: at least as many as it has segments (a start
    rounded down, and one slot to spare), and the host need not know any length. Spare slots begin at or after the stop.
    """
    if PACKED:
        i_n = i_s * 0 - 1
        for o in range(0, N, 256):
            o_n = o + tl.arange(0, 256)
            b_cu = tl.load(cu + o_n, mask=o_n < N, other=0).to(tl.int32)
            i_n += tl.sum(((b_cu // L + o_n <= i_s) & (o_n < N)).to(tl.int32))
        start, stop = tl.load(cu + i_n).to(tl.int32), tl.load(cu + i_n + 1).to(tl.int32)
        return i_n, i_n * 0, start, stop, start + (i_s - start // L - i_n) * L
    else:
        n_s = tl.cdiv(T, L)
        return i_s // n_s, i_s // n_s, i_s * 0, i_s * 0 + T, i_s % n_s * L


@triton.jit(do_not_specialize=VARYING)
def carry(
    part, rows, columns, S_in, S_out, cu, N, T, L, H, R, V, D,
    BD: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds to the state (`part` [slots, H, D]) by the state that it starts from.

    A segment's decays: `rows` [slots, H, R], each of D / R numbers in a row, and `columns` [slots, H, V].
    """
    # which tile: BD numbers of the state of a head
    n_d = tl.cdiv(D, BD)
    o_d = tl.program_id(0) % n_d * BD + tl.arange(0, BD)
    i_h, i_n = tl.program_id(0) // n_d % H, tl.program_id(0) // n_d // H
    if PACKED:
        start, stop = tl.load(cu + i_n).to(tl.int32), tl.load(cu + i_n + 1).to(tl.int32)
        first, n_s = start // L + i_n, tl.cdiv(stop - start, L)
    else:
        first, n_s = i_n * tl.cdiv(T, L), tl.cdiv(T, L)

    # load
    o_S, m_d = (i_n * H + i_h).to(tl.int64) * D + o_d, o_d < D
    b_S = tl.zeros([BD], dtype=tl.float32)
    if S_in is not None:
        b_S += tl.load(S_in + o_S, mask=m_d, other=0.0)

    # compute
    for i in range(0, n_s):
        i_s = (first + (n_s - 1 - i if REVERSE else i)) * H + i_h
        p = part + i_s.to(tl.int64) * D + o_d
        b_part = tl.load(p, mask=m_d, other=0.0)  # [BD]
        tl.store(p, b_S, mask=m_d)
        if rows is not None:
            b_S *= tl.load(rows + i_s * R + o_d // (D // R), mask=m_d, other=0.0)
        if columns is not None:
            b_S *= tl.load(columns + i_s * V + o_d % V, mask=m_d, other=0.0)
        b_S += b_part

    # store
    tl.store(S_out + o_S, b_S, mask=m_d)


def carry_states(
    part: Tensor, rows: Tensor | None, columns: Tensor | None, S_in: Tensor | None, S_out: Tensor,
    cu: Tensor | None, T: int, L: int, reverse: bool,
) -> None:  # fmt: skip
    """`carry` of segments of L tokens; afterwards S_out [N, H, K, V] holds the states after each sequence."""
    N, H, K, V = S_out.shape
    BD = min(1024, triton.next_power_of_2(K * V))
    R = K if rows is None or rows.ndim == 3 else 1
    launch(carry, triton.cdiv(K * V, BD) * H * N)(
        part, rows, columns, S_in, S_out, cu, N, T, L, H, R, V, K * V,
        BD=BD, PACKED=cu is not None, REVERSE=reverse,
    )  # fmt: skip


def slots(B: int, T: int, cu: Tensor | None, L: int) -> int:
    """How many slots `which_segment` tells apart."""
    return B * triton.cdiv(T, L) if cu is None else T // L + len(cu) - 1


def describable(x: Tensor) -> bool:
    """Whether the copy engine (TMA) can address x: 2 bytes an element, rows and strides of 16 bytes."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] >= 9
        and x.element_size() == 2
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and x.shape[-1] % 8 == 0
        and all(s > 0 and s % 8 == 0 for s in strides)
    )


def boxes(TMA: bool, rows: int, *tiles: tuple[Tensor | None, int]) -> list:
    """Each (x, width) as what a kernel gets: a descriptor where the copy engine is used, else x."""
    return [describe(x, rows, width) if TMA and x is not None else x for x, width in tiles]


def strides(*tensors: Tensor | None) -> list[tuple[int, ...] | None]:
    return [x if x is None else x.stride() for x in tensors]


def sizes_of(K: int, V: int) -> tuple[int, ...]:
    """Sizes of heads as kernels get them, whose numbers `patterns` explains."""
    return (K, V) if K % 16 == 0 and V % 16 == 0 else (16 * K + 8, 16 * V + 8, 0)


def patterns(sizes: tuple[int, ...], *tensors: Tensor | None) -> list[tuple[int, ...] | None]:
    """The strides of each [B, T, H, D] so that fewer variants of a kernel are compiled.

    Triton compiles a kernel for every pattern of ones and multiples of 16 among its integers. Memory accesses are wide
    where the last stride is 1 and all else, sizes too, is a multiple of 16. Elsewhere a number n becomes 16 n + 8, and
    one number more tells: one pattern. The last stride stays as it is, since by its 1 Triton lays out the threads.
    """
    return [x if x is None else pattern(len(sizes) == 2, *x.stride()) for x in tensors]


def pattern(wide: bool, *s: int) -> tuple[int, ...]:
    if s[-1] != 1 or wide and all(n % 16 == 0 for n in s[:-1]):
        return s
    return *(16 * n + 8 for n in s[:-1]), 1, 0


def describe(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """x [B, T, H, D] as boxes of `rows` tokens of one head; beyond the tensor they read zeros."""
    x = x.transpose(1, 2)
    # the stride of an axis of one element is never used but must be valid
    strides = [s if n > 1 else 8 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])
