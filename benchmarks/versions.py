"""One Triton and one assembler on this GPU: are our kernels right with them, and how fast?

    python benchmarks/versions.py                                     # the installed Triton
    python benchmarks/versions.py --triton DIR                        # an unpacked wheel of another Triton
    python benchmarks/versions.py --assembler FILE                    # another ptxas
    python benchmarks/versions.py --suites gla --peers fla_chunk_gla --compiled DIR   # as compile_peers.py filled it

Triton and its assembler are chosen when a process starts, so run.py runs as a program of its own. Writes
results/<gpu>-versions.json: for each pair of versions the medians in ms of each case, each with its commit and with
`bits`, equal where two versions gave the same results. To run the GPU tests or tools/stress_gpu.py by another Triton,
put its folder on PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

import run
import torch
from contenders import CONTENDERS

from gla_ref import results

USUAL_SUITES = "gla", "hopper", "delta", "gated_delta", "linear", "flash"
FIELDS = *run.IDENTITY, "ran", "ms", "correct", "error", "budget", "bits", "first_call_s", "message", "commit"
KEY = "triton", "assembler"


def environment(triton: str | None, assembler: str | None) -> dict[str, str]:
    """The variables of a process with another Triton or assembler."""
    path = [x for x in (triton, os.environ.get("PYTHONPATH")) if x]
    extra = {"PYTHONPATH": os.pathsep.join(path)}
    if assembler:  # Triton reads the second name where it has an assembler of its own for newer GPUs
        extra |= {"TRITON_PTXAS_PATH": assembler, "TRITON_PTXAS_BLACKWELL_PATH": assembler}
    return os.environ | extra


def timed(env: dict[str, str], args: argparse.Namespace) -> list[dict]:
    """Records of our contenders of the suites, and of the peers that are asked for."""
    ours = sorted({c.name for every in CONTENDERS.values() for c in every if not c.peer})
    with tempfile.TemporaryDirectory() as there:
        out = Path(there, "times.json")
        command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *(args.suites or USUAL_SUITES)]
        command += ["--match", args.match, "--seconds", str(args.seconds), "--out", str(out)]
        command += ["--only", *ours, *args.peers]
        command += ["--compiled", str(args.compiled)] if args.compiled else []
        subprocess.run(command, env=env | {"TRITON_CACHE_DIR": there}, cwd=ROOT, check=True)
        return results.read(out, "records")


def update(old: dict, new: dict) -> dict:
    """A record with its new times; those of cases that did not run again are kept."""
    times = {json.dumps([r.get(n) or None for n in run.IDENTITY]): r for r in old.get("times", []) + new["times"]}
    return old | new | {"times": [*times.values()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--triton", metavar="DIR", help="a folder with an unpacked wheel of Triton; default: installed")
    parser.add_argument("--assembler", metavar="FILE", help="a ptxas; default: the one that Triton has")
    parser.add_argument("--suites", nargs="*", help=f"of run.py; without a name: {', '.join(USUAL_SUITES)}")
    parser.add_argument("--match", default="", help="these cases only: a regular expression for lines of run.py --list")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME", help="other libraries' contenders, too")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="their kernels, compiled by this Triton")
    parser.add_argument("--seconds", type=float, default=240, help="of the suites")
    parser.add_argument("--out", type=Path, help="the JSON file to merge into")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("versions: expected an NVIDIA GPU, found none")
    env = environment(args.triton, args.assembler)
    here, began = results.environment(torch.cuda.get_device_name()), time.monotonic()
    records = timed(env, args)
    if not records:
        sys.exit("versions: expected a case of the suites that fits --match, got none")
    row = {n: here[n] for n in ("commit", "date", "torch")} | {n: records[0][n] for n in KEY}
    row["times"] = [{n: r.get(n) for n in FIELDS} for r in records]
    path = args.out or results.file(here["gpu"] + " versions")
    results.merge(path, here, "versions", [row], KEY, update)
    print(f"Triton {row['triton']}, ptxas {row['assembler']}: {time.monotonic() - began:.0f} s; results: {path}")


if __name__ == "__main__":
    main()
