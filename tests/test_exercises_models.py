"""Answers to the exercises of chapters 17 to 19c, right ones and wrong ones with the replies they get."""

from __future__ import annotations

import math

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


# -- chapter 18 ------------------------------------------------------------------------------------


def diagonal(step=lambda b, n: b / (1 + b * n), power=2, scaled=True, order="fade", scale=1.0):
    """Longhorn, one step size a head, by einsum and with the state transposed."""

    def form(q, k, v, beta):
        S, rows = torch.zeros(v.shape[1], k.shape[1], dtype=q.dtype), []
        for a, b, c, s in zip(q, k, v, beta, strict=True):
            d = step(s, (b * b).sum())
            write = torch.einsum("v,k->vk", c, b) * (d if scaled else 1)
            fade = 1 - d * b.abs() ** power if power else torch.ones_like(b)
            S = (S + write) * fade if order == "late" else S * fade + write
            rows.append(scale * S @ a)
        return torch.stack(rows)

    return form


def full(q, k, v, beta):
    """The whole delta rule, implicit step."""
    S, rows = torch.zeros(k.shape[1], v.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        d = beta[t] / (1 + beta[t] * k[t].dot(k[t]))
        S = S - d * torch.outer(k[t], k[t] @ S) + d * torch.outer(k[t], v[t])
        rows.append(q[t] @ S)
    return torch.stack(rows)


def one_gate(q, k, v, beta):
    """The same gate in all rows."""
    d = beta / (1 + beta * k.square().sum(-1))
    S, rows = torch.zeros(k.shape[1], v.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        S = (1 - d[t] * k[t].square().sum()) * S + d[t] * torch.outer(k[t], v[t])
        rows.append(q[t] @ S)
    return torch.stack(rows)


RIGHT |= {
    "ex-models-states": [[8192, 16384, 8256, 12288]],
    "ex-models-order": [[4, 3], (4, 3)],
    "ex-models-clear": ["cef", ["c", "f", "e"]],
    "ex-models-turn": [lambda g, w: torch.polar(g.exp(), w).prod().real],
    "ex-models-longhorn": [diagonal()],
}

WRONG |= {
    "ex-models-states": [([8192, 16384, 8192, 12288], "one more value column"), ([8192, 16384, 8256, 7], "4 of 4")],
    "ex-models-order": [([4, 4], "too late"), ([2, 3], "Go through tokens")],
    "ex-models-clear": [("cdef", "lower bound"), ("ce", "One row's gate near 0")],
    "ex-models-turn": [
        (lambda g, w: torch.polar(g.exp(), w).real.prod(), "Angles add up"),
        (lambda g, w: torch.polar(g.exp(), w).prod().abs(), "That is the size"),
        (lambda g, w: torch.polar(g.exp(), w).prod().imag, "imaginary part"),
        (lambda g, w: g.exp().sum() * w.sum().cos(), "Sizes are multiplied"),
        (lambda g, w: g.prod() * w.sum().cos(), "logarithm of the size"),
    ],
    "ex-models-longhorn": [
        (diagonal(step=lambda b, n: b), "beta over 1"),
        (diagonal(scaled=False), "scaled by the step size"),
        (diagonal(power=1), "square of k"),
        (diagonal(power=0), "nothing fades"),
        (diagonal(order="late"), "own token's gate"),
        (diagonal(scale=3**-0.5), "scale is 1"),
        (one_gate, "same for all rows"),
        (full, "keeps its diagonal"),
    ],
}


def scattered(xs, t, correction=1):
    mean = sum(xs) / len(xs)
    variance = sum((x - mean) ** 2 for x in xs) / (len(xs) - correction)
    return mean, t * (variance / len(xs)) ** 0.5


def bits_of(losses, sizes, sources, base=2.0):
    """Bits per byte with one-hot rows for the sources."""
    members = torch.nn.functional.one_hot(sources).double().T
    return members @ losses / math.log(base) / (members @ sizes), losses.sum() / (math.log(base) * sizes.sum())


def one_by_one(logits_of, text, n, since=None, ahead=1, place=-1):
    """Bits for each token after the first n, one window at a time; `since`: where all windows begin."""
    found = []
    for t in range(n, len(text)):
        window = text[t - n if since is None else since : t]
        p = logits_of(window[None])[0, place].softmax(-1)
        found.append(-p[text[t - 1 + ahead]].log2())
    return torch.stack(found)


def carried(alpha, u, size, first=0, keep=1.0, own=0):
    """The state as a sum of all writes, each times the gates after it; the gradient of writes since the last cut."""
    T = len(u)
    since = max(t for t in range(T) if t % size == first)
    gates = [alpha[t + 1 - own :].prod() for t in range(T)]
    after = [alpha[t + 1 :].prod() for t in range(T)]
    S = sum(after[t] * u[t] * (keep if t < since else 1.0) for t in range(T))
    return S, torch.stack([gates[t] if t >= since else 0 * gates[t] for t in range(T)])


RIGHT |= {
    "ex-learns-baseline": [lambda pairs, again: (pairs + again) ** -1],
    "ex-learns-epsilon": [[0.002, 0.8944], (2e-6 / (1e-6 + 4e-12) ** 0.5, 0.894)],
    "ex-learns-interval": [scattered, lambda xs, t: [xs.mean(), t * xs.std() / len(xs) ** 0.5]],
    "ex-learns-strong": [lambda C, limit: 0.6931471805599453 / (limit / C)],
    "ex-learns-judge": ["ad", "d, a", ["a", "d"]],
    "ex-learns-design": ["ad", ["d", "a"]],
    "ex-text-bits": [bits_of],
    "ex-text-stream": [lambda parts, left: (((1 - left) / left) / parts) ** 0.5],
    "ex-text-loud": ["bd", "d, b"],
    "ex-far-cut": [one_by_one],
    "ex-far-reach": [lambda a, b, left: math.log2(1 / left) / (0.5 / a + 0.5 / b)],
    "ex-far-passing": [carried],
    "ex-text-judge": ["ad", "d, a"],
    "ex-far-judge": ["ad", "d, a"],
}

WRONG |= {
    "ex-learns-baseline": [
        (lambda pairs, again: 1 / pairs, "are in the pairs, too"),
        (lambda pairs, again: 1 / (pairs + 2 * again), "one more, not two"),
        (lambda pairs, again: 0.5 / (pairs + again), "not keys"),
        (lambda pairs, again: 1 / (pairs - again), "added, not taken away"),
        (lambda pairs, again: (1 - again / (2 * pairs)) / (pairs + again), "one right value"),
    ],
    "ex-learns-epsilon": [([0.894, 0.002], "exchanged"), ([0.002, 0.5], "Answer 2 of 2")],
    "ex-learns-interval": [
        (lambda xs, t: scattered(xs, t, 0), "Divide by n - 1"),
        (lambda xs, t: (xs.mean(), t * xs.var() / len(xs) ** 0.5), "take its root"),
        (lambda xs, t: (xs.mean(), t * xs.std()), "one run scatters"),
        (lambda xs, t: (xs.mean(), 2 * scattered(xs, t)[1]), "whole width"),
        (lambda xs, t: scattered(xs, 1.0), "Multiply by t"),
    ],
    "ex-learns-strong": [
        (lambda C, limit: C / limit, "sum to -ln 2"),
        (lambda C, limit: limit / (0.6931471805599453 * C), "other way round"),
        (lambda C, limit: C / (0.6931471805599453 * limit), "not in halvings"),
        (lambda C, limit: 0.6931471805599453 / limit, "their sum counts"),
    ],
    "ex-learns-judge": [
        ("a", "d is missing"),
        ("abd", "b does not belong to it"),
        ("acd", "c does not belong to it"),
        ("d", "a is missing"),
    ],
    "ex-text-bits": [
        (lambda *x: bits_of(*x, base=math.e), "to base 2"),
        (lambda losses, sizes, sources: bits_of(losses, sizes / sizes, sources), "bits of a token"),
        (lambda losses, sizes, sources: bits_of(losses / sizes, sizes / sizes, sources), "short tokens too much"),
        (lambda *x: (bits_of(*x)[0], sum(bits_of(*x)[0]) / len(bits_of(*x)[0])), "a short source"),
    ],
    "ex-text-stream": [
        (lambda parts, left: (1 - left) / left / parts, "take its root"),
        (lambda parts, left: ((1 - left) / left) ** 0.5 / parts, "below the root"),
        (lambda parts, left: ((1 - left) / left) ** 0.5, "not one"),
        (lambda parts, left: ((1 - left) / parts) ** 0.5, "more than its share"),
        (lambda parts, left: (left / (1 - left) / parts) ** 0.5, "other way round"),
        (lambda parts, left: ((1 - left**2) / parts) ** 0.5 / left, "not of the standard deviation"),
    ],
    "ex-text-loud": [
        ("b", "d is missing"),
        ("bcd", "c does not belong to it"),
        ("abd", "a does not belong to it"),
        ("bde", "e does not belong to it"),
        ("d", "b is missing"),
    ],
    "ex-far-cut": [
        (lambda f, text, n: one_by_one(f, text, n, since=0), "a window of its own"),
        (lambda f, text, n: one_by_one(f, text, n, ahead=0), "score the one after"),
        (lambda f, text, n: one_by_one(f, text, n) * math.log(2), "to base 2"),
        (lambda f, text, n: one_by_one(f, text, n, place=0), "not the first"),
    ],
    "ex-far-reach": [
        (lambda a, b, left: -0.5 * math.log2(left) * (a + b), "Halvings add up"),
        (lambda a, b, left: -math.log2(left) * a, "shorten the reach"),
        (lambda a, b, left: -math.log2(left) * b, "Every second gate is open"),
        (lambda a, b, left: -math.log(left) * 2 * a * b / (a + b), "to base 2"),
        (lambda a, b, left: -math.log2(left) * a * b / (a + b), "pairs of tokens"),
        (lambda a, b, left: math.log2(left) * 2 * a * b / (a + b), "Mind the sign"),
    ],
    "ex-far-passing": [
        (lambda alpha, u, size: carried(alpha, u, len(u)), "detach the state"),
        (lambda alpha, u, size: carried(alpha, u, size, keep=0.0), "itself is passed on"),
        (lambda alpha, u, size: carried(alpha, u, size, first=1), "not after it"),
        (lambda alpha, u, size: carried(alpha, u, size, own=1), "own gate"),
    ],
    "ex-far-judge": [
        ("a", "d is missing"),
        ("abd", "b does not belong to it"),
        ("acd", "c does not belong to it"),
        ("ade", "e does not belong to it"),
        ("d", "a is missing"),
    ],
    "ex-text-judge": [
        ("a", "d is missing"),
        ("abd", "b does not belong to it"),
        ("acd", "c does not belong to it"),
        ("ade", "e does not belong to it"),
        ("d", "a is missing"),
    ],
    "ex-learns-design": [
        ("a", "d is missing"),
        ("abd", "b does not belong to it"),
        ("acd", "c does not belong to it"),
        ("ade", "e does not belong to it"),
        ("d", "a is missing"),
    ],
}
