"""One browser for all tests, and the record of what each page weighs and how soon it can be read."""

import json

import browser as tools
import pytest
from filelock import FileLock

RECORD = tools.SITE.parent / "pages.json"
WHOLE = {"bytes", "seconds", "seconds_throttled"}  # of a page that was both weighed and timed


def pytest_collection_modifyitems(items):
    """The printed edition takes longest: begun first, it is done while other processes are still at the pages."""
    items.sort(key=lambda item: item.path.name != "test_pdf.py")


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
    with FileLock(RECORD.with_suffix(".lock")):  # several processes run the tests
        kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        kept = {name: x for name, x in kept.items() if (tools.SITE / f"{name}.html").exists()}
        whole = kept | {name: kept.get(name, {}) | x for name, x in pages.items()}  # weight and seconds: two tests
        RECORD.write_text(json.dumps(whole, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr != "browser and alone" or not RECORD.exists():
        return
    if not (pages := {name: x for name, x in json.loads(RECORD.read_text()).items() if WHOLE <= x.keys()}):
        return
    heaviest = max(pages, key=lambda name: pages[name]["bytes"])
    slowest = max(pages, key=lambda name: pages[name]["seconds"])
    terminalreporter.write_line(
        f"{len(pages)} pages in {RECORD.name}: the heaviest {heaviest}, {pages[heaviest]['bytes'] / 1e6:.2f} MB; "
        f"the slowest {slowest}, {pages[slowest]['seconds']:.2f} s, "
        f"{pages[slowest]['seconds_throttled']:.2f} s at a quarter of the speed"
    )
