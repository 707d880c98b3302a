"""What the kit knows of a mechanism, in one declaration (chapters 1, 4, 7 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gla_ref import gla, linear_attention, simple_gla, softmax_attention

from .._contract import per_sequence
from ._emulate import attend, by_token, two_level

SHORT = 500  # tokens up to which the recurrence itself is the oracle; then a form held against it
# one chunk after another, of lengths that kernels have (and the longest is most cases' whole), and token after token
LINEAR = (
    partial(two_level, C=16),
    partial(two_level, C=64, halves=True),
    partial(two_level, C=256),
    by_token,
)


@dataclass(frozen=True)
class Mechanism:
    """All that the kit must know of a mechanism.

    Attributes:
        exact: the float64 oracle.
        emulated: right runs `(q, k, v, g, state, scale, dtype) -> o, state` whose errors budgets are
            made of; g comes as `[B, T, H, K]`, zeros where there is no gate. The first one, in
            float64, stands for the oracle in long sequences; the tests hold it against that.
        also: forms whose own float32 run counts among them, up to SHORT tokens.
        gate: the axes of g; None for no gate.
        cache: the state is the pair of all keys and values, instead of S `[N, H, K, V]`.
        widest: the largest V of its cases.
    """

    exact: Callable
    emulated: tuple[Callable, ...] = LINEAR
    also: tuple[Callable, ...] = ()
    gate: str | None = None
    cache: bool = False
    widest: int = 512

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
        return self.emulate(*tokens, **options)

    def emulate(self, *tokens, scale, initial_state, cu_seqlens, dtype=torch.float64, run=0):
        """One of the emulated runs under the contract; exact in float64."""
        q, k, v, *g = tokens
        g = g[0] if g else torch.zeros_like(q)
        x = {"q": q, "k": k, "v": v, "g": g if g.ndim == 4 else g[..., None].expand_as(q)}
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        if self.cache:
            cache = initial_state or (k[:, :0], v[:, :0])

            def attended(**x):
                o, (k, v) = self.emulated[run](*x.values(), cache, scale, dtype)
                return (o, k, v), ()

            (o, k, v), _ = per_sequence(attended, ends, x, {})
            return o, (k, v)
        N = q.shape[0] if ends is None else len(ends) - 1
        S = q.new_zeros(N, q.shape[2], q.shape[3], v.shape[3])
        S = S if initial_state is None else initial_state

        def one(S, **x):
            o, S = self.emulated[run](*x.values(), S, scale, dtype)
            return (o,), (S,)

        (o,), (S,) = per_sequence(one, ends, x, {"S": S})
        return o, S


MECHANISMS = {
    "softmax_attention": Mechanism(
        softmax_attention.recurrent,
        (attend, partial(attend, by_key=True)),
        (softmax_attention.two_pass,),
        cache=True,
        widest=256,
    ),
    "linear_attention": Mechanism(linear_attention.recurrent),
    "simple_gla": Mechanism(simple_gla.recurrent, gate="B T H"),
    "gla": Mechanism(gla.recurrent, gate="B T H K"),
}
