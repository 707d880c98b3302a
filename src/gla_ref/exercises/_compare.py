"""What the judges share: call the answer, name its mistake, else find the first difference (chapters 1 to 16)."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import Open, Wrong

CLOSE = 1e-9  # of the largest number: right answers in float64 agree far better than that
AXES = {"T": "token", "H": "head", "N": "chunk", "P": "part"}  # counted from 1 in messages


def draw(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    """Float64 tensors of random signs, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def one_head(form: Callable, *tokens: Tensor, **options) -> tuple[Tensor, Any]:
    """o `[T, V]` and the state that a form of the package returns for one head's tokens `[T, ...]`."""
    o, state = form(*(x[None, :, None] for x in tokens), **options)
    return o[0, :, 0], state


def reverse_sum(x: Tensor, axis: int = 0) -> Tensor:
    """Element t is the sum from t to the end."""
    return x.flip(axis).cumsum(axis).flip(axis)


def variants(function: Callable, mistakes: dict[str, dict | Callable]) -> dict[str, Callable]:
    """A sentence -> the function that makes this mistake, where `mistakes` may have only its options of `function`."""
    return {s: partial(function, **m) if isinstance(m, dict) else m for s, m in mistakes.items()}


def close(x: Tensor, y: Tensor) -> bool:
    """Equal up to float64's rounding, and NaN or infinite in the same places."""
    if x.shape != y.shape:
        return False
    finite = y[y.isfinite()]
    size = 1 + finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(x, y, rtol=0, atol=CLOSE * size, equal_nan=True)


def call(answer: Callable, *args: Any) -> tuple:
    """What the reader's function returns, as a tuple; it gets copies, so that it cannot change the judge's."""
    if not callable(answer):
        raise Wrong(f"Expected a function, got {type(answer).__name__}.")
    got = answer(*copy.deepcopy(args))
    if got is None:
        raise Open("Your turn: the function returns nothing yet.")
    return tuple(got) if isinstance(got, (tuple, list)) else (got,)


def locate(name: str, axes: str, got: Tensor, want: Tensor) -> str:
    """Where `got` first differs from `want`, and by how much."""
    size = 1 + want.abs().max().item()
    i = tuple(((got - want).abs() > CLOSE * size).nonzero()[0].tolist())
    words = [f"{AXES[a]} {n + 1}" for a, n in zip(axes.split(), i, strict=True) if a in AXES]
    where = f"{name}[{', '.join(map(str, i))}]"
    where = f"{', '.join(words)}, {where}" if words else where
    return f"The first difference is at {where}: {got[i]:.4g} instead of {want[i]:.4g}."


def results(got: Sequence, want: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """The answer's results as float64 tensors; Wrong if their number or kind does not fit."""
    if len(want) == 1 and want[0].ndim and all(isinstance(x, (int, float)) for x in got):
        got = [torch.tensor(got, dtype=torch.float64)]  # one result, as a plain list of numbers
    if len(got) != len(want):
        expected = ", ".join(names)
        raise Wrong(f"Expected {len(want)} result(s), {expected}; got {len(got)}.")
    made = []
    for name, x in zip(names, got, strict=True):
        if not isinstance(x, (Tensor, int, float)):
            raise Wrong(f"{name}: expected numbers, got {type(x).__name__}.")
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
            raise Wrong(
                f"{name} is {x.dtype}, but the inputs are float64: give new tensors their dtype, "
                "with `x.new_zeros` or `dtype=x.dtype`."
            )
        made.append(torch.as_tensor(x, dtype=torch.float64).detach())
    return made


def hold(
    answer: Callable,
    cases: Iterable[tuple],
    right: Callable,
    mistakes: dict[str, Callable],
    axes: dict[str, str] | None = None,
) -> None:
    """Hold the reader's function against `right` on every case; name the mistake that it makes.

    Args:
        answer: the reader's function of one case's arguments.
        cases: arguments, small and in float64.
        right: what it should compute.
        mistakes: a sentence for the reader -> the function that makes this mistake.
        axes: of each result by its name, to say where the first difference is; {"o": "T V"} when None.

    Raises:
        Wrong: with the sentence of a mistake, or what does not fit, or the first difference.
        Open: the function returns nothing yet.
    """
    axes = axes or {"o": "T V"}

    def run(function, args):
        made = function(*args)
        made = made if isinstance(made, tuple) else (made,)
        return [torch.as_tensor(x, dtype=torch.float64) for x in made]

    def made_by(mistake, args, got):
        try:
            return all(map(close, got, run(mistake, args)))
        except (RuntimeError, IndexError):  # it has no result here
            return False

    for args in cases:
        want = run(right, args)
        got = results(call(answer, *args), want, list(axes))
        if all(map(close, got, want)):
            continue
        for sentence, mistake in mistakes.items():
            if made_by(mistake, args, got):
                raise Wrong(sentence)
        for (name, axis), x, y in zip(axes.items(), got, want, strict=True):
            if x.shape != y.shape:
                raise Wrong(f"{name}: expected shape {list(y.shape)}, got {list(x.shape)}.")
            if not x.isfinite().all():
                raise Wrong(f"{name} holds {'NaN' if x.isnan().any() else 'infinity'}.")
            if not y.ndim and not close(x, y):
                numbers = [a for a in args if isinstance(a, (int, float)) or torch.is_tensor(a)]
                given = ", ".join(f"{a:g}" for a in numbers if not getattr(a, "ndim", 0))
                raise Wrong(f"{name} is {x:.4g} instead of {y:.4g} for the arguments {given}.")
            if not close(x, y):
                raise Wrong(locate(name, axis, x, y))


def number(x: Any) -> float:
    """A number of the reader's; Wrong if it is none, Open if it is still missing."""
    if x is ...:
        raise Open("Your turn: one of the answers is still missing.")
    try:
        return float(x)
    except (TypeError, ValueError):
        raise Wrong(f"Expected a number, got {x!r}.") from None


def same(x: Any, y: Any, tolerance: float) -> bool:
    if isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(same(a, b, tolerance) for a, b in zip(x, y, strict=True))
    if y is ... or isinstance(y, str):
        return y is ... or x == y
    return math.isclose(x, y, rel_tol=1e-9 if isinstance(y, int) else tolerance, abs_tol=1e-9)


def expect(answer: Any, right: Any, mistakes: Sequence[tuple[Any, str]], hint: str, tolerance: float = 1e-3) -> None:
    """Hold a predicted number, word or list of them against the right one; name the mistake behind a wrong one.

    Args:
        answer: the reader's.
        right: a number, a word, or a list of them.
        mistakes: pairs of what a mistake leads to and the sentence that names it; `...` in a list
            is anything.
        hint: what to say about any other wrong answer.
        tolerance: the relative error that a number may have where the right one is a float.

    Raises:
        Wrong: with one of the sentences, or what was expected instead.
        Open: a part of the list is still missing.
    """
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    many = isinstance(right, (list, tuple))
    if many != isinstance(answer, (list, tuple)) or (many and len(answer) != len(right)):
        kind = f"a list of {len(right)}" if many else f"one {_kind(right)}"
        size = f" of {len(answer)}" if isinstance(answer, (list, tuple)) else ""
        raise Wrong(f"Expected {kind}, got {type(answer).__name__}{size}.")
    pairs = list(zip(answer, right, strict=True)) if many else [(answer, right)]
    for x, y in pairs:
        if x is ...:
            raise Open("Your turn: one of the answers is still missing.")
        if not isinstance(x, _KINDS[_kind(y)]):
            raise Wrong(f"Expected a {_kind(y)}, got {type(x).__name__}.")
    if same(answer, right, tolerance):
        return
    for wrong, sentence in mistakes:
        if same(answer, wrong, tolerance):
            raise Wrong(sentence)
    first = next((n for n, (x, y) in enumerate(pairs, 1) if not same(x, y, tolerance)), 1)
    raise Wrong(f"Answer {first} of {len(pairs)} is not right. {hint}" if many else hint)


def choose(answer: Any, right: Any, why: dict[Any, str]) -> None:
    """Hold a choice of several, like "ac" or [1, 3], against the right one.

    Args:
        answer: a string of letters, or a list or set.
        right: the same.
        why: every option -> the sentence that says why it belongs to the choice, or does not.

    Raises:
        Wrong: with the sentence of the first option that is missing or too much.
    """
    given = answer = answer.tolist() if hasattr(answer, "tolist") else answer
    answer = [x for x in answer.lower() if x not in " ,"] if isinstance(answer, str) else answer
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(why):
        kind = "" if isinstance(right, str) else " as a list"
        raise Wrong(f"Expected some of {', '.join(map(str, why))}{kind}, got {given!r}.")
    for option, sentence in why.items():
        if (option in answer) != (option in right):
            excess = "does not belong to it" if option in answer else "is missing"
            raise Wrong(f"{option} {excess}. {sentence}")


_KINDS = {"word": str, "number": Real, "list": (list, tuple)}


def _kind(x: Any) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(x, kind))
