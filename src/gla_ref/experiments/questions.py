"""Tasks whose text asks for what stands earlier in it: only the answers count (chapter 17)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import LanguageModel
from .runs import Run
from .training import Task

__all__ = ["QuestionTask", "Questions", "answer_logits", "answer_loss", "right", "with_rate"]


class Questions(NamedTuple):
    """A batch: tokens `[n, T]`; the model should say `answers` `[n, A]` at the tokens numbered `places` `[n, A]`."""

    tokens: Tensor
    places: Tensor
    answers: Tensor


def answer_logits(model: LanguageModel, tokens: Tensor, places: Tensor) -> Tensor:
    """Logits `[n, A, vocab_size]` at some places: those of all tokens would cost more than the rest of the model."""
    x, _ = model.model(tokens)
    x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
    return model.lm_head(x).float()


def answer_loss(model: LanguageModel, tokens: Tensor, places: Tensor, answers: Tensor) -> Tensor:
    """Mean cross-entropy of the answers."""
    return F.cross_entropy(answer_logits(model, tokens, places).flatten(0, 1), answers.flatten())


class QuestionTask(Task):
    """A task made of batches of questions."""

    def batch(self, step: int) -> Questions:
        """The training data of a step."""
        raise NotImplementedError

    def objective(self, model):
        """The answers' loss."""
        return lambda *questions: answer_loss(model, *questions)

    def loss(self, objective, step, state):
        """Of `batch(step)`; nothing is handed on."""
        return objective(*self.batch(step)), None


def right(model: LanguageModel, questions: Questions, rows: int) -> Tensor:
    """Which answers are the likeliest token, `[n, A]`; `rows` sequences at a time."""
    parts = zip(*(x.split(rows) for x in questions), strict=True)
    return torch.cat([answer_logits(model, t, p).argmax(-1) == a for t, p, a in parts])


def with_rate(run: Run, records: tuple[dict, ...]) -> Run:
    """The run with the learning rate that was best in the stage "rate" for its mixer, where it has none of its own.

    Raises:
        ValueError: a run of that stage is missing, with the same settings.
    """
    if run.training.learning_rate is not None:
        return run
    mixer, settings = run.about["mixer"], run.fingerprint()["settings"]
    found = {
        r["run"]["training"]["learning_rate"]: r
        for r in records
        if r["about"]["stage"] == "rate" and r["about"]["mixer"] == mixer and r["run"]["settings"] == settings
    }
    if missing := [rate for rate in run.settings.rates if rate not in found]:
        rates = ", ".join(f"{rate:g}" for rate in missing)
        raise ValueError(f"records: expected runs of {mixer} with the learning rates {rates}, which come first")

    def worth(rate: float) -> float:
        return -1.0 if found[rate]["diverged"] else found[rate]["evaluations"][-1]["accuracy"]

    rate = max(found, key=worth)
    return replace(run, training=replace(run.training, learning_rate=rate))
