"""Checks of a call before it is planned, and those that every call needs (chapter 13)."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad

from ... import _contract as contract
from ...mechanisms import MECHANISMS, Argument, Mechanism
from .hardware import hardware_of
from .versions import not_interpreted, too_old

if reason := too_old(triton.__version__):  # an old Triton also lacks other names that the kernels import
    raise ImportError(reason, name="triton")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def looks_at_values(x: Tensor) -> bool:
    """Whether every call checks values: on a CPU; under GLA_REF_DEBUG=1 on a GPU too, for which the check waits."""
    return x.is_cpu or os.environ.get("GLA_REF_DEBUG") == "1"


def check_launch(tensors: dict[str, Tensor], arguments: tuple[Argument, ...], launched: bool = True) -> None:
    """Kernels take float32, float16 and bfloat16 on a CUDA device, the first two in Triton's interpreter too.

    A call that is only planned, not `launched`, may have its tensors on any device, and its values are not read.

    Raises:
        TypeError: a dtype that kernels do not take.
        ValueError: a device that they do not run on, or a value out of range (see `looks_at_values`).
        RuntimeError: Triton's interpreter does not run with this NumPy.
    """
    known = {a.name: a for a in arguments}
    for name, x in tensors.items():
        role = known[name].role
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
        if not launched:
            continue
        if not (x.is_cuda or x.is_cpu and triton.knobs.runtime.interpret):
            raise ValueError(
                f"{name}: expected a CUDA tensor, got one on {x.device}; "
                "to interpret kernels on the CPU, set TRITON_INTERPRET=1 before importing triton"
            )
        if not x.is_cuda and (reason := not_interpreted(triton.__version__, np.__version__)):
            raise RuntimeError(reason)
        if role == "token" and x.dtype == torch.bfloat16:
            hardware = hardware_of(x.device)
            if hardware.interpreted:
                raise TypeError(
                    f"{name}: expected float32 or float16 on the CPU, got bfloat16, "
                    "whose products Triton's interpreter gets wrong"
                )
            if not hardware.matrix_units:
                raise TypeError(
                    f"{name}: expected float32 or float16 on {hardware.name}, got bfloat16, "
                    "which GPUs multiply from compute capability 8.0 on"
                )
        if role == "gate" and looks_at_values(x):
            contract.check_gate(name, x)
        if role == "strength" and looks_at_values(x):
            contract.check_strength(name, x)


def check_packed(cu_seqlens: Tensor | None, B: int, T: int, device: torch.device, launched: bool = True) -> None:
    """Check cu_seqlens, its device and, where `looks_at_values` says so, its values."""
    values = launched and isinstance(cu_seqlens, Tensor) and looks_at_values(cu_seqlens)
    contract.check_cu_seqlens(cu_seqlens, B, T, values=values)
    if launched and cu_seqlens is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu_seqlens.device}")


def check_call(
    call: NamedTuple,
    most: dict[str, int] | None = None,
    choices: dict[str, tuple[str, ...]] | None = None,
    mechanism: str | None = None,
    launched: bool = True,
) -> dict[str, int]:
    """Check a call of a kernel with states.

    Args:
        call: the call; its `mechanism` is its own unless given.
        most: the largest sizes of some axes.
        choices: the values that some options may have beside None.
        launched: False for a call that is only planned.

    Returns:
        The sizes of all axes.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    kind, S, cu_seqlens = MECHANISMS[mechanism or call.mechanism], call.initial_state, call.cu_seqlens
    given = {a.name: x for a in kind.arguments if (x := getattr(call, a.name)) is not None}
    sizes = check_inputs(kind, given, most or {}, launched)
    contract.check_scale(call.scale, sizes["K"])
    device = next(iter(given.values())).device
    check_packed(cu_seqlens, sizes["B"], sizes["T"], device, launched)
    if S is not None:
        N = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        contract.check_state("initial_state", S, contract.state_shape(kind, sizes, N), device)
    for name, values in (choices or {}).items():
        if (value := getattr(call, name)) not in (None, *values):
            raise ValueError(f"{name}: expected one of {', '.join(values)} or None, got {value!r}")
    return sizes


def check_inputs(
    kind: Mechanism, given: dict[str, Tensor], most: dict[str, int], launched: bool = True
) -> dict[str, int]:
    """Check that required tensors are given, that tensors fit each other, and that no axis exceeds its limit in `most`.

    Returns:
        The sizes of all axes.

    Raises:
        TypeError, ValueError: an argument is missing or does not fit; the message names it.
    """
    known = (*kind.arguments, *kind.states)
    sizes = contract.check_tensors(given, known, kind.multiples)
    check_launch(given, known, launched)
    for axis, size in most.items():
        if sizes[axis] > size:
            name = next(a.name for a in known if axis in a.axes.split())
            raise ValueError(f"{name}: expected {axis} of at most {size}, got {sizes[axis]}")
    return sizes


def check_only_backward(who: str, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Check that neither forward mode nor a transform of torch.func differentiates a tensor.

    A launch reads memory, where neither can be seen: the kernel's derivative would be 0, in silence.

    Raises:
        NotImplementedError: one of the two does.
    """
    traced = torch.compiler.is_compiling()  # then operators without derivatives say so to torch.func.grad
    if forward_ad._current_level < 0 and (traced or not torch._C._are_functorch_transforms_active()):
        return
    if traced:
        torch._dynamo.graph_break()  # and go on without the compiler
    for name, x in zip(names, tensors, strict=True):
        if isinstance(x, Tensor) and differentiated(x):
            raise NotImplementedError(
                f"{name}: expected a tensor that forward mode (torch.autograd.forward_ad, torch.func.jvp, jacfwd) and "
                f"torch.func.grad do not differentiate, got one that they do; {who} supports at most backward() and "
                "torch.autograd.grad, a reference, such as 'recurrent', supports all of these"
            )


def differentiated(x: Tensor) -> bool:
    """Whether x is a dual number, or torch.func.grad, jvp or what is made of these follow it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)  # vmap's
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def check_forward_only(tensors: dict[str, Tensor | None], who: str) -> None:
    """Check that no tensor requires a gradient; `who` names the kernel in messages.

    Raises:
        ValueError: a tensor requires a gradient.
        NotImplementedError: forward mode or torch.func differentiates a tensor.
    """
    check_only_backward(who, tuple(tensors), tuple(tensors.values()))
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True; {who}: forward only"
            )
