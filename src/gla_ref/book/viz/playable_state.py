"""A state to play with: write tokens, drag gates, read (the front page, chapters 5, 9 and 11)."""

import json
import math
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from ... import gla
from ._explorable import HERE, HINT, Key, Question, ask, legend, page, script
from ._svg import number

__all__ = ["KINDS", "Playable", "playable_state"]

#: kinds of gates, and their names on the page
KINDS = {"none": "none", "constant": "one constant", "scalar": "one number per token", "vector": "one number per row"}

# the four tokens of chapter 5
TOKENS = [
    dict(k=[1, 0], v=[1, 2, 3], q=[1, 0]),
    dict(k=[0, 1], v=[4, 0, 1], q=[1, 1]),
    dict(k=[1, 1], v=[0, 1, 0], q=[0, 2]),
    dict(k=[1, 0], v=[2, 2, 2], q=[2, -3]),
]

# the front page: people and the things they like; Adam's key resembles Ada's
NAMES = {"Ada": [1, 0, 0], "Bob": [0, 1, 0], "Adam": [0.8, 0, 0.6]}
LIKES = {"tea": [1, 0, 0], "rain": [0, 1, 0], "jazz": [0, 0, 1]}
FACTS = [
    dict(name=f"{name} likes {what}", k=k, v=v)
    for (name, k), (what, v) in zip(NAMES.items(), LIKES.items(), strict=True)
]
ASKED = [dict(name=f"Asked about {name}", q=k) for name, k in NAMES.items()]
STORY = [FACTS[0], FACTS[1], ASKED[0], FACTS[2], ASKED[0]]

CONSTANT = 0.8
#: each token's gates at the start of a figure: on the front page all rows fade, or Ada's row at Adam's token; the other
#: sizes have the gates that chapters 9 and 11 work by hand, and one number per token instead of them
GATES = {
    "small": {"scalar": [[1] * 3] * 3 + [[0.5] * 3, [1] * 3], "vector": [[1] * 3] * 3 + [[0.25, 1, 1], [1] * 3]},
    "tokens": {"scalar": [[1, 1], [0.5, 0.5], [0.5, 0.5], [0, 0]], "vector": [[1, 1], [0.5, 1], [1, 0.5], [0, 1]]},
    "chunks": {"scalar": [[1, 1], [0.5, 0.5], [0.5, 0.5], [0, 0]], "vector": [[1, 1], [0.5, 1], [1, 0.5], [0.5, 0.25]]},
}


@dataclass(repr=False)
class Playable:
    """A figure that the page computes (`recurrence.js`), in one piece of HTML; without JavaScript, its first state.

    Args:
        size: "small", "tokens" or "chunks".
        kind: the gates at the start.
    """

    size: str
    kind: str

    def __repr__(self) -> str:
        return f"Playable({self.size!r}, {self.kind!r})"

    def _repr_html_(self) -> str:
        data = json.dumps(self.data(), ensure_ascii=False, separators=(",", ":"))
        return page(
            data,
            title=_TITLES[self.size],
            question=ask(self.question()),
            controls=self._controls(),
            readout=escape(self._first()["words"]),
            label=_ALT[self.size],
            picture=self._board(),
            hint=HINT,
            legend=legend(_LEGEND),
            script=script("recurrence.js", "pointing.js", "guessing.js", "playable_state.js"),
            notice=_NOTICES[self.size],
            kind="playable",
            size=self.size,
            style=(HERE / "playable_state.css").read_text(),
            more=self._tokens(),
        )

    def question(self) -> Question:
        """The question: without gates, the result of a write; with gates, the rows that fade."""
        gated = self.size == "tokens" and self.kind != "none"
        return _QUESTIONS["gates" if gated else self.size]

    # -- numbers -----------------------------------------------------------------------------------

    def data(self) -> dict:
        """The data for the page's script."""
        tape = STORY if self.size == "small" else TOKENS
        K, V = (3, 3) if self.size == "small" else (2, 3)
        gates = {"none": [[1] * K] * len(tape), "constant": [[CONSTANT] * K] * len(tape)} | GATES[self.size]
        given = dict(K=K, V=V, tape=tape, gates=gates, kind=self.kind, seen=self.question().seen)
        if self.size == "small":
            given |= dict(offered=FACTS + ASKED, columns=list(LIKES), most=1.5)
        else:
            given |= dict(most=6)
        return given | (dict(C=2) if self.size == "chunks" else {})

    def _first(self) -> dict:
        """The cells and readout on paper, after some tokens, from the recurrence; the script begins earlier."""
        given = self.data()
        if self.size == "small":  # two facts are written
            k, v = (torch.tensor([fact[x] for fact in FACTS[:2]], dtype=torch.float64) for x in "kv")
            S = _run(k, k, v, torch.ones_like(k))[1]
            words = "Bob likes rain. Write: the key adds 1 × the value to row 2."
            return dict(S=S, k=k[1], v=v[1], words=words)
        q, k, v = (torch.tensor([token[x] for token in TOKENS[:2]], dtype=torch.float64) for x in "qkv")
        o, S = _run(q, k, v, torch.tensor(given["gates"][self.kind][:2], dtype=torch.float64))
        if self.size == "tokens":
            said = ", ".join(number(x) for x in o[1].tolist())
            words = f"Token 2. Read: the query adds up the rows, out comes ({said})."
            return dict(S=S, k=k[1], v=v[1], q=q[1], o=o[1], words=words)
        alpha = torch.tensor(given["gates"][self.kind], dtype=torch.float64)
        scores = torch.full((4, 4), math.nan, dtype=torch.float64)
        scores[0, 0], scores[1, 1], scores[1, 0] = q[0] @ k[0], q[1] @ k[1], q[1] @ (alpha[1] * k[0])
        every = {x: torch.tensor([token[x] for token in TOKENS], dtype=torch.float64) for x in "qkv"}
        shown = torch.cat([o, torch.full((2, 3), math.nan)])
        said = ", ".join("(" + ", ".join(map(number, row)) + ")" for row in o.tolist())
        words = f"Scores times values are added: the outputs {said}."
        return dict(every, S=torch.zeros_like(S), P=scores, o=shown, words=words)

    # -- the page ------------------------------------------------------------------------------------

    def _controls(self) -> str:
        options = "".join(
            f'<option value="{kind}"{" selected" * (kind == self.kind)}>{name}</option>' for kind, name in KINDS.items()
        )
        html = f'<label>Gate <select autocomplete="off">{options}</select></label>'
        if self.size == "chunks":
            lengths = "".join(f"<option{' selected' * (C == 2)}>{C}</option>" for C in (1, 2, 4))
            html += f'<label>Chunk length C <select autocomplete="off">{lengths}</select></label>'
        return html

    def _tokens(self) -> str:
        """Buttons to write and to ask with."""
        html = ""
        if self.size == "small":
            for what, tokens, first in (("Write", FACTS, 0), ("Ask about", ASKED, len(FACTS))):
                buttons = "".join(
                    f'<button type="button" data-token="{n}">{token["name"].replace("Asked about ", "")}</button>'
                    for n, token in enumerate(tokens, first)
                )
                html += f'<div class="playable-writes" role="group" aria-label="{what}">{what}: {buttons}</div>'
        return html

    def _board(self) -> str:
        given, first = self.data(), self._first()
        K, V, T = given["K"], given["V"], len(given["tape"])
        if self.size == "chunks":
            places = [("gate α", "g", T, K), ("query q", "q", T, K), ("key k", "k", T, K), ("value v", "v", T, V)]
            places += [("scores P", "P", T, T), ("output o", "o", T, V), ("state S", "S", K, V)]
            return (
                '<div class="playable-board playable-chunks">'
                + "".join(
                    _matrix(label, name, rows, columns, "", first, given, self.kind)
                    for label, name, rows, columns in places
                )
                + "</div>"
            )
        small = self.size == "small"  # the front page has words, because its readers do not know the letters yet
        words = "".join(f"<span>{word}</span>" for word in LIKES) if small else ""
        html = '<div class="playable-board playable-tokens">'
        if not small:
            html += f'<span class="playable-token" style="grid-area:t">token 2 of {T}</span>'
        for label, name, rows, columns, area in (
            ("value v", "v", 0, V, "v"), ("gate α", "g", K, 1, "g"), ("key k", "k", K, 0, "k"),
            ("state S", "S", K, V, "s"), ("query q", "q", K, 0, "q"), ("output o", "o", 0, V, "o"),
        ):  # fmt: skip
            above = f'<div class="playable-words" style="--columns:{V}">{words}</div>' if small and name == "v" else ""
            label = label.split()[0] if small else label
            html += _matrix(label, name, rows, columns, above, first, given, self.kind, area, typed=not small)
        return html + "</div>"


def _run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """One head by the package's recurrence, at scale 1."""
    o, S = gla.recurrent(*(x[None, :, None] for x in (q, k, v, alpha.log())), scale=1.0)
    return o[0, :, 0], S[0, 0]


def _matrix(label, name, rows, columns, above, first, given, kind, area="", typed=False) -> str:
    """A labelled matrix of cells; a vector has 0 rows or 0 columns. A matrix without an area belongs to the chunks."""
    cells = []
    for i in range(rows or 1):
        for j in range(columns or 1):
            at = f"{i}.{j}" if rows and columns else str(i if rows else j)
            row = f"{'row' if area or name == 'S' else 'token'} {i + 1}" if rows else ""
            where = ", ".join(filter(None, (label, row, f"column {j + 1}" if columns else "")))
            if name == "g":
                at, token, channel = (str(i), 1, i) if area else (at, i, j)
                where = f"gate of {row}" if area else where
                cells.append(_gate(at, where, given["gates"][kind][token][channel]))
                continue
            value = first.get(name)
            if value is not None:
                value = (value[i, j] if rows and columns else value[i if rows else j]).item()
                value = None if math.isnan(value) else value
            if typed and name in "kvq":
                cells.append(
                    f'<input type="number" step="0.5" value="{value:g}" data-number="{name}.{at}" aria-label="{where}" '
                    'autocomplete="off" disabled>'
                )
                continue
            size = min(1, abs(value or 0) / given["most"])
            cells.append(
                f'<span class="playable-cell" data-cell="{name}.{at}" data-name="{where}" data-sign="{_sign(value)}" '
                f'style="--size: {size:.3g}; --column: {j};"><span>{"" if value is None else number(value)}</span>'
                "<small></small></span>"
            )
    place = f' style="grid-area:{area}"' if area else ""
    return (
        f'<div class="playable-matrix"{place}><b>{label}</b>{above}'
        f'<div style="--columns:{columns or 1}">{"".join(cells)}</div></div>'
    )


def _gate(at: str, where: str, alpha: float) -> str:
    return (
        f'<label class="playable-gate"><input type="range" min="0" max="1" step="0.05" value="{alpha:g}" '
        f'data-gate="{at}" aria-label="{where}" autocomplete="off" disabled><span>{number(alpha)}</span></label>'
    )


def _sign(value: float | None) -> int:
    return 0 if not value else 1 if value > 0 else -1


_TITLES = {
    "small": "A memory of nine numbers",
    "tokens": "A state to play with",
    "chunks": "The same four tokens, chunk by chunk",
}
# a question's `seen` is the kind of gates and the number of the step that shows the answer
_QUESTIONS = {
    "small": Question(
        "Ada likes tea, Adam likes jazz, and his key resembles hers. Once both are written, what comes out when we ask "
        "about Ada?",
        "a blend",
        {
            "tea": "Only if no other key shared a row with hers. Adam’s does.",
            "a blend": "Tea, and four fifths of jazz: the keys share a row, so the answers mix.",
            "jazz": "Nothing is replaced, only added: tea is still there.",
        },
        ("none", 5),
    ),
    "tokens": Question(
        "Token 4 has the key of token 1. Without a gate, what will be in its row after the write?",
        "the sum of both values",
        {
            "its own value": "That takes a gate that clears the row first. Without one a write only adds.",
            "the sum of both values": "A write adds and replaces nothing (and token 3 has left its value there, too).",
            "the first value": "The row is not protected: every write with this key adds to it.",
        },
        ("none", 7),
    ),
    "gates": Question(
        "Now take one number per token, for both rows. The gate of token 4 is 0, so that row 1 is free for its value. "
        "What becomes of row 2?",
        "cleared, too",
        {
            "unchanged": "That takes a gate for each row. One number fades all rows alike.",
            "half as large": "That is what the gate of token 3 does. The gate of token 4 is 0, for both rows.",
            "cleared, too": "One number fades all rows alike. With one number per row, row 2 stays.",
        },
        ("scalar", 9),
    ),
    "chunks": Question(
        "Chunks of 1, of 2, or all four tokens in one: do the outputs change?",
        "no",
        {
            "yes": "Try it: only the way changes. Whatever the state does not bring, the scores do.",
            "no": "A pair meets through the state or through a score, with the same decay.",
        },
        ("vector", 8),
    ),
}
_ALT = {
    "small": "A state of three rows and three columns with its gate and key at the left, the value above, the query at "
    "the right and the output below",
    "tokens": "A state of two rows and three columns with its gate and key at the left, the value above, the query at "
    "the right and the output below",
    "chunks": "Gates, queries, keys, values, scores and outputs of four tokens, and the state",
}
_NOTICES = {
    "small": "A key says into which rows a value goes, and how much of it. A query with the same numbers gets the "
    "value back. Keys that share a row share their answers, and a gate lets old rows fade before each write. "
    "The sliders are the gate of the last write.",
    "tokens": "Every number can be changed: type into key, value and query, drag the gates. A constant is the same "
    "for all tokens, a number per token for all rows.",
    "chunks": "Inside a chunk the state does not change. A chunk of 1 is the recurrence, one chunk for all is the "
    "parallel form. Drag the gates: both parts fade together.",
}
_LEGEND = (
    Key("line-orange", "made in this step"),
    Key("line-sky", "read"),
    Key("line-grey", "fades"),
    Key("blue faint", "above 0"),
    Key("vermilion faint", "below 0"),
)


def playable_state(size: str = "tokens", *, gate: str = "none") -> Playable:
    """The state of one head of gated linear attention, to write to and to read from.

    Args:
        size: "small", with facts to write; "tokens", the four tokens of chapter 5; "chunks", the same by chunks.
        gate: the kind of gates at the start, one of `KINDS`.
    """
    return Playable(size, gate)
