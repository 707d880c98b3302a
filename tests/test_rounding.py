"""Rounding: the mode around products, the measure of error, the budget."""

import math

import pytest
import torch

from gla_ref import rounding


def test_operands_are_rounded_and_nothing_else():
    x, y = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    low_x, low_y = x.bfloat16().float(), y.bfloat16().float()
    with rounding.operands_in(torch.bfloat16):
        products = x @ y, torch.matmul(x, y), x.matmul(y)
        others = x * y, x + y, x.sum()
    assert all(torch.equal(z, low_x @ low_y) for z in products)
    assert not torch.equal(products[0], x @ y)
    for a, b in zip(others, (x * y, x + y, x.sum()), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_those_of_the_product_that_was_made():
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.eye(3) * (1 + 2.0**-12)
    with rounding.operands_in(torch.bfloat16):
        z = x @ y
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.ones(3, 3))


def test_errors_are_relative_but_near_zero():
    exact = torch.tensor([3.0, -3.0, 3.0, 3.0], dtype=torch.float64)
    assert rounding.error(exact + 0.3, exact) == pytest.approx(0.1)
    assert rounding.error(torch.full((2,), 1e-2), torch.full((2,), 1e-4)) == pytest.approx(9.9e-3)
    assert rounding.error(torch.tensor([math.nan]), exact[:1]) == math.inf
    assert rounding.error(exact[:0], exact[:0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_budget_is_twice_the_error_and_four_eps(dtype):
    assert rounding.budget(0.5, dtype) == 1 + 4 * torch.finfo(dtype).eps


def test_tf32_keeps_ten_bits_and_rounds_to_even():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-12, 0.0])
    kept = torch.tensor([1 + 2**-10, 1, 1 + 2 * 2**-10, 1 + 2**-10, -1, 0.0])
    assert torch.equal(rounding.tf32(x), kept)
    bf16 = rounding.tf32(torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float())
    assert torch.equal(bf16, bf16.bfloat16().float())  # fewer bits stay as they are


def test_tf32_cut_goes_towards_zero():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-10 - 2**-23, -1 - 3 * 2**-11, 0.0])
    assert torch.equal(rounding.tf32_cut(x), torch.tensor([1 + 2**-10, 1, 1, -1 - 2**-10, 0.0]))
    y = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    lost = (y - rounding.tf32_cut(y)) / y
    assert lost.min() >= 0 and 2**-11 < lost.max() < 2**-10
    assert (y - rounding.tf32(y)).abs().div(y.abs()).max() <= 2**-11


def test_products_lose_what_their_format_loses():
    x, y = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ y.double()
    errors = {}
    for precision in rounding.PRODUCTS:
        with rounding.products_in(precision):
            errors[precision] = rounding.error(x @ y, exact)
    assert errors["ieee"] < 2e-6 and errors["tf32x3"] < 3e-6  # nothing lost but what float32 loses
    assert 1e-6 < errors["bf16x3"] < 1e-4  # 16 bits
    assert 1e-4 < errors["tf32"] < 2e-3 and errors["fp16"] == pytest.approx(errors["tf32"], rel=0.05)  # 11 bits
    assert 1.2 < errors["tf32-cut"] / errors["tf32"] < 4  # the same bits, and a bias
    assert 4 < errors["bf16"] / errors["tf32"] < 12  # 8 bits
    with rounding.products_in("fp16"):
        assert (1e5 * x @ y).isnan().any()  # beyond 65504
    with pytest.raises(ValueError, match="precision: expected one of ieee, .*, got 'fp8'"):
        rounding.products_in("fp8")
