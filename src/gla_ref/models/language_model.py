"""A language model: blocks of a mixer and an MLP, logits, loss, and text that goes on (chapter 17).

    x <- x + mixer(norm(x))         x <- x + W_down (silu(x' W_gate) * x' W_up),  x' = norm(x)

with RMSNorm before each, as in LLaMA; the GLA paper's Transformer is this with GLA as the mixer (section 4.4). Modules
are called as in flash-linear-attention's GLAForCausalLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._contract import check_cu_seqlens, has_values
from .config import Config
from .layer import START, LayerState
from .mixers import MIXERS, Cache, wide

if TYPE_CHECKING:
    from ..over_ranks.pieces import Pieces

__all__ = ["MLP", "Block", "LanguageModel", "Transformer", "detach", "next_tokens"]

State = list[LayerState]  # a model's state: a state for each block
IGNORED = -100  # a target that does not count, as in torch.nn.functional.cross_entropy
SMALLEST = 1e-38  # positive temperature; below it, float32 has none
LOSS_TOKENS = 8192  # the loss makes logits of so many tokens at a time: 1 GB in float32 for a vocabulary of 32,000


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: Config):
        super().__init__()
        d, m = config.hidden_size, config.mlp_size
        self.gate_proj = nn.Linear(d, m, bias=False)
        self.up_proj = nn.Linear(d, m, bias=False)
        self.down_proj = nn.Linear(m, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, d]` to `[B, T, d]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One mixer and one MLP; each reads the residual stream through a norm and adds its result to the stream."""

    def __init__(self, config: Config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = MIXERS[config.mixer](config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, state: LayerState, cu_seqlens: Tensor | None, pieces: Pieces | None = None
    ) -> tuple[Tensor, LayerState]:
        """`[B, T, d]` to `[B, T, d]`, and the mixer's state."""
        y, state = self.attn(lowered(self.attn_norm(x)), state, cu_seqlens, pieces)
        x = x + y
        return x + self.mlp(lowered(self.mlp_norm(x))), state


def lowered(x: Tensor) -> Tensor:
    """Convert float32 to autocast's dtype where autocast is on: else each product makes and keeps a copy of its own."""
    device = x.device.type
    if x.dtype != torch.float32 or x.is_meta or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


class Transformer(nn.Module):
    """From tokens to normalised hidden states.

    With `gradient_checkpointing = True` the forward pass saves only tensors between blocks, and the backward pass runs
    each block again.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(layer) for layer in config.layers())
        for i, block in enumerate(self.layers):
            block.attn.layer = i
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False

    def forward(
        self, tokens: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, pieces: Pieces | None = None
    ) -> tuple[Tensor, State]:
        """`[B, T]` to `[B, T, d]`, and the state after the last token of each sequence.

        `pieces` has the places of the same sequences' other tokens (:class:`gla_ref.over_ranks.pieces.Pieces`).
        """
        x, after = self.embeddings(tokens), []
        for layer, before in zip(self.layers, state or [START] * len(self.layers), strict=True):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, S = checkpoint(layer, x, before, cu_seqlens, pieces, use_reentrant=False)
            else:
                x, S = layer(x, before, cu_seqlens, pieces)
            after.append(S)
        return self.norm(x), after


class LanguageModel(nn.Module):
    """A language model: logits of the next token, with any mixer, or one for each layer.

    Args:
        config: sizes and mixers.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._start()

    def reset_parameters(self) -> None:
        """Start every parameter anew: with the same seed, as when the model was made.

        So a model made on meta starts like another: `model.to_empty(device="cuda")`, then this.
        """
        self.apply(lambda module: module is not self and getattr(module, "reset_parameters", lambda: None)())
        self._start()

    def _start(self) -> None:
        """Draw the weights that do not keep their own module's start."""
        self.apply(self._draw)
        if self.config.output_range is not None:
            for block in self.model.layers:
                nn.init.normal_(block.attn.o_proj.weight, std=self.config.output_range)

    def _draw(self, module: nn.Module) -> None:
        """Draw weights from a normal distribution and set biases to 0, so every gate of GLA begins near 2^(-1 / tau).

        Convolutions have a start of their own.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Conv1d) and self.config.conv_range is not None:
            nn.init.normal_(module.weight, std=self.config.conv_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, tokens: Tensor, *, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the logits of the token after each token.

        Args:
            tokens: int64 or int32 `[B, T]`, T >= 1.
            state: the state that an earlier call returned for the tokens before; the call does not change it, so
                several calls may go on from one state.
            cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed documents (B = 1), which do not see each other;
                then a state has N_seq sequences.

        Returns:
            logits `[B, T, vocab_size]`, and the state after the last tokens.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        self._check(tokens, state, cu_seqlens)
        x, state = self.model(tokens, state, cu_seqlens)
        return self.lm_head(x), state

    def _check(self, tokens: Tensor, state: State | None, cu_seqlens: Tensor | None) -> None:
        """Check that tokens, boundaries and state fit each other; on a GPU a bad index would end the process.

        The check of the boundaries' values waits for a GPU.
        """
        check_tokens("tokens", tokens)
        check_range("tokens", tokens, self.config.vocab_size)
        B, T = tokens.shape
        check_cu_seqlens(cu_seqlens, B, T, values=cu_seqlens is None or has_values(cu_seqlens))
        if cu_seqlens is not None and cu_seqlens.device != tokens.device:
            raise ValueError(f"cu_seqlens: expected device {tokens.device} as for tokens, got {cu_seqlens.device}")
        check_state(state, self.config, B if cu_seqlens is None else len(cu_seqlens) - 1)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Return the mean cross-entropy in nats, and the state; logits are made for some thousand tokens at a time.

        Without any target that counts, this raises an error on a CPU and under GLA_REF_DEBUG=1; otherwise on a GPU the
        loss is NaN.

        Args:
            tokens: `[B, T]`.
            targets: int64 or int32 `[B, T]`, the label of each token; -100 does not count. None: the next token of the
                same sequence, and no label for the last token.
            state, cu_seqlens: as in :meth:`forward`. For truncated backpropagation through time pass `detach(state)`.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        self._check(tokens, state, cu_seqlens)
        if targets is None and cu_seqlens is None and tokens.shape[1] == 1:
            raise ValueError("targets: expected some where sequences have one token, which no other follows")
        if targets is None:
            targets = next_tokens(tokens, cu_seqlens)
        else:
            check_targets(targets, tokens, self.config.vocab_size)
        looks = not targets.is_cuda or os.environ.get("GLA_REF_DEBUG") == "1"
        if looks and has_values(targets) and not (targets != IGNORED).any():
            raise ValueError(f"targets: expected at least one that counts, got {IGNORED} everywhere")
        x, state = self.model(tokens, state, cu_seqlens)
        return self.summed_loss(x, targets) / (targets != IGNORED).sum(), state

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy of the Transformer's output `[B, T, d]` and targets `[B, T]`."""
        parts = list(zip(x.flatten(0, 1).split(LOSS_TOKENS), targets.flatten().split(LOSS_TOKENS), strict=True))
        if len(parts) == 1:  # no gradient, so nothing to save
            return self._summed(*parts[0])
        return sum(checkpoint(self._summed, *part, use_reentrant=False) for part in parts)

    def _summed(self, x: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy of hidden states `[n, d]`, in at least float32."""
        return F.cross_entropy(wide(self.lm_head(x)), targets.long(), ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor | list[Tensor],
        new_tokens: int,
        *,
        state: State | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        chunk: int = 512,
    ) -> tuple[Tensor, State]:
        """Read the prompts, then write token by token.

        The model reads `chunk` tokens of each prompt at a time, so memory does not grow with the prompts' length.
        Prompts of different lengths are packed, not padded.

        Args:
            prompts: `[N, T]`, or N tensors `[T_n]`, at least one token each.
            new_tokens: the number of tokens to write, at least 1.
            state: the state of an earlier call with N sequences, which the prompts continue.
            temperature: 0 takes the likeliest token; otherwise logits are divided by the temperature, at least 1e-38,
                and a token is drawn.
            generator: the generator of random numbers for drawing.
            chunk: tokens of a prompt read at a time.

        Returns:
            tokens `[N, new_tokens]`, and the state after all of them, the last one included.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        if not isinstance(prompts, Tensor | list | tuple):
            raise TypeError(f"prompts: expected a tensor [N, T] or a list of tensors, got {type(prompts).__name__}")
        if isinstance(prompts, Tensor):
            check_tokens("prompts", prompts, axes="N T")
        prompts = list(prompts)
        if not prompts:
            raise ValueError("prompts: expected at least one, got none")
        for i, prompt in enumerate(prompts):
            check_tokens(f"prompts[{i}]", prompt, axes="T")
            check_range(f"prompts[{i}]", prompt, self.config.vocab_size)
        for name, x in (("new_tokens", new_tokens), ("chunk", chunk)):
            if not isinstance(x, int) or isinstance(x, bool) or x < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {x!r}")
        if not isinstance(temperature, Real) or isinstance(temperature, bool):
            raise TypeError(f"temperature: expected a number, got {temperature!r}")
        if not (temperature == 0 or temperature >= SMALLEST):
            raise ValueError(f"temperature: expected 0 or at least {SMALLEST}, got {temperature!r}")
        check_state(state, self.config, len(prompts))
        x, state = self._read(prompts, state, chunk)
        written = []
        for _ in range(new_tokens):
            logits = self.lm_head(x)
            if temperature:
                logits = wide(logits)
                logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: none overflows to +inf
                token = logits.softmax(-1).multinomial(1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            written.append(token)
            x, state = self.model(token, state)
            x = x[:, -1]
        return torch.cat(written, 1), state

    def _read(self, prompts: list[Tensor], state: State | None, chunk: int) -> tuple[Tensor, State]:
        """Read prompts; return the hidden state of each prompt's last token `[N, d]`, and the state."""
        last = None
        for start in range(0, max(map(len, prompts)), chunk):
            pieces = [prompt[start : start + chunk] for prompt in prompts]
            lengths = torch.tensor([len(piece) for piece in pieces], device=prompts[0].device)
            if len({len(piece) for piece in pieces}) == 1:
                x, state = self.model(torch.stack(pieces), state)
                last = x[:, -1]
                continue
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
            x, state = self.model(torch.cat(pieces)[None], state, cu_seqlens)
            ends = x[0, cu_seqlens[1:] - 1]  # a piece without tokens has none: any index
            last = ends if last is None else torch.where(lengths[:, None] > 0, ends, last)
        return last, state


def next_tokens(tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the token after each token, `[B, T]`; -100 after the last token of a sequence."""
    targets = tokens.roll(-1, 1)
    targets[:, -1 if cu_seqlens is None else cu_seqlens[1:] - 1] = IGNORED  # -1 where the first sequence is empty
    return targets


def detach(state):
    """Detach a state, so that gradients end there (truncated backpropagation through time)."""
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, list):
        return [detach(x) for x in state]
    if isinstance(state, tuple):
        parts = (detach(x) for x in state)
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def check_state(state: State | None, config: Config, N: int) -> None:
    """Check that a state has every layer's tensors, in the sizes of this model and for N sequences."""
    if state is None:
        return
    if not isinstance(state, list) or len(state) != config.num_hidden_layers:
        got = f"{len(state)} of them" if isinstance(state, list) else type(state).__name__
        raise ValueError(f"state: expected a list of {config.num_hidden_layers} layers' states, got {got}")
    for i, (layer, own) in enumerate(zip(state, config.layers(), strict=True)):
        if not isinstance(layer, LayerState):
            raise TypeError(f"state[{i}]: expected a LayerState, got {type(layer).__name__}")
        S, conv = layer
        if (conv is not None) != own.use_short_conv and (S is not None or conv is not None):
            has = "short convolutions" if own.use_short_conv else "no short convolutions"
            raise ValueError(f"state[{i}]: expected that of a model with {has}, got another")
        kind = Cache if own.mixer == "softmax" else Tensor
        if S is not None and not isinstance(S, kind):
            raise TypeError(
                f"state[{i}].S: expected a {kind.__name__}, as mixer {own.mixer!r} returns, got {type(S).__name__}"
            )
        for name, x, axes in parts(layer, own):
            if x.ndim != len(axes) or any(n != a for n, a in zip(x.shape, axes, strict=True) if isinstance(a, int)):
                raise ValueError(f"state[{i}].{name}: expected shape [{', '.join(map(str, axes))}], got {[*x.shape]}")
        cu = getattr(S, "cu_seqlens", None)  # of a packed cache
        for name, x in {"S": S, "conv": None if conv is None else conv[0]}.items():
            if x is None:
                continue
            sequences = len(cu) - 1 if name == "S" and cu is not None else len(x[0] if isinstance(x, tuple) else x)
            if sequences != N:
                raise ValueError(f"state[{i}].{name}: expected {N} sequences as in tokens, got {sequences}")


def parts(layer: LayerState, config: Config) -> Iterator[tuple[str, Tensor, tuple[str | int, ...]]]:
    """The tensors of a layer's state, each with its name, and with its axes: sizes of the layer, and others' names."""
    soft, H, d = config.mixer == "softmax", config.num_heads, config.hidden_size
    sizes = {"k": d if soft else config.key_size, "v": d if soft else config.value_size}
    if isinstance(layer.S, Cache):
        for name, size in sizes.items():
            yield f"S.{name}", getattr(layer.S, name), ("N", "T", H, size // H)
    elif layer.S is not None:
        yield "S", layer.S, ("N", H, sizes["k"] // H, sizes["v"] // H)
    for name, x in zip("qkv", layer.conv or (), strict=False):
        yield f"conv of {name}", x, ("N", config.conv_size - 1, sizes["v" if name == "v" else "k"])


def check_tokens(name: str, tokens: Tensor, axes: str = "B T") -> None:
    """Check that tokens are integers with these axes, none of them empty."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{name}: expected an int32 or int64 tensor of shape [{axes}], got {got}")
    if tokens.ndim != len(axes.split()) or 0 in tokens.shape:
        raise ValueError(f"{name}: expected shape [{axes}] of at least one token, got {list(tokens.shape)}")


def check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Check on a CPU that tokens are in the vocabulary; a GPU is not waited for."""
    if tokens.device.type != "cpu" or not has_values(tokens):
        return
    low, high = (x.item() for x in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: expected 0 to vocab_size - 1 = {vocab_size - 1}, got {low if low < 0 else high}")


def check_targets(targets: Tensor, tokens: Tensor, vocab_size: int) -> None:
    """Check that each token has a label, in the vocabulary or -100."""
    check_tokens("targets", targets)
    if targets.shape != tokens.shape:
        raise ValueError(f"targets: expected shape {list(tokens.shape)} as of tokens, got {list(targets.shape)}")
    if targets.device != tokens.device:
        raise ValueError(f"targets: expected device {tokens.device} as for tokens, got {targets.device}")
    check_range("targets", targets.masked_fill(targets == IGNORED, 0), vocab_size)
