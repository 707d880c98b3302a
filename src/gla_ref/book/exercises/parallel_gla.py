"""Judges of the exercises on GLA in parallel (chapter 10)."""

import math
import sys

import torch
from torch.nn import functional as F

from ... import gla
from ...gates import decay_from_start
from . import Wrong, exercise
from ._compare import draw, hold, one_head, reverse_sum, variants
from ._predict import RIGHT, Part, Question, ask, number


def _final(k, v, g):
    return one_head(gla.recurrent, k, k, v, g)[1][0, 0]


@ask("ex-parallel-padding")
def padding():
    """Nothing may be written, by k or by v, and nothing may decay."""

    def read(answer):
        if not isinstance(answer, dict) or set(answer) != set("kvg"):
            raise Wrong("Expected dict(k=..., v=..., g=...), a number for each of the three.")
        return [number(answer[n]) for n in "kvg"]

    zero, reset = (0.0, 0.0), (-math.inf, -math.inf)
    finite, decay = (-sys.float_info.max, sys.float_info.max), (-math.inf, 0.0)
    rules = [
        ((zero, finite, zero), RIGHT),
        ((finite, zero, zero), RIGHT),
        ((finite, finite, zero), "The padding writes: at each of its tokens k^T v is added to the state."),
        ((finite, finite, reset), "A gate of -inf clears the state: all that was written is lost at the first pad."),
        ((finite, finite, decay), "Every token of padding multiplies the state by e^g, less than 1: it fades."),
        ((None, None, None), "k and v have to be finite numbers, and a log gate is at most 0."),
    ]
    numbers = {"0": 0.0, "1": 1.0}
    gates = {"0": 0.0, "−1": -1.0, "−∞": -math.inf}
    return Question([Part("k", numbers), Part("v", numbers), Part("g", gates)], rules, read)


def _anchored(q, k, v, g, at=lambda b: b[-1] / 2, scale=None, cut=torch.tril):
    b = g.cumsum(0)
    r = at(b)
    P = (q * (b - r).exp()) @ (k * (r - b).exp()).T
    return (q.shape[1] ** -0.5 if scale is None else scale) * cut(P) @ v


@exercise("ex-parallel-anchor", "implement")
def anchor(answer):
    mistakes = {
        "scale is forgotten: q is multiplied by K ** -0.5.": dict(scale=1.0),
        "The mask is missing: every token reads all the others.": dict(cut=lambda P: P),
        "The mask is strict: each token must read its own write.": dict(cut=lambda P: P.tril(-1)),
        "The mask is a factor: infinity times 0 is NaN. Select instead, with tril or where.": dict(
            cut=lambda P: P * torch.ones_like(P).tril()
        ),
        "That is the ratio, c = 1: exp(-b) overflows. Subtract r from every exponent.": dict(at=lambda b: 0 * b[-1]),
        "The total is subtracted: q's exponents, b - b_T, are now as large as k's were.": dict(at=lambda b: b[-1]),
        "r is b at the middle token; half of the decay need not be over by then.": dict(at=lambda b: b[len(b) // 2]),
        "r is the same for all channels: each needs half of its own total.": dict(at=lambda b: b[-1].mean() / 2),
    }
    q, k, v, noise = draw(3, (16, 3), (16, 3), (16, 4), (16, 3))
    mild = F.logsigmoid(noise) / 16
    strong = mild.clone()
    strong[12:, 0] -= 325  # 1300 nats, all of them late,
    strong[:4, 1] -= 325  # or early; the last channel stays mild
    first = k * (torch.arange(16) == 0)[:, None]  # no other score is there to overflow in the mask
    cases = [(q, k, v, mild), (q, first, v, strong), (q, k, v, strong)]
    hold(answer, cases, lambda *x: one_head(gla.recurrent, *x)[0], variants(_anchored, mistakes))


@exercise("ex-parallel-final", "implement")
def final(answer):
    def decayed(k, v, g, by):
        return (k * by(g).exp()).T @ v

    mistakes = {
        "No decay: every write is added at full strength.": dict(by=torch.zeros_like),
        "Each write is decayed by its own gate as well: the sum begins after token j.": dict(by=reverse_sum),
        "The sums run from the start; a write still has to pass the gates after it.": dict(by=decay_from_start),
        "b_T - b_j is a difference: after a reset it is -inf - (-inf), NaN.": dict(by=lambda g: g.sum(0) - g.cumsum(0)),
        "roll brings the first gate round to the end: it must be 0.": dict(by=lambda g: reverse_sum(g.roll(-1, 0))),
    }
    k, v, noise = draw(4, (9, 3), (9, 4), (9, 3))
    mild = F.logsigmoid(noise)
    resets = mild.clone()
    resets[4, 1], resets[6] = -torch.inf, -1e3
    hold(answer, [(k, v, mild), (k, v, resets)], _final, variants(decayed, mistakes), {"S": "K V"})
