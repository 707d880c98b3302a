"""A GLA layer, part by part: projections, gate, recurrence, norm, output gate, and the way back (chapter 17)."""

from __future__ import annotations

from html import escape

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import arrow, circle, part, path, rect, text

__all__ = ["PARTS", "gla_block", "weights"]

#: the layer of the paper's smaller model: width, heads, rank of the gate, tokens that a short convolution sees
WIDTH_OF_MODEL, HEADS, RANK, SEES = 1024, 4, 16, 4
PARTS = ("input", "q, k, v", "convolution", "forget gate", "recurrence", "norm", "output gate", "output")


def weights(name: str, w: int = WIDTH_OF_MODEL, H: int = HEADS) -> int:
    """The number of weights in a part of the layer; "convolution" counts the weights of all three convolutions."""
    keys, values = w // 2, w
    return {
        "input": w,
        "q, k, v": w * (2 * keys + values),
        "convolution": SEES * (2 * keys + values),
        "forget gate": RANK * (w + keys) + keys,
        "recurrence": 0,
        "norm": values // H,
        "output gate": w * values,
        "output": values * w,
    }[name]


Q, K, V, G, R, STREAM = 44, 116, 188, 262, 336, 388  # the columns
READS, MIDDLE = 116, 153  # values that are read leave the recurrence in this column
ROWS = {"x": 16, "norm": 50, "W": 92, "conv": 132, "log": 172, "S": 216, "heads": 282, "times": 318, "back": 354}
BOTTOM = 396
KINDS = {
    "input": "sky",
    "q, k, v": "grey",
    "convolution": "pale-grey",
    "forget gate": "pink",
    "recurrence": "pale-blue",
    "norm": "sky",
    "output gate": "orange",
    "output": "grey",
}


def _box(x: float, y: float, wide: float, kind: str, label: str, below: str = "", high: float = 26) -> str:
    """A box with a name; `below` is set lower and smaller, like an index."""
    index = f'<tspan dy="3" font-size="10">{below}</tspan>' if below else ""
    name = f'<text class="on" x="{x:g}" y="{y:g}">{escape(label)}{index}</text>'
    return rect(x - wide / 2, y - high / 2, wide, high, f"{kind} edge") + name


def _down(x: float, start: float, end: float) -> str:
    return arrow((x, start), (x, end))


def _input() -> str:
    y, stream = ROWS["x"], path([(MIDDLE, ROWS["x"] + 10), (MIDDLE, 30), (STREAM, 30), (STREAM, BOTTOM - 8)], "line")
    below = ROWS["norm"] + 13
    fan = path([(Q, below + 8), (R, below + 8)], "line") + "".join(
        _down(x, below + 8, ROWS["W"] - 13) for x in (Q, K, V, G, R)
    )
    return (
        text(MIDDLE, y, "one token's row x")
        + stream
        + _down(MIDDLE, 26, ROWS["norm"] - 13)
        + _box(MIDDLE, ROWS["norm"], 62, KINDS["input"], "norm")
        + path([(MIDDLE, below), (MIDDLE, below + 8)], "line")
        + fan
    )


def _projections(short: bool) -> str:
    end = ROWS["conv"] - 13 if short else ROWS["S"] - 22
    return "".join(
        _box(x, ROWS["W"], wide, KINDS["q, k, v"], "W", name)
        + _down(x, ROWS["W"] + 13, end)
        + ("" if short else text(x + 9, ROWS["log"], name.lower()))
        for x, name, wide in ((Q, "Q", 32), (K, "K", 32), (V, "V", 60))
    )


def _convolution() -> str:
    return "".join(
        _box(x, ROWS["conv"], 60, KINDS["convolution"], "conv")
        + _down(x, ROWS["conv"] + 13, ROWS["S"] - 22)
        + text(x + 9, ROWS["log"], name)
        for x, name in ((Q, "q"), (K, "k"), (V, "v"))
    )


def _forget() -> str:
    return (
        _box(G, ROWS["W"], 26, KINDS["forget gate"], "W", "1")
        + _down(G, ROWS["W"] + 13, ROWS["conv"] - 9)
        + text(G + 10, (ROWS["W"] + ROWS["conv"]) / 2 + 1, RANK, "start")
        + _box(G, ROWS["conv"], 36, KINDS["forget gate"], "W", "2", high=18)
        + _down(G, ROWS["conv"] + 9, ROWS["log"] - 13)
        + _box(G, ROWS["log"], 66, KINDS["forget gate"], "ln σ / τ")
        + _down(G, ROWS["log"] + 13, ROWS["S"] - 22)
    )


def _recurrence() -> str:
    y = ROWS["S"]
    return (
        rect(16, y - 22, 280, 44, f"{KINDS['recurrence']} edge")
        + text(MIDDLE, y - 9, "S ← α S + kᵀ v", "on")
        + text(MIDDLE, y + 10, "o = q S", "on")
        + arrow((1, y), (15, y))
        + arrow((296, y), (316, y))
        + text(307, y - 13, "S")
        + _down(MIDDLE, y + 22, ROWS["heads"] - 13)
        + text(MIDDLE + 8, y + 34, "o", "start")
    )


def _norm() -> str:
    return _box(MIDDLE, ROWS["heads"], 152, KINDS["norm"], "norm of each head") + _down(
        MIDDLE, ROWS["heads"] + 13, ROWS["times"] - 9
    )


def _gate() -> str:
    y = ROWS["times"]
    return (
        _box(R, ROWS["W"], 60, KINDS["output gate"], "W", "R")
        + _down(R, ROWS["W"] + 13, ROWS["log"] - 13)
        + _box(R, ROWS["log"], 60, KINDS["output gate"], "swish")
        + path([(R, ROWS["log"] + 13), (R, y)], "line")
        + arrow((R, y), (MIDDLE + 9, y))
        + text(R - 8, y - 12, "u", "end")
        + circle(MIDDLE, y, 9, f"{KINDS['output gate']} edge")
        + text(MIDDLE, y, "×", "on")
    )


def _output() -> str:
    y = ROWS["back"]
    return (
        _down(MIDDLE, ROWS["times"] + 9, y - 13)
        + _box(MIDDLE, y, 60, KINDS["output"], "W", "O")
        + path([(MIDDLE, y + 13), (MIDDLE, BOTTOM)], "line")
        + arrow((MIDDLE, BOTTOM), (STREAM - 8, BOTTOM))
        + text(MIDDLE + 8, BOTTOM - 12, "y, added to x", "start")
        + circle(STREAM, BOTTOM, 8, "white edge")
        + text(STREAM, BOTTOM, "+", "on")
    )


#: where a dot marks each part
HERE = {
    "input": (MIDDLE - 42, ROWS["norm"]),
    "q, k, v": (Q - 27, ROWS["W"]),
    "convolution": (7, ROWS["conv"]),
    "forget gate": (G - 44, ROWS["log"]),
    "recurrence": (8, ROWS["S"] - 18),
    "norm": (MIDDLE - 87, ROWS["heads"]),
    "output gate": (R + 40, ROWS["log"]),
    "output": (MIDDLE - 42, ROWS["back"]),
}
SAYS = {
    "input": "A norm in front of the layer. What enters it also runs past it, to the sum at the bottom.",
    "q, k, v": "Queries and keys have half the width of the model, values have all of it.",
    "forget gate": f"Through {RANK} numbers to one log gate for each key channel. It is always below 0.",
    "recurrence": "Each head fades its state, writes to it, and reads it. Nothing here is learned.",
    "norm": "Each head divides what it has read by the size of that, and keeps the direction.",
    "output gate": "The token itself decides, channel by channel, what to let through.",
    "output": "The last matrix mixes the heads. Its result is added to the residual stream.",
}


def _says(name: str, short: bool) -> str:
    if name != "convolution":
        return SAYS[name]
    if short:
        return f"Each channel of q, k and v mixes a token with the {SEES - 1} before it."
    return "Left out here, as in the paper's models. Choose “yes” to see where it goes."


def _picture(short: bool, now: int) -> list[str]:
    """The whole layer (`now` is 0), or the parts up to part `now` in full colours and later parts pale."""
    draw = dict(zip(PARTS, (_input, None, _convolution, _forget, _recurrence, _norm, _gate, _output), strict=True))
    pieces = []
    for n, name in enumerate(PARTS, 1):
        if name == "convolution" and not short:
            continue
        drawn = _projections(short) if name == "q, k, v" else draw[name]()
        told = part(f"{name}: {_says(name, short)}", drawn, choose={1: n})
        pieces.append(f'<g class="faint">{told}</g>' if 0 < now < n else told)
    return [*pieces, circle(*HERE[PARTS[now - 1]], 5, "vermilion")] if now else pieces


def _frame(short: bool, now: int) -> Frame:
    total = sum(weights(name) for name in PARTS[1:] if short or name != "convolution")
    if not now:
        words = f"The whole layer, for a width of {WIDTH_OF_MODEL:,} and {HEADS} heads: {total:,} weights"
        return Frame(_picture(short, 0), words + (", with short convolutions." if short else "."))
    name = PARTS[now - 1]
    own = 0 if name == "convolution" and not short else weights(name)
    how_many = f" {own:,} weights." if own else ""
    return Frame(_picture(short, now), f"{name[0].upper()}{name[1:]}. {_says(name, short)}{how_many}")


def gla_block() -> Explorable:
    """The layer of chapter 17, from a token's row to the row that it adds."""
    frames = [[_frame(short, n) for n in range(1 + len(PARTS))] for short in (False, True)]
    return Explorable(
        title="A GLA layer",
        notice="The state arrives from the token before (left) and moves on to the next token (right). Everything else "
        "happens to each token alone, so all tokens can do it at once. Only a short convolution looks back, by "
        f"{SEES - 1} tokens.",
        alt="A flow chart. A token's row passes a norm and branches into queries, keys, values, a forget gate through "
        "two thin matrices, and an output gate. The first four enter the recurrence; what it reads is normalised, "
        "multiplied by the output gate, multiplied by a last matrix and added to the row.",
        controls=(
            Choice("Short convolution", ("no", "yes")),
            Slider("Part", ["all", *map(str, range(1, 1 + len(PARTS)))]),
        ),
        frames=frames,
        height=BOTTOM + 14,
        start=(0, 0),
        legend=(
            Key("grey edge", "large matrices"),
            Key("pink edge", "forget gate"),
            Key("orange edge", "output gate"),
            Key("pale-blue edge", "recurrence"),
            Key("sky edge", "norms"),
            Key("pale-grey edge", "short convolutions"),
            Key("white edge", "sum"),
            Key("vermilion", "the part described", "dot"),
        ),
        question=Question(
            "Only one part of the layer makes it forget. How large is that part?",
            "tiny",
            {
                "half of the layer": "Even one full matrix would be about a ninth of the layer, and it is not one.",
                "a quarter": "That is the output gate, which forgets nothing.",
                "tiny": f"It goes through {RANK} numbers, so its two matrices are slivers.",
            },
            seen=(0, 1 + PARTS.index("forget gate")),
        ),
    )
