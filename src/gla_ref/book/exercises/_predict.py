"""Exercises that only predict: questions and rules, as data that a page can use too (chapters 1 to 25)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any

from . import QUESTIONS, Open, Wrong, exercise

RIGHT = "Right."
Interval = tuple[float, float]
Place = tuple[Interval | None, ...]  # an interval for each number of an answer; None accepts any number


@dataclass(frozen=True)
class Part:
    """A part of an answer: a number, one of some options, or several of them.

    Attributes:
        name: the quantity, in a few words.
        options: each option with the number that stands for it; empty if any number may be the answer.
        many: whether several options may be chosen; then each option is a number, 1 if it is chosen and 0 if not.
    """

    name: str
    options: dict[str, float] = field(default_factory=dict)
    many: bool = False


@dataclass(frozen=True)
class Question:
    """An exercise's parts, and its rules: the first rule whose place has the answer's numbers says its sentence."""

    parts: Sequence[Part]
    rules: Sequence[tuple[Place, str]]
    read: Callable[[Any], Sequence[float]]  # the numbers of an answer

    def say(self, numbers: Sequence[float]) -> str:
        """The sentence for an answer that consists of these numbers."""
        for place, sentence in self.rules:
            if all(i is None or i[0] <= x <= i[1] for i, x in zip(place, numbers, strict=True)):
                return sentence
        raise AssertionError("the last rule holds for every answer")

    def judge(self, answer: Any) -> None:
        """Return if the answer is right; raise :class:`Wrong` with the sentence if it is not."""
        if (sentence := self.say(self.read(answer))) != RIGHT:
            raise Wrong(sentence)


def ask(label: str) -> Callable:
    """Register a function that makes the question of an exercise, once it is needed."""

    def register(make: Callable[[], Question]) -> Callable[[], Question]:
        QUESTIONS[label] = make = cache(make)
        exercise(label, "predict")(lambda answer: make().judge(answer))
        return make

    return register


def number(x: Any) -> float:
    """Return a number of the reader's answer; raise Wrong if it is no number, Open if it is still missing."""
    if x is ...:
        raise Open("Your turn: one of the answers is still missing.")
    try:
        return float(x)
    except (TypeError, ValueError):
        raise Wrong(f"Expected a number, got {x!r}.") from None


def near(x: Any, tolerance: float = 1e-3) -> Interval | None:
    """Return the interval that counts as x: an int exactly, a float up to a relative error, `...` any number."""
    if x is ...:
        return None
    relative = 1e-9 if isinstance(x, int) else tolerance
    ends = x * (1 - relative), x / (1 - relative), x - 1e-9, x + 1e-9
    return min(ends), max(ends)


def rules(right: Place, mistakes: Iterable[tuple[Place, str]], others: dict[int, str]) -> list[tuple[Place, str]]:
    """Return the rules: the right answer, the mistakes, and a sentence for other answers with a wrong n-th number."""
    made = [(right, RIGHT), *mistakes]
    for n in sorted(others, reverse=True):
        made.append(((*right[:n], *[None] * (len(right) - n)), others[n]))
    return made


def several(answer: Any, n: int, kind: str) -> list:
    """Return an answer's parts, a list of n (for n = 0 one alone); raise Wrong for another length, Open for `...`."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    many = isinstance(answer, (list, tuple))
    if many:  # pairs of numbers count as their numbers
        answer = [x for part in answer for x in (part if isinstance(part, (list, tuple)) else [part])]
    if many != bool(n) or (many and len(answer) != n):
        got = f"{type(answer).__name__} of {len(answer)}" if many else type(answer).__name__
        raise Wrong(f"Expected {f'a list of {n} {kind}s' if n else f'one {kind}'}, got {got}.")
    parts = list(answer) if many else [answer]
    for x in parts:
        if x is ...:
            raise Open("Your turn: one of the answers is still missing.")
        if not isinstance(x, {"word": str, "number": Real}[kind]):
            raise Wrong(f"Expected a {kind}, got {type(x).__name__}.")
    return parts


def numbers(
    names: str | Sequence[str],
    right: Any,
    mistakes: Sequence[tuple[Any, str]],
    hint: str,
    tolerance: float = 1e-3,
    options: Sequence[str] = (),
) -> Question:
    """Ask for a number or for a list of them.

    Args:
        names: the name of each number; one string if the answer is one number, not a list.
        right: a number for each name.
        mistakes: pairs of the numbers after a mistake and the sentence that names the mistake; `...` accepts any
            number.
        hint: the sentence for any other wrong answer.
        tolerance: the relative error allowed if the right number is a float.
        options: words to choose from; then all numbers above are words.
    """
    alone = isinstance(names, str)
    index = {word: i for i, word in enumerate(options)}

    def place(answer) -> Place:
        return tuple(near(index.get(x, x), tolerance) for x in ([answer] if alone else answer))

    def read(answer):
        given = several(answer, 0 if alone else len(names), "word" if options else "number")
        return [index.get(x, -1) for x in given] if options else given

    names = [names] if alone else names
    said = [hint] if alone else [f"Answer {n} of {len(names)} is not right. {hint}" for n, _ in enumerate(names, 1)]
    return Question(
        [Part(name, index) for name in names],
        rules(place(right), [(place(wrong), why) for wrong, why in mistakes], dict(enumerate(said))),
        read,
    )


def choice(name: str, right: Any, why: dict[Any, str]) -> Question:
    """Ask for several of some options; a wrong answer gets the sentence of the first one missing or too much.

    Args:
        name: the property of the options that belong to the answer.
        right: these options, as a string of letters or a list.
        why: every option -> the sentence that says why the option belongs to the answer, or does not.
    """
    options = list(why)

    def read(answer):
        given = answer = answer.tolist() if hasattr(answer, "tolist") else answer
        if any(answer is x or answer == x for x in options):
            answer = [answer]
        elif isinstance(answer, str):
            answer = [x for x in answer.lower() if x not in " ,"]
        # an empty answer gets no sentence: the sentence of a missing option would give the answer away
        if not answer or not isinstance(answer, (list, tuple, set)) or not all(x in options for x in answer):
            kind = "" if isinstance(right, str) else " as a list"
            raise Wrong(f"Expected some of {', '.join(map(str, why))}{kind}, got {given!r}.")
        return [float(x in answer) for x in options]

    place = tuple((float(x in right),) * 2 for x in options)
    said = [f"{x} {'is missing' if x in right else 'does not belong to it'}. {sentence}" for x, sentence in why.items()]
    part = Part(name, {str(x): i for i, x in enumerate(options)}, many=True)
    return Question([part], rules(place, [], dict(enumerate(said))), read)


def predict(label: str, *asked: Any, **options: Any) -> None:
    """Register an exercise whose answer is numbers or words, see :func:`numbers`."""
    ask(label)(lambda: numbers(*asked, **options))


def choose(label: str, *asked: Any) -> None:
    """Register an exercise whose answer is some of several options, see :func:`choice`."""
    ask(label)(lambda: choice(*asked))
