"""The delta rules, forward, on Hopper, for many heads: everything in one program (chapters 20 and 23).

Equations (1) to (3) are those of delta_chunk.py. A program owns a value head of a sequence. It has three roles::

    loader    a warp          asks the copy engine (TMA) for k, q, v of a chunk; sums gates    waits for `done`
    solver    four warps      (1)                                        waits for `keys`, `gated`, `ready`
    walker    V / 16 warps    (2) and (3); S in its registers; o out     waits for `keys`, `ready`, `solved`

The solver works a chunk ahead of the walker, so everything of a chunk has two stages: chunk c lies in stage c % 2.
Each stage has the five `Barriers`, in the order of ring.py; a round is a chunk.

*Nothing is overwritten too early*: the solver, once past `keys` of c, knows that the walker is done with c - 2. Its
own products have read q and k before it arrives at `solved`.

*The walker's tiles are transposed.* A product's first operand may be in registers, and a product leaves its sums where
the next one takes its first operand from. So S^T, v'^T, w^T never leave registers, and only o goes through shared
memory. The order of products is one that the assembler runs asynchronously: k S and q S are both waited for before the
decays are loaded, which takes fewer registers than waiting for k S alone.

*The decays* of N and P are 2^(c_i - c_j), with c the coarse sums, which fall by 1/512 a row more than gates do: so the
sign of c_i - c_j tells what is above the diagonal, and no mask is made. The rest is D = diag(2^x), where b in base 2 is
c + x, x < 1/4. With N = D N' D^-1 and P = D P' D^-1 the walker has w' = D^-1 w = (I - N')^-1 diag(2^-x beta) v', and
P w = D P' w'. D costs nothing in the solver: rows of P and columns of T have factors anyway.

*Two launches.* The inverse is that of delta_inverse.py. The first launch makes it by float16's products and votes: if
an N_ij of any of a program's chunks is above its limit, the program's flag is 1. The second launch, EXACT, has the same
programs; one whose flag is 0 returns at once, the others make their heads again by pairs of bfloat16. A branch on each
chunk's vote instead would cost the mild chunks registers, and time although none takes it (lab/delta_rules.md).

*float16* ends at 65504, so rows of operands are divided by powers of 2 before they are rounded (`scaled_rows`), and
products are multiplied by them. A row is a column of V, or of T and P a token: no warp needs another one's maximum.

*Packed sequences.* The last chunk of a sequence may end with rows of the next one. The solver overwrites these rows of
q, k and v with zeros, and the walker waits for `solved` before it reads them. Gates and strengths of these rows are
zeros.

*Shared memory* at K = V = 128, 174 KiB of 227: q and k 64, v 32, o 16, T and P 32, the inverse 26, gates 3. A chunk
moves 2 C (2 K + 2 V) = 64 KiB for 2 C (2 C K + 3 K V + 2 C V) = 10.5 MFLOP and 0.4 MFLOP for the inverse.

Limits: tokens of 16 bits, K and V of 64 or 128. A plan takes this kernel where there are too many heads
for delta_ahead.py.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.hardware import Hardware
from ..launch.plan import Plan, cdiv
from . import delta_chunk
from .delta_chunk import VARYING, C, Results, since_until, strides, summed, which_sequence
from .delta_inverse import allocate_scratch, eliminate, inverse, is_strong, largest, spread
from .delta_walks import state_rows
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate, new_barriers
from .tiles import Part, box, keep_rows

STAGES = gl.constexpr(2)  # chunks that lie in shared memory, with all that belongs to them
# rows of a chunk's `gates`: strengths, c, e^b, 2^x e^(b_C - b), scale e^b, 2^-x times strengths, 2^x scale
BETA, COARSE, SINCE, UNTIL, READ, RIGHT, LEFT = (gl.constexpr(i) for i in range(7))


class Tiles(NamedTuple):
    """The tiles of each stage in shared memory."""

    q: object
    k: object
    v: object
    T: object
    P: object
    gates: object  # rows of C numbers; without gates only BETA
    exponents: object  # of the powers of 2 that rows of T and P were divided by, in float16; else None


Boxes = namedtuple("Boxes", "q k v")


class Barriers(NamedTuple):
    """Who waits for whom, one of each for each stage."""

    keys: object  # copy engine -> solver, walker: k has come, and the solver needs no more to begin
    ready: object  # copy engine -> solver, walker: q and v have come
    gated: object  # loader -> solver: strengths, sums of gates and decays are stored
    solved: object  # solver -> walker: T and P are made, and the decays are there
    done: object  # walker -> loader: everything of the chunk has been read


@gluon.jit
def row(tiles, s, n: gl.constexpr):
    """Row n of the gates of stage s."""
    ROWS: gl.constexpr = tiles.gates.shape[0] // STAGES
    return tiles.gates.index(ROWS * s + n)


@gluon.jit
def scaled_rows(x, dtype: gl.constexpr):
    """x in a product's precision, and [rows] the exponents of the powers of 2 that its rows were divided by.

    As `operand` of tiles.py, which returns one factor for a whole tile.
    """
    if dtype == gl.float16:
        exponent = gl.ceil(gl.log2(gl.maximum(gl.max(gl.abs(x), 1), 1e-30))) - 15.0
        exponent = gl.maximum(exponent, -40.0)
        return (x * gl.exp2(-exponent)[:, None]).to(dtype), exponent
    else:
        return x.to(dtype), 0.0


@gluon.jit
def loader(boxes, g, beta, s_g, s_beta, tiles, bars, part, scale):
    """Bring q, k, v of each chunk, zeros beyond the tensor; strengths, sums of gates and decays, zeros beyond `end`."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    i_b, i_h, i_k, begin = part.i_b, part.i_h, part.i_k, part.begin
    rows = gl.arange(0, C, layout=line)
    left = part.end - begin
    beta += i_b.to(gl.int64) * s_beta[0] + begin.to(gl.int64) * s_beta[1] + i_h.to(gl.int64) * s_beta[2]
    b_beta = gl.load(beta + rows * s_beta[1], mask=rows < left, other=0.0)
    if g is not None:
        g += i_b.to(gl.int64) * s_g[0] + begin.to(gl.int64) * s_g[1] + i_h.to(gl.int64) * s_g[2]
        b_g = gl.load(g + rows * s_g[1], mask=rows < left, other=0.0)
    for c in range(part.n):
        s, o_t = c % STAGES, begin + c * C
        mbarrier.wait(bars.done.index(s), ((c // STAGES) & 1) ^ 1)
        bar = bars.keys.index(s)  # completes when so many bytes are there
        mbarrier.expect(bar, boxes.k.block_type.nbytes)
        copy_in(boxes.k, [i_b, i_k, o_t, 0], bar, tiles.k.index(s))
        bar = bars.ready.index(s)
        mbarrier.expect(bar, boxes.q.block_type.nbytes + boxes.v.block_type.nbytes)
        copy_in(boxes.q, [i_b, i_k, o_t, 0], bar, tiles.q.index(s))
        copy_in(boxes.v, [i_b, i_h, o_t, 0], bar, tiles.v.index(s))
        row(tiles, s, BETA).store(b_beta.to(gl.float32))
        if g is not None:
            coarse, fine = summed(b_g.to(gl.float32))
            since, until = since_until(coarse, fine, C, line)
            fall = rows.to(gl.float32) * (1.0 / 512.0)
            rest = gl.exp2(fine + fall)  # 2^x
            row(tiles, s, COARSE).store(coarse - fall)
            row(tiles, s, SINCE).store(since)
            row(tiles, s, UNTIL).store(until * rest)
            row(tiles, s, READ).store(since * scale)
            row(tiles, s, RIGHT).store(b_beta.to(gl.float32) / rest)
            row(tiles, s, LEFT).store(rest * scale)
        mbarrier.arrive(bars.gated.index(s), count=1)
        left -= C  # the next chunk's gates are asked for long before they are needed
        beta += C * s_beta[1]
        b_beta = gl.load(beta + rows * s_beta[1], mask=rows < left, other=0.0)
        if g is not None:
            g += C * s_g[1]
            b_g = gl.load(g + rows * s_g[1], mask=rows < left, other=0.0)


@gluon.jit
def decays(tiles, s, never, GATED: gl.constexpr, layout: gl.constexpr):
    """D^-1 E D of (1). `never` is 0, but Triton does not know: so masks are made where they are used, not kept."""
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    of_column: gl.constexpr = gl.SliceLayout(0, layout)
    if GATED:
        coarse = row(tiles, s, COARSE).load(of_row)[:, None] - row(tiles, s, COARSE).load(of_column)[None, :]
        return gl.where(coarse > 0.0, 0.0, gl.exp2(coarse))
    else:
        i, j = gl.arange(0, C, layout=of_row)[:, None], gl.arange(0, C, layout=of_column)[None, :]
        below = (i + never) - j % 8 >= j // 8 * 8
        return gl.where(below, gl.full([C, C], 1.0, gl.float32, layout), 0.0)


@gluon.jit
def store_T(tiles, s, Y, GATED: gl.constexpr, layout: gl.constexpr):
    """T = Y diag(beta), and the exponents of its rows."""
    strength = row(tiles, s, RIGHT if GATED else BETA).load(gl.SliceLayout(0, layout))[None, :]
    T, exponent = scaled_rows(Y * strength, tiles.T.dtype)
    tiles.T.index(s).store(T)
    if tiles.exponents is not None:
        tiles.exponents.index(2 * s).store(exponent)


@gluon.jit
def solver(
    tiles, bars, scratch, strong, part, scale, zero, GATED: gl.constexpr, PACKED: gl.constexpr, EXACT: gl.constexpr
):
    """(1) of each chunk; without EXACT also whether one of them needs it."""
    K: gl.constexpr = tiles.q.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    most = largest(gl.zeros([C, C], gl.float32, wide))
    for c in range(part.n):
        s, parity = c % STAGES, (c // STAGES) & 1
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        mbarrier.wait(bars.keys.index(s), parity)
        left = part.end - part.begin - c * C
        if PACKED and left < C:  # the rest is another sequence's
            mbarrier.wait(bars.ready.index(s), parity)
            keep_rows(b_q, left, of_k)
            keep_rows(b_k, left, of_k)
            keep_rows(tiles.v.index(s).reshape([C, V]), left, of_v)
            fence_async_shared()
        none = gl.zeros([C, C], gl.float32, wide)
        N = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars.gated.index(s), parity)
        never = c & zero
        E = decays(tiles, s, never, GATED, wide)
        strength = -row(tiles, s, BETA).load(gl.SliceLayout(1, wide))[:, None]
        N = warpgroup_mma_wait(0, deps=[N])
        N *= E * strength
        if not EXACT:
            most = gl.maximum(most, largest(N))  # infinite where N is
        spread(N, scratch, EXACT)
        mbarrier.wait(bars.ready.index(s), parity)
        P = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        if GATED:
            E *= row(tiles, s, LEFT).load(gl.SliceLayout(1, wide))[:, None]
        else:
            E *= scale
        eliminate(scratch, never, EXACT)
        P = warpgroup_mma_wait(0, deps=[P]) * E
        P, exponent = scaled_rows(P, b_k.dtype)
        tiles.P.index(s).store(P)
        if tiles.exponents is not None:
            tiles.exponents.index(2 * s + 1).store(exponent)
        store_T(tiles, s, inverse(scratch, EXACT, wide), GATED, wide)
        fence_async_shared()
        mbarrier.arrive(bars.solved.index(s), count=1)
    if not EXACT:
        gl.store(strong, is_strong(most).to(gl.int32))


@gluon.jit
def store_turned(results, x, t_u, done, o_t, part, V: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr):
    """o^T [V, C] to rows o_t ..., up to row `end`: a whole chunk by the copy engine, by way of t_u."""
    if PACKED and part.end - o_t < C:
        rows = gl.arange(0, V, layout=gl.SliceLayout(1, layout))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :]
        p = results.o + (o_t.to(gl.int64) * part.HV + part.i_h) * V
        gl.store(p + (columns * (part.HV * V) + rows), x, mask=columns < part.end - o_t)
        fence_async_shared()
        mbarrier.arrive(done, count=1)
    else:
        tma.store_wait(0)  # the last o has been read
        t_u.reshape([C, V]).permute((1, 0)).store(x)
        fence_async_shared()
        mbarrier.arrive(done, count=1)  # after a fence: threads have read v
        copy_out(results.d_o, [part.i_b, part.i_h, o_t, 0], t_u)


@gluon.jit
def walker(results, tiles, bars, part, t_u, scale, GATED: gl.constexpr, PACKED: gl.constexpr):
    """(2) and (3), from S_in to S_out, all transposed."""
    K: gl.constexpr = tiles.q.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    FLOAT16: gl.constexpr = dtype == gl.float16
    V: gl.constexpr = tiles.v.shape[4]
    W: gl.constexpr = V // 16  # warps
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, C, 16])  # [V, C]
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, K, 16])  # [V, K]
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_S: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    of_row: gl.constexpr = gl.SliceLayout(1, narrow)
    of_column: gl.constexpr = gl.SliceLayout(0, narrow)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    if results.S_in is not None:
        S = gl.load(state_rows(results.S_in, part.i_s, part, K, V, state, V))
    else:
        S = gl.zeros([V, K], gl.float32, state)
    for c in range(part.n):
        s, o_t, parity = c % STAGES, part.begin + c * C, (c // STAGES) & 1
        b_q, b_k = tiles.q.index(s).reshape([C, K]), tiles.k.index(s).reshape([C, K])
        b_v = tiles.v.index(s).reshape([C, V])
        none = gl.zeros([V, C], gl.float32, narrow)
        low, exponent_S = scaled_rows(S, dtype)
        low = gl.convert_layout(low, left)
        mbarrier.wait(bars.keys.index(s), parity)
        mbarrier.wait(bars.ready.index(s), parity)
        if PACKED and part.end - o_t < C:  # the solver puts zeros into k
            mbarrier.wait(bars.solved.index(s), parity)
        x = warpgroup_mma(low, b_k.permute((1, 0)), none, use_acc=False, is_async=True)  # (k S)^T
        b_o = warpgroup_mma(low, b_q.permute((1, 0)), none, use_acc=False, is_async=True)  # (q S)^T
        mbarrier.wait(bars.solved.index(s), parity)
        v = b_v.permute((1, 0)).load(narrow).to(gl.float32)
        x, b_o = warpgroup_mma_wait(0, deps=[x, b_o])
        if FLOAT16:
            scale_S = gl.exp2(gl.convert_layout(exponent_S, of_row))[:, None]
            x, b_o = x * scale_S, b_o * scale_S
        if GATED:
            x *= row(tiles, s, SINCE).load(of_column)[None, :]
        x, exponent_x = scaled_rows(v - x, dtype)  # v'^T
        w = warpgroup_mma(
            gl.convert_layout(x, left), tiles.T.index(s).permute((1, 0)), none, use_acc=False, is_async=True
        )
        # loads here keep what follows them behind the product's begin
        if GATED:
            through = gl.sum(row(tiles, s, SINCE).slice(C - 1, 1).load(one), 0)  # e^(b_C)
            b_o *= row(tiles, s, READ).load(of_column)[None, :]
            S *= through
            until = row(tiles, s, UNTIL).load(of_column)[None, :]
        else:
            b_o *= scale
        w = warpgroup_mma_wait(0, deps=[w])
        if FLOAT16:
            w *= gl.exp2(exponent_x)[:, None] * gl.exp2(tiles.exponents.index(2 * s).load(of_column))[None, :]
        if GATED:
            u, exponent_u = scaled_rows(w * until, dtype)
        else:
            u, exponent_u = scaled_rows(w, dtype)
        w, exponent_w = scaled_rows(w, dtype)
        if FLOAT16:
            exponent_u = gl.convert_layout(exponent_u, gl.SliceLayout(1, state))[:, None]
            exponent_P = tiles.exponents.index(2 * s + 1).load(of_column)[None, :]
            S, b_o = S * gl.exp2(-exponent_u), b_o * gl.exp2(-exponent_w)[:, None] * gl.exp2(-exponent_P)
        S = warpgroup_mma(gl.convert_layout(u, left_S), b_k, S, is_async=True)
        b_o = warpgroup_mma(gl.convert_layout(w, left), tiles.P.index(s).permute((1, 0)), b_o, is_async=True)
        S, b_o = warpgroup_mma_wait(0, deps=[S, b_o])
        if FLOAT16:
            S, b_o = S * gl.exp2(exponent_u), b_o * gl.exp2(exponent_w)[:, None] * gl.exp2(exponent_P)
        done = bars.done.index(s)
        store_turned(results, b_o.to(dtype), t_u, done, o_t, part, V, narrow, PACKED)
    tma.store_wait(0)
    gl.store(state_rows(results.S_out, part.i_s, part, K, V, state, V), S)


@gluon.jit(do_not_specialize=VARYING)
def fused(
    q, k, v, g, beta, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, d_o, o, S_in, S_out, strong, cu, T, HV, G, scale, zero,
    K: gl.constexpr, V: gl.constexpr, EXACT: gl.constexpr, R_SOLVER: gl.constexpr,
):
    """A value head of a sequence, chunk by chunk, from its state in S_in (or zeros) to S_out.

    q, k, v are boxes, and so is d_o, of the tensor o. g may be None: the delta rule. strong [programs] has the flags.
    """
    strong += gl.program_id(0)
    if EXACT:
        if gl.load(strong) == 0:
            return
    GATED: gl.constexpr = g is not None
    PACKED: gl.constexpr = cu is not None
    # this program's tile: neighbours are value heads of one key head, which share what they read in L2
    i_h, i_n = gl.program_id(0) % HV, gl.program_id(0) // HV
    i_b, begin, end = which_sequence(cu, i_n, T)
    n = gl.cdiv(end - begin, C)

    # shared memory
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C, V], v.layout)
    t_T = gl.allocate_shared_memory(k.dtype, [STAGES, C, C], square)
    t_P = gl.allocate_shared_memory(k.dtype, [STAGES, C, C], square)
    t_u = gl.allocate_shared_memory(k.dtype, [1, 1, C, V], d_o.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * (7 if GATED else 1), C], line)
    exponents = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C], line) if k.dtype == gl.float16 else None
    scratch = allocate_scratch()
    bars = Barriers(
        keys=new_barriers(STAGES, 1), ready=new_barriers(STAGES, 1), gated=new_barriers(STAGES, 1),
        solved=new_barriers(STAGES, 1), done=new_barriers(STAGES, 1),
    )
    fence_async_shared()

    tiles = Tiles(t_q, t_k, t_v, t_T, t_P, gates, exponents)
    part = Part(i_n, i_b, i_h, i_h // G, 0, 0, begin, end, n, T, HV)
    boxes, s_g, s_beta = Boxes(q, k, v), (s_gb, s_gt, s_gh), (s_bb, s_bt, s_bh)
    gl.warp_specialize(
        [
            (walker, (Results(o, d_o, S_in, S_out), tiles, bars, part, t_u, scale, GATED, PACKED)),
            (solver, (tiles, bars, scratch, strong, part, scale, zero, GATED, PACKED, EXACT)),
            (loader, (boxes, g, beta, s_g, s_beta, tiles, bars, part, scale)),
        ],
        [4, 1],
        [R_SOLVER, 24],
    )
    invalidate(bars)


# The plan.


class Roles(NamedTuple):
    """Registers a thread; the walker gets what the others leave."""

    at_entry: int
    of_solver: int  # with 112 at V = 128 the walker has 184, and the assembler serialises all products


ROLES = {64: Roles(160, 216), 128: Roles(128, 104)}  # by V
CHUNK = 3.1  # microseconds of a chunk where all multiprocessors work


def duration(hardware: Hardware, heads: int, chunks: int) -> float:
    """Microseconds for `heads` heads of sequences of `chunks` chunks, by a model.

    A multiprocessor has one program, whose walker begins when the solver has made the first chunk.
    """
    return cdiv(heads, hardware.multiprocessors) * (chunks + 1) * CHUNK


def plan_forward(hardware: Hardware, call) -> Plan:
    """(o, final state)."""
    shared, q, k, v, g, beta = delta_chunk.begin(hardware, call), call.q, call.k, call.v, call.g, call.beta
    draft, K, V, roles = shared.draft, shared.K, shared.V, ROLES[shared.V]
    draft.because("the whole chunk in one program, a program a value head: the fused Hopper kernel, in Gluon")
    draft.because("the second launch makes again, by pairs of bfloat16, the heads with a chunk too strong for float16")
    o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", shared.N, shared.H, K, V)
    strong = draft.new("strong", shared.H * shared.N, dtype=torch.int32)
    for exact in (0, 1):
        draft.launch(
            fused, shared.H * shared.N,
            box(q, C.value, K), box(k, C.value, K), box(v, C.value, V), g, beta, *strides(g), *strides(beta),
            d_o=box(o, C.value, V), o=o, S_in=shared.S_in, S_out=S_T, strong=strong, cu=shared.cu,
            T=shared.T, HV=shared.H, G=shared.G, scale=shared.scale, zero=0, K=K, V=V, EXACT=exact,
            R_SOLVER=roles.of_solver, num_warps=V // 16, maxnreg=roles.at_entry,
        )
    return draft.plan("hopper_fused", o, S_T)
