"""Today's fused kernel of the gated delta rule with parts taken away, and clocks read inside Hopper kernels (chapter 23).

    python parts.py OUT [--seconds S]     on a Hopper GPU, PYTHONPATH = Triton 3.9 and src, from the checkout's root
    python parts.py --compile OUT         without a GPU: compile everything, write what ptxas says

A variant is a copy of hopper/delta_fused.py with changes in named places; all barriers that a role waits for stay, but
for "k's own barrier", which gives q, k and v one. "parts": `ms` of the launch for mild heads alone, variants in rotation.
Variants that compute everything must make the bits of the kernel as it is; that one is held against the float64
recurrence. "waits": copies that log the clock before and after each wait (`roles`), around the inverse's parts as well
(`inverse`), and around waits for products as well (`products`). Of a role: `sites`; `waits`, the shares of its time at
each site; `works`, the shares from the end of each site to the beginning of the next one (of the last site: to the next
chunk's first), so that waits and works sum to the role's time; all are medians over programs, of all chunks. `chunks`,
of one program: [began, ended] at each site in ns, the same chunks and the same origin for all roles.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import contextlib
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

BEGAN = time.monotonic()
HERE, ROOT = Path(__file__).resolve().parent, Path.cwd()
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks"), str(ROOT / "src")]

import torch  # noqa: E402
import triton  # noqa: E402
from suites import Case, inputs  # noqa: E402
from timing import clocks as clock_rates  # noqa: E402
from timing import samples  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from truth import Truth  # noqa: E402

from gla_ref import kernels, pages, results  # noqa: E402
from gla_ref.kernels import delta, gla  # noqa: E402
from gla_ref.kernels.hopper import delta_fused, gla_forward  # noqa: E402
from gla_ref.kernels.launch.hardware import CLASSES  # noqa: E402
from gla_ref.kernels.launch.plan import Plan, Spec, strides_of  # noqa: E402
from gla_ref.kernels.launch.program import Program, compile_launch  # noqa: E402

C, SHOWN = 64, 8  # tokens of a chunk; chunks that a record has clocks of
RULE = Case("gated_delta_rule", 8, 8192, 16, 128, 128, gates="logsigmoid/16")
SHAPES = [(8, 1), (4, 2), (1, 2)]  # B, value heads per key head: 8 x 8192, 16/16; 4 x 8192, 16/32; 1 x 8192, 16/32
CLOCKED = [(8, 1), (1, 2)]
PARTS_KEY, WAITS_KEY = ("taken", "B", "T", "H", "HV"), ("kernel", "B", "T", "H", "HV")
LOG_WORDS = 256 * 3 * (128 * 8 + 4)  # of at most 256 programs, 3 roles, 128 chunks, 8 sites

# Variants: (old, new) each found once in the source of delta_fused.py.

LOOP = """    for c in range(n):
        s, parity = c % STAGES, (c // STAGES) & 1
"""


def function_text(text: str, name: str) -> str:
    """The source of a function, its decorator included, up to the next blank lines."""
    begin = text.index(f"def {name}(")
    return text[begin : text.index("\n\n\n", begin)]


def idle_walker(text: str) -> str:
    whole = function_text(text, "walker")
    head = whole[: whole.index("    if S_in is not None:")]
    lines = [f"mbarrier.wait(bars.{x}.index(s), parity)" for x in ("keys", "ready", "solved")]
    lines.append("mbarrier.arrive(bars.done.index(s), count=1)")
    return text.replace(whole, head + LOOP + "\n".join(" " * 8 + x for x in lines))


def idle_solver(text: str) -> str:
    whole = function_text(text, "solver")
    head = whole[: whole.index("    most = largest(")]
    lines = [f"mbarrier.wait(bars.{x}.index(s), parity)" for x in ("keys", "gated", "ready")]
    lines.append("mbarrier.arrive(bars.solved.index(s), count=1)")
    return text.replace(whole, head + LOOP + "\n".join(" " * 8 + x for x in lines))


def put(text: str, name: str | None, *pairs: tuple[str, str]) -> str:
    """Replace places of a function, or of the whole text, each of which must be there once."""
    whole = function_text(text, name) if name else text
    part = whole
    for old, new in pairs:
        assert part.count(old) == 1, f"{name}: expected {old!r} once, found it {part.count(old)} times"
        part = part.replace(old, new)
    return text.replace(whole, part)


WAIT_KEYS = "        mbarrier.wait(bars.keys.index(s), parity)\n"
WAIT_READY = "        mbarrier.wait(bars.ready.index(s), parity)\n"


def one_barrier(text: str) -> str:
    text = put(
        text, "loader",
        ("        bar = bars.keys.index(s)  # completes", "        bar = bars.ready.index(s)  # completes"),
        ("mbarrier.expect(bar, k.block_type.nbytes)",
         "mbarrier.expect(bar, k.block_type.nbytes + q.block_type.nbytes + v.block_type.nbytes)"),
        ("        bar = bars.ready.index(s)\n        mbarrier.expect(bar, q.block_type.nbytes + v.block_type.nbytes)\n", ""),
    )  # fmt: skip
    text = put(
        text, "solver", (WAIT_READY + "        P = ", "        P = "),
        (WAIT_KEYS + "        left", WAIT_READY + "        left"),
    )  # fmt: skip
    text = put(text, "walker", (WAIT_KEYS, ""))
    keys = next(x for x in text.splitlines(keepends=True) if x.startswith("    keys: object"))
    return put(text, None, (keys, ""), ("keys=new_barriers(STAGES, 1), ", ""))


def three_places(text: str) -> str:
    """q, k and v have three places each, everything else two. Copies of chunk c begin when c - 3 is done.

    They do, since the loader has waited for `done` of c - 3 before it stored the gates of c - 1.
    """
    text = put(text, None, ("STAGES = gl.constexpr(2)", "PLACES = gl.constexpr(3)\nSTAGES = gl.constexpr(2)"))
    wait = "        mbarrier.wait(bars.done.index(s), ((c // STAGES) & 1) ^ 1)\n"
    text = put(
        text, "loader",
        ("s, o_t = c % STAGES, begin + c * C", "s, p, o_t = c % STAGES, c % PLACES, begin + c * C"),
        (wait, ""),
        ("bars.keys.index(s)", "bars.keys.index(p)"), ("bars.ready.index(s)", "bars.ready.index(p)"),
        *((f"tiles.{x}.index(s)", f"tiles.{x}.index(p)") for x in "qkv"),
        ("        row(tiles, s, BETA).store", wait + "        row(tiles, s, BETA).store"),
    )  # fmt: skip
    place = "        p, turn = c % PLACES, (c // PLACES) & 1\n"
    text = put(
        text, "solver",
        ("        b_q, b_k = ", place + "        b_q, b_k = "),
        *((f"tiles.{x}.index(s)", f"tiles.{x}.index(p)") for x in "qkv"),
        ("bars.keys.index(s), parity", "bars.keys.index(p), turn"),
        ("            mbarrier.wait(bars.ready.index(s), parity)\n", "            mbarrier.wait(bars.ready.index(p), turn)\n"),
        ("        mbarrier.wait(bars.ready.index(s), parity)\n        P", "        mbarrier.wait(bars.ready.index(p), turn)\n        P"),
    )  # fmt: skip
    text = put(
        text, "walker",
        ("        b_q, b_k = ", place + "        b_q, b_k = "),
        *((f"tiles.{x}.index(s)", f"tiles.{x}.index(p)") for x in "qkv"),
        ("bars.keys.index(s), parity", "bars.keys.index(p), turn"),
        ("bars.ready.index(s), parity", "bars.ready.index(p), turn"),
    )  # fmt: skip
    return put(
        text, "fused",
        *((f"{x}.dtype, [STAGES, 1", f"{x}.dtype, [PLACES, 1") for x in "qkv"),
        ("keys=new_barriers(STAGES", "keys=new_barriers(PLACES"), ("ready=new_barriers(STAGES", "ready=new_barriers(PLACES"),
    )  # fmt: skip


ROLES = ["loader", "solver", "walker"]
VARIANTS = {  # taken: (the roles that work, the change, whether the results are right)
    "nothing": (ROLES, lambda text: text, True),
    "k's own barrier": (ROLES, one_barrier, True),
    "the walker's work": (["loader", "solver"], idle_walker, False),
    "the solver's work": (["loader", "walker"], idle_solver, False),
    "the work of both": (["loader"], lambda text: idle_walker(idle_solver(text)), False),
    "nothing, three places of q, k, v": (ROLES, three_places, True),
}

# Clocks.

LOOPS = ("range(n)", "range(gl.cdiv(T, C))")  # over chunks
WAITS = ("mbarrier.wait", "wait_done")
INVERSE = ("spread", "eliminate", "inverse")
PRODUCT = "warpgroup_mma_wait"
KINDS = ("waits", "inverse", "products")  # of clocks, each with those before
SPLIT = [  # statements that do two things, in two
    ("        store_T(tiles, s, inverse(scratch, EXACT, wide), GATED, wide)\n",
     "        Y = inverse(scratch, EXACT, wide)\n        store_T(tiles, s, Y, GATED, wide)\n"),
    ("        P = warpgroup_mma_wait(0, deps=[P]) * E\n",
     "        P = warpgroup_mma_wait(0, deps=[P])\n        P = P * E\n"),
]  # fmt: skip


def site_of(node: ast.stmt, kind: str) -> str | None:
    """What a statement is a site of: "ready"; "done of c - 2", a barrier of an earlier chunk; "spread"; "product N"."""
    if not isinstance(node.value, ast.Call):
        return None
    function, args = ast.unparse(node.value.func), node.value.args
    if function in WAITS:
        name = ast.unparse(args[0]).split(".index(")[0].removeprefix("bars.")
        return f"{name} of c - {ast.unparse(args[2])}" if function == "wait_done" else name
    if function in INVERSE and kind != "waits":
        return function
    if function == PRODUCT and kind == "products":
        return f"product {ast.unparse(node.targets[0]).strip('()')}"
    return None


class Clocks(ast.NodeTransformer):
    """Put clocks into a module's roles; `sites` has the sites of each role's function."""

    def __init__(self, tree: ast.Module, log: int, chunks: int, kind: str):
        calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func) == "gl.warp_specialize"]
        (call,) = calls
        self.functions = [ast.unparse(role.elts[0]) for role in call.args[0].elts]
        self.kind, self.sites, self.role, self.inside = kind, {}, None, None
        self.most = {"waits": 3, "inverse": 6, "products": 8}[kind]
        self.chunks, self.words = chunks, chunks * self.most + 4
        self.numbers = f"{log}, {len(self.functions)}, {self.words}"

    def lines(self, text: str) -> ast.stmt:
        return ast.parse(text).body[0]

    def visit_FunctionDef(self, node):
        if node.name not in self.functions:
            return node
        self.sites[node.name] = self.here = []
        several = any(a.arg == "D" for a in node.args.args)
        self.role, self.inside = f"{self.functions.index(node.name)}{' + D' if several else ''}", None
        return self.generic_visit(node)

    def visit_For(self, node):
        if ast.unparse(node.iter) not in LOOPS or self.role is None:
            return node
        self.inside = ast.unparse(node.target)
        node, self.inside = self.generic_visit(node), None
        first, last = (self.lines(f"stamp({self.role}, {self.words - n}, {self.numbers})") for n in (4, 2))
        return [first, node, last]

    def visit_If(self, node):
        return node if "PACKED" in ast.unparse(node.test) else self.generic_visit(node)

    def visit_Expr(self, node):
        name = site_of(node, self.kind) if self.inside else None
        if name is None:
            return node
        self.here.append(name)
        assert len(self.here) <= self.most, f"expected at most {self.most} sites, got {self.here}"
        n = f"{self.inside} * {self.most} + {len(self.here) - 1}"
        return [self.lines("began = clock()"), node, self.lines(f"note(began, {self.role}, {n}, {self.numbers})")]

    visit_Assign = visit_Expr


MODULES = {  # kernel: (its source, the package that it is loaded into)
    "fused": (Path(delta_fused.__file__), kernels.hopper),
    "in turn": (HERE / "delta_in_turn.py", kernels.hopper),
    "ahead": (Path(delta_fused.__file__).with_name("delta_ahead.py"), kernels.hopper),
    "gla": (Path(pages.__file__).with_name("gla_hopper.py"), pages),
}
LOADED = {}  # modules by their names


def load(name: str, folder: Path):
    """The module of a unit: "variant: ...", "plain: KERNEL", "waits: KERNEL", "inverse: ..." or "products: ..."."""
    if name not in LOADED:
        kind, _, what = name.partition(": ")
        package = MODULES["fused" if kind == "variant" else what][1]
        full = f"{package.__name__}.copy_{slug(name)}"
        spec = importlib.util.spec_from_file_location(full, folder / f"{slug(name)}.py")
        LOADED[name] = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(LOADED[name])
    return LOADED[name]


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def write_modules(folder: Path, log: int) -> dict[str, tuple[str, dict | None]]:
    """Write the sources of all units; by unit, its kernel, and of clocked ones roles and sites."""
    units = {}
    for taken, (_, change, _) in VARIANTS.items():
        text = MODULES["fused"][0].read_text()
        new = change(text)
        assert (new == text) == (taken == "nothing"), taken
        units[f"variant: {taken}"] = "fused", None
        (folder / f"{slug(f'variant: {taken}')}.py").write_text(new)
    for kernel, (path, _) in MODULES.items():
        text = path.read_text()
        units[f"plain: {kernel}"] = kernel, None
        (folder / f"{slug(f'plain: {kernel}')}.py").write_text(text)
        for kind in KINDS if kernel == "fused" else KINDS[:1]:
            tree = ast.parse(put(text, None, *SPLIT) if kernel == "fused" and kind != "waits" else text)
            clocks = Clocks(tree, log, RULE.T // C, kind)
            tree = ast.fix_missing_locations(clocks.visit(tree))
            tree.body.insert(2, clocks.lines("from marks import clock, note, stamp"))  # after docstring and __future__
            names, roles = clocks.functions, []
            for i, name in enumerate(names):
                label = f"{name} {i - names.index(name)}" if names.count(name) > 1 else name
                roles.append((label, clocks.sites[name]))
            units[f"{kind}: {kernel}"] = kernel, {"roles": roles, "most": clocks.most}
            (folder / f"{slug(f'{kind}: {kernel}')}.py").write_text(ast.unparse(tree))
    return units


# Plans.


def case_of(kernel: str, shape: tuple[int, int]) -> Case:
    B, groups = shape
    case = replace(RULE, B=B, groups=groups)
    return replace(case, mechanism="gla", groups=1) if kernel == "gla" else case


def planned(kernel: str, module, case: Case) -> Plan:
    """The plan of a call without an initial state; of the fused kernels, the launch for mild heads alone."""
    given = {
        n: Spec(n, case.shape(x), strides_of(case.shape(x)), case.dtype_of(x), True) for n, x in case.given.items()
    }
    given |= dict.fromkeys(("initial_state", "cu_seqlens", "scale"))
    if kernel == "gla":  # the call launches the page's kernel
        plan = gla_forward.plan_forward(CLASSES["sm_90"], gla.Call(**given, g_v=None, path="fused"))
    else:
        plan = module.plan_forward(CLASSES["sm_90"], delta.Call(**given))
    if kernel == "ahead":
        return plan
    # one launch: the second one of a call is for strong chunks, and these have none
    *made, launch = plan.steps[: plan.steps.index(plan.launches[0]) + 1]
    assert kernel != "gla" or launch.kernel.fn.__name__ == "walk"
    return plan._replace(steps=(*made, launch._replace(kernel=module.walk) if kernel == "gla" else launch))


def shapes_of(unit: str, kernel: str) -> list:
    return SHAPES if unit.startswith("variant") else CLOCKED


class Target:
    """The part of a driver that compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_unit(unit: str, kernel: str, folder: Path, verbose: bool = False) -> dict:
    """Compile all launches of a unit into Triton's cache; what was compiled."""
    began = time.monotonic()
    try:
        triton.runtime.driver.set_active(Target())
        torch.set_num_threads(1)
        module, made = load(unit, folder), {}
        for shape in shapes_of(unit, kernel):
            plan = planned(kernel, module, case_of(kernel, shape))
            for launch in plan.launches:
                with contextlib.redirect_stdout(io.StringIO()):
                    one = compile_launch(launch)
                if one.hash not in made:
                    made[one.hash] = {"kernel": launch.name, "shared": one.metadata.shared} | (
                        said(one, launch) if verbose else {}
                    )
        return {"unit": unit, "made": list(made.values()), "seconds": round(time.monotonic() - began, 1)}
    except Exception:
        return {"unit": unit, "error": traceback.format_exc()[-1500:], "seconds": round(time.monotonic() - began, 1)}


def said(kernel, launch) -> dict:
    """What ptxas and the disassembler say of a compiled kernel."""
    options = launch.options["ptx_options"]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "x.ptx"), Path(folder, "x.cubin")
        source.write_text(kernel.asm["ptx"])
        line = [get_ptxas(90).path, "-v", options, "-arch=sm_90a", str(source), "-o", str(out)]
        log = subprocess.run(line, capture_output=True, text=True).stderr
        out.write_bytes(kernel.asm["cubin"])
        sass = subprocess.run(
            [triton.knobs.nvidia.nvdisasm.path, "-c", str(out)], capture_output=True, text=True
        ).stdout
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    kinds = ("HGMMA", "HMMA", "MUFU.EX2", "SYNCS", "UTMALDG", "UTMASTG", "CS2R", "S2R", "LDL", "STL")
    return {
        "serialised": sorted(set(re.findall(r"C75\d\d", log))),
        "spills": re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log),
        "registers": re.findall(r"Used (\d+) registers", log),
        "sass": {k: sum(f"{n}.".startswith(f"{k}.") for n in names) for k in kinds},
    }  # fmt: skip


# On the GPU.


class Walk:
    """A plan whose last launch can be repeated alone."""

    def __init__(self, plan: Plan, x: dict):
        self.program, self.programs = Program(plan, x["q"].device), plan.launches[-1].grid[0]
        self.inputs = [None if spec is None else x[spec.name] for spec in plan.inputs]
        self.values = [torch.cuda.current_stream().cuda_stream, *self.inputs]
        for step, _ in self.program.steps:
            step(self.values)
        self.o, self.S = (self.values[place] for place in self.program.results[:2])

    def call(self) -> None:
        self.program(tuple(self.inputs))

    def alone(self) -> None:
        step, _ = self.program.steps[-1]
        step(self.values)

    def same_bits(self, other: Walk) -> bool:
        return torch.equal(self.o, other.o) and torch.equal(self.S, other.S)


def medians(calls: list, reps: int = 50) -> list[float]:
    """Median milliseconds of each call, all in rotation."""
    samples(calls, 2 * len(calls))
    times = samples(calls, reps * len(calls))
    return [statistics.median(times[i :: len(calls)]) for i in range(len(calls))]


LOW = 0xFFFFFFFF


def records_of_roles(words: torch.Tensor, roles: list, most: int, chunks: int) -> list[dict]:
    """The records of the roles, from a log [programs, roles, chunks * most + 4] that a copy wrote.

    Raises:
        ValueError: the log is not complete.
    """
    pairs = words[:, :, : chunks * most].unflatten(2, (chunks, most))
    c_0, n_0, c_1, n_1 = words[:, :, chunks * most :].unbind(2)  # [programs, roles]
    base = c_0[:, :1]  # of each program: all of its roles run on one multiprocessor

    def since(clock, base):
        return ((clock - base + 2**31) & LOW) - 2**31

    start, clocks, ns = since(c_0, base), since(c_1 - c_0, 0).double(), (n_1 - n_0).double()
    began, ended = (since(x, base[..., None, None]) for x in (pairs & LOW, (pairs >> 32) & LOW))
    one, shown = len(words) // 2, min(chunks, SHOWN)  # the program that is shown
    middle = (chunks - shown) // 2
    for r, (name, sites) in enumerate(roles):
        if (pairs[:, r, :, : len(sites)] == -1).any() or min(clocks[:, r].min(), ns[:, r].min()) <= 0:
            raise ValueError(f"log: expected a word for each site of {name}, got some that no role wrote")
    zero = min(int(began[one, r, middle].min()) for r, (_, sites) in enumerate(roles) if sites)
    records = []
    for r, (name, sites) in enumerate(roles):
        m = len(sites)
        b, e, all_of = began[:, r, :, :m], ended[:, r, :, :m], clocks[:, r, None]
        end = start[:, r] + clocks[:, r].long()
        after = torch.cat([b[:, :, 1:].flatten(2), torch.cat([b[:, 1:, :1], end[:, None, None]], 1)], 2)
        scale = ns[one, r] / clocks[one, r]
        part = (torch.stack([b, e], -1)[one, middle : middle + shown] - zero) * scale

        def shares(x, all_of=all_of):
            return [round(s, 4) for s in (x.sum(1) / all_of).quantile(0.5, 0).tolist()]

        records.append(
            {
                "role": name,
                "sites": list(sites),
                "waits": shares(e - b),
                "works": shares(after - e),
                "us_a_chunk": round((ns[:, r] / chunks / 1e3).quantile(0.5).item(), 4),
                "first": middle,
                "chunks": part.round().int().tolist(),
            }
        )
    return records


def environment() -> dict:
    version = re.search(r"V([\d.]+)", results.command(get_ptxas(90).path, "--version"))[1]
    return {**results.environment(torch.cuda.get_device_name()), "ptxas": version, **CLASSES["sm_90"].options}


class Late(Exception):
    """No time is left for another measurement."""


class Run:
    def __init__(self, folder: Path, units: dict, pending: dict, out: Path, log: torch.Tensor, seconds: float):
        self.folder, self.units, self.pending, self.out, self.log = folder, units, pending, out, log
        self.seconds, self.wrong, self.given, self.truths = seconds, [], {}, {}
        about = environment() | {"program": "variants of hopper/delta_fused.py (lab/delta_rules.md)"}
        self.about = {
            "parts": about,
            "waits": about | {"program": "copies with clocks of the kernels (lab/delta_rules.md)"},
        }

    def in_time(self, what: str) -> None:
        if time.monotonic() - BEGAN > self.seconds:
            raise Late(f"not run for want of time: {what}")

    def keep(self, kind: str, key: tuple, record: dict) -> None:
        results.merge(self.out / f"{kind}.json", self.about[kind], kind, [record], key)

    def inputs(self, case: Case) -> dict:
        if case not in self.given:
            if len(self.given) > 2:
                del self.given[next(iter(self.given))]
            self.given[case] = {n: y.detach() for n, y in inputs(case, 0, "cuda").items()}
        return self.given[case]

    def walk(self, unit: str, case: Case) -> Walk:
        """The unit at this shape, once its kernels are compiled."""
        kernel, _ = self.units[unit]
        answer = self.pending[unit].get(timeout=100)
        if "error" in answer:
            raise RuntimeError(f"{unit}: {answer['error']}")
        return Walk(planned(kernel, load(unit, self.folder), case), self.inputs(case))

    def judged(self, kernel: str, case: Case, o: torch.Tensor) -> dict:
        """The error and the budget of o in one key head.

        Raises:
            AssertionError: the error is beyond the budget.
        """
        began = time.monotonic()
        if case not in self.truths:
            self.truths[case] = Truth(case, self.inputs(case), 1)
        worst, allowed = self.truths[case].judge({"o": o})["o"]
        print(f"truth of {case}: {time.monotonic() - began:.1f} s", flush=True)
        assert worst <= allowed, f"{kernel}, {case}: error {worst:.1e}, expected at most {allowed:.1e}"
        return {"error": worst, "budget": allowed}

    def part(self, taken: str, case: Case, ms: float, **more) -> None:
        programs = case.B * case.groups * case.H
        assert programs <= 132  # each has a multiprocessor
        record = {"taken": taken, "working": VARIANTS[taken][0], "B": case.B, "T": case.T, "H": case.H}
        record |= {"HV": case.groups * case.H, "K": 128, "V": 128, "dtype": case.dtype, "gates": case.gates}
        record |= {"ms": round(ms, 5), "us_a_chunk": round(1e3 * ms * C / case.T, 4), **more}
        self.keep("parts", PARTS_KEY, record)
        print(f"{case.B} x {case.T}, {case.H}/{case.H * case.groups} {taken:34} {ms:.4f} ms {record['us_a_chunk']:.2f} us {more}", flush=True)  # fmt: skip

    def parts(self, shape: tuple, names: list[str], store: list[str]) -> None:
        """Time variants in rotation, right ones after a check of their bits; store some of them."""
        case = case_of("fused", shape)
        self.in_time(f"parts at {case}")
        walks = {}
        for taken in names:
            try:
                walks[taken] = self.walk(f"variant: {taken}", case)
                if VARIANTS[taken][2] and not walks[taken].same_bits(walks["nothing"]):
                    del walks[taken]
                    raise AssertionError("other bits than the kernel as it is")
            except Exception as error:
                self.wrong.append(f"{taken} at {case}: {error}")
                assert taken != "nothing"
        self.judged("fused", case, walks["nothing"].o)
        for w in walks.values():
            w.o = w.S = None
        ms = dict(zip(walks, medians([w.alone for w in walks.values()]), strict=True))
        for taken in (t for t in store if t in ms):
            beside = {} if taken == "nothing" or "nothing" in store else {"ms_nothing": round(ms["nothing"], 5)}
            right = {"same_bits": True} if VARIANTS[taken][2] else {}
            self.part(taken, case, ms[taken], **right, **beside)
        print(json.dumps(clock_rates()), flush=True)

    def waits(self, kernel: str, shape: tuple) -> None:
        case = case_of(kernel, shape)
        self.in_time(f"waits of {kernel} at {case}")
        plain = self.walk(f"plain: {kernel}", case)
        record = {"kernel": kernel}
        if kernel == "in turn":
            record["program"] = "src/gla_ref/kernels/exhibits/delta_in_turn.py of commit 29f39ea, its inverse in two launches as in hopper/delta_fused.py"  # fmt: skip
        record |= {"B": case.B, "T": case.T, "H": case.H, "HV": case.groups * case.H, "K": 128, "V": 128}
        record |= {"dtype": case.dtype, "gates": case.gates, **self.judged(kernel, case, plain.o)}
        kinds = [k for k in KINDS if f"{k}: {kernel}" in self.units]
        copies = {}
        for kind in kinds:
            try:
                copies[kind] = self.walk(f"{kind}: {kernel}", case)
                if not copies[kind].same_bits(plain):
                    del copies[kind]
                    raise AssertionError("the clocks change its bits")
            except Exception as error:
                self.wrong.append(f"{kind} of {kernel} at {case}: {error}")
        ms, *clocked, called = medians([plain.alone, *(w.alone for w in copies.values()), plain.call])
        record |= {"ms": round(ms, 5), "ms_call": round(called, 5), "ms_clocked": None, "roles": []}
        chunks = case.T // C
        for (kind, walk), its in zip(copies.items(), clocked, strict=True):
            roles, most = self.units[f"{kind}: {kernel}"][1].values()
            shape_ = walk.programs, len(roles), chunks * most + 4
            words = self.log[: torch.Size(shape_).numel()].view(shape_)
            words.fill_(-1)
            walk.alone()
            torch.cuda.synchronize()
            try:
                found = records_of_roles(words.cpu(), roles, most, chunks)
            except ValueError as error:
                self.wrong.append(f"{kind} of {kernel} at {case}: {error}")
                continue
            if kind == "waits":
                record |= {"ms_clocked": round(its, 5), "roles": found}
            else:
                record[kind] = {"ms": round(its, 5), "roles": found}
            print(f"{kernel} {case.B} x {case.T}, {case.groups}: {ms:.4f} ms, {kind} {its:.4f}", flush=True)
            for x in found:
                text = ", ".join(
                    f"{s} {w:.1%} then {y:.1%}" for s, w, y in zip(x["sites"], x["waits"], x["works"], strict=True)
                )
                print(f"    {x['role']:12} {x['us_a_chunk']:.2f} us a chunk: {text}", flush=True)
        self.keep("waits", WAITS_KEY, record)

    def all(self) -> None:
        names = list(VARIANTS)
        old, new = names[:-1], names[-1:]
        jobs = [(self.parts, (shape, old, old)) for shape in SHAPES[:1]]
        jobs += [(self.waits, (kernel, (8, 1))) for kernel in ("fused", "in turn")]
        jobs += [(self.parts, (shape, old, old)) for shape in SHAPES[1:]]
        jobs += [(self.waits, (kernel, (1, 2))) for kernel in ("fused", "in turn")]
        jobs += [(self.waits, (kernel, shape)) for kernel in ("ahead", "gla") for shape in CLOCKED]
        jobs += [(self.parts, (shape, ["nothing", *new], new)) for shape in SHAPES]
        for job, args in jobs:
            try:
                job(*args)
            except Late as late:
                self.wrong.append(str(late))
            except Exception:
                traceback.print_exc()
                self.wrong.append(f"{job.__name__} {args}: {traceback.format_exc()[-300:]}")
            print(f"-- {time.monotonic() - BEGAN:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=95, help="begin nothing later than this")
    parser.add_argument("--compile", action="store_true", help="compile everything, without a GPU")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--match", default="")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="parts-"))
    if args.compile:
        units = write_modules(folder, 0x7F0000000000)
        for unit, (kernel, _) in units.items():
            if re.search(args.match, unit):
                print(json.dumps(compile_unit(unit, kernel, folder, verbose=True)).replace("\\n", "\n"), flush=True)
        return
    pool = multiprocessing.get_context("fork").Pool(args.processes)  # before CUDA begins
    log = torch.empty(LOG_WORDS, dtype=torch.int64, device="cuda")  # stays where it is: its address is compiled in
    units = write_modules(folder, log.data_ptr())
    pending = {unit: pool.apply_async(compile_unit, (unit, kernel, folder)) for unit, (kernel, _) in units.items()}
    with torch.no_grad():
        run = Run(folder, units, pending, args.out, log, args.seconds)
        print(json.dumps(run.about["parts"]), f"{time.monotonic() - BEGAN:.0f} s", flush=True)
        run.all()
    for unit, answer in pending.items():
        if answer.ready():
            print(unit, answer.get()["seconds"], "s to compile", flush=True)
    pool.terminate()
    print("\n".join(run.wrong) or "nothing went wrong", flush=True)
    sys.exit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
