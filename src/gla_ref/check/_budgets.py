"""How wrong a right kernel may be, computed for every case and quantity from emulated runs (chapters 7 and 11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..rounding import budget, unit
from ._cases import MILD, C, Case, held, inputs
from ._mechanisms import MECHANISMS, SHORT, Kind

FEW = 1000  # keys that a CPU attends to as fast as a GPU
KEPT = 400  # problems
LUCKS = 16  # orders of a sum that are tried
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
    0. Of several backward passes through the same graph the last one counts; `between` the forward pass and them
    other things may happen. Boundaries that are `moved` lay elsewhere in the same tensor during a call before.
    """
    names = [*kind.arguments, *kind.states]
    leaves = {n: x[n].detach().requires_grad_(n not in frozen) for n in names if n in x}
    given = [leaves[n] for n in kind.states if n in leaves]
    cu = None
    if case.ends is not None:
        cu = torch.tensor(case.ends, dtype=getattr(torch, case.index), device=x["q"].device)
    call = partial(
        fn,
        *(leaves[n] for n in kind.arguments),
        scale=case.scale,
        initial_state=None if not given else tuple(given) if kind.cache else given[0],
        cu_seqlens=cu,
    )
    if moved:
        right = cu.clone()
        cu.copy_(right[-1] - right.flip(0))
        call()
        cu.copy_(right)
    o, state = call()
    if between:
        between()
    states = (None,) * len(kind.states) if state is None else state if kind.cache else (state,)
    found = {"o": o, **dict(zip(kind.states.values(), states, strict=True))}
    pulled = {n: y for n, y in found.items() if f"d {n}" in x and y is not None and y.requires_grad}
    asked = {n: y for n, y in leaves.items() if y.requires_grad}
    grads = (None,) * len(asked)
    reached = pulled if case.loss == "state" else "o" in pulled
    for left in reversed(range(backwards if reached else 0)):
        pull = 1.0 if x["q"].dtype == torch.float16 else case.pull
        cotangents = [x[f"d {n}"].to(y.dtype) for n, y in pulled.items()]
        cotangents = cotangents if pull == 1 else [pull * d for d in cotangents]
        grads = torch.autograd.grad(
            list(pulled.values()),
            list(asked.values()),
            cotangents,
            allow_unused=True,
            retain_graph=left > 0,
            materialize_grads=case.loss == "state",
        )
        grads = grads if pull == 1 else [d if d is None else d / pull for d in grads]
    found |= {f"d{n}": d for n, d in zip(asked, grads, strict=True)}
    return {n: y if y is None else y.detach() for n, y in found.items()}


def octaves(T: int) -> Iterator[slice]:
    """[0, 64), [64, 128), [128, 256) ... of T tokens: an error among late tokens shows in its own."""
    a, b = 0, C
    while a < T:
        yield slice(a, b)
        a, b = b, 2 * b


def parts(kind: Kind, name: str, x: Tensor) -> list[tuple]:
    """Indices of what is judged apart: octaves along the time axis, or all of a tensor that has none."""
    if "T" not in kind.axes(name):
        return [(slice(None),)]
    return [(slice(None), s) for s in octaves(x.shape[1])]


def errors(made: Tensor, exact: Tensor, n: int, axis: int) -> Tensor:
    """The :func:`~gla_ref.rounding.error` of each of the n problems that lie side by side along `axis`, `[n]`."""
    if not exact.numel():
        return exact.new_zeros(n)
    off, exact = (x.unflatten(axis, (n, -1)).movedim(axis, 0).flatten(1) for x in ((made - exact).abs(), exact))
    rms = exact.square().mean(1).sqrt()
    found = off.amax(1) / torch.where(rms > 1e-3, rms, 1.0)
    return found.nan_to_num(math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class Problem:
    """A case with its inputs, the exact quantities and, for each octave, the unit of errors and the error allowed."""

    kind: Kind
    case: Case
    inputs: dict[str, Tensor]
    exact: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    units: dict[str, list[float]]
    budgets: dict[str, list[float]]

    def octaves(self, name: str) -> Iterator[tuple[tuple, float, float]]:
        """Indices, unit and budget of what is judged apart."""
        return zip(parts(self.kind, name, self.exact[name]), self.units[name], self.budgets[name], strict=True)

    def judge(self, name: str, x: Tensor, against: Tensor | None = None) -> tuple[float, float]:
        """(error, budget) of a quantity's worst octave; the error is infinite where x is not finite."""
        off = (x.double() - (self.exact[name] if against is None else against)).abs().nan_to_num(math.inf, math.inf)
        pairs = [(off[s].max().item() / one if off.numel() else 0.0, allowed) for s, one, allowed in self.octaves(name)]
        return max(pairs, key=lambda p: p[0] / p[1])

    def band(self, name: str) -> Tensor:
        """The largest deviation allowed, for every element."""
        band = torch.zeros_like(self.exact[name])
        for s, one, allowed in self.octaves(name):
            band[s] = allowed * one
        return band


def copied(kind: Kind, case: Case) -> int:
    """How many copies of a case's inputs each emulated run has, each with its own luck: the fewer, the larger they are.

    The runs of a mechanism have LUCKS copies together, or a few more. A token's pairs in its chunk count, too, where
    channels are fewer.
    """
    size = case.B * case.T * case.H * case.groups * max(case.K * case.V, C)
    return min(-(-LUCKS // len(kind.emulated)), max(3, 2**21 // size))


def problems(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str = "log", device: str = "cpu"
) -> list[Problem]:
    """Cases worked out, from a seed: those of the same sizes side by side, which is faster.

    Cases that differ in how a kernel is called share the numbers.
    """
    keys = [(mechanism, plain(case), dtype, seed, form, device) for case in cases]
    found = {key: WORKED_OUT[key] for key in keys if key in WORKED_OUT}
    groups: dict[Case, list[tuple]] = {}
    for key in dict.fromkeys(keys):
        if key not in found:
            groups.setdefault(shape(key[1]), []).append(key)
    for group in groups.values():
        found |= zip(group, worked_out(mechanism, [key[1] for key in group], dtype, seed, form, device), strict=True)
    WORKED_OUT.update(found)
    while len(WORKED_OUT) > KEPT:  # the oldest first
        WORKED_OUT.pop(next(iter(WORKED_OUT)), None)
    return [as_asked(found[key], case) for key, case in zip(keys, cases, strict=True)]


@lru_cache(maxsize=KEPT)
def as_asked(worked: Problem, case: Case) -> Problem:
    """A problem under the case's own name and way of calling; the same one for the same case."""
    return replace(worked, case=case)


def plain(case: Case) -> Case:
    """A case without what does not change its numbers."""
    strides = case.strides if case.strides == "expanded" else "contiguous"
    return replace(case, name="", strides=strides, frozen=False, pull=1.0, index="int32", telling=False, often=False)


def shape(case: Case) -> Case:
    """What cases have in common that can be worked out side by side: all but the values of what is given."""
    values = {"gate": MILD, "floor": None, "size": 1.0, "loud": None, "zeros": False}
    values |= {"strength": 1.0, "beta": None, "alike": 0.0, "keys": 1.0, "found": False}
    return replace(plain(case), strides="contiguous", **values)


def worked_out(
    mechanism: str, cases: Sequence[Case], dtype: torch.dtype, seed: int, form: str, device: str
) -> list[Problem]:
    """Problems of one :func:`shape`.

    Everything lies on the CPU, wherever the kernel runs, and is made there of many small operations, which a GPU
    would be late with; but attention over thousands of keys is few and large ones, and made on the `device`.
    """
    kind, like = MECHANISMS[mechanism], cases[0]
    given = [inputs(mechanism, case, dtype, seed, form) for case in cases]
    device = device if kind.cache and like.T > FEW else "cpu"
    exact, allowed = work_out(kind, like, dtype, given, form, device)
    dtypes = {n: held(kind, n, like, dtype) for n in exact}
    made = []
    for i, (case, x) in enumerate(zip(cases, given, strict=True)):
        own = {}
        for n, y in exact.items():
            axis = kind.head_axis(n)
            own[n] = y.unflatten(axis, (len(cases), -1)).select(axis, i).cpu().contiguous()
        units = {n: [unit(y[s]) for s in parts(kind, n, y)] for n, y in own.items()}
        made.append(Problem(kind, case, x, own, dtypes, units, {n: y[:, i].tolist() for n, y in allowed.items()}))
    return made


def work_out(
    kind: Kind, case: Case, dtype: torch.dtype, given: Sequence[dict], form: str = "log", device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(exact quantities of several inputs of a case, side by side as heads; budgets `[octaves, inputs]` of each).

    2 x the worst error of emulated runs + 4 eps. The worst element of one run is one rounding's luck, and where scores
    are large one unit in their last place is a thousandth of a probability: the runs are made with so much luck as the
    size of the case allows (:class:`~gla_ref.rounding.Luck`).
    """
    n, runs = len(given), copied(kind, case)
    x = {name: torch.cat([y[name] for y in given], kind.head_axis(name)).to(device) for name in given[0]}
    exact = evaluate(kind.oracle, kind, x, case)
    single, short = dtype == torch.float32, case.T <= SHORT
    emulate, lucky = partial(kind.emulate, dtype=dtype), len(kind.emulated)
    made = lucky + len(kind.plain) + (len(kind.beyond) if single and not short else 0)
    ways = [(partial(emulate, run=i), runs if i < lucky else 1) for i in range(made)]
    if single and (short or not kind.cache):
        ways.append((partial(emulate, thrice=True), 3))
    ways += [(form, 1) for form in kind.also if single and short]
    low, budgets = {name: y.float() for name, y in x.items()}, {}
    for way, many in ways:
        copies = {name: torch.cat([y] * many, kind.head_axis(name)) for name, y in low.items()}
        e = evaluate(partial(way, copies=many) if many > 1 else way, kind, copies, case)
        for name, y in exact.items():
            axis, right = kind.head_axis(name), torch.cat([y] * many, kind.head_axis(name))
            off = e[name].to(held(kind, name, case, dtype)).double()
            found = torch.stack([errors(off[s], right[s], many * n, axis) for s in parts(kind, name, y)])
            budgets.setdefault(name, []).append(found.unflatten(1, (many, n)).amax(1))
    for name, worst in budgets.items():
        budgets[name] = budget(torch.stack(worst).amax(0), held(kind, name, case, dtype))
    return exact, budgets
