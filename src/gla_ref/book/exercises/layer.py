"""Judges of the exercises on the GLA layer: its parameters, its states, its output (chapter 17)."""

import torch
import torch.nn.functional as F

from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, numbers


@ask("ex-layer-rank")
def rank():
    low, full, bias = 16 * (1024 + 512), 1024 * 512, 512
    mistakes = [
        ([low, full], "The bias is missing: 512 numbers in either."),
        ([16 * 1024 * 512 + bias, full + bias], "Two matrices, one after the other: their sizes add."),
        ([16 * 1024 + bias, full + bias], "The second matrix of the bottleneck is missing, [16, 512]."),
        ([low + bias, 1024 * 1024 + bias], "The gate has H K = 512 channels, not 1024."),
        ([full + bias, low + bias], "The two are exchanged: the bottleneck has fewer numbers."),
    ]
    hint = "Matrices [1024, 16] and [16, 512], or one [1024, 512], and a bias of 512."
    return numbers(["through the bottleneck", "as one matrix"], [low + bias, full + bias], mistakes, hint)


@exercise("ex-layer-heads", "derive")
def heads(answer):
    mistakes = {
        "That is one head's state; there are H of them.": lambda w, H: w * w / (2 * H * H),
        "A head has w / (2 H) key channels and w / H value channels, none of another head.": (lambda w, H: w * w / 2),
        "Keys have half the width: H K = w / 2.": lambda w, H: w * w / H,
        "More heads have smaller states, each by H twice.": lambda w, H: H * w * w / 2,
        "A state has a number for every pair of a key and a value channel: their product.": (lambda w, H: w / 2 + w),
    }
    hold(answer, [(1024, 4), (64, 1), (96, 8)], lambda w, H: w * w / (2 * H), mistakes, {"T": ""})


def _output(o, x, W_R, W_O, *, axes=(-1,), gate=F.silu, centre=False, late=False):
    """A token's y; `late` normalises the gated output."""
    u = gate(x @ W_R).view_as(o)
    y = u * o if late else o
    y = y - y.mean(-1, keepdim=True) if centre else y
    y = y / y.square().mean(axes, keepdim=True).sqrt() if axes else y
    return (y if late else u * y).flatten() @ W_O


@exercise("ex-layer-output", "implement")
def output(answer):
    mistakes = {
        "Each head has a norm of its own.": {"axes": (0, 1)},
        "The norm is missing.": {"axes": ()},
        "swish(y) is y times the logistic function of y.": {"gate": torch.sigmoid},
        "The gate goes through swish.": {"gate": lambda y: y},
        "RMSNorm subtracts no mean.": {"centre": True},
        "First the norm, then the gate.": {"late": True},
        "The gate is missing.": {"gate": torch.ones_like},
    }
    o, x, W_R, W_O = draw(17, (2, 3), (4,), (4, 6), (6, 4))
    hold(answer, [(3 * o + 1, x, W_R, W_O)], _output, variants(_output, mistakes), {"y": "w"})
