"""A Hopper kernel's jobs over time: one program, two of them, or three groups of warps at once (chapter 22).

This is a model of peak rates, not a measurement: each unit moves, exponentiates or multiplies a chunk's numbers at its
peak speed. The model leaves out other arithmetic and waits for latencies.
"""

from .._roles import Step, Task, end, play
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._timeline import Timeline

__all__ = ["JOBS", "RATES", "WAYS", "period", "schedule", "three_jobs", "work"]

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


def schedule(way: str, n: int = CHUNKS) -> list:
    """All tasks of `n` chunks."""
    programs = 2 if way == WAYS[1] else 1
    clocks, chunks = work(programs=programs), range(n)
    if way in WAYS[:2]:  # a program does all jobs of a chunk, then those of the next
        return play([[Step(job, i, p) for i in chunks for job in JOBS] for p in range(programs)], clocks, unit=unit)
    stages = 1 if way == WAYS[3] else 2

    def waits(i: int) -> dict[str, list[Step]]:
        return {
            "load": [Step("multiply", i - stages)],  # its stage must be free
            "transform": [Step("load", i)],
            "multiply": [Step("transform", i), Step("store", i - 1)],  # the tile of o must be free
            "store": [Step("multiply", i)],
        }

    return play([[Step(job, i) for i in chunks] for job in JOBS], clocks, waits, unit)


def unit(job: str) -> str:
    """The unit that does a job: loads and stores share the memory."""
    return "memory" if job in ("load", "store") else job


def period(way: str) -> int:
    """Clocks from one chunk to the next in a long text."""
    done = {t.chunk: t.stop for t in schedule(way, 24) if t.job == "multiply" and t.program == 0}
    return (done[20] - done[10]) // 10


LINES = Timeline(
    {"memory": "memory: loads and stores", "transform": "scaling q and k", "multiply": "products"},
    {"load": "pale-blue", "store": "sky", "transform": "orange", "multiply": "pink"},
    390 / 46000,
    unit,
)
SAYS = {"load": "its tiles come in", "transform": "q and k are scaled", "multiply": "products", "store": "o goes out"}
MOMENT = 1000  # clocks between two pictures


def _frames(way: str) -> list[Frame]:
    """A frame for each moment, until all is done: finished work in full colours, later work pale."""
    tasks, frames = schedule(way), []
    of = " of program {}" if way == WAYS[1] else ""

    def say(t: Task) -> str:
        return f"Chunk {t.chunk + 1}{of.format(t.program + 1)}, {SAYS[t.job]}: clocks {t.start:,} to {t.stop:,}."

    ground, bars, last = LINES.tracks(end(tasks)), LINES.bars(tasks, say), end(tasks)
    for t in range(0, last + MOMENT, MOMENT):
        busy = sum(task.start <= t < task.stop for task in tasks)
        stored = [task.program for task in tasks if task.job == "store" and task.stop <= t]
        done = min(stored.count(program) for program in {task.program for task in tasks})
        words = f"{way}, after {t:,} clocks: {busy} of 3 units at work, {done} of {CHUNKS} chunks done."
        if t >= last:
            used = sum(task.stop - task.start for task in tasks if unit(task.job) == "memory") / last
            words = f"{way}: {CHUNKS} chunks after {last:,} clocks, memory at work {used:.0%} of them. "
            words += f"In the long run a chunk every {period(way):,} clocks."
        frames.append(Frame(LINES.at(min(t, last), ground, bars, f"jobs-{WAYS.index(way)}-{t}"), words))
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
        height=LINES.bottom + 8,
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
