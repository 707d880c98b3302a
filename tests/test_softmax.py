"""Softmax: the forms agree, the naive one breaks where it should, merging is associative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gla_ref import softmax
from gla_ref.prefix_sum import blelloch

INF = torch.inf
STABLE = [softmax.safe, softmax.online]
# scores as they come: any size, ties, masked ones
scores = st.lists(st.sampled_from([-INF, -1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]), max_size=6)


def stats(values):
    x = torch.tensor(values, dtype=torch.float64)
    return softmax.statistics(x) if values else (torch.tensor(-INF).double(), torch.zeros(()).double())


def partial(values, v):
    """Attention over some keys, from its definition."""
    x = torch.tensor(values, dtype=torch.float64)
    m, d = stats(values)
    seen = x > -INF
    o = torch.softmax(x[seen], 0) @ v[seen] if seen.any() else torch.zeros(v.shape[1]).double()
    return m, d, o


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [softmax.naive, *STABLE])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_is_torch_softmax(form, dim):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, dtype=torch.float64).transpose(0, 2)
    torch.testing.assert_close(form(x, dim), torch.softmax(x, dim), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("form", STABLE)
def test_large_scores(form):
    x = 1e4 * torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(form(x), torch.softmax(x, -1), rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("dtype, largest", [(torch.float32, 88.7), (torch.float64, 709.7)])
def test_naive_breaks(dtype, largest):
    """The input that breaks it: one score above the logarithm of the largest number."""
    at, over = torch.tensor([[0.0, largest], [0.0, largest + 0.1]], dtype=dtype)
    assert softmax.naive(at).isfinite().all()
    assert softmax.naive(over).isnan().any()
    assert softmax.safe(over).isfinite().all()


def test_naive_overflows_in_the_sum_too():
    x = torch.full((4,), 88.0)  # e^88 fits into float32, four times e^88 does not
    assert x.exp().isfinite().all()
    assert (softmax.naive(x) == 0).all() and (softmax.safe(x) == 0.25).all()


@pytest.mark.parametrize("form", STABLE)
def test_masked(form):
    x = torch.tensor([[0.0, -INF, 0.0], [-INF, -INF, -INF]], requires_grad=True)
    y = form(x)
    assert y.tolist() == [[0.5, 0, 0.5], [0, 0, 0]]
    (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("form", [softmax.naive, *STABLE])
def test_gradcheck_and_dtype(form):
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(form, (x,))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        want = torch.softmax(x.detach().to(dtype).float(), -1).to(dtype)
        torch.testing.assert_close(form(x.detach().to(dtype)), want)


@given(a=scores, b=scores, c=scores)
def test_merge(a, b, c):
    """Associative, commutative, with an identity, and equal to the statistics of the union."""
    x, y, z, none = stats(a), stats(b), stats(c), stats([])
    close(softmax.merge(x, y), stats(a + b))
    close(softmax.merge(softmax.merge(x, y), z), softmax.merge(x, softmax.merge(y, z)))
    close(softmax.merge(x, y), softmax.merge(y, x))
    close(softmax.merge(x, none), x)
    close(softmax.merge(none, x), x)


@given(a=scores, b=scores, c=scores, seed=st.integers(0, 99))
def test_merge_outputs(a, b, c, seed):
    v = torch.randn(18, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cuts = [0, len(a), len(a + b), len(a + b + c)]
    x, y, z = (partial(s, v[i:j]) for s, i, j in zip((a, b, c), cuts, cuts[1:], strict=False))
    merge = softmax.merge_outputs
    whole = partial(a + b + c, v[: cuts[-1]])
    close(merge(merge(x, y), z), whole)
    close(merge(x, merge(y, z)), whole)


def test_statistics_by_scan():
    """Running statistics are a scan of `merge`: those of every prefix, in any grouping."""
    x = torch.randn(2, 11, dtype=torch.float64)
    x[0, 0] = -INF
    m, d = blelloch(softmax.merge, (x, (x > -INF).double()))
    for t in range(11):
        close((m[:, t], d[:, t]), softmax.statistics(x[:, : t + 1]))


def test_bad_inputs():
    for form in (softmax.naive, *STABLE, softmax.statistics):
        with pytest.raises(TypeError, match="x: expected a torch.Tensor, got list"):
            form([1.0])
        with pytest.raises(TypeError, match="x: expected a floating-point dtype, got torch.int64"):
            form(torch.arange(3))
        with pytest.raises(ValueError, match="dim: expected an axis"):
            form(torch.ones(3), 1)
        with pytest.raises(ValueError, match="x: axis 0 must not be empty"):
            form(torch.ones(0), 0)
