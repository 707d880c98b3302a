"""The findings on a kernel as data: rows, and the verdict that they come to (appendix "Check your kernel")."""

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field

from . import _words
from ._cases import Case

RIGHT, WAIVED = "right", "right, but for waivers"
NOT_COVERED = "not covered", "absent", "zero"  # kinds of rows that hold nothing against what is right


@dataclass
class Row:
    """One quantity of one case.

    `kind` is "error" or "not finite" where the quantity was measured, else that of a finding, or one of `NOT_COVERED`.
    `status` is passed, failed, waived (with the reason for it) or not covered. It follows from the other fields: one
    that is given, as by a row read back from a file, is not looked at.
    """

    case: str
    quantity: str
    status: str = ""
    kind: str = "not covered"
    error: float | None = None
    budget: float | None = None
    message: str = ""
    waived: str = ""
    where: dict[str, int] | None = None
    only: str = ""
    map: str = ""
    grid: dict | None = None

    def __post_init__(self):
        if self.kind in NOT_COVERED:
            self.status = "not covered"
        elif self.error is not None and self.error <= self.budget:
            self.status = "passed"
        else:
            self.status = "waived" if self.waived else "failed"

    @property
    def ratio(self) -> float:
        if self.error is None:
            return 0.0
        return math.inf if math.isnan(self.error) else self.error / self.budget


@dataclass
class Report:
    """The result of :func:`gla_ref.check.kernel`: rows, and what explains the failures. `print` shows it in words.

    Attributes:
        settings: what was checked and how, as given; "defaults" are the arguments of the function that it was
            never given.
        cases: what was tried, by name.
        rows: one :class:`Row` a case and quantity.
        common: what all failing cases share, in sentences, if several fail.
        diagnosis: {"mistake", "line", "distance"} of each match, best first.
        ladder: how many cases the level has, with those that were made for the kernel's sizes.
        made: how many of them were made for what the kernel claims, others than the level's own.
        left: names of those that the claim leaves out.
        skipped: names of those that the caller left out.
        alone: failing cases that pass in a process of their own.
        smallest: the smallest case found that fails, where nothing explains all of it; and
        measured: sentences on it, each of two calls that differ in one thing.
        cut: whether the search for bounds ended early.
        reproduction: at the full level, lines of Python that run the smallest case that fails.
        rerun: how a reader runs one case again, with `{}` for its name.
    """

    settings: dict
    cases: dict[str, Case] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    common: list[str] = field(default_factory=list)
    diagnosis: list[dict] = field(default_factory=list)
    ladder: int = 0
    made: int = 0
    left: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    smallest: Case | None = None
    measured: list[str] = field(default_factory=list)
    cut: bool = False
    reproduction: str = ""
    rerun: str = '--only "{}"'

    # sentences that are made from the data
    __str__, _repr_html_ = _words.text, _words.html
    head = property(_words.head)
    extent = property(_words.extent)
    tried = property(_words.tried)
    undiagnosed = property(_words.undiagnosed)
    unclaimed = property(_words.unclaimed)

    @property
    def verdict(self) -> str:
        """One of WRONG, NOTHING COVERED, NOT ALL COVERED (if all was to be covered), and two ways of being right."""
        if self.failures:
            return "WRONG"
        if not any(row.status == "passed" for row in self.rows):
            return "NOTHING COVERED"
        if self.settings.get("fail_on_not_covered") and self.not_covered:
            return "NOT ALL COVERED"
        return WAIVED if self.waived else RIGHT

    @property
    def ok(self) -> bool:
        """Nothing that was covered failed, and something was covered; everything, if that was asked for."""
        return self.verdict in (RIGHT, WAIVED)

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.status == "failed"]

    @property
    def covered(self) -> list[str]:
        """The names of the cases of which something was held against what is right."""
        return list(dict.fromkeys(row.case for row in self.rows if row.status != "not covered"))

    @property
    def waived(self) -> dict[tuple[str, str], list[Row]]:
        """Failures that do not count, by quantity and reason."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.status == "waived":
                groups.setdefault((row.quantity, row.waived), []).append(row)
        return groups

    @property
    def failing(self) -> list[str]:
        """The names of the cases in which something failed."""
        return list(dict.fromkeys(row.case for row in self.failures))

    @property
    def findings(self) -> dict[tuple[str, str], list[Row]]:
        """Failures of calls rather than of numbers, by kind and message; messages that differ in numbers are one."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.failures:
            if row.error is None:
                groups.setdefault((row.kind, re.sub(r"\d+", "0", row.message)), []).append(row)
        return {(kind, rows[0].message): rows for (kind, _), rows in groups.items()}

    @property
    def first_wrong(self) -> list[Row]:
        """One row for each of the first three wrong quantities, of a case in which a part of it is right, if possible.

        A single token says least, and comes last.
        """
        wrong = [row for row in self.failures if row.where]
        telling = sorted(wrong, key=lambda r: (" " not in r.map, r.case == "length 1"))
        names = [n for n in dict.fromkeys(row.quantity for row in self.rows) if n in {row.quantity for row in wrong}]
        return [next(row for row in telling if row.quantity == n) for n in names[:3]]

    @property
    def next_step(self) -> str:
        """The option that reruns only the smallest of the most telling cases; empty if nothing is wrong."""
        if not self.failing:
            return ""
        wrong = {row.case for row in self.first_wrong} or {*self.failing}
        least = min((self.cases[n] for n in self.cases if n in wrong), key=lambda c: c.volume)
        return self.rerun.format(least.name)

    @property
    def not_covered(self) -> dict[str, int]:
        """The number of cases that did not cover something, for each quantity or missing feature."""
        return dict(Counter(row.message or row.quantity for row in self.rows if row.status == "not covered"))

    def raise_if_failed(self) -> None:
        """AssertionError with the report as its message, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_json(self) -> dict:
        """The report as plain values.

        Returns:
            {"schema": 4, "ok": bool, "verdict": str, "settings": {name: value}, "ladder": int, "made": int, "left":
            [case, ...], "skipped": [case, ...], "cases": {name: {field: value}}, "rows": [{"case", "quantity",
            "status", "kind", "error", "budget", "message", "waived", "where", "only", "map", "grid"}, ...],
            "common": [str, ...], "diagnosis": [{"mistake", "line", "distance"}, ...], "next": str, "not_covered":
            {what: cases}, "alone": [case, ...], "measured": [str, ...], "smallest": str, "reproduction": str};
            an error that is not finite is the string "inf" or "nan". `map` and `grid["cells"]` hold a character for
            the worst of some elements: a space within budget, then one of `.:-=+*#%@` for every half power of ten.
        """
        data = {"schema": 4, "ok": self.ok, "verdict": self.verdict} | asdict(self)
        for row in data["rows"]:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = str(row["error"])
        del data["cut"], data["rerun"]
        smallest = str(self.smallest or "")
        return data | {"smallest": smallest, "next": self.next_step, "not_covered": self.not_covered}
