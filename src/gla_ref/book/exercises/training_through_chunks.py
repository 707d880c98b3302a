"""Judges of the exercises on training through chunks (chapter 8)."""

import torch

from gla_ref import linear_attention

from . import exercise
from ._compare import draw, hold, variants
from ._predict import predict


@exercise("ex-fla-flip", "implement")
def flip(answer):
    """dk = walk(v, do, q) and dv = walk(k, q, do), on reversed tokens, turned back."""

    def walk(q, k, v):
        T = torch.ones(len(q), len(q), dtype=torch.float64).tril()
        return 0.6 * (q @ k.T * T) @ v

    def right(walk, q, k, v, do):
        leaves = [x.clone().requires_grad_() for x in (k, v)]
        tokens = (x[None, :, None] for x in (q, *leaves))
        o, _ = linear_attention.recurrent(*tokens, scale=0.6)
        return torch.autograd.grad(o[0, :, 0], leaves, do)

    def turned(walk, q, k, v, do, into=True, back=True, swap=False):
        q, k, v, do = (x.flip(0) if into else x for x in ((do, k, v, q) if swap else (q, k, v, do)))
        dk, dv = walk(v, do, q), walk(k, q, do)
        return (dk.flip(0), dv.flip(0)) if back else (dk, dv)

    mistakes = {
        "These sums run over i <= t: later outputs depend on k_t and v_t, so turn the tokens round first.": dict(
            into=False, back=False
        ),
        "The results are not turned back: their first row belongs to the last token.": dict(back=False),
        "The inputs are not turned round, only the results.": dict(into=False),
        "dk and dv are exchanged.": lambda *x: right(*x)[::-1],
        "q and do are exchanged: dk has the keys do and values q, dv the keys q and values do.": dict(swap=True),
    }
    cases = [(walk, *draw(T, (T, 3), (T, 3), (T, V), (T, V))) for T, V in ((6, 3), (7, 2), (1, 2))]
    hold(answer, cases, right, variants(turned, mistakes), {"dk": "T K", "dv": "T V"})


@exercise("ex-fla-scale", "derive")
def scale(answer):
    """ds = sum(do * o) / s."""
    mistakes = {
        "o contains the scale already: divide by it.": lambda o, do, s: (o * do).sum(),
        "Multiplied, not divided: o = s * y, and y does not depend on s.": (lambda o, do, s: (o * do).sum() * s),
        "One s for all outputs: add up over the channels, too.": lambda o, do, s: (o * do).sum(0) / s,
        "One s for all outputs: add up over the tokens, too.": lambda o, do, s: (o * do).sum(1) / s,
        "o is missing: how much an output grows with s depends on how large it is.": lambda o, do, s: do.sum() / s,
    }
    cases = [(*draw(T, (T, V), (T, V)), s) for T, V, s in ((6, 3, 0.5), (1, 4, 2.0), (5, 2, 0.125))]
    hold(answer, cases, lambda o, do, s: (o * do).sum() / s, mistakes, {"ds": ""})


predict(
    "ex-fla-bits",
    ["ratio", "bits lost", "bits left"],
    [512, 9, 15],  # 32768 / 64 = 2^9: 9 bits lost of float32's 24, and 2^-24 of the large is 2^-15 of the small
    [
        ([32768, ..., ...], "The early state contains 64 tokens itself."),
        ([..., 512, ...], "That is the ratio. How many bits is it? Take the logarithm to base 2."),
        ([..., ..., 24], "Of the large state 24 bits are right, but the early state begins 9 bits further down."),
        ([..., ..., 14], "24 - 9 = 15."),
        ([..., ..., 9], "These bits are lost. How many of the 24 are left?"),
    ],
    "The state grows in proportion to its tokens; each doubling is a bit.",
)
