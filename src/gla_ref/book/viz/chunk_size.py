"""Chunk length from recurrent to parallel: the way of every pair, and the costs (chapter 6)."""

from collections.abc import Iterable

import torch

from ... import linear_attention
from ..costs import cost
from ._explorable import Explorable, Frame, Key, Question, Slider
from ._svg import part, path, rect, text

__all__ = ["chunk_size"]

T, D = 64, 16
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
LEFT, TOP, CELL = 8, 26, 3  # the map's corner, a cell's side
NAME, VALUE = 224, 392  # edges of the bars
MEANS = {
    "matrix FLOPs": "all the arithmetic that is done in products of matrices",
    "steps in a chain": "how many steps wait for the one before",
    "FLOPs in a step": "work that can be done at the same time",
    "tensor bytes": "q, k, v and o, each moved once",
    "state bytes": "a state written and read for each chunk",
}


def chunk_size() -> Explorable:
    """One head of linear attention, T = 64 and K = V = 16; counts from `costs.cost`, the map from the form itself."""
    rows = [_counts(C) for C in LENGTHS]
    largest = {name: max(row[name] for row in rows) for name in rows[0]}
    frames = [_frame(C, row, rows[0], largest) for C, row in zip(LENGTHS, rows, strict=True)]
    return Explorable(
        title="From recurrent to parallel",
        notice="Each doubling of C halves the steps and the state bytes: one state written and one read per step, "
        "unless a kernel keeps it on the chip. All FLOPs of a step can run at the same time. Up to C = 16, the head "
        "size, all FLOPs stay below twice those of C = 1. The next doubling adds half as much again, the last one two "
        "thirds, and a longer text in a single chunk nearly twice.",
        alt="Left, a lower triangle of outputs by tokens: blue triangles of width C along the diagonal are computed as "
        "scores, all left of them in red goes through the state. Right, five bars: FLOPs, steps, FLOPs in a step, "
        "bytes of tensors, bytes of states.",
        controls=(Slider("Chunk length C", LENGTHS),),
        frames=frames,
        height=224,
        start=(3,),
        legend=(
            Key("pale-blue", "scores, inside a chunk"),
            Key("pale-red", "through the state"),
            Key("blue", "of the largest (pale)"),
            Key("pale-grey faint", "the largest of all C"),
        ),
        question=Question(
            "From C = 1 to C = 16 the steps fall to a sixteenth. What do the FLOPs do?",
            "less than double",
            {
                "less than double": "Up to the size of the head, the scores inside a chunk cost little.",
                "sixteen times as many": "Only the blue part grows, and it is small at first.",
                "stay the same": "The scores inside the chunks are new work.",
            },
            seen=(LENGTHS.index(16),),
        ),
    )


def _counts(C: int) -> dict[str, int]:
    n = cost("linear_attention", "chunkwise", B=1, T=T, H=1, K=D, V=D, C=C)
    return {
        "matrix FLOPs": n.matmul_flops,
        "steps in a chain": n.steps,
        "FLOPs in a step": n.matmul_flops // n.steps,
        "tensor bytes": n.bytes,
        "state bytes": 2 * n.steps * n.state_bytes,
    }


def _through_state(C: int) -> list[int]:
    """For every output, the number of tokens that reach the output only through the state.

    The values are unit vectors, so row t of an output shows each token's contribution. Packed as sequences of their
    own, the chunks have no state to read.
    """
    torch.manual_seed(0)
    q, k = torch.rand(2, 1, T, 1, D, dtype=torch.float64)  # positive, so no product is 0 by accident
    v = torch.eye(T, dtype=torch.float64)[None, :, None]
    whole, _ = linear_attention.chunkwise(q, k, v, C=C)
    alone, _ = linear_attention.chunkwise(q, k, v, C=C, cu_seqlens=torch.arange(0, T + 1, C))
    return ((whole != 0) & (alone == 0))[0, :, 0].sum(-1).tolist()


def _frame(C: int, row: dict[str, int], first: dict[str, int], largest: dict[str, int]) -> Frame:
    inter = _through_state(C)
    pieces = [
        text(LEFT, 10, "outputs ↓ by tokens →", "start"),
        part("Pairs inside a chunk: a score each, in a product of matrices.", _stairs(range(1, T + 1), "pale-blue")),
        part("Pairs in different chunks: they meet through the state and have no score.", _stairs(inter, "pale-red")),
        text(LEFT + CELL * 46, TOP + CELL * 14, "future", "faint"),
    ]
    for n in range(C, T, C):
        if C >= 4:  # a line for each chunk
            y = TOP + CELL * n
            pieces.append(path([(LEFT, y), (LEFT + CELL * (n + C), y)], "line faint"))
    for i, (name, value) in enumerate(row.items()):
        y = TOP + 40 * i
        bar = (
            rect(NAME, y + 10, VALUE - NAME, 9, "pale-grey faint"),
            rect(NAME, y + 10, (VALUE - NAME) * value / largest[name], 9, "blue"),
            text(NAME, y, name, "start"),
            text(VALUE, y, f"{value:,}", "end strong"),
        )
        pieces.append(part(f"{name}: {MEANS[name]}.", *bar))
    form = {1: "the recurrent form", T: "the parallel form"}.get(C, f"{T // C} chunks")
    ratio = row["matrix FLOPs"] / first["matrix FLOPs"]
    share = sum(inter) / (T * (T + 1) / 2)
    steps = row["steps in a chain"]
    said = (
        f"C = {C}, {form}: {steps} step{'s, one after the other' if steps > 1 else ''}; {ratio:.2f} times the FLOPs "
        f"of C = 1; {share:.0%} of the pairs (output, token) meet through the state."
    )
    return Frame(pieces, said)


def _stairs(widths: Iterable[int], kind: str) -> str:
    """The first widths[t] tokens of every row t, as one closed path."""
    corners = [(0, 0)]
    for t, width in enumerate(widths):
        if width != corners[-1][0]:
            corners += [(corners[-1][0], t), (width, t)]
    corners += [(corners[-1][0], T), (0, T)]
    return path([(LEFT + CELL * i, TOP + CELL * t) for i, t in corners], kind, closed=True)
