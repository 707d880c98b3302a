"""Train a language model with its sequences split over the GPUs of a host, and on one of them.

    torchrun --standalone --nproc-per-node 2 benchmarks/split_training.py --tokens 65536 --steps 100

The same weights, the same text and the same steps three times: over all ranks (in DDP, as one would), on one, and on
one from weights that differ in their last bit, which shows how far apart rounding alone takes two curves. The text is
this book's own, its chapters and its source, byte by byte. `apart` is the largest difference between two curves.
Prints a line of JSON; on GPUs it also goes into results/<gpu>-split-training.json.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gla_ref import results
from gla_ref.models import Config, LanguageModel
from gla_ref.over_ranks.language_model import LossOverRanks

SIZES = {  # 41 million parameters, and what a CPU does in seconds
    "40M": {"hidden_size": 640, "num_hidden_layers": 8, "num_heads": 5},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2},
}
WARM = 3  # steps that are not timed
KEY = ("size", "mixer", "tokens", "ranks")


def text() -> torch.Tensor:
    """The bytes of the chapters and of the source, in the order of their names."""
    files = sorted([*ROOT.glob("book/*.md"), *ROOT.glob("src/gla_ref/**/*.py")])
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)))


def train(loss, parameters, batches, device: str) -> tuple[list[float], float]:
    """(the loss of every step, seconds of a step, without the first few)."""
    optimizer, curve = torch.optim.AdamW(parameters, 1e-3, fused=device == "cuda"), []
    for n, tokens in enumerate(batches):
        if n == WARM:
            curve[-1].item()  # waits for the GPU
            began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(value.detach())
    curve = [x.item() for x in curve]
    return curve, (time.perf_counter() - began) / (len(batches) - WARM)


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="40M")
    parser.add_argument("--mixer", default="gla")
    parser.add_argument("--tokens", type=int, default=65536, help="of the sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--short-conv", action="store_true")
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps: expected more than {WARM}, which are not timed, got {args.steps}")
    device, rank = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # the others wait as long as one rank trains alone
    options = {"timeout": timedelta(minutes=30)}
    if device == "cuda":
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), **options)
    else:
        dist.init_process_group("gloo", **options)
    ranks, words = dist.get_world_size(), text().to(device)
    config = Config(vocab_size=256, mixer=args.mixer, use_short_conv=args.short_conv, **SIZES[args.size])
    rng = torch.Generator().manual_seed(0)
    starts = torch.randint(len(words) - args.tokens, (args.steps,), generator=rng).tolist()
    batches = [words[a : a + args.tokens][None] for a in starts]

    def model() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(config).to(device)

    def reset() -> None:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def gib() -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None

    reset()
    split = DistributedDataParallel(LossOverRanks(model()))
    over_ranks, seconds = train(split, split.parameters(), [x.chunk(ranks, 1)[rank] for x in batches], device)
    memory = gib()
    del split
    if rank == 0:
        reset()
        alone = model()
        record = dict(size=args.size, parameters=sum(p.numel() for p in alone.parameters()), mixer=args.mixer)
        record |= dict(tokens=args.tokens, steps=args.steps, ranks=ranks)
        one_rank, seconds_alone = train(lambda x: alone.loss(x)[0], alone.parameters(), batches, device)
        record |= dict(gib=memory, gib_alone=gib())
        shaken = model()
        with torch.no_grad():
            for p in shaken.parameters():
                p.mul_(1 + 2**-23)
        noise, _ = train(lambda x: shaken.loss(x)[0], shaken.parameters(), batches, device)
        record |= dict(tokens_a_second=args.tokens / seconds, tokens_a_second_alone=args.tokens / seconds_alone)
        record |= dict(apart=apart(over_ranks, one_rank), apart_by_rounding=apart(noise, one_rank))
        record |= dict(curve=over_ranks, curve_alone=one_rank)
        print(json.dumps(record), flush=True)
        if device == "cuda":
            gpu = torch.cuda.get_device_name()
            out = results.file(f"{gpu} split training")
            results.merge(out, results.environment(gpu), "trainings", [record], KEY)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
