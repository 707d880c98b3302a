"""The original GLA implementation, four kernels and a sum, in PyTorch: its steps and their cost (chapter 14).

    b = fwd_decay_cumsum(g)                    running sums in each chunk, base 2: gates.chunk_cumsum
    q_g, k_g = prepare_qg_kg(q, k, b)          q decayed from the chunk's start, k to its end
    o, S = fused_chunk_gla_fwd(q_g, k_g, v, b) what tokens read from the state before their chunk
    A = fwd_inner_chunk(q, k, b)               scores inside the chunks, in log space
    o = combine(o, A, v)                       o + A v

Kept as it is, with its weakness: it takes differences of running sums, so that a strong gate costs the later
decays of its chunk their low bits, and -inf makes NaN. :mod:`gla_ref.gla` is right for every gate. The kernels are in
:mod:`gla_ref.kernels.exhibits.gla_chunk_fuse`. `gla_ref.gla_chunk_fuse` is the public name; it needs no Triton.
"""

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn import functional as F

from ...gates import chunk_cumsum

__all__ = ["Step", "chunk_fuse", "combine", "fused_chunk_gla_fwd", "fwd_inner_chunk", "prepare_qg_kg", "steps", "tile"]


def _chunks(x: Tensor, C: int) -> Tensor:
    """`[B, T, H, D]` to `[B, H, N, C, D]`, zeros after the end."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return rearrange(x, "b (n c) h d -> b h n c d", c=C)


def prepare_qg_kg(q: Tensor, k: Tensor, b: Tensor, scale: float, C: int) -> tuple[Tensor, Tensor]:
    """(q_g, k_g): q times the decay since its chunk's start, k times the decay until its chunk's end."""
    last_decay = torch.cat([b_n[:, -1:].expand_as(b_n) for b_n in b.split(C, 1)], 1)
    return scale * q * b.exp2(), k * (last_decay - b).exp2()


def fused_chunk_gla_fwd(q_g: Tensor, k_g: Tensor, v: Tensor, b: Tensor, S: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """(o, S): each chunk reads the state before it, then decays it and adds its own writes."""
    o = []
    for q_n, k_n, v_n, b_n in zip(*(x.split(C, 1) for x in (q_g, k_g, v, b)), strict=True):
        o.append(einsum(q_n, S, "b c h k, b h k v -> b c h v"))
        S = b_n[:, -1, :, :, None].exp2() * S + einsum(k_n, v_n, "b c h k, b c h v -> b h k v")
    return torch.cat(o, 1), S


def fwd_inner_chunk(q: Tensor, k: Tensor, b: Tensor, scale: float, C: int) -> Tensor:
    """A `[B, H, N, C, C]`: sum over K of q_i k_j exp2(b_i - b_j) for j <= i, else 0."""
    q, k, b = (_chunks(x, C) for x in (scale * q, k, b))
    mask = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()[..., None]
    b = torch.where(mask, b[..., :, None, :] - b[..., None, :, :], -torch.inf)
    return (q[..., :, None, :] * k[..., None, :, :] * b.exp2()).sum(-1)


def combine(o: Tensor, A: Tensor, v: Tensor) -> Tensor:
    """o `[B, T, H, V]` in the dtype of v, from the parts of all NK blocks of channels.

    Args:
        o: `[NK, B, T, H, V]`, what each block of channels read from its rows of the state.
        A: `[NK, B, H, N, C, C]`, its share of the scores.
        v: `[B, T, H, V]`.
    """
    A = A.sum(0).to(v.dtype)
    inner = rearrange(A @ _chunks(v, A.shape[-1]), "b h n c v -> b (n c) h v")
    return o.sum(0).add_(inner[:, : v.shape[1]]).to(v.dtype)


def chunk_fuse(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, S: Tensor, C: int = 16
) -> tuple[Tensor, Tensor]:
    """(o, S): all five steps, in the precision of the inputs; g `[B, T, H, K]` and S `[B, H, K, V]`."""
    b = chunk_cumsum(g, C, base2=True)
    q_g, k_g = prepare_qg_kg(q, k, b, scale, C)
    o, S = fused_chunk_gla_fwd(q_g, k_g, v, b, S, C)
    A = fwd_inner_chunk(q, k, b, scale, C)
    return combine(o[None], A[None], v), S


@dataclass(frozen=True)
class Step:
    """One step: its launch, and the loads, stores and FLOPs of all its programs together."""

    name: str
    grid: tuple[int, ...]  # () for PyTorch's operators
    bytes: int  # each tile as often as programs ask for it
    memory: int  # each element once a step, as if caches held it for those who ask again
    matmul_flops: int
    elementwise_flops: int


def tile(size: int) -> int:
    """BK or BV: the block of channels that a program takes, at most 64."""
    return min(64, max(16, 1 << (size - 1).bit_length()))


def steps(*, B: int, T: int, H: int, K: int, V: int, C: int = 16, itemsize: int = 2) -> list[Step]:
    """The five steps of one call.

    Bytes have q, k, v, g at `itemsize`, running sums, scores and states in float32; `combine` is charged for reading
    its arguments and writing o once, the least it could do. FLOPs by the rules of :func:`gla_ref.book.costs.cost`.
    """
    N, NK, NV, heads = -(-T // C), -(-K // tile(K)), -(-V // tile(V)), B * H
    e, chunked = itemsize, (NK, N, heads)
    sums, prepared = (e + 4) * T * K, (4 * e + 4) * T * K
    walk = 2 * e * T * K * NV + 4 * N * K * NV + (e + 4) * T * V * NK + 8 * K * V
    walk_once = 2 * e * T * K + 4 * N * K + (e + 4 * NK) * T * V + 8 * K * V
    scores, again = (2 * e + 4) * T * K + 4 * NK * N * C * C, 4 * T * K  # b, for all keys and for one query at a time
    summed = 4 * NK * (N * C * C + T * V) + 2 * e * T * V
    rows = [  # of one head
        ("fwd_decay_cumsum", chunked, sums, sums, 0, 2 * T * K),
        ("prepare_qg_kg", chunked, prepared + 4 * N * K, prepared, 0, 6 * T * K),
        ("fused_chunk_gla_fwd_kernel", (NK, NV, heads), walk, walk_once, 4 * N * C * K * V, N * (2 * K * V + K * NV)),
        ("fwd_inner_chunk", chunked, scores + again, scores, 0, 5 * N * C * C * K + N * C * K),
        ("combine", (), summed, summed, 2 * N * C * C * V, NK * N * C * C + (NK + 1) * T * V),
    ]
    return [Step(name, grid, *(heads * x for x in counted)) for name, grid, *counted in rows]
