"""A call over ranks: its steps, forward and backward (chapter 25).

`split_over_ranks` has the forward steps in their order. `Enter` exchanges states on the way forward and nothing on the
way back. Then each rank walks its own piece by the mechanism's own differentiable function. `Leave` exchanges nothing
on the way forward and gradients of states on the way back.

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
from .maps import Maps, Tokens, WrittenMap, read_map, write_map
from .segments import Segment, at_least_one_token, only_tokens, own_rows, with_entering, with_own_states, zero_elsewhere


class Call:
    """One call on this rank: its walk, its exchange, and the cuts of its tokens and states. No method changes a call.

    A batch is what the form walks at once. A plan whose maps are composed has one batch, whose rows are all segments;
    else each segment is a batch.

    Attributes:
        segments: of this rank's tokens.
        rows: the number of segments of a batch.
        spans: the first token of each batch, and the token after its last.
        tokens: how many this rank has.
        cu: `cu_seqlens`, of all ranks' tokens.
    """

    def __init__(self, ranks: Ranks, kind: CallKind, arguments: Arguments):
        plan, lengths, r, cu = kind.plan, kind.lengths, ranks.rank, arguments.cu
        self.walk, self.exchange, self.cu = kind.walk, Exchange(ranks, plan, kind.facts, kind.tag), cu
        before, total = sum(lengths[:r]), sum(lengths)
        self.tokens, n = lengths[r], plan.segments[r]
        step = arguments.segment or self.tokens // n
        borders = [(i * step, min(self.tokens, (i + 1) * step)) for i in range(n)]
        self.segments = [
            Segment(before + i, before + j, r == m == 0, r == ranks.size - 1 and m == n - 1, total, cu)
            for m, (i, j) in enumerate(borders)
        ]
        self.rows, self.spans = (n, [(0, self.tokens)]) if plan.composed else (1, borders)

    def cut(self, x: Tensor) -> list[Tensor]:
        """x [B, T, ...] by batches, [B * rows, T / rows, ...]; one token of zeros in place of none."""
        parts = [x[:, i:j] for i, j in self.spans] if len(self.spans) > 1 else [x]
        parts = [at_least_one_token(y) for y in parts]
        return [y.reshape(-1, y.shape[1] // self.rows, *y.shape[2:]) for y in parts] if self.rows > 1 else parts

    def by_segment(self, batches: Sequence[Tensor]) -> Tensor:
        """Join states [B * rows, ...] of the batches as [B, n, ...] of all segments."""
        rows = [x.view(-1, self.rows, *x.shape[1:]) for x in batches]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def by_batch(self, x: Tensor) -> list[Tensor]:
        """The inverse of `by_segment`."""
        return [batch.flatten(0, 1) for batch in x.split(self.rows, 1)]

    def leaving(self, batches: Sequence[Tokens], backwards: bool) -> Iterator[Tokens]:
        """Yield each batch's tokens; those of sequences that do not leave the segment become zeros."""
        for x, segment in zip(batches, self.segments[:: self.rows], strict=True):
            yield only_tokens(x, segment.edge(backwards).tokens)

    def write_maps(self, batches: Sequence[Tokens], keep: bool) -> list[WrittenMap]:
        """The maps of the batches from left to right; `keep` as `write_map` takes it.

        A packed sequence that comes in need not be the one that goes out: the by-products of its map serve no other.
        """
        with self.exchange.ranks.stage("maps"), torch.no_grad():
            if self.cu is None:
                return [write_map(self.walk, x, keep) for x in batches]
            return [WrittenMap(write_map(self.walk, x).map, {}) for x in self.leaving(batches, backwards=False)]

    def between(self, maps: Sequence[Maps], own: list[Tensor | None], backwards: bool = False) -> list[Tensor]:
        """The states that the batches start from (backwards: R after them), `[N_seq * rows, H, K, V]` each.

        Args:
            maps: of the batches.
            own: for each segment, the states of sequences that begin (backwards: end) there; None for zeros.
            backwards: from right to left.
        """
        *M, X = (self.by_segment(parts) for parts in zip(*((*m.M, m.X) for m in maps), strict=True))
        of_segments, edges = Maps(tuple(M), X), [x.edge(backwards) for x in self.segments]
        plain = self.cu is None and all(S is None for S in own)  # zeros come into the first segment, whatever its M
        if not plain:
            of_segments = with_own_states(of_segments, own, edges)
        with self.exchange.ranks.stage("exchange"):
            S = self.exchange.entering(of_segments, backwards)
        states, _ = of_segments.run(S, backwards)
        if not plain:
            states = with_entering(own, states, edges, len(states) if self.cu is None else len(self.cu) - 1)
        return self.by_batch(states)


class Enter(torch.autograd.Function):
    """(call, maps of batches, initial state or None, tokens) -> the states that each batch starts from.

    Tokens are inputs only for the way back, which ends here: it waits until the messages of `Leave` have gone out.
    """

    @staticmethod
    def forward(ctx, call: Call, maps: list[Maps], initial: Tensor | None, *tokens: Tensor):
        ctx.call, ctx.dtype = call, None if initial is None else initial.dtype
        S = None if initial is None else initial.to(call.walk.dtype)
        return tuple(call.between(maps, [zero_elsewhere(S, own.begin_here) for own in call.segments]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dS: Tensor):
        call, d_initial = ctx.call, None
        call.exchange.flush_sends()
        if ctx.dtype is not None:
            d_initial = own_rows(call.by_segment(dS), [own.begin_here for own in call.segments]).to(ctx.dtype)
        return None, None, d_initial, *[None] * (len(ctx.needs_input_grad) - 3)


class Leave(torch.autograd.Function):
    """(call, `saved`, o of batches, their final states) -> o and the states of sequences that end.

    `saved` has, of each batch by name, the tensors that its map from right to left is made of. o is not copied, so it
    must not be changed in place.
    """

    @staticmethod
    def forward(ctx, call: Call, saved: list[dict[str, Tensor]], *walked: Tensor):
        call.exchange.flush_sends()
        n = len(saved)
        ctx.call, ctx.names = call, tuple(saved[0])
        ctx.save_for_backward(*(x for batch in saved for x in batch.values()))
        ctx.set_materialize_grads(False)
        state = own_rows(call.by_segment(walked[n:]), [own.end_here for own in call.segments])
        o = [x.reshape(-1, call.rows * x.shape[1], *x.shape[2:]) for x in walked[:n]]  # [B T HV V]
        o = (torch.cat(o, 1) if n > 1 else o[0])[:, : call.tokens]
        ctx.zeros = functools.partial(torch.zeros, o.shape, dtype=o.dtype, device=o.device)
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, d_state: Tensor | None):
        call, saved = ctx.call, iter(ctx.saved_tensors)  # read them once: a checkpoint hands them out only once
        batches = [{name: next(saved) for name in ctx.names} for _ in call.spans]
        do = call.cut(ctx.zeros() if do is None else do)
        with contract.outside_autocast(*do):  # a gradient may be asked for inside it
            with call.exchange.ranks.stage("maps"):
                leaving = call.leaving(batches, backwards=True)
                maps = [read_map(call.walk, *batch) for batch in zip(leaving, do, strict=True)]
            dS = call.between(maps, [zero_elsewhere(d_state, own.end_here) for own in call.segments], backwards=True)
        return None, None, *do, *dS


@torch.compiler.disable  # the graph breaks here and resumes after the call
def split_over_ranks(
    mechanism: str, tokens: dict[str, Tensor | None], initial_state: Tensor | None, cu_seqlens: Tensor | None, group,
    scale=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run any function of :mod:`gla_ref.context_parallel`, in the three steps that it names."""
    tokens = {name: x for name, x in tokens.items() if x is not None}
    inputs = *tokens.values(), *([] if initial_state is None else [initial_state])
    gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)
    arguments = Arguments(mechanism, tokens, initial_state, cu_seqlens, scale, lengths, exchange, segment, gradients)
    with contract.outside_autocast(*tokens.values()):
        ranks = Ranks.of(group)
        call = Call(ranks, agree(ranks, arguments), arguments)
        cut = [call.cut(x) for x in tokens.values()]
        batches = [dict(zip(tokens, parts, strict=True)) for parts in zip(*cut, strict=True)]
        maps = call.write_maps(batches, gradients)  # step 1
        saved = [x | written.kept for x, written in zip(batches, maps, strict=True)]
        starts = Enter.apply(call, [written.map for written in maps], initial_state, *tokens.values())  # step 2
        walked = [  # step 3; a map is popped, so that what it has prepared is freed after its use
            call.walk.resumed(x, S, maps.pop(0).prepared, piece.cu)
            for x, S, piece in zip(batches, starts, call.segments[:: call.rows], strict=True)
        ]
        o, S = zip(*walked, strict=True)
        return Leave.apply(call, saved, *o, *S)
