"""The attention-style map of two-level chunking, block by block as it is computed (chapter 11)."""

from itertools import chain

from ... import gla
from .. import costs
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import arrow, circle, part, path, rect, text

__all__ = ["block_flops", "two_level_map"]

T, K, V = 24, 16, 16
CHUNKS, SUB_CHUNKS = (4, 8, 12, 24), (2, 4)
COLORS = {"inter-chunk": "grey", "inter-sub-chunk": "orange", "intra-sub-chunk": "pink"}


def block_flops(kind: str, m: int, n: int) -> tuple[int, int]:
    """:func:`gla_ref.book.costs.block_flops` of the picture's heads."""
    return costs.block_flops(kind, m, n, K, V)


X, Y, SIZE = 34, 4, 14  # the map's corner, and the size of a pair of tokens
BARS = Y + SIZE * T + 28


def _outline(rows: slice, cols: slice) -> list[tuple[float, float]]:
    """The corners of a block; on the diagonal only of pairs j <= i, which end in stairs."""
    upper = [(cols.start, rows.start), (cols.stop, rows.start), (cols.stop, rows.stop)]
    if rows == cols:
        stairs = ([(i + 1, i), (i + 1, i + 1)] for i in range(rows.start, rows.stop))
        upper = [(cols.start, rows.start), *chain(*stairs)]
    return [(X + SIZE * j, Y + SIZE * i) for j, i in (*upper, (cols.start, rows.stop))]


def _arrows(rows: slice, cols: slice) -> list[str]:
    """Arrows to a block's corner on the diagonal, up to which keys decay, and from the corner, where queries begin."""
    x, y, half = X + SIZE * cols.stop, Y + SIZE * rows.start, SIZE / 2
    return [
        arrow((X + SIZE * cols.start + 2, y + half), (x - 2, y + half), "line hollow"),
        arrow((x - half, y + 2), (x - half, Y + SIZE * rows.stop - 2), "line hollow"),
        circle(x, y, 4, "vermilion"),
    ]


def _axes() -> str:
    pieces = [
        text(X + SIZE * 11, Y + 8, "a row: the token that reads", "start"),
        text(X + SIZE * 11, Y + 28, "a column: the one that wrote", "start"),
    ]
    for t in (0, 7, 15, 23):
        pieces.append(text(X - 6, Y + SIZE * (t + 0.5), t + 1, "end"))
        pieces.append(text(X + SIZE * (t + 0.5), Y + SIZE * T + 10, t + 1))
    return "".join(pieces)


def _bars(done: list[tuple[str, int, int]], totals: tuple[int, int]) -> list[str]:
    """The work done so far by kind of block, as a part of all work."""
    pieces = []
    for i, name in enumerate(("products", "element-wise")):
        x, y, unit = 110, BARS + 24 * i, 276 / totals[i]
        pieces.append(text(x - 8, y + 9, name, "end"))
        for kind, color in COLORS.items():
            width = unit * sum(block[1 + i] for block in done if block[0] == kind)
            pieces.append(rect(x, y, width, 18, color))
            x += width
        pieces.append(rect(110, y, 276, 18, "edge"))
    return pieces


def _span(tokens: slice) -> str:
    return f"tokens {tokens.start + 1} to {tokens.stop}"


def _words(kind: str, rows: slice, cols: slice) -> str:
    if kind == "inter-chunk" and not cols.stop:
        return f"Before the first chunk is the initial state: {_span(rows)} read it, then write to it."
    if kind == "inter-chunk":
        return (
            f"Between chunks: {_span(rows)} read {_span(cols)} through the state, in one product, and write to it "
            f"in another."
        )
    if kind == "inter-sub-chunk":
        return f"Between sub-chunks: {_span(rows)} read {_span(cols)} in a matrix product of their own."
    return f"Inside a sub-chunk: {_span(rows)}, every pair by its own exponentials, in log space."


def _row(C: int, c: int) -> list[Frame]:
    """A frame for every block, in the order of computation."""
    blocks = list(gla.two_level_blocks(T, C, c))
    work = [(b[0], *block_flops(b[0], *(x.stop - x.start for x in b[1:]))) for b in blocks]
    totals = sum(x[1] for x in work), sum(x[2] for x in work)
    frames = []
    for step, (kind, rows, cols) in enumerate(blocks):
        pieces = [
            part(
                f"{name}: {_span(r)} read {'each other' if r == s else _span(s)}.",
                path(_outline(r, s), COLORS[name] + " faint" * (n > step), closed=True),
                choose={2: n},
            )
            for n, (name, r, s) in enumerate(blocks)
            if s.stop
        ]
        pieces.append(path(_outline(rows, cols), "line", closed=True))
        if kind != "intra-sub-chunk":
            pieces += _arrows(rows, cols) if cols.stop else []
        pieces += [_axes(), *_bars(work[: step + 1], totals)]
        _, matmul, elementwise = work[step]
        frames.append(
            Frame(
                pieces,
                f"Block {step + 1} of {len(blocks)}. {_words(kind, rows, cols)} "
                f"FLOPs: {matmul:,} in products, {elementwise:,} element-wise.",
            )
        )
    return frames


def two_level_map() -> Explorable:
    """The blocks that `gla.chunkwise_two_level` computes, one after the other, for several C and c."""
    first = {}  # block of each kind that has pairs
    for n, (kind, _, cols) in enumerate(gla.two_level_blocks(T, CHUNKS[1], SUB_CHUNKS[0])):
        if cols.stop:
            first.setdefault(kind, n)
    answers = {
        "between chunks": "They meet through the state, in a product.",
        "between sub-chunks": "A corner of their block lies between them: a product will do.",
        "inside a sub-chunk": "No common point lies between all of them.",
    }
    return Explorable(
        title="The map of two-level chunking, block by block",
        notice="Every block off the diagonal touches it in one corner, and that corner (the dot) is its anchor: "
        "keys decay to it, queries from it, and no exponent is above 0. Pairs inside a pink block have no such corner "
        "between them. They are few, and a large part of the element-wise work; with shorter sub-chunks it is a "
        "smaller one.",
        alt=f"The lower triangle of {T} by {T} pairs of tokens, cut into the blocks of two-level chunking. One block "
        "is outlined, and those before it are coloured. Below, bars of the work so far.",
        controls=(
            Choice("Chunk C", CHUNKS),
            Choice("Sub-chunk c", SUB_CHUNKS),
            Slider("Block", range(1, 1 + 2 * T // min(SUB_CHUNKS))),
        ),
        frames=[[_row(C, c) for c in SUB_CHUNKS] for C in CHUNKS],
        height=BARS + 46,
        start=(1, 0, 8),
        legend=(
            *(Key(color, kind) for kind, color in COLORS.items()),
            Key("vermilion", "anchor", "dot"),
            Key("line hollow", "how keys and queries fade", "line"),
        ),
        question=Question(
            "Which pairs need an exponential each, for every channel?",
            "inside a sub-chunk",
            answers,
            seen={answer: (1, 0, first[kind]) for answer, kind in zip(answers, COLORS, strict=True)},
        ),
    )
