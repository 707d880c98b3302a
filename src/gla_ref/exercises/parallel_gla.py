"""Judges of the exercises on GLA in parallel (chapter 10)."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from .. import gla
from . import Wrong, exercise
from ._compare import close, draw, hold, number


def _final(k, v, g):
    one = [x[None, :, None] for x in (k, k, v, g)]
    return gla.recurrent(*one)[1][0, 0]


@exercise("ex-parallel-padding", "predict")
def padding(answer):
    if not isinstance(answer, dict) or set(answer) != set("kvg"):
        raise Wrong("Expected dict(k=..., v=..., g=...), a number for each of the three.")
    key, value, gate = (number(answer[n]) for n in "kvg")
    if math.isnan(gate) or not math.isfinite(key + value) or gate > 0:
        raise Wrong("k and v have to be finite numbers, and a log gate is at most 0.")
    k, v, g = draw(0, (5, 3), (5, 4), (5, 3))
    tokens = k, v, -g.abs()
    pads = zip(tokens, (key, value, gate), strict=True)
    if close(_final(*(F.pad(x, (0, 0, 0, 3), value=n) for x, n in pads)), _final(*tokens)):
        return
    if gate == -math.inf:
        raise Wrong("A gate of -inf clears the state: all that was written is lost at the first pad.")
    if gate < 0:
        factor = f"exp({gate:g}) = {math.exp(gate):.3g}"
        raise Wrong(f"Every token of padding multiplies the state by {factor}: it fades.")
    raise Wrong("The padding writes: at each of its tokens k^T v is added to the state.")


def _from_state(q, b, d, S, rows=1.0, columns=1.0):
    return ((q * b.exp()) @ S) * d.exp(), (rows * b[-1, :, None] + columns * d[-1]).exp() * S


@exercise("ex-parallel-two-sided", "derive")
def two_sided(answer):
    def at_end(q, b, d, S):
        return q @ _from_state(q, b, d, S)[1], _from_state(q, b, d, S)[1]

    mistakes = {
        "The gate on the values is missing in both: exp(d) belongs to the columns of S_0.": (
            lambda q, b, d, S: _from_state(q, b, 0 * d, S)
        ),
        "o is right; the columns of the final state have decayed as well, by exp(d_T).": (
            lambda *x: _from_state(*x, columns=0.0)
        ),
        "o is right; the rows of the final state have decayed as well, by exp(b_T).": (
            lambda *x: _from_state(*x, rows=0.0)
        ),
        "exp(-d) divides, as for values on their way in; but S_0 was there before every gate.": (
            lambda q, b, d, S: _from_state(q, b, -d, S, columns=-1.0)
        ),
        "Every token reads the final state; token i has only passed the gates up to i.": at_end,
        "b and d are sums of logarithms: the factors are their exponentials.": (
            lambda q, b, d, S: (((q * b) @ S) * d, b[-1, :, None] * d[-1] * S)
        ),
    }
    q, g, g_v, S = draw(2, (6, 3), (6, 3), (6, 4), (3, 4))
    case = q, (-g.abs()).cumsum(0), (-g_v.abs()).cumsum(0), S
    hold(answer, [case], _from_state, mistakes, ("o", "S"), ("T V", "K V"))


def _anchored(q, k, v, g, at=lambda b: b[-1] / 2, scale=None, cut=torch.tril):
    b = g.cumsum(0)
    r = at(b)
    P = (q * (b - r).exp()) @ (k * (r - b).exp()).T
    return (q.shape[1] ** -0.5 if scale is None else scale) * cut(P) @ v


@exercise("ex-parallel-anchor", "implement")
def anchor(answer):
    def right(*head):
        return gla.recurrent(*(x[None, :, None] for x in head))[0][0, :, 0]

    mistakes = {
        "scale is forgotten: q is multiplied by K ** -0.5.": lambda *x: _anchored(*x, scale=1.0),
        "The mask is missing: every token reads all the others.": (lambda *x: _anchored(*x, cut=lambda P: P)),
        "The mask is strict: each token must read its own write.": (lambda *x: _anchored(*x, cut=lambda P: P.tril(-1))),
        "The mask is a factor: infinity times 0 is NaN. Select instead, with tril or where.": (
            lambda *x: _anchored(*x, cut=lambda P: P * torch.ones_like(P).tril())
        ),
        "That is the ratio form, c = 1: exp(-b) overflows. Subtract r from every exponent.": (
            lambda *x: _anchored(*x, at=lambda b: 0 * b[-1])
        ),
        "The whole total is subtracted: q's exponents, b - b_T, are now as large as k's were.": (
            lambda *x: _anchored(*x, at=lambda b: b[-1])
        ),
        "r is b at the middle token; half of the decay need not have happened by then.": (
            lambda *x: _anchored(*x, at=lambda b: b[len(b) // 2])
        ),
        "r is the same for all channels: each needs half of its own total.": (
            lambda *x: _anchored(*x, at=lambda b: b[-1].mean() / 2)
        ),
    }
    q, k, v, noise = draw(3, (16, 3), (16, 3), (16, 4), (16, 3))
    mild = F.logsigmoid(noise) / 16
    strong = mild.clone()
    strong[12:, 0] -= 325  # 1300 nats, all of them late,
    strong[:4, 1] -= 325  # or early; the last channel stays mild
    first = k * (torch.arange(16) == 0)[:, None]  # no other score is there to overflow in the mask
    cases = [(q, k, v, mild), (q, first, v, strong), (q, k, v, strong)]
    hold(answer, cases, right, mistakes)


@exercise("ex-parallel-final", "implement")
def final(answer):
    def reverse(g):
        return g.flip(0).cumsum(0).flip(0)

    mistakes = {
        "No decay: every write is added at full strength.": lambda k, v, g: k.T @ v,
        "Each write is decayed by its own gate as well: the sum begins after token j.": (
            lambda k, v, g: (k * reverse(g).exp()).T @ v
        ),
        "The sums run from the start; a write still has to pass the gates that come after it.": (
            lambda k, v, g: (k * g.cumsum(0).exp()).T @ v
        ),
        "b_T - b_j is a difference: after a reset it is -inf - (-inf), NaN.": (
            lambda k, v, g: (k * (g.sum(0) - g.cumsum(0)).exp()).T @ v
        ),
        "roll brings the first token's gate round to the last: token T must get 0.": (
            lambda k, v, g: (k * reverse(g.roll(-1, 0)).exp()).T @ v
        ),
    }
    k, v, noise = draw(4, (9, 3), (9, 4), (9, 3))
    mild = F.logsigmoid(noise)
    resets = mild.clone()
    resets[4, 1], resets[6] = -torch.inf, -1e3
    hold(answer, [(k, v, mild), (k, v, resets)], _final, mistakes, ("S",), ("K V",))
