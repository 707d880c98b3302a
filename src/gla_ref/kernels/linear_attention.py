"""Linear attention and simple GLA: the functions that one calls, their checks and autograd (chapters 7 and 8).

The kernels are in portable/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import _contract as contract
from .launch.checks import check_call, check_choice
from .launch.operator import differentiable, with_state
from .launch.program import Planned
from .portable.linear import plan_backward, plan_forward, unwindable
from .portable.segments import choose_path

__all__ = ["choose_path", "linear_attention", "simple_gla"]

PATHS = ("fused", "segmented", "materialised")


def check(q, k, v, g, initial_state, cu_seqlens, scale, path) -> None:
    """Check a call with a new signature."""
    mechanism, tensors = ("linear_attention", (q, k, v)) if g is None else ("simple_gla", (q, k, v, g))
    check_call(mechanism, tensors, initial_state, cu_seqlens, scale, {"K": 256, "V": 512})
    check_choice("path", path, PATHS)


def kept(tensors: tuple, outputs: tuple) -> list[Tensor | None]:
    """The final state of narrow heads without gates; the gates' sums."""
    q, _, v, g, *_ = tensors
    _, S_T, *sums = outputs
    return [S_T if unwindable(q, v, g) else None, *(sums or [None])]


TENSORS = ("q", "k", "v", "g", "initial_state", "cu_seqlens")
CHOICES = ("scale", "path")
forward = Planned(plan_forward, TENSORS, CHOICES, check)
backward = Planned(plan_backward, (*TENSORS, "S_T", "sums", "do", "dS"), (*CHOICES, "need_dg"))
_forward = with_state("linear_attention", forward)
differentiable(_forward, backward, kept)


def _attention(q, k, v, g, scale, initial_state, cu_seqlens, path):
    scale = scale if scale is None else contract.check_scale(scale, 1)
    o, S, *_ = _forward(q, k, v, g, initial_state, cu_seqlens, scale, path)
    return o, S


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

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 512.
        g: natural log gates `[B, T, H]`, in any of the three dtypes.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]` on the device of q, boundaries of packed sequences (B = 1).
            Their values, and those of g, are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only.
        path: "fused", "segmented" or "materialised"; None chooses by :func:`choose_path`.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state, float32 `[N_seq, H, K, V]`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    if g is None:  # the code below would compute linear attention
        check_call("simple_gla", (q, k, v, g), initial_state, cu_seqlens, scale, {})
    return _attention(q, k, v, g, scale, initial_state, cu_seqlens, path)


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

    def attend(v, S):
        return _attention(q, k, v, None, scale, S, cu_seqlens, path)

    if not normalize:
        return attend(v, initial_state)
    S, z = None, None
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            got = type(initial_state).__name__
            raise TypeError(f"initial_state: expected (S, z) with normalize=True, got {got}")
        S, z = initial_state[0], initial_state[1][..., None]
        if S.shape[:-1] != z.shape[:-1]:
            raise ValueError(f"initial_state: expected z of shape {list(S.shape[:-1])}, got {list(z.shape[:-1])}")
    o, S = attend(v, S)
    total, z = attend(v.new_ones(1).expand(*v.shape[:3], 1), z)
    return o / total, (S, z[..., 0])
