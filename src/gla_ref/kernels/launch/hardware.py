"""A GPU as plans see it: memory on chip, matrix units, copy engine, multiprocessors (chapter 13)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

KIB = 1024


class Hardware(NamedTuple):
    """A class of GPUs, and the number of multiprocessors of one GPU.

    Attributes:
        name: the compute capability, such as "sm_90"; "interpreter" for Triton's interpreter on a CPU.
        family: the classes that share tables of tiles.
        shared_memory: bytes of shared memory that one program may use.
        matrix_units: whether Triton multiplies 16-bit tiles, bfloat16 included, on matrix units.
        copy_engine: whether kernels load and store tiles by descriptors (TMA).
        multiprocessors: their number; so many programs keep the whole GPU busy.
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

    @property
    def options(self) -> dict[str, str]:
        """Triton's options for every kernel that a plan launches here.

        Triton 3.9 calls ptxas 13.4.59 with level 2 of register allocation. At ptxas's own level, 4, kernels for Hopper
        spill less, and none of 79 cases became slower (lab/gpu_classes.md). Older assemblers make the same code by any.
        """
        return {"ptx_options": "--regAllocOptLevel=4"} if self.name == "sm_90" else {}

    def __str__(self) -> str:
        return self.name if self.interpreted else f"{self.name}, {self.multiprocessors} multiprocessors"


# Compute capability: family, shared memory per program, matrix units, copy engine, multiprocessors of a card that
# readers have (T4, A100, A10, L4, H100 and H200, B200, RTX 5090). Source: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability". Matrix units and copy engine are those that kernels use. Triton does not use
# Turing's matrix units. Kernels use only Hopper's copy engine: by Triton 3.7.1 on sm_100 a store by the engine in a
# pipelined loop ended the compiler, and Python with it; on sm_120 attention spilled ten times as much with the engine.
# Hopper's tiles were measured on Hopper. sm_80 to sm_89 and sm_120 multiply operands from registers, which limit their
# tiles; they share those of the smallest. sm_100 also uses tcgen05, whose operands lie in shared or tensor memory, but
# has their tiles, since none were measured on it
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
    """Return the entry for the smallest width that fits all `sizes`, from a table {(family, bits): {width: entry}}.

    `sizes` are called by their axes, K and V.

    Raises:
        TypeError: GPUs of this class do not multiply this dtype.
        ValueError: a size exceeds every width of the table.
    """
    if dtype == torch.bfloat16 and not hardware.matrix_units:
        raise TypeError(f"q: expected float32 or float16 on {hardware.name}, got bfloat16")
    entries = table[hardware.family, 8 * dtype.itemsize]
    for axis, size in sizes.items():
        if size > max(entries):
            room = f"{hardware.shared_memory // KIB} KiB of shared memory a program"
            raise ValueError(
                f"{'q' if axis == 'K' else 'v'}: expected {axis} of at most {max(entries)} in {dtype} on "
                f"{hardware.name} ({room}), got {size}"
            )
    return next(x for width, x in entries.items() if max(sizes.values()) <= width)


def class_of(major: int, minor: int) -> Hardware:
    """Return the newest class that is not newer than a compute capability.

    Raises:
        ValueError: the GPU is older than every class.
    """
    capability = 10 * major + minor
    known = {int(name.removeprefix("sm_")): x for name, x in CLASSES.items()}
    older = [n for n in known if n <= capability]
    if not older:
        raise ValueError(f"device: expected a GPU of compute capability 7.5 or newer, got {major}.{minor}")
    return known[max(older)]


@functools.cache
def hardware_of(device: torch.device) -> Hardware:
    """Return the Hardware of a device; on a CPU, the interpreter's."""
    if device.type != "cuda":
        return INTERPRETER
    row = class_of(*torch.cuda.get_device_capability(device))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return row._replace(multiprocessors=count)
