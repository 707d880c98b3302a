"""Is a kernel right, and if not, where and why: `check.kernel("gla", fn)` (appendix "Check your kernel").

    report = check.kernel("gla", my_fn, device="cuda", dtype=torch.bfloat16)
    print(report)
    report.raise_if_failed()

The same from a shell: `python -m gla_ref check gla my_module:my_fn --device cpu --dtype fp32`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch

import torch

from . import mistakes
from ._budgets import problem
from ._cases import cases
from ._diagnose import diagnose
from ._mechanisms import MECHANISMS
from ._report import Report, Row, judge
from ._runner import Convention, NotClaimed, accepted, observe

__all__ = ["MECHANISMS", "NotClaimed", "Report", "Row", "kernel", "mistakes"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel(
    mechanism: str,
    fn: Callable,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    only: str | None = None,
    seed: int = 0,
    layout: str = "bthd",
    state: str = "kv",
    gate: str = "log",
    time_limit: float = 60.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run a kernel on the cases of its mechanism and hold every result against the float64 recurrence.

    Args:
        mechanism: a key of `gla_ref.FORMS`.
        fn: `o, state = fn(q, k, v[, g], scale=, initial_state=, cu_seqlens=)`. What its signature
            lacks, a state that is None or not returned, and gradients that it does not give are reported as
            not covered, as are calls that raise :class:`NotClaimed`. It gets `output_final_state=True` if
            it names that.
        device: where the inputs lie.
        dtype: of q, k, v and g: float32, bfloat16 or float16. States are float32 (a cache has `dtype`).
        only: a pattern like "gate*"; cases of other names are left out.
        seed: of the random inputs.
        layout: "bthd", or "bhtd" with heads before time in every token tensor.
        state: "kv", or "vk" for states `[N, H, V, K]`.
        gate: "log" (natural), "log2" or "alpha" (not a logarithm).
        time_limit: seconds a call may take, compilation included, before it counts as hanging.
        progress: called with (cases done, cases in all, name of the next).

    Returns:
        a :class:`Report`; `report.ok` is the verdict.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an option has a value that it cannot have.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism: expected one of {sorted(MECHANISMS)}, got {mechanism!r}")
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype}")
    kind, how, takes = MECHANISMS[mechanism], Convention(layout, state, gate), accepted(fn)
    chosen = [c for c in cases(mechanism) if only is None or fnmatch(c.name, only)]
    if not chosen:
        raise ValueError(f"only: expected a pattern that fits a case, got {only!r}")
    settings = {
        "mechanism": mechanism,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    settings |= {
        "only": only,
        "seed": seed,
        "layout": layout,
        "state": state,
        "gate": gate,
    }
    report, seen = Report(settings), []
    for i, case in enumerate(chosen):
        if progress:
            progress(i, len(chosen), case.name)
        if case.state and "initial_state" not in takes:
            report.rows.append(Row(case.name, "S0", "not covered", message="initial state"))
            case = replace(case, state=False)
        lacks = case.ends and "cu_seqlens" not in takes and "packed sequences"
        lacks = lacks or (case.scale is not None and "scale" not in takes and "scale")
        if lacks:
            report.rows.append(Row(case.name, "call", "not covered", message=lacks))
            continue
        p = problem(mechanism, case, dtype, seed, str(device), gate)
        found, findings = observe(fn, kind, how, takes, p, time_limit)
        report.rows += [judge(p, n, x) for n, x in found.items()]
        for f in findings:
            status = "not covered" if f.kind == "not covered" else "failed"
            report.rows.append(Row(case.name, f.quantity, status, f.kind, message=str(f)))
        if found:
            seen.append((p, found))
    if progress:
        progress(len(chosen), len(chosen), "")
    if any(row.where for row in report.rows):
        wrong = [row.case for row in report.rows if row.where]
        telling = [pair for pair in seen if pair[0].case.telling]
        extra = [pair for pair in seen if pair[0].case.name in wrong and not pair[0].case.telling]
        for m, distance in diagnose(mechanism, telling + extra[:2]):
            report.diagnosis.append({"mistake": m.name, "line": m.line, "distance": distance})
    return report
