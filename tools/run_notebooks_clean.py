"""Run the notebooks as Colab does: the built wheel, Jupyter, matplotlib and nothing else.

    python tools/run_notebooks_clean.py [NN_slug ...] [--python python3.12] [--dir DIR]

Makes a virtual environment in DIR (default: a temporary one; about 2 GB), installs the wheel of the
checkout into it, and executes the committed notebooks top to bottom outside the checkout. Triton
comes with it, as on Colab; where there is no GPU it interprets (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: the wheel's dependencies are loose; take the versions that the book was tested with
PACKAGES = ["matplotlib", "nbclient", "ipykernel"]
if sys.platform == "linux":
    PACKAGES.append("triton")
RUN = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
"""


def run(*command: str | Path, **options) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb (default: all)")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    work = args.dir or Path(tempfile.mkdtemp(prefix="gla-clean-"))
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        run(args.python, "-m", "venv", work / "venv")
    source = work / "source"  # building in the checkout would leave files there
    shutil.rmtree(source, ignore_errors=True)
    wanted = shutil.ignore_patterns(".*", "_build", "*.egg-info", "__pycache__", "build")
    shutil.copytree(ROOT, source, ignore=wanted)
    shutil.rmtree(work / "wheel", ignore_errors=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", work / "wheel", source)
    (wheel,) = (work / "wheel").glob("gla_ref-*.whl")
    run(*pip, "install", wheel, *PACKAGES, "--constraint", ROOT / "requirements.txt")
    run(*pip, "install", "--force-reinstall", "--no-deps", wheel)

    names = args.names or [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not shutil.which("nvidia-smi"):
        env.setdefault("TRITON_INTERPRET", "1")
    failed = []
    for name in names:
        start = time.perf_counter()
        notebook = ROOT / "notebooks" / f"{name}.ipynb"
        result = subprocess.run(
            [python, "-c", RUN, notebook], cwd=work, env=env, capture_output=True, text=True
        )
        seconds = time.perf_counter() - start
        print(f"{name:32} {'failed' if result.returncode else 'ok':8} {seconds:5.1f} s", flush=True)
        if result.returncode:
            failed.append(name)
            print(result.stderr[-3000:])
    print(f"{len(names) - len(failed)} of {len(names)} notebooks run with only {wheel.name}")
    if not args.dir:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
