"""The Gated Linear Attention layer: tokens to q, k, v and gates, and the heads' outputs back to tokens (chapter 17).

For the input x_t of width d, and in each head,

    q, k, v = x_t W_Q, x_t W_K, x_t W_V        alpha_t = sigmoid(x_t W_1 W_2 + b)^(1 / tau)
    S_t  = diag(alpha_t) S_{t-1} + k_t^T v_t,   o_t = q_t S_t / sqrt(K)                          (8)
    o'_t = the heads' norm(o_t), side by side                                                   (9)
    r_t  = swish(x_t W_R)                                                                       (10)
    y_t  = (r_t * o'_t) W_O                                                                     (11)

(GLA paper, section 4.4, equations 8 to 11.) With H K = d / 2 and H V = d the matrices W_Q, W_K, W_V, W_R, W_O have
4 d^2 parameters, as many as softmax attention; the gate, of rank 16, has 16 (d + d / 2) + d / 2 more. In the paper W_R
has a bias and the heads' norm is LayerNorm; in the published checkpoints W_R has no bias and the norm is RMSNorm.

Modules have the names of those checkpoints, which flash-linear-attention makes: the two libraries share state dicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from ._forms import attend, owners

if TYPE_CHECKING:
    from ..over_ranks.pieces import Pieces
    from .config import Config

__all__ = ["GatedLinearAttention", "GatedOutput", "LayerState", "Mixer", "START", "ShortConvolution"]


class LayerState(NamedTuple):
    """A mixer's memory of earlier tokens: its mechanism's state, and the inputs that its convolutions still see."""

    S: Tensor | tuple | None = None
    conv: tuple[Tensor, Tensor, Tensor] | None = None  # the last inputs for q, k and v, [N, W - 1, D]


START = LayerState()  # no tokens before


class ShortConvolution(nn.Conv1d):
    """silu of a causal convolution of each channel over W tokens; its state is the W - 1 inputs before."""

    def __init__(self, D: int, W: int):
        super().__init__(D, D, W, groups=D, bias=False)

    def forward(self, x: Tensor, past: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y and the next past, shaped as x `[B, T, D]` and the past `[N, W - 1, D]` (None: zeros)."""
        (B, T, D), W = x.shape, self.kernel_size[0]
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        past = x.new_zeros(N, W - 1, D) if past is None else past.to(x.dtype)
        if cu_seqlens is None:
            x = torch.cat([past, x], 1)
            return F.silu(self.convolve(x)), x[:, T:].clone()  # a view would keep all of x in memory
        # put each sequence's own past before it, which moves sequence n by n (W - 1) places
        i = torch.arange(W - 1, device=x.device)
        tokens = torch.arange(T, device=x.device) + (owners(cu_seqlens, T) + 1) * (W - 1)
        edges = cu_seqlens[:, None] + torch.arange(N + 1, device=x.device)[:, None] * (W - 1) + i  # [N + 1, W - 1]
        spread = x.new_zeros(T + N * (W - 1), D).index_copy(0, tokens, x[0])
        spread = spread.index_copy(0, edges[:-1].flatten(), past.flatten(0, 1))
        y = self.convolve(spread[None])[:, tokens - (W - 1)]
        return F.silu(y), spread[edges[1:] - (W - 1)]

    def convolve(self, x: Tensor) -> Tensor:
        """`[B, W - 1 + T, D]` to `[B, T, D]`.

        torch.compile fuses W products with their neighbours, and cannot fuse a convolution. That is a quarter of a
        small model's step on an H100; without torch.compile a convolution is faster (lab/experiments.md).
        """
        if not torch.compiler.is_compiling():
            return super().forward(x.mT).mT
        W, w = self.kernel_size[0], self.weight.to(x.dtype)[:, 0]  # [D, W]
        T = x.shape[1] - (W - 1)
        return sum(x[:, i : i + T] * w[:, i] for i in range(W))


class Mixer(nn.Module):
    """The base of all mixers: projections to q, k, v, each optionally through a short convolution, and one back.

    Called as `y, state = mixer(x, state, cu_seqlens, pieces)`: x and y `[B, T, d]`; a state is a
    :class:`LayerState`, by default that of nothing before; `cu_seqlens` is as in all forms. With `pieces` x is one
    rank's piece of sequences that start on the first rank (:class:`gla_ref.over_ranks.pieces.Pieces`).
    """

    layer: int | None = None  # its place in a model, for messages

    def __init__(self, config: Config, key_size: int, value_size: int):
        super().__init__()
        d, self.heads = config.hidden_size, config.num_heads
        self.q_proj = nn.Linear(d, key_size, bias=False)
        self.k_proj = nn.Linear(d, key_size, bias=False)
        self.v_proj = nn.Linear(d, value_size, bias=False)
        self.o_proj = nn.Linear(value_size, d, bias=False)
        self.short_conv = config.use_short_conv
        if self.short_conv:
            self.q_conv1d, self.k_conv1d = (ShortConvolution(key_size, config.conv_size) for _ in "qk")
            self.v_conv1d = ShortConvolution(value_size, config.conv_size)

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, H D]` to heads `[B, T, H, D]`."""
        return rearrange(x, "b t (h d) -> b t h d", h=self.heads)

    def project(
        self, x: Tensor, past: tuple | None, cu_seqlens: Tensor | None, pieces: Pieces | None = None
    ) -> tuple[list[Tensor], tuple | None]:
        """Return [q, k, v] in heads, and the convolutions' states."""
        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.short_conv:
            if pieces is not None:
                past = pieces.before(qkv, self.q_conv1d.kernel_size[0] - 1, cu_seqlens)
                cu_seqlens = pieces.own(cu_seqlens)
            convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
            done = [f(y, p, cu_seqlens) for f, y, p in zip(convs, qkv, past or (None,) * 3, strict=True)]
            qkv, past = zip(*done, strict=True)
        return [self.split(y) for y in qkv], past


class GatedOutput(Mixer):
    """A mixer whose heads are normalised and gated: (9) to (11) around any linear mechanism.

    A subclass says which mechanism, and has `gates(x)`, its log gates from the layer's input, or its own `inputs`.
    """

    mechanism: str  # a key of FORMS

    def __init__(self, config: Config):
        super().__init__(config, config.key_size, config.value_size)
        V = config.value_size // self.heads
        norm = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[config.head_norm]
        self.g_proj = nn.Linear(config.hidden_size, config.value_size, bias=False)  # W_R
        self.g_norm_swish_gate = norm(V, eps=config.norm_eps)

    def inputs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The tensors for the mechanism, in the order of its forms."""
        return q, k, v, self.gates(x)

    def forward(
        self, x: Tensor, state: LayerState = START, cu_seqlens: Tensor | None = None, pieces: Pieces | None = None
    ) -> tuple[Tensor, LayerState]:
        """Mix tokens, see :class:`Mixer`."""
        (q, k, v), conv = self.project(x, state.conv, cu_seqlens, pieces)
        tensors = self.inputs(x, q, k, v)
        if v.dtype == torch.float16 and not v.is_cuda:  # references compute in float32, where a sum over a text fits
            tensors = tuple(y.float() for y in tensors)
        o, S = attend(self.mechanism, *tensors, initial_state=state.S, cu_seqlens=cu_seqlens, pieces=pieces)  # (8)
        norm = self.g_norm_swish_gate
        if o.dtype != v.dtype:  # into float16's range by a factor, which does not change a head's norm
            o = o / (o.detach().abs().amax(-1, keepdim=True) / torch.finfo(v.dtype).max).clamp_min(1)
        o = norm(o.to(norm.weight.dtype)).to(v.dtype)  # (9), in the precision of its weights, under autocast too
        r = F.silu(self.split(self.g_proj(x)))  # (10)
        return self.o_proj(rearrange(r * o, "b t h d -> b t (h d)")), LayerState(S, conv)  # (11)


class GatedLinearAttention(GatedOutput):
    """A gate for every key channel, from x through a bottleneck: (8) to (11)."""

    mechanism = "gla"

    def __init__(self, config: Config):
        super().__init__(config)
        d, self.tau = config.hidden_size, config.tau
        self.gk_proj = nn.Sequential(
            nn.Linear(d, config.gate_rank, bias=False), nn.Linear(config.gate_rank, config.key_size)
        )

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H, K]`."""
        return self.split(F.logsigmoid(self.gk_proj(x)) / self.tau)
