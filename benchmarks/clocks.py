"""Measure where the roles of Hopper kernels wait, by clocks read inside copies of the kernels.

    python benchmarks/clocks.py [--out FILE]

Two schedules of the gated delta rule (bf16, K = V = 128, chunks of 64): "fused", with a solver a chunk ahead, and the
walk of "ahead", for which a kernel before it makes T. And "gla", the page of gated linear attention, with programs for
every multiprocessor and with few. Each is checked against the float64 recurrence for a key head, and timed. Then its
copy runs, after a check that it makes the same bits. It runs in the host's own Python and needs a Hopper GPU.

A role is a function that `gl.warp_specialize` is given, with a loop over chunks, here `for c in range(n)`. In the copy
every wait in that loop, here at the barrier `ready`, becomes::

    began = clock()
    mbarrier.wait(ready.index(s), (c // STAGES) & 1)
    note(began, clock(), ROLE, c * SITES + 0, LOG, ROLES, PAIRS)

and two lines around the loop note the clock together with the time in ns::

    note(clock(), nanoseconds(), ROLE, PAIRS - 2, LOG, ROLES, PAIRS)
    note(clock(), nanoseconds(), ROLE, PAIRS - 1, LOG, ROLES, PAIRS)

Names in capitals are numbers in the copy. ROLE is the function's place in that list, plus its argument D where several
roles are one function. LOG is the address of a tensor [programs, ROLES, PAIRS, 2] of int64, into which one thread of a
role stores. All warps of a multiprocessor read the same clock, so the roles of a program can be compared. Waits of
packed sequences are left out.

Writes results/<gpu>-waits.json, a record per kernel and shape, as soon as there is one; others stay, such as those of
"in turn", without a solver, which name an earlier commit. `ms` is the kernel's time alone (of "ahead" the
walk's), `ms_call` that of all of its call's launches, `ms_clocked` that of the copy. `roles` has of each: `sites`,
the barriers it waits for in the order of a chunk; `waits`, the shares of its time that it waits at each of them, over
all chunks, the median of all programs; `us_a_chunk`, its time by the GPU's timer over its chunks; and, of one program,
`chunks`: [began, ended] at each site in ns, from chunk `first` on. Time that a role does not wait at a barrier includes
its waits for its own products. Where the copy fails, `roles` is empty and `ms_clocked` None.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run
import torch
from suites import Case, inputs
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gla_ref import results
from gla_ref.kernels import delta, gla
from gla_ref.kernels.hopper import gla_forward
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import Plan, spec_of
from gla_ref.kernels.launch.program import Program

SHAPES = [(8, 8192, 16, 16), (1, 8192, 16, 32)]  # B, T, H, HV
MODULES = {"fused": "kernels.hopper.delta_fused", "ahead": "kernels.hopper.delta_ahead", "gla": "pages.gla_hopper"}
KEY = ("kernel", "B", "T", "H", "HV")
C, SHOWN = 64, 8  # tokens of a chunk; chunks that a record has clocks of
NAMES = ("q", "k", "v", "g", "beta")
LOOPS = ("range(n)", "range(gl.cdiv(T, C))")  # over chunks
SITES = 4  # waits of a role in a chunk, at most
WAITS = ("mbarrier.wait", "wait_done")


@gluon.jit
def clock():
    """Clocks of this multiprocessor."""
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], gl.int64, is_pure=False, pack=1)


@gluon.jit
def nanoseconds():
    """The GPU's time in ns, which advances in larger steps than the clock."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, is_pure=False, pack=1)


@gluon.jit
def note(first, second, role, pair, LOG: gl.constexpr, ROLES: gl.constexpr, PAIRS: gl.constexpr):
    """Store two numbers as a pair of this program and role."""
    row = (gl.program_id(0) * ROLES + role) * PAIRS + pair
    p = gl.to_tensor(LOG).to(gl.int64).to(gl.pointer_type(gl.int64), bitcast=True) + row.to(gl.int64) * 2
    gl.store(p, first)
    gl.store(p + 1, second)


class Role(NamedTuple):
    name: str
    sites: tuple[str, ...]  # the barriers that it waits for, in the order of a chunk


class Copy(NamedTuple):
    module: ModuleType
    roles: tuple[Role, ...]


def waited_for(node: ast.Expr) -> str | None:
    """The barrier, if a statement waits: "ready", or "done of c - 2" if it is one of an earlier chunk."""
    if not isinstance(node.value, ast.Call) or ast.unparse(node.value.func) not in WAITS:
        return None
    function, args = ast.unparse(node.value.func), node.value.args
    name = ast.unparse(args[0]).split(".index(")[0].removeprefix("bars.")
    return f"{name} of c - {ast.unparse(args[2])}" if function == "wait_done" else name


def functions(tree: ast.Module) -> list[str]:
    """The roles of the first `gl.warp_specialize` in the source, by their functions' names."""
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func) == "gl.warp_specialize"]
    return [ast.unparse(role.elts[0]) for role in min(calls, key=lambda x: x.lineno).args[0].elts]


class Clocks(ast.NodeTransformer):
    """Put the lines above into a module's roles; `sites` has the barriers of each function."""

    def __init__(self, tree: ast.Module, log: int, chunks: int):
        self.functions, self.sites, self.role = functions(tree), {}, None
        self.pairs = chunks * SITES + 2
        self.numbers = f"{log}, {len(self.functions)}, {self.pairs}"

    def lines(self, text: str) -> ast.stmt:
        return ast.parse(text).body[0]

    def note(self, first: str, second: str, pair: str) -> ast.stmt:
        return self.lines(f"note({first}, {second}, {self.role}, {pair}, {self.numbers})")

    def visit_FunctionDef(self, node):
        if node.name not in self.functions:
            return node
        self.sites[node.name] = self.found = []
        several = any(a.arg == "D" for a in node.args.args)
        self.role = f"{self.functions.index(node.name)}{' + D' if several else ''}"
        return self.generic_visit(node)

    def visit_For(self, node):
        if ast.unparse(node.iter) not in LOOPS:
            return node
        self.chunk = ast.unparse(node.target)
        inside = self.generic_visit(node)
        first, last = (self.note("clock()", "nanoseconds()", str(self.pairs - n)) for n in (2, 1))
        return [first, inside, last]

    def visit_If(self, node):
        return node if ast.unparse(node.test) == "PACKED" else self.generic_visit(node)

    def visit_Expr(self, node):
        name = waited_for(node)
        if name is None:
            return node
        self.found.append(name)
        return [
            self.lines("began = clock()"),
            node,
            self.note("began", "clock()", f"{self.chunk} * {SITES} + {len(self.found) - 1}"),
        ]


def module_from(module: ModuleType, text: str, name: str, **more) -> ModuleType:
    """A module like another one, made from a changed text of its source, with `more` names that the text uses."""
    copy = ModuleType(f"{module.__name__}_{re.sub(r'[^a-z0-9]+', '_', name)}", module.__doc__)
    copy.__package__, copy.__file__ = module.__package__, f"<{copy.__name__}>"
    # Triton compiles a function from its source, which inspect finds here
    linecache.cache[copy.__file__] = len(text), None, text.splitlines(keepends=True), copy.__file__
    vars(copy).update(more)
    exec(compile(text, copy.__file__, "exec"), vars(copy))
    return copy


def clocked(module: ModuleType, log: int, chunks: int) -> Copy:
    """A copy of a kernel's module that logs each role's first `chunks` chunks at the address `log`.

    Raises:
        ValueError: a role has more waits than the log has places.
    """
    tree = ast.parse(inspect.getsource(module))
    clocks = Clocks(tree, log, chunks)
    text = ast.unparse(ast.fix_missing_locations(clocks.visit(tree)))
    if many := [name for name, sites in clocks.sites.items() if len(sites) > SITES]:
        raise ValueError(f"module: expected at most {SITES} waits in a chunk, got more in {', '.join(many)}")
    copy = module_from(module, text, f"clocked {log} {chunks}", clock=clock, nanoseconds=nanoseconds, note=note)
    names, roles = clocks.functions, []
    for i, name in enumerate(names):
        label = f"{name} {i - names.index(name)}" if names.count(name) > 1 else name
        roles.append(Role(label, tuple(clocks.sites[name])))
    return Copy(copy, tuple(roles))


def module_of(kernel: str):
    return import_module(f"gla_ref.{MODULES[kernel]}")


def planned(kernel: str, module, x: dict[str, Tensor]) -> Plan:
    """The plan of a call without an initial state, by a kernel's module or a copy of it."""
    tensors = {n: spec_of(n, y) for n, y in x.items() if n in NAMES}
    tensors |= dict.fromkeys(("initial_state", "cu_seqlens", "scale"))
    if kernel == "gla":  # the call launches the page's kernel
        plan = gla_forward.plan_forward(CLASSES["sm_90"], gla.Call(**tensors, g_v=None, path="fused"))
    else:
        plan = module.plan_forward(CLASSES["sm_90"], delta.Call(**tensors))
    if kernel == "ahead":
        return plan
    # one launch: the second one of a call is for strong chunks, and these have none
    *made, launch = plan.steps[: plan.steps.index(plan.launches[0]) + 1]
    return plan._replace(steps=(*made, launch._replace(kernel=module.walk) if kernel == "gla" else launch))


class Walk:
    """A plan whose last launch can be repeated alone."""

    def __init__(self, plan: Plan, x: dict[str, Tensor]):
        self.program, self.programs = Program(plan, x["q"].device), plan.launches[-1].grid[0]
        self.inputs = [None if spec is None else x[spec.name] for spec in plan.inputs]
        self.o, self.S = self.program(tuple(self.inputs))[:2]
        self.values = [torch.cuda.current_stream().cuda_stream, *self.inputs]
        for step, _ in self.program.steps:
            step(self.values)

    def call(self) -> None:
        self.program(tuple(self.inputs))

    def alone(self) -> None:
        step, _ = self.program.steps[-1]
        step(self.values)


def waits(log: Tensor, roles: Sequence[Role], chunks: int) -> list[dict]:
    """The records of the roles, from a log [programs, roles, chunks * SITES + 2, 2] that a copy wrote.

    Raises:
        ValueError: the log is not complete.
    """
    records, middle, shown = [], (chunks - min(chunks, SHOWN)) // 2, min(chunks, SHOWN)
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
        records.append(
            {
                "role": role.name,
                "sites": list(role.sites),
                "waits": [round(s, 4) for s in (spent / clocks[:, r, None]).quantile(0.5, 0).tolist()],
                "us_a_chunk": round((ns[:, r] / chunks / 1e3).quantile(0.5).item(), 4),
                "first": middle,
                "chunks": part.round().int().tolist(),
            }
        )
    return records


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


def waited(kernel: str, x: dict[str, Tensor], log: Log, plain: Walk) -> dict:
    """Run the copy, and say where its roles waited.

    Raises:
        AssertionError: the copy makes other bits.
    """
    chunks = x["q"].shape[1] // C
    copy = log.copy(kernel, chunks)
    walk = Walk(planned(kernel, copy.module, x), x)
    assert torch.equal(walk.o, plain.o) and torch.equal(walk.S, plain.S), f"{kernel}: the clocks change its bits"
    ms, _ = run.median_ms([walk.alone], 0.1)
    shape = walk.programs, len(copy.roles), chunks * SITES + 2, 2
    part = log.memory[: torch.Size(shape).numel()].view(shape)
    part.fill_(-1)
    walk.alone()
    torch.cuda.synchronize()
    return {"ms_clocked": round(ms, 5), "roles": waits(part.cpu(), copy.roles, chunks)}


def measure(keep: Callable[[dict], None], device: str = "cuda") -> list[str]:
    """Call `keep` with every record, once it is timed and again once it has its clocks; what went wrong."""
    wrong = []
    log = Log(512 * 4 * (8192 // C * SITES + 2) * 2, device)  # of at most 512 programs with 4 roles
    for B, T, H, HV in SHAPES:
        rule = Case("gated_delta_rule", B, T, H, 128, 128, gates="logsigmoid/16", groups=HV // H)
        given = {}
        for kernel in MODULES:
            case = replace(rule, mechanism="gla", groups=1) if kernel == "gla" else rule
            if case not in given:
                x = {n: y.detach() for n, y in inputs(case, 0, device).items()}
                given[case] = x, run.Truth(case, x, 1)
            x, truth = given[case]
            record = {"kernel": kernel, "B": B, "T": T, "H": H, "HV": case.groups * H, "K": 128, "V": 128}
            record |= {"dtype": case.dtype, "gates": case.gates}
            try:
                walk = Walk(planned(kernel, module_of(kernel), x), x)
                record |= check(kernel, case, truth, walk.o)
                record |= {"ms": round(run.median_ms([walk.alone], 0.2)[0], 5)}
                record |= {"ms_call": round(run.median_ms([walk.call], 0.2)[0], 5), "ms_clocked": None, "roles": []}
                keep(record)
                keep(record | waited(kernel, x, log, walk))
            except Exception as error:
                traceback.print_exc()
                wrong.append(f"{kernel} at {B} x {T}: {error}")
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
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("benchmarks: expected an NVIDIA GPU of compute capability 9.0, found none")
    environment = results.environment(torch.cuda.get_device_name())
    print(json.dumps(environment), flush=True)
    path = args.out or results.file(f"{environment['gpu']} waits")

    def keep(record: dict) -> None:
        results.merge(path, environment, "waits", [record], KEY)
        say(record)

    with torch.no_grad():
        wrong = measure(keep)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
