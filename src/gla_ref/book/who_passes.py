"""The tables of appendix "Who passes": other libraries' functions under the check kit's cases.

Every function of ``gla_ref.compat.libraries.FUNCTIONS`` has a row for each of its records, and one that says so if
it has none.
"""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from .. import results
from ..compat.libraries import FUNCTIONS

__all__ = ["NO_NUMBER", "Row", "claimed", "claims", "details", "matrix", "refusals", "rows", "verdicts", "wrong"]

NO_NUMBER = {"raises", "none", "type", "shape", "dtype", "device"}  # kinds of failures without a number to judge
REASONS = {  # what a function refuses, by a part of its message
    "No available kernel": "K or V no multiple of 8",
    "K >= 16": "K or V below 16",
    "requires even K and V": "K or V odd",
    "shared memory": "wide heads",
    "Backward pass": "any gradient",
    "scale must be positive": "a scale of 0 or less",
    "'NoneType' object": "gradients where the state needs none",
}
SIZES = "K or V"  # how a reason begins that today's claims exclude; a record may be older than the claim

QUANTITY = re.compile(r"o|S|d\w+|[kv]_cache")  # what may be missing of a case that was judged


class Row(NamedTuple):
    """A record of one function, or the lack of one."""

    function: str  # a key of FUNCTIONS
    name: str  # the function and how it was called
    data: dict | None  # the file of the record
    record: dict | None

    @property
    def refused(self) -> dict[str, set[str]]:
        """Cases without a number to judge, by the reason."""
        found = {}
        for f in (self.record or {}).get("failures", ()):
            if f["kind"] in NO_NUMBER:
                reason = next((why for part, why in REASONS.items() if part in f["message"]), "for another reason")
                found.setdefault(reason, set()).add(f["case"])
        return found

    @property
    def unclaimed(self) -> set[str]:
        """Cases with sizes that the library does not claim, as we found out by them."""
        return set().union(*(cases for reason, cases in self.refused.items() if reason.startswith(SIZES)))

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Claimed cases that were tried, gave a wrong number, and were refused; None without a report."""
        r = self.record
        if r is None or r["ok"] is None:
            return None
        wrong = {f["case"] for f in r["failures"] if f["kind"] not in NO_NUMBER}
        refused = set().union(*self.refused.values()) - wrong
        return r["cases"] - len(self.unclaimed), len(wrong), len(refused - self.unclaimed)

    @property
    def worst(self) -> float:
        """The largest error of a wrong number, in budgets; infinity for one that is not finite, 0 without any."""
        wrong = [f for f in (self.record or {}).get("failures", ()) if f["kind"] not in NO_NUMBER]
        return max((_budgets(f) for f in wrong), default=0.0)

    @property
    def right(self) -> int:
        """How many claimed cases are right, without those left out because the function lacks an argument."""
        tried, wrong, refused = self.counts
        left = {name: n for name, n in self.record["not_covered"].items() if not QUANTITY.fullmatch(name)}
        return tried - wrong - refused - sum(left.values())

    @property
    def verdict(self) -> str:
        """Wrong (a number over its budget or not finite), refuses, right or none, the first that the record has."""
        if self.counts is None or 2 * len(self.unclaimed) > self.record["cases"]:
            return "none"
        return "wrong" if self.worst else "refuses" if self.counts[2] else "right"


def _budgets(failure: dict) -> float:
    """A wrong number's error in budgets; infinity where there is none, because it is not finite."""
    if failure["kind"] == "not finite" or not failure.get("error"):
        return float("inf")
    return float(failure["error"]) / failure["budget"]


def rows() -> list[Row]:
    """Return the rows in the order of FUNCTIONS: at least one for each, and for its forward pass if it has no other."""
    listed, loaded = [], [results.load(gpu, kind="checks") for gpu in ("nvidia", "cpu")]
    for name in FUNCTIONS:
        here = [
            Row(name, _named(r), data, r)
            for data in loaded
            for r in (data["checks"] if data else ())
            if r["subject"].split()[0] == name and claimed(name, r["dtype"])
        ]
        names = {row.name for row in here}
        here = [row for row in here if row.name.replace(" ", " forward ", 1) not in names]
        listed += sorted(here, key=lambda row: (row.data["environment"]["gpu"] == "CPU", row.name))
        listed += [] if here else [Row(name, name, None, None)]
    return listed


def _named(record: dict) -> str:
    """A check's name; one whose gradients are not covered is of the forward pass."""
    forward = " forward" * ("dq" in (record.get("not_covered") or ()) and "forward" not in record["subject"])
    return f"{record['subject']}{forward} {record['dtype']}" + " full" * (record["level"] == "full")


def claimed(name: str, dtype: str) -> bool:
    """Return whether the library claims tokens of a dtype for a function; a record may be older than the claim."""
    supports = FUNCTIONS[name].supports
    return callable(supports) or dtype in supports.get("dtypes", (dtype,))


def verdicts(rows: list[Row]) -> dict[str, list[str]]:
    """Return the rows' names by verdict; a name is a function and a dtype, which two machines may have judged."""
    by = {kind: {} for kind in ("wrong", "refuses", "right", "none")}
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
        return f'<span class="refused" title="{refused} of {tried} cases are refused">! {refused} of {tried}</span>'
    return '<span class="right" title="right in every case that it takes">✓</span>'


def matrix(rows: list[Row]) -> str:
    """Return, as HTML, a row for each record: its cases by group, and its seconds.

    A record that lacks counts by group, or refuses most cases, or some for their sizes, has counts in words instead.
    """
    groups = list(dict.fromkeys(g for row in rows if row.record for g in row.record.get("groups", ())))
    lines = []
    for row in rows:
        record = row.record or {}
        if row.counts and record.get("groups") and not row.unclaimed and 2 * row.counts[2] < row.counts[0]:
            counts = dict(record["groups"])
            if counts["scales"]["tried"] == record["not_covered"].get("scale"):
                counts["scales"] = None
            cells = "".join(f"<td>{_cell(counts.get(g))}</td>" for g in groups)
        else:
            kind = {"wrong": "wrong", "refuses": "refused"}.get(row.verdict, "")
            cells = f'<td colspan="{len(groups) or 1}"><span class="{kind}">{escape(_summary(row))}</span></td>'
        compiling = f" ({record['compiling_s']:.0f})" if record.get("compiling_s") else ""
        cells += f"<td>{record['seconds']:.0f}{compiling}</td>" if record else "<td></td>"
        name = re.sub(r"([._])", r"\1<wbr>", escape(row.name))  # a phone may break it
        lines.append(f'<tr><th style="min-width: 8rem">{name}</th><td>{escape(_on(row))}</td>{cells}</tr>')
    return _table(("check", "on", *(groups or ["verdict"]), "seconds (compiling)"), lines)


def _summary(row: Row) -> str:
    """A record's verdict in words, or why it has none."""
    if row.record is None:
        return "no verdict: not run"
    if row.counts is None:
        why = row.record["message"].split(":")[0]
        done = re.findall(r"^(\d+) (\d+)\b", row.record["message"], re.M)[-1:]
        return f"no verdict: {why}" + "".join(f"; {n} of {total} cases begun" for n, total in done)
    tried, wrong, refused = row.counts
    reasons = ", ".join(reason for reason in row.refused if not reason.startswith(SIZES))
    counted = {
        "right": row.right,
        "wrong": wrong,
        f"refused ({reasons})": refused,
        "left out": tried - row.right - wrong - refused,
        "not claimed": len(row.unclaimed),
    }
    said = ", ".join(f"{n} {name}" for name, n in counted.items() if n or name == "right")
    return "no verdict: " * (row.verdict == "none") + f"of {row.record['cases']} cases {said}"


def _on(row: Row) -> str:
    """The machine of a record."""
    return row.data["environment"]["gpu"].removeprefix("NVIDIA ") if row.data else ""


def claims() -> str:
    """Return, folded, the functions by claim and by the claim's place."""
    by = {}
    for name, it in FUNCTIONS.items():
        by.setdefault((it.claim, it.source), []).append(name)
    lines = [
        "<tr>" + "".join(f"<td>{escape(x)}</td>" for x in (claim, ", ".join(names), source)) + "</tr>"
        for (claim, source), names in by.items()
    ]
    table = _table(("claims", "functions", "according to"), lines)
    return f"<details><summary>The claims of {len(FUNCTIONS)} functions</summary>{table}</details>"


def _table(head: tuple[str, ...], lines: list[str]) -> str:
    heads = "".join(f"<th>{escape(x)}</th>" for x in head)
    return f'<table class="table"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def refusals(rows: list[Row]) -> str:
    """Return, as HTML, a line for each thing that functions refuse although they claim it, and which these are."""
    by = {}
    for row in rows:
        for reason, cases in row.refused.items() if row.verdict != "none" else ():
            if not reason.startswith(SIZES):
                said = f"<code>{escape(row.name)}</code> ({len(cases)} of {row.counts[0]} cases)"
                by.setdefault(reason, []).append(said)
    return "<ul>" + "".join(f"<li>{escape(reason)}: {', '.join(who)}</li>" for reason, who in by.items()) + "</ul>"


def wrong(rows: list[Row]) -> str:
    """Return, as HTML, the checks with wrong numbers, the worst first, and the worst case of each."""
    lines, by = [], {}
    for row in sorted((row for row in rows if row.worst), key=lambda row: -row.worst):
        by.setdefault(row.name, []).append(row)
    for row, *others in by.values():
        worst = max((f for f in row.record["failures"] if f["kind"] not in NO_NUMBER), key=_budgets)
        off = (f"{float(worst['error']):.1e}", f"{row.worst:.1f}") if row.worst < float("inf") else ("not finite", "")
        on, count = " and ".join(map(_on, (row, *others))), f"{row.counts[1]} of {row.counts[0]}"
        where = worst["case"], worst["quantity"], off[0], f"{worst['budget']:.1e}", off[1]
        lines.append("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in (row.name, on, count, *where)) + "</tr>")
    head = "check", "on", "cases", "worst case", "quantity", "error", "budget", "error / budget"
    return _table(head, lines) if lines else ""


def _lines(record: dict) -> str:
    """Lines that run a shrunken case with a wrong number; without one, the worst of the kit's own.

    The shrunken case of a record fails as the record's first failure does, which may be a refusal.
    """
    if record["smallest"] and record["failures"][0]["kind"] not in NO_NUMBER:
        return record["smallest"]
    worst = max((f for f in record["failures"] if f["kind"] not in NO_NUMBER), key=_budgets)
    return re.sub(r"only='[^']*'", lambda _: f"only={worst['case']!r}", record["reproduction"])


def _input(lines: str) -> str:
    """The input of such lines: sizes, gates and scale of a shrunken case, or the name of one of the kit's own."""
    x = dict(re.findall(r"(\w+)='?([^',)]+)", lines))
    if "T" not in x:
        return f"the kit's “{x['only']}”"
    x["gates"] = x.get("gate", "zero").replace("zero", "")
    return ", ".join(f"{n} {x[n]}" for n in ("T", "K", "V", "gates", "scale") if x.get(n))


def details(rows: list[Row]) -> str:
    """Return, folded, lines that show a wrong number of each function, in the order of :func:`wrong`."""
    by = {}
    for row in sorted((row for row in rows if row.worst), key=lambda row: -row.worst):
        by.setdefault(row.function, row)
    parts = []
    for row in by.values():
        cases = ", ".join(dict.fromkeys(f["case"] for f in row.record["failures"] if f["kind"] not in NO_NUMBER))
        lines = _lines(row.record)
        parts.append(f"<details><summary><b>{escape(row.name)}</b>: {escape(_input(lines))}</summary>")
        parts.append(f"<p>Wrong in: {escape(cases)}.</p><pre>{escape(lines)}</pre></details>")
    return "".join(parts)
