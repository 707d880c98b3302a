"""Sums of gates against plain loops, and the low-rank gate against its formula."""

import math

import pytest
import torch
from cases import F64, LADDER, error, gate

from gla_ref.gates import chunk_cumsum, decay_from_start, decay_to_end, low_rank_gate, segment_sum


@pytest.mark.parametrize("kind", LADDER)
def test_sums_equal_loops(kind):
    g = gate(kind, 1, 19, 1, 3)[0, :, 0]  # [T, K]
    T = len(g)
    for j in range(T):
        assert torch.allclose(decay_to_end(g)[j], g[j + 1 :].sum(0), rtol=1e-12, atol=0)
        assert torch.allclose(decay_from_start(g)[j], g[: j + 1].sum(0), rtol=1e-12, atol=0)
        for i in range(T):
            want = g[j + 1 : i + 1].sum(0) if j <= i else torch.full((3,), -torch.inf, dtype=F64)
            assert torch.allclose(segment_sum(g)[i, j], want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("C", [1, 5, 16, 64])
@pytest.mark.parametrize("shape", [(2, 37, 3), (2, 37, 3, 4)])
def test_chunk_cumsum_restarts_with_every_chunk(C, shape):
    g = gate("many resets", *shape)
    b = chunk_cumsum(g, C)
    for t in range(37):
        assert torch.allclose(b[:, t], g[:, t // C * C : t + 1].sum(1), rtol=1e-12, atol=0)
    in_base2 = chunk_cumsum(g, C, base2=True)
    assert torch.allclose(in_base2.exp2(), b.exp(), rtol=1e-12, atol=0)
    assert torch.allclose(in_base2 * math.log(2), b, rtol=1e-12, atol=0)


def test_low_rank_gate():
    x, W1, W2, bias = (torch.randn(*s, dtype=F64) for s in [(2, 5, 8), (8, 3), (3, 6), (6,)])
    g = low_rank_gate(x, W1, W2, bias, tau=16.0)
    assert g.shape == (2, 5, 6) and (g <= 0).all()
    assert error(g.exp(), torch.sigmoid(x @ W1 @ W2 + bias) ** (1 / 16)) < 1e-12
    assert error(low_rank_gate(x, W1, W2, tau=1.0).exp(), torch.sigmoid(x @ W1 @ W2)) < 1e-12
    assert torch.autograd.gradcheck(low_rank_gate, [t.requires_grad_() for t in (x, W1, W2, bias)])


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: low_rank_gate(torch.ones(2, 4), torch.ones(3, 2), torch.ones(2, 4)), "W1"),
        (lambda: low_rank_gate(torch.ones(2, 4), torch.ones(4, 2), torch.ones(3, 4)), "W2"),
        (lambda: low_rank_gate(torch.ones(2, 4), torch.ones(4, 2), torch.ones(2, 4), tau=0.0), "tau"),
        (lambda: chunk_cumsum(torch.zeros(1, 4, 1), 0), "C"),
        (lambda: chunk_cumsum(torch.zeros(1, 4, 1), 2.5), "C"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
