"""The smallest case on which a kernel still fails, and the lines that show it (appendix "Check your kernel")."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace

import torch

from ._cases import MILD, Case

PLAIN = (
    ("strides", "contiguous"),
    ("other", ""),
    ("size", 1.0),
    ("loud", None),
    ("pull", 1.0),
    ("floor", None),
    ("scale", None),
    ("strength", 1.0),
    ("beta", None),
    ("alike", 0.0),
    ("keys", 1.0),
    ("found", False),
    ("groups", 1),
    ("ends", None),
    ("index", "int32"),
    ("frozen", False),
    ("loss", "both"),
    ("reads", None),
    ("zeros", False),
    ("past", 9),
    ("state", False),
)
INSIDE = "GLA_REF_CHECK_ALONE"  # set in a process that runs one case by itself: it starts no others
GATES = ("zero", "-1", MILD)  # from the plainest on


def less(case: Case, name: str, part: int) -> Case:
    """A size smaller by one in `part` (at least by 1), packed sequences cut off at T."""
    size = getattr(case, name)
    size = max(1, size - max(1, size // part))
    ends = case.ends
    if name == "T" and ends:
        ends = tuple(min(end, size) for end in ends)
    return replace(case, **{name: size, "ends": ends})


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Halve T, B, H, K and V while it fails, make the rest plain, then take single steps; until nothing helps."""
    steps = [lambda c, n=n: less(c, n, 2) for n in "TBHKV"]
    steps += [lambda c, n=n, value=value: replace(c, **{n: value}) for n, value in PLAIN]
    for i, gate in enumerate(GATES):
        plainer = GATES[:i]
        steps.append(lambda c, g=gate, p=plainer: c if c.gate in p else replace(c, gate=g))
    steps += [lambda c, n=n, part=part: less(c, n, part) for n in "TBHKV" for part in (8, 10**9)]
    case, before = replace(case, name="smallest", telling=False), None
    while case != before:
        before = case
        for step in steps:
            while (smaller := step(case)) != case and fails(smaller):
                case = smaller
    return case


def imported(fn: Callable) -> str:
    """The line that imports fn in another process, and under which name; empty where none does."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return ""
    names = (name for name, x in vars(module).items() if x is fn)
    return next((f"from {module.__name__} import {name}" for name in names), "")


def reproduction(mechanism: str, fn: Callable, case: Case, dtype: torch.dtype, **options) -> str:
    """Lines of Python that run that case, and as a comment whence fn comes if it cannot be imported."""
    source = imported(fn)
    name, source = (source.split()[-1], source) if source else ("fn", "# fn: the function that was checked")
    named = "".join(f", {n}={value!r}" for n, value in options.items())
    lines = [
        "import torch",
        "from gla_ref import check",
        source,
        f"case = check.{case}",
        f"print(check.kernel({mechanism!r}, {name}, dtype={dtype}, only=case{named}))",
    ]
    whole = (re.sub("'[^']*'", lambda m: m[0].replace(" ", "\0"), line) for line in lines)
    wrapper = textwrap.TextWrapper(76, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrapper.fill(line) for line in whole).replace("\0", " ")


def right_alone(lines: str, seconds: float) -> bool:
    """Whether a fresh Python process, which these lines of a reproduction run in, calls the kernel right."""
    path = os.pathsep.join(x or os.getcwd() for x in sys.path)
    options = {
        "env": os.environ | {"PYTHONPATH": path, INSIDE: "1"},
        "capture_output": True,
        "text": True,
        "timeout": seconds,
    }
    try:
        said = subprocess.run([sys.executable, "-c", lines], **options, check=False).stdout
    except subprocess.TimeoutExpired:
        return False
    return ": right" in said.partition("\n")[0]
