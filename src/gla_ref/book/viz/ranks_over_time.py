"""The work of several GPUs over time, each with its piece of one text (chapter 25).

The times come from the model in :mod:`gla_ref.book.scaling`, not from measurements.
"""

from ..scaling import Task, schedule
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import part, path, played, rect, text

__all__ = ["RANKS", "TOKENS", "WAYS", "ranks_over_time"]

TOKENS = 1 << 20
RANKS = (2, 4, 8)
#: the ways as the reader chooses them, and their names in the model
WAYS = {"each waits for the one before": "one after another", "all-gather": "all-gather", "pipeline": "pipeline"}
MOMENTS = 12  # pictures from the beginning to the end
LEFT, TOP, WIDE, TALL = 62, 20, 330, 200
KINDS = {"sum": "pale-blue", "exchange": "vermilion", "walk": "orange"}
SAYS = {"sum": "adds up its own keys and values", "exchange": "waits for the state", "walk": "walks its piece"}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _bars(tasks: list[Task], ranks: int, end: float) -> str:
    """A bar for each task, at least two units wide."""
    row, pieces = TALL / ranks, []
    for job, rank, start, stop in tasks:
        width = max(2.0, WIDE * (stop - start) / end)
        words = f"Rank {rank} {SAYS[job]}, from {_ms(start)} to {_ms(stop)}."
        pieces.append(
            part(words, rect(LEFT + WIDE * start / end, TOP + row * rank, width, 0.7 * row, f"{KINDS[job]} edge"))
        )
    return "".join(pieces)


def _frames(way: str, ranks: int) -> list[Frame]:
    """A frame for each moment: finished work in full colours, later work pale."""
    tasks, alone = schedule(WAYS[way], TOKENS, ranks), schedule("one after another", TOKENS, 1)[-1].stop
    scale, done = alone * 1.05, max(t.stop for t in tasks)
    row, bars, frames = TALL / ranks, _bars(tasks, ranks, scale), []
    ground = [text(LEFT - 6, TOP + row * (r + 0.35), f"rank {r}", "end") for r in range(ranks)]
    ground += [rect(LEFT, TOP + row * r, WIDE, 0.7 * row, "pale-grey") for r in range(ranks)]
    end = LEFT + WIDE * alone / scale
    ground.append(path([(end, TOP - 4), (end, TOP + TALL)], "line-blue dashed"))
    ground = "".join([*ground, text(end, TOP - 11, "one GPU alone", "end")])
    for n in range(MOMENTS + 1):
        t = done * n / MOMENTS
        x = LEFT + WIDE * t / scale + (2 if n == MOMENTS else 0)
        busy = sum(task.start <= t < task.stop for task in tasks if task.job != "exchange")
        words = f"{way}, {ranks} GPUs, after {_ms(t)}: {busy} of {ranks} at work."
        if n == MOMENTS:
            waited = max(task.stop - task.start for task in tasks if task.job == "exchange")
            words = f"{way}, {ranks} GPUs: done after {_ms(done)}, {done / alone:.0%} of what one GPU takes. "
            words += f"The longest exchange took {1e6 * waited:.0f} µs."
        name = f"ranks-{list(WAYS).index(way)}-{ranks}-{n}"
        frames.append(Frame(played(ground, bars, name, x, TOP - 4, TOP + TALL), words))
    return frames


def ranks_over_time() -> Explorable:
    """One text on several GPUs, by three ways to hand on states."""
    frames = [[_frames(way, ranks) for ranks in RANKS] for way in WAYS]
    right = "a quarter"
    return Explorable(
        title="A million tokens, a piece for each GPU",
        notice="A model in which a GPU moves its bytes at the memory's speed. If each GPU waits for the one before, "
        "nothing is gained. With sums, no GPU waits for another GPU's walk, and the exchange takes hardly any time.",
        alt="A row for each GPU over time, with bars for its own sum, the exchange and the walk. A dashed line marks "
        "when one GPU alone would be done. Bars to the right of the line that marks the present are pale.",
        controls=(
            Choice("Way", tuple(WAYS)),
            Choice("GPUs", RANKS),
            Slider("Time", [f"{n} of {MOMENTS}" for n in range(MOMENTS + 1)]),
        ),
        frames=frames,
        height=TOP + TALL,
        start=(1, 1, 8),
        legend=(
            Key("pale-blue edge", "its own sum: keys and values"),
            Key("vermilion edge", "the exchange"),
            Key("orange edge", "the walk: queries, too"),
            Key("pale-grey", "nothing to do"),
            Key("line-blue dashed", "one GPU alone is done", "line"),
            Key("line-vermilion", "now", "line"),
        ),
        question=Question(
            "Four GPUs have a quarter of a text each. Every quarter needs the state that the one before ends with. "
            "How long do they take together, if one GPU alone takes one hour?",
            right,
            {
                "an hour": "That is so if each waits for the GPU before. But a piece can be summed before its start "
                "is known.",
                "half an hour": "It is true that each reads its keys and values twice: once for its sum, and once for "
                "its output. But so does one GPU alone. To fill itself it cuts its text into segments, as in "
                "chapter 7.",
                right: "Each finds the sum of its own quarter at once, without its start. Then all exchange their sums "
                "and walk at the same time. The exchange takes hardly any time.",
            },
            seen=(1, 1, MOMENTS),
            before=(0, 1, 0),
        ),
    )
