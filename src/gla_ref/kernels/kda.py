"""Kimi Delta Attention: the function that one calls, its checks and its way through autograd (chapter 24).

A call is checked, planned and launched as in gla.py. The kernels are in portable/kda_forward.py and
portable/kda_gradient.py, and walk as the delta rules do (delta.py). Hopper has kernels of its own,
hopper/kda_forward.py and hopper/kda_gradients.py. The plan takes them wherever they run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import delta, gla, hopper
from .launch.hardware import Hardware
from .launch.operator import attend, differentiable, with_state
from .launch.plan import Plan
from .launch.program import Planned
from .portable import kda_forward, kda_gradient

__all__ = ["kda"]

PATHS, check = gla.PATHS, gla.check  # the options are those of GLA


class Call(delta.Call):
    """A call of :func:`kda`: one of the delta rules with gates of channels; in a plan, with a Spec for each tensor."""

    __slots__ = ()
    mechanism = "kda"  # of every call


def plan_forward(hardware: Hardware, call: Call) -> Plan:
    """(o, final state)."""
    reason = hopper.refusal_of_kda(hardware, call)
    if call.kernel == "hopper" and reason:
        raise ValueError(f"kernel: expected what the Hopper kernels take for kernel='hopper', but {reason}")
    if not reason:
        from .hopper import kda_forward as gluon  # not where Gluon is missing

        return gluon.plan_forward(hardware, call)
    plan = kda_forward.plan_forward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dbeta, dS0); None for a tensor not given and a dg not needed."""
    reason = hopper.refusal_of_kda_gradient(hardware, call)
    if not reason:
        from .hopper import kda_gradients as gluon  # not where Gluon is missing

        return gluon.plan_backward(hardware, call)
    plan = kda_gradient.plan_backward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


# launch/ checks a new call, plans it by these functions and keeps its launches
forward = Planned(plan_forward, Call, check)
operator = with_state("kda", forward)
KEPT = {}  # the backward pass makes its inputs again, in a small part of its time
backward = differentiable(operator, plan_backward, KEPT, optional="g")


class Resumed(NamedTuple):
    """A call on Hopper for whose chunks `prepare` has run."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    q_hat: Tensor
    k_til: Tensor
    W: Tensor
    U: Tensor
    P: Tensor
    through: Tensor
    scale: float
    cu_seqlens = None


def plan_resumed(hardware: Hardware, call: Resumed) -> Plan:
    """(o, final state)."""
    from .hopper import kda_forward as gluon

    return gluon.plan_resumed(hardware, call)


_resumed = Planned(plan_resumed, Resumed)


class Resume(torch.autograd.Function):
    """The fields of `Resumed` -> (o, final state); gradients are those of `kda`."""

    @staticmethod
    def forward(ctx, *call):
        ctx.scale = call[-1]
        ctx.save_for_backward(*call[:6])
        ctx.set_materialize_grads(False)
        return tuple(_resumed(Resumed(*call)))

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, dS: Tensor | None):
        *_, v, g, beta, S = inputs = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do
        call = backward.record(*inputs, None, do, dS, ctx.scale, None, None, ctx.needs_input_grad[3])
        return *backward(call), *[None] * 7


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    path: str | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, differentiable; no gate in [-inf, 0] is clamped or dropped.

    One known input is beyond its budget in bfloat16 (lab/kda.md, KDA 3). Its first token of every 16 reflects the state
    into another channel, and every other gate is exactly -5: operands round alike in each chunk, so that errors add up.
    After 1,000 tokens the final state is off by 1.17 rms segmented and 0.91 fused; the budget is 0.90. With gates that
    differ, between -5 and -3, it is within.

    Arguments, results and errors are those of :func:`gla_ref.kernels.delta.gated_delta_rule`, except:

    Args:
        g: natural log gates `[B, T, HV, K]`, in any of the three dtypes.
        kernel: "portable", or "hopper" for those in Gluon (K and V of 64 or 128, tokens in bfloat16, one GPU class);
            None takes Hopper's where they run. Its gradients walk over each sequence in one go: with
            path="segmented" they are portable.
    """
    call = Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path,
        kernel=kernel,
    )  # fmt: skip
    return attend(operator, call)
