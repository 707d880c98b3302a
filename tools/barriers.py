"""Barriers in shared memory must keep their eight bytes: what compiled kernels are held to, as Triton laid them out.

PTX: between `mbarrier.init` and `mbarrier.inval` the bytes of a barrier may serve for nothing else. Triton's allocator
does not know this rule: it gives the bytes of an allocation away after the last operation that names the allocation. A
barrier that is initialised and then used by nobody is free at once, and its bytes become a reduction's scratch, or hold
the values that `ttg.warp_specialize` hands to its roles. Alone on a GPU such a kernel worked; beside other processes
its roles read addresses that were none. (Triton invalidates the barriers that it makes itself; Gluon leaves it to us.)

So of each slot of a barrier, from its `init_barrier` to its `inval_barrier` or to the end of the program, is asked:

    does a role use it     wait, arrive, expect, be what a copy arrives at; where there are no roles, does anything
    are its bytes its own  no other allocation, scratch or captures on them meanwhile

TTGIR, as a compiled kernel has it, says nothing of offsets, so Triton's passes are run from there up to the one that
adds `allocation.offset` to every operation that needs shared memory. What they print is read as text, line by line:
Triton's Python module has no way to the attributes that all versions share.
"""

import re
import tempfile
from math import prod
from pathlib import Path
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes

NAME = r"%[\w$.-]+"
SHAPED = re.compile(r"(tensor|memdesc)<((?:\d+x)+)(!tt\.ptr|[a-zA-Z]+\d+)")  # kind, "64x128x", type of elements


class View(NamedTuple):
    """Bytes of an allocation: from `start` to `stop` of it."""

    allocation: str
    start: int
    stop: int

    def meets(self, other: "View") -> bool:
        return self.allocation == other.allocation and self.start < other.stop and other.start < self.stop


class Mention(NamedTuple):
    """An operation that names an allocation or a view of it."""

    line: int
    operation: str
    view: View


class Tenant(NamedTuple):
    """A user of bytes of shared memory: from the offset `start` on, over some lines of the program.

    Nobody prints how many bytes of scratch an operation takes: something between `least` and `most`.
    """

    name: str
    start: int
    least: int
    most: int
    first: int
    last: int


def unkept(ttgir: str, arch: int, ptx: str) -> list[str]:
    """Errors of the barriers of a compiled kernel: its TTGIR, its class of GPU, its PTX (for the version)."""
    if "ttng.init_barrier" not in ttgir:
        return []
    major, minor = re.search(r"\.version (\d+)\.(\d+)", ptx).groups()
    text = allocated(ttgir, arch, int(major) * 10 + int(minor))
    sources = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    head, *functions = re.split(r"^(?=  tt\.func )", text, flags=re.MULTILINE)
    warps = int(re.search(r'"ttg\.num-warps" = (\d+)', head)[1])
    return [x for function in functions for x in Function(function, warps, sources).unkept()]


def allocated(ttgir: str, arch: int, ptx_version: int) -> str:
    """A module with the offset of whatever takes shared memory: the first passes of Triton's `make_llir`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ttgir")
        file.write_text(ttgir)
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(str(file), context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    try:
        passes.ttgpuir.add_allocate_warp_groups(manager)
    except TypeError:  # from Triton 3.8 on it wants to know whether its sanitizer runs
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, ptx_version)
    try:
        manager.run(module, "allocated")
    except TypeError:  # Triton 3.5 asks for no name
        manager.run(module)
    return str(module)


def offset(text: str) -> int:
    """The first byte of an operation's memory."""
    return int(re.search(r"allocation\.offset = (\d+)", text)[1])


def scratch(operation: str, text: str, warps: int) -> int:
    """Bytes of scratch that an operation takes at most: as many as its tensors, and where it adds up, warps do."""
    _, results = text.rsplit("->", 1) if "->" in text else (text, "")
    everything = max(8, sum(size("tensor", text)))
    if operation != "tt.reduce":
        return everything
    numbers = sum(size("tensor", results)) or 8 * results.count(",") + 8
    return min(everything, numbers * warps)


def size(kind: str, text: str) -> list[int]:
    """Bytes of each tensor, or view of memory (`memdesc`), whose type stands in a text."""
    found = []
    for which, shape, element in SHAPED.findall(text):
        bits = 64 if element == "!tt.ptr" else int(re.search(r"\d+", element)[0])
        if which == kind:
            found.append(prod(map(int, shape[:-1].split("x"))) * max(bits, 8) // 8)
    return found


def size_of_captures(types: str) -> int:
    """Bytes of captured values: a view of memory is a pointer and an offset an axis, all else 8 bytes at most."""
    views = [shape.count("x") for which, shape, _ in SHAPED.findall(types) if which == "memdesc"]
    rest = re.sub(r"!ttg\.memdesc<[^<>]*>,? ?", "", types)
    while "<" in rest:  # what is inside a type's brackets is no value
        rest = re.sub(r"<[^<>]*>", "", rest)
    numbers = [re.fullmatch(r"[a-z]+(\d+)", x.strip()) for x in rest.split(",") if x.strip()]
    return sum(8 + 4 * axes for axes in views) + sum(max(int(x[1]), 8) // 8 if x else 8 for x in numbers)


class Scope(NamedTuple):
    """The names that the lines of a function, or of one of its roles, can use."""

    warps: int
    views: dict[str, View]
    numbers: dict[str, int]
    labels: dict[str, int]  # lines


class Function:
    """A function's program in order: its allocations, who names them where, its scratch, its roles, its loops."""

    def __init__(self, text: str, warps: int, sources: dict[str, str]):
        self.lines, self.sources = text.splitlines(), sources
        self.end = len(self.lines)
        self.mentions: list[Mention] = []
        self.allocations: dict[str, tuple[int, int]] = {}  # by name: offset, bytes
        self.scratch: list[Tenant] = []
        self.roles: list[tuple[int, int]] = []  # first and last line of each `warp_specialize`
        self.captured: list[View | None] = []  # by the last of them
        self.loops: list[tuple[int, int]] = []
        self.unknown: list[str] = []  # barriers that are no view of an allocation
        self.read(Scope(warps, {}, {}, {}))

    def read(self, outer: Scope) -> None:
        """Read each line in the scope of its role, or of the function."""
        scope = outer
        for n, line in enumerate(self.lines):
            text = line.strip()
            if self.roles and n == self.roles[-1][1]:
                scope = outer
            if text == "default {":  # the first role knows all that the function does, but has labels of its own
                scope = outer._replace(labels={})
            elif re.match(r"partition\d+\(", text):  # it knows only what is handed to it, by new names
                given = zip(re.findall(rf"({NAME}): ", text), self.captured, strict=True)
                warps = int(re.search(r"num_warps\((\d+)\)", text)[1])
                scope = Scope(warps, {x: view for x, view in given if view}, {}, {})
            elif label := re.match(r"\^bb\d+", text):
                scope.labels[label[0]] = n
            else:
                self.read_operation(n, text, scope)

    def read_operation(self, n: int, text: str, scope: Scope) -> None:
        """Note what line n makes, names or takes."""
        made, operation = re.match(rf"(?:({NAME})(?::\d+)? = )?(.*)", text).groups()
        names = re.findall(NAME, operation)
        used = [scope.views[x] for x in dict.fromkeys(names) if x in scope.views]
        if verb := re.match(r'"?([\w.]+)', operation):
            self.mentions += [Mention(n, verb[1], view) for view in used]
        if operation.startswith("cf."):
            self.loops += [(scope.labels[x], n) for x in re.findall(r"\^bb\d+", operation) if x in scope.labels]
        if number := re.match(r"arith\.constant (-?\d+) : ", operation):
            scope.numbers[made] = int(number[1])
        elif operation.startswith("ttg.local_alloc"):
            bytes_ = size("memdesc", operation)[-1]
            scope.views[made] = View(made, 0, bytes_)
            self.allocations[made] = offset(operation), bytes_
            self.mentions.append(Mention(n, "ttg.local_alloc", scope.views[made]))
        elif operation.startswith("ttg.memdesc_") and used:
            scope.views[made] = part(used[0], operation, scope.numbers)
        elif operation.startswith("ttg.warp_specialize("):
            self.captured = [scope.views.get(x) for x in names]
            self.roles.append((n, self.closed(n)))
        elif operation.startswith("ttng.init_barrier") and not used:
            self.unknown.append(f"barrier {names[0]}{self.where(text)} is no part of a known allocation")
        if "allocation.offset" in text and not operation.startswith("ttg.local_alloc"):
            self.scratch.append(self.tenant(n, text, scope.warps))

    def tenant(self, n: int, text: str, warps: int) -> Tenant:
        """The scratch that the operation of line n takes, for as long as it has that."""
        verb = self.operation(n)
        if verb == "tt.func":
            return Tenant("the warps that wait for a role", offset(text), 1, 1, n, self.end)
        if verb == "ttg.warp_specialize":
            last = self.closed(n)
            bytes_ = size_of_captures(re.search(r"\} : \((.*)\) -> ", self.lines[last])[1])
            name = f"the values that ttg.warp_specialize captures{self.where(self.lines[last])}"
            return Tenant(name, offset(text), bytes_, bytes_, n, last)
        return Tenant(f"the scratch of {verb}{self.where(text)}", offset(text), 1, scratch(verb, text, warps), n, n)

    def closed(self, n: int) -> int:
        """The line that ends the roles of line n."""
        indent = re.match(" *", self.lines[n])[0]
        return next(i for i in range(n + 1, self.end) if self.lines[i].startswith(indent + "} : ("))

    def operation(self, n: int) -> str:
        """The operation that ends in line n: its name is there, or where the braces open that line n closes."""
        line = self.lines[n]
        if line.strip().startswith("}"):
            opens = re.compile(" " * (len(line) - len(line.lstrip())) + r"[^\s^}]")
            line = next(x for x in reversed(self.lines[:n]) if opens.match(x))
        return re.search(r"\b(?:tt|ttg|ttng)\.\w+", line)[0]

    def where(self, line: str) -> str:
        """` (file:line)` of the source that a line was made of; empty if nobody knows."""
        found, todo = [], re.findall(r"loc\((.*)\)$", line.strip())
        while todo:
            text = todo.pop(0)
            found += re.findall(r'"([^"]+)":(\d+):', text)
            todo = [self.sources[x] for x in re.findall(r"#loc\d*", text) if x in self.sources] + todo
        found = [x for x in found if "/triton/" not in x[0]] or found
        return f" ({Path(found[0][0]).name}:{found[0][1]})" if found else ""

    def lives(self, allocation: str) -> tuple[int, int]:
        """From the line that makes it to the last that names it, or to the end of the loop or of the roles there.

        So long Triton keeps its bytes from others.
        """
        lines = [x.line for x in self.mentions if x.view.allocation == allocation]
        first, last = min(lines), max(lines)
        for begin, end in sorted({*self.loops, *self.roles}, key=lambda x: x[1]):
            if first < begin <= last <= end:
                last = end
        return first, last

    def unkept(self) -> list[str]:
        """Errors, a sentence for each slot and rule.

        Of what is in use together Triton keeps the bytes apart; `perhaps` is said of scratch that begins below.
        """
        tenants = [
            Tenant(name, start, bytes_, bytes_, *self.lives(name)) for name, (start, bytes_) in self.allocations.items()
        ]
        found = list(self.unknown)
        for made in (x for x in self.mentions if x.operation == "ttng.init_barrier"):
            view, kept = made.view, self.lives(made.view.allocation)[1]
            ends = [x.line for x in self.mentions if x.operation == "ttng.inval_barrier" and x.view.meets(view)]
            until = min((x for x in ends if x > made.line), default=self.end)
            name = self.called(view)
            # the first rule
            roles = [x for x in self.roles if made.line < x[0] < until]
            uses = [x.line for x in self.mentions if x.view.meets(view) and x.operation not in IDLE]
            if roles and not any(a < n < b for n in uses for a, b in roles):
                found.append(f"barrier {name} is initialised and no role uses it")
            elif not any(made.line < n < until for n in uses):
                found.append(f"barrier {name} is initialised and nothing uses it")
            # the second
            base, _ = self.allocations[view.allocation]
            start, stop = base + view.start, base + view.stop
            others = []
            for x in tenants + self.scratch:
                meanwhile = made.line < x.last and x.first < until and x.name != view.allocation
                if meanwhile and x.start < stop and start < x.start + x.least:
                    others.append(x.name)
                elif meanwhile and x.first > kept and x.start < stop and start < x.start + x.most:
                    others.append(f"{x.name} (perhaps)")
            if others:
                names = ", ".join(dict.fromkeys(others))
                end = " before it is invalidated" if until < self.end else "; it is never invalidated"
                found.append(f"barrier {name}: its bytes {start}..{stop} are also those of {names}{end}")
        return list(dict.fromkeys(found))

    def called(self, view: View) -> str:
        """A slot's name: the allocation's, its number if there are several, and the line of the source."""
        line = self.lines[min(x.line for x in self.mentions if x.view.allocation == view.allocation)]
        whole = self.allocations[view.allocation][1]
        number = f"[{view.start // 8}]" if view.stop - view.start < whole else ""
        return f"{view.allocation}{number}{self.where(line)}"


# operations that name a barrier and do not use it; all others count as a use, branches and calls that hand it on too
IDLE = {"ttg.local_alloc", "ttg.local_dealloc", "ttg.warp_specialize", "ttng.init_barrier", "ttng.inval_barrier"}
IDLE |= {f"ttg.memdesc_{x}" for x in ("index", "subslice", "trans", "reshape", "reinterpret")}


def part(whole: View, operation: str, numbers: dict[str, int]) -> View:
    """The part of a view that an operation takes: a slot if its number is known, or else perhaps all of it."""
    if index := re.match(rf"ttg\.memdesc_index {NAME}\[({NAME})\]", operation):
        bytes_, number = size("memdesc", operation)[-1], numbers.get(index[1])
        if number is not None:
            start = whole.start + number * bytes_
            return View(whole.allocation, start, start + bytes_)
    return whole
