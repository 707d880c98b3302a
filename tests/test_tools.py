"""Tools whose numbers the project relies on."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

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


def test_arrivals_before_warps_have_met_are_found():
    unmet = pytest.importorskip("compile_kernels", reason="needs Triton").unmet
    store, met, arrive = (
        "st.shared.b32 [%r1], %r2;",
        "bar.sync 2, 128;",
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];",
    )
    assert not unmet("\n".join([store, met, arrive, arrive]))  # two barriers, one meeting
    assert len(unmet("\n".join([store, met, arrive, store, arrive]))) == 1
    waited = "wgmma.wait_group.sync.aligned 0;"
    assert len(unmet("\n".join([met, waited, arrive]))) == 1


def test_what_is_built_is_fresh_while_sources_and_results_stay(tmp_path):
    book = pytest.importorskip("build_book", reason="the book's tools are not installed")
    source, page = tmp_path / "book" / "page.md", tmp_path / book.SITE / "page.html"
    for file in (source, page):
        file.parent.mkdir(parents=True)
        file.write_text("one")
    assert not book.fresh(tmp_path, book.SITE)
    book.remember(tmp_path, book.SITE)
    assert book.fresh(tmp_path, book.SITE)
    for file in (source, page):
        file.write_text("two")
        assert not book.fresh(tmp_path, book.SITE)
        file.write_text("one")
        assert book.fresh(tmp_path, book.SITE)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.py").touch()
    assert not book.fresh(tmp_path, book.SITE)
