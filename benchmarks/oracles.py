"""What is right: each mechanism in float64, and the same in a low-precision run that says how wrong a kernel may be.

`ORACLES[mechanism](mm, q, k, v, g, scale)` is differentiable and makes every product through `mm`: a float64 `@`
for the oracle; for the emulated run a product whose operands, and those of its gradients, are rounded to the
kernel's dtype first and summed in float32. tests/test_bench.py holds them against the `recurrent` forms.
Tensors here are those of one head of one sequence: [T, D], g [T] or [T, K].
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rounded(torch.autograd.Function):
    """a @ b with operands of `dtype` and a sum of at least float32, forward and backward."""

    @staticmethod
    def forward(ctx, a, b, dtype):
        a, b = (x.to(dtype).to(x.dtype) for x in (a, b))
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx, d):
        a, b = ctx.saved_tensors
        d = d.to(ctx.dtype).to(d.dtype)
        return d @ b.mT, a.mT @ d, None


def softmax_attention(mm, q, k, v, g, scale, block=1024):
    """Tiles of queries, each against all keys up to its end; yields (rows, o) to bound the memory."""
    T = len(k)
    for a in range(0, T, block):
        rows = slice(a, min(a + block, T))
        j = torch.arange(rows.stop, device=q.device)
        x = scale * mm(q[rows], k[: rows.stop].mT)
        x = x.masked_fill(j > j[rows, None], -torch.inf)
        # the sum is not rounded, the weights are: p is a product's operand, its sum is not
        p = (x - x.amax(-1, keepdim=True).detach()).exp()
        yield rows, mm(p, v[: rows.stop]) / p.sum(-1, keepdim=True)


def simple_gla(mm, q, k, v, g, scale, C=64):
    """Chunkwise: o = (q e^b) S + tril(q k^T e^(b_i - b_j)) v, one scalar gate a token (g None: no gate)."""
    T = len(k)
    S = torch.zeros(q.shape[-1], v.shape[-1], dtype=q.dtype, device=q.device)
    o = []
    for a in range(0, T, C):
        qc, kc, vc = (x[a : a + C] for x in (q, k, v))
        n = len(qc)
        b = q.new_zeros(n) if g is None else g[a : a + C].cumsum(0)
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        decay = torch.where(keep, b[:, None] - b[None, :], -torch.inf).exp()
        o.append(mm(scale * qc * b[:, None].exp(), S) + mm(scale * mm(qc, kc.mT) * decay, vc))
        S = S * b[-1].exp() + mm((kc * (b[-1] - b).exp()[:, None]).mT, vc)
    yield slice(0, T), torch.cat(o)


ORACLES = {
    "softmax_attention": softmax_attention,
    "linear_attention": simple_gla,
    "simple_gla": simple_gla,
}


def run(mechanism: str, x: dict[str, Tensor], low: torch.dtype | None) -> dict[str, Tensor]:
    """o and the gradients dq, dk, dv (dg) of one head of one sequence: exact, or emulated in `low`."""
    wide = torch.float64 if low is None else torch.float32
    leaves = {n: x[n].detach().to(wide).requires_grad_() for n in ("q", "k", "v", "g") if n in x}
    do = x["do"].to(wide)

    def mm(a, b):
        return a @ b if low is None else Rounded.apply(a, b, low)

    with torch.enable_grad():
        out = torch.empty_like(do)
        grads = {n: torch.zeros_like(leaf) for n, leaf in leaves.items()}
        args = (leaves["q"], leaves["k"], leaves["v"], leaves.get("g"))
        for rows, o in ORACLES[mechanism](mm, *args, x["q"].shape[-1] ** -0.5):
            out[rows] = o.detach()
            parts = torch.autograd.grad(o, list(leaves.values()), do[rows], allow_unused=True)
            for n, d in zip(leaves, parts, strict=True):
                if d is not None:
                    grads[n] += d
    result = {"o": out, **{f"d{n}": d for n, d in grads.items()}}
    if low is not None:
        result = {
            n: y.to(x[n[1:]].dtype if n[0] == "d" else x["v"].dtype) for n, y in result.items()
        }
    return result


def octaves(T: int):
    """[0, 64), [64, 128), [128, 256) ...: an error among late tokens, whose o is small, shows in its own octave."""
    a, b = 0, 64
    while a < T:
        yield slice(a, min(b, T))
        a, b = b, 2 * b


def error(x: Tensor, exact: Tensor) -> float:
    """max |x - x*| / rms(x*): the measure of the oracle rule."""
    if not torch.isfinite(x).all():
        return float("inf")
    rms = exact.double().square().mean().sqrt().item()
    worst = (x.double() - exact.double()).abs().max().item()
    return worst / rms if rms else (0.0 if worst == 0 else float("inf"))


def judge(got: dict[str, Tensor], exact: dict, emulated: dict) -> dict[str, tuple[float, float]]:
    """{quantity: (error, budget)} of its worst octave; the budget is 2 x the emulated run's error + 4 eps."""
    verdict = {}
    for name, x in got.items():
        eps = torch.finfo(x.dtype).eps
        pairs = [
            (error(x[s], exact[name][s]), 2 * error(emulated[name][s], exact[name][s]) + 4 * eps)
            for s in octaves(len(x))
        ]
        verdict[name] = max(pairs, key=lambda p: p[0] / p[1])
    return verdict
