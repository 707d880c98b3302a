"""The delta rule and the gated delta rule: the functions that one calls, their checks and autograd (chapter 20).

A call is checked, planned and launched as in gla.py. The kernels are in portable/delta_forward.py and
portable/delta_gradient.py; steps.py has one token or a few. Hopper has two kernels of its own for the forward pass,
hopper/delta_fused.py and hopper/delta_ahead.py, and hopper/delta_backward.py for gradients. The plan takes them
wherever they run.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from . import hopper
from .launch.checks import check_call
from .launch.hardware import Hardware
from .launch.operator import attend, differentiable, with_state
from .launch.plan import Plan, cdiv
from .launch.program import Planned
from .portable import delta_forward, delta_gradient
from .portable.segments import sequences

__all__ = ["delta_rule", "gated_delta_rule"]

PATHS, KERNELS = ("fused", "segmented"), ("portable", *hopper.DELTA_KERNELS)


class Call(NamedTuple):
    """A call, without g one of :func:`delta_rule`; in a plan, with a Spec for each tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None
    path: str | None = None
    kernel: str | None = None

    @property
    def mechanism(self) -> str:
        return "delta_rule" if self.g is None else "gated_delta_rule"


check = partial(check_call, most={"K": 256, "V": 512}, choices={"path": PATHS, "kernel": KERNELS})


def plan_forward(hardware: Hardware, call: Call) -> Plan:
    """(o, final state)."""
    reason = hopper.refusal_of_delta(hardware, call)
    if not reason:
        return plan_on_hopper(hardware, call)
    if call.kernel in hopper.DELTA_KERNELS:
        raise ValueError(f"kernel: expected what the Hopper kernels take for kernel={call.kernel!r}, but {reason}")
    plan = delta_forward.plan_forward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


def plan_on_hopper(hardware: Hardware, call: Call) -> Plan:
    """Plan by delta_fused.py or delta_ahead.py, by models of their time.

    Where a `path` is asked for delta_ahead.py makes it, whatever the batch: a text's bits depend on nothing else then.
    """
    from .hopper import delta_ahead, delta_fused  # not where Gluon is missing

    (B, T, H, V), K, kernel = call.v.shape, call.q.shape[-1], call.kernel
    N = sequences(B, call.cu_seqlens)
    heads, chunks = H * N, cdiv(T * B, 64 * N)
    who = f"{heads} value heads of sequences for {hardware}"
    if kernel in (None, "hopper"):
        ahead = delta_ahead.whole_duration(hardware, K, V, heads, chunks, call.path)
        fused = delta_fused.duration(hardware, heads, chunks)
        kernel = "hopper_ahead" if call.path or ahead < fused else "hopper_fused"
    else:
        who = "it was asked for"
    plan = (delta_ahead if kernel == "hopper_ahead" else delta_fused).plan_forward(hardware, call)
    return plan._replace(why=(f"{kernel}: {who}", *plan.why))


def plan_backward(hardware: Hardware, call) -> Plan:
    """Plan (dq, dk, dv, dg, dbeta, dS0); None for a tensor not given and a dg not needed."""
    reason = hopper.refusal_of_delta(hardware, call._replace(path=None))
    if not reason:
        from .hopper import delta_backward  # not where Gluon is missing

        return delta_backward.plan_backward(hardware, call)
    plan = delta_gradient.plan_backward(hardware, call)
    return plan._replace(why=(f"the portable kernel: {reason}", *plan.why))


# launch/ checks a new call, plans it by the functions above and keeps its launches
forward = Planned(plan_forward, Call, check)
operator = with_state("delta_rule", forward)
KEPT = {}  # the backward pass makes its inputs again, in a small part of its time
backward = differentiable(operator, plan_backward, KEPT, optional="g")


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
        kernel: "portable", or "hopper" for those in Gluon (K and V of 64 or 128, tokens of 16 bits, one GPU class):
            "hopper_fused" or "hopper_ahead", by models of their times; either may be asked for, too. None takes
            Hopper's where they run; :func:`gla_ref.kernels.explain` prints the choice with its reason. On Hopper one
            kernel makes the gradients, whichever makes o.

    Returns:
        o `[B, T, HV, V]` in the dtype of v, and the final state, float32 `[N_seq, HV, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    call = Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path,
        kernel=kernel,
    )  # fmt: skip
    if g is None:  # checked here, since `check` would take the call for one of the delta rule
        check_call(call, mechanism="gated_delta_rule")
    return attend(operator, call)


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
    call = Call(
        q=q, k=k, v=v, g=None, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path,
        kernel=kernel,
    )  # fmt: skip
    return attend(operator, call)
