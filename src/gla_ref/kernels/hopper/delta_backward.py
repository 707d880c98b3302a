"""The gradient of the delta rules on Hopper, in the portable kernel's order (chapter 20): its launches, and their plan.

Equations, names and the reason for each step are those of ../portable/delta_gradient.py. Nothing of the forward pass is
kept but its inputs::

    launch       programs                      makes                                            in
    solve        chunks * HV                   Y, P and the decays of each chunk                delta_solve.py
    walks        2 * segments * HV * V / BV    w, and the state S before each chunk; dv, and    delta_walks.py
                                               the gradient R of the state after it
    gradients    one per multiprocessor        dq, dk, dg and dbeta                             delta_gradients.py

Each launch waits for the one before. Only walks go from chunk to chunk.

*Segments.* If heads are few, the plan cuts sequences into segments. A segment maps S to M S + X and R to M^T R + X'.
Walks without results make X, M and X'; delta_carry.py makes the states between segments of them, and walks with results
begin there. The chunks of a segment are those that `choose` of delta_ahead.py takes, by its model of the forward pass.

*Kept in float32.* `gradients` needs bfloat16's range, since it divides by beta: `solve` then counts a strength below
2^-40 in size as 2^-40, and w and dv are that small. float16 ends at 65504 and at 6e-8, and a scale far from 1 may leave
bfloat16's range, too. For these calls sums of products pass through memory in float32, the walk back stores r, and the
portable `gradients` reads them, which divides by nothing. Operands of float16 are divided by powers of 2 (`operand` of
tiles.py); the divisors of Y and P are a row of `factors`.

Limits: tokens of 16 bits, K and V of 64 or 128.
"""

from __future__ import annotations

import torch

from ..launch.hardware import Hardware
from ..launch.plan import Plan
from ..portable import delta_gradient
from ..portable.delta_forward import BETA, COARSE, FINE, SINCE, UNTIL, DeltaCall
from ..portable.delta_forward import ROWS as FACTORS
from . import SCALES, delta_ahead, delta_chunk
from .delta_carry import launch_carry
from .delta_gradients import Local, make_gradients
from .delta_solve import C, launch_solve
from .delta_walks import BV, DIVISORS, Walk, launch_walks
from .tiles import box

LEAST = 2.0**-40  # strengths below it in size count as it, where a gradient is divided by them; SCALES allows for it
SOLVE_REGISTERS = 128  # a thread's, in `solve`
KEPT_ROWS = {  # rows of `factors` (delta_solve.py)
    "BETA": BETA.value, "SINCE": SINCE.value, "UNTIL": UNTIL.value, "COARSE": COARSE.value, "FINE": FINE.value,
    "DIVISORS": DIVISORS.value,
}


def plan_backward(hardware: Hardware, call) -> Plan:
    """(dq, dk, dv, dg, dbeta, dS0); None for what is not given or, of dg, not needed."""
    shared, q, k, v, g, beta = delta_chunk.begin(hardware, call), call.q, call.k, call.v, call.g, call.beta
    draft, K, V, H, N, T, S_in = shared.draft, shared.K, shared.V, shared.H, shared.N, shared.T, shared.S_in
    do, scale = draft.gradient_of_o(v, call.do, shared.scale)
    _, length = delta_ahead.choose(hardware, K, V, H * N, shared.chunks, call.path)
    draft.because(f"T of all chunks first, then a program for each {BV.value} columns of V: Hopper, in Gluon")
    L, n = shared.segment(length, call.path, 2 * V // BV.value * H * N), shared.slots // H
    in_16_bits = q.dtype == torch.bfloat16 and SCALES[0] <= abs(scale) <= SCALES[1]
    if not in_16_bits:
        why = f"tokens are {q.dtype}" if q.dtype != torch.bfloat16 else f"scale is {scale}"
        draft.because(f"sums pass through memory in float32, and the portable kernel reads them: {why}")

    Y, P = (draft.new(name, n * H, C.value, 1, C.value, dtype=q.dtype) for name in "YP")
    factors = draft.new("factors", n, H, FACTORS + (q.dtype == torch.float16), C.value)
    solved = DeltaCall(
        draft=draft, cu=shared.cu, B=shared.B, T=T, H=H, K=K, V=V, G=shared.G, N=N, scale=scale, gated=g is not None,
        kept=q.dtype if in_16_bits else torch.float32, C=C.value, L=L, BK=K, BV=BV.value, chunks=n, warps=4, stages=1,
        P=P, Y=Y, factors=factors,
    )
    d_q, d_k, d_v, d_do = (box(x, C.value, width) for x, width in ((q, K), (k, K), (v, BV.value), (do, BV.value)))
    d_Y, d_P = (box(x, C.value, C.value) for x in (Y, P))
    least = LEAST if in_16_bits else 0.0
    launch_solve(solved, d_q, d_k, g, beta, d_Y, d_P, factors, SOLVE_REGISTERS, least, **KEPT_ROWS)

    tokens = {"q": d_q, "k": d_k, "v": d_v, "do": d_do, "d_Y": d_Y, "d_P": d_P}
    R_in = delta_gradient.gradient_of_state(draft, call.dS, scale)
    R_0 = draft.new("R_0", N, H, K, V) if S_in else None
    last = R_0
    if L <= T:
        part, part_back = (draft.new(f"part{x}", solved.segments, H, K, W) for x, W in (("", V + K), ("_back", V)))
        launch_walks(solved, tokens, Walk(None, part), Walk(None, part_back))
        launch_carry(solved, part, part_back, S_in, R_in, R_0)
        S_in, R_in, last = part, part_back, None
    sizes = (V, K) if in_16_bits else (K, V)
    states, dstates = (draft.new(name, n, H, *sizes, dtype=solved.kept) for name in ("states", "dstates"))
    writes, rows = (draft.new(name, *v.shape, dtype=solved.kept) for name in ("writes", "dv" if in_16_bits else "r"))
    launch_walks(solved, tokens, Walk(S_in, None, states, writes), Walk(R_in, last, dstates, rows))
    if in_16_bits:
        made = make_gradients(solved, Local(q, k, g, do, states, writes, dstates, rows), beta, call.need_dg)
    else:
        local = delta_gradient.Local(q, k, v, g, do, states, writes, dstates, rows)
        made = delta_gradient.finish(solved, local, draft.like("dbeta", beta), call.need_dg)
    dS0 = draft.compute("dS0", torch.mul, R_0, scale)
    return draft.plan("hopper", *made, dS0)
