"""The records of the programs in benchmarks/, written and read in one place (chapter 3).

The files lie in `benchmarks/results/` of a checkout. An installed wheel has none: `load` returns None.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = [
    "check_writable",
    "command",
    "environment",
    "file",
    "label",
    "load",
    "merge",
    "parts",
    "read",
    "select",
    "tritons",
    "write",
]

CHECKOUT = Path(__file__).resolve().parents[2]


def command(*line: str) -> str:
    """Return the output of a command; an empty string if the command does not exist."""
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
    """Return the environment that every measurement names: the GPU, the versions, the commit, the day.

    Args:
        gpu: the GPU's name; None for a measurement without a GPU.
        peers: names of other libraries that were measured.

    The variable `GLA_REF_COMMIT` overrides the commit, for a host that has the files without git.
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
    """Return the path of a file of records: `file("NVIDIA H200")`, `file("NVIDIA H200 check")`.

    The folder is `benchmarks/results` of the checkout; for an installed wheel, of the working directory.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    root = CHECKOUT if (CHECKOUT / "pyproject.toml").exists() else Path.cwd()
    return root / "benchmarks" / "results" / f"{slug}.json"


def check_writable(path: Path) -> None:
    """Make the folder of a file and write into the folder, so that hours of work do not end in an error.

    Raises:
        OSError: the folder is not writable; the message names the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part"):
            pass
    except OSError as reason:
        raise OSError(f"results: expected a place to write {path}, got {reason}; choose another one") from None


def write(path: Path, environment: dict, kind: str, records: Iterable[dict]) -> None:
    """Write records of one kind, one per line, at once: a reader finds the older file or the new one, never a part."""
    lines = ",\n".join("  " + json.dumps(r) for r in records)
    text = f'{{"environment": {json.dumps(environment, indent=1)},\n"{kind}": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _content(path: Path) -> object:
    """Contents of a JSON file.

    Raises:
        ValueError: the file is no JSON; the message names the file.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as reason:
        raise ValueError(f"results: expected JSON, got {reason}, in {path}; repair or remove it") from None


def _whole(path: Path, kind: str) -> dict:
    """The content of a file with records of one kind.

    Raises:
        ValueError: the file has no such records; the message names the file.
    """
    data = _content(path)
    if not isinstance(data, dict) or not {"environment", kind} <= data.keys():
        found = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"results: expected 'environment' and {kind!r} in {path}, got {found}; choose another file or remove it"
        )
    return data


def read(path: Path, kind: str) -> tuple[dict, ...]:
    """Return the records of a file; an empty list if there is no file.

    Raises:
        ValueError: the file is corrupt, or has other records; the message names the file.
    """
    return tuple(_whole(path, kind)[kind]) if path.exists() else ()


def merge(
    path: Path,
    environment: dict,
    kind: str,
    records: Iterable[dict],
    key: Sequence[str],
    update: Callable[[dict, dict], dict] = lambda old, new: new,
) -> None:
    """Write records into a file; each replaces the older record with the same values of `key`.

    All other records stay, and so do the versions of peers that are not installed now. `update` makes a record from the
    older one ({} if there is none) and the newer one. Several processes may merge at once: a lock lets them read and
    write the file one after another.

    Raises:
        ValueError: the file is corrupt, or has other records; the message names the file, which stays unchanged.
    """
    from filelock import FileLock  # PyTorch requires it too

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        before = _whole(path, kind) if path.exists() else {"environment": {}, kind: []}
        if "peers" in environment:
            kept = before["environment"].get("peers", {})
            peers = {name: v or kept.get(name) for name, v in environment["peers"].items()}
            environment = environment | {"peers": peers}

        def identity(r: dict) -> str:
            return json.dumps([r.get(name) or None for name in key])  # older records lack some fields

        every = {identity(r): r for r in before[kind]}
        for r in records:
            every[identity(r)] = update(every.get(identity(r), {}), r)
        write(path, environment, kind, every.values())


def load(gpu: str | None = None, folder: str | None = None, kind: str = "records") -> dict | None:
    """The measurements of one GPU: `{"environment": {...}, kind: [{...}, ...]}`.

    Args:
        gpu: a part of the GPU's name, such as "h200", or "cpu"; None takes the first file by name.
        folder: where the files are; None looks in the checkout of this package, then in the working
            directory and the directories above it.
        kind: "records" of run.py, "checks" of check_peers.py, "scaling" of scaling.py,
            "museum" of `python -m gla_ref check --museum`; of :mod:`gla_ref.experiments` the experiment's name;
            "waits", "trainings", "first", "throughput", "steps", "parts", "models", "length", "alarms" and "trials",
            whose environment names their program and its commit. docs/status.md lists all.

    Returns:
        The content of the file, or None if there is no such file.

    Raises:
        ValueError: one of the files is no JSON; the message names it.
    """
    here = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    folders = [Path(folder)] if folder else [up / "benchmarks" / "results" for up in here]
    for path in (path for each in folders for path in sorted(each.glob("*.json"))):
        data = _content(path)
        if not isinstance(data, dict) or not {"environment", kind} <= data.keys():
            continue  # records of another kind, or the summary of a test run
        if (gpu or "").lower() in (data["environment"]["gpu"] or "cpu").lower():
            return data
    return None


def select(data: dict, **wanted) -> list[dict]:
    """Return the timed and correct records with these values: `select(data, suite="flash", K=64)`."""
    return [
        r for r in data["records"] if r["ms"] is not None and r["correct"] and all(r[n] == x for n, x in wanted.items())
    ]


def parts(data: dict | None, **wanted) -> dict[str, dict]:
    """Return the records of "parts" with these values, by the part that was removed: `parts(data, B=8)`.

    Returns:
        {"nothing": the whole kernel's record, ...} in the order of the program; {} if there are no measurements.
    """
    found = [r for r in (data["parts"] if data else ()) if all(r[n] == x for n, x in wanted.items())]
    return {r["taken"]: r for r in found}


def tritons(data: dict) -> set[str]:
    """Return the versions of Triton behind a file's measurements on a GPU; records may name their own version."""
    e = data.get("environment", data)
    if e["gpu"] in (None, "CPU"):
        return set()
    named = {r["triton"] for kind in ("versions", "records", "scaling") for r in data.get(kind, ()) if "triton" in r}
    return named or {e["triton"]}


def label(data: dict, **wanted) -> str:
    """Return the label of a figure with measurements: the GPU and the versions, of the records with these values."""
    e = data["environment"]
    kept = [r for r in data.get("records", ()) if all(r[n] == x for n, x in wanted.items())]
    tritons = sorted({r.get("triton", e["triton"]) for r in kept} or {e["triton"]})
    return f"{e['gpu']}, PyTorch {e['torch'].split('+')[0]}, Triton {' and '.join(tritons)}"
