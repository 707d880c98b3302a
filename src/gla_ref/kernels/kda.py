"""Kimi Delta Attention: the function that one calls, its checks and its way through autograd (chapter 20).

A call of a new signature is checked (`check`) and planned (`plan_forward`); later calls of that signature only launch
the kernels of its plan (launch/plan.py has the picture). These are in portable/kda_forward.py and
portable/kda_gradient.py, and walk as the delta rules do (delta.py). Hopper has kernels of its own,
hopper/kda_forward.py and hopper/kda_gradients.py, for calls that ask for them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from .. import _contract as contract
from . import hopper
from .launch.checks import check_call
from .launch.hardware import Hardware
from .launch.operator import differentiable, with_state
from .launch.plan import Plan
from .launch.program import Planned
from .portable import kda_forward, kda_gradient

__all__ = ["kda"]

PATHS, KERNELS = ("fused", "segmented"), ("portable", "hopper")


class Call(NamedTuple):
    """A call of :func:`kda`; in a plan, with a Spec for each tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None
    path: str | None = None
    kernel: str | None = None
    mechanism = "kda"  # of every call


check = partial(check_call, most={"K": 256, "V": 512}, choices={"path": PATHS, "kernel": KERNELS})


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
_forward = with_state("kda", forward)
KEPT = {}  # the backward pass makes its inputs again, in a small part of its time
backward = differentiable(_forward, plan_backward, KEPT, optional="g")


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
    """Kimi Delta Attention, differentiable; right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`, of length at most 1 if the state is to stay bounded; the kernels do not normalise them.
        v: values `[B, T, HV, V]`, V <= 512, HV a multiple of H: value head h reads key head h // (HV / H).
        g: natural log gates `[B, T, HV, K]`, in any of the three dtypes.
        beta: write strengths `[B, T, HV]` in [0, 2], in any of the three dtypes.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, HV, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and beta, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.
        path: "fused" (a sequence in one go) or "segmented"; None lets the plan choose, which
            :func:`gla_ref.kernels.explain` prints with the reason.
        kernel: "portable", or "hopper" for those in Gluon (K and V of 64 or 128, tokens in bfloat16, one GPU class);
            None takes the portable ones. Hopper's gradients walk over each sequence in one go.

    Returns:
        o `[B, T, HV, V]` in the dtype of v, and the final state, float32 `[N_seq, HV, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    scale = scale if scale is None else contract.check_scale(scale, 1)
    call = Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path,
        kernel=kernel,
    )  # fmt: skip
    o, S, *_ = _forward(call)
    return o, S
