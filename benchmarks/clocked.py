"""A copy of a Hopper kernel whose roles read a clock before and after each of their waits.

A role is a function that `gl.warp_specialize` is given, with a loop `for c in range(n)` over chunks. In the copy every
wait in that loop, here at the barrier `ready`, becomes::

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
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from types import ModuleType
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
        if ast.unparse(node.iter) != "range(n)":
            return node
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
            self.note("began", "clock()", f"c * {SITES} + {len(self.found) - 1}"),
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
