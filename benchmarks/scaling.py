"""Compare several GPUs of a host with one in time: one text, its tokens split over them, forward and backward.

    python benchmarks/scaling.py --ranks 4

starts a process for each GPU, and writes results/<gpu>-scaling.json, where a case replaces the older one of the same
mechanism, length, exchange and number of GPUs. Shapes are (1, T, 16, 128) in bfloat16. One GPU of the same host walks
the same text in the same run, by the mechanism's own form, as far as its memory reaches (--alone). Before the timing, o
and every gradient of a short sequence are held against the float64 recurrence, beside one GPU's own error.

`seconds` is the median of the slowest rank, between barriers; `replayed` is the same of a CUDA graph of the step, in
which the host launches nothing, `alone` and `alone_replayed` those of one GPU. `exchange_seconds` is the time of the
exchanges alone, forward and backward, measured in calls of their own, in which all ranks wait for each other before
they send; `gather_seconds` that of one all-gather of as many bytes by NCCL, and of next to none. `sent` are the bytes
that a rank hands to torch.distributed, counted as it does so.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import distributed as dist

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from gla_ref import FORMS, context_parallel, results
from gla_ref.mechanisms import MECHANISMS as KINDS
from gla_ref.over_ranks.exchange import Exchange, Ranks, all_gather

MECHANISMS = ("gla", "linear_attention", "gated_delta_rule")
KEY = ("mechanism", "tokens", "heads", "size", "ranks", "exchange")


def tokens(mechanism: str, T: int, H: int, D: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Draw q, k, v, gates, strengths and do, alike on every rank."""
    rng, sizes = torch.Generator(device).manual_seed(T), dict(B=1, T=T, H=H, HV=H, K=D, V=D)
    x = {}
    for a in KINDS[mechanism].arguments:
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
    times = []
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
        times.append(took.item())
    return statistics.median(times[2:])


def replayed(call, device: str, repeats: int) -> float | None:
    """`seconds` of a CUDA graph of the call; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.empty_cache()  # the graph has memory of its own
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        call()
    replayed = seconds(graph.replay, device, repeats)
    graph.reset()
    torch.cuda.empty_cache()
    return replayed


def gather_seconds(numbers: int, device: str, repeats: int) -> float:
    """Seconds of an all-gather of so many float32 from each rank."""
    x = torch.zeros(numbers, device=device)
    every_rank = x.new_empty(dist.get_world_size() * numbers)
    return seconds(lambda: all_gather(every_rank, x), device, repeats)


def own(x, rank, size):
    """The pieces are equal."""
    return {n: y.chunk(size, 1)[rank].contiguous() for n, y in x.items()}


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def exchanged(call, device: str, repeats: int) -> tuple[float, int]:
    """(seconds of the exchanges of a forward and backward pass, the median of the slowest rank; bytes sent)."""
    right, took, sent, found = Exchange.entering, [], [], []

    def timed(self, maps, backwards=False):
        sync(device)
        dist.barrier()
        began = time.perf_counter()
        states = right(self, maps, backwards)
        sync(device)
        took.append(time.perf_counter() - began)
        return states

    def counted(name):
        method = getattr(Ranks, name)

        def wrapped(self, x, *to):
            sent.append(x.nbytes)
            return method(self, x, *to)

        return mock.patch.object(Ranks, name, wrapped)

    with mock.patch.object(Exchange, "entering", timed), counted("all_gather"), counted("send"):
        for _ in range(repeats + 2):
            took.clear()
            sent.clear()
            call()
            slowest = torch.tensor(sum(took), device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found.append(slowest.item())
    most = torch.tensor(sum(sent), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return sorted(found[2:])[repeats // 2], int(most)


def worst(found: dict, exact: dict) -> float:
    """The largest error of o and the gradients, of all ranks."""
    errors = [(found[n] - y).abs().max() / y.square().mean().sqrt() for n, y in exact.items()]
    most = torch.stack(errors).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def measure(args, mechanism: str, device: str) -> list[dict]:
    """The records of one mechanism, the same on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    form, forms = getattr(context_parallel, mechanism), FORMS[mechanism]
    single = forms["triton" if device == "cuda" and "triton" in forms else "chunkwise"]
    records = []
    x = tokens(mechanism, args.check * size, 2, min(64, args.size), dtype, device)
    exact = step(forms["recurrent"], {n: y.double() for n, y in x.items()})
    error_alone = worst(step(single, x), exact)
    errors = {way: worst(step(form, own(x, rank, size), exchange=way), own(exact, rank, size)) for way in args.exchange}
    for T in args.tokens:
        alone = memory_alone = alone_replayed = None
        x = tokens(mechanism, T if T <= args.alone else T // size, args.heads, args.size, dtype, device)
        if T <= args.alone:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            call = functools.partial(step, single, x)
            alone, memory_alone = seconds(call, device, args.repeats), gib(device)
            alone_replayed = replayed(call, device, args.repeats)
            x = own(x, rank, size)
        for way in args.exchange:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            call = functools.partial(step, form, x, exchange=way)
            record = dict(mechanism=mechanism, tokens=T, heads=args.heads, size=args.size, ranks=size, exchange=way)
            record |= dict(seconds=seconds(call, device, args.repeats), alone=alone)
            record |= dict(gib=gib(device), gib_alone=memory_alone)
            record |= dict(replayed=replayed(call, device, args.repeats), alone_replayed=alone_replayed)
            record["exchange_seconds"], record["sent"] = exchanged(call, device, args.repeats)
            record["gather_seconds"] = [gather_seconds(n, device, args.repeats) for n in (record["sent"] // 8, 1)]
            record |= dict(error=errors[way], error_alone=error_alone)
            if rank == 0:
                print(json.dumps(record), flush=True)
            records.append(record)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, required=True, help="GPUs of this host, or processes of a CPU")
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS, choices=MECHANISMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << n for n in range(16, 23)])
    parser.add_argument("--exchange", nargs="+", default=["all-gather", "pipeline"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--check", type=int, default=256, help="tokens a rank of the sequence that is checked")
    parser.add_argument("--alone", type=int, default=1 << 20, help="the longest sequence that one GPU walks as well")
    parser.add_argument(
        "--out", type=Path, help="where to write; default: results/<gpu>-scaling.json, of a CPU nowhere"
    )
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        return subprocess.run([*launch, *sys.argv], check=False).returncode
    device, options = "cuda" if torch.cuda.is_available() else "cpu", {"timeout": timedelta(seconds=300)}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), **options)
    else:
        dist.init_process_group("gloo", **options)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    out = args.out or (results.file(f"{gpu} scaling") if gpu else None)
    for mechanism in args.mechanisms:
        records = measure(args, mechanism, device)
        if dist.get_rank() == 0 and out:
            results.merge(out, results.environment(gpu), "scaling", records, KEY)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
