"""Multiprocessors over time: who works and who waits when a text is shared out in three ways (chapter 7)."""

from __future__ import annotations

from typing import NamedTuple

from ._explorable import Choice, Explorable, Frame, Slider
from ._svg import path, rect, text

__all__ = ["WAYS", "Program", "multiprocessors", "schedule"]

P, N = 4, 32  # multiprocessors of the chip, chunks of a head; C = K = V = 64, one tile of V
WAYS = ("one long walk", "segments", "every state first")
HEADS = (1, 2, 3, 4)
# tiles of 8 KiB that a program moves: a chunk's q, k, v and o in bf16, its k and v alone, a state in bf16 and float32
CHUNK, WRITES, STATE, FINAL = 4, 2, 1, 2


class Program(NamedTuple):
    """One program: where, from when to when, what it makes and for which head (from 1)."""

    multiprocessor: int
    start: float
    stop: float
    makes: str  # "outputs", "states" or "carry"
    head: int


def schedule(way: str, heads: int) -> list[Program]:
    """All programs on a chip of `P` multiprocessors, each of which moves one tile in a unit of time.

    A launch begins when the one before it has ended; within it the next program goes to whoever is free first.
    """
    done, programs = 0.0, []

    def launch(makes: str, lengths: list[tuple[int, float]]) -> None:
        nonlocal done
        free = [done] * P
        for head, length in lengths:
            p = free.index(min(free))
            programs.append(Program(p, free[p], free[p] + length, makes, head))
            free[p] += length
        done = max(free)

    every = range(1, heads + 1)
    if way == "one long walk":
        launch("outputs", [(h, N * CHUNK + FINAL) for h in every])
    elif way == "segments":
        n = max(1, P // heads)  # of a head
        launch("states", [(h, N // n * WRITES + FINAL) for h in every for _ in range(n)])
        # each state in and out, in four programs of 1024 numbers
        launch("carry", [(h, (2 * n + 1) * FINAL / 4) for h in every for _ in range(4)])
        launch("outputs", [(h, N // n * CHUNK + FINAL) for h in every for _ in range(n)])
    else:
        launch("states", [(h, N * (WRITES + STATE) + FINAL) for h in every])
        launch("outputs", [(h, CHUNK + STATE) for h in every for _ in range(N)])
    return programs


LEFT, TOP, ROW, UNIT = 26, 24, 36, 1.4
KINDS = {"outputs": "pale-blue", "states": "orange", "carry": "pink"}


def _frame(way: str, heads: int) -> Frame:
    programs, alone = schedule(way, heads), max(p.stop for p in schedule(WAYS[0], heads))
    end = max(p.stop for p in programs)
    pieces = [text(LEFT, 10, "a row for each multiprocessor, over time", "start")]
    for p in range(P):
        y = TOP + ROW * p
        pieces += [text(13, y + 15, p + 1), rect(LEFT, y, UNIT * end, 30, "pale-grey")]
    for m, start, stop, makes, head in programs:
        x, y, width = LEFT + UNIT * start, TOP + ROW * m, UNIT * (stop - start)
        pieces.append(rect(x, y, width, 30, f"{KINDS[makes]} edge"))
        if width > 44:
            pieces.append(text(x + width / 2, y + 15, f"head {head}", "on"))
    x = LEFT + UNIT * alone
    pieces.append(path([(x, TOP - 4), (x, TOP + ROW * P)], "line dashed"))
    y = TOP + ROW * P + 12
    for left, kind, name in ((26, "pale-blue", "outputs"), (108, "orange", "states"), (184, "pink", "carry")):
        pieces += [rect(left, y, 12, 12, kind), text(left + 18, y + 6, name, "start")]
    pieces += [rect(252, y, 12, 12, "pale-grey"), text(270, y + 6, "nothing to do", "start")]
    busy = sum(p.stop - p.start for p in programs) / (P * end)
    words = f"{heads} head{'s' * (heads > 1)}, {way}: done after {end:g} units of time (8 KiB moved each), "
    words += f"{end / alone:.2f} times the long walk's {alone:g}" if way != WAYS[0] else "marked by the dashed line"
    return Frame(pieces, f"{words}. {busy:.0%} of the chip is at work on average.")


def multiprocessors() -> Explorable:
    """One text of few heads on a small chip: a program a head, a program a segment, or all states first."""
    return Explorable(
        title="Four multiprocessors share a text",
        notice="Each bar is a program, as long as what it has to load and store. One head in one walk leaves three "
        "multiprocessors idle. Segments use all four, although they read keys and values twice. With three heads and "
        "more the long walk ends first.",
        alt="A row for each of four multiprocessors, with bars for the programs that it runs one after the other, "
        "coloured by what they make; the rest of the row is grey.",
        controls=(Choice("Way", WAYS), Slider("Heads", HEADS)),
        frames=[[_frame(way, heads) for heads in HEADS] for way in WAYS],
        height=TOP + ROW * P + 34,
        start=(0, 0),
    )
