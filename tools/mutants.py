"""The score of the check kit: named mistakes caught and diagnosed, right forms passed (`make mutants`).

Exit status 1 if a mistake escapes, fewer than nine in ten are named, or a right form is called wrong.
"""

import argparse
import sys
import time

import torch

from gla_ref import FORMS, check
from gla_ref.check import mistakes

BREAK = ("simple_gla.parallel", "gla.parallel")  # wrong for strong gates, on purpose


def score(mechanism: str, dtype: torch.dtype, **options) -> dict:
    """Every mistake once; the kit sees tensors only."""
    known = mistakes.known(mechanism, dtype)
    escaped, unnamed = [], []
    for m in known:
        report = check.kernel(mechanism, mistakes.apply(mechanism, m), dtype=dtype, **options)
        named = [match["mistake"] for match in report.diagnosis]
        escaped += [] if report.failures else [m.name]
        unnamed += [] if m.name in named else [m.name]
        if named != [m.name]:
            print(f"  {m.name}: {named if report.failures else 'NOT CAUGHT'}")
    ok = not escaped and len(unnamed) <= 0.1 * len(known)
    return {"ok": ok, "mistakes": len(known), "escaped": escaped, "unnamed": unnamed}


def right(mechanism: str, dtype: torch.dtype, device: str, seeds: int, level: str = "quick") -> bool:
    """Every form passes, whatever the seed."""
    alarms, forms = 0, [f for f in FORMS[mechanism] if not f.startswith("triton")]
    forms = [form for form in forms if f"{mechanism}.{form}" not in BREAK]
    for seed in range(seeds):
        for form in forms:
            # T x T x K numbers do not fit into memory at T = 8192
            short = level == "full" and form == "parallel_log"
            options = {"level": level, "only": "[!l]*" if short else None, "time_limit": 600.0}
            if form in ("parallel", "scan") and check.MECHANISMS[mechanism].named("strength"):
                options["skip"] = "*long"  # where float32 leaves these two many budgets off
            report = check.kernel(mechanism, FORMS[mechanism][form], dtype=dtype, device=device, seed=seed, **options)
            for row in report.failures:
                alarms += 1
                what = row.message or f"{row.ratio:.2f} budgets"
                print(f"  {form}, seed {seed}: {row.case}, {row.quantity}, {what}")
    print(f"{mechanism} {dtype}: {len(forms)} forms, {level}, {seeds} seeds, {alarms} false alarms", flush=True)
    return not alarms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="float32 bfloat16 float16")
    parser.add_argument("--mechanism", nargs="+", choices=check.MECHANISMS, default=list(check.MECHANISMS))
    parser.add_argument("--seeds", type=int, default=2, help="that right forms are tried with")
    parser.add_argument("--level", choices=("quick", "full"), default="quick", help="of right forms")
    args = parser.parse_args()
    fine = []
    for dtype in (getattr(torch, name) for name in args.dtype):
        for mechanism in args.mechanism:
            start, found = time.time(), score(mechanism, dtype, device=args.device)
            known, escaped, unnamed = found["mistakes"], len(found["escaped"]), len(found["unnamed"])
            said = f"{known - escaped} of {known} caught, {known - unnamed} named, {time.time() - start:.0f} s"
            print(f"{mechanism} {dtype}: {said}", flush=True)
            fine.append(found["ok"])
            fine.append(right(mechanism, dtype, args.device, args.seeds, args.level))
    sys.exit(not all(fine))
