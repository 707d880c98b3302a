"""What each form costs: FLOPs, bytes, state, parallelism (chapters 1 to 9)."""

from __future__ import annotations

from dataclasses import dataclass

from ._contract import check_chunk

__all__ = ["Cost", "cost"]

FORMS = {
    "softmax_attention": ("recurrent", "parallel", "two_pass", "flash"),
    "linear_attention": ("recurrent", "parallel", "chunkwise", "scan"),
    "simple_gla": ("recurrent", "parallel", "chunkwise"),
    "gla": ("recurrent", "parallel", "parallel_log", "scan", "chunkwise", "chunkwise_two_level"),
}


@dataclass(frozen=True)
class Cost:
    """The cost of one form; :func:`cost` says how each number is counted."""

    matmul_flops: int  # 2 m n k for every product [m, k] @ [k, n]
    elementwise_flops: int  # additions, products, maxima and exponentials outside matrix products
    bytes: int  # to and from memory, each tensor that the form keeps there written and read once
    state_bytes: int  # states (or KV cache) that exist at the same time
    parallelism: int  # independent programs
    steps: int  # longest chain of steps of which each needs the one before


def cost(
    mechanism: str, form: str, *, B: int, T: int, H: int, K: int, V: int, C=64, c=16, itemsize=2
) -> Cost:
    """Cost of one call of a form, without `g_v`, `feature_map` or packing.

    Counted by these rules; both FLOP counts are exactly those of the reference.

    * *Matrix products*: 2 m n k each, masked entries included; a shorter last chunk as it is.
    * *Element-wise*: one FLOP for each number that `+ - * / exp max` writes, and for each that a
      sum, running sum or maximum along an axis reads; masks, copies and comparisons are free.
    * *Bytes*: q, k, v, gates read once and o written once, at `itemsize`; states in float32, the
      initial one read, the final one written. Beyond that, written once and read once: scores
      `[T, T]` of `parallel` (softmax: weights too) and `parallel_log`; decayed q and k of a gated
      `parallel`; states and gates of all tokens in every round of `scan`; statistics of `two_pass`.
      Softmax `recurrent` reads its whole cache for every token. The rest stays on the chip.
    * *Parallelism*: heads, times what is independent in a head: tiles of C queries (`parallel`,
      `parallel_log`, `flash`), single tokens (`two_pass`, `scan`), or nothing.
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
    for name, value, known in (
        ("mechanism", mechanism, FORMS),
        ("form", form, FORMS.get(mechanism)),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    for name, size in dict(B=B, T=T, H=H, K=K, V=V, C=C, c=c, itemsize=itemsize).items():
        check_chunk(**{name: size})
    if form == "chunkwise_two_level":
        check_chunk(C=C, c=c)
    count = _softmax if mechanism == "softmax_attention" else _linear
    *per_head, steps = count(mechanism, form, T, K, V, C, c, itemsize)
    return Cost(*(B * H * x for x in per_head), steps)


def _tiles(T: int, C: int) -> list[int]:  # lengths of the chunks of T tokens
    return [min(C, T - i) for i in range(0, T, C)]


def _product(m: int, k: int, n: int) -> tuple[int, int]:
    """(matmul, elementwise) of an einsum [m, k] x [k, n], which is no matrix product for k = 1."""
    return (2 * m * k * n, 0) if k > 1 else (0, m * n)


def _softmax(mechanism, form, T, K, V, C, c, itemsize):
    """One head: (matmul, elementwise, bytes, state bytes, programs, steps)."""
    tokens, cache = 2 * T * (K + V) * itemsize, T * (K + V) * itemsize
    tiles = _tiles(T, C)
    moved, programs, steps, weigh = {  # weigh: element-wise FLOPs of m queries by n keys
        "recurrent": (cache * (T + 3) // 2, 1, T, lambda m, n: 8 * m * n),
        "parallel": (tokens + 4 * T * T * itemsize, len(tiles), 1, lambda m, n: 8 * m * n),
        "two_pass": (tokens + 16 * T, T, 2 * T, lambda m, n: (13 + 2 * V) * m * n),
        "flash": (tokens, len(tiles), len(tiles), lambda m, n: 5 * m * (n + 1) + 2 * m * V),
    }[form]
    blocks = {
        "recurrent": [(1, t) for t in range(1, T + 1)],
        "flash": [(m, n) for i, m in enumerate(tiles) for n in tiles[: i + 1]],
    }.get(form, [(T, T)])
    flops = [0, 0]
    for m, n in blocks:
        scores = _product(m, K, n)
        weighted = scores if form == "two_pass" else _product(m, n, V)
        flops[0] += scores[0] + weighted[0]
        flops[1] += scores[1] + weighted[1] + weigh(m, n)
    if form == "flash":  # the running o is rescaled from the second tile on
        flops[1] += sum(m * (1 + V * i) for i, m in enumerate(tiles))
    return *flops, moved, cache, programs, steps


def _linear(mechanism, form, T, K, V, C, c, itemsize):
    """One head of a mechanism with a state; D is the width of its gate."""
    D = {"linear_attention": 0, "simple_gla": 1, "gla": K}[mechanism]
    S, tiles = K * V, _tiles(T, C)
    tokens = T * (2 * K + 2 * V + D) * itemsize + 8 * S
    if form == "recurrent":  # k v, + S, q S, sum; gated: exp(g), alpha S
        return 0, T * (4 * S + V + D + S * (D > 0)), tokens, 4 * S, 1, T
    if form == "scan":
        rounds = (T - 1).bit_length()
        pairs = rounds * T - (2**rounds - 1)  # round r combines T - 2^r pairs
        elementwise = T * (5 * S + V + D) + pairs * (2 * S + (D or 1))
        moved = tokens + 8 * (1 + rounds) * T * (S + (D or 1))
        return 0, elementwise, moved, 4 * T * S, T, rounds
    if form == "parallel":
        elementwise = {
            "linear_attention": T * (K + V) + S,
            "simple_gla": T * (5 * K + V + 2) + 2 * S,
            "gla": T * (7 * K + 4 * V) + 3 * S,
        }[mechanism]
        moved = tokens + (2 * T * T + 4 * T * K * (D > 0)) * itemsize
        return 2 * T * T * (K + V) + 4 * T * S, elementwise, moved, 4 * S, len(tiles), 1
    if form == "parallel_log":
        elementwise = 5 * T * T * K + T * (8 * K + V) + K + 2 * S
        matmul = 2 * T * T * V + 4 * T * S
        return matmul, elementwise, tokens + 2 * T * T * itemsize, 4 * S, len(tiles), 1
    matmul, elementwise = 4 * T * S, T * (K + V)  # through the state; scale q, inter + intra
    for n in tiles:  # chunkwise
        if mechanism == "linear_attention":
            matmul, elementwise = matmul + 2 * n * n * (K + V), elementwise + S
        elif mechanism == "simple_gla":
            matmul += 2 * n * n * (K + V)
            elementwise += 3 * n * n + n * (2 * K + 4) + 1 + 2 * S
        else:
            elementwise += 7 * n * K + K + 2 * S
            two_level = form == "chunkwise_two_level"
            for i, m in enumerate(_tiles(n, c) if two_level else [n]):
                matmul += 2 * m * m * V + 2 * m * i * c * (K + V)
                elementwise += 5 * m * m * K + two_level * m * V * (1 + (i > 0))
                elementwise += 3 * (m + i * c) * K * (i > 0)
    return matmul, elementwise, tokens, 4 * S, 1, len(tiles)
