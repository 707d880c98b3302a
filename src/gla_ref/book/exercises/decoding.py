"""Judges of the exercises on decoding: a token at a time from a state (chapter 16)."""

import math

import torch

from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, numbers


@ask("ex-decode-batch")
def batch():
    one = 8 * 16 * 128 * 128  # bytes of a sequence: its state, read and written
    right = math.ceil(40e-6 * 4e12 / one)
    mistakes = [
        (math.ceil(40e-6 * 4e12 / (one / 2)), "The state is read and written."),
        (math.ceil(40e-6 * 4e12 / (one / 16)), "There are 16 heads."),
        (math.ceil(40e-6 * 4e12 / (one / 4)), "The state is float32: 4 bytes a number, 8 read and written."),
        (right - 1, "That many are not quite enough: round up."),
        (1, "One state takes half a microsecond, and the host forty."),
    ]
    return numbers("sequences", right, mistakes, "Sequences times 8 K V bytes times heads, over the rate: 40 µs.")


@ask("ex-decode-bfloat16")
def low_state():
    x = torch.tensor(3.0, dtype=torch.bfloat16)
    for _ in range(1000):
        x = (x.float() * 0.999).to(torch.bfloat16)
    mistakes = [
        (3 * 0.999**1000, "That is the exact decay. What does 3 times 0.999 round to in bfloat16?"),
        (0.0, "It would have to move at all: what does 3 times 0.999 round to in bfloat16?"),
        (3 - 2**-6, "The first step would have to reach the next smaller number, and it is less than halfway there."),
        (1.5, "A half-life is 693 tokens in exact arithmetic; what does 3 times 0.999 round to in bfloat16?"),
    ]
    hint = "The numbers of bfloat16 between 2 and 4 are 2^-6 apart."
    return numbers("the entry after 1000 tokens", x.item(), mistakes, hint, tolerance=1e-4)


def _accepted(S, k, v, g, m, seen=None, to=None, whole=None):
    """The state after the first m tokens, as the one product of a chunk."""
    seen, b = m if seen is None else seen, g.cumsum(0)
    end = b[(m if to is None else to) - 1] if m else 0 * b[0]
    kept = end if whole is None else whole * end
    if not m:
        return S.clone()
    return kept.exp()[:, None] * S + (k[:seen] * (end - b[:seen]).exp()).T @ v[:seen]


@exercise("ex-decode-accept", "implement")
def accept(answer):
    def all_tokens(S, k, v, g, m):
        return _accepted(S, k, v, g, len(k))

    mistakes = {
        "That is the state after all drafted tokens: those from m on must leave no trace.": all_tokens,
        "The writes of the rejected tokens are left out, but their gates are not.": (
            lambda S, k, v, g, m: _accepted(S, k, v, g, m, to=len(k))
        ),
        "The state before has not decayed.": dict(whole=0),
        "A write decays by the gates after it: the token's own gate is not among them.": (
            lambda S, k, v, g, m: (
                g[:m].sum(0).exp()[:, None] * S + (k[:m] * (g[:m].flip(0).cumsum(0).flip(0)).exp()).T @ v[:m]
            )
        ),
        "The writes have not decayed.": (lambda S, k, v, g, m: g[:m].sum(0).exp()[:, None] * S + k[:m].T @ v[:m]),
        "m tokens are accepted; that is one more.": lambda S, k, v, g, m: _accepted(S, k, v, g, m + 1),
    }
    k, v, noise, S = draw(10, (5, 3), (5, 2), (5, 3), (3, 2))
    g = -noise.abs() / 4
    hold(answer, [(S, k, v, g, 3), (S, k, v, g, 0)], _accepted, variants(_accepted, mistakes), {"S": "K V"})
