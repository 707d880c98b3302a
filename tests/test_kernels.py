"""Triton kernels against the float64 references: interpreted on the CPU (float32), for real on a GPU (marked gpu)."""

import pytest
import torch
from cases import F64, LADDER, gate, thin
from harness import HERE, anywhere

from gla_ref.gates import chunk_cumsum

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels.exhibits.decay_cumsum import decay_cumsum
from gla_ref.kernels.launch.plan import spec_of
from gla_ref.kernels.portable.tiles import pattern, patterns


def assert_within_rounding(b, g, C):
    """Band of a float32 sum of n <= C terms: n roundings of partial sums no larger than sum |g|, and the product."""
    exact = chunk_cumsum(g.to(F64), C, base2=True)
    reset = exact == -torch.inf
    assert torch.equal(b == -torch.inf, reset.to(b.device))
    band = C * torch.finfo(torch.float32).eps * exact.abs()
    worst = (b.to(F64) - exact).abs() - band
    assert b.dtype == torch.float32 and (worst[~reset] <= 0).all(), worst[~reset].max()


@anywhere
@pytest.mark.parametrize("T", thin([1, 15, 16, 17, 37], 17))
@pytest.mark.parametrize("kind", LADDER)
def test_decay_cumsum_on_the_ladder(T, kind):
    g = gate(kind, 2, T, 3, 5).to(HERE, torch.float32)
    for C in (16, 5, 64):
        assert_within_rounding(decay_cumsum(g, C=C), g, C)


@anywhere
@pytest.mark.parametrize("K", [1, 60, 64, 100])
def test_decay_cumsum_strides_and_poisoned_memory(K, poisoned):
    g = gate("logsigmoid/16", 2, 3, 33, K).to(HERE, torch.float32).transpose(1, 2)  # [B, T, H, K], not contiguous
    first, before = decay_cumsum(g), g.clone()
    assert_within_rounding(first, g, 16)
    assert torch.equal(first, decay_cumsum(g)) and torch.equal(g, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, C", [(63, 16), (257, 64), (1000, 16), (4097, 64), (4096, 256)])
def test_decay_cumsum_at_size(dtype, T, C):
    g = gate("logsigmoid/16", 4, T, 8, 128).to("cuda", dtype)
    assert_within_rounding(decay_cumsum(g, C=C), g, C)


@pytest.mark.gpu
def test_decay_cumsum_beyond_2_to_the_31_elements():
    """Offsets are 64-bit: the last head of a tensor of more than 2^31 elements is right."""
    g = torch.full((1, 1 << 17, 130, 128), -0.5, dtype=torch.float16, device="cuda")
    b = decay_cumsum(g)
    assert_within_rounding(b[:, -32:, -1:], g[:, -32:, -1:], 16)
    assert_within_rounding(b[:, :32, :1], g[:, :32, :1], 16)


def test_decay_cumsum_names_bad_arguments(monkeypatch):
    g = gate("-1", 1, 4, 2, 3).float().to(HERE)
    with pytest.raises(TypeError, match="^g: expected float32, float16 or bfloat16"):
        decay_cumsum(g.double())
    with pytest.raises(ValueError, match="^g: expected 4 axes"):
        decay_cumsum(g[0])
    with pytest.raises(ValueError, match="^g: .*requires_grad=True"):
        decay_cumsum(g.clone().requires_grad_())
    for C in (0, 257, 1.5):
        with pytest.raises(ValueError, match="^C: expected"):
            decay_cumsum(g, C=C)
    monkeypatch.setenv("GLA_REF_DEBUG", "1")
    with pytest.raises(ValueError, match="^g: log gates must lie in"):
        decay_cumsum(-g)


def test_cpu_tensors_are_refused_outside_the_interpreter(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="^g: expected a CUDA tensor, got one on cpu; .*TRITON_INTERPRET"):
        decay_cumsum(gate("-1", 1, 4, 2, 3).float())


def test_strides_of_one_pattern():
    """Wide accesses stay recognisable; else numbers are neither 1 nor multiples of 16, and told by one more."""
    assert pattern(960, 48, 16, 1) == (960, 48, 16, 1)
    assert pattern(960, 48, 16, 2) == (960, 48, 16, 2)  # a last stride of its own: as it is
    for s in [(1050, 15, 5, 1), (0, 0, 8, 1), (960, 48, 24, 1)]:
        *hidden, last, told = pattern(*s)
        assert [n >> 4 for n in hidden] == list(s[:3]) and (last, told) == (1, 0)
        assert all(n != 1 and n % 16 for n in hidden)
    x, y = spec_of("x", torch.zeros(2, 16, 3, 16)), spec_of("y", torch.zeros(2, 16, 3, 7))
    assert patterns(x, None, y) == [x.strides, None, pattern(*y.strides)]
