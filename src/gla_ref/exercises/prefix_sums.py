"""Judges of the exercises on prefix sums and chunks (chapter 6)."""

from __future__ import annotations

from itertools import accumulate

import torch

from gla_ref.prefix_sum import blelloch, hillis_steele

from . import exercise
from ._compare import call, choose, draw, expect, hold, results


@exercise("ex-prefix-sqrt", "predict")
def sqrt(answer):
    """C = sqrt T, depth 2 sqrt T - 2, work 2 T - 2 sqrt T, for T = 4096."""
    expect(
        answer,
        [64, 126, 8064],
        [
            ([12, ..., ...], "log2 T is the depth of a tree. Plain chunks cannot do it so fast."),
            ([..., 128, ...], "C numbers are a chain of C - 1 additions, N chunks one of N - 1."),
            ([..., ..., 4095], "So many are made one after the other; two steps make more."),
            ([..., ..., 8192], "Step 1 needs none for a chunk's first number, step 2 none in chunk 1."),
            ([..., ..., 8128], "Step 2 adds no carry to the first chunk: C additions fewer."),
        ],
        "The depth C + T / C - 2 is least where its derivative is zero; step 1 makes T - N additions and "
        "step 2 makes T - C.",
    )


@exercise("ex-prefix-associative", "predict")
def associative(answer):
    """a, c, d, f."""
    choose(
        answer,
        "acdf",
        {
            "a": "The largest of three is the same in any grouping.",
            "b": "(8 - 4) - 2 = 2, but 8 - (4 - 2) = 6.",
            "c": "It is (1 + x)(1 + y) - 1, and products may be regrouped.",
            "d": "Both groupings of three give the last one.",
            "e": "||1 - 2| - 4| = 3, but |1 - |2 - 4|| = 1.",
            "f": "Products of matrices may be regrouped; only their order must stay.",
        },
    )


@exercise("ex-prefix-reverse", "implement")
def reverse(answer):
    """Flip, scan with the operands exchanged, flip back."""

    def product(left, right):
        return (left[0] @ right[0],)

    def right(combine, xs):
        suffixes = [xs[0][:, -1:]]
        for t in reversed(range(xs[0].shape[1] - 1)):
            suffixes.insert(0, xs[0][:, t : t + 1] @ suffixes[0])
        return torch.cat(suffixes, 1)

    def variant(turn=True, exchange=True, back=True):
        def wrong(combine, xs):
            x = xs[0].flip(1) if turn else xs[0]
            (y,) = blelloch((lambda a, b: product(b, a)) if exchange else product, (x,))
            return y.flip(1) if back else y

        return wrong

    hold(
        answer,
        [(product, tuple(draw(T, (1, T, 2, 2)))) for T in (6, 7, 1)],
        right,
        {
            "These are prefixes: the sequence must be reversed.": variant(False, False, False),
            "The operands must be exchanged: in the reversed sequence the left one is the later one.": (
                variant(exchange=False)
            ),
            "The result is not turned back: its first element belongs to the last position.": (variant(back=False)),
            "The result is not turned back, and the operands are not exchanged.": (variant(exchange=False, back=False)),
            "The operands are reversed, the sequence is not.": variant(turn=False, back=False),
        },
        names=("y",),
        axes=("B T i j",),
    )


@exercise("ex-prefix-segments", "derive")
def segments(answer):
    """(r1, x1) o (r2, x2) = (r1 or r2, (1 - r2) x1 + x2)."""

    def scans(combine):
        def both(r, x):
            left, *rest = zip(r.split(1, 1), x.split(1, 1), strict=True)
            rows = [y for _, y in accumulate(rest, combine, initial=left)]
            trees = (scan(combine, (r, x))[1] for scan in (hillis_steele, blelloch))
            return torch.cat(rows, 1), *trees

        return both

    def asked(left, right):
        return tuple(results(call(answer, left, right), left, ("r", "x")))

    def right(r, x):
        text = r.cumsum(1)  # its number; a token adds up the earlier tokens of the same text
        same = text[..., :, None] == text[..., None, :]
        return ((same.tril() * x[:, None]).sum(-1),) * 3

    def made_of(flag, number):
        return scans(lambda a, b: (flag(a[0], b[0]), number(a[0], a[1], b[0], b[1])))

    def cut(r1, x1, r2, x2):
        return (1 - r2) * x1 + x2

    rows = [1, 0, 0, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]
    starts = [torch.tensor([r], dtype=torch.float64) for r in rows]
    hold(
        scans(asked),
        [(r, *draw(0, r.shape)) for r in starts],
        right,
        {
            "One after the other it is right, in a tree it is not: a pair must keep the left flag, too, "
            "or what lies before its start will be added.": made_of(lambda r1, r2: r2, cut),
            "The flags are joined with `and`: a start in one of the two parts is enough.": (
                made_of(lambda r1, r2: r1 * r2, cut)
            ),
            "The flags are added: two starts make 2, and 1 - r is no longer 0 or 1.": (
                made_of(lambda r1, r2: r1 + r2, cut)
            ),
            "It is the right part's start that cuts off the left sum, not the left part's.": (
                made_of(torch.maximum, lambda r1, x1, r2, x2: (1 - r1) * x1 + x2)
            ),
            "The flags change nothing: the sum never starts anew.": (
                made_of(torch.maximum, lambda r1, x1, r2, x2: x1 + x2)
            ),
            "The first number of a text is lost: a start forgets what is before, not its own number.": (
                made_of(torch.maximum, lambda r1, x1, r2, x2: (1 - r2) * (x1 + x2))
            ),
        },
        names=("in_order", "hillis_steele", "blelloch"),
        axes=("B T",) * 3,
    )
