"""A call over ranks: its steps, forward and backward (chapter 25).

`Enter` exchanges states on the way forward and nothing on the way back. Then each rank walks its own piece by the
mechanism's own differentiable function. `Leave` exchanges nothing on the way forward and gradients of states on the
way back.

This module loads PyTorch's compiler, so the package does not import this module by itself.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _contract as contract
from ._kinds import Arguments, CallKind, agree
from .exchange import Exchange, Ranks
from .maps import Maps, Tokens, read_map, write_map
from .segments import Edge, Segment, at_least_one_token, only_tokens, with_own_state, zero_elsewhere


class Call:
    """One call on this rank: its segments, and cuts of tokens and states into segments.

    Attributes:
        kept_maps: of each batch, the M and the reads that its map was made with, for the gradient; empty where they do
            not serve: a packed sequence that comes in need not be the one that goes out.
        made: of each batch, the tensors that its map has prepared for the walk.
    """

    def __init__(self, ranks: Ranks, kind: CallKind, segment_length: int | None, cu: Tensor | None):
        plan, lengths, r = kind.plan, kind.lengths, ranks.rank
        self.walk, self.cu, self.kept_maps, self.made = kind.walk, cu, [], []
        self.exchange = Exchange(ranks, plan, kind.facts, kind.tag)
        before, total = sum(lengths[:r]), sum(lengths)
        self.tokens, n = lengths[r], plan.segments[r]
        step = segment_length or self.tokens // n
        borders = [(i * step, min(self.tokens, (i + 1) * step)) for i in range(n)]
        self.segments = [
            Segment(before + i, before + j, r == m == 0, r == ranks.size - 1 and m == n - 1, total, cu)
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
            call.kept_maps += [] if read is None else [*M, read]
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
    """(call, names, o and states of batches, their tokens, `kept_maps`) -> o and the states of sequences that end.

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
        tokens, kept = saved[: ctx.n], saved[ctx.n :]
        do = call.cut(ctx.zeros() if do is None else do)
        kept_maps = list(zip(kept[::2], kept[1::2], strict=True)) or [None] * len(do)
        batches = zip(call.batches_of(ctx.names, tokens, backwards=True), do, kept_maps, strict=True)
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
    arguments = Arguments(mechanism, tokens, initial_state, cu_seqlens, scale, lengths, exchange, segment, gradients)
    with contract.outside_autocast(*tokens.values()):
        ranks = Ranks.of(group)
        call = Call(ranks, agree(ranks, arguments), segment, cu_seqlens)
        cut = {name: call.cut(x) for name, x in tokens.items()}
        flat = [x[i] for i in range(len(call.batches)) for x in cut.values()]
        starts = Enter.apply(call, tuple(cut), initial_state, *flat)
        kept_maps, call.kept_maps = call.kept_maps, []  # `Leave` saves them
        o, S = [], []
        for i, piece in enumerate(call.segments[:: call.rows]):
            here = {name: x[i] for name, x in cut.items()}
            made = call.made[i]
            call.made[i] = None  # so that the walk's tensors can be freed
            o_i, S_i = call.walk.resumed(here, starts[i], made, piece.cu)
            o.append(o_i)
            S.append(S_i)
        return Leave.apply(call, tuple(cut), *o, *S, *flat, *kept_maps)
