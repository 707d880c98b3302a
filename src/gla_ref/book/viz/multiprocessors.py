"""Multiprocessors over time: work and waits when a text is shared out in three ways (chapter 7)."""

from __future__ import annotations

import math
from typing import NamedTuple

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import comb, part, path, played, rect, text

__all__ = ["WAYS", "Program", "multiprocessors", "schedule"]

P, N = 4, 32  # multiprocessors of the chip, chunks of a head; C = K = V = 64, one tile of V
WAYS = ("one long walk", "segments", "every state first")
HEADS = (1, 2, 3, 4)
# tiles of 8 KiB that a program moves: a chunk's q, k, v and o in bf16, its k and v alone, a state in bf16 and float32
CHUNK, WRITES, STATE, FINAL = 4, 2, 1, 2


class Program(NamedTuple):
    """One program: its multiprocessor, its start and stop, its results and its head (from 1)."""

    multiprocessor: int
    start: float
    stop: float
    makes: str  # "outputs", "states" or "carry"
    head: int


def schedule(way: str, heads: int) -> list[Program]:
    """All programs on a chip of `P` multiprocessors, each of which moves one tile in a unit of time.

    A launch begins when the launch before has ended; the next program of a launch goes to the first free
    multiprocessor.
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
        n = max(1, P // heads)  # segments of a head
        launch("states", [(h, N // n * WRITES + FINAL) for h in every for _ in range(n)])
        # each state in and out, in four programs of 1024 numbers
        launch("carry", [(h, (2 * n + 1) * FINAL / 4) for h in every for _ in range(4)])
        launch("outputs", [(h, N // n * CHUNK + FINAL) for h in every for _ in range(n)])
    else:
        launch("states", [(h, N * (WRITES + STATE) + FINAL) for h in every])
        launch("outputs", [(h, CHUNK + STATE) for h in every for _ in range(N)])
    return programs


LEFT, TOP, ROW, UNIT, TALL = 26, 24, 36, 1.4, 30
KINDS = {"outputs": "pale-blue", "states": "orange", "carry": "pink"}
#: chapter 7's names of the ways
CALLED = {"one long walk": "fused", "segments": "segmented", "every state first": "materialised"}
MOMENT = 10  # units of time between two pictures
DOES = {"outputs": "makes outputs", "states": "adds up states", "carry": "passes states on"}
MADE = {"outputs": "outputs", "states": "states", "carry": "states passed on"}
#: the tiles that a program moves between two thin lines, a chunk's
TILES = {("one long walk", "outputs"): CHUNK, ("segments", "states"): WRITES, ("segments", "outputs"): CHUNK}
TILES |= {("every state first", "states"): WRITES + STATE, ("every state first", "outputs"): CHUNK + STATE}


def _bars(way: str, programs: list[Program]) -> str:
    """A bar for each program, cut into its chunks."""
    pieces = []
    for m, start, stop, makes, head in programs:
        x, y, width = LEFT + UNIT * start, TOP + ROW * m, UNIT * (stop - start)
        step = UNIT * TILES.get((way, makes), stop - start)
        cuts = [x + step * n for n in range(1, int(width / step))]
        bar = [rect(x, y, width, TALL, f"{KINDS[makes]} edge")]
        bar += [comb(cuts, y + 22, y + TALL, "edge faint")] if cuts else []
        words = f"Head {head}, {start:g} to {stop:g}: {DOES[makes]}."
        pieces.append(part(words, *bar))
    return "".join(pieces)


def _heads(programs: list[Program]) -> str:
    """Write the head on each long bar, above pale bars and the line of the present."""
    return "".join(
        rect(LEFT + UNIT * start + 2, TOP + ROW * m + 4, 44, 16, KINDS[makes])
        + text(LEFT + UNIT * start + 5, TOP + ROW * m + 12, f"head {head}", "start on")
        for m, start, stop, makes, head in programs
        if UNIT * (stop - start) > 48
    )


def _row(way: str, heads: int) -> list[Frame]:
    """A frame for each moment, until all is done: finished work in full colours, later work pale."""
    programs, alone = schedule(way, heads), max(p.stop for p in schedule(WAYS[0], heads))
    end, bars, frames = max(p.stop for p in programs), _bars(way, programs), []
    ground = [text(LEFT, 10, "a row for each multiprocessor, over time", "start")]
    for p in range(P):
        y = TOP + ROW * p
        ground += [text(13, y + 15, p + 1), rect(LEFT, y, UNIT * end, TALL, "pale-grey")]
    x = LEFT + UNIT * alone
    ground = "".join([*ground, path([(x, TOP - 4), (x, TOP + ROW * P)], "line dashed")])
    work, who = sum(p.stop - p.start for p in programs), f"{heads} head{'s' * (heads > 1)}, {CALLED[way]}"
    for t in range(0, math.ceil(end) + MOMENT, MOMENT):
        busy = [p for p in programs if p.start <= t < p.stop]
        done = sum(min(p.stop, t) - min(p.start, t) for p in programs)
        what = " and ".join(sorted({MADE[p.makes] for p in busy}))
        words = f"{who}, after {t} units of time: {len(busy)} of {P} multiprocessors at work ({what}), "
        words += f"{done:g} of {work:g} tiles moved."
        if t >= end:
            than = (
                f"{end / alone:.2f} times the long walk's {alone:g}" if way != WAYS[0] else "marked by the dashed line"
            )
            words = f"{who}: done after {end:g} units of time (8 KiB moved each), {than}. "
            words += f"{work / (P * end):.0%} of the chip is at work on average."
        x, name = LEFT + UNIT * min(t, end), f"until-{WAYS.index(way)}-{heads}-{t}"
        frames.append(Frame([*played(ground, bars, name, x, TOP - 6, TOP + ROW * P), _heads(programs)], words))
    return frames


def multiprocessors() -> Explorable:
    """One text of few heads on a small chip: one program per head, one per segment, or all states first."""
    frames = [[_row(way, heads) for heads in HEADS] for way in WAYS]
    most = max(len(row) for way in frames for row in way)
    return Explorable(
        title="Four multiprocessors share a text",
        notice="Each bar is a program, as long as what it has to load and store; thin marks are its chunks. One head "
        "in one walk leaves three multiprocessors idle. Segments use all four, although they read keys and values "
        "twice. With three heads and more the long walk ends first.",
        alt="A row for each of four multiprocessors, with bars for the programs that it runs one after the other, "
        "coloured by what they make; what lies right of the line of the present is pale.",
        controls=(
            Choice("Way", [f"{way} ({CALLED[way]})" for way in WAYS]),
            Slider("Heads", HEADS),
            Slider("Time", range(0, most * MOMENT, MOMENT)),
        ),
        frames=frames,
        height=TOP + ROW * P + 6,
        start=(0, 0, 5),
        legend=(
            Key("pale-blue edge", "outputs"),
            Key("orange edge", "states"),
            Key("pink edge", "states passed on"),
            Key("pale-grey", "nothing to do"),
            Key("line-vermilion", "now", "line"),
            Key("line dashed", "when the long walk ends", "line"),
        ),
        question=Question(
            "One head, four multiprocessors. How much sooner are four segments done than one long walk?",
            "about twice",
            {
                "four times": "Keys and values are read twice, and the states must be passed on in between.",
                "about twice": "All four work, but on more: keys and values are read twice.",
                "not at all": "The reading twice costs less than three idle multiprocessors.",
            },
            seen=(WAYS.index("segments"), 0, len(frames[WAYS.index("segments")][0]) - 1),
            before=(0, 0, 0),
        ),
    )
