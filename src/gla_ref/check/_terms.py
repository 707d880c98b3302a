"""What is wrong with a quantity, said by its terms: its chunk's own, the state's (appendix "Check your kernel").

In a chunk o, dq, dk and dv are sums of two terms. A kernel computes them in two products, so that its author may leave
one of them out, or its scale, or take it twice; which chunks it has is found by trying.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from ._budgets import Problem
from ._mechanisms import MECHANISMS
from .mistakes import CHUNKS, LINEAR, Mistake, apply
from .oracle import evaluate

CLOSE = 3.0  # budgets that a kernel may lie from what it is said to compute
FEW = 2  # quantities that are explained by their terms
PAIRS, STATE = "what its own chunk's tokens add", "what the state adds"
TWO = ("o", "dq", "dk", "dv")  # what is a sum of two terms
SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FACTORS = {  # of a term, of what a kernel is called with: the scale, and the channels that share a gate
    "right": lambda s, K: 1.0,
    "left out": lambda s, K: 0.0,
    "without scale": lambda s, K: 1 / s,
    "with scale twice": lambda s, K: s,
    "taken twice": lambda s, K: 2.0,
    "with the wrong sign": lambda s, K: -1.0,
    "times ln 2": lambda s, K: math.log(2),
    "divided by ln 2": lambda s, K: 1 / math.log(2),
    "averaged over channels, not summed": lambda s, K: 1 / K,
}

OWN = Mistake("", "", lambda c: c.chunks(lambda c, o, S: (c.run(S=torch.zeros_like(S))[0], S)), LINEAR)


def pairs(mechanism: str, p: Problem, C: int) -> dict[str, Tensor]:
    """The part of each quantity that does not pass through the states between chunks of C."""
    x = {n: y for n, y in p.inputs.items() if n != "d S"}
    made = evaluate(apply(mechanism, OWN, C), MECHANISMS[mechanism], x, p.case)
    return {n: torch.zeros_like(p.exact[n]) if made.get(n) is None else made[n] for n in TWO if n in p.exact}


def fits(p: Problem, name: str, x: Tensor, made: Tensor) -> bool:
    if not torch.isfinite(x).all():
        return False
    found, near = p.judge(name, x, made)
    return found <= CLOSE * near


def said(name: str, first: str, second: str) -> str:
    if first == second:
        return f"{name} {first}"
    parts = ((PAIRS, first), (STATE, second))
    return f"{name}: " + " and ".join(f"{part} is {how}" for part, how in parts if how != "right")


def explained(mechanism: str, name: str, seen: list[tuple[Problem, dict]], inside: dict) -> str:
    """What a quantity is in all problems; empty where it is no such sum. `inside` keeps what was worked out."""
    given = [(p, found[name]) for p, found in seen if found.get(name) is not None and p.exact[name].numel()]
    scales = [p.case.K**-0.5 if p.case.scale is None else p.case.scale for p, _ in given]
    given = [(p, x, s) for (p, x), s in zip(given, scales, strict=True) if s]

    if all(fits(p, name, x, p.exact[name]) for p, x, _ in given):  # too near to what is right to be anything else
        return ""
    for how, factor in FACTORS.items():
        if how != "right" and all(fits(p, name, x, factor(s, p.case.K) * p.exact[name]) for p, x, s in given):
            return said(name, how, how)
    for C in CHUNKS if name in TWO else ():
        for first, second in product(FACTORS, FACTORS):
            for p, x, s in given:
                if (C, id(p)) not in inside:
                    inside[C, id(p)] = pairs(mechanism, p, C)
                a, b = (FACTORS[how](s, p.case.K) for how in (first, second))
                own = inside[C, id(p)][name]
                if not fits(p, name, x, a * own + b * (p.exact[name] - own)):
                    break
            else:
                return said(name, first, second)
    return ""


def by_terms(mechanism: str, names: list[str], seen: list[tuple[Problem, dict]], passed: list) -> list[str]:
    """What each of a few wrong quantities is, also where the kernel passes; nothing if one of them is no such sum."""
    if len(names) > FEW:
        return []
    inside: dict = {}
    for problems in (seen, [*seen, *passed]):
        found = [explained(mechanism, n, problems, inside) for n in names]
        if not all(found):
            return []
    return found


def rounded(name: str, seen: list[tuple[Problem, dict]]) -> str:
    """That a quantity in float32 has no more bits than one of 16, if that is so."""
    given = [x for x in (found[name] for _, found in seen if found.get(name) is not None) if x.dtype == torch.float32]
    for dtype, called in SHORT.items():
        if any(x.any() for x in given) and all(torch.equal(x.to(dtype).float(), x) for x in given):
            return f"{name} rounded to {called}"
    return ""
