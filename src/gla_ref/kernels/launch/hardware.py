"""A GPU as plans see it: memory on chip, matrix units, copy engine, multiprocessors (chapter 14)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

KIB = 1024


class Hardware(NamedTuple):
    """A class of GPUs, and how many multiprocessors this one has.

    Attributes:
        name: its compute capability, such as "sm_90"; "interpreter" for Triton's interpreter on a CPU.
        family: the classes that share tables of tiles, since Triton makes the same products for them.
        shared_memory: bytes that one program may have of it.
        matrix_units: whether Triton multiplies 16-bit tiles on them; bfloat16 then, too.
        copy_engine: whether tiles are loaded and stored by descriptors (TMA).
        multiprocessors: how many programs it takes to keep all of it busy.
    """

    name: str
    family: str
    shared_memory: int
    matrix_units: bool
    copy_engine: bool
    multiprocessors: int

    @property
    def interpreted(self) -> bool:
        return self.name == "interpreter"

    def __str__(self) -> str:
        return self.name if self.interpreted else f"{self.name}, {self.multiprocessors} multiprocessors"


# compute capability: family, shared memory a program, matrix units, copy engine, multiprocessors of a card that readers
# have (T4, A100, A10, L4, H100 and H200, B200, RTX 5090). CUDA C++ Programming Guide, table "Technical Specifications
# per Compute Capability". The rest is seen in what Triton 3.7.1 compiles: Turing's matrix units are left alone, so none
# are said to be there. Nor are copy engines but Hopper's: on sm_100 the compiler ends, and Python with it, where a
# pipelined loop stores by one, and on sm_120 attention spills ten times as much with it as without. Hopper's tiles were
# measured there, and fit nothing else: elsewhere operands of a product take registers. Of the rest that have matrix
# units, all have tiles for the smallest, since it is registers that they are short of
CLASSES = {
    name: Hardware(name, family, shared * KIB, *rest)
    for name, family, shared, *rest in [
        ("sm_75", "turing", 64, False, False, 40),
        ("sm_80", "ampere", 163, True, False, 108),
        ("sm_86", "ampere", 99, True, False, 72),
        ("sm_89", "ampere", 99, True, False, 58),
        ("sm_90", "hopper", 227, True, True, 132),
        ("sm_100", "ampere", 227, True, False, 148),
        ("sm_120", "ampere", 99, True, False, 170),
    ]
}
INTERPRETER = Hardware("interpreter", "hopper", 227 * KIB, True, False, 1)


def tiles(table: dict, hardware: Hardware, dtype: torch.dtype, **sizes: int):
    """The entry of a kernel's table, {(family, bits): {width: entry}}, of the least width that all `sizes` fit into.

    Raises:
        TypeError: GPUs of this class do not multiply this dtype.
        ValueError: there is no such entry; `sizes` are called by their axes, K and V.
    """
    if dtype == torch.bfloat16 and not hardware.matrix_units:
        raise TypeError(f"q: expected float32 or float16 on {hardware.name}, got bfloat16")
    entries = table[hardware.family, 8 * dtype.itemsize]
    for axis, size in sizes.items():
        if size > max(entries):
            room = f"{hardware.shared_memory // KIB} KB of shared memory a program"
            raise ValueError(
                f"{'q' if axis == 'K' else 'v'}: expected {axis} of at most {max(entries)} in {dtype} on "
                f"{hardware.name} ({room}), got {size}"
            )
    return next(x for width, x in entries.items() if max(sizes.values()) <= width)


def class_of(major: int, minor: int) -> Hardware:
    """The class of a compute capability: the newest one that is not newer.

    Raises:
        ValueError: a GPU older than all of them.
    """
    capability = 10 * major + minor
    known = {int(name.removeprefix("sm_")): x for name, x in CLASSES.items()}
    older = [n for n in known if n <= capability]
    if not older:
        raise ValueError(f"device: expected a GPU of compute capability 7.5 or newer, got {major}.{minor}")
    return known[max(older)]


@functools.cache
def hardware_of(device: torch.device) -> Hardware:
    """That of a device; of a CPU the interpreter's."""
    if device.type != "cuda":
        return INTERPRETER
    found = class_of(*torch.cuda.get_device_capability(device))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return found._replace(multiprocessors=count)
