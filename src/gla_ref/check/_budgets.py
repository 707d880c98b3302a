"""How wrong a right kernel may be, computed for every case and quantity from emulated runs (chapters 7 and 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..rounding import budget, error, unit
from ._cases import C, Case, held, inputs, representable
from ._mechanisms import MECHANISMS, SHORT, Kind

FEW = 1000  # keys that a CPU attends to as fast as a GPU


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


def worst(made: Tensor, exact: Tensor, runs: int, axis: int) -> float:
    """The largest :func:`error` of several results `made` of the same x*, each of `runs` copies along `axis`."""
    if not exact.numel():
        return 0.0
    if not torch.isfinite(made).all():
        return float("inf")
    off = (made - exact).abs().amax(0)
    off, exact = (x.unflatten(axis, (runs, -1)).movedim(axis, 0).flatten(1) for x in (off, exact))
    rms = exact.square().mean(1).sqrt()
    return (off.amax(1) / torch.where(rms > 1e-3, rms, 1.0)).max().item()


@dataclass(frozen=True)
class Problem:
    """A case with its inputs, the exact quantities and, for each octave, the error allowed."""

    kind: Kind
    case: Case
    inputs: dict[str, Tensor]
    exact: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    budgets: dict[str, list[float]]

    def judge(self, name: str, x: Tensor, against: Tensor | None = None) -> tuple[float, float]:
        """(error, budget) of a quantity's worst octave."""
        exact = self.exact[name]
        against = exact if against is None else against
        rows = zip(parts(self.kind, name, exact), self.budgets[name], strict=True)
        pairs = []
        for s, allowed in rows:
            found = error(x[s], against[s]) * unit(against[s]) / unit(exact[s])
            pairs.append((found, allowed))
        return max(pairs, key=lambda p: p[0] / p[1])

    def band(self, name: str) -> Tensor:
        """The largest deviation allowed, for every element."""
        exact = self.exact[name]
        band = torch.zeros_like(exact)
        rows = zip(parts(self.kind, name, exact), self.budgets[name], strict=True)
        for s, allowed in rows:
            band[s] = allowed * unit(exact[s])
        return band


def copies(x: dict, n: int, seed: int, kind: Kind, form: str, dtypes: dict) -> dict:
    """n copies of the inputs side by side as heads, all but the first shaken by one percent and rounded again.

    Strengths become smaller, so that they keep within their bounds.
    """
    rng, made = torch.Generator().manual_seed(seed), {}
    for name, y in x.items():
        role, dtype = kind.tensors[name].role, dtypes[name]
        shake = 1 + 0.01 * torch.rand((n, *y.shape), generator=rng).to(y.device)
        shake[0] = 1
        y = y / shake if role == "strength" else y * shake
        y = representable(y, form, dtype) if name in kind.named("gate") else y.to(dtype).double()
        made[name] = torch.cat(y.unbind(0), kind.head_axis(name))
    return made


@lru_cache(maxsize=400)
def problem(mechanism: str, case: Case, dtype: torch.dtype, seed: int, *where: str) -> Problem:
    """A case worked out; cases that differ in how a kernel is called share the numbers."""
    plain = replace(
        case,
        name="",
        strides=case.strides if case.strides == "expanded" else "contiguous",
        frozen=False,
        pull=1.0,
        index="int32",
        telling=False,
    )
    return replace(worked_out(mechanism, plain, dtype, seed, *where), case=case)


@lru_cache(maxsize=400)
def worked_out(
    mechanism: str, case: Case, dtype: torch.dtype, seed: int, form: str = "log", device: str = "cpu"
) -> Problem:
    """2 x the worst error of emulated runs + 4 eps, on the inputs and on copies shaken by one percent.

    The worst element of one run is one rounding's luck, and where one value is much larger than the
    others, so is the error. How often it is tried depends on the size of the case. Everything lies on the CPU,
    wherever the kernel runs, and is made there of many small operations, which a GPU would be late with; but
    attention over thousands of keys is few and large ones, and made on the `device`.
    """
    kind = MECHANISMS[mechanism]
    given = inputs(mechanism, case, dtype, seed, form)
    dtypes = {n: held(kind, n, case, dtype) for n in given}
    runs = min(16, max(3, 2**21 // (given["v"].numel() * case.K)))
    x = copies(given, runs, seed, kind, form, dtypes)
    x = {n: y.to(device if kind.cache and case.T > FEW else "cpu") for n, y in x.items()}
    exact = {n: y.cpu() for n, y in evaluate(kind.oracle, kind, x, case).items()}
    ways = [partial(kind.emulate, dtype=dtype, run=i) for i in range(len(kind.emulated))]
    ways += kind.also if dtype == torch.float32 and case.T <= SHORT else ()
    single = {n: y.float() for n, y in x.items()}
    emulated = [evaluate(way, kind, single, case) for way in ways]

    dtypes = {n: held(kind, n, case, dtype) for n in exact}
    right = {n: y.chunk(runs, kind.head_axis(n))[0].contiguous() for n, y in exact.items()}
    budgets = {}
    for n, y in exact.items():
        made = torch.stack([e[n].to(dtypes[n]).double().cpu() for e in emulated])
        budgets[n] = [budget(worst(made[:, *s], y[s], runs, kind.head_axis(n)), dtypes[n]) for s in parts(kind, n, y)]
    for n, floor in kind.floors.items():
        off = floor(given, right, dtype)
        rows = zip(parts(kind, n, off), budgets[n], strict=True)
        budgets[n] = [b + 2 * off[s].max().item() / unit(right[n][s]) for s, b in rows]
    return Problem(kind, case, given, right, dtypes, budgets)
