"""A mechanism is one entry: a gated delta rule, declared here anew, is checked by what the other mechanisms are."""

import pytest
import torch
from cases import thin

from gla_ref import check
from gla_ref._contract import form
from gla_ref.check import MECHANISMS, Case
from gla_ref.check._cases import inputs
from gla_ref.check._emulate import products_in
from gla_ref.check._mechanisms import Kind
from gla_ref.check.oracle import evaluate, problems
from gla_ref.mechanisms import Argument, Mechanism

NAME = "own_delta_rule"
DECLARED = Mechanism(
    (
        Argument("q", "B T H K", "token"),
        Argument("k", "B T H K", "token"),
        Argument("v", "B T HV V", "token"),
        Argument("g", "B T HV", "gate"),
        Argument("beta", "B T HV", "strength"),
    ),
    (Argument("S", "N HV K V", "state"),),
    (("HV", "H"),),  # value head h reads key head h // (HV / H)
)


@form(DECLARED)
def recurrent(q, k, v, g, beta, *, scale, initial_state):
    """S_t = e^g_t (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t and o_t = scale q_t S_t."""
    S, o, groups = initial_state, [], v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, 2)[..., None, :] for x in (scale * q, k))
    v, alpha, beta = v[..., None, :], g.exp()[..., None, None], beta[..., None, None]
    for q_t, k_t, v_t, a_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, alpha, beta)), strict=True):
        S = a_t * S
        S = S + k_t.mT * (b_t * (v_t - k_t @ S))
        o.append((q_t @ S)[..., 0, :])
    return torch.stack(o, 1), S


def emulated(*, state, scale, dtype, luck, **tensors):
    """The recurrence with products as a kernel makes them: operands rounded, sums term after term."""
    with products_in(dtype, luck):
        return recurrent.__wrapped__(**tensors, scale=scale, initial_state=state)


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    """All that the kit is told."""
    monkeypatch.setitem(MECHANISMS, NAME, Kind(DECLARED, recurrent, (emulated,)))


def kernel(mistake=None):
    """Another way of computing it: every token's transition as a matrix."""

    def fn(q, k, v, g, beta, *, scale=None, initial_state=None):
        (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
        scale = K**-0.5 if scale is None else scale
        S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state
        head = torch.arange(HV) % H if mistake == "heads in turn" else torch.arange(HV) // (HV // H)
        q, k, a, b, o = q[:, :, head], k[:, :, head], g.exp()[..., None, None], beta[..., None], []
        for t in range(T):
            kk = k[:, t, :, :, None] * k[:, t, :, None]
            erase = b[:, t, :, None] * kk if mistake != "beta missing in what is erased" else kk
            write = k[:, t, :, :, None] * (b * v)[:, t, :, None]
            S = a[:, t] * (S - erase @ S) + write * (a[:, t] if mistake == "decay last" else 1)
            o.append(scale * (q[:, t, :, None] @ S)[..., 0, :])
        return torch.stack(o, 1), S

    return fn


@pytest.mark.parametrize("only", thin(["v*", "s*", "g*[!g]"], "v*"))
def test_a_right_kernel_passes(only):
    report = check.kernel(NAME, kernel(), only=only)
    report.raise_if_failed()
    passed = {row.quantity for row in report.rows if row.status == "passed"}
    assert passed == {"o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS0"}


def test_it_passes_in_other_conventions():
    def fn(q, k, v, a, beta, *, initial_state):
        q, k, v, a, beta = (x.transpose(1, 2) for x in (q, k, v, a, beta))
        o, S = kernel()(q, k, v, a.log(), beta, initial_state=initial_state.mT)
        return o.transpose(1, 2), S.mT

    options = {"layout": "bhtd", "state": "vk", "gate": "alpha"}
    check.kernel(NAME, fn, only="value heads", **options).raise_if_failed()


@pytest.mark.parametrize(
    "mistake, case, quantity",
    [
        ("decay last", "gate -1", "o"),
        ("beta missing in what is erased", "strengths up to 2", "dbeta"),
        ("heads in turn", "value heads", "S"),
    ],
)
def test_a_wrong_kernel_is_caught(mistake, case, quantity):
    failed = check.kernel(NAME, kernel(mistake), only=case).failures
    assert (case, quantity) in {(row.case, row.quantity) for row in failed}
    if mistake == "heads in turn":  # shows only where there are several of both
        check.kernel(NAME, kernel(mistake), only="length 7").raise_if_failed()


def test_its_cases_are_made_of_axes_and_roles():
    case = Case(B=1, T=9, H=2, K=4, V=3, groups=3, strength=2.0, ends=(0, 4, 4, 9), other="beta")
    x = inputs(NAME, case, torch.bfloat16, seed=0)
    shapes = {name: tuple(y.shape) for name, y in x.items()}
    assert shapes == {
        "q": (1, 9, 2, 4),
        "k": (1, 9, 2, 4),
        "v": (1, 9, 6, 3),
        "g": (1, 9, 6),
        "beta": (1, 9, 6),
        "d o": (1, 9, 6, 3),
        "S0": (3, 6, 4, 3),
        "d S": (3, 6, 4, 3),
    }
    assert 0 <= x["beta"].min() < 1 < x["beta"].max() <= 2 and (x["g"] <= 0).all()
    torch.testing.assert_close(x["k"].norm(dim=-1), torch.ones(1, 9, 2).double(), rtol=4e-3, atol=0)
    held = problems(NAME, [case], torch.bfloat16, 0)[0].dtypes
    low = {name for name, dtype in held.items() if dtype == torch.bfloat16}
    assert low == {"o", "dq", "dk", "dv", "dg"} and held["dbeta"] == held["dS0"] == torch.float32
    made = {name for c in check.cases(NAME) for name in (c.groups, c.strength)}
    assert made == {1, 2, 3, 4}


def test_a_pack_is_its_sequences():
    """What the kit's oracle is, is the contract's: an empty sequence keeps its state."""
    case, kind = Case(B=1, T=9, H=2, K=4, V=3, groups=2, ends=(0, 4, 4, 9)), MECHANISMS[NAME]
    x = inputs(NAME, case, torch.float32, seed=0)
    whole = evaluate(kind.oracle, kind, x, case)
    torch.testing.assert_close(whole["S"][1], x["S0"][1])
    tokens = [x[name][:, 4:] for name in kind.arguments]
    o, S = kind.emulate(*tokens, scale=None, initial_state=x["S0"][2:], cu_seqlens=None)
    torch.testing.assert_close(whole["o"][:, 4:], o)
    torch.testing.assert_close(whole["S"][2:], S)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"v": torch.zeros(1, 5, 5, 3)}, "v: expected HV a multiple of H = 2 as in q, got 5"),
        ({"v": torch.zeros(1, 5, 2, 3)}, "g: expected shape .B T HV. with HV = 2 as in v"),
        ({"beta": torch.full((1, 5, 4), 2.5)}, r"beta: write strengths must lie in \[0, 2\], got 2.5"),
        ({"g": torch.ones(1, 5, 4)}, r"g: log gates must lie in \[-inf, 0\]"),
        ({"initial_state": torch.zeros(1, 2, 4, 3)}, r"initial_state: expected .*\[1, 4, 4, 3\]"),
    ],
)
def test_wrong_input_is_named(change, message):
    given = {"q": torch.zeros(1, 5, 2, 4), "k": torch.zeros(1, 5, 2, 4), "v": torch.zeros(1, 5, 4, 3)}
    given |= {"g": torch.zeros(1, 5, 4), "beta": torch.zeros(1, 5, 4)}
    recurrent(**given)
    if change.keys() == {"v"} and change["v"].shape[2] == 5:  # else g would be the first to differ
        change = change | {"g": torch.zeros(1, 5, 5), "beta": torch.zeros(1, 5, 5)}
    with pytest.raises(ValueError, match=f"^{message}"):
        recurrent(**given | change)
