"""The tables of appendix "Who passes": other libraries' functions under the check kit's cases.

Every function of ``gla_ref.compat.libraries.FUNCTIONS`` has a row for each of its records, and one that says so if
it has none.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import NamedTuple

from .. import results
from ..compat.libraries import FUNCTIONS

__all__ = ["NEAR", "NO_NUMBER", "Row", "claims", "details", "matrix", "refusals", "rows", "ungrouped", "verdicts"]

NO_NUMBER = {"raises", "none", "type", "shape", "dtype", "device"}  # kinds of failures without a number to judge
NEAR = 2.0  # a wrong number within so many budgets is counted apart


class Row(NamedTuple):
    """A record of one function, or the lack of one."""

    function: str  # a key of FUNCTIONS
    name: str  # the function and how it was called
    data: dict | None  # the file of the record
    record: dict | None

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Cases that were tried, gave a wrong number, and gave no number; None without a verdict."""
        r = self.record
        if r is None or r["ok"] is None:
            return None
        if groups := r.get("groups"):
            return tuple(sum(g[n] for g in groups.values()) for n in ("tried", "wrong", "refused"))
        wrong = {f["case"] for f in r["failures"] if f["kind"] not in NO_NUMBER}
        return r["cases"], len(wrong), len({f["case"] for f in r["failures"]} - wrong)

    @property
    def worst(self) -> float:
        """The largest error of a wrong number, in budgets; infinity for one that is not finite, 0 without any."""
        wrong = [f for f in (self.record or {}).get("failures", ()) if f["kind"] not in NO_NUMBER]
        return max((_budgets(f) for f in wrong), default=0.0)

    @property
    def verdict(self) -> str:
        """The gravest thing in the record: wrong, near (a wrong number within NEAR), refuses, right, none."""
        if self.counts is None:
            return "none"
        if self.worst:
            return "wrong" if self.worst >= NEAR else "near"
        return "refuses" if self.counts[2] else "right"

    @property
    def note(self) -> str:
        """A sentence where the record has no count for each group of cases."""
        r = self.record
        if r is None:
            return "no record yet"
        if r["ok"] is None:
            return f"no verdict: stopped after {r['seconds']:.0f} s"
        tried, wrong, refused = self.counts
        return "" if r.get("groups") else f"{tried} cases: {wrong} wrong, {refused} refused"


def _budgets(failure: dict) -> float:
    """A wrong number's error in budgets; infinity where there is none, because it is not finite."""
    if failure["kind"] == "not finite" or not failure.get("error"):
        return float("inf")
    return float(failure["error"]) / failure["budget"]


def rows() -> list[Row]:
    """Return the rows in the order of FUNCTIONS: at least one for each."""
    listed = []
    for name in FUNCTIONS:
        here = [
            Row(name, f"{r['subject']} {r['dtype']}" + (" full" if r["level"] == "full" else ""), data, r)
            for data in (results.load(gpu, kind="checks") for gpu in ("nvidia", "cpu"))
            for r in (data["checks"] if data else ())
            if r["subject"].split()[0] == name and _claimed(name, r["dtype"])
        ]
        listed += sorted(here, key=lambda row: (row.data["environment"]["gpu"] == "CPU", row.name))
        listed += [] if here else [Row(name, name, None, None)]
    return listed


def _claimed(name: str, dtype: str) -> bool:
    """Whether the library claims tokens of a dtype; a record may be older than the claim."""
    supports = FUNCTIONS[name].supports
    return callable(supports) or dtype in supports.get("dtypes", (dtype,))


def verdicts(rows: list[Row]) -> dict[str, list[str]]:
    """Return the rows' names by verdict; a name is a function and a dtype, which two machines may have judged."""
    by = {kind: {} for kind in ("wrong", "near", "refuses", "right", "none")}
    for row in rows:
        by[row.verdict][row.name] = None
    return {kind: [*names] for kind, names in by.items()}


def _cell(counts: dict | None) -> str:
    """A group's cases, in a few characters."""
    if counts is None:
        return '<span title="not claimed">·</span>'
    tried, wrong, refused = (counts[n] for n in ("tried", "wrong", "refused"))
    if wrong:
        return f'<b class="wrong" title="{wrong} of {tried} cases give a wrong number">✗ {wrong} of {tried}</b>'
    if refused:
        return f'<span class="refused" title="{refused} of {tried} cases give no number">! {refused} of {tried}</span>'
    return f'<span class="right" title="{tried} cases are right">✓</span>'


def matrix(rows: list[Row]) -> str:
    """Return the table as HTML: a row for each record that counts its cases by group, a column for each group."""
    grouped = [row for row in rows if not row.note]
    groups = list(dict.fromkeys(g for row in grouped for g in row.record["groups"]))
    lines = [
        f"<tr><th>{escape(row.name)}</th><td>{escape(_on(row))}</td>"
        + "".join(f"<td>{_cell(row.record['groups'].get(g))}</td>" for g in groups)
        + "</tr>"
        for row in grouped
    ]
    return _table(("function", "on", *groups), lines) if lines else ""


def ungrouped(rows: list[Row]) -> str:
    """Return, as HTML, a line for each row that the table leaves out, and why."""
    lines = [f"<tr><td>{escape(row.name)}</td><td>{_on(row)}</td><td>{row.note}</td></tr>" for row in rows if row.note]
    return _table(("function", "on", "what its record says"), lines) if lines else ""


def _on(row: Row) -> str:
    """The machine of a record, and the Triton if the record names it: that of its file is the last run's."""
    if row.data is None:
        return ""
    triton = row.record.get("triton")
    return row.data["environment"]["gpu"].removeprefix("NVIDIA ") + (f", Triton {triton}" if triton else "")


def claims() -> str:
    """Return, folded, the claim of each function and the place of the claim."""
    lines = [
        "<tr>" + "".join(f"<td>{escape(x)}</td>" for x in (name, it.mechanism, it.claim, it.source)) + "</tr>"
        for name, it in FUNCTIONS.items()
    ]
    table = _table(("function", "mechanism", "claims", "according to"), lines)
    return f"<details><summary>The claims of {len(lines)} functions</summary>{table}</details>"


def _table(head: tuple[str, ...], lines: list[str]) -> str:
    heads = "".join(f"<th>{escape(x)}</th>" for x in head)
    return f'<table class="table"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _line(message: str) -> str:
    """The line of an error message that says what was wrong, without the place where it was raised."""
    lines = re.sub(r"^where [^:]*: ", "", message).strip().splitlines() or [""]
    line = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return re.sub(r": at [\d:]+", ":", re.sub(r" \([^()]*, line \d+[^()]*\)$", "", line))[:160]


def refusals(rows: list[Row]) -> str:
    """Return, as HTML, what the functions raised or returned instead of a number, and in how many cases."""
    lines = []
    for row in rows:
        said = {
            (f["case"], _line(f["message"] or ""))
            for f in (row.record or {}).get("failures", ())
            if f["kind"] in NO_NUMBER
        }
        for line, n in Counter(line for _, line in said).most_common():
            lines.append(f"<tr><td>{escape(row.name)}</td><td>{n}</td><td>{escape(line)}</td></tr>")
    return _table(("function", "cases", "error, or what was returned"), lines) if lines else ""


def _wrong(row: Row) -> str:
    """How often a row is wrong, and its worst number."""
    first = max((f for f in row.record["failures"] if f["kind"] not in NO_NUMBER), key=_budgets)
    tried, wrong, _ = row.counts
    what = f"{first['quantity']} of <i>{escape(first['case'])}</i> is "
    off = "not finite" if row.worst == float("inf") else f"off by {float(first['error']):.1e}, {row.worst:.1f} budgets"
    return f"<b>{escape(row.name)}</b> ({escape(_on(row))}): wrong in {wrong} of {tried} cases; {what}{off}"


def _lines(record: dict) -> tuple[str, str]:
    """Lines that run a case with a wrong number, and a sentence where that case is not a shrunken one.

    The shrunken case of a record fails as the record's first failure does, which may be a refusal.
    """
    if record["smallest"] and record["failures"][0]["kind"] not in NO_NUMBER:
        return record["smallest"], ""
    worst = max((f for f in record["failures"] if f["kind"] not in NO_NUMBER), key=_budgets)
    lines = re.sub(r"only='[^']*'", lambda _: f"only={worst['case']!r}", record["reproduction"])
    return lines, "<p>This record has no shrunken case of it; the lines run one of the kit's own.</p>"


def details(rows: list[Row]) -> str:
    """Return, folded, the wrong numbers of each function and lines that show one: not finite first, then by budgets."""
    by = {}
    for row in sorted((row for row in rows if row.worst), key=lambda row: -row.worst):
        by.setdefault(row.function, []).append(row)
    parts = []
    for first, *others in by.values():
        named = "; ".join(d["mistake"] for d in first.record["diagnosis"])
        if first.worst < float("inf"):
            named = named.replace(": not a number after a reset", ", which lose digits after a strong gate")
        lines, note = _lines(first.record)
        parts.append(f"<details><summary>{_wrong(first)}</summary>")
        parts.extend(f"<p>Also {_wrong(row)}.</p>" for row in others)
        parts.append(f"<p>The kit's explanation: {escape(named)}.</p>" if named else "")
        parts.append(f"{note}<pre>{escape(lines)}</pre></details>")
    return "".join(parts)
