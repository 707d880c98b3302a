"""Mixers of one interface: softmax attention and seven linear ones, which differ in their gates (chapters 17 and 18).

All mixers have the projections of :mod:`gla_ref.models.layer`, and all except softmax its output gate and norm, so a
comparison shows the state's update alone. A mixer has the gate of the model that it is named after, in the published
parametrisation, but no other part of that model: not RetNet's rotation of q and k, not Mamba-2's skip connection or its
keys shared by all heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._contract import compute_dtype
from ..gates import softplus_gate
from ._forms import attend, owners, places
from .layer import START, GatedLinearAttention, GatedOutput, LayerState, Mixer

if TYPE_CHECKING:
    from ..over_ranks.pieces import Pieces
    from .config import Config

__all__ = [
    "MIXERS",
    "Cache",
    "GatedDeltaRule",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba2",
    "RetNet",
    "ScalarGates",
    "SoftmaxAttention",
    "rotate",
]


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(compute_dtype(x))


class LinearAttention(GatedOutput):
    """No gate, and no normaliser except the norm of each head."""

    mechanism = "linear_attention"

    def inputs(self, x, q, k, v):
        """q, k, v."""
        return q, k, v


class RetNet(GatedOutput):
    """A constant gate for each head: 1 - 2^(-5 - h) in head h (RetNet paper, eq. 8)."""

    mechanism = "simple_gla"

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H]`."""
        h = torch.arange(self.heads, device=x.device, dtype=torch.float32)
        return torch.log1p(-(2.0 ** (-5 - h))).expand(*x.shape[:2], -1)


class ScalarGates(GatedOutput):
    """GLA with one gate for each head: logsigmoid(x W + b) / tau."""

    mechanism = "simple_gla"

    def __init__(self, config: Config):
        super().__init__(config)
        self.gk_proj, self.tau = nn.Linear(config.hidden_size, self.heads), config.tau

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H]`."""
        return F.logsigmoid(self.gk_proj(x)) / self.tau


class StepSize(nn.Module):
    """Mamba-2's step size Delta = softplus(x W + b) and gate g = -e^A Delta, one of each a head, in float32.

    At the start e^A is between 1 and `most` and Delta, at x = 0, between 0.001 and 0.1 (Mamba-2's published values).
    """

    def __init__(self, config: Config, proj: nn.Module | None = None, channels: int = 1, most: float = 16.0):
        super().__init__()
        H, self.most = config.num_heads, most
        self.proj = proj or nn.Linear(config.hidden_size, H, bias=False)
        self.bias, self.A_log = (nn.Parameter(torch.empty(n)) for n in (H * channels, H))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the biases and e^A anew."""
        delta = torch.empty_like(self.bias).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # softplus(bias) = delta
        self.A_log.uniform_(1, self.most).log_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(Delta, g) of x `[B, T, d]`, both `[B, T, H]`."""
        delta = F.softplus(wide(self.proj(x)) + self.bias)
        return delta, -wide(self.A_log).exp() * delta


class Mamba2(GatedOutput):
    """A gate for each head, tied to the write strength: S <- e^(-e^A Delta) S + Delta k^T v (Mamba-2 paper)."""

    mechanism = "simple_gla"

    def __init__(self, config: Config):
        super().__init__(config)
        self.dt = StepSize(config)

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H]`."""
        return self.dt(x)[1]

    def inputs(self, x, q, k, v):
        """q, k, Delta v and g `[B, T, H]`."""
        delta, g = self.dt(x)
        return q, k, delta[..., None].to(v.dtype) * v, g


class GatedDeltaRule(GatedOutput):
    """Mamba-2's gate, then a write that corrects the value found under the key instead of adding to it.

    Queries and keys have length 1 (Gated DeltaNet paper, section 3).
    """

    mechanism = "gated_delta_rule"

    def __init__(self, config: Config):
        super().__init__(config)
        self.dt, self.b_proj = self.steps(config), nn.Linear(config.hidden_size, self.heads, bias=False)

    def steps(self, config: Config) -> nn.Module:
        """The module that the gates are made by."""
        return StepSize(config)

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H]`."""
        return self.dt(x)[1]

    def inputs(self, x, q, k, v):
        """q, k, v, gates and beta `[B, T, H]`."""
        q, k = (F.normalize(wide(y), dim=-1).to(v.dtype) for y in (q, k))
        return q, k, v, self.gates(x), self.b_proj(x).sigmoid()


class KimiDeltaAttention(GatedDeltaRule):
    """A step size for every key channel, from x through a bottleneck: the gated delta rule with GLA's kind of gate.

    With `Config.lower_bound` the gates are that number times a sigmoid. Then e^A is 1 at the start, as in fla 0.6.0.
    """

    mechanism = "kda"

    def steps(self, config: Config) -> nn.Module:
        """A bottleneck to all channels, their biases, and a rate e^A of each head."""
        d, r, self.lower_bound = config.hidden_size, config.gate_rank, config.lower_bound
        proj = nn.Sequential(nn.Linear(d, r, bias=False), nn.Linear(r, config.key_size, bias=False))
        most = 16.0 if self.lower_bound is None else 1.0
        return StepSize(config, proj, config.key_size // self.heads, most)

    def gates(self, x: Tensor) -> Tensor:
        """g `[B, T, H, K]`."""
        dt = self.dt
        return softplus_gate(self.split(dt.proj(x)), dt.A_log, dt.bias, lower_bound=self.lower_bound)


def rotate(x: Tensor, place: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions: x `[B, T, H, D]` with channels i and i + D/2 turned by place / base^(2 i / D) (RoFormer).

    `place` is `[T]`; whole turns are dropped in float64, so late tokens' angles are as exact as early tokens', and
    sines, which torch.compile computes anew for every element, are cheap.
    """
    half = x.shape[-1] // 2
    a, b = wide(x).chunk(2, -1)
    speed = torch.exp2(torch.arange(half, device=x.device, dtype=torch.float64) * (-math.log2(base) / half))
    turns = place[:, None, None] * (speed / math.tau)
    angle = (math.tau * (turns - turns.round())).to(a)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Cache(NamedTuple):
    """Keys and values of all tokens so far: `[N, S, H, D]`, or packed `[1, S, H, D]` with boundaries."""

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None


class SoftmaxAttention(Mixer):
    """Softmax attention with rotary positions, as in LLaMA; `Config.qk_norm` normalises queries and keys before them.

    The mixer of a Transformer++. Its state, a cache, grows with every token.
    """

    def __init__(self, config: Config):
        super().__init__(config, config.hidden_size, config.hidden_size)
        self.normalised = config.qk_norm
        if self.normalised:
            D = config.hidden_size // self.heads
            self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=config.norm_eps) for _ in "qk")

    def forward(
        self, x: Tensor, state: LayerState = START, cu_seqlens: Tensor | None = None, pieces: Pieces | None = None
    ) -> tuple[Tensor, LayerState]:
        """Mix tokens, see :class:`gla_ref.models.layer.Mixer`; `pieces` are refused.

        Raises:
            ValueError: `pieces` are given: tokens would need the keys on other ranks, and no state replaces these keys.
        """
        if pieces is not None:
            raise ValueError(
                "mixer: expected one with a state, whose sequences can be split over ranks "
                f"({', '.join(name for name in MIXERS if name != 'softmax')}), got 'softmax' in layer {self.layer}"
            )
        (q, k, v), conv = self.project(x, state.conv, cu_seqlens)
        if self.normalised:  # in the precision of the norms' weights, under autocast too
            norms = (self.q_norm, q), (self.k_norm, k)
            q, k = (norm(y.to(norm.weight.dtype)).to(v.dtype) for norm, y in norms)
        cache: Cache | None = state.S
        if cache is not None and (cache.cu_seqlens is not None or cu_seqlens is not None):
            o, cache = self.ragged(q, k, v, cache, cu_seqlens)
        else:
            T, before = x.shape[1], 0 if cache is None else cache.k.shape[1]
            t = torch.arange(T, device=x.device) + before if cu_seqlens is None else places(cu_seqlens, T)
            q, k, past = rotate(q, t), rotate(k, t), None if cache is None else (cache.k, cache.v)
            if T == 1 and past:  # one query sees all keys: PyTorch shares these out among a GPU's multiprocessors
                k, v = (torch.cat(pair, 1) for pair in zip(past, (k, v), strict=True))
                o = dot_product_attention(q, k, v)
            else:
                o, (k, v) = attend("softmax_attention", q, k, v, initial_state=past, cu_seqlens=cu_seqlens)
            cache = Cache(k, v, cu_seqlens)
        return self.o_proj(o.flatten(2)), LayerState(cache, conv)

    @staticmethod
    def ragged(q, k, v, cache: Cache, cu_seqlens: Tensor | None) -> tuple[Tensor, Cache]:
        """Attend in sequences of different lengths: new tokens join the packed cache, and a mask keeps sequences apart.

        The scores are those of all new tokens with the whole cache, which suits decoding: there, reading the cache
        takes the time.
        """
        shape = v.shape
        old, new = (packed(*x) for x in ((cache.k, cache.v, cache.cu_seqlens), (q, k, v, cu_seqlens)))
        cu = old[-1] + new[-1]
        owner = torch.cat([owners(x[-1], x[0].shape[1]) for x in (old, new)])
        order = owner.argsort(stable=True)
        owner, place = owner[order], places(cu, len(order))
        mine = order.argsort()[old[0].shape[1] :]  # the places of the new tokens
        q, k = (rotate(y, place[mine]) for y in new[:2])
        k, v = (torch.cat([a, b], 1)[:, order] for a, b in ((old[0], k), (old[1], new[2])))
        seen = (owner[mine, None] == owner) & (place[mine, None] >= place)
        return dot_product_attention(q, k, v, seen).reshape(shape), Cache(k, v, cu)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """PyTorch's softmax attention of q `[B, T, H, D]` with the keys that a mask `[T, S]` leaves, None: with all."""
    heads_first = (y.transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=seen).transpose(1, 2)


def packed(*tensors_and_cu: Tensor | None) -> tuple[Tensor, ...]:
    """Return tensors `[B, T, ...]` as one row `[1, B T, ...]`, and boundaries; a packed batch stays as it is."""
    *tensors, cu = tensors_and_cu
    if cu is not None:
        return *tensors, cu
    B, T = tensors[0].shape[:2]
    cu = torch.arange(B + 1, device=tensors[0].device) * T
    return *(x.flatten(0, 1)[None] for x in tensors), cu


#: every mixer by the name that `Config.mixer` gives it
#:
#: :meta hide-value:
MIXERS = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "retnet": RetNet,
    "scalar": ScalarGates,
    "mamba2": Mamba2,
    "gla": GatedLinearAttention,
    "gated_delta": GatedDeltaRule,
    "kda": KimiDeltaAttention,
}
