"""Count the lines of a kernel file: non-blank, without comments and docstrings.

    python tools/kernel_lines.py [FILE ...] [--entry NAME]

What the entry (default: the file's own name) reaches, by the names that its source mentions, is
forward: kernels, their tables and launchers. The rest of the file, but for imports, is backward.
Beside it: the lines of helpers that it shares with other kernels (modules whose names begin with an
underscore), as far as they are imported. Lines longer than 120 columns are an error.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from pathlib import Path

from tabulate import tabulate

KERNELS = Path(__file__).resolve().parents[1] / "src" / "gla_ref" / "kernels"
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}  # fmt: skip


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code."""
    tree, found = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found -= set(range(node.lineno, node.end_lineno + 1))
    return found


def pieces(text: str) -> list[tuple[str, set[int], set[str]]]:
    """(name, lines, names mentioned) of each function, method and other statement of a module."""
    lines, found = code_lines(text), []

    def add(node, name, without=()):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        own = lines & set(range(first, node.end_lineno + 1))
        for other in without:
            own -= set(range(other.lineno, other.end_lineno + 1))
        parts = [n for n in ast.walk(node) if not without or n not in inside(without)]
        mentioned = {n.id for n in parts if isinstance(n, ast.Name)}
        mentioned |= {n.attr for n in parts if isinstance(n, ast.Attribute)}
        found.append((name, own, mentioned))

    def inside(nodes):
        return {n for node in nodes for n in ast.walk(node)}

    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            add(node, node.name, methods)
            for method in methods:
                own = method.name if method.name != "__init__" else node.name
                add(method, own)
        elif isinstance(node, ast.FunctionDef):
            to = node.decorator_list[0] if node.name == "_" else None  # _forward.register_fake
            add(node, to.value.id if to else node.name)
        elif isinstance(node, ast.Assign):
            add(node, node.targets[0].id)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            add(node, "")
    return found


def reached(text: str, entries: set[str]) -> set[int]:
    """Lines of a module's text that the entries reach."""
    every, done, new = pieces(text), set(), set(entries)
    while new:
        done |= new
        mentioned = [names for name, _, names in every if name in new]
        new = {n for names in mentioned for n in names} & {name for name, _, _ in every} - done
    return {i for name, own, _ in every if name in done for i in own}


def count(text: str, entry: str) -> dict[str, int]:
    """{"forward": lines, "backward": lines} of a module's text, without imports."""
    forward, every = reached(text, {entry}), set().union(*(own for _, own, _ in pieces(text)))
    return {"forward": len(forward), "backward": len(every - forward)}


def shared(path: Path) -> int:
    """Lines of the helper modules beside a kernel file that its imports reach."""
    names: dict[Path, set[str]] = {}
    files = [path]
    for file in files:  # grows on the way
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module[0] == "_":
                helper = file.parent / f"{node.module}.py"
                names.setdefault(helper, set()).update(a.name for a in node.names)
                files += [helper] if helper not in files else []
    return sum(len(reached(file.read_text(), entries)) for file, entries in names.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(KERNELS.glob("[a-z]*.py")))
    parser.add_argument("--entry", help="the function to start from")
    args = parser.parse_args()
    rows = []
    for path in args.files:
        text = path.read_text()
        if long := [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 120]:
            sys.exit(f"{path}: longer than 120 columns: lines {long}")
        rows.append([path.stem, *count(text, args.entry or path.stem).values(), shared(path)])
    print(tabulate(rows, ["file", "forward", "backward", "shared helpers"]))


if __name__ == "__main__":
    main()
