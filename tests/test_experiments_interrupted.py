"""Experiments that are interrupted, killed or fail: the numbers are as if nothing had been, the other runs go on."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiment_runs import fixed, tiny
from filelock import FileLock, Timeout

from gla_ref import results
from gla_ref.experiments import EXPERIMENTS, _driver, language, mqar, texts
from gla_ref.experiments.__main__ import main
from gla_ref.experiments._driver import carry_out_all, carry_out_one, record_of


def numbers(record: dict) -> dict:
    """The parts of a record that must be equal."""
    return {name: record[name] for name in ("curve", "evaluations", "diverged")}


class Killed(BaseException):
    """As a signal would end the program, wherever it is."""


@pytest.mark.parametrize("name, pattern", [("mqar", "main/gla/"), ("language", "main/tiny/gla")])
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


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", {"step": Path("x")}, {"step": 1}])
def test_a_checkpoint_that_cannot_be_read_is_named(content, place):
    run = tiny("language")[0]
    file = run.file(place.folder, ".pt")
    file.parent.mkdir(parents=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)  # if it has a Path, PyTorch would advise to load it with weights_only=False
    with pytest.raises(ValueError, match=r"^folder: expected .*rate-gla-0.01.pt, got .*; remove it") as refusal:
        language.carry_out(run, place)
    assert "weights_only" not in str(refusal.value)
    assert refusal.value.__suppress_context__ or not refusal.value.__context__  # a traceback without PyTorch's advice


def test_a_corpus_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "texts.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"^texts: expected a corpus in \S+texts.pt, got"):
        texts.load(tmp_path)


def test_an_interrupt_leaves_checkpoints_and_a_summary(place, tmp_path, capfd):
    def interrupt():
        while not list(place.folder.rglob("*.pt")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    runs, file = tiny("language", steps=400), tmp_path / "r.json"
    before = signal.getsignal(signal.SIGINT)  # in a shell's background it is to ignore
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    outcome = carry_out_all(runs, replace(place, save_every=0.2), file)
    thread.join()
    assert "interrupted: runs stop with a checkpoint" in capfd.readouterr().err
    assert len(outcome.left) >= 3 and not outcome.failed and len(outcome.left) + len(outcome.done) == len(runs)
    saved = torch.load(next(place.folder.rglob("*.pt")), weights_only=True)
    assert 0 < saved["step"] < 400
    assert signal.getsignal(signal.SIGINT) is before


def test_two_programs_share_runs(place, tmp_path):
    """A run that another program carries out is waited for; one that it has finished since is not done again."""
    runs, file = tiny("language")[:2], tmp_path / "r.json"
    lock = FileLock(runs[0].file(place.folder, ".lock"), thread_local=False)
    Path(lock.lock_file).parent.mkdir(parents=True)
    with lock:
        outcome = carry_out_all(runs, replace(place, deadline=time.time() + 2), file)
    assert outcome.left == [runs[0].name] and outcome.done == [runs[1].name]
    lock.acquire()
    threading.Timer(0.5, lock.release).start()
    assert carry_out_all(runs, place, file).done == [runs[1].name, runs[0].name]
    assert carry_out_one(runs[0], place, file) == results.read(file, "language")[1]


@pytest.mark.deep  # a process of its own
def test_a_program_side_by_side_does_what_this_one_leaves(place, tmp_path, monkeypatch):
    def only_look(run, place, file):
        if record := record_of(run, results.read(file, "language")):
            return record
        raise Timeout("elsewhere")

    monkeypatch.setattr(_driver, "carry_out_one", only_look)
    where = ["--records", str(tmp_path / "r.json"), "--folder", str(place.folder), "--texts", str(place.texts)]
    assert main(["language", "--preset", "tiny", "--seeds", "1", "--jobs", "2", "--minutes", "2", *where]) == 0
    assert len(results.read(tmp_path / "r.json", "language")) == len(tiny("language"))


def test_a_program_side_by_side_that_fails_fails_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gla_ref.experiments.__main__.side_by_side", lambda *_: subprocess.Popen("exit 2", shell=True))
    monkeypatch.setattr("gla_ref.experiments.__main__.carry_out_all", lambda *_: _driver.Outcome())
    assert main(["mqar", "--preset", "tiny", "--jobs", "2", "--records", str(tmp_path / "r.json")]) == 1
    assert "program 1 side by side failed: ChildProcessError: its exit status is 2" in capsys.readouterr().err


def test_one_failure_does_not_cost_the_rest(place, tmp_path, monkeypatch):
    runs = tiny("language", steps=1, changes=None)
    carry = language.carry_out

    def fail(run, place):
        if run.about["mixer"] == "gla":
            raise RuntimeError("no memory")
        return carry(run, place)

    monkeypatch.setattr(language, "carry_out", fail)
    outcome = carry_out_all(runs, place, tmp_path / "r.json")
    assert outcome.done == ["rate/softmax/0.01", "main/tiny/softmax/seed0"]
    assert {name: str(x) for name, x in outcome.failed.items()} == {
        "rate/gla/0.01": "no memory", "main/tiny/gla/seed0": "no memory"
    }  # fmt: skip


def test_a_loss_that_is_no_number_ends_a_run(place):
    run = tiny("mqar", mixers=("linear",))[0]  # on a CPU the references of the others refuse such gates by name
    run = replace(run, training=replace(run.training, learning_rate=1e30, clip=1e30, steps=50))
    found = mqar.carry_out(run, place)
    assert found["diverged"] and found["curve"][-1][1] is None and len(found["curve"]) < 50
    assert "NaN" not in json.dumps(found)
