"""Experiments: every tiny setting runs and leaves records, settings are checked."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from experiment_runs import tiny

from gla_ref import results
from gla_ref.experiments import EXPERIMENTS, decoding, language, mqar
from gla_ref.experiments.__main__ import main
from gla_ref.experiments._driver import carry_out_all, record_of
from gla_ref.experiments.runs import Training
from gla_ref.models import LanguageModel


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_settings_run_and_leave_records(name, place, tmp_path):
    runs, file = tiny(name), tmp_path / "records.json"
    assert len({run.name for run in runs}) == len(runs)
    finished = []
    outcome = carry_out_all(runs, place, file, progress=finished.append)
    assert outcome.failed == {} and outcome.left == []
    assert sorted(outcome.done) == sorted(finished) == sorted(run.name for run in runs)
    records = {r["name"]: r for r in results.read(file, name)}
    for run in runs:
        record = records[run.name]
        assert record["about"] == run.about and "seed" in record["about"]
        assert record["run"]["settings"] == run.fingerprint()["settings"]
        assert record["environment"]["torch"] == torch.__version__ and record["environment"]["date"]
        if run.training is None:
            assert record["ms"] > 0
            continue
        assert record["seconds"] > 0 and record["parameters"] > 0
        assert record["learning rate"] > 0 and not record["diverged"]
        steps, losses = zip(*record["curve"], strict=True)
        assert steps == tuple(range(1, run.training.steps + 1)) and all(math.isfinite(x) for x in losses)
        assert [step for step, norm in record["norms"] if norm > 0] == [*steps]
        assert record["evaluations"][-1]["step"] == run.training.steps
        assert len(record["evaluations"]) == run.training.evaluations
        layers = record["evaluations"][-1].get("gates", [])
        assert len(layers) == (run.model.num_hidden_layers if run.model.mixer == "gla" else 0)
        assert all(0 <= layer["strong chunks"] <= 1 and layer["chunks"] > 0 for layer in layers)
    assert not list(place.folder.rglob("*.pt"))  # no checkpoint outlives its record
    before = file.read_text()
    again = carry_out_all(runs, place, file, progress=lambda name: pytest.fail(f"{name} was done"))
    assert sorted(again.done) == sorted(outcome.done) and file.read_text() == before
    other = replace(runs[0], settings=replace(runs[0].settings, tokens=2 * runs[0].settings.tokens))
    assert not record_of(other, tuple(records.values())), "other settings, another run"
    newer = replace(runs[0], about={**runs[0].about, "a later field": None})
    assert record_of(newer, tuple(records.values())), "a record from before a field that this run does not use"


def test_the_command(place, tmp_path, capfd):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    where = ["--records", str(tmp_path / "r.json"), "--folder", str(place.folder), "--texts", str(place.texts)]
    call = ["language", "--preset", "tiny", "--seeds", "1", *where, "--only", "rate/gla/*", "none"]
    assert main(call) == 0
    said = capfd.readouterr()
    assert "1 runs, 0 done before" in said.out
    assert "step" not in said.err.replace("steps", ""), "a progress bar without a terminal"
    assert main(call) == 0 and "1 runs, 1 done before" in capfd.readouterr().out
    other = [*call, "--set", "steps=3"]
    assert main([*other, "--minutes", "1e-9"]) == 3 and main(other) == 0
    elsewhere = ["language", "--preset", "tiny", "--texts", str(tmp_path), *where[:4], "--only", "rate/softmax/*"]
    assert main(elsewhere) == 1 and "texts: expected texts.pt" in capfd.readouterr().err


@pytest.mark.parametrize(
    "call, message",
    [
        (["mqar", "--set", "stepz=3"], "stepz: expected one of"),
        (["mqar", "--set", "steps=0"], "steps: expected a positive integer, got 0"),
        (["mqar", "--set", "mixers=('gla', 'rwkv')"], "mixers: expected some of"),
        (["mqar", "--only", "nothing"], "--only: expected patterns"),
        (["mqar", "--device", "cuda"], "--device: expected a GPU"),
        (["mqar", "--records", "/dev/null/r.json"], "results: expected a place to write /dev/null/r.json"),
        (["mqar", "--records", __file__], "results: expected JSON"),
        (["mqar", "--save-every", "0"], "expected a positive number, got 0"),
        (["texts", "--linux-doc", "no", "--gcide", "no", "--sotu", "no"], "linux_doc: expected"),
    ],
)
def test_a_wrong_command_names_what_is_wrong(call, message, capsys):
    if "--device" in call and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        main(call)
    assert message in capsys.readouterr().err


MQAR, LANGUAGE, TRAINING = mqar.Settings.tiny(), language.Settings.tiny(), Training(8, 1e-3)
WRONG = {  # settings, a field, and a value that it cannot have
    ValueError: [
        *((MQAR, "lengths", ((8, 4),)), (MQAR, "vocab_size", 8), (MQAR, "tokens", 8), (MQAR, "mixers", ("rwkv",))),
        *((MQAR, "rates", ()), (MQAR, "rates", (1e-3, -1.0)), (LANGUAGE, "rates", ()), (LANGUAGE, "sizes", ("7B",))),
        *((LANGUAGE, "tokens", 8), (LANGUAGE, "changes", ("rank-3",)), (decoding.Settings.tiny(), "size", "7B")),
        *((TRAINING, "warmup", 1.5), (TRAINING, "evaluations", 9), (TRAINING, "precision", "fp8")),
        (TRAINING, "clip", math.inf),
    ],
    TypeError: [
        *((MQAR, "lengths", (8, 4)), (MQAR, "widths", 16), (MQAR, "steps", 2.0), (TRAINING, "learning_rate", "1e-3"))
    ],
}


@pytest.mark.parametrize("kind, settings, field, value", [(kind, *x) for kind, its in WRONG.items() for x in its])
def test_wrong_settings_name_the_field(kind, settings, field, value):
    with pytest.raises(kind, match=f"^{field}: expected"):
        replace(settings, **{field: value})


def test_a_corpus_that_does_not_fit_is_named(place):
    s = language.Settings.tiny()
    for field, value in (("vocab_size", 100), ("T", 600)):
        with pytest.raises(ValueError, match=f"^{field}: expected"):
            language.Language(replace(s, **{field: value}, tokens=600), 0, place)


def test_every_field_of_settings_is_described():
    for module in EXPERIMENTS.values():
        terms = [line.partition(":")[0] for line in module.Settings.__doc__.splitlines()]
        described = set(" ".join(terms).replace(",", " ").split())
        assert {field.name for field in dataclasses.fields(module.Settings)} <= described, module.__name__


def test_language_models_have_the_sizes_that_they_are_called():
    for size in language.Settings().sizes:
        with torch.device("meta"):
            model = LanguageModel(language.model_of(size, "gla", 8192))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * int(size[:-1]), rel=0.05)
