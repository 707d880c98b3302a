"""The list of mistakes, and ways to write one down (appendix "Check your kernel")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._contract import compute_dtype, state_shape
from .._emulate import by_channel
from .._mechanisms import MECHANISMS
from ._calls import Attention, C, Call


@dataclass(frozen=True)
class Mistake:
    """Its name, the line of the recurrence it touches, the wrong variant, and how it wants to be called."""

    name: str
    line: str
    variant: Callable
    mechanisms: tuple[str, ...]
    whole: bool = False  # it gets all packed sequences at once, with their boundaries
    rounding: bool = False  # right in float64: it is how float32 rounds there that is too wrong
    fine: bool = False  # nothing but float32 is exact enough to show it
    overflow: bool = False  # right in float64: what float32 cannot hold is not finite
    chunked: bool = False  # it happens at the boundaries of chunks, whose length is the kernel's own
    astray: bool = False  # it reads where nothing was written, so that how far NaN spreads is the kernel's own
    before: Callable[[dict], dict] | None = None  # a change of the tensors that a kernel is given, by their names
    after: Callable[[Tensor, object], tuple] | None = None  # a change of o and the state


SOFTMAX = tuple(m for m, kind in MECHANISMS.items() if kind.cache)
# one state, and writes that do not depend on it
LINEAR = tuple(m for m, kind in MECHANISMS.items() if not kind.cache and not kind.named("strength"))
DELTA = tuple(m for m, kind in MECHANISMS.items() if kind.named("strength"))  # writes that correct the state
STATES = LINEAR + DELTA
EVERY = STATES + SOFTMAX
GATED = tuple(m for m in LINEAR if MECHANISMS[m].named("gate"))
GATES = tuple(m for m in STATES if MECHANISMS[m].named("gate"))
CHANNELS = tuple(m for m in GATES if "K" in MECHANISMS[m].axes("g"))  # a gate for each of them
DECAY, READ, WRITE = "S_t = exp(g_t) S_{t-1} + ...", "o_t = scale q_t S_t", "S_t = ... + k_t^T v_t"
CARRY, GRADIENT, PACK = ("S_[n+1] from S_[n]: chunk to chunk", "the backward pass", "S_0 of each sequence")
MISTAKES: list[Mistake] = []


def mistake(name: str, line: str, mechanisms: tuple[str, ...] = STATES, **more: bool | Callable):
    def add(variant):
        MISTAKES.append(Mistake(name, line, variant, mechanisms, **more))
        return variant

    return add


def simple(name: str, line: str, changes: Callable[[Call], dict], mechanisms=STATES, **more: bool) -> None:
    """A mistake that is the right computation on wrong arguments."""
    mistake(name, line, mechanisms, **more)(lambda c: c.run(**changes(c)))


def gradient(name: str, tensor: str, change: Callable[[Tensor, Call], Tensor], mechanisms=STATES) -> None:
    """A mistake that is right but for the gradient of one tensor."""
    mistake(name, GRADIENT, mechanisms)(
        lambda c: c.run(**{tensor: backward(getattr(c, tensor), lambda d: change(d, c))})
    )


def state_term(name: str, tensor: str, mechanisms=STATES) -> None:
    """A gradient without what reaches it through the final state."""
    mistake(name, GRADIENT, mechanisms)(lambda c: (c.run()[0], c.run(**{tensor: getattr(c, tensor).detach()})[1]))


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


def at_most_0(x: Tensor) -> Tensor:
    """min(x, 0) with a gradient of 1 everywhere; `clamp_max` passes none at 0 in some releases of PyTorch."""
    return x - x.detach().clamp_min(0)


def later(x: Tensor, n: int = 1) -> Tensor:
    """x[t - n] in place of x[t], zeros first."""
    return torch.cat([torch.zeros_like(x[:, :n]), x[:, :-n]], 1)


class Misread(torch.autograd.Function):
    """Memory read with other strides from the first element on; the gradient as if nothing had happened."""

    @staticmethod
    def forward(ctx, x, strides):
        return x.as_strided(x.shape, strides, x.storage_offset()).nan_to_num().clone()

    @staticmethod
    def backward(ctx, d):
        return d, None


class Widened(torch.autograd.Function):
    """x in another precision and with its own strides, which `to` does not keep where there are gaps."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = x.dtype
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(dtype)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def backward(ctx, d):
        return d.to(ctx.dtype), None


def contiguous(x: Tensor) -> tuple[int, ...]:
    """The strides that x would have if it lay in order."""
    return torch.empty(x.shape, device="meta").stride()


class Total(torch.autograd.Function):
    """0 in place of the sum of gates `[B, T, H, K]`, with the sum's gradient: also where a gate is -inf."""

    @staticmethod
    def forward(ctx, g):
        ctx.shape = g.shape
        return torch.zeros_like(g[:, 0])

    @staticmethod
    def backward(ctx, d):
        return d[:, None].expand(ctx.shape)


def apply(mechanism: str, m: Mistake | None, C: int = C) -> Callable:
    """A kernel with that mistake (None: without one) and chunks of C, under the contract, in at least float32."""
    kind = MECHANISMS[mechanism]

    def fn(*tokens, scale=None, initial_state=None, cu_seqlens=None):
        x = dict(zip(kind.arguments, tokens, strict=True))
        if m is not None and m.before:
            x = m.before(x if kind.cache or initial_state is None else x | {"S0": initial_state})
            initial_state = x.pop("S0", initial_state)
        dtype, result = compute_dtype(*(x[n] for n in kind.named("token"))), x["v"].dtype
        x = {n: y if y.dtype == dtype else Widened.apply(y, dtype) for n, y in x.items()}
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        if kind.cache:
            k0, v0 = initial_state or (x["k"][:, :0], x["v"][:, :0])
            c = Attention(**x, scale=scale, k0=k0, v0=v0)
        else:
            N, sizes = len(x["q"]) if ends is None else len(ends) - 1, kind.sizes(x)
            S = x["q"].new_zeros(state_shape(kind.mechanism, sizes, N))
            S = S if initial_state is None else initial_state.to(dtype)
            k = x["k"].repeat_interleave(x["v"].shape[2] // x["k"].shape[2], 2)
            c = Call(**x | {"g": by_channel(x.get("g"), k)}, scale=scale, S=S, C=C)
        if m is None:
            o, state = c.each(ends)
        else:
            o, state = m.variant(c, ends) if m.whole else c.each(ends, m.variant)
        o, state = o.to(result), tuple(x.to(result) for x in state) if kind.cache else state
        return m.after(o, state) if m is not None and m.after else (o, state)

    return fn
