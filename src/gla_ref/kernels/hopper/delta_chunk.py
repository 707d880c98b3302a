"""One chunk of the delta rules on Hopper: the parts that its schedules share (chapters 20 and 21).

With b the running sum of a chunk's gates (0 without them) and E_ij = e^(b_i - b_j) for j <= i, 0 above the diagonal::

    N = -tril(beta_i (k_i k_j^T) E_ij, -1)     P = (q k^T) * E     T = (I - N)^-1 diag(beta)     (1)
    v' = v - e^b (k S)                         w = T v'                                          (2)
    o = scale * (e^b (q S) + P w)              S <- e^(b_C) S + k^T (e^(b_C - b) w)              (3)

portable/delta_forward.py has the same algebra with A = -N, Y = (I + A)^-1 and beta in v'. (1) needs no state:
delta_ahead.py makes it of all chunks before (2) and (3), delta_fused.py beside them, both with delta_inverse.py. (2)
and (3) are a chain from state to state: `read` and `write`, for four warps and up to 64 columns of V, since columns of
the state never meet.

*The decays* come from the two sums of portable/scalar_gates.py, `summed` there. Above the diagonal e^(b_i - b_j) may be
infinite, so `where` selects after the product. A NaN among gates stays NaN.

*float16* ends at 65504. So T, P, S, v', w and e^(b_C - b) w are divided by powers of 2 before they are rounded to
float16 (`operand`), and their products are multiplied by them.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import _contract as contract
from ..launch.hardware import Hardware
from ..launch.plan import Draft, Spec, cdiv
from ..portable import tiles as portable
from ..portable.segments import sequences, slots
from .gluon import barrier, fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from .tiles import LOG2E, operand

C = gl.constexpr(64)  # tokens of a chunk
# arguments that change from call to call: Triton shall compile no variants for 1 and for multiples of 16
VARYING = (*portable.VARYING, "HV", "G", "n_forwards", "zero")


@gluon.jit
def which_sequence(cu, i_n, T):
    """(batch row, start, stop) of sequence i_n."""
    if cu is None:
        return i_n, i_n * 0, i_n * 0 + T
    else:
        return i_n * 0, gl.load(cu + i_n).to(gl.int32), gl.load(cu + i_n + 1).to(gl.int32)


@gluon.jit
def load_tokens(x, strides, i_b, i_h, rows, end):
    """x [B, T, HV] of a head's tokens: zeros from row `end` on."""
    p = x + i_b.to(gl.int64) * strides[0] + rows.to(gl.int64) * strides[1] + i_h.to(gl.int64) * strides[2]
    return gl.load(p, mask=rows < end, other=0.0).to(gl.float32)


@gluon.jit
def row_column(C: gl.constexpr, layout: gl.constexpr):
    """Row [C, 1] and column [1, C] of a square tile's elements."""
    i, j = gl.arange(0, C, layout=gl.SliceLayout(1, layout)), gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return i[:, None], j[None, :]


# (1)


@gluon.jit
def add_both(x, y, more_x, more_y):
    return x + more_x, y + more_y


@gluon.jit
def summed(b_g):
    """(coarse, fine) running sums of a chunk's gates [C] in base 2, as portable/scalar_gates.py explains."""
    b_g = b_g * LOG2E
    b_g = gl.where(b_g < -150.0, -150.0, b_g)  # NaN is not below, and stays
    coarse = gl.floor(b_g * 512.0 + 0.5) * (1.0 / 512.0)
    return gl.associative_scan((coarse, b_g - coarse), 0, add_both)


@gluon.jit
def since_until(coarse, fine, C: gl.constexpr, layout: gl.constexpr):
    """e^b and e^(b_C - b) of the rows [C] of a chunk."""
    last = gl.arange(0, C, layout=layout) == C - 1
    all_coarse, all_fine = gl.sum(gl.where(last, coarse, 0.0), 0), gl.sum(gl.where(last, fine, 0.0), 0)
    return gl.exp2(coarse + fine), gl.exp2((all_coarse - coarse) + (all_fine - fine))


@gluon.jit
def decays(t_sums, layout: gl.constexpr):
    """e^(b_i - b_j) for all i and j, from the sums [2, C] in shared memory: above the diagonal it may be infinite."""
    t_coarse, t_fine = t_sums.index(0), t_sums.index(1)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    of_column: gl.constexpr = gl.SliceLayout(0, layout)
    coarse = t_coarse.load(of_row)[:, None] - t_coarse.load(of_column)[None, :]
    fine = t_fine.load(of_row)[:, None] - t_fine.load(of_column)[None, :]
    return gl.exp2(coarse + fine)


# (2) and (3)


# a chunk's tiles in shared memory for `write`, and its decays [C] and e^(b_C)
Chunk = namedtuple("Chunk", "k v T P u")
Decays = namedtuple("Decays", "since until through")
Results = namedtuple("Results", "o d_o S_in S_out")  # a walk's; d_o: the tensor o as a box. S_in is where it begins


@gluon.jit
def state_columns(x, part, K: gl.constexpr, W: gl.constexpr, BV: gl.constexpr, layout: gl.constexpr):
    """Pointers to a part's columns of states x [slots, HV, K, W], [K, BV]."""
    o_k, o_c = gl.arange(0, K, layout=gl.SliceLayout(1, layout)), gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
    x += (part.i_s * part.HV + part.i_h).to(gl.int64) * K * W + part.o_v
    return x + (o_k[:, None] * W + o_c[None, :])


@gluon.jit
def load_state(S_in, part, t_S, W: gl.constexpr, layout: gl.constexpr, UNIT: gl.constexpr = None):
    """The state before the first chunk, and the factor of its copy in t_S.

    Without S_in it is zeros, and from column UNIT on the unit matrix.
    """
    K: gl.constexpr = t_S.shape[0]
    BV: gl.constexpr = t_S.shape[1]
    if S_in is not None:
        S = gl.load(state_columns(S_in, part, K, W, BV, layout))
    else:
        S = gl.zeros([K, BV], gl.float32, layout)
    if UNIT is not None:
        o_k, o_c = gl.arange(0, K, layout=gl.SliceLayout(1, layout)), gl.arange(0, BV, layout=gl.SliceLayout(0, layout))
        S = gl.where((UNIT + o_k)[:, None] == (part.o_v + o_c)[None, :], 1.0, S)
    low, of_S = operand(S, t_S.dtype)
    t_S.store(low)
    fence_async_shared()
    return S, of_S


@gluon.jit
def read(b_x, t_S, layout: gl.constexpr):
    """Begin k S, or q S."""
    C: gl.constexpr = b_x.shape[0]
    BV: gl.constexpr = t_S.shape[1]
    none = gl.zeros([C, BV], gl.float32, layout)
    return warpgroup_mma(b_x, t_S, none, use_acc=False, is_async=True)


@gluon.jit
def write(S, of_S, x, b_o, chunk, t_S, divisors, decays, layout: gl.constexpr):
    """(2) and (3), after `read` of k and then q: S, the factor of its copy in t_S, and o over scale.

    v', then w replace v; u has e^(b_C - b) w, and o may follow once all warps are done. Without gates, decays are None.
    If no o is wanted b_o is None, as are the chunk's P and u, and e^(b_C - b) w replaces v'.
    """
    b_k, b_v, t_u = chunk.k, chunk.v, chunk.u
    FLOAT16: gl.constexpr = b_k.dtype == gl.float16
    READ: gl.constexpr = 1 if b_o is not None else 0  # products for o, which may be under way after the state's
    C: gl.constexpr = b_v.shape[0]
    BV: gl.constexpr = b_v.shape[1]
    none = gl.zeros([C, BV], gl.float32, layout)
    v = b_v.load(layout).to(gl.float32)
    x = warpgroup_mma_wait(READ, deps=[x])
    if FLOAT16:
        x = x * of_S
    if decays is not None:
        x = x * decays.since[:, None]
    low, of_v = operand(v - x, b_k.dtype)
    b_v.store(low)
    fence_async_shared()
    w = warpgroup_mma(chunk.T, b_v, none, use_acc=False, is_async=True)
    if READ:
        b_o = warpgroup_mma_wait(1, deps=[b_o])
        if FLOAT16:
            b_o = b_o * of_S
        if decays is not None:
            b_o = b_o * decays.since[:, None]
    if decays is not None:
        S = S * decays.through
    w = warpgroup_mma_wait(0, deps=[w])
    if FLOAT16:
        w = w * (of_v * divisors[0])
    tma.store_wait(0)  # the last o, which lies in t_u, has been read
    if decays is not None:
        low, of_u = operand(w * decays.until[:, None], b_k.dtype)
    else:
        low, of_u = operand(w, b_k.dtype)
    if READ:
        t_u.store(low)
    else:
        barrier()  # all warps' products have read v'
        b_v.store(low)
    fence_async_shared()
    barrier()  # all warps' products have read v' and S
    if FLOAT16:
        S = S / of_u
    S = warpgroup_mma(b_k.permute((1, 0)), t_u if READ else b_v, S, is_async=True)
    if READ:
        low, of_w = operand(w, b_k.dtype)
        b_v.store(low)
        fence_async_shared()
        if FLOAT16:
            b_o = b_o / (of_w * divisors[1])
        b_o = warpgroup_mma(chunk.P, b_v, b_o, is_async=True)
    S = warpgroup_mma_wait(READ, deps=[S])
    if FLOAT16:
        S = S * of_u
    low, of_S = operand(S, b_k.dtype)
    t_S.store(low)
    fence_async_shared()
    if READ:
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        if FLOAT16:
            b_o = b_o * (of_w * divisors[1])
    else:
        b_o = none  # a function cannot return None
    barrier()  # all warps' products have read q, k, w, T, P and t_u
    return S, of_S, b_o


# The plan.


def strides(x: Spec | None) -> tuple[int, ...]:
    """Strides of gates or strengths [B, T, HV]; zeros where there are none."""
    return (0, 0, 0) if x is None else x.strides


class Shared(NamedTuple):
    """The sizes, tiles and tensors that the launches of one call share."""

    draft: Draft
    cu: Spec | None
    S_in: Spec | None
    B: int
    T: int
    H: int  # value heads
    K: int
    V: int
    G: int  # value heads that read one key head
    N: int  # sequences
    scale: float

    @property
    def chunks(self) -> int:
        """The chunks of a sequence; of the mean one if sequences are packed."""
        chunks = cdiv(self.T, C.value)
        return cdiv(chunks, self.N) if self.cu else chunks

    @property
    def slots(self) -> int:
        """Slots for the chunks of all value heads."""
        return self.H * slots(self.B, self.T, self.cu, C.value)

    def segment(self, length: int, path: str | None, programs: int) -> int:
        """Tokens of a segment of so many chunks; more than T to walk over each sequence in one go. The plan says why.

        path: what was asked for. programs: those of a walk in one go.
        """
        L = C.value * length if path == "segmented" or length < self.chunks else self.T + 1
        # a sequence of less than one segment is walked in one go
        parts = f"segments of {length} of its {cdiv(self.T, C.value)} chunks" if L <= self.T else "one go"
        who = "it was asked for" if path else f"{programs} programs for {self.draft.hardware}"
        self.draft.because(f"each sequence in {parts}: {who}")
        return L


def begin(hardware: Hardware, call) -> Shared:
    """Begin the plan of a call, or of its gradients."""
    draft, (B, T, heads, K), (H, V) = Draft(hardware, *call), call.q.shape, call.v.shape[2:]
    scale, cu = contract.check_scale(call.scale, K), draft.contiguous(call.cu_seqlens, torch.int32)
    S_in = draft.contiguous(call.initial_state, torch.float32)
    return Shared(draft, cu, S_in, B, T, H, K, V, H // heads, sequences(B, cu), scale)
