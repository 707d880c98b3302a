"""Repeat GLA's Hopper gradient in many processes, with the fence of chapter 22 and without: which bits differ?

    python benchmarks/late_reads.py [--seconds 30] [--processes 8] [--others 7] [--out FILE]

Chapter 22 tells of a number that was read too late. Every second process runs a copy of the package whose gradient has
no fence between reading `net` and freeing its place; the others run the package. All repeat the same calls
(K = V = 128, four kinds of gates) and compare each result, bit by bit, with the one that the package gave while nothing
else ran. Seven others run tests of kernels at the same time, as in the run that showed the fault: without these the
copy made no mistake (lab/hopper.md). The program runs in the host's own Python, with pytest and
pytest-xdist, and needs a Hopper GPU.

Writes results/<gpu>-late-reads.json, a record for the package and one for the copy: its processes, calls and wrong
calls, of the wrong calls the gradients that differed and the rows (tokens) in which they did, and how many others
ran tests and how many tests passed there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT.parent / "src"
KERNEL = "kernels/hopper/gla_backward.py"
FENCE = "        fence_async_shared()  # `net` has been read before the copy engine writes there\n"
GATES = ("logsigmoid/16", "zero", "-2", "1 % at -1e3")
SHAPE = (2, 200, 3, 128, 128)  # B, T, H, K, V
TESTS = [*map(str, sorted((ROOT.parent / "tests").glob("test_kernels*.py"))), "-m", "gpu and not alone"]
PATIENCE = 240  # seconds until the first of these tests has passed


def without_fence(folder: Path) -> Path:
    """Copy the package into a folder, without the fence; return the folder that Python finds it in."""
    shutil.copytree(SOURCE / "gla_ref", folder / "gla_ref", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "gla_ref" / KERNEL
    before, after = path.read_text().split(FENCE)
    path.write_text(before + after)
    return folder


def gradients(gates: str, form: str, device: str):
    """A call and all its gradients by name, as a function without arguments."""
    import torch
    from suites import Case, inputs

    from gla_ref import FORMS

    x = inputs(Case("gla", *SHAPE, gates=gates), 0, device)
    leaves = {n: x[n].detach().requires_grad_() for n in "qkvg"}

    def call() -> dict[str, torch.Tensor]:
        o, _ = FORMS["gla"][form](*leaves.values())
        made = torch.autograd.grad(o, list(leaves.values()), x["do"])
        return {f"d{n}": y for n, y in zip(leaves, made, strict=True)}

    return call


def repeat(args: argparse.Namespace) -> None:
    """Repeat the calls until the time is over; print how many there were, and which were wrong where."""
    import torch

    import gla_ref

    fence = FENCE in (Path(gla_ref.__file__).parent / KERNEL).read_text()
    right, calls, wrong, names, rows = torch.load(args.expected), 0, 0, Counter(), Counter()
    every = {gates: gradients(gates, args.form, args.device) for gates in GATES}
    late = False
    while not late:
        for gates, call in every.items():
            made = call()
            other = {n: y != right[gates][n].to(y.device) for n, y in made.items()}
            other = {n: y for n, y in other.items() if y.any()}
            calls, wrong = calls + 1, wrong + bool(other)
            names.update(list(other))
            for y in other.values():
                rows.update(y.any(-1).any(-1).any(0).nonzero().flatten().tolist())
        late = time.time() >= args.until
    print(json.dumps({"fence": fence, "calls": calls, "wrong": wrong, "gradients": names, "rows": rows}))


def start(source: Path, expected: Path, args: argparse.Namespace) -> subprocess.Popen:
    """Start a process with the package of a folder."""
    command = [sys.executable, __file__, "--expected", str(expected), "--until", str(time.time() + args.seconds)]
    command += ["--form", args.form, "--device", args.device]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def counted(processes: list[subprocess.Popen]) -> dict:
    """Sum up what the processes with the fence, or those without, have printed.

    Raises:
        RuntimeError: one of them died.
    """
    said = [process.communicate()[0] for process in processes]
    if died := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f"late_reads: a process ended with status {died[0]}")
    found = [json.loads(line) for line in said]
    (fence,) = {r["fence"] for r in found}
    names, rows = (sum((Counter(r[field]) for r in found), Counter()) for field in ("gradients", "rows"))
    total = {field: sum(r[field] for r in found) for field in ("calls", "wrong")}
    return {"fence": fence, "processes": len(found), **total, "gradients": names, "rows": rows}


@contextlib.contextmanager
def tests_running(processes: int, folder: Path):
    """Run TESTS in other processes, from before the block to its end; yield a function that counts passed tests.

    Raises:
        RuntimeError: no test has passed in time, or the tests ended before the block.
    """
    if not processes:
        yield lambda: 0
        return
    log = folder / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-v", *TESTS, "-n", str(processes), "--dist", "worksteal"]
    how = {"cwd": ROOT.parent, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.STDOUT}
    with log.open("w") as out:  # a session of its own, so that pytest's workers end with it
        tests = subprocess.Popen(command, stdout=out, start_new_session=True, **how)

    def passed() -> int:
        if tests.poll() is not None:
            raise RuntimeError(f"late_reads: the tests ended with status {tests.returncode}: {log.read_text()[-400:]}")
        return log.read_text().count("PASSED")

    late = time.monotonic() + PATIENCE
    try:
        while not passed():
            if time.monotonic() > late:
                raise RuntimeError(f"late_reads: expected a passed test within {PATIENCE} s, got none")
            time.sleep(0.5)
        yield passed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--processes", type=int, default=8, help="processes that repeat the calls")
    parser.add_argument("--others", type=int, default=7, help="processes that run tests at the same time")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--form", default="triton_hopper", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--expected", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # a process of the copy finds that one by its PYTHONPATH
    sys.path[:0] = [str(ROOT)] if args.expected else [str(ROOT), str(SOURCE)]
    import torch

    if args.expected:
        repeat(args)
        return
    from gla_ref import results

    if args.device == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)):
        sys.exit("late_reads: expected an NVIDIA GPU of compute capability 9.0, found none")
    environment = results.environment(torch.cuda.get_device_name() if args.device == "cuda" else None)
    with tempfile.TemporaryDirectory() as folder:
        expected, copy = Path(folder, "expected.pt"), without_fence(Path(folder))
        torch.save({gates: gradients(gates, args.form, args.device)() for gates in GATES}, expected)
        with tests_running(args.others, Path(folder)) as passed:
            before = passed()
            running = [start(copy if i % 2 else SOURCE, expected, args) for i in range(args.processes)]
            records = [counted(running[::2]), counted(running[1::2])]
            tests = passed() - before
    for record in records:
        record |= {"others": args.others, "tests": tests}
        print(json.dumps(record), flush=True)
    results.write(args.out or results.file(f"{environment['gpu']} late reads"), environment, "late reads", records)


if __name__ == "__main__":
    main()
