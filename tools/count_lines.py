"""Lines by room, of the working tree or of a commit: python tools/count_lines.py [COMMIT].

Python of src, tests, tools and benchmarks, and of the book its extensions; scripts and styles wherever they lie, but
not KaTeX's; the code cells of the chapters. Blank lines and comments count.
"""

import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

KINDS = {".py": "Python", ".js": "js, css", ".css": "js, css", ".md": "cells"}
CELL = re.compile(r"^```\{code-cell\}.*\n((?:.*\n)*?)```$", re.M)
FOLDERS = ("src", "tests", "tools", "benchmarks", "book")
ROOT = Path(__file__).parents[1]


def git(*args: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True).stdout


def sources(commit: str | None) -> dict[str, bytes]:
    """The files below FOLDERS by path."""
    if commit is None:
        names = git("ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS).decode().splitlines()
        return {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, *FOLDERS))) as archive:
        return {x.name: archive.extractfile(x).read() for x in archive if x.isfile()}


def rooms(files: dict[str, bytes]) -> dict[str, dict[str, int]]:
    """Lines of each kind by folder (of src: by package), totals of src and of everything included."""
    lines = defaultdict(lambda: dict.fromkeys(KINDS.values(), 0))
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.suffix in KINDS and "katex" not in path.parts and (path.suffix != ".md" or path.parts[0] == "book"):
            text = content.decode()
            counted = "".join(CELL.findall(text)) if path.suffix == ".md" else text
            for room in {"/".join(path.parts[:-1][:3]), path.parts[0], "all"}:
                lines[room][KINDS[path.suffix]] += counted.count("\n")
    return {room: lines[room] for room in sorted(lines, key=lambda room: (room == "all", room))}


if __name__ == "__main__":
    print(f"{'':24}{''.join(f'{kind:>10}' for kind in dict.fromkeys(KINDS.values()))}{'all':>10}")
    for room, counts in rooms(sources(*sys.argv[1:] or [None])).items():
        print(f"{room:24}{''.join(f'{n:10,}' for n in counts.values())}{sum(counts.values()):10,}")
