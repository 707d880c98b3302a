"""Contributing, docs/ and the lab book: their links lead somewhere, and references to them name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "lab").glob("*.md"))]
READERS = [path for folder in ("src", "tests", "tools", "book", "benchmarks") for path in (ROOT / folder).rglob("*")]


def anchors(path):
    """What the headings of a page are called in links, as GitHub makes it."""
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
    sources = [path for path in READERS if path.suffix == ".py" and "tests" not in path.parts]
    path = re.compile(r"(?<![\w/.])(?:\.\./)*([a-z_.]+/[\w/]+\.py)\b")
    named = {(source.name, name) for source in sources for name in path.findall(source.read_text())}
    named -= {("__main__.py", "path/file.py")}  # an example
    assert len(named) > 40
    assert not {(where, n) for where, n in named if not any(file.endswith(f"/{n}") for file in files)}


def test_the_lab_book_is_where_it_is_referred_to():
    texts = (path.read_text() for path in READERS if path.suffix in (".py", ".md"))
    named = {name for text in texts for name in re.findall(r"\b(?:lab|docs)/\w+\.md", text)}
    assert named and all((ROOT / name).exists() for name in named), named
