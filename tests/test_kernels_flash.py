"""FlashAttention in Triton against float64 attention: interpreted on the CPU (float32), for real on a GPU."""

import math
from itertools import pairwise

import pytest
import torch
from cases import thin
from harness import CUDA, HERE, anywhere, named

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gla_ref import FORMS
from gla_ref.check import oracle
from gla_ref.check._emulate import multiply
from gla_ref.kernels.flash_attention import flash_attention
from gla_ref.rounding import Luck

HALF = (torch.bfloat16, torch.float16)
NAMES, KIND = ("q", "k", "v"), "softmax_attention"


def inputs(B, T, H, K, V, dtype=torch.float32, past=0, seed=0):
    """Leaves q, k, v (and the cache) and the gradient of o."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng).to(HERE, dtype)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if past:
        x |= {"k0": normal(B, past, H, K), "v0": normal(B, past, H, V)}
    return {n: y.requires_grad_() for n, y in x.items()} | {"do": normal(B, T, H, V)}


def run(x, **options):
    """o and the gradients of every leaf, by the kernels."""
    leaves = {n: y for n, y in x.items() if n != "do"}
    cache = (x["k0"], x["v0"]) if "k0" in x else None
    o, _ = flash_attention(x["q"], x["k"], x["v"], initial_state=cache, **options)
    grads = torch.autograd.grad(o, list(leaves.values()), x["do"])
    return {"o": o.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def assert_right(got, x, ends=None, scale=None, heads=None):
    """Each quantity within its budget; of `heads` (b, h) one after the other where they are given."""
    x, how = {n: y.detach() for n, y in named(x).items()}, {"ends": ends and tuple(ends), "scale": scale}
    every = [(slice(None), slice(None))] if heads is None else [(slice(b, b + 1), slice(h, h + 1)) for b, h in heads]
    for b, h in every:
        one, mine = ({n: y[b, :, h] for n, y in z.items()} for z in (x, got))
        within(mine, oracle.exact(KIND, one, **how), oracle.emulated(KIND, one, chosen=[0], **how))


def within(got, right, runs):
    wrong = {n: pair for n, pair in oracle.judge(KIND, got, right, runs).items() if not pair[0] <= pair[1]}
    assert not wrong, f"error, budget: {wrong}"


# T in 1 ... 130, each once, with every kind of size: equal, unequal, above and below powers of two
LENGTHS = [(T, *[(16, 16), (5, 7), (8, 20), (33, 4)][T % 4]) for T in range(1, 131)]


@pytest.mark.parametrize("first", thin(range(21), 2))
def test_every_length(first):
    for T, K, V in LENGTHS[first::21]:
        x = inputs(1, T, 1, K, V, seed=T)
        assert_right(run(x), x)


@pytest.mark.parametrize("shape", [(2, 37, 3, 16, 8), (1, 40, 2, 60, 100), (1, 33, 1, 256, 200)])
def test_heads_and_sizes(shape):
    x = inputs(*shape)
    assert_right(run(x), x)


@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0])
def test_scale(scale):
    x = inputs(1, 70, 1, 8, 8)
    assert_right(run(x, scale=scale), x, scale=scale)


def offset(T, H, K, V, seed=0):
    """Rows of scores to base 2 that float32 holds exactly: an offset, up to 992 from 0, and a few multiples of 2^-6."""
    x = inputs(1, T, H, K, V, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n in ("q", "k"):
            x[n].mul_(4).round_().clamp_(-8, 8).div_(8)
        x["q"][..., 0] = torch.randint(-992, 993, (1, T, H), generator=rng)
        x["k"][..., 0] = 1
    return x


def by_maximum_and_sum(x, luck):
    """o and the gradients in float32 where a row's maximum and sum are never made one number."""

    def mm(a, b):
        return multiply(a, b, torch.float32, luck=luck)

    q, k, v, do = (x[n].transpose(1, 2) for n in (*NAMES, "d o"))
    scores = mm(q, k.mT)
    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp2()
    total = mm(p, torch.ones_like(p[..., :1]))
    o = mm(p, v) / total
    p = p / total
    ds = math.log(2) * p * (mm(do, v.mT) - (o * do).sum(-1, keepdim=True))
    found = {"o": o, "dq": mm(ds, k), "dk": mm(ds.mT, q), "dv": mm(p.mT, do)}
    return {n: y.transpose(1, 2) for n, y in found.items()}


def packing(ends):
    return {"cu_seqlens": torch.tensor(ends, device=HERE)} if len(ends) > 2 else {}


def assert_right_far_from_zero(ends, H, K, V):
    """float32 loses no digits where scores, which it holds exactly, are large: p is as if they were small.

    One float32 of log-sum-exp would be wrong by up to 2^-15 here.
    """
    x, copies = offset(ends[-1], H, K, V), 8
    log2 = math.log(2)  # the scale that leaves scores to base 2 as they are
    got = run(x, scale=log2, **packing(ends))
    for a, b in pairwise(ends):
        one = {n: y[:, a:b].detach() for n, y in named(x).items()}
        if a < b:
            many = {n: torch.cat([y] * copies, 2) for n, y in one.items()}
            low = by_maximum_and_sum(many, Luck(copies, sizes=False))
            runs = [{n: y.chunk(copies, 2)[i] for n, y in low.items()} for i in range(copies)]
            within({n: y[:, a:b] for n, y in got.items()}, oracle.exact(KIND, one, scale=log2), runs)


STEEP = thin([[0, 63], [0, 130], [0, 40, 40, 103, 130]], [0, 63])
STEEP = [[0, 1000], [0, 63, 500, 500, 1000]] if CUDA else STEEP


@anywhere
@pytest.mark.parametrize("ends", STEEP, ids=str)
def test_scores_far_from_zero(ends):
    assert_right_far_from_zero(ends, 2, *((60, 60) if CUDA else (8, 12)))


@pytest.mark.parametrize("ends", STEEP, ids=str)
def test_one_key_takes_all(ends):
    """Scores of up to 2600, rounded, each key ahead of the last by 20: fused multiply-adds, as on GPUs, must agree."""
    x = inputs(1, ends[-1], 2, 8, 12)
    with torch.no_grad():
        x["q"].mul_(0.1).add_(20 / 8)
        x["k"].copy_((1 + 0.1 * x["k"][:, :1]) * torch.arange(1, ends[-1] + 1, device=HERE)[:, None, None])
    assert_right(run(x, scale=1.0, **packing(ends)), x, ends, scale=1.0)


@anywhere
@pytest.mark.parametrize("past", [1, 128, 700] if CUDA else thin([1, 31, 32, 45], 1, 45))
@pytest.mark.parametrize("T", [1, 64, 300] if CUDA else thin([1, 20, 33, 64], 1, 33))
def test_cache_is_the_first_part_of_a_longer_sequence(T, past):
    x = inputs(1, T, *((2, 128, 64, torch.bfloat16) if CUDA else (1, 8, 12)), past=past)
    assert_right(run(x), x)
    _, (k, v) = flash_attention(*(x[n] for n in NAMES), initial_state=(x["k0"], x["v0"]))
    assert torch.equal(k, torch.cat([x["k0"], x["k"]], 1))
    assert torch.equal(v, torch.cat([x["v0"], x["v"]], 1))


PACKS = [[0, 3, 3, 50, 100], [0, 0, 0, 31, 33, 65, 65], [0, 1, 2, 3, 4, 5], [0, 130], [0, 32, 64, 96], [0, 0, 97, 97]]
PACKS = [[0, 500, 500, 501, 1629, 1757, 1757, 4000]] if CUDA else thin(PACKS, PACKS[1])
PACKED = [(64, 64), (128, 128), (100, 60)] if CUDA else [(8, 12)]


@anywhere
@pytest.mark.parametrize("ends", PACKS, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("K, V", PACKED)
def test_packed_sequences(ends, kind, K, V):
    for dtype in HALF if CUDA else (torch.float32,):
        x = inputs(1, ends[-1], 2, K, V, dtype)
        assert_right(run(x, cu_seqlens=torch.tensor(ends, dtype=kind, device=HERE)), x, ends, heads=[(0, 0), (0, 1)])


@pytest.mark.deep
def test_more_sequences_than_one_look_up_takes():
    rng = torch.Generator().manual_seed(0)
    ends = [0, *torch.randint(0, 3, (600,), generator=rng).cumsum(0).tolist()]
    x = inputs(1, ends[-1], 1, 4, 4)
    o, _ = flash_attention(*(x[n] for n in NAMES), cu_seqlens=torch.tensor(ends, device=HERE))
    want, _ = FORMS["softmax_attention"]["parallel"](*(x[n].double() for n in NAMES), cu_seqlens=torch.tensor(ends))
    # an absolute band: weights of at most two values, with relative errors of eps a score and a few eps
    scores = (x["q"].abs() * 4**0.5).amax() * (x["k"].abs()).amax()
    band = 4 * torch.finfo(torch.float32).eps * (1 + scores) * x["v"].abs().amax()
    assert (o - want).abs().max() < band


def test_packed_sequences_do_not_see_their_neighbours():
    ends = [0, 21, 45, 70]
    cu = torch.tensor(ends, device=HERE)
    dtype = torch.bfloat16 if CUDA else torch.float32  # the copy engine reads past the end of a sequence
    x = inputs(1, 70, 1, 16, 16, dtype)
    got, y = run(x, cu_seqlens=cu), inputs(1, 70, 1, 16, 16, dtype)
    with torch.no_grad():
        for n in y:
            y[n][:, :21] = y[n][:, 45:] = float("nan")
    for n, z in run(y, cu_seqlens=cu).items():
        assert torch.equal(z[:, 21:45], got[n][:, 21:45]), n


def test_strides_poisoned_memory_and_repetition(poisoned):
    x = inputs(2, 3, 50, 16, 24, torch.bfloat16 if CUDA else torch.float32)
    y = {n: z.detach().transpose(1, 2).requires_grad_(n != "do") for n, z in x.items()}  # [B, T, H, D]
    assert not any(z.is_contiguous() for z in y.values())
    before = {n: z.clone() for n, z in y.items()}
    first, second = run(y), run(y)
    assert_right(first, y)
    assert all(torch.equal(first[n], second[n]) for n in first), "bitwise, from run to run"
    assert all(torch.equal(before[n], y[n]) for n in y), "inputs are left alone"
    every_other = torch.stack([y["v"].detach(), y["v"].detach()], -1).flatten(-2)[..., ::2]
    assert every_other.stride(-1) == 2
    z = dict(y, v=every_other.requires_grad_(), do=y["do"][:, :1].expand_as(y["do"]))
    assert_right(run(z), z, heads=[(1, 2)])


def test_operator_is_registered_right():
    x = inputs(1, 20, 1, 8, 8)
    args = (*(x[n] for n in NAMES), None, 0.5, False)
    torch.library.opcheck(torch.ops.gla_ref.flash_attention.default, args)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("T", [63, 257, 1000, 4097])
@pytest.mark.parametrize(
    "K, V", [(16, 16), (60, 60), (64, 64), (100, 100), (128, 128), (256, 256), (96, 160), (64, 256)]
)
def test_at_size(dtype, T, K, V):
    if dtype == torch.float32 and (T > 1000 or K not in (60, 256)):
        pytest.skip("float32 is compiled for a few sizes only: every one costs ten seconds")
    x = inputs(2, T, 3, K, V, dtype, seed=T)
    assert_right(run(x), x, heads=[(0, 0), (1, 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_bitwise_equal_at_size(dtype, K):
    x = inputs(2, 2049, 4, K, K, dtype)
    first = run(x)
    for _ in range(3):
        assert all(torch.equal(first[n], y) for n, y in run(x).items())


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements():
    x = [torch.randn(1, 1 << 17, 260, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv"]
    cu = torch.arange(0, (1 << 17) + 1, 1 << 10, device="cuda")  # short sequences: it is about offsets
    with torch.no_grad():
        o, _ = flash_attention(*x, cu_seqlens=cu)
    span = slice((1 << 17) - 1024, 1 << 17)
    one = {n: y[:, span, -1:] for n, y in zip(NAMES, x, strict=True)}
    within({"o": o[:, span, -1:]}, oracle.exact(KIND, one), oracle.emulated(KIND, one, copies=2, chosen=[0]))
