"""Linear attention and its scalar-gated kin (simple GLA) in chunks: FlashLinearAttention, both ways (chapter 6).

    o = scale * (e^b * (q S) + (q k^T * E) v)        E_ij = e^(b_i - b_j) for j <= i, else 0
    S <- e^(b_C) S + k^T (e^(b_C - b) * v)           b the running sum of g in the chunk (0 without gates)

References: :mod:`gla_ref.linear_attention`, :mod:`gla_ref.simple_gla`; GLA paper, section 3 and algorithms 1 and 2.

`walk` is the only kernel that multiplies: a program holds BV columns of one head's state on chip and walks over a
segment of the sequence, chunk by chunk. What a segment is makes the three paths:

    fused         segment = sequence         grid V tiles * H * sequences; no memory beyond o and S
    segmented     a few segments a sequence  for few heads: their states alone, `carry`, then all from their true start
    materialised  segment = chunk            one walk stores the state before each chunk, then every output at once

Backward: dq reads S^T, dk and dv read dS = R in the same way, so each is one more walk:

    dq = walk(do, v, k)     dk = walk backwards(v, do, q)     dv = walk backwards(k, q, do)

States are rebuilt, none is saved; only `gate_gradient` (:mod:`gla_ref.gla_backward`) has them stored before each chunk.
A program moves 2 C (2 K + BV) bytes in and 2 C BV out a chunk (bf16), for 2 C (C (K + BV) + 2 K BV) FLOPs; q and k of
neighbouring V tiles come from L2. Limits: K <= 256, V <= 512; float32 (ieee products), float16, bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import _contract as contract
from ._launch import check_launch, check_packed

__all__ = ["choose_path", "linear_attention", "simple_gla"]

# K up to: (C, BV, warps, stages); benchmarks/LAB.md says what else was tried. 512 serves dq and dk, whose keys are
# values. Gates leave their programs waiting for sums, so two must share a multiprocessor: fewer stages.
HALF = {64: (64, 64, 4, 3), 128: (64, 128, 4, 3), 256: (64, 64, 4, 1), 512: (64, 64, 8, 1)}
GATED = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 64, 4, 1), 512: (64, 64, 8, 1)}
FLOAT32 = {64: (32, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 32, 4, 1), 512: (16, 16, 4, 1)}
PATHS = ("fused", "segmented", "materialised")


@triton.jit
def load_tile(
    x, s, i_b, i_h, o_t, end, o_d, D, C: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):
    """Rows o_t ... of x[i_b, :, i_h, o_d:] as [C, BD]; zero from row `end` and column D on."""
    if TMA:  # the copy engine: no addresses to compute, and it knows where the tensor ends
        b = x.load([i_b, i_h, o_t, o_d]).reshape(C, BD)
    else:
        o_r, o_c = o_t + tl.arange(0, C), o_d + tl.arange(0, BD)
        p = x + i_b.to(tl.int64) * s[0] + i_h.to(tl.int64) * s[2]
        p += o_r[:, None].to(tl.int64) * s[1] + o_c[None, :] * s[3]
        b = tl.load(p, mask=(o_r < end)[:, None] & (o_c < D)[None, :], other=0.0)
    return b


@triton.jit
def load_gates(g, s, i_b, i_h, o_t, end, C: tl.constexpr):
    o_r = o_t + tl.arange(0, C)
    p = g + i_b.to(tl.int64) * s[0] + o_r.to(tl.int64) * s[1] + i_h.to(tl.int64) * s[2]
    return tl.load(p, mask=o_r < end, other=0.0)  # [C]


@triton.jit
def running_sums(b_g):
    """Running sums of a chunk's gates in base 2, as two float32 numbers each: (coarse, fine, their totals).

    exp2 of a difference needs what lies between two tokens; the difference of plain float32 sums has
    lost it after a strong gate. The coarse part, multiples of 1/512 up to 64 * 150, sums exactly, the
    fine part is below 1/16. A gate below -150 (-104 nats, -inf) is 0 in float32 and becomes -150.
    """
    b_g = b_g.to(tl.float32) * 1.4426950408889634  # [C]
    b_g = tl.maximum(b_g, -150.0, propagate_nan=tl.PropagateNan.ALL)
    b_coarse = tl.floor(b_g * 512 + 0.5) / 512
    b_fine = b_g - b_coarse
    return tl.cumsum(b_coarse), tl.cumsum(b_fine), tl.sum(b_coarse), tl.sum(b_fine)


@triton.jit
def between(b_coarse, b_fine):
    """exp2's argument for the decay from token j (column) to token i (row): [C, C]."""
    return (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])


@triton.jit
def which_segment(cu, i_s, N, T, L, PACKED: tl.constexpr):
    """(sequence, batch row, the sequence's start and stop, the segment's start) of slot i_s.

    Packed, sequence n owns the slots from cu[n] // L + n on: at least as many as it has segments, and
    the host need not know any length. Spare slots begin at or after the stop.
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


@triton.jit
def walk(
    q, k, v, g, o, S_in, S_out, states, decay, cu, s_q, s_k, s_v, s_g, s_o, N, T, L, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    # which tile: V tiles of a head are neighbours and share q and k in L2
    n_v = tl.cdiv(V, BV)
    i_v, i_h = tl.program_id(0) % n_v, tl.program_id(0) // n_v % H
    i_s = tl.program_id(0) // n_v // H
    i_n, i_b, start, stop, begin = which_segment(cu, i_s, N, T, L, PACKED)
    end = tl.minimum(begin + L, stop)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_S = o_k[:, None] * V + o_v[None, :]  # [BK, BV]
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_c = tl.arange(0, C)
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
    for i_c in tl.range(0, n_c):
        o_t = begin + (n_c - 1 - i_c if REVERSE else i_c) * C
        b_k = load_tile(k, s_k, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, end, i_v * BV, V, C, BV, TMA)  # [C, BV]
        b_low = b_S.to(b_v.dtype)  # operands are in the inputs' precision, sums in float32
        if g is not None:
            b_g = load_gates(g, s_g, i_b, i_h, o_t, end, C)  # [C]
            b_coarse, b_fine, coarse, fine = running_sums(b_g)
            b_from = tl.exp2(b_coarse + b_fine)  # [C], since the chunk began
            b_to = tl.exp2((coarse - b_coarse) + (fine - b_fine))  # [C], until it ends
        if states is not None:
            i_t = (start // C + i_n if PACKED else i_n * tl.cdiv(T, C)) + (o_t - start) // C
            p_t = states + (i_t * H + i_h).to(tl.int64) * K * V + o_S
            tl.store(p_t, b_low, mask=m_S)
        if o is not None:
            b_q = load_tile(q, s_q, i_b, i_h, o_t, end, 0, K, C, BK, TMA)  # [C, BK]
            b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
            b_o = tl.dot(b_q, b_low, input_precision="ieee")  # [C, BV]
            if g is not None:
                b_D = between(b_coarse, b_fine)
                # mask before exp2: above the diagonal it may overflow
                b_P *= tl.exp2(tl.where(m_P, -b_D if REVERSE else b_D, float("-inf")))
                b_o *= (b_to if REVERSE else b_from)[:, None]
            else:
                b_P = tl.where(m_P, b_P, 0.0)
            b_o = tl.dot(b_P.to(b_v.dtype), b_v, b_o, input_precision="ieee")
            # store
            b_o = (b_o * scale).to(b_v.dtype)
            if TMA and g is None:  # with gates the registers do not suffice
                o.store([i_b, i_h, o_t, i_v * BV], b_o.reshape(1, 1, C, BV))
            else:
                o_r = o_t + o_c
                p_o = o + i_b.to(tl.int64) * s_o[0] + i_h.to(tl.int64) * s_o[2]
                p_o += o_r[:, None].to(tl.int64) * s_o[1] + o_v[None, :] * s_o[3]
                tl.store(p_o, b_o, mask=(o_r < end)[:, None] & (o_v < V)[None, :])
        if g is not None:
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
def carry(
    part, decay, S_in, S_out, cu, N, T, L, H, D,
    BD: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds to the state (`part` [slots, H, D], D = K V) by the state that it starts from."""
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
        i_s = first + (n_s - 1 - i if REVERSE else i)
        p = part + (i_s * H + i_h).to(tl.int64) * D + o_d
        b_part = tl.load(p, mask=m_d, other=0.0)  # [BD]
        tl.store(p, b_S, mask=m_d)
        if decay is not None:
            b_S *= tl.load(decay + i_s * H + i_h)
        b_S += b_part

    # store
    tl.store(S_out + o_S, b_S, mask=m_d)


@triton.jit
def gate_gradient(
    q, k, v, do, g, states, dstates, dg, cu, s_q, s_k, s_v, s_do, s_g, s_dg, N, T, H, K, V, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dg of one chunk: every path across token t, write to read, state to read, write to state, state to state."""
    # which tile
    i_h, i_s = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b, start, stop, o_t = which_segment(cu, i_s, N, T, C, PACKED)
    if o_t >= stop:
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)

    # load
    b_q = load_tile(q, s_q, i_b, i_h, o_t, stop, 0, K, C, BK, False)  # [C, BK]
    b_k = load_tile(k, s_k, i_b, i_h, o_t, stop, 0, K, C, BK, False)  # [C, BK]
    b_g = load_gates(g, s_g, i_b, i_h, o_t, stop, C)
    b_coarse, b_fine, coarse, fine = running_sums(b_g)

    # compute
    b_P = tl.dot(b_q, b_k.T, input_precision="ieee")  # [C, C]
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    b_read, b_write = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    b_kept = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        o_S = (i_s * H + i_h).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
        m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
        b_v = load_tile(v, s_v, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_do = load_tile(do, s_do, i_b, i_h, o_t, stop, i_v * BV, V, C, BV, False)  # [C, BV]
        b_S = tl.load(states + o_S, mask=m_S, other=0.0)  # [BK, BV]
        b_R = tl.load(
            dstates + o_S, mask=m_S, other=0.0
        )  # [BK, BV], the gradient of the state after
        b_dP = tl.dot(b_do, b_v.T, b_dP, input_precision="ieee")
        b_read += tl.sum(tl.dot(b_q, b_S, input_precision="ieee") * b_do, 1)
        b_write += tl.sum(tl.dot(b_k, b_R, input_precision="ieee") * b_v, 1)
        b_kept += tl.sum(b_S.to(tl.float32) * b_R, 1)
    b_read *= tl.exp2(b_coarse + b_fine)
    b_write *= tl.exp2((coarse - b_coarse) + (fine - b_fine))
    kept = tl.sum(b_kept) * tl.exp2(coarse + fine)
    m_below = o_c[:, None] > o_c[None, :]  # without i = j, which crosses no gate
    b_A = b_P * b_dP * tl.exp2(tl.where(m_below, between(b_coarse, b_fine), float("-inf")))
    # a pair crosses t when j < t <= i; sums of what counts, never total minus rest
    b_row = tl.sum(b_A, 1) + b_read  # [C]
    b_col = tl.sum(b_A, 0)  # [C]
    m_from = o_c[:, None] >= o_c[None, :]  # row i at or after column t
    b_dg = tl.sum(tl.where(m_from, b_row[:, None], 0.0), 0) - tl.sum(
        tl.where(m_from, b_col[:, None], 0.0), 0
    )
    b_dg += tl.sum(tl.where(m_from, 0.0, b_write[:, None]), 0) + kept

    # store: nothing crosses g = -inf
    o_r = o_t + o_c
    b_dg = tl.where(b_g == float("-inf"), 0.0, b_dg * scale)
    p_dg = dg + i_b.to(tl.int64) * s_dg[0] + o_r.to(tl.int64) * s_dg[1] + i_h.to(tl.int64) * s_dg[2]
    tl.store(p_dg, b_dg.to(dg.dtype.element_ty), mask=o_r < stop)


def _describable(x: Tensor) -> bool:
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


def _describe(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """x [B, T, H, D] as boxes of `rows` tokens of one head; beyond the tensor they read zeros."""
    x = x.transpose(1, 2)
    # the stride of an axis of one element is never used but must be valid
    strides = [s if n > 1 else 8 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_path(programs: int, chunks: int, multiprocessors: int) -> tuple[str, int]:
    """(path, chunks a segment) for so many programs of so many chunks each.

    A sequence is walked in one go as long as that keeps two thirds of the chip busy. Below, it pays to read k
    and v twice, 1.5 times the bytes: cut into segments, one program for each multiprocessor, though not below
    8 chunks a segment, since each costs a state to memory. The measurements behind it: benchmarks/LAB.md.
    """
    if 3 * programs >= 2 * multiprocessors or chunks < 16:
        return "fused", chunks
    segments = max(1, multiprocessors // programs)
    length = max(8, triton.cdiv(chunks, segments))
    return ("segmented", length) if length < chunks else ("fused", chunks)


def _walk(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor | None, S_in: Tensor | None, cu: Tensor | None,
    scale: float, path: str | None, C: int | None = None, reverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state); without q the states before each chunk [slots, H, K, V] instead of o."""
    (B, T, H, K), V = k.shape, v.shape[-1]
    N = B if cu is None else len(cu) - 1
    half = k.dtype != torch.float32
    BK = max(64 if half else 16, triton.next_power_of_2(K))
    table = FLOAT32 if not half else HALF if g is None else GATED
    C_, BV, warps, stages = table[max(64, BK)]
    C = C or C_
    if not half:  # of bf16, 16 columns with gates come out wrong (Triton 3.6; benchmarks/LAB.md)
        BV = min(BV, max(16, triton.next_power_of_2(V)))
    TMA = cu is None and all(_describable(x) for x in (q, k, v) if x is not None)

    def slots(L: int) -> int:
        return T // L + N if cu is not None else B * triton.cdiv(T, L)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    def launch(L, q, o, S_in, S_out, states=None, decay=None):
        tiles = [(q, BK), (k, BK), (v, BV)]
        walk[(triton.cdiv(V, BV) * H * slots(L),)](
            *(_describe(x, C, w) if TMA and x is not None else x for x, w in tiles),
            g, _describe(o, C, BV) if TMA and g is None and o is not None else o, S_in, S_out, states, decay, cu,
            *(x if x is None else x.stride() for x in (q, k, v, g, o)), N, T, L, H, K, V, scale,
            C=C, BK=BK, BV=BV, TMA=TMA, PACKED=cu is not None, REVERSE=reverse,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    whole = (T // C + 1) * C  # longer than any sequence
    L, o, S = whole, None if q is None else new(B, T, H, V, dtype=v.dtype), new(N, H, K, V)
    programs = triton.cdiv(V, BV) * H * N
    auto, length = choose_path(programs, triton.cdiv(T, C), _multiprocessors(k.device))
    path = path or auto
    S_out = S
    if path == "segmented" or (q is None and auto == "segmented"):
        L = length * C if auto == "segmented" else triton.cdiv(triton.cdiv(T, C), 3) * C
        part = new(slots(L), H, K, V)
        decay = None if g is None else new(slots(L), H)
        launch(L, None, None, None, part, decay=decay)
        BD = min(1024, triton.next_power_of_2(K * V))
        carry[(triton.cdiv(K * V, BD) * H * N,)](
            part, decay, S_in, S, cu, N, T, L, H, K * V, BD=BD, PACKED=cu is not None, REVERSE=reverse
        )  # fmt: skip
        S_in, S_out = part, None
    if path == "materialised" or q is None:
        # an operand of one product each: stored in its precision, nothing is lost
        states = new(slots(C), H, K, V, dtype=k.dtype)
        launch(L, None, None, S_in, S_out, states=states)
        if q is None:
            return states, S
        launch(C, q, o, states, None)
    else:
        launch(L, q, o, S_in, S_out)
    return o, S


@torch.library.custom_op("gla_ref::linear_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor | None, cu: Tensor | None,
    scale: float, path: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _walk(q, k, v, g, None if S is None else S.contiguous(), cu, scale, path)


@_forward.register_fake
def _(q, k, v, g, S, cu, scale, path):
    N = q.shape[0] if cu is None else cu.shape[0] - 1
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    return o, q.new_empty(N, q.shape[2], q.shape[3], v.shape[-1], dtype=torch.float32)


@torch.library.custom_op("gla_ref::linear_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor | None, cu: Tensor | None,
    do: Tensor, dS: Tensor, scale: float, path: str | None, need_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if _describable(q) and not _describable(do):  # the gradient of a sum has strides of 0
        do = do.contiguous()
    if scale == 0:  # then o says nothing, the final state all the same
        do, scale = torch.zeros_like(do), 1.0
    # every walk multiplies what it reads by scale, which dS has no part in
    R, S = dS / scale, None if S is None else S.contiguous()
    S_T, R_T = (None if x is None else x.mT.contiguous() for x in (S, R))
    dq, _ = _walk(do, v, k, g, S_T, cu, scale, path)
    dk, _ = _walk(v, do, q, g, R_T, cu, scale, path, reverse=True)
    dv, dS = _walk(k, q, do, g, R, cu, scale, path, reverse=True)
    dg = torch.empty(0, device=q.device)
    if need_dg:
        dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
        (B, T, H, K), V = q.shape, v.shape[-1]
        BK = max(64, triton.next_power_of_2(K))
        C = 16 if q.dtype == torch.float32 else 64
        states, _ = _walk(None, k, v, g, S, cu, scale, path, C)
        dstates, _ = _walk(None, q, do, g, R, cu, scale, path, C, reverse=True)
        gate_gradient[(len(states) * H,)](
            q, k, v, do, g, states, dstates, dg, cu, *(x.stride() for x in (q, k, v, do, g, dg)),
            B if cu is None else len(cu) - 1, T, H, K, V, scale,
            C=C, BK=BK, BV=32, PACKED=cu is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv, dg, dS * scale


@_backward.register_fake
def _(q, k, v, g, S, cu, do, dS, scale, path, need_dg):
    dg = g.new_empty(g.shape) if need_dg else q.new_empty(0, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dg, torch.empty_like(dS)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.path = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, do, dS):
    q, k, v, g, S, cu = ctx.saved_tensors
    dq, dk, dv, dg, dS = _backward(
        q, k, v, g, S, cu, do, dS, ctx.scale, ctx.path, ctx.needs_input_grad[3]
    )
    return dq, dk, dv, None if g is None else dg, None if S is None else dS, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _check(q, k, v, g, S, cu_seqlens, path) -> None:
    gates = {} if g is None else {"g": g}
    tensors = {"q": q, "k": k, "v": v, **gates}
    sizes = contract.check_tensors(
        tensors, {"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": "B T H"}
    )
    check_launch(tensors)
    for name, axis, most in (("q", "K", 256), ("v", "V", 512)):
        if sizes[axis] > most:
            raise ValueError(f"{name}: expected {axis} of at most {most}, got {sizes[axis]}")
    check_packed(cu_seqlens, sizes["B"], sizes["T"], q.device)
    N = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
    if S is not None:
        contract.check_state("initial_state", S, sizes, N, v)
    if path is not None and path not in PATHS:
        raise ValueError(f"path: expected one of {', '.join(PATHS)} or None, got {path!r}")


def _attention(q, k, v, g, scale, initial_state, cu_seqlens, path):
    if not torch.compiler.is_compiling():  # under torch.compile shapes are PyTorch's to check
        _check(q, k, v, g, initial_state, cu_seqlens, path)
    S = initial_state if initial_state is None else initial_state.float()
    scale = contract.check_scale(scale, q.shape[-1])
    return _forward(q, k, v, g, S, cu_seqlens, scale, path)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    path: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one scalar gate a head and token, differentiable; right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 512.
        g: natural log gates `[B, T, H]`, in any of the three dtypes.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g, are looked at under GLA_REF_DEBUG=1 only.
        path: "fused", "segmented" or "materialised"; None chooses by :func:`choose_path`.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    return _attention(q, k, v, g, scale, initial_state, cu_seqlens, path)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    normalize: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """As :func:`simple_gla` without gates; `feature_map` and `normalize` as in :mod:`gla_ref.linear_attention`.

    The map runs outside the kernel, K counts its features, and the normaliser is one more value column.
    `initial_state` and the state returned are (S, z) when normalised.
    """
    if feature_map is not None:
        scale = contract.check_scale(scale, q.shape[-1])
        q, k = feature_map(q), feature_map(k)
    if not normalize:
        return _attention(q, k, v, None, scale, initial_state, cu_seqlens, path)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            got = type(initial_state).__name__
            raise TypeError(f"initial_state: expected (S, z) with normalize=True, got {got}")
        S, z = initial_state
        if S.shape[:-1] != z.shape:
            raise ValueError(
                f"initial_state: expected z of shape {list(S.shape[:-1])}, got {list(z.shape)}"
            )
        initial_state = torch.cat([S, z[..., None]], -1)
    v = F.pad(v, (0, 1), value=1.0)
    o, S = _attention(q, k, v, None, scale, initial_state, cu_seqlens, path)
    return o[..., :-1] / o[..., -1:], (S[..., :-1], S[..., -1])
