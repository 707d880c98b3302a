"""The training of experiments: compiled losses, the schedule of rates."""

import time
from dataclasses import replace

import pytest
import torch
from experiment_runs import fixed, tiny

from gla_ref.experiments import EXPERIMENTS, mqar
from gla_ref.experiments.runs import dice
from gla_ref.experiments.training import share_of_rate


@pytest.mark.deep
@pytest.mark.parametrize("name, pattern", [("mqar", "main/gla/16/"), ("language", "main/tiny/gla-conv")])
def test_a_compiled_loss_learns_the_same(name, pattern, place, tmp_path, monkeypatch):
    run = fixed(next(run for run in tiny(name) if run.name.startswith(pattern)))
    plain = EXPERIMENTS[name].carry_out(run, place)
    compiled = []

    def compile(function, **options):
        compiled.append(options)
        return torch_compile(function, backend="aot_eager", **options)

    torch_compile = torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compile)
    found = EXPERIMENTS[name].carry_out(run, replace(place, folder=tmp_path / "compiled", compile=True))
    assert (plain["compiled"], found["compiled"]) == (False, True)
    assert compiled == [{"dynamic": False}] * (run.model.num_hidden_layers + 1), "blocks and a loss"
    for (_, x), (_, y) in zip(found["curve"], plain["curve"], strict=True):
        assert x == pytest.approx(y, rel=1e-4)


@pytest.mark.deep
def test_every_run_of_a_process_is_compiled(place, tmp_path, monkeypatch):
    """PyTorch gives up without a word at its limit of recompilations: here after one model instead of eight."""
    run = fixed(next(run for run in tiny("mqar") if run.name.startswith("main/gla/16/")))
    graphs, torch_compile = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: torch_compile(function, backend=backend, **options)
    )
    counts = []
    for seed in range(2):
        graphs.clear()
        one = replace(run, about={**run.about, "seed": seed})
        # not monkeypatch: it would delete the limit afterwards, and with it what other tests compile
        with torch._dynamo.config.patch(recompile_limit=1):
            EXPERIMENTS["mqar"].carry_out(one, replace(place, folder=tmp_path / str(seed), compile=True))
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0


@pytest.mark.deep
def test_the_live_setting_is_learned_on_a_cpu(place, record_property):
    s = replace(mqar.Settings.live(), mixers=("softmax", "gla"))
    runs = [fixed(run, s.rates[0]) for run in mqar.runs(s, 1) if run.about["stage"] == "main"]
    threads, began = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)  # more of them only wait for one another, with tensors as small
    try:
        soft, gla = (mqar.carry_out(run, place)["evaluations"][-1]["accuracy"] for run in runs)
    finally:
        torch.set_num_threads(threads)
    assert soft > 0.95 and gla > 0.6
    record_property("two runs of the live setting", round(time.process_time() - began, 1))


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100, 0.1) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == 1 and shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True) and 0.1 < shares[-1] < 0.11


def test_data_depend_on_what_names_them_alone():
    def draw(*what):
        return torch.rand(3, generator=dice("cpu", *what)).tolist()

    assert draw("x", 0, 1) == draw("x", 0, 1) != draw("x", 1, 0)
