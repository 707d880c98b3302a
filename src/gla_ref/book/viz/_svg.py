"""Pieces of a picture, as SVG; a colour is a class, so that it can follow the page's theme (chapter 2).

Fills: white, grey, orange, pink, blue, vermilion, green, sky (Okabe and Ito; as in book/style.mplstyle), and the pale
ones pale-blue, pale-red, pale-grey for tiles with numbers in them. Strokes: the same names with ``line-`` before them;
``line`` is the page's ink, ``edge`` a thin outline of it. Text follows the page's ink. On a fill, dark in all themes:
``on`` text, ``ink`` and ``hollow`` shapes; blue, vermilion and green are too dark for text.
"""

from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"/>'


def circle(x: float, y: float, r: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"/>'


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """Text centred at x, its middle at y; kinds ``start`` and ``end`` anchor it at an end instead."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{_n(x)}" y="{_n(y)}">{escape(str(content))}</text>'


def cell(x: float, y: float, width: float, height: float, kind: str, content: object, ink: str = "on") -> str:
    """A rectangle with a word or a number in its middle, which has the kind `ink`."""
    return rect(x, y, width, height, kind) + text(x + width / 2, y + height / 2, content, ink)


def square(x: float, y: float, size: float, number: float, largest: float = 1.0, *, rim: float = 2) -> str:
    """An empty cell, and in it a square with the number's size as its area: blue above 0, vermilion below."""
    side = (size - rim) * min(1, abs(number) / largest) ** 0.5
    shape = rect(x + (size - side) / 2, y + (size - side) / 2, side, side, "blue" if number > 0 else "vermilion")
    return rect(x, y, size, size, "edge faint") + (shape if side > 0.5 else "")


def squares(
    rows: Sequence[Sequence[float]], left: float, tops: Sequence[float], size: float, words: Callable, **look: float
) -> list[str]:
    """A matrix as `square`s of this look, a row at each top; `words(i, j, number)` says what one is."""
    return [
        part(words(i, j, x), square(left + size * j, tops[i], size, x, **look))
        for i, row in enumerate(rows)
        for j, x in enumerate(row)
    ]


def raised(x: object) -> str:
    """A number as an exponent."""
    return str(x).translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def number(x: float) -> str:
    """With two decimals at most."""
    return f"{round(x, 2) + 0.0:g}".replace("-", "−")


def path(points: list[Point], kind: str, *, closed: bool = False) -> str:
    d = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    return f'<path class="{kind}" d="M{d}{"Z" if closed else ""}"/>'


def part(words: str, *pieces: str, choose: dict[int, int] | None = None) -> str:
    """Pieces that show `words` when a reader points at them; a click sets controls, by their number, to values."""
    pairs = " ".join(f"{control}:{value}" for control, value in (choose or {}).items())
    chosen = f' data-set="{pairs}"' if pairs else ""
    return f'<g data-say="{escape(words)}"{chosen}>{"".join(pieces)}</g>'


def played(ground: str, bars: str, name: str, x: float, top: float, bottom: float) -> list[str]:
    """A timeline at the moment x: bars in full colours before it and pale after it, and the line of the present."""
    until = f'<clipPath id="{name}"><rect x="0" y="0" width="{_n(x)}" height="{bottom}"/></clipPath>'
    now = path([(x, top), (x, bottom)], "line-vermilion")
    return [ground, '<g class="faint">', bars, "</g>", f'{until}<g clip-path="url(#{name})">', bars, f"</g>{now}"]


def arrow(start: Point, end: Point, kind: str = "line") -> str:
    """A straight arrow with an open head of 5 units."""
    (x0, y0), (x1, y1) = start, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    a, b = 5 * (x1 - x0) / length, 5 * (y1 - y0) / length
    head = [(x1 - a - b / 2, y1 - b + a / 2), end, (x1 - a + b / 2, y1 - b - a / 2)]
    return path([start, end, *head[:1], end, *head[2:]], kind)


def _n(x: float) -> str:  # a screen cannot show less than a tenth of a unit
    return f"{round(float(x), 1):g}"
