"""Judges of the exercises on prefix sums and chunks (chapter 6)."""

from functools import partial
from itertools import accumulate

import torch

from gla_ref.prefix_sum import blelloch, hillis_steele

from . import exercise
from ._compare import call, draw, hold, results, variants
from ._predict import choose, predict

predict(
    "ex-prefix-sqrt",
    ["C", "depth", "additions"],
    [64, 126, 8064],  # C = sqrt T, depth 2 sqrt T - 2, work 2 T - 2 sqrt T, for T = 4096
    [
        ([12, ..., ...], "log2 T is the depth of a tree. Plain chunks cannot do it so fast."),
        ([..., 128, ...], "C numbers are a chain of C - 1 additions, N chunks one of N - 1."),
        ([..., ..., 4095], "That is the number for one walk; two steps make more."),
        ([..., ..., 8192], "Step 1 needs none for a chunk's first number, step 2 none in chunk 1."),
        ([..., ..., 8128], "Step 2 adds no carry to the first chunk: C additions fewer."),
    ],
    "The depth C + T / C - 2 is least where its derivative is zero; step 1 makes T - N additions and "
    "step 2 makes T - C.",
)

choose(
    "ex-prefix-associative",
    "Associative operators",
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


def _suffixes(combine, xs, turn=True, exchange=True, back=True):
    """Flip, scan with the operands exchanged, flip back."""
    x = xs[0].flip(1) if turn else xs[0]
    (y,) = blelloch((lambda a, b: combine(b, a)) if exchange else combine, (x,))
    return y.flip(1) if back else y


@exercise("ex-prefix-reverse", "implement")
def reverse(answer):
    def product(left, right):
        return (left[0] @ right[0],)

    def right(combine, xs):
        suffixes = accumulate(reversed(xs[0].unbind(1)), lambda later, x: x @ later)
        return torch.stack([*suffixes][::-1], 1)

    mistakes = {
        "These are prefixes: the sequence must be reversed.": dict(turn=False, exchange=False, back=False),
        "The operands must be exchanged: in the reversed sequence the left one is the later one.": dict(exchange=False),
        "The result is not turned back: its first element belongs to the last position.": dict(back=False),
        "The result is not turned back, and the operands are not exchanged.": dict(exchange=False, back=False),
        "The operands are reversed, the sequence is not.": dict(turn=False, back=False),
    }
    cases = [(product, tuple(draw(T, (1, T, 2, 2)))) for T in (6, 7, 1)]
    hold(answer, cases, right, variants(_suffixes, mistakes), {"y": "B T i j"})


def _scans(combine, r, x):
    """(r1, x1) o (r2, x2), one after the other and in two trees."""
    left, *rest = zip(r.split(1, 1), x.split(1, 1), strict=True)
    rows = [y for _, y in accumulate(rest, combine, initial=left)]
    trees = (scan(combine, (r, x))[1] for scan in (hillis_steele, blelloch))
    return torch.cat(rows, 1), *trees


@exercise("ex-prefix-segments", "derive")
def segments(answer):
    """(r1, x1) o (r2, x2) = (r1 or r2, (1 - r2) x1 + x2)."""

    def asked(left, right):
        return tuple(results(call(answer, left, right), left, ("r", "x")))

    def right(r, x):
        text = r.cumsum(1)  # its number; a token adds up the earlier tokens of the same text
        same = text[..., :, None] == text[..., None, :]
        return ((same.tril() * x[:, None]).sum(-1),) * 3

    def made_of(r, x, flag=torch.maximum, number=lambda r1, x1, r2, x2: (1 - r2) * x1 + x2):
        return _scans(lambda a, b: (flag(a[0], b[0]), number(*a, *b)), r, x)

    mistakes = {
        "One after the other it is right, in a tree it is not: a pair must keep the left flag, too, "
        "or the numbers before its start will be added.": dict(flag=lambda r1, r2: r2),
        "The flags are joined with `and`: a start in one of the two parts is enough.": dict(flag=torch.mul),
        "The flags are added: two starts make 2, and 1 - r is no longer 0 or 1.": dict(flag=torch.add),
        "It is the right part's start that cuts off the left sum, not the left part's.": dict(
            number=lambda r1, x1, r2, x2: (1 - r1) * x1 + x2
        ),
        "The flags change nothing: the sum never starts anew.": dict(number=lambda r1, x1, r2, x2: x1 + x2),
        "The first number of a text is lost: a start forgets what is before, not its own number.": dict(
            number=lambda r1, x1, r2, x2: (1 - r2) * (x1 + x2)
        ),
    }
    rows = [1, 0, 0, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]
    starts = [torch.tensor([r], dtype=torch.float64) for r in rows]
    axes = dict.fromkeys(("in_order", "hillis_steele", "blelloch"), "B T")
    cases = [(r, *draw(0, r.shape)) for r in starts]
    hold(partial(_scans, asked), cases, right, variants(made_of, mistakes), axes)
