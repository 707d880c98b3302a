"""Judges of the exercises on chunks and sub-chunks (chapter 11)."""

import math

import torch
from torch.nn import functional as F

from ... import gla
from ...gates import decay_from_start, decay_to_end
from . import exercise
from ._compare import draw, hold, one_head, reverse_sum, variants
from ._predict import ask, choice, predict


@ask("ex-twolevel-anchor")
def anchor():
    before = "The writer 16 gets the exponent b_{0} - b_16: minus the gates of tokens {1} to 16, positive."
    after = "The reader 17 gets the exponent b_17 - b_{0}: minus the gates of tokens 18 to {0}, positive."
    between = "It lies between all writers j <= 16 and all readers i >= 17: no exponent is positive."
    why = {z: before.format(z, z + 1) for z in (1, 15)}
    why |= {16: between, 17: between + " The reader 17 itself gets 0."}
    why |= {z: after.format(z) for z in (18, 32)}
    return choice("Anchors z", [16, 17], why)


WALK, LOG, CHUNKS = "recurrent", "parallel_log", "chunkwise"
predict(
    "ex-twolevel-extremes",
    ["chunkwise, C = 1", "chunkwise, C = T", "chunkwise_two_level, c = C"],
    [WALK, LOG, CHUNKS],
    [
        ([LOG, WALK, CHUNKS], "The first two are exchanged: in a chunk of one token there is nothing but the state."),
        ([WALK, "parallel", ...], "parallel is the ratio form, which splits the exponential; a chunk keeps it whole."),
        ([WALK, LOG, LOG], "c = C leaves no borders inside a chunk; but between chunks there still is a state."),
        (["scan", ..., ...], "A scan holds the states of all tokens at once; chunks of one token are walked in turn."),
    ],
    "Expected three names of recurrent, parallel, parallel_log, scan and chunkwise. "
    "For each: which pairs of tokens meet through the state, and which in log space?",
    options=[WALK, "parallel", LOG, "scan", CHUNKS],
)


@exercise("ex-twolevel-best", "derive")
def best(answer):
    mistakes = {
        "All of the chunk is counted; on average half of it lies before a sub-chunk.": (lambda C: math.sqrt(3 * C / 5)),
        "The square root is missing: 5 c = 3 C / (2 c) at the minimum.": lambda C: 3 * C / 10,
        "The fraction is upside down: 5 c grows with c, 3 C / (2 c) falls.": lambda C: math.sqrt(10 * C / 3),
        "Log space costs 5 K for a pair, the factors 3 K for a number: not the same.": (lambda C: math.sqrt(C / 2)),
        "The readers' part does not depend on c: 3 K c for c tokens is 3 K for each.": lambda C: math.sqrt(3 * C / 16),
        "That is a power of two next to it; the formula gives a real number.": (
            lambda C: 2.0 ** round(math.log2(math.sqrt(3 * C / 10)))
        ),
    }
    hold(answer, [(64,), (128,), (256,)], lambda C: math.sqrt(3 * C / 10), mistakes, {"c": ""})


def _update(S, k, v, g, g_v, to_end=decay_to_end, rows=1, columns=1, values=True):
    """The state after a chunk; the options leave something out."""
    if values:
        v = v * to_end(g_v).exp()
    b, d = g.sum(0) if rows else 0 * g[0], g_v.sum(0) if columns else 0 * g_v[0]
    return (b[:, None] + d).exp() * S + (k * to_end(g).exp()).T @ v


@exercise("ex-twolevel-update", "implement")
def update(answer):
    def right(S, k, v, g, g_v):
        return one_head(gla.recurrent, k, k, v, g, g_v=g_v[None, :, None], initial_state=S[None, None])[1][0, 0]

    mistakes = {
        "The old state is not decayed.": dict(rows=0, columns=0),
        "The gate on values is missing: it decays the state's columns and the values.": dict(columns=0, values=False),
        "The values have to decay to the chunk's end, too.": dict(values=False),
        "The old state's columns have to decay, too.": dict(columns=0),
        "The old state's rows have to decay, too.": dict(rows=0),
        "Each write is decayed by its own gates as well: it passes only those after it.": dict(to_end=reverse_sum),
        "The writes are decayed from the chunk's start; they need the way to its end.": dict(to_end=decay_from_start),
        "The writes are not decayed to the chunk's end.": dict(to_end=torch.zeros_like),
        "b_C - b_j is a difference: after a reset it is -inf - (-inf), NaN. Add up from the end.": dict(
            to_end=lambda g: g.sum(0) - g.cumsum(0)
        ),
    }
    S, k, v, noise, noise_v = draw(5, (3, 4), (7, 3), (7, 4), (7, 3), (7, 4))
    g, g_v = F.logsigmoid(noise), F.logsigmoid(noise_v)
    resets, resets_v = g.clone(), g_v.clone()
    resets[3, 1] = resets_v[4, 2] = -torch.inf
    cases = [(S, k, v, g, g_v), (S, k, v, resets, resets_v)]
    hold(answer, cases, right, variants(_update, mistakes), {"S": "K V"})
