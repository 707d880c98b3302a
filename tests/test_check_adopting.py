"""The check kit in other repositories: what a kernel claims, pytest, annotations, exceptions that stay visible."""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from gla_ref import FORMS, check
from gla_ref.__main__ import main
from gla_ref.check import Case
from gla_ref.check._cases import inputs
from gla_ref.check._claims import Claim, claimed
from gla_ref.check._words import annotations, source

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
F32 = torch.float32
GATED = FORMS["gla"]["chunkwise"]


def ladder(mechanism="gla", level="quick", **supports):
    return claimed(mechanism, level, 0, Claim.of(supports), F32)


# -- claims ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mechanism", check.MECHANISMS)
def test_who_claims_all_gets_the_ladder_itself(mechanism):
    for level in ("quick", "full"):
        assert ladder(mechanism, level) == (check.cases(mechanism, level), 0, [])
        assert claimed(mechanism, level, 0, Claim.of(lambda case: True), F32).left == []
    assert str(Claim()) == ""


TELLS = {  # a claim, and what holds of every case under it
    "sizes": ({"K": (64, 128), "V": 96}, lambda case: case.K in (64, 128) and case.V == 96),
    "multiples": ({"multiples": {"K": 16, "T": 64}}, lambda case: not case.K % 16 and not case.T % 64),
    "packed": ({"packed": False}, lambda case: not case.ends),
    "state": ({"state": False}, lambda case: not (case.state or case.zeros or case.other == "S0")),
    "gates": ({"min_gate": -5}, lambda case: inputs("gla", case, F32, 0)["g"].min() >= -5),
}


@pytest.mark.parametrize("name", TELLS)
def test_cases_are_made_for_what_is_claimed(name):
    supports, holds = TELLS[name]
    found, whole = ladder(**supports), check.cases("gla")
    assert all(map(holds, found.cases)) and found.left == [c.name for c in whole if c.name in found.left]
    names = [case.name for case in found.cases]
    assert len(names) == len(set(names)) and found.made == len({*found.cases} - {*whole})
    assert all(Claim.of(supports).fit(case, check.MECHANISMS["gla"]) == case for case in found.cases)
    if name in ("sizes", "multiples"):
        assert len(found.cases) > len(whole) - 8, "little of the ladder is lost"


def test_where_channels_are_many_batch_entries_are_few():
    found = {case.name: case for case in ladder(K=64, V=64).cases}
    assert found["long"].B == found["gate -20"].B == 1 and found["length 65"].B == found["strided"].B == 2
    assert found["many heads"].H == 101 and 148 < found["many heads"].B * found["many heads"].H < 303
    assert found["many batch entries"].B == 70
    assert found["many tokens and heads"].T * found["many tokens and heads"].H > 8192


def test_every_pair_of_sizes_is_tried_and_sequences_are_filled_up():
    found = ladder(K=(64, 128), V=(32, 64), multiples={"T": 64}).cases
    assert {(case.K, case.V) for case in found} == {(64, 32), (64, 64), (128, 32), (128, 64)}
    packed = next(case for case in found if case.name == "packed")
    assert packed.ends == (0, 0, 64, 64, 128, 256, 320, 320) and packed.T == 320
    assert [case.name for case in found][:3] == ["length 64", "length 128", "length 192"]


def test_gates_are_cut_off_where_a_dtype_holds_them():
    for floor, dtype, form in ((-0.1, torch.bfloat16, "log"), (-5.0, torch.float16, "alpha"), (-1.0, F32, "log2")):
        case = Case(gate="many resets", floor=floor)
        g = inputs("gla", case, dtype, 0, form)["g"]
        assert floor <= g.min() < 0.95 * floor


def test_a_function_is_asked_for_the_nearest_case_that_it_accepts():
    def square(case):
        return case.K == case.V and case.K in (32, 64, 128) and not case.ends and case.gate != "-inf"

    found = claimed("gla", "quick", 0, Claim.of(square), F32)
    assert all(map(square, found.cases)) and "packed" in found.left
    sizes = {case.name: case.K for case in found.cases}
    assert (sizes["length 7"], sizes["wide"], sizes["widest"]) == (32, 32, 128)
    assert (64, 64) in {(case.K, case.V) for case in found.cases}
    assert str(Claim.of(square)) == "what square accepts"


@pytest.mark.parametrize(
    "supports, message",
    [
        ({"size": 64}, "supports: expected K, V, multiples"),
        ({"K": (64, 0.5)}, "supports: expected sizes for K"),
        ({"multiples": {"C": 64}}, "supports: expected multiples of T, K or V, got C"),
        ({"min_gate": 1.0}, "supports: expected a log gate"),
        ({"dtypes": "int8"}, "dtype: expected one of fp32, bf16, fp16"),
        ({"dtypes": "bf16"}, "supports: bfloat16, so nothing is left to test in torch.float32"),
        pytest.param(lambda case: False, "what <lambda> accepts, so nothing is left to test", marks=pytest.mark.deep),
    ],
)
def test_a_claim_that_leaves_nothing_or_means_nothing_is_an_error(supports, message):
    with pytest.raises(ValueError, match=message):
        check.kernel("gla", GATED, supports=supports)
    with pytest.raises(TypeError, match="supports: expected a dict or a function"):
        check.kernel("gla", GATED, supports=3)


def only_64(q, k, v, g, *, scale=None, initial_state=None):
    assert q.shape[-1] == 64 == v.shape[-1], "K and V of 64 only"
    return GATED(q, k, v, g, scale=scale, initial_state=initial_state)


def test_a_kernel_of_one_size_is_judged_on_it():
    options = {"only": "length [17]"}
    report = check.kernel("gla", only_64, **options)
    assert not report.ok and 'takes: --K 64 --V 64 --no-packed, in Python supports={"K": 64' in report.unclaimed
    assert len(report.findings) == 1, "messages that differ in a size are one"
    report = check.kernel("gla", only_64, supports={"K": 64, "V": 64, "packed": False}, **options)
    whole = len(check.cases("gla"))
    assert report.ok and report.ladder == whole
    first, second, *_, last = str(report).split("\n")
    assert first == last == f"gla on cpu in float32, quick, seed 0: right (2 of {whole} cases tried)"
    assert second.startswith("Claimed: K = 64, V = 64, no packed sequences. ")
    assert f"{report.made} cases made for that; left out: packed" in " ".join(str(report).split())
    assert report.to_json()["settings"]["supports"] == "K = 64, V = 64, no packed sequences"


def test_what_is_not_claimed_is_not_missed():
    def forward(q, k, v, g):
        assert not torch.is_grad_enabled()
        return GATED(q, k, v, g)[0]

    claim = {"gradient": False, "state": False, "packed": False}
    report = check.kernel("gla", forward, supports=claim, only="length [17]", fail_on_not_covered=True)
    assert report.ok and not report.not_covered
    report = check.kernel("gla", forward, forward_only=True, only="length [17]", fail_on_not_covered=True)
    assert not report.ok and report.verdict == "NOT ALL COVERED" and {"S", "dq"} <= set(report.not_covered)
    with pytest.raises(AssertionError, match="NOT ALL COVERED"):
        report.raise_if_failed()


@pytest.mark.deep
def test_a_failure_is_shrunk_within_the_claim():
    def wrong(q, k, v, g, *, scale=None, initial_state=None):
        o, S = only_64(q, k, v, g, scale=scale, initial_state=initial_state)
        return 2 * o, S

    supports = {"K": 64, "V": 64, "packed": False, "multiples": {"T": 16}}
    report = check.kernel("gla", wrong, level="full", only="length 16", supports=supports)
    assert "case = check.Case(name='smallest', B=1, T=16, H=1, K=64, V=64," in " ".join(report.reproduction.split())


# -- exceptions --------------------------------------------------------------------------------
def halved(q, k, v, g, **named):
    """dg is half of what it should be."""
    return GATED(q, k, v, 0.5 * g + 0.5 * g.detach(), **named)


@pytest.mark.deep
def test_what_is_waived_does_not_count_and_stays_visible():
    reason = "issue 7: the sum over later tokens"
    report = check.kernel("gla", halved, only="length [17]", waive={"dg": reason})
    assert report.ok and report.verdict == "right, but for waivers"
    worst = max(report.waived["dg", reason], key=lambda row: row.ratio)
    said = f"Waived: dg in 2 cases, worst {worst.ratio:.3g} budgets in {worst.case}: issue 7"
    assert all(said in " ".join(text.split()) for text in (str(report), report._repr_html_()))
    assert not check.kernel("gla", halved, only="length [17]", waive={"dq": reason}).ok
    report = check.kernel("gla", halved, only="length [17]", waive={"dg@length 7": reason})
    assert report.failing == ["length 1"] and {row.case for row in report.rows if row.waived} == {"length 7"}


def test_what_is_skipped_stays_visible():
    report = check.kernel("gla", GATED, only="length ?", skip="*7")
    assert list(report.cases) == ["length 1"] and "\nSkipped: length 7.\n" in str(report)
    with pytest.raises(ValueError, match="and skip"):
        check.kernel("gla", GATED, only="length ?", skip=["*7", "*1"])


# -- the command -------------------------------------------------------------------------------
MODULE = """
from gla_ref import FORMS
right = FORMS["gla"]["chunkwise"]

def wrong(q, k, v, g, **named):
    return right(q, k, v, 0.6931471805599453 * g, **named)

def half(q, k, v, g, *, scale=None, initial_state=None):
    if not q.shape[-1] == v.shape[-1] == 64:
        raise ValueError("K and V of 64 only")
    return right(q, k, v, g, scale=scale, initial_state=initial_state)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module of kernels, the current one."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_claims_and_exceptions_on_the_command_line(project, capsys):
    command = ["check", "gla", f"{project}:half", "--quick", "--only", "length [17]", "--json", "out.json"]
    claims = ["--K", "64", "--V", "64", "--no-packed", "--min-gate", "-5", "--multiples", "K=32"]
    assert main(command) == 1
    assert main([*command, *claims]) == 0
    said = "Claimed: K = 64, V = 64, K in multiples of 32, no packed sequences, gates down to -5."
    assert said in " ".join(capsys.readouterr().out.split())
    data = json.loads(Path("out.json").read_text())
    assert data["ok"] and data["schema"] == 4 and data["settings"]["supports"] == said[9:-1]
    assert Case(**{n: tuple(x) if isinstance(x, list) else x for n, x in data["cases"]["length 7"].items()}).K == 64
    refused = [*command, *claims, "--no-state", "--no-gradient", "--fail-on-not-covered"]
    assert main(refused) == 0
    assert main(["check", "gla", f"{project}:half", *claims, "--only", "length 1", "--fail-on-not-covered"]) == 0
    waived = [x for n in ("o", "S", "dq", "dk", "dv", "dg", "dS0") for x in ("--waive", f"{n}=known")]
    wrong = ["check", "gla", f"{project}:wrong", "--only", "length ?"]
    assert main([*wrong, "--skip", "*1"]) == 1 and main([*wrong, *waived]) == 0
    with pytest.raises(SystemExit):
        main([*wrong, "--waive", "dg"])


def test_cases_are_listed(project, capsys):
    assert main(["check", "gla", "--list", "--only", "length ?", "--only", "square"]) == 0
    assert capsys.readouterr().out.split("\n") == ["length 1", "length 7", "square", ""]
    assert main(["check", "gla", f"{project}:half", "--list", "--only", "wide*", "--skip", "wide", "--V", "80"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["wider", "widest"]


UNFIT = {  # a pattern, and what the message adds
    "lenght 65": "; the nearest names are 'length 65' and",
    "length_65": "; the nearest names are 'length 65' and",
    "random 3": "; 'random 3' is a case of the full level",
    "packed with s*": "; what the kernel claims leaves out 'packed with scale'",
    "xyz": "; a name is 'length 1'",
}


@pytest.mark.parametrize("pattern", UNFIT)
def test_a_pattern_that_fits_no_case_gets_a_hint(pattern):
    with pytest.raises(ValueError, match=f"got {re.escape(repr(pattern) + UNFIT[pattern])}"):
        check.kernel("gla", GATED, only=pattern, supports={"packed": False})


def test_annotations(project, capsys):
    assert main(["check", "gla", f"{project}:wrong", "--only", "length 7", "--github"]) == 1
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("::")]
    line = MODULE.split("\n").index("def wrong(q, k, v, g, **named):") + 1
    assert len(lines) == 3
    place = f"::error file={project}.py,line={line},title=gla%3A o wrong in case length 7::error "
    assert lines[0].startswith(place) and "%0AIt behaves as if: natural log read as base 2%0ACase(name=" in lines[0]


def test_annotations_of_calls_and_waivers():
    def raising(q, k, v, g):
        raise RuntimeError("100 % wrong\nreally")

    (line,) = annotations(check.kernel("gla", raising, only="length 7"), ("a,b.py", 3))
    place = "::error file=a%2Cb.py,line=3,title=gla%3A raises%2C call of case length 7::"
    assert line.startswith(f"{place}RuntimeError: 100 %25")
    (line,) = annotations(check.kernel("gla", halved, only="length 7", waive={"dg": "known"}), None)
    assert line == "::warning title=gla%3A dg waived::known (1 of 1 cases)"
    (line,) = annotations(check.kernel("gla", only_64, only="packed strided"), None)
    assert "NOTHING COVERED" in line and "packed sequences (1)" in line
    assert source(torch.add) is None


def test_sizes_that_a_kernel_does_not_claim_are_neither_right_nor_wrong():
    def odd(q, k, v, g, **named):
        o, S = GATED(q, k, v, g, **named)
        return o, S * (1 + 0.01 * torch.arange(S.shape[-1]))

    report = check.kernel("gla", odd, only="length 7", supports={"K": 8, "V": 8, "packed": False})
    assert not report.diagnosis and not any("channel" in line for line in report.measured), str(report)
    assert report.undiagnosed == ("No named mistake explains all of it. The other cases may tell more: run them, too.")


# -- pytest ------------------------------------------------------------------------------------
PLUGIN = ("-p", "no:gla_ref", "-p", "gla_ref.check.pytest_plugin")  # of this checkout, whatever is installed
TESTS = """
import pytest
from own import half, right, wrong

def test_right(gla_ref_check):
    report = gla_ref_check("gla", right, only="length 7", dtype="bf16")
    assert report.settings["dtype"] == "bfloat16"

def test_wrong(gla_ref_check):
    gla_ref_check("gla", wrong, only="length 7")

@pytest.mark.gla_ref("gla", half, supports={"K": 64, "V": 64}, only="[lp]*[14d]", xfail={"length 1": "issue 7"})
def test_half(gla_ref_case):
    gla_ref_case()
"""


@pytest.fixture
def tests(pytester):
    pytester.makepyfile(own=MODULE, test_adopted=TESTS)
    yield pytester
    sys.modules.pop("own", None)


def test_a_failure_prints_the_report_and_nothing_of_the_kit(tests, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "false")
    done = tests.runpytest_inprocess(*PLUGIN, "-k", "right or wrong", "--gla-ref-seed", "3", "--junitxml=out.xml")
    done.assert_outcomes(passed=1, failed=1)
    out = done.stdout.str()
    assert "gla on cpu in float32, quick, seed 3: WRONG (1 of" in out and "natural log read as base 2" in out
    assert "Case(name='length 7', B=2, T=7, H=3, K=5, V=7, often=True)" in out
    assert "Traceback" not in out and "pytest_plugin.py" not in out and "::error" not in out
    (suite,) = xml.etree.ElementTree.parse(tests.path / "out.xml").getroot()
    (failure,) = suite.iter("failure")
    assert suite.get("failures") == "1" and "natural log read as base 2" in failure.text


def test_every_case_is_a_test_of_its_own(tests):
    done = tests.runpytest_inprocess(*PLUGIN, "-rs", "-k", "half", "--collect-only", "-q")
    names = [line.split("[")[1][:-1] for line in done.outlines if "[" in line]
    assert names[:3] == ["length_1", "length_64", "packed"] and "packed_strided" in names
    done = tests.runpytest_inprocess(*PLUGIN, "-rsxX", "-k", "half and (length_1 or packed_strided)")
    done.assert_outcomes(failed=1, skipped=1)
    out = done.stdout.str()
    assert "not covered: packed sequences" in out and "XPASS(strict)" in out and "issue 7" in out


def test_a_mark_takes_several_patterns_or_none(tests):
    for only in (["length 1", "packed"], None):
        tests.makepyfile(test_adopted=TESTS.replace('"[lp]*[14d]"', repr(only)))
        done = tests.runpytest_inprocess(*PLUGIN, "-q", "--collect-only", "-k", "half")
        names = [line.split("[")[1][:-1] for line in done.outlines if "[" in line]
        assert names == ["length_1", "packed"] if only else {"length_1", "packed", "wide"} < {*names}


MISUSED = {  # a change of the tests above, and the message it gets
    "a mark alone": ("(gla_ref_case):\n    gla_ref_case()", "():\n    pass", "to call the fixture gla_ref_case"),
    "no such case": ('only="[lp]*[14d]"', 'only="lenght*"', "only: expected a pattern that fits a case, got 'lenght*'"),
    "no such exception": ('{"length 1": ', '{"lenght 1": ', "xfail: expected a pattern that fits a case of this test"),
    "no such claim": ('{"K": 64, "V": 64}', '{"size": 64}', "supports: expected K, V, multiples"),
    "no mark": ("(gla_ref_check)", "(gla_ref_case)", "expected a mark such as"),
    "no such mechanism": ('"gla", right', '"gal", right', "mechanism: expected one of"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_what_would_check_nothing_fails(tests, name):
    old, new, message = MISUSED[name]
    assert old in TESTS
    tests.makepyfile(test_adopted=TESTS.replace(old, new))
    out = tests.runpytest_inprocess(*PLUGIN, "-k", "right or length_1 or half").stdout.str()
    assert message in out and "def kernel(" not in out


def test_a_report_says_how_pytest_runs_one_case(tests):
    tests.makepyfile(own=MODULE.replace("0.6931471805599453 * g", "g + 0.1 * g.sin()"))  # no named mistake
    half = 'half, supports={"K": 64, "V": 64}, only="[lp]*[14d]", xfail={"length 1": "issue 7"}'
    tests.makepyfile(test_adopted=TESTS.replace(half, 'wrong, only="length 7"'))
    out = " ".join(tests.runpytest_inprocess(*PLUGIN, "-k", "wrong or half").stdout.str().split())
    assert 'Run next: pytest "test_adopted.py::test_half[length_7]"' in out
    assert "The other cases may tell more: run them, too." in out


def test_a_level_in_the_command(tests):
    done = tests.runpytest_inprocess(*PLUGIN, "-q", "--collect-only", "-k", "half", "--gla-ref-level", "full")
    full = [case.name for case in check.cases("gla", "full") if fnmatch(case.name, "[lp]*[14d]")]
    assert len([line for line in done.outlines if "[" in line]) == len(full)


def test_annotations_in_github_actions(tests, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = tests.runpytest_inprocess(*PLUGIN, "-k", "right or wrong")
    lines = [line for line in done.outlines if line.startswith("::")]
    assert len(lines) == 3 and lines[0].startswith("::error file=own.py,line=4,title=gla%3A o wrong")


@pytest.mark.deep
def test_the_wheel_brings_the_plugin(tmp_path):
    """A project in an environment that has the wheel: no option loads the plugin, workers run the cases."""
    import run_notebooks_clean as clean

    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    env = {n: x for n, x in os.environ.items() if n not in ("PYTHONPATH", "GITHUB_ACTIONS")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", tmp_path, source], check=True, env=env)
    python = clean.new_environment(sys.executable, tmp_path / "env", [clean.packages_of(sys.executable)])
    (wheel,) = tmp_path.glob("*.whl")
    target = clean.packages_of(python)
    subprocess.run([*pip, "install", *offline, "--target", target, wheel], check=True, env=env)
    project = tmp_path / "project"
    project.mkdir()
    (project / "own.py").write_text(MODULE)
    (project / "test_adopted.py").write_text(TESTS)
    command = [python, "-m", "pytest", "-n", "2", "-rA", "--gla-ref-github", "--junitxml=out.xml"]
    env["COLUMNS"] = "80"
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=600)
    assert "::error file=own.py,line=5," in done.stdout, done.stdout + done.stderr
    assert "PASSED test_adopted.py::test_half[length_64]" in done.stdout and "2 failed" in done.stdout  # one strictly
    assert (project / "out.xml").exists() and done.returncode == 1
