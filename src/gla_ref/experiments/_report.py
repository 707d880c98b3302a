"""Records as numbers to print and draw: intervals over seeds, differences, and every score beside its baselines."""

import json
import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from tabulate import tabulate

__all__ = ["Interval", "holm", "interval", "results_of", "score", "settings_of", "table", "welch"]

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)


class Interval(NamedTuple):
    """A mean and its confidence interval, mean - half to mean + half.

    `half` is NaN where there is one number only; `p` is that of a difference of 0, None where no difference is meant.
    """

    mean: float
    half: float
    n: int
    p: float | None = None

    def __str__(self):
        return f"{self.mean:.4f} " + ("alone" if self.n == 1 else f"± {self.half:.4f}")


def student(t: float, df: float) -> float:
    """The share of Student's distribution below t, for any number of degrees of freedom."""
    end = math.atan(t / math.sqrt(df))  # x = sqrt(df) tan(angle) makes the density a power of a cosine
    area = end / 2 * float(WEIGHTS @ np.cos(end / 2 * (NODES + 1)) ** (df - 1))
    return 0.5 + area * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)


def quantile(share: float, df: float) -> float:
    """The t below which there is this share of Student's distribution, by bisection; `share` is above a half."""
    low, high = 0.0, 1.0
    while student(high, df) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, df) < share else (low, middle)
    return high


def _around(mean: float, error: float, df: float, n: int, level: float, p: bool) -> Interval:
    """The interval of a mean with a standard error."""
    if error == 0:
        return Interval(mean, 0.0, n, (1.0 if mean == 0 else 0.0) if p else None)
    half = quantile((1 + level) / 2, df) * error
    return Interval(mean, half, n, 2 * (1 - student(abs(mean) / error, df)) if p else None)


def interval(xs: Sequence[float], level: float = 0.95) -> Interval:
    """The mean of runs that differ in their seed alone, by Student's distribution.

    Args:
        xs: a number of each run.
        level: the share of such intervals that contain the true mean, if runs are distributed normally.
    """
    if len(xs) < 2:
        return Interval(fmean(xs), math.nan, len(xs))
    return _around(fmean(xs), math.sqrt(variance(xs) / len(xs)), len(xs) - 1, len(xs), level, False)


def welch(xs: Sequence[float], ys: Sequence[float], level: float = 0.95) -> Interval:
    """How much larger the mean of xs is than that of ys, where the two may scatter differently (Welch 1947).

    Raises:
        ValueError: one of the two has fewer than two numbers.
    """
    if min(len(xs), len(ys)) < 2:
        raise ValueError(f"xs, ys: expected at least two runs of each, got {len(xs)} and {len(ys)}")
    a, b = variance(xs) / len(xs), variance(ys) / len(ys)
    df = (a + b) ** 2 / (a**2 / (len(xs) - 1) + b**2 / (len(ys) - 1)) if a + b else 1.0
    return _around(fmean(xs) - fmean(ys), math.sqrt(a + b), df, len(xs) + len(ys), level, True)


def holm(ps: dict, level: float = 0.05) -> list:
    """Names of p-values that stay below the level after Holm's correction for asking so often (Holm 1979).

    Args:
        ps: p-values by name.
        level: the chance of any false alarm among them.
    """
    kept = []
    for n, name in enumerate(sorted(ps, key=ps.get)):
        if ps[name] * (len(ps) - n) >= level:
            break
        kept.append(name)
    return kept


def score(record: dict) -> tuple[str, float]:
    """The name and value of a record's score: "accuracy" or "bits a byte"; NaN where training diverged."""
    last = record["evaluations"][-1] if record["evaluations"] and not record["diverged"] else {}
    name = "accuracy" if "majority" in record["baselines"] else "bits a byte"
    return name, last.get(name, math.nan)


def settings_of(record: dict) -> dict:
    """A run's settings; where a record lacks a start or a trial's steps, today's: quiet, and as many as a run's."""
    settings = record["run"]["settings"]
    return {"quiet": True, "rate_steps": settings["steps"]} | settings


def results_of(records: Sequence[dict]) -> dict[str, list[dict]]:
    """Results grouped over seeds, without trials of learning rates."""
    groups: dict[str, list[dict]] = {}
    for r in records:
        if r["about"].get("stage", "main") == "main" and r["run"]["training"]:
            settings = json.dumps(r["run"]["settings"], sort_keys=True)
            groups.setdefault((r["name"].rpartition("/seed")[0].removeprefix("main/"), settings), []).append(r)
    names = [name for name, _ in groups]
    return {  # records of two settings may be in one file
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})": rs
        for i, ((name, _), rs) in enumerate(groups.items())
    }


def table(records: Sequence[dict], level: float = 0.95) -> str:
    """A line for every result: its score with the interval over seeds, baselines, and the numbers of its state.

    Where records are prices of decoding, a line for each has its milliseconds and bytes.
    """
    if any("ms" in r for r in records):
        rows = [[r["name"], *(r.get(x) for x in ("ms", "gpu ms", "copies", "state", "peak"))] for r in records]
        return tabulate(rows, ["name", "ms", "gpu ms", "copies", "state", "peak"])
    rows = []
    for name, rs in results_of(records).items():
        kind, whole = score(rs[0])[0], interval([score(r)[1] for r in rs], level)
        base = rs[0]["baselines"]
        known = base["majority"] if kind == "accuracy" else base[kind]
        row = [name, f"{whole}", len(rs), kind, f"{base['chance']:.4f}", f"{known:.4f}", rs[0]["state"]]
        rows.append([*row, f"{rs[0]['learning rate']:g}", ", ".join(sorted(_notes(rs)))])
    head = ["result", "score", "seeds", "of", "chance", "baseline", "state", "rate", "notes"]
    return tabulate(rows, head, disable_numparse=True)


def _notes(records: Sequence[dict]) -> set[str]:
    """Notes that a reader of a line needs."""
    notes = set()
    for r in records:
        choice = r.get("choice") or {}
        notes |= {"diverged"} if r["diverged"] else {"at chance"} if r["at chance"] else set()
        notes |= {f"{choice['edge']} rate tried"} if choice.get("edge") else set()
        unsolved = r["about"].get("mixer") == "softmax" and score(r)[0] == "accuracy" and score(r)[1] < 0.99
        notes |= {"softmax attention should solve it"} if unsolved else set()
        notes |= set() if choice.get("learned", True) else {"no trial learned"}
    return notes
