"""One token after another: the functions that one calls to decode (chapters 16 and 20; KDA: 24).

The kernel is in portable/gla_step.py. Forward only: that nothing needs a gradient is checked in every call.
"""

from __future__ import annotations

from torch import Tensor

from . import delta, gla, kda
from .launch.checks import check_call
from .launch.operator import attend, forward_only, with_state
from .launch.program import Planned
from .portable.gla_step import plan_step

__all__ = ["delta_rule_step", "gated_delta_rule_step", "gla_step", "kda_step"]


gla_forward, delta_forward, kda_forward = (Planned(plan_step, form.Call, form.check) for form in (gla, delta, kda))
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

    Arguments, results and errors are those of :func:`gla_ref.kernels.gla.gla`: q, k, g `[B, T, H, K]`, v and g_v
    `[B, T, H, V]`, and T = 1 when decoding. A tensor that needs a gradient is refused (ValueError); `initial_state` is
    left as it is.
    """
    call = gla.Call(
        q=q, k=k, v=v, g=g, g_v=g_v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    return attend(_gla_step, call)


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

    Arguments, results and errors are those of :func:`gla_ref.kernels.delta.gated_delta_rule`: q, k `[B, T, H, K]`,
    v `[B, T, HV, V]`, g and beta `[B, T, HV]`, and T = 1 when decoding. A tensor that needs a gradient is refused
    (ValueError); `initial_state` is left as it is.
    """
    call = delta.Call(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )  # fmt: skip
    if g is None:  # the code below would compute the delta rule
        check_call(call, mechanism="gated_delta_rule")
    return attend(_delta_step, call)


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
    return attend(_delta_step, call)


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
    return attend(_kda_step, call)
