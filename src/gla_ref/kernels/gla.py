"""Gated Linear Attention: the function that one calls, its checks and its way through autograd (chapters 14 and 15b).

A call of a new signature is checked (`check`) and planned (`plan_forward`); later calls of that signature only launch
the kernels of its plan (launch/plan.py has the picture). These are in portable/gla_forward.py,
portable/gla_gradient.py and hopper/; with gates on values too, in portable/gla_two_sided.py.
"""

from __future__ import annotations

from torch import Tensor

from .. import _contract as contract
from ..mechanisms import MECHANISMS
from . import hopper
from .launch.checks import check_call, check_choice
from .launch.hardware import Hardware
from .launch.operator import differentiable, with_state
from .launch.plan import Plan
from .launch.program import Planned
from .portable import gla_forward, gla_gradient, gla_two_sided

__all__ = ["gla"]

PATHS = ("fused", "segmented")
KERNELS = ("portable", "hopper")


def plan_forward(hardware: Hardware, q, k, v, g, g_v, S, cu, scale, path, kernel) -> Plan:
    """(o, final state, the states that segments start from)."""
    reason = hopper.refusal(hardware, q, k, v, g, g_v)
    if kernel == "hopper" and reason:
        raise ValueError(f"kernel: expected what the Hopper kernel takes for kernel='hopper', but {reason}")
    if kernel != "portable" and not reason:
        from .hopper import gla_forward as gluon  # not where Gluon is missing

        return gluon.plan_forward(hardware, q, k, v, g, S, cu, scale, path, kernel)
    if g_v is None:
        plan = gla_forward.plan_forward(hardware, q, k, v, g, S, cu, scale, path)
    else:
        plan = gla_two_sided.plan_forward(hardware, q, k, v, g, g_v, S, cu, scale, path)
    who = f"the portable kernel: {reason or 'it was asked for'}"
    return plan._replace(why=(who, *plan.why))


def plan_backward(hardware: Hardware, q, k, v, g, g_v, S, cu, starts, do, dS, scale, path, kernel, need_dg) -> Plan:
    """Plan (dq, dk, dv, dg, dg_v, dS0); None for a tensor not given and a dg not needed."""
    rest = S, cu, starts, do, dS, scale, path, need_dg
    reason = hopper.refusal_of_gradient(hardware, q, k, v, g, g_v, kernel)
    if not reason:
        from .hopper import gla_backward as gluon  # not where Gluon is missing

        return gluon.plan_backward(hardware, q, k, v, g, *rest)
    if g_v is None:
        plan = gla_gradient.plan_backward(hardware, q, k, v, g, *rest)
    else:
        plan = gla_two_sided.plan_backward(hardware, q, k, v, g, g_v, *rest)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def check(q, k, v, g, g_v, initial_state, cu_seqlens, scale, path, kernel) -> None:
    """Check a call with a new signature."""
    check_call("gla", (q, k, v, g, g_v), initial_state, cu_seqlens, scale, {"K": 256, "V": 512})
    check_choice("path", path, PATHS)
    check_choice("kernel", kernel, KERNELS)


def kept(tensors: tuple, outputs: tuple) -> list[Tensor | None]:
    """The states that segments start from."""
    _, _, *starts = outputs
    return starts or [None]


TENSORS = (*(x.name for x in MECHANISMS["gla"].arguments), "initial_state", "cu_seqlens")
CHOICES = ("scale", "path", "kernel")
# launch/ checks a new call, plans it by the functions above and keeps its launches
forward = Planned(plan_forward, TENSORS, CHOICES, check)
backward = Planned(plan_backward, (*TENSORS, "starts", "do", "dS"), (*CHOICES, "need_dg"))
_forward = with_state("gla", forward)
differentiable(_forward, backward, kept)


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
            :func:`gla_ref.kernels.linear_attention.choose_path`.
        kernel: "portable", or "hopper" for the one in Gluon; None lets the plan choose, which
            :func:`gla_ref.kernels.explain` prints with the reason. Gradients have a Hopper kernel of their own, for
            tokens in bfloat16, gates of 16 bits and V <= 128: the plan takes it from Triton 3.9 on, before only if
            it is asked for.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.
        float16 bears q and k (with g_v, v and the gradient of o too) up to 3000 in size, since a mild chunk's decay
        multiplies them by up to e^3; scores and states may be of any size that float32 bears. In a strong chunk
        a token reads 0 of what has decayed to less than 6e-8 since the chunk's first token.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    scale = scale if scale is None else contract.check_scale(scale, 1)
    o, S, *_ = _forward(q, k, v, g, g_v, initial_state, cu_seqlens, scale, path, kernel)
    return o, S
