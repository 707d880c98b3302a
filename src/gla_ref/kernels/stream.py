"""A text in pieces with the same bits as in one call, wherever it is cut (chapter 16).

A kernel rounds each sum in the order in which it adds. With `path="fused"` that order depends on the text alone: a
program walks over it from its first token, a chunk at a time. The batch, packed neighbours and a cut between two
chunks change no bit. A cut inside a chunk does, unless the chunk is computed again from its first token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mechanisms import MECHANISMS

__all__ = ["CHUNK", "Stream"]

CHUNK = 64  # tokens: a multiple of the chunk length of every kernel here
ANCHORED = ("gla", "kda")  # their decays within a chunk depend on later tokens of the chunk


class Stream:
    """Texts that arrive in pieces, one token or many at a time.

    A stream keeps the state at the last multiple of 64 tokens, and the tokens since. Each call computes those tokens
    again. So prefill and decode give the same bits, at the price of up to 63 more tokens per call.

    Gated Linear Attention decays a chunk's tokens from the middle of the chunk, which later tokens move, and KDA's from
    the middle of a part of it. Pieces of these two must end at multiples of 64, except the last.

    Attributes:
        mechanism: "linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule" or "kda".
        length: tokens so far.
    """

    def __init__(self, mechanism: str, *, scale: float | None = None, initial_state: Tensor | None = None):
        """Begin the texts.

        Args:
            mechanism: the name of a mechanism with a state and a Triton kernel.
            scale: factor on q, K^-0.5 when None.
            initial_state: float32 `[B, HV, K, V]`, zeros when None.

        Raises:
            ValueError: there is no such mechanism.
        """
        known = [name for name in MECHANISMS if name != "softmax_attention"]
        if mechanism not in known:
            raise ValueError(f"mechanism: expected one of {', '.join(known)}, got {mechanism!r}")
        self.mechanism, self.scale, self.length = mechanism, scale, 0
        self._state, self._since = initial_state, None  # at the last whole chunk; the tokens since

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The outputs of the next tokens.

        Args:
            tensors: those of the mechanism in their order, q, k, v and gates or strengths: `[B, T, ...]` with any
                T >= 1, the same B in every call.

        Returns:
            o `[B, T, HV, V]`.

        Raises:
            ValueError: a piece follows one that ended inside a chunk of "gla" or "kda"; or B has changed.
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        names = MECHANISMS[self.mechanism].required
        if len(tensors) != len(names):
            raise TypeError(f"tensors: expected {', '.join(names)}, got {len(tensors)} tensors")
        before, B = self.length % CHUNK, len(tensors[0])
        if self._since is not None and len(self._since[0]) != B:
            raise ValueError(f"q: expected B = {len(self._since[0])} as in the pieces before, got {B}")
        if before and self.mechanism in ANCHORED:
            raise ValueError(
                f"q: expected pieces that end at a multiple of {CHUNK} tokens for {self.mechanism}, "
                f"got one that ended at {self.length}"
            )
        if before:
            tensors = tuple(torch.cat(pair, 1) for pair in zip(self._since, tensors, strict=True))
        T = tensors[0].shape[1]
        whole = T - T % CHUNK
        outs = []
        for part in (slice(0, whole), slice(whole, T)):
            if part.start == part.stop:
                continue
            o, S = self._call(*(x[:, part] for x in tensors))
            outs.append(o)
            if part.stop == whole:
                self._state = S
        self._since = tuple(x[:, whole:].clone() for x in tensors)
        self.length += T - before
        return torch.cat(outs, 1)[:, before:]

    @property
    def state(self) -> Tensor | None:
        """The state after all tokens so far, float32 `[B, HV, K, V]`; the initial one before any."""
        if self.length % CHUNK == 0:
            return self._state
        return self._call(*self._since)[1]

    def _call(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        from .. import FORMS

        forms = FORMS[self.mechanism]
        fn = forms.get("triton_portable", forms["triton"])
        return fn(*tensors, scale=self.scale, initial_state=self._state, path="fused")
