"""Names for a wrong kernel: a known mistake, a wrong term, another head (appendix "Check your kernel").

There is one way to compare. A mistake, in float64, explains a kernel if

1. in every failing call each wrong quantity is close to the mistake's: within `CLOSE` budgets or `UNEXPLAINED` of the
   deviation, which is a distance of 1;
2. it is clearly nearer to that than to the right one: at most `BETTER` of the error is left;
3. the mistake shows nowhere else, in these calls or in those that pass: it stays below `SHOWS` budgets.

Without 3 it is made in some places only. A place can save a wrong name, so more evidence is asked for: `TIGHT`,
`EQUAL`. Of a mistake that is right on paper only the size of its errors is known, and is compared: `AS_WRONG`. A budget
is the unit since right kernels differ by one at most.

All other numbers bound the work. It does not depend on the time that it takes: a few of the smallest calls that fail
are looked at.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from ._cases import MILD, SUB, TURNS, WEAK_HEAD, Case, but_for_gates
from ._cases import C as ASSUMED_CHUNK
from ._mechanisms import MECHANISMS, SHORT, Kind
from .mistakes import Mistake, apply, known
from .mistakes._calls import Line
from .oracle import Problem, evaluate, numbers

# -- evidence -----------------------------------------------------------------------------------
CLOSE = 3.0  # budgets: the kernel and the mistake round in orders of their own, and so does what either is made of
SHOWS = 1 + CLOSE  # budgets that something is wrong by, however a match is rounded
UNEXPLAINED = 0.2  # share of an error's root mean square: an error of many budgets rounds by many, too
BETTER = 0.75  # share of a largest error: what leaves more is no nearer than the right result
AS_WRONG = 4.0  # times that the errors of equal rounding may differ by: their luck differs
TIGHT = 0.5  # distance of a mistake that is made in some places only
EQUAL = 0.05  # share of elements spared beyond those of the best such mistake: with more, it fits by its place alone

# -- work ---------------------------------------------------------------------------------------
FIRST, REST = 4, 12  # failing calls for every mistake, of which few fit so many, and for those that are left
PASSING = 8  # passing calls besides the telling ones in which a mistake must not show: each costs a run of it
CHUNKS = (16, 32, 64, 128)  # lengths of chunks that are tried
LARGEST = 2**21  # numbers of the states of a call that is compared: larger ones take seconds
NAMES = 3  # that a report lists: a reader looks at no more

FOLLOWS = "dg is wrong besides, as one that is made of dq and dk"


@dataclass(frozen=True, eq=False)
class Seen:
    """A problem, and what a kernel made of each of its quantities."""

    problem: Problem
    results: dict[str, Tensor | None]

    @cached_property
    def given(self) -> dict[str, Tensor]:
        return {n: x for n, x in self.results.items() if x is not None}

    @cached_property
    def wrong(self) -> dict[str, Tensor]:
        """The places of each quantity that is outside its budget, as a mask.

        They are all elements in the heads, channels, sequences and spans of tokens that hold something wrong.
        """
        return {n: self.places(n) for n in self.given if not self.problem.in_budgets(n, self.given[n]) <= 1}

    @property
    def forward(self) -> list[str]:
        """The wrong quantities of the forward pass."""
        return [n for n in self.wrong if not n.startswith("d")]

    @property
    def size(self) -> int:
        return self.problem.exact["o"].numel()

    @property
    def small(self) -> bool:
        """Whether mistakes can be compared here quickly."""
        return self.problem.case.T <= SHORT and numbers(self.problem.case) <= LARGEST

    def places(self, name: str) -> Tensor:
        p, x = self.problem, self.given[name]
        wrong = p.outside(name, x)
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


def gates(kind: Kind) -> tuple[str, ...]:
    """The gradients of gates."""
    return tuple(f"d{n}" for n in kind.named("gate"))


# -- named mistakes ------------------------------------------------------------------------------
@functools.lru_cache(maxsize=4000)
def variant(mechanism: str, m: Mistake, C: int, p: Problem, backwards: int = 1) -> dict[str, Tensor] | None:
    """The mistake's results on a problem, in float64 unless it rounds; None if there are none (empty chunks)."""
    dtype = torch.float32 if m.right_on_paper else torch.float64
    x = {n: y.to(dtype) for n, y in p.inputs.items()}
    try:
        made = evaluate(apply(mechanism, m, C), MECHANISMS[mechanism], x, p.case, backwards=backwards)
    except (RuntimeError, IndexError):
        return None
    if backwards:  # a gradient that nothing reaches is 0 in a kernel
        made |= {n: torch.zeros_like(p.exact[n]) for n, y in made.items() if y is None and n.startswith("d")}
    return made


class Likeness(NamedTuple):
    """A quantity that is wrong in a call as the mistake makes it: its distance from that, and its error in budgets."""

    name: str
    distance: float  # at most 1
    error: float
    nearer: bool = False  # clearly nearer to the mistake's than to the right one


def likeness(m: Mistake, s: Seen, name: str, made: Tensor) -> Likeness | None:
    """How like a wrong quantity is to the mistake's, or their errors if that rounds; None if they are not alike."""
    p, x, exact, places = s.problem, s.given[name], s.problem.exact[name], s.wrong[name]
    error = p.in_budgets(name, x)
    if m.right_on_paper:
        mistake = p.in_budgets(name, made)
        if math.isinf(mistake):  # how tiles are masked decides the elements that are not finite
            return Likeness(name, 1.0, error) if m.overflow or math.isinf(error) else None
        far = error / max(1.0, AS_WRONG * mistake)
        return Likeness(name, far, error) if far <= 1 else None
    if name in gates(p.kind):  # some kernels mask the gradient of a gate of -inf, others leave there what cancels
        places = places & torch.isfinite(p.inputs[name.removeprefix("d")])
    if not m.whole and p.case.ends and "N" in p.kind.axes(name):  # what comes of no tokens is a matter by itself
        some = torch.tensor([a < b for a, b in pairwise(p.case.ends)], device=x.device)
        places = places & some[:, None, None, None]
    if not torch.equal(torch.isfinite(x) | ~places, torch.isfinite(made) | ~places):
        return None
    same = places & torch.isfinite(x)
    x, made = (torch.where(same, y.double(), exact) for y in (x, made))
    (left, near), (wrong, allowed) = p.compared(name, x, made), p.judge(name, x)
    nearer = wrong > allowed and left <= BETTER * wrong
    if left <= CLOSE * near:
        far = left / near / CLOSE
    elif wrong > allowed and not nearer:
        return None
    else:
        unexplained, whole = ((x - y).square().mean().sqrt().item() for y in (made, exact))
        far = unexplained / whole / UNEXPLAINED if whole else math.inf
    # NaN or inf in both is the mistake's own, and nothing that is right
    return Likeness(name, far, error, nearer or not torch.equal(same, places)) if far <= 1 else None


def as_wrong(m: Mistake, compared: list[tuple[Seen, str, Tensor]]) -> float:
    """The mean ratio of a kernel's errors to those of a mistake that is right on paper; at most 1 is alike.

    Or, where that overflows, which share of what is not finite only one of them has; they must overflow in the same
    cases.
    """
    if m.overflow:
        either = both = 0
        for s in dict.fromkeys(s for s, *_ in compared):
            masks = [(~torch.isfinite(s.given[n]), ~torch.isfinite(made)) for of, n, made in compared if of is s]
            if any(x.any() for x, _ in masks) != any(y.any() for _, y in masks):
                return math.inf
            either += sum((x | y).sum().item() for x, y in masks)
            both += sum((x & y).sum().item() for x, y in masks)
        return 1 - both / either if either else 0.0
    times = []
    for s, name, made in compared:
        kernel, mistake = s.problem.in_budgets(name, s.given[name]), s.problem.in_budgets(name, made)
        if SHOWS < mistake < math.inf:
            times.append(abs(math.log(kernel / mistake)))
    return sum(times) / len(times) / math.log(AS_WRONG) if times else 0.0


@dataclass(frozen=True)
class Match:
    """A mistake with chunks of C that is the kernel's wherever the kernel is wrong.

    Attributes:
        distance: the largest; at most 1.
        shown: the quantities in which it shows.
        own: those of them in which the kernel is wrong, if not in all.
        besides: the share of elements that the mistake makes wrong, and not the kernel, of quantities that are wrong.
        somewhere: whether the kernel makes it in some places or calls only.
        follows: what to say of the gates' gradient, where the mistake by itself does not make it wrong in that way.
    """

    mistake: Mistake
    C: int = ASSUMED_CHUNK
    distance: float = 0.0
    shown: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    besides: float = 0.0
    somewhere: bool = False
    follows: str = ""

    @property
    def name(self) -> str:
        """The mistake, and where alone the kernel makes it."""
        also = f"; {self.follows}" if self.follows else ""
        if self.own == self.shown or self.mistake.overflow:  # what is masked is not everywhere the same
            return self.mistake.name + also
        forward = frozenset(n for n in self.shown if not n.startswith("d"))
        passes = {forward: "the forward pass", self.shown - forward: "the backward pass"}
        *rest, last = sorted(self.own)
        where = passes.get(self.own, f"{', '.join(rest)}{' and ' * bool(rest)}{last}")
        return f"{self.mistake.name}, in {where} only{also}"

    @property
    def rank(self) -> tuple:
        """A key to sort by: first mistakes that explain everything, and equal results before errors of equal size."""
        m = self.mistake
        return self.somewhere, self.own != self.shown, self.follows != "", m.right_on_paper


def likenesses(m: Mistake, s: Seen, names: Sequence[str], made: dict[str, Tensor]) -> list[Likeness] | None:
    """These wrong quantities but gates' gradients that follow from a wrong dq or dk; None if one is not alike."""
    agreeing = []
    for n in names:
        if like := likeness(m, s, n, made[n]):
            agreeing.append(like)
        elif n not in gates(s.problem.kind) or not {"dq", "dk"} & {*s.wrong} or m.right_on_paper:
            return None
    return agreeing


def excesses(m: Mistake, s: Seen, made: dict[str, Tensor]) -> dict[str, int]:
    """The results that the mistake makes wrong; if the kernel does, too, how many elements of it only the mistake."""
    p, given = s.problem, [n for n in s.given if made[n] is not None]
    if m.right_on_paper:
        return {n: 0 for n in given if not p.in_budgets(n, made[n]) <= 1}
    beyond = {n: p.outside(n, made[n], SHOWS) for n in given}
    return {n: int((x & ~s.wrong[n]).sum()) if n in s.wrong else 0 for n, x in beyond.items() if x.any()}


def matched(mechanism: str, m: Mistake, C: int, calls: Sequence[Seen]) -> Match | None:
    """A mistake as these failing calls have it; None where one of them does not."""
    agreeing, beyond, errors, total, follows = [], [], [], 0, False
    for s in calls:
        for backwards, names in enumerate((s.forward, [*s.wrong])):  # most mistakes are out before a backward pass
            if not names:
                continue
            made = variant(mechanism, m, C, s.problem, backwards)
            missing = made is None or any(made[n] is None for n in names)
            if missing or (some := likenesses(m, s, names, made)) is None:
                return None
            agreeing, follows = agreeing + some, follows or len(some) < len(names)
            errors += [(s, n, made[n]) for n in names if backwards]
            beyond.append(excesses(m, s, made))
            total += sum(made[n].numel() for n in s.wrong if made[n] is not None)
            if any(beyond[-1].values()):  # gradients of an output that is wrong in places are no mistake's
                break
    following = {*gates(MECHANISMS[mechanism])} if follows else set()
    own, shown = {it.name for it in agreeing} - following, frozenset(n for more in beyond for n in more) - following
    besides = sum(n for more in beyond for n in more.values())
    if m.right_on_paper:
        farthest = as_wrong(m, errors)
        in_part = own != shown and any(not n.startswith("d") for n in own)  # in one pass, or in a gradient
        refuted = farthest > 1 or m.rounding and in_part
    else:
        farthest, most = (max([0.0, *of]) for of in ([it.distance for it in agreeing], [it.error for it in agreeing]))
        in_places = besides > 0 and (farthest > TIGHT or most < SHOWS)
        refuted = in_places or not own & shown <= {it.name for it in agreeing if it.nearer}
    own = frozenset(own & shown)
    if refuted or not own:
        return None
    return Match(m, C, farthest, shown, own, besides / max(total, 1), besides > 0, FOLLOWS * follows)


def shows(mechanism: str, it: Match, s: Seen) -> bool:
    """Whether the mistake would have failed here, however a match is rounded."""
    made = variant(mechanism, it.mistake, it.C, s.problem)
    names = [] if made is None else [n for n in it.own if n in s.given]
    return any(made[n] is None or not s.problem.in_budgets(n, made[n]) <= SHOWS for n in names)


def inseparable(mechanism: str, a: Match, b: Match, calls: Sequence[Seen]) -> bool:
    """Whether two mistakes cannot be told apart on these calls."""
    if a.mistake.right_on_paper or a.own != b.own:
        return False
    for s in calls:
        x, y = (variant(mechanism, it.mistake, it.C, s.problem) for it in (a, b))
        for n in (n for n in a.own if n in s.given):
            neither = ~(torch.isfinite(x[n]) | torch.isfinite(y[n]))
            one, other = (made[n].masked_fill(neither, 0.0).double() for made in (x, y))
            error, near = s.problem.compared(n, one, other)
            if not error <= near:
                return False
    return True


Calls = Sequence[Seen]  # all failed, or all passed
Ask = Callable[[Case], Seen | None]  # one more call of the kernel; None where it gives nothing


def alike(case: Case, kind: Kind) -> Iterator[Case]:
    """Cases like one that fails, each other in one thing, so that a name which fits by chance fits it no longer.

    Heads and channels stay as they are: a mistake in a part of them may lie elsewhere among more.
    """
    if case.ends:  # every sequence has tokens, and some have more
        ends = (0, *accumulate(max(b - a, 3) + 2 for a, b in pairwise(case.ends)))
        yield replace(case, ends=ends, T=ends[-1])
    else:
        yield replace(case, B=case.B + 1)
        yield replace(case, T=case.T + ASSUMED_CHUNK // 4 + 1)
        yield replace(case, T=case.T + ASSUMED_CHUNK)
    if case.reads:
        yield replace(case, reads=(case.reads[0] // 2 + 1, case.T))
        yield replace(case, reads=(0, case.reads[1]))
    if kind.cache and case.state:
        yield replace(case, past=case.past + ASSUMED_CHUNK // 2 + 5)


def again(s: Seen, call: Ask) -> list[Seen]:
    """New calls :func:`alike` that are wrong, too."""
    return [new for new in map(call, alike(s.problem.case, s.problem.kind)) if new and new.wrong]


def order(failed: Sequence[Seen]) -> list[Seen]:
    """Failing calls: the smallest with each set of wrong quantities first, then by size."""
    failed = sorted(failed, key=lambda s: s.size)
    first = {frozenset(s.wrong): s for s in reversed(failed)}
    return sorted(failed, key=lambda s: (first[frozenset(s.wrong)] is not s, s.size))


def by_name(
    mechanism: str, dtype: torch.dtype, failed: Calls, passed: Calls, call: Ask, telling: Iterable[Case]
) -> list[Match]:
    """The mistakes that explain what fails, and that cannot be told apart; at most three.

    One that a passing call contradicts, or that would make more wrong in a failing one, is made in some places only.
    """
    small = [s for s in failed if s.small]
    calls = order(small)[:REST] or failed[:1]
    passed = sorted((s for s in passed if s.small), key=lambda s: (not s.problem.case.telling, s.size))
    passed = passed[: PASSING + sum(s.problem.case.telling for s in passed)]
    matches = []
    for m in known(mechanism, dtype):
        if m.long is bool(small):
            continue
        for C in CHUNKS if m.chunked else (ASSUMED_CHUNK,):
            if matched(mechanism, m, C, calls[:FIRST]) and (it := matched(mechanism, m, C, calls)):
                somewhere = it.somewhere or any(shows(mechanism, it, s) for s in passed)
                matches.append(replace(it, somewhere=somewhere))
    matches.sort(key=lambda it: (it.rank, it.besides, it.distance))
    matches = [it for it in matches if it.rank == matches[0].rank]
    if matches and matches[0].somewhere:
        matches = in_places(mechanism, matches, failed, passed, calls, call)
    return told_apart(mechanism, matches, calls[:FIRST], call, telling)


def in_places(
    mechanism: str, matches: Sequence[Match], failed: list[Seen], passed: list[Seen], calls: list[Seen], call: Ask
) -> list[Match]:
    """The mistakes, made in some places only, that other calls do not contradict.

    A place can save a name that fits by chance: so such a mistake must agree in two calls at least, and in new ones
    :func:`alike`. A wrong decay must not show in a case that passes and has other gates only: such a kernel has no
    place, it decays otherwise.
    """
    like = {but_for_gates(s.problem.case) for s in failed}
    gates_only = [s for s in passed if but_for_gates(s.problem.case) in like]
    left = [it for it in matches if not it.mistake.right_on_paper]
    left = [it for it in left if it.distance <= TIGHT and it.besides <= left[0].besides + EQUAL]
    left = [it for it in left if it.mistake.line != Line.DECAY or not any(shows(mechanism, it, s) for s in gates_only)]
    new = again(calls[0], call) if left else []
    left = [it for it in left if all(matched(mechanism, it.mistake, it.C, [s]) for s in new)]
    return left if len(calls) + len(new) > 1 else []


def told_apart(mechanism: str, matches: list[Match], calls: Calls, call: Ask, telling: Iterable[Case]) -> list[Match]:
    """The first match and those that are the same in these calls; the telling cases are called until one is left."""
    names = {it.name for it in matches if it is matches[0] or inseparable(mechanism, matches[0], it, calls)}
    left = [it for it in matches if it.name in names]  # with every length of chunks that fits so far
    answers = iter(telling)
    while len({it.name for it in left}) > 1 and (case := next(answers, None)):
        s = call(case)
        fits = s and [
            it
            for it in left
            if (matched(mechanism, it.mistake, it.C, [s]) if s.wrong else it.somewhere or not shows(mechanism, it, s))
        ]
        left = fits or left
    best: dict[str, Match] = {}
    for it in left:
        best.setdefault(it.name, it)
    return [*best.values()][:NAMES]


# -- terms ---------------------------------------------------------------------------------------
PAIRS, STATE = "what its own chunk's tokens add", "what the state adds"
TWO = ("o", "dq", "dk", "dv")  # quantities that are sums of two terms
SOME = 2  # quantities that are explained: a kernel with more wrong ones is wrong in another way
LOW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FACTORS = {  # a term's factor, by the scale and the channels that share a gate
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
OWN = Mistake("", "", lambda c: c.chunks(lambda c, o, S: (c.run(S=torch.zeros_like(S))[0], S)))


@functools.lru_cache(maxsize=400)
def within_chunks(mechanism: str, p: Problem, C: int) -> dict[str, Tensor]:
    """The part of each quantity that does not pass through the states between chunks of C."""
    x = {n: y for n, y in p.inputs.items() if n != "d S"}
    made = evaluate(apply(mechanism, OWN, C), MECHANISMS[mechanism], x, p.case)
    return {n: torch.zeros_like(p.exact[n]) if made.get(n) is None else made[n] for n in TWO if n in p.exact}


def of_terms(name: str, first: str, second: str) -> str:
    if first == second:
        return f"{name} {first}"
    parts = ((PAIRS, first), (STATE, second))
    return f"{name}: " + " and ".join(f"{part} is {how}" for part, how in parts if how != "right")


def explained(mechanism: str, name: str, calls: Sequence[Seen]) -> str:
    """The sum of terms that a quantity is, wherever it is wrong and everywhere in passing calls; empty if none fits."""
    given = []
    for s in calls:
        case, exact = s.problem.case, s.problem.exact.get(name)
        scale = case.K**-0.5 if case.scale is None else case.scale
        if name in s.given and exact.numel() and scale:
            given.append((s, scale, s.wrong.get(name, torch.ones_like(exact, dtype=torch.bool))))

    def fits(s: Seen, places: Tensor, made: Tensor) -> bool:
        x = s.given[name]
        error, near = s.problem.compared(name, torch.where(places, x.double(), 0.0), torch.where(places, made, 0.0))
        return bool(torch.isfinite(x).all()) and error <= CLOSE * near

    if all(fits(s, places, s.problem.exact[name]) for s, _, places in given):  # too near to what is right
        return ""
    for how, factor in FACTORS.items():
        if how != "right" and all(
            fits(s, places, factor(scale, s.problem.case.K) * s.problem.exact[name]) for s, scale, places in given
        ):
            return of_terms(name, how, how)
    for C in CHUNKS if name in TWO and not MECHANISMS[mechanism].cache else ():
        for first, second in product(FACTORS, FACTORS):
            for s, scale, places in given:
                own, exact = within_chunks(mechanism, s.problem, C)[name], s.problem.exact[name]
                a, b = (FACTORS[how](scale, s.problem.case.K) for how in (first, second))
                if not fits(s, places, a * own + b * (exact - own)):
                    break
            else:
                return of_terms(name, first, second)
    return ""


def in_16_bits(name: str, calls: Sequence[Seen]) -> str:
    """The 16-bit dtype whose values a float32 quantity has; empty if it has more bits."""
    given = [s.given[name] for s in calls if name in s.given and s.given[name].dtype == torch.float32]
    for dtype, called in LOW.items():
        if any(x.any() for x in given) and all(torch.equal(x.to(dtype).float(), x) for x in given):
            return f"{name} rounded to {called}"
    return ""


def by_terms(mechanism: str, failed: Calls, passed: Calls, call: Ask) -> list[Match]:
    """The terms of a few wrong quantities; of outputs alone if these are wrong, since gradients are made of them.

    Nothing if one of them is no such sum. One that passing calls contradict is made in some places or calls only, and
    must fit new ones, as a mistake must.
    """
    failed, kind = order([s for s in failed if s.small])[:REST], MECHANISMS[mechanism]
    passed = sorted((s for s in passed if s.small), key=lambda s: s.size)[:PASSING]
    wrong = {n for s in failed for n in s.wrong}
    names = sorted(n for n in wrong if not n.startswith("d")) or sorted(wrong - {*gates(kind)} or wrong)
    if not 0 < len(names) <= SOME or not any(
        s.problem.in_budgets(n, s.given[n]) > SHOWS for s in failed for n in names if n in s.given
    ):
        return []
    said = [in_16_bits(n, failed) for n in names]
    said = said if all(said) else [explained(mechanism, n, failed) for n in names]
    if not all(said):
        return []
    somewhere = not all(in_16_bits(n, failed) or explained(mechanism, n, [*failed, *passed]) for n in names)
    somewhere = somewhere or any(not places.all() for s in failed for n, places in s.wrong.items() if n in names)
    if somewhere:
        failed = [*failed, *again(failed[0], call)]
        if len(failed) < 2 or not all(explained(mechanism, n, failed) for n in names):
            return []
    line = Line.GRADIENT if names[0].startswith("d") else Line.READ if "o" in names else Line.FINAL
    follows = FOLLOWS if {*gates(kind)} & wrong - {*names} and names[0].startswith("d") else ""
    own = frozenset(names)
    return [Match(Mistake("; ".join(said), line), shown=own, own=own, somewhere=somewhere, follows=follows)]


# -- a dropped state -----------------------------------------------------------------------------
# An output is a sum over the values of the tokens before it. So a call whose values are 0 except in a few tokens tells
# whether these reach an output at all, whatever the rule by which a kernel drops a state.
STRONG = WEAK_HEAD, *TURNS  # gates that are strong, but not for all that a state holds
SPANS = 8  # sub-chunks before the first wrong output, which share its error


def by_drop(failed: Sequence[Seen], forward: Callable[[Problem], dict | None], call: Ask) -> list[Match]:
    """A span of tokens that should reach the first wrong output and adds nothing to it, if mild gates are right."""
    strong = (s for s in failed if s.problem.case.gate in STRONG and "o" in s.wrong)
    s = min(strong, key=lambda s: s.size, default=None)
    if s is None or any(s.problem.case.gate == MILD for s in failed):
        return []
    p, case, kind = s.problem, s.problem.case, s.problem.kind
    band, mild = p.band("o"), call(replace(case, gate=MILD))
    if mild is None or mild.wrong:
        return []
    t, b, h, _ = p.outside("o", s.given["o"]).transpose(0, 1).nonzero()[0].tolist()
    for a in range(t // SUB * SUB - SUB, max(-1, t - (SPANS + 1) * SUB), -SUB):
        x = {n: p.inputs[n] for n in kind.arguments}
        x["v"] = torch.zeros_like(x["v"])
        x["v"][:, a : a + SUB] = p.inputs["v"][:, a : a + SUB]
        until = {n: y[:, : t + 1] for n, y in x.items()}
        right = evaluate(kind.oracle, kind, until, case, frozen=[*x])["o"][b, t, h]
        if (right.abs() > band[b, t, h] / SPANS).any():
            made = forward(replace(p, inputs=x))
            if made and not made["o"][b, t, h].any():
                where = "gates are strong" if kind.named("gate") else "keys overwrite it"
                return [Match(Mistake(f"state dropped where {where}", Line.CARRY))]
    return []


# -- other heads ---------------------------------------------------------------------------------
# A kernel finds its head by an index. A wrong index makes its output that of another head's tensor, whichever index it
# is: so every head of every batch entry is tried in the place of the right one.
PROBED = 8  # programs whose heads are looked for: enough to tell one index from another
TOKENS_ON = 24  # tokens after a program's first wrong one that are made again with every head
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
SEVERAL = (("q", "k"), ("k", "v"), ("g", "beta"), ("q", "k", "v"), ("k0", "v0"), ("k", "v", "k0", "v0"))


def slice_of(p: Problem, name: str, x: Tensor, at: Place, span: slice) -> Tensor:
    """One program's slice of a tensor, `[1, T, 1, ...]`, or `[1, 1, ...]` of a state."""
    b, h = at
    head = p.kind.head_axis(name)
    y = x.narrow(head, h, 1)
    if head == 1:
        return y[b : b + 1]
    if p.case.ends:
        return y[:, span]
    return y[b : b + 1] if "T0" in p.kind.axes(name) else y[b : b + 1, span]


def sources(s: Seen, tensors: tuple[str, ...], at: Place) -> list[Place]:
    """The heads whose tensors, in the place of a program's own, give what the kernel gave; none if too many to try."""
    p, x, (b, h) = s.problem, s.given["o"], at
    wrong = p.outside("o", x)
    a, end = (p.case.ends[b], p.case.ends[b + 1]) if p.case.ends else (0, p.case.T)
    row = 0 if p.case.ends else b
    first = int(wrong[row, a:end, h].any(-1).nonzero()[0])
    span = slice(a, min(end, a + first + TOKENS_ON))
    names = [n for n in (*p.kind.arguments, *p.kind.states) if n in p.inputs]
    heads = {n: p.inputs[n].shape[p.kind.head_axis(n)] for n in names}
    H = heads[tensors[0]]
    packed_tokens = p.case.ends and not any(p.kind.head_axis(n) == 1 for n in tensors)
    entries = [b] if packed_tokens else range(len(p.inputs[tensors[0]]))
    places = [(e, i) for e in entries for i in range(H)]
    too_many = len(places) * (span.stop - span.start) * p.case.K * p.case.V > FIRST * LARGEST
    if too_many or any(heads[n] != H for n in tensors):
        return []
    given = {}
    for n in names:
        if n in tensors:
            given[n] = torch.cat([slice_of(p, n, p.inputs[n], place, span) for place in places])
        else:
            mine = slice_of(p, n, p.inputs[n], (b, h * heads[n] // x.shape[2]), span)
            given[n] = mine.expand(len(places), *mine.shape[1:])
    state = p.kind.whole([given[n] for n in p.kind.states if n in given])
    tokens = [given[n] for n in p.kind.arguments]
    with torch.no_grad():
        made = p.kind.oracle(*tokens, scale=p.case.scale, initial_state=state, cu_seqlens=None)[0][:, :, 0]
    o, band = x[row, span, h].double(), p.band("o")[row, span, h]
    near = ((made - o).abs() <= CLOSE * band).flatten(1).all(1)
    return [places[int(i)] for i in near.nonzero().flatten()]


def rule(table: dict[Place, Place], H: int) -> str:
    """The simplest index that gives every entry; empty where none does or the entries are too few to tell."""
    if len(table) < 3:
        return ""
    for said, of, choices in RULES:
        for n in choices:
            if all(of(place, H, n) == source for place, source in table.items()):
                return said.format(n=n)
    return ""


def by_head(mechanism: str, failed: Sequence[Seen]) -> list[Match]:
    """A tensor of another head or batch entry, if that explains o in the programs looked at."""
    kind = MECHANISMS[mechanism]
    wide = sorted(failed, key=lambda s: -s.problem.exact["o"].shape[0] * s.problem.exact["o"].shape[2])
    for s in wide[:FIRST]:
        p, x = s.problem, s.given["o"]
        if "o" not in s.wrong or p.in_budgets("o", x) < SHOWS or x.shape[0] * x.shape[2] == 1:
            continue
        wrong = p.outside("o", x).any(-1)
        spans = [wrong[0, a:b].any(0) for a, b in pairwise(p.case.ends)] if p.case.ends else [*wrong.any(1)]
        programs = [tuple(at) for at in torch.stack(spans).nonzero().tolist()]
        programs = dict.fromkeys(programs[i * (len(programs) - 1) // (PROBED - 1)] for i in range(PROBED))
        names = [n for n in (*kind.arguments, *kind.states) if n in p.inputs]
        for tensors in (*((n,) for n in names), *(some for some in SEVERAL if {*some} <= {*names})):
            table: dict[Place, Place] = {}
            for at in programs:
                places = sources(s, tensors, at)
                if len(places) != 1:
                    break
                table[at] = places[0]
            else:
                index = rule(table, p.inputs[tensors[0]].shape[kind.head_axis(tensors[0])])
                of = "sequence" if p.case.ends else "batch entry"
                reads = [f"head {h} of {of} {b} reads head {i} of {of} {e}" for (b, h), (e, i) in table.items()]
                name = f"{' and '.join(tensors)} of another head: {'; '.join(reads[:3])}"
                name += f"; all {len(table)} that were looked at read {index}" if index else ""
                return [Match(Mistake(f"{name} (case {p.case.name})", Line.HEAD))]
    return []
