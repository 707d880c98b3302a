"""The plan of a call over ranks: which exchange, how many bytes, and why (chapter 24)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import FORMS
from .. import _contract as contract
from ..book.scaling import H200, Wire, gather_seconds, pipeline_seconds
from ..mechanisms import MECHANISMS
from .maps import Tokens

# by the backend of the group: NVLink as in the model of `scaling`, and a CPU's loop-back as orders of magnitude
LINKS = {"nccl": H200.near, "gloo": Wire(message=1.5e-4, hop=1.5e-4, bandwidth=1e9)}
WORTH = 0.75  # a pipeline may take this share of an all-gather's time


class Plan(NamedTuple):
    """The steps of a call on every rank; `why` has a sentence for each choice."""

    walk: str  # the form of the mechanism that walks the pieces
    exchange: str  # "all-gather" or "pipeline"
    blocks: int  # a pipeline sends heads in so many blocks, one after the other
    segments: tuple[int, ...]  # the number of segments on each rank; a GPU walks them at once
    composed: bool  # whether a rank composes its maps into one before an all-gather
    shapes: tuple[tuple[int, ...], ...]  # shapes of the tensors of a segment's map, X last
    bytes: int  # sent by a rank, forward or backward
    why: tuple[str, ...]

    def __str__(self) -> str:
        how = f"{self.exchange}, {self.bytes:,} bytes a rank and direction; pieces walked by {self.walk}"
        return "\n".join([how, *(f"  {reason}" for reason in self.why)])


def plan(
    mechanism: str,
    tokens: Tokens,
    lengths: Sequence[int],
    *,
    packed: bool = False,
    exchange: str | None = None,
    segment: int | None = None,
    link: Wire = LINKS["nccl"],
    multiprocessors: int = 0,
) -> Plan:
    """Plan a call: a pure function, which asks no process group and looks at no value.

    Args:
        mechanism: a mechanism, such as "gla".
        tokens: one rank's tensors by name, on any device ("meta" too).
        lengths: the number of tokens on each rank.
        packed: whether there is `cu_seqlens`.
        exchange: as in :func:`gla`.
        segment: as in :func:`gla`.
        link: the cost of sending.
        multiprocessors: the number on each rank's GPU; 0 for a CPU.

    Returns:
        The plan; when printed, it gives the reason for each choice.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    kind = MECHANISMS[mechanism]
    sizes = contract.check_tensors(tokens, kind.arguments, kind.multiples)
    if exchange not in (None, "all-gather", "pipeline"):
        raise ValueError(f"exchange: expected all-gather, pipeline or None, got {exchange!r}")
    if segment is not None:
        contract.check_chunk(segment=segment)
    dtype = contract.compute_dtype(*tokens.values())
    itemsize = dtype.itemsize
    N, K, V = sizes["B"], sizes["K"], sizes["V"]
    H = sizes.get("HV", sizes["H"])
    shapes = map_shapes(mechanism, N, H, K, V, columns=tokens.get("g_v") is not None)
    if segment:
        segments = tuple(max(1, -(-n // segment)) for n in lengths)
    else:
        segments = tuple(1 if packed else side_by_side(n, N * H * -(-V // 128), multiprocessors) for n in lengths)
    ranks, state = len(lengths), itemsize * math.prod(shapes[-1])
    maps = (max(segments) if segment else 1) * itemsize * sum(map(math.prod, shapes))
    ideal = math.sqrt(max(0, ranks - 2) * state / (link.bandwidth * link.message))
    blocks = min(H, max(1, round(ideal)))
    gather, pipe = gather_seconds(link, ranks, maps), pipeline_seconds(link, ranks, state, blocks)
    why = [
        f"{ranks} ranks, by the model of the link: all-gather of maps of {maps:,} bytes in {1e6 * gather:.0f} µs, "
        f"pipeline of {state:,} bytes of states, in {blocks} blocks of heads, in {1e6 * pipe:.0f} µs"
    ]
    if exchange:
        why.append(f"{exchange}: it was asked for")
    else:
        exchange = "pipeline" if pipe < WORTH * gather else "all-gather"
        why.append(f"{exchange}: in a pipeline each rank waits for the one before it, so it must save a quarter")
    walk, because = choose_walk(mechanism, dtype, on_gpu=multiprocessors > 0)
    why.append(f"{walk}: {because}")
    if segment:
        why.append(f"segments of {segment} tokens were asked for: every number of ranks gives the same bits")
    elif max(segments) > 1:
        why.append(
            f"{max(segments)} segments a rank, side by side: one does not fill {multiprocessors} multiprocessors"
        )
    numbers = blocks + state // itemsize if exchange == "pipeline" else 1 + maps // itemsize  # including the tags
    return Plan(walk, exchange, blocks, segments, not segment, shapes, numbers * itemsize, tuple(why))


def choose_walk(mechanism: str, dtype: torch.dtype, on_gpu: bool) -> tuple[str, str]:
    """The form that walks the pieces, and why."""
    if not on_gpu:
        return "chunkwise", "no GPU"
    if dtype == torch.float64 or "triton" not in FORMS[mechanism]:
        return "chunkwise", f"there is no kernel for {dtype}"
    return "triton", "a GPU"


def map_shapes(mechanism: str, N: int, H: int, K: int, V: int, columns: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors of a segment's map, M and then X; `columns`: there are gates on values."""
    rows = {"linear_attention": 1, "simple_gla": 1, "gla": K}.get(mechanism)
    M = ((N, H, K, K),) if rows is None else ((N, H, rows, 1), (N, H, 1, V))[: 1 + columns]
    return *M, (N, H, K, V)


def side_by_side(tokens: int, programs: int, multiprocessors: int) -> int:
    """Return the number of equal segments, each of at least 512 tokens, whose programs fill a GPU.

    A program of the kernels has up to 128 columns of a state. So many segments leave no reason for the kernels to cut
    a segment again.
    """
    most = min(multiprocessors // programs, tokens // 512)
    return next((n for n in range(most, 1, -1) if tokens % n == 0), 1)
