"""A report as annotations of GitHub Actions: lines that it shows beside the code (appendix "Check your kernel")."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from ._report import Report


def source(fn: Callable) -> tuple[str, int] | None:
    """File, from the current folder on, and line of a function, if it lies there."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    path = Path(code.co_filename) if code else Path()
    if code is None or not path.is_relative_to(Path.cwd()):
        return None
    return str(path.relative_to(Path.cwd())), code.co_firstlineno


def escaped(text: str, also: str = "") -> str:
    for sign in "%\r\n" + also:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def line(kind: str, where: tuple[str, int] | None, title: str, message: str) -> str:
    given = {"file": where[0], "line": str(where[1])} if where else {}
    said = ",".join(f"{n}={escaped(x, ':,')}" for n, x in (given | {"title": title}).items())
    return f"::{kind} {said}::{escaped(message)}"


def annotations(report: Report, where: tuple[str, int] | None) -> list[str]:
    """An error for each of the first wrong quantities and failed calls, a warning for each waiver."""
    mechanism = report.settings["mechanism"]
    why = [f"It behaves as if: {match['mistake']}" for match in report.diagnosis[:1]]
    found = []
    for row in report.first_wrong:
        place = ", ".join(f"{n} {i}" for n, i in row.where.items())
        said = [f"error {row.error:.1e}, budget {row.budget:.1e}, first wrong at {place}"]
        said += [*why, str(report.cases[row.case]), report.head]
        found.append(line("error", where, f"{mechanism}: {row.quantity} wrong in case {row.case}", "\n".join(said)))
    for (kind, message), rows in report.findings.items():
        title = f"{mechanism}: {kind}, {rows[0].quantity} of case {rows[0].case}"
        found.append(line("error", where, title, f"{message}\n{report.cases[rows[0].case]}\n{report.head}"))
    if not report.ok and not found:
        left = "; ".join(f"{n} ({i})" for n, i in report.not_covered.items())
        found.append(line("error", where, f"{mechanism}: {report.verdict}", f"not covered (cases): {left}"))
    for (quantity, reason), rows in report.waived.items():
        title = f"{mechanism}: {quantity} waived"
        found.append(line("warning", where, title, f"{reason} ({len(rows)} of {len(report.covered)} cases)"))
    return found
