"""Each explorable answers to the keyboard, to a mouse and to a finger, plays and resets, without a network."""

import re

import browser as tools
import pytest
import torch
from cases import thin

from gla_ref import gla
from gla_ref.book.viz.playable_state import KINDS, TOKENS

pytestmark = pytest.mark.browser

#: the pages whose cells draw one, or lead to one
#: pages with a figure to play with: cards are links
PAGES = [
    page
    for page in tools.book_pages()
    if re.search(r"from gla_ref\.book\.viz(?!\.cards)", (tools.ROOT / f"{page}.md").read_text())
]
WAYS = ("keyboard", "mouse", "touch")
#: a picture, but for where the mouse rests, and its readout
STATE = """e => [
  e.querySelector(".explorable-picture").innerHTML.replaceAll(' data-told=""', ""),
  e.querySelector(".explorable-readout").textContent,
]"""
#: the parts of a picture that explain themselves: what they say, and where the last of them is
SAID = 'e => [...e.querySelectorAll("[data-say]")].map(part => part.dataset.say)'
LAST = """e => {
  const part = [...e.querySelectorAll("[data-say]")].at(-1);
  part.scrollIntoView({block: "center"});
  const box = (part.firstElementChild ?? part).getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
#: a page of thousands of elements is slow to press buttons on: leave the explorables alone
ALONE = """() => {
  document.querySelector("article").replaceChildren(...document.querySelectorAll("figure.explorable"));
  for (const other of document.querySelectorAll(".bd-sidebar, .bd-header, .bd-header-article")) other.remove();
}"""
#: from the beginning, where pictures are empty or alike, some steps on
ONWARDS = """(e, steps) => {
  const [step, , reset] = e.querySelectorAll(".explorable-buttons button");
  reset.click();
  for (let n = 0; n < steps; n++) step.click();
}"""
CHANGES = ("picture", "readout")
#: controls that are too low for a finger
LOW = "all => all.filter(e => e.getBoundingClientRect().height < 39.5).map(e => e.outerHTML.slice(0, 80))"
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


@pytest.fixture
def visit(chromium):
    """A tab that knows fingers and mice, and whose clock the tests turn on."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, has_touch=True, reduced_motion="reduce")
    visit = tools.Visit(context)
    visit.tab.clock.install()
    yield visit
    assert not visit.problems
    context.close()


def resize(tab, way: str) -> None:
    tab.set_viewport_size({"width": 390 if way == "touch" else 1280, "height": 900})


def press(tab, button, way: str) -> None:
    button.scroll_into_view_if_needed()
    use(tab, button, way)


@pytest.mark.parametrize("page", thin(PAGES, "book/06_prefix_sums_and_chunks", "book/11_chunkwise_gla"))
def test_explorables(visit, page):
    """Every control changes picture and readout; play, step and reset work; parts say what they are; all ways."""
    tab = visit.tab
    tab.goto(tools.url(page))
    figures = tab.locator("figure.explorable").all()
    assert figures, "no explorable on this page"
    tab.evaluate(ALONE)
    for way in WAYS:
        resize(tab, way)
        if way == "touch":
            low = tab.locator("figure.explorable :is(button, select, input)").evaluate_all(LOW)
            assert not low, f"less than 40 pixels high: {low}"
        for figure in figures:
            if way == WAYS[0]:
                silence(tab, figure)
            answers(tab, figure, way)
            if "playable" not in figure.get_attribute("class"):
                every_control(tab, figure, way)
            play_and_reset(tab, figure, way)
            pointing(tab, figure, way)
    for figure in figures:
        choices(figure)


def silence(tab, figure) -> None:
    """Nothing is said before a guess, or before something is moved."""
    readout, caption = figure.locator(".explorable-readout"), figure.locator("figcaption")
    assert readout.text_content().startswith("Guess first") and not caption.is_visible()
    figure.get_by_role("button", name="Step").click()
    assert not readout.text_content().startswith("Guess first") and caption.is_visible()
    figure.get_by_role("button", name="Reset").click()


def every_control(tab, figure, way: str) -> None:
    name = figure.get_attribute("id")
    first = figure.evaluate(STATE)
    for i, control in enumerate(figure.locator(".explorable-controls :is(input, select)").all()):
        assert control.evaluate(LABELLED), f"{name}: control {i} has no label"
        control.scroll_into_view_if_needed()
        for steps in (4, 7, 10):  # two ways may begin alike, and a round of steps ends
            figure.evaluate(ONWARDS, steps)
            before = figure.evaluate(STATE)
            use(tab, control, way)
            changed = {what for what, x, y in zip(CHANGES, before, figure.evaluate(STATE), strict=True) if x != y}
            if len(changed) == len(CHANGES):
                break
        assert changed == set(CHANGES), f"{name}: control {i} changes {changed or 'nothing'} ({way})"
    press(tab, figure.get_by_role("button", name="Reset"), way)
    assert figure.evaluate(STATE) == first, f"{name}: reset ({way})"


def play_and_reset(tab, figure, way: str) -> None:
    step, play, reset = figure.locator(".explorable-buttons button").all()
    seen = [figure.evaluate(STATE)]
    press(tab, step, way)
    seen.append(figure.evaluate(STATE))
    press(tab, play, way)
    seen.append(figure.evaluate(STATE))
    if play.text_content() == "Pause":  # not at the end yet
        tab.clock.run_for(1300)
        seen.append(figure.evaluate(STATE))
    for before, after in zip(seen, seen[1:], strict=False):
        assert before[0] != after[0] and before[1] != after[1]
    tab.clock.run_for(60_000)
    assert play.text_content() == "Play"  # it stops at its end
    end = figure.evaluate(STATE)
    tab.clock.run_for(5000)
    assert figure.evaluate(STATE) == end
    press(tab, reset, way)
    assert figure.evaluate(STATE) == seen[0]


def pointing(tab, figure, way: str) -> None:
    """The part that one points at is explained below the picture; a choice changes the picture."""
    picture, told = figure.locator(".explorable-picture"), figure.locator(".explorable-told")
    before, said = figure.evaluate(STATE), picture.evaluate(SAID)
    assert told.text_content().startswith("Point at")
    if way == "keyboard":
        picture.focus()
        heard = []
        for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
            tab.keyboard.press(key)
            heard.append(told.text_content())
        assert set(heard) <= set(said) and (len(set(heard)) > 1 or len(set(said)) == 1)
        tab.keyboard.press("Enter")
    else:
        x, y = picture.evaluate(LAST)
        tab.touchscreen.tap(x, y) if way == "touch" else tab.mouse.move(x, y)
        assert told.text_content() in said
        if way == "mouse":
            tab.mouse.click(x, y)
    press(tab, figure.get_by_role("button", name="Reset"), way)
    if "playable" not in figure.get_attribute("class"):
        assert [text for _, text in [figure.evaluate(STATE)]] == [before[1]]


def answers(tab, figure, way: str) -> None:
    """Each is met with a sentence, takes the figure to its case, and is named where play shows what became of it."""
    buttons = figure.locator(".explorable-answers button").all()
    verdict, readout = figure.locator(".explorable-verdict"), figure.locator(".explorable-readout")
    play, verdicts = figure.get_by_role("button", name="Play"), set()
    for button in buttons:
        press(tab, button, way)
        assert button.get_attribute("aria-pressed") == "true"
        if "So it is" not in readout.text_content():  # the case does not begin where one sees it
            assert verdict.text_content().endswith("Press Play to see it.")
            press(tab, play, way)
            tab.clock.run_for(60_000)
        words = verdict.text_content()
        verdicts.add(words)
        right = words.startswith("Right. ")
        named = f"So it is “{button.text_content()}”." if right else f"So it is not “{button.text_content()}” but"
        assert named in readout.text_content(), "play stops where one sees the answer, and names the guess"
    assert len(verdicts) == len(buttons) >= 2
    assert sum(words.startswith("Right. ") for words in verdicts) == 1
    press(tab, figure.get_by_role("button", name="Reset"), way)


def choices(figure) -> None:
    """Each part with a control of its own sets it: the readout is that of the slider moved there by hand."""
    sets = figure.evaluate("e => [...e.querySelectorAll('[data-set]')].map(part => part.dataset.set)")
    for n in {0, len(sets) // 2, len(sets) - 1} if sets else ():
        figure.locator(f"[data-set='{sets[n]}']").first.dispatch_event("click")
        controls = figure.locator(".explorable-controls :is(input, select)").all()
        for control, value in (map(int, pair.split(":")) for pair in sets[n].split()):
            assert controls[control].input_value() == str(value)


# -- the playable state ------------------------------------------------------------------------


def shown(figure, name: str) -> list[float]:
    texts = figure.locator(f"[data-cell^='{name}.'] > span").all_text_contents()
    return [float(x.replace("−", "-")) for x in texts if x]


def oracle(tokens: list[dict], alpha: list[list[float]]):
    q, k, v = (torch.tensor([token[name] for token in tokens], dtype=torch.float64)[None, :, None] for name in "qkv")
    o, S = gla.recurrent(q, k, v, torch.tensor(alpha, dtype=torch.float64).log()[None, :, None], scale=1.0)
    return o[0, :, 0], S[0, 0].flatten().tolist()


def drag(gate, value: float) -> None:
    gate.evaluate("(e, value) => { e.value = value; e.dispatchEvent(new Event('input', {bubbles: true})) }", value)


@pytest.mark.parametrize("kind", KINDS)
def test_playable_state_is_the_recurrence(visit, kind):
    """Numbers typed and gates dragged in chapter 5: state and output are those of `gla.recurrent`, to two decimals."""
    tab, tokens = visit.tab, [{name: list(x) for name, x in token.items()} for token in TOKENS]
    tab.goto(tools.url("book/05_linear_attention"))
    figure = tab.locator("figure.playable")
    figure.locator("select").first.select_option(kind)
    step = figure.get_by_role("button", name="Step")
    while "empty" not in figure.locator(".explorable-readout").text_content():
        step.click()
    alpha = []
    for t, token in enumerate(tokens):
        step.click()
        assert figure.locator(".playable-token").text_content() == f"token {t + 1} of 4"
        for name, i, value in (("k", 1, -0.5 * t), ("v", 2, 1.5 + t), ("q", 0, 0.25)):
            figure.locator(f"[data-number='{name}.{i}']").fill(str(value))
            token[name][i] = value
        if kind != "none":
            drag(figure.locator("[data-gate='1']"), 0.35 + 0.1 * (kind != "constant") * t)
        gates = [float(gate.input_value()) for gate in figure.locator("[data-gate]").all()]
        assert kind in ("none", "vector") or gates[0] == gates[1]
        assert kind != "none" or gates == [1, 1]
        alpha.append(gates)
        while "Read:" not in figure.locator(".explorable-readout").text_content():
            step.click()
        o, S = oracle(tokens[: t + 1], alpha)
        assert shown(figure, "S") == pytest.approx(S, abs=0.0051)
        assert shown(figure, "o") == pytest.approx(o[-1].tolist(), abs=0.0051)


@pytest.mark.parametrize("C", [1, 2, 4])
def test_chunks_of_the_playable_state_are_the_recurrence(visit, C):
    tab = visit.tab
    tab.goto(tools.url("book/11_chunkwise_gla"))
    figure = tab.locator("figure.playable")
    figure.locator("select").last.select_option(str(C))
    drag(figure.locator("[data-gate='2.0']"), 0.25)
    gates = [float(gate.input_value()) for gate in figure.locator("[data-gate]").all()]
    alpha = [gates[2 * t : 2 * t + 2] for t in range(4)]
    assert alpha[2][0] == 0.25
    o, S = oracle(TOKENS, alpha)
    step, readout = figure.get_by_role("button", name="Step"), figure.locator(".explorable-readout")
    while not any(words in readout.text_content() for words in ("4 are written", "4 is written")):
        step.click()
    assert shown(figure, "S") == pytest.approx(S, abs=0.0051)
    assert shown(figure, "o") == pytest.approx(o.flatten().tolist(), abs=0.0051)
    assert len(shown(figure, "P")) == 4 * (C + 1) // 2


def test_writing_and_asking_on_the_front_page(visit):
    """A reader's own order: the answer is what the recurrence says, in words."""
    tab = visit.tab
    tab.goto(tools.url("book/index"))
    figure = tab.locator("figure.playable")
    readout = figure.locator(".explorable-readout")

    def do(name: str) -> str:
        figure.get_by_role("button", name=name, exact=True).click()
        tab.clock.run_for(10_000)
        return readout.text_content()

    for fact in ("Ada likes tea", "Bob likes rain", "Adam likes jazz"):
        do(fact)
    assert do("Ada").endswith("out comes tea 1, jazz 0.8.")
    assert do("Bob").endswith("out comes rain 1.")
    figure.locator("select").first.select_option("constant")
    assert do("Ada").endswith("out comes tea 0.64, jazz 0.8.")  # faded by two writes since
    do("Ada likes tea")
    assert do("Ada").endswith("out comes tea 1.51, jazz 0.64.")


def test_sliders_of_the_front_page_are_the_gate_of_the_last_write(visit):
    """A question fades nothing: where it is asked, the sliders still show, and change, what faded before it."""
    tab = visit.tab
    tab.goto(tools.url("book/index"))
    figure = tab.locator("figure.playable")
    kinds, gates = figure.locator("select").first, figure.locator("[data-gate]")
    tea = figure.locator("[data-cell='o.0'] > span").first
    kinds.select_option("vector")
    while "out comes" not in (said := figure.locator(".explorable-readout").text_content()) or "jazz" not in said:
        figure.get_by_role("button", name="Step").click()
    assert [float(gate.input_value()) for gate in gates.all()] == [0.25, 1, 1] and tea.text_content() == "0.25"
    drag(gates.first, 0)
    assert tea.text_content() == "0", "at once"
    figure.get_by_role("button", name="Bob likes rain", exact=True).click()
    tab.clock.run_for(10_000)
    assert float(gates.first.input_value()) == 0, "the next write has the gate that the sliders showed"


@pytest.mark.parametrize("page", ["index", "05_linear_attention", "09_gates_and_decay", "11_chunkwise_gla"])
def test_playable_state_without_javascript(chromium, page):
    """The script draws some steps on from the picture that Python drew."""
    seen = []
    for script in (False, True):
        context = chromium.new_context(java_script_enabled=script)
        tab = context.new_page()
        tab.goto(tools.url(f"book/{page}"))
        figure = tab.locator("figure.playable")
        readout, step = figure.locator(".explorable-readout"), figure.get_by_role("button", name="Step")
        steps = 0
        while script and not readout.text_content().startswith(seen[0][2].split(",")[0]) and (steps := steps + 1) < 20:
            step.click()
        cells = figure.locator("[data-cell] > span").all_text_contents()
        numbers = [box.input_value() for box in figure.locator("[data-number], [data-gate]").all()]
        seen.append((cells, numbers, readout.text_content()))
        context.close()
    assert seen[0] == seen[1]


def test_a_gate_that_is_touched_becomes_one_a_row(visit):
    tab = visit.tab
    tab.goto(tools.url("book/05_linear_attention"))
    figure = tab.locator("figure.playable")
    drag(figure.locator("[data-gate='1']"), 0.5)
    assert figure.locator("select").first.input_value() == "vector"
    assert [float(gate.input_value()) for gate in figure.locator("[data-gate]").all()] == [1, 0.5]
