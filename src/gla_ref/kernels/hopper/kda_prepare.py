"""All of a KDA chunk that needs no state, on Hopper: pairs, their inverse, and what a walk multiplies (chapter 24).

With b, d, P and A of portable/kda_forward.py, T = (I + A)^-1 diag(beta), and

    q^ = q e^b        k^ = k e^b        k~ = k e^(b_C - b)        W = T k^        U = T v                    (1)

a walk (kda_forward.py) has only w = U - W S and two more products of the state. `prepare` has a program of four warps
for each chunk of a value head, and works on 64 channels at a time. A thread owns two channels of a block of 16 tokens,
so running sums x of gates and their exponentials stay in the thread. In powers of 2, by channel, with B the sum before
a block and D_J the sum of block J::

    b_i = B + x_i        B = N + r, N whole        y = x + r        c_J the whole number nearest D_J / 2
    left  = k 2^y, q 2^y        right_J = k 2^(c_J - y)
    A[:, block J] = (left 2^(N - N_J - c_J)) right_J^T      k^ = left 2^N      k~ = k 2^(c - y) 2^(b_C - N - c)

So all that differs between blocks is a power of 2 for a block and channel: left operands are rounded once, kept in
registers, and multiplied in 16 bits without a further error. Exponents of left and right are at most 58 while no
block's gates sum to less than LIMIT, -80 nats; pairs above the diagonal may be infinite, and `where` drops them. No
gate lies between a token and itself: P_ii comes from a product of each block's q and k as they are, rounded in neither.
Where gates are strong little else is left of P, and dbeta's largest errors were those of rounded operands there.

*Strong chunks* have a block and channel below LIMIT. `prepare` flags them; its q^ and e^(b_C) are right there too.
`mend` makes k~, P, W and U of flagged chunks again: pairs inside a block by levels (tokens meet at the middle of the
smallest block of 2^n tokens that holds both), pairs of different blocks as above with c_J at the block's end. No
exponent is above 1, so nothing overflows, and every gate is allowed. A program looks through at most 64 flags.

For a gradient T leaves too (`d_T`), and strengths below LEAST in size count as LEAST, since it divides by them.

A program has one role: it waits at `ready`, once for each half of the channels and once for v, which comes to q's place
while the inverse (delta_inverse.py) is made; nobody waits for it. Packed sequences: rows of the next sequence are zeros
here, gates too. Bytes per chunk and value head at K = V = 128, bf16, gates float32: 80 KiB in, 72 out. Shared memory:
68 KiB, two programs a multiprocessor.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ..launch.plan import Box, Draft, Spec, cdiv
from ..portable.tiles import FLOOR
from .delta_chunk import VARYING, C, barrier, load_tokens, row_column
from .delta_inverse import allocate_scratch, eliminate, inverse, reinterpret, spread
from .gluon import copy_in, copy_out, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import invalidate_stages, new_barriers
from .tiles import LOG2E, add, blocks_of_16, keep_rows, which_chunk

HALF = gl.constexpr(64)  # channels at a time
LIMIT = gl.constexpr(-80.0)  # nats of a block of 16 tokens, as in portable/gla_forward.py for bf16
REGISTERS = 240  # of a thread: two programs share a multiprocessor

# layouts of registers: a warp has a block of 16 tokens, a thread two channels of it
COL = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))  # [64, 64]
THREE = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))  # the same as [4, 16, 64]
OF_THREE = gl.constexpr(gl.SliceLayout(1, THREE.value))  # [4, 64]
OF_D = gl.constexpr(gl.SliceLayout(0, OF_THREE.value))  # [64]
OF_R = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, THREE.value)))  # [16]
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # [64]
# products' sums: of all tokens and a block's [64, 16], of blocks by themselves [4, 16, 16], of all [64, 64]
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
MMA_OWN = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
LEFT_OWN = gl.constexpr(gl.DotOperandLayout(0, MMA_OWN.value, 2))
RIGHT_OWN = gl.constexpr(gl.DotOperandLayout(1, MMA_OWN.value, 2))
FRAG = gl.constexpr(blocks_of_16(64))  # left operands seen as [4, 16, 64]
OF_FRAG = gl.constexpr(gl.SliceLayout(1, FRAG.value))  # [4, 64]
# layouts of shared memory
CUBE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
SQUARE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

Boxes = namedtuple("Boxes", "q k v g")
Made = namedtuple("Made", "q k W U P T")  # boxes of q^, k~, ...


@gluon.jit
def load_blocks(tile):
    """A tile [64, 64] as [4, 16, 64], in float32."""
    return gl.convert_layout(tile.load(COL).to(gl.float32).reshape([4, 16, HALF]), THREE)


@gluon.jit
def put(tile, x, layout: gl.constexpr):
    """x [4, 16, 64] to a tile [64, 64]."""
    tile.store(gl.convert_layout(x.to(tile.dtype).reshape([C, HALF]), layout))


@gluon.jit
def whole(x):
    """The nearest whole number."""
    return gl.floor(x + 0.5)


@gluon.jit
def sum_gates(n: gl.constexpr, t_q, t_k, t_g, ready, g, chunk, N_K: gl.constexpr, PACKED: gl.constexpr):
    """Wait for half n; its gates' running sums in each block, in base 2 [4, 16, 64]. Ask for the next half's gates."""
    mbarrier.wait(ready.index(n), 0)
    b_K, b_Q = t_k.index(n).reshape([C, HALF]), t_q.index(n).reshape([C, HALF])
    if PACKED and chunk.stop - chunk.o_t < C:  # the rest is another sequence's
        keep_rows(b_K, chunk.stop - chunk.o_t, COL)
        keep_rows(b_Q, chunk.stop - chunk.o_t, COL)
        keep_rows(t_g.index(0).reshape([C, HALF]), chunk.stop - chunk.o_t, COL)
    b_g = t_g.index(0).reshape([C, HALF]).load(COL).to(gl.float32)
    if n + 1 < N_K:  # the gates have one tile
        fence_async_shared()
        barrier()
        copy_in(g, [chunk.i_b, chunk.i_h, chunk.o_t, (n + 1) * HALF], ready.index(n + 1), t_g.index(0))
    b_g = gl.where(b_g < FLOOR, FLOOR, b_g) * LOG2E  # NaN is not below, and stays
    b_g = gl.convert_layout(b_g.reshape([4, 16, HALF]), THREE)
    return gl.associative_scan(b_g, 1, add)


@gluon.jit
def four_rows(D, t_D):
    """The rows of D [4, 64] by themselves, by way of t_D."""
    reinterpret(t_D, gl.float32, [4, HALF], FLAT_2).store(D)
    return t_D.index(0).load(OF_D), t_D.index(1).load(OF_D), t_D.index(2).load(OF_D), t_D.index(3).load(OF_D)


@gluon.jit
def to_border(x, n: gl.constexpr):
    """The decay between each token of a block and the middle of its 2^(n + 1) tokens, from prefix sums [4, 16, 64]."""
    by_border: gl.constexpr = gl.BlockedLayout([1, 8 >> n, 2 << n, 2], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, by_border)))
    y = gl.convert_layout(x.reshape([4, 8 >> n, 2 << n, 64]), by_border)
    r = gl.arange(0, 2 << n, layout=of_rows)[None, None, :, None]
    middle = gl.sum(gl.where(r == (1 << n) - 1, y, -0.0), 2)  # up to the last token before the border
    E = gl.exp2(-gl.abs(y - middle[:, :, None, :]))
    return gl.convert_layout(E.reshape([4, 16, 64]), THREE)


@gluon.jit
def meet(total, x, right, n: gl.constexpr, J: gl.constexpr):
    """Add to columns of block J the pairs inside the block that meet at level n."""
    more = mma_v2(x, right.index(J).permute((1, 0)).load(RIGHT), gl.zeros([64, 16], gl.float32, MMA))
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))[None, :] + 16 * J
    return gl.where((i > j) & (((i ^ j) >> n) == 1), total + more, total)


@gluon.jit
def add_level(X, tile, right, n: gl.constexpr):
    """Add a level's pairs to the four blocks of columns."""
    x, added = tile.reshape([C, HALF]).load(LEFT), ()
    for J in gl.static_range(4):
        added += (meet(X[J], x, right, n, J),)
    return added


@gluon.jit
def add_levels(A, P, x, b_K, b_Q, t_two, right):
    """Add the pairs inside blocks, level by level: both tokens decay to the border at which they meet."""
    for level in gl.static_range(4):
        E = to_border(x, level)
        put(t_two.index(0).reshape([C, HALF]), load_blocks(b_K) * E, COL)
        put(t_two.index(1).reshape([C, HALF]), load_blocks(b_Q) * E, COL)
        A = add_level(A, t_two.index(0), right, level)
        P = add_level(P, t_two.index(1), right, level)
    return A, P


@gluon.jit
def store_factors(tile, J: gl.constexpr, exponents, b, OTHERS: gl.constexpr):
    """Powers of 2 [4, 64] of a tile's row J, of 16 bits; with OTHERS 0 in block J."""
    f = gl.exp2(exponents)
    if OTHERS:
        f = gl.where(b == J, 0.0, f)
    tile.index(J).store(f.to(tile.dtype))


@gluon.jit
def store_decays(t_F, D, sums, b, STRONG: gl.constexpr):
    """Powers of 2 between blocks to t_F, from the blocks' sums of gates D [4, 64], and `sums`, each of them [64].

    Returns the chunk's sum, the sums before each block, those in whole numbers, and the blocks' middles, or their ends.
    """
    MIDDLE: gl.constexpr = 1.0 if STRONG else 0.5
    D_0, D_1, D_2, D_3 = sums
    to_2 = D_0 + D_1
    to_3, all_D = to_2 + D_2, to_2 + (D_2 + D_3)
    n_1, n_2, n_3 = whole(D_0), whole(to_2), whole(to_3)
    begin = gl.where(b == 3, to_3[None, :], gl.where(b == 2, to_2[None, :], gl.where(b == 1, D_0[None, :], 0.0)))
    n_b, m = whole(begin), whole(D * MIDDLE)
    m_0, m_1, m_2, m_3 = whole(D_0 * MIDDLE), whole(D_1 * MIDDLE), whole(D_2 * MIDDLE), whole(D_3 * MIDDLE)
    store_factors(t_F, 0, n_b - m_0[None, :], b, STRONG)
    store_factors(t_F, 1, n_b - (n_1 + m_1)[None, :], b, STRONG)
    store_factors(t_F, 2, n_b - (n_2 + m_2)[None, :], b, STRONG)
    store_factors(t_F, 3, n_b - (n_3 + m_3)[None, :], b, STRONG)
    store_factors(t_F, 4, n_b, b, False)
    return all_D, begin, n_b, m


@gluon.jit
def add_own(own, t_q, t_k):
    """Add the products of each block's q and k as they are, of whose sums P takes the diagonal."""
    blocks_k = reinterpret(t_k, t_k.dtype, [4, 16, HALF], CUBE).permute((0, 2, 1)).load(RIGHT_OWN)
    blocks_q = reinterpret(t_q, t_q.dtype, [4, 16, HALF], CUBE).load(LEFT_OWN)
    return mma_v2(blocks_q, blocks_k, own)


@gluon.jit
def scale_left(b_K, b_Q, b_k, y):
    """k 2^y and q 2^y, rounded once, in the places of k and q and as [4, 16, 64] in registers."""
    s = gl.exp2(y)
    b_q = load_blocks(b_Q)
    put(b_K, b_k * s, COL)
    put(b_Q, b_q * s, COL)
    k_s = gl.convert_layout(b_K.load(LEFT).reshape([4, 16, HALF]), FRAG)
    return k_s, gl.convert_layout(b_Q.load(LEFT).reshape([4, 16, HALF]), FRAG)


@gluon.jit
def add_columns(A, P, k_s, q_s, factors, right):
    """Add a half's pairs to four blocks of columns: k_s, q_s [4, 16, 64]. Rows above a block are masked in the end."""
    added_A, added_P = (), ()
    for J in gl.static_range(4):
        f = factors.index(J).load(OF_FRAG)[:, None, :]
        R = right.index(J).permute((1, 0)).load(RIGHT)
        added_A += (mma_v2(gl.convert_layout((k_s * f).reshape([C, HALF]), LEFT), R, A[J]),)
        added_P += (mma_v2(gl.convert_layout((q_s * f).reshape([C, HALF]), LEFT), R, P[J]),)
    return added_A, added_P


@gluon.jit
def joined(X):
    """Four blocks of columns [64, 16] side by side."""
    x = gl.join(gl.join(X[0], X[1]), gl.join(X[2], X[3]))  # [64, 16, 2, 2]
    return gl.convert_layout(x.permute((0, 3, 2, 1)).reshape([64, 64]), WIDE)


@gluon.jit
def store_P(P, own, o_i, o_j, t_D, d_P):
    """A tile of P: below its diagonal the sums of pairs, on it those of `own` [4, o_i, o_j], by way of t_D."""
    reinterpret(t_D, gl.float32, [4, 4, 16], FLAT_2).index(0).store(gl.sum(gl.where(o_i == o_j, own, 0.0), 2))
    i, j = row_column(C, WIDE)
    P_own = gl.where(i == j, t_D.index(0).load(gl.SliceLayout(1, WIDE))[:, None], 0.0)
    P = gl.where(i > j, joined(P), P_own)
    t_P = gl.allocate_shared_memory(d_P.dtype, [1, 1, C, C], d_P.layout)
    t_P.reshape([C, C]).store(P.to(d_P.dtype))
    return t_P


@gluon.jit
def store_T(A, t_beta, d_P):
    """A tile of T = (I + A)^-1 diag(beta), from the sums of pairs, which lack beta."""
    i, j = row_column(C, WIDE)
    strength = -t_beta.load(gl.SliceLayout(1, WIDE))[:, None]
    scratch = allocate_scratch()
    spread(gl.where(i > j, strength * joined(A), 0.0), scratch, 1)
    eliminate(scratch, 0, 1)
    Y = inverse(scratch, 1, WIDE) * t_beta.load(gl.SliceLayout(0, WIDE))[None, :]
    t_T = gl.allocate_shared_memory(d_P.dtype, [1, 1, C, C], d_P.layout)
    t_T.reshape([C, C]).store(Y.to(d_P.dtype))
    return t_T


@gluon.jit
def begin_product(t_T, tile):
    """Begin T x of a tile [1, 1, 64, 64]."""
    zeros = gl.zeros([64, 64], gl.float32, WIDE)
    return warpgroup_mma(t_T.reshape([64, 64]), tile.reshape([64, 64]), zeros, use_acc=False, is_async=True)


@gluon.jit
def apply_T(t_T, t_k, t_v, N_K: gl.constexpr, N_V: gl.constexpr):
    """W = T k^ in the place of k^, and U = T v in that of v; all products under way at once."""
    W_0 = begin_product(t_T, t_k.index(0))
    if N_K == 2:
        W_1 = begin_product(t_T, t_k.index(1))
    U_0 = begin_product(t_T, t_v.index(0))
    if N_V == 2:
        U_1 = begin_product(t_T, t_v.index(1))
    W_0 = warpgroup_mma_wait(N_K + N_V - 1, deps=[W_0])
    if N_K == 2:
        W_1 = warpgroup_mma_wait(N_V, deps=[W_1])
    if N_V == 2:
        U_0, U_1 = warpgroup_mma_wait(0, deps=[U_0, U_1])
    else:
        U_0 = warpgroup_mma_wait(0, deps=[U_0])
    barrier()  # all warps' products have read k^ and v
    t_k.index(0).reshape([C, HALF]).store(W_0.to(t_k.dtype))
    if N_K == 2:
        t_k.index(1).reshape([C, HALF]).store(W_1.to(t_k.dtype))
    t_v.index(0).reshape([C, HALF]).store(U_0.to(t_k.dtype))
    if N_V == 2:
        t_v.index(1).reshape([C, HALF]).store(U_1.to(t_k.dtype))


@gluon.jit
def prepare_chunk(
    pid, chunk, boxes, beta, s_beta, to, through, strong, G,
    K: gl.constexpr, V: gl.constexpr, LEAST: gl.constexpr, STRONG: gl.constexpr, PACKED: gl.constexpr,
):
    """(1) of chunk pid, P and its flag; of a STRONG one all but q^ and e^(b_C), pairs inside blocks by levels."""
    q, k, v, g = boxes
    i_b, i_h, o_t, stop = chunk.i_b, chunk.i_h, chunk.o_t, chunk.stop
    N_K: gl.constexpr = K // HALF
    N_V: gl.constexpr = V // HALF

    # shared memory
    t_q = gl.allocate_shared_memory(q.dtype, [N_K, 1, 1, C, HALF], q.layout)
    t_k = gl.allocate_shared_memory(k.dtype, [N_K, 1, 1, C, HALF], k.layout)
    t_g = gl.allocate_shared_memory(g.dtype, [1, 1, 1, C, HALF], g.layout)
    t_beta = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    t_D = gl.allocate_shared_memory(gl.float32, [4, HALF], FLAT)
    t_F = gl.allocate_shared_memory(k.dtype, [5, 4, HALF], FLAT_2)
    t_two = gl.allocate_shared_memory(k.dtype, [2, 1, 1, C, HALF], k.layout)  # right operands, and k~
    t_R = reinterpret(t_two.index(0), k.dtype, [4, 16, HALF], SQUARE)
    ready = new_barriers(N_K + 1, 1)
    fence_async_shared()
    barrier()

    # load
    for n in gl.static_range(N_K):
        bar = ready.index(n)
        mbarrier.expect(bar, 2 * k.block_type.nbytes + g.block_type.nbytes)
        if n == 0:
            copy_in(g, [i_b, i_h, o_t, 0], bar, t_g.index(0))
        copy_in(k, [i_b, i_h // G, o_t, n * HALF], bar, t_k.index(n))
        copy_in(q, [i_b, i_h // G, o_t, n * HALF], bar, t_q.index(n))
    b_beta = load_tokens(beta, s_beta, i_b, i_h, o_t + gl.arange(0, C, layout=LINE), stop)
    t_beta.store(gl.where(gl.abs(b_beta) < LEAST, LEAST, b_beta))

    # compute: the sums of pairs over channels, in four blocks of columns; k~ and q^ leave, k^ stays in k's place
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, OF_THREE))[:, None]
    r = gl.arange(0, 16, layout=OF_R)[None, :, None]
    o_d = gl.arange(0, HALF, layout=OF_D)
    o_i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA_OWN)))[None, :, None]
    o_j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA_OWN)))[None, None, :]
    own, none = gl.zeros([4, 16, 16], gl.float32, MMA_OWN), gl.zeros([C, 16], gl.float32, MMA)
    A, P = (none, none, none, none), (none, none, none, none)
    least = gl.zeros([4, HALF], gl.float32, OF_THREE)
    for n in gl.static_range(N_K):
        b_K, b_Q = t_k.index(n).reshape([C, HALF]), t_q.index(n).reshape([C, HALF])
        x = sum_gates(n, t_q, t_k, t_g, ready, g, chunk, N_K, PACKED)
        D = gl.sum(gl.where(r == 15, x, -0.0), 1)  # [4, 64]: the sum of each block's gates, its last row
        least = gl.where(D < least, D, least)
        sums = four_rows(D, t_D)
        if n > 0:
            tma.store_wait(0)
            barrier()  # the last half's k~ has left
        if STRONG:
            A, P = add_levels(A, P, x, b_K, b_Q, t_two, t_R)
        # the blocks' begins, in whole numbers, and what is left of them
        all_D, begin, n_b, m = store_decays(t_F, D, sums, b, STRONG)
        if not STRONG:
            gl.store(through + pid.to(gl.int64) * K + n * HALF + o_d, gl.exp2(all_D))
        y = x + (begin - n_b)[:, None, :]
        b_k = load_blocks(b_K)
        right = b_k * gl.exp2(m[:, None, :] - y)
        put(t_two.index(0).reshape([C, HALF]), right, COL)
        put(t_two.index(1).reshape([C, HALF]), right * gl.exp2(all_D[None, :] - (n_b + m))[:, None, :], COL)  # k~
        own = add_own(own, t_q.index(n), t_k.index(n))
        k_s, q_s = scale_left(b_K, b_Q, b_k, y)
        A, P = add_columns(A, P, k_s, q_s, t_F, t_R)
        f = t_F.index(4).load(OF_FRAG)[:, None, :]
        put(b_K, k_s * f, LEFT)  # k^, for W
        if not STRONG:
            put(b_Q, q_s * f, LEFT)
        fence_async_shared()
        barrier()
        copy_out(to.k, [pid, 0, 0, n * HALF], t_two.index(1))
        if not STRONG:
            copy_out(to.q, [pid, 0, 0, n * HALF], t_q.index(n))

    # load: v comes while the inverse is made, to q's place
    if N_V <= N_K:
        t_v = t_q
    else:
        t_v = gl.allocate_shared_memory(v.dtype, [N_V, 1, 1, C, HALF], v.layout)
    tma.store_wait(0)
    barrier()  # q^ and k~ have left
    bar = ready.index(N_K)
    mbarrier.expect(bar, N_V * v.block_type.nbytes)
    for n in gl.static_range(N_V):
        copy_in(v, [i_b, i_h, o_t, n * HALF], bar, t_v.index(n))
    if not STRONG:
        mild = gl.min(gl.min(least, 1), 0) >= LIMIT * LOG2E
        gl.store(strong + pid, 1 - mild.to(gl.int32))

    # compute: P, T, W and U
    t_P = store_P(P, own, o_i, o_j, t_D, to.P)
    t_T = store_T(A, t_beta, to.P)
    mbarrier.wait(bar, 0)
    if PACKED and stop - o_t < C:  # T has zeros in these columns, which NaN would not heed
        for n in gl.static_range(N_V):
            keep_rows(t_v.index(n).reshape([C, HALF]), stop - o_t, COL)
    fence_async_shared()
    barrier()
    apply_T(t_T, t_k, t_v, N_K, N_V)

    # store: the compiler gives a tile's bytes away after the last use that it sees, so nothing comes between these
    # copies and the wait for them
    fence_async_shared()
    barrier()
    copy_out(to.P, [pid, 0, 0, 0], t_P)
    if to.T is not None:
        copy_out(to.T, [pid, 0, 0, 0], t_T)
    for n in gl.static_range(N_K):
        copy_out(to.W, [pid, 0, 0, n * HALF], t_k.index(n))
    for n in gl.static_range(N_V):
        copy_out(to.U, [pid, 0, 0, n * HALF], t_v.index(n))
    tma.store_wait(0)
    invalidate_stages(ready)


@gluon.jit(do_not_specialize=VARYING)
def prepare(
    q, k, v, g, beta, s_bb, s_bt, s_bh, q_hat, k_til, d_W, d_U, d_P, d_T, through, strong, cu, N, T, HV, G,
    K: gl.constexpr, V: gl.constexpr, LEAST: gl.constexpr,
):
    """(1) and P of a chunk of a value head, and its flag. All but beta, through and strong are boxes of 64 columns."""
    pid = gl.program_id(0)
    boxes, to, s_beta = Boxes(q, k, v, g), Made(q_hat, k_til, d_W, d_U, d_P, d_T), (s_bb, s_bt, s_bh)
    chunk = which_chunk(pid, cu, N, T, HV, C, 4)
    prepare_chunk(pid, chunk, boxes, beta, s_beta, to, through, strong, G, K, V, LEAST, False, cu is not None)


@gluon.jit(do_not_specialize=VARYING)
def mend(
    q, k, v, g, beta, s_bb, s_bt, s_bh, k_til, d_W, d_U, d_P, d_T, strong, cu, n_flags, n_programs, N, T, HV, G,
    K: gl.constexpr, V: gl.constexpr, LEAST: gl.constexpr,
):
    """k~, P, W and U of the strong chunks among at most 64: far apart, since neighbours are often strong together."""
    boxes, to, s_beta = Boxes(q, k, v, g), Made(None, k_til, d_W, d_U, d_P, d_T), (s_bb, s_bt, s_bh)
    of_flags: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    begin = gl.program_id(0)
    o_n = begin + n_programs * gl.arange(0, 64, layout=of_flags)
    if gl.max(gl.load(strong + o_n, mask=o_n < n_flags, other=0), 0) != 0:
        for i in range(gl.cdiv(n_flags - begin, n_programs)):
            pid = begin + i * n_programs
            if gl.load(strong + pid) != 0:
                chunk = which_chunk(pid, cu, N, T, HV, C, 4)
                prepare_chunk(pid, chunk, boxes, beta, s_beta, to, None, strong, G, K, V, LEAST, True, cu is not None)


# The plan.


def launch_prepare(draft: Draft, q_hat: Box, through: Spec, strong: Spec, **same) -> None:
    """`prepare` of all chunks, then `mend` of those that it flags; `same`: the arguments that both take, by name."""
    n, same = strong.shape[0], same | {"strong": strong, "num_warps": 4, "maxnreg": REGISTERS}
    draft.launch(prepare, n, q_hat=q_hat, through=through, **same)
    n_programs = max(cdiv(n, 64), min(n, 2 * draft.hardware.multiprocessors))  # one round of them, if possible
    draft.launch(mend, n_programs, n_flags=n, n_programs=n_programs, **same)
