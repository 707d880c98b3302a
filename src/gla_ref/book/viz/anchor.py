"""Where to anchor the decay of a chunk: the factors on q and k, and the formats that hold them (chapter 12)."""

import math

import torch
from torch import Tensor

from ...gates import decay_from_start
from ._explorable import Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, raised, rect, text

__all__ = ["anchor", "factors"]

C, READER, WRITER = 64, 56, 8  # tokens of the chunk; a pair of them, counted from 1
GATES = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0)
EIGHTHS = range(9)  # where the anchor is, in eighths of the chunk's decay
FORMATS = {"float16": torch.float16, "bfloat16, float32": torch.bfloat16}


def factors(g: Tensor, at: float) -> tuple[Tensor, Tensor]:
    """Powers of two, the factors on q and k of a chunk's tokens, for g `[C]` and an anchor at a part of its decay."""
    b = decay_from_start(g[:, None])[:, 0]
    powers = (b - at * b[-1]) / math.log(2)
    return powers, -powers


LEFT, WIDE, TOP, TALL, MOST = 46, 340, 28, 230, 150  # MOST: the largest power of two that is shown


def _y(power: float) -> float:
    return TOP + TALL * (MOST - min(max(power, -MOST), MOST)) / (2 * MOST)


def _x(token: float) -> float:
    return LEFT + WIDE * (token - 0.5) / C


def _power(power: float) -> str:
    return "2" + raised(round(power))


def _axes() -> str:
    """Axes; factors that a format cannot hold are red: above 2^128 bfloat16 and float32, above 2^16 float16."""
    limits = {name: math.log2(torch.finfo(dtype).max) for name, dtype in FORMATS.items()}
    pieces = [rect(LEFT, TOP, WIDE, _y(limits["bfloat16, float32"]) - TOP, "pale-red")]
    pieces.append(rect(LEFT, TOP, WIDE, _y(limits["float16"]) - TOP, "pale-red faint"))
    for name, power in limits.items():
        pieces.append(path([(LEFT, _y(power)), (LEFT + WIDE, _y(power))], "line-vermilion dashed"))
        pieces.append(text(LEFT - 5, _y(power), _power(power), "end"))
        pieces.append(text(LEFT + 6, _y(power) - 9, name, "start" if name == "float16" else "start on"))
    pieces += [path([(LEFT, _y(0)), (LEFT + WIDE, _y(0))], "edge"), text(LEFT - 5, _y(0), "1", "end")]
    pieces += [rect(LEFT, TOP, WIDE, TALL, "edge"), text(LEFT, TOP - 14, "factor", "start")]
    pieces += [text(_x(t), TOP + TALL + 12, t) for t in (1, WRITER, READER)]
    pieces.append(text(_x(C / 2), TOP + TALL + 12, "token"))
    return "".join(pieces)


def _curve(powers: Tensor, color: str) -> str:
    """A curve; all gates are equal, so the curve is a line from its first visible token to its last."""
    first, slope = powers[0].item(), (powers[1] - powers[0]).item()
    ends = (min(max(power, -MOST), MOST) for power in (first, powers[-1].item()))
    return path([(_x(1 + (power - first) / slope), _y(power)) for power in ends], f"line-{color}")


def _frame(eighths: int, gate: float) -> Frame:
    q, k = factors(torch.full((C,), -gate, dtype=torch.float64), eighths / 8)
    read, wrote = q[READER - 1].item(), k[WRITER - 1].item()
    most = max(q.max().item(), k.max().item())
    fits = [name for name, dtype in FORMATS.items() if most < math.log2(torch.finfo(dtype).max)]
    verdict = {0: "too large for every format", 1: "too large for float16", 2: "fits every format"}[len(fits)]
    pieces = [_axes(), _curve(q, "blue"), _curve(k, "vermilion")]
    for token, power, color in ((READER, read, "blue"), (WRITER, wrote, "vermilion")):
        if abs(power) <= MOST:
            words = f"Token {token} {'reads' if color == 'blue' else 'wrote'}: its factor is {_power(power)}."
            pieces.append(part(words, circle(_x(token), _y(power), 5, color)))
    return Frame(
        pieces,
        f"Largest factor {_power(most)}: {verdict}. Token {READER} reads token {WRITER} through "
        f"{_power(read)} · {_power(wrote)} = {_power(read + wrote)}, wherever the anchor is.",
    )


def anchor() -> Explorable:
    """The factors on q and k over a chunk, by the anchor and the strength of the gates."""
    return Explorable(
        title="Where should the scales be anchored?",
        notice="The decay between two tokens is split in two: a factor for the one that reads and a factor for the one "
        "that wrote. The anchor moves both curves, up or down, and never their product. In the middle the largest "
        "factor is as small as it can be.",
        alt="Over the 64 tokens of a chunk, the factor on queries falls and the factor on keys rises; they are 1 where "
        "the anchor is. Factors too large for a number format are red.",
        controls=(
            Slider("Anchor", ["start", "1/8", "1/4", "3/8", "middle", "5/8", "3/4", "7/8", "end"]),
            Slider("Log gate of every token", [f"−{gate:g}" for gate in GATES]),
        ),
        frames=[[_frame(n, gate) for gate in GATES] for n in EIGHTHS],
        height=TOP + TALL + 24,
        start=(0, 5),
        legend=(
            Key("line-blue", "factor on queries", "line"),
            Key("line-vermilion", "factor on keys", "line"),
            Key("line-vermilion dashed", "largest number of a format", "line"),
            Key("pale-red", "too large for every format"),
            Key("pale-red faint", "too large for float16"),
        ),
        question=Question(
            "Which anchor makes the largest factor as small as possible?",
            "in the middle",
            {
                "at the start": "There no query's factor is above 1, and the last key's is the largest of all.",
                "in the middle": "Then queries and keys share the decay evenly.",
                "at the end": "There no key's factor is above 1, and the first query's is the largest of all.",
            },
            seen={"at the start": (0, 5), "in the middle": (4, 5), "at the end": (8, 5)},
        ),
        play=0,
    )
