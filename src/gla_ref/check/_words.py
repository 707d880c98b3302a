"""A report in words: as text, as HTML for Jupyter, Colab and the site, as annotations ("Check your kernel").

Nothing is measured or judged here. The HTML is one piece: no script, nothing loaded; text takes the page's own colour,
in light and dark themes. Annotations are lines that GitHub Actions shows beside the code.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ._cases import C, Case
from ._where import SHADES

if TYPE_CHECKING:  # a report shows itself by these functions
    from ._report import Report, Row

CUT = "The search for bounds was cut off: its calls were spent."
SCALE = f"a space is within budget, each of {SHADES[1:]} half a power of ten further"
WIDTH, MARGIN, SIDE = 480, 80, 14  # a picture's width, its margin, and the most that a cell may measure


# -- sentences -----------------------------------------------------------------------------------
def counted(n: int) -> str:
    """So many cases."""
    return f"{n} case{'s' * (n != 1)}"


def exceptions(report: Report) -> list[str]:
    """Sentences on what was claimed, skipped and waived."""
    said = []
    if claim := report.settings.get("supports"):
        left = f"; left out: {', '.join(report.left)}" if report.left else ""
        said.append(f"Claimed: {claim}. {report.made} cases made for that{left}.")
    if report.skipped:
        said.append(f"Skipped: {', '.join(report.skipped)}.")
    for (quantity, reason), rows in report.waived.items():
        worst = max(rows, key=lambda row: row.ratio)
        much = f", worst {worst.ratio:.3g} budgets in {worst.case}" if worst.error is not None else ""
        said.append(f"Waived: {quantity} in {counted(len(rows))}{much}: {reason}")
    return said


def extent(report: Report) -> str:
    """In how many of the cases that were covered something failed, and in which."""
    failing, cases = report.failing, len(report.covered)
    if len(failing) == cases > 1:
        return f"Failing in all {cases} cases"
    return f"Failing in {len(failing)} of {counted(cases)}: {', '.join(failing)}"


def company(report: Report) -> str:
    """A sentence on cases that fail only after others; empty if there are none."""
    if not report.alone:
        return ""
    passes = "passes" if len(report.alone) == 1 else "pass"
    return f"{', '.join(report.alone)} {passes} alone, in a new process: the kernel kept state from an earlier case"


def only_when(when: str, kept: bool = False) -> str:
    """Words for a result wrong in one way of calling, right in the usual one; or, if `kept`, right the first time."""
    kept_from = "as the first such call of a new process: something is kept between calls"
    return f"wrong {when}, right {kept_from if kept else 'otherwise'}"


def reach(cases: Sequence[Case]) -> str:
    """The largest sizes among cases, and those of the largest case, where they meet."""

    def said(sizes: dict[str, int]) -> str:
        return ", ".join(f"{n} = {size}" for n, size in sizes.items())

    most = {n: max(getattr(c, n) for c in cases) for n in "BTHKV"}
    packs = [len(c.ends) - 1 for c in cases if c.ends]
    largest = max(cases, key=lambda c: c.volume)
    met = {n: getattr(largest, n) for n in "BTHKV"}
    largest_of_each = f"up to {said(most)}" + (f", {max(packs)} packed sequences" if packs else "")
    return largest_of_each if met == most else f"{largest_of_each}; at most {said(met)} in one case"


def tried(report: Report) -> str:
    """The sizes of the covered cases, and the arguments that no case gave the function."""
    covered = report.covered
    if not covered:
        return ""
    left = report.settings.get("defaults")
    missing = f"; {', '.join(left)} not given" if left else ""
    return f"Tried {reach([report.cases[n] for n in report.cases if n in covered])}{missing}."


def title(report: Report) -> str:
    s = report.settings
    return f"{s['mechanism']} on {s['device']} in {s['dtype']}, {s['level']}, seed {s['seed']}"


def head(report: Report) -> str:
    """The verdict, and how much of the ladder it is of; the first line of the report, and its last."""
    cases = f"{len(report.covered)} of {report.ladder} cases tried"
    return f"{title(report)}: {report.verdict} ({cases})"


def by_quantity(report: Report) -> Iterator[tuple[str, int, int, Row, str]]:
    """Each measured quantity: cases, failed cases, the worst row, and its case or that equal calls differ."""
    measured = [row for row in report.rows if row.error is not None]
    for name in dict.fromkeys(row.quantity for row in measured):
        rows = [row for row in measured if row.quantity == name]
        worst = max(rows, key=lambda row: row.ratio)
        wrong = [row for row in report.failures if row.quantity == name]
        n = len({row.case for row in wrong if row.kind == "differs"})
        differ = f"equal calls differ in {counted(n)}"
        yield name, len(rows), len({row.case for row in wrong}), worst, differ if n else worst.case


def called(rows: Sequence[Row]) -> str:
    """The quantities and cases of a finding."""
    names, n = ", ".join(dict.fromkeys(row.quantity for row in rows)), len({row.case for row in rows})
    return f"{names} ({counted(n)}, first {rows[0].case})"


def behaves(report: Report) -> str:
    return "It behaves as if:" if len(report.diagnosis) == 1 else "It behaves as one of:"


def place(row: Row) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in row.where.items())


def uncovered(report: Report) -> str:
    return "; ".join(f"{name} ({n})" for name, n in report.not_covered.items())


def undiagnosed(report: Report) -> str:
    """A next step for wrong numbers that no mistake explains; empty if there are none."""
    if report.diagnosis or report.alone or not report.first_wrong:
        return ""
    if len(report.cases) == 1 < report.ladder:  # to run it again would say the same
        return "No named mistake explains all of it. The other cases may tell more: run them, too."
    return "No named mistake explains all of it. Run next: " + report.next_step


def unclaimed(report: Report) -> str:
    """Advice on calls that raise, if the kernel claims to take every call; else empty."""
    if report.settings.get("supports") or not any(row.kind == "raises" for row in report.failures):
        return ""
    return (
        "Calls raise. If the kernel is not made for them, say which it takes: --K 64 --V 64 --no-packed, in Python "
        'supports={"K": 64, "V": 64, "packed": False}. Or let it raise gla_ref.check.NotClaimed.'
    )


# -- text ----------------------------------------------------------------------------------------
def wrapped(said: str, first: str = "", rest: str = "    ", width: int = 80, **more: int) -> list[str]:
    return textwrap.wrap(said, width, initial_indent=first, subsequent_indent=rest, **more)


def text(report: Report) -> str:
    lines = [head(report)]
    for line in exceptions(report):
        lines += wrapped(line, max_lines=5)
    if any(r.error is not None for r in report.rows):
        lines += ["", f"{'quantity':10}{'cases':>6}{'failed':>8}{'error':>10}{'budget':>10}  worst case"]
    for name, cases, wrong, worst, said in by_quantity(report):
        lines.append(f"{name:10}{cases:6}{wrong:8}{worst.error:10.2e}{worst.budget:10.2e}  {said[:34]}")
    if report.failing:
        whole = extent(report)
        for name in report.failing:  # not broken in two where it has spaces
            whole = whole.replace(name, name.replace(" ", "\0"))
        lines += ["", *(line.replace("\0", " ") for line in wrapped(whole, max_lines=5))]
    for line in (*report.common, company(report), unclaimed(report)):
        lines += wrapped(line)
    for (kind, message), rows in report.findings.items():
        lines += ["", *wrapped(f"{kind}: {called(rows)}")]
        for said in (message[:400], str(report.cases[rows[0].case])):
            lines += wrapped(said, "    ", width=76)
    if report.diagnosis:
        lines += ["", behaves(report)]
        for match in report.diagnosis:
            lines += wrapped(match["mistake"], "  * ", "      ")
            lines += wrapped(match["line"], "      line: ", "      ")
    if report.measured:
        lines += ["", "Called with other sizes and options, it is"]
        for sentence in report.measured:
            lines += wrapped(sentence, "  * ")
        lines += wrapped(f"all else as in {report.smallest}", "    ")
    for said in (CUT if report.cut else "", undiagnosed(report)):
        lines += ["", *textwrap.wrap(said, 80)] if said else []
    shown = ""
    for row in report.first_wrong:
        along = "time" if "t" in row.where else "rows"
        what = [] if row.case == shown else textwrap.wrap(str(report.cases[row.case]), 76)
        shown = row.case
        lines += [
            "",
            f"first wrong {row.quantity} of case {row.case}{row.message and f' ({row.message})'}:",
            *(f"    {line}" for line in what),
            *wrapped(place(row), "    ", width=76),
            *wrapped(row.only and f"only in {row.only}", "    ", width=76),
            f"    {along} |{row.map}|",
        ]
    if report.first_wrong:
        lines += [f"    ({SCALE})"]
    if report.reproduction:
        lines += ["", "The smallest case that fails, to run:", ""]
        lines.append(textwrap.indent(report.reproduction, "    "))
    for said in (report.not_covered and f"Not covered (cases): {uncovered(report)}", tried(report)):
        lines += ["", *textwrap.wrap(said, 80)] if said else []
    lines += ["", head(report)]
    return "\n".join(lines)


# -- HTML ----------------------------------------------------------------------------------------
def times(row: Row) -> str:
    """An error in budgets, in a few characters."""
    if not math.isfinite(row.error):
        return "NaN" if math.isnan(row.error) else "∞"
    ratio = row.ratio
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}" if ratio < 1e9 else f"{ratio:.0e}"


def table(report: Report) -> Iterator[str]:
    """Every quantity's worst error over its budget."""
    if all(row.error is None for row in report.rows):
        return
    yield (
        '<div class="errors" tabindex="0" role="region" aria-label="errors and budgets"><table><thead>'
        '<tr><th scope="col">quantity</th><th scope="col">cases</th>'
        '<th scope="col">failed</th><th scope="col">worst error / budget</th>'
        '<th scope="col">case</th></tr></thead><tbody>'
    )
    for name, cases, wrong, worst, said in by_quantity(report):
        yield (
            f'<tr><th scope="row">{escape(name)}</th><td>{cases}</td><td>{wrong}</td>'
            f"<td>{times(worst)}</td><td>{escape(said)}</td></tr>"
        )
    yield "</tbody></table></div>"


def opacity(level: int) -> float:
    return 0.2 + 0.8 * level / (len(SHADES) - 1)


def squares(cells: list[str], w: float, h: float) -> Iterator[str]:
    """One path a shade; neighbours in a row share a rectangle."""
    for level, shade in enumerate(SHADES[1:], 1):
        path = []
        for i, line in enumerate(cells):
            for a, b in (run.span() for run in re.finditer(f"{re.escape(shade)}+", line)):
                side = (b - a) * w
                path.append(f"M{MARGIN + a * w:.1f} {i * h:.1f}h{side:.1f}v{h:.1f}h{-side:.1f}z")
        if path:
            yield f'<path class="wrong" fill-opacity="{opacity(level):.2f}" d="{"".join(path)}"/>'


def picture(row: Row) -> str:
    """The map of a failed quantity: time along, channels down; of a state, columns along and rows down."""
    (x_name, y_name), (across, down), cells = (row.grid[n] for n in ("axes", "size", "cells"))
    n, m = len(cells[0]), len(cells)
    w, h = min(SIDE, (WIDTH - MARGIN) / n), min(SIDE, 320 / m)
    width, height = n * w, m * h
    scale_x, scale_y = w / math.ceil(across / n), h / math.ceil(down / m)
    tokens = x_name == "t"
    name = f"Where {row.quantity} of case {row.case} is wrong"
    wrong = sum(shade != " " for line in cells for shade in line)
    about = (
        f"{x_name} from 0 to {across - 1} along, {y_name} from 0 to {down - 1} down, the worst of all heads and "
        f"sequences. {wrong} of {n * m} cells hold an error beyond the budget; first at {place(row)}."
    )
    parts = [f'<rect class="ground" x="{MARGIN}" width="{width:.1f}" height="{height:.1f}"/>']
    parts += squares(cells, w, h)
    marks = range(0, across, C) if tokens else (0, across - 1)
    marks = [t for t in marks if t == 0 or t % (C * math.ceil(across / C / 9)) == 0 or not tokens]
    for t in dict.fromkeys(marks):
        x = MARGIN + t * scale_x + (0 if tokens else w / 2)
        if tokens and t:
            parts.append(f'<path class="edge" d="M{x:.1f} 0v{height:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 15:.1f}" class="middle">{t}</text>')
    parts.append(
        f'<text x="{MARGIN + width / 2:.1f}" y="{height + 31:.1f}" class="middle">'
        f"{escape(x_name)}{' (a line for each chunk of 64)' if tokens and across > C else ''}</text>"
    )
    for i in dict.fromkeys((0, down - 1)):
        y = i * scale_y + min(h, scale_y) / 2 + 4
        parts.append(f'<text x="{MARGIN - 6}" y="{y:.1f}" class="end">{escape(y_name)} {i}</text>')
    first = [row.where.get(name, 0) for name in ("t" if tokens else "column", y_name)]
    x, y = MARGIN + int(first[0] * scale_x / w) * w, int(first[1] * scale_y / h) * h
    parts.append(f'<rect class="first" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 38:.0f}" role="img"><title>{escape(name)}</title>'
        f"<desc>{escape(about)}</desc>{''.join(parts)}</svg>"
    )


def legend() -> str:
    shades = "".join(f'<i style="opacity:{opacity(level):.2f}"></i>' for level in range(1, 10))
    return (
        f'<p class="legend">error over budget: 1 <span aria-hidden="true">{shades}</span> '
        "10,000 and more; framed: the first</p>"
    )


def paragraphs(*said: str) -> Iterator[str]:
    """The sentences that are not empty."""
    yield from (f"<p>{escape(line)}</p>" for line in said if line)


def html(report: Report) -> str:
    """The whole report; every word that came from outside is escaped."""
    kind = "in" if report.ok else "out" if report.failures else ""
    tried_of = f"{len(report.covered)} of {report.ladder} cases tried"
    parts = [f'<p><strong class="{kind}">{report.verdict}</strong> {escape(title(report))} ({tried_of})</p>']
    parts += [*paragraphs(*exceptions(report)), *table(report)]
    parts += paragraphs(extent(report) if report.failing else "", *report.common, company(report))
    for (kind, message), rows in report.findings.items():
        parts.append(f"<p><strong>{escape(kind)}</strong> {escape(called(rows))}: {escape(message[:400])}</p>")
    if report.diagnosis:
        items = "".join(
            f"<li><strong>{escape(match['mistake'])}</strong><br><code>{escape(match['line'])}</code></li>"
            for match in report.diagnosis
        )
        parts.append(f"<p>{behaves(report)}</p><ul>{items}</ul>")
    if report.measured:
        items = "".join(f"<li>{escape(line)}</li>" for line in report.measured)
        parts.append(f"<p>Called with other sizes and options, it is</p><ul>{items}</ul>")
        parts.append(f"<p>all else as in <code>{escape(str(report.smallest))}</code></p>")
    parts += paragraphs(CUT if report.cut else "", undiagnosed(report))
    for row in report.first_wrong:
        parts.append(
            f"<p>First wrong <strong>{escape(row.quantity)}</strong> of case {escape(row.case)}: {place(row)}"
            f"{row.only and f'; only in {escape(row.only)}'}<br>"
            f"<code>{escape(str(report.cases.get(row.case)))}</code></p>{picture(row)}"
        )
    if report.first_wrong:
        parts.append(legend())
    if report.reproduction:
        parts.append("<p>The smallest case that fails, to run:</p>")
        parts.append(f'<pre tabindex="0">{escape(report.reproduction)}</pre>')
    parts += paragraphs(report.not_covered and f"Not covered (cases): {uncovered(report)}", tried(report))
    return f'<div class="gla-check"><style>{STYLE}</style>{"".join(parts)}</div>'


# Light values, then the same names for the dark themes of the book, JupyterLab, Colab and VS Code
STYLE = """
.gla-check { --check-in: #0072b2; --check-out: #c24f00; max-width: 44rem; color: inherit }
.gla-check .errors { overflow-x: auto }
:is(html[data-theme=dark], [data-jp-theme-light=false], html[theme=dark], .vscode-dark) .gla-check {
  --check-in: #56b4e9; --check-out: #ff8a3d }
html[data-theme=dark] .bd-content div.cell_output .text_html:has(> div.gla-check) {
  background: none; color: inherit; padding: 0 }
.gla-check p { margin: .5rem 0 } .gla-check strong.in { color: var(--check-in) }
.gla-check strong.out { color: var(--check-out) }
.gla-check table { margin: 0; border-collapse: collapse; font-size: .875rem; color: inherit;
  font-variant-numeric: tabular-nums }
.gla-check :is(th, td) { padding: .15rem .6rem .15rem 0; text-align: left; background: none; color: inherit;
  white-space: nowrap }
.gla-check thead th { border-bottom: 1px solid; font-weight: 600 }
.gla-check .legend { font-size: .875rem }
.gla-check .legend i { display: inline-block; width: .8rem; height: .8rem; background: var(--check-out) }
.gla-check svg { display: block; width: 100%; max-width: 40rem; height: auto; font: 13px system-ui, sans-serif }
.gla-check svg text { fill: currentColor } .gla-check svg .middle { text-anchor: middle }
.gla-check svg .end { text-anchor: end } .gla-check svg .ground { fill: currentColor; fill-opacity: .08 }
.gla-check svg .wrong { fill: var(--check-out) }
.gla-check svg .edge { stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 3 2 }
.gla-check svg .first { fill: none; stroke: currentColor; stroke-width: 2 }
"""


# -- annotations ---------------------------------------------------------------------------------
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


def line(kind: str, where: tuple[str, int] | None, heading: str, message: str) -> str:
    given = {"file": where[0], "line": str(where[1])} if where else {}
    said = ",".join(f"{n}={escaped(x, ':,')}" for n, x in (given | {"title": heading}).items())
    return f"::{kind} {said}::{escaped(message)}"


def annotations(report: Report, where: tuple[str, int] | None) -> list[str]:
    """An error for each of the first wrong quantities and failed calls, a warning for each waiver."""
    mechanism = report.settings["mechanism"]
    why = [f"It behaves as if: {match['mistake']}" for match in report.diagnosis[:1]]
    lines = []
    for row in report.first_wrong:
        said = [f"error {row.error:.1e}, budget {row.budget:.1e}, first wrong at {place(row)}"]
        said += [*why, str(report.cases[row.case]), head(report)]
        lines.append(line("error", where, f"{mechanism}: {row.quantity} wrong in case {row.case}", "\n".join(said)))
    for (kind, message), rows in report.findings.items():
        heading = f"{mechanism}: {kind}, {rows[0].quantity} of case {rows[0].case}"
        lines.append(line("error", where, heading, f"{message}\n{report.cases[rows[0].case]}\n{head(report)}"))
    if not report.ok and not lines:
        missing = f"not covered (cases): {uncovered(report)}"
        lines.append(line("error", where, f"{mechanism}: {report.verdict}", missing))
    for (quantity, reason), rows in report.waived.items():
        heading = f"{mechanism}: {quantity} waived"
        lines.append(line("warning", where, heading, f"{reason} ({len(rows)} of {len(report.covered)} cases)"))
    return lines
