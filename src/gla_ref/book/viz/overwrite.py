"""A memory that adds and one that corrects, under two keys that resemble each other (chapter 20)."""

import math

import torch
from torch import Tensor

from ... import delta_rule, linear_attention
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import arrow, cell, circle, number, part, squares, text

__all__ = ["ALIKE", "RULES", "asked", "keys", "overwrite", "states"]

RULES = {"add": None, "correct half (β = ½)": 0.5, "correct (β = 1)": 1.0, "overshoot (β = 2)": 2.0}
ALIKE = (0.0, 0.3, 0.6, 0.9)  # the product of the two keys
WHO, WHAT = ("Ada", "Bob"), ("tea", "rain", "jazz")
STORY = (("Ada", "tea"), ("Bob", "rain"), ("Ada", "jazz"))
VALUES = torch.eye(3, dtype=torch.float64)


def keys(alike: float) -> Tensor:
    """The keys of Ada and of Bob, `[2, 2]`, of length 1."""
    return torch.tensor([[1, 0], [alike, math.sqrt(1 - alike**2)]], dtype=torch.float64)


def states(rule: str, alike: float) -> list[Tensor]:
    """The state `[2, 3]` at first, and for each line of the story the state after the erasure and after the write."""
    S, beta = torch.zeros(1, 1, 2, 3, dtype=torch.float64), RULES[rule]
    found = [S]
    for who, what in STORY:
        k, v = keys(alike)[WHO.index(who)][None, None, None], VALUES[WHAT.index(what)][None, None, None]
        if beta is None:
            found += [S, linear_attention.recurrent(k, k, v, initial_state=S)[1]]
        else:
            strength = torch.full((1, 1, 1), beta, dtype=torch.float64)
            for value in (0 * v, v):  # to erase is to write 0
                found.append(delta_rule.recurrent(k, k, value, strength, initial_state=S)[1])
        S = found[-1]
    return [x[0, 0] for x in found]


def asked(S: Tensor, alike: float) -> Tensor:
    """The values `[2, 3]` that the keys of Ada and of Bob find."""
    return keys(alike) @ S


CELL, LEFT, RIGHT = 34, 158, 290  # a cell's side; left edges of the state and answers, and of the right answers
TOP, BELOW = 82, 186  # upper edges of the state and of the answers
MIDDLE, RADIUS = (66, 124), 50  # the circle of keys


def _squares(x: Tensor, left: float, top: float, names: list[str], largest: float) -> list[str]:
    def say(i, j, n):
        return f"{names[i]}, {WHAT[j]}: {number(n)}"

    return squares(x.tolist(), left, [top, top + CELL], CELL, say, largest=largest, rim=3)


def _wanted(step: int) -> Tensor:
    """The right answers of both keys: the last value that was written under each."""
    S = torch.zeros(2, 3, dtype=torch.float64)
    for who, what in STORY[: step // 2]:
        S[WHO.index(who)] = VALUES[WHAT.index(what)]
    return S


def _ground(alike: float) -> list[str]:
    pieces = [circle(*MIDDLE, RADIUS, "edge faint"), text(MIDDLE[0], TOP - 26, "the two keys")]
    for who, (x, y) in zip(WHO, keys(alike).tolist(), strict=True):
        tip = (MIDDLE[0] + RADIUS * x, MIDDLE[1] - RADIUS * y)
        kind = "line-green" if who == "Ada" else "line-pink"
        words = f"The key of {who}: ({number(x)}, {number(y)})"
        pieces.append(part(words, circle(*tip, 6, "green" if who == "Ada" else "pink"), arrow(MIDDLE, tip, kind)))
    pieces += [text(LEFT + 1.5 * CELL, TOP - 26, "the state"), text(RIGHT + 1.5 * CELL, BELOW - 12, "it should be")]
    pieces += [text(LEFT + CELL * (j + 0.5), TOP - 9, what) for j, what in enumerate(WHAT)]
    pieces += [text(LEFT + 1.5 * CELL, BELOW - 12, "it answers")]
    pieces += [text(LEFT - 10, BELOW + CELL * (i + 0.5), f"ask {who}", "end") for i, who in enumerate(WHO)]
    return pieces


def _words(rule: str, alike: float, step: int, before: Tensor, S: Tensor) -> str:
    start = f"Rule: {rule}. Keys alike: {alike:g}. "
    if not step:
        return start + "The memory is empty."
    who, what = STORY[(step - 1) // 2]
    k = keys(alike)[WHO.index(who)]

    def tell(x):
        return "(" + ", ".join(map(number, x.tolist())) + ")"

    if step % 2:
        if RULES[rule] is None:
            return f"{start}{who}'s key finds {tell(k @ before)}. Nothing is erased."
        return f"{start}{who}'s key found {tell(k @ before)}; erased, it finds {tell(k @ S)}."
    ada, bob = map(tell, asked(S, alike))
    return f"{start}{who}: {what} is written. Ada's answer: {ada}, Bob's: {bob}."


def _frame(rule: str, alike: float, step: int, before: Tensor, S: Tensor, largest: float) -> Frame:
    pieces = _ground(alike)
    for n, (who, what) in enumerate(STORY):
        x, now = 8 + 130 * n, n == (step - 1) // 2
        kind = "orange" if step and now else "pale-grey" if n < step // 2 else "edge"
        pieces.append(cell(x, 8, 122, 24, kind, f"{who}: {what}", "on" if n < (step + 1) // 2 else ""))
    pieces += _squares(S, LEFT, TOP, ["Row 1", "Row 2"], largest)
    pieces += _squares(asked(S, alike), LEFT, BELOW, [f"Asked about {who}" for who in WHO], largest)
    pieces += _squares(_wanted(step), RIGHT, BELOW, [f"{who} should find" for who in WHO], largest)
    return Frame(pieces, _words(rule, alike, step, before, S))


def overwrite() -> Explorable:
    """Ada likes tea, Bob likes rain, now Ada likes jazz: erase and write, with keys more or less alike."""
    frames = []
    for rule in RULES:
        frames.append([])
        for alike in ALIKE:
            S = states(rule, alike)
            largest = max(1.0, *(x.abs().max().item() for s in S for x in (s, asked(s, alike))))
            frames[-1].append([_frame(rule, alike, n, S[max(n - 1, 0)], x, largest) for n, x in enumerate(S)])
    return Explorable(
        title="Can an old value be overwritten?",
        notice="A square's area is the size of a number, blue above zero and orange below. A memory that adds answers "
        "tea and jazz at once. A memory that corrects first erases the value that the key finds, so the last write is "
        "always found again. The more alike the keys, the more each correction changes the other's answer.",
        alt="Three lines of a story; below, two keys as arrows in a circle, the state as two rows of three squares, "
        "and the answers that Ada's and Bob's keys find, next to the right answers.",
        controls=(Choice("Rule", list(RULES)), Slider("Keys alike", ALIKE), Slider("Step", range(2 * len(STORY) + 1))),
        frames=frames,
        height=BELOW + 2 * CELL + 8,
        start=(0, 1, 5),
        legend=(
            Key("orange", "written now"),
            Key("pale-grey", "written before"),
            Key("blue", "above 0"),
            Key("vermilion", "below 0"),
            Key("green", "Ada's key", "dot"),
            Key("pink", "Bob's key", "dot"),
        ),
        question=Question(
            "Ada liked tea, now she likes jazz. What does a memory that only adds answer when asked about her?",
            "tea and jazz",
            {
                "jazz": "Nothing took the tea away: it was added, and stays.",
                "tea": "The jazz was added, too. Both are there.",
                "tea and jazz": "Both were added under the same key, and the memory cannot tell which came last.",
            },
            seen=(0, 1, 2 * len(STORY)),
        ),
    )
