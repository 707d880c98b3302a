"""Why a kernel is wrong: its outputs held against those of named mistakes (appendix "Check your kernel")."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ._budgets import Problem
from ._common import Clock
from ._mechanisms import MECHANISMS, SHORT, Kind
from ._memory import placed
from ._terms import by_terms, rounded
from .mistakes import CHUNK, CHUNKS, GRADIENT, LINEAR, READ, Mistake, apply, known
from .oracle import evaluate

MADE, BESIDES = "dg is made of dq and dk", "dg is wrong besides"
CLOSE = 3.0  # budgets that a kernel may lie from the mistake it makes: its rounding is its own
KEPT = "the same call again"
NEAR = 2.0  # budgets within which all that is wrong may be rounding, and not an earlier call's
SHARE = 0.2  # or the part of its error that the mistake may leave unexplained, in the root mean square
AS_WRONG = 4.0  # times larger or smaller may a kernel's error be than that of the mistake in rounding that it makes
TIGHT = 0.5  # distance at most, where dg is wrong besides
PLAIN = 4.0  # budgets that something must be wrong by to get a name of its place: less may be rounding
BETTER = 0.75  # the part of a largest error beyond its budget that may be left: else the mistake explains nothing


@functools.lru_cache(maxsize=4000)
def variant(mechanism: str, m: Mistake, C: int, p: _Key, backwards: int = 1) -> dict[str, Tensor] | None:
    """What the mistake makes of a problem, in float64 unless it rounds; None where it has no result (empty chunks)."""
    x = laid(p, torch.float32 if m.rounding or m.overflow else torch.float64)
    try:
        made = evaluate(apply(mechanism, m, C), MECHANISMS[mechanism], x, p.problem.case, backwards=backwards)
    except (RuntimeError, IndexError):
        return None
    if backwards:  # what nothing reaches a kernel leaves 0
        made |= {n: torch.zeros_like(p.problem.exact[n]) for n, y in made.items() if y is None and n.startswith("d")}
    return made


@functools.lru_cache(maxsize=16)
def laid(p: _Key, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of a problem where a kernel finds them; mistakes write into none."""
    given = p.problem.inputs.items()
    return {n: placed(y.to(dtype), p.problem.case.strides, i) for i, (n, y) in enumerate(given)}


class _Key:
    """A problem as a key of the cache: problems are cached themselves, and so compared by identity."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def __hash__(self):
        return id(self.problem)

    def __eq__(self, other):
        return self.problem is other.problem


def distance(m: Mistake, p: Problem, name: str, x: Tensor, wrong: Tensor) -> float:
    """How far x is from the mistake's quantity, or from being as wrong if that rounds: at most 1 is a match."""
    if m.rounding or m.overflow:
        found, error = in_budgets(p, name, x), in_budgets(p, name, wrong)
        if math.isinf(error):  # which elements are not finite depends on how tiles are masked
            return 1.0 if m.overflow or math.isinf(found) else math.inf
        return found / max(1.0, AS_WRONG * error)
    exact, same = p.exact[name], torch.isfinite(x)
    if not m.astray and not torch.equal(torch.isfinite(wrong), same):
        return math.inf
    if name in resets(p.kind):  # some kernels mask the gradient of a gate of -inf, others leave there what cancels
        same = same & torch.isfinite(p.inputs[name.removeprefix("d")])
    if not m.whole and p.case.ends and "N" in p.kind.axes(name):  # what comes of no tokens is a matter by itself
        some = torch.tensor([a < b for a, b in pairwise(p.case.ends)], device=x.device)
        same = same & some[:, None, None, None]
    x, wrong = (torch.where(same, y.double(), exact) for y in (x, wrong))
    found, near = p.judge(name, x, wrong)
    if found <= CLOSE * near:
        return found / near / CLOSE
    error, allowed = p.judge(name, x)
    if error > allowed and found > BETTER * error:  # as far from the mistake as from what is right
        return math.inf
    left, whole = ((x - y).square().mean().sqrt().item() for y in (wrong, exact))
    return left / whole / SHARE if whole else math.inf


def in_budgets(p: Problem, name: str, x: Tensor) -> float:
    """The error of a quantity's worst octave in budgets of that octave: two errors may lie in different octaves."""
    error, allowed = p.judge(name, x)
    return error / allowed


def resets(kind: Kind) -> tuple[str, ...]:
    """The gradients of gates."""
    return tuple(f"d{n}" for n in kind.named("gate"))


def differs(p: Problem, name: str, x: Tensor) -> bool:
    found, budget = p.judge(name, x)
    return not found <= budget


def outside(p: Problem, found: dict[str, Tensor | None]) -> list[str]:
    """The quantities of a call that are outside their budgets."""
    return [n for n, x in found.items() if x is not None and differs(p, n, x)]


def nearer(p: Problem, name: str, x: Tensor, wrong: Tensor) -> bool:
    """Whether a wrong quantity is clearly nearer to the mistake's than to the right one.

    What is not finite in both is what the mistake makes of it, and nothing that is right.
    """
    if not (torch.isfinite(x) | torch.isfinite(wrong)).all():
        return True
    seen = torch.isfinite(x) & torch.isfinite(wrong)
    x, wrong = (torch.where(seen, y.double(), p.exact[name]) for y in (x, wrong))
    (found, _), (error, allowed) = p.judge(name, x, wrong), p.judge(name, x)
    return error > allowed and found <= BETTER * error


def followed(p: Problem, found: dict[str, Tensor | None]) -> dict[int, float]:
    """How far the gates' gradient is from what a kernel with chunks of C makes of its own dq and dk, however wrong.

    To the end of a chunk that is the sum of q dq - k dk, to which what its state adds is right; or, where C is 0, to
    the end of the sequence with the kernel's own final state. At most 1 is a match.
    """
    (name,) = resets(p.kind)
    if any(found.get(n) is None for n in ("dq", "dk", "S", name)):
        return {}
    off = {n: found[n].double() - p.exact[n] for n in ("dq", "dk", "S")}
    terms = p.inputs["q"] * off["dq"] - p.inputs["k"] * off["dk"]
    last = off["S"] * p.inputs.get("d S", torch.zeros(()))
    if p.kind.axes(name)[-1] != "K":
        terms, last = terms.sum(-1), last.sum((-1, -2))
    else:
        last = last.sum(-1)
    far, ends = {}, p.case.ends or (0, p.case.T)
    for C in (*CHUNKS, 0):
        made = p.exact[name].clone()
        for n, (a, b) in enumerate(pairwise(ends)):
            if not C:
                made[:, a:b] += last[n] if p.case.ends else last[:, None]
            size = C or p.case.T
            for part in (slice(i, min(i + size, b)) for i in range(a, b, size)):
                made[:, part] += terms[:, part].flip(1).cumsum(1).flip(1)
        finite = torch.isfinite(p.inputs[name.removeprefix("d")]) & torch.isfinite(made)
        x = torch.where(finite, found[name].double(), p.exact[name])
        made = torch.where(finite, made, p.exact[name])
        error, near = p.judge(name, x, made)
        left, whole = ((x - y).square().mean().sqrt().item() for y in (made, p.exact[name]))
        far[C] = min(error / near / CLOSE, left / whole / (SHARE / 4) if whole else math.inf)
    return far


@dataclass
class Match:
    """A mistake with chunks of C, and how it fits.

    Attributes:
        distance: the largest; at most 1.
        shown: the quantities in which it shows.
        own: those of them in which the kernel is wrong, if not in all.
        gates: what to say of the gates' gradient, where the mistake by itself does not make it wrong in that way.
    """

    mistake: Mistake
    C: int
    distance: float
    shown: frozenset[str]
    own: frozenset[str]
    gates: str

    @property
    def name(self) -> str:
        """The mistake, and where alone the kernel makes it."""
        also = f"; {self.gates}" if self.gates else ""
        if self.own == self.shown or self.mistake.overflow:  # what is masked is not everywhere the same
            return self.mistake.name + also
        forward = {n for n in self.shown if not n.startswith("d")}
        if self.own == self.shown - forward:
            return f"{self.mistake.name}, in the backward pass only{also}"
        if self.own == forward:
            return f"{self.mistake.name}, in the forward pass only{also}"
        *rest, last = sorted(self.own)
        return f"{self.mistake.name}, in {', '.join(rest)}{' and ' * bool(rest)}{last} only{also}"

    @property
    def rank(self) -> tuple:
        """What explains all comes before parts of it, and what is equal before what is as wrong."""
        m = self.mistake
        parts = self.gates == BESIDES, self.own != self.shown, self.gates != "", m.rounding or m.overflow
        return *parts, self.distance


def as_wrong(m: Mistake, pairs: list[tuple[Problem, str, Tensor, Tensor]]) -> float:
    """How much more or less wrong a kernel is on the whole than a mistake that is right on paper; at most 1 is alike.

    Or, where that overflows, which share of what is not finite only one of them has; they must overflow in the same
    cases.
    """
    if m.overflow:
        cases: dict[int, list] = {}
        for p, _, x, wrong in pairs:
            cases.setdefault(id(p), []).append((~torch.isfinite(x), ~torch.isfinite(wrong)))
        either = both = 0
        for masks in cases.values():
            if any(x.any() for x, _ in masks) != any(y.any() for _, y in masks):
                return math.inf
            either += sum((x | y).sum().item() for x, y in masks)
            both += sum((x & y).sum().item() for x, y in masks)
        return 1 - both / either if either else 0.0
    times = []
    for p, name, x, wrong in pairs:
        found, error = in_budgets(p, name, x), in_budgets(p, name, wrong)
        if error > 1 + CLOSE and math.isfinite(error):
            times.append(abs(math.log(max(found / error, 1e-2))))
    return sum(times) / len(times) / math.log(AS_WRONG) if times else 0.0


def match(
    mechanism: str, m: Mistake, C: int, seen: list[tuple[Problem, dict]], wrong: frozenset[str], gates: str
) -> Match | None:
    """Whether a mistake is what these problems show, of which the kernel has the quantities `wrong`."""
    worst, shown, excused, pairs, better = 0.0, set(), False, [], set()
    excusable = resets(MECHANISMS[mechanism]) if gates and not (m.rounding or m.overflow) else ()
    for p, found in seen:
        given = {n: x for n, x in found.items() if x is not None}
        forward = [n for n in given if n in wrong and not n.startswith("d")]
        for backwards, names in enumerate((forward, given)):  # most mistakes are out before their backward pass
            if not names:
                continue
            made = variant(mechanism, m, C, _Key(p), backwards)
            if made is None or any(made[n] is None for n in names):
                return None
            for n in (n for n in names if n in wrong):
                far = distance(m, p, n, given[n], made[n])
                if far > 1 and n in excusable:
                    excused = True
                elif far > 1:
                    return None
                else:
                    worst = max(worst, far)
                    better |= {n} if nearer(p, n, given[n], made[n]) else set()
                    if backwards and (m.rounding or m.overflow):
                        pairs.append((p, n, given[n], made[n]))
        shown |= {n for n in given if differs(p, n, made[n])}
    if excused:
        shown -= {*excusable}
    own = shown & wrong
    if not own or gates == BESIDES and excused and worst > TIGHT:
        return None
    if m.rounding and own != shown and any(not n.startswith("d") for n in own):  # in one pass, or in a gradient
        return None
    if not (m.rounding or m.overflow or m.astray or own <= better):
        return None
    if m.rounding or m.overflow:
        worst = as_wrong(m, pairs)
        if worst > 1:
            return None
    return Match(m, C, worst, frozenset(shown), frozenset(own), gates if excused else "")


def shows(mechanism: str, it: Match, p: Problem, found: dict[str, Tensor | None]) -> bool:
    """Whether the mistake would have failed here, however a match is rounded; the kernel passes."""
    wrong = variant(mechanism, it.mistake, it.C, _Key(p))
    for n in [] if wrong is None else [n for n in it.own if found.get(n) is not None]:
        error, budget = (math.inf, 1.0) if wrong[n] is None else p.judge(n, wrong[n])
        if not error <= (1 + CLOSE) * budget:
            return True
    return False


def fits(mechanism: str, it: Match, p: Problem, found: dict[str, Tensor | None]) -> bool:
    """Whether all that is wrong in a case is the mistake's; one that rounds is as wrong in some cases only."""
    m = it.mistake
    if m.rounding or m.overflow or m.astray:
        return True
    wrong = outside(p, found)
    wrong = [n for n in wrong if not (it.gates and n in resets(p.kind))]
    made = variant(mechanism, m, it.C, _Key(p)) or {}
    return all(made.get(n) is not None and distance(m, p, n, found[n], made[n]) <= 1 for n in wrong)


def same(mechanism: str, a: Match, b: Match, seen: list[tuple[Problem, dict]]) -> bool:
    """Whether two mistakes cannot be told apart on these problems."""
    if a.mistake.rounding or a.mistake.overflow or a.own != b.own:
        return False
    for p, found in seen:
        x, y = (variant(mechanism, it.mistake, it.C, _Key(p)) for it in (a, b))
        for n in (n for n in a.own if found.get(n) is not None):
            neither = ~(torch.isfinite(x[n]) | torch.isfinite(y[n]))
            one, other = (made[n].masked_fill(neither, 0.0).double() for made in (x, y))
            error, near = p.judge(n, one, other)
            if not error <= near:
                return False
    return True


def stale(mechanism: str, seen: list[tuple[Problem, dict]]) -> list[Match]:
    """Tensors of an earlier case in place of a case's own, of the same sizes, if that explains all that is wrong.

    `seen` is in the order of the calls.
    """
    kind = MECHANISMS[mechanism]
    right, wrong, far = apply(mechanism, None), [], False
    for i, (p, found) in enumerate(seen):
        off = [in_budgets(p, n, found[n]) for n in outside(p, found)]
        wrong += [i] if off else []
        far = far or any(not x <= NEAR for x in off)
    if not far:
        return []
    for role, names in (("gates", kind.named("gate")), ("the initial state", tuple(kind.states)), ("keys", ("k",))):
        worst = 0.0
        for i in wrong[:2] + wrong[-1:]:
            p, found = seen[i]
            sizes = [p.inputs[n].shape for n in names if n in p.inputs]
            before = [q for q, _ in seen[:i] if [q.inputs[n].shape for n in names if n in q.inputs] == sizes]
            if not sizes or not before:
                worst = math.inf
                break
            x = p.inputs | {n: before[0].inputs[n] for n in names}
            made = evaluate(right, kind, x, p.case)
            m = Mistake(
                f"{role} of an earlier call of the same sizes: something is kept between calls", KEPT, right, ()
            )
            worst = max(worst, *(distance(m, p, n, y, made[n]) for n, y in found.items() if y is not None))
        if wrong and worst <= 1:
            return [Match(m, CHUNK, worst, frozenset(), frozenset(), "")]
    return []


def rescaled(mechanism: str, seen: list[tuple[Problem, dict]]) -> list[Match]:
    """Whether all that is wrong with o is a factor that each token and head has of its own."""
    shown = frozenset({"o"})
    m = Mistake("o divided by a number that every token has of its own, such as a sum of its weights", READ, None, ())
    wrong = [(p, found["o"].double()) for p, found in seen if differs(p, "o", found["o"]) and p.case.V > 1]
    if mechanism not in LINEAR or any(differs(p, "S", found["S"]) for p, found in seen if found["S"] is not None):
        return []
    worst, spread = 0.0, 0.0
    for p, o in wrong:
        exact = p.exact["o"]
        factor = (o * exact).sum(-1, keepdim=True) / exact.square().sum(-1, keepdim=True).clamp_min(1e-30)
        left, allowed = p.judge("o", o, factor * exact)
        worst, spread = max(worst, left / allowed / CLOSE), max(spread, factor.std().item())
    if not (wrong and worst <= 1 and spread > SHARE / 4):
        return []
    return [Match(m, CHUNK, worst, shown, shown, "")]


def made_of_its_own(mechanism: str, seen: list[tuple[Problem, dict]], wrong: frozenset[str]) -> str:
    """A sentence on the gates' gradient where dq or dk is wrong, too; empty elsewhere."""
    if not (wrong & {*resets(MECHANISMS[mechanism])} and wrong & {"dq", "dk"} and mechanism in LINEAR):
        return ""
    far = [followed(p, found) for p, found in seen]
    made = any(all(C in x and x[C] <= 1 for x in far) for C in (*CHUNKS, 0))
    return MADE if made else BESIDES


def diagnose(
    mechanism: str,
    dtype: torch.dtype,
    seen: list[tuple[Problem, dict]],
    passed: list[tuple[Problem, dict]],
    besides: Sequence[tuple[Problem, dict]] = (),
    more: Sequence[Mistake] = (),
    clock: Clock | None = None,
    further: Iterable[tuple[Problem, dict]] = (),
) -> list[Match]:
    """The mistake that explains everything that was seen, and those that compute the same there; at most three.

    `seen`, `passed` and `besides` hold problems and what the kernel made of them. A mistake that would show in one of
    those that passed is none. `besides` are the other failures, which tell apart mistakes that compute the same in
    `seen`; each of them, up to SHORT tokens, must fit the mistake, too.
    One that shows in more than what is wrong explains it, too, after those that do not: its kernel makes it in one of
    two passes, or in one gradient. `more` are mistakes that only this kernel can make. After the clock's end no mistake
    is named that was not compared with everything. `further` are calls, right or wrong, that are made one by one as
    long as several mistakes are left; one that fits none of these says nothing.
    """
    kind, clock = MECHANISMS[mechanism], clock or Clock(math.inf)
    failed = [outside(p, found) for p, found in seen]
    wrong = frozenset(n for names in failed for n in names)
    # most mistakes are out after the smallest
    order = sorted(range(len(seen)), key=lambda i: (not failed[i], seen[i][0].exact["o"].numel()))
    seen = [seen[i] for i in order]
    gates = made_of_its_own(mechanism, seen, wrong)
    matches, late = [], set()
    for m in known(mechanism, dtype, more):
        for C in CHUNKS if m.chunked else (CHUNK,):
            if clock.spent():
                late.add(m.name)
            elif found := match(mechanism, m, C, seen, wrong, gates):
                matches.append(found)
    clock.late = len(late)
    kept: list[Match] = []
    for it in sorted(matches, key=lambda it: it.rank):
        if kept and (it.name in [k.name for k in kept] or not same(mechanism, kept[0], it, seen)):
            continue
        if kept and it.rank[:-1] != kept[0].rank[:-1]:
            break
        if not any(clock.spent() or shows(mechanism, it, *pair) for pair in passed):
            kept.append(it)
        if len(kept) == 3:
            break
    for pair in besides:
        if len(kept) < 2:
            break
        kept = [it for it in kept if clock.spent() or match(mechanism, it.mistake, it.C, [pair], wrong, gates)] or kept
    left = [it for it in matches if it.name in [k.name for k in kept]]  # with every length of chunks that fits so far
    calls = iter(further)
    while len({it.name for it in left}) > 1 and not clock.spent() and (pair := next(calls, None)):
        p, found = pair
        if off := {*outside(p, found)}:
            fit = [it for it in left if match(mechanism, it.mistake, it.C, [pair], wrong | off, gates)]
        else:
            fit = [it for it in left if not shows(mechanism, it, *pair)]
        left = fit or left
    alike = [[k] * (k in left) + [it for it in left if it.name == k.name] for k in kept]
    kept = [its[0] for its in alike if its]
    short = [pair for pair in besides if pair[0].case.T <= SHORT]
    kept = [it for it in kept if all(not clock.spent() and fits(mechanism, it, *pair) for pair in short)]
    if kept or mechanism not in LINEAR or clock.spent():
        return kept
    others = wrong - {*resets(kind)} or wrong
    said = [rounded(n, seen) for n in sorted(others)] if dtype == torch.float32 else []
    said = said if all(said) else by_terms(mechanism, sorted(others), seen, passed)
    if not said:
        return []
    m = Mistake("; ".join(said), READ if others == {"o"} else GRADIENT, None, ())
    return [Match(m, CHUNK, 0.0, others, others, gates if others != wrong else "")]
