"""Photograph pages of the built book in a browser and report what a reader would stumble over.

    python tools/screenshots.py [PAGE ...] [--out _build/screenshots]

Each page (default: every chapter) is opened in Chromium, with the network refused, at 1280 and at
390 pixels, light and dark. Reported: horizontal overflow, formulas that were not rendered, console
errors, failed or refused requests. Needs `pip install playwright` and a system's chromium.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from browser import SITE, Visit, chromium, layout_problems
from playwright.sync_api import Browser

from gla_ref.book.notebook import CHAPTER

WIDTHS, THEMES = (1280, 390), ("light", "dark")


def visit(browser: Browser, page: Path, width: int, theme: str, out: Path) -> list[str]:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        device_scale_factor=2 if width < 500 else 1,
        color_scheme=theme,
        reduced_motion="reduce",
    )
    visit = Visit(context)
    visit.tab.goto(page.as_uri(), wait_until="load")
    visit.tab.wait_for_timeout(300)
    problems = visit.problems + layout_problems(visit.tab)
    visit.tab.screenshot(path=out / f"{page.stem}-{width}-{theme}.png", full_page=True)
    context.close()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="names without .html, such as 11_chunkwise_gla")
    parser.add_argument("--out", type=Path, default=SITE.parent / "screenshots")
    args = parser.parse_args()
    pages = [SITE / "book" / f"{name}.html" for name in args.pages]
    pages = pages or sorted(page for page in (SITE / "book").glob("*.html") if CHAPTER.match(page.stem))
    if not pages:
        sys.exit("needs a built book (make book)")
    args.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with chromium() as browser:
        for page, width, theme in product(pages, WIDTHS, THEMES):
            problems = visit(browser, page, width, theme, args.out)
            bad += bool(problems)
            print(f"{page.stem:28} {width:5} {theme:5}", "; ".join(problems) or "ok")
    print(f"pictures: {args.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
