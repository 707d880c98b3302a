"""Log gates: how they are made and how they are summed (chapters 9, 10 and 11).

Every log gate g = ln(alpha) lies in [-inf, 0]. The sums below only ever add gates, never
subtract one running sum from another: each is exact to rounding, and g = -inf (a hard reset) is
an ordinary value in them.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ._contract import check_chunk, compute_dtype

__all__ = ["chunk_cumsum", "decay_from_start", "decay_to_end", "low_rank_gate", "segment_sum", "softplus_gate"]


def low_rank_gate(x: Tensor, W1: Tensor, W2: Tensor, bias: Tensor | None = None, *, tau: float = 16.0) -> Tensor:
    r"""Log gate of a token from its embedding through a low-rank map.

    .. math::

        g = \operatorname{logsigmoid}(x W_1 W_2 + b) / \tau, \quad \alpha = e^{g} = \sigma(x W_1 W_2 + b)^{1/\tau}

    Args:
        x: token embeddings `[..., d]`.
        W1: `[d, r]`, with a small rank r (16 in the paper).
        W2: `[r, H * K]`.
        bias: `[H * K]`, optional.
        tau: temperature; the larger, the slower the forgetting.

    Returns:
        g in natural logarithm, `[..., H * K]`, never positive.

    Raises:
        ValueError: tau is not positive, or the shapes do not chain.

    Source: Yang et al. 2024 (GLA), section 4.4.
    """
    if not tau > 0:
        raise ValueError(f"tau: expected a positive number, got {tau}")
    if x.shape[-1] != W1.shape[0] or W1.shape[-1] != W2.shape[0]:
        raise ValueError(
            f"W1, W2: expected [d, r] and [r, H*K] with d = {x.shape[-1]}, got {list(W1.shape)} and {list(W2.shape)}"
        )
    logits = x @ W1 @ W2
    return F.logsigmoid(logits if bias is None else logits + bias) / tau


def softplus_gate(
    x: Tensor, A_log: Tensor | None, bias: Tensor | None = None, *, lower_bound: float | None = None
) -> Tensor:
    r"""Log gates from logits, each head with a rate e^A of its own.

    .. math::

        g = -e^{A} \operatorname{softplus}(x + b), \quad \text{or with a lower bound } L < 0: \;
        g = L \, \sigma(e^{A} (x + b))

    L is a scale, not a clamp.

    Args:
        x: `[B, T, H]` or `[B, T, H, K]`.
        A_log: A of each head, `[H]` in any shape; None for A = 0, with a lower bound only.
        bias: as many numbers as x has for a token, or None.
        lower_bound: L, a negative number, or None.

    Returns:
        g in natural logarithm, of the shape of x, in at least float32.

    Raises:
        ValueError: the lower bound is not negative, or there is neither it nor `A_log`.

    Source: Mamba-2, Gated DeltaNet and Kimi Linear (softplus); fla 0.6.0's KDA (the bound).
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor without lower_bound, got None")
    if not (lower_bound is None or lower_bound < 0):
        raise ValueError(f"lower_bound: expected a negative number or None, got {lower_bound}")
    x = x.to(compute_dtype(x))
    x = x if bias is None else x + bias.to(x.dtype).reshape(x.shape[2:])
    rate = 1.0 if A_log is None else A_log.to(x.dtype).exp().reshape(-1, *[1] * (x.ndim - 3))
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()


def chunk_cumsum(g: Tensor, C: int, *, base2: bool = False) -> Tensor:
    """Inclusive running sum of the gates inside each chunk of C tokens.

    Args:
        g: natural log gates `[B, T, ...]`; any T.
        C: chunk length.
        base2: multiply by 1/ln 2, so that `exp2` of the result is the decay.

    Returns:
        b with b_t = sum of g from the first token of t's chunk to t, shape of g.

    Raises:
        ValueError: C is not a positive integer.

    Source: Yang et al. 2024 (GLA), section 4.2; Listing 1.
    """
    check_chunk(C=C)
    b = torch.cat([g_n.cumsum(1) for g_n in g.split(C, 1)], 1)
    return b / math.log(2) if base2 else b


def decay_from_start(g: Tensor) -> Tensor:
    """Sum of the gates up to and including each token: `[..., T, D]`, row i holding b_i, the sum of g_l over l ≤ i."""
    return g.cumsum(-2)


def decay_to_end(g: Tensor) -> Tensor:
    """Sum of the gates *after* each token: `[..., T, D]` to `[..., T, D]`, row j holding the sum of g_l over l > j.

    On paper b_T - b_j; summed from the end, so that -inf before j does no harm.
    """
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def segment_sum(g: Tensor) -> Tensor:
    """Sum of the gates *between* two tokens: `[..., T, D]` to `[..., T, T, D]`.

    Returns:
        D with D[i, j] the sum of g_l over j < l ≤ i for j ≤ i (0 on the diagonal) and -inf for j > i, so
        that `D.exp()` is the decay of token j's write as token i reads it, causal mask included.

    On paper b_i - b_j. The difference of running sums loses the low bits of mild gates that follow
    a strong one, and is NaN after g = -inf; this sum does neither.
    """
    T = g.shape[-2]
    i, j = torch.arange(T, device=g.device)[:, None], torch.arange(T, device=g.device)
    between = torch.where((i > j)[..., None], g[..., :, None, :], 0).cumsum(-3)
    return torch.where((i >= j)[..., None], between, -torch.inf)
