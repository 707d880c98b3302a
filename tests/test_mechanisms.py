"""A mechanism is one entry: a gated delta rule, declared here anew, is checked by what the other mechanisms are."""

import pytest
import torch
from cases import thin

from gla_ref import check
from gla_ref._contract import form
from gla_ref.check import MECHANISMS
from gla_ref.check._emulate import products_in
from gla_ref.check._mechanisms import Kind
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
