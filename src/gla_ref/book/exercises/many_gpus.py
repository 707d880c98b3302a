"""Judges of the exercises on many GPUs (chapter 25)."""

from . import exercise
from ._compare import draw, hold, variants
from ._predict import ask, choice, predict

predict(
    "ex-ranks-bytes",
    ["bytes that a rank sends with GLA", "with the gated delta rule", "bytes of a piece's keys and values"],
    [264_192, 393_216, 30_720_000],
    [
        ([262_144, ..., ...], "The decays are missing: a map is the state and K numbers a head."),
        ([132_096, ..., ...], "A number in 32 bits has four bytes."),
        ([278_528, ..., ...], "The decays belong to the rows of the state: K of them a head, not V."),
        ([33_024, ..., ...], "That is one head's. There are eight of them."),
        ([..., 264_192, ...], "The delta rule's piece mixes the rows of a state: it keeps a matrix of K times K."),
        ([..., 786_432, ...], "The matrix acts on rows: it is K times K, not V times V."),
        ([..., ..., 61_440_000], "Keys and values have 16 bits here, which are two bytes."),
    ],
    "A head's map is its state, K times V, and what it keeps: K numbers, or K times K.",
)


def _compose(keep1, add1, keep2, add2, fading=1, order=0):
    if order:
        keep1, add1, keep2, add2 = keep2, add2, keep1, add1
    return keep2 * keep1, (keep2[:, None] if fading == 1 else keep1[:, None] if fading else 1) * add1 + add2


@exercise("ex-ranks-compose", "derive")
def compose(answer):
    mistakes = {
        "The sum of the first piece fades over the second piece.": dict(fading=0),
        "The first piece's sum fades by what the second one keeps: its own decay is in it already.": dict(fading=2),
        "The order is reversed: the first piece comes first, and the second one's gates act on it.": dict(order=1),
        "The second piece does not fade its own sum, only the state that comes into it.": (
            lambda keep1, add1, keep2, add2: (keep2 * keep1, keep2[:, None] * (add1 + add2))
        ),
        "A state that crosses both pieces is multiplied by both decays, not by their sum.": (
            lambda keep1, add1, keep2, add2: (keep1 + keep2, keep2[:, None] * add1 + add2)
        ),
    }
    x = draw(1, (3,), (3, 2), (3,), (3, 2))
    cases = [tuple(y.sigmoid() if y.ndim == 1 else y for y in x)]
    hold(answer, cases, _compose, variants(_compose, mistakes), {"keep": "", "add": ""})


def _blocks(ranks, latency, size, bandwidth, fewer=2, power=0.5):
    return ((ranks - fewer) * size / (latency * bandwidth)) ** power


@exercise("ex-ranks-blocks", "derive")
def blocks(answer):
    mistakes = {
        "The root is missing: two terms must be equal, and one has blocks, the other 1 / blocks.": dict(power=1.0),
        "The time of the bytes over one border does not change with the blocks: ranks - 2 are left.": dict(fewer=1),
        "Only ranks - 2 of the borders' times have 1 / blocks in them.": dict(fewer=0),
        "Turned round: expensive messages ask for fewer blocks, more bytes for more.": dict(power=-0.5),
    }
    cases = [(8, 2e-5, 2.0**20, 4.5e11), (64, 1e-5, 2.0**25, 5e10), (3, 1e-4, 1e6, 1e9)]
    hold(answer, cases, _blocks, variants(_blocks, mistakes), {"blocks": ""})


@ask("ex-ranks-packed")
def packed():
    why = {
        "a": "A text ends at 512, and the next one starts from nothing.",
        "b": "The first text goes on until 300, so its state crosses at 256.",
        "c": "A text ends at 512, and the next one starts from nothing.",
        "d": "The last text goes on from 512 to 1024, so its state crosses at 768.",
        "e": "The first text ends at 300, and no later token needs its state.",
    }
    return choice("Borders that a state crosses", "bd", why)
