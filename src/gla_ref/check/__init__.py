"""Is a kernel right, and if not, where and why: `check.kernel("gla", fn)` (appendix "Check your kernel").

    report = check.kernel("gla", my_fn, device="cuda", dtype=torch.bfloat16)
    print(report)
    report.raise_if_failed()

The same from a shell: `python -m gla_ref check gla my_module:my_fn --device cpu --dtype fp32`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from fnmatch import fnmatch

import torch

from . import mistakes
from ._budgets import Problem, problem
from ._cases import Case, cases
from ._diagnose import diagnose
from ._mechanisms import MECHANISMS
from ._report import Report, Row, judge
from ._runner import Convention, NotClaimed, accepted, never_given, observe
from ._shrink import reproduction, shrink

__all__ = ["MECHANISMS", "Case", "NotClaimed", "Report", "Row", "cases", "kernel", "mistakes"]

AHEAD = 4  # problems that are worked out side by side
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel(
    mechanism: str,
    fn: Callable,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    level: str = "quick",
    only: str | Case | None = None,
    seed: int = 0,
    layout: str = "bthd",
    state: str = "kv",
    gate: str = "log",
    forward_only: bool = False,
    time_limit: float = 60.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run a kernel on the cases of its mechanism and hold every result against the float64 recurrence.

    Each case is called twice, as in inference (nothing requires a gradient), and with a second backward pass through
    the same graph; some cases in further ways, such as another call between the forward and the backward pass.

    Args:
        mechanism: a key of `gla_ref.FORMS`.
        fn: `o, state = fn(q, k, v[, g], scale=, initial_state=, cu_seqlens=)`. What its signature
            lacks, a state that is None or not returned (the loss is then of o alone), and gradients that it does
            not give are reported as not covered, as are calls that raise :class:`NotClaimed`. It gets
            `output_final_state=True` if it names that.
        device: where the kernel runs. What it is held against is computed on the CPU, but for long attention.
        dtype: of q, k, v and g: float32, bfloat16 or float16. States are float32 (a cache has `dtype`). In a case
            each, g is float32 and the state float64; a kernel may refuse both by raising.
        level: "quick", or "full": also T up to 8192, K up to 256, V up to 512 (softmax attention: 256), every
            gate in long and in packed sequences, a random search, and the smallest failing case as lines to run.
        only: a pattern like "gate*"; cases of other names are left out. Or one :class:`Case` to run.
        seed: of the random inputs.
        layout: "bthd", or "bhtd" with heads before time in every token tensor.
        state: "kv", or "vk" for states `[N, H, V, K]`.
        gate: "log" (natural), "log2" or "alpha" (not a logarithm).
        forward_only: call it under `torch.no_grad` only, where it refuses inputs that need gradients, or refuses
            its backward pass; gradients are then not covered.
        time_limit: seconds a call may take, compilation included, before it counts as hanging.
        progress: called with (cases done, cases in all, name of the next).

    Returns:
        a :class:`Report`; `report.ok` is the verdict.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an option has a value that it cannot have.
    """
    chosen = cases(mechanism, level, seed)
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype}")
    conventions = {"layout": layout, "state": state, "gate": gate, "forward_only": forward_only}
    kind, how, takes = MECHANISMS[mechanism], Convention(**conventions), accepted(fn)
    if isinstance(only, Case):
        chosen = [only]
    elif only is not None:
        chosen = [case for case in chosen if fnmatch(case.name, only)]
    if not chosen:
        raise ValueError(f"only: expected a pattern that fits a case, got {only!r}")
    settings = {
        "mechanism": mechanism,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "level": level,
        "only": None if only is None else str(only),
        "seed": seed,
        **conventions,
        "defaults": never_given(fn, kind),
    }

    def pose(case: Case) -> tuple[list[Row], Problem | None]:
        """The rows of what the function cannot be asked of a case, and the problem that is left."""
        rows = []
        if case.state and "initial_state" not in takes:
            rows.append(Row(case.name, "S0", "not covered", message="initial state"))
            case = replace(case, state=False)
        lacks = case.ends and "cu_seqlens" not in takes and "packed sequences"
        lacks = lacks or (case.scale is not None and "scale" not in takes and "scale")
        if lacks:
            return [*rows, Row(case.name, "call", "not covered", message=lacks)], None
        return rows, problem(mechanism, case, dtype, seed, gate, str(device))

    def run(case: Case, rows: list[Row], p: Problem | None) -> tuple[list[Row], list]:
        """The rows of a case, and (problem, what the kernel made of it) if it made anything."""
        if p is None:
            return rows, []
        found, findings = observe(fn, kind, how, takes, p, time_limit, torch.device(device))
        stateless = found and all(found[n] is None for n in kind.states.values())
        if stateless and p.case.loss == "both" and found["dq"] is not None:
            # a loss cannot be of what is not returned
            p = problem(mechanism, replace(p.case, loss="o"), dtype, seed, gate, str(device))
            found, findings = observe(fn, kind, how, takes, p, time_limit, torch.device(device))
        rows += [judge(p, n, x) for n, x in found.items()]
        for f in findings:
            status = "not covered" if f.kind == "not covered" else "failed"
            rows.append(Row(case.name, f.quantity, status, f.kind, message=str(f)))
        return rows, [(p, found)] if found else []

    report, seen = Report(settings, {case.name: case for case in chosen}), []
    # the next problems are worked out while a kernel compiles
    with ThreadPoolExecutor(AHEAD) as pool:
        posed = [pool.submit(pose, case) for case in chosen[: 2 * AHEAD]]
        for i, case in enumerate(chosen):
            if progress:
                progress(i, len(chosen), case.name)
            posed += [pool.submit(pose, later) for later in chosen[i + 2 * AHEAD :][:1]]
            rows, made = run(case, *posed[i].result())
            report.rows += rows
            seen += made
    if level == "full" and report.failures:
        if progress:
            progress(len(chosen) - 1, len(chosen), "looking for the smallest failure")
        failed = {row.case: row for row in reversed(report.failures)}
        least = min(
            (c for c in chosen if c.name in failed), key=lambda c: c.B * c.T * c.H * c.K * c.V
        )
        first = failed[least.name]

        def fails(case: Case) -> bool:
            return any(
                r.status == "failed" and r.quantity == first.quantity
                for r in run(case, *pose(case))[0]
            )

        if first.kind != "hangs":  # every attempt would take the time limit
            least = shrink(least, fails)
        given = {"device": str(device), "seed": seed, **conventions}
        plain = {"device": "cpu", "seed": 0} | asdict(Convention())
        options = {n: value for n, value in given.items() if value != plain[n]}
        report.reproduction = reproduction(mechanism, fn, least, dtype, **options)
    if progress:
        progress(len(chosen), len(chosen), "")
    if any(row.where for row in report.rows):
        wrong = [row.case for row in report.rows if row.where]
        telling = [pair for pair in seen if pair[0].case.telling]
        others = [pair for pair in seen if not pair[0].case.telling]
        extra = [pair for pair in others if pair[0].case.name in wrong]
        passed = [pair for pair in others if pair[0].case.name not in wrong]
        for m, distance in diagnose(mechanism, telling + extra[:2], passed):
            report.diagnosis.append({"mistake": m.name, "line": m.line, "distance": distance})
    return report
