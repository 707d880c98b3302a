"""Mistakes that kernels are known for, written without the kit's library: each is named."""

import pytest
import torch
from cases import thin

from gla_ref import check

LOG2E = 1.4426950408889634


def tf32(x):
    """x in 10 bits of fraction, by way of float64; a straight-through gradient."""
    m, e = torch.frexp(x.detach().double())
    low = torch.ldexp((m * 2**11).round() / 2**11, e).to(x.dtype)
    return x + (low - x).detach()


class Grad(torch.autograd.Function):
    """x, whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return ctx.change(d), None


def gla(mistake=None, C=32):
    """GLA chunk by chunk in log space, `[B, H, ...]` inside, right without a mistake."""
    stale = {}

    def fn(q, k, v, g, *, scale=None, initial_state=None):
        B, T, H, K = q.shape
        V, s = v.shape[-1], K**-0.5 if scale is None else scale
        if mistake == "sums":
            g = stale.setdefault(g.shape, g.detach())
        S = q.new_zeros(B, H, K, V) if initial_state is None else initial_state
        if mistake == "V tail":
            v = v * (torch.arange(V) < V // 32 * 32)
        if mistake == "K tail":
            q, k = (x * (torch.arange(K) < 32) for x in (q, k))
            S = S * (torch.arange(K) < 32)[:, None]
        if mistake == "log2e":
            g = g * (1.44 / LOG2E)
        low = tf32 if mistake == "tf32" else lambda x: x
        given, S0 = (q, k, v, g), S

        def walk(q, k, v, g, S, s):
            outs = []
            for a in range(0, T, C):
                q_n, k_n, v_n, g_n = (x[:, a : a + C].transpose(1, 2) for x in (q, k, v, g))
                i = torch.arange(q_n.shape[2])
                D = torch.where((i[:, None] > i)[..., None], g_n[:, :, :, None], 0).cumsum(2)
                b, rest = g_n.cumsum(2), D[:, :, -1]
                if mistake in ("ratio", "middle"):
                    r = 0 if mistake == "ratio" else b[:, :, -1:] / 2
                    P = ((q_n * (b - r).exp()) @ (k_n * (r - b).exp()).mT).tril()
                else:
                    P = (low(q_n)[:, :, :, None] * low(k_n)[:, :, None] * D.exp()).sum(-1).tril()
                outs.append(s * (low(P) @ low(v_n) + low(q_n * b.exp()) @ low(S)))
                S = b[:, :, -1, :, None].exp() * S + low(k_n * rest.exp()).mT @ low(v_n)
                if mistake == "bf16 carry":
                    S = S + (S.bfloat16().float() - S).detach()
                if mistake == "fp16 carry":
                    S = S + (S.half().float() - S).detach()
            return torch.cat(outs, 2).transpose(1, 2), S

        if mistake and mistake.startswith("scale of d"):
            n = "qkvg".index(mistake[-1])
            new = [Grad.apply(x, lambda d: d / s) if i == n else x for i, x in enumerate(given)]
            return walk(*new, S0, s)[0], walk(*given, S0, s)[1]
        if mistake and mistake.startswith("S0 of d"):
            n = "qkvg".index(mistake[-1])
            new = [x.detach() if i == n else x for i, x in enumerate(given)]
            new[2] = 0 * new[2]
            (o, S), (read, kept) = walk(*given, 0 * S0, s), walk(*new, S0, s)
            return o + read, S + kept
        return walk(*given, S0, s)

    return fn


STRONG, ONE, WIDE = "gate -20", "length 145", "wide"
NAMED = {  # the cases that tell, and how the name begins
    "ratio": (STRONG, "decays as a ratio"),
    "middle": (STRONG, "one anchor for a whole chunk"),
    "tf32": (ONE, "products in TF32"),
    "bf16 carry": (ONE, "state kept in bfloat16"),
    "fp16 carry": (ONE, "state kept in float16"),
    "log2e": (ONE, "1.44 taken for log2(e)"),
    "scale of dk": (ONE, "dk without scale"),
    "scale of dv": (ONE, "dv without scale"),
    "scale of dg": (ONE, "gate's gradient without scale"),
    "scale of dq": (ONE, "dq without scale"),
    "S0 of dq": (ONE, "dq without what the initial state adds"),
    "S0 of dg": (ONE, "gate's gradient without what the initial state adds"),
    "K tail": (WIDE, "channels of K beyond the first 32 left out"),
    "sums": ("gate -[02i]*[02f]", "gates of an earlier call of the same sizes"),
}


def test_without_a_mistake_it_is_right():
    check.kernel("gla", gla(), only="[lw]*[5e]").raise_if_failed()


@pytest.mark.parametrize("mistake", thin(NAMED, "ratio"))
def test_a_famous_mistake_is_named(mistake):
    only, name = NAMED[mistake]
    report = check.kernel("gla", gla(mistake), only=only)
    assert report.failures, str(report)
    assert any(match["mistake"].startswith(name) for match in report.diagnosis), str(report)


def test_a_tail_that_is_left_out_has_a_bound():
    report = check.kernel("gla", gla("V tail"), only=WIDE)
    assert "wrong with 1, 31 and 33 channels of values, right with 32 and 64" in " ".join(str(report).split())
