"""Explorables: the class, and the numbers in the pictures against the package's (chapters 2 and 5)."""

from __future__ import annotations

import json
import re

import pytest

from gla_ref.viz import Choice, Explorable, Frame, Slider

bs4 = pytest.importorskip("bs4", reason="the book's tools are not installed")


def toy(**changes) -> Explorable:
    frames = [
        [Frame((f"<text>{a}</text>", "<path/>"), f"{a} at {i} </script>") for i in range(n)]
        for a, n in (("one", 2), ("two", 3))
    ]
    given = dict(
        title="Toy & more", notice="See.", alt="A toy.", frames=frames, height=50, start=(1, 2)
    )
    controls = Choice("which", ["one", "two"]), Slider("step", range(3))
    return Explorable(**(given | {"controls": controls} | changes))


def sent(explorable: Explorable) -> dict:
    """What the page's script gets."""
    (data,) = re.findall(r"labels\} = (\{.*\});", explorable._repr_html_())
    return json.loads(data)


def test_page_gets_every_frame_and_shows_the_first():
    html = toy()._repr_html_()
    data, figure = sent(toy()), bs4.BeautifulSoup(html, "html.parser").figure
    assert data["pieces"] == ["<text>one</text>", "<path/>", "<text>two</text>"]
    assert data["frames"][0] == [["one at 0 </script>", 0, 1], ["one at 1 </script>", 0, 1]]
    assert len(data["frames"][1]) == 3 and data["labels"] == [["one", "two"], ["0", "1", "2"]]
    assert figure["class"] == ["explorable"] and re.fullmatch(
        "explorable-[0-9a-f]{8}", figure["id"]
    )
    assert (
        figure.select_one(".explorable-picture svg").decode_contents()
        == "<text>two</text><path></path>"
    )
    assert figure.select_one(".explorable-readout[aria-live=polite]").text == "two at 2 </script>"
    assert figure.select_one("select option[selected]").text == "two"
    assert figure.select_one("input")["value"] == "2"
    assert html.count("</script>") == 1 and "%" not in re.sub(r"\d%", "", html)
    assert toy()._repr_html_() == html and figure["id"] not in toy(title="Other")._repr_html_()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(start=(1,)), "start: expected 2 indices, got (1,)"),
        (dict(start=(0, 2)), "start: expected 'step' in [0, 2), got 2"),
        (dict(controls=(Choice("which", "abc"), Slider("step", range(3)))), "frames: expected 3 for 'which', got 2"),
        (dict(controls=(Choice("which", "ab"), Slider("step", range(2)))), "frames: expected 2 for 'step', got 3"),
        (dict(controls=(Choice("which", "ab"),), start=(0,)), "frames: expected a Frame, got list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        toy(**changes)
