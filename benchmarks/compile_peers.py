"""Compile every configuration of fla's searches, many side by side, before `run.py` measures fla.

    python benchmarks/compile_peers.py DIR                    # every shape of the suite
    python benchmarks/compile_peers.py DIR --shapes 256/512 --jobs 8
    python benchmarks/run.py gla --compiled DIR

fla's first call compiles one configuration after the other, for minutes, and measures each. Here each of many
processes compiles its share and measures nothing; what is measured, and which configuration wins, is the business of
`run.py`. Triton writes a search's result beside the compiled kernels: those files are removed in the end.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run
from contenders import CONTENDERS
from suites import SUITES, Case, inputs


def shapes() -> dict[str, Case]:
    """Cases by "K/V", "K/V B=1", "host" or "kda H". T is 512 in all: fla compiles anew for another H, not another T."""
    cases = {}
    for case in SUITES["gla"]():
        name = f"{case.K}/{case.V}" + (" B=1" if case.B == 1 else "")
        short = replace(case, T=512, gates="logsigmoid/16")
        cases.setdefault(name, short)
    small = next(c for c in SUITES["host"]() if c.mechanism == "gla" and c.B == 2)
    kda = {f"kda {case.H}": replace(case, B=1, T=512) for case in SUITES["kda"]()}
    return cases | kda | {"host": replace(small, T=512, directions=("forward", "backward"))}


def share(piece: int, pieces: int) -> None:
    """Autotuners compile every `pieces`-th configuration from now on, and take one of these for the best.

    Where none of these fits the chip: the one with the fewest stages, which is the likeliest to.
    """
    from triton.runtime.autotuner import Autotuner

    count = itertools.count()

    def compile_only(self, *args, config, **named):
        if next(count) % pieces != piece:
            return [2.0 + config.num_stages] * 3
        try:
            self.fn.run(*args, **{**named, **config.all_kwargs(), "warmup": True})
        except Exception as reason:  # a configuration too large for the chip: the search drops it as well
            print(f"{self.base_fn.__name__}: {type(reason).__name__}", flush=True)
            return [float("inf")] * 3
        return [1.0] * 3

    Autotuner._bench = compile_only


def operator_once(name: str) -> None:
    """Call fla's operator at one of `shapes`, forward and backward."""
    case = shapes()[name]
    fla = next(c for c in CONTENDERS[case.mechanism] if c.name == f"fla_chunk_{case.mechanism}")
    x = inputs(case, 0)
    o = run.call(fla, case, x)
    torch.autograd.grad(o, [x[n] for n in run.leaves(x)], x["do"])


def compile_share(names: list[str], piece: int, pieces: int) -> None:
    """Compile a share of the configurations at each of these shapes; a kernel too large for the chip ends its shape."""
    from triton.runtime.errors import OutOfResources

    share(piece, pieces)
    for name in names:
        try:
            operator_once(name)
        except OutOfResources as reason:  # if the share has no configuration that fits, fla launches one that does not
            print(f"share {piece} of {pieces} ends {name} early: {reason}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="to be a TRITON_CACHE_DIR")
    parser.add_argument("--shapes", nargs="*", choices=list(shapes()), default=list(shapes()))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=300, help="then what runs is stopped")
    parser.add_argument("--piece", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compile_peers: expected an NVIDIA GPU, found none")
    if args.piece is not None:
        compile_share(args.shapes, args.piece, args.jobs)
        return
    settings = {"TRITON_CACHE_DIR": str(args.folder), "FLA_CACHE_RESULTS": "0"}
    env, began = os.environ | settings | {"OMP_NUM_THREADS": "1"}, time.monotonic()
    command = [sys.executable, __file__, str(args.folder), "--shapes", *args.shapes]
    command += ["--jobs", str(args.jobs), "--piece"]
    pieces = [subprocess.Popen([*command, str(i)], env=env) for i in range(args.jobs)]
    for process in pieces:
        try:
            process.wait(max(0.0, args.seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for found in args.folder.rglob("*.autotune.json"):
        found.unlink()
    done = sum(process.returncode == 0 for process in pieces)
    print(f"{done} of {args.jobs} shares done in {time.monotonic() - began:.0f} s: {args.folder}")


if __name__ == "__main__":
    main()
