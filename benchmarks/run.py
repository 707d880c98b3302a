"""Check, then time: every contender of every case of some suites, into benchmarks/results/<gpu>.json.

    python benchmarks/run.py flash linear            # or: make bench SUITE="flash linear"
    python benchmarks/run.py --list

It runs in the host's own Python, needs a GPU and no network. A record replaces the older one of the same suite,
contender, direction and shape; the rest of the file stays.

suites.py has the cases, contenders.py the functions, truth.py judges results, timing.py measures. Here `records_of`
makes a case's records, by `measured` for each contender, which checks and times each direction.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # first calls are measured with nothing compiled before
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))

import torch
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from contenders import CONTENDERS, Contender
from suites import LEAVES, SUITES, Case, flop_floor, inputs, memory_floor_bytes
from timing import ceilings, clocks, limit, median_ms, on_the_clock, peak_bytes, timed, where_us
from truth import Truth, fingerprint

from gla_ref import results
from gla_ref.kernels.launch.hardware import hardware_of

PEERS = ("flash-linear-attention", "fla-core", "flash-qla", "tilelang", "flashinfer-python", "nvidia-cudnn-frontend")
# a record's fields that a case fixes, and those by which a newer record replaces an older one
SHAPE = ("mechanism", "B", "T", "H", "value_heads", "K", "V", "dtype", "gates", "lengths", "state", "decode")
IDENTITY = ("suite", "contender", "direction", *SHAPE)
REFUSED = dict.fromkeys(("ms", "peak_bytes", "first_call_s", "error", "budget"))  # the fields of a call that raised
REFUSED |= {"samples_ms": [], "clocks": {}, "correct": False}


def poison() -> None:
    """Leave NaN in freed memory, so that an element that a kernel does not write shows."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    size = min(free // 3, 8 << 30)
    _ = [torch.full((n // 4,), float("nan"), device="cuda") for n in (size, 1 << 20)]  # freed on return


def leaves(x: dict[str, Tensor]) -> list[str]:
    """Names of the inputs that get gradients."""
    return [n for n in LEAVES if n in x]


def call(contender: Contender, case: Case, x: dict[str, Tensor]) -> Tensor:
    return contender.call(case, **{n: y for n, y in x.items() if n != "do"})


def call_of(contender: Contender, case: Case, direction: str, x: dict[str, Tensor]) -> Callable:
    """The call that is timed: forward, backward through a graph that is there, or both."""

    def forward():
        with torch.no_grad():
            return call(contender, case, x)

    def graph():
        with torch.enable_grad():
            return call(contender, case, x)

    def backward(o):
        return torch.autograd.grad(o, [x[n] for n in leaves(x)], x["do"], retain_graph=True)

    if direction == "forward":
        return forward
    if direction == "both":
        return lambda: backward(graph())
    o = graph()
    return lambda: backward(o)


def measured(contender: Contender, case: Case, sets: list[dict], truth: Truth, compiled=False) -> dict[str, dict]:
    """{direction: the fields of a record beyond the shape}; a refusal is a result, and the next contender still runs.

    compiled: the contender may find its kernels compiled, so that its first call says nothing.
    """
    fields = {}
    for direction in case.directions:
        if {"both": "backward"}.get(direction, direction) not in contender.directions:
            continue
        try:
            fields[direction] = checked_and_timed(contender, case, direction, sets, truth)
            if compiled:
                fields[direction]["first_call_s"] = None
        except Exception as e:
            if not contender.peer:
                traceback.print_exc()
            fields[direction] = REFUSED | {"message": f"{type(e).__name__}: {e}".strip()[:400]}
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return fields


def checked_and_timed(contender: Contender, case: Case, direction: str, sets: list[dict], truth: Truth) -> dict:
    """First the first call and its check, then times and memory."""
    poison()
    with limit(contender.limit_s):
        first = call_of(contender, case, direction, sets[0])
        got, first_s = timed(first)
        names = [f"d{n}" for n in leaves(sets[0])]
        got = {"o": got} if direction == "forward" else dict(zip(names, got, strict=True))
        verdict, bits = truth.judge(got), fingerprint(got)
        del got
        calls = [first, *(call_of(contender, case, direction, x) for x in sets[1:])]
    error, budget = max(verdict.values(), key=lambda v: v[0] / v[1])
    wrong = [n for n, (e, b) in verdict.items() if not e <= b]
    with limit(60):
        extra = peak_bytes(first)
        ms, every = median_ms(calls)
        clock = on_the_clock(calls) if case.clock else {}
        if clock and direction == "forward":
            clock["where_us"] = where_us(calls[0], clock["host_us"])
    return {
        "ms": round(ms, 5),
        "samples_ms": every,
        **clock,
        "peak_bytes": extra,
        "first_call_s": first_s,
        "correct": not wrong,
        "error": error,
        "budget": budget,
        "bits": bits,
        "message": f"beyond the budget: {', '.join(wrong)}" if wrong else None,
        "clocks": clocks(),
    }


def sets_of(case: Case) -> list[dict]:
    """Input sets to rotate over: four times the L2 cache together, at least two, at most eight (small ones fit it)."""
    L2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    size = memory_floor_bytes(case, "forward")
    n = min(8, max(2, -(-4 * L2 // size)))
    return [inputs(case, seed) for seed in range(n)]


def contenders_of(case: Case) -> list[Contender]:
    """The contenders that are measured on a case."""
    able = [c for c in CONTENDERS.get(case.mechanism, []) if c.packed in (None, bool(case.lengths)) and c.takes(case)]
    return [c for c in able if (c.name in case.only if case.only else not c.named)]


def kernels_of(contender: Contender, case: Case, x: dict[str, Tensor]) -> str | None:
    """The name of the kernels that one of our own contenders runs: what the plan chose."""
    if contender.entry is None:
        return None
    from gla_ref import kernels

    given = {n: x[n] for n in case.given}
    options = {n: x.get(n) for n in ("initial_state", "cu_seqlens")} | contender.options
    return kernels.plan(case.mechanism, *given.values(), **options).name


def table(records: list[dict], peers: set[str]) -> str:
    """One case's records in one direction, the fastest first."""
    from tabulate import tabulate

    rows = []
    fastest = min((r["ms"] for r in records if r["contender"] in peers and r["ms"] and r["correct"]), default=None)
    for r in sorted(records, key=lambda r: r["ms"] or float("inf")):
        ok = r["ms"] is not None
        rows.append(
            {
                "contender": r["contender"],
                "ms": f"{r['ms']:.3f}" if ok else "-",
                "/ best peer": f"{r['ms'] / fastest:.2f}" if ok and fastest else "-",
                "/ memory": f"{r['ms'] / r['floor_ms']:.2f}" if ok else "-",
                "/ FLOP": f"{r['ms'] / r['flop_floor_ms']:.2f}" if ok else "-",
                "extra MB": f"{r['peak_bytes'] / 1e6:.1f}" if ok else "-",
                "first s": "-" if r["first_call_s"] is None else r["first_call_s"],
                "correct": "yes" if r["correct"] else "NO",
                "error / budget": f"{r['error']:.2g} / {r['budget']:.2g}" if ok else "-",
                "host us": r.get("host_us", "-"),
                "clock ms": r.get("clock_ms", "-"),
                "": r["message"] or "",
            }
        )
    return tabulate(rows, headers="keys", maxcolwidths=[None] * 11 + [60], disable_numparse=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suites", nargs="*", help="; ".join(f"{n}: {f.__doc__}" for n, f in SUITES.items()))
    parser.add_argument("--list", action="store_true", help="print suites, shapes and contenders")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these contenders only")
    parser.add_argument("--match", default="", help="these cases only: a regular expression of what --list prints")
    parser.add_argument("--direction", choices=["forward", "backward"], help="this one only")
    seconds = "start no contender later than this, the peers' first calls (searches, mostly) not counted"
    parser.add_argument("--seconds", type=float, default=480, help=seconds)
    parser.add_argument("--out", type=Path, help="the JSON file to merge into")
    compiled = "a TRITON_CACHE_DIR that only peers filled (compile_peers.py): their first calls are not measured"
    parser.add_argument("--compiled", type=Path, metavar="DIR", help=compiled)
    args = parser.parse_args()
    if unknown := set(args.suites) - set(SUITES):
        parser.error(f"suites {sorted(unknown)}: expected some of {', '.join(SUITES)}")
    return args


def assembler() -> str:
    """The version of the ptxas that Triton calls for this GPU; a wheel may have two."""
    major, minor = torch.cuda.get_device_capability()
    return re.search(r"V([\d.]+)", results.command(get_ptxas(10 * major + minor).path, "--version"))[1]


class Deadline:
    """The seconds in which contenders are started; those of the peers' first calls are not counted."""

    def __init__(self, seconds: float):
        self.seconds, self.began, self.searched = seconds, time.monotonic(), 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def over(self) -> bool:
        return self.spent - self.searched >= self.seconds


def records_of(
    suite: str, case: Case, contenders: list[Contender], deadline: Deadline, environment: dict, compiled: bool
) -> list[dict]:
    """The records of a case: one for each contender and direction, until the deadline."""
    records, sets, truth = [], None, None
    for it in contenders:
        if deadline.over:
            print(f"{case} {it.name}: not run, {deadline.seconds:.0f} s are over", flush=True)
            continue
        if truth is None:
            sets = sets_of(case)
            truth = Truth(case, sets[0])
        for direction, fields in measured(it, case, sets, truth, it.peer and compiled).items():
            deadline.searched += it.peer * (fields["first_call_s"] or 0)
            moved, flop = memory_floor_bytes(case, direction), flop_floor(case, direction)
            records.append(
                {
                    "suite": suite,
                    **{n: getattr(case, n) for n in SHAPE},
                    "contender": it.name,
                    "peer": it.peer,
                    "direction": direction,
                    "ran": kernels_of(it, case, sets[0]),
                    **fields,
                    "commit": environment["commit"],
                    "triton": environment["triton"],
                    "assembler": environment["assembler"],
                    **(hardware_of(torch.device("cuda")).options if it.name.startswith("triton") else {}),
                    "floor_ms": round(moved / environment["copy_gb_s"] / 1e6, 9),
                    "flop_floor_ms": round(flop / environment["matmul_tflop_s"] / 1e9, 9),
                }
            )
    return records


def report(suite: str, case: Case, records: list[dict], peers: set[str]) -> None:
    """Print a table for each direction."""
    for direction in case.directions:
        here = [r for r in records if r["direction"] == direction]
        if here:
            print(
                f"\n{suite}: {case} {direction}: memory floor {here[0]['floor_ms']:.3f} ms, "
                f"FLOP floor {here[0]['flop_floor_ms']:.3f} ms"
            )
            print(table(here, peers), flush=True)


def main() -> None:
    args = arguments()
    if args.list or not args.suites:
        for name, cases in SUITES.items():
            print(f"{name}: {cases.__doc__}")
            for case in cases():
                print(f"  {case}: {', '.join(c.name for c in contenders_of(case))}")
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks: expected an NVIDIA GPU, found none")
    if args.compiled:
        shutil.copytree(args.compiled, os.environ["TRITON_CACHE_DIR"], dirs_exist_ok=True)
    deadline = Deadline(args.seconds)
    environment = results.environment(torch.cuda.get_device_name(), PEERS) | ceilings()
    environment["peers"]["cudnn"] = torch.backends.cudnn.version()
    environment["assembler"] = assembler()
    print(json.dumps(environment), flush=True)
    path = args.out or results.file(environment["gpu"])
    chosen = [(suite, case) for suite in args.suites for case in SUITES[suite]() if re.search(args.match, str(case))]
    for suite, case in chosen:
        contenders = [c for c in contenders_of(case) if not args.only or c.name in args.only]
        if args.direction:
            case = replace(case, directions=(args.direction,))
        records = records_of(suite, case, contenders, deadline, environment, args.compiled is not None)
        report(suite, case, records, {c.name for c in contenders if c.peer})
        if records:
            results.merge(path, environment, "records", records, IDENTITY)
        torch.cuda.empty_cache()
    print(f"\n{deadline.spent:.0f} s, of these {deadline.searched:.0f} s the peers' first calls; results: {path}")


if __name__ == "__main__":
    main()
