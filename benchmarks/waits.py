"""Measure where the roles of the delta rules' Hopper kernels wait, by clocks read inside the kernels.

    python benchmarks/waits.py [--out FILE] [--no-clocks]

Three schedules of the gated delta rule (bf16, K = V = 128, chunks of 64): "fused", with a solver a chunk ahead; "in
turn", without a solver; and the walk of "ahead", for which a kernel before it makes T. First every kernel is checked
against the float64 recurrence for a key head, and timed. Then copies that log their clocks (clocked.py) run, after a
check that they make the same bits. It runs in the host's own Python and needs a Hopper GPU.

Writes results/<gpu>-waits.json, a record per kernel and shape, as soon as there is one. `ms` is the kernel's time alone
(of "ahead" the walk's), `ms_call` that of all of its call's launches, `ms_clocked` that of the copy. `roles` has for
each role: `sites`, the barriers it waits for in the order of a chunk; `waits`, the shares of its time that it waits at
each of them, over all chunks, the median of all programs; `us_a_chunk`, its time by the GPU's timer over its chunks;
and, of one program, `chunks`: [began, ended] at each site in ns, from chunk `first` on. Time that a role does not wait
at a barrier includes its waits for its own products. Without clocks, `roles` is empty and `ms_clocked` None.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run
import torch
from clocked import SITES, Copy, Role, clocked
from suites import Case, inputs
from torch import Tensor

from gla_ref import results
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import Plan, spec_of
from gla_ref.kernels.launch.program import Program

SHAPES = [(8, 8192, 16, 16), (1, 8192, 16, 32)]  # B, T, H, HV
MODULES = {"fused": "delta_fused", "in turn": "delta_in_turn", "ahead": "delta_ahead"}
C, SHOWN = 64, 8  # tokens of a chunk; chunks that a record has clocks of
NAMES = ("q", "k", "v", "g", "beta")


def module_of(kernel: str):
    return import_module(f"gla_ref.kernels.hopper.{MODULES[kernel]}")


def planned(kernel: str, module, x: dict[str, Tensor]) -> Plan:
    """The plan of a call without an initial state, by a kernel's module or a copy of it."""
    specs = [spec_of(n, x[n]) for n in NAMES]
    rest = (None, None) if kernel == "in turn" else (None, None, None)  # state, packing if there is any, scale
    return module.plan_forward(CLASSES["sm_90"], *specs, *rest)


class Walk:
    """A plan whose last launch can be repeated alone."""

    def __init__(self, plan: Plan, x: dict[str, Tensor]):
        self.x = tuple(x[n] for n in NAMES)
        self.program = Program(plan, x["q"].device)
        self.inputs = [*self.x, *[None] * (len(plan.inputs) - len(NAMES))]
        self.o, self.S = self.program(tuple(self.inputs))
        self.values = [torch.cuda.current_stream().cuda_stream, *self.inputs]
        for step, _ in self.program.steps:
            step(self.values)

    def call(self) -> None:
        self.program(tuple(self.inputs))

    def alone(self) -> None:
        step, _ = self.program.steps[-1]
        step(self.values)


def waits(log: Tensor, roles: Sequence[Role], chunks: int) -> list[dict]:
    """The records of the roles, from a log [programs, roles, chunks * SITES + 2, 2] as clocked.py describes it.

    Raises:
        ValueError: the log is not complete.
    """
    found, middle, shown = [], (chunks - min(chunks, SHOWN)) // 2, min(chunks, SHOWN)
    pairs = log[:, :, : chunks * SITES].unflatten(2, (chunks, SITES))  # [programs, roles, chunks, SITES, 2]
    ends = log[:, :, chunks * SITES :]  # [programs, roles, 2, (clock, ns)]
    clocks, ns = (ends[:, :, 1] - ends[:, :, 0]).double().unbind(-1)  # [programs, roles]
    one = len(log) // 2  # the program that is shown
    logged = [pairs[:, r, :, : len(role.sites)] for r, role in enumerate(roles)]
    if min(int(x.min()) for x in [*logged, ends]) < 0 or min(clocks.min(), ns.min()) <= 0:
        raise ValueError("log: expected a pair for each wait, got some that no role wrote")
    zero = min(int(x[one, middle].min()) for x in logged)
    for r, role in enumerate(roles):
        spent = (logged[r][..., 1] - logged[r][..., 0]).sum(1)  # [programs, sites]
        part = (logged[r][one, middle : middle + shown] - zero) * (ns[one, r] / clocks[one, r])
        found.append(
            {
                "role": role.name,
                "sites": list(role.sites),
                "waits": [round(s, 4) for s in (spent / clocks[:, r, None]).quantile(0.5, 0).tolist()],
                "us_a_chunk": round((ns[:, r] / chunks / 1e3).quantile(0.5).item(), 4),
                "first": middle,
                "chunks": part.round().int().tolist(),
            }
        )
    return found


def check(kernel: str, case: Case, truth: run.Truth, o: Tensor) -> dict:
    """The largest error of o and its budget, in units of o's rms.

    Raises:
        AssertionError: the error is beyond the budget.
    """
    worst, allowed = truth.judge({"o": o})["o"]
    assert worst <= allowed, f"{kernel}, {case}: error {worst:.1e}, expected at most {allowed:.1e}"
    return {"error": worst, "budget": allowed}


class Log:
    """Memory for clocks, which stays where it is, so that a copy is compiled once."""

    def __init__(self, numbers: int, device: str):
        self.memory, self.copies = torch.empty(numbers, dtype=torch.int64, device=device), {}

    def copy(self, kernel: str, chunks: int) -> Copy:
        if (kernel, chunks) not in self.copies:
            self.copies[kernel, chunks] = clocked(module_of(kernel), self.memory.data_ptr(), chunks)
        return self.copies[kernel, chunks]


def clock(kernel: str, x: dict[str, Tensor], log: Log, plain: Walk) -> dict:
    """Run the copy, and say where its roles waited.

    Raises:
        AssertionError: the copy makes other bits.
    """
    chunks = x["q"].shape[1] // C
    copy = log.copy(kernel, chunks)
    plan = planned(kernel, copy.module, x)
    walk = Walk(plan, x)
    assert torch.equal(walk.o, plain.o) and torch.equal(walk.S, plain.S), f"{kernel}: the clocks change its bits"
    ms, _ = run.median_ms([walk.alone], 0.1)
    shape = plan.launches[-1].grid[0], len(copy.roles), chunks * SITES + 2, 2
    part = log.memory[: torch.Size(shape).numel()].view(shape)
    part.fill_(-1)
    walk.alone()
    torch.cuda.synchronize()
    return {"ms_clocked": round(ms, 5), "roles": waits(part.cpu(), copy.roles, chunks)}


def measure(clocks: bool, keep: Callable[[list[dict], dict], None], device: str = "cuda") -> list[str]:
    """Call `keep` with all records and the newest whenever one is made or gets its clocks; what went wrong."""
    records, wrong, calls = [], [], []
    for B, T, H, HV in SHAPES:
        case = Case("gated_delta_rule", B, T, H, 128, 128, gates="logsigmoid/16", groups=HV // H)
        x = {n: y.detach() for n, y in inputs(case, 0, device).items()}
        truth = run.Truth(case, x, 1)
        for kernel in MODULES:
            record = {"kernel": kernel, "B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128}
            record |= {"dtype": case.dtype, "gates": case.gates}
            try:
                walk = Walk(planned(kernel, module_of(kernel), x), x)
                record |= check(kernel, case, truth, walk.o)
                record |= {"ms": round(run.median_ms([walk.alone], 0.2)[0], 5)}
                record |= {"ms_call": round(run.median_ms([walk.call], 0.2)[0], 5), "ms_clocked": None, "roles": []}
            except Exception as error:
                traceback.print_exc()
                wrong.append(f"{kernel} at {B} x {T}: {error}")
                continue
            records.append(record)
            calls.append((record, x, walk))
            keep(records, record)
    log = Log(512 * 4 * (8192 // C * SITES + 2) * 2, device)  # of at most 512 programs with 4 roles
    for record, x, walk in calls if clocks else []:
        try:
            record |= clock(record["kernel"], x, log, walk)
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"clocks of {record['kernel']} at {record['B']} x {record['T']}: {error}")
        else:
            keep(records, record)
    return wrong


def say(record: dict) -> None:
    shape = f"{record['B']} x {record['T']}, {record['H']}/{record['HV']}"
    print(f"{record['kernel']:8} {shape:18} {record['ms']:.3f} ms, clocked {record['ms_clocked']}, error "
          f"{record['error']:.1e} of {record['budget']:.1e}", flush=True)  # fmt: skip
    for r in record["roles"]:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in zip(r["sites"], r["waits"], strict=True))
        print(f"    {r['role']:10} {r['us_a_chunk']:.2f} us a chunk, waits for {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--no-clocks", action="store_true", help="check and time the kernels, and no more")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("benchmarks: expected an NVIDIA GPU of compute capability 9.0, found none")
    environment = results.environment(torch.cuda.get_device_name())
    print(json.dumps(environment), flush=True)
    path = args.out or results.file(f"{environment['gpu']} waits")

    def keep(records: list[dict], newest: dict) -> None:
        results.write(path, environment, "waits", records)
        say(newest)

    with torch.no_grad():
        wrong = measure(not args.no_clocks, keep)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
