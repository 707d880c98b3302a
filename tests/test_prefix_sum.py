"""Prefix sums and scans: the worked example 0 ... 11, any length, any associative operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gla_ref.prefix_sum import blelloch, chunked, hillis_steele, sequential

SCANS = [hillis_steele, blelloch]


def add(left, right):
    return tuple(a + b for a, b in zip(left, right, strict=True))


def gated(left, right):
    """The operator of a gated state (alpha, S): first left, then right."""
    (a, S), (b, R) = left, right
    return a * b, b[..., None] * S + R


def in_order(combine, xs, dim):
    """The definition: fold from the left, one element after the other."""
    ys = [tuple(x.narrow(dim, 0, 1) for x in xs)]
    for t in range(1, xs[0].shape[dim]):
        ys.append(combine(ys[-1], tuple(x.narrow(dim, t, 1) for x in xs)))
    return tuple(torch.cat(parts, dim) for parts in zip(*ys, strict=True))


def test_worked_example():
    local, carry, result = chunked(torch.arange(12), 4)
    assert local.tolist() == [0, 1, 3, 6, 4, 9, 15, 22, 8, 17, 27, 38]
    assert carry.tolist() == [0, 6, 28]
    assert result.tolist() == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66]


@given(T=st.integers(1, 40), C=st.integers(1, 45), shape=st.lists(st.integers(1, 3), max_size=2))
def test_chunked_is_a_prefix_sum(T, C, shape):
    torch.manual_seed(T * 50 + C)
    x = torch.randn(T, *shape, dtype=torch.float64)
    local, carry, result = chunked(x, C)
    assert local.shape == result.shape == x.shape and len(carry) == -(-T // C)
    torch.testing.assert_close(result, sequential(x, 0), rtol=0, atol=1e-12)
    for n in range(len(carry)):
        torch.testing.assert_close(carry[n], x[: n * C].sum(0), rtol=0, atol=1e-12)
        rows = slice(n * C, (n + 1) * C)
        torch.testing.assert_close(local[rows], x[rows].cumsum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sequential(dim):
    x = torch.randn(3, 4, 5, dtype=torch.float64).transpose(0, 2)
    torch.testing.assert_close(sequential(x, dim), x.cumsum(dim))


@pytest.mark.parametrize("scan", SCANS)
@given(T=st.integers(1, 70), dim=st.integers(0, 2))
def test_scan_of_gated_states(scan, T, dim):
    torch.manual_seed(T)
    size = [2, 2, 3]
    size[dim] = T
    xs = torch.rand(size, dtype=torch.float64), torch.randn(*size, 2, dtype=torch.float64)
    for got, want in zip(scan(gated, xs, dim=dim), in_order(gated, xs, dim), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("T", [1, 2, 5])
def test_scan_is_differentiable(scan, T):
    torch.manual_seed(T)
    a = torch.rand(1, T, 2, dtype=torch.float64, requires_grad=True)
    S = torch.randn(1, T, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *xs: scan(gated, xs), (a, S))


def test_work_and_depth():
    """What chapter 6 says of two scans: rounds and combined elements, counted."""
    for T in (1, 2, 3, 8, 13, 64):
        counted = {}
        for scan in SCANS:
            calls = []

            def spy(left, right, calls=calls):
                calls.append(left[0].shape[1])
                return add(left, right)

            scan(spy, (torch.ones(1, T),))
            counted[scan.__name__] = len(calls), sum(calls)
        rounds = (T - 1).bit_length()
        assert counted["hillis_steele"] == (rounds, sum(T - 2**r for r in range(rounds)))
        depth, work = counted["blelloch"]
        assert depth <= 2 * rounds and work <= 2 * T


def test_bad_inputs():
    x = torch.ones(2, 3)
    for C in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="C: expected"):
            chunked(x, C)
    for call in (
        lambda: sequential(x, 2),
        lambda: sequential(torch.ones(0), 0),
        lambda: chunked(torch.tensor(1.0), 2),
        lambda: blelloch(add, ()),
        lambda: hillis_steele(add, (x, torch.ones(2, 4))),
        lambda: hillis_steele(add, (x, torch.ones(2))),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    with pytest.raises(TypeError, match=r"xs\[0\]: expected"):
        sequential([1, 2], 0)
    with pytest.raises(TypeError, match="x: expected"):
        sequential(1, 0)
