"""Gated linear attention in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from cases import F64, LADDER, error, inputs, thin
from emulated import Gla
from harness import CUDA, DTYPES, HERE, RUNS, allowed, anywhere, budgets, compare, interpreted, results

from gla_ref import FORMS, gla_backward
from gla_ref import check as kit
from gla_ref import gla as references

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
tl = pytest.importorskip("triton.language")

from gla_ref.kernels import gla as kernels  # noqa: E402
from gla_ref.kernels import gla_forward, plan  # noqa: E402
from gla_ref.kernels.gla import gla  # noqa: E402
from gla_ref.kernels.gla_step import gla_step  # noqa: E402

PATHS = kernels.PATHS


def limit_and_chunk(*tensors, **options):
    """Nats of decay in a chunk up to which the kernel makes one product of it, and tokens a chunk, as planned here."""
    walks = plan("gla", *(x.to(HERE) for x in tensors), **options).launches
    walk = next(launch for launch in walks if launch.name == "walk")
    return walk.given("LIMIT"), walk.given("C")


def exact(q, k, v, g, g_v, S, do, dS, scale):
    """The float64 recurrence and its closed-form gradients."""
    form = references.recurrent if q.shape[1] <= 300 else references.chunkwise  # held against it
    options = {} if form is references.recurrent else {"C": 16}
    o, S_T = form(q, k, v, g, g_v=g_v, initial_state=S, scale=scale, **options)
    d = gla_backward.backward(q, k, v, g, do, dS, g_v=g_v, initial_state=S, C=16, scale=scale)
    return o, S_T, d.dq, d.dk, d.dv, d.dg, d.d_initial_state, d.dg_v


@functools.cache
def problem(
    B,
    T,
    H,
    K,
    V,
    kind="logsigmoid/16",
    two_sided=False,
    dtype=torch.float32,
    gates=None,
    ends=None,
    seed=0,
    scale=None,
    size=1.0,
):
    """(inputs as the kernel is given them, {quantity: (exact, budget)}).

    An emulated run stores o once, the kernel twice in strong chunks (`mend` adds to what `walk` stored): that has to
    fit in, too.
    """
    args, named = inputs("gla", B, T, H, K, V, kind=kind, g_v=two_sided, seed=seed)
    rng, N = torch.Generator().manual_seed(seed), B if ends is None else len(ends) - 1
    S, dS = (torch.randn(N, H, K, V, generator=rng, dtype=F64) for _ in "SS")
    do = torch.randn(args[2].shape, generator=rng, dtype=F64)
    every = (*args, named.get("g_v"), size * S, do, dS)
    x = dict(zip(("q", "k", "v", "g", "g_v", "S", "do", "dS"), every, strict=True))
    given = {n: torch.float32 if n in ("S", "dS") else dtype for n in x}
    given["g"] = given["g_v"] = gates or dtype
    scale = K**-0.5 if scale is None else scale
    emulated = Gla(dtype, *limit_and_chunk(*(y.to(dtype) for y in args), g_v=named.get("g_v")))
    return budgets(x, given, lambda *a: exact(*a, scale), lambda *a: emulated.run(*a, scale), rng, ends)


def check(*sizes, path=None, ends=None, scale=None, **kw):
    """Forward and all gradients within their budgets."""
    ends = ends and tuple(ends)
    x, judged = problem(*sizes, ends=ends, scale=scale, **kw)
    compare(results(gla, x, ends, path=path, scale=scale), judged)


# interpreted


@pytest.mark.deep
@interpreted
def test_every_length():
    """1 to 130 tokens as 130 packed sequences; judged as a batch in which the short ones end in zeros."""
    n = 130
    x, judged = problem(n, n, 1, 3, 5)
    keep = (torch.arange(n) < torch.arange(1, n + 1)[:, None])[..., None, None]  # [N, T, 1, 1]
    x = {m: None if y is None else y if y.shape[1] == 1 else y * keep for m, y in x.items()}
    exact_o, exact_S = references.recurrent(
        *(x[m].double() for m in ("q", "k", "v", "g")), initial_state=x["S"].double()
    )
    rows = keep[..., 0, 0]
    args = [x[m][rows][None] for m in ("q", "k", "v", "g")]
    ends = torch.cat([torch.zeros(1), torch.arange(1, n + 1)]).cumsum(0).int()
    with torch.no_grad():
        o, S = gla(*args, initial_state=x["S"], cu_seqlens=ends, path="fused")
    right = {"o": (exact_o[rows][None], judged["o"][1]), "S": (exact_S, judged["S"][1])}
    compare({"o": o, "S": S}, right)


@interpreted
@pytest.mark.parametrize("path", thin(PATHS, "segmented"))
def test_gradients_at_edges(path):
    """Of sequences of 1, 31, 32, 33, 63, 64, 65 and no tokens, packed, with odd sizes."""
    ends = torch.tensor([0, 1, 31, 32, 0, 33, 65]).cumsum(0).tolist()
    check(1, ends[-1], 1, 3, 5, kind="many resets", ends=ends, path=path, two_sided=path == "fused")


@interpreted
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("kind", thin(LADDER, "logsigmoid/16", "many resets"))
def test_the_gate_ladder(kind, two_sided):
    check(1, 70, 1, 5, 3, kind=kind, two_sided=two_sided)


@interpreted
@pytest.mark.parametrize("K, V", thin([(60, 16), (64, 100), (128, 16), (256, 40), (16, 512)], (60, 16), (128, 16)))
def test_sizes_in_the_interpreter(K, V):
    check(1, 33, 1, K, V, kind="mild and strong chunks" if K == 64 else "logsigmoid/16")


@interpreted
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_float16(size):
    """A state of a million fits float32 only; scale brings what it adds to o and dq back."""
    x, judged = problem(1, 70, 1, 5, 3, kind="mild and strong chunks", dtype=torch.float16, size=size, scale=1e-3)
    compare(results(gla, x, scale=1e-3), judged)


@interpreted
@pytest.mark.parametrize("K, two_sided", [(5, False), (70, False), (5, True)])
def test_float16_at_strong_gates(K, two_sided):
    """The decay of one step is below all numbers of float16; dS0 and dg, which have it, are right all the same."""
    check(1, 70, 1, K, 6, kind="-20", dtype=torch.float16, gates=torch.float32, two_sided=two_sided)


def forward_within_budget(q, k, v, g, g_v=None, S=None):
    """o and S of inputs as they are, by the rule above."""
    K, dtype, judged = q.shape[-1], q.dtype, {}
    emulated = Gla(dtype, *limit_and_chunk(q, k, v, g, g_v=g_v))
    S = torch.zeros(len(q), q.shape[2], K, v.shape[-1], device=q.device) if S is None else S
    for shaken in range(RUNS):
        x = [
            y if y is None or not shaken else (y * (1 + 0.01 * torch.rand_like(y))).to(y.dtype)
            for y in (q, k, v, g, g_v, S)
        ]
        wide, low = ([y if y is None else y.to(d) for y in x] for d in (F64, torch.float32))
        right = references.recurrent(*wide[:4], g_v=wide[4], initial_state=wide[5])
        o, S_T, *_ = emulated.run(*low, torch.zeros_like(low[2]), torch.zeros_like(S), K**-0.5)
        for n, y, want in zip("oS", (o.to(dtype), S_T), right, strict=True):
            e = allowed(y, want)
            judged[n] = judged.get(n, (want,))[0], max(e, judged.get(n, (None, 0.0))[-1])
    o, S_T = gla(q, k, v, g, g_v=g_v, initial_state=S)
    compare({"o": o, "S": S_T}, judged)


@interpreted
@pytest.mark.parametrize("q_size, S_size", [(2e-5, 0.0), (1e3, 2e-8)])
def test_float16_of_small_scores_and_states(q_size, S_size):
    """Below 6e-8 float16 has nothing; what is read may be of any size all the same."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 1, D, generator=rng) for D in (16, 16, 8))
    q, k, v = (q_size * q).half(), ((2e-5 if S_size == 0 else 0.0) * k).half(), (1e3 * v).half()
    S = S_size * torch.randn(1, 1, 16, 8, generator=rng)
    forward_within_budget(q, k, v, torch.zeros(1, 40, 1, 16).half(), S=S)


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


@anywhere
@pytest.mark.parametrize("dtype, T", [(torch.float32, 8), (torch.float32, 16), (torch.float16, 32)], ids=str)
def test_just_inside_the_limit(dtype, T):
    """Where one product costs the most digits, by budgets that know nothing of the kernel's limits."""
    case = kit.Case(B=1, H=1, T=T, gate=str((gla_forward.LIMIT[dtype] + 1e-3) / T))
    kit.kernel("gla", FORMS["gla"]["triton"], device=HERE, dtype=dtype, only=case).raise_if_failed()


@triton.jit
def total_off(x, LOW: tl.constexpr):
    return tl.sum(x.to(tl.float32), 0) * (1 + 2**-22)


@pytest.mark.deep
@interpreted
def test_pairs_do_not_see_the_order_in_which_a_total_is_summed(monkeypatch):
    """The interpreter sums a total in order, a GPU as a tree, an ulp or two away (benchmarks/LAB.md)."""
    monkeypatch.setattr("gla_ref.kernels.gla_forward.totals", total_off)
    case = kit.Case(B=1, H=1, T=48, gate="-0.245")
    form = FORMS["gla"]["triton"]
    kit.kernel("gla", form, dtype=torch.float32, only=case, seed=1).raise_if_failed()


def small(T=35, **kw):
    args, named = inputs("gla", 2, T, 1, 20, 36, **kw)
    args = [x.to(HERE, torch.float32) for x in args]
    return args, named["initial_state"].to(HERE, torch.float32)


@anywhere
def test_it_is_a_form():
    args, S0 = small()
    for x, y in zip(FORMS["gla"]["triton"](*args, initial_state=S0), gla(*args, initial_state=S0), strict=True):
        assert torch.equal(x, y)


@anywhere
def test_initial_state_and_scale_are_optional():
    args, S0 = small()
    o, _ = gla(*args)
    assert torch.equal(o, gla(*args, initial_state=torch.zeros_like(S0), scale=20**-0.5)[0])


@anywhere
def test_without_decay_it_is_linear_attention():
    args, S0 = small(kind="zero")
    ones = gla(*args, initial_state=S0)
    both = gla(*args, initial_state=S0, g_v=torch.zeros_like(args[2]))
    plain = FORMS["linear_attention"]["triton"](*args[:3], initial_state=S0)
    for x, y, z in zip(ones, both, plain, strict=True):
        torch.testing.assert_close(x, z, rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(y, z, rtol=3e-6, atol=3e-6)


@anywhere
def test_the_path_of_a_chunk_changes_rounding_only():
    """A channel whose q and k are 0 makes a chunk strong, and nothing else."""
    (q, k, v, g), S0 = small(T=64)
    q[..., 7], k[..., 7], S0[:, :, 7] = 0, 0, 0
    strong = g.clone()
    strong[..., 7] = -1e3
    for x, y in zip(gla(q, k, v, g, initial_state=S0), gla(q, k, v, strong, initial_state=S0), strict=True):
        assert error(x, y.double()) < 3e-6


@anywhere
@pytest.mark.parametrize("scale", thin([0.0, -2.0], 0.0))
def test_any_scale(scale):
    args, S0 = small()
    leaves = [x.requires_grad_() for x in (*args, S0)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    results = gla(*leaves[:4], initial_state=leaves[4], scale=scale)
    wanted = references.recurrent(*exact[:4], initial_state=exact[4], scale=scale)
    d = [torch.ones_like(x) for x in results]
    grads = torch.autograd.grad(results, leaves, d)
    wide = torch.autograd.grad(wanted, exact, [x.double() for x in d])
    for x, y in zip(grads, wide, strict=True):
        assert error(x, y) < 1e-5


@anywhere
@pytest.mark.parametrize("path", thin(PATHS, "fused"))
def test_split_and_carry(path):
    args, S0 = small(kind="mild and strong chunks")
    whole, S = gla(*args, initial_state=S0, path=path)
    for a in (1, 32, 33):
        first, S_a = gla(*(x[:, :a] for x in args), initial_state=S0, path=path)
        second, S_b = gla(*(x[:, a:] for x in args), initial_state=S_a, path=path)
        assert error(torch.cat([first, second], 1), whole) < 1e-5 and error(S_b, S) < 1e-5


@anywhere
@pytest.mark.parametrize("kind", ["logsigmoid/16", "many resets"])
def test_prefill_then_decode_is_the_whole(kind):
    """37 tokens by chunks, four one by one; each hands its state on and leaves the one that it was given."""
    x, judged = problem(2, 41, 1, 5, 7, kind=kind, two_sided=True)
    S, before, parts = x["S"], x["S"].clone(), []
    for a, b in [(0, 37), *((t, t + 1) for t in range(37, 41))]:
        q, k, v, g, g_v = (x[n][:, a:b] for n in ("q", "k", "v", "g", "g_v"))
        form = gla if b - a > 1 else gla_step
        o, S = form(q, k, v, g, g_v=g_v, initial_state=S)
        parts.append(o)
    compare({"o": torch.cat(parts, 1), "S": S}, judged)
    assert torch.equal(x["S"], before)


@anywhere
@pytest.mark.parametrize("path", thin(PATHS, "fused"))
def test_strides_poison_and_equal_runs(path, monkeypatch):
    args, S0 = small(kind="mild and strong chunks")
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args]
    odd[0] = torch.stack([odd[0], odd[0]], -1)[..., 0]  # a last stride of 2
    S_odd = S0.mT.contiguous().mT
    before = [x.clone() for x in (*odd, S_odd)]
    empty = torch.empty

    def poisoned(*a, **kw):
        x = empty(*a, **kw)
        return x.fill_(float("nan") if x.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", poisoned)

    def run(args, S0):
        leaves = [x.detach().requires_grad_() for x in (*args, S0)]
        o, S = gla(*leaves[:4], initial_state=leaves[4], path=path)
        return o, S, *torch.autograd.grad((o.sum(), S.sum()), leaves)

    first = run(args, S0)
    for x, y in zip(first, run(args, S0), strict=True):
        assert torch.isfinite(x).all() and torch.equal(x, y)
    for x, y in zip(first, run(odd, S_odd), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(before, (*odd, S_odd), strict=True))


@pytest.mark.deep
@anywhere
def test_the_gradient_of_the_state_may_have_any_strides():
    args, S0 = small()
    leaves = [x.requires_grad_() for x in (*args, S0)]
    o, S = gla(*leaves[:4], initial_state=leaves[4])
    d = torch.randn_like(S)
    turned = d.mT.contiguous().mT
    for x, y in zip(
        torch.autograd.grad((o, S), leaves, (o.detach(), d), retain_graph=True),
        torch.autograd.grad((o, S), leaves, (o.detach(), turned)),
        strict=True,
    ):
        assert torch.equal(x, y)


@anywhere
@pytest.mark.parametrize("two_sided", thin([False, True], False))
def test_compiled_equals_eager(two_sided):
    args, S0 = small()

    def f(S0, *args):
        o, S = gla(*args[:4], initial_state=S0, g_v=args[4] if two_sided else None)
        return 2 * o, S

    g_v = [torch.nn.functional.logsigmoid(args[2])] if two_sided else []
    leaves = [x.detach().requires_grad_() for x in (S0, *args, *g_v)]
    backend = "inductor" if CUDA else "aot_eager"
    results = [g(*leaves) for g in (f, torch.compile(f, fullgraph=True, backend=backend))]
    grads = [torch.autograd.grad((o.sum(), S.sum()), leaves) for o, S in results]
    for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        assert torch.equal(x, y)


@anywhere
def test_wrong_input_is_named(monkeypatch):
    args, S0 = small()
    q, k, v, g = args
    with pytest.raises(TypeError, match="^q: expected float32, float16 or bfloat16"):
        gla(q.double(), k.double(), v.double(), g)
    with pytest.raises(TypeError, match="^k: expected dtype"):
        gla(q, k.half(), v, g)
    if not CUDA:
        with pytest.raises(TypeError, match="^q: expected float32 or float16 on the CPU"):
            gla(q.bfloat16(), k.bfloat16(), v.bfloat16(), g)
    with pytest.raises(ValueError, match="^g: expected 4 axes"):
        gla(q, k, v, g[..., 0])
    with pytest.raises(ValueError, match="^g_v: expected shape"):
        gla(q, k, v, g, g_v=g)
    with pytest.raises(ValueError, match="^initial_state: expected shape"):
        gla(q, k, v, g, initial_state=S0[:1])
    with pytest.raises(ValueError, match="^path: expected one of fused"):
        gla(q, k, v, g, path="fast")
    with pytest.raises(ValueError, match="^q: expected K of at most 256, got 257"):
        gla(
            *(torch.zeros(1, 2, 1, 257, device=HERE) for _ in "qk"),
            v[:1, :2, :1],
            torch.zeros(1, 2, 1, 257, device=HERE),
        )
    with pytest.raises(ValueError, match="^cu_seqlens: packed sequences need"):
        gla(q, k, v, g, cu_seqlens=torch.tensor([0, 35], device=HERE))
    monkeypatch.setenv("GLA_REF_DEBUG", "1")
    with pytest.raises(ValueError, match="^g: log gates must lie in"):
        gla(q, k, v, -g)


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 257])
def test_lengths_on_the_gpu(dtype, T):
    for n, path in enumerate(PATHS):
        check(2, T, 3, (64, 128)[n], 100 if n else 64, dtype=dtype, path=path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [16, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("V", [16, 60, 64, 128, 512])
def test_sizes_on_the_gpu(dtype, K, V):
    if dtype == torch.float32 and (K + V) % 16:
        pytest.skip("float32 has one path for every size: half of them will do")
    check(2, 193, 3, K, V, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder_on_the_gpu(dtype, K, kind):
    check(2, 200, 3, K, 100, kind=kind, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_two_sided_gates_on_the_gpu(dtype, kind):
    check(2, 200, 3, 64, 128, kind=kind, dtype=dtype, two_sided=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["logsigmoid/16", "many resets", "-1"])
def test_gates_in_other_precisions(kind):
    for dtype, gates in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ]:
        check(2, 200, 3, 128, 64, kind=kind, dtype=dtype, gates=gates)
        check(2, 200, 3, 64, 64, kind=kind, dtype=dtype, gates=gates)


@pytest.mark.gpu
def test_two_gates_share_the_range():
    """Of decays of 80 nats on keys and on values, k'^T v' would hold e^80 k v."""
    q, k, v = (100 * torch.randn(1, 128, 1, 64, device="cuda").bfloat16() for _ in "qkv")
    g = torch.full_like(q, -1.25)
    forward_within_budget(q, k, v, g, g_v=g)


@pytest.mark.gpu
@pytest.mark.parametrize("at", [0, 63])
def test_digits_of_float32_gates(at):
    """Beside 63 strong gates a mild one decays as it should, though sums are made of bf16 products."""
    q, k, v = (torch.randn(1, 64, 1, 64, device="cuda").half() for _ in "qkv")
    g = torch.full((1, 64, 1, 64), -90.12549, device="cuda")
    g[:, at] = -0.01
    forward_within_budget(q, k, v, g, S=torch.randn(1, 1, 64, 64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [None, *PATHS])
def test_packed_on_the_gpu(dtype, path):
    ends = [0, 0, 33, 33, 40, 300, 941, 1100, 1100]
    check(1, 1100, 2, 64, 128, kind="many resets", dtype=dtype, path=path, ends=ends)
    check(1, 1100, 2, 128, 64, dtype=dtype, path=path, ends=ends, two_sided=True)


@pytest.mark.gpu
@pytest.mark.parametrize("g", [-5.0, -20.0])
def test_gate_gradient_of_strong_gates(g):
    """Relative error of at most 5 %, where the sum over the whole sequence has lost everything."""
    torch.manual_seed(0)
    args = [torch.randn(1, 4096, 2, 128, device="cuda").bfloat16() for _ in "qkv"]
    args.append(torch.full((1, 4096, 2, 128), g, device="cuda", dtype=torch.bfloat16))
    do = torch.randn_like(args[2])
    leaves = [x.requires_grad_() for x in args]
    (dg,) = torch.autograd.grad(gla(*leaves)[0], leaves[3:], do)
    d = gla_backward.backward(*(x.detach().double() for x in args), do.double(), C=16)
    assert (dg.double() - d.dg).norm() <= 0.05 * d.dg.norm()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    g = torch.zeros((), device="cuda", dtype=torch.bfloat16).expand(B, T, H, D)
    o, S = gla(q, q, q, g, scale=1.0)
    x = tail.double()
    exact = (x @ x.mT).tril() @ x
    assert error(o[0, -64:, -1], exact) < 0.02 and error(S[0, -1], x.mT @ x) < 1e-3
    assert not o[0, :-64].any()


@pytest.mark.gpu
def test_memory_of_forward_and_backward():
    """At most half of what fla takes at this shape beyond inputs and gradients of them: 6.4 GB."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of memory")
    x = [torch.randn(8, 8192, 16, 128, device="cuda").bfloat16().requires_grad_() for _ in "qkv"]
    x.append(torch.full_like(x[0], -0.05).requires_grad_())
    do = torch.randn_like(x[2])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(gla(*x)[0], x, do)
    assert torch.cuda.max_memory_allocated() - before <= 3.2e9


@interpreted
def test_a_call_does_not_import_the_compiler_of_pytorch():
    """It would add seconds to the first one."""
    code = """
import sys, torch
from gla_ref.kernels.gla import gla
x = [torch.randn(1, 3, 1, 4, requires_grad=True) for _ in "qkv"]
gla(*x, torch.full_like(x[0], -0.05))[0].sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


FIRST = """
import time, torch
x = [torch.randn(2, 2048, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
g = torch.full_like(x[0], -0.05, requires_grad=True)
torch.cuda.synchronize()
start = time.perf_counter()
from gla_ref.kernels.gla import gla
gla(*x, g)[0].sum().backward()
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
