"""Many runs: which are done, which wait for others, each record kept as soon as it is there."""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from filelock import FileLock, Timeout

from .. import results
from ._rates import MORE, further
from .runs import Place, Run


@dataclass
class Outcome:
    """The runs that are done, left and failed, by name."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # for lack of time: the next call goes on
    failed: dict[str, Exception] = field(default_factory=dict)


def record_of(run: Run, records: tuple[dict, ...]) -> dict | None:
    """The record of a run that is done, made with the same settings; a field that is None counts as absent."""
    wanted = _without_none(run.fingerprint())
    return next((r for r in records if r["name"] == run.name and _without_none(r["run"]) == wanted), None)


def _without_none(x):
    """A fingerprint without fields that are None: records from before such a field stay those of the same run."""
    return {name: _without_none(y) for name, y in x.items() if y is not None} if isinstance(x, dict) else x


def carry_out_one(run: Run, place: Place, file: Path) -> dict | None:
    """Carry one run out, keep its record and return it, or None if there was no time.

    Raises:
        Timeout: another process carries it out.
    """
    from . import EXPERIMENTS

    if place.is_late():
        return None
    lock = run.file(place.folder, ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock).acquire(timeout=0):
        records = results.read(file, run.experiment)
        if record := record_of(run, records):  # by another process, since this one looked
            return record
        result = EXPERIMENTS[run.experiment].carry_out(run, replace(place, records=records))
        return None if result is None else write_record(run, result, file, place)


def write_record(run: Run, result: dict, file: Path, place: Place) -> dict:
    """Write a run's record into the file of its experiment, beside those of other settings; remove its checkpoint."""
    gpu = torch.cuda.get_device_name(place.device) if torch.device(place.device).type == "cuda" else None
    environment = results.environment(gpu)
    record = {"name": run.name, "about": run.about, "run": run.fingerprint(), **result, "environment": environment}
    results.merge(file, environment, run.experiment, [record], ("name", "run"))
    run.file(place.folder, ".pt").unlink(missing_ok=True)
    return record


@contextmanager
def interruptible():
    """A flag that SIGINT and SIGTERM set, whose runs then stop with checkpoints; a second SIGINT ends the program."""
    flag = SimpleNamespace(value=False)

    def handle(number, frame) -> None:
        if flag.value and number == signal.SIGINT:
            raise KeyboardInterrupt
        flag.value = True
        print("interrupted: runs stop with a checkpoint; a second interrupt ends them at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def further_trials(runs: list[Run], file: Path) -> list[Run]:
    """Trials beyond the edge of a grid, for every group of these runs whose grid is done and whose best is there."""
    from . import EXPERIMENTS

    groups = {run.about["group"]: run for run in runs if "group" in run.about}
    more = []
    for group, run in groups.items():
        records = results.read(file, run.experiment)
        every = EXPERIMENTS[run.experiment].runs(run.settings, 1)
        trials = [x for x in every if x.about["stage"] == "rate" and x.about["group"] == group]
        if all(record_of(trial, records) for trial in trials):
            more.append(further(trials[0], records))
    return [trial for trial in more if trial is not None]


def carry_out_all(runs: list[Run], place: Place, file: Path, progress: Callable = lambda name: None) -> Outcome:
    """Carry runs of one experiment out, those without a learning rate of their own after all others.

    Between the two come trials that nobody asked for: learning rates beyond a grid whose best one is at its edge. A run
    that another process carries out is waited for; if that process leaves it, this one goes on with it.

    Args:
        runs: those that have a record with the same settings are left out.
        place: where; what is not finished at its deadline has a checkpoint.
        file: of records.
        progress: is told the name of each run that is finished.

    Returns:
        what is done, what is left, and what failed with which exception. SIGINT and SIGTERM leave runs as the
        deadline does, with checkpoints.
    """
    outcome = Outcome()
    with interruptible() as interrupt:
        place = replace(place, interrupt=interrupt)
        own_rate = [run for run in runs if run.training is None or run.training.learning_rate is not None]
        _carry_out(own_rate, place, file, progress, outcome)
        for _ in range(MORE):
            _carry_out(further_trials(runs, file), place, file, progress, outcome)
        _carry_out([run for run in runs if run not in own_rate], place, file, progress, outcome)
    return outcome


def _carry_out(runs: list[Run], place: Place, file: Path, progress: Callable, outcome: Outcome) -> None:
    """Carry out those of the runs that are not done, and add all of them to the outcome."""
    records = results.read(file, runs[0].experiment) if runs else ()
    outcome.done += [run.name for run in runs if record_of(run, records)]
    waiting = deque(run for run in runs if not record_of(run, records))
    while waiting:
        run = waiting.popleft()
        try:
            record = carry_out_one(run, place, file)
        except Timeout:
            waiting.append(run)
            time.sleep(0.2)
        except Exception as reason:  # one failure should not cost the other runs their results
            outcome.failed[run.name] = reason
        else:
            if record is None:
                outcome.left.append(run.name)
            else:
                outcome.done.append(run.name)
                progress(run.name)
