"""The portable kernels of linear attention, GLA and the delta rules against the float64 recurrence.

Interpreted here, compiled on a GPU. What GLA's have alone: test_kernels_gla.py; token by token: test_kernels_steps.py.
"""

import functools
from itertools import product

import harness
import pytest
import torch
from cases import CORRELATIONS, F64, LADDER, LINEAR, STRENGTHS, alike, error, in_process, thin
from harness import BF16, CUDA, DTYPES, EVERY_DTYPE, F16, F32, HERE, RUNS, allowed, anywhere, compare, interpreted
from problems import EVERY, KEYS, MILD, problem

from gla_ref import FORMS, triangular
from gla_ref import linear_attention as linear_references
from gla_ref.check import oracle
from gla_ref.check._emulate import products_in
from gla_ref.rounding import Luck

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton import language as tl

from gla_ref.kernels import delta, gla
from gla_ref.kernels import linear_attention as linear
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of
from gla_ref.kernels.linear_attention import linear_attention, simple_gla
from gla_ref.kernels.portable import delta_forward
from gla_ref.kernels.portable.tiles import pattern, patterns

# on Hopper "triton" of GLA may be another kernel: test_kernels_hopper.py
KERNELS = {m: FORMS[m]["triton"] for m in LINEAR} | {m: FORMS[m]["triton_portable"] for m in EVERY}
PATHS = {"simple_gla": linear.PATHS, "gla": gla.PATHS, **dict.fromkeys(EVERY, delta.PATHS)}
WAYS = [(mechanism, path) for mechanism in PATHS for path in PATHS[mechanism]]
GATED = ("gated_delta_rule", "kda")
LONG = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)


def check(mechanism, *sizes, path=None, ends=None, scale=None, **kw):
    """Forward and all gradients within their budgets; without gates linear attention as well as simple GLA."""
    x, judged = problem(mechanism, *sizes, path=path, ends=ends, scale=scale, **kw)
    compare(harness.results(KERNELS[mechanism], x, ends, path=path, scale=scale), judged)
    if mechanism == "simple_gla" and kw.get("kind") == "zero":
        compare(harness.results(KERNELS["linear_attention"], x | {"g": None}, ends, path=path, scale=scale), judged)


def mixed(mechanism):
    return "mild and strong chunks" if mechanism == "gla" else MILD


# lengths, sizes, gates and keys


@interpreted
@pytest.mark.parametrize(
    "mechanism, start",
    thin([(m, t) for m in PATHS for t in range(1, 71 if m in EVERY else 131, 10)], ("simple_gla", 61)),
)
def test_every_length(mechanism, start):
    for T in range(start, start + 10):
        kind, paths = MILD if T % 2 else "many resets", PATHS[mechanism]
        path = paths[T // 2 % len(paths)]
        x, judged = problem(mechanism, 1, T, 1, 3, 5, kind=kind, groups=1, path=path, seed=T)
        with torch.no_grad():
            o, S = KERNELS[mechanism](*harness.tokens(x), initial_state=x["S"], path=path)
        compare({"o": o, "S": S}, judged)


EDGES = [("simple_gla", T) for T in (1, 15, 16, 17, 70, 130)]


@interpreted
@pytest.mark.parametrize(
    "mechanism, T",
    thin([*EDGES, *((m, T) for m in EVERY for T in (1, 15, 16, 17, 50))], *EDGES, ("delta_rule", 17), ("kda", 50)),
)
def test_gradients_at_edges(mechanism, T):
    check(mechanism, 1, T, 1, 3, 5, groups=1, path=PATHS[mechanism][T % len(PATHS[mechanism])], seed=T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism, T", [*product(PATHS, (1, 63, 64, 65, 257, 1000, 2049)), ("simple_gla", 4097)])
def test_lengths_on_the_gpu(mechanism, T, dtype):
    for path, (K, V) in zip(PATHS[mechanism], ((64, 100), (128, 64), (64, 64)), strict=False):
        check(mechanism, 2, T, 3, K, V, dtype=dtype, path=path)
    if mechanism == "simple_gla":
        check(mechanism, 2, T, 3, 60, 64, kind="zero", dtype=dtype)
        check(mechanism, 2, T, 3, 64, 64, kind="zero", dtype=dtype, path="fused", seed=1)


WIDTHS = (16, 60, 64, 100, 128, 256)
# of the delta family each K with two V and each V with two K, so that few kernels are compiled
FEW = [(16, 60), (16, 512), (60, 16), (60, 128), (64, 100), (64, 64), (100, 60), (100, 100), (128, 128), (128, 16)]
FEW += [(256, 512), (256, 64)]
ON_GPU = [*product(["simple_gla"], WIDTHS, (*WIDTHS, 512)), *product(["gla"], WIDTHS, (16, 60, 64, 128, 512))]
ON_GPU += [(mechanism, *size) for mechanism in EVERY for size in FEW]
SIZES = [(m, *size) for m in ("simple_gla", "gla") for size in ((60, 16), (128, 16), (64, 100), (256, 40), (16, 512))]
SIZES += [("simple_gla", 16, 60), ("simple_gla", 100, 64)]
SIZES += [(m, *size) for m in GATED for size in ((1, 1), (60, 16), (128, 16), (64, 100), (256, 40), (16, 512))]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    "mechanism, K, V", ON_GPU if CUDA else thin(SIZES, ("simple_gla", 60, 16), ("gla", 60, 16), ("gla", 128, 16))
)
def test_every_size(mechanism, K, V, dtype):
    if CUDA and mechanism not in EVERY and dtype == F32 and (K + V) % 16:
        pytest.skip("float32 has one path for every size: half of them will do")
    kind, path = mixed(mechanism) if K == 64 else MILD, None
    if CUDA and mechanism == "simple_gla" and (K + V) % 8 == 0:
        kind = "zero"
    if mechanism in EVERY:
        path = "segmented" if K > 60 else "fused"
    check(mechanism, *((2, 193, 3) if CUDA else (1, 33, 1)), K, V, kind=kind, dtype=dtype, path=path)


RUNGS = [(m, two, kind) for m, two in (("simple_gla", False), ("gla", False), ("gla", True)) for kind in LADDER]
RUNGS += [(m, False, kind) for m in GATED for kind in LADDER]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    "mechanism, two_sided, kind",
    thin(
        RUNGS,
        ("gla", True, "many resets"),  # the others: packed sequences only
        ("simple_gla", False, "-inf"),
        ("kda", False, "one strong channel"),
    ),
)
def test_the_gate_ladder(mechanism, two_sided, kind, dtype):
    family = mechanism in EVERY  # with two value heads to a key head
    if not CUDA:
        check(mechanism, 1, 37 if family else 70, 1, 5, 3, kind=kind, two_sided=two_sided)
        return
    for n, size in enumerate(((2, 300, 3, 64, 128), (2, 200, 3, 128, 100))):
        options = {"path": delta.PATHS[n], "gates": (F32, None)[n]} if family else {"two_sided": two_sided}
        check(mechanism, *size, kind=kind, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    "mechanism, correlation, strength",
    thin([(m, *x) for m in EVERY for x in KEYS], *((m, 0.99, 2.0) for m in ("delta_rule", "kda"))),
)
def test_the_key_ladder(mechanism, correlation, strength, dtype):
    keys = {"correlation": correlation, "strength": strength, "dtype": dtype}
    for path in delta.PATHS if CUDA else (None,):
        check(mechanism, *((2, 300, 2, 128, 64) if CUDA else (1, 33, 1, 8, 3)), **keys, groups=1 + CUDA, path=path)


@interpreted
@pytest.mark.parametrize(
    "mechanism, path, correlation, strength",
    thin(
        [(m, p, *x) for m, p in WAYS if m in EVERY for x in ((0.0, None), (0.99, 1.0), (1.0, 2.0), (0.9, 0.0))],
        ("gated_delta_rule", "segmented", 0.99, 1.0),
    ),
)
def test_chunks_of_64(mechanism, path, correlation, strength):
    """The interpreter is right in float16, whose chunks are long: blocks of 16 are merged twice."""
    kind = "mild and strong chunks" if correlation else MILD
    options = {"kind": kind, "correlation": correlation, "strength": strength, "dtype": F16, "gates": F32}
    check(mechanism, 1, 140, 1, 20, 37, path=path, groups=1, **options)


@interpreted
@pytest.mark.parametrize(
    "mechanism, path", thin([*WAYS, ("simple_gla", None)], *((m, "segmented") for m in ("simple_gla", "gla", *GATED)))
)
def test_packed_sequences(mechanism, path):
    """Lengths around a multiple of a chunk's, and of no tokens; odd sizes."""
    lengths = [0, 1, 0, 17, 0] if mechanism in EVERY else [0, 0, 1, 31, 32, 0, 33, 65, 0]
    ends, two_sided = torch.tensor(lengths).cumsum(0).tolist(), (mechanism, path) == ("gla", "fused")
    check(mechanism, 1, ends[-1], 1, 3, 5, kind="many resets", ends=ends, path=path, two_sided=two_sided, groups=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism, path", [*WAYS, *((mechanism, None) for mechanism in PATHS)])
def test_packed_on_the_gpu(mechanism, path, dtype):
    options = {"dtype": dtype, "path": path, "ends": LONG}
    check(mechanism, 1, 1100, 2, 64, 128, kind="many resets", **options)
    check(mechanism, 1, 1100, 2, 128, 64, kind="zero" if mechanism == "simple_gla" else MILD, **options)
    if mechanism == "gla":
        check(mechanism, 1, 1100, 2, 128, 64, two_sided=True, **options)
    if mechanism == "simple_gla":
        check(mechanism, 1, 1100, 2, 48, 64, kind="zero", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [MILD, "many resets", "-1"])
def test_gates_in_other_precisions(kind):
    for dtype, gates in [(BF16, F32), (F16, BF16), (F32, BF16), (BF16, F16)]:
        for K in (64, 128):
            check("gla", 2, 200, 3, K, 64, kind=kind, dtype=dtype, gates=gates)


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


@anywhere
@pytest.mark.parametrize("mechanism", thin(KERNELS, *LINEAR))
def test_initial_state_and_scale_are_optional(mechanism):
    x, _ = problem("simple_gla" if mechanism == "linear_attention" else mechanism, 2, 19, 1, 20, 7)
    args, zero = harness.tokens(x)[: 3 if mechanism == "linear_attention" else None], torch.zeros_like(x["S"])
    o, form = KERNELS[mechanism](*args, initial_state=zero, scale=20**-0.5)[0], FORMS[mechanism]["triton"]
    assert torch.equal(KERNELS[mechanism](*args)[0], o) and torch.equal(form(*args)[0], o)


SCALES = [(m, scale) for m in PATHS for scale in (0.0, -2.0)]


@anywhere
@pytest.mark.parametrize("mechanism, scale", thin(SCALES, *SCALES[:4], ("gated_delta_rule", 0.0)))
def test_any_scale(mechanism, scale):
    check(mechanism, 1, 19, 1, 20, 7, kind="zero" if mechanism == "simple_gla" else MILD, scale=scale, groups=1)


CARRIED = [*(x for x in WAYS if x[0] not in EVERY), *((m, None) for m in EVERY)]


@anywhere
@pytest.mark.parametrize("mechanism, path", thin(CARRIED, *(x for x in CARRIED[:-3] if x != ("gla", "segmented"))))
def test_split_and_carry(mechanism, path):
    x, judged = problem(mechanism, 2, 19, 1, 20, 7, kind=mixed(mechanism))
    harness.hold_in_parts(KERNELS[mechanism], x, judged, (1, 15, 16, 17), path=path)


@anywhere
@pytest.mark.parametrize("mechanism, path", thin(WAYS, ("gla", "fused")))
def test_strides_poison_and_equal_runs(mechanism, path, poisoned):
    K, V = (20, 36) if CUDA else (5, 7)  # the interpreter is slow
    x, judged = problem(mechanism, 2, 19, 1 if mechanism in EVERY else 2, K, V, kind=mixed(mechanism), path=path)
    harness.hold_at_any_strides(KERNELS[mechanism], x, judged, path=path)


@anywhere
@pytest.mark.deep
@pytest.mark.parametrize("mechanism", GATED)
def test_gates_alone_may_need_no_gradient(mechanism):
    x, _ = problem(mechanism, 1, 17, 1, 5, 7)
    every, few = (harness.results(KERNELS[mechanism], x, frozen=frozen) for frozen in ((), ("g",)))
    assert set(every) - set(few) == {"dg"} and all(torch.equal(y, every[n]) for n, y in few.items())


def test_choices_of_path():
    choose = functools.partial(linear.choose_path, multiprocessors=132)
    assert choose(256, 128) == ("fused", 128)
    assert choose(88, 1024) == ("fused", 1024)
    assert choose(32, 8)[0] == "fused"  # too short to cut
    assert choose(32, 1024) == ("segmented", 256)
    path, length = choose(8, 1024)
    assert path == "segmented" and 8 <= length <= 64
    choose = functools.partial(delta_forward.choose_path_by_maps, multiprocessors=132)
    assert choose(16, 512) == ("segmented", 64)
    assert choose(33, 512) == ("segmented", 128)
    assert choose(34, 512) == ("fused", 512)  # three segments would take as long
    assert choose(1, 63) == ("fused", 63)  # too short to cut
    assert choose(1, 64) == ("segmented", 16)
    assert choose(32, 512, packed=16) == ("segmented", 16)


# scalar gates and none


@interpreted
@pytest.mark.parametrize("ends", [None, (0, 0, 33, 33, 40, 97, 130, 130)])
def test_states_running_backwards(ends):
    """Narrow heads of halves without gates: all gradients in one walk (float16 is right in the interpreter)."""
    check("simple_gla", 1 if ends else 2, 130, 1, 6, 5, kind="zero", dtype=F16, path="fused", ends=ends)


POWERS = {  # of two, on q, k, v, the initial state and scale; the state's is that of k and v together
    "small scores": (-12, -12, 0, -12, 24),
    "a small state": (12, -17, -8, -25, 13),
    "large scores": (8, 8, 0, 8, -16),
    "a large state": (-10, 10, 10, 20, -10),
}


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", POWERS)
def test_float16_reads_scores_and_states_of_any_size(name, gated):
    """float16 holds 6e-8 to 65504, scores and states may be beyond: powers of two go through to the last bit."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, 40, 1, 16), (1, 40, 1, 16), (1, 40, 1, 8), (1, 1, 16, 8), (1, 40, 1, 8)]
    *x, S, do = (torch.randint(-8, 9, shape, generator=rng) / 8 for shape in shapes)
    g = [-0.1 * torch.rand(1, 40, 1, generator=rng)] * gated

    def run(a, b, c, state, scale):
        leaves = [y * 2.0**e for y, e in zip(x, (a, b, c), strict=True)]
        leaves = [y.half().requires_grad_() for y in (*leaves, *g)]
        attend = simple_gla if gated else linear_attention
        o, S_T = attend(*leaves, initial_state=S * 2.0**state, scale=2.0**scale)
        powers = [a + b + c + scale, b + c + scale, a + c + scale, a + b + scale, a + b + c + scale]
        found = [o, *torch.autograd.grad(o, leaves, do.half())]
        assert torch.isfinite(S_T).all()
        return [y.double() / 2.0**e for y, e in zip(found, powers, strict=False)], powers

    (plain, _), (scaled, powers) = run(0, 0, 0, 0, 0), run(*POWERS[name])
    for y, want, e in zip(scaled, plain, powers, strict=False):
        kept = want.abs() * 2.0**e < 65504  # what float16 can return
        assert ((y - want).abs() <= 2.0**-25 * (1 + 2.0**-e))[kept].all()


@anywhere
@pytest.mark.parametrize("B, H, V", [(2, 3, 36), (1, 1, 512)])
@pytest.mark.parametrize("normalize", [False, True])
def test_feature_maps_and_normaliser(normalize, B, H, V):
    """Budgets of o before the division, of both sums after it: 2 x what an emulated run has, + 4 eps."""
    x, _ = problem("simple_gla", B, 19, H, 20, V, kind="zero")
    args, phi = [x[n] for n in ("q", "k", "v")], linear_references.elu_plus_one
    options = {"feature_map": phi, "normalize": normalize}
    o, states = linear_references.recurrent(*(y.double() for y in args), **options)

    q, k, v = phi(args[0]), phi(args[1]), args[2]
    ones, runs = torch.ones_like(v[..., :1]), []
    low = (oracle.emulated("linear_attention", {"q": q, "k": k, "v": y}) for y in (v, ones))
    for one, total in zip(*low, strict=True):
        runs.append((one["o"] / total["o"], one["S"], total["S"][..., 0]) if normalize else (one["o"], one["S"]))

    def results(o, state):
        return (o, *state) if normalize else (o, state)

    def right(found):
        compare(dict(zip("oSz", found, strict=False)), judged)

    wanted = zip("oSz", results(o, states), zip(*runs, strict=True), strict=False)
    judged = {n: (y, max(allowed(x, y) for x in low)) for n, y, low in wanted}
    right(results(*linear_attention(*args, **options)))
    first, state = linear_attention(*(y[:, :17] for y in args), **options)
    second, state = linear_attention(*(y[:, 17:] for y in args), initial_state=state, **options)
    right(results(torch.cat([first, second], 1), state))


@anywhere
def test_gradients_of_the_widest_normalised_values():
    """512 value columns and the normaliser's own."""
    x, _ = problem("simple_gla", 1, 20, 1, 3, 512, kind="zero")
    args = [x[n].detach().requires_grad_() for n in ("q", "k", "v")]
    wide = [y.detach().double().requires_grad_() for y in args]
    options = {"feature_map": linear_references.elu_plus_one, "normalize": True}
    grads = []
    for form, leaves in ((linear_attention, args), (linear_references.recurrent, wide)):
        o, _ = form(*leaves, **options)
        grads.append(torch.autograd.grad(o, leaves, x["do"].to(o.dtype)))
    for got, want in zip(*grads, strict=True):
        # an absolute band: sums of 512 products of order 1, and the rounding of each
        assert (got - want).abs().max() <= 512 * harness.EPS * max(1, want.abs().max())


@interpreted
def test_gates_of_heads_far_apart():
    """More than 2^31 numbers between two heads' gates; only memory that is touched is taken."""
    q, k, v = torch.randn(3, 1, 5, 3, 16)
    far = 2**30 + 8
    g = torch.empty(2 * far + 8, dtype=F16).as_strided((1, 5, 3), (8, 1, far)).fill_(-0.5)
    assert torch.equal(simple_gla(q, k, v, g)[0], simple_gla(q, k, v, torch.full((1, 5, 3), -0.5).half())[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ("simple_gla", "gla"))
@pytest.mark.parametrize("g", [-5.0, -20.0])
def test_gate_gradient_of_strong_gates(mechanism, g):
    """Relative error of at most 5 %, where the sum over the whole sequence has lost everything."""
    torch.manual_seed(0)
    args = [torch.randn(1, 4096, 2, 128, device="cuda").bfloat16() for _ in "qkv"]
    args.append(torch.full_like(args[0] if mechanism == "gla" else args[0][..., 0], g))
    do = torch.randn_like(args[2])
    leaves = [x.requires_grad_() for x in args]
    (dg,) = torch.autograd.grad(KERNELS[mechanism](*leaves)[0], leaves[3:], do)
    wide = dict(zip("qkvg", (x.detach() for x in args), strict=True)) | {"d o": do}
    exact = oracle.exact(mechanism, wide)["dg"]
    assert (dg.double() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.gpu
def test_fused_forward_takes_no_memory_but_its_results():
    def requested(when):  # what was asked for; the allocator's own blocks may be up to 1 MB larger
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    q, k, v = (torch.randn(8, 1024, 16, 128, device="cuda", dtype=BF16) for _ in "qkv")
    results = linear_attention(q, k, v, path="fused")
    del results
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    results = linear_attention(q, k, v, path="fused")
    held = requested("current") - before
    assert requested("peak") - before == held
    assert held == sum(x.numel() * x.element_size() for x in results)


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ["linear_attention", "gla"])
def test_more_than_2_to_the_31_elements(mechanism):
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=BF16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    gates = [torch.zeros((), device="cuda", dtype=BF16).expand(B, T, H, D)] * (mechanism == "gla")
    o, S = KERNELS[mechanism](q, q, q, *gates, scale=1.0)
    x = tail.double()
    one = tail[None, :, None]
    runs = oracle.emulated("linear_attention", {"q": one, "k": one, "v": one}, scale=1.0)
    for got, n, right in ((o[:, -64:, -1:], "o", (x @ x.mT).tril() @ x), (S[:, -1:], "S", x.mT @ x)):
        right = right.view(got.shape)
        assert error(got, right) <= max(allowed(run[n], right) for run in runs)
    assert not o[0, :-64].any()


# the delta rules' triangle

inverse = delta_forward.inverse


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
    for correlation, strength in product(CORRELATIONS, STRENGTHS):
        k = alike(torch.randn(C, 128, generator=torch.Generator().manual_seed(0), dtype=F64), correlation)
        A = (strength * k @ k.mT).tril(-1).float().to(HERE)
        Y, exact = torch.full_like(A, torch.nan), triangular.elimination(A.double())
        invert[(1,)](A.contiguous(), Y, C=C)
        with products_in(F32, Luck(RUNS)):
            low = triangular.blocked(A.expand(1, RUNS, C, C))[0]
        compare({"Y": Y}, {"Y": (exact, max(allowed(y, exact) for y in low))})


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
@pytest.mark.deep
def test_the_widest_walk_fits_a_multiprocessor():
    """`make compile` checks all launches; this one holds more tiles of keys than those of the delta rules."""
    assert 0 < int(in_process("-c", WALK)) <= CLASSES["sm_90"].shared_memory


def test_strides_of_one_pattern():
    """Wide accesses stay recognisable; else numbers are neither 1 nor multiples of 16, and told by one more."""
    assert pattern(960, 48, 16, 1) == (960, 48, 16, 1)
    assert pattern(960, 48, 16, 2) == (960, 48, 16, 2)  # a last stride of its own: as it is
    for s in [(1050, 15, 5, 1), (0, 0, 8, 1), (960, 48, 24, 1)]:
        *hidden, last, told = pattern(*s)
        assert [n >> 4 for n in hidden] == list(s[:3]) and (last, told) == (1, 0)
        assert all(n != 1 and n % 16 for n in hidden)
    x, y = spec_of("x", torch.zeros(2, 16, 3, 16)), spec_of("y", torch.zeros(2, 16, 3, 7))
    assert patterns(x, None, y) == [x.strides, None, pattern(*y.strides)]
