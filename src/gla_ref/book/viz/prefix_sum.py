"""A prefix sum in two steps over chunks, of numbers or of states (chapter 6)."""

import torch
from torch import Tensor

from ...prefix_sum import Chunked, chunked
from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import part, rect, text

__all__ = ["prefix_sum"]

LENGTHS = (1, 2, 3, 4, 6, 12)
COLUMN, TILE = 30, 28
ROWS = ("input", "step 1, inside the chunks", "step 2, between them: the carry", "result: the sum of both")

# keys and values of twelve tokens; the first four are the chapter's example
KEYS = [[1, 0], [0, 1], [1, 1], [1, 0], [0, -1], [1, 1], [-1, 1], [0, 1], [1, 0], [-1, 0], [1, -1], [0, 1]]
VALUES = [[1, 2, 3], [4, 0, 1], [0, 1, 0], [2, 2, 2], [1, 0, -2], [-2, 1, 0]]
VALUES += [[0, 3, 1], [1, -1, 0], [0, 2, -1], [3, 0, 1], [1, 1, -2], [-1, 2, 0]]


def prefix_sum(*, states: bool = False) -> Explorable:
    """The sums of 0 to 11, or of twelve outer products k^T v; every tile is an entry of `prefix_sum.chunked`.

    Args:
        states: add up states of linear attention, K = 2 and V = 3, instead of numbers.
    """
    x = torch.arange(12)
    if states:
        x = torch.tensor(KEYS)[:, :, None] * torch.tensor(VALUES)[:, None, :]  # [T K V]
    frames = [_walk(x, C) for C in LENGTHS]
    title, notice, alt = _STATES if states else _NUMBERS
    controls = (Choice("Chunk length", LENGTHS), Slider("Additions in a row", range(max(len(row) for row in frames))))
    keys = _KEYS + (_SIGNS if states else ())
    question = _SAME if states else _CHAIN
    return Explorable(title, notice, alt, controls, frames, height=258, start=(3, 4), legend=keys, question=question)


_KEYS = (
    Key("pale-blue edge", "sum inside a chunk"),
    Key("pale-red edge", "carry"),
    Key("white edge", "input, result"),
    Key("line-blue", "added now, step 1"),
    Key("line-vermilion", "added now, step 2"),
)
_SIGNS = Key("white ink", "above 0"), Key("white hollow", "below 0")
_CHAIN = Question(
    "Twelve numbers in chunks of four: how many additions have to wait for one another?",
    "5",
    {
        "11": "That is the number without chunks: each waits for the one before.",
        "5": "Three inside a chunk, at once in all of them, and two between the chunks.",
        "3": "That is the number inside a chunk. Then the carries come, one after the other.",
    },
    seen=(3, 5),
)
_SAME = Question(
    "Matrices instead of numbers: what changes in the two steps?",
    "nothing",
    {"nothing": "The two steps only need sums.", "the carry": "The carry is a sum as well, of matrices now."},
    seen=(3, 5),
)


_NUMBERS = (
    "Prefix sums of 0 to 11 in two steps",
    "In step 1 all chunks advance at once, in step 2 all numbers of a chunk. Chunks of 1 and of 12 need 11 additions "
    "in a row, as many as without chunks. Chunks of 3 or 4 need 5, and pay with 17 additions in all.",
    "A table of twelve columns in groups: the input, the sums inside each chunk in blue, the carry of each chunk in "
    "red, and the result. With every step the slider takes, more of it is filled.",
)
_STATES = (
    "The same picture with states",
    "Filled squares are positive, hollow ones negative, and their area is the size. The two steps work "
    "for anything that can be added. The query of a column reads blue plus red: from the blue tile it reads the "
    "intra-chunk part of its output, from the red tile the inter-chunk part.",
    "A table of twelve columns in groups, every entry a matrix of two by three squares: the outer product of each "
    "token, their sums inside each chunk in blue, the carry of each chunk in red, and the state after each token.",
)


def _walk(x: Tensor, C: int) -> list[Frame]:
    """A frame for every addition of the longest chain: C - 1 inside the chunks, N - 1 between them."""
    N, sums = len(x) // C, chunked(x, C)
    return [_frame(x, sums, C, min(s, C - 1), max(0, s - C + 1)) for s in range(C + N - 1)]


def _frame(x: Tensor, sums: Chunked, C: int, inside: int, between: int) -> Frame:
    """A frame after `inside` additions in every chunk, and carries for `between` chunks."""
    T = len(x)
    N = T // C
    gap = min(10, (WIDTH - 16 - COLUMN * T) / max(N - 1, 1))
    left = [8 + COLUMN * t + gap * (t // C) for t in range(T)]
    local, carry, result = (row.tolist() for row in sums)
    ready = [inside == C - 1 and t // C <= between for t in range(T)]  # its carry has arrived
    rows = (
        ("white", x.tolist(), [True] * T),
        ("pale-blue", local, [t % C <= inside for t in range(T)]),
        ("pale-red", [carry[t // C] for t in range(T)], ready),
        ("white", result, ready),
    )
    largest = sums.result.abs().max().item()
    pieces = []
    for r, (name, (kind, entries, known)) in enumerate(zip(ROWS, rows, strict=True)):
        y = 20 + 62 * r
        pieces.append(text(8, y - 10, name, "start"))
        for t in range(T):
            tile = rect(left[t], y, TILE, 30, f"{kind} edge" if known[t] else "edge faint")
            if known[t]:
                tile = part(_told(r, t, C), tile, _entry(left[t], y, entries[t], largest))
            pieces.append(tile)
    if between:  # the last result of a chunk is the carry of the next
        first = C * between
        new = [(3, first - 1), *((2, t) for t in range(first, first + C))]
    else:
        new = [(1, t) for t in range(inside, T, C)] if inside else []
    for r, t in new:
        pieces.append(rect(left[t], 20 + 62 * r, TILE, 30, "line-blue" if r == 1 else "line-vermilion"))
    return Frame(pieces, _said(x, sums, C, inside, between))


def _told(row: int, t: int, C: int) -> str:
    """The words for a tile."""
    first = t // C * C
    tokens = f"column {t + 1}" if first == t else f"columns {first + 1} to {t + 1}"
    before = f"columns 1 to {first}" if first else "nothing comes before"
    return (
        f"Input of column {t + 1}.",
        f"The sum of {tokens}, in chunk {t // C + 1}.",
        f"The carry: {before}.",
        f"Columns 1 to {t + 1}: blue plus red.",
    )[row]


def _entry(x: float, y: float, entry: int | list[list[int]], largest: int) -> str:
    """A number, or a matrix as squares with areas for sizes; squares of negative numbers are hollow."""
    if isinstance(entry, int):
        return text(x + TILE / 2, y + 15, entry, "on")
    squares = []
    for i, row in enumerate(entry):
        for j, value in enumerate(row):
            side = 8.5 * (abs(value) / largest) ** 0.5 - (value < 0)  # a hollow one has a rim
            corner = x + TILE / 2 + 9 * (j - 1) - side / 2, y + 15 + 10 * (i - 0.5) - side / 2
            if value:
                squares.append(rect(*corner, side, side, "ink" if value > 0 else "hollow"))
    return "".join(squares)


def _said(x: Tensor, sums: Chunked, C: int, inside: int, between: int) -> str:
    N, local, first = len(x) // C, sums.local, C * between
    if between:
        where, how = f"Step 2, at once in chunk {between + 1}", "the carry is added to every state"
        added = [(sums.carry[between], local[t], sums.result[t]) for t in range(first, first + C)]
    elif inside:
        where, how = "Step 1, at once in every chunk", "the next token is added"
        added = [(local[t - 1], x[t], local[t]) for t in range(inside, len(x), C)]
    else:
        return f"Chunks of {C}, no addition yet: the first of every chunk is its own local sum."
    if x.ndim == 1:
        how = ", ".join(f"{a} + {b} = {y}" for a, b, y in added)
    return f"{where}: {how}. So far {N * inside + first} additions, {inside + between} in a row."
