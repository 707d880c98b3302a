"""The parts of a chunk of linear attention: its own pairs, its reads and its writes (chapters 6 and 11).

Tensors are `[B, H, C, ...]`: q, k with their log gates g `[B, H, C, K]`, v with g_v `[B, H, C, V]` or None where the
values have no gate. Every exponent is a sum of gates, and so at most 0.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from .gates import decay_from_start, decay_to_end, segment_sum

__all__ = ["by_chunk", "decayed", "gate", "heads_first", "read", "scores", "scores_by_block", "update", "weighted"]


def heads_first(x: Tensor | None) -> Tensor | None:
    """`[B, T, H, D]` to `[B, H, T, D]`; None stays None."""
    return None if x is None else rearrange(x, "b t h d -> b h t d")


def by_chunk(C: int, *tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Tensors `[B, T, H, D]` chunk after chunk, `[B, H, C, D]`, the last one shorter; None stays None."""
    return zip(*(repeat(None) if x is None else heads_first(x).split(C, -2) for x in tensors), strict=False)


def gate(g: Tensor, g_v: Tensor | None) -> Tensor:
    """The gate matrix G = alpha^T alpha^v, `[..., K]` and `[..., V]` to `[..., K, V]`; without g_v `[..., K, 1]`."""
    return g[..., :, None].exp() if g_v is None else (g[..., :, None] + g_v[..., None, :]).exp()


def decayed(x: Tensor, g: Tensor | None, since: Callable[[Tensor], Tensor]) -> Tensor:
    """x times the decay of a sum of gates; x itself without gates."""
    return x if g is None else x * since(g).exp()


def scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """P_ij = sum_K q_i k_j exp(b_i - b_j) for j <= i, in log space: `[B, H, C, C]` (GLA paper, eq. 4)."""
    return (q[..., :, None, :] * k[..., None, :, :] * segment_sum(g).exp()).sum(-1)


def scores_by_block(q: Tensor, k: Tensor, g: Tensor, c: int) -> Tensor:
    """:func:`scores` with matrix products: only pairs of one sub-chunk of c tokens are in log space.

    Each sub-chunk reads all tokens before it by one product, anchored where the sub-chunk begins: q decays from there
    to i, k from j to there, and no exponent is above 0 (GLA paper, section 4.3).
    """
    T, rows = q.shape[-2], []
    for i in range(0, T, c):
        q_i, k_i, g_i = (x[..., i : i + c, :] for x in (q, k, g))
        P = scores(q_i, k_i, g_i)
        if i:
            before = decayed(k[..., :i, :], g[..., :i, :], decay_to_end)
            P = torch.cat([decayed(q_i, g_i, decay_from_start) @ before.mT, P], -1)
        rows.append(F.pad(P, (0, T - P.shape[-1])))
    return torch.cat(rows, -2)


def weighted(P: Tensor, v: Tensor, g_v: Tensor | None) -> Tensor:
    """P v; with a gate on V every value also decays on its way from j to i."""
    if g_v is None:
        return P @ v
    return (P[..., None] * v[..., None, :, :] * segment_sum(g_v).exp()).sum(-2)


def read(q: Tensor, S: Tensor, g: Tensor, g_v: Tensor | None) -> Tensor:
    """The reads of a chunk's tokens from the state S before the chunk (the paper's Lambda decays q)."""
    return decayed(decayed(q, g, decay_from_start) @ S, g_v, decay_from_start)


def update(k: Tensor, v: Tensor, S: Tensor, g: Tensor, g_v: Tensor | None) -> Tensor:
    """The state after a chunk: S with the whole chunk's decay, plus writes decayed to its end (the paper's Gamma)."""
    write = decayed(k, g, decay_to_end).mT @ decayed(v, g_v, decay_to_end)
    return gate(g.sum(-2), None if g_v is None else g_v.sum(-2)) * S + write
