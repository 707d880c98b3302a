"""What every kernel's function does before its plan: checks, once a signature; the way to autograd or torch.compile."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._contract import (
    check_cu_seqlens,
    check_gate,
    check_scale,
    check_state,
    check_strength,
    check_tensors,
    state_shape,
)
from ..mechanisms import MECHANISMS, Argument, Mechanism
from ._hardware import hardware_of
from ._program import Planned

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("gla_ref", "FRAGMENT")
KERNELS = ("portable",)  # what an argument `kernel` may ask for
OPTIONS = {"scale": "float?", "path": "str?", "kernel": "str?", "cached": "bool", "need_dg": "bool"}


class Operator:
    """A planned function on its way through PyTorch, by the shortest one there is.

    Called on plain tensors, it looks its program up and runs it, inside a `torch.autograd.Function` where a gradient
    is needed. Where PyTorch itself looks on (torch.compile, torch.func, fake tensors) it is the operator gla_ref::name,
    which none of them looks into. `torch.library.custom_op` would do the latter, but imports the whole of
    PyTorch's compiler in its first call, only to keep it out: two seconds and more.
    """

    def __init__(self, name: str, planned: Planned, outputs: int | None = None):
        """What a plan returns beyond `outputs` is for the backward pass only; None: a list of all is returned."""
        self.name, self.planned, self.tensors, self.outputs = name, planned, len(planned.names), outputs
        arguments = [f"Tensor{'?' if i > 2 else ''} {n}" for i, n in enumerate(planned.names)]  # all have q, k and v
        arguments += [f"{OPTIONS[n]} {n}" for n in planned.options]
        results = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor[]"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {results}")
        LIBRARY.impl(name, lambda *args: given(planned(*args)[:outputs], args[0]), "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.gla_ref, name).default
        self.function = None

    def __call__(self, *args):
        if torch.compiler.is_compiling() or _watched(args[0]):
            found = self.overload(*args)
            return found if self.outputs else [x if x.ndim > 1 else None for x in found]
        if os.environ.get("GLA_REF_DEBUG") == "1" and self.planned.check:
            self.planned.check(*args)
        program = self.planned.find(args)
        tensors = args[: self.tensors]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            if self.function is None:
                check_forward_only(dict(zip(self.planned.names, tensors, strict=True)), "this kernel is")
            return self.function.apply(*args, program)
        return program(tensors)

    def register_fake(self, function):
        torch.library.register_fake(f"gla_ref::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, save: Callable, gradients: Callable):
        """`save(ctx, inputs, output)` what `gradients(ctx, *grads)` needs."""
        torch.library.register_autograd(f"gla_ref::{self.name}", gradients, setup_context=save, lib=LIBRARY)

        def forward(ctx, *args):
            *inputs, program = args
            outputs = tuple(program(inputs[: self.tensors]))
            save(ctx, inputs, outputs)
            return outputs[: self.outputs]

        @once_differentiable
        def backward(ctx, *grads):
            return *gradients(ctx, *grads), None

        # made by its name, which `o.grad_fn` shows
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.function = type(self.name, (torch.autograd.Function,), methods)


def given(outputs: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Outputs as PyTorch's operators return them, which know no None: an empty tensor [0] stands for it."""
    return [like.new_empty(0) if x is None else x for x in outputs]


def with_state(name: str, planned: Planned) -> Operator:
    """The operator of a mechanism with a state: (o, state) of q, k, v, gates, initial state, cu_seqlens, options."""
    operator = Operator(name, planned, 2)

    @operator.register_fake
    def _(q, k, v, *rest):
        cu = rest[operator.tensors - 4]
        N = q.shape[0] if cu is None else cu.shape[0] - 1
        return v.new_empty(v.shape), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)

    return operator


def differentiable(operator: Operator, planned: Planned, kept: Callable) -> None:
    """Make an operator of `with_state` differentiable by `planned`, which gives the gradients of all but cu_seqlens.

    `planned` takes the tensors of the forward pass, what `kept(tensors, outputs)` returns (None: to be made again), the
    gradients of o and state, the options, and whether the first gate needs a gradient.
    """
    gradient, n = Operator(f"{operator.name}_backward", planned), operator.tensors

    @gradient.register_fake
    def _(*args):
        *tensors, S, _ = args[:n]
        tensors[3] = tensors[3] if args[-1] else None
        dS0 = None if S is None else S.new_empty(S.shape, dtype=torch.float32)
        return given([*(x if x is None else x.new_empty(x.shape) for x in tensors), dS0], args[0])

    def save(ctx, inputs, output):
        tensors, ctx.options = inputs[:n], inputs[n:]
        ctx.save_for_backward(*tensors, *kept(tensors, output))
        ctx.set_materialize_grads(False)  # the final state seldom has a gradient

    def gradients(ctx, do, dS):
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else do
        grads = gradient(*saved, do, dS, *ctx.options, ctx.needs_input_grad[3])
        return *grads, None, *[None] * len(ctx.options)

    operator.register_autograd(save, gradients)


def _watched(x) -> bool:
    """Whether somebody other than autograd follows what happens to a tensor."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        and isinstance(x, Tensor)
        or torch._C._are_functorch_transforms_active()
    )


def check_launch(tensors: dict[str, Tensor], arguments: tuple[Argument, ...]) -> None:
    """Kernels take float32, float16 and bfloat16 on a CUDA device, the first two in Triton's interpreter too.

    The values of gates and strengths are looked at under GLA_REF_DEBUG=1 only, because looking means waiting for
    the GPU.

    Raises:
        TypeError: a dtype that kernels do not take.
        ValueError: a device that they do not run on, or a value out of range (under GLA_REF_DEBUG=1).
    """
    known = {a.name: a for a in arguments}
    look = os.environ.get("GLA_REF_DEBUG") == "1"
    for name, x in tensors.items():
        role = known[name].role
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
        if not x.is_cuda and not triton.knobs.runtime.interpret:
            raise ValueError(
                f"{name}: expected a CUDA tensor, got one on {x.device}; "
                "to interpret kernels on the CPU, set TRITON_INTERPRET=1 before importing triton"
            )
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
        if look and role == "gate":
            check_gate(name, x)
        if look and role == "strength":
            check_strength(name, x)


def check_packed(cu_seqlens: Tensor | None, B: int, T: int, device: torch.device) -> None:
    """As `check_cu_seqlens`, on the device of the other tensors; the values under GLA_REF_DEBUG=1 only."""
    check_cu_seqlens(cu_seqlens, B, T, values=os.environ.get("GLA_REF_DEBUG") == "1")
    if cu_seqlens is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu_seqlens.device}")


def check_call(
    mechanism: str,
    tensors: tuple[Tensor | None, ...],
    S: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    most: dict[str, int],
) -> dict[str, int]:
    """A whole call of a kernel with states; `most` has the largest size of some axes. The sizes of all axes.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    kind = MECHANISMS[mechanism]
    given = {a.name: x for a, x in zip(kind.arguments, tensors, strict=True) if x is not None}
    sizes = check_inputs(kind, given, most)
    check_scale(scale, sizes["K"])
    device = next(iter(given.values())).device
    check_packed(cu_seqlens, sizes["B"], sizes["T"], device)
    if S is not None:
        N = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        check_state("initial_state", S, state_shape(kind, sizes, N), device)
    return sizes


def check_inputs(kind: Mechanism, given: dict[str, Tensor], most: dict[str, int]) -> dict[str, int]:
    """Tensors and states that a call was given: nothing that every call needs is missing, all fits, no axis is larger
    than `most` says. The sizes of all axes.

    Raises:
        TypeError, ValueError: otherwise; the message names the argument.
    """
    for argument in kind.arguments:
        if not argument.optional and argument.name not in given:
            raise TypeError(f"{argument.name}: expected a torch.Tensor of shape [{argument.axes}], got None")
    known = (*kind.arguments, *kind.states)
    sizes = check_tensors(given, known, kind.multiples)
    check_launch(given, known)
    for axis, size in most.items():
        if sizes[axis] > size:
            name = next(a.name for a in known if axis in a.axes.split())
            raise ValueError(f"{name}: expected {axis} of at most {size}, got {sizes[axis]}")
    return sizes


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """An option is None or one of its choices."""
    if value not in (None, *choices):
        raise ValueError(f"{name}: expected one of {', '.join(choices)} or None, got {value!r}")


def check_forward_only(tensors: dict[str, Tensor | None], who: str) -> None:
    """No tensor may need a gradient that nobody will compute; `who` is the message's subject and verb.

    Raises:
        ValueError: one does.
    """
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True; {who} forward only"
            )
