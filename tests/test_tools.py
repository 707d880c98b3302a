"""Tools whose numbers the project relies on."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import count_lines
import count_tests
import nightly
import pytest
from barriers import broken, unmet
from cases import in_process

ROOT = Path(__file__).parents[1]

LOOP = """
  tt.func public @walk(%p: !tt.ptr<bf16>) {
%buffer = ttg.local_alloc : () -> !ttg.memdesc<2x64xbf16>
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


# a product in a loop: its descriptors are made before the loop, one of them in the loop
SASS = """.text.product:
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   UMOV UR8, 0x100 ;
        /*0030*/                   UIADD3.X UR9, URZ, 0x40000040, URZ, UP0, !UPT ;
.L_x_0:
        /*0040*/                   UIADD3.64 UR10, UR8, 0x40, URZ ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0060*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/                   STG.E desc[UR4][R2.64], R24 ;
        /*0080*/                   EXIT ;
"""


def test_loops_that_lose_an_operand_are_found():
    assert not broken(LOOP)  # the next round's copy goes to the other slot
    same = LOOP.replace("%p, %next", "%p, %x")
    assert ["in flight" in text for text in broken(same)] == [True]
    assert not broken(same.replace("pendings = 1", "pendings = 0"))
    again = LOOP[LOOP.index("%buffer") :].replace("%buffer", "%other")  # with the first loop's names
    assert ["in flight" in text for text in broken(same + again)] == [True]
    passing = LOOP.replace("dot %t, %x", "dot %t, %copy")
    assert ["in flight" in text for text in broken(passing)] == [True]
    single = LOOP.replace("<2x", "<1x")
    assert ["in flight" in text for text in broken(single)] == [True]
    branch = LOOP.replace("%y, %z", "%y, %t")
    assert ["in a branch" in text for text in broken(branch)] == [True]


def test_arrivals_before_warps_have_met_are_found():
    store, met = "st.shared.b32 [%r1], %r2;", "bar.sync 2, 128;"
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];"
    assert not unmet("\n".join([store, met, arrive, arrive]))  # two barriers, one meeting
    assert len(unmet("\n".join([store, met, arrive, store, arrive]))) == 1
    waited = "wgmma.wait_group.sync.aligned 0;"
    assert len(unmet("\n".join([met, waited, arrive]))) == 1
    role, threads = "setmaxnreg.dec.sync.aligned.u32 40;", "bar.warp.sync -1;"
    assert not unmet("\n".join([role, met, role, store, threads, arrive]))  # of one warp
    assert len(unmet("\n".join([role, met, store, threads, arrive]))) == 1  # one of four


def test_registers_that_nothing_or_another_use_has_set_are_found():
    wrong_in = pytest.importorskip("sass", reason="needs Triton").wrong_in

    def places(code):
        return [text[:4] for text in wrong_in(code)]

    assert not places(SASS)
    assert places(SASS.replace("ULDC.64 UR4", "ULDC UR4")) == ["0070"]  # half of an address
    itself = SASS.replace("UMOV UR8, 0x100", "UIADD3 UR8, UP0, UR8, 0x40, URZ")
    assert places(itself) == ["0020"]
    assert places(SASS.replace("UMOV UR8, 0x100", "NOP")) == ["0040", "0050"]
    # set on one of two ways, or in the round before only
    assert places(SASS.replace("STG.E desc[UR4]", "STG.E desc[UR8]")) == ["0070"]
    assert places(SASS.replace("UR10, UR8, 0x40", "UR10, UR10, 0x40")) == ["0040"]
    # a first operand in registers has no descriptor
    alone = SASS.replace("R24, gdesc[UR8]", "R24, R40, gdesc[UR8]").replace("UR10, UR8,", "UR10, UR4,")
    assert not places(alone.replace("UMOV UR8, 0x100", "NOP"))
    assert places(alone.replace("UIADD3.64 UR10, UR4, 0x40, URZ", "NOP")) == ["0050"]
    # Blackwell loads four at once, and its products name each descriptor
    product = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0"
    newer = SASS.replace(product, "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]")
    assert not places(newer.replace("UMOV UR8, 0x100", "LDCU.128 UR8, c[0x0][0x380]"))
    assert places(newer.replace("UIADD3.64 UR10, UR8, 0x40, URZ", "NOP")) == ["0050"]
    # predicates may be written too
    both = SASS.replace("UMOV UR8, 0x100", "R2UR.OR P2, UR8, R9")
    assert not places(both) and places(both.replace("P2, UR8, R9", "P2, UR9, R9")) == ["0040", "0050"]

    def after(*way):  # a thread's number, by way of its memory; a warp's number is the same in its threads
        return places(SASS.replace(".L_x_0:", "".join(f" /*00a{n}*/ {x} ;\n" for n, x in enumerate(way)) + ".L_x_0:"))

    kept = "S2R R3, SR_TID.X", "STL [R1+0x8], R3", "LDL.64 R8, [R1+0x8]"
    assert after(*kept, "R2UR UR8, R8") == ["0050"]
    assert not after(*kept, "SHF.R.U32.HI R8, RZ, 0x5, R8", "R2UR UR8, R8")
    pair = kept[0], "STL.64 [R1+0x8], R2", kept[2]  # R3 to R9
    assert not after(*pair, "R2UR UR8, R8") and after(*pair, "R2UR UR8, R9") == ["0050"]


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


LOG = """\
============ 1 failed, 12 passed, 3 skipped, 2 deselected, 1 warning in 61.02s (0:01:01) ============
\x1b[32m\x1b[32m\x1b[1m5 passed\x1b[0m, \x1b[33m1 xfailed\x1b[0m\x1b[32m in 0.31s\x1b[0m\x1b[0m
=== 2 errors in 0.10s ===
1 failed, 1 error in 1.00s
============================ no tests ran in 0.01s =============================
E   assert 7 passed in 3 ways
22 of 22 notebooks run with torch 2.13.0
"""


def test_summaries_of_pytest_are_summed():
    assert count_tests.totals(LOG) == (17, 5)  # errors count as failed
    assert count_tests.totals("") == (0, 0)


def test_lines_are_counted_by_room():
    files = {
        "src/gla_ref/a.py": b"1\n\n# 3\n",
        "src/gla_ref/book/viz/b.js": b"1\n2\n",
        "book/_static/katex/katex.min.css": b"1\n",
        "book/01.md": b"words\n```{code-cell} python\n1\n2\n```\n```python\nno cell\n```\n```{code-cell}\n3\n```\n",
        "tools/notes.md": b"```{code-cell}\n1\n```\n",
    }
    none = {"Python": 0, "js, css": 0, "cells": 0}
    assert count_lines.rooms(files) == {
        "book": none | {"cells": 3},
        "src": none | {"Python": 3, "js, css": 2},
        "src/gla_ref": none | {"Python": 3},
        "src/gla_ref/book": none | {"js, css": 2},
        "all": {"Python": 3, "js, css": 2, "cells": 3},
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "broken, status, last", [("none", 0, "7 passed, 0 failed"), ("test-site", 2, "5 passed, 1 failed")]
)
def test_the_last_line_of_ci_sums_the_tests(tmp_path, broken, status, last):
    """The steps run as they are, with a `make` that prints what pytest prints, and fails at one of its targets."""
    root = tmp_path / "root"
    for name in (".ci/run", "tools/count_tests.py"):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    (root / "notebooks").mkdir()
    (root / "notebooks" / "01.ipynb").touch()
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\nif [ "$1" = {broken} ]; then echo "== 1 failed, 2 passed in 1.00s =="; exit 2; fi\n'
        'case "$1" in test) echo "=== 3 passed, 1 skipped in 2.00s ===";; test-site) echo "4 passed in 1.00s";; esac\n'
    )
    make.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([root / ".ci" / "run"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, last), done.stdout + done.stderr
    assert "=== 3 passed, 1 skipped in 2.00s ===" in done.stdout


CHANCE = re.compile(r"\bdate\b|GLA_REF_DAY|\bdrawn?\(|on_some_days|--share|RANDOM|\brandom\.|time\.time|today\(")


@pytest.mark.parametrize("name", [".ci/run", "Makefile", "tests/conftest.py", "tests/cases.py"])
def test_what_runs_depends_on_the_commit_alone(name):
    """No date, clock or chance; a run's record may name its day."""
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if CHANCE.search(line) and '"date": ' not in line] == []


@pytest.mark.parametrize(
    "expression, dropped",
    [("(deep or hypothesis) and not gpu", {"gpu"}), ("not deep or site", set()), ("not (gpu or deep)", set())],
)
def test_what_is_not_collected_is_what_pytest_would_deselect(request, expression, dropped):
    conftest = request.config.pluginmanager.get_plugin(f"{ROOT / 'tests' / 'conftest.py'}")
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert {x for x in ("gpu", "site", "deep") if conftest.left_out(config, [getattr(pytest.mark, x)])} == dropped


CHANGED = """
import sys
sys.path[:0] = ["tools", "src"]
import compile_kernels as tool
name = "gla 128 bfloat16"
marks, left = tool.changed(90, [name], set())
assert marks[name] and not left and tool.changed(90, [name], set(marks[name])) == ({name: {}}, 0)
launch = tool.launches(90, name)[0]
mark = tool.fingerprint(launch, 90)
assert mark in marks[name] and tool.fingerprint(launch, 80) != mark
assert tool.fingerprint(launch._replace(options=launch.options | {"num_warps": 2}), 90) != mark
launch.kernel.hash = "of another source"
assert tool.fingerprint(launch, 90) != mark
tool.LIMIT = 1
marks, left = tool.changed(90, [name], set())
assert len(marks[name]) == 1 and left > 0
every = tool.distinct(90, [*tool.CASES])
kinds = tool.distinct(90, [*tool.CASES], kinds=True)
launches = {name: tool.launches(90, name) for name, own in every.items() if own}
chosen = lambda found: [launches[name][n] for name, own in found.items() for n in own.values()]
kernels = lambda found: {(x.kernel, x.given("REVERSE")) for x in chosen(found)}
assert kernels(kinds) == kernels(every) and sum(map(len, kinds.values())) < sum(map(len, every.values())) / 2
tool.LAUNCHES = tool.Path("none.json")
sys.argv[1:] = ["--changed", "--arch", "90"]
try:
    tool.main()
except SystemExit as error:
    assert str(error).startswith("none.json: expected launches for sm_90"), error
else:
    raise AssertionError("compared with nothing")
loaded = {name: getattr(x, "__file__", None) or "" for name, x in sys.modules.items()}
import nightly
read = {str(path) for path in nightly.files(nightly.LAUNCHES)}
unread = {x for x in loaded.values() if x.startswith((f"{nightly.ROOT}/src", f"{nightly.ROOT}/tools"))} - read
assert not unread, f"read by a compilation, not by its part of the nightly run: {unread}"
"""


def test_a_launch_is_compiled_again_when_its_kernel_or_its_plan_changed():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    in_process("-c", CHANGED)


def test_status_is_written_from_the_record():
    assert nightly.STATUS.read_text() == nightly.status(), "run `.venv/bin/python tools/nightly.py --due`"


def test_a_part_is_due_until_it_was_right_for_its_files(monkeypatch, tmp_path):
    for name, text in (("a.py", "1"), ("b.py", "1"), (".gitignore", "*.lock")):
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RECORD", tmp_path / "nightly.json")
    part = nightly.Part("-v >/dev/null; echo '==== 2 passed in 1.00s ===='", (".", "!b.py"), "a part")
    monkeypatch.setattr(nightly, "PARTS", {"one": part})

    def run():
        record = nightly.run("one")
        nightly.results.merge(nightly.RECORD, {"gpu": None}, "nightly", [record], key=("part",))
        return record

    assert nightly.due("one") and run()["passed"] == 2 and not nightly.due("one")
    (tmp_path / "b.py").write_text("2")
    assert not nightly.due("one")
    (tmp_path / "a.py").write_text("2")
    assert nightly.due("one") and "right" in nightly.status()
    monkeypatch.setattr(nightly, "PARTS", {"one": nightly.Part("-v >/dev/null; exit 1", part.reads, "a part")})
    assert not run()["right"] and nightly.due("one") and "wrong" in nightly.status()
