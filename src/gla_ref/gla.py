"""Gated Linear Attention in six forms: recurrent to two-level chunks (chapters 9, 10 and 11).

    S_t = (alpha_t^T alpha^v_t) * S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t

with g = ln(alpha) `[B, T, H, K]` and, optionally, g_v = ln(alpha^v) `[B, T, H, V]` (the paper's beta, 1 in its model).
All forms take and return what :func:`recurrent` documents; all but :func:`parallel` are right for
every gate in [-inf, 0].
"""

from collections.abc import Iterator

import torch
from einops import rearrange, repeat
from torch import Tensor

from ._contract import check_chunk, form
from .chunks import by_chunk, decayed, gate, heads_first, read, scores, update, weighted
from .gates import decay_from_start, decay_to_end
from .prefix_sum import hillis_steele

__all__ = ["chunkwise", "chunkwise_two_level", "parallel", "parallel_log", "recurrent", "scan", "two_level_blocks"]


@form("gla")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, g_v: Tensor | None, scale: float, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token; in float64 the oracle of this mechanism (GLA paper, eq. 3 and appendix C).

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: natural log gates on the key axis, `[B, T, H, K]` in [-inf, 0].
        g_v: natural log gates on the value axis, `[B, T, H, V]` in [-inf, 0], or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed sequences (B = 1).

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state `[N_seq, H, K, V]`, at least float32.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    S, o = initial_state, []
    for t in range(q.shape[1]):
        G = gate(g[:, t], None if g_v is None else g_v[:, t])
        S = G * S + k[:, t, :, :, None] * v[:, t, :, None, :]  # [B H K V]
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


@form("gla")
def parallel(q, k, v, g, *, g_v=None, scale, initial_state):
    """((Q B)(K / B)^T * M) V with cumulative products B: one matrix product, and the form that breaks.

    Kept to be broken in chapter 10: 1 / B overflows once the total decay leaves the exponent range
    (GLA paper, section 4.1; with g_v the product acts on V / D and the result is multiplied by D, appendix C.1).
    """
    q, k, v, g, g_v = map(heads_first, (scale * q, k, v, g, g_v))
    b = g.cumsum(-2).exp()
    d = torch.ones_like(v) if g_v is None else g_v.cumsum(-2).exp()
    P = ((q * b) @ (k / b).mT).tril()  # [B H T T]
    o = (P @ (v / d) + (q * b) @ initial_state) * d
    S = b[..., -1, :, None] * (initial_state + (k / b).mT @ (v / d)) * d[..., -1, None, :]
    return rearrange(o, "b h t d -> b t h d"), S


@form("gla")
def parallel_log(q, k, v, g, *, g_v=None, scale, initial_state):
    """All pairs at once in log space: right for every gate, but T * T * K exponentials and no matrix product.

    Source: GLA paper, eq. 4.
    """
    q, k, v, g, g_v = map(heads_first, (scale * q, k, v, g, g_v))
    o = read(q, initial_state, g, g_v) + weighted(scores(q, k, g), v, g_v)
    return rearrange(o, "b h t d -> b t h d"), update(k, v, initial_state, g, g_v)


@form("gla")
def scan(q, k, v, g, *, g_v=None, scale, initial_state):
    """An associative scan over pairs (G, S), every state in memory: log2 T steps, T * K * V numbers.

    (G1, S1) then (G2, S2) is (G2 G1, G2 S1 + S2), products element by element.
    """
    G, write = gate(g, g_v), k[..., :, None] * v[..., None, :]  # [B T H K V]
    G, S = hillis_steele(lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1]), (G, write))
    S = S + G * repeat(initial_state, "b h k v -> b t h k v", t=1)
    return scale * (q[..., :, None] * S).sum(-2), S[:, -1]


@form("gla")
def chunkwise(q, k, v, g, *, g_v=None, scale, initial_state, C: int = 64):
    """Chunks of C tokens: `parallel_log` inside, recurrent between (GLA paper, section 4.2)."""
    S, o = initial_state, []
    for q_n, k_n, v_n, g_n, h_n in by_chunk(C, scale * q, k, v, g, g_v):
        o.append(read(q_n, S, g_n, h_n) + weighted(scores(q_n, k_n, g_n), v_n, h_n))
        S = update(k_n, v_n, S, g_n, h_n)
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S


def two_level_blocks(T: int, C: int, c: int) -> Iterator[tuple[str, slice, slice]]:
    """The blocks of the attention-style map in the order in which `chunkwise_two_level` computes them.

    Yields:
        (kind, rows, cols): tokens `rows` attend to tokens `cols`; kind is "inter-chunk" (through the
        state), "inter-sub-chunk" (a matrix product) or "intra-sub-chunk" (log space). GLA paper, figure 3.
    """
    check_chunk(C=C, c=c)
    for start in range(0, T, C):
        stop = min(start + C, T)
        yield "inter-chunk", slice(start, stop), slice(0, start)
        for i in range(start, stop, c):
            rows = slice(i, min(i + c, stop))
            if i > start:
                yield "inter-sub-chunk", rows, slice(start, i)
            yield "intra-sub-chunk", rows, rows


@form("gla")
def chunkwise_two_level(q, k, v, g, *, g_v=None, scale, initial_state, C: int = 64, c: int = 16):
    """Chunks of C tokens in sub-chunks of c: matrix products but for the diagonal blocks.

    Between sub-chunks both exponents are anchored where the reading sub-chunk begins, so both are <= 0:
    q decays from there to i, k from j to there.

    Args:
        C: chunk length.
        c: sub-chunk length, a divisor of C.

    Source: GLA paper, section 4.3 and Listing 1 (with its two slips mended, see the errata).
    """
    q, k, v, g, g_v = map(heads_first, (scale * q, k, v, g, g_v))
    S, o = initial_state, torch.zeros_like(v)
    for kind, rows, cols in two_level_blocks(q.shape[-2], C, c):
        q_i, k_j, v_j = q[..., rows, :], k[..., cols, :], v[..., cols, :]
        g_i, g_j = g[..., rows, :], g[..., cols, :]
        h_i, h_j = (None, None) if g_v is None else (g_v[..., rows, :], g_v[..., cols, :])
        if kind == "inter-chunk":  # cols reach this chunk through S only
            o[..., rows, :] += read(q_i, S, g_i, h_i)
            S = update(k[..., rows, :], v[..., rows, :], S, g_i, h_i)
        elif kind == "inter-sub-chunk":
            P = decayed(q_i, g_i, decay_from_start) @ decayed(k_j, g_j, decay_to_end).mT
            o[..., rows, :] += decayed(P @ decayed(v_j, h_j, decay_to_end), h_i, decay_from_start)
        else:
            o[..., rows, :] += weighted(scores(q_i, k_j, g_i), v_j, h_i)
    return rearrange(o, "b h t d -> b t h d"), S
