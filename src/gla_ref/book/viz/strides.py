"""The places of a tile's numbers in memory: rows, columns, strides, offsets (chapter 4)."""

import torch

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import part, rect, text

__all__ = ["VIEWS", "strides"]

TILE = 2  # rows and columns of a tile
X = torch.arange(24).view(4, 6)  # every number is its own offset
#: a name of x -> the same 24 numbers of memory in this view
VIEWS = {"x": X, "x.T": X.T, "x[:, ::2]": X[:, ::2], "x[:, 1:4]": X[:, 1:4]}
CELL, LEFT, TOP = 26, 22, 26
STRIP, BEGIN = 15.5, 14  # the memory at the bottom


def strides() -> Explorable:
    """A matrix and views of it in tiles of 2 x 2: the chosen tile's rows, columns, and its places in memory."""
    views = VIEWS.values()
    frames = [
        [[_frame(name, x, i, j) for j in range(-(-x.shape[1] // TILE))] for i in range(-(-x.shape[0] // TILE))]
        for name, x in VIEWS.items()
    ]
    return Explorable(
        title="Where is my tile? Rows and columns, each times its stride",
        notice="A view moves no number: transposing, or taking some of the columns, only changes the two strides and "
        "where x begins. A kernel that multiplies by both strides reads every view correctly. A kernel that "
        "assumes packed rows reads only the first view correctly.",
        alt="A matrix in tiles of two by two with one tile coloured. Next to it the offsets of the tile's rows and "
        "columns, below it a strip of 24 numbers of memory with the tile's numbers coloured.",
        controls=(
            Choice("Matrix", list(VIEWS)),
            Slider("program_id(0)", range(max(-(-len(x) // TILE) for x in views))),
            Slider("program_id(1)", range(max(-(-x.shape[1] // TILE) for x in views))),
        ),
        frames=frames,
        height=268,
        start=(0, 0, 1),
        legend=(
            Key("sky", "numbers of the tile"),
            Key("white edge", "other numbers"),
            Key("pale-red", "masked: the matrix has ended"),
        ),
        question=Question(
            "x.T is x with rows and columns exchanged. Which numbers does it move in memory?",
            "none",
            {
                "all of them": "It would have to copy the matrix. Choose x.T and look at the strip of memory.",
                "none": "Only the two strides change places.",
            },
            seen=(1, 0, 1),
            before=(0, 0, 0),
        ),
    )


def offsets(x: torch.Tensor, i: int, j: int) -> torch.Tensor:
    """Offsets of tile (i, j) from the view's first number; -1 where the mask leaves a place out."""
    row = i * TILE + torch.arange(TILE)[:, None]
    col = j * TILE + torch.arange(TILE)[None, :]
    o = row * x.stride(0) + col * x.stride(1)
    return torch.where((row < x.shape[0]) & (col < x.shape[1]), o, -1)


def _numbers(values) -> str:
    return ", ".join(map(str, values))


def _frame(name: str, x: torch.Tensor, i: int, j: int) -> Frame:
    (rows, cols), (down, right), start = x.shape, x.stride(), x.storage_offset()
    row, col = (range(n * TILE, (n + 1) * TILE) for n in (i, j))
    pieces = [text(LEFT, 10, f"{name}: strides {down} and {right}", "start")]
    for r in range(rows):
        for c in range(cols):
            mine = r in row and c in col
            words = f"Row {r}, column {c}: {r} × {down} + {c} × {right} = {r * down + c * right} from the beginning."
            cell = (
                rect(LEFT + CELL * c, TOP + CELL * r, CELL, CELL, "sky" if mine else "white"),
                rect(LEFT + CELL * c, TOP + CELL * r, CELL, CELL, "edge faint"),
                text(LEFT + CELL * (c + 0.5), TOP + CELL * (r + 0.5), int(x[r, c]), "on"),
            )
            pieces.append(part(words, *cell, choose={1: r // TILE, 2: c // TILE}))
    for n, r in enumerate(row):  # the places of the tile that the matrix lacks
        for m, c in enumerate(col):
            if r >= rows or c >= cols:
                pieces.append(rect(LEFT + CELL * (j * TILE + m), TOP + CELL * (i * TILE + n), CELL, CELL, "pale-red"))
    side = LEFT + CELL * 7
    lines = (
        f"rows {_numbers(row)}",
        f"times {down}: {_numbers(down * r for r in row)}",
        f"columns {_numbers(col)}",
        f"times {right}: {_numbers(right * c for c in col)}",
    )
    for n, line in enumerate(lines):
        pieces.append(text(side, TOP + 14 + 24 * n + 10 * (n > 1), line, "start" + " strong" * (n % 2)))
    o = offsets(x, i, j)
    inside = o[o >= 0].tolist()
    touched = {start + n for n in inside}
    y = 212
    pieces.append(text(BEGIN, y - 12, "the same numbers in memory", "start"))
    for n in range(24):
        pieces.append(rect(BEGIN + STRIP * n, y, STRIP, 26, "sky" if n in touched else "white"))
        pieces.append(rect(BEGIN + STRIP * n, y, STRIP, 26, "edge faint"))
        if n % 6 == 0 or n == 23:
            pieces.append(text(BEGIN + STRIP * (n + 0.5), y + 38, n))
    begin = f" x begins at number {start}." if start else ""
    masked = f" {TILE * TILE - len(inside)} places are masked." if len(inside) < TILE * TILE else ""
    return Frame(
        pieces,
        f"Tile ({i}, {j}): rows times {down} plus columns times {right} are the offsets {_numbers(inside)}."
        f"{begin}{masked}",
    )
