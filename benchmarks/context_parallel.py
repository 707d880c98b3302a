"""Check, then time: tokens split over the GPUs of a host, against one of them. Prints a line of JSON a case.

    torchrun --standalone --nproc-per-node 2 benchmarks/context_parallel.py gla gated_delta_rule --tokens 65536 524288

Before the timing, o and every gradient of a short sequence are held against the float64 recurrence. Times are medians
of forward and backward over --repeats, of the slowest rank, between barriers; one GPU walks the whole sequence by the
mechanism's own form. `sent` counts the bytes that the exchange hands to torch.distributed, forward and backward.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gla_ref import FORMS, context_parallel  # noqa: E402
from gla_ref.mechanisms import MECHANISMS  # noqa: E402


def tokens(mechanism: str, T: int, H: int, D: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """The same on every rank: q, k, v, gates, strengths and do."""
    rng, sizes = torch.Generator(device).manual_seed(T), dict(B=1, T=T, H=H, HV=H, K=D, V=D)
    x = {}
    for a in MECHANISMS[mechanism].arguments:
        if not a.optional:
            y = torch.randn([sizes[axis] for axis in a.axes.split()], generator=rng, device=device, dtype=dtype)
            x[a.name] = {"gate": F.logsigmoid(y) / 16, "strength": y.sigmoid()}.get(a.role, y)
    if "beta" in x:
        x["k"] = F.normalize(x["k"], dim=-1)
    return x | {"do": torch.randn(x["v"].shape, generator=rng, device=device, dtype=dtype)}


def step(form, x: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """o and the gradient of every argument."""
    leaves = {n: y.detach().requires_grad_() for n, y in x.items() if n != "do"}
    o, _ = form(**leaves, **options)
    return {"o": o.detach(), **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), x["do"]), strict=True))}


def seconds(call, device: str, repeats: int) -> float:
    """The median of the slowest rank's time."""
    found = []
    for _ in range(repeats + 2):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor(time.perf_counter() - began, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(took.item())
    return statistics.median(found[2:])


def own(x, rank, size):
    """The pieces are equal."""
    return {n: y.chunk(size, 1)[rank].contiguous() for n, y in x.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mechanisms", nargs="*", default=["gla"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--exchange", nargs="+", default=["all-gather", "pipeline"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--alone", type=int, default=1 << 20, help="the longest sequence that one GPU walks as well")
    args = parser.parse_args()
    device, rank = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    size, dtype = dist.get_world_size(), torch.bfloat16 if device == "cuda" else torch.float32
    for mechanism in args.mechanisms:
        form = getattr(context_parallel, mechanism)
        single = FORMS[mechanism]["triton" if device == "cuda" and "triton" in FORMS[mechanism] else "chunkwise"]
        for exchange in args.exchange:
            x = tokens(mechanism, 256 * size, 2, 64, dtype, device)
            exact = step(FORMS[mechanism]["recurrent"], {n: y.double() for n, y in x.items()})
            found = step(form, own(x, rank, size), exchange=exchange)
            error = max(
                ((found[n] - y).abs().max() / y.square().mean().sqrt()).item()
                for n, y in own(exact, rank, size).items()
            )
            print(json.dumps(dict(mechanism=mechanism, exchange=exchange, rank=rank, worst_error=error)), flush=True)
        for T in args.tokens:
            x = tokens(mechanism, T, args.heads, args.size, dtype, device)
            piece = own(x, rank, size)
            alone = None
            if T <= args.alone:
                alone = seconds(functools.partial(step, single, x), device, args.repeats)
            del x
            for exchange in args.exchange:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                took = seconds(functools.partial(step, form, piece, exchange=exchange), device, args.repeats)
                calls = list(context_parallel.Ranks.of(None).plans.values())
                record = dict(mechanism=mechanism, tokens=T, heads=args.heads, size=args.size, ranks=size)
                record |= dict(exchange=exchange, seconds=took, alone=alone, faster=alone and alone / took)
                record |= dict(sent=2 * calls[-1][0].bytes, segments=calls[-1][0].segments)
                if device == "cuda":
                    record |= dict(gpu=torch.cuda.get_device_name(), gib=torch.cuda.max_memory_allocated() / 2**30)
                if rank == 0:
                    print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
