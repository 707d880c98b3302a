"""Training that can be interrupted: all that the next step depends on is in the checkpoint (chapter 19).

On a CPU an interrupted run ends with the same numbers to the last bit, as the tests show. On a GPU that has not been
tried: there PyTorch's own gradients of embeddings may add in another order from run to run.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..models import LanguageModel
from .runs import Place, Run

__all__ = ["Task", "compile_parts", "share_of_rate", "train"]

POINTS = 50  # of a curve
LEARNED = 0.98  # share of the loss without learning: a model above it is at chance
PROGRESS, PARTS = ("step", "seconds", "curve", "norms", "evaluations", "diverged"), ("model", "optimizer", "scheduler")
SAVED = {*PROGRESS, *PARTS, "total", "rng", "cuda_rng", "fingerprint"}  # in a checkpoint


class Task(ABC):
    """A task to learn. The data of a step follow from its number and the run's seed alone: no reader has a position.

    Attributes:
        T: tokens of the longest sequence, for the size of a state that grows.
        part: "test", or "validation" for runs that choose a learning rate.
    """

    T: int
    part: str = "test"

    @abstractmethod
    def loss(self, model: LanguageModel, step: int) -> Tensor:
        """A model's loss of a step's batch."""

    @abstractmethod
    def evaluate(self, model: LanguageModel) -> dict:
        """Scores of a model on data that training never sees; numbers or dictionaries of numbers.

        "loss" among them, in nats, by which a learning rate is chosen.
        """

    @abstractmethod
    def baselines(self) -> dict:
        """Scores of answers that need no model; "loss" among them, the loss of a model that learned nothing."""


def compile_parts(model: LanguageModel) -> None:
    """Compile a model's blocks and the sum of its losses: one compilation serves all layers.

    Shapes are fixed: every other one is compiled anew.
    """
    for block in model.model.layers:
        block.compile(dynamic=False)
    model._summed = torch.compile(model._summed, dynamic=False)


def optimizer_of(model: nn.Module, run: Run, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    training, parameters = run.training, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def share_of_rate(step: int, steps: int, warmup: float) -> float:
    """The share of the learning rate in step 0, 1, ...: up in a line, then half a cosine down to a tenth."""
    rise = max(1, round(steps * warmup))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(run: Run, task: Task, place: Place) -> dict | None:
    """Train a model from its checkpoint, or from the start where there is none.

    Returns:
        None where the deadline came first: the checkpoint is written then, and the same call goes on. Else
        "curve": [steps done, mean loss since the last point], ...; "norms": mean norms of the gradient, likewise;
        "evaluations": a "step" and what the task says, ...;
        "diverged": whether the loss stopped being a number; "seconds": of training and evaluation; "compiled": whether
        by torch.compile; "learning rate"; "parameters"; "state", its size in numbers; "baselines"; "data", which part
        was evaluated; "at chance", whether the loss ends where that of a model without any learning is.

    Raises:
        ValueError: the checkpoint belongs to other settings, or cannot be read; the message names the file.
    """
    device = torch.device(place.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(run.about["seed"])
        trainer = _Trainer(run, task, place)
        trainer.restore()
        return trainer.go()


class _Trainer:
    def __init__(self, run: Run, task: Task, place: Place):
        self.run, self.task, self.place, self.device = run, task, place, torch.device(place.device)
        self.model = LanguageModel(run.model).to(self.device)
        self.optimizer = optimizer_of(self.model, run, self.device)
        shares = partial(share_of_rate, steps=run.training.steps, warmup=run.training.warmup)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, shares)
        self.file = run.file(place.folder, ".pt")
        self.step, self.seconds = 0, 0.0
        self.curve, self.norms, self.evaluations, self.diverged = [], [], [], False
        self.baselines = task.baselines()
        # loss and norm since the curve's last point, where a GPU is waited for
        self.total = torch.zeros(2, device=self.device)
        if place.compile:
            torch.compiler.reset()  # it stops compiling, unseen, after eight models in one process
            compile_parts(self.model)

    def restore(self) -> None:
        """Go on where the checkpoint says."""
        if not self.file.exists():
            return
        try:
            saved = torch.load(self.file, map_location="cpu", weights_only=True)
            missing = SAVED - saved.keys()
        except Exception as reason:  # there are many kinds, and PyTorch advises to trust the file
            raise _unreadable(self.file, type(reason).__name__) from None
        if missing:
            raise _unreadable(self.file, f"one without {', '.join(sorted(missing))}")
        if saved["fingerprint"] != self.run.fingerprint():
            raise ValueError(
                f"settings: expected those of the checkpoint {self.file}, got others; remove it to start anew"
            )
        for name in PARTS:
            getattr(self, name).load_state_dict(saved[name])
        self.total.copy_(saved["total"])
        for name in PROGRESS:
            setattr(self, name, saved[name])
        torch.set_rng_state(saved["rng"])
        if self.device.type == "cuda" and saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"], self.device)

    def save(self) -> None:
        """Replace the checkpoint in one step of the file system: there is a whole one at every moment."""
        cuda = self.device.type == "cuda"
        saved = {name: getattr(self, name) for name in (*PROGRESS, "total")}
        saved |= {name: getattr(self, name).state_dict() for name in PARTS}
        saved |= {"rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state(self.device) if cuda else None}
        saved["fingerprint"] = self.run.fingerprint()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save(saved, part)
        os.replace(part, self.file)

    def go(self) -> dict | None:
        """Steps until the end, the deadline, or a loss that is no number."""
        steps, began = self.run.training.steps, time.time()
        saved_at, before = began, self.seconds

        def clock() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds = before + time.time() - began

        while self.step < steps and not self.diverged:
            self.one()
            self.place.progress(self.step, steps)
            late = self.place.is_late()
            if late or time.time() - saved_at >= self.place.save_every or self.step == steps:
                clock()
                self.save()
                saved_at = time.time()
            if late and self.step < steps:
                return None
        clock()
        return {name: getattr(self, name) for name in ("curve", "norms", "evaluations", "diverged")} | {
            "seconds": round(self.seconds, 3),
            "compiled": self.place.compile,
            "learning rate": self.run.training.learning_rate,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "state": self.run.model.state_size(self.task.T),
            "baselines": self.baselines,
            "data": self.task.part,
            "at chance": self.diverged or self.curve[-1][1] >= LEARNED * self.baselines["loss"],
        }

    def one(self) -> None:
        """One step, and what is due behind it."""
        training = self.run.training
        with torch.autocast(self.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
            loss = self.task.loss(self.model, self.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.total += torch.stack([loss.detach(), norm])
        self.step += 1
        before, point = ((n * POINTS) // training.steps for n in (self.step - 1, self.step))
        if point > before or self.step == training.steps:
            since = self.step - (self.curve[-1][0] if self.curve else 0)
            mean, norm = (self.total / since).tolist()
            self.diverged = not math.isfinite(mean)
            self.curve.append([self.step, None if self.diverged else mean])  # JSON knows no NaN
            self.norms.append([self.step, norm if math.isfinite(norm) else None])
            self.total.zero_()
        before, now = ((n * training.evaluations) // training.steps for n in (self.step - 1, self.step))
        if now > before and not self.diverged:
            self.model.eval()
            # without autocast: in float32. Texts end in pieces of any length, which are not worth compiling
            eager = torch.compiler.set_stance("force_eager") if self.place.compile else nullcontext()
            with torch.no_grad(), eager:
                self.evaluations.append({"step": self.step, **self.task.evaluate(self.model)})
            self.model.train()


def _unreadable(file: Path, got: str) -> ValueError:
    return ValueError(f"folder: expected a checkpoint of these programs in {file}, got {got}; remove it to start anew")
