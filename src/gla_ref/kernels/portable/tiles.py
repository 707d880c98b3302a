"""Tiles of a head: how kernels that walk over chunks load, store and round them (chapter 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.plan import Spec

# arguments that change from call to call, and of which 1 and multiples of 16 shall not be compiled apart
VARYING = ("N", "T", "L", "H", "n_flags", "reverse")


@triton.jit
def stride(s, axis: tl.constexpr):
    """An axis' stride of a tensor, of its `strides` or `patterns`."""
    return s[axis] >> 4 if len(s) == 5 and axis < 3 else s[axis]


@triton.jit
def which_tile(H, D, BD: tl.constexpr):
    """(tile of BD of a head's D columns, head, the rest) of this program; neighbours share in L2 what they read."""
    n_d, i = tl.cdiv(D, BD), tl.program_id(0)
    return i % n_d, i // n_d % H, i // n_d // H


@triton.jit
def rows(x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr):
    """Pointers to rows o_t ... of x[i_b, :, i_h, o_d:] and their mask, [C, BD], up to row `end` and column D."""
    o_r, o_c = o_t + tl.arange(0, C), o_d + tl.arange(0, BD)
    p = x + i_b.to(tl.int64) * stride(s, 0) + i_h.to(tl.int64) * stride(s, 2)
    p += o_r[:, None].to(tl.int64) * stride(s, 1) + o_c[None, :].to(tl.int64) * stride(s, 3)
    return p, (o_r < end)[:, None] & (o_c < D)[None, :]


@triton.jit
def load_tile(
    x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr,
    LAST: tl.constexpr = False,
):
    """Rows o_t ... of x[i_b, :, i_h, o_d:] as [C, BD]; zero from row `end` and column D on.

    By TMA it is zero from the tensor's end on: where that is used, `end` is that or a whole chunk's.
    LAST: nobody will read them again, so that L2 need not keep them.
    """
    if TMA:  # the copy engine: no addresses to compute, and it knows where the tensor ends
        b = x.load([i_b, i_h, o_t, o_d]).reshape(C, BD)
    else:
        p, m = rows(x, s, i_b, i_h, o_t, end, o_d, D, C, BD)
        b = tl.load(p, mask=m, other=0.0, eviction_policy="evict_first" if LAST else "")
    return b


@triton.jit
def store_tile(x, b, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """b [C, BD], in x's precision, to rows o_t ... of x[i_b, :, i_h, o_d:], up to row `end` and column D."""
    if TMA:
        x.store([i_b, i_h, o_t, o_d], b.to(x.dtype).reshape(1, 1, C, BD))
    else:
        p, m = rows(x, s, i_b, i_h, o_t, end, o_d, D, C, BD)
        tl.store(p, b.to(x.dtype.element_ty), mask=m)


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
def product(x, y, total=None):
    """total + x y, in the precision of x or of y: the other may be sums in float32, which are rounded to it first."""
    size = 1.0
    if x.dtype != y.dtype:
        if x.dtype == tl.float32:
            x, size = operand(x, y.dtype)
        else:
            y, size = operand(y, x.dtype)
    if total is None:
        return tl.dot(x, y, input_precision="ieee") * size
    else:
        return tl.dot(x, y, total / size, input_precision="ieee") * size


def strides(*tensors: Spec | None) -> list[tuple[int, ...] | None]:
    return [x if x is None else x.strides for x in tensors]


def patterns(*tensors: Spec | None) -> list[tuple[int, ...] | None]:
    """The strides of each [B, T, H, D] as `load_tile` takes them, so that fewer variants are compiled.

    Triton compiles a kernel for every pattern of ones and multiples of 16 among its integers. Memory accesses are
    wide where the last stride is 1 and all others are multiples of 16. Where the last is 1 and the others are not all,
    a number n becomes 16 n + 8, and a fifth number tells: one pattern. The 1 stays, since by it Triton lays out the
    threads. A full check on a GPU compiles 84 s less for it (lab/gla.md).
    """
    return [x if x is None else pattern(*x.strides) for x in tensors]


def pattern(b: int, t: int, h: int, d: int) -> tuple[int, ...]:
    if d != 1 or not (b % 16 or t % 16 or h % 16):
        return b, t, h, d
    return 16 * b + 8, 16 * t + 8, 16 * h + 8, 1, 0
