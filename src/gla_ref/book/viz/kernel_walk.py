"""A kernel's walk through the sequence: its loads, its tiles on the chip and its stores (chapter 7)."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import cell, part, rect, text

__all__ = ["WAYS", "Move", "kernel_walk", "walk"]

N, C, L, K, V = (8, 64, 2, 64, 64)  # one head: chunks, tokens a chunk, chunks a segment, one tile of V
WAYS = ("fused", "materialised", "segmented")


class Move(NamedTuple):
    """A tile on its way from memory to the chip, or back."""

    step: int  # from 1; programs that run at the same time share it
    program: int
    action: str  # "load" or "store"
    tensor: str  # "q", "k", "v", "o", a state "S", or "D", a segment's addition to the state
    n: int  # the chunk; of a state, the number of chunks before it
    bytes: int


def walk(way: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Move]]:
    """Linear attention of one head by tiles, q, k `[N C, K]` and v `[N C, V]`: o, the final state, all moves.

    A number of q, k, v and o has 2 bytes. A number of a chunk's state has 2 bytes too, because such a state is only an
    operand of a product; numbers of states that are returned or added up have 4.
    """
    scale, o, moves = q.shape[-1] ** -0.5, torch.empty_like(v), []

    def move(step, program, action, tensor, n, x, size=2):
        moves.append(Move(step, program, action, tensor, n, size * x.numel()))
        return x

    def chunk(step, program, n, S, outputs):
        """Load chunk n, store its outputs and return the state after it, from the state S before it."""
        rows = slice(n * C, (n + 1) * C)
        k_n = move(step, program, "load", "k", n, k[rows])
        v_n = move(step, program, "load", "v", n, v[rows])
        if outputs:
            q_n = move(step, program, "load", "q", n, q[rows])
            o[rows] = scale * (q_n @ S + (q_n @ k_n.T).tril() @ v_n)
            move(step, program, "store", "o", n, o[rows])
        return S + k_n.T @ v_n

    S = q.new_zeros(K, V)
    if way == "fused":
        for n in range(N):
            S = chunk(n + 1, 0, n, S, outputs=True)
        move(N, 0, "store", "S", N, S, 4)
    elif way == "materialised":
        states = []
        for n in range(N):
            states.append(move(n + 1, 0, "store", "S", n, S))
            S = chunk(n + 1, 0, n, S, outputs=False)
        move(N, 0, "store", "S", N, S, 4)
        for n in range(N):  # all at the same time
            chunk(N + 1, n, n, move(N + 1, n, "load", "S", n, states[n]), outputs=True)
    else:
        starts, states = range(0, N, L), []
        for m, start in enumerate(starts):  # all at the same time
            D = q.new_zeros(K, V)
            for i in range(L):
                D = chunk(i + 1, m, start + i, D, outputs=False)
            states.append(move(L, m, "store", "D", start + L, D, 4))
        for m, start in enumerate(starts):  # one small program: a running sum
            move(L + 1, 0, "store", "S", start, S, 4)
            added = move(L + 1, 0, "load", "D", start + L, states[m], 4)
            states[m], S = S, S + added
        move(L + 1, 0, "store", "S", N, S, 4)
        for m, start in enumerate(starts):  # all at the same time
            S_m = move(L + 2, m, "load", "S", start, states[m], 4)
            for i in range(L):
                S_m = chunk(L + 2 + i, m, start + i, S_m, outputs=True)
    return o, S, moves


PITCH, LEFT = 40, 44  # distance and left edge of the tiles in memory
ROWS = {"q": 24, "k": 50, "v": 76, "o": 102, "S": 134, "D": 160}  # their tops
NAMES = {"D": "Δ"}
CHIP, BARS = 216, 312  # tops of the programs and of the byte counters
LOADED, STORED, KEPT = "pale-blue", "orange", "pink"


def _memory(done: list[Move], now: list[Move]) -> list[str]:
    """Tiles of q, k, v, o and of the states stored so far, with the number of times each was loaded."""
    loads = Counter((m.tensor, m.n) for m in done + now if m.action == "load")
    stored = {(m.tensor, m.n) for m in done + now if m.action == "store"}
    moving = {(m.tensor, m.n): LOADED if m.action == "load" else STORED for m in now}
    pieces = [text(LEFT, 10, "in memory", "start strong")]
    for tensor, y in ROWS.items():
        state = tensor in "SD"
        there = [n for n in range(N + state) if (tensor, n) in stored or tensor in "qkv"]
        if there or not state:
            pieces.append(text(16, y + 11, NAMES.get(tensor, tensor)))
        for n in range(N + state):
            x, width = LEFT + PITCH * n - 13 * state, 22 if state else PITCH - 4
            tile = []
            if n in there:
                tile.append(rect(x, y, width, 22, moving.get((tensor, n), "pale-grey")))
            elif not state:
                tile.append(rect(x, y, width, 22, "edge"))
            if loads[tensor, n]:
                tile.append(text(x + width / 2, y + 11, loads[tensor, n], "on"))
            if tile:
                pieces.append(part(_told(tensor, n), *tile))
    return pieces


def _told(tensor: str, n: int) -> str:
    """The words for a tile of memory."""
    if tensor == "D":
        return f"The part that the segment ending with chunk {n} adds to the state, {K} × {V} numbers in float32."
    if tensor == "S":
        return f"The state after {n} chunks, {K} × {V} numbers."
    return f"{tensor} of chunk {n + 1}: {C} tokens × {V if tensor in 'vo' else K} numbers of 2 bytes."


def _chip(now: list[Move]) -> list[str]:
    """A box for each program at work: its loads, its stores and the tiles that stay on the chip."""
    pieces = [text(LEFT, CHIP - 12, "on the chip, a box for each program", "start strong")]
    for p in range(max((m.program for m in now), default=-1) + 1):
        mine = [m for m in now if m.program == p]
        loaded = {m.tensor for m in mine if m.action == "load"}
        state = LOADED if "S" in loaded else KEPT
        state = STORED if any(m.action == "store" and m.tensor in "SD" for m in mine) else state
        tiles = [("S", state), *((name, LOADED) for name in "Dkvq" if name in loaded)]
        tiles += [("P", KEPT), ("o", STORED)] if "q" in loaded else []
        pieces.append(rect(LEFT + PITCH * p, CHIP, PITCH - 4, 82, "edge"))
        for i, (name, kind) in enumerate(tiles):
            x, y = LEFT + PITCH * p + 2 + 17 * (i % 2), CHIP + 2 + 26 * (i // 2)
            pieces.append(cell(x, y, 15, 24, kind, NAMES.get(name, name)))
    return pieces


def counter(y: float, name: str, length: float, least: float, kind: str, shown: str) -> list[str]:
    """A bar of what has been moved so far, and a mark at the least possible length."""
    return [
        text(LEFT + 8, y + 9, name, "end"),
        rect(LEFT + 16, y, length, 18, kind),
        rect(LEFT + 15 + least, y - 2, 2, 22, "vermilion"),
        text(WIDTH - 10, y + 9, shown, "end"),
    ]


def _words(way: str, step: int, last: int) -> str:
    """The words for a step."""
    if step == 0:
        return f"Before the first of {last} steps. Each box of memory is a tile of {C} tokens."
    if way == "fused":
        what = f"The one program loads q, k and v of chunk {step}, stores o, and keeps the state S."
        return what + (" At the end it stores S." if step == last else "")
    if way == "materialised":
        if step == last:
            return "One program per chunk, all at once: each loads its state and q, k, v, and stores o."
        return f"The first kernel stores the state before chunk {step}, then loads k and v and adds to it."
    if step <= L:
        what = f"One program per segment, from zero: each loads k and v of its chunk {step}."
        return what + (" It stores its sum, Δ." if step == L else "")
    if step == L + 1:
        return "One small program adds up Δ: now the state before each segment is known."
    return f"One program per segment, from its true state: q, k and v of its chunk {step - L - 1}, and o."


def kernel_walk() -> Explorable:
    """One head of linear attention: a single program, one per chunk, or one per segment, step by step."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(N * C, D, generator=generator, dtype=torch.float32) for D in (K, K, V)]
    moves = {way: walk(way, *tokens)[2] for way in WAYS}

    def total(way, action, step=N + 1):
        return sum(m.bytes for m in moves[way] if m.action == action and m.step <= step)

    frames, most = [], max(total(way, "load") for way in WAYS)
    for way in WAYS:
        last = max(m.step for m in moves[way])
        frames.append([])
        for step in range(last + 1):
            bars, moved, least, unit = [], 0, 0, 230 / most
            for i, (name, action, kind) in enumerate((("loaded", "load", LOADED), ("stored", "store", STORED))):
                so_far, fewest = total(way, action, step), total("fused", action)
                shown = f"{so_far // 1024} KiB"
                bars += counter(BARS + 24 * i, name, so_far * unit, fewest * unit, kind, shown)
                moved, least = moved + so_far // 1024, least + fewest // 1024
            words = f"{_words(way, step, last)} Moved so far: {moved} KiB"
            words += f", {moved / least:.2f} times the least possible." if step == last else "."
            done = [m for m in moves[way] if m.step < step]
            now = [m for m in moves[way] if m.step == step]
            frames[-1].append(Frame(_memory(done, now) + _chip(now) + bars, words))
    return Explorable(
        title="A kernel's walk through the sequence",
        notice="The number in a tile says how often it was loaded; the vermilion marks are the least that can be "
        "moved. The fused walk moves no more, but takes one chunk after the other. The other two ways load k and v "
        "twice and move states; in return, many programs work at the same time. (Segments of two chunks, as here, are "
        "short; with longer ones their states weigh less.)",
        alt="Tiles of q, k, v, o and of states in memory, a box for every program that works, and two bars for the "
        "bytes loaded and stored.",
        controls=(Choice("States", WAYS), Slider("Step", range(N + 2))),
        frames=frames,
        height=BARS + 46,
        start=(0, 3),
        legend=(
            Key(LOADED, "loaded now"),
            Key(STORED, "stored now"),
            Key(KEPT, "only on the chip"),
            Key("pale-grey", "in memory"),
            Key("edge", "not made yet"),
            Key("vermilion", "the least that must move"),
        ),
        question=Question(
            "Which way loads every key and every value only once?",
            "fused",
            {
                "fused": "One program has the state in hand all the way.",
                "materialised": "It reads them for the states, and again for the outputs.",
                "segmented": "It reads them for the part that a segment adds, and again on the walk.",
            },
            seen={way: (i, len(frames[i]) - 1) for i, way in enumerate(WAYS)},
            before=(WAYS.index("materialised"), 0),
        ),
    )
