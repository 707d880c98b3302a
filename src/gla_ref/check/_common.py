"""What the cases that fail share, and how far the cases go (appendix "Check your kernel")."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from ._cases import GATES, MILD, Case

ONLY = "Only these have "  # how a sentence on traits begins that no passing case has
MOST = 4  # values of one kind that are worth a line


class Clock:
    """A number of seconds of CPU time, all threads together, and whether something was left out for want of them."""

    def __init__(self, seconds: float):
        self.seconds, self.end, self.cut = seconds, time.process_time() + seconds, False
        self.late = 0  # pieces of work that were left out, where somebody counts them

    def spent(self) -> bool:
        """Whether no time is left; it is asked before each piece of work that is then left out."""
        self.cut = self.cut or time.process_time() > self.end
        return self.cut


def longest(case: Case) -> int:
    """The tokens of a case's longest sequence."""
    ends = case.ends or (0, case.T)
    return max(b - a for a, b in zip(ends, ends[1:], strict=False))


NUMBERS = {  # in words that may follow "have", as those below
    "tokens in a sequence": longest,
    "packed sequences": lambda case: len(case.ends or (0,)) - 1,
    "heads": lambda case: case.H,
    "value heads of a key head": lambda case: case.groups,
    "channels of keys": lambda case: case.K,
    "channels of values": lambda case: case.V,
}
KINDS = (
    lambda case: "an initial state" if case.state else "no initial state",
    lambda case: "no scale given" if case.scale is None else "a scale given",
    lambda case: f"gates {case.gate}",
    lambda case: f"strengths below {case.strength:g}",
    lambda case: "random strengths" if case.beta is None else f"strengths of {case.beta:g}",
    lambda case: f"keys of correlation {case.alike:g}",
    lambda case: f"{case.strides} strides",
    lambda case: f"a loss of {case.loss}",
    lambda case: "a loss of some tokens only" if case.reads else "a loss of all tokens",
    lambda case: f"values of size {case.size:g}",
    lambda case: f"cu_seqlens of {case.index}" if case.ends else None,
    lambda case: "K = V" if case.K == case.V else "K and V that differ",
)
ONE = re.compile(r"s(?= |$)")  # of "tokens in a sequence", so that it can be one
CHANCE = 0.05  # that as many cases, drawn at random, would share a trait: below, it is worth a line


def but_for_gates(case: Case) -> Case:
    """A case without the things that choose no other code in a kernel: its name and its gates' values."""
    return replace(case, name="", gate=MILD, floor=None, telling=False, often=False)


LADDER = GATES[: GATES.index("-inf") + 1]  # gates that are all alike or mild, from weak to strong


def by_gates(failing: Sequence[Case], passing: Sequence[Case], names: Sequence[str] = ()) -> str:
    """From which gates on cases fail, if no weaker ones do, and which quantities `names`; empty if that does not hold.

    Only cases whose gates are all alike, or mild, count. One that fails and one that passes must differ in them only.
    """
    sides = [[c for c in some if c.gate in LADDER] for some in (failing, passing)]
    wrong, right = ({LADDER.index(c.gate) for c in some} for some in sides)
    calls = [{but_for_gates(c) for c in some} for some in sides]
    if not calls[0] & calls[1] or min(wrong) <= max(right):
        return ""
    stronger = " and stronger" if min(wrong) < len(LADDER) - 1 else ""
    only = f"; only {' and '.join(names)} {'is' if len(names) == 1 else 'are'} wrong" if 0 < len(names) <= 2 else ""
    return f"Wrong with gates {LADDER[min(wrong)]}{stronger}, right with gates {LADDER[max(right)]} and weaker{only}"


def common(failing: Sequence[Case], passing: Sequence[Case]) -> list[str]:
    """What all of the failing cases have and none of the passing ones, and what they hardly share by chance."""
    only, also = [], []
    for name, of in NUMBERS.items() if passing else ():
        wrong, right = [of(c) for c in failing], [of(c) for c in passing]
        if min(wrong) > max(right):
            most = max(right)
            than = f"one {ONE.sub('', name, count=1)}" if most == 1 else f"{most} {name}"
            only.append(f"more than {than}" if most else name)
        if max(wrong) < min(right):
            only.append(f"fewer than {min(right)} {name}" if min(right) > 1 else f"no {name}")
    for of in KINDS if passing else ():
        wrong, right = ([of(c) for c in some] for some in (failing, passing))
        told = None not in wrong and any(right) and not set(wrong) & set(right)
        if told and len(set(wrong)) <= MOST:
            only.append(" or ".join(dict.fromkeys(wrong)))
        some = [x for x in wrong + right if x is not None]  # of packed cases alone, if only they have it
        share = some.count(wrong[0]) / max(len(some), 1)
        if not told and wrong[0] and len(set(wrong)) == 1 and share ** len(wrong) < CHANCE:
            also.append(wrong[0])
    found = {ONLY: only, "All failing cases have ": also}
    return [f"{who}{'; '.join(what)}" for who, what in found.items() if what]


def reach(cases: Sequence[Case]) -> str:
    """The largest sizes among cases, and those of the largest case, where they meet."""

    def said(sizes: dict[str, int]) -> str:
        return ", ".join(f"{n} = {size}" for n, size in sizes.items())

    most = {n: max(getattr(c, n) for c in cases) for n in "BTHKV"}
    packs = [len(c.ends) - 1 for c in cases if c.ends]
    largest = max(cases, key=lambda c: c.B * c.T * c.H * c.K * c.V)
    met = {n: getattr(largest, n) for n in "BTHKV"}
    found = f"up to {said(most)}" + (f", {max(packs)} packed sequences" if packs else "")
    return found if met == most else f"{found}; at most {said(met)} in one case"
