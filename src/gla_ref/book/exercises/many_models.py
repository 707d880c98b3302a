"""Judges of the exercises on one recurrence for many models: order, turning gates, Longhorn (chapter 18)."""

import torch

from . import exercise
from ._compare import draw, hold, variants
from ._predict import predict

predict(
    "ex-models-order",
    ["GLA", "RWKV-6"],
    [4, 3],
    [
        ([4, 4], "RWKV-6 reads before it fades: the gate of token 6 comes too late."),
        ([3, 3], "In GLA a token fades before it reads, so its own gate counts."),
        ([3, 4], "The other way round: GLA fades first and then reads."),
        ([5, 4], "A write is not faded by its own token's gate: the first that counts is token 3's."),
        ([5, ...], "A write is not faded by its own token's gate: the first that counts is token 3's."),
    ],
    "Go through tokens 3 to 6, and ask of each whether its gate has acted when token 6 reads.",
)


def _factor(g, omega):
    return g.sum().exp() * omega.sum().cos()


@exercise("ex-models-turn", "derive")
def turn(answer):
    mistakes = {
        "Angles add up first: take the cosine of their sum, not of each one.": lambda g, w: (g.exp() * w.cos()).prod(),
        "That is the size. The real part has the cosine of the angle as well.": lambda g, w: g.sum().exp(),
        "The sine is the imaginary part.": lambda g, w: g.sum().exp() * w.sum().sin(),
        "Sizes are multiplied: their logarithms add.": lambda g, w: g.exp().sum() * w.sum().cos(),
        "g is the logarithm of the size.": lambda g, w: g.prod() * w.sum().cos(),
    }
    (g, omega), (h, angle) = draw(18, (3,), (3,)), draw(19, (5,), (5,))
    hold(answer, [(-g.abs(), omega), (-h.abs(), angle)], _factor, mistakes, {"factor": ""})


def _longhorn(q, k, v, beta, *, step=lambda b, n: b / (1 + b * n), gate=torch.square, own=True, late=False):
    """Longhorn with one step size per head; `late` also fades the token's own write."""
    S, o = q.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        d = step(beta[t], k[t] @ k[t])
        fade, write = 1 - d * gate(k[t])[:, None], (d if own else 1) * k[t].outer(v[t])
        S = fade * (S + write) if late else fade * S + write
        o.append(q[t] @ S)
    return torch.stack(o)


def _whole(q, k, v, beta):
    """With the matrix instead of its diagonal."""
    S, o = q.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        d = beta[t] / (1 + beta[t] * (k[t] @ k[t]))
        S = S + d * k[t].outer(v[t] - k[t] @ S)
        o.append(q[t] @ S)
    return torch.stack(o)


@exercise("ex-models-longhorn", "implement")
def longhorn(answer):
    mistakes = {
        "The step size is beta over 1 + beta k k^T.": {"step": lambda b, n: b},
        "The write is scaled by the step size too.": {"own": False},
        "The gate is 1 minus the step size times the square of k.": {"gate": torch.abs},
        "The gate is the same for all rows there. It is 1 - delta k_a^2 in row a.": {"gate": lambda k: (k @ k)[None]},
        "The gate is missing: nothing fades.": {"gate": torch.zeros_like},
        "A write is not faded by its own token's gate.": {"late": True},
        "That is the whole matrix k^T k. Longhorn keeps its diagonal.": _whole,
        "The scale is 1 here, not K^-0.5.": lambda q, k, v, beta: _longhorn(q, k, v, beta) / q.shape[1] ** 0.5,
    }
    q, k, v, beta = draw(20, (5, 3), (5, 3), (5, 2), (5,))
    hold(answer, [(q, k, v, beta.sigmoid())], _longhorn, variants(_longhorn, mistakes))
