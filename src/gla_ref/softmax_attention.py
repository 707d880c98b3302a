"""Causal softmax attention: parallel, decoding, two passes, one pass (chapters 1 and 2)."""

import functools
from collections.abc import Callable

import torch
from einops import einsum
from torch import Tensor

from gla_ref import _contract as contract
from gla_ref import softmax
from gla_ref.mechanisms import MECHANISMS

__all__ = ["flash", "parallel", "recurrent", "two_pass"]

KIND = MECHANISMS["softmax_attention"]
TOKENS = KIND.required
# the cache as messages call it: its keys and its values
CACHE = tuple(x._replace(name=f"initial_state[{i}]") for i, x in enumerate(KIND.states))


def _form(body: Callable) -> Callable:
    """Make a form keep the contract: its body is bare mathematics over S = T0 + T keys.

    It gets q `[B, T, H, K]` and, behind the cache, k `[B, S, H, K]` and v `[B, S, H, V]`, all in
    the compute precision, `scale` as a number and its own options; it returns o `[B, T, H, V]`.
    """
    signature = contract.signature_of_form(body, initial_state=None, cu_seqlens=None)

    @functools.wraps(body)
    def wrapper(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        q, k, v = (options.pop(name) for name in TOKENS)
        cache = options.pop("initial_state")
        if cache is not None and (not isinstance(cache, tuple | list) or len(cache) != 2):
            raise TypeError(f"initial_state: expected a pair (k, v) or None, got {type(cache).__name__}")
        past = {} if cache is None else {x.name: y for x, y in zip(CACHE, cache, strict=True)}
        sizes = contract.check_tensors({"q": q, "k": k, "v": v, **past}, (*KIND.arguments, *CACHE))
        for name, x in past.items():
            if x.dtype != k.dtype:
                raise TypeError(f"{name}: expected dtype {k.dtype} as for k, got {x.dtype}")
        for name in ("block_q", "block_k"):
            contract.check_chunk(**{name: options.get(name, 1)})
        options["scale"] = contract.check_scale(options["scale"], sizes["K"])
        ends = contract.check_cu_seqlens(options.pop("cu_seqlens"), sizes["B"], sizes["T"])
        if past:
            if ends:
                raise ValueError("initial_state: expected None beside cu_seqlens, got a cache")
            k, v = (torch.cat(pair, 1) for pair in zip(cache, (k, v), strict=True))
        wide = {n: x.to(contract.compute_dtype(x)) for n, x in zip(TOKENS, (q, k, v), strict=True)}
        with contract.outside_autocast(q):
            (o,), _ = contract.per_sequence(lambda **x: ((body(**x, **options),), ()), ends, wide, {})
        return o.to(v.dtype), (k, v)

    wrapper.__signature__ = signature
    return wrapper


def _scores(q: Tensor, k: Tensor, scale: float, rows=slice(None), cols=slice(None)) -> Tensor:
    """A tile `[B, rows, H, cols]` of scale Q K^T; -inf where key j is later than query T0 + i."""
    T, S = q.shape[1], k.shape[1]
    i, j = torch.arange(S - T, S)[rows].to(q.device), torch.arange(S)[cols].to(q.device)
    x = scale * einsum(q[:, rows], k[:, cols], "b i h k, b j h k -> b i h j")
    return x.masked_fill(j > i[:, None, None], -torch.inf)


@_form
def parallel(q, k, v, *, scale):
    """Whole sequence at once: O = softmax(scale Q K^T + mask) V (Vaswani et al. 2017, equation 1).

    Args:
        q: queries `[B, T, H, K]`, T >= 1; float64, 32, 16 or bfloat16, as k and v.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        scale: factor on the scores, K^-0.5 when None.
        initial_state: cache of earlier tokens `(k_cache [B, T0, H, K], v_cache [B, T0, H, V])` in
            the dtype of k, which every query sees. None together with `cu_seqlens`.
        cu_seqlens: `[N_seq + 1]` boundaries of packed sequences (B = 1), int32 or int64; a
            sequence attends to itself only.

    Returns:
        o `[B, T, H, V]` in the dtype of v (computed in at least float32), and the cache
        `(k [B, T0 + T, H, K], v [B, T0 + T, H, V])`.

    Raises:
        TypeError: the kind or dtype of an argument is wrong.
        ValueError: a shape, a device, a block size or the content of `cu_seqlens` is wrong.
    """
    return einsum(softmax.safe(_scores(q, k, scale)), v, "b i h j, b j h v -> b i h v")


@_form
def recurrent(q, k, v, *, scale):
    """Decoding: token by token, each against the cache up to itself; no mask, there is no future.

    Yang et al. 2024, section 2.1. Arguments, result and errors are those of `parallel`.
    """
    T, S = q.shape[1], k.shape[1]
    o = []
    for t in range(T):
        k_cache, v_cache = k[:, : S - T + t + 1], v[:, : S - T + t + 1]
        x = scale * einsum(q[:, t], k_cache, "b h k, b j h k -> b h j")
        o.append(einsum(softmax.safe(x), v_cache, "b h j, b j h v -> b h v"))
    return torch.stack(o, 1)


@_form
def two_pass(q, k, v, *, scale):
    """Key by key, no row of weights stored: first the statistics, then the weighted sum of values.

    Milakov and Gimelshein 2018, algorithm 3, with the sum over values in its second pass; scores
    are computed twice. Arguments, result and errors are those of `parallel`.
    """
    m = torch.full_like(q[..., 0], -torch.inf)
    d = torch.zeros_like(m)
    for j in range(k.shape[1]):  # pass 1
        x = _scores(q, k, scale, cols=slice(j, j + 1))[..., 0]
        m, d = softmax.merge((m, d), (x, torch.ones_like(x)))
    o = 0
    for j in range(k.shape[1]):  # pass 2
        x = _scores(q, k, scale, cols=slice(j, j + 1))
        o = o + (x - m[..., None]).exp() / d[..., None] * v[:, None, j]
    return o


@_form
def flash(q, k, v, *, scale, block_q=64, block_k=64):
    """One pass over tiles of keys and values, with running m, d and o for each tile of queries.

    Dao et al. 2022, algorithm 1, with queries in the outer loop (Dao 2023). Arguments, result and
    errors are those of `parallel`, and `block_q` queries, `block_k` keys a tile, both at least 1.
    """
    T, S = q.shape[1], k.shape[1]
    tiles = []
    for i in range(0, T, block_q):
        rows = slice(i, min(i + block_q, T))
        m = torch.full_like(q[:, rows, :, 0], -torch.inf)
        d, o = torch.zeros_like(m), 0
        for j in range(0, S - T + rows.stop, block_k):  # tiles further right are all masked
            cols = slice(j, j + block_k)
            x = _scores(q, k, scale, rows, cols)
            m_new = torch.maximum(m, x.amax(-1))
            p = (x - m_new[..., None]).exp()
            kept = d * (m - m_new).exp()
            d = kept + p.sum(-1)
            pv = einsum(p, v[:, cols], "b i h j, b j h v -> b i h v")
            m, o = m_new, (kept[..., None] * o + pv) / d[..., None]
        tiles.append(o)
    return torch.cat(tiles, 1)
