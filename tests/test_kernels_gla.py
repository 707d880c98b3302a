"""Gated linear attention in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from cases import F64, LADDER, error, inputs

from gla_ref import FORMS, gla_backward
from gla_ref import gla as references

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import gla as kernels  # noqa: E402
from gla_ref.kernels.gla import gla  # noqa: E402

CUDA = torch.cuda.is_available()
if CUDA and os.environ.get("GLA_REF_DRAFT") != "1":
    pytest.skip("kernels/gla.py refuses GPUs (GLA_REF_DRAFT=1 runs it)", allow_module_level=True)
HERE = "cuda" if CUDA else "cpu"
PATHS = kernels.PATHS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
interpreted = pytest.mark.skipif(CUDA, reason="kernels are compiled here")


class Product(torch.autograd.Function):
    """x y with operands rounded to a dtype and a float32 sum, and so its two gradients."""

    @staticmethod
    def forward(ctx, x, y, dtype):
        x, y = (a.to(dtype).to(a.dtype) for a in (x, y))
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        return x @ y

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        d = d.to(ctx.dtype).to(d.dtype)
        return d @ y.mT, x.mT @ d, None


def emulated(q, k, v, g, g_v, S, scale, dtype, C, c=16):
    """`chunkwise_two_level` with every product's operands, and those of its gradients, rounded to dtype."""

    def mm(x, y):
        return Product.apply(x, y, dtype)

    q, k, v, g, g_v = references._heads_first(q, k, v, g, g_v)
    o = torch.zeros_like(v)
    for kind, rows, cols in references.two_level_blocks(q.shape[-2], C, c):
        i, j = (..., rows, slice(None)), (..., cols, slice(None))
        h_i, h_j = (None, None) if g_v is None else (g_v[i], g_v[j])
        if kind == "inter-chunk":
            o[i] += references._read(q[i], S, g[i], h_i, mm)
            S = references._update(k[i], v[i], S, g[i], h_i, mm)
        elif kind == "inter-sub-chunk":
            since, until = references.decay_from_start, references.decay_to_end
            P = mm(
                references._decayed(q[i], g[i], since), references._decayed(k[j], g[j], until).mT
            )
            o[i] += references._decayed(mm(P, references._decayed(v[j], h_j, until)), h_i, since)
        else:
            P = references._scores(q[i], k[j], g[i])
            o[i] += references._weighted(P, v[j], h_i, mm)
    return scale * o.transpose(1, 2), S


def emulated_packed(tokens, S0, ends, scale, dtype, C):
    if ends is None:
        return emulated(*tokens, S0, scale, dtype, C)
    outs, states = [], []
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        S = S0[n : n + 1]
        if a < b:
            x = (x if x is None else x[:, a:b] for x in tokens)
            o, S = emulated(*x, S, scale, dtype, C)
            outs.append(o)
        states.append(S)
    return torch.cat(outs, 1), torch.cat(states)


NAMES = ("o", "S", "dq", "dk", "dv", "dg", "dS0", "dg_v")


def truth(args, g_v, S0, do, dS, ends, dtype, gates, scale):
    """({quantity: exact}, {quantity: budget}): float64 recurrence and closed-form gradients, and an emulated run."""
    q, k = args[:2]
    cu = None if ends is None else torch.tensor(ends, device=q.device)
    named = {"scale": scale, "cu_seqlens": cu, "initial_state": S0, "g_v": g_v}
    if q.shape[1] <= 300:
        o, S = references.recurrent(*args, **named)
    else:  # the recurrence in larger steps: test_forms.py holds it against the recurrence
        o, S = references.chunkwise(*args, **named, C=16)
    d = gla_backward.backward(*args, do, dS, **named, C=16)
    exact = dict(zip(NAMES, (o, S, d.dq, d.dk, d.dv, d.dg, d.d_initial_state, d.dg_v), strict=True))
    leaves = [x if x is None else x.float().requires_grad_() for x in (*args, g_v, S0)]
    given, budget = [x for x in leaves if x is not None], {}
    for C in (16, 64):  # chunks of different lengths round differently: the worst counts
        low = emulated_packed(leaves[:5], leaves[5], ends, scale, dtype, C)
        grads = list(torch.autograd.grad(low, given, (do.float(), dS.float())))
        grads.append(grads.pop(4) if g_v is not None else None)  # dS0, dg_v
        for name, x in zip(NAMES, (*low, *grads), strict=True):
            if x is None:
                continue
            result = {"S": torch.float32, "dS0": torch.float32, "dg": gates, "dg_v": gates}.get(
                name, dtype
            )
            worst = 2 * error(x.detach().to(result), exact[name]) + 4 * torch.finfo(result).eps
            budget[name] = max(worst, budget.get(name, 0.0))
    # kernels add products to the running state one by one (tensor cores cut off instead of rounding, once for
    # every 16); the emulated run adds whole chunks
    for name in ("S", "dS0"):
        rms = exact[name].square().mean().sqrt().clamp_min(1e-300)
        peak = exact[name].abs().max() / rms
        budget[name] += peak.item() * (q.shape[1] / 16 + 1) * 2**-23
    if (
        dtype == torch.float32
    ):  # the same inside a chunk; and one product has four factors e^x, |x| up to 8
        budget = {name: 3 * x for name, x in budget.items()}
    # the closed form sums q dq - k dk over a chunk; what they cancel to carries the rounding of each
    pairs = {"dg": (q * d.dq).abs() + (k * d.dk).abs()}
    if g_v is not None:
        pairs["dg_v"] = (o * do).abs() + (args[2] * d.dv).abs()
    for name, sums in pairs.items():
        rms = exact[name].square().mean().sqrt()
        floor = torch.finfo(dtype).eps * sums.square().mean().sqrt() / rms.clamp_min(1e-300)
        budget[name] += 4 * floor.item() * 8  # 8: the root of a chunk's 64 independent terms
    return exact, budget


def check(
    B, T, H, K, V, *, kind="logsigmoid/16", two_sided=False, dtype=torch.float32, gates=None, path=None,
    ends=None, seed=0, scale=None,
):  # fmt: skip
    """Forward and all gradients within their budgets."""
    args, named = inputs("gla", B, T, H, K, V, kind=kind, g_v=two_sided, seed=seed)
    N = B if ends is None else len(ends) - 1
    rng = torch.Generator().manual_seed(seed)
    S0, dS = (torch.randn(N, H, K, V, generator=rng, dtype=F64).float().double() for _ in "SS")
    do = torch.randn(args[2].shape, generator=rng, dtype=F64)
    # what the kernel is given is exact: rounding the inputs is no error of its own
    gates = gates or dtype
    args[:3] = [x.to(dtype).to(HERE, F64) for x in args[:3]]
    args[3] = args[3].to(gates).to(HERE, F64)
    g_v = named["g_v"].to(gates).to(HERE, F64) if two_sided else None
    do, S0, dS = do.to(dtype).to(HERE, F64), S0.to(HERE), dS.to(HERE)
    scale = scale or K**-0.5
    exact, budget = truth(args, g_v, S0, do, dS, ends, dtype, gates, scale)
    leaves = [x.to(dtype) for x in args[:3]] + [args[3].to(gates), S0.float()]
    leaves += [g_v.to(gates)] if two_sided else []
    leaves = [x.requires_grad_() for x in leaves]
    cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
    results = gla(
        *leaves[:4], g_v=leaves[5] if two_sided else None, initial_state=leaves[4], cu_seqlens=cu, scale=scale,
        path=path,
    )  # fmt: skip
    grads = torch.autograd.grad(results, leaves, (do.to(dtype), dS.float()))
    found = dict(zip(NAMES, (*results, *grads), strict=False))
    errors = {n: error(x.detach(), exact[n]) for n, x in found.items()}
    wrong = {n: f"{e:.3g} > {budget[n]:.3g}" for n, e in errors.items() if not e <= budget[n]}
    assert not wrong, wrong


# interpreted


@interpreted
@pytest.mark.parametrize("start", range(1, 101, 20))
def test_every_length(start):
    for T in range(start, start + 20):
        kind = "logsigmoid/16" if T % 2 else "many resets"
        args, named = inputs("gla", 1, T, 1, 3, 5, kind=kind, seed=T)
        exact = references.recurrent(*args, **named)
        S0 = named["initial_state"].float()
        o, S = gla(*(x.float() for x in args), initial_state=S0, path=PATHS[T % 4 // 2])
        assert error(o, exact[0]) < 3e-6 and error(S, exact[1]) < 3e-6, T


@interpreted
@pytest.mark.parametrize("T", [1, 31, 32, 33, 81])
def test_gradients_at_edges(T):
    check(2, T, 1, 3, 5, path=PATHS[T % 2], two_sided=T % 3 == 0, seed=T)


@interpreted
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder(kind, two_sided):
    check(1, 70, 2, 5, 3, kind=kind, two_sided=two_sided)


@interpreted
@pytest.mark.parametrize("path", PATHS)
def test_packed_sequences(path):
    ends = [0, 0, 33, 33, 40, 97, 130, 130]
    check(1, 130, 2, 6, 5, kind="many resets", path=path, ends=ends, two_sided=True)


@interpreted
@pytest.mark.parametrize("K, V", [(60, 16), (64, 100), (128, 16), (256, 40), (16, 512)])
def test_sizes_in_the_interpreter(K, V):
    check(1, 33, 1, K, V, kind="mild and strong chunks" if K == 64 else "logsigmoid/16")


# anywhere: interpreted by `make test`, compiled by `make test-gpu`


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def here(request):
    if request.param != HERE:
        pytest.skip("kernels are compiled where there is a GPU, interpreted elsewhere")


anywhere = pytest.mark.usefixtures("here")


def small(T=35, **kw):
    args, named = inputs("gla", 2, T, 3, 20, 36, **kw)
    args = [x.to(HERE, torch.float32) for x in args]
    return args, named["initial_state"].to(HERE, torch.float32)


@anywhere
def test_it_is_a_form():
    args, S0 = small()
    for x, y in zip(
        FORMS["gla"]["triton"](*args, initial_state=S0), gla(*args, initial_state=S0), strict=True
    ):
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
    for x, y in zip(
        gla(q, k, v, g, initial_state=S0), gla(q, k, v, strong, initial_state=S0), strict=True
    ):
        assert error(x, y.double()) < 3e-6


@anywhere
@pytest.mark.parametrize("scale", [0.0, -2.0])
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
@pytest.mark.parametrize("path", PATHS)
def test_split_and_carry(path):
    args, S0 = small(kind="mild and strong chunks")
    whole, S = gla(*args, initial_state=S0, path=path)
    for a in (1, 32, 33):
        first, S_a = gla(*(x[:, :a] for x in args), initial_state=S0, path=path)
        second, S_b = gla(*(x[:, a:] for x in args), initial_state=S_a, path=path)
        assert error(torch.cat([first, second], 1), whole) < 1e-5 and error(S_b, S) < 1e-5


@anywhere
@pytest.mark.parametrize("path", PATHS)
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
@pytest.mark.parametrize("two_sided", [False, True])
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
    with pytest.raises(ValueError, match="^g: expected 4 axes"):
        gla(q, k, v, g[..., 0])
    with pytest.raises(ValueError, match="^g_v: expected shape"):
        gla(q, k, v, g, g_v=g)
    with pytest.raises(ValueError, match="^initial_state: expected shape"):
        gla(q, k, v, g, initial_state=S0[:1])
    with pytest.raises(ValueError, match="^path: expected one of fused"):
        gla(q, k, v, g, path="fast")
    with pytest.raises(ValueError, match="^q: expected K of at most 256, got 257"):
        gla(*(torch.zeros(1, 2, 1, 257, device=HERE) for _ in "qk"), v[:1, :2, :1],
            torch.zeros(1, 2, 1, 257, device=HERE))  # fmt: skip
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
    for dtype, gates in [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32,
                         torch.bfloat16), (torch.bfloat16, torch.float16)]:  # fmt: skip
        check(2, 200, 3, 128, 64, kind=kind, dtype=dtype, gates=gates)
        check(2, 200, 3, 64, 64, kind=kind, dtype=dtype, gates=gates)


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
def test_first_call_takes_at_most_ten_seconds(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) <= 10, run.stdout
