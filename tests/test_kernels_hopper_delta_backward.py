"""The delta rules' gradient in Hopper walks: its plan anywhere, its source played on a CPU, results on a GPU."""

import itertools
from functools import partial

import played_gluon
import pytest
import torch
from cases import LADDER, thin
from harness import CUDA, compare, results
from test_kernels_delta import KEYS, KERNELS, MILD, RULES, problem
from test_kernels_hopper_delta import BF16, CUT, F16, F32, LENGTHS, ON_HOPPER, PACK, call, gluon, on_hopper, played_here

from gla_ref.kernels import delta, plan
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of

HALVES = (BF16, F16)
BACK = partial(ON_HOPPER, direction="backward")


# the plan


@gluon
def test_only_who_asks_for_it_gets_it():
    for mechanism, (q, k, v, g, beta) in ((m, call()) for m in RULES):
        rows = (q, k, v, beta) if mechanism == "delta_rule" else (q, k, v, g, beta)
        found = plan(mechanism, *rows, hardware="sm_90", direction="backward", kernel="hopper")
        assert found.name == "hopper" and "Hopper, in Gluon" in found.why[0]
        assert [x.name for x in found.launches] == ["solve", "walk", "walk_back", "gradients"]
    for kernel in (None, "hopper_fused", "hopper_ahead"):
        found = BACK(*call(), kernel=kernel)
        assert found.name == "portable" and "only where kernel='hopper' asks for it" in found.why[0]
    assert BACK(*call(), kernel="portable").why[0] == "the portable kernel: it was asked for"


@gluon
@pytest.mark.parametrize("message, sizes", [("K of 64 or 128, not 96", {"K": 96}), ("q is torch.float32", {"dtype": F32})])
def test_the_portable_gradient_takes_what_it_does_not(message, sizes):
    found = BACK(*call(**sizes), kernel=None)
    assert found.name == "portable" and message in found.why[0]


@gluon
def test_few_heads_of_long_sequences_are_cut_into_segments():
    found = BACK(*call(B=1, T=32768, HV=8), kernel="hopper")
    assert [(x.name, x.grid) for x in found.launches] == [
        ("solve", (8 * 512,)),
        ("walk", (4 * 8 * 8,)),
        ("carry", (8 * 8,)),
        ("walk", (2 * 8 * 8,)),
        ("walk_back", (4 * 8 * 8,)),
        ("carry", (8 * 8,)),
        ("walk_back", (2 * 8 * 8,)),
        ("gradients", (8 * 512,)),
    ]
    assert [x.given("REVERSE") for x in found.launches if x.name == "carry"] == [False, True]
    one = BACK(*call(B=1, T=32768, HV=32), kernel="hopper")
    assert [(x.name, x.grid) for x in one.launches[1:3]] == [("walk", (4 * 32,)), ("walk_back", (4 * 32,))]


@gluon
def test_sums_pass_through_memory_in_the_precision_of_the_portable_kernel():
    for dtype, kept in ((BF16, BF16), (F16, F32)):
        walk_back = BACK(*call(dtype=dtype), kernel="hopper").launches[2]
        assert walk_back.given("r").dtype == walk_back.given("dstates").dtype == kept
        assert (walk_back.given("d_r") is None) == (walk_back.given("divisors") is not None) == (dtype == F16)


# played from its source


def played(x, ends=None, scale=None, seed=0, ignored=None, path=None, need_dg=True):
    """Gradients of inputs of `problem`; the portable `gradients` is interpreted."""
    from gla_ref.kernels.hopper import delta_ahead, delta_backward, delta_chunk, gla_forward

    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta", "S")} | {"cu": cu, "do": x["do"], "dS": x["dS"]}
    specs = [spec_of(n, y) for n, y in named.items()]
    found = delta.plan_backward(CLASSES["sm_90"], *specs, scale, path, "hopper", need_dg and x["g"] is not None)
    named = {n: y for n, y in named.items() if y is not None}
    *made, _ = played_gluon.play(found, named, (delta_ahead, delta_backward, delta_chunk, gla_forward), seed, ignored)
    made = zip(("dq", "dk", "dv", "dg", "dbeta", "dS0"), made, strict=True)
    return {n: y for n, y in made if y is not None}


def check(mechanism, *sizes, ends=None, scale=None, path=None, dtype=BF16, gates=F32, groups=2, **kw):
    """Played here, run on a GPU: within the budgets of the portable kernel."""
    kw |= {"ends": ends, "scale": scale, "dtype": dtype, "gates": gates, "groups": groups, "path": path}
    x, judged = problem(mechanism, *sizes, **kw)
    judged = {n: y for n, y in judged.items() if n not in ("o", "S")}
    if CUDA:
        found = results(KERNELS[mechanism], x, ends, path=path, scale=scale, kernel="hopper")
        compare({n: y for n, y in found.items() if n in judged}, judged)
    else:
        found = played(x, ends, scale, path=path)
        assert set(found) == set(judged)
        compare(found, judged)


@played_here
@pytest.mark.parametrize(
    "mechanism, dtype, T", thin(list(itertools.product(RULES, HALVES, LENGTHS)), (RULES[1], BF16, 65), (RULES[0], F16, 65))
)
def test_the_source_at_every_length(mechanism, dtype, T):
    check(mechanism, 2, T, 1, 64, 128, dtype=dtype)
