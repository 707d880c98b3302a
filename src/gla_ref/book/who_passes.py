"""The tables of appendix "Who passes so far": other libraries' functions under the check kit's cases.

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

__all__ = ["NO_NUMBER", "Row", "claimed", "claims", "details", "matrix", "refusals", "rows", "verdicts", "wrong"]

NO_NUMBER = {"raises", "none", "type", "shape", "dtype", "device"}  # kinds of failures without a number to judge
REASONS = {  # what a function refuses, by a part of its message
    "No available kernel": "K or V no multiple of 8",
    "K >= 16": "K or V below 16",
    "shared memory": "wide heads",
    "upgrade Triton": "gradients",
    "Backward pass": "gradients",
    "scale must be positive": "a scale of 0 or less",
    "'NoneType' object": "gradients where the state needs none",
    "size of tensor": "value heads that share a key head",
}


QUANTITY = re.compile(r"o|S|d\w+|[kv]_cache")  # what may be missing of a case that was judged


class Row(NamedTuple):
    """A record of one function, or the lack of one."""

    function: str  # a key of FUNCTIONS
    name: str  # the function and how it was called
    data: dict | None  # the file of the record
    record: dict | None

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Cases that were tried, gave a wrong number, and were refused; None without a verdict."""
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
    def right(self) -> int:
        """How many cases are right, without those that were left out because the function lacks an argument."""
        tried, wrong, refused = self.counts
        left = {name: n for name, n in self.record["not_covered"].items() if not QUANTITY.fullmatch(name)}
        return tried - wrong - refused - sum(left.values())

    @property
    def verdict(self) -> str:
        """Wrong (a number over its budget or not finite), refuses, right or none, the first that the record has."""
        if self.counts is None:
            return "none"
        return "wrong" if self.worst else "refuses" if self.counts[2] else "right"


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
            if r["subject"].split()[0] == name and claimed(name, r["dtype"])
        ]
        listed += sorted(here, key=lambda row: (row.data["environment"]["gpu"] == "CPU", row.name))
        listed += [] if here else [Row(name, name, None, None)]
    return listed


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
    """Return, as HTML, a row for each record: its cases by group, its seconds, its commit.

    A record without counts by group, or with refusals in most cases, has its counts in words instead.
    """
    groups = list(dict.fromkeys(g for row in rows if row.record for g in row.record.get("groups", ())))
    lines = []
    for row in rows:
        record = row.record or {}
        if row.counts and record.get("groups") and 2 * row.counts[2] < row.counts[0]:
            counts = dict(record["groups"])
            if counts["scales"]["tried"] == record["not_covered"].get("scale"):
                counts["scales"] = None
            cells = "".join(f"<td>{_cell(counts.get(g))}</td>" for g in groups)
        else:
            kind = {"wrong": "wrong", "refuses": "refused"}.get(row.verdict, "")
            cells = f'<td colspan="{len(groups) or 1}"><span class="{kind}">{escape(_summary(row))}</span></td>'
        compiling = f" ({record['compiling_s']:.0f})" if record.get("compiling_s") else ""
        spent = (f"{record['seconds']:.0f}{compiling}", record["commit"][:7]) if record else ("", "")
        cells += "".join(f"<td>{x}</td>" for x in spent)
        name = re.sub(r"([._])", r"\1<wbr>", escape(row.name))  # a phone may break it
        lines.append(f'<tr><th style="min-width: 8rem">{name}</th><td>{escape(_on(row))}</td>{cells}</tr>')
    return _table(("check", "on", *(groups or ["verdict"]), "seconds (compiling)", "commit"), lines)


def _summary(row: Row) -> str:
    """A record's verdict in words, or why it has none."""
    if row.record is None:
        only = FUNCTIONS[row.function].claim.split(", ")
        return "no verdict: not run" + (" in float32, the only dtype that it claims" if "float32" in only else "")
    if row.counts is None:
        why = row.record["message"].split(":")[0]
        done = re.findall(r"^(\d+) (\d+)\b", row.record["message"], re.M)[-1:]
        return f"no verdict: {why}" + "".join(f", {n} of {total} cases run" for n, total in done)
    tried, wrong, refused = row.counts
    messages = [f["message"] or "" for f in row.record["failures"] if f["kind"] in NO_NUMBER]
    reasons = dict.fromkeys(why for message in messages for part, why in REASONS.items() if part in message)
    counted = {
        "right": row.right,
        "wrong": wrong,
        f"refused ({', '.join(reasons)})": refused,
        "left out": tried - row.right - wrong - refused,
    }
    return f"of {tried} cases: " + ", ".join(f"{n} {name}" for name, n in counted.items() if n or name == "right")


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
    """Return, as HTML, what the functions refuse, in how many cases, and their messages."""
    lines = []
    for row in rows:
        said = {
            (f["case"], _line(f["message"] or ""))
            for f in (row.record or {}).get("failures", ())
            if f["kind"] in NO_NUMBER
        }
        for line, n in Counter(line for _, line in said).most_common():
            reason = next((why for part, why in REASONS.items() if part in line), "")
            cells = row.name, reason, f"{n} of {row.counts[0]}", row.right, line
            lines.append("<tr>" + "".join(f"<td>{escape(str(x))}</td>" for x in cells) + "</tr>")
    return _table(("function", "refuses", "cases", "right", "its message"), lines) if lines else ""


def wrong(rows: list[Row]) -> str:
    """Return, as HTML, the checks with wrong numbers, the worst first, and the smallest input that shows it."""
    lines, by = [], {}
    for row in sorted((row for row in rows if row.worst), key=lambda row: -row.worst):
        by.setdefault(row.name, []).append(row)
    for row, *others in by.values():
        failures = [f for f in row.record["failures"] if f["kind"] not in NO_NUMBER]
        worst = max(failures, key=_budgets)
        off = (f"{float(worst['error']):.1e}", f"{row.worst:.1f}") if row.worst < float("inf") else ("not finite", "")
        on, count = " and ".join(map(_on, (row, *others))), f"{row.counts[1]} of {row.counts[0]}"
        cells = row.name, on, count, _input(row.record), worst["quantity"], off[0], f"{worst['budget']:.1e}", off[1]
        lines.append("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in cells) + "</tr>")
    head = "check", "on", "wrong", "smallest wrong input", "worst", "error", "budget", "ratio"
    return _table(head, lines) if lines else ""


def _input(record: dict) -> str:
    """The input of `_lines`: sizes, gates and scale of a shrunken case, or the name of one of the kit's own."""
    x = dict(re.findall(r"(\w+)='?([^',)]+)", _lines(record)[0]))
    if "T" not in x:
        return f"the kit's “{x['only']}”"
    x["gates"] = "" if x["gate"] == "zero" else x["gate"]
    return ", ".join(f"{n} {x[n]}" for n in ("T", "K", "V", "gates", "scale") if x.get(n))


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
    """Return, folded, lines that show the worst wrong number of each function, in the order of :func:`wrong`."""
    by = {}
    for row in sorted((row for row in rows if row.worst), key=lambda row: -row.worst):
        by.setdefault(row.function, row)
    parts = []
    for row in by.values():
        named = "; ".join(d["mistake"] for d in row.record["diagnosis"])
        cases = ", ".join(dict.fromkeys(f["case"] for f in row.record["failures"] if f["kind"] not in NO_NUMBER))
        if row.worst < float("inf"):
            named = named.replace(": not a number after a reset", ", which lose digits after a strong gate")
        lines, note = _lines(row.record)
        parts.append(f"<details><summary><b>{escape(row.name)}</b> ({escape(_on(row))})</summary>")
        parts.append(f"<p>The kit's explanation: {escape(named)}.</p>" if named else "")
        parts.append(f"<p>Wrong in: {escape(cases)}.</p>{note}<pre>{escape(lines)}</pre></details>")
    return "".join(parts)
