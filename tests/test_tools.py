"""Tools whose numbers the project relies on."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import kernel_lines  # noqa: E402

LOOP = """
%x0 = ttg.memdesc_index %buffer[%c0] : !ttg.memdesc<2x64xbf16> -> smem
scf.for %i = %a to %b {
  %x = ttg.memdesc_index %buffer[%n] : !ttg.memdesc<2x64xbf16> -> smem
  %t = ttg.memdesc_trans %x : smem
  %o = ttng.warp_group_dot %t, %x, %c {inputPrecision = 0 : i32, isAsync = true} : tensor
  %w:2 = ttng.warp_group_dot_wait %o, %t {pendings = 1 : i32} : tensor
  %next = ttg.memdesc_index %buffer[%n1] : !ttg.memdesc<2x64xbf16> -> smem
  ttg.async_copy_global_to_local %p, %next : smem
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


def test_gated_linear_attention_stays_within_its_pages():
    """What gated linear attention promises: 200 lines forward, 250 backward."""
    lines = kernel_lines.count((kernel_lines.KERNELS / "gla.py").read_text(), "gla")
    assert lines["forward"] <= 200 and lines["backward"] <= 250


def test_lines_of_a_kernel_are_split_by_what_its_entry_reaches():
    assert kernel_lines.count(TEXT, "entry") == {"forward": 3 + 2 + 2 + 3, "backward": 2}


def test_loops_that_lose_an_operand_are_found():
    broken = pytest.importorskip("compile_kernels", reason="needs Triton").broken
    assert not broken(LOOP)  # the next round's copy goes to the other slot
    same = LOOP.replace("%p, %next", "%p, %x")
    assert ["in flight" in text for text in broken(same)] == [True]
    assert not broken(same.replace("pendings = 1", "pendings = 0"))
    passing = LOOP.replace("dot %t, %x", "dot %t, %copy")
    assert ["in flight" in text for text in broken(passing)] == [True]
    single = LOOP.replace("<2x", "<1x")
    assert ["in flight" in text for text in broken(single)] == [True]
    branch = LOOP.replace("%y, %z", "%y, %t")
    assert ["in a branch" in text for text in broken(branch)] == [True]


def test_shared_helpers_count_as_far_as_they_are_imported(tmp_path):
    (tmp_path / "_helper.py").write_text(TEXT)
    (tmp_path / "_unused.py").write_text("x = 1\n")
    (tmp_path / "kernel.py").write_text("from ._helper import used\n")
    assert kernel_lines.shared(tmp_path / "kernel.py") == 3 + 2  # used, TABLE
