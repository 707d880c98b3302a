"""A training step of the paper's 340M and 1.3B models: time, memory, the operator's share (chapter 17).

Forward, loss, backward and AdamW, at equal tokens and growing length (GLA paper, figure 6): our model with its kernels,
the same with its blocks and its loss compiled by PyTorch, flash-linear-attention's GLAForCausalLM with the same
weights, and ours with softmax attention by PyTorch's own scaled_dot_product_attention. The operator is timed
alone, forward and backward at the step's shapes; its share is that time, times the layers, of the step's. One more step
tells by profiler where the GPU's time goes. Weights are in float32, products in bfloat16 by autocast, for all of them.

fla's operators search for their tiles in their first call, for minutes; first calls are reported apart, and how many
kernels Triton's cache held before them. A contender that is not installed, or does not fit, is recorded as refusing,
with its reason. fla's models need transformers==5.6.2.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import FORMS
from ..models import Config, LanguageModel, _forms
from ..models.layer import START, LayerState
from ..models.mixers import SoftmaxAttention, rotate
from .runs import Place, Run, check_fields, dice
from .training import compile_parts

__all__ = ["CONTENDERS", "SIZES", "SdpaAttention", "Settings", "carry_out", "runs"]

#: fields of Config as fla has them; heads of softmax attention, of 128 numbers each, which PyTorch's kernels take; and
#: whether blocks are computed again in the backward pass
#:
#: :meta hide-value:
SIZES = {
    "tiny": ({"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}, 4, True),
    "340M": ({"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4}, 8, False),
    "1.3B": ({"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4}, 16, True),
}
#: ours, ours compiled, fla's, and ours with PyTorch's attention
CONTENDERS = ("gla", "gla_compiled", "fla", "sdpa")
CALLS = 10  # of the operator in a row
PRODUCTS = re.compile("gemm|nvjet|cutlass|xmma")  # kernels of matrix products, by their names
LONGEST = 8  # kernels that a profile names


@dataclass(frozen=True)
class Settings:
    """The models to time, and how.

    Attributes:
        sizes: keys of :data:`SIZES`.
        contenders: some of "gla" (ours), "gla_compiled", "fla", "sdpa"; the compiled one only if asked for.
        lengths: tokens of a sequence.
        tokens: of a step, a multiple of every length.
        repeats: steps that are timed; the median counts.
        precision: "bf16" or "fp32".
    """

    sizes: tuple[str, ...] = ("340M", "1.3B")
    contenders: tuple[str, ...] = ("gla", "fla", "sdpa")
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    tokens: int = 32768
    repeats: int = 6
    precision: str = "bf16"

    def __post_init__(self):
        check_fields(self)
        for name, choices in (("sizes", tuple(SIZES)), ("contenders", CONTENDERS)):
            for x in getattr(self, name):
                if x not in choices:
                    raise ValueError(f"{name}: expected some of {', '.join(choices)}, got {x!r}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision: expected 'bf16' or 'fp32', got {self.precision!r}")
        for T in self.lengths:
            if self.tokens % T:
                raise ValueError(f"tokens: expected a multiple of every length, got {self.tokens} for {T}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @classmethod
    def full(cls) -> Settings:
        """The paper's figure."""
        return cls()

    @classmethod
    def tiny(cls) -> Settings:
        """Seconds on a CPU, to see that it runs."""
        return cls(
            sizes=("tiny",), contenders=("gla", "sdpa"), lengths=(16, 32), tokens=32, repeats=2, precision="fp32"
        )


class SdpaAttention(SoftmaxAttention):
    """Our softmax mixer on PyTorch's own attention; for training, without a state."""

    def forward(self, x: Tensor, state: LayerState = START, cu_seqlens: Tensor | None = None, pieces=None):
        """`[B, T, d]` to `[B, T, d]`."""
        if pieces is not None:
            return super().forward(x, state, cu_seqlens, pieces)  # which refuses them
        (q, k, v), conv = self.project(x, state.conv, cu_seqlens)
        t = torch.arange(x.shape[1], device=x.device)
        o = sdpa(rotate(q, t), rotate(k, t), v)
        return self.o_proj(o.flatten(2)), LayerState(None, conv)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `[B, T, H, D]`."""
    return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True).transpose(1, 2)


def model_and_loss(who: str, config: Config, checkpointing: bool, device: str) -> tuple[torch.nn.Module, Callable]:
    """A contender's model, and its loss of tokens `[B, T]`; all but "sdpa" have the same weights.

    Raises:
        ImportError: fla is not installed.
    """
    torch.manual_seed(0)
    with torch.device(device):
        ours = LanguageModel(config)
        if who == "sdpa":
            for block in ours.model.layers:
                block.attn = SdpaAttention(config)
            ours.reset_parameters()
    if who != "fla":
        ours.model.gradient_checkpointing = checkpointing
        if who == "gla_compiled":
            compile_parts(ours)
        return ours, lambda tokens: ours.loss(tokens)[0]
    # fla hands calls to other libraries where they are installed: here its own kernels are measured
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    from fla.models import GLAConfig, GLAForCausalLM

    with torch.device(device):
        theirs = GLAForCausalLM(GLAConfig(**config.to_dict()))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    theirs.train()
    if checkpointing:
        theirs.gradient_checkpointing_enable()
    return theirs, lambda tokens: theirs(tokens, labels=tokens, use_cache=False).loss


def operator(who: str, config: Config, B: int, T: int, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """A function that runs a contender's operator once, forward and backward, at a layer's shapes."""
    rng, H, soft = dice(device, "throughput", who), config.num_heads, who == "sdpa"
    K, V = (config.hidden_size // H,) * 2 if soft else (config.key_size // H, config.value_size // H)

    def normal(D: int) -> Tensor:
        return torch.randn(B, T, H, D, generator=rng, device=device).to(dtype).requires_grad_()

    q, k, v = normal(K), normal(K), normal(V)
    if soft:
        leaves, call = (q, k, v), sdpa
    else:
        g = (F.logsigmoid(normal(K).detach().float()) / config.tau).to(dtype).requires_grad_()
        leaves = q, k, v, g
        if who == "fla":
            from fla.ops.gla import chunk_gla

            call = chunk_gla
        else:
            call = FORMS["gla"][_forms.choose("gla", q.device, dtype, T, True)]
    do = torch.randn(B, T, H, V, generator=rng, device=device).to(dtype)

    def once() -> None:
        o = call(*leaves)
        torch.autograd.grad(o[0] if isinstance(o, tuple) else o, leaves, do)

    return once


def milliseconds(call: Callable[[], object], repeats: int, calls: int, device: str) -> tuple[float, list[float]]:
    """The first call in seconds; then, after one more, `repeats` times the milliseconds of one of `calls` in a row.

    By the clock on the wall: where Python is slower than the GPU it shows, but the wait for the end is shared by a row.
    """
    times = []
    for n in (1, 1, *[calls] * repeats):
        began = time.perf_counter()
        for _ in range(n):
            call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) / n)
    return round(times[0], 2), [round(1e3 * t, 4) for t in times[2:]]


def kernels(call: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds of every kernel that one call runs on a GPU, summed by name; empty on a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize(device)
    kernels = [x for x in profile.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
    return {x.key: x.self_device_time_total / 1e3 for x in kernels}


def profiled(step: dict[str, float], own: dict[str, float]) -> dict:
    """The GPU's milliseconds of a step, by where they go.

    Args:
        step: of every kernel of the step, by name.
        own: the same of the operator alone. Kernels of both are the operator's, but for PyTorch's own, which copy or
            add anywhere.

    Returns:
        {"operator", "products", "rest"}: those that multiply matrices outside the operator, and all others; "longest":
        names and times of the rest's longest kernels.
    """
    parts: dict[str, dict[str, float]] = {"operator": {}, "products": {}, "rest": {}}
    for name, ms in step.items():
        mine = name in own and "at::native" not in name
        parts["operator" if mine else "products" if PRODUCTS.search(name) else "rest"][name] = ms
    longest = sorted(parts["rest"].items(), key=lambda x: -x[1])[:LONGEST]
    sums = {part: round(sum(found.values()), 3) for part, found in parts.items()}
    return sums | {"longest": [[name[:120], round(ms, 3)] for name, ms in longest]}


def measure(run: Run, T: int, model, loss, place: Place) -> dict:
    """The record of one length: times of step and operator, the most memory, and the loss before any step."""
    s, who, device = run.settings, run.about["contender"], place.device
    tokens = torch.randint(
        run.model.vocab_size, (s.tokens // T, T), generator=dice(device, "throughput tokens", T), device=device
    )
    cuda = torch.device(device).type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=cuda)
    losses = []

    def step() -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=s.precision == "bf16"):
            value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.detach())

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    first, times = milliseconds(step, s.repeats, 1, device)
    memory = torch.cuda.max_memory_allocated(device) if cuda else None
    once = operator(who, run.model, s.tokens // T, T, s.dtype, device)
    first_operator, operator_times = milliseconds(once, s.repeats, CALLS, device)
    ms, operator_ms = statistics.median(times), statistics.median(operator_times)
    profile = profiled(kernels(step, device), kernels(once, device)) if cuda else None
    return {
        "T": T,
        "ms": ms,
        "all ms": times,
        "first call s": first,
        "tokens a second": round(1e3 * s.tokens / ms),
        "memory bytes": memory,
        "operator ms": operator_ms,
        "operator first call s": first_operator,
        "operator share": round(operator_ms * run.model.num_hidden_layers / ms, 4),
        "profile ms": profile,
        "loss": losses[0].item(),
    }


def runs(settings: Settings, seeds: int) -> list[Run]:
    """A run a size and contender: all lengths in one process, so that fla searches once. Seeds change nothing."""
    runs = []
    for size in settings.sizes:
        fields, heads, checkpointing = SIZES[size]
        for who in settings.contenders:
            about = {"size": size, "contender": who, "checkpointing": checkpointing, "seed": 0}
            config = Config(**fields | ({"mixer": "softmax", "num_heads": heads} if who == "sdpa" else {}))
            runs.append(Run("throughput", f"{size}/{who}", about, settings, config, None, settings.tokens))
    return runs


def compiled_kernels() -> int:
    """The number of compiled kernels in Triton's cache."""
    folder = Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton/cache")
    )
    return len(list(folder.glob("*"))) if folder.is_dir() else 0


def carry_out(run: Run, place: Place) -> dict | None:
    """Measure; what is missing, and a length that does not fit, are results too; None if time was up in between."""
    began, s, compiled = time.time(), run.settings, compiled_kernels()
    try:
        model, loss = model_and_loss(run.about["contender"], run.model, run.about["checkpointing"], place.device)
    except ImportError as reason:
        return {"refused": f"{type(reason).__name__}: {reason}", "lengths": [], "seconds": 0.0}
    lengths: list[dict] = []
    for i, T in enumerate(s.lengths):
        if place.is_late():
            return None
        try:
            lengths.append(measure(run, T, model, loss, place))
        except torch.OutOfMemoryError as reason:
            lengths.append({"T": T, "refused": str(reason).splitlines()[0]})
            model.zero_grad(set_to_none=True)
        gc.collect()  # a length's optimiser, before the next has its own
        place.tell(i + 1, len(s.lengths))
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "refused": None,
        "compiled before": compiled,
        "lengths": lengths,
        "parameters": parameters,
        "seconds": round(time.time() - began, 3),
    }
