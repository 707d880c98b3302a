"""The order of a sum is not the kernel's fault: budgets know it, whatever BLAS a processor has (`make test-orders`)."""

import pytest
import right_kernels
import torch
from cases import DELTA, thin

from gla_ref import FORMS, check, rounding
from gla_ref.check import oracle
from gla_ref.check._emulate import multiply
from gla_ref.check.oracle import problems
from gla_ref.rounding import Luck

F32, BF16 = torch.float32, torch.bfloat16
SCANS = [("simple_gla", "recurrent"), ("gla", "recurrent"), ("gla", "scan")]
LEFT = (
    *("narrow and long", "many tokens and heads", "later tokens loud"),
    *("loss of the state alone", "loss of some tokens", "loss of one token", "values that keys find"),
)
PARTS = (0, 1, 2, "large")  # of the cases: thirds of the small ones, and those of `LARGE`
EVERY = [(m, dtype, part) for m in check.MECHANISMS for dtype in (F32, BF16) for part in PARTS]


def test_every_copy_has_its_own_order_and_the_first_none():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 1, 3, 40, generator=rng), torch.randn(2, 1, 40, 3, generator=rng)
    many = [z.repeat(1, 32, 1, 1) for z in (x, y)]
    luck = Luck(32)
    first, second = (multiply(*many, F32, luck=luck) for _ in range(2))
    assert torch.equal(first[:, :1], multiply(x, y, F32)) and torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first, second), "each product draws anew"
    assert len({tuple(z.flatten().tolist()) for z in first.unbind(1)}) > 16
    assert (first - x @ y).abs().max() < 1e-5


def test_only_what_is_rounded_has_luck_in_rounding():
    rng = torch.Generator().manual_seed(0)
    y = torch.randn(1, 4, 8, 8, generator=rng)
    low, factor = Luck(4).rounded(y.bfloat16().float(), BF16)
    assert factor == 1 and torch.equal(low, y.bfloat16())
    low, factor = Luck(4).rounded(y[:, :1].expand(1, 4, 8, 8), BF16)
    again = low.double() / factor
    assert torch.equal(again[:, 0], y[:, 0].bfloat16().double()) and not torch.equal(again[:, 0], again[:, 1])
    assert ((again / y[:, :1] - 1).abs() < 2**-8).all()


def test_three_passes_are_those_of_the_precision():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 1, 8, 8, generator=rng), torch.randn(1, 1, 8, 8, generator=rng)
    x, y = Luck(thrice=True).shuffled(x, y)
    want = rounding.PRODUCTS["tf32x3"](x[..., 8:16], y[..., :8, :])  # what is left of either is in its other part
    parts = x[..., 8:16].double() @ y[..., :8, :].double()
    torch.testing.assert_close(want.double(), parts, rtol=1e-5, atol=1e-6)
    assert x.shape[-1] == y.shape[-2] == 24


@pytest.mark.parametrize("name", right_kernels.kernels("softmax_attention", F32))
def test_right_attention_is_right_where_scores_are_steep(name):
    """One log-sum-exp of float32, and channels in another order: they were up to 780 budgets off."""
    for seed in range(3):
        fn = right_kernels.kernels("softmax_attention", F32)[name]
        check.kernel("softmax_attention", fn, only="steep*", seed=seed).raise_if_failed()


@pytest.mark.parametrize("towards", thin([-torch.inf, torch.inf], torch.inf))
@pytest.mark.parametrize("mechanism, form", thin(SCANS, SCANS[0]))
def test_exponentials_may_err_both_ways(mechanism, form, towards, monkeypatch):
    """Every exponential of float32 but 1 is two units in its last place too large or too small, as a GPU's may be.

    A thousand equal gates add these errors up. The kit computes with the same exponentials.
    """
    exact = torch.Tensor.exp

    def exp(x):
        y = exact(x)
        if x.dtype != F32:
            return y
        value, limit = y.detach(), torch.full_like(y, towards)
        off = value.nextafter(limit).nextafter(limit) - value
        return torch.where(value == 1, y, y + off)

    monkeypatch.setattr(oracle, "WORKED_OUT", {})
    monkeypatch.setattr(torch.Tensor, "exp", exp)
    check.kernel(mechanism, FORMS[mechanism][form], only="gate -1e-4*").raise_if_failed()


@pytest.mark.parametrize("mechanism", thin(check.MECHANISMS, "gla"))
def test_the_kits_own_forms_are_right(mechanism):
    form = FORMS[mechanism]["flash" if mechanism == "softmax_attention" else "chunkwise"]
    check.kernel(mechanism, form, only="*[4-7]").raise_if_failed()


@pytest.mark.deep
def test_the_packages_attention_is_right_where_scores_are_steep():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    check.kernel("softmax_attention", FORMS["softmax_attention"]["triton"], only="steep*").raise_if_failed()


#: cases with the most heads or tokens take half of the time and have no quantity of their own
LARGE = ("many heads", "packed whole chunks", "joint", "joint packed", "joint square", "long", "narrow and long")


@pytest.mark.parametrize("mechanism, dtype, part", thin(EVERY, ("linear_attention", F32, 0)))
def test_no_budget_is_as_large_as_its_quantity(mechanism, dtype, part):
    """A kernel that gives zeros is off by the largest element: no budget is a tenth of that.

    In bfloat16 a fifth, since a gate's gradient is a difference of stored numbers; of attention a third, since steep
    scores leave of dp - D little more than the rounding of the stored o, of which D is made; of a delta rule half:
    its corrections leave of a gradient a difference of sums, and in seven cases next to nothing.
    """
    attention, delta = mechanism == "softmax_attention", mechanism in DELTA
    share = 1 / 10 if dtype == F32 else 1 / 3 if attention else 1 / 2 if delta else 1 / 5
    left_out = LEFT if delta and dtype == BF16 else ()
    cases = [case for case in check.cases(mechanism) if case.name not in left_out]
    cases = [case for case in cases if (case.name in LARGE) == (part == "large")]
    for p in problems(mechanism, cases if part == "large" else cases[part::3], dtype, 0):
        for name, x in p.exact.items():
            for s, unit, allowed in p.octaves(name):
                most = x[s].abs().max().item() if x[s].numel() else 0.0
                if most > 1e-3:  # else errors are absolute
                    assert allowed * unit <= share * most, (p.case.name, name, s, allowed, most / unit)
