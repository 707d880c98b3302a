"""Linear attention in four forms that compute the same thing (chapters 5 and 6).

S_t = S_{t-1} + phi(k_t)^T v_t,    o_t = scale * phi(q_t) S_t,    normalised: o_t / (phi(q_t) z_t)
"""

import functools
from collections.abc import Callable

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from ._contract import check_scale, check_tensors, compute_dtype, form, outside_autocast, signature_of_form
from .chunks import by_chunk, heads_first
from .mechanisms import MECHANISMS
from .prefix_sum import hillis_steele

__all__ = ["chunkwise", "elu_plus_one", "exponential", "parallel", "polynomial2", "recurrent", "scan"]


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, positive, `[..., K]` to `[..., K]`. Source: Katharopoulos et al. 2020, eq. 7."""
    return F.elu(x) + 1


def exponential(x: Tensor, t: float = 1.0) -> Tensor:
    """exp(t x), element-wise: a larger t concentrates the attention. Source: GLA paper, appendix A.1."""
    return (t * x).exp()


def polynomial2(x: Tensor) -> Tensor:
    """All products x_i x_j, `[..., K]` to `[..., K * K]`: phi(q) phi(k)^T = (q k^T)^2."""
    return rearrange(x[..., :, None] * x[..., None, :], "... i j -> ... (i j)")


def normalised_state(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Check an initial state (S, z); return S `[N, H, K, V]` and z as a column of it, `[N, H, K, 1]`."""
    if not isinstance(pair, tuple) or [isinstance(x, Tensor) for x in pair] != [True, True]:
        came = [type(x).__name__ for x in pair] if isinstance(pair, tuple) else type(pair).__name__
        raise TypeError(f"initial_state: expected (S, z) with normalize=True, two tensors, got {came}")
    S, z = pair
    if S.shape[:-1] != z.shape:
        raise ValueError(f"initial_state: expected z of shape {list(S.shape[:-1])}, got {list(z.shape)}")
    return S, z[..., None]


def _form(body: Callable) -> Callable:
    """Make a form of the bare recurrence, with `feature_map` and `normalize` besides.

    The normaliser z_t = z_{t-1} + phi(k_t) is the state of one more value column that holds 1.
    """
    bare = form("linear_attention")(body)

    @functools.wraps(body)
    def wrapper(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        normalize: bool = False,
        **options,
    ):
        sizes = check_tensors({"q": q, "k": k, "v": v}, MECHANISMS["linear_attention"].arguments)
        scale, dtype, result = check_scale(scale, sizes["K"]), compute_dtype(q, k, v), v.dtype
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if feature_map is not None:
            with outside_autocast(q):
                q, k = feature_map(q), feature_map(k)
        if normalize:
            v = F.pad(v, (0, 1), value=1)
            if initial_state is not None:
                initial_state = torch.cat(normalised_state(initial_state), -1)
        o, S = bare(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
        if not normalize:
            return o.to(result), S
        return (o[..., :-1] / o[..., -1:]).to(result), (S[..., :-1], S[..., -1])

    wrapper.__signature__ = signature_of_form(body, cu_seqlens=None, feature_map=None, normalize=False)
    wrapper.__doc__ = (body.__doc__ or "") + _ARGUMENTS
    return wrapper


_ARGUMENTS = """

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        scale: factor on q, K^-0.5 when None.
        initial_state: S `[N_seq, H, K', V]`, or (S, z) with z `[N_seq, H, K']` when normalised; zeros when None.
        cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed sequences (B = 1).
        feature_map: phi, applied to q and k, K features to K'; None is the identity.
        normalize: divide by phi(q_t) z_t; meant for positive feature maps.

    Returns:
        o `[B, T, H, V]` in the dtype of v, and the final state.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """


@_form
def recurrent(q, k, v, *, scale, initial_state):
    """Token by token: two vector operations and one state (GLA paper, eq. 1)."""
    S, o = initial_state, []
    for t in range(q.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]  # [B H K V]
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S


@_form
def parallel(q, k, v, *, scale, initial_state):
    """All pairs of tokens at once, (Q K^T * M) V; quadratic in T."""
    q, k, v = map(heads_first, (scale * q, k, v))
    P = (q @ k.mT).tril()  # [B H T T]
    o = P @ v + q @ initial_state
    return rearrange(o, "b h t d -> b t h d"), initial_state + k.mT @ v


@_form
def chunkwise(q, k, v, *, scale, initial_state, C: int = 64):
    """Chunks of C tokens: parallel inside, recurrent between (GLA paper, section 2.2; Hua et al. 2022)."""
    S, o = initial_state, []
    for q_n, k_n, v_n in by_chunk(C, scale * q, k, v):
        P = (q_n @ k_n.mT).tril()  # [B H C C]
        o.append(q_n @ S + P @ v_n)  # inter-chunk + intra-chunk
        S = S + k_n.mT @ v_n
    return rearrange(torch.cat(o, -2), "b h t d -> b t h d"), S


@_form
def scan(q, k, v, *, scale, initial_state):
    """An associative scan over pairs (alpha, S), every state in memory: log2 T steps, T K V numbers.

    (a1, S1) then (a2, S2) is (a1 a2, a2 S1 + S2); here alpha = 1, chapter 9 gives it a meaning.
    """
    write = k[..., :, None] * v[..., None, :]  # [B T H K V]
    alpha = torch.ones_like(write[..., :1, :1])
    alpha, S = hillis_steele(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (alpha, write))
    S = S + alpha * repeat(initial_state, "b h k v -> b t h k v", t=1)
    return scale * (q[..., :, None] * S).sum(-2), S[:, -1]
