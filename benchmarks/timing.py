"""How the bench takes a time: on the GPU by events, on the host, and in memory. run.py uses it."""

import contextlib
import cProfile
import pstats
import re
import signal
import statistics
import time

import torch

from gla_ref import results

BATCH = 10  # calls queued at a time: the queue holds about a thousand launches, and a call may have dozens


class Late(Exception):
    """A call took longer than it may."""


@contextlib.contextmanager
def limit(seconds: float):
    """Raise Late in this thread after so many seconds: bounds compilers and autotuners, not a hung GPU."""

    def late(*_):
        raise Late(f"did not return within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def clocks() -> dict[str, int]:
    """Clocks in MHz, just after the work that they are reported for."""
    line = results.command("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits")
    return dict(zip(("sm_mhz", "memory_mhz"), map(int, re.findall(r"\d+", line)), strict=False))


def samples(calls: list, reps: int) -> list[float]:
    """Milliseconds of each of `reps` calls, taken in rotation, by CUDA events.

    The GPU first sleeps, so that the calls are queued before it reaches them: what is timed is the
    GPU, not Python's launches. A call that waits for the GPU itself still pays for that.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    calls[0]()
    launch_s = min(time.perf_counter() - began, 0.02)
    times = []
    while len(times) < reps:
        n = min(BATCH, reps - len(times))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9 * (0.005 + 2 * n * launch_s)))  # cycles of at most 2 GHz
        for i, (start, stop) in enumerate(events, len(times)):
            start.record()
            calls[i % len(calls)]()
            stop.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(stop) for start, stop in events]
    return times


def median_ms(calls: list, budget_s: float = 0.5) -> tuple[float, list[float]]:
    """The median of 7 to 50 samples, as many as fit into the budget, and all of them."""
    once = max(min(samples(calls, 3)), 1e-3)
    times = samples(calls, int(min(50, max(7, budget_s * 1e3 / once))))
    return statistics.median(times), [round(t, 5) for t in times]


def ceilings() -> dict[str, float]:
    """The most that this GPU does, measured here: a device copy (bytes read + written), a bf16 product."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy, _ = median_ms([lambda x=x, y=y: y.copy_(x)])
    del x, y
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product, _ = median_ms([lambda: a @ b])
    return {"copy_gb_s": round(2 * 2**31 / copy / 1e6, 1), "matmul_tflop_s": round(2 * 8192**3 / product / 1e9, 1)}


def timed(f) -> tuple[object, float]:
    """f() and the seconds until the GPU is done with it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = f()
    torch.cuda.synchronize()
    return result, round(time.perf_counter() - start, 3)


def on_the_clock(calls: list, reps: int = 50, rounds: int = 7) -> dict[str, float]:
    """The host's microseconds until a call returns, and the clock's milliseconds, of calls one after the other."""
    host, clock = [], []
    for _ in range(rounds + 1):  # the first round warms up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(reps):
            calls[i % len(calls)]()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        host.append((returned - began) / reps)
        clock.append((time.perf_counter() - began) / reps)
    host, clock = (statistics.median(times[1:]) for times in (host, clock))
    return {"host_us": round(host * 1e6, 1), "clock_ms": round(clock * 1e3, 4)}


def where_us(f, host_us: float, reps: int = 200) -> dict[str, float]:
    """A call's microseconds on the host by whose code they pass in, as Python's profiler divides them."""
    profile = cProfile.Profile()
    torch.cuda.synchronize()
    with profile:
        for _ in range(reps):
            f()
    torch.cuda.synchronize()
    spent = {"Triton": 0.0, "PyTorch": 0.0, "the library": 0.0}
    for (file, _, name), (_, _, seconds, *_) in pstats.Stats(profile).stats.items():
        text = f"{file} {name}"
        who = "Triton" if "triton" in text else "PyTorch" if "torch" in text else "the library"
        spent[who] += seconds
    return {who: round(host_us * s / sum(spent.values()), 1) for who, s in spent.items()}


def peak_bytes(f) -> int:
    """Most memory in use during f(), beyond what was before it and what it returns."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = f()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    kept = torch.cuda.memory_allocated()
    del result
    return peak - max(kept, before)
