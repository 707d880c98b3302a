"""What chapters 17 and 19 say about runs without showing a number: the committed records say the same."""

from __future__ import annotations

import pytest
import torch

from gla_ref import results
from gla_ref.experiments import settings_of
from gla_ref.experiments.language import model_of
from gla_ref.models import LanguageModel


def records(gpu: str, kind: str) -> list[dict]:
    return results.load(gpu, kind=kind)[kind]


def test_at_the_first_attempt_three_mixers_of_five_recalled_next_to_nothing():
    trials = [r for r in records("h200", "mqar") if r["about"]["stage"] == "rate" and r["about"]["overwritten"]]
    best = {}
    for r in trials:
        share = r["evaluations"][-1]["accuracy"] if r["evaluations"] else 0.0
        best[r["about"]["mixer"]] = max(share, best.get(r["about"]["mixer"], 0.0))
    assert {r["run"]["model"]["norm_eps"] for r in trials} == {1e-6} and len(best) == 5
    assert {mixer for mixer, share in best.items() if share < 0.05} == {"mamba2", "gla", "gated_delta"}


def test_trials_as_long_as_the_runs_choose_two_to_four_times_the_rates():
    chosen = {}
    for r in records("h100", "language"):
        s = settings_of(r)
        if (s["quiet"], r["about"]["stage"], r["about"]["size"]) == (True, "main", "10M") and len(s["rates"]) > 1:
            assert not r["choice"]["edge"]
            chosen[r["about"]["mixer"], s["rate_steps"] == s["steps"]] = r["learning rate"]
            assert s["rate_steps"] == s["steps"] or round(0.1 * s["rate_steps"]) == 15  # steps in which the rate rises
    assert len(chosen) == 8 and all(chosen[m, True] / chosen[m, False] in (2, 4) for m, _ in chosen)


def test_text_was_read_without_trials_at_40m_and_by_softmax_attention_without_convolutions():
    text = records("h100", "language")
    assert all(r["about"]["conv"] == (r["about"]["mixer"] != "softmax") for r in text)
    assert {r["about"]["size"] for r in text if r["about"]["stage"] == "rate"} == {"10M"}


def test_a_step_is_fastest_compiled_then_ours_then_fla_then_softmax_at_both_sizes():
    ms = {}
    for r in records("h200", "throughput"):
        for x in r["lengths"]:
            ms[r["about"]["size"], x["T"], r["about"]["contender"]] = x["ms"]
    for size, T in {key[:2] for key in ms}:
        order = [ms[size, T, who] for who in ("gla_compiled", "gla", "fla", "sdpa")]
        assert order == sorted(order), (size, T)
    assert {size for size, *_ in ms} == {"340M", "1.3B"}


def test_the_timed_models_are_one_model():
    """With the same weights ours and fla's are within the budgets of the reference, gradients too."""
    found = records("h200", "models")
    assert found and all(r["passed"] for r in found)
    assert all(r["fla"] <= r["budget"] for r in found if not r["quantity"].startswith("d "))


@pytest.mark.parametrize("mixer", ["gla", "linear"])
def test_defaults_of_fla_start_a_small_model_loud(mixer):
    """A mixer adds more than an embedding before the first step: no convolutions, an epsilon of 1e-6, W_O as usual."""
    torch.manual_seed(0)
    model, added = LanguageModel(model_of("10M", mixer, 8192, False, norm_eps=1e-6, use_short_conv=False)), []
    for block in model.model.layers:
        block.attn.register_forward_hook(lambda layer, args, out: added.append(out[0].square().mean().sqrt()))
    tokens = torch.randint(8192, (1, 512))
    with torch.no_grad():
        model.model(tokens)
        embedded = model.model.embeddings(tokens).square().mean().sqrt()
    assert torch.stack(added).mean() > embedded
