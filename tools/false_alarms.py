"""How often the check kit calls a right kernel wrong: the ways of tests/right_kernels.py, on thousands of seeds.

    python tools/false_alarms.py                            # on a CPU: hours
    python tools/false_alarms.py --device cuda --jobs 12    # on a GPU: minutes

All cases of the quick level come first, on --all seeds. Then, of each mechanism and dtype, the five pairs of case and
quantity in which a kernel came nearest to its budget, on --seeds. Seeds lie side by side as heads; the budgets
are the kit's own. Writes a record for each pair and kernel. Exit status 1 if a kernel has an alarm on all cases, or on
more than one seed in a thousand of a pair.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from right_kernels import kernels  # noqa: E402

from gla_ref import FORMS, check, results  # noqa: E402
from gla_ref.check._budgets import copied, errors, evaluate, parts, work_out  # noqa: E402
from gla_ref.check._cases import held, inputs  # noqa: E402

NEAREST = 5  # pairs of case and quantity that are looked at closely
ROOM = {"cpu": 2**23, "cuda": 2**29}  # numbers in the largest tensor that seeds side by side may make


def ratios(mechanism, dtype, case, seeds, device):
    """{(kernel, quantity): the worst error over its budget, for each seed}."""
    kind, found = check.MECHANISMS[mechanism], {}
    given = [inputs(mechanism, case, dtype, seed) for seed in seeds]
    exact, budgets = work_out(kind, case, dtype, given, device=device)
    x = {n: torch.cat([y[n] for y in given], kind.head_axis(n)) for n in given[0]}
    x = {n: y.to(device, held(kind, n, case, dtype)) for n, y in x.items()}
    for kernel, fn in kernels(mechanism, dtype).items():
        for n, y in evaluate(fn, kind, x, case).items():
            octaves = zip(parts(kind, n, exact[n]), budgets[n], strict=True)
            over = [errors(y[s].double(), exact[n][s], len(seeds), kind.head_axis(n)) / b for s, b in octaves]
            found[kernel, n] = torch.stack(over).amax(0).tolist()
    return found


def batches(mechanism, dtype, case, first, last, device):
    """Tasks for seeds from first to last, as many side by side as there is room for."""
    kind = check.MECHANISMS[mechanism]
    wide = case.T + case.past if kind.cache else 24 * max(case.K, case.V)
    n = ROOM[device] // (case.B * case.T * case.H * case.groups * wide * copied(case))
    n = min(max(1, n), 500)
    return [(mechanism, dtype, case, range(a, min(a + n, last)), device) for a in range(first, last, n)]


def work(task):
    torch.set_num_threads(1)
    return task, ratios(*task)


def run(pool, tasks):
    """{(mechanism, dtype, case, quantity): {kernel: ratios}} of all tasks, the longest first."""
    found, start = {}, time.time()
    tasks = sorted(tasks, key=lambda t: -t[2].T)
    for i, (task, made) in enumerate(pool.imap_unordered(work, tasks), 1):
        mechanism, dtype, case, _, _ = task
        for (kernel, quantity), values in made.items():
            pair = mechanism, str(dtype).removeprefix("torch."), case.name, quantity
            found.setdefault(pair, {}).setdefault(kernel, []).extend(values)
        print(f"\r{i} of {len(tasks)} batches, {time.time() - start:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def records(found, seeds):
    for (mechanism, dtype, case, quantity), made in found.items():
        for kernel, values in made.items():
            yield {
                "mechanism": mechanism,
                "dtype": dtype,
                "case": case,
                "quantity": quantity,
                "kernel": kernel,
                "seeds": seeds,
                "alarms": sum(not x <= 1 for x in values),
                "worst": round(max(values), 3),
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=ROOM, default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--all", type=int, default=50, help="seeds of all cases")
    parser.add_argument("--seeds", type=int, default=3000, help="of the five nearest pairs")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mechanism", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--only", default="*", help="cases of these names")
    parser.add_argument("--out", type=Path, help="the JSON file; benchmarks/results/false-alarms.json unless given")
    args = parser.parse_args()
    cases = {
        (mechanism, str(dtype).removeprefix("torch."), case.name): (mechanism, dtype, case)
        for mechanism, name in itertools.product(args.mechanism, args.dtype)
        for dtype in [getattr(torch, name)]
        for case in check.cases(mechanism)
        if fnmatch(case.name, args.only)
    }
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        found = run(pool, [task for it in cases.values() for task in batches(*it, 0, args.all, args.device)])
        quick = [*records(found, args.all)]
        near = []
        for one in dict.fromkeys(pair[:2] for pair in found):
            pairs = [pair for pair in found if pair[:2] == one]
            near += sorted(pairs, key=lambda pair: -max(max(x) for x in found[pair].values()))[:NEAREST]
        closely = [cases[name] for name in dict.fromkeys(pair[:3] for pair in near)]
        again = run(pool, [task for it in closely for task in batches(*it, 0, args.seeds, args.device)])
    close = [*records({pair: again[pair] for pair in near}, args.seeds)]

    for title, some in (("All cases", quick), ("The nearest pairs", close)):
        some = sorted(some, key=lambda r: -r["worst"])
        print(f"\n{title}, {some[0]['seeds']} seeds: {sum(r['alarms'] for r in some)} alarms; the nearest:")
        for r in some[: 40 if some is not quick else 10]:
            print(
                f"  {r['worst']:5.2f} budgets, {r['alarms']} alarms  {r['mechanism']} {r['dtype']}: "
                f"{r['case']}, {r['quantity']}, {r['kernel']}"
            )
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    results.write(args.out or results.file("false alarms"), results.environment(gpu), "alarms", [*quick, *close])
    right = not any(r["alarms"] for r in quick) and all(1000 * r["alarms"] <= r["seeds"] for r in close)
    sys.exit(not right)


if __name__ == "__main__":
    main()
