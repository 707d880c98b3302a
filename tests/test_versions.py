"""The versions of Triton: the table agrees with records and requirements, and the compile check fetches each once."""

import argparse
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from cases import ROOT, in_process
from packaging.requirements import Requirement

from gla_ref import kernels, results
from gla_ref.kernels.launch.versions import MEASURED, PINNED, REQUIRED, not_interpreted, too_old
from gla_ref.mechanisms import MECHANISMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

import other_tritons

from gla_ref.kernels.launch import checks

RECORDS = ROOT / "benchmarks" / "results"


def test_records_of_a_gpu_were_made_with_the_measured_versions():
    contents = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    assert set().union(*map(results.tritons, contents)) == set(MEASURED)


def test_the_pinned_version_is_that_of_the_environment():
    for name in ("requirements.in", "requirements.txt"):
        assert f"\ntriton=={PINNED};" in (ROOT / name).read_text()


def test_the_oldest_versions_were_tried():
    """Those that pyproject.toml allows; docs/architecture.md names the program that tried them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    record = results.read(RECORDS / "oldest-versions.json", "oldest")
    (oldest,) = {r["torch"].removesuffix(".0") for r in record}
    assert f"torch>={oldest}" in project["dependencies"]
    assert project["optional-dependencies"]["triton"][0].startswith(f"triton>={REQUIRED};")
    assert f"{REQUIRED}.0" in {r["triton"] for r in record}
    for r in record:
        refused = too_old(r["triton"]) or not_interpreted(r["triton"], r["numpy"])
        assert r["runs"] or refused, f"{r}: expected a step that runs, or a version that is refused"
        assert r["runs"] or refused in r["said"], "expected the sentence that names what to install"


def test_colab_needs_nothing_but_the_wheel():
    """The versions that Colab has satisfy the package's and the notebooks' dependencies, so that it keeps them."""
    lines = (ROOT / "tools" / "colab.txt").read_text().splitlines()
    has = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(x) for x in (*project["dependencies"], *extras["triton"], *extras["notebook"])]
    assert all(x.name == "gla-ref" or x.specifier.contains(has[x.name]) for x in needed)
    assert has["triton"] in MEASURED


@pytest.mark.parametrize(
    "triton, refused", [("3.2.0", True), ("3.4.1+git12", True), ("3.5.0", False), ("3.10.0", False)]
)
def test_an_old_triton_is_refused(triton, refused, monkeypatch):
    assert bool(too_old(triton)) == refused
    monkeypatch.setattr(kernels, "version", lambda name: triton)
    assert not refused or kernels.refusal() == too_old(triton)


@pytest.mark.parametrize(
    "triton, numpy, refused",
    [("3.6.0", "2.4.6", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.4.6", False), ("3.5.1", "2.10.0", True)],
)
def test_an_interpreter_that_fails_with_this_numpy_is_refused(triton, numpy, refused, monkeypatch):
    assert bool(not_interpreted(triton, numpy)) == refused
    monkeypatch.setattr(checks.triton, "__version__", triton)
    monkeypatch.setattr(checks.np, "__version__", numpy)
    q = torch.ones(1, 4, 1, 16)
    if refused:
        with pytest.raises(RuntimeError, match="cannot interpret kernels with NumPy"):
            checks.check_launch({"q": q}, MECHANISMS["linear_attention"].arguments)
    else:
        checks.check_launch({"q": q}, MECHANISMS["linear_attention"].arguments)


@pytest.mark.deep
def test_a_launch_says_whether_multiply_adds_are_fused():
    """Triton 3.9 warns where nobody says it, and compiles with them; 3.10 will compile without."""
    command = ["tools/compile_kernels.py", "gla_step 64 float16", "--arch", "80", "--jobs", "1"]
    in_process("-W", "error:TRITON_DEFAULT_FP_FUSION:UserWarning", *command)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and the commands that would fill it."""
    monkeypatch.setattr(other_tritons, "ROOT", tmp_path)
    monkeypatch.setattr(other_tritons, "CACHE", tmp_path / "triton")
    monkeypatch.setattr(other_tritons, "installed", lambda name: "3.9.0")
    calls = []

    def install(command, **options):
        calls.append(command)
        if command[-1] == "triton==3.0.0":
            raise subprocess.CalledProcessError(1, command)
        Path(command[-2], "triton").mkdir()

    monkeypatch.setattr(subprocess, "run", install)
    return calls


def test_a_version_is_fetched_once(cache):
    assert other_tritons.folder("3.9.0") is None and not cache  # installed
    place = other_tritons.folder("3.7.1")
    assert place.name == "3.7.1" and (place / "triton").is_dir()
    assert other_tritons.folder("3.7.1") == place and len(cache) == 1


def test_a_fetch_that_fails_leaves_nothing(cache):
    with pytest.raises(subprocess.CalledProcessError):
        other_tritons.folder("3.0.0")
    assert list(other_tritons.CACHE.iterdir()) == []


def test_every_version_has_a_process_that_finds_it_first(monkeypatch, tmp_path):
    monkeypatch.setattr(other_tritons, "folder", lambda version: None if version == "3.9.0" else tmp_path / version)
    monkeypatch.setenv("PYTHONPATH", "src")
    started = []

    def start(command, env):
        started.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, len(started) == 3)

    monkeypatch.setattr(other_tritons.subprocess, "run", start)
    assert other_tritons.compile_with(["3.9.0"], []) == 0
    assert other_tritons.compile_with([], []) == "Triton 3.7.1: see above"
    assert started == ["src", f"{tmp_path}/3.6.0:src", f"{tmp_path}/3.7.1:src"]


def test_an_option_that_names_no_version_is_refused():
    assert other_tritons.version("3.9.0") == "3.9.0"
    with pytest.raises(argparse.ArgumentTypeError, match="expected a version such as"):
        other_tritons.version("gla hopper")


@pytest.mark.deep
def test_kernels_are_compiled_with_the_version_that_is_asked_for():
    command = ["tools/compile_kernels.py", "gla 64 bfloat16", "--arch", "90"]
    said = in_process(*command, "--triton", PINNED)
    assert f"-- Triton {PINNED}" in said and f"Triton {PINNED}: 5 launches" in said
    # the forward pass, and the gradient
    assert re.findall(r"(?m)^(\w+)  ", said)[1:] == ["walk", "mend", "walk", "unwind", "mend_gradient"]
