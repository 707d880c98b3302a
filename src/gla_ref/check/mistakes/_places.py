"""Mistakes that some sizes, places or values alone meet: late segments, many sequences, wide rows, resets, zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ._calls import Attention, Call, corrected
from ._core import (
    CARRY,
    CHANNELS,
    DECAY,
    DELTA,
    EVERY,
    GATES,
    GRADIENT,
    PACK,
    READ,
    SOFTMAX,
    STATES,
    WRITE,
    Misread,
    backward,
    contiguous,
    gradient,
    mistake,
    simple,
)
from ._delta import HEADS, SOLVE, eye, inverted
from ._linear import decay
from ._softmax import MASK, OUT, PACKED

SEGMENTS = (256, 512, 1024, 2048)
WIDTHS = (16, 32, 64, 128)
TILES = (*WIDTHS, 48, 80, 96, 160, 240)


# -- long sequences ------------------------------------------------------------------------------
for n in SEGMENTS:

    @mistake(f"gradient stops between segments of {n} tokens", CARRY)
    def _(c, n=n):
        return replace(c, C=n).chunks(lambda c, o, S: (o, S.detach() if c.q.shape[1] == n else S))

    @mistake(f"state lost between segments of {n} tokens", CARRY)
    def _(c, n=n):
        if c.q.shape[1] <= n:
            return c.run()
        first, S = c.cut(0, n).run()
        rest, S = replace(c, C=n).cut(n, None).chunks(lambda c, o, S: c.run(S=torch.zeros_like(c.S)))
        return torch.cat([first, rest], 1), S


for n in (64, 128, *SEGMENTS):

    @mistake(f"keys {n} or more tokens back not seen", MASK, SOFTMAX)
    def _(c, n=n):
        x = c.scores()
        far = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(x.shape[-1] - x.shape[-2] - n)
        return c.weigh(x.masked_fill(far, -torch.inf).softmax(-1))

    @mistake(f"keys beyond the first {n} not seen", MASK, SOFTMAX)
    def _(c, n=n):
        x = c.scores()
        beyond = torch.arange(x.shape[-1], device=x.device) >= n
        return c.weigh(x.masked_fill(beyond, -torch.inf).softmax(-1).nan_to_num(0.0))


for n in TILES:

    @mistake("last key lost where a tile of keys would hold that key alone", MASK, SOFTMAX)
    def _(c, n=n):
        x = c.scores()
        keys = x.shape[-1]
        lost = (torch.arange(keys, device=x.device) == keys - 1) & (keys % n == 1) & (keys > 1)
        return c.weigh(x.masked_fill(lost, -torch.inf).softmax(-1).nan_to_num(0.0))


for n in (1024, 2048, 4096, 8192):

    @mistake(f"strengths kept in a buffer of {n} numbers, which those of later tokens overwrite", WRITE, DELTA)
    def _(c, n=n):
        beta = c.beta.flatten(1)
        i, last = torch.arange(beta.shape[1], device=beta.device) % n, beta.shape[1] - 1
        return c.run(beta=beta[:, i + (last - i) // n * n].view_as(c.beta))


# -- wide rows -----------------------------------------------------------------------------------
def turned(x: Tensor, n: int, axis: int = -1) -> Tensor:
    """x with the channels beyond the first n replaced by those of the first n, over and over."""
    return x.index_select(axis, torch.arange(x.shape[axis], device=x.device) % n)


for n in WIDTHS:
    for t, mechanisms in (("q", EVERY), ("k", STATES), ("v", STATES), ("g", CHANNELS)):
        simple(
            f"channels of {t} beyond the first {n} are those of channel c mod {n}",
            READ if t == "q" else WRITE,
            lambda c, t=t, n=n: {t: turned(getattr(c, t), n)},
            mechanisms,
        )
    for t, axis in (("rows", -2), ("columns", -1)):
        simple(
            f"{t} of the initial state beyond the first {n} are those of the first {n}",
            PACK,
            lambda c, axis=axis, n=n: {"S": turned(c.S, n, axis)},
        )


for n in (16, 32, 64):
    name = f"columns of v masked like those of k: beyond K, rounded up to {n}, they are 0"

    def kept(c: Call | Attention, n: int = n) -> Tensor:
        return torch.arange(c.v.shape[-1], device=c.v.device) < -(-c.q.shape[-1] // n) * n

    simple(name, WRITE, lambda c, kept=kept: {"v": c.v * kept(c)})

    @mistake(name, OUT, SOFTMAX)
    def _(c, kept=kept):  # the cache holds all columns
        o, cache = c.run()
        return o * kept(c), cache


# -- initial and final states --------------------------------------------------------------------
@mistake("final state without the last chunk", "S_T", chunked=True)
def _(c):  # its gradient, too
    return c.run()[0], c.cut(0, (c.q.shape[1] - 1) // c.C * c.C).run()[1]


for n in TILES:

    @mistake("final state without the last chunk where that is whole", "S_T")
    def _(c, n=n):
        T = c.q.shape[1]
        o, S = c.run()
        return o, c.cut(0, T - n).run()[1] if T and T % n == 0 else S


@mistake("final state not decayed through the last chunk", "S_T", GATES, chunked=True)
def _(c):
    T = c.q.shape[1]
    if not T:
        return c.run()
    o, S = c.run()
    last = (T - 1) // c.C * c.C
    before = c.cut(0, last).run()[1]
    return o, S + (1 - decay(c.g[:, last:])) * before


simple(
    "first gate of a sequence left out: the initial state is not decayed by it",
    DECAY,
    lambda c: {"g": torch.cat([torch.zeros_like(c.g[:, :1]), c.g[:, 1:]], 1)},
    GATES,
)


@mistake("first gate of a chunk left out: the state before it is not decayed by it", DECAY, GATES, chunked=True)
def _(c):
    def turn(c, o, S):
        return c.run(g=torch.cat([torch.zeros_like(c.g[:, :1]), c.g[:, 1:]], 1))

    return c.chunks(turn)


for part, name in ((2, "first half"), (4, "first quarter")):

    @mistake(f"state decayed by the {name} of a chunk only", CARRY, GATES, chunked=True)
    def _(c, part=part):
        return c.chunks(lambda c, o, S: (o, S + (decay(c.g[:, : max(1, c.C // part)]) - decay(c.g)) * c.S))


# -- resets --------------------------------------------------------------------------------------
@mistake("what comes after a reset in its chunk is lost", DECAY, GATES, chunked=True)
def _(c):
    def turn(c, o, S):
        after = c.g.cumsum(1).isneginf()
        return c.run(q=c.q.masked_fill(after, 0.0), k=c.k.masked_fill(after, 0.0))

    return c.chunks(turn)


# -- packed sequences ----------------------------------------------------------------------------
def fewer(ends: list[int], n: int) -> list[int]:
    """The first n boundaries, and the last: from sequence n - 1 on all are one."""
    return [*ends[:n], ends[-1]] if len(ends) > n + 1 else ends


for n in (2, 4, 8, 16, 32, 64):
    name = f"boundaries of packed sequences beyond the first {n} ignored: the later ones are one"

    @mistake(name, PACKED, SOFTMAX, whole=True)
    def _(c, ends, n=n):
        return c.each(None if ends is None else fewer(ends, n))

    @mistake(name, PACK, whole=True)
    def _(c, ends, n=n):
        if ends is None or fewer(ends, n) == ends:
            return c.each(ends)
        o, S = replace(c, S=c.S[:n]).each(fewer(ends, n))
        return o, torch.cat([S, S[-1:].expand(len(ends) - 1 - n, *S.shape[1:])])


def leaking(name: str, leak: Callable[[Tensor], Tensor]) -> None:
    """Sequences that begin with the final state of the one before, added; at every boundary, or at those of chunks."""
    for where in ("", ", at multiples of a chunk"):

        @mistake(f"{name}{where}", PACK if "state" in name else GRADIENT, whole=True, chunked=bool(where))
        def _(c, ends, where=where):
            if ends is None:
                return c.each(ends)
            outs, finals, S = [], [], torch.zeros_like(c.S[:1])
            for n, (a, b) in enumerate(pairwise(ends)):
                passes = n and (not where or a % c.C == 0)
                o, S = c.cut(a, b, S=c.S[n : n + 1] + leak(S) if passes else c.S[n : n + 1]).wide.run()
                outs.append(o)
                finals.append(S)
            return torch.cat(outs, 1), torch.cat(finals)


leaking("gradient of the state flows into the packed sequence before", lambda S: S - S.detach())
leaking("state not cleared where a packed sequence begins: it is added to the initial one", lambda S: S)


# -- gradients -----------------------------------------------------------------------------------
for t, mechanisms in (("q", EVERY), ("k", EVERY), ("v", EVERY), ("g", GATES), ("beta", DELTA)):
    gradient(f"d{t} is 0: it is never written", t, lambda d, c: 0 * d.nan_to_num(), mechanisms)
gradient("gradient of beta divided by beta: NaN where it is 0", "beta", lambda d, c: d * (c.beta / c.beta), DELTA)
gradient("gate's gradient divided by the gate: NaN where it is 0 or -inf", "g", lambda d, c: d * (c.g / c.g), GATES)
gradient(
    "gate's gradient divided by the decay: NaN where that is 0", "g", lambda d, c: d * (c.g.exp() / c.g.exp()), GATES
)


@mistake("chunks whose do is 0 skipped in the backward pass: their dk, dv, ... are 0", GRADIENT, chunked=True)
def _(c):
    def turn(c, o, S):
        reached = []

        def seen(d: Tensor) -> Tensor:
            reached.append(bool(d.any()))
            return d

        own = {n: backward(x, lambda d: d if any(reached) else torch.zeros_like(d)) for n, x in c.tokens.items()}
        o, S = c.run(**own)
        return backward(o, seen), S

    return c.chunks(turn)


@mistake("tokens whose do is 0 skipped in the backward pass: their dk, dv, ... are 0", GRADIENT, EVERY)
def _(c):
    reached = []

    def seen(d: Tensor) -> Tensor:
        reached.append((d != 0).any(-1, keepdim=True).any(2, keepdim=True))
        return d

    def kept(d: Tensor) -> Tensor:
        some = reached[0] if reached else torch.zeros_like(d[:, :, :1, :1], dtype=torch.bool)
        return d * (some if d.ndim == 4 else some[..., 0])

    o, state = c.run(**{n: backward(x, kept) for n, x in c.tokens.items()})
    return backward(o, seen), state


@mistake("gate's gradient without S_T dS_T, with which its reverse sum begins", GRADIENT, GATES)
def _(c):
    pulled: list[Tensor] = []

    def note(d: Tensor) -> Tensor:
        pulled.append(d)
        return d

    def change(d: Tensor) -> Tensor:
        return d - (S.detach() * pulled[0]).sum(-1)[:, None] if pulled else d

    o, S = c.run(g=backward(c.g, change))
    return o, backward(S, note)


def of_some(x: Tensor, HV: int, n: int) -> Tensor:
    """Key heads for their value heads, of which the first n alone give a gradient."""
    some = (torch.arange(HV, device=x.device) % (HV // x.shape[2]) < n)[:, None]
    repeated = x.repeat_interleave(HV // x.shape[2], 2)
    return torch.where(some, repeated, repeated.detach())


for n, several in ((1, "value head"), (2, "two value heads"), (3, "three value heads"), (4, "four value heads")):
    for names in ("q", "k", "qk"):
        which = " and ".join(f"d{t}" for t in names)

        @mistake(f"{which} of a key head's first {several} only", HEADS, DELTA, whole=True)
        def _(c, ends, n=n, names=names):
            some = {t: of_some(getattr(c, t), c.v.shape[2], n) for t in names}
            return replace(c, **{"q": c.wide.q, "k": c.wide.k} | some).each(ends)


# -- the triangle --------------------------------------------------------------------------------
def by_powers(A: Tensor, last: int) -> Tensor:
    """The sum of (-A)^n up to n = last, one less than a power of two, by doubling."""
    Y, P, n = eye(A) - A, A @ A, 1
    while n < last:
        Y, P, n = Y @ (eye(A) + P), P @ P, 2 * n + 1
    return Y


for last in (3, 7, 15, 31, 63):
    inverted(f"triangle inverted by its powers up to A^{last} only", partial(by_powers, last=last))
    # powers of keys that are alike cancel, and round: how many are left out cannot be told then
    mistake(
        "triangle inverted by a sum of its powers, which cancel: too few of them, or rounded too early",
        SOLVE,
        DELTA,
        rounding=True,
        chunked=True,
    )(lambda c, last=last: corrected(c, c.C, invert=partial(by_powers, last=last))[:2])


# -- memory --------------------------------------------------------------------------------------
def misread(x: Tensor) -> Tensor:
    return Misread.apply(x, contiguous(x))


class MisreadGradient(torch.autograd.Function):
    """x, whose gradient is read as if it were contiguous."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return d.as_strided(d.shape, contiguous(d), d.storage_offset()).nan_to_num().clone()


def strideless(t: str, line: str, mechanisms: tuple[str, ...], **change: Callable) -> None:
    """A call that is right but for memory read with the strides of a contiguous tensor."""
    more = {"whole": True, "astray": True} | change
    mistake(f"strides ignored: {t} read as if contiguous", line, mechanisms, **more)(lambda c, ends: c.each(ends))


for t, mechanisms in (
    ("g", tuple(m for m in GATES if m not in CHANNELS)),
    ("beta", DELTA),
    ("S0", STATES),
    ("k", SOFTMAX),
    ("v", SOFTMAX),
):
    strideless(t, READ, mechanisms, before=lambda x, t=t: x | ({t: misread(x[t])} if t in x else {}))
strideless("do", GRADIENT, EVERY, after=lambda o, state: (MisreadGradient.apply(o), state))
strideless("dS", GRADIENT, STATES, after=lambda o, S: (o, MisreadGradient.apply(S)))
