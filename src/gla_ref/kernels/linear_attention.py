"""Linear attention and simple GLA: the functions that one calls, their checks and autograd (chapters 7 and 8).

The kernels are in portable/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from .. import _contract as contract
from ..linear_attention import normalised_state
from .launch.checks import check_call
from .launch.operator import attend, differentiable, with_state
from .launch.program import Planned
from .portable.linear import plan_backward, plan_forward, unwindable
from .portable.segments import choose_path

__all__ = ["choose_path", "linear_attention", "simple_gla"]

PATHS = ("fused", "segmented", "materialised")


class Call(NamedTuple):
    """A call, without g one of :func:`linear_attention`; in a plan, with a Spec for each tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None
    path: str | None

    @property
    def mechanism(self) -> str:
        return "linear_attention" if self.g is None else "simple_gla"


check = partial(check_call, most={"K": 256, "V": 512}, choices={"path": PATHS})
forward = Planned(plan_forward, Call, check)
operator = with_state("linear_attention", forward)
KEPT = {  # the final state of narrow heads without gates; what is not among torch.compile's two outputs
    "S_T": lambda call, outputs: outputs[1] if unwindable(call) else None,
    "sums": lambda call, outputs: (*outputs, None)[2],
    "starts": lambda call, outputs: (*outputs, None, None)[3],
}
backward = differentiable(operator, plan_backward, KEPT, optional="g")


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    path: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one scalar gate per head and token, differentiable; right for every gate in [-inf, 0].

    Arguments, results and errors are those of :func:`gla_ref.kernels.gla.gla`, except:

    Args:
        g: natural log gates `[B, T, H]`, in any of the three dtypes.
        path: "fused", "segmented" or "materialised"; None chooses by :func:`choose_path`.
    """
    call = Call(
        q=q, k=k, v=v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, path=path
    )  # fmt: skip
    if g is None:  # checked here, since `check` would take the call for one of linear attention
        check_call(call, mechanism="simple_gla")
    return attend(operator, call)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    feature_map: Callable[[Tensor], Tensor] | None = None,
    normalize: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """Linear attention: :func:`simple_gla` without gates.

    `feature_map` and `normalize` have their meaning of :mod:`gla_ref.linear_attention`.
    The map runs outside the kernel, K counts its features, and the normaliser is linear attention of ones.
    `initial_state` and the state returned are (S, z) when normalised.
    """
    if feature_map is not None:
        scale = contract.check_scale(scale, q.shape[-1])
        with contract.outside_autocast(q):
            q, k = feature_map(q), feature_map(k)

    def of_values(v, S):
        call = Call(q=q, k=k, v=v, g=None, initial_state=S, cu_seqlens=cu_seqlens, scale=scale, path=path)
        return attend(operator, call)

    if not normalize:
        return of_values(v, initial_state)
    S, z = (None, None) if initial_state is None else normalised_state(initial_state)
    o, S = of_values(v, S)
    total, z = of_values(v.new_ones(1).expand(*v.shape[:3], 1), z)
    return o / total, (S, z[..., 0])
