"""The tables of appendix "Who passes": other libraries' functions under the check kit's cases.

Every function of :data:`gla_ref.compat.libraries.FUNCTIONS` has a row for each of its records, and one that says so if
it has none.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from .. import results
from ..compat.libraries import FUNCTIONS

__all__ = ["NO_NUMBER", "Row", "claims", "details", "matrix", "rows", "verdicts"]

NO_NUMBER = {"raises", "none", "type", "shape", "dtype", "device"}  # kinds of failures without a number to judge


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
    def note(self) -> str:
        """A sentence where the record has no count for each group of cases."""
        r = self.record
        if r is None:
            return "no record yet"
        if r["ok"] is None:
            return f"no verdict: stopped after {r['seconds']:.0f} s"
        tried, wrong, refused = self.counts
        return "" if r.get("groups") else f"{tried} cases: {wrong} wrong, {refused} refused (not kept by group)"


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
    """Return the functions by the gravest verdict of their rows: wrong, refuses, right, none."""
    by = {"wrong": [], "refuses": [], "right": [], "none": []}
    for name in FUNCTIONS:
        counts = [row.counts for row in rows if row.function == name and row.counts]
        wrong, refused = (any(c[n] for c in counts) for n in (1, 2))
        by["none" if not counts else "wrong" if wrong else "refuses" if refused else "right"].append(name)
    return by


def _cell(counts: dict | None) -> str:
    """A group's cases, in a few characters."""
    if counts is None:
        return '<span title="not claimed">·</span>'
    tried, wrong, refused = (counts[n] for n in ("tried", "wrong", "refused"))
    if wrong:
        return f'<b class="wrong" title="{wrong} of {tried} cases give a wrong number">✗ {wrong}</b>'
    if refused:
        return f'<span class="refused" title="{refused} of {tried} cases give no number">! {refused}</span>'
    return f'<span class="right" title="{tried} cases are right">✓</span>'


def matrix(rows: list[Row]) -> str:
    """Return the table as HTML: a row for each record, a column for each group of cases."""
    groups = list(dict.fromkeys(g for row in rows if row.record for g in row.record.get("groups", ())))
    lines = []
    for row in rows:
        on = row.data["environment"]["gpu"].removeprefix("NVIDIA ") if row.data else ""
        line = f"<tr><th>{escape(row.name)}</th><td>{escape(on)}</td>"
        if row.note:
            line += f'<td colspan="{len(groups)}"><i>{escape(row.note)}</i></td>'
        else:
            line += "".join(f"<td>{_cell(row.record['groups'].get(g))}</td>" for g in groups)
        lines.append(f"{line}</tr>")
    return _table(("function", "on", *groups), lines)


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


def details(rows: list[Row]) -> str:
    """Return, folded, the first wrong number of each row, and the lines that show it."""
    parts = []
    for row in rows:
        first = next((f for f in (row.record or {}).get("failures", ()) if f["kind"] not in NO_NUMBER), None)
        if first is None:
            continue
        r, (tried, wrong, _) = row.record, row.counts
        what = f"{first['quantity']} of <i>{escape(first['case'])}</i>"
        if first["kind"] == "not finite":
            what += ": not finite"
        elif first["error"] is not None:
            what += f": error {float(first['error']):.1e}, budget {first['budget']:.1e}"
        elif first["message"]:
            what += f": {escape(first['message'].splitlines()[0])}"
        named = "; ".join(d["mistake"] for d in r["diagnosis"])
        parts.append(f"<details><summary><b>{escape(row.name)}</b> ({escape(row.data['environment']['gpu'])}): ")
        parts.append(f"{wrong} of {tried} cases; first {what}</summary>")
        parts.append(f"<p>The kit's explanation: {escape(named)}.</p>" if named else "")
        parts.append(f"<pre>{escape(r['smallest'] or r['reproduction'])}</pre></details>")
    return "".join(parts)
