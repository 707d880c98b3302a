"""GLA's kernels alone, beyond what test_kernels_portable.py holds them to: strong gates, float16, two gates."""

import pytest
import torch
from cases import error
from harness import DTYPES, HERE, anywhere, budgets, compare, interpreted, results
from problems import problem
from test_kernels_portable import check

from gla_ref import FORMS
from gla_ref import check as kit

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
tl = pytest.importorskip("triton.language")

from gla_ref.kernels.gla import gla
from gla_ref.kernels.portable import gla_forward

F32, BF16, F16 = DTYPES

# interpreted


@interpreted
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_float16(size):
    """A state of a million fits float32 only; scale brings what it adds to o and dq back."""
    x, judged = problem("gla", 1, 70, 1, 5, 3, kind="mild and strong chunks", dtype=torch.float16, S=size, scale=1e-3)
    compare(results(gla, x, scale=1e-3), judged)


@interpreted
@pytest.mark.parametrize("K, two_sided", [(5, False), (70, False), (5, True)])
def test_float16_at_strong_gates(K, two_sided):
    """The decay of one step is below all numbers of float16; dS0 and dg, which have it, are right all the same."""
    check("gla", 1, 70, 1, K, 6, kind="-20", dtype=torch.float16, gates=torch.float32, two_sided=two_sided)


@anywhere
@pytest.mark.parametrize("T", [1, 2, 4])
def test_gradients_of_short_sequences_with_strong_gates(T):
    """dg is 1e-9 of what a pair i = j would add to both sides of its difference; float16's own cannot hold it."""
    for dtype, gates in ((F32, F32), (F16, F32), (BF16, BF16)):
        x, judged = problem("gla", 1, T, 2, 20, 12, kind="-20", dtype=dtype, gates=gates)
        assert judged["dg"][1] < 0.2, "the emulated run is right, too"
        if dtype != BF16 or HERE == "cuda":  # the interpreter's products of bfloat16 are wrong
            compare(results(gla, x), judged)


def forward_within_budget(q, k, v, g, g_v=None, S=None):
    """o and S of inputs as they are."""
    S = torch.zeros(len(q), q.shape[2], q.shape[3], v.shape[3], device=q.device) if S is None else S
    given = dict(zip(("q", "k", "v", "g", "g_v", "S"), (q, k, v, g, g_v, S), strict=True))
    dtypes = {n: y.dtype for n, y in given.items() if y is not None}
    _, judged = budgets("gla", given, dtypes)
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
    """One product costs the most digits there, by budgets that know nothing of the kernel's limits."""
    case = kit.Case(B=1, H=1, T=T, gate=str((gla_forward.LIMIT[dtype] + 1e-3) / T))
    kit.kernel("gla", FORMS["gla"]["triton"], device=HERE, dtype=dtype, only=case).raise_if_failed()


@triton.jit
def total_off(x, LOW: tl.constexpr):
    return tl.sum(x.to(tl.float32), 0) * (1 + 2**-22)


@pytest.mark.deep
@interpreted
def test_pairs_do_not_see_the_order_in_which_a_total_is_summed(monkeypatch):
    """The interpreter sums a total in order, a GPU as a tree, an ulp or two away (lab/gla.md)."""
    monkeypatch.setattr("gla_ref.kernels.portable.gla_forward.totals", total_off)
    case = kit.Case(B=1, H=1, T=48, gate="-0.245")
    form = FORMS["gla"]["triton"]
    kit.kernel("gla", form, dtype=torch.float32, only=case, seed=1).raise_if_failed()


@anywhere
def test_the_path_of_a_chunk_changes_rounding_only():
    """A channel whose q and k are 0 makes a chunk strong, and nothing else."""
    x, _ = problem("gla", 2, 64, 1, 20, 36)
    q, k, v, g, S0 = (x[n] for n in ("q", "k", "v", "g", "S"))
    q[..., 7], k[..., 7], S0[:, :, 7] = 0, 0, 0
    strong = g.clone()
    strong[..., 7] = -1e3
    for x, y in zip(gla(q, k, v, g, initial_state=S0), gla(q, k, v, strong, initial_state=S0), strict=True):
        assert error(x, y.double()) < 3e-6


# on a GPU


@pytest.mark.gpu
def test_two_gates_share_the_range():
    """With decays of 80 nats on keys and on values, k'^T v' would hold e^80 k v."""
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
