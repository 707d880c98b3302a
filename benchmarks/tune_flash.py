"""Which tiles, warps and stages the flash attention kernels get: every candidate, checked and timed (GPU).

    python benchmarks/tune_flash.py D [kernel ...] [--variant FILE ...]

Prints TFLOP/s of the products that the kernel itself makes. Candidates are compiled by 12 processes at once into
the cache that the timing process then reads. A variant file holds `[old, new]` replacements in the source, as JSON.
"""

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]
SOURCE = ROOT.parent / "src/gla_ref/kernels/flash_attention.py"

CANDIDATES = {  # head size: kernel: (BM, BN, warps, stages); what lost by far is in LAB.md only
    64: {
        "FWD": [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3)],
        "BWD_DQ": [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
        "BWD_DKV": [(64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 4), (128, 64, 4, 2)],
    },
    128: {
        "FWD": [(128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3)],
        "BWD_DQ": [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 4, 3)],
        "BWD_DKV": [(64, 64, 4, 2), (32, 64, 4, 2)],
    },
    256: {
        "FWD": [(128, 64, 8, 2), (64, 32, 4, 2)],
        "BWD_DQ": [(64, 64, 4, 2), (128, 32, 8, 2)],
        "BWD_DKV": [(64, 64, 8, 2), (32, 64, 8, 3)],
    },
}  # fmt: skip
KERNEL = {"FWD": "fwd", "BWD_DQ": "bwd_dq", "BWD_DKV": "bwd_dkv"}
PRODUCTS = {"FWD": 2, "BWD_DQ": 3, "BWD_DKV": 4}


def module(variant: str):
    """flash_attention.py with the variant's replacements, as a module of its own."""
    name = (
        f"gla_ref.kernels._variant_{Path(variant).stem}"
        if variant
        else "gla_ref.kernels.flash_attention"
    )
    if name in sys.modules:
        return sys.modules[name]
    text, path = SOURCE.read_text(), SOURCE
    if variant:
        for old, new in json.loads(Path(variant).read_text()):
            assert old in text, old
            text = text.replace(old, new)
        text = text.replace('"gla_ref::flash', f'"gla_ref_{Path(variant).stem}::flash')
        path = Path(tempfile.gettempdir()) / f"flash_{Path(variant).stem}.py"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    it = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(it)
    return it


def attempt(job, T=512, B=1, H=2):
    """Run one candidate once; returns (error against float64 or message, seconds)."""
    import oracles

    kernel, tiles, D, variant = job
    flash, began = module(variant), time.time()
    getattr(flash, kernel)[max(64, D)] = tiles
    g = torch.Generator("cuda").manual_seed(0)
    x = {
        n: torch.randn(B, T, H, D, device="cuda", generator=g).bfloat16()
        for n in ("q", "k", "v", "do")
    }
    try:
        o, lse = flash._forward(x["q"], x["k"], x["v"], None, D**-0.5)
        got = {"o": o}
        if kernel != "FWD":
            grads = flash._backward(x["q"], x["k"], x["v"], o, lse, x["do"], None, D**-0.5)
            got |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        torch.cuda.synchronize()
        head = {n: y[-1, :, -1] for n, y in x.items()}
        runs = oracles.runs("softmax_attention", head, torch.bfloat16)
        verdict = oracles.judge({n: y[-1, :, -1] for n, y in got.items()}, runs)
        return max(e / b for e, b in verdict.values()), time.time() - began
    except Exception as e:
        return (
            f"{type(e).__name__}: {str(e).splitlines()[0][:100] if str(e) else ''}",
            time.time() - began,
        )


def timed(jobs, D, B=8, T=8192, H=16):
    from torch.profiler import ProfilerActivity, profile

    x = [torch.randn(B, T, H, D, device="cuda").bfloat16() for _ in range(4)]
    for kernel, tiles, _, variant in jobs:
        flash = module(variant)
        before = dict(getattr(flash, kernel))
        getattr(flash, kernel)[max(64, D)] = tiles
        o, lse = flash._forward(*x[:3], None, D**-0.5)

        def call(flash=flash, o=o, lse=lse, kernel=kernel):
            if kernel == "FWD":
                return flash._forward(*x[:3], None, D**-0.5)
            return flash._backward(*x[:3], o, lse, x[3], None, D**-0.5)

        began = time.time()
        call()
        torch.cuda.synchronize()
        reps = (
            int(0.3 / (time.time() - began)) + 3
        )  # the clock falls under sustained load, as it will in use
        for _ in range(reps):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(7):
                call()
            torch.cuda.synchronize()
        times = sorted(e.device_time / 1e3 for e in p.events() if e.name == KERNEL[kernel])
        getattr(flash, kernel).update(before)
        ms = times[len(times) // 2]
        yield (
            (kernel, tiles, variant),
            ms,
            B * H * T * (T + 1) / 2 * 2 * D * PRODUCTS[kernel] / ms / 1e9,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("D", type=int, choices=CANDIDATES)
    parser.add_argument("kernels", nargs="*", default=list(KERNEL))
    parser.add_argument("--variant", nargs="*", default=[""])
    args = parser.parse_args()
    jobs = [
        (kernel, tiles, args.D, variant)
        for kernel, variant in itertools.product(args.kernels or KERNEL, args.variant)
        for tiles in CANDIDATES[args.D][kernel]
    ]
    for variant in args.variant:
        module(variant)  # written once, before processes race for it
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(attempt, jobs))
    good = []
    for job, (verdict, seconds) in zip(jobs, found, strict=True):
        if isinstance(verdict, float) and verdict <= 1:
            good.append(job)
        else:
            print(f"D {args.D} {job[0]} {job[1]} {job[3]}: {verdict} ({seconds:.0f} s)", flush=True)
    checked = dict(zip(jobs, found, strict=True))
    for (kernel, tiles, variant), ms, rate in timed(good, args.D):
        error, seconds = checked[kernel, tiles, args.D, variant]
        print(f"D {args.D} {kernel:8}{tiles!s:20}{variant:12} {ms:8.3f} ms {rate:5.0f} TFLOP/s  "
              f"error/budget {error:.2f}, first {seconds:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
