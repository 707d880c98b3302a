"""The gated delta rule on Hopper, on a page: one role inverts a chunk ahead, two walk the state (chapter 23).

Computes the same as :mod:`gla_ref.pages.gated_delta_rule`. With b_i = g_1 + ... + g_i in a chunk of C tokens, and
E_ij = e^(b_i - b_j) for j <= i, 0 above the diagonal::

    N = -tril(beta_i (k_i k_j^T) E_ij, -1)     P = (q k^T) * E     T = (I - N)^-1 diag(beta)     (1)
    v' = v - e^b (k S)                         w = T v'                                          (2)
    o = scale (e^b (q S) + P w)                S <- e^(b_C) S + k^T (e^(b_C - b) w)              (3)

(1) needs no state. (2) and (3) are a chain from state to state, and no step mixes two columns of the state. So a
program owns a value head of a sequence, and its roles, of four warps each, pass chunks on through shared memory::

    loader     asks the copy engine (TMA) for q, k, v of a chunk              waits for `empty`
    solver     (1) and b, a chunk ahead of the walkers                        waits for `ready`
    walkers    (2), (3) for half of the columns each; S in registers          wait for `ready` and `solved`

Chunk c lies in stage c % 2, and its round is c // 2. Each stage has three barriers::

    empty     walkers -> loader                 2 arrivals            q, k, v, b, P, T have been read
    ready     copy engine -> solver, walkers    the announced bytes   q, k, v are there
    solved    solver -> walkers                 1 arrival             b, P, T are there

wait(bar, p) returns once the last phase that ended has parity p; a fresh barrier counts as having ended phase -1, of
parity 1. In round n roles wait at `ready` and `solved` for phase n, of parity n & 1, the loader at `empty` for phase
n - 1. No role waits forever: each waits for earlier events of the same chunk, or for the chunk two before.

A wait for phase m is right if phase m - 1 has ended before it, and phase m + 1 does not end before it returns. The
first holds, since a role waits for all phases of a barrier in order. The second holds (`empty` n is its phase n)::

    ready     n + 1 ends after `empty` n: both walkers are past `ready` n and `solved` n, so the solver past `ready` n
    solved    n + 1 ends after `ready` n + 1, which ends after `empty` n: both walkers are past `solved` n
    empty     n ends after both walkers are past `ready` n, which the loader asks for once it is past `empty` n - 1

So the solver, once past `ready` n, may overwrite b, P, T of round n - 1: both walkers have read them.

The copy engine and WGMMA see threads' writes to shared memory only after these threads' fence. One thread arrives
for its role; the compiler lets the role's warps meet before. A barrier's bytes are the hardware's until `invalidate`.

`inverse` eliminates the four blocks of 16 on the diagonal of I - N in float32, a thread per column. Columns of blocks
follow from the last to the first, Y_j = (I_j + sum_(m > j) Y_m N_mj) (I - N_jj)^-1, where I_j is column j of blocks of
the unit matrix. A warp has 16 rows of every Y_j and needs no rows of another warp. These products are in TF32, which
keeps 10 bits of the fraction; T is then rounded to bf16, which keeps 7.

A chunk moves 2 C (2 K + 2 V) bytes, 64 KiB, for 2 C (2 C K + 3 K V + 2 C V) FLOPs, 10.5 M, and 0.4 M for the inverse.
Shared memory: 201 KiB, so a multiprocessor runs one program. The solver's dependent instructions limit the time.

Names: T alone counts tokens; t_T and b_T are T of (1). t_x is a tile in shared memory, b_x the values of one chunk. D
is a walker's half, in `inverse` the diagonal blocks, in `boxes` the size of a head. HV counts value heads, G value
heads per key head, BV a walker's columns. `square`, `half`: layouts of results. `walk` is the kernel of all roles.

Left out: all sizes but K = V = 128, packed sequences, initial states, gradients, segments for few heads, float16,
float32. Keys should have length 1: with longer ones the inverse may grow large. A log gate below -104 counts as -104.
After many such gates in one chunk e^(b_i - b_j) has a relative error of 1e-3, which is below bf16's rounding of 4e-3.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 has the first name
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
Shared = gl.shared_memory_descriptor
reinterpret = getattr(Shared, "reinterpret", None) or Shared._reinterpret  # the same

LOG2E = gl.constexpr(1.4426950408889634)
C, STAGES, K, V, BV = gl.constexpr(64), gl.constexpr(2), gl.constexpr(128), gl.constexpr(128), gl.constexpr(64)


@gluon.jit
def loader(q, k, v, tiles, bars, i_b, i_h, i_k, T):
    t_q, t_k, t_v, t_b, t_P, t_T = tiles
    empty, ready, solved = bars
    for c in range(gl.cdiv(T, C)):
        s = c % STAGES
        mbarrier.wait(empty.index(s), ((c // STAGES) & 1) ^ 1)  # phase n - 1
        # the copies end the phase of `ready` when all these bytes have come; beyond the last token they are zeros
        bar = ready.index(s)
        mbarrier.expect(bar, 2 * q.block_type.nbytes + 2 * v.block_type.nbytes)
        copy_in(k, [i_b, i_k, c * C, 0], bar, t_k.index(s))
        copy_in(q, [i_b, i_k, c * C, 0], bar, t_q.index(s))
        copy_in(v, [i_b, i_h, c * C, 0], bar, t_v.index(2 * s))
        copy_in(v, [i_b, i_h, c * C, BV], bar, t_v.index(2 * s + 1))


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def times(x, blocks, m: gl.constexpr, j: gl.constexpr, acc, mma: gl.constexpr):
    """acc + x B in TF32, of rows x [C, 16] and block B = (m, j) [16, 16] of a tile."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 1)
    B = blocks.slice(16 * m, 16).slice(16 * j, 16, 1).load(right)
    return mma_v2(gl.convert_layout(x, left), B, acc, "tf32")  # rows stay with their warp


@gluon.jit
def inverse(N, scratch, layout: gl.constexpr):
    """(I - N)^-1 of N [64, 64], strictly lower triangular."""
    t_D, t_N, t_Y = scratch
    i, j = gl.arange(0, C, layout=gl.SliceLayout(1, layout)), gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    t_N.store(N)
    # t_D[j, block, i]: element (i, j) of a block on the diagonal; all other blocks are zeroed, so a sum picks it
    D = gl.sum(gl.where(i[:, None] // 16 == j[None, :] // 16, N, 0.0).reshape([4, 16, 4, 16]), 2)  # [4, 16, 16]
    by_columns: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    reinterpret(t_D, gl.float32, [16, 4, 16], by_columns).store(D.permute((2, 0, 1)))

    # the four inverses on the diagonal, side by side; 128 threads for 64 columns, so two make the same
    four: gl.constexpr = gl.BlockedLayout([1, 16, 1], [2, 1, 16], [2, 2, 1], [2, 1, 0])
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, four)))[None, None, :]
    Y = gl.where(i == j, 1.0, gl.zeros([4, 16, 16], gl.float32, four))
    for n in gl.static_range(15):  # row n is done: add its part to the rows below
        row = gl.sum(gl.where(i == n, Y, 0.0), 1)  # [4, 16]: n-th register
        Y += t_D.index(n).load(gl.SliceLayout(2, four))[:, :, None] * row[:, None, :]
    t_Y.store(Y.reshape([C, 16]))

    # columns of blocks; a warp has 16 rows of each; I_j is 1 where d is 16 j
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    i, j = gl.arange(0, C, layout=gl.SliceLayout(1, mma)), gl.arange(0, 16, layout=gl.SliceLayout(0, mma))
    d, none = i[:, None] - j[None, :], gl.zeros([C, 16], gl.float32, mma)
    Y_3 = times(gl.where(d == 48, 1.0, none), t_Y, 3, 0, none, mma)  # a block of t_Y, but in the layout `mma`
    X_2 = times(Y_3, t_N, 3, 2, gl.where(d == 32, 1.0, none), mma)
    Y_2 = times(X_2, t_Y, 2, 0, none, mma)
    X_1 = times(Y_2, t_N, 2, 1, times(Y_3, t_N, 3, 1, gl.where(d == 16, 1.0, none), mma), mma)
    Y_1 = times(X_1, t_Y, 1, 0, none, mma)
    X_0 = times(Y_2, t_N, 2, 0, times(Y_3, t_N, 3, 0, gl.where(d == 0, 1.0, none), mma), mma)
    Y_0 = times(times(Y_1, t_N, 1, 0, X_0, mma), t_Y, 0, 0, none, mma)
    joined = gl.join(gl.join(Y_0, Y_1), gl.join(Y_2, Y_3))  # [row, column, j % 2, j // 2]
    return gl.convert_layout(joined.permute((0, 3, 2, 1)).reshape([C, C]), layout)


@gluon.jit
def solver(g, beta, tiles, bars, t_beta, scratch, i_b, i_h, HV, T):
    t_q, t_k, t_v, t_b, t_P, t_T = tiles
    empty, ready, solved = bars
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # 16 rows per warp, by WGMMA
    i = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
    rows = gl.arange(0, C, layout=line)
    first = i_b.to(gl.int64) * T * HV + i_h  # from here on 32 bits are enough
    g, beta = g + first, beta + first
    b_g = gl.load(g + rows * HV, mask=rows < T, other=0.0).to(gl.float32)
    b_beta = gl.load(beta + rows * HV, mask=rows < T, other=0.0).to(gl.float32)
    for c in range(gl.cdiv(T, C)):
        s = c % STAGES
        b_q, b_k = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K])
        b_g *= LOG2E
        # in base 2, where -150 is -104 in base e; a sum of -inf would make b_i - b_j NaN
        b = gl.associative_scan(gl.where(b_g < -150.0, -150.0, b_g), 0, add)
        t_beta.store(b_beta)
        rows += C  # the next chunk's gates are asked for long before they are needed
        b_g = gl.load(g + rows * HV, mask=rows < T, other=0.0).to(gl.float32)
        b_beta = gl.load(beta + rows * HV, mask=rows < T, other=0.0).to(gl.float32)
        mbarrier.wait(ready.index(s), (c // STAGES) & 1)
        none = gl.zeros([C, C], gl.float32, square)
        # is_async: threads go on while it runs; wait(n, [x]): until x is there and at most n products run
        N = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        P = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        t_b.index(s).store(b)
        b_i, b_j = t_b.index(s).load(gl.SliceLayout(1, square)), t_b.index(s).load(gl.SliceLayout(0, square))
        E = gl.exp2(b_i[:, None] - b_j[None, :])  # not masked yet: above the diagonal it may be infinite
        N = warpgroup_mma_wait(1, [N]) * E * t_beta.load(gl.SliceLayout(1, square))[:, None]
        N = gl.where(i > j, -N, 0.0)  # (1)
        P = warpgroup_mma_wait(0, [P])
        t_P.index(s).store(gl.where(i >= j, P * E, 0.0).to(b_q.dtype))  # (1)
        b_T = inverse(N, scratch, square) * t_beta.load(gl.SliceLayout(0, square))[None, :]  # (1)
        t_T.index(s).store(b_T.to(b_q.dtype))
        fence()
        mbarrier.arrive(solved.index(s), count=1)


@gluon.jit
def walker(o, S_last, tiles, bars, t_S, t_u, i_b, i_h, T, scale, D: gl.constexpr):
    t_q, t_k, t_v, t_b, t_P, t_T = tiles
    empty, ready, solved = bars
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])  # of [C, BV] and of [K, BV]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S = gl.zeros([K, BV], gl.float32, half)
    for c in range(gl.cdiv(T, C)):
        s = c % STAGES
        b_q, b_k = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K])
        none = gl.zeros([C, BV], gl.float32, half)
        b_v = t_v.index(2 * s + D).reshape([C, BV])  # later v', then w
        t_S.store(S.to(b_q.dtype))  # the second operand: in shared memory, in 16 bits
        fence()
        mbarrier.wait(ready.index(s), (c // STAGES) & 1)
        x = warpgroup_mma(b_k, t_S, none, use_acc=False, is_async=True)  # k S
        b_o = warpgroup_mma(b_q, t_S, none, use_acc=False, is_async=True)  # q S
        mbarrier.wait(solved.index(s), (c // STAGES) & 1)
        b = t_b.index(s).load(gl.SliceLayout(1, half))[:, None]
        b_C = gl.sum(t_b.index(s).slice(C - 1, 1).load(one), 0)
        since, until, through = gl.exp2(b), gl.exp2(b_C - b), gl.exp2(b_C)
        x = warpgroup_mma_wait(1, [x])
        b_v.store((b_v.load(half).to(gl.float32) - since * x).to(b_q.dtype))  # v' of (2)
        fence()
        w = warpgroup_mma(t_T.index(s), b_v, none, use_acc=False, is_async=True)  # w of (2)
        b_o = warpgroup_mma_wait(1, [b_o]) * since
        S *= through
        w = warpgroup_mma_wait(0, [w])
        tma.store_wait(0)  # the copy engine has read o of the chunk before in t_u
        t_u.reshape([C, BV]).store((w * until).to(b_q.dtype))
        fence()
        S = warpgroup_mma(b_k.permute((1, 0)), t_u.reshape([C, BV]), S, is_async=True)  # (3)
        b_v.store(w.to(b_q.dtype))
        fence()
        b_o = warpgroup_mma(t_P.index(s), b_v, b_o, is_async=True)  # (3)
        S = warpgroup_mma_wait(1, [S])  # so t_u is free for o
        b_o = warpgroup_mma_wait(0, [b_o])
        mbarrier.arrive(empty.index(s), count=1)
        t_u.reshape([C, BV]).store((b_o * scale).to(b_q.dtype))
        fence()
        copy_out(o, [i_b, i_h, c * C, D * BV], t_u)  # nothing beyond the last token
    tma.store_wait(0)
    o_k, o_v = gl.arange(0, K, layout=gl.SliceLayout(1, half)), gl.arange(0, BV, layout=gl.SliceLayout(0, half))
    gl.store(S_last + (gl.program_id(0).to(gl.int64) * K + o_k)[:, None] * V + (D * BV + o_v)[None, :], S)


@gluon.jit(do_not_specialize=("T", "HV", "G"))
def walk(q, k, v, g, beta, o, S_last, T, HV, G, scale):
    i_b, i_h = gl.program_id(0) // HV, gl.program_id(0) % HV
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # swizzled, as WGMMA reads tiles
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], k.layout)
    t_v = gl.allocate_shared_memory(q.dtype, [2 * STAGES, 1, 1, C, BV], v.layout)  # both halves of each stage
    t_b = gl.allocate_shared_memory(gl.float32, [STAGES, C], flat)
    t_P = gl.allocate_shared_memory(q.dtype, [STAGES, C, C], tile)
    t_T = gl.allocate_shared_memory(q.dtype, [STAGES, C, C], tile)
    t_S = gl.allocate_shared_memory(q.dtype, [2, K, BV], tile)
    t_u = gl.allocate_shared_memory(q.dtype, [2, 1, 1, C, BV], o.layout)  # e^(b_C - b) w, later o
    t_beta = gl.allocate_shared_memory(gl.float32, [C], flat)
    block: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    t_D = gl.allocate_shared_memory(gl.float32, [16, 4, 16], block)
    t_N = gl.allocate_shared_memory(gl.float32, [C, C], block)
    t_Y = gl.allocate_shared_memory(gl.float32, [C, 16], block)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    solved = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=2)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(solved.index(s), count=1)
    fence()
    tiles, bars = (t_q, t_k, t_v, t_b, t_P, t_T), (empty, ready, solved)
    # the lists: warps and registers of all roles but the first, which is the launch's warps and keeps 160 of 4 * 128
    gl.warp_specialize(
        [
            (walker, (o, S_last, tiles, bars, t_S.index(0), t_u.index(0), i_b, i_h, T, scale, 0)),
            (walker, (o, S_last, tiles, bars, t_S.index(1), t_u.index(1), i_b, i_h, T, scale, 1)),
            (solver, (g, beta, tiles, bars, t_beta, (t_D, t_N, t_Y), i_b, i_h, HV, T)),
            (loader, (q, k, v, tiles, bars, i_b, i_h, i_h // G, T)),
        ],
        [4, 4, 4],
        [160, 168, 24],
    )
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(empty.index(s))
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(solved.index(s))


def on_hopper(x):
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def check(name, x, shape, dtypes):
    """Refuse arguments that this page leaves out."""
    if x.shape != shape or min(shape) < 1:
        raise ValueError(f"{name}: expected {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {', '.join(map(str, dtypes))}, got {x.dtype}")
    if not on_hopper(x):
        raise ValueError(f"{name}: expected a tensor on a GPU of compute capability 9.0, got one on {x.device}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous, 16-byte aligned, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")


def boxes(x, width):
    """x seen as [B, H, T, D], of which a copy takes C tokens and `width` columns of one head."""
    B, T, H, D = x.shape
    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, C.value, width], layout)


def gated_delta_rule(q, k, v, g, beta, scale=None):
    """o [B, T, HV, V] and the state after the last token, float32 [B, HV, K, V], for K = V = 128, HV a multiple of H.

    q and k [B, T, H, K], v [B, T, HV, V], bfloat16; g, beta [B, T, HV], bfloat16 or float32; scale: K^-0.5 if None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, _), HV = q.shape, v.shape[2]
    if HV % max(H, 1):
        raise ValueError(f"v: expected heads a multiple of {H}, got {HV}")
    for name, x, shape in (("q", q, (B, T, H, K.value)), ("k", k, (B, T, H, K.value)), ("v", v, (B, T, HV, V.value))):
        check(name, x, shape, (torch.bfloat16,))
    for name, x in (("g", g), ("beta", beta)):
        check(name, x, (B, T, HV), (torch.bfloat16, torch.float32))
    o, S = torch.empty_like(v), v.new_empty(B, HV, K.value, V.value, dtype=torch.float32)
    walk[(B * HV,)](
        boxes(q, K.value), boxes(k, K.value), boxes(v, BV.value), g, beta, boxes(o, BV.value), S, T, HV, HV // H,
        K.value**-0.5 if scale is None else scale, num_warps=4, maxnreg=128,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gated_delta_rule_hopper: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gated_delta_rule)
