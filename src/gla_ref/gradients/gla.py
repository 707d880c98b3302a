"""Gradients of Gated Linear Attention in closed form, chunk by chunk (chapter 15).

Changing the log gate g_t scales every path that crosses token t: from a write j < t, or from the state S before the
chunk, to a read i >= t, or to the state after the chunk, whose gradient is dS. Inside a chunk of C tokens

    dg_t = Σ over i ≥ t of (q_i * dq_i - k_i * dk_i) over the chunk's own pairs      write to read
         + Σ over i ≥ t of q_i * dq_i from S  +  Σ over j < t of k_j * dk_j from dS      state to read, write to state
         + rowsum(exp(b_C) S * dS)                                               state to state

The paper sums q * dq - k * dk from t to the end of the sequence instead: the same on paper, but paths that lie wholly
after t enter twice with opposite signs, and in floating point they no longer cancel. Here only the chunk's own
pairs cancel, and of those the i = j terms are left out.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from .._contract import run
from ..chunks import by_chunk, decayed, gate, read, scores, update, weighted
from ..gates import decay_from_start, decay_to_end, segment_sum
from ..mechanisms import MECHANISMS, Argument

__all__ = ["Gradients", "backward"]

GLA = MECHANISMS["gla"]
BACKWARD = GLA._replace(arguments=(*GLA.arguments, Argument("do", "B T H V", "token")))


class Gradients(NamedTuple):
    """Gradients of a scalar loss, each in the shape of its tensor and in the compute precision."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dg_v: Tensor | None
    d_initial_state: Tensor


@torch.no_grad()
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    do: Tensor,
    dS: Tensor | None = None,
    *,
    g_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    C: int = 64,
) -> Gradients:
    """Gradients of every form of :mod:`gla_ref.gla`, from its inputs and the gradients of its results alone.

    Other arguments, and errors, are those of :func:`gla_ref.gla.recurrent`.

    Args:
        g: natural log gates `[B, T, H, K]` in [-inf, 0]; where g = -inf its gradient is exactly 0.
        do: gradient of o, `[B, T, H, V]`.
        dS: gradient of the final state, `[N_seq, H, K, V]`, zeros when None.
        C: chunk length; states are kept at chunk ends only.

    Returns:
        Gradients(dq, dk, dv, dg, dg_v, d_initial_state); dg_v is None without g_v.

    Source: GLA paper, section 4.3, appendices B (d log alpha) and C (d log beta).
    """
    arguments = dict(q=q, k=k, v=v, g=g, g_v=g_v, do=do, scale=scale, cu_seqlens=cu_seqlens, C=C)
    arguments |= dict(initial_state=initial_state, dS=dS)

    def one(q, k, v, g, g_v, do, initial_state, dS, scale, C):
        """Forward over the chunks for the states, then back over them with dS."""
        chunks, S = list(by_chunk(C, scale * q, k, v, g, do, g_v)), [initial_state]
        for _, k_n, v_n, g_n, _, h_n in chunks[:-1]:
            S.append(update(k_n, v_n, S[-1], g_n, h_n))
        out = []
        for n in reversed(range(len(chunks))):
            *grads, dS = _chunk_backward(*chunks[n], S[n], dS)
            out.append(grads)
        dq, dk, dv, dg, dg_v = (
            None if xs[0] is None else rearrange(torch.cat(xs, -2), "b h t d -> b t h d")
            for xs in zip(*reversed(out), strict=True)
        )
        return (scale * dq, dk, dv, dg, dg_v), (dS,)

    grads, (d_initial_state,) = run(BACKWARD, one, arguments, ("initial_state", "dS"))
    return Gradients(*grads, d_initial_state)


def _chunk_backward(q, k, v, g, do, g_v, S, dS_end):
    """Gradients of one chunk, `[B, H, C, ...]`; q carries the scale. Returns dq, dk, dv, dg, dg_v and dS before it."""
    E = segment_sum(g).exp()  # [B H C C K], 0 above the diagonal
    dP = (do @ v.mT).tril() if g_v is None else scores(do, v, g_v)
    P = (q[..., :, None, :] * k[..., None, :, :] * E).sum(-1)  # [B H C C]
    P_own, dP_own = (x.diagonal(dim1=-2, dim2=-1)[..., None] for x in (P, dP))  # the i = j terms

    # what reaches q through the state before the chunk, and k through the state after it
    dq_S = decayed(decayed(do, g_v, decay_from_start) @ S.mT, g, decay_from_start)
    dk_S = decayed(decayed(v, g_v, decay_to_end) @ dS_end.mT, g, decay_to_end)
    dq = (dP.tril(-1)[..., None] * k[..., None, :, :] * E).sum(-2)
    dk = (dP.tril(-1)[..., None] * q[..., :, None, :] * E).sum(-3)
    G = gate(g.sum(-2), None if g_v is None else g_v.sum(-2))
    kept = G * S * dS_end  # [B H K V]: state to state
    dg = gate_gradient(q * dq - k * dk, q * dq_S, k * dk_S, kept.sum(-1), g)

    dv_S = decayed(decayed(k, g, decay_to_end) @ dS_end, g_v, decay_to_end)
    dv = _transposed(P.tril(-1), do, g_v)
    dg_v = None
    if g_v is not None:
        o, o_read = weighted(P.tril(-1), v, g_v), read(q, S, g, g_v)
        dg_v = gate_gradient(o * do - v * dv, o_read * do, v * dv_S, kept.sum(-2), g_v)

    dS = G * dS_end + decayed(q, g, decay_from_start).mT @ decayed(do, g_v, decay_from_start)
    return dq + dq_S + dP_own * k, dk + dk_S + dP_own * q, dv + dv_S + P_own * do, dg, dg_v, dS


def _transposed(P: Tensor, do: Tensor, g_v: Tensor | None) -> Tensor:
    """dv_j = sum_i P_ij do_i, each column decayed on its way from i back to j."""
    if g_v is None:
        return P.mT @ do
    return (P[..., None] * do[..., :, None, :] * segment_sum(g_v).exp()).sum(-3)


def gate_gradient(pairs: Tensor, reads: Tensor, writes: Tensor, kept: Tensor, g: Tensor) -> Tensor:
    """The four sums of the module's docstring for every t; 0 where g = -inf, which no path crosses."""
    from_t = (pairs + reads).flip(-2).cumsum(-2).flip(-2)
    before_t = F.pad(writes[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)
    return torch.where(g == -torch.inf, 0, from_t + before_t + kept[..., None, :])
