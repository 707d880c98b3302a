"""Compile the kernels for GPUs that are not there: registers, spills, shared memory, rules of pipelining and barriers.

    python tools/compile_kernels.py [CASE ...] [--arch 75 80 ...]    # default: all; needs no GPU, some minutes
    python tools/compile_kernels.py --triton --kinds --arch 90    # with the other versions of Triton that readers have
    python tools/compile_kernels.py --changed --arch 90    # only launches whose plan or source changed (--record: all)

A plan says what a call launches on any class of GPU, and Triton's compiler needs a target, not a device; the assembler
comes with Triton. Every launch of forward and backward must fit its card and, where K, V <= 128, spill at most SPILLED
bytes a thread (but on Hopper, whose tiles were chosen by time, on a GPU). Products keep their operands in shared
memory, and barriers their bytes (barriers.py). Where warps have different jobs, those of one meet before one thread
arrives at a barrier for all. In the assembler's code no uniform register is read that nothing has set, and no product
finds its operands by a thread's number (sass.py).

A launch's fingerprint is a hash of the version of Triton, of what its plan fixes, and of the source of its kernel with
all that it calls; launches with the same fingerprint are compiled once. `--changed` compiles those that
benchmarks/results/compiled-launches.json does not have, at most LIMIT of them, those of Gluon kernels first, then those
of the widest heads. Only `--record` writes that file: every launch that compiled right.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
import barriers
import other_tritons
import sass
from kernel_cases import CASES, WIDE

from gla_ref import results
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import Launch
from gla_ref.kernels.launch.program import compile_launch, variant

SPILLED = 148  # bytes a thread may spill where K, V <= 128: the most today, of KDA's `prepare` on sm_100 by 3.9.0
MEASURED = (90,)  # Hopper's tiles are the fastest of those tried on a GPU (lab/known.md), whatever they spill
ALIKE = (86, 89)  # classes that launch what sm_80 does, by the same assembler: only the cases that need most
ARCHS = [int(name.removeprefix("sm_")) for name in CLASSES]
EVERY = CASES | WIDE
LAUNCHES, LIMIT = results.file("compiled launches"), 24  # the gate compiles as many changed launches as this
TILES = ("C", "BM", "BN", "BK", "BV")


def cases_of(arch: int) -> list[str]:
    """The cases compiled for a class when nothing is asked for."""
    if arch in ALIKE:
        return [n for n, case in CASES.items() if case.K == 128 and case.dtype == "float16"]
    return [*CASES, *(WIDE if arch == 90 else ())]


class Target:
    """The part of a driver that compiling asks for; kernels of one class are kept apart from another's."""

    arch = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


SEEN: dict = {}  # (registers, bytes spilled) of what this process has compiled


def assembled(make: Callable) -> tuple:
    """A kernel that `make` compiles for Target.arch, and the registers and bytes spilled of its threads."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # what ptxas -v says, on the first time
        kernel = make()
    if found := re.search(r"(\d+) bytes spill stores.*?Used (\d+) reg", log.getvalue(), re.DOTALL):
        SEEN[Target.arch, kernel.hash] = int(found[2]), int(found[1])
    return kernel, *SEEN[Target.arch, kernel.hash]


def compiled(launch: Launch, arch: int) -> dict:
    """The resources that a launch needs."""
    Target.arch = arch
    kernel, registers, spilled = assembled(lambda: compile_launch(launch))
    return {
        "kernel": launch.name,
        "way": "back" if launch.given("REVERSE") else "",
        "tiles": " ".join(f"{n}={x}" for n in TILES if (x := launch.given(n)) is not None),
        "warps": launch.options.get("num_warps", 4),
        "stages": launch.given("STAGES") or launch.options.get("num_stages", 3),
        "registers": roles(kernel.asm["ptx"]) or registers,
        "spilled": spilled,
        "shared": kernel.metadata.shared,
        "broken": barriers.broken(kernel.asm["ttgir"])
        + barriers.unmet(kernel.asm["ptx"])
        + [f"reads what nothing or another use has set: {text}" for text in sass.wrong(kernel.asm["cubin"])],
    }


def roles(ptx: str) -> str:
    """Registers a thread of each role of a program whose warps have different jobs; empty if they have not."""
    return " ".join(dict.fromkeys(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))


def begin(cache: str) -> None:
    """A process: nothing is taken from an earlier run, whose log would be missing."""
    triton.knobs.cache.dir = cache
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    triton.runtime.driver.set_active(Target())
    torch.set_num_threads(1)


def report(found: dict) -> None:
    """A case's rows, as soon as they are there."""
    print(f"sm_{found['arch']}, {found['case']} {found['refused']} {found['failed']}", flush=True)
    if rows := [row | {"broken": len(row["broken"]) or ""} for row in found["rows"]]:
        print(tabulate(rows, headers="keys", tablefmt="plain"), flush=True)


@functools.cache
def launches(arch: int, name: str) -> list[Launch]:
    """Every launch of a case for a class; ValueError if the plan refuses the case."""
    return [x for p in EVERY[name].plans(arch) for x in p.launches]


def fingerprint(launch: Launch, arch: int) -> str:
    """A hash of all that decides what a launch compiles to."""
    _, *fixed = variant(launch, torch.device("meta"))
    return hashlib.sha256(repr((triton.__version__, arch, launch.kernel.cache_key, fixed)).encode()).hexdigest()[:16]


def distinct(arch: int, names: list[str], kinds: bool = False) -> dict[str, dict[str, int] | None]:
    """The launches to compile by case and fingerprint, each in the first case that has it; None of a refused case.

    A launch is its number in the case, since older Tritons' fingerprints depend on what was made before.

    With `kinds` a portable kernel has one launch of each direction and dtype, that of the widest heads, which needs
    most; of tiles of 32 channels one for each V, since there older assemblers go wrong at some (lab/known.md). Of Gluon
    kernels, where a case chooses among layouts and roles, all launches stay.
    """
    taken, found = set(), {}
    for name in sorted(names, key=lambda name: -wide(name)) if kinds else names:
        try:
            every = launches(arch, name)
        except ValueError:
            found[name] = None
            continue
        found[name] = {}
        for n, x in enumerate(every):
            mark = fingerprint(x, arch)
            once = kinds and not x.kernel.is_gluon()
            case, thin = EVERY[name], (x.given("BK") or 64) <= 32
            keys = {mark, (x.kernel, bool(x.given("REVERSE")), case.dtype, thin and case.V)} if once else {mark}
            if keys.isdisjoint(taken):
                found[name][mark] = n
                taken |= keys
    return found


def wide(name: str) -> int:
    """How many numbers a state of a case has."""
    return EVERY[name].K * EVERY[name].V


def recorded(arch: int) -> set[str]:
    """The fingerprints of the launches that compiled right; without any there is nothing to compare with."""
    marks = {r["fingerprint"] for r in results.read(LAUNCHES, "launches") if r["arch"] == arch}
    return marks or sys.exit(f"{LAUNCHES.name}: expected launches for sm_{arch} (make compile ARCH={arch}), got none")


def changed(arch: int, names: list[str], known: set[str]) -> tuple[dict[str, dict[str, int]], int]:
    """Launches to compile by case and fingerprint, and how many are left out."""
    every = distinct(arch, names).items()
    new = [(mark, n, name) for name, own in every for mark, n in (own or {}).items() if mark not in known]
    new.sort(key=lambda x: (not launches(arch, x[2])[x[1]].kernel.is_gluon(), -wide(x[2]), x[0]))
    return {name: {mark: n for mark, n, case in new[:LIMIT] if case == name} for name in names}, len(new[LIMIT:])


def compile_case(task: tuple[int, str, dict[str, int] | None]) -> dict:
    """The launches of a case for a class by fingerprint and number; None if the plan refuses the case.

    Returns:
        {"rows": [...], "right": fingerprints, "refused": what the plan said, "failed": what went wrong}.
    """
    arch, name, marks = task
    found = {"arch": arch, "case": name, "rows": [], "right": [], "refused": "", "failed": ""}
    try:
        every = launches(arch, name)
    except ValueError as error:
        return found | {"refused": str(error)}
    for mark, n in marks.items():
        try:
            row = compiled(every[n], arch)
        except Exception as error:  # whatever the compiler says
            found["failed"] = f"{every[n].name}: {str(error).strip()[-300:]}"
            continue
        found["rows"] += [] if row in found["rows"] else [row]
        found["right"] += [] if row["broken"] else [mark]
    return found


def wrongs(found: dict) -> list[str]:
    """Errors of a case's launches."""
    case, arch = EVERY[found["case"]], found["arch"]
    wrong, narrow = [found["failed"]] if found["failed"] else [], max(case.K, case.V) <= 128
    if found["refused"] and narrow:
        wrong.append(f"refused: {found['refused']}")
    for row in found["rows"]:
        wrong += [f"{row['kernel']}: {text}" for text in row["broken"]]
        room = CLASSES[f"sm_{arch}"].shared_memory
        if row["shared"] > room:
            wrong.append(f"{row['kernel']}: {row['shared']} bytes of shared memory of {room}")
        if row["spilled"] > SPILLED and narrow and arch not in MEASURED:
            wrong.append(f"{row['kernel']} {row['way']}: {row['spilled']} bytes spilled")
    return [f"sm_{arch}, {found['case']}, {text}" for text in wrong]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(EVERY)}")
    parser.add_argument("--arch", nargs="+", type=int, choices=ARCHS, default=ARCHS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--changed", action="store_true", help=f"only {LIMIT} launches that {LAUNCHES.name} lacks")
    parser.add_argument("--record", action="store_true", help=f"write launches that compiled right to {LAUNCHES.name}")
    parser.add_argument("--kinds", action="store_true", help="a portable kernel once a direction and dtype")
    versions = ", ".join(other_tritons.VERSIONS)
    about = f"compile with these versions instead; none: all of {versions} but the pinned"
    parser.add_argument("--triton", nargs="*", type=other_tritons.version, metavar="VERSION", help=about)
    args = parser.parse_args()
    if unknown := set(args.cases) - set(EVERY):
        parser.error(f"cases {sorted(unknown)}: expected some of {', '.join(EVERY)}")
    if args.changed and len(args.arch) > 1:
        parser.error("--changed: expected one class of GPU")
    if args.triton is None and triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET: expected it to be unset, since nothing is compiled with it")
    return args


def tasks_of(args: argparse.Namespace) -> list[tuple[int, str, dict[str, int] | None]]:
    """What compile_case is to do for the arguments: the launches of each case for each class."""
    tasks = []
    for arch in args.arch:
        names = [n for n in args.cases or cases_of(arch) if arch >= 80 or EVERY[n].dtype != "bfloat16"]
        if args.changed:
            marks, left = changed(arch, names, recorded(arch))
            print(f"{sum(map(len, marks.values()))} launches changed; {left} more are left to make nightly", flush=True)
        else:
            marks = distinct(arch, names, args.kinds)
        tasks += [(arch, name, own) for name, own in marks.items() if own is None or own]
    return tasks


def compile_all(tasks: list[tuple], jobs: int) -> list[dict]:
    """Compile the cases side by side; report each as soon as it is there."""
    everything = []
    with tempfile.TemporaryDirectory() as cache:
        # a ProcessPoolExecutor, since Pool waits for ever for a compiler that died
        with ProcessPoolExecutor(jobs, get_context("spawn"), begin, (cache,)) as pool:
            for found in pool.map(compile_case, tasks):
                everything.append(found)
                report(found)
    return everything


def main() -> None:
    args = arguments()
    if args.triton is not None:
        options = [*args.cases, "--arch", *map(str, args.arch), "--jobs", str(args.jobs), *["--kinds"] * args.kinds]
        sys.exit(other_tritons.compile_with(args.triton, options))
    tasks = tasks_of(args)
    if not tasks:
        sys.exit(0 if args.changed else "expected a launch that is compiled for these classes, got none")
    begun = time.time()
    everything = compile_all(tasks, args.jobs)
    wrong = [text for found in everything for text in wrongs(found)]
    count = sum(len(own or ()) for *_, own in tasks)
    print(f"Triton {triton.__version__}: {count} launches in {time.time() - begun:.0f} s", flush=True)
    if args.record:
        rows = [{"arch": x["arch"], "fingerprint": mark} for x in everything if not wrongs(x) for mark in x["right"]]
        if not args.cases and set(args.arch) == set(ARCHS):
            LAUNCHES.unlink(missing_ok=True)  # launches that exist no more
        results.merge(LAUNCHES, results.environment(None), "launches", rows, key=("arch", "fingerprint"))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
