"""GLA's gate, one change at a time: the GLA paper's table 4 on our texts (chapter 19b).

The base is GLA of the size "10M" with short convolutions: a gate for every channel, of rank 16, tau = 16, 4 heads. The
changes: no gate, a decay that no data change (RetNet's), one gate for every head, rank 4 and 64, tau 1 and 4, 1 and 8
heads of the same width together, no convolution, fla's epsilon in the norms. Two more mixers are compared with the
base: the Mamba-2-like one with the base's epsilon, which makes it start quietly, and with one that does not; and
softmax attention, which has no convolutions in :mod:`gla_ref.experiments.language`, without and with them. Everything
else, the order of the data included, is as there; the learning rate is chosen for every change. No full setting of it
has been run yet.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from . import language, texts
from ._rates import trials
from .runs import Place, Run, Training, check_fields, start_of

__all__ = ["CHANGES", "Settings", "carry_out", "runs"]

#: fields of the model's Config that differ from the base, by the change's name
CHANGES = {
    "base": {},
    "no gate": {"mixer": "linear"},
    "constant decay": {"mixer": "retnet"},
    "scalar gate": {"mixer": "scalar"},
    "rank 4": {"gate_rank": 4},
    "rank 64": {"gate_rank": 64},
    "tau 1": {"tau": 1.0},
    "tau 4": {"tau": 4.0},
    "1 head": {"num_heads": 1},
    "8 heads": {"num_heads": 8},
    "no convolution": {"use_short_conv": False},
    "epsilon 1e-6": {"norm_eps": 1e-6},
    "mamba2": {"mixer": "mamba2"},
    "mamba2, epsilon 1e-24": {"mixer": "mamba2", "norm_eps": 1e-24},
    "softmax": {"mixer": "softmax", "use_short_conv": False},
    "softmax with convolution": {"mixer": "softmax", **start_of("softmax")},
}


@dataclass(frozen=True)
class Settings:
    """What is compared, and on what.

    Attributes:
        changes: keys of :data:`CHANGES`.
        size: a key of :data:`gla_ref.experiments.language.SIZES`.
        corpus: "texts" or "speeches" of :mod:`gla_ref.experiments.texts`.
        vocab_size: tokens of that corpus.
        T: tokens of a sequence.
        tokens: of a step.
        conv: whether the base has short convolutions.
        steps: of every run that is a result.
        rates: learning rates that are tried first.
        rate_steps: of a trial of a learning rate.
        precision: "bf16" or "fp32" in training.
        compile: whether losses go through torch.compile.
    """

    changes: tuple[str, ...] = tuple(CHANGES)
    size: str = "10M"
    corpus: str = "texts"
    vocab_size: int = 8192
    T: int = 2048
    tokens: int = 65536
    conv: bool = True
    steps: int = 500
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    rate_steps: int = 150
    precision: str = "bf16"
    compile: bool = False

    def __post_init__(self):
        check_fields(self)
        texts.check_corpus(self.corpus)
        for name in self.changes:
            if name not in CHANGES:
                raise ValueError(f"changes: expected some of {', '.join(CHANGES)}, got {name!r}")
        if self.size not in language.SIZES:
            raise ValueError(f"size: expected one of {', '.join(language.SIZES)}, got {self.size!r}")
        if self.tokens < self.T:
            raise ValueError(f"tokens: expected at least one sequence of T = {self.T}, got {self.tokens}")

    @classmethod
    def full(cls) -> Settings:
        """Minutes on a GPU."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, to see that it runs."""
        shared = {f.name: getattr(language.Settings.tiny(), f.name) for f in fields(language.Settings)}
        shared = {name: x for name, x in shared.items() if name in {f.name for f in fields(cls)}}
        return cls(changes=("base", "tau 1"), size="tiny", **shared)


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First the trials of every change, then a run a change and seed."""
    s, first, main = settings, [], []
    training = Training(s.steps, None, precision=s.precision, compile=s.compile, evaluations=1)
    base = language.model_of(s.size, "gla", s.vocab_size, use_short_conv=s.conv)
    for change in s.changes:
        group = change.replace(" ", "-")
        about, model = {"stage": "main", "change": change, "group": group}, replace(base, **CHANGES[change])
        for seed in range(seeds):
            one = {**about, "seed": seed}
            main.append(Run("ablations", f"main/{group}/seed{seed}", one, s, model, training, s.tokens))
        first += trials(main[-1], s.rates, s.rate_steps)
    return first + main


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first."""
    return language.carry_out(run, place)
