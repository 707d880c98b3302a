"""Which (C, BV, warps, stages) the table of kernels/linear_attention.py should hold: checks and times candidates.

    python benchmarks/tune_linear.py OUT.json [--peers]

Candidates are compiled by parallel workers first; nothing of that is timed.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))
ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import torch  # noqa: E402
from run import Truth, inputs, median_ms, memory_floor_bytes  # noqa: E402
from suites import Case  # noqa: E402

from gla_ref.kernels import linear_attention as kernel  # noqa: E402

CHOOSE, HALF, GATED = kernel.choose_path, dict(kernel.HALF), dict(kernel.GATED)
CASES = {
    "64": Case("linear_attention", 32, 2048, 16, 64, 64),
    "64 short": Case("linear_attention", 32, 512, 16, 64, 64),
    "64 long": Case("linear_attention", 32, 8192, 16, 64, 64),
    "128": Case("linear_attention", 8, 8192, 16, 128, 128),
    "128 gated": Case("simple_gla", 8, 8192, 16, 128, 128, gates="logsigmoid/16"),
    "256": Case("linear_attention", 32, 2048, 4, 256, 512),
    "long 16": Case("linear_attention", 1, 65536, 16, 128, 128),
    "long 4": Case("linear_attention", 1, 65536, 4, 128, 128),
}
# case, direction, gated table?, column, (C, BV, warps, stages), path or chunks a segment
# left here: the last round; LAB.md has the rounds before
TRIALS = [
    *((n, "forward", False, 64, c, None) for n in ("64", "64 short") for c in [(64, 64, 4, 3)]),
    *(("128", "forward", False, 128, c, None) for c in [(64, 128, 4, 3), (64, 64, 4, 4)]),
    *(("128 gated", "forward", True, 128, c, None) for c in [(64, 64, 4, 2), (64, 32, 4, 2)]),
    *(("256", "forward", False, 256, c, None) for c in [(64, 64, 4, 1)]),
    *(("long 16", "forward", False, 128, c, n) for c in [(64, 128, 4, 3)] for n in (None,)),
    *(("long 4", "forward", False, 128, c, n) for c in [(64, 128, 4, 3)] for n in (None,)),
    ("64", "backward", False, 64, (64, 64, 4, 3), None),
    ("128", "backward", False, 128, (64, 128, 4, 3), None),
    ("128", "backward", False, 128, (64, 64, 4, 4), None),
    ("128 gated", "backward", True, 128, (64, 64, 4, 2), None),
    *(("256", "backward", False, 512, c, None) for c in [(64, 64, 8, 1)]),
    ("long 16", "backward", False, 128, (64, 64, 4, 4), None),
    ("long 16", "backward", False, 128, (64, 128, 4, 3), None),
    ("long 4", "backward", False, 128, (64, 128, 4, 3), None),
]  # fmt: skip


def configure(gated, column, config, path):
    for table, was in ((kernel.HALF, HALF), (kernel.GATED, GATED)):
        table.update(was)
    (kernel.GATED if gated else kernel.HALF)[column] = config
    kernel.choose_path = (lambda *a: ("segmented", path)) if isinstance(path, int) else CHOOSE


def call(case, path, x):
    gates = (x["g"],) if case.gates else ()
    f = kernel.simple_gla if case.gates else kernel.linear_attention
    return f(x["q"], x["k"], x["v"], *gates, path=path if isinstance(path, str) else None)[0]


def leaves(x):
    return [x[n] for n in ("q", "k", "v", "g") if n in x]


def one(trial, case, x):
    _, direction, *config = trial
    configure(*config)
    o = call(case, config[-1], x)
    if direction == "forward":
        return {"o": o.detach()}
    grads = torch.autograd.grad(o, leaves(x), x["do"])
    return {f"d{n}": d for n, d in zip("qkvg", grads, strict=False)}


def compile_share(i: int, n: int) -> None:
    for trial in TRIALS[i::n]:
        case = CASES[trial[0]]
        B = min(case.B, 2)  # 1 and 2 are different kernels: 1 is a constant to the compiler
        try:
            one(trial, case, inputs(Case(**{**vars(case), "B": B}), 0))
        except Exception as e:
            print(trial, type(e).__name__, str(e)[:100], flush=True)


def fla(case, name, x):
    from fla.ops import linear_attn, simple_gla

    if case.gates:
        return simple_gla.chunk_simple_gla(x["q"], x["k"], x["v"], x["g"])[0]
    return getattr(linear_attn, name)(x["q"], x["k"], x["v"], normalize=False)[0]


def main() -> None:
    out, n = Path(sys.argv[1]), 12
    began, found = time.monotonic(), []
    workers = [
        subprocess.Popen([sys.executable, __file__, "--compile", str(i), str(n)]) for i in range(n)
    ]
    for w in workers:
        w.wait()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy, _ = median_ms([lambda a=a, b=b: b.copy_(a)])
    del a, b
    print(f"copy {2 * 2**31 / copy / 1e6:.0f} GB/s", flush=True)
    for name, case in CASES.items():
        sets = [inputs(case, seed) for seed in range(2)]
        truth = Truth(case, sets[0]) if case.T < 10000 else None
        peers = (
            ("chunk_linear_attn", "fused_chunk_linear_attn")
            if not case.gates
            else ("chunk_simple_gla",)
        )
        jobs = [(t, None) for t in TRIALS if t[0] == name]
        if "--peers" in sys.argv:
            jobs += [((name, "forward"), p) for p in peers if name == "long 16"]
        for trial, peer in jobs:
            direction, ms, judged = trial[1], None, ""
            floor = memory_floor_bytes(case, direction) / 4.3e9
            if time.monotonic() - began > 200:
                break
            try:
                if peer is None:
                    got = one(trial, case, sets[0])
                    make = functools.partial(call, case, trial[-1])
                else:
                    make = functools.partial(fla, case, peer)
                    t0, o = time.monotonic(), make(sets[0])
                    got = {"o": o.detach()}
                    if direction == "backward":
                        got = {
                            f"d{n}": d
                            for n, d in zip(
                                "qkvg",
                                torch.autograd.grad(o, leaves(sets[0]), sets[0]["do"]),
                                strict=False,
                            )
                        }  # noqa: E501
                    torch.cuda.synchronize()
                    judged += f"first {time.monotonic() - t0:.1f} s "
                if truth:
                    judged += " ".join(f"{n} {e / b:.2f}" for n, (e, b) in truth.judge(got).items())
                del got
                if direction == "forward":
                    with torch.no_grad():
                        ms, _ = median_ms([functools.partial(make, x) for x in sets], 0.15)
                else:
                    outs = [make(x) for x in sets]
                    ms, _ = median_ms([lambda o=o, x=x: torch.autograd.grad(o, leaves(x), x["do"], retain_graph=True)
                                       for o, x in zip(outs, sets, strict=True)], 0.2)  # fmt: skip
                    del outs
            except Exception as e:
                judged = f"{type(e).__name__}: {str(e)[:150]}"
            found.append(
                {
                    "case": name,
                    "trial": trial,
                    "peer": peer,
                    "ms": ms,
                    "floor_ms": floor,
                    "judged": judged,
                }
            )
            out.write_text(json.dumps(found, indent=0))
            shown = f"{ms:.3f} ms {ms / floor:.2f}x" if ms else "-"
            print(f"{name} {direction} {peer or trial[4:]}: {shown}  {judged}", flush=True)
        del sets
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        compile_share(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
