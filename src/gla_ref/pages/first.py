"""First kernels: add two vectors, take the softmax of rows, attend in one tile (chapter 4).

A kernel is a function that many *programs* run at once; `tl.program_id` numbers them. A kernel works on tiles, whose
sizes are powers of two and constants of the compiled kernel (`tl.constexpr`), and reads and writes memory by pointers::

    z = x + y                                         `add`: grid, offsets, mask                       (1)
    y = e^(x - max x) / sum e^(x - max x)             `softmax_rows`: strides, rows, warps, stages     (2)
    o = softmax(scale q k^T, later tokens -inf) v     `attend`: pointers to tiles, tl.dot              (3)

Programs: `add` has N / 1024, each for 1024 numbers with 12 bytes and one FLOP per number in float32. `softmax_rows` has
a few per multiprocessor; each takes one row after another, and reads and writes each row once. `attend` has H * B, each
for all T tokens of a head, with 2 T T (K + V) FLOPs; the causal mask keeps about half of them.

Left out: more than 2^30 numbers, rows of more than 8192, more than 64 tokens, gradients.
"""

import torch
import triton
import triton.language as tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def add_kernel(x, y, z, N, BLOCK: tl.constexpr):
    # which tile: program 0 has the numbers 0 to BLOCK - 1, program 1 has the next BLOCK numbers, ...
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = o < N  # [BLOCK], the last program has less to do
    # load: x is a pointer to the first number, x + o are pointers to a whole tile; b_ is a block, in registers
    b_x, b_y = tl.load(x + o, mask=inside), tl.load(y + o, mask=inside)  # [BLOCK] each
    # compute and store: where the mask is false nothing is read or written
    tl.store(z + o, b_x + b_y, mask=inside)  # (1)


@triton.jit
def softmax_kernel(x, y, rows, N, x_stride, y_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    # which tile: rows p, p + n, p + 2 n, ... of n programs. Stages: the next rows are loaded during this one
    o = tl.arange(0, BLOCK)  # [BLOCK], at least N
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        # load: rows lie a stride apart; -inf beyond the row's end, e^-inf = 0
        b_x = tl.load(x + row * x_stride + o, mask=o < N, other=float("-inf"))  # [BLOCK]
        # compute: tl.max and tl.sum go over all threads of the program's warps
        b_x = b_x.to(tl.float32)  # [BLOCK]
        b_e = tl.exp(b_x - tl.max(b_x, 0))  # [BLOCK]
        b_y = b_e / tl.sum(b_e, 0)  # (2)
        # store
        tl.store(y + row * y_stride + o, b_y.to(y.dtype.element_ty), mask=o < N)


@triton.jit
def attend_kernel(q, k, v, o, T, H, scale, BT: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    # which tile: head i_h of sequence i_b; token t of it begins at q + ((i_b T + t) H + i_h) K
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, BT)  # [BT]
    row, inside = ((i_b * T + t) * H + i_h)[:, None], (t < T)[:, None]  # [BT, 1]
    o_k, o_v = tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]  # [1, K], [1, V]
    # load: a column of rows and a row of columns make a tile of pointers
    b_q = tl.load(q + row * K + o_k, mask=inside, other=0.0)  # [BT, K]
    b_k = tl.load(k + row * K + o_k, mask=inside, other=0.0)  # [BT, K]
    b_v = tl.load(v + row * V + o_v, mask=inside, other=0.0)  # [BT, V]
    # compute: tl.dot adds up in float32; "ieee" keeps it from rounding float32 operands to TF32
    s = tl.dot(b_q, b_k.T, input_precision="ieee") * scale  # [BT, BT]
    s = tl.where(t[:, None] >= t[None, :], s, float("-inf"))  # a token sees no later one
    p = tl.exp(s - tl.max(s, 1)[:, None])  # [BT, BT], each row by itself
    b_o = tl.dot(p.to(b_v.dtype), b_v, input_precision="ieee") / tl.sum(p, 1)[:, None]  # (3)
    # store
    tl.store(o + row * V + o_v, b_o.to(b_v.dtype), mask=inside)


def check(name, x, shape, like, rows_apart=False):
    """Refuse arguments that these kernels leave out."""
    if x.shape != shape or not 0 < x.numel() <= 2**30:
        raise ValueError(f"{name}: expected {tuple(shape)}, not empty, got {tuple(x.shape)}")
    if x.dtype != like.dtype or x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, all alike, got {x.dtype}")
    if x.device != like.device or not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name}: expected all tensors on one GPU, got {x.device}")
    if not (rows_apart or x.is_contiguous()):
        raise ValueError(f"{name}: expected contiguous, got strides {x.stride()}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: expected no gradient (use torch.no_grad), got requires_grad")


def add(x, y):
    """x + y, of any one shape."""
    check("x", x, x.shape, x)
    check("y", y, x.shape, x)
    z = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, z, x.numel(), BLOCK=1024)
    return z


def softmax_rows(x):
    """The softmax of each row of x [rows, N], N at most 8192; rows may lie any stride apart."""
    if x.ndim != 2 or x.shape[1] > 8192 or x.stride(1) != 1 or len(x) * x.stride(0) > 2**30:
        raise ValueError(f"x: expected [rows, N <= 8192], got {tuple(x.shape)}, {x.stride()}")
    check("x", x, x.shape, x, rows_apart=True)
    y, (rows, N) = torch.empty_like(x), x.shape
    BLOCK = triton.next_power_of_2(N)
    # 32 threads a warp: more of them for longer rows, so that a thread has at most 32 numbers in registers
    warps = min(16, max(1, BLOCK // 1024))
    programs = min(rows, 1024)  # several for each multiprocessor
    softmax_kernel[(programs,)](
        x, y, rows, N, x.stride(0), y.stride(0), BLOCK=BLOCK, STAGES=2, num_warps=warps
    )
    return y


def attend(q, k, v, scale=None):
    """Causal attention o [B, T, H, V] of q, k [B, T, H, K], v [B, T, H, V], T <= 64; scale is K^-0.5 when None."""
    if q.ndim != 4 or v.ndim != 4 or q.shape[1] > 64:
        raise ValueError(
            f"q, v: expected [B, T <= 64, H, D], got {tuple(q.shape)}, {tuple(v.shape)}"
        )
    (B, T, H, K), V = q.shape, v.shape[3]
    for name, x, D in (("q", q, K), ("k", k, K), ("v", v, V)):
        check(name, x, torch.Size((B, T, H, D)), q)
        if D not in (16, 32, 64, 128):
            raise ValueError(f"{name}: expected 16, 32, 64 or 128 channels, got {D}")
    o, BT = torch.empty_like(v), max(16, triton.next_power_of_2(T))  # tl.dot needs at least 16
    scale = K**-0.5 if scale is None else scale
    attend_kernel[H, B](q, k, v, o, T, H, scale, BT=BT, K=K, V=V, num_warps=8)
    return o


if __name__ == "__main__":  # python -m gla_ref.pages.first: is it right here, and how fast
    from gla_ref._commands.page import run

    run(attend, add=(add, torch.add, 2), softmax_rows=(softmax_rows, lambda x: x.softmax(1), 1))
