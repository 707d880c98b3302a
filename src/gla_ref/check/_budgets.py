"""Problems worked out for the kit: the cases of a kernel, their exact results and their budgets (chapters 7 and 11)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..rounding import unit
from ._cases import MILD, Case, held, inputs
from ._mechanisms import MECHANISMS, Kind
from .oracle import budgets_of, parts, work_out

FEW = 1000  # keys that a CPU attends to as fast as a GPU
KEPT = 400  # problems
NEAR, ROUNDS = 2.0, 8  # an error below so many budgets may be luck: its budget comes from so many times as many runs
WORKED_OUT: dict[tuple, Problem] = {}


@dataclass(frozen=True, eq=False)
class Problem:
    """A case with its inputs, the exact quantities and, for each octave, the unit of errors and the error allowed.

    `more` has budgets from emulated runs that drew other luck. They are asked for, and added, when an error is just
    over the budget.
    """

    kind: Kind
    case: Case
    inputs: dict[str, Tensor]
    exact: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    units: dict[str, list[float]]
    budgets: dict[str, list[float]]
    more: Iterator[dict[str, list[float]]] = iter(())

    def octaves(self, name: str) -> Iterator[tuple[tuple, float, float]]:
        """Indices, unit and budget of what is judged apart."""
        return zip(parts(self.kind, name, self.exact[name]), self.units[name], self.budgets[name], strict=True)

    def judge(self, name: str, x: Tensor, against: Tensor | None = None) -> tuple[float, float]:
        """(error, budget) of a quantity's worst octave; the error is infinite where x is not finite."""
        error, budget = self.compared(name, x, self.exact[name] if against is None else against)
        while against is None and budget < error < NEAR * budget and (found := next(self.more, None)):
            for n, budgets in found.items():
                self.budgets[n] = [max(pair) for pair in zip(self.budgets[n], budgets, strict=True)]
            error, budget = self.compared(name, x, self.exact[name])
        return error, budget

    def compared(self, name: str, x: Tensor, exact: Tensor) -> tuple[float, float]:
        """(error, budget) of the worst octave, as far as budgets are known."""
        off = (x.double() - exact).abs().nan_to_num(math.inf, math.inf)
        pairs = [(off[s].max().item() / one if off.numel() else 0.0, allowed) for s, one, allowed in self.octaves(name)]
        return max(pairs, key=lambda p: p[0] / p[1])

    def band(self, name: str) -> Tensor:
        """The largest deviation allowed, for every element."""
        band = torch.zeros_like(self.exact[name])
        for s, one, allowed in self.octaves(name):
            band[s] = allowed * one
        return band


def problems(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str = "log", device: str = "cpu"
) -> list[Problem]:
    """Cases worked out, from a seed: those of the same sizes side by side, which is faster.

    Cases that differ in how a kernel is called share the numbers.
    """
    keys = [(mechanism, plain(case), dtype, seed, form, device) for case in cases]
    found = {key: WORKED_OUT[key] for key in keys if key in WORKED_OUT}
    groups: dict[Case, list[tuple]] = {}
    for key in dict.fromkeys(keys):
        if key not in found:
            groups.setdefault(shape(key[1]), []).append(key)
    for group in groups.values():
        found |= zip(group, worked_out(mechanism, [key[1] for key in group], dtype, seed, form, device), strict=True)
    WORKED_OUT.update(found)
    while len(WORKED_OUT) > KEPT:  # the oldest first
        WORKED_OUT.pop(next(iter(WORKED_OUT)), None)
    return [as_asked(found[key], case) for key, case in zip(keys, cases, strict=True)]


@lru_cache(maxsize=KEPT)
def as_asked(worked: Problem, case: Case) -> Problem:
    """A problem under the case's own name and way of calling; the same one for the same case."""
    return replace(worked, case=case)


def plain(case: Case) -> Case:
    """A case without what does not change its numbers."""
    strides = case.strides if case.strides == "expanded" else "contiguous"
    return replace(case, name="", strides=strides, frozen=False, pull=1.0, index="int32", telling=False, often=False)


def shape(case: Case) -> Case:
    """The case without the values of its inputs: cases that share it can be worked out side by side."""
    values = {"gate": MILD, "floor": None, "size": 1.0, "loud": None, "zeros": False}
    values |= {"strength": 1.0, "beta": None, "alike": 0.0, "keys": 1.0, "found": False}
    return replace(plain(case), strides="contiguous", **values)


def worked_out(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str, device: str
) -> list[Problem]:
    """Problems of one :func:`shape`.

    Everything lies on the CPU, wherever the kernel runs, and is made there of many small operations, which a GPU
    would be late with; but attention over thousands of keys is few and large ones, and made on the `device`.
    """
    kind, like = MECHANISMS[mechanism], cases[0]
    given = [inputs(mechanism, case, dtype, seed, form) for case in cases]
    device = device if kind.cache and like.T > FEW else "cpu"
    exact, budgets = work_out(kind, like, dtype, given, device)
    dtypes = {n: held(kind, n, like, dtype) for n in exact}
    made = []
    for i, (case, x) in enumerate(zip(cases, given, strict=True)):
        own = {}
        for n, y in exact.items():
            axis = kind.head_axis(n)
            own[n] = y.unflatten(axis, (len(cases), -1)).select(axis, i).cpu().contiguous()
        units = {n: [unit(y[s]) for s in parts(kind, n, y)] for n, y in own.items()}
        own_budgets = {n: y[:, i].tolist() for n, y in budgets.items()}
        made.append(Problem(kind, case, x, own, dtypes, units, own_budgets, redrawn(kind, like, dtype, x, own, device)))
    return made


def redrawn(
    kind: Kind, case: Case, dtype: torch.dtype, given: dict[str, Tensor], exact: dict[str, Tensor], device: str
) -> Iterator[dict[str, list[float]]]:
    """Budgets of one problem by other luck, again and again."""
    given, exact = ({n: y.to(device) for n, y in x.items()} for x in (given, exact))
    for again in range(1, ROUNDS):
        yield {n: y[:, 0].tolist() for n, y in budgets_of(kind, case, dtype, given, exact, 1, again).items()}
