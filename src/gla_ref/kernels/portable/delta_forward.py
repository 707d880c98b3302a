"""The delta rule and the gated delta rule, forward, in chunks (chapter 20).

With b the running sum of a chunk's gates (0 without them) and E_ij = e^(b_i - b_j), the decay from token j to token i,

    A = tril(beta_i (k_i k_j^T) E_ij, -1)       Y = (I + A)^-1       P = tril(q k^T * E)             (1)
    w = Y (beta (v - e^b (k S)))                                                                     (2)
    o = scale * (e^b (q S) + P w)               S <- e^(b_C) S + k^T (e^(b_C - b) w)                 (3)

Row i of w is the write of token i, corrected for the writes of earlier tokens of the chunk. beta stays outside of Y
here; the page pages/gated_delta_rule.py stores Y beta as its Y, and hopper/ calls that product T, and -A N. References:
:mod:`gla_ref.delta_rule`, :mod:`gla_ref.gated_delta_rule`; Yang et al. 2024b (DeltaNet), section 3; Yang et al. 2025
(Gated DeltaNet), section 3.3. Value head h reads key head h // G, G value heads to a key head.

*The inverse.* `inverse` eliminates the blocks of 16 on the diagonal of A, column after column, all blocks at the same
time. Then it merges pairs of blocks by products, 16 to 32 to 64. Every step is in float32: the tokens' precision is too
low, and a series would cancel if keys are alike (chapter 21).

*The decay.* E is made from exact sums (`summed` in scalar_gates.py), and is masked before the exponential: above the
diagonal the exponential may overflow, and a reset among future tokens must not change the past.

*Segments.* A chunk is an affine map of the state, S -> M S + X with M = e^(b_C) I - (e^(b_C - b) k)^T Y (beta e^b k).
If heads are too few to fill the chip, the plan cuts sequences into segments. A first `walk` finds each segment's X,
from a state of zeros, and M, whose columns walk like a state's from the unit matrix with values of 0; `carry_maps`
finds the state between segments; a second `walk` makes o.

*A gate per channel.* Kimi Delta Attention (kda_forward.py) has q e^b, k e^b and, to write, k e^(b_C - b) made before a
walk, and e^(b_C) for each row of the state; `walk` takes these as q, k, `k_til` and `through`, and no other decay.

The kernels, and the number of programs of each (H value heads, N sequences)::

    solve      H * chunks              (1), and the decays that (2) and (3) need
    walk       V tiles * H * segments  (2) and (3) of a head's chunks; of segments first, V and K tiles
    carry_maps V tiles * H * N         segments' states (few heads, large T)

A walk moves 2 C (2 K + 2 BV + 2 C) bytes per chunk (bf16) for 2 C (2 C BV + 3 K BV) FLOPs; neighbouring V tiles read
the same tokens, mostly from L2. Limits: K <= 256, V <= 512; float32 (ieee products), float16, bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import _contract as contract
from ..launch.hardware import Hardware, tiles
from ..launch.plan import Draft, Plan, Spec, boxes, cdiv, describable, next_power_of_2
from ._arguments import launch, stride_patterns, token_strides
from ._factors import BETA, COARSE, FINE, ROWS, SINCE, UNTIL, factor, load_channels, load_whole_decay, square
from .scalar_gates import chunk_length, log_decay, summed
from .segments import segment_length, sequences, slots, which_segment, which_sequence
from .tiles import VARYING, load_tile, load_tokens, low, operand, pattern, product, store_tile, times, which_tile

# by family and bits, K up to: (BV, warps, stages) of a walk. These tiles are the largest that hardly spill
# (tools/compile_kernels.py); times were not compared. 32 columns with 4 warps need 2 stages: with 1 stage and K > 128,
# ptxas 12.8.93 (Triton 3.6) makes wrong descriptors for the products on sm_90, and the kernel reads other memory
WALK = {
    ("hopper", 16): {64: (64, 4, 3), 128: (64, 4, 2), 256: (32, 4, 2)},
    ("hopper", 32): {64: (32, 4, 1), 128: (16, 8, 1), 256: (16, 8, 1)},
    ("ampere", 16): {64: (32, 4, 2), 128: (32, 4, 1), 256: (32, 8, 1)},
    ("ampere", 32): {64: (32, 8, 1), 128: (16, 8, 1), 256: (16, 8, 1)},
    ("turing", 16): {64: (32, 8, 1), 128: (16, 8, 1)},
    ("turing", 32): {64: (32, 8, 1), 128: (16, 8, 1)},
}


@triton.jit
def diagonal(A, n: tl.constexpr):
    """The blocks of n on the diagonal of A [C, C]: [C / n, n, n]."""
    m: tl.constexpr = A.shape[0] // n
    if m == 1:
        b = tl.reshape(A, [1, n, n])
    else:
        o_m = tl.arange(0, m)
        own = o_m[:, None, None, None] == o_m[None, None, :, None]
        b = tl.sum(tl.where(own, tl.reshape(A, [m, n, m, n]), 0.0), 2)
    return b


@triton.jit
def quarter(x, row: tl.constexpr, column: tl.constexpr):
    """The quarter [m, n, n] of blocks [m, 2, n, 2, n] in this half of the rows and this half of the columns."""
    half = tl.arange(0, 2)
    kept = (half[None, :, None, None, None] == row) & (half[None, None, None, :, None] == column)
    return tl.sum(tl.sum(tl.where(kept, x, 0.0), 3), 1)


@triton.jit
def multiplied(x, y):
    """x y of blocks [m, n, n], in float32."""
    if x.shape[0] == 1:
        n: tl.constexpr = x.shape[1]
        b = tl.dot(tl.reshape(x, [n, n]), tl.reshape(y, [n, n]), input_precision="ieee")
        return tl.reshape(b, [1, n, n])
    else:
        return tl.dot(x, y, input_precision="ieee")


@triton.jit
def merged(Y, A):
    """Inverses of blocks of 2 n, [m, 2 n, 2 n], from the halves' inverses Y [2 m, n, n]: -Y_2 A_21 Y_1 below them."""
    n: tl.constexpr = Y.shape[1]
    m: tl.constexpr = Y.shape[0] // 2
    half = tl.arange(0, 2)
    b_Y = tl.reshape(Y, [m, 2, n, n])
    b_1 = tl.sum(tl.where(half[None, :, None, None] == 0, b_Y, 0.0), 1)  # [m, n, n]
    b_2 = tl.sum(tl.where(half[None, :, None, None] == 1, b_Y, 0.0), 1)  # [m, n, n]
    b_21 = quarter(tl.reshape(diagonal(A, 2 * n), [m, 2, n, 2, n]), 1, 0)
    b_21 = -multiplied(b_2, multiplied(b_21, b_1))
    row, column = half[None, :, None, None, None], half[None, None, None, :, None]
    b = tl.where(row == 0, b_1[:, None, :, None, :], b_2[:, None, :, None, :])
    b = tl.where(row == column, b, tl.where(row > column, b_21[:, None, :, None, :], 0.0))  # [m, 2, n, 2, n]
    return tl.reshape(b, [m, 2 * n, 2 * n])


@triton.jit
def inverse(A):
    """(I + A)^-1 of a strictly lower triangular A [C, C], C = 16, 32 or 64, in float32."""
    C: tl.constexpr = A.shape[0]
    b_A = diagonal(A, 16)  # [C / 16, 16, 16]
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    Y = tl.where(i == j, 1.0, tl.zeros_like(b_A))
    for n in tl.range(0, 15):  # row n is done: subtract multiples of it from later rows
        b_column = tl.sum(tl.where(j == n, b_A, 0.0), 2)
        b_row = tl.sum(tl.where(i == n, Y, 0.0), 1)
        Y -= b_column[:, :, None] * b_row[:, None, :]
    if C >= 32:
        Y = merged(Y, A)
    if C >= 64:
        Y = merged(Y, A)
    return tl.reshape(Y, [C, C])


@triton.jit
def invert_and_store(P, Y, p_f, b_P, b_A, b_beta, i_s, i_h, H):
    """Store the strengths of a chunk at p_f, its P, and Y, from all pairs [C, C] without strengths."""
    C: tl.constexpr = b_P.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_Y = inverse(tl.where(i > j, b_A * b_beta[:, None], 0.0))
    tl.store(p_f + BETA * C, b_beta)
    tl.store(square(P, i_s, i_h, H, C), tl.where(i >= j, b_P, 0.0).to(P.dtype.element_ty))
    tl.store(square(Y, i_s, i_h, H, C), b_Y.to(Y.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def solve(
    q, k, g, beta, P, Y, factors, cu, s_q, s_k, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, N, T, H, G, K,
    C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):
    """Make (1) of a chunk, and the chunk's `factors` [chunks, H, ROWS, C]; without gates only their first row."""
    # which tile: a chunk of a value head
    i_h, i_s = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c = tl.arange(0, C)
    i, j = o_c[:, None], o_c[None, :]

    # load
    o_r = o_t + o_c
    b_beta = load_tokens(beta, (s_bb, s_bt, s_bh), i_b, i_h, o_r, stop)  # [C]
    b_P = tl.zeros([C, C], dtype=tl.float32)
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for o_k in tl.range(0, K, BK):
        b_q = load_tile(q, s_q, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, stop, o_k, K, C, BK, False)  # [C, BK]
        b_P = tl.dot(b_q, b_k.T, b_P, input_precision="ieee")
        b_A = tl.dot(b_k, b_k.T, b_A, input_precision="ieee")

    # compute
    p_f = factor(factors, i_s, i_h, H, C, ROWS)
    if g is not None:
        b_coarse, b_fine = summed(load_tokens(g, (s_gb, s_gt, s_gh), i_b, i_h, o_r, stop))  # [C]
        coarse = tl.sum(tl.where(o_c == C - 1, b_coarse, 0.0))
        fine = tl.sum(tl.where(o_c == C - 1, b_fine, 0.0))
        b_E = tl.exp2(tl.where(i >= j, log_decay(b_coarse, b_fine), float("-inf")))  # [C, C]
        b_P *= b_E
        b_A *= b_E
        tl.store(p_f + SINCE * C, tl.exp2(b_coarse + b_fine))
        tl.store(p_f + UNTIL * C, tl.exp2((coarse - b_coarse) + (fine - b_fine)))
        tl.store(p_f + COARSE * C, b_coarse)
        tl.store(p_f + FINE * C, b_fine)
    invert_and_store(P, Y, p_f, b_P, b_A, b_beta, i_s, i_h, H)


@triton.jit
def load_first(S_in, s_in, i_s, i_h, i_v, K, V, BK: tl.constexpr, BV: tl.constexpr, MAP: tl.constexpr):
    """(Tile i_v of the state before a walk, or of [0, I] with MAP; the places of its columns [BV]; its mask [BK, BV]).

    Tiles of M come after the tiles of X; no tile has columns of both.
    """
    o_k, o_v, n_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.cdiv(V, BV)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += load_tile(S_in, s_in, i_s, i_h, 0, K, i_v * BV, V, BK, BV, False)
    if MAP:
        o_m = o_v - n_v * BV
        b_S += tl.where(o_k[:, None] == o_m[None, :], 1.0, 0.0)
        o_v, m_v = tl.where(i_v < n_v, o_v, V + o_m), tl.where(i_v < n_v, o_v < V, o_m < K)
    else:
        m_v = o_v < V
    return b_S, o_v, (o_k < K)[:, None] & m_v[None, :]


@triton.jit
def store_state(x, b_S, i, o_v, m_S, K, W):
    """Store the columns o_v of the i-th state of x [..., K, W]."""
    o_k = tl.arange(0, b_S.shape[0])
    p = x + i.to(tl.int64) * K * W + o_k[:, None] * W + o_v[None, :]
    tl.store(p, b_S.to(x.dtype.element_ty), mask=m_S)


@triton.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, o, P, Y, factors, k_til, through, S_in, S_out, states, writes, cu, s_q, s_k, s_v, s_o, s_w, s_in,
    N, T, L, H, G, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
    GATED: tl.constexpr, MAP: tl.constexpr, ROWS: tl.constexpr,
):
    """Walk a segment of a head, chunk by chunk, from the state in S_in to S_out.

    Each result may be None: o; `states`, the state before each chunk; `writes`, the w of each token. With MAP, S_out
    [slots, H, K, V + K] is X and, after X, M, and o [B, T, H, K] what each token reads of each row of the first state.
    """
    # which tile: BV columns
    i_v, i_h, i_s = which_tile(H, tl.cdiv(V, BV) * BV + (K if MAP else 0), BV)
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    first = start // C + i_n if PACKED else i_n * tl.cdiv(T, C)  # chunk of the sequence
    dtype: tl.constexpr = v.dtype if TMA else v.dtype.element_ty

    # load
    b_S, o_v, m_S = load_first(S_in, s_in, i_s, i_h, i_v, K, V, BK, BV, MAP)

    n_c = tl.cdiv(end - begin, C)  # at most 0 in a spare slot
    for i_c in tl.range(0, n_c):
        o_t = begin + i_c * C
        i_t = first + (o_t - start) // C

        # load
        b_k = load_tile(k, s_k, i_b, i_h // G, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV], of M zeros: it lies beyond V
        b_Y = tl.load(square(Y, i_t, i_h, H, C))  # [C, C]
        p_f = factor(factors, i_t, i_h, H, C, ROWS)
        b_beta = tl.load(p_f + BETA * C)  # [C]

        # compute: (2)
        b_low, of_S = operand(b_S, dtype)
        b_k, of_k = low(b_k, dtype)
        b_x = tl.dot(b_k, b_low, input_precision="ieee") * (of_k * of_S)  # [C, BV]
        if GATED:
            b_since = tl.load(p_f + SINCE * C)  # [C]
            b_until = tl.load(p_f + UNTIL * C)  # [C]
            b_x *= b_since[:, None]
        b_w = times(b_Y, (b_v.to(tl.float32) - b_x) * b_beta[:, None], dtype)  # [C, BV]
        if states is not None:
            store_state(states, b_S, i_t * H + i_h, o_v, m_S, K, V)
        if writes is not None:
            store_tile(writes, b_w, s_w, i_b, i_h, o_t, end, i_v * BV, V, C, BV, False)

        # (3)
        if o is not None:
            b_q = load_tile(q, s_q, i_b, i_h // G, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            b_P = tl.load(square(P, i_t, i_h, H, C))  # [C, C]
            b_q, of_q = low(b_q, dtype)
            b_o = tl.dot(b_q, b_low, input_precision="ieee") * (of_q * of_S)  # [C, BV]
            if GATED:
                b_o *= b_since[:, None]
            b_o += times(b_P, b_w, dtype)
            # store
            if MAP:  # tiles of X lie beyond K
                n_v = tl.cdiv(V, BV)
                o_m = tl.where(i_v < n_v, K, (i_v - n_v) * BV)
                store_tile(o, b_o * scale, s_o, i_b, i_h, o_t, end, o_m, K, C, BV, TMA)
            else:
                store_tile(o, b_o * scale, s_o, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)
        if GATED:
            b_S *= load_whole_decay(factors, i_t, i_h, H, C, ROWS)
            b_w *= b_until[:, None]
        if k_til is not None:
            b_S *= load_channels(through, i_t, i_h, H, K, BK)[:, None]
            b_k, of_k = low(load_tile(k_til, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA), dtype)  # [C, BK]
            b_w *= of_k
        b_S = product(b_k.T, b_w, b_S)

    # store
    if S_out is not None:
        store_state(S_out, b_S, i_s * H + i_h, o_v, m_S, K, V + K if MAP else V)


@triton.jit(do_not_specialize=VARYING)
def carry_maps(
    part, S_in, S_out, cu, N, T, L, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):
    """Replace each segment's X in `part` [slots, H, K, V + K] by the state that the segment starts from."""
    # which tile: BV columns of the state of a head
    i_v, i_h, i_n = which_tile(H, V, BV)
    o_k, o_v, o_j = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BJ)
    m_k, m_v, W = (o_k < K)[:, None], (o_v < V)[None, :], V + K
    _, start, stop = which_sequence(cu, i_n, T, PACKED)
    first = start // L + i_n if PACKED else i_n * tl.cdiv(T, L)
    n_s = tl.cdiv(stop - start, L)

    # load
    o_S = (i_n * H + i_h).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if S_in is not None:
        b_S += tl.load(S_in + o_S, mask=m_k & m_v, other=0.0)

    # compute
    for i in range(0, n_s):
        i_s = (first + (n_s - 1 - i if REVERSE else i)) * H + i_h
        p = part + i_s.to(tl.int64) * K * W
        b_X = tl.load(p + o_k[:, None] * W + o_v[None, :], mask=m_k & m_v, other=0.0)  # [BK, BV]
        tl.store(p + o_k[:, None] * W + o_v[None, :], b_S, mask=m_k & m_v)
        tl.debug_barrier()  # below, other threads than those that stored rows of S read them
        b_S = b_X
        for o in range(0, K, BJ):
            m_j = o + o_j < K
            b_M = tl.load(p + o_k[:, None] * W + V + o + o_j[None, :], mask=m_k & m_j[None, :], other=0.0)  # [BK, BJ]
            p_S = p + (o + o_j)[:, None] * W + o_v[None, :]
            b_rows = tl.load(p_S, mask=m_j[:, None] & m_v, other=0.0)  # [BJ, BV]
            b_S = tl.dot(b_M, b_rows, b_S, input_precision="ieee")

    # store
    tl.store(S_out + o_S, b_S, mask=m_k & m_v)


# The plan: the launches of a call.


def choose_path_by_maps(programs: int, chunks: int, multiprocessors: int, packed: int | None = None) -> tuple[str, int]:
    """Return the path and the chunks per segment, by the arguments of `choose_path` (segments.py).

    A segment is walked twice, and the first walk has K more columns, so segments must be long, and at least four.
    """
    if 4 * programs > multiprocessors or chunks < 64:
        return "fused", chunks
    length = max(16, cdiv(chunks, multiprocessors * (packed or 1) // programs))
    return ("segmented", length) if length < chunks else ("fused", chunks)


def launch_carry_maps(
    draft: Draft, part: Spec, S_in: Spec | None, S_out: Spec, cu: Spec | None, T: int, L: int, reverse: bool
) -> None:
    """Launch `carry_maps` over segments of L tokens; S_out [N, H, K, V] gets the state after each sequence."""
    (N, H, K, V), BV = S_out.shape, 16
    BK = max(16, next_power_of_2(K))
    # with 64 columns and K = 128 a thread spills 4,472 bytes on sm_80 (Triton 3.7 and 3.9), with 32 columns at most 20
    BJ = min(32 if draft.hardware.family == "ampere" else 64, BK)
    draft.launch(
        carry_maps, cdiv(V, BV) * H * N,
        part=part, S_in=S_in, S_out=S_out, cu=cu, N=N, T=T, L=L, H=H, K=K, V=V,
        BK=BK, BV=BV, BJ=BJ, PACKED=cu is not None, REVERSE=reverse, num_warps=4, num_stages=1,
    )


class DeltaCall(NamedTuple):
    """The sizes, tiles and tensors that the launches of one call share, including the results of `solve`."""

    draft: Draft
    cu: Spec | None
    B: int
    T: int
    H: int  # value heads
    K: int
    V: int
    G: int  # value heads that read one key head
    N: int  # sequences
    scale: float
    gated: bool
    kept: torch.dtype  # the dtype in which sums of products pass through memory
    C: int
    L: int  # tokens of a segment; more than T without segments
    BK: int
    BV: int
    chunks: int  # slots for chunks
    warps: int
    stages: int
    P: Spec
    Y: Spec
    factors: Spec
    k_til: Spec | None = None  # keys that write, and the state's decays, where each channel has a gate
    through: Spec | None = None

    launch = launch

    @property
    def same(self) -> dict:
        """Constants that every kernel has."""
        return {"PACKED": self.cu is not None, "ROWS": self.factors.shape[2]}

    @property
    def segments(self) -> int:
        """Slots for segments."""
        return slots(self.B, self.T, self.cu, self.L)

    def by_engine(self, *tensors: Spec | None) -> bool:
        """Whether the copy engine takes all these tensors."""
        return self.cu is None and all([describable(x, self.draft.hardware) for x in tensors if x])


def columns_of_v(hardware: Hardware, q: Spec, k: Spec, v: Spec) -> tuple[int, int]:
    """Return (the columns of V of a program of `walk`, the fewest columns it may have)."""
    K, V, half = q.shape[-1], v.shape[-1], q.dtype != torch.float32
    BV, _, _ = tiles(WALK, hardware, q.dtype, K=K)
    # bf16 in tiles of 16 columns came out wrong in other kernels (Triton 3.6; lab/known.md)
    least = 32 if half else 16
    most = 32 if q.dtype == torch.float16 else BV  # float16's scaling takes registers
    # Triton does not prefetch rows that are not multiples of 16 bytes, so their tiles stay at one place in shared
    # memory. For products of 32 columns ptxas 12.8.93 (Triton 3.6) then makes descriptors from uniform registers that
    # no instruction has set, which tools/sass.py finds; for products of 64 columns it does not
    if half and hardware.family == "hopper" and K <= 128 and not all(describable(x, hardware) for x in (q, k, v)):
        least = most = BV = 64
    return min(BV, most, max(least, next_power_of_2(V))), least


def begin(draft: Draft, q, k, v, cu, scale, path, rows: int, most: int = 64) -> DeltaCall:
    """Begin a call whose plan is `draft`, with so many rows of factors and at most so many tokens in a chunk."""
    hardware, (B, T, heads, K), (H, V) = draft.hardware, q.shape, v.shape[2:]
    G, scale = H // heads, contract.check_scale(scale, K)
    cu, N, half = draft.contiguous(cu, torch.int32), sequences(B, cu), q.dtype != torch.float32
    C, BK = min(most, chunk_length(hardware, q)), max(64 if half else 16, next_power_of_2(K))
    _, warps, stages = tiles(WALK, hardware, q.dtype, K=K)
    BV, least = columns_of_v(hardware, q, k, v)
    programs, chunks = cdiv(V, BV) * H * N, cdiv(T, C)
    length, why = segment_length(hardware, path, programs, chunks, N if cu else None, choose_path_by_maps)
    draft.because(why)
    if length > chunks and 3 * programs < 2 * hardware.multiprocessors and BV > least:
        BV = least
        draft.because(f"{BV} columns a program, so that more multiprocessors work")
    # bfloat16 has the range for sums of products; float16 does not
    kept, chunks = q.dtype if q.dtype == torch.bfloat16 else torch.float32, slots(B, T, cu, C)
    P, Y = (draft.new(n, chunks, H, C, C, dtype=kept) for n in "PY")
    factors = draft.new("factors", chunks, H, rows, C)
    return DeltaCall(
        draft, cu, B, T, H, K, V, G, N, scale, False, kept, C, C * length, BK, BV, chunks, warps, stages,
        P, Y, factors,
    )


def solve_all(draft: Draft, q, k, v, g, beta, cu, scale, path) -> DeltaCall:
    """Begin a call whose plan is `draft`: solve all chunks."""
    call = begin(draft, q, k, v, cu, scale, path, ROWS)._replace(gated=g is not None)
    half = q.dtype != torch.float32
    # a multiprocessor has room for two programs of 224 registers per thread, or four of 128, which spill 32 bytes
    fewer = {"maxnreg": 128} if half and draft.hardware.family == "hopper" else {}
    call.launch(
        solve, call.H * call.chunks, q=q, k=k, g=g, beta=beta,
        **stride_patterns(q=q, k=k), **token_strides(g=g, b=beta),
        BK=min(64, call.BK), num_warps=4, num_stages=1, **fewer,
    )
    return call


def state_strides(S: Spec | None) -> tuple[int, ...] | None:
    """The strides of states [slots, H, K, W], with which `load_tile` loads a head's rows."""
    if S is None:
        return None
    _, H, K, W = S.shape
    return pattern(H * K * W, W, K * W, 1)


def launch_walk(
    call: DeltaCall, q, k, v, S_in: Spec | None, S_out: Spec | None, o: Spec | None = None,
    states: Spec | None = None, writes: Spec | None = None, maps: bool = False,
) -> None:
    """Launch `walk` over all segments; with `maps`, S_out gets each segment's map."""
    BK, BV, engine = call.BK, call.BV, call.by_engine(q, k, v)
    q = q if o else None
    s = stride_patterns(q=q, k=k, v=v, o=o, w=writes)
    q, k, v, o, k_til = boxes(engine, call.C, (q, BK), (k, BK), (v, BV), (o, BV), (call.k_til, BK))
    call.launch(
        walk, (cdiv(call.V, BV) + cdiv(call.K, BV) * maps) * call.H * call.segments,
        q=q, k=k, v=v, o=o, P=call.P if o else None, k_til=k_til, S_in=S_in, S_out=S_out, states=states, writes=writes,
        **s, s_in=state_strides(S_in), TMA=engine, GATED=call.gated, MAP=maps,
        num_warps=call.warps, num_stages=call.stages,
    )


class Walked(NamedTuple):
    """The results of `walks`; None if a result was not asked for."""

    o: Spec | None
    S: Spec | None  # the final state
    states: Spec | None  # the state before each chunk
    writes: Spec | None


def walks(call: DeltaCall, q, k, v, S_in: Spec | None, o="", S="", states="", writes="") -> Walked:
    """Make the results that are given a name: in one launch, or in three if sequences are cut into segments."""
    draft, V, K, H = call.draft, call.V, call.K, call.H
    S_T = draft.new(S or "S", call.N, H, K, V) if S or call.L <= call.T else None
    S_out = S_T
    if call.L <= call.T:
        part = draft.new("part", call.segments, H, K, V + K)
        launch_walk(call, q, k, v, None, part, maps=True)
        launch_carry_maps(draft, part, S_in, S_T, call.cu, call.T, call.L, reverse=False)
        S_in, S_out = part, None
    o = draft.new(o, *v.shape, dtype=v.dtype) if o else None
    states = draft.new(states, call.chunks, H, K, V, dtype=call.kept) if states else None
    writes = draft.new(writes, *v.shape, dtype=call.kept) if writes else None
    launch_walk(call, q, k, v, S_in, S_out, o, states, writes)
    return Walked(o, S_T, states, writes)


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, final state)."""
    draft, q, k, v = Draft(hardware, *call), call.q, call.k, call.v
    solved = solve_all(draft, q, k, v, call.g, call.beta, call.cu_seqlens, call.scale, call.path)
    walked = walks(solved, q, k, v, draft.contiguous(call.initial_state, torch.float32), o="o", S="S_T")
    return draft.plan("portable", walked.o, walked.S)
