"""What chapters show of a kernel is its own source, cut between two lines."""

import pytest

from gla_ref import notebook


def example(x):
    """Not shown."""
    for y in x:
        z = y  # first

        z = z + 1  # last
    return z


def test_excerpt_shows_lines_of_the_source(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda x: shown.append(x.data))
    notebook.excerpt(example, "for y", "# last")
    assert shown == ["```python\nfor y in x:\n    z = y  # first\n\n    z = z + 1  # last\n```"]
    with pytest.raises(StopIteration):
        notebook.excerpt(example, "no such line", "# last")
