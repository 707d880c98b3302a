"""Explorables of walks, maps, exponents, roofs, anchors, levels, decoding, against the package (chapters 7 to 16)."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
from pictures import EXPLORABLES, area, rects, texts
from torch.overrides import TorchFunctionMode

from gla_ref import gates, gla, linear_attention, results
from gla_ref.book import rivals
from gla_ref.book.costs import cost
from gla_ref.book.viz import (
    anchor,
    decode_memory,
    fading_state,
    gate_strength,
    kernel_walk,
    levels,
    one_chunk,
    two_level_map,
)

# -- a kernel's walk (chapter 7) ---------------------------------------------------------------

N, C, L, K, V = (getattr(kernel_walk, name) for name in ("N", "C", "L", "K", "V"))
KIB = 1024


@pytest.fixture(scope="module")
def walks():
    tokens = [torch.randn(N * C, D, dtype=torch.float64) for D in (K, K, V)]
    return tokens, {way: kernel_walk.walk(way, *tokens) for way in kernel_walk.WAYS}


@pytest.mark.parametrize("way", kernel_walk.WAYS)
def test_walk_computes_linear_attention_and_moves_what_the_chapter_counts(walks, way):
    tokens, done = walks
    o, S, moves = done[way]
    exact = linear_attention.recurrent(*(x[None, :, None] for x in tokens))
    assert (o - exact[0][0, :, 0]).abs().max() < 1e-11
    assert (S - exact[1][0, 0]).abs().max() < 1e-11
    again = 2 * N * C * (K + V)
    extra = {"fused": 0, "materialised": again + 2 * 2 * N * K * V, "segmented": again + 16 * (N // L) * K * V}
    n = cost("linear_attention", "chunkwise", B=1, T=N * C, H=1, K=K, V=V, C=C)
    least = n.bytes - 4 * K * V  # these walks start from zero, and read no initial state
    assert sum(m.bytes for m in moves) == least + extra[way]
    assert max(m.step for m in moves) == {"fused": N, "materialised": N + 1, "segmented": 5}[way]
    loads = Counter((m.tensor, m.n) for m in moves if m.action == "load")
    stores = Counter((m.tensor, m.n) for m in moves if m.action == "store")
    for i in range(N):
        assert loads["q", i] == stores["o", i] == 1
        assert loads["k", i] == loads["v", i] == (1 if way == "fused" else 2)
    ready = {}  # a state is stored in an earlier step than it is loaded in, or by the same program
    for m in moves:
        if m.tensor in "SD":
            if m.action == "store":
                ready[m.tensor, m.n] = m.step
            else:
                assert ready[m.tensor, m.n] < m.step


@pytest.mark.parametrize("way", kernel_walk.WAYS)
def test_walk_shows_its_moves(way):
    tokens = [torch.zeros(N * C, D) for D in (K, K, V)]
    moves = kernel_walk.walk(way, *tokens)[2]
    row = kernel_walk.kernel_walk().frames[kernel_walk.WAYS.index(way)]
    assert len(row) == 1 + max(m.step for m in moves)
    for step, frame in enumerate(row):
        so_far = [m for m in moves if m.step <= step]
        totals = [sum(m.bytes for m in so_far if m.action == a) for a in ("load", "store")]
        assert [t for t in texts(frame) if t.endswith("KiB")] == [f"{x // KIB} KiB" for x in totals]
        assert f"so far: {sum(totals) // KIB} KiB" in frame.readout
        now = {(m.tensor, m.n): m.action for m in moves if m.step == step}
        blue, orange = rects(frame, "pale-blue"), rects(frame, "orange")
        for color, action in ((blue, "load"), (orange, "store")):
            tiles = [r for r in color if r["y"] < kernel_walk.CHIP and r["height"] == 22]
            assert len(tiles) == list(now.values()).count(action)
        boxes = [r for r in rects(frame, "edge") if r["height"] > 22]
        assert len(boxes) == len({m.program for m in moves if m.step == step})


# -- the map of two-level chunking (chapter 11) -------------------------------------------------


@pytest.mark.parametrize("C", two_level_map.CHUNKS)
@pytest.mark.parametrize("c", two_level_map.SUB_CHUNKS)
def test_map_shows_the_blocks_and_their_work(C, c):
    T, K, V = (getattr(two_level_map, name) for name in "TKV")
    frames = EXPLORABLES["two_level_map"]().frames
    row = frames[two_level_map.CHUNKS.index(C)][two_level_map.SUB_CHUNKS.index(c)]
    blocks = list(gla.two_level_blocks(T, C, c))
    assert len(row) == len(blocks)
    pattern = r"FLOPs: ([\d,]+) in products, ([\d,]+) element-wise"
    shown = [[int(x.replace(",", "")) for x in re.search(pattern, f.readout).groups()] for f in row]
    n = cost("gla", "chunkwise_two_level", B=1, T=T, H=1, K=K, V=V, C=C, c=c)
    assert [sum(x) for x in zip(*shown, strict=True)] == [n.matmul_flops, n.elementwise_flops]
    for step, (frame, (kind, rows, _)) in enumerate(zip(row, blocks, strict=True)):
        assert f"tokens {rows.start + 1} to {rows.stop}" in frame.readout
        words = {"inter-chunk": "chunk", "inter-sub-chunk": "Between sub-chunks"}
        assert words.get(kind, "log space") in frame.readout
        areas = Counter()
        for piece in frame.pieces:
            if found := re.search(r'<path class="(grey|orange|pink)( faint)?" d="M(.*)Z"', piece):
                areas[found[1], bool(found[2])] += _pairs(found[3])
        wanted = Counter()
        for i, (name, r, s) in enumerate(blocks):
            m, width = r.stop - r.start, s.stop - s.start
            pairs = m * (m + 1) / 2 if name == "intra-sub-chunk" else m * width
            wanted[two_level_map.COLORS[name], i > step] += pairs
        assert {k: x for k, x in areas.items() if x} == {k: x for k, x in wanted.items() if x}
        assert sum(areas.values()) == T * (T + 1) / 2  # every pair once


def _pairs(d: str) -> float:
    """The area of a polygon, in pairs of tokens; it must lie on the grid of the map."""
    x0, y0, size = two_level_map.X, two_level_map.Y, two_level_map.SIZE
    assert all((float(x) - x0) % size == (float(y) - y0) % size == 0 for x, y in map(str.split, d.split("L")))
    return area(d) / size**2


def test_map_tells_the_truth_in_its_notice():
    T, K, V = (getattr(two_level_map, name) for name in "TKV")
    for C in two_level_map.CHUNKS:
        shares = {}
        for c in two_level_map.SUB_CHUNKS:
            pink = total = pairs = 0
            for kind, rows, cols in gla.two_level_blocks(T, C, c):
                m = rows.stop - rows.start
                work = two_level_map.block_flops(kind, m, cols.stop - cols.start)[1]
                total += work
                if kind == "intra-sub-chunk":
                    pink, pairs = pink + work, pairs + m * (m + 1) // 2
                elif cols.stop:  # the block touches the diagonal in the corner of the two arrows
                    assert cols.stop == rows.start
            shares[c] = pink / total
            assert pairs <= T * (T + 1) / 2 / 5 and shares[c] > 2 * pairs / (T * (T + 1) / 2)
        assert shares[2] < 0.7 * shares[4]


# -- gate strength and exponents (chapters 10 and 12) -------------------------------------------

FORM = list(gate_strength.FORMS)
FIRST = {  # by hand: the largest number is e^88.7, in float16 e^11.09; 256 tokens, or half of 64
    "float16": (math.log(65504) / 256, math.log(65504) / 32),
    "bfloat16": (88.72 / 256, 88.72 / 32),
    "float32": (88.72 / 256, 88.72 / 32),
}


def tokens(T, K, V):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, T, 3, D, generator=generator).double() for D in (K, K, V))
    return (q, k, v, torch.nn.functional.logsigmoid(torch.randn(2, T, 3, K, generator=generator)).double())


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 145])
def test_forms_compute_the_recurrence(form, T):
    q, k, v, g = tokens(T, 5, 7)
    exact = gla.recurrent(q, k, v, g / 8)
    for x, y in zip(gate_strength.FORMS[form](q, k, v, g / 8), exact, strict=True):
        assert (x - y).abs().max() < 1e-10


@pytest.mark.parametrize("form", FORM)
def test_exponents_are_those_of_the_factors_that_the_form_multiplies(form):
    """With q = k = 1 the operands of products are the factors themselves."""
    T, seen = gate_strength.T, []

    class Look(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.matmul:
                seen.extend(args)
            return function(*args, **(kwargs or {}))

    g = -torch.rand(T, generator=torch.Generator().manual_seed(2)).double() / 8
    ones = torch.ones(1, T, 1, 1).double()
    with Look():
        gate_strength.FORMS[form](ones, ones, ones, g[None, :, None, None])
    columns = [x.flatten().log() for x in seen if (x > 0).all()]
    for _, _, b in gate_strength.exponents(form, g):
        found = any(len(x) == len(b) and torch.allclose(x, b, atol=1e-12, rtol=0) for x in columns)
        assert found, "no operand has these exponents"


@pytest.mark.parametrize("name", gate_strength.DTYPES)
def test_forms_break_where_they_must(name):
    dtype = gate_strength.DTYPES[name]
    errors = {f: [gate_strength.measured(f, x, dtype) for x in gate_strength.GATES] for f in FORM}
    for form, limit in zip(FORM, FIRST[name], strict=False):
        for gate, error in zip(gate_strength.GATES, errors[form], strict=True):
            assert (error < math.inf) == (gate < limit), (form, gate)
    assert max(errors[FORM[2]]) < 8 * torch.finfo(dtype).eps
    fine = [e for e in errors[FORM[1]] if e < math.inf]
    if name == "float16":  # the last before it breaks
        assert gate_strength.GATES[len(fine) - 1] == 0.3 and fine[-1] > 2 * fine[0]
    row = EXPLORABLES["gate_strength"]().frames[list(gate_strength.DTYPES).index(name)]
    for i, frame in enumerate(row):
        own = [errors[form][i] for form in FORM]
        wanted = [f"error {x:.0e}".replace("-", "−") if x < math.inf else "not a number" for x in own]
        assert [t for t in texts(frame, "end") if "error" in t or "not" in t] == wanted
        dots = sum(p.count("<circle") for p in frame.pieces)
        assert (dots > 0) == ("not a number" in wanted)
        alone = EXPLORABLES["gate_strength_ratio"]().frames[list(gate_strength.DTYPES).index(name)][i]
        assert [t for t in texts(alone, "end") if "error" in t or "not" in t] == wanted[:1]
        assert set(alone.pieces[1:]) <= set(frame.pieces) and wanted[0] in alone.readout
    assert FIRST[name][1] == pytest.approx(8 * FIRST[name][0])


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def test_errors_do_not_depend_on_the_default_dtype(default_dtype):
    errors = []
    for default in (torch.float32, torch.float64):  # chapters set the latter
        default_dtype(default)
        gate_strength.measured.cache_clear()
        gate_strength._oracle.cache_clear()
        errors.append(gate_strength.measured(FORM[1], 0.1, torch.float32))
    assert 1e-8 < errors[0] == errors[1] < 1e-5


# -- rivals (appendix "Benchmarks") ------------------------------------------------------------


def test_rivals_pair_our_call_with_the_fastest_right_library_of_the_same_run():
    names = "contender", "peer", "ms", "correct", "suite", "triton"
    runs = [
        *(("triton", False, 3.0, True, "a", "3.6"), ("fla", True, 4.0, True, "a", "3.6")),
        *(("cudnn", True, 2.0, True, "a", "3.6"), ("wrong", True, 1.0, False, "a", "3.6")),
        *(("torch_chunkwise", True, 1.0, True, "a", "3.6"), ("fla", True, 1.0, True, "a", "3.9")),
        *(("triton", False, 3.0, True, "b", "3.9"), ("fla", True, 2.5, True, "b", "3.9")),
    ]
    sizes = dict.fromkeys(rivals.SIZES, 1) | {"mechanism": "gla", "direction": "forward", "samples_ms": [1, 1, 1.05]}
    records = [sizes | dict(zip(names, run, strict=True)) for run in runs]
    records += [records[1] | {"ms": 1.0, "samples_ms": [1, 1, 1.2]}]
    (case,) = rivals.cases({"records": records})
    assert case.ratio == 1.5 and case.theirs["contender"] == "cudnn" and case.kind == "forward"
    back = records[0] | {"direction": "backward", "samples_ms": [1, 1, 1.12]}
    (step,) = rivals.steps({"records": [records[0], back]})
    assert step["direction"] == "both" and step["ms"] == 6 and step["unsteady"] and not rivals.unsteady(step)
    assert rivals.steps({"records": [records[0], back, timed := step | {"ms": 5}]}) == [timed]


def test_rivals_leave_out_no_suite_with_a_library():
    data = results.load("h200")
    ours = {(r["suite"], r["triton"]) for r in data["records"] if r["contender"] in rivals.OURS}
    theirs = {(r["suite"], r["triton"]) for r in data["records"] if r["peer"] and r["contender"] not in rivals.LOOPS}
    libraries = {suite for suite, _ in ours & theirs}
    assert {case.ours["suite"] for case in rivals.cases(data)} == libraries - {rivals.SMALL}


# -- a fading state (chapter 9) ----------------------------------------------------------------


def test_only_a_vector_gate_that_looks_at_the_token_keeps_what_it_should():
    last = fading_state.T
    errors = {kind: fading_state.wrong(fading_state.states(kind)[last], last) for kind in fading_state.KINDS}
    assert errors["none"][0] == 0 and errors["none"][1] > 0.5
    assert errors["a constant, 0.8"][0] == pytest.approx(1, abs=0.15) and errors["a constant, 0.8"][1] > 0.3
    assert errors["a number per token"] == (1, 0) and errors["a number per channel"] == (0, 0)


@pytest.mark.parametrize("kind", fading_state.KINDS)
def test_fading_state_draws_the_recurrence_and_says_its_errors(kind):
    explorable, S = EXPLORABLES["fading_state"](), fading_state.states(kind)
    frames = explorable.frames[fading_state.KINDS.index(kind)]
    for t in range(1, fading_state.T + 1):
        areas = {}
        for kind_of, sign in (("blue", 1), ("vermilion", -1)):
            for square in rects(frames[t], kind_of):
                column = int((square["x"] - fading_state.HELD) // fading_state.CELL)
                rows = (fading_state._y(row) for row in range(fading_state.K))
                row = next(n for n, y in enumerate(rows) if 0 < square["y"] - y < fading_state.CELL)
                if column < fading_state.V:  # to the right of them is what the state should be
                    areas[row, column] = sign * square["width"] ** 2
        most = (fading_state.CELL - 2) ** 2 / fading_state.TOPICS
        for place in ((r, c) for r in range(fading_state.K) for c in range(fading_state.V)):
            assert areas.get(place, 0) / most == pytest.approx(S[t][place].item(), abs=0.03)
        said = [int(x) / 100 for x in re.findall(r"(\d+)%", frames[t].readout)]
        true = [x for x in fading_state.wrong(S[t], t) if not math.isnan(x)]
        assert said == pytest.approx(true, abs=0.006)


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
            every = [(n, m) for n in range(4) for m in range(2**n, levels.C, 2 ** (n + 1))]  # levels, middles
            blocks = [(n, m) for n, m in every if m - 2**n <= j < m <= i < m + 2**n]
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
