"""Print the built book as one PDF: python tools/make_pdf.py [--out _build/gated-linear-attention.pdf].

The articles of all pages, in the order of the table of contents, become one HTML document: links between
pages lead inside it, solutions are unfolded, explorables show their first state, code is wrapped, and what
is wider than the paper is scaled. Chromium prints it with bookmarks (tagged, A4). The bookmarks tell the page
numbers of the contents, with which it is printed once more.
"""

import argparse
import sys
from html import escape
from pathlib import Path
from urllib.parse import urldefrag

import pypdfium2
import yaml
from browser import ROOT, SITE, book_pages, chromium
from bs4 import BeautifulSoup, Tag
from playwright.sync_api import Browser, Page

PDF = SITE.parent / "gated-linear-attention.pdf"
#: what only works on a screen, and the folded code of figures, which site and notebooks have
DROPPED = "script, noscript, link, .headerlink, .hide.above-input, .explorable-controls, .viewcode-link, summary"
WIDTH = 658  # CSS pixels: 210 mm less the margins in print.css
#: the loaded figures and fonts
READY = "() => Promise.all([document.fonts.ready, ...[...document.images].map(i => i.decode())])"
#: what is wider than the paper is scaled to its width; a table and a formula as a whole
FIT = """() => {
  for (const e of document.querySelectorAll(".katex-display, table")) {
    const room = e.parentElement.clientWidth, wide = Math.max(e.scrollWidth, e.offsetWidth);
    if (wide > room) e.style.zoom = 0.99 * room / wide;
  }
}"""
#: what is still too wide for the paper, which Chromium would shrink or cut, or cut off inside its own box
CUT = """() => [...document.querySelectorAll("article, article *")].filter(e => {
    if (e.closest(".katex-mathml, svg")) return false;
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const hides = style.overflowX !== "visible" && style.display !== "inline";
    return (hides && e.scrollWidth > e.clientWidth + 1) || box.right > innerWidth + 1 || (box.width && box.left < -1)
      || (e.tagName === "ARTICLE" && e.scrollWidth > innerWidth + 1);
  }).map(e => e.outerHTML.slice(0, 100)).slice(0, 5)"""


class Book:
    """The articles of the book in one document, and the headings that its contents list."""

    def __init__(self, site: Path, toc: dict):
        self.site, self.order = site, book_pages()
        # the first page of each part, and its caption
        self.parts = {part["chapters"][0]["file"]: part["caption"] for part in toc["parts"]}
        self.headings: list[tuple[int, str, str]] = []  # level, text, target: as in the bookmarks
        self.articles = [self.article(page) for page in self.order]

    def name(self, page: str, anchor: str = "") -> str:
        """An anchor that is unique in the book."""
        return page.replace("/", "-") + (f"--{anchor}" if anchor else "")

    def article(self, page: str) -> str:
        source = self.site / f"{page}.html"
        soup = BeautifulSoup(source.read_text(), "html.parser")
        article = soup.select_one("article.bd-article")
        for tag in article.select(DROPPED):
            tag.decompose()
        for tag in article.select("details"):
            tag.name = "div"
        for tag in article.select("[id]"):
            if not tag.find_parent("figure", class_="explorable") and "explorable" not in tag.get("class", ()):
                tag["id"] = self.name(page, tag["id"])
        for tag in article.select("[src]"):
            tag["src"] = (source.parent / tag["src"]).resolve().as_uri()
        for tag in article.select("a[href]"):
            self.relink(page, tag)
        article["id"] = self.name(page)
        for tag in article.find_all(["h1", "h2", "h3", "h4", "h5", "h6"]):
            text = " ".join(tag.get_text().split())
            target = article["id"] if tag.name == "h1" else tag.find_parent("section")["id"]
            self.headings.append((int(tag.name[1]), text, target))
        return str(article)

    def relink(self, page: str, tag: Tag) -> None:
        """A link to a page of the book leads to its place in the print; to other files of the site, nowhere."""
        path, anchor = urldefrag(tag["href"])
        if "://" in path or path.startswith("mailto:"):
            return
        target = page
        if path:
            file = (self.site / page).parent.joinpath(path).resolve()
            target = str(file.relative_to(self.site.resolve()).with_suffix(""))
        if target in self.order:
            tag["href"] = "#" + self.name(target, anchor)
        else:
            tag.unwrap()

    def contents(self, numbers: list[int]) -> str:
        """Chapters and their sections with page numbers."""
        rows, firsts = [], {self.name(page): caption for page, caption in self.parts.items()}
        for (level, text, target), number in zip(self.headings, numbers, strict=True):
            if level > 2:
                continue
            if level == 1 and target in firsts:
                rows.append(f'<p class="part">{escape(firsts[target])}</p>')
            rows.append(
                f'<p class="level-{level}"><a href="#{target}"><span>{escape(text)}</span>'
                f'<i></i><span class="number">{number}</span></a></p>'
            )
        return f'<nav class="print-contents"><p class="title">Contents</p>{"".join(rows)}</nav>'

    def html(self, numbers: list[int] | None = None) -> str:
        """The book; without page numbers the contents have room for them."""
        page = self.site / f"{self.order[-1]}.html"
        head = BeautifulSoup(page.read_text(), "html.parser").head
        styles = [urldefrag(tag["href"])[0].split("?")[0] for tag in head.select("link[rel=stylesheet]")]
        files = [(page.parent / style).resolve() for style in styles]
        files.append(ROOT / "book" / "_static" / "print.css")
        settings = yaml.safe_load((ROOT / "_config.yml").read_text())
        title, _, subtitle = self.headings[0][1].partition(", ")
        return "".join(
            [
                '<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8">',
                f"<title>{escape(settings['title'])}</title>",
                *(f'<link rel="stylesheet" href="{file.as_uri()}">' for file in files),
                '</head><body><header class="print-title">',
                f'<img src="{(self.site / "_static" / "logo.svg").as_uri()}" alt="">',
                f'<p class="title">{escape(title)}</p><p class="subtitle">{escape(subtitle)}</p>',
                f'<p class="author">{escape(settings["author"])}, {settings["copyright"]}</p></header>',
                self.contents(numbers or [0] * len(self.headings)),
                '<main class="bd-content"><div class="bd-article-container">',
                *self.articles,
                "</div></main></body></html>",
            ]
        )


def print_page(tab: Page, html: str, out: Path) -> None:
    """Print a document that lies beside the site.

    Raises:
        RuntimeError: something is cut off at the paper's edge or in its box.
    """
    source = out.with_suffix(".html")
    source.write_text(html)
    tab.goto(source.as_uri(), timeout=300_000)
    tab.evaluate(READY)
    tab.evaluate(FIT)
    if cut := tab.evaluate(CUT):
        raise RuntimeError("wider than the paper:\n" + "\n".join(cut))
    tab.pdf(path=out, prefer_css_page_size=True, print_background=True, outline=True, tagged=True)


def print_book(browser: Browser, out: Path) -> int:
    """Print the site that is built; returns the number of pages.

    Raises:
        RuntimeError: something is cut off, or a heading has no bookmark.
    """
    book = Book(SITE, yaml.safe_load((ROOT / "_toc.yml").read_text()))
    draft = SITE.parent / "print.pdf"
    tab = browser.new_page(viewport={"width": WIDTH, "height": 960})
    tab.set_default_timeout(300_000)
    tab.emulate_media(media="print")
    print_page(tab, book.html(), draft)
    with pypdfium2.PdfDocument(draft) as document:
        numbers = [mark.get_dest().get_index() + 1 for mark in document.get_toc()]
    if len(numbers) != len(book.headings):
        raise RuntimeError(f"expected {len(book.headings)} bookmarks, found {len(numbers)}")
    print_page(tab, book.html(numbers), out)
    tab.close()
    with pypdfium2.PdfDocument(out) as document:
        return len(document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PDF)
    args = parser.parse_args()
    if not (SITE / "index.html").exists():
        sys.exit("needs a built book (make book)")
    with chromium() as browser:
        pages = print_book(browser, args.out)
    print(f"{args.out}: {pages} pages, {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
