"""Tiles of a head: how kernels that walk over chunks load, store and round them (chapter 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.plan import Spec
from ..launch.versions import release

# arguments that change from call to call, which Triton must not specialise on 1 and multiples of 16. Strides s_gb
# ... of gates and strengths [B, T, H] change even modulo 16; in a tuple Triton would specialise on them all the same
VARYING = ("N", "T", "L", "H", "n_flags", "n_programs", "reverse", *(f"s_{x}{axis}" for x in "gdb" for axis in "bth"))
# whether a walk's descriptors of products stay in its loop: by 3.9 those taken out are spilled; left there, 3.6.0's
# assembler makes them of registers that nothing has set (lab/linear_attention.md)
STAY = tl.constexpr(release() >= (3, 9))
FLOOR = tl.constexpr(-104.0)  # e^-104 is 0 in float32, so this gate stands for all lower gates, -inf too


@triton.jit
def stride(s, axis: tl.constexpr):
    """The stride of an axis, from a tensor's strides or from a `pattern`: 16 n + 8 of five numbers stands for n."""
    return s[axis] >> 4 if len(s) == 5 and axis < 3 else s[axis]


@triton.jit
def which_tile(H, D, BD: tl.constexpr):
    """(tile of BD of a head's D columns, head, slot or chunk) of this program; neighbours share tokens in L2."""
    n_d, i = tl.cdiv(D, BD), tl.program_id(0)
    return i % n_d, i // n_d % H, i // n_d // H


@triton.jit
def rows(x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr):
    """Pointers [C, BD] to rows o_t ... of x[i_b, :, i_h, o_d:], and their mask up to row `end` and column D."""
    o_r, o_c = o_t + tl.arange(0, C), o_d + tl.arange(0, BD)
    p = x + i_b.to(tl.int64) * stride(s, 0) + i_h.to(tl.int64) * stride(s, 2)
    p += o_r[:, None].to(tl.int64) * stride(s, 1) + o_c[None, :].to(tl.int64) * stride(s, 3)
    return p, (o_r < end)[:, None] & (o_c < D)[None, :]


@triton.jit
def load_tile(
    x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr,
    LAST: tl.constexpr = False,
):
    """Load rows o_t ... of x[i_b, :, i_h, o_d:] as [C, BD]; zero from row `end` and column D on.

    TMA loads zeros from the tensor's end on, so with TMA `end` must be the tensor's end or a whole chunk's.
    LAST: no program reads the rows again, so L2 need not keep them.
    """
    if TMA:  # the copy engine needs no addresses, and loads zeros beyond the tensor's end
        b = x.load([i_b, i_h, o_t, o_d]).reshape(C, BD)
    else:
        p, m = rows(x, s, i_b, i_h, o_t, end, o_d, D, C, BD)
        b = tl.load(p, mask=m, other=0.0, eviction_policy="evict_first" if LAST else "")
    return b


@triton.jit
def load_tokens(x, strides, i_b, i_h, o_r, end):
    """Load tokens o_r [C] of a head of x [B, T, H], in float32; zero from row `end` on."""
    p = x + i_b.to(tl.int64) * strides[0] + o_r.to(tl.int64) * strides[1] + i_h.to(tl.int64) * strides[2]
    return tl.load(p, mask=o_r < end, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, b, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """Store b [C, BD], in x's precision, to rows o_t ... of x[i_b, :, i_h, o_d:], up to row `end` and column D."""
    if TMA:
        x.store([i_b, i_h, o_t, o_d], b.to(x.dtype).reshape(1, 1, C, BD))
    else:
        p, m = rows(x, s, i_b, i_h, o_t, end, o_d, D, C, BD)
        tl.store(p, b.to(x.dtype.element_ty), mask=m)


@triton.jit
def operand(x, dtype: tl.constexpr, LEAST: tl.constexpr = -40.0, ROWS: tl.constexpr = False):
    """x in a product's precision, and the factor that restores the product's size (ROWS: a factor for each row).

    float16 ranges from 6e-8 to 65504. Sums (scores, states) may be larger or smaller, so they are divided by a power of
    2, at least 2^LEAST: sums that are added to the product are divided by it too, and must stay finite.
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
    """total + x y in the lower precision of x and y: if one of them is sums in float32, it is rounded first."""
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


@triton.jit
def low(x, dtype: tl.constexpr):
    """`operand` for a tile that may already have the product's precision."""
    if x.dtype == dtype:
        return x, 1.0
    else:
        return operand(x, dtype)


@triton.jit
def times(x, y, dtype: tl.constexpr):
    """x y, after both are rounded to the product's precision."""
    x, of_x = low(x, dtype)
    y, of_y = low(y, dtype)
    return tl.dot(x, y, input_precision="ieee") * (of_x * of_y)


def patterns(*tensors: Spec | None) -> list[tuple[int, ...] | None]:
    """The strides of each [B, T, H, D] for `load_tile`, disguised so that fewer variants are compiled.

    Triton compiles a kernel for every pattern of ones and multiples of 16 among its integers. Memory accesses are wide
    if the last stride is 1 and all other strides are multiples of 16. If the last stride is 1 but other strides are
    not all such multiples, each n of them becomes 16 n + 8, and a fifth number says so: all such tensors share a
    pattern. The last stride stays 1, because Triton lays out the threads by it. With two patterns of sizes and
    strides a full check compiles 67 variants instead of 148 (lab/gla.md).
    """
    return [x if x is None else pattern(*x.strides) for x in tensors]


def pattern(b: int, t: int, h: int, d: int) -> tuple[int, ...]:
    if d != 1 or not (b % 16 or t % 16 or h % 16):
        return b, t, h, d
    return 16 * b + 8, 16 * t + 8, 16 * h + 8, 1, 0
