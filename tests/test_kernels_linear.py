"""Linear attention, simple GLA and GLA in Triton against the float64 recurrence: interpreted here, compiled on a GPU.

What they have in common, and what the scalar gate's kernels have alone; GLA's own is in test_kernels_gla.py.
"""

import functools
from itertools import product

import harness
import pytest
import torch
from cases import LADDER, error, inputs, thin
from harness import CUDA, DTYPES, EPS, EVERY_DTYPE, F32, HERE, allowed, anywhere, compare, interpreted, tokens
from linear_problems import KERNELS, MILD, check, problem

from gla_ref import FORMS
from gla_ref import linear_attention as linear_references
from gla_ref.check import oracle

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import gla as gla_kernels
from gla_ref.kernels import linear_attention as kernels
from gla_ref.kernels.linear_attention import linear_attention, simple_gla

PATHS = {"simple_gla": kernels.PATHS, "gla": gla_kernels.PATHS}
WAYS = [(mechanism, path) for mechanism in PATHS for path in PATHS[mechanism]]


# interpreted


@interpreted
@pytest.mark.parametrize(
    "mechanism, start", thin([(m, start) for m in PATHS for start in range(1, 131, 10)], ("simple_gla", 61))
)
def test_every_length(mechanism, start):
    for T in range(start, start + 10):
        kind, paths = MILD if T % 2 else "many resets", PATHS[mechanism]
        x, judged = problem(mechanism, 1, T, 1, 3, 5, kind=kind, seed=T)
        with torch.no_grad():
            o, S = KERNELS[mechanism](*tokens(x), initial_state=x["S"], path=paths[T // 2 % len(paths)])
        compare({"o": o, "S": S}, judged)


@interpreted
@pytest.mark.parametrize("T", [1, 15, 16, 17, 70, 130])
def test_gradients_at_edges(T):
    check("simple_gla", 2, T, 1, 3, 5, path=kernels.PATHS[T % 3], seed=T)


@interpreted
@pytest.mark.parametrize(
    "mechanism, path", thin([*WAYS, ("simple_gla", None)], ("simple_gla", "segmented"), ("gla", "segmented"))
)
def test_packed_sequences(mechanism, path):
    """Lengths around a multiple of a chunk's, and of no tokens; odd sizes."""
    ends = torch.tensor([0, 0, 1, 31, 32, 0, 33, 65, 0]).cumsum(0).tolist()
    two_sided = (mechanism, path) == ("gla", "fused")
    check(mechanism, 1, ends[-1], 1, 3, 5, kind="many resets", ends=ends, path=path, two_sided=two_sided)


RUNGS = [(m, two, kind) for m, two in (("simple_gla", False), ("gla", False), ("gla", True)) for kind in LADDER]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(
    "mechanism, two_sided, kind",
    thin(RUNGS, *(x for x in RUNGS if x[2] in (MILD, "many resets") or x == ("simple_gla", False, "-inf"))),
)
def test_the_gate_ladder(mechanism, two_sided, kind, dtype):
    for size in ((2, 300, 3, 64, 128), (2, 200, 3, 128, 100)) if CUDA else ((1, 70, 1, 5, 3),):
        check(mechanism, *size, kind=kind, dtype=dtype, two_sided=two_sided)


SIZES = [(60, 16), (128, 16), (64, 100), (256, 40), (16, 512)]


@interpreted
@pytest.mark.parametrize(
    "mechanism, K, V",
    thin(
        [(m, *size) for m in PATHS for size in SIZES] + [("simple_gla", 16, 60), ("simple_gla", 100, 64)],
        ("simple_gla", 60, 16),
        ("gla", 60, 16),
        ("gla", 128, 16),
    ),
)
def test_sizes_in_the_interpreter(mechanism, K, V):
    check(mechanism, 1, 33, 1, K, V, kind="mild and strong chunks" if (mechanism, K) == ("gla", 64) else MILD)


@interpreted
@pytest.mark.parametrize("ends", [None, (0, 0, 33, 33, 40, 97, 130, 130)])
def test_states_running_backwards(ends):
    """Narrow heads of halves without gates: all gradients in one walk (float16 is right in the interpreter)."""
    check("simple_gla", 1 if ends else 2, 130, 2, 6, 5, kind="zero", dtype=torch.float16, path="fused", ends=ends)


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


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


@anywhere
@pytest.mark.parametrize("mechanism", KERNELS)
def test_initial_state_and_scale_are_optional(mechanism):
    args, named = inputs(mechanism, 2, 19, 1, 20, 7)
    args = [x.to(HERE, F32) for x in args]
    zero = torch.zeros_like(named["initial_state"], dtype=F32, device=HERE)
    form = KERNELS[mechanism]
    assert torch.equal(form(*args)[0], form(*args, initial_state=zero, scale=20**-0.5)[0])


@anywhere
@pytest.mark.parametrize("mechanism", PATHS)
@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_any_scale(mechanism, scale):
    check(mechanism, 2, 19, 1, 20, 7, kind="zero" if mechanism == "simple_gla" else MILD, scale=scale)


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
        assert (got - want).abs().max() <= 512 * EPS * max(1, want.abs().max())


@anywhere
@pytest.mark.parametrize("mechanism, path", thin(WAYS, *(x for x in WAYS if x != ("gla", "segmented"))))
def test_split_and_carry(mechanism, path):
    kind = "mild and strong chunks" if mechanism == "gla" else MILD
    x, judged = problem(mechanism, 2, 19, 1, 20, 7, kind=kind)
    harness.hold_in_parts(KERNELS[mechanism], x, judged, (1, 15, 16, 17), path=path)


@anywhere
@pytest.mark.parametrize("mechanism, path", thin(WAYS, ("simple_gla", "fused"), ("gla", "fused")))
def test_strides_poison_and_equal_runs(mechanism, path, poisoned):
    K, V = (20, 36) if CUDA else (5, 7)  # the interpreter is slow
    x, judged = problem(mechanism, 2, 19, 2, K, V, kind="mild and strong chunks" if mechanism == "gla" else MILD)
    harness.hold_at_any_strides(KERNELS[mechanism], x, judged, path=path)


def test_choice_of_path():
    choose = functools.partial(kernels.choose_path, multiprocessors=132)
    assert choose(256, 128) == ("fused", 128)
    assert choose(88, 1024) == ("fused", 1024)
    assert choose(32, 8)[0] == "fused"  # too short to cut
    assert choose(32, 1024) == ("segmented", 256)
    path, length = choose(8, 1024)
    assert path == "segmented" and 8 <= length <= 64


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [63, 257, 1000, 4097])
def test_lengths_on_the_gpu(dtype, T):
    for path in kernels.PATHS:
        check("simple_gla", 2, T, 3, 64, 100, dtype=dtype, path=path)
    check("simple_gla", 2, T, 3, 60, 64, kind="zero", dtype=dtype)
    check("simple_gla", 2, T, 3, 64, 64, kind="zero", dtype=dtype, path="fused", seed=1)


WIDTHS = (16, 60, 64, 100, 128, 256)
GRID = [*product(["simple_gla"], WIDTHS, (*WIDTHS, 512)), *product(["gla"], WIDTHS, (16, 60, 64, 128, 512))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism, K, V", GRID)
def test_sizes_on_the_gpu(mechanism, K, V, dtype):
    if dtype == F32 and (K + V) % 16:
        pytest.skip("float32 has one path for every size: half of them will do")
    kind = "zero" if mechanism == "simple_gla" and (K + V) % 8 == 0 else MILD
    check(mechanism, 2, 193, 3, K, V, kind=kind, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mechanism, path", [*WAYS, *((mechanism, None) for mechanism in PATHS)])
def test_packed_on_the_gpu(mechanism, path, dtype):
    options = {"dtype": dtype, "path": path, "ends": [0, 0, 33, 33, 40, 300, 941, 1100, 1100]}
    check(mechanism, 1, 1100, 2, 64, 128, kind="many resets", **options)
    if mechanism == "gla":
        check(mechanism, 1, 1100, 2, 128, 64, two_sided=True, **options)
    else:
        check(mechanism, 1, 1100, 2, 128, 64, kind="zero", **options)
        check(mechanism, 1, 1100, 2, 48, 64, kind="zero", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", PATHS)
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

    q, k, v = (torch.randn(8, 1024, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
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
    q = torch.zeros(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    gates = [torch.zeros((), device="cuda", dtype=torch.bfloat16).expand(B, T, H, D)] * (mechanism == "gla")
    o, S = KERNELS[mechanism](q, q, q, *gates, scale=1.0)
    x = tail.double()
    one = tail[None, :, None]
    runs = oracle.emulated("linear_attention", {"q": one, "k": one, "v": one}, scale=1.0)
    for got, n, right in ((o[:, -64:, -1:], "o", (x @ x.mT).tril() @ x), (S[:, -1:], "S", x.mT @ x)):
        right = right.view(got.shape)
        assert error(got, right) <= max(allowed(run[n], right) for run in runs)
    assert not o[0, :-64].any()


@interpreted
def test_gates_of_heads_far_apart():
    """More than 2^31 numbers between two heads' gates; only memory that is touched is taken."""
    q, k, v = torch.randn(3, 1, 5, 3, 16)
    far = 2**30 + 8
    g = torch.empty(2 * far + 8, dtype=torch.float16).as_strided((1, 5, 3), (8, 1, far)).fill_(-0.5)
    form = FORMS["simple_gla"]["triton"]
    assert torch.equal(form(q, k, v, g)[0], form(q, k, v, torch.full((1, 5, 3), -0.5).half())[0])
