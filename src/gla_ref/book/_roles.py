"""Roles of a kernel over time, played by a model: steps, waits and durations in, a schedule out (chapters 22 and 23).

A role (a group of warps) does its steps one after another. A step begins when its role is free, its unit of the chip is
free, and all steps that it waits for have ended.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Step", "Task", "end", "play"]


class Step(NamedTuple):
    """A job of one chunk, and its program (from 0)."""

    job: str
    chunk: int
    program: int = 0


class Task(NamedTuple):
    """A step with its start and stop."""

    job: str
    chunk: int
    program: int
    start: float
    stop: float


def play(
    roles: Sequence[Sequence[Step]],
    lasts: Mapping[str, float],
    waits: Callable[[int], Mapping[str, Sequence[Step]]] = lambda chunk: {},
    unit: Callable[[str], str] = lambda job: job,
) -> list[Task]:
    """Return all tasks, in the order in which they begin; of those that could begin at once the earlier chunk's goes.

    Args:
        roles: the steps of each role, in its order.
        lasts: the duration of each job.
        waits: for a chunk, the steps that each of its jobs waits for; steps that no role does (before the first chunk)
            hold nothing up.
        unit: the unit that does a job; a unit does one task at a time.

    Raises:
        ValueError: the roles wait for each other.
    """
    left, every = [list(role) for role in roles], {step for role in roles for step in role}
    tasks, stops, free = [], {}, {}  # `free`: when a role, by its number, and a unit ended their last task

    def earliest(n: int, step: Step) -> float | None:
        """The start of role n's next step, if all that it waits for has been played."""
        needs = [need for need in waits(step.chunk).get(step.job, ()) if need in every]
        known = all(need in stops for need in needs)
        return max(free.get(n, 0), free.get(unit(step.job), 0), *(stops[x] for x in needs)) if known else None

    while any(left):
        starts = [(earliest(n, steps[0]), steps[0].chunk, n) for n, steps in enumerate(left) if steps]
        start, _, n = min((x for x in starts if x[0] is not None), default=(None, None, None))
        if start is None:
            raise ValueError(f"roles: expected one that can go on, got {[steps[0] for steps in left if steps]}")
        step = left[n].pop(0)
        stops[step] = free[n] = free[unit(step.job)] = start + lasts[step.job]
        tasks.append(Task(*step, start, stops[step]))
    return tasks


def end(tasks: Sequence[Task]) -> float:
    """Return when the last task stops."""
    return max(t.stop for t in tasks)
