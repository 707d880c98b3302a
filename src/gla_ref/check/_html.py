"""A report as HTML for Jupyter, Colab and the site, with pictures of the error (appendix "Check your kernel").

One piece of HTML: no script, nothing loaded; text takes the page's own colour, in light and dark themes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from ._cases import C

if TYPE_CHECKING:
    from ._report import Report, Row

SHADES = " .:-=+*#%@"  # within budget, then one more for every half power of ten
LOW, HIGH = -2, 8  # powers of ten of error / budget that a bar spans
WIDTH, LEFT, SIDE = 480, 80, 14  # of a picture, of its margin; most that a cell may measure


def times(row: Row) -> str:
    """An error in budgets, in a few characters."""
    if not math.isfinite(row.error):
        return "NaN" if math.isnan(row.error) else "∞"
    ratio = row.ratio
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}" if ratio < 1e9 else f"{ratio:.0e}"


def bar(ratio: float) -> str:
    """A bar on a scale of powers of ten, with a line where the budget ends."""
    power = math.log10(ratio) if 0 < ratio < math.inf else LOW if ratio == 0 else HIGH
    length, line = ((x - LOW) / (HIGH - LOW) for x in (min(max(power, LOW), HIGH), 0))
    kind = "in" if ratio <= 1 else "out"
    return (
        f'<div class="bar" aria-hidden="true"><i class="{kind}" style="width:{100 * length:.0f}%"></i>'
        f'<b style="left:{100 * line:.0f}%"></b></div>'
    )


def table(report: Report) -> Iterator[str]:
    """Every quantity's worst error over its budget."""
    measured = [row for row in report.rows if row.error is not None]
    if not measured:
        return
    yield (
        '<div class="errors" tabindex="0" role="region" aria-label="errors and budgets"><table><thead>'
        '<tr><th scope="col">quantity</th><th scope="col">cases</th>'
        '<th scope="col">failed</th><th scope="col">worst error / budget</th><th></th>'
        '<th scope="col">case</th></tr></thead><tbody>'
    )
    for name in dict.fromkeys(row.quantity for row in measured):
        rows = [row for row in measured if row.quantity == name]
        worst, failed = max(rows, key=lambda r: r.ratio), report.failed(name)
        said = report.differing(name) or worst.case
        yield (
            f'<tr><th scope="row">{escape(name)}</th><td>{len(rows)}</td><td>{failed}</td>'
            f"<td>{times(worst)}</td><td>{bar(worst.ratio)}</td><td>{escape(said)}</td></tr>"
        )
    yield "</tbody></table></div>"


def opacity(level: int) -> float:
    return 0.2 + 0.8 * level / (len(SHADES) - 1)


def squares(cells: list[str], w: float, h: float) -> Iterator[str]:
    """One path a shade; neighbours in a row share a rectangle."""
    for level, shade in enumerate(SHADES[1:], 1):
        path = []
        for i, line in enumerate(cells):
            start = 0
            while (a := line.find(shade, start)) >= 0:
                b = a
                while b < len(line) and line[b] == shade:
                    b += 1
                side = (b - a) * w
                path.append(f"M{LEFT + a * w:.1f} {i * h:.1f}h{side:.1f}v{h:.1f}h{-side:.1f}z")
                start = b
        if path:
            yield f'<path class="wrong" fill-opacity="{opacity(level):.2f}" d="{"".join(path)}"/>'


def picture(row: Row) -> str:
    """The map of a failed quantity: time along, channels down; of a state, columns along and rows down."""
    (x_name, y_name), (across, down), cells = (row.grid[n] for n in ("axes", "size", "cells"))
    n, m = len(cells[0]), len(cells)
    w, h = min(SIDE, (WIDTH - LEFT) / n), min(SIDE, 320 / m)
    width, height = n * w, m * h
    scale_x, scale_y = w / math.ceil(across / n), h / math.ceil(down / m)
    tokens = x_name == "t"
    title = f"Where {row.quantity} of case {row.case} is wrong"
    where = ", ".join(f"{name} {i}" for name, i in row.where.items())
    wrong = sum(shade != " " for line in cells for shade in line)
    about = (
        f"{x_name} from 0 to {across - 1} along, {y_name} from 0 to {down - 1} down, the worst of all heads and "
        f"sequences. {wrong} of {n * m} cells hold an error beyond the budget; first at {where}."
    )
    parts = [f'<rect class="ground" x="{LEFT}" width="{width:.1f}" height="{height:.1f}"/>']
    parts += squares(cells, w, h)
    marks = range(0, across, C) if tokens else (0, across - 1)
    marks = [t for t in marks if t == 0 or t % (C * math.ceil(across / C / 9)) == 0 or not tokens]
    for t in dict.fromkeys(marks):
        x = LEFT + t * scale_x + (0 if tokens else w / 2)
        if tokens and t:
            parts.append(f'<path class="edge" d="M{x:.1f} 0v{height:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 15:.1f}" class="middle">{t}</text>')
    parts.append(
        f'<text x="{LEFT + width / 2:.1f}" y="{height + 31:.1f}" class="middle">'
        f"{escape(x_name)}{' (a line for each chunk of 64)' if tokens and across > C else ''}</text>"
    )
    for i in dict.fromkeys((0, down - 1)):
        y = i * scale_y + min(h, scale_y) / 2 + 4
        parts.append(f'<text x="{LEFT - 6}" y="{y:.1f}" class="end">{escape(y_name)} {i}</text>')
    first = [row.where.get(name, 0) for name in ("t" if tokens else "column", y_name)]
    x, y = LEFT + int(first[0] * scale_x / w) * w, int(first[1] * scale_y / h) * h
    parts.append(f'<rect class="first" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 38:.0f}" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(about)}</desc>{''.join(parts)}</svg>"
    )


def legend() -> str:
    shades = "".join(f'<i style="opacity:{opacity(level):.2f}"></i>' for level in range(1, 10))
    return (
        f'<p class="legend">error over budget: 1 <span aria-hidden="true">{shades}</span> '
        "10,000 and more; framed: the first</p>"
    )


def render(report: Report) -> str:
    """The whole report; every word that came from outside is escaped."""
    kind = "in" if report.ok else "out" if report.failures else ""
    cases = f"{len(report.covered)} of {report.ladder} cases tried"
    parts = [f'<p><strong class="{kind}">{report.verdict}</strong> {escape(report.title)} ({cases})</p>']
    parts += [f"<p>{escape(line)}</p>" for line in report.exceptions]
    parts += table(report)
    if report.failing:
        parts.append(f"<p>{escape(report.extent)}</p>")
    parts += [f"<p>{escape(line)}</p>" for line in (*report.common, report.company) if line]
    for (kind, message), rows in report.findings.items():
        found = ", ".join(dict.fromkeys(row.quantity for row in rows))
        n = len({row.case for row in rows})
        where = f"{found} ({n} case{'s' * (n != 1)}, first {rows[0].case})"
        parts.append(f"<p><strong>{escape(kind)}</strong> {escape(where)}: {escape(message[:400])}</p>")
    if report.diagnosis:
        items = "".join(
            f"<li><strong>{escape(match['mistake'])}</strong><br><code>{escape(match['line'])}</code></li>"
            for match in report.diagnosis
        )
        one = "It behaves as if:" if len(report.diagnosis) == 1 else "It behaves as one of:"
        parts.append(f"<p>{one}</p><ul>{items}</ul>")
    if report.measured:
        items = "".join(f"<li>{escape(line)}</li>" for line in report.measured)
        parts.append(f"<p>Called with other sizes and options, it is</p><ul>{items}</ul>")
        parts.append(f"<p>all else as in <code>{escape(str(report.smallest))}</code></p>")
    if report.cut:
        parts.append(f"<p>{escape(report.cut)}</p>")
    if report.undiagnosed:
        parts.append(f"<p>{escape(report.undiagnosed)}</p>")
    for row in report.first_wrong:
        where = ", ".join(f"{name} {i}" for name, i in row.where.items())
        parts.append(
            f"<p>First wrong <strong>{escape(row.quantity)}</strong> of case {escape(row.case)}: {where}"
            f"{row.only and f'; only in {escape(row.only)}'}<br>"
            f"<code>{escape(str(report.cases.get(row.case)))}</code></p>{picture(row)}"
        )
    if report.first_wrong:
        parts.append(legend())
    if report.reproduction:
        parts.append("<p>The smallest case that fails, to run:</p>")
        parts.append(f'<pre tabindex="0">{escape(report.reproduction)}</pre>')
    if report.not_covered:
        left = "; ".join(f"{escape(name)} ({n})" for name, n in report.not_covered.items())
        parts.append(f"<p>Not covered (cases): {left}</p>")
    if report.tried:
        parts.append(f"<p>{escape(report.tried)}</p>")
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
.gla-check .bar { position: relative; width: 10rem; height: .75rem }
.gla-check .bar i { display: block; height: 100%; min-width: 2px; background: var(--check-in) }
.gla-check .bar i.out, .gla-check .legend i { background: var(--check-out) }
.gla-check .bar b { position: absolute; top: -.15rem; bottom: -.15rem; border-left: 2px solid }
.gla-check .legend { font-size: .875rem } .gla-check .legend i { display: inline-block; width: .8rem; height: .8rem }
.gla-check svg { display: block; width: 100%; max-width: 40rem; height: auto; font: 13px system-ui, sans-serif }
.gla-check svg text { fill: currentColor } .gla-check svg .middle { text-anchor: middle }
.gla-check svg .end { text-anchor: end } .gla-check svg .ground { fill: currentColor; fill-opacity: .08 }
.gla-check svg .wrong { fill: var(--check-out) }
.gla-check svg .edge { stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 3 2 }
.gla-check svg .first { fill: none; stroke: currentColor; stroke-width: 2 }
"""
