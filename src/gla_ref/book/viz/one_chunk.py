"""One chunk of the GLA kernel, step by step: the tiles that a step reads and makes, and its costs (chapter 13)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._explorable import WIDTH, Explorable, Frame, Key, Question, Slider
from ._svg import cell, part, rect, text

__all__ = ["Step", "one_chunk", "walk"]

C, K, V = 64, 128, 64  # a chunk of the kernel in bf16: V is the tile of columns that one program owns


class Step(NamedTuple):
    """A step of the chunk."""

    words: str
    reads: str  # tiles, by their names in PLACES
    makes: str
    flops: int = 0  # in products of matrices
    bytes: int = 0  # to or from memory


def walk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor, list[Step]]:
    """A chunk as :mod:`gla_ref.pages.gla` computes it: o / scale, the next state, the steps."""
    flops = 0

    def product(x, y):
        nonlocal flops
        flops = 2 * x.shape[0] * x.shape[1] * y.shape[1]
        return x @ y

    size, steps = 2, []  # bytes a number, in bf16

    def step(words, reads, makes, moved=0):
        nonlocal flops
        steps.append(Step(words, reads, makes, flops, moved * size))
        flops = 0

    tril = torch.ones(len(q), len(q), dtype=q.dtype).tril()
    ones = torch.ones(len(q), 16, dtype=q.dtype)
    step("Load the chunk: gates, queries, keys, and my columns of the values.", "",
         "g q k v", q.numel() + k.numel() + g.numel() + v.numel())  # fmt: skip
    x = product(2 * tril - 1, g / 2)
    step("Exponents x = b − r: a matrix of ±1 times half of the gates.", "g", "x")
    r = product(g.T / 2, ones)[:, 0]
    step("The anchor r, half of each channel's decay: half of the gates times ones.", "g", "r")
    q, k = q * x.exp(), k * (-x).exp()
    step("Scale: q̂ = q exp(x), k̂ = k exp(−x). The gates have done their work.", "x q k", "q k")
    S = r.exp()[:, None] * S
    step("Bring the state halfway into the chunk: each row times its exp(r).", "r S", "S")
    P = product(q, k.T)
    step("All scores of the chunk in one product, P = q̂ k̂ᵀ.", "q k", "P")
    P = torch.where(tril > 0, P, 0)
    step("Select the lower triangle. Scores above it may be huge, and are dropped.", "P", "P")
    o = product(q, S)
    step("The tokens read from the state: o = q̂ Ŝ.", "q S", "o")
    o = o + product(P, v)
    step("The tokens read from each other: o += P v.", "P v", "o")
    S = r.exp()[:, None] * (S + product(k.T, v))
    step("Write: S += k̂ᵀ v, and then the other half of the chunk's decay, exp(r), for old and new.", "k v r", "S")
    step("Store o. The state stays in the registers for the next chunk.", "o", "", o.numel())
    return o, S, steps


# left, top, width, height of each tile: half a unit for a token, 5/8 for a channel of K or V
PLACES = {
    "g": (6, 34, 80, 40), "q": (98, 34, 80, 40), "k": (190, 34, 80, 40), "v": (282, 34, 40, 40),
    "x": (6, 124, 80, 40), "r": (98, 124, 80, 16), "P": (190, 124, 40, 40), "o": (282, 124, 40, 40),
    "S": (352, 34, 40, 80),
}  # fmt: skip
BARS = 196
HATS = {"q": "q̂", "k": "k̂", "S": "Ŝ"}  # scaled
#: the meaning of each tile
WHAT = {
    "g": f"log gates, {C} tokens × {K} channels",
    "q": f"queries, {C} × {K}",
    "k": f"keys, {C} × {K}",
    "v": f"the values' columns of this program, {C} × {V}",
    "x": f"exponents about the anchor, {C} × {K}",
    "r": f"the anchor, a number for each of {K} channels",
    "P": f"scores of the chunk's own pairs, {C} × {C}",
    "o": f"outputs, {C} × {V}",
    "S": f"the columns of the state, {K} × {V}, which stay in registers",
}


def _tiles(now: Step, there: set[str]) -> list[str]:
    pieces = [
        text(6, 16, "loaded from memory", "start strong"),
        text(6, 106, "made on the chip", "start strong"),
        text(WIDTH - 8, 16, "kept", "end strong"),
    ]
    for name, (x, y, width, height) in PLACES.items():
        kind = "orange" if name in now.makes else "pale-blue" if name in now.reads else "pale-grey"
        shown = HATS[name] if HATS.get(name) in there else name
        look = (kind, shown, "on") if name in there else ("edge", shown, "")
        pieces.append(part(f"{shown}: {WHAT[name]}.", cell(x, y, width, height, *look)))
    return pieces


def _bars(done: list[Step], every: list[Step]) -> list[str]:
    pieces = []
    for y, what, counts, shown, kind in (
        (BARS, "products", "flops", lambda n: f"{n / 1e6:.1f} MFLOP", "sky"),
        (BARS + 26, "memory", "bytes", lambda n: f"{n / 1024:.0f} KiB", "grey"),
    ):
        so_far, most = (sum(getattr(step, counts) for step in steps) for steps in (done, every))
        pieces += [
            text(70, y + 9, what, "end"),
            rect(80, y, 220 * so_far / most, 18, kind),
            rect(80, y, 220, 18, "edge"),
            text(WIDTH - 8, y + 9, shown(so_far), "end"),
        ]
    return pieces


def one_chunk() -> Explorable:
    """The eleven steps of a chunk in :mod:`gla_ref.pages.gla`."""
    generator = torch.Generator().manual_seed(0)
    q, k, g = torch.randn(3, C, K, generator=generator, dtype=torch.float64)
    v, S = torch.randn(C, V, generator=generator, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64)
    _, _, steps = walk(q, k, v, -g.abs() / 64, S)
    frames, there = [], {"S"}
    for n, now in enumerate(steps):
        made = set(now.makes.split())
        scaled = {HATS[name] for name in made & there & {"q", "k"}}
        scaled |= {HATS["S"]} if "S" in made and "halfway" in now.words else set()
        there = (there | made | scaled) - ({HATS["S"]} if now.words.startswith("Write") else set())
        frames.append(Frame(_tiles(now, there) + _bars(steps[: n + 1], steps), f"{n + 1}. {now.words}"))
    return Explorable(
        title="One chunk of the kernel",
        notice=f"{C} tokens, {K} channels, and the {V} columns of the state that one program owns, drawn to scale. "
        "Then the next chunk comes, with the same steps.",
        alt="Tiles of g, q, k and v, of exponents, anchor, scores and outputs, and the state. In each step some are "
        "read and some are made; two bars count products and bytes.",
        controls=(Slider("Step", range(1, len(steps) + 1)),),
        frames=frames,
        height=BARS + 54,
        start=(3,),
        legend=(
            Key("orange", "made now"),
            Key("pale-blue", "read now"),
            Key("pale-grey", "there"),
            Key("edge", "not there yet"),
            Key("sky", "products so far"),
            Key("grey", "moved so far"),
        ),
        question=Question(
            "What goes back to memory at the end of a chunk?",
            "o alone",
            {
                "o and the state": "The state stays in the registers until the last chunk.",
                "o alone": "Everything else is needed only on the chip.",
                "o and the scores": "The scores are used once, on the chip, and dropped.",
            },
            seen=(len(steps) - 1,),
        ),
    )
