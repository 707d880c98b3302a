"""`python -m gla_ref`: what it prints and its exit status."""

import importlib.metadata
import io
import sys

import pytest
import torch

from gla_ref import FORMS, kernels
from gla_ref.__main__ import main, shell
from gla_ref._commands import doctor
from gla_ref.check import museum
from gla_ref.check._examine import Examiner

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels.hopper import gluon_names
from gla_ref.kernels.launch import versions


@pytest.mark.parametrize(
    "argv, message",
    [
        (["check", "gla", "--min-gate", "1"], "--min-gate: expected a log gate, at most 0, got 1"),
        (["check", "gla", "--K", "0"], "--K: expected a positive integer, got 0"),
        (["check", "gla", "--layout", "tbhd"], "--layout: invalid choice"),
        (["walk"], "invalid choice: 'walk'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the doctor launches kernels on a GPU")
@pytest.mark.parametrize("command", ["doctor", "check gla --list", "check --museum --list", "check --museum"])
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_every_command_prints_in_any_encoding(command, encoding, monkeypatch):
    monkeypatch.setattr(museum, "ROOMS", (museum.room(15),))  # whose title has a Greek letter
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    assert shell(command.split()) == 0
    sys.stdout.flush()
    assert printed.getvalue().decode(encoding)
    assert (rb"It wanted \u03b1" in printed.getvalue()) == ("museum" in command)


def test_explain_without_triton_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    x = torch.empty(1, 64, 2, 16, device="meta")
    for what in (kernels.explain, kernels.plan):
        with pytest.raises(ModuleNotFoundError, match="need Triton, which is not installed"):
            what("linear_attention", x, x, x, hardware="sm_80")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a host without a GPU")
def test_the_doctor_without_a_gpu(capsys):
    """Versions and plans; nothing is launched, and that is no failure."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "No GPU" in printed and "Nothing was launched" in printed
    assert all(f"\n{name} " in printed for name in FORMS)
    assert "portable: walk, mend" in printed and "gradients" in printed
    assert all(str(known) in printed for known in versions.KNOWN)
    assert versions.standing(importlib.metadata.version("triton")) in printed and "Hopper kernels" not in printed


@pytest.mark.parametrize(
    "installed, said",
    [
        *((x, "a version that records of a GPU were made with") for x in ("3.6.0", "3.6.0+cu130", "3.9.0")),
        ("3.7.1", "compiled only: records of a GPU are from 3.6.0 and 3.9.0"),
        ("3.8.0", "unknown to this project: its records of a GPU are from 3.6.0 and 3.9.0"),
    ],
)
def test_the_doctor_says_what_was_done_with_this_triton(installed, said, monkeypatch, capsys):
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed if name == "triton" else version(name))
    monkeypatch.setattr(doctor, "planned", lambda device, dtype: [])
    assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.split("\n") if said in line)
    assert f"Triton {installed} " in line


def test_the_doctor_refuses_an_old_triton(monkeypatch, capsys):
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.2.0" if name == "triton" else version(name))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"No kernel runs here: {versions.too_old('3.2.0')}" in printed and "What would run" not in printed


def test_the_doctor_names_what_gluon_lacks(monkeypatch):
    """On Hopper only: other GPUs have no Hopper kernels, whatever Triton they have."""
    monkeypatch.setattr(gluon_names, "missing", lambda: "some.module.name")
    said = doctor.on_hopper("sm_90")
    assert "Hopper kernels do not run" in said and "no some.module.name" in said
    assert said.endswith("pip install triton==3.9.0") and doctor.on_hopper("sm_80") is None
    monkeypatch.setattr(gluon_names, "missing", lambda: None)
    monkeypatch.setattr(doctor, "release", lambda: (3, 9))
    assert doctor.on_hopper("sm_90").startswith("Hopper kernels run") and "slow" not in doctor.on_hopper("sm_90")
    monkeypatch.setattr(doctor, "release", lambda: (3, 6))
    assert doctor.on_hopper("sm_90").endswith("slower than by Triton 3.9: pip install triton==3.9.0")


def test_the_doctor_without_triton(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    assert "not installed" in capsys.readouterr().out


def test_the_doctor_tells_wrong_from_right(monkeypatch):
    """References in the place of kernels: one as it is, and one whose gates count twice."""
    right = FORMS["gla"]["chunkwise"]
    monkeypatch.setattr(Examiner, "explain", lambda *_: [])
    monkeypatch.setitem(FORMS["gla"], "triton", right)
    sentence, good = doctor.judged("gla", "cpu", torch.float32)
    assert good and sentence.startswith("right, largest error 0.")
    monkeypatch.setitem(FORMS["gla"], "triton", lambda q, k, v, g, **options: right(q, k, v, 2 * g, **options))
    sentence, good = doctor.judged("gla", "cpu", torch.float32)
    assert not good and sentence.startswith("WRONG (") and "dg" in sentence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_doctor_on_a_gpu(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("right, largest error") == len(FORMS)
    assert torch.cuda.get_device_name() in printed
