"""Judges of the exercises on the four kernels of chunk fuse (chapter 14)."""

import math

import torch
from torch.nn import functional as F

from ... import gla_chunk_fuse as fuse
from ...gates import decay_from_start, decay_to_end
from . import exercise
from ._compare import draw, hold, reverse_sum, variants
from ._predict import RIGHT, Part, Question, ask, number, predict

#: of each step and of the fused kernel: the tensors that it reads, and those that it writes
FLOW = {
    "1 add up gates": ("g", "b"),
    "2 scale q and k": ("q k b", "q̃ k̃"),
    "3 walk": ("v b q̃ k̃", "o′"),
    "4 score": ("q k b", "A"),
    "5 sum": ("v o′ A", "o"),
    "one kernel": ("q k g v", "o"),
}
SMALL, _, WALK, _ = (math.prod(s.grid) for s in fuse.steps(B=2, T=100, H=3, K=80, V=160) if s.grid)
GRIDS = [
    (SMALL // 7 * 6, WALK, "A chunk is missing: 100 tokens are six chunks of 16 and one of 4."),
    (SMALL, WALK * 7, "The walk cannot divide time: one program takes all chunks in turn."),
    (SMALL, WALK // 3, "The state has columns: blocks of V divide the walk further."),
    (SMALL, WALK // 2, "The state has rows: each program of the walk has a block of them."),
    (SMALL * 3, WALK, "q, k and b have no columns of V: these divide the walk only."),
    (SMALL // 2, WALK // 2, "Half is missing: there are two sequences, and two blocks of K."),
]
predict(
    "ex-fuse-grid",
    ["kernel 1", "kernel 2", "kernel 3", "kernel 4"],
    [SMALL, SMALL, WALK, SMALL],
    [([n, n, m, n], sentence) for n, m, sentence in GRIDS],
    "Blocks of channels times chunks times heads of all sequences; for the walk, blocks of rows "
    "times blocks of columns times heads. A part of a block or chunk counts as one.",
)


@exercise("ex-fuse-wall", "derive")
def wall(answer):
    def right(C, E, between=-1, ln_2=1, sign=-1):
        return sign * E * math.log(2) ** ln_2 / (C + between)

    mistakes = {
        "From the first token to the last there are C - 1 gates: the first token's is not between.": dict(between=0),
        "That is to base 2; the gates are natural logarithms, and one half-life is ln 2 of them.": dict(ln_2=0),
        "ln 2 is on the wrong side: 2^E is e^(E ln 2).": dict(ln_2=-1),
        "A log gate is negative.": dict(sign=1),
    }
    hold(answer, [(16, 128), (64, 128), (16, 16)], right, variants(right, mistakes), {"g": ""})


def moved(NK: int, T: int, C: int, V: int) -> int:
    """Bytes a head that the operators of `combine` read and write, each its arguments and its result."""
    A, o = T * C, T * V
    scores = (4 * NK + 4) * A + 6 * A  # sum over blocks, to bfloat16
    inner = 4 * o + 4 * o + (2 * A + 4 * o)  # pad v, put its heads first, the product
    return scores + inner + (4 * NK + 4) * o + 10 * o + 6 * o  # sum over blocks, add, to bfloat16


@ask("ex-fuse-sum")
def total():
    NK, C, T, V = 4, 16, 2048, 512
    least = fuse.steps(B=1, T=T, H=1, K=64 * NK, V=V, C=C)[-1].bytes
    times = moved(NK, T, C, V) / least
    return Question(
        [Part("times the least")],
        [
            (((times - 0.5, times + 0.5),), RIGHT),
            (((-math.inf, 1.2),), "That would need a single kernel: PyTorch's operators hand over in memory."),
            (((-math.inf, times),), "More: each of sum, addition and rounding reads and writes o, and v is copied."),
            ((None,), "Less: the largest, the parts of o, are read once; what follows is smaller."),
        ],
        lambda answer: [number(answer)],
    )


def _prepare(q, k, g, C, to_end=decay_to_end, scale=None, exp=torch.exp, on_k=1.0):
    """(q_g, k_g); C = None forgets the chunks."""
    s, rows = q.shape[1] ** -0.5 if scale is None else scale, []
    for q_n, k_n, g_n in zip(*(x.split(C or len(x)) for x in (q, k, g)), strict=True):
        rows.append((s * q_n * exp(g_n.cumsum(0)), on_k * k_n * exp(to_end(g_n))))
    return tuple(map(torch.cat, zip(*rows, strict=True)))


@exercise("ex-fuse-prepare", "implement")
def prepare(answer):
    mistakes = {
        "scale is forgotten: it belongs to q, in every form.": dict(scale=1.0),
        "scale is on k as well: the scores have it twice.": (lambda *x: _prepare(*x, on_k=x[1].shape[1] ** -0.5)),
        "The sums are not restarted: each chunk has its own start and its own last token.": (
            lambda q, k, g, C: _prepare(q, k, g, None)
        ),
        "k is decayed by its own gate as well: its write passes the gates after it.": dict(to_end=reverse_sum),
        "k has the decay from the chunk's start; its writes need the decay to the end.": dict(to_end=decay_from_start),
        "The bases are mixed: exp2 needs sums of g / ln 2.": dict(exp=torch.exp2),
        "The bases are mixed: sums of g / ln 2 belong to exp2.": dict(exp=lambda b: (b / math.log(2)).exp()),
        "last_decay - b is a difference: after a reset -inf - (-inf), NaN. Add up from the end.": dict(
            to_end=lambda g: g.sum(0) - g.cumsum(0)
        ),
    }
    q, k, noise = draw(6, (11, 3), (11, 3), (11, 3))
    mild = F.logsigmoid(noise)
    resets = mild.clone()
    resets[1, 0] = resets[5] = -torch.inf
    cases = [(q, k, mild, 4), (q, k, resets, 4)]
    hold(answer, cases, _prepare, variants(_prepare, mistakes), {"q_g": "T K", "k_g": "T K"})
