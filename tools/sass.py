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
# instructions that write a uniform register, in addition to those whose names begin with U
WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "CREDUX", "ELECT", "LDCU")
# and those beginning with U that write none
SILENT = ("UTMA", "UBLK", "UCGABAR", "USETMAXREG")
# instructions that write no register of a thread, and those that write what is the same in a warp, or read from memory
STORES = ("ST", "RED", "BAR", "BRA", "BRX", "BS", "WARP", "MEMBAR", "EXIT", "NOP", "DEPBAR", "SYNCS", "FENCE", "CCTL")
COMMON = ("LD", "ATOM", "SHFL", "VOTE", "MATCH", "CS2R", "S2UR", "S2R")


class Instruction(NamedTuple):
    """One instruction; its registers are R4, UR8, or M16 for four bytes of a thread's memory."""

    text: str
    reads: frozenset[str]
    writes: frozenset[str]
    places: frozenset[str]  # those it reads that say where a product's operands are
    differs: bool | None  # whether the threads of a warp write different numbers; None: if they read such
    moves: dict[str, str]  # where each word goes that is put into a thread's memory or taken from it
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
    known: list[tuple[frozenset[str], frozenset[str]] | None] = [None] * len(code)
    known[:1], waiting = [(frozenset(f"UR{n}" for n in range(256)), frozenset())], [0]
    while waiting:
        n = waiting.pop()
        (unset, differ), one = known[n], code[n]
        changed = one.writes if one.differs or one.differs is None and one.reads & differ else frozenset()
        changed = frozenset(one.moves[x] for x in one.moves.keys() & differ) if one.moves else changed
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
    operands, kinds = [x.strip().removesuffix(".reuse") for x in rest.split(",")], kinds.split(".")
    uniform = name in WRITERS or name.startswith("U") and not name.startswith(SILENT)
    writer = uniform or not name.startswith(("U", *STORES))
    bits = [int(kind) for kind in kinds if kind in ("32", "64", "128", "256")]
    words, product = max(bits, default=64 if "WIDE" in kinds or name == "CS2R" else 32) // 32, name.endswith("GMMA")
    if name == "LDSM" or product:  # matrices of 8 x 8; a product 64 x N of four warps
        words = int(re.findall(r"\d+", kinds[-1] if name == "LDSM" else kinds[1])[-2 * product] or 1) // (1 + product)
    written, reads, places, moves = set(), set(), set(), {}
    for n, operand in enumerate(operands):
        if register := re.fullmatch(r"[-~|]*(U?R)(\d+)\|?", operand):
            bank, first = register[1], int(register[2])
            many = words if name == "STL" else 2 if "64" in kinds and bank == "UR" else 1
            if writer and (bank == "UR") == uniform and (n == 0 or n == 1 and re.fullmatch(r"U?P\w", operands[0])):
                written = {f"{bank}{x}" for x in range(first, first + words)}
            else:
                reads |= {f"{bank}{x}" for x in range(first, first + many)}
        # an address, or descriptors of 64 bits: Hopper's products name two by one register, or skip one in registers
        for before, number in re.findall(r"(\w*)\[[^\[\]]*?\bUR(\d+)", operand):
            first, both = int(number), before == "gdesc" and product
            many = 4 if both else 2 if before in ("desc", "gdesc") else 1
            read = {f"UR{x}" for x in range(first + 2 * (both and n > 1), first + many)}
            reads, places = reads | read, places | (read if before == "gdesc" else set())
    if name in ("STL", "LDL") and (own := re.search(r"\[R1(?:\+0x([0-9a-f]+))?\]", rest)):
        memory = [f"M{int(own[1] or '0', 16) + 4 * x}" for x in range(words)]
        value = re.fullmatch(r"R(\d+)", operands[name == "STL"])  # else RZ, a zero
        here = [f"R{int(value[1]) + x}" for x in range(words)] if value else []
        written, source = ({*memory}, here) if name == "STL" else ({*here}, memory)
        moves = dict(zip(source, memory if name == "STL" else here, strict=True)) if here else {}
    differs = False if name.startswith(COMMON) and not moves or product else None
    if name == "S2R" and operands[1] in ("SR_TID.X", "SR_LANEID"):
        differs = True
    elif name == "SHF" and "R" in kinds and re.fullmatch("0x[0-9a-f]+", operands[2]) and int(operands[2], 16) >= 5:
        differs = False  # a warp's number
    targets = () if name == "BSSY" else tuple(re.findall(r"`\((\S+?)\)", rest))
    leaves = name in ("EXIT", "RET", "BRX", "JMX") or name in ("BRA", "JMP") and len(operands) == 1
    text = " ".join(f"{place}: {''.join(found.groups('')[1:])}".split())
    registers = map(frozenset, (reads, written, places))
    return Instruction(text, *registers, differs, moves, bool(guard), targets, bool(guard) or not leaves)
