"""Causal softmax attention without the T x T matrix: the function that one calls, its checks and autograd (chapter 3).

The kernels are in portable/flash.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _contract as contract
from ..softmax_attention import CACHE, KIND
from .launch.checks import check_inputs, check_packed
from .launch.operator import Operator
from .launch.program import Planned
from .portable.flash import plan_backward, plan_forward, twin

__all__ = ["flash_attention"]


class Call(NamedTuple):
    """A call of :func:`flash_attention`; k and v are those behind the cache if it is `cached`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    scale: float | None
    cached: bool


# what the backward pass takes; `low` belongs to float32
MORE = [("low", Tensor | None), ("do", Tensor), ("cu_seqlens", Tensor | None), ("scale", float | None)]
Gradient = NamedTuple("Gradient", [*((name, Tensor) for name in ("q", "k", "v", "o", "lse")), *MORE])


def check(call: Call, cache: tuple[Tensor, Tensor] | None = None, launched: bool = True) -> None:
    """Check a call with a new signature; a `cached` call was checked before the cache was put before k and v."""
    if call.cached:
        return
    if cache is not None and (not isinstance(cache, tuple | list) or len(cache) != 2):
        raise TypeError(f"initial_state: expected a pair (k, v) or None, got {type(cache).__name__}")
    past = {} if cache is None else {x.name: y for x, y in zip(CACHE, cache, strict=True)}
    tokens = {"q": call.q, "k": call.k, "v": call.v}
    given = {n: x for n, x in (tokens | past).items() if x is not None}
    sizes = check_inputs(KIND._replace(states=CACHE), given, WIDEST, launched)
    for name, x in past.items():
        if x.dtype != call.k.dtype:
            raise TypeError(f"{name}: expected dtype {call.k.dtype} as for k, got {x.dtype}")
    if call.cu_seqlens is not None and past:
        raise ValueError("initial_state: expected None beside cu_seqlens, got a cache")
    check_packed(call.cu_seqlens, sizes["B"], sizes["T"], call.q.device, launched)
    contract.check_scale(call.scale, sizes["K"])


WIDEST = {"K": 256, "V": 256}
forward, backward = Planned(plan_forward, Call, check, twin), Planned(plan_backward, Gradient, twin=twin)
KEPT = {
    "o": lambda call, outputs: outputs[0],
    "lse": lambda call, outputs: outputs[1],
    "low": lambda call, outputs: outputs[2],
}
operator, gradient = Operator("flash_attention", forward, 3), Operator("flash_attention_backward", backward, 3)


@operator.register_fake
def _(call):
    q = call.q
    o = q.new_empty(*q.shape[:3], call.v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return o, lse, lse.clone() if q.dtype == torch.float32 else q.new_empty(0)


@gradient.register_fake
def _(call):
    return tuple(x.new_empty(x.shape) for x in (call.q, call.k, call.v))


def _save(ctx, call, output):
    ctx.save_for_backward(call.q, call.k, call.v, *output, call.cu_seqlens)
    ctx.scale = call.scale


def _gradients(ctx, do, *_):  # lse is returned for the backward's sake: nobody differentiates it
    q, k, v, o, lse, low, cu = ctx.saved_tensors
    low = low if q.dtype == torch.float32 else None
    grads = gradient(Gradient(q=q, k=k, v=v, o=o, lse=lse, low=low, do=do, cu_seqlens=cu, scale=ctx.scale))
    return *grads, *[None] * 3


operator.register_autograd(_save, _gradients)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Causal attention by tiles in one pass, differentiable; memory grows with T, not with T squared.

    Args:
        q: queries `[B, T, H, K]`, T >= 1, K <= 256; float32, float16 or bfloat16, any strides.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`, V <= 256.
        scale: factor on the scores, K^-0.5 when None.
        initial_state: cache of earlier tokens `(k_cache [B, T0, H, K], v_cache [B, T0, H, V])`, which
            every query sees. None together with `cu_seqlens`.
        cu_seqlens: `[N_seq + 1]` boundaries of packed sequences (B = 1), int32 or int64, on the device
            of q. Their values are checked on a CPU; on a GPU under GLA_REF_DEBUG=1 only, since a launch never waits.

    Returns:
        o `[B, T, H, V]`, and the cache `(k [B, T0 + T, H, K], v [B, T0 + T, H, V])`.

    Raises:
        TypeError: the kind or dtype of an argument is wrong.
        ValueError: a shape, a size or a device is wrong.
    """
    call = Call(q=q, k=k, v=v, cu_seqlens=cu_seqlens, scale=scale, cached=initial_state is not None)
    if call.cached:
        if not torch.compiler.is_compiling():  # under torch.compile shapes are PyTorch's to check
            check(call._replace(cached=False), initial_state)
        k, v = (torch.cat(pair, 1) for pair in zip(initial_state, (k, v), strict=True))
        call = call._replace(k=k, v=v)
    if scale is not None:
        call = call._replace(scale=contract.check_number(scale))
    o, *_ = operator(call)
    return o, (k, v)
