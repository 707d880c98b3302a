"""Records as numbers: Student's quantiles as in tables, Welch by another library, intervals that contain the mean."""

import json
import math

import pytest
import torch
from cases import in_process

from gla_ref import results
from gla_ref.experiments import _report, language
from gla_ref.experiments.__main__ import main
from gla_ref.experiments._report import holm, interval, quantile, student, welch


@pytest.mark.parametrize(
    "share, df, t",
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.95, 10, 1.81246), (0.975, 1000, 1.96234)],
)
def test_quantiles_are_those_of_tables(share, df, t):
    assert quantile(share, df) == pytest.approx(t, rel=1e-5)
    assert student(quantile(share, df), df) == pytest.approx(share, abs=1e-12)
    assert student(-t, df) == pytest.approx(1 - share, abs=1e-6)


def test_an_interval_over_three_seeds():
    found = interval([0.8, 0.9, 1.0])
    assert found.mean == pytest.approx(0.9) and found.half == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5)
    assert math.isnan(interval([0.5]).half) and str(interval([0.5])) == "0.5000 alone"
    assert interval([1.0, 1.0]).half == 0.0


def test_intervals_contain_the_mean_as_often_as_they_say():
    rng = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 3, generator=rng, dtype=torch.float64).tolist()
    inside = sum(abs(x.mean) <= x.half for x in map(interval, draws)) / len(draws)
    assert 0.94 < inside < 0.96


def test_welch_by_the_incomplete_beta_function():
    """Two samples of other sizes and variances; statistic and degrees of freedom by hand, p by another library."""
    mpmath = pytest.importorskip("mpmath", reason="mpmath is not installed")
    x, y = [27.5, 21.0, 19.0, 23.6, 17.0], [27.1, 22.0, 24.8]
    found = welch(x, y)
    a, b = (sum((z - sum(zs) / len(zs)) ** 2 for z in zs) / (len(zs) - 1) / len(zs) for zs in (x, y))
    t, df = found.mean / (a + b) ** 0.5, (a + b) ** 2 / (a**2 / 4 + b**2 / 2)
    assert found.mean == pytest.approx(21.62 - 73.9 / 3) and 4 < df < 6
    assert found.p == pytest.approx(float(mpmath.betainc(df / 2, 0.5, 0, df / (df + t**2), regularized=True)))
    assert found.half == pytest.approx(quantile(0.975, df) * (a + b) ** 0.5)
    with pytest.raises(ValueError, match="^xs, ys: expected at least two runs"):
        welch([1.0], [1.0, 2.0])


def record(name, score, seed, stage="main", settings=0, **changes):
    return {
        "name": f"{stage}/{name}/seed{seed}",
        "about": {"stage": stage, "mixer": "gla", "seed": seed},
        "run": {"settings": settings, "training": {"steps": 1}},
        "evaluations": [{"accuracy": score, "loss": 1.0}],
        "baselines": {"chance": 0.01, "majority": 0.25, "loss": 3.0},
        "diverged": False, "at chance": False, "state": 4096, "learning rate": 1e-3,
    } | changes  # fmt: skip


def test_a_table_has_intervals_baselines_and_states():
    records = [record("gla/128", x, seed) for seed, x in enumerate((0.8, 0.9, 1.0))]
    records += [record("linear/128", x, seed, **{"at chance": True}) for seed, x in enumerate((0.25, 0.26))]
    records += [record("gla/128", 0.1, 1000, stage="rate")]
    gla, linear = _report.table(records).splitlines()[2:]
    assert gla.split() == "gla/128 0.9000 ± 0.2484 3 accuracy 0.0100 0.2500 4096 0.001".split()
    assert linear.startswith("linear/128") and linear.endswith("at chance")


def test_a_failure_of_softmax_attention_at_recall_is_noted():
    for score, noted in ((0.995, False), (0.9, True)):
        line = _report.table([record("softmax/128", score, 0, about={"stage": "main", "mixer": "softmax"})])
        assert ("softmax attention should solve it" in line) == noted


def test_prices_have_a_table_of_their_own():
    price = {"name": "main/gla/2048", "ms": 1.5, "gpu ms": None, "copies": None, "state": 4096}
    assert _report.table([price]).split()[-3:] == ["main/gla/2048", "1.5", "4096"]


def test_holm_asks_more_of_the_smallest():
    ps = {"a": 0.04, "b": 0.012, "c": 0.02}
    assert holm(ps) == ["b", "c", "a"], "0.012 x 3, 0.02 x 2 and 0.04 x 1 are below 5%"
    assert holm(ps | {"d": 0.9}) == ["b"], "after the first that is not, none counts: 0.02 x 3"
    assert holm({"a": 0.05}) == [] and holm({}) == [] and holm({"a": 0.05}, level=0.1) == ["a"]


def test_language_is_scored_in_bits():
    bits = {"evaluations": [{"loss": 2.0, "bits a byte": 1.5}], "baselines": {"chance": 8.0, "bits a byte": 4.5}}
    (line,) = _report.table([record("gla", 0.0, 0, **bits)]).splitlines()[2:]
    assert line.split()[1:] == "1.5000 alone 1 bits a byte 8.0000 4.5000 4096 0.001".split()


def test_settings_of_today_say_what_older_ones_named():
    every = vars(language.Settings()), {"steps": 690, "rate_steps": 150, "quiet": False}
    found = [_report.settings_of(record("gla/128", 0.5, 0, settings=s)) for s in every]
    assert [(s["quiet"], s["rate_steps"], s["steps"]) for s in found] == [(True, 690, 690), (False, 150, 690)]


def test_two_settings_are_two_results():
    records = [record("gla/128", 0.5, 0), record("gla/128", 0.6, 0, settings=1)]
    assert list(_report.results_of(records)) == ["gla/128 (1)", "gla/128 (2)"]


def test_a_result_that_diverged_has_no_score():
    bad = record("gla/128", 0.5, 0, diverged=True, choice={"edge": "highest", "learned": False})
    assert math.isnan(_report.score(bad)[1])
    (line,) = _report.table([bad]).splitlines()[2:]
    assert line.endswith("diverged, highest rate tried, no trial learned")


def test_the_command_prints_a_table(tmp_path, capsys):
    file = tmp_path / "r.json"
    for name in ("mqar", "ablations"):  # there are records of earlier experiments, whose programs are gone
        results.write(file, {"gpu": None}, name, [record("gla/128", 0.5, seed) for seed in range(3)])
        assert main(["report", str(file)]) == 0 and "gla/128   0.5000 ± 0.0000" in capsys.readouterr().out
    for content in ({"environment": {}, "checks": []}, []):
        file.write_text(json.dumps(content))
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(file)])
        assert f"expected records of experiments in {file}" in capsys.readouterr().err


@pytest.mark.deep  # a process of its own, as from a shell
def test_the_command_prints_in_ascii(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    results.write(file, {"gpu": None}, "mqar", [record("gla/128", 0.5, seed) for seed in range(3)])
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert r"gla/128   0.5000 \xb1 0.0000" in in_process("-m", "gla_ref.experiments", "report", file)
