"""Gated linear attention on Hopper, on a page: warps with three jobs at once (chapters 13 and 22).

Computes the equations of :mod:`gla_ref.pages.gla`::

    q' = q e^(b - r)    k' = k e^(r - b)    S' = e^r S                                   (1)
    o  = scale (q' S' + tril(q' k'^T) v)                                                 (2)
    S <- e^r (S' + k'^T v)                                                               (3)

On that page one program does all of this in turn, and while it loads, nothing multiplies. Here a program owns the whole
state of one head, so there are H * B programs. Three groups of its warps pass chunks on through shared memory::

    loader       1 warp     asks the copy engine (TMA) for g, q, k, v of a chunk      waits for `empty`
    transformer  4 warps    (1): q' and k' replace q and k; e^r                       waits for `ready`
    multiplier   K / 16     (2), (3): tensor cores (WGMMA), S in registers            waits for `hat`

Chunk i lies in stage i % STAGES, and its round is j = i // STAGES. Each stage has three barriers. A barrier expects one
arrival a round, which ends its phase; wait(bar, p) returns if the last phase that ended has parity p. In a fresh
barrier that is phase -1, of parity 1. Roles wait at `ready` and `hat` for phase j, of parity j & 1. The loader waits at
`empty` for the phase of the round before, which for j = 0 is over already. No role can be two rounds ahead, because a
round goes through all three barriers.

The copy engine and WGMMA see a tile that threads have written to shared memory only after these threads' fence. Between
`init` and `invalidate` a barrier's eight bytes belong to the hardware, so barriers are kept until the roles are done.

A chunk is strong if its log gates sum to less than -80 in any channel. Then e^(-r) is too large for (1), so q decays
from the chunk's start and k to its end, and no exponent is above 0::

    q' = q e^b    k' = k e^(b_C - b)    o = scale q' S + the chunk's pairs    S <- e^(b_C) S + k'^T v      (4)

The pairs need other products (gla_ref/pages/gla_levels.py). A caller that adds them gives `walk` the tensor `strong`,
one flag for each chunk of a head; gla_ref.kernels does. The function below does not, and those rows of o are NaN.

With C = 64 a chunk moves 2 C (3 K + 2 V) bytes, 80 KiB at K = V = 128, for 2 C (C (2 K + V) + 2 K V) FLOPs. Left out:
float32, K and V other than 64 and 128, and everything that gla_ref/pages/gla.py leaves out.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # in Triton 3.9, and before
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

LOG2E, LIMIT = gl.constexpr(1.4426950408889634), gl.constexpr(80.0)
C = gl.constexpr(64)


@gluon.jit
def loader(q, k, v, g, tiles, bars, i_b, i_h, T, STAGES: gl.constexpr):
    t_q, t_k, t_v, t_g = tiles
    empty, ready, hat = bars
    for i in range(gl.cdiv(T, C)):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        # the copies below end the phase of `ready` when all these bytes have come; beyond T they are zeros
        bar = ready.index(s)
        mbarrier.expect(bar, 3 * q.block_type.nbytes + v.block_type.nbytes)
        copy_in(g, [i_b, i_h, i * C, 0], bar, t_g.index(s))
        copy_in(k, [i_b, i_h, i * C, 0], bar, t_k.index(s))
        copy_in(q, [i_b, i_h, i * C, 0], bar, t_q.index(s))
        copy_in(v, [i_b, i_h, i * C, 0], bar, t_v.index(s))


@gluon.jit
def sums(b_g, sign, half, K: gl.constexpr):
    # which thread holds which part of [C, K] and of [K, 16]: 16 rows per warp, as WGMMA leaves a result
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    of_r: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    # sum_(j <= i) g_j / 2 - sum_(j > i) g_j / 2 = b_i - r. The same for r, half of the whole sum, in each of 16
    # columns: a product, too, since a tile's rows are spread over warps and the rows of g^T are not
    x = warpgroup_mma(sign, b_g, gl.zeros([C, K], gl.float32, rows), use_acc=False)
    r = warpgroup_mma(b_g.permute((1, 0)), half, gl.zeros([K, 16], gl.float32, of_r), use_acc=False)
    return x * LOG2E, gl.max(r, 1)  # (b - r) log2 e [C, K], r [K]


@gluon.jit
def transformer(tiles, bars, sign, half, t_r, t_mild, strong, H, T, K: gl.constexpr, STAGES: gl.constexpr):
    t_q, t_k, t_v, t_g = tiles
    empty, ready, hat = bars
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    every: gl.constexpr = gl.BlockedLayout([K // 32], [32], [4], [0])  # each warp has all channels
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(gl.cdiv(T, C)):
        s = i % STAGES
        mbarrier.wait(ready.index(s), (i // STAGES) & 1)
        b_q, b_k, b_g = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K]), t_g.index(s).reshape([C, K])
        x, r = sums(b_g, sign, half, K)
        t_r.index(s).store(r)
        mild = gl.min(t_r.index(s).load(every), 0) >= -LIMIT / 2
        q_hat = (b_q.load(rows).to(gl.float32) * gl.exp2(x)).to(b_q.dtype)
        k_hat = (b_k.load(rows).to(gl.float32) * gl.exp2(-x)).to(b_k.dtype)
        if not mild:  # (4)
            b_f = b_g.load(rows)
            b_g.store(gl.where(b_f < -104.0, -104.0, b_f).to(b_g.dtype))  # e^-104 is 0 in float32; -inf has no sums
            fence()
            x, r = sums(b_g, sign, half, K)
            t_r.index(s).store(r)
            r_k = t_r.index(s).load(gl.SliceLayout(0, rows))[None, :] * LOG2E  # as x has its columns
            q_hat = (b_q.load(rows).to(gl.float32) * gl.exp2(r_k + x)).to(b_q.dtype)
            k_hat = (b_k.load(rows).to(gl.float32) * gl.exp2(r_k - x)).to(b_k.dtype)
            t_r.index(s).store(2.0 * r)
        b_q.store(q_hat)
        b_k.store(k_hat)
        t_mild.index(s).store(gl.full([1], 1, gl.int32, one) * mild.to(gl.int32))
        if strong is not None:
            gl.store(strong + i * H, 1 - mild.to(gl.int8))
        fence()
        mbarrier.arrive(hat.index(s), count=1)


@gluon.jit
def multiplier(
    o, S_last, tiles, bars, t_r, t_mild, t_S, t_P, t_o, i_b, i_h, H, T, scale,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, STRONG: gl.constexpr,
):
    t_q, t_k, t_v, t_g = tiles
    empty, ready, hat = bars
    # Four warps make 64 rows of a product, 16 each. Each of the K / 16 warps has 16 rows of S [K, V]; of o and P it
    # has 16 rows, and half of their columns if there are eight warps
    W: gl.constexpr = K // 16
    of_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, V, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, V * 4 // W, 16])
    of_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, C * 4 // W, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    i, j = gl.arange(0, C, layout=gl.SliceLayout(1, of_P)), gl.arange(0, C, layout=gl.SliceLayout(0, of_P))
    S = gl.zeros([K, V], gl.float32, of_S)
    for n in range(gl.cdiv(T, C)):
        s = n % STAGES
        mbarrier.wait(hat.index(s), (n // STAGES) & 1)
        b_q, b_k = t_q.index(s).reshape([C, K]), t_k.index(s).reshape([C, K])
        b_v, e = t_v.index(s).reshape([C, V]), gl.exp2(t_r.index(s).load(gl.SliceLayout(1, of_S)) * LOG2E)[:, None]
        mild = gl.max(t_mild.index(s).load(one), 0) != 0
        # is_async: the product runs while threads go on; wait(n, [x]): until x is there and at most n products run
        none = gl.zeros([C, C], gl.float32, of_P)
        P = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)  # q' k'^T
        e_r = gl.where(mild, e, 1.0)
        t_S.store((S * e_r).to(b_q.dtype))  # S' of (1); an operand must be in shared memory, in 16 bits
        fence()
        none = gl.zeros([C, V], gl.float32, of_o)
        b_o = warpgroup_mma(b_q, t_S, none, use_acc=False, is_async=True)  # q' S'
        S *= e  # S', or e^(b_C) S of (4)
        P = warpgroup_mma_wait(1, [P])
        seen = i[:, None] >= j[None, :] + gl.where(mild, 0, C)  # [C, C], no pair of a strong chunk
        P = gl.where(seen, P, gl.where(mild, 0.0, STRONG))  # tril: above the diagonal P may be huge
        t_P.store(P.to(b_q.dtype))
        fence()
        S = warpgroup_mma(b_k.permute((1, 0)), b_v, S, is_async=True)  # S' + k'^T v
        b_o = warpgroup_mma_wait(1, [b_o])
        b_o = warpgroup_mma(t_P, b_v, b_o, is_async=True)  # (2)
        S = warpgroup_mma_wait(1, [S]) * e_r  # (3)
        b_o = warpgroup_mma_wait(0, [b_o])
        mbarrier.arrive(empty.index(s), count=1)
        tma.store_wait(0)  # the copy engine has read the last o
        t_o.reshape([C, V]).store((b_o * scale).to(b_q.dtype))
        fence()
        copy_out(o, [i_b, i_h, n * C, 0], t_o)  # nothing is written beyond T
    tma.store_wait(0)
    o_k, o_v = gl.arange(0, K, layout=gl.SliceLayout(1, of_S)), gl.arange(0, V, layout=gl.SliceLayout(0, of_S))
    gl.store(S_last + ((i_b * H + i_h).to(gl.int64) * K + o_k)[:, None] * V + o_v[None, :], S)


@gluon.jit(do_not_specialize=("T", "H"))  # so that a new length compiles nothing
def walk(q, k, v, g, o, S_last, strong, T, H, scale, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr):
    i_b, i_h = gl.program_id(0) // H, gl.program_id(0) % H
    W: gl.constexpr = K // 16  # warps of the multiplier
    STRONG: gl.constexpr = float("nan") if strong is None else 0.0  # stands for the pairs of a strong chunk
    if strong is not None:
        strong += (i_b * gl.cdiv(T, C)).to(gl.int64) * H + i_h
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # swizzled, as WGMMA reads tiles
    t_q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_k = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_g = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, K], q.layout)
    t_v = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, C, V], v.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    t_r = gl.allocate_shared_memory(gl.float32, [STAGES, K], line)  # r, or b_C of a strong chunk
    t_mild = gl.allocate_shared_memory(gl.int32, [STAGES, 1], line)
    sign = gl.allocate_shared_memory(q.dtype, [C, C], square)
    half = gl.allocate_shared_memory(q.dtype, [C, 16], gl.NVMMASharedLayout(32, 16, 2))
    t_S = gl.allocate_shared_memory(q.dtype, [K, V], square)
    t_P = gl.allocate_shared_memory(q.dtype, [C, C], square)
    t_o = gl.allocate_shared_memory(q.dtype, [1, 1, C, V], o.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    hat = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=1)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(hat.index(s), count=1)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    i, j = gl.arange(0, C, layout=gl.SliceLayout(1, by_rows)), gl.arange(0, C, layout=gl.SliceLayout(0, by_rows))
    sign.store(gl.where(i[:, None] >= j[None, :], 0.5, -0.5).to(q.dtype))
    half.store(gl.full([C, 16], 0.5, q.dtype, gl.BlockedLayout([1, 8], [16, 2], [W, 1], [1, 0])))
    fence()
    tiles, bars = (t_q, t_k, t_v, t_g), (empty, ready, hat)
    # the first role gets the warps of the launch; the lists are the warps and registers of the other roles
    gl.warp_specialize(
        [
            (multiplier, (
                o, S_last, tiles, bars, t_r, t_mild, t_S, t_P, t_o, i_b, i_h, H, T, scale, K, V, STAGES, STRONG,
            )),
            (transformer, (tiles, bars, sign, half, t_r, t_mild, strong, H, T, K, STAGES)),
            (loader, (q, k, v, g, tiles, bars, i_b, i_h, T, STAGES)),
        ],
        [4, 1],
        [160, 24],
    )
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(empty.index(s))
        mbarrier.invalidate(ready.index(s))
        mbarrier.invalidate(hat.index(s))


def descriptor(name, x, shape):
    """x seen as [B, H, T, D], of which a copy takes C tokens of one head. Refuses a tensor the page cannot take."""
    B, T, H, D = shape
    if x.shape != shape or min(shape) < 1 or D not in (64, 128):
        raise ValueError(f"{name}: expected {shape}, last 64 or 128, got {tuple(x.shape)}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected bfloat16, got {x.dtype}")
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError(f"{name}: expected a tensor on a GPU of compute capability 9.0, got one on {x.device}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: expected contiguous, 16-byte aligned, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")
    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(x, [B, H, T, D], [T * H * D, D, H * D, 1], [1, 1, C.value, D], layout)


def gla(q, k, v, g, scale=None):
    """o [B, T, H, V] and the state after the last token, float32 [B, H, K, V].

    q, k and log gates g [B, T, H, K], v [B, T, H, V]; scale is K^-0.5 when None.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: expected [B, T, H, D], got {tuple(q.shape)}, {tuple(v.shape)}")
    (B, T, H, K), V = q.shape, v.shape[3]
    d_q, d_k, d_g = (descriptor(n, x, (B, T, H, K)) for n, x in (("q", q), ("k", k), ("g", g)))
    d_v = descriptor("v", v, (B, T, H, V))
    o, S = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32)
    walk[(B * H,)](
        d_q, d_k, d_v, d_g, descriptor("o", o, v.shape), S, None, T, H, K**-0.5 if scale is None else scale,
        K=K, V=V, STAGES=2 if K == 128 else 3, num_warps=K // 16, maxnreg=128,
    )
    return o, S


if __name__ == "__main__":  # python -m gla_ref.pages.gla_hopper: is it right here, and how fast
    from gla_ref._commands.page import run

    run(gla)
