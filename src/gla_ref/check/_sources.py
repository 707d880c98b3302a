"""The head and the batch entry that a tensor is read from, if they are not a program's own ("Check your kernel").

A kernel finds its head by an index. A wrong index makes its output that of another head's tensor, whichever index it
is: so every head of every batch entry is tried in the place of the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._budgets import Problem
from ._diagnose import CLOSE, PLAIN, Match, differs
from ._mechanisms import MECHANISMS
from .mistakes import CHUNK, Mistake

LINE = "which head, which batch entry"
FEW, SIZE = 8, 2**23  # programs that are looked at, and elements of their outputs that are made for that
AHEAD = 24  # tokens after a program's first wrong one that are compared
CASES = 3  # failing cases that are tried, those with the most heads first
Place = tuple[int, int]  # batch entry or sequence, and head
N = range(2, 129)
RULES: tuple[tuple[str, Callable[[Place, int, int], Place], Sequence[int]], ...] = (  # functions of (b, h), H, n
    ("head 0", lambda p, H, n: (p[0], 0), (0,)),
    ("batch entry 0", lambda p, H, n: (0, p[1]), (0,)),
    ("head h mod {n}", lambda p, H, n: (p[0], p[1] % n), N),
    ("head h - {n}", lambda p, H, n: (p[0], p[1] - n), (1, *N)),
    ("head h + {n}", lambda p, H, n: (p[0], p[1] + n), (1, *N)),
    ("head h // {n}", lambda p, H, n: (p[0], p[1] // n), N),
    ("program i mod {n}, i = b H + h", lambda p, H, n: divmod((p[0] * H + p[1]) % n, H), N),
    ("program b {n} + h instead of b H + h", lambda p, H, n: divmod(p[0] * n + p[1], H), N),
)


def sets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The tensors that may come from another head: each by itself, then some that kernels index alike."""
    several = (("q", "k"), ("k", "v"), ("g", "beta"), ("q", "k", "v"), ("k0", "v0"), ("k", "v", "k0", "v0"))
    return [*((n,) for n in names), *(some for some in several if {*some} <= {*names})]


def own(p: Problem, name: str, x: Tensor, at: Place, span: slice) -> Tensor:
    """One program's slice of a tensor, `[1, T, 1, ...]`, or `[1, 1, ...]` of a state."""
    b, h = at
    head = p.kind.head_axis(name)
    y = x.narrow(head, h, 1)
    if head == 1:
        return y[b : b + 1]
    if p.case.ends:
        return y[:, span]
    return y[b : b + 1] if "T0" in p.kind.axes(name) else y[b : b + 1, span]


def found_at(p: Problem, x: Tensor, some: tuple[str, ...], at: Place) -> list[Place] | None:
    """The heads whose tensors, in the place of a program's own, give what the kernel gave; None if that is too many."""
    b, h = at
    off = ~((x.double() - p.exact["o"]).abs() <= p.band("o"))
    a, end = (p.case.ends[b], p.case.ends[b + 1]) if p.case.ends else (0, p.case.T)
    row = 0 if p.case.ends else b
    first = int(off[row, a:end, h].any(-1).nonzero()[0])
    span = slice(a, min(end, a + first + AHEAD))
    names = [n for n in (*p.kind.arguments, *p.kind.states) if n in p.inputs]
    heads = {n: p.inputs[n].shape[p.kind.head_axis(n)] for n in names}
    HV = x.shape[2]
    entries = (
        [b] if p.case.ends and not any(p.kind.head_axis(n) == 1 for n in some) else [*range(len(p.inputs[some[0]]))]
    )
    H = heads[some[0]]
    if any(heads[n] != H for n in some):
        return None
    candidates = [(e, i) for e in entries for i in range(H)]
    if len(candidates) * (span.stop - span.start) * p.case.K * p.case.V > SIZE:
        return None
    given = {}
    for n in names:
        if n in some:
            places = [(e, i) for e, i in candidates]
            given[n] = torch.cat([own(p, n, p.inputs[n], place, span) for place in places])
        else:
            mine = own(p, n, p.inputs[n], (b, h * heads[n] // HV), span)
            given[n] = mine.expand(len(candidates), *mine.shape[1:])
    states = tuple(given[n] for n in p.kind.states if n in given)
    state = None if not states else states if p.kind.cache else states[0]
    tokens = [given[n] for n in p.kind.arguments]
    with torch.no_grad():
        made = p.kind.oracle(*tokens, scale=p.case.scale, initial_state=state, cu_seqlens=None)[0][:, :, 0]
    given_o, band = x[row, span, h].double(), p.band("o")[row, span, h]
    near = ((made - given_o).abs() <= CLOSE * band).flatten(1).all(1)
    return [candidates[int(i)] for i in near.nonzero().flatten()]


def rule(table: dict[Place, Place], H: int) -> str:
    """The simplest index that gives every entry; empty where none does or the entries are too few to tell."""
    if len(table) < 3:
        return ""
    for said, of, numbers in RULES:
        for n in numbers:
            if all(of(place, H, n) == source for place, source in table.items()):
                return said.format(n=n)
    return ""


def where(place: Place, packed: bool) -> str:
    return f"head {place[1]} of {'sequence' if packed else 'batch entry'} {place[0]}"


def misplaced(mechanism: str, failed: Sequence[tuple[Problem, dict]]) -> list[Match]:
    """A tensor of another head or batch entry, if that explains o in the programs looked at."""
    kind = MECHANISMS[mechanism]
    shown = frozenset({"o"})
    wide = sorted(failed, key=lambda pair: -pair[0].exact["o"].shape[0] * pair[0].exact["o"].shape[2])
    for p, found in wide[:CASES]:
        x = found["o"]
        if not differs(p, "o", x) or p.judge("o", x)[0] < PLAIN * p.judge("o", x)[1] or x.shape[0] * x.shape[2] == 1:
            continue
        wrong = ~((x.double() - p.exact["o"]).abs() <= p.band("o"))
        if p.case.ends:
            spans = [wrong[0, a:b].any(-1).any(0) for a, b in zip(p.case.ends, p.case.ends[1:], strict=False)]
            programs = torch.stack(spans).nonzero().tolist()
        else:
            programs = wrong.any(-1).any(1).nonzero().tolist()
        some_of = [tuple(programs[i * (len(programs) - 1) // (FEW - 1)]) for i in range(FEW)]
        for some in sets([n for n in (*kind.arguments, *kind.states) if n in p.inputs]):
            table: dict[Place, Place] = {}
            for at in dict.fromkeys(some_of):
                sources = found_at(p, x, some, at)
                if not sources or len(sources) > 1:
                    break
                table[at] = sources[0]
            else:
                H = p.inputs[some[0]].shape[kind.head_axis(some[0])]
                index = rule(table, H)
                seen = [
                    f"{where(at, bool(p.case.ends))} reads {where(to, bool(p.case.ends))}" for at, to in table.items()
                ]
                name = f"{' and '.join(some)} of another head: {'; '.join(seen[:3])}"
                name += f"; all {len(table)} that were looked at read {index}" if index else ""
                m = Mistake(name + f" (case {p.case.name})", LINE, None, ())
                return [Match(m, CHUNK, 0.0, shown, shown, "")]
    return []
