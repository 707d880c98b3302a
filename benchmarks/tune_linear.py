"""Which (BV, warps, stages) the tables of kernels/linear_attention.py should hold: checks and times candidates.

    python benchmarks/tune_linear.py [CASE ...]

Candidates are compiled by parallel workers first; nothing of that is timed. Those of a case, and fla's
kernels where they are installed, then take turns on the same tensors. LAB.md has the rounds so far.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))
ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import torch  # noqa: E402
from contenders import fla  # noqa: E402
from run import Truth, ceilings, inputs, leaves, median_ms, memory_floor_bytes, sets_of  # noqa: E402
from suites import Case  # noqa: E402

from gla_ref.kernels import linear_attention as kernel  # noqa: E402

NARROW = {f"64 T={T}": Case("linear_attention", 32, T, 16, 64, 64) for T in (512, 2048, 8192)}
CASES = NARROW | {
    "128": Case("linear_attention", 8, 8192, 16, 128, 128),
    "128 gated": Case("simple_gla", 8, 8192, 16, 128, 128, gates="logsigmoid/16"),
    "256": Case("linear_attention", 32, 2048, 4, 256, 512),
    "few heads": Case("linear_attention", 1, 65536, 4, 128, 128),
}
TABLES = {"linear_attention": kernel.HALF, "simple_gla": kernel.GATED}
# (column of the table, candidate) by case; the first is what the table holds
TRIALS = {
    **{name: [(64, (64, 4, 3)), (64, (64, 4, 4))] for name in NARROW},
    "128": [(128, (128, 4, 3)), (128, (64, 4, 4))],
    "128 gated": [(128, (64, 4, 2)), (128, (64, 4, 3)), (128, (128, 8, 2))],
    "256": [(256, (64, 4, 1)), (512, (64, 4, 1))],
    "few heads": [(128, (128, 4, 3)), (128, (64, 4, 4))],
}
PEERS = {
    "linear_attention": ("chunk_linear_attn", "fused_chunk_linear_attn"),
    "simple_gla": ("chunk_simple_gla",),
}


def ours(case, column, config, x):
    """o by the kernel, with one entry of its table replaced."""
    table = TABLES[case.mechanism]
    held, table[column] = table[column], config
    try:
        gates = (x["g"],) if case.gates else ()
        return getattr(kernel, case.mechanism)(x["q"], x["k"], x["v"], *gates)[0]
    finally:
        table[column] = held


def gradients(f, x):
    """A call that makes f's backward again and again."""
    o, names = f(x), leaves(x)
    wanted = [x[n] for n in names]
    return lambda: torch.autograd.grad(o, wanted, x["do"], retain_graph=True)


def compile_share(i: int, n: int) -> None:
    every = [(name, *trial) for name in CASES for trial in TRIALS[name]]
    for name, *trial in every[i::n]:
        case = CASES[name]
        case = replace(case, T=min(case.T, 1024))
        x = inputs(case, 0)
        gradients(lambda x, case=case, trial=trial: ours(case, *trial, x), x)()


def main(names: list[str]) -> None:
    n = 12
    run = [sys.executable, __file__, "--compile"]
    for worker in [subprocess.Popen([*run, str(i), str(n)]) for i in range(n)]:
        worker.wait()
    copy = ceilings()["copy_gb_s"]
    print(f"copy {copy} GB/s", flush=True)
    for name in names or CASES:
        case = CASES[name]
        jobs = {
            f"{c}: {t}": (lambda x, case=case, c=c, t=t: ours(case, c, t, x))
            for c, t in TRIALS[name]
        }
        for peer in PEERS[case.mechanism]:
            op = fla(peer)
            jobs[peer] = lambda x, case=case, op=op: op(case, **{m: x[m] for m in leaves(x)})
        sets = sets_of(case)
        truth = Truth(case, sets[0])
        for direction in case.directions:
            calls, judged = {}, {}
            for job, f in jobs.items():
                try:
                    if direction == "forward":
                        calls[job] = [lambda f=f, x=x: f(x) for x in sets]
                        got = {"o": calls[job][0]().detach()}
                    else:
                        calls[job] = [gradients(f, x) for x in sets]
                        got = {
                            f"d{m}": d
                            for m, d in zip(leaves(sets[0]), calls[job][0](), strict=True)
                        }
                    judged[job] = {m: e / b for m, (e, b) in truth.judge(got).items()}
                except Exception as e:  # too large for the chip, or a peer that refuses
                    calls.pop(job, None)
                    print(
                        f"{name} {direction} {job}: {type(e).__name__}: {str(e)[:100]}", flush=True
                    )
            times = {job: [] for job in calls}
            for _ in range(3):
                for job, c in calls.items():
                    times[job].append(median_ms(c, 0.05)[0])
            floor = memory_floor_bytes(case, direction) / copy / 1e6
            for job, t in times.items():
                ms, parts = (
                    statistics.median(t),
                    ", ".join(f"{m} {r:.2f}" for m, r in judged[job].items()),
                )
                print(f"{name} {direction} {job}: {ms:.4f} ms, {ms / floor:.2f} x floor; error / budget {parts}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_share(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1:])
