"""When Hopper's kernels are chosen, what they launch, and why not: plans alone, nothing is compiled or run."""

import itertools
import pkgutil
from functools import partial

import pytest
import torch
from cases import meta_tokens
from harness import BF16, CUDA, F16, F32
from played_gluon import gluon
from problems import EVERY, RULES

from gla_ref.book.viz import delta_roles
from gla_ref.kernels import delta, explain, plan
from gla_ref.kernels.hopper import DELTA_KERNELS, delta_ahead, delta_fused, gla_forward, gluon_names
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.program import variant
from gla_ref.pages import gated_delta_rule_hopper, gla_hopper

FAMILY = ("gla", *EVERY)
LONG = {"B": 1, "T": 32768}


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def call(mechanism, B=2, T=300, H=2, HV=4, K=128, V=128, dtype=BF16, gates=F32):
    """The tensors of a call: two value heads to a key head; in GLA as many, and gates of the tokens' dtype."""
    sizes = {"gates": dtype} if mechanism == "gla" else {"HV": HV, "gates": gates}
    return meta_tokens(mechanism, T, B, H, K, V, dtype, **sizes).values()


def planned(mechanism, *tensors, direction="forward", kernel=None, path=None, hardware="sm_90", options=(), **sizes):
    """The plan of some tensors, or of those of `call`."""
    tensors = tensors or call(mechanism, **sizes)
    return plan(mechanism, *tensors, direction=direction, hardware=hardware, kernel=kernel, path=path, **dict(options))


forward, backward = planned, partial(planned, direction="backward")
GATED, BACK = partial(forward, "gated_delta_rule"), partial(backward, "gated_delta_rule")


def launches(found, first=0):
    return [(x.name, x.grid) for x in found.launches[first:]]


def names(found):
    return [x.name for x in found.launches]


# which kernel


@gluon
@pytest.mark.parametrize("mechanism", FAMILY)
def test_the_portable_kernels_run_where_they_are_asked_for(mechanism):
    for direction in ("forward", "backward"):
        for hardware in ("sm_80", "sm_90"):
            found = planned(mechanism, direction=direction, kernel="portable", hardware=hardware)
            assert found.name == "portable" and found.why[0] == "the portable kernel: it was asked for"


REFUSED = {  # what is wrong: mechanisms, and the sizes of their calls
    "K of at most 128, not 192": ("gla", {"K": 192}),
    "have K of 64 or 128, not 96": (EVERY, {"K": 96}),
    "have V of 64 or 128, not 256": (EVERY, {"V": 256}),
    "takes tokens of 16 bits, and q is torch.float32": (FAMILY, {"dtype": F32}),
    "take tokens in bfloat16, not torch.float16": ("kda", {"dtype": F16}),
}


@gluon
@pytest.mark.parametrize(
    "mechanism, message", [(m, message) for message, row in REFUSED.items() for m in FAMILY if m in row[0]]
)
def test_what_they_do_not_take_is_named(mechanism, message):
    """By the error of who asked for them, and by the portable plan's first reason, both ways."""
    _, sizes = REFUSED[message]
    for kernel in DELTA_KERNELS if mechanism in RULES else ("hopper",):
        with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
            forward(mechanism, kernel=kernel, **sizes)
    for found in (forward(mechanism, **sizes), backward(mechanism, **sizes)):
        assert found.name == "portable" and message in found.why[0]


@gluon
def test_a_portable_gradient_says_why_hoppers_was_not_taken():
    """`kernel` asks for the kernel of o; where the gradient's takes less, nothing falls back unseen."""
    for mechanism, dtype, path, message in (
        ("gla", F16, None, "kernel makes gradients of tokens in bfloat16, not torch.float16"),
        ("kda", BF16, "segmented", "kernels of the gradient have no segments, and path='segmented' was asked for"),
    ):
        told = explain(mechanism, *call(mechanism, dtype=dtype), hardware="sm_90", kernel="hopper", path=path)
        there, back = told.split("backward: portable")
        assert there.startswith("forward: hopper") and f"the portable kernel: the Hopper {message}" in back


@gluon
def test_tensors_and_options_that_they_do_not_take_are_named():
    q, k, v, g, beta = call("kda")
    x = [meta(2, 300, 3, 64)] * 4
    turned, of_shape = x[0].mT.contiguous().mT, "of shape .* is not one that the copy engine reads"
    for mechanism, tensors, options, message in (
        ("kda", (q, k, v, g.mT.contiguous().mT, beta), {}, f"g {of_shape}"),
        ("gla", (x[0], turned, *x[2:]), {}, f"k {of_shape}"),
        ("gla", x, {"g_v": x[0]}, "no gates on values"),
    ):
        with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
            forward(mechanism, *tensors, kernel="hopper", options=options)
        assert forward(mechanism, *tensors, options=options).name == "portable"
    with pytest.raises(ValueError, match="^kernel: .*walks over each sequence in one go, and path='segmented'"):
        GATED(kernel="hopper_fused", path="segmented")


@pytest.mark.parametrize("mechanism", FAMILY)
def test_other_gpus_and_other_tritons_are_told_why(mechanism, monkeypatch):
    with pytest.raises(ValueError, match="is for sm_90, not sm_80"):
        forward(mechanism, hardware="sm_80", kernel="hopper")
    assert "the Hopper kernel is for sm_90, not sm_80" in explain(mechanism, *call(mechanism), hardware="sm_80")
    monkeypatch.setattr("gla_ref.kernels.hopper.missing", lambda: "gluon.something")
    with pytest.raises(ValueError, match=r"no gluon\.something"):
        forward(mechanism, kernel="hopper")
    assert "no gluon.something" in forward(mechanism).why[0]


@gluon
@pytest.mark.parametrize("what", gluon_names.RENAMED)
def test_either_name_will_do(what, monkeypatch):
    path, *some = gluon_names.RENAMED[what]
    module = pkgutil.resolve_name(path)
    for kept in some:
        with monkeypatch.context() as patch:
            for name in some:
                patch.delattr(module, name, raising=False)
            assert gluon_names.missing.__wrapped__() == f"{path}.{some[0]}"
            patch.setattr(module, kept, "found", raising=False)
            assert gluon_names.missing.__wrapped__() is None and gluon_names.named(what) == "found"


# GLA


@gluon
def test_the_plan_of_gla():
    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 512)
    found = forward("gla", q, q, v, q)
    assert found.name == "hopper" and "Gluon" in found.why[0]
    assert launches(found)[0] == ("walk", (4 * 3 * 2,)) and names(found) == ["walk", "mend"]


@gluon
def test_a_plain_call_launches_the_page():
    """The page's walk, with flags, and `mend`; any other call launches the kernel that has all options."""
    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 64)
    walk, mend = forward("gla", q, q, v, q).launches
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
        assert forward("gla", *x, options=options).launches[0].kernel is gla_forward.walk, what


@gluon
def test_a_new_length_of_a_plain_call_compiles_nothing():
    """Triton would compile lengths of 1, multiples of 16 and others apart."""

    def walk(T, H):
        return variant(forward("gla", T=T, H=H, K=64, V=64, path="fused").launches[0], torch.device("cpu"))

    assert all(walk(T, H) == walk(300, 3) for T in (1, 64, 65, 3008) for H in (1, 3, 16))


@gluon
def test_states_of_segments_are_handed_on_only_if_the_gradient_cuts_alike(monkeypatch):
    """By an older Triton it is the portable kernel's, which has twice as many programs here."""
    narrow, wide = [meta(1, 65536, 4, 64)] * 4, [meta(1, 65536, 4, 128)] * 4
    *_, starts = forward("gla", *wide, kernel="hopper").outputs
    assert starts is not None
    found = backward("gla", *wide, kernel="hopper")
    assert names(found) == ["walk", "walk", "carry", "unwind", "mend_gradient"]
    states = found.launches[0].given("states").tensor
    assert states.bytes == 1024 * 4 * 128 * 128 * 2  # of each chunk, in 16 bits
    monkeypatch.setattr("gla_ref.kernels.hopper.release", lambda: (3, 6))
    *_, starts = forward("gla", *narrow).outputs
    assert starts is not None
    *_, starts = forward("gla", *wide).outputs
    assert starts is None and backward("gla", *wide).name == "portable"


@gluon
@pytest.mark.parametrize("release, chosen", [((3, 6), "portable"), ((3, 7), "portable"), ((3, 9), "hopper")])
def test_the_triton_decides_on_the_gradient_of_gla(release, chosen, monkeypatch):
    monkeypatch.setattr("gla_ref.kernels.hopper.release", lambda: release)
    found = backward("gla")
    assert found.name == chosen and ("is hardly faster" in found.why[0]) == (chosen == "portable")
    found = backward("gla", kernel="hopper")
    assert found.name == "hopper" and "one walk backwards" in found.why[0]
    assert names(found) == ["walk", "unwind", "mend_gradient"] and found.launches[1].grid == (2 * 2,)
    assert "one walk backwards" in explain("gla", *call("gla"), hardware="sm_90", kernel="hopper")
    q, k, v, g = call("gla")
    other = {
        "bfloat16": call("gla", dtype=F16),
        "16 bits": (q, k, v, g.float()),
        "V of at most 128": call("gla", V=136),
    }
    for message, x in other.items():  # forward is Hopper's all the same
        x = tuple(x)
        assert forward("gla", *x, kernel="hopper").name == "hopper"
        found = backward("gla", *x, kernel="hopper")
        assert found.name == "portable" and message in found.why[0]


@gluon
@pytest.mark.skipif(CUDA, reason="on a CPU")
def test_the_page_of_gla_needs_a_hopper_gpu():
    x = [torch.zeros(1, 3, 1, 64, dtype=BF16)] * 4
    with pytest.raises(ValueError, match="^q: expected a tensor on a GPU of compute capability 9.0, got one on cpu"):
        gla_hopper.gla(*x)
    with pytest.raises(TypeError, match="^q: expected bfloat16, got torch.float32"):
        gla_hopper.gla(x[0].float(), *x[1:])


# the delta rules


@gluon
@pytest.mark.parametrize("mechanism", RULES)
def test_the_plans_of_the_delta_rules(mechanism):
    assert forward(mechanism).name == "hopper_ahead"
    for path in (None, *delta.PATHS):
        assert forward(mechanism, path=path) == forward(mechanism, kernel="hopper", path=path)
    for kernel in DELTA_KERNELS[1:]:
        found = forward(mechanism, kernel=kernel)
        assert found.name == kernel and found.why[0] == f"{kernel}: it was asked for"
        assert kernel in explain(mechanism, *call(mechanism), hardware="sm_90", kernel=kernel)
    for kernel in (None, *DELTA_KERNELS):
        found = backward(mechanism, kernel=kernel)
        assert found.name == "hopper" and "Hopper, in Gluon" in found.why[0]
        assert names(found) == ["solve", "walks", "gradients"]


@gluon
def test_the_number_of_programs_decides_between_them():
    few, many = (GATED(B=B, HV=64) for B in (1, 2))
    assert few.name == "hopper_ahead" and "64 value heads of sequences for sm_90, 132" in few.why[0]
    assert many.name == "hopper_fused"
    assert launches(few) == [("solve", (64 * 5,)), ("walk", (2 * 64,))]
    assert [(x.name, x.grid, x.given("EXACT")) for x in many.launches] == [("fused", (128,), 0), ("fused", (128,), 1)]
    fewer = GATED(B=1, HV=32)  # programs for 32 columns each still fit at once
    assert [x.grid for x in fewer.launches] == [(32 * 5,), (4 * 32,)]


@gluon
def test_few_heads_of_long_sequences_are_cut_into_segments():
    found = GATED(**LONG, HV=8)
    walk, carry, again = ("walk", (4 * 8 * 8,)), ("carry_maps", (8 * 8,)), ("walk", (2 * 8 * 8,))
    assert launches(found) == [("solve", (8 * 512,)), walk, carry, again]
    assert "each sequence in segments of 64 of its 512 chunks: 16 programs for sm_90, 132 multiprocessors" in found.why
    many = GATED(**LONG, HV=32)
    assert names(many) == ["solve", "walk"]
    whole = "each sequence in one go: 128 programs for sm_90, 132 multiprocessors"
    assert whole in many.why
    # eight sequences of 4,096 tokens are as many programs as one of 64 heads
    for HV, N, expected in ((8, 8, ["solve", "walk"]), (2, 2, ["solve", "walk", "carry_maps", "walk"])):
        assert names(GATED(**LONG, HV=HV, options={"cu_seqlens": meta(N + 1, dtype=torch.int32)})) == expected

    found = BACK(**LONG, HV=8, kernel="hopper")
    assert launches(found) == [
        ("solve", (8 * 512,)),
        ("walks", ((4 + 2) * 8 * 8,)),
        ("carry_both", (2 * 8 * 8,)),
        ("walks", ((2 + 2) * 8 * 8,)),
        ("gradients", (132,)),
    ]
    maps, walks = (x for x in found.launches if x.name == "walks")
    assert maps.given("rows") is None and maps.given("n_forwards") == 4 * 8 * 8
    assert walks.given("S_in") is maps.given("S_out") and walks.given("R_in") is maps.given("R_out")
    assert launches(BACK(**LONG, HV=32), 1) == [("walks", (4 * 32,)), ("gradients", (132,))]

    few, many = (forward("kda", **LONG, H=H, HV=H) for H in (2, 64))
    assert names(few)[2:] == ["walk", "carry_maps", "walk"]
    assert names(many)[2:] == ["walk"] and whole in many.why


@gluon
def test_a_path_that_is_asked_for_is_taken():
    for T, L in ((300, 2), (32768, 64)):
        found = GATED(B=1, T=T, HV=8, kernel="hopper", path="segmented")
        assert found.name == "hopper_ahead" and found.launches[-1].given("L") == 64 * L
        assert any("in segments" in x and "it was asked for" in x for x in found.why)
        assert names(GATED(B=1, T=T, HV=8, kernel="hopper", path="fused")) == ["solve", "walk"]
    many = GATED(B=1, HV=96, kernel="hopper", path="segmented")
    assert many.name == "hopper_ahead" and len(many.launches) == 4


@gluon
def test_a_cut_is_one_that_the_model_calls_faster():
    for heads, chunks in itertools.product((1, 4, 16, 33, 66, 132, 200), (1, 16, 128, 512)):
        last = partial(delta_ahead.duration, CLASSES["sm_90"], K=128, V=128, heads=heads, chunks=chunks)
        setup, length = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, chunks, None)
        whole, _ = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, chunks, "fused")
        assert whole == (delta_ahead.NARROW if 4 * heads <= 132 else delta_ahead.WIDE)
        one_go = last(setup=whole, length=chunks)
        assert last(setup=setup, length=length) < one_go if length < chunks else setup == whole


@gluon
def test_the_book_draws_walkers_as_wide_as_the_plan_makes_them():
    for setup in (delta_ahead.NARROW, delta_ahead.WIDE):
        assert delta_roles.WALK[setup.columns] == setup.chunk
    for heads in range(1, 133):
        setup, length = delta_ahead.choose(CLASSES["sm_90"], 128, 128, heads, 128, "fused")
        assert (setup.columns, length) == (delta_roles.columns(heads), 128)


@gluon
def test_two_kernels_are_planned_while_two_programs_a_head_run_at_once():  # chapter 23's rule
    for heads, chunks in itertools.product((1, 8, 33, 65, 66, 67, 132, 133, 264), (8, 128, 512)):
        fused = delta_fused.duration(CLASSES["sm_90"], heads, chunks)
        two_kernels = delta_ahead.whole_duration(CLASSES["sm_90"], 128, 128, heads, chunks, None)
        assert (two_kernels < fused) == (2 * heads <= 132)


@gluon
@pytest.mark.parametrize(
    "why, dtype, scale", [(None, BF16, None), ("tokens are torch.float16", F16, None), ("scale is 1e-09", BF16, 1e-9)]
)
def test_sums_pass_through_memory_in_float32_where_bfloat16_has_no_range(why, dtype, scale):
    found = BACK(dtype=dtype, kernel="hopper", options={"scale": scale})
    kept, (solve, walks, gradients) = F32 if why else BF16, found.launches
    assert walks.given("rows").dtype == walks.given("dstates").dtype == kept
    assert (walks.given("d_rows") is None) == (why is not None)
    assert solve.given("factors").shape[2] == walks.given("ROWS") == (6 if dtype == F16 else 5)
    assert solve.given("LEAST") == (0.0 if why else 2.0**-40)
    assert gradients.kernel.fn.__module__.endswith("delta_gradient") == (why is not None)
    assert any(why in x for x in found.why) if why else "in float32" not in " ".join(found.why)


@gluon
def test_gradients_sums_value_heads_itself():
    for groups in (1, 2, 4):
        found = BACK(HV=2 * groups, kernel="hopper")
        launched = found.launches[-1]
        assert (launched.name, launched.grid) == ("gradients", (10 * 2,)) and launched is found.steps[-1]
        assert launched.given("G") == groups
        for name in ("dq", "dk"):
            assert (launched.given(name).shape, launched.given(name).dtype) == ((2, 300, 2, 128), BF16)


def test_what_the_page_of_the_delta_rule_leaves_out_is_refused(monkeypatch):
    q, g = torch.zeros(1, 3, 2, 128, dtype=BF16), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="^q: expected a tensor on a GPU of compute capability 9.0, got one on cpu"):
        gated_delta_rule_hopper.gated_delta_rule(q, q, q, g, g)
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
    monkeypatch.setattr(gated_delta_rule_hopper, "on_hopper", lambda x: True)
    for message, x in refused.items():
        with pytest.raises((ValueError, TypeError), match=message):
            gated_delta_rule_hopper.gated_delta_rule(*x)


# KDA


@gluon
def test_the_plans_of_kda():
    found = forward("kda")
    assert found == forward("kda", kernel="hopper") and found.name == "hopper"
    assert launches(found) == [("prepare", (2 * 4 * 5,)), ("mend", (2 * 4 * 5,)), ("walk", (2 * 4 * 2,))]
    assert names(backward("kda")) == ["prepare", "mend", "walks", "gradients", "mend_gradients"]
    assert backward("kda", path="segmented").name == backward("kda", options={"scale": 1e-9}).name == "portable"
    assert "Hopper kernels, in Gluon" in explain("kda", *call("kda"), hardware="sm_90")
    assert names(forward("kda", path="segmented")) == ["prepare", "mend", "walk", "carry_maps", "walk"]
