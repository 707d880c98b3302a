"""Draw book/_static/logo.svg: the tiles of a chunkwise form (python tools/make_logo.py)."""

from pathlib import Path

N, SIZE, GAP = 4, 22, 3  # tiles a side, their size, the space between them
STEP = SIZE + GAP
PINK, ORANGE, GREY = "#cc79a7", "#e69f00", "#8c96a3"  # inside a sub-chunk, inside a chunk, between


def tile(i: int, j: int) -> str:
    colour = PINK if i == j else ORANGE if i // 2 == j // 2 else GREY
    x, y = GAP + j * STEP, GAP + i * STEP
    return f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="4" fill="{colour}"/>'


side = N * STEP + GAP
rows = [tile(i, j) for i in range(N) for j in range(i + 1)]
svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}">\n' + "\n".join(rows)
(Path(__file__).parents[1] / "book/_static/logo.svg").write_text(svg + "\n</svg>\n")
