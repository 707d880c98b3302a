"""The experiment that times models: contenders, those that are missing, lengths that do not fit."""

import sys

import torch
from experiment_runs import stand_in_for_fla, tiny

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
    called = stand_in_for_fla(monkeypatch)
    monkeypatch.setattr(throughput, "CALLS", 1)
    ours, theirs = (
        throughput.carry_out(run, place)["lengths"]
        for run in tiny("throughput", contenders=("gla", "fla"), lengths=(16,), repeats=1)
    )
    assert [x["loss"] for x in ours] == [x["loss"] for x in theirs]
    assert called == ["checkpointing", *["chunk_gla"] * 3]


def test_our_model_is_compiled_block_by_block(place, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, dynamic: compiled.append(type(self).__name__))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function.__name__) or function)
    plain, other = (
        throughput.carry_out(run, place)["lengths"]
        for run in tiny("throughput", contenders=("gla", "gla_compiled"), lengths=(16,), repeats=1)
    )
    assert [x["loss"] for x in plain] == [x["loss"] for x in other]
    assert compiled == ["Block", "Block", "_summed"]


def test_a_profile_tells_the_operator_products_and_the_rest_apart():
    copy = "void at::native::elementwise_kernel<copy>"
    step = {
        "walk": 2.0,
        "nvjet_tst_128": 3.0,
        copy: 4.0,
        "sm90_gemm_of_walk": 1.0,
        **{f"norm {n}": 0.1 for n in range(9)},
    }
    found = throughput.profiled(step, {"walk": 1.0, "sm90_gemm_of_walk": 1.0, copy: 1.0})
    assert [found[n] for n in ("operator", "products", "rest")] == [3.0, 3.0, 4.9]
    assert found["longest"][0] == [copy, 4.0] and len(found["longest"]) == throughput.LONGEST
    assert throughput.kernels(lambda: None, "cpu") == {}


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


def test_kernels_that_a_first_call_finds_compiled_are_counted(place, monkeypatch, tmp_path):
    (run,) = tiny("throughput", contenders=("sdpa",), lengths=(16,), repeats=1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert throughput.carry_out(run, place)["compiled before"] == 0
    for name in "ab":
        (tmp_path / "cache" / name).mkdir(parents=True)
    assert throughput.carry_out(run, place)["compiled before"] == 2
