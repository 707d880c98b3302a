"""GLA token by token in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import pytest
import torch
from cases import LADDER, inputs, thin
from harness import CUDA, DTYPES, HERE, anywhere, budgets, compare
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ref import FORMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels.launch.checks import check_call
from gla_ref.kernels.steps import gla_step


def problem(B, T, H, K, V, dtype=torch.float32, gates=None, **kw):
    """(q, k, v, g as given, {initial_state, g_v}, {quantity: (exact, budget)})."""
    args, named = inputs("gla", B, T, H, K, V, **kw)
    given = [dtype, dtype, dtype, gates or dtype]
    args = [x.to(d).to(HERE) for x, d in zip(args, given, strict=True)]
    named = {n: x.to(gates or dtype if n == "g_v" else torch.float32).to(HERE) for n, x in named.items()}
    return args, named, judge(args, named)


def judge(args, named, ends=None):
    """Budgets of the recurrence in float32: the kernel rounds nothing else."""
    x = dict(zip("qkvg", args, strict=True)) | {"g_v": named.get("g_v"), "S": named["initial_state"]}
    dtypes = {n: y.dtype for n, y in x.items() if y is not None}
    return budgets("gla", x, dtypes, products=torch.float32, ends=ends)[1]


def held(found, judged):
    compare(dict(zip("oS", found, strict=True)), judged)


@anywhere
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("kind", thin(LADDER, "logsigmoid/16", "many resets"))
def test_the_gate_ladder(kind, two_sided):
    args, named, wanted = problem(2, 3, 1, 5, 7, kind=kind, g_v=two_sided)
    held(gla_step(*args, **named), wanted)
    assert FORMS["gla"]["triton_recurrent"](*args, **named)[0].equal(gla_step(*args, **named)[0])


@anywhere
@pytest.mark.parametrize("K, V", thin([(1, 1), (60, 100), (256, 40), (16, 512)], (1, 1), (60, 100)))
def test_sizes(K, V):
    args, named, wanted = problem(2, 2, 3, K, V, kind="-1", g_v=K == 60)
    held(gla_step(*args, **named), wanted)


@anywhere
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_halves(dtype):
    args, named, wanted = problem(2, 5, 3, 20, 36, dtype=dtype, gates=torch.float32, g_v=True)
    held(gla_step(*args, **named), wanted)


@anywhere
def test_packed_sequences_strides_and_poison(poisoned):
    """One of no tokens among them, and tensors whose last stride is 2."""
    ends = torch.tensor([0, 2, 2, 7], device=HERE)
    args, named = inputs("gla", 1, 7, 3, 20, 36, g_v=True)
    args, g_v = [x.float().to(HERE) for x in args], named["g_v"].float().to(HERE)
    S = torch.randn(3, 3, 36, 20, generator=torch.Generator().manual_seed(1)).to(HERE).mT
    named = {"g_v": g_v, "initial_state": S, "cu_seqlens": ends}
    judged = judge(args, named, (0, 2, 2, 7))
    args = [torch.stack([x, x], -1)[..., 0] for x in args]
    found = gla_step(*args, **named)
    held(found, judged)
    assert all(torch.equal(x, y) for x, y in zip(found, gla_step(*args, **named), strict=True))


@anywhere
def test_compiled_equals_eager():
    args, named, _ = problem(2, 1, 1, 5, 7)

    def f(S, *args):
        o, S = gla_step(*args, initial_state=S)
        return 2 * o, S

    compiled = torch.compile(f, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    S = named["initial_state"]
    assert all(torch.equal(x, y) for x, y in zip(f(S, *args), compiled(S, *args), strict=True))


@anywhere
def test_checking_a_call_moves_no_tensor():
    """When decoding, to convert the state once more is nearly as dear as the token."""

    class Listed(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            done.append(op)
            return op(*args, **(kwargs or {}))

    done: list = []
    q, k, v, g = (torch.randn(2, 1, 3, D, dtype=torch.float16, device=HERE) for D in (5, 5, 7, 5))
    S = torch.randn(2, 3, 5, 7, device=HERE)
    with Listed():
        check_call("gla", (q, k, v, g, None), S, None, None, {"K": 256, "V": 512})
    assert not done


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, V", [(16, 16), (60, 100), (128, 128), (256, 512)])
def test_sizes_on_the_gpu(dtype, K, V):
    for kind in ("logsigmoid/16", "many resets"):
        args, named, wanted = problem(3, 4, 2, K, V, dtype=dtype, kind=kind, g_v=K == 60)
        held(gla_step(*args, **named), wanted)
