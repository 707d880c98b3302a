"""Gated Linear Attention, forward, on Hopper: three jobs side by side in one program (chapters 13 and 22).

*Which kernel runs.* A plain call runs the kernel of the page gla_ref/pages/gla_hopper.py: sequences of
64 or 128 channels in bfloat16, gates too, each in one go from a state of zeros. All other calls run `walk` below, the
same kernel with options. Both make the same bits. Read the page first.

    q' = q e^(b - r)    k' = k e^(r - b)    S' = e^r S                                          (1)
    o  = scale * (q' S' + tril(q' k'^T) v)                                                      (2)
    S <- e^(b_C - r) (S' + k'^T v)                                                              (3)

b is the running sum of the log gates g in a chunk of C tokens, b_C its last row, and r = b_C / 2.

The algebra, segments and packed sequences are those of portable/gla_forward.py. A program of that kernel does one
thing after the other, and the chip waits: for memory, then for exponentials, then for products. Here a program has
three roles, each with warps of its own, which work on different chunks at the same time::

    loader        1 warp     asks the copy engine (TMA) for q, k, v, g of a chunk, as soon as a stage is free
    transformer   4 warps    (1) of q and k, in place; the state's factors; is the chunk strong?
    multiplier    4 or 8     (2) and (3): four products (WGMMA), the state in its registers; o out by TMA

*Strong chunks.* A chunk is strong if the gates of some channel sum to less than LIMIT. The factors of q, k and S are
those of `chunk_decays` in portable/gla_forward.py, but a strong chunk has the strong ones in all its channels. The
multiplier leaves out the chunk's pairs, the transformer sets a flag, and `mend` of the portable file adds the pairs.

The roles meet at barriers in shared memory (`Barriers`), three for each of STAGES stages. In the order of ring.py, with
chunks for rounds, they are `ready`, `hat`, `empty`. What ring.py says of arrivals, bytes, fences and products holds in
all Hopper kernels.

Gates in float32 are twice as large, and have one tile instead of one a stage. Its barrier `taken` (transformer ->
loader), after `ready` in the order above, has one stage: before it asks for the gates of chunk i the loader waits for
phase i - 1, of parity (i & 1) ^ 1. It does so last, when the chunk's other tiles are on their way.

Limits: 16-bit tokens, all rows of a multiple of 16 bytes, K <= 128, V <= 512.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pages.gla_hopper import walk as walk_of_page
from ..launch.hardware import Hardware
from ..launch.plan import Draft, Plan, Spec, cdiv
from ..portable import gla_forward as portable
from ..portable.gla_forward import GlaCall, Readers, mend_strong, walks
from ..portable.segments import slots
from ..portable.tiles import FLOOR
from . import refusal_of_gradient
from .gluon import copy_in, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate, invalidate_stages, new_barriers
from .tiles import LOG2E, Sums, box, fill_sums, gate_sums, keep_rows, operand, part_of, scaled, store_box, store_part


class Tiles(NamedTuple):
    """The tensors that the copy engine brings or takes, as boxes; or their tiles in shared memory, of each stage."""

    q: object  # None in a walk that makes no o
    k: object
    v: object
    g: object
    o: object = None  # of boxes only


class Barriers(NamedTuple):
    """Who lets whom go on: one barrier of each kind for each stage, and one `taken` in all."""

    empty: object  # multiplier -> loader: the stage has been read
    ready: object  # copy engine -> transformer: the bytes have come
    hat: object  # transformer -> multiplier: q', k' and factors are in place
    taken: object  # transformer -> loader: the one tile of float32 gates has been read; None with gates of 16 bits


Sizes = namedtuple("Sizes", "H K V scale")
# the transformer's words to the multiplier in each stage: the state's factors first and through; is the chunk strong?
Sides = namedtuple("Sides", "factors strong")
Copies = namedtuple("Copies", "S P o")  # the multiplier's tiles in 16 bits
# where a walk begins, and where its results go: o for rows of packed sequences, a box of states and its tile
Results = namedtuple("Results", "S_in S_out decay o states t_states")


@gluon.jit
def chunk_of(i, n, REVERSE: gl.constexpr):
    """The chunk of a segment of n chunks that is visited as the i-th."""
    return n - 1 - i if REVERSE else i


@gluon.jit
def loader(boxes, stages, bars, part, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """Bring q, k, v, g of each chunk; what lies beyond the tensor comes as zeros."""
    q, k, v, g = boxes.q, boxes.k, boxes.v, boxes.g
    i_b, i_h, o_v = part.i_b, part.i_h, part.o_v
    OF_Q: gl.constexpr = 0 if q is None else q.block_type.nbytes
    for i in range(part.n):
        s, o_t = i % STAGES, part.begin + chunk_of(i, part.n, REVERSE) * C
        mbarrier.wait(bars.empty.index(s), ((i // STAGES) & 1) ^ 1)  # of round j - 1
        bar = bars.ready.index(s)
        mbarrier.expect(bar, OF_Q + k.block_type.nbytes + v.block_type.nbytes + g.block_type.nbytes)
        if g.dtype != gl.float32:
            copy_in(g, [i_b, i_h, o_t, 0], bar, stages.g.index(s))
        copy_in(k, [i_b, i_h, o_t, 0], bar, stages.k.index(s))
        if q is not None:
            copy_in(q, [i_b, i_h, o_t, 0], bar, stages.q.index(s))
        copy_in(v, [i_b, i_h, o_t, o_v], bar, stages.v.index(s))
        if g.dtype == gl.float32:
            mbarrier.wait(bars.taken.index(0), (i & 1) ^ 1)  # the gates of chunk i - 1
            copy_in(g, [i_b, i_h, o_t, 0], bar, stages.g.index(0))


@gluon.jit
def transformer(
    boxes, stages, bars, sums, sides, flags, i_d, sizes, part, C: gl.constexpr, STAGES: gl.constexpr,
    LIMIT: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr, W: gl.constexpr,
):
    """(1): q' and k' in place of q and k, the state's factors, a flag for each strong chunk from flags + i_d on."""
    q, k, v, g, signs, halves = boxes.q, boxes.k, boxes.v, boxes.g, sums.signs, sums.halves
    BK: gl.constexpr = k.block_type.shape[3]
    BV: gl.constexpr = v.block_type.shape[3]
    FLOAT16: gl.constexpr = k.dtype == gl.float16
    WIDE: gl.constexpr = g.dtype == gl.float32
    of_x: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BK * 4 // W, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BV * 4 // W, 16])
    of_r: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 16, 16])
    one_number: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, of_x))[:, None]
    for i in range(part.n):
        s = i % STAGES
        mbarrier.wait(bars.ready.index(s), (i // STAGES) & 1)
        b_k = stages.k.index(s).reshape([C, BK])
        b_g = stages.g.index(0 if WIDE else s).reshape([C, BK])
        remaining = part.end - part.begin - chunk_of(i, part.n, REVERSE) * C  # rows
        if PACKED and remaining < C:  # the rest is another sequence's
            keep_rows(b_k, remaining, of_x)
            keep_rows(stages.v.index(s).reshape([C, BV]), remaining, of_v)
            keep_rows(b_g, remaining, of_x)
            if FLOAT16 and q is not None:  # the largest pair scales all pairs of the chunk
                keep_rows(stages.q.index(s).reshape([C, BK]), remaining, of_x)
            fence_async_shared()
        zeros, zeros_r = gl.zeros([C, BK], gl.float32, of_x), gl.zeros([BK, 16], gl.float32, of_r)
        if WIDE:  # `gate_sums` in two bf16 parts, one after the other through the same tile
            gates = b_g.load(of_x)  # [C, BK]
            gates = gl.where(gates < FLOOR, FLOOR, gates)
            high = gates.to(gl.bfloat16)
            sums.g_16.store(high)
            fence_async_shared()
            mbarrier.arrive(bars.taken.index(0), count=1)
            x = warpgroup_mma(signs, sums.g_16, zeros, use_acc=False, is_async=True)
            r = warpgroup_mma(sums.g_16.permute((1, 0)), halves, zeros_r, use_acc=False, is_async=True)
            x, r = warpgroup_mma_wait(0, deps=[x, r])
            sums.g_16.store((gates - high.to(gl.float32)).to(gl.bfloat16))
            fence_async_shared()
            x = warpgroup_mma(signs, sums.g_16, x, is_async=True)
            r = warpgroup_mma(sums.g_16.permute((1, 0)), halves, r, is_async=True)
            x, r = warpgroup_mma_wait(0, deps=[x, r])
            r = gl.max(r, 1)  # [BK]
        else:
            x, r = gate_sums(b_g, sums, of_x, W)
        mild = gl.min(r, 0) >= LIMIT * 0.5
        if mild:
            x = x * LOG2E
            sides.factors.index(2 * s).store(gl.exp2(r * LOG2E))
            scaled(b_k, gl.exp2(x if REVERSE else -x), of_x)  # backwards k reads, and there is no q
            if q is not None:
                scaled(stages.q.index(s).reshape([C, BK]), gl.exp2(x), of_x)
        else:
            if not WIDE:  # float32 gates have been clamped above; 16-bit gates are, and x and r made again
                gates = b_g.load(of_x)
                b_g.store(gl.where(gates < FLOOR, FLOOR, gates).to(b_g.dtype))
                fence_async_shared()
                x = warpgroup_mma(signs, b_g, zeros, use_acc=False)
                r = gl.max(warpgroup_mma(b_g.permute((1, 0)), halves, zeros_r, use_acc=False), 1)
            x = x * LOG2E
            # r through shared memory, to have it in the layout of x's columns; `first` overwrites it below
            sides.factors.index(2 * s).store(r * LOG2E)
            half = sides.factors.index(2 * s).load(gl.SliceLayout(0, of_x))  # [BK]
            shift = gl.zeros([BK], gl.float32, gl.SliceLayout(0, of_x))  # s of 2^s in `chunk_decays`
            if FLOAT16:
                top = gl.sum(gl.where(rows == 0, x, 0.0), 0) + half  # b of the first token, which no other exceeds
                shift = gl.floor(gl.maximum(top, -100.0))  # float32 has 2^-100
            scaled(b_k, gl.exp2(half[None, :] + x if REVERSE else half[None, :] - x), of_x)
            if q is not None:
                scaled(stages.q.index(s).reshape([C, BK]), gl.exp2(x + (half - shift)[None, :]), of_x)
            sides.factors.index(2 * s).store(gl.exp2(shift))
            sides.factors.index(2 * s + 1).store(gl.exp2(2.0 * half - shift))
        sides.strong.index(s).store(gl.full([1], 1, gl.int32, one_number) * (1 - mild.to(gl.int32)))
        if q is not None:  # if V has several tiles, their programs all write the same flag
            gl.store(flags + i_d + i * sizes.H, (1 - mild.to(gl.int32)).to(gl.int8))
        fence_async_shared()
        mbarrier.arrive(bars.hat.index(s), count=1)


@gluon.jit
def multiplier(
    boxes, stages, bars, sides, copies, results, sizes, part,
    C: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr, W: gl.constexpr,
):
    """(2) and (3), from S_in to S_out."""
    H, K, V, scale = sizes
    q, k, v, i_h, o_v = boxes.q, boxes.k, boxes.v, part.i_h, part.o_v
    BK: gl.constexpr = k.block_type.shape[3]
    BV: gl.constexpr = v.block_type.shape[3]
    FLOAT16: gl.constexpr = k.dtype == gl.float16
    # the state: 16 rows a warp; scores and o: 64 rows are four warps', further warps share columns
    of_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BV * 4 // W, 16])
    of_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, C * 4 // W, 16])
    one_number: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, of_S))
    o_c = o_v + gl.arange(0, BV, layout=gl.SliceLayout(0, of_S))
    p_S = ((part.i_s * H + i_h).to(gl.int64) * K + o_k)[:, None] * V + o_c[None, :]
    m_S = (o_k < K)[:, None] & (o_c < V)[None, :]
    if results.S_in is not None:
        S = gl.load(results.S_in + p_S, mask=m_S, other=0.0)
    else:
        S = gl.zeros([BK, BV], gl.float32, of_S)
    segment_decay = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, of_S))
    i_P = gl.arange(0, C, layout=gl.SliceLayout(1, of_P))[:, None]
    j_P = gl.arange(0, C, layout=gl.SliceLayout(0, of_P))[None, :]
    for i in range(part.n):
        s = i % STAGES
        if results.states is not None:
            store_box(S.to(results.states.dtype), results.t_states, results.states, part.i_c + i, i_h, 0, o_v)
        mbarrier.wait(bars.hat.index(s), (i // STAGES) & 1)
        b_k = stages.k.index(s).reshape([C, BK])
        b_v = stages.v.index(s).reshape([C, BV])
        is_strong = gl.sum(sides.strong.index(s).load(one_number), 0)  # 0 or 1
        # mild: first = last = e^r. strong: first = last = 1, through = e^(b_C); in float16 first = 2^s
        first = sides.factors.index(2 * s).load(gl.SliceLayout(1, of_S))
        last = first
        if q is not None:
            b_q = stages.q.index(s).reshape([C, BK])
            P = warpgroup_mma(
                b_q, b_k.permute((1, 0)), gl.zeros([C, C], gl.float32, of_P), use_acc=False, is_async=True
            )
            S = S * first[:, None]  # [BK, BV]; in either branch, since here it runs beside the product
            low, of_low = operand(S, k.dtype)
            copies.S.store(low)
            fence_async_shared()
            b_o = warpgroup_mma(b_q, copies.S, gl.zeros([C, BV], gl.float32, of_o), use_acc=False, is_async=True)
            P = warpgroup_mma_wait(1, deps=[P])
            # by where: pairs that are left out may be infinite; all pairs of a strong chunk are left out
            P, of_pairs = operand(gl.where((i_P >= j_P) & (is_strong == 0), P, 0.0), k.dtype)  # [C, C]
            copies.P.store(P)
            fence_async_shared()
        else:
            S = S * first[:, None]
        if is_strong != 0:
            through = sides.factors.index(2 * s + 1).load(gl.SliceLayout(1, of_S))
            S = S * through[:, None]
            segment_decay = segment_decay * through
            if FLOAT16:
                last = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, of_S))
        S = warpgroup_mma(b_k.permute((1, 0)), b_v, S, is_async=True)
        if q is not None:
            b_o = warpgroup_mma_wait(1, deps=[b_o])
            if FLOAT16:
                b_o = b_o * (of_low / of_pairs)
            b_o = warpgroup_mma(copies.P, b_v, b_o, is_async=True)
            S = warpgroup_mma_wait(1, deps=[S])
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        S = S * last[:, None]
        segment_decay = segment_decay * first * last
        if q is not None:
            b_o = warpgroup_mma_wait(0, deps=[b_o])
        mbarrier.arrive(bars.empty.index(s), count=1)
        if q is not None:
            b_o = b_o * scale
            if FLOAT16:
                b_o = b_o * of_pairs
            low = b_o.to(k.dtype)
            store_part(results.o, low, copies.o, boxes.o, part.begin + i * C, part, V, of_o, PACKED)
    tma.store_wait(0)
    if results.S_out is not None:
        gl.store(results.S_out + p_S, S, mask=m_S)
    if results.decay is not None:
        gl.store(results.decay + (part.i_s * H + i_h).to(gl.int64) * K + o_k, segment_decay, mask=o_k < K)


@gluon.jit(do_not_specialize=("N", "T", "L", "H"))
def walk(
    q, k, v, g, strong, o, p_o, S_in, S_out, states, decay, cu, N, T, L, H, K, V, scale,
    C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
    WT: gl.constexpr, REVERSE: gl.constexpr, LIMIT: gl.constexpr, REGISTERS: gl.constexpr,
):
    """A segment of a head, chunk by chunk, from its state in S_in to S_out.

    q, k, v, g, o and states are boxes; p_o points to the tensor o. Without q there is no o, and no flag in `strong`.
    S_in, S_out, states (the one before each chunk) and decay (of the segment) may be None.

    REVERSE: from the last chunk to the first, for the gradient of the state; q is given as k and do as v. The
    multiplier does not know of it: its i counts chunks as they come, so o and states would be out of place. In
    bfloat16, without q and states.
    """
    # which tile: neighbours share in L2 what they read
    n_v, pid = gl.cdiv(V, BV), gl.program_id(0)
    o_v, i_h, i_s = pid % n_v * BV, pid // n_v % H, pid // n_v // H
    part = part_of(cu, i_s, i_h, o_v, N, T, L, H, C, W)
    i_d = part.i_c.to(gl.int64) * H + i_h

    # shared memory: stages, tiles for products, factors, barriers
    all_k = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C, BK], k.layout)
    all_v = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C, BV], v.layout)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if g.dtype == gl.float32:
        all_g = gl.allocate_shared_memory(g.dtype, [1, 1, 1, C, BK], g.layout)
        g_16 = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
        signs = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    else:
        all_g = gl.allocate_shared_memory(g.dtype, [STAGES, 1, 1, C, BK], g.layout)
        g_16: gl.constexpr = None
        signs = gl.allocate_shared_memory(g.dtype, [C, C], square)
    halves = gl.allocate_shared_memory(signs.dtype, [C, 16], gl.NVMMASharedLayout(32, 16, 2))
    if q is not None:
        all_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, BK], q.layout)
        S_16 = gl.allocate_shared_memory(k.dtype, [BK, BV], square)
        P_16 = gl.allocate_shared_memory(k.dtype, [C, C], square)
        o_16 = gl.allocate_shared_memory(k.dtype, [1, 1, C, BV], o.layout)
        copies = Copies(S_16, P_16, o_16)
    else:
        all_q: gl.constexpr = None
        copies: gl.constexpr = None
    if states is not None:
        t_states = gl.allocate_shared_memory(states.dtype, [1, 1, BK, BV], states.layout)
    else:
        t_states: gl.constexpr = None
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BK], unswizzled)  # first, through of each stage
    strong_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], unswizzled)  # is the stage's chunk strong?
    empty, ready, hat = new_barriers(STAGES, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1)
    taken = new_barriers(1, 1) if g.dtype == gl.float32 else None
    fill_sums(signs, halves, W)
    sums = Sums(signs, halves, g_16)
    fence_async_shared()

    boxes, stages = Tiles(q, k, v, g, o), Tiles(all_q, all_k, all_v, all_g)
    bars, sides, sizes = Barriers(empty, ready, hat, taken), Sides(factors, strong_tiles), Sizes(H, K, V, scale)
    results = Results(S_in, S_out, decay, p_o, states, t_states)
    PACKED: gl.constexpr = cu is not None
    gl.warp_specialize(
        [
            (multiplier, (boxes, stages, bars, sides, copies, results, sizes, part, C, STAGES, PACKED, W)),
            (transformer, (
                boxes, stages, bars, sums, sides, strong, i_d, sizes, part, C, STAGES, LIMIT, PACKED, REVERSE, WT,
            )),
            (loader, (boxes, stages, bars, part, C, STAGES, REVERSE)),
        ],
        [WT, 1],
        [REGISTERS, 24],
    )
    # all roles are done: until here the barriers' bytes are theirs (ring.py)
    invalidate((empty, ready, hat))
    if g.dtype == gl.float32:
        invalidate_stages(taken)


# The plan.


class Roles(NamedTuple):
    """How a program is made: warps of two roles (the loader has one), stages, and registers of a thread.

    A program starts with `registers` a thread, its warps rounded up to a multiple of four. `gl.warp_specialize` gives
    the transformer `of_transformer`, the loader 24, and the multiplier what is left: 200 at BK = 64, 160 at 128.
    """

    multiplier: int  # warps
    transformer: int
    stages: int
    registers: int
    of_transformer: int


ROLES = {64: Roles(4, 4, 3, 128, 160), 128: Roles(8, 4, 2, 128, 160)}  # by BK


class HopperCall(GlaCall):
    """A call of the portable kernels, but with this file's walk."""

    def launch_walk(
        self, x: Readers, v: Spec, reverse: bool, L: int, S_in, S_out, o=None, states=None, decay=None
    ) -> None:
        """Launch `walk` over segments of L tokens."""
        C, BK, BV, H, K, V, roles = self.C, self.BK, self.BV, self.H, self.K, self.V, ROLES[self.BK]
        self.draft.launch(
            walk, cdiv(V, BV) * H * slots(self.B, self.T, self.cu, L),
            q=box(x.q, C, BK) if o else None, k=box(x.k, C, BK), v=box(v, C, BV), g=box(x.g, C, BK),
            strong=x.strong if o else None, o=box(o, C, BV) if o else None, p_o=o, S_in=S_in, S_out=S_out,
            states=box(states, BK, BV) if states else None, decay=decay, cu=self.cu, N=self.N, T=self.T, L=L, H=H,
            K=K, V=V, scale=self.scale, C=C, BK=BK, BV=BV, STAGES=roles.stages, W=roles.multiplier,
            WT=roles.transformer, REVERSE=reverse, LIMIT=self.limit, REGISTERS=roles.of_transformer,
            num_warps=roles.multiplier, maxnreg=roles.registers,
        )


def on_hopper(call: GlaCall) -> HopperCall:
    """The call with the tiles of this file's walk."""
    BK, BV = (64 if size <= 64 else 128 for size in (call.K, call.V))
    return HopperCall(*call)._replace(BK=BK, BV=BV)


def plan_forward(hardware: Hardware, call) -> Plan:
    """(o, final state, starts)."""
    draft, q, k, v, g, S = Draft(hardware, *call), call.q, call.k, call.v, call.g, call.initial_state
    on_others = portable.begin(draft, q, v, call.cu_seqlens, call.scale, call.path)
    shared = on_hopper(on_others)
    C, K, V, cu, starts, (L, why) = shared.C, shared.K, shared.V, shared.cu, None, shared.segment()
    draft.because("a loader, a transformer and a multiplier side by side: the Hopper kernel, in Gluon")
    # spare slots are nobody's: their flags must be zeros
    strong = draft.new("strong", shared.chunks, shared.H, dtype=torch.int8, zero=cu is not None)
    plain = {K, V} <= {64, 128} and {x.dtype for x in (q, k, v, g)} == {torch.bfloat16}
    if plain and S is None and cu is None and L > shared.T:
        draft.because(why)
        draft.because("bfloat16, from states of zeros: the kernel of the page gla_ref/pages/gla_hopper.py")
        o, S_T = draft.new("o", *v.shape, dtype=v.dtype), draft.new("S_T", shared.B, shared.H, K, V)
        roles = ROLES[shared.BK]
        draft.launch(
            walk_of_page, shared.B * shared.H,
            q=box(q, C, K), k=box(k, C, K), v=box(v, C, V), g=box(g, C, K), o=box(o, C, V), S_last=S_T, strong=strong,
            T=shared.T, H=shared.H, scale=shared.scale, K=K, V=V,
            STAGES=roles.stages, num_warps=roles.multiplier, maxnreg=roles.registers,
        )
    else:
        x, S_in = Readers(q, k, g=g, strong=strong), draft.contiguous(S, torch.float32)
        o, S_T, _, starts = walks(shared, x, v, S_in, o="o", S="S_T")  # o and S_T: names of the tensors to make
    mend_strong(shared, q, k, v, g, o, strong)
    # the gradient's walks may be the portable ones, which begin from these states only if they cut sequences alike
    if refusal_of_gradient(hardware, call) and on_others.segment()[0] != L:
        starts = None
    return draft.plan("hopper", o, S_T, starts)
