"""Shared memory of compiled kernels, as TTGIR and PTX have it: barriers keep their bytes, products their operands.

*Barriers.* PTX: between `mbarrier.init` and `mbarrier.inval` the bytes of a barrier may serve for nothing else. The
allocator of Triton does not know this rule: it gives the bytes of an allocation away after the last operation that
names the allocation. A barrier that is initialised and never used is free at once, and its bytes become a
reduction's scratch, or hold the values that `ttg.warp_specialize` hands to its roles. Alone on a GPU such a kernel
worked; beside other processes its roles read addresses that were none. (Triton invalidates the barriers that it makes
itself; Gluon leaves it to us.)

So of each slot of a barrier is asked:

    does a role use it     wait, arrive, expect, be what a copy arrives at; where there are no roles, does anything
    is it invalidated      this names the allocation once more, and until then the allocator keeps its bytes from others

*Products.* One on tensor cores is waited for, and with it its operands, before shared memory is written again; and none
in a branch takes an operand from a buffer that a pipelined loop refills (lab/known.md).

*Arrivals.* Where one thread arrives at a barrier for all warps of its role, these have met before (`unmet`).

TTGIR, and for arrivals PTX, is read as text, line by line: Triton's Python module has no way to the attributes that all
versions share.
"""

import re
from pathlib import Path
from typing import NamedTuple

NAME = r"%[\w$.-]+"
# operations that name a barrier and do not use it; all others count as a use, branches and calls that hand it on too
IDLE = {"ttg.local_alloc", "ttg.local_dealloc", "ttg.warp_specialize", "ttng.init_barrier", "ttng.inval_barrier"}
IDLE |= {f"ttg.memdesc_{x}" for x in ("index", "subslice", "trans", "reshape", "reinterpret")}
WRITES = {"ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local", "ttg.local_store"}


class View(NamedTuple):
    """An allocation, or a slot of it: a number, or the name of one that is not known and may be any."""

    allocation: str
    slot: tuple[int | str, ...] = ()

    def meets(self, other: "View") -> bool:
        pairs = zip(self.slot, other.slot, strict=False)
        return self.allocation == other.allocation and all(a == b or str in (type(a), type(b)) for a, b in pairs)


class Operation(NamedTuple):
    """A line of a function, and the values that it uses."""

    line: int
    indent: int
    text: str
    made: str | None  # the value that it makes
    name: str
    used: list[str]
    views: dict[str, View]  # names in `used` of an allocation or of a view of one
    slots: dict[str, View]  # names of slots as loops take them: by number, perhaps transposed


def broken(ttgir: str) -> list[str]:
    """Errors of a compiled kernel's products and barriers."""
    sources = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))
    _, *texts = re.split(r"^(?=  tt\.func )", ttgir, flags=re.MULTILINE)
    functions = [Function(text, sources) for text in texts]
    return [x for function in functions for x in (*function.overwritten(), *function.unkept())]


class Function:
    """A function's program in order: its operations, the views that they name, and its roles."""

    def __init__(self, text: str, sources: dict[str, str]):
        self.sources = sources
        self.operations: list[Operation] = []
        self.roles: list[tuple[int, int]] = []  # first and last line of each `warp_specialize`
        self.unknown: list[str] = []  # barriers that are no view of an allocation
        self.slots: dict[str, View] = {}  # up to the line that is read
        known = outer = {}  # the values that a line can use, by name: numbers, and views
        captured = []  # the values that roles are handed
        lines = text.splitlines()
        for n, line in enumerate(lines):
            text = line.strip()
            if self.roles and n == self.roles[-1][1]:
                known = outer
            if re.match(r"partition\d+\(", text):  # it knows only what is handed to it, by new names
                known = dict(zip(re.findall(rf"({NAME}): ", text), captured, strict=True))
            else:
                x = self.read(n, line, known)
                if x.name == "ttg.warp_specialize":
                    captured = [known.get(name) for name in x.used]
                    last = next(i for i in range(n + 1, len(lines)) if lines[i].startswith(" " * x.indent + "} : ("))
                    self.roles.append((n, last))

    def read(self, n: int, line: str, known: dict[str, int | View | None]) -> Operation:
        """Note line n, and what it makes."""
        text, indent = line.strip(), len(line) - len(line.lstrip())
        made, operation = re.match(rf"(?:({NAME})(?::\d+)? = )?(.*)", text).groups()
        name, used = re.match(r'"?([\w.]*)', operation)[1], re.findall(NAME, operation)
        views = {x: known[x] for x in used if isinstance(known.get(x), View)}
        slots = {x: self.slots[x] for x in used if x in self.slots}
        for names in (known, self.slots):  # a name of one region may return in the next
            names.pop(made, None)
        if number := re.match(r"arith\.constant (-?\d+) : ", operation):
            known[made] = int(number[1])
        elif name == "ttg.local_alloc":
            views[made] = known[made] = View(made)
        elif name.startswith("ttg.memdesc_") and used[0] in views:
            view = views[used[0]]
            if index := re.match(rf"ttg\.memdesc_index {NAME}\[({NAME})\].* : !ttg\.memdesc<(\d+)", operation):
                slot = 0 if index[2] == "1" else known.get(index[1])
                view = View(view.allocation, (*view.slot, index[1] if slot is None else slot))
            known[made] = view
            if index or name == "ttg.memdesc_trans" and used[0] in slots:
                self.slots[made] = view
        elif name == "ttng.init_barrier" and not views:
            self.unknown.append(f"barrier {used[0]}{self.where(text)} is no part of a known allocation")
        self.operations.append(Operation(n, indent, text, made, name, used, views, slots))
        return self.operations[-1]

    def where(self, line: str) -> str:
        """` (file:line)` of the source that a line was made of; empty if nobody knows."""
        found, todo = [], re.findall(r"loc\((.*)\)$", line.strip())
        while todo:
            text = todo.pop(0)
            found += re.findall(r'"([^"]+)":(\d+):', text)
            todo = [self.sources[x] for x in re.findall(r"#loc\d*", text) if x in self.sources] + todo
        found = [x for x in found if "/triton/" not in x[0]] or found
        return f" ({Path(found[0][0]).name}:{found[0][1]})" if found else ""

    def unkept(self) -> list[str]:
        """Errors of barriers, a sentence for each slot and rule."""
        errors, end = list(self.unknown), self.operations[-1].line + 1
        mentions = [(x.line, x.name, view) for x in self.operations for view in dict.fromkeys(x.views.values())]
        for first, _, made in (x for x in mentions if x[1] == "ttng.init_barrier"):
            later = [(line, name) for line, name, view in mentions if line > first and view.meets(made)]
            ends = [line for line, name in later if name == "ttng.inval_barrier"]
            until = min(ends, default=end)
            uses = [line for line, name in later if name not in IDLE and line < until]
            roles = [(a, b) for a, b in self.roles if first < a < until]
            name = f"barrier {self.called(made)}"
            if roles and not any(a < n < b for n in uses for a, b in roles):
                errors.append(f"{name} is initialised and no role uses it")
            elif not uses:
                errors.append(f"{name} is initialised and nothing uses it")
            if not ends:
                errors.append(f"{name} is never invalidated: others may have its bytes while it is a barrier")
        return list(dict.fromkeys(errors))

    def called(self, view: View) -> str:
        """A slot's name: the allocation's, its number if there are several, and the line of the source."""
        text = next(x.text for x in self.operations if View(view.allocation) in x.views.values())
        number = "".join(f"[{n}]" for n in view.slot if isinstance(n, int))
        return f"{view.allocation}{number}{self.where(text)}"

    def overwritten(self) -> list[str]:
        """Errors of products on tensor cores."""
        errors, regions = [], []  # regions: the operations that are open
        for n, x in enumerate(self.operations):
            while regions and x.text and x.indent <= regions[-1].indent and not x.text.startswith("} else"):
                regions.pop()
            if x.name == "ttng.warp_group_dot":
                # a first operand in registers is the assembler's concern
                names = x.used[1:2] if re.search(r" : tensor<.*> \* !ttg", x.text) else x.used[:2]
                operands, kinds = {x.slots.get(y, y) for y in names}, [y.name for y in regions]
                branch = "scf.if" in kinds and {"scf.for", "scf.while"} & {*kinds[: kinds.index("scf.if")]}
                if branch and not x.slots.keys().isdisjoint(names):
                    errors.append(f"in a branch, from a pipelined buffer: {x.text[:90]}")
                rest = [y for y in self.operations[n + 1 :] if y.name != "scf.yield" or y.indent <= x.indent]
                if "isAsync = true" in x.text and refilled(x.made, operands, rest):
                    errors.append(f"in flight when its memory is written: {x.text[:90]}")
            if x.name in ("scf.if", "scf.for", "scf.while") and x.text.endswith("{"):
                regions.append(x)
        return errors


def refilled(product: str, operands: set[View | str], later: list[Operation]) -> bool:
    """Whether memory that holds an operand may be written while the product is in flight.

    It may stay in flight into the next round only if all operands are slots that the copies of this round leave alone.
    An operand that is only a name is a passing copy, whose memory counts as free after a wait that names the product.
    """
    passing, issued = any(isinstance(x, str) for x in operands), 0
    for x in later:
        issued += x.name == "ttng.warp_group_dot"
        if x.name == "ttng.warp_group_dot_wait":
            if int(re.search(r"pendings = (\d+)", x.text)[1]) <= issued:  # products end in order
                return False
            if passing and product in x.used:
                return True
        if x.name in WRITES and operands & {x.slots.get(y, y) for y in x.used}:
            return True
        if x.name == "scf.yield":
            break
    return passing


def unmet(ptx: str) -> list[str]:
    """Arrivals at barriers of shared memory for which the warps of a role have not met: one thread arrives for all.

    Behind what a role last wrote, read or waited for there must be a `bar.sync`. Triton puts it there, in most cases
    (its pull request 10035: in all); without it a slow warp's part of a tile may be missing. A role begins at its
    `setmaxnreg`. One of a single warp has no `bar.sync`: its threads meet at `bar.warp.sync`.
    """
    found, met = [], True
    for role in re.split(r"(?=\bsetmaxnreg)", ptx):
        meeting = r"\bbar(rier)?\.sync" if re.search(r"\bbar\.sync", role) else r"\bbar(rier)?(\.warp)?\.sync"
        for line in role.splitlines():
            if re.search(meeting, line):
                met = True
            elif re.search(r"\b(st\.shared|ld\.shared|stmatrix|ldmatrix|wgmma\.wait_group|mbarrier\.try_wait)", line):
                met = False
            elif re.search(r"\bmbarrier\.arrive\.shared", line) and not met:
                found.append(f"arrives before its warps have met: {line.strip()[:80]}")
    return found
