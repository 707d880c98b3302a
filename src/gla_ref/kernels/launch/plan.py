"""Signature -> plan -> launch: why the second call of a kind costs next to nothing (chapter 14).

A *signature* is what of a call's arguments decides how it runs: shapes, strides, dtypes, device, alignment, options; no
values. A *plan* is what is to be done, as data that a person can print: tensors to make, kernels to launch with
which numbers, what is returned. Making it is a pure function of the signature and needs no GPU. A *program* is a plan
bound to compiled kernels. Calls look their signature up in a dictionary; only a new one is checked and planned:

    q, k, v, g ... -> signature -> known? -> program: torch.empty, launch, launch
                                -> new?   -> checks -> plan -> program
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .hardware import Hardware


class Spec(NamedTuple):
    """A tensor without its memory, as plans see it; `name` tells it from the others of its plan."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # to 16 bytes

    @property
    def bytes(self) -> int:
        """What it takes in memory; an expanded axis takes nothing."""
        held = [n for n, s in zip(self.shape, self.strides, strict=True) if s or n == 1]
        return prod(held) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return self.strides == strides_of(self.shape)

    def transposed(self, a: int, b: int) -> Spec:
        """The same memory, seen with two axes exchanged."""
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        return Spec(self.name, tuple(shape), tuple(strides), self.dtype, self.aligned)


class Box(NamedTuple):
    """A tensor [B, H, T, D] as the copy engine (TMA) takes it: in boxes of some rows and columns of one head."""

    tensor: Spec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: object = None  # in shared memory, if the kernel is told it (Gluon)


class Make(NamedTuple):
    """Make a tensor: empty, filled with zeros, or what a function of PyTorch makes of others."""

    tensor: Spec
    zero: bool = False
    function: Callable | None = None
    args: tuple = ()


class Launch(NamedTuple):
    """Launch a kernel; `args` are all of its parameters in order, with a Spec or Box for each tensor."""

    kernel: Callable
    grid: tuple[int, ...]
    args: tuple
    options: dict

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def tensors(self) -> list[Spec]:
        found = []
        for x in self.args:
            kind = type(x)
            if kind is Spec:
                found.append(x)
            elif kind is Box:
                found.append(x.tensor)
        return found

    def given(self, name: str):
        """What a parameter of the kernel gets; None where it has no such parameter."""
        names = self.kernel.arg_names
        return self.args[names.index(name)] if name in names else None


class Plan(NamedTuple):
    """What a call does, in order; `why` has a sentence for each choice that was made."""

    name: str
    hardware: Hardware
    inputs: tuple[Spec | None, ...]
    steps: tuple[Make | Launch, ...]
    outputs: tuple[Spec | None, ...]
    why: tuple[str, ...]

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]


class Draft:
    """A plan while it is made."""

    def __init__(self, hardware: Hardware, *inputs: Spec | None):
        self.hardware, self.inputs, self.steps, self.reasons = hardware, inputs, [], []
        self.names = {x.name: 1 for x in inputs if x is not None}  # how often each was given

    def spec(self, name: str, *shape: int, dtype=torch.float32) -> Spec:
        """What a contiguous tensor will be; its name is made one of a kind."""
        self.names[name] = count = self.names.get(name, 0) + 1
        return Spec(name if count == 1 else f"{name} {count}", shape, strides_of(shape), dtype)

    def new(self, name: str, *shape: int, dtype=torch.float32, zero: bool = False) -> Spec:
        """A tensor to be made, contiguous; filled with zeros or not at all."""
        spec = self.spec(name, *shape, dtype=dtype)
        self.steps.append(Make(spec, zero))
        return spec

    def like(self, name: str, x: Spec) -> Spec:
        return self.new(name, *x.shape, dtype=x.dtype)

    def compute(
        self, name: str, function: Callable, x: Spec | None, *args, shape=None, dtype=torch.float32
    ) -> Spec | None:
        """What a function of PyTorch makes of x, contiguous and of x's shape; None of None."""
        if x is None:
            return None
        spec = self.spec(name, *(shape or x.shape), dtype=dtype)
        self.steps.append(Make(spec, False, function, (x, *args)))
        return spec

    def contiguous(self, x: Spec | None, dtype: torch.dtype | None = None) -> Spec | None:
        """x itself, or a copy if it is not contiguous and of this dtype."""
        if x is None or (x.contiguous and x.dtype == (dtype or x.dtype)):
            return x
        dtype = dtype or x.dtype
        return self.compute(f"{x.name} contiguous", _copy, x, dtype, dtype=dtype)

    def gradient_of_o(self, x: Spec, do: Spec, scale: float) -> tuple[Spec, float]:
        """(do, scale) as walks backwards take them: do by the copy engine, if it takes x."""
        if describable(x, self.hardware) and not describable(do, self.hardware):
            do = self.contiguous(do)  # the gradient of a sum has strides of 0
        if scale == 0:  # then o says nothing, the final state all the same
            return self.new("0", *do.shape, dtype=do.dtype, zero=True), 1.0
        return do, scale

    def launch(self, kernel, grid: int | tuple[int, ...], *args, **named) -> None:
        """Launch `kernel` with these arguments; what it has no parameter for is an option of Triton's.

        In a call program.py puts the call's tensors in the places of their Specs and Boxes.
        """
        rest = kernel.arg_names[len(args) :]
        args += tuple([named.pop(name) for name in rest])
        self.steps.append(Launch(kernel, grid if isinstance(grid, tuple) else (grid,), args, named))

    def because(self, sentence: str) -> None:
        self.reasons.append(sentence)

    def plan(self, name: str, *outputs: Spec | None) -> Plan:
        """The plan, when all is said."""
        why = tuple(dict.fromkeys(self.reasons))
        return Plan(name, self.hardware, self.inputs, tuple(self.steps), outputs, why)


def cdiv(n: int, d: int) -> int:
    """As triton.cdiv, which is made for kernels and takes ten times as long."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    found, n = [], 1
    for size in reversed(shape):
        found.append(n)
        n *= size
    return tuple(reversed(found))


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def spec_of(name: str, x: Tensor | None) -> Spec | None:
    if x is None:
        return None
    # strides of axes of one element say nothing, and PyTorch's contiguous tensors may have any there
    own = strides_of(x.shape) if 1 in x.shape and x.is_contiguous() else x.stride()
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return Spec(name, tuple(x.shape), own, x.dtype, aligned)


def describable(x: Spec, hardware: Hardware, itemsize: int = 2) -> bool:
    """Whether the copy engine can address x, of elements of so many bytes: rows and strides of 16 bytes."""
    if not (hardware.copy_engine and x.aligned and x.dtype.itemsize == itemsize):
        return False
    *strides, last = x.strides
    unit = 16 // itemsize
    if last != 1 or x.shape[-1] % unit:
        return False
    for s, n in zip(strides, x.shape, strict=False):
        if n > 1 and (s <= 0 or s % unit):
            return False
    return True


def boxed(x: Spec, rows: int, width: int) -> Box:
    """x [B, T, H, D] as boxes of `rows` tokens of one head; beyond the tensor they read zeros."""
    (B, T, H, D), (b, t, h, _) = x.shape, x.strides
    # the stride of an axis of one element is never used but must be valid
    strides = b if B > 1 else 8, h if H > 1 else 8, t if T > 1 else 8, 1
    return Box(x, (B, H, T, D), strides, (1, 1, rows, width))


def boxes(engine: bool, rows: int, *tiles: tuple[Spec | None, int]) -> list[Spec | Box | None]:
    """Each (x, width) as what a kernel gets: boxes where the copy engine is used, else x."""
    return [boxed(x, rows, width) if engine and x is not None else x for x, width in tiles]
