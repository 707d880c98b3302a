"""Token by token in Triton against the float64 recurrence: interpreted here, compiled on a GPU."""

import pytest
import torch
from cases import LADDER, Dispatched, thin
from harness import BF16, CUDA, EVERY_DTYPE, F16, F32, HERE, anywhere, compare, tokens
from problems import EVERY, MILD, problem

from gla_ref import FORMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import steps
from gla_ref.kernels.gla import Call, check

STEPS = {mechanism: getattr(steps, f"{mechanism}_step") for mechanism in ("gla", *EVERY)}


def given(mechanism, *sizes, **options):
    """`problem`: in the emulated recurrence only float32 rounds, as in the kernels."""
    x, judged = problem(mechanism, *sizes, products=F32, **options)
    return x, {n: judged[n] for n in "oS"}


def step(mechanism, x, ends=None):
    cu = None if ends is None else torch.tensor(ends, device=HERE)
    options = {"g_v": x["g_v"]} if x.get("g_v") is not None else {}
    o, S = STEPS[mechanism](*tokens(x), initial_state=x["S"], cu_seqlens=cu, **options)
    return {"o": o, "S": S}


RUNGS = [(*way, kind) for way in (("gla", False), ("gla", True), *((m, False) for m in EVERY[1:])) for kind in LADDER]


@anywhere
@pytest.mark.parametrize(
    "mechanism, two_sided, kind", thin(RUNGS, *(x for x in RUNGS if x[2] == "many resets" or x[::2] == ("gla", MILD)))
)
def test_the_gate_ladder(mechanism, two_sided, kind):
    x, judged = given(mechanism, 2, 3, 1, 5, 7, kind=kind, two_sided=two_sided)
    found = step(mechanism, x)
    compare(found, judged)
    if not two_sided:
        form = FORMS[mechanism]["triton_recurrent"]
        assert form(*tokens(x), initial_state=x["S"])[0].equal(found["o"])


SIZES = [(16, 16), (60, 100), (128, 128), (256, 512)] if CUDA else [(60, 100), (1, 1), (256, 40), (16, 512)]
SIZES = [(mechanism, *size) for mechanism in STEPS for size in SIZES]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("mechanism, K, V", thin(SIZES, *SIZES[:2], ("delta_rule", *SIZES[0][1:])))
def test_sizes(mechanism, K, V, dtype):
    for kind in (MILD, "many resets") if CUDA else ("-1",):
        x, judged = given(mechanism, 2, 4, 2, K, V, dtype=dtype, kind=kind, two_sided=K == 60)
        compare(step(mechanism, x), judged)


@anywhere
@pytest.mark.parametrize("mechanism", ("gla", "delta_rule"))
@pytest.mark.parametrize("dtype", [F16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_halves(mechanism, dtype):
    x, judged = given(mechanism, 2, 5, 3, 20, 36, dtype=dtype, gates=F32, two_sided=True)
    compare(step(mechanism, x), judged)


@anywhere
@pytest.mark.parametrize("mechanism", ("gla", "gated_delta_rule"))
def test_packed_sequences_strides_and_poison(mechanism, poisoned):
    """One of no tokens among them, and tensors whose last stride is 2."""
    ends = (0, 2, 2, 7)
    x, judged = given(mechanism, 1, 7, 3, 20, 36, two_sided=True, ends=ends)
    odd = {n: torch.stack([x[n], x[n]], -1)[..., 0] for n in "qkvg"} | {"S": x["S"].mT.contiguous().mT}
    first, second = step(mechanism, x | odd, ends), step(mechanism, x | odd, ends)
    compare(first, judged)
    assert all(torch.equal(first[n], second[n]) for n in "oS")


@anywhere
def test_checking_a_call_moves_no_tensor():
    """When decoding, to convert the state once more is nearly as dear as the token."""

    q, k, v, g = (torch.randn(2, 1, 3, D, dtype=F16, device=HERE) for D in (5, 5, 7, 5))
    S = torch.randn(2, 3, 5, 7, device=HERE)
    with Dispatched() as done:
        check(Call(q, k, v, -g.abs(), None, initial_state=S, cu_seqlens=None, scale=None))
    assert not [op for op, _ in done.calls if "copy" in str(op)]  # on a CPU it looks at the gates
