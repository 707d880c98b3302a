"""Softmax attention: every form against the float64 decoding form, and the contract of the call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from gla_ref import softmax_attention
from gla_ref.softmax_attention import flash, parallel, recurrent, two_pass

FORMS = {
    "parallel": parallel,
    "recurrent": recurrent,
    "two_pass": two_pass,
    "flash": lambda *args, **options: flash(*args, **{"block_q": 4, "block_k": 3} | options),
}
B, H, K, V = 2, 3, 5, 4
EVERY = pytest.mark.parametrize("name", FORMS)


def inputs(T, *, seed=0, b=B, dtype=torch.float64, size=1.0, grad=False):
    torch.manual_seed(seed)
    shapes = (b, T, H, K), (b, T, H, K), (b, T, H, V)
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [x.requires_grad_(grad) for x in (size * q, k, v)]


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [None, 0.3, -1])
def test_oracle_is_attention(scale):
    """The oracle itself, against PyTorch's attention."""
    q, k, v = inputs(9)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    want = scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(1, 2)
    close(recurrent(q, k, v, scale=scale)[0], want, 1e-13)


@EVERY
@pytest.mark.parametrize("first", [1, 4, 6])
def test_cache_carries(name, first):
    """Split and carry = whole, also with gradients through the cache."""
    q, k, v = inputs(11, grad=True)
    want, _ = recurrent(q, k, v)
    start, cache = FORMS[name](q[:, :first], k[:, :first], v[:, :first])
    rest = (x[:, first:] for x in (q, k, v))
    end, (k_cache, v_cache) = FORMS[name](*rest, initial_state=cache)
    got = torch.cat([start, end], 1)
    close(got, want)
    assert torch.equal(k_cache, k) and torch.equal(v_cache, v)
    do = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (got, want)), strict=True):
        close(a, b)


@EVERY
def test_packed_is_separate(name):
    q, k, v = inputs(10, b=1)
    ends = [0, 3, 3, 4, 10]
    for dtype in (torch.int32, torch.int64):
        packed = torch.tensor(ends, dtype=dtype)
        got, state = FORMS[name](q, k, v, cu_seqlens=packed)
        for i, j in zip(ends, ends[1:], strict=False):
            if i < j:
                close(got[:, i:j], recurrent(q[:, i:j], k[:, i:j], v[:, i:j])[0])
        assert torch.equal(state[0], k) and torch.equal(state[1], v)


@EVERY
def test_gradcheck(name):
    q, k, v = (x[:, :, :1].detach().requires_grad_() for x in inputs(4, b=1))
    past = [x[:, :2, :1].detach().requires_grad_() for x in inputs(2, b=1, seed=1)[1:]]

    def call(q, k, v, *cache):
        o, (k_cache, v_cache) = FORMS[name](q, k, v, initial_state=cache)
        return o, k_cache, v_cache

    assert torch.autograd.gradcheck(call, (q, k, v, *past))


@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 7, 2, 3, 3))),
    past=st.integers(0, 3),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    name=st.sampled_from(["parallel", "two_pass", "flash"]),
    size=st.sampled_from([1.0, 1e4]),
)
def test_any_shape(sizes, past, blocks, name, size):
    b, T, h, key, value = sizes
    torch.manual_seed(T)
    q, k, v = (torch.randn(b, T, h, n, dtype=torch.float64) for n in (key, key, value))
    cache = None
    if past:
        cache = tuple(torch.randn(b, past, h, n, dtype=torch.float64) for n in (key, value))
    blocks = {"block_q": blocks[0], "block_k": blocks[1]} if name == "flash" else {}
    form = getattr(softmax_attention, name)
    got, state = form(size * q, k, v, initial_state=cache, **blocks)
    close(got, recurrent(size * q, k, v, initial_state=cache)[0])
    assert state[0].shape == (b, past + T, h, key)


KEYS, VALUES = torch.ones(B, 2, H, K), torch.ones(B, 2, H, V)
WRONG = {  # argument -> (a wrong value for it, error, what the message says)
    "initial_state": (torch.ones(B, 2, H, K), TypeError, "initial_state: expected a pair .*, got Tensor$"),
    "initial_state[0]": ((KEYS[..., 1:], VALUES), ValueError, r"initial_state\[0\]: expected shape .* got"),
    "initial_state[1]": ((KEYS, VALUES[:, 1:]), ValueError, r"initial_state\[1\]: expected shape .* got"),
    "initial_state dtype": ((KEYS, VALUES.double()), TypeError, r"initial_state\[1\]: expected dtype .* got"),
    "cu_seqlens": (torch.tensor([0, 4]), ValueError, "cu_seqlens: .* B = 1, got B = 2"),
}


@EVERY
@pytest.mark.parametrize("argument", WRONG)
def test_bad_inputs(name, argument):
    value, error, message = WRONG[argument]
    given = {x: y.float() for x, y in zip("qkv", inputs(4), strict=True)}
    given[argument.partition("[")[0].split()[0]] = value
    q, k, v = (given.pop(x) for x in "qkv")
    with pytest.raises(error, match=message):
        FORMS[name](q, k, v, **given)


@EVERY
def test_no_cache_beside_packed(name):
    q, k, v = inputs(4, b=1)
    with pytest.raises(ValueError, match="initial_state: expected None beside cu_seqlens"):
        FORMS[name](q, k, v, initial_state=(k, v), cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("option", ["block_q", "block_k"])
@pytest.mark.parametrize("size", [0, -2, 1.5, True])
def test_bad_blocks(option, size):
    with pytest.raises(ValueError, match=f"{option}: expected .* got"):
        flash(*inputs(4), **{option: size})
