"""A Hopper kernel's jobs over time: one program, two of them, or three groups of warps at once (chapter 22).

This is a model of peak rates, not a measurement: each unit moves, exponentiates or multiplies a chunk's numbers at its
peak speed. The model leaves out other arithmetic and waits for latencies.
"""

from typing import NamedTuple

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import bar, part, played, tracks

__all__ = ["JOBS", "RATES", "WAYS", "Task", "period", "schedule", "three_jobs", "work"]

#: the work of one multiprocessor of an H200 per clock, in bytes of memory and of shared memory, exponentials and FLOPs
RATES = {"memory": 16, "shared": 128, "exponentials": 16, "products": 4096}
JOBS = ("load", "transform", "multiply", "store")
WAYS = ("one program", "two programs", "three jobs, two stages", "three jobs, one stage")
CHUNKS = 5


def work(C: int = 64, K: int = 128, V: int = 128, programs: int = 1) -> dict[str, int]:
    """Clocks of each job for a chunk in 16 bits, if `programs` share the columns of the state.

    Programs that share q, k and g load them from memory once, so each program counts its share of the bytes.
    """
    columns = V // programs
    sums = 2 * C * K * (C + 16)  # the gates' sums, as products
    products = 2 * C * (C * (K + columns) + 2 * K * columns)
    copies = 2 * (K * columns + C * C + C * columns)  # S, P and o through shared memory
    return {
        "load": 2 * C * (3 * K + V) // RATES["memory"] // programs,
        "transform": sums // RATES["products"]
        + 2 * C * K // RATES["exponentials"]
        + 4 * 2 * C * K // RATES["shared"],  # q and k, in and out
        "multiply": products // RATES["products"] + copies // RATES["shared"],
        "store": 2 * C * columns // RATES["memory"],
    }


class Task(NamedTuple):
    """A job of one chunk: its start and stop in clocks, and its program (from 0)."""

    job: str
    chunk: int
    program: int
    start: int
    stop: int


def schedule(way: str, n: int = CHUNKS) -> list[Task]:
    """All tasks of `n` chunks. Loads and stores share the memory, and every job does one task at a time."""
    programs = 2 if way == WAYS[1] else 1
    clocks = work(programs=programs)
    if way in WAYS[:2]:  # all jobs of a chunk, then those of the next
        lines = [[(job, i, p) for i in range(n) for job in JOBS] for p in range(programs)]
    else:
        lines = [[(job, i, 0) for i in range(n)] for job in JOBS]
    stages = 1 if way == WAYS[3] else 2
    rows, stops, tasks = {}, {}, []

    def earliest(line):
        """Return the earliest start of a line's first task: after all tasks that it waits for."""
        (job, i, p), now = line[0], rows.get(_row(line[0][0]), 0)
        needs = [(JOBS[JOBS.index(job) - 1], i, p)] if job != "load" else []
        if len(lines) == len(JOBS):  # a stage and the tile of o must be free
            needs += [("multiply", i - stages, p)] if job == "load" else []
            needs += [("store", i - 1, p)] if job == "multiply" else []
        elif job == "load":
            needs += [("store", i - 1, p)]
        needs = [need for need in needs if need[1] >= 0]
        return max([now, *(stops[need] for need in needs)]) if all(need in stops for need in needs) else None

    while any(lines):
        ready = [(start, line[0][1], line) for line in lines if line and (start := earliest(line)) is not None]
        start, _, line = min(ready, key=lambda x: x[:2])
        job, i, p = line.pop(0)
        stops[job, i, p] = rows[_row(job)] = start + clocks[job]
        tasks.append(Task(job, i, p, start, stops[job, i, p]))
    return tasks


def _row(job: str) -> str:
    return "memory" if job in ("load", "store") else job


def period(way: str) -> int:
    """Clocks from one chunk to the next in a long text."""
    done = {t.chunk: t.stop for t in schedule(way, 24) if t.job == "multiply" and t.program == 0}
    return (done[20] - done[10]) // 10


LEFT, TOP, ROW, TALL, UNIT = 4, 26, 52, 26, 390 / 46000
ROWS = {"memory": "memory: loads and stores", "transform": "scaling q and k", "multiply": "products"}
KINDS = {"load": "pale-blue", "store": "sky", "transform": "orange", "multiply": "pink"}
SAYS = {"load": "its tiles come in", "transform": "q and k are scaled", "multiply": "products", "store": "o goes out"}
MOMENT = 1000  # clocks between two pictures


def _bars(tasks: list[Task]) -> str:
    pieces = []
    for job, chunk, program, start, stop in tasks:
        x, y, width = LEFT + UNIT * start, TOP + ROW * list(ROWS).index(_row(job)), UNIT * (stop - start)
        of = f" of program {program + 1}" if max(t.program for t in tasks) else ""
        words = f"Chunk {chunk + 1}{of}, {SAYS[job]}: clocks {start:,} to {stop:,}."
        pieces.append(part(words, bar(x, y, width, TALL, KINDS[job], chunk + 1)))
    return "".join(pieces)


def _frames(way: str) -> list[Frame]:
    """A frame for each moment, until all is done: finished work in full colours, later work pale."""
    tasks, frames, bottom = schedule(way), [], TOP + ROW * (len(ROWS) - 1) + TALL
    end, bars = max(t.stop for t in tasks), _bars(tasks)
    ground = tracks(ROWS.values(), LEFT, TOP, ROW, UNIT * end, TALL)
    for t in range(0, end + MOMENT, MOMENT):
        busy = sum(task.start <= t < task.stop for task in tasks)
        last = {task.program: 0 for task in tasks} | {
            task.program: task.chunk + 1 for task in tasks if task.job == "store" and task.stop <= t
        }
        words = f"{way}, after {t:,} clocks: {busy} of 3 units at work, {min(last.values())} of {CHUNKS} chunks done."
        if t >= end:
            used = sum(task.stop - task.start for task in tasks if _row(task.job) == "memory") / end
            words = f"{way}: {CHUNKS} chunks after {end:,} clocks, memory at work {used:.0%} of them. "
            words += f"In the long run a chunk every {period(way):,} clocks."
        x, name = LEFT + UNIT * min(t, end), f"jobs-{WAYS.index(way)}-{t}"
        frames.append(Frame(played(ground, bars, name, x, TOP - 4, bottom + 4), words))
    return frames


def three_jobs() -> Explorable:
    """A chunk's jobs on one multiprocessor, one after the other or side by side."""
    frames = [_frames(way) for way in WAYS]
    most = max(map(len, frames))
    return Explorable(
        title="Five chunks on one multiprocessor",
        notice="A model of peak rates. The numbers are chunks. In one program every unit waits for the other two. With "
        "three jobs and room for two chunks the memory never pauses, and the work of the other units hides behind it.",
        alt="Three rows over time, for memory, scaling and products, with numbered bars for the chunks. Bars to the "
        "right of the line that marks the present are pale.",
        controls=(Choice("Way", WAYS), Slider("Clocks", [f"{MOMENT * n:,}" for n in range(most)])),
        frames=frames,
        height=TOP + ROW * len(ROWS) - 18,
        start=(2, 20),
        legend=(
            Key("pale-blue edge", "loads q, k, v, g"),
            Key("sky edge", "stores o"),
            Key("orange edge", "scales q and k"),
            Key("pink edge", "multiplies"),
            Key("pale-grey", "nothing to do"),
            Key("line-vermilion", "now", "line"),
        ),
        question=Question(
            "Three groups of warps work at once, with room for two chunks. What decides how long a chunk takes?",
            "the busiest unit",
            {
                "all jobs together": "That holds for one program. Here three chunks are under way at once.",
                "the busiest unit": "Loads and stores share the memory. It never pauses, and the other units do.",
                "the products": "Products take less time than loads, and hide behind them.",
            },
            seen=(2, len(frames[2]) - 1),
            before=(0, 0),
        ),
    )
