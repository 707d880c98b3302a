"""The chapters' surroundings: search, previews, icons, margins, API pages, addresses for other sites."""

import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import browser as tools
import gla_icons
import pytest
from browser import url
from bs4 import BeautifulSoup

from gla_ref.book.notebook import CHAPTER

pytestmark = pytest.mark.browser

PAGES = tools.book_pages()
API = "book/api/gla_ref.linear_attention"
#: what is asked, and the page that must come first
ASKED = {
    "two-level": "11_chunkwise_gla",
    "two-level chunking": "11_chunkwise_gla",
    "二级分块": "11_chunkwise_gla",
    "decay": "09_gates_and_decay",
    "WGMMA": "22_fully_fused_on_hopper",
    "thread block": "04_first_triton_kernels",
    "online softmax": "02_online_softmax",
    "flash attention": "03_flash_attention",
    "prefix sum": "06_prefix_sums_and_chunks",
    "前缀和": "06_prefix_sums_and_chunks",
    "anchor": "12_one_product_a_chunk",
    "gradient of the gate": "15_gradients",
    "decoding": "16_one_token_at_a_time",
    "check my kernel": "check_your_kernel",
    "cu_seqlens": "notation",
    "context parallelism": "25_many_gpus",
}


def text(page: str) -> str:
    return (tools.SITE / f"{page}.html").read_text()


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site as a static host does, at its root and in a folder, with 404.html for what is not there."""

    def translate_path(self, path):
        return super().translate_path(path.removeprefix("/deep/below"))

    def log_message(self, *_):
        """Nothing on the terminal."""

    def send_error(self, code, message=None, explain=None):
        body = (tools.SITE / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tools.SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def shared(chromium):
    """A tab for all tests of this file: nothing of one page is left on the next."""
    context = chromium.new_context(reduced_motion="reduce")
    yield tools.Visit(context, own="http://127.0.0.1")
    context.close()


@pytest.fixture
def visit(shared):
    shared.tab.set_viewport_size({"width": 1280, "height": 900})
    return shared


@pytest.fixture(scope="module")
def search(chromium):
    """The search page from the disk, and what it finds first."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    visit = tools.Visit(context)
    visit.tab.goto(url("search"))
    yield visit
    assert not visit.problems
    context.close()


# -- search --


@pytest.mark.parametrize("query", ASKED)
def test_search_finds_the_right_page_first(search, query):
    field = search.tab.locator(".bd-search-container input[type=search]")
    field.fill(query)
    first = search.tab.locator("#search-results li").first
    assert ASKED[query] in first.locator("a").first.get_attribute("href")
    excerpt = first.locator(".context").first.inner_text()
    assert excerpt and not re.search(r"Show code|Hide|Copy|\\[a-z]|#$", excerpt), excerpt
    assert re.match(r"… \w{2}|[^…]", excerpt), f"begins inside a formula: {excerpt}"
    kinds = search.tab.locator("#search-results .search-kind").all_inner_texts()
    assert kinds == sorted(kinds, key=lambda kind: kind == "API"), "the API comes last"


def test_search_from_any_page(visit, served):
    for site in (tools.SITE.as_uri() + "/", served):
        visit.tab.goto(site + "book/index.html", wait_until="domcontentloaded")  # a reader begins when there is text
        visit.tab.keyboard.press("Control+k")
        visit.tab.keyboard.type("two-level chunking")
        visit.tab.keyboard.press("Enter")
        visit.tab.wait_for_selector("#search-results li mark")
        visit.tab.locator("#search-results li a").first.click()
        visit.tab.wait_for_url("**/11_chunkwise_gla.html*")
    assert not visit.problems


def test_search_shows_the_definition_of_a_term_and_says_when_there_is_nothing(search):
    field = search.tab.locator(".bd-search-container input[type=search]")
    field.fill("SM")
    assert "multiprocessor" in search.tab.locator(".search-term").inner_text()
    field.fill("zzzz")
    assert "Nothing" in search.tab.locator("#search-status").inner_text()
    field.fill("decay")
    entries = search.tab.locator("#search-results li")
    assert 0 < sum(entry.is_visible() for entry in entries.all()) < entries.count()
    search.tab.locator(".search-more").click()
    assert all(entry.is_visible() for entry in entries.all())
    field.fill("elu_plus_one")
    assert "API" in search.tab.locator("#search-results .search-kind").all_inner_texts()


# -- previews --


@pytest.mark.parametrize("way", ["mouse", "keyboard"])
@pytest.mark.parametrize(
    "page, kind, selector",
    [
        ("11_chunkwise_gla", "equation of another page", "a.reference[href*='.html#equation-']"),
        ("11_chunkwise_gla", "equation", "a.reference[href^='#equation-']"),
        ("11_chunkwise_gla", "citation", "a.reference[href*='bibliography.html#']"),
        ("glossary", "term", "a.reference[href*='#term-']"),
    ],
)
def test_links_show_what_they_lead_to(visit, page, kind, selector, way):
    tab = visit.tab
    tab.goto(url(f"book/{page}"))
    link = tab.locator(f".bd-article {selector}").first
    link.scroll_into_view_if_needed()
    if way == "mouse":
        link.hover()
    else:
        tab.keyboard.press("Shift")  # from here on the keyboard's focus is visible
        link.focus()
    box = tab.locator("#preview")
    box.wait_for()
    if "equation" in kind:
        formula, number = box.locator(".katex-html").bounding_box(), box.locator(".eqno").bounding_box()
        assert formula["x"] + formula["width"] <= number["x"], "the number stands beside the formula"
    else:
        assert len(box.inner_text()) > 40
    around = box.bounding_box()
    assert around["x"] >= 0 and around["x"] + around["width"] <= 1280
    tab.keyboard.press("Escape")
    assert not box.count()
    assert not visit.problems


def test_every_previewed_link_has_its_preview():
    """Also those on pages that no test opens."""
    linked = {
        (match[1] or page.rsplit("/")[-1], match[2])
        for page in PAGES
        for match in re.finditer(
            r'<a class="reference internal" href="(?:(\w+)\.html)?#((?:equation|term)-[^"]+)"', text(page)
        )
    }
    assert len(linked) > 100
    kept = {page: (tools.SITE / "_static" / "previews" / f"{page}.js").read_text() for page, _ in linked}
    assert not [(page, anchor) for page, anchor in linked if f'"{anchor}": ' not in kept[page]]


# -- layout --


def test_the_front_page_leads_on_from_its_first_screen(visit):
    """On a laptop: the ways in, how much there is, and the guess beside the picture; on a phone under it."""
    tab = visit.tab
    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.goto(url("book/index"))
    ways = [way.bounding_box() for way in tab.locator(".cards-ways .card-link").all()]
    assert len(ways) == 4 and all(box["y"] + box["height"] < 500 for box in ways)
    chapters = [page for page in PAGES if CHAPTER.search(page)]
    assert tab.locator(".cards-ways").inner_text().startswith(f"{len(chapters)} chapters")
    question, picture = tab.locator(".explorable-question"), tab.locator(".explorable-picture")
    guess, shown = question.bounding_box(), picture.bounding_box()
    assert guess["x"] + guess["width"] <= shown["x"] and shown["y"] < 800
    tab.set_viewport_size({"width": 390, "height": 844})
    assert picture.bounding_box()["y"] < question.bounding_box()["y"]


def test_the_name_of_the_book_leads_home_on_a_phone(visit):
    tab = visit.tab
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(url("book/09_gates_and_decay"))
    assert tab.locator(".home-link").inner_text() == "Gated Linear Attention"
    tab.locator(".home-link").click()
    tab.wait_for_url("**/book/index.html")


def test_the_side_bar_shows_where_one_is(visit):
    tab = visit.tab
    tab.set_viewport_size({"width": 1280, "height": 700})
    for page in ("book/index", "book/16_one_token_at_a_time", "book/01_softmax_attention", "book/benchmarks"):
        tab.goto(url(page))
        box = tab.locator(".bd-links a.current").last.bounding_box() if page != "book/index" else {"y": 0, "height": 0}
        assert 0 <= box["y"] and box["y"] + box["height"] <= 700, page


def test_what_is_cut_at_the_right_fades(visit):
    """Listings on a phone, as tables do."""
    tab = visit.tab
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(url("book/05_linear_attention"))
    listing = tab.locator(".bd-article pre.more:visible").first.element_handle()
    assert listing.evaluate("e => getComputedStyle(e).maskImage").startswith("linear-gradient")
    listing.evaluate("e => e.scrollLeft = e.scrollWidth")
    tab.wait_for_function("e => !e.classList.contains('more')", arg=listing)


def test_icons_are_those_that_the_site_has():
    shown = {
        name
        for page in tools.SITE.rglob("*.html")
        for icon in re.findall(r'<i class="(fa[^"]*)"', page.read_text())
        for name in re.findall(r"fa-([\w-]+)", icon)
    }
    sizes = {"solid", "brands", "regular", "fw", "lg", "sm", "xs"}
    assert shown - sizes <= set(gla_icons.ICONS)
    assert "fontawesome.js" not in text("book/index")


def test_icons_are_drawn(visit):
    """Each is a letter of the small font, as wide as one."""
    visit.tab.goto(url("book/index"))
    visit.tab.evaluate("document.fonts.ready")
    assert visit.tab.evaluate("document.fonts.check('900 16px \"Font Awesome 6 Free\"', '\\uf0c9')")
    assert visit.tab.locator("i.fa-expand").bounding_box()["width"] > 8


def test_wide_listings_use_the_margin(visit):
    tab = visit.tab
    tab.goto(url("book/benchmarks"))
    tab.locator("details").evaluate_all("folds => folds.forEach(fold => (fold.open = true))")
    tab.wait_for_selector("table.wide")
    right = tab.evaluate("document.querySelector('.bd-article').getBoundingClientRect().right")
    table = tab.locator("table.wide").first
    box = table.bounding_box()
    assert right < box["x"] + box["width"] <= 1280
    table.evaluate("e => e.scrollIntoView({block: 'center'})")
    tab.wait_for_selector(".bd-sidebar-secondary.hide", state="attached")


def test_first_column_of_a_wide_table_stays(visit):
    tab = visit.tab
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.goto(url("book/11_chunkwise_gla"))
    table = tab.locator("table.scrolls").first
    table.scroll_into_view_if_needed()
    row = table.locator("tbody tr").last
    first, last = row.locator("th, td").first, row.locator("td").last
    before, moved = first.bounding_box()["x"], last.bounding_box()["x"]
    assert "more" in table.get_attribute("class")
    table.evaluate("e => e.scrollLeft = 200")
    assert first.bounding_box()["x"] == before
    assert last.bounding_box()["x"] < moved
    table.evaluate("e => e.scrollLeft = e.scrollWidth")
    tab.wait_for_function("e => !e.classList.contains('more')", arg=table.element_handle())


def test_no_number_stands_in_brackets_twice():
    for page in PAGES:
        assert not (found := re.search(r".{20}\(<a [^>]*#equation-[^>]*>\(\d.{10}", text(page))), found[0]


# -- API --


def test_api_has_a_page_a_module_with_its_arguments():
    pages = sorted((tools.SITE / "book" / "api").glob("*.html"))
    listed = set(re.findall(r'href="(api/gla_ref[^"#]*\.html)', text("book/api")))
    assert {f"api/{page.name}" for page in pages} == listed and len(pages) > 40
    for page in pages:
        said = page.read_text()
        assert not re.search(r"Alias for field|:param|:type |(sum|prod)_\{", said), page.name
    assert "../09_gates_and_decay.html" in text("book/api/gla_ref.gates")
    arguments = BeautifulSoup(text(API), "html.parser").select("dl.field-list dd")
    assert any("queries" in dd.get_text() for dd in arguments)


def test_api_pages_fit_a_phone(visit):
    visit.tab.set_viewport_size({"width": 390, "height": 900})
    found = []
    for page in sorted((tools.SITE / "book" / "api").glob("*.html")):
        visit.tab.goto(page.as_uri(), wait_until="domcontentloaded")
        found += [f"{page.name}: {problem}" for problem in tools.layout_problems(visit.tab)]
    assert not found, "\n".join(found)


# -- for other sites --


def test_every_page_describes_itself():
    seen = {}
    for page in PAGES:
        head = BeautifulSoup(text(page).split("</head>")[0], "html.parser")
        about = head.select_one("meta[name=description]")["content"]
        assert 40 <= len(about) <= 161 and not re.search(r"[\\{}$]", about), about
        assert head.select_one("meta[property='og:title']")["content"]
        assert about not in seen, f"{page} and {seen[about]} describe themselves alike"
        seen[about] = page


@pytest.mark.parametrize("folder", ["", "deep/below/"])
def test_a_lost_reader_finds_back(visit, served, folder):
    """At a host's root and below it, where the built site does not know its address."""
    visit.tab.goto(f"{served}{folder}book/no/such/page.html")
    assert visit.tab.locator("ol a").count() >= 16
    logo = visit.tab.locator("main img").element_handle()
    visit.tab.wait_for_function("e => e.complete && e.naturalWidth > 0", arg=logo)
    visit.tab.locator("main p a").first.click()
    visit.tab.wait_for_url(f"{served}{folder}book/index.html")
    visit.problems.clear()  # the browser itself reports what is missing
