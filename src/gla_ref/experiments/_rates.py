"""The learning rate of runs that have none of their own: chosen by trial, for every group of runs that share one.

A *trial* is a run of the stage "rate", with a seed that no result has (:data:`SEED`), evaluated on validation data. The
rate with the lowest validation loss is chosen; of equal ones the smallest. If it is the lowest or the highest that was
tried, the grid goes on beyond it, at most :data:`MORE` times; if nothing has been learned, it goes on below, since
rates that are too high leave a model at chance. A choice that is still at the edge then, or at chance, says so.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain

from ..models import Config
from .runs import Place, Run, Training
from .training import LEARNED, Task, train

__all__ = ["MORE", "SEED", "Choice", "choice_of", "further", "trained", "with_trials"]

SEED = 1000  # seed of trials
MORE = 2  # rates beyond the edges of the settings' grid


@dataclass(frozen=True)
class Choice:
    """The rate of a group, and the trials that led to it.

    Attributes:
        rate: the chosen one; None: every trial diverged.
        losses: on validation data, by rate in rising order; None: diverged.
        edge: "lowest" or "highest" if the chosen one is the last of those tried; else None.
        learned: whether its loss is clearly below that of a model that has learned nothing.
    """

    rate: float | None
    losses: dict[float, float | None]
    edge: str | None
    learned: bool


def with_trials(
    experiment: str, settings, columns: dict[str, tuple[dict, Config]], seeds: int, evaluations: int = 1
) -> list[Run]:
    """First the trials of every group, which differ from its runs in rate, seed and data only; then all runs.

    A trial is as long as a run: shorter ones chose half or a quarter of the best rates (chapter 19).

    Args:
        columns: by the name of the runs, without seeds: what tells them from others, "group" among it, and the model.
        evaluations: of a run that is a result.
    """
    s, trials, results = settings, {}, []
    training = Training(s.steps, None, precision=s.precision, evaluations=evaluations)
    for name, (column, model) in columns.items():
        abouts = [{"stage": "main", **column, "seed": seed} for seed in range(seeds)]
        runs = [Run(experiment, f"main/{name}/seed{x['seed']}", x, s, model, training, s.tokens) for x in abouts]
        about = abouts[0] | {"stage": "rate", "seed": SEED}
        trial = replace(runs[0], about=about, training=replace(training, evaluations=1))
        trials.setdefault(column["group"], [_trial(trial, rate) for rate in sorted(set(s.rates))])
        results += runs
    return [*chain(*trials.values()), *results]


def _trial(run: Run, rate: float) -> Run:
    name = f"rate/{run.about['group']}/{rate:g}"
    return replace(run, name=name, training=replace(run.training, learning_rate=rate))


def choice_of(run: Run, records: tuple[dict, ...]) -> Choice:
    """The choice for a run's group, by its trials with the same settings.

    Raises:
        ValueError: a trial of the settings' grid has no record.
    """
    group, settings = run.about["group"], run.fingerprint()["settings"]
    trials = {
        r["run"]["training"]["learning_rate"]: r
        for r in records
        if r["about"].get("stage") == "rate" and r["about"]["group"] == group and r["run"]["settings"] == settings
    }
    if missing := [f"{rate:g}" for rate in sorted(run.settings.rates) if rate not in trials]:
        raise ValueError(
            f"records: expected trials of {group} with the learning rates {', '.join(missing)}, which come first"
        )
    losses = {rate: None if r["diverged"] else r["evaluations"][-1]["loss"] for rate, r in sorted(trials.items())}
    best = min(losses, key=lambda rate: (math.inf if losses[rate] is None else losses[rate], rate))
    if losses[best] is None:
        return Choice(None, losses, None, False)
    tried = list(losses)
    edge = None if len(tried) == 1 else {tried[0]: "lowest", tried[-1]: "highest"}.get(best)
    return Choice(best, losses, edge, losses[best] < LEARNED * trials[best]["baselines"]["loss"])


def further(trial: Run, records: tuple[dict, ...]) -> Run | None:
    """One more trial for the group of a trial, beyond the edge of the rates tried; None: no need, or enough are."""
    choice = choice_of(trial, records)
    tried = list(choice.losses)
    if len(tried) - len(set(trial.settings.rates)) >= MORE or len(tried) == 1:
        return None
    if choice.edge == "highest" and choice.learned:
        rate = tried[-1] ** 2 / tried[-2]
    elif choice.edge == "lowest" or not choice.learned:
        rate = tried[0] ** 2 / tried[1]
    else:
        return None
    return _trial(trial, float(f"{rate:.3g}"))


def trained(run: Run, task: Task, place: Place) -> dict | None:
    """Train a run with its own rate, or with the one chosen for its group; None if the deadline came first.

    Raises:
        ValueError: trials are missing, or all of them diverged.
    """
    if run.training.learning_rate is not None:
        return train(run, task, place)
    choice = choice_of(run, place.records)
    if choice.rate is None:
        raise ValueError(
            f"rates: expected one at which {run.about['group']} learns, got none of {[*choice.losses]}; try lower ones"
        )
    rate = choice.rate * run.about.get("rate factor", 1.0)
    record = train(replace(run, training=replace(run.training, learning_rate=rate)), task, place)
    losses = {f"{r:g}": x for r, x in choice.losses.items()}
    return record and {**record, "choice": {**vars(choice), "losses": losses}}
