"""Chapters 1 to 15. What a chapter's cells need beside the subject: sentences with numbers, lines of a kernel."""

from __future__ import annotations


def say(text: str) -> None:
    """Show a sentence whose numbers were computed in this cell, as Markdown: `say(f"It takes {ms:.2f} ms.")`.

    On the site the cell's code is folded away and the sentence stands in the text; in a notebook it is printed under
    its cell. Either way nobody typed the number.
    """
    from IPython.display import Markdown, display

    display(Markdown(text))


def excerpt(of, first: str, last: str) -> None:
    """Show the lines of a function's own source from the first that holds `first` to the next that holds `last`."""
    import inspect
    from textwrap import dedent

    from IPython.display import Markdown, display

    lines = inspect.getsource(getattr(of, "fn", of)).splitlines()  # a kernel has its function in `fn`
    start = next(i for i, line in enumerate(lines) if first in line)
    stop = next(i for i in range(start, len(lines)) if last in lines[i])
    text = dedent("\n".join(lines[start : stop + 1]))
    display(Markdown(f"```python\n{text}\n```"))
