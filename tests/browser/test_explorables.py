"""Each explorable answers to the keyboard, to a mouse and to a finger, without a network."""

import browser as tools
import pytest

pytestmark = pytest.mark.browser

#: the pages whose cells draw one
PAGES = [page for page in tools.book_pages() if "from gla_ref.viz" in (tools.ROOT / f"{page}.md").read_text()]
WAYS = ("keyboard", "mouse", "touch")
STATE = """e => [
  e.querySelector(".explorable-picture").innerHTML,
  e.querySelector(".explorable-readout[aria-live=polite]").textContent,
]"""
LABELLED = "e => [...e.labels ?? []].some(l => l.textContent.trim()) || !!e.ariaLabel || !!e.textContent.trim()"


def use(tab, control, way: str) -> None:
    """Move one native control from where it stands."""
    kind = control.evaluate("e => e.type || e.tagName.toLowerCase()")
    if kind == "range":
        low = control.evaluate("e => (e.value - e.min) / (e.max - e.min) < 0.5")
        if way == "keyboard":
            control.focus()
            tab.keyboard.press("End" if low else "Home")
        else:
            box = control.bounding_box()
            place = {"x": box["width"] * (0.9 if low else 0.1), "y": box["height"] / 2}
            control.tap(position=place) if way == "touch" else control.click(position=place)
    elif kind == "select-one":
        chosen = control.evaluate("e => e.selectedIndex")
        if way == "keyboard":
            control.focus()
            tab.keyboard.press("ArrowDown" if chosen == 0 else "ArrowUp")
        else:  # the list that opens belongs to the system, not to the page
            control.select_option(index=1 if chosen == 0 else 0)
    elif way == "keyboard":
        control.focus()
        tab.keyboard.press("Space")
    else:
        control.tap() if way == "touch" else control.click()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("way", WAYS)
def test_controls_change_picture_and_readout(chromium, page, way):
    context = chromium.new_context(
        viewport={"width": 390, "height": 900} if way == "touch" else {"width": 1280, "height": 900},
        has_touch=way == "touch",
    )
    visit = tools.Visit(context)
    visit.tab.goto((tools.SITE / f"{page}.html").as_uri())
    figures = visit.tab.locator("figure.explorable").all()
    assert figures, "no explorable on this page"
    for figure in figures:
        name = figure.get_attribute("id")
        controls = figure.locator(".explorable-controls :is(input, select, button)").all()
        assert controls, f"{name}: no control"
        # a button such as "first step" answers only when something has been moved before
        controls.sort(key=lambda c: c.evaluate("e => e.tagName === 'BUTTON'"))
        for i, control in enumerate(controls):
            assert control.evaluate(LABELLED), f"{name}: control {i} has no label"
            control.scroll_into_view_if_needed()
            before = figure.evaluate(STATE)
            use(visit.tab, control, way)
            after = figure.evaluate(STATE)
            assert after[0] != before[0], f"{name}: control {i} does not change the picture ({way})"
            assert after[1] != before[1], f"{name}: control {i} does not change the readout ({way})"
    assert not visit.problems
    context.close()


def test_the_book_has_explorables():
    pages = ((tools.SITE / f"{page}.html").read_text() for page in PAGES)
    assert sum(text.count('class="explorable"') for text in pages) >= 7
