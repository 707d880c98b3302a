"""Draw the work and waits of each role of a Hopper kernel, by clocks read inside the kernel (chapter 23).

The bars are measurements of one program on one multiprocessor, from the records of benchmarks/clocks.py.
"""

from __future__ import annotations

from ... import results
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import part, played, rect, ticks, tracks

__all__ = ["NAMES", "barrier", "spans", "waits_timeline"]

#: the schedules' names in the records and in the figure
NAMES = {"fused": "fused", "in turn": "sequential", "ahead": "two kernels: the walk"}
MOMENTS = 12  # pictures from the beginning to the end
LEFT, TOP, WIDE, ROW, TALL = 4, 26, 390, 44, 20


def spans(role: dict) -> list[tuple[str, int, float, float]]:
    """("work" or the barrier waited for, chunk, from, to) of a role's record, in order and in ns; no span is empty."""
    found, last = [], None
    for n, chunk in enumerate(role["chunks"]):
        for i, (site, (began, ended)) in enumerate(zip(role["sites"], chunk, strict=True)):
            if last is not None and began > last:  # before its first wait a role still works on the last chunk
                found.append(("work", role["first"] + n - (i == 0), last, began))
            if ended > began:
                found.append((site, role["first"] + n, began, ended))
            last = ended
    return found


def barrier(site: str) -> str:
    """A barrier's name in the chapter, without the chunk that a record adds ("done of c - 1")."""
    return site.split(" of ")[0]


def _bars(record: dict, end: float) -> str:
    """A bar for each span of each role."""
    pieces = []
    for n, role in enumerate(record["roles"]):
        y = TOP + ROW * n
        for what, chunk, began, ended in spans(role):
            words = "works" if what == "work" else f"waits at `{barrier(what)}`"
            words = f"The {role['role']}, chunk {chunk}: {words}, {(ended - began) / 1e3:.2f} µs."
            kind = "orange" if what == "work" else "pale-blue"
            bar = rect(LEFT + WIDE * began / end, y, WIDE * (ended - began) / end, TALL, f"{kind} edge")
            pieces.append(part(words, bar))
    return "".join(pieces)


def _waiting(role: dict) -> str:
    return f"{role['role']} {sum(role['waits']):.0%}"


def _frames(record: dict, end: float, rows: int) -> list[Frame]:
    """A frame for each moment: the past in full colours, the future pale."""
    roles, name = record["roles"], NAMES[record["kernel"]]
    bars, bottom, found = _bars(record, end), TOP + ROW * (rows - 1) + TALL, []
    ground = tracks((role["role"] for role in roles), LEFT, TOP, ROW, WIDE, TALL)
    ground += ticks(LEFT, bottom, WIDE * 1e3 / end, end / 1e3)
    done = max(x[3] for role in roles for x in spans(role))
    for n in range(MOMENTS + 1):
        t = done * n / MOMENTS
        x, clip = LEFT + WIDE * t / end, f"waits-{record['kernel'].replace(' ', '-')}-{record['B']}-{n}"
        pieces = played(ground, bars, clip, x, TOP - 4, bottom)
        if n == MOMENTS:
            words = f"{name}: {max(r['us_a_chunk'] for r in roles):.2f} µs per chunk. "
            words += f"Share of the time spent waiting: {', '.join(map(_waiting, roles))}."
        else:
            busy = sum(any(x[0] == "work" and x[2] <= t < x[3] for x in spans(role)) for role in roles)
            words = f"{name}, after {t / 1e3:.2f} µs: {busy} of {len(roles)} roles at work."
        found.append(Frame(pieces, words))
    return found


def waits_timeline(data: dict, B: int) -> Explorable:
    """Roles over time, for the schedules that were measured with B sequences.

    Args:
        data: records of the kind "waits" from :func:`gla_ref.results.load`.
        B: sequences of the batch.

    Raises:
        ValueError: no record has clocks at this B.
    """
    records = [r for r in data["waits"] if r["B"] == B and r["roles"] and r["kernel"] in NAMES]
    records.sort(key=lambda r: list(NAMES).index(r["kernel"]))
    if not records:
        raise ValueError(f"data: expected clocks of kernels at B = {B}, got none")
    first, rows = records[0], max(len(r["roles"]) for r in records)
    end = max(x[3] for r in records for role in r["roles"] for x in spans(role))
    shown = len(first["roles"][0]["chunks"])
    least = min(first["roles"], key=lambda role: sum(role["waits"]))
    answers = {r["role"]: f"The {r['role']} waits for {sum(r['waits']):.0%} of its time." for r in first["roles"]}
    answers[least["role"]] += " No role waits less, so its work sets the pace."
    names = [NAMES[r["kernel"]] for r in records]
    return Explorable(
        title="Roles at work and at barriers",
        notice=f"Measured by clocks inside the kernels ({results.label(data)}): {first['B']} x {first['T']} tokens, "
        f"{first['H']}/{first['HV']} heads, one program of each kernel. Work includes a role's waits for its own "
        f"instructions and products. Of each role {shown} chunks in the middle of a text are recorded, up to the last "
        "wait. The loader is chunks ahead, so its bars come first. Time 0 is the first recorded wait.",
        alt="A row for each role over time, with bars where it works and where it waits at a barrier, and marks every "
        "10 microseconds. Bars to the right of the line that marks the present are pale.",
        controls=(
            Choice("Schedule", names),
            Slider("Time", [f"{100 * n // MOMENTS} % of the record" for n in range(MOMENTS + 1)]),
        ),
        frames=[_frames(r, end, rows) for r in records],
        height=TOP + ROW * rows - 2,
        start=(0, MOMENTS // 2),
        legend=(
            Key("orange edge", "works"),
            Key("pale-blue edge", "waits at a barrier"),
            Key("pale-grey", "not recorded"),
            Key("line-vermilion", "now", "line"),
        ),
        question=Question(
            f'The schedule "{names[0]}" has {len(first["roles"])} roles. Which of them waits least at barriers?',
            least["role"],
            answers,
            seen=(0, MOMENTS),
            before=(0, 0),
        ),
    )
