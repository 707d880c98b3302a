"""The place where two tokens of a chunk meet: the border of the smallest block that holds both (chapter 12)."""

from ._explorable import Explorable, Frame, Key, Question, Slider
from ._svg import arrow, circle, part, path, rect, text

__all__ = ["levels", "meet"]

C = 16  # tokens of the chunk, counted from 0
COLORS = "pale-grey", "pale-blue", "sky", "orange"  # one for each level, from 0


def meet(j: int, i: int) -> tuple[int, int]:
    """The level and the border m at which writer j < reader i meet: m is where the second half of a block begins."""
    level = (i ^ j).bit_length() - 1
    return level, i >> level << level


X, Y, SIZE = 26, 8, 17  # the map's corner; a pair of tokens


def _tokens(first: int, n: int) -> str:
    return f"token {first}" if n == 1 else f"tokens {first} to {first + n - 1}"


def _map() -> str:
    pieces = []
    for level, color in enumerate(COLORS):
        half = 2**level
        for m in range(half, C, 2 * half):
            block = [
                rect(X + SIZE * (m - half), Y + SIZE * m, SIZE * half, SIZE * half, color),
                rect(X + SIZE * (m - half), Y + SIZE * m, SIZE * half, SIZE * half, "edge"),
            ]
            if level:
                block.append(text(X + SIZE * (m - half / 2), Y + SIZE * (m + half / 2), level, "on"))
            words = f"Level {level}: {_tokens(m, half)} read {_tokens(m - half, half)}; they meet at {m}."
            pieces.append(part(words, *block, choose={0: m - 1, 1: m - 1}))
    for t in range(C):
        pieces.append(rect(X + SIZE * t, Y + SIZE * t, SIZE, SIZE, "grey"))
        pieces += [text(X - 4, Y + SIZE * (t + 0.5), t, "end")]
        pieces += [text(X + SIZE * (t + 0.5), Y + SIZE * C + 11, t)]
    pieces.append(text(X + SIZE * 7, Y + 8, "a row: the token that reads", "start"))
    pieces.append(text(X + SIZE * 7, Y + 27, "a column: the one that wrote", "start"))
    pieces.append(text(X + SIZE * C / 2, Y + SIZE * C + 29, "the number in a block is its level"))
    return "".join(pieces)


def _gates(first: int, last: int) -> str:
    """The gates of the tokens from first to last, in words."""
    if first > last:
        return "no gate"
    return f"gate {first}" if first == last else f"gates {first} to {last}"


def _frame(j: int, i: int) -> Frame:
    level, m = meet(j, i)
    half = 2**level
    left, top, x, y = m - half, m, X + SIZE * (j + 0.5), Y + SIZE * (i + 0.5)
    pieces = [
        _map(),
        path(
            [(X + SIZE * (left + a * half), Y + SIZE * (top + b * half)) for a, b in ((0, 0), (1, 0), (1, 1), (0, 1))],
            "line",
            closed=True,
        ),
        circle(x, y, 5, "ink"),
        circle(X + SIZE * m, Y + SIZE * m, 5, "vermilion"),
    ]
    if m - j > 1:
        pieces.append(arrow((x, Y + SIZE * m), (X + SIZE * m - 6, Y + SIZE * m), "line-vermilion"))
    pieces.append(arrow((X + SIZE * m, Y + SIZE * m + 6), (X + SIZE * m, y), "line-vermilion"))
    return Frame(
        pieces,
        f"Writer {j} = {j:04b}, reader {i} = {i:04b} in binary: they first differ in bit {level}, meet at token {m}, "
        f"on level {level}. The key decays by {_gates(j + 1, m - 1)}, the query by {_gates(m, i)}.",
    )


def levels() -> Explorable:
    """Every pair of a chunk of 16 tokens, the block in which the pair meets, and the border of that block."""
    return Explorable(
        title="Where do two tokens meet?",
        notice="Every pair below the diagonal lies in exactly one block, and every block is one matrix product. Its "
        "upper right corner (the dot) is the border: keys decay up to it, queries from it on, and no factor is above "
        "1.",
        alt="The lower triangle of 16 by 16 pairs, cut into one square of eight tokens, two of four, four of two and "
        "eight of one. The square of the chosen pair is outlined.",
        controls=(Slider("Reader", range(1, C)), Slider("Writer", range(C - 1))),
        frames=[[_frame(j, i) for j in range(i)] for i in range(1, C)],
        height=Y + SIZE * C + 42,
        start=(6, 2),
        legend=(
            *(Key(f"{color} edge", f"level {level}") for level, color in enumerate(COLORS)),
            Key("grey", "a token and itself"),
            Key("ink", "the pair", "dot"),
            Key("vermilion", "where it meets", "dot"),
            Key("line-vermilion", "how key and query decay", "line"),
        ),
        question=Question(
            "Tokens 7 and 8 are neighbours. On which level do they meet?",
            "3",
            {
                "0": "That is where 6 and 7 meet. Between 7 and 8 lies the border of the largest block.",
                "1": "That is where 5 and 6 meet. Between 7 and 8 lies the border of the largest block.",
                "3": "0111 and 1000 differ in the highest bit: what counts is the border between them.",
            },
            seen=(7, 7),  # reader 8, writer 7
            before=(0, 0),
        ),
    )
