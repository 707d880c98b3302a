"""What a piece of a sequence adds to the state that crosses it, of Gated Linear Attention (chapter 14).

    X = sum_t (e^(b_T - b_t) k_t)^T v_t        from left to right: what the piece has written when it ends
    A = sum_t (e^(b_t) q_t)^T do_t             from right to left: what it reads of the state before it

The walk of gla_forward.py without outputs, which reads k, v and g (backwards q, do and g) and nothing else.
Reference: `write_map` and `read_map` of :mod:`gla_ref.context_parallel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._hardware import Hardware
from ._plan import Plan
from ._program import Planned
from .gla_forward import Call, Readers

__all__ = ["added"]


def plan_added(hardware: Hardware, q, k, v, g, g_v, S, cu, backwards: bool) -> Plan:
    """The state after the piece, from zeros; q has k's shape and is not read."""
    call = Call(hardware, (q, k, v, g, g_v, S, cu), 1.0, None)
    strong = call.draft.new("strong", call.chunks, call.H, dtype=torch.int8)
    walked = call.walk(Readers(None, k, g, None, strong), v, None, S="S", reverse=backwards)
    return call.draft.plan("portable", walked.S)


_added = Planned(plan_added, ("q", "k", "v", "g", "g_v", "initial_state", "cu_seqlens"), ("backwards",))


def added(k: Tensor, v: Tensor, g: Tensor, *, backwards: bool = False) -> Tensor:
    """X; or A, of q in the place of k and do in that of v.

    Args:
        k: `[B, T, H, K]`, as :func:`gla_ref.kernels.gla.gla` takes it.
        v: `[B, T, H, V]`.
        g: `[B, T, H, K]`.
        backwards: from the last token to the first.

    Returns:
        float32 `[B, H, K, V]`; not differentiable.
    """
    (S,) = _added(k, k, v, g, None, None, None, backwards)
    return S
