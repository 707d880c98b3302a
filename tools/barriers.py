"""Barriers in shared memory must keep their eight bytes: what compiled kernels are held to, as their TTGIR has them.

PTX: between `mbarrier.init` and `mbarrier.inval` the bytes of a barrier may serve for nothing else. Triton's allocator
does not know this rule: it gives the bytes of an allocation away after the last operation that names the allocation. A
barrier that is initialised and then used by nobody is free at once, and its bytes become a reduction's scratch, or hold
the values that `ttg.warp_specialize` hands to its roles. Alone on a GPU such a kernel worked; beside other processes
its roles read addresses that were none. (Triton invalidates the barriers that it makes itself; Gluon leaves it to us.)

So of each slot of a barrier is asked:

    does a role use it     wait, arrive, expect, be what a copy arrives at; where there are no roles, does anything
    is it invalidated      this names the allocation once more, and until then the allocator keeps its bytes from others

TTGIR is read as text, line by line: Triton's Python module has no way to the attributes that all versions share.
"""

import re
from pathlib import Path
from typing import NamedTuple

NAME = r"%[\w$.-]+"
# operations that name a barrier and do not use it; all others count as a use, branches and calls that hand it on too
IDLE = {"ttg.local_alloc", "ttg.local_dealloc", "ttg.warp_specialize", "ttng.init_barrier", "ttng.inval_barrier"}
IDLE |= {f"ttg.memdesc_{x}" for x in ("index", "subslice", "trans", "reshape", "reinterpret")}


class View(NamedTuple):
    """An allocation, or a slot of it; a number that is not known, None, may be any."""

    allocation: str
    slot: tuple[int | None, ...] = ()

    def meets(self, other: "View") -> bool:
        pairs = zip(self.slot, other.slot, strict=False)
        return self.allocation == other.allocation and all(a == b or None in (a, b) for a, b in pairs)


class Mention(NamedTuple):
    """An operation that names an allocation or a view of it."""

    line: int
    operation: str
    view: View


def unkept(ttgir: str) -> list[str]:
    """Errors of the barriers of a compiled kernel."""
    if "ttng.init_barrier" not in ttgir:
        return []
    sources = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))
    _, *functions = re.split(r"^(?=  tt\.func )", ttgir, flags=re.MULTILINE)
    return [x for function in functions for x in Function(function, sources).unkept()]


class Scope(NamedTuple):
    """The names that the lines of a function, or of one of its roles, can use."""

    views: dict[str, View]
    numbers: dict[str, int]


class Function:
    """A function's program in order: its allocations, who names them where, and its roles."""

    def __init__(self, text: str, sources: dict[str, str]):
        self.lines, self.sources = text.splitlines(), sources
        self.mentions: list[Mention] = []
        self.roles: list[tuple[int, int]] = []  # first and last line of each `warp_specialize`
        self.captured: list[View | None] = []  # by the last of them
        self.unknown: list[str] = []  # barriers that are no view of an allocation
        scope = outer = Scope({}, {})
        for n, line in enumerate(self.lines):
            text = line.strip()
            if self.roles and n == self.roles[-1][1]:
                scope = outer
            if re.match(r"partition\d+\(", text):  # it knows only what is handed to it, by new names
                given = zip(re.findall(rf"({NAME}): ", text), self.captured, strict=True)
                scope = Scope({x: view for x, view in given if view}, {})
            else:
                self.read(n, text, scope)

    def read(self, n: int, text: str, scope: Scope) -> None:
        """Note what line n makes or names."""
        made, operation = re.match(rf"(?:({NAME})(?::\d+)? = )?(.*)", text).groups()
        names = re.findall(NAME, operation)
        used = [scope.views[x] for x in dict.fromkeys(names) if x in scope.views]
        if verb := re.match(r'"?([\w.]+)', operation):
            self.mentions += [Mention(n, verb[1], view) for view in used]
        if number := re.match(r"arith\.constant (-?\d+) : ", operation):
            scope.numbers[made] = int(number[1])
        elif operation.startswith("ttg.local_alloc"):
            scope.views[made] = View(made)
            self.mentions.append(Mention(n, "ttg.local_alloc", View(made)))
        elif operation.startswith("ttg.memdesc_") and used:
            index = re.match(rf"ttg\.memdesc_index {NAME}\[({NAME})\]", operation)
            number = (scope.numbers.get(index[1]),) if index else ()
            scope.views[made] = View(used[0].allocation, used[0].slot + number)
        elif operation.startswith("ttg.warp_specialize("):
            self.captured = [scope.views.get(x) for x in names]
            indent = re.match(" *", self.lines[n])[0]
            last = next(i for i in range(n + 1, len(self.lines)) if self.lines[i].startswith(indent + "} : ("))
            self.roles.append((n, last))
        elif operation.startswith("ttng.init_barrier") and not used:
            self.unknown.append(f"barrier {names[0]}{self.where(text)} is no part of a known allocation")

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
        """Errors, a sentence for each slot and rule."""
        errors = list(self.unknown)
        for made in (x for x in self.mentions if x.operation == "ttng.init_barrier"):
            later = [x for x in self.mentions if x.line > made.line and x.view.meets(made.view)]
            ends = [x.line for x in later if x.operation == "ttng.inval_barrier"]
            until = min(ends, default=len(self.lines))
            uses = [x.line for x in later if x.operation not in IDLE and x.line < until]
            roles = [(a, b) for a, b in self.roles if made.line < a < until]
            name = f"barrier {self.called(made.view)}"
            if roles and not any(a < n < b for n in uses for a, b in roles):
                errors.append(f"{name} is initialised and no role uses it")
            elif not uses:
                errors.append(f"{name} is initialised and nothing uses it")
            if not ends:
                errors.append(f"{name} is never invalidated: others may have its bytes while it is a barrier")
        return list(dict.fromkeys(errors))

    def called(self, view: View) -> str:
        """A slot's name: the allocation's, its number if there are several, and the line of the source."""
        line = self.lines[min(x.line for x in self.mentions if x.view.allocation == view.allocation)]
        number = "".join(f"[{n}]" for n in view.slot if n is not None)
        return f"{view.allocation}{number}{self.where(line)}"
