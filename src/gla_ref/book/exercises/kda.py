"""Judges of the exercises on Kimi Delta Attention (chapter 24)."""

import math

import torch

from ... import kda
from . import Open, Wrong, exercise
from ._compare import draw, hold, one_head, variants
from ._predict import predict

predict(
    "ex-kda-bound",
    ["tokens to an anchor in bfloat16", "in float16", "the bound for one anchor", "exponentials with blocks of 8"],
    [16, 1, -1.25, 4.5],
    [
        ([32, ..., ..., ...], "The two sides have 40 nats each, so a whole block may decay by 80."),
        ([64, ..., ..., ...], "64 tokens at -5 decay by 320 nats."),
        ([16, 2, ..., ...], "Two tokens at -5 decay by 10 nats, and float16 is trusted for 6."),
        ([16, 0, ..., ...], "One token decays by 5 nats, which float16 still holds."),
        ([16, 1, 1.25, ...], "A log gate is at most 0, so its bound is negative."),
        ([16, 1, -5, ...], "At -5 a chunk of 64 decays by 320 nats, and one anchor is trusted for 80."),
        ([16, 1, -1.25, 8], "A token reads only the blocks up to its own: one of them, two, ... or eight."),
        ([16, 1, -1.25, 2.5], "That is with blocks of 16, where a token reads one to four blocks."),
        ([16, 1, -1.25, 5.0], "With four blocks the mean of 1 to 4 is 2.5. Take the mean of 1 to 8."),
    ],
    "A block may decay by the format's limit, and each token takes up to the bound.",
)


def _map(k, g, beta, order=lambda M, N: M @ N, decay=lambda g: torch.diag(g.exp()), swapped=False, strength=1.0):
    """The product of the tokens' matrices; the options leave something out."""
    M = torch.eye(k.shape[1], dtype=k.dtype)
    for k_t, g_t, beta_t in zip(k, g, beta, strict=True):
        erase = torch.eye(len(k_t), dtype=k.dtype) - strength * beta_t * torch.outer(k_t, k_t)
        M = order(decay(g_t) @ erase if swapped else erase @ decay(g_t), M)
    return M


@exercise("ex-kda-map", "implement")
def chunk_map(answer):
    def right(k, g, beta):
        """From the identity as a state, with values of 0."""
        start = torch.eye(k.shape[1], dtype=k.dtype)[None, None]
        return one_head(kda.recurrent, k, k, k.new_zeros(k.shape), g, beta, initial_state=start)[1][0, 0]

    def without_inverse(k, g, beta):
        b = g.cumsum(0)
        return torch.diag(b[-1].exp()) - ((b[-1] - b).exp() * k).T @ (beta[:, None] * b.exp() * k)

    mistakes = {
        "The order is wrong: the last token's matrix is on the left.": dict(order=lambda M, N: N @ M),
        "Each token fades first and erases then: its diagonal matrix is on the right.": dict(swapped=True),
        "The gates are missing: every row fades by its own.": dict(decay=lambda g: torch.eye(len(g), dtype=g.dtype)),
        "Nothing is erased: that is the decay alone.": dict(strength=0.0),
        "The sign is wrong: the value that the key finds is subtracted.": dict(strength=-1.0),
        "Y is missing in W: each erasure changes what later keys find.": without_inverse,
    }
    k, gates, noise = draw(24, (5, 3), (5, 3), (5,))
    k = k / k.norm(dim=-1, keepdim=True)
    hold(answer, [(k, -gates.abs(), 2 * noise.sigmoid())], right, variants(_map, mistakes), {"M": "K K"})


KEPT, FORGOTTEN = 0.7, -30.0  # of the state at least, and a channel's sum of gates at most


def _relay(T, turns=8, end=math.pi / 2, before=(0.0, -5.0), after=(-5.0, 0.0), beta=1.0):
    """Keys, gates and strengths that turn a state from channel 1 to channel 2 in the middle third of the tokens."""
    third = T // 3
    k, g = torch.zeros(2, T, 2, dtype=torch.float64)
    g[:third], g[-third:] = (torch.tensor(x, dtype=torch.float64) for x in (before, after))
    angle = end * torch.arange(1, turns + 1, dtype=torch.float64) / turns
    k[third : third + turns] = torch.stack([-angle.sin(), angle.cos()], 1)  # the state keeps what is at right angles
    return k, g, torch.full((T,), beta, dtype=torch.float64)


def _outcome(k, g, beta):
    """What is left of the state (1, 0), and both channels' sums of gates, each no better than the question asks."""
    start = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    S = one_head(kda.recurrent, k, k, k.new_zeros(len(k), 1), g, beta, initial_state=start)[1]
    return S.norm().clamp(max=KEPT), *g.sum(0).clamp(min=FORGOTTEN)


@exercise("ex-kda-relay", "implement")
def relay(answer):
    def outcome(T):
        if (given := answer(T)) is None:
            raise Open("Your turn: the function returns nothing yet.")
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise Wrong("Expected three results: k, g and beta.")
        k, g, beta = (torch.as_tensor(x, dtype=torch.float64) for x in given)
        if k.shape != (T, 2) or g.shape != (T, 2) or beta.shape != (T,):
            raise Wrong(f"Expected k [{T}, 2], g [{T}, 2] and beta [{T}].")
        for name, x, low, high in (("g", g, -5, 0), ("beta", beta, 0, 1), ("k, by length,", k.norm(dim=1), 0, 1)):
            if not ((low <= x) & (x <= high + 1e-9)).all():
                raise Wrong(f"{name} must lie in [{low}, {high}].")
        return _outcome(k, g, beta)

    mistakes = {
        "Nothing hands the state over, so it dies with its channel: keys must turn it.": dict(beta=0.0),
        "One key keeps half. Turn in small steps: each keeps the cosine of its angle.": dict(turns=1, end=math.pi / 4),
        "Both channels stay open, and a rule that looks at gates would cut nothing.": dict(
            before=(0.0, 0.0), after=(0.0, 0.0)
        ),
        "Channel 2 never closes: close it while the state is still in channel 1.": dict(before=(0.0, 0.0)),
        "Channel 1 never closes: close it once the state has left it.": dict(after=(0.0, 0.0)),
    }
    made = variants(lambda T, **how: _outcome(*_relay(T, **how)), mistakes)
    hold(outcome, [(24,)], lambda T: _outcome(*_relay(T)), made, dict.fromkeys(("kept", "channel 1", "channel 2"), ""))
