"""What an executed page depends on: the modules that its cells import, what these import, and the records it names.

All imports count, those inside functions too, with three exceptions: what a module does as a program, the kernels where
no text of the page or of its modules could lead to them, and the judges of other pages' exercises. In doubt a page
depends on the whole package: where it looks for files, and where a name leads to no file.
"""

import ast
import hashlib
import json
import re
import threading
from functools import cache
from pathlib import Path

LOOKS = re.compile(r"glob\(|iterdir\(")  # for files, whichever there are
KERNELS = re.compile(r"FORMS|triton")  # leads to the kernels, which `gla_ref` imports when the first one is called
LABEL = re.compile(r"\bex-[\w-]+")  # of an exercise: `gla_ref.book.exercises` imports all judges
WRITTEN_LATER = ("nightly", "compiled-launches")  # by programs that run after the book is built
PARSING = threading.Lock()  # Python 3.11 cannot parse in two threads: "AST constructor recursion depth mismatch"


@cache
def parsed(code: str) -> ast.Module:
    """Code without IPython's own lines, and without what a module does as a program."""
    tree = ast.parse(re.sub(r"(?m)^[%!].*$", "", code))
    tree.body = [x for x in tree.body if not (isinstance(x, ast.If) and "__main__" in ast.unparse(x.test))]
    return tree


@cache
def strings(code: str) -> frozenset[str]:
    values = (x.value for x in ast.walk(parsed(code)) if isinstance(x, ast.Constant))
    return frozenset(x for x in values if isinstance(x, str))


@cache
def imported(code: str, package: str = "") -> frozenset[str]:
    """The dotted names of gla_ref that code imports; `package` is the one that its relative names start from."""
    names = set()
    for node in ast.walk(parsed(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            names |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in names if name.split(".")[0] == "gla_ref")


def closure(every: dict[str, str], names: set[str]) -> set[str]:
    """The modules of {name: text} that dotted names lead to; all of them if one leads nowhere."""
    pending, found = set(names), set()
    while pending:
        name = pending.pop()
        parent, _, last = name.rpartition(".")
        pending |= {parent} - found - {""}
        if name in every:
            found.add(name)
            package = name if any(other.startswith(f"{name}.") for other in every) else parent
            lead = imported(every[name], package)
            pending |= {x for x in lead if name != "gla_ref" or not x.startswith("gla_ref.kernels")} - found
        elif not re.search(rf"\b{last}\b", every.get(parent, "")):  # no name of the module above it either
            return {*every}
    return found


def modules(src: Path, code: str) -> dict[Path, str]:
    """The files of the package that code runs, or names in a string as `-m gla_ref.x`, with their texts."""
    files = [*(src / "gla_ref").rglob("*.mplstyle"), *(src / "gla_ref").rglob("*.py")]
    files = {".".join(x.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): x for x in files}
    every = {name: x.read_text() if x.suffix == ".py" else "" for name, x in files.items()}
    names = imported(code) | {name for s in strings(code) for name in re.findall(r"\bgla_ref(?:\.\w+)*", s)}
    found = {*every} if LOOKS.search(code) else closure(every, names)
    if "gla_ref.book.exercises" in found:
        labels = {label for s in strings(code) for label in LABEL.findall(s)}
        judges = (x for x in every if x.startswith("gla_ref.book.exercises."))
        names |= {x for x in judges if labels & {*LABEL.findall(every[x])}}
        found |= closure(every, names)
    if any(KERNELS.search(text) for text in [code, *(every[x] for x in found - {"gla_ref"})]):
        found |= closure(every, names | {"gla_ref.kernels.forms"})
    return {files[name]: every[name] for name in found}


@cache
def kinds(record: Path) -> frozenset[str]:
    content = json.loads(record.read_text())
    return frozenset(content) - {"environment"} if isinstance(content, dict) else frozenset()


def files(root: Path, code: str) -> list[Path]:
    """All that the cells of a page read: modules with style sheets, scripts and drawings beside them, records.

    A record counts whose kind ("records", "waits", ...) is a string of the cells or of one of the modules.
    """
    found = modules(root / "src", code)
    near = {x for file in found for x in (*file.parent.iterdir(), *file.with_suffix("").glob("*"))}
    beside = {x for x in near if x.suffix in (".css", ".js", ".svg")}
    named = strings(code).union(*map(strings, found.values()))
    records = [x for x in (root / "benchmarks" / "results").glob("*.json") if x.stem not in WRITTEN_LATER]
    records = [x for x in records if LOOKS.search(code) or kinds(x) & named]
    return sorted([*found, *beside, *records, root / "requirements.txt"])


def key(root: Path, code: str) -> str:
    """A digest of the files that the cells of a page read, and of the names of all pages, notebooks and tests."""
    digest = hashlib.sha256()
    with PARSING:
        read = files(root, code)
    for file in read:
        digest.update(f"{file.relative_to(root)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    listed = [root.glob(name) for name in ("book/*.md", "notebooks/*.ipynb", "tests/test_*.py")]
    digest.update("\n".join(sorted(path.name for names in listed for path in names)).encode())
    return digest.hexdigest()[:16]
