"""Judges of the exercises on language models: bits per byte, the reach of a gate, claims (chapter 19b)."""

import math

import torch

from . import exercise
from ._compare import draw, hold
from ._predict import choose


@exercise("ex-text-bits", "derive")
def bits(answer):
    mistakes = {
        "These are nats: take the logarithm to base 2.": lambda p, tokens, size: math.log(p) * tokens / size,
        "These are the bits of a token: the text has more bytes than tokens.": lambda p, tokens, size: math.log2(p),
        "The other way round: multiply by the number of tokens and divide by that of bytes.": (
            lambda p, tokens, size: math.log2(p) * size / tokens
        ),
        "A perplexity is e to the loss: take its logarithm.": lambda p, tokens, size: p * tokens / size,
        "The perplexity is given; its logarithm is the loss.": lambda p, tokens, size: p / math.log(2) * tokens / size,
    }
    right = {"bits per byte": ""}
    hold(answer, [(20.0, 1000, 4000), (12.0, 300, 900)], lambda p, t, s: math.log2(p) * t / s, mistakes, right)


@exercise("ex-text-reach", "derive")
def reach(answer):
    mistakes = {
        "Halvings add up, half-lives do not: take the mean of 1 / open and 1 / closed.": lambda a, b, left: (
            -math.log2(left) * (a + b) / 2
        ),
        "The closed gates act, too: they shorten the reach.": lambda a, b, left: -math.log2(left) * a,
        "Every second gate is open, which is not to be forgotten.": lambda a, b, left: -math.log2(left) * b,
        "A half-life halves: the logarithm is to base 2.": lambda a, b, left: -math.log(left) * 2 / (1 / a + 1 / b),
        "That counts pairs of tokens.": lambda a, b, left: -math.log2(left) / (1 / a + 1 / b),
        "Mind the sign: a share below 1 has a negative logarithm.": lambda a, b, left: (
            math.log2(left) * 2 / (1 / a + 1 / b)
        ),
    }
    cases = [(1000.0, 10.0, 1e-3), (40.0, 7.0, 0.1)]
    hold(answer, cases, lambda a, b, left: -math.log2(left) * 2 / (1 / a + 1 / b), mistakes, {"tokens": ""})


def _passed_on(alpha, u, size, *, cut=0, reset=False, early=False):
    """The state after all tokens, and its gradient for u, cut before token `cut` of every window (None: nowhere)."""
    S, du = torch.zeros((), dtype=u.dtype), torch.zeros_like(u)
    for t in range(len(u)):
        if t % size == cut:
            du, S = torch.zeros_like(du), 0 * S if reset else S
        S, du = alpha[t] * S + u[t], alpha[t] * du
        du[t] = alpha[t] if early else 1.0
    return S, du


@exercise("ex-text-passing", "implement")
def passing(answer):
    mistakes = {
        "The gradient passes the borders of windows: detach the state there.": lambda alpha, u, size: _passed_on(
            alpha, u, size, cut=None
        ),
        "Only the gradient stops at a border: the state itself is passed on.": lambda alpha, u, size: _passed_on(
            alpha, u, size, reset=True
        ),
        "Detach before the first token of a window, not after it.": lambda alpha, u, size: _passed_on(
            alpha, u, size, cut=1
        ),
        "A token's own gate acts before its write: it is not in the gradient of that write.": lambda alpha, u, size: (
            _passed_on(alpha, u, size, early=True)
        ),
    }
    alpha, u = draw(19, (10,), (10,))
    cases = [(alpha.sigmoid(), u, 4), (alpha.sigmoid()[:7], u[:7], 5)]
    hold(answer, cases, _passed_on, mistakes, {"S": "", "gradient": "T"})


choose(
    "ex-text-judge",
    "Sentences that you may write",
    "ad",
    {
        "a": "Three seeds of each, one text, one size: the difference is firm, and the sentence says where.",
        "b": "One size, one text and few steps are not all sizes, texts and steps.",
        "c": "A flat loss says that the long text does no harm. Nothing was asked about its beginning.",
        "d": "The change is many times as large as the scatter of the seeds, and Holm's correction keeps it.",
        "e": "The distance is no more than a hint, and softmax attention had no convolutions.",
    },
)
