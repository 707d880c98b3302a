"""The share of right kernels that the check kit calls wrong: the ways of tests/right_kernels.py, on thousands of seeds.

    python tools/false_alarms.py                            # on a CPU: days
    python tools/false_alarms.py --device cuda --jobs 12    # on a GPU
    python tools/false_alarms.py --mechanism gla --all 2 --seeds 20
    python tools/false_alarms.py --device cuda --jobs 12 --mechanism gla --minutes 8

One mechanism and dtype after another: first all cases of the quick level on --all seeds, then the five pairs of case
and quantity in which a kernel came nearest to its budget, on --seeds. Seeds lie side by side as heads; the budgets are
the kit's own. An alarm is printed as soon as it is seen; after --minutes no batch is begun. Each mechanism and dtype is
a record, written as soon as it is done in the place of its older one. Exit status 1 if a kernel has an alarm in any
case of the first part, or more than one in a thousand seeds of the second.
"""

import argparse
import math
import multiprocessing
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import torch

from gla_ref import check, results
from gla_ref.check._cases import held, inputs
from gla_ref.check.oracle import copied, errors, evaluate, parts, problems, work_out

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from right_kernels import kernels

NEAREST = 5  # pairs of case and quantity that are looked at closely
MOST = 500  # seeds side by side


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
            for i, seed in enumerate(seeds):
                if found[kernel, n][i] > 1:  # a kernel's budget is then worked out again, from more runs
                    (p,) = problems(mechanism, [case], dtype, seed, device=device)
                    axis = kind.head_axis(n)
                    own = y.unflatten(axis, (len(seeds), -1)).select(axis, i).cpu()
                    error, budget = p.judge(n, own)
                    found[kernel, n][i] = error / budget
    return found


def needed(kind, case):
    """Bytes that a seed takes at the worst, about: what autograd keeps of the emulated runs or of a scan."""
    tokens, state = case.B * max(case.T, 16) * case.H * case.groups, case.K * case.V
    if kind.cache:
        return tokens * (case.T + case.past) * copied(kind, case) * 16 * (case.V + 4)
    doublings = math.ceil(math.log2(case.T + 1))
    return tokens * max(copied(kind, case) * (16 * state + 500 * case.K + 7_000), (16 + 4 * doublings) * state)


def work(task):
    *task, until = task
    if time.time() > until:
        return task, None, 0.0
    torch.set_num_threads(1)
    start, made = time.perf_counter(), ratios(*task)
    torch.cuda.empty_cache()  # the memory is for all processes
    return task, made, time.perf_counter() - start


def run(pool, mechanism, dtype, cases, seeds, device, room, until):
    """({(case, quantity): {kernel: ratios}}, {case: seconds of a process}) of that many seeds, the longest first."""
    tasks, found, seconds, left = [], {}, {}, 0
    for case in sorted(cases, key=lambda case: -case.T):
        n = min(MOST, max(1, room // needed(check.MECHANISMS[mechanism], case)))
        tasks += [(mechanism, dtype, case, range(a, min(a + n, seeds)), device, until) for a in range(0, seeds, n)]
    for i, ((_, _, case, some, _), made, took) in enumerate(pool.imap(work, tasks), 1):
        left += made is None
        for (kernel, quantity), over in (made or {}).items():
            for seed, x in zip(some, over, strict=True):
                if not x <= 1:
                    print(f"  {case.name}, {quantity}, {kernel}: seed {seed} ({x:.2f})", flush=True)
            found.setdefault((case.name, quantity), {}).setdefault(kernel, []).extend(over)
        seconds[case.name] = seconds.get(case.name, 0.0) + took
        print(f"\r{i} of {len(tasks)} batches", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if left:
        print(f"  no time for {left} of {len(tasks)} batches", flush=True)
    return found, seconds


def alarms(over):
    return sum(not x <= 1 for x in over)


def kernel_alarms(found):
    """{kernel: its alarms in all pairs}."""
    names = next(iter(found.values()))
    return {name: sum(alarms(made[name]) for made in found.values()) for name in names}


def examine(pool, mechanism, name, args, room):
    """Both parts of one mechanism and dtype, as a record."""
    dtype = getattr(torch, name)
    cases = {case.name: case for case in check.cases(mechanism) if fnmatch(case.name, args.only)}
    given = pool, mechanism, dtype
    start = time.perf_counter()
    until = math.inf if args.minutes is None else time.time() + 60 * args.minutes
    found, seconds = run(*given, cases.values(), args.all, args.device, room, until)
    minutes, many = (time.perf_counter() - start) / 60, kernel_alarms(found)
    rate = args.all * len(cases) / minutes
    print(f"{mechanism} {name}: {len(cases)} cases, {args.all} seeds, {sum(many.values())} alarms")
    print(f"  {minutes:.1f} minutes, {rate:.0f} seeds of a case a minute, each by all {len(many)} kernels")

    near = sorted(found, key=lambda pair: -max(map(max, found[pair].values())))[:NEAREST]
    closely = [cases[case] for case in dict.fromkeys(case for case, _ in near)]
    takes = sum(seconds[case.name] for case in closely) * args.seeds / args.all / args.jobs / 60
    print(f"  {args.seeds} seeds of {len(closely)} cases: {takes:.1f} minutes at most is the estimate", flush=True)
    start = time.perf_counter()
    again, _ = run(*given, closely, args.seeds, args.device, room, until)
    again = {pair: again[pair] for pair in near if pair in again}
    total = sum(kernel_alarms(again).values()) if again else 0
    print(f"  {(time.perf_counter() - start) / 60:.1f} minutes, {total} alarms; the {len(near)} nearest pairs:")
    for (case, quantity), made in again.items():
        kernel = max(made, key=lambda kernel: max(made[kernel]))
        counts = ", ".join(f"{n}: {alarms(over)}" for n, over in made.items() if alarms(over)) or "none"
        print(f"  {case}, {quantity}: nearest {max(made[kernel]):.2f} budgets ({kernel}); alarms {counts}", flush=True)
    return {
        "mechanism": mechanism,
        "dtype": name,
        "cases": len(cases),
        "seeds": args.all,
        "alarms": many,
        "nearest": [
            {"case": case, "quantity": quantity, "seeds": len(over), "kernel": kernel, "alarms": alarms(over)}
            | {"worst": round(max(over), 3)}
            for (case, quantity), made in again.items()
            for kernel, over in made.items()
        ],
        "right": not any(many.values())
        and all(1000 * alarms(over) <= len(over) for made in again.values() for over in made.values()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--all", type=int, default=50, help="seeds of all cases")
    parser.add_argument("--seeds", type=int, default=3000, help="of the five nearest pairs")
    parser.add_argument("--minutes", type=float, help="of each mechanism and dtype; without it as long as it takes")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mechanism", nargs="+", choices=check.MECHANISMS, default=list(check.MECHANISMS))
    parser.add_argument("--only", default="*", help="cases of these names")
    parser.add_argument("--out", type=Path, default=results.file("false alarms"), help="the JSON file, %(default)s")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_properties(0) if args.device == "cuda" else None
    room = gpu.total_memory // (2 * args.jobs) if gpu else 2**31  # bytes, of each process
    right = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for mechanism in args.mechanism:
            for name in args.dtype:
                record = examine(pool, mechanism, name, args, room)
                right.append(record["right"])
                where = results.environment(gpu and gpu.name)
                results.merge(args.out, where, "alarms", [record], ("mechanism", "dtype"))
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
