"""One case by itself: the lines that run it, and a new process that does (appendix "Check your kernel")."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable

import torch

from ._cases import Case

INSIDE = "GLA_REF_CHECK_ALONE"  # set in a process that runs one case by itself: it starts no others


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
