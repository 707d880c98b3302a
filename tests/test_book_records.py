"""Sentences about measurements are made from the records: where a record changes, so do its sentences."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import torch
from cases import thin

pytest.importorskip("jupyter_book", reason="the book's tools are not installed")

from matplotlib import pyplot

from gla_ref import results
from gla_ref.book import notebook, scoreboard

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def code(path: Path) -> list[str]:
    """The cells of a notebook that are the chapter's own."""
    cells = nbformat.read(path, 4).cells
    return [c.source for c in cells if c.cell_type == "code" and "install" not in c.metadata.get("tags", [])]


CELLS = {path.stem: code(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def reads_a_record(cell: str) -> bool:
    """Whether a cell loads a record, and there is one of its kind: what is not measured yet is not said either."""
    kind, suite = (re.search(rf'{name}="(\w+)"\)', cell) for name in (r"results\.load\(kind", "data, suite"))
    measured = not suite or results.select(results.load("h200"), suite=suite[1])
    return "results.load(" in cell and bool(measured) and (not kind or results.load(kind=kind[1]) is not None)


MEASURED = [chapter for chapter, cells in CELLS.items() if any(map(reads_a_record, cells))]
SLOWER = 1.07  # moves every number of two digits
RATES = "copy_gb_s", "matmul_tflop_s", "tokens_a_second", "tokens_a_second_alone"
TIMES = "ms", "us", "s", "seconds", "alone", "replayed", "chunks"  # how names of times end; clocks of chunks
#: a time in a sentence, or a row of a table with decimals
TIME = re.compile(r"\d[^\w|]*\s(?:ms|milliseconds|µs|s)\b|^\|.*\d\.\d")


def names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a cell uses, and those that it defines."""
    uses, defines = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (uses if isinstance(node.ctx, ast.Load) else defines).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defines.add(node.name)
        elif isinstance(node, ast.alias):
            defines.add((node.asname or node.name).split(".")[0])
    return uses, defines


def showing(cells: list[str]) -> list[int]:
    """The cells that read records, or use what was made from them under a name that no other cell gives."""
    given, made, found = Counter(name for cell in cells for name in names(ast.parse(cell))[1]), set(), []
    for n, cell in enumerate(cells):
        for statement in ast.parse(cell).body:
            uses, defines = names(statement)
            if "results." in ast.unparse(statement) or uses & made:
                made |= {name for name in defines if given[name] == 1}
                found.append(n)
    return sorted(set(found))


def slower(value, name: str = ""):
    """A record of the same work on a slower machine: longer times, lower rates; of training, lower scores.

    Of a score that is a share the odds are lower: a chapter may say that nearly all answers are right.
    """
    if isinstance(value, dict):
        inside = name if name.endswith(("_us", " ms")) or name == "evaluations" else ""
        return {own: slower(x, inside or own) for own, x in value.items()}
    if isinstance(value, list):
        return [slower(x, name) for x in value]
    if name == "evaluations" and isinstance(value, float) and 0 < value < 1:
        return value / (value + SLOWER * (1 - value))
    words = re.split("[_ ]", name)  # "floor_ms", and "ms_call" and "us_a_chunk" of the clocks
    time = words[-1] in TIMES or words[0] in ("ms", "us")
    less = name in RATES or name == "evaluations"
    return value * SLOWER ** (-1 if less else time) if isinstance(value, float) or name == "chunks" else value


@pytest.fixture
def told(monkeypatch):
    """What a chapter tells of its records: the lines with a time."""
    monkeypatch.setattr(pyplot, "show", pyplot.close)

    def tell(chapter: str) -> list[str]:
        cells, lines, done = CELLS[chapter], [], set()
        shown, defined = showing(cells), [names(ast.parse(cell))[1] for cell in cells]
        scope = {"__name__": "__main__", "print": lambda *a: lines.append(" ".join(map(str, a)))}
        monkeypatch.setattr(notebook, "say", lambda text: lines.extend(text.splitlines()))
        monkeypatch.setattr(scoreboard, "say", lambda text: None)  # rows of the table without a time stay as they are

        def run(n: int):
            """One cell; where a name is missing, first the cell before it that defines the name."""
            while n not in done:
                mark = len(lines)
                try:
                    exec(compile(cells[n], chapter, "exec"), scope)
                    done.add(n)
                except NameError as missing:
                    del lines[mark:]
                    run(max(i for i in range(n) if missing.name in defined[i]))
                if n not in shown:
                    del lines[mark:]

        for n in shown:
            run(n)
        return [line for line in lines if TIME.search(line)]

    dtype = torch.get_default_dtype()
    yield tell
    torch.set_default_dtype(dtype)  # a chapter may have chosen another


@pytest.mark.parametrize("chapter", thin(MEASURED, "13_gla_kernel", "23_delta_rule_fused"))
def test_a_changed_record_changes_what_is_said(chapter, told, monkeypatch):
    before, load = told(chapter), results.load
    monkeypatch.setattr(results, "load", lambda *a, **k: slower(copy.deepcopy(load(*a, **k))))
    after = told(chapter)
    assert before and len(before) == len(after)
    assert not set(before) & set(after)
