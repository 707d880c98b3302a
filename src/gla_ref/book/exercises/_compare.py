"""Helpers of the judges: call the answer, name its mistake, or find the first difference (chapters 1 to 25)."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import Open, Wrong

CLOSE = 1e-9  # relative to the largest number; right answers in float64 agree far better
AXES = {"T": "token", "H": "head", "N": "chunk", "P": "part"}  # counted from 1 in messages


def draw(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    """Float64 tensors of random signs, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def one_head(form: Callable, *tokens: Tensor, **options) -> tuple[Tensor, Any]:
    """Return o `[T, V]` and the state of a form of the package for one head's tokens `[T, ...]`."""
    o, state = form(*(x[None, :, None] for x in tokens), **options)
    return o[0, :, 0], state


def reverse_sum(x: Tensor, axis: int = 0) -> Tensor:
    """Element t is the sum from t to the end."""
    return x.flip(axis).cumsum(axis).flip(axis)


def variants(function: Callable, mistakes: dict[str, dict | Callable]) -> dict[str, Callable]:
    """Return {sentence: function with this mistake}; `mistakes` has functions, or options of `function`."""
    return {s: partial(function, **m) if isinstance(m, dict) else m for s, m in mistakes.items()}


def close(x: Tensor, y: Tensor) -> bool:
    """Equal up to float64's rounding, and NaN or infinite in the same places."""
    if x.shape != y.shape:
        return False
    finite = y[y.isfinite()]
    size = 1 + finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(x, y, rtol=0, atol=CLOSE * size, equal_nan=True)


def call(answer: Callable, *args: Any) -> tuple:
    """Call the reader's function on copies, so that the judge's data stay unchanged; return its results as a tuple."""
    if not callable(answer):
        raise Wrong(f"Expected a function, got {type(answer).__name__}.")
    got = answer(*copy.deepcopy(args))
    if got is None:
        raise Open("Your turn: the function returns nothing yet.")
    return tuple(got) if isinstance(got, (tuple, list)) else (got,)


def locate(name: str, axes: str, got: Tensor, want: Tensor) -> str:
    """Say where `got` first differs from `want`, and by how much."""
    size = 1 + want.abs().max().item()
    i = tuple(((got - want).abs() > CLOSE * size).nonzero()[0].tolist())
    words = [f"{AXES[a]} {n + 1}" for a, n in zip(axes.split(), i, strict=True) if a in AXES]
    where = f"{name}[{', '.join(map(str, i))}]"
    where = f"{', '.join(words)}, {where}" if words else where
    return f"The first difference is at {where}: {got[i]:.4g} instead of {want[i]:.4g}."


def results(got: Sequence, want: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return the answer's results as float64 tensors; raise Wrong if their number or kind does not fit."""
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
    answer: Callable, cases: Iterable[tuple], right: Callable, mistakes: dict[str, Callable], axes: dict | None = None
) -> None:
    """Compare the reader's function with `right` on every case; name its mistake.

    Args:
        answer: the reader's function of one case's arguments.
        cases: arguments, small and in float64.
        right: the right function.
        mistakes: a sentence for the reader -> the function that makes this mistake.
        axes: the axes of each result by its name, for the place of the first difference; {"o": "T V"} when None.

    Raises:
        Wrong: with the sentence of a mistake, a result that does not fit, or the first difference.
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
        except (RuntimeError, IndexError):  # the mistake has no result here
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
