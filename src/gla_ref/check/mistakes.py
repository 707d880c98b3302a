"""Named mistakes that kernels make, each a small wrong variant of the reference (appendix "Check your kernel").

A mistake is a function of a :class:`Call`, one sequence (or batch) in the book's notation, that returns
(o, S) as the wrong kernel would; autograd carries it to the gradients. In float64 it is what a
diagnosis compares with; in a kernel's dtype it is a wrong kernel to test the tests with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from .. import gla
from .._contract import compute_dtype, per_sequence

C = 64  # the chunk that the mistakes at chunk boundaries assume


@dataclass(frozen=True)
class Call:
    """q, k, v, g (heads third; g as wide as k), scale, the state S before the first token; right by itself."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float | None
    S: Tensor

    @property
    def s(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def own(self) -> Tensor:
        """What a token reads of its own write."""
        return self.s * (self.q * self.k).sum(-1, keepdim=True) * self.v

    def run(self, **changes) -> tuple[Tensor, Tensor]:
        c = replace(self, **changes)
        if not c.q.shape[1]:
            return c.v, c.S
        return gla.chunkwise.__wrapped__(c.q, c.k, c.v, c.g, scale=c.s, initial_state=c.S, C=16)

    def cut(self, a: int, b: int | None, **changes) -> Call:
        return replace(self, **{n: getattr(self, n)[:, a:b] for n in "qkvg"}, **changes)

    def chunks(self, turn: Callable) -> tuple[Tensor, Tensor]:
        """Chunk by chunk; `turn(c, o, S)` gets each chunk's call and right results and returns (o, S) to go on with."""
        S, outs = self.S, []
        for a in range(0, self.q.shape[1], C):
            c = self.cut(a, a + C, S=S)
            o, S = turn(c, *c.run())
            outs.append(o)
        return torch.cat(outs, 1), S


@dataclass(frozen=True)
class Mistake:
    """Its name, the line of the recurrence it touches, the wrong variant, and how it wants to be called."""

    name: str
    line: str
    variant: Callable
    mechanisms: tuple[str, ...]
    whole: bool = False  # it gets all packed sequences at once, with their boundaries


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


def decay(g: Tensor) -> Tensor:
    """Total decay of a chunk, `[B, H, K, 1]`."""
    return g.sum(1)[..., None].exp()


def write(k: Tensor, v: Tensor) -> Tensor:
    """The sum of k^T v over a chunk."""
    return torch.einsum("bthk,bthv->bhkv", k, v)


def read(q: Tensor, S: Tensor) -> Tensor:
    return torch.einsum("bthk,bhkv->bthv", q, S)


# -- gates -------------------------------------------------------------------------------------
simple(
    "gate applied after the update instead of before",
    DECAY,
    lambda c: {"k": c.k * c.g.exp()},
    GATED,
)
simple("gate forgotten", DECAY, lambda c: {"g": 0 * c.g.clamp_min(-1)}, GATED)
simple("gate of the previous token", DECAY, lambda c: {"g": later(c.g)}, GATED)
simple(
    "gate of the next token",
    DECAY,
    lambda c: {"g": torch.cat([c.g[:, 1:], torch.zeros_like(c.g[:, :1])], 1)},
    GATED,
)
simple("natural log read as base 2", DECAY, lambda c: {"g": c.g * log(2)}, GATED)
simple("factor 1 / ln 2 applied twice", DECAY, lambda c: {"g": c.g / log(2)}, GATED)
simple("every decay applied twice", DECAY, lambda c: {"g": 2 * c.g}, GATED)
simple(
    "gate of head 0 shared by all heads",
    DECAY,
    lambda c: {"g": c.g[:, :, :1].expand_as(c.g)},
    GATED,
)
simple("gate of batch 0 for every batch", DECAY, lambda c: {"g": c.g[:1].expand_as(c.g)}, GATED)
simple(
    "one gate a head: channel 0 for all channels",
    DECAY,
    lambda c: {"g": c.g[..., :1].expand_as(c.g)},
    ("gla",),
)
simple(
    "gate averaged over channels",
    DECAY,
    lambda c: {"g": c.g.mean(-1, keepdim=True).expand_as(c.g)},
    ("gla",),
)
simple("channels of the gate in reverse order", DECAY, lambda c: {"g": c.g.flip(-1)}, ("gla",))
simple("strong gates cut off at -5", DECAY, lambda c: {"g": c.g.clamp_min(-5)}, GATED)
simple(
    "gate -inf taken as no gate", DECAY, lambda c: {"g": c.g.masked_fill(c.g.isneginf(), 0)}, GATED
)


@mistake("running sum of gates in bfloat16", DECAY, GATED)
def _(c):
    b = c.g.clamp_min(-1e4).cumsum(1)
    b = b + (b.to(torch.bfloat16).to(b.dtype) - b).detach()
    return c.run(g=torch.cat([b[:, :1], b.diff(dim=1)], 1).clamp_max(0))


@mistake("decay of the current token lost in the read", READ, GATED)
def _(c):
    o, S = c.run(q=torch.cat([c.q[:, 1:], c.q[:, :1]], 1))  # at t: q_{t+1} S_t
    before = torch.cat([c.s * read(c.q[:, :1], c.S), o[:, :-1]], 1)
    return before + c.own, S


@mistake("decay of the current token doubled in the read", READ, GATED)
def _(c):
    again = replace(c, q=c.q * c.g.exp())
    o, S = again.run()
    return o - again.own + c.own, S


# -- reads and writes --------------------------------------------------------------------------
@mistake("mask strict instead of inclusive: a token does not see itself", READ)
def _(c):
    o, S = c.run()
    return o - c.own, S


@mistake("the state read before its update", READ, GATED)
def _(c):
    o, S = c.run(q=torch.cat([c.q[:, 1:], c.q[:, :1]], 1))
    return torch.cat([c.s * read(c.q[:, :1], c.S), o[:, :-1]], 1), S


@mistake("causal mask one too wide: a token sees the next one", READ)
def _(c):
    o, S = c.run()
    ahead = c.s * (c.q[:, :-1] * c.k[:, 1:]).sum(-1, keepdim=True) * c.v[:, 1:]
    return o + torch.cat([ahead, torch.zeros_like(o[:, :1])], 1), S


simple("scale forgotten", READ, lambda c: {"scale": 1.0})
simple("scale applied twice", READ, lambda c: {"scale": c.s * c.s})
simple("scale given by the caller ignored", READ, lambda c: {"scale": None})
simple(
    "scale from V instead of K",
    READ,
    lambda c: {"scale": c.v.shape[-1] ** -0.5 if c.scale is None else c.scale},
)
simple("scale on k: the state carries it", READ, lambda c: {"k": c.s * c.k, "scale": 1.0})


@mistake("scale missing where the state is read", READ)
def _(c):
    return c.chunks(lambda c, o, S: (o + (1 - c.s) * read(c.q * c.g.cumsum(1).exp(), c.S), S))


simple("k of head 0 for every head", WRITE, lambda c: {"k": c.k[:, :, :1].expand_as(c.k)})
simple("k of batch 0 for every batch", WRITE, lambda c: {"k": c.k[:1].expand_as(c.k)})
simple("v of batch 0 for every batch", WRITE, lambda c: {"v": c.v[:1].expand_as(c.v)})
simple("q and k exchanged", READ, lambda c: {"q": c.k, "k": c.q})
simple("k of the previous token", WRITE, lambda c: {"k": later(c.k)})


@mistake("last column of v masked off", WRITE)
def _(c):
    keep = torch.arange(c.v.shape[-1], device=c.v.device) < c.v.shape[-1] - 1
    o, S = c.run(v=c.v * keep)
    return o * keep, S


@mistake("last channel of k masked off", WRITE)
def _(c):
    return c.run(k=c.k * (torch.arange(c.k.shape[-1], device=c.k.device) < c.k.shape[-1] - 1))


# -- from chunk to chunk -----------------------------------------------------------------------
@mistake("state reset between chunks", CARRY)
def _(c):
    first, S = c.cut(0, C).run()
    if c.q.shape[1] <= C:
        return first, S
    rest, S = c.cut(C, None, S=torch.zeros_like(c.S)).chunks(
        lambda c, o, S: c.run(S=torch.zeros_like(c.S))
    )
    return torch.cat([first, rest], 1), S


def carry(name: str, wrong: Callable[[Call, Tensor], Tensor], mechanisms=LINEAR) -> None:
    mistake(name, CARRY, mechanisms)(lambda c: c.chunks(lambda c, o, S: (o, wrong(c, S))))


def inter(name: str, wrong: Callable[[Call], Tensor]) -> None:
    """A wrong factor on q where a chunk reads the state before it."""
    mistake(name, READ, GATED)(
        lambda c: c.chunks(
            lambda c, o, S: (o + c.s * read(c.q * (wrong(c) - c.g.cumsum(1).exp()), c.S), S)
        )
    )


carry("state not decayed from chunk to chunk", lambda c, S: S + (1 - decay(c.g)) * c.S, GATED)
carry(
    "state decayed twice from chunk to chunk",
    lambda c, S: S + decay(c.g) * (decay(c.g) - 1) * c.S,
    GATED,
)
carry("last token of a chunk lost from the state", lambda c, S: S - write(c.k[:, -1:], c.v[:, -1:]))
carry(
    "first token of a chunk lost from the state",
    lambda c, S: S - decay(c.g[:, 1:]) * write(c.k[:, :1], c.v[:, :1]),
)
carry(
    "writes not decayed to the end of their chunk",
    lambda c, S: decay(c.g) * c.S + write(c.k, c.v),
    GATED,
)
carry(
    "writes decayed by an inclusive sum: once too often",
    lambda c, S: c.run(k=c.k * c.g.exp())[1],
    GATED,
)
carry(
    "state kept in bfloat16 between chunks",
    lambda c, S: S + (S.to(torch.bfloat16).to(S.dtype) - S).detach(),
)
inter(
    "exclusive instead of inclusive sum of gates in the read", lambda c: later(c.g).cumsum(1).exp()
)
inter("state read without its decay", lambda c: torch.ones_like(c.g))
carry("gradient stops at chunk boundaries", lambda c, S: S.detach() if c.q.shape[1] == C else S)


@mistake("tail chunk lost", CARRY)
def _(c):
    T = c.q.shape[1] // C * C
    o, S = c.cut(0, T).run()
    return torch.cat([o, 0 * c.v[:, T:]], 1), S


@mistake("tail chunk unmasked: filled up with its last token", CARRY)
def _(c):
    n = -c.q.shape[1] % C
    o, S = c.run()
    return o, S + n * write(c.k[:, -1:], c.v[:, -1:])


@mistake("chunk boundary off by one: its first token unseen by the others", READ)
def _(c):
    def turn(c, o, S):
        first = c.s * read(c.q[:, 1:] * c.g[:, 1:].cumsum(1).exp(), write(c.k[:, :1], c.v[:, :1]))
        return torch.cat([o[:, :1], o[:, 1:] - first], 1), S

    return c.chunks(turn)


# -- states ------------------------------------------------------------------------------------
simple("initial state ignored", PACK, lambda c: {"S": torch.zeros_like(c.S)})
simple(
    "initial state read as V x K",
    PACK,
    lambda c: {"S": c.S.reshape(*c.S.shape[:2], *c.S.shape[:1:-1]).mT},
)


@mistake("initial state read but not carried to the end", PACK)
def _(c):
    return c.run()[0], c.run(S=torch.zeros_like(c.S))[1]


@mistake("initial state carried but not read", PACK)
def _(c):
    return c.run(S=torch.zeros_like(c.S))[0], c.run()[1]


@mistake("final state stored as V x K", "S_T")
def _(c):
    o, S = c.run()
    return o, S.mT.reshape(S.shape)


@mistake("final state without the last token", "S_T")
def _(c):
    return c.run()[0], c.cut(0, c.q.shape[1] - 1).run()[1]


@mistake("final state multiplied by scale", "S_T")
def _(c):
    o, S = c.run()
    return o, c.s * S


@mistake("last token of the sequence lost", WRITE)
def _(c):
    o, S = c.cut(0, c.q.shape[1] - 1).run()
    return torch.cat([o, 0 * c.v[:, -1:]], 1), S


# -- gradients ---------------------------------------------------------------------------------
@mistake("gradient of the final state ignored", GRADIENT)
def _(c):
    o, S = c.run()
    return o, backward(S, torch.zeros_like)


@mistake("gradient of the initial state lost", GRADIENT)
def _(c):
    return c.run(S=backward(c.S, torch.zeros_like))


@mistake("gradient of the initial state without the reads", GRADIENT)
def _(c):
    return c.run(S=c.S.detach())[0], c.run()[1]


def gradient(
    name: str, tensor: str, change: Callable[[Tensor, Call], Tensor], mechanisms=LINEAR
) -> None:
    mistake(name, GRADIENT, mechanisms)(
        lambda c: c.run(**{tensor: backward(getattr(c, tensor), lambda d: change(d, c))})
    )


def state_term(name: str, tensor: str, mechanisms=LINEAR) -> None:
    """A gradient without what reaches it through the final state."""
    mistake(name, GRADIENT, mechanisms)(
        lambda c: (c.run()[0], c.run(**{tensor: getattr(c, tensor).detach()})[1])
    )


gradient("dq without scale", "q", lambda d, c: d / c.s)
gradient("dk with scale twice", "k", lambda d, c: d * c.s)
gradient("dv added twice", "v", lambda d, c: 2 * d)
gradient(
    "reverse sum of the gate's gradient not reversed",
    "g",
    lambda d, c: (d - torch.cat([d[:, 1:], 0 * d[:, :1]], 1)).cumsum(1),
    GATED,
)
gradient("gate's gradient one token late", "g", lambda d, c: later(d), GATED)
gradient("gate's gradient in base 2", "g", lambda d, c: d * log(2), GATED)
gradient("gate's gradient with the wrong sign", "g", lambda d, c: -d, GATED)
state_term("gate's gradient without the final state term", "g", GATED)
state_term("dv without the final state term", "v")
state_term("dk without the final state term", "k")


@mistake("last token of do ignored", GRADIENT)
def _(c):
    o, S = c.run()
    return backward(o, lambda d: torch.cat([d[:, :-1], 0 * d[:, -1:]], 1)), S


# -- packed sequences, strides -----------------------------------------------------------------
@mistake("packed sequences leak into each other", PACK, whole=True)
def _(c, ends):
    if ends is None:
        return c.run()
    S, outs, finals = c.S[:1], [], []
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        S = c.S[:1] if n == 0 else S
        o, S = c.cut(a, b, S=S).run()
        outs.append(o)
        finals.append(S)
    return torch.cat(outs, 1), torch.cat(finals)


@mistake("initial state of sequence 0 for every sequence", PACK, whole=True)
def _(c, ends):
    return right(replace(c, S=c.S[:1].expand_as(c.S)), ends)


@mistake("final state of an empty sequence is zero", PACK, whole=True)
def _(c, ends):
    o, S = right(c, ends)
    if ends is not None:
        full = [float(a < b) for a, b in zip(ends, ends[1:], strict=False)]
        S = S * torch.tensor(full, dtype=S.dtype, device=S.device)[:, None, None, None]
    return o, S


@mistake("strides ignored: q read as if contiguous", READ, whole=True)
def _(c, ends):
    return right(replace(c, q=Contiguous.apply(c.q)), ends)


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


def right(c: Call, ends: list[int] | None, variant: Callable = Call.run) -> tuple[Tensor, Tensor]:
    """A variant, or the right computation, of every packed sequence by itself."""

    def one(S, **x):
        o, S = variant(replace(c, **x, S=S))
        return (o,), (S,)

    (o,), (S,) = per_sequence(one, ends, {n: getattr(c, n) for n in "qkvg"}, {"S": c.S})
    return o, S


def apply(mechanism: str, m: Mistake | None) -> Callable:
    """A kernel with that mistake (None: without one) under the contract, in at least float32."""

    def fn(q, k, v, *g, scale=None, initial_state=None, cu_seqlens=None):
        dtype, result = compute_dtype(q, k, v), v.dtype
        q, k, v, *g = (x.to(dtype) for x in (q, k, v, *g))
        gates = g[0] if g else torch.zeros_like(k)
        gates = gates if gates.ndim == 4 else gates[..., None].expand_as(k)
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        N = q.shape[0] if ends is None else len(ends) - 1
        S = q.new_zeros(N, q.shape[2], q.shape[3], v.shape[3])
        c = Call(q, k, v, gates, scale, S if initial_state is None else initial_state.to(dtype))
        if m is None:
            o, S = right(c, ends)
        else:
            o, S = m.variant(c, ends) if m.whole else right(c, ends, m.variant)
        return o.to(result), S

    return fn
