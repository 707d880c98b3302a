"""Many GPUs: one sequence, its tokens split over the ranks of a process group (chapter 23).

A piece of a sequence does two things to the state that comes into it: it keeps some of it and adds to it.

    S_right = M S_left + X          M, X from k, v and the gates of the piece alone
    R_left  = M^T R_right + A       R the gradient of S; A from q, do and the gates of the piece alone

For gated linear attention M is the decay of the whole piece, diag(e^b): K numbers a head (for a scalar gate one, for
no gate the number 1). For the delta rules it is a matrix K x K, which is what the rule makes of the identity. These
maps compose, so that a call takes three steps, and its gradient the same three from right to left:

    1. each rank finds the map of its own piece, with a state of zeros
    2. one exchange tells each rank the state that comes into its piece (R: the gradient of the state that goes out)
    3. each rank walks its own piece from there, as if there were no other

What crosses a border between ranks is a state of K V numbers a head, however long the pieces are. Step 3 is the
mechanism's own differentiable function. `Enter` before it exchanges states on the way forward and nothing on the way
back; `Leave` after it exchanges nothing on the way forward and gradients of states on the way back.

Sequences packed with `cu_seqlens` need no other algebra: only the sequence that lies across a border sends its state
over it. To the map of a piece all other tokens are zeros, and a token of zeros neither writes, reads nor forgets.

PyTorch's compiler is loaded with this module, so that the package does not import it by itself.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import _contract as contract
from ._agreement import Agreement
from .chunks import decayed, heads_first
from .gates import decay_from_start, decay_to_end
from .mechanisms import MECHANISMS
from .scaling import H200, Wire, gather_seconds, pipeline_seconds

__all__ = ["LINKS", "Plan", "delta_rule", "gated_delta_rule", "gla", "linear_attention", "plan", "simple_gla"]

Tokens = dict[str, Tensor]

# 1. The algebra: maps of pieces.


class Map(NamedTuple):
    """What a piece does to a state that crosses it, S -> M S + X; axis 1 of every tensor is heads.

    M is a product of decays [N, H, K or 1, 1] and [N, H, 1, V], or one matrix [N, H, K, K].
    """

    M: tuple[Tensor, ...]
    X: Tensor  # [N, H, K, V]

    def keep(self, S: Tensor) -> Tensor:
        """M S."""
        (first, *more) = self.M
        if first.shape[-1] > 1:
            return first @ S
        S = first * S
        for m in more:
            S = m * S
        return S

    def __call__(self, S: Tensor) -> Tensor:
        return self.keep(S) + self.X

    def then(self, later: Map) -> Map:
        """This map and after it another one, as one."""
        if self.M[0].shape[-1] > 1:
            M = (later.M[0] @ self.M[0],)
        else:
            M = tuple(y * x for x, y in zip(self.M, later.M, strict=True))
        return Map(M, later(self.X))

    def starting(self, here: bool | Tensor, S: Tensor | None) -> Map:
        """The same if the sequence does not start `here`; else the map to M S + X, whatever comes in."""
        X = self.X if S is None else self.X + self.keep(S)
        return Map(tuple(only(not here if isinstance(here, bool) else ~here, m) for m in self.M), X)


def only(where: bool | Tensor, x: Tensor) -> Tensor:
    """x where it is so, zeros elsewhere; `where` is for all rows of x [N, ...], or one for each."""
    if isinstance(where, bool):
        return x if where else torch.zeros_like(x)
    return torch.where(where.view(-1, *[1] * (x.ndim - 1)), x, 0)


def decays(x: Tokens, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the gates of a piece leave of a state: M of gated linear attention."""
    g, g_v = x.get("g"), x.get("g_v")
    B, _, H, _ = x["q"].shape
    rows = x["q"].new_ones(B, H, dtype=dtype) if g is None else g.sum(1, dtype=dtype).exp()  # [B H], or [B H K]
    rows = rows[..., None] if rows.ndim == 2 else rows
    return (rows[..., None],) if g_v is None else (rows[..., None], g_v.sum(1, dtype=dtype).exp()[..., None, :])


def write_map(call: Call, x: Tokens) -> Map:
    """How a piece carries a state from left to right: of k, v and gates. No exponent is above 0."""
    if "beta" in x:
        V = x["v"].shape[-1]
        _, S = of_identity(call, x | {"q": x["k"]}, x["v"])
        return Map((S[..., V:],), S[..., :V])
    M = decays(x, call.dtype)
    if call.has_kernel(x):
        from .kernels.gla_border import added

        return Map(M, added(x["k"], x["v"], x["g"]))
    k, v, g, g_v = call.heads_first(x, "k", "v", "g", "g_v")
    return Map(M, decayed(k, g, decay_to_end).mT @ decayed(v, g_v, decay_to_end))


def read_map(call: Call, x: Tokens, do: Tensor) -> Map:
    """How a piece carries the gradient of a state from right to left: of q, do, gates (and k, of the delta rules)."""
    if "beta" in x:
        reads, M = of_identity(call, x, x["v"][..., :0])  # what token t reads of each row of the state: [B T HV K]
        return Map((M.mT,), heads_first(reads).mT @ heads_first(do.to(call.dtype)))
    M = decays(x, call.dtype)
    if call.has_kernel(x):
        from .kernels.gla_border import added

        return Map(M, call.scale * added(x["q"], do, x["g"], backwards=True))
    q, do, g, g_v = call.heads_first(x | {"do": do}, "q", "do", "g", "g_v")
    return Map(M, decayed(call.scale * q, g, decay_from_start).mT @ decayed(do, g_v, decay_from_start))


def of_identity(call: Call, x: Tokens, v: Tensor) -> tuple[Tensor, Tensor]:
    """What a delta rule makes of values v next to K columns without values, which start from the identity.

    It drives a state column by column, so that these columns end as M of S -> M S + X.
    """
    x, v = {name: y.to(call.dtype) for name, y in x.items()}, v.to(call.dtype)
    (B, _, HV, V), K = v.shape, x["k"].shape[-1]
    S = F.pad(torch.eye(K, dtype=v.dtype, device=v.device), (V, 0)).expand(B, HV, K, V + K)
    return call.walk(**x | {"v": F.pad(v, (0, K))}, scale=call.scale, initial_state=S)


# 2. Where a rank's tokens are among all tokens.


class Segment:
    """Tokens a to e of all: which sequences begin or end here, and which cross a border.

    Of sequences packed by `cu` [N + 1], `left` and `right` are the places [1] of those that hold the tokens before a
    and before e. Without `cu` there are B sequences, and all of them cross every border. Nothing waits for a GPU.
    """

    def __init__(self, a: int, e: int, first: bool, final: bool, total: int, cu: Tensor | None):
        self.enters = a > 0 if cu is not None else not first
        if cu is None:
            self.cu = self.of_left = self.of_right = None
            self.left = self.right = slice(None)
            self.begins = self.starts = first
            self.ends = self.stops = final
            self.crosses = not final
            return
        self.left, self.right = ((cu < x).sum().sub(1).clamp(min=0).view(1) for x in (a, e))
        self.crosses = cu[self.right + 1] > e
        # of the sequence at the right border, does it start in here? of the one at the left, does it stop?
        another = self.left != self.right
        self.starts, self.stops = another | (a == 0), another | (e == total)
        here, stop = torch.arange(a, e, device=cu.device), math.inf if final else e
        self.of_right, self.of_left = here >= cu[self.right], here < cu[self.left + 1]  # [T]
        # of every sequence; an empty one begins and ends where the next token is
        self.begins = (cu[:-1] >= a) & (cu[:-1] < stop)
        last = torch.maximum(cu[1:] - 1, cu[:-1])
        self.ends = (last >= a) & (last < stop)
        self.cu = (cu - a).clamp(0, e - a)
        if a == e:
            self.cu[-1] = 1  # the token of zeros that stands for none


def added(S: Tensor, rows: slice | Tensor, x: Tensor) -> Tensor:
    """S with x added to some of its rows."""
    S = S.clone()
    S[rows] += x
    return S


def neutral(x: Tokens, keep: Tensor | None) -> Tokens:
    """Tokens [B, T, ...], zeros but where `keep` [T]; a token of zeros neither writes, reads nor forgets."""
    if keep is None or len(keep) == 0:
        return x
    return {name: torch.where(keep.view(1, -1, *[1] * (y.ndim - 2)), y, 0) for name, y in x.items()}


def some(x: Tensor) -> Tensor:
    """x [B, T, ...]; one token of zeros if it has none."""
    return x if x.shape[1] else torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)


# 3. The plan: which exchange, and why.


# by the backend of the group: NVLink as the model of `scaling` has it, and orders of magnitude of a CPU's loop-back
LINKS = {"nccl": H200.near, "gloo": Wire(message=1.5e-4, hop=1.5e-4, bandwidth=1e9)}


class Plan(NamedTuple):
    """What a call does on every rank; `why` has a sentence for each choice."""

    walk: str  # the form of the mechanism that walks the pieces
    exchange: str  # "all-gather" or "pipeline"
    blocks: int  # of heads, which a pipeline sends one after the other
    segments: tuple[int, ...]  # of each rank, walked side by side on a GPU
    composed: bool  # a rank's maps into one, before an all-gather
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of a segment's map, X last
    bytes: int  # that a rank sends, forward or backward
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
    """What a call would do; pure: it asks no process group, and looks at no value.

    Args:
        mechanism: such as "gla".
        tokens: its tensors by name, as one rank has them, on any device ("meta" too).
        lengths: how many tokens each rank has.
        packed: whether there is `cu_seqlens`.
        exchange: as in :func:`gla`.
        segment: as in :func:`gla`.
        link: what sending costs.
        multiprocessors: of each rank's GPU; 0 for a CPU.

    Returns:
        The plan; printed, it says why.

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
    rows = {"linear_attention": 1, "simple_gla": 1, "gla": K}
    decays = [(N, H, rows.get(mechanism, K), 1)]
    if mechanism not in rows:
        decays = [(N, H, K, K)]
    elif tokens.get("g_v") is not None:
        decays.append((N, H, 1, V))
    shapes = (*decays, (N, H, K, V))
    if segment:
        segments = tuple(max(1, -(-n // segment)) for n in lengths)
    else:
        segments = tuple(1 if packed else side_by_side(n, N * H * -(-V // 64), multiprocessors) for n in lengths)
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
    exchange = exchange or ("pipeline" if pipe < gather else "all-gather")
    from . import FORMS  # which imports this module

    if not multiprocessors:
        walk, because = "chunkwise", "no GPU"
    elif dtype == torch.float64 or "triton" not in FORMS[mechanism]:
        walk, because = "chunkwise", f"there is no kernel for {dtype}"
    else:
        walk, because = "triton", "a GPU"
    why.append(f"{walk}: {because}")
    if segment:
        why.append(f"segments of {segment} tokens were asked for: every number of ranks gives the same bits")
    elif max(segments) > 1:
        why.append(
            f"{max(segments)} segments a rank, side by side: one does not fill {multiprocessors} multiprocessors"
        )
    numbers = blocks + state // itemsize if exchange == "pipeline" else 1 + maps // itemsize  # with the tags
    return Plan(walk, exchange, blocks, segments, not segment, shapes, numbers * itemsize, tuple(why))


def side_by_side(tokens: int, programs: int, multiprocessors: int) -> int:
    """Into how many equal segments to cut a piece, of at least 512 tokens, so that its programs fill a GPU."""
    most = min(multiprocessors // programs, tokens // 512)
    return next((n for n in range(most, 1, -1) if tokens % n == 0), 1)


# 4. The exchange.


class Ranks:
    """A process group, the plans of this rank's calls, and the facts that all ranks have agreed upon."""

    known: dict[dist.ProcessGroup, Ranks] = {}

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.agreement, self.plans, self.agreed = Agreement(group), {}, set()

    @staticmethod
    def of(group: dist.ProcessGroup | dist.DeviceMesh | None) -> Ranks:
        if group is None:
            group = dist.group.WORLD
        elif isinstance(group, dist.DeviceMesh):
            group = group.get_group()  # of a mesh with one dimension
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a process group that has this rank, or a DeviceMesh, got {group!r}")
        if group not in Ranks.known:
            Ranks.known[group] = Ranks(group)
        return Ranks.known[group]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return found

    def receive(self, x: Tensor, rank: int) -> None:
        dist.recv(x, dist.get_global_rank(self.group, rank), group=self.group)

    def send(self, x: Tensor, rank: int) -> dist.Work:
        return dist.isend(x, dist.get_global_rank(self.group, rank), group=self.group)


class Call:
    """One call on this rank: its plan, its segments, and what is still on its way to another rank."""

    def __init__(self, ranks: Ranks, plan: Plan, facts: dict[str, str], lengths, segment, cu, scale, dtype):
        self.ranks, self.plan, self.facts, self.scale, self.dtype = ranks, plan, facts, scale, dtype
        boundaries = [] if cu is None or cu.is_cuda else cu.tolist()
        self.tag = float(zlib.crc32(repr((facts, boundaries)).encode()) % 2**24)  # which float32 holds exactly
        from . import FORMS

        self.walk = FORMS[facts["mechanism"]][plan.walk]
        a, total, r = sum(lengths[: ranks.rank]), sum(lengths), ranks.rank
        self.tokens, n = lengths[r], plan.segments[r]
        step = segment or self.tokens // n
        borders = [(i * step, min(self.tokens, (i + 1) * step)) for i in range(n)]
        self.segments = [
            Segment(a + i, a + j, r == m == 0, r == ranks.size - 1 and m == n - 1, total, cu)
            for m, (i, j) in enumerate(borders)
        ]
        self.sent: list[tuple[dist.Work, Tensor]] = []
        # so many segments are walked side by side, as rows of a batch: all of them, or one after the other
        self.rows = n if plan.composed else 1
        self.batches = [(0, self.tokens)] if plan.composed else borders

    def cut(self, x: Tensor) -> list[Tensor]:
        """x [B, T, ...] by batches, [B * rows, T / rows, ...]; one token of zeros in place of none."""
        parts = [some(x[:, i:j]) for i, j in self.batches]
        return [y.unflatten(1, (self.rows, -1)).flatten(0, 1) for y in parts]

    def batches_of(self, names: tuple[str, ...], tokens: Sequence[Tensor], backwards: bool) -> Iterator[Tokens]:
        """Each batch's tokens by name; zeros for those whose sequence is not the one that leaves the segment."""
        for i, own in enumerate(self.segments[:: self.rows]):
            x = dict(zip(names, tokens[i * len(names) : (i + 1) * len(names)], strict=True))
            yield neutral(x, own.of_left if backwards else own.of_right)

    def apart(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Rows [B * rows, ...] of each batch as one tensor [B, ...] for each segment."""
        return [x for batch in batches for x in batch.unflatten(0, (-1, self.rows)).unbind(1)]

    def together(self, segments: list[Tensor]) -> list[Tensor]:
        """The inverse of `apart`."""
        batches = (segments[i : i + self.rows] for i in range(0, len(segments), self.rows))
        return [torch.stack(batch, 1).flatten(0, 1) for batch in batches]

    def maps(self, found: list[Map]) -> list[Map]:
        """The map of each segment, of those of the batches."""
        parts = [self.apart(x) for x in zip(*((*m.M, m.X) for m in found), strict=True)]
        return [Map(tuple(M), X) for *M, X in zip(*parts, strict=True)]

    def has_kernel(self, x: Tokens) -> bool:
        """Whether a kernel adds up what a piece writes or reads; where none does, PyTorch's products do."""
        return self.plan.walk == "triton" and x.get("g_v") is None and "g" in x and x["g"].ndim == 4

    def heads_first(self, x: Tokens, *names: str) -> list[Tensor | None]:
        """[B, H, T, D] in the precision of states; None for what is not given."""
        found = (x.get(name) for name in names)
        found = (y if y is None or y.ndim == 4 else y[..., None] for y in found)  # gates of heads
        return [None if y is None else heads_first(y.to(self.dtype)) for y in found]

    def exchange(self, maps: list[Map], backwards: bool = False) -> list[Tensor]:
        """The state that comes into each segment (backwards: from the right) by the maps of all segments."""
        if self.ranks.size == 1:
            return run(maps, torch.zeros_like(maps[0].X), backwards)[0]
        return (self.pipelined if self.plan.exchange == "pipeline" else self.gathered)(maps, backwards)

    def gathered(self, maps: list[Map], backwards: bool) -> list[Tensor]:
        """All maps to every rank, which composes those before its own."""
        ranks, sizes = self.ranks, [math.prod(shape) for shape in self.plan.shapes]
        ours, counts = maps, self.plan.segments
        if self.plan.composed:
            ours, counts = [functools.reduce(Map.then, reversed(maps) if backwards else maps)], (1,) * ranks.size
        numbers = torch.cat([maps[0].X.new_full((1,), self.tag), *(y.flatten() for m in ours for y in (*m.M, m.X))])
        numbers = F.pad(numbers, (0, 1 + max(counts) * sum(sizes) - len(numbers)))
        with self.waiting_for([r for r in range(ranks.size) if r != ranks.rank]):
            found = ranks.all_gather(numbers)
        S = torch.zeros_like(maps[0].X)
        for r in range(ranks.size - 1, ranks.rank, -1) if backwards else range(ranks.rank):
            theirs = []
            for one in found[r][1:].split(sum(sizes))[: counts[r]]:
                *M, X = (y.view(shape) for y, shape in zip(one.split(sizes), self.plan.shapes, strict=True))
                theirs.append(Map(tuple(M), X))
            _, S = run(theirs, S, backwards)
        return run(maps, self.checked(S, found), backwards)[0]

    def pipelined(self, maps: list[Map], backwards: bool) -> list[Tensor]:
        """The state from rank to rank, block of heads after block of heads; what is sent is on its way as we walk."""
        ranks, found = self.ranks, []
        before, after = (ranks.rank + 1, ranks.rank - 1) if backwards else (ranks.rank - 1, ranks.rank + 1)
        blocks = [[y.tensor_split(self.plan.blocks, 1) for y in (*m.M, m.X)] for m in maps]
        for b in range(self.plan.blocks):
            part = [Map(tuple(y[b] for y in M), X[b]) for *M, X in blocks]
            S = torch.zeros_like(part[0].X)
            if 0 <= before < ranks.size:
                numbers = S.new_empty(1 + S.numel())
                with self.waiting_for([before]):
                    ranks.receive(numbers, before)
                S = self.checked(numbers[1:].view_as(S), {before: numbers})
            entries, S = run(part, S, backwards)
            found.append(entries)
            if 0 <= after < ranks.size:
                numbers = torch.cat([S.new_full((1,), self.tag), S.flatten()])
                self.sent.append((ranks.send(numbers, after), numbers))
        return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]

    def arrived(self) -> None:
        """Wait until what was sent has gone out."""
        while self.sent:
            work, _ = self.sent.pop()
            with self.waiting_for([r for r in range(self.ranks.size) if r != self.ranks.rank]):
                work.wait()

    def checked(self, S: Tensor, messages: list[Tensor] | dict[int, Tensor]) -> Tensor:
        """S, if every message is of this very call.

        A rank may have fallen out of step among calls that were agreed upon before. A GPU, which nobody waits for
        here, then gets NaN.
        """
        messages = dict(messages if isinstance(messages, dict) else enumerate(messages))
        if S.is_cuda:
            return torch.where(torch.stack([x[0] for x in messages.values()]).eq(self.tag).all(), S, math.nan)
        for rank, x in messages.items():
            if x[0] != self.tag:
                why = (
                    f"rank {rank} makes another call than rank {self.ranks.rank}, or has other cu_seqlens; "
                    "GLA_REF_DEBUG=1 says which argument differs"
                )
                self.ranks.agreement.give_up(why)
                raise ValueError(why)
        return S

    @contextmanager
    def waiting_for(self, ranks: list[int]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.ranks.agreement.lost(error, self.facts, ranks) from error


def run(maps: list[Map], S: Tensor, backwards: bool) -> tuple[list[Tensor], Tensor]:
    """The states that come into each of these segments, one after the other, and the one that leaves the last."""
    found = []
    for m in reversed(maps) if backwards else maps:
        found.append(S)
        S = m(S)
    return found[::-1] if backwards else found, S


# 5. The two borders of the walk, as autograd sees them.


class Enter(torch.autograd.Function):
    """(call, names, initial state or None, batches of tokens) -> the states that each batch starts from."""

    @staticmethod
    def forward(ctx, call: Call, names: tuple[str, ...], initial: Tensor | None, *tokens: Tensor):
        ctx.call, ctx.dtype = call, None if initial is None else initial.dtype
        found = call.maps([write_map(call, x) for x in call.batches_of(names, tokens, backwards=False)])
        begun = [None if initial is None else only(own.begins, initial.to(call.dtype)) for own in call.segments]
        maps = [
            m.starting(own.starts, None if S is None else S[own.right])
            for m, own, S in zip(found, call.segments, begun, strict=True)
        ]
        starts = []
        for own, first, S in zip(call.segments, begun, call.exchange(maps), strict=True):
            if first is None:
                first = S.new_zeros(S.shape[0] if own.cu is None else len(own.cu) - 1, *S.shape[1:])
            starts.append(added(first, own.left, S) if own.enters else first)
        return tuple(call.together(starts))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dS: Tensor):
        ctx.call.arrived()
        d_initial = None
        if ctx.dtype is not None:
            rows = zip(ctx.call.segments, ctx.call.apart(dS), strict=True)
            d_initial = sum(only(own.begins, x) for own, x in rows).to(ctx.dtype)
        return None, None, d_initial, *[None] * (len(ctx.needs_input_grad) - 3)


class Leave(torch.autograd.Function):
    """(call, names, o and states of each batch, batches of tokens) -> o and the states of sequences that end here."""

    @staticmethod
    def forward(ctx, call: Call, names: tuple[str, ...], *tensors: Tensor):
        call.arrived()
        n = len(call.batches)
        o, S, tokens = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(*tokens)
        state = sum(only(own.ends, x) for own, x in zip(call.segments, call.apart(S), strict=True))
        o = [x.unflatten(0, (-1, call.rows)).flatten(1, 2) for x in o]  # [B T HV V]
        return torch.cat(o, 1)[:, : call.tokens], state

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor, d_state: Tensor):
        call, do, tokens = ctx.call, ctx.call.cut(do), ctx.saved_tensors  # which a checkpoint hands out once
        found = call.batches_of(ctx.names, tokens, backwards=True)
        found = call.maps([read_map(call, x, do_n) for x, do_n in zip(found, do, strict=True)])
        dS = [only(own.ends, d_state) for own in call.segments]
        maps = [m.starting(own.stops, x[own.left]) for m, own, x in zip(found, call.segments, dS, strict=True)]
        entries = zip(dS, call.segments, call.exchange(maps, backwards=True), strict=True)
        dS = call.together([added(x, own.right, only(own.crosses, R)) for x, own, R in entries])
        return None, None, *do, *dS, *[None] * len(tokens)


@torch.compiler.disable  # which stops at this call and goes on behind it
def split_over_ranks(
    mechanism: str, tokens: dict[str, Tensor | None], initial_state: Tensor | None, cu_seqlens: Tensor | None, group,
    scale, lengths, exchange, segment,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What all functions of this module do."""
    ranks = Ranks.of(group)
    call = agreed(ranks, mechanism, tokens, initial_state, cu_seqlens, scale, lengths, exchange, segment)
    cut = {name: call.cut(x) for name, x in tokens.items() if x is not None}
    flat = [x[i] for i in range(len(call.batches)) for x in cut.values()]
    starts = Enter.apply(call, tuple(cut), initial_state, *flat)
    o, S = [], []
    for i, own in enumerate(call.segments[:: call.rows]):
        here = {name: x[i] for name, x in cut.items()}
        o_i, S_i = call.walk(**here, scale=call.scale, initial_state=starts[i], cu_seqlens=own.cu)
        o.append(o_i)
        S.append(S_i)
    return Leave.apply(call, tuple(cut), *o, *S, *flat)


# 6. What every rank is asked before it takes part.


def agreed(ranks: Ranks, mechanism, tokens, initial_state, cu, scale, lengths, exchange, segment) -> Call:
    """A call that fits and that all ranks make.

    What fits is asked once for each signature that this rank has seen; whether the others do the same, once for each
    set of facts: what all ranks have in common, so that all of them ask at the same call.
    """
    given = {name: x for name, x in tokens.items() if x is not None}
    states = *given.values(), *([] if initial_state is None else [initial_state])
    gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in states)
    debug = os.environ.get("GLA_REF_DEBUG") == "1"
    try:
        for name, x in (*given.items(), ("cu_seqlens", cu), ("initial_state", initial_state)):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        key = (
            mechanism,
            *((name, x.shape, x.dtype, x.device) for name, x in given.items()),
            None if cu is None else (cu.shape, cu.dtype),
            None if initial_state is None else (initial_state.shape, initial_state.dtype, initial_state.device),
            lengths if lengths is None else tuple(lengths), scale, exchange, segment, gradients,
        )  # fmt: skip
        found = ranks.plans.get(key)
        if found is None:
            found = planned(ranks, mechanism, given, lengths, scale, initial_state, cu, exchange, segment, gradients)
        plan, facts, lengths, scale, dtype = found
        if cu is not None and (debug or not cu.is_cuda):
            facts = facts | {"cu_seqlens": f"{contract.check_cu_seqlens(cu, 1, sum(lengths))}"}
    except (TypeError, ValueError) as error:
        ranks.agreement.refuse(error)
        raise
    common = tuple(found[1].values())
    if debug or common not in ranks.agreed:
        ranks.agreement.reach(facts)
        ranks.agreed.add(common)
    ranks.plans[key] = found
    return Call(ranks, plan, found[1], lengths, segment, cu, scale, dtype)


def planned(ranks: Ranks, mechanism, given, lengths, scale, initial_state, cu, exchange, segment, gradients) -> tuple:
    """(plan, facts, lengths, scale, dtype of states) of a call of a new kind.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    kind, R = MECHANISMS[mechanism], ranks.size
    missing = [name for name in kind.required if name not in given]
    if missing:
        raise TypeError(f"{missing[0]}: expected a torch.Tensor, got None")
    one = {name: some(x) if x.ndim > 1 else x for name, x in given.items()}
    sizes = contract.check_tensors(one, kind.arguments, kind.multiples)
    (T, device), B = (given["q"].shape[1], given["q"].device), sizes["B"]
    for name, x in given.items():
        if x.shape[1] != T:
            raise ValueError(f"{name}: expected {T} tokens as in q, got {x.shape[1]}")
    lengths = (T,) * R if lengths is None else tuple(lengths)
    if len(lengths) != R or not all(isinstance(n, int) and n >= 0 for n in lengths) or sum(lengths) == 0:
        raise ValueError(f"lengths: expected {R} numbers of tokens, one for each rank, got {list(lengths)}")
    if lengths[ranks.rank] != T:
        raise ValueError(f"lengths: expected {T} for rank {ranks.rank}, as q has tokens, got {lengths[ranks.rank]}")
    scale, dtype = contract.check_scale(scale, sizes["K"]), contract.compute_dtype(*given.values())
    contract.check_cu_seqlens(cu, B, sum(lengths), values=False)
    if cu is not None and cu.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu.device}")
    if initial_state is not None:
        N = B if cu is None else len(cu) - 1
        contract.check_state("initial_state", initial_state, contract.state_shape(kind, sizes, N), device)
    link = LINKS.get(dist.get_backend(ranks.group), LINKS["gloo"])
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    chosen = plan(
        mechanism, one, lengths, packed=cu is not None, exchange=exchange, segment=segment, link=link,
        multiprocessors=processors,
    )  # fmt: skip
    facts = {"mechanism": mechanism}
    for argument in kind.arguments:
        x = given.get(argument.name)
        if x is not None:
            shape = ", ".join("T" if axis == 1 else f"{n}" for axis, n in enumerate(x.shape))
        facts[argument.name] = "None" if x is None else f"[{shape}] {x.dtype} on {x.device.type}"
    facts["cu_seqlens"] = "None" if cu is None else f"{list(cu.shape)} {cu.dtype}"
    facts |= {"lengths": f"{list(lengths)}", "scale": f"{scale}", "exchange": f"{exchange}", "segment": f"{segment}"}
    facts["requires_grad"] = f"{gradients}"
    return chosen, facts, lengths, scale, dtype


# 7. What one calls.


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
    exchange: str | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated Linear Attention of a sequence whose tokens are split over ranks, in their order; differentiable.

    Every rank of the group makes the same call, and every rank runs the gradient through its o, also where its own
    loss does not ask for it. On a CPU the chunkwise reference walks the pieces, on a GPU the kernels do.

    Args:
        q: queries of this rank's tokens, `[B, T, H, K]`; T may be 0.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: natural log gates on the key axis, `[B, T, H, K]` in [-inf, 0].
        g_v: natural log gates on the value axis, `[B, T, H, V]`, or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None; read on the first rank. Of packed sequences each rank reads
            the rows of those whose first token it has.
        cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed sequences (B = 1) among the tokens of all ranks,
            the same on every rank. On a GPU their values are looked at under GLA_REF_DEBUG=1 only.
        group: the ranks, or a mesh of one dimension (`mesh["cp"]`); None for all.
        lengths: how many tokens each rank has; None if all have as many as this one.
        exchange: "all-gather" or "pipeline"; None chooses by :func:`plan`, which says why.
        segment: split every piece into segments of so many tokens. Results then are the same to the last bit for
            every number of ranks whose borders are borders of segments; None for one segment a rank.

    Returns:
        o `[B, T, H, V]` of this rank's tokens, and the final state `[N_seq, H, K, V]`, at least float32, on the last
        rank. Of packed sequences each rank has the rows of those whose last token it has. All else is zeros, so that
        the sum over ranks is the state of every sequence.

    Raises:
        TypeError, ValueError: an argument does not fit, here or on another rank, or ranks differ in one; the message
            names the argument and the ranks. Asked once for each kind of call, under GLA_REF_DEBUG=1 every time.
        RuntimeError: a rank died or hangs, found within the time limit of the group; the message names the rank.
    """
    tokens = {"q": q, "k": k, "v": v, "g": g, "g_v": g_v}
    return split_over_ranks("gla", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def simple_gla(
    q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, with one gate a head and token: g `[B, T, H]`."""
    tokens = {"q": q, "k": k, "v": v, "g": g}
    return split_over_ranks("simple_gla", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def linear_attention(
    q, k, v, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, without gates. A feature map is the caller's; a normaliser is one more column of v, of ones."""
    tokens, name = {"q": q, "k": k, "v": v}, "linear_attention"
    return split_over_ranks(name, tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def delta_rule(
    q, k, v, beta, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, with write strengths beta `[B, T, HV]` for gates; v and states have HV heads, a multiple of H."""
    tokens = {"q": q, "k": k, "v": v, "beta": beta}
    return split_over_ranks("delta_rule", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def gated_delta_rule(
    q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`delta_rule`, with one gate a value head and token: g `[B, T, HV]`."""
    tokens, name = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, "gated_delta_rule"
    return split_over_ranks(name, tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)
