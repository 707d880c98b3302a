"""The versions of Triton that the project knows, and the work done with each (chapter 14).

This table is the only list of them: `tools/compile_kernels.py` compiles with these versions, `python -m gla_ref doctor`
compares the installed one with them. An installed wheel has no `benchmarks/results`, so the table says which versions
measured something; a test compares it with the records.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Known(NamedTuple):
    """A version of Triton.

    Attributes:
        version: its number.
        measured: whether records of a GPU were made with it; otherwise kernels were only compiled.
    """

    version: str
    measured: bool

    def __str__(self) -> str:
        return f"{self.version} ({'with records of a GPU' if self.measured else 'compiled only'})"


# from the first that runs Gluon kernels to the one that requirements.txt pins
KNOWN = Known("3.6.0", True), Known("3.7.1", False), Known("3.9.0", True)
PINNED = KNOWN[-1].version
REQUIRED = "3.5"  # the oldest that pyproject.toml allows
# the first version of PyTorch that depends on a Triton new enough
FIRST_TORCH = "2.9"
# an interpreter of a Triton older than INTERPRETER does not run with this or a newer NumPy
INTERPRETER, NUMPY = "3.7", "2.4"
MEASURED = tuple(known.version for known in KNOWN if known.measured)


@functools.cache
def release() -> tuple[int, int]:
    """Major and minor number of the Triton that is imported."""
    import triton  # plans can be made, and this table read, without it

    return numbers(triton.__version__)


def standing(version: str) -> str:
    """One sentence about a version of Triton: measured, compiled only, or unknown."""
    known = next((known for known in KNOWN if known.version == version.partition("+")[0]), None)
    if known is None:
        return f"Triton {version} is unknown to this project: its records of a GPU are from {' and '.join(MEASURED)}."
    if known.measured:
        return f"Triton {version} is a version that records of a GPU were made with."
    return f"With Triton {version} kernels were compiled only: records of a GPU are from {' and '.join(MEASURED)}."


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version, to compare it with another."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def too_old(version: str) -> str | None:
    """The reason that no kernel runs with this Triton, and a remedy; None if kernels run."""
    if numbers(version) >= numbers(REQUIRED):
        return None
    return (
        f"the kernels need Triton {REQUIRED} or newer, got {version}: "
        f"pip install 'torch>={FIRST_TORCH}', which brings its own Triton"
    )


def not_interpreted(version: str, numpy: str) -> str | None:
    """The reason that this Triton cannot interpret kernels with this NumPy, and a remedy; None if it can."""
    if numbers(version) >= numbers(INTERPRETER) or numbers(numpy) < numbers(NUMPY):
        return None
    return (
        f"Triton {version} cannot interpret kernels with NumPy {numpy}: "
        f"pip install 'numpy<{NUMPY}', or Triton {INTERPRETER} or newer"
    )
