"""Judges of the exercises on softmax attention (chapter 1)."""

import torch

from gla_ref import softmax_attention

from . import exercise
from ._compare import draw, hold, one_head, variants
from ._predict import choose, predict


@exercise("ex-softmax-dominates", "derive")
def dominates(answer):
    """8 T d^2 = 4 T^2 d at T = 2 d."""
    mistakes = {
        "Every head has d / H channels, but there are H heads: their number cancels.": lambda d, H: 2 * d / H,
        "Half of the heads' work is missing: the parallel form has two products with T^2, scores and "
        "weights times values, and computes all of both, also above the diagonal.": lambda d, H: 4 * d,
        "There are four projections: queries, keys, values and the output.": lambda d, H: 1.5 * d,
        "Count a multiplication and an addition on both sides: 2 T d^2 a projection.": lambda d, H: d,
    }
    hold(answer, [(96, 3), (64, 4), (128, 16)], lambda d, H: 2 * d, mistakes, {"T": ""})


predict(
    "ex-softmax-afterwards",
    ["row 1", "row 2", "row 3", "row 4"],
    [1 / 8, 1 / 2, 5 / 8, 1.0],  # what is left of a softmax over all keys: 1/8, 3/6, 5/8, 1
    [
        ([1, 1, 1, 1], "That is the sum before the mask: part of it went to the future."),
        ([7 / 8, 1 / 2, 3 / 8, 0], "That is what was thrown away. What is left?"),
        ([0, 1 / 6, 1 / 4, 1 / 2], "The diagonal stays: a token reads itself, so only what is above is set to zero."),
        ([1, 3, 5, 12], "These are sums of exponentials: divide by the sum over all four keys."),
    ],
    "Exponentiate the scores of a query against all four keys, and add up the share of those that it may read.",
)

SAME = "It reads places 1 to {}, and the new order stays within them: the same set, the same sums."
choose(
    "ex-softmax-order",
    "Outputs that change",
    [1, 2],  # only the outputs whose set of tokens changes
    {
        1: "It reads one place only, and another token stands there now.",
        2: "It reads two places, and now they hold other tokens.",
        3: SAME.format(3),
        4: SAME.format(4),
    },
)


def _cached(q, k, v, keys, values, scale, diagonal=lambda P, T: P):
    """`T` new tokens after `P` cached ones: the mask's diagonal moves by `P`."""
    keep = torch.ones(len(q), len(keys) + len(k)).tril(diagonal(len(keys), len(k))) > 0
    x = scale * q @ torch.cat([keys, k]).T
    return x.masked_fill(~keep, -torch.inf).softmax(-1) @ torch.cat([values, v])


@exercise("ex-softmax-cache", "implement")
def cache(answer):
    def right(q, k, v, keys, values, scale):
        past = keys[None, :, None], values[None, :, None]
        return one_head(softmax_attention.recurrent, q, k, v, scale=scale, initial_state=past)[0]

    def afterwards(q, k, v, keys, values, scale):
        a = torch.softmax(scale * q @ torch.cat([keys, k]).T, -1).tril(len(keys))
        return a @ torch.cat([values, v])

    mistakes = {
        "The mask does not know of the cache: a new token sees all P cached tokens, so its "
        "diagonal lies P columns further right.": dict(diagonal=lambda P, T: 0),
        "New tokens see later ones. The cache needs no mask, but among themselves the new ones do.": dict(
            diagonal=lambda P, T: P + T
        ),
        "No new token sees itself: the diagonal belongs to the past.": dict(diagonal=lambda P, T: P - 1),
        "The cache is not read.": lambda q, k, v, keys, values, s: _cached(q, k, v, keys[:0], values[:0], s),
        "The new keys are not read: the cache has to be extended first.": (
            lambda q, k, v, keys, values, s: torch.softmax(s * q @ keys.T, -1) @ values
        ),
        "The scale is forgotten.": lambda *x: right(*x[:-1], 1.0),
        "The new tokens stand before the cache: they come after it.": (
            lambda q, k, v, keys, values, s: _cached(q, keys, values, k, v, s)
        ),
        "The weights are masked after the softmax: its sum has seen the future.": afterwards,
    }
    cases = [(*draw(P, (T, 3), (T, 3), (T, 2), (P, 3), (P, 2)), 0.7) for P, T in ((5, 4), (2, 7), (6, 1))]
    hold(answer, cases, right, variants(_cached, mistakes))
