"""One browser for all tests, and the record of what each page weighs and how soon it can be read."""

import json

import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright")

import browser as tools

RECORD = tools.SITE.parent / "pages.json"


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium():
    assert (tools.SITE / "index.html").exists(), "the book is not built: make book"
    with tools.chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def record():
    """Per page: bytes on disk that it loads, bytes of its explorables, seconds to readable text."""
    pages = {}
    yield pages
    if pages:
        RECORD.write_text(json.dumps(pages, indent=1) + "\n")
        heaviest = max(pages, key=lambda name: pages[name]["bytes"])
        slowest = max(pages, key=lambda name: pages[name]["seconds"])
        print(
            f"\n{len(pages)} pages: the heaviest {heaviest}, {pages[heaviest]['bytes'] / 1e6:.2f} MB; "
            f"the slowest {slowest}, {pages[slowest]['seconds']:.2f} s; {RECORD}"
        )
