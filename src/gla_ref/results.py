"""Read what the programs in benchmarks/ measured, for the figures of the book (chapter 3).

The files lie in `benchmarks/results/` of a checkout. An installed wheel has none: `load` returns None.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["label", "load", "select"]


def load(gpu: str | None = None, folder: str | None = None, kind: str = "records") -> dict | None:
    """The measurements of one GPU: `{"environment": {...}, kind: [{...}, ...]}`.

    Args:
        gpu: a part of the GPU's name, such as "h200"; None takes the first file by name.
        folder: where the files are; None looks in the checkout of this package, then in the working
            directory and the directories above it.
        kind: "records" of run.py, "steps" of chunk_fuse.py or "checks" of check_peers.py.

    Returns:
        The content of the file, or None where there is none.
    """
    here = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    folders = [Path(folder)] if folder else [up / "benchmarks" / "results" for up in here]
    for path in (path for each in folders for path in sorted(each.glob("*.json"))):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or not {"environment", kind} <= data.keys():
            continue  # of another kind, or the summary of a test run
        if (gpu or "").lower() in data["environment"]["gpu"].lower():
            return data
    return None


def select(data: dict, **wanted) -> list[dict]:
    """The records that were timed and found correct, with these values: `select(data, suite="flash", K=64)`."""
    return [
        r
        for r in data["records"]
        if r["ms"] is not None and r["correct"] and all(r[n] == x for n, x in wanted.items())
    ]


def label(data: dict) -> str:
    """What every figure of a measurement names: the GPU and the versions."""
    e = data["environment"]
    return f"{e['gpu']}, PyTorch {e['torch'].split('+')[0]}, Triton {e['triton']}"
