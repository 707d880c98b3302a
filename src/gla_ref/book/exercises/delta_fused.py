"""Judges of the exercises on the delta rule, fully fused (chapter 23)."""

import torch

from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, choice, predict

predict(
    "ex-fused-products",
    ["products of a chunk with the tensor cores' WGMMA", "of them, products that need no state", "dependent products"],
    [7, 2, 3],
    [
        ([6, ..., ...], "k k^T and q k^T, then k S, q S, T v', P w and the write: that is seven."),
        ([8, ..., ...], "The inverse has products of its own, but they are small ones and no WGMMA."),
        ([7, 3, ...], "T v' needs v', and v' is made of the state. Only k k^T and q k^T need no state."),
        ([7, 4, ...], "T and P need no state, but what they are multiplied by does."),
        ([7, 2, 4], "q S and P w make the output: the next state does not wait for them."),
        ([7, 2, 5], "q S and P w make the output: the next state does not wait for them."),
        ([7, 2, 2], "Between k S and the write there is T v', which needs the result of k S."),
    ],
    "Look at the picture of a chunk: blue needs no state, and the path from S to the next S is drawn thick.",
)


def _period(load, solve, walk, stages, jobs=max, around=lambda *x: sum(x), both=True):
    busiest = jobs(load, solve, walk)
    return max(busiest, around(load, solve, walk) / stages) if both else busiest


@exercise("ex-fused-period", "derive")
def period(answer):
    mistakes = {
        "That is one job after the other, as if there were one stage.": lambda load, solve, walk, stages: (
            load + solve + walk
        ),
        "That is the busiest role alone. A stage is free again only after it was loaded, solved and walked.": dict(
            both=False
        ),
        "That is the round of a stage alone. No role can be faster than its own job.": (
            lambda load, solve, walk, stages: (load + solve + walk) / stages
        ),
        "The load is missing: it is a part of a stage's round.": dict(around=lambda load, solve, walk: solve + walk),
        "The walk is missing: a stage is free only after the walkers have read it.": dict(
            around=lambda load, solve, walk: load + solve
        ),
    }
    cases = [(3.0, 4.0, 2.0, 1), (1.0, 2.0, 2.0, 3), (4.0, 5.0, 3.0, 2), (6.0, 1.0, 7.0, 2)]
    hold(answer, cases, _period, variants(_period, mistakes), {"period": ""})


def _columns(A, c, sign=-1, later=lambda j, n: range(j + 1, n), own=lambda x: x):
    n, I = len(A) // c, torch.eye(len(A), dtype=A.dtype)
    Y = torch.zeros_like(A)
    for j in reversed(range(n)):
        columns = slice(c * j, c * (j + 1))
        X = I[:, columns].clone()
        for m in later(j, n):
            rows = slice(c * m, c * (m + 1))
            X = X + sign * Y[:, rows] @ A[rows, columns]
        Y[:, columns] = X @ torch.linalg.inv(I[:c, :c] + own(A[columns, columns]))
    return Y


@exercise("ex-fused-columns", "implement")
def columns(answer):
    def right(A, c):
        return torch.linalg.inv(torch.eye(len(A), dtype=A.dtype) + A)

    mistakes = {
        "The sign is wrong: what later columns contribute is subtracted.": dict(sign=1),
        "Only the next column of blocks is used: add up over all later ones.": dict(
            later=lambda j, n: range(j + 1, min(j + 2, n))
        ),
        "The later columns are missing: those are the blocks on the diagonal alone.": dict(later=lambda j, n: ()),
        "The inverses on the diagonal are missing: multiply each sum by that of its own column, from the right.": dict(
            own=lambda x: 0 * x
        ),
        "The blocks on the diagonal are inverses of I + A_jj, not of I - A_jj.": dict(own=lambda x: -x),
        "That inverts I - A: the triangle is I + A.": lambda A, c: right(-A, c),
    }
    cases = [(x.tril(-1), c) for x, c in zip(draw(23, (6, 6), (8, 8), (9, 9)), (2, 4, 3), strict=True)]
    hold(answer, cases, right, variants(_columns, mistakes), {"inverse": "T T"})


@ask("ex-fused-ahead")
def ahead():
    why = {
        "a": "The inverse is made of keys, strengths and gates of the chunk's own tokens.",
        "b": "The scores are made of queries, keys and gates of the chunk's own tokens.",
        "c": "v' is a value less what its key finds in the state.",
        "d": "Running sums of the chunk's own gates make the decays.",
        "e": "A query reads the state.",
        "f": "w is T v', and v' needs the state.",
    }
    return choice("Steps that can be done ahead", "abd", why)


predict(
    "ex-fused-programs",
    ["programs of the fused kernel", "programs of solve", "programs of walk", "programs of walk with 32 columns each"],
    [32, 4096, 64, 128],
    [
        ([16, ..., ..., ...], "Programs belong to value heads: each has a state of its own."),
        ([64, ..., ..., ...], "One program owns the whole state of a value head; both halves are in its registers."),
        ([4096, ..., ..., ...], "Chunks of one head come one after the other, in one program."),
        ([32, 2048, ..., ...], "A chunk of a value head is a program: strengths and gates differ between value heads."),
        ([32, 128, ..., ...], "Those are the chunks of one head. There are 32 of them."),
        ([32, 32, ..., ...], "An inverse needs no state, so every chunk has a program of its own."),
        ([32, 4096, 32, ...], "A program of the walk has 64 columns, half of a head's."),
        ([32, 4096, 64, 64], "128 columns in tiles of 32 are four programs for each head."),
    ],
    "Value heads times what a head is cut into: nothing, its chunks, or its columns.",
)
