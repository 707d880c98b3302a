"""Eleven mistakes that the kit's library does not have, in a small kernel as a newcomer writes it; all are caught."""

import pytest
import torch
from cases import thin

from gla_ref import check


def kernel(mistake=None, C=32):
    """Chunked GLA in log space, right without a mistake; shares no code with the package."""

    def fn(q, k, v, g, *, scale=None, initial_state=None):
        B, T, H, K = q.shape
        scale = K**-0.5 if scale is None else scale
        S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
        if mistake == "scale of K rounded up to a power of two":
            scale = scale * (K / (1 << (K - 1).bit_length())) ** 0.5
        if mistake == "log sigmoid taken of what already is one":
            g = torch.nn.functional.logsigmoid(g)
        if mistake == "the caller's initial state scaled":
            S = scale * S
        if mistake == "heads of the initial state backwards":
            S = S.flip(1)
        if mistake == "a gate for every two tokens":
            g = torch.cat([x.mean(1, keepdim=True).expand_as(x) for x in g.split(2, 1)], 1)
        if mistake == "no gradient through decays":
            g = g.detach() + 0 * g.clamp_min(-1)
        total, o = 0 * g[:, 0], []
        for a in range(0, T, C):
            q_n, k_n, v_n, g_n = (x[:, a : a + C].transpose(1, 2) for x in (q, k, v, g))
            n = q_n.shape[2]
            i = torch.arange(n)
            D = torch.where((i[:, None] > i)[..., None], g_n[:, :, :, None], 0).cumsum(2)
            b, rest = g_n.cumsum(2), D[:, :, -1]
            if mistake == "exponents cut off at -20 on both sides":
                b = b.clamp_min(-20)
                D = b[:, :, :, None] - b[:, :, None]
            if mistake == "running sum of gates not begun anew":
                b = b + total[:, :, None]
                total = total + g_n.sum(2)
            P = (q_n[:, :, :, None] * k_n[:, :, None] * D.exp()).sum(-1).tril()
            if mistake == "weights stored in half precision":
                P = P.half().to(q.dtype)
            o.append(scale * (P @ v_n + (q_n * b.exp()) @ S))
            if mistake == "a window: what is older than a chunk is forgotten" and a:
                S = (k_n * rest.exp()).mT @ v_n
                continue
            S = b[:, :, -1, :, None].exp() * S + (k_n * rest.exp()).mT @ v_n
        o = torch.cat(o, 2).transpose(1, 2)
        if mistake == "output divided by the sum of its weights":
            o = o / (1 + (q * k.cumsum(1)).sum(-1, keepdim=True).abs())
        return o, S

    return fn


MISTAKES = (
    "scale of K rounded up to a power of two",
    "log sigmoid taken of what already is one",
    "the caller's initial state scaled",
    "heads of the initial state backwards",
    "a gate for every two tokens",
    "no gradient through decays",
    "exponents cut off at -20 on both sides",
    "running sum of gates not begun anew",
    "weights stored in half precision",
    "a window: what is older than a chunk is forgotten",
    "output divided by the sum of its weights",
)


def test_without_a_mistake_it_is_right():
    check.kernel("gla", kernel(), only=["gate -1", "gate -20", "gate many resets"]).raise_if_failed()


@pytest.mark.parametrize("mistake", thin(MISTAKES, MISTAKES[-1]))
def test_it_is_caught(mistake):
    report = check.kernel("gla", kernel(mistake), only="gate -1*")
    assert {row.kind for row in report.failures} & {"error", "not finite"}, str(report)
