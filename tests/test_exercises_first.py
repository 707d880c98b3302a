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
def ones(q, k, v, g, o, S_last, T, V, scale, C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, rows: tl.constexpr):
    """Ones in o, and in so many rows of the final state."""
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    for t in range(T):
        tl.store(o + t * V + column, 1.0)
    for i in range(rows):
        tl.store(S_last + i * V + column, 1.0)


class With:
    """A kernel that makes a mistake."""

    def __init__(self, kernel, **mistake):
        self.kernel, self.mistake = kernel, mistake

    def __getitem__(self, grid):
        return lambda *args, **constants: self.kernel[grid](*args, **constants, **self.mistake)

    def __call__(self):
        """A call of it is an answer."""


def test_the_kernel_without_its_mistakes_is_right():
    assert check("ex-first-sum", sums)


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
        ("ex-kernel-walk", With(ones, rows=0), "The final state is missing"),
        ("ex-kernel-walk", With(ones, rows=1), "Nobody writes S_last[1, 0]"),
        ("ex-kernel-walk", With(ones, rows=1), "Rows of S_last lie V numbers apart"),
        ("ex-kernel-walk", With(ones, rows=16), "o[0, 0] (chunk 1) is 1 instead of"),
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


@pytest.mark.parametrize("T, words", [(32, "Anchor the exponents at r"), (40, "needs a mask, and other=0.0")])
def test_a_walk_that_is_not_finite_is_told_where(T, words, monkeypatch):
    """In strong chunks, which are in the case of 32 tokens, or in the last tokens of 40."""

    def launch(answer, case):
        found = gla_kernel._chunks(case)
        if len(found["o"]) == T:
            found["o"][-1] = torch.nan
        return found

    monkeypatch.setattr(gla_kernel, "launch_all", launch)
    assert words in check("ex-kernel-walk", ones).message


def test_a_kernel_that_stores_nothing_is_open():
    assert check("ex-first-sum", nothing).status == "open"
