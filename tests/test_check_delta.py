"""The cases of the check kit's delta rules, and kernels that drop the state where gates are strong."""

import pytest
import torch
from cases import thin

from gla_ref import FORMS, check
from gla_ref.check._cases import inputs
from gla_ref.check.mistakes._shipped import right
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


def cut(strong, state):
    """A kernel in pieces of 96 tokens. Where the gates before a piece are `strong`, it begins with a wrong `state`."""

    def kernel(*tokens, scale=None, initial_state=None):
        outs, S = [], initial_state
        for at in range(0, tokens[0].shape[1], 96):
            early, piece = [x[:, :at] for x in tokens], [x[:, at : at + 96] for x in tokens]
            if at:
                S = right(*early, initial_state=initial_state)[1]
                S = state(S, early, initial_state) if strong(early[3]) else S
            outs.append(right(*piece, scale=scale, initial_state=S)[0])
        return torch.cat(outs, 1), right(*tokens, initial_state=initial_state)[1]

    return kernel


def in_all_channels(g):
    return (g[:, -16:].sum(1) < -14).all(-1).any()


def zeros(S, early, first):
    return torch.zeros_like(S)


DROPPED = {  # each by a rule of its own; one more is in the museum
    "by another bound": ("kda", cut(lambda g: g[:, -64:].mean(-1).sum(1).mean() < -60, zeros)),
    "a state of 16 tokens": ("kda", cut(in_all_channels, lambda S, x, first: right(*(y[:, -16:] for y in x))[1])),
    "a state 16 tokens old": (
        "kda",
        cut(in_all_channels, lambda S, x, first: right(*(y[:, :-16] for y in x), initial_state=first)[1]),
    ),
    "by the mean head": ("simple_gla", cut(lambda g: g[:, -64:].sum(1).mean() < -60, zeros)),
}


@pytest.mark.parametrize("name", thin(DROPPED, "by the mean head"))
def test_a_dropped_state_is_caught_and_named(name):
    """By whatever rule a kernel drops it; uniform gates and short texts are right in all of these."""
    mechanism, fn = DROPPED[name]
    only = ("length 65", "gate -20", "hand-over", "strong but in one head")
    report = check.kernel(mechanism, fn, only=only, forward_only=True)
    assert {*report.failing} <= {"hand-over", "strong but in one head"}, str(report)
    assert [match["mistake"] for match in report.diagnosis] == ["state dropped where gates are strong"], str(report)


@pytest.mark.parametrize("mechanism", ["delta_rule", "gated_delta_rule", "kda"])
@pytest.mark.parametrize("name", ["hand-over", "relay"])
def test_keys_hand_the_state_over(mechanism, name):
    """In every sub-chunk, what is read depends on values of sub-chunks before, of channels that are lost since."""
    x = made(name, mechanism)
    assert (x["k"].norm(dim=-1) < 1 + 1e-6).all() and ("g" not in x or -5 < x["g"].min() <= x["g"].max() < 0)
    call = {n: x[n] for n in ("q", "k", "v", "g", "beta") if n in x}
    early = call | {"v": x["v"].clone()}
    early["v"][:, 96:] = 0
    o = FORMS[mechanism]["recurrent"](**early)[0][:, 112:128, -1]
    assert o.square().mean().sqrt() > 0.02
