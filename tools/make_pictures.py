"""Draw the tiles of a chunkwise form: the logo and README's picture."""

from pathlib import Path

STATIC = Path(__file__).resolve().parents[1] / "book" / "_static"
GREY, ORANGE, PINK = "#8c96a3", "#e69f00", "#cc79a7"
LEGEND = {
    GREY: "between chunks: one product with the state",
    ORANGE: "between sub-chunks of a chunk: products of scaled q and k",
    PINK: "inside a sub-chunk: every exponent by itself",
}


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

rows = [f'<rect width="720" height="{16 * 14 + 2}" rx="8" fill="#fff"/>', *tiles(16, 8, 4, 12, 2)]
for n, (fill, label) in enumerate(LEGEND.items()):
    y = 24 + 26 * n
    rows.append(f'<rect x="300" y="{y}" width="14" height="14" rx="3" fill="{fill}"/>')
    style = 'font-family="system-ui, sans-serif" font-size="14" fill="#222"'
    rows.append(f'<text x="324" y="{y + 12}" {style}>{label}</text>')
write("tiles.svg", 720, 226, rows, "Queries by keys: 16 tokens, C = 8, c = 4")
