"""The training of experiments: windows of a text, states passed on, compiled losses, the schedule of rates."""

import time
from dataclasses import replace

import pytest
import torch
from experiment_runs import fixed, leaves, tiny

from gla_ref.experiments import EXPERIMENTS, length, mqar
from gla_ref.experiments.runs import dice
from gla_ref.experiments.training import share_of_rate
from gla_ref.models import LanguageModel
from gla_ref.models.layer import LayerState


def test_windows_follow_one_another(place):
    task = length.Length(length.Settings.tiny(), 16, True, 30, 0, place)
    begins = set(torch.arange(0, 7 * 151, 151).tolist())  # 150 bytes and the end
    for row in range(task.rows):
        for step in range(30):
            start, fresh = task.starts[step, row].item(), task.fresh[step, row].item()
            assert fresh == (start in begins)
            assert fresh or start == task.starts[step - 1, row] + 16 or step == 0
            assert start % 151 + 17 <= 151, "no window crosses a speech's end"
    assert not torch.equal(task.starts[:, 0], task.starts[:, 1])


def test_a_new_speech_begins_with_nothing():
    state = [LayerState(torch.ones(2, 1, 2, 3), (torch.ones(2, 3, 4),) * 3), LayerState(torch.ones(2, 1, 2, 3), None)]
    kept = length.forget(state, torch.tensor([True, False]))
    for x in (kept[0].S, *kept[0].conv, kept[1].S):
        assert not x[0].any() and x[1].all()
    assert kept[1].conv is None and isinstance(kept[0], LayerState)


def test_states_passed_on_change_the_loss(place):
    """With the state passed on, the second window's loss is that of the whole; gradients end there."""
    tasks = [length.Length(length.Settings.tiny(), 16, passing, 5, 0, place) for passing in (True, False)]
    torch.manual_seed(0)
    model = LanguageModel(length.runs(length.Settings.tiny(), 1)[0].model)
    torch.nn.init.normal_(model.lm_head.weight)
    loss, state = tasks[0].loss(model.loss, 0, None)
    assert not any(x.requires_grad for layer in state for x in leaves(layer) if x is not None)
    alone, nothing = tasks[1].loss(model.loss, 0, None)
    assert loss == alone and nothing is None
    second, _ = tasks[0].loss(model.loss, 1, state)
    row = task_bytes(tasks[0], 0, 33)
    both, _ = model.loss(row[:, :-1], row[:, 1:].contiguous())
    assert (tasks[0].window, tasks[0].T) == (16, 64)
    torch.testing.assert_close((loss + second) / 2, both)
    assert second != tasks[1].loss(model.loss, 1, None)[0]


def task_bytes(task, step: int, n: int) -> torch.Tensor:
    """n bytes of each row, from where its window begins."""
    return task.training[task.starts[step][:, None] + torch.arange(n)].long()


@pytest.mark.deep
@pytest.mark.parametrize("name, pattern", [("mqar", "main/gla/16/"), ("length", "main/gla-conv/8-passing")])
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
