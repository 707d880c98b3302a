"""The exact result of a mechanism, emulated runs, and how wrong a right kernel may be (chapters 7 and 11).

    x = {"q": q, "k": k, "v": v, "g": g, "S0": S0, "d o": do, "d S": dS}  # as the kernel is given them
    right, low = oracle.exact("gla", x), oracle.emulated("gla", x)
    for quantity, (error, budget) in oracle.judge("gla", {"o": o, "dg": dg}, right, low).items(): ...

Tensors are named as the mechanism's, initial states S0 (or k0 and v0), and what the loss puts on o and on a state is
"d " + its name. The kit judges with `Problem.judge` below, benchmarks and some tests of kernels with `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from ..rounding import budget, error, unit
from ._cases import MILD, C, Case, held, inputs
from ._mechanisms import LONGEST_CHUNK, MECHANISMS, SHORT, Kind

__all__ = ["emulated", "exact", "judge"]

LUCKS = 16  # orders of a sum that are tried
LARGE_STATES, ENOUGH_HEADS = 2**20, 16  # numbers of all states, and heads: above, one order of each run is enough
CPU_KEYS = 1000  # keys that a CPU attends to as fast as a GPU
KEPT_PROBLEMS = 400
NEAR, ROUNDS = 2.0, 8  # an error below so many budgets may be luck: it is judged by up to so many times as many runs
WORKED_OUT: dict[tuple, Problem] = {}


def evaluate(
    fn: Callable,
    kind: Kind,
    x: dict,
    case: Case,
    frozen: Sequence[str] = (),
    backwards: int = 1,
    between: Callable[[], object] | None = None,
    moved: bool = False,
) -> dict[str, Tensor | None]:
    """o, final states and every gradient of one call; None for what the function does not give.

    There is no gradient for the inputs that are `frozen`; what a loss of the state alone does not reach has one of
    0. Of several `backwards` passes through the same graph the last one counts; what `between` does comes just before
    it. Boundaries that are `moved` lay elsewhere in the same tensor during a call before.
    """
    arguments = [a.name for a in kind.mechanism.arguments if a.name in x]
    names = [*arguments, *kind.states]
    leaves = {n: x[n].clone() if x[n].is_inference() else x[n].detach() for n in names if n in x}
    leaves = {n: y.requires_grad_(n not in frozen) for n, y in leaves.items()}
    given = [leaves[n] for n in kind.states if n in leaves]
    cu = None
    if case.ends is not None:
        cu = torch.tensor(case.ends, dtype=getattr(torch, case.index), device=x["q"].device)
    call = partial(
        fn, *(leaves[n] for n in arguments), scale=case.scale, initial_state=kind.whole(given), cu_seqlens=cu
    )
    if moved:
        right = cu.clone()
        cu.copy_(right[-1] - right.flip(0))
        call()
        cu.copy_(right)
    o, state = call()
    states = kind.parts(state) or (None,) * len(kind.states)
    results = {"o": o, **dict(zip(kind.states.values(), states, strict=True))}
    pulled = {n: y for n, y in results.items() if f"d {n}" in x and y is not None and y.requires_grad}
    differentiable = {n: y for n, y in leaves.items() if y.requires_grad}
    grads = (None,) * len(differentiable)
    reached = pulled if case.loss == "state" else "o" in pulled
    for left in reversed(range(backwards if reached else 0)):
        pull = 1.0 if x["q"].dtype == torch.float16 else case.pull
        cotangents = [x[f"d {n}"].to(y.dtype) for n, y in pulled.items()]
        cotangents = cotangents if pull == 1 else [pull * d for d in cotangents]
        if between and not left:
            between()
        options = {"allow_unused": True, "retain_graph": left > 0, "materialize_grads": case.loss == "state"}
        grads = torch.autograd.grad([*pulled.values()], [*differentiable.values()], cotangents, **options)
        grads = grads if pull == 1 else [d if d is None else d / pull for d in grads]
    results |= {f"d{n}": d for n, d in zip(differentiable, grads, strict=True)}
    return {n: y if y is None else y.detach() for n, y in results.items()}


def parts(kind: Kind, name: str, x: Tensor) -> list[tuple]:
    """Indices of what is judged apart: octaves along the time axis, or all of a tensor that has none.

    They are [0, 64), [64, 128), [128, 256) ...: an error among late tokens shows in its own.
    """
    if "T" not in kind.axes(name):
        return [(slice(None),)]
    ends = [0, C]
    while ends[-1] < x.shape[1]:
        ends.append(2 * ends[-1])
    return [(slice(None), slice(a, b)) for a, b in pairwise(ends)]


def errors(made: Tensor, exact: Tensor, n: int, axis: int) -> Tensor:
    """The :func:`~gla_ref.rounding.error` of each of the n problems that lie side by side along `axis`, `[n]`."""
    if not exact.numel():
        return exact.new_zeros(n)
    off, exact = (x.unflatten(axis, (n, -1)).movedim(axis, 0).flatten(1) for x in ((made - exact).abs(), exact))
    rms = exact.square().mean(1).sqrt()
    relative = off.amax(1) / torch.where(rms > 1e-3, rms, 1.0)
    return relative.nan_to_num(math.inf, math.inf)


def repeated(kind: Kind, x: dict[str, Tensor], copies: int) -> dict[str, Tensor]:
    """Copies of tensors side by side as heads."""
    return {n: torch.cat([y] * copies, kind.head_axis(n)) for n, y in x.items()}


def evaluate_given(fn: Callable, kind: Kind, x: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """:func:`evaluate` without gradients where the loss puts nothing on a result, and without what is missing."""
    pulled = any(f"d {n}" in x for n in ("o", *kind.states.values()))
    results = evaluate(fn, kind, x, case, frozen=() if pulled else [*x])
    return {n: y for n, y in results.items() if y is not None}


@torch.inference_mode(False)
def exact(mechanism: str, x: dict[str, Tensor], **how) -> dict[str, Tensor]:
    """The quantities in float64: o, the final states and, where the loss puts something on these, every gradient.

    Args:
        mechanism: a key of `gla_ref.check.MECHANISMS`.
        x: its tensors, on any device.
        how: `scale` and `ends` of a :class:`~gla_ref.check.Case`.
    """
    kind = MECHANISMS[mechanism]
    return evaluate_given(kind.oracle, kind, {n: y.double() for n, y in x.items()}, Case(**how))


@torch.inference_mode(False)
def emulated(
    mechanism: str,
    x: dict[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    copies: int = LUCKS,
    chosen: Sequence[int] | None = None,
    sharp: bool = True,
    options: dict | None = None,
    **how,
) -> list[dict[str, Tensor]]:
    """Results of right kernels: the quantities of :func:`exact` in the dtypes that kernels return.

    Args:
        mechanism: a key of `gla_ref.check.MECHANISMS`.
        x: its tensors as a kernel is given them, on any device.
        dtype: the dtype of the operands of products; that of q unless given.
        copies: how many runs there are, each with a :class:`~gla_ref.rounding.Luck` of its own.
        chosen: the indices of the mechanism's emulated runs; all of them unless given.
        sharp: whether kernels are sharp as :class:`~gla_ref.rounding.Luck` says it. The package's are.
        options: the runs' own, {"segments": 3} for a delta rule whose sequences are cut in three.
        how: `scale` and `ends` of a :class:`~gla_ref.check.Case`.
    """
    kind, case, last, runs = MECHANISMS[mechanism], Case(**how), 1.0, []
    chosen = range(len(kind.emulated)) if chosen is None else chosen
    many = -(-copies // len(chosen))
    like = {f"d{n}": y for n, y in x.items()} | {"o": x["v"], "k_cache": x["k"], "v_cache": x["v"]}
    wide = {n: y.to(torch.promote_types(y.dtype, torch.float32)) for n, y in x.items()}
    if sharp and not kind.cache and case.scale != 0:  # the gradient of o is rounded before it meets the scale
        last = x["q"].shape[-1] ** -0.5 if case.scale is None else case.scale
        case = replace(case, scale=1.0)
        wide |= {n: y / last for n, y in wide.items() if n == "d S"}
    for i in chosen:
        way = partial(kind.emulate, dtype=dtype or x["q"].dtype, run=i, copies=many, sharp=sharp, **options or {})
        results = evaluate_given(way, kind, repeated(kind, wide, many), case)
        results = {n: y if n == "S" else (last * y).to(like[n].dtype) for n, y in results.items()}
        made = {n: y.chunk(many, kind.head_axis(n)) for n, y in results.items()}
        runs += [{n: y[j] for n, y in made.items()} for j in range(many)]
    return runs


def judge(
    mechanism: str, found: dict[str, Tensor], right: dict[str, Tensor], runs: Sequence[dict[str, Tensor]]
) -> dict[str, tuple[float, float]]:
    """{quantity: (error, budget)} of its worst octave; the budget is 2 x the emulated runs' worst error + 4 eps."""
    verdict = {}
    for n, x in found.items():
        octaves_judged = []
        for s in parts(MECHANISMS[mechanism], n, x):
            worst = max(error(run[n][s], right[n][s]) for run in runs)
            octaves_judged.append((error(x[s], right[n][s]), budget(worst, x.dtype)))
        verdict[n] = max(octaves_judged, key=lambda p: p[0] / p[1])
    return verdict


def numbers(case: Case) -> int:
    """The number of elements in the states of all tokens together."""
    return case.B * case.T * case.H * case.groups * max(case.K * case.V, C)


def copied(kind: Kind, case: Case) -> int:
    """The number of copies of a case's inputs in an emulated run, each with its own luck: fewer if they are large.

    The runs of a mechanism have LUCKS copies together, or a few more. A token's pairs in its chunk count, too, where
    channels are fewer.
    """
    return min(-(-LUCKS // len(kind.emulated)), max(3, 2**21 // numbers(case)))


def budgets_of(
    kind: Kind, case: Case, dtype: torch.dtype, x: dict[str, Tensor], exact: dict[str, Tensor], n: int, again: int = 0
) -> dict[str, Tensor]:
    """The budgets `[octaves, n]` of every quantity: n inputs x of a case lie side by side as heads.

    2 x the worst error of emulated runs + 4 eps. The worst element of one run is one rounding's luck, and where scores
    are large one unit in their last place is a thousandth of a probability: the runs are made with so much luck as the
    size of the case allows (:class:`~gla_ref.rounding.Luck`). For the rounds `again` = 1, 2, ... they draw
    other luck, and runs without luck are left out.
    """
    copies, with_luck = copied(kind, case), len(kind.emulated)
    single, short = dtype == torch.float32, case.T <= SHORT
    large = numbers(case) > LARGE_STATES and case.H >= ENOUGH_HEADS
    if single and not kind.cache and case.T <= 2 * LONGEST_CHUNK and large:
        # here the three runs in three products of TF32 err most, and so many heads have many errors
        copies = 2 if again else 1
    emulate = partial(kind.emulate, dtype=dtype, seed=again)
    runs = with_luck
    if not again:
        runs += len(kind.plain) + (len(kind.beyond) if single and case.T > LONGEST_CHUNK else 0)
    ways = [(partial(emulate, run=i), copies if i < with_luck else 1) for i in range(runs)]
    if single and (short or not kind.cache):
        ways.append((partial(emulate, thrice=True), 3))
    ways += [(form, 1) for form in kind.also if single and short and not again]
    single_x, budgets = {name: y.float() for name, y in x.items()}, {}
    for way, many in ways:
        got = evaluate(partial(way, copies=many) if many > 1 else way, kind, repeated(kind, single_x, many), case)
        for name, y in exact.items():
            axis, right = kind.head_axis(name), torch.cat([y] * many, kind.head_axis(name))
            returned = got[name].to(held(kind, name, case, dtype)).double()
            worst = torch.stack([errors(returned[s], right[s], many * n, axis) for s in parts(kind, name, y)])
            budgets.setdefault(name, []).append(worst.unflatten(1, (many, n)).amax(1))
    return {name: budget(torch.stack(worst).amax(0), held(kind, name, case, dtype)) for name, worst in budgets.items()}


# -- problems of the kit --------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Problem:
    """A case with its inputs for a dtype, the exact quantities and, for each octave, the error allowed.

    `more` gives, for a round, budgets from emulated runs that drew other luck; they count for an error just over the
    budget.
    """

    kind: Kind
    case: Case
    inputs: dict[str, Tensor]
    dtype: torch.dtype
    exact: dict[str, Tensor]
    budgets: dict[str, list[float]]
    more: Callable[[int], dict[str, list[float]]] | None = None

    @cached_property
    def units(self) -> dict[str, list[float]]:
        """The units of errors in each octave."""
        return {n: [unit(y[s]) for s in parts(self.kind, n, y)] for n, y in self.exact.items()}

    def octaves(self, name: str) -> Iterator[tuple[tuple, float, float]]:
        """Indices, unit and budget of what is judged apart."""
        return zip(parts(self.kind, name, self.exact[name]), self.units[name], self.budgets[name], strict=True)

    def judge(self, name: str, x: Tensor) -> tuple[float, float]:
        """(error, budget) of a quantity's worst octave, whatever was judged before; infinite where x is not finite."""
        exact, budgets = self.exact[name], self.budgets[name]
        error, budget = self.compared(name, x, exact)
        for again in range(1, ROUNDS if self.more else 0):
            if not budget < error < NEAR * budget:
                break
            budgets = [*map(max, budgets, self.more(again)[name])]
            error, budget = self.compared(name, x, exact, budgets)
        return error, budget

    def in_budgets(self, name: str, x: Tensor) -> float:
        """The error of a quantity's worst octave in budgets of that octave: two errors may lie in different octaves."""
        error, budget = self.judge(name, x)
        return error / budget

    def compared(self, name: str, x: Tensor, to: Tensor, budgets: list[float] | None = None) -> tuple[float, float]:
        """(deviation from `to`, budget) of the worst octave, by the first budgets unless others are given."""
        off = (x.double() - to).abs().nan_to_num(math.inf, math.inf)
        octaves = zip(self.octaves(name), budgets or self.budgets[name], strict=True)
        pairs = [(off[s].max().item() / one if off.numel() else 0.0, budget) for (s, one, _), budget in octaves]
        return max(pairs, key=lambda p: p[0] / p[1])

    def band(self, name: str) -> Tensor:
        """The largest deviation allowed, for every element."""
        band = torch.zeros_like(self.exact[name])
        for s, one, allowed in self.octaves(name):
            band[s] = allowed * one
        return band

    def outside(self, name: str, x: Tensor, times: float = 1.0) -> Tensor:
        """The elements that deviate by more than the band, or so many times it, as a mask."""
        return ~((x.double() - self.exact[name]).abs() <= times * self.band(name))


def problems(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str = "log", device: str = "cpu"
) -> list[Problem]:
    """Cases worked out, from a seed: those of the same sizes side by side, which is faster.

    Cases that differ in how a kernel is called share the numbers.
    """
    keys = [(mechanism, plain(case), dtype, seed, form, device) for case in cases]
    worked = {key: WORKED_OUT[key] for key in keys if key in WORKED_OUT}
    groups: dict[Case, list[tuple]] = {}
    for key in dict.fromkeys(keys):
        if key not in worked:
            groups.setdefault(shape(key[1]), []).append(key)
    for group in groups.values():
        worked |= zip(group, worked_out(mechanism, [key[1] for key in group], dtype, seed, form, device), strict=True)
    WORKED_OUT.update(worked)
    while len(WORKED_OUT) > KEPT_PROBLEMS:  # the oldest first
        WORKED_OUT.pop(next(iter(WORKED_OUT)), None)
    return [as_asked(worked[key], case) for key, case in zip(keys, cases, strict=True)]


@lru_cache(maxsize=KEPT_PROBLEMS)
def as_asked(worked: Problem, case: Case) -> Problem:
    """A problem under the case's own name and way of calling; the same one for the same case."""
    return replace(worked, case=case)


def plain(case: Case) -> Case:
    """A case without what does not change its numbers."""
    strides = case.strides if case.strides == "expanded" else "contiguous"
    return replace(case, name="", strides=strides, frozen=False, pull=1.0, index="int32", telling=False, often=False)


def shape(case: Case) -> Case:
    """The case without the values of its inputs: cases that share it can be worked out side by side."""
    values = {"gate": MILD, "floor": None, "size": 1.0, "loud": None, "zeros": False}
    values |= {"strength": 1.0, "beta": None, "alike": 0.0, "keys": 1.0, "found": False}
    return replace(plain(case), strides="contiguous", **values)


def worked_out(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str, device: str
) -> list[Problem]:
    """Problems of one :func:`shape`, worked out side by side as heads.

    Everything lies on the CPU, wherever the kernel runs, and is made there of many small operations, which a GPU
    would be late with; but attention over thousands of keys is few and large ones, and made on the `device`.
    """
    kind, like = MECHANISMS[mechanism], cases[0]
    given = [inputs(mechanism, case, dtype, seed, form) for case in cases]
    device = device if kind.cache and like.T > CPU_KEYS else "cpu"
    beside = {n: torch.cat([x[n] for x in given], kind.head_axis(n)).to(device) for n in given[0]}
    exact = evaluate(kind.oracle, kind, beside, like)
    budgets = budgets_of(kind, like, dtype, beside, exact, len(given))
    made = []
    for i, (case, x) in enumerate(zip(cases, given, strict=True)):
        own = {}
        for n, y in exact.items():
            axis = kind.head_axis(n)
            own[n] = y.unflatten(axis, (len(cases), -1)).select(axis, i).cpu().contiguous()
        own_budgets = {n: y[:, i].tolist() for n, y in budgets.items()}
        more = cache(partial(redrawn, kind, like, dtype, x, own, device))
        made.append(Problem(kind, case, x, dtype, own, own_budgets, more))
    return made


def redrawn(
    kind: Kind, case: Case, dtype: torch.dtype, x: dict[str, Tensor], exact: dict[str, Tensor], device: str, again: int
) -> dict[str, list[float]]:
    """The budgets of one problem by the luck of another round."""
    x, exact = ({n: y.to(device) for n, y in of.items()} for of in (x, exact))
    return {n: y[:, 0].tolist() for n, y in budgets_of(kind, case, dtype, x, exact, 1, again).items()}
