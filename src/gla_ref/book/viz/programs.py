"""The numbers of a vector that a program owns: block, offsets, mask (chapter 4)."""

import torch

from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, part, path, rect, text

__all__ = ["programs"]

LENGTHS, BLOCKS = (11, 12, 16), (2, 4, 8)
END = 16  # numbers of memory in the picture
CELL, LEFT = 23, 16  # the memory's cells and left edge
PLACE, FIRST = 30, 148  # the places of the program's block


def programs() -> Explorable:
    """A vector of N numbers in blocks, one block per program, and the offsets and mask of the chosen program."""
    frames = [[[_frame(N, BLOCK, p) for p in range(-(-N // BLOCK))] for BLOCK in BLOCKS] for N in LENGTHS]
    return Explorable(
        title="Which numbers are mine? A program only knows its own number",
        notice="Every program runs the same lines. Its number is the only difference, and offsets and mask follow "
        "from it. Where BLOCK does not divide N, the last program has offsets beyond the end of x (pale red). "
        "That memory belongs to another tensor, and the mask keeps the program from touching it.",
        alt="A row of sixteen numbers in memory, cut into blocks, one per program. The chosen program's block is "
        "coloured. Below, its places, offsets, addresses and mask, one below the other.",
        controls=(
            Choice("Numbers N", LENGTHS),
            Choice("BLOCK", BLOCKS),
            Slider("program_id", range(-(-max(LENGTHS) // min(BLOCKS)))),
        ),
        frames=frames,
        height=206,
        start=(0, 1, 1),
        legend=(
            Key("sky", "this program's numbers"),
            Key("white edge", "another program's"),
            Key("pale-red", "masked: beyond the end"),
            Key("pale-grey", "not part of x"),
        ),
        question=Question(
            "Eleven numbers in blocks of four: how many programs does it take?",
            "3",
            {
                "2": "Two blocks of four have room for eight numbers.",
                "3": "Two full blocks, and a third with one place that the mask leaves out.",
                "4": "The third block has room for the last three numbers.",
            },
            seen=(0, 1, 2),
            before=(2, 1, 0),
        ),
    )


def _frame(N: int, BLOCK: int, p: int) -> Frame:
    places = torch.arange(BLOCK)
    o = p * BLOCK + places
    m = o < N
    mine = o.tolist()
    pieces = []
    for n in range(END):
        kind = "pale-grey" if n >= N else "white"
        if n in mine:
            kind = "sky" if n < N else "pale-red"
        owner, words = n // BLOCK, "memory beyond x, which belongs to another tensor."
        if n < N:
            words = f"program {owner} of {-(-N // BLOCK)}, place {n % BLOCK} of its block."
        shown = cell(LEFT + CELL * n, 24, CELL, 24, kind, n)
        pieces.append(part(f"Number {n}: {words}", shown, choose={2: owner} if n < N else None))
    pieces.append(rect(LEFT, 24, CELL * N, 24, "edge"))
    pieces.append(text(LEFT, 10, f"x, {N} numbers in memory, and the programs", "start"))
    for program in range(-(-N // BLOCK)):
        begin, end = (LEFT + CELL * BLOCK * (program + i) for i in (0, 1))
        pieces.append(path([(begin + 2, 52), (begin + 2, 56), (end - 2, 56), (end - 2, 52)], "line"))
        pieces.append(text((begin + end) / 2, 68, program, "strong" if program == p else ""))
    rows = (
        (f"tl.arange(0, {BLOCK})", places.tolist()),
        (f"o = {p} * {BLOCK} + arange", mine),
        ("bytes from x", (4 * o).tolist()),
        (f"m = o < {N}", ["✓" if inside else "×" for inside in m.tolist()]),
    )
    for i, (label, values) in enumerate(rows):
        y = 88 + 30 * i
        pieces.append(text(4, y + 13, label, "start"))
        for n, value in enumerate(values):
            pieces.append(cell(FIRST + PLACE * n, y, PLACE - 2, 26, "sky" if m[n] else "pale-red", value))
    out = BLOCK - int(m.sum())
    words = f"the mask leaves {out} of them out" if out else "the mask leaves none out"
    assert FIRST + PLACE * max(BLOCKS) <= WIDTH
    return Frame(
        pieces,
        f"Program {p} of {-(-N // BLOCK)} (counted from 0) has the offsets {p} × {BLOCK} = {mine[0]} to {mine[-1]}. "
        f"N is {N}: {words}.",
    )
