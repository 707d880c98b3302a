"""Wrong kernels as answers to the exercises of chapters 4 and 13: judges launch them between guards.

`test_exercises.py` holds the mistakes that these judges list; right kernels are the chapters' solutions.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from test_exercises import MISTAKES, number

from gla_ref.book.exercises import check, gla_kernel


@triton.jit
def sums(
    x, out, N, BLOCK: tl.constexpr, masked: tl.constexpr = True, apart: tl.constexpr = 1, into_x: tl.constexpr = False
):
    """The sum of a block; right as it is, each option is a mistake."""
    p = tl.program_id(0)
    o = p * BLOCK + tl.arange(0, BLOCK)
    tl.store((x if into_x else out) + p * apart, tl.sum(tl.load(x + o, mask=(o < N) | (not masked), other=0.0), 0))


@triton.jit
def misspelt(x, out, N, BLOCK: tl.constexpr):
    tl.store(out, tl.summ(tl.load(x), 0))


@triton.jit
def nothing(x, out, N, BLOCK: tl.constexpr):
    pass


def undecorated(x, out, N, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0), 1.0)


@triton.jit
def rounded(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A product of matrices whose operands have 10 bits."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM)[:, None], tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    b_c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        row, column = k + tl.arange(0, BK)[None, :], k + tl.arange(0, BK)[:, None]
        b_a = tl.load(a + i * K + row, mask=(i < M) & (row < K), other=0.0).to(tl.float16).to(tl.float32)
        b_b = tl.load(b + column * N + j, mask=(column < K) & (j < N), other=0.0).to(tl.float16).to(tl.float32)
        b_c = tl.dot(b_a, b_b, b_c, input_precision="ieee")
    tl.store(c + i * N + j, b_c, mask=(i < M) & (j < N))


@triton.jit
def mild_walk(
    q, k, v, g, o, S_last, T, V, scale, C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    mask: tl.constexpr = "where", anchor: tl.constexpr = True, tail: tl.constexpr = True, last: tl.constexpr = True,
    own: tl.constexpr = True, base_S: tl.constexpr = 1.4426950408889634, rows: tl.constexpr = True,
    store: tl.constexpr = "masked",
):  # fmt: skip
    """The walk of the GLA kernel (chapter 13); right as it is, each option is a mistake."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    o_k, o_v = tl.arange(0, K), (tl.program_id(0) * BV if own else 0) + tl.arange(0, BV)
    S = tl.zeros([K, BV], tl.float32)
    for t in range(0, T, C):
        keys, values, m = (t + i) * K + o_k[None, :], (t + i) * V + o_v[None, :], (t + i < T) | (not tail)
        b_q, b_k = tl.load(q + keys, mask=m, other=0.0), tl.load(k + keys, mask=m, other=0.0)
        b_v, b_g = tl.load(v + values, mask=m, other=0.0), tl.load(g + keys, mask=m, other=0.0)
        b, total = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        r = total / 2 if anchor else total * 0.0
        b_q, b_k = b_q * tl.exp(b - r[None, :]), b_k * tl.exp(r[None, :] - b)
        P = tl.dot(b_q, b_k.T, input_precision="ieee")
        if mask == "where":
            P = tl.where(i >= j, P, 0.0)
        elif mask == "factor":
            P = P * (i >= j).to(tl.float32)
        if rows:
            before, after = tl.exp2(r * base_S)[:, None], tl.exp2((total - r) * base_S)[:, None]
        else:  # the wrong axis: runs only if K = BV
            before, after = tl.exp2(r * base_S), tl.exp2((total - r) * base_S)
        S *= before
        b_o = tl.dot(b_q, S, input_precision="ieee") + tl.dot(P, b_v, input_precision="ieee")
        tl.store(o + values, scale * b_o, mask=(t + i < T) | (store == "open"))
        S = (S + tl.dot(b_k.T, b_v, input_precision="ieee")) * after
    if last:
        inside = (o_v < BV)[None, :] | (store != "first")
        tl.store(S_last + o_k[:, None] * (BV if store == "BV" else V) + o_v[None, :], S, mask=inside)


class With:
    """A kernel that makes a mistake."""

    def __init__(self, kernel, **mistake):
        self.kernel, self.mistake = kernel, mistake

    def __getitem__(self, grid):
        return lambda *args, **constants: self.kernel[grid](*args, **constants, **self.mistake)

    def __call__(self):
        """A call of it is an answer."""


@pytest.mark.parametrize("label, kernel", [("ex-first-sum", sums), ("ex-kernel-walk", mild_walk)])
def test_the_kernel_without_its_mistakes_is_right(label, kernel):
    assert check(label, kernel)


@pytest.mark.parametrize(
    "label, kernel, words",
    [
        ("ex-first-sum", With(sums, masked=False), "are all loads masked?"),
        ("ex-first-sum", With(sums, apart=16), "beyond the end of the result"),
        ("ex-first-sum", With(sums, apart=0), "Nobody writes result[1]"),
        ("ex-first-sum", With(sums, into_x=True), "The kernel changes x"),
        ("ex-first-sum", misspelt, "has no attribute 'summ'"),
        ("ex-first-sum", rounded, "The kernel stopped with"),
        ("ex-first-sum", undecorated, "write @triton.jit"),
        ("ex-first-matmul", rounded, "Nearly: it is off by"),
        ("ex-kernel-walk", With(mild_walk, mask="none"), "There is no mask"),
        ("ex-kernel-walk", With(mild_walk, mask="factor"), "select with tl.where"),
        ("ex-kernel-walk", With(mild_walk, anchor=False), "Anchor the exponents at r"),
        ("ex-kernel-walk", With(mild_walk, tail=False), "needs a mask, and other=0.0"),
        ("ex-kernel-walk", With(mild_walk, last=False), "The final state is missing"),
        ("ex-kernel-walk", With(mild_walk, own=False), "Nobody writes o[0, 16]"),
        ("ex-kernel-walk", With(mild_walk, base_S=1.0), "Some exponentials are 2^x"),
        ("ex-kernel-walk", With(mild_walk, rows=False), "The kernel stopped with"),
        ("ex-kernel-walk", With(mild_walk, store="open"), "1 beyond the end of o, into memory"),
        ("ex-kernel-walk", With(mild_walk, store="BV"), "Rows of S_last lie V numbers apart"),
        ("ex-kernel-walk", With(mild_walk, store="first"), "Rows of S_last lie V numbers apart"),
        ("ex-kernel-walk", nothing, "The kernel stopped with"),
        ("ex-kernel-walk", lambda q, k, v, g: v, "Expected a Triton kernel"),
    ],
)
def test_wrong_kernels_are_told_what_is_wrong(label, kernel, words):
    verdict = check(label, kernel)
    assert not verdict and words in verdict.message, verdict


def test_mistakes_of_the_walk_are_told_apart(monkeypatch):
    """By what a walk with the mistake computes, in the kernel's place; and each computes what it did."""
    monkeypatch.setattr(gla_kernel, "launch_all", lambda answer, case: answer(case))
    cases, numbers = [], []
    assert check("ex-kernel-walk", lambda case: cases.append(case) or gla_kernel._chunks(case))
    for sentence, mistakes in gla_kernel._MISTAKES.items():
        for options in mistakes:
            wrong = partial(gla_kernel._chunks, **options)
            assert check("ex-kernel-walk", wrong).message == sentence
            numbers.append(number(lambda case, wrong=wrong: tuple(wrong(case).values()), cases))
    assert numbers == pytest.approx(MISTAKES["ex-kernel-walk"], rel=1e-6), str([float(f"{x:.9g}") for x in numbers])


def test_a_kernel_that_stores_nothing_is_open():
    assert check("ex-first-sum", nothing).status == "open"
