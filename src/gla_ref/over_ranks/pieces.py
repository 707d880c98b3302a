"""The tokens of a sequence on their ranks, and the messages between neighbours (chapter 25).

A model's mixers, its short convolutions and its loss ask :class:`Pieces` for what lies across a border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ..mechanisms import MECHANISMS
from .calls import split_over_ranks
from .exchange import Ranks

__all__ = ["Pieces"]


class Pieces(NamedTuple):
    """The places of a sequence's tokens: `lengths[r]` of them on rank r, in their order."""

    ranks: Ranks
    lengths: tuple[int, ...]
    facts: dict[str, str]  # facts that the ranks have agreed upon

    @property
    def start(self) -> int:
        """The number of tokens on the ranks before."""
        return sum(self.lengths[: self.ranks.rank])

    @property
    def here(self) -> int:
        """The number of tokens on this rank."""
        return self.lengths[self.ranks.rank]

    def form(self, mechanism: str) -> Callable:
        """The mechanism over all ranks, called as a form of `gla_ref.FORMS` is."""

        def form(*tensors: Tensor, initial_state=None, cu_seqlens: Tensor | None = None):
            tokens = dict(zip(MECHANISMS[mechanism].required, tensors, strict=True))
            where = {"group": self.ranks.group, "lengths": self.lengths}
            return split_over_ranks(mechanism, tokens, initial_state, cu_seqlens, **where)

        return form

    def own(self, cu_seqlens: Tensor | None) -> Tensor | None:
        """The boundaries among this rank's tokens `[N + 1]`; sequences of other ranks are empty here."""
        return None if cu_seqlens is None else (cu_seqlens - self.start).clamp(0, self.here)

    def before(self, tensors: Sequence[Tensor], n: int, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        """The n tokens before this rank's first, of tensors `[B, T, D]`; differentiable.

        Returns:
            `[N, n, D]` of each tensor: the past of every sequence (B of them without boundaries), zeros where there
            is none.
        """
        past = Before.apply(torch.cat(tensors, -1), n, self)
        if cu_seqlens is not None:
            last = (cu_seqlens < self.start).sum().sub(1).clamp(min=0)  # the sequence of the token before
            places = torch.arange(self.start - n, self.start, device=past.device)
            past = torch.where((places >= cu_seqlens[last])[:, None], past, 0)
            past = past.new_zeros(len(cu_seqlens) - 1, *past.shape[1:]).index_copy(0, last.view(1), past)
        return past.split([x.shape[-1] for x in tensors], -1)

    def moved(self, x: Tensor, step: int) -> Tensor:
        """Return x of the rank `step` before this one; every rank sends its own on; zeros where there is no such rank.

        Raises:
            RuntimeError: a rank died or hangs; the message names it.
        """
        ranks, x = self.ranks, x.contiguous()
        received, there, back = torch.zeros_like(x), ranks.rank + step, ranks.rank - step
        members = dist.get_process_group_ranks(ranks.group)
        ends = ((dist.isend, x, there), (dist.irecv, received, back))
        ends = [dist.P2POp(do, y, members[r], ranks.group) for do, y, r in ends if 0 <= r < ranks.size]
        with ranks.agreement.waiting(self.facts, [r for r in (there, back) if 0 <= r < ranks.size]):
            for work in dist.batch_isend_irecv(ends) if ends else ():
                work.wait()
        ranks.agreement.took_part(of_all=False)
        return received


class Before(torch.autograd.Function):
    """(x [B, T, D], n, pieces) -> the last n tokens of the rank before."""

    @staticmethod
    def forward(ctx, x: Tensor, n: int, pieces: Pieces) -> Tensor:
        ctx.shape, ctx.pieces = x.shape, pieces
        return pieces.moved(x[:, x.shape[1] - n :], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):
        dx = d.new_zeros(ctx.shape)
        dx[:, dx.shape[1] - d.shape[1] :] = ctx.pieces.moved(d, -1)
        return dx, None, None
