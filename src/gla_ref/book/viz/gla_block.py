"""A GLA layer, part by part: projections, gate, recurrence, norm, output gate, and the way back (chapter 17)."""

import re
from pathlib import Path

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part

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


HEIGHT = 410
#: the drawing: a group of each part, and two ways of q, k and v, "with" and "without" short convolutions
DRAWN = dict(re.findall(r'<g id="([^"]+)">(.*?)</g>', Path(__file__).with_suffix(".svg").read_text(), re.DOTALL))
#: where a dot marks each part
HERE = {
    "input": (111, 50),
    "q, k, v": (17, 92),
    "convolution": (7, 132),
    "forget gate": (218, 172),
    "recurrence": (8, 198),
    "norm": (66, 282),
    "output gate": (376, 172),
    "output": (111, 354),
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
    pieces = []
    for n, name in enumerate(PARTS, 1):
        if name == "convolution" and not short:
            continue
        drawn = DRAWN[name] + (DRAWN["with" if short else "without"] if name == "q, k, v" else "")
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
        controls=(Choice("Short convolution", ("no", "yes")), Slider("Part", ["all", *range(1, 1 + len(PARTS))])),
        frames=frames,
        height=HEIGHT,
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
