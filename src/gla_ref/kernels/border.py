"""States at the borders of a sequence in pieces: the sum that a piece adds, the state that comes in (chapter 23).

    X = sum_t (e^(b_T - b_t) k_t)^T v_t        from left to right: what the piece has written when it ends
    A = sum_t (e^(b_t) q_t)^T do_t             from right to left: what it reads of the state before it

`added` is a walk of gla_forward.py or linear_attention.py without outputs. It reads k, v and g (backwards q, do and g)
once, and finds the decay of the whole piece on its way. `crossed` is the `carry` of _segments.py. References:
`write_map`, `read_map` and `run` of :mod:`gla_ref.over_ranks.maps`.
"""

from __future__ import annotations

from torch import Tensor

from ._hardware import Hardware
from ._plan import Draft, Plan, cdiv
from ._program import Planned
from ._segments import carry_states, segment_length, slots
from .gla_forward import Call, Readers
from .linear_attention import add_up

__all__ = ["added", "crossed"]


def plan_added(hardware: Hardware, k, v, g, backwards: bool) -> Plan:
    """(X or A, the decay of the piece): from specs; the decay is None but for gates of channels."""
    if g is None or len(g.shape) == 3:
        draft = Draft(hardware, k, v, g)
        return draft.plan("portable", add_up(draft, k, v, g, backwards), None)
    call = Call(hardware, (k, k, v, g, None, None, None), 1.0, None)
    draft, (B, T, H, K), V = call.draft, k.shape, v.shape[-1]
    draft.inputs = k, v, g
    L = call.C * segment_length(draft, None, cdiv(V, call.BV) * H * B, call.chunks // B, None)
    n = slots(B, T, None, L)
    S, decay = draft.new("S", n, H, K, V), draft.new("decay", n, H, K)
    x, engine = Readers(None, k, g, None, None), call.by_engine(k, v, g)
    call.launch_walk(x, v, engine, backwards, L, None, S, decays=(decay, None))
    if n > B:
        part, S = S, draft.new("S", B, H, K, V)
        carry_states(draft, part, decay, None, None, S, None, T, L, backwards)
        decay = draft.compute("decay", _of_all, decay, n // B, shape=(B, H, K))
    return draft.plan("portable", S, decay)


def _of_all(decay: Tensor, n: int) -> Tensor:
    """The decay [B, H, K] of n segments after each other, of each one's [B n, H, K]."""
    return decay.unflatten(0, (-1, n)).prod(1)


def plan_crossed(hardware: Hardware, part, rows, columns, S, backwards: bool) -> Plan:
    """(the state that comes into each segment, written over `part`; the state after the last)."""
    draft = Draft(hardware, part, rows, columns, S)
    out = draft.like("S_out", S)
    carry_states(draft, part, rows, columns, S, out, None, part.shape[0] // S.shape[0], 1, backwards)
    return draft.plan("portable", part, out)


_added = Planned(plan_added, ("k", "v", "g"), ("backwards",))
_crossed = Planned(plan_crossed, ("part", "rows", "columns", "S"), ("backwards",))


def added(k: Tensor, v: Tensor, g: Tensor | None = None, *, backwards: bool = False) -> tuple[Tensor, Tensor | None]:
    """X and the decay of the whole piece; or A and the decay, of q in the place of k and do in that of v.

    Args:
        k: `[B, T, H, K]`, as :func:`gla_ref.kernels.gla.gla` takes it.
        v: `[B, T, H, V]`.
        g: log gates `[B, T, H, K]` or `[B, T, H]`, or None.
        backwards: from the last token to the first.

    Returns:
        float32 `[B, H, K, V]`, and the decay, float32 `[B, H, K]`, where g has channels, else None. Not differentiable.
    """
    S, decay = _added(k, v, g, backwards)
    return S, decay


def crossed(X: Tensor, M: tuple[Tensor, ...], S: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """The states between segments that each do S -> M S + X, one after the other.

    Args:
        X: `[N, n, H, K, V]` of n segments, float32.
        M: decays `[N, n, H, K or 1, 1]` of rows and, if there are two, `[N, n, H, 1, V]` of columns.
        S: `[N, H, K, V]`, the state before the first segment (backwards: after the last).
        backwards: from the last segment to the first.

    Returns:
        The state that comes into each segment, `[N, n, H, K, V]`, and the one that leaves the last. Not differentiable.
    """

    def of_segments(x):
        return x.contiguous().flatten(0, 1)

    rows, *columns = M
    rows = of_segments(rows[..., 0])  # [N n, H, K or 1]
    columns = of_segments(columns[0][..., 0, :]) if columns else None  # [N n, H, V]
    part, out = _crossed(
        of_segments(X).clone(), rows if rows.shape[-1] > 1 else rows[..., 0], columns, S.contiguous(), backwards
    )
    return part.view(X.shape), out
