"""Answers to the exercises of chapters 20 to 24, right ones and wrong ones with the replies they get."""

from __future__ import annotations

import torch

# -- chapter 20 --------------------------------------------------------------------------------------


def by_substitution(reads=lambda i, T: range(i), on_old=1, on_new=1, sign=1, old=True):
    """Token by token, without a matrix; `reads` says whose writes a token finds."""

    def form(S, k, v, beta):
        w = torch.zeros_like(v)
        for i in range(len(k)):
            found = sum(((k[i] @ k[j]) * w[j] for j in reads(i, len(k))), torch.zeros_like(v[0]))
            w[i] = beta[i] ** on_new * (v[i] - (k[i] @ S if old else 0)) - sign * beta[i] ** on_old * found
        return w

    return form


def backwards(S, k, v, beta):
    return by_substitution()(S, k.flip(0), v.flip(0), beta.flip(0)).flip(0)


def erased(whole=True, strength=1, reverse=False):
    """I - K^T W with the decays of a chunk."""

    def form(k, g, beta):
        M = torch.eye(k.shape[1]).double()
        for t in reversed(range(len(k))) if reverse else range(len(k)):
            M = M - strength * beta[t] * k[t][:, None] * (k[t] @ M)[None]
        return M * torch.exp(g.sum()) if whole else M

    return form


def flipped(bits, beta=2.0, v=0.0):
    return [1.0] * len(bits), [v] * len(bits), [beta * b for b in bits.tolist()]


RIGHT = {
    "ex-delta-thrice": [[4, 6, 7], (4.0, 6.0, 7.0)],
    "ex-delta-angle": [lambda c, v1, v2: v1 + c * (v2 - c * v1)],
    "ex-delta-writes": [by_substitution()],
    "ex-delta-transition": [erased()],
    "ex-delta-parity": [flipped, lambda bits: (bits, 0 * bits, 2 + 0 * bits)],
}

#: label -> wrong answers that the judge does not list itself, each with words that name its mistake
WRONG = {
    "ex-delta-thrice": [([4, 4, 4], "half of that comes on top"), ([8, 12, 14], "halfway to 8")],
    "ex-delta-angle": [
        (lambda c, v1, v2: v1 + c * v2, "That is linear attention"),
        (lambda c, v1, v2: v1 + c * (v2 - v1), "rho is counted once"),
        (lambda c, v1, v2: v1 + c * (v2 + c * v1), "The sign"),
        (lambda c, v1, v2: v1, "changes the answer of k_1"),
        (lambda c, v1, v2: v2, "the answer of k_2"),
        (lambda c, v1, v2: v1 - c * c * v1 + v2, "with the factor rho"),
        (lambda c, v1, v2: 0.0, "for the arguments 0.5, 2, 3"),
    ],
    "ex-delta-writes": [
        (by_substitution(lambda i, T: ()), "correct the writes of earlier tokens"),
        (by_substitution(old=False), "The state before the chunk is missing"),
        (backwards, "The triangle is the upper one"),
        (by_substitution(sign=-1), "The sign of A"),
        (by_substitution(on_old=0), "beta is missing in A"),
        (by_substitution(on_new=0), "beta is missing on the right"),
        (by_substitution(on_old=2), "counted twice"),
        (
            lambda S, k, v, beta: (1 / (1 / beta + (k * k).sum(1)))[:, None] * (v - k @ S),
            "The first difference is at token 1",
        ),
    ],
    "ex-delta-transition": [
        (erased(whole=False), "The gates are missing"),
        (erased(strength=-1), "The sign"),
        (erased(strength=0), "Nothing is erased"),
        (erased(reverse=True), "The order is wrong"),
        (lambda k, g, beta: torch.exp(g.sum()) * (torch.eye(3) - (beta * k.T) @ k), "right for orthogonal keys only"),
        (lambda k, g, beta: erased()(k, g, beta)[0], "M: expected shape [3, 3], got [3]"),
    ],
    "ex-delta-parity": [
        (lambda bits: flipped(bits, 1.0), "beta = 1 erases"),
        (lambda bits: flipped(bits, 0.0), "The state does not change"),
        (lambda bits: flipped(1 + 0 * bits), "flips at every token"),
        (lambda bits: flipped(1 - bits), "flips at the zeros"),
        (lambda bits: flipped(bits, 1.0, -1.0), "writes the value -1"),
        (lambda bits: flipped(bits, 3.0), "beta: write strengths must lie in [0, 2]"),
        (lambda bits: flipped(bits)[:2], "Expected three results"),
        (lambda bits: ([1.0], [0.0], [2.0]), "a number for each of the 8 tokens"),
    ],
}


# -- chapter 21 --------------------------------------------------------------------------------------


def paths(C, beta):
    """By counting: ways from the first token to the last in C / 2 steps."""
    ways = [1.0] + [0.0] * (C - 1)
    for _ in range(C // 2):
        ways = [beta * sum(ways[:i]) for i in range(C)]
    return ways[-1]


def newton(sign=1, half=1.0, swap=False):
    def form(A, Y):
        T = A + torch.eye(len(A)).double()
        step = Y - Y @ T @ Y if not swap else Y - T @ Y @ Y
        return Y + sign * half * step

    return form


RIGHT |= {
    "ex-triangle-pascal": [[6, 20, 1], (6.0, 20.0, 1.0)],
    "ex-triangle-largest": [paths],
    "ex-triangle-merge": [lambda Y_1, A_21, Y_2: Y_2 @ (-A_21 @ Y_1)],
    "ex-triangle-refine": [newton(), lambda A, Y: 2 * Y - Y @ Y - Y @ A @ Y],
    "ex-triangle-recipes": ["ace", ["a", "c", "e"]],
}

WRONG |= {
    "ex-triangle-pascal": [([6, 20, 20], "cancel in the inverse"), ([2, 4, 1], "counts the paths")],
    "ex-triangle-largest": [
        (lambda C, beta: paths(C, 1.0), "The strength is missing"),
        (lambda C, beta: beta * paths(C, 1.0), "counted once"),
        (lambda C, beta: beta ** (C - 1), "the last power"),
        (lambda C, beta: 0.0, "for the arguments 8, 1"),
    ],
    "ex-triangle-merge": [
        (lambda Y_1, A_21, Y_2: Y_2 @ A_21 @ Y_1, "The sign"),
        (lambda Y_1, A_21, Y_2: -Y_2 @ A_21, "The earlier half"),
        (lambda Y_1, A_21, Y_2: -A_21 @ Y_1, "The later half"),
        (lambda Y_1, A_21, Y_2: -A_21, "both halves"),
        (lambda Y_1, A_21, Y_2: -Y_1 @ A_21.T @ Y_2, "expected shape [4, 3], got [3, 4]"),
    ],
    "ex-triangle-refine": [
        (newton(sign=-1), "The sign"),
        (newton(swap=True), "The order is wrong"),
        (newton(half=0.5), "half a step"),
        (newton(half=0.0), "Nothing is refined"),
        (lambda A, Y: Y + Y @ (torch.eye(5).double() - A @ Y), "The triangle is I + A"),
        (lambda A, Y: newton()(A, Y) - Y, "the correction alone"),
    ],
    "ex-triangle-recipes": [
        ("abce", "b does not belong to it"),
        ("ac", "e is missing"),
        ("acde", "fp16 then has no digit"),
        ("x", "Expected some of a, b, c, d, e"),
    ],
}


# -- chapter 22 --------------------------------------------------------------------------------------


def bytes_of(C, K, V, stages, staged=("q", "k", "v", "g"), once=("S", "P", "o"), size=2):
    tiles = dict(q=C * K, k=C * K, g=C * K, v=C * V, S=K * V, P=C * C, o=C * V)
    return size * (stages * sum(tiles[name] for name in staged) + sum(tiles[name] for name in once))


def turns(i, stages, before=1):
    """By counting rounds, not by dividing."""
    stage, phase = 0, 0
    for _ in range(i):
        stage += 1
        if stage == stages:
            stage, phase = 0, 1 - phase
    return stage, (phase + before) % 2, phase


def played(load, transform, multiply, n, stages):
    """By small steps of time, for durations that are whole."""
    durations, at, left, done = (load, transform, multiply), [0, 0, 0], [0, 0, 0], [0, 0, 0]
    now = 0
    while done[2] < n:
        for r in range(3):
            able = at[r] < n and (done[r - 1] > at[r] if r else at[0] < done[2] + stages)
            if not left[r] and able:
                left[r], at[r] = durations[r], at[r] + 1
        now += 1
        for r in range(3):
            if left[r]:
                left[r] -= 1
                done[r] += not left[r]
    return now


RIGHT |= {
    "ex-hopper-tile": [[2097152, 40, 51.2]],
    "ex-hopper-shared": [bytes_of],
    "ex-hopper-parity": [turns],
    "ex-hopper-end": [played],
    "ex-hopper-programs": [[16, 12.1, 9], [16, 100 * 16 / 132, 9]],
    "ex-hopper-fences": ["acdf", ["a", "c", "d", "f"]],
}

WRONG |= {
    "ex-hopper-tile": [
        ([2097152, 32, 64], "The gates move, too"),
        ([1572864, 40, 38.4], "One product is missing"),
        ([2097152, 40, 50], "Answer 3 of 3"),
    ],
    "ex-hopper-shared": [
        (lambda *x: bytes_of(*x, size=1), "two bytes"),
        (lambda *x: bytes_of(*x, staged=("q", "k", "v")), "The gates are missing"),
        (lambda *x: bytes_of(*x, once=("P", "o")), "S is missing"),
        (lambda *x: bytes_of(*x, once=("S", "o")), "P is missing"),
        (lambda *x: bytes_of(*x, once=("S", "P")), "o is missing"),
        (lambda *x: bytes_of(*x, once=()), "the ring of stages alone"),
        (lambda *x: x[3] * bytes_of(*x[:3], 1), "only tiles that are loaded ahead"),
    ],
    "ex-hopper-parity": [
        (lambda i, n: turns(i, n, before=0), "The loader waits for the round before"),
        (lambda i, n: (i % n, (i + 1) & 1, i & 1), "i // stages, not i"),
        (lambda i, n: (i // n, *turns(i, n)[1:]), "is the round"),
        (lambda i, n: turns(i, n)[:2], "Expected 3 result(s)"),
    ],
    "ex-hopper-end": [
        (lambda a, b, c, n, stages: n * (a + b + c), "one job after the other"),
        (lambda a, b, c, n, stages: n * max(a, b, c), "still has to pass"),
        (lambda a, b, c, n, stages: played(a, b, c, n, n), "has to wait for room"),
        (lambda a, b, c, n, stages: played(a, b, c, n, stages + 1), "one stage less"),
    ],
    "ex-hopper-programs": [
        ([16, 12.1, 8], "four multiprocessors have none"),
        ([128, 97, 2], "one after the other"),
        ([16, 50, 9], "Answer 2 of 3"),
        ([16, 100, 1], "16 programs"),
    ],
    "ex-hopper-fences": [("acdef", "Registers"), ("acf", "d is missing"), ("abcdf", "counts the bytes")],
}


# -- chapter 23 --------------------------------------------------------------------------------------


def walked(load, solve, walk, places, tiles, n=600):
    """By a schedule: how long a chunk lasts once all is under way."""
    loads, solves, walks = [0.0], [0.0], [0.0]

    def room(c, n):
        return walks[c - n + 1] if c >= n else 0

    for c in range(n):
        loads.append(max(loads[-1], room(c, places)) + load)
        solves.append(max(solves[-1], loads[-1], room(c, tiles)) + solve)
        walks.append(max(walks[-1], solves[-1]) + walk)
    return (walks[n] - walks[n // 2]) / (n // 2)


def by_rows(A, c, sign=-1):
    """(I + A)^-1 by rows of blocks from the first to the last: Y_i = (I + A_ii)^-1 (I_i - sum A_ij Y_j)."""
    I = torch.eye(len(A)).double()
    Y = I.clone()
    for i in range(0, len(A), c):
        rows = slice(i, i + c)
        Y[rows] = torch.linalg.solve(I[:c, :c] + A[rows, rows], I[rows] + sign * A[rows, :i] @ Y[:i])
    return Y


def columns_of(inverse):
    """An answer that cuts its columns out of a whole inverse."""
    return lambda A, c, j: inverse(A, c)[:, c * j : c * j + c]


def on_the_diagonal(A, c):
    return torch.block_diag(*(by_rows(A[i : i + c, i : i + c], c) for i in range(0, len(A), c)))


RIGHT |= {
    "ex-fused-path": [[8, 4, 2, 1024]],
    "ex-fused-period": [walked],
    "ex-fused-columns": [columns_of(by_rows)],
    "ex-fused-ahead": ["abdeg", ["a", "b", "d", "e", "g"]],
    "ex-fused-programs": [[48, 3072, 96, 33]],
    "ex-fused-bound": [[4.0, 6.0, 15.0], [4, 6, 15]],
}

WRONG |= {
    "ex-fused-path": [
        ([7, 2, 3, 1280], "Seven was the other way"),
        ([8, 2, 2, 1024], "U and W need no state either"),
        ([8, 4, 3, 1280], "The inverse is in W already"),
        ([8, 4, 2, 1280], "the old path"),
        ([8, 4, 2, 1000], "Answer 4 of 4"),
    ],
    "ex-fused-period": [
        (lambda *x: max(x[:3]), "the busiest role alone"),
        (lambda *x: walked(*x[:4], 99), "The tiles are missing"),
        (lambda *x: walked(*x[:3], 99, x[4]), "places of q, k and v are missing"),
        (lambda *x: max(*x[:3], sum(x[:3]) / x[3], sum(x[:3]) / x[4]), "need not wait for its chunk's load"),
        (lambda *x: max(sum(x[:3]) / x[3], sum(x[1:3]) / x[4]), "faster than its own job"),
    ],
    "ex-fused-columns": [
        (columns_of(lambda A, c: by_rows(A, c, sign=1)), "The sign is wrong"),
        (columns_of(lambda A, c: by_rows(-A, c)), "inverts I - A"),
        (columns_of(on_the_diagonal), "on the diagonal alone"),
        (lambda A, c, j: by_rows(A, c)[c * j : c * j + c].T, "a warp owns columns"),
    ],
    "ex-fused-ahead": [("abcdeg", "A query reads"), ("abde", "g is missing"), ("abdefg", "v' needs the state")],
    "ex-fused-programs": [
        ([24, 1536, 48, 66], "its own states"),
        ([48, 1536, 96, 33], "chunks of one prompt"),
        ([48, 3072, 48, 33], "half of a head's"),
        ([48, 3072, 96, 66], "all texts together"),
        ([48, 3072, 96, 1], "Answer 4 of 4"),
    ],
    "ex-fused-bound": [
        ([5.0, 6.0, 15.0], "Half of the saving is a guess"),
        ([4.0, 5.0, 15.0], "Half of the saving is a guess"),
        ([4.0, 6.0, 85.0], "That is what remains"),
        ([4.0, 6.0, 20.0], "Answer 3 of 3"),
    ],
}


# -- chapter 24 --------------------------------------------------------------------------------------


def joined(keep1, add1, keep2, add2):
    """By what both make of two states."""
    through = [keep2[:, None] * (keep1[:, None] * S + add1) + add2 for S in (torch.zeros_like(add1), add1)]
    return ((through[1] - through[0]) / add1)[:, 0], through[0]


def coming(keep, add, S, r):
    """As a sum over pieces, each with the decay of those behind it."""
    parts = [*((keep[i + 1 : r].prod(0), add[i]) for i in range(r)), (keep[:r].prod(0), S)]
    return sum(k[:, None] * x for k, x in parts)


def coming_back(keep, add, R, r):
    return coming(keep.flip(0), add.flip(0), R, len(keep) - 1 - r)


def best(ranks, latency, size, bandwidth):
    """By closing in on the minimum of the time itself."""
    low, high = 1e-6, 1e9

    def slope(u):
        return latency - (ranks - 2) * size / (u * u * bandwidth)

    for _ in range(400):
        u = (low * high) ** 0.5
        low, high = (low, u) if slope(u) > 0 else (u, high)
    return u


RIGHT |= {
    "ex-ranks-bytes": [[264192, 393216, 30720000]],
    "ex-ranks-compose": [joined],
    "ex-ranks-entries": [coming],
    "ex-ranks-back": [coming_back],
    "ex-ranks-blocks": [best],
    "ex-ranks-packed": ["bd", ["b", "d"]],
}

WRONG |= {
    "ex-ranks-bytes": [
        ([262144, 393216, 30720000], "The decays are missing"),
        ([264192, 264192, 30720000], "a matrix of K times K"),
        ([264192, 393216, 61440000], "two bytes"),
        ([264192, 393216, 1], "Answer 3 of 3"),
    ],
    "ex-ranks-compose": [
        (lambda a, x, b, y: (a * b, x + y), "fades over the second"),
        (lambda a, x, b, y: (a * b, a[:, None] * x + y), "its own decay is in it already"),
        (lambda a, x, b, y: joined(b, y, a, x), "The order is reversed"),
        (lambda a, x, b, y: (a + b, joined(a, x, b, y)[1]), "not by their sum"),
        (lambda a, x, b, y: (a * b, b[:, None] * (x + y)), "does not fade its own sum"),
    ],
    "ex-ranks-entries": [
        (lambda a, x, S, r: coming(a, x, S, r + 1), "Its own piece"),
        (lambda a, x, S, r: coming(a, x, S, max(0, r - 1)), "right before it is missing"),
        (lambda a, x, S, r: S + x[:r].sum(0), "fades over every later piece"),
        (lambda a, x, S, r: coming(a, x, 0 * S, r), "before the text is missing"),
    ],
    "ex-ranks-back": [
        (lambda a, x, R, r: coming_back(a, x, R, r - 1), "Its own piece"),
        (lambda a, x, R, r: coming(a[r + 1 :], x[r + 1 :], R, len(a) - r - 1), "the last rank's map is applied first"),
        (lambda a, x, R, r: R + x[r + 1 :].sum(0), "fades over every piece"),
        (lambda a, x, R, r: coming_back(a, x, 0 * R, r), "of the last state is missing"),
        (coming, "from the first rank to the last"),
    ],
    "ex-ranks-blocks": [
        (lambda *x: best(*x) ** 2, "The root is missing"),
        (lambda W, *x: best(W + 1, *x), "ranks - 2 are left"),
        (lambda W, *x: best(W + 2, *x), "Only ranks - 2"),
        (lambda *x: 1 / best(*x), "Turned round"),
    ],
    "ex-ranks-packed": [("abd", "the next one starts"), ("b", "d is missing"), ("bde", "no later token needs")],
}
