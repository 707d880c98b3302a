"""Exercises that only predict: their judges as data (chapters 1 to 16)."""

from collections.abc import Sequence
from typing import Any

from . import exercise
from ._compare import choose, expect


def predict(label: str, right: Any, mistakes: Sequence[tuple[Any, str]], hint: str, tolerance: float = 1e-3) -> None:
    """An exercise whose answer is held by :func:`expect`."""
    exercise(label, "predict")(lambda answer: expect(answer, right, mistakes, hint, tolerance))


def choice(label: str, right: Any, why: dict[Any, str]) -> None:
    """An exercise whose answer is held by :func:`choose`."""
    exercise(label, "predict")(lambda answer: choose(answer, right, why))
