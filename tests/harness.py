"""What the tests of kernels share: where they run, the budgets of emulated runs, and how results are held to them.

The budget is one rule: 2 x the error of emulated runs + 4 eps (the oracle rule). An emulated run follows the kernels
step by step with operands rounded to their dtype. The worst of sixteen counts, which sum up every product in orders of
their own (fewer, the larger the inputs): the worst element of a single run is one rounding's luck.
"""

import pytest
import torch
from cases import F64, error

from gla_ref.rounding import Luck, budget

CUDA = torch.cuda.is_available()
HERE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RUNS, ROOM = 16, 2**26 if CUDA else 2**21  # emulated runs side by side; numbers of all their values' states
NAMES = ("o", "S", "dq", "dk", "dv", "dg", "dS0", "dg_v", "dbeta")
LEAVES = ("q", "k", "v", "g", "beta", "S", "g_v")
interpreted = pytest.mark.skipif(CUDA, reason="kernels are compiled here")
anywhere = pytest.mark.usefixtures("here")  # interpreted by `make test`, compiled by `make test-gpu`


def allowed(x, exact):
    """The budget that one emulated result gives."""
    return budget(error(x, exact), x.dtype)


def sequences(f, x, ends):
    """f of every packed sequence, put together; an empty one only hands its states on."""
    if ends is None:
        return dict(zip(NAMES, f(*x.values()), strict=False))
    parts = []
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        one = {m: y if y is None else y[n : n + 1] if m in ("S", "dS") else y[:, a:b] for m, y in x.items()}
        # o, S, dq, dk, dv, dg, dS0, dg_v, dbeta of no tokens
        none = [one.get(m) for m in ("v", "S", "q", "k", "v", "g", "dS", "g_v", "beta")]
        parts.append(none if a == b else f(*one.values()))
    return {
        m: None if y[0] is None else torch.cat(y, 0 if m in ("S", "dS0") else 1)
        for m, y in zip(NAMES, zip(*parts, strict=False), strict=False)
    }


def budgets(x, given, exact, emulated, ends=None):
    """(inputs as the kernel is given them, {quantity: (exact, budget)}).

    Inputs x of float64 get the dtypes `given`; exact and emulated take them and return the quantities of NAMES. The
    runs lie side by side as heads, each with its own luck; what the kernel is given is exact, and no error of its own.
    """
    result = {n: given[n[1:]] for n in NAMES if n[1:] in given}
    result |= {"o": given["v"], "S": torch.float32, "dS0": torch.float32}
    x = {n: None if y is None else y.to(given[n]).to(HERE, F64) for n, y in x.items()}
    runs = min(RUNS, max(3, ROOM // (x["v"].numel() * x["q"].shape[-1])))

    def heads(name):
        return 1 if name in ("S", "dS", "dS0") else 2

    many = {n: None if y is None else torch.cat([y.float()] * runs, heads(n)) for n, y in x.items()}
    right, low = sequences(exact, x, ends), sequences(lambda *a: emulated(*a, luck=Luck(runs)), many, ends)
    judged = {}
    for n in low:
        if low[n] is not None:
            copies = low[n].to(result[n]).chunk(runs, heads(n))
            judged[n] = right[n], max(allowed(y, right[n]) for y in copies)
    return {n: None if z is None else z.to(given[n]) for n, z in x.items()}, judged


def compare(found, judged):
    errors = {n: (error(x.detach(), judged[n][0]), judged[n][1]) for n, x in found.items()}
    wrong = {n: f"{e:.3g} > {budget:.3g}" for n, (e, budget) in errors.items() if not e <= budget}
    assert not wrong, wrong
    assert all(budget < float("inf") for _, budget in judged.values())


def results(form, x, ends=None, **options):
    """o, the final state and every gradient, by the kernels."""
    leaves = {n: x[n].detach().requires_grad_() for n in LEAVES if x.get(n) is not None}
    tokens = [y for n, y in leaves.items() if n not in ("S", "g_v")]
    cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
    options |= {"g_v": leaves["g_v"]} if "g_v" in leaves else {}
    o, S = form(*tokens, initial_state=leaves["S"], cu_seqlens=cu, **options)
    grads = torch.autograd.grad((o, S), list(leaves.values()), (x["do"], x["dS"]))
    names = ("dS0" if n == "S" else f"d{n}" for n in leaves)
    return {"o": o, "S": S, **dict(zip(names, grads, strict=True))}
