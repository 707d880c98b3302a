"""Judges of the exercises on linear attention (chapter 5)."""

from __future__ import annotations

import torch

from gla_ref import linear_attention

from . import exercise
from ._compare import call, draw, expect, hold


@exercise("ex-linear-rank", "predict")
def rank(answer):
    """min(t, K, V) with K = 8, V = 5."""
    expect(
        answer,
        [3, 5, 5],
        [
            ([1, ..., ...], "One token writes a matrix of rank 1. The sum of three has a higher rank."),
            ([5, ..., ...], "Three outer products: no more than rank 3."),
            ([8, ..., ...], "Three outer products: no more than rank 3."),
            ([..., 6, ...], "The state has only V = 5 columns: no rank above 5."),
            ([..., 8, ...], "The state has only V = 5 columns: no rank above 5."),
            ([..., ..., 100], "However many tokens write, 8 by 5 numbers have no rank above 5."),
            ([..., ..., 8], "However many tokens write, 8 by 5 numbers have no rank above 5."),
        ],
        "A sum of t matrices of rank 1, with K rows and V columns: three numbers limit its rank.",
    )


@exercise("ex-linear-capacity", "predict")
def capacity(answer):
    """sqrt((N - 1) / 64) = 1 / 2 at N = 17."""
    expect(
        answer,
        17,
        [
            (16, "Almost: the pair that is asked for does not disturb itself, so N - 1 others do."),
            (33, "The root is missing: (N - 1) / K is the square of the error."),
            (32, "The root is missing: (N - 1) / K is the square of the error."),
            (64, "There the error is nearly 1, as large as the value itself."),
        ],
        "Set the relative error of recall, the root of (N - 1) / K, to 1 / 2 and solve for N.",
    )


@exercise("ex-linear-taylor", "derive")
def taylor(answer):
    """[1, x, x_a x_b / sqrt 2]."""

    def scores(q, k):
        (fq,), (fk,) = call(answer, q), call(answer, k)
        return fq @ fk.T

    def series(constant, linear, quadratic):
        return lambda q, k: constant + linear * q @ k.T + quadratic * (q @ k.T) ** 2

    hold(
        scores,
        [draw(0, (5, 3), (7, 3)), draw(1, (2, 4), (3, 4))],
        series(1, 1, 0.5),
        {
            "The scores are 1 + s + s^2: both sides together must bring the factor 1 / 2.": (series(1, 1, 1)),
            "The scores end in s^2 / 4: the factor is on both sides, 1 / sqrt(2) on each.": (series(1, 1, 0.25)),
            "The constant needs a feature, too: one that is always 1.": (series(0, 1, 0.5)),
            "The linear term is missing: x itself belongs to the features.": series(1, 0, 0.5),
            "The quadratic term is missing: all products of two coordinates belong to the features.": (series(1, 1, 0)),
            "Only squares are there: (q k^T)^2 has products of different coordinates, too.": (
                lambda q, k: 1 + q @ k.T + q**2 @ (k**2).T / 2
            ),
        },
        names=("phi(q) phi(k)^T",),
        axes=("q k",),
    )


@exercise("ex-linear-window", "implement")
def window(answer):
    """Write the newest, take out the one that leaves, then read."""

    def masked(first, last):
        """Scores of the tokens j with first <= t - j <= last."""

        def form(q, k, v, w):
            ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
            return (q @ k.T * ((ago >= first(w)) & (ago <= last(w)))) @ v

        return form

    def steps(leaves):
        def form(q, k, v, w):
            S, rows = k.new_zeros(k.shape[1], v.shape[1]), []
            for t in range(len(q)):
                S = S + torch.outer(k[t], v[t])
                if leaves(t, w):
                    S = S - torch.outer(k[t - w], v[t - w])
                rows.append(q[t] @ S)
            return torch.stack(rows)

        return form

    def right(q, k, v, w):
        q, k, v = (x[None, :, None] for x in (q, k, v))
        last = [slice(max(0, t + 1 - w), t + 1) for t in range(q.shape[1])]
        ends = [linear_attention.recurrent(q[:, n], k[:, n], v[:, n], scale=1.0)[0] for n in last]
        return torch.cat([o[0, -1] for o in ends])

    hold(
        answer,
        [(*draw(w, (7, 3), (7, 3), (7, 2)), w) for w in (3, 1, 9)],
        right,
        {
            "Nothing leaves the window: token t - w has to be taken out of the state.": (
                masked(lambda w: 0, lambda w: 99)
            ),
            "For t < w nothing leaves yet: there t - w is negative, and Python counts from the end.": (
                steps(lambda t, w: t - w >= -7)
            ),
            "The window holds w + 1 tokens: the token itself counts as one of the w.": (
                masked(lambda w: 0, lambda w: w)
            ),
            "The window holds w - 1 tokens: the token itself and w - 1 before it belong to it.": (
                masked(lambda w: 0, lambda w: w - 2)
            ),
            "At t = w the first token (index 0) must leave: it never does.": steps(lambda t, w: t > w),
            "Each token is read before it is written: o_t misses its own k_t, v_t.": (masked(lambda w: 1, lambda w: w)),
            "Each token is read before it is written, and one too few is left in the window.": (
                masked(lambda w: 1, lambda w: w - 1)
            ),
            "There is a factor K^-0.5 in the output; here the scale is 1.": (
                lambda q, k, v, w: right(q, k, v, w) * q.shape[1] ** -0.5
            ),
        },
    )
