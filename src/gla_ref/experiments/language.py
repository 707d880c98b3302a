"""Language models at equal budget: which mixer predicts held-out text best? (chapter 17)

Every model sees the same tokens in the same order: some 20 million of three installed packages
(:mod:`gla_ref.experiments.texts`), about twice; each record says how often. The score is the perplexity of documents
that were held out whole, beside bits a byte, which another vocabulary does not change. "softmax" is the Transformer++
of the GLA paper's table 2, whose sizes are 34 and 33 times ours. Records also have what GLA's gates have learned: how
fast channels forget, layer by layer, and what share of chunks is strong. No full setting of it has been run yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..models import Config, LanguageModel
from ..models.layer import GatedLinearAttention
from . import texts
from .runs import Place, Run, Training, check_fields, dice
from .training import Task, train

__all__ = ["SIZES", "Language", "Settings", "carry_out", "gates", "model_of", "runs"]

#: width, layers and heads of the models by their names
#:
#: :meta hide-value:
SIZES = {"tiny": (16, 1, 2), "10M": (256, 7, 4), "40M": (512, 9, 4)}

CHUNK, STRONG = 64, -80.0  # of the kernels in bfloat16: a chunk where a channel's log gates sum to less is strong


@dataclass(frozen=True)
class Settings:
    """What is compared, and on what.

    Attributes:
        corpus: "texts" or "speeches" of :mod:`gla_ref.experiments.texts`.
        vocab_size: tokens of that corpus.
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS`.
        sizes: keys of :data:`SIZES`.
        T: tokens of a sequence.
        tokens: of a step.
        steps: of every run.
        rates: learning rate of each size.
        precision: "bf16" or "fp32".
        compile: whether losses go through torch.compile.
    """

    corpus: str = "texts"
    vocab_size: int = 8192
    mixers: tuple[str, ...] = ("softmax", "retnet", "mamba2", "gla")
    sizes: tuple[str, ...] = ("10M", "40M")
    T: int = 2048
    tokens: int = 65536
    steps: int = 690
    rates: tuple[float, ...] = (2e-3, 1e-3)
    precision: str = "bf16"
    compile: bool = False

    def __post_init__(self):
        check_fields(self)
        texts.check_corpus(self.corpus)
        for name in self.sizes:
            if name not in SIZES:
                raise ValueError(f"sizes: expected some of {', '.join(SIZES)}, got {name!r}")
        if len(self.rates) != len(self.sizes):
            raise ValueError(f"rates: expected one for each of {len(self.sizes)} sizes, got {len(self.rates)}")
        if self.tokens < self.T:
            raise ValueError(f"tokens: expected at least one sequence of T = {self.T}, got {self.tokens}")

    @classmethod
    def full(cls) -> Settings:
        """Minutes on a GPU."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, on bytes, to see that it runs."""
        return cls(
            corpus="speeches", vocab_size=256, mixers=("gla", "softmax"), sizes=("tiny",), T=16, tokens=64, steps=6,
            rates=(1e-2,), precision="fp32",
        )  # fmt: skip


class Language(Task):
    """The next token of a corpus' training documents, joined into one text.

    An epoch cuts this text into sequences of T tokens, from an offset and in an order of its own, so that a step's data
    follow from its number. The held-out documents are cut likewise: a token sees at most T - 1 before it.
    """

    def __init__(self, settings, seed: int, place: Place):
        corpus = texts.load(place.texts, settings.corpus)
        if corpus.vocab_size > settings.vocab_size:
            raise ValueError(
                f"vocab_size: expected at least the {corpus.vocab_size} of the corpus, got {settings.vocab_size}"
            )
        self.T, self.rows, self.seed, self.device = settings.T, settings.tokens // settings.T, seed, place.device
        self.training, self.test = (torch.cat(corpus.documents(held)).to(place.device) for held in (False, True))
        self.test_bytes = int((corpus.bytes + 1)[corpus.held].sum())  # and END
        self.cuts = (len(self.training) - self.T) // self.T  # sequences of an epoch, whatever its offset
        if self.cuts < 1:
            raise ValueError(f"T: expected less than half of the corpus' {len(self.training)} tokens, got {self.T}")
        if len(self.test) <= self.T:
            raise ValueError(f"T: expected less than the {len(self.test)} tokens that are held out, got {self.T}")
        self.orders: dict[int, tuple[int, torch.Tensor]] = {}

    def starts(self, step: int) -> torch.Tensor:
        """Where the sequences of a step begin."""
        found = []
        for i in range(step * self.rows, (step + 1) * self.rows):
            epoch, place = divmod(i, self.cuts)
            if epoch not in self.orders:
                rng = dice("cpu", "language", self.seed, epoch)
                offset = int(torch.randint(self.T, (), generator=rng))
                self.orders = {epoch: (offset, torch.randperm(self.cuts, generator=rng))}
            offset, order = self.orders[epoch]
            found.append(offset + self.T * int(order[place]))
        return torch.tensor(found)

    def loss(self, objective, step, state):
        """Of the step's sequences; nothing is handed on."""
        inside = torch.arange(self.T + 1, device=self.device)
        both = self.training[self.starts(step).to(self.device)[:, None] + inside].long()
        return objective(both[:, :-1], both[:, 1:].contiguous())[0], None

    def evaluate(self, model) -> dict:
        """Perplexity of a token, and bits a byte, of the held-out documents; of GLA what its gates do there."""
        cuts = (len(self.test) - 1) // self.T
        total, count = torch.zeros((), dtype=torch.float64), 0
        pieces = self.test[: cuts * self.T + 1].long()
        tokens, targets = (x.view(cuts, self.T) for x in (pieces[:-1], pieces[1:]))
        for x, y in zip(tokens.split(self.rows), targets.split(self.rows), strict=True):
            total += model.loss(x, y)[0].double().cpu() * y.numel()
            count += y.numel()
        if rest := len(self.test) - 1 - count:
            x = self.test[None, count : count + rest + 1].long()
            total += model.loss(x[:, :-1], x[:, 1:].contiguous())[0].double().cpu() * rest
            count += rest
        nats = total.item()
        found = {"perplexity": math.exp(min(nats / count, 700.0)), "bits a byte": nats / math.log(2) / self.test_bytes}
        layers = gates(model, tokens[: self.rows])
        return found | ({"gates": layers} if layers else {})


@torch.no_grad()
def gates(model: LanguageModel, tokens: Tensor) -> list[dict]:
    """What the gates of a GLA model do on tokens `[B, T]`, layer by layer; nothing for other mixers.

    Returns:
        of each layer "half-life", the tokens after which a channel has forgotten half, by its mean log gate: quantiles
        over channels; and "strong chunks", the share, over heads, of chunks that the kernels compute level by level.
    """
    found, handles = [], []

    def look(layer, args):
        *_, g = layer.inputs(args[0], None, None, None)
        half_lives = math.log(2) / -g.float().mean((0, 1)).flatten().clamp(max=-1e-9)
        C = min(CHUNK, g.shape[1])
        totals = rearrange(g[:, : g.shape[1] // C * C].float(), "b (n c) h k -> b n c h k", c=C).sum(2)
        quantiles = {str(q): half_lives.quantile(q).item() for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
        strong = (totals.amin(-1) < STRONG).float().mean().item()
        found.append({"half-life": quantiles, "strong chunks": strong})

    for block in model.model.layers:
        if isinstance(block.attn, GatedLinearAttention):
            handles.append(block.attn.register_forward_pre_hook(look))
    if handles:
        model.model(tokens)
    for handle in handles:
        handle.remove()
    return found


def model_of(size: str, mixer: str, vocab_size: int, **changes) -> Config:
    """A model of one of the SIZES."""
    width, layers, heads = SIZES[size]
    fields = {"hidden_size": width, "num_hidden_layers": layers, "num_heads": heads, "mixer": mixer}
    return Config(vocab_size=vocab_size, **fields | changes)


def runs(settings: Settings, seeds: int) -> list[Run]:
    """A run a size, mixer and seed."""
    s, found = settings, []
    for size, rate in zip(s.sizes, s.rates, strict=True):
        training = Training(s.steps, rate, precision=s.precision, compile=s.compile, evaluations=min(4, s.steps))
        for mixer in s.mixers:
            model = model_of(size, mixer, s.vocab_size)
            for seed in range(seeds):
                about = {"size": size, "mixer": mixer, "seed": seed}
                found.append(Run("language", f"{size}/{mixer}/seed{seed}", about, s, model, training, s.tokens))
    return found


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None where the deadline came first."""
    task = Language(run.settings, run.about["seed"], place)
    found = train(run, task, place)
    return found and {**found, "epochs": run.training.steps * task.rows / task.cuts}
