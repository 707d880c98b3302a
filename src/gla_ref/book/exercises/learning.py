"""Judges of the exercises on experiments: baselines, intervals, comparisons (chapter 19)."""

import math

from . import exercise
from ._compare import draw, hold, variants
from ._predict import choose


@exercise("ex-learns-baseline", "derive")
def baseline(answer):
    mistakes = {
        "The old values of the keys that are written again are in the pairs, too.": lambda pairs, again: 1 / pairs,
        "A key that is written again has two values: one more, not two.": lambda pairs, again: 1 / (pairs + 2 * again),
        "Only values are drawn, not keys.": lambda pairs, again: 1 / (2 * (pairs + again)),
        "The old values are in the pairs, too: added, not taken away.": lambda pairs, again: 1 / (pairs - again),
        "A key has one right value, whether it was written once or twice.": lambda pairs, again: (
            (pairs - again / 2) / (pairs * (pairs + again))
        ),
    }
    hold(answer, [(5, 2), (16, 8), (4, 0)], lambda pairs, again: 1 / (pairs + again), mistakes, {"share": ""})


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
