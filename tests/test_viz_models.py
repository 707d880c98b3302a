"""A layer, the map of models, roles over time: their numbers against the package's (chapters 17 to 19, 22, 23)."""

import pytest
import torch

from gla_ref import delta_rule, gated_delta_rule, gla, kda, linear_attention, results, simple_gla
from gla_ref.book._roles import Step, end, play
from gla_ref.book.costs import cost
from gla_ref.book.viz import delta_roles as roles
from gla_ref.book.viz import gla_block
from gla_ref.book.viz import three_jobs as jobs
from gla_ref.book.viz.model_map import GATES, K4, MODELS, V4, WRITES, model_map, states
from gla_ref.book.viz.recall_by_state import TALL, TOP, _apart, matrices, measured, recall_by_state
from gla_ref.models import Config
from gla_ref.models.language_model import Block

ONE = torch.ones(1, 4, 1, dtype=torch.float64)
ON_VALUES = torch.tensor([1, 0.5, 1], dtype=torch.float64).log().expand(1, 4, 1, 3)


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
    ("rows times columns", "adds"): lambda: final(gla.recurrent, log("a number per row", row=True), g_v=ON_VALUES),
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
    assert f">{config.gate_rank}</text>" in gla_block.DRAWN["forget gate"]
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


@pytest.mark.parametrize(
    "stages, unit, begins",
    [
        (1, str, [0, 2, 5, 7, 10, 12]),
        (2, str, [0, 2, 2, 5, 5, 8]),
        (2, lambda job: "one for both", [0, 2, 5, 7, 10, 12]),
    ],
)
def test_a_step_begins_when_it_can(stages, unit, begins):
    """By hand: a load takes 2, a walk 3; with one stage, with two, with two and one unit for both."""
    roles = [[Step(job, c) for c in range(3)] for job in ("load", "walk")]
    tasks = play(
        roles, {"load": 2, "walk": 3}, lambda c: {"load": [Step("walk", c - stages)], "walk": [Step("load", c)]}, unit
    )
    assert [t.start for t in tasks] == begins and end(tasks) == begins[-1] + 3


def test_roles_that_wait_for_each_other_are_named():
    """A load waits for room that only its own chunk would make."""
    loads, walks = [Step("load", 0)], [Step("walk", 0)]
    with pytest.raises(ValueError, match="roles: expected one that can go on, got .*load.*walk"):
        play([loads, walks], {"load": 1, "walk": 1}, lambda c: {"load": walks, "walk": loads})


def test_three_jobs_says_what_the_schedules_are():
    clocks, explorable = jobs.work(), jobs.three_jobs()
    every, memory = sum(clocks.values()), clocks["load"] + clocks["store"]
    assert [jobs.period(way) for way in jobs.WAYS] == [every, sum(jobs.work(programs=2).values()), memory, every]
    for way, row in zip(jobs.WAYS, explorable.frames, strict=True):
        end = max(t.stop for t in jobs.schedule(way))
        assert f"{jobs.CHUNKS} chunks after {end:,} clocks" in row[-1].readout
        assert f"a chunk every {jobs.period(way):,} clocks" in row[-1].readout
        assert "0 of 5 chunks done" in row[0].readout and len(row) == -(-end // jobs.MOMENT) + 1


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
            mains = [r for r in records if r["about"]["stage"] == "main" and r["about"]["mixer"] == mixer]
            own = [r["evaluations"][-1]["accuracy"] for r in mains if matrices(r) == state]
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
