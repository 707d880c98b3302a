"""Judges of the exercises on language models: bits per byte, loudness, the reach of a gate (chapter 19)."""

import math

import torch
from torch.nn import functional as F

from . import exercise
from ._compare import draw, hold, variants
from ._predict import choose


def _bits(losses, sizes, sources, base=2.0):
    """Bits per byte of each source, and of the whole."""
    bits, groups = losses / math.log(base), [sources == n for n in range(int(sources.max()) + 1)]
    return torch.stack([bits[x].sum() / sizes[x].sum() for x in groups]), bits.sum() / sizes.sum()


def _mean_of_ratios(losses, sizes, sources):
    ratios = losses / math.log(2) / sizes
    return torch.stack([ratios[sources == n].mean() for n in range(int(sources.max()) + 1)]), ratios.mean()


@exercise("ex-text-bits", "implement")
def bits(answer):
    mistakes = {
        "These are nats: take the logarithm to base 2.": dict(base=math.e),
        "These are the bits of a token: divide by bytes.": (
            lambda losses, sizes, sources: _bits(losses, sizes / sizes, sources)
        ),
        "A mean over tokens counts short tokens too much: sum the bits, sum the bytes, and divide at the end.": (
            _mean_of_ratios
        ),
        "A mean over the sources counts a short source as much as a long one.": lambda *x: (
            _bits(*x)[0],
            _bits(*x)[0].mean(),
        ),
    }
    cases = []
    for seed, sources in ((1, [0, 0, 1, 1, 1, 0]), (2, [2, 0, 1, 1, 0])):
        (losses,) = draw(seed, (len(sources),))
        sizes = torch.tensor([4.0, 1.0, 3.0, 6.0, 2.0, 5.0], dtype=torch.float64)[: len(sources)]
        cases.append((losses.exp(), sizes, torch.tensor(sources)))
    hold(answer, cases, _bits, variants(_bits, mistakes), {"each": "S", "whole": ""})


@exercise("ex-text-stream", "derive")
def stream(answer):
    mistakes = {
        "That is the variance; take its root.": lambda parts, left: (1 / left - 1) / parts,
        "Variances add up, standard deviations do not: divide by the number of parts below the root.": (
            lambda parts, left: math.sqrt(1 / left - 1) / parts
        ),
        "All parts add to the stream, not one.": lambda parts, left: math.sqrt(1 / left - 1),
        "The embedding's variance is 1, and so more than its share: divide by it.": lambda parts, left: math.sqrt(
            (1 - left) / parts
        ),
        "The other way round: the less is left, the louder a part may be.": lambda parts, left: math.sqrt(
            1 / (1 / left - 1) / parts
        ),
        "The share is one of the variance, not of the standard deviation.": lambda parts, left: math.sqrt(
            (1 / left**2 - 1) / parts
        ),
    }
    hold(answer, [(14, 0.2), (6, 0.7)], lambda parts, left: math.sqrt((1 / left - 1) / parts), mistakes, {"sigma": ""})


choose(
    "ex-text-loud",
    "Models that start loud",
    "bd",
    {
        "a": "Convolutions make the heads' outputs small, and this epsilon holds them down.",
        "b": "Without convolutions the heads' outputs are well above the root of the epsilon.",
        "c": "The step size makes the heads' outputs so small that even this epsilon holds them down.",
        "d": "This epsilon holds nothing down: the norm lifts every head to 1.",
        "e": "Softmax attention is loud with the usual W_O, and this one is fifty times smaller.",
    },
)


@exercise("ex-far-reach", "derive")
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


def _model(tokens):
    """Logits `[rows, n, 5]` of a model that counts the tokens up to each place, later ones more."""
    one_hot = F.one_hot(tokens, 5).double()
    weights = torch.arange(1.0, tokens.shape[1] + 1, dtype=torch.float64)
    return (weights[:, None] * one_hot).cumsum(1).sin()


def _cut(logits_of, text, n, *, first=0, base=2.0):
    """Bits for the tokens from place n on, each from the n tokens before it; `first` shifts the tokens that count."""
    logits = logits_of(text.unfold(0, n, 1)[:-1])[:, -1]
    return F.cross_entropy(logits, text[n + first : len(text) + first], reduction="none") / math.log(base)


@exercise("ex-far-cut", "implement")
def cutting(answer):
    mistakes = {
        "These tokens are guessed from all tokens before them: give each a window of its own.": lambda f, text, n: (
            F.cross_entropy(f(text[None])[0, n - 1 : -1], text[n:], reduction="none") / math.log(2)
        ),
        "The last token of a window is known: score the one after it.": dict(first=-1),
        "These are nats: take the logarithm to base 2.": dict(base=math.e),
        "Only the last logits of a window have seen n tokens, not the first.": lambda f, text, n: (
            F.cross_entropy(f(text.unfold(0, n, 1)[:-1])[:, 0], text[n:], reduction="none") / math.log(2)
        ),
    }
    text = torch.tensor([0, 3, 1, 1, 4, 2, 0, 1, 3, 3, 2, 4])
    hold(answer, [(_model, text, 3), (_model, text, 4)], _cut, variants(_cut, mistakes), {"bits": "T"})


def _passed_on(alpha, u, size, *, cut=0, reset=False, early=False):
    """The state after all tokens, and its gradient for u, cut before token `cut` of every window (None: nowhere)."""
    S, du = torch.zeros((), dtype=u.dtype), torch.zeros_like(u)
    for t in range(len(u)):
        if t % size == cut:
            du, S = torch.zeros_like(du), 0 * S if reset else S
        S, du = alpha[t] * S + u[t], alpha[t] * du
        du[t] = alpha[t] if early else 1.0
    return S, du


@exercise("ex-far-passing", "implement")
def passing(answer):
    mistakes = {
        "The gradient passes the borders of windows: detach the state there.": dict(cut=None),
        "Only the gradient stops at a border: the state itself is passed on.": dict(reset=True),
        "Detach before the first token of a window, not after it.": dict(cut=1),
        "A token's own gate acts before its write: it is not in the gradient of that write.": dict(early=True),
    }
    alpha, u = draw(19, (10,), (10,))
    cases = [(alpha.sigmoid(), u, 4), (alpha.sigmoid()[:7], u[:7], 5)]
    hold(answer, cases, _passed_on, variants(_passed_on, mistakes), {"S": "", "gradient": "T"})


choose(
    "ex-text-judge",
    "Sentences that you may write",
    "ad",
    {
        "a": "Three seeds of each, one text, two sizes: both differences are firm, and the sentence says where.",
        "b": "The two had different rates. With rates from whole trials GLA was ahead.",
        "c": "The step size on their values made them start quietly. Without it they learned as slowly as GLA.",
        "d": "The change is many times as large as the scatter of the seeds, and Holm's correction keeps it.",
        "e": "Softmax attention had no convolutions, and these are small models of one text.",
    },
)

choose(
    "ex-far-judge",
    "Sentences that you may write",
    "ad",
    {
        "a": "The two scores differ by next to nothing, and single guesses hardly move.",
        "b": "Only one kind of positions was tested, and how much of the text was used was not measured.",
        "c": "A flat loss says that the long text does no harm. Nothing was asked about its beginning.",
        "d": "With their half-lives next to nothing is left after 2,048 tokens, in 95% of a layer's channels.",
        "e": "The interval is wide: it contains zero, and also twice its mean. It does not show that nothing is there.",
    },
)
