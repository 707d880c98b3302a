"""Judges of the exercises on FlashLinearAttention (chapter 7)."""

import torch

from ..scaling import H200
from . import exercise
from ._compare import draw, hold, variants
from ._predict import predict

predict(
    "ex-fla-programs",
    ["fused walk", "second stage, materialised", "walk over segments"],
    [32, 4096, 128],  # B H V / B_V = 32 walks; times T / C = 128 chunks, or 4 segments
    [
        ([16, ..., ...], "Columns of V are independent, too: two tiles of 64 columns per head."),
        ([8, ..., ...], "Two sequences, and two tiles of columns: both multiply the heads."),
        ([4096, ..., ...], "A fused walk takes its chunks one after the other: T does not matter."),
        ([..., 32, ...], "Once their states are known, chunks are independent of each other."),
        ([..., 128, ...], "These are the chunks of one walk: there are 32 walks."),
        ([..., ..., 32], "Segments are independent of each other in both of their walks."),
        ([..., ..., 4096], "A program owns a whole segment, not a chunk."),
        ([..., ..., 4], "These are the segments of one walk: there are 32 walks."),
    ],
    "Multiply the sequences, the heads and the tiles of columns; then by the parts that are independent in time.",
)

RIDGE = H200.products / H200.memory  # FLOPs in the time of one byte, the chapter's chip
C = 2 * RIDGE - 128  # 2 ridge - d
predict(
    "ex-fla-chunk",
    ["length of a chunk", "bytes a token, relative to C = 64"],
    [C, 1.0],  # the bytes per token do not depend on C
    [
        ([RIDGE - 128, ...], "Numbers have two bytes: (C + d) / 2 must be the ridge."),
        ([RIDGE, ...], "d counts as well, and numbers have two bytes: (C + d) / 2 must be the ridge."),
        ([2 * RIDGE, ...], "d counts as well: (C + d) / 2 must be the ridge."),
        ([C, C / 64], "That is the ratio for whole chunks. What is it for one token?"),
        ([C, 64 / C], "That is the ratio for whole chunks. What is it for one token?"),
        ([C, (C + 128) / 192], "That is how the intensity grows, by more FLOPs. Do the bytes shrink?"),
    ],
    "Solve (C + d) / 2 = ridge for C; then divide the bytes of a chunk by its C tokens.",
    tolerance=0.01,
)


@exercise("ex-fla-mend", "implement")
def mend(answer):
    """o of segment m is its o from zeros, plus scale q S_m."""

    def walk(q, k, v):
        return 0.6 * (q @ k.T).tril() @ v, k.T @ v

    def mended(walk, q, k, v, S0, L, scale, scaled=True, inclusive=False, first=True, running=True, final=True):
        o, S = [], S0 if first else torch.zeros_like(S0)
        for i in range(0, len(q), L):
            local, added = walk(q[i : i + L], k[i : i + L], v[i : i + L])
            read = S + added if inclusive else S
            o.append(local + (scale if scaled else 1) * q[i : i + L] @ read)
            S = S + added if running else added
        return torch.cat(o), S if final else S - S0

    mistakes = {
        "The part read from the true start needs the scale as well.": dict(scaled=False),
        "A segment reads the state before it: its own tokens are in its outputs already.": dict(inclusive=True),
        "The text begins with a state S0: all segments read it.": dict(first=False),
        "The state before a segment is the sum of all segments before it, not of the last alone.": dict(running=False),
        "The final state contains S0, too.": dict(final=False),
    }
    sizes = (8, 2, 2), (7, 4, 3), (5, 1, 8), (1, 2, 1)
    cases = [(walk, *draw(T, (T, 3), (T, 3), (T, V), (3, V)), L, 0.6) for T, V, L in sizes]
    hold(answer, cases, mended, variants(mended, mistakes), {"o": "T V", "S": "K V"})
