"""Run the notebooks as Colab does: the built wheel, Jupyter, matplotlib and nothing else.

    python tools/run_notebooks_clean.py [NN_slug ...] [--python python3.12] [--dir DIR] [--jobs N] [--record]

Makes a virtual environment in DIR (default: a temporary one; about 2 GB), installs the wheel of the
checkout into it, and executes the committed notebooks top to bottom outside the checkout. Triton
comes with it, as on Colab; the kernels run on the GPU, or are interpreted where there is none.
--record writes benchmarks/results/notebooks-<gpu or cpu>.json, which the book's status page shows.

A GPU host without a network brings its own PyTorch and Triton; what it lacks comes in a folder and is installed whole:

    pip wheel --no-deps --wheel-dir build/wheels .
    pip download --only-binary=:all: --python-version 3.12 --dest build/wheels nbclient ipykernel
    python tools/run_notebooks_clean.py --offline build/wheels --record     # there
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: the wheel's dependencies are loose; take the versions that the book was tested with
PACKAGES = ["matplotlib", "nbclient", "ipykernel"]
if sys.platform == "linux":
    PACKAGES.append("triton")
RUN = """
import json, sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print(json.dumps(sum(cell.cell_type == "code" for cell in notebook.cells)))
"""
DESCRIBE = """
import json, torch
from gla_ref import results
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps(results.environment(gpu)))
"""


def run(*command: str | Path, **options) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)


def packages_of(python: str | Path) -> Path:
    """Where that Python has its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return Path(said.strip())


def install(python: Path, work: Path, offline: Path | None) -> Path:
    """Install the wheel and what notebooks need into the environment of `python`; returns the wheel."""
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if offline:
        (wheel,) = offline.glob("gla_ref-*.whl")
        run(*pip, "install", "--no-index", "--no-deps", *offline.glob("*.whl"))
    else:
        copy = work / "source"  # building in the checkout would leave files there
        shutil.rmtree(copy, ignore_errors=True)
        wanted = shutil.ignore_patterns(".*", "_build", "*.egg-info", "__pycache__", "build")
        shutil.copytree(ROOT, copy, ignore=wanted)
        shutil.rmtree(work / "wheel", ignore_errors=True)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", work / "wheel", copy)
        (wheel,) = (work / "wheel").glob("gla_ref-*.whl")
        run(*pip, "install", wheel, *PACKAGES, "--constraint", ROOT / "requirements.txt")
        run(*pip, "install", "--force-reinstall", "--no-deps", wheel)
    return wheel


def write_record(environment: dict, notebooks: dict[str, dict]) -> Path:
    """What ran, where and how long, for the status page."""
    name = re.sub(r"\W+", "-", environment["gpu"] or "cpu").lower()
    path = ROOT / "benchmarks" / "results" / f"notebooks-{name}.json"
    path.write_text(json.dumps({"environment": environment, "notebooks": notebooks}, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb (default: all)")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="notebooks side by side")
    parser.add_argument("--offline", type=Path, help="a folder of wheels; torch is the host's own")
    parser.add_argument("--record", action="store_true", help="keep seconds, cells and versions")
    args = parser.parse_args()
    work = args.dir or Path(tempfile.mkdtemp(prefix="gla-clean-"))
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        run(args.python, "-m", "venv", work / "venv")
        if args.offline:  # the host's packages follow its own, also where the host's Python is an environment itself
            host, own = (packages_of(p) for p in (args.python, python))
            (own / "host.pth").write_text(f"{host}\n")
    wheel = install(python, work, args.offline)

    names = args.names or [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    left_out = ("PYTHONPATH", "TRITON_INTERPRET")  # notebooks find out by themselves
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    notebooks, failed = {}, []

    def execute(name: str) -> tuple[subprocess.CompletedProcess, float]:
        start = time.perf_counter()
        command = [python, "-c", RUN, ROOT / "notebooks" / f"{name}.ipynb"]
        result = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
        return result, time.perf_counter() - start

    with ThreadPoolExecutor(args.jobs) as pool:
        for name, (result, seconds) in zip(names, pool.map(execute, names), strict=True):
            print(f"{name:32} {'failed' if result.returncode else 'ok':8} {seconds:5.1f} s", flush=True)
            if result.returncode:
                failed.append(name)
                print(result.stderr[-3000:])
            else:
                cells = json.loads(result.stdout.splitlines()[-1])
                notebooks[name] = {"seconds": round(seconds, 1), "cells": cells}
    print(f"{len(names) - len(failed)} of {len(names)} notebooks run with only {wheel.name}")
    if args.record and not failed:
        if "GLA_REF_COMMIT" not in env:  # a wheel knows none
            head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
            env["GLA_REF_COMMIT"] = head.stdout.strip()
        described = subprocess.run([python, "-c", DESCRIBE], env=env, check=True, stdout=-1).stdout
        print(f"The record: {write_record(json.loads(described), notebooks)}")
    if not args.dir:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
