"""A page for each module that book/api.md lists: written before Sphinx looks for pages, and not committed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gla_ref.book import notebook

LISTED = re.compile(r"(?m)^ +(gla_ref[\w.]*)$")
#: packages whose modules have nothing to call: a docstring, and functions for the package's own use
INNER = ("gla_ref.book.exercises.", "gla_ref.kernels.", "gla_ref.over_ranks.")


def source(root: Path, module: str) -> Path:
    path = root / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def chapters(root: Path, text: str) -> list[str]:
    """The pages of the chapters that a docstring's first line names; none where it names most of the book."""
    number = r"\d+[a-z]?\b"
    if not (named := re.search(rf"[Cc]hapters? ({number}(?:(?:, | and | to ){number})*)", text.split("\n")[0])):
        return []
    numbers = set(re.findall(number, named[1]))
    for first, last in re.findall(r"(\d+) to (\d+)", named[1]):
        numbers |= set(map(str, range(int(first), int(last) + 1)))
    pages = [page for page, n in notebook.chapters(root / "book").items() if n in numbers]
    return pages if len(pages) <= 5 else []


def page(root: Path, module: str) -> str:
    """The page of a module: where it is taught, its docstring, and the members that it offers.

    What a package hands on from modules with pages of their own is described there.
    """
    tree = ast.parse(source(root, module).read_text())
    shown = {name.value for node in tree.body if isinstance(node, ast.Assign)
             if getattr(node.targets[0], "id", "") == "__all__"
             for name in ast.walk(node.value) if isinstance(name, ast.Constant)}  # fmt: skip
    handed_on = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.level
                 and not (node.module or "_").startswith("_") for alias in node.names}  # fmt: skip
    inner = module.startswith(INNER) and not shown
    members = "" if inner or shown and shown <= handed_on else "   :members:\n"
    links = ", ".join(f"{{doc}}`/book/{name}`" for name in chapters(root, ast.get_docstring(tree) or ""))
    taught = f"Explained in {links}.\n\n" if links else ""
    return f"# {module}\n\n{taught}```{{eval-rst}}\n.. automodule:: {module}\n{members}```\n"


def write_pages(app, config):
    """One file a module in book/api; what is no longer listed goes."""
    book = Path(app.srcdir) / "book"
    if not (book / "api.md").exists():
        return
    pages = {f"{name}.md": page(book.parent, name) for name in LISTED.findall((book / "api.md").read_text())}
    folder = book / "api"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def skip_fields(app, what, name, obj, skip, options):
    """Leave out the fields of a named tuple, whose docstrings only count them: the signature has them all."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def leave_inner_document(app, doctree):
    """Of the document in which {eval-rst} parses, whose settings hold the whole build: 6 MB stored with each page."""
    for node in doctree.findall():
        node.document = doctree


def setup(app):
    app.connect("config-inited", write_pages)
    app.connect("doctree-read", leave_inner_document)
    app.connect("autodoc-skip-member", skip_fields)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
