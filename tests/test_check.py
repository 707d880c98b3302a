"""The check kit: right forms pass, wrong ones are caught and named, and no kernel can break it."""

import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import BREAK, DELTA, thin, with_o
from right_kernels import kernels

from gla_ref import FORMS, check, gla
from gla_ref.check import MECHANISMS, Case, oracle
from gla_ref.check._cases import GATES, inputs
from gla_ref.check._emulate import cut_, products_in
from gla_ref.check._examine import Examiner, reproduction
from gla_ref.check.oracle import evaluate

F32, BF16 = torch.float32, torch.bfloat16
GATED = FORMS["gla"]["chunkwise"]

QUICK = [  # a few cases of a form each; all are below
    ("softmax_attention", "flash", ("length 65", "packed", "strided", "steep*")),
    ("linear_attention", "chunkwise", ("length 65", "packed", "square", "frozen inputs")),
    ("simple_gla", "chunkwise", ("length 65", "packed", "gate -20")),
    ("gla", "chunkwise", ("length 65", "packed", "gate -20", "gate many resets", "strided", "state of*")),
    ("delta_rule", "chunkwise_substitution", ("strength 2",)),
    ("gated_delta_rule", "chunkwise", ("keys alike 0.9",)),
    ("kda", "chunkwise", ("value heads",)),
]


@pytest.mark.parametrize("mechanism, form, only", QUICK)
def test_right_forms_pass(mechanism, form, only):
    """Every form, on all cases, also in bfloat16: test_check_named.py."""
    check.kernel(mechanism, FORMS[mechanism][form], only=only).raise_if_failed()


ALL = [(mechanism, dtype) for mechanism in MECHANISMS for dtype in (F32, BF16)]
KINDS, RESETS_LONG = ("gate -1", "length 65", "*long"), ("gate many resets long", 1)
KERNELS = [
    (m, dtype, name)
    for m, dtype in ALL
    for name in (("length 65",) if m in DELTA else KINDS)
    if any(fnmatch(case.name, name) for case in check.cases(m))  # attention has no gates
]
FIRST = ("gla", F32, "gate -1"), ("kda", F32, "length 65")


@pytest.mark.parametrize("mechanism, dtype, name", thin(KERNELS, *FIRST))
def test_right_kernels_pass(mechanism, dtype, name):
    """On thousands of seeds too: benchmarks/results/nvidia-h200-false-alarms.json, which names its program."""
    for way, fn in kernels(mechanism, dtype).items():
        for seed in range(2):
            report = check.kernel(mechanism, fn, dtype=dtype, only=name, seed=seed)
            assert report.ok, (way, str(report))


def test_tiles_merged_in_log_space_pass():
    """Each merge rounds the log-sum-exp once more: 1.17 budgets before an emulated run merged, too."""
    fn = kernels("softmax_attention", F32)["log-sum-exp, tiles of 24"]
    check.kernel("softmax_attention", fn, dtype=F32, only="long cache*", seed=7).raise_if_failed()


@pytest.mark.parametrize("only, cases", thin([("random ?", 10), RESETS_LONG], RESETS_LONG))
def test_a_right_form_passes_what_the_full_level_adds(only, cases):
    report = check.kernel("gla", GATED, level="full", only=only)
    report.raise_if_failed()
    assert len({row.case for row in report.rows}) == cases and not report.reproduction


@pytest.mark.parametrize("seed", thin([2, 5], 5))
def test_one_product_over_480_tokens_passes(seed):
    """A right form whose sums are longer than an emulated chunk: 1.18 budgets at seed 5 without a run of its own."""
    check.kernel("linear_attention", FORMS["linear_attention"]["parallel"], seed=seed, only="480*").raise_if_failed()


@pytest.fixture
def forgetful(monkeypatch):
    """Problems are worked out anew: these tests spend the runs that a budget may ask for."""
    monkeypatch.setattr(oracle, "WORKED_OUT", {})


def posed(seed):
    """A problem with few sums, of 64 channels each, in which one order of a sum can be worse than sixteen others."""
    case = Case("wide keys and gate -20", T=83, K=64, V=20, gate="-20")
    return oracle.problems("gla", [case], F32, seed)[0]


def off_by(p, error):
    """p's output, one element of it wrong by so many rms of the last octave."""
    o = p.exact["o"].clone()
    o[0, 81, 1, 15] += error * p.units["o"][1]
    return o


def test_an_error_near_its_budget_is_judged_by_more_runs(forgetful):
    """Sums over channels in their own order err by 2.69e-6; sixteen lucks allowed 2.31e-6, and 128 allow 3.5e-6."""
    p = posed(17)
    error, budget = p.judge("o", off_by(p, 2.68e-6))
    assert error < budget


def test_more_runs_are_made_only_just_over_the_budget(forgetful, monkeypatch):
    monkeypatch.setattr(oracle, "ROUNDS", 3)  # what ends after the eighth ends after the third, too
    p = posed(3)
    first = p.budgets["o"][1]
    for error in (0.99, 1.01 * oracle.NEAR):
        p.judge("o", off_by(p, error * first))
    assert p.budgets["o"][1] == first
    error, budget = p.judge("o", off_by(p, 0.99 * oracle.NEAR * first))
    assert first <= budget < error and p.more.cache_info().currsize == 2
    assert p.judge("o", off_by(p, 0.5 * first))[1] == first  # whatever was judged before


@pytest.mark.deep
@pytest.mark.parametrize("name", BREAK)
def test_the_forms_that_break_are_told(name):
    mechanism, form = name.split(".")
    report = check.kernel(mechanism, FORMS[mechanism][form], only="[!s]*")
    failed = {row.case for row in report.failures}
    assert {"gate -20", "gate -inf", "gate many resets"} <= failed
    assert not {"length 65", "packed", "gate zero"} & failed


@pytest.mark.parametrize(
    "mechanism, runs", [("softmax_attention", 3), ("gla", 5), ("linear_attention", 5), ("delta_rule", 4), ("kda", 5)]
)
def test_emulated_runs_are_the_recurrence_when_they_round_nothing(mechanism, runs):
    kind, packed = MECHANISMS[mechanism], (0, 0, 33, 33, 40, 120, 130)
    assert len(kind.emulated + kind.plain + kind.beyond) == runs
    ways = [{"run": run, "sharp": sharp} for run, sharp in itertools.product(range(runs), (False, True))]
    ways += [{"sharp": True, "segments": 3}] if mechanism in DELTA else []
    cases = [Case(T=150, scale=-0.3, gate="mild and strong chunks", groups=1 + (mechanism in DELTA))]
    cases.append(Case(B=1, T=130, ends=packed, gate="many resets", state=not kind.cache))
    cases += [replace(case, optional=True) for case in cases if kind.optional]
    for case in cases:
        x = inputs(mechanism, case, torch.float32, seed=0)
        exact = evaluate(kind.oracle, kind, x, case)
        for way in ways:
            for name, y in evaluate(partial(kind.emulate, **way), kind, x, case).items():
                torch.testing.assert_close(y, exact[name], rtol=1e-11, atol=1e-11)


def late(q, k, v, g, **named):
    """Wrong for head 1 from token 37 on."""
    o, S = GATED(q, k, v, g, **named)
    wrong = (torch.arange(o.shape[1]) >= 37)[:, None, None] & (torch.arange(o.shape[2]) == 1)[:, None]
    return torch.where(wrong, 2 * o, o), S


def test_a_failure_is_shrunk_to_lines_that_run(capsys, monkeypatch):
    monkeypatch.setattr(Examiner, "explain", lambda *_: [])
    report = check.kernel("gla", late, level="full", only="length 65")
    case = "case = check.Case(name='smallest', B=1, T=38, H=2, K=1, V=1, state=False)"
    lines = " ".join(report.reproduction.split())
    assert case in lines and lines in " ".join(str(report).split()), lines
    exec(report.reproduction, {})
    printed = capsys.readouterr().out
    assert "WRONG" in printed and "t 37, chunk 0, sub-chunk 2, batch 0, head 1" in printed
    for gate in GATES:  # names with spaces are not broken in two
        case = Case(T=100, gate=gate, ends=(0, 10, 100), scale=-0.3, strides="misaligned")
        lines = reproduction("gla", late, case, F32, device="cuda:0", seed=3, layout="bhtd")
        assert f"gate={gate!r}" in lines or gate == case.gate == Case.gate
        assert max(map(len, lines.split("\n"))) <= 76
        compile(lines, "lines", "exec")


@pytest.mark.deep
def test_where_it_is_wrong():
    def change(o):
        o = o.clone()
        if o.shape[1] > 100:
            o[0, 110, 1, 4] += 1e-3
        return o

    report = check.kernel("gla", with_o(GATED, change), only="packed")
    (row,) = report.failures
    assert row.quantity == "o" and not report.diagnosis
    assert row.where == {"t": 110, "sequence": 4, "token": 70, "chunk": 1, "sub-chunk": 0, "head": 1, "channel": 4}
    assert "No named mistake" in str(report) and set(row.map) > {" "}
    assert ", ".join(f"{n} {i}" for n, i in row.where.items()) in " ".join(str(report).split())


@pytest.mark.deep
def test_the_failing_cases_are_listed_and_nan_is_no_infinity():
    def wrong(q, k, v, g, **named):
        o, S = GATED(q, k, v, g, **named)
        return o / (1 - 1.0 * (q.shape[1] == 63)), S / (0 if q.shape[1] == 64 else 1)

    def broken(*tokens, **named):
        o, S = wrong(*tokens, **named)
        return o.masked_fill(o.isinf(), math.nan), S

    for fn, error, word, sign in ((wrong, math.inf, "infinity", "∞"), (broken, math.nan, "NaN", "NaN")):
        report = check.kernel("gla", fn, only="length*")
        text, html = str(report), report._repr_html_()
        assert "Failing in 2 of 7 cases: length 63, length 64\n" in text and report.undiagnosed
        assert "Failing in 2 of 7 cases: length 63, length 64<" in html
        assert f"first wrong o of case length 63 ({word}):" in text
        line = next(line for line in text.splitlines() if line.startswith("o "))
        assert line.split()[3] == str(error) and f"<td>{sign}</td>" in html
        errors = {(row["case"], row["quantity"]): row["error"] for row in report.to_json()["rows"]}
        assert errors["length 63", "o"] == str(error)
    right = check.kernel("gla", GATED, only="length 1")
    assert not right.undiagnosed and "Failing" not in str(right)


@pytest.mark.deep
@pytest.mark.parametrize("least, lines", [(0, 1), (1, 5)])
def test_all_failing_cases_take_one_line_and_many_names_at_most_five(least, lines):
    def wrong(q, k, v, g, *, initial_state=None):
        o, S = GATED(q, k, v, g, initial_state=initial_state)
        return o * (1.0 + (q.shape[1] > least)), S

    report = check.kernel("gla", wrong)
    (part,) = (x for x in str(report).split("\n\n") if x.startswith("Failing in"))
    assert max(map(len, part.split("\n"))) <= 80
    part, *shared = part.split("\nOnly these have ")
    assert part.count("\n") + 1 == lines
    if lines > 1:
        assert part.endswith("[...]") and "gate mild and strong chunks" in part
        assert shared == ["more than 1 token in a sequence"]


@pytest.mark.deep
def test_a_mistake_that_would_show_where_the_kernel_passes_says_so():
    def unscaled(least):
        def fn(q, k, v, g, *, scale=None, **named):
            return GATED(q, k, v, g, scale=1.0 if q.shape[1] > least else scale, **named)

        return fn

    always, late = (check.kernel("gla", unscaled(T), only="gate *") for T in (0, 150))
    assert [match["mistake"] for match in always.diagnosis] == ["o without scale"]
    assert late.failing == ["gate many resets", "gate -1e-4 long", "gate -1 long"]
    named = f"o without scale, but not in {len(late.cases) - 3} other cases"
    assert [match["mistake"] for match in late.diagnosis] == [named]
    assert any("right with 150" in line for line in late.measured)


def writing(q, k, v, g, **named):
    result = GATED(q, k, v, g, **named)
    k.data.mul_(2)
    return result


def sleeping(q, k, v, g, **named):
    time.sleep(5.0 if q.shape[1] == 1 else 0)
    return GATED(q, k, v, g, **named)


def raising(q, k, v, g, **named):
    if q.shape[1] == 64:
        raise RuntimeError("out of tiles")
    return GATED(q, k, v, g, **named)


@pytest.mark.parametrize(
    "fn, kind, cases",
    [
        (lambda *x, **named: None, "none", 3),
        (lambda q, k, v, g, **named: (q, None), "shape", 3),
        (lambda *x, **named: (GATED(*x, **named)[0].double(), None), "dtype", 3),
        (lambda *x, **named: (GATED(*x, **named)[0].to("meta"), None), "device", 3),
        (lambda *x, **named: "o", "type", 3),
        (with_o(GATED, lambda o: o * (1 + 1e-7 * torch.rand_like(o))), "differs", 3),
        (writing, "modified", 3),
        (sleeping, "hangs", 1),
        (lambda *x, **named: raising(*x, **named), "raises", 1),  # not called again in a process of its own
        (with_o(GATED, lambda o: o + 0 * torch.empty_like(o)), "not finite", 3),
    ],
)
def test_bad_manners_are_findings_and_the_other_cases_run(fn, kind, cases):
    limit = 4.0 if fn is sleeping else 30.0
    report = check.kernel("gla", fn, only=["length 1", "length 7", "length 64"], time_limit=limit)
    found = [row for row in report.failures if row.kind == kind]
    assert len({row.case for row in found}) == cases and not report.ok
    assert len({row.case for row in report.rows}) == 3
    assert {"not finite": "(NaN)"}.get(kind, kind) in str(report)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_kit_judges_inside_inference_mode_as_outside(mode):
    def wrong(q, k, v, g, **options):
        return GATED(q, k, v, 2 * g, **options)

    outside = [str(check.kernel("gla", fn, only="length 7")) for fn in (GATED, wrong)]
    with mode():
        inside = [str(check.kernel("gla", fn, only="length 7")) for fn in (GATED, wrong)]
        x = {n: y.float() for n, y in inputs("gla", Case(T=7), torch.float32, seed=0).items()}
        right, low = oracle.exact("gla", x), oracle.emulated("gla", x)
    assert inside == outside and "WRONG" in inside[1] and "WRONG" not in inside[0]
    assert {"o", "S", "dg"} <= {*right} & {*low[0]}


def test_a_kernel_that_hangs_is_stopped():
    """Else it would go on beside other cases, and could abort the process when that exits."""
    threads = []

    def spins(q, k, v, g):
        threads.append(threading.current_thread())
        while True:
            q = q + 1

    report = check.kernel("gla", spins, only="length 1", time_limit=0.1)
    assert {row.kind for row in report.failures} == {"hangs"}
    assert threads and not any(thread.is_alive() for thread in threads)
    assert torch.get_deterministic_debug_mode() == 0


def test_a_call_that_is_stopped_before_the_kernel_leaves_no_mode_behind(monkeypatch):
    set_mode = torch.set_deterministic_debug_mode

    def slow(mode):
        set_mode(mode)
        for _ in range(50 * (mode == "warn")):  # PyTorch under load
            time.sleep(0.01)

    monkeypatch.setattr(torch, "set_deterministic_debug_mode", slow)
    report = check.kernel("gla", GATED, only="length 1", time_limit=0.1)
    assert {row.kind for row in report.failures} == {"hangs"}
    assert torch.get_deterministic_debug_mode() == 0


ENDS_LATE = """
import sys, torch
from gla_ref import check

def slow(q, k, v, g):
    x = torch.ones(2000, 2000)
    while True:
        x @ x

check.kernel("gla", slow, only="length 1", time_limit=0.1)
sys.exit(3)
"""


@pytest.mark.deep
def test_a_kernel_that_hangs_leaves_the_exit_status():
    """Python's lock is free during a product, so the thread takes it afterwards, which may be when Python ends."""
    environment = os.environ | {"PYTHONPATH": str(Path(check.__file__).parents[2])}
    command = [sys.executable, "-c", ENDS_LATE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and not done.stderr


def test_an_error_that_the_device_does_not_survive_is_no_refusal(monkeypatch):
    def lost(*args, **named):
        raise torch.AcceleratorError("CUDA error: misaligned address")

    def breaks(q, k, v, g, **named):
        monkeypatch.setattr(torch, "zeros", lost)
        lost()

    report = check.kernel("gla", breaks, only=("transposed", "expanded"))  # which a kernel may refuse
    (row,) = report.failures
    assert (row.case, row.kind) == ("transposed", "breaks")
    assert report.not_covered == {"cases after those that broke their processes": 1}
    assert report.verdict == "WRONG" and "CUDA error: misaligned address" in str(report)


@pytest.mark.parametrize("breaks, tried", [(4, 2), (5, 0)])
def test_a_kernel_breaks_so_many_processes_and_no_more(breaks, tried):
    cases = [f"length {T}" for T in (1, 7, 63, 64, 65, 128, 145)]
    journal = {case: [check.Row(case, "call", "failed", "breaks")] for case in cases[:breaks]}
    report = check.kernel("gla", GATED, only=cases[: breaks + 2], journal=journal)
    assert len({row.case for row in report.rows if row.status == "passed"}) == tried
    assert len(report.failing) == breaks


def test_what_is_not_covered_is_said():
    def forward(q, k, v, g):
        with torch.no_grad():
            return GATED(q, k, v, g)[0]

    report = check.kernel("gla", forward, only="[ps]*")
    assert report.ok and "Not covered" in str(report)
    assert {"S", "dq", "dg", "initial state", "scale", "packed sequences"} <= set(report.not_covered)
    assert {row.quantity for row in report.rows if row.status == "passed"} == {"o"}


def test_a_kernel_that_refuses_gradients_is_checked_without():
    calls = []

    def refuses(q, k, v, g):
        calls.append(torch.is_grad_enabled())
        if calls[-1]:
            raise ValueError("q: expected a tensor that needs no gradient")
        return GATED(q, k, v, g)

    assert {r.kind for r in check.kernel("gla", refuses, only="length 63").failures} == {"raises"}
    calls.clear()
    report = check.kernel("gla", refuses, forward_only=True, only="length 63")
    assert report.ok and calls == [False, False]
    assert {"dq", "dk", "dv", "dg"} <= set(report.not_covered)
    assert {row.quantity for row in report.rows if row.status == "passed"} == {"o", "S"}


@pytest.mark.deep
def test_a_small_error_is_not_blamed_on_a_mistake_that_does_not_show():
    """One percent, near the budgets of bf16: mistakes that are as near to what is right explain nothing."""
    larger = with_o(GATED, lambda o: (1.01 * o.float()).to(o.dtype))
    report = check.kernel("gla", larger, dtype=BF16, only="s*")
    assert not report.ok and not report.diagnosis


@pytest.mark.deep
def test_decays_are_gates_too():
    def alpha(q, k, v, a, *, initial_state=None):
        S, o = 0 if initial_state is None else initial_state, []
        for t in range(q.shape[1]):
            S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
            o.append(q.shape[-1] ** -0.5 * (q[:, t, :, :, None] * S).sum(-2))
        return torch.stack(o, 1), S

    check.kernel("gla", alpha, gate="alpha", only="gate [-m]*[!g]").raise_if_failed()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mechanism": "delta"}, "mechanism: expected one of"),
        ({"dtype": torch.float64}, "dtype: expected one of"),
        ({"level": "slow"}, "level: expected 'quick' or 'full'"),
        ({"only": "nothing"}, "only: expected a pattern"),
        ({"layout": "tbhd"}, "layout: expected one of"),
        ({"gate": "sigmoid"}, "gate: expected one of"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        check.kernel(**{"mechanism": "gla", "fn": gla.recurrent, **options})


def test_json_has_its_schema():
    report = check.kernel("gla", with_o(GATED, lambda o: o / 0), only="length 65")
    assert not report.reproduction  # of the full level only
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    names = "schema ok verdict settings ladder made left skipped cases rows common diagnosis next not_covered alone"
    assert set(data) == {*names.split(), "measured", "smallest", "reproduction"}
    settings = "mechanism device dtype level only seed layout state gate forward_only defaults supports waive"
    assert set(data["settings"]) == {*settings.split(), "fail_on_not_covered"}
    assert check.Case(**data["cases"]["length 65"]) == report.cases["length 65"]
    assert data["schema"] == 4 and data["ok"] is False
    keys = {*"case quantity status kind error budget message waived where only map grid".split()}
    assert all(set(row) == keys for row in data["rows"])
    assert {row["status"] for row in data["rows"]} <= {"passed", "failed", "not covered"}
    assert "inf" in [row["error"] for row in data["rows"]]
    assert report._repr_html_().startswith("<div")
    with pytest.raises(AssertionError, match="WRONG"):
        report.raise_if_failed()


def test_a_sum_is_cut_off_to_float32_towards_zero():
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.cat([exact, exact * 1e30, torch.tensor([0.0, 1.0, -torch.inf])])
    below = exact.float()
    beyond = below.double().abs() > exact.abs()
    assert 800 < beyond.sum() < 1200
    below = torch.where(beyond, below.nextafter(torch.zeros(())), below)
    assert torch.equal(cut_(exact.clone()), below.double())


def test_products_that_an_einsum_would_hide_are_refused():
    x = torch.ones(2, 2)
    with products_in(F32), pytest.raises(NotImplementedError, match="einsum: expected products written x @ y"):
        torch.einsum("ij,jk->ik", x, x)


@pytest.mark.parametrize("mechanism, V", [("softmax_attention", 256), ("gla", 512)])
def test_values_are_as_wide_as_the_mechanism_says(mechanism, V):
    widest = max(check.cases(mechanism, "full"), key=lambda case: case.V)
    assert (widest.K, widest.V, widest.name) == (256, V, f"sizes B=1 H=1 K=256 V={V}")
