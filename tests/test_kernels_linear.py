"""Linear attention and simple GLA in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from cases import F64, LADDER, error, inputs, thin
from emulated import chunks, product
from harness import CUDA, DTYPES, HERE, allowed, anywhere, budgets, compare, interpreted, results

from gla_ref import gates, gla_backward
from gla_ref import linear_attention as linear_references
from gla_ref import simple_gla as references

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import linear_attention as kernels  # noqa: E402
from gla_ref.kernels.linear_attention import linear_attention, simple_gla  # noqa: E402

PATHS = kernels.PATHS
EPS = torch.finfo(torch.float32).eps


def emulated_walk(q, k, v, g, S, scale, dtype, C, reverse=False):
    """(o, final state, the states before each chunk) as `walk` makes them."""
    T, (q, k, v, g) = q.shape[1], (chunks(x, C) for x in (q, k, v, g[..., None]))
    since, until = gates.decay_from_start(g).exp(), gates.decay_to_end(g).exp()
    E, total = gates.segment_sum(g)[..., 0].exp(), g.sum(-2, keepdim=True).exp()
    if reverse:
        since, until, E = until, since, E.mT
    states = torch.empty(*k.shape[:3], k.shape[-1], v.shape[-1], device=k.device)
    for n in reversed(range(k.shape[2])) if reverse else range(k.shape[2]):
        states[:, :, n] = S
        S = product(total[:, :, n] * S, k[:, :, n].mT, v[:, :, n] * until[:, :, n], dtype)
    zero = torch.zeros(1, device=k.device)
    P = product(zero, q, k.mT, dtype) * E
    o = scale * product(product(zero, q, states, dtype) * since, P, v, dtype)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], S, states


def emulated_dg(q, k, v, do, g, states, dstates, scale, dtype, C):
    """As `gate_gradient`."""
    hard, T = torch.isneginf(g), q.shape[1]
    q, k, v, do, g = (chunks(x, C) for x in (q, k, v, do, g[..., None]))
    zero, total = torch.zeros(1, device=q.device), g.sum((-2, -1)).exp()
    S, R = (x.to(dtype).float() for x in (states, dstates))
    E = gates.segment_sum(g)[..., 0].exp().tril(-1)
    A = product(zero, q, k.mT, dtype) * product(zero, do, v.mT, dtype) * E
    read = A.sum(-1) + (product(zero, q, S, dtype) * do * gates.decay_from_start(g).exp()).sum(-1)
    write = (product(zero, k, R, dtype) * v * gates.decay_to_end(g).exp()).sum(-1)
    kept = (total * (S * R).sum((-2, -1)))[..., None]
    dg = (read - A.sum(-2)).flip(-1).cumsum(-1).flip(-1) + write.cumsum(-1) - write + kept
    dg = scale * dg.permute(0, 2, 3, 1).flatten(1, 2)[:, :T]
    return torch.where(hard, 0.0, dg)


def emulated(q, k, v, g, S, do, dS, scale, dtype):
    """Every quantity of one sequence (or a batch of them), as the kernels make it."""
    C = 16 if dtype == torch.float32 else 64
    o, S_T, states = emulated_walk(q, k, v, g, S, scale, dtype, C)
    if scale == 0:
        do, scale = 0 * do, 1.0
    R = dS / scale
    dq, *_ = emulated_walk(do, v, k, g, S.mT, scale, dtype, C)
    dk, *_ = emulated_walk(v, do, q, g, R.mT, scale, dtype, C, reverse=True)
    dv, dS0, dstates = emulated_walk(k, q, do, g, R, scale, dtype, C, reverse=True)
    dg = emulated_dg(q, k, v, do, g, states, dstates, scale, dtype, C)
    return o, S_T, dq, dk, dv, dg, dS0 * scale


def exact(q, k, v, g, S, do, dS, scale):
    """The float64 recurrence and its closed-form gradients."""
    form = references.recurrent if q.shape[1] <= 300 else references.chunkwise  # held against it
    wide = g[..., None].expand(*g.shape, q.shape[-1])
    o, S_T = form(q, k, v, g, initial_state=S, scale=scale)
    d = gla_backward.backward(q, k, v, wide, do, dS, initial_state=S, C=16, scale=scale)
    return o, S_T, d.dq, d.dk, d.dv, d.dg.sum(-1), d.d_initial_state


@functools.cache
def problem(B, T, H, K, V, kind="zero", dtype=torch.float32, ends=None, seed=0, scale=None):
    """(inputs as the kernel is given them, {quantity: (exact, budget)})."""
    args, _ = inputs("simple_gla", B, T, H, K, V, kind=kind, seed=seed)
    rng, N = torch.Generator().manual_seed(seed), B if ends is None else len(ends) - 1
    S, dS = (torch.randn(N, H, K, V, generator=rng, dtype=F64) for _ in "SS")
    do = torch.randn(args[2].shape, generator=rng, dtype=F64)
    x = dict(zip(("q", "k", "v", "g", "S", "do", "dS"), (*args, S, do, dS), strict=True))
    given = {n: torch.float32 if n in ("S", "dS") else dtype for n in x}
    scale = K**-0.5 if scale is None else scale
    return budgets(x, given, lambda *a: exact(*a, scale), lambda *a: emulated(*a, scale, dtype), rng, ends)


def check(*sizes, path=None, ends=None, scale=None, **kw):
    """simple_gla, and linear_attention where there are no gates, forward and backward within their budgets."""
    x, judged = problem(*sizes, ends=ends and tuple(ends), scale=scale, **kw)
    for gated in (True, False) if kw.get("kind", "zero") == "zero" else (True,):
        form = simple_gla if gated else linear_attention
        given = x if gated else {n: y for n, y in x.items() if n != "g"}
        compare(results(form, given, ends, path=path, scale=scale), judged)


# interpreted


@interpreted
@pytest.mark.parametrize("start", thin(range(1, 131, 10), 61))
def test_every_length(start):
    for T in range(start, start + 10):
        kind = "logsigmoid/16" if T % 2 else "many resets"
        x, judged = problem(1, T, 1, 3, 5, kind=kind, seed=T)
        with torch.no_grad():
            args = [x[n] for n in ("q", "k", "v", "g")]
            o, S = simple_gla(*args, initial_state=x["S"], path=PATHS[T % 3])
        compare({"o": o, "S": S}, judged)


@interpreted
@pytest.mark.parametrize("T", [1, 15, 16, 17, 70, 130])
def test_gradients_at_edges(T):
    check(2, T, 1, 3, 5, kind="logsigmoid/16", path=PATHS[T % 3], seed=T)


@interpreted
@pytest.mark.parametrize("kind", thin(LADDER, "logsigmoid/16", "-inf", "many resets"))
def test_the_gate_ladder(kind):
    check(1, 70, 2, 5, 3, kind=kind)


@interpreted
@pytest.mark.parametrize("path", thin(PATHS, "segmented"))
def test_paths_in_the_interpreter(path):
    check(1, 100, 2, 20, 37, kind="mild and strong chunks", path=path)
    check(2, 65, 2, 7, 3, path=path)


@interpreted
@pytest.mark.parametrize("path", thin([None, *PATHS], "segmented"))
def test_packed_sequences(path):
    check(1, 130, 2, 6, 5, kind="many resets", path=path, ends=[0, 0, 33, 33, 40, 97, 130, 130])


@interpreted
@pytest.mark.parametrize(
    "K, V", thin([(16, 60), (60, 16), (64, 100), (100, 64), (128, 16), (256, 40), (16, 512)], (60, 16))
)
def test_sizes_in_the_interpreter(K, V):
    check(1, 33, 1, K, V, kind="logsigmoid/16")


@interpreted
@pytest.mark.parametrize("ends", [None, (0, 0, 33, 33, 40, 97, 130, 130)])
def test_states_running_backwards(ends):
    """Narrow heads of halves without gates: all gradients in one walk (float16 is right in the interpreter)."""
    check(1 if ends else 2, 130, 2, 6, 5, dtype=torch.float16, path="fused", ends=ends)


SIZES = {  # powers of two on q, k, v, the initial state and scale; the state's is that of k and v together
    "small scores": (-12, -12, 0, -12, 24),
    "a small state": (12, -17, -8, -25, 13),
    "large scores": (8, 8, 0, 8, -16),
    "a large state": (-10, 10, 10, 20, -10),
}


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", SIZES)
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

    (plain, _), (scaled, powers) = run(0, 0, 0, 0, 0), run(*SIZES[name])
    for y, want, e in zip(scaled, plain, powers, strict=False):
        kept = want.abs() * 2.0**e < 65504  # what float16 can return
        assert ((y - want).abs() <= 2.0**-25 * (1 + 2.0**-e))[kept].all()


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


def small(T=35, gated=True, **kw):
    args, named = inputs("simple_gla", 2, T, 3, 20, 36, **kw)
    args = [x.to(HERE, torch.float32) for x in args]
    return (args if gated else args[:3]), named["initial_state"].to(HERE, torch.float32)


@anywhere
def test_initial_state_and_scale_are_optional():
    args, S0 = small()
    o, S = simple_gla(*args)
    assert torch.equal(o, simple_gla(*args, initial_state=torch.zeros_like(S0), scale=20**-0.5)[0])


@anywhere
@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_any_scale(scale):
    check(2, 35, 3, 20, 36, scale=scale)


@anywhere
@pytest.mark.parametrize("B, H, V", [(2, 3, 36), (1, 1, 512)])
@pytest.mark.parametrize("normalize", [False, True])
def test_feature_maps_and_normaliser(normalize, B, H, V):
    """Budgets of o before the division, of both sums after it: 2 x what an emulated run has, + 4 eps."""
    x, _ = problem(B, 35, H, 20, V)
    args, phi = [x[n] for n in ("q", "k", "v")], linear_references.elu_plus_one
    options = {"feature_map": phi, "normalize": normalize}
    o, states = linear_references.recurrent(*(y.double() for y in args), **options)

    q, k, v = phi(args[0]), phi(args[1]), args[2]
    g, ones = torch.zeros_like(q[..., 0]), torch.ones_like(v[..., :1])
    S0 = torch.zeros(B, H, 20, V, device=HERE)
    low, S, _ = emulated_walk(q, k, v, g, S0, 20**-0.5, torch.float32, 16)
    total, z, _ = emulated_walk(q, k, ones, g, S0[..., :1], 20**-0.5, torch.float32, 16)
    names = ("o", "S", "z") if normalize else ("o", "S")
    low = dict(zip(names, (low / total if normalize else low, S, z[..., 0]), strict=False))
    right = dict(zip(names, (o, *states) if normalize else (o, states), strict=True))
    judged = {n: (right[n], allowed(low[n], right[n])) for n in names}

    def named(o, state):
        return dict(zip(names, (o, *state) if normalize else (o, state), strict=True))

    compare(named(*linear_attention(*args, **options)), judged)
    first, state = linear_attention(*(y[:, :33] for y in args), **options)
    second, state = linear_attention(*(y[:, 33:] for y in args), initial_state=state, **options)
    compare(named(torch.cat([first, second], 1), state), judged)


@anywhere
def test_gradients_of_the_widest_normalised_values():
    """512 value columns and the normaliser's own."""
    x, _ = problem(1, 20, 1, 3, 512)
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
@pytest.mark.parametrize("path", PATHS)
def test_split_and_carry(path):
    """The parts are as right as the whole."""
    x, judged = problem(2, 19, 2, 20, 36, kind="logsigmoid/16")
    args = [x[n] for n in ("q", "k", "v", "g")]
    for a in (1, 15, 16, 17):
        first, S = simple_gla(*(y[:, :a] for y in args), initial_state=x["S"], path=path)
        second, S = simple_gla(*(y[:, a:] for y in args), initial_state=S, path=path)
        compare({"o": torch.cat([first, second], 1), "S": S}, judged)


@anywhere
@pytest.mark.parametrize("path", thin(PATHS, "fused"))
def test_strides_poison_and_equal_runs(path, monkeypatch):
    x, judged = problem(2, 19, 2, 20, 36, kind="logsigmoid/16")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(float("nan")))
    first, second = (results(simple_gla, x, path=path) for _ in range(2))
    compare(first, judged)
    assert all(torch.equal(first[n], second[n]) for n in first), "bitwise, from run to run"

    odd = {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in x.items()}
    odd |= {n: x[n].mT.contiguous().mT for n in ("S", "dS")}
    odd["q"] = torch.stack([x["q"], x["q"]], -1)[..., 0]  # a last stride of 2
    odd["do"] = x["do"][:1, :1, :1, :1].expand_as(x["do"])  # as the gradient of a sum: strides of 0
    before = {n: y.clone() for n, y in odd.items()}
    same = results(simple_gla, {**x, "do": odd["do"].contiguous()}, path=path)
    found = results(simple_gla, odd, path=path)
    compare({n: found[n] for n in ("o", "S")}, judged)
    for n in same:  # an absolute band: the same sums of at most 36 * 19 terms, in whatever order
        band = 36 * 19 * EPS * same[n].abs().max()
        assert (found[n] - same[n]).abs().max() <= band, n
    assert all(torch.equal(odd[n], y) for n, y in before.items()), "inputs are left alone"


@anywhere
@pytest.mark.parametrize("gated", thin([False, True], True))
def test_compiled_equals_eager(gated):
    args, S0 = small(gated=gated)
    form = simple_gla if gated else linear_attention

    def f(S0, *args):
        o, S = form(*args, initial_state=S0)
        return 2 * o, S

    leaves = [x.requires_grad_() for x in (S0, *args)]
    backend = "inductor" if CUDA else "aot_eager"
    results = [g(*leaves) for g in (f, torch.compile(f, fullgraph=True, backend=backend))]
    grads = [torch.autograd.grad((o.sum(), S.sum()), leaves) for o, S in results]
    for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        assert torch.equal(x, y)


def test_choice_of_path():
    choose = functools.partial(kernels.choose_path, multiprocessors=132)
    assert choose(256, 128) == ("fused", 128)
    assert choose(88, 1024) == ("fused", 1024)
    assert choose(32, 8)[0] == "fused"  # too short to cut
    path, length = choose(32, 1024)
    assert path == "segmented" and length == 256
    path, length = choose(8, 1024)
    assert path == "segmented" and 8 <= length <= 64


@anywhere
def test_wrong_input_is_named(monkeypatch):
    args, S0 = small()
    q, k, v, g = args
    with pytest.raises(TypeError, match="^q: expected float32, float16 or bfloat16"):
        simple_gla(q.double(), k.double(), v.double(), g)
    with pytest.raises(TypeError, match="^k: expected dtype"):
        simple_gla(q, k.half(), v, g)
    with pytest.raises(ValueError, match="^g: expected 3 axes"):
        simple_gla(q, k, v, g[..., None])
    with pytest.raises(ValueError, match="^initial_state: expected shape"):
        simple_gla(q, k, v, g, initial_state=S0[:1])
    with pytest.raises(TypeError, match="^initial_state: expected"):
        linear_attention(q, k, v, initial_state=S0, normalize=True)
    with pytest.raises(ValueError, match="^path: expected one of fused"):
        linear_attention(q, k, v, path="fast")
    with pytest.raises(ValueError, match="^q: expected K of at most 256, got 257"):
        linear_attention(*(torch.zeros(1, 2, 1, 257, device=HERE) for _ in "qk"), v[:1, :2, :1])
    with pytest.raises(ValueError, match="^v: expected V of at most 512, got 513"):
        linear_attention(q, k, torch.zeros(2, 35, 3, 513, device=HERE))
    with pytest.raises(ValueError, match="^cu_seqlens: packed sequences need"):
        linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 35], device=HERE))
    with pytest.raises(TypeError, match="^scale"):
        linear_attention(q, k, v, scale=float("nan"))
    monkeypatch.setenv("GLA_REF_DEBUG", "1")
    with pytest.raises(ValueError, match="^g: log gates must lie in"):
        simple_gla(q, k, v, -g)
    with pytest.raises(ValueError, match="^cu_seqlens: expected to rise"):
        linear_attention(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 50], device=HERE))


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [63, 257, 1000, 4097])
def test_lengths_on_the_gpu(dtype, T):
    for path in PATHS:
        check(2, T, 3, 64, 100, kind="logsigmoid/16", dtype=dtype, path=path)
    check(2, T, 3, 60, 64, dtype=dtype)
    check(2, T, 3, 64, 64, dtype=dtype, path="fused", seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [16, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("V", [16, 60, 64, 100, 128, 256, 512])
def test_sizes_on_the_gpu(dtype, K, V):
    if dtype == torch.float32 and (K + V) % 16:
        pytest.skip("float32 has one path for every size: half of them will do")
    check(2, 193, 3, K, V, kind="zero" if (K + V) % 8 == 0 else "logsigmoid/16", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder_on_the_gpu(dtype, kind):
    check(2, 300, 3, 64, 128, kind=kind, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [None, *PATHS])
def test_packed_on_the_gpu(dtype, path):
    ends = [0, 0, 33, 33, 40, 300, 941, 1100, 1100]
    check(1, 1100, 2, 64, 128, kind="many resets", dtype=dtype, path=path, ends=ends)
    check(1, 1100, 2, 128, 64, dtype=dtype, path=path, ends=ends)
    check(1, 1100, 2, 48, 64, dtype=dtype, path=path, ends=ends)


@pytest.mark.gpu
@pytest.mark.parametrize("g", [-5.0, -20.0])
def test_gate_gradient_of_strong_gates(g):
    """Relative error of at most 5 %, where the sum over the whole sequence has lost everything."""
    torch.manual_seed(0)
    args = [torch.randn(1, 4096, 2, 128, device="cuda").bfloat16() for _ in "qkv"]
    args.append(torch.full((1, 4096, 2), g, device="cuda", dtype=torch.bfloat16))
    do = torch.randn_like(args[2])
    leaves = [x.requires_grad_() for x in args]
    (dg,) = torch.autograd.grad(simple_gla(*leaves)[0], leaves[3:], do)
    wide = args[3].double()[..., None].expand(*args[3].shape, 128)
    d = gla_backward.backward(*(x.detach().double() for x in args[:3]), wide, do.double(), C=16)
    exact = d.dg.sum(-1)
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
def test_more_than_2_to_the_31_elements():
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    o, S = linear_attention(q, q, q, scale=1.0)
    x = tail.double()
    one, zero = tail[None, :, None].float(), torch.zeros(1, 64, 1, device="cuda")
    S0 = torch.zeros(1, 1, D, D, device="cuda")
    o_low, S_low, _ = emulated_walk(one, one, one, zero, S0, 1.0, torch.bfloat16, 64)
    for got, low, right in (
        (o[0, -64:, -1], o_low[0, :, 0].bfloat16(), (x @ x.mT).tril() @ x),
        (S[0, -1], S_low[0, 0], x.mT @ x),
    ):
        assert error(got, right) <= allowed(low, right)
    assert not o[0, :-64].any()


FIRST = """
import time, torch
x = [torch.randn(2, 2048, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
torch.cuda.synchronize()
start = time.perf_counter()
from gla_ref.kernels.linear_attention import linear_attention
linear_attention(*x)[0].sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


@pytest.mark.gpu
@pytest.mark.alone
def test_first_call_takes_at_most_ten_seconds(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) <= 10, run.stdout
