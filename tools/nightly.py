"""Run what takes too long for the gate, part by part, and record each: .venv/bin/python tools/nightly.py [PART ...]

A part is a `make` target. Its record has the counts of its tests, its seconds, what failed, and a hash of the files
that it reads. A part whose last run was right and whose files have not changed since is not run again. `--due` lists
the parts that would run. The records are in benchmarks/results/nightly.json, and docs/status.md is written from them.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import count_tests
from tabulate import tabulate

from gla_ref import results

ROOT = Path(__file__).resolve().parents[1]
RECORD, STATUS = results.file("nightly"), ROOT / "docs" / "status.md"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
MEASURED = re.compile(r"^measured (.+): ([\d.]+) s$", re.MULTILINE)  # written by tests/conftest.py

KIT = "tests/test_check*.py tests/test_museum.py"
ORDERS = "tests/test_kernels_flash.py", "tests/test_kernels_portable.py", "tests/test_orders.py"
CODE, TESTS = ("src", "requirements.txt", "pyproject.toml", "Makefile"), ("tests", "tools", "benchmarks")
BOOK = ("book", "notebooks", "_config.yml", "_toc.yml", "benchmarks/results")
HELPERS = ("tests/[!t]*.py", "!tests/browser")  # modules that tests import
#: what neither the kit nor a compiled launch is made of
APART = ("!src/gla_ref/book", "!src/gla_ref/experiments", "!src/gla_ref/models")
#: what makes and compiles a launch
LAUNCHES = (*CODE, *APART, *(f"!src/gla_ref/{x}" for x in ("_commands", "check", "compat", "gradients", "over_ranks")))
LAUNCHES += (*(f"tools/{x}.py" for x in ("barriers", "compile_kernels", "kernel_cases", "other_tritons", "sass")),)


@dataclass(frozen=True)
class Part:
    target: str  # of make, with its variables
    reads: tuple[str, ...]  # files and folders, of which those with "!" are left out
    what: str


PARTS = {
    "deep": Part(
        f"test-deep 'TESTS=--ignore-glob={' --ignore-glob='.join(KIT.split())}'",
        (*CODE, *TESTS, *BOOK),
        "whole ladders and sweeps, properties 300 times",
    ),
    "kit": Part(
        f"test-deep 'TESTS={KIT}'",
        (*CODE, *APART, *HELPERS, *KIT.split()),
        "the check kit's sweeps, every named mistake, every form",
    ),
    "orders": Part(
        "test-orders", (*CODE, *APART, *HELPERS, *ORDERS), "sums in the orders of two other processors' BLAS"
    ),
    "browser": Part(
        "test-browser", (*CODE, *BOOK, "tests/browser", "tools"), "every page in a browser, and its seconds"
    ),
    "notebooks": Part("test-notebooks", (*CODE, *BOOK, "tools"), "every notebook from the site, the package missing"),
    "pdf": Part("pdf", (*CODE, *BOOK, "tools"), "the printed edition"),
    "compile": Part("compile", LAUNCHES, "every launch for every class of GPU"),
    "versions": Part("compile-versions", LAUNCHES, "every kernel for sm_90 by the other Tritons"),
}


def files(reads: tuple[str, ...]) -> list[Path]:
    """The files of a part that git knows or would add, in order."""
    wanted = [name for name in reads if name[0] != "!"]
    without = [f":(exclude){name[1:]}" for name in reads if name[0] == "!"] + [f":(exclude){RECORD.relative_to(ROOT)}"]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *wanted, *without]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted(set(listed.split("\0"))) if name and (ROOT / name).is_file()]


def digest(reads: tuple[str, ...]) -> str:
    """A hash of the names and contents of a part's files."""
    total = hashlib.sha256()
    for path in files(reads):
        total.update(f"{path.relative_to(ROOT)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def due(name: str) -> bool:
    """Whether a part has no right run of the files as they are."""
    last = {r["part"]: r for r in results.read(RECORD, "nightly")}.get(name)
    return last is None or not last["right"] or last["files"] != digest(PARTS[name].reads)


def run(name: str) -> dict:
    """Run a part, show what it prints, and return its record."""
    before, begun, lines = digest(PARTS[name].reads), time.time(), []
    with subprocess.Popen(
        f"make {PARTS[name].target}", shell=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    log, about = "".join(lines), results.environment(None)
    passed, failed = count_tests.totals(log)
    return {
        "part": name,
        "right": process.returncode == 0,
        "passed": passed,
        "failed": failed,
        "failures": sorted(set(FAILED.findall(log))) or ([] if process.returncode == 0 else lines[-3:]),
        "measured": {what: float(seconds) for what, seconds in MEASURED.findall(log)},
        "seconds": round(time.time() - begun),
        "files": before,
        **{name: about[name] for name in ("commit", "date", "python")},
    }


#: what writes the records of a kind, unless their environment names a program of an earlier commit
PROGRAMS = {
    "records": "benchmarks/run.py",
    "checks": "benchmarks/check_peers.py",
    "scaling": "benchmarks/scaling.py",
    "versions": "benchmarks/versions.py",
    "fla_tests": "benchmarks/fla_tests.py",
    "stress": "tools/stress_gpu.py",
    "launches": "tools/compile_kernels.py",
    "museum": "python -m gla_ref check --museum",
    **dict.fromkeys(("mqar", "language", "decoding"), "python -m gla_ref.experiments"),
    "tests": "make test-gpu",
}


def readers(kind: str) -> str:
    """The chapters, pages, tests and programs that load the records of a kind."""
    call = r'load\("h200"\)' if kind == "records" else rf'(?:load\(|records\("\w+", |read\([A-Z]).*"{kind}"'
    names = set()
    for pattern in ("book/*.md", "src/gla_ref/book/**/*.py", "tests/test_*.py", "tools/*.py"):
        names |= {path.stem for path in ROOT.glob(pattern) if re.search(call, path.read_text())}
    return ", ".join(name[:2] if name[0].isdigit() else name for name in sorted(names - {"test_results"})) or "–"


def status() -> str:
    """The text of docs/status.md."""
    done = {r["part"]: r for r in results.read(RECORD, "nightly")}
    head = ["part", "what", "result", "tests", "seconds", "commit", "date"]
    rows = [[f"`{n}`", x.what, *(ended(done[n]) if n in done else ["not run yet", *"––––"])] for n, x in PARTS.items()]
    text = f"# Status\n\nWritten by `tools/nightly.py` from `{RECORD.relative_to(ROOT)}`. `make nightly` runs the "
    text += "parts whose files have changed since their last right run; `.venv/bin/python tools/nightly.py --due` "
    text += "lists them. If a part is listed there or has no date, what it covers is not known to hold at this commit. "
    text += "The gate (`.ci/run`) runs on every change and is not in the table.\n\n"
    text += tabulate(rows, head, tablefmt="github") + "\n"
    if measured := [(what, f"{x:.2f}") for name in PARTS if name in done for what, x in done[name]["measured"].items()]:
        text += "\nPromises of speed, as measured in these runs:\n\n"
        text += tabulate(measured, ["what", "seconds"], "github") + "\n"
    text += "\n## Records\n\nWhat has been measured and compiled (`benchmarks/results/`): by which program, on which "
    text += "machine and when, and which chapters, pages, tests and programs read it.\n\n"
    head = ["file", "machine", "PyTorch", "Triton", "date", "program", "read by"]
    rows = [measurement(path) for path in sorted(set(RECORD.parent.glob("*.json")) - {RECORD})]
    return text + tabulate(rows, head, tablefmt="github") + "\n"


def ended(r: dict) -> list:
    """How a part's last run ended: its result, tests, seconds, commit and date."""
    tests = f"{r['passed']} passed, {r['failed']} failed" if r["passed"] + r["failed"] else "–"
    right = "right" if r["right"] else "wrong: " + ", ".join(r["failures"])
    return [right, tests, r["seconds"], r["commit"][:10], r["date"]]


def measurement(path: Path) -> list:
    """A file of benchmarks/results: its name, where, with what, when and by which program it was made, its readers."""
    data = json.loads(path.read_text())
    e, *kinds = data.pop("environment", data), *data
    kind = "tests" if "gpu" in data else kinds[0]  # the summary of a run of tests has no environment apart
    tritons = ", ".join(sorted(results.tritons(data | {"environment": e}))) or e["triton"]
    program = e.get("program") or PROGRAMS[kind]
    return [f"`{path.name}`", e["gpu"] or "no GPU", e["torch"], tritons, e["date"], program, readers(kind)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--again", action="store_true", help="also parts whose files have not changed")
    parser.add_argument("--due", action="store_true", help="list the parts that would run, and write docs/status.md")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"PART: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    wanted = [name for name in args.parts or PARTS if args.again or due(name)]
    if args.due:
        STATUS.write_text(status())
        print("\n".join(wanted) or "Every part is right for the files as they are.")
        return 0
    os.chdir(ROOT)
    wrong = []
    for name in wanted:
        print(f"== {name}: {PARTS[name].what}", flush=True)
        record = run(name)
        results.merge(RECORD, results.environment(None), "nightly", [record], key=("part",))
        STATUS.write_text(status())
        wrong += [] if record["right"] else [name]
        print(f"== {name}: {'right' if record['right'] else 'WRONG'}, {record['seconds']} s", flush=True)
    print(f"Wrong: {', '.join(wrong)}" if wrong else "Every part is right for the files as they are.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
