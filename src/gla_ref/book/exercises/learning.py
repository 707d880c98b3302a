"""Judges of the exercises on experiments: norms, intervals, comparisons (chapter 19)."""

import math

from . import exercise
from ._compare import draw, hold, variants
from ._predict import choose


@exercise("ex-learns-norm", "derive")
def largest_epsilon(answer):
    mistakes = {
        "The share is of r, and the root has r squared: square the share, too.": lambda r, p: r**2 * (1 / p - 1),
        "r is squared under the root.": lambda r, p: r * (1 / p**2 - 1),
        "Under the root r squared stands beside epsilon: take it away.": lambda r, p: (r / p) ** 2,
        "Divide by the share squared, rather than multiply.": lambda r, p: r**2 * (1 - p**2),
        "That is the root of epsilon.": lambda r, p: r * math.sqrt(1 / p**2 - 1),
    }
    hold(answer, [(0.5, 0.8), (2.0, 0.9), (0.01, 0.5)], lambda r, p: r**2 * (1 / p**2 - 1), mistakes, {"epsilon": ""})


def _interval(xs, t, *, ddof=1, root=True, spread=True):
    n = len(xs)
    s = (xs - xs.mean()).square().sum() / (n - ddof)
    return xs.mean(), t * (s.sqrt() if root else s) / (math.sqrt(n) if spread else 1)


@exercise("ex-learns-interval", "implement")
def an_interval(answer):
    mistakes = {
        "Divide by n - 1: the mean was made of the same numbers.": dict(ddof=0),
        "That is the variance; take its root.": dict(root=False),
        "That is how one run scatters. The mean of n scatters by the root of n less.": dict(spread=False),
        "That is the whole width; half of it is asked for.": lambda xs, t: (xs.mean(), 2 * _interval(xs, t)[1]),
        "Multiply by t.": lambda xs, t: _interval(xs, 1.0),
    }
    three, five = draw(19, (3,), (5,))
    hold(answer, [(three, 4.303), (five, 2.776)], _interval, variants(_interval, mistakes), {"mean": "", "half": ""})


choose(
    "ex-learns-judge",
    "Sentences that you may write",
    "ad",
    {
        "a": "Chance is 1 in 32, and naming any of the written values is right in 25% of the cases.",
        "b": "The mean is lower, but look at the interval of the difference: one model makes it wider than the scale.",
        "c": "Two models of A have a state of the same size, and answer nearly everything.",
        "d": "The rate was chosen for B. Nobody has looked for the best rate of A.",
    },
)
