"""What was found, for a reader, a program (JSON) and a notebook (appendix "Check your kernel")."""

from __future__ import annotations

import math
import re
import textwrap
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ._budgets import Problem
from ._cases import SUB, C, Case
from ._common import MOST, by_gates, common, reach
from ._html import SHADES, render
from ._mechanisms import MECHANISMS

SCALE = f"a space is within budget, each of {SHADES[1:]} half a power of ten further"
TIME = {"T", "T0"}  # of tokens, and of those in a cache


@dataclass
class Row:
    """One quantity of one case; `status` is passed, failed, waived (with the reason for it) or not covered."""

    case: str
    quantity: str
    status: str
    kind: str = "error"
    error: float | None = None
    budget: float | None = None
    message: str = ""
    waived: str = ""
    where: dict[str, int] | None = None
    only: str = ""
    map: str = ""
    grid: dict | None = None

    @property
    def ratio(self) -> float:
        if self.error is None:
            return 0.0
        return math.inf if math.isnan(self.error) else self.error / self.budget


def shaded(excess: Tensor, down: int, along: int) -> list[str]:
    """A plane of errors over their budgets in shades, the worst of each block, `down` x `along` of them at most."""
    for dim, most in enumerate((down, along)):
        parts = excess.split(-(-excess.shape[dim] // most), dim)
        excess = torch.stack([part.amax(dim) for part in parts], dim)
    levels = (excess.clamp_min(1).log10() * 2).clamp_max(8).int() + (excess > 1)
    return ["".join(SHADES[i] for i in line) for line in levels.tolist()]


def affected(wrong: Tensor, axes: list[str], ends: tuple[int, ...]) -> str:
    """Which chunks, heads, ... hold all that is wrong; an axis along which everything has some of it is left out."""
    found = []

    def tell(axis: str, here: list[int], size: int) -> None:
        if len(here) == size:
            return
        listed = ", ".join(map(str, here[:MOST])) + ", ..." * (len(here) > MOST)
        if len(here) == here[-1] - here[0] + 1 > 2:
            listed = f"{here[0]} to {here[-1]}"
        plural = "" if len(here) == 1 else "es" if axis == "batch" else "s"
        found.append(f"{axis}{plural} {listed} of {size}")

    for dim, axis in enumerate(axes):
        here, size = wrong.transpose(0, dim).flatten(1).any(1).nonzero().flatten().tolist(), wrong.shape[dim]
        if axis == "chunk":
            starts = [(t - ends[bisect_right(ends, t) - 1]) // C for t in range(size)]
            some = [n for n, (a, b) in enumerate(pairwise(ends)) if a < b]  # nothing is wrong where no tokens are
            inside = sorted({bisect_right(ends, t) - 1 for t in here})
            if len(ends) > 2 and inside != some:
                tell("sequence", inside, len(ends) - 1)
            here, size = sorted({starts[t] for t in here}), max(starts) + 1
        tell(axis, here, size)
    return "; ".join(found)


def locate(p: Problem, name: str, x: Tensor) -> dict:
    """Where a quantity is wrong: first in the order of time, in which parts, along a line of time (or K), in a plane.

    In a packed sequence chunks are counted from its own first token.
    """
    excess = (x.double() - p.exact[name]).abs() / p.band(name)
    excess = excess.nan_to_num(nan=math.inf, posinf=math.inf)
    if TIME & {*p.kind.axes(name)}:
        t = int((excess.amax([d for d in range(excess.ndim) if d != 1]) > 1).nonzero()[0])
        b, h, *channel = (int(i) for i in (excess[:, t] > 1).nonzero()[0])
        where, own, batch = {"t": t}, t, {"batch": b}
        if p.case.ends:
            n = bisect_right(p.case.ends, t) - 1
            own, batch = t - p.case.ends[n], {}
            where |= {"sequence": n, "token": own}
        where |= {"chunk": own // C, "sub-chunk": own % C // SUB, **batch, "head": h}
        where |= {"channel": channel[0]} if channel else {}
        axes, names = ["t", "channel" if channel else "head"], ["batch", "chunk", "head", "channel"]
        plane, line = excess.amax((0, 2) if channel else 0).T, excess.transpose(0, 1).flatten(1)
    else:
        n, h, i, j = (int(i) for i in (excess > 1).nonzero()[0])
        where, axes = {"sequence": n, "head": h, "row": i, "column": j}, ["column", "row"]
        plane, line, names = excess.amax((0, 1)), excess.movedim(2, 0).flatten(1), [*where]
    grid = {"axes": axes, "size": [*plane.shape[::-1]], "cells": shaded(plane, 32, 64)}
    only = affected(excess > 1, names[: excess.ndim], p.case.ends or (0,))
    return {"where": where, "only": only, "map": shaded(line.amax(1)[None], 1, 60)[0], "grid": grid}


@dataclass
class Report:
    """The result of :func:`gla_ref.check.kernel`: rows, and the mistakes that explain the failures.

    Attributes:
        settings: what was checked and how, as given; "defaults" are the arguments of the function that it was
            never given.
        cases: what was tried, by name.
        rows: one :class:`Row` a case and quantity.
        diagnosis: {"mistake", "line", "distance"} of each match, best first.
        ladder: how many cases the level has, with those that were made for the kernel's sizes.
        made: how many of them were made for what the kernel claims, others than the level's own.
        left: names of those that the claim leaves out.
        skipped: names of those that the caller left out.
        alone: failing cases that pass in a process of their own.
        smallest: the smallest case found that fails, where nothing explains all of it; and
        measured: sentences on it, each of two calls that differ in one thing.
        cut: a sentence, if the search for places and bounds ended early.
        reproduction: at the full level, lines of Python that run the smallest case that fails.
        rerun: how a reader runs one case again, with `{}` for its name.
    """

    settings: dict
    cases: dict[str, Case] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    diagnosis: list[dict] = field(default_factory=list)
    ladder: int = 0
    made: int = 0
    left: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    smallest: Case | None = None
    measured: list[str] = field(default_factory=list)
    cut: str = ""
    reproduction: str = ""
    rerun: str = '--only "{}"'

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.status == "failed"]

    @property
    def ok(self) -> bool:
        """Nothing that was covered failed, and something was covered; everything, if that was asked for."""
        lacking = self.settings.get("fail_on_not_covered") and self.not_covered
        return not self.failures and not lacking and any(row.status == "passed" for row in self.rows)

    @property
    def covered(self) -> list[str]:
        """The names of the cases of which something was held against what is right."""
        return list(dict.fromkeys(row.case for row in self.rows if row.status != "not covered"))

    @property
    def claim(self) -> str:
        """What the kernel claims, and what that made of the ladder; empty if it claims all."""
        if not self.settings.get("supports"):
            return ""
        left = f"; left out: {', '.join(self.left)}" if self.left else ""
        return f"Claimed: {self.settings['supports']}. {self.made} cases made for that{left}."

    @property
    def waived(self) -> dict[tuple[str, str], list[Row]]:
        """Failures that do not count, by quantity and reason."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.status == "waived":
                found.setdefault((row.quantity, row.waived), []).append(row)
        return found

    @property
    def exceptions(self) -> list[str]:
        """Sentences on what was claimed, skipped and waived."""
        said = [self.claim] if self.claim else []
        if self.skipped:
            said.append(f"Skipped: {', '.join(self.skipped)}.")
        for (quantity, reason), rows in self.waived.items():
            worst = max(rows, key=lambda row: row.ratio)
            much = f", worst {worst.ratio:.3g} budgets in {worst.case}" if worst.error is not None else ""
            said.append(f"Waived: {quantity} in {len(rows)} case{'s' * (len(rows) != 1)}{much}: {reason}")
        return said

    @property
    def failing(self) -> list[str]:
        """The names of the cases in which something failed."""
        return list(dict.fromkeys(row.case for row in self.failures))

    @property
    def extent(self) -> str:
        """In how many of the cases that were covered something failed, and in which."""
        failing = self.failing
        cases = len(self.covered)
        if len(failing) == cases > 1:
            return f"Failing in all {cases} cases"
        plural = "s" * (cases != 1)
        return f"Failing in {len(failing)} of {cases} case{plural}: {', '.join(failing)}"

    @property
    def common(self) -> list[str]:
        """What all failing cases share, in sentences, if several fail."""
        failing = set(self.failing)
        passing = {row.case for row in self.rows if row.status == "passed"} - failing
        if len(failing) < 2:
            return []
        sides = [[self.cases[n] for n in self.cases if n in x] for x in (failing, passing)]
        wrong = [*dict.fromkeys(row.quantity for row in self.failures if row.error is not None)]
        kind = MECHANISMS.get(self.settings["mechanism"])
        gates = by_gates(*sides, wrong) if kind and "g" in kind.tensors and not self.alone else ""
        return common(*sides) + [gates] * bool(gates)

    @property
    def company(self) -> str:
        """That some of it fails after other cases only."""
        if not self.alone:
            return ""
        passes = "passes" if len(self.alone) == 1 else "pass"
        return f"{', '.join(self.alone)} {passes} alone, in a new process: the kernel kept state from an earlier case"

    @property
    def tried(self) -> str:
        """How large the cases were, and what no case gave the function."""
        covered = self.covered
        if not covered:
            return ""
        left = self.settings.get("defaults")
        return f"Tried {reach([self.cases[n] for n in self.cases if n in covered])}" + (
            f"; {', '.join(left)} not given." if left else "."
        )

    @property
    def title(self) -> str:
        s = self.settings
        return f"{s['mechanism']} on {s['device']} in {s['dtype']}, {s['level']}, seed {s['seed']}"

    @property
    def verdict(self) -> str:
        if self.failures:
            return "WRONG"
        if not any(row.status == "passed" for row in self.rows):
            return "NOTHING COVERED"
        return ("right, but for waivers" if self.waived else "right") if self.ok else "NOT ALL COVERED"

    @property
    def head(self) -> str:
        """The verdict, and how much of the ladder it is of; the first line of the report, and its last."""
        cases = f"{len(self.covered)} of {self.ladder} cases tried"
        return f"{self.title}: {self.verdict} ({cases})"

    @property
    def findings(self) -> dict[tuple[str, str], list[Row]]:
        """Failures of calls rather than of numbers, by kind and message; messages that differ in numbers are one."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.failures:
            if row.error is None:
                found.setdefault((row.kind, re.sub(r"\d+", "0", row.message)), []).append(row)
        return {(kind, rows[0].message): rows for (kind, _), rows in found.items()}

    def failed(self, name: str) -> int:
        """The number of cases in which a quantity failed, by its numbers or by how it was called."""
        return len({row.case for row in self.failures if row.quantity == name})

    def differing(self, name: str) -> str:
        """In how many cases a quantity differs between equal calls, in words; empty if in none."""
        n = len({row.case for row in self.failures if row.quantity == name and row.kind == "differs"})
        return f"equal calls differ in {n} case{'s' * (n != 1)}" if n else ""

    @property
    def first_wrong(self) -> list[Row]:
        """Of each of the first three wrong quantities one case, if possible one in which a part of it is right.

        A single token says least, and comes last.
        """
        wrong = [row for row in self.failures if row.where]
        telling = sorted(wrong, key=lambda r: (" " not in r.map, r.case == "length 1"))
        names = [n for n in dict.fromkeys(row.quantity for row in self.rows) if n in {row.quantity for row in wrong}]
        return [next(row for row in telling if row.quantity == n) for n in names[:3]]

    @property
    def undiagnosed(self) -> str:
        """What to say of wrong numbers that no mistake explains; empty where there are none."""
        if self.diagnosis or self.alone or not self.first_wrong:
            return ""
        if len(self.cases) == 1 < self.ladder:  # to run it again would say the same
            return "No named mistake explains all of it. The other cases may tell more: run them, too."
        return "No named mistake explains all of it. Run next: " + self.next_step

    @property
    def next_step(self) -> str:
        """How to rerun only the smallest of the most telling cases; empty if nothing is wrong."""
        if not self.failing:
            return ""
        wrong = {row.case for row in self.first_wrong} or {*self.failing}
        least = min((self.cases[n] for n in self.cases if n in wrong), key=lambda c: c.B * c.T * c.H * c.K * c.V)
        return self.rerun.format(least.name)

    @property
    def unclaimed(self) -> str:
        """Advice on calls that raise, if the kernel claims to take every call; else empty."""
        if self.settings.get("supports") or not any(row.kind == "raises" for row in self.failures):
            return ""
        return (
            "Calls raise. If the kernel is not made for them, say which it takes: --K 64 --V 64 --no-packed, in Python "
            'supports={"K": 64, "V": 64, "packed": False}. Or let it raise gla_ref.check.NotClaimed.'
        )

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
            {"schema": 4, "ok": bool, "verdict": str, "settings": {name: value}, "ladder": int, "made": int, "left":
            [case, ...], "skipped": [case, ...], "cases": {name: {field: value}}, "rows": [{"case", "quantity",
            "status", "kind", "error", "budget", "message", "waived", "where", "only", "map", "grid"}, ...],
            "common": [str, ...], "diagnosis": [{"mistake", "line", "distance"}, ...], "next": str, "not_covered":
            {what: cases}, "alone": [case, ...], "measured": [str, ...], "smallest": str, "reproduction": str};
            an error that is not finite is the string "inf" or "nan". `map` and `grid["cells"]` hold a character for
            the worst of some elements: a space within budget, then one of `.:-=+*#%@` for every half power of ten.
        """
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = str(row["error"])
        return {
            "schema": 4,
            "ok": self.ok,
            "verdict": self.verdict,
            "settings": self.settings,
            "ladder": self.ladder,
            "made": self.made,
            "left": self.left,
            "skipped": self.skipped,
            "cases": {name: asdict(case) for name, case in self.cases.items()},
            "rows": rows,
            "common": self.common,
            "diagnosis": self.diagnosis,
            "next": self.next_step,
            "not_covered": self.not_covered,
            "alone": self.alone,
            "measured": self.measured,
            "smallest": str(self.smallest) if self.smallest else "",
            "reproduction": self.reproduction,
        }

    def __str__(self) -> str:
        lines = [self.head]
        for line in self.exceptions:
            lines += textwrap.wrap(line, 80, subsequent_indent="    ", max_lines=5)
        if any(r.error is not None for r in self.rows):
            lines += ["", f"{'quantity':10}{'cases':>6}{'failed':>8}{'error':>10}{'budget':>10}  worst case"]
        for name in dict.fromkeys(r.quantity for r in self.rows if r.error is not None):
            rows = [r for r in self.rows if r.quantity == name and r.error is not None]
            worst = max(rows, key=lambda r: r.ratio)
            failed, said = self.failed(name), self.differing(name) or worst.case[:34]
            lines.append(f"{name:10}{len(rows):6}{failed:8}{worst.error:10.2e}{worst.budget:10.2e}  {said}")
        if self.failing:
            whole = self.extent
            for name in self.failing:  # not broken in two where it has spaces
                whole = whole.replace(name, name.replace(" ", "\0"))
            text = textwrap.fill(whole, 80, subsequent_indent="    ", max_lines=5)
            lines += ["", text.replace("\0", " ")]
        for line in (*self.common, self.company, self.unclaimed):
            lines += textwrap.wrap(line, 80, subsequent_indent="    ")
        for (kind, message), rows in self.findings.items():
            found = ", ".join(dict.fromkeys(r.quantity for r in rows))
            n = len({r.case for r in rows})
            head = f"{kind}: {found} ({n} case{'s' * (n != 1)}, first {rows[0].case})"
            lines += ["", *textwrap.wrap(head, 80, subsequent_indent="    ")]
            for text in (message[:400], str(self.cases[rows[0].case])):
                lines += textwrap.wrap(text, 76, initial_indent="    ", subsequent_indent="    ")
        if self.diagnosis:
            lines += ["", "It behaves as if:" if len(self.diagnosis) == 1 else "It behaves as one of:"]
            for match in self.diagnosis:
                for start, text in (("  * ", match["mistake"]), ("      line: ", match["line"])):
                    lines += textwrap.wrap(text, 80, initial_indent=start, subsequent_indent="      ")
        if self.measured:
            lines += ["", "Called with other sizes and options, it is"]
            for text in self.measured:
                lines += textwrap.wrap(text, 80, initial_indent="  * ", subsequent_indent="    ")
            head = f"all else as in {self.smallest}"
            lines += textwrap.wrap(head, 80, initial_indent="    ", subsequent_indent="    ")
        if self.cut:
            lines += ["", *textwrap.wrap(self.cut, 80)]
        if self.undiagnosed:
            lines += ["", *textwrap.wrap(self.undiagnosed, 80)]
        shown = ""
        for row in self.first_wrong:
            where = ", ".join(f"{n} {i}" for n, i in row.where.items())
            along = "time" if "t" in row.where else "rows"
            what = [] if row.case == shown else textwrap.wrap(str(self.cases[row.case]), 76)
            shown = row.case
            lines += [
                "",
                f"first wrong {row.quantity} of case {row.case}{row.message and f' ({row.message})'}:",
                *(f"    {line}" for line in what),
                *textwrap.wrap(where, 76, initial_indent="    ", subsequent_indent="    "),
                *textwrap.wrap(row.only and f"only in {row.only}", 76, initial_indent="    ", subsequent_indent="    "),
                f"    {along} |{row.map}|",
            ]
        if self.first_wrong:
            lines += [f"    ({SCALE})"]
        if self.reproduction:
            lines += ["", "The smallest case that fails, to run:", ""]
            lines.append(textwrap.indent(self.reproduction, "    "))
        if self.not_covered:
            left = "; ".join(f"{n} ({i})" for n, i in self.not_covered.items())
            lines += ["", *textwrap.wrap(f"Not covered (cases): {left}", 80)]
        if self.tried:
            lines += ["", *textwrap.wrap(self.tried, 80)]
        lines += ["", self.head]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return render(self)


def judge(p: Problem, name: str, x: Tensor | None) -> Row:
    if x is None:
        return Row(p.case.name, name, "not covered", "missing" if p.exact[name].any() else "zero")
    error, budget = p.judge(name, x)
    row = Row(p.case.name, name, "passed", "error", error, budget)
    if not error <= budget:
        row.status = "failed"
        place = locate(p, name, x)
        row.where, row.only, row.map, row.grid = (place[n] for n in ("where", "only", "map", "grid"))
        if not torch.isfinite(x).all():
            row.kind, nan = "not finite", bool(x.isnan().any())
            row.error, row.message = (math.nan, "NaN") if nan else (math.inf, "infinity")
    return row
