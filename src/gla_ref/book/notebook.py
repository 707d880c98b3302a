"""Helpers of the cells in chapters 1 to 25: sentences and tables with computed numbers, and excerpts of code."""

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

# the name of a chapter's page: two digits, and a slug (15_gradients)
CHAPTER = re.compile(r"(\d\d[a-z]?)_\w+$")


def chapters(book: Path) -> dict[str, str]:
    """The pages of the chapters in the order of reading, each with its number: {"15_gradients": "15"}."""
    found = {path.stem: CHAPTER.match(path.stem) for path in sorted(Path(book).glob("*.md"))}
    return {page: match[1].lstrip("0") for page, match in found.items() if match}


def say(text: str) -> None:
    """Show a sentence whose numbers were computed in this cell, as Markdown: `say(f"It takes {ms:.2f} ms.")`.

    The site folds the cell's code away and shows the sentence in the text; a notebook prints the sentence under its
    cell. In both, the number comes from the program.
    """
    from IPython.display import Markdown, display

    display(Markdown(text))


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Show a small table whose numbers were computed in this cell; all but its first column are set to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    say("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


def excerpt(function: Callable, first: str = "", last: str = "") -> None:
    """Show lines of a function's own source, from the first that contains `first` to the next that contains `last`.

    A chapter explains a kernel a few lines at a time, and shows the lines that run.
    """
    lines = inspect.getsource(getattr(function, "fn", function)).splitlines()
    start = next(n for n, line in enumerate(lines) if first in line)
    stop = next(n for n, line in enumerate(lines) if n >= start and last in line) if last else len(lines) - 1
    say("```python\n" + textwrap.dedent("\n".join(lines[start : stop + 1])) + "\n```")


def narrow(lines: Sequence[str], width: int = 88) -> list[str]:
    """Lines of code for a narrow page: long comments come above their lines, wrapped; code stays as it is."""
    found = []
    for line in lines:
        code, mark, comment = line.rpartition("# ")
        if len(line) <= width or not mark or " " not in comment or (code.strip() and not code.endswith("  ")):
            found.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        found += textwrap.wrap(comment, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        found += [code.rstrip()] if code.strip() else []
    return found


def sci(x: float) -> str:
    """A number in a sentence of `say`, to one digit: 0.00041 is $4 \\cdot 10^{-4}$."""
    digit, power = f"{x:.0e}".split("e")
    return f"${digit} \\cdot 10^{{{int(power)}}}$"
