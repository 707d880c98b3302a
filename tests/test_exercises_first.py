"""Answers to the exercises of chapters 4 and 14 that are kernels, right and wrong: judges launch them between guards.

`test_exercises_early.py` holds them, with all others, against what the judges say.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from gla_ref.book.exercises import check


class With:
    """A kernel that makes a mistake."""

    def __init__(self, kernel, **mistake):
        self.kernel, self.mistake = kernel, mistake

    def __getitem__(self, grid):
        return lambda *args, **constants: self.kernel[grid](*args, **constants, **self.mistake)

    def __call__(self):
        """A call of it is an answer."""


# -- the sum of a block ------------------------------------------------------------------------------


@triton.jit
def partial_sums(x, out, N, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    o = p * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + p, tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_unmasked(x, out, N, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    tl.store(out + p, tl.sum(tl.load(x + p * BLOCK + tl.arange(0, BLOCK)), 0))


@triton.jit
def sums_of_the_first(x, out, N, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_overlapping(x, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_far_apart(x, out, N, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    o = p * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + p * BLOCK, tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_in_one_place(x, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_into_x(x, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + tl.program_id(0), tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0))


@triton.jit
def sums_so_far(x, out, N, BLOCK: tl.constexpr):
    total = 0.0
    for p in range(tl.program_id(0) + 1):
        o = p * BLOCK + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0)
    tl.store(out + tl.program_id(0), total)


@triton.jit
def block_maxima(x, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.max(tl.load(x + o, mask=o < N, other=float("-inf")), 0))


@triton.jit
def block_means(x, out, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + o, mask=o < N, other=0.0), 0) / BLOCK)


@triton.jit
def misspelt(x, out, N, BLOCK: tl.constexpr):
    tl.store(out, tl.summ(tl.load(x), 0))


@triton.jit
def nothing(x, out, N, BLOCK: tl.constexpr):
    pass


def undecorated(x, out, N, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0), 1.0)


# -- RMSNorm -----------------------------------------------------------------------------------------


@triton.jit
def rms_norm(x, y, N, x_stride, y_stride, eps, BLOCK: tl.constexpr):
    row, o = tl.program_id(0), tl.arange(0, BLOCK)
    b_x = tl.load(x + row * x_stride + o, mask=o < N, other=0.0)
    b_y = b_x / tl.sqrt(tl.sum(b_x * b_x, 0) / N + eps)
    tl.store(y + row * y_stride + o, b_y, mask=o < N)


@triton.jit
def norm_of(
    x, y, N, x_stride, y_stride, eps, BLOCK: tl.constexpr,
    over: tl.constexpr = "N", rows: tl.constexpr = "apart", safe: tl.constexpr = True, centred: tl.constexpr = False,
    other: tl.constexpr = 0.0, masked: tl.constexpr = True,
):  # fmt: skip
    """Right as it is; each option is a mistake."""
    row, o = tl.program_id(0), tl.arange(0, BLOCK)
    p_x, p_y = x + row * x_stride, y + row * y_stride
    if rows == "packed":
        p_x, p_y = x + row * N, y + row * N
    elif rows == "all row 0":
        p_x = x
    b_x = tl.load(p_x + o, mask=o < N, other=other)
    if centred:
        b_x = tl.where(o < N, b_x - tl.sum(b_x, 0) / N, 0.0)
    square = tl.sum(b_x * b_x, 0)
    if over == "N":
        square = square / N
    elif over == "BLOCK":
        square = square / BLOCK
    tl.store(p_y + o, b_x / tl.sqrt(square + (eps if safe else 0.0)), mask=(o < N) | (not masked))


# -- a product of matrices ---------------------------------------------------------------------------


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    n = tl.arange(0, BK)
    b_c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        in_row, in_column = (k + n)[None, :], (k + n)[:, None]
        b_a = tl.load(a + i * K + in_row, mask=(i < M) & (in_row < K), other=0.0)
        b_b = tl.load(b + in_column * N + j, mask=(in_column < K) & (j < N), other=0.0)
        b_c = tl.dot(b_a, b_b, b_c, input_precision="ieee")
    tl.store(c + i * N + j, b_c, mask=(i < M) & (j < N))


@triton.jit
def matmul_of(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    first, last, KEEP: tl.constexpr, HALF: tl.constexpr, MASK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Steps from `first` on, before `last`; what a mistake keeps, rounds, masks."""
    i = tl.program_id(SWAP) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1 - SWAP) * BN + tl.arange(0, BN)[None, :]
    n = tl.arange(0, BK)
    b_c = tl.zeros([BM, BN], tl.float32)
    for k in range(first, last, BK):
        in_row, in_column = (k + n)[None, :], (k + n)[:, None]
        b_a = tl.load(a + i * K + in_row, mask=(i < M) & ((in_row < K) | (not MASK)), other=0.0)
        b_b = tl.load(b + in_column * N + j, mask=((in_column < K) | (not MASK)) & (j < N), other=0.0)
        if HALF:
            b_a, b_b = b_a.to(tl.float16).to(tl.float32), b_b.to(tl.float16).to(tl.float32)
        b_p = tl.dot(b_a, b_b, input_precision="ieee")
        b_c = b_c + b_p if KEEP else b_p
    tl.store(c + i * N + j, b_c, mask=(i < M) & (j < N))


class Other:
    """A kernel with other arguments than it is launched with."""

    def __init__(self, kernel, change):
        self.kernel, self.change = kernel, change

    def __call__(self, *_):
        raise RuntimeError

    def __getitem__(self, grid):
        return lambda *x, **constants: self.kernel[grid](*x, **(constants | self.change(*x, **constants)))


def product(steps=lambda K, BK: (0, K), KEEP=True, HALF=False, MASK=True, SWAP=0):
    def change(a, b, c, M, N, K, BM, BN, BK):
        first, last = steps(K, BK)
        return {"first": first, "last": last, "KEEP": KEEP, "HALF": HALF, "MASK": MASK, "SWAP": SWAP}

    return Other(matmul_of, change)


# -- keys, a tile at a time --------------------------------------------------------------------------


@triton.jit
def keys(q, k, v, o, N, scale, BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    i, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)
    o_k, o_v = tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    b_q = tl.load(q + i * K + o_k)
    m, d = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, V], tl.float32)
    for first in range(0, N, BN):
        j = first + n
        b_k = tl.load(k + j[:, None] * K + o_k, mask=j[:, None] < N, other=0.0)
        b_v = tl.load(v + j[:, None] * V + o_v, mask=j[:, None] < N, other=0.0)
        x = tl.dot(b_q, b_k.T, input_precision="ieee") * scale
        x = tl.where(j[None, :] < N, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        p, r = tl.exp(x - m_new[:, None]), tl.exp(m - m_new)
        d = d * r + tl.sum(p, 1)
        b_o = tl.dot(p, b_v, b_o * r[:, None], input_precision="ieee")
        m = m_new
    tl.store(o + i * V + o_v, b_o / d[:, None])


@triton.jit
def keys_of(
    q, k, v, o, N, scale, BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    last, END: tl.constexpr, ON_SUM: tl.constexpr, ON_OUT: tl.constexpr, SAFE: tl.constexpr, DIVIDE: tl.constexpr,
    CAUSAL: tl.constexpr, LOAD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The same with its mistakes."""
    i, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)
    o_k, o_v = tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    b_q = tl.load(q + i * K + o_k)
    m, d = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, V], tl.float32)
    for first in range(0, last, BN):
        j = first + n
        inside = (j < N) | (not LOAD)
        b_k = tl.load(k + j[:, None] * K + o_k, mask=inside[:, None], other=0.0)
        b_v = tl.load(v + j[:, None] * V + o_v, mask=inside[:, None], other=0.0)
        x = tl.dot(b_q, b_k.T, input_precision="ieee") * (scale if SCALED else 1.0)
        if END:
            x = tl.where(j[None, :] < N, x, float("-inf"))
        if CAUSAL:
            x = tl.where(j[None, :] <= i, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1)) if SAFE else tl.zeros([BM], tl.float32)
        p, r = tl.exp(x - m_new[:, None]), tl.exp(m - m_new) if SAFE else tl.full([BM], 1.0, tl.float32)
        d = d * (r if ON_SUM else 1.0) + tl.sum(p, 1)
        b_o = tl.dot(p, b_v, b_o * (r[:, None] if ON_OUT else 1.0), input_precision="ieee")
        m = m_new
    tl.store(o + i * V + o_v, b_o / (d[:, None] if DIVIDE else 1.0))


def walk(tiles=None, **flags):
    right = dict(END=True, ON_SUM=True, ON_OUT=True, SAFE=True, DIVIDE=True, CAUSAL=False, LOAD=True, SCALED=True)

    def change(q, k, v, o, N, scale, BM, BN, K, V):
        return right | {"last": N if tiles is None else BN * tiles} | flags

    return Other(keys_of, change)


def offsets(order):
    return lambda b, h, B, T, H, K: order(b, h, T, H, K, torch.arange(T)[:, None], torch.arange(K))


# -- the walk of the GLA kernel (chapter 14) ---------------------------------------------------------


@triton.jit
def mild_walk(
    q, k, v, g, o, S_last, T, V, scale, C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    mask: tl.constexpr = "where", gate: tl.constexpr = "own", state: tl.constexpr = "right",
    anchor: tl.constexpr = True, tail: tl.constexpr = True, last: tl.constexpr = True, own: tl.constexpr = True,
    log2e: tl.constexpr = 1.4426950408889634, log2e_S: tl.constexpr = 1.4426950408889634, rows: tl.constexpr = True,
    store: tl.constexpr = "masked",
):  # fmt: skip
    """Right as it is; each option is a mistake."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    o_k, o_v = tl.arange(0, K), (tl.program_id(0) * BV if own else 0) + tl.arange(0, BV)
    S = tl.zeros([K, BV], tl.float32)
    for t in range(0, T, C):
        keys, values, m = (t + i) * K + o_k[None, :], (t + i) * V + o_v[None, :], (t + i < T) | (not tail)
        b_q, b_k = tl.load(q + keys, mask=m, other=0.0), tl.load(k + keys, mask=m, other=0.0)
        b_v, b_g = tl.load(v + values, mask=m, other=0.0), tl.load(g + keys, mask=m, other=0.0)
        b, total = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        if anchor == "largest":  # as of tl.max without its axis
            r = total * 0.0 + tl.max(total / 2)
        elif anchor == "sum":
            r = total * 0.0 + tl.sum(total / 2)
        else:
            r = total / 2 if anchor else total * 0.0
        late = b_g if gate == "late" else b_g * 0.0
        b_q = b_q * tl.exp2((b - r[None, :]) * log2e)
        b_k = b_k * tl.exp2((r[None, :] - b + late) * log2e)
        P = tl.dot(b_q, b_k.T, input_precision="ieee")
        if mask == "where":
            P = tl.where(i >= j, P, 0.0)
        elif mask == "strict":
            P = tl.where(i > j, P, 0.0)
        elif mask == "transposed":
            P = tl.where(i <= j, P, 0.0)
        elif mask == "factor":
            P = P * (i >= j).to(tl.float32)
        if rows:
            before, after = tl.exp2(r * log2e_S)[:, None], tl.exp2((total - r) * log2e_S)[:, None]
            if anchor == "largest" or anchor == "sum":
                after = before
        else:  # the wrong axis: runs only if K = BV
            before, after = tl.exp2(r * log2e_S), tl.exp2((total - r) * log2e_S)
        if state != "not before":
            S *= before
        if state == "read late":
            S += tl.dot(b_k.T, b_v, input_precision="ieee")
        elif state == "read last":
            S = (S + tl.dot(b_k.T, b_v, input_precision="ieee")) * after
        b_o = tl.dot(b_q, S, input_precision="ieee") + tl.dot(P, b_v, input_precision="ieee")
        b_o *= scale if state != "no scale" else 1.0
        b_o *= scale if state == "scale twice" else 1.0
        tl.store(o + values, b_o, mask=(t + i < T) | (store == "open"))
        if state != "read late" and state != "read last":
            S += tl.dot(b_k.T, b_v, input_precision="ieee")
        if state != "not after" and state != "read last":
            S *= after
        if state == "not carried":
            S *= 0.0
    if last:
        tl.store(S_last + o_k[:, None] * (BV if store == "BV" else V) + o_v[None, :], S, mask=last_mask(o_v, store, BV))


@triton.jit
def last_mask(o_v, store: tl.constexpr, BV: tl.constexpr):
    return (o_v < BV)[None, :] | (store != "first")


RIGHT = {
    "ex-first-grid": [[4, 24, 1000], (4, 24, 1000)],
    "ex-first-sum": [partial_sums],
    "ex-first-compile": ["bce", "E, c, b"],
    "ex-first-offsets": [
        offsets(lambda b, h, T, H, K, t, c: ((b * T + t) * H + h) * K + c),
        lambda b, h, B, T, H, K: torch.arange(B * T * H * K).view(B, T, H, K)[b, :, h],
    ],
    "ex-first-wide": ["bdf", ["f", "d", "b"]],
    "ex-first-norm": [rms_norm, With(norm_of)],
    "ex-first-matmul": [matmul, product()],
    "ex-first-keys": [keys, walk()],
    "ex-kernel-walk": [mild_walk],
}
WRONG = {
    "ex-first-grid": [
        ([3, 24, 1000], "Round up"),
        ([1000, 0, 1000], "a whole block of 256"),
        ([4, 232, 1000], "does have"),
        ([4, 0, 1000], "more than 1000"),
        ([4, 24, 1024], "neither read nor written"),
        ([4, 24, 256], "all of them together"),
        ([5, 24, 1000], "Answer 1 of 3 is not right"),
    ],
    "ex-first-sum": [
        (sums_unmasked, "are all loads masked?"),
        (sums_of_the_first, "All programs sum the first block"),
        (sums_overlapping, "Blocks overlap"),
        (sums_far_apart, "beyond the end of the result"),
        (sums_in_one_place, "Nobody writes result[1]"),
        (sums_into_x, "The kernel changes x"),
        (sums_so_far, "the sum so far"),
        (block_maxima, "the largest number"),
        (block_means, "the mean of a block"),
        (misspelt, "has no attribute 'summ'"),
        (rms_norm, "The kernel stopped with"),
        (undecorated, "write @triton.jit"),
    ],
    "ex-first-compile": [
        ("abce", "a does not belong to it. 2048 is"),
        ("ce", "b is missing. 1000 is"),
        ("be", "c is missing. BLOCK"),
        ("bcde", "d does not belong"),
        ("bc", "e is missing. A pointer"),
        ("bcef", "f does not belong"),
    ],
    "ex-first-offsets": [
        (offsets(lambda b, h, T, H, K, t, c: ((b * H + h) * T + t) * K + c), "layout [B, H, T, K]"),
        (offsets(lambda b, h, T, H, K, t, c: b * T * H * K + h * K + t * K + c), "not side by side"),
        (offsets(lambda b, h, T, H, K, t, c: (t * H + h) * K + c), "The sequence b is missing"),
        (offsets(lambda b, h, T, H, K, t, c: (b * T + t) * H * K + c), "The head h is missing"),
        (offsets(lambda b, h, T, H, K, t, c: 4 * (((b * T + t) * H + h) * K + c)), "bytes of float32"),
    ],
    "ex-first-wide": [
        ("abdf", "a does not belong to it. It counts tokens"),
        ("df", "b is missing"),
        ("bcdf", "c does not belong"),
        ("bf", "d is missing"),
        ("bdef", "e does not belong"),
        ("bd", "columns can lie far apart"),
    ],
    "ex-first-norm": [
        (With(norm_of, over="BLOCK"), "not over the BLOCK places"),
        (With(norm_of, safe=False), "eps is missing"),
        (With(norm_of, over="nothing"), "divide it by N"),
        (With(norm_of, rows="packed"), "x_stride numbers apart"),
        (With(norm_of, rows="all row 0"), "All programs normalise row 0"),
        (With(norm_of, centred=True), "subtracts the mean"),
        (With(norm_of, masked=False), "mask the store"),
        (With(norm_of, other=float("-inf")), "-inf squared is inf"),
    ],
    "ex-first-matmul": [
        (product(steps=lambda K, BK: (0, BK)), "a loop over K is missing"),
        (product(KEEP=False), "Only the last step is kept"),
        (product(steps=lambda K, BK: (0, K // BK * BK)), "The loop ends too early"),
        (product(HALF=True), "Nearly: it is off by"),
        (product(MASK=False), "are all loads masked?"),
        (product(SWAP=1), "Nobody writes result[16, 0]"),
    ],
    "ex-first-keys": [
        (walk(tiles=1), "Only the first BN keys"),
        (walk(END=False), "keys beyond the end"),
        (walk(ON_SUM=False), "The sum so far is relative"),
        (walk(ON_OUT=False), "The output so far is relative"),
        (walk(ON_SUM=False, ON_OUT=False), "shrink both"),
        (walk(DIVIDE=False), "not divided by the sum"),
        (walk(CAUSAL=True), "no causal mask"),
        (walk(SCALED=False), "The scale is missing"),
        (walk(SAFE=False), "does an exponential overflow"),
        (walk(LOAD=False), "are all loads masked?"),
    ],
    "ex-kernel-walk": [
        (With(mild_walk, mask="strict"), "The mask is strict: a token misses its own write"),
        (With(mild_walk, mask="none"), "There is no mask"),
        (With(mild_walk, mask="factor"), "select with tl.where"),
        (With(mild_walk, gate="late"), "That is gate after write"),
        (With(mild_walk, anchor=False), "Anchor the exponents at r"),
        (With(mild_walk, state="not before"), "not decayed before it is read"),
        (With(mild_walk, state="not after"), "second half of the state's decay is missing"),
        (With(mild_walk, state="not carried"), "every chunk starts from zeros"),
        (With(mild_walk, state="no scale"), "The scale is missing"),
        (With(mild_walk, log2e=1.0, log2e_S=1.0), "2^x is not e^x"),
        (With(mild_walk, tail=False), "needs a mask, and other=0.0"),
        (With(mild_walk, last=False), "The final state is missing"),
        (With(mild_walk, own=False), "Nobody writes o[0, 16]"),
        (With(mild_walk, mask="transposed"), "The mask is transposed"),
        (With(mild_walk, state="read late"), "own writes are read twice"),
        (With(mild_walk, state="read last"), "own writes are read twice"),
        (With(mild_walk, state="scale twice"), "The scale is applied twice"),
        (With(mild_walk, log2e_S=1.0), "Some exponentials are 2^x"),
        (With(mild_walk, anchor="largest"), "All channels share one r"),
        (With(mild_walk, anchor="sum"), "All channels share one r"),
        (With(mild_walk, rows=False), "The kernel stopped with"),
        (With(mild_walk, store="open"), "1 beyond the end of o, into memory"),
        (With(mild_walk, store="BV"), "Rows of S_last lie V numbers apart"),
        (With(mild_walk, store="first"), "Rows of S_last lie V numbers apart"),
        (nothing, "The kernel stopped with"),
        (lambda q, k, v, g: v, "Expected a Triton kernel"),
    ],
}


def test_a_kernel_that_stores_nothing_is_open():
    assert check("ex-first-sum", nothing).status == "open"
