"""The delta rules, forward, on Hopper, for many heads: everything in one program (chapters 20 and 23).

Equations (1) to (3) are those of delta_chunk.py. A program owns a value head of a sequence. It has three kinds of roles
of four warps each, because setmaxnreg is one instruction of a whole warpgroup::

    loader    asks the copy engine (TMA) for q, k, v of a chunk              waits for `done`
    solver    (1) and the decays of a chunk                                  waits for `ready`
    walker    (2) and (3) for 64 columns of V; S in its registers; o out     waits for `ready`, `solved`

V = 128 has two walkers. The solver works a chunk ahead of the walkers, so everything of a chunk has two places. Chunk c
lies in place s = c % 2, and its round is j = c // 2. Each place has three barriers::

    ready     copy engine -> solver, walkers    the announced bytes      q, k and v are there
    solved    solver -> walkers                 1 arrival                T, P and decays are there
    done      walkers -> loader                 1 arrival per walker     everything of c has been read

wait(bar, p) returns if the last phase that ended has parity p; in a fresh barrier that is phase -1, of parity 1. Roles
wait at `ready` and `solved` for phase j, of parity j & 1, the loader at `done` for phase j - 1.

*No role waits for ever.* All roles go through the same chunks in order, and each wait of chunk c is for an earlier
event: the loader's for `done` of c - 2, the solver's for `ready` of c, the walkers' for `ready` and `solved` of c.

*No role is two phases late*, where parity would deceive. `ready` of round j + 1 needs `done` of round j, that is, both
walkers past `ready` and `solved` of j, and `solved` of j needs the solver past `ready` of j. `solved` of j + 1 needs
`ready` of j + 1. The loader waits for `done` of j - 1 before it asks for round j, whose `done` comes later.

*Nothing is overwritten too early*: the solver, once past `ready` of c, knows that the walkers are done with c - 2. Its
own products have read q and k before it arrives at `solved`.

*Packed sequences.* The last chunk of a sequence may end with rows of the next one. The solver overwrites these rows of
q, k and v with zeros, and the walkers wait for `solved` before they read them. Gates and strengths of these rows are
zeros.

*Proxies.* WGMMA and the copy engine see what threads wrote only after these threads' fence, so a fence follows every
store that they read or overwrite. *Barriers own their bytes* until they are invalidated (gla_forward.py), and every one
has a role that waits for it.

*Shared memory* at K = V = 128, 202 KB of 227: q and k 64, v (then v', then w) 32, S 32, e^(b_C - b) w (then o) 16, T
and P 32, the inverse 24, decays and barriers 2. A chunk moves 2 C (2 K + 2 V) = 64 KB for 2 C (2 C K + 3 K V + 2 C V) =
10.5 MFLOP and 1 MFLOP for the inverse.

Limits: tokens of 16 bits, K and V of 64 or 128. A plan takes this kernel where there are too many heads
for delta_ahead.py.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..launch.hardware import Hardware
from ..launch.plan import Plan
from . import delta_chunk
from .delta_chunk import (
    VARIABLE,
    allocate_scratch,
    inverse,
    load_state,
    load_tokens,
    pairs,
    read,
    since_until,
    state_columns,
    store_o,
    strides,
    summed,
    which_sequence,
    write,
)
from .gluon_names import named
from .tiles import box, keep_rows, operand

copy_in = named("copy_in")

C, BV = gl.constexpr(64), gl.constexpr(64)  # tokens of a chunk, columns of a walker
PLACES = gl.constexpr(2)  # chunks that lie in shared memory, with all that belongs to them


class Tiles(NamedTuple):
    """The tiles of each chunk in shared memory."""

    q: object
    k: object
    v: object  # a tile for each walker
    T: object
    P: object
    since: object  # the decays, as the next; None without gates
    until: object
    factors: object  # the divisors of T and P in float16; else None


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each place."""

    ready: object  # solver and walkers: until the copies have come
    solved: object  # walkers: until T, P and the decays are made
    done: object  # the loader: until all walkers have read the chunk


@gluon.jit
def loader(q, k, v, tiles, bars, i_b, i_h, i_k, begin, n):
    """Bring q, k, v of each chunk; what lies beyond the tensor comes as zeros."""
    n_v: gl.constexpr = tiles.v.shape[0] // PLACES  # walkers, with a tile of v each
    for c in range(n):
        s, o_t = c % PLACES, begin + c * C
        mbarrier.wait(bars.done.index(s), ((c // PLACES) & 1) ^ 1)
        bar = bars.ready.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, 2 * k.block_type.nbytes + n_v * v.block_type.nbytes)
        copy_in(k, [i_b, i_k, o_t, 0], bar, tiles.k.index(s))
        copy_in(q, [i_b, i_k, o_t, 0], bar, tiles.q.index(s))
        for d in gl.static_range(n_v):
            copy_in(v, [i_b, i_h, o_t, d * BV], bar, tiles.v.index(s * n_v + d))


@gluon.jit
def solver(g, beta, s_g, s_beta, tiles, bars, own, cu, i_b, i_h, begin, end, n):
    """(1) and the decays of each chunk."""
    t_sums, t_beta, scratch = own
    PACKED: gl.constexpr = cu is not None
    K: gl.constexpr = tiles.q.shape[4]
    n_v: gl.constexpr = tiles.v.shape[0] // PLACES
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    rows = begin + gl.arange(0, C, layout=line)
    b_beta = load_tokens(beta, s_beta, i_b, i_h, rows, end)
    if g is not None:
        b_g = load_tokens(g, s_g, i_b, i_h, rows, end)
    for c in range(n):
        s = c % PLACES
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        t_beta.store(b_beta)
        rows += C  # the next chunk's gates are asked for long before they are needed
        b_beta = load_tokens(beta, s_beta, i_b, i_h, rows, end)
        if g is not None:
            coarse, fine = summed(b_g)
            t_sums.index(0).store(coarse)
            t_sums.index(1).store(fine)
            since, until = since_until(coarse, fine, C, line)
            b_g = load_tokens(g, s_g, i_b, i_h, rows, end)
        mbarrier.wait(bars.ready.index(s), (c // PLACES) & 1)
        if PACKED:
            left = end - begin - c * C
            if left < C:  # the rest is another sequence's
                keep_rows(b_q, left, of_k)
                keep_rows(b_k, left, of_k)
                for d in gl.static_range(n_v):
                    keep_rows(tiles.v.index(s * n_v + d).reshape([C, BV]), left, of_v)
                fence_async_shared()
        N, P, of_P = pairs(b_q, b_k, t_sums, t_beta, wide)
        tiles.P.index(s).store(P)
        if g is not None:
            tiles.since.index(s).store(since)
            tiles.until.index(s).store(until)
        T, of_T = operand(inverse(N, t_beta, scratch, wide), tiles.T.dtype)
        tiles.T.index(s).store(T)
        if tiles.factors is not None:
            tiles.factors.index(2 * s).store(gl.full([1], 1.0, gl.float32, one) * of_T)
            tiles.factors.index(2 * s + 1).store(gl.full([1], 1.0, gl.float32, one) * of_P)
        fence_async_shared()
        mbarrier.arrive(bars.solved.index(s), count=1)


@gluon.jit
def walker(outputs, tiles, bars, cu, which, t_S, t_u, D: gl.constexpr):
    """(2) and (3) for columns D * BV on, from S_in to S_out."""
    o, d_o, S_in, S_out = outputs
    i_n, i_b, i_h, begin, end, n, HV, scale = which
    PACKED: gl.constexpr = cu is not None
    K: gl.constexpr = tiles.q.shape[4]
    n_v: gl.constexpr = tiles.v.shape[0] // PLACES
    V: gl.constexpr = n_v * BV
    of_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # [K, BV] and [C, BV]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S, factor = load_state(S_in, i_n, i_h, D * BV, t_S, HV, V, of_S)
    for c in range(n):
        s, o_t = c % PLACES, begin + c * C
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_v = tiles.v.index(s * n_v + D).reshape([C, BV])
        mbarrier.wait(bars.ready.index(s), (c // PLACES) & 1)
        if PACKED:
            if end - o_t < C:  # the solver puts zeros into k
                mbarrier.wait(bars.solved.index(s), (c // PLACES) & 1)
        x, b_o = read(b_k, t_S, of_S), read(b_q, t_S, of_S)
        mbarrier.wait(bars.solved.index(s), (c // PLACES) & 1)
        if tiles.since is not None:
            since = tiles.since.index(s).load(gl.SliceLayout(1, of_S))[:, None]
            until = tiles.until.index(s).load(gl.SliceLayout(1, of_S))[:, None]
            through = gl.sum(tiles.since.index(s).slice(C - 1, 1).load(one), 0)  # e^(b_C)
        else:
            since: gl.constexpr = None
            until: gl.constexpr = None
            through: gl.constexpr = None
        if tiles.factors is not None:
            of_T = gl.sum(tiles.factors.index(2 * s).load(one), 0)
            of_P = gl.sum(tiles.factors.index(2 * s + 1).load(one), 0)
        else:
            of_T: gl.constexpr = None
            of_P: gl.constexpr = None
        S, factor, b_o = write(
            S,
            factor,
            x,
            b_o,
            b_k,
            b_v,
            tiles.T.index(s),
            tiles.P.index(s),
            t_S,
            t_u.reshape([C, BV]),
            of_T,
            of_P,
            since,
            until,
            through,
            of_S,
        )
        mbarrier.arrive(bars.done.index(s), count=1)
        store_o(o, d_o, (b_o * scale).to(d_o.dtype), t_u, i_b, i_h, o_t, end, D * BV, HV, V, of_S, PACKED)
    tma.store_wait(0)
    gl.store(state_columns(S_out, i_n, i_h, D * BV, HV, K, V, BV, of_S), S)


@gluon.jit(do_not_specialize=VARIABLE)
def fused(
    q, k, v, g, beta, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, d_o, o, S_in, S_out, cu, T, HV, G, scale,
    K: gl.constexpr, V: gl.constexpr, R_WALKER: gl.constexpr, R_SOLVER: gl.constexpr,
):
    """A value head of a sequence, chunk by chunk, from its state in S_in (or zeros) to S_out.

    q, k, v are boxes, and so is d_o, of the tensor o. g may be None: the delta rule.
    """
    WALKERS: gl.constexpr = V // BV
    # this program's tile: neighbours are value heads of one key head, which share what they read in L2
    i_h, i_n = gl.program_id(0) % HV, gl.program_id(0) // HV
    i_b, begin, end = which_sequence(cu, i_n, T)
    n = gl.cdiv(end - begin, C)

    # shared memory
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_q = gl.allocate_shared_memory(q.dtype, [PLACES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [PLACES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [PLACES * WALKERS, 1, 1, C, BV], v.layout)
    t_T = gl.allocate_shared_memory(k.dtype, [PLACES, C, C], square)
    t_P = gl.allocate_shared_memory(k.dtype, [PLACES, C, C], square)
    t_S = gl.allocate_shared_memory(k.dtype, [WALKERS, K, BV], square)
    t_u = gl.allocate_shared_memory(k.dtype, [WALKERS, 1, 1, C, BV], d_o.layout)
    t_beta = gl.allocate_shared_memory(gl.float32, [C], line)
    if g is not None:
        t_since = gl.allocate_shared_memory(gl.float32, [PLACES, C], line)
        t_until = gl.allocate_shared_memory(gl.float32, [PLACES, C], line)
        t_sums = gl.allocate_shared_memory(gl.float32, [2, C], line)
    else:
        t_since: gl.constexpr = None
        t_until: gl.constexpr = None
        t_sums: gl.constexpr = None
    if k.dtype == gl.float16:
        t_factors = gl.allocate_shared_memory(gl.float32, [2 * PLACES, 1], line)
    else:
        t_factors: gl.constexpr = None
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    solved = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PLACES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(solved.index(s), count=1)
        mbarrier.init(done.index(s), count=WALKERS)
    fence_async_shared()

    tiles, bars = Tiles(t_q, t_k, t_v, t_T, t_P, t_since, t_until, t_factors), Barriers(ready, solved, done)
    own = (t_sums, t_beta, allocate_scratch())
    outputs, which = (o, d_o, S_in, S_out), (i_n, i_b, i_h, begin, end, n, HV, scale)
    of_loader = (q, k, v, tiles, bars, i_b, i_h, i_h // G, begin, n)
    s_g, s_beta = (s_gb, s_gt, s_gh), (s_bb, s_bt, s_bh)
    of_solver = (g, beta, s_g, s_beta, tiles, bars, own, cu, i_b, i_h, begin, end, n)
    if WALKERS == 2:
        gl.warp_specialize(
            [
                (walker, (outputs, tiles, bars, cu, which, t_S.index(0), t_u.index(0), 0)),
                (walker, (outputs, tiles, bars, cu, which, t_S.index(1), t_u.index(1), 1)),
                (solver, of_solver),
                (loader, of_loader),
            ],
            [4, 4, 4],
            [R_WALKER, R_SOLVER, 24],
        )
    else:
        gl.warp_specialize(
            [
                (walker, (outputs, tiles, bars, cu, which, t_S.index(0), t_u.index(0), 0)),
                (solver, of_solver),
                (loader, of_loader),
            ],
            [4, 4],
            [R_SOLVER, 24],
        )
    # all roles are done: until here the barriers' bytes are theirs
    for s in gl.static_range(PLACES):
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(solved.index(s))
        mbarrier.invalidate(done.index(s))


# The plan.


class Roles(NamedTuple):
    """How a program is made."""

    registers: int  # a thread, at entry; the first walker gets what the others leave of them
    of_walker: int  # a thread of the second walker
    of_solver: int


ROLES = {64: Roles(160, 0, 216), 128: Roles(128, 160, 168)}  # by V


def plan_forward(hardware: Hardware, q, k, v, g, beta, S, cu, scale) -> Plan:
    """(o, final state) of specs of the tensors."""
    call = delta_chunk.begin(hardware, (q, k, v, g, beta, S, cu), scale)
    draft, K, V, roles = call.draft, call.K, call.V, ROLES[call.V]
    draft.because("the whole chunk in one program, a program a value head: the fused Hopper kernel, in Gluon")
    o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", call.N, call.H, K, V)
    draft.launch(
        fused, call.H * call.N,
        box(q, C.value, K), box(k, C.value, K), box(v, C.value, BV.value), g, beta, *strides(g), *strides(beta),
        box(o, C.value, BV.value), o, call.S_in, S_T, call.cu, call.T, call.H, call.G, call.scale,
        K=K, V=V, R_WALKER=roles.of_walker, R_SOLVER=roles.of_solver, num_warps=4, maxnreg=roles.registers,
    )
    return draft.plan("hopper_fused", o, S_T)
