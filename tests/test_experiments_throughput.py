"""The experiment that times models: contenders, those that are missing, lengths that do not fit."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from experiment_runs import tiny

from gla_ref import FORMS
from gla_ref.experiments import throughput
from gla_ref.models import Config, LanguageModel


def test_sdpa_is_our_softmax_attention():
    config = Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2, mixer="softmax")
    torch.manual_seed(0)
    x, ours = torch.randn(2, 9, 16), LanguageModel(config).model.layers[0].attn
    theirs = throughput.SdpaAttention(config)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(x)[0], ours(x)[0])


def test_a_contender_that_is_missing_refuses(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.models", None)  # importing it fails
    (run,) = tiny("throughput", contenders=("fla",))
    found = throughput.carry_out(run, place)
    assert found["lengths"] == [] and "Error" in found["refused"]


def test_fla_is_measured_as_ours_is(place, monkeypatch):
    """A stand-in for fla: its model with our weights, its operator under its name."""
    called = []

    class Theirs(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            fields = {k: x for k, x in vars(config).items() if k not in ("architectures", "model_type")}
            self.ours = LanguageModel(Config(**fields))

        def load_state_dict(self, tensors, strict):
            assert strict
            return self.ours.load_state_dict(tensors)

        def gradient_checkpointing_enable(self):
            called.append("checkpointing")

        def forward(self, tokens, labels, use_cache):
            assert labels is tokens and not use_cache
            return SimpleNamespace(loss=self.ours.loss(tokens)[0])

    def chunk_gla(q, k, v, g):
        called.append("chunk_gla")
        return FORMS["gla"]["chunkwise_two_level"](q, k, v, g)

    models, ops = ModuleType("fla.models"), ModuleType("fla.ops.gla")
    models.GLAConfig, models.GLAForCausalLM, ops.chunk_gla = (
        lambda **fields: SimpleNamespace(**fields),
        Theirs,
        chunk_gla,
    )
    for name, module in {"fla": ModuleType("fla"), "fla.models": models, "fla.ops": ModuleType("fla.ops")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "fla.ops.gla", ops)
    monkeypatch.setattr(throughput, "CALLS", 1)
    ours, theirs = (
        throughput.carry_out(run, place)["lengths"]
        for run in tiny("throughput", contenders=("gla", "fla"), lengths=(16,), repeats=1)
    )
    assert [x["loss"] for x in ours] == [x["loss"] for x in theirs]
    assert called == ["checkpointing", *["chunk_gla"] * 3]


def test_a_length_that_does_not_fit_refuses_and_the_others_go_on(place, monkeypatch):
    whole = throughput.measure

    def measure(run, T, *rest):
        if T == 16:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return whole(run, T, *rest)

    monkeypatch.setattr(throughput, "measure", measure)
    (run,) = tiny("throughput", contenders=("sdpa",), repeats=1)
    first, second = throughput.carry_out(run, place)["lengths"]
    assert first == {"T": 16, "refused": "CUDA out of memory."} and second["ms"] > 0
