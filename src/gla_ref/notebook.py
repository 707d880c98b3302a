"""Chapters 1 to 15. What a chapter's cells need beside the subject: a sentence with its numbers."""

from __future__ import annotations

import inspect
import textwrap


def say(text: str) -> None:
    """Show a sentence whose numbers were computed in this cell, as Markdown: `say(f"It takes {ms:.2f} ms.")`.

    On the site the cell's code is folded away and the sentence stands in the text; in a notebook it is printed under
    its cell. Either way nobody typed the number.
    """
    from IPython.display import Markdown, display

    display(Markdown(text))


def excerpt(function, first: str, last: str | None = None):
    """Lines of a function or kernel as the package has them, from the one with `first` in it to the one with `last`.

    Raises:
        ValueError: there is no such line.
    """
    from IPython.display import Markdown

    lines = inspect.getsource(getattr(function, "fn", function)).splitlines()
    start = next((n for n, line in enumerate(lines) if first in line), None)
    if start is None:
        raise ValueError(f"first: expected a part of a line of {function}, got {first!r}")
    stop = next((n for n in range(start, len(lines)) if (first if last is None else last) in lines[n]), None)
    if stop is None:
        raise ValueError(f"last: expected a part of a line after {first!r}, got {last!r}")
    return Markdown("```python\n" + textwrap.dedent("\n".join(lines[start : stop + 1])) + "\n```")


def sci(x: float) -> str:
    """A number in a sentence of `say`, to one digit: 0.00041 is $4 \\cdot 10^{-4}$."""
    digit, power = f"{x:.0e}".split("e")
    return f"${digit} \\cdot 10^{{{int(power)}}}$"
