"""Pages, docstrings and comments: links lead somewhere; files, names and arguments that they name exist."""

import ast
import re
from inspect import cleandoc
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "lab").glob("*.md"))]
READERS = [path for folder in ("src", "tests", "tools", "book", "benchmarks") for path in (ROOT / folder).rglob("*")]


def anchors(path):
    """The names of a page's headings in links, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\(([\w/.]+\.md)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / name
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_what_is_known_names_its_entries():
    facts = re.findall(r"^\* .*?(?=^\* |^\*\*|\Z)", (ROOT / "lab" / "known.md").read_text(), re.MULTILINE | re.DOTALL)
    named = [fact for fact in facts if re.search(r"\(\[.*\]\(\w+\.md#", fact)]
    assert len(named) > 0.8 * len(facts)


def test_files_that_comments_name_exist():
    files = {f"/{path.relative_to(ROOT)}" for path in READERS}
    sources = [path for path in READERS if path.suffix in (".py", ".md") and "tests" not in path.parts]
    sources += [path for path in PAGES if path.parent.name != "lab"]  # which tells of files that went
    path = re.compile(r"(?<![\w/.])(?:\.\./)*([a-z_.]+/[\w/]+\.py)\b(?! of commit)")
    named = {(source.name, name) for source in sources for name in path.findall(source.read_text())}
    assert len(named) > 40
    files |= {"/path/file.py", "/fla/ops/gla/chunk_fuse.py"}  # an example; another project's
    assert not {(where, n) for where, n in named if not any(file.endswith(f"/{n}") for file in files)}


def test_the_lab_book_is_where_it_is_referred_to():
    texts = (path.read_text() for path in READERS if path.suffix in (".py", ".md"))
    named = {name for text in texts for name in re.findall(r"\b(?:lab|docs)/\w+\.md", text)}
    assert named and all((ROOT / name).exists() for name in named), named


PACKAGE = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in sorted((ROOT / "src" / "gla_ref").rglob("*.py"))
}


def test_names_in_docstrings_exist():
    """Whole ones in the module that they say, others twice at least in their own: where they are, and here."""
    role, seen = re.compile(r":(?:func|class|mod|meth|data|attr|exc):`~?([\w.]+)`"), 0
    for module, text in PACKAGE.items():
        for name in role.findall(text):
            home, seen = name, seen + 1
            while home and home not in PACKAGE:
                home = home.rpartition(".")[0]
            last = name.split(".")[-1]
            times = len(re.findall(rf"\b{last}\b", PACKAGE[home or module]))
            other = name.split(".")[0] in ("torch", "triton")
            assert other or home == name or times > (not home), f"{module}: {name}"
    assert seen > 150


def test_documented_arguments_exist():
    seen = 0
    for module, text in PACKAGE.items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or "Args:" not in (ast.get_docstring(node) or ""):
                continue
            listed = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", cleandoc(ast.get_docstring(node)))[1]
            names = {x for line in re.findall(r"(?m)^    ([\w*]+(?:, [\w*]+)*):", listed) for x in line.split(", ")}
            inside = [node, *(x for x in node.body if getattr(x, "name", "") == "__init__")]
            signatures = [x.args for x in inside if isinstance(x, ast.FunctionDef)]
            known = {x.arg for args in signatures for x in ast.walk(args) if isinstance(x, ast.arg)}
            known |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}  # fields of a dataclass
            if any("form" in ast.unparse(x) for x in node.decorator_list):
                known |= {"initial_state", "cu_seqlens"}  # the decorator adds what a form's body does not get
            assert {x.strip("*") for x in names} <= known, f"{module}.{node.name}"
            seen += len(names)
    assert seen > 300


def test_references_in_the_book_lead_somewhere():
    """Chapters, sections, equations, figures and exercises by their labels: `make book` says so, too, after minutes."""
    texts = {path.stem: path.read_text() for path in (ROOT / "book").glob("*.md")}
    label = re.compile(r"(?m)^\s*\(([\w-]+)\)=|^\s*:?(?:label|name): *(\S+)|\$\$ *\(([\w-]+)\)")
    labels = {name for text in texts.values() for found in label.findall(text) for name in found}
    seen = 0
    for page, text in texts.items():
        for role, said in re.findall(r"\{(doc|ref|numref|eq|prf:ref)\}`([^`]+)`", text):
            name, seen = re.sub(r".*<([^>]+)>$", r"\1", said), seen + 1
            assert name in (texts if role == "doc" else labels) or name.startswith("api"), f"{page}: {name}"
    assert seen > 300
