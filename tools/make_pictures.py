"""Draw the logo, and the picture of README and of shared links: one token of gated linear attention."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

STATIC = Path(__file__).resolve().parents[1] / "book" / "_static"
GREY, ORANGE, PINK = "#8c96a3", "#e69f00", "#cc79a7"


def colour(i: int, j: int, chunk: int, sub_chunk: int) -> str:
    """Which part of the two-level form computes the pair of query i and key j <= i."""
    if i // sub_chunk == j // sub_chunk:
        return PINK
    return ORANGE if i // chunk == j // chunk else GREY


def tiles(T: int, chunk: int, sub_chunk: int, size: int, gap: int) -> list[str]:
    step = size + gap
    return [
        f'<rect x="{gap + j * step}" y="{gap + i * step}" width="{size}" height="{size}" '
        f'rx="{size // 5}" fill="{colour(i, j, chunk, sub_chunk)}"/>'
        for i in range(T)
        for j in range(i + 1)
    ]


def write(name: str, width: int, height: int, rows: list[str], title: str) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    text = "\n".join([head, f"<title>{title}</title>", *rows, "</svg>\n"])
    (STATIC / name).write_text(text)


write("logo.svg", 103, 103, tiles(4, 2, 1, 22, 3), "Gated Linear Attention")


# -- the picture: one token of gated linear attention, by the numbers of its recurrence --

BLUE, GREEN = "#0072b2", "#009e73"


def cells(ax, x: float, y: float, values: torch.Tensor, ink: str, size: float = 34) -> tuple[float, float]:
    """A matrix as rounded cells from its upper left corner on, darker for larger numbers; its width and height."""
    for i, row in enumerate(values.abs().clamp(max=1)):
        for j, value in enumerate(row.tolist()):
            colour = [1 - (0.06 + 0.94 * value) * (1 - c) for c in to_rgb(ink)]
            box = (x + j * size + 2, y - (i + 1) * size + 2)
            ax.add_patch(FancyBboxPatch(box, size - 4, size - 4, "round,pad=0,rounding_size=5", lw=0, fc=colour))
    return values.shape[1] * size, values.shape[0] * size


def card(path: Path) -> None:
    """The state before a token, what its gate keeps, what its key and value add, and what its query reads."""
    before = torch.tensor([[0.9, 0.2, 0.6, 0.4], [0.3, 0.8, 0.1, 0.7], [0.7, 0.5, 0.9, 0.1], [0.2, 0.6, 0.4, 0.8]])
    alpha, q = torch.tensor([[1.0], [0.25], [0.8], [0.4]]), torch.tensor([[0.1, 0.9, 0.2, 0.0]])
    k, v = torch.tensor([[0.1, 1.0, 0.0, 0.3]]), torch.tensor([[0.2, 0.9, 0.1, 0.7]])
    after = alpha * before + k.T @ v
    fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 1200), ylim=(0, 630))
    ax.axis("off")
    ax.text(60, 545, "Gated Linear Attention", size=38, weight="bold", color="#222222")
    ax.text(60, 492, "from softmax to silicon", size=24, color="#555555")
    words = {"size": 15, "color": "#333333", "ha": "center", "va": "top"}
    top, size = 375, 46
    spots = (
        (100, before, GREY, "what the model\nremembers"),
        (395, alpha * before, GREY, "fades, each row\nby its own gate"),
        (690, k.T @ v, ORANGE, "the new word is added:\nkey times value"),
        (960, after, BLUE, "and the sum is\nremembered"),
    )
    for x, values, ink, label in spots:
        wide, high = cells(ax, x, top, values, ink, size)
        ax.text(x + wide / 2, top - high - 14, label, **words)
    for x, sign in ((312, "\N{RIGHTWARDS ARROW}"), (607, "+"), (920, "=")):
        ax.text(x, top - 2 * size, sign, size=26, color="#555555", ha="center", va="center")
    cells(ax, 395 - 1.15 * size, top, alpha, PINK, size)
    cells(ax, 690 - 1.15 * size, top, k.T, ORANGE, size)
    cells(ax, 690, top + 1.15 * size, v, ORANGE, size)
    wide, _ = cells(ax, 690, 95, q, GREEN, size)
    ax.text(675, 72, "a query reads:", size=15, color="#333333", ha="right", va="center")
    ax.text(920, 72, "\N{RIGHTWARDS ARROW}", size=26, color="#555555", ha="center", va="center")
    cells(ax, 960, 95, q @ after, GREEN, size)
    fig.savefig(path, dpi=100, metadata={"Software": None}, pil_kwargs={"optimize": True})
    plt.close(fig)


card(STATIC / "card.png")
