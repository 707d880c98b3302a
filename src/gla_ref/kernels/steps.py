"""One token after another: the functions that one calls to decode (chapters 16 and 20).

The kernels are in portable/gla_step.py and portable/delta_step.py. Forward only: that nothing needs a gradient is
checked in every call.
"""

from __future__ import annotations

from torch import Tensor

from .. import _contract as contract
from . import delta, gla, kda
from .launch.checks import check_call
from .launch.hardware import Hardware
from .launch.operator import forward_only, with_state
from .launch.plan import Plan
from .launch.program import Planned
from .portable import delta_step, gla_two_sided
from .portable.gla_step import plan_step

__all__ = ["delta_rule_step", "gated_delta_rule_step", "gla_step", "kda_step"]


def plan_gla(hardware: Hardware, call: gla.Call) -> Plan:
    """(o, final state)."""
    return (plan_step if call.g_v is None else gla_two_sided.plan_tokens)(hardware, call)


gla_forward = Planned(plan_gla, gla.Call, gla.check)
delta_forward = Planned(delta_step.plan_step, delta.Call, delta.check)
kda_forward = Planned(delta_step.plan_step, kda.Call, kda.check)
_gla_step = forward_only(with_state("gla_step", gla_forward))
_delta_step = forward_only(with_state("delta_step", delta_forward))
_kda_step = forward_only(with_state("kda_step", kda_forward))


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of GLA in one kernel, for one token or a few; forward only, right for every gate in [-inf, 0].

    Args:
        q: queries `[B, T, H, K]`, T >= 1 (1 when decoding), K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 512.
        g: natural log gates on the key axis, `[B, T, H, K]`, in any of the three dtypes.
        g_v: natural log gates on the value axis, `[B, T, H, V]`, or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None; it is left as it is.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and g_v, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit, or needs a gradient; the message names it.
    """
    scale = scale if scale is None else contract.check_scale(scale, 1)
    call = gla.Call(
        q=q, k=k, v=v, g=g, g_v=g_v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    o, S = _gla_step(call)
    return o, S


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of the gated delta rule in one kernel, for one token or a few; forward only, for any gate.

    Args:
        q: queries `[B, T, H, K]`, T >= 1 (1 when decoding), K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, V <= 512, HV a multiple of H: value head h reads key head h // (HV / H).
        g: natural log gates `[B, T, HV]`, in any of the three dtypes.
        beta: write strengths `[B, T, HV]` in [0, 2], in any of the three dtypes.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, HV, K, V]`, zeros when None; it is left as it is.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g and beta, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.

    Returns:
        o `[B, T, HV, V]` in the dtype of v, and the final state, float32 `[N_seq, HV, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit, or needs a gradient; the message names it.
    """
    call = delta.Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    if g is None:  # the code below would compute the delta rule
        check_call(call, mechanism="gated_delta_rule")
    return step(call)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule for one token or a few: :func:`gated_delta_rule_step` without gates."""
    call = delta.Call(
        q=q, k=k, v=v, g=None, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    return step(call)


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA for one token or a few: :func:`gated_delta_rule_step` with a gate for each channel, g `[B, T, HV, K]`."""
    call = kda.Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    return step(call, _kda_step)


def step(call: delta.Call | kda.Call, form=_delta_step) -> tuple[Tensor, Tensor]:
    """(o, final state) of a call of a delta rule."""
    if call.scale is not None:
        call = call._replace(scale=contract.check_scale(call.scale, 1))
    o, S = form(call)
    return o, S
