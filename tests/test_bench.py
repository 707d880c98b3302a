"""The bench's own judgement: its oracles against the recurrent forms, its budgets, its suites, its records."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import oracles  # noqa: E402
import run  # noqa: E402
import suites  # noqa: E402
from contenders import CONTENDERS  # noqa: E402

from gla_ref import FORMS  # noqa: E402
from gla_ref.check._emulate import Attend  # noqa: E402


@pytest.mark.parametrize("mechanism", oracles.MECHANISMS)
def test_oracles_are_the_recurrent_forms(mechanism, monkeypatch):
    monkeypatch.setattr(Attend, "ROWS", 32)  # several tiles of queries
    gates = "logsigmoid/16" if mechanism in ("simple_gla", "gla") else None
    case = suites.Case(mechanism, 1, 150, 1, 5, 7, dtype="float64", gates=gates)
    x = suites.inputs(case, seed=1, device="cpu")
    names = [n for n in suites.LEAVES if n in x]
    o, _ = FORMS[mechanism]["recurrent"](*(x[n] for n in names))
    want = {"o": o, **dict(zip("qkvg", torch.autograd.grad(o, [x[n] for n in names], x["do"])))}  # noqa: B905
    head = {n: y[0, :, 0] for n, y in x.items()}
    exact = oracles.run(mechanism, head, None)
    for n, y in want.items():
        torch.testing.assert_close(exact[n if n == "o" else f"d{n}"], y[0, :, 0])

    half = {n: y.bfloat16() for n, y in head.items()}
    exact, low = oracles.run(mechanism, half, None), oracles.run(mechanism, half, torch.bfloat16)
    assert low["o"].dtype == torch.bfloat16
    for n in exact:
        assert 1e-3 < oracles.error(low[n], exact[n]) < 0.1, n
    assert all(e <= b for e, b in oracles.judge(low, [(exact, low)]).values())
    late = {n: y.clone() for n, y in low.items()}
    late["o"][-3:] *= 1.5  # small values late in a sequence still count
    e, budget = oracles.judge(late, [(exact, low)])["o"]
    assert e > budget


def test_every_suite_has_cases_and_contenders():
    for suite in suites.SUITES.values():
        for case in suite():
            assert case.mechanism in CONTENDERS and case.mechanism in oracles.MECHANISMS
            assert sum(case.lengths or (case.T,)) == case.T
            assert {c.name for c in run.who(case)} >= set(case.only or {"triton"})
            for direction in case.directions:
                assert suites.memory_floor_bytes(case, direction) > 0
                assert suites.flop_floor(case, direction) > 0


def test_a_new_record_replaces_the_old_one(tmp_path):
    path = tmp_path / "gpu.json"
    record = {n: 1 for n in run.IDENTITY}
    run.merge(path, {"gpu": "a"}, [record | {"ms": 1.0}, record | {"T": 2, "ms": 2.0}])
    run.merge(path, {"gpu": "b"}, [record | {"ms": 3.0}])
    found = json.loads(path.read_text())
    assert found["environment"] == {"gpu": "b"}
    assert [r["ms"] for r in found["records"]] == [3.0, 2.0]


def test_late_calls_are_cut_off():
    with pytest.raises(run.Late, match="did not return within 1 s"), run.limit(1):
        while True:
            pass
