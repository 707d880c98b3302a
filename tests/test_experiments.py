"""Experiments: every tiny setting runs, an interrupted one ends with the same numbers, tasks are what they say."""

import ast
import dataclasses
import gzip
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gla_ref import FORMS
from gla_ref.book import results
from gla_ref.experiments import (
    EXPERIMENTS,
    _driver,
    _rates,
    ablations,
    language,
    length,
    mqar,
    plan,
    recall,
    texts,
    throughput,
    trained_gates,
)
from gla_ref.experiments._driver import carry_out, do, is_done
from gla_ref.experiments._rates import choice_of
from gla_ref.experiments.questions import answer_logits, distinct, judged
from gla_ref.experiments.runs import Place, Training, dice
from gla_ref.experiments.trained_gates import gates_of
from gla_ref.experiments.training import share_of_rate, state_size, train
from gla_ref.models import MIXERS, Config, LanguageModel, mixers
from gla_ref.models import layer as layer_module
from gla_ref.models.layer import LayerState

PARTS = {"test": 3, "validation": 2, "training": 7}
BOOK = "".join(chr(97 + i * i % 23) for i in range(150))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with speeches of 150 bytes: three are held out, two are for validation, seven for training."""
    names = [f"sotu/{i}" for i in range(200)]
    names = [n for part, k in PARTS.items() for n in [n for n in names if texts.part_of(n) == part][:k]]
    folder = tmp_path_factory.mktemp("texts")
    texts.encode_bytes([texts.Document(name, BOOK[i:] + BOOK[:i]) for i, name in enumerate(names)]).save(
        folder / "speeches.pt"
    )
    return folder


@pytest.fixture
def place(tmp_path, corpora):
    return Place("cpu", tmp_path / "checkpoints", texts=corpora)


def fixed(run, rate=1e-2):
    """A run with a rate of its own, which needs no trials."""
    return replace(run, training=replace(run.training, learning_rate=rate))


def tiny(name: str, **changes):
    """The runs of a tiny setting."""
    module = EXPERIMENTS[name]
    return module.runs(replace(module.Settings.tiny(), **changes), 1)


# -- every experiment --------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_settings_run_and_leave_records(name, place, tmp_path):
    runs, file = tiny(name), tmp_path / "records.json"
    assert len({run.name for run in runs}) == len(runs)
    finished = []
    outcome = carry_out(runs, place, file, progress=finished.append)
    assert outcome.failed == {} and outcome.left == []
    assert sorted(outcome.done) == sorted(finished) == sorted(run.name for run in runs)
    records = {r["name"]: r for r in results.read(file, name)}
    for run in runs:
        record = records[run.name]
        assert record["about"] == run.about and "seed" in record["about"]
        assert record["run"]["settings"] == run.fingerprint()["settings"]
        assert record["environment"]["torch"] == torch.__version__ and record["environment"]["date"]
        assert record["seconds"] > 0 and record["parameters"] > 0
        if run.training is None:
            assert [x["T"] for x in record["lengths"]] == list(run.settings.lengths)
            assert all(x["ms"] > 0 and x["operator ms"] > 0 and x["loss"] > 0 for x in record["lengths"])
            continue
        assert record["learning rate"] > 0 and not record["diverged"]
        steps, losses = zip(*record["curve"], strict=True)
        assert steps == tuple(range(1, run.training.steps + 1)) and all(math.isfinite(x) for x in losses)
        assert record["evaluations"][-1]["step"] == run.training.steps
        assert len(record["evaluations"]) == run.training.evaluations
    assert not list(place.folder.rglob("*.pt"))  # no checkpoint outlives its record
    before = file.read_text()
    again = carry_out(runs, place, file, progress=lambda name: pytest.fail(f"{name} was done"))
    assert sorted(again.done) == sorted(outcome.done) and file.read_text() == before
    other = replace(runs[0], settings=replace(runs[0].settings, tokens=2 * runs[0].settings.tokens))
    assert not is_done(other, tuple(records.values())), "other settings, another run"


def test_the_command(place, tmp_path, capfd):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    from gla_ref.experiments.__main__ import main

    where = ["--records", str(tmp_path / "r.json"), "--folder", str(place.folder), "--texts", str(place.texts)]
    call = ["ablations", "--preset", "tiny", "--seeds", "1", "--set", "rate_steps=2", "--only", "rate/base/*", *where]
    assert main(call) == 0
    said = capfd.readouterr()
    assert "1 runs, 0 done before" in said.out
    assert "step" not in said.err.replace("steps", ""), "a progress bar without a terminal"
    assert main(call) == 0 and "1 runs, 1 done before" in capfd.readouterr().out
    other = [*call, "--set", "rate_steps=3"]
    assert main([*other, "--minutes", "1e-9"]) == 3 and main(other) == 0
    assert main([*call, "--set", "corpus=texts"]) == 1 and "texts: expected texts.pt" in capfd.readouterr().err


@pytest.mark.parametrize(
    "call, message",
    [
        (["mqar", "--set", "stepz=3"], "stepz: expected one of"),
        (["mqar", "--set", "steps=0"], "steps: expected a positive integer, got 0"),
        (["mqar", "--set", "mixers=('gla', 'rwkv')"], "mixers: expected some of"),
        (["mqar", "--only", "nothing"], "--only: expected a pattern"),
        (["mqar", "--chunk", "99"], "--chunk: expected at most"),
        (["length", "--device", "cuda"], "--device: expected a GPU"),
        (["language", "--set", "corpus=../x"], "corpus: expected one of texts, speeches, got '../x'"),
        (["mqar", "--records", "/dev/null/r.json"], "results: expected a place to write /dev/null/r.json"),
        (["mqar", "--records", __file__], "results: expected JSON"),
        (["mqar", "--save-every", "0"], "expected a positive number, got 0"),
        (["texts", "--linux-doc", "no", "--gcide", "no", "--sotu", "no"], "linux_doc: expected"),
    ],
)
def test_a_wrong_command_names_what_is_wrong(call, message, capsys):
    from gla_ref.experiments.__main__ import main

    if "--device" in call and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        main(call)
    assert message in capsys.readouterr().err


# -- interrupted -------------------------------------------------------------------------------


def numbers(record: dict) -> dict:
    """What must be equal."""
    return {name: record[name] for name in ("curve", "evaluations", "diverged")}


class Killed(BaseException):
    """As a signal would end the program, wherever it is."""


@pytest.mark.parametrize(
    "name, pattern",
    [("length", "main/gla-conv/8-passing"), ("mqar", "main/gla/16/"), ("language", "main/tiny/gla-conv")],
)
def test_interrupted_and_resumed_is_as_if_never(name, pattern, place, tmp_path):
    run = fixed(next(run for run in tiny(name) if run.name.startswith(pattern)))
    whole = EXPERIMENTS[name].carry_out(run, replace(place, folder=tmp_path / "whole"))

    def kill(done, total):
        if done == 4:
            raise Killed  # before the step's checkpoint: the last one is of step 3

    saving = replace(place, save_every=0.0)
    with pytest.raises(Killed):
        EXPERIMENTS[name].carry_out(run, replace(saving, progress=kill))
    torch.manual_seed(123)  # whatever happened since
    steps = []
    stopped = replace(saving, deadline=time.time(), progress=lambda done, total: steps.append(done))
    assert EXPERIMENTS[name].carry_out(run, stopped) is None and steps == [4], "one step, then time is up"
    resumed = EXPERIMENTS[name].carry_out(run, replace(place, progress=stopped.progress))
    assert steps == list(range(4, run.training.steps + 1))
    assert numbers(resumed) == numbers(whole)
    other = replace(run, training=replace(run.training, clip=0.5))
    with pytest.raises(ValueError, match="^settings: expected those of the checkpoint"):
        EXPERIMENTS[name].carry_out(other, place)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", "a pickle", {"step": 1}])
def test_a_checkpoint_that_cannot_be_read_is_named(content, place):
    run = tiny("ablations")[0]
    file = run.file(place.folder, ".pt")
    file.parent.mkdir(parents=True)
    if content == "a pickle":
        torch.save({"step": Path("x")}, file)  # PyTorch would advise to load it with weights_only=False
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(
        ValueError, match=r"^folder: expected a checkpoint .*rate-base-0.01.pt, got .*; remove it"
    ) as found:
        ablations.carry_out(run, place)
    assert "weights_only" not in str(found.value)
    assert found.value.__suppress_context__ or not found.value.__context__  # a traceback without PyTorch's advice


def test_a_corpus_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "texts.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"^texts: expected a corpus in \S+texts.pt, got"):
        texts.load(tmp_path, "texts")
    with pytest.raises(ValueError, match="^corpus: expected one of texts, speeches, got '../x'"):
        texts.load(tmp_path, "../x")


PROGRAM = """
import sys
from pathlib import Path
from gla_ref.experiments import ablations
from gla_ref.experiments._driver import carry_out
from gla_ref.experiments.runs import Place
from dataclasses import replace

if __name__ == "__main__":
    runs = ablations.runs(replace(ablations.Settings.tiny(), steps=20, rate_steps=40), 1)
    folder, jobs = Path(sys.argv[1]), int(sys.argv[3])
    place = Place("cpu", folder, save_every=0.0, texts=Path(sys.argv[2]))
    print(carry_out(runs, place, folder / "records.json", jobs))
"""


@pytest.mark.deep
def test_killed_by_a_signal_and_called_again(tmp_path, corpora):
    """A program is killed with a checkpoint and no record; called again, with two processes, it has all numbers."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def command(name, jobs):
        return [sys.executable, str(tmp_path / "program.py"), str(tmp_path / name), str(corpora), str(jobs)]

    subprocess.run(command("whole", 1), check=True)
    process = subprocess.Popen(command("killed", 1))
    file = tmp_path / "killed" / "ablations" / "rate-base-0.01.pt"
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert file.exists() and not (tmp_path / "killed" / "records.json").exists()
    subprocess.run(command("killed", 2), check=True)
    whole, again = (
        {r["name"]: numbers(r) for r in results.read(tmp_path / folder / "records.json", "ablations")}
        for folder in ("whole", "killed")
    )
    assert whole == again and len(whole) == 4


def when_saved(folder: Path, act) -> threading.Thread:
    """Do something as soon as a folder has a checkpoint."""

    def wait():
        while not list(folder.rglob("*.pt")):
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_an_interrupt_leaves_checkpoints_and_a_summary(jobs, place, tmp_path, capfd):
    runs, file = tiny("ablations", rate_steps=400), tmp_path / "r.json"
    before = signal.getsignal(signal.SIGINT)  # in a shell's background it is to ignore
    interrupt = when_saved(place.folder, lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = carry_out(runs, replace(place, save_every=0.2), file, jobs)
    interrupt.join()
    assert "interrupted: runs stop with a checkpoint" in capfd.readouterr().err
    assert len(outcome.left) >= 3 and not outcome.failed and len(outcome.left) + len(outcome.done) == len(runs)
    saved = torch.load(next(place.folder.rglob("*.pt")), weights_only=True)
    assert 0 < saved["step"] < 400
    assert signal.getsignal(signal.SIGINT) is before


def test_a_killed_worker_is_its_runs_failure(place, tmp_path):
    runs, file = tiny("ablations", rate_steps=12)[:2], tmp_path / "r.json"

    def kill():
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    when_saved(place.folder, kill)
    outcome = carry_out(runs, replace(place, save_every=0.0), file, 2)
    ((name, reason),) = outcome.failed.items()
    assert "its process was killed" in str(reason) and len(outcome.done) == len(runs) - 1
    assert carry_out(runs, place, file).failed == {}  # and goes on
    assert len(results.read(file, "ablations")) == len(runs)


def test_workers_of_a_gpu_leave_the_cores_to_one_another(place, monkeypatch):
    threads, run = torch.get_num_threads(), tiny("mqar")[0]
    monkeypatch.setattr(_driver, "do", lambda run, place, file: torch.get_num_threads())
    try:
        torch.set_num_threads(2)
        assert _driver._do_in_worker(run, place, None) == 2
        assert _driver._do_in_worker(run, replace(place, device="cuda:1"), None) == 1
    finally:
        torch.set_num_threads(threads)


def test_two_programs_share_runs(place, tmp_path, capfd):
    """A run that another program carries out is left to it; one that it has finished since is not done again."""
    from filelock import FileLock

    runs, file = tiny("ablations")[:2], tmp_path / "r.json"
    lock = runs[0].file(place.folder, ".lock")
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        outcome = carry_out(runs, place, file)
    assert outcome.left == [runs[0].name] and outcome.done == [runs[1].name]
    assert f"{runs[0].name}: another process carries it out" in capfd.readouterr().err
    record = carry_out(runs, place, file) and results.read(file, "ablations")[1]
    assert do(runs[0], place, file) == record


def test_one_failure_does_not_cost_the_rest(place, tmp_path, monkeypatch):
    runs = tiny("ablations", steps=1, rate_steps=1)
    carry = ablations.carry_out

    def fail(run, place):
        if run.about["change"] == "base":
            raise RuntimeError("no memory")
        return carry(run, place)

    monkeypatch.setattr(ablations, "carry_out", fail)
    outcome = carry_out(runs, place, tmp_path / "r.json")
    assert outcome.done == ["rate/tau-1/0.01", "main/tau-1/seed0"]
    assert {name: str(x) for name, x in outcome.failed.items()} == {
        "rate/base/0.01": "no memory", "main/base/seed0": "no memory"
    }  # fmt: skip


def test_a_loss_that_is_no_number_ends_a_run(place):
    run = tiny("mqar", mixers=("linear",))[0]  # on a CPU the references of the others refuse such gates by name
    run = replace(run, training=replace(run.training, learning_rate=1e30, clip=1e30, steps=50))
    found = mqar.carry_out(run, place)
    assert found["diverged"] and found["curve"][-1][1] is None and len(found["curve"]) < 50
    assert "NaN" not in json.dumps(found)


# -- tasks -------------------------------------------------------------------------------------


def test_questions_of_mqar():
    n, T, pairs, half = 50, 40, 5, 16
    x = mqar.questions(n, T, pairs, 2 * half, dice("cpu", "a test"))
    keys, values = x.tokens[:, : 2 * pairs : 2], x.tokens[:, 1 : 2 * pairs : 2]
    assert ((keys > 0) & (keys < half)).all() and ((values >= half) & (values < 2 * half)).all()
    for row in range(n):
        told = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert len(told) == len(set(told.values())) == pairs
        asked = x.tokens[row, x.places[row]].tolist()
        assert sorted(asked) == sorted(told) and [told[key] for key in asked] == x.answers[row].tolist()
    assert x.places.min() >= 2 * pairs and x.places.max() < T and (x.places % 2 == 0).all()
    assert all(len(set(row)) == pairs for row in x.places.tolist())
    near = (x.places < (2 * pairs + T) // 2).float().mean()
    assert near > 0.6, "a power law: early rather than late"


def test_facts_of_recall():
    s = replace(recall.Settings.tiny(), T=200, tokens=200)
    x, distance = recall.texts(20, 3, s, dice("cpu", "a test"))
    for row, tokens in enumerate(x.tokens.tolist()):
        told, asked = (
            {tuple(tokens[i + 1 : i + 3]): (i, tokens[i + 3 : i + 7]) for i, t in enumerate(tokens) if t == marker}
            for marker in (recall.FACT, recall.ASK)
        )
        assert told.keys() == asked.keys() and len(told) == 3
        assert min(i for i, _ in asked.values()) == s.T - 21 > max(i for i, _ in told.values()) + 6
        for name, (i, sentence) in told.items():
            j, again = asked[name]
            assert sentence == again and sentence[0] == recall.IS
            fact = x.places[row].tolist().index(j + 3) // 3
            assert x.answers[row, 3 * fact : 3 * fact + 3].tolist() == sentence[1:]
            assert x.places[row, 3 * fact : 3 * fact + 3].tolist() == [j + 3, j + 4, j + 5]
            assert distance[row, fact] == j - i
        assert max(tokens) < s.vocab_size


def test_answers_are_those_of_the_whole_logits():
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2))
    x = mqar.questions(5, 16, 2, 32, dice("cpu", "a test"))
    with torch.no_grad():
        whole = model(x.tokens)[0]
        found = answer_logits(model, x.tokens, x.places)
        said, nats = judged(model, x, 2)
    for row in range(5):
        torch.testing.assert_close(found[row], whole[row, x.places[row]])
    assert torch.equal(said, found.argmax(-1) == x.answers)
    torch.testing.assert_close(nats, -found.log_softmax(-1).gather(2, x.answers[..., None])[..., 0])


def test_different_numbers_in_any_order():
    x = distinct(4000, 5, 3, dice("cpu", "a test"))
    assert all(len(set(row)) == 3 for row in x.tolist()) and x.min() == 0 and x.max() == 4
    orders = torch.unique(x, dim=0, return_counts=True)[1]
    assert len(orders) == 60 and orders.min() > 35 and orders.max() < 105  # of 66.7 each
    assert sorted(distinct(1, 7, 7, dice("cpu", 0))[0].tolist()) == list(range(7))


def test_keys_that_are_written_twice():
    """The second value counts; half of the keys have one, and no place tells which."""
    n, T, pairs = 200, 40, 4
    x = mqar.questions(n, T, pairs, 32, dice("cpu", "a test"), overwritten=True)
    first = []
    for row, tokens in enumerate(x.tokens.tolist()):
        written = list(zip(tokens[:12:2], tokens[1:12:2], strict=True))
        assert len({v for _, v in written}) == 6 and [k for k, _ in written[:4]] != [k for k, _ in written[4:]]
        told = dict(written)  # a later pair replaces an earlier one
        again = {k for k, _ in written[4:]}
        assert len(told) == 4 and len(again) == 2
        asked = [tokens[i] for i in x.places[row].tolist()]
        assert [told[key] for key in asked] == x.answers[row].tolist()
        assert {key for key in asked[:2]} == again  # overwritten ones come first in `places`
        first.append(written[0][0] in again)
    assert 0.35 < sum(first) / n < 0.65


@pytest.mark.parametrize("name", ["mqar", "recall"])
def test_a_gpu_trains_on_the_texts_of_a_cpu(name):
    """Nothing is drawn on the device: "meta" has no random numbers."""
    module = EXPERIMENTS[name]
    kind = {"mqar": mqar.Mqar, "recall": recall.Recall}[name]
    x = kind(module.Settings.tiny(), 0, "meta").batch(0)
    assert all(y.device.type == "meta" for y in x)


def test_validation_test_and_training_are_other_texts():
    s = mqar.Settings.tiny()
    drawn = []

    class Model(LanguageModel):
        def __init__(self):
            super().__init__(Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2))
            self.model.register_forward_pre_hook(lambda _, args: drawn.append(args[0]))

    for part in ("validation", "test"):
        mqar.Mqar(s, 0, "cpu", part).evaluate(Model())
    drawn.append(mqar.Mqar(s, 0, "cpu").batch(0).tokens)
    ours = [x for x in drawn if x.shape[1] == 16]
    assert len(ours) >= 3 and not any(torch.equal(x[:4], y[:4]) for x, y in zip(ours, ours[1:], strict=False))


def test_scores_have_baselines():
    s = replace(mqar.Settings.tiny(), lengths=((16, 2), (24, 4)))
    assert mqar.Mqar(s, 0, "cpu").baselines() == {"loss": math.log(16), "chance": 1 / 16, "majority": 3 / 8}
    twice = replace(s, lengths=((20, 4),), overwritten=True)
    assert mqar.Mqar(twice, 0, "cpu").baselines()["majority"] == 1 / 6
    found = recall.Recall(recall.Settings.tiny(), 0, "cpu").baselines()
    assert found == {"loss": math.log(5), "chance": pytest.approx(0.008), "majority": pytest.approx(2 / 3)}


def test_the_unigram_baseline_is_by_the_training_text():
    found = language.unigram(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2]), 3)
    assert found == pytest.approx(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)


def test_language_and_length_have_baselines(place):
    for task in (
        language.Language(language.Settings.tiny(), 0, place),
        length.Length(length.Settings.tiny(), 16, True, 5, 0, place),
    ):
        found = task.baselines()
        assert 0 < found["loss"] < math.log(256) and 0 < found["bits a byte"] < found["chance"] <= 8


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_a_state_has_as_many_numbers_as_it_is_said_to(mixer):
    for conv in (False, True):
        config = Config(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_heads=2, mixer=mixer, use_short_conv=conv
        )
        _, state = LanguageModel(config)(torch.zeros(1, 9, dtype=torch.int64))
        assert state_size(config, 9) == sum(x.numel() for layer in state for x in leaves(layer))


def leaves(x) -> list[torch.Tensor]:
    """All tensors of nested tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [z for y in x for z in leaves(y)] if isinstance(x, tuple) else []  # and None


def test_heads_change_the_size_of_the_state_alone():
    runs = [r for r in recall.runs(recall.Settings.full(), 1) if r.about.get("mixer") == "gla"]
    main = {r.about["heads"]: r.model for r in runs if r.about["stage"] == "main"}
    sizes = {heads: state_size(model, 1) for heads, model in main.items()}
    assert sizes[1] > 2.5 * sizes[4] > 5 * sizes[16]


# -- learning rates ----------------------------------------------------------------------------


def trial_records(runs, losses: dict) -> tuple[dict, ...]:
    """Records of trials with these validation losses by group and rate; None: diverged."""
    found = []
    for run in runs:
        key = run.about["group"], run.training.learning_rate
        if run.about["stage"] == "rate" and key in losses:
            loss = losses[key]
            found.append(
                {
                    "name": run.name, "about": run.about, "run": run.fingerprint(), "diverged": loss is None,
                    "baselines": {"loss": 3.0}, "evaluations": [{"loss": loss}] if loss else [],
                }
            )  # fmt: skip
    return tuple(found)


RATES = (1e-3, 2e-3, 4e-3)


def choice(*losses, rates=RATES, **changes):
    """The choice of GLA with convolution in MQAR by these losses."""
    runs = tiny("mqar", mixers=("linear", "gla"), rates=rates, **changes)
    main = next(run for run in runs if run.name == "main/gla/16-conv/seed0")
    return choice_of(main, trial_records(runs, {("gla/16-conv", r): x for r, x in zip(rates, losses, strict=True)}))


def test_a_rate_is_chosen_for_every_mixer_width_and_variant():
    runs = mqar.runs(mqar.Settings.full(), 2)
    for part in ("rate", "main"):
        columns = {
            (r.model.mixer, r.model.hidden_size, r.model.use_short_conv) for r in runs if r.about["stage"] == part
        }
        assert len(columns) == 6 * 3 == len({r.about["group"] for r in runs if r.about["stage"] == part})
    trials = [r for r in runs if r.about["stage"] == "rate"]
    assert {r.about["seed"] for r in trials} == {_rates.SEED} and all(r.training.steps == 1500 for r in trials)
    assert {r.about["seed"] for r in runs if r.about["stage"] == "main"} == {0, 1}, "no trial is a result"
    grid = sorted({r.training.learning_rate for r in trials})
    assert all(b / a < 3 for a, b in zip(grid, grid[1:], strict=False)) and grid[0] > 2e-4 and grid[-1] <= 2e-3


@pytest.mark.parametrize("name", ["language", "ablations", "length", "recall"])
def test_every_comparison_chooses_its_rates(name):
    for conv in (True, False):
        runs = EXPERIMENTS[name].runs(replace(EXPERIMENTS[name].Settings.full(), conv=conv), 1)
        groups = {r.about["group"]: r for r in runs if r.about["stage"] == "rate"}
        assert {r.about["group"] for r in runs if r.about["stage"] == "main"} == groups.keys()
        assert len({r.about["change" if name == "ablations" else "mixer"] for r in runs}) == len(groups)
        assert all(r.training.steps < r.settings.steps for r in groups.values())
        assert conv in {r.model.use_short_conv for r in runs}
        if name == "language":
            assert {r.about["size"] for r in groups.values()} == {"10M"}


def test_the_lowest_validation_loss_wins():
    found = choice(0.9, 0.7, 0.8)
    assert (found.rate, found.edge, found.learned) == (2e-3, None, True)
    assert choice(0.9, None, 0.8).rate == 4e-3, "one that diverged is never the best"


def test_of_equal_rates_the_smallest_wins_whatever_the_order():
    assert choice(0.9, 0.7, 0.7).rate == 2e-3
    assert choice(0.7, 0.9, 0.7, rates=(4e-3, 2e-3, 1e-3)).rate == 1e-3


def test_the_edge_and_chance_are_said():
    assert choice(0.9, 0.8, 0.7).edge == "highest" and choice(0.7, 0.8, 0.9).edge == "lowest"
    assert "the highest rate that was tried" in str(choice(0.9, 0.8, 0.7))
    assert not choice(2.99, 2.98, 2.99).learned and "nothing was learned" in str(choice(2.99, 2.98, 2.99))
    assert choice(0.5, rates=(1e-3,)).edge is None


def test_all_diverged_is_an_error(place):
    runs = tiny("mqar", rates=RATES)
    run = next(r for r in runs if r.about["stage"] == "main")
    records = trial_records(runs, {(run.about["group"], r): None for r in RATES})
    with pytest.raises(
        ValueError, match="^rates: expected one at which gla/16-conv learns, got none: every .* diverged"
    ):
        mqar.carry_out(run, replace(place, records=records))


def test_missing_trials_are_named():
    runs = tiny("mqar", rates=RATES)
    run = next(r for r in runs if r.about["stage"] == "main")
    with pytest.raises(
        ValueError, match="^records: expected trials of gla/16-conv with the learning rates 0.002, 0.004"
    ):
        choice_of(run, trial_records(runs, {(run.about["group"], 1e-3): 0.5}))
    whole = trial_records(runs, {(run.about["group"], r): 0.5 for r in RATES})
    with pytest.raises(ValueError, match="^records"):  # of other settings
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
    runs, file = tiny("mqar", rates=RATES, bare_widths=None), tmp_path / "r.json"
    outcome = carry_out(runs, place, file)
    assert not outcome.failed
    assert outcome.done[3:-1] == [f"rate/gla/16-conv/{rate:g}" for rate in tried]
    records = results.read(file, "mqar")
    assert best is None or records[-1]["name"].startswith("main") and records[-1]["learning rate"] == best
    again = carry_out(runs, place, file)
    assert len(results.read(file, "mqar")) == len(records) and not again.failed


def test_a_result_says_how_its_rate_was_chosen(place, tmp_path):
    runs, file = tiny("language", mixers=("gla",)), tmp_path / "r.json"
    carry_out(runs, place, file)
    trial, main = results.read(file, "language")
    assert trial["data"] == "validation" and main["data"] == "test" and "choice" not in trial
    assert main["choice"]["rate"] == main["learning rate"] == 1e-2
    assert main["choice"]["losses"] == {"0.01": trial["evaluations"][-1]["loss"]}
    assert main["state"] > 0 and main["baselines"]["loss"] > 0


def test_a_wider_model_has_a_smaller_rate(place, monkeypatch):
    seen = []
    monkeypatch.setattr(_rates, "train", lambda run, task, place: seen.append(run.training.learning_rate))
    s = replace(language.Settings.full(), mixers=("gla",), rates=(2e-3,))
    runs = language.runs(s, 1)
    records = trial_records(runs, {("gla-conv", 2e-3): 1.0})
    for run in runs[1:]:
        _rates.trained(run, None, replace(place, records=records))
    assert seen == [2e-3, 1e-3]  # of 256 and 512


def test_recall_must_be_above_chance_before_longer_runs(place):
    s = replace(recall.Settings.tiny(), mixers=("softmax", "linear", "gla"), must_learn=True)
    runs = recall.runs(s, 1)
    main = runs[-1]

    def records(**losses):
        return trial_records(runs, {(f"{mixer}-conv", 1e-2): loss for mixer, loss in losses.items()})

    with pytest.raises(ValueError, match="^records: expected trials of a linear mixer above chance .* linear, gla"):
        recall.carry_out(main, replace(place, records=records(softmax=0.5, linear=2.99, gla=2.98)))
    with pytest.raises(ValueError, match="^records: expected trials of softmax attention above chance"):
        recall.carry_out(main, replace(place, records=records(softmax=2.99, linear=2.99, gla=0.5)))
    recall.check_learned(s, records(softmax=0.5, linear=2.99, gla=0.5))


def test_a_run_at_chance_says_so_after_a_third(place, capfd):
    run = next(r for r in tiny("mqar", mixers=("linear",)) if r.about["stage"] == "main")
    found = mqar.carry_out(fixed(run, 1e-6), place)
    assert found["at chance"] and capfd.readouterr().err.count("at chance after a third of its steps: its loss is") == 1
    task = mqar.Mqar(run.settings, 0, "cpu")
    task.baselines = lambda: {"loss": 100.0}
    found = train(fixed(run, 1e-6), task, replace(place, folder=place.folder / "other"))
    assert not found["at chance"] and capfd.readouterr().err == ""


def test_models_are_evaluated_in_float32(place):
    run = next(r for r in tiny("mqar") if r.about["stage"] == "main")
    task, seen = mqar.Mqar(run.settings, 0, "cpu"), []
    task.evaluate = lambda model: seen.append(torch.is_autocast_enabled("cpu")) or {"loss": 0.0}
    training = replace(run.training, precision="bf16", learning_rate=1e-3, steps=2, evaluations=2)
    train(replace(run, training=training), task, place)
    assert seen == [False, False]


def test_softmax_must_solve_mqar():
    def record(mixer, stage, accuracy):
        about = {"mixer": mixer, "stage": stage}
        return {"name": f"{stage}/{mixer}", "about": about, "evaluations": [{"accuracy": accuracy}]}

    good = record("softmax", "main", 0.995), record("softmax", "rate", 0.5), record("gla", "main", 0.5)
    assert mqar.sanity(good) == []
    (said,) = mqar.sanity((*good, record("softmax", "main", 0.9)))
    assert said.startswith("main/softmax: softmax attention has 90.0% of the answers, at least 99 % are expected")


def test_an_epoch_reads_every_sequence_once(place):
    task = language.Language(language.Settings.tiny(), 0, place)
    steps = -(-task.cuts // task.rows)
    starts = torch.cat([task.starts(step) for step in range(steps)])[: task.cuts]
    offset = int(starts.min())
    assert sorted(starts.tolist()) == [offset + i * task.T for i in range(task.cuts)] and offset < task.T
    assert offset + task.cuts * task.T + 1 <= len(task.training) + 1
    again = language.Language(language.Settings.tiny(), 0, place)
    assert torch.equal(again.starts(steps + 2), task.starts(steps + 2))  # of another epoch, asked for at once
    assert not torch.equal(language.Language(language.Settings.tiny(), 1, place).starts(0), task.starts(0))


def test_perplexity_counts_every_held_out_token_once(place):
    """A model that knows nothing has a perplexity of the vocabulary."""
    task = language.Language(language.Settings.tiny(), 0, place)
    model = LanguageModel(language.model_of("tiny", "gla", 256))
    torch.nn.init.zeros_(model.lm_head.weight)
    with torch.no_grad():
        found = task.evaluate(model)
    assert found["perplexity"] == pytest.approx(256, rel=1e-5) and found["loss"] == pytest.approx(math.log(256))
    ((tokens, size),) = task.sources.values()
    assert size == len(tokens) == 3 * 151
    assert found["bits a byte"] == pytest.approx(8 * (size - 1) / size, rel=1e-5)


def test_scores_by_source_add_up(tmp_path):
    names = [f"{source}/{i}" for source in ("gcide", "sotu") for i in range(200)]
    corpus = texts.encode_bytes([texts.Document(n, BOOK[: 40 + (n[0] == "g")]) for n in names])
    corpus.save(tmp_path / "speeches.pt")
    task = language.Language(language.Settings.tiny(), 0, Place("cpu", tmp_path, texts=tmp_path))
    torch.manual_seed(0)
    model = LanguageModel(language.model_of("tiny", "gla", 256))
    with torch.no_grad():
        found = task.evaluate(model)
    one, two = (found["by source"][source] for source in ("gcide", "sotu"))
    n, m = (len(tokens) - 1 for tokens, _ in task.sources.values())
    assert found["loss"] == pytest.approx((n * one["loss"] + m * two["loss"]) / (n + m))
    assert one["loss"] != two["loss"]


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
    assert layer["half-life of a token"]["0.5"] == pytest.approx(layer["half-life"]["0.5"], rel=1e-4)
    # the strongest channel of the first head loses 64 ln 5 = 103 nats in a chunk, of the second 64 ln 1.7 = 34
    assert layer["strong chunks"] == 0.5 and layer["chunks"] == 2 * 2 * 2
    assert layer["decay of a chunk"]["1"] == pytest.approx(64 * math.log(5), rel=1e-4)
    assert layer["decay of a chunk"]["0.05"] == pytest.approx(-64 * alpha[4].log().item(), rel=1e-4)
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
    assert found[0]["decay of a chunk"]["1"] == pytest.approx(-g.sum(1).min().item(), rel=1e-5)


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
    """Where the state is passed on, the second window's loss is that of the whole; gradients end there."""
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
    run = replace(run, training=replace(run.training, compile=True))
    found = EXPERIMENTS[name].carry_out(run, replace(place, folder=tmp_path / "compiled"))
    assert compiled == [{"dynamic": False}]
    for (_, x), (_, y) in zip(found["curve"], plain["curve"], strict=True):
        assert x == pytest.approx(y, rel=1e-4)


@pytest.mark.deep
def test_the_live_setting_is_learned_on_a_cpu(place):
    s = replace(mqar.Settings.live(), mixers=("softmax", "gla"))
    runs = [fixed(run, s.rates[0]) for run in mqar.runs(s, 1) if run.about["stage"] == "main"]
    threads, began = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)  # more of them only wait for one another, with tensors as small
    try:
        soft, gla = (mqar.carry_out(run, place)["evaluations"][-1]["accuracy"] for run in runs)
    finally:
        torch.set_num_threads(threads)
    assert soft > 0.95 and gla > 0.6
    assert time.process_time() - began < 60, "two runs of some ten seconds of one core"


@pytest.mark.deep
def test_mqar_can_be_learned(place):
    s = replace(mqar.Settings.tiny(), vocab_size=16, lengths=((16, 2),), tokens=1024, rate_steps=400)
    run = mqar.runs(replace(s, widths=(32,), test_sequences=100), 1)[0]
    assert run.model.use_short_conv and mqar.carry_out(run, place)["evaluations"][-1]["accuracy"] > 0.9


# -- throughput --------------------------------------------------------------------------------


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


# -- texts -------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    """Three packages in little."""
    doc, data = tmp_path / "Documentation", tmp_path / "data"
    for name, text in (("a.rst", b"A\n"), ("b/c.rst.gz", gzip.compress(b"C\n" * 40)), ("translations/x.rst", b"X")):
        (doc / name).parent.mkdir(parents=True, exist_ok=True)
        (doc / name).write_bytes(text)
    (doc / "other.txt").write_text("no")
    entries = "".join(f"Word{i} \\Word\\, n.\n   Meaning {i}.\n\n   More.\n\n" for i in range(60))
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(entries.encode()))
    data.mkdir()
    for year in range(1900, 1960):
        (data / f"{year}_x.json").write_text(
            json.dumps({"text": f"Speech of {year}. \u00e9" * (1800 if year % 2 else 2)})
        )
    return doc, tmp_path / "gcide.dict.dz", data


def test_documents_of_three_packages(sources):
    doc, dictionary, data = sources
    assert [d.name for d in texts.linux_doc(doc)] == ["linux-doc/a.rst", "linux-doc/b/c.rst.gz"]
    entries = texts.gcide(dictionary)
    assert len(entries) == 60 and entries[3].text == "Word3 \\Word\\, n.\n   Meaning 3.\n\n   More.\n"
    speeches = texts.sotu(data)
    assert len(speeches) == 60 and speeches[0].name == "sotu/1900_x" and speeches[0].text.startswith("Speech of 1900.")
    for read_one, name in ((texts.linux_doc, "linux_doc"), (texts.sotu, "sotu")):
        with pytest.raises(FileNotFoundError, match=f"^{name}: expected"):
            read_one(dictionary.parent / "nothing")


def test_held_out_documents_are_whole_and_apart(corpora):
    corpus = texts.load(corpora, "speeches")
    training, validation, held = map(corpus.documents, ("training", "validation", "test"))
    assert (len(training), len(validation), len(held), corpus.vocab_size) == (7, 2, 3, 256)
    assert all(len(x) == 151 and x[-1] == texts.END and not (x[:-1] == texts.END).any() for x in training + held)
    assert bytes(held[0][:-1].tolist()).decode() == BOOK
    assert corpus.held.tolist() == [texts.held_out(name) for name in corpus.names]
    share = sum(texts.held_out(f"gcide/{i}") for i in range(4000)) / 4000
    assert 0.04 < share < 0.06
    parts = [texts.part_of(f"gcide/{i}") for i in range(4000)]
    assert 0.035 < parts.count("validation") / 4000 < 0.06 and parts.count("test") / 4000 == share
    with pytest.raises(ValueError, match="^part: expected one of training, validation, test"):
        corpus.documents("held")
    with pytest.raises(FileNotFoundError, match="^texts: expected texts.pt in the folder"):
        texts.load(corpora, "texts")


def test_byte_pairs(sources, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    documents = [*texts.gcide(sources[1]), *texts.sotu(sources[2])]
    made = texts.prepare(documents, tmp_path, 300)
    corpus = texts.load(tmp_path, "texts")
    assert corpus.vocab_size == 300 and corpus.tokenizer == made["texts"].tokenizer
    assert corpus.tokens.max() < 300 and len(corpus.tokens) < corpus.bytes.sum() / 2
    tokenizer = tokenizers.Tokenizer.from_str(corpus.tokenizer)
    first = corpus.documents(texts.part_of(corpus.names[0]))[0]
    assert first[-1] == texts.END and tokenizer.decode(first[:-1].tolist()) == documents[0].text
    assert len(texts.load(tmp_path, "speeches").names) == 30  # the long ones
    with pytest.raises(ValueError, match="^vocab_size: expected more than 256"):
        texts.encode_pairs(documents, 256)


# -- settings ----------------------------------------------------------------------------------

WRONG = [
    (mqar, "lengths", ((8, 4),), ValueError),
    (mqar, "lengths", (8, 4), TypeError),
    (mqar, "vocab_size", 8, ValueError),
    (mqar, "tokens", 8, ValueError),
    (mqar, "rates", (), ValueError),
    (mqar, "rates", (1e-3, -1.0), ValueError),
    (mqar, "widths", 16, TypeError),
    (mqar, "steps", 2.0, TypeError),
    (mqar, "mixers", ("rwkv",), ValueError),
    (mqar, "bare_widths", (), ValueError),
    (recall, "T", 20, ValueError),
    (recall, "names", 1, ValueError),
    (recall, "compile", 1, TypeError),
    (language, "sizes", ("7B",), ValueError),
    (language, "rates", (), ValueError),
    (language, "conv", 1, TypeError),
    (language, "tokens", 8, ValueError),
    (ablations, "changes", ("rank 3",), ValueError),
    (ablations, "size", "7B", ValueError),
    (length, "vocab_size", 255, ValueError),
    (length, "windows", (64,), ValueError),
    (throughput, "contenders", ("mamba",), ValueError),
    (throughput, "tokens", 33, ValueError),
    (throughput, "precision", "fp8", ValueError),
]


@pytest.mark.parametrize("module, field, value, kind", WRONG)
def test_wrong_settings_name_the_field(module, field, value, kind):
    name = "tokens" if (module, field) == (length, "windows") else field  # too few for such a window
    with pytest.raises(kind, match=f"^{name}: expected"):
        replace(module.Settings.tiny(), **{field: value})


@pytest.mark.parametrize(
    "field, value, kind",
    [
        ("warmup", 1.5, ValueError),
        ("evaluations", 9, ValueError),
        ("precision", "fp8", ValueError),
        ("learning_rate", "1e-3", TypeError),
        ("clip", math.inf, ValueError),
    ],
)
def test_wrong_training_names_the_field(field, value, kind):
    with pytest.raises(kind, match=f"^{field}: expected"):
        replace(Training(8, 1e-3), **{field: value})


def test_a_corpus_that_does_not_fit_is_named(place):
    s = language.Settings.tiny()
    for field, value in (("vocab_size", 100), ("T", 600)):
        with pytest.raises(ValueError, match=f"^{field}: expected"):
            language.Language(replace(s, **{field: value}, tokens=600), 0, place)
    s = length.Settings.tiny()
    with pytest.raises(
        ValueError, match="^test_speeches: expected at most 0, the held-out speeches of 151 bytes, got 2"
    ):
        length.Length(replace(s, test_length=151), 16, True, 5, 0, place)
    with pytest.raises(ValueError, match="^test_speeches: expected at most 3"):
        length.Length(replace(s, test_speeches=4), 16, True, 5, 0, place)
    with pytest.raises(ValueError, match="^windows: expected"):
        length.Length(replace(s, tokens=400), 151, True, 5, 0, place)


def test_every_field_of_settings_is_described():
    for module in EXPERIMENTS.values():
        for field in dataclasses.fields(module.Settings):
            assert any(
                field.name in line.partition(":")[0].replace(",", " ").split()
                for line in module.Settings.__doc__.splitlines()
            ), f"{module.__name__}: {field.name}"


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100, 0.1) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == 1 and shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True) and 0.1 < shares[-1] < 0.11


def test_data_depend_on_what_names_them_alone():
    def draw(*what):
        return torch.rand(3, generator=dice("cpu", *what)).tolist()

    assert draw("x", 0, 1) == draw("x", 0, 1) != draw("x", 1, 0)


# -- plan --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid():
    return {name: plan.chunks(name, 3) for name in EXPERIMENTS}


def test_the_plan_has_every_run_once_in_chunks_of_eight_minutes(grid):
    for name, chunks in grid.items():
        module = EXPERIMENTS[name]
        wanted = [run.name for run in module.runs(module.Settings.full(), 3)]
        assert [run.name for chunk in chunks for run in chunk.runs] == wanted
        assert all(chunk.minutes <= 8 for chunk in chunks)
        assert all(1 <= chunk.jobs <= plan.JOBS for chunk in chunks)
    assert all(chunk.jobs == 1 for chunk in grid["throughput"])


def test_the_most_important_runs_take_at_most_75_minutes(grid):
    """lab/experiments.md has their order: MQAR, overwriting, recall, throughput, length, language at 10M."""
    overwrite = plan.chunks("mqar", 3, settings=mqar.Settings.overwrite())
    small = plan.chunks("language", 3, settings=replace(language.Settings.full(), sizes=("10M",)))
    whole = [grid[name] for name in ("mqar", "recall", "throughput", "length")]
    assert sum(chunk.minutes for chunks in (*whole, overwrite, small) for chunk in chunks) <= 75


def test_language_models_have_the_sizes_that_they_are_called(grid):
    runs = {run.about["size"]: run for chunk in grid["language"] for run in chunk.runs if run.about["mixer"] == "gla"}
    for size, run in runs.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in LanguageModel(run.model).parameters())
        assert count == pytest.approx(1e6 * int(size[:-1]), rel=0.05)


def test_longer_runs_are_predicted_longer():
    run = tiny("language")[0]
    short, long = (plan.predict(replace(run, training=replace(run.training, steps=n))) for n in (100, 200))
    assert long.gpu == pytest.approx(2 * short.gpu) and long.host > short.host


def test_what_is_said_of_full_settings():
    """No full setting has been run: where a module says so it must stop saying so when records are there."""
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    for name, module in EXPERIMENTS.items():
        said = "No full setting of it has been run yet" in module.__doc__.replace("\n", " ")
        assert said == (not list(results.glob(f"*-{name}.json"))), name
    assert ast.get_docstring(ast.parse(Path(plan.__file__).read_text())).count("Predicted, not measured") == 1
