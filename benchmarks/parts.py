"""Take parts away from the page of the delta rule's Hopper kernel, and time what is left (chapter 23).

    python benchmarks/parts.py [--out FILE]

A variant is a copy of the page's source with changes in named places (VARIANTS). All barriers stay: a role whose work
is taken away still waits and signals as often. A variant's result is wrong, but its time tells what the part costs.

Before it is timed, a variant is disassembled, and the instructions of each part are counted by the source lines that
they come from (WORK). The parts that were taken away must have none left, and all other parts as many as in the whole
kernel. The whole kernel is checked against the float64 recurrence for a key head, and must make the page's bits. The
program runs in the host's own Python and needs a Hopper GPU.

Writes results/<gpu>-parts.json, a record per variant and shape: `taken`, the part that is missing; `working`, the roles
that still work; `ms`, the kernel's time by events; `us_a_chunk`, microseconds that a program needs per chunk, which is
the time over the chunks of all programs that one multiprocessor runs; `counts`, the instructions by part and kind; of
the whole kernel `error` and `budget`, of all others None.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import run
import torch
import triton
import waits
from clocked import functions, module_from
from suites import Case, inputs
from torch import Tensor

from gla_ref import results
from gla_ref.kernels.hopper.tiles import box
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import Draft, Plan, spec_of
from gla_ref.kernels.launch.program import compile_launch
from gla_ref.pages import gated_delta_rule_hopper as page

SHAPES = [(1, 8192, 16, 32), (8, 8192, 16, 16)]  # B, T, H, HV
KEY = ("taken", "B", "T", "H", "HV")
C = page.C.value

Change = Callable[[ast.Module], None]


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The function of this name.

    Raises:
        ValueError: there is none.
    """
    found = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name]
    if len(found) != 1:
        raise ValueError(f"page: expected one function {name}, got {len(found)}")
    return found[0]


def signals(node: ast.AST) -> list[str]:
    """The calls of `mbarrier` below a node, in the order of the source."""
    calls = [x for x in ast.walk(node) if isinstance(x, ast.Call) and ast.unparse(x.func).startswith("mbarrier.")]
    return [ast.unparse(x) for x in sorted(calls, key=lambda x: (x.lineno, x.col_offset))]


def idle(name: str) -> Change:
    """Leave a role nothing but its loop over chunks, and in the loop nothing but its calls of `mbarrier`."""

    def change(tree: ast.Module) -> None:
        role = function(tree, name)
        loops = [x for x in role.body if isinstance(x, ast.For) and ast.unparse(x.iter) == "range(gl.cdiv(T, C))"]
        bars = [x for x in role.body if ast.unparse(x) == "empty, ready, solved = bars"]
        if len(loops) != 1 or len(bars) != 1:
            raise ValueError(f"{name}: expected one loop over chunks and `empty, ready, solved = bars`")
        loop = loops[0]
        stage = [x for x in loop.body if ast.unparse(x) == "s = c % STAGES"]
        if len(stage) != 1:
            raise ValueError(f"{name}: expected `s = c % STAGES` in its loop")
        loop.body = stage + [x for x in loop.body if isinstance(x, ast.Expr) and signals(x)]
        role.body = bars + loops

    return change


def put(name: str, old: str, new: str) -> Change:
    """Replace the only expression `old` of a function by `new`."""

    def change(tree: ast.Module) -> None:
        found = 0

        class Replace(ast.NodeTransformer):
            def visit_Call(self, node):
                nonlocal found
                if ast.unparse(node) != old:
                    return self.generic_visit(node)
                found += 1
                return ast.copy_location(ast.parse(new, mode="eval").body, node)

        Replace().visit(function(tree, name))
        if found != 1:
            raise ValueError(f"{name}: expected one `{old}`, got {found}")

    return change


class Part(NamedTuple):
    functions: tuple[str, ...]  # the page's, whose lines have the instructions
    kinds: tuple[str, ...]  # instructions of the assembler that do the work


SOLVING = ("solver", "add", "inverse", "times")
WORK = {
    "barriers": Part(("loader", *SOLVING, "walker"), ("SYNCS.ARRIVE", "SYNCS.PHASECHK")),  # signals, waits
    "loader": Part(("loader",), ("UTMALDG",)),  # copies into shared memory
    "solver": Part(SOLVING, ("HGMMA", "MUFU.EX2")),  # WGMMA and exponentials, for N and P
    "elimination": Part(("inverse",), ("FFMA",)),
    "products": Part(SOLVING, ("HMMA",)),  # products of blocks, in TF32
    "walkers": Part(("walker",), ("HGMMA", "MUFU.EX2", "UTMASTG")),
}
INVERSE, SOLVER = ("elimination", "products"), ("solver", "elimination", "products")


class Variant(NamedTuple):
    taken: str
    working: tuple[str, ...]  # the roles that do more than wait and signal
    gone: tuple[str, ...]  # parts of WORK
    changes: tuple[Change, ...]


ROLES = ("loader", "solver", "walkers")
VARIANTS = (
    Variant("nothing", ROLES, (), ()),
    Variant(
        "the elimination on the diagonal",
        ROLES,
        ("elimination",),
        (put("inverse", "gl.static_range(15)", "gl.static_range(0)"),),
    ),
    Variant(
        "the products of blocks",
        ROLES,
        ("products",),
        (put("times", "mma_v2(gl.convert_layout(x, left), B, acc, 'tf32')", "acc"),),
    ),
    Variant("the whole inverse", ROLES, INVERSE, (put("solver", "inverse(N, scratch, square)", "N"),)),
    Variant("the walkers' work", ("loader", "solver"), ("walkers",), (idle("walker"),)),
    Variant("the solver's work", ("loader", "walkers"), SOLVER, (idle("solver"),)),
    Variant("the work of both", ("loader",), (*SOLVER, "walkers"), (idle("solver"), idle("walker"))),
)


def made(variant: Variant) -> ModuleType:
    """The page's module without a part.

    Raises:
        ValueError: the page lacks a place that is to be changed, or a change would touch a barrier.
    """
    tree = ast.parse(inspect.getsource(page))
    roles = sorted(set(functions(tree)))
    before = {name: signals(function(tree, name)) for name in roles}
    for change in variant.changes:
        change(tree)
    for name in roles:
        if signals(function(tree, name)) != before[name]:
            raise ValueError(f"{variant.taken}: expected the barriers of {name} as they are, {before[name]}")
    return module_from(page, ast.unparse(ast.fix_missing_locations(tree)), f"without {variant.taken}")


def planned(module: ModuleType, x: dict[str, Tensor]) -> Plan:
    """The launch that the launcher of the page, or of a copy, makes."""
    q, k, v, g, beta = (spec_of(n, x[n]) for n in waits.NAMES)
    (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
    draft = Draft(CLASSES["sm_90"], q, k, v, g, beta)
    o, S = draft.like("o", v), draft.new("S", B, HV, K, V)
    d_q, d_k, d_v, d_o = box(q, C, K), box(k, C, K), box(v, C, V // 2), box(o, C, V // 2)
    numbers = T, HV, HV // H, K**-0.5
    draft.launch(module.walk, B * HV, d_q, d_k, d_v, g, beta, d_o, S, *numbers, num_warps=4, maxnreg=128)
    return draft.plan("page", o, S)


MARK = re.compile(r'//## File "([^"]*)", line (\d+)')
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def counted(listing: str, module: ModuleType) -> dict[str, dict[str, int]]:
    """The instructions of each kind in each part, counted in a disassembly with marks of source lines."""
    text, own = inspect.getsource(module), Path(module.__file__).name
    functions_at = {
        line: f.name
        for f in ast.parse(text).body
        if isinstance(f, ast.FunctionDef)
        for line in range(f.lineno, f.end_lineno + 1)
    }
    places = {name for part in WORK.values() for name in part.functions}
    found = {name: dict.fromkeys(part.kinds, 0) for name, part in WORK.items()}
    now = None  # the function of the newest mark; marks of Triton's library and of the roles' caller do not change it
    for line in listing.splitlines():
        if mark := MARK.search(line):
            at = functions_at.get(int(mark[2])) if Path(mark[1]).name == own else None
            now = at if at in places else now
        elif instruction := INSTRUCTION.search(line):
            for name, part in WORK.items():
                for kind in part.kinds if now in part.functions else ():
                    found[name][kind] += f"{instruction[1]}.".startswith(f"{kind}.")
    return found


def in_loop(listing: str, kind: str) -> int:
    """The number of instructions of the smallest loop that contains one of this kind.

    Raises:
        ValueError: no loop has one.
    """
    lines, found = listing.splitlines(), []
    labels = {line.strip()[:-1]: n for n, line in enumerate(lines) if re.match(r"\s*\.L_x_\d+:", line)}
    for n, line in enumerate(lines):
        if (to := re.search(r"\bBRA `\((\.L_x_\d+)\)", line)) and labels[to[1]] < n:
            body = [x[1] for x in map(INSTRUCTION.search, lines[labels[to[1]] : n + 1]) if x]
            found += [len(body)] * any(f"{x}.".startswith(f"{kind}.") for x in body)
    if not found:
        raise ValueError(f"expected a loop with {kind}, got none")
    return min(found)


def disassembled(cubin: bytes) -> str:
    """The assembler's code with marks of source lines, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        line = [triton.knobs.nvidia.nvdisasm.path, "-c", "-g", file.name]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def check_counts(variant: Variant, counts: dict, whole: dict) -> None:
    """Refuse a variant if the compiler removed more or less than was to be removed.

    Raises:
        ValueError: a part that was taken away is there, or another part is not what it is in the whole kernel.
    """
    for name, part in WORK.items():
        for kind in part.kinds:
            got, had = counts[name][kind], whole[name][kind]
            want = 0 if name in variant.gone else had
            if not had or got != want:
                raise ValueError(
                    f"without {variant.taken}: expected {want} {kind} for {name}, got {got}; the whole kernel has {had}"
                )


class Copy(NamedTuple):
    variant: Variant
    module: ModuleType
    counts: dict[str, dict[str, int]]


def counts_of(module: ModuleType, x: dict[str, Tensor]) -> dict[str, dict[str, int]]:
    """The instructions of a copy that is compiled for these inputs."""
    return counted(disassembled(compile_launch(planned(module, x).launches[-1]).asm["cubin"]), module)


def copies(x: dict[str, Tensor]) -> Iterator[Copy | ValueError]:
    """Every variant, compiled for the inputs and counted, the whole kernel first; or why it is refused."""
    whole = None
    for variant in VARIANTS:
        module = made(variant)
        counts = counts_of(module, x)
        whole = whole or counts
        try:
            check_counts(variant, counts, whole)
        except ValueError as error:
            yield error
        else:
            yield Copy(variant, module, counts)


def measure(keep: Callable[[dict], None], processors: int, device: str = "cuda") -> list[str]:
    """Call `keep` with each record as soon as it is made; what went wrong."""
    wrong = []
    for B, T, H, HV in SHAPES:
        case = Case("gated_delta_rule", B, T, H, 128, 128, gates="logsigmoid/16", groups=HV // H)
        x = {n: y.detach() for n, y in inputs(case, 0, device).items()}
        shape = {"B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128, "dtype": case.dtype, "gates": case.gates}
        turns = -(-B * HV // processors)  # programs that a multiprocessor runs, one after the other
        try:
            truth, page_own = run.Truth(case, x, 1), waits.Walk(planned(page, x), x)
            for copy in copies(x):
                if isinstance(copy, ValueError):
                    wrong.append(f"{B} x {T}: {copy}")
                    continue
                walk = waits.Walk(planned(copy.module, x), x)
                judged = {"error": None, "budget": None}
                if not copy.variant.gone:
                    judged = waits.check(copy.variant.taken, case, truth, walk.o)
                    assert torch.equal(walk.o, page_own.o) and torch.equal(walk.S, page_own.S), (
                        "expected the page's bits"
                    )
                ms = run.median_ms([walk.alone], 0.2)[0]
                us = round(1e3 * ms / (turns * -(-T // C)), 4)
                keep(
                    {"taken": copy.variant.taken, "working": list(copy.variant.working), **shape}
                    | {"ms": round(ms, 5), "us_a_chunk": us, "counts": copy.counts, **judged}
                )
        except Exception as error:  # without a right kernel the variants say nothing
            traceback.print_exc()
            wrong.append(f"{B} x {T}: {error}")
    return wrong


def say(record: dict) -> None:
    shape = f"{record['B']} x {record['T']}, {record['H']}/{record['HV']}"
    print(
        f"{shape:18} without {record['taken']:32} {record['ms']:.3f} ms, {record['us_a_chunk']:.2f} us a chunk",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("benchmarks: expected an NVIDIA GPU of compute capability 9.0, found none")
    environment = results.environment(torch.cuda.get_device_name())
    print(json.dumps(environment), flush=True)
    path = args.out or results.file(f"{environment['gpu']} parts")

    def keep(record: dict) -> None:
        results.merge(path, environment, "parts", [record], KEY)
        say(record)

    with torch.no_grad():
        wrong = measure(keep, torch.cuda.get_device_properties(0).multi_processor_count)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
