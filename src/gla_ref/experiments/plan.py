"""The grid of all runs, with the minutes that each should take, in chunks that fit one command (chapter 19).

Predicted, not measured: from the numbers of parameters and tokens, and from what one H200 is assumed to sustain in such
small models. One number is measured: a step of the smallest models, several of which share a GPU. Trials of learning
rates beyond a grid's edge are not in it, at most two of each group. Records have the seconds that runs took; compare
before a long grid is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from ..models import Config
from ..models.language_model import Block
from . import EXPERIMENTS
from .runs import Run

__all__ = ["Chunk", "Prediction", "chunks", "jobs", "predict", "presets", "table"]

# Assumed of one H200: a quarter of what large bf16 products reach, and two thirds of its memory's rate
FLOP_S, BYTES_S = 2.0e14, 3.3e12
# of a block, forward and backward, without fusion: some 120 passes over [tokens, width] in 2 to 4 bytes
BLOCK_BYTES = 480
LOGIT_BYTES = 24  # of a logit: made, widened, exponentiated, and their gradients
STEP_S, LAYER_S, CONV_S, LOOP_S = 5e-3, 3e-3, 1e-3, 4e-3  # of Python and launches; LOOP: a reference, chunk by chunk
SHARED_S = 5.0e-3  # GPU seconds of a step, at least: 18 MQAR runs of 4,000 steps, 14 at once, took 364 s on an H100
START_S = 6.0  # of a run: its model, and kernels compiled for shapes that no run had before
SEARCH_S = 250.0  # of fla's operators, forward and backward, for one width
SMALL = ("live", "epsilon", "tiny")  # settings for a CPU
ANSWERS = {"mqar": 0.1, "recall": 0.06}  # share of tokens that have logits; of the others: all
JOBS = 14  # processes side by side at most: a host has 16 cores
LANES = 2  # processes for each that a GPU could keep busy, so that starts and evaluations leave no gap


@dataclass(frozen=True)
class Prediction:
    """Seconds of a run.

    Attributes:
        gpu: in which the GPU works.
        host: in which one CPU core launches.
    """

    gpu: float
    host: float


@dataclass(frozen=True)
class Chunk:
    """Runs for one command.

    Attributes:
        experiment: whose.
        number: among its chunks, from 1.
        runs: in order.
        jobs: side by side.
        minutes: predicted, on the clock.
    """

    experiment: str
    number: int
    runs: tuple[Run, ...]
    jobs: int
    minutes: float


@cache
def _parameters(config: Config) -> tuple[int, int]:
    """Of the blocks, and of the last matrix."""
    with torch.device("meta"):
        block = Block(config)
    body = config.num_hidden_layers * sum(p.numel() for p in block.parameters())
    return body, config.vocab_size * config.hidden_size


def predict(run: Run) -> Prediction:
    """Seconds of a run on one H200, from counts and the assumptions of this module."""
    (body, head), m = _parameters(run.model), run.model
    share = ANSWERS.get(run.experiment, 1.0)
    again = 4 / 3 if run.about.get("checkpointing") else 1.0
    flops = 6 * run.tokens * (again * body + share * head)
    moved = again * run.tokens * m.num_hidden_layers * m.hidden_size * BLOCK_BYTES
    moved += share * run.tokens * m.vocab_size * LOGIT_BYTES
    gpu = flops / FLOP_S + moved / BYTES_S
    gpu = gpu if run.training is None else max(gpu, SHARED_S)
    host = STEP_S + m.num_hidden_layers * (LAYER_S + CONV_S * m.use_short_conv + LOOP_S * (m.mixer == "gated_delta"))
    if run.training is None:  # throughput: every length, its warm-up, and the operator beside
        steps = 1.5 * len(run.settings.lengths) * (run.settings.repeats + 2)
        start = 3 * START_S + SEARCH_S * (run.about["contender"] == "fla")
    else:
        steps, start = 1.05 * run.training.steps, START_S  # evaluations
    return Prediction(steps * gpu, steps * max(host, gpu) + start)


def jobs(runs: list[tuple[Run, Prediction]]) -> int:
    """How many share a GPU: as many as keep it busy while each waits for its own Python; timings share it with none."""
    if any(run.training is None for run, _ in runs):
        return 1
    idle = sum(p.host for _, p in runs) / sum(p.gpu for _, p in runs)
    return max(1, min(JOBS, len(runs), round(LANES * idle)))


def minutes(runs: list[tuple[Run, Prediction]]) -> float:
    """On the clock: neither less than the GPU's work nor than the longest line of Python."""
    host = max(sum(p.host for _, p in runs) / jobs(runs), max(p.host for _, p in runs))
    return max(sum(p.gpu for _, p in runs), host) / 60


def chunks(experiment: str, seeds: int, at_most: float = 8.0, settings=None) -> list[Chunk]:
    """An experiment's runs, in order, in chunks of so many predicted minutes.

    Args:
        experiment: a key of :data:`gla_ref.experiments.EXPERIMENTS`.
        seeds: of every run that a figure compares.
        at_most: minutes of a chunk; a single run may take longer.
        settings: of the experiment; None: the full ones.
    """
    module = EXPERIMENTS[experiment]
    runs = module.runs(settings or module.Settings.full(), seeds)
    groups: list[list[tuple[Run, Prediction]]] = []
    # what chooses a learning rate is finished before others need it
    for _, stage in groupby(runs, lambda run: run.training is not None and run.training.learning_rate is None):
        groups.append([])
        for run in stage:
            one = (run, predict(run))
            if groups[-1] and minutes([*groups[-1], one]) > at_most:
                groups.append([])
            groups[-1].append(one)
    numbered = enumerate(groups, 1)
    return [Chunk(experiment, i, tuple(run for run, _ in g), jobs(g), minutes(g)) for i, g in numbered]


def presets(module) -> list[str]:
    """Names of an experiment's settings, the full ones first."""
    return [name for name in ("full", "overwrite", "wide", *SMALL) if hasattr(module.Settings, name)]


def table(seeds: int, at_most: float = 8.0) -> str:
    """The whole grid in words: a line a chunk, with its command."""
    rows, total, count = [], 0.0, 0
    grid = [(experiment, preset) for experiment, module in EXPERIMENTS.items() for preset in presets(module)]
    for experiment, preset in grid:
        settings = getattr(EXPERIMENTS[experiment].Settings, preset)()
        for chunk in chunks(experiment, seeds, at_most, settings) if preset not in SMALL else ():
            seconds = [predict(run).host for run in chunk.runs]
            what = experiment if preset == "full" else f"{experiment} --preset {preset}"
            command = f"python -m gla_ref.experiments {what} --device cuda --seeds {seeds} --chunk {chunk.number}"
            rows.append(
                f"{chunk.minutes:6.1f} min  {len(chunk.runs):3} runs of {min(seconds):4.0f} to {max(seconds):4.0f} s, "
                f"{chunk.jobs} side by side   {command}"
            )
            total, count = total + chunk.minutes, count + len(chunk.runs)
    head = f"{count} runs, {total:.0f} minutes of one H200, predicted from counts and assumed rates, not measured"
    return "\n".join([head, *rows])
