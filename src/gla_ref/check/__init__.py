"""Is a kernel right, and if not, where and why: `check.kernel("gla", fn)` (appendix "Check your kernel").

    report = check.kernel("gla", my_fn, device="cuda", dtype=torch.bfloat16)
    print(report)
    report.raise_if_failed()

The same from a shell: `python -m gla_ref check gla my_module:my_fn --device cpu --dtype fp32`; of a function whose
tokens are split over ranks: `torchrun --nproc-per-node 2 -m gla_ref check gla my_module:my_fn --ranks 2`.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from fnmatch import fnmatch

import torch

from . import mistakes, oracle
from ._cases import Case, cases
from ._claims import Claim, Ladder, claimed, dtype_of
from ._examine import Examiner, examine
from ._invariance import Comparison, invariance
from ._kernel import SECONDS, Convention, Kernel, NotClaimed, device_of
from ._mechanisms import MECHANISMS
from ._ranks import OverRanks
from ._report import Report, Row

__all__ = [
    "MECHANISMS",
    "Case",
    "Comparison",
    "NotClaimed",
    "OverRanks",
    "Report",
    "Row",
    "cases",
    "invariance",
    "kernel",
    "mistakes",
    "oracle",
]


def hint_for_unmatched(mechanism: str, patterns: Sequence[str], ladder: Ladder) -> str:
    """A hint for patterns that fit no case: where such a case is, or the nearest names."""

    def fitting(names: Sequence[str]) -> list[str]:
        return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    names = [case.name for case in ladder.cases]
    if left := fitting(ladder.left):
        return f"; what the kernel claims leaves out {left[0]!r}"
    if full := fitting([case.name for case in cases(mechanism, "full")]):
        return f"; {full[0]!r} is a case of the full level"
    like = [name for pattern in patterns for name in get_close_matches(pattern.replace("_", " "), names, 2)]
    return f"; the nearest names are {' and '.join(map(repr, like))}" if like else f"; a name is {names[0]!r}"


def selected(
    mechanism: str,
    claim: Claim,
    dtype: torch.dtype,
    level: str = "quick",
    only: str | Sequence[str] | Case | None = None,
    skip: str | Sequence[str] = (),
    seed: int = 0,
) -> tuple[Ladder, list[Case], list[Case]]:
    """The ladder of a level under a claim, the cases of it that `only` asks for, and those that `skip` leaves.

    Raises:
        ValueError: no case is left.
    """
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    ladder = Ladder([only], 0, []) if isinstance(only, Case) else claimed(mechanism, level, seed, claim, dtype)
    patterns = ("*",) if only is None or isinstance(only, Case) else (only,) if isinstance(only, str) else tuple(only)
    chosen = [case for case in ladder.cases if any(fnmatch(case.name, pattern) for pattern in patterns)]
    tried = [case for case in chosen if not any(fnmatch(case.name, pattern) for pattern in skip)]
    if not tried:
        hint = "" if chosen else hint_for_unmatched(mechanism, patterns, ladder)
        skipped = f", and skip {skip}" if skip else ""
        raise ValueError(f"only: expected a pattern that fits a case, got {only!r}{skipped}{hint}")
    return ladder, chosen, tried


@torch.inference_mode(False)  # the kit needs gradients, also inside a caller's inference mode
def kernel(
    mechanism: str,
    fn: Callable,
    *,
    device: str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    supports: Mapping | Callable[[Case], bool] | None = None,
    level: str = "quick",
    only: str | Sequence[str] | Case | None = None,
    skip: str | Sequence[str] = (),
    waive: Mapping[str, str] | None = None,
    fail_on_not_covered: bool = False,
    seed: int = 0,
    layout: str = "bthd",
    state: str = "kv",
    gate: str = "log",
    forward_only: bool = False,
    time_limit: float = SECONDS,
    races: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    journal: MutableMapping[str, list[Row]] | None = None,
) -> Report:
    """Run a kernel on the cases of its mechanism and hold every result against the float64 recurrence.

    Each case is called twice, as in inference (nothing requires a gradient), and with a second backward pass through
    the same graph; some cases in further ways, such as another call between the forward and the backward pass, or
    after a call in another dtype.

    The arguments say what is checked and what it claims (`mechanism` to `supports`), on which cases and what counts
    (`level` to `seed`), the kernel's convention (`layout` to `forward_only`), and how the check proceeds (`time_limit`
    to `journal`).

    Args:
        mechanism: a key of `gla_ref.check.MECHANISMS`.
        fn: `o, state = fn(q, k, v[, g][, beta], scale=, initial_state=, cu_seqlens=, g_v=)`, g_v for gla. What its
            signature lacks, a state that is None or not returned (the loss is then of o alone), and gradients that it
            does not give are reported as not covered, as are calls that raise :class:`NotClaimed`. It gets
            `output_final_state=True` if it names that.
        device: where the kernel runs. What it is held against is computed on the CPU, but for long attention.
        dtype: of q, k, v, g and beta: float32, bfloat16 or float16, or their short names fp32, bf16 and fp16. States
            are float32 (a cache has `dtype`). In a case each, g or beta is float32, the state float64, and g_v
            given; a kernel may refuse these by raising.
        supports: what the kernel claims, if that is less: {"K": (64, 128), "V": (64, 128), "multiples": {"T": 64},
            "dtypes": ("bf16",), "packed": False, "state": False, "gradient": False, "min_gate": -5.0}, or any of them,
            or a function that says of a :class:`Case` whether it is claimed. The cases are then made so that they
            are; what has no point under the claim is left out, and the report says how many were.
        level: "quick", or "full": also T up to 8192 (delta rules: 32768), K up to 256, V up to 512 (softmax attention:
            256), every gate in long and in packed sequences, a random search, and the smallest failing case as lines.
        only: a pattern like "gate*", or several; cases of other names are left out. Or one :class:`Case` to run.
        skip: a pattern, or several, of cases that are left out.
        waive: {quantity: reason}, or {"quantity@case pattern": reason}: failures of such a quantity do not count, but
            stay in the report, with the reason.
        fail_on_not_covered: whether the kernel counts as wrong where anything is not covered.
        seed: of the random inputs.
        layout: "bthd", or "bhtd" with heads before time in every token tensor.
        state: "kv", or "vk" for states `[N, H, V, K]`.
        gate: "log" (natural), "log2" or "alpha" (not a logarithm).
        forward_only: call it under `torch.no_grad` only, where it refuses inputs that need gradients, or refuses
            its backward pass; gradients are then not covered.
        time_limit: seconds a call may take, compilation included, before it counts as hanging.
        races: calls of one case that look for a rare race; 600 on a GPU and 8 on a CPU if not given.
        progress: called with (cases done, cases in all, name of the next).
        journal: {case: rows} of cases that were called in a process before; gets the rows of each case called here.
            After an error that the device does not survive, the rest needs a new process, as the command line has it.

    Returns:
        a :class:`Report`; `report.ok` is the verdict.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an option has a value that it cannot have, or the claim leaves nothing to test.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism: expected one of {sorted(MECHANISMS)}, got {mechanism!r}")
    claim, dtype = Claim.of(getattr(fn, "supports", None) if supports is None else supports), dtype_of(dtype)
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    if not 0 < time_limit < math.inf:
        raise ValueError(f"time_limit: expected seconds, more than 0, got {time_limit}")
    if races is not None and races < 0:
        raise ValueError(f"races: expected a number of calls, got {races}")
    how = Convention(layout, state, gate, forward_only or not claim.gradient)
    place = device_of(device)
    races = races if races is not None else 600 if place.type == "cuda" else 8
    subject = Kernel(fn, mechanism, how, place, time_limit, claim.dtypes, races)
    ladder, chosen, tried = selected(mechanism, claim, dtype, level, only, skip, seed)
    settings = {
        "mechanism": mechanism,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "level": level,
        "only": None if only is None else str(only),
        "seed": seed,
        **asdict(how),
        "defaults": subject.never_given,
        "supports": str(claim),
        "waive": dict(waive or {}),
        "fail_on_not_covered": fail_on_not_covered,
    }
    report = Report(
        settings,
        {case.name: case for case in tried},
        ladder=len(ladder.cases) + len(ladder.left),
        made=ladder.made,
        left=ladder.left,
        skipped=[case.name for case in chosen if case not in tried],
    )
    telling = tuple(case for case in ladder.cases if case.telling and case not in chosen)
    examiner = Examiner(subject, dtype, seed, claim, telling)
    examine(examiner, report, progress or (lambda *_: None), {} if journal is None else journal)
    return report
