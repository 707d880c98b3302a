"""Facts in a text, asked for at its end: a synthetic stand-in for the GLA paper's table 3 (chapter 19).

Table 3 asks models of 1.3 billion parameters for what stands in web pages and articles. Here a text of random filler
(frequent and rare words, as Zipf has it) contains facts, `FACT name name IS value value value`, anywhere; at its end
each is asked for in random order, `ASK name name IS`, and the three tokens of the value must follow. Two facts may
share one half of a name, never both, so that a name of two tokens must be joined before it can be found: the difference
to :mod:`gla_ref.experiments.mqar`. What it shows is the recall of a state of a given size, not the paper's numbers.

Heads share a fixed width, so fewer heads have a larger state with the same parameters: the axis of its size. The
learning rate is chosen as there, for every mixer; longer runs begin only if trials of softmax attention and of one
linear mixer are above chance. Of its full settings only trials of rates have run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..models import Config
from ._rates import learned, trained, trials
from .questions import Questions, QuestionTask, distinct, judged
from .runs import Place, Run, Training, check_fields, dice, start_of

__all__ = ["Recall", "Settings", "carry_out", "runs", "texts"]

FACT, IS, ASK = range(3)
WORDS = 7  # of a fact, and of a question with its answer
VALUE = 3  # tokens of a value


@dataclass(frozen=True)
class Settings:
    """What is compared, and on what.

    Attributes:
        T: tokens of a text, its questions included.
        facts: how many a text has; steps take them in turn.
        names: first halves of names, and as many second halves.
        values: tokens that values are made of.
        fillers: other words.
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS`.
        width: of the residual stream.
        conv: whether mixers have short convolutions.
        heads: of linear mixers, each a size of their state; softmax attention has the first of them.
        layers: of every model.
        rates: learning rates that are tried first, with the first number of heads.
        tokens: of a step.
        steps: of every run that is a result.
        rate_steps: of a trial of a learning rate.
        test_texts: for each number of facts, also for validation.
        must_learn: whether longer runs wait for trials above chance.
        precision: "bf16" or "fp32" in training.
    """

    T: int = 2048
    facts: tuple[int, ...] = (4, 16, 64)
    names: int = 64
    values: int = 256
    fillers: int = 1024
    mixers: tuple[str, ...] = ("softmax", "linear", "mamba2", "gla")
    width: int = 256
    conv: bool = True
    heads: tuple[int, ...] = (4, 1, 16)
    layers: int = 4
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    tokens: int = 32768
    steps: int = 1400
    rate_steps: int = 500
    test_texts: int = 200
    must_learn: bool = True
    precision: str = "bf16"

    def __post_init__(self):
        check_fields(self)
        if self.T < 3 * WORDS * max(self.facts):
            raise ValueError(
                f"T: expected at least {3 * WORDS} tokens a fact, {3 * WORDS * max(self.facts)}, got {self.T}"
            )
        if self.names**2 < max(self.facts):
            raise ValueError(f"names: expected names^2 of at least {max(self.facts)} facts, got {self.names}")
        if self.tokens < self.T:
            raise ValueError(f"tokens: expected at least one text of T = {self.T}, got {self.tokens}")

    @property
    def vocab_size(self) -> int:
        """Markers, names, values and fillers."""
        return 3 + 2 * self.names + self.values + self.fillers

    @classmethod
    def full(cls) -> Settings:
        """Minutes on a GPU."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, to see that it runs."""
        return cls(
            T=64, facts=(1, 3), names=3, values=5, fillers=8, mixers=("gla",), width=16, heads=(2,), layers=1,
            rates=(1e-2,), tokens=128, steps=6, rate_steps=3, test_texts=5, must_learn=False,
            precision="fp32",
        )  # fmt: skip


def texts(n: int, facts: int, settings: Settings, rng: torch.Generator) -> tuple[Questions, torch.Tensor]:
    """n texts with their questions, three answers a question, and how many tokens before its question each fact stands.

    Args:
        n: how many texts.
        facts: in each.
        settings: T and the vocabulary.
        rng: where it draws from; its device is that of the results.

    Returns:
        questions with `places` and `answers` `[n, 3 facts]`, and distances `[n, facts]`.
    """
    s, device = settings, rng.device
    first = torch.tensor([0, s.names, 2 * s.names, 2 * s.names + s.values]) + 3  # of each kind of token

    def draw(count: int, *shape: int) -> torch.Tensor:
        return torch.randint(count, shape, generator=rng, device=device)

    def order(count: int) -> torch.Tensor:  # `facts` different ones of so many
        return distinct(n, count, facts, rng)

    zipf = 1 / torch.arange(1, s.fillers + 1, device=device)
    tokens = first[3] + torch.multinomial(zipf, n * s.T, replacement=True, generator=rng).view(n, s.T)
    pair = order(s.names**2)
    name = torch.stack([first[0] + pair // s.names, first[1] + pair % s.names], -1)  # [n, facts, 2]
    value = first[2] + draw(s.values, n, facts, VALUE)

    def sentence(marker: int) -> torch.Tensor:  # [n, facts, WORDS]
        word = tokens.new_full((n, facts, 1), marker)
        return torch.cat([word, name, torch.full_like(word, IS), value], -1)

    # starts of blocks that do not overlap: different numbers in order, moved apart
    text = s.T - WORDS * facts
    starts = order(text - (WORDS - 1) * facts).sort().values
    starts = starts + (WORDS - 1) * torch.arange(facts, device=device)
    starts = starts.gather(1, order(facts))  # fact 0 is not always the first
    asked = text + WORDS * order(facts)  # where each one's question begins
    inside = torch.arange(WORDS, device=device)
    for begin, marker in ((starts, FACT), (asked, ASK)):
        tokens.scatter_(1, (begin[..., None] + inside).flatten(1), sentence(marker).flatten(1))
    places = (asked[..., None] + inside[VALUE : VALUE + 3]).flatten(1)  # IS, and the value but its last token
    return Questions(tokens, places, value.flatten(1)), asked - starts


class Recall(QuestionTask):
    """The task of one seed; `part` says which data it is evaluated on."""

    def __init__(self, settings: Settings, seed: int, device: str, part: str = "test"):
        self.settings, self.seed, self.device, self.part, self.T = settings, seed, device, part, settings.T

    def batch(self, step: int) -> Questions:
        """All with the same number of facts; numbers take turns."""
        s = self.settings
        facts = s.facts[step % len(s.facts)]
        return texts(s.tokens // s.T, facts, s, dice("cpu", "recall", self.seed, step))[0].to(self.device)

    def evaluate(self, model) -> dict:
        """Share of values right to the last token: the mean, by number of facts, and by distance in quarters of T."""
        s, shares, losses, far, found = self.settings, {}, [], [], []
        for facts in s.facts:
            test, distance = texts(s.test_texts, facts, s, dice("cpu", "recall", self.part, facts))
            right, nats = judged(model, test.to(self.device), max(1, s.tokens // s.T))
            whole = right.unflatten(1, (facts, VALUE)).all(-1).cpu()
            shares[str(facts)] = whole.float().mean().item()
            losses.append(nats.mean().item())
            far.append(distance.flatten())
            found.append(whole.flatten())
        quarter, found = torch.cat(far) * 4 // s.T, torch.cat(found).float()
        distances = {str((i + 1) * s.T // 4): found[quarter == i] for i in range(4)}
        distances = {name: x.mean().item() for name, x in distances.items() if len(x)}
        accuracy, loss = (math.fsum(x) / len(x) for x in (shares.values(), losses))
        return {"accuracy": accuracy, "loss": loss, "by facts": shares, "by distance": distances}

    def baselines(self) -> dict:
        """Any value at all; and one of the text's facts, each as often as another ("majority")."""
        s = self.settings
        majority = math.fsum(1 / facts for facts in s.facts) / len(s.facts)
        return {"loss": math.log(s.values), "chance": float(s.values) ** -VALUE, "majority": majority}


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First the trials of every mixer, then a run a mixer, number of heads and seed with the best rate."""
    s, first, main = settings, [], []
    training = Training(s.steps, None, precision=s.precision, evaluations=min(4, s.steps))
    for mixer in s.mixers:
        group = f"{mixer}{'-conv' if s.conv else ''}"
        for heads in s.heads if mixer != "softmax" else s.heads[:1]:
            about = {"stage": "main", "mixer": mixer, "conv": s.conv, "heads": heads, "group": group}
            model = Config(
                vocab_size=s.vocab_size, hidden_size=s.width, num_hidden_layers=s.layers, num_heads=heads, mixer=mixer,
                use_short_conv=s.conv, **start_of(mixer),
            )  # fmt: skip
            name = f"main/{group}/{heads}-heads"
            every = [
                Run("recall", f"{name}/seed{seed}", {**about, "seed": seed}, s, model, training, s.tokens)
                for seed in range(seeds)
            ]
            first += trials(every[0], s.rates, s.rate_steps) if heads == s.heads[0] else []
            main += every
    return first + main


def check_learned(settings: Settings, records: tuple[dict, ...]) -> None:
    """Trials must show that the task can be learned, by softmax attention and by one linear mixer, where they are.

    Raises:
        ValueError: trials are missing, or all of one kind are at chance.
    """
    above = learned([run for run in runs(settings, 1) if run.about["stage"] == "main"], records)
    for kind, mixers in (
        ("softmax attention", [m for m in above if m == "softmax"]),
        ("a linear mixer", [m for m in above if m != "softmax"]),
    ):
        if mixers and not any(above[m] for m in mixers):
            raise ValueError(
                f"records: expected trials of {kind} above chance before longer runs, got {', '.join(mixers)} at "
                "chance; try more rate_steps, fewer facts or other rates"
            )


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first.

    Raises:
        ValueError: trials have not shown yet that the task can be learned.
    """
    trial = run.about["stage"] == "rate"
    if not trial and run.settings.must_learn:
        check_learned(run.settings, place.records)
    part = "validation" if trial else "test"
    return trained(run, Recall(run.settings, run.about["seed"], place.device, part), place)
