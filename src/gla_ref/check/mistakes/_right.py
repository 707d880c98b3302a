"""Right chunkwise kernels in steps; a wrong kernel replaces one of them (chapters 6, 11, 20 and 21)."""

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


def grouped(x: Tensor, HV: int) -> Tensor:
    """Queries or keys for HV value heads: value head h reads key head h // (HV / H)."""
    return x.repeat_interleave(HV // x.shape[1], 1)


def inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower triangles, by substitution."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A)
    return torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)


def under_contract(sequence: Callable, q, k, v, g, *beta, grouped, begin, scale, initial_state, cu_seqlens):
    """o and the states of `sequence(*tokens, S, sequences)`, heads first, for each sequence of a call."""
    B, T, K, (HV, V) = *q.shape[:2], q.shape[3], v.shape[2:]
    g = v.new_zeros(B, T, HV) if g is None else g
    g = g if g.ndim == 4 else g[..., None].expand(B, T, HV, K)
    q = q * (K**-0.5 if scale is None else scale)
    q, k, *rest = (x.transpose(1, 2) for x in (q, k, v, g, *(x[..., None] for x in beta)))
    tokens = grouped(q, HV), grouped(k, HV), *rest
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S = q.new_zeros(N, HV, K, V) if initial_state is None else initial_state.to(q.dtype)
    if cu_seqlens is None:
        o, S = sequence(*tokens, S, N)
        return o.transpose(1, 2), S
    outs, finals = [], []
    for n, (a, e) in enumerate(pairwise(cu_seqlens.tolist())):
        own = S[n : n + 1]
        if a < e:
            o, own = sequence(*(x[..., a:e, :] for x in tokens), begin(own, tokens[3], a), N)
            outs.append(o)
        finals.append(own)
    return torch.cat(outs, -2).transpose(1, 2), torch.cat(finals)


def chunked(*, read=read, write=write, pairs=pairs, carry=carry, begin=begin, seen=seen, C: int = C) -> Callable:
    """A kernel of linear attention, simple GLA and GLA under the contract; with the steps given, it is right."""

    def sequence(q, k, v, g, S, sequences):
        parts = list(zip(*(x.split(C, -2) for x in (q, k, v, g)), strict=True))
        writes = [write(k_n, decay_to_end(g_n)).mT @ v_n for _, k_n, v_n, g_n in parts]
        states = carry(S, [g_n.sum(-2) for *_, g_n in parts], writes)
        o = [
            read(q_n * g_n.cumsum(-2).exp(), S_n) + (pairs(q_n, k_n, g_n) @ v_n)[..., : v_n.shape[-2], :]
            for (q_n, k_n, v_n, g_n), S_n in zip(parts, seen(states, sequences), strict=False)
        ]
        return torch.cat(o, -2), states[-1]

    def kernel(q, k, v, g=None, *, scale=None, initial_state=None, cu_seqlens=None):
        call = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        return under_contract(sequence, q, k, v, g, grouped=grouped, begin=begin, **call)

    return kernel


def corrected(*, grouped=grouped, inverse=inverse, weights=pairs, C: int = C) -> Callable:
    """A kernel of the gated delta rule and KDA under the contract; with the steps given, it is right."""

    def sequence(q, k, v, g, beta, S, sequences):
        o = []
        for q_n, k_n, v_n, g_n, beta_n in zip(*(x.split(C, -2) for x in (q, k, v, g, beta)), strict=True):
            since = g_n.cumsum(-2).exp()
            A = (beta_n * pairs(k_n, k_n, g_n)).tril(-1)
            writes = inverse(A) @ (beta_n * (v_n - (k_n * since) @ S))
            o.append((q_n * since) @ S + weights(q_n, k_n, g_n) @ writes)
            S = since[..., -1:, :].mT * S + (k_n * decay_to_end(g_n).exp()).mT @ writes
        return torch.cat(o, -2), S

    def kernel(q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None):
        call = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        return under_contract(sequence, q, k, v, g, beta, grouped=grouped, begin=begin, **call)

    return kernel


right = chunked()
