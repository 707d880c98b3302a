"""Named mistakes that a kernel makes in some places or cases only (appendix "Check your kernel").

A kernel may forget its mask in the last tile of one length, or the decay of the columns beyond 64. The outputs of the
mistake then agree with the kernel's where the kernel is wrong, and differ from them where it is right. So outputs are
compared only in the heads, channels and sequences in which the kernel is wrong, from the first wrong token to the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ._budgets import Problem
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
    resets,
    variant,
)
from ._mechanisms import MECHANISMS, SHORT
from .mistakes import CHUNK, CHUNKS, Mistake, apply, known
from .oracle import evaluate

SEEN, MORE = 4, 6  # failing cases that every mistake is compared in, and more of them for those that are left
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
    mechanism: str, m: Mistake, C: int, pairs: Sequence[Pair], wrong: frozenset[str], gates: str
) -> Local | None:
    """The mistake, if it agrees with the kernel in all places of these problems where the kernel is wrong."""
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
                if whole:
                    besides += int((beyond & ~bad[n]).sum() if n in bad else beyond.sum())
                    total += beyond.numel()
                    forwards = not n.startswith("d") and n not in wrong
                    apart = apart or made is not plain and forwards and bool(beyond.any())
                elif beyond.any():
                    shown.add(n)
    shown -= {*excusable} if excused else set()
    if not shown & wrong or most < PLAIN:
        return None
    it = Match(m, C, worst, frozenset(shown), frozenset(shown & wrong), gates * excused)
    return Local(it, besides / max(total, 1), apart)


def localised(mechanism: str, dtype: torch.dtype, failed: Sequence[Pair], more: Sequence[Mistake] = ()) -> list[Match]:
    """The mistakes that agree with a kernel wherever it is wrong, at most three; none if there are many.

    A mistake that would make less wrong elsewhere comes first; those that would make much more wrong are left out.
    """
    failed = [pair for pair in failed if pair[0].case.T <= SHORT] or failed
    seen, others = failed[:SEEN], failed[SEEN : SEEN + MORE]
    wrong = frozenset(n for p, found in seen for n, x in found.items() if x is not None and differs(p, n, x))
    gates = made_of_its_own(mechanism, seen, wrong)
    left: list[Local] = []
    for m in known(mechanism, dtype, more):
        if m.rounding or m.overflow or m.astray:
            continue
        for C in CHUNKS if m.chunked else (CHUNK,):
            it = agrees(mechanism, m, C, seen, wrong, gates)
            left += [it] if it else []
    left = sorted(left, key=lambda it: it.rank)
    for pair in others if len(left) else ():
        left = [it for it in left if agrees(mechanism, it.match.mistake, it.match.C, [pair], wrong, gates)]
    best: dict[str, Match] = {}
    for it in left:
        if it.rank[:2] == left[0].rank[:2] and it.besides <= left[0].besides + ALIKE:
            best.setdefault(it.match.name, it.match)
    return [*best.values()][:3]
