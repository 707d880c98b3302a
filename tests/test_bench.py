"""The bench's own judgement: its oracles against the recurrent forms, its budgets, its suites, its records."""

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import check_peers
import compile_peers
import fla_tests
import run
import suites
import timing
import versions
from contenders import CONTENDERS

from gla_ref import FORMS, results
from gla_ref.book import who_passes
from gla_ref.check import MECHANISMS, oracle
from gla_ref.check._emulate import Attend
from gla_ref.check._examine import Examiner


def recurrence(mechanism, x, **options):
    """o and the gradient of every leaf of a suite's inputs."""
    leaves = {n: x[n] for n in suites.LEAVES if n in x}
    o, _ = FORMS[mechanism]["recurrent"](**leaves, **options)
    grads = torch.autograd.grad(o, [*leaves.values()], x["do"])
    return {"o": o.detach()} | {f"d{n}": d for n, d in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_bench_judges_by_the_recurrent_form(mechanism, monkeypatch):
    monkeypatch.setattr(Attend, "ROWS", 32)  # several tiles of queries
    gates = "logsigmoid/16" if MECHANISMS[mechanism].named("gate") else None
    case = suites.Case(mechanism, 1, 150, 1, 5, 7, dtype="float64", gates=gates)
    x = suites.inputs(case, seed=1, device="cpu")
    leaves, want = {n: x[n] for n in suites.LEAVES if n in x}, recurrence(mechanism, x)
    x = {n: y.detach() for n, y in (leaves | {"d o": x["do"]}).items()}
    (run,) = oracle.emulated(mechanism, x, copies=1, chosen=[0], sharp=False)
    for found in (oracle.exact(mechanism, x), run):
        for n, y in want.items():
            torch.testing.assert_close(found[n], y)

    half = {n: y.bfloat16() for n, y in x.items()}
    exact, (low,) = oracle.exact(mechanism, half), oracle.emulated(mechanism, half, copies=1, chosen=[0], sharp=False)
    assert low["o"].dtype == torch.bfloat16
    for n in want:
        assert 1e-3 < oracle.error(low[n], exact[n]) < 0.1, n
    assert all(e <= b for e, b in oracle.judge(mechanism, {n: low[n] for n in want}, exact, [low]).values())
    late = low["o"].clone()
    late[:, -3:] *= 1.5  # small values late in a sequence still count
    e, budget = oracle.judge(mechanism, {"o": late}, exact, [low])["o"]
    assert e > budget


def test_a_key_head_is_judged_with_all_its_value_heads():
    case = suites.Case("gated_delta_rule", 2, 70, 2, 5, 7, dtype="float32", gates="logsigmoid/16", groups=2, state=True)
    x = suites.inputs(case, seed=1, device="cpu")
    got, truth = recurrence("gated_delta_rule", x, initial_state=x["initial_state"]), run.Truth(case, x)
    verdict = truth.judge(got)
    assert set(verdict) == set(got) and all(e <= budget for e, budget in verdict.values()), verdict
    assert truth.judge({"o": got["o"]})["o"] == verdict["o"]  # a forward pass has nothing with as many heads as q
    got["dk"] += 0.01
    e, budget = truth.judge(got)["dk"]
    assert e > budget


def test_every_suite_has_cases_and_contenders():
    for suite in suites.SUITES.values():
        for case in suite():
            assert case.mechanism in CONTENDERS and case.mechanism in MECHANISMS
            assert sum(case.lengths or (case.T,)) == case.T
            assert {c.name for c in run.contenders_of(case)} >= set(case.only or {"triton"})
            for direction in case.directions:
                assert suites.memory_floor_bytes(case, direction) > 0
                assert suites.flop_floor(case, direction) > 0


@pytest.mark.parametrize("suite", ["decode", "decode_delta"])
def test_decoding_reads_and_writes_the_state_for_every_token(suite):
    case = suites.SUITES[suite]()[0]
    steps = next(c for c in CONTENDERS[case.mechanism] if c.name == "triton_recurrent_steps")
    tokens = suites.replace(case, T=3, H=2, K=4, V=5, dtype="float32")
    x = suites.inputs(tokens, seed=1, device="cpu")
    x = {n: x[n].detach() for n in tokens.given}
    want, _ = FORMS[case.mechanism]["recurrent"](**x)
    if run.torch.cuda.is_available():
        x = {n: y.cuda() for n, y in x.items()}
    torch.testing.assert_close(steps.call(tokens, **x).cpu(), want)
    whole = suites.memory_floor_bytes(case, "forward")
    state = 2 * 4 * case.K * case.V * case.B * case.T * (case.value_heads or case.H)
    assert whole - state == suites.memory_floor_bytes(suites.replace(case, decode=False), "forward")


def test_a_new_record_replaces_the_old_one(tmp_path):
    path = tmp_path / "gpu.json"
    record = {n: 1 for n in run.IDENTITY}
    before, now = {"gpu": "a", "peers": {"x": "1", "y": "1"}}, {"peers": {"x": None, "y": "2"}}
    results.merge(path, before, "records", [record | {"ms": 1.0}, record | {"T": 2, "ms": 2.0}], run.IDENTITY)
    results.merge(path, now, "records", [record | {"ms": 3.0}], run.IDENTITY)
    found = json.loads(path.read_text())
    assert found["environment"] == {"peers": {"x": "1", "y": "2"}}
    assert [r["ms"] for r in found["records"]] == [3.0, 2.0]


def test_late_calls_are_cut_off():
    with pytest.raises(timing.Late, match="did not return within 1 s"), timing.limit(1):
        while True:
            pass


def wrong_library(monkeypatch):
    """A library named fla whose chunk_gla loses the last gate."""

    def chunk_gla(q, k, v, g, output_final_state, **named):
        g = torch.cat([g[:, :-1], torch.zeros_like(g[:, -1:])], 1)
        return FORMS["gla"]["chunkwise"](q, k, v, g, **named)

    for name in ("fla", "fla.ops", "fla.ops.gla"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.ops.gla"].chunk_gla = chunk_gla


def test_a_checked_peer_is_recorded_and_its_failure_runs_again(monkeypatch, capsys):
    wrong_library(monkeypatch)
    options = {"device": "cpu", "level": "quick", "only": "length 1"}
    found = check_peers.judge("fla.chunk_gla", "fp32", 3, options)
    json.dumps(found, allow_nan=False)
    assert found["ok"] is False and found["cases"] == 1 and found["worst"]["o"] > 1
    first = found["failures"][0]
    assert (first["case"], first["quantity"]) == ("length 1", "o") and first["where"]["t"] == 0
    record = found | {"device": "cpu"}
    exec(who_passes._lines(who_passes.Row("fla.chunk_gla", "fp32", "CPU", record)), {})
    printed = capsys.readouterr().out
    assert "gla on cpu in float32, quick, seed 0: WRONG" in printed and "length 1" in printed
    assert {"fla.chunk_gla", "gla.triton", "simple_gla.triton"} <= set(check_peers.SUBJECTS)
    assert check_peers.kernel("gla.triton")[0] == "gla"


def test_a_wrong_number_comes_before_a_refusal(monkeypatch):
    def picky(q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None):
        if scale is not None:
            raise ValueError("scale: expected None")
        if cu_seqlens is not None:
            v = 2 * v
        return FORMS["gla"]["chunkwise"](q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens)

    monkeypatch.setattr(Examiner, "explain", lambda *_: [])
    monkeypatch.setitem(FORMS["gla"], "own", picky)
    only = "scale given", "packed with other boundaries"
    found = check_peers.judge("gla.own", "fp32", 1, {"device": "cpu", "level": "quick", "only": only})
    kinds = [failure["kind"] for failure in found["failures"]]
    assert kinds[0] == "error" and kinds[-1] == "raises"


def test_a_kernel_is_checked_on_several_seeds_up_to_the_first_failure(monkeypatch):
    def only_without_gradients(q, k, v, g):
        if torch.is_grad_enabled():
            raise ValueError("no")
        return FORMS["gla"]["recurrent"](q, k, v, g)

    later, asked = -1, []
    right = check_peers.check.kernel

    def counted(*args, seed, **named):
        asked.append(seed)
        if seed == later:
            named["forward_only"] = False
        return right(*args, seed=seed, **named)

    monkeypatch.setattr(check_peers.check, "kernel", counted)
    monkeypatch.setitem(FORMS["gla"], "own", only_without_gradients)
    options = {"device": "cpu", "level": "quick", "only": "length 7"}
    found = check_peers.judge("gla.own forward", "fp32", 3, options)
    assert found["ok"] and found["cases"] == 3 and asked == [0, 1, 2] and "dq" in found["not_covered"]
    later = 1
    found = check_peers.judge("gla.own forward", "fp32", 3, options)
    assert not found["ok"] and found["cases"] == 2 and asked[3:] == [0, 1]


CALLS = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["GLA_REF_CHILD"])
names = json.loads((folder / "cases").read_text())
kept = (folder / "rows").read_text() if (folder / "rows").exists() else ""
for name in names or ():
    if json.dumps(name) not in kept:
        (folder / "place").write_text(name)
        {body}
        row = dict(case=name, quantity="o", status="passed", error=1e-9, budget=1e-6)
        with open(folder / "rows", "a") as file:
            file.write(json.dumps([name, [row]]) + chr(10))
if names is None:
    (folder / "found").write_text(json.dumps(dict(ok="breaks" not in kept, worst=dict(o=1), rows_were=kept)))
"""
BODIES = {  # what a process does in the first case that it has not called: verdict, message, cases with rows
    "pass": (True, None, 3),
    "if name == names[1]: os.kill(os.getpid(), signal.SIGABRT)": (False, None, 3),
    "if name == names[1]: print('no memory'); sys.exit(3)": (None, "exit status 3: no memory", 1),
    "if name == names[2]: time.sleep(60)": (None, "not done after 1 s: ", 2),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_check_in_processes_goes_on_with_the_cases_that_are_left(tmp_path, monkeypatch, body):
    child, (ok, message, cases) = tmp_path / "child.py", BODIES[body]
    child.write_text(CALLS.format(body=body))
    monkeypatch.setattr(check_peers, "__file__", str(child))
    args = argparse.Namespace(seeds=1, commit="c", triton="3", device="cpu", seconds=1.0)
    it = check_peers.Check("fla.chunk_gla", "bf16", "quick", shares=1)
    names = [case.name for case in it.cases()][:3]
    record = it.record(it.share(names, args), args)
    assert (record["message"], record["ok"], len(it.rows)) == (message, ok, cases)
    assert ok is not None or "none" in check_peers.line(record)
    if body.endswith("SIGABRT)"):
        assert '"message": "ended by SIGABRT", "kind": "breaks"' in record["rows_were"]
    path = tmp_path / "gpu-check.json"
    for seconds in (1.0, 2.0):
        results.merge(path, {"gpu": "X"}, "checks", [record | {"seconds": seconds}], check_peers.KEY)
    (read,) = json.loads(path.read_text())["checks"]
    assert read["seconds"] == 2.0
    if ok is None:  # the next call knows the rows, and has the other cases left
        assert (read["cases"], read["of"]) == (cases, cases + len(it.cases()))
        args = argparse.Namespace(device="cpu", only="fla.chunk_gla", dtypes=["bf16"], levels=["quick"], seeds=1)
        args.libraries = args.unfinished = False
        monkeypatch.setattr(check_peers, "SUBJECTS", ["fla.chunk_gla"])
        monkeypatch.setattr(check_peers, "LIBRARIES", [])
        (again,) = check_peers.chosen(args, {tuple(read[n] for n in check_peers.KEY): read})
        assert again.rows == it.rows and again.seconds == 2.0


def test_peers_are_not_searched(monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
    monkeypatch.setattr(triton.runtime.Autotuner, "__init__", triton.runtime.Autotuner.__init__)  # put back
    check_peers.one_configuration()
    config = [triton.Config({}, num_warps=n) for n in (2, 4)]
    assert [c.num_warps for c in triton.autotune(config, key=[])(triton.jit(wrong_library)).configs] == [2]


def test_peers_configurations_are_shared_out(monkeypatch):
    """Every configuration is compiled by one process and measured by none."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    config = types.SimpleNamespace(num_stages=2, all_kwargs=lambda: {"num_warps": 4})
    compiled = []
    for piece in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(autotuner.Autotuner, "_bench", autotuner.Autotuner._bench)  # put back
            compile_peers.share(piece, 3)
            for n in range(7):
                fn = types.SimpleNamespace(run=lambda *_, n=n, **named: compiled.append((n, named)))
                search = types.SimpleNamespace(fn=fn, base_fn=fn)
                autotuner.Autotuner._bench(search, config=config, warmup=False)
    assert sorted(n for n, _ in compiled) == list(range(7))
    assert all(named == {"warmup": True, "num_warps": 4} for _, named in compiled)


def test_a_share_whose_kernel_is_too_large_goes_on_with_the_next_shape(monkeypatch, capsys):
    """fla launches the configuration that the share takes for the best, even if no configuration of the share fits."""
    from triton.runtime.errors import OutOfResources

    called = []

    def operator_once(name):
        if name == "64/64":
            raise OutOfResources(237568, 232448, "shared memory")
        called.append(name)

    monkeypatch.setattr(compile_peers, "share", lambda *pieces: called.append(pieces))
    monkeypatch.setattr(compile_peers, "operator_once", operator_once)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", "compile_peers DIR --shapes 64/64 128/128 --jobs 14 --piece 3".split())
    compile_peers.main()
    assert called == [(3, 14), "128/128"]
    said = capsys.readouterr().out
    assert said.startswith("share 3 of 14 ends 64/64 early: ") and "Required: 237568" in said and said.count("\n") == 1


def test_peers_shapes_are_those_of_the_suite():
    found = {(c.B, c.H, c.K, c.V) for c in compile_peers.shapes().values()}
    heads = {(1, H, 128, 128) for H in (12, 16, 24)}  # of KDA
    assert found == {(c.B, c.H, c.K, c.V) for c in suites.SUITES["gla"]()} | {(2, 4, 64, 64)} | heads


def test_new_times_of_a_version_replace_those_of_the_same_cases():
    first, second, again = (
        {"suite": "gla", "direction": d, "ms": ms} for d, ms in (("forward", 1), ("backward", 2), ("forward", 3))
    )
    assert versions.update({"times": [first, second]}, {"times": [again]}) == {"times": [again, second]}


def test_a_row_names_its_assembler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert run.assembler() == "13.4.59"  # the second ptxas in the pinned wheel


@pytest.mark.deep
def test_the_tests_of_a_library_are_counted_once_over_several_calls(tmp_path):
    """No function is replaced, and a first call has run some of the tests."""
    files = {f"tests/ops/test_{suite}.py": "" for suite in fla_tests.SUITES}
    files |= {"lib/fla/__init__.py": "", "lib/fla/ops/__init__.py": ""}
    files["tests/ops/test_gla.py"] = "def test_right(): pass\ndef test_wrong(): assert 0, 'off\\nby 1'\n"
    files["tests/ops/test_kda.py"] = "import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, fla_tests.__file__, str(tmp_path), "--jobs", "0", "--commit", "c0ffee"]
    command += ["--reports", str(tmp_path / "reports"), "--out", str(tmp_path / "out.json")]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
    for picked, status in ((["-k", "right"], 0), ([], 1), ([], 1)):
        assert subprocess.run([*command, *picked], env=env, capture_output=True).returncode == status
    data = json.loads((tmp_path / "out.json").read_text())
    assert len((tmp_path / "reports").read_text().splitlines()) == 3
    assert data["environment"]["tests_of_fla"] == "c0ffee" and data["environment"]["whole"]
    gla, *_, kda = data["fla_tests"]
    assert (gla["passed"], gla["failed"], gla["skipped"], kda["skips"]) == (1, 1, 0, {"no GPU": 1})
    assert gla["failures"] == [{"test": "tests/ops/test_gla.py::test_wrong", "said": "AssertionError: off"}]
