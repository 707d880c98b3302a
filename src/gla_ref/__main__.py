"""`python -m gla_ref`: check a kernel of your own, and what is installed ("Check your kernel").

`check gla my_module:my_fn` says whether a function is right, and if not, where and why.
`check --museum` runs bugs that public libraries shipped: is each caught and named here?
`doctor` says what is installed here, which kernels would run, and on a GPU whether they are right.
Exit status: 0 right, 1 wrong (also where the kernel that is checked ends or breaks its process), 2 cannot run as asked,
or an error of the check itself.
"""

import argparse
import importlib.util
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import distributed as dist

from ._commands import apart
from .mechanisms import MECHANISMS

START = timedelta(minutes=5)  # that ranks wait for one another before the first call
EVERY = 10.0  # seconds from one line about progress to the next
LONGEST = 1e9  # seconds; a thread cannot wait much longer


def load(name: str):
    """The function that `module:function` or `path/file.py:function` names; modules of the current folder count."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ValueError(f"kernel: expected MODULE:FUNCTION or FILE.py:FUNCTION, got {name}")
    file = Path(where).resolve() if where.endswith(".py") else None
    if file and not (file.is_file() and file.stem.isidentifier()):
        raise ValueError(f"kernel: expected a file that Python can import, got {where}")
    folder = str(file.parent) if file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if file and (other := importlib.util.find_spec(file.stem).origin) != str(file):
        raise ValueError(f"kernel: expected a file whose name no other module has, got {where}, and there is {other}")
    try:
        fn = pkgutil.resolve_name(f"{file.stem if file else where}:{function}")
    except (Exception, SystemExit) as reason:  # a stranger's module may raise anything
        raise ValueError(f"kernel: cannot load {name}: {type(reason).__name__}: {reason}") from reason
    if not callable(fn):
        raise ValueError(f"kernel: expected a function, got {name} of type {type(fn).__name__}")
    return fn


def writable(path: str) -> None:
    """Check that a file can be written.

    Raises:
        ValueError: no file can be written there.
    """
    there = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path) or not os.access(there, os.W_OK):
        raise ValueError(f"--json: expected a file that can be written, got {path!r}")


def check_kernel(args: argparse.Namespace) -> int:
    """The report of :func:`gla_ref.check.kernel`, printed."""
    from . import check

    last_line = time.monotonic()

    def progress(done: int, total: int, name: str):
        """A bar on a terminal; elsewhere, such as in a log, a line every ten seconds."""
        nonlocal last_line
        apart.at(name or "end")
        if sys.stderr.isatty():
            bar = ("#" * (30 * done // total)).ljust(30)
            print(f"\r[{bar}] {done}/{total} {name:34}", end="", file=sys.stderr)
            print(end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif name and time.monotonic() - last_line > EVERY:
            last_line = time.monotonic()
            print(f"{done} of {total} cases{', next' * (done < total)}: {name}", file=sys.stderr, flush=True)

    if args.museum:
        return museum(args)
    if args.kernel is None and not (args.list and args.mechanism):
        raise ValueError("expected MECHANISM MODULE:FUNCTION, or --museum; or MECHANISM --list")
    if args.json is not None:
        writable(args.json)
    if not args.ranks:
        check.device_of(args.device)
    claimed = {n: x for n in SUPPORTS if (x := getattr(args, f"claim_{n}")) is not None}
    others = {"command", "function", "mechanism", "kernel", "json", "github", "ranks", "museum", "list"}
    others |= {f"claim_{n}" for n in SUPPORTS}
    options = {n: x for n, x in vars(args).items() if n not in others}
    options |= {"supports": claimed or None, "waive": dict(args.waive), "progress": progress}
    if args.only and len(args.only) == 1:
        (options["only"],) = args.only
    if args.list:
        return listed(args, options)
    apart.at("import")
    apart.limit(args.time_limit)
    fn = load(args.kernel)
    apart.beat(args.time_limit)
    if not args.ranks:
        return told(args, check.kernel(args.mechanism, fn, **options, journal=Journal() if apart.folder else None), fn)
    with over_ranks(args) as options["device"]:
        subject = check.OverRanks(fn, device=options["device"], layout=args.layout)
        if subject.rank:
            subject.serve()
            return 0
        status = told(args, check.kernel(args.mechanism, subject, **options), fn)
        subject.close()
        if subject.busy and apart.folder:  # a rank hangs, and nothing that waits for it would end
            apart.finish(status)
        return status


class Journal(dict):
    """The rows of each case, of all the processes of a check; one that a case has broken ends, and the next goes on."""

    def __init__(self):
        from .check import Row

        super().__init__({case: [Row(**row) for row in rows] for case, rows in apart.kept().items()})

    def __setitem__(self, case: str, rows: list) -> None:
        super().__setitem__(case, rows)
        apart.keep(case, [asdict(row) for row in rows])
        if any(row.kind == "breaks" for row in rows):
            os._exit(1)


def listed(args: argparse.Namespace, options: dict) -> int:
    """Print the names of the cases that these options leave; of a kernel its own claim counts, too."""
    from . import check
    from .check._claims import Claim, dtype_of

    fn = load(args.kernel) if args.kernel else None
    claim = Claim.of(options["supports"] or getattr(fn, "supports", None))
    how = (options[n] for n in ("level", "only", "skip", "seed"))
    *_, cases = check.selected(args.mechanism, claim, dtype_of(args.dtype), *how)
    print("\n".join(case.name for case in cases))  # in one piece, so that `| head` is no error
    return 0


def museum(args: argparse.Namespace) -> int:
    """Every room of :mod:`gla_ref.check.museum`, a line each; with `--json` also the record that the book reads."""
    from . import results
    from .check.museum import ROOMS, visit

    if args.list:
        print("\n".join(f"{room.number:2} {room.title}" for room in ROOMS))
        return 0
    if args.json is not None:
        writable(args.json)
    visits, start = [], time.perf_counter()
    for room in ROOMS:
        visits.append(visit(room, args.seed))
        print(visits[-1], flush=True)
    good = sum(it.ok for it in visits)
    rest = f"{time.perf_counter() - start:.0f} s"
    print(f"{good} of {len(visits)} rooms pass an ordinary test, and are caught and named; {rest}")
    if args.json:
        results.write(Path(args.json), results.environment(None), "museum", [it.to_json() for it in visits])
    return 0 if good == len(visits) else 1


@contextmanager
def over_ranks(args: argparse.Namespace):
    """The process group that torchrun has asked for, and this rank's device; calls give up after the time limit."""
    from . import check

    if not dist.is_torchelastic_launched():
        line = f"torchrun --nproc-per-node {args.ranks} -m gla_ref check ..."
        raise ValueError(f"--ranks: expected to be started by {line}, which was not so")
    cuda = args.device.startswith("cuda")
    device = check.device_of(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else args.device)
    if cuda:
        torch.cuda.set_device(device)
    # ranks may be minutes apart until they have started; only the calls of the kernel have a time limit
    store, rank, size = next(dist.rendezvous("env://", timeout=START))
    store.set(f"started {rank}", "")
    store.wait([f"started {r}" for r in range(size)], START)
    limit = timedelta(seconds=args.time_limit / 2)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
    if dist.get_world_size() != args.ranks:
        raise ValueError(f"--ranks: expected {dist.get_world_size()}, as torchrun has started, got {args.ranks}")
    try:
        yield str(device)
    finally:
        dist.destroy_process_group()


def told(args: argparse.Namespace, report, fn) -> int:
    """Print a report, write it where it was asked for; the exit status."""
    print(report)
    if args.github:
        from .check._words import annotations, source

        print(*annotations(report, source(fn)), sep="\n")
    if args.json:
        text = json.dumps(report.to_json(), indent=1)
        try:
            Path(args.json).write_text(text)
        except OSError as reason:
            raise ValueError(f"--json: cannot write {args.json}: {reason.strerror}") from reason
    return 0 if report.ok else 2 if report.verdict == "NOTHING COVERED" else 1


def examine(args: argparse.Namespace) -> int:
    """See :mod:`gla_ref._commands.doctor`."""
    from ._commands.doctor import doctor

    return doctor()


SUPPORTS = ("K", "V", "multiples", "packed", "state", "gradient", "min_gate")  # the options that make a claim


def sizes(text: str) -> tuple[int, ...]:
    return tuple(size(part) for part in text.split(","))


def multiples(text: str) -> dict[str, int]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name: size(n) for name, _, n in pairs}


def waiver(text: str) -> tuple[str, str]:
    quantity, sign, reason = text.partition("=")
    if not sign or not reason:
        raise argparse.ArgumentTypeError(f"expected QUANTITY=REASON, got {text}")
    return quantity, reason


CALLED = (
    "It is called as o, state = FUNCTION(q, k, v[, g][, beta], scale=, initial_state=, cu_seqlens=) on"
    " [B, T, H, D];"
    " what its signature lacks is reported as not covered."
)


def add_check(commands) -> None:
    about = "is MODULE:FUNCTION right, and if not, where and why?"
    it = commands.add_parser("check", help=about, description=f"{about} {CALLED}")
    it.set_defaults(function=check_kernel)
    it.add_argument("mechanism", nargs="?", choices=tuple(MECHANISMS), help="of the kernel")
    it.add_argument("kernel", nargs="?", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    it.add_argument("--museum", action="store_true", help="instead of a kernel: bugs that shipped, in a minute or two")
    it.add_argument("--device", default="cpu", help="where the inputs lie: cpu, cuda, cuda:1; default cpu")
    it.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of q, k, v, g; default %(default)s"
    )
    level = it.add_mutually_exclusive_group()
    for name, what in (
        ("quick", "less than a minute on a CPU, two with wide heads claimed; the default"),
        ("full", "also T to 8192, K to 256, V to 512, a random search, the smallest failure"),
    ):
        level.add_argument(f"--{name}", dest="level", action="store_const", const=name, help=what)
    it.set_defaults(level="quick")
    it.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help='cases of such names only: --only "gate*"; may be given several times',
    )
    it.add_argument("--skip", metavar="PATTERN", action="append", default=[], help="leave cases of such names out")
    it.add_argument(
        "--waive",
        metavar="QUANTITY=REASON",
        action="append",
        type=waiver,
        default=[],
        help='its failures do not count, but are listed: --waive "dg=issue 7", or "dg@gate -20*=issue 7"',
    )
    it.add_argument("--list", action="store_true", help="print the names of these cases (or rooms), and run none")
    it.add_argument("--fail-on-not-covered", action="store_true", help="wrong, too, if anything is not covered")
    it.add_argument("--seed", type=int, default=0, help="of the random inputs, default %(default)s")
    claim = it.add_argument_group("what the kernel claims, if not everything; the cases are made so")
    for name in "KV":
        claim.add_argument(
            f"--{name}", dest=f"claim_{name}", type=sizes, metavar="N,N", help=f"the sizes {name} that it takes: 64,128"
        )
    claim.add_argument(
        "--multiples",
        dest="claim_multiples",
        type=multiples,
        metavar="T=N",
        help="of which T, K or V must be: T=64,K=16",
    )
    for name, what in (("packed", "packed sequences"), ("state", "initial states"), ("gradient", "a backward pass")):
        claim.add_argument(
            f"--no-{name}", dest=f"claim_{name}", action="store_false", default=None, help=f"without {what}"
        )
    claim.add_argument("--min-gate", dest="claim_min_gate", type=log_gate, metavar="G", help="no log gate is below: -5")
    it.add_argument("--layout", choices=("bthd", "bhtd"), default="bthd", help="of q, k, v, g and o")
    it.add_argument("--state", choices=("kv", "vk"), default="kv", help="last axes of states")
    it.add_argument(
        "--gate",
        choices=("log", "log2", "alpha"),
        default="log",
        help="what g holds: natural log, log2, or the decay itself",
    )
    it.add_argument("--forward-only", action="store_true", help="call it without gradients, which it does not have")
    it.add_argument(
        "--time-limit",
        type=seconds,
        default=60.0,
        metavar="S",
        help="a call may take so many seconds, default %(default)s",
    )
    it.add_argument(
        "--ranks",
        type=size,
        metavar="N",
        help="the kernel's tokens are split over N ranks: torchrun --nproc-per-node N -m gla_ref check ... --ranks N",
    )
    it.add_argument("--github", action="store_true", help="print annotations for GitHub Actions, too")
    it.add_argument(
        "--json", metavar="FILE", help="write the report there too (its schema: gla_ref.check.Report.to_json)"
    )


def number(text: str, of: type, holds: Callable[[float], bool], expected: str):
    """Parse a number for which a condition holds."""
    try:
        if holds(value := of(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")


def size(text: str) -> int:
    return number(text, int, lambda n: n > 0, "a positive integer")


def seconds(text: str) -> float:
    return number(text, float, lambda s: 0 < s <= LONGEST, f"seconds, more than 0 and at most {LONGEST:g}")


def log_gate(text: str) -> float:
    return number(text, float, lambda g: g <= 0, "a log gate, at most 0")


class Refused(SystemExit):
    """The status of a command that cannot run as asked, after the sentence that says why."""


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise Refused(2)


def parser() -> Parser:
    parser = Parser("python -m gla_ref", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_check(commands)
    about = "what is installed here, which kernels would run, and are they right?"
    commands.add_parser("doctor", help=about, description=about).set_defaults(function=examine)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command in this process; its exit status.

    Raises:
        SystemExit: it cannot run as asked.
    """
    it = parser()
    args = it.parse_args(argv)
    try:
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy; NaN will be reported as wrong
            return args.function(args)
    except (TypeError, ValueError) as reason:
        it.error(str(reason))


def shell(argv: list[str]) -> int:
    """The same for a shell: a kernel that is checked runs in a child, since it may end its process.

    A letter that the shell's encoding lacks, such as α in cp1252, is printed as its number.
    """
    sys.stdout.reconfigure(errors="backslashreplace")
    it = parser()
    args = it.parse_args(argv)
    if apart.begin():
        try:
            status = main(argv)
        except Refused as refused:
            status = refused.code
        except Exception:  # the kit's own, or of a device that the kernel broke: then another child goes on
            from .check._run import broken

            if broken(torch.device(args.device)):
                raise
            traceback.print_exc()
            print(f"{it.prog}: error: in the check itself, not in the kernel", file=sys.stderr)
            status = 2
        apart.finish(status)
    if args.command != "check" or args.kernel is None:
        return main(argv)
    try:
        return apart.run(argv, args.kernel, args.time_limit, again=not args.ranks)
    except OSError as reason:
        it.error(f"cannot start a process: {reason}")


if __name__ == "__main__":
    sys.exit(shell(sys.argv[1:]))
