"""Judges of the exercises on FlashLinearAttention (chapter 7)."""

import random

import torch

from gla_ref import linear_attention

from . import Wrong, exercise
from ._compare import call, draw, hold, one_head, variants
from ._predict import predict

predict(
    "ex-fla-programs",
    [32, 4096, 128],  # B H V / B_V = 32 walks; times T / C = 128 chunks, or T / L = 4 segments
    [
        ([16, ..., ...], "Columns of V are independent, too: two tiles of 64 columns a head."),
        ([8, ..., ...], "Two sequences, and two tiles of columns: both multiply the heads."),
        ([4096, ..., ...], "A fused walk takes its chunks one after the other: T has no part."),
        ([..., 32, ...], "Once their states are known, chunks are independent of each other."),
        ([..., 128, ...], "These are the chunks of one walk: there are 32 walks."),
        ([..., ..., 32], "Segments are independent of each other in both of their walks."),
        ([..., ..., 4096], "A program owns a whole segment, not a chunk."),
        ([..., ..., 4], "These are the segments of one walk: there are 32 walks."),
    ],
    "Multiply the sequences, the heads and the tiles of columns; then by what is independent in time.",
)

RIDGE = 989e12 / 4.8e12  # FLOPs in the time of one byte, the chapter's chip
C = 2 * RIDGE - 128  # e ridge - d
predict(
    "ex-fla-chunk",
    [C, 1.0],  # the bytes a token do not depend on C
    [
        ([RIDGE - 128, ...], "Numbers have e = 2 bytes: (C + d) / e must be the ridge."),
        ([RIDGE, ...], "d counts as well, and so does e = 2: (C + d) / e must be the ridge."),
        ([2 * RIDGE, ...], "d counts as well: (C + d) / e must be the ridge."),
        ([C, C / 64], "A chunk so much longer moves so many more bytes. And a token?"),
        ([C, 64 / C], "A chunk so much longer moves so many more bytes. And a token?"),
        ([C, (C + 128) / 192], "So the intensity grows, by more FLOPs. Do the bytes shrink?"),
    ],
    "Solve (C + d) / e = ridge for C; then divide the bytes of a chunk by its C tokens.",
    tolerance=0.01,
)


def _flipped(walk, q, k, v, do, into=True, back=True, exchange=False):
    """dk = walk(v, do, q) and dv = walk(k, q, do), on reversed tokens, turned back."""
    if into:
        q, k, v, do = (x.flip(0) for x in (q, k, v, do))
    if exchange:
        q, do = do, q
    dk, dv = walk(v, do, q), walk(k, q, do)
    return (dk.flip(0), dv.flip(0)) if back else (dk, dv)


@exercise("ex-fla-flip", "implement")
def flip(answer):
    def walk(q, k, v):
        T = torch.ones(len(q), len(q), dtype=torch.float64).tril()
        return 0.6 * (q @ k.T * T) @ v

    def right(walk, q, k, v, do):
        leaves = [x.clone().requires_grad_() for x in (k, v)]
        return torch.autograd.grad(one_head(linear_attention.recurrent, q, *leaves, scale=0.6)[0], leaves, do)

    mistakes = {
        "These sums run over i <= t: later outputs depend on k_t and v_t, so turn the tokens round first.": dict(
            into=False, back=False
        ),
        "The results are not turned back: their first row belongs to the last token.": dict(back=False),
        "The inputs are not turned round, only the results.": dict(into=False),
        "dk and dv are exchanged.": lambda *x: right(*x)[::-1],
        "q and do have changed places: dk reads with v what do wrote with q, dv reads with k what q wrote "
        "with do.": dict(exchange=True),
    }
    cases = [(walk, *draw(T, (T, 3), (T, 3), (T, V), (T, V))) for T, V in ((6, 3), (7, 2), (1, 2))]
    hold(answer, cases, right, variants(_flipped, mistakes), {"dk": "T K", "dv": "T V"})


@exercise("ex-fla-packed", "derive")
def packed(answer):
    """floor(c / L) + n."""
    rng = random.Random(0)
    for _ in range(300):
        N, L, ends = rng.randint(1, 6), rng.randint(1, 9), [0]
        for _ in range(N):
            ends.append(ends[-1] + rng.choice([0, 1, L, L + 1, rng.randint(0, 40)]))
        first = [int(call(answer, c, n, L)[0]) for n, c in enumerate(ends)]
        about = f"With boundaries {ends} and L = {L}"
        why = ""
        if first == [c // L for c in ends]:
            why = " A short text may need a segment although floor(c / L) has not grown."
        elif first == [-(-c // L) for c in ends]:
            why = " Two short texts may lie inside one multiple of L."
        for n in range(N):
            free, need = first[n + 1] - first[n], -((ends[n] - ends[n + 1]) // L)
            if free < need:
                raise Wrong(
                    f"{about}, sequence {n} needs {need} segment(s), but {max(free, 0)} slot(s) are its own "
                    f"before sequence {n + 1} begins.{why}"
                )
        if first[0] < 0:
            raise Wrong(f"{about}, the first slot is {first[0]}: slots are counted from 0.")
        more = first[-1] - ends[-1] // L - N
        if more > 0:
            raise Wrong(
                f"{about}, {first[-1]} slots are taken. That is {more} more than floor(T / L) + N, which are enough."
            )
