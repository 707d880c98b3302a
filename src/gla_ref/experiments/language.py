"""Language models at equal budget: which mixer predicts held-out text best? (chapter 19)

Every model sees the same tokens in the same order: some 20 million of three installed packages
(:mod:`gla_ref.experiments.texts`), about twice; each record says how often. The score is the perplexity of documents
that were held out whole, together and by source, beside bits a byte, which another vocabulary does not change.
"softmax" has no convolutions: it is the Transformer++ of the GLA paper's table 2, whose sizes are 34 and 33 times ours.
Records also have what GLA's gates have learned: how fast channels forget, layer by layer, and what share of chunks is
strong.

All mixers start equally quiet (:func:`.runs.quiet_start`): with the start of MQAR their order was one of loudness. The
learning rate is chosen for every mixer at the first size, in trials as long as the runs, on validation documents; at
another size it is divided by the ratio of the widths.

The :data:`CHANGES` are models of the first size that differ from another in one thing. Those of GLA (the GLA paper's
table 4) are trained at GLA's rate; those of softmax attention have trials of their own, and show how its seeds scatter.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import Config
from . import texts
from ._rates import trained, with_trials
from .runs import Place, Run, check_settings, dice, mixer_of, quiet_start, start_of
from .trained_gates import gates_of
from .training import Task

__all__ = ["CHANGES", "SIZES", "Change", "Language", "Settings", "carry_out", "model_of", "runs"]

#: width, layers and heads of the models by their names
#:
#: :meta hide-value:
SIZES = {"tiny": (16, 1, 2), "10M": (256, 7, 4), "40M": (512, 9, 4)}


class Change(NamedTuple):
    """A model that differs from that of `base`, in a few fields of its Config; its rate is that of the base, or not."""

    base: str
    fields: dict
    own_rate: bool = False


#: changes by name; 5.3e-3 is GPT-2's scale of what 7 layers add to the stream, 0.02 / 14^0.5 (Radford et al. 2019)
#:
#: :meta hide-value:
CHANGES = {
    "no-gate": Change("gla", {"mixer": "linear"}),
    "constant-decay": Change("gla", {"mixer": "retnet"}),
    "scalar-gate": Change("gla", {"mixer": "scalar"}),
    "rank-4": Change("gla", {"gate_rank": 4}),
    "no-convolution": Change("gla", {"use_short_conv": False}),
    "softmax-plain": Change("softmax", {"qk_norm": False}, own_rate=True),
    "softmax-residual": Change("softmax", {"norm_eps": 1e-6, "output_range": 5.3e-3}, own_rate=True),
    "softmax-conv": Change("softmax", {"use_short_conv": True}, own_rate=True),
}
TOGETHER = 4096  # tokens that are evaluated at a time, or those of a step if these are more


@dataclass(frozen=True)
class Settings:
    """The mixers to compare, and their training.

    Attributes:
        vocab_size: tokens of the corpus (:mod:`gla_ref.experiments.texts`).
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS` or :data:`gla_ref.experiments.runs.HYBRIDS`.
        sizes: keys of :data:`SIZES`; learning rates are chosen at the first.
        changes: keys of :data:`CHANGES`; None: no changes.
        T: tokens of a sequence.
        tokens: of a step.
        steps: of every run.
        rates: learning rates that are tried first.
        precision: "bf16" or "fp32" in training.
    """

    vocab_size: int = 8192
    mixers: tuple[str, ...] = ("softmax", "retnet", "mamba2", "gla", "gated_delta", "kda", "gla+softmax", "kda+softmax")
    sizes: tuple[str, ...] = ("10M", "40M")
    changes: tuple[str, ...] | None = tuple(CHANGES)
    T: int = 2048
    tokens: int = 65536
    steps: int = 690
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    precision: str = "bf16"

    def __post_init__(self):
        check_settings(self)
        for field, known in (("sizes", SIZES), ("changes", CHANGES)):
            for name in getattr(self, field) or ():
                if name not in known:
                    raise ValueError(f"{field}: expected some of {', '.join(known)}, got {name!r}")
        if self.tokens < self.T:
            raise ValueError(f"tokens: expected at least one sequence of T = {self.T}, got {self.tokens}")

    @classmethod
    def tiny(cls) -> "Settings":
        """Seconds on a CPU, to see that it runs."""
        return cls(
            mixers=("gla", "softmax"), sizes=("tiny",), changes=("rank-4", "softmax-plain"), T=16, tokens=64, steps=6,
            rates=(1e-2,), precision="fp32",
        )  # fmt: skip


class Language(Task):
    """The next token of a corpus' training documents, joined into one text.

    An epoch cuts this text into sequences of T tokens, from an offset and in an order of its own, so that a step's data
    follow from its number. Nothing but the token END separates documents: a sequence may have the end of one and the
    beginning of the next, and the state of the first reaches the second. The documents of the evaluated part are
    joined and cut likewise, those of each source apart: a token sees at most T - 1 before it.
    """

    def __init__(self, settings, seed: int, place: Place, part: str = "test"):
        corpus = texts.load(place.texts)
        if corpus.vocab_size > settings.vocab_size:
            raise ValueError(
                f"vocab_size: expected at least the {corpus.vocab_size} of the corpus, got {settings.vocab_size}"
            )
        self.T, self.rows, self.seed, self.device = settings.T, settings.tokens // settings.T, seed, place.device
        self.part, self.vocab_size = part, settings.vocab_size
        self.training = torch.cat(corpus.documents("training")).to(place.device)
        self.sources = corpus.sources(part)
        self.cuts = (len(self.training) - self.T) // self.T  # sequences of an epoch, whatever its offset
        if self.cuts < 1:
            raise ValueError(f"T: expected less than half of the corpus' {len(self.training)} tokens, got {self.T}")
        if sum(len(tokens) for tokens, _ in self.sources.values()) <= self.T:
            raise ValueError(f"T: expected less than the tokens of the part {part!r} of the corpus, got {self.T}")
        self.orders: dict[int, tuple[int, torch.Tensor]] = {}

    def starts(self, step: int) -> torch.Tensor:
        """The starts of a step's sequences."""
        starts = []
        for i in range(step * self.rows, (step + 1) * self.rows):
            epoch, place = divmod(i, self.cuts)
            if epoch not in self.orders:
                rng = dice("cpu", "language", self.seed, epoch)
                offset = int(torch.randint(self.T, (), generator=rng))
                self.orders = {epoch: (offset, torch.randperm(self.cuts, generator=rng))}
            offset, order = self.orders[epoch]
            starts.append(offset + self.T * int(order[place]))
        return torch.tensor(starts)

    def loss(self, model, step):
        """The loss of the step's sequences."""
        inside = torch.arange(self.T + 1, device=self.device)
        both = self.training[self.starts(step).to(self.device)[:, None] + inside].long()
        return model.loss(both[:, :-1], both[:, 1:].contiguous())[0]

    def evaluate(self, model) -> dict:
        """Loss and perplexity of a token, and bits a byte, together and by source; what gates do there."""
        sums = {source: (*self.nats(model, tokens), size) for source, (tokens, size) in self.sources.items()}
        scores = {source: _scores(*of) for source, of in sums.items()}
        result = _scores(*map(sum, zip(*sums.values(), strict=True))) | {"by source": scores}
        longest = max((tokens for tokens, _ in self.sources.values()), key=len)
        some = longest[: len(longest) // self.T * self.T].view(-1, self.T)[: self.rows].to(self.device).long()
        layers = gates_of(model, some) if len(some) else []
        return result | ({"gates": layers} if layers else {})

    def nats(self, model, text: Tensor) -> tuple[float, int]:
        """Summed loss of a text in pieces of T tokens, and how many tokens are predicted: all but the first."""
        T, text, total = self.T, text.to(self.device).long(), 0.0
        rows = max(self.rows * T, TOGETHER) // T
        count = (len(text) - 1) // T * T
        pieces = [x[:count].view(-1, T).split(rows) for x in (text[:-1], text[1:])] if count else [(), ()]
        if count < len(text) - 1:
            pieces = [(*x, y[None, count:]) for x, y in zip(pieces, (text[:-1], text[1:]), strict=True)]
        for x, y in zip(*pieces, strict=True):
            total += model.loss(x, y.contiguous())[0].item() * y.numel()
        return total, len(text) - 1

    def baselines(self) -> dict:
        """Scores of the training text's frequencies of tokens; and bits a byte of all tokens alike ("chance")."""
        of = unigram(self.training, self.vocab_size)
        sums = [(of[x[1:].long()].sum().item(), len(x) - 1, n) for x, n in self.sources.values()]
        nats, tokens, size = map(sum, zip(*sums, strict=True))
        return _scores(nats, tokens, size) | {"chance": tokens * math.log2(self.vocab_size) / size}


def unigram(training: Tensor, vocab_size: int) -> Tensor:
    """Nats of every token by its frequency in the training text, plus one: float64, on the CPU."""
    counts = torch.bincount(training.cpu().long(), minlength=vocab_size).double() + 1
    return -(counts / counts.sum()).log()


def _scores(nats: float, tokens: int, size: int) -> dict:
    """Scores of a loss summed over so many tokens, which stand for so many bytes."""
    loss = nats / max(tokens, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits a byte": nats / math.log(2) / size}


def model_of(size: str, mixer: str, vocab_size: int, quiet: bool = True, **changes) -> Config:
    """A model of one of the SIZES; all mixers start equally quiet, or else as in MQAR, some of them loud."""
    (width, layers, heads), start = SIZES[size], quiet_start if quiet else start_of
    fields = {"hidden_size": width, "num_hidden_layers": layers, "num_heads": heads, "mixer": mixer_of(mixer, layers)}
    return Config(vocab_size=vocab_size, **fields | {"use_short_conv": mixer != "softmax"} | start(mixer) | changes)


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First the trials of every mixer at the first size, then a run a size, mixer and seed; changes likewise."""
    s, columns, first = settings, {}, settings.sizes[0]
    entries = [(size, mixer, Change(mixer, {}, own_rate=True)) for size in s.sizes for mixer in s.mixers]
    entries += [(first, name, CHANGES[name]) for name in s.changes or ()]
    for size, name, change in entries:
        about = {"size": size, "mixer": change.base, "change": name if change.fields else None}
        about |= {"group": name if change.own_rate else change.base, "rate factor": SIZES[first][0] / SIZES[size][0]}
        columns[f"{size}/{name}"] = about, replace(model_of(size, change.base, s.vocab_size), **change.fields)
    return with_trials("language", s, columns, seeds)


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first."""
    part = "validation" if run.about["stage"] == "rate" else "test"
    task = Language(run.settings, run.about["seed"], place, part)
    record = trained(run, task, place)
    return record and {**record, "epochs": run.training.steps * task.rows / task.cuts}
