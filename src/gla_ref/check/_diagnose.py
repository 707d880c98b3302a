"""Why a kernel is wrong: its outputs held against those of named mistakes (appendix "Check your kernel")."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ._budgets import Problem, evaluate
from ._mechanisms import MECHANISMS
from ._memory import placed
from .mistakes import Mistake, apply, known

CLOSE = 3.0  # budgets that a kernel may lie from the mistake it makes: its rounding is its own
KEPT = "the same call again"
SHARE = 0.2  # or the part of its error that the mistake may leave unexplained, in the root mean square
AS_WRONG = 4.0  # times larger or smaller may a kernel's error be than that of the mistake in rounding that it makes
BETTER = 0.75  # the part of a largest error beyond its budget that may be left: else the mistake explains nothing


@functools.lru_cache(maxsize=4000)
def variant(mechanism: str, m: Mistake, p: _Key, backwards: int = 1) -> dict[str, Tensor] | None:
    """What the mistake makes of a problem, in float64 unless it rounds; None where it has no result (empty chunks)."""
    x = laid(p, torch.float32 if m.rounding or m.overflow else torch.float64)
    try:
        return evaluate(apply(mechanism, m), MECHANISMS[mechanism], x, p.problem.case, backwards=backwards)
    except (RuntimeError, IndexError):
        return None


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
        (found, allowed), (error, _) = p.judge(name, x), p.judge(name, wrong)
        if math.isinf(error):  # which elements are not finite depends on how tiles are masked
            return 1.0 if m.overflow else math.inf
        return found / max(allowed, AS_WRONG * error)
    exact, same = p.exact[name], torch.isfinite(wrong)
    if not torch.equal(torch.isfinite(x), same):
        return float("inf")
    x, wrong, exact = (torch.where(same, y.double(), 0) for y in (x, wrong, exact))
    found, near = p.judge(name, x, wrong)
    error, allowed = p.judge(name, x)
    if error > allowed and found > BETTER * error:  # as far from the mistake as from what is right
        return float("inf")
    if found <= CLOSE * near:
        return found / near / CLOSE
    left, whole = ((x - y).square().mean().sqrt().item() for y in (wrong, exact))
    return left / whole / SHARE if whole else float("inf")


def apart(m: Mistake, p: Problem, found: dict[str, Tensor], wrong: dict[str, Tensor | None] | None) -> float:
    """The largest :func:`distance` among what was found."""
    if wrong is None or any(wrong[n] is None for n in found):
        return math.inf
    return max((distance(m, p, n, x, wrong[n]) for n, x in found.items()), default=0.0)


def alike(m: Mistake, p: Problem, both: dict[str, tuple[Tensor, Tensor]]) -> bool:
    """Whether a kernel is wrong in the way of a mistake that is right on paper.

    What overflows does so in the same cases; what is rounded is, on the whole, not much less wrong.
    """
    if m.overflow:
        ours, its = (all(torch.isfinite(pair[i]).all() for pair in both.values()) for i in (0, 1))
        return ours == its
    if not m.rounding:
        return True
    times = []
    for name, pair in both.items():
        (found, _), (error, allowed) = (p.judge(name, x) for x in pair)
        if error > (1 + CLOSE) * allowed:
            times.append(math.log(max(found / error, 1e-2)))
    return not times or sum(times) / len(times) > -math.log(AS_WRONG)


def differs(p: Problem, name: str, x: Tensor) -> bool:
    found, budget = p.judge(name, x)
    return not found <= budget


def shows(mechanism: str, m: Mistake, p: Problem, found: dict[str, Tensor | None]) -> bool:
    """Whether the mistake would have failed here, however a match is rounded; the kernel passes."""
    wrong = variant(mechanism, m, _Key(p))
    for n in [] if wrong is None else [n for n, x in found.items() if x is not None]:
        error, budget = (math.inf, 1.0) if wrong[n] is None else p.judge(n, wrong[n])
        if not error <= (1 + CLOSE) * budget:
            return True
    return False


def stale(mechanism: str, seen: list[tuple[Problem, dict]]) -> list[tuple[Mistake, float]]:
    """Tensors of an earlier case in place of a case's own, of the same sizes, if that explains all that is wrong.

    `seen` is in the order of the calls.
    """
    kind = MECHANISMS[mechanism]
    right = apply(mechanism, None)
    wrong = [
        i for i, (p, found) in enumerate(seen) if any(x is not None and differs(p, n, x) for n, x in found.items())
    ]
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
            return [(m, worst)]
    return []


def diagnose(
    mechanism: str, dtype: torch.dtype, seen: list[tuple[Problem, dict]], passed: list[tuple[Problem, dict]]
) -> list[tuple[Mistake, float]]:
    """The mistakes that explain everything that was seen, best first; at most three.

    `seen` and `passed` hold problems and what the kernel made of them; a mistake that would show in one of
    those that passed is none. Mistakes that cannot be told apart on these problems all appear.
    """
    matches = []
    seen = sorted(seen, key=lambda pair: pair[0].exact["o"].numel())  # most mistakes are out after the smallest
    for m in known(mechanism, dtype):
        worst, visible = 0.0, False
        for p, found in seen:
            given = {n: x for n, x in found.items() if x is not None}
            forward = {n: x for n, x in given.items() if not n.startswith("d")}
            for backwards, some in enumerate((forward, given)):  # most mistakes are out before their backward pass
                wrong = variant(mechanism, m, _Key(p), backwards) if worst <= 1 else None
                worst = max(worst, apart(m, p, some, wrong))
            if worst > 1 or not alike(m, p, {n: (x, wrong[n]) for n, x in given.items()}):
                worst = math.inf
                break
            visible = visible or any(differs(p, n, wrong[n]) for n in given)
        if worst <= 1 and visible:
            matches.append((m, worst))
    # what is equal comes before what is as wrong
    matches.sort(key=lambda match: (match[0].rounding or match[0].overflow, match[1]))
    kept: dict[str, tuple[Mistake, float]] = {}
    for match in matches:
        if match[0].name not in kept and not any(shows(mechanism, match[0], *pair) for pair in passed):
            kept[match[0].name] = match
        if len(kept) == 3:
            break
    return [*kept.values()]
