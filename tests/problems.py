"""Calls of the kernels: their inputs, and the budgets of emulated runs."""

import functools
import itertools

import torch
from cases import CORRELATIONS, F64, STRENGTHS, alike, inputs
from harness import F16, F32, allowed, budgets

MILD = "logsigmoid/16"
RULES = ("delta_rule", "gated_delta_rule")
EVERY = (*RULES, "kda")  # of the delta family
KEYS = list(itertools.product(CORRELATIONS, STRENGTHS))
SMALLEST = 2.0**-24  # float16's least number above 0


def problem(mechanism, *sizes, ends=None, **options):
    """(inputs as the kernel is given them, {quantity: (exact, budget)}), from `make` below: the inputs are copies."""
    x, judged = make(mechanism, *sizes, ends=ends and tuple(ends), **options)
    return {n: None if y is None else y.clone() for n, y in x.items()}, judged


@functools.lru_cache(8)
def make(
    mechanism, B, T, H, K, V, *, groups=2, kind=MILD, two_sided=False, correlation=0.0, strength=None, dtype=F32,
    gates=None, products=None, ends=None, scale=None, S=1.0, length=1.0, path=None, seed=0,
):  # fmt: skip
    """Of the delta rules `groups` value heads, 1, 2 or 4, read one key head, whose keys are `length` long.

    S multiplies the initial state, and `products` are as in `budgets`. On the delta rules' segmented path three
    segments each have a map of the state. An emulated run stores o once, GLA's kernel twice in strong chunks (`mend`
    adds to what `walk` stored): that has to fit in, too.
    """
    rng, more = torch.Generator().manual_seed(seed), {}
    if delta := mechanism in EVERY:
        kind_of = "kda" if mechanism == "kda" else "gated_delta_rule"
        (q, k, v, g, beta), _ = inputs(kind_of, B, T, H * max(1, groups // 2), K, V, kind=kind, seed=seed)
        q, k = (x[:, :, :H] for x in (q, k))
        v, g, beta = (x[:, :, : H * groups] for x in (v, g, beta))
        k = length * alike(k, correlation)
        g = None if mechanism == "delta_rule" else g
        more = {"beta": beta if strength is None else torch.full_like(beta, strength)}
    else:
        (q, k, v, g), named = inputs(mechanism, B, T, H, K, V, kind=kind, g_v=two_sided, seed=seed)
        more = {"g_v": named.get("g_v")}
    N = B if ends is None else len(ends) - 1
    S, dS = (x * torch.randn(N, v.shape[2], K, V, generator=rng, dtype=F64) for x in (S, 1.0))
    do = torch.randn(v.shape, generator=rng, dtype=F64)
    x = {"q": q, "k": k, "v": v, "g": g, **more, "S": S, "do": do, "dS": dS}
    given = {n: F32 if n in ("S", "dS") else dtype for n in x}
    given |= dict.fromkeys(("g", *more), gates or dtype)
    segments = {"segments": 3} if delta and path == "segmented" else None
    x, judged = budgets(mechanism, x, given, products=products, options=segments, scale=scale, ends=ends)
    if (mechanism, dtype) == ("simple_gla", F16):
        dS0, band = judged["dS0"]
        if dS0.abs().max() < SMALLEST:  # the walk does not scale do before it rounds e^b do, which is 0 here
            judged["dS0"] = dS0, max(band, allowed(torch.zeros_like(dS0).float(), dS0))
    return x, judged
