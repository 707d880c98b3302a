"""The Hopper kernels of the delta rules: plans and refusals anywhere, the source played on a CPU, results on a GPU."""

import itertools
import math
import re
from functools import partial
from pathlib import Path

import played_gluon
import pytest
import torch
from cases import LADDER, thin
from delta_problems import CUT, KEYS, LENGTHS, MILD, PACK, RULES, problem
from harness import BF16, CUDA, F16, F32, HERE, compare, tokens
from played_gluon import gluon, on_hopper, played_here

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import delta, explain, plan
from gla_ref.kernels.hopper import DELTA_KERNELS
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of

BOTH = DELTA_KERNELS[1:]


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


# the plan

ON_HOPPER = partial(plan, "gated_delta_rule", hardware="sm_90")


def call(B=2, T=300, H=2, HV=4, K=128, V=128, dtype=BF16):
    q, v, g = meta(B, T, H, K, dtype=dtype), meta(B, T, HV, V, dtype=dtype), meta(B, T, HV, dtype=F32)
    return q, q, v, g, g


@gluon
def test_the_plan_takes_them_unless_another_is_asked_for():
    for mechanism, (q, k, v, g, beta) in ((m, call()) for m in RULES):
        rows = (q, k, v, beta) if mechanism == "delta_rule" else (q, k, v, g, beta)
        assert plan(mechanism, *rows, hardware="sm_90").name == "hopper_ahead"
    for path in (None, *delta.PATHS):
        assert ON_HOPPER(*call(), path=path) == ON_HOPPER(*call(), kernel="hopper", path=path)
    assert ON_HOPPER(*call(), kernel="portable").why[0] == "the portable kernel: it was asked for"
    for kernel in BOTH:
        found = ON_HOPPER(*call(), kernel=kernel)
        assert found.name == kernel and found.why[0] == f"{kernel}: it was asked for"
        assert kernel in explain("gated_delta_rule", *call(), hardware="sm_90", kernel=kernel)


@gluon
def test_the_number_of_programs_decides_between_them():
    few, many = (ON_HOPPER(*call(B, HV=64)) for B in (1, 2))
    assert few.name == "hopper_ahead" and "64 value heads of sequences for sm_90, 132" in few.why[0]
    assert many.name == "hopper_fused"
    assert [(x.name, x.grid) for x in few.launches] == [("solve", (64 * 5,)), ("walk", (2 * 64,))]
    assert [(x.name, x.grid, x.given("EXACT")) for x in many.launches] == [("fused", (128,), 0), ("fused", (128,), 1)]
    fewer = ON_HOPPER(*call(1, HV=32))  # programs for 32 columns each still fit at once
    assert [x.grid for x in fewer.launches] == [(32 * 5,), (4 * 32,)]


@gluon
def test_few_heads_of_long_sequences_are_cut_into_segments():
    long = partial(call, B=1, T=32768)
    found = ON_HOPPER(*long(HV=8))
    assert [(x.name, x.grid) for x in found.launches] == [
        ("solve", (8 * 512,)),
        ("walk", (4 * 8 * 8,)),
        ("carry", (8 * 8,)),
        ("walk", (2 * 8 * 8,)),
    ]
    assert "each sequence in segments of 64 of its 512 chunks: 16 programs for sm_90, 132 multiprocessors" in found.why
    many = ON_HOPPER(*long(HV=32))
    assert [x.name for x in many.launches] == ["solve", "walk"]
    assert "each sequence in one go: 128 programs for sm_90, 132 multiprocessors" in many.why
    # eight sequences of 4,096 tokens are as many programs as one of 64 heads
    packed = ON_HOPPER(*long(HV=8), cu_seqlens=meta(9, dtype=torch.int32))
    assert [x.name for x in packed.launches] == ["solve", "walk"]
    two = ON_HOPPER(*long(HV=2), cu_seqlens=meta(3, dtype=torch.int32))
    assert [x.name for x in two.launches] == ["solve", "walk", "carry", "walk"]


@gluon
def test_the_book_draws_walkers_as_wide_as_the_plan_makes_them():
    from gla_ref.book.viz import delta_roles
    from gla_ref.kernels.hopper import delta_ahead

    for how in (delta_ahead.NARROW, delta_ahead.WIDE):
        assert delta_roles.WALK[how.columns] == how.chunk
    for heads in range(1, 133):
        how, length = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, 128, "fused")
        assert (how.columns, length) == (delta_roles.columns(heads), 128)


@gluon
def test_the_book_computes_the_times_by_which_the_plan_decides():
    from gla_ref.kernels.hopper import delta_ahead, delta_fused

    text = Path(__file__).parents[1].joinpath("book", "23_delta_rule_fused.md").read_text()
    cell = re.search(r"```\{code-cell\} python\n[^`]*?(def fused_us.*?)```", text, re.DOTALL)[1]
    exec(cell, names := {"ceil": math.ceil, "C": 64, "K": 128, "V": 128})
    for h, n in itertools.product((1, 3, 8, 24, 33, 34, 66, 67, 128, 256), (1, 8, 32, 63, 512, 1024)):
        assert names["fused_us"](h, n) == pytest.approx(delta_fused.duration(CLASSES["sm_90"], h, n))
        two_kernels = delta_ahead.whole_duration(CLASSES["sm_90"], 128, 128, h, n, None)
        assert names["two_kernels_us"](h, n) == pytest.approx(two_kernels)


@gluon
def test_a_path_that_is_asked_for_is_taken():
    for T, L in ((300, 2), (32768, 64)):
        found = ON_HOPPER(*call(B=1, T=T, HV=8), kernel="hopper", path="segmented")
        assert found.name == "hopper_ahead" and found.launches[-1].given("L") == 64 * L
        assert any("in segments" in x and "it was asked for" in x for x in found.why)
        fused = ON_HOPPER(*call(B=1, T=T, HV=8), kernel="hopper", path="fused")
        assert [x.name for x in fused.launches] == ["solve", "walk"]
    many = ON_HOPPER(*call(B=1, HV=96), kernel="hopper", path="segmented")
    assert many.name == "hopper_ahead" and len(many.launches) == 4


@gluon
def test_a_cut_is_one_that_the_model_calls_faster():
    from gla_ref.kernels.hopper import delta_ahead

    for heads, chunks in itertools.product((1, 4, 16, 33, 66, 132, 200), (1, 16, 128, 512)):
        last = partial(delta_ahead.duration, CLASSES["sm_90"], K=128, V=128, heads=heads, chunks=chunks)
        how, length = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, chunks, None)
        whole, _ = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, chunks, "fused")
        assert whole == (delta_ahead.NARROW if 4 * heads <= 132 else delta_ahead.WIDE)
        one_go = last(how=whole, length=chunks)
        assert last(how=how, length=length) < one_go if length < chunks else how == whole


REFUSED = {
    "have K of 64 or 128, not 96": ({"K": 96}, {}),
    "have V of 64 or 128, not 256": ({"V": 256}, {}),
    "q is torch.float32": ({"dtype": F32}, {}),
}


@gluon
@pytest.mark.parametrize("message", REFUSED)
def test_what_they_do_not_take_is_named(message):
    sizes, options = REFUSED[message]
    for kernel in DELTA_KERNELS:
        with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
            ON_HOPPER(*call(**sizes), kernel=kernel, **options)
    assert ON_HOPPER(*call(**sizes), **options).name == "portable"


@gluon
def test_the_fused_kernel_has_no_segments():
    with pytest.raises(ValueError, match="^kernel: .*walks over each sequence in one go, and path='segmented'"):
        ON_HOPPER(*call(), kernel="hopper_fused", path="segmented")


def test_other_gpus_and_other_tritons_are_told_why(monkeypatch):
    with pytest.raises(ValueError, match="is for sm_90, not sm_80"):
        plan("gated_delta_rule", *call(), hardware="sm_80", kernel="hopper")
    monkeypatch.setattr("gla_ref.kernels.hopper.missing", lambda: "gluon.something")
    with pytest.raises(ValueError, match=r"no gluon\.something"):
        ON_HOPPER(*call(), kernel="hopper")


# played from their source


def played(*args, **options):
    """o and the final state of inputs of `problem`."""
    made, _ = played_with_flags(*args, **options)
    return made


def played_with_flags(kernel, x, ends=None, scale=None, seed=0, ignored=None, path=None):
    """As `played`, and the flags of a plan that has some: which heads are made again."""
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta", "S")} | {"cu": cu}
    call = delta.Call(*(spec_of(n, y) for n, y in named.items()), scale, path, kernel)
    found = delta.plan_forward(CLASSES["sm_90"], call)
    named = {n: y for n, y in named.items() if y is not None}
    o, S, strong = played_gluon.play(found, named, seed, ignored)
    return {"o": o, "S": S}, strong


def check(mechanism, *sizes, ends=None, scale=None, path=None, kernels=BOTH, dtype=BF16, gates=F32, groups=2, **kw):
    """Played here, run on a GPU: within the budgets of the portable kernel."""
    kw |= {"ends": ends, "scale": scale, "dtype": dtype, "gates": gates, "groups": groups}
    x, judged = problem(mechanism, *sizes, **kw)
    judged = {n: judged[n] for n in ("o", "S")}
    for kernel in ("hopper_ahead",) if path else kernels:
        if CUDA:
            cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
            form = {"delta_rule": delta.delta_rule, "gated_delta_rule": delta.gated_delta_rule}[mechanism]
            o, S = form(*tokens(x), initial_state=x["S"], cu_seqlens=cu, scale=scale, path=path, kernel=kernel)
            compare({"o": o, "S": S}, judged)
        else:
            compare(played(kernel, x, ends, scale, path=path), judged)


@played_here
@pytest.mark.parametrize(
    "mechanism, T", thin([(m, T) for m in RULES for T in LENGTHS], *[(RULES[1], T) for T in LENGTHS])
)
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_the_source_at_every_length(mechanism, dtype, T):
    check(mechanism, 2, T, 1, 64, 128, dtype=dtype)


@played_here
@pytest.mark.parametrize("K, V", thin(list(itertools.product((64, 128), repeat=2)), (128, 64)))
def test_the_source_at_every_size(K, V):
    for groups, gates in ((1, BF16), (2, F16)):
        check("gated_delta_rule", 1, 200, 2, K, V, groups=groups, gates=gates)


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "many resets"))
def test_the_source_on_the_gate_ladder(kind):
    for dtype in (BF16, F16):
        check("gated_delta_rule", 1, 130, 1, 64, 64, kind=kind, dtype=dtype)


@played_here
@pytest.mark.parametrize("correlation, strength", thin(KEYS, (1.0, 2.0)))
def test_the_source_on_the_key_ladder(correlation, strength):
    for mechanism, dtype in itertools.product(RULES, (BF16, F16)):
        check(mechanism, 1, 130, 1, 64, 64, correlation=correlation, strength=strength, dtype=dtype)


@played_here
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_only_heads_with_a_strong_chunk_are_made_again(dtype):
    sizes = ("gated_delta_rule", 2, 130, 1, 64, 64)
    (mild, _), (strong, _) = (problem(*sizes, correlation=0.9, strength=b, dtype=dtype, gates=F32) for b in (0.5, 2.0))
    mixed = mild | {"beta": mild["beta"].clone()}
    mixed["beta"][0, 64:, 1] = 2.0
    strong["beta"][0, :64, 1] = 0.5
    made, flags = zip(*(played_with_flags("hopper_fused", x) for x in (mild, strong, mixed)), strict=True)
    assert [y.tolist() for y in flags] == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]
    for n in ("o", "S"):
        for b, h in itertools.product((0, 1), repeat=2):
            head = (b, h) if n == "S" else (b, slice(None), h)
            assert torch.equal(made[2][n][head], made[1 if (b, h) == (0, 1) else 0][n][head])


@played_here
@pytest.mark.parametrize("mechanism", RULES)
def test_the_source_of_packed_sequences(mechanism):
    for dtype in (BF16, F16):
        check(mechanism, 1, PACK[-1], 1, 64, 128, ends=PACK, kind="many resets", dtype=dtype)


@played_here
@pytest.mark.parametrize("scale", (0.0, -2.0))
def test_the_source_at_any_scale(scale):
    check("gated_delta_rule", 1, 70, 1, 64, 64, scale=scale)


@played_here
def test_the_source_without_an_initial_state():
    x, judged = problem("gated_delta_rule", 1, 70, 1, 64, 64, dtype=BF16, gates=F32, S=0.0)
    for kernel in BOTH:
        compare(played(kernel, x | {"S": None}), {n: judged[n] for n in ("o", "S")})


@played_here
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_the_source_does_not_see_a_neighbour_of_nan(dtype):
    x, _ = problem("gated_delta_rule", 1, 200, 1, 64, 128, dtype=dtype, gates=F32, ends=(0, 70, 130, 200))
    for n in ("q", "k", "v", "g", "beta"):
        x[n][:, 70:130] = torch.nan
    for kernel in BOTH:
        together = played(kernel, x, (0, 70, 130, 200))
        for n, (a, b) in {0: (0, 70), 2: (130, 200)}.items():
            part = {m: y[n : n + 1] if m == "S" else y[:, a:b] for m, y in x.items() if m not in ("do", "dS")}
            alone = played(kernel, {m: y.contiguous() for m, y in part.items()})
            assert torch.equal(together["o"][:, a:b], alone["o"]) and torch.equal(together["S"][n], alone["S"][0])


@played_here
@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta"))
def test_nan_stays_nan(name):
    """From its token on and in the state, except a query's; earlier chunks and other heads do not see it."""
    x, _ = problem("gated_delta_rule", 1, 130, 1, 64, 64, dtype=BF16, gates=F32)
    x[name][:, 70, 0] = torch.nan
    for kernel in BOTH:
        made = played(kernel, x)
        assert made["o"][:, 70, 0].isnan().any() and made["o"][:, :64].isfinite().all()
        if name != "q":
            assert made["o"][:, 70:, 0].isnan().any(-1).all() and made["S"][:, 0].isnan().any()
        if name in ("v", "g", "beta"):
            assert made["o"][:, :, 1].isfinite().all() and made["S"][:, 1].isfinite().all()


@played_here
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("correlation, length", [(0.0, 1.4), (0.0, 3.0), (1.0, 1.4), (0.9, 3.0)])
def test_keys_of_other_lengths(correlation, length, dtype):
    """Equal keys with beta |k|^2 = 2.1 let the state grow by 1.1 a token."""
    keys = {"correlation": correlation, "strength": 2.1 / length**2, "length": length}
    check("delta_rule", 1, 45, 1, 64, 64, dtype=dtype, **keys)


@played_here
def test_any_order_of_steps_gives_the_same_bits():
    x, _ = problem("gated_delta_rule", 1, PACK[-1], 1, 64, 128, dtype=BF16, gates=F32, ends=PACK)
    for kernel in BOTH:
        first = played(kernel, x, PACK)
        for seed in range(100, 600, 100):
            assert all(torch.equal(y, first[n]) for n, y in played(kernel, x, PACK, seed=seed).items())


@played_here
def test_any_order_of_steps_in_segments_gives_the_same_bits():
    x, _ = problem("gated_delta_rule", 1, CUT[-1], 1, 64, 64, dtype=BF16, gates=F32, ends=CUT, groups=1)
    first = played("hopper_ahead", x, CUT, path="segmented")
    for seed in (100, 200):
        again = played("hopper_ahead", x, CUT, path="segmented", seed=seed)
        assert all(torch.equal(y, first[n]) for n, y in again.items())


@played_here
@pytest.mark.parametrize(
    "dtype, path", thin(list(itertools.product((BF16, F16), delta.PATHS)), *((x, "fused") for x in (BF16, F16)))
)
def test_narrow_and_wide_programs_give_the_same_bits(dtype, path, monkeypatch):
    from gla_ref.kernels.hopper import delta_ahead

    x, _ = problem("gated_delta_rule", 1, 230, 1, 64, 128, dtype=dtype, gates=F32, ends=PACK, groups=1)
    narrow = played("hopper_ahead", x, PACK, path=path)
    monkeypatch.setattr(delta_ahead, "NARROW", delta_ahead.WIDE)
    assert all(torch.equal(y, narrow[n]) for n, y in played("hopper_ahead", x, PACK, path=path).items())


@played_here
@pytest.mark.parametrize(
    "mechanism, dtype, T",
    thin(list(itertools.product(RULES, (BF16, F16), (63, 64, 129, 330))), (RULES[0], F16, 330), (RULES[1], BF16, 330)),
)
def test_the_source_in_segments(mechanism, dtype, T):
    for K, V in ((64, 128), (128, 64)) if T == 129 else ((64, 64),):
        check(mechanism, 1, T, 1, K, V, dtype=dtype, path="segmented", groups=1, seed=T)


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "many resets", "mild and strong chunks"))
def test_the_source_in_segments_on_the_gate_ladder(kind):
    for dtype in (BF16, F16):
        check("gated_delta_rule", 1, 200, 1, 64, 64, kind=kind, dtype=dtype, path="segmented", groups=1)


@played_here
@pytest.mark.parametrize("correlation, strength", thin(KEYS, (1.0, 2.0)))
def test_the_source_in_segments_on_the_key_ladder(correlation, strength):
    for dtype in (BF16, F16):
        keys = {"correlation": correlation, "strength": strength}
        check("delta_rule", 1, 200, 1, 64, 64, dtype=dtype, path="segmented", groups=1, **keys)


@played_here
@pytest.mark.parametrize("dtype", thin((BF16, F16), BF16), ids=str)
def test_the_source_of_packed_sequences_in_segments(dtype):
    kw = {"ends": CUT, "kind": "many resets", "dtype": dtype, "groups": 1}
    check("gated_delta_rule", 1, CUT[-1], 1, 64, 64, path="segmented", **kw)


@played_here
def test_segments_without_an_initial_state():
    x, judged = problem("gated_delta_rule", 1, 200, 1, 64, 64, dtype=BF16, gates=F32, S=0.0)
    compare(played("hopper_ahead", x | {"S": None}, path="segmented"), {n: judged[n] for n in ("o", "S")})


@played_here
@pytest.mark.parametrize("name", thin(("q", "k", "v", "g", "beta"), "k"))
def test_nan_goes_through_segments(name):
    """From its token on and in the state, except a query's; earlier segments and other heads do not see it."""
    x, _ = problem("gated_delta_rule", 1, 320, 1, 64, 64, dtype=BF16, gates=F32)
    x[name][:, 200, 0] = torch.nan
    made = played("hopper_ahead", x, path="segmented")
    assert made["o"][:, 200, 0].isnan().any() and made["o"][:, :192].isfinite().all()
    if name != "q":
        assert made["o"][:, 200:, 0].isnan().any(-1).all() and made["S"][:, 0].isnan().any()
    if name in ("v", "g", "beta"):
        assert made["o"][:, :, 1].isfinite().all() and made["S"][:, 1].isfinite().all()


@played_here
@pytest.mark.parametrize("dtype", thin((BF16, F16), BF16), ids=str)
def test_segments_do_not_see_a_neighbour_of_nan(dtype):
    x, _ = problem("gated_delta_rule", 1, CUT[-1], 1, 64, 64, dtype=dtype, gates=F32, ends=CUT, groups=1)
    rows, found = slice(64, 230), played("hopper_ahead", x, CUT, path="segmented")
    for n in ("q", "k", "v", "g", "beta"):
        x[n][:, rows] = torch.nan
    beside = played("hopper_ahead", x, CUT, path="segmented")
    assert beside["o"][:, rows].isnan().any() and beside["S"][2].isnan().any()
    for one in (found, beside):
        one["o"][:, rows], one["S"][2] = 0, 0
    assert all(torch.equal(y, found[n]) for n, y in beside.items())


# by their order in the kernel
BARRIERS = {
    **{
        f"{name} {s}": ("hopper_fused", "fused", n, s)
        for n, name in enumerate(("keys", "ready", "gated", "solved", "done"))
        for s in (0, 1)
        if (name, s) != ("gated", 1)  # played, the loader is too early there to be missed
    },
    **{f"ready {s} ahead": ("hopper_ahead", "walk", 0, s) for s in range(3)},
    **{f"done {s} ahead": ("hopper_ahead", "walk", 1, s) for s in range(3)},
    "ready of solve": ("hopper_ahead", "solve", 0, 0),
}


@played_here
@pytest.mark.parametrize("bar", thin(BARRIERS, "solved 0", "done 0", "ready 2 ahead"))
def test_every_barrier_is_needed(bar):
    kernel, *ignored = BARRIERS[bar]
    x, _ = problem("gated_delta_rule", 1, 600, 1, 64, 64, dtype=BF16, gates=F32, groups=1)

    def play(seed=None):
        return played(kernel, x) if seed is None else played(kernel, x, seed=seed, ignored=ignored)

    assert played_gluon.anybody_waits(play)


@played_here
def test_a_missing_fence_is_seen(monkeypatch):
    x, _ = problem("gated_delta_rule", 1, 64, 1, 64, 64, dtype=BF16, gates=F32, groups=1)
    monkeypatch.setitem(played_gluon.STANDS_IN, "fence_async_shared", lambda: None)
    for kernel in BOTH:
        with pytest.raises(AssertionError, match="read without a fence"):
            played(kernel, x)


# the page


def played_page(x, seed=0, ignored=None):
    """o and the final state of what the launcher of the page launches."""
    import kernel_cases

    named = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    found = kernel_cases.plan_delta_page(CLASSES["sm_90"], *(spec_of(n, y) for n, y in named.items()))
    o, S, _ = played_gluon.play(found, named, seed, ignored)
    return {"o": o, "S": S}


def page_problem(B, T, HV=2, gates=F32, **kw):
    return problem("gated_delta_rule", B, T, HV // 2, 128, 128, dtype=BF16, gates=gates, S=0.0, **kw)


def check_page(*sizes, **kw):
    """Played here, run on a GPU: within the budgets of the kernels that one calls."""
    from gla_ref.pages.gated_delta_rule_hopper import gated_delta_rule

    x, judged = page_problem(*sizes, **kw)
    found = dict(zip("oS", gated_delta_rule(*tokens(x)), strict=True)) if CUDA else played_page(x)
    compare(found, {n: judged[n] for n in ("o", "S")})


def test_what_the_page_leaves_out_is_refused(monkeypatch):
    from gla_ref.pages import gated_delta_rule_hopper as page

    q, g = torch.zeros(1, 3, 2, 128, dtype=BF16), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="^q: expected a tensor on a GPU of compute capability 9.0, got one on cpu"):
        page.gated_delta_rule(q, q, q, g, g)
    refused = {
        "^q: expected torch.bfloat16, got torch.float32": (q.float(), q, q, g, g),
        r"^q, v: expected \[B, T, H, D\], got": (q[0], q, q, g, g),
        r"^q: expected \(1, 3, 2, 128\), got \(1, 3, 2, 64\)": (q[..., :64], q, q, g, g),
        "^v: expected heads a multiple of 2, got 3": (q, q, torch.cat([q, q[:, :, :1]], 2), g, g),
        r"^g: expected \(1, 3, 2\), got \(1, 2, 2\)": (q, q, q, g[:, :2], g),
        "^beta: expected torch.bfloat16, torch.float32, got torch.float16": (q, q, q, g, g.half()),
        "^v: expected contiguous": (q, q, q.mT.contiguous().mT, g, g),
        "^v: expected no gradient": (q, q, q.clone().requires_grad_(), g, g),
    }
    monkeypatch.setattr(page, "on_hopper", lambda x: True)
    for message, x in refused.items():
        with pytest.raises((ValueError, TypeError), match=message):
            page.gated_delta_rule(*x)


@played_here
@pytest.mark.parametrize("T", thin(LENGTHS, 130))
def test_the_page_at_every_length(T):
    check_page(2, T)
    check_page(1, T, gates=BF16)


@played_here
@pytest.mark.parametrize("kind", thin(LADDER, "many resets"))
def test_the_page_on_the_gate_ladder(kind):
    check_page(1, 130, kind=kind)


@played_here
@pytest.mark.parametrize("correlation, strength", thin(KEYS, (0.99, 2.0)))
def test_the_page_on_the_key_ladder(correlation, strength):
    check_page(1, 130, correlation=correlation, strength=strength)
    check_page(1, 130, kind="zero", correlation=correlation, strength=strength)  # by float16 alone S errs too much


@played_here
def test_any_order_of_the_steps_of_the_page_gives_the_same_bits():
    x, _ = page_problem(1, 300, 2)
    first = played_page(x)
    for seed in range(100, 400, 100):
        assert all(torch.equal(y, first[n]) for n, y in played_page(x, seed=seed).items())


PAGE_BARRIERS = {
    f"{name} {s}": (0, 5 * s + n)
    for n, name in enumerate(("keys", "ready", "gated", "solved", "done"))
    for s in range(2)
}


@played_here
@pytest.mark.parametrize("bar", thin(PAGE_BARRIERS, "done 1"))
def test_every_barrier_of_the_page_is_needed(bar):
    x, _ = page_problem(1, 600, 2)

    def play(seed=None):
        return played_page(x) if seed is None else played_page(x, seed, ("walk", *PAGE_BARRIERS[bar]))

    assert played_gluon.anybody_waits(play)


@on_hopper
@pytest.mark.parametrize("T", (*LENGTHS, 257, 1000))
def test_lengths_of_the_page(T):
    check_page(2, T)
    check_page(3, T, 4, gates=BF16)


@on_hopper
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder_of_the_page(kind):
    check_page(2, 300, 4, kind=kind)


@on_hopper
@pytest.mark.parametrize("correlation, strength", KEYS)
def test_the_key_ladder_of_the_page(correlation, strength):
    check_page(2, 300, 4, correlation=correlation, strength=strength)
    check_page(2, 300, 4, kind="zero", correlation=correlation, strength=strength)


@on_hopper
def test_the_page_is_equal_from_run_to_run(poisoned):
    from gla_ref.pages.gated_delta_rule_hopper import gated_delta_rule

    x, _ = page_problem(2, 1000, 8)
    first = gated_delta_rule(*tokens(x))
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gated_delta_rule(*tokens(x)), strict=True))


# on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("mechanism", RULES)
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("T", (*LENGTHS, 257, 1000))
def test_lengths(mechanism, dtype, T):
    for K, V in itertools.product((64, 128), repeat=2):
        check(mechanism, 2, T, 2, K, V, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder(kind, dtype):
    check("gated_delta_rule", 2, 300, 2, 128, 128, kind=kind, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("correlation, strength", KEYS)
def test_the_key_ladder(correlation, strength, dtype):
    for mechanism in RULES:
        check(mechanism, 2, 300, 2, 128, 128, correlation=correlation, strength=strength, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("kind", (MILD, "many resets"))
def test_packed(kind, dtype):
    ends = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)
    check("gated_delta_rule", 1, 1100, 2, 128, 128, kind=kind, dtype=dtype, ends=ends)


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_many_heads(dtype):
    """Programs of 64 columns; other tests of V = 128 have so few heads that programs have 32."""
    check("gated_delta_rule", 10, 130, 4, 128, 128, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("mechanism", RULES)
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("T", (1, 64, 129, 330, 1000, 2049))
def test_lengths_in_segments(mechanism, dtype, T):
    for K, V in itertools.product((64, 128), repeat=2):
        check(mechanism, 2, T, 2, K, V, dtype=dtype, path="segmented")


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder_in_segments(kind, dtype):
    check("gated_delta_rule", 2, 400, 2, 128, 128, kind=kind, dtype=dtype, path="segmented")


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("correlation, strength", KEYS)
def test_the_key_ladder_in_segments(correlation, strength, dtype):
    for mechanism in RULES:
        keys = {"correlation": correlation, "strength": strength}
        check(mechanism, 2, 400, 2, 128, 128, dtype=dtype, path="segmented", **keys)


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("kind", (MILD, "many resets"))
def test_packed_in_segments(kind, dtype):
    ends = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)
    for K, V in ((128, 128), (64, 64)):
        check("gated_delta_rule", 1, 1100, 2, K, V, kind=kind, dtype=dtype, ends=ends, path="segmented")


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_many_heads_in_segments(dtype):
    """Programs of 64 columns; where K = V = 128 other tests have so few heads that programs have 32."""
    check("gated_delta_rule", 10, 200, 4, 128, 128, dtype=dtype, path="segmented")


@on_hopper
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("mechanism", RULES)
def test_a_batch_changes_no_bit(mechanism, dtype):
    """Where a path is asked for: few heads by narrow programs, many by wide ones."""
    x, _ = problem(mechanism, 24, 200, 4, 128, 128, dtype=dtype, gates=F32)
    form = {"delta_rule": delta.delta_rule, "gated_delta_rule": delta.gated_delta_rule}[mechanism]
    form = partial(form, path="fused")
    o, S = form(*tokens(x), initial_state=x["S"])
    for B in (1, 8):
        few = form(*tokens(x, slice(B)), initial_state=x["S"][:B])
        assert torch.equal(few[0], o[:B]) and torch.equal(few[1], S[:B])


@on_hopper
@pytest.mark.parametrize("kernel, path", [*((kernel, None) for kernel in BOTH), ("hopper_ahead", "segmented")])
def test_equal_from_run_to_run(kernel, path, poisoned):
    x, _ = problem("gated_delta_rule", 2, 1000, 4, 128, 128, dtype=BF16, gates=F32)
    run = partial(delta.gated_delta_rule, *tokens(x), initial_state=x["S"], kernel=kernel, path=path)
    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
