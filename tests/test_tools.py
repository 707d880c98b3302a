"""Tools whose numbers the project relies on."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import kernel_lines  # noqa: E402

TEXT = '''"""Doc."""
import torch  # why

TABLE = {
    1: 2,
}


def used(x):
    """Doc.

    More.
    """
    # why
    return TABLE[x]


def entry(x):
    return used(x)


@entry.register_fake
def _(x):
    return x


def other(x):
    return entry(x)
'''


def test_lines_of_a_kernel_are_split_by_what_its_entry_reaches():
    assert kernel_lines.count(TEXT, "entry") == {"forward": 1 + 3 + 2 + 2 + 3, "backward": 2}


def test_shared_helpers_count_as_far_as_they_are_imported(tmp_path):
    (tmp_path / "_helper.py").write_text(TEXT)
    (tmp_path / "_unused.py").write_text("x = 1\n")
    (tmp_path / "kernel.py").write_text("from ._helper import used\n")
    assert kernel_lines.shared(tmp_path / "kernel.py") == 3 + 2  # used, TABLE
