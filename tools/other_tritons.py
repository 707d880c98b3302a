"""Compile with versions of Triton that are not installed: fetch each, run tools/compile_kernels.py with it.

A version's wheel is unpacked in `_build/triton/VERSION`, once. A process can load one Triton only, so every version
gets a process of its own, which looks into that folder first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path

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


def compile_with(versions: list[str], options: list[str]) -> str | int:
    """Run compile_kernels.py with each version (none: OTHERS); 0, or the versions with which something was wrong."""
    wrong = []
    for version in versions or OTHERS:
        print(f"-- Triton {version}", flush=True)
        place = folder(version)
        path = [str(place)] * (place is not None) + [x for x in [os.environ.get("PYTHONPATH")] if x]
        command = [sys.executable, str(ROOT / "tools" / "compile_kernels.py"), *options]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
        wrong += [version] * (done.returncode != 0)
    return f"Triton {', '.join(wrong)}: see above" if wrong else 0
