"""Read what the assembler made of a kernel (SASS): uniform registers read before anything has set them, and products
whose operands lie where a thread's number says.

ptxas 12.8.93 makes such code for sm_90 of some products whose operands lie in the same place in every round. Then a
product's descriptors, which say where its operands are, depend on what an earlier program has left in the registers, or
on another use of a register (lab/known.md). No other check of a compiled kernel sees that.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)([^;]*);")  # HGMMA.64x32x16 R24, RZ ;
LABEL = re.compile(r"^(\S+):")
Register = tuple[str, int]  # R, 4 or UR, 8; M, 16 are four bytes of a thread's memory


class Rule(NamedTuple):
    """A kind of instructions: the pattern that begins them, and what they write."""

    begins: str
    bank: str  # registers R or UR, a thread's memory M, or nothing
    differs: bool | None  # whether a warp's threads get different numbers; None: if they read such


# the first that fits an instruction holds
RULES = (
    Rule(r"S2R \w+, SR_(TID\.X|LANEID)\b", "R", True),
    Rule(r"SHF(\.\w+)*\.R\b[^,]*,[^,]*, 0x([5-9a-f]|\w\w+)\b", "R", False),  # a warp's number
    Rule(r"(S2UR|VOTEU|LDCU)\b", "UR", False),
    Rule(r"(R2UR|CS2UR|REDUX|CREDUX|ELECT)\b", "UR", None),
    Rule(r"STL\b", "M", None),
    Rule("ST|RED|BAR|BRA|BRX|BS|WARP|MEMBAR|EXIT|NOP|DEPBAR|SYNCS|FENCE|CCTL|FCHK|R2P", "", None),
    Rule("UTMA|UBLK|UCGABAR|USETMAXREG", "", None),
    Rule("U", "UR", None),
    Rule("LD|ATOM|SHFL|VOTE|MATCH|CS2R|S2R|.GMMA", "R", False),
    Rule("", "R", None),
)
ENDS = "EXIT", "RET", "BRX", "JMX"  # after which the next instruction does not follow


class Instruction(NamedTuple):
    """One instruction, and the registers that it names."""

    text: str
    reads: frozenset[Register]
    writes: frozenset[Register]
    places: frozenset[Register]  # those it reads that say where a product's operands are
    differs: bool  # whether the threads of a warp write different numbers, whatever they read
    flows: list[tuple[set[Register], set[Register]]]  # if one of the first differs, all of the second do
    guarded: bool
    targets: tuple[str, ...]  # labels that it may go to
    goes_on: bool


def wrong(cubin: bytes) -> list[str]:
    """Instructions of a compiled kernel that read what nothing has set, or find operands by a thread's number."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.run([DISASSEMBLER, "-c", path], check=True, capture_output=True, text=True).stdout
    return [text for section in sass.split("\t.section\t.text.")[1:] for text in wrong_in(section)]


def wrong_in(sass: str) -> list[str]:
    """Find them in one function; a write under a condition counts as a write of a register that nothing had set."""
    code, labels = parsed(sass)
    after: list[list[int]] = [
        [labels[x] for x in one.targets if x in labels] + ([n + 1] if one.goes_on and n + 1 < len(code) else [])
        for n, one in enumerate(code)
    ]
    # on some way to here: uniform registers that nothing has set, and registers that differ; None: no way is known yet
    known: list[tuple[frozenset[Register], frozenset[Register]] | None] = [None] * len(code)
    known[:1], waiting = [(frozenset(("UR", n) for n in range(256)), frozenset())], [0]
    while waiting:
        n = waiting.pop()
        (unset, differ), one = known[n], code[n]
        changed = (one.writes if one.differs else frozenset()).union(*(to for of, to in one.flows if of & differ))
        then = unset - one.writes, (differ if one.guarded else differ - one.writes) | changed
        for m in after[n]:
            both = then if known[m] is None else tuple(x | y for x, y in zip(known[m], then, strict=True))
            if both != known[m]:
                known[m] = both
                waiting.append(m)
    both = zip(code, known, strict=True)
    return [one.text for one, there in both if there and (one.reads & there[0] or one.places & there[1])]


def parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a function, and the number of the one after each label."""
    code, labels = [], {}
    for line in sass.splitlines():
        if found := LINE.search(line):
            code.append(instruction(found))
        elif found := LABEL.match(line):
            labels[found[1]] = len(code)
    return code, labels


def instruction(found: re.Match) -> Instruction:
    """An instruction of its parts as nvdisasm prints them."""
    place, guard, name, kinds, rest = found.groups("")
    code, kinds, operands = f"{name}{kinds}{rest}", kinds.split("."), [x.strip() for x in rest.split(",")]
    rule = next(rule for rule in RULES if re.match(rule.begins, code))
    first = len(operands) > 1 and re.fullmatch(r"U?P\w", operands[0]) is not None  # a predicate stands before it
    writes = [x for x in registers(operands[first], width(name, kinds)) if x[0] == rule.bank]
    read = {n: sources(name, kinds, n, x) for n, x in enumerate(operands) if n != first or not writes}
    reads = [x for own in read.values() for x in own]
    places = [x for n, own in read.items() if operands[n].startswith("gdesc") for x in own]
    if name in ("LDL", "STL"):  # word by word
        flows = [({x}, {y}) for x, y in zip(reads, writes, strict=False)]
    else:
        flows = [(set(reads), set(writes))] if rule.differs is None else []
    targets = () if name == "BSSY" else tuple(re.findall(r"`\((\S+?)\)", rest))
    leaves = name in ENDS or (name in ("BRA", "JMP") and len(operands) == 1)
    text, guarded, goes_on = " ".join(f"{place}: {guard}{code}".split()), bool(guard), bool(guard) or not leaves
    reads, writes, places = map(frozenset, (reads, writes, places))
    return Instruction(text, reads, writes, places, bool(rule.differs), flows, guarded, targets, goes_on)


def width(name: str, kinds: list[str]) -> int:
    """How many registers an instruction fills, or takes to a thread's memory or from it."""
    if name == "LDSM":  # a register for each matrix of 8 x 8
        return int(kinds[-1]) if kinds[-1].isdigit() else 1
    if name.endswith("GMMA"):  # four warps have the 64 x N sums
        return int(kinds[1].split("x")[1]) // 2
    bits = [int(kind) for kind in kinds if kind in ("32", "64", "128", "256")]
    return max(bits, default=64 if "WIDE" in kinds or name == "CS2R" else 32) // 32


def registers(operand: str, many: int) -> list[Register]:
    """As many in a row as an operand has, each word of a thread's memory (at R1) being one; none of other addresses."""
    if memory := re.fullmatch(r"\[R1(?:\+0x(\w+))?\]", operand):
        return [("M", int(memory[1] or "0", 16) + 4 * n) for n in range(many)]
    found = re.fullmatch(r"[-~|]*(U?R)(\d+)(?:\||\.reuse)*", operand)
    return [(found[1], int(found[2]) + n) for n in range(many)] if found else []


def sources(name: str, kinds: list[str], n: int, operand: str) -> list[Register]:
    """The registers that the operand at n is read from."""
    if address := re.search(r"(\w*)\[[^\[\]]*?\bUR(\d+)", operand):
        if address[1] == "gdesc" and name.endswith("GMMA"):  # two descriptors, or one if a product's first operand is R
            return registers(f"UR{address[2]}", 4)[2 if n > 1 else 0 :]
        return registers(f"UR{address[2]}", 2 if address[1] in ("desc", "gdesc") else 1)  # a descriptor has 64 bits
    return registers(operand, width(name, kinds) if name in ("LDL", "STL") else 2 if "64" in kinds else 1)
