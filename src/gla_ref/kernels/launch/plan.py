"""Signature -> plan -> launch: why the second call of a kind costs next to nothing (chapter 13).

A *signature* has the properties of a call's arguments that decide how the call runs: shapes, strides, dtypes, device,
alignment, options; no values. A *plan* lists the steps of a call as data that a person can print: tensors to make,
kernels to launch and their arguments, tensors to return. A pure function makes the plan from the signature and needs no
GPU. A *program* is a plan bound to compiled kernels. Each call looks up its signature in a dictionary; only a new
signature is checked and planned (on a CPU, where reading values costs little, every call is checked):

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
    """A tensor without its memory; `name` is unique within a plan."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # to 16 bytes

    @property
    def bytes(self) -> int:
        """Bytes of memory; an expanded axis takes no memory of its own."""
        held = [n for n, s in zip(self.shape, self.strides, strict=True) if s or n == 1]
        return prod(held) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return self.strides == strides_of(self.shape)

    def transposed(self, a: int, b: int) -> Spec:
        """This tensor with two axes exchanged, in the same memory."""
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
    layout: object = None  # in shared memory, for Gluon kernels


class Make(NamedTuple):
    """Make a tensor: empty, filled with zeros, or by a PyTorch function of other tensors."""

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
        specs = []
        for x in self.args:
            kind = type(x)
            if kind is Spec:
                specs.append(x)
            elif kind is Box:
                specs.append(x.tensor)
        return specs

    def given(self, name: str):
        """The argument for a parameter of the kernel; None if the kernel has no such parameter."""
        names = self.kernel.arg_names
        return self.args[names.index(name)] if name in names else None


class Plan(NamedTuple):
    """The steps of a call, in order; `why` has a sentence for each choice."""

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
    """A plan under construction."""

    def __init__(self, hardware: Hardware, *call):
        """Begin the plan of a call, of which the Specs are the inputs; they keep their places."""
        self.hardware, self.steps, self.reasons = hardware, [], []
        self.inputs = tuple([x if type(x) is Spec else None for x in call])
        self.names = {x.name: 1 for x in self.inputs if x is not None}  # uses of each name

    def spec(self, name: str, *shape: int, dtype=torch.float32) -> Spec:
        """The Spec of a new contiguous tensor; a number makes a repeated name unique."""
        self.names[name] = count = self.names.get(name, 0) + 1
        return Spec(name if count == 1 else f"{name} {count}", shape, strides_of(shape), dtype)

    def new(self, name: str, *shape: int, dtype=torch.float32, zero: bool = False) -> Spec:
        """Add a step that makes a contiguous tensor, empty or filled with zeros."""
        spec = self.spec(name, *shape, dtype=dtype)
        self.steps.append(Make(spec, zero))
        return spec

    def like(self, name: str, x: Spec) -> Spec:
        return self.new(name, *x.shape, dtype=x.dtype)

    def compute(
        self, name: str, function: Callable, x: Spec | None, *args, shape=None, dtype=torch.float32
    ) -> Spec | None:
        """Add a step that makes a contiguous tensor by a PyTorch function of x; None if x is None.

        The tensor has the shape of x unless `shape` is given.
        """
        if x is None:
            return None
        spec = self.spec(name, *(shape or x.shape), dtype=dtype)
        self.steps.append(Make(spec, False, function, (x, *args)))
        return spec

    def contiguous(self, x: Spec | None, dtype: torch.dtype | None = None) -> Spec | None:
        """Return x, or a contiguous copy in `dtype` if x has other strides or another dtype."""
        if x is None or (x.contiguous and x.dtype == (dtype or x.dtype)):
            return x
        dtype = dtype or x.dtype
        return self.compute(f"{x.name} contiguous", _copy, x, dtype, dtype=dtype)

    def gradient_of_o(self, x: Spec, do: Spec, scale: float) -> tuple[Spec, float]:
        """Return (do, scale) for walks backwards; if the copy engine can load x, it can load do."""
        if describable(x, self.hardware) and not describable(do, self.hardware):
            do = self.contiguous(do)  # the gradient of a sum has strides of 0
        if scale == 0:  # o is 0 and passes no gradient on, but the final state does
            return self.new("0", *do.shape, dtype=do.dtype, zero=True), 1.0
        return do, scale

    def launch(self, kernel, grid: int | tuple[int, ...], *args, **named) -> None:
        """Add a launch; names that are no parameters of `kernel` are Triton's options.

        In a call program.py puts the call's tensors in the places of their Specs and Boxes.
        """
        rest = kernel.arg_names[len(args) :]
        args += tuple([named.pop(name) for name in rest])
        grid = grid if isinstance(grid, tuple) else (grid,)
        self.steps.append(Launch(kernel, grid, args, self.hardware.options | named))

    def because(self, sentence: str) -> None:
        self.reasons.append(sentence)

    def plan(self, name: str, *outputs: Spec | None) -> Plan:
        """The finished plan."""
        why = tuple(dict.fromkeys(self.reasons))
        return Plan(name, self.hardware, self.inputs, tuple(self.steps), outputs, why)


def cdiv(n: int, d: int) -> int:
    """Divide and round up; triton.cdiv, made for kernels, takes ten times as long."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= size
    return tuple(reversed(strides))


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def spec_of(name: str, x: Tensor | None) -> Spec | None:
    if x is None:
        return None
    # an axis of one element may have any stride, even in a contiguous tensor
    strides = strides_of(x.shape) if 1 in x.shape and x.is_contiguous() else x.stride()
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return Spec(name, tuple(x.shape), strides, x.dtype, aligned)


def describable(x: Spec, hardware: Hardware, itemsize: int = 2) -> bool:
    """Whether the copy engine can address x: elements of `itemsize` bytes, rows and strides of 16-byte multiples."""
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
    """Return boxes of `rows` tokens of one head of x [B, T, H, D]; a box reads zeros beyond the tensor."""
    (B, T, H, D), (b, t, h, _) = x.shape, x.strides
    # the stride of an axis of one element is never used but must be valid
    strides = b if B > 1 else 8, h if H > 1 else 8, t if T > 1 else 8, 1
    return Box(x, (B, H, T, D), strides, (1, 1, rows, width))


def boxes(engine: bool, rows: int, *tiles: tuple[Spec | None, int]) -> list[Spec | Box | None]:
    """Return a kernel's arguments for each (x, width): boxes for the copy engine, else x."""
    return [boxed(x, rows, width) if engine and x is not None else x for x, width in tiles]
