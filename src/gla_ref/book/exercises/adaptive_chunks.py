"""Judges of the exercises on anchors, levels and the decision between them (chapter 12)."""

import math

import torch
from torch.nn import functional as F

from ...gates import segment_sum
from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, numbers

PAIRS = [(5, 6), (21, 37), (24, 31)]  # (j, i), counted from 0, in a chunk of 64


@ask("ex-adaptive-level")
def level():
    def where(level, border=lambda i, n: i >> n << n):
        return [x for j, i in PAIRS for n in [level(j, i)] for x in (n, border(i, n))]

    def highest(j, i):
        return (i ^ j).bit_length() - 1

    mistakes = [
        (
            where(highest, lambda i, n: i >> (n + 1) << (n + 1)),
            "The levels are right; m is where the second half of the block begins, not the block.",
        ),
        (
            where(highest, lambda i, n: (i >> n << n) - 1),
            "The levels are right; m is the second half's first token, not the first half's last.",
        ),
        (
            where(lambda j, i: highest(j, i) + 1, lambda i, n: i >> (n - 1) << (n - 1)),
            "The borders are right; levels count from 0, where a block has two tokens.",
        ),
        (
            where(lambda j, i: ((i ^ j) & -(i ^ j)).bit_length() - 1),
            "That is the lowest bit in which they differ; at that level they are in different blocks.",
        ),
        (
            where(lambda j, i: (i - j).bit_length() - 1),
            "The distance does not decide: two neighbours may meet at a border of any level.",
        ),
    ]

    names = [f"{j} and {i}: {name}" for j, i in PAIRS for name in ("level", "border m")]
    hint = "The highest bit in which i and j differ is the level; m is i with all lower bits 0."
    return numbers(names, where(highest), mistakes, hint)


@exercise("ex-adaptive-range", "derive")
def anchor(answer):
    mistakes = {
        "That is the chapter's anchor: b begins at b_1, not at 0, so the interval is shorter.": (lambda b: b[-1] / 2),
        "Half of the interval's length is the largest exponent; r is its middle.": (lambda b: (b[-1] - b[0]) / 2),
        "The mean is drawn to where most tokens are; only the two ends matter.": (lambda b: b.mean(0)),
        "b at the middle token: half of the decay need not have happened by then.": (lambda b: b[len(b) // 2]),
        "One anchor for all: a channel has its own interval.": (lambda b: ((b[0] + b[-1]) / 2).mean().expand_as(b[0])),
    }
    (noise,) = draw(7, (9, 3))
    cases = [((-noise.abs()).cumsum(0),)]
    hold(answer, cases, lambda b: (b[0] + b[-1]) / 2, mistakes, {"r": "K"})


def _exact(q, k, g):
    return (q[:, None] * k * segment_sum(g).exp()).sum(-1)


def _scores(q, k, g, mild=lambda g: g.sum(0) >= -80, cut=torch.tril, products=1, levels=1):
    """The two ways added; the options leave something out."""
    mild = mild(g)
    b = g[:, mild].cumsum(0)
    r = b[-1] / 2
    P = cut((q[:, mild] * (b - r).exp()) @ (k[:, mild] * (r - b).exp()).T)
    return products * P + levels * _exact(q[:, ~mild], k[:, ~mild], g[:, ~mild])


@exercise("ex-adaptive-channels", "implement")
def channels(answer):
    mistakes = {
        "One product for all channels overflows: leave the strong ones out of it.": dict(mild=lambda g: g[0] < 1),
        "The strong channels are left out: add their scores, from levels.": dict(levels=0),
        "The mild channels are left out: add their one product.": dict(products=0),
        "The mild product is not masked: select its lower triangle.": dict(cut=lambda P: P),
        "The mild product lacks its diagonal: a token reads its own write in all channels.": dict(
            cut=lambda P: P.tril(-1)
        ),
        "A channel is strong by the sum of its gates, not by one of them.": dict(mild=lambda g: g.min(0).values >= -80),
        "scale is no part of these scores.": lambda q, k, g: q.shape[1] ** -0.5 * _exact(q, k, g),
    }
    q, k, noise = draw(8, (24, 5), (24, 5), (24, 5))
    mild = F.logsigmoid(noise) / 16
    strong = mild.clone()
    strong[13, 1], strong[:, 3] = -torch.inf, -70.0
    hold(answer, [(q, k, mild), (q, k, strong)], _exact, variants(_scores, mistakes), {"P": "T T"})


@ask("ex-adaptive-small")
def small():
    ln2 = math.log(2)
    mistakes = [
        (14 * ln2, "That is the exponent of the query; the chunk decays by twice as much."),
        (2 * 24 * ln2, "2^-24 is the smallest number of all; below 2^-14 digits are already missing."),
        (2 * 16 * ln2, "2^16 is where the large numbers end; the small ones end earlier."),
        (28, "Those are powers of two: a nat is a power of e."),
        (14, "Those are powers of two, and of the query alone; the chunk decays by twice as much, in powers of e."),
        (126 * 2 * ln2, "2^-126 is where float32 and bfloat16 begin to lose digits."),
    ]
    hint = "The last query has the factor e^(b_C / 2); set it to 2^-14."
    return numbers("nats", 2 * 14 * ln2, mistakes, hint, tolerance=0.01)
