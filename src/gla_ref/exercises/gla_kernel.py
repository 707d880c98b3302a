"""Judges of the exercises on the GLA kernel: programs, sums by products, segments (chapter 14)."""

import torch

from ..gates import decay_to_end
from . import exercise
from ._compare import draw, hold
from ._predict import ask, choice, numbers


@ask("ex-kernel-grid")
def grid():
    tiles, heads, chunks = 128 // 64, 4, 65536 // 64
    segments = 16
    right = [tiles * heads, chunks, tiles * heads * segments, chunks // segments]
    mistakes = [
        ([heads, ..., ..., ...], "A program owns 64 of the 128 columns: each head has two."),
        ([heads * chunks, 1, ..., ...], "A program a chunk would need the state before it: the walk has one a tile."),
        ([..., 65536, ..., ...], "A round is a chunk of 64 tokens."),
        ([right[0], right[1], right[0], ...], "Each segment has programs of its own."),
        ([right[0], right[1], right[2], chunks], "A program of a segment walks through its own 4096 tokens only."),
    ]
    hint = "Programs: columns / 64 times heads times segments. Rounds: tokens of a segment / 64."
    names = ["programs", "rounds", "programs, by segments", "rounds, by segments"]
    return numbers(names, right, mistakes, hint)


@ask("ex-adaptive-difference")
def difference():
    units = {n: torch.finfo(getattr(torch, n)).eps / 2 for n in ("float32", "float16", "bfloat16")}
    (noise,) = draw(4, (64, 500))
    g = -(noise.abs().clamp(max=1) / 16).float()
    g[:32] = -104.0
    halves = torch.where(torch.ones(64, 64).tril() > 0, 0.5, -0.5).float()
    exact = decay_to_end(g.double()).exp()
    whole, weighed = (g.double().sum(0) / 2).float(), (halves.double() @ g.double()).float()
    found = (whole - weighed).double().exp()
    worst = (found / exact - 1)[exact > 2**-20].abs().max().item()
    why = {
        name: f"It rounds by up to {unit:.0e}; with 32 such gates a decay is off by {worst:.0e}."
        for name, unit in units.items()
    }
    hidden = [name for name, unit in units.items() if worst < unit]
    return choice("Formats that hide the error", hidden, why)


@exercise("ex-kernel-tiles", "derive")
def tiles(answer):
    mistakes = {
        "One tile needs its exponentials in any case: only n - 1 repetitions are saved.": (
            lambda e, memory, exponentials: 2 * e * exponentials / memory
        ),
        "There are two exponentials for each number, one for q and one for k.": (
            lambda e, memory, exponentials: 1 + 4 * e * exponentials / memory
        ),
        "q and k are written once more, and so are they read: four times K numbers.": (
            lambda e, memory, exponentials: 1 + e * exponentials / memory
        ),
        "Bytes are paid at the rate of memory, exponentials at theirs: the ratio is upside down.": (
            lambda e, memory, exponentials: 1 + 2 * e * memory / exponentials
        ),
        "4 K numbers are 4 e K bytes.": lambda e, memory, exponentials: 1 + 2 * exponentials / memory,
    }
    cases = [(4, 1.5e12, 4.2e12), (2, 4.8e12, 3.9e12)]
    hold(answer, cases, lambda e, memory, exponentials: 1 + 2 * e * exponentials / memory, mistakes, {"n": ""})


def _carried(decay, own, S, gate=lambda a, n: a[n], late=0):
    starts = [S]
    for n in range(len(own)):
        starts.append(gate(decay, n)[:, None] * starts[-1] + own[n])
    return torch.stack(starts[late : late + len(own)]), starts[-1]


@exercise("ex-kernel-carry", "implement")
def carry(answer):
    mistakes = {
        "The states after the segments: a segment needs the one before it.": lambda *x: _carried(*x, late=1),
        "The decay belongs to the rows of the state, one for each channel of k.": (
            lambda a, own, S: _carried(a.new_ones(a.shape), own, S)
        ),
        "A state decays by the segment that it passes through, not by the one before.": (
            lambda *x: _carried(*x, gate=lambda a, n: a[n - 1] if n else a.new_ones(a[0].shape))
        ),
        "The first segment starts from S, not from zeros.": lambda a, own, S: _carried(a, own, torch.zeros_like(S)),
        "What a segment adds has decayed inside of it already.": (lambda a, own, S: _carried(a, a[..., None] * own, S)),
    }
    noise, own, S = draw(9, (4, 2), (4, 2, 3), (2, 3))
    cases = [(noise.sigmoid(), own, S)]
    hold(answer, cases, _carried, mistakes, {"starts": "N K V", "final": "K V"})
