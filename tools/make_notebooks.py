"""Write notebooks/NN_slug.ipynb from book/NN_slug.md (python tools/make_notebooks.py [--check]).

Sphinx reads the book without running it; every reference, citation and number is then resolved as
on the site, so that (9.7) there is (9.7) here; the resolved pages are written as the Markdown that
Jupyter and Colab know. Code cells are taken over unchanged: one execution serves site and tests.
"""

import hashlib
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

import build_book
import gla_answers
import gla_package
import myst_nb.sphinx_

sys.modules["rfc3987_syntax"] = None  # 38 grammars that nbformat's import would build, for formats that no schema has
import nbformat
from docutils import nodes
from jupyter_book.config import get_final_config
from myst_nb.core.execute import NotebookClientBase
from nbformat import v4
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
#: stands for a figure that was not drawn: it has a caption and takes a number all the same
NOT_DRAWN = "bm90IGRyYXdu"


def between(before: str, after: str) -> Callable:
    return lambda self, node: f"{before}{self.spans(node)}{after}"


class Markdown:
    """Render a resolved doctree as Markdown; a code cell becomes its index in the page's notebook.

    ``blocks(node)`` yields text and cell indices; ``inline(node)`` returns text.
    """

    def __init__(self, app: Sphinx, page: str):
        self.page, self.base = page, app.config.html_baseurl
        self.numbers = app.env.toc_fignumbers.get(page, {})
        self.titles, self.chapters = app.env.titles, app.env.toc_secnumbers
        self.formats = app.config.numfig_format
        self.macros = sys.modules["gla_book"].MACROS
        self.level = 0
        self.in_table = False

    # -- helpers ---------------------------------------------------------------------------------

    def rendered(self, place: str, node: nodes.Node):
        for kind in type(node).__mro__:
            if method := getattr(self, f"{place}_{kind.__name__}", None):
                return method(node)
        raise NotImplementedError(f"{self.page}: no Markdown for {place} <{node.tagname}>: {node}")

    def number(self, node: nodes.Element) -> str:
        """The node's number on the site, such as 9.7 ('' when it has none)."""
        for numbers in self.numbers.values():
            for id_ in node["ids"]:
                if id_ in numbers:
                    return ".".join(map(str, numbers[id_]))
        return ""

    def tex(self, text: str) -> str:
        for name, value in self.macros.items():
            text = re.sub(re.escape(name) + r"(?![A-Za-z])", lambda _, value=value: value, text)
        if self.in_table:  # a bar would end the table's cell
            text = text.replace(r"\|", r"\Vert ").replace("|", r"\vert ")
        return text.strip()

    def text(self, node: nodes.Element) -> str:
        """A node's blocks as one text, for places where no code cell can stand."""
        return "\n\n".join(self.children(node))

    def children(self, node: nodes.Element, *skip: type) -> Iterator[str | int]:
        for child in node.children:
            if not isinstance(child, skip or (nodes.Invisible,)):
                yield from self.blocks(child)

    def link(self, node: nodes.Element, text: str) -> str:
        uri = node.get("refuri") or "#" + node.get("refid", "")
        if node.get("internal") or uri.startswith("#"):
            if not self.base:
                return text
            uri = urljoin(f"{self.base.rstrip('/')}/{self.page}.html", uri)
        return f"[{text}]({uri})"

    # -- inline ----------------------------------------------------------------------------------

    def inline(self, node: nodes.Node) -> str:
        return self.rendered("inline", node)

    def spans(self, node: nodes.Element) -> str:
        """The content of a node."""
        return "".join(map(self.inline, node.children))

    inline_inline = inline_abbreviation = inline_generated = spans

    def inline_Text(self, node):
        text = re.sub(r"([\\`*$])|(?<!\w)_|_(?!\w)", r"\\\g<0>", node.astext())
        text = re.sub(r"<(?=[A-Za-z/!])", "&lt;", text)
        return text.replace("|", r"\|") if self.in_table else text

    inline_emphasis = inline_title_reference = between("*", "*")
    inline_strong = between("**", "**")
    inline_subscript = between("<sub>", "</sub>")
    inline_superscript = inline_footnote_reference = between("<sup>", "</sup>")

    def inline_literal(self, node):
        text = node.astext()
        fence = "``" if "`" in text else "`"
        text = text.replace("|", r"\|") if self.in_table else text
        return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"

    def inline_math(self, node):
        return f"${self.tex(' '.join(node.astext().split()))}$"

    def inline_reference(self, node):
        page = f"book/{node.get('refuri', '').removesuffix('.html')}"
        number = self.chapters.get(page, {}).get("")
        if number and node.astext() == self.titles[page].astext():  # a chapter by its title
            return self.link(node, f"*{number[0]}. {self.spans(node)}*")
        return self.link(node, self.spans(node))

    inline_number_reference = inline_reference

    def inline_raw(self, node):
        return ""

    inline_target = inline_Invisible = inline_raw

    # -- blocks ----------------------------------------------------------------------------------

    def blocks(self, node: nodes.Node) -> Iterator[str | int]:
        return self.rendered("block", node)

    def nothing(self, node):
        yield from ()

    block_raw = block_target = block_Invisible = block_substitution_definition = nothing

    def block_document(self, node):
        yield from self.children(node)

    block_compound = block_only = block_document

    def block_section(self, node):
        self.level += 1
        yield from self.children(node)
        self.level -= 1

    def block_title(self, node):
        chapter = f"{self.chapters[self.page][''][0]}. " if self.level == 1 else ""
        yield f"{'#' * self.level} {chapter}{self.spans(node)}"

    def block_paragraph(self, node):
        yield self.spans(node).strip()

    def block_rubric(self, node):
        yield self.inline_strong(node)

    def block_transition(self, node):
        yield "---"

    def block_math_block(self, node):
        number = self.number(node)
        tag = f"\n\\tag{{{number}}}" if number else ""
        yield f"$$\n{self.tex(node.astext())}{tag}\n$$"

    def block_literal_block(self, node):
        language = node.get("language", "")
        language = "" if language in ("default", "none") else language
        fence = "````" if "```" in node.astext() else "```"
        yield f"{fence}{language}\n{node.astext()}\n{fence}"

    def block_caption(self, node):
        number = self.number(node.parent)
        figure = isinstance(node.parent, nodes.figure)
        label = self.formats["figure" if figure else "code-block"] % number if number else "Listing"
        yield f"**{label}.** {self.spans(node)}"

    def block_block_quote(self, node):
        yield quote(self.text(node))

    def block_bullet_list(self, node):
        yield "\n".join(indent("* ", self.text(item)) for item in node.children)

    def block_enumerated_list(self, node):
        first = node.get("start", 1)
        items = enumerate(node.children, first)
        yield "\n".join(indent(f"{i}. ", self.text(item)) for i, item in items)

    def block_definition_list(self, node):
        for item in node.children:
            terms = [self.spans(n) for n in item.children if isinstance(n, nodes.term)]
            definition = self.text(item.children[-1])
            yield f"**{', '.join(terms)}**: {definition}"

    def block_table(self, node):
        for title in node.findall(nodes.title):
            yield f"**{self.formats['table'] % self.number(node)}.** {self.spans(title)}"
        self.in_table = True
        rows = [[" ".join(self.text(entry).split()) for entry in row.children] for row in node.findall(nodes.row)]
        self.in_table = False
        first = next(node.findall(nodes.row))
        sides = {"text-right": "--:", "text-center": ":-:"}
        rule = [sides.get(" ".join(entry["classes"]), ":--") for entry in first.children]
        yield "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])

    def block_footnote(self, node):
        label, *body = node.children
        text = "\n\n".join(text for child in body for text in self.blocks(child))
        yield f"<sup>{label.astext()}</sup> {text}"

    def block_container(self, node):
        if node.get("nb_element") == "cell_code":
            yield node["cell_index"]
            for caption in node.findall(nodes.caption):
                yield from self.blocks(caption)
        else:
            yield from self.children(node)

    def block_dropdown_main(self, node):
        title, body = node.children
        yield details(self.spans(title), self.text(body))

    # -- boxes: a bold title, then the text; a quotation where no displayed formula forbids it -----

    def block_Admonition(self, node):
        if "realtype" in node:  # sphinx-proof's
            yield from self.box(node["realtype"].capitalize(), node)
            return
        # a proof says so itself
        title = "" if isinstance(node, nodes.admonition) else node.tagname.capitalize()
        if isinstance(node.children[0], nodes.title):
            title = self.spans(node.children[0])
        body = "\n\n".join(self.children(node, nodes.title))
        box = f"**{title}.** {body}" if title else body
        yield box if next(node.findall(nodes.math_block), None) else quote(box)

    def block_proof_node(self, node):
        yield from self.children(node.children[0])

    def box(self, name: str, node: nodes.Element) -> Iterator[str | int]:
        """A numbered box of sphinx-proof or sphinx-exercise: its title, then its content."""
        title, content = node.children
        yield f"**{name} {self.number(node)}{self.spans(title).rstrip()}.**"
        yield from self.children(content)

    def block_exercise_enumerable_node(self, node):
        yield from self.box("Exercise", node)

    def block_solution_node(self, node):
        title, content = node.children
        blocks = list(self.children(content))
        if any(isinstance(block, int) for block in blocks):  # code cells cannot be folded with it
            yield f"**{self.spans(title)}.**"
            yield from blocks
        else:
            yield details(self.spans(title), "\n\n".join(blocks))


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def indent(bullet: str, text: str) -> str:
    return bullet + textwrap.indent(text, " " * len(bullet)).lstrip()


def read_book(root: Path, out: str) -> tuple[Sphinx, dict[str, nbformat.NotebookNode]]:
    """Read the book without running its code; also return each page's code cells."""
    pages: dict[str, nbformat.NotebookNode] = {}

    class NotRun(NotebookClientBase):
        def start_client(self):
            for cell in self.notebook.cells:
                if "figure" in cell.metadata.get("mystnb", {}):
                    cell.outputs = [v4.new_output("display_data", {"image/png": NOT_DRAWN})]

    def client(notebook, source, config, logger, read_fmt=None):
        pages[Path(source).stem] = notebook
        return NotRun(notebook, None, config, logger)

    myst_nb.sphinx_.create_client = client
    settings, _ = get_final_config(
        user_yaml=root / "_config.yml", sourcedir=root, cli_config={"latex_individualpages": False}
    )
    tags = [gla_answers.NOTEBOOKS]
    app = Sphinx(root, None, f"{out}/html", f"{out}/doctrees", "html", settings, status=None, tags=tags)
    list(app.env.check_dependents(app, set(app.builder.read())))  # assigns the numbers
    return app, pages


#: how a notebook gets the package; `address` is where the site or the repository has it, or empty
INSTALL = """\
# Installs the book's package where it is missing{origin}.
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

needed = "gla_ref", "matplotlib"
if not all(map(find_spec, needed)):
    wheel = next(Path().glob("gla_ref-*.whl"), None)
    address = wheel.resolve().as_uri() if wheel else "{address}"
    if address:
        %pip install -q "gla_ref[notebook] @ {{address}}"
    invalidate_caches()
    if not all(map(find_spec, needed)):
        raise RuntimeError(
            "This notebook needs the book's package and matplotlib. Download {wheel} "
            "from where you have the notebook, into the same folder, and run this cell again."
        )"""


def install_cell(wheel: str, address: str) -> nbformat.NotebookNode:
    """The first cell: how this notebook gets the package."""
    origin = ": the wheel beside this notebook" + (", or else from the web" if address else "")
    source = INSTALL.format(wheel=wheel, address=address, origin=origin)
    return v4.new_code_cell(source, metadata={"tags": ["install"]})


def package_address(app: Sphinx) -> str:
    """The place to install the package from: the published site's wheel, else the repository, else none."""
    options = app.config.html_theme_options
    url, branch = options.get("repository_url", ""), options.get("repository_branch", "")
    repository = f"git+{url.rstrip('/')}@{branch}" if url else ""
    return gla_package.wheel_address(Path(app.srcdir), app.config.html_baseurl) or repository


def make_notebook(app: Sphinx, page: str, source: nbformat.NotebookNode) -> nbformat.NotebookNode:
    cells = [install_cell(gla_package.wheel_name(Path(app.srcdir)), package_address(app))]
    waiting = [i for i, cell in enumerate(source.cells) if cell.cell_type == "code"]
    texts: list[str] = []

    def end_text():
        if texts:
            cells.append(v4.new_markdown_cell("\n\n".join(texts)))
            texts.clear()

    def add_code(up_to: int):  # cells that the site hides stand in the notebook too
        end_text()
        while waiting and waiting[0] <= up_to:
            cell = source.cells[waiting.pop(0)]
            cells.append(v4.new_code_cell(cell.source, metadata=cell.metadata))

    doctree = app.env.get_and_resolve_doctree(page, app.builder)
    for block in Markdown(app, page).blocks(doctree):
        if isinstance(block, int):
            add_code(block)
        else:
            texts.append(block)
    add_code(len(source.cells))

    seen: dict[str, int] = {}
    for cell in cells:  # an unchanged cell keeps its name
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook = v4.new_notebook(
        cells=cells,
        metadata={
            "kernelspec": source.metadata["kernelspec"],
            "language_info": {"name": "python"},
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "provenance": []},
        },
    )
    nbformat.validate(notebook)
    return notebook


def make_notebooks(root: Path = ROOT) -> dict[Path, str]:
    """Each notebook's path and text."""
    with tempfile.TemporaryDirectory() as out:
        app, pages = read_book(root, out)
        chapters = {page for page in app.env.found_docs if page in app.env.toc_secnumbers}
        made = {Path(page).name: make_notebook(app, page, pages[Path(page).name]) for page in sorted(chapters)}
        return {root / "notebooks" / f"{name}.ipynb": nbformat.writes(x) + "\n" for name, x in made.items()}


def main() -> int:
    check = "--check" in sys.argv
    if build_book.fresh(ROOT, "notebooks"):
        print("notebooks: in step with the chapters, and nothing has changed since")
        return 0
    written = make_notebooks()
    old = set((ROOT / "notebooks").glob("*.ipynb")) - set(written)
    stale = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    if not check:
        (ROOT / "notebooks").mkdir(exist_ok=True)
        for path in stale:
            path.write_text(written[path])
        for path in old:
            path.unlink()
    names = ", ".join(path.name for path in sorted([*stale, *old])) or "none"
    print(f"notebooks: {len(written)}; {'stale' if check else 'written or removed'}: {names}")
    if check and (stale or old):
        return 1
    build_book.remember(ROOT, "notebooks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
