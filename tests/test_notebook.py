"""The output of the chapters' cells: tables and excerpts from the sources that run."""

from __future__ import annotations

import pytest

from gla_ref.book import notebook
from gla_ref.gates import decay_to_end


@pytest.fixture
def shown(monkeypatch):
    """The Markdown that a function displays."""
    display, pieces = pytest.importorskip("IPython.display", reason="the book's tools are not installed"), []
    monkeypatch.setattr(display, "display", lambda piece: pieces.append(piece.data))
    return pieces


def test_table_is_markdown(shown):
    notebook.table(("form", "error"), [("ratio", "6e-15"), ("log", 0)])
    assert shown == ["| form | error |\n| :-- | --: |\n| ratio | 6e-15 |\n| log | 0 |"]


def test_excerpt_shows_the_lines_from_the_first_to_the_last(shown):
    notebook.excerpt(decay_to_end, "return", "return")
    notebook.excerpt(decay_to_end)
    assert shown[0] == "```python\nreturn F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)\n```"
    assert shown[1].startswith("```python\ndef decay_to_end(g: Tensor) -> Tensor:\n")
    assert shown[1].endswith("flip(-2)\n```")


def test_excerpt_refuses_lines_that_are_not_there(shown):
    with pytest.raises(StopIteration):
        notebook.excerpt(decay_to_end, "return", "no such line")
    assert not shown


def test_long_comments_come_above_their_lines_and_are_wrapped():
    short, call = "x = f(y)  # short", "    a_call_without(words)"
    lines = [short, "    x = f(y)  # a long comment", "    # one more long comment", call]
    wrapped = [short, "    # a long comment", "    x = f(y)", "    # one more long", "    # comment", call]
    assert notebook.narrow(lines, 20) == wrapped


def test_numbers_of_a_sentence():
    assert notebook.sci(0.00041) == r"$4 \cdot 10^{-4}$"
    assert notebook.sci(2.4e17) == r"$2 \cdot 10^{17}$"
