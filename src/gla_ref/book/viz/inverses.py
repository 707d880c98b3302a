"""Four ways to invert a triangle, in six precisions, on keys that are more or less alike (chapter 21)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import triangular
from ...rounding import PRODUCTS, products_in
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, part, raised, rect, text

__all__ = ["ALIKE", "ROWS", "STRENGTHS", "WAYS", "errors", "inverses", "triangles"]

STRENGTHS, ROWS, ALIKE = (0.5, 1.0, 2.0), (16, 64, 128), (0.0, 0.5, 0.9, 0.99, 1.0)
WAYS = {
    "row by row": triangular.substitution,
    "blocks of 16": triangular.blocked,
    "halves": triangular.halves,
    "doubling": triangular.doubling,
}
NAMES = {"ieee": "fp32", "tf32x3": "TF32×3", "bf16x3": "bf16×3", "tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
K = 128


def triangles(n: int) -> Tensor:
    """A of n tokens for each of `STRENGTHS` and `ALIKE`, `[3, 5, n, n]`, float64; keys of length 1 in 128 channels."""
    generator = torch.Generator().manual_seed(0)
    one, own = (torch.randn(m, K, generator=generator, dtype=torch.float64) for m in (1, n))
    rho = torch.tensor(ALIKE, dtype=torch.float64)[:, None, None]
    k = F.normalize(rho.sqrt() * F.normalize(one, dim=-1) + (1 - rho).sqrt() * F.normalize(own, dim=-1), dim=-1)
    return torch.tensor(STRENGTHS, dtype=k.dtype)[:, None, None, None] * (k @ k.mT).tril(-1)


def errors(n: int) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """By strength and keys, `[3, 5]`: the largest entry of Y, and its largest error for each way and precision."""
    A = triangles(n)
    exact, found = triangular.substitution(A), {}
    for way, inverse in WAYS.items():
        for precision in PRODUCTS if way != "row by row" else ("ieee",):
            with products_in(precision):
                Y = inverse(A.float())
            found[way, precision] = (Y.double() - exact).abs().amax((-2, -1))  # NaN if there is one
    return exact.abs().amax((-2, -1)), found


def _power(x: float) -> str:
    """One digit and a power of ten."""
    if not math.isfinite(x):
        return "NaN"
    if x == 0:
        return "0"
    digit, power = f"{x:.0e}".split("e")
    return f"{digit}·10{raised(int(power))}"


LEFT, TOP, WIDE, HIGH = 96, 34, 50, 36


def _frame(n: int, at: tuple[int, int], largest: Tensor, found: dict[tuple[str, str], Tensor]) -> Frame:
    pieces = [text(LEFT + WIDE * (j + 0.5), TOP - 14, name) for j, name in enumerate(NAMES.values())]
    for row, way in enumerate(WAYS):
        y = TOP + HIGH * row
        pieces.append(text(LEFT - 8, y + HIGH / 2, way, "end"))
        for j, (precision, name) in enumerate(NAMES.items()):
            tile = LEFT + WIDE * j + 1, y + 1, WIDE - 2, HIGH - 2
            if (way, precision) not in found:
                pieces.append(part(f"{way}: no matrix products, nothing to round", rect(*tile, "pale-grey")))
                continue
            x = found[way, precision][at].item()
            kind = "pale-blue" if x < 1e-5 else "sky" if x < 1e-2 else "orange" if x < 1 else "pink"
            pieces.append(part(f"{way}, {name}: {_power(x)}", cell(*tile, kind, _power(x))))
    wrong = {name: _power(found[name][at].item()) for name in (("doubling", "ieee"), ("blocks of 16", "tf32"))}
    return Frame(
        pieces,
        f"{n} rows, β = {STRENGTHS[at[0]]:g}, keys alike {ALIKE[at[1]]:g}: the inverse has entries up to "
        f"{largest[at].item():.1f}. "
        f"Doubling in fp32 is off by {wrong['doubling', 'ieee']}, blocks in TF32 by {wrong['blocks of 16', 'tf32']}.",
    )


def inverses() -> Explorable:
    """The largest error of the inverse, by way, precision, strength, rows and keys."""
    by_rows = {n: errors(n) for n in ROWS}
    frames = [
        [[_frame(n, (b, i), *by_rows[n]) for i in range(len(ALIKE))] for n in ROWS] for b in range(len(STRENGTHS))
    ]
    return Explorable(
        title="How wrong is the inverse?",
        notice="Each tile is the largest error of an entry of the inverse. With random keys nothing is ever wrong by "
        "much. Make the keys alike, and doubling breaks: even in float32, and long before the other ways lose a digit. "
        "With equal keys and β = 1 or 2 all numbers are whole, so the other ways make no error at all.",
        alt="A table of tiles: four ways to invert by six precisions of matrix products, each tile with an error.",
        controls=(Choice("Strength β", STRENGTHS), Choice("Rows", ROWS), Slider("Keys alike", ALIKE)),
        frames=frames,
        height=TOP + HIGH * len(WAYS) + 6,
        start=(1, 1, 2),
        legend=(
            Key("pale-blue", "below 10⁻⁵"),
            Key("sky", "below 10⁻²"),
            Key("orange", "below 1"),
            Key("pink", "1 and more, or NaN"),
            Key("pale-grey", "no matrix products"),
        ),
        question=Question(
            "64 keys that are nearly equal, everything in float32: which way breaks?",
            "doubling",
            {
                "row by row": "It handles only rows of the inverse, which are small.",
                "blocks of 16": "Its blocks are inverses of smaller triangles, which are small as well.",
                "doubling": "Its powers of the triangle have entries beyond 10¹⁷, which cancel in the end.",
            },
            seen=(1, 1, ALIKE.index(0.99)),
        ),
    )
