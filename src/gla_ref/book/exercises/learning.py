"""Judges of the exercises on experiments: baselines, epsilons, intervals, half-lives, comparisons (chapter 19)."""

import math

from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, choose, numbers


@exercise("ex-learns-baseline", "derive")
def baseline(answer):
    mistakes = {
        "The old values of the keys that are written again are in the pairs, too.": lambda pairs, again: 1 / pairs,
        "A key that is written again has two values: one more, not two.": lambda pairs, again: 1 / (pairs + 2 * again),
        "Only values are drawn, not keys.": lambda pairs, again: 1 / (2 * (pairs + again)),
        "The old values are in the pairs as well: they are added, not taken away.": lambda pairs, again: (
            1 / (pairs - again)
        ),
        "A key has one right value, whether it was written once or twice.": lambda pairs, again: (
            (pairs - again / 2) / (pairs * (pairs + again))
        ),
    }
    hold(answer, [(5, 2), (16, 8), (4, 0)], lambda pairs, again: 1 / (pairs + again), mistakes, {"share": ""})


@ask("ex-learns-epsilon")
def epsilon():
    r = 2e-6

    def passed(eps: float) -> float:
        return r / math.sqrt(r**2 + eps)

    mistakes = [
        ([1.0, 1.0], "That is a norm without an epsilon."),
        ([r / (r + 1e-6), r / (r + 1e-12)], "The epsilon is added to the mean square, under the root."),
        ([r**2 / (r**2 + 1e-6), r**2 / (r**2 + 1e-12)], "The root is missing: divide r by the root of r^2 + epsilon."),
        ([r / 1e-6, r / 1e-12], "Divide by the root of the epsilon, and do not forget r^2 under it."),
        ([passed(1e-12), passed(1e-6)], "The two are exchanged: the larger epsilon lets less through."),
    ]
    hint = "The norm divides by the root of r^2 + epsilon."
    return numbers(["epsilon 1e-6", "epsilon 1e-12"], [passed(1e-6), passed(1e-12)], mistakes, hint, tolerance=0.02)


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


@exercise("ex-learns-strong", "derive")
def strong(answer):
    mistakes = {
        "Half is left when the log gates sum to -ln 2.": lambda C, limit: C / limit,
        "The other way round: the longer the chunk, the longer the half-life that is already strong.": (
            lambda C, limit: limit / (C * math.log(2))
        ),
        "The limit is in nats, to base e, not in halvings.": lambda C, limit: C / (limit * math.log(2)),
        "A chunk has C gates: their sum counts.": lambda C, limit: math.log(2) / limit,
    }
    hold(answer, [(64, 80.0), (32, 4.0)], lambda C, limit: C * math.log(2) / limit, mistakes, {"half-life": ""})


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

choose(
    "ex-learns-design",
    "Models for which the two explanations predict different answers",
    "ad",
    {
        "a": "Its keys are those of sixteen heads, its state is as large as with four: one explanation says like "
        "sixteen, the other like four.",
        "b": "State and keys are as small as with sixteen heads: both explanations say like sixteen.",
        "c": "State and keys are as large as with four heads: both explanations say like four.",
        "d": "Its keys are those of four heads, its state is as small as with sixteen: one explanation says like four, "
        "the other like sixteen.",
        "e": "Its state and keys are those of sixteen heads: both explanations say like "
        "sixteen. More steps test a third one.",
    },
)
