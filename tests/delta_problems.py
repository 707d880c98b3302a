"""Calls of the delta rules' kernels: their inputs, and the budgets of emulated runs."""

import itertools

import torch
from cases import CORRELATIONS, F64, STRENGTHS, alike, inputs
from harness import F32, budgets

MILD = "logsigmoid/16"
RULES = ("delta_rule", "gated_delta_rule")
GATED, EVERY = ("gated_delta_rule", "kda"), (*RULES, "kda")
KEYS = list(itertools.product(CORRELATIONS, STRENGTHS))
# of Hopper's kernels
LENGTHS = (1, 63, 64, 65, 130)
PACK = (0, 0, 64, 64, 97, 225, 230, 230)  # empty sequences, whole chunks, parts of one
CUT = (0, 0, 64, 230, 240)  # no tokens; a whole segment, segments and a part of one, a part


def problem(
    mechanism, B, T, H, K, V, *, groups=2, kind=MILD, correlation=0.0, strength=None, dtype=F32, gates=None,
    ends=None, scale=None, S=1.0, length=1.0, products=None, path=None, seed=0,
):  # fmt: skip
    """(inputs as given, {quantity: (exact, budget)}); `groups` value heads, 1, 2 or 4, read one key head.

    S multiplies the initial state, `length` is that of keys; `products` have operands of the tokens' dtype unless
    given; on the segmented path three segments each have a map of the state.
    """
    kind_of = "kda" if mechanism == "kda" else "gated_delta_rule"
    (q, k, v, g, beta), _ = inputs(kind_of, B, T, H * max(1, groups // 2), K, V, kind=kind, seed=seed)
    q, k = (x[:, :, :H] for x in (q, k))
    v, g, beta = (x[:, :, : H * groups] for x in (v, g, beta))
    k = length * alike(k, correlation)
    beta = beta if strength is None else torch.full_like(beta, strength)
    rng, N = torch.Generator().manual_seed(seed), B if ends is None else len(ends) - 1
    S, dS = (x * torch.randn(N, H * groups, K, V, generator=rng, dtype=F64) for x in (S, 1.0))
    do = torch.randn(v.shape, generator=rng, dtype=F64)
    g = None if mechanism == "delta_rule" else g
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "S": S, "do": do, "dS": dS}
    given = {n: F32 if n in ("S", "dS") else dtype for n in x}
    given["g"] = given["beta"] = gates or dtype
    options = {"segments": 3} if path == "segmented" else None
    return budgets(mechanism, x, given, products=products, options=options, scale=scale, ends=ends)
