"""The parts of an experiment: settings, checked, and runs, with all that their numbers depend on (chapter 19)."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models import MIXERS, Config
from ..models.config import check_fields

__all__ = ["HYBRIDS", "Place", "Run", "Training", "check_settings", "dice", "mixer_of", "quiet_start", "start_of"]

#: models with two mixers, three layers of the first to one of the second
#:
#: :meta hide-value:
HYBRIDS = {"gla+softmax": ("gla", "softmax"), "kda+softmax": ("kda", "softmax")}


@dataclass(frozen=True)
class Training:
    """How a model is trained: AdamW, warm-up, then a cosine to a tenth of the rate.

    Attributes:
        steps: optimiser steps.
        learning_rate: the largest; None: an earlier stage of the experiment chooses it.
        warmup: share of the steps in which the rate rises.
        weight_decay: of matrices; norms, biases and other vectors have none.
        clip: largest norm of the gradient.
        evaluations: how often the model is evaluated, evenly, the last time at the end.
        precision: "bf16": products by autocast, weights in float32; or "fp32".

    Raises:
        TypeError, ValueError: a field does not fit; the message names it.
    """

    steps: int
    learning_rate: float | None
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 4
    precision: str = "bf16"

    def __post_init__(self):
        check_fields(self)
        if self.warmup > 1:
            raise ValueError(f"warmup: expected a share of the steps, at most 1, got {self.warmup}")
        if self.evaluations > self.steps:
            raise ValueError(f"evaluations: expected at most steps = {self.steps}, got {self.evaluations}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision: expected 'bf16' or 'fp32', got {self.precision!r}")


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        experiment: its key in :data:`gla_ref.experiments.EXPERIMENTS`.
        name: what no other run of the experiment is called.
        about: what tells it from the others, as a figure selects it: "seed" among it, and, where learning rates are
            chosen, "stage" ("rate" or "main") and "group", whose runs share one.
        settings: of the experiment.
        model: the model's sizes.
        training: how it is trained; None: it is not.
        tokens: of one step.
    """

    experiment: str
    name: str
    about: dict
    settings: object
    model: Config
    training: Training | None
    tokens: int

    def fingerprint(self) -> dict:
        """All that the run's numbers depend on, as JSON has it: equal fingerprints, equal numbers."""
        parts = {name: getattr(self, name) for name in ("settings", "model", "training")}
        parts = {name: x and dataclasses.asdict(x) for name, x in parts.items()}
        return json.loads(json.dumps({"about": self.about, "tokens": self.tokens} | parts))

    def file(self, folder: Path, suffix: str) -> Path:
        """A file of this run's own."""
        return folder / self.experiment / (self.name.replace("/", "-") + suffix)


@dataclass(frozen=True)
class Place:
    """The place where a run is carried out, which its numbers must not depend on but for rounding.

    Attributes:
        device: "cpu", "cuda" or "cuda:1".
        folder: of checkpoints.
        deadline: `time.time()` at which a run stops, with a checkpoint; None: never.
        save_every: seconds between checkpoints.
        texts: folder of prepared texts, which language models need.
        records: earlier records of the experiment.
        progress: is told (done, total) after every step.
        interrupt: its `value` says whether a signal asked for an end; None: none can.
        compile: whether models and losses go through torch.compile in training.
    """

    device: str
    folder: Path
    deadline: float | None = None
    save_every: float = 60.0
    texts: Path | None = None
    records: tuple[dict, ...] = ()
    progress: Callable[[int, int], None] = lambda done, total: None
    interrupt: object = None
    compile: bool = False

    def is_late(self) -> bool:
        """Whether a run should stop, with a checkpoint."""
        stopped = self.interrupt is not None and self.interrupt.value
        return stopped or (self.deadline is not None and time.time() >= self.deadline)


def check_settings(settings) -> None:
    """Check an experiment's settings: every field by its annotation, and the names of mixers.

    Raises:
        TypeError, ValueError: a field does not fit; the message names it.
    """
    check_fields(settings)
    for name in settings.mixers:
        mixer_of(name, 1)


def mixer_of(name: str, layers: int) -> str | tuple[str, ...]:
    """The field `mixer` of a model's Config: in a hybrid each fourth layer differs, or the last one of fewer than four.

    Raises:
        ValueError: there is no such mixer or hybrid.
    """
    if name in MIXERS:
        return name
    if name not in HYBRIDS:
        raise ValueError(f"mixers: expected some of {', '.join([*MIXERS, *HYBRIDS])}, got {name!r}")
    most, fourth = HYBRIDS[name]
    period = min(4, layers)
    return tuple(fourth if i % period == period - 1 else most for i in range(layers))


def start_of(mixer: str) -> dict:
    """Fields of a model's Config by which a small model with convolutions begins to learn (chapter 19).

    A head's output is small at first, and the usual epsilon of its norm, 1e-6, would swallow it. Softmax attention has
    no such norm; it needs PyTorch's larger convolutions.
    """
    return {"norm_eps": 1e-12} | ({"conv_range": None} if mixer == "softmax" else {})


def quiet_start(mixer: str) -> dict:
    """Fields of a model's Config by which every mixer adds next to nothing before the first step (chapter 19).

    W_O is drawn fifty times smaller than other weights. The epsilon of the heads' norms is far below any head's output:
    a larger one would quieten Mamba-2-like layers, whose outputs are small, even more. Softmax attention normalises
    its queries and keys.
    """
    normalised = "softmax" in HYBRIDS.get(mixer, [mixer])
    return start_of(mixer) | {"norm_eps": 1e-24, "output_range": 4e-4, "qk_norm": normalised}


def dice(device: torch.device | str, *what) -> torch.Generator:
    """Random numbers that depend on `what` alone, so that a step's data are the same whenever it is made."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
