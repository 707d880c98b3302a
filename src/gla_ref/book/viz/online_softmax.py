"""Online softmax step by step: running maximum, running sum, rescaling, tiles (chapter 2)."""

import math

import torch
from torch import Tensor

from ... import softmax
from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, circle, part, path, rect, text

__all__ = ["online_softmax"]

TILES = (1, 2, 3, 4, 8, 12)
TOP, FLOOR, BASE, BAR = 38, 102, 218, 74  # edges of the scores and of the bars, height of exp(0)
LEFT, COLUMN = 8, 32

# e^x of twelve keys and their values; the first four are the example by hand
WEIGHTS = [1, 2, 3, 6, 3, 3, 12, 6, 6, 24, 12, 6]
VALUES = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0], [2, 0, 1]]
VALUES += [[1, 0, 0], [0, 0, 3], [0, 2, 0], [1, 1, 0], [0, 0, 1], [2, 0, 0]]


def online_softmax() -> Explorable:
    """One query reads twelve keys in tiles; `softmax` computes m, d′ and o′ of every frame.

    Two frames a tile: the maximum with the old sum rescaled, and the tile's own sum added.
    """
    x = torch.tensor(WEIGHTS, dtype=torch.float64).log()
    v = torch.tensor(VALUES, dtype=torch.float64)
    frames = [_walk(x, v, b) for b in TILES]
    return Explorable(
        title="Online softmax, tile by tile",
        notice="The sum d′ shrinks only where the maximum rises, and then one factor shrinks all of its terms. "
        "The tile size changes the steps on the way; m, d′ and o′ end the same for every size.",
        alt="Above, the scores of twelve keys as dots and their running maximum as a line; in the middle a bar of "
        "exp(x − m) for every key read; below, the three numbers kept between tiles.",
        controls=(Choice("Keys in a tile", TILES), Slider("Step", range(max(len(row) for row in frames)))),
        frames=frames,
        height=304,
        start=(1, 3),
        legend=(
            Key("blue", "score, already read", "dot"),
            Key("edge", "not read yet", "dot"),
            Key("line-blue", "running maximum m", "line"),
            Key("orange edge", "the current tile"),
            Key("grey edge", "earlier tiles"),
            Key("line dashed", "taken away by the factor"),
            Key("pale-grey edge", "kept between tiles"),
        ),
        question=Question(
            "A score comes that is larger than all before it. What happens to the sum d′ that was kept?",
            "one factor shrinks it",
            {
                "one factor shrinks it": "All of its terms had the same m, so all shrink alike.",
                "it is added up anew": "The keys are gone; but all of their terms shrink alike, so one factor will do.",
                "it stays": "Its terms are relative to the old maximum: they must shrink before new ones join.",
            },
            seen=(1, 3),
        ),
    )


def _walk(x: Tensor, v: Tensor, b: int) -> list[Frame]:
    kept = (x.new_tensor(-torch.inf), x.new_zeros(()), v.new_zeros(3))  # the neutral element
    tiles = []
    frames = [_frame(x, kept, tiles, "Nothing is read yet: m = −∞ and d′ = 0.")]
    for n, i in enumerate(range(0, len(x), b), 1):
        keys = range(i, min(i + b, len(x)))
        x_i, v_i = x[i : i + b], v[i : i + b]
        m_i, d_i = softmax.statistics(x_i)
        _, old = softmax.merge(kept[:2], (m_i, torch.zeros_like(d_i)))  # the old sum, rescaled
        new = softmax.merge_outputs(kept, (m_i, d_i, softmax.safe(x_i) @ v_i))
        tiles = [*tiles, (keys, new[0])]
        name = f"Tile {n}, {_keys(keys)}"
        if n == 1:
            said = f"{name}: the largest score is m = {new[0]:.2f}. There is no sum to rescale."
        elif new[0] > kept[0]:
            said = (
                f"{name}: m rises from {kept[0]:.2f} to {new[0]:.2f}. The factor "
                f"e^({kept[0]:.2f} − {new[0]:.2f}) = {old / kept[1]:.2f} takes d′ from {kept[1]:.2f} to {old:.2f}."
            )
        else:
            said = f"{name}: no score is above m = {kept[0]:.2f}. The factor is 1, d′ = {old:.2f} stays."
        frames.append(_frame(x, kept, tiles, said, added=False))
        said = (
            f"{name} adds {new[1] - old:.2f}: d′ = {old:.2f} + {new[1] - old:.2f} = {new[1]:.2f}. "
            f"Its share of the output is {(new[1] - old) / new[1]:.2f}: o′ = {_vector(new[2])}."
        )
        kept = new
        frames.append(_frame(x, kept, tiles, said))
    return frames


def _frame(x, kept, tiles, said, added=True) -> Frame:
    """One picture: bars and staircase of the tiles (keys, m) read so far, and the boxes of `kept`.

    The last tile's own bars stand only when it is `added`; dashed bars are relative to the m that is kept.
    """
    keys, m = tiles[-1] if tiles else (range(0), kept[0])
    pieces = [rect(_column(keys.start), 24, COLUMN * len(keys), BASE - 24, "orange faint")]
    stairs = [(_column(j), _height(m)) for keys, m in tiles for j in (keys.start, keys.stop)]
    pieces += [path(stairs, "line-blue")] if tiles else []
    pieces += [
        text(8, 12, "scores x and the running maximum m", "start"),
        text(8, 126, "exp(x − m) of the keys so far; their sum is d′", "start"),
        text(8, 254, f"kept {'for the next tile' if added else 'from the tile before'}", "start"),
        path([(LEFT, BASE), (WIDTH - LEFT, BASE)], "line"),
    ]
    for j, x_j in enumerate(x):
        middle = _column(j) + COLUMN / 2
        pieces.append(text(middle, BASE + 14, j + 1, "faint"))
        dot = circle(middle, _height(x_j), 4.5, "blue" if j < keys.stop else "edge")
        pieces.append(part(f"Key {j + 1}: its score is x = {x_j:.2f}, its value {tuple(VALUES[j])}.", dot))
    for j, x_j in enumerate(x[: keys.stop if added else keys.start]):
        pieces.append(_bar(j, x_j, m, "orange edge" if j in keys else "grey edge"))
        if m > kept[0]:
            pieces.append(_bar(j, x_j, kept[0], "line dashed"))
    boxes = ("m", 8, 92, _number(kept[0])), ("d′", 108, 92, _number(kept[1]))
    for name, at, width, value in (*boxes, ("o′", 208, 184, _vector(kept[2]))):
        pieces.append(cell(at, 268, width, 30, "pale-grey edge", f"{name} = {value}"))
    return Frame(pieces, said)


def _column(j: int) -> int:
    return LEFT + COLUMN * j


def _height(y: Tensor) -> float:  # the place of a score
    return FLOOR - (FLOOR - TOP) * y.item() / math.log(max(WEIGHTS))


def _bar(j: int, x_j: Tensor, m: Tensor, kind: str) -> str:
    """A bar of height exp(x_j - m)."""
    e = (x_j - m).exp()
    bar = rect(_column(j) + 6, BASE - BAR * e, COLUMN - 12, BAR * e, kind)
    return bar if "dashed" in kind else part(f"Key {j + 1}: exp({x_j:.2f} − {m:.2f}) = {e:.2f}.", bar)


def _keys(keys: range) -> str:
    first, last = keys.start + 1, keys.stop
    return f"key {last}" if first == last else f"keys {first} {'and' if last - first == 1 else 'to'} {last}"


def _number(y: Tensor) -> str:
    return "−∞" if y == -torch.inf else f"{y:.2f}"


def _vector(o: Tensor) -> str:
    return f"({', '.join(f'{y:.2f}' for y in o)})"
