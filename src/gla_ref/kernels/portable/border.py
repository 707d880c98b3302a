"""States at the borders of a sequence in pieces: the map of a piece, the state that comes in (chapter 25).

    S_right = M S_left + X          X, for GLA: sum_t (e^(b_T - b_t) k_t)^T v_t, the piece's writes at its end
    R_left  = M^T R_right + A       A, for GLA: sum_t (e^(b_t) q_t)^T do_t, the piece's reads of the state before it

`added` finds X or A of gated linear attention by a walk of gla_forward.py or linear.py without outputs. The walk reads
k, v and g (backwards q, do and g) once, and also finds M, the decay of the whole piece. `written` finds X and M of a
delta rule, of KDA too, by the walk of delta_forward.py; that walk also knows what each token reads of each row of the
state on the left, and A is the product of these reads and do. On Hopper both walk by the kernels that a call takes.

Between ranks, `compose` writes the map of a rank's segments as a message, which the rank sends. `enter` runs through
the messages of all ranks and finds the state that comes into a rank. `crossed`, the `carry` of segments.py, goes on
from that state through the rank's own segments. References: `write_map`, `read_map`, `composed` and `run` of
:mod:`gla_ref.over_ranks.maps`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .. import hopper
from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, cdiv, next_power_of_2
from ..launch.program import Planned, of_parameters
from . import delta_forward
from .gla_forward import Readers, begin
from .kda_forward import prepare_all
from .linear import add_up
from .segments import carry_states, slots
from .tiles import VARYING, which_tile

__all__ = ["added", "composed", "crossed", "entered", "written"]


@triton.jit(do_not_specialize=VARYING)
def compose(part, rows, message, tag, n, N, H, R, D, BD: tl.constexpr, REVERSE: tl.constexpr):
    """Write the map of n consecutive segments after a tag: tag, rows [N, H, R], X [N, H, D].

    `part` and `rows` describe the segments as in `carry` (segments.py).
    """
    # which tile: BD numbers of the state of a head
    i_d, i_h, i_n = which_tile(H, D, BD)
    o_d, i_nh = i_d * BD + tl.arange(0, BD), i_n * H + i_h
    m_d = o_d < D
    b_X, b_rows = tl.zeros([BD], dtype=tl.float32), tl.full([BD], 1.0, dtype=tl.float32)

    # compute
    for i in range(0, n):
        i_s = (i_n * n + (n - 1 - i if REVERSE else i)) * H + i_h
        b_decay = tl.load(rows + i_s * R + o_d // (D // R), mask=m_d, other=0.0)
        b_X *= b_decay
        b_rows *= b_decay
        b_X += tl.load(part + i_s.to(tl.int64) * D + o_d, mask=m_d, other=0.0)

    # store
    if tl.program_id(0) == 0:
        tl.store(message, tag)
    p = message + 1
    tl.store(p + i_nh * R + o_d // (D // R), b_rows, mask=m_d & (o_d % (D // R) == 0))
    p += N * H * R
    tl.store(p + i_nh.to(tl.int64) * D + o_d, b_X, mask=m_d)


@triton.jit(do_not_specialize=VARYING)
def enter(messages, S, tag, rank, ranks, numbers, N, H, R, D, BD: tl.constexpr, REVERSE: tl.constexpr):
    """Find S [N, H, D], the state that comes into `rank`, from the messages [ranks, numbers] of `compose`.

    S is NaN if a message bears another tag, because then a rank makes another call.
    """
    # which tile: BD numbers of the state of a head
    i_d, i_h, i_n = which_tile(H, D, BD)
    o_d, i_nh = i_d * BD + tl.arange(0, BD), i_n * H + i_h
    m_d = o_d < D
    b_S = tl.zeros([BD], dtype=tl.float32)

    # compute
    for i in range(0, ranks - 1 - rank if REVERSE else rank):
        # i_n * 0: a tensor, since Triton's interpreter gives an int for i
        i_m = i_n * 0 + (ranks - 1 - i if REVERSE else i)
        p = messages + i_m.to(tl.int64) * numbers + 1
        b_S *= tl.load(p + i_nh * R + o_d // (D // R), mask=m_d, other=0.0)
        p += N * H * R
        b_S += tl.load(p + i_nh.to(tl.int64) * D + o_d, mask=m_d, other=0.0)
    for i in range(0, ranks):
        i_m = i_n * 0 + i
        b_S = tl.where(tl.load(messages + i_m.to(tl.int64) * numbers) == tag, b_S, float("nan"))

    # store
    tl.store(S + i_nh.to(tl.int64) * D + o_d, b_S, mask=m_d)


class Added(NamedTuple):
    """A call of `added`, as the refusals of Hopper's kernels take GLA's calls."""

    k: Tensor
    v: Tensor
    g: Tensor | None
    backwards: bool
    g_v = kernel = None

    @property
    def q(self) -> Tensor:
        return self.k


def plan_added(hardware: Hardware, call: Added) -> Plan:
    """Plan (X or A, the decay of the piece); without gates for channels the decay is None."""
    (k, v, g, backwards), draft = call, Draft(hardware, *call)
    if g is None or len(g.shape) == 3:
        return draft.plan("portable", add_up(draft, k, v, g, backwards), None)
    if backwards:
        v, _ = draft.gradient_of_o(k, v, 1.0)
    refusal, shared = hopper.refusal_of_gradient if backwards else hopper.refusal, begin(draft, k, v, None, 1.0, None)
    refused = refusal(hardware, call._replace(v=v))
    if not refused:
        from ..hopper.gla_forward import on_hopper  # not where Gluon is missing

        shared = on_hopper(shared)
    (B, T, H, K), V = k.shape, v.shape[-1]
    L, why = shared.segment()
    draft.because(why)
    n = slots(B, T, None, L)
    S, decay = draft.new("S", n, H, K, V), draft.new("decay", n, H, K)
    shared.launch_walk(Readers(None, k, g=g), v, backwards, L, None, S, decay=decay)
    if n > B:
        part, S = S, draft.new("S", B, H, K, V)
        carry_states(draft, part, decay, None, S, None, T, L, backwards)
        decay = draft.compute("decay", _of_all, decay, n // B, shape=(B, H, K))
    return draft.plan("portable" if refused else "hopper", S, decay)


def _of_all(decay: Tensor, n: int) -> Tensor:
    """The decay [B, H, K] of n consecutive segments, from the decay [B n, H, K] of each."""
    return decay.unflatten(0, (-1, n)).prod(1)


class Written(NamedTuple):
    """A call of `written`, as the plans of the delta rules take theirs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    scale: float
    reads: bool
    initial_state = cu_seqlens = path = kernel = None


def plan_written(hardware: Hardware, call: Written) -> Plan:
    """Plan X, M and the reads or None; without an M, X has it in K more columns."""
    q, k, v, g, beta, scale, reads = call
    scalar = g is None or len(g.shape) == 3
    if not (hopper.refusal_of_delta if scalar else hopper.refusal_of_kda)(hardware, call):
        from ..hopper import delta_ahead, kda_forward  # not where Gluon is missing

        return (delta_ahead if scalar else kda_forward).plan_maps(hardware, call)
    draft, (B, T, H) = Draft(hardware, q, k, v, g, beta), v.shape[:3]
    if scalar:
        call = delta_forward.solve_all(draft, q, k, v, g, beta, None, scale, "fused")
    else:
        call, q, k, _ = prepare_all(draft, q, k, v, g, beta, None, scale, "fused")
    S = draft.new("S", B, H, call.K, call.V + call.K)
    o = draft.new("reads", B, T, H, call.K, dtype=v.dtype) if reads else None
    delta_forward.launch_walk(call, q if reads else None, k, v, None, S, o, maps=True)
    return draft.plan("portable", S, None, o)


def plan_composed(hardware: Hardware, part: Tensor, rows: Tensor, n: int, tag: float, backwards: bool) -> Plan:
    """Plan the message of a rank."""
    draft, (slots, H, K, V) = Draft(hardware, part, rows), part.shape
    N, R, D = slots // n, rows.shape[2], K * V
    BD = min(1024, next_power_of_2(D))
    message = draft.new("message", 1 + N * H * (R + D))
    draft.launch(
        compose, cdiv(D, BD) * H * N, part=part, rows=rows, message=message, tag=tag, n=n, N=N, H=H, R=R, D=D,
        BD=BD, REVERSE=backwards,
    )
    return draft.plan("portable", message)


def plan_entered(
    hardware: Hardware, messages: Tensor, rank: int, shapes: tuple, tag: float, backwards: bool
) -> Plan:
    """Plan the state that comes into a rank."""
    draft, (ranks, numbers), (N, H, K, V) = Draft(hardware, messages), messages.shape, shapes[-1]
    S, D = draft.new("S", N, H, K, V), K * V
    BD = min(1024, next_power_of_2(D))
    draft.launch(
        enter, cdiv(D, BD) * H * N, messages=messages, S=S, tag=tag, rank=rank, ranks=ranks, numbers=numbers,
        N=N, H=H, R=shapes[0][2], D=D, BD=BD, REVERSE=backwards,
    )
    return draft.plan("portable", S)


def plan_crossed(hardware: Hardware, part: Tensor, rows: Tensor, S: Tensor, backwards: bool) -> Plan:
    """Plan (the state that comes into each segment, written over `part`; the state after the last segment)."""
    draft = Draft(hardware, part, rows, S)
    out = draft.like("S_out", S)
    carry_states(draft, part, rows, S, out, None, part.shape[0] // S.shape[0], 1, backwards)
    return draft.plan("portable", part, out)


_added, _written = Planned(plan_added, Added), Planned(plan_written, Written)
_composed, _entered, _crossed = map(of_parameters, (plan_composed, plan_entered, plan_crossed))


def added(k: Tensor, v: Tensor, g: Tensor | None = None, *, backwards: bool = False) -> tuple[Tensor, Tensor | None]:
    """Find X and the decay of the whole piece; with q for k and do for v, find A and the decay.

    Args:
        k: `[B, T, H, K]`, as :func:`gla_ref.kernels.gla.gla` takes it.
        v: `[B, T, H, V]`.
        g: log gates `[B, T, H, K]` or `[B, T, H]`, or None.
        backwards: from the last token to the first.

    Returns:
        float32 `[B, H, K, V]`, and the decay, float32 `[B, H, K]`, where g has channels, else None. Not differentiable.
    """
    S, decay = _added(Added(k, v, g, backwards))
    return S, decay


def written(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float, reads: bool
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Find X and M; arguments as in :func:`gla_ref.kernels.kda.kda`, and a g for heads or none.

    Returns:
        X, float32 `[B, HV, K, V]`; M, float32 `[B, HV, K, K]`; with `reads` what each token reads of each row of the
        state on the left, `[B, T, HV, K]` in the dtype of v, else None; and what a walk of the same tokens by
        `Resume` of kernels/kda.py need not prepare again, or no tensors. Not differentiable.
    """
    X, M, o, *made = _written(Written(q, k, v, g, beta, scale, reads))
    if M is None:
        X, M = X.split((v.shape[3], k.shape[3]), -1)
    return X, M, o, made


def composed(X: Tensor, M: tuple[Tensor], tag: float, backwards: bool = False) -> Tensor:
    """Make the message of a rank: `tag`, and the map of the rank's segments in their order.

    Args:
        X: `[N, n, H, K, V]` of n segments, float32.
        M: a tuple of the decays `[N, n, H, K or 1, 1]`.
        tag: a number that names the call.
        backwards: from the last segment to the first.

    Returns:
        float32, the tag, then `[N, H, K or 1]` and `[N, H, K, V]`.
    """
    return _composed(part=_of_segments(X), rows=_decays(M), n=X.shape[1], tag=tag, backwards=backwards)[0]


def entered(
    messages: Tensor, rank: int, shapes: tuple[tuple[int, ...], ...], tag: float, backwards: bool = False
) -> Tensor:
    """Find the state that comes into a rank from the messages of all ranks.

    Args:
        messages: `[ranks, numbers]` of :func:`composed`.
        rank: the rank that asks for its state.
        shapes: of the tensors of a map, `(N, H, K or 1, 1)` and `(N, H, K, V)`.
        tag: the tag of every message; if a message bears another tag, the state is NaN.
        backwards: from the last rank to the first.

    Returns:
        float32 `[N, H, K, V]`.
    """
    return _entered(messages=messages, rank=rank, shapes=shapes, tag=tag, backwards=backwards)[0]


def crossed(X: Tensor, M: tuple[Tensor], S: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Find the states between consecutive segments with the maps S -> M S + X.

    Args:
        X: as :func:`composed` takes it.
        M: as :func:`composed` takes it.
        S: `[N, H, K, V]`, the state before the first segment (backwards: after the last).
        backwards: from the last segment to the first.

    Returns:
        The state that comes into each segment, `[N, n, H, K, V]`, and the state that leaves the last segment. Not
        differentiable.
    """
    rows, part = _decays(M), _of_segments(X).clone()
    rows = rows if rows.shape[2] > 1 else rows[..., 0]
    part, out = _crossed(part=part, rows=rows, S=S.contiguous(), backwards=backwards)
    return part.view(X.shape), out


def _of_segments(x: Tensor) -> Tensor:
    """Join the axes of sequences and segments: [N n, ...]."""
    return x.contiguous().view(-1, *x.shape[2:])


def _decays(M: tuple[Tensor]) -> Tensor:
    """Return the decays in M as [N n, H, K or 1]."""
    (rows,) = M
    return _of_segments(rows[..., 0])
