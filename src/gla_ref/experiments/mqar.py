"""Multi-query associative recall: which mixers find a value again by its key, at which width? (chapter 19)

A text begins with pairs of a key and a value; later every key comes again, among random tokens, and after each the
model should say its value. The task is zoology's (Arora et al. 2023), as in figure 4 of the GLA paper: keys come from
the first half of the vocabulary and values from its second, each once; queries come early rather than late (a power
law). Four things differ from that figure: the vocabulary has 1,024 tokens instead of 8,192, with which linear mixers
were still at chance after 1,000 steps; a step's batch is of one length, and steps take the lengths in turn; every batch
is new, where zoology repeats 100,000; and Hyena, RWKV and Mamba-1 are not there, but the gated delta rule is.

With `overwritten`, half of the pairs come a second time, with the old key and a new value, which is the right one then:
a state that only adds has both values, one that corrects itself has the new one.

The learning rate is chosen for every mixer, width and variant, by trials on validation data. Random numbers are drawn
on the CPU, so that a CPU and a GPU train on the same texts.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import Config, LanguageModel
from ._rates import trained, with_trials
from .runs import Place, Run, check_settings, dice, mixer_of, start_of
from .trained_gates import gates_of
from .training import Task

__all__ = ["Mqar", "Questions", "Settings", "answer_logits", "answer_loss", "carry_out", "distinct", "judged"]
__all__ += ["questions", "runs"]


@dataclass(frozen=True)
class Settings:
    """The mixers to compare, and their training.

    Attributes:
        vocab_size: tokens, the first half keys.
        lengths: (T, pairs) of a sequence, at least four tokens a pair, five if `overwritten`.
        overwritten: whether half of the keys are written twice; the second value counts.
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS` or :data:`gla_ref.experiments.runs.HYBRIDS`.
        widths: of the residual stream.
        conv: whether mixers have short convolutions.
        heads: of every mixer.
        layers: of every model.
        rates: learning rates that are tried first.
        tokens: of a step.
        steps: of every run.
        test_sequences: of each length, also for validation.
        precision: "bf16" or "fp32" in training.
    """

    vocab_size: int = 1024
    lengths: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (512, 64))
    overwritten: bool = False
    mixers: tuple[str, ...] = (
        "softmax", "linear", "retnet", "mamba2", "gla", "gated_delta", "kda", "gla+softmax", "kda+softmax",
    )  # fmt: skip
    widths: tuple[int, ...] = (128,)
    conv: bool = True
    heads: int = 2
    layers: int = 2
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    tokens: int = 16384
    steps: int = 4000
    test_sequences: int = 1000
    precision: str = "bf16"

    def __post_init__(self):
        check_settings(self)
        for T, pairs in self.lengths:
            least = 2 * pairs + 2 * self.writes(pairs)
            if T < least or T % 2:
                raise ValueError(f"lengths: expected an even T of at least {least} tokens, got {T} with {pairs} pairs")
            if self.vocab_size < 2 * (pairs + 1):
                raise ValueError(f"vocab_size: expected more than {2 * pairs + 1} tokens for {pairs} pairs")
            if self.tokens < T:
                raise ValueError(f"tokens: expected at least one sequence of {T}, got {self.tokens}")

    def writes(self, pairs: int) -> int:
        """Pairs of a key and a value that a sequence begins with."""
        return pairs + pairs // 2 if self.overwritten else pairs

    @classmethod
    def live(cls) -> "Settings":
        """Ten seconds a run on one core of a CPU, for a notebook (results: benchmarks/results/cpu-mqar.json)."""
        return cls(
            vocab_size=64, lengths=((32, 4),), mixers=("softmax", "linear", "gla"), widths=(64,), layers=1,
            rates=(4e-3,), tokens=1024, steps=300, test_sequences=500, precision="fp32",
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> "Settings":
        """Seconds on a CPU, to see that it runs."""
        return cls(
            vocab_size=32, lengths=((16, 2), (24, 4)), mixers=("gla",), widths=(16,), rates=(1e-2,),
            tokens=96, steps=6, test_sequences=8, precision="fp32",
        )  # fmt: skip


class Questions(NamedTuple):
    """Texts that ask for what stands earlier in them: only the answers count.

    Tokens `[n, T]`; the model should say `answers` `[n, A]` at the tokens numbered `places` `[n, A]`.
    """

    tokens: Tensor
    places: Tensor
    answers: Tensor

    def to(self, device: str | torch.device) -> "Questions":
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


def questions(
    n: int, T: int, pairs: int, vocab_size: int, rng: torch.Generator, power: float = 0.01, overwritten: bool = False
) -> Questions:
    """n sequences of the task.

    Args:
        n: how many.
        T: tokens of each.
        pairs: keys, each asked for once.
        vocab_size: tokens that there are.
        rng: where it draws from; its device is that of the result.
        power: a of the law i^(a - 1) of the distance i between the pairs' end and a query.
        overwritten: whether the first half of the keys are written a second time, after all others, with a new value.
    """
    half, device = vocab_size // 2, rng.device
    again = pairs // 2 if overwritten else 0
    keys = 1 + distinct(n, half - 1, pairs, rng)
    written = half + distinct(n, vocab_size - half, pairs + again, rng)
    tokens = torch.randint(vocab_size, (n, T), generator=rng, device=device)
    head = 2 * (pairs + again)
    order = torch.rand(n, pairs, generator=rng, device=device).argsort(1)  # no place says which come again
    first = torch.stack([keys, written[:, :pairs]], -1).gather(1, order[..., None].expand(-1, -1, 2))
    tokens[:, :head] = torch.cat([first, torch.stack([keys[:, :again], written[:, pairs:]], -1)], 1).flatten(1)
    values = torch.cat([written[:, pairs:], written[:, again:pairs]], 1)
    i = torch.arange(1, (T - head) // 2 + 1, device=device)
    gaps = torch.multinomial((i ** (power - 1)).expand(n, -1), pairs, generator=rng)
    places = head + 2 * gaps
    return Questions(tokens.scatter(1, places, keys), places, values)


class Mqar(Task):
    """The task of one seed; `part` says which data it is evaluated on."""

    def __init__(self, settings: Settings, seed: int, device: str, part: str = "test"):
        self.settings, self.seed, self.device, self.part = settings, seed, device, part
        self.T = max(T for T, _ in settings.lengths)

    def draw(self, n: int, T: int, pairs: int, *what) -> Questions:
        """Questions that depend on `what` alone."""
        s, rng = self.settings, dice("cpu", "mqar", *what)
        return questions(n, T, pairs, s.vocab_size, rng, overwritten=s.overwritten).to(self.device)

    def batch(self, step: int) -> Questions:
        """All of one length; lengths take turns."""
        T, pairs = self.settings.lengths[step % len(self.settings.lengths)]
        return self.draw(self.settings.tokens // T, T, pairs, self.seed, step)

    def loss(self, model, step):
        """The loss of a step's answers."""
        return answer_loss(model, *self.batch(step))

    def evaluate(self, model) -> dict:
        """Share of right answers by length, the mean of these shares, and the mean loss; by kind of key too.

        Then what gates do on some of the longest texts.
        """
        s, shares, losses, kinds = self.settings, {}, [], {"written once": [], "overwritten": []}
        longest = None
        for T, pairs in s.lengths:
            test = self.draw(s.test_sequences, T, pairs, self.part, T)
            longest = test.tokens if T == self.T else longest
            right, nats = judged(model, test, max(1, s.tokens // T))
            shares[str(T)] = right.float().mean().item()
            losses.append(nats.mean().item())
            again = pairs // 2 if s.overwritten else 0
            kinds["overwritten"].append(right[:, :again].float().mean().item())
            kinds["written once"].append(right[:, again:].float().mean().item())
        scores = {"accuracy": fmean(shares.values()), "loss": fmean(losses), "by length": shares}
        layers = gates_of(model, longest[: max(1, s.tokens // self.T)])
        scores |= {"gates": layers} if layers else {}
        return scores | ({"by key": {kind: fmean(x) for kind, x in kinds.items()}} if s.overwritten else {})

    def baselines(self) -> dict:
        """Any value at all; and one of the values in the text, each as often as another ("majority")."""
        values = self.settings.vocab_size - self.settings.vocab_size // 2
        majority = fmean(1 / self.settings.writes(pairs) for _, pairs in self.settings.lengths)
        return {"loss": math.log(values), "chance": 1 / values, "majority": majority}


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First the trials of every mixer, width and variant, then a run of each for every seed, with the best rate."""
    s, columns = settings, {}
    for mixer in s.mixers:
        for width in s.widths:
            group = f"{mixer}/{width}{'-conv' if s.conv else ''}{'-overwritten' if s.overwritten else ''}"
            about = {"mixer": mixer, "width": width, "conv": s.conv, "overwritten": s.overwritten, "group": group}
            columns[group] = about, Config(
                vocab_size=s.vocab_size, hidden_size=width, num_hidden_layers=s.layers, num_heads=s.heads,
                mixer=mixer_of(mixer, s.layers), use_short_conv=s.conv, **start_of(mixer),
            )  # fmt: skip
    return with_trials("mqar", s, columns, seeds, min(4, s.steps))


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first."""
    part = "validation" if run.about["stage"] == "rate" else "test"
    return trained(run, Mqar(run.settings, run.about["seed"], place.device, part), place)
