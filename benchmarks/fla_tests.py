"""fla's own tests of six mechanisms, with our kernels under fla's names (`gla_ref.compat.fla.install`).

    python benchmarks/fla_tests.py CHECKOUT                      # of fla, as it is, for its tests/ops; package: 0.6.0
    python benchmarks/fla_tests.py CHECKOUT --seconds 400        # exit status 3: tests are left, call again
    python benchmarks/fla_tests.py CHECKOUT -k test_chunk        # other options are pytest's

Processes side by side run the tests; each test's outcome is appended to `--reports` at once and not asked for again.
results/<gpu>-fla-tests.json has the counts of each file, the first line of each failure, and why tests were skipped.
fla does not hand calls to other libraries here, which skips fewer tests (FLA_DISABLE_BACKEND_DISPATCH).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SUITES = ("gla", "simple_gla", "linear_attn", "delta", "gdn", "kda")
REPORTS = "GLA_REF_FLA_REPORTS"  # names the file for the processes of pytest


def before(reports: Path) -> Path:
    """The reports of earlier calls, one set for all processes of pytest, whenever they start."""
    return reports.with_suffix(".before")


# -- hooks of pytest, which loads this file as a plugin


def pytest_configure(config) -> None:
    from gla_ref.compat import fla

    fla.install()


def pytest_collection_modifyitems(items) -> None:
    done = {r["test"] for r in read(before(Path(os.environ[REPORTS])))}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or report.when != "call" and report.passed:
        return  # one process writes, and one line a test unless something failed around it
    crash = getattr(report.longrepr, "reprcrash", None)
    said = report.longrepr[-1] if isinstance(report.longrepr, tuple) else crash.message if crash else report.longrepr
    said = str(said or "").strip().split("\n")[0]
    found = {"test": report.nodeid, "outcome": report.outcome, "said": said, "seconds": round(report.duration, 2)}
    with Path(os.environ[REPORTS]).open("a") as file:
        file.write(json.dumps(found) + "\n")


# -- the program


def read(reports: Path) -> list[dict]:
    return [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []


def summary(reports: list[dict]) -> list[dict]:
    """A record for each file: counts of its tests, each by its worst outcome."""
    worst = {}
    for r in sorted(reports, key=lambda r: ("passed", "skipped", "failed").index(r["outcome"])):
        worst[r["test"]] = r
    records = []
    for suite in SUITES:
        of = [r for r in worst.values() if r["test"].split("::")[0].endswith(f"/test_{suite}.py")]
        by = {outcome: [r for r in of if r["outcome"] == outcome] for outcome in ("passed", "failed", "skipped")}
        records.append(
            {"file": f"test_{suite}.py"}
            | {outcome: len(found) for outcome, found in by.items()}
            | {"seconds": round(sum(r["seconds"] for r in of))}
            | {"failures": [{n: r[n] for n in ("test", "said")} for r in by["failed"]]}
            | {"skips": dict(Counter(r["said"].removeprefix("Skipped: ") for r in by["skipped"]))}
        )
    return records


def main() -> int:
    sys.path.insert(0, str(ROOT.parent / "src"))
    import torch

    from gla_ref import results

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", help="the checkout's, for the record, where git does not know it")
    parser.add_argument("--seconds", type=float, help="then what runs is stopped")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side on one GPU")
    parser.add_argument("--reports", type=Path, default=Path("fla_tests.jsonl"))
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args, others = parser.parse_known_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = args.commit or results.command("git", "-C", str(args.checkout), "rev-parse", "HEAD")
    environment = results.environment(gpu, ("fla-core",)) | {"tests_of_fla": commit}

    reports = args.reports.resolve()
    reports.touch()
    shutil.copy(reports, before(reports))
    paths = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths, str(ROOT.parent / "src")])}
    env |= {"FLA_DISABLE_BACKEND_DISPATCH": "1", "OMP_NUM_THREADS": "1", REPORTS: str(reports)}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "fla_tests", "-p", "no:cacheprovider"]
    command += ["-n", str(args.jobs), "--dist", "worksteal", "-c", os.devnull, "--rootdir", ".", *others]
    command += [f"tests/ops/test_{suite}.py" for suite in SUITES]
    process = subprocess.Popen(command, cwd=args.checkout, env=env, start_new_session=True)
    try:
        status = process.wait(args.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = 3
    records = summary(read(reports))
    for r in records:
        print(f"{r['file']:20}", *(f"{r[n]:4} {n}" for n in ("passed", "failed", "skipped", "seconds")))
        for f in r["failures"]:
            print(f"  {f['test'].split('::')[1]}: {f['said'][:100]}")
    results.write(args.out or results.file(f"{gpu or 'CPU'} fla tests"), environment, "fla_tests", records)
    failed = any(r["failed"] for r in records)
    return status if status in (2, 3, 4) else int(failed)  # stopped, in time or by an error; 5: no test was left


if __name__ == "__main__":
    sys.exit(main())
