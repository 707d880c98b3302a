"""Multi-query associative recall: which mixers find a value again by its key, at which width? (chapter 17)

A text begins with pairs of a key and a value; later some keys come again, among random tokens, and behind each the
model should say its value. The task is zoology's (Arora et al. 2023), figure 4 of the GLA paper: vocabulary 8192, keys
from its first half and values from its second, each once; queries come early rather than late (a power law). Here a
step's batch is of one length, and steps take the lengths in turn; every batch is new, where zoology repeats 100,000.

The learning rate is chosen once a mixer, at one width without convolutions, by one run a rate; then all widths follow,
with and without short convolutions. No full setting of it has been run yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models import Config
from .questions import Questions, QuestionTask, right, with_rate
from .runs import Place, Run, Training, check_fields, dice
from .training import train

__all__ = ["Mqar", "Settings", "carry_out", "questions", "runs"]


@dataclass(frozen=True)
class Settings:
    """What is compared, and on what.

    Attributes:
        vocab_size: tokens, the first half keys.
        lengths: (T, pairs) of a sequence, at least four tokens a pair.
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS`.
        widths: of the residual stream.
        heads: of every mixer.
        layers: of every model.
        rates: learning rates that are tried.
        rate_width: the width at which they are.
        tokens: of a step.
        steps: of every run.
        test_sequences: of each length.
        precision: "bf16" or "fp32".
    """

    vocab_size: int = 8192
    lengths: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (512, 64))
    mixers: tuple[str, ...] = ("softmax", "linear", "retnet", "mamba2", "gla", "gated_delta")
    widths: tuple[int, ...] = (64, 128, 256)
    heads: int = 2
    layers: int = 2
    rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    rate_width: int = 128
    tokens: int = 32768
    steps: int = 3000
    test_sequences: int = 1000
    precision: str = "bf16"

    def __post_init__(self):
        check_fields(self)
        for T, pairs in self.lengths:
            if T < 4 * pairs or T % 2:
                raise ValueError(f"lengths: expected an even T of at least 4 tokens a pair, got T = {T}, {pairs} pairs")
            if self.vocab_size < 2 * (pairs + 1):
                raise ValueError(f"vocab_size: expected more than {2 * pairs + 1} tokens for {pairs} pairs")
            if self.tokens < T:
                raise ValueError(f"tokens: expected at least one sequence of {T}, got {self.tokens}")

    @classmethod
    def full(cls) -> Settings:
        """The paper's figure."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, to see that it runs."""
        return cls(
            vocab_size=32, lengths=((16, 2), (24, 4)), mixers=("gla",), widths=(16,), rates=(1e-3, 1e-2),
            rate_width=16, tokens=96, steps=6, test_sequences=8, precision="fp32",
        )  # fmt: skip


def questions(n: int, T: int, pairs: int, vocab_size: int, rng: torch.Generator, power: float = 0.01) -> Questions:
    """n sequences of the task.

    Args:
        n: how many.
        T: tokens of each.
        pairs: keys, each asked for once.
        vocab_size: tokens that there are.
        rng: where it draws from; its device is that of the result.
        power: a of the law i^(a - 1) of the distance i between the pairs' end and a query.
    """
    half, device = vocab_size // 2, rng.device

    def some(count: int) -> torch.Tensor:  # of `count` numbers `pairs` different ones
        return torch.rand(n, count, generator=rng, device=device).topk(pairs).indices

    keys, values = 1 + some(half - 1), half + some(vocab_size - half)
    tokens = torch.randint(vocab_size, (n, T), generator=rng, device=device)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
    i = torch.arange(1, (T - 2 * pairs) // 2 + 1, device=device)
    gaps = torch.multinomial((i ** (power - 1)).expand(n, -1), pairs, generator=rng)
    places = 2 * pairs + 2 * gaps
    return Questions(tokens.scatter(1, places, keys), places, values)


class Mqar(QuestionTask):
    """The task of one seed."""

    def __init__(self, settings: Settings, seed: int, device: str):
        self.settings, self.seed, self.device = settings, seed, device

    def batch(self, step: int) -> Questions:
        """All of one length; lengths take turns."""
        T, pairs = self.settings.lengths[step % len(self.settings.lengths)]
        rng = dice(self.device, "mqar", self.seed, step)
        return questions(self.settings.tokens // T, T, pairs, self.settings.vocab_size, rng)

    def evaluate(self, model) -> dict:
        """Share of right answers by length, and the mean of these shares."""
        shares = {}
        for T, pairs in self.settings.lengths:
            test = questions(
                self.settings.test_sequences, T, pairs, self.settings.vocab_size, dice(self.device, "mqar test", T)
            )
            shares[str(T)] = right(model, test, max(1, self.settings.tokens // T)).float().mean().item()
        return {"accuracy": sum(shares.values()) / len(shares), "by length": shares}


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First a run a mixer and learning rate, then everything with the best rate, whose runs wait for the first."""
    s, found = settings, []

    def add(stage: str, name: str, mixer: str, width: int, conv: bool, seed: int, rate: float | None) -> None:
        about = {"stage": stage, "mixer": mixer, "width": width, "conv": conv, "seed": seed}
        model = Config(
            vocab_size=s.vocab_size, hidden_size=width, num_hidden_layers=s.layers, num_heads=s.heads, mixer=mixer,
            use_short_conv=conv,
        )  # fmt: skip
        training = Training(s.steps, rate, precision=s.precision, evaluations=min(4, s.steps))
        found.append(Run("mqar", name, about, s, model, training, s.tokens))

    for mixer in s.mixers:
        for rate in s.rates:
            add("rate", f"rate/{mixer}/{rate:g}", mixer, s.rate_width, False, 0, rate)
    for mixer in s.mixers:
        for width in s.widths:
            for conv in (False, True):
                for seed in range(seeds):
                    name = f"main/{mixer}/{width}{'-conv' if conv else ''}/seed{seed}"
                    add("main", name, mixer, width, conv, seed, None)
    return found


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None where the deadline came first."""
    run = with_rate(run, place.records)
    return train(run, Mqar(run.settings, run.about["seed"], place.device), place)
