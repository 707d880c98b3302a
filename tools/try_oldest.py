"""Try the oldest versions that pyproject.toml allows: what runs, what is refused, and with which sentence.

    python tools/try_oldest.py --keep build/oldest   # installs some GB, runs each step, prints a table
    python tools/try_oldest.py --record    # also writes benchmarks/results/oldest-versions.json

The environment is new: `pip install .` beside the oldest PyTorch, which brings its own Triton. Then the oldest Triton
takes its place, and then an older NumPy. A step is a program of its own there. It runs if it exits with 0; otherwise
the last line of its error is the sentence that a reader gets.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tabulate import tabulate

from gla_ref import results
from gla_ref.kernels.launch.versions import NUMPY

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "oldest-versions.json"
LIMIT = 1800  # seconds that a step may take


def bound(package: str) -> str:
    """The oldest version of torch or triton that pyproject.toml allows, such as "2.6"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    (found,) = {m[1] for line in lines if (m := re.fullmatch(rf"{package}>=([\d.]+)(;.*)?", line))}
    return found


def changes() -> list[list[str]]:
    """Packages that are installed before each round of steps, without what they depend on."""
    return [[], [f"triton=={bound('triton')}.0"], [f"numpy<{NUMPY}"]]


def readme() -> str:
    """The README's example."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


EXPLAIN = """
import torch
from gla_ref.kernels import explain
q, k, v, g = torch.empty(4, 2, 256, 4, 64, dtype=torch.float16, device="meta")
for hardware in ("sm_75", "sm_80", "sm_90"):
    print(explain("gla", q, k, v, g, hardware=hardware))
"""
# every mechanism that has a kernel, against the recurrence, with gradients
INTERPRETED = """
import torch
from gla_ref import FORMS, check
from gla_ref.kernels import find_device
find_device()
case = check.Case("oldest", B=1, T=100, H=2, K=16, V=16)
for mechanism, forms in FORMS.items():
    if "triton" in forms:
        report = check.kernel(mechanism, forms["triton"], device="cpu", dtype=torch.float32, only=case)
        wrong = [row for row in report.rows if row.status == "failed"]
        if wrong:
            raise SystemExit(f"{mechanism}, {wrong[0].quantity}: {wrong[0].message or wrong[0].status}")
"""
# one case for each kind of kernel; the tool fails if one is refused, spills too much or breaks a rule of pipelining
COMPILED = (
    "softmax_attention 64 float16", "linear_attention 64 float16", "simple_gla 64 float16", "gla 64 float16",
    "delta_rule 64 float16", "gated_delta_rule 64 float16", "gla_step 64 float16",
)  # fmt: skip
STEPS = {
    "`import gla_ref`": ("-c", "import gla_ref"),
    "the README's example": ("-c", readme()),
    "references in the check kit": ("-m", "gla_ref", "check", "gla", "gla_ref.gla:chunkwise_two_level"),
    "`python -m gla_ref doctor`": ("-m", "gla_ref", "doctor"),
    "plans of kernels for three classes of GPU": ("-c", EXPLAIN),
    "the four kernels, interpreted": ("-m", "gla_ref", "run", "--T", "40", "--H", "1", "--K", "5", "--V", "3"),
    "all kernels, interpreted": ("-c", INTERPRETED),
    "kernels compiled for sm_75, sm_80 and sm_90": (
        str(ROOT / "tools" / "compile_kernels.py"), *COMPILED, "--jobs", "1", "--arch", "75", "80", "90"
    ),
}  # fmt: skip


def install(folder: Path) -> Path:
    """Make the environment, with the package in it; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip(python, str(ROOT), f"torch=={bound('torch')}.0")
    return python


def pip(python: Path, *packages: str) -> None:
    """Install packages there."""
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)


def versions(python: Path) -> dict[str, str]:
    """Versions of the packages that decide."""
    names = "torch", "triton", "numpy"
    code = f"from importlib.metadata import version\nprint(*map(version, {names}))"
    return dict(zip(names, said((str(python), "-c", code))[1].split(), strict=True))


def said(command: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and last line of a program: of its error if it failed, otherwise of its output."""
    kept = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    with tempfile.TemporaryDirectory() as elsewhere:  # a checkout would be imported before the installed package
        try:
            done = subprocess.run(command, cwd=elsewhere, env=kept, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return 124, f"no end in {LIMIT} s"
    lines = ((done.stderr or done.stdout) if done.returncode else done.stdout).strip().split("\n")
    return done.returncode, lines[-1]


def try_steps(python: Path) -> list[dict]:
    """A row for each of STEPS."""
    rows, which = [], versions(python)
    print(", ".join(f"{name} {version}" for name, version in which.items()), flush=True)
    for step, command in STEPS.items():
        status, line = said((str(python), *command))
        rows.append(which | {"step": step, "runs": status == 0, "said": line if status else ""})
        print(f"  {step}: {'runs' if status == 0 else line}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="a folder for the environment, which stays; none: it is removed")
    parser.add_argument("--record", action="store_true", help="write the record that tests/test_versions.py reads")
    args = parser.parse_args()
    folder, rows = args.keep or Path(tempfile.mkdtemp()), []
    try:
        python = install(folder)
        for packages in changes():
            if packages:
                pip(python, "--no-deps", *packages)
            rows += try_steps(python)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(tabulate([[r["torch"], r["triton"], r["numpy"], r["step"], r["said"] or "runs"] for r in rows]))
    if args.record:
        results.write(RECORD, results.environment(None), "oldest", rows)


if __name__ == "__main__":
    main()
