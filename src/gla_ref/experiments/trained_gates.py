"""Trained gates, looked at: how fast channels forget, and which chunks GLA's kernels would call strong (chapter 19).

GLA's kernels treat a chunk as strong if one of its channels decays by more than LIMIT nats in it; then they compute it
level by level. Whether training makes such chunks is a question to trained models, so every record of a run has the
answer. It needs no GPU: gates are a function of a layer's input.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from ..models import LanguageModel

__all__ = ["CHUNK", "STRONG", "gates_of"]

CHUNK, STRONG = 64, -80.0  # as in the bfloat16 kernels: a chunk where a channel's log gates sum to less is strong
SHARES = 0.05, 0.25, 0.5, 0.75, 0.95  # shares of channels at or below a quantile
LEAST = 1e-9  # nats that a token counts at least: a channel without decay has no half-life


@torch.no_grad()
def gates_of(model: LanguageModel, tokens: Tensor) -> list[dict]:
    """The work of a model's gates on tokens `[B, T]`, layer by layer; empty for mixers without gates.

    Returns:
        one dictionary for each layer:
        "half-life": tokens in which a channel forgets half, by its mean log gate; quantiles over channels;
        "strong chunks": the share of chunks, over heads, in which the strongest channel decays beyond STRONG;
        "chunks": how many were looked at.
    """
    layers, handles = [], []

    def look(layer, args):
        g = layer.gates(args[0]).float()
        g = g if g.ndim == 4 else g[..., None]  # one gate a head
        C = min(CHUNK, g.shape[1])
        chunks = rearrange(g[:, : g.shape[1] // C * C], "b (n c) h k -> b n c h k", c=C)
        decay = chunks.sum(2).amin(-1)  # [b, n, h]
        strong = (decay < STRONG).float().mean().item()
        layers.append({"half-life": _half_lives(g.mean((0, 1))), "strong chunks": strong, "chunks": decay.numel()})

    for block in model.model.layers:
        if hasattr(block.attn, "gates"):
            handles.append(block.attn.register_forward_pre_hook(look))
    try:
        if handles:
            model.model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def _half_lives(g: Tensor) -> dict[str, float]:
    """Quantiles over all elements, by sorting: torch.quantile refuses more than 2^24; infinity is not JSON."""
    x = (math.log(2) / -g.clamp(max=-LEAST)).flatten().clamp(max=1 / LEAST).sort().values
    return {str(share): x[round(share * (len(x) - 1))].item() for share in SHARES}
