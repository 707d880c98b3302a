"""The gated delta rule, forward, on Hopper, without a solver: two groups share (1) and walk (chapter 23).

Equations (1) to (3) are those of hopper/delta_chunk.py, and hopper/delta_fused.py is the other schedule: there a solver
makes T and P a chunk ahead. Here nothing is ahead. No call chooses this kernel; it is there to be measured beside the
other one. A program owns a value head of a sequence, and has three roles of four warps each::

    loader     asks the copy engine (TMA) for q, k, v of a chunk               waits for `done`
    group 0    T of (1), then (2) and (3) for columns 0 to 63 of V             waits for `ready`, `done`, `made[1]`
    group 1    P of (1), then (2) and (3) for columns 64 to 127                waits for `ready`, `done`, `made[0]`

Without a solver the groups have 256 and 224 registers per thread, for S and the inverse at once. But the inverse is in
the way of the chain from state to state, and group 1 has only k S and q S to do meanwhile. Barriers of chunk c::

    ready[c % 2]    copy engine -> groups     the announced bytes    q, k and v are there
    made[D]         group D -> the other      1 arrival              D = 0: T is there; D = 1: P is there
    done[c % 4]     groups -> loader, groups  1 arrival per group    everything of c has been read

wait(bar, p) returns if the last phase that ended has parity p; in a fresh barrier that is phase -1, of parity 1. Chunk
c has phase c // n of a barrier with n slots, so roles wait for parity (c // n) & 1.

*No role waits for ever.* All roles go through the same chunks in order, and each wait of chunk c is for an earlier
event: the loader for `done` of c - 2; a group for `ready` of c, then, to store T or P, for `done` of c - 1; then for
what the other group makes of c, which needs no more than those. A group arrives at `done` of c after all its waits.

*No role is two phases late*, where parity would deceive: a role that waits for chunk c at a barrier of n slots has
passed before chunk c + n ends its phase there. `ready` of c + 2 needs `done` of c, that is, both groups past `ready`
and `made` of c. `made[D]` of c + 1 needs `done` of c, too: its maker waits for that before it stores. A role that waits
for `done` of c - a, a <= 2, has yet to load chunk c or to make its T or P; the next phase of that slot is that of
c - a + 4 > c, which needs both.

*T and P have one place each.* Both groups have read T and P of c - 1 when `done` of c - 1 ends. `done` of c also tells
the loader that q, k and v of c have been read, by this group's part of (1) as well: its products are over before it
stores what it makes.

Proxies and barriers' bytes: delta_fused.py. *Shared memory*, 187 KB of 227: q, k and v 96, S 32, e^(b_C - b) w (then o)
16, T and P 16, the inverse 24, decays and barriers 3. A chunk moves as many bytes as there, and needs the same FLOPs.

Limits: bf16, K = V = 128, no packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Plan
from . import delta_chunk
from .delta_chunk import (
    VARYING,
    decays,
    load_state,
    load_tokens,
    read,
    row_column,
    since_until,
    state_columns,
    store_o,
    strides,
    summed,
    write,
)
from .delta_inverse import allocate_scratch, eliminate, is_strong, largest, spread
from .delta_inverse import inverse as invert
from .gluon import copy_in, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate, new_barriers
from .tiles import box

C, BV, GROUPS = gl.constexpr(64), gl.constexpr(64), gl.constexpr(2)  # tokens of a chunk, columns of a group, groups
STAGES, SLOTS = gl.constexpr(2), gl.constexpr(4)  # chunks that lie in shared memory; places for `done`
SIZE = 128  # K and V


@gluon.jit
def wait_done(done, c, ago: gl.constexpr):
    """Until both groups are done with chunk c - ago, ago < SLOTS; at once if there is none."""
    i = c + SLOTS - ago
    mbarrier.wait(done.index(i % SLOTS), ((i // SLOTS) & 1) ^ 1)


class Tiles(NamedTuple):
    """The tiles of several chunks in shared memory."""

    q: object
    k: object
    v: object
    T: object
    P: object


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each place."""

    ready: object  # both groups: until the copies have come
    made: object  # the other group: until this one's part of T or P is made
    done: object  # the loader: until both groups have read the chunk


@gluon.jit
def loader(q, k, v, tiles, bars, i_b, i_h, i_k, n):
    """Bring each chunk; what lies beyond the tensor comes as zeros."""
    for c in range(n):
        s = c % STAGES
        wait_done(bars.done, c, STAGES)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, 2 * k.block_type.nbytes + GROUPS * v.block_type.nbytes)
        copy_in(k, [i_b, i_k, c * C, 0], bar, tiles.k.index(s))
        copy_in(q, [i_b, i_k, c * C, 0], bar, tiles.q.index(s))
        for d in gl.static_range(GROUPS):
            copy_in(v, [i_b, i_h, c * C, d * BV], bar, tiles.v.index(s * GROUPS + d))


@gluon.jit
def allocate_decays():
    """A group's running sums, e^b and e^(b_C - b) of a chunk."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_sums = gl.allocate_shared_memory(gl.float32, [2, C], line)
    t_since = gl.allocate_shared_memory(gl.float32, [C], line)
    t_until = gl.allocate_shared_memory(gl.float32, [C], line)
    return t_sums, t_since, t_until


@gluon.jit
def scores(left, b_k, t_sums, layout: gl.constexpr):
    """(left k^T) * E of rows `left` [C, K], [C, C]; above the diagonal it may be infinite."""
    none = gl.zeros([C, C], gl.float32, layout)
    x = warpgroup_mma(left, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
    E = decays(t_sums, layout)
    return warpgroup_mma_wait(0, deps=[x]) * E


@gluon.jit
def inverse(N, t_beta, scratch, never, EXACT: gl.constexpr, layout: gl.constexpr):
    """(I - N)^-1 diag(beta)."""
    spread(N, scratch, EXACT)
    eliminate(scratch, never, EXACT)
    Y = invert(scratch, EXACT, layout)
    return Y * t_beta.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def group(tokens, outputs, tiles, bars, own, which, strong, zero, EXACT: gl.constexpr, D: gl.constexpr):
    """T (D = 0) or P (D = 1) of each chunk, then (2) and (3) for columns D * BV on, from S_in to S_out."""
    g, beta, s_g, s_beta = tokens
    o, d_o, S_in, S_out = outputs
    t_decays, t_made, t_S, t_u, t_beta, scratch = own
    t_sums, t_since, t_until = t_decays
    i_b, i_h, n, T, HV, scale = which
    K: gl.constexpr = tiles.q.shape[4]
    V: gl.constexpr = GROUPS * BV
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    of_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    S, factor = load_state(S_in, i_b, i_h, D * BV, t_S, HV, V, of_S)
    rows = gl.arange(0, C, layout=line)
    b_g = load_tokens(g, s_g, i_b, i_h, rows, T)
    if D == 0:
        b_beta = load_tokens(beta, s_beta, i_b, i_h, rows, T)
        most = largest(gl.zeros([C, C], gl.float32, wide))
    for c in range(n):
        s = c % STAGES
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_v = tiles.v.index(s * GROUPS + D).reshape([C, BV])
        # decays of this chunk; the next chunk's gates are asked for long before they are needed
        rows += C
        coarse, fine = summed(b_g)
        b_g = load_tokens(g, s_g, i_b, i_h, rows, T)
        t_sums.index(0).store(coarse)
        t_sums.index(1).store(fine)
        since, until = since_until(coarse, fine, C, line)
        t_since.store(since)
        t_until.store(until)

        if D == 0:
            t_beta.store(b_beta)
            b_beta = load_tokens(beta, s_beta, i_b, i_h, rows, T)

        # (1), shared by the groups
        mbarrier.wait(bars.ready.index(s), (c // STAGES) & 1)
        i, j = row_column(C, wide)
        if D == 0:
            strength = -t_beta.load(gl.SliceLayout(1, wide))[:, None]
            N = gl.where(i > j, strength * scores(b_k, b_k, t_sums, wide), 0.0)
            if not EXACT:
                most = gl.maximum(most, largest(N))
            low = inverse(N, t_beta, scratch, c & zero, EXACT, wide).to(gl.bfloat16)
        else:
            low = gl.where(i >= j, scores(b_q, b_k, t_sums, wide), 0.0).to(gl.bfloat16)
        wait_done(bars.done, c, 1)
        t_made.store(low)
        fence_async_shared()
        mbarrier.arrive(bars.made.index(D), count=1)

        # (2) and (3)
        x, b_o = read(b_k, t_S, of_S), read(b_q, t_S, of_S)
        mbarrier.wait(bars.made.index(1 - D), c & 1)
        S, factor, b_o = write(
            S,
            factor,
            x,
            b_o,
            b_k,
            b_v,
            tiles.T,
            tiles.P,
            t_S,
            t_u.reshape([C, BV]),
            None,
            None,
            t_since.load(gl.SliceLayout(1, of_S))[:, None],
            t_until.load(gl.SliceLayout(1, of_S))[:, None],
            gl.sum(t_since.slice(C - 1, 1).load(one), 0),  # e^(b_C)
            of_S,
        )
        mbarrier.arrive(bars.done.index(c % SLOTS), count=1)
        store_o(o, d_o, (b_o * scale).to(d_o.dtype), t_u, i_b, i_h, c * C, T, D * BV, HV, V, of_S, False)
    if D == 0 and not EXACT:
        gl.store(strong, is_strong(most).to(gl.int32))
    tma.store_wait(0)
    gl.store(state_columns(S_out, i_b, i_h, D * BV, HV, K, V, BV, of_S), S)


@gluon.jit(do_not_specialize=VARYING)
def in_turn(
    q,
    k,
    v,
    g,
    beta,
    s_gb,
    s_gt,
    s_gh,
    s_bb,
    s_bt,
    s_bh,
    d_o,
    o,
    S_in,
    S_out,
    strong,
    T,
    HV,
    G,
    scale,
    zero,
    K: gl.constexpr,
    EXACT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A value head of a sequence, chunk by chunk, from its state in S_in (or zeros) to S_out.

    q, k, v are boxes, and so is d_o, of the tensor o.
    """
    strong += gl.program_id(0)
    if EXACT:
        if gl.load(strong) == 0:
            return
    # this program's tile: neighbours are value heads of one key head, which share what they read in L2
    i_h, i_b = gl.program_id(0) % HV, gl.program_id(0) // HV
    n = gl.cdiv(T, C)

    # shared memory
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [STAGES * GROUPS, 1, 1, C, BV], v.layout)
    t_T = gl.allocate_shared_memory(k.dtype, [C, C], square)
    t_P = gl.allocate_shared_memory(k.dtype, [C, C], square)
    t_S = gl.allocate_shared_memory(k.dtype, [GROUPS, K, BV], square)
    t_u = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, C, BV], d_o.layout)
    t_beta = gl.allocate_shared_memory(gl.float32, [C], line)
    bars = Barriers(new_barriers(STAGES, 1), new_barriers(GROUPS, 1), new_barriers(SLOTS, GROUPS))
    fence_async_shared()

    tokens, outputs = (g, beta, (s_gb, s_gt, s_gh), (s_bb, s_bt, s_bh)), (o, d_o, S_in, S_out)
    tiles, which = Tiles(t_q, t_k, t_v, t_T, t_P), (i_b, i_h, n, T, HV, scale)
    own_0 = (allocate_decays(), t_T, t_S.index(0), t_u.index(0), t_beta, allocate_scratch())
    own_1 = (allocate_decays(), t_P, t_S.index(1), t_u.index(1), None, None)
    gl.warp_specialize(
        [
            (group, (tokens, outputs, tiles, bars, own_0, which, strong, zero, EXACT, 0)),
            (group, (tokens, outputs, tiles, bars, own_1, which, strong, zero, EXACT, 1)),
            (loader, (q, k, v, tiles, bars, i_b, i_h, i_h // G, n)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )
    invalidate(bars)


# The plan.


def plan_forward(hardware: Hardware, call) -> Plan:
    """(o, final state)."""
    shared, q, k, v, g, beta = delta_chunk.begin(hardware, call), call.q, call.k, call.v, call.g, call.beta
    draft = shared.draft
    o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", shared.N, shared.H, SIZE, SIZE)
    strong = draft.new("strong", shared.H * shared.N, dtype=torch.int32)
    for exact in (0, 1):
        draft.launch(
            in_turn,
            shared.H * shared.N,
            box(q, C.value, SIZE),
            box(k, C.value, SIZE),
            box(v, C.value, BV.value),
            g,
            beta,
            *strides(g),
            *strides(beta),
            d_o=box(o, C.value, BV.value),
            o=o,
            S_in=shared.S_in,
            S_out=S_T,
            strong=strong,
            T=shared.T,
            HV=shared.H,
            G=shared.G,
            scale=shared.scale,
            zero=0,
            K=SIZE,
            EXACT=exact,
            REGISTERS=224,  # a thread of group 1; group 0, which makes the inverse, gets what is left: 256
            num_warps=4,
            maxnreg=168,
        )
    return draft.plan("hopper_in_turn", o, S_T)
