"""Linear attention and its scalar-gated kin (simple GLA) in chunks: FlashLinearAttention, both ways (chapters 7 and 8).

    o = scale * (e^b * (q S) + (q k^T * E) v)        E_ij = e^(b_i - b_j) for j <= i, else 0
    S <- e^(b_C) S + k^T (e^(b_C - b) * v)           b the running sum of g in the chunk (0 without gates)

References: :mod:`gla_ref.linear_attention`, :mod:`gla_ref.simple_gla`; GLA paper, section 3 and algorithms 1 and 2.

`walk` makes outputs: a program holds BV columns of one head's state on chip and walks over a segment of the
sequence, chunk by chunk. Three paths differ in the length of a segment:

    fused         segment = sequence         grid V tiles * H * sequences; no memory beyond o and S
    segmented     a few segments a sequence  for few heads: segments' states, `carry`, then outputs from true states
    materialised  segment = chunk            one walk stores the state before each chunk, then every output at once

Backward: dq reads S^T, dk and dv read dS = R in the same way, so each is one more walk:

    dq = walk(do, v, k)     dk = walk backwards(v, do, q)     dv = walk backwards(k, q, do)

In segments, the walk of dq starts from the states that the forward pass found, and those of dk and dv from the same R.
Narrow heads without gates need one walk for all three (`unwind`): the walk reverses the states from the returned S_T.
The forward pass saves no other state; for `gate_gradient` (scalar_gates.py) the walks of dq and dv store their states.
A chunk moves 2 C (2 K + BV) bytes in and 2 C BV out (bf16), for 2 C (C (K + BV) + 2 K BV) FLOPs; q and k of
neighbouring V tiles come from L2. Limits: K <= 256, V <= 512; float32 (ieee products), float16, bfloat16. Scores and
states may be beyond the range of float16, because operands are scaled; results may not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _contract as contract
from ..launch.hardware import Hardware, tiles
from ..launch.plan import Draft, Plan, Spec, boxes, cdiv, describable, next_power_of_2
from ._arguments import strides, token_strides
from .scalar_gates import chunk_length, gate_gradient, load_sums, log_decay, running_sums
from .segments import carry_states, choose_path, segment_length, sequences, slots, which_segment, which_sequence
from .tiles import STAY, VARYING, load_tile, operand, store_tile, which_tile

# by family and bits, K up to: (BV, warps, stages). Hopper's tiles were fastest; lab/linear_attention.md lists other
# tiles. The other classes' tiles are the largest that hardly spill, as tools/compile_kernels.py shows. K up to 512
# serves dq and dk, whose walks have values for keys
WALK = {
    ("hopper", 16): {64: (64, 4, 3), 128: (128, 4, 3), 256: (64, 4, 1), 512: (64, 8, 1)},
    ("hopper", 32): {64: (32, 4, 1), 128: (16, 4, 1), 256: (32, 4, 1), 512: (16, 4, 1)},
    ("ampere", 16): {64: (64, 4, 2), 128: (32, 4, 2), 256: (32, 8, 1), 512: (32, 8, 1)},
    ("ampere", 32): {64: (32, 8, 1), 128: (16, 8, 1), 256: (16, 8, 1), 512: (16, 16, 1)},
    ("turing", 16): {64: (32, 4, 1), 128: (16, 8, 1)},
    ("turing", 32): {64: (32, 4, 1), 128: (16, 8, 1)},
}
GATED = WALK | {
    ("hopper", 16): {64: (64, 4, 2), 128: (64, 4, 2), 256: (64, 4, 1), 512: (64, 8, 1)},
    ("hopper", 32): {64: (32, 4, 2), 128: (32, 8, 1), 256: (32, 4, 1), 512: (16, 4, 1)},
    ("ampere", 16): {64: (32, 4, 2), 128: (32, 8, 1), 256: (32, 8, 1), 512: (32, 8, 1)},
}
# K up to: (BV, warps, stages) of `gate_gradient`
GATE_GRADIENT = {
    ("hopper", 16): {256: (32, 4, 2)},
    ("hopper", 32): {256: (32, 4, 2)},
    ("ampere", 16): {128: (32, 4, 2), 256: (32, 8, 1)},
    ("ampere", 32): {256: (16, 8, 1)},
    ("turing", 16): {128: (16, 8, 1)},
    ("turing", 32): {128: (16, 8, 1)},
}
# warps and stages of `unwind`; on other classes it would spill
UNWIND = {("hopper", 16): (4, 3)}
UNWOUND = {torch.bfloat16: 8192, torch.float16: 2048}  # tokens


@triton.jit(do_not_specialize=VARYING)
def walk(
    q, k, v, o, sums, S_in, S_out, states, decay, cu, s_q, s_k, s_v, s_o, N, T, L, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):
    """Walk a segment of a head; o, `states` (before each chunk), S_out and the segment's `decay` may each be None."""
    # which tile
    i_v, i_h, i_s = which_tile(H, V, BV)
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    first = start // C + i_n if PACKED else i_n * tl.cdiv(T, C)  # chunk of the sequence
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    o_S = o_k[:, None] * V + o_v[None, :]  # [BK, BV]
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    m_P = o_c[:, None] <= o_c[None, :] if REVERSE else o_c[:, None] >= o_c[None, :]  # [C, C]

    # load
    if S_in is not None:
        p_S = S_in + (i_s * H + i_h).to(tl.int64) * K * V + o_S
        b_S = tl.load(p_S, mask=m_S, other=0.0).to(tl.float32)  # [BK, BV]
    else:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    b_all = 1.0  # decay of the whole segment

    # compute
    n_c = tl.cdiv(end - begin, C)
    for i_c in tl.range(0, n_c, disable_licm=STAY):
        o_t = begin + (n_c - 1 - i_c if REVERSE else i_c) * C
        i_t = first + (o_t - start) // C
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        b_low, of_S = operand(b_S, b_v.dtype)  # in the inputs' precision; sums are in float32
        if sums is not None:
            b_coarse, b_fine, coarse, fine = load_sums(sums, i_t, i_h, H, C)
            b_from = tl.exp2(b_coarse + b_fine)  # [C], since the chunk began
            b_to = tl.exp2((coarse - b_coarse) + (fine - b_fine))  # [C], until it ends
        if states is not None:
            p_t = states + (i_t * H + i_h).to(tl.int64) * K * V + o_S
            tl.store(p_t, b_S.to(states.dtype.element_ty), mask=m_S)
        if o is not None:
            b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
            b_o = tl.dot(b_q, b_low, input_precision="ieee") * of_S  # [C, BV]
            if sums is not None:
                b_D = log_decay(b_coarse, b_fine)
                # mask before exp2: above the diagonal it may overflow
                b_P *= tl.exp2(tl.where(m_P, -b_D if REVERSE else b_D, float("-inf")))
                b_o *= (b_to if REVERSE else b_from)[:, None]
            else:
                b_P = tl.where(m_P, b_P, 0.0)
            b_P, of_P = operand(b_P, b_v.dtype)
            b_o = tl.dot(b_P, b_v, b_o / of_P, input_precision="ieee") * of_P
            # store
            b_o = (b_o * scale).to(b_v.dtype)
            store_tile(o, b_o, s_o, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)
        if sums is not None:
            b_v = (b_v * (b_from if REVERSE else b_to)[:, None]).to(b_k.dtype)
            b_S *= tl.exp2(coarse + fine)
            b_all *= tl.exp2(coarse + fine)
        b_S = tl.dot(b_k.T, b_v, b_S, input_precision="ieee")

    # store
    if S_out is not None:
        tl.store(S_out + (i_s * H + i_h).to(tl.int64) * K * V + o_S, b_S, mask=m_S)
    if decay is not None:
        tl.store(decay + i_s * H + i_h, b_all, mask=i_v == 0)


@triton.jit
def attended(b_q, b_k, b_v, seen, b_S, of_S):
    """The queries' reads [C, BV] of a chunk's pairs (`seen`) and of a state in two parts: (q k^T * seen) v + q S."""
    b_P, of_P = operand(tl.where(seen, tl.dot(b_q, b_k.T, input_precision="ieee"), 0.0), b_v.dtype)  # [C, C]
    b_o = tl.dot(b_q, b_S, input_precision="ieee") * of_S
    return tl.dot(b_P, b_v, b_o / of_P, input_precision="ieee") * of_P


@triton.jit(do_not_specialize=VARYING)
def unwind(
    q, k, v, do, dq, dk, dv, S, R, dS, cu, s_q, s_k, s_v, s_do, s_dk, s_dv, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
):
    """Make dq, dk and dv of a head in one walk from the end, where S is known: S_(n-1) = S_n - k^T v as R grows."""
    # which tile: a sequence and head
    i_h, i_n = tl.program_id(0) % H, tl.program_id(0) // H
    i_b, start, end = which_sequence(cu, i_n, T, PACKED)
    o_k, o_v, o_c = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    o_S = tl.program_id(0).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]  # [BK, BV]
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    m_P = o_c[:, None] <= o_c[None, :]  # [C, C], column j: the write of token j

    # load: minus S, so that the loop adds products to it
    b_S = -tl.load(S + o_S, mask=m_S, other=0.0)  # [BK, BV]
    b_R = tl.zeros([BK, BV], dtype=tl.float32)
    if R is not None:  # scale multiplies all reads, but R has no such factor
        b_R = tl.load(R + o_S, mask=m_S, other=0.0) / scale

    # compute
    n_c = tl.cdiv(end - start, C)
    for i_c in tl.range(0, n_c):
        o_t = start + (n_c - 1 - i_c) * C
        b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, 0, V, C, BV, TMA)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, end, 0, V, C, BV, TMA)  # [C, BV]
        b_S = tl.dot(b_k.T, b_v, b_S, input_precision="ieee")  # minus the state before the chunk
        b_low, of_S = operand(-b_S, b_k.dtype)
        b_d = attended(b_do, b_v, b_k, m_P.T, b_low.T, of_S) * scale  # [C, BK]
        # store each result at once: three results and both states would not fit on chip
        store_tile(dq, b_d.to(b_k.dtype), s_dk, i_b, i_h, o_t, end, 0, K, C, BK, TMA)
        b_low, of_R = operand(b_R, b_k.dtype)
        b_d = attended(b_v, b_do, b_q, m_P, b_low.T, of_R) * scale  # [C, BK]; v do^T again: faster than a transpose
        store_tile(dk, b_d.to(b_k.dtype), s_dk, i_b, i_h, o_t, end, 0, K, C, BK, TMA)
        b_d = attended(b_k, b_q, b_do, m_P, b_low, of_R) * scale  # [C, BV]
        store_tile(dv, b_d.to(b_k.dtype), s_dv, i_b, i_h, o_t, end, 0, V, C, BV, TMA)
        b_R = tl.dot(b_q.T, b_do, b_R, input_precision="ieee")

    # store
    if dS is not None:
        tl.store(dS + o_S, b_R * scale, mask=m_S)


def _unwinds(hardware: Hardware, x: Spec, programs: int, path: str | None) -> bool:
    """Whether states may run backwards: there are enough heads, and early states keep their digits.

    A float32 sum in tensor cores loses up to 2^-23 of the state for every 16 tokens, forwards and backwards. With
    positive k and v, the worst case, this loss is as large as the rounding of a state of 64 tokens at the lengths in
    UNWOUND (lab/linear_attention.md).
    """
    T = x.shape[1]
    if (hardware.family, 8 * x.dtype.itemsize) not in UNWIND or T > UNWOUND[x.dtype]:
        return False
    chosen, _ = choose_path(programs, cdiv(T, 64), hardware.multiprocessors)
    return (path or chosen) == "fused"


def unwindable(call) -> bool:
    """Whether `_unwinds` may choose to run the returned state backwards; takes a call of tensors or of specs."""
    return call.g is None and call.q.dtype != torch.float32 and max(call.q.shape[-1], call.v.shape[-1]) <= 64


class Walk:
    """The sizes, tiles, gates and direction that launches of `walk` over the same keys and values share."""

    def __init__(
        self, draft: Draft, q: Spec | None, k: Spec, v: Spec, sums: Spec | None, cu: Spec | None, scale: float,
        reverse: bool,
    ):
        self.draft, self.k, self.v, self.sums, self.cu = draft, k, v, sums, cu
        self.scale, self.reverse = scale, reverse
        (self.B, self.T, self.H, self.K), self.V = k.shape, v.shape[-1]
        self.C, self.N = chunk_length(draft.hardware, k), sequences(self.B, cu)
        half = k.dtype != torch.float32
        self.BK = max(64 if half else 16, next_power_of_2(self.K))
        table = WALK if sums is None else GATED
        BV, self.warps, self.stages = tiles(table, draft.hardware, k.dtype, K=self.K)
        # tiles of 16 columns in bf16 with gates are wrong (Triton 3.6; lab/linear_attention.md)
        self.BV = BV if half else min(BV, max(16, next_power_of_2(self.V)))
        self.engine = cu is None and all(describable(x, draft.hardware) for x in (q, k, v) if x is not None)

    def segment(self, path: str | None) -> int:
        """Tokens of a segment; more than T without segments."""
        programs, packed = cdiv(self.V, self.BV) * self.H * self.N, self.N if self.cu else None
        chunks, why = segment_length(self.draft.hardware, path, programs, cdiv(self.T, self.C), packed)
        self.draft.because(why)
        return self.C * chunks

    def launch(self, L: int, q=None, o=None, S_in=None, S_out=None, states=None, decay=None) -> None:
        """Launch `walk` over segments of L tokens."""
        C, BK, BV, s = self.C, self.BK, self.BV, strides(q=q, k=self.k, v=self.v, o=o)
        q, k, v, o = boxes(self.engine, C, (q, BK), (self.k, BK), (self.v, BV), (o, BV))
        self.draft.launch(
            walk, cdiv(self.V, BV) * self.H * slots(self.B, self.T, self.cu, L),
            q=q, k=k, v=v, o=o, sums=self.sums, S_in=S_in, S_out=S_out, states=states, decay=decay, cu=self.cu, **s,
            N=self.N, T=self.T, L=L, H=self.H, K=self.K, V=self.V, scale=self.scale,
            C=C, BK=BK, BV=BV, TMA=self.engine, PACKED=self.cu is not None, REVERSE=self.reverse,
            num_warps=self.warps, num_stages=self.stages,
        )

    def states_of_segments(self, L: int, S_in: Spec | None, S_out: Spec) -> Spec:
        """Find the states that segments of L tokens start from; S_out gets the final states."""
        n, draft = slots(self.B, self.T, self.cu, L), self.draft
        starts = draft.new("starts", n, self.H, self.K, self.V)
        decay = None if self.sums is None else draft.new("decay", n, self.H)
        self.launch(L, S_out=starts, decay=decay)
        carry_states(draft, starts, decay, S_in, S_out, self.cu, self.T, L, self.reverse)
        return starts


class Walked(NamedTuple):
    """The results of `_walk`; None if a result was not asked for."""

    o: Spec
    S: Spec | None  # the final state
    states: Spec | None  # before each chunk; backwards, after each
    L: int  # tokens of a segment; more than T without segments
    starts: Spec | None  # the states that segments start from


def _walk(
    draft: Draft, q: Spec, k: Spec, v: Spec, sums: Spec | None, S_in: Spec | None, cu: Spec | None,
    scale: float, path: str | None, o: str, S: str = "", reverse: bool = False, keep: bool = False,
    starts: tuple[int, Spec | None] = (0, None),
) -> Walked:
    """Make the results that are given a name: o, the final state S; with `keep`, also the states of chunks.

    `starts` are (L, starts) of a walk with k and v for each other: if segments are as long, this one has no S.
    """
    x = Walk(draft, q, k, v, sums, cu, scale, reverse)
    L = x.segment(path)
    found = _turned(draft, starts[1]) if starts[0] == L else None
    S = S_out = draft.new(S or "S", x.N, x.H, x.K, x.V) if S or (L <= x.T and not found) else None
    if L <= x.T:  # in segments: find first the states that they start from
        found = S_in = found or x.states_of_segments(L, S_in, S)
        S_out = None
    states = None
    if keep or path == "materialised":
        # each state is an operand of one product, so the product's precision is enough; float16 has too small a range
        kept = k.dtype if k.dtype == torch.bfloat16 else torch.float32
        states = draft.new("states", slots(x.B, x.T, cu, x.C), x.H, x.K, x.V, dtype=kept)
    o = draft.new(o, x.B, x.T, x.H, x.V, dtype=v.dtype)
    if path == "materialised":
        x.launch(L, S_in=S_in, S_out=S_out, states=states)
        x.launch(x.C, q, o, S_in=states)
    else:
        x.launch(L, q, o, S_in, S_out, states)
    return Walked(o, S, states, L, found)


def add_up(draft: Draft, k: Spec, v: Spec, g: Spec | None, reverse: bool) -> Spec:
    """Find the final state [B, H, K, V] from zeros, without outputs."""
    sums = None if g is None else running_sums(draft, g, None, chunk_length(draft.hardware, k))
    x = Walk(draft, None, k, v, sums, None, 1.0, reverse)
    L, S = x.segment(None), draft.new("S", x.N, x.H, x.K, x.V)
    if L <= x.T:
        x.states_of_segments(L, None, S)
    else:
        x.launch(L, S_out=S)
    return S


def _unwind(
    draft: Draft, q: Spec, k: Spec, v: Spec, do: Spec, S: Spec, R: Spec | None, with_dS0: bool,
    cu: Spec | None, scale: float,
) -> tuple[Spec, Spec, Spec, Spec | None]:
    """Make (dq, dk, dv, dS0) from the final state S and its gradient R; dS0, the initial state's, only `with_dS0`."""
    (_, T, H, K), V, C = k.shape, v.shape[-1], chunk_length(draft.hardware, k)
    dq, dk, dv = (draft.like(f"d{x.name}", x) for x in (q, k, v))
    dS0 = draft.like("dS0", S) if with_dS0 else None
    tokens = {"q": q, "k": k, "v": v, "do": do, "dq": dq, "dk": dk, "dv": dv}
    engine = cu is None and all(describable(x, draft.hardware) for x in (q, k, v, do))
    draft.because("states run backwards: one walk makes dq, dk and dv")
    warps, stages = UNWIND[draft.hardware.family, 8 * k.dtype.itemsize]
    draft.launch(
        unwind, S.shape[0] * H,
        **dict(zip(tokens, boxes(engine, C, *((x, 64) for x in tokens.values())), strict=True)),
        S=S, R=R, dS=dS0, cu=cu, **strides(q=q, k=k, v=v, do=do, dk=dk, dv=dv), T=T, H=H, K=K, V=V, scale=scale,
        C=C, BK=64, BV=64, TMA=engine, PACKED=cu is not None, num_warps=warps, num_stages=stages,
    )
    return dq, dk, dv, dS0


def plan_forward(hardware: Hardware, call) -> Plan:
    """Plan (o, final state, the gates' sums, the states that segments start from)."""
    draft, q, v = Draft(hardware, *call), call.q, call.v
    tiles(WALK, hardware, q.dtype, K=q.shape[-1], V=v.shape[-1])  # in the backward pass V and K change places
    scale = contract.check_scale(call.scale, q.shape[-1])
    S, cu = draft.contiguous(call.initial_state, torch.float32), draft.contiguous(call.cu_seqlens, torch.int32)
    sums = None if call.g is None else running_sums(draft, call.g, cu, chunk_length(hardware, q))
    walked = _walk(draft, q, call.k, v, sums, S, cu, scale, call.path, "o", "S_T")
    return draft.plan("portable", walked.o, walked.S, sums, walked.starts)


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dS0); None for a tensor not given and a dg not needed. What is kept may be None."""
    draft, q, k, v, g = Draft(hardware, *call), call.q, call.k, call.v, call.g
    sums, path, need_dg = call.sums, call.path, call.need_dg
    tiles(WALK, hardware, q.dtype, K=q.shape[-1], V=v.shape[-1])
    C, scale = chunk_length(hardware, q), contract.check_scale(call.scale, q.shape[-1])
    S, cu = draft.contiguous(call.initial_state, torch.float32), draft.contiguous(call.cu_seqlens, torch.int32)
    dS = draft.contiguous(call.dS)
    do, scale = draft.gradient_of_o(q, call.do, scale)
    programs = q.shape[2] * sequences(q.shape[0], cu)
    if call.S_T is not None and _unwinds(hardware, q, programs, path):
        dq, dk, dv, dS0 = _unwind(draft, q, k, v, do, call.S_T, dS, S is not None, cu, scale)
        return draft.plan("portable", dq, dk, dv, None, dS0)
    # a walk multiplies all its reads by scale, but dS has no such factor
    R = draft.compute("R", torch.div, dS, scale)
    if g is not None and sums is None:
        sums = running_sums(draft, g, cu, C)
    # dg needs S^T before each chunk, from dq's walk, and R after each chunk, from dv's walk
    of_S = "R_0" if S else ""
    dv, R_0, dstates, L, Rs = _walk(draft, k, q, do, sums, R, cu, scale, path, "dv", of_S, reverse=True, keep=need_dg)
    dk = _walk(draft, v, do, q, sums, _turned(draft, R), cu, scale, path, "dk", reverse=True, starts=(L, Rs)).o
    S_, Ss = _turned(draft, S), (L, call.starts)  # the forward pass had segments as long
    dq, _, states, *_ = _walk(draft, do, v, k, sums, S_, cu, scale, path, "dq", keep=need_dg, starts=Ss)
    dS0, dg = draft.compute("dS0", torch.mul, R_0 if S else None, scale), None
    if need_dg:
        dg = draft.like("dg", g)
        (B, T, H, K), V = q.shape, v.shape[-1]
        BV, warps, stages = tiles(GATE_GRADIENT, hardware, q.dtype, K=K)
        draft.launch(
            gate_gradient, states.shape[0] * H,
            q=q, k=k, v=v, do=do, g=g, sums=sums, states=states, dstates=dstates, dg=dg, cu=cu,
            **strides(q=q, k=k, v=v, do=do), **token_strides(g=g, d=dg), N=sequences(B, cu), T=T, H=H, K=K, V=V,
            scale=scale, C=C, BK=max(64, next_power_of_2(K)), BV=BV,
            PACKED=cu is not None, num_warps=warps, num_stages=stages,
        )
    return draft.plan("portable", dq, dk, dv, dg, dS0)


def _turned(draft: Draft, x: Spec | None) -> Spec | None:
    """States x transposed."""
    return x and draft.compute(f"{x.name}^T", _turn, x, shape=x.transposed(2, 3).shape)


def _turn(x: Tensor) -> Tensor:
    return x.mT.contiguous()
