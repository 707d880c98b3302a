"""Our kernels and other libraries' under the cases of gla_ref.check.

    python benchmarks/check_peers.py                          # everything: quick and full
    python benchmarks/check_peers.py --only "fla.*" --levels quick --dtypes bf16
    python benchmarks/check_peers.py --only "*.triton*" --levels quick --seeds 20
    python benchmarks/check_peers.py --device cpu --libraries --levels quick   # other libraries' code for a CPU

Every check is a process of its own with a time limit: one that hangs or takes the GPU down with it costs its own
record only, and --jobs of them run side by side, the longest first. What is done is written to
results/<gpu>-check.json at once, where it replaces the older check of the same subject, dtype, level and number of
seeds. It runs in the host's own Python and needs no network. Products of float32 are asked to be exact of every kernel
that does not say otherwise (TRITON_F32_DEFAULT=ieee), fla's too: TF32 would exceed any float32 budget. fla's kernels
take the first configuration of each search: a search for every shape takes minutes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run

from gla_ref import FORMS, check, results
from gla_ref.book.who_passes import NO_NUMBER, claimed
from gla_ref.compat import libraries

PEERS = (*run.PEERS, "transformers")  # whose versions a record names
FORWARD = " forward"  # after the name of what has no backward pass, or refuses it
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
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
GROUPS = {  # a group of quick cases: the patterns of their names; a case belongs to the first that fits
    "packed": ("*packed*", "many sequences"),
    "lengths": ("length *", "??? tokens", "long", "narrow and long", "random *"),
    "gates": ("gate *", "gates *", "wide keys and gate *", "strong but *"),
    "sizes": ("square", "one head", "wide", "*wider*", "widest", "many *", "joint*", "sizes *", "value heads*"),
    "keys": ("keys *", "* keys", "strength*", "values *", "later tokens loud", "hand-over*", "relay*"),
    "scales": ("scale *", "one token with scale", "steep*"),
    "states": ("*state*", "*cache*"),
    "strides": ("strided", "fused", "misaligned", "transposed", "expanded"),
    "losses": ("loss *", "small loss", "frozen inputs"),
    "large": ("large", "huge"),
}
VERDICTS = {True: "right", False: "WRONG", None: "none"}
RUNNING: set[subprocess.Popen] = set()


def kernel(subject: str):
    """(mechanism, function, how to write that function) of `gla.triton`, `fla.chunk_gla` or `fla.chunk_gla forward`."""
    subject = subject.removesuffix(FORWARD)
    if subject in LIBRARIES:
        entry = libraries.FUNCTIONS[subject]
        return entry.mechanism, libraries.function(subject), f'libraries.function("{subject}")'
    owner, name = subject.split(".")
    return owner, FORMS[owner][name], f'FORMS["{owner}"]["{name}"]'


def group(case: str) -> str:
    """The group that a case belongs to, by its name."""
    return next(name for name, patterns in GROUPS.items() if any(fnmatch(case, p) for p in patterns))


def tally(report: check.Report) -> dict[str, dict[str, int]]:
    """{group: how many of its cases were tried, gave a wrong number, gave none that can be judged}."""
    scores = {}
    for case in dict.fromkeys(row.case for row in report.rows):
        kinds = {row.kind for row in report.failures if row.case == case}
        here = scores.setdefault(group(case), dict.fromkeys(("tried", "wrong", "refused"), 0))
        here["tried"] += 1
        here["refused"] += bool(kinds) and kinds <= NO_NUMBER
        here["wrong"] += bool(kinds - NO_NUMBER)
    return scores


def prepare_triton() -> list[float]:
    """Autotuners take their first configuration from here on; returns a list that the seconds of compilers go to.

    Several that run side by side count once.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    init, compile, spent = Autotuner.__init__, JITFunction._do_compile, []
    lock, running = threading.Lock(), []  # since when, each

    def init_with_one(self, fn, arg_names, configs, *args, **named):
        init(self, fn, arg_names, configs[:1], *args, **named)

    def timed_compile(self, *args, **named):
        with lock:
            running.append(running[0] if running else time.monotonic())
        try:
            return compile(self, *args, **named)
        finally:
            with lock:
                began = running.pop()
                if not running:
                    spent.append(time.monotonic() - began)

    Autotuner.__init__, JITFunction._do_compile = init_with_one, timed_compile
    return spent


def judge(subject: str, dtype: str, seeds: int, options: dict, progress) -> dict:
    """A kernel's failures on the first seed that has any, and a program that shows the first of them again."""
    mechanism, fn, written = kernel(subject)
    theirs = subject.removesuffix(FORWARD) in LIBRARIES
    options = options | ({"forward_only": True} if subject.endswith(FORWARD) else {})
    worst: dict[str, float] = {}
    cases = 0
    for seed in range(seeds):
        options["seed"] = seed
        report = check.kernel(mechanism, fn, dtype=DTYPES[dtype], **options, time_limit=200.0, progress=progress)
        cases += len({row.case for row in report.rows})
        for row in report.rows:
            if row.error is not None:  # JSON has no infinity
                worst[row.quantity] = max(worst.get(row.quantity, 0.0), min(row.ratio, 1e9))
        if not report.ok:
            break
    data = report.to_json()
    rows = [row for row in data["rows"] if row["status"] == "failed"]
    rows.sort(key=lambda row: row["kind"] in NO_NUMBER)  # what is run again and shrunk shows a wrong number, if any is
    kept = ("case", "quantity", "kind", "error", "budget", "message", "where")
    again = None
    if rows:
        said = {n: x for n, x in options.items() if n != "only"}
        given = ", ".join(f"{n}={x!r}" for n, x in said.items())
        given = f"{given},\n    only={rows[0]['case']!r}, dtype={DTYPES[dtype]}"
        again = "import torch\nfrom gla_ref import check\nfrom gla_ref"
        again += ".compat import libraries\n" if theirs else " import FORMS\n"
        again += f'print(check.kernel("{mechanism}", {written},\n    {given}))'
    smallest = report.reproduction
    if rows and not smallest and theirs:  # the full level shrinks what fails
        options |= {"level": "full", "only": rows[0]["case"], "time_limit": 200.0}
        smallest = check.kernel(mechanism, fn, dtype=DTYPES[dtype], **options).reproduction
    if theirs:
        imports = f"from gla_ref.compat import libraries\nfn = {written}"
        smallest = smallest.replace("# fn: the function that was checked", imports)
    return {
        "ok": report.ok,
        "claim": report.settings["supports"],
        "groups": tally(report),
        "cases": cases,
        "worst": worst,
        "failures": [{n: row[n] for n in kept} for row in rows],
        "diagnosis": data["diagnosis"],
        "not_covered": data["not_covered"],
        "reproduction": again,
        "smallest": smallest,
    }


def apart(subject: str, dtype: str, level: str, args: argparse.Namespace) -> dict:
    """One check in a process of its own: a record of what it found, or of why it did not finish."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--child", subject, "--dtypes", dtype, "--levels", level]
        command += ["--seeds", str(args.seeds), "--device", args.device, "--out", str(out)]
        with log.open("w") as sink:
            env = os.environ | {"OMP_NUM_THREADS": "1"}  # as many processes as cores
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=env)
            RUNNING.add(process)
            try:
                process.wait(args.seconds)
                message = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                message = f"not done after {args.seconds:.0f} s"
            RUNNING.discard(process)
        said = log.read_text(errors="replace").strip()[-400:]
        found = json.loads(out.read_text()) if out.exists() else {"ok": None}
    return {
        "subject": subject,
        "dtype": dtype,
        "level": level,
        "seeds": args.seeds,
        "device": args.device,
        "alone": args.alone,
        "commit": args.commit,
        "seconds": round(time.monotonic() - began, 1),
        **found,
        "message": None if "worst" in found else f"{message}: {said}",
    }


def line(r: dict) -> str:
    """A record for the terminal."""
    name = f"{r['subject']} {r['dtype']} {r['level']}"
    if r["message"]:
        said = r["message"].replace("\n", " ")[:100]
    else:
        said = f"{r['cases']} cases, {len(r['failures'])} failures"
        said += f", first {r['failures'][0]['case']}" if r["failures"] else ""
    compiling = f" ({r['compiling_s']:.1f} s compiling)" if r.get("compiling_s") else ""
    return f"{name:44} {VERDICTS[r['ok']]:6}{r['seconds']:7.1f} s{compiling}  {said}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--seeds", type=int, default=1, help="0, 1, ... of the inputs; default 1")
    parser.add_argument("--seconds", type=float, default=480, help="of one check")
    parser.add_argument("--seconds-in-all", type=float, help="then what runs is stopped")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="checks side by side")
    parser.add_argument("--device", default="cuda", help="cpu interprets our kernels, to try this")
    parser.add_argument("--libraries", action="store_true", help="other libraries' functions only")
    parser.add_argument("--out", type=Path, help="the JSON file to merge into")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_child(args: argparse.Namespace) -> None:
    """Make one check in this process, and write what it finds."""
    options = {"device": args.device, "level": args.levels[0]}
    spent = prepare_triton()
    found = judge(args.child, args.dtypes[0], args.seeds, options, partial(print, flush=True))
    found["compiling_s"] = round(sum(spent), 1)
    args.out.write_text(json.dumps(found, allow_nan=False))


def chosen(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The checks that are asked for, the longest first: subject, dtype, level."""
    there = [s for s in LIBRARIES if args.device.split(":")[0] in libraries.FUNCTIONS[s].devices]
    subjects = there if args.libraries else [s for s in SUBJECTS if s in there or s not in LIBRARIES]
    checks = [
        (s, dtype, level)
        for s in subjects
        if fnmatch(s, args.only or "*")
        for dtype in args.dtypes
        if s not in LIBRARIES or claimed(s, dtype)
        for level in args.levels
    ]
    return sorted(checks, key=lambda check: check[2] == "quick")


def records(check: tuple[str, str, str], args: argparse.Namespace) -> list[dict]:
    """The record of a check; if a library refuses all, perhaps for its backward pass, one of the forward pass too."""
    subject, *how = check
    found = [apart(subject, *how, args)]
    if subject in LIBRARIES and found[0].get("worst") == {}:
        found.append(apart(subject + FORWARD, *how, args))
    return found


def main() -> None:
    args = arguments()
    if args.child:
        return in_child(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("check_peers: expected an NVIDIA GPU, found none")

    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    environment = results.environment(gpu, PEERS)
    environment["float32_products"] = os.environ["TRITON_F32_DEFAULT"]
    args.commit = environment["commit"]
    print(json.dumps(environment), flush=True)
    path, checks = args.out or results.file(f"{gpu} check"), chosen(args)
    args.alone = len(checks) == 1  # else others ran beside each, and its seconds are theirs too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("check_peers: stopped"))
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(records, check, args): check for check in checks}
        try:
            for done in as_completed(list(waiting), args.seconds_in_all):
                del waiting[done]
                for record in done.result():
                    print(line(record), flush=True)
                made = [r | {"triton": environment["triton"]} for r in done.result()]
                results.merge(path, environment, "checks", made, KEY)
        except TimeoutError:
            print(f"not done after {args.seconds_in_all:.0f} s in all:")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                process.kill()
            for check in waiting.values():
                print("  not done:", *check, flush=True)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
