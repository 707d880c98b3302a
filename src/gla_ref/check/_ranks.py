"""A function over ranks as a subject of the check: tokens split, every rank called, results put together.

Appendix "Check your kernel"; started by `torchrun --nproc-per-node 2 -m gla_ref check gla my_module:my_fn --ranks 2`.
"""

from __future__ import annotations

import datetime
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ._kernel import NotClaimed

__all__ = ["OverRanks", "pieces"]

FOREVER = datetime.timedelta(days=1)  # that ranks wait for the next call, while the first one computes what is right
KEPT_GRAPHS = 16  # calls whose graphs are kept for their backward passes


def pieces(T: int, ends: tuple[int, ...] | None, ranks: int, even: bool = False) -> tuple[int, ...]:
    """The number of tokens on each rank, of T in sequences with these boundaries or none.

    By their sizes: equal pieces, pieces that differ, one rank without tokens, or, of packed sequences, pieces that
    begin where a sequence does.
    """
    borders, inner = [T * r // ranks for r in range(ranks + 1)], sorted({*(ends or ())} - {0, T})
    if even:
        pass
    elif ends and len(inner) >= ranks - 1 and sum(ends) % 2:
        borders = [0, *inner[: ranks - 1], T]
    elif T % 7 in (2, 6):
        borders = [T * r * (r + 1) // (ranks * (ranks + 1)) for r in range(ranks + 1)]
    elif T % 7 in (1, 5) and ranks > 1:
        full, empty = [T * r // (ranks - 1) for r in range(ranks)], T // 7 % ranks
        borders = full[: empty + 1] + full[empty:]
    return tuple(b - a for a, b in zip(borders, borders[1:], strict=False))


class Failure(NamedTuple):
    """A rank's answer where its function raised, and whether it claims the call."""

    message: str
    claimed: bool


class OverRanks:
    """A distributed function that is called as one kernel: on the first rank, while the others :meth:`serve`::

        subject = OverRanks(my_fn)
        if dist.get_rank():
            subject.serve()
        else:
            report = check.kernel("gla", subject)
            subject.close()

    Each rank calls `o, state = fn(q, k, v[, g], scale=, initial_state=, cu_seqlens=, group=, lengths=)` on its own
    tokens, `T` of them perhaps 0, as functions of :mod:`gla_ref.context_parallel` are called; what the signature lacks
    is left out. `cu_seqlens` has the boundaries among all tokens, `initial_state` is whole on every rank. The sum of
    the ranks' states, None standing for zeros, is the final state, and so it is with gradients of the initial one.
    Without `lengths` all pieces are equal.

    Args:
        fn: the function, the same on every rank.
        group: the ranks; None for all.
        control: a gloo group of the same ranks by which calls are handed on, apart from the one that the function
            exchanges by, which may break; None makes one of all ranks.
        device: where this rank's tensors lie.
        layout: "bthd" or "bhtd", as in :func:`gla_ref.check.kernel`.

    Raises:
        TypeError: `fn` cannot be called.
    """

    over_ranks = True  # no call in another dtype comes before the usual ones

    def __init__(
        self,
        fn: Callable,
        group: dist.ProcessGroup | None = None,
        control: dist.ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        layout: str = "bthd",
    ):
        if not callable(fn):
            raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
        self.fn, self.group, self.device = fn, group or dist.group.WORLD, torch.device(device)
        self.axis = ("bthd", "bhtd").index(layout) + 1
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.control = control or dist.new_group(timeout=FOREVER, backend="gloo")
        self.first, self.graphs = dist.get_process_group_ranks(self.group)[0], {}
        self.calls, self.busy = 0, False

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    def takes(self, name: str) -> bool:
        return name in self.parameters or any(p.kind == p.VAR_KEYWORD for p in self.parameters.values())

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters that a caller may give, without those that tell a rank which it is."""
        own = ("group", "lengths")
        return inspect.Signature([p for name, p in self.parameters.items() if name not in own])

    @property
    def supports(self) -> Mapping | Callable | None:
        """The function's own claim, or that of pieces of equal length."""
        claim = getattr(self.fn, "supports", None)
        return {"multiples": {"T": self.size}} if claim is None and not self.takes("lengths") else claim

    # the first rank

    def __call__(self, *tensors: Tensor, initial_state: Tensor | None = None, **options):
        gradients = torch.is_grad_enabled()
        cu, T = options.get("cu_seqlens"), tensors[0].shape[self.axis]
        even = not self.takes("lengths")
        ends = None if cu is None else tuple(cu.tolist())
        if even and T % self.size:
            raise NotClaimed("pieces of different lengths")
        return Over.apply(self, pieces(T, ends, self.size, even), options, gradients, initial_state, *tensors)

    def ask(self, what: str, **given) -> list[dict]:
        """Ask every rank, and return the answers in their order.

        Raises:
            RuntimeError: some rank raised, or an earlier call has not come back.
            NotClaimed: some rank makes no claim.
        """
        if self.busy:
            raise RuntimeError("an earlier call still hangs on some rank")
        self.busy = True
        dist.broadcast_object_list([(what, given)], self.first, self.control)
        answers: list[dict | tuple] = [{}] * self.size
        dist.gather_object(self.answer(what, given), answers, self.first, self.control)
        self.busy = False
        failed = {r: x for r, x in enumerate(answers) if isinstance(x, Failure)}
        if failed:
            said = "; ".join(f"rank {r}: {x.message}" for r, x in failed.items())
            raise (RuntimeError if all(x.claimed for x in failed.values()) else NotClaimed)(said)
        return answers

    def close(self) -> None:
        """Let the other ranks go, unless one of them hangs."""
        if not self.busy:
            dist.broadcast_object_list([("close", {})], self.first, self.control)

    # every rank

    def serve(self) -> None:
        """Take part in the first rank's calls until it closes."""
        while True:
            box = [None]
            dist.broadcast_object_list(box, self.first, self.control)
            (what, given) = box[0]
            if what == "close":
                return
            dist.gather_object(self.answer(what, given), None, self.first, self.control)

    def answer(self, what: str, given: dict) -> dict | tuple:
        """This rank's results of a call or of its backward pass, on the CPU; or a `Failure`."""
        try:
            results = {"call": self.call, "backward": self.backward}[what](**given)
        except (Exception, SystemExit) as error:  # a rank that ended would be waited for
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.name}, line {frame.lineno} of {os.path.basename(frame.filename)}"
            return Failure(f"{type(error).__name__}: {error} ({where})", not isinstance(error, NotClaimed))
        return {name: x if x is None else x.cpu() for name, x in results.items()}

    def call(self, number, lengths, options, gradients, needs, initial_state, tensors) -> dict:
        a = sum(lengths[: self.rank])
        own = [x.narrow(self.axis, a, lengths[self.rank]) for x in tensors]
        own = [y.contiguous() if x.is_contiguous() else y for x, y in zip(tensors, own, strict=True)]
        leaves = [x if x is None else x.to(self.device).detach() for x in (initial_state, *own)]
        leaves = [x if x is None else x.requires_grad_(need) for x, need in zip(leaves, needs, strict=True)]
        options = {n: x.to(self.device) if isinstance(x, Tensor) else x for n, x in options.items()}
        options |= {n: x for n, x in (("group", self.group), ("lengths", lengths)) if self.takes(n)}
        if self.takes("initial_state"):
            options["initial_state"] = leaves[0]
        with torch.set_grad_enabled(gradients):
            result = self.fn(*leaves[1:], **options)
        o, S = result[:2] if isinstance(result, tuple | list) else (result, None)
        self.graphs[number] = leaves, o, S
        self.graphs.pop(number - KEPT_GRAPHS, None)
        return {"o": o.detach(), "S": None if S is None else S.detach()}

    def backward(self, number, lengths, do, dS) -> dict:
        leaves, o, S = self.graphs[number]
        do = do.narrow(self.axis, sum(lengths[: self.rank]), lengths[self.rank])
        made = [(x, d.to(x)) for x, d in ((o, do), (S, dS)) if x is not None and x.requires_grad]
        asked = {f"{i}": x for i, x in enumerate(leaves) if x is not None and x.requires_grad}
        grads = torch.autograd.grad(
            [x for x, _ in made], list(asked.values()), [d for _, d in made], retain_graph=True, allow_unused=True
        )
        return dict(zip(asked, grads, strict=True))


class Over(torch.autograd.Function):
    """(subject, lengths, options, whether gradients are recorded, initial state or None, tensors) -> (o, state)."""

    @staticmethod
    def forward(ctx, it: OverRanks, lengths, options, gradients: bool, initial: Tensor | None, *tensors: Tensor):
        it.calls += 1
        ctx.it, ctx.lengths, ctx.number = it, lengths, it.calls
        ctx.like = initial, *tensors
        needs = [need and gradients for need in ctx.needs_input_grad[4:]]
        of_ranks = it.ask(
            "call", number=it.calls, lengths=lengths, options=options, gradients=gradients, needs=needs,
            initial_state=initial, tensors=tensors,
        )  # fmt: skip
        device = tensors[0].device
        return (
            torch.cat([x["o"] for x in of_ranks], it.axis).to(device),
            None if (S := total([x["S"] for x in of_ranks])) is None else S.to(device),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor, dS: Tensor | None):
        of_ranks = ctx.it.ask("backward", number=ctx.number, lengths=ctx.lengths, do=do, dS=dS)
        grads = [None] * len(ctx.like)
        for name in of_ranks[0]:
            i, parts = int(name), [x[name] for x in of_ranks]
            if i == 0:
                grads[i] = total(parts)
            elif any(x is not None for x in parts):
                starts = accumulate((0, *ctx.lengths[:-1]))
                shapes = [ctx.like[i].narrow(ctx.it.axis, a, n) for a, n in zip(starts, ctx.lengths, strict=True)]
                filled = [
                    torch.zeros_like(y, device="cpu") if x is None else x for x, y in zip(parts, shapes, strict=True)
                ]
                grads[i] = torch.cat(filled, ctx.it.axis)
        return None, None, None, None, *(x if x is None else x.to(do.device) for x in grads)


def total(parts: list[Tensor | None]) -> Tensor | None:
    """The sum of what is not None, if anything is."""
    given = [x for x in parts if x is not None]
    return sum(given[1:], given[0]) if given else None
