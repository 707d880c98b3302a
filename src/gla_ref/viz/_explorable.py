"""The one class of all explorables: its HTML, style and script (chapter 2)."""

import functools
import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

__all__ = ["WIDTH", "Choice", "Explorable", "Frame", "Slider"]

#: units across a picture; text of 13 units is then legible on a phone
WIDTH = 400


class Choice(NamedTuple):
    """A list to choose from."""

    label: str
    values: Sequence[object]


class Slider(NamedTuple):
    """A range to slide along; where there are fewer frames than values it ends earlier."""

    label: str
    values: Sequence[object]


class Frame(NamedTuple):
    """One state of the picture."""

    pieces: Sequence[str]  # SVG, drawn in this order
    readout: str  # what it shows, in words and numbers


@dataclass(repr=False)
class Explorable:
    """A picture with controls, in one piece of HTML for the site, Jupyter and Colab; it needs no network.

    Without JavaScript, on paper and in the PDF it is the picture of `start`, which Python drew.

    Args:
        title: a few words above the picture.
        notice: what to notice, a sentence or two under it.
        alt: what the picture shows in general, for those who do not see it.
        controls: a :class:`Choice` or :class:`Slider` each.
        frames: lists nested as deep as there are controls, the first control outermost, with a
            :class:`Frame` for every combination; a slider's list may be shorter than its values.
        height: units, where the picture is `WIDTH` units wide.
        start: the index of each control's first value.

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

    def __post_init__(self) -> None:
        if len(self.start) != len(self.controls):
            raise ValueError(f"start: expected {len(self.controls)} indices, got {self.start!r}")
        self._check(self.frames, self.controls)
        node = self.frames
        for control, i in zip(self.controls, self.start, strict=True):
            if not 0 <= i < len(node):
                raise ValueError(f"start: expected {control.label!r} in [0, {len(node)}), got {i}")
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
        pieces: dict[str, int] = {}  # every distinct piece is sent once

        def encode(node):
            if isinstance(node, Frame):
                return [node.readout, *(pieces.setdefault(p, len(pieces)) for p in node.pieces)]
            return [encode(child) for child in node]

        frames = encode(self.frames)
        labels = [[str(value) for value in control.values] for control in self.controls]
        sent = {"pieces": list(pieces), "frames": frames, "labels": labels}
        data = json.dumps(sent, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("</", r"<\/")  # a string must not end the script
        first = functools.reduce(operator.getitem, self.start, self.frames)
        parts = {
            "STYLE": _STYLE,
            "SCRIPT": _SCRIPT,
            "ID": "explorable-" + hashlib.sha256((self.title + data).encode()).hexdigest()[:8],
            "TITLE": escape(self.title),
            "NOTICE": escape(self.notice),
            "ALT": escape(self.alt),
            "CONTROLS": "".join(map(_control, self.controls, self.start)),
            "SIZE": f"{WIDTH} {self.height}",
            "PICTURE": "".join(first.pieces),
            "READOUT": escape(first.readout),
            "DATA": data,
        }
        html = _HTML
        for name, value in parts.items():
            html = html.replace(f"%{name}%", value)
        return html


def _control(control: Choice | Slider, i: int) -> str:
    label, values = escape(control.label), [escape(str(value)) for value in control.values]
    if isinstance(control, Choice):
        options = "".join(
            f'<option value="{n}"{" selected" * (n == i)}>{value}</option>' for n, value in enumerate(values)
        )
        return f'<label>{label} <select autocomplete="off">{options}</select></label>'
    return (
        f'<label>{label} <b aria-hidden="true">{values[i]}</b> <input type="range" min="0" step="1" '
        f'max="{len(values) - 1}" value="{i}" aria-valuetext="{values[i]}" autocomplete="off"></label>'
    )


_HTML = """<figure class="explorable" id="%ID%">
<style>%STYLE%</style>
<div class="explorable-title">%TITLE%</div>
<div class="explorable-controls" hidden>%CONTROLS%</div>
<div class="explorable-picture"><svg viewBox="0 0 %SIZE%" role="img" aria-label="%ALT%">%PICTURE%</svg></div>
<div class="explorable-readout" aria-live="polite">%READOUT%</div>
<script>%SCRIPT%</script>
<figcaption>%NOTICE%</figcaption>
</figure>"""

# The same for every explorable: find the frame that the controls point at, and show it.
_SCRIPT = """(() => {
const {pieces, frames, labels} = %DATA%;
for (const root of document.querySelectorAll("#%ID%:not([data-live])")) {
  const controls = [...root.querySelectorAll("input, select")];
  const draw = () => {
    let node = frames;
    controls.forEach((control, n) => {
      if (control.type === "range") {
        control.max = node.length - 1;
        const label = labels[n][control.value];
        control.setAttribute("aria-valuetext", label);
        control.parentNode.querySelector("b").textContent = label;
      }
      node = node[control.value];
    });
    const [readout, ...shown] = node;
    root.querySelector("svg").innerHTML = shown.map(i => pieces[i]).join("");
    root.querySelector(".explorable-readout").textContent = readout;
  };
  root.dataset.live = "";
  root.querySelector(".explorable-controls").hidden = false;
  root.addEventListener("input", draw);
  draw();
}
})();"""

# Light values, then the same names for the dark themes of the book, JupyterLab, Colab and VS Code.
# The tiles' colours are light enough for dark text in both; everything else is the page's own ink.
_STYLE = """
.explorable { --ink: #1b1b1b; --grey: #8c96a3; --orange: #e69f00; --pink: #cc79a7; --blue: #0072b2;
  --vermilion: #d55e00; --green: #009e73; --sky: #56b4e9; --pale-blue: #a6cee8; --pale-red: #f2a6a0;
  --pale-grey: #d5dae0; --white: #fff; max-width: 34rem; margin: 1rem auto; color: inherit; text-align: left }
:is(html[data-theme=dark], [data-jp-theme-light=false], html[theme=dark], .vscode-dark) .explorable {
  --grey: #a3adba; --pink: #dd94bc; --blue: #4aa3df; --vermilion: #ff8a3d; --green: #2cc295; --white: #e8eaed }
.explorable-title { font-weight: 600 }
.explorable-controls:not([hidden]) { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; margin: .5rem 0 }
.explorable-controls label { flex: 1 1 auto; display: flex; flex-wrap: wrap; align-items: center;
  gap: .25rem .5rem; margin: 0 }
.explorable-controls input { flex: 1 1 8rem; min-width: 8rem; min-height: 1.75rem; margin: 0;
  accent-color: var(--blue); cursor: pointer }
.explorable-controls select { font: inherit; padding: .15rem .3rem; cursor: pointer }
.explorable-controls b { min-width: 1.5em }
.explorable :is(b, text, .explorable-readout) { font-variant-numeric: tabular-nums }
.explorable svg { display: block; width: 100%; height: auto; font-size: 13px }
.explorable text { fill: currentColor; text-anchor: middle; dominant-baseline: central }
.explorable text.start { text-anchor: start } .explorable text.end { text-anchor: end }
.explorable text.on { fill: var(--ink) } .explorable text.strong { font-weight: 700 }
.explorable :is(rect, circle, path) { fill: none; stroke: none }
.explorable .edge { stroke: currentColor; stroke-width: .8 }
.explorable [class*=line] { stroke-width: 2; stroke-linejoin: round }
.explorable .line { stroke: currentColor; stroke-width: 1.2 } .explorable .dashed { stroke-dasharray: 4 3 }
.explorable .ink { fill: var(--ink) } .explorable .hollow { stroke: var(--ink) }
.explorable .faint { opacity: .45 } .explorable text.faint { opacity: .75 }
%COLOURS%
.explorable-readout { margin: .35rem 0; min-height: 3em; line-height: 1.5 }
@media (max-width: 32rem) { .explorable-readout { min-height: 4.5em } }
figure.explorable > figcaption { margin: 0; padding: 0; max-width: none; font-size: .9em }
@media print { .explorable { break-inside: avoid } .explorable-controls:not([hidden]) { display: none } }
""".replace(
    "%COLOURS%",
    "\n".join(
        f".explorable .{name} {{ fill: var(--{name}) }} .explorable .line-{name} {{ stroke: var(--{name}) }}"
        for name in "white grey orange pink blue vermilion green sky pale-blue pale-red pale-grey".split()
    ),
)
