"""What is right, and what a low-precision run makes of it: one declaration a mechanism (chapters 1, 4, 7 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gla_ref import gla, linear_attention, simple_gla, softmax_attention

from .._contract import per_sequence

SHORT = 300  # tokens up to which the recurrence itself is the oracle; then the form held against it


class Product(torch.autograd.Function):
    """x y, and so its two gradients, with operands rounded to `dtype` and a float32 sum.

    For float32 the sum runs term after term, as a kernel's chain of fused multiply-adds does; a
    library's product, which sums in parts, is several times more exact than that.
    """

    @staticmethod
    def multiply(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype != torch.float32:
            return x.to(dtype).float() @ y.to(dtype).float()
        out = x[..., :1] * y[..., :1, :]
        for i in range(1, x.shape[-1]):
            out = out + x[..., i : i + 1] * y[..., i : i + 1, :]
        return out

    @staticmethod
    def forward(ctx, x, y, dtype):
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        return Product.multiply(x, y, dtype)

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        return Product.multiply(d, y.mT, ctx.dtype), Product.multiply(x.mT, d, ctx.dtype), None


def two_level(q, k, v, g, S, scale, dtype, C, c=16):
    """`gla.chunkwise_two_level` with every product's operands, and those of its gradients, rounded to dtype."""

    def mm(x, y):
        return Product.apply(x, y, dtype)

    q, k, v, g = gla._heads_first(q, k, v, g)
    o = torch.zeros_like(v)
    for kind, rows, cols in gla.two_level_blocks(q.shape[-2], C, c):
        i, j = (..., rows, slice(None)), (..., cols, slice(None))
        if kind == "inter-chunk":
            o[i] += gla._read(q[i], S, g[i], None, mm)
            S = gla._update(k[i], v[i], S, g[i], None, mm)
        elif kind == "inter-sub-chunk":
            since, until = gla.decay_from_start, gla.decay_to_end
            P = mm(gla._decayed(q[i], g[i], since), gla._decayed(k[j], g[j], until).mT)
            o[i] += mm(P, v[j])
        else:
            o[i] += mm(gla._scores(q[i], k[j], g[i]), v[j])
    return scale * o.transpose(1, 2), S


class Attend(torch.autograd.Function):
    """Attention and its closed-form backward as kernels do them: ds = p (do v^T - o . do), o as it was stored."""

    @staticmethod
    def forward(ctx, q, k, v, scale, keep, dtype):
        x = (scale * Product.multiply(q, k.mT, dtype)).masked_fill(~keep, -torch.inf)
        m = x.amax(-1, keepdim=True)
        p = (x - m).exp()
        total = p.sum(-1, keepdim=True)  # p is rounded as an operand, its sum is not
        o = Product.multiply(p, v, dtype) / total
        ctx.save_for_backward(q, k, v, p / total, o.to(dtype).float())
        ctx.scale, ctx.dtype = scale, dtype
        return o

    @staticmethod
    def backward(ctx, do):
        (q, k, v, p, o), dtype = ctx.saved_tensors, ctx.dtype
        ds = p * (Product.multiply(do, v.mT, dtype) - (o * do).sum(-1, keepdim=True))
        dq, dk = Product.multiply(ds, k, dtype), Product.multiply(ds.mT, q, dtype)
        return ctx.scale * dq, ctx.scale * dk, Product.multiply(p.mT, do, dtype), None, None, None


def attend(q, k, v, g, cache, scale, dtype, C):
    """Softmax attention on top of a cache; C plays no part."""
    k, v = (torch.cat(pair, 1) for pair in zip(cache, (k, v), strict=True))
    T, S = q.shape[1], k.shape[1]
    keep = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    o = Attend.apply(*(x.transpose(1, 2) for x in (q, k, v)), scale, keep, dtype)
    return o.transpose(1, 2), (k, v)


@dataclass(frozen=True)
class Mechanism:
    """All that the kit must know of a mechanism.

    Attributes:
        exact: the float64 oracle.
        fast: a form held against it by the tests, for long sequences.
        emulated: `(q, k, v, g, state, scale, dtype, C) -> o, state` in float32 with rounded products;
            g comes as `[B, T, H, K]`, zeros where there is no gate.
        single: forms whose own run in float32 shows how a right float32 kernel may differ, too: the
            recurrence rounds every decay anew, and all of them one way when they are equal.
        gate: the axes of g; None for no gate.
        cache: the state is the pair of all keys and values, instead of S `[N, H, K, V]`.
    """

    exact: Callable
    fast: Callable
    emulated: Callable
    single: tuple[Callable, ...]
    gate: str | None = None
    cache: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return ("q", "k", "v") if self.gate is None else ("q", "k", "v", "g")

    @property
    def states(self) -> dict[str, str]:
        """Name of each state given, to the name of what comes out."""
        return {"k0": "k_cache", "v0": "v_cache"} if self.cache else {"S0": "S"}

    def oracle(self, *tokens, **options):
        if tokens[0].shape[1] <= SHORT:
            return self.exact(*tokens, **options)
        return self.fast(*tokens, **options)

    def emulate(self, *tokens, scale, initial_state, cu_seqlens, dtype, C):
        q, k, v, *g = tokens
        g = g[0] if g else torch.zeros_like(q)
        x = {"q": q, "k": k, "v": v, "g": g if g.ndim == 4 else g[..., None].expand_as(q)}
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        if self.cache:
            cache = initial_state or (k[:, :0], v[:, :0])

            def attended(**x):
                return (attend(*x.values(), cache, scale, dtype, C)[0],), ()

            (o,), _ = per_sequence(attended, ends, x, {})
            return o, tuple(torch.cat(pair, 1) for pair in zip(cache, (k, v), strict=True))
        N = q.shape[0] if ends is None else len(ends) - 1
        S = q.new_zeros(N, q.shape[2], q.shape[3], v.shape[3])
        S = S if initial_state is None else initial_state

        def one(S, **x):
            o, S = self.emulated(*x.values(), S, scale, dtype, C)
            return (o,), (S,)

        (o,), (S,) = per_sequence(one, ends, x, {"S": S})
        return o, S


MECHANISMS = {
    "softmax_attention": Mechanism(
        softmax_attention.recurrent,
        softmax_attention.parallel,
        attend,
        (softmax_attention.recurrent, softmax_attention.two_pass),
        cache=True,
    ),
    "linear_attention": Mechanism(
        linear_attention.recurrent,
        linear_attention.chunkwise,
        two_level,
        (linear_attention.recurrent, linear_attention.parallel),
    ),
    "simple_gla": Mechanism(
        simple_gla.recurrent,
        simple_gla.chunkwise,
        two_level,
        (simple_gla.recurrent, simple_gla.chunkwise),
        gate="B T H",
    ),
    "gla": Mechanism(
        gla.recurrent, gla.chunkwise, two_level, (gla.recurrent, gla.parallel_log), gate="B T H K"
    ),
}
