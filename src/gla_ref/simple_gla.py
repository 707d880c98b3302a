"""Linear attention with one scalar gate a head, as in RetNet, lightning attention and Mamba-2 (chapters 9 and 10).

S_t = exp(g_t) S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t,    g_t <= 0 a number for each head
"""

import torch
from einops import rearrange
from torch import Tensor

from ._contract import form
from .chunks import by_chunk, heads_first
from .gates import decay_to_end, segment_sum

__all__ = ["chunkwise", "parallel", "recurrent"]


@form("simple_gla")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; in float64 the oracle of this mechanism (Mamba-2 paper, section 2; RetNet paper, eq. 6).

    Arguments, results and errors are those of :func:`gla_ref.gla.recurrent`, without g_v, but:

    Args:
        g: natural log gates `[B, T, H]` in [-inf, 0].
    """
    S, o = initial_state, []
    for t in range(q.shape[1]):
        write = k[:, t, :, :, None] * v[:, t, :, None, :]  # [B H K V]
        S = g[:, t, :, None, None].exp() * S + write
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


@form("simple_gla")
def parallel(q, k, v, g, *, scale, initial_state):
    """All pairs at once through the ratio b_i / b_j of cumulative products; kept as the form that breaks.

    Right while the total decay of the sequence stays well inside the exponent range; beyond it
    1 / b_j overflows, and inf * 0 is NaN. Arguments and results as in :func:`recurrent`.
    """
    q, k, v = map(heads_first, (scale * q, k, v))
    b = rearrange(g, "b t h -> b h t 1").cumsum(-2).exp()
    P = ((q * b) @ (k / b).mT).tril()
    o = P @ v + (q * b) @ initial_state
    S = b[..., -1:, :] * (initial_state + (k / b).mT @ v)
    return rearrange(o, "b h t d -> b t h d"), S


@form("simple_gla")
def chunkwise(q, k, v, g, *, scale, initial_state, C: int = 64):
    """Chunks of C tokens; one decay matrix `[C, C]` a chunk multiplies the scores (Mamba-2 paper, section 6).

    A scalar gate factors out of q k^T, so the scores stay one matrix product and every exponent
    is <= 0: right for every gate in [-inf, 0]. Arguments and results as in :func:`recurrent`.
    """
    S, o = initial_state, []
    for q_n, k_n, v_n, g_n in by_chunk(C, scale * q, k, v, g[..., None]):
        b = g_n.cumsum(-2)  # [B H C 1]: decay since the chunk's start
        P = (q_n @ k_n.mT) * segment_sum(g_n)[..., 0].exp()  # [B H C C]
        o.append((q_n * b.exp()) @ S + P @ v_n)
        S = b[..., -1:, :].exp() * S + (k_n * decay_to_end(g_n).exp()).mT @ v_n
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S
