"""Gradients of the delta rule and the gated delta rule in closed form, chunk by chunk (chapter 20).

In a chunk, with the scale in q,

    v^ = Y R,   Y = (I + A)^-1,   R = beta (v - e^b K S)
    o = (Q e^b) S + P v^          S' = e^{b_C} S + (K e^{b_C - b})^T v^

From the gradients do and dS' of what the chunk returns,

    dv^ = P^T do + (K e^{b_C - b}) dS'      dR = Y^T dv^      dA = -tril(dR v^^T, -1)      dP = tril(do v^^T)

and everything else is a product with these. The inverse is not differentiated itself: dY = -Y dA Y, and Y^T dv^ is
one more product with the same triangle. A gate g_t scales every path that crosses token t: pairs of A and P with
j < t <= i, reads of the state from t on, writes before t that reach the state at the end, and the state itself. The
pairs are sums of rows less sums of columns; their i = j terms, which do not depend on g, are left out.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from .. import triangular
from .._contract import run
from ..chunks import by_chunk
from ..delta_rule import for_value_heads
from ..gates import decay_from_start, decay_to_end, segment_sum
from ..mechanisms import MECHANISMS, Argument
from .gla import gate_gradient

__all__ = ["Gradients", "backward"]

KIND = MECHANISMS["gated_delta_rule"]
OPTIONAL = tuple(a._replace(optional=True) if a.name == "g" else a for a in KIND.arguments)
BACKWARD = KIND._replace(arguments=(*OPTIONAL, Argument("do", "B T HV V", "token")))


class Gradients(NamedTuple):
    """Gradients of a scalar loss, each in the shape of its tensor and in the compute precision."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor
    d_initial_state: Tensor


@torch.no_grad()
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dS: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    C: int = 64,
) -> Gradients:
    """Gradients of every form of :mod:`gla_ref.gated_delta_rule` and, without g, of :mod:`gla_ref.delta_rule`.

    Other arguments, and errors, are those of :func:`gla_ref.delta_rule.recurrent`.

    Args:
        g: natural log gates `[B, T, HV]` in [-inf, 0], or None; where g = -inf its gradient is exactly 0.
        do: gradient of o, `[B, T, HV, V]`.
        dS: gradient of the final state, `[N_seq, HV, K, V]`, zeros when None.
        C: chunk length; states are kept at chunk ends only.

    Returns:
        Gradients(dq, dk, dv, dg, dbeta, d_initial_state); dg is None without g.

    Source: derived here; Yang et al. 2024b (DeltaNet), section 3, has the forward pass.
    """
    arguments = dict(q=q, k=k, v=v, g=g, beta=beta, do=do, scale=scale, cu_seqlens=cu_seqlens, C=C)
    arguments |= dict(initial_state=initial_state, dS=dS)

    def one(q, k, v, g, beta, do, initial_state, dS, scale, C):
        """Forward over the chunks for their states and writes, then back over them with dS."""
        HV, gates = v.shape[2], torch.zeros_like(beta) if g is None else g
        per_value_head = scale * for_value_heads(q, HV), for_value_heads(k, HV), v, gates[..., None], beta[..., None]
        S, kept, out = initial_state, [], []
        for *x, do_n in by_chunk(C, *per_value_head, do):
            chunk = Chunk(*x, S)
            kept.append((chunk, do_n))
            S = chunk.end
        for chunk, do_n in reversed(kept):
            *grads, dS = chunk.backward(do_n, dS)
            out.append(grads)
        parts = (rearrange(torch.cat(xs, -2), "b h t d -> b t h d") for xs in zip(*reversed(out), strict=True))
        dq, dk, dv, dg, dbeta = parts
        dq, dk = (rearrange(x, "b t (h n) k -> b t h n k", h=q.shape[2]).sum(3) for x in (scale * dq, dk))
        return (dq, dk, dv, None if g is None else dg[..., 0], dbeta[..., 0]), (dS,)

    grads, (d_initial_state,) = run(BACKWARD, one, arguments, ("initial_state", "dS"))
    return Gradients(*grads, d_initial_state)


class Chunk:
    """The tensors of one chunk's forward pass, `[B, HV, C, ...]`, that the backward pass needs."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> None:
        self.q, self.k, self.v, self.g, self.beta, self.S = q, k, v, g, beta, S
        self.since, self.to_end = decay_from_start(g).exp(), decay_to_end(g).exp()  # [B HV C 1]
        self.D = segment_sum(g)[..., 0].exp()  # [B HV C C], 0 above the diagonal
        self.A = (beta * (k @ k.mT) * self.D).tril(-1)
        self.P = q @ k.mT * self.D
        self.Y = triangular.blocked(self.A)
        self.missing = v - self.since * k @ S  # what the token has that the state has not
        self.write = self.Y @ (beta * self.missing)  # v^
        self.end = self.since[..., -1:, :] * S + (self.to_end * k).mT @ self.write

    def backward(self, do: Tensor, dS_end: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv, dg, dbeta `[B, HV, C, ...]` and dS before the chunk."""
        q, k, S, since, to_end, D, write = self.q, self.k, self.S, self.since, self.to_end, self.D, self.write
        d_write = self.P.mT @ do + to_end * k @ dS_end
        dR = self.Y.mT @ d_write
        dA = -(dR @ write.mT).tril(-1)
        dP = (do @ write.mT).tril()
        d_missing = self.beta * dR

        from_scores, from_keys = dP * D, dA * D  # by the products q k^T and beta k k^T
        dq_S, dk_S = since * (do @ S.mT), -since * (d_missing @ S.mT)  # what they read from the state
        dk_end = to_end * (write @ dS_end.mT)  # what the state at the end has of them
        dq = from_scores @ k + dq_S
        dk = from_scores.mT @ q + self.beta * (from_keys @ k) + from_keys.mT @ (self.beta * k) + dk_S + dk_end
        dbeta = (dR * self.missing).sum(-1, keepdim=True) + (from_keys * (k @ k.mT)).sum(-1, keepdim=True)

        pairs = (dP * self.P).tril(-1) + dA * self.A
        rows = pairs.sum(-1, keepdim=True) - pairs.sum(-2)[..., None]
        reads = (q * dq_S + k * dk_S).sum(-1, keepdim=True)
        writes, decay = (k * dk_end).sum(-1, keepdim=True), since[..., -1:, :]
        dg = gate_gradient(rows, reads, writes, (decay * S * dS_end).sum((-2, -1))[..., None], self.g)

        dS = decay * dS_end + (since * q).mT @ do - (since * k).mT @ d_missing
        return dq, dk, d_missing, dg, dbeta, dS
