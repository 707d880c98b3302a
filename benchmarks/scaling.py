"""Compare several GPUs of a host with one in time: one text, its tokens split over them, forward and backward.

    python benchmarks/scaling.py

starts a process for each of two GPUs, then for each of four if the host has them (--ranks), and writes
results/<gpu>-scaling.json after each case, where a case replaces the older one of the same mechanism, length, exchange
and number of GPUs. Called again, it goes on where it was stopped: cases of this commit and this Triton are not measured
again. Shapes are (1, T, 16, 128) in bfloat16. One GPU of the same host walks the same text in the same run, as far as
its memory reaches (--alone): by the mechanism's own call, and in segments side by side, as a group of one rank walks
it; `alone` is the faster. Before the timing, o and every gradient of a short sequence are held against the float64
recurrence, beside one GPU's own error; `autocast` is how far the same step in autocast is from it.

`seconds` is the median of the slowest rank, between barriers; `replayed` is the same of a CUDA graph of the step, in
which the host launches nothing, `alone` and `alone_replayed` those of one GPU. In calls of their own, in which all
ranks wait for each other before they send, `maps_seconds` is the time of the maps, forward and backward, and
`exchange_seconds` that of the exchanges. `gather_seconds` is the time of one all-gather of as many bytes by NCCL, and
of next to none. `sent` are the bytes that a rank hands to torch.distributed, counted as it does so.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from gla_ref import FORMS, context_parallel, results
from gla_ref.mechanisms import MECHANISMS
from gla_ref.over_ranks.exchange import Ranks, all_gather

MEASURED = ("gla", "linear_attention", "gated_delta_rule", "kda")
KEY = ("mechanism", "tokens", "heads", "size", "ranks", "exchange")


def tokens(mechanism: str, T: int, H: int, D: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Draw q, k, v, gates, strengths and do, alike on every rank."""
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


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call, device: str, repeats: int) -> float:
    """The median of the slowest rank's time."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        sync(device)
        began = time.perf_counter()
        call()
        sync(device)
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
    torch.cuda.empty_cache()
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
    """A rank's piece of every tensor: the pieces are equal. A copy, since a view would keep the whole text."""
    return {n: y.chunk(size, 1)[rank].clone() for n, y in x.items()}


def stages(call, device: str, repeats: int) -> dict:
    """The times of a call's maps and exchanges, forward and backward, of the slowest rank, and the bytes sent."""
    ranks, took, measured = Ranks.of(None), Counter(), []

    @contextlib.contextmanager
    def timed(stage):
        if stage == "exchange":
            dist.barrier()
        sync(device)
        began = time.perf_counter()
        yield
        sync(device)
        took[stage] += time.perf_counter() - began

    usual, ranks.stage = ranks.stage, timed  # what maps and exchanges run in
    for _ in range(repeats + 2):
        took.clear()
        ranks.sent = 0
        dist.barrier()
        call()
        most = torch.tensor([took["maps"], took["exchange"], ranks.sent], dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        measured.append(most.tolist())
    ranks.stage = usual
    maps, exchange, sent = (statistics.median(x) for x in zip(*measured[2:], strict=True))
    return dict(maps_seconds=maps, exchange_seconds=exchange, sent=int(sent))


def worst(found: dict, exact: dict) -> float:
    """The largest error of o and the gradients, of all ranks."""
    errors = [(found[n] - y).abs().max() / y.square().mean().sqrt() for n, y in exact.items()]
    most = torch.stack(errors).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def gib(device: str) -> float | None:
    """The most GiB in use since the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def in_autocast(form, device: str):
    """The form, called in autocast."""

    def inside(*args, **options):
        with torch.autocast(device, torch.bfloat16):
            return form(*args, **options)

    return inside


class Mechanism:
    """A mechanism, its forms on several GPUs and on one, and their errors on every rank."""

    def __init__(self, args, name: str, device: str, alone: dist.ProcessGroup):
        """`alone` is the group of this rank alone."""
        self.args, self.name, self.device = args, name, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.form, forms = getattr(context_parallel, name), FORMS[name]
        own_call = forms["triton" if device == "cuda" else "chunkwise"]
        self.single = {"call": own_call, "segments": functools.partial(self.form, group=alone)}
        rank, size = dist.get_rank(), dist.get_world_size()
        x = tokens(name, args.check * size, 4, args.size, self.dtype, device)
        exact = step(forms["recurrent"], {n: y.double() for n, y in x.items()})
        self.errors, x_own, exact_own = {}, own(x, rank, size), own(exact, rank, size)
        error_alone = worst(step(own_call, x), exact)
        for way in args.exchange:
            found = step(self.form, x_own, exchange=way)
            inside = step(in_autocast(self.form, device), x_own, exchange=way)
            self.errors[way] = dict(
                error=worst(found, exact_own), error_alone=error_alone, autocast=worst(inside, found)
            )

    def timed(self, form, x, **options) -> dict:
        """seconds, replayed and gib of a step."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        call = functools.partial(step, form, x, **options)
        took = seconds(call, self.device, self.args.repeats)
        return dict(seconds=took, gib=gib(self.device), replayed=replayed(call, self.device, self.args.repeats))

    def records(self, T: int, ways: list[str]):
        """Yield the record of each exchange, the same on every rank."""
        args, rank, size = self.args, dist.get_rank(), dist.get_world_size()
        held = T if T <= args.alone else T // size
        x, single = tokens(self.name, held, args.heads, args.size, self.dtype, self.device), {}
        if T <= args.alone:
            single = {name: self.timed(form, x) for name, form in self.single.items()}
            x = own(x, rank, size)
        least = {n: min((y[n] for y in single.values() if y[n]), default=None) for n in ("seconds", "replayed", "gib")}
        for way in ways:
            record = dict(mechanism=self.name, tokens=T, heads=args.heads, size=args.size, ranks=size, exchange=way)
            record |= self.timed(self.form, x, exchange=way)
            record |= dict(alone=least["seconds"], alone_replayed=least["replayed"], gib_alone=least["gib"])
            record |= dict(single={name: (y["seconds"], y["replayed"]) for name, y in single.items()})
            record |= stages(functools.partial(step, self.form, x, exchange=way), self.device, args.repeats)
            record["gather_seconds"] = [gather_seconds(n, self.device, args.repeats) for n in (record["sent"] // 8, 1)]
            yield record | self.errors[way]


def line_of(r: dict) -> str:
    """A record in a line: how many times one GPU, and what is missing to the number of GPUs, in ms."""
    line = f"{r['mechanism']} {r['tokens']:,} {r['exchange']}: {1e3 * r['seconds']:.2f} ms"
    if r["alone"]:
        ideal = (r["alone_replayed"] or r["alone"]) / r["ranks"]
        host = r["seconds"] - (r["replayed"] or r["seconds"])
        wire = 2 * r["gather_seconds"][0]
        line += f", {r['alone'] / r['seconds']:.2f} times one GPU"
        line += f", as graphs {r['alone_replayed'] / r['replayed']:.2f}" if r["replayed"] else ""
        rest = r["seconds"] - ideal - host - wire
        shown = {
            "missing": r["seconds"] - ideal,
            "host": host,
            "exchange": wire,
            "rest": rest,
            "maps": r["maps_seconds"],
        }
        line += "; " + ", ".join(f"{name} {1e3 * x:.2f}" for name, x in shown.items())
    return f"{line}; error {r['error']:.2g} for {r['error_alone']:.2g}, autocast {r['autocast']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="processes, one a GPU; default: 2, and 4 if there are 4")
    parser.add_argument("--mechanisms", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 19, 1 << 16, 1 << 20])
    parser.add_argument("--exchange", nargs="+", default=["all-gather", "pipeline"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--check", type=int, default=1024, help="tokens a rank of the sequence that is checked")
    parser.add_argument("--alone", type=int, default=1 << 20, help="the longest sequence that one GPU walks as well")
    parser.add_argument("--out", type=Path, help="where to write; default results/<gpu>-scaling.json, of a CPU nowhere")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        for n in args.ranks or [n for n in (2, 4) if n == 2 or n <= torch.cuda.device_count()]:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            subprocess.run([*launch, *sys.argv, "--ranks", f"{n}"], check=True)
        return
    device, options = "cuda" if torch.cuda.is_available() else "cpu", {"timeout": timedelta(seconds=300)}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), **options)
    else:
        dist.init_process_group("gloo", **options)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    out = args.out or (results.file(f"{gpu} scaling") if gpu else None)
    environment, rank, size = results.environment(gpu), dist.get_rank(), dist.get_world_size()
    by = {n: environment[n] for n in ("commit", "triton")}  # of every record
    done = {tuple(r[n] for n in KEY) for r in (results.read(out, "scaling") if out else ()) if by.items() <= r.items()}
    alone = [dist.new_group([r]) for r in range(size)][rank]
    known = {}
    for T in args.tokens:
        for name in args.mechanisms:
            ways = [way for way in args.exchange if (name, T, args.heads, args.size, size, way) not in done]
            if not ways:
                continue
            if name not in known:
                known[name] = Mechanism(args, name, device, alone)
            for record in known[name].records(T, ways):
                if rank == 0:
                    print(line_of(record), flush=True)
                    if out:
                        results.merge(out, environment, "scaling", [record | by], KEY)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
