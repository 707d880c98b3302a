"""A right delta rule in chunks, in steps; a room replaces one of them by a step that shipped (chapters 20 and 21)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...gates import decay_to_end
from ._chunked import C, pairs


def grouped(x: Tensor, HV: int) -> Tensor:
    """Queries or keys for HV value heads: value head h reads key head h // (HV / H)."""
    return x.repeat_interleave(HV // x.shape[1], 1)


def inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower triangles, by substitution."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A)
    return torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)


def corrected(*, grouped=grouped, inverse=inverse, weights=pairs, C: int = C) -> Callable:
    """A kernel of the gated delta rule and KDA under the contract; with the steps given, it is right."""

    def sequence(q, k, v, g, beta, S):
        """Heads first: o, and the state after the last token."""
        o = []
        for q_n, k_n, v_n, g_n, beta_n in zip(*(x.split(C, -2) for x in (q, k, v, g, beta)), strict=True):
            since = g_n.cumsum(-2).exp()
            A = (beta_n * pairs(k_n, k_n, g_n)).tril(-1)
            writes = inverse(A) @ (beta_n * (v_n - (k_n * since) @ S))
            o.append((q_n * since) @ S + weights(q_n, k_n, g_n) @ writes)
            S = since[..., -1:, :].mT * S + (k_n * decay_to_end(g_n).exp()).mT @ writes
        return torch.cat(o, -2), S

    def kernel(q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None):
        B, T, K, (HV, V) = *q.shape[:2], q.shape[3], v.shape[2:]
        g = g if g.ndim == 4 else g[..., None].expand(B, T, HV, K)
        q = q * (K**-0.5 if scale is None else scale)
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta[..., None]))
        tokens = grouped(q, HV), grouped(k, HV), v, g, beta
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        S = q.new_zeros(N, HV, K, V) if initial_state is None else initial_state.to(q.dtype)
        if cu_seqlens is None:
            o, S = sequence(*tokens, S)
            return o.transpose(1, 2), S
        outs, finals = [], []
        for n, (a, e) in enumerate(pairwise(cu_seqlens.tolist())):
            own = S[n : n + 1]
            if a < e:
                o, own = sequence(*(x[..., a:e, :] for x in tokens), own)
                outs.append(o)
            finals.append(own)
        return torch.cat(outs, -2).transpose(1, 2), torch.cat(finals)

    return kernel
