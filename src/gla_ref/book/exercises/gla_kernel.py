"""Judges of the exercises on the GLA kernel: programs, sums by products, segments, the walk itself (chapter 13)."""

import itertools
import math

import torch

from ... import gla
from ...rounding import error
from . import Wrong, exercise
from ._compare import draw, hold, variants
from ._predict import ask, numbers
from .first_kernels import Launch, launch_all


@ask("ex-kernel-grid")
def grid():
    tiles, heads, chunks = 128 // 64, 4, 65536 // 64
    segments = 16
    right = [tiles * heads, chunks, tiles * heads * segments, chunks // segments]
    mistakes = [
        ([heads, ..., ..., ...], "A program owns 64 of the 128 columns: each head has two."),
        ([heads * chunks, 1, ..., ...], "A program a chunk would need the state before it: the walk has one a tile."),
        ([..., 65536, ..., ...], "A round is a chunk of 64 tokens."),
        ([right[0], right[1], right[0], ...], "Each segment has programs of its own."),
        ([right[0], right[1], right[2], chunks], "A program of a segment walks through its own 4096 tokens only."),
    ]
    hint = "Programs: columns / 64 times heads times segments. Rounds: tokens of a segment / 64."
    names = ["programs", "rounds", "programs, by segments", "rounds, by segments"]
    return numbers(names, right, mistakes, hint)


def _tiles(e, memory, exponentials, needed=1, saved=2):
    return needed + saved * e * exponentials / memory


@exercise("ex-kernel-tiles", "derive")
def tiles(answer):
    mistakes = {
        "One tile needs its exponentials in any case: only n - 1 repetitions are saved.": dict(needed=0),
        "There are two exponentials for each number, one for q and one for k.": dict(saved=4),
        "q and k are written once more, and so are they read: four times K numbers.": dict(saved=1),
        "Bytes are paid at the rate of memory, exponentials at theirs: the ratio is upside down.": (
            lambda e, memory, exponentials: 1 + 2 * e * memory / exponentials
        ),
        "4 K numbers are 4 e K bytes.": lambda e, memory, exponentials: 1 + 2 * exponentials / memory,
    }
    cases = [(4, 1.5e12, 4.2e12), (2, 4.8e12, 3.9e12)]
    hold(answer, cases, _tiles, variants(_tiles, mistakes), {"n": ""})


def _carried(decay, own, S, gate=lambda a, n: a[n], late=0):
    starts = [S]
    for n in range(len(own)):
        starts.append(gate(decay, n)[:, None] * starts[-1] + own[n])
    return torch.stack(starts[late : late + len(own)]), starts[-1]


@exercise("ex-kernel-carry", "implement")
def carry(answer):
    mistakes = {
        "The states after the segments: a segment needs the one before it.": dict(late=1),
        "The decay belongs to the rows of the state, one for each channel of k.": (
            lambda a, own, S: _carried(a.new_ones(a.shape), own, S)
        ),
        "A state decays by the segment that it passes through, not by the one before.": dict(
            gate=lambda a, n: a[n - 1] if n else a.new_ones(a[0].shape)
        ),
        "The first segment starts from S, not from zeros.": lambda a, own, S: _carried(a, own, torch.zeros_like(S)),
        "What a segment adds has decayed inside of it already.": (lambda a, own, S: _carried(a, a[..., None] * own, S)),
    }
    noise, own, S = draw(9, (4, 2), (4, 2, 3), (2, 3))
    cases = [(noise.sigmoid(), own, S)]
    hold(answer, cases, _carried, variants(_carried, mistakes), {"starts": "N K V", "final": "K V"})


def _chunks(
    case, mask=torch.tril, late=False, carry=True, decay=(1, 1), scale=1, base=(1.0,) * 3, twice=None, one=None
):
    """o and S of a walk over chunks in float64; the options are mistakes.

    late: a token's own gate decays its write. decay: how many of the state's factors e^r come before it is read, and
    after the writes. scale: how often it is applied. base: of the exponents of q, k and the state; ln 2 where 2^x
    stands for e^x. twice: tokens read a state with their chunk's writes, 0 or 1 times decayed. one: r of all channels.
    """
    q, k, v, g = case.inputs.values()
    S, rows = q.new_zeros(q.shape[1], v.shape[1]), []
    for q_n, k_n, v_n, g_n in zip(*(x.split(case.constants["C"]) for x in (q, k, v, g)), strict=True):
        b = g_n.cumsum(0)
        r, to_key = b[-1] / 2, b - g_n if late else b  # b_j, or b_(j - 1) where a write is late
        r = one(r).expand_as(r) if one else r
        q_n, k_n = q_n * (base[0] * (b - r)).exp(), k_n * (base[1] * (r - to_key)).exp()
        before = (decay[0] * base[2] * r).exp()[:, None] * S
        after = (decay[1] * base[2] * r).exp()[:, None]
        S = before + k_n.T @ v_n
        rows.append(q_n @ (before if twice is None else after**twice * S) + mask(q_n @ k_n.T) @ v_n)
        S = after * S if carry else torch.zeros_like(S)
    return {"o": case.numbers[2] ** scale * torch.cat(rows), "S_last": S}


_LN2 = math.log(2)
_MISTAKES = {  # a sentence -> options of _chunks that make this mistake
    "The mask is strict: a token misses its own write. Keep the diagonal, i >= j.": [dict(mask=lambda P: P.tril(-1))],
    "There is no mask: tokens read later ones. Keep the scores with i >= j.": [dict(mask=lambda P: P)],
    "The mask is transposed: i, the row, is the reader. Keep the scores with i >= j.": [dict(mask=torch.triu)],
    "That is gate after write: each write is decayed by its own token's gate. Its decay begins with the next token.": [
        dict(late=True)
    ],
    "All channels share one r: reduce over the tokens only. Without an axis, tl.sum and tl.max reduce over both.": [
        dict(one=torch.max),
        dict(one=torch.sum),
    ],
    "The state is not handed on: every chunk starts from zeros.": [dict(carry=False)],
    "The state is not decayed before it is read: multiply it by e^r first.": [dict(decay=(0, 1))],
    "The second half of the state's decay is missing: after the writes, multiply by e^r again.": [dict(decay=(1, 0))],
    "The chunk's own writes are read twice, through P and from the state: read the state before you add them.": [
        dict(twice=0),
        dict(twice=1),
    ],
    "The scale is missing.": [dict(scale=0)],
    "The scale is applied twice: multiply either q or the output by it, not both.": [dict(scale=2)],
    "2^x is not e^x: multiply the exponents by log2(e) before tl.exp2, or use tl.exp.": [dict(base=(_LN2,) * 3)],
    "Some exponentials are 2^x and others e^x: use tl.exp for q, k and the state, or log2(e) and tl.exp2 for all.": [
        dict(base=base) for base in itertools.product((1.0, _LN2), repeat=3) if len(set(base)) > 1
    ],
}


@exercise("ex-kernel-walk", "implement")
def walk(answer):
    def case(T, K, V, BV, seed, nats=None, gates=1 / 4):
        q, k, v, noise = draw(seed, (T, K), (T, K), (T, V), (T, K))
        g = torch.nn.functional.logsigmoid(noise) * gates
        if nats:  # in every chunk of 16, in one channel
            g[:, 1] = -nats / 16
        x = {"q": q, "k": k, "v": v, "g": g}
        x = {name: y.float().double() for name, y in x.items()}
        shapes, constants = {"o": (T, V), "S_last": (K, V)}, {"C": 16, "K": K, "BV": BV}
        absent = {"S_last": "The final state is missing: after the loop, store your columns of S to S_last."}
        partial = {"S_last": "Rows of S_last lie V numbers apart, and each program stores its own BV columns."}
        return Launch(x, shapes, [V // BV], [T, V, K**-0.5], constants, absent, partial)

    def off(got, want):
        return max(error(got[name], want[name]) if got[name].isfinite().all() else math.inf for name in want)

    cases = [
        # K is not BV: a factor of the wrong axis does not fit. Weak gates: all of a chunk's together leave a trace
        case(16, 16, 32, 32, 1, gates=1 / 32),
        case(64, 32, 32, 16, 2),
        case(40, 16, 32, 16, 3),
        case(32, 16, 16, 16, 4, nats=120),
    ]
    for n, x in enumerate(cases):
        got = launch_all(answer, x)
        o, S = gla.recurrent(*(y[None, :, None] for y in x.inputs.values()), scale=x.numbers[2])
        want = {"o": o[0, :, 0], "S_last": S[0, 0]}
        if off(got, want) < 1e-4:
            continue
        for sentence, mistakes in _MISTAKES.items():
            if any(off(got, _chunks(x, **options)) < 1e-4 for options in mistakes):
                raise Wrong(sentence)
        if n == 3 and off(got, want) == math.inf:
            raise Wrong(
                "Right where gates are weak, but not finite in a chunk that decays by 120 nats: 2^x overflows. Anchor "
                "the exponents at r = b_C / 2, and select with tl.where instead of multiplying by a mask."
            )
        T = x.inputs["q"].shape[0]
        sizes = f"T = {T}, K = {x.constants['K']}, V = {want['o'].shape[1]}, C = 16"
        for name in want:
            if not got[name].isfinite().all():
                at = (~got[name].isfinite()).nonzero()[0].tolist()
                raise Wrong(
                    f"{name}[{at[0]}, {at[1]}] is not finite at {sizes}. What lies beyond a tensor is NaN here: a "
                    "load of tokens beyond T needs a mask, and other=0.0."
                )
        for name, y in want.items():
            if error(got[name], y) >= 1e-4:
                i, j = ((got[name] - y).abs() > 1e-4 * y.square().mean().sqrt()).nonzero()[0].tolist()
                hint = ' It is nearly right: products need input_precision="ieee".' if off(got, want) < 5e-3 else ""
                chunk = f" (chunk {i // 16 + 1})" if name == "o" else ""
                raise Wrong(
                    f"{name}[{i}, {j}]{chunk} is {got[name][i, j]:.4g} instead of {y[i, j]:.4g} at {sizes}.{hint}"
                )
