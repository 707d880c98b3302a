"""Explorables of anchors, levels, the GLA kernel and decoding, against the package (chapters 12, 13, 15 and 16)."""

from __future__ import annotations

import math
import re

import pytest
import torch

pytest.importorskip("bs4", reason="the book's tools are not installed")

from pictures import rects

from gla_ref import gates, gla
from gla_ref.book.costs import cost
from gla_ref.book.viz import anchor, decode_memory, levels, one_chunk


def gate(T=64, K=5, seed=0):
    return -torch.rand(T, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("at", [0, 1 / 4, 1 / 2, 1])
def test_the_anchor_moves_factors_and_not_their_product(at):
    g = gate(anchor.C, 1)
    q, k = anchor.factors(g[:, 0], at)
    apart = gates.segment_sum(g)[..., 0] / math.log(2)
    below = torch.ones_like(apart).tril() > 0
    assert torch.allclose((q[:, None] + k)[below], apart[below], rtol=0, atol=1e-12)


def test_the_anchor_in_the_middle_has_the_smallest_factors():
    explorable = anchor.anchor()
    for n, _ in enumerate(anchor.GATES):
        said = [row[n].readout for row in explorable.frames]
        assert all(f"Token {anchor.READER} reads token {anchor.WRITER}" in words for words in said)
        assert len({words.split(" = ")[1] for words in said}) == 1  # the decay of the pair
        g = torch.full((anchor.C,), -anchor.GATES[n], dtype=torch.float64)
        most = [max(x.max().item() for x in anchor.factors(g, i / 8)) for i in anchor.EIGHTHS]
        assert min(most) == most[4]
        for row, power in zip(explorable.frames, most, strict=True):
            words = row[n].readout
            assert ("fits every format" in words) == (power < 16)
            assert ("too large for every format" in words) == (power >= 128)


def test_powers_in_the_readout_add_up():
    back = {raised: plain for plain, raised in zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)}
    for row in anchor.anchor().frames:
        for frame in row:
            powers = re.findall("2([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", frame.readout)[-3:]
            read, wrote, both = (int("".join(back[c] for c in p)) for p in powers)
            assert abs(read + wrote - both) <= 1  # each is rounded


def test_every_pair_meets_in_one_block():
    explorable = levels.levels()
    for i in range(1, levels.C):
        for j in range(i):
            blocks = [
                (level, m)
                for level in range(4)
                for m in range(2**level, levels.C, 2 ** (level + 1))
                if m - 2**level <= j < m <= i < m + 2**level
            ]
            assert blocks == [levels.meet(j, i)]
            ((level, m),) = blocks
            frame = explorable.frames[i - 1][j]
            assert f"meet at token {m}, on level {level}." in frame.readout
            assert int(re.search(rf"reader {i} = ([01]+)", frame.readout)[1], 2) == i
    tiles = rects(frame, *levels.COLORS)
    area = sum(tile["width"] * tile["height"] for tile in tiles) / levels.SIZE**2
    assert area == levels.C * (levels.C - 1) / 2


def test_the_chunk_of_the_kernel_is_that_of_the_recurrence_and_of_the_page():
    C, K, V = one_chunk.C, one_chunk.K, one_chunk.V
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, C, K, generator=generator, dtype=torch.float64)
    v, S = (torch.randn(n, V, generator=generator, dtype=torch.float64) for n in (C, K))
    g = gate(C, K) / 10
    o, S_next, steps = one_chunk.walk(q, k, v, g, S)
    x = (y[None, :, None] for y in (q, k, v, g))
    want, last = gla.recurrent(*x, scale=1.0, initial_state=S[None, None])
    assert torch.allclose(o, want[0, :, 0], rtol=0, atol=1e-10)
    assert torch.allclose(S_next, last[0, 0], rtol=0, atol=1e-10)
    # what the docstring of gla_ref.pages.gla says of a chunk
    assert sum(s.flops for s in steps) == 2 * C * (C * (2 * K + V) + 2 * K * V + 16 * K)
    assert sum(s.bytes for s in steps) == 2 * C * (3 * K + 2 * V)
    frames = one_chunk.one_chunk().frames
    assert len(frames) == len(steps)
    for frame, step in zip(frames, steps, strict=True):
        assert frame.readout.endswith(step.words)
        assert len([r for r in rects(frame, "orange") if r["y"] < one_chunk.BARS]) == len(step.makes.split())


@pytest.mark.parametrize("layer", decode_memory.LAYERS)
def test_cache_and_state_are_those_of_the_costs(layer):
    H, K, V = decode_memory.LAYERS[layer]
    for T in (1, 16, 40):
        sizes = dict(B=1, T=T, H=H, K=K, V=V)
        both = tuple(cost(name, "recurrent", **sizes).state_bytes for name in ("softmax_attention", "gla"))
        assert decode_memory.kept(layer, T) == both
    row = decode_memory.decode_memory().frames[list(decode_memory.LAYERS).index(layer)]
    for T, frame in zip(decode_memory.TOKENS, row, strict=True):
        cache, state = decode_memory.kept(layer, T)
        assert ("times the state" in frame.readout) == (cache >= state)
