"""A kernel's check as a test of pytest, or every case as a test of its own (appendix "Check your kernel")::

    def test_my_gla(gla_ref_check):
        gla_ref_check("gla", my_fn, device="cuda", dtype="bf16")

    @pytest.mark.gla_ref("gla", my_fn, device="cuda", dtype="bf16", xfail={"packed*": "issue 7"})
    def test_my_gla(gla_ref_case):
        gla_ref_case()

Options are those of :func:`gla_ref.check.kernel`; level and seed are those of the command line where a test gives none.
"""

import os
from collections.abc import Callable
from fnmatch import fnmatch

import pytest

from . import Report, kernel, selected
from ._claims import Claim, dtype_of
from ._words import annotations, source

ANNOTATIONS = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    group = parser.getgroup("gla_ref", "checks of kernels by gla_ref")
    group.addoption("--gla-ref-level", choices=("quick", "full"), default="quick", help="cases of kernels' checks")
    group.addoption("--gla-ref-seed", type=int, default=0, metavar="N", help="of the checks' random inputs")
    group.addoption("--gla-ref-github", action="store_true", help="annotations, as in GitHub Actions, elsewhere too")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "gla_ref(mechanism, fn, xfail={pattern: reason}, **options): what gla_ref_case checks, case by case"
    )


def settled(config: pytest.Config, options: dict) -> dict:
    """A test's options, with level and seed of the command line where it gives none."""
    return {"level": config.getoption("--gla-ref-level"), "seed": config.getoption("--gla-ref-seed")} | options


def pytest_generate_tests(metafunc):
    """One parameter a case: its name, with underscores, so that -k takes it."""
    if "gla_ref_case" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("gla_ref")
    if mark is None or len(mark.args) != 2:
        pytest.fail('gla_ref_case: expected a mark such as @pytest.mark.gla_ref("gla", my_fn)', pytrace=False)
    options = settled(metafunc.config, mark.kwargs)
    try:
        mechanism, fn = mark.args
        claim = Claim.of(options.get("supports", getattr(fn, "supports", None)))
        how = {n: options[n] for n in ("level", "only", "skip", "seed") if n in options}
        *_, cases = selected(mechanism, claim, dtype_of(options.get("dtype", "fp32")), **how)
    except (TypeError, ValueError) as reason:
        pytest.fail(str(reason), pytrace=False)
    chosen, expected = [], options.get("xfail", {})
    for case in cases:
        reasons = [reason for pattern, reason in expected.items() if fnmatch(case.name, pattern)]
        marks = [pytest.mark.xfail(reason=reason, strict=True) for reason in reasons]
        chosen.append(pytest.param(case, id=case.name.replace(" ", "_"), marks=marks))
    for pattern in expected:
        if not any(fnmatch(case.name, pattern) for case in cases):
            pytest.fail(f"xfail: expected a pattern that fits a case of this test, got {pattern!r}", pytrace=False)
    metafunc.parametrize("gla_ref_case", chosen, indirect=True)


def pytest_runtest_setup(item):
    """A mark checks nothing by itself."""
    if item.get_closest_marker("gla_ref") and "gla_ref_case" not in getattr(item, "fixturenames", ()):
        pytest.fail("gla_ref: expected the test that has this mark to call the fixture gla_ref_case", pytrace=False)


def judged(report: Report, node: pytest.Item, fn: Callable) -> Report:
    """The report of a right kernel; else the test fails with the report as all that is printed."""
    file, line, _ = node.location
    node.stash[ANNOTATIONS] = annotations(report, source(fn) or (file, (line or 0) + 1))
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return report


@pytest.fixture
def gla_ref_check(request) -> Callable[..., Report]:
    """`gla_ref_check(mechanism, fn, **options)`: the check as one test."""

    def check(mechanism: str, fn: Callable, **options) -> Report:
        try:
            report = kernel(mechanism, fn, **settled(request.config, options))
        except (TypeError, ValueError) as reason:  # an option is wrong; errors of the kernel are in the report
            pytest.fail(str(reason), pytrace=False)
        report.rerun = 'gla_ref_check(..., only="{}")'
        return judged(report, request.node, fn)

    return check


@pytest.fixture
def gla_ref_case(request) -> Callable[[], Report]:
    """`gla_ref_case()`: the check of one case of what the test's mark names."""
    mark = request.node.get_closest_marker("gla_ref")
    mechanism, fn = mark.args
    options = {n: x for n, x in settled(request.config, mark.kwargs).items() if n not in ("xfail", "only", "skip")}

    def check() -> Report:
        report = kernel(mechanism, fn, only=request.param, **options)
        report.rerun = f'pytest "{request.node.nodeid}"'
        if not report.covered:
            pytest.skip(f"not covered: {', '.join(report.not_covered)}")
        return judged(report, request.node, fn)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.gla_ref = item.stash.get(ANNOTATIONS, []) if call.when == "call" else []  # travels from xdist's workers, too
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Annotations, which GitHub Actions reads from the output."""
    if os.environ.get("GITHUB_ACTIONS") != "true" and not config.getoption("--gla-ref-github"):
        return
    for report in (*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("passed", ())):
        for line in getattr(report, "gla_ref", ()):
            terminalreporter.write_line(line)
