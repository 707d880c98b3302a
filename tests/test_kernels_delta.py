"""The delta rules in Triton against their float64 recurrences: interpreted here, compiled on a GPU."""

import functools
import itertools

import harness
import pytest
import torch
from cases import CORRELATIONS, F64, LADDER, STRENGTHS, alike, in_process, thin
from delta_problems import EVERY, GATED, KEYS, MILD, RULES, problem
from harness import CUDA, DTYPES, F16, F32, HERE, RUNS, allowed, anywhere, compare, interpreted, results, tokens

from gla_ref import FORMS, triangular
from gla_ref.check._emulate import products_in
from gla_ref.rounding import Luck

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton import language as tl

from gla_ref.kernels import delta as kernels
from gla_ref.kernels.delta import delta_rule, gated_delta_rule
from gla_ref.kernels.kda import kda
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.portable.delta_forward import choose_path, inverse
from gla_ref.kernels.steps import delta_rule_step, gated_delta_rule_step, kda_step

KERNELS = {"delta_rule": delta_rule, "gated_delta_rule": gated_delta_rule, "kda": kda}
STEPS = {"delta_rule": delta_rule_step, "gated_delta_rule": gated_delta_rule_step, "kda": kda_step}
WAYS = [(mechanism, path) for mechanism in EVERY for path in kernels.PATHS]


def check(mechanism, *sizes, path=None, ends=None, scale=None, **kw):
    """Forward and all gradients within their budgets."""
    x, judged = problem(mechanism, *sizes, path=path, ends=ends, scale=scale, **kw)
    compare(results(KERNELS[mechanism], x, ends, path=path, scale=scale, kernel="portable"), judged)


# the triangle


@triton.jit
def invert(a, y, C: tl.constexpr):
    o = tl.arange(0, C)
    o = o[:, None] * C + o[None, :]
    tl.store(y + o, inverse(tl.load(a + o)))


@anywhere
@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_inverse_of_a_triangle(C):
    """By the keys that break series; the budget is that of the reference in float32, elimination in blocks.

    Merged by products in one order the error is 2.9e-5 at worst, in another 1.35e-4.
    """
    for correlation in CORRELATIONS:
        for strength in STRENGTHS:
            k = alike(torch.randn(C, 128, generator=torch.Generator().manual_seed(0), dtype=F64), correlation)
            A = (strength * k @ k.mT).tril(-1).float().to(HERE)
            Y, exact = torch.full_like(A, torch.nan), triangular.elimination(A.double())
            invert[(1,)](A.contiguous(), Y, C=C)
            with products_in(F32, Luck(RUNS)):
                low = triangular.blocked(A.expand(1, RUNS, C, C))[0]
            compare({"Y": Y}, {"Y": (exact, max(allowed(y, exact) for y in low))})


# interpreted


@interpreted
@pytest.mark.deep
@pytest.mark.parametrize("mechanism, start", [(m, t) for m in EVERY for t in range(1, 71, 10)])
def test_every_length(mechanism, start):
    for T in range(start, start + 10):
        kind, path = MILD if T % 2 else "many resets", kernels.PATHS[T // 2 % 2]
        x, judged = problem(mechanism, 1, T, 1, 3, 5, kind=kind, groups=1, path=path, seed=T)
        with torch.no_grad():
            o, S = KERNELS[mechanism](*tokens(x), initial_state=x["S"], path=path)
        compare({"o": o, "S": S}, judged)


@interpreted
@pytest.mark.parametrize(
    "mechanism, T", thin([(m, T) for m in EVERY for T in (1, 15, 16, 17, 50)], (RULES[0], 17), ("kda", 50))
)
def test_gradients_at_edges(mechanism, T):
    check(mechanism, 1, T, 1, 3, 5, groups=1, path=kernels.PATHS[T % 2], seed=T)


@interpreted
@pytest.mark.parametrize(
    "mechanism, kind",
    thin([(m, x) for m in GATED for x in LADDER], *((m, "many resets") for m in GATED), ("kda", "one strong channel")),
)
def test_the_gate_ladder(mechanism, kind):
    check(mechanism, 1, 37, 1, 5, 3, kind=kind)  # and HV = 2 H


@interpreted
@pytest.mark.parametrize(
    "mechanism, correlation, strength",
    thin([(m, *x) for m in EVERY for x in KEYS], *((m, 0.99, 2.0) for m in ("delta_rule", "kda"))),
)
def test_the_key_ladder(mechanism, correlation, strength):
    check(mechanism, 1, 33, 1, 8, 3, correlation=correlation, strength=strength, groups=1)


@interpreted
@pytest.mark.parametrize(
    "mechanism, path, correlation, strength",
    thin(
        [
            (m, path, *x)
            for m in EVERY
            for path in kernels.PATHS
            for x in ((0.0, None), (0.99, 1.0), (1.0, 2.0), (0.9, 0.0))
        ],
        *((m, "segmented", 0.99, 1.0) for m in GATED),
    ),
)
def test_chunks_of_64(mechanism, path, correlation, strength):
    """The interpreter is right in float16, whose chunks are long: blocks of 16 are merged twice."""
    kind = "mild and strong chunks" if correlation else MILD
    options = {"kind": kind, "correlation": correlation, "strength": strength, "dtype": F16, "gates": F32}
    check(mechanism, 1, 140, 1, 20, 37, path=path, groups=1, **options)


@interpreted
@pytest.mark.parametrize("mechanism, path", thin(WAYS, *((m, "segmented") for m in GATED)))
def test_packed_sequences(mechanism, path):
    """Lengths around a multiple of a chunk's, and of no tokens; odd sizes."""
    ends = tuple(torch.tensor([0, 1, 0, 17, 0]).cumsum(0).tolist())
    check(mechanism, 1, ends[-1], 1, 3, 5, kind="many resets", ends=ends, path=path, groups=1)


@interpreted
@pytest.mark.deep
@pytest.mark.parametrize("K, V", [(1, 1), (60, 16), (128, 16), (64, 100), (256, 40), (16, 512)])
def test_sizes_in_the_interpreter(K, V):
    for mechanism in GATED:
        check(mechanism, 1, 33, 1, K, V, path="segmented" if K > 60 else "fused")


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


@anywhere
@pytest.mark.deep
@pytest.mark.parametrize("mechanism", EVERY)
def test_initial_state_and_scale_are_optional(mechanism):
    x, _ = problem(mechanism, 1, 19, 1, 5, 7)
    form, zero = FORMS[mechanism]["triton"], torch.zeros_like(x["S"])
    assert torch.equal(form(*tokens(x))[0], form(*tokens(x), initial_state=zero, scale=5**-0.5, kernel="portable")[0])
    assert torch.equal(form(*tokens(x))[0], FORMS[mechanism]["triton_portable"](*tokens(x))[0])


@anywhere
@pytest.mark.parametrize("mechanism, scale", thin([(m, s) for m in EVERY for s in (0.0, -2.0)], (RULES[1], 0.0)))
def test_any_scale(mechanism, scale):
    check(mechanism, 1, 17, 1, 5, 7, scale=scale, groups=1)


@anywhere
@pytest.mark.deep
@pytest.mark.parametrize("mechanism", EVERY)
def test_split_and_carry(mechanism):
    x, judged = problem(mechanism, 1, 19, 1, 20, 7)
    harness.hold_in_parts(KERNELS[mechanism], x, judged, (1, 16, 17))


@anywhere
@pytest.mark.deep
@pytest.mark.parametrize("mechanism, path", WAYS)
def test_strides_poison_and_equal_runs(mechanism, path, poisoned):
    x, judged = problem(mechanism, 2, 19, 1, *((20, 36) if CUDA else (5, 7)), path=path)
    harness.hold_at_any_strides(KERNELS[mechanism], x, judged, path=path)


@anywhere
@pytest.mark.deep
@pytest.mark.parametrize("mechanism", GATED)
def test_gates_alone_may_need_no_gradient(mechanism):
    x, _ = problem(mechanism, 1, 17, 1, 5, 7)
    form = KERNELS[mechanism]
    q, k, v, g, beta = (y.detach() for y in tokens(x))
    every = [y.clone().requires_grad_() for y in (q, k, v, g, beta)]
    o, _ = form(*every)
    want = torch.autograd.grad(o.sum(), every)
    few = [every[i] for i in (0, 1, 2, 4)]
    o, _ = form(*every[:3], g, every[4])
    for y, z in zip(torch.autograd.grad(o.sum(), few), (want[i] for i in (0, 1, 2, 4)), strict=True):
        assert torch.equal(y, z)


def test_choice_of_segments():
    choose = functools.partial(choose_path, multiprocessors=132)
    assert choose(16, 512) == ("segmented", 64)
    assert choose(33, 512) == ("segmented", 128)
    assert choose(34, 512) == ("fused", 512)  # three segments would take as long
    assert choose(1, 63) == ("fused", 63)  # too short to cut
    assert choose(1, 64) == ("segmented", 16)
    assert choose(32, 512, packed=16) == ("segmented", 16)


WALK = """
import sys, tempfile
sys.path[:0] = ["tools", "src"]
import compile_kernels as tool
launch = next(x for x in tool.launches(90, "kda wide") if x.name == "walk")
with tempfile.TemporaryDirectory() as cache:
    tool.begin(cache)
    print(tool.compiled(launch, 90)["shared"])
"""


@interpreted
def test_the_widest_walk_fits_a_multiprocessor():
    """`make compile` checks all launches; this one holds more tiles of keys than those of the delta rules."""
    assert 0 < int(in_process("-c", WALK)) <= CLASSES["sm_90"].shared_memory


# token by token


def stepped(mechanism, *sizes, ends=None, **kw):
    x, judged = problem(mechanism, *sizes, ends=ends, products=F32, **kw)
    cu = None if ends is None else torch.tensor(ends, device=HERE)
    o, S = STEPS[mechanism](*tokens(x), initial_state=x["S"], cu_seqlens=cu)
    compare({"o": o, "S": S}, {n: judged[n] for n in ("o", "S")})


@anywhere
@pytest.mark.parametrize("kind", thin(LADDER, "many resets"))
@pytest.mark.parametrize("mechanism", GATED)
def test_steps_on_the_gate_ladder(mechanism, kind):
    stepped(mechanism, 2, 3, 1, 5, 7, kind=kind)


@anywhere
@pytest.mark.parametrize(
    "mechanism, K, V",
    thin([(m, *x) for m in EVERY for x in ((1, 1), (60, 100), (256, 40), (16, 512))], (RULES[0], 60, 100)),
)
def test_steps_of_sizes(mechanism, K, V):
    stepped(mechanism, 1, 1, 2, K, V, dtype=F16 if K == 60 else F32)


@anywhere
def test_steps_of_packed_sequences(poisoned):
    stepped("gated_delta_rule", 1, 7, 1, 5, 7, ends=(0, 2, 2, 7))


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism", EVERY)
@pytest.mark.parametrize("T", [63, 257, 1000, 2049])
def test_lengths_on_the_gpu(mechanism, T, dtype):
    for path in kernels.PATHS:
        check(mechanism, 2, T, 2, 64, 100, dtype=dtype, path=path)


# each K with two V and each V with two K, so that few kernels are compiled
SIZES = [(16, 60), (16, 512), (60, 16), (60, 128), (64, 100), (64, 64), (100, 60), (100, 100), (128, 128), (128, 16)]
SIZES += [(256, 512), (256, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, V", SIZES)
def test_sizes_on_the_gpu(K, V, dtype):
    for mechanism, path in zip(EVERY, (*kernels.PATHS, None), strict=True):
        check(mechanism, 2, 193, 2, K, V, dtype=dtype, path=path, groups=1 if K == 64 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder_on_the_gpu(kind, dtype):
    for mechanism, path in itertools.product(GATED, kernels.PATHS):
        check(mechanism, 2, 300, 2, 64, 100, kind=kind, dtype=dtype, gates=F32, path=path)
        check(mechanism, 2, 200, 2, 128, 64, kind=kind, dtype=dtype, path=path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("correlation, strength", KEYS)
def test_the_key_ladder_on_the_gpu(correlation, strength, dtype):
    for mechanism, path in zip(EVERY, (*kernels.PATHS, None), strict=True):
        check(mechanism, 2, 300, 2, 128, 64, correlation=correlation, strength=strength, dtype=dtype, path=path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [None, *kernels.PATHS])
def test_packed_on_the_gpu(path, dtype):
    ends = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)
    for mechanism in GATED:
        check(mechanism, 1, 1100, 2, 64, 128, kind="many resets", dtype=dtype, path=path, ends=ends)
    check("delta_rule", 1, 1100, 2, 128, 64, dtype=dtype, path=path, ends=ends)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, V", [(16, 16), (60, 100), (128, 128), (256, 512)])
def test_steps_on_the_gpu(K, V, dtype):
    for mechanism in EVERY:
        stepped(mechanism, 3, 4, 2, K, V, dtype=dtype, kind="many resets")
