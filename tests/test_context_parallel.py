"""Tokens split over processes: forward and gradients against the float64 recurrence of the whole sequence."""

import contextlib
import datetime
import functools
import itertools
import os
import re
import time
import weakref
from unittest import mock

import played_gluon
import pytest
import torch
from cases import DELTA, F64, LADDER, LINEAR, error, inputs, meta_tokens, thin
from harness import BF16, CUDA, F16, F32, HERE, anywhere, budgets, compare
from harness import results as kernel_results
from played_gluon import on_hopper, played_here
from problems import MILD
from problems import problem as delta_problem
from ranks import SHORT, Pool
from torch import distributed as dist

import gla_ref
from gla_ref import context_parallel, kernels
from gla_ref.kernels import kda
from gla_ref.kernels.hopper import FASTER
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of
from gla_ref.kernels.launch.versions import release
from gla_ref.kernels.portable import border
from gla_ref.mechanisms import MECHANISMS
from gla_ref.over_ranks import planning
from gla_ref.over_ranks.agreement import GRACE, Agreement, Lookout
from gla_ref.over_ranks.exchange import Ranks
from gla_ref.over_ranks.maps import Maps, Walk, read_map, write_map

T, K, V = 40, 3, 5
SPLITS = {1: [40], 2: [13, 27], 3: [24, 0, 16], 5: [0, 9, 3, 28, 0]}
PACKED = [0, 3, 9, 9, 30, 40, 40]  # sequences within a piece, across several, empty ones, one of which is the last
MECHANISMS_HERE = tuple(m for m in (*LINEAR, *DELTA) if hasattr(context_parallel, m))


@pytest.fixture(scope="module")
def pool():
    """Five processes for all tests of this file."""
    pool = Pool(5)
    yield pool
    pool.close()


def problem(mechanism, ends=None, kind="logsigmoid/16", B=2, dtype=F64, seed=0, T=T):
    """(tensors by name with do, dS and S; cu_seqlens)"""
    B = B if ends is None else 1
    args, named = inputs(mechanism, B, T, 2, K, V, kind=kind, g_v=mechanism == "gla", seed=seed)
    x = dict(zip(MECHANISMS[mechanism].required, args, strict=True), **named)
    N, rng = B if ends is None else len(ends) - 1, torch.Generator().manual_seed(seed)
    x["S"] = torch.randn(N, *x.pop("initial_state").shape[1:], generator=rng, dtype=F64)
    x["do"] = torch.randn(x["v"].shape, generator=rng, dtype=F64)
    x["dS"] = torch.randn(x["S"].shape, generator=rng, dtype=F64)
    return {n: y.to(dtype) for n, y in x.items()}, None if ends is None else torch.tensor(ends)


def results(form, x, cu, **options):
    """o, final state, and the gradients of everything."""
    leaves = {n: y.clone().requires_grad_() for n, y in x.items() if n not in ("do", "dS")}
    tokens = {n: y for n, y in leaves.items() if n != "S"}
    o, S = form(**tokens, initial_state=leaves["S"], cu_seqlens=cu, **options)
    grads = torch.autograd.grad((o, S), list(leaves.values()), (x["do"], x["dS"]))
    return {"o": o.detach(), "S": S.detach(), **{f"d{n}": d for n, d in zip(leaves, grads, strict=True)}}


def piece(rank, group, mechanism, x, cu, lengths, change=None, **options):
    """One rank's results of its tokens; `change` is the name of a FAULT, which is rank 1's."""
    a = sum(lengths[:rank])
    own = {n: y if n in ("S", "dS") else y[:, a : a + lengths[rank]] for n, y in x.items()}
    call = {"x": own, "cu": cu, "lengths": lengths, "group": group, **options}
    if change and rank == 1:
        FAULTS[change][0](call)
    return results(getattr(context_parallel, mechanism), **call)


def in_rows(rank, group, *args, **options):
    """As `piece`, where one segment a rank would not fill a GPU."""
    with mock.patch.object(planning, "side_by_side", lambda *_: 4):
        return piece(rank, group, *args, scale=0.3, **options)


def whole(parts):
    """The whole of what ranks have; of a state, each row is on one rank and zeros on the others."""
    return {n: sum(p[n] for p in parts) if n in ("S", "dS") else torch.cat([p[n] for p in parts], 1) for n in parts[0]}


def ask(pool, n, mechanism, x, cu, lengths=None, function=piece, **options):
    return whole(pool.ask(n, functools.partial(function, **options), mechanism, x, cu, lengths or SPLITS[n]))


def check(found, exact, most=1e-10):
    errors = {n: error(found[n], exact[n]) for n in exact}
    assert max(errors.values()) < most, errors


CASES = thin(
    [(m, n, exchange) for m in MECHANISMS_HERE for n in SPLITS for exchange in ("all-gather", "pipeline")],
    ("gla", 2, "all-gather"),
)


@pytest.mark.parametrize("mechanism, n, exchange", CASES)
def test_pieces_are_the_whole(pool, mechanism, n, exchange):
    for ends in (None, PACKED):
        x, cu = problem(mechanism, ends)
        exact = results(gla_ref.FORMS[mechanism]["recurrent"], x, cu)
        check(ask(pool, n, mechanism, x, cu, exchange=exchange), exact)


def in_autocast(rank, group, *args, **options):
    """As `piece`, with the call, and not its gradients, in autocast."""
    call = getattr(context_parallel, args[0])

    def inside(*args, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args, **options)

    with mock.patch.object(context_parallel, args[0], inside):
        return piece(rank, group, *args, **options)


def all_in_autocast(*args, **options):
    """As `piece`, with its gradients, too, in autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return piece(*args, **options)


@pytest.mark.parametrize("exchange", ["all-gather", "pipeline"])
@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
def test_autocast_changes_nothing(pool, mechanism, exchange):
    """Of gradients that are asked for inside it PyTorch rounds the reference's products, and no more."""
    x, cu = problem(mechanism, dtype=torch.float32)
    functions = in_autocast, all_in_autocast, piece
    inside, within, outside = (ask(pool, 2, mechanism, x, cu, function=f, exchange=exchange) for f in functions)
    assert all(torch.equal(inside[n], outside[n]) for n in outside)
    assert all(torch.equal(within[n], outside[n]) for n in ("o", "S"))
    check(within, outside, 0.15)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["zero", "-20", "-1e3", "-inf", "many resets", "one strong channel"])
def test_gate_ladder(pool, kind):
    for mechanism in ("gla", "simple_gla", "gated_delta_rule", "kda"):
        if (mechanism, kind) != ("simple_gla", "one strong channel"):
            x, cu = problem(mechanism, PACKED, kind)
            check(ask(pool, 3, mechanism, x, cu), results(gla_ref.FORMS[mechanism]["recurrent"], x, cu))


@pytest.mark.deep
@pytest.mark.parametrize("ends", [[0, 13, 40], [0, 12, 13, 14, 40], [0, 0, 40], [0, 40], [0, 13, 13, 13, 40, 40]])
def test_boundaries_on_borders(pool, ends):
    """A sequence that begins or ends where a piece does, and a token beside it."""
    for mechanism in ("gla", "delta_rule"):
        x, cu = problem(mechanism, ends)
        exact = results(gla_ref.FORMS[mechanism]["recurrent"], x, cu)
        check(ask(pool, 2, mechanism, x, cu), exact)
        check(ask(pool, 5, mechanism, x, cu, [0, 13, 0, 27, 0], exchange="pipeline"), exact)


@pytest.mark.deep
@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
def test_same_segments_same_bits(pool, mechanism):
    """The number of ranks and the exchange change nothing, to the last bit, in float32."""
    for ends in (None, PACKED):
        x, cu = problem(mechanism, ends, dtype=torch.float32)
        one = ask(pool, 1, mechanism, x, cu, segment=8)
        check(one, results(gla_ref.FORMS[mechanism]["recurrent"], {n: y.double() for n, y in x.items()}, cu), 1e-4)
        for n, lengths in ((2, [8, 32]), (3, [16, 0, 24]), (5, [8] * 5)):
            for exchange in ("all-gather", "pipeline"):
                other = ask(pool, n, mechanism, x, cu, lengths, segment=8, exchange=exchange)
                assert all(torch.equal(one[name], other[name]) for name in one)
        again = ask(pool, 2, mechanism, x, cu, [20, 20])
        assert not torch.equal(one["o"], again["o"]), "another grid rounds otherwise: the comparison sees a bit"


@pytest.mark.deep
@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
def test_segments_side_by_side(pool, mechanism):
    """As on a GPU that one segment does not fill: rows of a batch, whose maps are composed before they are sent."""
    x, cu = problem(mechanism)
    exact = results(gla_ref.FORMS[mechanism]["recurrent"], x, cu, scale=0.3)
    for exchange in ("all-gather", "pipeline"):
        check(ask(pool, 3, mechanism, x, cu, [20, 12, 8], in_rows, exchange=exchange), exact)


@pytest.mark.deep
def test_long_pieces_have_many_chunks(pool):
    for mechanism in ("gla", "gated_delta_rule"):
        x, cu = problem(mechanism, T=300, B=1)
        check(ask(pool, 2, mechanism, x, cu, [170, 130]), results(gla_ref.FORMS[mechanism]["recurrent"], x, cu))


def by_other_ways(rank, group, x, lengths, way):
    """Through a mesh, compiled, or with an initial state, in a second call, which only the first rank has."""
    a = sum(lengths[:rank])
    own = {n: y[:, a : a + lengths[rank]] for n, y in x.items() if n not in ("S", "dS", "do")} | {"lengths": lengths}
    if way == "mesh":
        mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        return context_parallel.gla(**own, group=mesh)[0]
    if way == "compiled":
        return torch.compile(lambda **own: 2 * context_parallel.gla(**own, group=group)[0], backend="eager")(**own) / 2
    context_parallel.gla(**own, group=group)
    return context_parallel.gla(**own, group=group, initial_state=None if rank else x["S"])[0]


@pytest.mark.deep
@pytest.mark.parametrize("way", ["mesh", "compiled", "state"])
def test_other_ways_to_call(pool, way):
    x, _ = problem("gla")
    tokens = {n: y for n, y in x.items() if n not in ("S", "dS", "do")}
    exact, _ = gla_ref.gla.recurrent(**tokens, initial_state=x["S"] if way == "state" else None)
    assert error(torch.cat(pool.ask(3, by_other_ways, x, SPLITS[3], way), 1), exact) < 1e-10


def a_model(rank, group, *args):
    import test_models_over_ranks  # the others here need no model

    return test_models_over_ranks.piece(rank, group, *args)


def test_a_language_model(pool):
    """One of the cases of test_models_over_ranks.py."""
    import test_models_over_ranks as models

    tokens, cu = models.words(1), torch.tensor(models.PACKED)
    models.hold(pool.ask(2, a_model, "gla", tokens, None, cu, [20, 20]), models.alone("gla", tokens, cu_seqlens=cu))


def as_a_subject(rank, group):
    """The check kit's report of a right function; more in test_check_over_ranks.py."""
    from gla_ref import check

    subject = check.OverRanks(context_parallel.gla, group, control=group)
    if rank:
        return subject.serve()
    report = check.kernel("gla", subject, only="square")
    subject.close()
    return report.ok, f"{report}"


def test_the_check_kit_takes_it(pool):
    ok, report = pool.ask(2, as_a_subject)[0]
    assert ok, report


# What goes wrong: an error on every rank, with the rank and the argument. FAULTS has the changes of one rank's call.


def on_every_tensor(change):
    return lambda call: call["x"].update({n: change(n, y) for n, y in call["x"].items()})


def with_own(**named):
    """A call with arguments that only this rank has."""
    return lambda call: call.update(named)


def differs(name, first, second):
    return rf"{name}: expected the same on every rank, got {first} on rank 0 and {second} on rank 1"


FEWER_HEADS = on_every_tensor(lambda n, y: y[:, :1] if n in ("S", "dS") else y[:, :, :1])
FEWER_TOKENS = on_every_tensor(lambda n, y: y if n in ("S", "dS") else y[:, 1:])
FAULTS = {
    "another size": (
        lambda call: call["x"].update(k=call["x"]["k"][..., 1:]),
        r"k: expected shape \[B T H K\] with K = 3 as in q, got \[2, 27, 2, 2\]",
    ),
    "fewer heads": (FEWER_HEADS, differs("q", r"\[2, T, 2, 3\] .*", r"\[2, T, 1, 3\] .*")),
    "another dtype": (on_every_tensor(lambda n, y: y.float()), differs("q", ".*float64 on cpu", ".*float32 on cpu")),
    "fewer tokens": (FEWER_TOKENS, "lengths: expected 26 for rank 1, the length of q, got 27"),
    "other lengths": (with_own(lengths=[14, 27]), differs("lengths", r"\[13, 27\]", r"\[14, 27\]")),
    "another scale": (with_own(scale=2.0), differs("scale", "0.57735.*", "2.0")),
    "another exchange": (with_own(exchange="pipeline"), differs("exchange", "None", "pipeline")),
    "no gate on values": (lambda call: call["x"].pop("g_v"), differs("g_v", ".*", "None")),
    "other boundaries": (
        with_own(cu=torch.tensor([0, 4, 9, 9, 30, 40, 40])),
        differs("cu_seqlens", r"\[0, 3, 9, .*", r"\[0, 4, 9, .*"),
    ),
    "boundaries that fall": (
        with_own(cu=torch.tensor([0, 9, 3, 9, 30, 40, 40])),
        "cu_seqlens: expected to rise from 0 to T = 40 without falling, got",
    ),
    "hangs": (lambda call: time.sleep(3 * SHORT.total_seconds()), None),
    "dies": (lambda call: os._exit(1), None),
}
TOLD = [name for name, (_, message) in FAULTS.items() if message]


REFUSED = {
    "q is no tensor": (dict(q=[1.0]), r"q: expected a torch.Tensor, got list"),
    "g is missing": (dict(g=None), r"g: expected a torch.Tensor of shape \[B T H K\], got None"),
    "k is short": (dict(k=torch.zeros(2, 3, 2, 3, dtype=F64)), r"k: expected shape .* T = 40 as in q"),
    "q has too few axes": (dict(q=torch.zeros(2, dtype=F64)), r"q: expected 4 axes"),
    "lengths": (dict(lengths=[20, 20]), r"lengths: expected 1 token counts, one per rank, got \[20, 20\]"),
    "lengths of strings": (dict(lengths=["40"]), r"lengths: expected 1 token counts"),
    "lengths is a number": (dict(lengths=40), r"lengths: expected a sequence of token counts or None, got int"),
    "segment": (dict(segment=0), r"segment: expected a chunk length of at least 1, got 0"),
    "exchange": (dict(exchange="ring"), r"exchange: expected all-gather, pipeline or None, got 'ring'"),
    "cu_seqlens is a list": (dict(cu_seqlens=[0, 40]), r"cu_seqlens: expected a torch.Tensor, got list"),
    "cu_seqlens with a batch": (dict(cu_seqlens=torch.tensor([0, 40])), r"cu_seqlens: .* batch size B = 1, got B = 2"),
    "state": (dict(initial_state=torch.zeros(2, 2, 5, 3)), r"initial_state: expected shape .*, got \[2, 2, 5, 3\]"),
    "scale": (dict(scale="1"), r"scale: expected a finite number or None, got '1'"),
    "group": (dict(group=1), r"group: expected a process group that has this rank, or a DeviceMesh, got 1"),
}


def refuse(rank, group, given):
    context_parallel.gla(**{"group": group, **given})


@pytest.mark.deep
@pytest.mark.parametrize("case", REFUSED)
def test_bad_argument(pool, case):
    change, message = REFUSED[case]
    x, _ = problem("gla")
    given = {n: x[n] for n in "qkvg"} | change
    ((ok, error),) = pool.tell(pool.group("1", 1), refuse, given)
    assert not ok and re.match(message, error[0]), error


def errors_of(pool, group, change, x, cu, **options):
    """The message of every rank of a group of two, and how many seconds it took."""
    answers = pool.tell(group, functools.partial(piece, change=change, **options), "gla", x, cu, SPLITS[2])
    assert not any(ok for ok, _ in answers), "no rank may go on"
    return [error[:2] for _, error in answers]


@pytest.mark.deep
@pytest.mark.parametrize("change", TOLD)
def test_ranks_differ(pool, change):
    """In a call of a new kind; the group is none the worse for it."""
    x, cu = problem("gla", PACKED if "boundaries" in change else None)
    group = pool.group(change, 2)
    for message, _ in errors_of(pool, group, change, x, cu):
        assert re.search(FAULTS[change][1], message), message
    check(whole(pool.ask(group, piece, "gla", x, cu, SPLITS[2])), results(gla_ref.gla.recurrent, x, cu))


@pytest.mark.deep
def test_other_boundaries(pool, record_property):
    """Boundaries are looked at in every call on a CPU."""
    x, cu = problem("gla", PACKED)
    group = pool.group("boundaries", 2)
    pool.ask(group, piece, "gla", x, cu, SPLITS[2])
    for message, seconds in errors_of(pool, group, "other boundaries", x, cu):
        assert re.search(FAULTS["other boundaries"][1], message), message
        record_property("a rank is told of other boundaries", round(seconds, 2))


@pytest.mark.deep
@pytest.mark.parametrize("change", ["another scale", "another dtype", "another size"])
@pytest.mark.parametrize("exchange", ["all-gather", "pipeline"])
def test_one_rank_is_called_anew(pool, exchange, change, record_property):
    """Rank 1 asks, or refuses, while rank 0 waits for a state: both say at once which argument differs."""
    x, cu = problem("gla")
    group = pool.group(f"anew {exchange} {change}", 2)
    call = functools.partial(piece, exchange=exchange)
    pool.ask(group, call, "gla", x, cu, SPLITS[2])
    for message, seconds in errors_of(pool, group, change, x, cu, exchange=exchange):
        assert re.search(FAULTS[change][1], message), message
        record_property(f"a rank is told of {change} ({exchange})", round(seconds, 2))


@pytest.mark.deep
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("change", ["hangs", "dies"])
def test_a_rank_is_lost(pool, change, known, record_property):
    """Before a new kind of call is agreed upon, or in the exchange of one that was."""
    here = pool if change == "hangs" else Pool(2)
    x, cu = problem("gla")
    group = here.group(f"lost {known}", 2, SHORT)
    if known:
        here.ask(group, piece, "gla", x, cu, SPLITS[2])
    (message, seconds), _ = errors_of(here, group, change, x, cu)
    said = "rank 1 died or hangs" if known else f"rank 1 did not make this call within {SHORT}"
    assert re.search(said, message), message
    missed = f"a rank that {change} is missed, after the {SHORT.total_seconds():.0f} s of the group"
    record_property(missed, round(seconds, 2))
    if here is not pool:
        here.close()


@pytest.mark.deep
def test_a_lost_rank_is_not_given_an_old_reason(pool):
    """Rank 1 has given up a call before, and made another since; now it hangs, and has said nothing of that."""
    x, cu = problem("gla")
    group, call = pool.group("old reason", 2, SHORT), functools.partial(piece, exchange="all-gather")
    for scale in (1.0, 2.0):
        pool.ask(group, functools.partial(call, scale=scale), "gla", x, cu, SPLITS[2])
    for message, _ in errors_of(pool, group, "another scale", x, cu, scale=1.0, exchange="all-gather"):
        assert re.search("rank [01] makes another call than rank [01]", message), message  # both know both calls
    pool.ask(group, functools.partial(call, scale=1.0), "gla", x, cu, SPLITS[2])
    (message, _), _ = errors_of(pool, group, "hangs", x, cu, scale=1.0, exchange="all-gather")
    assert "rank 1 died or hangs" in message, message


def refused_and_repeated(rank, group, x):
    """A call that all know, which rank 1 first makes with arguments that do not fit, then one of a new kind.

    Rank 0 does not look for questions while it waits, as on a GPU, and rank 1 is slow to say that it goes on.
    """

    def slow(agreement, of_all):
        time.sleep(0.5)
        took_part(agreement, of_all)

    took_part, change = Agreement.took_part, mock.patch.object(Agreement, "took_part", slow)
    call = functools.partial(context_parallel.gla, **{n: x[n] for n in "qvg"}, group=group, exchange="all-gather")
    with mock.patch("gla_ref.over_ranks.exchange.PATIENCE", 5.0), change if rank == 1 else contextlib.nullcontext():
        call(k=x["k"], scale=1.0)
        if rank == 1:
            with pytest.raises(ValueError, match="k: expected"):
                call(k=x["k"][..., 1:], scale=1.0)
        call(k=x["k"], scale=1.0)
        return call(k=x["k"], scale=2.0)[0]


@pytest.mark.deep
def test_an_unread_refusal_is_over(pool):
    """Once the rank that refused has taken part in a later exchange, a question is not answered by that refusal."""
    x, _ = problem("gla")
    pool.ask(pool.group("refusal", 2), refused_and_repeated, x)


def destroyed(rank, group):
    own = dist.new_group([rank], use_local_synchronization=True)
    here = weakref.ref(own), weakref.ref(Ranks.of(own))
    dist.destroy_process_group(own)
    del own
    return [x() for x in here]


def test_a_destroyed_group_is_let_go(pool):
    assert pool.ask(1, destroyed) == [[None, None]]


def test_a_gpu_waits_in_vain(capfd):
    """Only the lookout knows: on rank 0 the work of an exchange never ends, and rank 1 has said nothing."""
    store, limit = dist.HashStore(), datetime.timedelta(seconds=1)
    store.set_timeout(limit)
    group = mock.Mock(get_group_store=lambda: store)
    with mock.patch.object(dist, "get_rank", lambda _: 0), mock.patch.object(dist, "get_world_size", lambda _: 2):
        ranks = Ranks(group)
    ranks.lookout = lookout = Lookout(ranks.agreement)
    lookout.latest = mock.Mock(is_completed=lambda: True), {"q": "[1]"}, [1]
    time.sleep(1.2 * limit.total_seconds())
    assert lookout.is_alive() and not capfd.readouterr().err
    lookout.latest = mock.Mock(is_completed=lambda: False), {"q": "[1]"}, [1]
    lookout.join(limit.total_seconds() + GRACE + 1)
    assert "gla_ref.context_parallel, rank 0" in (said := capfd.readouterr().err)
    assert "rank 1 died or hangs" in said
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        ranks.watch(mock.Mock(is_completed=lambda: True), {"q": "[1]"}, [1])
    assert ranks.lookout.is_alive(), "one that has spoken is replaced"


# The kernels of maps, in this process alone.


@anywhere
@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
def test_kernels_find_maps(mechanism):
    """In both directions kernels find of a piece what the references do, also in segments and of wide states."""
    B, T, H = (2, 40, 2) if mechanism in DELTA else (1, 270, 1)  # few heads of a long piece: in segments
    args, _ = inputs(mechanism, B, T, H, 16, 32, kind="many resets" if mechanism == "gla" else "logsigmoid/16")
    x = dict(zip(MECHANISMS[mechanism].required, args, strict=True))
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    forms = gla_ref.FORMS[mechanism]
    exact = Walk(forms["recurrent"], False, 0.3, F64)
    by_kernel = Walk(forms["triton"], True, 0.3, torch.float32)
    low = {n: y.to(HERE, torch.float32) for n, y in x.items()}
    for right, found in (
        (write_map(exact, x).map, write_map(by_kernel, low).map),
        (read_map(exact, x, do), read_map(by_kernel, low, do.to(HERE, torch.float32))),
    ):
        for a, b in zip((*right.M, right.X), (*found.M, found.X), strict=True):
            assert a.shape == b.shape and error(b.cpu(), a) < 1e-5


def check_maps_on_hopper(mechanism, B, T, K, V, reads, kind=MILD):
    """X is the state from zeros, M the state from the unit matrix with values of zero, the reads are that call's o."""
    options = {"kind": kind, "dtype": BF16, "gates": F32, "S": 0.0, "scale": 0.3}
    x, of_X = delta_problem(mechanism, B, T, 1, K, V, **options)
    unit = torch.eye(K, dtype=F64).expand(B, 2, K, K)
    y = {n: None if a is None else a.to("cpu", F64) for n, a in x.items()} | {"S": unit, "dS": unit}
    y["v"] = y["do"] = torch.zeros(B, T, 2, K, dtype=F64)
    _, of_M = budgets(mechanism, y, {n: F32 if n in ("S", "dS", "g", "beta") else BF16 for n in y}, scale=0.3)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if CUDA:
        X, M, o, _ = border.written(*named.values(), scale=0.3, reads=reads)
    else:
        call = border.Written(*(spec_of(n, a) for n, a in named.items()), 0.3, reads)
        plan = border.plan_written(CLASSES["sm_90"], call)
        assert plan.name.startswith("hopper") and "carry_maps" not in [x.name for x in plan.launches]
        X, M, o, *_ = played_gluon.play(plan, {n: a for n, a in named.items() if a is not None})
        X, M = X.split((V, K), -1) if M is None else (X, M)
    compare({"S": X}, {"S": of_X["S"]})
    compare({"S": M} | ({"o": o} if reads else {}), {n: of_M[n] for n in ("S", "o")})


@played_here
@pytest.mark.parametrize("mechanism", DELTA)
@pytest.mark.parametrize("K, V, reads", thin([(64, 128, False), (128, 64, True)], (128, 64, True)))
def test_hopper_kernels_find_maps(mechanism, K, V, reads):
    """The walks of the forward pass, played from their source."""
    check_maps_on_hopper(mechanism, 1, 70, K, V, reads)


def check_sums_on_hopper(B, T, K, V, kind=MILD, dtype=BF16):
    """M S + X is the final state, and M dS + 0.3 A the gradient of the state S before the first token."""
    x, judged = delta_problem("gla", B, T, 1 + CUDA, K, V, kind=kind, dtype=dtype, scale=0.3)
    M = x["g"].double().sum(1).exp()
    for backwards, names in ((False, "kvg"), (True, ("q", "do", "g")))[: 2 if dtype == BF16 else 1]:
        named = dict(zip("kvg", (x[n] for n in names), strict=True))
        plan = border.plan_added(CLASSES["sm_90"], border.Added(*(spec_of(*y) for y in named.items()), backwards))
        assert plan.name == "hopper" or backwards and release() < FASTER
        assert ("carry" in [step.name for step in plan.launches]) == (T >= 1024)
        X, decay = border.added(**named, backwards=backwards) if CUDA else played_gluon.play(plan, named)[:2]
        torch.testing.assert_close(decay.double(), M, rtol=1e-4, atol=1e-37)
        if backwards:
            compare({"dS0": decay[..., None] * x["dS"] + 0.3 * X}, judged)
        else:
            compare({"S": decay[..., None] * x["S"] + X}, judged)


WALKS = [(200, *x, BF16) for x in ((64, 128, MILD), (128, 64, "many resets"), (72, 40, "mild and strong chunks"))]
WALKS.append((1050, 64, 64, MILD, F16))  # in segments


@played_here
@pytest.mark.parametrize("T, K, V, kind, dtype", thin(WALKS, *WALKS[:2], WALKS[3]))
def test_hopper_walk_adds_up(T, K, V, kind, dtype):
    """GLA's map, both ways, by the walk that adds up segments of one GPU's call."""
    check_sums_on_hopper(1, T, K, V, kind, dtype)


@played_here
def test_a_walk_on_hopper_goes_on_with_what_its_map_has_prepared():
    x, judged = delta_problem("kda", 1, 70, 1, 128, 64, dtype=BF16, gates=F32, scale=0.3)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    plan = border.plan_written(CLASSES["sm_90"], border.Written(*(spec_of(n, a) for n, a in named.items()), 0.3, True))
    made = played_gluon.play(plan, named)[3:-1]
    named |= {"initial_state": x["S"]} | dict(zip(kda.Resumed._fields[6:12], made, strict=True))
    plan = kda.plan_resumed(CLASSES["sm_90"], kda.Resumed(*(spec_of(n, a) for n, a in named.items()), 0.3))
    assert [x.name for x in plan.launches] == ["walk"]
    o, S, _ = played_gluon.play(plan, named)
    compare({"o": o, "S": S}, {n: judged[n] for n in ("o", "S")})


@on_hopper
def test_a_walk_that_goes_on_gives_equal_bits():
    """As `kda` that prepares its chunks itself: o, the final state and every gradient."""
    x, _ = delta_problem("kda", 2, 330, 2, 128, 128, dtype=BF16, gates=F32, scale=0.3, kind="mild and strong chunks")

    def resumed(*tokens, initial_state, cu_seqlens):
        *_, made = border.written(*(y.detach() for y in tokens), scale=0.3, reads=True)
        assert len(made) == 6
        return kda.Resume.apply(*tokens, initial_state, *made, 0.3)

    right = kernel_results(functools.partial(kda.kda, scale=0.3, path="fused", kernel="hopper"), x)
    found = kernel_results(resumed, x)
    assert found.keys() == right.keys() and all(torch.equal(y, right[n]) for n, y in found.items())


@on_hopper
@pytest.mark.parametrize("mechanism", DELTA)
def test_hopper_kernels_find_maps_on_a_gpu(mechanism):
    for T, K in ((1, 128), (330, 64)):
        check_maps_on_hopper(mechanism, 2, T, K, 128, True)
    for reads in (False, True):
        check_maps_on_hopper(mechanism, 1, 330, 128, 128, reads, kind="mild and strong chunks")


@on_hopper
@pytest.mark.parametrize("kind", LADDER)
def test_hopper_walk_adds_up_on_a_gpu(kind):
    for dtype in (BF16, F16):
        check_sums_on_hopper(2, 330, 128, 128, kind, dtype)


@on_hopper
@pytest.mark.parametrize("T, K, V", [(1, 128, 128), (330, 64, 128), (330, 128, 72), (1100, 64, 64), (1100, 128, 128)])
def test_hopper_walk_adds_up_pieces_of_any_size(T, K, V):
    check_sums_on_hopper(1, T, K, V)


@on_hopper
@pytest.mark.parametrize("mechanism, gates", [("gla", BF16), ("kda", F32)])
@pytest.mark.parametrize("ends", [None, (0, 70, 70, 200, 330)])
def test_one_hopper_gpu_alone(mechanism, gates, ends):
    """KDA's walk goes on with what its map has prepared, unless the map sees zeros for some sequences' tokens."""
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, judged = delta_problem(mechanism, 1, 330, 1, 128, 128, dtype=BF16, gates=gates, ends=ends)
        found = kernel_results(getattr(context_parallel, mechanism), x, ends)
        compare(found, {n: judged[n] for n in found})
    finally:
        dist.destroy_process_group()


@anywhere
@pytest.mark.parametrize("rows", [1, 6])
def test_kernels_run_through_maps(rows):
    """Messages of three ranks, states that come into each, and between its segments: as the loops find them."""
    rng = torch.Generator().manual_seed(rows)
    every = Maps((torch.rand(2, 12, 4, rows, 1, generator=rng),), torch.randn(2, 12, 4, 6, 5, generator=rng))
    S = torch.zeros(2, 4, 6, 5)

    def check(found, right):
        assert error(found.cpu(), right) < 1e-6

    shapes = tuple((2, *y.shape[2:]) for y in (*every.M, every.X))
    for backwards in (False, True):
        right, _ = every.run(S, backwards)
        parts = [Maps(tuple(m[:, i : i + 4] for m in every.M), every.X[:, i : i + 4]) for i in (0, 4, 8)]
        there = [Maps(tuple(m.to(HERE) for m in p.M), p.X.to(HERE)) for p in parts]
        messages = torch.stack([border.composed(p.X, p.M, 7.0, backwards) for p in there])
        for message, part in zip(messages, parts, strict=True):
            own = part.composed(backwards)
            check(message, torch.cat([torch.tensor([7.0]), *(y.flatten() for y in (*own.M, own.X))]))
        for rank, part in enumerate(there):
            came = border.entered(messages, rank, shapes, 7.0, backwards)
            found, _ = border.crossed(part.X, part.M, came, backwards)
            check(found, right[:, 4 * rank : 4 * rank + 4])
            assert torch.equal(part.X.cpu(), parts[rank].X)
            assert border.entered(messages, rank, shapes, 8.0, backwards).isnan().all(), "other tags"


# The plan.


def test_plan_counts_bytes():
    """K V + K numbers a head for GLA, K V + K K for the delta rules, K V in a pipeline, and a tag; T plays no part."""
    numbers = {"linear_attention": 1, "simple_gla": 1, "gla": 128} | dict.fromkeys(DELTA, 128**2)
    for mechanism, decay in numbers.items():
        for T in (1024, 1 << 20):
            found = context_parallel.plan(mechanism, meta_tokens(mechanism, T), (T, T), exchange="all-gather")
            assert found.bytes == 4 * (16 * (128 * 128 + decay) + 1)
            found = context_parallel.plan(mechanism, meta_tokens(mechanism, T), (T, T), exchange="pipeline")
            assert found.bytes == 4 * (16 * 128 * 128 + found.blocks)


def test_plan_says_why():
    with pytest.raises(ValueError, match="mechanism: expected one of linear_attention, .* got 'softmax_attention'"):
        context_parallel.plan("softmax_attention", meta_tokens("gla"), (4096,) * 8)
    few = context_parallel.plan("gated_delta_rule", meta_tokens("gated_delta_rule"), (4096,) * 8)
    slow, sizes = context_parallel.LINKS["gloo"], meta_tokens("gla", H=64, K=256, V=512)
    large = context_parallel.plan("gla", sizes, (4096,) * 8, link=slow)
    assert few.exchange == "all-gather" and large.exchange == "pipeline" and large.blocks > 1
    assert "by the model of the link: all-gather of maps of 2,097,152 bytes" in str(few)
    wide = context_parallel.plan("gla", meta_tokens("gla", 65536), (65536,) * 2, multiprocessors=132)
    assert wide.walk == "triton" and wide.segments == (8, 8) and "side by side" in str(wide)
    delta = context_parallel.plan("delta_rule", meta_tokens("delta_rule"), (4096,), multiprocessors=132)
    assert delta.walk == "triton"
    assert context_parallel.plan("gla", meta_tokens("gla"), (4096,), packed=True, multiprocessors=132).segments == (1,)
    exact = context_parallel.plan("gla", meta_tokens("gla", dtype=torch.float64), (4096,), multiprocessors=132)
    assert exact.walk == "chunkwise" and "there is no kernel for torch.float64" in str(exact)


def test_plan_refuses():
    with pytest.raises(ValueError, match="exchange: expected all-gather, pipeline or None, got 'ring'"):
        context_parallel.plan("gla", meta_tokens("gla"), (4096,), exchange="ring")
    with pytest.raises(ValueError, match="segment: expected .* at least 1, got 0"):
        context_parallel.plan("gla", meta_tokens("gla"), (4096,), segment=0)


@pytest.mark.parametrize("mechanism", MECHANISMS_HERE)
@pytest.mark.parametrize("T", [1 << 15, 1 << 18])
def test_one_gpu_walks_a_piece_in_one_go(mechanism, T):
    """The segments of a piece fill the GPU, so no kernel cuts them once more and finds their states twice."""
    (n, _), H = context_parallel.plan(mechanism, meta_tokens(mechanism, T), (T, T), multiprocessors=132).segments, 16
    x = meta_tokens(mechanism, T // n, B=n)
    S = torch.empty(n, H, 128, 128, device="meta")
    for direction in ("forward", "backward"):
        found = kernels.plan(mechanism, *x.values(), initial_state=S, direction=direction, hardware="sm_90")
        assert not any(launch.name.startswith("carry") for launch in found.launches), found.why


def test_a_rank_has_the_kernels_of_one_gpu():
    """GLA on an H200: a rank's maps are added up by the walk that adds up the segments of one GPU (chapter 25)."""

    def named(plan):
        return [(step.kernel.fn.__module__.split(".")[-2], step.name) for step in plan.launches]

    def launches(n, S, direction):
        x = meta_tokens("gla", (1 << 19) // n, B=n).values()
        return named(kernels.plan("gla", *x, initial_state=S, direction=direction, hardware="sm_90"))

    S = torch.empty(8, 16, 128, 128, device="meta")
    k, v, g = (spec_of(name, x) for name, x in list(meta_tokens("gla", 1 << 16, B=8).items())[1:])
    for direction in ("forward", "backward"):
        added = border.plan_added(CLASSES["sm_90"], border.Added(k, v, g, direction == "backward"))
        alone, rank = launches(1, None, direction), launches(8, S, direction)
        assert sorted(alone) == sorted([*rank, *named(added), ("portable", "carry")])


def test_a_map_takes_the_kernels_that_a_call_takes():
    """Forwards those of o and the final state, backwards those of the gradient, whatever the strides of do."""
    seen = set()
    for gpu, dtype, gates, K, V in itertools.product(
        ("sm_80", "sm_90"), (BF16, F16, F32), (BF16, F32), (60, 64, 128, 256), (64, 128, 512)
    ):
        q, k, v, g = (torch.empty(2, 70, 3, D, dtype=dtype, device="meta") for D in (K, K, V, K))
        g, do = g.to(gates), v[:1, :1, :1, :1].expand_as(v)
        for direction, x in {"forward": (k, v, g), "backward": (q, do, g)}.items():
            call = border.Added(*(spec_of(*y) for y in zip("kvg", x, strict=True)), direction == "backward")
            named = kernels.plan("gla", q, k, v, g, direction=direction, hardware=gpu).name
            assert border.plan_added(CLASSES[gpu], call).name == named
            seen.add((direction, named))
    assert len(seen) == 4


def test_one_gpu_finds_the_states_of_linear_attention_once():
    """In segments, as ranks do: those of S in the forward pass, and those of R by the first walk back (chapter 25)."""
    for mechanism in ("linear_attention", "simple_gla"):
        x = meta_tokens(mechanism, 1 << 19)
        walks = {"forward": ["walk", "carry", "walk"], "backward": ["walk", "carry", "walk", "walk", "walk"]}
        for direction, names in walks.items():
            found = kernels.plan(mechanism, *x.values(), direction=direction, hardware="sm_90")
            assert [step.name for step in found.launches if step.name in names] == names
