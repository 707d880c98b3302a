"""A right chunkwise kernel in steps; a room replaces one of them by a step that shipped (chapters 6 and 11)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...gates import decay_to_end, segment_sum

C = 64  # tokens of a chunk


def read(q: Tensor, S: Tensor) -> Tensor:
    """Read the state before a chunk by its decayed queries `[B, H, C, K]`."""
    return q @ S


def write(k: Tensor, rest: Tensor) -> Tensor:
    """Decay keys to the end of their chunk by the log decays `rest` `[B, H, C, K]`."""
    return k * rest.exp()


def pairs(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Weights between the tokens of a chunk, `[B, H, C, C]`; rows beyond its tokens are dropped after the product."""
    return torch.einsum("bhik,bhjk,bhijk->bhij", q, k, segment_sum(g).exp())


def carry(S: Tensor, totals: list[Tensor], writes: list[Tensor]) -> list[Tensor]:
    """The state before each chunk and after the last, of each chunk's total log decay and its writes."""
    states = [S]
    for total, written in zip(totals, writes, strict=True):
        states.append(total[..., None].exp() * states[-1] + written)
    return states


def begin(S: Tensor, g: Tensor, a: int) -> Tensor:
    """The state with which a sequence begins, at token a of the pack whose gates are g."""
    return S


def seen(states: list[Tensor], sequences: int) -> list[Tensor]:
    """The states that the chunks read, in a call of so many sequences."""
    return states


def chunked(*, read=read, write=write, pairs=pairs, carry=carry, begin=begin, seen=seen) -> Callable:
    """A kernel of linear attention, simple GLA and GLA under the contract; with the steps given, it is right."""

    def sequence(q, k, v, g, S, sequences):
        """Heads first: o, and the state after the last token."""
        parts = list(zip(*(x.split(C, -2) for x in (q, k, v, g)), strict=True))
        writes = [write(k_n, decay_to_end(g_n)).mT @ v_n for _, k_n, v_n, g_n in parts]
        states = carry(S, [g_n.sum(-2) for *_, g_n in parts], writes)
        o = [
            read(q_n * g_n.cumsum(-2).exp(), S_n) + (pairs(q_n, k_n, g_n) @ v_n)[..., : v_n.shape[-2], :]
            for (q_n, k_n, v_n, g_n), S_n in zip(parts, seen(states, sequences), strict=False)
        ]
        return torch.cat(o, -2), states[-1]

    def kernel(q, k, v, g=None, *, scale=None, initial_state=None, cu_seqlens=None):
        (B, T, H, K), V = q.shape, v.shape[-1]
        g = torch.zeros_like(k) if g is None else g
        g = g if g.ndim == 4 else g[..., None].expand(B, T, H, K)
        q = q * (K**-0.5 if scale is None else scale)
        q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        S = q.new_zeros(N, H, K, V) if initial_state is None else initial_state.to(q.dtype)
        if cu_seqlens is None:
            o, S = sequence(q, k, v, g, S, N)
            return o.transpose(1, 2), S
        outs, finals = [], []
        for n, (a, e) in enumerate(pairwise(cu_seqlens.tolist())):
            own = S[n : n + 1]
            if a < e:
                o, own = sequence(*(x[..., a:e, :] for x in (q, k, v, g)), begin(own, g, a), N)
                outs.append(o)
            finals.append(own)
        return torch.cat(outs, -2).transpose(1, 2), torch.cat(finals)

    return kernel


right = chunked()
