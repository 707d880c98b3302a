"""The one class of all explorables: its HTML, style and script (chapter 2)."""

import functools
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

__all__ = ["WIDTH", "Choice", "Explorable", "Frame", "Key", "Question", "Slider"]

#: units across a picture; text of 13 units is then legible on a phone
WIDTH = 400


class Choice(NamedTuple):
    """A list to choose from."""

    label: str
    values: Sequence[object]


class Slider(NamedTuple):
    """A range to slide along; if there are fewer frames than values, the range ends earlier."""

    label: str
    values: Sequence[object]


class Frame(NamedTuple):
    """One state of the picture."""

    pieces: Sequence[str]  # SVG, drawn in this order; a piece of `_svg.part` explains itself when a reader points at it
    readout: str  # the picture in words and numbers


class Key(NamedTuple):
    """A line of the legend: a class of `_svg`, its meaning, and the shape that has the class."""

    kind: str
    words: str
    shape: str = "tile"  # or "line" or "dot"


class Question(NamedTuple):
    """A question to answer before moving anything; each answer gets a sentence.

    Until a reader guesses, or moves a control, caption and readout are silent. Then the figure waits at the beginning
    of the case in question; when play reaches the frame that shows the answer, that frame names the guess.
    """

    words: str
    right: str
    answers: Mapping[str, str]
    #: the frame that shows the answer, by an index for each control; or a frame for each answer
    seen: Sequence[int] | Mapping[str, Sequence[int]]
    #: the first frame, which must not give the answer away; by default the beginning of the right answer's case
    before: Sequence[int] | None = None

    def places(self) -> dict[str, list[int]]:
        """The frame that each answer leads to."""
        seen = self.seen if isinstance(self.seen, Mapping) else dict.fromkeys(self.answers, self.seen)
        return {answer: list(place) for answer, place in seen.items()}


@dataclass(repr=False)
class Explorable:
    """A picture with controls, in one piece of HTML for the site, Jupyter and Colab; it needs no network.

    Without JavaScript, on paper and in the PDF the figure is the picture of `start`, which Python drew. The page's
    script begins at a frame that does not answer the question.

    Args:
        title: a few words above the picture.
        notice: a sentence or two under the picture that say what to notice.
        alt: a general description of the picture, for readers who do not see it.
        controls: the :class:`Choice` and :class:`Slider` controls.
        frames: lists nested as deep as there are controls, the first control outermost, with a
            :class:`Frame` for every combination; a slider's list may be shorter than its values.
        height: units, where the picture is `WIDTH` units wide.
        start: the index of each control's value in the picture on paper.
        legend: every colour and every dashed outline of the picture.
        question: the question to answer before moving anything.
        play: the slider that the buttons move; by default the last control.

    Raises:
        ValueError: frames and controls do not fit together.
    """

    title: str
    notice: str
    alt: str
    controls: Sequence[Choice | Slider]
    frames: Sequence
    height: int
    start: Sequence[int]
    legend: Sequence[Key] = ()
    question: Question | None = None
    play: int = -1

    def __post_init__(self) -> None:
        self._check(self.frames, self.controls)
        self._check_place("start", self.start)
        if not isinstance(self.controls[self.play], Slider):
            raise ValueError(f"play: expected a slider, got {self.controls[self.play].label!r}")
        if self.question:
            if self.question.right not in self.question.answers:
                raise ValueError(f"question: expected one of its answers, got {self.question.right!r}")
            if self.question.places().keys() != self.question.answers.keys():
                raise ValueError(f"question.seen: expected a frame for each answer, got {self.question.seen!r}")
            for place in [*self.question.places().values(), self.first()]:
                self._check_place("question", place)

    def first(self) -> list[int]:
        """The index of each control's value where the page's script begins."""
        if not self.question:
            return list(self.start)
        if self.question.before is not None:
            return list(self.question.before)
        place = self.question.places()[self.question.right]
        place[self.play] = 0
        return place

    def _check_place(self, name: str, place: Sequence[int]) -> None:
        if len(place) != len(self.controls):
            raise ValueError(f"{name}: expected {len(self.controls)} indices, got {place!r}")
        node = self.frames
        for control, i in zip(self.controls, place, strict=True):
            if not 0 <= i < len(node):
                raise ValueError(f"{name}: expected {control.label!r} in [0, {len(node)}), got {i}")
            node = node[i]

    def _check(self, node, controls) -> None:
        if not controls:
            if not isinstance(node, Frame):
                raise ValueError(f"frames: expected a Frame, got {type(node).__name__}")
            return
        (first, *rest), n = controls, len(node)
        if n != len(first.values) and not (isinstance(first, Slider) and 0 < n < len(first.values)):
            raise ValueError(f"frames: expected {len(first.values)} for {first.label!r}, got {n}")
        for child in node:
            self._check(child, rest)

    def __repr__(self) -> str:
        return f"Explorable({self.title!r})"

    def _repr_html_(self) -> str:
        pieces: dict[str, int] = {}  # the page gets every distinct piece once

        def encode(node):
            if isinstance(node, Frame):
                return [node.readout, *(pieces.setdefault(p, len(pieces)) for p in node.pieces)]
            return [encode(child) for child in node]

        frames = encode(self.frames)
        labels = [[str(value) for value in control.values] for control in self.controls]
        play = self.play % len(self.controls)
        sent = {"pieces": list(pieces), "frames": frames, "labels": labels, "play": play, "first": self.first()}
        sent["seen"] = self.question.places() if self.question else {}
        data = json.dumps(sent, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("</", r"<\/")  # no string may end the script
        first = functools.reduce(operator.getitem, self.start, self.frames)
        picture = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img"\naria-label="{escape(self.alt)}">'
        return page(
            data,
            title=escape(self.title),
            question=ask(self.question) if self.question else "",
            controls="".join(map(_control, self.controls, self.start)),
            readout=escape(first.readout),
            label="Picture",
            picture=f"{picture}{''.join(first.pieces)}</svg>",
            hint=HINT if any("data-say" in piece for piece in pieces) else "",
            legend=legend(self.legend),
            script=script("pointing.js", "guessing.js", "explorable.js"),
            notice=escape(self.notice),
        )


def _control(control: Choice | Slider, i: int) -> str:
    label, values = escape(control.label), [escape(str(value)) for value in control.values]
    if isinstance(control, Choice):
        options = "".join(f'<option value="{n}"{" selected" * (n == i)}>{x}</option>' for n, x in enumerate(values))
        return f'<label>{label} <select autocomplete="off">{options}</select></label>'
    return (
        f'<label>{label} <b aria-hidden="true">{values[i]}</b> <input type="range" min="0" step="1" '
        f'max="{len(values) - 1}" value="{i}" aria-valuetext="{values[i]}" autocomplete="off"></label>'
    )


HINT = "Point at a part of the picture, touch it, or use the arrow keys there: it says what it is."


def ask(question: Question) -> str:
    """A question with a button for each answer."""
    buttons = []
    for answer, why in question.answers.items():
        said = escape(("Right. " if answer == question.right else "Not so. ") + why)
        right = " data-right" * (answer == question.right)
        buttons.append(f'<button type="button" aria-pressed="false" data-why="{said}"{right}>{escape(answer)}</button>')
    return (
        f'<div class="explorable-question" role="group" aria-label="A guess" hidden><b>Guess first.</b> '
        f'{escape(question.words)}<div class="explorable-answers">{"".join(buttons)}</div>'
        f'<div class="explorable-verdict" aria-live="polite"></div></div>'
    )


def legend(keys: Sequence[Key]) -> str:
    shapes = {
        "tile": '<rect class="{}" x="2" y="1" width="16" height="12"/>',
        "line": '<path class="{}" d="M0 7L20 7"/>',
        "dot": '<circle class="{}" cx="10" cy="7" r="5"/>',
    }
    items = (
        f'<li><svg viewBox="0 0 20 14" aria-hidden="true">{shapes[key.shape].format(key.kind)}</svg>'
        f"{escape(key.words)}</li>"
        for key in keys
    )
    return f'<ul class="explorable-legend">{"".join(items)}</ul>' if keys else ""


_HTML = """<figure class="explorable %kind%" data-size="%size%" id="%ID%">
<style>%style%</style>
<div class="explorable-title">%title%</div>
%question%
<div class="explorable-controls" hidden>%controls%<div class="explorable-buttons"><button type="button">Step</button>
<button type="button">Play</button><button type="button">Reset</button></div>%more%</div>
<div class="explorable-readout" aria-live="polite">%readout%</div>
<div class="explorable-picture" tabindex="0" role="group" aria-label="%label%">%picture%</div>
<div class="explorable-told" aria-live="polite" hidden>%hint%</div>
%legend%
<script>%script%</script>
<figcaption>%notice%</figcaption>
</figure>"""


def page(data: str, **parts: str) -> str:
    """A figure that can be moved, from HTML by the names of its parts, and what its script gets."""
    html = _HTML
    for name, value in {"kind": "", "size": "", "style": "", "more": "", **parts}.items():
        html = html.replace(f"%{name}%", STYLE + value if name == "style" else value)
    name = f"explorable-{hashlib.sha256((html + data).encode()).hexdigest()[:8]}"
    return html.replace("%ID%", name).replace("%DATA%", data)


HERE = Path(__file__).parent


def script(*names: str) -> str:
    """Join files of this folder as one script with names of its own."""
    return "{\n" + "".join((HERE / name).read_text() for name in names) + "}"


COLOURS = "white grey orange pink blue vermilion green sky pale-blue pale-red pale-grey".split()
COLOUR = ".explorable .{0} {{ fill: var(--{0}) }} .explorable .line-{0} {{ stroke: var(--{0}) }}"
#: of all figures that can be moved
STYLE = (HERE / "explorable.css").read_text().replace("%COLOURS%", "\n".join(map(COLOUR.format, COLOURS)))
