"""Judges of the exercises on inverting a triangle (chapter 21)."""

import math

import torch

from ... import triangular
from . import exercise
from ._compare import draw, hold, variants
from ._predict import predict

predict(
    "ex-triangle-pascal",
    ["largest entry of A squared", "largest of its fourth power", "largest of the inverse"],
    [6, 20, 1],
    [
        ([7, 21, ...], "One row of Pascal's triangle too far: from token 1 to token 8 there are 6 tokens between."),
        ([6, 15, ...], "A path of four steps has three stops, so it is 6 over 3."),
        ([6, 20, 20], "The powers cancel in the inverse: each token has replaced the write of the token before."),
        ([1, 1, ...], "A squared adds up over all tokens between the two."),
    ],
    "An entry of the power counts the paths from one token to another in that many steps, each to a later token.",
)


def _largest(C, beta, rows=lambda C: C - 2, steps=lambda C: C // 2 - 1, power=lambda C: C // 2):
    return float(beta) ** power(C) * math.comb(rows(C), steps(C))


@exercise("ex-triangle-largest", "derive")
def largest(answer):
    mistakes = {
        "The strength is missing: every step of a path brings a factor beta.": dict(power=lambda C: 0),
        "The strength is counted once: every one of the C / 2 steps brings a factor beta.": dict(power=lambda C: 1),
        "Between the first token and the last there are C - 2 others, not C.": dict(rows=lambda C: C),
        "C / 2 steps have C / 2 - 1 stops between.": dict(steps=lambda C: C // 2),
        "That is the last power of the series, A^(C - 1); doubling makes A^(C / 2), whose entries are larger.": (
            lambda C, beta: float(beta) ** (C - 1)
        ),
    }
    cases = [(8, 1.0), (16, 0.5), (32, 2.0)]
    hold(answer, cases, _largest, variants(_largest, mistakes), {"entry": ""})


@exercise("ex-triangle-merge", "implement")
def merge(answer):
    def right(Y_1, A_21, Y_2):
        return -Y_2 @ A_21 @ Y_1

    mistakes = {
        "The sign is wrong: the writes of the earlier half are subtracted.": lambda Y_1, A_21, Y_2: Y_2 @ A_21 @ Y_1,
        "The earlier half is missing: its tokens have corrected each other, too.": lambda Y_1, A_21, Y_2: -Y_2 @ A_21,
        "The later half is missing: its tokens correct each other, too.": lambda Y_1, A_21, Y_2: -A_21 @ Y_1,
        "That is A_21 alone: both halves are missing.": lambda Y_1, A_21, Y_2: -A_21,
        "The halves are transposed: use Y_2 and Y_1 as they are.": lambda Y_1, A_21, Y_2: -Y_2.T @ A_21 @ Y_1.T,
        "Those are the triangles, not their inverses.": (
            lambda Y_1, A_21, Y_2: -torch.linalg.inv(Y_2) @ A_21 @ torch.linalg.inv(Y_1)
        ),
    }
    A_1, A_2, A_21 = draw(22, (3, 3), (4, 4), (4, 3))
    Y_1, Y_2 = (triangular.substitution(x.tril(-1)) for x in (A_1, A_2))
    hold(answer, [(Y_1, A_21, Y_2)], right, mistakes, {"block": "T T"})
