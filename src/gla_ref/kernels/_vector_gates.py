"""What one gate a channel and token adds to the chunks of gla.py: factors of q, k and state, and levels (chapter 11).

    mild channels    q e^(b - r), k e^(r - b), the state e^r before and after, r = b_C / 2
    strong ones      q e^b, k e^(b_C - b), the state e^(b_C) in between; all pairs of their chunk in levels

float16 is too small for q e^b at g = -20 already: a power of two is taken out of it, and given to the state.
b is the running sum of g in the chunk. Reference: :mod:`gla_ref.gla`. The kernels of gla.py call these functions;
`prepare` is a kernel of its own, for heads whose V tiles would all make the same q' and k'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._plan import Draft, Spec, cdiv
from ._segments import sequences, slots, which_segment
from ._tiles import VARYING, load_tile, operand, patterns, size, sizes_of, store_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def clamped(b_g):
    """Gates for sums. e^-104 is 0 in float32, so -104 stands for all below, -inf too."""
    b_f = tl.maximum(b_g.to(tl.float32), -104.0, propagate_nan=tl.PropagateNan.ALL)
    return b_f.to(tl.bfloat16) if b_g.dtype == tl.bfloat16 else b_f


@triton.jit
def sums(m, x, LOW: tl.constexpr):
    """m x, sums of the rows of x [C, D] weighed by m [C, C], whose weights are multiples of 1/2: a product, to be fast.

    For 16-bit kernels on tensor cores and in two bf16 parts, to 2^-17 (bf16 itself: exactly).
    """
    if LOW:
        m, high = m.to(tl.bfloat16), x.to(tl.bfloat16)
        b = tl.dot(m, high)
        if x.dtype != tl.bfloat16:
            b = tl.dot(m, (x - high.to(tl.float32)).to(tl.bfloat16), b)
        return b
    else:
        return tl.dot(m.to(tl.float32), x.to(tl.float32), input_precision="ieee")


@triton.jit
def totals(x, LOW: tl.constexpr):
    """The sum [D] of x [C, D] over all rows, of the same two parts as `sums`, so that differences of sums cancel.

    It is a product too, x^T times ones, since its rows lie where those of a state do: nothing has to change places.
    """
    if LOW:
        ones = tl.full([x.shape[0], 16], 1.0, tl.bfloat16)
        high = x.to(tl.bfloat16)
        b = tl.dot(high.T, ones)  # [D, 16], all columns alike
        if x.dtype != tl.bfloat16:
            b = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16).T, ones, b)
        return tl.max(b, 1)
    else:
        return tl.sum(x.to(tl.float32), 0)


@triton.jit
def chunk_decays(
    b_g, LIMIT: tl.constexpr, LOW: tl.constexpr, REVERSE: tl.constexpr, dtype: tl.constexpr
):
    """Of a chunk's gates [C, D]: factors of what reads and of what writes [C, D], of the state [D]; are all mild?

    The state is multiplied by `first`, read, multiplied by `through` (1 in mild channels), written to, and multiplied
    by `last` (in mild channels `first` again, else 1). Backwards in time, what reads is what decays to the chunk's end.
    """
    o_i, o_j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    b_f = clamped(b_g)
    total = totals(b_f, LOW) * LOG2E
    mild = total >= LIMIT * LOG2E
    if LOW:  # b - b_C / 2, as if summed half from the left and half from the right; of strong channels b and b_C - b
        up = sums(tl.where(o_i >= o_j, 0.5, -0.5), b_f, LOW) * LOG2E
        rest = tl.where(mild, 0.0, total * 0.5)[None, :]
        up, down = rest + up, rest - up
    else:  # each summed on its own, so that a strong gate takes no digits from those after it. Half their difference is
        # b - b_C / 2 of mild channels: with `total`, whose terms are added in another order, i = j would not cancel
        up, down = sums(o_i >= o_j, b_f, LOW) * LOG2E, sums(o_i < o_j, b_f, LOW) * LOG2E
        half = (up - down) * 0.5
        up, down = tl.where(mild[None, :], half, up), tl.where(mild[None, :], -half, down)
    edge, through = tl.where(mild, total * 0.5, 0.0), tl.where(mild, 0.0, total)
    of_q, of_k = edge, edge
    if dtype == tl.float16:
        # decay of the first token, the largest of all
        most = totals(tl.where(o_i == 0, b_f, 0.0).to(b_f.dtype), LOW) * LOG2E
        shift = tl.where(mild, 0.0, tl.floor(tl.maximum(most, -100.0)))
        up, of_q, through = up - shift[None, :], edge + shift, through - shift
    up, down, through = tl.exp2(up), tl.exp2(down), tl.exp2(through)
    of_q, of_k = tl.exp2(of_q), tl.exp2(of_k)
    read, write, first, last = (down, up, of_k, of_q) if REVERSE else (up, down, of_q, of_k)
    return read, write, first, last, through, tl.min(mild.to(tl.int32)) != 0


@triton.jit
def no_decays(C: tl.constexpr, D: tl.constexpr):
    """read, first, last, through and mild of `chunk_decays`, of gates that are all 0."""
    one = tl.full([D], 1.0, dtype=tl.float32)
    return tl.full([C, D], 1.0, dtype=tl.float32), one, one, one, True


@triton.jit
def to_border(b_g, level, LOW: tl.constexpr):
    """Decay [C, D] between each token and the middle of its block of 2^(level + 1) tokens: no exponent above 0."""
    o_c = tl.arange(0, b_g.shape[0])
    border = ((o_c >> level) | 1) << level  # the first token of a block's second half
    t, i = o_c[:, None], o_c[None, :]
    m = (i <= t) & (i >= border[:, None]) | (i > t) & (i < border[:, None])
    return tl.exp2(sums(m, b_g, LOW) * LOG2E)


@triton.jit
def across(level, C: tl.constexpr, reverse=0):
    """Which pairs (i, j), [C, C], meet at this level: i in the second half of a block, j in its first."""
    o_i, o_j = (tl.arange(0, C) >> level)[:, None], (tl.arange(0, C) >> level)[None, :]
    later, earlier = tl.where(reverse != 0, o_j, o_i), tl.where(reverse != 0, o_i, o_j)
    return (later == (earlier | 1)) & (later > earlier)


@triton.jit
def one_half(x, level, half, dtype: tl.constexpr):
    """`operand` of rows x [C, D] decayed by `to_border`, of which a level needs one half (1: the second) of each block.

    Of float16 the other half, whose decays may be far larger, must not set the size.
    """
    if dtype == tl.float16:
        o_c = tl.arange(0, x.shape[0])
        x = tl.where((((o_c >> level) & 1) == half)[:, None], x, 0.0)
    return operand(x, dtype, -100.0)


@triton.jit
def scores(b_q, b_k, b_g, LEVELS: tl.constexpr, LOW: tl.constexpr, reverse=0):
    """Of a strong chunk, [C, C]: of each token with itself, then level by level."""
    o_c = tl.arange(0, b_q.shape[0])
    b_own = tl.dot(b_q, b_k.T, input_precision="ieee")
    b_P = tl.where(o_c[:, None] == o_c[None, :], b_own, 0.0)
    for level in tl.range(0, LEVELS):
        b_E = to_border(b_g, level, LOW)  # [C, BK]
        b_x, of_x = one_half(b_q * b_E, level, 1 - reverse, b_q.dtype)
        b_y, of_y = one_half(b_k * b_E, level, reverse, b_k.dtype)
        b_pairs = tl.dot(b_x, b_y.T, input_precision="ieee") * (of_x * of_y)
        b_P += tl.where(across(level, b_q.shape[0], reverse), b_pairs, 0.0)
    return b_P


@triton.jit
def weighted(b_P, b_v, b_g, LEVELS: tl.constexpr, LOW: tl.constexpr):
    """Of a strong chunk, [C, D]: P v, with every value's decay on its way from token to token."""
    o_c = tl.arange(0, b_v.shape[0])
    b_A, of_A = operand(tl.where(o_c[:, None] == o_c[None, :], b_P, 0.0), b_v.dtype)
    b_o = tl.dot(b_A, b_v, input_precision="ieee") * of_A
    for level in tl.range(0, LEVELS):
        b_E = to_border(b_g, level, LOW)  # [C, D]
        b_A, of_A = operand(tl.where(across(level, b_v.shape[0]), b_P, 0.0), b_v.dtype)
        b_o += tl.dot(b_A, (b_v * b_E).to(b_v.dtype), input_precision="ieee") * (b_E * of_A)
    return b_o


@triton.jit(do_not_specialize=VARYING)
def prepare(
    q, k, g, q_hat, k_hat, decay, strong, cu, s_q, s_k, s_g, s_h, N, T, H, sizes,
    C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """q' and k', `decay` [slots, H, 3, K]: of q, through, of k; `strong` [slots, H], zeros before."""
    # which tile: BK channels of a chunk of a head
    K = size(sizes, 0)
    n_k = tl.cdiv(K, BK)
    i_k, i_h = tl.program_id(0) % n_k, tl.program_id(0) // n_k % H
    i_s = tl.program_id(0) // n_k // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)

    # load
    b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]

    # compute
    read, write, first, last, through, mild = chunk_decays(
        b_g, LIMIT, LOW, False, q_hat.dtype.element_ty
    )

    # store
    store_tile(q_hat, b_q * read, s_h, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    store_tile(k_hat, b_k * write, s_h, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    i_c, o_k = i_s * H + i_h, i_k * BK + tl.arange(0, BK)
    p_d = decay + i_c.to(tl.int64) * 3 * K + o_k
    tl.store(p_d, first, mask=o_k < K)
    tl.store(p_d + K, through, mask=o_k < K)
    if q_hat.dtype.element_ty == tl.float16:  # else that of q
        tl.store(p_d + 2 * K, last, mask=o_k < K)
    tl.store(strong + i_c, 1, mask=mild == 0)


def prepare_all(
    draft: Draft,
    q: Spec,
    k: Spec,
    g: Spec,
    cu: Spec | None,
    C: int,
    limit: float,
    low: bool,
) -> tuple[Spec, Spec, Spec, Spec]:
    """q', k', `decay` and `strong` of `prepare`, for chunks of C tokens of a 16-bit dtype."""
    B, T, H, K = q.shape
    N, n, sizes = sequences(B, cu), slots(B, T, cu, C), sizes_of(K, K)
    q_hat, k_hat = draft.like("q_hat", q), draft.like("k_hat", k)
    decay = draft.new("decay", n, H, 3, K)
    strong = draft.new("strong_k", n, H, dtype=torch.int8, zero=True)
    draft.launch(
        prepare, cdiv(K, 64) * H * n,
        q, k, g, q_hat, k_hat, decay, strong, cu, *patterns(sizes, q, k, g, q_hat), N, T, H, sizes,
        C=C, BK=64, PACKED=cu is not None, LIMIT=limit, LOW=low,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
    return q_hat, k_hat, decay, strong
