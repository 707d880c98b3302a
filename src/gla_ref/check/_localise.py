"""Named mistakes that a kernel makes in some places or cases only (appendix "Check your kernel").

A kernel may forget its mask in the last tile of one length, or the decay of the columns beyond 64. The outputs of the
mistake then agree with the kernel's where the kernel is wrong, and differ from them where it is right. So outputs are
compared only in the heads, channels and sequences in which the kernel is wrong, from the first wrong token to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ._budgets import Problem
from ._cases import Case
from ._common import Clock, but_for_gates
from ._diagnose import (
    BETTER,
    CLOSE,
    MADE,
    PLAIN,
    SHARE,
    TIGHT,
    Match,
    _Key,
    differs,
    laid,
    made_of_its_own,
    outside,
    resets,
    shows,
    variant,
)
from ._mechanisms import MECHANISMS, SHORT, Kind
from .mistakes import CHUNK, CHUNKS, DECAY, Mistake, apply, known
from .oracle import evaluate

SEEN = 4  # failing cases that every mistake is compared in; those that are left, in all
ALIKE = 0.05  # the part of all elements by which two mistakes may differ in how much else they would make wrong
Pair = tuple[Problem, dict]


def wrong_places(p: Problem, name: str, x: Tensor) -> Tensor:
    """Every element in the heads, channels, sequences and spans of tokens that hold something wrong, as a mask."""
    off = (x.double() - p.exact[name]).abs()
    wrong = ~(off <= p.band(name))
    places = torch.ones_like(wrong)
    for dim, axis in enumerate(p.kind.axes(name)):
        here = wrong.transpose(0, dim).flatten(1).any(1)
        if axis in ("T", "T0"):
            ends = p.case.ends if axis == "T" else None
            for a, b in pairwise(ends or (0, len(here))):
                some = here[a:b].nonzero()
                if len(some):
                    here[a + int(some[0]) : a + int(some[-1]) + 1] = True
        places &= here.view(-1, *[1] * (wrong.ndim - dim - 1))
    return places


def distance(p: Problem, name: str, x: Tensor, made: Tensor, places: Tensor) -> float:
    """The distance of x from the mistake's quantity in those places; 1 is half of the usual limit of a match."""
    exact = p.exact[name]
    if name in resets(p.kind):
        places = places & torch.isfinite(p.inputs[name.removeprefix("d")])
    if not torch.equal(torch.isfinite(x) | ~places, torch.isfinite(made) | ~places):
        return math.inf
    same = places & torch.isfinite(x)
    x, made = (torch.where(same, y.double(), exact) for y in (x, made))
    found, near = p.judge(name, x, made)
    if found <= CLOSE * near * TIGHT:
        return found / near / CLOSE / TIGHT
    error, allowed = p.judge(name, x)
    if error > allowed and found > BETTER * error:
        return math.inf
    left, whole = ((x - y).square().mean().sqrt().item() for y in (made, exact))
    return left / whole / SHARE / TIGHT if whole else math.inf


def composed(mechanism: str, m: Mistake, C: int, p: Problem, bad: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The results of a kernel that makes a mistake in those places of o and the state, and none elsewhere."""
    wrong, right = apply(mechanism, m, C), apply(mechanism, None)
    states = tuple(p.kind.states.values())

    def mixed(n: str, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(bad[n], x, y) if n in bad else y

    def fn(*tokens, **options):
        (o, S), (o_right, S_right) = wrong(*tokens, **options), right(*tokens, **options)
        if not p.kind.cache:
            return mixed("o", o, o_right), mixed(states[0], S, S_right)
        pairs = zip(states, S, S_right, strict=True)
        return mixed("o", o, o_right), tuple(mixed(n, x, y) for n, x, y in pairs)

    return evaluate(fn, p.kind, laid(_Key(p), torch.float64), p.case)


@dataclass
class Local:
    """A mistake in chunks of C that agrees with a kernel wherever that is wrong.

    Attributes:
        match: the mistake, and in which quantities.
        besides: the part of all elements that the mistake would make wrong and the kernel does not.
        apart: whether the mistake would also make o or a state wrong that is right.
    """

    match: Match
    besides: float
    apart: bool

    @property
    def rank(self) -> tuple:
        it = self.match
        return self.apart, it.own != it.shown, self.besides, it.distance


def agrees(
    mechanism: str, m: Mistake, C: int, pairs: Sequence[Pair], wrong: frozenset[str], gates: str, plainly: bool = True
) -> Local | None:
    """The mistake, if it agrees with the kernel in all places of these problems where the kernel is wrong.

    Something must be wrong `plainly`, by several budgets. A mistake whose name states a size has a place by that:
    it must agree also where the same quantity is right.
    """
    placed = any(letter.isdigit() for letter in m.name)
    excusable = resets(MECHANISMS[mechanism]) if gates == MADE else ()
    worst, most, shown, excused, besides, total, apart = 0.0, 0.0, set(), False, 0, 0, False
    for p, found in pairs:
        given = {n: x for n, x in found.items() if x is not None}
        bad = {n: wrong_places(p, n, x) for n, x in given.items() if differs(p, n, x)}
        forward = [n for n in bad if not n.startswith("d")]
        for backwards, names in enumerate((forward, [*bad])):
            if not names:
                continue
            made = variant(mechanism, m, C, _Key(p), backwards)
            if made is None or any(made[n] is None for n in names):
                return None
            plain = made
            far_from = {n: distance(p, n, given[n], made[n], bad[n]) for n in names}
            if backwards and forward and not all(far <= 1 for far in far_from.values()):
                made = composed(mechanism, m, C, p, bad)
                far_from = {n: distance(p, n, given[n], made[n], bad[n]) for n in names}
            for n, far in far_from.items():
                if far > 1 and n in excusable:
                    excused = True
                elif far > 1:
                    return None
                else:
                    error, budget = p.judge(n, given[n])
                    worst, most = max(worst, far), max(most, error / budget)
        for n in given:
            for y, whole in ((made[n], False), (plain[n], True)):
                y = torch.zeros_like(p.exact[n]) if y is None else y
                beyond = ~((y.double() - p.exact[n]).abs() <= (1 + CLOSE) * p.band(n))
                if whole and placed and n in bad and (beyond & ~bad[n]).any():
                    return None
                if whole:
                    besides += int((beyond & ~bad[n]).sum() if n in bad else beyond.sum())
                    total += beyond.numel()
                    forwards = not n.startswith("d") and n not in wrong
                    apart = apart or made is not plain and forwards and bool(beyond.any())
                elif beyond.any():
                    shown.add(n)
    shown -= {*excusable} if excused else set()
    if plainly and (not shown & wrong or most < PLAIN):
        return None
    it = Match(m, C, worst, frozenset(shown), frozenset(shown & wrong), gates * excused)
    return Local(it, besides / max(total, 1), apart)


def alike(case: Case, kind: Kind) -> Iterator[Case]:
    """Cases like one that fails, each other in one thing, so that a name which fits by chance fits it no longer.

    Heads and channels stay as they are: a mistake in a part of them may lie elsewhere among more.
    """
    C = CHUNK
    if case.ends:  # every sequence has tokens, and some have more
        step = [max(b - a, 3) + 2 for a, b in pairwise(case.ends)]
        ends = (0, *accumulate(step))
        yield replace(case, ends=ends, T=ends[-1])
    else:
        yield replace(case, B=case.B + 1)
        yield replace(case, T=case.T + C // 4 + 1)
        yield replace(case, T=case.T + C)
        if not case.reads and not (kind.cache and case.state):
            yield replace(case, B=1, ends=(0, case.T, 2 * case.T), T=2 * case.T)
    if case.reads:
        a, b = case.reads
        yield replace(case, reads=(a // 2 + 1, case.T))
        yield replace(case, reads=(a // 4, b + 1))
        yield replace(case, reads=(0, b))
    if kind.cache and case.state:
        yield replace(case, past=case.past + C // 2 + 5)


def larger(case: Case) -> Iterator[Case]:
    """Cases like one that fails, with one more head or channel."""
    for n in "HVK":
        yield replace(case, **{n: getattr(case, n) + 1})


def localised(
    mechanism: str,
    dtype: torch.dtype,
    failed: Sequence[Pair],
    passed: Sequence[Pair],
    more: Sequence[Mistake],
    called: Callable[[Case], Pair | None],
    clock: Clock,
    light: Sequence[Pair] = (),
) -> list[Match]:
    """The mistakes that agree with a kernel wherever it is wrong, at most three; none if there are many.

    A mistake that would make less wrong elsewhere comes first; those that would make much more wrong are left out.
    A place can save a name that fits by chance. So a mistake must agree in all failing cases, and in failing calls
    that it was not found by: `called` gives problem and results of another case :func:`alike`, None where the kernel
    is right. It must agree in two cases at least; the second one may have one more head or channel. A wrong decay must
    not show in a case that passed and has other gates only: such a kernel has no place, it decays otherwise. Of several
    mistakes those stay that would show in the fewest cases that passed.
    """
    failed = [pair for pair in failed if pair[0].case.T <= SHORT] or failed
    seen, others = failed[:SEEN], failed[SEEN:]
    wrong = frozenset(n for pair in seen for n in outside(*pair))
    gates = made_of_its_own(mechanism, seen, wrong)
    left: list[Local] = []
    for m in known(mechanism, dtype, more):
        if m.rounding or m.overflow or m.astray:
            continue
        for C in CHUNKS if m.chunked else (CHUNK,):
            it = None if clock.spent() else agrees(mechanism, m, C, [*light, *seen], wrong, gates)
            left += [it] if it else []
    if not left or clock.spent():
        return []
    case, kind = failed[0][0].case, MECHANISMS[mechanism]
    others = [*filter(None, (called(x) for x in alike(case, kind) if not clock.spent())), *others]
    more_of = [] if len(seen) + len(others) > 1 else [*filter(None, map(called, larger(case)))]

    def holds(it: Match, pair: Pair) -> bool:
        if clock.spent():
            return False
        return agrees(mechanism, it.mistake, it.C, [pair], wrong, gates, plainly=False) is not None

    calls = {but_for_gates(p.case) for p, _ in failed}
    alike_but_right = [pair for pair in passed if but_for_gates(pair[0].case) in calls]

    def contradicted(it: Match) -> bool:
        return it.mistake.line == DECAY and any(shows(mechanism, it, *pair) for pair in alike_but_right)

    kept: list[Local] = []
    for it in sorted(left, key=lambda it: it.rank):
        if contradicted(it.match):
            continue
        if kept and (it.rank[:2] != kept[0].rank[:2] or it.besides > kept[0].besides + ALIKE):
            break
        twice = len(seen) + len(others) > 1 or any(holds(it.match, pair) for pair in more_of)
        kept += [it] if twice and all(holds(it.match, pair) for pair in others) else []
    best: dict[str, Match] = {}
    for it in kept:
        best.setdefault(it.match.name, it.match)
    if len(best) < 2:
        return [*best.values()]
    short = [pair for pair in passed if pair[0].case.T <= SHORT]
    against = {name: sum(not clock.spent() and shows(mechanism, it, *p) for p in short) for name, it in best.items()}
    return [it for name, it in best.items() if against[name] == min(against.values())][:3]
