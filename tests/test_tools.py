"""Tools whose numbers the project relies on."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import kernel_lines  # noqa: E402

LOOP = """
scf.for %i = %a to %b {
  %x = ttg.memdesc_index %buffer[%n] : smem
  %t = ttg.memdesc_trans %x : smem
  %o = ttng.warp_group_dot %q, %t, %c {inputPrecision = 0 : i32, isAsync = true} : tensor
  %w:2 = ttng.warp_group_dot_wait %o, %t {pendings = 0 : i32} : tensor
  ttg.async_copy_global_to_local %p, %x : smem
  %s = scf.if %mild {
    %d = ttng.warp_group_dot %y, %z, %c {inputPrecision = 0 : i32} : tensor
    scf.yield %d : tensor
  } else {
    scf.yield %c : tensor
  } loc(#1)
} loc(#2)
"""

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


def test_loops_that_lose_an_operand_are_found():
    broken = pytest.importorskip("compile_kernels", reason="needs Triton").broken
    assert not broken(LOOP)
    late = LOOP.replace("pendings = 0", "pendings = 1")
    assert ["in flight" in text for text in broken(late)] == [True]
    branch = LOOP.replace("%y, %z", "%y, %t")
    assert ["in a branch" in text for text in broken(branch)] == [True]


def test_shared_helpers_count_as_far_as_they_are_imported(tmp_path):
    (tmp_path / "_helper.py").write_text(TEXT)
    (tmp_path / "_unused.py").write_text("x = 1\n")
    (tmp_path / "kernel.py").write_text("from ._helper import used\n")
    assert kernel_lines.shared(tmp_path / "kernel.py") == 3 + 2  # used, TABLE
