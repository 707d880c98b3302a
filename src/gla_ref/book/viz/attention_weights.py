"""One query among four keys: scores, weights and output, for any direction and scale (chapter 1)."""

import math

import torch
from torch import Tensor

from ... import softmax, softmax_attention
from ._explorable import WIDTH, Explorable, Frame, Key, Question, Slider
from ._svg import arrow, cell, circle, part, path, rect, text

__all__ = ["DIRECTIONS", "KEYS", "SCALES", "VALUES", "attention_weights", "query"]

#: the example by hand of chapter 1; its fourth query has 45 degrees
KEYS = [[0, 0], [math.log(2), 0], [0, math.log(3)], [math.log(2), math.log(3)]]
VALUES = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
DIRECTIONS = range(0, 360, 45)  # degrees
SCALES = (0, 0.25, 0.5, 1, 2, 4, 8, 16)

X, Y, UNIT = 84, 104, 50  # the origin of the plane, and the length of 1 in it
ROW, TOP = 36, 50  # a key's row, and the middle of the first
SCORE, BAR, LONG = 262, 272, 80  # where scores end, where bars begin, and the length of weight 1


def query(degrees: int) -> Tensor:
    """The query in a direction, as long as (1, 1)."""
    angle = math.radians(degrees)
    return math.sqrt(2) * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def attention_weights() -> Explorable:
    """A reader turns the query and changes the scale; every number comes from the package."""
    return Explorable(
        title="One query among four keys",
        notice="A scale of 0 takes the average of all values, a large one copies the value of the best key. Keys with "
        "the same score always share. At 45° and scale 1 these are the numbers of token 4.",
        alt="On the left a plane with four keys as dots and the query as an arrow; on the right each key's score, "
        "and its weight as a bar; below, the output.",
        controls=(
            Slider("Direction of the query", [f"{degrees}°" for degrees in DIRECTIONS]),
            Slider("Scale s", [f"{s:g}" for s in SCALES]),
        ),
        frames=[[_frame(degrees, s) for s in SCALES] for degrees in DIRECTIONS],
        height=232,
        start=(1, SCALES.index(1)),
        legend=(
            Key("line-vermilion", "query", "line"),
            Key("blue", "key", "dot"),
            Key("orange edge", "weight"),
            Key("pale-grey edge", "output: the values, averaged with these weights"),
        ),
        question=Question(
            "The scale grows and grows. What happens to the weights?",
            "one key takes all",
            {
                "they stay": "Weights depend on differences of scores, and a larger scale stretches these differences.",
                "one key takes all": "Each difference of scores grows, and the largest score wins by more and more.",
                "they become equal": "That is scale 0, where all scores are equal. A larger scale drives them apart.",
            },
            seen=(1, len(SCALES) - 1),
        ),
    )


def _frame(degrees: int, s: float) -> Frame:
    q = query(degrees)
    k, v = (torch.tensor(rows, dtype=torch.float64) for rows in (KEYS, VALUES))
    x = s * k @ q
    a = softmax.safe(x[None])[0]
    # the last of four tokens reads all of them
    o = softmax_attention.recurrent(*(y[None, :, None] for y in (q.expand(4, 2), k, v)), scale=s)[0][0, -1, 0]
    pieces = [
        text(8, 12, "keys and query", "start"),
        text(SCORE, 12, "score", "end"),
        text(BAR, 12, "weight", "start"),
        path([(X - 76, Y), (X + 76, Y)], "edge faint"),
        path([(X, Y - 76), (X, Y + 76)], "edge faint"),
        part(f"The query is {_vector(q)}.", arrow((X, Y), _place(q), "line-vermilion")),
    ]
    for i, (k_i, x_i, a_i) in enumerate(zip(k, x, a, strict=True)):
        (left, up), middle = _place(k_i), TOP + ROW * i
        words = f"Key {i + 1} is {_vector(k_i)}, its value {_vector(v[i], 0)}."
        pieces += [
            part(words, circle(left, up, 5, "blue")),
            text(*((left + 11, up - 9) if i else (left - 11, up + 11)), i + 1),  # away from the arrow
            text(172, middle, f"key {i + 1}", "start"),
            text(SCORE, middle, f"{_number(x_i)}", "end"),
            part(
                f"Key {i + 1}: exp({_number(x_i)}), divided by the sum over all keys, is {a_i:.3f}.",
                rect(BAR, middle - 10, LONG * a_i, 20, "orange edge"),
            ),
            text(WIDTH - 8, middle, f"{a_i:.3f}", "end"),
        ]
    return Frame([*pieces, cell(108, 196, 184, 30, "pale-grey edge", f"o = {_vector(o)}")], _said(s, a, o))


def _said(s: float, a: Tensor, o: Tensor) -> str:
    best = [i + 1 for i, a_i in enumerate(a) if a_i > a.max() - 1e-9]
    if len(best) == len(a):
        return f"Scale {s:g}: all scores are equal, so the output is the average of the values, {_vector(o)}."
    share = a.max().item() * len(best)
    if len(best) == 1:
        return f"Scale {s:g}: key {best[0]} takes {_percent(share)} of the weight. The output is {_vector(o)}."
    takers = f"keys {' and '.join(map(str, best))} have the same score; they share"
    return f"Scale {s:g}: {takers} {_percent(share)} of the weight. The output is {_vector(o)}."


def _place(y: Tensor) -> tuple[float, float]:
    return X + UNIT * y[0].item(), Y - UNIT * y[1].item()


def _number(x: float, digits: int = 2) -> str:
    return f"{round(float(x), digits) + 0.0:.{digits}f}".replace("-", "−")


def _vector(y: Tensor, digits: int = 2) -> str:
    return f"({', '.join(_number(n, digits) for n in y)})"


def _percent(share: float) -> str:
    return "all but a trace" if 0.9995 < share < 1 else f"{share:.1%}"
