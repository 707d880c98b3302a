"""Chapters 1 to 15. What a chapter's cells need beside the subject: a sentence with its numbers."""

from __future__ import annotations


def say(text: str) -> None:
    """Show a sentence whose numbers were computed in this cell, as Markdown: `say(f"It takes {ms:.2f} ms.")`.

    On the site the cell's code is folded away and the sentence stands in the text; in a notebook it is printed under
    its cell. Either way nobody typed the number.
    """
    from IPython.display import Markdown, display

    display(Markdown(text))
