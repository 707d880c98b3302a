"""Many runs: which are done, which wait for others, several side by side, each record kept as soon as it is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from .. import results
from .runs import Place, Run


@dataclass
class Outcome:
    """What became of runs, by name."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # for want of time: the next call goes on
    failed: dict[str, Exception] = field(default_factory=dict)


def read(file: Path, experiment: str) -> tuple[dict, ...]:
    """The records of an experiment; none where there is no file."""
    return tuple(json.loads(file.read_text())[experiment]) if file.exists() else ()


def is_done(run: Run, records: tuple[dict, ...]) -> bool:
    """Whether there is a record of a run, made with the same settings."""
    return any(r["name"] == run.name and r["run"] == run.fingerprint() for r in records)


def do(run: Run, place: Place) -> dict | Exception | None:
    """Carry one run out, in whichever process this is: what was found, None for want of time, or what went wrong."""
    from . import EXPERIMENTS

    if late(place):
        return None
    try:
        return EXPERIMENTS[run.experiment].carry_out(run, place)
    except Exception as reason:  # one failure should not cost the other runs their results
        return reason


def late(place: Place) -> bool:
    """Whether the deadline has passed."""
    return place.deadline is not None and time.time() >= place.deadline


def each(runs: list[Run], place: Place, jobs: int) -> Iterator[tuple[Run, dict | Exception | None]]:
    """Runs as they are finished, with what `do` returned; 1 job is this process."""
    if jobs == 1:
        for run in runs:
            yield run, do(run, place)
        return
    place = replace(place, progress=None)  # which stays in its process
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # CUDA bears no fork
        futures = {pool.submit(do, run, place): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def keep(run: Run, found: dict, file: Path, device: str) -> None:
    """Write a run's record into the file of its experiment, then remove its checkpoint."""
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None
    environment = results.environment(gpu, ["flash-linear-attention"] if run.experiment == "throughput" else None)
    record = {"name": run.name, "about": run.about, "run": run.fingerprint(), **found, "environment": environment}
    results.merge(file, environment, run.experiment, [record], ("name",))


def carry_out(
    runs: list[Run], place: Place, file: Path, jobs: int = 1, progress: Callable[[str], None] = lambda name: None
) -> Outcome:
    """Carry runs of one experiment out, those without a learning rate of their own behind all others.

    Args:
        runs: those that have a record with the same settings are left out.
        place: where; what is not finished at its deadline has a checkpoint.
        file: of records.
        jobs: processes side by side; 1: this one.
        progress: is told the name of each run that is finished.

    Returns:
        what is done, what is left, and what failed with which exception.
    """
    outcome = Outcome()
    for own_rate in (True, False):
        stage = [r for r in runs if own_rate == (r.training is None or r.training.learning_rate is not None)]
        records = read(file, stage[0].experiment) if stage else ()
        waiting = [run for run in stage if not is_done(run, records)]
        outcome.done += [run.name for run in stage if is_done(run, records)]
        for run, found in each(waiting, replace(place, records=records), jobs):
            if isinstance(found, Exception):
                outcome.failed[run.name] = found
            elif found is None:
                outcome.left.append(run.name)
            else:
                keep(run, found, file, place.device)
                run.file(place.folder, ".pt").unlink(missing_ok=True)
                outcome.done.append(run.name)
                progress(run.name)
    return outcome
