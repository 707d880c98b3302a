"""The model of many GPUs: its counts are the plan's, its times those of the formulas (chapter 25)."""

import json
import math
import sys
from pathlib import Path

import pytest
from cases import in_process, meta_tokens

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import scaling as program

from gla_ref.book import scaling
from gla_ref.book.scaling import GLA, H200, Sizes, exchange, gather_seconds, pipeline_seconds, ring_attention, schedule
from gla_ref.book.viz import ranks_over_time as viz
from gla_ref.context_parallel import LINKS, plan


def test_bytes_are_those_of_the_plan():
    for mechanism, decay in {"gla": 128, "gated_delta_rule": 128**2, "linear_attention": 1}.items():
        found = plan(mechanism, meta_tokens(mechanism), (4096, 4096), exchange="all-gather")
        assert found.bytes == Sizes(decay=decay).map + 4
    assert GLA.state == 4 * 16 * 128 * 128


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_times_are_those_of_the_formulas(ranks):
    """Within a host, where all wires are alike."""
    link = LINKS["nccl"]
    assert link == H200.near, "a plan chooses by the same constants"
    assert math.isclose(exchange("all-gather", ranks, GLA, H200), gather_seconds(link, ranks, GLA.map))
    for blocks in (1, 3, 16):
        found = exchange("pipeline", ranks, GLA, H200, blocks)
        assert math.isclose(found, pipeline_seconds(link, ranks, GLA.state, blocks))
    assert exchange("pipeline", ranks, GLA, H200) <= exchange("pipeline", ranks, GLA, H200, 1)


def test_more_ranks_are_slower_to_reach():
    for way in ("all-gather", "pipeline"):
        times = [exchange(way, 2**n, GLA, H200) for n in range(11)]
        assert times[0] == 0 and times == sorted(times)


@pytest.mark.parametrize("way", ["one after another", "all-gather", "pipeline"])
def test_a_schedule_waits_for_what_it_needs(way):
    tasks = schedule(way, 2**20, 4)
    for r in range(4):
        own = sorted((t for t in tasks if t.rank == r), key=lambda t: t.start)
        assert [t.job for t in own if t.stop > t.start][-1] == "walk"
        assert all(math.isclose(a.stop, b.start) for a, b in zip(own, own[1:], strict=False))
    walks = {t.rank: t for t in tasks if t.job == "walk"}
    if way == "one after another":
        assert all(walks[r + 1].start > walks[r].stop for r in range(3))
    else:
        assert walks[3].start < walks[0].stop, "no rank waits for another one's walk"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_gpu_and_many_are_charged_alike(ranks):
    tokens = 2**24
    for way in ("all-gather", "pipeline"):
        done, alone = (max(t.stop for t in schedule(way, tokens, n)) for n in (ranks, 1))
        assert alone == schedule("one after another", tokens, 1)[-1].stop
        assert ranks > alone / done > 0.97 * ranks
        waited = exchange(way, ranks, GLA, H200)
        assert math.isclose(done, alone / ranks + waited), "the last rank waits for one exchange, and for no walk"


def test_ring_attention_sends_keys_and_values():
    seconds, sent = ring_attention(2**16, 4)
    assert sent == 3 * 2**14 * 16 * 256 * 2
    products = 4 * 16 * 128 * (2**16) ** 2 / 2 / H200.products / 4
    assert seconds >= products * 0.999 and ring_attention(2**16, 1)[1] == 0


@pytest.mark.parametrize("call", [lambda: exchange("ring", 4, GLA, H200), lambda: schedule("ring", 4096, 4)])
def test_unknown_ways_are_refused(call):
    with pytest.raises(ValueError, match="way: expected all-gather or pipeline, got 'ring'"):
        call()


def test_the_figure_says_what_the_schedule_does():
    explorable = viz.ranks_over_time()
    alone = schedule("one after another", viz.TOKENS, 1)[-1].stop
    for way, row in zip(viz.WAYS.values(), explorable.frames, strict=True):
        for ranks, frames in zip(viz.RANKS, row, strict=True):
            done = max(t.stop for t in schedule(way, viz.TOKENS, ranks))
            assert f"done after {1e3 * done:.2f} ms, {done / alone:.0%} of" in frames[-1].readout
    shown = max(t.stop for t in schedule("all-gather", viz.TOKENS, 4)) / alone
    assert 0.25 < shown < 0.28, "the right answer is a quarter"
    assert scaling.H200.host == 8


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_program_that_measures(tmp_path, ranks):
    """Tiny, with processes of a CPU: bytes are those of the plan, and the record says all that chapter 25 shows."""
    out = tmp_path / "scaling.json"
    options = f"--ranks {ranks} --tokens 64 --heads 2 --size 8 --repeats 1 --check 8 --alone 64 --out {out}".split()
    in_process(program.__file__, *options)
    found = {(r["mechanism"], r["exchange"]): r for r in json.loads(out.read_text())["scaling"]}
    assert len(found) == 8
    for (mechanism, way), r in found.items():
        decay = 0 if way == "pipeline" else {"gla": 8, "linear_attention": 1}.get(mechanism, 64)
        assert r["ranks"] == ranks and r["error"] < 1e-4 and r["autocast"] == 0 and r["seconds"] > 0
        assert r["alone"] == min(r["single"][how][0] for how in ("call", "segments"))
        assert 0 < min(r["exchange_seconds"], r["maps_seconds"])
        blocks = 1
        once = 4 * (2 * (8 * 8 + decay) + blocks)
        ways = 2 if way == "all-gather" or ranks > 2 else 1  # in a pipeline of two each rank sends one way
        assert r["sent"] == ways * once
    before = out.read_bytes()
    assert not in_process(program.__file__, *options) and out.read_bytes() == before, (
        "each case has been measured by this commit"
    )
