"""Judges of the exercises on online softmax (chapter 2)."""

import torch

from . import exercise
from ._compare import draw, hold
from ._predict import choose, predict

choose(
    "ex-online-first",
    "Rows that give not-a-number",
    "be",  # the first score as reference fails where another one is 88.7 larger
    {
        "a": "Only differences count: the exponents are 0 and 1.",
        "b": "The last exponent is 100. float32 ends at e^88.7, and infinity over infinity is not a number.",
        "c": "No exponent is positive and the first is 0, so the sum is at least 1; what underflows "
        "to zero is a weight that is nearly zero.",
        "d": "The largest exponent is 88, just below the 88.7 where float32 ends.",
        "e": "The exponents are 0 and 100: that the scores are negative does not help.",
    },
)

predict(
    "ex-online-rescale",
    ["b = 1", "b = 2", "b = 4"],
    [3, 2, 1],  # the maximum rises at 4, 5, 9; in tiles of two at 4, 9; in tiles of four at 9
    [
        ([4, 3, 2], "The first tile finds nothing: there is no old sum to shrink yet."),
        ([7, 3, 1], "Without a new largest score the factor is e^0 = 1."),
        ([8, 4, 2], "Without a new largest score the factor is e^0 = 1."),
        ([3, 3, 3], "A tile brings its largest score only: the maximum rises once a tile at most."),
        ([4, 2, 1], "The very first score finds no old sum to shrink; the later counts are right."),
    ],
    "Write down the largest score so far after every tile, and count how often it rises.",
)


@exercise("ex-online-divide", "derive")
def divide(answer):
    """u_i = e^(m_{i-1} - m_i) u_{i-1} + e^(x_i - m_i) v_i."""

    def right(m, m_new, x):
        return (m - m_new).exp(), (x - m_new).exp()

    mistakes = {
        "The first factor is upside down: a sum relative to a smaller maximum shrinks when the "
        "maximum grows.": lambda m, m_new, x: ((m_new - m).exp(), (x - m_new).exp()),
        "The old sum is relative to the old maximum: it must be brought to the new one.": (
            lambda *x: (1.0, right(*x)[1])
        ),
        "The newcomer is taken relative to the old maximum; both terms need the new one.": (
            lambda m, m_new, x: ((m - m_new).exp(), (x - m).exp())
        ),
        "The newcomer counts as 1 only if it is the largest: else as e^(x - m_new).": (lambda *x: (right(*x)[0], 1.0)),
    }
    old, new, x = (torch.tensor(n, dtype=torch.float64) for n in (1.5, 2.25, 0.5))
    cases = [(old, new, new), (new, new, x), (old, old, -x), (-torch.inf * new, x, x)]
    hold(answer, cases, right, mistakes, {"a": "", "b": ""})


@exercise("ex-online-lse", "implement")
def lse(answer):
    """L = logaddexp(L1, L2), shares e^(L1 - L) and e^(L2 - L)."""

    def right(L1, o1, L2, o2):
        L = torch.logaddexp(L1, L2)
        return L, (L1 - L).exp() * o1 + (L2 - L).exp() * o2

    def unsafe(L1, o1, L2, o2):
        total = L1.exp() + L2.exp()
        return total.log(), (L1.exp() * o1 + L2.exp() * o2) / total

    mistakes = {
        "Both parts count alike. A part's share is the part of the exponentials that it holds, e^(L1 - L).": (
            lambda L1, o1, L2, o2: (torch.logaddexp(L1, L2), (o1 + o2) / 2)
        ),
        "Two averages are added: their shares, e^(L1 - L) and e^(L2 - L), must sum to 1.": (
            lambda L1, o1, L2, o2: (torch.logaddexp(L1, L2), o1 + o2)
        ),
        "Logarithms of sums do not add: L = ln(e^L1 + e^L2).": lambda *x: (x[0] + x[2], right(*x)[1]),
        "The maximum is too small: L = ln(e^L1 + e^L2).": (lambda *x: (torch.maximum(x[0], x[2]), right(*x)[1])),
        "The shares are exchanged: o1 has the share e^(L1 - L).": lambda L1, o1, L2, o2: right(L1, o2, L2, o1),
        "Right on paper, but e^1000 overflows: exponentiate differences such as L1 - L only.": unsafe,
        "L is right, but in the shares e^1000 overflows: exponentiate differences such as L1 - L only.": (
            lambda *x: (right(*x)[0], unsafe(*x)[1])
        ),
    }
    o1, o2 = draw(0, (3,), (3,))
    L = torch.tensor([[0.3, -1.2], [1000.5, 999.0], [-torch.inf, 2.0]], dtype=torch.float64)
    cases = [(L1, o, L2, o2) for (L1, L2), o in zip(L, (o1, o1, 0 * o1), strict=True)]
    hold(answer, cases, right, mistakes, {"L": "", "o": "V"})
