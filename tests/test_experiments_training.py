"""The training of experiments: compiled losses, the schedule of rates, and the gates that it leaves."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from experiment_runs import fixed, tiny

from gla_ref.experiments import EXPERIMENTS, language, mqar, trained_gates
from gla_ref.experiments.runs import dice
from gla_ref.experiments.trained_gates import gates_of
from gla_ref.experiments.training import share_of_rate
from gla_ref.models import MIXERS, LanguageModel, mixers
from gla_ref.models import layer as layer_module


@pytest.mark.deep
@pytest.mark.parametrize("name, pattern", [("mqar", "main/gla/"), ("language", "main/tiny/gla")])
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
    run = fixed(next(run for run in tiny("mqar") if run.name.startswith("main/gla/")))
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


def with_biases(biases: torch.Tensor, B: int, T: int) -> dict:
    """What the gates of one layer of GLA do that are the sigmoids of biases alone `[8]`: numbers that we know."""
    model = LanguageModel(language.model_of("tiny", "gla", 256, tau=1.0))
    gate = model.model.layers[0].attn.gk_proj[1]
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(biases)
    (layer,) = gates_of(model, torch.zeros(B, T, dtype=torch.int64))
    json.dumps(layer, allow_nan=False)
    return layer


def test_what_gates_do_is_looked_at():
    alpha = torch.linspace(0.2, 0.9, 8)
    layer = with_biases(torch.logit(alpha), 2, 130)
    half_lives = (math.log(0.5) / alpha.log()).sort().values
    assert layer["half-life"]["0.5"] == pytest.approx(half_lives[round(0.5 * 7)].item(), rel=1e-4)
    assert layer["half-life"]["0.05"] < layer["half-life"]["0.95"]
    # the strongest channel of the first head loses 64 ln 5 = 103 nats in a chunk, of the second 64 ln 1.7 = 34
    assert layer["strong chunks"] == 0.5 and layer["chunks"] == 2 * 2 * 2


@pytest.mark.parametrize("mixer", MIXERS)
def test_gates_of_every_mixer_are_those_of_its_form(mixer, monkeypatch):
    """The form is given the gates that are looked at; models without gates have nothing to look at."""
    model = LanguageModel(language.model_of("tiny", mixer, 256))
    given, attend = [], layer_module.attend

    def watched(mechanism, *tensors, **options):
        given.append(tensors[3] if len(tensors) > 3 else None)
        return attend(mechanism, *tensors, **options)

    for module in (layer_module, mixers):
        monkeypatch.setattr(module, "attend", watched)
    tokens = torch.randint(256, (2, 64))
    found = gates_of(model, tokens)
    assert not any(block.attn._forward_pre_hooks for block in model.model.layers)
    if mixer in ("softmax", "linear"):
        assert found == []
        return
    g = given[0] if given[0].ndim == 4 else given[0][..., None]  # [B, T, H, K], or one gate a head
    half_lives = (math.log(0.5) / g.mean((0, 1))).flatten().sort().values
    assert found[0]["half-life"]["0.95"] == pytest.approx(half_lives[round(0.95 * (len(half_lives) - 1))].item())


def test_a_channel_that_forgets_nothing_or_all_is_a_number_in_json():
    layer = with_biases(torch.tensor([-1e38] * 4 + [1e38] * 4), 1, 70)
    assert layer["strong chunks"] == 0.5 and layer["half-life"]["0.05"] < 1e-3 < 1e6 < layer["half-life"]["0.95"]


def test_strong_chunks_are_those_of_the_kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    from gla_ref.kernels.portable import gla_forward

    assert gla_forward.LIMIT[torch.bfloat16] == trained_gates.STRONG
