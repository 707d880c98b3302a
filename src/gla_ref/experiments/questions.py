"""Tasks whose text asks for what stands earlier in it: only the answers count (chapter 19)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import LanguageModel

__all__ = ["Questions", "answer_logits", "answer_loss", "distinct", "judged"]


class Questions(NamedTuple):
    """A batch: tokens `[n, T]`; the model should say `answers` `[n, A]` at the tokens numbered `places` `[n, A]`."""

    tokens: Tensor
    places: Tensor
    answers: Tensor

    def to(self, device: str | torch.device) -> Questions:
        """A copy on another device: questions are drawn on the CPU, so that a GPU gets the same ones."""
        return Questions(*(x.to(device) for x in self))


def distinct(n: int, count: int, k: int, rng: torch.Generator) -> Tensor:
    """`[n, k]`: in each row k different numbers below `count`, in random order.

    Floyd's algorithm: k draws, where a permutation of all numbers would take `count` of them.
    """
    uniform = torch.rand(n, k, generator=rng, dtype=torch.float64, device=rng.device)
    numbers = torch.empty(n, k, dtype=torch.int64, device=rng.device)
    for i, last in enumerate(range(count - k, count)):
        drawn = (uniform[:, i] * (last + 1)).long()
        seen = (numbers[:, :i] == drawn[:, None]).any(1)
        numbers[:, i] = torch.where(seen, last, drawn)
    return numbers.gather(1, torch.rand(n, k, generator=rng, device=rng.device).argsort(1))


def answer_logits(model: LanguageModel, tokens: Tensor, places: Tensor) -> Tensor:
    """Logits `[n, A, vocab_size]` at some places: those of all tokens would cost more than the rest of the model."""
    x, _ = model.model(tokens)
    x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
    return model.lm_head(x).float()


def answer_loss(model: LanguageModel, tokens: Tensor, places: Tensor, answers: Tensor) -> Tensor:
    """Mean cross-entropy of the answers."""
    return F.cross_entropy(answer_logits(model, tokens, places).flatten(0, 1), answers.flatten())


def judged(model: LanguageModel, questions: Questions, rows: int) -> tuple[Tensor, Tensor]:
    """Which answers are the likeliest token, and their losses in nats, `[n, A]` both; `rows` sequences at a time."""
    right, nats = [], []
    for tokens, places, answers in zip(*(x.split(rows) for x in questions), strict=True):
        logits = answer_logits(model, tokens, places)
        right.append(logits.argmax(-1) == answers)
        nats.append(F.cross_entropy(logits.transpose(1, 2), answers, reduction="none"))
    return torch.cat(right), torch.cat(nats)
