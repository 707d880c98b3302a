"""Photograph pages of the built book in a browser and report what a reader would stumble over.

    python tools/screenshots.py [PAGE ...] [--out _build/screenshots]

Each page (default: every chapter) is opened in Chromium, with the network refused, at 1280 and at
390 pixels, light and dark. Reported: horizontal overflow, formulas that were not rendered, console
errors, failed or refused requests. Needs `pip install playwright` and a system's chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

SITE = Path(__file__).resolve().parents[1] / "_build" / "html"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
WIDTHS, THEMES = (1280, 390), ("light", "dark")

#: elements wider than the page that no ancestor lets scroll
TOO_WIDE = """() => {
  const clips = e => getComputedStyle(e).overflowX !== "visible";
  const scrolls = e => e && (clips(e) || scrolls(e.parentElement));
  return [...document.querySelectorAll(".bd-article *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
    .map(e => e.outerHTML.slice(0, 80)).slice(0, 3)
}"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: formulas left as source: KaTeX failed, or never ran
RAW_MATH = """() => [...document.querySelectorAll("span.math, div.math")]
  .filter(e => e.querySelector(".katex-error") || !e.querySelector(".katex"))
  .map(e => e.textContent.slice(0, 60))"""


def visit(browser: Browser, page: Path, width: int, theme: str, out: Path) -> list[str]:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        device_scale_factor=2 if width < 500 else 1,
        color_scheme=theme,
        reduced_motion="reduce",
    )
    problems: list[str] = []

    def route(request):
        if request.request.url.startswith(("file:", "data:", "blob:")):
            return request.continue_()
        problems.append(f"asks for {request.request.url}")
        return request.abort()

    context.route("**/*", route)
    tab = context.new_page()
    tab.on("console", lambda m: m.type == "error" and problems.append(f"console: {m.text}"))
    tab.on("pageerror", lambda e: problems.append(f"script: {e}"))
    tab.on("requestfailed", lambda r: problems.append(f"failed: {r.url}"))
    tab.goto(page.as_uri(), wait_until="load")
    tab.wait_for_timeout(300)
    problems += [f"formula not rendered: {text}" for text in tab.evaluate(RAW_MATH)]
    if (extra := tab.evaluate(OVERFLOW)) > 0:
        problems.append(f"{extra} pixels too wide: {tab.evaluate(TOO_WIDE)}")
    tab.screenshot(path=out / f"{page.stem}-{width}-{theme}.png", full_page=True)
    context.close()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="names without .html, such as 09_chunkwise_gla")
    parser.add_argument("--out", type=Path, default=SITE.parent / "screenshots")
    args = parser.parse_args()
    pages = [SITE / "book" / f"{name}.html" for name in args.pages]
    pages = pages or sorted((SITE / "book").glob("[0-9][0-9]_*.html"))
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if not executable or not pages:
        sys.exit("needs a built book (make book) and chromium on the PATH")
    args.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS.split())
        for page in pages:
            for width in WIDTHS:
                for theme in THEMES:
                    problems = visit(browser, page, width, theme, args.out)
                    bad += bool(problems)
                    print(f"{page.stem:28} {width:5} {theme:5}", "; ".join(problems) or "ok")
        browser.close()
    print(f"pictures: {args.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
