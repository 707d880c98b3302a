"""One story for every gate and both ways to write: the right memories at the end, and their models (chapter 18)."""

import torch
from torch import Tensor

from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, number, part, squares, text

__all__ = ["GATES", "K4", "MODELS", "V4", "WRITES", "model_map", "states"]

WRITES = ("adds", "erases first")
#: keys of four tokens with the values V4, a fact for row 2, and three facts for row 1, each newer than the one before
K4 = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]], dtype=torch.float64)
V4 = torch.tensor([[1.0, 2, 3], [4, 0, 1], [0, 1, 0], [2, 2, 2]], dtype=torch.float64)


def _gates() -> dict[str, Tensor]:
    """Each token's factors on the state, `[4, 2, 3]`, for each shape of gate."""
    one = torch.ones(4, 2, 3, dtype=torch.float64)
    token, row, steps = one.clone(), one.clone(), torch.zeros(4, 3, dtype=torch.float64)
    token[2] = 0  # the third token starts anew
    row[2, 0] = 0  # it clears the first row
    column = torch.tensor([1, 0.5, 1], dtype=torch.float64)
    rates = torch.tensor([[1.0, 3, 1], [0, 1, 1]], dtype=torch.float64)
    steps[1, 1] = steps[2, 0] = steps[2, 1] = 1
    return {
        "nothing fades": one,
        "one constant": 0.5 * one,
        "a number per token": token,
        "a number per row": row,
        "rows times columns": row * column,
        "every entry its own": 2 ** -(steps[:, None] * rates),
    }


GATES = _gates()
NONE = "no model of this chapter"
MODELS = {  # a shape of gate -> the model that adds, the model that erases first
    "nothing fades": ("linear attention", "DeltaNet"),
    "one constant": ("RetNet, lightning attention", NONE),
    "a number per token": ("Mamba-2, mLSTM, gated retention", "Gated DeltaNet"),
    "a number per row": ("GLA, HGRN2, RWKV-6, GateLoop, gated slots", "Kimi Delta Attention"),
    "rows times columns": ("decaying fast weights", NONE),
    "every entry its own": ("Mamba", NONE),
}


def states(gate: str, writes: str) -> list[Tensor]:
    """The state `[2, 3]` at first, and for each token the state after fading and the state after the write."""
    S = torch.zeros(2, 3, dtype=torch.float64)
    found = [S]
    for G, k, v in zip(GATES[gate], K4, V4, strict=True):
        S = G * S
        write = v if writes == "adds" else v - k @ S
        found += [S, S + k[:, None] * write]
        S = found[-1]
    return found


CELL, TALL, TOP = 42, 34, 92  # a cell's width and height, the upper edge of the tables
GATE, STATE, RIGHT = 6, 123, 266  # their left edges


def _row(x: Tensor) -> str:
    return "(" + ", ".join(map(number, x.tolist())) + ")"


def _latest(step: int) -> Tensor:
    """The last value that was written to each row."""
    S = torch.zeros(2, 3, dtype=torch.float64)
    for k, v in zip(K4[: step // 2], V4, strict=False):
        S[k.argmax()] = v
    return S


def _cells(left: float, name: str, x: Tensor, kinds: list[list[str]]) -> list[str]:
    pieces = []
    for i in range(2):
        for j in range(3):
            said = number(x[i, j].item())
            shown = cell(left + CELL * j, TOP + TALL * i, CELL, TALL, f"{kinds[i][j]} edge", said)
            pieces.append(part(f"{name}, row {i + 1}, column {j + 1}: {said}", shown))
    return pieces


def _gate(G: Tensor) -> list[str]:
    """The factors that stay, as areas of squares."""

    def say(i, j, x):
        return f"Row {i + 1}, column {j + 1} keeps {number(x)} of its number"

    return squares(G.tolist(), GATE, [TOP, TOP + TALL], TALL, say, rim=6)


def _frame(gate: str, writes: str, step: int, S: Tensor) -> Frame:
    n, fading = (step - 1) // 2, step % 2 == 1
    pieces = [text(GATE + 51, TOP - 14, "the gate"), text(STATE + 63, TOP - 14, "the state")]
    pieces += [text(RIGHT + 63, TOP - 14, "latest values")]
    for t, (k, v) in enumerate(zip(K4, V4, strict=True)):
        kind = "orange" if step and t == n else "pale-grey" if t < n else "edge"
        words = " ".join(number(y) for y in v.tolist()) + f" to row {int(k.argmax()) + 1}"
        x = 4 + 99 * t
        pieces.append(cell(x, 8, 95, 24, kind, words, "on" if step and t <= n else ""))
        pieces.append(text(x + 47.5, 46, f"token {t + 1}"))
    latest = _latest(step)
    kinds = [
        ["pale-blue" if a == b else "pale-red" for a, b in zip(*rows, strict=True)]
        for rows in zip(S, latest, strict=True)
    ]
    pieces += _gate(GATES[gate][max(n, 0)])
    pieces += _cells(STATE, "State", S, kinds) + _cells(RIGHT, "Latest", latest, [["pale-blue"] * 3] * 2)
    who = MODELS[gate][WRITES.index(writes)]
    pieces.append(text(WIDTH / 2, TOP + 2 * TALL + 22, who, "strong"))
    done = f"Token {n + 1} {'fades' if fading else 'writes'}" if step else "Nothing is written yet"
    words = f"{gate.capitalize()}; {writes}. {done}: row 1 is {_row(S[0])}, row 2 is {_row(S[1])}. Here: {who}."
    return Frame(pieces, words)


def model_map() -> Explorable:
    """Four tokens under six shapes of gate, adding or erasing, with the models that do so."""
    return Explorable(
        title="Which memory is right at the end?",
        notice="A blue square is the share that stays. Row 2 should last; row 1 is out of date as soon as a newer "
        "value comes. A gate must know that moment, and fades other entries, too. Erasing needs no such moment and "
        "leaves the others: a write removes the value that its own key finds.",
        alt="Four tokens in a row; below, a token's gate as six squares, the state as a table of two rows and three "
        "columns, and next to it the latest value of each row; at the bottom the models that work like this.",
        controls=(Choice("Fades by", list(GATES)), Choice("Writes", WRITES), Slider("Step", range(2 * len(K4) + 1))),
        frames=[
            [[_frame(gate, writes, n, S) for n, S in enumerate(states(gate, writes))] for writes in WRITES]
            for gate in GATES
        ],
        height=TOP + 2 * TALL + 36,
        start=(3, 0, 7),
        legend=(
            Key("orange", "token at work"),
            Key("pale-grey", "tokens before"),
            Key("blue", "share that stays"),
            Key("pale-blue", "as it should be"),
            Key("pale-red", "not as it should be"),
        ),
        question=Question(
            "A number per row clears row 1 at token 3 only, and the memory adds. What is in row 1 after token 4?",
            "tokens 3 and 4",
            {
                "token 4": "That needs a memory that erases first. This memory adds, and token 4 came without a reset.",
                "tokens 3 and 4": "Token 3 cleared the row before it wrote. Token 4 did not, so it was added.",
                "tokens 1, 3 and 4": "That is the sum without any gate. Token 3 cleared the row before it wrote.",
            },
            seen={"token 4": (3, 1, 8), "tokens 3 and 4": (3, 0, 8), "tokens 1, 3 and 4": (0, 0, 8)},
        ),
    )
