"""A call over ranks: its steps, forward and backward, and the ranks' agreement before them (chapter 25).

`Enter` exchanges states on the way forward and nothing on the way back. Then each rank walks its own piece by the
mechanism's own differentiable function. `Leave` exchanges nothing on the way forward and gradients of states on the
way back.

This module loads PyTorch's compiler, so the package does not import this module by itself.
"""

import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from .. import FORMS
from .. import _contract as contract
from ..mechanisms import MECHANISMS
from .exchange import Exchange, Ranks
from .links import LINKS
from .maps import Maps, Tokens, Walk, read_map, write_map
from .planning import Plan, check_lengths, plan
from .segments import Edge, Segment, at_least_one_token, only_tokens, with_own_state, zero_elsewhere


class Given(NamedTuple):
    """The arguments of a call on this rank, before they are checked."""

    mechanism: str
    tokens: dict[str, Tensor]  # by name, those that are not None
    initial_state: Tensor | None
    cu: Tensor | None
    scale: float | None
    lengths: Sequence[int] | None
    exchange: str | None
    segment: int | None  # tokens
    gradients: bool  # whether a gradient will be asked for

    def check_types(self) -> None:
        """Raise a TypeError that names the first argument which should be a tensor and is none."""
        for name, x in (*self.tokens.items(), ("cu_seqlens", self.cu), ("initial_state", self.initial_state)):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")

    def signature(self) -> tuple:
        """Equal for calls of one kind."""
        cu, S = self.cu, self.initial_state
        return (
            self.mechanism,
            *((name, x.shape, x.dtype, x.device) for name, x in self.tokens.items()),
            None if cu is None else (cu.shape, cu.dtype),
            None if S is None else (S.shape, S.dtype, S.device),
            tuple(self.lengths) if isinstance(self.lengths, Sequence) else type(self.lengths),
            self.scale, self.exchange, self.segment, self.gradients,
        )  # fmt: skip


class CallKind(NamedTuple):
    """Facts that a rank keeps for all calls of one signature.

    Attributes:
        plan: the exchange, and the number of segments.
        facts: facts that all ranks share, by the names of arguments.
        common: the facts without names, as a key.
        tag: a number that stands for the facts.
        lengths: tokens of each rank.
        walk: the form that walks pieces, and its options.
    """

    plan: Plan
    facts: dict[str, str]
    common: tuple[str, ...]
    tag: float
    lengths: tuple[int, ...]
    walk: Walk


class Call:
    """One call on this rank: its segments, and cuts of tokens and states into segments.

    Attributes:
        known: of each batch, the M and the reads that its map was made with, for the gradient; empty where they do not
            serve: a packed sequence that comes in need not be the one that goes out.
        made: of each batch, the tensors that its map has prepared for the walk.
    """

    def __init__(self, ranks: Ranks, kind: CallKind, facts: dict, segment_length: int | None, cu: Tensor | None):
        plan, lengths, r = kind.plan, kind.lengths, ranks.rank
        self.walk, self.cu, self.known, self.made = kind.walk, cu, [], []
        self.exchange = Exchange(ranks, plan, facts, kind.tag)
        a, total = sum(lengths[:r]), sum(lengths)
        self.tokens, n = lengths[r], plan.segments[r]
        step = segment_length or self.tokens // n
        borders = [(i * step, min(self.tokens, (i + 1) * step)) for i in range(n)]
        self.segments = [
            Segment(a + i, a + j, r == m == 0, r == ranks.size - 1 and m == n - 1, total, cu)
            for m, (i, j) in enumerate(borders)
        ]
        # the form walks this many segments at once, as rows of a batch: all of them, or one after the other
        self.rows = n if plan.composed else 1
        self.batches = [(0, self.tokens)] if plan.composed else borders

    def cut(self, x: Tensor) -> list[Tensor]:
        """x [B, T, ...] by batches, [B * rows, T / rows, ...]; one token of zeros in place of none."""
        parts = [x[:, i:j] for i, j in self.batches] if len(self.batches) > 1 else [x]
        parts = [at_least_one_token(y) for y in parts]
        return [y.reshape(-1, y.shape[1] // self.rows, *y.shape[2:]) for y in parts] if self.rows > 1 else parts

    def batches_of(self, names: tuple[str, ...], tokens: Sequence[Tensor], backwards: bool) -> Iterator[Tokens]:
        """Yield each batch's tokens by name; tokens of sequences that do not leave the segment become zeros."""
        for i, segment in enumerate(self.segments[:: self.rows]):
            x = dict(zip(names, tokens[i * len(names) : (i + 1) * len(names)], strict=True))
            yield only_tokens(x, segment.of_left if backwards else segment.of_right)

    def apart(self, batches: Sequence[Tensor]) -> Tensor:
        """Join the batches' rows [B * rows, ...] as [B, n, ...] of all segments."""
        rows = [x.view(-1, self.rows, *x.shape[1:]) for x in batches]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def together(self, x: Tensor) -> list[Tensor]:
        """The inverse of `apart`."""
        return [batch.flatten(0, 1) for batch in x.split(self.rows, 1)]

    def maps(self, found: list[tuple[tuple[Tensor, ...], Tensor]]) -> Maps:
        """Join the batches' maps as maps of all segments."""
        *M, X = (self.apart(parts) for parts in zip(*((*M, X) for M, X in found), strict=True))
        return Maps(tuple(M), X)

    def between(self, found: list, own: list[Tensor | None], backwards: bool = False) -> Tensor:
        """The states that segments start from (backwards: R after them), `[N_seq, n, H, K, V]`.

        Args:
            found: the maps of the batches.
            own: for each segment, the states of sequences that begin (backwards: end) there; None for zeros.
            backwards: from right to left.
        """
        maps, edges = self.maps(found), [x.edge(backwards) for x in self.segments]
        plain = self.cu is None and all(S is None for S in own)  # zeros come into the first segment, whatever its M
        if not plain:
            maps = self.with_own_states(maps, own, edges)
        with self.exchange.ranks.stage("exchange"):
            S = self.exchange.entering(maps, backwards)
        states, _ = maps.run(S, backwards)
        return states if plain else self.with_entering(own, states, edges)

    def with_own_states(self, maps: Maps, own: list[Tensor | None], edges: list[Edge]) -> Maps:
        """The maps of all segments, which also take along the states of the sequences that begin in them."""
        each = [with_own_state(maps.one(i), S, edge) for i, (S, edge) in enumerate(zip(own, edges, strict=True))]
        M = zip(*(x.M for x in each), strict=True)
        return Maps(tuple(torch.stack(m, 1) for m in M), torch.stack([x.X for x in each], 1))

    def with_entering(self, own: list[Tensor | None], states: Tensor, edges: list[Edge]) -> Tensor:
        """The states that sequences begin with, and in the row of the sequence that goes on the state that comes in."""
        zeros = states.new_zeros(states.shape[0] if self.cu is None else len(self.cu) - 1, *states.shape[2:])
        rows = []
        for i, (S, edge) in enumerate(zip(own, edges, strict=True)):
            S, entering = zeros if S is None else S, zero_elsewhere(states[:, i], edge.goes_on)
            if entering is not None:
                S = S.clone()
                S[edge.entering] += entering
            rows.append(S)
        return torch.stack(rows, 1)


def total(parts: list[Tensor | None], like: Tensor) -> Tensor:
    """Sum the tensors that are not None; if all are None, return zeros like `like`."""
    summands = [x for x in parts if x is not None]
    return sum(summands[1:], summands[0]) if summands else torch.zeros_like(like)


class Enter(torch.autograd.Function):
    """(call, names, initial state or None, batches of tokens) -> the states that each batch starts from."""

    @staticmethod
    def forward(ctx, call: Call, names: tuple[str, ...], initial: Tensor | None, *tokens: Tensor):
        ctx.call, ctx.dtype = call, None if initial is None else initial.dtype
        reads = call.cu is None and any(ctx.needs_input_grad)
        maps = []
        for x in call.batches_of(names, tokens, backwards=False):
            with call.exchange.ranks.stage("maps"):
                M, X, read, made = write_map(call.walk, x, reads)
            maps.append((M, X))
            call.made.append([] if call.cu is not None else made)
            call.known += [] if read is None else [*M, read]
        S = None if initial is None else initial.to(call.walk.dtype)
        return tuple(call.together(call.between(maps, [zero_elsewhere(S, own.begin_here) for own in call.segments])))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dS: Tensor):
        call, d_initial = ctx.call, None
        call.exchange.flush_sends()
        if ctx.dtype is not None:
            parts = zip(call.segments, call.apart(dS).unbind(1), strict=True)
            d_initial = total([zero_elsewhere(x, own.begin_here) for own, x in parts], call.apart(dS)[:, 0])
            d_initial = d_initial.to(ctx.dtype)
        return None, None, d_initial, *[None] * (len(ctx.needs_input_grad) - 3)


class Leave(torch.autograd.Function):
    """(call, names, o and states of batches, their tokens, `known`) -> o and the states of sequences that end here.

    o is not copied, so it must not be changed in place.
    """

    @staticmethod
    def forward(ctx, call: Call, names: tuple[str, ...], *tensors: Tensor):
        call.exchange.flush_sends()
        n = len(call.batches)
        o, S, tokens = tensors[:n], call.apart(tensors[n : 2 * n]), tensors[2 * n :]
        ctx.call, ctx.names, ctx.n = call, names, n * len(names)
        ctx.save_for_backward(*tokens)
        ctx.set_materialize_grads(False)
        state = total([zero_elsewhere(S[:, i], own.end_here) for i, own in enumerate(call.segments)], S[:, 0])
        o = [x.reshape(-1, call.rows * x.shape[1], *x.shape[2:]) for x in o]  # [B T HV V]
        o = (torch.cat(o, 1) if n > 1 else o[0])[:, : call.tokens]
        ctx.zeros = functools.partial(torch.zeros, o.shape, dtype=o.dtype, device=o.device)
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, d_state: Tensor | None):
        call, saved = ctx.call, ctx.saved_tensors  # read them once: a checkpoint hands out saved tensors only once
        tokens, known = saved[: ctx.n], saved[ctx.n :]
        do = call.cut(ctx.zeros() if do is None else do)
        known = list(zip(known[::2], known[1::2], strict=True)) or [None] * len(do)
        batches = zip(call.batches_of(ctx.names, tokens, backwards=True), do, known, strict=True)
        with contract.outside_autocast(*tokens):  # a gradient may be asked for inside it
            with call.exchange.ranks.stage("maps"):
                maps = [read_map(call.walk, *batch) for batch in batches]
            dS = call.between(maps, [zero_elsewhere(d_state, own.end_here) for own in call.segments], backwards=True)
        return None, None, *do, *call.together(dS), *[None] * len(saved)


@torch.compiler.disable  # the graph breaks here and resumes after the call
def split_over_ranks(
    mechanism: str, tokens: dict[str, Tensor | None], initial_state: Tensor | None, cu_seqlens: Tensor | None, group,
    scale=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run any function of :mod:`gla_ref.context_parallel`."""
    tokens = {name: x for name, x in tokens.items() if x is not None}
    inputs = *tokens.values(), *([] if initial_state is None else [initial_state])
    gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)
    given = Given(mechanism, tokens, initial_state, cu_seqlens, scale, lengths, exchange, segment, gradients)
    with contract.outside_autocast(*tokens.values()):
        call = agreed_call(Ranks.of(group), given)
        cut = {name: call.cut(x) for name, x in tokens.items()}
        flat = [x[i] for i in range(len(call.batches)) for x in cut.values()]
        starts = Enter.apply(call, tuple(cut), initial_state, *flat)
        known, call.known = call.known, []  # `Leave` saves them
        o, S = [], []
        for i, piece in enumerate(call.segments[:: call.rows]):
            here, made, call.made[i] = {name: x[i] for name, x in cut.items()}, call.made[i], None
            o_i, S_i = call.walk.resumed(here, starts[i], made, piece.cu)
            o.append(o_i)
            S.append(S_i)
        return Leave.apply(call, tuple(cut), *o, *S, *flat, *known)


# The agreement of all ranks before a call.


def agreed_call(ranks: Ranks, given: Given) -> Call:
    """A call that fits and that all ranks make.

    Whether it fits is asked once for each signature that this rank has seen; whether the others do the same, once for
    each set of facts: what all ranks have in common, so that all of them ask at the same call. Boundaries of packed
    sequences, which change from call to call, are asked for at every call where their values may be looked at.
    """
    cu, debug = given.cu, os.environ.get("GLA_REF_DEBUG") == "1"
    try:
        given.check_types()
        signature = given.signature()
        kind = ranks.kinds.get(signature) or kind_of(ranks, given)
        facts, readable = kind.facts, cu is not None and (debug or not cu.is_cuda)
        if readable:
            facts = facts | {"cu_seqlens": f"{contract.check_cu_seqlens(cu, 1, sum(kind.lengths))}"}
    except (TypeError, ValueError) as error:
        ranks.agreement.refuse(error)
        raise
    if debug or readable or kind.common not in ranks.agreed_facts:
        ranks.agreement.reach(facts)
        ranks.agreed_facts.add(kind.common)
    ranks.kinds[signature] = kind
    return Call(ranks, kind, facts, given.segment, cu)


def kind_of(ranks: Ranks, given: Given) -> CallKind:
    """Check and plan a call of a new signature.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    mechanism, tokens, initial_state, cu, scale, lengths, *_ = given
    entry = MECHANISMS[mechanism]
    filled = {name: at_least_one_token(x) if x.ndim > 1 else x for name, x in tokens.items()}
    sizes = contract.check_tensors(filled, entry.arguments, entry.multiples)
    (T, device), B = (tokens["q"].shape[1], tokens["q"].device), sizes["B"]
    for name, x in tokens.items():
        if x.shape[1] != T:
            raise ValueError(f"{name}: expected {T} tokens as in q, got {x.shape[1]}")
    lengths = check_lengths(lengths, ranks.size, ranks.rank, T, "q")
    scale, dtype = contract.check_scale(scale, sizes["K"]), contract.compute_dtype(*tokens.values())
    contract.check_cu_seqlens(cu, B, sum(lengths), values=False)
    if cu is not None and cu.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu.device}")
    if initial_state is not None:
        N = B if cu is None else len(cu) - 1
        contract.check_state("initial_state", initial_state, contract.state_shape(entry, sizes, N), device)
    link = LINKS.get(dist.get_backend(ranks.group), LINKS["gloo"])
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    chosen = plan(
        mechanism, filled, lengths, packed=cu is not None, exchange=given.exchange, segment=given.segment, link=link,
        multiprocessors=processors,
    )  # fmt: skip
    walk = Walk(FORMS[mechanism][chosen.walk], chosen.walk == "triton", scale, dtype)
    facts = facts_of(given, lengths, scale)
    common = tuple(facts.values())
    tag = float(zlib.crc32(repr(common).encode()) % 2**24)  # float32 holds it exactly
    return CallKind(chosen, facts, common, tag, lengths, walk)


def facts_of(given: Given, lengths: tuple[int, ...], scale: float) -> dict[str, str]:
    """Facts that all ranks must have in common, a sentence for each argument by its name."""
    facts, cu = {"mechanism": given.mechanism}, given.cu
    for argument in MECHANISMS[given.mechanism].arguments:
        x = given.tokens.get(argument.name)
        if x is not None:
            shape = ", ".join("T" if axis == 1 else f"{n}" for axis, n in enumerate(x.shape))
        facts[argument.name] = "None" if x is None else f"[{shape}] {x.dtype} on {x.device.type}"
    return facts | {
        "cu_seqlens": "None" if cu is None else f"{list(cu.shape)} {cu.dtype}",
        "lengths": f"{list(lengths)}",
        "scale": f"{scale}",
        "exchange": f"{given.exchange}",
        "segment": f"{given.segment}",
        "requires_grad": f"{given.gradients}",  # a rank without a gradient would leave the others waiting for its own
    }
