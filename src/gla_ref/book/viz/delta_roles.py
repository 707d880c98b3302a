"""The delta rule on Hopper over time: sequential, fused (inverses a chunk ahead), two kernels (chapter 23).

This is a model: each job lasts as long as in a measurement in which solver, walker or both only arrive at their
barriers; the loader always loads. The model leaves out that roles at work slow each other down.
"""

from ... import results
from ...kernels.launch.hardware import CLASSES
from .._roles import Step, Task, end, play
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._timeline import Timeline

__all__ = ["ALONE", "FIRST", "HEADS", "MULTIPROCESSORS", "WALK", "WAYS", "columns", "delta_roles", "period", "schedule"]

WAYS = ("sequential", "fused", "two kernels")
HEADS = (32, 64, 128)  # value heads of all sequences
MULTIPROCESSORS, STAGES, CHUNKS = CLASSES["sm_90"].multiprocessors, 2, 6
WALK = {32: 1.2, 64: 1.75}  # us per chunk of the library's `walk`, by its columns: the plan's estimates


def _alone() -> dict[str, float]:
    """Microseconds per chunk of each role of the fused kernel, loads always included, on an H200 ("parts").

    Without that record the times are those of an early draft (lab/delta_rules.md).
    """
    taken = results.parts(results.load("h200", kind="parts"), B=8)
    alone = {"load": "the work of both", "solve": "the walker's work", "walk": "the solver's work"}
    if taken.keys() >= set(alone.values()):
        return {role: round(taken[part]["us_a_chunk"], 1) for role, part in alone.items()}
    return {"load": 1.4, "solve": 2.9, "walk": 2.3}


def _first() -> float:
    """Microseconds of one multiprocessor that `solve` of the two kernels needs for a chunk, by the record "waits"."""
    data = results.load("h200", kind="waits")
    for r in data["waits"] if data else []:
        if (r["kernel"], r["B"], r["HV"]) == ("ahead", 8, 16):
            chunks = r["B"] * r["HV"] * r["T"] / 64
            return round(1e3 * (r["ms_call"] - r["ms"]) * MULTIPROCESSORS / chunks, 1)
    return 2.5


ALONE, FIRST = _alone(), _first()


def columns(heads: int) -> int:
    """Columns of a walker of the two kernels, as the plan chooses them for a walk in one go."""
    return 32 if 4 * heads <= MULTIPROCESSORS else 64


def lasts(way: str, heads: int) -> dict[str, float]:
    """Return the duration of each job of one chunk of a head, in us.

    If all inverses come first, every multiprocessor makes some of them, and a head's parts walk at the same time only
    if each part has a multiprocessor.
    """
    if way != WAYS[2]:
        return ALONE
    wide = columns(heads)
    waves = -(-128 // wide * heads // MULTIPROCESSORS)
    load = min(ALONE["load"], WALK[wide])  # `walk` was measured with its loads, which hide behind it
    return {"load": load, "solve": FIRST * heads / MULTIPROCESSORS, "walk": WALK[wide] * waves}


def schedule(way: str, heads: int, n: int = CHUNKS) -> list:
    """All tasks of n chunks of one head, in the order of their chunks; of two kernels first those of the first."""
    apart = way == WAYS[2]

    def waits(c: int) -> dict[str, list[Step]]:
        return {
            "load": [Step("walk", c - STAGES), *[Step("solve", n - 1)] * apart],  # its stage must be free
            "solve": [Step("load", c)] * (not apart),
            "walk": [Step("load", c), Step("solve", c)],
        }

    jobs = [["load"], ["solve", "walk"]] if way == WAYS[0] else [["load"], ["solve"], ["walk"]]
    roles = [[Step(job, c) for c in range(n) for job in own] for own in jobs]
    return sorted(play(roles, lasts(way, heads), waits), key=lambda t: (apart and t.job != "solve", t.chunk))


def period(way: str, heads: int) -> float:
    """The time of a chunk in a long text, in us."""
    return (end(schedule(way, heads, 48)) - end(schedule(way, heads, 24))) / 24


LINES = Timeline(
    {
        "load": "copy engine: q, k, v",
        "solve": "solve: inverses, and all else without a state",
        "walk": "walk: from state to state",
    },
    {"load": "pale-blue", "solve": "orange", "walk": "pink"},
    390 / max(end(schedule(way, heads)) for way in WAYS for heads in HEADS),
)
SAYS = {
    "load": "its tiles come in",
    "solve": "it is solved (its inverse, and all else that needs no state)",
    "walk": "its walk from state to state",
}
MOMENT = 1.0  # us between two pictures


def _say(t: Task) -> str:
    return f"Chunk {t.chunk + 1}, {SAYS[t.job]}: from {t.start:.1f} to {t.stop:.1f} µs."


def _frames(way: str, heads: int) -> list[Frame]:
    """A frame for each moment: finished work in full colours, later work pale."""
    tasks, frames = schedule(way, heads), []
    last = end(tasks)
    ground = LINES.tracks(last) + LINES.ticks(last)
    for n in range(int(last / MOMENT) + 2):
        t = n * MOMENT
        shown = [task for task in tasks if n or task.job == "load"]  # other bars would answer the question
        done = sum(task.job == "walk" and task.stop <= t for task in tasks)
        words = f"{way}, {heads} value heads, after {t:.0f} µs: {done} of {CHUNKS} chunks done."
        if t >= last:
            words = f"{way}, {heads} value heads: {CHUNKS} chunks after {last:.1f} µs. "
            words += f"In a long text a chunk lasts {period(way, heads):.1f} µs."
        name = f"roles-{WAYS.index(way)}-{heads}-{n}"
        frames.append(Frame(LINES.at(min(t, last), ground, LINES.bars(shown, _say), name), words))
    return frames


def delta_roles() -> Explorable:
    """The chunks of one value head, by three schedules."""
    frames = [[_frames(way, heads) for heads in HEADS] for way in WAYS]
    most = max(len(row) for by_heads in frames for row in by_heads)
    return Explorable(
        title="Six chunks of one value head",
        notice="A model: each job lasts as long as on an H200 with the other one switched off (128 heads), a solve "
        f"{ALONE['solve']} µs, a walk {ALONE['walk']}, a load {ALONE['load']} (from one load to the next). Numbers are "
        "chunks, rows are jobs. There is room for two chunks: chunk 3 is loaded when chunk 1 has been walked. In the "
        "sequential schedule the same warps do the jobs of the last two rows. The number of value heads matters to the "
        "two kernels only: all multiprocessors solve first, so more heads mean a longer wait. There a solve takes "
        f"{FIRST} µs of one multiprocessor, and a walk, as the plan estimates it, {WALK[32]} µs with few heads or "
        f"{WALK[64]} with many.",
        alt="Three rows over time, for loads, solves and walks, with numbered bars for the chunks and marks every "
        "10 microseconds. Bars to the right of the line of the present are pale; at first only loads are there.",
        controls=(
            Choice("Way", WAYS),
            Choice("Value heads", HEADS),
            Slider("Time", [f"{MOMENT * n:.0f} µs" for n in range(most)]),
        ),
        frames=frames,
        height=LINES.bottom + 22,
        start=(1, 0, 12),
        legend=(
            Key("pale-blue edge", "loads a chunk"),
            Key("orange edge", "solves: the inverse, and all else without a state"),
            Key("pink edge", "walks from state to state"),
            Key("pale-grey", "nothing to do"),
            Key("line-vermilion", "now", "line"),
        ),
        question=Question(
            "What does the inverse of chunk 5 have to wait for?",
            "the keys of chunk 5",
            {
                "the state after chunk 4": "The state comes in later, where the inverse is multiplied by what tokens "
                "found there.",
                "the inverse of chunk 4": "Tokens of a chunk correct each other. The state has all that earlier chunks "
                "wrote.",
                "the keys of chunk 5": "Keys, strengths and gates of its own tokens make it. So it can be made before "
                "any state is known.",
            },
            seen=(2, 0, len(frames[2][0]) - 1),
            before=(1, 0, 0),
        ),
    )
