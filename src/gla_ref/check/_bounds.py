"""From which size on a kernel is wrong, and with which options: found by calling it (appendix "Check your kernel").

The cases of a ladder are far apart: a kernel that is right with 5 heads and wrong with 101 may be wrong from 9 on. So
the smallest case that fails is made plainer and smaller as long as it still fails. Each sentence says what was seen in
two calls that differ in one thing. A reader takes it for more, so it is said only if no other case speaks against it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..rounding import unit
from ._budgets import Problem
from ._cases import MILD, Case, held, inputs
from ._claims import up
from ._common import Clock, longest
from ._kernel import Finding
from ._runner import Found, Trial, attempt
from ._shrink import PLAIN
from .oracle import evaluate, parts

TRAITS = tuple(n for n, _ in (*PLAIN, ("gate", MILD)) if n not in ("groups", "past", "state", "ends", "frozen"))
TRIALS, SECONDS = 120, 20.0  # calls that look for the bounds of a failure, and the time that they may take
PLAINLY = 10.0  # budgets of the failing case that a call must be off by to count as wrong
NOUNS = {"T": "token", "H": "head", "B": "batch entry", "K": "channel of keys", "V": "channel of values"}
NOUNS |= {"groups": "value head of a key head", "past": "token in the cache", "N": "packed sequence"}
LARGER = {
    "T": (2, 3, 17, 64, 65, 129, 300),
    "past": (2, 16, 32, 64, 128),
    "H": (2, 5, 17, 70),
    "K": (2, 17, 64, 65, 130),
    "V": (2, 17, 64, 65, 130),
    "B": (2, 5),
}
LIGHT = (7, 17, 33, 65, 145)  # tokens of calls in which mistakes are told apart quickly
FAR = 30.0  # times the error of every size that is right must that of one that is wrong be
WITH = {  # traits of a case that is not plain
    "strides": lambda c: f"{c.strides} strides",
    "other": lambda c: f"{c.other} in its own dtype",
    "size": lambda c: f"values of size {c.size:g}",
    "loud": lambda c: "loud tokens",
    "pull": lambda c: f"a loss of size {c.pull:g}",
    "scale": lambda c: f"a scale of {c.scale:g} given",
    "strength": lambda c: f"strengths up to {c.strength:g}",
    "beta": lambda c: f"strengths of {c.beta:g}",
    "alike": lambda c: f"keys of correlation {c.alike:g}",
    "keys": lambda c: f"keys of length {c.keys:g}",
    "found": lambda c: "values that the keys find",
    "ends": lambda c: "cu_seqlens",
    "index": lambda c: f"cu_seqlens of {c.index}",
    "loss": lambda c: f"a loss of {c.loss}",
    "reads": lambda c: "a loss of some tokens only",
    "zeros": lambda c: "an initial state of zeros",
    "state": lambda c: "an initial state",
    "gate": lambda c: f"gates {c.gate}",
}

USUAL = {  # words for a plain case, where "without" would be more than was seen
    "strides": lambda c: "contiguous strides",
    "size": lambda c: "values of size 1",
    "pull": lambda c: "a loss of size 1",
    "strength": lambda c: f"strengths below {c.strength:g}",
    "beta": lambda c: f"random strengths below {c.strength:g}",
    "alike": lambda c: "keys of correlation 0",
    "keys": lambda c: "keys of length 1",
    **{name: WITH[name] for name in ("index", "loss", "gate")},
}
SIZES = {  # as sentences count them
    "T": longest,
    "H": lambda c: c.H,
    "B": lambda c: c.B,
    "K": lambda c: c.K,
    "V": lambda c: c.V,
    "groups": lambda c: c.groups,
    "past": lambda c: c.past if c.state else 0,
    "N": lambda c: len(c.ends or (0, c.T)) - 1,
}


@dataclass(frozen=True)
class Said:
    """A sentence on the smallest failing case, and which cases lie on its two sides, if all else is alike."""

    words: str
    wrong: Callable[[Case], bool]
    right: Callable[[Case], bool]


def agreed(said: Sequence[Said], smallest: Case, failing: Sequence[Case], passing: Sequence[Case]) -> list[str]:
    """The sentences that all cases agree with.

    No failing case may lie on the side that a sentence calls right. No passing case that has all that the smallest
    failing one has, or more of it, may lie on the wrong side of all sentences: then none of them is said.
    """
    said = [it for it in said if not any(it.right(case) for case in failing)]

    def more(case: Case) -> bool:
        a, b = ({n: getattr(c, n) for n in TRAITS} | {"ends": c.ends is None} for c in (case, smallest))
        return a == b and all(of(case) >= of(smallest) for of in SIZES.values()) and case.state >= smallest.state

    if any(more(case) and all(it.wrong(case) for it in said) for case in passing):
        return []
    return [it.words for it in said]


def plural(noun: str, n: int) -> str:
    if n == 1:
        return f"{n} {noun}"
    head, *rest = noun.split(" of ", 1)
    head = (
        head[:-1] + "ies"
        if head.endswith("y")
        else head.replace("token in", "tokens in")
        if " in " in head
        else head + "s"
    )
    return f"{n} {' of '.join([head, *rest])}"


def listed(numbers: Iterable[int], noun: str) -> str:
    *some, last = sorted(numbers)
    return f"{', '.join(map(str, some))}{' and ' * bool(some)}{plural(noun, last)}"


def plainly(p: Problem, found: Found) -> bool:
    """Whether a quantity is wrong by so much that it counts as wrong in other calls, too."""
    judged = (p.judge(n, x) for n, x in found.items() if x is not None)
    return any(not error <= PLAINLY * allowed for error, allowed in judged)


class Spent(Exception):
    """No more calls, or no more time."""


class Bounds:
    """A failing case, and calls of the same kernel on others like it.

    `wrong` are the quantities that fail in it; another case fails if one of them is clearly wrong there.
    """

    def __init__(self, examiner, p: Problem, wrong: frozenset[str], clock: Clock):
        self.examiner, self.wrong, self.clock = examiner, wrong, clock
        self.kind = p.kind
        self.allowed = {n: PLAINLY * max(budgets, default=0.0) for n, budgets in p.budgets.items()}
        self.end, self.left = time.monotonic() + SECONDS, TRIALS
        self.known: dict[tuple, dict[str, float]] = {}
        self.cut = False  # whether calls or time were spent before the end
        self.apart: str | None = None  # the one tensor that has the case's strides; None for all

    def problem(self, case: Case, other: int = 0) -> Problem:
        """A case with its exact quantities, and for budgets those of the failing one; `other` is added to the seed."""
        k, dtype = self.examiner.kernel, self.examiner.dtype
        x = inputs(k.mechanism, case, dtype, self.examiner.seed + other, k.how.gate)
        exact = evaluate(self.kind.oracle, self.kind, x, case)
        exact = {n: y.contiguous() for n, y in exact.items() if y is not None}
        units = {n: [unit(y[s]) for s in parts(self.kind, n, y)] for n, y in exact.items()}
        budgets = {n: [self.allowed.get(n, 1.0)] * len(ones) for n, ones in units.items()}
        return Problem(self.kind, case, x, exact, {n: held(self.kind, n, case, dtype) for n in exact}, units, budgets)

    def fails(self, case: Case) -> bool:
        """Whether one of the quantities is wrong; a call that gives no result does not count as wrong."""
        return self.error(case) > 1

    def right(self, case: Case) -> bool:
        """Whether all of the quantities are right; a call that gives no result does not count as right either."""
        return self.error(case) <= 1

    def error(self, case: Case, other: int = 0) -> float:
        """The largest of the :meth:`errors`; NaN if there are none."""
        return max(self.errors(case, other).values(), default=math.nan)

    def errors(self, case: Case, other: int = 0) -> dict[str, float]:
        """The errors of the quantities, in errors that count as wrong; `other` is added to the seed.

        There are none if the kernel does not claim the case, or gives no result.
        """
        key = (case, self.apart, other)
        if key in self.known:
            return self.known[key]
        k, claim = self.examiner.kernel, self.examiner.claim
        rows, asked = self.examiner.asked(case)
        if case.T < 1 or rows or asked is None or claim.fit(case, self.kind) != case:
            return self.known.setdefault(key, {})
        self.left -= 1
        if self.left < 0 or time.monotonic() > self.end or self.clock.spent():
            self.cut = True
            raise Spent
        p = self.problem(case, other)
        trial = Trial(k, p, self.apart)
        found = attempt(k.seconds, trial.run, not k.how.forward_only, trial.usual)
        if isinstance(found, Finding):
            return self.known.setdefault(key, {})
        judged = {n: p.judge(n, found[n]) for n in self.wrong if found.get(n) is not None and n in p.exact}
        return self.known.setdefault(key, {n: error / allowed for n, (error, allowed) in judged.items()})

    def lighter(self, case: Case) -> Iterator[Case]:
        """Cases with fewer tokens, batch entries and heads in which all of the quantities are wrong, small ones first.

        Each has at most half of the case's tokens, in all batch entries and heads.
        """
        if case.reads:  # other tokens would be in the loss
            return
        tried = {case}
        for T, n in product(LIGHT, (1, 2, max(case.B, case.H))):
            ends = case.ends and (0, T // 2, T)
            few = replace(case, B=min(case.B, n), T=T, H=min(case.H, n), ends=ends, loud=None, past=min(case.past, T))
            few = self.examiner.claim.fit(few, self.kind)
            if few is None or few in tried or 2 * few.B * few.T * few.H > case.B * case.T * case.H:
                continue
            tried.add(few)
            errors = self.errors(few)
            if {*errors} == self.wrong and all(error > 1 for error in errors.values()):
                yield few

    def least(self, case: Case, sizes: Callable[[int], Case], n: int) -> Case:
        """The size of the smallest case that fails, if all larger ones fail; n fails."""
        if n == 1:
            return case
        if self.fails(sizes(1)):
            return sizes(1)
        low, high = 1, n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fails(sizes(middle)) else (middle, high)
        return sizes(high)

    def smaller(self, case: Case) -> Iterator[Callable[[Case], Case]]:
        """Steps that make a case plainer or smaller where it still fails."""

        def plainer(c: Case, name: str, value: object) -> Case:
            new = replace(c, **{name: value})
            return new if new != c and self.fails(new) else c

        for name, value in (*PLAIN, ("gate", MILD)):
            yield lambda c, name=name, value=value: plainer(c, name, value)
        yield self.fewer_sequences
        for name in ("groups", "B", "H", "K", "V", "T", "past"):
            if name != "T" or not case.ends:
                yield lambda c, name=name: self.resized(c, name)
        yield self.shorter_sequences

    def resized(self, c: Case, name: str) -> Case:
        if name == "past" and not (c.state and self.kind.cache) or name == "T" and c.ends:
            return c
        return self.least(c, lambda n: replace(c, **{name: n}), getattr(c, name))

    def fewer_sequences(self, c: Case) -> Case:
        if not c.ends:
            return c
        c = self.least(c, lambda n: replace(c, ends=c.ends[: n + 1], T=max(1, c.ends[n])), len(c.ends) - 1)
        if len(c.ends) > 2:
            a, b = c.ends[-2:]
            last = replace(c, ends=(0, b - a), T=max(1, b - a))
            c = last if b > a and self.fails(last) else c
        return c

    def shorter_sequences(self, c: Case) -> Case:
        if not c.ends or len(c.ends) != 2:
            return c
        return self.least(c, lambda n: replace(c, ends=(0, n), T=n), c.T)

    def smallest(self, case: Case) -> Case:
        """A case from which no step leads on, or what is reached when the calls are spent."""
        try:
            for _ in range(2):
                before = case
                for step in self.smaller(case):
                    case = step(case)
                if case == before:
                    break
        except Spent:
            pass
        return case

    def sized(self, c: Case, name: str) -> tuple[int, Callable[[int], Case]] | None:
        """A size of a case, and the same case with other sizes."""
        if name == "N":
            if not c.ends or len(c.ends) <= 2:
                return None
            step = c.ends[-1] - c.ends[-2] or 1
            return len(c.ends) - 1, lambda n: replace(
                c,
                ends=(*c.ends[: n + 1], *(c.ends[-1] + step * i for i in range(1, n + 2 - len(c.ends)))),
                T=c.ends[n] if n < len(c.ends) else c.ends[-1] + step * (n + 1 - len(c.ends)),
            )
        if name == "T" and c.reads:  # with fewer tokens others would be in the loss, or none
            return None
        if c.ends and name == "T":
            return (c.T, lambda n: replace(c, ends=(0, n), T=n)) if len(c.ends) == 2 else None
        if (
            name == "past"
            and not (c.state and self.kind.cache)
            or name == "groups"
            and not self.kind.mechanism.multiples
        ):
            return None
        if name == "B" and c.ends:
            return None
        return getattr(c, name), lambda n: replace(c, **{name: n})

    def bound(self, c: Case, name: str) -> Said | None:
        """From which size on, up to which, or at which sizes the kernel is wrong; None if at every size tried."""
        it = self.sized(c, name)
        if it is None:
            return None
        n, sizes = it
        if n > 1:
            if self.fails(sizes(n - 1)):
                return None
            numbers = (n + 1,) if name == "N" else (n + 1, n + 2, up(n, 16), up(n, 64), 2 * n - 1, 2 * n, 2 * n + 1)
            return self.between(sizes, sorted({n - 1, n, *numbers}), name)
        right = next((m for m in LARGER.get(name, ()) if self.right(sizes(m))), None)
        if right is None:
            return None
        low, high = 1, right
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fails(sizes(middle)) else (low, middle)
        return self.between(sizes, sorted({1, low, high, high + 1, 2 * high, right}), name)

    def between(self, sizes: Callable[[int], Case], numbers: list[int], name: str) -> Said | None:
        """Which of some sizes are wrong and which are right; None unless all that is wrong is so by far."""
        noun, of = NOUNS[name], SIZES[name]
        errors = {n: error for n in numbers if not math.isnan(error := self.error(sizes(n)))}
        numbers = [*errors]
        wrong, right = ([n for n in numbers if (errors[n] > 1) is bad] for bad in (True, False))
        if not right or min(errors[n] for n in wrong) < FAR * max(errors[n] for n in right):
            return None
        tried = f" ({', '.join(map(str, numbers))} tried)"
        if min(wrong) > max(right):
            words = f"wrong from {plural(noun, min(wrong))} on, right with {max(right)}{tried}"
            return Said(words, lambda c: of(c) >= min(wrong), lambda c: of(c) <= max(right))
        if max(wrong) < min(right):
            least = f"wrong {'up to' if max(wrong) > 1 else 'with'} {plural(noun, max(wrong))}"
            words = f"{least}, right with {min(right)}{tried}"
            return Said(words, lambda c: of(c) <= max(wrong), lambda c: of(c) >= min(right))
        if any((self.error(sizes(n), 1) > 1) is not (errors[n] > 1) for n in numbers):
            return None  # the data decide, not the size
        words = f"wrong with {listed(wrong, noun)}, right with {listed(right, noun)}"
        return Said(words, lambda c: of(c) in wrong, lambda c: of(c) in right)

    def without(self, c: Case, name: str) -> Said | None:
        """A trait without which the kernel is right; None if it is wrong, here or in failing calls of other sizes."""
        value = (dict(PLAIN) | {"gate": MILD})[name]
        if getattr(c, name) == value:
            return None
        known = [(case, errors) for (case, apart, _), errors in self.known.items() if apart is None]
        failed = [case for case, errors in known if max(errors.values(), default=0.0) > 1]
        failed = sorted(failed, key=lambda case: case.B * case.T * case.H * case.K * case.V)
        like = [case for case in failed if getattr(case, name) == getattr(c, name)]
        others = [next((case for case in like if of(case) != of(c)), c) for of in SIZES.values()]
        usual = replace(c, **{name: value})
        if not self.right(usual) or any(self.fails(replace(case, **{name: value})) for case in dict.fromkeys(others)):
            return None
        right = f" with {USUAL[name](usual)}" if name in USUAL else " without"
        words = f"wrong with {WITH[name](c)}, right{right}"

        def alike(case: Case) -> bool:
            if name in ("beta", "strength"):  # the two say together how strong writes are
                return case.beta is None and case.strength <= usual.strength
            return getattr(case, name) == value

        return Said(words, lambda case: not alike(case), alike)

    def alone(self, c: Case) -> str:
        """Which tensors are enough to have the strides of a case, the others in order."""
        if c.strides == "contiguous":
            return ""
        enough = []
        for n in Trial(self.examiner.kernel, self.problem(c)).x:
            self.apart = n
            enough += [n.replace("d ", "d")] if self.fails(c) else []
        self.apart = None
        if not enough:
            return ""
        return f"wrong where {' or '.join(enough)} alone has {c.strides} strides and all else is contiguous"

    def said(self, case: Case, failing: Sequence[Case], passing: Sequence[Case]) -> tuple[Case | None, list[str]]:
        """The smallest case found, and sentences on it; nothing if the case does not fail when it is called again.

        `failing` and `passing` are all cases that were seen: a sentence that one of them contradicts is left out.
        """
        found: list[Said] = []
        alone = ""
        try:
            if not self.fails(case):
                return None, []
        except Spent:
            return None, []
        c = self.smallest(case)
        self.end, self.left = self.end + SECONDS / 2, self.left + TRIALS // 2
        try:
            for name in ("N", "T", "past", "B", "H", "groups", "K", "V"):
                found += [s] if (s := self.bound(c, name)) else []
            needed = {name: s for name in WITH if (s := self.without(c, name))}
            found += needed.values()
            alone = "" if "other" in needed else self.alone(c)
            if not (c.state or self.kind.cache) and self.right(replace(c, state=True)):  # a cache adds keys
                words = "wrong without an initial state, right with one"
                found.append(Said(words, lambda case: not case.state, lambda case: case.state))
        except Spent:
            pass
        return c, agreed(found, c, failing, passing) + [alone] * bool(alone)
