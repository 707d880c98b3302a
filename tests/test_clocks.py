"""Clocks in copies of the Hopper delta kernels, and what is made of their log (benchmarks/clocks.py)."""

import itertools
import json
import sys
from types import SimpleNamespace

import played_gluon
import pytest
import torch
from cases import ROOT, in_process, thin
from harness import BF16, CUDA, F32
from problems import problem

from gla_ref.book import waits_timeline

sys.path.append(str(ROOT / "benchmarks"))
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
import clocks
from clocks import SITES, Role, clocked
from suites import Case, inputs

CHUNKS = 5
BARRIERS = {  # in the order in which the walking kernel makes them
    "fused": ("keys", "ready", "gated", "solved", "done"),
    "ahead": ("ready", "done"),
    "gla": ("empty", "ready", "hat"),
}


def play_clocks(monkeypatch, note):
    """Clocks that count how often they are read, and `note` for what a role writes down."""
    now = itertools.count(1)
    stand_ins = {"clock": lambda: next(now), "nanoseconds": lambda: next(now), "note": note}
    for name, function in stand_ins.items():
        monkeypatch.setitem(played_gluon.STANDS_IN, name, function)


def log_of(*programs):
    """A log of one role with one wait: each program is ((clock, ns) at first, (clock, ns) at last, waits)."""
    log = torch.full((len(programs), 1, len(programs[0][2]) * SITES + 2, 2), -1)
    for one, (first, last, spans) in zip(log, programs, strict=True):
        one[0, :-2:SITES] = torch.tensor(spans)
        one[0, -2:] = torch.tensor([first, last])
    return log


def test_shares_by_hand():
    """The timer counts far from 0, where a float64 would round it to 256 ns."""
    now = 1_795_000_000_000_000_001
    log = log_of(
        ((100, now), (300, now + 100), [(110, 120), (150, 190)]),  # 50 of 200 clocks
        ((1000, now), (1400, now + 200), [(1000, 1000), (1100, 1300)]),  # 200 of 400
        ((100, now), (200, now + 50), [(110, 130), (150, 160)]),  # 30 of 100
    )
    assert clocks.waits(log, [Role("walker", ("ready",))], 2) == [
        {
            "role": "walker",
            "sites": ["ready"],
            "waits": [0.3],
            "us_a_chunk": 0.05,
            "first": 0,
            "chunks": [[[0, 0]], [[50, 150]]],  # of the second program, two clocks a ns
        }
    ]


def test_the_middle_of_many_chunks_is_shown():
    spans = [(100 * c + 10, 100 * c + 30) for c in range(20)]
    (found,) = clocks.waits(log_of(((0, 0), (2000, 1000), spans)), [Role("walker", ("ready",))], 20)
    assert found["first"] == 6 and found["waits"] == [0.2] and found["us_a_chunk"] == 0.05
    assert found["chunks"] == [[[50 * c, 50 * c + 10]] for c in range(8)]


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 0, SITES, 1), (0, 0, -1, 1)])
def test_a_log_with_holes_is_refused(place):
    log = log_of(((100, 100), (300, 200), [(110, 120), (150, 190)]))
    log[place] = -1
    with pytest.raises(ValueError, match="^log: expected a pair for each wait"):
        clocks.waits(log, [Role("walker", ("ready",))], 2)


@pytest.mark.skipif(CUDA, reason="played on a CPU")
@pytest.mark.parametrize("kernel", BARRIERS)
def test_every_wait_is_logged_at_its_place(kernel, monkeypatch):
    """The copy is played: at each wait the log's site is the barrier waited for, and no bit of o or S changes."""
    plain, copy = clocks.module_of(kernel), clocked(clocks.module_of(kernel), 0, CHUNKS)
    # one head and sequence; V = 128, so that `fused` has both walkers
    if kernel == "gla":
        x = {n: y.detach() for n, y in inputs(Case("gla", 1, 64 * CHUNKS, 1, 128, 128, gates="zero"), 0, "cpu").items()}
    else:
        x, _ = problem("gated_delta_rule", 1, 64 * CHUNKS - 3, 1, 128, 128, dtype=BF16, gates=F32, groups=1)

    def play(module):
        return played_gluon.play(clocks.planned(kernel, module, x), x)[:2]

    right, logs, waited = play(plain), {}, []
    wait = played_gluon.wait

    def number(bar):
        """The number of the allocation that has this barrier."""
        memory = bar.x.untyped_storage().data_ptr()
        return [bars.x.untyped_storage().data_ptr() for bars in played_gluon.PLAY.bars].index(memory)

    def wait_and_tell(bar, parity):
        wait(bar, parity)
        if played_gluon.me() != "the prologue":
            waited.append(BARRIERS[kernel][number(bar)])
            played_gluon.PLAY.own.waited = waited[-1]

    def note(first, second, role, pair, address, roles, pairs):
        log = logs.setdefault(played_gluon.PLAY.pid, torch.full((roles, pairs, 2), -1))
        assert (log[role, pair] == -1).all() and played_gluon.me().endswith(f" {role}")
        log[role, pair] = torch.tensor([first, second])
        if pair < pairs - 2:
            assert copy.roles[role].sites[pair % SITES].split(" of ")[0] == played_gluon.PLAY.own.waited

    monkeypatch.setattr(played_gluon.STANDS_IN["mbarrier"], "wait", wait_and_tell)
    play_clocks(monkeypatch, note)
    assert all(torch.equal(a, b) for a, b in zip(play(copy.module), right, strict=True))
    log = torch.stack([logs[pid] for pid in sorted(logs)])
    assert len(waited) == len(log) * CHUNKS * sum(len(role.sites) for role in copy.roles)
    found = clocks.waits(log, copy.roles, CHUNKS)
    assert [r["role"] for r in found] == [role.name for role in copy.roles]
    assert all(0 < sum(r["waits"]) < 1 for r in found)


class PlayedProgram:
    """A plan's program, whose every launch is played as its last step."""

    def __init__(self, plan, device):
        self.plan, self.steps = plan, [(self.step, ())]

    def __call__(self, inputs):
        named = {spec.name: x for spec, x in zip(self.plan.inputs, inputs, strict=True) if spec is not None}
        return played_gluon.play(self.plan, named)[:2]

    def step(self, values):
        self(values[1:])


@pytest.mark.skipif(CUDA, reason="played on a CPU")
@pytest.mark.parametrize("broken", thin([False, True], True))
def test_the_program_that_measures(broken, monkeypatch, capsys):
    """It checks, times, logs and writes; where the clocks fail, the times are there all the same."""
    made, kept = [], []
    copy, new_log = clocks.Log.copy, clocks.Log.__init__

    def keep_log(self, *args):
        new_log(self, *args)
        made.append(self)

    def keep_copy(self, kernel, chunks):
        if broken and kernel == "fused":
            raise RuntimeError("no clocks")
        return copy(self, kernel, chunks)

    def note(first, second, role, pair, address, roles, pairs):
        assert address == made[0].memory.data_ptr()
        place = ((played_gluon.PLAY.pid * roles + role) * pairs + pair) * 2
        made[0].memory[place : place + 2] = torch.tensor([first, second])

    monkeypatch.setattr(clocks, "SHAPES", [(1, 128, 1, 2)])
    monkeypatch.setattr(clocks, "Program", PlayedProgram)
    monkeypatch.setattr(clocks.run, "median_ms", lambda calls, seconds: (calls[0](), (0.5, []))[1])
    monkeypatch.setattr(clocks.Log, "__init__", keep_log)
    monkeypatch.setattr(clocks.Log, "copy", keep_copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    play_clocks(monkeypatch, note)

    def keep(record):
        kept.append(json.loads(json.dumps(record)))
        clocks.say(record)

    wrong = clocks.measure(keep, "cpu")
    names = ["fused"] * (1 if broken else 2) + ["ahead"] * 2 + ["gla"] * 2
    assert [r["kernel"] for r in kept] == names, "times come first"
    assert all(r["ms"] == 0.5 and 0 < r["error"] <= r["budget"] for r in kept)
    assert [bool(r["roles"]) for r in kept] == ([False] if broken else [False, True]) + [False, True] * 2
    assert wrong == (["fused at 1 x 128: no clocks"] if broken else [])
    assert "waits for ready" in capsys.readouterr().out
    assert all(waits_timeline.spans(role) for r in kept for role in r["roles"])


COMPILED = """
import json, sys
sys.path[:0] = ["tools", "benchmarks", "src"]
import clocks, compile_kernels, tempfile, torch
with tempfile.TemporaryDirectory() as cache:
    compile_kernels.begin(cache)
    x = {n: torch.empty(2, 8192, 16, 128, dtype=torch.bfloat16, device="meta") for n in "qkvg"}
    one = {n: x["g"][..., 0] for n in ("g", "beta")}
    for kernel in clocks.MODULES:
        copy = clocks.clocked(clocks.module_of(kernel), 1 << 40, 128)
        launch = clocks.planned(kernel, copy.module, x if kernel == "gla" else x | one).launches[-1]
        row, ptx = compile_kernels.compiled(launch, 90), compile_kernels.compile_launch(launch).asm["ptx"]
        print("copy", json.dumps([row["broken"], row["shared"], copy.roles, ptx]))
"""


@pytest.mark.deep
def test_the_compiled_copies_read_a_clock_on_both_sides_of_each_wait():
    lines = in_process("-c", COMPILED).splitlines()
    copies = [json.loads(line[5:]) for line in lines if line.startswith("copy ")]
    assert len(copies) == len(clocks.MODULES)
    kinds = {"%clock64": "clock", "mbarrier.try_wait": "wait", "%globaltimer": "timer", "st.global.b64": "store"}
    for broken, shared, roles, ptx in copies:
        assert broken == [] and shared <= 232448
        events = [kind for line in ptx.splitlines() for text, kind in kinds.items() if text in line]
        text, sites = " ".join(events), sum(len(sites) for _, sites in roles)
        assert text.count("clock wait clock store store") == events.count("wait") == sites
        assert text.count("clock timer store store") == events.count("timer") == 2 * len(roles)
        assert len(events) == 5 * sites + 4 * 2 * len(roles), "and nothing else"
