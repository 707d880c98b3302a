"""Where a kernel is wrong: its first wrong element, what failing cases share, the smallest one, and its bounds.

The cases of a ladder are far apart: a kernel that is right with 5 heads and wrong with 101 may be wrong from 9 on. So
the smallest case that fails is made plainer and smaller as long as it still fails. Each sentence says what was seen in
two calls that differ in one thing. A reader takes it for more, so it is said only if no other case speaks against it.
How many calls are made depends on their sizes, not on the time that they take (appendix "Check your kernel").
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._cases import MILD, SUB, UNIFORM, C, Case, but_for_gates, inputs
from ._claims import up
from ._kernel import Finding
from ._mechanisms import SHORT, Kind
from ._run import Results, Trial
from .oracle import Problem, evaluate, numbers, parts

if TYPE_CHECKING:  # a report shows its maps in the shades of this module
    from ._report import Report

# -- in a tensor ---------------------------------------------------------------------------------
SHADES = " .:-=+*#%@"  # within budget, then one more for every half power of ten
TIME = {"T", "T0"}  # axes of tokens, and of those in a cache
MOST = 4  # values of one kind that are worth a line


def shaded(excess: Tensor, down: int, along: int) -> list[str]:
    """A plane of errors over their budgets in shades, the worst of each block, `down` x `along` of them at most."""
    for dim, most in enumerate((down, along)):
        parts = excess.split(-(-excess.shape[dim] // most), dim)
        excess = torch.stack([part.amax(dim) for part in parts], dim)
    levels = (excess.clamp_min(1).log10() * 2).clamp_max(8).int() + (excess > 1)
    return ["".join(SHADES[i] for i in line) for line in levels.tolist()]


def affected(wrong: Tensor, axes: list[str], ends: tuple[int, ...]) -> str:
    """The chunks, heads, ... that contain all wrong elements; an axis is left out if every part of it has some."""
    places = []

    def tell(axis: str, here: list[int], size: int) -> None:
        if len(here) == size:
            return
        which = ", ".join(map(str, here[:MOST])) + ", ..." * (len(here) > MOST)
        if len(here) == here[-1] - here[0] + 1 > 2:
            which = f"{here[0]} to {here[-1]}"
        plural = "" if len(here) == 1 else "es" if axis == "batch" else "s"
        places.append(f"{axis}{plural} {which} of {size}")

    for dim, axis in enumerate(axes):
        here, size = wrong.transpose(0, dim).flatten(1).any(1).nonzero().flatten().tolist(), wrong.shape[dim]
        if axis == "chunk":
            starts = [(t - ends[bisect_right(ends, t) - 1]) // C for t in range(size)]
            some = [n for n, (a, b) in enumerate(pairwise(ends)) if a < b]  # nothing is wrong where no tokens are
            inside = sorted({bisect_right(ends, t) - 1 for t in here})
            if len(ends) > 2 and inside != some:
                tell("sequence", inside, len(ends) - 1)
            here, size = sorted({starts[t] for t in here}), max(starts) + 1
        tell(axis, here, size)
    return "; ".join(places)


def locate(p: Problem, name: str, x: Tensor) -> dict:
    """The place where a quantity is wrong: its first element in time, the parts, a line of time (or K), a plane.

    In a packed sequence chunks are counted from its own first token.
    """
    excess = (x.double() - p.exact[name]).abs() / p.band(name)
    excess = excess.nan_to_num(nan=math.inf, posinf=math.inf)
    if TIME & {*p.kind.axes(name)}:
        t = int((excess.amax([d for d in range(excess.ndim) if d != 1]) > 1).nonzero()[0])
        b, h, *channel = (int(i) for i in (excess[:, t] > 1).nonzero()[0])
        where, own, batch = {"t": t}, t, {"batch": b}
        if p.case.ends:
            n = bisect_right(p.case.ends, t) - 1
            own, batch = t - p.case.ends[n], {}
            where |= {"sequence": n, "token": own}
        where |= {"chunk": own // C, "sub-chunk": own % C // SUB, **batch, "head": h}
        where |= {"channel": channel[0]} if channel else {}
        axes, names = ["t", "channel" if channel else "head"], ["batch", "chunk", "head", "channel"]
        plane, line = excess.amax((0, 2) if channel else 0).T, excess.transpose(0, 1).flatten(1)
    else:
        n, h, i, j = (int(i) for i in (excess > 1).nonzero()[0])
        where, axes = {"sequence": n, "head": h, "row": i, "column": j}, ["column", "row"]
        plane, line, names = excess.amax((0, 1)), excess.movedim(2, 0).flatten(1), [*where]
    grid = {"axes": axes, "size": [*plane.shape[::-1]], "cells": shaded(plane, 32, 64)}
    only = affected(excess > 1, names[: excess.ndim], p.case.ends or (0,))
    return {"where": where, "only": only, "map": shaded(line.amax(1)[None], 1, 60)[0], "grid": grid}


# -- words for cases -----------------------------------------------------------------------------
def longest(case: Case) -> int:
    """The tokens of a case's longest sequence."""
    return max(b - a for a, b in pairwise(case.ends or (0, case.T)))


class Size(NamedTuple):
    """A number that a case has, and nouns for one of it and for several."""

    of: Callable[[Case], int]
    one: str
    several: str

    def count(self, n: int, where: str = "") -> str:
        return f"{n} {self.one if n == 1 else self.several}{where}"


COUNTS = {
    "T": Size(longest, "token", "tokens"),
    "N": Size(lambda c: len(c.ends or (0,)) - 1, "packed sequence", "packed sequences"),
    "H": Size(lambda c: c.H, "head", "heads"),
    "groups": Size(lambda c: c.groups, "value head of a key head", "value heads of a key head"),
    "K": Size(lambda c: c.K, "channel of keys", "channels of keys"),
    "V": Size(lambda c: c.V, "channel of values", "channels of values"),
    "B": Size(lambda c: c.B, "batch entry", "batch entries"),
    "past": Size(lambda c: c.past if c.state else 0, "token in the cache", "tokens in the cache"),
}


class Trait(NamedTuple):
    """The plain value of a field of a case; words for any other, and for the plain one unless it is "without" them."""

    plain: object
    words: Callable[[Case], str] | None = None
    none: str = ""


TRAITS = {  # in the order in which a failing case is made plainer
    "strides": Trait("contiguous", lambda c: f"{c.strides} strides"),
    "other": Trait("", lambda c: c.other and f"{c.other} in its own dtype"),
    "size": Trait(1.0, lambda c: f"values of size {c.size:g}"),
    "loud": Trait(None, lambda c: "loud tokens" * (c.loud is not None)),
    "quiet": Trait(None, lambda c: "quiet keys" * (c.quiet is not None)),
    "peak": Trait(None, lambda c: "one high score" * (c.peak is not None)),
    "optional": Trait(False, lambda c: "gates on values" * c.optional),
    "pull": Trait(1.0, lambda c: f"a loss of size {c.pull:g}"),
    "floor": Trait(None),
    "scale": Trait(None, lambda c: "" if c.scale is None else f"a scale of {c.scale:g} given"),
    "strength": Trait(1.0, lambda c: f"strengths below {c.strength:g}"),
    "beta": Trait(
        None, lambda c: f"random strengths below {c.strength:g}" if c.beta is None else f"strengths of {c.beta:g}"
    ),
    "alike": Trait(0.0, lambda c: f"keys of correlation {c.alike:g}"),
    "keys": Trait(1.0, lambda c: f"keys of length {c.keys:g}"),
    "found": Trait(False, lambda c: "values that the keys find" * c.found),
    "groups": Trait(1),
    "ends": Trait(None, lambda c: "cu_seqlens" * (c.ends is not None)),
    "index": Trait("int32", lambda c: f"cu_seqlens of {c.index}" * (c.ends is not None)),
    "frozen": Trait(False),
    "loss": Trait("both", lambda c: f"a loss of {c.loss}"),
    "reads": Trait(None, lambda c: "a loss of some tokens only" * (c.reads is not None), "a loss of all tokens"),
    "zeros": Trait(False, lambda c: "an initial state of zeros" * c.zeros),
    "past": Trait(9),
    "state": Trait(False, lambda c: "an initial state" * c.state, "no initial state"),
    "gate": Trait(MILD, lambda c: f"gates {c.gate}"),
}
WORDED = {name: trait for name, trait in TRAITS.items() if trait.words}


# -- among cases ---------------------------------------------------------------------------------
TO_HAVE = [  # words that may follow "have"
    *(lambda c, it=it: it.words(c) or it.none for name, it in WORDED.items() if name not in ("ends", "scale")),
    lambda c: "no scale given" if c.scale is None else "a scale given",
    lambda c: "K = V" if c.K == c.V else "K and V that differ",
]
CHANCE = 0.05  # a trait that as many random cases would share with less probability is worth a line


def by_gates(failing: Sequence[Case], passing: Sequence[Case], names: Sequence[str] = ()) -> str:
    """From which gates on cases fail, if no weaker ones do, and which quantities `names`; empty if that does not hold.

    Only cases whose gates are all alike, or mild, count. One that fails and one that passes must differ in them only.
    """
    sides = [[c for c in some if c.gate in UNIFORM] for some in (failing, passing)]
    wrong, right = ({UNIFORM.index(c.gate) for c in some} for some in sides)
    calls = [{but_for_gates(c) for c in some} for some in sides]
    if not calls[0] & calls[1] or min(wrong) <= max(right):
        return ""
    stronger = " and stronger" if min(wrong) < len(UNIFORM) - 1 else ""
    only = f"; only {' and '.join(names)} {'is' if len(names) == 1 else 'are'} wrong" if 0 < len(names) <= 2 else ""
    return f"Wrong with gates {UNIFORM[min(wrong)]}{stronger}, right with gates {UNIFORM[max(right)]} and weaker{only}"


def traits(failing: Sequence[Case], passing: Sequence[Case]) -> tuple[list[str], list[str]]:
    """Traits that all failing cases have: those that no other has, and those that they hardly share by chance."""
    only, also = [], []
    if not passing:
        return only, also
    for name in ("T", "N", "H", "groups", "K", "V"):
        size, where = COUNTS[name], " in a sequence" * (name == "T")
        wrong, right = ([size.of(c) for c in some] for some in (failing, passing))
        if min(wrong) > max(right):
            only.append(f"more than {size.count(max(right), where)}" if max(right) else size.several)
        if max(wrong) < min(right):
            only.append(f"fewer than {size.count(min(right), where)}" if min(right) > 1 else f"no {size.several}")
    for of in TO_HAVE:
        wrong, right = ([of(c) for c in some] for some in (failing, passing))
        told = all(wrong) and any(right) and not {*wrong} & {*right}
        if told and len({*wrong}) <= MOST:
            only.append(" or ".join(dict.fromkeys(wrong)))
        some = [x for x in wrong + right if x]  # of packed cases alone, if only they have it
        share = some.count(wrong[0]) / max(len(some), 1)
        if not told and wrong[0] and len({*wrong}) == 1 and share ** len(wrong) < CHANCE:
            also.append(wrong[0])
    return only, also


def common(failing: Sequence[Case], passing: Sequence[Case]) -> list[str]:
    """Sentences on the :func:`traits`."""
    had = zip(("Only these have", "All failing cases have"), traits(failing, passing), strict=True)
    return [f"{who} {'; '.join(what)}" for who, what in had if what]


def by_verdict(report: Report) -> tuple[list[Case], list[Case]]:
    """The cases that fail and those that pass, if several fail; else none."""
    failing = {*report.failing}
    passing = {row.case for row in report.rows if row.status == "passed"} - failing
    names = (failing, passing) if len(failing) > 1 else ((), ())
    return tuple([report.cases[n] for n in report.cases if n in some] for some in names)


def in_common(report: Report, kind: Kind) -> list[str]:
    """Sentences on the traits that all failing cases share, if several fail."""
    sides = by_verdict(report)
    wrong = [*dict.fromkeys(row.quantity for row in report.failures if row.error is not None)]
    gates = by_gates(*sides, wrong) if kind.named("gate") and not report.alone else ""
    return common(*sides) + [gates] * bool(gates)


def partly(report: Report, names: list[str]) -> str:
    """The places of a mistake that passing cases do not show: traits of failing cases, and where those are wrong."""
    having = "; ".join(traits(*by_verdict(report))[0])
    failed = [row for name in names for row in report.failures if row.case == name and row.where]
    outputs = [row for row in failed if not row.quantity.startswith("d")]
    rows = outputs or failed  # a wrong output makes gradients wrong elsewhere
    rows = rows if all(row.only for row in rows) else []
    where = f"only in {rows[0].only} ({rows[0].case})" if rows else ""
    if having and not report.measured:
        return f", only with {having}{where and f'; there {where}'}"
    passing = len(report.covered) - len(report.failing)
    return where and f", {where}" or (f", but not in {passing} other cases" if passing else "")


# -- the smallest case ---------------------------------------------------------------------------
def sized(kind: Kind, c: Case, name: str) -> tuple[int, Callable[[int], Case]] | None:
    """A size of a case, and the same case with other sizes; None where it has no such size to choose."""
    if name == "N":
        if not c.ends or len(c.ends) <= 2:
            return None
        step = c.ends[-1] - c.ends[-2] or 1

        def packs(n: int) -> Case:
            ends = (*c.ends[: n + 1], *(c.ends[-1] + step * i for i in range(1, n + 2 - len(c.ends))))
            return replace(c, ends=ends, T=max(1, ends[-1]))

        return len(c.ends) - 1, packs
    if name == "T" and c.reads:  # with fewer tokens others would be in the loss, or none
        return None
    if name == "T" and c.ends:
        return (c.T, lambda n: replace(c, ends=(0, n), T=n)) if len(c.ends) == 2 else None
    no_cache = name == "past" and not (c.state and kind.cache)
    if no_cache or name == "groups" and not kind.mechanism.multiples or name == "B" and c.ends:
        return None
    return getattr(c, name), lambda n: replace(c, **{name: n})


def turn(low: int, high: int, holds: Callable[[int], bool]) -> tuple[int, int]:
    """Neighbours between `low`, for which it does not hold, and `high`, for which it does: one of each."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def least(sizes: Callable[[int], Case], n: int, fails: Callable[[Case], bool]) -> Case:
    """The smallest size that fails, if all larger ones do; n fails."""
    if n == 1 or fails(sizes(1)):
        return sizes(1)
    return sizes(turn(1, n, lambda m: fails(sizes(m)))[1])


def smaller(kind: Kind, case: Case, fails: Callable[[Case], bool]) -> Iterator[Case]:
    """A failing case, and again and again one that is plainer or smaller and still fails."""
    yield case
    for _ in range(2):
        before = case
        for name, trait in TRAITS.items():
            plainer = replace(case, **{name: trait.plain})
            if plainer != case and fails(plainer):
                yield (case := plainer)
        for name in ("N", "groups", "B", "H", "K", "V", "T", "past"):
            if size := sized(kind, case, name):
                yield (case := least(size[1], size[0], fails))
            if name == "N" and case.ends and len(case.ends) > 2:
                a, b = case.ends[-2:]
                last = replace(case, ends=(0, b - a), T=max(1, b - a))
                if b > a and fails(last):
                    yield (case := last)
        if case == before:
            return


# -- bounds --------------------------------------------------------------------------------------
TRIALS, MORE = 80, 40  # calls that look for the smallest case of a failure, and for its bounds
WORK, TOKEN = 2**26, 2**12  # numbers of the states in each of the two searches; as many as a token takes besides
PLAINLY = 10.0  # budgets of the failing case that a call must be off by to count as wrong
LARGER = {
    "T": (2, 3, 17, 64, 65, 129, 300),
    "past": (2, 16, 32, 64, 128),
    "H": (2, 5, 17, 70),
    "K": (2, 17, 64, 65, 130),
    "V": (2, 17, 64, 65, 130),
    "B": (2, 5),
}
FAR = 30.0  # times the largest error of right sizes that the least error of wrong ones must be: else it only grows


@dataclass(frozen=True)
class Statement:
    """A sentence on the smallest failing case, and which cases it calls wrong and right, if all else is alike."""

    text: str
    wrong: Callable[[Case], bool]
    right: Callable[[Case], bool]


def agreed(statements: list[Statement], smallest: Case, failing: Sequence[Case], passing: Sequence[Case]) -> list[str]:
    """The sentences that all cases agree with.

    No failing case may lie on the side that a sentence calls right. No passing case that has all that the smallest
    failing one has, or more of it, may lie on the wrong side of all sentences: then none of them is said.
    """
    statements = [it for it in statements if not any(it.right(case) for case in failing)]

    def more(case: Case) -> bool:
        sized = ("groups", "past", "state", "ends", "frozen")
        a, b = ([getattr(c, n) for n in TRAITS if n not in sized] + [c.ends is None] for c in (case, smallest))
        return a == b and all(it.of(case) >= it.of(smallest) for it in COUNTS.values()) and case.state >= smallest.state

    if any(more(case) and all(it.wrong(case) for it in statements) for case in passing):
        return []
    return [it.text for it in statements]


def listed(numbers: Iterable[int], size: Size) -> str:
    *some, last = sorted(numbers)
    return f"{', '.join(map(str, some))}{' and ' * bool(some)}{size.count(last)}"


def plainly(p: Problem, results: Results) -> bool:
    """Whether a quantity is wrong by so much that it counts as wrong in other calls, too."""
    return any(not p.in_budgets(n, x) <= PLAINLY for n, x in results.items() if x is not None)


class Spent(Exception):
    """No more calls."""


class Bounds:
    """A failing case, and calls of the same kernel on others like it.

    `wrong` are the quantities that fail in it; another case fails if one of them is clearly wrong there.
    """

    def __init__(self, examiner, p: Problem, wrong: frozenset[str]):
        self.examiner, self.wrong = examiner, wrong
        self.kind = p.kind
        self.allowed = {n: PLAINLY * max(budgets, default=0.0) for n, budgets in p.budgets.items()}
        self.left, self.work = TRIALS, WORK
        self.known: dict[tuple, float] = {}
        self.cut = False  # whether calls were spent before the end

    def problem(self, case: Case, other: int = 0) -> Problem:
        """A case with its exact quantities, and for budgets those of the failing one; `other` is added to the seed."""
        k, dtype = self.examiner.kernel, self.examiner.dtype
        x = inputs(k.mechanism, case, dtype, self.examiner.seed + other, k.how.gate)
        exact = evaluate(self.kind.oracle, self.kind, x, case)
        exact = {n: y.contiguous() for n, y in exact.items() if y is not None}
        budgets = {n: [self.allowed.get(n, 1.0)] * len(parts(self.kind, n, y)) for n, y in exact.items()}
        return Problem(self.kind, case, x, dtype, exact, budgets)

    def fails(self, case: Case) -> bool:
        """Whether one of the quantities is wrong; a call that gives no result does not count as wrong."""
        return self.error(case) > 1

    def right(self, case: Case) -> bool:
        """Whether all of the quantities are right; a call that gives no result does not count as right either."""
        return self.error(case) <= 1

    def error(self, case: Case, other: int = 0, apart: str | None = None) -> float:
        """The largest error of the quantities, in errors that count as wrong; `other` is added to the seed.

        NaN if the kernel does not claim the case, or gives no result. A tensor `apart` alone has the case's strides.
        """
        key = (case, apart, other)
        if key in self.known:
            return self.known[key]
        if case.T < 1 or not self.examiner.may_call(case):
            return self.known.setdefault(key, math.nan)
        tokens = case.T if case.T <= SHORT else 0.4 * case.T  # chunks take less time than the recurrence
        self.left, self.work = self.left - 1, self.work - numbers(case) - TOKEN * tokens
        if self.left < 0 or self.work < 0:
            self.cut = True
            raise Spent
        p = self.problem(case, other)
        results = Trial(self.examiner.kernel, p, apart).as_usual()
        results = {} if isinstance(results, Finding) else results
        judged = [n for n in self.wrong if results.get(n) is not None and n in p.exact]
        return self.known.setdefault(key, max((p.in_budgets(n, results[n]) for n in judged), default=math.nan))

    def bound(self, c: Case, name: str) -> Statement | None:
        """From which size on, up to which, or at which sizes the kernel is wrong; None if at every size tried."""
        size = sized(self.kind, c, name)
        if size is None:
            return None
        n, sizes = size
        if n > 1:
            if self.fails(sizes(n - 1)):
                return None
            tries = (n + 1,) if name == "N" else (n + 1, n + 2, up(n, 16), up(n, 64), 2 * n - 1, 2 * n, 2 * n + 1)
            return self.between(sizes, sorted({n - 1, n, *tries}), name)
        right = next((m for m in LARGER.get(name, ()) if self.right(sizes(m))), None)
        if right is None:
            return None
        low, high = turn(1, right, lambda m: not self.fails(sizes(m)))
        return self.between(sizes, sorted({1, low, high, high + 1, 2 * high, right}), name)

    def between(self, sizes: Callable[[int], Case], tries: list[int], name: str) -> Statement | None:
        """Tell wrong sizes from right ones among those tried; None unless every wrong one is wrong by far."""
        size = COUNTS[name]
        errors = {n: error for n in tries if not math.isnan(error := self.error(sizes(n)))}
        tries = [*errors]
        wrong, right = ([n for n in tries if (errors[n] > 1) is bad] for bad in (True, False))
        if not right or min(errors[n] for n in wrong) < FAR * max(errors[n] for n in right):
            return None
        tried = f" ({', '.join(map(str, tries))} tried)"
        if min(wrong) > max(right):
            words = f"wrong from {size.count(min(wrong))} on, right with {max(right)}{tried}"
            return Statement(words, lambda c: size.of(c) >= min(wrong), lambda c: size.of(c) <= max(right))
        if max(wrong) < min(right):
            least = f"wrong {'up to' if max(wrong) > 1 else 'with'} {size.count(max(wrong))}"
            words = f"{least}, right with {min(right)}{tried}"
            return Statement(words, lambda c: size.of(c) <= max(wrong), lambda c: size.of(c) >= min(right))
        if any((self.error(sizes(n), 1) > 1) is not (errors[n] > 1) for n in tries):
            return None  # the data decide, not the size
        words = f"wrong with {listed(wrong, size)}, right with {listed(right, size)}"
        return Statement(words, lambda c: size.of(c) in wrong, lambda c: size.of(c) in right)

    def without(self, c: Case, name: str) -> Statement | None:
        """A trait without which the kernel is right; None if it is wrong, here or in failing calls of other sizes."""
        plain, with_it, none = WORDED[name]
        if getattr(c, name) == plain:
            return None
        failed = [case for (case, apart, _), error in self.known.items() if apart is None and error > 1]
        failed = sorted(failed, key=lambda case: case.volume)
        like = [case for case in failed if getattr(case, name) == getattr(c, name)]
        others = [next((case for case in like if it.of(case) != it.of(c)), c) for it in COUNTS.values()]
        usual = replace(c, **{name: plain})
        if not self.right(usual) or any(self.fails(replace(case, **{name: plain})) for case in dict.fromkeys(others)):
            return None
        right = f"with {with_it(usual)}" if with_it(usual) else "without"
        words = f"wrong with {with_it(c)}, right {right}"

        def alike(case: Case) -> bool:
            if name in ("beta", "strength"):  # the two say together how strong writes are
                return case.beta is None and case.strength <= usual.strength
            return getattr(case, name) == plain

        return Statement(words, lambda case: not alike(case), alike)

    def alone(self, c: Case) -> str:
        """Name the tensors of which one alone with the case's strides is enough to fail; empty if none is."""
        if c.strides == "contiguous":
            return ""
        tensors = Trial(self.examiner.kernel, self.problem(c)).x
        enough = [n.replace("d ", "d") for n in tensors if self.error(c, apart=n) > 1]
        where = f"wrong where {' or '.join(enough)} alone has {c.strides} strides and all else is contiguous"
        return where if enough else ""

    def statements(self, case: Case, failing: Sequence[Case], passing: Sequence[Case]) -> tuple[Case | None, list[str]]:
        """The smallest case found, and sentences on it; nothing if the case does not fail when it is called again.

        `failing` and `passing` are all cases that were seen: a sentence that one of them contradicts is left out.
        """
        c, said, alone = None, [], ""
        with suppress(Spent):
            if not self.fails(case):
                return None, []
            for smallest in smaller(self.kind, case, self.fails):
                c = smallest
        if c is None:
            return None, []
        self.left, self.work = self.left + MORE, self.work + WORK
        with suppress(Spent):
            for name in ("N", "T", "past", "B", "H", "groups", "K", "V"):
                said += filter(None, [self.bound(c, name)])
            needed = {name: s for name in WORDED if (s := self.without(c, name))}
            said += needed.values()
            alone = "" if "other" in needed else self.alone(c)
            if not (c.state or self.kind.cache) and self.right(replace(c, state=True)):  # a cache adds keys
                text = "wrong without an initial state, right with one"
                said.append(Statement(text, lambda case: not case.state, lambda case: case.state))
        return c, agreed(said, c, failing, passing) + [alone] * bool(alone)
