"""Compile with versions of Triton that are not installed: fetch each, run tools/compile_kernels.py with it, record.

A version's wheel is unpacked in `_build/triton/VERSION`, once. A process can load one Triton only, so every version
gets a process of its own, which looks into that folder first.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path

from gla_ref import results
from gla_ref.kernels.launch.versions import KNOWN, PINNED

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "_build" / "triton"
VERSIONS = [known.version for known in KNOWN]
OTHERS = [version for version in VERSIONS if version != PINNED]  # `make compile` has the pin


def version(text: str) -> str:
    """A version of Triton that an option names."""
    if not re.fullmatch(r"\d+(\.\d+)+", text):
        raise argparse.ArgumentTypeError(f"expected a version such as {VERSIONS[-1]}, got {text}")
    return text


def folder(version: str) -> Path | None:
    """A folder with this version of Triton, fetched if it is not there yet; None for the installed version."""
    if version == installed("triton"):
        return None
    place = CACHE / version
    if not place.exists():
        print(f"Fetching Triton {version} into {place.relative_to(ROOT)} (once)", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=CACHE, suffix=".part"))  # an interrupted fetch must not look like a version
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part)]
        try:
            subprocess.run([*pip, f"triton=={version}"], check=True)
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return place


def assembler(path: str | Path) -> str | None:
    """The version of an assembler, such as "12.8.93"; None where there is none."""
    found = re.search(r"V([\d.]+)", results.command(str(path), "--version"))
    return found and found[1]


def assemblers(file: str) -> dict[str, str | None]:
    """Both assemblers in Triton's package, of which `file` is a module."""
    programs = Path(file).parent / "backends" / "nvidia" / "bin"
    return {name.replace("-", "_"): assembler(programs / name) for name in ("ptxas", "ptxas-blackwell")}


def compile_with(versions: list[str], options: list[str], record: Path | None) -> str | int:
    """Run compile_kernels.py with each version; 0, or the versions with which something was wrong.

    Args:
        versions: of Triton; none: OTHERS.
        options: of compile_kernels.py.
        record: a file for the summary of each version, where it takes the place of an older one.
    """
    wrong = []
    for version in versions or OTHERS:
        print(f"-- Triton {version}", flush=True)
        place = folder(version)
        path = [str(place)] * (place is not None) + [x for x in [os.environ.get("PYTHONPATH")] if x]
        with tempfile.TemporaryDirectory() as there:
            summary = Path(there, "summary.json")
            extra = ["--summary", str(summary)] if record else []
            command = [sys.executable, str(ROOT / "tools" / "compile_kernels.py"), *options, *extra]
            done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
            if done.returncode:
                wrong.append(version)
            if summary.exists():
                add(record, json.loads(summary.read_text()))
    return f"Triton {', '.join(wrong)}: see above" if wrong else 0


def add(record: Path, summary: dict) -> None:
    """Put one version's summary, with its commit and day, into the record."""
    environment = results.environment(None)
    row = summary | {name: environment[name] for name in ("commit", "date")}
    results.merge(record, environment, "versions", [row], key=("triton", "arch", "launches"))
