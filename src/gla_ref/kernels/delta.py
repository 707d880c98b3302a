"""The delta rule and the gated delta rule: the functions that one calls, their checks and autograd (chapter 20).

A call of a new signature is checked (`check`) and planned (`plan_forward`); later calls of that signature only launch
the kernels of its plan (launch/plan.py has the picture). These are in portable/delta_forward.py and
portable/delta_gradient.py; steps.py has one token or a few. Hopper has two kernels of its own for the forward pass,
hopper/delta_fused.py and hopper/delta_ahead.py, and hopper/delta_backward.py for gradients. The plan takes them
wherever they run.
"""

from __future__ import annotations

from torch import Tensor

from .. import _contract as contract
from ..mechanisms import MECHANISMS
from . import hopper
from .launch.checks import check_call, check_choice
from .launch.hardware import Hardware
from .launch.operator import differentiable, with_state
from .launch.plan import Plan, cdiv
from .launch.program import Planned
from .portable import delta_forward, delta_gradient
from .portable.segments import sequences

__all__ = ["delta_rule", "gated_delta_rule"]

PATHS = ("fused", "segmented")
KERNELS = ("portable", *hopper.DELTA_KERNELS)


def plan_forward(hardware: Hardware, q, k, v, g, beta, S, cu, scale, path, kernel) -> Plan:
    """(o, final state)."""
    reason = hopper.refusal_of_delta(hardware, q, k, v, path, kernel)
    if not reason:
        return plan_on_hopper(hardware, q, k, v, g, beta, S, cu, scale, path, kernel)
    if kernel in hopper.DELTA_KERNELS:
        raise ValueError(f"kernel: expected what the Hopper kernels take for kernel={kernel!r}, but {reason}")
    plan = delta_forward.plan_forward(hardware, q, k, v, g, beta, S, cu, scale, path)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def plan_on_hopper(hardware: Hardware, q, k, v, g, beta, S, cu, scale, path, kernel) -> Plan:
    """Plan by delta_fused.py or delta_ahead.py, by models of their time.

    Where a `path` is asked for delta_ahead.py makes it, whatever the batch: a text's bits depend on nothing else then.
    """
    from .hopper import delta_ahead, delta_fused  # not where Gluon is missing

    N = sequences(v.shape[0], cu)
    heads, chunks = v.shape[2] * N, cdiv(v.shape[1] * v.shape[0], 64 * N)
    who = f"{heads} value heads of sequences for {hardware}"
    if kernel in (None, "hopper"):
        ahead = delta_ahead.whole_duration(hardware, q.shape[-1], v.shape[-1], heads, chunks, path)
        fused = delta_fused.duration(hardware, heads, chunks)
        kernel = "hopper_ahead" if path or ahead < fused else "hopper_fused"
    else:
        who = "it was asked for"
    if kernel == "hopper_ahead":
        plan = delta_ahead.plan_forward(hardware, q, k, v, g, beta, S, cu, scale, path)
    else:
        plan = delta_fused.plan_forward(hardware, q, k, v, g, beta, S, cu, scale)
    return plan._replace(why=(f"{kernel}: {who}", *plan.why))


def plan_backward(hardware: Hardware, q, k, v, g, beta, S, cu, do, dS, scale, path, kernel, need_dg) -> Plan:
    """Plan (dq, dk, dv, dg, dbeta, dS0); None for a tensor not given and a dg not needed."""
    rest = q, k, v, g, beta, S, cu, do, dS, scale, path, need_dg
    reason = hopper.refusal_of_delta(hardware, q, k, v, None, kernel)
    if not reason:
        from .hopper import delta_backward  # not where Gluon is missing

        return delta_backward.plan_backward(hardware, *rest)
    plan = delta_gradient.plan_backward(hardware, *rest)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def check(q, k, v, g, beta, initial_state, cu_seqlens, scale, path, kernel) -> None:
    """Check a call with a new signature."""
    mechanism, tensors = ("delta_rule", (q, k, v, beta)) if g is None else ("gated_delta_rule", (q, k, v, g, beta))
    check_call(mechanism, tensors, initial_state, cu_seqlens, scale, {"K": 256, "V": 512})
    check_choice("path", path, PATHS)
    check_choice("kernel", kernel, KERNELS)


def kept(tensors: tuple, outputs: tuple) -> list:
    """Nothing is kept: the backward pass makes its inputs again, in a small part of its time."""
    return []


TENSORS = (*(x.name for x in MECHANISMS["gated_delta_rule"].arguments), "initial_state", "cu_seqlens")
CHOICES = ("scale", "path", "kernel")
# launch/ checks a new call, plans it by the functions above and keeps its launches
forward = Planned(plan_forward, TENSORS, CHOICES, check)
backward = Planned(plan_backward, (*TENSORS, "do", "dS"), (*CHOICES, "need_dg"))
_forward = with_state("delta_rule", forward)
differentiable(_forward, backward, kept)


def gated_delta_rule(
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
    """The gated delta rule, differentiable; right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`, of length at most 1 if the state is to stay bounded; the kernels do not normalise them.
        v: values `[B, T, HV, V]`, V <= 512, HV a multiple of H: value head h reads key head h // (HV / H).
        g: natural log gates `[B, T, HV]`, in any of the three dtypes.
        beta: write strengths `[B, T, HV]` in [0, 2], in any of the three dtypes.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, HV, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and beta, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.
        path: "fused" (a sequence in one go) or "segmented"; None lets the plan choose.
        kernel: "portable", or "hopper" for those in Gluon (K and V of 64 or 128, tokens of 16 bits, one GPU class): by
            the number of programs "hopper_fused" or "hopper_ahead", which may be asked for, too. None takes Hopper's
            where they run; :func:`gla_ref.kernels.explain` prints the choice with its reason. On Hopper one kernel
            makes the gradients, whichever makes o.

    Returns:
        o `[B, T, HV, V]` in the dtype of v, and the final state, float32 `[N_seq, HV, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    if g is None:  # checked here, since `_delta` would take the call for one of the delta rule
        check_call("gated_delta_rule", (q, k, v, g, beta), initial_state, cu_seqlens, scale, {})
    return _delta(q, k, v, g, beta, scale, initial_state, cu_seqlens, path, kernel)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    path: str | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule: :func:`gated_delta_rule` without gates."""
    return _delta(q, k, v, None, beta, scale, initial_state, cu_seqlens, path, kernel)


def _delta(q, k, v, g, beta, scale, initial_state, cu_seqlens, path, kernel):
    scale = scale if scale is None else contract.check_scale(scale, 1)
    o, S, *_ = _forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, path, kernel)
    return o, S
