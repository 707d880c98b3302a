"""Cases become rows of a report: posed, run, judged, shrunk and explained (appendix "Check your kernel")."""

import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from ._cases import OPTIONAL, Case
from ._claims import Claim
from ._kernel import SECONDS, Convention, Finding, Kernel
from ._names import Seen, by_drop, by_head, by_name, by_terms
from ._report import Report, Row
from ._run import NO_GRAD, Results, Trial, broken, observe
from ._where import Bounds, in_common, locate, partly, plainly, smaller
from ._words import only_when
from .oracle import Problem, numbers, problems, shape

Progress = Callable[[int, int, str], None]  # (cases done, cases in all, name of the next)
LONE = 3  # failing cases that are run again, each in a process of its own
WAYS = {"no_grad": NO_GRAD}  # calls without a backward pass, from which a kernel may still keep something
PASSES = 77  # how a process ends in which a case passes: 0 also ends one whose module leaves before
VERDICT = f"raise SystemExit({PASSES} if {{}}.ok else 1)"  # a call of the kit stands in the braces
BREAKS = 5  # processes that a kernel may break before the rest of its cases is left
UNTRIED = "cases after those that broke their processes"
ORACLE_THREADS = 2  # threads that work out problems
ABREAST = 16  # problems of one shape at a time


class Posed(NamedTuple):
    """A case as a function can be asked it: the rows of what it cannot, and the problem that is left, if any."""

    rows: list[Row]
    problem: Problem | None


class Answer(NamedTuple):
    """All rows of a case, and the call that they are of, if it gave results."""

    rows: list[Row]
    seen: Seen | None = None


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

    def within_signature(self, case: Case) -> tuple[list[Row], Case | None]:
        """The rows of what a function cannot be asked of a case, and the case that is left, if any."""
        rows, takes = [], self.kernel.takes
        if case.state and "initial_state" not in takes:
            rows.append(Row(case.name, "S0", message="initial state"))
            case = replace(case, state=False)
        lacks = case.ends and "cu_seqlens" not in takes and "packed sequences"
        lacks = lacks or (case.scale is not None and "scale" not in takes and "scale")
        lacks = lacks or (case.optional and not takes & {*self.kernel.kind.optional} and OPTIONAL["optional"])
        if lacks:
            return [*rows, Row(case.name, "call", message=lacks)], None
        return rows, case

    def may_call(self, case: Case) -> bool:
        """Whether the kernel claims this very case, and has all that it gives."""
        rows, _ = self.within_signature(case)
        return not rows and self.claim.fit(case, self.kernel.kind) == case

    def pose(self, cases: list[Case]) -> list[Posed]:
        """Cases, best of one shape, worked out."""
        left = [self.within_signature(case) for case in cases]
        made = iter(self.problems([case for _, case in left if case]))
        return [Posed(rows, next(made) if case else None) for rows, case in left]

    def run(self, posed: Posed) -> Answer:
        """Call the kernel, and judge it."""
        rows, p, kind = [*posed.rows], posed.problem, self.kernel.kind
        if p is None:
            return Answer(rows)
        results, findings = self.observe_or_break(p)
        stateless = results and all(results[n] is None for n in kind.states.values())
        if stateless and p.case.loss == "both" and results["dq"] is not None:
            # no state came back, so ask again with a loss of o alone
            (p,) = self.problems([replace(p.case, loss="o")])
            results, findings = self.observe_or_break(p)
        due = results
        if stateless and p.case.loss == "state":  # of nothing, then: no gradient is asked for
            due = {n: x for n, x in results.items() if not n.startswith("d")}
        rows += [row_of(p, n, x) for n, x in due.items() if x is not None or self.claims(n)]
        for f in findings:
            rows.append(Row(p.case.name, f.quantity, kind=f.kind, message=only_when(f.when) if f.when else str(f)))
        return Answer(rows, Seen(p, results) if results else None)

    def observe_or_break(self, p: Problem) -> tuple[Results, list[Finding]]:
        """What :func:`observe` finds. An error that the device does not survive is no refusal, and all that is said."""
        findings: list[Finding] = []
        try:
            results, findings = observe(self.kernel, p)
        except RuntimeError:  # outside of a call: what uses the device next has the error of a call before
            if not broken(self.kernel.device):
                raise
        if not (reason := broken(self.kernel.device)):
            return results, findings
        raised = next((str(f) for f in findings if f.kind == "raises"), reason)
        return {}, [Finding("breaks", f"{raised}; after that, nothing runs on {self.kernel.device} in this process")]

    def claims(self, name: str) -> bool:
        """Whether a quantity should be there: no gradient without a backward pass, no state where none is claimed."""
        return self.claim.gradient if name.startswith("d") else self.claim.state or name == "o"

    def run_all(self, cases: list[Case], progress: Progress) -> Iterator[Answer]:
        """The next problems are worked out while a kernel compiles, those of one shape side by side."""
        groups: dict[Case, list[Case]] = {}
        for case in cases:
            groups.setdefault(shape(self.within_signature(case)[1] or case), []).append(case)
        pool = ThreadPoolExecutor(ORACLE_THREADS)
        posed: dict[str, tuple[Future, int]] = {}  # by the case's name
        try:
            for some in (group[i : i + ABREAST] for group in groups.values() for i in range(0, len(group), ABREAST)):
                together = pool.submit(self.pose, some)
                posed |= {case.name: (together, i) for i, case in enumerate(some)}
            for n, case in enumerate(cases):
                progress(n, len(cases), case.name)
                together, i = posed.pop(case.name)
                yield self.run(together.result()[i])
        finally:
            pool.shutdown(cancel_futures=True)

    def smallest_failure(self, report: Report) -> str:
        """The smallest case found that fails as the smallest of the report does, as lines to run."""
        failed = {row.case: row for row in reversed(report.failures)}  # the first row of each
        least = min((report.cases[name] for name in report.cases if name in failed), key=lambda c: c.volume)
        first = failed[least.name]

        def fails(case: Case) -> bool:
            if self.claim.fit(case, self.kernel.kind) != case:
                return False
            rows = self.run(self.pose([case])[0]).rows
            return any(r.status == "failed" and r.quantity == first.quantity for r in rows)

        if first.kind not in ("hangs", "breaks"):  # every attempt would take the time limit, or a process
            *_, least = smaller(self.kernel.kind, replace(least, name="smallest", telling=False), fails)
        return self.lines(least)

    def lines(self, case: Case, do: str = "print({})") -> str:
        """Lines of Python that run that case by itself and `do` something with the report."""
        k = self.kernel
        given = {"device": str(k.device), "seed": self.seed, "time_limit": k.seconds, **vars(k.how)}
        plain = {"device": "cpu", "seed": 0, "time_limit": SECONDS, **vars(Convention())}
        options = {n: x for n, x in given.items() if x != plain[n]}
        return reproduction(k.mechanism, k.fn, case, self.dtype, do, **options)

    def right_alone(self, report: Report) -> list[str]:
        """The cases, if few of many fail, that pass in a fresh process; none is asked after one that fails there, too.

        The first few are asked, too, where all that is wrong is wrong in another way of calling: that way may be right
        the first time, and wrong the second. A case that is called by itself is not: no case came before it.

        A kernel is compiled there again, at every size that it meets. A module that checks itself when it is imported
        does so there, too, and gets no process of its own.
        """
        failing, kinds = report.failing, {row.kind for row in report.failures}
        few = len(report.cases) > 1 and (len(failing) <= min(LONE, len(report.cases) - 1) or kinds <= WAYS.keys())
        if not few or kinds & {"hangs", "differs", "breaks"} or not imported(self.kernel.fn):
            return []
        seconds = 10 * self.kernel.seconds
        return list(takewhile(lambda name: passes(self.lines(report.cases[name], VERDICT), seconds), failing[:LONE]))

    def explain(self, report: Report, calls: list[Seen]) -> list[dict]:
        """The mistakes that the kernel behaves like, by all calls; bounds if nothing explains all."""
        mechanism = self.kernel.mechanism
        failed, passed = [s for s in calls if s.wrong], [s for s in calls if not s.wrong]
        named = by_drop(failed, self.forward, self.ask)
        if not named:
            telling = sorted(self.telling, key=numbers)
            named = by_name(mechanism, self.dtype, failed, passed, self.ask, telling)
        matches = [it for it in named if not it.somewhere]
        terms = [] if matches else by_terms(mechanism, failed, passed, self.ask)
        matches = matches or [it for it in terms if not it.somewhere]
        where = ""
        if not matches and not report.alone:
            least = sorted(failed, key=lambda s: s.size)
            # other calls like one that is wrong by a few budgets only may be right by luck
            s = next((s for s in least if plainly(s.problem, s.results)), least[0])
            bounds = Bounds(self, s.problem, frozenset(s.wrong))
            cases = ([s.problem.case for s in some] for some in (failed, passed))
            report.smallest, report.measured = bounds.statements(s.problem.case, *cases)
            report.cut = bounds.cut
            matches = by_head(mechanism, failed)
            where = "" if matches else partly(report, [s.problem.case.name for s in failed])
            matches = matches or terms or named
        return [{"mistake": it.name + where, "line": it.mistake.line, "distance": it.distance} for it in matches]

    def ask(self, case: Case) -> Seen | None:
        """One more case and the kernel's results; None where it gives none, or cannot be asked."""
        if not self.may_call(case):
            return None
        (p,) = self.problems([case])
        results = Trial(self.kernel, p).as_usual()
        return None if isinstance(results, Finding) else Seen(p, results)

    def forward(self, p: Problem) -> Results | None:
        """The results of a call without gradients; None where it gives none."""
        trial = Trial(self.kernel, p)
        results = trial.attempt(False, trial.inference)
        return None if isinstance(results, Finding) else results


# -- a case by itself -----------------------------------------------------------------------------
def imported(fn: Callable) -> str:
    """The line that imports fn in another process, and under which name; empty where none does."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return ""
    names = (name for name, x in vars(module).items() if x is fn)
    return next((f"from {module.__name__} import {name}" for name in names), "")


def reproduction(mechanism: str, fn: Callable, case: Case, dtype: torch.dtype, do="print({})", **options) -> str:
    """Lines of Python that run that case and `do` something with its report; a comment says if nothing imports fn."""
    source = imported(fn)
    name, source = (source.split()[-1], source) if source else ("fn", "# fn: the function that was checked")
    named = "".join(f", {n}={value!r}" for n, value in options.items())
    lines = [
        "import torch",
        "from gla_ref import check",
        source,
        f"case = check.{case}",
        do.format(f"check.kernel({mechanism!r}, {name}, dtype={dtype}, only=case{named})"),
    ]
    whole = (re.sub("'[^']*'", lambda m: m[0].replace(" ", "\0"), line) for line in lines)
    wrapper = textwrap.TextWrapper(76, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrapper.fill(line) for line in whole).replace("\0", " ")


def passes(lines: str, seconds: float) -> bool:
    """Whether a fresh Python process, which these lines of a reproduction run in, ends with a verdict of right."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(x or os.getcwd() for x in sys.path)}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run([sys.executable, "-c", lines], env=env, capture_output=True, timeout=seconds)
        return done.returncode == PASSES
    return False


# -- rows ----------------------------------------------------------------------------------------
def row_of(p: Problem, name: str, x: Tensor | None) -> Row:
    """The row of one quantity of a case."""
    if x is None:
        return Row(p.case.name, name, kind="absent" if p.exact[name].any() else "zero")
    error, budget = p.judge(name, x)
    if error <= budget:
        return Row(p.case.name, name, kind="error", error=error, budget=budget)
    kind, message = "error", ""
    if not torch.isfinite(x).all():
        kind, error, message = "not finite", *((math.nan, "NaN") if x.isnan().any() else (math.inf, "infinity"))
    return Row(p.case.name, name, kind=kind, error=error, budget=budget, message=message, **locate(p, name, x))


def together(rows: list[Row], waivers: Mapping[str, str]) -> Iterator[Row]:
    """The rows of all cases, compared: what others have is missing; a reason, if there is one, waives it.

    Reasons are by quantity or "quantity@case".
    """
    given = {row.quantity for row in rows if row.error is not None}
    for row in rows:
        if row.kind == "absent" and row.quantity in given:
            message = "none is given, though it is not 0 and other cases give one"
            row = replace(row, kind="missing", message=message)
        for pattern, reason in waivers.items():
            name, _, case = pattern.partition("@")
            if row.status == "failed" and fnmatch(row.quantity, name) and fnmatch(row.case, case or "*"):
                row = replace(row, waived=reason)
        yield row


def examine(examiner: Examiner, report: Report, progress: Progress, journal: MutableMapping[str, list[Row]]) -> None:
    """Fill in a report on its cases.

    The `journal` has the rows of cases that were called in processes before, and gets those of each case that is
    called here.
    """
    cases, calls = list(report.cases.values()), []
    breaks = sum(row.kind == "breaks" for rows in journal.values() for row in rows)
    left = [case for case in cases if case.name not in journal and breaks < BREAKS]
    # a process that broke after all cases is in the journal, too, under what it was doing then
    lost = bool(journal.keys() - report.cases.keys())
    for case, (rows, seen) in zip(left, examiner.run_all(left, progress), strict=True):
        journal[case.name] = rows
        if seen and not case.optional:  # no mistake knows these
            calls.append(seen)
        if any(row.kind == "breaks" for row in rows):
            lost = True
            break
    rows = [journal.get(case.name, [Row(case.name, "call", message=UNTRIED)]) for case in cases]
    report.rows = [*together([row for of in rows for row in of], report.settings["waive"])]
    report.alone = examiner.right_alone(report) if report.failures and not lost else []
    report.common = in_common(report, examiner.kernel.kind)
    for row in report.failures if report.alone else ():
        if row.kind in WAYS:
            row.message = only_when(WAYS[row.kind], kept=True)
    if report.settings["level"] == "full" and report.failures and not lost:
        progress(len(cases) - 1, len(cases), "looking for the smallest failure")
        report.reproduction = examiner.smallest_failure(report)
    called = {s.problem.case.name for s in calls} - {*report.alone}
    explained = not lost and any(row.where and row.case in called for row in report.rows)
    n = len(report.failing)
    said = f"{n} {'is' if n == 1 else 'are'} wrong; looking for the mistake" if explained else ""
    progress(len(cases), len(cases), said)
    if explained:
        report.diagnosis = examiner.explain(report, calls)
