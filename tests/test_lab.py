"""The lab book: what is known names entries that exist, and whoever refers to it finds the file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAB = ROOT / "lab"
READERS = [
    p
    for d in ("src", "tests", "tools", "book", "benchmarks")
    for p in (ROOT / d).rglob("*")
    if p.suffix in (".py", ".md")
]


def anchors(path):
    """What a heading is called in a link, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name, anchor", re.findall(r"\]\((\w+\.md)#([^)]+)\)", (LAB / "known.md").read_text()))
def test_what_is_known_names_an_entry(name, anchor):
    assert anchor in anchors(LAB / name)


def test_the_lab_book_is_where_it_is_referred_to():
    named = {name for path in READERS for name in re.findall(r"\blab/(\w+\.md)", path.read_text())}
    assert named and all((LAB / name).exists() for name in named), named
