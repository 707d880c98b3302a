"""Explorables of chapters 7, 8 and 15: who is busy when, the walks back, the pairs of a gate's gradient."""

import itertools
import re
from collections import Counter

import pytest
import torch
from pictures import area, rects, texts

from gla_ref import linear_attention, results
from gla_ref.book import multiprocessors as chip
from gla_ref.book import waits_timeline as timeline
from gla_ref.book.viz import gate_paths, kernel_walk
from gla_ref.book.viz import walk_back as back
from gla_ref.gradients.gla import backward

# -- multiprocessors over time (chapter 7) -----------------------------------------------------

EVERY = list(itertools.product(chip.WAYS, chip.HEADS))


@pytest.mark.parametrize("way, heads", EVERY)
def test_programs_wait_for_their_launch_and_their_multiprocessor(way, heads):
    programs = chip.schedule(way, heads)
    for p in range(chip.P):
        mine = sorted(x for x in programs if x.multiprocessor == p)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))
    order = ["states", "carry", "outputs"]
    spans = [[(x.start, x.stop) for x in programs if x.makes == makes] for makes in order]
    spans = [(min(a for a, _ in s), max(b for _, b in s)) for s in spans if s]
    assert all(first[1] == then[0] for first, then in itertools.pairwise(spans))
    assert {x.head for x in programs} == set(range(1, heads + 1))


@pytest.mark.parametrize("way, heads", EVERY)
def test_programs_take_as_long_as_what_they_move(way, heads):
    """The bytes of the chapter, in tiles of C = K = V = 64 in bf16."""
    programs, N, segments = chip.schedule(way, heads), chip.N, {2: 2, 4: 2}.get(heads, 4)
    least = 4 * N + 2
    more = {"one long walk": 0, "segments": 2 * N + 8 * segments, "every state first": 2 * N + 2 * N}[way]
    assert sum(x.stop - x.start for x in programs) == heads * (least + more)


def test_kernel_walk_counts_the_same_tiles():
    """Both pictures of chapter 7 have one idea of what a walk moves."""
    tokens = [torch.zeros(kernel_walk.N * 64, 64) for _ in range(3)]
    for way, more in (("fused", 0), ("materialised", 4 * kernel_walk.N)):
        tiles = sum(m.bytes for m in kernel_walk.walk(way, *tokens)[2]) / (2 * 64 * 64)
        assert tiles == 4 * kernel_walk.N + 2 + more


@pytest.mark.parametrize("heads", chip.HEADS)
def test_the_best_way_is_the_one_that_the_rule_chooses(heads):
    pytest.importorskip("triton")
    from gla_ref.kernels.linear_attention import choose_path

    ends = {way: max(x.stop for x in chip.schedule(way, heads)) for way in chip.WAYS}
    path, length = choose_path(heads, chip.N, chip.P)
    assert min(ends, key=ends.get) == {"fused": "one long walk", "segmented": "segments"}[path]
    if path == "segmented":
        assert length == chip.N // (chip.P // heads)


def test_every_program_is_a_bar(axes_of):
    order = itertools.product(chip.HEADS, chip.WAYS)
    for (heads, way), ax in zip(order, axes_of(chip.multiprocessors), strict=True):
        programs = chip.schedule(way, heads)
        assert [bar.get_x() for bar in ax.patches] == [x.start for x in programs]
        assert [bar.get_width() for bar in ax.patches] == pytest.approx([x.stop - x.start for x in programs])
        ends = (max(x.stop for x in chip.schedule(x, heads)) for x in (way, chip.WAYS[0]))
        assert ax.texts[0].get_text() == f"{next(ends) / next(ends):.2f}"


def test_the_answer_about_four_multiprocessors():
    ends = [max(x.stop for x in chip.schedule(way, 1)) for way in ("one long walk", "segments")]
    assert 2 <= ends[0] / ends[1] < 2.5


# -- the walks back (chapter 8) ----------------------------------------------------------------


@pytest.mark.parametrize("way, tensors", list(zip(back.WAYS, (7, 10, 12), strict=True)))
def test_walks_back_make_the_gradients_and_move_what_the_chapter_counts(way, tensors):
    T, K, V = back.N * back.C, back.K, back.V
    q, k, v, do = (torch.randn(T, D, dtype=torch.float64) for D in (K, K, V, V))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, _ = linear_attention.recurrent(*(x[None, :, None] for x in leaves), scale=1.0)
    *got, steps = back.walks(way, q, k, v, do, k.T @ v)
    for x, exact in zip(got, torch.autograd.grad(o[0, :, 0], leaves, do), strict=True):
        assert (x - exact).abs().max() < 1e-11
    assert sum(len(s.loads + s.stores) for s in steps) == tensors * back.N
    assert {(x, s.n) for s in steps for x in s.stores} == {(x, n) for x in ("dq", "dk", "dv") for n in range(back.N)}


@pytest.mark.parametrize("way", back.WAYS)
def test_walk_back_shows_its_steps(way):
    q, k, v, do = (torch.zeros(back.N * back.C, D) for D in (back.K, back.K, back.V, back.V))
    steps = back.walks(way, q, k, v, do, k.T @ v)[3]
    row = back.walk_back().frames[back.WAYS.index(way)]
    assert len(row) == len(steps) + 1
    for done, frame in enumerate(row[1:], 1):
        now = steps[done - 1]
        assert len([r for r in rects(frame, "pale-blue") if r["y"] < 210]) == len(now.loads)
        assert len([r for r in rects(frame, "orange") if r["y"] < 210]) == len(now.stores)
        held = [x for x in (now.S, now.R) if x is not None]
        assert len(rects(frame, "pink")) == sum(map(len, held))
        assert all(now.n not in x for x in held)  # its own tokens are read through the scores
        loaded = sum(len(s.loads) for s in steps[:done]) / back.N
        assert f"{loaded:.1f} tensors" in texts(frame, "end")


# -- the pairs of a gate's gradient (chapter 15) ------------------------------------------------


def test_gate_paths_sum_to_the_gradient_of_every_gate():
    """Each kind of sum, with the pairs that cancel left out, against the gradient of the package; and the words."""
    W, x = gate_paths.paths(), [y[None, :, None] for y in gate_paths.inputs()]
    dg = backward(*x, scale=1.0).dg[0, :, 0, 0]
    frames = gate_paths.gate_paths().frames
    for way, rows in zip(gate_paths.WAYS, frames, strict=True):
        for C, row in zip(gate_paths.CHUNKS, rows, strict=True):
            for t, frame in enumerate(row, 1):
                found = gate_paths.pairs(way, C, t)
                cancel = found.pop("orange")
                crossing = [pair for of in found.values() for pair in of]
                assert len(set(crossing)) == len(crossing) == (t - 1) * (gate_paths.T + 1 - t)
                assert sum(W[i - 1, j - 1].item() for i, j in crossing) == pytest.approx(dg[t - 1].item(), abs=1e-12)
                assert f"dg = {dg[t - 1]:.3f}" in frame.readout.replace("−", "-") or abs(dg[t - 1]) < 5e-4
                many = f"another {len(cancel)} pairs are" if len(cancel) > 1 else "another pair is"
                assert (many if cancel else "no others") in frame.readout


@pytest.mark.parametrize("C", gate_paths.CHUNKS)
def test_gate_paths_cancel_the_pairs_that_the_running_sum_adds(C):
    """q dq - k dk, from t to the chunk's end plus paths past it: wanted pairs once, orange ones not at all."""
    T = gate_paths.T
    for t in range(1, T + 1):
        last = (t - 1) // C * C + C
        added = [(i, j) for i in range(t, last + 1) for j in range(1, i)]  # rows: q dq, without i = j
        added += [(i, j) for i in range(last + 1, T + 1) for j in range(1, last + 1)]  # what passes the end
        taken = [(i, j) for j in range(t, last + 1) for i in range(j + 1, T + 1)]  # columns: k dk
        found = gate_paths.pairs(gate_paths.WAYS[0], C, t)
        assert sorted(taken) == sorted(found["orange"])
        assert sorted(added) == sorted(found["orange"] + found["blue"])


def test_gate_paths_draw_as_many_pairs_as_they_count():
    for rows in gate_paths.gate_paths().frames:
        for row in rows:
            for frame in row:
                drawing = "".join(frame.pieces)
                counted = Counter()
                for words, kind, d in re.findall(r'data-say="([^"]*)"><path class="(\w+)" d="M([^"]*)Z"', drawing):
                    assert abs(area(d)) == pytest.approx(int(words.split()[0]) * gate_paths.SIZE**2)
                    counted["cancel" if kind == "orange" else "cross"] += int(words.split()[0])
                shown = [int(x.split()[0]) for x in texts(frame) if re.fullmatch(r"\d+ pairs?", x)]
                assert shown == [counted["cross"], counted["cancel"]]


# -- roles that wait (chapter 22) --------------------------------------------------------------


def test_work_lies_between_waits():
    role = {"first": 60, "sites": ["ready", "done"], "chunks": [[[0, 50], [150, 150]], [[400, 420], [500, 530]]]}
    assert timeline.spans(role) == [
        ("ready", 60, 0, 50),
        ("work", 60, 50, 150),
        ("work", 60, 150, 400),
        ("ready", 61, 400, 420),
        ("work", 61, 420, 500),
        ("done", 61, 500, 530),
    ]


WAITS = results.load("h200", kind="waits")


def test_bars_are_as_long_as_the_record_says(axes_of):
    (ax,) = axes_of(timeline.waits_timeline, WAITS, B=8)
    (record,) = (r for r in WAITS["waits"] if (r["B"], r["kernel"]) == (8, "fused"))
    waited = sum(b - a for role in record["roles"] for chunk in role["chunks"] for a, b in chunk)
    drawn = sum(bar.get_width() for bar in ax.patches if bar.get_facecolor()[0] != float(timeline.WORKS))
    assert drawn == pytest.approx(waited / 1e3)
    with pytest.raises(ValueError, match="expected clocks of the fused kernel at B = 2, got none"):
        timeline.waits_timeline(WAITS, B=2)
