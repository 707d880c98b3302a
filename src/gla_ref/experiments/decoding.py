"""What a token costs while a model writes: memory and milliseconds, after texts of three lengths (chapter 19).

Prices depend on sizes alone, so weights are random, and the state after T tokens is that after one with its cache
repeated. A step gives every sequence a token; "ms" is the time of a call from Python, "gpu ms" that of its kernels, and
"copies" that of those which join a token to a cache or to a convolution's past. No call changes the state that it is
given, so they copy the whole; room in a cache would save them.
"""

import time
from dataclasses import dataclass
from itertools import product

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..models import LanguageModel
from ..models.language_model import parts
from ..models.mixers import Cache
from .language import SIZES, model_of
from .runs import Place, Run, check_settings

__all__ = ["Settings", "carry_out", "runs"]


@dataclass(frozen=True)
class Settings:
    """The models to time, on a GPU that nothing else uses.

    Attributes:
        mixers, size: as in :mod:`gla_ref.experiments.language`.
        lengths: tokens before the first step.
        tokens: sequences that a step gives one token each.
        steps: that are timed.
    """

    mixers: tuple[str, ...] = ("softmax", "retnet", "mamba2", "gla", "gated_delta", "kda", "gla+softmax", "kda+softmax")
    size: str = "40M"
    lengths: tuple[int, ...] = (2048, 32768, 262144)
    tokens: int = 8
    steps: int = 20

    def __post_init__(self):
        check_settings(self)
        if self.size not in SIZES:
            raise ValueError(f"size: expected one of {', '.join(SIZES)}, got {self.size!r}")

    @classmethod
    def tiny(cls) -> "Settings":
        """Seconds on a CPU, to see that it runs."""
        return cls(mixers=("gla", "gla+softmax"), size="tiny", lengths=(8, 32), tokens=2, steps=2)


def runs(settings: Settings, seeds: int) -> list[Run]:
    """One for every mixer and length, however many seeds: prices have none."""
    s, every = settings, []
    for mixer, T in product(s.mixers, s.lengths):
        about = {"stage": "main", "mixer": mixer, "size": s.size, "T": T, "seed": 0}
        every.append(Run("decoding", f"main/{mixer}/{T}", about, s, model_of(s.size, mixer, 8192), None, s.tokens))
    return every


@torch.no_grad()
def carry_out(run: Run, place: Place) -> dict:
    """Time a model's steps; weights and cache are bfloat16 on a GPU.

    Returns:
        "ms", "gpu ms", "copies": milliseconds of a step; the last two are None on a CPU. "weights", "state" and, on a
        GPU, "peak": bytes.
    """
    device, steps = torch.device(place.device), run.settings.steps
    gpu = device.type == "cuda"
    model = LanguageModel(run.model).to(device, torch.bfloat16 if gpu else torch.float32)
    token = torch.zeros(run.tokens, 1, dtype=torch.int64, device=device)
    _, state = model(token)
    for i, layer in enumerate(state):
        if isinstance(layer.S, Cache):  # others do not grow
            state[i] = layer._replace(S=Cache(*(x.repeat(1, run.about["T"], 1, 1) for x in layer.S[:2]), None))
    owned = (x for layer, own in zip(state, run.model.layers(), strict=True) for _, x, _ in parts(layer, own))
    record = {name: sum(x.nbytes for x in xs) for name, xs in (("weights", model.parameters()), ("state", owned))}

    def step(times: int) -> float:
        """Milliseconds of a step, each after the one before."""
        nonlocal state
        began = time.perf_counter()
        for _ in range(times):
            _, state = model(token, state=state)
        if gpu:
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - began) / times

    step(3)  # kernels are made
    record |= {"ms": step(steps), "gpu ms": None, "copies": None}
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step(steps)
        each = [(e, e.self_device_time_total / 1e3 / steps) for e in seen.key_averages()]
        kernels = sum(ms for e, ms in each if e.device_type == DeviceType.CUDA)
        copies = sum(ms for e, ms in each if e.key == "aten::cat")
        record |= {"gpu ms": kernels, "copies": copies, "peak": torch.cuda.max_memory_allocated(device)}
    return record
