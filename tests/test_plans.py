"""Plans for every class of GPU, made without one: which tiles, which sizes are refused. Nothing is compiled."""

import math
from types import SimpleNamespace

import pytest
import torch
from cases import CHOSEN, in_process, meta_tokens
from harness import HERE

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.backends.nvidia import driver

from gla_ref.kernels import explain, gla, plan, steps
from gla_ref.kernels.launch import checks, program
from gla_ref.kernels.launch.hardware import CLASSES, INTERPRETER, class_of
from gla_ref.kernels.launch.plan import Launch, spec_of
from gla_ref.mechanisms import MECHANISMS

SIZES = (16, 60, 64, 100, 128)
CALLS = (*MECHANISMS, "gla g_v", "gla_step")


def plans(call, K, V, dtype, hardware, T=300, kernel=None):
    """Forward and backward of a call of some length."""
    mechanism, *extra = call.split()
    tensors = list(meta_tokens(mechanism.removesuffix("_step"), T, 2, 3, K, V, dtype, HV=6).values())
    if mechanism == "gla_step":
        hardware = hardware if isinstance(hardware, tuple) else CLASSES[hardware]
        call = gla.Call(*tensors, g_v=None, initial_state=None, cu_seqlens=None, scale=None)
        return [steps.gla_forward.plan(hardware, steps.gla_forward.specs(call))]
    options = {"g_v": tensors[2]} if extra else {}
    options |= {"kernel": kernel} if mechanism in CHOSEN else {}
    return [plan(mechanism, *tensors, direction=d, hardware=hardware, **options) for d in ("forward", "backward")]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_plan_up_to_128(call, name):
    dtypes = [torch.float32, torch.float16]
    if CLASSES[name].matrix_units:
        dtypes.append(torch.bfloat16)
    for K in SIZES:
        for V in (16, 100, 128):
            for dtype in dtypes:
                made = plans(call, K, V, dtype, name)
                assert made == plans(call, K, V, dtype, name)  # of the call alone
                for launch in [x for p in made for x in p.launches]:
                    C, BK, BV = (launch.given(n) for n in ("C", "BK", "BV"))
                    BK, BV = BK or launch.given("K"), BV or launch.given("V")  # Hopper's programs have whole rows
                    if launch.name in ("walk", "step"):  # all rows of a state are in one program
                        k = launch.given("k")
                        assert BK >= getattr(k, "tensor", k).shape[-1]
                    if launch.given("LEVELS"):
                        assert 1 << launch.given("LEVELS") == C and C >= 16
                    if dtype == torch.bfloat16 and launch.name in ("walk", "gradients"):
                        assert min(BK, BV) >= 32  # narrower ones came out wrong once


def test_a_plan_is_frozen():
    forward, _ = plans("gla", 64, 64, torch.float16, "sm_75")
    with pytest.raises(AttributeError):
        forward.steps = ()
    with pytest.raises(AttributeError):
        forward.launches[0].grid = (1,)


@pytest.mark.parametrize("D, dtype", [(128, torch.bfloat16), (64, torch.float32)])
def test_the_interpreter_plays_the_tiles_of_hopper(D, dtype):
    """So that the gate, which has no GPU, runs portable kernels as an H200 does."""
    here, there = (
        {
            (x.name, *map(x.given, ("C", "BK", "BV")), *map(x.options.get, ("num_warps", "num_stages")))
            for p in plans("gla", D, D, dtype, hardware, kernel="portable")
            for x in p.launches
            if x.given("C")
        }
        for hardware in (INTERPRETER, "sm_90")
    )
    assert here == there


@pytest.mark.parametrize("call", CALLS[:-1])
def test_sizes_that_do_not_fit_are_named(call):
    with pytest.raises(ValueError, match=r"^q: expected K of at most 128 .* on sm_75 \(64 KiB .*, got 256$"):
        plans(call, 256, 64, torch.float16, "sm_75")
    for name in set(CLASSES) - {"sm_75"}:
        assert plans(call, 256, 256, torch.float16, name)


@pytest.mark.parametrize("call", ("softmax_attention", "linear_attention", "simple_gla"))
def test_values_that_do_not_fit_are_named(call):
    """Backward they are keys to the walk that makes dq."""
    with pytest.raises(ValueError, match=r"^v: expected V of at most 128 .* on sm_75 .*, got 200$"):
        plans(call, 64, 200, torch.float32, "sm_75")


@pytest.mark.parametrize("name", ["g", "v", "path", "kernel"])
def test_a_plan_is_refused_as_its_call_would_be(name):
    x = meta_tokens("gla", 64, 2, 2, 64, 64, torch.bfloat16)
    x[name] = {"g": x["g"][..., :32], "v": x["v"].repeat(1, 1, 1, 9), "path": "foo", "kernel": "foo"}[name]
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        explain("gla", *[x.pop(n) for n in ("q", "k", "v", "g")], hardware="sm_90", **x)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_plan_has_kernels_dtypes(mechanism):
    with pytest.raises(TypeError, match="^q: expected float32, float16 or bfloat16, got torch.float64"):
        plan(mechanism, *meta_tokens(mechanism, dtype=torch.float64).values(), hardware="sm_90")


def test_bfloat16_needs_matrix_units(monkeypatch):
    with pytest.raises(TypeError, match="float32 or float16 on sm_75, got bfloat16"):
        plans("gla", 64, 64, torch.bfloat16, "sm_75")
    monkeypatch.setattr(checks, "hardware_of", lambda device: CLASSES["sm_75"])
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=HERE)
    with pytest.raises(TypeError, match="q: expected float32 or float16 on sm_75, got bfloat16"):
        checks.check_launch({"q": q}, MECHANISMS["gla"].arguments)


@pytest.mark.parametrize("name", CLASSES)
def test_plans_explain_themselves(name):
    x = meta_tokens("gla", H=4, K=64, V=64, dtype=torch.float16, gates=torch.float32)
    text = explain("gla", *x.values(), hardware=name)
    assert name in text and "walk" in text and "gradients" in text


def test_newer_cards_are_planned_as_the_newest_known():
    assert class_of(8, 7).name == "sm_86" and class_of(12, 1).name == "sm_120"
    with pytest.raises(ValueError, match="7.5 or newer, got 7.0"):
        class_of(7, 0)


@pytest.mark.parametrize("call", CALLS)
def test_every_tensor_of_a_plan_has_a_name_of_its_own(call):
    """Inputs too; programs find tensors by them. The lengths are such that sequences are cut into segments."""
    for p in plans(call, 64, 64, torch.bfloat16, CLASSES["sm_90"], T=5000):
        made = [step.tensor.name for step in p.steps if hasattr(step, "tensor")]
        names = made + [x.name for x in p.inputs if x is not None]
        assert len(set(names)) == len(names), names


VARIANTS = """
import itertools, sys, torch, triton
sys.path[:0] = ["tools", "src"]
from compile_kernels import Target

triton.runtime.driver.set_active(Target())
from gla_ref.kernels import plan
from gla_ref.kernels.launch import program
from gla_ref.kernels.launch.plan import Box, Spec

found, binders = {}, {}
mechanisms = "softmax_attention", "linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule"
for mechanism, T, (B, H), K, cut in itertools.product(
    mechanisms, (1, 64, 65, 100, 3000), ((1, 1), (2, 3)), (60, 64), (0, 1)
):
    numbers = {"simple_gla": 1, "delta_rule": 1, "gated_delta_rule": 2}.get(mechanism, 0)
    shapes = [(B, T, H, K)] if mechanism == "gla" else [(B, T, H)] * numbers
    # with `cut`, rows apart and off 16 bytes
    x = [torch.empty(*s[:-1], s[-1] + cut, dtype=torch.bfloat16)[..., cut:] for s in [(B, T, H, K)] * 3 + shapes]
    for direction in ("forward", "backward"):
        for launch in plan(mechanism, *x, direction=direction, hardware="sm_90").launches:
            args = []
            for y in launch.args:
                if isinstance(y, Box):
                    y = program.describe(y, program.Mock(y.tensor))
                args.append(program.Mock(y) if isinstance(y, Spec) else y)
            if launch.kernel not in binders:
                *_, binders[launch.kernel] = launch.kernel.create_binder()
            _, specialised, options = binders[launch.kernel](*args, **launch.options, debug=False)
            key = program.variant(launch, torch.device("cpu"))
            found.setdefault(key, set()).add(str((specialised, sorted(options.items()))))
print(len(found), max(map(len, found.values())))
"""


@pytest.mark.deep
def test_equal_variants_are_compiled_alike():
    """Launches that Triton compiles apart share no kernel: its own specialisation is asked, nothing compiled."""
    variants, most = map(int, in_process("-c", VARIANTS).split())
    assert variants > 50 and most == 1


def wrapped(launcher):
    """A function as Triton wraps around its C function, for a kernel with descriptors."""
    return lambda *args: launcher(*args)


@pytest.mark.parametrize("release", [(3, 6), (3, 9), (3, 7)])
def test_direct_hands_its_arguments_to_tritons_function(release, monkeypatch):
    """In the order that each release wants; None where nobody has measured it."""
    got = []
    run = SimpleNamespace(
        launch=wrapped(lambda *args: got.append(args)), global_scratch_size=0, profile_scratch_size=0,
        launch_cooperative_grid="cooperative", launch_pdl="pdl", arg_annotations="types", kernel_signature="bytes",
    )  # fmt: skip
    kernel = SimpleNamespace(run=run, metadata=SimpleNamespace(), function="function", packed_metadata="packed")
    monkeypatch.setattr(program, "release", lambda: release)
    x = torch.zeros(4)
    start = program.direct(Launch(None, (2,), (spec_of("x", x), 7), {}), {"x": 1}, kernel, None)
    if release == (3, 7):
        assert start is None
        return
    start(["stream", x])
    first = 2, 1, 1, "stream", "function", "cooperative", "pdl"
    if release == (3, 6):
        expected = *first, None, None, "packed", None, None, None, x.data_ptr(), 7
    else:
        expected = *first, "packed", None, None, None, None, None, "types", "bytes", [x.data_ptr(), 7]
    assert got == [expected]


def test_the_c_function_is_found_behind_tritons_own():
    metas = [dict.fromkeys(("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"), 0)]
    for kind, some in (("*bf16", None), ("tensordesc<bf16[64, 64]>", metas)):
        launch = driver.wrap_handle_tensordesc(math.hypot, {"x": kind}, some)
        assert program.c_function(launch) is math.hypot
        assert (launch is math.hypot) == (some is None)
