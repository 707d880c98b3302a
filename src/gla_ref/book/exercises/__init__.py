"""Exercises that answer: `check("ex-linear-capacity", 17)` says "right", or names the mistake (chapters 1 to 25).

A judge is a function that raises :class:`Wrong` with a sentence for the reader, or returns. A judge sees values and
functions only, never the reader's code.
"""

import html
import importlib
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Open", "Verdict", "Wrong", "check", "exercise", "load"]

Kind = Literal["predict", "derive", "implement"]

#: label -> (kind, judge), filled by the modules
JUDGES: dict[str, tuple[Kind, Callable[[Any], None]]] = {}
#: label -> function that makes the question of an exercise that only predicts; a page judges by the same data
QUESTIONS: dict[str, Callable[[], Any]] = {}


class Wrong(Exception):
    """The answer is wrong; the message names the mistake and, if it can, the way on."""


class Open(Exception):
    """There is no answer yet, as when a function's body is still `...`."""


@dataclass(frozen=True)
class Verdict:
    """The verdict of :func:`check`: true if the answer is right; otherwise the message names the mistake.

    Attributes:
        status: "right", "wrong" or "open" (not answered yet).
        message: a sentence or two for the reader.
    """

    status: Literal["right", "wrong", "open"]
    message: str

    def __bool__(self) -> bool:
        return self.status == "right"

    def __repr__(self) -> str:
        return f"{ {'right': '✓', 'wrong': '✗', 'open': '…'}[self.status] } {self.message}"

    def _repr_html_(self) -> str:
        return f'<p class="verdict verdict-{self.status}">{html.escape(repr(self))}</p>'


def exercise(label: str, kind: Kind) -> Callable:
    """Register a judge under its exercise's label in the book."""

    def register(judge: Callable[[Any], None]) -> Callable[[Any], None]:
        JUDGES[label] = (kind, judge)
        return judge

    return register


def load() -> None:
    """Import all judges."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def check(label: str, answer: object = ...) -> Verdict:
    """Judge an answer to an exercise of the book.

    Args:
        label: the exercise's label, as in its starting cell.
        answer: the number, choice, list, tensor or function that the exercise asks for; `...` is no answer yet.

    Returns:
        a :class:`Verdict`, which is true when the answer is right.

    Raises:
        ValueError: no exercise has this label.
    """
    load()
    if label not in JUDGES:
        raise ValueError(f"label: expected one of {sorted(JUDGES)}, got {label!r}")
    kind, judge = JUDGES[label]
    if answer is None or answer is ...:
        return Verdict("open", "Your turn: put your answer in place of the dots and run this cell.")
    if kind == "implement" and not callable(answer):
        return Verdict("wrong", f"Expected a function, got {type(answer).__name__}.")
    try:
        judge(answer)
    except Open as reason:
        return Verdict("open", str(reason))
    except Wrong as reason:
        return Verdict("wrong", str(reason))
    except Exception as reason:
        what, file = f"{type(reason).__name__}: {reason}", getattr(getattr(answer, "__code__", None), "co_filename", "")
        if own := [f for f in traceback.extract_tb(reason.__traceback__) if f.filename == file]:  # the reader's code
            return Verdict("wrong", f"It stopped with {what} (line {own[-1].lineno} of {own[-1].name}).")
        return Verdict("wrong", f"The judge stopped with {what}. Is the answer of the kind that the exercise asks for?")
    return Verdict("right", "Right.")
