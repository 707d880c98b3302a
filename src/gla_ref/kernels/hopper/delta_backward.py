"""The gradient of the delta rules on Hopper, in the portable kernel's order (chapter 20): its launches, and their plan.

Equations, names and the reason for each step are those of ../portable/delta_gradient.py. Nothing of the forward pass is
kept but its inputs::

    launch       programs                   makes                                                   in
    solve        chunks * HV                Y, P and the decays of each chunk                       delta_solve.py
    walk         segments * HV * V / BV     w, and the state S before each chunk                    delta_walks.py
    walk_back    segments * HV * V / BV     r, and the gradient R of the state after each chunk     delta_walks.py
    gradients    chunks * H                 dq, dk, dv, dg and dbeta                                delta_gradients.py

Each launch waits for the one before. Only walks go from chunk to chunk; the other two have a program per chunk.

*Segments.* If heads are few, the plan cuts sequences into segments. A segment maps S to M S + X and R to M^T R + X'.
Walks without results make X and M, and X'; `carry` of ../portable/delta_forward.py makes the states between segments of
maps, and walks with results begin there. Segments and columns per program are those that `choose` of delta_ahead.py
takes, by its model of the forward pass.

*float16* ends at 65504, so sums of products pass through memory in float32, as in the portable kernel: threads store
them, and the portable `gradients` reads them. Operands are divided by powers of 2 (`operand` of tiles.py); the divisors
of Y and P are a row of `factors`.

Limits: tokens of 16 bits, K and V of 64 or 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _contract as contract
from ..launch.hardware import Hardware
from ..launch.plan import Box, Draft, Plan, Spec, cdiv
from ..portable.delta_forward import BETA, COARSE, FINE, SINCE, UNTIL, DeltaCall, carry_states
from ..portable.delta_forward import ROWS as FACTORS
from ..portable.delta_gradient import Local, finish, gradient_of_state
from ..portable.segments import sequences, slots
from . import delta_ahead
from .delta_gradients import make_gradients
from .delta_solve import C, launch_solve
from .delta_walks import DIVISORS, launch_walk, walk, walk_back
from .tiles import box

OF_SOLVE = 168  # registers of a thread of `solve`
KEPT = {  # rows of `factors` (delta_solve.py)
    "BETA": BETA.value, "SINCE": SINCE.value, "UNTIL": UNTIL.value, "COARSE": COARSE.value, "FINE": FINE.value,
    "DIVISORS": DIVISORS.value,
}


def begin(hardware: Hardware, q, k, v, g, beta, S, cu, do, dS, scale, path) -> tuple[DeltaCall, Spec]:
    """A call with room for Y, P and `factors`, and do as walks take it."""
    draft = Draft(hardware, q, k, v, g, beta, S, cu, do, dS)
    (B, T, heads, K), (H, V) = q.shape, v.shape[2:]
    G, cu, N = H // heads, draft.contiguous(cu, torch.int32), sequences(B, cu)
    do, scale = draft.gradient_of_o(v, do, contract.check_scale(scale, K))
    chunks, n = cdiv(T, C.value), slots(B, T, cu, C.value)
    each = cdiv(chunks, N) if cu else chunks
    how, length = delta_ahead.choose(hardware, K, V, H * N, each, path)
    BV = how.columns
    L = C.value * length if path == "segmented" or length < each else T + 1
    draft.because(f"T of all chunks first, then walks with a program for each {BV} columns of V: Hopper, in Gluon")
    who = "it was asked for" if path else f"{V // BV * H * N} programs for {hardware}"
    # a sequence of less than one segment is walked in one go
    parts = f"segments of {length} of its {chunks} chunks" if L <= T else "one go"
    draft.because(f"each sequence in {parts}: {who}")

    kept = q.dtype if q.dtype == torch.bfloat16 else torch.float32  # as the portable kernel's, which reads it
    Y, P = (draft.new(name, n * H, C.value, 1, C.value, dtype=q.dtype) for name in "YP")
    rows = FACTORS + 1 if q.dtype == torch.float16 else FACTORS
    factors = draft.new("factors", n, H, rows, C.value)
    call = DeltaCall(
        draft=draft, cu=cu, B=B, T=T, H=H, K=K, V=V, G=G, N=N, scale=scale, gated=g is not None, kept=kept, C=C.value,
        L=L, BK=K, BV=BV, chunks=n, warps=4, stages=1, P=P, Y=Y, factors=factors,
    )
    return call, do


def plan_backward(hardware: Hardware, q, k, v, g, beta, S, cu, do, dS, scale, path, need_dg) -> Plan:
    """(dq, dk, dv, dg, dbeta, dS0); None for what is not given or, of dg, not needed."""
    call, do = begin(hardware, q, k, v, g, beta, S, cu, do, dS, scale, path)
    draft, K, V, N = call.draft, call.K, call.V, call.N
    d_q, d_k, d_v, d_do = (box(x, C.value, width) for x, width in ((q, K), (k, K), (v, call.BV), (do, call.BV)))
    d_Y, d_P = (box(x, C.value, C.value) for x in (call.Y, call.P))
    launch_solve(call, d_q, d_k, g, beta, d_Y, d_P, call.factors, OF_SOLVE, **KEPT)

    S_in, R_in = draft.contiguous(S, torch.float32), gradient_of_state(draft, dS, call.scale)
    cut = call.L <= call.T
    part = draft.new("part", call.segments, call.H, K, V + K) if cut else None
    S_T = draft.new("S_T", N, call.H, K, V) if cut else None
    states, writes = walk_through(call, walk, (d_k, d_v, d_Y), S_in, part, S_T, "states", "writes")
    part = draft.compute("part back", _turned, part, V)
    R_0 = draft.new("R_0", N, call.H, K, V) if S or cut else None
    dstates, r = walk_through(call, walk_back, (d_q, d_k, d_do, d_Y, d_P), R_in, part, R_0, "dstates", "r")
    local = Local(q, k, v, g, do, states, writes, dstates, r)
    made = (make_gradients if call.kept == q.dtype else finish)(call, local, beta, need_dg)
    dS0 = draft.compute("dS0", torch.mul, R_0 if S else None, call.scale)
    return draft.plan("hopper", *made, dS0)


def walk_through(
    call: DeltaCall, kernel, tokens: tuple[Box, ...], first: Spec | None, part: Spec | None, last: Spec | None,
    states: str, rows: str,
) -> tuple[Spec, Spec]:
    """(states, rows) of a walk from state `first`, in tensors of these names; `last` gets the last state.

    `part` gets the maps of segments, then the state before each; it is None if a sequence is walked in one go.
    """
    draft, out = call.draft, last
    if part:
        launch_walk(call, kernel, tokens, None, part)
        carry_states(draft, part, first, last, call.cu, call.T, call.L, reverse=kernel is walk_back)
        first, out = part, None
    of_states = draft.new(states, call.chunks, call.H, call.K, call.V, dtype=call.kept)
    of_rows = draft.new(rows, call.B, call.T, call.H, call.V, dtype=call.kept)
    launch_walk(call, kernel, tokens, first, out, of_states, of_rows)
    return of_states, of_rows


def _turned(part: Tensor, V: int) -> Tensor:
    """Maps [slots, H, K, V + K] of the way back: M^T, and room for X'."""
    found = torch.empty_like(part)
    found[..., V:] = part[..., V:].mT
    return found
