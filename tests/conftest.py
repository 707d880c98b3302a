"""Settings of the whole run: Triton's interpreter without a GPU, hypothesis, and the summary of a GPU run."""

import atexit
import gc
import importlib.util
import json
import os
import re
import sys
from inspect import isfunction
from itertools import compress
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

gc.disable()  # until all tests are collected: half of the seconds that this takes
sys.modules["rfc3987_syntax"] = None  # 38 grammars that nbformat's import would build, for formats that no schema has
if importlib.util.find_spec("playwright") is None:
    collect_ignore = ["browser"]

try:
    from hypothesis import settings

    fixed = {"derandomize": True, "deadline": None, "database": None}
    settings.register_profile("quick", max_examples=25, **fixed)
    settings.register_profile("deep", max_examples=300, **fixed)
    settings.load_profile("quick")  # make test-deep asks for the other
except ImportError:  # the GPU host may lack it; the tests that use it say so themselves
    pass


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"])
def here():
    """Marks a test of kernels `gpu` where they run compiled; without a GPU they are interpreted."""


@pytest.fixture
def poisoned(monkeypatch):
    """Uninitialised memory holds NaN."""

    def poisoning(make):
        def poison(*args, **options):
            x = make(*args, **options)
            return x.fill_(float("nan") if x.is_floating_point() else 1)

        return poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


@pytest.fixture
def axes_of(monkeypatch):
    """Calls a function that draws a chart, in the book's style; returns its axes."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: None)

    def axes(chart, *args, **options):
        chart(*args, **options)
        return pyplot.gcf().axes

    with pyplot.style.context("gla_ref.book.style"):
        yield axes
    pyplot.close("all")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with the texts of small experiments."""
    from experiment_runs import save_speeches

    folder = tmp_path_factory.mktemp("texts")
    save_speeches(folder)
    return folder


@pytest.fixture
def place(tmp_path, corpora):
    """A folder for the checkpoints of experiments on a CPU."""
    from gla_ref.experiments.runs import Place

    return Place("cpu", tmp_path / "checkpoints", texts=corpora)


def left_out(config, marks) -> bool:
    """Whether the run's expression says `not` of one of these marks; False if it is more than a chain of `and`."""
    terms = re.sub(r"\([^()]*\)", "()", config.option.markexpr).split(" and ")
    chain = all(re.fullmatch(r"(not )?(\w+|\(\))", term) for term in terms)
    return chain and any(f"not {mark.name}" in terms for mark in marks)


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name == "browser" and left_out(config, [pytest.mark.browser]) else None


def pytest_pycollect_makeitem(collector, obj):
    """Make no tests of a function that the run leaves out."""
    if isfunction(obj) and left_out(collector.config, [*getattr(obj, "pytestmark", ()), *collector.iter_markers()]):
        return []


def pytest_generate_tests(metafunc):
    """Make no tests of the parameters that the run leaves out: keep the others when a test is parametrized."""
    parametrize = metafunc.parametrize

    def keep(names, values, *, ids=None, **more):
        values = list(values)
        kept = [not left_out(metafunc.config, getattr(x, "marks", ())) for x in values]
        if isinstance(ids, list | tuple):
            ids = list(compress(ids, kept))
        parametrize(names, list(compress(values, kept)), ids=ids, **more)

    metafunc.parametrize = keep


def pytest_collection_finish():
    gc.freeze()  # what was made so far stays until the end
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_collection_modifyitems(config, items):
    """Without a GPU the files that take longest start first, so that in the end no worker waits for another's.

    On a GPU most of the time goes into compiling. There a worker begins with a run of neighbours (`--dist worksteal`),
    so the tests of a function that share a dtype, and with it their kernels, are neighbours.
    """
    if torch.cuda.is_available():
        found = {item: item.callspec.params if hasattr(item, "callspec") else {} for item in items}
        items.sort(key=lambda item: (item.path.stem, item.function.__name__, str(found[item].get("dtype"))))
    else:
        order = "check", "check_calls", "kernels_hopper", "kernels_portable", "orders", "bench"
        items.sort(key=lambda item: [*order, stem := item.path.stem.removeprefix("test_")].index(stem))


def pytest_runtest_teardown(item):
    """A large test gives its memory back: others run at the same time, and PyTorch would keep it for this process."""
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def pytest_addoption(parser):
    parser.addoption("--gpu-summary", metavar="FILE", help="write GPU, versions and results of the run to FILE")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    for report in terminalreporter.getreports("passed"):
        for what, seconds in report.user_properties:  # `record_property`: promises of speed, for tools/nightly.py
            terminalreporter.write_line(f"measured {what}: {seconds} s")
    target = config.getoption("--gpu-summary")
    if not target:
        return
    if not torch.cuda.is_available():
        pytest.exit("--gpu-summary: expected an NVIDIA GPU, found none", returncode=1)
    from gla_ref import results

    stats = terminalreporter.stats
    summary = {
        **results.environment(torch.cuda.get_device_name()),
        "exit_status": int(exitstatus),
        **{kind: len(stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")},
        "not_passed": sorted({r.nodeid for kind in ("failed", "error") for r in stats.get(kind, [])}),
        "tests": sorted(f"{r.nodeid} {r.duration:.3f} s" for r in stats.get("passed", [])),
    }
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(json.dumps(summary, indent=1) + "\n")
