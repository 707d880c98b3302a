"""Copies of the delta rule's Hopper page without a part of its work (benchmarks/parts.py)."""

import ast
import json
import sys
from collections import Counter
from types import SimpleNamespace

import played_gluon
import pytest
import torch
from cases import ROOT, in_process
from delta_problems import problem
from harness import BF16, CUDA, F32

from gla_ref import results

sys.path.append(str(ROOT / "benchmarks"))
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
import parts
import waits

NAMES = [v.taken for v in parts.VARIANTS]
WHOLE = {name: dict.fromkeys(part.kinds, 8) for name, part in parts.WORK.items()}
played_here = pytest.mark.skipif(CUDA, reason="played on a CPU")


def variant(name):
    return parts.VARIANTS[NAMES.index(name)]


def counts_without(v):
    return {name: dict.fromkeys(kinds, 0 if name in v.gone else 8) for name, kinds in WHOLE.items()}


@pytest.fixture(scope="module")
def tokens():
    x, _ = problem("gated_delta_rule", 1, 300, 1, 128, 128, dtype=BF16, gates=F32, groups=2)
    return {n: x[n] for n in waits.NAMES}


def play(module, x, monkeypatch):
    """o and S, and how often each role waited and signalled."""
    seen = Counter()

    def count(name):
        call = getattr(played_gluon.STANDS_IN["mbarrier"], name)

        def counted(*args, **named):
            if played_gluon.me() != "the prologue":
                seen[played_gluon.PLAY.pid, played_gluon.me(), name] += 1
            return call(*args, **named)

        return counted

    with monkeypatch.context() as patch:
        for name in ("wait", "arrive", "expect"):
            patch.setattr(played_gluon.STANDS_IN["mbarrier"], name, count(name))
        o, S, _ = played_gluon.play(parts.planned(module, x), x, (module,))
    return o, S, seen


@pytest.fixture(scope="module")
def right(tokens):
    with pytest.MonkeyPatch.context() as patch:
        return play(parts.page, tokens, patch)


@played_here
@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_missing_and_every_role_waits_and_signals_as_often(name, tokens, right, monkeypatch):
    """No role waits for ever, and the whole kernel makes the page's bits."""
    o, S, seen = play(parts.made(variant(name)), tokens, monkeypatch)
    assert seen == right[2] and len(seen) == 2 * 4 * 2  # heads, roles, kinds of call
    assert (name == "nothing") == (torch.equal(o, right[0]) and torch.equal(S, right[1]))


@pytest.mark.parametrize(
    "change, message",
    [
        (parts.put("times", "mma_v2(x, B, acc)", "acc"), r"^times: expected one `mma_v2\(x, B, acc\)`, got 0"),
        (parts.put("solver", "fence()", "none()"), None),
        (parts.put("inverse", "times(Y_3, t_N, 3, 1)", "none"), "^inverse: expected one"),
        (parts.put("walker", "fence()", "none()"), r"^walker: expected one `fence\(\)`, got 5"),
        (parts.put("talker", "fence()", "none()"), "^page: expected one function talker, got 0"),
        (parts.idle("inverse"), "^inverse: expected one loop over chunks"),
        (
            parts.put("solver", "mbarrier.wait(ready.index(s), c // STAGES & 1)", "none"),
            "expected the barriers of solver",
        ),
    ],
)
def test_a_place_that_is_not_there_or_a_barrier_is_refused(change, message):
    changed = parts.Variant("a test", (), (), (change,))
    if message is None:
        assert "none()" in parts.inspect.getsource(parts.made(changed))
    else:
        with pytest.raises(ValueError, match=message):
            parts.made(changed)


LISTING = """
	//## File "/somewhere/page.py", line 2
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR32].tnspB, RZ, !UPT ;
	//## File "/somewhere/triton/language/standard.py", line 2
        /*0020*/              @!P0 HGMMA.64x64x16.F32.BF16 R56, gdesc[UR32].tnspB, R56, gsb0 ;
        /*0030*/                   MUFU.EX2 R2, R21 ;
	//## File "/somewhere/page.py", line 8
        /*0040*/                   MUFU.EX2 R2, R21 ;
        /*0050*/                   MUFU.RCP R2, R21 ;
	//## File "/somewhere/page.py", line 4
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR32].tnspB, RZ, !UPT ;
        /*0070*/                   FFMA R2, R2, R3, R4 ;
	//## File "/somewhere/page.py", line 6
        /*12340*/                  FFMA R2, R2, R3, R4 ;
        /*12350*/                  HMMA.1688.F32.TF32 R36, R32, R36, RZ ;
        /*12360*/            @P1   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ ;
"""
SOURCE = "def walker():\n    pass\ndef solver():\n    pass\ndef inverse():\n    pass\ndef walk():\n    pass\n"


def test_instructions_belong_to_the_function_whose_line_was_marked_last(tmp_path, monkeypatch):
    monkeypatch.setattr(parts.inspect, "getsource", lambda module: SOURCE)
    found = parts.counted(LISTING, SimpleNamespace(__file__=str(tmp_path / "page.py")))
    want = {
        "barriers": {"SYNCS.ARRIVE": 1, "SYNCS.PHASECHK": 0},
        "loader": {"UTMALDG": 0},
        "solver": {"HGMMA": 1, "MUFU.EX2": 0},
        "elimination": {"FFMA": 1},
        "products": {"HMMA": 1},
        "walkers": {"HGMMA": 2, "MUFU.EX2": 2, "UTMASTG": 0},
    }
    assert found == want


LOOPS = """
.L_x_1:
        /*0010*/                   HMMA.1688.F32.TF32 R36, R32, R36, RZ ;
.L_x_2:
        /*0020*/                   HMMA.1688.F32.TF32 R36, R32, R36, RZ ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_3:
        /*0040*/                   FFMA R2, R2, R3, R4 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
.L_x_4:
        /*0070*/               @P0 BRA `(.L_x_4) ;
"""


def test_instructions_of_the_smallest_loop_with_a_kind_are_counted():
    assert parts.in_loop(LOOPS, "HMMA") == 4 and parts.in_loop(LOOPS, "BRA") == 1
    with pytest.raises(ValueError, match="^expected a loop with HGMMA, got none"):
        parts.in_loop(LOOPS, "HGMMA")


def test_counts_tell_what_the_compiler_removed():
    for v in parts.VARIANTS:
        parts.check_counts(v, counts_without(v), WHOLE)
        for name, kinds in WHOLE.items():
            for kind in kinds:
                wrong = counts_without(v)
                wrong[name][kind] = 1 if name in v.gone else 7
                with pytest.raises(ValueError, match=rf"^without {v.taken}: expected [08] {kind} for {name}, got [17]"):
                    parts.check_counts(v, wrong, WHOLE)


def test_a_whole_kernel_without_marks_is_refused():
    none = {name: dict.fromkeys(kinds, 0) for name, kinds in WHOLE.items()}
    with pytest.raises(ValueError, match="^without nothing: expected 0 .* the whole kernel has 0"):
        parts.check_counts(variant("nothing"), none, none)


def test_every_function_that_a_part_names_is_one_of_the_page():
    tree = ast.parse(parts.inspect.getsource(parts.page))
    for part in parts.WORK.values():
        assert all(parts.function(tree, name) for name in part.functions)


class PlayedProgram:
    """A plan's program, whose only launch is played."""

    def __init__(self, plan, device):
        self.plan, self.steps = plan, [(lambda values: self(values[1:]), ())]

    def __call__(self, inputs):
        module = self.plan.launches[-1].kernel.fn.__globals__
        named = {spec.name: x for spec, x in zip(self.plan.inputs, inputs, strict=True)}
        return played_gluon.play(self.plan, named, (SimpleNamespace(**module),))[:2]


@played_here
def test_the_program_that_measures(monkeypatch, capsys, tmp_path):
    """It checks the whole kernel, counts, times and writes; a variant with wrong counts is refused and not timed."""
    taken = {parts.made(v).__name__: v for v in parts.VARIANTS}

    def counts_of(module, x):
        found = counts_without(taken[module.__name__])
        if "products" in module.__name__:
            found["walkers"]["HGMMA"] = 7
        return found

    monkeypatch.setattr(parts, "SHAPES", [(1, 128, 1, 2)])
    monkeypatch.setattr(parts, "counts_of", counts_of)
    monkeypatch.setattr(waits, "Program", PlayedProgram)
    monkeypatch.setattr(parts.run, "median_ms", lambda calls, seconds: (0.5, []))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    path, environment = tmp_path / "parts.json", {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}

    def keep(record):
        results.merge(path, environment, "parts", [record], parts.KEY)
        parts.say(record)

    for _ in range(2):  # the second run replaces the records of the first
        wrong = parts.measure(keep, 1, "cpu")
        assert wrong == [
            "1 x 128: without the products of blocks: expected 8 HGMMA for walkers, got 7; the whole kernel has 8"
        ]
    found = results.parts(results.load("h200", tmp_path, kind="parts"), B=1, HV=2)
    assert list(found) == [name for name in NAMES if name != "the products of blocks"]
    assert all(r["ms"] == 0.5 and r["us_a_chunk"] == 125 for r in found.values()), "two programs, of two chunks each"
    assert 0 < found["nothing"]["error"] <= found["nothing"]["budget"]
    assert found["the walkers' work"]["working"] == ["loader", "solver"]
    assert found["the walkers' work"]["counts"]["walkers"]["HGMMA"] == 0
    assert "without the work of both" in capsys.readouterr().out
    assert results.parts(None, B=1) == results.parts(json.loads(path.read_text()), B=2) == {}


@played_here
def test_a_whole_kernel_that_is_wrong_stops_its_shape(monkeypatch):
    monkeypatch.setattr(parts, "SHAPES", [(1, 128, 1, 2)])
    monkeypatch.setattr(parts, "counts_of", lambda module, x: WHOLE)
    monkeypatch.setattr(waits, "Program", PlayedProgram)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    broken = parts.Variant("nothing", parts.ROLES, (), (parts.put("walker", "gl.exp2(b)", "1.0"),))
    monkeypatch.setattr(parts, "VARIANTS", (broken, *parts.VARIANTS[1:]))
    (wrong,) = parts.measure(pytest.fail, 132, "cpu")
    assert wrong.startswith("1 x 128: nothing, ")


COMPILED = """
import json, sys, tempfile
sys.path[:0] = ["tools", "benchmarks", "src"]
import compile_kernels, parts, torch, waits
with tempfile.TemporaryDirectory() as cache:
    compile_kernels.begin(cache)
    x = {n: torch.empty(8, 8192, 16, 128, dtype=torch.bfloat16, device="meta") for n in waits.NAMES}
    x |= {n: x[n][..., 0] for n in ("g", "beta")}
    for variant in parts.VARIANTS:
        module = parts.made(variant)
        row = compile_kernels.compiled(parts.planned(module, x).launches[-1], 90)
        print("copy", json.dumps([variant.taken, row["broken"], row["registers"], parts.counts_of(module, x)]))
    (case,) = compile_kernels.launches(90, "delta hopper page")
    x |= {n: torch.empty(16, 240, 16, 128, dtype=torch.bfloat16, device="meta") for n in "qk"}
    x |= {"v": torch.empty(16, 240, 32, 128, dtype=torch.bfloat16, device="meta")}
    x |= {n: torch.empty(16, 240, 32, device="meta") for n in ("g", "beta")}
    print("page", parts.planned(parts.page, x).launches[-1][1:] == case[1:])
"""


@pytest.mark.deep
def test_the_compiled_copies_lack_their_part_and_no_other():
    said = in_process("-c", COMPILED)
    rows = [json.loads(line[5:]) for line in said.splitlines() if line.startswith("copy ")]
    assert [row[0] for row in rows] == NAMES and "page True" in said
    _, _, registers, whole = rows[0]
    for name, broken, own, counts in rows:
        assert broken == [] and own == registers
        parts.check_counts(variant(name), counts, whole)
    assert whole["walkers"]["HGMMA"] == 64 and whole["solver"]["HGMMA"] == 16, "16 columns or rows each, of 64 or 128"
    assert whole["elimination"]["FFMA"] == 15 * 16 and whole["products"]["HMMA"] == 10 * 4
