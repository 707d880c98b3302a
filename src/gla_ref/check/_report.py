"""What was found, for a reader at 80 columns, for a program (JSON) and for a notebook (chapter 9)."""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ._budgets import TOKENS, Problem
from ._cases import SUB, C

SHADES = " .:-=+*#%@"  # within budget, then one more for every factor of ten


@dataclass
class Row:
    """One quantity of one case; `status` is passed, failed or not covered."""

    case: str
    quantity: str
    status: str
    kind: str = "error"
    error: float | None = None
    budget: float | None = None
    message: str = ""
    where: dict[str, int] | None = None
    map: str = ""

    @property
    def ratio(self) -> float:
        return 0.0 if self.error is None else self.error / self.budget


def locate(p: Problem, name: str, x: Tensor) -> tuple[dict[str, int], str]:
    """The first wrong element in the order of time, and a line of shades: the excess along time (or K)."""
    excess = (x.double() - p.exact[name]).abs() / p.band(name)
    excess = excess.nan_to_num(nan=math.inf, posinf=math.inf)
    if name in TOKENS:
        t = int((excess.amax([d for d in range(excess.ndim) if d != 1]) > 1).nonzero()[0])
        b, h, *channel = (int(i) for i in (excess[:, t] > 1).nonzero()[0])
        where = {"t": t, "chunk": t // C, "sub-chunk": t % C // SUB, "batch": b, "head": h}
        where |= {"channel": channel[0]} if channel else {}
        line = excess.transpose(0, 1).flatten(1).amax(1)
    else:
        n, h, i, j = (int(i) for i in (excess > 1).nonzero()[0])
        where, line = {"sequence": n, "head": h, "row": i, "column": j}, excess.amax((0, 1, 3))
    width = -(-len(line) // 60)
    levels = [max(0.0, part.max().item()) for part in line.split(width)]
    shade = [
        0 if y <= 1 else 9 if y == math.inf else min(9, 1 + int(math.log10(y) * 2)) for y in levels
    ]
    return where, "".join(SHADES[i] for i in shade)


@dataclass
class Report:
    """The result of :func:`gla_ref.check.kernel`: rows, and the mistakes that explain the failures.

    Attributes:
        settings: what was checked and how, as given.
        rows: one :class:`Row` a case and quantity.
        diagnosis: {"mistake", "line", "distance"} of each match, best first.
        reproduction: at the full level, lines of Python that run the smallest case that fails.
    """

    settings: dict
    rows: list[Row] = field(default_factory=list)
    diagnosis: list[dict] = field(default_factory=list)
    reproduction: str = ""

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.status == "failed"]

    @property
    def ok(self) -> bool:
        """Nothing that was covered failed, and something was covered."""
        return not self.failures and any(row.status == "passed" for row in self.rows)

    @property
    def not_covered(self) -> dict[str, int]:
        """The number of cases that did not cover something, for each quantity or missing feature."""
        left: dict[str, int] = {}
        for row in self.rows:
            if row.status == "not covered":
                what = row.message or row.quantity
                left[what] = left.get(what, 0) + 1
        return left

    def raise_if_failed(self) -> None:
        """AssertionError with the report as its message, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_json(self) -> dict:
        """The report as plain values.

        Returns:
            {"schema": 1, "ok": bool, "settings": {name: value}, "rows": [{"case", "quantity",
            "status", "kind", "error", "budget", "message", "where", "map"}, ...], "diagnosis":
            [{"mistake", "line", "distance"}, ...], "not_covered": {what: cases}, "reproduction": str};
            an error that is not finite is the string "inf".
        """
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = "inf"
        return {
            "schema": 1,
            "ok": self.ok,
            "settings": self.settings,
            "rows": rows,
            "diagnosis": self.diagnosis,
            "not_covered": self.not_covered,
            "reproduction": self.reproduction,
        }

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG" if self.failures else "NOTHING COVERED"
        s = self.settings
        head = f"{s['mechanism']} on {s['device']} in {s['dtype']}, {s['level']}, seed {s['seed']}: {verdict}"
        lines = [head]
        if any(r.error is not None for r in self.rows):
            lines += [
                "",
                f"{'quantity':10}{'cases':>6}{'failed':>8}{'error':>10}{'budget':>10}  worst case",
            ]
        for name in dict.fromkeys(r.quantity for r in self.rows if r.error is not None):
            rows = [r for r in self.rows if r.quantity == name and r.error is not None]
            worst = max(rows, key=lambda r: r.ratio)
            failed = sum(r.status == "failed" for r in rows)
            lines.append(
                f"{name:10}{len(rows):6}{failed:8}{worst.error:10.1e}{worst.budget:10.1e}  {worst.case[:34]}"
            )
        calls: dict[tuple, list[Row]] = {}
        for row in self.failures:
            if row.error is None:
                calls.setdefault((row.kind, row.message), []).append(row)
        for (kind, message), rows in calls.items():
            found = ", ".join(dict.fromkeys(r.quantity for r in rows))
            n = len({r.case for r in rows})
            lines += ["", f"{kind}: {found} ({n} cases, first {rows[0].case})"]
            lines += textwrap.wrap(
                message[:400], 76, initial_indent="    ", subsequent_indent="    "
            )
        first = {r.quantity: r for r in reversed(self.failures) if r.where and r.case != "length 1"}
        first = first or {r.quantity: r for r in reversed(self.failures) if r.where}
        for row in sorted(first.values(), key=self.rows.index)[:3]:
            where = ", ".join(f"{n} {i}" for n, i in row.where.items())
            along = "time" if row.quantity in TOKENS else "rows"
            lines += [
                "",
                f"first wrong {row.quantity} of case {row.case}:",
                f"    {where}",
                f"    {along} |{row.map}|",
            ]
        if self.diagnosis:
            lines += [
                "",
                "It behaves as if:" if len(self.diagnosis) == 1 else "It behaves as one of:",
            ]
            for match in self.diagnosis:
                lines += [f"  * {match['mistake']}", f"      line: {match['line']}"]
        elif first:
            lines += ["", "No named mistake explains all of it."]
        if self.reproduction:
            lines += ["", "The smallest case that fails, to run:", ""]
            lines.append(textwrap.indent(self.reproduction, "    "))
        if self.not_covered:
            left = "; ".join(f"{n} ({i})" for n, i in self.not_covered.items())
            lines += ["", *textwrap.wrap(f"Not covered (cases): {left}", 80)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def judge(p: Problem, name: str, x: Tensor | None) -> Row:
    if x is None:
        return Row(p.case.name, name, "not covered", "missing")
    error, budget = p.judge(name, x)
    row = Row(p.case.name, name, "passed", "error", error, budget)
    if not error <= budget:
        row.status = "failed"
        row.where, row.map = locate(p, name, x)
        if not torch.isfinite(x).all():
            row.kind, row.message = "not finite", "NaN or infinity"
    return row
