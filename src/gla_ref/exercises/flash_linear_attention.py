"""Judges of the exercises on FlashLinearAttention (chapter 7)."""

from __future__ import annotations

import random

import torch

from gla_ref import linear_attention

from . import Wrong, exercise
from ._compare import call, draw, expect, hold

RIDGE = 989e12 / 4.8e12  # FLOPs in the time of one byte, the chapter's chip


@exercise("ex-fla-programs", "predict")
def programs(answer):
    """B H V / B_V = 32 walks; times T / C = 128 chunks, or T / L = 4 segments."""
    expect(
        answer,
        [32, 4096, 128],
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


@exercise("ex-fla-chunk", "predict")
def chunk(answer):
    """C = e ridge - d; the bytes a token do not depend on C."""
    C = 2 * RIDGE - 128
    expect(
        answer,
        [C, 1.0],
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

    def variant(into, back):
        def wrong(walk, q, k, v, do):
            q, k, v, do = (x.flip(0) if into else x for x in (q, k, v, do))
            dk, dv = walk(v, do, q), walk(k, q, do)
            return (dk.flip(0), dv.flip(0)) if back else (dk, dv)

        return wrong

    def exchanged(walk, q, k, v, do):
        q, k, v, do = (x.flip(0) for x in (q, k, v, do))
        return walk(v, q, do).flip(0), walk(k, do, q).flip(0)

    hold(
        answer,
        [(walk, *draw(T, (T, 3), (T, 3), (T, V), (T, V))) for T, V in ((6, 3), (7, 2), (1, 2))],
        right,
        {
            "These sums run over i <= t: later outputs depend on k_t and v_t, so turn the tokens round first.": (
                variant(False, False)
            ),
            "The results are not turned back: their first row belongs to the last token.": (variant(True, False)),
            "The inputs are not turned round, only the results.": variant(False, True),
            "dk and dv are exchanged.": lambda *x: right(*x)[::-1],
            "q and do have changed places: dk reads with v what do wrote with q, dv reads with k what q wrote "
            "with do.": exchanged,
        },
        names=("dk", "dv"),
        axes=("T K", "T V"),
    )


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
        for n in range(N):
            free, need = first[n + 1] - first[n], -((ends[n] - ends[n + 1]) // L)
            if first == [c // L for c in ends]:
                why = " A short text may need a segment although floor(c / L) has not grown."
            elif first == [-(-c // L) for c in ends]:
                why = " Two short texts may lie inside one multiple of L."
            else:
                why = ""
            if free < need:
                raise Wrong(
                    f"{about}, sequence {n} needs {need} segment(s), but {max(free, 0)} slot(s) are its own "
                    f"before sequence {n + 1} begins.{why}"
                )
        if first[0] < 0:
            raise Wrong(f"{about}, the first slot is {first[0]}: slots are counted from 0.")
        if first[-1] > ends[-1] // L + N:
            more = first[-1] - ends[-1] // L - N
            raise Wrong(
                f"{about}, {first[-1]} slots are taken. That is {more} more than floor(T / L) + N, which are enough."
            )
