"""A planned function's way through PyTorch: autograd, torch.compile, or neither (chapter 14)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._contract import watched
from .checks import check_forward_only, check_only_backward
from .program import Planned

LIBRARY = torch.library.Library("gla_ref", "FRAGMENT")
OPTIONS = {"scale": "float?", "path": "str?", "kernel": "str?", "cached": "bool", "need_dg": "bool"}


class Operator:
    """A planned function that takes the shortest way through PyTorch.

    On plain tensors the operator looks up its program and runs it, inside a `torch.autograd.Function` if a tensor needs
    a gradient. Under torch.compile, vmap and fake tensors it is the opaque operator gla_ref::name. Derivatives in
    forward mode or by torch.func (grad, jacrev, jvp) are refused: an operator has none.
    `torch.library.custom_op` would register such an operator too, but its first call imports PyTorch's whole compiler,
    which takes more than two seconds.
    """

    def __init__(self, name: str, planned: Planned, outputs: int | None = None):
        """Return the plan's first `outputs` results, the others serve the backward pass; None: return a list of all."""
        self.name, self.planned, self.tensors, self.outputs = name, planned, len(planned.names), outputs
        arguments = [f"Tensor{'?' if i > 2 else ''} {n}" for i, n in enumerate(planned.names)]  # q, k, v are required
        arguments += [f"{OPTIONS[n]} {n}" for n in planned.options]
        results = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor[]"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {results}")
        LIBRARY.impl(name, lambda *args: given(planned(*args)[:outputs], args[0]), "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.gla_ref, name).default
        self.function = None

    def __call__(self, *args):
        tensors = args[: self.tensors]
        check_only_backward(self.name, self.planned.names, tensors)
        if watched(args[0]):
            results = self.overload(*args)
            return results if self.outputs else [x if x.ndim > 1 else None for x in results]
        program = self.planned.find(args)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            if self.function is None:
                check_forward_only(dict(zip(self.planned.names, tensors, strict=True)), self.name)
            return self.function.apply(*args, program)
        return program(tensors)

    def register_fake(self, function):
        torch.library.register_fake(f"gla_ref::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, save: Callable, gradients: Callable):
        """Register `save(ctx, inputs, output)`, which saves tensors for `gradients(ctx, *grads)`."""
        torch.library.register_autograd(f"gla_ref::{self.name}", gradients, setup_context=save, lib=LIBRARY)

        def forward(ctx, *args):
            *inputs, program = args
            outputs = tuple(program(inputs[: self.tensors]))
            save(ctx, inputs, outputs)
            return outputs[: self.outputs]

        @once_differentiable
        def backward(ctx, *grads):
            return *gradients(ctx, *grads), None

        # the class bears the operator's name, because `o.grad_fn` shows it
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.function = type(self.name, (torch.autograd.Function,), methods)


def forward_only(operator: Operator) -> Operator:
    """Make an operator refuse gradients under torch.compile, too: it would return tensors that need none."""

    def refuse(ctx, *grads):
        raise NotImplementedError(
            f"{operator.name}: expected tensors that need no gradient; the kernel is forward only"
        )

    torch.library.register_autograd(f"gla_ref::{operator.name}", refuse, lib=LIBRARY)
    return operator


def given(outputs: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Replace None by an empty tensor [0]: PyTorch's operators cannot return None."""
    return [like.new_empty(0) if x is None else x for x in outputs]


def with_state(name: str, planned: Planned) -> Operator:
    """Make a mechanism's operator: q, k, v, gates, initial state, cu_seqlens and options to (o, state)."""
    operator, places = Operator(name, planned, 2), [planned.names.index(n) for n in ("q", "v", "cu_seqlens")]

    @operator.register_fake
    def _(*args):
        q, v, cu = (args[i] for i in places)
        N = q.shape[0] if cu is None else cu.shape[0] - 1
        return v.new_empty(v.shape), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)

    return operator


def differentiable(operator: Operator, planned: Planned, kept: Callable) -> None:
    """Make an operator of `with_state` differentiable: `planned` returns all gradients (cu_seqlens has none).

    `planned` takes the tensors of the forward pass, the tensors that `kept(tensors, outputs)` returns (None for a
    tensor that the backward pass makes again), the gradients of o and state, the options, and whether the first gate
    needs a gradient.
    """
    gradient, n = Operator(f"{operator.name}_backward", planned), operator.tensors
    gate = operator.planned.names.index("g")

    @gradient.register_fake
    def _(*args):
        *tensors, S, _ = args[:n]
        tensors[gate] = tensors[gate] if args[-1] else None
        dS0 = None if S is None else S.new_empty(S.shape, dtype=torch.float32)
        return given([*(x if x is None else x.new_empty(x.shape) for x in tensors), dS0], args[0])

    def save(ctx, inputs, output):
        tensors, ctx.options = inputs[:n], inputs[n:]
        ctx.save_for_backward(*tensors, *kept(tensors, output))
        ctx.set_materialize_grads(False)  # the final state seldom has a gradient

    def gradients(ctx, do, dS):
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else do
        grads = gradient(*saved, do, dS, *ctx.options, ctx.needs_input_grad[gate])
        return *grads, None, *[None] * len(ctx.options)

    operator.register_autograd(save, gradients)
