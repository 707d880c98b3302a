"""The list of mistakes, and ways to write one down (appendix "Check your kernel")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._contract import compute_dtype
from ._calls import Attention, Call


@dataclass(frozen=True)
class Mistake:
    """Its name, the line of the recurrence it touches, the wrong variant, and how it wants to be called."""

    name: str
    line: str
    variant: Callable
    mechanisms: tuple[str, ...]
    whole: bool = False  # it gets all packed sequences at once, with their boundaries


SOFTMAX = ("softmax_attention",)
LINEAR = ("linear_attention", "simple_gla", "gla")
GATED = ("simple_gla", "gla")
DECAY, READ, WRITE = "S_t = exp(g_t) S_{t-1} + ...", "o_t = scale q_t S_t", "S_t = ... + k_t^T v_t"
CARRY, GRADIENT, PACK = (
    "S_[n+1] from S_[n]: chunk to chunk",
    "the backward pass",
    "S_0 of each sequence",
)
MISTAKES: list[Mistake] = []


def mistake(name: str, line: str, mechanisms: tuple[str, ...] = LINEAR, whole: bool = False):
    def add(variant):
        MISTAKES.append(Mistake(name, line, variant, mechanisms, whole))
        return variant

    return add


def simple(name: str, line: str, changes: Callable[[Call], dict], mechanisms=LINEAR) -> None:
    """A mistake that is the right computation on wrong arguments."""
    mistake(name, line, mechanisms)(lambda c: c.run(**changes(c)))


def gradient(
    name: str, tensor: str, change: Callable[[Tensor, Call], Tensor], mechanisms=LINEAR
) -> None:
    """A mistake that is right but for the gradient of one tensor."""
    mistake(name, GRADIENT, mechanisms)(
        lambda c: c.run(**{tensor: backward(getattr(c, tensor), lambda d: change(d, c))})
    )


def state_term(name: str, tensor: str, mechanisms=LINEAR) -> None:
    """A gradient without what reaches it through the final state."""
    mistake(name, GRADIENT, mechanisms)(
        lambda c: (c.run()[0], c.run(**{tensor: getattr(c, tensor).detach()})[1])
    )


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return ctx.change(d), None


def backward(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """x, with another gradient."""
    return _Backward.apply(x, change)


def later(x: Tensor, n: int = 1) -> Tensor:
    """x[t - n] in place of x[t], zeros first."""
    return torch.cat([torch.zeros_like(x[:, :n]), x[:, :-n]], 1)


class Contiguous(torch.autograd.Function):
    """Memory read in order from the first element on; the gradient as if nothing had happened."""

    @staticmethod
    def forward(ctx, x):
        if x.is_contiguous():
            return x.clone()
        return (
            x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
            .nan_to_num()
            .clone()
        )

    @staticmethod
    def backward(ctx, d):
        return d


def apply(mechanism: str, m: Mistake | None) -> Callable:
    """A kernel with that mistake (None: without one) under the contract, in at least float32."""

    def fn(q, k, v, *g, scale=None, initial_state=None, cu_seqlens=None):
        dtype, result = compute_dtype(q, k, v), v.dtype
        q, k, v, *g = (x.to(dtype) for x in (q, k, v, *g))
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        if mechanism in SOFTMAX:
            c = Attention(q, k, v, scale, *(initial_state or (k[:, :0], v[:, :0])))
        else:
            gates = g[0] if g else torch.zeros_like(k)
            gates = gates if gates.ndim == 4 else gates[..., None].expand_as(k)
            N = q.shape[0] if ends is None else len(ends) - 1
            S = q.new_zeros(N, q.shape[2], q.shape[3], v.shape[3])
            c = Call(q, k, v, gates, scale, S if initial_state is None else initial_state.to(dtype))
        if m is None:
            o, state = c.each(ends)
        else:
            o, state = m.variant(c, ends) if m.whole else c.each(ends, m.variant)
        return o.to(result), tuple(x.to(result) for x in state) if mechanism in SOFTMAX else state

    return fn
