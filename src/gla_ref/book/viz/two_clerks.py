"""Ada's row and today's row under four rules: which memory can fade the one and replace the other (chapter 24)."""

import torch
from torch import Tensor

from ... import gla, kda
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, number, squares, text

__all__ = ["GATES", "RULES", "states", "steps", "two_clerks", "wanted"]

#: Whether each rule erases, and the rows that its gate fades.
RULES = {
    "GLA": (False, (0.0, 1.0)),
    "delta rule": (True, (0.0, 0.0)),
    "gated delta rule": (True, (1.0, 1.0)),
    "Kimi Delta Attention": (True, (0.0, 1.0)),
}
GATES = (1.0, 0.5, 0.1, 0.01)  # at night
WHO, WHAT = ("Ada", "today"), ("tea", "rain", "jazz")
STORY = (("Ada", "tea"), ("today", "rain"), ("Ada", "jazz"), None, None)  # None: a night, when gates close


def steps() -> list[tuple[int, str]]:
    """What happens, one after the other: the line of the story, and erase, write or fade."""
    return [(n, what) for n, line in enumerate(STORY) for what in (("erase", "write") if line else ("fade",))]


def wanted(n: int) -> Tensor:
    """The right table `[2, 3]` after n lines: the last fact about Ada, and today's until the first night."""
    S = torch.zeros(2, 3, dtype=torch.float64)
    for who, what in filter(None, STORY[:n]):
        S[WHO.index(who)] = torch.eye(3, dtype=torch.float64)[WHAT.index(what)]
    return S if None not in STORY[:n] else S * torch.tensor([[1.0], [0.0]], dtype=torch.float64)


def states(rule: str, gate: float) -> list[Tensor]:
    """The table `[2, 3]` at first and after each of :func:`steps`."""
    erases, rows = RULES[rule]
    S = torch.zeros(1, 1, 2, 3, dtype=torch.float64)
    faded = torch.tensor(rows, dtype=torch.float64)[None, None, None] * torch.tensor(gate, dtype=torch.float64).log()
    found, one = [S], torch.ones(1, 1, 1, dtype=torch.float64)
    for n, what in steps():
        who, fact = STORY[n] or ("Ada", "tea")
        k = torch.eye(2, dtype=torch.float64)[WHO.index(who)][None, None, None]
        v = torch.eye(3, dtype=torch.float64)[WHAT.index(fact)][None, None, None]
        if what == "fade":
            S = kda.recurrent(k, k, v, faded, 0 * one, initial_state=S)[1]
        elif what == "erase" and erases:  # to erase is to write 0
            S = kda.recurrent(k, k, 0 * v, 0 * faded, one, initial_state=S)[1]
        elif what == "write":
            S = gla.recurrent(k, k, v, 0 * faded, initial_state=S)[1]
        found.append(S)
    return [x[0, 0] for x in found]


CELL, LEFT, RIGHT, TOP = 40, 78, 262, 88  # a cell's side; left edges of the table and of the right one; their top


def _table(x: Tensor, left: float, words: str) -> list[str]:
    def say(i, j, n):
        return f"{words} {WHO[i]}, {WHAT[j]}: {number(n)}"

    return squares(x.tolist(), left, [TOP, TOP + CELL], CELL, say, rim=3)


def _frame(rule: str, gate: float, done: int, S: Tensor) -> Frame:
    n, now = steps()[done - 1] if done else (-1, "")
    pieces = []
    for i, said in enumerate(STORY):
        kind = "orange" if i == n else "pale-grey" if i < n else "edge"
        pieces.append(cell(6 + 78 * i, 8, 76, 24, kind, ": ".join(said or ("night",)), "on" if i <= n else ""))
    pieces += [text(left + 1.5 * CELL, TOP - 28, name) for left, name in ((LEFT, "the table"), (RIGHT, "should be"))]
    pieces += [text(left + CELL * (j + 0.5), TOP - 10, what) for left in (LEFT, RIGHT) for j, what in enumerate(WHAT)]
    pieces += [text(LEFT - 8, TOP + CELL * (i + 0.5), who, "end") for i, who in enumerate(WHO)]
    right = wanted(n + (now == "write" or STORY[n] is None))
    pieces += _table(S, LEFT, "The table says") + _table(right, RIGHT, "It should say")
    if not done:
        words = "The table is empty."
    else:
        rows = "; ".join(f"{who} ({', '.join(map(number, x))})" for who, x in zip(WHO, S.tolist(), strict=True))
        erased = {"erase": "erase" if RULES[rule][0] else "erase: this rule cannot"}.get(now, now)
        line, off = ": ".join(STORY[n] or ("Night",)), number((S - right).norm().item())
        words = f"{line}, {erased}. {rows}. Off by {off}."
    return Frame(pieces, f"{rule}, gate {gate:g}. {words}")


def two_clerks() -> Explorable:
    """Five lines of a story under a rule and a gate: erase, write; at night, fade."""
    frames = [
        [[_frame(rule, gate, n, S) for n, S in enumerate(states(rule, gate))] for gate in GATES] for rule in RULES
    ]
    last = len(steps())
    return Explorable(
        title="Fade one row, replace an entry of the other",
        notice="By day a line of the story erases its row, if the rule can, and writes. At night the gate closes: on "
        "today's row alone or, with the gated delta rule, on the whole table.",
        alt="Five lines of a story; below, a table of two rows, Ada and today, and three columns, beside the table as "
        "it should be. A square's area is the size of a number.",
        controls=(Choice("Rule", list(RULES)), Slider("Gate at night", GATES), Slider("Step", range(last + 1))),
        frames=frames,
        height=TOP + 2 * CELL + 10,
        start=(0, 2, last - 1),
        legend=(Key("orange", "happens now"), Key("pale-grey", "happened before"), Key("blue", "above 0")),
        question=Question(
            "Ada's tea must give way to jazz at once, and rain must be gone after the nights. "
            "Which rule manages both with one setting of the gate?",
            "Kimi Delta Attention",
            {
                "GLA": "The rain is gone, but tea and jazz lie on top of each other.",
                "gated delta rule": "The tea was replaced, and then the gate that took the rain took the jazz as well.",
                "Kimi Delta Attention": "The gate is on today's row alone, and Ada's old entry is erased.",
            },
            seen={"GLA": (0, 2, last), "gated delta rule": (2, 2, last), "Kimi Delta Attention": (3, 2, last)},
            before=(0, 2, 0),
        ),
    )
