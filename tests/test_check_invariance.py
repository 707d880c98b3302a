"""What the kit says of a text alone, among others, packed, padded and cut in two."""

import pytest
import torch

from gla_ref import check, delta_rule, gla, linear_attention

SMALL = check.Case("small", B=1, T=150, H=1, K=5, V=7)


def verdicts(mechanism, fn, **options):
    return {c.way: c.verdict for c in check.invariance(mechanism, fn, text=SMALL, **options)}


@pytest.mark.parametrize("mechanism, module", [("gla", gla), ("delta_rule", delta_rule)])
def test_a_form_by_chunks_has_equal_bits_where_no_chunk_is_cut(mechanism, module):
    found = {c.way: c for c in check.invariance(mechanism, module.chunkwise, text=SMALL)}
    assert {found[way].verdict for way in ("again", "cut between chunks")} == {"equal bits"}
    inside = found["cut inside a chunk"]
    assert inside.verdict == "equal within rounding" and 0 < inside.off < inside.allowed and inside.quantity
    assert all(c.verdict.startswith("equal") for c in found.values())


def leaky(q, k, v, *, initial_state=None, cu_seqlens=None, scale=None):
    """It adds the mean of the values in a batch, and a constant where texts are packed."""
    o, S = linear_attention.recurrent(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return o + 0.1 * v.mean((0, 1)) - 0.1 * v[:1].mean((0, 1)) + 0.1 * (cu_seqlens is not None), S


def test_what_depends_on_its_neighbours_is_named():
    found = {c.way: c for c in check.invariance("linear_attention", leaky, text=SMALL, neighbours=5)}
    assert {way for way, c in found.items() if c.verdict == "different"} == {"in a batch", "packed"}
    assert found["packed"].quantity == "o" and found["packed"].off > 100 * found["packed"].allowed


def test_what_is_not_claimed_is_not_covered():
    def fn(q, k, v, g):
        return gla.chunkwise(q, k, v, g)[0], None

    found = verdicts("gla", fn, supports={"packed": False, "state": False, "gradient": False})
    left_out = {way for way, verdict in found.items() if verdict == "not covered"}
    assert left_out == {"packed", "cut between chunks", "cut inside a chunk"}
    found = verdicts("gla", lambda q, k, v, g: torch.zeros(()).missing)
    assert set(found.values()) == {"not covered"}
    with pytest.raises(ValueError, match="^supports: expected a claim of one text in torch.float32"):
        verdicts("gla", gla.chunkwise, supports={"dtypes": "bf16"})
