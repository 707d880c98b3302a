"""GLA's gate, one change at a time: the GLA paper's table 4 on our texts (chapter 19).

The base is GLA of the size "10M" with short convolutions and a quiet start: a gate for every channel, of rank 16,
tau = 16, 4 heads. The changes: no gate, a decay that no data change (RetNet's), one gate for every head, no
convolution, tau 1, rank 4, and three starts that are less quiet: with a small epsilon in the norms, with GPT-2's
residual scaling (a W_O of 0.02 / (2 layers)^0.5, Radford et al. 2019), and fla's. Without convolutions GLA is compared
with linear attention, which has no gate, with the quiet start and with fla's: that is fla's issue 696. Softmax
attention, which has no convolutions in :mod:`gla_ref.experiments.language`, is compared without and with them.
Everything else, the order of the data included, is as there, but for fewer steps. Every change has trials of its own;
with the full settings all chose the same learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from . import language, texts
from ._rates import with_trials
from .runs import Place, Run, check_fields, quiet_start, start_of

__all__ = ["CHANGES", "Settings", "carry_out", "runs"]

FLA_START = {"use_short_conv": False, "output_range": None, "norm_eps": 1e-6}  # its defaults
#: fields of the model's Config that differ from the base, by the change's name
CHANGES = {
    "base": {},
    "no gate": {"mixer": "linear"},
    "constant decay": {"mixer": "retnet"},
    "scalar gate": {"mixer": "scalar"},
    "no convolution": {"use_short_conv": False},
    "no convolution, no gate": {"use_short_conv": False, "mixer": "linear"},
    "fla's start": FLA_START,
    "fla's start, no gate": {**FLA_START, "mixer": "linear"},
    "loud start": {"output_range": None, **start_of("gla")},
    "residual scaling": {"output_range": 5.3e-3},  # 0.02 / 14^0.5: seven layers write to the stream twice
    "softmax": {"mixer": "softmax", "use_short_conv": False},
    "softmax with convolution": {"mixer": "softmax", **quiet_start("softmax")},
    "tau 1": {"tau": 1.0},
    "rank 4": {"gate_rank": 4},
}


@dataclass(frozen=True)
class Settings:
    """The changes to compare, and their training.

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
    """

    changes: tuple[str, ...] = tuple(CHANGES)
    size: str = "10M"
    corpus: str = "texts"
    vocab_size: int = 8192
    T: int = 2048
    tokens: int = 65536
    conv: bool = True
    steps: int = 300
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    rate_steps: int = 100
    precision: str = "bf16"

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
    base = language.model_of(settings.size, "gla", settings.vocab_size, use_short_conv=settings.conv)
    columns = {}
    for change in settings.changes:
        group = change.replace(" ", "-")
        columns[group] = {"change": change, "group": group}, replace(base, **CHANGES[change])
    return with_trials("ablations", settings, columns, seeds)


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first."""
    return language.carry_out(run, place)
