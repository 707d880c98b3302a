"""Layers, models, roles, walks over time: their numbers against the package's (chapters 7, 8, 15, 17 to 19, 22, 23)."""

import itertools
import re
from collections import Counter

import pytest
import torch
from matplotlib import pyplot
from pictures import area, rects, texts

from gla_ref import delta_rule, gated_delta_rule, gla, kda, linear_attention, results, simple_gla
from gla_ref.book import waits_timeline as timeline
from gla_ref.book.costs import cost
from gla_ref.book.viz import delta_roles as roles
from gla_ref.book.viz import gate_paths, gla_block
from gla_ref.book.viz import multiprocessors as chip
from gla_ref.book.viz import three_jobs as jobs
from gla_ref.book.viz import walk_back as back
from gla_ref.book.viz.model_map import GATES, K4, MODELS, V4, WRITES, model_map, states
from gla_ref.book.viz.recall_by_state import TALL, TOP, _apart, matrices, measured, recall_by_state
from gla_ref.gradients.gla import backward
from gla_ref.models import Config
from gla_ref.models.language_model import Block

ONE = torch.ones(1, 4, 1, dtype=torch.float64)


def final(form, *more, **options):
    """The state behind the four tokens."""
    k, v = K4[None, :, None], V4[None, :, None]
    return form(k, k, v, *more, **options)[1][0, 0]


def log(gate: str, *, row: bool = False):
    """Log gates [1, 4, 1] or [1, 4, 1, 2] of a shape whose columns are alike."""
    G = GATES[gate]
    return (G[:, :, 0][None, :, None] if row else G[:, 0, 0][None, :, None]).log()


CALLS = {
    ("nothing fades", "adds"): lambda: final(linear_attention.recurrent),
    ("nothing fades", "erases first"): lambda: final(delta_rule.recurrent, ONE),
    ("one constant", "adds"): lambda: final(simple_gla.recurrent, log("one constant")),
    ("a number per token", "adds"): lambda: final(simple_gla.recurrent, log("a number per token")),
    ("a number per token", "erases first"): lambda: final(gated_delta_rule.recurrent, log("a number per token"), ONE),
    ("a number per row", "adds"): lambda: final(gla.recurrent, log("a number per row", row=True)),
    ("a number per row", "erases first"): lambda: final(kda.recurrent, log("a number per row", row=True), ONE),
    ("rows times columns", "adds"): lambda: final(
        gla.recurrent,
        log("a number per row", row=True),
        g_v=torch.tensor([1, 0.5, 1], dtype=torch.float64).log().expand(1, 4, 1, 3),
    ),
}


@pytest.mark.parametrize("gate, writes", CALLS)
def test_states_are_those_of_the_package(gate, writes):
    assert torch.allclose(states(gate, writes)[-1], CALLS[gate, writes](), rtol=0, atol=1e-12)


def test_every_entry_its_own_is_no_outer_product():
    G = GATES["every entry its own"][2].log()
    assert (G[0, 0] - G[0, 1] - G[1, 0] + G[1, 1]).abs() > 0.5
    k = K4[None, :, None].expand(1, 4, 3, 2)  # as three heads of one value each
    g = GATES["every entry its own"].permute(0, 2, 1).log()[None]
    S = gla.recurrent(k, k, V4[None, :, :, None], g)[1][0, :, :, 0].T
    assert torch.allclose(states("every entry its own", "adds")[-1], S, rtol=0, atol=1e-12)


def test_answers_and_readouts_say_what_is_shown():
    explorable = model_map()
    question = explorable.question
    rows = {answer: states(list(GATES)[i], WRITES[j])[n][0] for answer, (i, j, n) in question.seen.items()}
    assert torch.equal(rows["token 4"], V4[3])
    assert torch.equal(rows["tokens 3 and 4"], V4[2] + V4[3])
    assert torch.equal(rows["tokens 1, 3 and 4"], V4[0] + V4[2] + V4[3])
    assert MODELS.keys() == GATES.keys()
    for i, gate in enumerate(GATES):
        for j, writes in enumerate(WRITES):
            for n, S in enumerate(states(gate, writes)):
                said = explorable.frames[i][j][n].readout
                assert all(f"{round(x, 2) + 0.0:g}" in said for x in S.flatten().tolist())
                assert MODELS[gate][j] in said and writes in said


# -- a GLA layer (chapter 17) ------------------------------------------------------------------


def test_weights_of_the_parts_are_those_of_the_layer():
    w, H = gla_block.WIDTH_OF_MODEL, gla_block.HEADS
    config = Config(hidden_size=w, num_heads=H, use_short_conv=True)
    assert (config.gate_rank, config.conv_size) == (gla_block.RANK, gla_block.SEES)
    block = Block(config)
    of = {
        "input": block.attn_norm,
        "forget gate": block.attn.gk_proj,
        "norm": block.attn.g_norm_swish_gate,
        "output gate": block.attn.g_proj,
        "output": block.attn.o_proj,
    }
    own = {name: sum(p.numel() for p in module.parameters()) for name, module in of.items()}
    named = dict(block.attn.named_parameters())
    own["q, k, v"] = sum(p.numel() for name, p in named.items() if name[:6] in ("q_proj", "k_proj", "v_proj"))
    own["convolution"] = sum(p.numel() for name, p in named.items() if "conv1d" in name)
    assert own | {"recurrence": 0} == {name: gla_block.weights(name) for name in gla_block.PARTS}
    without, having = (row[0].readout for row in gla_block.gla_block().frames)
    total = sum(p.numel() for p in block.attn.parameters())
    assert f"{total:,} weights" in having and f"{total - own['convolution']:,} weights" in without


# -- three jobs (chapter 22) -------------------------------------------------------------------


def test_work_of_a_chunk_is_what_is_counted_elsewhere():
    """One head, one chunk: products of the cost module, and the bytes of five tensors."""
    clocks, rate = jobs.work(), jobs.RATES
    n = cost("linear_attention", "chunkwise", B=1, T=64, H=1, K=128, V=128, C=64)
    products = n.matmul_flops / rate["products"]
    assert clocks["multiply"] == products + 2 * (128 * 128 + 64 * 64 + 64 * 128) / rate["shared"]
    assert (clocks["load"] + clocks["store"]) * rate["memory"] == 5 * 2 * 64 * 128
    halves = jobs.work(programs=2)
    assert 2 * halves["load"] == clocks["load"] and 2 * halves["store"] == clocks["store"]
    assert halves["transform"] == clocks["transform"] and 2 * halves["multiply"] > clocks["multiply"]


@pytest.mark.parametrize("way", jobs.WAYS)
def test_a_schedule_waits_for_what_it_needs_and_no_longer(way):
    tasks = jobs.schedule(way, 7)
    found = {(t.job, t.chunk, t.program): t for t in tasks}
    programs = {t.program for t in tasks}
    assert len(found) == len(tasks) == 7 * 4 * len(programs)
    for unit in (("load", "store"), ("transform",), ("multiply",)):  # one task at a time
        spans = sorted((t.start, t.stop) for t in tasks if t.job in unit)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    stages = 1 if way == jobs.WAYS[3] else 2
    for t in tasks:
        needs = [(jobs.JOBS[jobs.JOBS.index(t.job) - 1], t.chunk)] if t.job != "load" else []
        if t.job == "load":
            needs += [("multiply", t.chunk - stages)] if way in jobs.WAYS[2:] else [("store", t.chunk - 1)]
        begun = [found[job, i, t.program].stop for job, i in needs if i >= 0]
        unit = ("load", "store") if t.job in ("load", "store") else (t.job,)
        ended = [x.stop for x in tasks if x.job in unit and x.stop <= t.start]
        own = [found["store", t.chunk - 1, 0].stop] if t.job == "multiply" and t.chunk and way in jobs.WAYS[2:] else []
        assert t.start == max([0, *begun, *own, *ended])


def test_three_jobs_says_what_the_schedules_are():
    clocks, explorable = jobs.work(), jobs.three_jobs()
    every, memory = sum(clocks.values()), clocks["load"] + clocks["store"]
    assert [jobs.period(way) for way in jobs.WAYS] == [every, sum(jobs.work(programs=2).values()), memory, every]
    for way, row in zip(jobs.WAYS, explorable.frames, strict=True):
        end = max(t.stop for t in jobs.schedule(way))
        assert f"{jobs.CHUNKS} chunks after {end:,} clocks" in row[-1].readout
        assert f"a chunk every {jobs.period(way):,} clocks" in row[-1].readout
        assert "0 of 5 chunks done" in row[0].readout and len(row) == -(-end // jobs.MOMENT) + 1


@pytest.mark.parametrize("way", roles.WAYS)
@pytest.mark.parametrize("heads", roles.HEADS)
def test_delta_roles_begin_when_they_can(way, heads):
    """Each job waits for its own chunk, for its group, and a load for room; an inverse never for a state."""
    tasks, together = roles.schedule(way, heads, 9), way == roles.WAYS[0]
    found = {(t.job, t.chunk): t for t in tasks}
    for t in tasks:
        needs = [(t.job, t.chunk - 1)]
        if t.job == "load":
            needs += [("walk", t.chunk - roles.STAGES)] + [("solve", 8)] * (way == roles.WAYS[2])
        else:
            needs += [("load", t.chunk)] if (t.job, way) != ("solve", roles.WAYS[2]) else []
            needs += [("solve", t.chunk)] if t.job == "walk" else [("walk", t.chunk - 1)] * together
        assert t.start == max([0, *(found[x].stop for x in needs if x[1] >= 0)])


def test_delta_roles_says_what_the_schedules_are():
    alone = roles.ALONE
    ahead = max(*alone.values(), sum(alone.values()) / roles.STAGES)
    for way, row in zip(roles.WAYS, roles.delta_roles().frames, strict=True):
        for heads, frames in zip(roles.HEADS, row, strict=True):
            walk = {32: roles.WALK[32], 64: roles.WALK[64], 128: 2 * roles.WALK[64]}[heads]  # 128 heads: two waves
            each = {
                roles.WAYS[0]: alone["solve"] + alone["walk"],
                roles.WAYS[1]: ahead,
                roles.WAYS[2]: roles.FIRST * heads / roles.MULTIPROCESSORS + walk,
            }[way]
            assert abs(roles.period(way, heads) - each) < 1e-9
            assert f"a chunk lasts {roles.period(way, heads):.1f} µs" in frames[-1].readout
            assert "0 of 6" in frames[0].readout


def test_delta_roles_take_their_times_from_a_record(monkeypatch):
    parts = {"the work of both": 1.61, "the walker's work": 2.71, "the solver's work": 2.39, "nothing": 4.6}
    records = [{"taken": part, "us_a_chunk": us, "B": 8, "HV": 16} for part, us in parts.items()]
    monkeypatch.setattr(roles.results, "load", lambda gpu, kind: {"parts": records} if kind == "parts" else None)
    assert roles._alone() == {"load": 1.6, "solve": 2.7, "walk": 2.4}
    records.pop(0)  # measured in part
    assert roles._alone() == {"load": 1.4, "solve": 2.9, "walk": 2.3}


# -- recall by the size of the state (chapter 19) ----------------------------------------------


def test_dots_are_the_means_of_records():
    records = [r for r in results.load("cpu", kind="mqar")["mqar"] if not r["about"]["overwritten"]]
    explorable, found = recall_by_state(records), measured(records)
    for n, (mixer, sizes) in enumerate(found.items()):
        for state, scores in sizes.items():
            own = [
                r["evaluations"][-1]["accuracy"]
                for r in records
                if r["about"]["stage"] == "main" and r["about"]["mixer"] == mixer and matrices(r) == state
            ]
            assert len(own) == 3 and scores[-1][1] == own
            assert f"{state:,}: {sum(own) / 3:.0%}" in explorable.frames[n][-1].readout
    linear = found["linear"]
    least = sum(linear[min(linear)][-1][1]) / 3
    assert f"answers {least:.0%} correctly" in explorable.question.answers[explorable.question.right]
    assert explorable.frames[0][0].readout.endswith("nothing yet.")
    assert list(linear) == [2 * 4 * 16, 8 * 16 * 4, 32 * 64]  # heads, K and V; without convolutions
    first = explorable.frames[explorable.first()[0]][explorable.first()[1]]
    assert f"linear {sum(linear[8 * 16 * 4][-1][1]) / 3:.0%}" in first.readout and "128 numbers:" not in "".join(
        first.pieces
    )


def test_labels_of_dots_keep_apart():
    for heights in ([30.0, 31.0, 32.0], [224.0, 226.0, 225.0, 90.0]):
        placed = _apart(heights)
        assert all(abs(a - b) > 12.9 for n, a in enumerate(placed) for b in placed[n + 1 :])
        assert max(placed) <= TOP + TALL and sorted(placed) == [
            placed[i] for i in sorted(range(len(heights)), key=heights.__getitem__)
        ]


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
    programs, N, segments = chip.schedule(way, heads), chip.N, max(1, chip.P // heads)
    least = 4 * N + 2
    more = {"one long walk": 0, "segments": 2 * N + 8 * segments, "every state first": 2 * N + 2 * N}[way]
    assert sum(x.stop - x.start for x in programs) == heads * (least + more)


@pytest.mark.parametrize("heads", chip.HEADS)
def test_the_best_way_is_the_one_that_the_rule_chooses(heads):
    pytest.importorskip("triton")
    from gla_ref.kernels.linear_attention import choose_path

    ends = {way: max(x.stop for x in chip.schedule(way, heads)) for way in chip.WAYS}
    path, length = choose_path(heads, chip.N, chip.P)
    assert min(ends, key=ends.get) == {"fused": "one long walk", "segmented": "segments"}[path]
    if path == "segmented":
        assert length == chip.N // (chip.P // heads)


@pytest.mark.parametrize("way, heads", EVERY)
def test_every_program_is_a_bar(way, heads):
    programs = chip.schedule(way, heads)
    row = chip.multiprocessors().frames[chip.WAYS.index(way)][chip.HEADS.index(heads)]
    for makes, kind in chip.KINDS.items():
        bars = rects(row[-1], f"{kind} edge")
        want = [(x.stop - x.start) * chip.UNIT for x in programs if x.makes == makes]
        # each is drawn twice: pale, and as far as it is done
        assert sorted(b["width"] for b in bars) == pytest.approx(sorted(want * 2), abs=0.06)
    end = max(x.stop for x in programs)
    assert f"done after {end:g} units" in row[-1].readout
    assert len(row) == 1 + -(-end // chip.MOMENT)
    for n, frame in enumerate(row[:-1]):
        t = n * chip.MOMENT
        busy = {x.multiprocessor for x in programs if x.start <= t < x.stop}
        moved = sum(max(0, min(x.stop, t) - x.start) for x in programs)
        assert f"{len(busy)} of {chip.P} multiprocessors at work" in frame.readout
        assert f", {moved:g} of " in frame.readout


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


def test_bars_are_as_long_as_the_record_says(monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda: None)
    timeline.waits_timeline(WAITS, B=8)
    axes, records = pyplot.gcf().axes, [r for r in WAITS["waits"] if r["B"] == 8 and r["kernel"] != "gla"]
    assert [ax.get_title() for ax in axes] == ["fused", "sequential", "two kernels: the walk"]
    for ax in axes:
        (record,) = (r for r in records if timeline.NAMES[r["kernel"]] == ax.get_title())
        waited = sum(b - a for role in record["roles"] for chunk in role["chunks"] for a, b in chunk)
        drawn = sum(bar.get_width() for bar in ax.patches if bar.get_facecolor()[0] != float(timeline.WORKS))
        assert drawn == pytest.approx(waited / 1e3)
    pyplot.close()
    with pytest.raises(ValueError, match="expected clocks of kernels at B = 2, got none"):
        timeline.waits_timeline(WAITS, B=2)
