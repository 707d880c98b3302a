"""A planned function's way through PyTorch: autograd, torch.compile, or neither (chapter 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._contract import check_number, watched
from .checks import check_forward_only, check_only_backward
from .program import Planned

LIBRARY = torch.library.Library("gla_ref", "FRAGMENT")
# PyTorch's names of the types in a call's record
TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float | None: "float?", str | None: "str?", bool: "bool"}


class Operator:
    """A planned function that takes the shortest way through PyTorch.

    On plain tensors the operator looks up its program and runs it, inside a `torch.autograd.Function` if a tensor needs
    a gradient. Under torch.compile, vmap and fake tensors it is the opaque operator gla_ref::name. Derivatives in
    forward mode or by torch.func (grad, jacrev, jvp) are refused: an operator has none.
    `torch.library.custom_op` would register such an operator too, but its first call imports PyTorch's whole compiler,
    which takes more than two seconds.
    """

    def __init__(self, name: str, planned: Planned, outputs: int | None = None):
        """`outputs`: how many of the plan's results a call returns; None: all, as a list."""
        self.name, self.planned, self.tensors, self.outputs = name, planned, planned.tensors, outputs
        arguments = [f"{TYPES[kind]} {n}" for n, kind in planned.kinds.items()]
        results = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor[]"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {results}")
        self.overload = getattr(torch.ops.gla_ref, name).default
        self.function = None

        def run(*args):
            return given(planned(planned.record(*args))[:outputs], args[0])

        LIBRARY.impl(name, run, "CompositeExplicitAutograd")

    def __call__(self, call: NamedTuple):
        check_only_backward(self.name, call._fields, call)
        if watched(call[0]):
            results = self.overload(*call)
            return results if self.outputs else [x if x.ndim > 1 else None for x in results]
        program = self.planned.find(call)
        if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in call[: self.tensors]]):
            if self.function is None:
                check_forward_only(dict(zip(call._fields, call[: self.tensors], strict=False)), self.name)
            return self.function.apply(*call, program)
        return program(call)

    def register_fake(self, function: Callable):
        """Register `function(call)`, which makes empty results of a call under torch.compile."""
        record = self.planned.record
        torch.library.register_fake(f"gla_ref::{self.name}", lambda *args: function(record(*args)), lib=LIBRARY)

    def register_autograd(self, save: Callable, gradients: Callable):
        """Register `save(ctx, call, output)`, which saves tensors for `gradients(ctx, *grads)`, one for each field."""
        record = self.planned.record

        def forward(ctx, *args):
            *inputs, program = args
            outputs = tuple(program(inputs))
            save(ctx, record._make(inputs), outputs)
            return outputs[: self.outputs]

        @once_differentiable
        def backward(ctx, *grads):
            return *gradients(ctx, *grads), None

        def save_call(ctx, inputs, output):
            save(ctx, record._make(inputs), output)

        torch.library.register_autograd(f"gla_ref::{self.name}", gradients, setup_context=save_call, lib=LIBRARY)
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


def attend(operator: Operator, call: NamedTuple) -> tuple[Tensor, Tensor]:
    """(o, final state) of a call of an operator of `with_state`; the scale may be any number, or None."""
    if call.scale is not None:
        call = call._replace(scale=check_number(call.scale))
    o, S, *_ = operator(call)
    return o, S


def with_state(name: str, planned: Planned) -> Operator:
    """Make a mechanism's operator: from a call, whose record has q, v and cu_seqlens, to (o, state)."""
    operator = Operator(name, planned, 2)

    @operator.register_fake
    def _(call):
        q, v, cu = call.q, call.v, call.cu_seqlens
        N = q.shape[0] if cu is None else cu.shape[0] - 1
        return v.new_empty(v.shape), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)

    return operator


def differentiable(operator: Operator, plan: Callable, kept: dict[str, Callable], optional: str) -> Planned:
    """Make an operator of `with_state` differentiable; its tensors end with initial_state and cu_seqlens.

    Args:
        operator: the operator.
        plan: the plan of all gradients, in the order of the call's tensors, without one of cu_seqlens. It takes a
            record of the call's tensors, those that are kept, do, dS, the call's options, and need_d(optional).
        kept: by name, `(call, outputs) ->` a tensor kept for the backward pass; None if that pass makes it again.
        optional: the tensor whose gradient is made only where it is needed.

    Returns:
        The planned gradient.
    """
    fields, n = list(operator.planned.kinds.items()), operator.tensors
    more = [*((name, Tensor | None) for name in kept), ("do", Tensor), ("dS", Tensor | None)]
    record = NamedTuple("Gradient", [*fields[:n], *more, *fields[n:], (f"need_d{optional}", bool)])
    gradient = Operator(f"{operator.name}_backward", Planned(plan, record))
    place = operator.planned.record._fields.index(optional)

    @gradient.register_fake
    def _(call):
        call = call if call[-1] else call._replace(**{optional: None})
        empty = [x if x is None else x.new_empty(x.shape) for x in call[: n - 2]]
        S = call.initial_state
        return given([*empty, S if S is None else S.new_empty(S.shape, dtype=torch.float32)], call[0])

    def save(ctx, call, output):
        ctx.options = call[n:]
        ctx.save_for_backward(*call[:n], *[keep(call, output) for keep in kept.values()])
        ctx.set_materialize_grads(False)  # the final state seldom has a gradient

    def gradients(ctx, do, dS):
        call = record._make((*ctx.saved_tensors, do, dS, *ctx.options, ctx.needs_input_grad[place]))
        if do is None:
            call = call._replace(do=torch.zeros_like(call.v))
        return *gradient(call), None, *[None] * len(ctx.options)

    operator.register_autograd(save, gradients)
    return gradient.planned
