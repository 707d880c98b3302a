"""A headless Chromium over the built book, with the network refused: for tests, pictures and print."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
#: what a page may ask for, beside `own` addresses
LOCAL = ("file:", "data:", "blob:", "about:")


def book_pages(root: Path = ROOT) -> list[str]:
    """The pages of the book in the order of its table of contents, such as "book/index"."""
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    return [toc["root"], *(entry["file"] for part in toc["parts"] for entry in part["chapters"])]


def url(page: str) -> str:
    return (SITE / f"{page}.html").as_uri()


def executable() -> str | None:
    """The system's Chromium or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window.

    Raises:
        RuntimeError: no Chromium on the PATH.
    """
    path = executable()
    if path is None:
        raise RuntimeError("expected chromium on the PATH (apt-get install chromium), found none")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split(), timeout=120_000)  # as tabs wait
        yield browser
        browser.close()


class Visit:
    """A tab that keeps what it was asked to load and what went wrong: `files` and `problems`."""

    def __init__(self, context: BrowserContext, own: str = "file:"):
        self.files: set[Path] = set()
        self.problems: list[str] = []
        self.own = own
        context.route("**/*", self._route)
        self.tab: Page = context.new_page()
        self.tab.set_default_timeout(120_000)  # half of the processors may be printing the book
        note = self.problems.append
        self.tab.on("console", lambda m: m.type == "error" and note(f"console: {m.text}"))
        self.tab.on("pageerror", lambda error: note(f"script: {error}"))
        self.tab.on("requestfailed", self._failed)

    def _failed(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # cancelled, since the tab went elsewhere
            self.problems.append(f"failed: {request.url}")

    def _route(self, route) -> None:
        url = route.request.url
        if url.startswith("file:"):
            self.files.add(Path(unquote(urlsplit(url).path)))
        if url.startswith((*LOCAL, self.own)):
            return route.continue_()
        self.problems.append(f"asks for {url}")
        return route.abort()


#: visible elements of the article that stand outside the window and that no ancestor clips or lets scroll
OUTSIDE = """() => {
  const clips = e => e && (getComputedStyle(e).overflowX !== "visible" || clips(e.parentElement));
  return [...document.querySelectorAll(".bd-article *")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1) && !clips(e.parentElement);
  }).map(e => e.outerHTML.slice(0, 80)).slice(0, 3)
}"""
#: what its own box cuts off, where nothing scrolls
CUT_OFF = """() => [...document.querySelectorAll(".bd-article *")].filter(e => {
    if (e.closest(".katex, svg, .toggle-hidden")) return false;
    const style = getComputedStyle(e), hides = value => value === "hidden" || value === "clip";
    return e.clientWidth && (hides(style.overflowX) && e.scrollWidth > e.clientWidth + 1
      || hides(style.overflowY) && e.scrollHeight > e.clientHeight + 1);
  }).map(e => e.outerHTML.slice(0, 80)).slice(0, 3)"""
#: by how many pixels the page is wider than the window
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: formulas left as source: KaTeX failed, or never ran
RAW_MATH = """() => [...document.querySelectorAll("span.math, div.math")]
  .filter(e => e.querySelector(".katex-error") || !e.querySelector(".katex"))
  .map(e => e.textContent.slice(0, 60))"""

#: of the article's visible characters, the part in listings and printed output; what is folded does not count
PREFORMATTED = """() => {
  const article = document.querySelector(".bd-article"), seen = {visibilityProperty: true};
  const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  let all = 0, listed = 0;
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, size = walk.currentNode.data.trim().length;
    if (!size || !e.checkVisibility(seen)) continue;
    if (e.closest("svg, button, .headerlink, .katex-mathml, .toggle-hidden")) continue;
    all += size;
    if (e.closest("pre")) listed += size;
  }
  return listed / all;
}"""


def layout_problems(tab: Page) -> list[str]:
    """Formulas that were not rendered, and what stands outside the window."""
    problems = [f"formula not rendered: {text}" for text in tab.evaluate(RAW_MATH)]
    problems += [f"outside the window: {tag}" for tag in tab.evaluate(OUTSIDE)]
    problems += [f"cut off: {tag}" for tag in tab.evaluate(CUT_OFF)]
    if (pixels := tab.evaluate(TOO_WIDE)) > 0:
        problems.append(f"{pixels} pixels too wide")
    return problems
