"""Learning rates of experiments: how trials choose them, and how a result reports the choice."""

import math
from dataclasses import replace

import pytest
import torch
from experiment_runs import fixed, tiny

from gla_ref import results
from gla_ref.experiments import _rates, language, mqar
from gla_ref.experiments._driver import carry_out_all
from gla_ref.experiments._rates import choice_of
from gla_ref.experiments.training import train


def trial_records(runs, losses: dict) -> tuple[dict, ...]:
    """Records of trials with these validation losses by group and rate; None: diverged."""
    records = []
    for run in runs:
        key = run.about["group"], run.training.learning_rate
        if run.about["stage"] == "rate" and key in losses:
            end = {"diverged": losses[key] is None, "evaluations": [{"loss": losses[key]}] if losses[key] else []}
            own = {"name": run.name, "about": run.about, "run": run.fingerprint()}
            records.append({**own, **end, "baselines": {"loss": 3.0}})
    return tuple(records)


RATES = (1e-3, 2e-3, 4e-3)


def choice(*losses, rates=RATES, **changes):
    """The choice of GLA with convolution in MQAR by these losses."""
    runs = tiny("mqar", mixers=("linear", "gla"), rates=rates, **changes)
    main = next(run for run in runs if run.name == "main/gla/16-conv/seed0")
    return choice_of(main, trial_records(runs, {("gla/16-conv", r): x for r, x in zip(rates, losses, strict=True)}))


def test_a_rate_is_chosen_for_every_mixer_width_and_variant():
    runs = mqar.runs(mqar.Settings(), 2)
    for part in ("rate", "main"):
        chosen = [r for r in runs if r.about["stage"] == part]
        assert len({r.model for r in chosen}) == 9 == len({r.about["group"] for r in chosen})
    trials = [r for r in runs if r.about["stage"] == "rate"]
    assert {r.about["seed"] for r in trials} == {_rates.SEED} and all(r.training.steps == 4000 for r in trials)
    assert {r.about["seed"] for r in runs if r.about["stage"] == "main"} == {0, 1}, "no trial is a result"
    grid = sorted({r.training.learning_rate for r in trials})
    assert all(b / a < 3 for a, b in zip(grid, grid[1:], strict=False)) and grid[0] > 2e-4 and grid[-1] <= 2e-3


def test_every_comparison_chooses_its_rates():
    """Changes of GLA have GLA's rate; those of softmax attention, and all mixers, have trials of their own."""
    runs = language.runs(language.Settings(), 1)
    trials = {r.about["group"]: r for r in runs if r.about["stage"] == "rate"}
    assert {r.about["group"] for r in runs if r.about["stage"] == "main"} == trials.keys()
    assert {r.about["size"] for r in trials.values()} == {"10M"}
    assert {r.training.steps for r in runs} == {690}, "short trials chose other rates than whole runs prefer"
    for r in runs:
        if r.about["change"] is None:  # softmax attention as the Transformer++, which has no convolutions
            assert r.model.use_short_conv == (r.about["mixer"] != "softmax") and r.about["group"] == r.about["mixer"]
            assert r.model.qk_norm == ("softmax" in r.about["mixer"])
        elif r.about["mixer"] == "gla":
            assert r.about["group"] == "gla" and r.about["stage"] == "main"
    hybrids = {r.about["size"]: r.model.mixer for r in runs if r.about["mixer"] == "kda+softmax"}
    assert [hybrids[size].count("softmax") for size in ("10M", "40M")] == [1, 2] and hybrids["10M"][3] == "softmax"


def test_the_lowest_validation_loss_wins_and_of_equal_ones_that_of_the_smallest_rate():
    found = choice(0.9, 0.7, 0.8)
    assert (found.rate, found.edge, found.learned) == (2e-3, None, True)
    assert choice(0.9, None, 0.8).rate == 4e-3, "one that diverged is never the best"
    assert choice(0.9, 0.7, 0.7).rate == 2e-3
    assert choice(0.7, 0.9, 0.7, rates=(4e-3, 2e-3, 1e-3)).rate == 1e-3


def test_the_edge_and_chance_are_said():
    assert choice(0.9, 0.8, 0.7).edge == "highest" and choice(0.7, 0.8, 0.9).edge == "lowest"
    assert not choice(2.99, 2.98, 2.99).learned
    assert choice(0.5, rates=(1e-3,)).edge is None


def test_all_diverged_is_an_error(place):
    runs = tiny("mqar", rates=RATES)
    run = next(r for r in runs if r.about["stage"] == "main")
    records = trial_records(runs, {(run.about["group"], r): None for r in RATES})
    with pytest.raises(ValueError, match=r"^rates: expected .*gla/16-conv learns, got none of \[0.001, 0.002, 0.004\]"):
        mqar.carry_out(run, replace(place, records=records))


def test_missing_trials_are_named():
    runs = tiny("mqar", rates=RATES)
    run = next(r for r in runs if r.about["stage"] == "main")
    with pytest.raises(ValueError, match="^records: expected trials of gla/16-conv .* learning rates 0.002, 0.004"):
        choice_of(run, trial_records(runs, {(run.about["group"], 1e-3): 0.5}))
    whole = trial_records(runs, {(run.about["group"], r): 0.5 for r in RATES})
    with pytest.raises(ValueError, match="^records"):  # their settings differ
        choice_of(replace(run, settings=replace(run.settings, steps=7)), whole)


@pytest.mark.parametrize(
    "best, tried",
    [
        (2e-3, []),  # inside
        (1.6e-2, [8e-3, 1.6e-2]),  # at most two more
        (8e-3, [8e-3, 1.6e-2]),
        (2.5e-4, [5e-4, 2.5e-4]),
        (5e-4, [5e-4, 2.5e-4]),
        (None, [5e-4, 2.5e-4]),  # nothing learned: below
    ],
)
def test_a_grid_goes_on_beyond_its_edge(best, tried, place, tmp_path, monkeypatch):
    def carry(run, place):
        rate = run.training.learning_rate
        if rate is None:
            rate = choice_of(run, place.records).rate
        loss = 2.999 if best is None else 1 + abs(math.log(rate / best)) / 10
        evaluations = [{"loss": loss}]
        return {"diverged": False, "evaluations": evaluations, "baselines": {"loss": 3.0}, "learning rate": rate}

    monkeypatch.setattr(mqar, "carry_out", carry)
    runs, file = tiny("mqar", rates=RATES), tmp_path / "r.json"
    outcome = carry_out_all(runs, place, file)
    assert not outcome.failed
    assert outcome.done[3:-1] == [f"rate/gla/16-conv/{rate:g}" for rate in tried]
    records = results.read(file, "mqar")
    assert best is None or records[-1]["name"].startswith("main") and records[-1]["learning rate"] == best
    again = carry_out_all(runs, place, file)
    assert len(results.read(file, "mqar")) == len(records) and not again.failed


def test_a_result_says_how_its_rate_was_chosen(place, tmp_path):
    runs, file = tiny("language", mixers=("gla",), changes=None), tmp_path / "r.json"
    carry_out_all(runs, place, file)
    trial, main = results.read(file, "language")
    assert trial["data"] == "validation" and main["data"] == "test" and "choice" not in trial
    assert main["choice"]["rate"] == main["learning rate"] == 1e-2
    assert main["choice"]["losses"] == {"0.01": trial["evaluations"][-1]["loss"]}
    assert main["state"] > 0 and main["baselines"]["loss"] > 0


def test_a_wider_model_has_a_smaller_rate(place, monkeypatch):
    seen = []
    monkeypatch.setattr(_rates, "train", lambda run, task, place: seen.append(run.training.learning_rate))
    s = replace(language.Settings(), mixers=("gla",), rates=(2e-3,), changes=("rank-4",))
    runs = language.runs(s, 1)
    records = trial_records(runs, {("gla", 2e-3): 1.0})
    for run in runs[1:]:
        _rates.trained(run, None, replace(place, records=records))
    assert seen == [2e-3, 1e-3, 2e-3]  # widths 256 and 512, and a change at the first


def test_a_run_at_chance_says_so(place):
    run = next(r for r in tiny("mqar", mixers=("linear",)) if r.about["stage"] == "main")
    found = mqar.carry_out(fixed(run, 1e-6), place)
    assert found["at chance"]
    task = mqar.Mqar(run.settings, 0, "cpu")
    task.baselines = lambda: {"loss": 100.0}
    found = train(fixed(run, 1e-6), task, replace(place, folder=place.folder / "other"))
    assert not found["at chance"]


def test_models_are_evaluated_in_float32(place):
    run = next(r for r in tiny("mqar") if r.about["stage"] == "main")
    task, seen = mqar.Mqar(run.settings, 0, "cpu"), []
    task.evaluate = lambda model: seen.append(torch.is_autocast_enabled("cpu")) or {"loss": 0.0}
    training = replace(run.training, precision="bf16", learning_rate=1e-3, steps=2, evaluations=2)
    train(replace(run, training=training), task, place)
    assert seen == [False, False]
