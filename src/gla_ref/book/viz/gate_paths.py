"""The pairs of tokens in a gate's gradient, and the pairs that it adds and takes away again (chapter 15)."""

import torch
from torch import Tensor

from ... import gates
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, rect, text

__all__ = ["WAYS", "gate_paths", "inputs", "pairs", "paths"]

T = 12
CHUNKS = 3, 4, 6, 12
WAYS = "to the chunk's end", "path by path"
#: the kinds of pairs, by colour
KINDS = {
    "blue": "inside the chunk",
    "sky": "from the state before the chunk",
    "green": "to a token after the chunk",
    "grey": "past the whole chunk",
    "orange": "added, then taken away",
}


def inputs() -> tuple[Tensor, ...]:
    """q, k, v, g and do of the picture's one head with K = V = 1, each [T, 1]."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do, noise = torch.randn(5, T, 1, generator=generator, dtype=torch.float64)
    return q, k, v, torch.nn.functional.logsigmoid(noise) / 4, do


def paths() -> Tensor:
    """W [T, T]: the part of the loss from the path between a writing token (column) and a reading token (row)."""
    q, k, v, g, do = inputs()
    decay = gates.segment_sum(g).exp()[..., 0]  # [T, T], 0 above the diagonal
    return (q @ k.T) * (do @ v.T) * decay


def pairs(way: str, C: int, t: int) -> dict[str, list[tuple[int, int]]]:
    """(reader, writer) of each kind, for the gate of token t, counted from 1; a pair of a token with itself cancels."""
    first = (t - 1) // C * C + 1
    last = first + C - 1
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for i in range(1, T + 1):
        for j in range(1, i):
            if j < t <= i:
                kind = {(0, 0): "blue", (1, 0): "sky", (0, 1): "green", (1, 1): "grey"}[j < first, i > last]
                found[kind if way == WAYS[1] else "blue"].append((i, j))
            elif t <= j <= last and (way == WAYS[0] or i <= last):
                found["orange"].append((i, j))
    return found


X, Y, SIZE = 30, 6, 23  # the map's corner; a pair of tokens
BARS = Y + SIZE * T + 36


def _count(n: int) -> str:
    return f"{n} pair{'s' * (n != 1)}"


def _outline(rows: range, columns: range, stairs: bool = False) -> list[tuple[float, float]]:
    """The corners of a block of pairs; with stairs, only of pairs strictly below the diagonal."""
    top, bottom, left, right = (x - 1 for x in (rows.start, rows.stop, columns.start, columns.stop))
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    if stairs:
        corners = [(left, bottom)]
        for n in range(bottom - top - 1):
            corners += [(left + n, top + 1 + n), (left + n + 1, top + 1 + n)]
        corners += [(left + bottom - top - 1, bottom)]
    return [(X + SIZE * j, Y + SIZE * i) for j, i in corners]


def _blocks(way: str, C: int, t: int) -> list[str]:
    """The coloured blocks of the map."""
    first = (t - 1) // C * C + 1
    after = first + C
    inside, before, written, later = range(t, after), range(1, first), range(first, t), range(after, T + 1)
    if way == WAYS[0]:
        blocks = [("blue", "They cross the gate, and are summed.", range(t, T + 1), range(1, t))]
        if later:
            words = "They begin at the gate or later, pass the chunk's end, are added and taken away."
            blocks.append(("orange", words, later, inside))
    else:
        blocks = [
            ("blue", "Inside the chunk: a token before the gate writes, one at it or later reads.", inside, written),
            ("sky", "From the state before the chunk to a token of the chunk.", inside, before),
            ("green", "From a token of the chunk to one after it, through the state.", later, written),
            ("grey", "From the state before the chunk to the one after it.", later, before),
        ]
    pieces = [
        part(f"{_count(len(rows) * len(columns))}. {words}", path(_outline(rows, columns), kind, closed=True))
        for kind, words, rows, columns in blocks
        if rows and columns
    ]
    n = len(inside) * (len(inside) - 1) // 2
    if n:
        words = f"{_count(n)}, all after the gate and in the chunk: added with dq, taken away with dk."
        pieces.append(part(words, path(_outline(inside, inside, stairs=True), "orange", closed=True)))
    return pieces


def _borders(C: int) -> list[str]:
    """The chunks' borders, drawn only across pairs."""
    return [
        path([(X, Y + SIZE * n), (X + SIZE * n, Y + SIZE * n), (X + SIZE * n, Y + SIZE * T)], "line dashed")
        for n in range(C, T, C)
    ]


def _map() -> list[str]:
    """All pairs."""
    pieces = []
    for i in range(T):
        pieces.append(rect(X, Y + SIZE * i, SIZE * i, SIZE, "pale-grey") if i else "")
    for t in range(T):
        pieces.append(rect(X + SIZE * t, Y + SIZE * t, SIZE, SIZE, "edge"))
        mark = text(X + SIZE * (t + 0.5), Y + SIZE * (t + 0.5), t + 1)
        pieces.append(part(f"Token {t + 1} with itself: past no gate. Touch to choose its gate.", mark, choose={2: t}))
    pieces.append(text(X + SIZE * 5.4, Y + 9, "a row: the token that reads", "start"))
    pieces.append(text(X + SIZE * 5.4, Y + 29, "a column: the one that wrote", "start"))
    return ["".join(pieces)]


def _bars(found: dict[str, list]) -> list[str]:
    wanted, extra = sum(len(x) for kind, x in found.items() if kind != "orange"), len(found["orange"])
    pieces, unit = [], 220 / 66
    for n, (name, counts) in enumerate((("cross", {k: len(x) for k, x in found.items() if k != "orange"}),
                                        ("cancel", {"orange": extra}))):  # fmt: skip
        y, x = BARS + 24 * n, 70.0
        pieces.append(text(x - 8, y + 9, name, "end"))
        for kind, count in counts.items():
            if count:
                pieces.append(rect(x, y, unit * count, 18, kind))
                x += unit * count
        pieces.append(text(x + 8, y + 9, _count(wanted if n == 0 else extra), "start"))
    return pieces


def _frame(way: str, C: int, t: int, W: Tensor) -> Frame:
    found = pairs(way, C, t)
    gate = Y + SIZE * (t - 1)
    pieces = [
        *_map(),
        *_blocks(way, C, t),
        *_borders(C),
        path([(X, gate), (X + SIZE * (t - 1), gate), (X + SIZE * (t - 1), Y + SIZE * T)], "line-vermilion"),
        circle(X + SIZE * (t - 1), gate, 5, "vermilion"),
        *_bars(found),
    ]
    crossing = [pair for kind, x in found.items() if kind != "orange" for pair in x]
    dg, cancelled = (sum(W[i - 1, j - 1].item() for i, j in x) for x in (crossing, found["orange"]))
    end = "the sequence's end" if C == T else f"the end of its chunk, token {(t - 1) // C * C + C}"
    words = f"Gate of token {t}: {_count(len(crossing))} cross it, and sum to dg = {dg:.3f}. "
    if way == WAYS[0]:
        words += f"Summed to {end}, "
    else:
        words += "Path by path, " if C == T else f"Path by path in chunks of {C}, "
    n = len(found["orange"])
    many = f"another {n} pairs are" if n > 1 else "another pair is"
    words += f"{many} added and taken away: {cancelled:+.3f}." if n else "no others are touched."
    return Frame(pieces, words.replace("-", "−"))


def gate_paths() -> Explorable:
    """The pairs of every gate's gradient, for both sums and several chunk lengths."""
    W = paths()
    return Explorable(
        title="Which pairs does a gate's gradient sum?",
        notice="The rectangle below and left of the dot crosses the gate: it is the gradient. A running sum from the "
        "token to an end needs no state of a token, but it also adds everything that begins after the gate and takes "
        "it away again (orange). Shorter chunks leave a smaller triangle, and path by path only the triangle is left.",
        alt=f"The lower triangle of {T} by {T} pairs of tokens. A rectangle of pairs crosses the chosen gate; next to "
        "it lies a triangle of pairs that are added and taken away. Dashed lines are the chunks' borders.",
        controls=(Choice("Sum", WAYS), Choice("Chunk C", CHUNKS), Slider("Gate of token", range(1, T + 1))),
        frames=[[[_frame(way, C, t, W) for t in range(1, T + 1)] for C in CHUNKS] for way in WAYS],
        height=BARS + 48,
        start=(0, 1, 5),
        legend=(
            Key("pale-grey", "all other pairs"),
            *(Key(kind, words) for kind, words in {**KINDS, "blue": "crosses the gate"}.items()),
            Key("line dashed", "border of a chunk", "line"),
            Key("line-vermilion", "the gate", "line"),
            Key("vermilion", "where its row begins", "dot"),
        ),
        question=Question(
            "Summed to the end of the whole sequence, which gate's gradient adds the most pairs for nothing?",
            "token 2",
            {
                "token 2": "Nearly all pairs begin at token 2 or later: all of them are added and taken away.",
                "token 7": "Only pairs among tokens 7 to 12 are added for nothing. An earlier gate has more after it.",
                "token 12": "Nothing begins after the last token, so nothing has to cancel.",
            },
            seen={"token 2": (0, 3, 1), "token 7": (0, 3, 6), "token 12": (0, 3, 11)},
        ),
    )
