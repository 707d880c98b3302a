"""Cases as rows of a report: posed, run, judged; the smallest that fails; the mistakes that explain it all.

Appendix "Check your kernel".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import takewhile

import torch

from ._budgets import Problem, problem
from ._cases import Case
from ._claims import Claim
from ._diagnose import diagnose, stale
from ._kernel import SECONDS, Convention, Kernel
from ._report import Report, Row, judge
from ._runner import Found, observe
from ._shrink import INSIDE, imported, reproduction, right_alone, shrink

Progress = Callable[[int, int, str], None]  # (cases done, cases in all, name of the next)
LONE = 3  # failing cases that are run again, each in a process of its own
AHEAD = 2  # problems that are worked out side by side


@dataclass
class Posed:
    """A case as a function can be asked it: the rows of what it cannot, and the problem that is left, if any."""

    rows: list[Row]
    problem: Problem | None = None
    found: Found | None = None  # what the kernel made of it


@dataclass(frozen=True)
class Examiner:
    """Holds one kernel against the oracle, case by case."""

    kernel: Kernel
    dtype: torch.dtype
    seed: int
    claim: Claim = Claim()

    def problem(self, case: Case) -> Problem:
        k = self.kernel
        return problem(k.mechanism, case, self.dtype, self.seed, k.how.gate, str(k.device))

    def pose(self, case: Case) -> Posed:
        rows, takes = [], self.kernel.takes
        if case.state and "initial_state" not in takes:
            rows.append(Row(case.name, "S0", "not covered", message="initial state"))
            case = replace(case, state=False)
        lacks = case.ends and "cu_seqlens" not in takes and "packed sequences"
        lacks = lacks or (case.scale is not None and "scale" not in takes and "scale")
        if lacks:
            return Posed([*rows, Row(case.name, "call", "not covered", message=lacks)])
        return Posed(rows, self.problem(case))

    def run(self, it: Posed) -> Posed:
        """Call the kernel; what it made of the case, and the rows of that."""
        if it.problem is None:
            return it
        p, kind = it.problem, self.kernel.kind
        found, findings = observe(self.kernel, p)
        stateless = found and all(found[n] is None for n in kind.states.values())
        if stateless and p.case.loss == "both" and found["dq"] is not None:
            # a loss cannot be of what is not returned
            p = self.problem(replace(p.case, loss="o"))
            found, findings = observe(self.kernel, p)
        asked = found
        if stateless and p.case.loss == "state":  # of nothing, then: no gradient is asked for
            asked = {n: x for n, x in found.items() if not n.startswith("d")}
        rows = it.rows + [judge(p, n, x) for n, x in asked.items() if x is not None or self.claims(n)]
        for f in findings:
            status = "not covered" if f.kind == "not covered" else "failed"
            rows.append(Row(p.case.name, f.quantity, status, f.kind, message=str(f)))
        return Posed(rows, p, found)

    def claims(self, name: str) -> bool:
        """Whether a quantity should be there: no gradient without a backward pass, no state where none is claimed."""
        if name.startswith("d"):
            return self.claim.gradient
        return self.claim.state or name == "o"

    def run_all(self, cases: list[Case], progress: Progress) -> Iterator[Posed]:
        """The next problems are worked out while a kernel compiles."""
        with ThreadPoolExecutor(AHEAD) as pool:
            posed = [pool.submit(self.pose, case) for case in cases[: 2 * AHEAD]]
            for i, case in enumerate(cases):
                progress(i, len(cases), case.name)
                posed += [pool.submit(self.pose, later) for later in cases[i + 2 * AHEAD :][:1]]
                yield self.run(posed[i].result())

    def smallest_failure(self, report: Report) -> str:
        """The smallest case found that fails as the smallest of the report does, as lines to run."""
        failed = {row.case: row for row in reversed(report.failures)}  # the first row of each
        least = min(
            (case for name, case in report.cases.items() if name in failed), key=lambda c: c.B * c.T * c.H * c.K * c.V
        )
        first = failed[least.name]

        def fails(case: Case) -> bool:
            if self.claim.fit(case, self.kernel.kind) != case:
                return False
            rows = self.run(self.pose(case)).rows
            return any(r.status == "failed" and r.quantity == first.quantity for r in rows)

        if first.kind != "hangs":  # every attempt would take the time limit
            least = shrink(least, fails)
        return self.lines(least)

    def lines(self, case: Case) -> str:
        """What runs that case by itself."""
        k = self.kernel
        given = {"device": str(k.device), "seed": self.seed, "time_limit": k.seconds, **vars(k.how)}
        plain = {"device": "cpu", "seed": 0, "time_limit": SECONDS, **vars(Convention())}
        options = {n: x for n, x in given.items() if x != plain[n]}
        return reproduction(k.mechanism, k.fn, case, self.dtype, **options)

    def right_alone(self, report: Report) -> list[str]:
        """The cases, if few of many fail, that pass in a fresh process; none is asked after one that fails there, too.

        A kernel is compiled there again, at every size that it meets. A module that checks itself when it is imported
        does so there, too, and gets no process of its own.
        """
        failing, kinds = report.failing, {row.kind for row in report.failures}
        few = len(failing) <= min(LONE, len(report.cases) - 1)
        if INSIDE in os.environ or not few or kinds & {"hangs", "differs"} or not imported(self.kernel.fn):
            return []
        seconds = 10 * self.kernel.seconds
        return list(takewhile(lambda name: right_alone(self.lines(report.cases[name]), seconds), failing))

    def explain(self, report: Report, seen: list[Posed]) -> list[dict]:
        """The mistakes that what was seen fits.

        The cases that tell most are asked, and two others that are wrong: the first, and of the rest the widest.
        """
        wrong = {row.case for row in report.rows if row.where}
        telling, others, passed = [], [], []
        for it in seen:
            case = it.problem.case
            kept = telling if case.telling else others if case.name in wrong else passed
            kept.append((it.problem, it.found))
        others = others[:1] + sorted(others[1:], key=lambda pair: -pair[0].case.K * pair[0].case.V)[:1]
        matches = diagnose(self.kernel.mechanism, self.dtype, telling + others, passed)
        matches = matches or stale(self.kernel.mechanism, [(it.problem, it.found) for it in seen])
        return [{"mistake": m.name, "line": m.line, "distance": far} for m, far in matches]


def waive(row: Row, waivers: Mapping[str, str]) -> None:
    """A failure does not count for which there is a reason, by quantity or "quantity@case"."""
    for pattern, reason in waivers.items():
        name, _, case = pattern.partition("@")
        if row.status == "failed" and fnmatch(row.quantity, name) and fnmatch(row.case, case or "*"):
            row.status, row.waived = "waived", reason


def examine(it: Examiner, report: Report, progress: Progress) -> None:
    """Fill in a report on its cases."""
    cases, seen = list(report.cases.values()), []
    for done in it.run_all(cases, progress):
        report.rows += done.rows
        seen += [done] if done.found else []
    for row in report.rows:
        waive(row, report.settings["waive"])
    given = {row.quantity for row in report.rows if row.error is not None}
    for row in report.rows:
        if row.kind == "missing" and row.quantity in given:
            row.status, row.message = "failed", "none is given, though it is not 0 and other cases give one"
    report.alone = it.right_alone(report) if report.failures else []
    if report.settings["level"] == "full" and report.failures:
        progress(len(cases) - 1, len(cases), "looking for the smallest failure")
        report.reproduction = it.smallest_failure(report)
    progress(len(cases), len(cases), "")
    if any(row.where and row.case not in report.alone for row in report.rows):
        report.diagnosis = it.explain(report, seen)
