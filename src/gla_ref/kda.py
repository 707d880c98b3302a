"""Kimi Delta Attention: the delta rule with a gate for every channel of the keys (chapter 24).

    S_t = (I - beta_t k_t^T k_t) diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t,    o_t = scale * q_t S_t

Where readers of GLA go next: its gate, and the delta rule's correction. With one gate for all channels it is the gated
delta rule. In a chunk the decays no longer factor out of the products of keys. With b the running sum of the gates,

    A_ij = beta_i Σ over d of k_id k_jd e^(b_id - b_jd) for j < i,    P_ij = Σ over d of q_id k_jd e^(b_id - b_jd)
    v^ = (I + A)^-1 (beta (v - (k e^b) S)),    o = scale ((q e^b) S + P v^),    S' = e^(b_C) S + (k e^(b_C - b))^T v^

A and P are GLA's scores, in log space or in two levels; all else is the delta rule's.
"""

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from . import triangular
from ._contract import check_chunk, form
from .chunks import by_chunk, read, scores, scores_by_block, update
from .delta_rule import for_value_heads

__all__ = ["chunkwise", "chunkwise_two_level", "recurrent"]


@form("kda")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; in float64 the oracle of this mechanism (Kimi Linear, 2025, eq. 1).

    Arguments, results and errors are those of :func:`gla_ref.delta_rule.recurrent`, and:

    Args:
        g: natural log gates `[B, T, HV, K]` in [-inf, 0].
    """
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    S, o = initial_state, []
    for t in range(q.shape[1]):
        S = g[:, t, :, :, None].exp() * S
        stored = (k[:, t, :, :, None] * S).sum(-2)  # [B HV V]: what is stored under the key
        write = beta[:, t, :, None] * (v[:, t] - stored)
        S = S + k[:, t, :, :, None] * write[:, :, None, :]
        o.append((q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


def _chunks(q, k, v, g, beta, scale, S, C, scores: Callable[[Tensor, Tensor, Tensor], Tensor]):
    """The module's docstring, chunk after chunk; `scores` makes A and P."""
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    o = []
    for q_n, k_n, v_n, g_n, beta_n in by_chunk(C, q, k, v, g, beta[..., None]):
        A = (beta_n * scores(k_n, k_n, g_n)).tril(-1)  # [B HV C C]
        write = triangular.blocked(A) @ (beta_n * (v_n - read(k_n, S, g_n, None)))  # v^: [B HV C V]
        o.append(read(q_n, S, g_n, None) + scores(q_n, k_n, g_n) @ write)
        S = update(k_n, write, S, g_n, None)
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S


@form("kda")
def chunkwise(q, k, v, g, beta, *, scale, initial_state, C: int = 64):
    """Chunks of C tokens, their triangles inverted in blocks of 16. Arguments and results as in :func:`recurrent`."""
    return _chunks(q, k, v, g, beta, scale, initial_state, C, scores)


@form("kda")
def chunkwise_two_level(q, k, v, g, beta, *, scale, initial_state, C: int = 64, c: int = 16):
    """Chunks of C tokens in sub-chunks of c, a divisor of C: A and P are products but for their diagonal blocks.

    Arguments and results as in :func:`recurrent`.
    """
    check_chunk(C=C, c=c)
    return _chunks(q, k, v, g, beta, scale, initial_state, C, partial(scores_by_block, c=c))
