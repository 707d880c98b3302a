"""The exchange: which state comes into a rank's piece (chapter 25).

A state of K V numbers per head crosses a border between ranks, however long the pieces are. An all-gather sends every
rank's map to all other ranks at once, and each rank composes the maps before its own. A pipeline sends the state itself
from rank to rank, block of heads after block of heads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from .agreement import Agreement, Lookout
from .maps import Maps, border_kernels
from .planning import Plan

# gathers one tensor from all ranks; PyTorch 2.13 has renamed the function
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PATIENCE = 0.05  # while a rank waits, it looks for other ranks' questions at intervals of so many seconds


class Ranks:
    """A process group, and this rank's knowledge of the calls that its ranks make.

    Attributes:
        rank, size, agreement: this rank's number, the number of ranks, and the questions that all ranks answer.
        kinds: the kinds of calls that this rank has made (`CallKind` of _kinds.py), by their signatures.
        lookout: the thread that says why a GPU waits; None before the first exchange.
        sent: the bytes that this rank has handed to torch.distributed in its exchanges.
        stage: the context of each stage of a call, "maps" or "exchange"; a program that measures sets its own.
    """

    of_group: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()  # a destroyed group can be freed

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.rank, self.size = ref(group), dist.get_rank(group), dist.get_world_size(group)
        self.agreement = Agreement(group)
        self.kinds: dict[tuple, object] = {}
        self.lookout: Lookout | None = None
        self.sent = 0
        self.stage: Callable[[str], AbstractContextManager] = nullcontext

    @staticmethod
    def of(group: dist.ProcessGroup | dist.DeviceMesh | None) -> Ranks:
        if group is None:
            group = dist.group.WORLD
        elif isinstance(group, dist.DeviceMesh):
            group = group.get_group()  # the mesh has one dimension
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a process group that has this rank, or a DeviceMesh, got {group!r}")
        return Ranks.of_group.get(group) or Ranks.of_group.setdefault(group, Ranks(group))

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group()

    @property
    def others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def watch(self, work: dist.Work, facts: dict[str, str], ranks: list[int]) -> None:
        """Start a lookout, which says why if a GPU waits for these ranks until the time limit."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self.lookout is None or not self.lookout.is_alive():  # one that has spoken has ended
            self.lookout = Lookout(self.agreement)
        self.lookout.latest = work, facts, ranks

    def all_gather(self, x: Tensor) -> tuple[dist.Work, Tensor]:
        """Gather every rank's numbers x [n] as [R, n], complete once the work is done."""
        self.sent += x.nbytes
        every_rank = x.new_empty(self.size * len(x))
        return all_gather(every_rank, x, group=self.group, async_op=True), every_rank.view(self.size, -1)

    def receive(self, x: Tensor, rank: int) -> dist.Work:
        return self._message(dist.irecv, x, rank)

    def send(self, x: Tensor, rank: int) -> dist.Work:
        self.sent += x.nbytes
        return self._message(dist.isend, x, rank)

    def _message(self, how: Callable, x: Tensor, rank: int) -> dist.Work:
        """Send or receive a message as a batch of one; NCCL warns of messages outside a batch."""
        (work,) = dist.batch_isend_irecv([dist.P2POp(how, x, dist.get_global_rank(self.group, rank), self.group)])
        return work


class Exchange:
    """The messages that one call sends and receives.

    Attributes:
        tag: the number at the start of all messages of this call.
        facts: the facts that the ranks have agreed upon.
    """

    def __init__(self, ranks: Ranks, plan: Plan, facts: dict[str, str], tag: float):
        self.ranks, self.plan, self.facts, self.tag = ranks, plan, facts, tag
        self.under_way: list[tuple[dist.Work, Tensor, int]] = []  # messages, and the ranks that they go to

    def entering(self, maps: Maps, backwards: bool = False) -> Tensor:
        """Find the state that comes into this rank's first (backwards: last) segment, from the maps of its segments."""
        if self.ranks.size == 1:
            return torch.zeros_like(maps.X[:, 0])
        if self.plan.exchange == "all-gather" and self.plan.composed and maps.by_kernels:
            S = self.gathered_by_kernels(maps, backwards)
        else:
            maps = maps.composed(backwards) if self.plan.composed else maps
            S = (self.pipelined if self.plan.exchange == "pipeline" else self.gathered)(maps, backwards)
        self.ranks.agreement.took_part(of_all=self.plan.exchange == "all-gather")
        return S

    def gathered_by_kernels(self, maps: Maps, backwards: bool) -> Tensor:
        """Do the work of `gathered` for plans with one map per rank, in two launches instead of some twenty."""
        work, found = self.ranks.all_gather(border_kernels().composed(maps.X, maps.M, self.tag, backwards))
        self.wait(work, found, self.ranks.others)
        return border_kernels().entered(found, self.ranks.rank, self.plan.shapes, self.tag, backwards)

    def gathered(self, maps: Maps, backwards: bool) -> Tensor:
        """Send all maps to every rank; each rank runs through the maps before its own."""
        ranks, sizes = self.ranks, [math.prod(shape) for shape in self.plan.shapes]
        counts = (1,) * ranks.size if self.plan.composed else self.plan.segments
        numbers = torch.cat([maps.X.new_full((1,), self.tag), *(y.flatten() for y in (*maps.M, maps.X))])
        if missing := 1 + max(counts) * sum(sizes) - len(numbers):
            numbers = F.pad(numbers, (0, missing))
        work, found = ranks.all_gather(numbers)
        self.wait(work, found, ranks.others)
        S = torch.zeros_like(maps.X[:, 0])
        for r in range(ranks.size - 1, ranks.rank, -1) if backwards else range(ranks.rank):
            parts = found[r, 1 : 1 + counts[r] * sum(sizes)].split([counts[r] * n for n in sizes])
            *M, X = (y.view(N, counts[r], *rest) for y, (N, *rest) in zip(parts, self.plan.shapes, strict=True))
            _, S = Maps(tuple(M), X).run(S, backwards)
        return self.checked(S, found[:, 0], list(range(ranks.size)))

    def pipelined(self, maps: Maps, backwards: bool) -> Tensor:
        """Pass the state from rank to rank; a rank walks while its message is on the way."""
        ranks, found = self.ranks, []
        before, after = (ranks.rank + 1, ranks.rank - 1) if backwards else (ranks.rank - 1, ranks.rank + 1)
        H, blocks = maps.X.shape[2], self.plan.blocks
        for b in range(blocks):
            part = maps.heads(slice(b * H // blocks, (b + 1) * H // blocks))
            S = torch.zeros_like(part.X[:, 0])
            if 0 <= before < ranks.size:
                numbers = S.new_empty(1 + S.numel())
                self.wait(ranks.receive(numbers, before), numbers, [before])
                S = self.checked(numbers[1:].view_as(S), numbers[:1], [before])
            found.append(S)
            if 0 <= after < ranks.size:
                numbers = torch.cat([S.new_full((1,), self.tag), part.run(S, backwards)[1].flatten()])
                self.under_way.append((ranks.send(numbers, after), numbers, after))
        return torch.cat(found, 1) if blocks > 1 else found[0]

    def flush_sends(self) -> None:
        """Wait until every message that was sent has gone out; its memory may then be used again."""
        while self.under_way:
            work, numbers, rank = self.under_way.pop()
            self.wait(work, numbers, [rank])

    def checked(self, S: Tensor, tags: Tensor, ranks: list[int]) -> Tensor:
        """S, if the messages of these ranks have the tag of this call.

        A rank may have fallen out of step among calls that were agreed upon before. Tags tell kinds of calls apart,
        not calls of one kind, nor the values of `cu_seqlens`. On a GPU S becomes NaN if a tag differs: to see that, the
        host would have to wait.

        Raises:
            ValueError: a tag differs, on a CPU; this rank gives up.
        """
        if S.is_cuda:
            return torch.where(tags.eq(self.tag).all(), S, math.nan)
        for rank, tag in zip(ranks, tags.tolist(), strict=True):
            if tag != self.tag:
                why = f"rank {rank} makes another call than rank {self.ranks.rank}; GLA_REF_DEBUG=1 names the argument"
                self.ranks.agreement.give_up(why)
                raise ValueError(why)
        return S

    def wait(self, work: dist.Work, x: Tensor, ranks: list[int]) -> None:
        """Wait for `ranks`; on a GPU, its stream waits.

        While it waits on a CPU, this rank answers if another rank asks for the facts of its call.

        Raises:
            ValueError: another rank makes a call of another kind; the same text on every rank.
            RuntimeError: a rank died or hangs.
        """
        agreement = self.ranks.agreement
        with agreement.waiting(self.facts, ranks):
            if x.is_cuda:
                work.wait()
                self.ranks.watch(work, self.facts, ranks)
                return
            done = Future()
            threading.Thread(target=_finish, args=(work, done), daemon=True).start()
            while True:
                try:
                    return done.result(PATIENCE)
                except TimeoutError:
                    agreement.answer(self.facts)


def _finish(work: dist.Work, done: Future) -> None:
    try:
        done.set_result(work.wait())
    except RuntimeError as error:
        done.set_exception(error)
