"""The cost of each form: FLOPs, bytes, state, steps (chapters 1 to 11 and 20)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from .._contract import check_chunk
from ..gla import two_level_blocks

__all__ = ["ORDINARY", "Cost", "block_flops", "cost"]

#: FLOP/s of an H200 in float32 without tensor cores, by its data sheet
ORDINARY = 67e12


@dataclass(frozen=True)
class Cost:
    """The cost of one form; :func:`cost` has the rules of counting."""

    matmul_flops: int  # 2 m n k for every product [m, k] @ [k, n]
    elementwise_flops: int  # additions, products, maxima and exponentials outside matrix products
    bytes: int  # to and from memory, each tensor that the form keeps there written and read once
    state_bytes: int  # states (or KV cache) that exist at the same time
    steps: int  # longest chain of steps; each needs the step before


def cost(mechanism: str, form: str, *, B: int, T: int, H: int, K: int, V: int, C=64, c=16, itemsize=2) -> Cost:
    """Return the cost of one call of a form, without `g_v`, `feature_map` or packing; in the delta family with HV = H.

    The rules of counting follow; both FLOP counts are exactly those of the reference.

    * *Matrix products*: 2 m n k each, masked entries included; a shorter last chunk as it is.
    * *Element-wise*: one FLOP for each number that `+ - * / exp max` writes, and for each that a
      sum, running sum or maximum along an axis reads; masks, copies and comparisons are free.
    * *Bytes*: q, k, v, gates read once and o written once, at `itemsize`; states in float32, the
      initial one read, the final one written. Beyond that, written once and read once: scores `[T, T]` of `parallel`
      (softmax: weights too) and `parallel_log`; decayed q and k of a gated `parallel`; states and gates of all tokens
      in every round of `scan` (in the delta family: each map that it makes, a K x K matrix and a state); statistics of
      `two_pass`. Softmax `recurrent` reads its whole cache for every token. The rest stays on the chip.
    * *Steps*: tokens, chunks, tiles of keys, rounds of a scan, or 1.

    Args:
        mechanism: a key of `gla_ref.FORMS`.
        form: the name of a reference in `gla_ref.FORMS[mechanism]`.
        B, T, H, K, V: the sizes.
        C: chunk length; for softmax the tile, `block_q = block_k = C`.
        c: sub-chunk length, a divisor of C in `chunkwise_two_level`.
        itemsize: bytes a number of q, k, v, g and o (2 for bfloat16).

    Raises:
        ValueError: a name is unknown or a size is no positive integer; the message names it.
    """
    for name, value, known in (("mechanism", mechanism, FORMS), ("form", form, FORMS.get(mechanism))):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    for name, size in dict(B=B, T=T, H=H, K=K, V=V, C=C, c=c, itemsize=itemsize).items():
        check_chunk(**{name: size})
    if form == "chunkwise_two_level":
        check_chunk(C=C, c=c)
    one = FORMS[mechanism][form](Head(T, K, V, C, c, itemsize))
    *counted, steps = vars(one).values()
    return Cost(*(B * H * x for x in counted), steps)


@dataclass(frozen=True)
class Head:
    """The sizes of one head, and numbers that every form derives from them."""

    T: int
    K: int
    V: int
    C: int
    c: int
    itemsize: int

    @property
    def S(self) -> int:
        """Numbers of a state."""
        return self.K * self.V

    @property
    def tiles(self) -> list[int]:
        """Lengths of the chunks."""
        return [min(self.C, self.T - i) for i in range(0, self.T, self.C)]

    @property
    def cache(self) -> int:
        """Bytes of all keys and values."""
        return self.T * (self.K + self.V) * self.itemsize

    def moved(self, gate: int) -> int:
        """Bytes of q, k, v, o and `gate` log gates per token, each once, and of a state in and out."""
        return self.T * (2 * self.K + 2 * self.V + gate) * self.itemsize + 8 * self.S


# softmax attention: a cache of keys and values is its state


def einsum(m: int, k: int, n: int) -> tuple[int, int]:
    """(matmul, elementwise) FLOPs of [m, k] x [k, n]; with k = 1 the product counts as element-wise."""
    return (2 * m * k * n, 0) if k > 1 else (0, m * n)


def attention(h: Head, blocks, elementwise: int, bytes: int, steps: int) -> Cost:
    """Count scores and weighted values of `blocks` of m queries by n keys, and add other `elementwise` FLOPs."""
    matmul = scaled = 0
    for (m, n), times in Counter(blocks).items():  # many blocks, of four sizes at most
        for products, sums in (einsum(m, h.K, n), einsum(m, n, h.V)):
            matmul, scaled = matmul + times * products, scaled + times * sums
    return Cost(matmul, elementwise + scaled, bytes, h.cache, steps)


def attention_recurrent(h: Head) -> Cost:
    blocks = [(1, t) for t in range(1, h.T + 1)]
    pairs = sum(t for _, t in blocks)
    return attention(h, blocks, 8 * pairs, h.cache * (h.T + 3) // 2, h.T)


def attention_parallel(h: Head) -> Cost:
    pairs = h.T * h.T
    moved = 2 * h.cache + 4 * pairs * h.itemsize
    return attention(h, [(h.T, h.T)], 8 * pairs, moved, 1)


def attention_two_pass(h: Head) -> Cost:
    matmul, scaled = einsum(h.T, h.K, h.T)  # the scores, twice; values are added element by element
    elementwise = 2 * scaled + (13 + 2 * h.V) * h.T * h.T
    return Cost(2 * matmul, elementwise, 2 * h.cache + 16 * h.T, h.cache, 2 * h.T)


def attention_flash(h: Head) -> Cost:
    tiles = h.tiles
    blocks = [(m, n) for i, m in enumerate(tiles) for n in tiles[: i + 1]]
    elementwise = sum(5 * m * (n + 1) + 2 * m * h.V for m, n in blocks)
    elementwise += sum(m * (1 + h.V * i) for i, m in enumerate(tiles))  # o, rescaled from the second tile on
    return attention(h, blocks, elementwise, 2 * h.cache, len(tiles))


# forms of mechanisms with a state S: `gate` is the width of the log gates, 0 without gates


def recurrent(h: Head, gate: int) -> Cost:
    """k v, + S, q S and its sum; with gates exp(g) and alpha S."""
    elementwise = h.T * (4 * h.S + h.V + gate + h.S * (gate > 0))
    return Cost(0, elementwise, h.moved(gate), 4 * h.S, h.T)


def scan(h: Head, gate: int) -> Cost:
    rounds, alpha = (h.T - 1).bit_length(), gate or 1
    pairs = rounds * h.T - (2**rounds - 1)  # round r combines T - 2^r pairs
    elementwise = h.T * (5 * h.S + h.V + gate) + pairs * (2 * h.S + alpha)
    moved = h.moved(gate) + 8 * (1 + rounds) * h.T * (h.S + alpha)
    return Cost(0, elementwise, moved, 4 * h.T * h.S, rounds)


def parallel(h: Head, gate: int, elementwise: int) -> Cost:
    """Scores, weighted values, q S and the final state; with gates q and k are stored decayed."""
    matmul = 2 * h.T * h.T * (h.K + h.V) + 4 * h.T * h.S
    moved = h.moved(gate) + (2 * h.T * h.T + 4 * h.T * h.K * (gate > 0)) * h.itemsize
    return Cost(matmul, elementwise, moved, 4 * h.S, 1)


def chunkwise(h: Head, gate: int, own: Callable[[int], tuple[int, int]]) -> Cost:
    """Add up each chunk's (matmul, elementwise) FLOPs for its own n tokens, and the FLOPs of reads and writes of S."""
    matmul, elementwise = map(sum, zip(*map(own, h.tiles), strict=True))
    matmul += 4 * h.T * h.S
    elementwise += h.T * (h.K + h.V)  # scale q, inter + intra
    return Cost(matmul, elementwise, h.moved(gate), 4 * h.S, len(h.tiles))


def linear_attention_chunkwise(h: Head) -> Cost:
    return chunkwise(h, 0, lambda n: (2 * n * n * (h.K + h.V), h.S))


def simple_gla_chunkwise(h: Head) -> Cost:
    return chunkwise(h, 1, lambda n: (2 * n * n * (h.K + h.V), 3 * n * n + n * (2 * h.K + 4) + 1 + 2 * h.S))


# the delta family: beta is one more number per token


def delta_recurrent(h: Head, gate: int) -> Cost:
    """k S, v - k S, beta, k v^, + S, q S; with gates exp(g) and alpha S."""
    elementwise = h.T * (6 * h.S + 2 * h.V + h.K + gate + h.S * (gate > 0))
    return Cost(0, elementwise, h.moved(gate + 1), 4 * h.S, h.T)


def delta_scan(h: Head, gate: int) -> Cost:
    """A tree of maps (M, X): each combination is M M and M X + X."""
    pairs, rounds, n = 0, 0, h.T
    while n > 1:
        pairs, rounds, n = pairs + n - 1, rounds + 1 + (n > 2), n // 2
    square = h.K * h.K
    matmul = (pairs + h.T) * 2 * h.K * h.S + pairs * 2 * h.K * square
    elementwise = pairs * h.S + h.T * (2 * h.K + 2 * square + 4 * h.S + gate * (1 + square))
    moved = h.moved(gate + 1) + 8 * (h.T + pairs) * (h.S + square)
    return Cost(matmul, elementwise, moved, 4 * h.T * h.S, rounds)


def substitution(n: int) -> tuple[int, int]:
    """Row i of the inverse takes i rows of n numbers."""
    return 0, n**3 - n


def blocked(n: int, c: int = 16) -> tuple[int, int]:
    """Invert blocks of c on the diagonal by substitution, then merge pairs of blocks by two products each."""
    sizes = [min(c, n - i) for i in range(0, n, c)]
    matmul, elementwise = map(sum, zip(*map(substitution, sizes), strict=True))
    while len(sizes) > 1:
        pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
        matmul += sum(2 * a * b * (a + b) for a, b in pairs)
        elementwise += sum(a * b for a, b in pairs)
        sizes = [a + b for a, b in pairs] + sizes[2 * len(pairs) :]
    return matmul, elementwise


def delta_chunkwise(h: Head, gate: int, own: Callable[[int], int], inverse=blocked, *, scores: int = 2) -> Cost:
    """Add up the family's work and `own(n)` element-wise FLOPs; `scores` of k k^T and q k^T are matrix products."""
    matmul, elementwise = map(sum, zip(*map(inverse, h.tiles), strict=True))
    matmul += sum((2 * scores * h.K + 4 * h.V) * n * n for n in h.tiles) + 6 * h.T * h.S
    elementwise += h.T * (h.K + 3 * h.V) + sum(n * n + h.S + own(n) for n in h.tiles)
    return Cost(matmul, elementwise, h.moved(gate + 1), 4 * h.S, len(h.tiles))


def delta_parallel(h: Head, gate: int, own: Callable[[int], int]) -> Cost:
    """One chunk of all tokens, its triangle, inverse and scores in memory."""
    whole = Head(h.T, h.K, h.V, h.T, h.c, h.itemsize)
    n = delta_chunkwise(whole, gate, own, lambda n: blocked(n, 1))
    moved = n.bytes + 6 * h.T * h.T * h.itemsize
    return replace(n, bytes=moved, steps=(h.T - 1).bit_length() + 1)


def ungated(n: int) -> int:
    return 0


def scalar_gated(h: Head) -> Callable[[int], int]:
    return lambda n: 4 * n * n + n * (3 * h.K + 4) + h.S


def kda_chunkwise(h: Head, c: int | None = None) -> Cost:
    """In log space all pairs of a chunk, or those of each block of c, which reads the tokens before it by products."""
    cost = delta_chunkwise(h, h.K, lambda n: 10 * n * h.K + h.K + h.S, scores=0)
    blocks = [(min(c or n, n - i), i) for n in h.tiles for i in range(0, n, c or n)]  # (tokens, tokens before)
    pairs = sum(10 * m * m + (6 * (m + i) if i else 0) for m, i in blocks) * h.K
    products = sum(4 * m * i for m, i in blocks) * h.K
    return replace(cost, matmul_flops=cost.matmul_flops + products, elementwise_flops=cost.elementwise_flops + pairs)


def gla_parallel_log(h: Head) -> Cost:
    pairs, T = h.T * h.T, h.T
    elementwise = 5 * pairs * h.K + T * (8 * h.K + h.V) + h.K + 2 * h.S
    matmul = 2 * pairs * h.V + 4 * T * h.S
    return Cost(matmul, elementwise, h.moved(h.K) + 2 * pairs * h.itemsize, 4 * h.S, 1)


def gla_chunkwise(h: Head) -> Cost:
    return chunkwise(h, h.K, lambda n: (2 * n * n * h.V, 7 * n * h.K + h.K + 2 * h.S + 5 * n * n * h.K))


def block_flops(kind: str, m: int, n: int, K: int, V: int) -> tuple[int, int]:
    """FLOPs of a block of :func:`gla_ref.gla.two_level_blocks`, m readers by n writers: (products, element-wise).

    A chunk's block between chunks includes the update of the state by its own m tokens.
    """
    if kind == "inter-chunk":
        return 4 * m * K * V, 7 * m * K + K + 2 * K * V + m * (K + V)
    if kind == "inter-sub-chunk":
        return 2 * m * n * (K + V), 3 * (m + n) * K + m * V
    return 2 * m * m * V, 5 * m * m * K + m * V


def gla_chunkwise_two_level(h: Head) -> Cost:
    blocks = two_level_blocks(h.T, h.C, h.c)
    counts = [block_flops(kind, *(x.stop - x.start for x in sides), h.K, h.V) for kind, *sides in blocks]
    return Cost(*map(sum, zip(*counts, strict=True)), h.moved(h.K), 4 * h.S, len(h.tiles))


FORMS = {
    "softmax_attention": {
        "recurrent": attention_recurrent,
        "parallel": attention_parallel,
        "two_pass": attention_two_pass,
        "flash": attention_flash,
    },
    "linear_attention": {
        "recurrent": lambda h: recurrent(h, 0),
        "parallel": lambda h: parallel(h, 0, h.T * (h.K + h.V) + h.S),
        "chunkwise": linear_attention_chunkwise,
        "scan": lambda h: scan(h, 0),
    },
    "simple_gla": {
        "recurrent": lambda h: recurrent(h, 1),
        "parallel": lambda h: parallel(h, 1, h.T * (5 * h.K + h.V + 2) + 2 * h.S),
        "chunkwise": simple_gla_chunkwise,
    },
    "gla": {
        "recurrent": lambda h: recurrent(h, h.K),
        "parallel": lambda h: parallel(h, h.K, h.T * (7 * h.K + 4 * h.V) + 3 * h.S),
        "parallel_log": gla_parallel_log,
        "scan": lambda h: scan(h, h.K),
        "chunkwise": gla_chunkwise,
        "chunkwise_two_level": gla_chunkwise_two_level,
    },
    "delta_rule": {
        "recurrent": lambda h: delta_recurrent(h, 0),
        "parallel": lambda h: delta_parallel(h, 0, ungated),
        "chunkwise": lambda h: delta_chunkwise(h, 0, ungated),
        "chunkwise_substitution": lambda h: delta_chunkwise(h, 0, ungated, substitution),
        "scan": lambda h: delta_scan(h, 0),
    },
    "gated_delta_rule": {
        "recurrent": lambda h: delta_recurrent(h, 1),
        "parallel": lambda h: delta_parallel(h, 1, scalar_gated(h)),
        "chunkwise": lambda h: delta_chunkwise(h, 1, scalar_gated(h)),
        "chunkwise_substitution": lambda h: delta_chunkwise(h, 1, scalar_gated(h), substitution),
        "scan": lambda h: delta_scan(h, 1),
    },
    "kda": {
        "recurrent": lambda h: delta_recurrent(h, h.K),
        "chunkwise": kda_chunkwise,
        "chunkwise_two_level": lambda h: kda_chunkwise(h, h.c),
    },
}
