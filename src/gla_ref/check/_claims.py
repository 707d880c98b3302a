"""The calls that a kernel claims to take, and the cases that are made for them (appendix "Check your kernel")."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, product
from typing import NamedTuple

import torch

from ._cases import BY_CHUNKS, GATES, MILD, SUB, TURNS, WEAK_HEAD, C, Case, cases
from ._mechanisms import MECHANISMS, Kind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
USUAL = (16, 32, 64, 128, 256)  # sizes that a claim which is a function is asked for
WIDER = 16  # times the numbers of a state that a claim makes of a case's before the case gets smaller
MANY_HEADS, PROGRAMS = 16, 148  # with fewer heads a case may keep its batch entries; multiprocessors of a GPU
FLOORS = (None, -20.0, -5.0, -1.0, -0.1)  # bounds of gates that it is asked for
WIDE = Case(K=40, V=36)  # sizes where a claim names none
LOWEST = {  # the lowest gate, or less, of each rung of the ladder that is no number
    "zero": 0.0,
    MILD: -1.0,
    "switch - 1e-3": -1.26,
    "switch + 1e-3": -1.25,
    "mild and strong chunks": -30.0,
    BY_CHUNKS: -30.0,
    WEAK_HEAD: -2.5,
    **dict.fromkeys(TURNS, -4.95),
    **dict.fromkeys(("one strong channel", "resets at chunk ends", "many resets"), -math.inf),
}


def dtype_of(x: torch.dtype | str) -> torch.dtype:
    """A dtype by its name here (bf16), by PyTorch's, or as it is."""
    dtype = DTYPES.get(x, getattr(torch, x, None)) if isinstance(x, str) else x
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {x!r}")
    return dtype


def lowest(gate: str) -> float:
    """The lowest gate of a rung of the ladder, or less."""
    return LOWEST[gate] if gate in LOWEST else float(gate)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Claim:
    """The calls that a kernel is made for; by default all of them.

    Attributes:
        K: the sizes of keys that it takes; None for any.
        V: the sizes of values.
        multiples: what sizes and lengths must be multiples of: {"K": 16, "T": 64}; T is that of every sequence.
        dtypes: those of q, k and v.
        packed: whether it takes packed sequences.
        state: whether it takes an initial state.
        gradient: whether it has a backward pass.
        min_gate: no log gate lies below.
        accepts: all of that as a function of a case instead.
    """

    K: tuple[int, ...] | None = None
    V: tuple[int, ...] | None = None
    multiples: Mapping[str, int] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())
    packed: bool = True
    state: bool = True
    gradient: bool = True
    min_gate: float = -math.inf
    accepts: Callable[[Case], bool] | None = None

    @classmethod
    def of(cls, supports: Mapping | Callable[[Case], bool] | None) -> "Claim":
        """A claim as a caller states it."""
        if supports is None:
            return cls()
        if callable(supports):
            return cls(accepts=supports)
        if not isinstance(supports, Mapping):
            raise TypeError(f"supports: expected a dict or a function of a case, got {type(supports).__name__}")
        known = [f.name for f in fields(cls) if f.name != "accepts"]
        for name in supports:
            if name not in known:
                raise ValueError(f"supports: expected {', '.join(known)}; got {name!r}")
        given = dict(supports)
        for name in {"K", "V"} & {*given}:
            sizes = given[name] if isinstance(given[name], Sequence) else (given[name],)
            if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
                raise ValueError(f"supports: expected sizes for {name}, got {given[name]!r}")
            given[name] = tuple(sorted({*sizes}))
        if wrong := {*given.get("multiples", ())} - {*"TKV"}:
            raise ValueError(f"supports: expected multiples of T, K or V, got {', '.join(sorted(wrong))}")
        if "dtypes" in given:
            names = given["dtypes"]
            given["dtypes"] = tuple(map(dtype_of, (names,) if isinstance(names, str | torch.dtype) else names))
        if not given.get("min_gate", -1.0) <= 0:
            raise ValueError(f"supports: expected a log gate, at most 0, for min_gate, got {given['min_gate']}")
        return cls(**given)

    def __str__(self) -> str:
        """The claim in words; empty where nothing is left out."""
        if self.accepts is not None:
            return f"what {getattr(self.accepts, '__name__', 'a function')} accepts"
        said = [f"{n} = {' or '.join(map(str, getattr(self, n)))}" for n in "KV" if getattr(self, n)]
        said += [f"{n} in multiples of {m}" for n, m in self.multiples.items()]
        if self.dtypes != Claim.dtypes:
            said.append(" or ".join(str(x).removeprefix("torch.") for x in self.dtypes))
        said += [] if self.packed else ["no packed sequences"]
        said += [] if self.state else ["no initial state"]
        said += [] if self.gradient else ["no gradient"]
        said += [] if math.isinf(self.min_gate) else [f"gates down to {self.min_gate:g}"]
        return ", ".join(said)

    def size(self, name: str, n: int) -> int:
        """The size nearest to n that is claimed."""
        n, sizes = up(n, self.multiples.get(name, 1)), getattr(self, name)
        return n if sizes is None else min(sizes, key=lambda m: abs(math.log(m / n)))

    def fit(self, case: Case, kind: Kind) -> Case | None:
        """The case itself, one made of it that is claimed, or None where nothing would be left of its point."""
        if self.accepts is not None:
            return next((made for made in nearby(case, kind) if self.accepts(made)), None)
        about_state = case.zeros or case.found or case.other in kind.states
        if case.ends and not self.packed or about_state and not self.state:
            return None
        made = replace(case, state=case.state and self.state, K=self.size("K", case.K), V=self.size("V", case.V))
        made = longer(fewer(made, case), self.multiples.get("T", 1))
        return milder(made, self.min_gate) if kind.named("gate") else made


class Ladder(NamedTuple):
    """The cases of a level as far as they are claimed.

    Attributes:
        cases: what there is to try.
        made: how many of them are not of the level itself, but made in place of one, or for a pair of sizes.
        left: names of those of the level that stand for nothing that is claimed, or for nothing new.
    """

    cases: list[Case]
    made: int
    left: list[str]


def claimed(mechanism: str, level: str, seed: int, claim: Claim, dtype: torch.dtype) -> Ladder:
    """The ladder of a level under a claim: its cases in their order, then the pairs of sizes that none of them has.

    Raises:
        ValueError: the claim leaves nothing.
    """
    kind, whole = MECHANISMS[mechanism], cases(mechanism, level, seed)
    if dtype not in claim.dtypes:
        raise ValueError(f"supports: {claim}, so nothing is left to test in {dtype}")
    places, tried, left = {}, [], []
    for case in whole:
        made = claim.fit(case, kind)
        key = made and replace(made, name="", telling=False, often=False)
        if made is None or made != case and key in places:
            left.append(case.name)
            if made and made.often:  # the case that stands for it is called as often
                tried[places[key]] = replace(tried[places[key]], often=True)
        else:
            places[key] = len(tried)
            tried.append(made)
    if not tried:
        raise ValueError(f"supports: {claim}, so nothing is left to test")
    made = len({*tried} - {*whole})
    sizes_tried, sizes = {(case.K, case.V) for case in tried}, USUAL[2:4] if claim.accepts else None
    for K, V in product(sizes or claim.K or (0,), sizes or claim.V or (0,)):
        new = Case(f"sizes K={K or WIDE.K} V={V or WIDE.V}", H=2, T=C + 3, K=K or WIDE.K, V=V or WIDE.V)
        if K + V and (new := claim.fit(new, kind)) and (new.K, new.V) not in sizes_tried:
            tried.append(new)
            sizes_tried.add((new.K, new.V))
            made += 1
    return Ladder(tried, made, left)


def longer(case: Case, multiple: int) -> Case:
    """The same with every sequence filled up to a multiple of so many tokens."""
    if case.ends is None:
        T = up(case.T, multiple)
        return replace(case, T=T, name=case.name.replace(f"length {case.T}", f"length {T}"))
    ends = [0]
    for a, b in pairwise(case.ends):
        ends.append(ends[-1] + up(b - a, multiple))
    return replace(case, T=ends[-1], ends=tuple(ends))


def fewer(case: Case, small: Case) -> Case:
    """A case with fewer batch entries, if it has far more channels than the `small` one, and many heads or other gates.

    Others have several batch entries; these are tried for their heads and gates. More programs than a GPU has
    multiprocessors stay more.
    """
    if case.ends or case.K * case.V < WIDER * small.K * small.V or (case.H < MANY_HEADS and case.gate == MILD):
        return case
    return replace(case, B=min(case.B, PROGRAMS // case.H + 1) if case.B * case.H > PROGRAMS else 1)


def milder(case: Case, floor: float | None) -> Case:
    """The same with no gate below the floor."""
    if floor is None or lowest(case.gate) >= floor:
        return case
    if case.gate in LOWEST:
        return replace(case, floor=floor)
    rung = next((rung for rung in GATES if lowest(rung) == floor), f"{floor:g}")
    return replace(case, gate=rung, name=case.name.replace(case.gate, rung))


def nearby(case: Case, kind: Kind) -> Iterator[Case]:
    """Cases to ask for in place of one, the nearest first: sizes, then gates, lengths, strides and the state change."""
    usual = sorted(product(USUAL, USUAL), key=lambda s: abs(math.log(s[0] / case.K)) + abs(math.log(s[1] / case.V)))
    sizes = [(case.K, case.V), *usual]
    floors = FLOORS if kind.named("gate") else FLOORS[:1]
    about_state = case.zeros or case.found or case.other in kind.states
    states = (True, False) if case.state and not about_state else (case.state,)
    strides = dict.fromkeys((case.strides, "contiguous"))
    for state, way, multiple, floor, (K, V) in product(states, strides, (1, SUB, C, 2 * C), floors, sizes):
        yield milder(longer(replace(case, K=K, V=V, state=state, strides=way), multiple), floor)
