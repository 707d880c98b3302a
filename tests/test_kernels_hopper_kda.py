"""The Hopper kernels of KDA, both ways: plans and refusals anywhere, the source played on a CPU, results on a GPU."""

import itertools
import math
from functools import partial

import played_gluon
import pytest
import torch
from cases import F64, LADDER, thin
from delta_problems import CUT, KEYS, LENGTHS, MILD, PACK, problem
from harness import BF16, CUDA, F16, F32, HERE, budgets, compare, results, tokens
from played_gluon import gluon, on_hopper, played_here
from test_kernels_hopper_delta import call as call_of_delta_rule
from test_kernels_hopper_delta import meta

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import explain, kda, plan
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dS0")


# the plan

ON_HOPPER = partial(plan, "kda", hardware="sm_90")


def call(**sizes):
    """q, k, v, g and beta without memory."""
    q, k, v, _, beta = call_of_delta_rule(**sizes)
    return q, k, v, meta(*v.shape[:3], q.shape[3], dtype=F32), beta


@gluon
def test_the_plan_takes_them_unless_the_others_are_asked_for():
    found = ON_HOPPER(*call())
    assert found == ON_HOPPER(*call(), kernel="hopper")
    assert found.name == "hopper" and [x.name for x in found.launches] == ["prepare", "mend", "walk"]
    assert [x.grid for x in found.launches] == [(2 * 4 * 5,), (2 * 4 * 5,), (2 * 4 * 2,)]
    for direction in ("forward", "backward"):
        portable = ON_HOPPER(*call(), kernel="portable", direction=direction)
        assert portable.name == "portable" and portable.why[0] == "the portable kernel: it was asked for"
    names = ["prepare", "mend", "walks", "gradients", "mend_gradients"]
    assert [x.name for x in ON_HOPPER(*call(), direction="backward").launches] == names
    for options in ({"path": "segmented"}, {"scale": 1e-9}):
        assert ON_HOPPER(*call(), direction="backward", **options).name == "portable"
    assert "Hopper kernels, in Gluon" in explain("kda", *call(), hardware="sm_90")
    names = [x.name for x in ON_HOPPER(*call(), path="segmented").launches]
    assert names == ["prepare", "mend", "walk", "carry", "walk"]


@gluon
def test_few_heads_of_long_sequences_are_cut_into_segments():
    few, many = (ON_HOPPER(*call(B=1, T=32768, H=H, HV=H)) for H in (2, 64))
    assert [x.name for x in few.launches][2:] == ["walk", "carry", "walk"]
    assert [x.name for x in many.launches][2:] == ["walk"]
    assert "each sequence in one go: 128 programs for sm_90, 132 multiprocessors" in many.why


REFUSED = {
    "K of 64 or 128, not 96": {"K": 96},
    "V of 64 or 128, not 32": {"V": 32},
    "tokens of 16 bits, and q is torch.float32": {"dtype": F32},
    "tokens in bfloat16, not torch.float16": {"dtype": F16},
}


@gluon
@pytest.mark.parametrize("message", REFUSED)
def test_what_they_do_not_take_is_named(message):
    with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
        ON_HOPPER(*call(**REFUSED[message]), kernel="hopper")
    assert ON_HOPPER(*call(**REFUSED[message])).name == "portable"


@gluon
def test_gates_that_the_copy_engine_does_not_read_are_named():
    q, k, v, g, beta = call()
    odd = g.mT.contiguous().mT
    with pytest.raises(ValueError, match="^kernel: .*g of shape .* is not one that the copy engine reads"):
        ON_HOPPER(q, k, v, odd, beta, kernel="hopper")


# played from their source


def played(x, ends=None, scale=None, seed=0, ignored=None, path=None):
    """o and the final state of inputs of `problem`."""
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta", "S")} | {"cu": cu}
    specs = kda.Call(*(spec_of(n, y) for n, y in named.items()), scale, path, "hopper")
    return play(kda.plan_forward(CLASSES["sm_90"], specs), ("o", "S"), named, seed, ignored)


def played_back(x, ends=None, scale=None, seed=0, ignored=None, need_dg=True):
    """The gradients of inputs of `problem`."""
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta", "S")} | {"cu": cu, "do": x["do"], "dS": x["dS"]}
    specs = kda.backward.record(*(spec_of(n, y) for n, y in named.items()), scale, None, "hopper", need_dg)
    return play(kda.plan_backward(CLASSES["sm_90"], specs), GRADIENTS, named, seed, ignored)


def play(made, names, tensors, seed, ignored):
    """The outputs of a plan by these names, without those that are None."""
    assert made.name == "hopper"
    tensors = {n: y for n, y in tensors.items() if y is not None}
    found = played_gluon.play(made, tensors, seed, ignored)
    return {n: y for n, y in zip(names, found, strict=False) if y is not None}


def check_back(*sizes, ends=None, scale=None, gates=F32, **kw):
    """All gradients: played here, run on a GPU, within the budgets of the portable kernel."""
    kw |= {"ends": ends, "scale": scale, "dtype": BF16, "gates": gates}
    x, judged = problem("kda", *sizes, **kw)
    if kw.get("strength") == 0.0:
        # dk and dv are 2^-40 of those of strength 1, and right to the budget of a strength that is so small, not zeros
        _, judged = problem("kda", *sizes, **kw | {"strength": 2.0**-40})
    found = results(kda.kda, x, ends, scale=scale, kernel="hopper") if CUDA else played_back(x, ends, scale)
    compare({n: found[n] for n in GRADIENTS}, {n: judged[n] for n in GRADIENTS})


def check(*sizes, ends=None, scale=None, path=None, gates=F32, **kw):
    """Played here, run on a GPU: within the budgets of the portable kernel."""
    x, judged = problem("kda", *sizes, ends=ends, scale=scale, dtype=BF16, gates=gates, **kw)
    if CUDA:
        cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
        options = {"initial_state": x["S"], "cu_seqlens": cu, "scale": scale, "path": path, "kernel": "hopper"}
        found = dict(zip("oS", kda.kda(*tokens(x), **options), strict=True))
    else:
        found = played(x, ends, scale, path=path)
    compare(found, {n: judged[n] for n in ("o", "S")})


@played_here
@pytest.mark.parametrize("T", thin(LENGTHS, 1, 65))
def test_the_source_at_every_length(T):
    check(2, T, 1, 64, 128, gates=BF16 if T % 2 else F32)


@played_here
@pytest.mark.parametrize("K, V", thin(list(itertools.product((64, 128), repeat=2)), (128, 64)))
def test_the_source_at_every_size(K, V):
    for groups, gates in ((1, BF16), (2, F16)):
        check(1, 130, 1, K, V, groups=groups, gates=gates)


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "many resets", "-20", "one strong channel"))
def test_the_source_on_the_gate_ladder(kind):
    check(1, 130, 1, 64, 64, kind=kind)


@played_here
@pytest.mark.parametrize("correlation, strength", thin(KEYS, (1.0, 2.0)))
def test_the_source_on_the_key_ladder(correlation, strength):
    check(1, 130, 1, 64, 64, correlation=correlation, strength=strength, groups=1)


@played_here
@pytest.mark.parametrize("path", thin(kda.PATHS, *kda.PATHS))
def test_the_source_of_packed_sequences(path):
    ends = CUT if path == "segmented" else PACK
    check(1, ends[-1], 1, 64, 64, ends=ends, kind="many resets", path=path, groups=1)


@played_here
@pytest.mark.parametrize("T", thin((63, 64, 330), 330))
def test_the_source_in_segments(T):
    for K, V in ((64, 64), (128, 64)):
        check(1, T, 1, K, V, path="segmented", groups=1, kind="mild and strong chunks")


@played_here
def test_the_source_without_an_initial_state():
    for path in kda.PATHS:
        x, judged = problem("kda", 1, 200, 1, 64, 64, dtype=BF16, gates=F32, S=0.0, groups=1)
        compare(played(x | {"S": None}, path=path), {n: judged[n] for n in ("o", "S")})


@played_here
@pytest.mark.parametrize("path", kda.PATHS)
def test_the_source_does_not_see_a_neighbour_of_nan(path):
    x, _ = problem("kda", 1, 200, 1, 64, 64, dtype=BF16, gates=F32, ends=(0, 70, 130, 200), groups=1)
    right = played(x, (0, 70, 130, 200), path=path)
    for n in ("q", "k", "v", "g", "beta"):
        x[n][:, 70:130] = torch.nan
    together = played(x, (0, 70, 130, 200), path=path)
    for n, (a, b) in {0: (0, 70), 2: (130, 200)}.items():
        assert torch.equal(together["o"][:, a:b], right["o"][:, a:b]) and torch.equal(together["S"][n], right["S"][n])
    assert together["S"][1].isnan().any()


@played_here
@pytest.mark.parametrize("name", thin(("q", "k", "v", "g", "beta"), "g"))
def test_nan_stays_nan(name):
    """From its token on and in the state, except a query's; earlier chunks and other heads do not see it."""
    x, _ = problem("kda", 1, 130, 1, 64, 64, dtype=BF16, gates=F32)
    x[name][:, 70, 0] = torch.nan
    made = played(x)
    assert made["o"][:, 70, 0].isnan().any() and made["o"][:, :64].isfinite().all()
    if name != "q":
        assert made["o"][:, 70:, 0].isnan().any(-1).all() and made["S"][:, 0].isnan().any()
    if name in ("v", "g", "beta"):
        assert made["o"][:, :, 1].isfinite().all() and made["S"][:, 1].isfinite().all()


@played_here
def test_no_gate_lies_between_a_token_and_itself():
    x, _ = problem("kda", 4, 1, 1, 64, 64, dtype=BF16, gates=F32)
    found = [played(x | {"S": None, "g": torch.full_like(x["g"], g)})["o"] for g in (-3.3, 0.0)]
    assert torch.equal(*found)


@played_here
def test_any_order_of_steps_gives_the_same_bits():
    x, _ = problem("kda", 1, CUT[-1], 1, 64, 64, dtype=BF16, gates=F32, ends=CUT, groups=1, kind="many resets")
    for path in kda.PATHS:
        first = played(x, CUT, path=path)
        for seed in (100, 200):
            assert all(torch.equal(y, first[n]) for n, y in played(x, CUT, path=path, seed=seed).items())


# the gradient, played


@played_here
@pytest.mark.parametrize("T", thin(LENGTHS, 65))
def test_gradients_at_every_length(T):
    check_back(2, T, 1, 64, 128, gates=BF16 if T % 2 else F32, groups=1)


@played_here
@pytest.mark.parametrize("K, V", thin(list(itertools.product((64, 128), repeat=2)), (128, 64)))
def test_gradients_at_every_size(K, V):
    check_back(1, 70, 1, K, V, gates=F16)  # two value heads share a key head


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "-20", "many resets"))
def test_gradients_on_the_gate_ladder(kind):
    check_back(1, 130, 1, 64, 64, kind=kind, groups=1)


@played_here
@pytest.mark.parametrize("correlation, strength", thin(KEYS, (1.0, 2.0), (0.9, 0.0)))
def test_gradients_on_the_key_ladder(correlation, strength):
    check_back(1, 130, 1, 64, 64, correlation=correlation, strength=strength, groups=1)


@played_here
def test_gradients_of_packed_sequences():
    check_back(1, PACK[-1], 1, 64, 64, ends=PACK, kind="many resets", groups=1)


@played_here
@pytest.mark.parametrize("scale", thin((0.0, -2.0), 0.0))
def test_gradients_at_any_scale(scale):
    check_back(1, 70, 1, 64, 64, scale=scale, groups=1)


@played_here
@pytest.mark.deep
def test_gradients_without_states_and_of_frozen_gates():
    x, judged = problem("kda", 1, 130, 1, 64, 64, dtype=BF16, gates=F32, S=0.0, groups=1)
    found = played_back(x | {"S": None}, need_dg=False)
    assert set(found) == {"dq", "dk", "dv", "dbeta"}
    compare(found, {n: judged[n] for n in found})


@played_here
def test_gradients_do_not_see_a_neighbour_of_nan():
    ends = (0, 70, 130, 200)
    x, _ = problem("kda", 1, 200, 1, 64, 64, dtype=BF16, gates=F32, ends=ends, groups=1)
    right = played_back(x, ends)
    for n in ("q", "k", "v", "g", "beta", "do"):
        x[n][:, 70:130] = torch.nan
    together = played_back(x, ends)
    assert together["dq"][:, 70:130].isnan().any() and together["dS0"][1].isnan().any()
    for made in (right, together):
        made["dS0"][1] = 0
        for n in GRADIENTS[:-1]:
            made[n][:, 70:130] = 0
    assert all(torch.equal(y, right[n]) for n, y in together.items())


@played_here
@pytest.mark.parametrize("seed", thin((100, 200, 300), 100))
def test_any_order_of_steps_gives_the_same_gradients(seed):
    x, _ = problem("kda", 1, CUT[-1], 1, 64, 64, dtype=BF16, gates=F32, ends=CUT, groups=1, kind="many resets")
    first = played_back(x, CUT)
    assert all(torch.equal(y, first[n]) for n, y in played_back(x, CUT, seed=seed).items())


# by their order in the kernel; each `ready` of `prepare` is waited for once
BARRIERS = {
    **{f"ready {n} of prepare": ("prepare", 0, n) for n in range(3)},
    **{f"ready {n} of mend": ("mend", 0, n) for n in range(3)},
    **{f"{name} {s}": ("walk", n, s) for n, name in enumerate(("ready", "done")) for s in range(3)},
    **{f"{name} {s} both ways": ("walks", n, s) for n, name in enumerate(("ready", "done")) for s in range(3)},
    **{f"ready {n} of gradients": ("gradients", 0, n) for n in range(4)},
}


@played_here
@pytest.mark.parametrize(
    "bar", thin(BARRIERS, "ready 2 of prepare", "ready 0 of mend", "ready 1", "done 2", "done 1 both ways")
)
def test_every_barrier_is_needed(bar):
    K, T = (128, 64) if "of" in bar else (64, 600)
    kind = "-20" if "mend" in bar else MILD  # of a strong chunk `mend` makes most of what `prepare` has made
    x, _ = problem("kda", 1, T, 1, K, K, dtype=BF16, gates=F32, groups=1, kind=kind)

    run = played_back if "both" in bar or "gradients" in bar else played

    def work(seed=None):
        return run(x) if seed is None else run(x, seed=seed, ignored=BARRIERS[bar])

    assert played_gluon.anybody_waits(work)


@played_here
def test_a_missing_fence_is_seen(monkeypatch):
    x, _ = problem("kda", 1, 64, 1, 64, 64, dtype=BF16, gates=F32, groups=1)
    monkeypatch.setitem(played_gluon.STANDS_IN, "fence_async_shared", lambda: None)
    for run in (played, played_back):
        with pytest.raises(AssertionError, match="without a fence"):
            run(x)


# on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("T", (*LENGTHS, 257, 1000, 2049))
def test_lengths(T):
    for path, (K, V) in itertools.product(kda.PATHS, itertools.product((64, 128), repeat=2)):
        check(2, T, 2, K, V, path=path)
        check_back(2, T, 2, K, V)


@on_hopper
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder(kind):
    for path, gates in itertools.product(kda.PATHS, (BF16, F32)):
        check(2, 300, 2, 128, 128, kind=kind, path=path, gates=gates)
        check_back(2, 300, 2, 128, 128, kind=kind, gates=gates, groups=1)


@on_hopper
@pytest.mark.parametrize("correlation, strength", KEYS)
def test_the_key_ladder(correlation, strength):
    for path in kda.PATHS:
        check(2, 300, 2, 128, 128, correlation=correlation, strength=strength, path=path)
        check_back(2, 300, 2, 128, 128, correlation=correlation, strength=strength)


@on_hopper
@pytest.mark.parametrize("kind", (MILD, "many resets"))
@pytest.mark.parametrize("path", kda.PATHS)
def test_packed(kind, path):
    ends = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)
    for K, V in ((128, 128), (64, 64)):
        check(1, 1100, 2, K, V, kind=kind, ends=ends, path=path)
        check_back(1, 1100, 2, K, V, kind=kind, ends=ends)


@on_hopper
@pytest.mark.parametrize("path", kda.PATHS)
def test_equal_from_run_to_run_and_in_any_batch(path, poisoned):
    x, _ = problem("kda", 8, 1000, 4, 128, 128, dtype=BF16, gates=F32, kind="mild and strong chunks")
    run = partial(kda.kda, path=path, kernel="hopper")
    first = run(*tokens(x), initial_state=x["S"])
    for _ in range(20):
        again = run(*tokens(x), initial_state=x["S"])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    few = kda.kda(*tokens(x, slice(1)), initial_state=x["S"][:1], path="fused", kernel="hopper")
    assert path != "fused" or all(torch.equal(a, b[:1]) for a, b in zip(few, first, strict=True))
    grads = results(run, x)
    for _ in range(5):
        assert all(torch.equal(y, grads[n]) for n, y in results(run, x).items())


@on_hopper
@pytest.mark.parametrize("path", kda.PATHS)
@pytest.mark.parametrize("made", ("last token", "first token", "dead channel", "one key"))
def test_inputs_made_against_these_kernels(made, path):
    """A state handed on at every border, a channel at -inf among zeros, one key throughout at strength 2."""
    x = against(made)
    x, judged = budgets("kda", x, {n: F32 if n in ("S", "dS", "g", "beta") else BF16 for n in x})
    options = {"initial_state": x["S"], "path": path, "kernel": "hopper"}
    compare(dict(zip("oS", kda.kda(*tokens(x), **options), strict=True)), {n: judged[n] for n in "oS"})
    compare(results(partial(kda.kda, kernel="hopper"), x), judged)


def against(made, B=1, T=1000, H=2, K=128, V=64):
    """Inputs of `budgets`: what they do is named in the test above."""
    rng = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=rng, dtype=F64)
    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in "qk")
    x = {"q": q, "k": k, "v": normal(B, T, H, V), "g": torch.zeros(B, T, H, K, dtype=F64)}
    x |= {"beta": torch.full((B, T, H), 0.05, dtype=F64), "S": normal(B, H, K, V)}
    x |= {"do": normal(B, T, H, V), "dS": normal(B, H, K, V)}
    if made == "dead channel":
        x["g"][..., 7] = -math.inf
    elif made == "one key":
        x["k"] = (normal(B, 1, H, K).sign() / 8 * (torch.arange(K) < 64)).expand(k.shape)  # length 1, exactly
        x["beta"] = torch.full((B, T, H), 2.0, dtype=F64)
    else:  # one channel lives; at every 16th token a reflection hands its state to the next, and it begins to die
        x["g"] = -3 - 2 * torch.rand(B, T, H, K, generator=rng, dtype=F64)
        for channel, border in enumerate(range(0, T, 16)):
            x["g"][:, border : border + 16, :, channel] = 0.0
            at = border + 16 if made == "first token" else border + 15
            if at < T:
                x["k"][:, at] = 0.0
                x["k"][:, at, :, channel], x["k"][:, at, :, channel + 1] = 1.0, -1.0
                x["beta"][:, at] = 1.0
                x["g"][:, at, :, channel : channel + 2] = 0.0
    return x
