"""The versions of Triton that the project knows, and the work done with each (chapter 12).

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
        place: "oldest" that Gluon kernels run on, "pinned" in requirements.txt, or "newest".
        measured: whether records of a GPU were made with it; with the others kernels were compiled only.
    """

    version: str
    place: str
    measured: bool

    def __str__(self) -> str:
        return f"{self.version} ({self.place}, {'with records of a GPU' if self.measured else 'compiled only'})"


KNOWN = (Known("3.6.0", "oldest", True), Known("3.7.1", "pinned", False), Known("3.9.0", "newest", False))
MEASURED = tuple(known.version for known in KNOWN if known.measured)


@functools.cache
def release() -> tuple[int, int]:
    """Major and minor number of the Triton that is imported."""
    import triton  # plans can be made, and this table read, without it

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def standing(version: str) -> str:
    """One sentence about a version of Triton: measured, compiled only, or unknown."""
    known = next((known for known in KNOWN if known.version == version.partition("+")[0]), None)
    if known is None:
        return f"Triton {version} is unknown to this project: its records of a GPU are from {' and '.join(MEASURED)}."
    if known.measured:
        return f"Triton {version} is a version that records of a GPU were made with."
    return f"With Triton {version} kernels were compiled only: records of a GPU are from {' and '.join(MEASURED)}."
