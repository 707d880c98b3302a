"""What the programs in benchmarks/ measured, written and read in one place (chapter 3).

The files lie in `benchmarks/results/` of a checkout. An installed wheel has none: `load` returns None.
"""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["command", "environment", "file", "label", "load", "merge", "select", "write"]

CHECKOUT = Path(__file__).resolve().parents[2]


def command(*line: str) -> str:
    """What a command prints; nothing where there is no such command."""
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(gpu: str | None, peers: Iterable[str] | None = None) -> dict:
    """What every measurement names: the GPU, the versions, the commit, the day.

    Args:
        gpu: its name; None where none was used.
        peers: names of packages that were measured beside ours.

    The commit is `GLA_REF_COMMIT` where that is set, as on a host that has the files alone.
    """
    driver = "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
    head = "git", "-C", str(CHECKOUT), "rev-parse", "--verify", "HEAD"
    return {
        "gpu": gpu,
        **({"driver": command(*driver)} if gpu else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        **({} if peers is None else {"peers": {name: _installed(name) for name in peers}}),
        "commit": os.environ.get("GLA_REF_COMMIT") or command(*head),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def file(name: str) -> Path:
    """Where the measurements of this name lie: `file("NVIDIA H200")`, `file("NVIDIA H200 check")`."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return CHECKOUT / "benchmarks" / "results" / f"{slug}.json"


def write(path: Path, environment: dict, kind: str, records: Iterable[dict]) -> None:
    """A file of records of one kind, a line each."""
    lines = ",\n".join("  " + json.dumps(r) for r in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"environment": {json.dumps(environment, indent=1)},\n"{kind}": [\n{lines}\n]}}\n')


def merge(
    path: Path,
    environment: dict,
    kind: str,
    records: Iterable[dict],
    key: Sequence[str],
    update: Callable[[dict, dict], dict] = lambda old, new: new,
) -> None:
    """Write records into a file, each in the place of the older one with the same values of `key`.

    The other records stay, and so do the versions of peers that are not installed now. `update` makes a record of the
    older one ({} where there is none) and the newer one.
    """
    before = json.loads(path.read_text()) if path.exists() else {"environment": {}, kind: []}
    if "peers" in environment:
        kept = before["environment"].get("peers", {})
        peers = {name: v or kept.get(name) for name, v in environment["peers"].items()}
        environment = environment | {"peers": peers}

    def identity(r: dict) -> str:
        return json.dumps([r.get(name) or None for name in key])  # older records lack some

    every = {identity(r): r for r in before[kind]}
    for r in records:
        every[identity(r)] = update(every.get(identity(r), {}), r)
    write(path, environment, kind, every.values())


def load(gpu: str | None = None, folder: str | None = None, kind: str = "records") -> dict | None:
    """The measurements of one GPU: `{"environment": {...}, kind: [{...}, ...]}`.

    Args:
        gpu: a part of the GPU's name, such as "h200"; None takes the first file by name.
        folder: where the files are; None looks in the checkout of this package, then in the working
            directory and the directories above it.
        kind: "records" of run.py, "steps" of chunk_fuse.py, "checks" of check_peers.py or "scaling" of
            scaling.py; of :mod:`gla_ref.experiments` the experiment's name.

    Returns:
        The content of the file, or None where there is none.
    """
    here = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    folders = [Path(folder)] if folder else [up / "benchmarks" / "results" for up in here]
    for path in (path for each in folders for path in sorted(each.glob("*.json"))):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or not {"environment", kind} <= data.keys():
            continue  # of another kind, or the summary of a test run
        if (gpu or "").lower() in (data["environment"]["gpu"] or "").lower():
            return data
    return None


def select(data: dict, **wanted) -> list[dict]:
    """The records that were timed and found correct, with these values: `select(data, suite="flash", K=64)`."""
    return [
        r for r in data["records"] if r["ms"] is not None and r["correct"] and all(r[n] == x for n, x in wanted.items())
    ]


def label(data: dict) -> str:
    """What every figure of a measurement names: the GPU and the versions."""
    e = data["environment"]
    return f"{e['gpu']}, PyTorch {e['torch'].split('+')[0]}, Triton {e['triton']}"
