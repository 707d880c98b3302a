"""Gates of trained models, as experiments look at them: of every mixer those of its form."""

import json
import math

import pytest
import torch
from experiment_runs import fixed, tiny

from gla_ref.experiments import language, trained_gates
from gla_ref.experiments._driver import do
from gla_ref.experiments.trained_gates import gates_of
from gla_ref.models import MIXERS, LanguageModel, mixers
from gla_ref.models import layer as layer_module


def test_what_gates_do_is_looked_at():
    """With a bias for weights, each channel's gate is a number that we know."""
    model = LanguageModel(language.model_of("tiny", "gla", 256, tau=1.0))
    gate = model.model.layers[0].attn.gk_proj[1]
    alpha = torch.linspace(0.2, 0.9, len(gate.bias))
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.logit(alpha))
    (layer,) = gates_of(model, torch.zeros(2, 130, dtype=torch.int64))
    half_lives = (math.log(0.5) / alpha.log()).sort().values
    assert layer["half-life"]["0.5"] == pytest.approx(half_lives[round(0.5 * 7)].item(), rel=1e-4)
    assert layer["half-life"]["0.05"] < layer["half-life"]["0.95"]
    # the strongest channel of the first head loses 64 ln 5 = 103 nats in a chunk, of the second 64 ln 1.7 = 34
    assert layer["strong chunks"] == 0.5 and layer["chunks"] == 2 * 2 * 2
    json.dumps(layer, allow_nan=False)


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
    model = LanguageModel(language.model_of("tiny", "gla", 256, tau=1.0))
    gate = model.model.layers[0].attn.gk_proj[1]
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.tensor([-1e38] * 4 + [1e38] * 4))
    (layer,) = gates_of(model, torch.zeros(1, 70, dtype=torch.int64))
    json.dumps(layer, allow_nan=False)
    assert layer["strong chunks"] == 0.5 and layer["half-life"]["0.05"] < 1e-3 < 1e6 < layer["half-life"]["0.95"]


def test_strong_chunks_are_those_of_the_kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    from gla_ref.kernels.portable import gla_forward

    assert gla_forward.LIMIT[torch.bfloat16] == trained_gates.STRONG


@pytest.mark.parametrize("name", ["mqar", "language", "ablations"])
def test_results_say_what_their_gates_do(name, place, tmp_path):
    run = fixed(next(run for run in tiny(name) if run.model.mixer == "gla"))
    record = do(run, place, tmp_path / "records.json")
    layers = record["evaluations"][-1]["gates"]
    assert len(layers) == run.model.num_hidden_layers
    assert all(0 <= layer["strong chunks"] <= 1 and layer["chunks"] > 0 for layer in layers)
