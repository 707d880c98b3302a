"""Answers to the exercises of chapters 9 to 15, right ones and wrong ones with the replies they get."""

from __future__ import annotations

import math

import torch

LN2 = math.log(2)


def after(g, first=1):
    """Row j: the sum of the gates from token j + first on, token by token."""
    zero = torch.zeros_like(g[0])
    return torch.stack([g[j + first :].sum(0) if j + first < len(g) else zero for j in range(len(g))])


def by_difference(g):
    b = g.cumsum(0)
    return b[-1] - b


# -- chapter 9 ---------------------------------------------------------------------------------------


def retention(gates=lambda i, j: i - j, last=lambda i: i + 1, scaled=True):
    """Token by token, straight from the sum; `last` is the first token that is not read."""

    def form(q, k, v, gamma):
        o = torch.zeros_like(v)
        for i in range(len(q)):
            for j in range(min(last(i), len(q))):
                o[i] += gamma ** gates(i, j) * (q[i] @ k[j]) * v[j]
        return o / q.shape[1] ** 0.5 if scaled else o

    return form


def by_fft(filter=lambda gamma, t: gamma**t, points=2, shift=0, backwards=False, turned=False):
    """States of a constant decay as a product of Fourier transforms; `shift` puts the filter later."""

    def form(k, v, gamma):
        T = len(k)
        writes = (v[:, :, None] * k[:, None] if turned else k[:, :, None] * v[:, None]).flatten(1)
        writes = writes.flip(0) if backwards else writes
        h = filter(gamma, torch.arange(T).double()).roll(shift)
        h[:shift] = 0
        n = points * T
        product = torch.fft.rfft(h, n)[:, None] * torch.fft.rfft(writes, n, 0)
        S = torch.fft.irfft(product, n, 0)[:T].unflatten(1, (v if turned else k).shape[1:] + (-1,))
        return S.flip(0) if backwards else S

    return form


def walk(gate_old=0, gate_write=0, gate_read=0):
    """The recurrence, with further powers of the gate on the state, on the write and on the read."""

    def form(q, k, v, g):
        S, o = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
        for t in range(q.shape[1]):
            a = g[:, t, ..., None].exp()
            S = a**gate_old * S + a**gate_write * torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], a**gate_read * S) / q.shape[-1] ** 0.5)
        return torch.stack(o, 1), S

    return form


# -- chapter 10 ---------------------------------------------------------------------------------------


def from_state(q, b, d, S_0):
    o = torch.stack([q[i] @ ((b[i][:, None] + d[i]).exp() * S_0) for i in range(len(q))])
    return o, torch.diag(b[-1].exp()) @ S_0 @ torch.diag(d[-1].exp())


def centred(anchor=lambda b: b[-1] / 2, mask=torch.tril, scaled=True):
    def form(q, k, v, g):
        b = g.cumsum(0)
        r = anchor(b)
        P = mask((q * (b - r).exp()) @ (k * (r - b).exp()).T)
        return P @ v / (q.shape[1] ** 0.5 if scaled else 1)

    return form


def final(decay):
    def form(k, v, g):
        return sum(torch.outer(k[j] * d.exp(), v[j]) for j, d in enumerate(decay(g)))

    return form


# -- chapter 11 ---------------------------------------------------------------------------------------


def step(to_end=after, whole=lambda g: g.sum(0)):
    def form(S, k, v, g, g_v):
        kept = torch.outer(whole(g).exp(), whole(g_v).exp()) * S
        return kept + (k * to_end(g).exp()).T @ (v * to_end(g_v).exp())

    return form


# -- chapter 12 --------------------------------------------------------------------------------------


def prepared(to_end=after, C=None, scale=None, on_k=1.0, power=torch.exp):
    def form(q, k, g, chunk):
        q_g, k_g = [], []
        for n in range(0, len(q), C or chunk):
            q_n, k_n, g_n = (x[n : n + (C or chunk)] for x in (q, k, g))
            q_g.append((scale or 3**-0.5) * q_n * power(g_n.cumsum(0)))
            k_g.append(on_k * k_n * power(to_end(g_n)))
        return torch.cat(q_g), torch.cat(k_g)

    return form


# -- chapter 13 --------------------------------------------------------------------------------------


def pairs(q, k, g):
    """Scores pair by pair."""
    P = torch.zeros(len(q), len(q)).double()
    for i in range(len(q)):
        for j in range(i + 1):
            P[i, j] = (q[i] * k[j] * g[j + 1 : i + 1].sum(0).exp()).sum()
    return P


def two_ways(mild=lambda g: g.sum(0) >= -80, mask=torch.tril, strong=pairs):
    def form(q, k, g):
        own = mild(g)
        b = g[:, own].cumsum(0)
        r = b[-1] / 2
        P = mask((q[:, own] * (b - r).exp()) @ (k[:, own] * (r - b).exp()).T)
        return P + strong(q[:, ~own], k[:, ~own], g[:, ~own])

    return form


# -- chapters 14 and 16 ------------------------------------------------------------------------------


def carried(before=True, start=True, decay=lambda a, n: a[n], inside=False):
    def form(a, own, S):
        state, states = S if start else 0 * S, []
        for n in range(len(own)):
            states.append(state)
            state = torch.diag(decay(a, n)) @ state + (torch.diag(a[n]) @ own[n] if inside else own[n])
            states[-1] = states[-1] if before else state
        return torch.stack(states), state

    return form


def steps(count=lambda m, n: m, gates=lambda m, n: m, own=False):
    """Token by token, the gates of `gates` and the writes of `count`; with its own gate on a write, or without."""

    def form(S, k, v, g, m):
        S = S.clone()
        for t in range(gates(m, len(k))):
            write = torch.outer(k[t], v[t]) if t < count(m, len(k)) else 0 * S
            a = torch.diag(g[t].exp())
            S = a @ (S + write) if own else a @ S + write
        return S

    return form


# -- chapter 15 --------------------------------------------------------------------------------------


def to_the_end(x, axis=0):
    total = x.sum(axis, keepdim=True)
    return total - x.cumsum(axis) + x


def scalar(final=True, sign=1, own=True, total=lambda x: to_the_end(x, 1)):
    def form(q, k, dq, dk, S_T, D):
        terms = sign * torch.einsum("bthk,bthk->bth", q, dq) - sign * (k * dk).sum(-1)
        dg = total(terms) - (0 if own else terms)
        return dg + torch.einsum("bhkv,bhkv->bh", S_T, D)[:, None] if final else dg

    return form


def chunk_pairs(rounded=True, turn=to_the_end, writer=1.0, inside=True):
    def form(q, k, g, dP, low):
        b = g.cumsum(0)
        r = g.sum(0) / 2
        x, y = q * (b - r).exp(), k * (r - b).exp()
        x_low, y_low, dP = (low(x), low(y), low(dP)) if rounded else (x, y, dP)
        x, y = (x_low, y_low) if inside else (x, y)
        return turn(x * (dP @ y_low) - writer * y * (dP.T @ x_low))

    return form


def values(final=-2, sign=1, own=True, total=lambda x: to_the_end(x, 1)):
    def form(o, do, v, dv, S_T, D):
        terms = sign * (o * do - v * dv)
        dg = total(terms) - (0 if own else terms)
        return dg if final is None else dg + (S_T * D).sum(final)[:, None]

    return form


RIGHT = {
    "ex-gates-reset": [[[1], [1, 2], [1, 2, 3], [2, 3, 4]], [{1}, {2, 1}, (1, 2, 3), {2, 3, 4}]],
    "ex-gates-bias": [lambda h, tau: -math.log(2 ** (tau / h) - 1)],
    "ex-gates-retention": [retention()],
    "ex-gates-convolution": [by_fft(), by_fft(points=3)],
    "ex-gates-order": [walk(gate_old=1, gate_write=1)],
    "ex-parallel-padding": [dict(k=0, v=0, g=0), dict(k=0, v=7, g=0.0), dict(k=-2, v=0, g=-0.0)],
    "ex-parallel-two-sided": [from_state],
    "ex-parallel-anchor": [centred(), centred(lambda b: (b[0] + b[-1]) / 2)],
    "ex-parallel-final": [final(after)],
    "ex-twolevel-anchor": [[16, 17], {17, 16}],
    "ex-twolevel-extremes": [["recurrent", "parallel_log", "chunkwise"]],
    "ex-twolevel-best": [lambda C: (0.3 * C) ** 0.5],
    "ex-twolevel-update": [step()],
    "ex-fuse-grid": [[84, 84, 36, 84]],
    "ex-fuse-narrow": [lambda x, y: (abs(x) + abs(y)) * LN2 / 256],
    "ex-fuse-sum": [2.4, 2.5, 2],
    "ex-fuse-one": [lambda NK, T, V: (NK - 1) * (8 * T * V + 2 * T * V)],
    "ex-fuse-prepare": [prepared()],
    "ex-adaptive-level": [[(1, 6), (5, 32), (2, 28)], [[1, 6], [5, 32], [2, 28]]],
    "ex-adaptive-range": [lambda b: b[-1] + (b.max(0).values - b.min(0).values) / 2],
    "ex-adaptive-channels": [two_ways(), pairs],
    "ex-adaptive-small": [28 * LN2, 19.4],
    "ex-adaptive-difference": [["bfloat16", "float16"], ("float16", "bfloat16")],
    "ex-kernel-grid": [[8, 1024, 128, 64]],
    "ex-kernel-tiles": [lambda e, memory, exponentials: 2 * e * exponentials / memory + 1],
    "ex-kernel-carry": [carried()],
    "ex-decode-crossing": [lambda K, V, e: 4 / e / (1 / K + 1 / V)],
    "ex-decode-batch": [77],
    "ex-decode-bfloat16": [3.0, 3],
    "ex-decode-accept": [steps()],
    "ex-gradients-first": [lambda S, dS: torch.einsum("bhkv,bhkv->bhk", S, dS)],
    "ex-gradients-stored": ["about as large"],
    "ex-gradients-scalar": [scalar()],
    "ex-gradients-pairs": [[855, 990, 494, 78]],
    "ex-gradients-values": [values()],
    "ex-gradients-states": [lambda K, V: 2 / (3 / V + 1 / K)],
    "ex-gradients-same": [chunk_pairs()],
    "ex-gradients-chunk": [[4, 1 / 16], (3, 0.0625)],
}

#: label -> wrong answers that the judge does not list itself, each with words that name its mistake
WRONG = {
    "ex-gates-reset": [
        ([[1], [2], [3], [4]], "Follow each channel by itself"),
        ([1, 2, 3, 4], "Expected a list of four lists"),
    ],
    "ex-gates-bias": [
        (lambda h, tau: math.log(2 ** (tau / h) - 1), "The sign is turned round"),
        (lambda h, tau: -math.log(2 ** (1 / h) - 1), "tau is missing"),
        (lambda h, tau: -math.log(2 ** (1 / h / tau) - 1), "tau is on the wrong side"),
        (lambda h, tau: -math.log(math.exp(tau / h) - 1), "ln 2 is missing"),
        (lambda h, tau: -math.log(LN2 * tau / h), "long half-lives only"),
        (lambda h, tau: h / tau, "for the arguments 256, 1"),
    ],
    "ex-gates-retention": [
        (retention(scaled=False), "scale is forgotten"),
        (retention(last=lambda i: 10**9), "The mask is missing"),
        (retention(last=lambda i: i), "misses its own write"),
        (retention(gates=lambda i, j: i - j + 1), "own gate is counted"),
        (retention(gates=lambda i, j: j - i), "upside down"),
        (retention(gates=lambda i, j: 0), "no decay"),
    ],
    "ex-gates-convolution": [
        (by_fft(points=1), "The end comes round to the beginning"),
        (by_fft(lambda gamma, t: gamma ** (t + 1)), "decayed by its own gate as well"),
        (by_fft(lambda gamma, t: gamma ** (len(t) - 1 - t)), "The filter is the wrong way round"),
        (by_fft(backwards=True), "Time runs backwards"),
        (by_fft(lambda gamma, t: 0 * t + 1), "There is no decay"),
        (by_fft(shift=1), "misses its own write"),
        (by_fft(turned=True), "a row for each channel of k"),
        (lambda k, v, gamma: by_fft()(k, v, gamma)[-1], "S: expected shape [7, 3, 4], got [3, 4]"),
    ],
    "ex-gates-order": [
        (walk(gate_old=1), "That is gate before write"),
        (walk(gate_old=1, gate_write=-1), "goes the other way"),
        (walk(gate_old=1, gate_read=1), "reader's gate twice"),
        (
            lambda q, k, v, g: walk(gate_old=1)(q, k, v, g.roll(1, 1).index_fill(1, torch.tensor(0), 0)),
            "Shifting the gates",
        ),
    ],
    "ex-parallel-padding": [
        (dict(k=0, v=0, g=-math.inf), "clears the state"),
        (dict(k=0, v=0, g=-1.0), "less than 1: it fades"),
        (dict(k=1, v=2, g=0), "The padding writes"),
        (dict(k=0, v=0, g=1), "a log gate is at most 0"),
        (dict(k=0, v=math.nan, g=0), "finite"),
        (0, "Expected dict(k=..., v=..., g=...)"),
        (dict(k=0), "a number for each"),
    ],
    "ex-parallel-two-sided": [
        (lambda q, b, d, S: from_state(q, b, 0 * d, S), "gate on the values is missing"),
        (
            lambda q, b, d, S: (from_state(q, b, d, S)[0], from_state(q, b, 0 * d, S)[1]),
            "the columns of the final state have decayed",
        ),
        (
            lambda q, b, d, S: (from_state(q, b, d, S)[0], from_state(q, 0 * b, d, S)[1]),
            "the rows of the final state have decayed",
        ),
        (lambda q, b, d, S: (from_state(q, b, -d, S)[0], from_state(q, b, d, S)[1]), "exp(-d) divides"),
        (
            lambda q, b, d, S: (q @ from_state(q, b, d, S)[1], from_state(q, b, d, S)[1]),
            "Every token reads the final state",
        ),
    ],
    "ex-parallel-anchor": [
        (centred(scaled=False), "scale is forgotten"),
        (centred(lambda b: torch.zeros_like(b[0])), "That is the ratio form"),
        (centred(lambda b: b[-1]), "The whole total is subtracted"),
        (centred(lambda b: b[len(b) // 2]), "b at the middle token"),
        (centred(lambda b: b[-1].mean() / 2), "the same for all channels"),
        (centred(mask=lambda P: P * torch.ones_like(P).tril()), "The mask is a factor"),
        (centred(mask=lambda P: P), "The mask is missing"),
        (centred(mask=lambda P: P.tril(-1)), "The mask is strict"),
    ],
    "ex-parallel-final": [
        (final(by_difference), "b_T - b_j is a difference"),
        (final(lambda g: after(g, 0)), "decayed by its own gate"),
        (final(lambda g: g.cumsum(0)), "The sums run from the start"),
        (final(torch.zeros_like), "No decay"),
        (final(lambda g: after(g.roll(-1, 0), 0)), "roll brings the first"),
    ],
    "ex-twolevel-extremes": [(["a", "b", "c"], "Expected three names")],
    "ex-twolevel-best": [
        (lambda C: (0.6 * C) ** 0.5, "half of it on average"),
        (lambda C: 0.3 * C, "square root is missing"),
        (lambda C: (C / 0.3) ** 0.5, "upside down"),
        (lambda C: (C / 2) ** 0.5, "do not cost the same"),
        (lambda C: (3 * C / 16) ** 0.5, "does not depend on c"),
        (lambda C: 4 if C == 64 else 8, "power of two"),
        (lambda C: 16, "c is 16 instead of 4.382 for the arguments 64"),
    ],
    "ex-twolevel-update": [
        (step(by_difference), "b_C - b_j is a difference"),
        (step(lambda g: after(g, 0)), "by its own gates as well"),
        (step(lambda g: g.cumsum(0)), "from the chunk's start"),
        (step(torch.zeros_like), "The writes are not decayed"),
        (step(whole=lambda g: 0 * g[0].clamp_min(-1)), "The old state is not decayed"),
        (lambda S, k, v, g, g_v: step()(S, k, v, g, torch.zeros_like(g_v)), "The gate on the values is missing"),
        (lambda S, k, v, g, g_v: step()(0 * S, k, v, g, g_v) + g.sum(0).exp()[:, None] * S, "The old state's columns"),
        (lambda S, k, v, g, g_v: step()(S, 0 * k, v, g, g_v) + (k * after(g).exp()).T @ v, "The values have to decay"),
    ],
    "ex-fuse-grid": [([1, 2, 3, 4], "Blocks of channels times chunks")],
    "ex-fuse-narrow": [
        (lambda x, y: (abs(x) + abs(y)) * LN2 * 2**-24, "float32's unit roundoff"),
        (lambda x, y: (abs(x) + abs(y)) * LN2 * torch.finfo(torch.bfloat16).eps, "half of it"),
        (lambda x, y: (abs(x) + abs(y)) * LN2 / 512, "2 ** -9 is too small"),
        (lambda x, y: (abs(x) + abs(y)) / 256, "ln 2 is missing"),
        (lambda x, y: abs(x - y) * LN2 / 256, "not their difference"),
        (lambda x, y: abs(x) * LN2 / 256, "not only one"),
        (lambda x, y: 2 ** ((abs(x) + abs(y)) / 256) - 1, "first order"),
    ],
    "ex-fuse-sum": [
        (1, "a single kernel"),
        (1.5, "More: each of sum"),
        (5, "Less: the largest"),
        ("many", "Expected a number, got 'many'"),
    ],
    "ex-fuse-one": [
        (lambda NK, T, V: 10 * NK * T * V, "NK - 1 are saved"),
        (lambda NK, T, V: 8 * (NK - 1) * T * V, "v is missing"),
        (lambda NK, T, V: 6 * (NK - 1) * T * V, "6 bytes are too few"),
        (lambda NK, T, V: 4 * (NK - 1) * T * V, "Only the writing of o"),
        (lambda NK, T, V: 12 * (NK - 1) * T * V, "v is bfloat16"),
        (lambda NK, T, V: 3 * (NK - 1) * T * V, "Those are numbers"),
    ],
    "ex-fuse-prepare": [
        (prepared(by_difference), "last_decay - b is a difference"),
        (prepared(lambda g: after(g, 0)), "by its own gate as well"),
        (prepared(lambda g: g.cumsum(0)), "from the chunk's start"),
        (prepared(C=10**9), "The sums are not restarted"),
        (prepared(scale=1.0), "scale is forgotten"),
        (prepared(on_k=3**-0.5), "scale is on k as well"),
        (prepared(power=torch.exp2), "exp2 needs sums of g / ln 2"),
        (prepared(power=lambda b: (b / LN2).exp()), "belong to exp2"),
    ],
    "ex-adaptive-level": [
        ([(0, 0), (0, 0), (0, 0)], "The highest bit"),
        ([6, 32, 28], "Expected a list of three pairs"),
    ],
    "ex-adaptive-range": [
        (lambda b: b[-1] / 2, "the chapter's anchor"),
        (lambda b: (b[-1] - b[0]) / 2, "Half of the interval's length"),
        (lambda b: b.mean(0), "only the two ends"),
        (lambda b: b[len(b) // 2], "b at the middle token"),
        (lambda b: ((b[0] + b[-1]) / 2).mean().expand(3), "One anchor for all channels"),
    ],
    "ex-adaptive-channels": [
        (two_ways(lambda g: g[0] <= 0), "One product for all channels"),
        (two_ways(strong=lambda q, k, g: 0), "The strong channels are left out"),
        (two_ways(mask=torch.zeros_like), "The mild channels are left out"),
        (two_ways(mask=lambda P: P), "not masked"),
        (two_ways(mask=lambda P: P.tril(-1)), "lacks its diagonal"),
        (two_ways(lambda g: g.amin(0) >= -80), "by the sum of its gates"),
        (lambda q, k, g: pairs(q, k, g) / 5**0.5, "scale is no part"),
    ],
    "ex-adaptive-difference": [
        (["bfloat16"], "float16 is missing. It rounds by up to 5e-04; with 32"),
        (["float32", "float16", "bfloat16"], "float32 does not belong to it"),
        (["float16"], "bfloat16 is missing. It rounds by up to 4e-03"),
        (["int8"], "Expected some of float32"),
    ],
    "ex-adaptive-small": [
        (14 * LN2, "twice as much"),
        (48 * LN2, "the smallest number of all"),
        (28, "powers of two"),
        (80, "set it to 2^-14"),
    ],
    "ex-kernel-grid": [
        ([4, 1024, 64, 64], "two"),
        ([4096, 1, 1, 1], "A program a chunk"),
        ([8, 65536, 128, 4096], "A round is a chunk"),
        ([8, 1024, 8, 64], "programs of its own"),
        ([8, 1024, 128, 1024], "its own 4096 tokens"),
        ([8, 1024, 16, 64], "Programs: columns / 64"),
    ],
    "ex-kernel-tiles": [
        (lambda e, memory, exponentials: 2 * e * exponentials / memory, "only n - 1"),
        (lambda e, memory, exponentials: 1 + 4 * e * exponentials / memory, "two exponentials"),
        (lambda e, memory, exponentials: 1 + e * exponentials / memory, "four times K"),
        (lambda e, memory, exponentials: 1 + 2 * e * memory / exponentials, "upside down"),
        (lambda e, memory, exponentials: 1 + 2 * exponentials / memory, "4 e K bytes"),
    ],
    "ex-kernel-carry": [
        (carried(before=False), "the one before it"),
        (carried(decay=lambda a, n: torch.ones_like(a[n])), "belongs to the rows"),
        (carried(decay=lambda a, n: a[n - 1] if n else torch.ones_like(a[n])), "not by the one before"),
        (carried(start=False), "starts from S"),
        (carried(inside=True), "inside of it already"),
        (lambda a, own, S: carried()(a, own, S)[0], "Expected 2 result(s), starts, final; got"),
    ],
    "ex-decode-crossing": [
        (lambda K, V, e: K * V / (K + V), "The state is float32"),
        (lambda K, V, e: 4 * V / e, "K + V numbers"),
        (lambda K, V, e: e * (K + V) / (4 * K * V), "The other way round"),
        (lambda K, V, e: 8 * K * V / (e * (K + V)), "kept once"),
        (lambda K, V, e: K * V / (e * (K + V)), "4 K V bytes"),
    ],
    "ex-decode-batch": [
        (153, "read and written"),
        (1221, "16 heads"),
        (306, "4 bytes a number"),
        (76, "not quite enough"),
        (1, "half a microsecond"),
        (200, "Sequences times 8 K V"),
    ],
    "ex-decode-bfloat16": [
        (3 * 0.999**1000, "the exact decay"),
        (0.0, "move at all"),
        (2.984375, "less than halfway"),
        (2.9, "2^-6 apart"),
    ],
    "ex-decode-accept": [
        (steps(lambda m, n: n, lambda m, n: n), "leave no trace"),
        (steps(gates=lambda m, n: n), "but their gates are not"),
        (lambda S, k, v, g, m: S + steps()(0 * S, k, v, g, m), "has not decayed"),
        (steps(own=True), "own gate is not among them"),
        (lambda S, k, v, g, m: torch.diag(g[:m].sum(0).exp()) @ S + k[:m].T @ v[:m], "The writes have not"),
        (steps(lambda m, n: m + 1, lambda m, n: m + 1), "one more"),
    ],
    "ex-gradients-first": [
        (lambda S, dS: (S * dS).sum(-2), "each of which has its own gate"),
        (lambda S, dS: S * dS, "all of a row share its gate"),
        (lambda S, dS: (S * dS).sum(), "Summed over everything"),
        (lambda S, dS: dS.sum(-1), "S_0 is missing"),
        (lambda S, dS: -(S * dS).sum(-1), "The sign"),
        (lambda S, dS: torch.zeros(1, 2, 3).double(), "0 only without S_0"),
    ],
    "ex-gradients-stored": [("small", "Expected one of"), (3, "Expected a word")],
    "ex-gradients-scalar": [
        (
            lambda q, k, dq, dk, S_T, D: to_the_end(q * dq - k * dk, 1) + (S_T * D).sum(-1)[:, None],
            "one gate for all channels",
        ),
        (scalar(total=lambda x: x.cumsum(1)), "The sum runs from the start"),
        (scalar(own=False), "own term is missing"),
        (scalar(total=lambda x: x), "sum over the later tokens is missing"),
        (scalar(sign=-1), "The sign"),
        (scalar(final=False), "The final state is missing"),
    ],
    "ex-gradients-values": [
        (values(final=-1), "summed over its columns"),
        (values(final=None), "The final state is missing"),
        (values(total=lambda x: x.cumsum(1)), "The sum runs from the start"),
        (values(own=False), "own term is missing"),
        (values(total=lambda x: x), "sum over the later tokens is missing"),
        (values(sign=-1), "The sign"),
        (lambda *x: values()(*x).sum(-1), "nothing is summed over the columns"),
    ],
    "ex-gradients-states": [
        (lambda K, V: K * V / (3 * K + V), "Two states are kept"),
        (lambda K, V: 2 * K * V / (2 * K + V), "three tensors with K channels"),
        (lambda K, V: (3 * K + V) / (2 * K * V), "upside down"),
        (lambda K, V: K / 2, "for the arguments 64, 96"),
    ],
    "ex-gradients-same": [
        (chunk_pairs(inside=False), "All pairs lie after token 1"),
        (chunk_pairs(rounded=False), "Nothing is rounded"),
        (chunk_pairs(turn=lambda x: x), "sum over the later tokens is missing"),
        (chunk_pairs(turn=lambda x: x.cumsum(0)), "runs from the start"),
        (chunk_pairs(turn=lambda x: -to_the_end(x)), "The sign"),
        (chunk_pairs(writer=0.0), "The writer's side is missing"),
    ],
    "ex-gradients-chunk": [
        ([16, 1 / 16], "partly cancel"),
        ([1, 1 / 16], "adds and takes away more pairs"),
        ([4, 16], "longer chunks have fewer states"),
        ([4, 1 / 4], "one state and one gradient"),
        ([4], "Expected two factors"),
    ],
}


def test_every_late_exercise_is_tried():
    assert len(RIGHT) >= 30 and set(WRONG) <= set(RIGHT)
