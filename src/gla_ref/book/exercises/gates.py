"""Judges of the exercises on gates and decay (chapter 9)."""

import math
from functools import partial

import torch
from torch.nn import functional as F

from ... import gla, simple_gla
from . import Wrong, exercise
from ._compare import draw, hold, one_head, variants
from ._predict import Part, Question, ask, rules


def _seen(first: set[int], second: set[int], own: bool = True) -> list[list[int]]:
    """Which writes reach o_1 .. o_4 through two channels that are reset at the given tokens."""
    g = torch.zeros(4, 2, dtype=torch.float64)
    for channel, tokens in enumerate((first, second)):
        for t in tokens:
            g[t - 1, channel] = -torch.inf
    q, v = torch.ones_like(g), torch.eye(4, dtype=torch.float64)
    k = q if own else g.exp()  # where a reset also clears the write of its own token
    o, _ = one_head(gla.recurrent, q, k, v, g)
    return [[j + 1 for j in range(4) if row[j] > 0] for row in o]


@ask("ex-gates-reset")
def reset():
    def flags(lists):  # whether each of four lists has each token
        return [float(t in tokens) for tokens in lists for t in (1, 2, 3, 4)]

    def read(answer):
        groups = isinstance(answer, (list, tuple)) and len(answer) == 4
        if not groups or not all(isinstance(x, (list, tuple, set)) and set(x) <= {1, 2, 3, 4} for x in answer):
            raise Wrong("Expected a list of four lists of tokens, such as [[1], [1, 2], [3], [4]].")
        return flags(answer)

    def place(lists):
        return tuple((x, x) for x in flags(lists))

    mistakes = [
        (_seen({2}, {4}, own=False), "A reset clears all that was there; then the token writes. Its own value stays."),
        (_seen({2, 4}, {2, 4}), "A reset of one channel leaves the other as it is, with everything written there."),
        (_seen(set(), set()), "Nothing is forgotten in this list: what do the resets clear?"),
    ]
    hint = (
        "Follow each channel by itself: a reset empties it, then every token writes to it. "
        "A value reaches an output if at least one channel still holds it."
    )
    others = {4 * n: f"Answer {n + 1} of 4 is not right. {hint}" for n in range(4)}
    return Question(
        [Part(f"o{n} contains", {f"v{x}": 1 for x in "₁₂₃₄"}, many=True) for n in "₁₂₃₄"],
        rules(place(_seen({2}, {4})), [(place(wrong), why) for wrong, why in mistakes], others),
        read,
    )


@exercise("ex-gates-bias", "derive")
def bias(answer):
    def from_power(x):
        return -math.log(math.expm1(x * math.log(2)))

    mistakes = {
        "The sign is turned round: this gate forgets where it should keep.": lambda h, tau: -from_power(tau / h),
        "After h tokens this gate has decayed to 1/e, not to 1/2: ln 2 is missing.": (
            lambda h, tau: from_power(tau / h / math.log(2))
        ),
        "tau is missing: it divides the log gate.": lambda h, tau: from_power(1 / h),
        "tau is on the wrong side: softplus(-y) / tau = ln 2 / h.": lambda h, tau: from_power(1 / h / tau),
        "That is softplus(-y) = exp(-y), true for long half-lives only; solve it exactly.": (
            lambda h, tau: -math.log(tau * math.log(2) / h)
        ),
    }
    cases = [(256.0, 1.0), (256.0, 16.0), (5.0, 4.0)]
    hold(answer, cases, lambda h, tau: from_power(tau / h), mistakes, {"bias": ""})


def _retention(q, k, v, gamma, power=1, shift=0, scale=None, cut=torch.tril):
    T = len(q)
    D = cut(gamma ** (power * (torch.arange(T)[:, None] - torch.arange(T) + shift)).double())
    return (q.shape[1] ** -0.5 if scale is None else scale) * ((q @ k.T) * D) @ v


@exercise("ex-gates-retention", "implement")
def retention(answer):
    def right(q, k, v, gamma):
        g = torch.full((len(q),), math.log(gamma), dtype=q.dtype)
        return one_head(simple_gla.recurrent, q, k, v, g)[0]

    mistakes = {
        "scale is forgotten: every form of the book multiplies q by K ** -0.5.": dict(scale=1.0),
        "The mask is missing: above the diagonal D is 0, not a negative power of gamma.": dict(cut=lambda D: D),
        "Each token misses its own write: the diagonal of D is gamma ** 0 = 1.": dict(cut=lambda D: D.tril(-1)),
        "The token's own gate is counted: a write passes the gates after it, i - j of them.": dict(shift=1),
        "The power is upside down: gamma ** (j - i) grows with the distance.": dict(power=-1),
        "There is no decay in it: D is not the mask of ones, but gamma ** (i - j).": dict(power=0),
    }
    hold(answer, [(*draw(0, (7, 3), (7, 3), (7, 4)), 0.9)], right, variants(_retention, mistakes))


@exercise("ex-gates-order", "implement")
def order(answer):
    def gate_first(q, k, v, g, on_q=torch.ones_like, on_k=torch.ones_like, on_g=lambda g: g):
        """Right where `on_k` is exp: S_t = alpha_t (S_{t-1} + k_t v_t) = alpha_t S_{t-1} + (alpha_t k_t) v_t."""
        return gla.recurrent(q * on_q(g), k * on_k(g), v, on_g(g))

    mistakes = {
        "That is gate before write: a token's own write must feel its own gate as well.": dict(),
        "Dividing k by its gate goes the other way: each write feels one gate more.": dict(on_k=lambda g: (-g).exp()),
        "The gate went to q: older writes then feel the reader's gate twice.": dict(on_q=torch.exp),
        "Shifting the gates by a token takes the reader's own gate off the state.": dict(
            on_g=lambda g: F.pad(g, (0, 0, 0, 0, 1, 0))[:, :-1]
        ),
        "g is a logarithm: the factor of k is exp(g).": dict(on_k=lambda g: g),
    }
    key, value = (2, 7, 2, 3), (2, 7, 2, 4)
    q, k, v, noise = draw(1, key, key, value, key)
    mild = F.logsigmoid(noise)
    resets = mild.clone()
    resets[:, 3, :, 1] = resets[0, 5] = -torch.inf
    axes = {"o": "B T H V", "S": "B H K V"}
    right = partial(gate_first, on_k=torch.exp)
    hold(answer, [(q, k, v, mild), (q, k, v, resets)], right, variants(gate_first, mistakes), axes)
