"""The plan of a call over ranks: which exchange, how many bytes, and why (chapter 25)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _contract as contract
from ..mechanisms import MECHANISMS
from .links import LINKS, Wire, gather_seconds, pipeline_seconds
from .maps import Tokens

# axes of a map's M: a column that scales the rows of a state, or a matrix; 1: one number for all of them
MAPS = {
    "linear_attention": "B HV 1 1",
    "simple_gla": "B HV 1 1",
    "gla": "B HV K 1",
    "delta_rule": "B HV K K",
    "gated_delta_rule": "B HV K K",
    "kda": "B HV K K",
}
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
        mechanism: a function of :mod:`gla_ref.context_parallel`, by its name.
        tokens: one rank's tensors by name, on any device ("meta" too).
        lengths: the number of tokens on each rank.
        packed: whether there is `cu_seqlens`.
        exchange: as in :func:`gla_ref.context_parallel.gla`.
        segment: as in :func:`gla_ref.context_parallel.gla`.
        link: the cost of sending.
        multiprocessors: the number on each rank's GPU; 0 for a CPU.

    Returns:
        The plan; when printed, it gives the reason for each choice.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    if mechanism not in MAPS:
        raise ValueError(f"mechanism: expected one of {', '.join(MAPS)}, got {mechanism!r}")
    if exchange not in (None, "all-gather", "pipeline"):
        raise ValueError(f"exchange: expected all-gather, pipeline or None, got {exchange!r}")
    if segment is not None:
        contract.check_chunk(segment=segment)
    kind = MECHANISMS[mechanism]
    sizes = contract.check_tensors(tokens, kind.arguments, kind.multiples)
    dtype = contract.compute_dtype(*tokens.values())
    shapes = map_shapes(mechanism, sizes, columns=tokens.get("g_v") is not None)
    state, whole = (dtype.itemsize * n for n in (math.prod(shapes[-1]), sum(map(math.prod, shapes))))
    segments, why_segments = choose_segments(lengths, shapes[-1], segment, packed, multiprocessors)
    maps = whole * (max(segments) if segment else 1)
    exchange, blocks, why = choose_exchange(link, len(lengths), maps, state, shapes[-1][1], exchange)
    walk, why_walk = choose_walk(dtype, on_gpu=multiprocessors > 0)
    sent = state + blocks * dtype.itemsize if exchange == "pipeline" else maps + dtype.itemsize  # a tag per message
    why += f"{walk}: {why_walk}", *why_segments
    return Plan(walk, exchange, blocks, segments, not segment, shapes, sent, tuple(why))


def map_shapes(mechanism: str, sizes: dict[str, int], columns: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors of a segment's map, M and then X; `columns`: there are gates on values."""
    sizes = {"HV": sizes["H"], "1": 1} | sizes
    every = [MAPS[mechanism], *["B HV 1 V"] * columns, "B HV K V"]
    return tuple(tuple(sizes[axis] for axis in axes.split()) for axes in every)


def choose_segments(
    lengths: Sequence[int], state: tuple[int, ...], segment: int | None, packed: bool, multiprocessors: int
) -> tuple[tuple[int, ...], list[str]]:
    """The number of segments on each rank, and why; `state` is the shape of all heads' states."""
    if segment:
        why = f"segments of {segment} tokens were asked for: every number of ranks gives the same bits"
        return tuple(max(1, -(-n // segment)) for n in lengths), [why]
    B, H, _, V = state
    segments = tuple(1 if packed else side_by_side(n, B * H * -(-V // 128), multiprocessors) for n in lengths)
    most = max(segments)
    why = f"{most} segments a rank, side by side: one does not fill {multiprocessors} multiprocessors"
    return segments, [why] if most > 1 else []


def choose_exchange(
    link: Wire, ranks: int, maps: int, state: int, heads: int, asked: str | None
) -> tuple[str, int, list[str]]:
    """The exchange, the number of blocks of heads that a pipeline sends, and why; `maps` and `state` are bytes."""
    ideal = math.sqrt(max(0, ranks - 2) * state / (link.bandwidth * link.message))
    blocks = min(heads, max(1, round(ideal)))
    gather, pipe = gather_seconds(link, ranks, maps), pipeline_seconds(link, ranks, state, blocks)
    times = (
        f"{ranks} ranks, by the model of the link: all-gather of maps of {maps:,} bytes in {1e6 * gather:.0f} µs, "
        f"pipeline of {state:,} bytes of states, in {blocks} blocks of heads, in {1e6 * pipe:.0f} µs"
    )
    if asked:
        return asked, blocks, [times, f"{asked}: it was asked for"]
    exchange = "pipeline" if pipe < WORTH * gather else "all-gather"
    why = f"{exchange}: in a pipeline each rank waits for the one before it, so it must save a quarter"
    return exchange, blocks, [times, why]


def choose_walk(dtype: torch.dtype, on_gpu: bool) -> tuple[str, str]:
    """The form that walks the pieces, and why."""
    if not on_gpu:
        return "chunkwise", "no GPU"
    if dtype == torch.float64:
        return "chunkwise", f"there is no kernel for {dtype}"
    return "triton", "a GPU"


def check_lengths(
    lengths: Sequence[int] | None, ranks: int, rank: int, T: int, name: str, least: int = 0, why: str = ""
) -> tuple[int, ...]:
    """The number of tokens of each of so many ranks, if this rank's tensor `name` has T of them.

    A rank may not have fewer than `least`; `why` is the reason, for the message.

    Raises:
        TypeError, ValueError: the lengths do not fit.
    """
    if not isinstance(lengths, Sequence | None):
        raise TypeError(f"lengths: expected a sequence of token counts or None, got {type(lengths).__name__}")
    counts = (T,) * ranks if lengths is None else tuple(lengths)
    if len(counts) != ranks or not all(isinstance(n, int) and n >= least for n in counts) or sum(counts) == 0:
        limit = f" of at least {least}{why}" if least else ""
        raise ValueError(f"lengths: expected {ranks} token counts{limit}, one per rank, got {list(counts)}")
    if counts[rank] != T:
        raise ValueError(f"lengths: expected {T} for rank {rank}, the length of {name}, got {counts[rank]}")
    return counts


def side_by_side(tokens: int, programs: int, multiprocessors: int) -> int:
    """Return the number of equal segments, each of at least 512 tokens, whose programs fill a GPU.

    A program of the kernels has up to 128 columns of a state. So many segments leave no reason for the kernels to cut
    a segment again.
    """
    most = min(multiprocessors // programs, tokens // 512)
    return next((n for n in range(most, 1, -1) if tokens % n == 0), 1)
