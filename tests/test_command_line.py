"""`python -m gla_ref check` from a shell: it says right only after a whole report, whatever the kernel does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import thin

from gla_ref import FORMS, check
from gla_ref.__main__ import main, shell
from gla_ref._commands import apart
from gla_ref.check._examine import Examiner
from gla_ref.check._run import attempt

MODULE = """
import ctypes, os, signal, sys, threading, time
import torch
from gla_ref import FORMS

right = FORMS["gla"]["chunkwise"]
number = 3

def wrong(q, k, v, g, **named):
    return right(q, k, v, 2 * g, **named)

def breaks(breaking):
    def kernel(q, k, v, g, **named):
        if q.shape[1] == 7:
            breaking()
        return right(q, k, v, g, **named)

    return kernel

def lose():
    def lost(*args, **named):
        raise torch.AcceleratorError("CUDA error: misaligned address")

    torch.zeros = lost  # as everything in a CUDA context that has had such an error
    lost()

exits, aborts, loses = breaks(lambda: os._exit(0)), breaks(os.abort), breaks(lose)
faults = breaks(lambda: ctypes.string_at(0))
hangs = breaks(lambda: ctypes.pythonapi.sleep(1000))  # Python's lock is kept: no other thread runs

def lingers(q, k, v, g, **named):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return right(q, k, v, g, **named)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module of kernels in the current folder."""
    name = f"kernels_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "random.py").write_text("def fn(q, k, v, g): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


BROKEN = "breaks: call (1 case, first length 7) expected to return, but "
FROM_A_SHELL = {  # function: (exit status, text on stdout)
    "exits": (1, BROKEN + "its process ended with status 0"),
    "aborts": (1, BROKEN + "its process ended with signal SIGABRT"),
    "faults": (1, BROKEN + "its process ended with signal SIGSEGV"),
    "hangs": (1, BROKEN + "it did not within 1 s"),
    "loses": (1, "breaks: call (1 case, first length 7) AcceleratorError: CUDA error: misaligned address"),
    "lingers": (0, "gla on cpu in float32, quick, seed 0: right (2 of"),
    "wrong": (1, "gla on cpu in float32, quick, seed 0: WRONG (2 of"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="about signals")
@pytest.mark.parametrize("name", thin(FROM_A_SHELL, "exits"))
def test_the_verdict_is_that_of_a_whole_report(tmp_path, name):
    """A kernel that breaks its process in one case is wrong in that one, and is called in the next."""
    status, said = FROM_A_SHELL[name]
    (tmp_path / "own.py").write_text(MODULE)
    limit = "1" if name == "hangs" else "60"
    command = f"-m gla_ref check gla own:{name} --only *7 --only *63 --json out.json --time-limit {limit}"
    environment = os.environ | {"PYTHONPATH": str(Path(check.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    printed = " ".join(done.stdout.split())
    assert done.returncode == status and said in printed and not done.stderr, done.stdout + done.stderr
    assert "(2 of" in printed
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    passed = {row["case"] for row in rows if row["status"] == "passed"}
    assert ("length 63" in passed) is (name != "wrong") and ("length 7" in passed) is (name == "lingers")


@pytest.mark.parametrize(
    "verdict, ended, status, said",
    [
        ("0", 0, 0, ""),
        ("0", -signal.SIGSEGV, 0, ""),  # after the report
        ("1", 0, 1, ""),
        ("", 0, 2, "its process ended with status 0 (at start)"),
        ("", -signal.SIGKILL, 2, "its process ended with signal SIGKILL (at start)"),
    ],
)
def test_an_exit_status_is_no_verdict(monkeypatch, capsys, verdict, ended, status, said):
    def call(command, env):
        if verdict:
            Path(env[apart.VARIABLE], "verdict").write_text(verdict)
        return ended

    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert apart.run(["check"], "own:fn", 60.0) == status
    assert (said in capsys.readouterr().err) if said else not capsys.readouterr().err


def test_an_error_of_the_kit_is_no_verdict(monkeypatch, capsys):
    monkeypatch.setattr("gla_ref.__main__.main", lambda argv: 1 / 0)
    monkeypatch.setattr(apart, "begin", lambda: True)
    monkeypatch.setattr(apart, "finish", sys.exit)
    with pytest.raises(SystemExit) as stopped:
        shell(["check", "gla", "own:fn"])
    assert stopped.value.code == 2 and "error: in the check itself, not in the kernel" in capsys.readouterr().err


def test_an_interrupt_says_where_the_check_was(monkeypatch, capsys):
    def call(command, env):
        Path(env[apart.VARIABLE], "place").write_text("gate -inf")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert apart.run(["check"], "own:fn", 60.0) == 128 + signal.SIGINT
    assert "interrupted (at gate -inf)" in capsys.readouterr().err


def test_a_log_has_a_line_on_progress_now_and_then(own, monkeypatch, capsys):
    command = ["check", "gla", f"{own}:wrong", "--only", "length 6?"]
    assert main(command) == 1 and not capsys.readouterr().err, "a short check says nothing on the way"
    monkeypatch.setattr("gla_ref.__main__.EVERY", 0.0)
    monkeypatch.setattr(Examiner, "explain", lambda *_: [])
    assert main(command) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 3 cases, next: length 63"
    assert lines[-1] == "3 of 3 cases: 3 are wrong; looking for the mistake"


@pytest.mark.parametrize(
    "kernel, options, said",
    [
        ("{}:absent", "", "kernel: cannot load {}:absent: AttributeError"),
        ("nowhere:fn", "", "kernel: cannot load nowhere:fn: ModuleNotFoundError: No module named 'nowhere'"),
        ("ends:fn", "", "kernel: cannot load ends:fn: SystemExit: 0"),
        ("{}:number", "", "kernel: expected a function, got {}:number of type int"),
        ("{}.py", "", "kernel: expected MODULE:FUNCTION or FILE.py:FUNCTION, got {}.py"),
        ("nowhere.py:fn", "", "kernel: expected a file that Python can import, got nowhere.py"),
        ("other/random.py:fn", "", "kernel: expected a file whose name no other module has, got other/random.py"),
        ("{}:right", "--device abacus", "device: expected one of this machine, such as cpu or cuda, got abacus"),
        ("{}:right", "--device meta", "device: expected one of this machine, such as cpu or cuda, got meta"),
        ("{}:right", "--json nowhere/out.json", "--json: expected a file that can be written, got 'nowhere/out.json'"),
        ("{}:right", "--json other", "--json: expected a file that can be written, got 'other'"),
        ("{}:right", "--time-limit -1", "--time-limit: expected seconds, more than 0 and at most 1e+09, got -1"),
        ("{}:right", "--time-limit soon", "--time-limit: expected seconds, more than 0 and at most 1e+09, got soon"),
        ("{}:right", "--K 64,many", "--K: expected a positive integer, got many"),
    ],
)
def test_what_cannot_run_is_said_in_a_sentence(own, capsys, kernel, options, said):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "gla", kernel.format(own), *options.split()])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out
    assert printed.err.count("\n") == 1 and f" {said.format(own)}" in printed.err


def test_a_kernel_in_a_file(own, capsys):
    os.mkdir("inner")
    os.rename(f"{own}.py", f"inner/{own}.py")
    assert main(["check", "gla", f"inner/{own}.py:wrong", "--only", "length 7"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_kernel_that_calls_exit_is_wrong_and_ctrl_c_is_not_its_failure(monkeypatch):
    def leaves(q, k, v, g):
        sys.exit(0)

    report = check.kernel("gla", leaves, only="length 7")
    assert not report.ok and "SystemExit: 0 (leaves, line" in report.failures[0].message

    def interrupt(thread, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("threading.Thread.join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        attempt(1.0, lambda: None)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_limit_is_a_time(seconds):
    with pytest.raises(ValueError, match="time_limit: expected seconds, more than 0, got"):
        check.kernel("gla", FORMS["gla"]["chunkwise"], time_limit=seconds)
