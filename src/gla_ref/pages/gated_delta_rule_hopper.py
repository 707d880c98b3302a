"""The gated delta rule on Hopper, on a page: a loader, a solver a chunk ahead, a walker (chapter 23).

Computes the same as :mod:`gla_ref.pages.gated_delta_rule`. With b_i = g_1 + ... + g_i in a chunk of C tokens, and
D_ij = e^(b_i - b_j) for j <= i, 0 above the diagonal::

    N = -tril(beta_i (k_i k_j^T) D_ij, -1)     P = (q k^T) * D     Y = (I - N)^-1                (1)
    v' = v - e^b (k S)                         v_hat = Y (beta v')                               (2)
    o = scale (e^b (q S) + P v_hat)            S <- e^(b_C) S + k^T (e^(b_C - b) v_hat)          (3)

(1) needs no state. (2) and (3) are a chain from state to state. A program owns a value head of a sequence, and its
roles pass chunks on through shared memory. Chunk c lies in stage c % 2, and its round is c // 2::

    loader    1 warp     asks the copy engine (TMA) for k, q, v; sums gates    waits for `done`
    solver    4 warps    (1), a chunk ahead of the walker                      waits for `keys`, `gated`, `ready`
    walker    8 warps    (2), (3); S stays in its registers                    waits for `keys`, `ready`, `solved`

    keys      copy engine -> solver, walker    k is there, and the solver needs no more to begin
    ready     copy engine -> solver, walker    q and v are there
    gated     loader -> solver                 the rows beta, b, e^b and e^(b_C - b) are there
    solved    solver -> walker                 Y beta and P are there, and so are the rows
    done      walker -> loader                 all of the chunk has been read

Each stage has these five. wait(bar, p) returns once the last phase that ended has parity p; a fresh barrier has ended
phase -1, of parity 1. In round n roles wait for phase n, of parity n & 1, at `done` for n - 1. No role waits for ever:
whoever ends a phase has waited, in this round, only at barriers above it, or for an earlier chunk. None is two phases
late: `done` n ends after `ready` n, before which the loader waits for `done` n - 1; n + 1 of the others after `done` n,
before which walker and solver wait for n. So the solver, past `keys` n, may overwrite its tiles of n - 1.

*The walker's tiles are transposed.* A first operand may be in registers, and its result is: S^T, v'^T and v_hat^T go
from product to product, only o^T to shared memory. S^T takes 64 of a thread's 192 registers (solver 104, loader 24).

*The inverse.* `eliminate` inverts blocks of 8 in float32, each row in two warps. `inverse` joins two such blocks, X, by
the block L between them, X + X L X, a warp per block of 16. Columns of these follow from the last to the first, Y_j =
X_j + (sum_(m > j) Y_m N_mj) X_j: a warp has 16 rows of all of them, and needs no other warp's. Products are in float16.
That is enough if no N_ij, with beta_i k_i . k_i for N_ii, is above 1 (1.0625, as keys are rounded). The solver votes,
and a second launch, EXACT, redoes stronger heads with three products for each. A branch would cost all chunks time.

The copy engine and WGMMA see threads' writes to shared memory only after these threads' fence. One thread arrives for
its role; the compiler makes the role's warps meet first. A barrier's bytes are the hardware's until `invalidate`.

A chunk moves 2 C (2 K + 2 V) bytes, 64 KiB, for 2 C (2 C K + 3 K V + 2 C V) FLOPs, 10.5 M, and 0.36 M for the inverse
(EXACT 1.08 M). Shared memory: 160 KiB (172) and barriers, so a multiprocessor runs one program.

Names: T counts tokens, HV value heads, G value heads per key head. t_x is a tile in shared memory, b_x a chunk's.

Left out: all sizes but K = V = 128, packed sequences, initial states, gradients, segments for few heads, float16,
float32. A log gate below -104 counts as -104. After many such gates in one chunk e^(b_i - b_j) has a relative error of
1e-3, which is below bf16's rounding of 4e-3.
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

LOG2E, MILD = gl.constexpr(1.4426950408889634), gl.constexpr(1.0625)  # the largest N_ij for float16
C, STAGES, K, V = gl.constexpr(64), gl.constexpr(2), gl.constexpr(128), gl.constexpr(128)
KEYS, READY, GATED, SOLVED, DONE = (gl.constexpr(i) for i in range(5))  # the barriers of a stage
BETA, SUM, SINCE, UNTIL = (gl.constexpr(i) for i in range(4))  # its rows: beta, b, e^b, e^(b_C - b)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def loader(q, k, v, g, beta, tiles, bars, i_b, i_h, i_k, HV, T):
    t_q, t_k, t_v, t_Y, t_P, t_rows = tiles
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows = gl.arange(0, C, layout=line)
    last = rows == C - 1
    first = i_b.to(gl.int64) * T * HV + i_h  # from here on 32 bits are enough
    g, beta = g + first, beta + first
    b_g = gl.load(g + rows * HV, mask=rows < T, other=0.0)
    b_beta = gl.load(beta + rows * HV, mask=rows < T, other=0.0)
    for c in range(gl.cdiv(T, C)):
        s = c % STAGES
        mbarrier.wait(bars.index(5 * s + DONE), ((c // STAGES) & 1) ^ 1)  # phase n - 1
        # copies end a phase when all the announced bytes have come; beyond the last token they are zeros
        mbarrier.expect(bars.index(5 * s + KEYS), k.block_type.nbytes)
        copy_in(k, [i_b, i_k, c * C, 0], bars.index(5 * s + KEYS), t_k.index(s))
        mbarrier.expect(bars.index(5 * s + READY), q.block_type.nbytes + v.block_type.nbytes)
        copy_in(q, [i_b, i_k, c * C, 0], bars.index(5 * s + READY), t_q.index(s))
        copy_in(v, [i_b, i_h, c * C, 0], bars.index(5 * s + READY), t_v.index(s))
        # in base 2, where -150 is -104 in base e; a sum of -inf would make b_i - b_j NaN
        b_g = b_g.to(gl.float32) * LOG2E
        b = gl.associative_scan(gl.where(b_g < -150.0, -150.0, b_g), 0, add)
        b_C = gl.sum(gl.where(last, b, 0.0), 0)
        t_rows.index(4 * s + BETA).store(b_beta.to(gl.float32))
        t_rows.index(4 * s + SUM).store(b)
        t_rows.index(4 * s + SINCE).store(gl.exp2(b))
        t_rows.index(4 * s + UNTIL).store(gl.exp2(b_C - b))
        mbarrier.arrive(bars.index(5 * s + GATED), count=1)
        rows += C  # the next chunk's gates are asked for long before they are needed
        b_g = gl.load(g + rows * HV, mask=rows < T, other=0.0)
        b_beta = gl.load(beta + rows * HV, mask=rows < T, other=0.0)


@gluon.jit
def blocks(tile):
    """A tile of blocks of 16, to be written at once."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], 16, 16], layout).index(0)


@gluon.jit
def spread(N, scratch, i, j):
    t_E, t_N, t_L, t_X = scratch
    # blocks on the diagonal: all others of their rows are zeroed, so sums pick them
    E = gl.sum(gl.where((i // 8 == j // 8) & (i > j), N, 0.0).reshape([8, 8, 8, 8]), 2)  # [8, 8, 8]
    t_E.store(E)
    L = gl.sum(gl.where((i // 16 == j // 16) & (i // 8 > j // 8), N, 0.0).reshape([4, 16, 4, 16]), 2)  # [4, 16, 16]
    blocks(t_L).store(L.to(t_L.dtype))
    # block 4 m + j of t_N is N_mj
    N = N.reshape([4, 16, 4, 16]).permute((0, 2, 1, 3)).reshape([16, 16, 16])
    blocks(t_N).store(N.to(t_N.dtype))


@gluon.jit
def eliminate(scratch, never):
    t_E, t_N, t_L, t_X = scratch
    eight: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [2, 2, 1], [2, 1, 0])
    b = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, eight)))[:, None, None] + never
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, eight)))[None, :, None] + never
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, eight)))[None, None, :]
    X = gl.where(i == j, 1.0, gl.zeros([8, 8, 8], gl.float32, eight))
    for n in gl.static_range(7):  # x (I - N) = e_i, from the last column to the first: column 7 - n is done
        x = gl.sum(gl.where(j == 7 - n, X, 0.0), 2)  # [8, 8]: register 7 - n
        X += x[:, :, None] * t_E.slice(7 - n, 1, 1).load(eight)
    is_odd = (b % 2).to(gl.float32)
    X = gl.join(X * (1.0 - is_odd), X * is_odd).permute((0, 1, 3, 2)).reshape([4, 16, 16])  # two in a block of 16
    blocks(t_X).store(X.to(t_X.dtype))


@gluon.jit
def cut(x):
    """x rounded to the 8 bits of bf16, by integers."""
    return ((x.to(gl.int32, bitcast=True) + 32768) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def product(x, y, acc):
    """acc + x y, in float16, or as high high + high low + low high in TF32, which reads 11 bits."""
    if x.dtype == gl.float16:
        return mma_v2(x, y, acc)
    else:
        a, b = cut(x), cut(y)
        return mma_v2(a, b, mma_v2(a, y - b, mma_v2(x - a, b, acc, "tf32"), "tf32"), "tf32")


@gluon.jit
def times(x, tile, n: gl.constexpr, acc, mma: gl.constexpr):
    """acc + x B of rows x [C, 16] and block n of a tile."""
    width: gl.constexpr = 2 if tile.dtype == gl.float16 else 1
    left: gl.constexpr = gl.DotOperandLayout(0, mma, width)
    B = tile.index(n).load(gl.DotOperandLayout(1, mma, width))
    return product(gl.convert_layout(x.to(tile.dtype), left), B, acc)


@gluon.jit
def inverse(scratch, wide: gl.constexpr):
    t_E, t_N, t_L, t_X = scratch
    width: gl.constexpr = 2 if t_N.dtype == gl.float16 else 1
    four: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])  # a warp per block of 16
    left: gl.constexpr = gl.DotOperandLayout(0, four, width)
    right: gl.constexpr = gl.DotOperandLayout(1, four, width)
    none = gl.zeros([4, 16, 16], gl.float32, four)
    XL = product(blocks(t_X).load(left), blocks(t_L).load(right), none).to(t_X.dtype)
    X = blocks(t_X).load(four).to(gl.float32)
    X = product(gl.convert_layout(XL, left), blocks(t_X).load(right), X)
    blocks(t_X).store(X.to(t_X.dtype))

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])  # a warp per 16 rows
    X, none = gl.convert_layout(X.reshape([C, 16]), mma), gl.zeros([C, 16], gl.float32, mma)
    m = gl.arange(0, C, layout=gl.SliceLayout(1, mma))[:, None] // 16
    Y_3 = gl.where(m == 3, X, 0.0)
    Y_2 = times(times(Y_3, t_N, 14, none, mma), t_X, 2, gl.where(m == 2, X, 0.0), mma)
    Z_1 = times(Y_2, t_N, 9, times(Y_3, t_N, 13, none, mma), mma)
    Z_0 = times(Y_2, t_N, 8, times(Y_3, t_N, 12, none, mma), mma)
    Y_1 = times(Z_1, t_X, 1, gl.where(m == 1, X, 0.0), mma)
    Y_0 = times(times(Y_1, t_N, 4, Z_0, mma), t_X, 0, gl.where(m == 0, X, 0.0), mma)
    joined = gl.join(gl.join(Y_0, Y_1), gl.join(Y_2, Y_3))  # [row, column, j % 2, j // 2]
    return gl.convert_layout(joined.permute((0, 3, 2, 1)).reshape([C, C]), wide)


@gluon.jit
def largest(N):
    """The largest size of an N_ij of each thread."""
    return gl.max(gl.max(gl.abs(N).reshape([C, 8, 4, 2]), 3), 1)  # [C, 4]


@gluon.jit
def solver(tiles, bars, scratch, strong, T, zero, EXACT: gl.constexpr):
    t_q, t_k, t_v, t_Y, t_P, t_rows = tiles
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # 16 rows per warp, by WGMMA
    of_row: gl.constexpr = gl.SliceLayout(1, wide)
    of_column: gl.constexpr = gl.SliceLayout(0, wide)
    i, j = gl.arange(0, C, layout=of_row)[:, None], gl.arange(0, C, layout=of_column)[None, :]
    none = gl.zeros([C, C], gl.float32, wide)
    most = largest(none)
    for c in range(gl.cdiv(T, C)):
        s, parity = c % STAGES, (c // STAGES) & 1
        b_q, b_k = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K])
        mbarrier.wait(bars.index(5 * s + KEYS), parity)
        # is_async: threads go on while it runs; wait(n, [x]): until x is there and at most n products run
        N = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(5 * s + GATED), parity)
        b, never = t_rows.index(4 * s + SUM), c & zero  # 0, or Triton would keep its masks in registers
        D = gl.where(i + never >= j, gl.exp2(b.load(of_row)[:, None] - b.load(of_column)[None, :]), 0.0)
        beta = t_rows.index(4 * s + BETA)
        N = -warpgroup_mma_wait(0, [N]) * D * beta.load(of_row)[:, None]  # (1), and N_ii
        most = gl.maximum(most, largest(N))
        spread(N, scratch, i, j)
        mbarrier.wait(bars.index(5 * s + READY), parity)
        P = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        eliminate(scratch, never)
        t_P.index(s).store((warpgroup_mma_wait(0, [P]) * D).to(b_q.dtype))  # (1)
        Y = inverse(scratch, wide)  # (1)
        t_Y.index(s).store((Y * beta.load(of_column)[None, :]).to(b_q.dtype))
        fence()
        mbarrier.arrive(bars.index(5 * s + SOLVED), count=1)
    if not EXACT:
        gl.store(strong, (gl.max(gl.max(most, 1), 0) > MILD).to(gl.int32))


@gluon.jit
def walker(o, S_last, tiles, bars, t_o, i_b, i_h, T, scale):
    t_q, t_k, t_v, t_Y, t_P, t_rows = tiles
    turned: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, C, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, K, 16])
    first: gl.constexpr = gl.DotOperandLayout(0, turned, 2)  # operands in registers
    first_of_S: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    of_token: gl.constexpr = gl.SliceLayout(0, turned)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    S = gl.zeros([V, K], gl.float32, state)
    for c in range(gl.cdiv(T, C)):
        s, parity = c % STAGES, (c // STAGES) & 1
        b_q, b_k = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K])
        none = gl.zeros([V, C], gl.float32, turned)
        low = gl.convert_layout(S.to(b_q.dtype), first)
        mbarrier.wait(bars.index(5 * s + KEYS), parity)
        mbarrier.wait(bars.index(5 * s + READY), parity)
        kS = warpgroup_mma(low, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        b_o = warpgroup_mma(low, b_q.permute((1, 0)), none, use_acc=False, is_async=True)  # q S
        mbarrier.wait(bars.index(5 * s + SOLVED), parity)
        b_v = t_v.index(s).reshape([C, V]).permute((1, 0)).load(turned).to(gl.float32)
        kS, b_o = warpgroup_mma_wait(0, [kS, b_o])
        since = t_rows.index(4 * s + SINCE)
        b_v -= kS * since.load(of_token)[None, :]  # v' of (2)
        low = gl.convert_layout(b_v.to(b_q.dtype), first)
        v_hat = warpgroup_mma(low, t_Y.index(s).permute((1, 0)), none, use_acc=False, is_async=True)  # (2)
        b_o *= since.load(of_token)[None, :]
        S *= gl.sum(since.slice(C - 1, 1).load(one), 0)  # e^(b_C) S
        until = t_rows.index(4 * s + UNTIL).load(of_token)[None, :]
        v_hat = warpgroup_mma_wait(0, [v_hat])
        low = gl.convert_layout((v_hat * until).to(b_q.dtype), first_of_S)
        S = warpgroup_mma(low, b_k, S, is_async=True)  # (3)
        low = gl.convert_layout(v_hat.to(b_q.dtype), first)
        b_o = warpgroup_mma(low, t_P.index(s).permute((1, 0)), b_o, is_async=True)  # (3)
        S, b_o = warpgroup_mma_wait(0, [S, b_o])
        tma.store_wait(0)  # the copy engine has read the last o
        t_o.reshape([C, V]).permute((1, 0)).store((b_o * scale).to(b_q.dtype))
        fence()
        mbarrier.arrive(bars.index(5 * s + DONE), count=1)  # after the fence, since threads have read v
        copy_out(o, [i_b, i_h, c * C, 0], t_o)  # nothing beyond the last token
    tma.store_wait(0)
    o_v, o_k = gl.arange(0, V, layout=gl.SliceLayout(1, state)), gl.arange(0, K, layout=gl.SliceLayout(0, state))
    gl.store(S_last + gl.program_id(0).to(gl.int64) * K * V + o_k[None, :] * V + o_v[:, None], S)


@gluon.jit(do_not_specialize=("T", "HV", "G", "zero"))
def walk(q, k, v, g, beta, o, S_last, strong, T, HV, G, scale, zero, EXACT: gl.constexpr):
    strong += gl.program_id(0)
    if EXACT:
        if gl.load(strong) == 0:
            return
    i_b, i_h = gl.program_id(0) // HV, gl.program_id(0) % HV
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # swizzled, as WGMMA reads tiles
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    block: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    low: gl.constexpr = gl.float32 if EXACT else gl.float16  # of the inverse's products
    tiles = (
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout),
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], k.layout),
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, V], v.layout),
        gl.allocate_shared_memory(q.dtype, [STAGES, C, C], square),  # Y beta
        gl.allocate_shared_memory(q.dtype, [STAGES, C, C], square),  # P
        gl.allocate_shared_memory(gl.float32, [4 * STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    scratch = (
        gl.allocate_shared_memory(gl.float32, [8, 8, 8], flat),
        gl.allocate_shared_memory(low, [16, 16, 16], block),
        gl.allocate_shared_memory(low, [4, 16, 16], block),
        gl.allocate_shared_memory(low, [4, 16, 16], block),
    )
    t_o = gl.allocate_shared_memory(q.dtype, [1, 1, C, V], o.layout)
    bars = gl.allocate_shared_memory(gl.int64, [5 * STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(5 * STAGES):
        mbarrier.init(bars.index(n), count=1)
    fence()
    # the lists: warps and registers of all roles but the first, which is the launch's warps and gets what is left
    gl.warp_specialize(
        [
            (walker, (o, S_last, tiles, bars, t_o, i_b, i_h, T, scale)),
            (solver, (tiles, bars, scratch, strong, T, zero, EXACT)),
            (loader, (q, k, v, g, beta, tiles, bars, i_b, i_h, i_h // G, HV, T)),
        ],
        [4, 1],
        [104, 24],
    )
    for n in gl.static_range(5 * STAGES):
        mbarrier.invalidate(bars.index(n))


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


def boxes(x):
    """x seen as [B, H, T, D], of which a copy takes C tokens of one head."""
    B, T, H, D = x.shape
    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, C.value, D], layout)


def gated_delta_rule(q, k, v, g, beta, scale=None):
    """o [B, T, HV, V] and the state after the last token, float32 [B, HV, K, V], for K = V = 128, HV a multiple of H.

    q and k [B, T, H, K], v [B, T, HV, V], bfloat16; g, beta [B, T, HV], bfloat16 or float32; scale: K^-0.5 if None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, _), HV, D = q.shape, v.shape[2], K.value
    if HV % max(H, 1):
        raise ValueError(f"v: expected heads a multiple of {H}, got {HV}")
    for name, x, shape in (("q", q, (B, T, H, D)), ("k", k, (B, T, H, D)), ("v", v, (B, T, HV, D))):
        check(name, x, shape, (torch.bfloat16,))
    for name, x in (("g", g), ("beta", beta)):
        check(name, x, (B, T, HV), (torch.bfloat16, torch.float32))
    o, S = torch.empty_like(v), v.new_empty(B, HV, D, D, dtype=torch.float32)
    strong, scale = v.new_empty(B * HV, dtype=torch.int32), D**-0.5 if scale is None else scale
    args = boxes(q), boxes(k), boxes(v), g, beta, boxes(o), S, strong, T, HV, HV // H, scale, 0
    # the assembler's own level of register allocation: at Triton 3.9's, 2, this page takes 1.4 times as long
    for exact in (0, 1):
        walk[(B * HV,)](*args, EXACT=exact, num_warps=8, maxnreg=128, ptx_options="--regAllocOptLevel=4")
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gated_delta_rule_hopper: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gated_delta_rule)
