"""Read what the assembler made of a kernel (SASS): uniform registers that are read before anything has set them.

ptxas 12.8.93 makes such code for sm_90 of some products whose operands lie in the same place in every round. Then a
product's descriptors, which say where its operands are, depend on what an earlier program has left in the registers
(lab/known.md). No other check of a compiled kernel sees that, and on a GPU the results are right most of the time.
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
# instructions that write a uniform register, in addition to those whose names begin with U
WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "CREDUX", "ELECT", "LDCU")
# and those beginning with U that write none
SILENT = ("UTMA", "UBLK", "UCGABAR", "USETMAXREG")


class Instruction(NamedTuple):
    """One instruction: uniform registers that it reads and writes, labels that it may go to, whether it may go on."""

    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    targets: tuple[str, ...]
    goes_on: bool


def unset(cubin: bytes) -> list[str]:
    """Instructions of a compiled kernel that read a uniform register which no instruction has set on some way there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.run([DISASSEMBLER, "-c", path], check=True, capture_output=True, text=True).stdout
    return [text for section in sass.split("\t.section\t.text.")[1:] for text in unset_in(section)]


def unset_in(sass: str) -> list[str]:
    """Find them in one function; a write under a condition counts as a write."""
    code, labels = parsed(sass)
    after: list[list[int]] = [
        [labels[x] for x in one.targets if x in labels] + ([n + 1] if one.goes_on and n + 1 < len(code) else [])
        for n, one in enumerate(code)
    ]
    known: list[frozenset[int] | None] = [None] * len(code)  # set on every way to here; None: no way is known yet
    known[:1], waiting = [frozenset()], [0]
    while waiting:
        n = waiting.pop()
        then = known[n] | code[n].writes
        for m in after[n]:
            both = then if known[m] is None else known[m] & then
            if both != known[m]:
                known[m] = both
                waiting.append(m)
    return [one.text for one, there in zip(code, known, strict=True) if there is not None and one.reads - there]


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
    operands, kinds = [x.strip() for x in rest.split(",")], kinds.split(".")
    writer = name in WRITERS or name.startswith("U") and not name.startswith(SILENT)
    bits = max([int(kind) for kind in kinds if kind in ("64", "128", "256")], default=64 if "WIDE" in kinds else 32)
    written, reads = set(), set()
    for n, operand in enumerate(operands):
        if register := re.fullmatch(r"UR(\d+)", operand):
            first = int(register[1])
            if writer and (n == 0 or n == 1 and re.fullmatch(r"U?P\w", operands[0])):
                written = {*range(first, first + bits // 32)}
            else:
                reads |= {*range(first, first + (2 if "64" in kinds else 1))}
        # an address; a descriptor has 64 bits. Hopper's products name both by one register, and read the second one
        # only where their first operand is in registers
        for before, number in re.findall(r"(\w*)\[[^\[\]]*?\bUR(\d+)", operand):
            first, both = int(number), before == "gdesc" and name.endswith("GMMA")
            many = 4 if both else 2 if before in ("desc", "gdesc") else 1
            reads |= {*range(first + 2 * (both and n > 1), first + many)}
    targets = () if name == "BSSY" else tuple(re.findall(r"`\((\S+?)\)", rest))
    leaves = name in ("EXIT", "RET", "BRX", "JMX") or name in ("BRA", "JMP") and len(operands) == 1
    text = " ".join(f"{place}: {''.join(found.groups('')[1:])}".split())
    return Instruction(text, frozenset(reads), frozenset(written), targets, bool(guard) or not leaves)
