"""A state that forgets, row by row: four kinds of gate under the same writes (chapter 9)."""

import math

import torch
from torch import Tensor

from ... import gla
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, path, rect, squares, text

__all__ = ["KINDS", "fading_state", "log_gates", "states", "wanted", "wrong"]

LASTING, TOPICS, FACTS, V = 3, 3, 3, 4  # facts that stay, then topics of three facts each; a fact is a row of V numbers
K, T = LASTING + FACTS, LASTING + TOPICS * FACTS
KINDS = ("none", "a constant, 0.8", "a number per token", "a number per channel")
NAMES = [*["L"] * LASTING, *(topic for topic in "ABC" for _ in range(FACTS))]  # the fact that each token writes

ROWS = [*range(LASTING), *(LASTING + n % FACTS for n in range(TOPICS * FACTS))]  # a key is 1 in one row, else 0
VALUES = torch.randn(T, V, generator=torch.Generator().manual_seed(5)).sign().double()


def log_gates(kind: str) -> Tensor:
    """Log gates `[T, K]`; a gate that depends on the token sees where a topic begins."""
    g, begins = torch.zeros(T, K, dtype=torch.float64), range(LASTING, T, FACTS)
    if kind == "a constant, 0.8":
        g[:] = math.log(0.8)
    elif kind == "a number per token":
        g[begins] = -torch.inf
    elif kind == "a number per channel":
        g[begins, LASTING:] = -torch.inf
    return g


def states(kind: str) -> Tensor:
    """The states before the first token and after each one, `[T + 1, K, V]`, by the recurrence."""
    k, g = torch.eye(K, dtype=torch.float64)[ROWS], log_gates(kind)
    S = [torch.zeros(1, 1, K, V, dtype=torch.float64)]
    for t in range(T):
        now = (x[None, t : t + 1, None] for x in (k, k, VALUES, g))
        S.append(gla.recurrent(*now, initial_state=S[-1])[1])
    return torch.cat(S)[:, 0]


def wanted(t: int) -> Tensor:
    """The right memory after t tokens: the lasting facts, and the facts of the present topic."""
    first = LASTING + (t - 1 - LASTING) // FACTS * FACTS  # the present topic's first token
    S = torch.zeros(K, V, dtype=torch.float64)
    for n in range(t):
        if n < LASTING or n >= first:
            S[ROWS[n]] = VALUES[n]
    return S


def wrong(S: Tensor, t: int) -> tuple[float, float]:
    """Errors of the lasting rows and of the topic's rows, relative to the right rows; NaN if the right rows are 0."""
    right = wanted(t)
    halves = (slice(0, LASTING), slice(LASTING, K))
    return tuple(((S[x] - right[x]).norm() / right[x].norm()).item() for x in halves)


CELL, TOP, GAP = 28, 78, 10
GATES, HELD, RIGHT = 92, 148, 280  # left edges of the gates, of the state and of the right state


def _y(row: int) -> float:
    return TOP + CELL * row + GAP * (row >= LASTING)


def _squares(S: Tensor, left: float) -> list[str]:
    def say(i, j, x):
        return f"Row {i + 1}, column {j + 1}: {x:.2g}".replace("-", "−")

    return squares(S.tolist(), left, [*map(_y, range(K))], CELL, say, largest=TOPICS)


def _ground() -> str:
    pieces = [text(8, 21, "token", "start")]
    heads = ((GATES + 20, "gate"), (HELD + 2 * CELL, "the state, 6 × 4"), (RIGHT + 2 * CELL, "as it should be"))
    pieces += [text(x, TOP - 16, name) for x, name in heads]
    for row, name in ((1, "lasting"), (LASTING + 1, "this topic")):
        pieces.append(text(8, _y(row) + CELL / 2, name, "start"))
    return "".join(pieces)


def _frame(kind: str, t: int, S: Tensor, alpha: Tensor) -> Frame:
    pieces = [_ground()]
    for n, name in enumerate(NAMES):
        look = "orange" if n == t - 1 else "pale-grey" if n < t else "edge"
        pieces.append(cell(58 + 27 * n, 10, 23, 22, look, name, "on" if n < t else ""))
    for row in range(K):
        y = _y(row) + 6
        pieces.append(rect(GATES, y, 40, CELL - 12, "edge"))
        if t and alpha[t - 1, row] > 0:
            pieces.append(rect(GATES, y, 40 * alpha[t - 1, row].item(), CELL - 12, "grey"))
    pieces += _squares(S, HELD) + _squares(wanted(t), RIGHT)
    if not t:
        return Frame(pieces, f"Gate: {kind}. The state is empty. Three lasting facts come, then topics A, B and C.")
    y = _y(ROWS[t - 1])
    pieces.append(
        path([(HELD, y), (HELD + 4 * CELL, y), (HELD + 4 * CELL, y + CELL), (HELD, y + CELL)], "line", closed=True)
    )
    lasting, topical = wrong(S, t)
    about = "a lasting fact" if t <= LASTING else f"topic {NAMES[t - 1]}"
    of_topic = "" if t <= LASTING else f", this topic {topical:.0%}"
    return Frame(
        pieces,
        f"Gate: {kind}. Token {t} writes row {ROWS[t - 1] + 1}, about {about}. "
        f"Errors, relative to the size of the facts: lasting facts {lasting:.0%}{of_topic}.",
    )


def fading_state() -> Explorable:
    """Twelve tokens write to a state of six rows; before each write a gate fades the rows."""
    frames = []
    for kind in KINDS:
        S, alpha = states(kind), log_gates(kind).exp()
        frames.append([_frame(kind, t, S[t], alpha) for t in range(T + 1)])
    return Explorable(
        title="What should a memory forget?",
        notice="A square's area is the size of a number, blue above zero and orange below; a grey bar is the part of a "
        "row that is kept before the write. Without a gate old topics pile up. A constant fades them, and the lasting "
        "facts too. Only a gate with a number for each channel, which looks at the token, clears the old topic and "
        "keeps the lasting facts.",
        alt="A strip of twelve tokens; below, six bars for the gates of six rows, the state as six rows of four "
        "squares, and the same rows as they should be.",
        controls=(Choice("Gate", KINDS), Slider("Tokens read", range(T + 1))),
        frames=frames,
        height=TOP + CELL * K + GAP + 6,
        start=(1, 8),
        legend=(
            Key("orange", "token in turn"),
            Key("pale-grey", "read before"),
            Key("grey", "kept of the row"),
            Key("blue", "above 0"),
            Key("vermilion", "below 0"),
            Key("line", "row written now"),
        ),
        question=Question(
            "Which gate can drop the old topic and keep the lasting facts?",
            "a number per channel",
            {
                "a constant": "It fades everything alike, the lasting facts too.",
                "a number per token": "When it clears the old topic, it clears the lasting facts with it.",
                "a number per channel": "It clears some rows and leaves the others alone.",
            },
            seen={"a constant": (1, T), "a number per token": (2, T), "a number per channel": (3, T)},
            before=(0, 0),
        ),
    )
