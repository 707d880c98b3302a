"""Exercises in the page take the right answer and say of a wrong one what Python says, by keyboard and by touch."""

import re

import browser as tools
import pytest
from answers import answer_to
from axe_playwright_python.sync_playwright import Axe
from browser import url
from cases import thin

from gla_ref.book import exercises

pytestmark = pytest.mark.browser

exercises.load()
LABELS = {
    page: [label for label in re.findall(r"(?m)^:label: (ex-\S+)$", (tools.ROOT / f"{page}.md").read_text())]
    for page in tools.book_pages()
}
PAGES = [page for page, labels in LABELS.items() if any(label in exercises.QUESTIONS for label in labels)]
WAYS = {"keyboard": ("light", 1280), "touch": ("dark", 390)}
RESET = "form => { form.reset(); form.querySelector('.verdict').textContent = ''; }"
TAPPED = "label => label.contains(document.activeElement)"
ON_BUTTON = "document.activeElement.type === 'submit'"
#: a page of thousands of elements is slow to press keys on: leave the exercises alone
ALONE = """() => {
  document.querySelector("article").replaceChildren(...document.querySelectorAll(".exercise:has(form)"));
  for (const other of document.querySelectorAll(".bd-sidebar, .bd-header, .bd-header-article")) other.remove();
}"""


def split(question, x: list[float]):
    """Each part of a question with its numbers."""
    for part in question.parts:
        n = len(part.options) if part.many else 1
        yield part, x[:n]
        x = x[n:]


def by_keyboard(tab, form, question, x: list[float]) -> None:
    form.locator("input").first.focus()
    for part, values in split(question, x):
        if part.options and not part.many:
            tab.keyboard.press("Space")
            for _ in range(list(part.options.values()).index(values[0])):
                tab.keyboard.press("ArrowDown")
            tab.keyboard.press("Tab")
            continue
        for value in values:
            if not part.options:
                tab.keyboard.type(repr(value))
            elif value:
                tab.keyboard.press("Space")
            tab.keyboard.press("Tab")
    assert tab.evaluate(ON_BUTTON), "after the last field comes the button"
    tab.keyboard.press("Enter")


def by_touch(tab, form, question, x: list[float]) -> None:
    labels = iter(form.locator("label").element_handles())
    for part, values in split(question, x):
        here = [next(labels) for _ in part.options or [0]]
        if not part.options:
            here[0].tap()
            tab.wait_for_function(TAPPED, arg=here[0])  # a busy browser needs a while to see that a touch is a tap
            tab.keyboard.type(repr(values[0]))
            continue
        chosen = values if part.many else [value == values[0] for value in part.options.values()]
        for label, wanted in zip(here, chosen, strict=True):
            if wanted:
                label.tap()
    form.locator("button").tap()


def said(tab, label: str, way: str, x: list[float]) -> str:
    """The page's words on an answer."""
    form = tab.locator(f"#answer-{label}")
    form.evaluate(RESET)
    (by_touch if way == "touch" else by_keyboard)(tab, form, exercises.QUESTIONS[label](), x)
    return form.locator(".verdict[aria-live=polite]:not(:empty)").text_content()


def tried(label: str) -> list[tuple[list[float], str]]:
    """An answer for every rule that a page can meet, with what Python says of it."""
    question = exercises.QUESTIONS[label]()
    rules = [(answer_to(question, n), sentence) for n, (_, sentence) in enumerate(question.rules)]
    return [(x, f"{'✓' if sentence == 'Right.' else '✗'} {sentence}") for x, sentence in rules if x]


def axe_problems(tab) -> list[str]:
    """All of axe's rules on the forms as they stand."""
    options = {"preload": False, "resultTypes": ["violations"]}
    violations = Axe().run(tab, {"include": [["form.answer"]]}, options).response["violations"]
    return [f"{v['id']}: {[n['html'][:150] for n in v['nodes'][:4]]}" for v in violations]


@pytest.mark.parametrize("page", thin(PAGES, "book/09_gates_and_decay"))
def test_page_says_what_python_says(chromium, page):
    context = chromium.new_context(has_touch=True, reduced_motion="reduce")
    visit = tools.Visit(context)
    visit.tab.goto(url(page))
    labels = [label for label in LABELS[page] if label in exercises.QUESTIONS]
    forms = visit.tab.locator(".exercise form.answer").all()
    assert [form.get_attribute("id") for form in forms] == [f"answer-{label}" for label in labels]
    others = visit.tab.locator(".answer-where").all()
    assert len(others) == len(LABELS[page]) - len(labels)
    for line in others:
        assert line.locator("a").first.get_attribute("href").endswith(f"/{page.split('/')[-1]}.ipynb")
    assert not visit.tab.locator(".verdict-open").count(), "what a cell says that nobody can run here"
    visit.tab.evaluate(ALONE)
    for label in labels:
        if all(part.many for part in exercises.QUESTIONS[label]().parts):  # else what is missing would tell the answer
            visit.tab.locator(f"#answer-{label} button").click()
            assert "Your turn" in visit.tab.locator(f"#answer-{label} .verdict").text_content(), "nothing is ticked"
    for way, (theme, width) in WAYS.items():
        visit.tab.emulate_media(color_scheme=theme)
        visit.tab.set_viewport_size({"width": width, "height": 900})
        for label in labels:
            answers = tried(label)
            assert answers[0][1] == "✓ Right." and len(answers) > 2
            for x, sentence in answers[::-1]:
                assert said(visit.tab, label, way, x) == sentence, (label, x)
        assert not axe_problems(visit.tab), "with right answers"
        for label in labels:
            said(visit.tab, label, way, tried(label)[-1][0])
        assert not axe_problems(visit.tab), "with wrong answers"
    assert not visit.problems
    context.close()


@pytest.mark.parametrize(
    "entered, sentence",
    [
        (("1/8", "3/6", ".625", "1."), "✓ Right."),
        (("12.5e-2", " 0.5 ", "+0.625", "1"), "✓ Right."),
        (("1,000", "1", "1", "1"), "Answer 1 of 4 is not right."),
        (("1/0", "1", "1", "1"), "Answer 1 of 4 is not right."),
        (("\N{MINUS SIGN}1", "1", "1", "1"), "Answer 1 of 4 is not right."),
        (("0,5", "1", "1", "1"), "… Expected a number, such as 0.5, 1/16 or 1e-3, with a point for the decimals."),
        (("0,625", "1", "1", "1"), "… Expected a number, such as 0.5, 1/16 or 1e-3, with a point for the decimals."),
        (("a half", "1", "1", "1"), "… Expected a number"),
        (("1/2/3", "1", "1", "1"), "… Expected a number"),
        (("1/8", "", "5/8", "1"), "… Your turn: one of the answers is still missing."),
    ],
)
def test_numbers_as_people_write_them(chromium, entered, sentence):
    context = chromium.new_context()
    tab = tools.Visit(context).tab
    tab.goto(url("book/01_softmax_attention"))
    form = tab.locator("#answer-ex-softmax-afterwards")
    for field, text in zip(form.locator("input").all(), entered, strict=True):
        field.fill(text)
    form.locator("input").last.press("Enter")
    assert sentence in form.locator(".verdict").text_content()
    form.locator("input").first.fill("2")
    assert form.locator(".verdict").text_content() == "", "the verdict was about another answer"
    context.close()
