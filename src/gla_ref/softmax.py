"""Softmax: naive, safe and online, and its statistics as a merge (chapters 1 and 2)."""

import torch
from torch import Tensor

__all__ = ["merge", "merge_outputs", "naive", "online", "safe", "statistics"]

Stats = tuple[Tensor, Tensor]
Partial = tuple[Tensor, Tensor, Tensor]


def naive(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax as it is defined: exp(x) / sum exp(x). Breaks: float32 overflows beyond x = 88.

    Args:
        x: scores of any shape; computed in float32, or in float64 when given float64.
        dim: the axis to normalise over.

    Returns:
        Weights in the shape and dtype of `x`; NaN where a score overflows.

    Raises:
        TypeError: `x` is no floating-point tensor.
        ValueError: `dim` does not exist or is empty.
    """
    x, result = _prepare(x, dim)
    e = x.exp()
    return (e / e.sum(dim, keepdim=True)).to(result)


def safe(x: Tensor, dim: int = -1) -> Tensor:
    """Safe softmax in three passes: the maximum, the sum, the weights.

    Milakov and Gimelshein 2018, algorithm 2. Arguments and errors are those of `naive`; scores lie
    in [-inf, inf), a score of -inf has weight 0, and so has every score of a row with nothing else.
    """
    x, result = _prepare(x, dim)
    m = _finite(x.amax(dim, keepdim=True))  # pass 1
    d = (x - m).exp().sum(dim, keepdim=True)  # pass 2
    return ((x - m).exp() / torch.where(d == 0, 1, d)).to(result)  # pass 3


def online(x: Tensor, dim: int = -1) -> Tensor:
    """Online softmax in two passes: maximum and sum together, one score at a time; the weights.

    Milakov and Gimelshein 2018, algorithm 3. Arguments, result and errors are those of `safe`.
    """
    x, result = _prepare(x, dim)
    m = torch.full_like(x.select(dim, 0), -torch.inf)
    d = torch.zeros_like(m)
    for x_j in x.unbind(dim):  # pass 1: one score is the statistics (x_j, 1)
        m, d = merge((m, d), (x_j, torch.ones_like(x_j)))
    m, d = _finite(m).unsqueeze(dim), d.unsqueeze(dim)
    return ((x - m).exp() / torch.where(d == 0, 1, d)).to(result)  # pass 2


def statistics(x: Tensor, dim: int = -1) -> Stats:
    """Largest score m and sum d of exp(x - m) over one axis; (-inf, 0) where all is masked.

    Args:
        x: scores in [-inf, inf), any shape.
        dim: the axis to reduce.

    Returns:
        `(m, d)`, each in the shape of `x` without `dim`, at least float32.

    Raises:
        TypeError: `x` is no floating-point tensor.
        ValueError: `dim` does not exist or is empty.
    """
    x, _ = _prepare(x, dim)
    m = x.amax(dim)
    return m, (x - _finite(m).unsqueeze(dim)).exp().sum(dim)


def merge(left: Stats, right: Stats) -> Stats:
    """Statistics of two sets of scores, from the statistics of each (an associative operator).

    Milakov and Gimelshein 2018, equation 4. Its identity is (-inf, 0), the statistics of no score.

    Args:
        left: `(m, d)`, two tensors of one shape.
        right: the same.

    Returns:
        `(m, d)` of the union.
    """
    (m1, d1), (m2, d2) = left, right
    m = torch.maximum(m1, m2)
    shift = _finite(m)
    return m, d1 * (m1 - shift).exp() + d2 * (m2 - shift).exp()


def merge_outputs(left: Partial, right: Partial) -> Partial:
    """Attention over two sets of keys, from the results over each (an associative operator).

    The tiled recurrence of FlashAttention (Dao et al. 2022, algorithm 1, lines 10 to 12), for any
    two parts instead of a running result and a tile. Its identity is (-inf, 0, anything finite).

    Args:
        left: `(m, d, o)`: statistics `[...]` and normalised output `[..., V]` over some keys.
        right: the same over other keys.

    Returns:
        `(m, d, o)` over all of them; o = 0 where every key is masked.
    """
    (m1, d1, o1), (m2, d2, o2) = left, right
    m, d = merge((m1, d1), (m2, d2))
    shift, total = _finite(m), torch.where(d == 0, 1, d)
    w1, w2 = d1 * (m1 - shift).exp() / total, d2 * (m2 - shift).exp() / total
    return m, d, w1[..., None] * o1 + w2[..., None] * o2


def _finite(m: Tensor) -> Tensor:
    """A shift for the exponents: m, or 0 where m = -inf, because -inf - -inf is not a number."""
    return torch.where(m == -torch.inf, 0, m)


def _prepare(x: Tensor, dim: int) -> tuple[Tensor, torch.dtype]:
    """Check, and return `x` in at least float32 with the dtype that the result should have."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x: expected a floating-point dtype, got {x.dtype}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: expected an axis of x, shape {list(x.shape)}, got {dim}")
    if x.shape[dim] == 0:
        raise ValueError(f"x: axis {dim} must not be empty, got shape {list(x.shape)}")
    return x.to(torch.promote_types(x.dtype, torch.float32)), x.dtype
