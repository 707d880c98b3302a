"""Functions over ranks as subjects of the check: right ones pass; each mistake of theirs is caught."""

import datetime
import functools
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from ranks import Pool
from torch import distributed as dist

from gla_ref import check, context_parallel
from gla_ref.__main__ import main
from gla_ref.check import mistakes
from gla_ref.check._ranks import pieces
from gla_ref.over_ranks.exchange import Exchange
from gla_ref.over_ranks.maps import Maps
from gla_ref.over_ranks.segments import Segment

pytestmark = pytest.mark.deep
CONTROL = {}


def make_controls(rank, group):
    """Of every number of ranks a group that waits while the first of them computes what is right."""
    for n in (1, 2, 3):
        CONTROL[n] = dist.new_group(range(n), timeout=datetime.timedelta(hours=1))


@pytest.fixture(scope="module")
def pool():
    pool = Pool(3)
    pool.ask(3, make_controls)
    yield pool
    pool.close()


def examined(rank, group, mechanism, wrong=None, **options):
    """On the first rank what the report says; `wrong` is the name of an entry of WRONG."""
    with WRONG[wrong][0]() if wrong else mock.MagicMock():
        subject = check.OverRanks(getattr(context_parallel, mechanism), group, CONTROL[dist.get_world_size(group)])
        if rank:
            return subject.serve()
        report = check.kernel(mechanism, subject, **options)
        subject.close()
    return report.ok, f"{report}"


# What somebody may write who builds it anew, on the lines of context_parallel that it would stand in.


def exchange(change, *ways):
    """Another exchange of states in some ways (BACK); `change(exchange, maps, backwards, right)` gets the right one."""
    entering = Exchange.entering

    def wrong(self, maps, backwards=False):
        right = functools.partial(entering, self, backwards=backwards)
        return change(self, maps, backwards, right) if backwards in ways else right(maps)

    return lambda: mock.patch.object(Exchange, "entering", wrong)


FORTH, BACK = False, True


def inclusive(it, maps, backwards, right):
    first = it.ranks.rank == (it.ranks.size - 1 if backwards else 0)  # into which nothing comes
    return right(maps) if first else maps.run(right(maps), backwards)[1]


def nothing(it, maps, backwards, right):
    return torch.zeros_like(right(maps))


def undecayed(it, maps, backwards, right):
    return right(Maps(tuple(torch.ones_like(m) for m in maps.M), maps.X))


def empty(it, maps, backwards, right):
    if json.loads(it.facts["lengths"])[it.ranks.rank]:
        return right(maps)
    return right(Maps(tuple(torch.zeros_like(m) for m in maps.M), torch.zeros_like(maps.X)))


def from_the_left(self, maps, backwards, right):
    self.plan = self.plan._replace(exchange="all-gather")
    return self.gathered(maps, False)


def goes_on():
    """The sequence of the first token on the right, in place of that of the last one on the left, crosses a border."""
    right = Segment.__init__

    def wrong(self, a, e, is_first, is_last, total, cu):
        right(self, a, e, is_first, is_last, total, cu)
        if cu is not None:
            self.left = (cu <= a).sum().sub(1).view(1)
            same = self.left == self.right
            self.right_from_before, self.left_from_after = same & (a > 0), same & (e < total)
            self.of_left = torch.arange(a, e) < cu[self.left + 1]
            self.from_left, self.to_right = a > 0, cu[self.right + 1] >= e

    return mock.patch.object(Segment, "__init__", wrong)


def lost():
    """A sequence ends here if the rank has a token behind it."""
    right = Segment.__init__

    def wrong(self, a, e, is_first, is_last, total, cu):
        right(self, a, e, is_first, is_last, total, cu)
        if cu is not None and not is_last and a < e:
            self.end_here = self.end_here & ((cu[1:] != e) | (cu[:-1] == e))

    return mock.patch.object(Segment, "__init__", wrong)


WRONG = {  # what is wrong, ranks, cases to look at
    "nothing crosses": (exchange(nothing, FORTH, BACK), 2, "s[cqt]*"),
    "nothing crosses back": (exchange(nothing, BACK), 2, "[ps][aq]*"),
    "inclusive": (exchange(inclusive, FORTH), 2, "s[ct]*"),
    "inclusive, back": (exchange(inclusive, BACK), 2, "s[ct]*"),
    "no decay": (exchange(undecayed, FORTH, BACK), 3, "s[ct]*"),
    "no decay, back": (exchange(undecayed, BACK), 3, "s[ct]*"),
    "empty": (exchange(empty, FORTH, BACK), 2, "length 145"),
    "order": (exchange(from_the_left, BACK), 3, "s[ct]*"),
    "goes on": (goes_on, 2, "packed*"),
    "lost": (lost, 2, "packed*"),
}


def told(pool, n, *args, **options):
    return pool.ask(n, functools.partial(examined, **options), *args)[0]


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_caught(pool, wrong):
    _, n, only = WRONG[wrong]
    ok, report = told(pool, n, "gla", wrong, only=only)
    assert not ok, report


@pytest.mark.parametrize("mechanism", mistakes.LINEAR)
def test_right_ones_pass(pool, mechanism):
    for n in (1, 2, 3):
        ok, report = told(pool, n, mechanism, only="[ps]*" if n == 2 else "[ps][aq]*")
        assert ok, report


MODULE = """
import os, time
from gla_ref import context_parallel

if os.environ["RANK"] == "1":  # a machine with much to do: ranks start far apart
    time.sleep(float(os.environ["LATE"]))

def right(q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None, group=None):  # pieces of one length
    return context_parallel.gla(q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)

def raises(q, k, v, g, group=None):
    if group.rank():
        raise KeyError("no state here")
    return q, None

def hangs(q, k, v, g, group=None):
    if group.rank():
        time.sleep(100)
    return q, None

def stops(q, k, v, g, group=None):
    if group.rank():
        raise SystemExit(0)
    return q, None

def ends(q, k, v, g, group=None):
    os._exit(0)
"""


SHELL = [
    ("right", 0, [], 0, "gla on cpu"),
    ("raises", 0, [], 1, "rank 1: KeyError"),
    ("hangs", 4, ["--time-limit", "5"], 1, "no result after 5 s"),
    ("stops", 0, [], 1, "rank 1: SystemExit: 0"),
    ("ends", 0, [], 1, "mine:ends to return, but its process ended with status 0"),
]


@pytest.mark.deep
@pytest.mark.parametrize("name, late, options, status, said", SHELL)
def test_from_the_shell(tmp_path, name, late, options, status, said):
    """What has no short time limit of its own must not have one: other processes may keep this one waiting."""
    (tmp_path / "mine.py").write_text(MODULE)
    line = "-m torch.distributed.run --standalone --nproc-per-node 2 -m gla_ref check gla"
    command = [sys.executable, *line.split(), f"mine:{name}", "--ranks", "2", "--only", "s[cq]*", *options]
    path = os.pathsep.join(os.path.abspath(x) for x in sys.path)
    environment = os.environ | {"PYTHONPATH": path, "LATE": str(late)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) == bool(status) and said in printed, printed
    assert status or ": right (" in done.stdout and "T in multiples of 2" in done.stdout


def test_without_torchrun(capsys):
    with pytest.raises(SystemExit):
        main(["check", "gla", "gla_ref.gla:chunkwise", "--ranks", "2"])
    assert "--ranks: expected to be started by torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_pieces_cover_all_tokens():
    for ranks in (1, 2, 3, 5):
        found = [pieces(c.T, c.ends, ranks) for c in check.cases("gla")]
        assert all(sum(p) == c.T and len(p) == ranks for p, c in zip(found, check.cases("gla"), strict=True))
        assert ranks == 1 or any(0 in p for p in found) and any(max(p) > 2 * min(p) > 0 for p in found)
        assert len({*pieces(12 * ranks, None, ranks, even=True)}) == 1
