"""The book: notebooks in step with the chapters, every page runs, the built site is whole."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

pytest.importorskip("jupyter_book", reason="the book's tools are not installed")

import build_book
import gla_api
import gla_book
import gla_minutes
import gla_package
import gla_reads
import make_notebooks
from bs4 import BeautifulSoup
from docutils import nodes
from filelock import FileLock
from jupyter_cache import get_cache

from gla_ref.book.notebook import chapters

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
CHAPTERS = chapters(ROOT / "book")
FILES = sorted((ROOT / "src" / "gla_ref").rglob("*.py"))
MODULES = [path for path in FILES if not any(part.startswith("_") for part in path.relative_to(ROOT).parts)]

pytestmark = pytest.mark.timeout(500)


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=500)


def notebook(chapter: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{chapter}.ipynb", 4)


def without_install(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    nb.cells = [cell for cell in nb.cells if "install" not in cell.metadata.get("tags", [])]
    return nb


# -- chapters and notebooks --------------------------------------------------------------------


@pytest.fixture(scope="session")
def problems() -> dict[str, str]:
    """Pages that do not run, and why; what `make book` has executed is not executed again, and the reverse."""
    return build_book.execute_pages(ROOT)


@pytest.mark.site
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_runs(chapter, problems):
    if chapter in problems:
        pytest.fail(problems[chapter], pytrace=False)
    store = get_cache(gla_book.execution_cache(ROOT))
    record = store.match_cache_notebook(without_install(notebook(chapter)))  # the chapter's cells
    cells = store.get_cache_bundle(record.pk).nb.cells
    errors = [o.text for cell in cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert not errors, "a page must not print to stderr"


@pytest.mark.site  # `make book` writes them first, and `.ci/run` compares what it wrote with what is committed
def test_notebooks_are_in_step_with_the_chapters():
    result = run("tools/make_notebooks.py", "--check")
    assert result.returncode == 0, f"run `make notebooks`\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebook_has_no_outputs_and_no_raw_myst(chapter):
    raw = re.compile(r"(?m)^\s*:::|```\{|\{[\w:]+\}`|^\([\w-]+\)=$|^\+\+\+|\$\$ \([\w-]+\)")
    cells = notebook(chapter).cells
    assert not any(cell.get("outputs") for cell in cells)
    for cell in cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^```.*?^```", "", cell.source, flags=re.DOTALL | re.MULTILINE)
            assert not (found := raw.search(text)), f"{found[0]!r} in:\n{cell.source}"


def test_first_cell_gets_the_package(tmp_path, monkeypatch):
    """From the wheel beside the notebook, else from the address, else it says what is missing."""
    asked, found = [], {"gla_ref": None, "matplotlib": None}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    monkeypatch.chdir(tmp_path)

    def run_cell(address: str) -> None:
        cell = make_notebooks.install_cell("gla_ref-1.0-py3-none-any.whl", address)
        assert cell.cell_type == "code" and cell.metadata["tags"] == ["install"]
        install = re.compile(r'%pip install -q "(.*)"')
        exec(install.sub(r'asked.append(f"\1")', cell.source), {"asked": asked})

    with pytest.raises(RuntimeError, match="Download gla_ref-1.0-py3-none-any.whl"):
        run_cell("")
    with pytest.raises(RuntimeError):  # pip could not
        run_cell("https://book.example/x.whl")
    (tmp_path / "gla_ref-1.0-py3-none-any.whl").touch()
    with pytest.raises(RuntimeError):
        run_cell("https://book.example/x.whl")
    places = "https://book.example/x.whl", f"{tmp_path.as_uri()}/gla_ref-1.0-py3-none-any.whl"
    assert asked == [f"gla_ref[notebook] @ {place}" for place in places]
    found |= {"gla_ref": True, "matplotlib": True}
    run_cell("")
    assert len(asked) == 2


def test_address_of_the_package():
    """The site's wheel, the repository where the site has no address, or nothing."""

    def of(baseurl: str, url: str) -> str:
        options = {"repository_url": url, "repository_branch": "main"}
        config = SimpleNamespace(html_theme_options=options, html_baseurl=baseurl)
        return make_notebooks.package_address(SimpleNamespace(config=config, srcdir=ROOT))

    wheel = gla_package.wheel_name(ROOT)
    assert of("", "") == ""
    assert of("", "https://github.com/o/r/") == "git+https://github.com/o/r@main"
    assert of("https://o.example/r", "https://github.com/o/r") == f"https://o.example/r/_sources/book/{wheel}"


def test_buttons_need_a_repository():
    unset = SimpleNamespace(html_theme_options={"repository_url": ""})
    gla_book.use_repository(None, unset)
    assert not unset.html_theme_options["use_repository_button"]
    assert "launch_buttons" not in unset.html_theme_options
    known = SimpleNamespace(html_theme_options={"repository_url": "https://github.com/o/r"})
    gla_book.use_repository(None, known)
    assert known.html_theme_options["use_edit_page_button"]
    assert known.html_theme_options["launch_buttons"] == {"colab_url": gla_book.COLAB}
    there = "https://colab.research.google.com/github/o/r/blob/main/notebooks/01_x.ipynb"
    assert gla_book.colab_url("https://github.com/o/r/", "main", "01_x.ipynb") == there


def squeezed(code: str) -> str:
    """Without comments and white space."""
    return re.sub(r"\s+", "", re.sub(r"#.*", "", code))


def test_lines_that_chapters_explain_are_lines_that_run():
    """A kernel is explained in definition lists: a line of its source, or parts of one with ... between, and why."""
    package = squeezed("\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))))
    explained = 0
    for chapter in CHAPTERS:
        text = (ROOT / "book" / f"{chapter}.md").read_text()
        own = squeezed("\n".join(re.findall(r"(?ms)^```\{code-cell\}.*?^```$", text)))
        for term in re.findall(r"(?m)^(`.*)\n: ", text):
            for part in "...".join(re.findall(r"`([^`]+)`", term)).split("..."):
                assert squeezed(part) in package or squeezed(part) in own, f"{chapter}: {part}"
            explained += 1
    assert explained > 50


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_names_its_chapter(module):
    """...and the chapter's page the module: by its name, its package's, or that of something public in it."""
    tree = ast.parse(module.read_text())
    first = (ast.get_docstring(tree) or "").split("\n")[0]
    if appendix := re.search(r'appendix "(.+?)"', first):
        titles = [path.read_text() for path in (ROOT / "book").glob("[a-z]*.md")]
        assert any(f"\n# {appendix[1]}\n" in text for text in titles), appendix[0]
        return
    named = re.search(r"[Cc]hapters? (\d+\b(?:(?:,? and |, | to )\d+\b)*)", first)
    assert named, f"the first docstring line names no chapter: {first!r}"
    _, *parts = module.relative_to(ROOT / "src").with_suffix("").parts
    package = parts[:-1] if len(parts) > 2 or parts[-1] == "__init__" else []
    names = {".".join(parts), ".".join(package), f"{parts[-1]}.py"} | public(tree)
    for number in [] if " to " in named[1] else re.findall(r"\d+", named[1]):
        pages = [page for page, its in CHAPTERS.items() if re.match(r"\d+", its)[0] == number]
        text = "".join((ROOT / "book" / f"{page}.md").read_text() for page in pages)
        assert any(re.search(rf"\b{re.escape(name)}\b", text) for name in names if name), (number, sorted(names))


def public(tree: ast.Module) -> set[str]:
    """Names of five letters or more that a module defines for others."""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    return {name for name in names if len(name) > 4 and not name.startswith("_")}


def test_api_page_lists_every_module():
    listed = gla_api.LISTED.findall((ROOT / "book" / "api.md").read_text())
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in MODULES}
    packages = {name for name in listed if (ROOT / "src" / name.replace(".", "/")).is_dir()}
    assert names == set(listed) - packages


LOCAL = ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def scopes(tree: ast.Module) -> tuple[set[str], set[str]]:
    """(the names that a cell binds for later cells, the names that it uses and does not bind)."""
    bound, inside, used = set(), set(), set()
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, top = pending.pop()
        names = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.arg):
            inside.add(node.arg)
        (bound if top else inside).update(names)
        pending += [(child, top and not isinstance(node, LOCAL)) for child in ast.iter_child_nodes(node)]
    return bound, used - bound - inside


def unexplained(cells: list[tuple[list[str], str]]) -> dict[str, int]:
    """Names that a visible cell uses though only removed cells have defined them so far, and the number of that cell.

    A folded cell is visible: a reader can unfold it.
    """
    seen, removed, found = set(), set(), {}
    for number, (tags, code) in enumerate(cells):
        bound, used = scopes(ast.parse(re.sub(r"(?m)^%.*$", "", code)))
        if {"remove-input", "remove-cell"} & set(tags):
            removed |= bound
        else:
            found |= {name: number for name in sorted((used & removed) - seen) if name not in found}
            seen |= bound
    return found


def test_unexplained_names_are_found():
    cells = [(["remove-cell"], "a = b = c = 1"), ([], "a = 2\ndef f(c):\n    return c"), (["hide-input"], "f(a) + b")]
    assert unexplained(cells) == {"b": 2}
    own = [(["hide-input"], "import x"), (["remove-input"], "y = [z for z in x]"), ([], "[y for y in x]")]
    assert unexplained(own) == {}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_visible_cells_use_names_that_a_reader_can_find(chapter):
    """No cell to be read uses a name which only removed cells define."""
    cells = [cell for cell in without_install(notebook(chapter)).cells if cell.cell_type == "code"]
    assert not unexplained([(cell.metadata.get("tags", []), cell.source) for cell in cells])


def test_heat_maps_keep_their_light_card():
    """In the dark a figure's lightness is turned round, unless its class says that light and dark are numbers."""
    for chapter in CHAPTERS:
        text = (ROOT / "book" / f"{chapter}.md").read_text()
        for cell in re.findall(r"(?ms)^```\{code-cell\} python\n(.*?)^```$", text):
            assert "imshow(" not in cell or "classes: as-is" in cell, chapter


GREEK = "alpha beta gamma delta epsilon kappa lambda mu nu xi pi rho sigma tau phi chi psi omega ell".split()
GREEK += [name.capitalize() for name in GREEK]


def formulas(text: str) -> list[str]:
    """The formulas of a page's text; code is left out."""
    text = re.sub(r"(?sm)^```\{code-cell\}.*?^```$", "", text)
    blocks = re.findall(r"(?sm)^```\{math\}\n(.*?)^```$|\$\$(.+?)\$\$", text)
    text = re.sub(r"(?sm)^```\{math\}.*?^```$|\$\$.+?\$\$", "", text)
    return [a or b for a, b in blocks] + re.findall(r"(?<!\\)\$([^$]+)\$", re.sub(r"`[^`\n]+`", "", text))


def letters(formula: str) -> set[str]:
    """The letters that stand for something: Greek by name, words in \\text and the like left out."""
    formula = re.sub(r"(?m)^:label:.*$|\\(text|operatorname|label|begin|end)\*?\{[^{}]*\}", "", formula)
    greek = re.findall(rf"\\({'|'.join(GREEK)})(?![a-zA-Z])", formula)
    return {*greek, *re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", formula))}


def test_notation_page_has_every_letter():
    page = (ROOT / "book" / "notation.md").read_text()
    many, few = re.findall(r"(?m)^\|---\|---\|---\|\n((?:\|.*\n)+)", page)[:2]
    own = re.search(r"(?m)^\|---\|---\|\n((?:\|.*\n)+)", page)[1]
    everywhere = many + few
    known = set().union(*(letters(f) for row in everywhere.splitlines() for f in formulas(row.split("|")[1])))
    some = {}
    for _, letter, meanings, _ in (row.split("|") for row in own.splitlines()):
        for number in re.findall(r"\d+", " ".join(re.findall(r"(?:^ |; )([\d, ]+):", meanings))):
            some.setdefault(number, set()).update(*map(letters, formulas(letter)))
    for chapter, number in CHAPTERS.items():
        text = (ROOT / "book" / f"{chapter}.md").read_text()
        used, own = set().union(*map(letters, formulas(text))), some.get(number, set())
        assert used - known <= own <= used, chapter


def test_every_page_is_listed():
    listed = set(re.findall(r"book/\w+", (ROOT / "_toc.yml").read_text()))
    assert listed == {f"book/{path.stem}" for path in (ROOT / "book").glob("*.md")}


def test_readme_example_runs(capsys):
    (example,) = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "README.md").read_text())
    exec(example, {})
    assert float(re.search(r"[\d.]+e-\d+|0\.", capsys.readouterr().out)[0]) < 1e-12


def test_a_page_runs_again_where_something_that_it_reads_has_changed(tmp_path):
    """A module two imports away counts, and one that nothing imports does not; kernels, judges and records by name."""
    package = tmp_path / "src" / "gla_ref"
    texts = {
        "__init__": "from . import used\nFORMS = {}\ndef call():\n    from .kernels.forms import FUNCTIONS",
        "used": "def work():\n    from .deep import below",
        "deep/__init__": "",
        "deep/below": "x = 1\nif __name__ == '__main__':\n    from .. import unused",
        "unused": "x = 1",
        "kernels/__init__": "",
        "kernels/forms": "FUNCTIONS = {}",
        "book/__init__": "",
        "book/exercises/__init__": "def check(label): ...",
        "book/exercises/first": "'ex-one'",
        "book/exercises/second": "'ex-two'",
    }
    for name, text in texts.items():
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for kind in ("waits", "parts"):
        (package / f"../../benchmarks/results/{kind}.json").write_text(json.dumps({"environment": {}, kind: []}))
    (tmp_path / "requirements.txt").write_text("torch==1")

    def read(code):
        return {str(file.relative_to(tmp_path)) for file in gla_reads.files(tmp_path, code)}

    def of(*names):
        return {f"src/gla_ref/{name}.py" for name in ("__init__", *names)} | {"requirements.txt"}

    plain, everything = of("used", "deep/__init__", "deep/below"), of(*texts)
    assert read("%matplotlib inline\nimport gla_ref") == read("f('gla_ref.used')") == plain
    assert read("from gla_ref import FORMS") == plain | of("kernels/__init__", "kernels/forms")
    assert read("import gla_ref\nload(kind='waits')") == plain | {"benchmarks/results/waits.json"}
    judged = plain | of("book/__init__", "book/exercises/__init__", "book/exercises/second")
    assert read("from gla_ref.book.exercises import check\ncheck('ex-two')") == judged
    assert read("import gla_ref.gone") == everything
    assert read("import gla_ref\nPath().rglob('*')") >= everything | {"benchmarks/results/parts.json"}
    before = gla_reads.key(tmp_path, "import gla_ref")
    (package / "unused.py").write_text("x = 2")
    assert gla_reads.key(tmp_path, "import gla_ref") == before
    (package / "deep" / "below.py").write_text("x = 2")
    assert gla_reads.key(tmp_path, "import gla_ref") != before


@pytest.mark.deep
def test_broken_cell_fails_the_build(tmp_path):
    for name in ("_config.yml", "requirements.txt", "src", "book/_ext", "book/_static"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "book" / "references.bib").write_text("")
    (tmp_path / "_toc.yml").write_text("{format: jb-book, root: book/page}")
    front = "---\njupytext: {text_representation: {format_name: myst}}\n"
    front += "kernelspec: {name: python3, display_name: Python 3}\n---\n"
    page = tmp_path / "book" / "page.md"
    page.write_text(f"{front}# Page\n\n```{{code-cell}} python\n1 / 0\n```\n")
    broken = build_book.build(tmp_path, capture_output=True, text=True, timeout=500)
    assert broken.returncode != 0 and "ZeroDivisionError" in broken.stdout + broken.stderr


def test_minutes_are_those_of_what_one_reads():
    """Text, code and formulas count; folded code, solutions and the plain twin of a table do not."""

    def cell(tag: str, *inside: nodes.Node) -> nodes.container:
        return nodes.container("", *inside, nb_element="cell_code", classes=["cell", tag])

    def source() -> nodes.container:
        return nodes.container("", nodes.literal_block(text="x\n\ny\n" * 10), nb_element="cell_code_source")

    words = nodes.paragraph(text="word " * 240)
    assert gla_minutes.reading(words) == 2
    assert gla_minutes.reading(nodes.math_block(text="x")) == 1
    assert gla_minutes.reading(cell("", source())) == 2
    assert gla_minutes.reading(cell("tag_hide-input", source())) == 0
    plain = nodes.container("", words.deepcopy(), mime_type="text/plain")
    table = nodes.container("", words.deepcopy(), mime_type="text/markdown")
    bundle = nodes.container("", table, plain, nb_element="mime_bundle")
    shown = nodes.container("", bundle, nb_element="cell_code_output")
    assert gla_minutes.reading(cell("tag_hide-input", source(), shown)) == 2
    assert gla_minutes.reading(nodes.container("", words, classes=["solution"])) == 0


def test_minutes_of_several_pages_are_added_up():
    """A place names one page or several; hours are rounded to halves, and a place that names none is left alone."""
    minutes = {"a": 80, "b": 45, "c": 25}
    body = '<small data-page="a"></small> <small data-page="a b"></small> <span data-hours="a b c">some</span> '
    body += "<small></small>"
    filled = "<small>80 min</small> <small>125 min</small> <span>2½ hours</span> <small></small>"
    assert gla_minutes.fill(body, minutes) == filled
    with pytest.raises(KeyError):
        gla_minutes.fill('<small data-page="a d"></small>', minutes)
    said = {gla_minutes.hours(n) for n in (5, 40)} | {gla_minutes.hours(n) for n in (60, 90, 365)}
    assert said == {"half an hour", "1 hour", "1½ hours", "6 hours"}


def test_no_chapter_says_how_long_it_takes():
    """The build counts, for all chapters alike, so no number of minutes is typed."""
    for chapter in CHAPTERS:
        text = (ROOT / "book" / f"{chapter}.md").read_text()
        assert not re.search(r"(?i)\b(\d+\s+minutes|half an hour)\b", text), chapter


# -- the built site ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site() -> Path:
    """The site as `make book` leaves it; built here unless it was built from the same sources."""
    SITE.parent.mkdir(exist_ok=True)
    with FileLock(SITE.parent / "site.lock"):  # several processes may run the tests
        if build_book.fresh(ROOT, build_book.SITE):
            return SITE
        result = build_book.build(ROOT, capture_output=True, text=True, timeout=500)
    if result.returncode:
        problem = (result.stdout + result.stderr)[-6000:]
        pytest.fail(f"make book fails\n{problem}", pytrace=False)
    return SITE


def pages(site: Path) -> list[Path]:
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


@cache
def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(), "html.parser")


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(tag["id"] for tag in soup(page).find_all(id=True))


def loaded(page: Path) -> list[str]:
    """What a browser fetches by itself when it opens the page."""
    tags = soup(page).select("script[src], img[src], iframe[src], source[src], video[src]")
    links = [tag for tag in soup(page).select("link[href]") if "canonical" not in tag["rel"]]
    inline = " ".join(tag.text for tag in soup(page).select("style, script:not([src])"))
    calls = re.findall(r"""(?:url\(|@import|import|fetch\()\s*["'(]*(https?://[^"')]+)""", inline)
    return [tag["src"] for tag in tags] + [tag["href"] for tag in links] + calls


@pytest.mark.site
def test_site_loads_nothing_from_elsewhere(site):
    remote = re.compile(r"(?:https?:)?//")
    assert len(pages(site)) > len(CHAPTERS)
    found = {(page.name, url) for page in pages(site) for url in loaded(page) if remote.match(url)}
    for style in site.rglob("*.css"):
        urls = re.findall(r"""(?:url\(|@import)\s*["']?([^"')]+)""", style.read_text())
        found |= {(style.name, url) for url in urls if remote.match(url)}
    assert not found


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_device_is_found_before_triton_is_imported(chapter):
    """Triton hears of its interpreter when it is imported, and a reader without a GPU has it from find_device only."""
    text = (ROOT / "book" / f"{chapter}.md").read_text()
    triton = r"^(import triton|from triton|from gla_ref\.pages|from gla_ref\.kernels(\.| import (?!find_device\b)))"
    if first := re.search(triton, text, re.MULTILINE):
        assert 0 <= text.find("find_device()") < first.start()


@pytest.mark.site
def test_site_has_no_broken_link(site):
    broken = []
    for page in pages(site):
        for url in [tag["href"] for tag in soup(page).select("a[href]")] + loaded(page):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            fragment = unquote(parts.fragment)
            missing = fragment and target.suffix == ".html" and fragment not in anchors(target)
            if not target.exists() or missing:
                broken.append(f"{page.relative_to(site)}: {url}")
    assert not broken, "\n".join(broken)


@pytest.mark.site
@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "book").glob("*.md")))
def test_figures_have_alternative_text(site, page):
    article = soup(site / "book" / f"{page}.html").select_one("article")
    for image in article.find_all("img"):
        assert len(image.get("alt", "")) >= 25, f"describe the figure: {image.get('alt')!r}"
    for figure in article.select(".cell_output svg:not(.katex svg, [aria-hidden=true])"):  # a legend has marks
        assert figure.get("role") == "img", "an SVG figure has role=img"
        assert figure.get("aria-label") or figure.find("title"), "an SVG figure has a label"


@pytest.mark.site
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_numbers_agree_between_site_and_notebook(site, chapter):
    page = soup(site / "book" / f"{chapter}.html")
    on_page = [tag.text.strip("()#\n ") for tag in page.select("article .eqno")]
    source = "\n".join(cell.source for cell in notebook(chapter).cells)
    in_notebook = re.findall(r"\\tag\{([\d.a-z]+)\}", source)
    assert on_page == in_notebook
    assert {number.split(".")[0] for number in on_page} <= {CHAPTERS[chapter]}
    assert page.select_one("article h1").text.startswith(f"{CHAPTERS[chapter]}. ")


@pytest.mark.site
def test_every_chapter_says_how_long_it_takes(site):
    """The same on its page and on its card of the front page."""
    cards = {card["href"]: card for card in soup(site / "book" / "index.html").select(".cards:not(.cards-ways) a")}
    for chapter in CHAPTERS:
        said = soup(site / "book" / f"{chapter}.html").select_one("article h1 + p.minutes").text
        minutes, exercises = re.fullmatch(r"(\d+) minutes to read, and (\d+) exercises", said).groups()
        assert 10 <= int(minutes) <= 120 and int(exercises) >= 3
        assert cards[f"{chapter}.html"].small.text == f"{minutes} min"
    index = soup(site / "book" / "index.html")
    assert not re.search(r"data-(page|hours)=", str(index.article))
    path, whole = index.select(".paths section")
    total = sum(int(cards[link["href"]].small.text.split()[0]) for link in path.select("a"))
    assert path.small.text == f"{total} min" and f"in {gla_minutes.hours(total)}" in path.b.text
    total = sum(int(cards[f"{chapter}.html"].small.text.split()[0]) for chapter in CHAPTERS)
    assert whole.small.text == f"{total} min" and f"in {gla_minutes.hours(total)}" in whole.b.text


@pytest.mark.site
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_download_is_the_generated_notebook(site, chapter):
    page = site / "book" / f"{chapter}.html"
    link = soup(page).select_one("a.btn-download-notebook-button")["href"]
    generated = ROOT / "notebooks" / f"{chapter}.ipynb"
    assert (page.parent / link).read_bytes() == generated.read_bytes()
    wheel = soup(page).select_one("a.btn-download-package-button")["href"]
    assert (page.parent / wheel).name == gla_package.wheel_name(ROOT) and (page.parent / wheel).is_file()


@pytest.mark.site
def test_wheel_of_the_site_is_the_package(site):
    """Every file of it, and what the notebooks need."""
    wheel = zipfile.ZipFile(site / gla_package.FOLDER / gla_package.wheel_name(ROOT))
    package = ROOT / "src" / "gla_ref"
    sources = {str(path.relative_to(ROOT / "src")): path for path in package.rglob("*.*") if path.suffix != ".pyc"}
    assert sources.keys() <= set(wheel.namelist())
    assert all(wheel.read(name) == path.read_bytes() for name, path in sources.items())
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    assert "Provides-Extra: notebook" in metadata
