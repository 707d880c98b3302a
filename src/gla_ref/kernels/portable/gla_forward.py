"""Gated Linear Attention, forward, for every log gate in [-inf, 0] (chapter 13).

    q' = q e^(b - r)    k' = k e^(r - b)    S' = e^r S                                          (1)
    o  = scale * (q' S' + tril(q' k'^T) v)                                                      (2)
    S <- e^(b_C - r) (S' + k'^T v)                                                              (3)

b is the running sum of g in the chunk, r = b_C / 2. Reference: :mod:`gla_ref.gla` (`recurrent`);
GLA paper, section 4. gla_ref/pages/gla.py is this kernel without the three additions below.

*Strong chunks.* (1) to (3) hold as long as e^(-b_C / 2) is finite (pairs j > i may be infinite: they
are masked). If a channel's gates in a chunk sum to less than LIMIT, its q decays from the chunk's
start instead, and its k to the chunk's end. These exponents are <= 0; the factors are right for the
state, but not for pairs inside the chunk. A chunk with such a channel is strong and gets a flag, from
`prepare` if that kernel makes q' and k', else from `walk`. In a strong chunk `walk` leaves out all
pairs of all channels (one product sums over the channels), the diagonal too. `mend` adds the pairs to
o in levels, from the original q, k and g. Tokens j < i meet at the border in the middle of the
smallest block of 2^n tokens that holds both: k_j decays up to the border, and q_i from there on. A
level (one n) needs q in the second half of each block and k in the first half, so one tile X holds
both: the level's scores are the lower left quarters of the blocks of X X^T. No exponent of a level is
above 0, and each is the sum of just the gates between: exact for every gate, without a loop over pairs.

*Segments.* If heads are too few to fill the chip, the plan cuts a sequence into segments, and makes
three launches instead of one. A first `walk`, from a state of zeros, finds each segment's addition to
the state, and its decay. `carry` (segments.py) replaces each addition by the state that the segment
starts from. A second `walk`, from these states, makes o.

*Packed sequences.* From a segment's number `which_segment` (segments.py) finds the sequence and the
segment's first token. Chunks are numbered by the same rule, with C for L.

The kernels, and the number of programs of each (N sequences; a K tile is 64 channels, a V tile BV)::

    prepare    K tiles * H * chunks    (1) once for all V tiles (16 bits, K > 64)
    walk       V tiles * H * segments  a head's chunks: o, or states
    carry      K V / 1024 * H * N      segments' states (few heads, large T)
    mend       H * chunks / 16         adds to o the pairs of strong chunks

A walk moves 2 C (2 K + 2 BV) bytes per chunk (bf16; 2 C K more if it loads g) for
2 C (C (K + BV) + 2 K BV) FLOPs. Limits: K <= 256, V <= 512.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import _contract as contract
from ..launch.hardware import Hardware, tiles
from ..launch.plan import Draft, Plan, Spec, boxes, cdiv, describable, next_power_of_2
from ._arguments import launch, stride_patterns
from .segments import carry_states, segment_length, sequences, slots, which_segment
from .tiles import FLOOR, STAY, VARYING, load_tile, operand, pattern, product, store_tile, which_tile

# by family and bits, K up to: (C, BV, warps, stages, stages when states are stored) of a walk.
# Hopper's tiles were fastest; lab/gla.md lists other tiles, and the reason that float32 is not pipelined.
# The other classes' tiles are the largest that hardly spill, as tools/compile_kernels.py shows
WALK = {
    ("hopper", 16): {64: (64, 64, 4, 3, 3), 128: (64, 64, 4, 2, 3), 256: (64, 64, 4, 1, 1)},
    ("hopper", 32): {64: (16, 32, 4, 1, 1), 128: (16, 16, 4, 1, 1), 256: (16, 32, 8, 1, 1)},
    ("ampere", 16): {64: (32, 32, 4, 2, 2), 128: (32, 32, 4, 2, 1), 256: (32, 32, 8, 1, 1)},
    ("ampere", 32): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1), 256: (16, 16, 8, 1, 1)},
    ("turing", 16): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1)},
    ("turing", 32): {64: (16, 32, 8, 1, 1), 128: (16, 16, 8, 1, 1)},
}
MEND = {"hopper": 64, "ampere": 32, "turing": 32}  # the largest BK and BV in `mend`
# (1) is exact if a chunk decays by at most so many nats: e to half of them must be far below the dtype's largest
# number. float32 has room for 80 nats, but loses digits in differences of larger sums
LIMIT = {torch.bfloat16: -80.0, torch.float16: -6.0, torch.float32: -4.0}
LOG2E = tl.constexpr(1.4426950408889634)


# The kernels. q reads the state; k and v write to it. A walk backwards in time (REVERSE) makes the gradient of v: the
# caller passes k, q, do for q, k, v, and the walk reaches the state after a chunk before the chunk.


@triton.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, g, factors, strong, o, S_in, S_out, states, decay, cu,
    s_q, s_k, s_v, s_g, s_o, s_S, N, T, L, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, LIMIT: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Walk a segment of a head, chunk by chunk, from the state in S_in to S_out.

    q, k, v, g and o are boxes by TMA, else pointers; s_q ... are their strides (`patterns` of tiles.py).
    With g, `walk` makes (1); with g and o, it writes `strong`: one flag for each chunk of a head.
    Without g, q and k are q' and k', and `walk` reads `factors` and `strong` from `prepare`.
    Each result may be None: o; `states`, the state before each chunk; `decay` of the segment.
    """
    # which tile
    i_v, i_h, i_s = which_tile(H, V, BV)
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    n_c = tl.cdiv(end - begin, C)  # chunks of this segment; at most 0 in a spare slot
    # the first chunk's number among the chunks of all sequences, by the rule of which_segment
    i_0 = (start // C + i_n if PACKED else i_n * tl.cdiv(T, C)) + (begin - start) // C
    o_k, o_c = tl.arange(0, BK), tl.arange(0, C)
    seen = o_c[:, None] <= o_c[None, :] if REVERSE else o_c[:, None] >= o_c[None, :]  # [C, C]

    # load
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += load_tile(S_in, s_S, i_s, i_h, 0, K, i_v * BV, V, BK, BV, False)  # [BK, BV]
    b_decay = tl.full([BK], 1.0, dtype=tl.float32)
    if g is None:
        FLOAT16: tl.constexpr = (v.dtype if TMA else v.dtype.element_ty) == tl.float16
        # `factors` has three rows: `first`, `through`, `last` of a walk forwards. Backwards the outer two change
        # places, which matters in float16 only, where they differ
        ROW: tl.constexpr = 2 if REVERSE and FLOAT16 else 0
        i_d = ((i_0 + (n_c - 1 if REVERSE else 0)) * H + i_h).to(tl.int64)
        p_first = factors + (i_d * 3 + ROW) * K + o_k
        # a spare slot has no chunk: load no channel
        next_first = tl.load(p_first, mask=o_k < tl.where(n_c > 0, K, 0), other=1.0)  # [BK]

    for i in tl.range(0, n_c, disable_licm=STAY):
        i_c = n_c - 1 - i if REVERSE else i  # chunk of the segment
        i_d = ((i_0 + i_c) * H + i_h).to(tl.int64)  # among the chunks of all heads
        o_t = begin + i_c * C

        # load
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        if o is not None:
            b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]

        # compute: (1)
        if g is not None:
            b_g = load_tile(g, s_g, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            read, write, first, last, through, mild = chunk_decays(b_g, LIMIT, FAST_SUMS, REVERSE, b_v.dtype)
            b_k = (b_k * write).to(b_v.dtype)
            if o is not None:
                b_q = (b_q * read).to(b_v.dtype)
                tl.store(strong + i_d, (mild == 0).to(tl.int8))
        else:  # load one chunk ahead, because all later steps wait for the factors
            first, last = next_first, next_first
            p_first = factors + ((i_d + (-H if REVERSE else H)) * 3 + ROW) * K + o_k
            next_first = tl.load(p_first, mask=o_k < tl.where(i + 1 < n_c, K, 0), other=1.0)
            mild = tl.load(strong + i_d) == 0
        if states is not None:
            store_tile(states, b_S, s_S, i_0 + i_c, i_h, 0, K, i_v * BV, V, BK, BV, TMA)
        b_S = b_S * first[:, None]

        # (2), without the pairs of a strong chunk; `where` drops pairs that may be infinite
        if o is not None:
            b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
            b_o = product(b_q, b_S)  # [C, BV]
            b_o = product(tl.where(seen & mild, b_P, 0.0), b_v, b_o)
            store_tile(o, b_o * scale, s_o, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)

        # (3)
        if not mild:  # a strong channel's whole decay lies between its read and its write
            if g is None:
                p_d = factors + i_d * 3 * K + o_k
                through = tl.load(p_d + K, mask=o_k < K, other=1.0)  # [BK]
                if FLOAT16:
                    last = tl.load(p_d + (2 - ROW) * K, mask=o_k < K, other=1.0)
            b_S *= through[:, None]
            b_decay *= through
        b_S = tl.dot(b_k.T, b_v, b_S, input_precision="ieee")
        b_S = b_S * last[:, None]
        b_decay *= first * last

    # store
    if S_out is not None:
        store_tile(S_out, b_S, s_S, i_s, i_h, 0, K, i_v * BV, V, BK, BV, False)
    if decay is not None:
        tl.store(decay + (i_s * H + i_h).to(tl.int64) * K + o_k, b_decay, mask=o_k < tl.where(i_v == 0, K, 0))


@triton.jit(do_not_specialize=VARYING)
def mend(
    q, k, v, g, o, strong, cu, s_q, s_k, s_v, s_g, s_o, N, T, H, K, V, scale, n_flags, reverse,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Add to o the pairs of strong chunks; `strong` [n_flags] has a flag for each chunk of a head."""
    # which chunks: BN of them, most of them not strong
    i_0 = tl.program_id(0) * BN
    o_n = i_0 + tl.arange(0, BN)
    if tl.max(tl.load(strong + o_n, mask=o_n < n_flags, other=0).to(tl.int32)) == 0:
        return
    # once for all chunks: the masks of all levels, and the level of each pair (LEVELS, which is none, of unseen pairs)
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    unseen = tl.where(reverse != 0, o_i > o_j, o_i < o_j)
    masks, meeting = gates_to_all_borders(LEVELS, C, FAST_SUMS), tl.where(unseen, LEVELS, meetings(LEVELS, C))
    for i in tl.range(i_0, tl.minimum(i_0 + BN, n_flags)):
        if tl.load(strong + i) != 0:
            i_h, i_s = i % H, i // H
            i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
            b_P = tl.zeros([C, C], dtype=tl.float32)
            for o_k in tl.range(0, K, BK):
                b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
                b_P = add_scores(b_P, b_q, b_k, clamped(b_g), masks, meeting, LEVELS, FAST_SUMS, reverse)
            for o_v in tl.range(0, V, BV):
                b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_o = load_tile(o, s_o, i_b, i_h, o_t, stop, o_v, V, C, BV, False)  # [C, BV]
                b_o += product(b_P, b_v) * scale
                store_tile(o, b_o, s_o, i_b, i_h, o_t, stop, o_v, V, C, BV, False)


@triton.jit(do_not_specialize=VARYING)
def prepare(
    q, k, g, q_hat, k_hat, factors, strong, cu, s_q, s_k, s_g, s_hat, N, T, H, K,
    C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr, FAST_SUMS: tl.constexpr,
):
    """Make (1): q', k' and the state's `factors` [chunks, H, 3, K]; set flags in `strong`, which holds zeros.

    The rows of `factors` belong to q's read, the way through the chunk, and k's write.
    """
    # which tile: BK channels of a chunk of a head
    i_k, i_h, i_s = which_tile(H, K, BK)
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)

    # load
    b_g = load_tile(g, s_g, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)  # [C, BK]

    # compute
    read, write, first, last, through, mild = chunk_decays(b_g, LIMIT, FAST_SUMS, False, q_hat.dtype.element_ty)

    # store
    store_tile(q_hat, b_q * read, s_hat, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    store_tile(k_hat, b_k * write, s_hat, i_b, i_h, o_t, stop, i_k * BK, K, C, BK, False)
    i_d, o_k = i_s * H + i_h, i_k * BK + tl.arange(0, BK)
    p_d = factors + i_d.to(tl.int64) * 3 * K + o_k
    tl.store(p_d, first, mask=o_k < K)
    tl.store(p_d + K, through, mask=o_k < K)
    if q_hat.dtype.element_ty == tl.float16:  # in other dtypes it is q's own factor
        tl.store(p_d + 2 * K, last, mask=o_k < K)
    tl.store(strong + i_d, 1, mask=mild == 0)


# Decays and pairs from a chunk's gates.


@triton.jit
def clamped(b_g):
    """Clamp gates for sums, at `FLOOR`."""
    b_f = tl.maximum(b_g.to(tl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return b_f.to(tl.bfloat16) if b_g.dtype == tl.bfloat16 else b_f


@triton.jit
def sums(m, x, FAST: tl.constexpr):
    """m x: sums of the rows of x [C, D], weighted by m [C, C], whose entries are multiples of 1/2.

    A product on tensor cores is fast; x in two bf16 parts makes it right to 2^-17 (bf16 gates: exactly).
    """
    if FAST:
        m, high = m.to(tl.bfloat16), x.to(tl.bfloat16)
        b = tl.dot(m, high)
        if x.dtype != tl.bfloat16:
            b = tl.dot(m, (x - high.to(tl.float32)).to(tl.bfloat16), b)
        return b
    else:
        return tl.dot(m.to(tl.float32), x.to(tl.float32), input_precision="ieee")


@triton.jit
def totals(x, FAST: tl.constexpr):
    """The sum [D] of x [C, D] over all rows, from the same two parts as `sums`, so that differences cancel.

    It is the product x^T times ones, because the threads that hold its rows hold the same rows of a state.
    """
    if FAST:
        ones = tl.full([x.shape[0], 16], 1.0, tl.bfloat16)
        high = x.to(tl.bfloat16)
        b = tl.dot(high.T, ones)  # [D, 16], all columns equal
        if x.dtype != tl.bfloat16:
            b = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16).T, ones, b)
        return tl.max(b, 1)
    else:
        return tl.sum(x.to(tl.float32), 0)


@triton.jit
def chunk_decays(b_g, LIMIT: tl.constexpr, FAST: tl.constexpr, REVERSE: tl.constexpr, dtype: tl.constexpr):
    """From a chunk's gates [C, D]: factors of q and k [C, D], factors of the state [D], whether all channels are mild.

    The state is multiplied by `first`, read, multiplied by `through` (1 in mild channels), written
    to, and multiplied by `last` (in mild channels `first` again, else 1)::

        mild channels    q e^(b - r), k e^(r - b), the state e^r before and after
        strong ones      q e^b, k e^(b_C - b), the state e^(b_C) in between
        in float16       q e^b / 2^s, the state 2^s before, and e^(b_C) / 2^s in between

    Backwards in time, the reading factor decays to the chunk's end.
    """
    o_i, o_j = tl.arange(0, b_g.shape[0])[:, None], tl.arange(0, b_g.shape[0])[None, :]
    b_f = clamped(b_g)
    total = totals(b_f, FAST) * LOG2E
    mild = total >= LIMIT * LOG2E
    # FAST: b - r, as if summed half from the left and half from the right. Strong channels add total / 2 to both:
    # up is total / 2 + (b - total / 2) = b, down is total / 2 - (b - total / 2) = b_C - b
    if FAST:
        up = sums(tl.where(o_i >= o_j, 0.5, -0.5), b_f, FAST) * LOG2E
        rest = tl.where(mild, 0.0, total * 0.5)[None, :]
        up, down = rest + up, rest - up
    else:  # each sum is made on its own, so that a strong gate takes no digits from later gates. Half the
        # sums' difference is b - r: with `total`, added in another order, i = j would not cancel
        up, down = sums(o_i >= o_j, b_f, FAST) * LOG2E, sums(o_i < o_j, b_f, FAST) * LOG2E
        half = (up - down) * 0.5
        up, down = tl.where(mild[None, :], half, up), tl.where(mild[None, :], -half, down)
    edge, through = tl.where(mild, total * 0.5, 0.0), tl.where(mild, 0.0, total)
    of_q, of_k = edge, edge
    if dtype == tl.float16:  # q e^b is too small for float16 at g = -20. So 2^s moves from q to the state: e^b of
        # the first token, the largest of the chunk, rounded down to a power of 2
        most = totals(tl.where(o_i == 0, b_f, 0.0).to(b_f.dtype), FAST) * LOG2E
        shift = tl.where(mild, 0.0, tl.floor(tl.maximum(most, -100.0)))
        up, of_q, through = up - shift[None, :], edge + shift, through - shift
    up, down, through = tl.exp2(up), tl.exp2(down), tl.exp2(through)
    of_q, of_k = tl.exp2(of_q), tl.exp2(of_k)
    read, write, first, last = (down, up, of_k, of_q) if REVERSE else (up, down, of_q, of_k)
    return read, write, first, last, through, tl.min(mild.to(tl.int32)) != 0


@triton.jit
def gates_to_border(level, C: tl.constexpr):
    """Mask [C, C] of the gates i between token t and the middle of its block of 2^(level + 1) tokens."""
    o_c = tl.arange(0, C)
    border = ((o_c >> level) | 1) << level  # the first token of a block's second half
    t, i = o_c[:, None], o_c[None, :]
    return (i <= t) & (i >= border[:, None]) | (i > t) & (i < border[:, None])


@triton.jit
def gates_to_all_borders(LEVELS: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr):
    """`gates_to_border` of each level, in the precision in which `sums` multiplies."""
    masks = ()
    for level in tl.static_range(LEVELS):
        masks += (gates_to_border(level, C).to(tl.bfloat16 if FAST else tl.float32),)
    return masks


@triton.jit
def to_border(b_g, m, FAST: tl.constexpr):
    """Decay [C, D] between each token and its block's middle, m being `gates_to_border`: no exponent is above 0."""
    return tl.exp2(sums(m, b_g, FAST) * LOG2E)


@triton.jit
def meetings(LEVELS: tl.constexpr, C: tl.constexpr):
    """Level [C, C] at which tokens i and j meet: the highest bit in which i and j differ; -1 if i = j."""
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    meeting = tl.full([C, C], -1, tl.int32)
    for level in tl.static_range(LEVELS):
        meeting = tl.where((o_i ^ o_j) >> level != 0, level, meeting)
    return meeting


@triton.jit
def both_halves(b_q, b_k, b_E, level, reverse=0):
    """`operand` X [C, D] of a level, and the factors of q and k: q in the second half of each block, k in the first.

    With `reverse`, q is in the first half. In float16 each half has its own size, because the other half's numbers may
    be far larger.
    """
    reads = (((tl.arange(0, b_q.shape[0]) >> level) & 1) != reverse)[:, None]
    # select after multiplying: then Triton converts layouts of q and k once, instead of once per level
    b_x = tl.where(reads, b_q * b_E, b_k * b_E)
    if b_q.dtype == tl.float16:
        b_l, of_q = operand(tl.where(reads, b_x, 0.0), b_q.dtype, -100.0)
        b_r, of_k = operand(tl.where(reads, 0.0, b_x), b_q.dtype, -100.0)
        return tl.where(reads, b_l, b_r), of_q, of_k
    else:
        return b_x.to(b_q.dtype), 1.0, 1.0


@triton.jit
def add_scores(b_P, b_q, b_k, b_g, masks, meeting, LEVELS: tl.constexpr, FAST: tl.constexpr, reverse=0):
    """Add to b_P [C, C] the scores of a strong chunk: of each token with itself, then level by level."""
    b_P += tl.where(meeting == -1, tl.dot(b_q, b_k.T, input_precision="ieee"), 0.0)
    for level in tl.static_range(LEVELS):
        b_E = to_border(b_g, masks[level], FAST)  # [C, BK]
        b_x, of_q, of_k = both_halves(b_q, b_k, b_E, level, reverse)
        b_pairs = tl.dot(b_x, b_x.T, input_precision="ieee") * (of_q * of_k)
        b_P = tl.where(meeting == level, b_P + b_pairs, b_P)
    return b_P


# The plan: the launches of a call.


class GlaCall(NamedTuple):
    """The sizes, tiles and tensors that the launches of one call share."""

    draft: Draft
    cu: Spec | None
    B: int
    T: int
    H: int
    K: int
    V: int
    N: int  # sequences
    scale: float
    path: str | None
    half: bool  # tokens of 16 bits
    limit: float  # a mild chunk decays by at most so many nats
    C: int
    BK: int
    BV: int
    chunks: int  # slots for chunks
    warps: int
    stages: tuple[int, int]  # stages of a walk that stores no states, and of a walk that stores states

    launch = launch

    @property
    def levels(self) -> int:
        return self.C.bit_length() - 1

    @property
    def same(self) -> dict:
        """Constants that every kernel has."""
        hardware = self.draft.hardware
        # makes products of bf16, which Triton's interpreter gets wrong
        fast = self.half and hardware.matrix_units and not hardware.interpreted
        return {"C": self.C, "PACKED": self.cu is not None, "FAST_SUMS": fast}

    def segment(self) -> tuple[int, str]:
        """(tokens of a segment, why); more than T without segments."""
        programs, packed = cdiv(self.V, self.BV) * self.H * self.N, self.N if self.cu else None
        chunks, why = segment_length(self.draft.hardware, self.path, programs, cdiv(self.T, self.C), packed)
        return self.C * chunks, why

    def by_engine(self, *tokens: Spec | None) -> bool:
        """Whether the copy engine loads these tensors."""
        return self.cu is None and all([describable(x, self.draft.hardware) for x in tokens if x])

    def launch_walk(
        self, x: Readers, v: Spec, reverse: bool, L: int, S_in, S_out, o=None, states=None, decay=None
    ) -> None:
        """Launch `walk` over segments of L tokens; Hopper's kernel has a launch of its own."""
        C, BK, BV, T, H, K, V = self.C, self.BK, self.BV, self.T, self.H, self.K, self.V
        q, engine = x.q if o else None, self.by_engine(x.q, x.k, v, x.g)
        s = stride_patterns(q=q, k=x.k, v=v, g=x.g, o=o)
        q, k, v, g, o = boxes(engine, C, (q, BK), (x.k, BK), (v, BV), (x.g, BK), (o, BV))
        self.launch(
            walk, cdiv(V, BV) * H * slots(self.B, T, self.cu, L),
            q=q, k=k, v=v, g=g, factors=x.factors, strong=x.strong, o=o, S_in=S_in, S_out=S_out, decay=decay,
            states=boxes(engine, BK, (states, BV))[0], **s, s_S=pattern(H * K * V, V, K * V, 1),
            L=L, TMA=engine, REVERSE=reverse, LIMIT=self.limit,
            num_warps=self.warps, num_stages=self.stages[int(states is not None)],
        )


class Readers(NamedTuple):
    """Queries and keys for a walk: the original ones with g, or those of `prepare` with factors."""

    q: Spec | None
    k: Spec
    g: Spec | None = None
    factors: Spec | None = None
    strong: Spec | None = None


class Walked(NamedTuple):
    """The results of `walks`; None if a result was not asked for."""

    o: Spec | None
    S: Spec | None  # the final state (backwards: the gradient of the first)
    states: Spec | None  # [chunks, K, H, V] in memory [chunks, H, K, V]
    starts: Spec | None  # the state that each segment starts from


def begin(draft: Draft, q: Spec, v: Spec, cu: Spec | None, scale, path, table=WALK) -> GlaCall:
    """Begin a call whose plan is `draft`, by the sizes of q and v."""
    hardware, (B, T, H, K), V = draft.hardware, q.shape, v.shape[-1]
    half, cu = q.dtype != torch.float32, draft.contiguous(cu, torch.int32)
    # tiles of 16 channels in bf16 with gates are wrong (Triton 3.6; lab/gla.md)
    least = 64 if half else 16
    BK, wide = max(least, next_power_of_2(K)), max(least, next_power_of_2(V))
    C, BV, warps, *stages = tiles(table, hardware, q.dtype, K=K)
    return GlaCall(
        draft, cu, B, T, H, K, V, N=sequences(B, cu), scale=contract.check_scale(scale, K), path=path,
        half=half, limit=LIMIT[q.dtype], C=C, BK=BK, BV=min(BV, wide), chunks=slots(B, T, cu, C), warps=warps,
        stages=tuple(stages),
    )


def begin_backward(call: GlaCall, v: Spec, do: Spec, dS: Spec | None) -> tuple[GlaCall, Spec, Spec | None]:
    """Return (the call with the scale of walks backwards, their do, R after the last token)."""
    do, scale = call.draft.gradient_of_o(v, do, call.scale)
    # a walk multiplies all its reads by scale, but dS has no such factor
    R = call.draft.compute("R", torch.div, call.draft.contiguous(dS), scale)
    return call._replace(scale=scale), do, R


def readers(call: GlaCall, q: Spec, k: Spec, g: Spec) -> Readers:
    """Make (1) of all chunks if a kernel of its own is faster; else return the original q, k and g."""
    if not call.half or call.K <= 64:
        # no program writes the flags of spare slots: they must be zeros
        flags = call.draft.new("strong", call.chunks, call.H, dtype=torch.int8, zero=call.cu is not None)
        return Readers(q, k, g=g, strong=flags)
    call.draft.because("q' and k' are made once, for all tiles of V: K > 64")
    return prepared(call, q, k, g)


def prepared(call: GlaCall, q: Spec, k: Spec, g: Spec) -> Readers:
    """Launch `prepare`: (1) of all chunks."""
    draft, n, H, K = call.draft, call.chunks, call.H, call.K
    q_hat, k_hat = draft.like("q_hat", q), draft.like("k_hat", k)
    factors = draft.new("factors", n, H, 3, K)
    strong = draft.new("strong", n, H, dtype=torch.int8, zero=True)
    call.launch(
        prepare, cdiv(K, 64) * H * n,
        q=q, k=k, g=g, q_hat=q_hat, k_hat=k_hat, factors=factors, strong=strong,
        **stride_patterns(q=q, k=k, g=g, hat=q_hat), BK=64, LIMIT=call.limit, num_warps=4, maxnreg=128,
    )
    return Readers(q_hat, k_hat, factors=factors, strong=strong)


def kept_states(call: GlaCall, name: str, v: Spec) -> Spec:
    """Room for the states of all chunks, [chunks, K, H, V] in memory [chunks, H, K, V]."""
    dtype = v.dtype if v.dtype == torch.bfloat16 else torch.float32  # float16 is too small
    return call.draft.new(name, call.chunks, call.H, call.K, call.V, dtype=dtype).transposed(1, 2)


def walks(
    call: GlaCall, x: Readers, v: Spec, S_in: Spec | None, o: str = "", S: str = "",
    states: str = "", starts: Spec | None = None, reverse: bool = False,
) -> Walked:
    """Make the results that are given a name: o, the final state S, the states before each chunk.

    Without segments make one launch, with segments the three launches of the module's docstring. If an earlier walk has
    found the states that segments start from (`starts`), make only the last launch; then there is no S.
    """
    draft, T, H, K, V = call.draft, call.T, call.H, call.K, call.V
    x = x if o else x._replace(q=None)
    o = draft.new(o, call.B, T, H, V, dtype=v.dtype) if o else None
    states = kept_states(call, states, v) if states else None
    L, why = call.segment()
    draft.because(why)
    if L > T:  # without segments each sequence is a slot, so S_in and S are indexed by slots too
        S = draft.new(S, call.N, H, K, V) if S else None
        call.launch_walk(x, v, reverse, L, S_in, S, o, states)
        return Walked(o, S, states, None)
    if starts is None:
        n = slots(call.B, T, call.cu, L)
        starts, decay = draft.new("starts", n, H, K, V), draft.new("decay", n, H, K)
        S = draft.new(S or "S", call.N, H, K, V)
        call.launch_walk(x, v, reverse, L, None, starts, decay=decay)
        carry_states(draft, starts, decay, S_in, S, call.cu, T, L, reverse)
    else:
        S = None
    call.launch_walk(x, v, reverse, L, starts, None, o, states)
    return Walked(o, S, states, starts)


def mend_strong(call: GlaCall, q, k, v, g, o, strong, reverse=False) -> None:
    """Launch `mend`, which adds to o the pairs that `walk` has left out."""
    wide = MEND[call.draft.hardware.family]
    call.launch(
        mend, cdiv(call.chunks * call.H, 16),
        q=q, k=k, v=v, g=g, o=o, strong=strong, **stride_patterns(q=q, k=k, v=v, g=g, o=o),
        n_flags=call.chunks * call.H, reverse=int(reverse),
        LEVELS=call.levels, BK=min(wide, call.BK), BV=min(wide, call.BV), BN=16, num_warps=4, num_stages=1,
    )


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, final state, starts)."""
    draft, q, k, v, g = Draft(hardware, *call), call.q, call.k, call.v, call.g
    shared = begin(draft, q, v, call.cu_seqlens, call.scale, call.path)
    x = readers(shared, q, k, g)
    walked = walks(shared, x, v, draft.contiguous(call.initial_state, torch.float32), o="o", S="S_T")
    mend_strong(shared, q, k, v, g, walked.o, x.strong)
    return draft.plan("portable", walked.o, walked.S, walked.starts)
