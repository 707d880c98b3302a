"""The cases of the check kit's delta rules."""

import pytest
import torch

from gla_ref import check
from gla_ref.check._cases import inputs
from gla_ref.check.oracle import problems

F32 = torch.float32


def made(name, mechanism="gated_delta_rule"):
    (case,) = (case for case in check.cases(mechanism) if case.name == name)
    return inputs(mechanism, case, F32, seed=0)


@pytest.mark.parametrize("name, alike", [("keys alike 0.9", 0.9), ("keys alike 0.99", 0.99), ("equal keys", 1.0)])
def test_keys_are_as_alike_as_their_case_says(name, alike):
    k = made(name)["k"]
    pairs = (k[:, :, None] * k[:, None]).sum(-1)
    torch.testing.assert_close(pairs.mean(), torch.tensor(alike).double(), rtol=0.05, atol=0)
    assert k.norm(dim=-1).sub(1).abs().max() < 1e-6


def test_strengths_and_keys_are_as_their_cases_say():
    for beta in (0.0, 1.0, 2.0):
        assert (made(f"strength {beta:g}")["beta"] == beta).all()
    torch.testing.assert_close(made("short keys")["k"].norm(dim=-1), torch.full((2, 67, 3), 0.5).double())
    x = made("values that keys find")
    left = x["v"] - torch.einsum("bthk,bhkv->bthv", x["k"], x["S0"])
    assert 0.005 < left.square().mean().sqrt() < 0.02 and x["v"].square().mean() > 0.1


def test_what_later_tokens_do_to_earlier_ones_shows():
    """A leak of a ten-millionth of later values is within budget, except where these are loud."""
    found = {}
    for case in check.cases("gated_delta_rule"):
        if case.name in ("later tokens loud", "loss of o alone"):
            (p,) = problems("gated_delta_rule", [case], F32, 0)
            v = p.inputs["v"]
            error, allowed = p.judge("o", p.exact["o"] + 1e-7 * (v.sum(1, keepdim=True) - v.cumsum(1)))
            found[case.name] = error / allowed
    assert found["loss of o alone"] < 1 < found["later tokens loud"]
