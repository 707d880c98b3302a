"""The walks back: the tiles that a gradient needs, and the chunks in the two states meanwhile (chapter 8)."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import part, rect, text
from .kernel_walk import LEFT, LOADED, STORED, counter

__all__ = ["WAYS", "Step", "walk_back", "walks"]

N, C, K, V = (6, 8, 8, 8)  # one head: chunks, tokens a chunk
WAYS = ("one walk", "two passes", "three walks")


class Step(NamedTuple):
    """One chunk in one walk."""

    n: int  # the chunk, from 0
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    S: tuple[int, ...] | None  # chunks whose writes are in S when the step reads S; None without S
    R: tuple[int, ...] | None  # chunks whose reads are in R


def walks(
    way: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, S_last: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Step]]:
    """dq, dk and dv of o = tril(q k^T) v, for q, k `[N C, K]` and v, do `[N C, V]`, and the steps that made them."""
    dq, dk, dv, steps = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), []

    def chunk(n, makes, S=None, R=None):
        rows = slice(n * C, (n + 1) * C)
        q_n, k_n, v_n, do_n = (x[rows] for x in (q, k, v, do))
        loads = {"dq": ("k", "v", "do"), "dk": ("q", "v", "do"), "dv": ("q", "k", "do")}
        if "dq" in makes:
            dq[rows] = do_n @ S.T + (do_n @ v_n.T).tril() @ k_n
        if "dk" in makes:
            dk[rows] = v_n @ R.T + (v_n @ do_n.T).triu() @ q_n
        if "dv" in makes:
            dv[rows] = k_n @ R + (k_n @ q_n.T).triu() @ do_n
        needed = tuple(x for x in ("q", "k", "v", "do") if any(x in loads[made] for made in makes))
        past, future = tuple(range(n)), tuple(range(n + 1, N))
        steps.append(Step(n, needed, makes, None if S is None else past, None if R is None else future))
        return k_n.T @ v_n, q_n.T @ do_n  # the chunk's writes to S, and to R

    backwards = range(N - 1, -1, -1)
    if way == "one walk":
        S, R = S_last, torch.zeros_like(S_last)
        for n in backwards:
            rows = slice(n * C, (n + 1) * C)
            S = S - k[rows].T @ v[rows]
            R = R + chunk(n, ("dq", "dk", "dv"), S, R)[1]
        return dq, dk, dv, steps
    S = torch.zeros_like(S_last)
    for n in range(N):
        S = S + chunk(n, ("dq",), S=S)[0]
    for makes in (("dk", "dv"),) if way == "two passes" else (("dk",), ("dv",)):
        R = torch.zeros_like(S_last)
        for n in backwards:
            R = R + chunk(n, makes, R=R)[1]
    return dq, dk, dv, steps


PITCH = 50
ROWS = {name: 24 + 25 * i for i, name in enumerate(("q", "k", "v", "do", "dq", "dk", "dv"))}
STATES = {"S": 230, "R": 257}
BARS = 294
HELD = "pink"


def _frame(steps: list[Step], done: int) -> Frame:
    now = steps[done - 1] if done else None
    loads = Counter((x, s.n) for s in steps[:done] for x in s.loads)
    stored = {(x, s.n) for s in steps[:done] for x in s.stores}
    pieces = [text(LEFT, 10, "in memory, a tile for each chunk", "start strong")]
    for name, y in ROWS.items():
        pieces.append(text(20, y + 10, name))
        for n in range(N):
            moving = now and n == now.n
            kind = "pale-grey" if len(name) == 1 or name == "do" or (name, n) in stored else "edge"
            kind = LOADED if moving and name in now.loads else STORED if moving and name in now.stores else kind
            tile = [rect(LEFT + PITCH * n, y, PITCH - 4, 20, kind)]
            if loads[name, n]:
                tile.append(text(LEFT + PITCH * n + 23, y + 10, loads[name, n], "on"))
            pieces.append(part(f"{name} of chunk {n + 1}: {C} tokens.", *tile))
    pieces.append(text(LEFT, 214, "on the chip, and whose chunks are in it", "start strong"))
    for name, y in STATES.items():
        held = getattr(now, name) if now else None
        pieces.append(text(20, y + 10, name))
        for n in range(N):
            kind = "edge faint" if held is None or n not in held else HELD
            did, there = "wrote" if name == "S" else "asked for", "" if kind == HELD else "not "
            words = f"What chunk {n + 1} {did}, {there}in {name}."
            pieces.append(part(words, rect(LEFT + PITCH * n, y, PITCH - 4, 20, kind)))
    for name, y, tiles, least, kind in (
        ("loaded", BARS, sum(loads.values()), 4, LOADED),
        ("stored", BARS + 24, len(stored), 3, STORED),
    ):
        pieces += counter(y, name, 22 * tiles / N, 22 * least, kind, f"{tiles / N:.1f} tensors")
    return Frame(pieces, _words(steps, done))


def _words(steps: list[Step], done: int) -> str:
    if not done:
        return f"Before the first of {len(steps)} steps. The forward pass has left q, k, v and the last state."
    now = steps[done - 1]
    made, n = " and ".join(now.stores[-2:]), now.n + 1
    if now.S is not None and now.R is not None:
        words = f"Chunk {n} is taken out of S. dq reads S, dk and dv read R, and chunk {n} goes into R."
    elif now.S is not None:
        words = f"Forwards, chunk {n}: {made} reads S, what earlier chunks wrote. Then chunk {n} goes into S."
    else:
        read = "read" if len(now.stores) > 1 else "reads"
        words = f"Backwards, chunk {n}: {made} {read} R, what later chunks asked. Then chunk {n} goes into R."
    if done == len(steps):
        words += f" All in all {sum(len(s.loads + s.stores) for s in steps) / N:g} tensors moved."
    return words


def walk_back() -> Explorable:
    """The gradients of one head of linear attention, chunk by chunk: by one walk, two passes or three walks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(N * C, D, generator=generator, dtype=torch.float32) for D in (K, K, V, V))
    every = [walks(way, q, k, v, do, k.T @ v)[3] for way in WAYS]
    return Explorable(
        title="The way back",
        notice="A number in a tile says how often it was loaded; the vermilion marks are the least that can be moved. "
        "S has what the past wrote, R what the future asked. Three walks need one of them at a time, one walk needs "
        "both: it starts with the last S and takes chunk after chunk out of it.",
        alt="Tiles of q, k, v, do and their gradients in memory, two rows that show which chunks are in the states S "
        "and R, and two bars for what was loaded and stored.",
        controls=(Choice("Way", WAYS), Slider("Step", range(max(map(len, every)) + 1))),
        frames=[[_frame(steps, done) for done in range(len(steps) + 1)] for steps in every],
        height=BARS + 46,
        start=(0, 3),
        legend=(
            Key(LOADED, "loaded now"),
            Key(STORED, "stored now"),
            Key("pale-grey", "in memory"),
            Key("edge", "not made yet, or not in it"),
            Key(HELD, "in the state"),
            Key("vermilion", "the least that must move"),
        ),
        question=Question(
            "Four tensors must come in, three gradients go out. Which way moves no more than these seven?",
            "one walk",
            {
                "one walk": "It has both states at once, and reads every chunk once.",
                "two passes": "The second pass loads the tokens again.",
                "three walks": "Each walk loads what it needs again.",
            },
            seen={way: (i, len(steps)) for i, (way, steps) in enumerate(zip(WAYS, every, strict=True))},
            before=(WAYS.index("three walks"), 0),
        ),
    )
