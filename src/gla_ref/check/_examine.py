"""Cases as rows of a report: posed, run, judged; the smallest that fails; the mistakes that explain it all.

Appendix "Check your kernel".
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice, takewhile

import torch

from ._bounds import Bounds, Spent, plainly
from ._budgets import Problem, problems, shape
from ._cases import Case
from ._claims import Claim
from ._common import ONLY, Clock
from ._diagnose import diagnose, outside, rescaled, stale
from ._kernel import SECONDS, Convention, Finding, Kernel
from ._localise import localised
from ._report import Report, Row, judge
from ._runner import Found, Trial, attempt, observe
from ._shrink import INSIDE, imported, reproduction, right_alone, shrink
from ._sources import misplaced

Progress = Callable[[int, int, str], None]  # (cases done, cases in all, name of the next)
LONE = 3  # failing cases that are run again, each in a process of its own
SEARCH = {"quick": 60.0, "full": 600.0}  # seconds of CPU time for the mistake, and again for places and bounds
WAYS = {"no_grad"}  # findings of calls that keep nothing for a backward pass, of which a kernel may keep something
FIRST = "right as the first such call of a new process: something is kept between calls"
PATTERNS = 6  # sets of quantities that are wrong together
AHEAD = 2  # threads that work out problems
ABREAST = 16  # problems of one shape at a time


@dataclass
class Posed:
    """A case as a function can be asked it: the rows of what it cannot, and the problem that is left, if any."""

    rows: list[Row]
    problem: Problem | None = None
    found: Found | None = None  # what the kernel made of it


@dataclass(frozen=True)
class Examiner:
    """Holds one kernel against the oracle, case by case.

    Attributes:
        telling: cases that tell mistakes apart and were not asked for; they are called where a failure has several
            names.
    """

    kernel: Kernel
    dtype: torch.dtype
    seed: int
    claim: Claim = Claim()
    telling: tuple[Case, ...] = ()

    def problems(self, cases: list[Case]) -> list[Problem]:
        k = self.kernel
        return problems(k.mechanism, cases, self.dtype, self.seed, k.how.gate, str(k.device))

    def asked(self, case: Case) -> tuple[list[Row], Case | None]:
        """The rows of what a function cannot be asked of a case, and the case that is left, if any."""
        rows, takes = [], self.kernel.takes
        if case.state and "initial_state" not in takes:
            rows.append(Row(case.name, "S0", "not covered", message="initial state"))
            case = replace(case, state=False)
        lacks = case.ends and "cu_seqlens" not in takes and "packed sequences"
        lacks = lacks or (case.scale is not None and "scale" not in takes and "scale")
        if lacks:
            return [*rows, Row(case.name, "call", "not covered", message=lacks)], None
        return rows, case

    def pose(self, cases: list[Case]) -> list[Posed]:
        """Cases, best of one shape, worked out."""
        asked = [self.asked(case) for case in cases]
        made = iter(self.problems([case for _, case in asked if case]))
        return [Posed(rows, next(made) if case else None) for rows, case in asked]

    def run(self, it: Posed) -> Posed:
        """Call the kernel; what it made of the case, and the rows of that."""
        if it.problem is None:
            return it
        p, kind = it.problem, self.kernel.kind
        found, findings = observe(self.kernel, p)
        stateless = found and all(found[n] is None for n in kind.states.values())
        if stateless and p.case.loss == "both" and found["dq"] is not None:
            # a loss cannot be of what is not returned
            (p,) = self.problems([replace(p.case, loss="o")])
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
        """The next problems are worked out while a kernel compiles, those of one shape side by side."""
        groups: dict[Case, list[Case]] = {}
        for case in cases:
            groups.setdefault(shape(self.asked(case)[1] or case), []).append(case)
        left = iter([group[i : i + ABREAST] for group in groups.values() for i in range(0, len(group), ABREAST)])
        coming: dict[str, tuple[Future, int]] = {}  # by the case's name

        def submit(n: int) -> None:
            for group in islice(left, n):
                posed = pool.submit(self.pose, group)
                coming.update({case.name: (posed, i) for i, case in enumerate(group)})

        with ThreadPoolExecutor(AHEAD) as pool:
            submit(2 * AHEAD)
            for n, case in enumerate(cases):
                progress(n, len(cases), case.name)
                while case.name not in coming:
                    submit(1)
                posed, i = coming.pop(case.name)
                if not i:
                    submit(1)
                yield self.run(posed.result()[i])

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
            rows = self.run(self.pose([case])[0]).rows
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

        The first few are asked, too, where all that is wrong is wrong in another way of calling: that way may be right
        the first time, and wrong the second.

        A kernel is compiled there again, at every size that it meets. A module that checks itself when it is imported
        does so there, too, and gets no process of its own.
        """
        failing, kinds = report.failing, {row.kind for row in report.failures}
        few = len(failing) <= min(LONE, len(report.cases) - 1) or kinds <= WAYS
        if INSIDE in os.environ or not few or kinds & {"hangs", "differs"} or not imported(self.kernel.fn):
            return []
        seconds = 10 * self.kernel.seconds
        return list(takewhile(lambda name: right_alone(self.lines(report.cases[name]), seconds), failing[:LONE]))

    def explain(self, report: Report, seen: list[Posed]) -> list[dict]:
        """The mistakes that what was seen fits.

        The cases that tell most are asked, and others that are wrong: the first, of the rest the widest, and the
        smallest of each set of quantities that are wrong together. All that failed are asked where these leave several
        mistakes.
        """
        wrong: dict[str, set[str]] = {}
        for row in report.rows:
            if row.where:
                wrong.setdefault(row.case, set()).add(row.quantity)
        telling, others, passed = [], [], []
        for it in seen:
            case = it.problem.case
            kept = telling if case.telling else others if case.name in wrong else passed
            kept.append((it.problem, it.found))
        small, patterns = sorted(others, key=lambda pair: pair[0].exact["o"].numel()), {}
        for pair in small:
            patterns.setdefault(frozenset(wrong[pair[0].case.name]), pair)
        asked = [*others[:1], *sorted(others[1:], key=lambda pair: -pair[0].case.K * pair[0].case.V)[:1]]
        asked += [pair for pair in [*patterns.values()][:PATTERNS] if not any(pair is x for x in asked)]
        more = getattr(self.kernel.fn, "mistakes", ())  # of a function over ranks
        besides = [pair for pair in small if not any(pair is x for x in asked)]
        seconds = SEARCH.get(report.settings["level"], SEARCH["quick"])
        first = Clock(seconds)
        light = self.light([pair for pair in telling + asked if wrong.get(pair[0].case.name)])
        apart = filter(None, map(self.answered, sorted(self.telling, key=lambda c: c.B * c.T * c.H * c.K * c.V)))
        pairs = light + telling + asked
        matches = diagnose(self.kernel.mechanism, self.dtype, pairs, passed, besides, more, first, apart)
        if first.cut:
            late = f"; {first.late} named mistakes were not compared" if first.late else ""
            report.cut = f"The search for the mistake was cut off after {seconds:g} s of CPU time{late}."
        pairs = [(it.problem, it.found) for it in seen]
        matches = matches or stale(self.kernel.mechanism, pairs) or rescaled(self.kernel.mechanism, pairs)
        said = [{"mistake": it.name, "line": it.mistake.line, "distance": it.distance} for it in matches]
        if matches or report.alone:
            return said
        bad = [pair for pair in telling if pair[0].case.name in wrong]
        failed = sorted([*bad, *asked], key=lambda pair: pair[0].exact["o"].numel()) + besides
        clock = Clock(seconds)
        cases = [[it.problem.case for it in seen if (it.problem.case.name in wrong) is bad] for bad in (True, False)]
        report.smallest, report.measured, cut = self.measured(failed, *cases, clock)
        matches = misplaced(self.kernel.mechanism, failed)
        where = "" if matches else partly(report, [pair[0].case.name for pair in failed])
        right = [(it.problem, it.found) for it in seen if it.problem.case.name not in wrong]
        matches = matches or localised(
            self.kernel.mechanism, self.dtype, failed, right, more, self.called, clock, light
        )
        if clock.cut:
            late = f"The search for places and bounds was cut off after {seconds:g} s of CPU time."
        else:
            late = "The search for bounds was cut off: its calls or its time were spent." if cut else ""
        report.cut = " ".join(filter(None, (report.cut, late)))
        return [{"mistake": it.name + where, "line": it.mistake.line, "distance": it.distance} for it in matches]

    def measured(
        self, failed: list[tuple[Problem, Found]], failing: list[Case], passing: list[Case], clock: Clock
    ) -> tuple[Case | None, list[str], bool]:
        """The smallest case found that fails like the smallest one seen, its bounds, and whether the search was cut.

        A case that is wrong by a few budgets only says nothing: other calls like it may be right by luck.
        """
        p, found = next((pair for pair in failed if plainly(*pair)), failed[0])
        bounds = Bounds(self, p, frozenset(outside(p, found)), clock)
        return *bounds.said(p.case, failing, passing), bounds.cut

    def light(self, failed: list[tuple[Problem, Found]]) -> list[tuple[Problem, Found]]:
        """One more call, like the smallest that failed and wrong in the same quantities, with fewer numbers; if any.

        Most mistakes are told from the kernel's by this call, in a part of the time.
        """
        if not failed:
            return []
        p, found = min(failed, key=lambda pair: pair[0].exact["o"].numel())
        wrong = frozenset(outside(p, found))
        with suppress(Spent):
            for case in Bounds(self, p, wrong, Clock(math.inf)).lighter(p.case):
                pair = self.called(case)
                if pair and {*outside(*pair)} == wrong:
                    return [pair]
        return []

    def answered(self, case: Case) -> tuple[Problem, Found] | None:
        """One more case and the kernel's results; None where it gives none, or cannot be asked."""
        k = self.kernel
        rows, asked = self.asked(case)
        if rows or asked is None or self.claim.fit(case, k.kind) != case:
            return None
        (p,) = self.problems([case])
        trial = Trial(k, p)
        found = attempt(k.seconds, trial.run, not k.how.forward_only, trial.usual)
        return None if isinstance(found, Finding) else (p, found)

    def called(self, case: Case) -> tuple[Problem, Found] | None:
        """One more case and the kernel's results; None where it is right, or gives none."""
        pair = self.answered(case)
        return pair if pair and outside(*pair) else None


def partly(report: Report, names: list[str]) -> str:
    """The places of a mistake that passing cases do not show: traits of failing cases, and where those are wrong."""
    having = [line.removeprefix(ONLY) for line in report.common if line.startswith(ONLY)]
    failed = [row for name in names for row in report.failures if row.case == name and row.where]
    outputs = [row for row in failed if not row.quantity.startswith("d")]
    rows = outputs or failed  # a wrong output makes gradients wrong elsewhere
    rows = rows if all(row.only for row in rows) else []
    where = f", only in {rows[0].only} ({rows[0].case})" if rows else ""
    if having and not report.measured:
        return f", only with {having[0]}{where and f'; there {where[2:]}'}"
    passing = len(report.covered) - len(report.failing)
    return where or (f", but not in {passing} other cases" if passing else "")


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
    for row in report.failures if report.alone else ():
        if row.kind in WAYS:
            row.message = row.message.replace("right otherwise", FIRST)
    if report.settings["level"] == "full" and report.failures:
        progress(len(cases) - 1, len(cases), "looking for the smallest failure")
        report.reproduction = it.smallest_failure(report)
    explained = any(row.where and row.case not in report.alone for row in report.rows)
    n = len(report.failing)
    found = f"{n} {'is' if n == 1 else 'are'} wrong; looking for the mistake" if explained else ""
    progress(len(cases), len(cases), found)
    if explained:
        report.diagnosis = it.explain(report, seen)
