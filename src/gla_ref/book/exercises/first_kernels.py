"""Judges of the exercises on the first Triton kernels (chapter 4)."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import find_device
from ...rounding import error
from . import Open, Wrong, exercise
from ._compare import call, draw, hold, variants
from ._predict import choose, predict

GUARD = 4096  # numbers before, between and after a kernel's tensors, which no program may touch
NAN, UNWRITTEN = 0x7FC00000, 0x7FC5A5A5  # float32 patterns of the guards, and of results before a kernel writes them
CLOSE = 2e-5  # relative to the result's rms: float32 sums of some dozen terms in any order; `right` may need more
COARSE = 5e-3  # the error of operands rounded to 10 bits, as in TF32


class Launch(NamedTuple):
    """One launch of the reader's kernel."""

    inputs: dict[str, Tensor]  # float64, each becomes a pointer to float32
    #: the shape of the result, whose pointer comes after the inputs'; shapes by name if there are several results
    shape: Sequence[int] | dict[str, Sequence[int]]
    grid: Sequence[int]
    numbers: Sequence  # arguments after the pointers
    constants: dict[str, int]  # tl.constexpr
    absent: dict[str, str] = {}  # by a result's name, what to say where nothing of it is written
    partial: dict[str, str] = {}  # and what to add where a part of it is not


def launch_all(kernel, case: Launch) -> dict[str, Tensor]:
    """Return the kernel's results by name; raise Wrong if it writes elsewhere, or not everywhere.

    Guards of NaN lie between the tensors.
    """
    expect_kernel(kernel, case)
    shapes = {"result": tuple(case.shape)} if isinstance(case.shape, (list, tuple)) else case.shape
    sizes = [x.numel() for x in case.inputs.values()] + [torch.Size(shape).numel() for shape in shapes.values()]
    begins = [GUARD + sum(-(-n // 16) * 16 + GUARD for n in sizes[:i]) for i in range(len(sizes))]
    spans = (slice(begin, begin + n) for begin, n in zip(begins, sizes, strict=True))
    places = dict(zip((*case.inputs, *shapes), spans, strict=True))
    memory = torch.full((begins[-1] + sizes[-1] + GUARD,), NAN, dtype=torch.int32)
    for name in shapes:
        memory[places[name]] = UNWRITTEN
    memory = memory.to(find_device().device)
    pointers = [memory[place].view(torch.float32) for place in places.values()]
    for mine, given in zip(pointers, case.inputs.values(), strict=False):
        mine.copy_(given.flatten())
    before = memory.clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's, of infinity and NaN
            kernel[tuple(case.grid)](*pointers, *case.numbers, **case.constants)
    except Exception as reason:  # the interpreter's own, the compiler's, or a missing argument
        raise Wrong(f"The kernel stopped with {type(reason).__name__}: {reason}") from None
    expect_own_places(memory != before, places, [*shapes])
    for name, shape in shapes.items():
        expect_all_written(name, (memory[places[name]] == UNWRITTEN).view(shape), case)
    return {name: memory[places[name]].view(torch.float32).view(shape).cpu().double() for name, shape in shapes.items()}


def expect_kernel(kernel, case: Launch) -> None:
    """Raise Wrong if the answer is no Triton kernel, Open if it is a function that returns nothing."""
    if hasattr(type(kernel), "__getitem__") and not isinstance(kernel, (type, dict)):
        return
    try:  # a body of dots returns nothing: no answer yet
        call(kernel, *case.inputs.values())
    except Open:
        raise
    except Exception:  # any other body needs a kernel around it
        pass
    raise Wrong("Expected a Triton kernel: write @triton.jit in the line above its `def`.")


def expect_own_places(written: Tensor, places: dict[str, slice], results: list[str]) -> None:
    """Raise Wrong if a kernel wrote to an input or beyond its results, Open if it wrote nowhere."""
    if not written.any():
        raise Open("Your turn: the kernel stores nothing yet.")
    for name, place in places.items():
        if name not in results and written[place].any():
            own = "the last pointer" if len(results) == 1 else " and ".join(results)
            raise Wrong(f"The kernel changes {name}, which is not its own: store through {own}.")
        written[place] = False
    if written.any():
        i = int(written.nonzero()[0])
        beyond = {name: max(i - places[name].stop + 1, places[name].start - i) for name in results}  # how far from each
        name = min(beyond, key=beyond.get)
        where = "before the beginning" if i < places[name].start else f"{beyond[name]} beyond the end"
        what = "the result" if len(results) == 1 else name
        raise Wrong(f"A program writes {where} of {what}, into memory that is not its own: mask the store.")


def expect_all_written(name: str, missed: Tensor, case: Launch) -> None:
    """Raise Wrong if a result has places that no program wrote."""
    asked = "which program should, and at which offset?"
    if missed.all():
        raise Wrong(case.absent.get(name, f"Nobody writes {name} at all: {asked}"))
    if missed.any():
        at = ", ".join(map(str, missed.nonzero()[0].tolist()))
        raise Wrong(f"Nobody writes {name}[{at}]: {asked} {case.partial.get(name, '')}".rstrip())


def launch(kernel, case: Launch) -> Tensor:
    """The one result of a kernel."""
    return launch_all(kernel, case)["result"]


def kernel(answer, cases: Iterable[Launch], right: Callable, mistakes: dict[str, Callable]) -> None:
    """Compare the reader's kernel with `right` on every case; name its mistake.

    Args:
        answer: the reader's kernel, or another object in its place.
        cases: small launches.
        right: the right result of a case, in float64.
        mistakes: a sentence for the reader -> the result of a kernel with this mistake.
    """
    for case in cases:
        got, want = launch(answer, case), right(case)
        in_float32 = case._replace(inputs={n: x.float() for n, x in case.inputs.items()})
        # the exponential of large scores is less exact than a sum
        if error(got, want) <= CLOSE + 4 * error(right(in_float32), want):
            continue
        for sentence, mistake in mistakes.items():
            wrong = mistake(case)
            if torch.allclose(got, wrong, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise Wrong(sentence)
        at = tuple((~torch.isclose(got, want, rtol=1e-4, atol=1e-5)).nonzero()[0].tolist())
        where = f"result[{', '.join(map(str, at))}]"
        if not got.isfinite().all():
            at = tuple((~got.isfinite()).nonzero()[0].tolist())
            raise Wrong(
                f"result[{', '.join(map(str, at))}] is {got[at]:g}. What lies beyond a tensor is NaN here: are all "
                "loads masked? If so, does an exponential overflow, or is something divided by 0?"
            )
        if error(got, want) <= COARSE:
            raise Wrong(
                f"Nearly: it is off by {error(got, want):.0e}, as if operands or sums were rounded. Products need "
                'input_precision="ieee", sums float32.'
            )
        raise Wrong(f"The first difference is at {where}: {got[at]:.4g} instead of {want[at]:.4g}.")


def numbers(seed: int, *shape: int) -> Tensor:
    return draw(seed, shape)[0]


predict(
    "ex-first-grid",
    ["programs", "places where the mask is false", "numbers stored"],
    [4, 24, 1000],  # four programs of 256, and 24 places of the last one beyond the end
    [
        ([3, ..., ...], "Three programs of 256 reach number 767 only. Round up."),
        ([1000, ..., ...], "A program has a whole block of 256 numbers."),
        ([4, 232, ...], "232 is how many numbers the last program does have."),
        ([4, 0, ...], "4 x 256 is 1024, more than 1000."),
        ([4, 24, 1024], "What the mask leaves out is neither read nor written."),
        ([4, 24, 256], "That is what one program writes; all of them together?"),
    ],
    "Count blocks of 256 until they hold 1000 numbers. What is left over in the last one?",
)


@exercise("ex-first-sum", "implement")
def partial_sums(answer):
    """result[p] is the sum of block p of x."""

    def blocks(case, fill=0.0):
        (x,), (N,), BLOCK = case.inputs.values(), case.numbers, case.constants["BLOCK"]
        padded = torch.cat([x, x.new_full((-N % BLOCK,), fill)])
        return padded.view(-1, BLOCK)

    mistakes = {
        "All programs sum the first block. Which numbers are a program's own? Its number times BLOCK, and on.": (
            lambda case: blocks(case)[:1].sum(1).expand(*case.shape)
        ),
        "Blocks overlap: program 1 begins at number BLOCK, not at number 1.": lambda case: torch.stack(
            [x[: case.constants["BLOCK"]].sum() for x in (case.inputs["x"][p:] for p in range(*case.shape))]
        ),
        "That is the sum so far, over all earlier programs too; each program adds up its own block.": (
            lambda case: blocks(case).sum(1).cumsum(0)
        ),
        "That is the largest number of a block; add them up.": lambda case: blocks(case, -torch.inf).amax(1),
        "That is the mean of a block; the sum is not divided.": lambda case: blocks(case).mean(1),
    }
    cases = [
        Launch({"x": numbers(N, N)}, [-(-N // BLOCK)], [-(-N // BLOCK)], [N], {"BLOCK": BLOCK})
        for N, BLOCK in ((40, 16), (64, 32), (5, 8))
    ]
    kernel(answer, cases, lambda case: blocks(case).sum(1), mistakes)


@exercise("ex-first-offsets", "derive")
def offsets(answer):
    """((b T + t) H + h) K + c for t = 0 ... T - 1 and c = 0 ... K - 1."""

    def of(order):
        return lambda *x: order(*x, torch.arange(x[3])[:, None], torch.arange(x[5])[None, :])

    mistakes = {
        "That is the layout [B, H, T, K]. Here the heads of one token lie side by side.": of(
            lambda b, h, B, T, H, K, t, c: ((b * H + h) * T + t) * K + c
        ),
        "The tokens of one head are not side by side: between two of them lie all other heads, H K numbers.": of(
            lambda b, h, B, T, H, K, t, c: b * T * H * K + h * K + t * K + c
        ),
        "The sequence b is missing: each takes T H K numbers.": of(lambda b, h, B, T, H, K, t, c: (t * H + h) * K + c),
        "The head h is missing: it lies h K numbers from the token's first.": of(
            lambda b, h, B, T, H, K, t, c: (b * T + t) * H * K + c
        ),
        "Those are bytes of float32. An offset counts numbers; Triton knows how large one is.": of(
            lambda b, h, B, T, H, K, t, c: 4 * (((b * T + t) * H + h) * K + c)
        ),
    }
    cases = [(1, 2, 2, 5, 3, 4), (0, 0, 2, 3, 2, 4), (2, 1, 3, 4, 2, 8)]  # b, h, B, T, H, K
    hold(answer, cases, of(lambda b, h, B, T, H, K, t, c: ((b * T + t) * H + h) * K + c), mistakes)


choose(
    "ex-first-wide",
    "Products that can pass 2^31 - 1",
    "bdf",  # b = 7, t = 65535, h = 63, c = 127
    {
        "a": "It counts tokens, of which there are 2^19 in all.",
        "b": "A sequence has 2^29 numbers, and the last one begins after seven of them.",
        "c": "It counts heads of tokens, 2^25 of them.",
        "d": "It counts all numbers of the tensor, and there are 2^32.",
        "e": "It stays inside one sequence, which has 2^29 numbers.",
        "f": "The last channel begins after 127 times 2^25 numbers: columns can lie far apart as well.",
    },
)


@exercise("ex-first-norm", "implement")
def rms_norm(answer):
    """y = x / sqrt(mean(x^2) + eps), one row per program, rows a stride apart."""

    def rows(case):
        (x,), (N, stride, _, _) = case.inputs.values(), case.numbers
        return x.flatten().as_strided((case.shape[0], N), (stride, 1))

    def normed(case, length=None, eps=None):
        x, N = rows(case), length or case.numbers[0]
        return x / (x.square().sum(1, keepdim=True) / N + (case.numbers[3] if eps is None else eps)).sqrt()

    def packed(case):  # as if the rows lay side by side
        x, (R, N) = case.inputs["x"].flatten(), case.shape
        x = x[: R * N].view(R, N)
        return x / (x.square().mean(1, keepdim=True) + case.numbers[3]).sqrt()

    def case(R, N, stride, BLOCK, eps=0.5):
        x = numbers(N, R * stride)  # between two rows lie numbers of another tensor
        return Launch({"x": x}, [R, N], [R], [N, stride, N, eps], {"BLOCK": BLOCK})

    def centred(case):
        x = rows(case) - rows(case).mean(1, keepdim=True)
        return x / (x.square().mean(1, keepdim=True) + case.numbers[3]).sqrt()

    mistakes = {
        "The mean is over the N numbers of the row, not over the BLOCK places of the program.": (
            lambda case: normed(case, length=case.constants["BLOCK"])
        ),
        "eps is missing under the root.": dict(eps=0.0),
        "That is the sum of squares under the root; divide it by N.": dict(length=1),
        "Rows of x lie x_stride numbers apart, which need not be N.": packed,
        "-inf squared is inf: what the mask leaves out must count as 0 in a sum of squares.": (
            lambda case: normed(case) * (case.shape[1] == case.constants["BLOCK"])
        ),
        "All programs normalise row 0: a row begins at its number times the stride.": (
            lambda case: normed(case)[:1].expand(*case.shape)
        ),
        "That subtracts the mean too (a LayerNorm); RMSNorm does not.": centred,
    }
    cases = [case(3, 8, 8, 8), case(4, 5, 5, 8), case(3, 20, 24, 32)]
    kernel(answer, cases, normed, variants(normed, mistakes))


@exercise("ex-first-matmul", "implement")
def matmul(answer):
    """c = a b, one tile of c per program, in steps of BK along K."""

    def product(case, steps=lambda K, BK: slice(K)):
        """By the columns of a, and rows of b, that some steps have."""
        a, b = case.inputs.values()
        some = steps(a.shape[1], case.constants["BK"])
        return a[:, some] @ b[some]

    def case(M, N, K):
        a, b = numbers(M, M, K), numbers(N, K, N)
        tiles = {"BM": 16, "BN": 16, "BK": 16}
        return Launch({"a": a, "b": b}, [M, N], [-(-M // 16), -(-N // 16)], [M, N, K], tiles)

    mistakes = {
        "Only BK columns of a meet BK rows of b: a loop over K is missing.": dict(steps=lambda K, BK: slice(BK)),
        "Only the last step is kept: add up the products.": dict(steps=lambda K, BK: slice((K - 1) // BK * BK, K)),
        "The loop ends too early: the last BK numbers of K need a step too, if only a part of one.": dict(
            steps=lambda K, BK: slice(K // BK * BK)
        ),
    }
    cases = [case(32, 16, 16), case(16, 48, 64), case(20, 37, 41)]
    kernel(answer, cases, product, variants(product, mistakes))


@exercise("ex-first-keys", "implement")
def keys(answer):
    """BM queries attend to all N keys, BN at a time, with a running maximum and sum."""

    def attention(x, v):
        return torch.softmax(x, -1) @ v

    def of(case):
        q, k, v = case.inputs.values()
        return q, k, v, case.numbers[1], case.constants["BN"]

    def right(case):
        q, k, v, scale, _ = of(case)
        return attention(scale * q @ k.T, v)

    def padded(case):
        q, k, v, scale, BN = of(case)
        k, v = (torch.cat([x, x.new_zeros(-len(x) % BN, x.shape[1])]) for x in (k, v))
        return attention(scale * q @ k.T, v)

    def walk(case, on_sum=True, on_out=True, divide=True, tiles=None):
        q, k, v, scale, BN = of(case)
        m, d, u = q.new_full((len(q), 1), -torch.inf), q.new_zeros(len(q), 1), 0.0
        for k_j, v_j in list(zip(k.split(BN), v.split(BN), strict=True))[:tiles]:
            x = scale * q @ k_j.T
            m_new = torch.maximum(m, x.amax(1, keepdim=True))
            p, r = (x - m_new).exp(), (m - m_new).exp()
            d = (r if on_sum else 1) * d + p.sum(1, keepdim=True)
            u, m = (r if on_out else 1) * u + p @ v_j, m_new
        return u / d if divide else u

    def causal(case):
        q, k, v, scale, _ = of(case)
        future = torch.arange(len(k)) > torch.arange(len(q))[:, None]
        return attention((scale * q @ k.T).masked_fill(future, -torch.inf), v)

    def case(N, scale=0.3):
        x = {"q": numbers(N, 16, 32), "k": numbers(N + 1, N, 32), "v": numbers(N + 2, N, 16)}
        return Launch(x, [16, 16], [1], [N, scale], {"BM": 16, "BN": 16, "K": 32, "V": 16})

    mistakes = {
        "Only the first BN keys are read: walk over all N of them.": dict(tiles=1),
        "The last tile has keys beyond the end. Loaded as 0 they have the score 0, which counts: make their "
        "scores -inf.": padded,
        "The sum so far is relative to an older maximum: shrink it by e^(m - m_new).": dict(on_sum=False),
        "The output so far is relative to an older maximum: shrink it by e^(m - m_new).": dict(on_out=False),
        "The sum and the output so far are relative to an older maximum: shrink both by e^(m - m_new).": dict(
            on_sum=False, on_out=False
        ),
        "The output is not divided by the sum.": dict(divide=False),
        "These queries see all keys: no causal mask here.": causal,
        "The scale is missing.": lambda case: attention(of(case)[0] @ of(case)[1].T, of(case)[2]),
    }
    kernel(answer, [case(16), case(48), case(40), case(64, scale=8.0)], right, variants(walk, mistakes))
