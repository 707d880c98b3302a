"""A chart: multiprocessors over time, work and waits when a text is shared out in three ways (chapter 7)."""

from typing import NamedTuple

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
        n = P if P % heads else max(2, P // heads)  # segments of a head: every multiprocessor gets as many
        launch("states", [(h, N // n * WRITES + FINAL) for h in every for _ in range(n)])
        # each state in and out, in four programs of 1024 numbers
        launch("carry", [(h, (2 * n + 1) * FINAL / 4) for h in every for _ in range(4)])
        launch("outputs", [(h, N // n * CHUNK + FINAL) for h in every for _ in range(n)])
    else:
        launch("states", [(h, N * (WRITES + STATE) + FINAL) for h in every])
        launch("outputs", [(h, CHUNK + STATE) for h in every for _ in range(N)])
    return programs


#: chapter 7's names of the ways, and what a program makes, with its colour
CALLED = {"one long walk": "fused", "segments": "segmented", "every state first": "materialised"}
MAKES = {"outputs": ("outputs", "C5"), "states": ("states", "C4"), "carry": ("states passed on", "C3")}


def multiprocessors(many=HEADS, ways=WAYS) -> None:
    """Draw texts of one to four heads on a small chip: one program per head, one per segment, or all states first."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    high = 1.6 + 1.25 * len(many)
    figure, axes = plt.subplots(len(many), len(ways), sharex=True, sharey=True, squeeze=False, figsize=(4.7, high))
    for row, heads in zip(axes, many, strict=True):
        row[0].set_ylabel(f"{heads} head{'s' * (heads > 1)}")
        alone = max(p.stop for p in schedule(WAYS[0], heads))
        for ax, way in zip(row, ways, strict=True):
            programs = schedule(way, heads)
            for m, start, stop, makes, _ in programs:
                ax.barh(m, stop - start, 0.8, start, color=MAKES[makes][1], edgecolor="white", linewidth=0.3)
            ax.axvline(alone, ymax=0.85, color="0.3", ls="--", lw=1)
            ax.text(
                0.98, 0.98, f"{max(p.stop for p in programs) / alone:.2f}", ha="right", va="top", transform=ax.transAxes
            )
            ax.set(ylim=(P - 0.5, -1.8), yticks=[])
    for ax, way in zip(axes[0], ways, strict=True):
        ax.set_title(f"{way}\n({CALLED[way]})", size=11)
    axes[-1, -1].set_xlabel("units of time (8 KiB moved each)", loc="right")
    figure.legend(handles=[Patch(color=c, label=w) for w, c in MAKES.values()], loc="outside lower center", ncols=3)
    plt.show()
