"""Longer texts than in training: does a model trained on 512 or 2048 bytes use 32,768? (chapter 19)

Speeches of more than 30,000 bytes, byte by byte. In training each row of a batch walks through one speech after another
in windows of T bytes. Every window begins either with nothing, or with the state that the window before left, through
which no gradient flows: truncated backpropagation through time. What counts is the loss by position on whole speeches
that were held out (GLA paper, figure 5). Linear models that never saw the state of a long text may fail beyond the
length that they know, and states passed on may cure it (arXiv 2507.02782). A cache that grows cannot be passed on
likewise, so softmax attention has the first kind of window only.

Records have the loss of every speech, so that two models are compared speech by speech. The learning rate is chosen for
every mixer, in few steps of the shortest windows, on validation speeches: on these as a whole, but for softmax
attention on their first window, since far beyond it no rate is good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import Config, detach
from ..models.layer import LayerState
from . import texts
from ._rates import trained, trials
from .language import unigram
from .runs import Place, Run, Training, check_fields, dice, start_of
from .training import Task

__all__ = ["Length", "Settings", "carry_out", "runs"]


@dataclass(frozen=True)
class Settings:
    """The mixers to compare, and their training.

    Attributes:
        mixers: keys of :data:`gla_ref.models.mixers.MIXERS`.
        windows: bytes of a window in training.
        test_length: bytes of the held-out speeches that count; shorter ones are left out.
        test_speeches: how many, the first by name.
        vocab_size: 256, or more to leave some unused.
        width: of the residual stream.
        conv: whether mixers other than softmax attention have short convolutions.
        heads: of every mixer.
        layers: of every model.
        tokens: of a step.
        steps: of every run that is a result.
        rates: learning rates that are tried first.
        rate_steps: of a trial of a learning rate.
        precision: "bf16" or "fp32" in training.
    """

    mixers: tuple[str, ...] = ("gla", "mamba2", "retnet", "softmax")
    windows: tuple[int, ...] = (512, 2048)
    test_length: int = 32768
    test_speeches: int = 11  # of 13 held-out speeches, these are long enough
    vocab_size: int = 256
    width: int = 256
    conv: bool = True
    heads: int = 4
    layers: int = 6
    tokens: int = 65536
    steps: int = 500
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    rate_steps: int = 150
    precision: str = "bf16"

    def __post_init__(self):
        check_fields(self)
        if self.vocab_size < 256:
            raise ValueError(f"vocab_size: expected at least 256, one a byte, got {self.vocab_size}")
        if self.tokens < max(self.windows):
            raise ValueError(f"tokens: expected at least one window of {max(self.windows)}, got {self.tokens}")

    @classmethod
    def full(cls) -> Settings:
        """Minutes on a GPU."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, to see that it runs."""
        return cls(
            mixers=("gla", "softmax"), windows=(8, 16), test_length=64, test_speeches=2, width=16, heads=2, layers=1,
            tokens=32, steps=8, rates=(1e-2,), rate_steps=3, precision="fp32",
        )  # fmt: skip


class Length(Task):
    """Windows of the training speeches in order, and the loss by position of held-out ones."""

    def __init__(
        self, settings: Settings, T: int, passing: bool, steps: int, seed: int, place: Place, part: str = "test",
        judged: int | None = None,
    ):  # fmt: skip
        corpus = texts.load(place.texts, "speeches")
        self.window, self.passing, self.rows, self.device = T, passing, settings.tokens // T, place.device
        speeches = corpus.documents("training")
        self.training, self.part = torch.cat(speeches).to(place.device), part
        held_out = dict(zip([corpus.names[i] for i in corpus.places(part)], corpus.documents(part), strict=True))
        if part == "validation":  # all, as far as all reach
            n = min([judged or settings.test_length, *(len(x) - 1 for x in held_out.values())])
        else:
            n = settings.test_length
            held_out = {name: x for name, x in held_out.items() if len(x) > n}
            if len(held_out) < settings.test_speeches:
                raise ValueError(
                    f"test_speeches: expected at most {len(held_out)}, the held-out speeches of {n} bytes, "
                    f"got {settings.test_speeches}"
                )
            held_out = dict(sorted(held_out.items())[: settings.test_speeches])
        if not held_out:
            raise ValueError(f"texts: expected speeches of the part {part!r}, found none")
        self.names, self.T = list(held_out), n
        self.test = torch.stack([x[: n + 1] for x in held_out.values()]).to(place.device)
        self.starts, self.fresh = self.schedule([len(x) for x in speeches], steps, seed)
        self.fresh = self.fresh.to(place.device)

    def schedule(self, sizes: list[int], steps: int, seed: int) -> tuple[Tensor, Tensor]:
        """The start of each row's window in each step, and whether a speech begins there; `[steps, rows]` both.

        A row takes all speeches in an order of its own, then again in another. What is left of a speech behind its
        last whole window is not read.
        """
        begins = torch.tensor([0, *sizes]).cumsum(0).tolist()
        windows = [(size - 1) // self.window for size in sizes]
        if not any(windows):
            raise ValueError(f"windows: expected less than the longest speech, {max(sizes)} bytes, got {self.window}")
        starts, fresh = [], []
        for row in range(self.rows):
            rng, mine = dice("cpu", "length", seed, row), []
            while len(mine) < steps:
                for i in torch.randperm(len(sizes), generator=rng).tolist():
                    mine += [(begins[i] + w * self.window, w == 0) for w in range(windows[i])]
            starts.append([start for start, _ in mine[:steps]])
            fresh.append([new for _, new in mine[:steps]])
        return torch.tensor(starts).T.contiguous(), torch.tensor(fresh).T.contiguous()

    def loss(self, objective, step, state):
        """The loss of the step's windows, from the states of the windows before where these are passed on."""
        inside = torch.arange(self.window + 1, device=self.device)
        both = self.training[self.starts[step].to(self.device)[:, None] + inside].long()
        if not self.passing:
            return objective(both[:, :-1], both[:, 1:].contiguous())[0], None
        if state is not None:
            state = forget(state, self.fresh[step])
        loss, state = objective(both[:, :-1], both[:, 1:].contiguous(), state=state)
        return loss, detach(state)

    def evaluate(self, model) -> dict:
        """Mean loss in nats a byte: by speech, and by position 0 to 255, 256 to 511, 512 to 1023, ... of all."""
        n, losses = self.test.shape[1] - 1, []
        for speech in self.test:
            tokens, targets = speech[None, :-1].long(), speech[1:].long()
            x, _ = model.model(tokens)
            pieces = zip(x[0].split(8192), targets.split(8192), strict=True)
            parts = [F.cross_entropy(model.lm_head(a).float(), b, reduction="none") for a, b in pieces]
            losses.append(torch.cat(parts).double().cpu())
        losses = torch.stack(losses)  # [speeches, n]
        edges = [0, *(2**i for i in range(8, math.ceil(math.log2(n)) + 1) if 2**i < n), n]
        spans = list(zip(edges, edges[1:], strict=False))
        by_speech = dict(zip(self.names, losses.mean(1).tolist(), strict=True))
        late = {name: x[spans[-1][0] :].mean().item() for name, x in zip(self.names, losses, strict=True)}
        by_position = {str(b): losses[:, a:b].mean().item() for a, b in spans}
        return {
            "loss": losses.mean().item(),
            "bits a byte": losses.mean().item() / math.log(2),
            "by position": by_position,
            "by speech": by_speech,
            "last positions by speech": late,
        }

    def baselines(self) -> dict:
        """The loss by the training speeches' frequencies of bytes."""
        loss = unigram(self.training, self.test[:, 1:].flatten(), 256)
        return {"loss": loss, "bits a byte": loss / math.log(2), "chance": 8.0}


def forget(state: list[LayerState], fresh: Tensor) -> list[LayerState]:
    """The state without those rows whose next window begins a speech; `fresh` is `[rows]`."""

    def clear(x):
        if isinstance(x, tuple):
            return tuple(clear(y) for y in x)
        return x if x is None else x.masked_fill(fresh.view(-1, *[1] * (x.ndim - 1)), 0)

    return [LayerState(*clear(tuple(layer))) for layer in state]


def runs(settings: Settings, seeds: int) -> list[Run]:
    """First the trials of every mixer, then a run a mixer, window, seed, and with or without states passed on."""
    s, first, main = settings, [], []
    training = Training(s.steps, None, precision=s.precision, evaluations=min(2, s.steps))
    for mixer in s.mixers:
        conv = s.conv and mixer != "softmax"
        group = f"{mixer}{'-conv' if conv else ''}"
        model = Config(
            vocab_size=s.vocab_size, hidden_size=s.width, num_hidden_layers=s.layers, num_heads=s.heads, mixer=mixer,
            use_short_conv=conv, **start_of(mixer),
        )  # fmt: skip
        for T in sorted(s.windows):
            for passing in (False, True) if mixer != "softmax" else (False,):
                about = {"stage": "main", "mixer": mixer, "conv": conv, "window": T, "passing": passing}
                about |= {"judged": min(s.windows)} if mixer == "softmax" else {}
                name = f"main/{group}/{T}{'-passing' if passing else ''}"
                every = [
                    Run("length", f"{name}/seed{n}", {**about, "group": group, "seed": n}, s, model, training, s.tokens)
                    for n in range(seeds)
                ]
                first += trials(every[0], s.rates, s.rate_steps) if (T, passing) == (min(s.windows), False) else []
                main += every
    return first + main


def carry_out(run: Run, place: Place) -> dict | None:
    """Train and test; None if the deadline came first."""
    part = "validation" if run.about["stage"] == "rate" else "test"
    about = run.about
    what = run.settings, about["window"], about["passing"], run.training.steps, about["seed"]
    task = Length(*what, place, part, about.get("judged"))
    record = trained(run, task, place)
    return record and {**record, "epochs": run.training.steps * run.tokens / len(task.training)}
