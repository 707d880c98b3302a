"""GLA token by token in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import linear_problems
import pytest
import torch
from cases import LADDER, thin
from harness import CUDA, EVERY_DTYPE, HERE, anywhere, compare, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ref import FORMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels.gla import Call, check
from gla_ref.kernels.steps import gla_step


def problem(*sizes, **kw):
    """(inputs, {quantity: (exact, budget)}); in the emulated recurrence only float32 rounds, as in the kernel."""
    x, judged = linear_problems.problem("gla", *sizes, products=torch.float32, **kw)
    return x, {n: judged[n] for n in "oS"}


def step(x, ends=None, form=gla_step):
    cu = None if ends is None else torch.tensor(ends, device=HERE)
    o, S = form(*tokens(x), g_v=x["g_v"], initial_state=x["S"], cu_seqlens=cu)
    return {"o": o, "S": S}


@anywhere
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("kind", thin(LADDER, "logsigmoid/16", "many resets"))
def test_the_gate_ladder(kind, two_sided):
    x, judged = problem(2, 3, 1, 5, 7, kind=kind, two_sided=two_sided)
    found = step(x)
    compare(found, judged)
    assert step(x, form=FORMS["gla"]["triton_recurrent"])["o"].equal(found["o"])


SIZES = [(16, 16), (60, 100), (128, 128), (256, 512)] if CUDA else [(60, 100), (1, 1), (256, 40), (16, 512)]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("K, V", thin(SIZES, *SIZES[:2]))
def test_sizes(K, V, dtype):
    for kind in ("logsigmoid/16", "many resets") if CUDA else ("-1",):
        x, judged = problem(2, 4, 2, K, V, dtype=dtype, kind=kind, two_sided=K == 60)
        compare(step(x), judged)


@anywhere
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_halves(dtype):
    x, judged = problem(2, 5, 3, 20, 36, dtype=dtype, gates=torch.float32, two_sided=True)
    compare(step(x), judged)


@anywhere
def test_packed_sequences_strides_and_poison(poisoned):
    """One of no tokens among them, and tensors whose last stride is 2."""
    ends = (0, 2, 2, 7)
    x, judged = problem(1, 7, 3, 20, 36, two_sided=True, ends=ends)
    odd = {n: torch.stack([x[n], x[n]], -1)[..., 0] for n in "qkvg"} | {"S": x["S"].mT.contiguous().mT}
    first, second = step(x | odd, ends), step(x | odd, ends)
    compare(first, judged)
    assert all(torch.equal(first[n], second[n]) for n in "oS")


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
        check(Call(q, k, v, -g.abs(), None, initial_state=S, cu_seqlens=None, scale=None))
    assert not [op for op in done if "copy" in str(op)]  # on a CPU it looks at the gates
