"""Bugs that public libraries shipped, each made again in a few lines and caught (appendix "Bugs that shipped").

    python -m gla_ref check --museum

runs every room: its kernel must pass the ordinary test that hid the bug, fail the kit, and be named by the diagnosis.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ... import FORMS
from .. import Report, kernel
from .._cases import Case, cases, inputs
from .._kernel import SECONDS, Convention, Kernel
from .._mechanisms import MECHANISMS
from ..mistakes._shipped import chunked
from ..oracle import evaluate
from ._rooms import ROOMS, Ordinary, Room

__all__ = ["ROOMS", "Ordinary", "Room", "Visit", "chunked", "ordinary_test", "room", "visit"]


def room(number: int) -> Room:
    """The room of a number.

    Raises:
        ValueError: there is none.
    """
    for it in ROOMS:
        if it.number == number:
            return it
    raise ValueError(f"number: expected one of {[it.number for it in ROOMS]}, got {number}")


def quantities(fn: Callable, mechanism: str, case: Case) -> dict[str, Tensor]:
    """The output, the state and all gradients of a call on random inputs of float32, by name: o, S, dq, dk, ..."""
    kernel = Kernel(fn, mechanism, Convention(), torch.device("cpu"), SECONDS)
    x = {name: y.float() for name, y in inputs(mechanism, case, torch.float32, seed=0).items()}
    made = evaluate(partial(kernel.call, {}), MECHANISMS[mechanism], x, case)
    return {name: y for name, y in made.items() if y is not None}


def ordinary_test(room: Room) -> bool:
    """Compare a room's kernel with the recurrence as most tests do: one size, random numbers, one tolerance."""
    test, recurrence = room.test, FORMS[room.mechanism]["recurrent"]
    made = quantities(test.fn or room.fn, room.mechanism, test.case)
    right = quantities(test.reference or recurrence, room.mechanism, test.case)
    return all(torch.allclose(made[name], right[name], rtol=1e-3, atol=1e-3) for name in test.only or made)


def error_map(room: Room) -> dict:
    """Map the error in the quantity of a room's picture, as rows of digits for a record.

    Tokens run along a row, or of a state the columns of every sequence; a row is a channel, or a row, of a head. Error
    is the largest deviation in the batch over the root mean square of the right values. 0 is an error of at most 1e-4,
    each further digit half a power of ten; x is not finite.
    """
    mechanism, kind, name = room.mechanism, MECHANISMS[room.mechanism], room.shown[1]
    case = next(it for it in cases(mechanism) if it.name == room.shown[0])
    exact = evaluate(kind.exact, kind, inputs(mechanism, case, torch.float32, seed=0), case)[name]
    error = (quantities(room.fn, mechanism, case)[name] - exact).abs() / exact.square().mean().sqrt()
    of_tokens = "T" in kind.axes(name)
    plane = error.amax(0).flatten(1).T if of_tokens else error.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
    digits = (2 * (plane.clamp_min(1e-4).log10() + 4)).ceil().clamp_max(9)
    rows = ["".join("x" if d != d else str(int(d)) for d in row) for row in digits.tolist()]
    return {"heads": exact.shape[kind.head_axis(name)], "sequences": 0 if of_tokens else len(error), "rows": rows}


@dataclass(frozen=True)
class Visit:
    """A room and the verdict of the kit.

    Attributes:
        room: the room.
        passes: whether its kernel passes the ordinary test.
        report: the kit's report of it.
        seconds: the kit's time.
    """

    room: Room
    passes: bool
    report: Report
    seconds: float

    @property
    def caught(self) -> str:
        """The first case that fails, and the quantities that are wrong there; empty if none fails."""
        failures = self.report.failures
        if not failures:
            return ""
        case = failures[0].case
        wrong = dict.fromkeys(row.quantity for row in failures if row.case == case)
        return f"{case}: {', '.join(wrong)}"

    @property
    def named(self) -> str:
        """The diagnosis, of several mistakes if they give the same in all failing cases; empty if there is none."""
        return " or ".join(match["mistake"] for match in self.report.diagnosis)

    @property
    def right(self) -> bool:
        """Whether the room's mistake is among those of the diagnosis."""
        return self.room.name in [match["mistake"] for match in self.report.diagnosis]

    @property
    def ok(self) -> bool:
        """Whether the kernel passes the ordinary test, fails the kit, and is named."""
        return self.passes and bool(self.caught) and self.right

    def __str__(self) -> str:
        """A line: the room, where it was caught, and its name."""
        said = f"caught in {self.caught}" if self.caught else "NOT CAUGHT"
        name = f'"{self.named}"' if self.named else "NOT NAMED"
        name += "" if self.right or not self.named else f', NOT "{self.room.name}"'
        test = "" if self.passes else " It FAILS the ordinary test."
        return f"{self.room.number:2} {self.room.title} ({self.seconds:.1f} s): {said}; named {name}.{test}"

    def to_json(self) -> dict:
        """A record: the room, the verdict, and a map of the error for its picture."""
        case, quantity = self.room.shown
        (row,) = (row for row in self.report.rows if (row.case, row.quantity) == (case, quantity))
        return {
            "number": self.room.number,
            "title": self.room.title,
            "mechanism": self.room.mechanism,
            "passes_ordinary_test": self.passes,
            "caught": self.caught,
            "failing": self.report.failing,
            "cases": self.report.covered,
            "named": self.named,
            "seconds": round(self.seconds, 2),
            "case": case,
            "quantity": quantity,
            "error": repr(row.error),
            "budget": row.budget,
            "map": error_map(self.room),
        }


def visit(room: Room, seed: int = 0) -> Visit:
    """Run a room's ordinary test, and the kit on the cases that catch it.

    Args:
        room: one of `ROOMS`.
        seed: of the kit's random inputs.
    """
    passes, start = ordinary_test(room), time.perf_counter()
    fn = partial(room.fn)  # has no name in a module: the kit runs no case again in a new process
    report = kernel(room.mechanism, fn, only=room.cases, seed=seed)
    return Visit(room, passes, report, time.perf_counter() - start)
