"""What is right: each mechanism in float64, and the same in a low-precision run that says how wrong a kernel may be.

`ORACLES[mechanism](mm, q, k, v, g, scale)` is differentiable and makes every product through `mm` (Products): a
float64 `@` for the oracle; for the emulated run one whose operands, and those of its gradients, are rounded to the
kernel's dtype first and summed in float32. tests/test_bench.py holds them against the `recurrent` forms.
Tensors here are those of one head of one sequence: [T, D], g [T] or [T, K].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gla_ref.gates import decay_from_start, decay_to_end, segment_sum


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with operands rounded to `dtype` and a float32 sum.

    For float32 the sum runs term after term, as a chain of fused multiply-adds does in a kernel; a
    library's product, which sums in parts, is several times more exact than that.
    """
    if dtype != torch.float32:
        return a.to(dtype).to(a.dtype) @ b.to(dtype).to(b.dtype)
    out = a[:, :1] * b[:1]
    for i in range(1, a.shape[1]):
        out.addr_(a[:, i], b[i])
    return out


class Products:
    """How a run multiplies: called, differentiably; and `product`, for those who write their own backward."""

    def __init__(self, low: torch.dtype | None):
        self.dtype = torch.float64 if low is None else low

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if self.dtype == torch.float64 else product(a, b, self.dtype)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if self.dtype == torch.float64 else Rounded.apply(a, b, self.dtype)


class Rounded(torch.autograd.Function):
    """`product`, forward and backward."""

    @staticmethod
    def forward(ctx, a, b, dtype):
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return product(a, b, dtype)

    @staticmethod
    def backward(ctx, d):
        a, b = ctx.saved_tensors
        return product(d, b.mT, ctx.dtype), product(a.mT, d, ctx.dtype), None


class Attend(torch.autograd.Function):
    """One tile of queries q against keys and values, and its closed-form backward, as kernels do them.

    p = exp2(c q k^T - lse), o = p v, delta = o . do, ds = p (do v^T - delta): o as it was stored.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, keep, product, dtype):
        x = product(q, k.mT) * (scale / math.log(2))
        x = x.masked_fill(~keep, -torch.inf)
        m = x.amax(-1, keepdim=True)
        p = (x - m).exp2()
        total = p.sum(-1, keepdim=True)  # p is rounded as an operand, its sum is not
        o = product(p, v) / total
        ctx.save_for_backward(q, k, v, x - (m + total.log2()), o.to(dtype).to(o.dtype))
        ctx.scale, ctx.product = scale, product
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, x, o = ctx.saved_tensors
        product, p = ctx.product, x.exp2()
        ds = p * (product(do, v.mT) - (o * do).sum(-1, keepdim=True))
        dq, dk = ctx.scale * product(ds, k), ctx.scale * product(ds.mT, q)
        return dq, dk, product(p.mT, do), None, None, None, None


def softmax_attention(mm, q, k, v, g, scale, block=1024):
    """Tiles of queries, each against all keys up to its end; yields (rows, o) to bound the memory."""
    T = len(k)
    for a in range(0, T, block):
        rows = slice(a, min(a + block, T))
        j = torch.arange(rows.stop, device=q.device)
        keys, values = k[: rows.stop], v[: rows.stop]
        yield (
            rows,
            Attend.apply(q[rows], keys, values, scale, j <= j[rows, None], mm.product, mm.dtype),
        )


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


def gla(mm, q, k, v, g, scale, C=64, c=16):
    """Two-level chunks, all at once but for their states: every exponent is a sum of gates between two tokens."""
    T, N = len(k), -(-len(k) // C)
    q, k, v, g = (
        torch.nn.functional.pad(x, (0, 0, 0, N * C - T)).view(N, C, -1) for x in (q, k, v, g)
    )
    kv, total = mm((k * decay_to_end(g).exp()).mT, v), g.sum(1).exp()  # [N K V], [N K]
    states = [torch.zeros_like(kv[0])]
    for n in range(N - 1):
        states.append(states[-1] * total[n, :, None] + kv[n])
    o = mm(scale * q * decay_from_start(g).exp(), torch.stack(states))
    for i in range(0, C, c):
        q_i, k_i, v_i, g_i = (x[:, i : i + c] for x in (q, k, v, g))
        P = (q_i[:, :, None] * k_i[:, None] * segment_sum(g_i).exp()).sum(-1)
        intra = mm(scale * P, v_i)
        if i:
            k_j = k[:, :i] * decay_to_end(g[:, :i]).exp()
            P = mm(q_i * decay_from_start(g_i).exp(), k_j.mT)
            intra = intra + mm(scale * P, v[:, :i])
        o = o + torch.nn.functional.pad(intra, (0, 0, i, C - i - c))
    yield slice(0, T), o.reshape(N * C, -1)[:T]


ORACLES = {
    "softmax_attention": softmax_attention,
    "linear_attention": simple_gla,
    "simple_gla": simple_gla,
    "gla": gla,
}


def run(
    mechanism: str, x: dict[str, Tensor], low: torch.dtype | None, scale: float | None = None
) -> dict[str, Tensor]:
    """o and the gradients dq, dk, dv (dg) of one head of one sequence: exact, or emulated in `low`."""
    scale = x["q"].shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if low is None else torch.float32
    leaves = {n: x[n].detach().to(wide).requires_grad_() for n in ("q", "k", "v", "g") if n in x}
    do = x["do"].to(wide)

    with torch.enable_grad():
        out = torch.empty_like(do)
        grads = {n: torch.zeros_like(leaf) for n, leaf in leaves.items()}
        args = (leaves["q"], leaves["k"], leaves["v"], leaves.get("g"))
        for rows, o in ORACLES[mechanism](Products(low), *args, scale):
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


def runs(
    mechanism: str, x: dict[str, Tensor], low: torch.dtype, scale=None, times: int = 2
) -> list:
    """[(exact run, emulated run), ...]: the first of x itself, the others of inputs shaken by one percent.

    The worst element of one run is one rounding's luck; the worst of a few says how bad luck gets.
    """
    rng, found = torch.Generator(x["q"].device).manual_seed(0), []
    for i in range(times):
        y = {
            n: z
            * (1 + (i > 0) * 0.01 * torch.rand(z.shape, generator=rng, device=z.device)).to(z.dtype)
            for n, z in x.items()
        }
        found.append((run(mechanism, y, None, scale), run(mechanism, y, low, scale)))
    return found


def octaves(T: int):
    """[0, 64), [64, 128), [128, 256) ...: an error among late tokens, whose o is small, shows in its own octave."""
    a, b = 0, 64
    while a < T:
        yield slice(a, min(b, T))
        a, b = b, 2 * b


def error(x: Tensor, exact: Tensor) -> float:
    """max |x - x*| / rms(x*), the measure of the oracle rule; absolute where x* is (nearly) 0.

    As dq and dk of a sequence's only token are: inputs are standard normal, so the terms that cancel are about 1.
    """
    if not torch.isfinite(x).all():
        return float("inf")
    rms = exact.double().square().mean().sqrt().item()
    worst = (x.double() - exact.double()).abs().max().item()
    return worst / (rms if rms > 1e-3 else 1.0)


def judge(got: dict[str, Tensor], runs: list) -> dict[str, tuple[float, float]]:
    """{quantity: (error, budget)} of its worst octave; the budget is 2 x the emulated runs' error + 4 eps."""
    verdict = {}
    for name, x in got.items():
        eps = torch.finfo(x.dtype).eps
        pairs = [
            (
                error(x[s], runs[0][0][name][s]),
                2 * max(error(low[name][s], exact[name][s]) for exact, low in runs) + 4 * eps,
            )
            for s in octaves(len(x))
        ]
        verdict[name] = max(pairs, key=lambda p: p[0] / p[1])
    return verdict
