"""The gated delta rule: forget with a scalar gate, then correct what the key finds (chapter 20).

    S_t = exp(g_t) (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t,    o_t = scale * q_t S_t

As in Gated DeltaNet: decay, then erase, then write; g_t <= 0 and beta_t are a number for each value head. Inside a
chunk, with b_i the running sum of g and D_ij = exp(g_{j+1} + ... + g_i) the decay from token j to token i,

    A = tril(beta_i (k_i k_j^T) D_ij, -1)          v^ = (I + A)^-1 (beta (v - e^b K S))
    o = scale ((Q e^b) S + (Q K^T * D) v^)         S' = e^{b_C} S + (K e^{b_C - b})^T v^

D is summed gate by gate, never a difference of running sums: after a reset that would be NaN, and a reset later in the
sequence must not change what came before it.
"""

import torch
from einops import rearrange
from torch import Tensor

from . import triangular
from ._contract import form
from .chunks import by_chunk
from .delta_rule import for_value_heads, maps, scanned
from .gates import decay_from_start, decay_to_end, segment_sum

__all__ = ["chunkwise", "chunkwise_substitution", "parallel", "recurrent", "scan"]


@form("gated_delta_rule")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; in float64 the oracle of this mechanism (Yang et al. 2025, Gated DeltaNet, eq. 10).

    Arguments, results and errors are those of :func:`gla_ref.delta_rule.recurrent`, and:

    Args:
        g: natural log gates `[B, T, HV]` in [-inf, 0].
    """
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    S, o = initial_state, []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        stored = (k[:, t, :, :, None] * S).sum(-2)  # [B HV V]: what is stored under the key
        write = beta[:, t, :, None] * (v[:, t] - stored)
        S = S + k[:, t, :, :, None] * write[:, :, None, :]
        o.append((q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


def _chunks(q, k, v, g, beta, scale, S, C, inverse):
    """The module's docstring, chunk after chunk; `inverse` makes (I + A)^-1."""
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    o = []
    for q_n, k_n, v_n, g_n, beta_n in by_chunk(C, q, k, v, g[..., None], beta[..., None]):
        since, to_end = decay_from_start(g_n).exp(), decay_to_end(g_n).exp()  # [B HV C 1]
        D = segment_sum(g_n)[..., 0].exp()  # [B HV C C], 0 above the diagonal
        A = (beta_n * (k_n @ k_n.mT) * D).tril(-1)
        write = inverse(A) @ (beta_n * (v_n - (k_n * since) @ S))  # v^: [B HV C V]
        o.append((q_n * since) @ S + (q_n @ k_n.mT * D) @ write)
        S = since[..., -1:, :] * S + (k_n * to_end).mT @ write
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S


@form("gated_delta_rule")
def parallel(q, k, v, g, beta, *, scale, initial_state):
    """All pairs at once: one triangle of T tokens, T^3 operations. Arguments and results as in :func:`recurrent`."""
    return _chunks(q, k, v, g, beta, scale, initial_state, q.shape[1], triangular.halves)


@form("gated_delta_rule")
def chunkwise(q, k, v, g, beta, *, scale, initial_state, C: int = 64):
    """Chunks of C tokens, their triangles inverted in blocks of 16. Arguments and results as in :func:`recurrent`."""
    return _chunks(q, k, v, g, beta, scale, initial_state, C, triangular.blocked)


@form("gated_delta_rule")
def chunkwise_substitution(q, k, v, g, beta, *, scale, initial_state, C: int = 64):
    """The same with forward substitution over all C rows. Arguments and results as in :func:`recurrent`."""
    return _chunks(q, k, v, g, beta, scale, initial_state, C, triangular.substitution)


@form("gated_delta_rule")
def scan(q, k, v, g, beta, *, scale, initial_state):
    """A parallel scan of the maps S -> M S + X, with M = e^g (I - beta k^T k) and X = beta k^T v.

    Arguments and results as in :func:`recurrent`.
    """
    M, X = maps(k, v, beta)
    return scanned(scale * q, g[..., None, None].exp() * M, X, initial_state)
