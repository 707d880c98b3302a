"""A mechanism is one entry: a gated delta rule, declared here anew, is checked by what the other mechanisms are."""

import fresh_kernels
import pytest
from cases import thin

from gla_ref import check, gated_delta_rule
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
recurrent = form(DECLARED)(gated_delta_rule.recurrent.__wrapped__)


def emulated(*, state, scale, dtype, luck, **tensors):
    """In chunks, with products as a kernel makes them: operands rounded, sums term after term."""
    with products_in(dtype, luck):
        return gated_delta_rule.chunkwise.__wrapped__(**tensors, scale=scale, initial_state=state)


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    """All that the kit is told."""
    monkeypatch.setitem(MECHANISMS, NAME, Kind(DECLARED, recurrent, (emulated,)))


@pytest.mark.parametrize("only", thin(["value heads", "v*", "s*", "g*[!g]"], "value heads"))
def test_a_right_kernel_passes(only):
    report = check.kernel(NAME, gated_delta_rule.chunkwise, only=only)
    report.raise_if_failed()
    passed = {row.quantity for row in report.rows if row.status == "passed"}
    assert passed == {"o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS0"}


@pytest.mark.parametrize(
    "wrong, case, quantity",
    [
        pytest.param("erases_before_the_decay", "gate -1", "o", marks=pytest.mark.deep),
        pytest.param("empty_sequence_loses_its_state", "packed", "S", marks=pytest.mark.deep),
        ("dk_of_the_last_value_head_only", "value heads", "dk"),
    ],
)
def test_a_wrong_kernel_is_caught(wrong, case, quantity):
    failed = check.kernel(NAME, fresh_kernels.WRONG[wrong].fn, only=case).failures
    assert (case, quantity) in {(row.case, row.quantity) for row in failed}
