"""Judges of the exercises on gates and decay (chapter 9)."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from .. import gla, simple_gla
from . import Wrong, exercise
from ._compare import draw, expect, hold


def _seen(first: set[int], second: set[int], own: bool = True) -> list[list[int]]:
    """Which writes reach o_1 .. o_4 through two channels that are reset at the given tokens."""
    g = torch.zeros(1, 4, 1, 2, dtype=torch.float64)
    for channel, tokens in enumerate((first, second)):
        for t in tokens:
            g[0, t - 1, 0, channel] = -torch.inf
    q, v = torch.ones_like(g), torch.eye(4, dtype=torch.float64)[None, :, None]
    k = q if own else g.exp()  # where a reset also clears the write of its own token
    o, _ = gla.recurrent(q, k, v, g)
    return [[j + 1 for j in range(4) if row[j] > 0] for row in o[0, :, 0]]


@exercise("ex-gates-reset", "predict")
def reset(answer):
    groups = isinstance(answer, (list, tuple)) and len(answer) == 4
    if not groups or not all(isinstance(x, (list, tuple, set)) for x in answer):
        raise Wrong("Expected a list of four lists of tokens, such as [[1], [1, 2], [3], [4]].")
    mistakes = [
        (
            _seen({2}, {4}, own=False),
            "A reset clears what was there before; then the token writes. Its own value stays.",
        ),
        (_seen({2, 4}, {2, 4}), "A reset of one channel leaves the other as it is, with all that was written there."),
        (_seen(set(), set()), "Nothing is forgotten in this list: what do the resets clear?"),
    ]
    hint = (
        "Follow each channel by itself: a reset empties it, then every token writes to it. "
        "A value reaches an output if at least one channel still holds it."
    )
    expect([sorted(x) for x in answer], _seen({2}, {4}), mistakes, hint)


@exercise("ex-gates-bias", "derive")
def bias(answer):
    def from_power(x):
        return -math.log(math.expm1(x * math.log(2)))

    mistakes = {
        "The sign is turned round: this gate forgets where it should keep.": (lambda h, tau: -from_power(tau / h)),
        "After h tokens this gate has decayed to 1/e, not to 1/2: ln 2 is missing.": (
            lambda h, tau: from_power(tau / h / math.log(2))
        ),
        "tau is missing: it divides the log gate.": lambda h, tau: from_power(1 / h),
        "tau is on the wrong side: softplus(-y) / tau = ln 2 / h.": (lambda h, tau: from_power(1 / h / tau)),
        "That is softplus(-y) = exp(-y), true for long half-lives only; solve it exactly.": (
            lambda h, tau: -math.log(tau * math.log(2) / h)
        ),
    }
    cases = [(256.0, 1.0), (256.0, 16.0), (5.0, 4.0)]
    hold(answer, cases, lambda h, tau: from_power(tau / h), mistakes, ("bias",), ("",))


def _retention(q, k, v, gamma, shift=0, scale=None, cut=torch.tril):
    T = len(q)
    D = cut(gamma ** (torch.arange(T)[:, None] - torch.arange(T) + shift).double())
    return (q.shape[1] ** -0.5 if scale is None else scale) * ((q @ k.T) * D) @ v


@exercise("ex-gates-retention", "implement")
def retention(answer):
    def right(q, k, v, gamma):
        g = torch.full((1, len(q), 1), math.log(gamma), dtype=q.dtype)
        return simple_gla.recurrent(*(x[None, :, None] for x in (q, k, v)), g)[0][0, :, 0]

    mistakes = {
        "scale is forgotten: every form of the book multiplies q by K ** -0.5.": (lambda *x: _retention(*x, scale=1.0)),
        "The mask is missing: above the diagonal D is 0, not a negative power of gamma.": (
            lambda *x: _retention(*x, cut=lambda D: D)
        ),
        "Each token misses its own write: the diagonal of D is gamma ** 0 = 1.": (
            lambda *x: _retention(*x, cut=lambda D: D.tril(-1))
        ),
        "The token's own gate is counted: a write passes the gates after it, i - j of them.": (
            lambda *x: _retention(*x, shift=1)
        ),
        "The power is upside down: gamma ** (j - i) grows with the distance.": (
            lambda q, k, v, gamma: _retention(q, k, v, 1 / gamma)
        ),
        "There is no decay in it: D is not the mask of ones, but gamma ** (i - j).": (
            lambda q, k, v, gamma: _retention(q, k, v, 1.0)
        ),
    }
    hold(answer, [(*draw(0, (7, 3), (7, 3), (7, 4)), 0.9)], right, mistakes)


def _convolved(k, v, gamma, *, powers=lambda t: t, lags=lambda t: t, size=2, first="k"):
    """Sum over j of gamma^(power of i - j) k_j^T v_j for lags i - j of 0 and more, in a circle of size * T tokens."""
    T, (a, b) = len(k), (k, v) if first == "k" else (v, k)
    x = a[:, :, None] * b[:, None, :]
    circle = torch.zeros(size * T, dtype=k.dtype)
    t = torch.arange(T)
    circle[lags(t) % (size * T)] = gamma ** powers(t).to(k.dtype)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    return torch.einsum("ij,jab->iab", circle[(i - j) % (size * T)], x)


@exercise("ex-gates-convolution", "implement")
def convolution(answer):
    def right(k, v, gamma):
        S = [k.new_zeros(k.shape[1], v.shape[1])]
        for k_t, v_t in zip(k, v, strict=True):
            S.append(gamma * S[-1] + torch.outer(k_t, v_t))
        return torch.stack(S[1:])

    mistakes = {
        "The end comes round to the beginning: a product of FFTs of T points is a circular convolution. "
        "Fill up with zeros to 2 T, and keep the first T.": lambda *x: _convolved(*x, size=1),
        "Each write is decayed by its own gate as well: the powers begin with gamma ** 0 = 1.": (
            lambda *x: _convolved(*x, powers=lambda t: t + 1)
        ),
        "The filter is the wrong way round: its first entry, for the token's own write, is gamma ** 0 = 1.": (
            lambda k, v, gamma: _convolved(k, v, gamma, powers=lambda t: len(k) - 1 - t)
        ),
        "Time runs backwards: each state holds the writes that come after it.": (
            lambda *x: _convolved(*x, lags=lambda t: -t)
        ),
        "There is no decay in it: that is a running sum. The filter is gamma ** 0, gamma ** 1, ...": (
            lambda k, v, gamma: _convolved(k, v, 1.0)
        ),
        "Each token misses its own write: the filter begins with gamma ** 0 = 1, at a distance of 0.": (
            lambda *x: _convolved(*x, lags=lambda t: t + 1)
        ),
        "Those are writes v_t^T k_t; the state has a row for each channel of k.": (
            lambda *x: _convolved(*x, first="v")
        ),
    }
    hold(answer, [(*draw(4, (7, 3), (7, 4)), 0.9)], right, mistakes, ("S",), ("T K V",))


@exercise("ex-gates-order", "implement")
def order(answer):
    def right(q, k, v, g):
        (B, T, H, K), V = q.shape, v.shape[-1]
        S, rows = k.new_zeros(B, H, K, V), []
        for t in range(T):
            S = g[:, t, ..., None].exp() * (S + k[:, t, ..., None] * v[:, t, :, None])
            rows.append(K**-0.5 * (q[:, t, ..., None] * S).sum(-2))
        return torch.stack(rows, 1), S

    def shifted(g):
        return F.pad(g, (0, 0, 0, 0, 1, 0))[:, :-1]

    mistakes = {
        "That is gate before write: a token's own write must feel its own gate as well.": (
            lambda q, k, v, g: gla.recurrent(q, k, v, g)
        ),
        "Dividing k by its gate goes the other way: each write here feels one gate more.": (
            lambda q, k, v, g: gla.recurrent(q, k / g.exp(), v, g)
        ),
        "The gate went to q: older writes then feel the reader's gate twice.": (
            lambda q, k, v, g: gla.recurrent(q * g.exp(), k, v, g)
        ),
        "Shifting the gates by a token takes the reader's own gate off the state.": (
            lambda q, k, v, g: gla.recurrent(q, k, v, shifted(g))
        ),
        "g is a logarithm: the factor of k is exp(g).": (lambda q, k, v, g: gla.recurrent(q, k * g, v, g)),
    }
    key, value = (2, 7, 2, 3), (2, 7, 2, 4)
    q, k, v, noise = draw(1, key, key, value, key)
    mild = F.logsigmoid(noise)
    resets = mild.clone()
    resets[:, 3, :, 1] = resets[0, 5] = -torch.inf
    cases = [(q, k, v, mild), (q, k, v, resets)]
    hold(answer, cases, right, mistakes, ("o", "S"), ("B T H V", "B H K V"))
