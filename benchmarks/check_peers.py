"""Our kernels and other libraries' under the cases of gla_ref.check.

    python benchmarks/check_peers.py                          # everything: quick and full
    python benchmarks/check_peers.py --only "fla.*" --levels quick --dtypes bf16
    python benchmarks/check_peers.py --only "*.triton*" --levels quick --seeds 20
    python benchmarks/check_peers.py --device cpu --libraries --levels quick   # other libraries' code for a CPU
    python benchmarks/check_peers.py --unfinished --dtypes fp32 --levels quick --seconds-in-all 220   # goes on

A check's cases are shared out to processes, --jobs side by side, whatever function they belong to. One that hangs or
takes the GPU down with it costs its own case only. What is done is written to results/<gpu>-check.json at once, and
replaces the older check of the same subject, dtype, level and number of seeds. When the time is up, that file has the
finished cases of unfinished checks, and the next call goes on with the others. It runs in the host's own Python and
needs no network. Products of float32 are asked to be exact of every kernel that does not say otherwise
(TRITON_F32_DEFAULT=ieee), fla's too: TF32 would exceed any float32 budget. fla's kernels take the first configuration
of each search: a search for every shape takes minutes.
"""

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run

from gla_ref import FORMS, check, results
from gla_ref.__main__ import Journal
from gla_ref._commands import apart
from gla_ref.book.who_passes import BREAKS, REFUSES, claimed, rows
from gla_ref.check._claims import DTYPES, Claim
from gla_ref.compat import libraries

PEERS = (*run.PEERS, "transformers")  # whose versions a record names
FORWARD = " forward"  # after the name of what has no backward pass, or refuses it
SUBJECTS = [
    f"{m}.{form}"
    for m in check.MECHANISMS
    for form in FORMS[m]
    if form.startswith("triton")
    and form != "triton_hopper"  # "triton" plans it where it can
    and (form != "triton_portable" or "triton_hopper" in FORMS[m])  # elsewhere what "triton" plans
]
SUBJECTS.remove("gla.triton_chunk_fuse")  # the original: mild gates only (chapter 14)
SUBJECTS = [name + FORWARD if name.endswith(".triton_recurrent") else name for name in SUBJECTS]
LIBRARIES = [name for name, it in libraries.FUNCTIONS.items() if it.mechanism in check.MECHANISMS]
SUBJECTS += LIBRARIES
LEVELS = ("quick", "full")
KEY = ("subject", "dtype", "level", "seeds")  # of a record, which a newer one replaces
VERDICTS = {True: "right", False: "WRONG", None: "none"}
KEPT = ("case", "quantity", "kind", "error", "budget", "message", "where")  # of a failure in a record
SHARE, CALL = 12, 200.0  # cases that one process calls, one after another; seconds that one call may take
LOST = BREAKS | REFUSES  # kinds of failures that give no number
RUNNING: set[subprocess.Popen] = set()
STOPPED, LOCK = threading.Event(), threading.Lock()  # time is up; around what several shares of a check change


def kernel(subject: str):
    """The mechanism and the function of `gla.triton`, `fla.chunk_gla` or `fla.chunk_gla forward`."""
    subject = subject.removesuffix(FORWARD)
    if subject in LIBRARIES:
        return libraries.FUNCTIONS[subject].mechanism, libraries.function(subject)
    owner, name = subject.split(".")
    return owner, FORMS[owner][name]


def one_configuration() -> None:
    """Triton's autotuners take their first configuration from here on."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def init_with_one(self, fn, arg_names, configs, *args, **named):
        init(self, fn, arg_names, configs[:1], *args, **named)

    Autotuner.__init__ = init_with_one


def summary(*reports: check.Report) -> dict:
    """What the reports of several seeds say, of which the last one may have failures, in values that JSON has."""
    report, worst = reports[-1], {}
    for row in (row for it in reports for row in it.rows if row.error is not None):
        worst[row.quantity] = max(worst.get(row.quantity, 0.0), min(row.ratio, 1e9))
    failures = [{n: getattr(row, n) for n in KEPT} for row in report.failures]
    for row in failures:
        row["error"] = row["error"] if row["error"] is None or math.isfinite(row["error"]) else str(row["error"])
    return {
        "ok": report.ok,
        "claim": report.settings["supports"],
        "cases": sum(len({row.case for row in it.rows}) for it in reports),
        "worst": worst,
        "failures": sorted(failures, key=lambda row: (row["kind"] in LOST, row["kind"] in REFUSES)),  # last
        "not_covered": report.not_covered,
    }


def judge(subject: str, dtype: str, seeds: int, options: dict, journal=None) -> dict:
    """A kernel's failures on the first seed that has any. The `journal` has rows of the first seed's cases."""
    mechanism, fn = kernel(subject)
    reports = []
    for seed in range(seeds):
        given = options | {"dtype": DTYPES[dtype], "seed": seed, "forward_only": subject.endswith(FORWARD)}
        reports.append(check.kernel(mechanism, fn, **given, time_limit=CALL, journal=None if seed else journal))
        if not reports[-1].ok:
            break
    return summary(*reports) | {"smallest": reports[-1].reproduction}


@dataclass(eq=False)
class Check:
    """One check on its way: the rows of the cases that have been called, and the seconds of their processes."""

    subject: str
    dtype: str
    level: str
    rows: dict[str, list[dict]] = field(default_factory=dict)
    seconds: float = 0.0
    expected: float = 0.0  # seconds, as far as is known
    shares: int = 0  # that are left
    message: str | None = None  # why a process did not finish

    def cases(self) -> list[check.Case]:
        """The cases that were not called yet; those for which the same programs are compiled follow one another."""
        mechanism, fn = kernel(self.subject)
        claim = Claim.of(getattr(fn, "supports", None))
        *_, cases = check.selected(mechanism, claim, DTYPES[self.dtype], self.level, None, (), 0)
        left = [case for case in cases if case.name not in self.rows]
        return sorted(left, key=lambda c: (c.K, c.V, c.groups, bool(c.ends), c.state, c.loss, c.H, c.T % 16 > 0))

    def process(self, names: list[str] | None, args: argparse.Namespace) -> dict | None:
        """What a check finds that knows all rows; or call these cases, in one process until a case ends it."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as own:
            folder = Path(own)
            log, place, found = (folder / n for n in ("log", "place", "found"))
            for case, rows in self.rows.items() if names is None else ():
                apart.keep(case, rows, folder)
            (folder / "cases").write_text(json.dumps(names))
            command = [sys.executable, __file__, "--child", self.subject, "--dtypes", self.dtype]
            command += ["--levels", self.level, "--seeds", str(args.seeds), "--device", args.device]
            env = os.environ | {"OMP_NUM_THREADS": "1", apart.VARIABLE: own}  # as many processes as cores
            again = True
            while again and not STOPPED.is_set():
                place.unlink(missing_ok=True)
                with log.open("w") as sink:
                    process = subprocess.Popen(command, stdout=sink, stderr=sink, env=env)
                    RUNNING.add(process)
                    try:
                        message = f"exit status {process.wait(args.seconds)}"
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                        message = f"not done after {args.seconds:.0f} s"
                    RUNNING.discard(process)
                kept, where = apart.kept(folder), place.read_text() if place.exists() else ""
                if where and where not in kept and process.returncode < 0 and process.returncode != -signal.SIGKILL:
                    kind, said = {"kind": "breaks"}, f"ended by {signal.Signals(-process.returncode).name}"
                    kept[where] = [{"case": where, "quantity": "call", "status": "failed", "message": said} | kind]
                    apart.keep(where, kept[where], folder)
                again = names is not None and process.returncode != 0 and where in kept
            with LOCK:
                self.rows |= apart.kept(folder)
                self.seconds += time.monotonic() - began
            if STOPPED.is_set():
                self.message = f"not done after {args.seconds_in_all:.0f} s"
            elif process.returncode:
                self.message = f"{message}: {log.read_text(errors='replace').strip()[-400:]}"
            return json.loads(found.read_text()) if found.exists() else None

    def share(self, names: list[str], args: argparse.Namespace) -> dict | None:
        """Call these cases; after the last of all, what the check finds."""
        if names and not STOPPED.is_set():
            self.process(names, args)
        with LOCK:
            self.shares -= 1
        return None if self.shares or self.message or STOPPED.is_set() else self.process(None, args)

    def record(self, found: dict | None, args: argparse.Namespace) -> dict:
        """What was found; without that, what the rows say so far, and the rows themselves, with which it goes on."""
        if found is None:
            rows = [check.Row(**row) for rows in self.rows.values() for row in rows]
            found = summary(check.Report({"supports": ""}, rows=rows)) | {"ok": None}
            found |= {"of": len(self.rows) + len(self.cases()), "smallest": ""}
            found["rows"] = json.dumps(self.rows)  # as text, since JSON has no NaN
        said = {n: getattr(self, n) for n in ("subject", "dtype", "level")} | {"seconds": round(self.seconds, 1)}
        said |= {n: getattr(args, n) for n in ("seeds", "device", "commit", "triton")}
        return said | found | {"message": (self.message or "not done") if found["ok"] is None else None}

    def keep(self, found: dict | None, args: argparse.Namespace, environment: dict) -> None:
        """Print the record, and write it to the file of records; what has not begun has none."""
        if not self.rows:
            return print(f"{self.subject} {self.dtype} {self.level}: {self.message or 'not begun'}", flush=True)
        record = self.record(found, args)
        print(line(record), flush=True)
        results.merge(args.out, environment, "checks", [record], KEY)


def line(r: dict) -> str:
    """A record for the terminal."""
    said = f"{r['cases']} cases, {len(r['failures'])} failures"
    said += f", first {r['failures'][0]['case']}" if r["failures"] else ""
    said += f"; {r['message']}".replace("\n", " ")[:100] if r["message"] else ""
    return (
        f"{r['subject']} {r['dtype']} {r['level']}".ljust(44) + f" {VERDICTS[r['ok']]:6}{r['seconds']:7.1f} s  {said}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--seeds", type=int, default=1, help="0, 1, ... of the inputs; default 1")
    parser.add_argument("--unfinished", action="store_true", help="rows of Who passes without a verdict only")
    parser.add_argument("--seconds", type=float, default=480, help="of one process")
    parser.add_argument("--seconds-in-all", type=float, help="then what runs is stopped, and goes on the next time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--device", default="cuda", help="cpu interprets our kernels, to try this")
    parser.add_argument("--libraries", action="store_true", help="other libraries' functions only")
    parser.add_argument("--out", type=Path, help="the JSON file to merge into, if not the standing record")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_child(args: argparse.Namespace) -> None:
    """Call the cases of a share in this process; or, where all have been called, say what the check finds."""
    apart.begin()
    one_configuration()
    names, subject, (dtype,) = json.loads((apart.folder / "cases").read_text()), args.child, args.dtypes
    (mechanism, fn), journal = kernel(subject), Journal()
    given = {"device": args.device, "level": args.levels[0]}
    own = given | {"dtype": DTYPES[dtype], "time_limit": CALL, "forward_only": subject.endswith(FORWARD)}
    if names is not None:
        journal.setdefault("", [])  # so the kit looks for no mistake: the last process of a check knows all rows
        check.kernel(mechanism, fn, **own, only=names, progress=lambda *now: apart.at(now[-1]), journal=journal)
        return
    found, file = judge(subject, dtype, args.seeds, given, journal), apart.folder / "found"
    file.write_text(json.dumps(found, allow_nan=False))
    off = [row["case"] for row in found["failures"] if row["kind"] not in LOST]
    if off and subject.removesuffix(FORWARD) in LIBRARIES and not found["smallest"]:  # the full level shrinks it
        found["smallest"] = check.kernel(mechanism, fn, **own | {"level": "full"}, only=off[0]).reproduction
        file.write_text(json.dumps(found, allow_nan=False))


def chosen(args: argparse.Namespace, known: dict[tuple, dict]) -> list[Check]:
    """The checks that are asked for, with the rows of cases that were called before."""
    there = [s for s in LIBRARIES if args.device.split(":")[0] in libraries.FUNCTIONS[s].devices]
    subjects = there if args.libraries else [s for s in SUBJECTS if s in there or s not in LIBRARIES]
    unfinished = [row.name for row in rows() if not row.finished]
    seconds, checks = {}, []
    for r in known.values():
        seconds[r["subject"]] = max(seconds.get(r["subject"], 0.0), r["seconds"])
    for s, dtype, level in itertools.product(subjects, args.dtypes, args.levels):
        asked = fnmatch(s, args.only or "*") and (s not in LIBRARIES or claimed(s, dtype))
        if asked and (not args.unfinished or f"{s} {dtype}" in unfinished):
            before = known.get((s, dtype, level, args.seeds), {})
            kept = json.loads(before.get("rows", "{}")) if before.get("device") == args.device else {}
            checks.append(Check(s, dtype, level, kept, before["seconds"] if kept else 0.0, seconds.get(s, 0.0)))
    return checks


def turns(checks: list[Check]) -> list[tuple[Check, list[str]]]:
    """The shares of checks in turn, the longest check first, so that a share finds what the one before it compiled."""
    todo = []
    for it in checks:
        names = [case.name for case in it.cases()]
        shares = [names[i : i + SHARE] for i in range(0, len(names), SHARE)] or [[]]
        it.shares = len(shares)
        todo += [(n, -it.expected, it, some) for n, some in enumerate(shares)]
    return [(it, some) for *_, it, some in sorted(todo, key=lambda share: share[:2])]


def main() -> None:
    args = arguments()
    if args.child:
        return in_child(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("check_peers: expected an NVIDIA GPU, found none")

    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    environment = results.environment(gpu, PEERS)
    environment["float32_products"] = os.environ["TRITON_F32_DEFAULT"]
    args.commit, args.triton = environment["commit"], environment["triton"]
    print(json.dumps(environment), flush=True)
    standing = results.file(f"{gpu} check")
    args.out = args.out or standing
    known = {tuple(r.get(n) for n in KEY): r for p in (standing, args.out) for r in results.read(p, "checks")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("check_peers: stopped"))
    waiting: dict[Future, Check] = {}
    end = time.monotonic() + (args.seconds_in_all or math.inf)
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for it, some in turns(chosen(args, known)):
                waiting[pool.submit(it.share, some, args)] = it
            while waiting and (left := end - time.monotonic()) > 0:
                done, _ = wait(waiting, None if left == math.inf else left, FIRST_COMPLETED)
                for future in done:
                    it, found = waiting.pop(future), future.result()
                    if found or (not it.shares and it.message):
                        it.keep(found, args, environment)
                    if found and it.subject in LIBRARIES and found["worst"] == {}:  # perhaps for its backward pass
                        for forward, some in turns([Check(it.subject + FORWARD, it.dtype, it.level)]):
                            waiting[pool.submit(forward.share, some, args)] = forward
        finally:
            STOPPED.set()
            for process in list(RUNNING):
                process.kill()
            pool.shutdown(cancel_futures=True)
            for it in dict.fromkeys(waiting.values()):
                found = next((f.result() for f, of in waiting.items() if of is it and not f.cancelled()), None)
                it.keep(found, args, environment)
    print(f"results: {args.out}")


if __name__ == "__main__":
    main()
