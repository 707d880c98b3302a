"""Judges of the exercises on linear attention (chapter 5)."""

import torch

from . import exercise
from ._compare import call, draw, hold, variants
from ._predict import predict

predict(
    "ex-linear-rank",
    ["t = 3", "t = 6", "t = 100"],
    [3, 5, 5],  # min(t, K, V) with K = 8, V = 5
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

predict(
    "ex-linear-capacity",
    "pairs, for the error 1/2",
    17,  # sqrt((N - 1) / 64) = 1 / 2
    [
        (16, "Almost: the pair that is asked for does not disturb itself, so N - 1 others do."),
        (33, "The root is missing: (N - 1) / K is the square of the error."),
        (32, "The root is missing: (N - 1) / K is the square of the error."),
        (64, "There the error is nearly 1, as large as the value itself."),
    ],
    "Set the relative error of recall, the root of (N - 1) / K, to 1 / 2 and solve for N.",
)


def _series(q, k, constant=1.0, linear=1.0, quadratic=0.5):
    return constant + linear * q @ k.T + quadratic * (q @ k.T) ** 2


@exercise("ex-linear-taylor", "derive")
def taylor(answer):
    """[1, x, x_a x_b / sqrt 2]."""

    def scores(q, k):
        (fq,), (fk,) = call(answer, q), call(answer, k)
        return fq @ fk.T

    mistakes = {
        "The scores are 1 + s + s^2: both sides together must bring the factor 1 / 2.": dict(quadratic=1.0),
        "The scores end in s^2 / 4: the factor is on both sides, 1 / sqrt(2) on each.": dict(quadratic=0.25),
        "The constant needs a feature, too: one that is always 1.": dict(constant=0.0),
        "The linear term is missing: x itself belongs to the features.": dict(linear=0.0),
        "The quadratic term is missing: all products of two coordinates belong to the features.": dict(quadratic=0.0),
        "Only squares are there: (q k^T)^2 has products of different coordinates, too.": (
            lambda q, k: 1 + q @ k.T + q**2 @ (k**2).T / 2
        ),
    }
    cases = [draw(0, (5, 3), (7, 3)), draw(1, (2, 4), (3, 4))]
    hold(scores, cases, _series, variants(_series, mistakes), {"phi(q) phi(k)^T": "q k"})


def _window(q, k, v, w, first=0, beyond=0):
    """Token t reads the tokens j with first <= t - j < w + beyond."""
    ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return (q @ k.T * ((ago >= first) & (ago < w + beyond))) @ v


def _steps(q, k, v, w, leaves):
    """Write the newest, take out the one that leaves, then read."""
    S, rows = k.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        S = S + torch.outer(k[t], v[t])
        if leaves(t, w):
            S = S - torch.outer(k[t - w], v[t - w])
        rows.append(q[t] @ S)
    return torch.stack(rows)


@exercise("ex-linear-window", "implement")
def window(answer):
    mistakes = {
        "Nothing leaves the window: token t - w has to be taken out of the state.": dict(beyond=99),
        "For t < w nothing leaves yet: there t - w is negative, and Python counts from the end.": (
            lambda *x: _steps(*x, lambda t, w: t - w >= -7)
        ),
        "The window holds w + 1 tokens: the token itself counts as one of the w.": dict(beyond=1),
        "The window holds w - 1 tokens: the token itself and w - 1 before it belong to it.": dict(beyond=-1),
        "At t = w the first token (index 0) must leave: it never does.": lambda *x: _steps(*x, lambda t, w: t > w),
        "Each token is read before it is written: o_t misses its own k_t, v_t.": dict(first=1, beyond=1),
        "Each token is read before it is written, and one too few is left in the window.": dict(first=1),
        "There is a factor K^-0.5; here the scale is 1.": (lambda q, k, v, w: _window(q, k, v, w) * q.shape[1] ** -0.5),
    }
    cases = [(*draw(w, (7, 3), (7, 3), (7, 2)), w) for w in (3, 1, 9)]
    hold(answer, cases, _window, variants(_window, mistakes))
