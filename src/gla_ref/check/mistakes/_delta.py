"""Mistakes of delta rules: what a key finds, the triangle and its inverse, strengths, value heads (chapters 20, 21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...chunks import heads_first, scores
from ...gates import decay_from_start, decay_to_end
from ...rounding import Products
from ...triangular import doubling
from .._emulate import Product
from .._emulate import corrected as emulated
from ._calls import Call, corrected, eliminated
from ._core import CARRY, CHANNELS, DECAY, DELTA, GATES, GRADIENT, READ, backward, gradient, later, mistake, simple
from ._linear import write
from ._rounding import CHUNKS, DIFFERENCES, ENDS, LOW, MIDDLE, RATIO, Low

SOLVE, FIND, HEADS = "(I + A) v^ = beta (v - K S)", "v_t - k_t S_{t-1}", "value head h reads key head h // (HV / H)"
STRENGTH = "S_t = ... + beta_t k_t^T (v_t - k_t S_{t-1})"
GATED = tuple(m for m in DELTA if m in GATES)
CHANNEL = tuple(m for m in DELTA if m in CHANNELS)
BLOCK = 16  # of the triangles that are inverted by themselves


class Chunk:
    """The tensors of a chunk's call, heads first, whose gradients stop where their names say so."""

    def __init__(self, n: Call, stop: str = ""):
        for name in ("q", "k", "v", "g"):
            x = heads_first(getattr(n, name))
            setattr(self, name, x.detach() if name in stop.split() else x)
        self.beta = heads_first(n.beta[..., None])
        self.beta = self.beta.detach() if "beta" in stop.split() else self.beta
        self.reader = self.k.detach() if "reader" in stop.split() else self.k
        self.S = n.S

    @property
    def A(self) -> Tensor:
        return (self.beta * scores(self.reader, self.k, self.g)).tril(-1)

    @property
    def P(self) -> Tensor:
        return scores(self.q, self.k, self.g)

    @property
    def found(self) -> Tensor:
        return self.beta * ((self.reader * decay_from_start(self.g).exp()) @ self.S)


def step(
    name: str, line: str, mechanisms: tuple[str, ...] = DELTA, *, chunked: bool = False, **steps: Callable
) -> None:
    """A delta rule with a wrong step, in chunks of the kernel's own length where that matters."""
    mistake(name, line, mechanisms, chunked=chunked)(lambda c: corrected(c, c.C if chunked else BLOCK, **steps)[:2])


# -- what a key finds ----------------------------------------------------------------------------
step("what the keys find is added instead of subtracted", FIND, found=lambda n, x: -x, triangle=lambda n, A: -A)
step("sign of A: earlier corrections of the chunk added, not subtracted", SOLVE, chunked=True, triangle=lambda n, A: -A)
step("what a chunk's keys find in the state before it not subtracted", FIND, chunked=True, found=lambda n, x: 0 * x)
step("what a chunk's keys find in the state before it added", FIND, chunked=True, found=lambda n, x: -x)
step("nothing is erased: plain linear attention", FIND, found=lambda n, x: 0 * x, triangle=lambda n, A: 0 * A)


@mistake("erase after the write instead of before", FIND, DELTA)
def _(c):
    return c.run(v=c.v * (1 - c.beta[..., None] * (c.k * c.k).sum(-1, keepdim=True)))


@mistake("values not corrected within a chunk: the state at its start serves all its keys", SOLVE, DELTA, chunked=True)
def _(c):
    return corrected(c, c.C, invert=lambda A: eye(A).expand(A.shape))[:2]


# -- the triangle --------------------------------------------------------------------------------
def blocks(A: Tensor, merge: Callable[..., Tensor], own: Callable[[Tensor], Tensor] = eliminated) -> Tensor:
    """Blocks of 16 inverted, then merged two and two: `merge(Y_1, A_21, Y_2)` is the lower left block."""
    n, half = A.shape[-1], BLOCK
    if n <= BLOCK:
        return own(A)
    while 2 * half < n:
        half *= 2
    one, two = blocks(A[..., :half, :half], merge, own), blocks(A[..., half:, half:], merge, own)
    below = merge(one, A[..., half:, :half], two)
    return torch.cat([torch.cat([one, torch.zeros_like(below.mT)], -1), torch.cat([below, two], -1)], -2)


def inverted(name: str, invert: Callable[[Tensor], Tensor]) -> None:
    step(name, SOLVE, chunked=True, invert=invert)


def eye(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


inverted("triangle inverted to first order: I - A", lambda A: eye(A) - A)
inverted("triangle inverted to second order: I - A + A^2", lambda A: eye(A) - A + A @ A)
inverted("triangle not inverted: I + A for its inverse", lambda A: eye(A) + A)
inverted("inverse of the triangle transposed", lambda A: eliminated(A).mT)
inverted("inverse of the triangle without its diagonal", lambda A: eliminated(A) - eye(A))
inverted("blocks of the triangle never merged", partial(blocks, merge=lambda Y, A, Z: torch.zeros_like(A)))
inverted("wrong merge of blocks: the wrong sign", partial(blocks, merge=lambda Y, A, Z: Z @ A @ Y))
inverted("wrong merge of blocks: without the lower inverse", partial(blocks, merge=lambda Y, A, Z: -A @ Y))
inverted("wrong merge of blocks: without the upper inverse", partial(blocks, merge=lambda Y, A, Z: -Z @ A))
inverted("wrong merge of blocks: A itself", partial(blocks, merge=lambda Y, A, Z: -A))


def on_diagonal(n: Call) -> Tensor:
    it = Chunk(n)
    return torch.diag_embed((it.beta * (it.k * it.k).sum(-1, keepdim=True))[..., 0])


step(
    "diagonal of A kept: a token corrects what it writes itself",
    SOLVE,
    chunked=True,
    triangle=lambda n, A: A + on_diagonal(n),
    invert=lambda A: torch.linalg.solve_triangular(A + eye(A), eye(A).expand(A.shape), upper=False),
)
step(
    "A with the strength of the key that wrote",
    SOLVE,
    chunked=True,
    triangle=lambda n, A: (Chunk(n).beta.mT * scores(Chunk(n).k, Chunk(n).k, Chunk(n).g)).tril(-1),
)
step("A without beta", SOLVE, chunked=True, triangle=lambda n, A: scores(Chunk(n).k, Chunk(n).k, Chunk(n).g).tril(-1))
step("beta twice in A", SOLVE, chunked=True, triangle=lambda n, A: Chunk(n).beta * A)
step(
    "A without its first column: the first token of a chunk is not corrected",
    SOLVE,
    chunked=True,
    triangle=lambda n, A: pad(A[..., 1:], (1, 0)),
)


# -- strengths -----------------------------------------------------------------------------------
simple("beta left out", STRENGTH, lambda c: {"beta": torch.ones_like(c.beta)}, DELTA)
simple("beta twice", STRENGTH, lambda c: {"beta": c.beta**2}, DELTA)
step("beta left out of what is written", STRENGTH, stored=lambda n, x: heads_first(n.v))
step("beta twice in what is written", STRENGTH, stored=lambda n, x: Chunk(n).beta * x)
step("beta twice in what is found in the state", STRENGTH, chunked=True, found=lambda n, x: Chunk(n).beta * x)
simple(
    "beta left out of what is erased",
    STRENGTH,
    lambda c: {"v": c.beta[..., None] * c.v, "beta": torch.ones_like(c.beta)},
    DELTA,
)
step(
    "beta after the solution: v^ = beta Y (v - K S)",
    SOLVE,
    chunked=True,
    stored=lambda n, x: heads_first(n.v),
    solved=lambda n, x: Chunk(n).beta * x,
)
simple("strengths clamped to 1", STRENGTH, lambda c: {"beta": c.beta.clamp_max(1)}, DELTA)
simple("strengths doubled, for negative eigenvalues", STRENGTH, lambda c: {"beta": 2 * c.beta}, DELTA)
simple("strengths halved", STRENGTH, lambda c: {"beta": c.beta / 2}, DELTA)
simple("sigmoid taken of strengths", STRENGTH, lambda c: {"beta": c.beta.sigmoid()}, DELTA)
simple("beta of the previous token", STRENGTH, lambda c: {"beta": later(c.beta)}, DELTA)
simple("beta of head 0 for every head", STRENGTH, lambda c: {"beta": c.beta[:, :, :1].expand_as(c.beta)}, DELTA)
simple("beta of the head before", STRENGTH, lambda c: {"beta": c.beta.roll(1, 2)}, DELTA)
simple("beta of batch 0 for every batch", STRENGTH, lambda c: {"beta": c.beta[:1].expand_as(c.beta)}, DELTA)
simple("keys normalised again", FIND, lambda c: {"k": c.k / c.k.norm(dim=-1, keepdim=True).clamp_min(1e-6)}, DELTA)
simple("queries normalised", READ, lambda c: {"q": c.q / c.q.norm(dim=-1, keepdim=True).clamp_min(1e-6)}, DELTA)


# -- reads and writes ----------------------------------------------------------------------------
step(
    "values read within a chunk instead of corrections",
    READ,
    chunked=True,
    read=lambda n, x: x + Chunk(n).P @ heads_first(n.v - n.written),
)


def to_end(c: Call) -> Tensor:
    """Keys decayed to the end of their chunk."""
    return c.k * decay_to_end(c.g.transpose(1, 2)).transpose(1, 2).exp()


@mistake("values carried to the next chunk instead of corrections", CARRY, DELTA, chunked=True)
def _(c):
    return c.chunks(lambda c, o, S: (o, S + write(to_end(c), c.v - c.written)))


@mistake("corrections carried to the next chunk without the inverse", CARRY, DELTA, chunked=True)
def _(c):
    def turn(c, o, S):
        plain = corrected(c, c.C, invert=lambda A: eye(A).expand(A.shape))[2]
        return o, S + write(to_end(c), plain - c.written)

    return c.chunks(turn)


# -- gates ---------------------------------------------------------------------------------------
step(
    "Gamma left out of A: pairs not decayed",
    SOLVE,
    GATED,
    chunked=True,
    triangle=lambda n, A: (Chunk(n).beta * (Chunk(n).k @ Chunk(n).k.mT)).tril(-1),
)
step(
    "Gamma left out of the scores: pairs not decayed",
    READ,
    GATED,
    chunked=True,
    weights=lambda n, P: (Chunk(n).q @ Chunk(n).k.mT).tril(),
)
step(
    "keys find the state of the chunk's start undecayed",
    FIND,
    GATED,
    chunked=True,
    found=lambda n, x: Chunk(n).beta * (Chunk(n).k @ n.S),
)
step(
    "keys find the state of the chunk's start with one decay less",
    FIND,
    GATED,
    chunked=True,
    found=lambda n, x: Chunk(n).beta * ((Chunk(n).k * heads_first(later(n.g)).cumsum(-2).exp()) @ n.S),
)


@mistake("gate applied after the update instead of before", DECAY, GATED)
def _(c):
    o, S = c.run(g=later(c.g), q=c.q * c.g.exp())
    return o, c.g[:, -1].exp()[..., None] * S if c.g.shape[1] else S


def by_token(name: str, line: str, turn: Callable, mechanisms: tuple[str, ...] = GATED) -> None:
    """Token by token; `turn(S, k, v, g, beta)`, each `[B, H, K or 1, V or 1]`, returns the next state."""

    def variant(c):
        S, outs = c.S, []
        for q, k, v, g, beta in zip(*(x.unbind(1) for x in (c.q, c.k, c.v, c.g, c.beta)), strict=True):
            S = turn(S, k[..., None], v[..., None, :], g[..., None], beta[..., None, None])
            outs.append(c.s * (q[..., None] * S).sum(-2))
        return (torch.stack(outs, 1), S) if outs else (c.v, S)

    mistake(name, line, mechanisms)(variant)


def find(k: Tensor, S: Tensor) -> Tensor:
    return (k * S).sum(-2, keepdim=True)


by_token(
    "keys find the state before the gate", FIND, lambda S, k, v, g, beta: g.exp() * S + k * (beta * (v - find(k, S)))
)
by_token(
    "gate applied between erase and write",
    DECAY,
    lambda S, k, v, g, beta: g.exp() * (S - beta * k * find(k, S)) + beta * k * v,
    CHANNEL,
)
by_token(
    "what is erased is not decayed",
    FIND,
    lambda S, k, v, g, beta: g.exp() * S - beta * k * find(k, S) + beta * k * v,
    CHANNEL,
)
by_token("log gate taken for alpha", DECAY, lambda S, k, v, g, beta: (a := g * S) + k * (beta * (v - find(k, a))))


# -- value heads ---------------------------------------------------------------------------------
def tiled(x: Tensor, HV: int) -> Tensor:
    return x.repeat(1, 1, HV // x.shape[2], 1)


def of_first(x: Tensor, c: Call) -> Tensor:
    """Each value head's number of the first one of its key head."""
    n = c.v.shape[2] // c.q.shape[2]
    return x[:, :, torch.arange(x.shape[2]) // n * n]


def of_last(x: Tensor, HV: int) -> Tensor:
    """Key heads for their value heads, whose gradient is only the last one's."""
    n = HV // x.shape[2]
    repeated = x.repeat_interleave(n, 2)
    last = (torch.arange(HV) % n == n - 1)[:, None]
    return torch.where(last, repeated, repeated.detach())


for name, line, change in (
    (
        "value heads grouped wrongly: h reads key head h mod H",
        HEADS,
        lambda c: {n: tiled(getattr(c, n), c.v.shape[2]) for n in "qk"},
    ),
    (
        "queries of value heads grouped wrongly: h mod H",
        HEADS,
        lambda c: {"q": tiled(c.q, c.v.shape[2]), "k": c.wide.k},
    ),
    ("keys of value heads grouped wrongly: h mod H", HEADS, lambda c: {"k": tiled(c.k, c.v.shape[2]), "q": c.wide.q}),
    ("beta of a key head's first value head for all of them", HEADS, lambda c: {"beta": of_first(c.beta, c)}),
    ("v of a key head's first value head for all of them", HEADS, lambda c: {"v": of_first(c.v, c)}),
    (
        "dk of a key head's last value head instead of the sum",
        GRADIENT,
        lambda c: {"k": of_last(c.k, c.v.shape[2]), "q": c.wide.q},
    ),
    (
        "dq of a key head's last value head instead of the sum",
        GRADIENT,
        lambda c: {"q": of_last(c.q, c.v.shape[2]), "k": c.wide.k},
    ),
):
    mistake(name, line, DELTA, whole=True)(lambda c, ends, change=change: replace(c, **change(c)).each(ends))


@mistake("gate of a key head's first value head for all of them", HEADS, GATED, whole=True)
def _(c, ends):
    return replace(c, g=of_first(c.g, c)).each(ends)


# -- gradients -----------------------------------------------------------------------------------
def stopped(name: str, stop: str, *steps: str, mechanisms: tuple[str, ...] = DELTA) -> None:
    """A gradient that does not come through some of the steps."""
    made = {"triangle": "A", "found": "found", "weights": "P"}
    hooks = {s: lambda n, x, s=s: getattr(Chunk(n, stop), made[s]) for s in steps}
    mistake(name, GRADIENT, mechanisms, chunked=True)(lambda c: corrected(c, c.C, **hooks)[:2])


stopped("gradient of beta without what is erased", "beta", "triangle", "found")
stopped("gradient of beta without the triangle", "beta", "triangle")
stopped("gradient of beta without what is found in the state", "beta", "found")
stopped("dk without what the keys erase", "reader", "triangle", "found")
stopped("dk without what the keys find in the state", "reader", "found")
stopped("dk without the triangle", "k reader", "triangle")
stopped("gate's gradient without the triangle", "g", "triangle", mechanisms=GATED)
stopped("gate's gradient without the scores", "g", "weights", mechanisms=GATED)
stopped("gate's gradient without what is found in the state", "g", "found", mechanisms=GATED)
step("gradient of beta without what is written", GRADIENT, stored=lambda n, x: Chunk(n, "beta").beta * Chunk(n).v)
step("dv without beta", GRADIENT, stored=lambda n, x: x.detach() + Chunk(n).v - Chunk(n).v.detach())
step("no gradient through the inverse", GRADIENT, chunked=True, invert=lambda A: eliminated(A).detach())
step(
    "gradient of the inverse with the wrong sign",
    GRADIENT,
    chunked=True,
    invert=lambda A: eliminated(backward(A, lambda d: -d)),
)
gradient("gradient of beta added twice", "beta", lambda d, c: 2 * d, DELTA)
gradient("gradient of beta with the wrong sign", "beta", lambda d, c: -d, DELTA)
gradient("gradient of beta through a sigmoid that is not there", "beta", lambda d, c: d * c.beta * (1 - c.beta), DELTA)
gradient("gradient of beta one token late", "beta", lambda d, c: later(d), DELTA)


@mistake("gradient of beta without scale", GRADIENT, DELTA)
def _(c):
    return c.run(beta=backward(c.beta, lambda d: d / c.s))[0], c.run()[1]


class Unmasked(torch.autograd.Function):
    """The inverse, with a gradient on the diagonal, too."""

    @staticmethod
    def forward(ctx, A):
        Y = eliminated(A)
        ctx.save_for_backward(Y)
        return Y

    @staticmethod
    def backward(ctx, d):
        (Y,) = ctx.saved_tensors
        return -(Y.mT @ d @ Y.mT)


step(
    "gradient of A not masked on the diagonal",
    GRADIENT,
    chunked=True,
    triangle=lambda n, A: A + on_diagonal(n) - on_diagonal(n).detach(),
    invert=Unmasked.apply,
)


class Shadow(torch.autograd.Function):
    """0, with the gradient of x."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, d):
        return d


@mistake("pairs i = j in the gate's gradient", GRADIENT, GATED, chunked=True)
def _(c):
    def turn(c, o, S):
        own = (c.q * c.k).detach() * Shadow.apply(c.g).cumsum(1)
        return o + c.s * own.sum(-1, keepdim=True) * c.written.detach(), S

    return c.chunks(turn)


# -- right on paper ------------------------------------------------------------------------------
def anchored(c: Call, C: int, anchor: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Pairs as products of what is decayed from an anchor r of the running sums b: e^(b_i - r) e^(r - b_j)."""

    def parts(n):
        it = Chunk(n)
        b = it.g.cumsum(-2)
        return it, (b - anchor(b)).exp(), it.k * (anchor(b) - b).exp(), b[..., -1:, :], anchor(b)

    def triangle(n, A):
        it, up, down, *_ = parts(n)
        return (it.beta * ((it.k * up) @ down.mT)).tril(-1)

    def weights(n, P):
        it, up, down, *_ = parts(n)
        return ((it.q * up) @ down.mT).tril()

    def after(n, S, w):
        _, _, down, end, r = parts(n)
        return end.exp().mT * n.S + (down * (end - r).exp()).mT @ w

    return corrected(c, C, triangle=triangle, weights=weights, after=after)[:2]


def by_differences(c: Call, C: int, decays: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Decays of pairs of differences of running sums, and of the mask."""

    def between(n):
        b = Chunk(n).g.cumsum(-2)
        i = torch.arange(b.shape[-2], device=b.device)
        return decays(b[..., :, None, :] - b[..., None, :, :], (i[:, None] >= i)[..., None])

    def pairs(x, n):
        return (x[..., :, None, :] * Chunk(n).k[..., None, :, :] * between(n)).sum(-1)

    def triangle(n, A):
        return (Chunk(n).beta * pairs(Chunk(n).k, n)).tril(-1)

    return corrected(c, C, triangle=triangle, weights=lambda n, P: pairs(Chunk(n).q, n))[:2]


def masked(x: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, x, -torch.inf).exp()


OUTSIDE = "gate outside the mask: above the diagonal infinity times 0"
for C in CHUNKS[:-1]:
    mistake(RATIO, DECAY, GATED, overflow=True)(partial(anchored, C=C, anchor=torch.zeros_like))
    mistake(MIDDLE, DECAY, GATED, overflow=True)(partial(anchored, C=C, anchor=lambda b: b[..., -1:, :] / 2))
    mistake(DIFFERENCES, DECAY, GATED, overflow=True)(partial(by_differences, C=C, decays=masked))
    mistake(OUTSIDE, DECAY, GATED, overflow=True)(partial(by_differences, C=C, decays=lambda x, seen: x.exp() * seen))


def in_16_bits(invert: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda A: invert(A.to(dtype)).to(A.dtype)


def doubled(A: Tensor, dtype: torch.dtype) -> Tensor:
    with Products(lambda x, y: Product.apply(x, y, dtype)):
        return doubling(A)


for name, dtype in LOW.items():
    for label, invert in (
        (
            f"diagonal blocks of the triangle inverted in {name}",
            partial(blocks, merge=lambda Y, A, Z: -Z @ A @ Y, own=in_16_bits(eliminated, dtype)),
        ),
        (f"triangle inverted by doubling with operands in {name}", partial(doubled, dtype=dtype)),
        (f"triangle inverted by doubling with operands in {name}", in_16_bits(doubling, dtype)),  # sums, too
        (
            f"inverse of the triangle kept in {name}",
            lambda A, dtype=dtype: in_16_bits(lambda Y: Y, dtype)(eliminated(A)),
        ),
    ):
        mistake(label, SOLVE, DELTA, rounding=True, chunked=True)(
            lambda c, invert=invert: corrected(c, c.C, invert=invert)[:2]
        )


def rounded(c: Call, multiply: Callable) -> tuple[Tensor, Tensor]:
    x = {"state": c.S, "scale": c.s, "dtype": torch.float32}
    return emulated(c.q, c.k, c.v, c.beta, c.g, **x, C=64, mode=Products(multiply))


mistake("products in TF32, which Triton takes for float32 (or float16)", READ, DELTA, rounding=True)(
    partial(rounded, multiply=Low.apply)
)
mistake("operands of products in bfloat16", READ, DELTA, rounding=True)(
    partial(rounded, multiply=lambda x, y: Product.apply(x, y, torch.bfloat16))
)


def kept(c: Call, dtype: torch.dtype, first: bool, last: bool, back: bool) -> tuple[Tensor, Tensor]:
    """States of 16 bits between chunks, also the `first` and the `last` one, and, `back` through them, gradients."""

    def low(S: Tensor) -> Tensor:
        S = S + (S.to(dtype).to(S.dtype) - S).detach()
        return backward(S, lambda d: d.to(dtype).to(d.dtype)) if back else S

    T, S, outs = c.q.shape[1], low(c.S) if first else c.S, []
    for a in range(0, T, c.C):
        o, S = c.cut(a, a + c.C, S=S).run()
        outs.append(o)
        S = low(S) if last or a + c.C < T else S
    return torch.cat(outs, 1) if outs else c.v, S


for name, dtype in LOW.items():
    for (first, last), back in product(ENDS, (False, True)):
        mistake(f"state kept in {name} between chunks", CARRY, DELTA, rounding=True, chunked=True)(
            partial(kept, dtype=dtype, first=first, last=last, back=back)
        )
