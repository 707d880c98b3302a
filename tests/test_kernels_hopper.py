"""The Hopper kernel of GLA: what it takes and refuses, anywhere; that it is right, on a Hopper GPU (pytest -m gpu)."""

import itertools
import pkgutil
from functools import partial

import played_gluon
import pytest
import torch
from cases import LADDER, error, inputs, thin
from harness import CUDA, compare, hold_in_parts, interpreted, results, tokens
from linear_problems import problem
from played_gluon import gluon, on_hopper, played_here

from gla_ref import FORMS, gates

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import explain, plan
from gla_ref.kernels.gla import Call, forward, gla
from gla_ref.kernels.gla import backward as gradient
from gla_ref.kernels.hopper import gluon_names
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of
from gla_ref.kernels.launch.program import variant

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [BF16, F16]
MILD, PATHS = "logsigmoid/16", ("fused", "segmented")
RUNS = 100  # a gradient was once wrong in 1 call of 100
hopper = FORMS["gla"]["triton_hopper"]


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def check(*sizes, path=None, ends=None, scale=None, **kw):
    """Forward, and all gradients (Hopper's own where it makes them), within the budgets of the portable kernel."""
    ends = ends and tuple(ends)
    x, judged = problem("gla", *sizes, ends=ends, scale=scale, **kw)
    compare(results(hopper, x, ends, path=path, scale=scale), judged)


# the plan

ON_HOPPER = partial(plan, "gla", hardware="sm_90")


@gluon
def test_the_plan_takes_it_where_it_can():
    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 512)
    found = ON_HOPPER(q, q, v, q)
    walk, mend = found.launches
    assert (found.name, walk.name, mend.name) == ("hopper", "walk", "mend")
    assert walk.grid == (4 * 3 * 2,) and "Gluon" in found.why[0]
    assert ON_HOPPER(q, q, v, q, kernel="portable").name == "portable"


@gluon
def test_a_plain_call_launches_the_page():
    """The page's walk, with flags, and `mend`; any other call launches the kernel that has all options."""
    from gla_ref.kernels.hopper import gla_forward
    from gla_ref.pages import gla_hopper

    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 64)
    walk, mend = ON_HOPPER(q, q, v, q).launches
    assert walk.kernel is gla_hopper.walk and mend.name == "mend" and walk.grid == (2 * 3,)
    assert walk.given("strong") == mend.given("strong") and (walk.given("STAGES"), walk.options["num_warps"]) == (2, 8)
    assert "gla_hopper.py" in explain("gla", q, q, v, q, hardware="sm_90")
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="meta")
    other = {
        "packed": ([meta(1, 300, 3, 64)] * 4, {"cu_seqlens": cu}),
        "with a state": ([q, q, v, q], {"initial_state": meta(2, 3, 128, 64, dtype=F32)}),
        "in segments": ([meta(1, 65536, 4, 128)] * 4, {}),
        "in float16": ([y.half() for y in (q, q, v, q)], {}),
        "with gates in float32": ([q, q, v, q.float()], {}),
        "of other sizes": ([q, q, meta(2, 300, 3, 72), q], {}),
    }
    for what, (x, options) in other.items():
        assert ON_HOPPER(*x, **options).launches[0].kernel is gla_forward.walk, what


@gluon
def test_a_new_length_of_a_plain_call_compiles_nothing():
    """Triton would compile lengths of 1, multiples of 16 and others apart."""

    def walk(T, H):
        q = meta(2, T, H, 64)
        return variant(ON_HOPPER(q, q, q, q, path="fused").launches[0], torch.device("cpu"))

    assert all(walk(T, H) == walk(300, 3) for T in (1, 64, 65, 3008) for H in (1, 3, 16))


REFUSED = [
    ("K of at most 128, not 192", lambda q: ((q := meta(2, 300, 3, 192)), q, q, q), {}),
    ("q is torch.float32", lambda q: (q.float(), q.float(), q.float(), q), {}),
    ("no gates on values", lambda q: (q, q, q, q), {"g_v": meta(2, 300, 3, 64)}),
    ("k of shape .* is not one that the copy engine reads", lambda q: (q, q.mT.contiguous().mT, q, q), {}),
]


@gluon
@pytest.mark.parametrize("message, given, options", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_it_does_not_take_is_named(message, given, options):
    """By the error of who asked for it, and by the portable plan's first reason."""
    x = given(meta(2, 300, 3, 64))
    found = ON_HOPPER(*x, **options)
    assert found.name == "portable"
    with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
        ON_HOPPER(*x, kernel="hopper", **options)


def test_other_gpus_and_other_tritons_are_told_why(monkeypatch):
    q = meta(2, 300, 3, 64)
    assert "the Hopper kernel is for sm_90, not sm_80" in explain("gla", q, q, q, q, hardware="sm_80")
    monkeypatch.setattr("gla_ref.kernels.hopper.missing", lambda: "gluon.something")
    found = ON_HOPPER(q, q, q, q)
    assert found.name == "portable" and "no gluon.something" in found.why[0]


@gluon
def test_states_of_segments_are_handed_on_only_if_the_gradient_cuts_alike(monkeypatch):
    """By an older Triton it is the portable kernel's, which has twice as many programs here."""
    monkeypatch.setattr("gla_ref.kernels.hopper.release", lambda: (3, 6))
    narrow, wide = meta(1, 65536, 4, 64), meta(1, 65536, 4, 128)
    *_, starts = ON_HOPPER(*[narrow] * 4).outputs
    assert starts is not None
    *_, starts = ON_HOPPER(*[wide] * 4).outputs
    assert starts is None
    assert plan("gla", *[wide] * 4, direction="backward", hardware="sm_90").name == "portable"


# the kernels played from their source, strong chunks interpreted, the gradient's plan


def played(x, ends=None, path=None, seed=0, ignored=None, backward=True):
    """Gradients as the Hopper kernels make them (or o and the final state), of inputs of `problem`."""
    from gla_ref.kernels.hopper import gla_backward as back
    from gla_ref.kernels.hopper import gla_forward as forth

    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    call = Call(*(x[n] for n in ("q", "k", "v", "g")), None, x["S"], cu, None, path)
    named = {n: y for n, y in call._asdict().items() if isinstance(y, torch.Tensor)}
    if not backward:
        found = forth.plan_forward(SM_90, forward.specs(call))
        o, S, *_, strong = played_gluon.play(found, named, seed, ignored)
        add_pairs([o], x, ends, strong, forward=True)
        return {"o": o, "S": S}
    named |= {n: x[n] for n in ("do", "dS") if x[n] is not None}
    more = {"starts": None, "do": x["do"], "dS": x["dS"], "need_dg": True}
    found = back.plan_backward(SM_90, gradient.specs(gradient.record(**call._asdict(), **more)))
    *made, _, dS0, strong = played_gluon.play(found, named, seed, ignored)
    add_pairs(made, x, ends, strong)
    return dict(zip(("dq", "dk", "dv", "dg", "dS0"), (*made, dS0), strict=True))


def add_pairs(made, x, ends, strong, C=64, forward=False):
    """The work of `mend_gradient` or, forward, `mend`, in float64: all pairs of strong chunks, one by one."""
    scale, (B, T, H, _) = x["q"].shape[-1] ** -0.5, x["q"].shape
    ends = ends or (0, T)
    for i_b, i_h, n in itertools.product(range(B), range(H), range(len(ends) - 1)):
        first = ends[n] // C + n if B == 1 else i_b * -(-T // C)
        for c, o_t in enumerate(range(ends[n], ends[n + 1], C)):
            if strong[first + c, i_h]:
                at = i_b, slice(o_t, min(o_t + C, ends[n + 1])), i_h
                more = pairs(*(x[m][at].double() for m in ("q", "k", "v", "g", "do")), forward)
                for y, z in zip(made, more, strict=True):
                    y[at] = (y[at].double() + scale * z).to(y.dtype)
                if not forward:
                    made[3][at][torch.isneginf(x["g"][at])] = 0


def pairs(q, k, v, g, do, forward=False):
    """(dq, dk, dv, dg over scale), or (o over scale), of the pairs of one chunk."""
    E = gates.segment_sum(g[None, None]).exp()[0, 0]  # [C C K], 0 above the diagonal
    dP = (do @ v.mT).tril()
    P = (q[:, None] * k[None] * E).sum(-1)
    if forward:
        return (P @ v,)
    dq, dk = (dP.tril(-1)[..., None] * k[None] * E).sum(1), (dP.tril(-1)[..., None] * q[:, None] * E).sum(0)
    own, net = dP.diagonal()[:, None], q * dq - k * dk
    return dq + own * k, dk + own * q, P.mT @ do, net.flip(0).cumsum(0).flip(0)


SM_90 = CLASSES["sm_90"]._replace(multiprocessors=8)
PACK = (0, 0, 33, 33, 40, 200, 264, 300)


@gluon
@pytest.mark.parametrize("what", gluon_names.RENAMED)
def test_either_name_will_do(what, monkeypatch):
    path, *names = gluon_names.RENAMED[what]
    module = pkgutil.resolve_name(path)
    for kept in names:
        with monkeypatch.context() as patch:
            for name in names:
                patch.delattr(module, name, raising=False)
            assert gluon_names.missing.__wrapped__() == f"{path}.{names[0]}"
            patch.setattr(module, kept, "found", raising=False)
            assert gluon_names.missing.__wrapped__() is None and gluon_names.named(what) == "found"


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "mild and strong chunks", "many resets"))
def test_the_source_makes_the_gradient(kind):
    """Played on a CPU, within the budgets of the portable kernel."""
    x, judged = problem("gla", 1, 150, 2, 64, 40, kind=kind, dtype=BF16)
    made = played(x)
    compare(made, {n: judged[n] for n in made})


SIZES = [
    ((2, 200, 1, 128, 128), None, "fused"),
    ((1, 70, 1, 72, 104), None, "fused"),
    ((1, 300, 1, 64, 128), PACK, "fused"),
    ((1, 300, 1, 128, 64), PACK, "segmented"),
    ((1, 700, 1, 64, 64), None, "segmented"),
]


@played_here
@pytest.mark.parametrize("size, ends, path", thin(SIZES, SIZES[1], SIZES[2]))
def test_the_source_at_other_sizes_packed_and_in_segments(size, ends, path):
    x, judged = problem("gla", *size, dtype=BF16, ends=ends)
    made = played(x, ends, path) | played(x, ends, path, backward=False)
    compare(made, {n: judged[n] for n in made})


PAGE = {
    "64": (1, 150, 2, 64, 64),
    "128/64": (1, 200, 1, 128, 64),
    "64/128": (1, 130, 1, 64, 128),
    "128": (1, 70, 1, 128, 128),
}


@played_here
@pytest.mark.parametrize("size", thin(PAGE, "64"))
@pytest.mark.parametrize("kind", thin(LADDER, MILD, "mild and strong chunks", "many resets"))
def test_the_page_and_the_kernel_with_options_make_the_same_bits(kind, size):
    """From a state of zeros, given or not, right and equal."""
    x, judged = problem("gla", *PAGE[size], kind=kind, dtype=BF16, large=0.0)
    plain, other = played(x | {"S": None}, backward=False), played(x, backward=False)
    compare(plain, {n: judged[n] for n in plain})
    assert all(torch.equal(y, other[n]) for n, y in plain.items())


@played_here
def test_the_page_marks_the_pairs_that_it_leaves_out():
    """Without flags, the rows of a head's strong chunk are NaN. The states, and so all other rows, are right."""
    import kernel_cases

    x, _ = problem("gla", 1, 200, 2, 64, 64, dtype=BF16, large=0.0)
    x["g"] = x["g"].clone()
    x["g"][:, 70, 1, 3] = -torch.inf
    right = played(x | {"S": None}, backward=False)
    found = kernel_cases.plan_gla_page(SM_90, *(spec_of(n, x[n]) for n in "qkvg"))
    o, S, _ = played_gluon.play(found, x)
    assert o[:, 64:128, 1].isnan().all() and torch.equal(S, right["S"])
    o[:, 64:128, 1] = right["o"][:, 64:128, 1]
    assert torch.equal(o, right["o"])


OF_PAGE = {f"{name} {s}": ("walk", n, s) for n, name in enumerate(("empty", "ready", "hat")) for s in range(3)}


@played_here
@pytest.mark.parametrize("bar", thin(OF_PAGE, "empty 0", "hat 1"))
def test_every_barrier_of_the_page_is_needed(bar):
    x, _ = problem("gla", 1, 400, 1, 64, 64, kind="mild and strong chunks", dtype=BF16, large=0.0)
    x["S"] = None

    def play(seed=None):
        return played(x, backward=False, **({} if seed is None else {"seed": seed, "ignored": OF_PAGE[bar]}))

    assert played_gluon.anybody_waits(play)


@played_here
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_source_does_not_see_a_neighbours_infinite_queries(dtype):
    x, _ = problem("gla", 1, 130, 1, 64, 64, dtype=dtype, ends=(0, 70, 130))
    right = played(x, (0, 70, 130), backward=False)
    x["q"] = x["q"].clone()
    x["q"][:, 70:] = float("inf")
    made = played(x, (0, 70, 130), backward=False)
    assert torch.equal(made["o"][:, :70], right["o"][:, :70]) and torch.equal(made["S"], right["S"])


@played_here
def test_any_order_of_steps_gives_the_same_bits():
    x, _ = problem("gla", 1, 150, 2, 64, 40, kind="mild and strong chunks", dtype=BF16)
    first = played(x)
    for seed in range(10, 40, 10):
        assert all(torch.equal(y, first[n]) for n, y in played(x, seed=seed).items())


# by their order in `unwind`. Without hat of odd rounds nothing changes where dg is made: who waits at free_R has waited
# for all of `transform`
BARRIERS = {
    **{"has_x 0": (0, 0), "has_x 1": (0, 1), "hat 0": (1, 0), "free_x 0": (2, 0), "free_x 1": (2, 1)},
    **{"has_v": (3, 0), "has_do": (3, 1), "has_S": (3, 2), "has_net": (3, 3)},
    **{"free_v": (3, 4), "free_do": (3, 5), "free_S": (3, 6), "has_later": (4, 0), "free_R": (5, 0)},
}


@played_here
@pytest.mark.parametrize("bar", thin(BARRIERS, "has_net", "free_R"))
def test_every_barrier_is_needed(bar):
    x, _ = problem("gla", 1, 300, 1, 64, 64, dtype=BF16)

    def play(seed=None):
        return played(x) if seed is None else played(x, seed=seed, ignored=("unwind", *BARRIERS[bar]))

    assert played_gluon.anybody_waits(play)


@played_here
def test_a_missing_fence_after_reads_is_seen(monkeypatch):
    """dg of one call in a hundred was wrong without it, on a GPU that others used as well."""
    x, _ = problem("gla", 1, 200, 1, 64, 64, dtype=BF16)
    monkeypatch.setitem(played_gluon.STANDS_IN, "fence_async_shared", played_gluon.fence_of_stores)
    with pytest.raises(AssertionError, match="filled without a fence of .*, which read it"):
        played(x)


@played_here
@pytest.mark.parametrize("T", [1, 2, 4])
def test_the_gradient_of_short_sequences_with_strong_gates(T):
    """Four tokens of g = -20 are a mild chunk; dg is 1e-9 of what a pair i = j would leave there."""
    x, judged = problem("gla", 1, T, 2, 64, 64, kind="-20", dtype=BF16)
    made = played(x)
    compare(made, {n: judged[n] for n in made})


@interpreted
@pytest.mark.parametrize("kind", thin(LADDER, "many resets"))
def test_the_pairs_of_strong_chunks(kind):
    """`mend_gradient` in float32 against all pairs one by one; dg that crosses -inf becomes 0."""
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    from gla_ref.kernels.hopper.gla_backward import mend_gradient
    from gla_ref.kernels.portable.tiles import patterns

    T, K, V, C = 40, 20, 24, 32
    args, _ = inputs("gla", 1, T, 1, K, V, kind=kind)
    args.append(torch.randn(1, T, 1, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    q, k, v, g, do = (y.float() for y in args)
    made = dq, dk, dv, dg = [torch.ones_like(y) for y in (q, k, v, g)]
    strong = torch.tensor([[1], [0]], dtype=torch.int8)
    mend_gradient[(1,)](
        q, k, v, do, g, dq, dk, dv, dg, strong, None, *patterns(*(spec_of("", y) for y in (q, k, v, do, g, dq, dv))),
        1, T, 1, K, V, 0.5, 2, C=C, LEVELS=5, BK=16, BV=16, BN=16, PACKED=False, FAST_SUMS=False,
    )  # fmt: skip
    right = pairs(*(y[0, :C, 0] for y in args))
    for y, more, name in zip(made, right, ("dq", "dk", "dv", "dg"), strict=True):
        expected = 1 + 0.5 * more
        if name == "dg":
            expected = torch.where(torch.isneginf(args[3][0, :C, 0]), 0.0, expected)
        assert (y[0, :C, 0] - expected).abs().max() <= 2e-4 * expected.abs().max(), name
        assert (y[:, C:] == 1).all(), "a mild chunk"


@gluon
@pytest.mark.parametrize("release, chosen", [((3, 6), "portable"), ((3, 7), "portable"), ((3, 9), "hopper")])
def test_the_triton_decides_on_the_gradient(release, chosen, monkeypatch):
    monkeypatch.setattr("gla_ref.kernels.hopper.release", lambda: release)
    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 64)
    back = partial(ON_HOPPER, direction="backward")
    found = back(q, q, v, q)
    assert found.name == chosen and ("is hardly faster" in found.why[0]) == (chosen == "portable")
    assert back(q, q, v, q, kernel="portable").name == "portable"
    found = back(q, q, v, q, kernel="hopper")
    assert found.name == "hopper" and "one walk backwards" in found.why[0]
    assert [x.name for x in found.launches] == ["walk", "unwind", "mend_gradient"]
    assert found.launches[1].grid == (3 * 2,)
    assert "one walk backwards" in explain("gla", q, q, v, q, hardware="sm_90", kernel="hopper")
    other = {
        "bfloat16": [y.half() for y in (q, q, v, q)],
        "16 bits": [q, q, v, q.float()],
        "V of at most 128": [q, q, meta(2, 300, 3, 136), q],
    }
    for message, x in other.items():  # forward is Hopper's all the same
        assert ON_HOPPER(*x, kernel="hopper").name == "hopper"
        found = back(*x, kernel="hopper")
        assert found.name == "portable" and message in found.why[0]


@gluon
def test_the_gradient_of_segments_starts_where_the_forward_pass_did():
    x = [meta(1, 65536, 4, 128)] * 4
    *_, starts = ON_HOPPER(*x, kernel="hopper").outputs
    assert starts is not None
    found = ON_HOPPER(*x, kernel="hopper", direction="backward")
    assert [y.name for y in found.launches] == ["walk", "walk", "carry", "unwind", "mend_gradient"]
    states = found.launches[0].given("states").tensor
    assert states.bytes == 1024 * 4 * 128 * 128 * 2  # of each chunk, in 16 bits


# on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129, 257, 1000])
def test_lengths(dtype, T):
    for n, path in enumerate(PATHS):
        check(2, T, 3, (64, 128)[n], 104 if n else 64, dtype=dtype, path=path)
    check(2, T, 3, 128, 128, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("V", [16, 64, 72, 128, 512])
@pytest.mark.parametrize("K", [16, 64, 72, 128])
def test_sizes(K, V, dtype):
    check(2, 193, 3, K, V, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder(kind, dtype):
    check(2, 200, 3, 64, 104, kind=kind, dtype=dtype)
    check(2, 200, 3, 128, 128, kind=kind, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("kind", [MILD, "many resets"])
def test_packed(kind, path, dtype):
    options = {"dtype": dtype, "path": path, "kind": kind, "ends": [0, 0, 33, 33, 40, 300, 941, 1100, 1100]}
    check(1, 1100, 2, 64, 128, **options)
    check(1, 1100, 2, 128, 64, **options)


@on_hopper
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_packed_sequence_does_not_see_its_neighbours(dtype, junk):
    """Not even where they hold NaN."""
    x, _ = problem("gla", 1, 200, 2, 64, 64, dtype=dtype)
    x = [y.clone() for y in tokens(x)]
    for y in x:
        y[:, 70:130] = junk
    cu = torch.tensor([0, 70, 130, 200], device="cuda", dtype=torch.int32)
    o, S = hopper(*x, cu_seqlens=cu)
    for a, b, n in ((0, 70, 0), (130, 200, 2)):
        one, state = hopper(*(y[:, a:b].contiguous() for y in x))
        assert torch.equal(o[:, a:b], one) and torch.equal(S[n], state[0])


@on_hopper
@pytest.mark.parametrize("dtype, gates", [(BF16, F16), (F16, BF16), (BF16, F32), (F16, F32)], ids=str)
@pytest.mark.parametrize("kind", [MILD, "many resets", "-20"])
def test_gates_in_other_precisions(kind, dtype, gates):
    check(2, 200, 3, 128, 128, kind=kind, dtype=dtype, gates=gates)
    check(2, 200, 3, 64, 64, kind=kind, dtype=dtype, gates=gates)
    check(1, 300, 2, 64, 128, kind=kind, dtype=dtype, gates=gates, ends=[0, 33, 33, 200, 300])


@on_hopper
@pytest.mark.parametrize("path", PATHS)
def test_split_and_carry(path):
    x, judged = problem("gla", 2, 300, 2, 128, 64, kind="mild and strong chunks", dtype=BF16)
    hold_in_parts(hopper, x, judged, (1, 64, 150), path=path)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_strides_poison_and_equal_runs(dtype, poisoned):
    x, judged = problem("gla", 2, 300, 3, 64, 64, kind="mild and strong chunks", dtype=dtype)
    first, second = (hopper(*tokens(x), initial_state=x["S"]) for _ in range(2))
    compare(dict(zip(("o", "S"), first, strict=True)), judged)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "bitwise, from run to run"
    turned = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in tokens(x)]
    turned[1] = torch.cat([x["k"], x["q"]], -1)[..., : x["k"].shape[-1]]  # rows apart
    found = hopper(*turned, initial_state=x["S"])
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@on_hopper
def test_gradients_of_segments():
    """One head: cut into segments, whose states the backward pass makes again where it cuts otherwise."""
    check(1, 3000, 1, 128, 128, dtype=BF16)
    check(1, 3000, 1, 64, 64, dtype=BF16)


@on_hopper
@pytest.mark.parametrize("T", [1, 2, 4, 65])
def test_gradients_of_short_sequences_with_strong_gates(T):
    """A pair i = j that did not cancel would be all of dg."""
    check(2, T, 3, 128, 64, kind="-20", dtype=BF16)


@on_hopper
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (64, 128), (128, 64)])
def test_gradients_are_equal_from_run_to_run_and_without_dg(K, V, poisoned):
    x, judged = problem("gla", 2, 300, 3, K, V, kind="mild and strong chunks", dtype=BF16)
    first = results(hopper, x)
    compare(first, judged)
    for _ in range(RUNS):
        assert all(torch.equal(y, first[n]) for n, y in results(hopper, x).items())
    leaves = [y.detach().requires_grad_(n < 3) for n, y in enumerate(tokens(x))]
    o, S = hopper(*leaves, initial_state=x["S"])
    made = torch.autograd.grad((o, S), leaves[:3], (x["do"], x["dS"]))
    assert all(torch.equal(y, first[n]) for n, y in zip(("dq", "dk", "dv"), made, strict=True))


@on_hopper
def test_gradients_of_a_packed_sequence_do_not_see_its_neighbours():
    """Not even where they hold NaN."""
    x, _ = problem("gla", 1, 200, 2, 128, 128, dtype=BF16)
    x = [y.clone() for y in (*tokens(x), x["do"])]
    for y in x:
        y[:, 70:130] = float("nan")
    cu = torch.tensor([0, 70, 130, 200], device="cuda", dtype=torch.int32)

    def gradients(*x, cu=None):
        *leaves, do = [y.detach().requires_grad_() for y in x]
        return torch.autograd.grad(hopper(*leaves, cu_seqlens=cu)[0], leaves, do.detach())

    together = gradients(*x, cu=cu)
    for a, b in ((0, 70), (130, 200)):
        alone = gradients(*(y[:, a:b].contiguous() for y in x))
        assert all(torch.equal(y[:, a:b], z) for y, z in zip(together, alone, strict=True))


@on_hopper
@pytest.mark.parametrize("size", [(2, 1, 3, 64, 128), (3, 150, 2, 128, 64), (2, 257, 3, 64, 64), (1, 256, 2, 128, 128)])
@pytest.mark.parametrize("kind", LADDER)
def test_the_page(size, kind):
    """A plain call launches it: right, and bit for bit what the kernel with options makes from a state of zeros."""
    from gla_ref.pages import gla_hopper

    x, judged = problem("gla", *size, kind=kind, dtype=BF16, large=0.0)
    found = hopper(*tokens(x), path="fused")
    compare(dict(zip(("o", "S"), found, strict=True)), {n: judged[n] for n in ("o", "S")})
    other = hopper(*tokens(x), initial_state=x["S"], path="fused")
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    alone, S = gla_hopper.gla(*tokens(x))
    left = alone.isnan()  # pairs of strong chunks
    assert torch.equal(alone[~left], found[0][~left]) and torch.equal(S, found[1])
    assert kind not in (MILD, "zero", "-1") or not left.any()


@gluon
@pytest.mark.skipif(CUDA, reason="on a CPU")
def test_the_page_needs_a_hopper_gpu():
    from gla_ref.pages import gla_hopper

    x = [torch.zeros(1, 3, 1, 64, dtype=BF16)] * 4
    with pytest.raises(ValueError, match="^q: expected a tensor on a GPU of compute capability 9.0, got one on cpu"):
        gla_hopper.gla(*x)
    with pytest.raises(TypeError, match="^q: expected bfloat16, got torch.float32"):
        gla_hopper.gla(x[0].float(), *x[1:])


@on_hopper
def test_float16_of_large_scores_and_states():
    check(1, 200, 2, 64, 64, kind="mild and strong chunks", dtype=F16, large=1e6, scale=1e-3)


@on_hopper
def test_more_than_2_to_the_31_elements():
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=BF16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    o, S = gla(q, q, q, torch.zeros_like(q), scale=1.0, path="fused", kernel="hopper")
    x = tail.double()
    # an absolute band in units of the result: bf16 rounds the scores and o, float32 sums 64 products
    assert error(o[0, -64:, -1], (x @ x.mT).tril() @ x) < 0.05
    assert error(S[0, -1], x.mT @ x) < 1e-4
    assert not o[0, :-64].any()
