"""Judges of the exercises on the delta rule, fully fused (chapter 23)."""

from . import exercise
from ._compare import hold, variants
from ._predict import ask, choice, predict

predict(
    "ex-fused-path",
    ["products of a chunk", "products that need no state", "products on the path", "clocks of the path"],
    [8, 4, 2, 1024],
    [
        ([7, ..., ..., ...], "Seven was the other way. Here U and W are two products, and W S is a third."),
        ([9, ..., ..., ...], "k S is gone: the state meets W instead of k."),
        ([8, 2, ..., ...], "U and W need no state either: they are made of the chunk's own keys and values."),
        ([8, 3, ..., ...], "U needs v and W needs k. Neither needs the state, nor do k k^T and q k^T."),
        ([8, 5, ..., ...], "W S needs the state."),
        ([8, 4, 3, ...], "The inverse is in W already, so after W S nothing is multiplied before the write."),
        ([8, 4, 1, ...], "After W S there is the write, and the next state waits for it."),
        ([8, 4, 2, 768], "W has K columns, so W S sums over K = 128, as k S did."),
        ([8, 4, 2, 1280], "That is the old path: k S, the inverse times v', the write."),
    ],
    "Draw which product needs which, as in the picture of a chunk, and count a product as 2 x rows x depth x columns.",
)


def _period(load, inverse, walk, places, tiles, place=lambda *x: sum(x), tile=lambda load, *x: sum(x)):
    x = load, inverse, walk
    return max(*x, place(*x) / places, tile(*x) / tiles)


@exercise("ex-fused-period", "derive")
def period(answer):
    mistakes = {
        "That is the busiest role alone. A place is free again only after its chunk was loaded, inverted and walked.": (
            lambda load, inverse, walk, places, tiles: max(load, inverse, walk)
        ),
        "The tiles are missing: a tile is free only after its chunk was inverted and walked.": dict(tile=lambda *x: 0),
        "The places of q, k and v are missing: they bound the kernel, too.": dict(place=lambda *x: 0),
        "A tile need not wait for its chunk's load: it is taken when the inverse begins.": dict(tile=lambda *x: sum(x)),
        "No role can be faster than its own job.": lambda load, inverse, walk, places, tiles: max(
            (load + inverse + walk) / places, (inverse + walk) / tiles
        ),
    }
    cases = [
        (3.0, 4.0, 2.0, 1, 1),
        (3.0, 2.0, 2.0, 2, 1),
        (4.0, 5.0, 3.0, 2, 2),
        (6.0, 1.0, 7.0, 4, 3),
        (2.0, 4.0, 3.5, 3, 1),
        (5.0, 4.0, 4.0, 2, 1),
    ]
    hold(answer, cases, _period, variants(_period, mistakes), {"period": ""})


@ask("ex-fused-ahead")
def ahead():
    why = {
        "a": "U is made of the chunk's own keys, values, strengths and gates.",
        "b": "Zeros are known: P Y diag(beta) v is made of the chunk's own tokens.",
        "c": "A query reads the state.",
        "d": "The sum of the chunk's own gates makes it.",
        "e": "It is a product of the chunks' matrices, each made of its own keys, strengths and gates.",
        "f": "They are made of v', and v' needs the state.",
        "g": "The walk from zeros needs only states inside its own segment.",
    }
    return choice("Steps that can be done ahead", "abdeg", why)


predict(
    "ex-fused-programs",
    ["programs of the fused kernel", "programs of solve", "programs of walk", "most value heads for the two kernels"],
    [48, 3072, 96, 33],
    [
        ([24, ..., ..., ...], "Each prompt has its own states: programs belong to a value head of a text."),
        ([96, ..., ..., ...], "One program owns the whole state of a value head; its walker's warps share them."),
        ([48, 1536, ..., ...], "Those are the chunks of one prompt."),
        ([48, 64, ..., ...], "Those are the chunks of one head of one prompt."),
        ([48, 3072, 48, ...], "A program of the walk has 64 columns, half of a head's."),
        ([48, 3072, 192, ...], "That is the walk with 32 columns for each program."),
        ([48, 3072, 96, 66], "66 is for all texts together, and there are two."),
        ([48, 3072, 96, 132], "Each head of each text needs two multiprocessors."),
    ],
    "Texts times value heads, times what a head is cut into: nothing, its chunks, or its columns.",
)
