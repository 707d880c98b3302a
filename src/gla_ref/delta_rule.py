"""The delta rule: what is stored under a key is corrected, not added to (chapter 20).

    S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1}) = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t
    o_t = scale * q_t S_t

One step of gradient descent, with step size beta_t, on half the squared length of k_t S - v_t. Keys should have length
1; then beta_t = 1 replaces what the key finds, and 0 < beta_t < 2 is stable. Value heads may be a multiple of key
heads: value head h reads key head h // (HV / H).

Inside a chunk each token corrects what the tokens before it have written. So their writes v^ solve a triangular system:

    v^_i = beta_i (v_i - k_i S - Σ over j < i of (k_i k_jᵀ) v^_j)
    (I + A) v^ = beta (v - K S),    A = tril(beta K K^T, -1)

and with them the chunk is linear attention: o = scale (Q S + tril(Q K^T) v^), S' = S + K^T v^ (the UT or WY form).
"""

import torch
from einops import rearrange, repeat
from torch import Tensor

from . import triangular
from ._contract import form
from .chunks import by_chunk
from .prefix_sum import blelloch

__all__ = ["chunkwise", "chunkwise_substitution", "for_value_heads", "parallel", "recurrent", "scan"]


def for_value_heads(x: Tensor, HV: int) -> Tensor:
    """`[B, T, H, K]` to `[B, T, HV, K]`: each key head for the HV / H value heads that read it."""
    return repeat(x, "b t h k -> b t (h n) k", n=HV // x.shape[2])


@form("delta_rule")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; in float64 the oracle of this mechanism (Schlag et al. 2021, eq. 24; Yang et al. 2024b, eq. 2).

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`, of length at most 1 if the state is to stay bounded.
        v: values `[B, T, HV, V]`, HV a multiple of H.
        beta: write strengths `[B, T, HV]` in [0, 2].
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, HV, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed sequences (B = 1).

    Returns:
        o `[B, T, HV, V]` in the dtype of v, and the final state `[N_seq, HV, K, V]`, at least float32.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    S, o = initial_state, []
    for t in range(q.shape[1]):
        stored = (k[:, t, :, :, None] * S).sum(-2)  # [B HV V]: what is stored under the key
        write = beta[:, t, :, None] * (v[:, t] - stored)
        S = S + k[:, t, :, :, None] * write[:, :, None, :]
        o.append((q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


def _chunks(q, k, v, beta, scale, S, C, inverse):
    """The module's docstring, chunk after chunk; `inverse` makes (I + A)^-1."""
    q, k = (for_value_heads(x, v.shape[2]) for x in (scale * q, k))
    o = []
    for q_n, k_n, v_n, beta_n in by_chunk(C, q, k, v, beta[..., None]):
        A = (beta_n * (k_n @ k_n.mT)).tril(-1)  # [B HV C C]
        write = inverse(A) @ (beta_n * (v_n - k_n @ S))  # v^: [B HV C V]
        o.append(q_n @ S + (q_n @ k_n.mT).tril() @ write)
        S = S + k_n.mT @ write
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S


@form("delta_rule")
def parallel(q, k, v, beta, *, scale, initial_state):
    """All pairs at once: one triangle of T tokens, T^3 operations. Arguments and results as in :func:`recurrent`.

    However exact the inverse, each write is a sum over all earlier tokens whose terms cancel. Its error in float32
    grows with T; the chunks of :func:`chunkwise` keep these sums short.
    """
    return _chunks(q, k, v, beta, scale, initial_state, q.shape[1], triangular.halves)


@form("delta_rule")
def chunkwise(q, k, v, beta, *, scale, initial_state, C: int = 64):
    """Chunks of C tokens, their triangles inverted in blocks of 16 (Yang et al. 2024b, section 3).

    Arguments and results as in :func:`recurrent`.
    """
    return _chunks(q, k, v, beta, scale, initial_state, C, triangular.blocked)


@form("delta_rule")
def chunkwise_substitution(q, k, v, beta, *, scale, initial_state, C: int = 64):
    """The same with forward substitution over all C rows. Arguments and results as in :func:`recurrent`."""
    return _chunks(q, k, v, beta, scale, initial_state, C, triangular.substitution)


@form("delta_rule")
def scan(q, k, v, beta, *, scale, initial_state):
    """A parallel scan of the maps S -> M S + X, with M = I - beta k^T k and X = beta k^T v.

    Right, and of no use but to show why: composing two maps multiplies K x K matrices, where gates multiply K numbers.
    Arguments and results as in :func:`recurrent`.
    """
    return scanned(scale * q, *maps(k, v, beta), initial_state)


def maps(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """M = I - beta k^T k [B T HV K K] and X = beta k^T v [B T HV K V] of each token's map S -> M S + X."""
    k = for_value_heads(k, v.shape[2])
    erase = beta[..., None] * k  # [B T HV K]
    M = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - erase[..., :, None] * k[..., None, :]
    return M, erase[..., :, None] * v[..., None, :]


def scanned(q: Tensor, M: Tensor, X: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The reads of q from the states after the maps S -> M S + X, from S [B HV K V] on, and the last state."""

    def then(first, second):
        return second[0] @ first[0], second[0] @ first[1] + second[1]

    M, X = blelloch(then, (M, X))
    S = M @ S[:, None] + X  # [B T HV K V]
    return (for_value_heads(q, S.shape[2])[..., None] * S).sum(-2), S[:, -1]
