"""A picture of roles over time: a row for each unit, a bar for each task, and the line of the present (chapter 22)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .._roles import Task
from ._svg import cell, part, path, played, rect, text

LEFT, TOP, ROW, TALL = 4, 26, 52, 26


@dataclass(frozen=True)
class Timeline:
    """The look of a schedule.

    Attributes:
        rows: the name above the row of each unit.
        kinds: the colour of each job.
        scale: pixels for a unit of time.
        unit: the unit that does a job.
    """

    rows: Mapping[str, str]
    kinds: Mapping[str, str]
    scale: float
    unit: Callable[[str], str] = lambda job: job

    @property
    def bottom(self) -> int:
        """Where the last row ends."""
        return TOP + ROW * (len(self.rows) - 1) + TALL

    def tracks(self, end: float) -> str:
        """The empty rows until `end`, each with its name above it."""
        tops = [(name, TOP + ROW * n) for n, name in enumerate(self.rows.values())]
        words = "".join(text(LEFT, top - 10, name, "start") for name, top in tops)
        return words + "".join(rect(LEFT, top, self.scale * end, TALL, "pale-grey") for _, top in tops)

    def ticks(self, end: float) -> str:
        """Marks every 10 µs under the last row."""
        y, marks = self.bottom, [(us, LEFT + self.scale * us) for us in range(0, int(end) + 1, 10)]
        return "".join(
            path([(x, y), (x, y + 5)], "line") + text(x, y + 15, us or "0 µs", "" if us else "start") for us, x in marks
        )

    def bars(self, tasks: Sequence[Task], words: Callable[[Task], str]) -> str:
        """A bar for each task, with its chunk's number if there is room; a reader who points at it gets its words."""
        pieces = []
        for t in tasks:
            y, width = TOP + ROW * list(self.rows).index(self.unit(t.job)), self.scale * (t.stop - t.start)
            box = LEFT + self.scale * t.start, y, width, TALL, f"{self.kinds[t.job]} edge"
            pieces.append(part(words(t), cell(*box, t.chunk + 1) if width > 12 else rect(*box)))
        return "".join(pieces)

    def at(self, now: float, ground: str, bars: str, name: str) -> list[str]:
        """The pieces of the picture at a moment; `name` is its own in the page."""
        return played(ground, bars, name, LEFT + self.scale * now, TOP - 4, self.bottom + 4)
