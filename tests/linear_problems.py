"""Calls of the linear mechanisms' kernels: their inputs, and the budgets of emulated runs."""

import functools

import torch
from cases import F64, LINEAR, inputs
from harness import F32, allowed, budgets, compare, results

from gla_ref import FORMS

# on Hopper "triton" may be another one: test_kernels_hopper.py
KERNELS = {mechanism: FORMS[mechanism]["triton"] for mechanism in LINEAR}
MILD = "logsigmoid/16"
SMALLEST = 2.0**-24  # float16's least number above 0


@functools.cache
def problem(
    mechanism, *sizes, kind=MILD, two_sided=False, dtype=F32, gates=None, products=None, ends=None, seed=0, scale=None,
    large=1.0,
):  # fmt: skip
    """(inputs as the kernel is given them, {quantity: (exact, budget)}); `products` as in `budgets`.

    An emulated run stores o once, GLA's kernel twice in strong chunks (`mend` adds to what `walk` stored): that has to
    fit in, too.
    """
    B, _, H, K, V = sizes
    args, more = inputs(mechanism, *sizes, kind=kind, g_v=two_sided, seed=seed)
    rng, N = torch.Generator().manual_seed(seed), B if ends is None else len(ends) - 1
    S, dS = (torch.randn(N, H, K, V, generator=rng, dtype=F64) for _ in "SS")
    do = torch.randn(args[2].shape, generator=rng, dtype=F64)
    every = (*args, more.get("g_v"), large * S, do, dS)
    x = dict(zip(("q", "k", "v", "g", "g_v", "S", "do", "dS"), every, strict=True))
    given = {n: F32 if n in ("S", "dS") else dtype for n in x}
    given["g"] = given["g_v"] = gates or dtype
    x, judged = budgets(mechanism, x, given, products=products, scale=scale, ends=ends)
    if (mechanism, dtype) == ("simple_gla", torch.float16):
        dS0, band = judged["dS0"]
        if dS0.abs().max() < SMALLEST:  # the walk does not scale do before it rounds e^b do, which is 0 here
            judged["dS0"] = dS0, max(band, allowed(torch.zeros_like(dS0).float(), dS0))
    return x, judged


def check(mechanism, *sizes, path=None, ends=None, scale=None, **kw):
    """Forward and all gradients within their budgets; without gates linear attention as well as simple GLA."""
    ends = ends and tuple(ends)
    x, judged = problem(mechanism, *sizes, ends=ends, scale=scale, **kw)
    compare(results(KERNELS[mechanism], x, ends, path=path, scale=scale), judged)
    if mechanism == "simple_gla" and kw.get("kind") == "zero":
        compare(results(KERNELS["linear_attention"], x | {"g": None}, ends, path=path, scale=scale), judged)
