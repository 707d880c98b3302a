"""Gated Linear Attention: the function that one calls, its checks and its way through autograd (chapters 13 and 15).

A call of a new signature is checked (`check`) and planned (`plan_forward`); later calls of that signature only launch
the kernels of its plan (launch/plan.py has the picture). These are in portable/gla_forward.py,
portable/gla_gradient.py and hopper/; with gates on values too, in portable/gla_two_sided.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from . import hopper
from .launch.checks import check_call
from .launch.hardware import Hardware
from .launch.operator import attend, differentiable, with_state
from .launch.plan import Plan
from .launch.program import Planned
from .portable import gla_forward, gla_gradient, gla_two_sided

__all__ = ["gla"]

PATHS, KERNELS = ("fused", "segmented"), ("portable", "hopper")


class Call(NamedTuple):
    """A call of :func:`gla`; in a plan, with a Spec for each tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    g_v: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None
    path: str | None = None
    kernel: str | None = None
    mechanism = "gla"  # of every call


check = partial(check_call, most={"K": 256, "V": 512}, choices={"path": PATHS, "kernel": KERNELS})


def plan_forward(hardware: Hardware, call: Call) -> Plan:
    """(o, final state, the states that segments start from)."""
    reason = hopper.refusal(hardware, call)
    if call.kernel == "hopper" and reason:
        raise ValueError(f"kernel: expected what the Hopper kernel takes for kernel='hopper', but {reason}")
    if not reason:
        from .hopper import gla_forward as gluon  # not where Gluon is missing

        return gluon.plan_forward(hardware, call)
    plan = (gla_forward if call.g_v is None else gla_two_sided).plan_forward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dg_v, dS0); None for a tensor not given and a dg not needed."""
    reason = hopper.refusal_of_gradient(hardware, call)
    if not reason:
        from .hopper import gla_backward as gluon  # not where Gluon is missing

        return gluon.plan_backward(hardware, call)
    plan = (gla_gradient if call.g_v is None else gla_two_sided).plan_backward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


# launch/ checks a new call, plans it by the functions above and keeps its launches
forward = Planned(plan_forward, Call, check)
operator = with_state("gla", forward)
# under torch.compile there are two outputs only, and the backward pass makes starts again
KEPT = {"starts": lambda call, outputs: (*outputs, None)[2]}
backward = differentiable(operator, plan_backward, KEPT, optional="g")


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    path: str | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated Linear Attention, differentiable; right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 512.
        g: natural log gates on the key axis, `[B, T, H, K]`, in any of the three dtypes.
        g_v: natural log gates on the value axis, `[B, T, H, V]`, or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and g_v, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.
        path: "fused" (a sequence in one go) or "segmented"; None chooses by
            :func:`gla_ref.kernels.linear_attention.choose_path`. With g_v each sequence is walked in one go.
        kernel: "portable", or "hopper" for the one in Gluon; None lets the plan choose, which
            :func:`gla_ref.kernels.explain` prints with the reason. Gradients have a Hopper kernel of their own, for
            tokens in bfloat16, gates of 16 bits and V <= 128: the plan takes it from Triton 3.9 on, before only if
            it is asked for. Other calls have the portable gradient, with "hopper" too: `explain` says why.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.
        float16 bears q and k (with g_v, v and the gradient of o too) up to 3000 in size, since a mild chunk's decay
        multiplies them by up to e^3; scores and states may be of any size that float32 bears. In a strong chunk
        a token reads 0 of what has decayed to less than 6e-8 since the chunk's first token.
        In strong chunks Hopper's gradient rounds dg to 16 bits twice, so an element may be one unit of its last place
        off where the portable kernel's is half a unit off.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    call = Call(
        q=q, k=k, v=v, g=g, g_v=g_v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path,
        kernel=kernel,
    )  # fmt: skip
    return attend(operator, call)
