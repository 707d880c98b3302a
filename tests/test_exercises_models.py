"""Answers to the exercises of chapter 17, right ones and wrong ones with what they are told."""

from __future__ import annotations

import torch


def behind(norm=lambda o: o / o.norm(dim=-1, keepdim=True) * o.shape[-1] ** 0.5, swish=True, gate=True, after=False):
    """What follows the recurrence, head by head."""

    def form(o, x, W_R, W_O):
        y = x @ W_R
        u = torch.ones_like(y) if not gate else y / (1 + (-y).exp()) if swish else 1 / (1 + (-y).exp())
        parts = u.view_as(o)
        return ((norm(parts * o) if after else parts * norm(o)).reshape(-1)) @ W_O

    return form


def over_all(o):
    return o / o.norm() * o.numel() ** 0.5


def layer_norm(o):
    return (o - o.mean(-1, keepdim=True)) / o.var(-1, correction=0, keepdim=True).sqrt()


RIGHT = {
    "ex-layer-rank": [[25088, 524800], (25088, 524800.0)],
    "ex-layer-heads": [lambda w, H: H * (w / (2 * H)) * (w / H)],
    "ex-layer-output": [behind()],
    "ex-layer-context": [6144],
}

WRONG = {
    "ex-layer-rank": [([24576, 524288], "bias"), ([25088, 1], "Answer 2 of 2")],
    "ex-layer-heads": [
        (lambda w, H: (w / (2 * H)) * (w / H), "one head's"),
        (lambda w, H: (w / 2) * w, "no channel of another head"),
        (lambda w, H: w * (w / H), "half the width"),
        (lambda w, H: H * (w / 2) * w, "smaller states"),
        (lambda w, H: 1.5 * w, "their product"),
    ],
    "ex-layer-output": [
        (behind(over_all), "a norm of its own"),
        (behind(lambda o: o), "The norm is missing"),
        (behind(swish=False), "times the logistic"),
        (behind(layer_norm), "no mean"),
        (behind(after=True), "First the norm"),
        (behind(gate=False), "The gate is missing"),
        (lambda o, x, W_R, W_O: ((x @ W_R).view_as(o) * over_each(o)).flatten() @ W_O, "goes through swish"),
    ],
    "ex-layer-context": [(12288, "2 w numbers"), (5000, "12 w^2 weights")],
}


def over_each(o):
    return o / o.square().mean(-1, keepdim=True).sqrt()
