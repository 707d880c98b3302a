"""The segment of a program, and the states between segments (chapter 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.hardware import Hardware
from ..launch.plan import Draft, Spec, cdiv, next_power_of_2
from .tiles import VARYING, which_tile


@triton.jit
def which_sequence(cu, i_n, T, PACKED: tl.constexpr):
    """(batch row, start, stop) of sequence i_n."""
    if PACKED:
        return i_n * 0, tl.load(cu + i_n).to(tl.int32), tl.load(cu + i_n + 1).to(tl.int32)
    else:
        return i_n, i_n * 0, i_n * 0 + T


@triton.jit
def which_segment(cu, i_s, N, T, L, PACKED: tl.constexpr):
    """(sequence, batch row, the sequence's start and stop, the segment's start) of slot i_s; with L = C, of chunks.

    If sequences are packed, sequence n owns the slots from cu[n] // L + n up to, not including, cu[n + 1] // L + n + 1:
    a slot for each segment, and sometimes a spare slot. So the host need not know any length. A spare slot begins at or
    after the sequence's stop.
    """
    if PACKED:
        i_n = i_s * 0 - 1
        for o in range(0, N, 256):
            o_n = o + tl.arange(0, 256)
            b_cu = tl.load(cu + o_n, mask=o_n < N, other=0).to(tl.int32)
            i_n += tl.sum(((b_cu // L + o_n <= i_s) & (o_n < N)).to(tl.int32))
        i_b, start, stop = which_sequence(cu, i_n, T, PACKED)
        return i_n, i_b, start, stop, start + (i_s - start // L - i_n) * L
    else:
        n_s = tl.cdiv(T, L)
        return i_s // n_s, i_s // n_s, i_s * 0, i_s * 0 + T, i_s % n_s * L


@triton.jit(do_not_specialize=VARYING)
def carry(
    part, rows, S_in, S_out, cu, N, T, L, H, R, D, BD: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):
    """Replace each segment's addition to the state (`part` [slots, H, D]) by the state that the segment starts from.

    A segment's decays are `rows` [slots, H, R], each for D / R numbers in a row.
    """
    # which tile: BD numbers of the state of a head
    i_d, i_h, i_n = which_tile(H, D, BD)
    o_d = i_d * BD + tl.arange(0, BD)
    _, start, stop = which_sequence(cu, i_n, T, PACKED)
    first = start // L + i_n if PACKED else i_n * tl.cdiv(T, L)
    n_s = tl.cdiv(stop - start, L)

    # load
    o_S, m_d = (i_n * H + i_h).to(tl.int64) * D + o_d, o_d < D
    b_S = tl.zeros([BD], dtype=tl.float32)
    if S_in is not None:
        b_S += tl.load(S_in + o_S, mask=m_d, other=0.0)

    # compute
    for i in range(0, n_s):
        i_s = ((first + (n_s - 1 - i if REVERSE else i)) * H + i_h).to(tl.int64)
        p = part + i_s * D + o_d
        b_part = tl.load(p, mask=m_d, other=0.0)  # [BD]
        tl.store(p, b_S, mask=m_d)
        if rows is not None:
            b_S *= tl.load(rows + i_s * R + o_d // (D // R), mask=m_d, other=0.0)
        b_S += b_part

    # store
    tl.store(S_out + o_S, b_S, mask=m_d)


def carry_states(
    draft: Draft, part: Spec, rows: Spec | None, S_in: Spec | None, S_out: Spec, cu: Spec | None, T: int, L: int,
    reverse: bool,
) -> None:
    """Launch `carry` over segments of L tokens; S_out [N, H, K, V] gets the state after each sequence."""
    N, H, K, V = S_out.shape
    BD = min(1024, next_power_of_2(K * V))
    R = K if rows is None or len(rows.shape) == 3 else 1
    draft.launch(
        carry, cdiv(K * V, BD) * H * N,
        part=part, rows=rows, S_in=S_in, S_out=S_out, cu=cu, N=N, T=T, L=L, H=H, R=R, D=K * V,
        BD=BD, PACKED=cu is not None, REVERSE=reverse,
    )


def sequences(B: int, cu: Spec | None) -> int:
    return B if cu is None else cu.shape[0] - 1


def slots(B: int, T: int, cu: Spec | None, L: int) -> int:
    """The number of slots of `which_segment`."""
    return B * cdiv(T, L) if cu is None else T // L + sequences(B, cu)


def choose_path(programs: int, chunks: int, multiprocessors: int, packed: int | None = None) -> tuple[str, int]:
    """Return the path and the chunks per segment.

    programs: walks that can run at the same time. chunks: chunks of each text; of all texts together, if `packed`
    texts share a row.

    Cut each text if every walk can get two multiprocessors or more: segments read k and v twice, 1.5 times the bytes,
    but two multiprocessors move bytes twice as fast as one. Otherwise walk each text in one go. Packed texts share
    segments by length, and these can fill the chip: cut packed texts if their walks fill less than two thirds of it.
    A segment has at least 8 chunks, because each segment costs a state to memory. lab/linear_attention.md has the
    measurements.
    """
    if 3 * programs >= 2 * multiprocessors or chunks < 16:
        return "fused", chunks
    segments = max(1, multiprocessors * (packed or 1) // programs)
    length = max(8, cdiv(chunks, segments))
    return ("segmented", length) if length < chunks else ("fused", chunks)


def segment_length(
    hardware: Hardware, path: str | None, programs: int, chunks: int, packed: int | None, choose=choose_path
) -> tuple[int, str]:
    """Return (chunks of a segment on the path, by default that of `choose`, why); without segments, one too many."""
    chosen, length = choose(programs, chunks, hardware.multiprocessors, packed)
    who = "it was asked for" if path else f"{programs} programs for {hardware}"
    if (path or chosen) != "segmented":
        return chunks + 1, f"each sequence in one go: {who}"
    length = length if chosen == "segmented" else cdiv(chunks, 3)  # asked for: three segments
    return length, f"each sequence in segments of {length} of its {chunks} chunks: {who}"
