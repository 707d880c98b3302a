"""Train small models in many processes on one GPU: does one die, and do equal trainings keep equal losses?

    python tools/stress_gpu.py                                # all mixers, 14 processes, 60 s
    python tools/stress_gpu.py --mixers gla --sizes recall

A kernel may be right in a million calls of a process that has the GPU to itself, and fail where the GPU changes from
one process to another (chapter 22 tells of one). So every process here trains a model of one mixer, with PyTorch's own
kernels between ours; two processes or more train the same model from the same seed, and the losses of their steps must
be equal to the last bit. One more process only multiplies matrices, and its products must not change either.

A training is a mixer and a size: `recall` as in gla_ref.experiments.mqar (K = 32, V = 64, 256 to 32 sequences at once),
`language` as in a language model (K = 128, V = 256, 2,048 tokens), `square` with K = V = 128, for which the delta rules
have kernels of their own, and `many` the same with many heads. The trainings take turns in as many rounds as all of
them need. The exit status is 0 only if no process died and all losses and products were equal and finite.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
PRODUCTS = "products"  # the size of the process that only multiplies matrices
SIZES = {  # the residual stream, heads, expand_k, and the shape of the tokens
    "recall": (128, 2, 0.5, None),
    "language": (1024, 4, 0.5, (4, 2048)),
    "square": (512, 4, 1.0, (4, 2048)),
    "many": (1024, 8, 1.0, (16, 1024)),
}
AT_ONCE = 10  # steps between two looks at the losses, which wait for the GPU
GRACE = 120  # seconds after its time in which a process must have ended


# One process.


def model_and_batches(mixer: str, size: str, device: str):
    """A model, and a function of the step that returns its loss."""
    import torch

    from gla_ref.experiments import mqar
    from gla_ref.experiments.runs import dice
    from gla_ref.models import Config, LanguageModel

    tiny = device == "cpu"
    settings = mqar.Settings.tiny() if tiny else mqar.Settings()
    width, heads, expand_k, shape = (16, 2, 0.5, (2, 32)) if tiny else SIZES[size]
    wide = {} if mixer == "softmax" else {"expand_k": expand_k}
    config = Config(settings.vocab_size, width, num_hidden_layers=2, num_heads=heads, mixer=mixer, **wide)
    model = LanguageModel(config).to(device)
    if size == "recall":
        task = mqar.Mqar(settings, 0, device)
        return model, lambda step: task.loss(model, step)

    def loss(step: int):
        rng = dice(device, "stress", 0, step)
        return model.loss(torch.randint(settings.vocab_size, shape, generator=rng, device=device))[0]

    return model, loss


def train(mixer: str, size: str, device: str, until: float) -> None:
    """Print the losses of all steps as the bits of float32, AT_ONCE steps a line, then the compiled kernels' names."""
    import torch

    from gla_ref.kernels.launch import program

    torch.manual_seed(0)
    model, loss = model_and_batches(mixer, size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    step, late = 0, False
    while not late:
        losses = []
        for _ in range(AT_ONCE):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                value = loss(step)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(value.detach().float())
            step += 1
        tell(torch.stack(losses))
        late = time.time() >= until
    functions = {variant[0] for variant in program.COMPILED}
    print(json.dumps({"kernels": sorted(f"{f.__module__.split('kernels.')[-1]}.{f.__name__}" for f in functions)}))


def multiply(device: str, until: float) -> None:
    """Print a number made of all of a product, which is the same product every time."""
    import torch

    torch.manual_seed(0)
    n, dtype = (64, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    signs = torch.randn(n, n, device=device)
    late = False
    while not late:
        tell(torch.stack([((a @ b).float() * signs).sum() for _ in range(AT_ONCE)]))
        late = time.time() >= until


def tell(losses) -> None:
    """One line; reading the losses waits for the GPU, so that a fault is noticed here at the latest."""
    import torch

    print(json.dumps(losses.cpu().view(torch.int32).tolist()), flush=True)


# All processes.


class Training(NamedTuple):
    """A mixer at a size: the work of a process."""

    mixer: str
    size: str


class Process(NamedTuple):
    """The end of a process: its losses, compiled kernels, exit status and error message."""

    training: Training
    losses: tuple[int, ...]
    kernels: tuple[str, ...]
    status: int
    error: str


def judged(processes: list[Process]) -> list[dict]:
    """A record for every training: how many processes died, and whether the losses of all steps that several made are
    equal and finite."""
    records = []
    for training in dict.fromkeys(p.training for p in processes):
        those = [p for p in processes if p.training == training]
        known = [p.losses for p in those if p.losses]
        alone = len(known) < 2 and training.size != PRODUCTS
        shared = min((len(x) for x in known), default=0)
        equal = bool(shared) and len({x[:shared] for x in known}) == 1
        if training.size == PRODUCTS:
            equal = len({x for losses in known for x in losses}) == 1
        records.append(
            {
                "mixer": training.mixer,
                "size": training.size,
                "processes": len(those),
                "steps": sum(len(p.losses) for p in those),
                "compared": 0 if alone else shared,
                "died": sum(p.status != 0 for p in those),
                "equal": equal,
                "finite": all(x & 0x7F800000 != 0x7F800000 for losses in known for x in losses),
                "kernels": sorted({name for p in those for name in p.kernels}),
                "errors": sorted({p.error for p in those if p.status}),
            }
        )
    return records


def is_right(record: dict) -> bool:
    """Whether no process died and equal trainings stayed equal."""
    return not record["died"] and record["equal"] and record["finite"] and record["compared"] > 0


def rounds_of(trainings: list[Training], processes: int) -> list[list[Training]]:
    """The trainings that run side by side, each at least twice, all places taken."""
    each = max(1, processes // 2)
    groups = [trainings[i : i + each] for i in range(0, len(trainings), each)]
    return [[group[i % len(group)] for i in range(processes)] for group in groups]


def start(training: Training, until: float, args: argparse.Namespace, log) -> subprocess.Popen:
    command = [sys.executable, __file__, "--process", *training, "--until", str(until), "--device", args.device]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def run_round(trainings: list[Training], seconds: float, args: argparse.Namespace) -> list[Process]:
    """All processes of a round; one that has not ended in time is killed, and counts as dead."""
    until, found = time.time() + seconds, []
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(Path(folder, str(i)), "w+") for i in range(len(trainings))]
        running = [start(t, until, args, log) for t, log in zip(trainings, logs, strict=True)]
        for training, process, log in zip(trainings, running, logs, strict=True):
            try:
                status = process.wait(max(0.0, until + GRACE - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            log.seek(0)
            found.append(read(training, log.read(), status))
            log.close()
    return found


def read(training: Training, printed: str, status: int) -> Process:
    losses, kernels, error = [], (), ""
    for line in filter(str.strip, printed.splitlines()):
        try:
            told = json.loads(line)
        except ValueError:
            if "Error" in line or not error:
                error = line.strip()[:200]
            continue
        if isinstance(told, list):
            losses += told
        elif isinstance(told, dict):
            kernels = tuple(told["kernels"])
    return Process(training, tuple(losses), kernels, status, error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mixers", nargs="+", help="of gla_ref.models.MIXERS; all")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--processes", type=int, default=14, help="training processes; one more multiplies matrices")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all rounds together")
    parser.add_argument("--record", action="store_true", help="write what was found to benchmarks/results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models")
    parser.add_argument("--process", nargs=2, metavar=("MIXER", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.process:
        mixer, size = args.process
        multiply(args.device, args.until) if size == PRODUCTS else train(mixer, size, args.device, args.until)
        return 0

    import torch
    from tabulate import tabulate

    from gla_ref import results
    from gla_ref.models import MIXERS

    if unknown := set(args.mixers or ()) - set(MIXERS):
        parser.error(f"--mixers: expected some of {', '.join(MIXERS)}, got {', '.join(sorted(unknown))}")
    if args.processes < 2:
        parser.error(f"--processes: expected at least 2, which are compared, got {args.processes}")
    if args.seconds <= 0:
        parser.error(f"--seconds: expected a positive number, got {args.seconds:g}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected an NVIDIA GPU, found none")
    trainings = [Training(mixer, size) for size in args.sizes for mixer in args.mixers or MIXERS]
    rounds, processes = rounds_of(trainings, args.processes), []
    for group in rounds:
        processes += run_round([*group, Training("none", PRODUCTS)], args.seconds / len(rounds), args)
    records = judged(processes)
    columns = ("mixer", "size", "processes", "steps", "compared", "died", "equal", "finite")
    print(tabulate([[r[n] for n in columns] for r in records], headers=columns, tablefmt="plain"))
    for record in records:
        print(f"{record['mixer']} {record['size']}: {' '.join(record['kernels'])}")
        print(*(f"  died of: {error}" for error in record["errors"]), sep="\n", end="\n" if record["errors"] else "")
    if args.record:
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        about = results.environment(gpu)
        kept = [{"commit": about["commit"], "seconds": args.seconds} | r for r in records]
        results.merge(results.file(f"{gpu} stress"), about, "stress", kept, ("commit", "mixer", "size"))
    wrong = [r for r in records if not is_right(r)]
    print(f"{len(records) - len(wrong)} of {len(records)} are right after {args.seconds:g} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
