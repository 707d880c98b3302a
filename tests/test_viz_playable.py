"""The playable state: its first picture against the recurrence (chapters 5, 9, 11); browser/ plays it."""

from __future__ import annotations

import pytest
import torch

from gla_ref import gla
from gla_ref.book.notebook import chapters
from gla_ref.book.viz._explorable import COLOURS, HERE
from gla_ref.book.viz.cards import CARDS, OPTIONAL, PATHS, WAYS, cards, paths, ways
from gla_ref.book.viz.playable_state import KINDS, LIKES, NAMES, TOKENS, playable_state

bs4 = pytest.importorskip("bs4", reason="the book's tools are not installed")


def oracle(q, k, v, alpha):
    x = (torch.as_tensor(y, dtype=torch.float64)[None, :, None] for y in (q, k, v))
    g = torch.as_tensor(alpha, dtype=torch.float64).log()[None, :, None]
    o, S = gla.recurrent(*x, g, scale=1.0)
    return o[0, :, 0], S[0, 0]


def matrix(figure, name: str) -> list[str]:
    return [cell.span.text for cell in figure.select(f'[data-cell^="{name}."]')]


@pytest.mark.parametrize("size", ["small", "tokens", "chunks"])
@pytest.mark.parametrize("gate", KINDS)
def test_first_picture_is_the_recurrence(size, gate):
    """What one sees without JavaScript, and in print."""
    figure = bs4.BeautifulSoup(playable_state(size, gate=gate)._repr_html_(), "html.parser").figure
    assert figure.select_one(f'option[selected][value="{gate}"]')
    if size == "small":
        assert matrix(figure, "S") == list("100010000")
        return
    given = playable_state(size, gate=gate).data()
    q, k, v = ([token[name] for token in TOKENS[:2]] for name in "qkv")
    o, S = oracle(q, k, v, given["gates"][gate][:2])
    shown = o.flatten().tolist() if size == "chunks" else o[1].tolist()
    assert [float(x) for x in matrix(figure, "o") if x] == pytest.approx(shown)
    if size == "tokens":
        assert [float(x) for x in matrix(figure, "S")] == pytest.approx(S.flatten().tolist())
    numbers = ", ".join(f"{x:g}" for x in o[1].tolist())
    assert f"({numbers})" in figure.select_one(".explorable-readout").text


def test_the_blend_of_the_front_page():
    k = torch.tensor(list(NAMES.values()), dtype=torch.float64)
    assert torch.allclose(k.norm(dim=1), torch.ones(3, dtype=torch.float64))
    o, _ = oracle(k[[0, 0, 0]], k, list(LIKES.values()), torch.ones(3, 3))
    assert o[-1].tolist() == pytest.approx([1, 0, 0.8])  # tea, and four fifths of jazz


@pytest.mark.parametrize("size", ["small", "tokens", "chunks"])
def test_every_kind_of_gate_fades_something_from_the_start(size):
    gates = playable_state(size).data()["gates"]
    assert all(gates[kind] != gates["none"] for kind in KINDS if kind != "none")


def test_gates_of_the_chapters():
    """The tokens are those of chapter 5, the gates those of the tables of chapters 9 and 11."""
    q, k, v = ([token[name] for token in TOKENS] for name in "qkv")
    by_hand, _ = oracle(q, k, v, torch.ones(4, 2))
    assert by_hand.tolist() == [[1, 2, 3], [5, 2, 4], [8, 2, 2], [-6, 7, 7]]
    for size, page in (("tokens", "09_gates_and_decay"), ("chunks", "11_chunkwise_gla")):
        text = (HERE.parents[3] / "book" / f"{page}.md").read_text()
        assert f"alpha = torch.tensor({playable_state(size).data()['gates']['vector']})" in text


def test_chapters_5_and_9_ask_different_questions():
    plain, gated = playable_state(), playable_state(gate="vector")
    assert plain.question() != gated.question()
    tokens = [[token[name] for token in TOKENS] for name in "qkv"]
    _, S = oracle(*tokens, gated.data()["gates"]["scalar"])
    assert S.tolist() == [[2, 2, 2], [0, 0, 0]] and gated.question().right == "cleared, too"
    _, S = oracle(*tokens, gated.data()["gates"]["vector"])
    assert S[1].any()  # what the sentence about one number a row promises


def test_cards_lead_to_the_chapters():
    book = HERE.parents[3] / "book"
    pages = list(chapters(book))
    assert [card.page for card in CARDS] == pages
    html = bs4.BeautifulSoup(cards()._repr_html_() + ways()._repr_html_(), "html.parser")
    links = [link["href"].removesuffix(".html") for link in html.select("a.card-link")]
    assert links == pages + [way[0] for way in WAYS]
    assert all((book / f"{page}.md").exists() for page in links)
    assert html.select_one(".cards-ways p").text.startswith(f"{len(pages)} chapters")
    assert all(card.question.endswith("?") and card.learns.endswith(".") for card in CARDS)
    assert {path.stem for path in (HERE / "pictures").iterdir()} == set(pages)
    kinds = {kind.removeprefix("line-") for mark in html.select("svg [class]") for kind in mark["class"]}
    assert kinds <= {*COLOURS, "line", "edge", "faint", "dashed", "strong"}, "a class that the style does not have"


def test_paths_lead_through_chapters_and_name_what_is_optional():
    """Each has places for its hours and minutes, which the site's build fills in."""
    book = HERE.parents[3] / "book"
    html = bs4.BeautifulSoup(paths()._repr_html_(), "html.parser")
    steps = [a["href"].removesuffix(".html") for a in html.select("section a")]
    assert steps == list(PATHS[0].pages) and [int(page[:2]) for page in steps] == [4, 5, 6, 7, 9, 10, 11, 12, 13]
    for box, path in zip(html.select("section"), PATHS, strict=True):
        pages = box.select_one("[data-hours]")["data-hours"].split()
        assert pages == box.select_one("[data-page]")["data-page"].split() == list(path.pages)
    for link, (page, _, missed) in zip(html.select(".paths-optional li"), OPTIONAL, strict=True):
        chapter, _, anchor = page.partition(".html")
        text = " ".join((book / f"{chapter}.md").read_text().split())
        assert missed in link.text and (not anchor or f"({anchor[1:]})=" in text)
        assert missed in text or "If you skip" not in text, f"chapter {chapter[:2]} says it in other words"
