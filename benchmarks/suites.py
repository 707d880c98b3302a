"""Cases to measure: a case's shape, its random inputs, its floors in bytes and FLOPs, and suites of cases by name.

To add a suite, write a function that returns cases, and list it in SUITES. To add a contender, see
contenders.py; every contender of a case's mechanism runs on it, unless the case names some.
"""

import math
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from gla_ref import results
from gla_ref.mechanisms import MECHANISMS, Argument

# names of the tensors that any mechanism is given, and gradients are taken of
LEAVES = tuple(dict.fromkeys(x.name for m in MECHANISMS.values() for x in m.arguments))


@dataclass(frozen=True)
class Case:
    """One problem; `lengths` packs sequences (B = 1), `gates` names an entry of GATES.

    `groups` value heads read one key head, where the mechanism has that.
    """

    mechanism: str
    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str = "bfloat16"
    gates: str | None = None
    lengths: tuple[int, ...] | None = None
    only: tuple[str, ...] | None = None  # contenders by name, when not all of the mechanism's
    directions: tuple[str, ...] = ("forward", "backward")
    decode: bool = False  # token by token: every token reads the state from memory and writes it back
    groups: int = 1
    clock: bool = False  # what a call costs on the host is measured too
    state: bool = False  # there is an initial state

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis of the mechanism's tensors; states have one row for each sequence of the batch."""
        N = len(self.lengths) if self.lengths else self.B
        sizes = {"B": self.B, "T": self.T, "H": self.H, "K": self.K, "V": self.V, "N": N}
        pairs = MECHANISMS[self.mechanism].multiples
        return sizes | {many: self.groups * sizes[few] for many, few in pairs}

    @property
    def value_heads(self) -> int | None:
        """HV where it differs from H."""
        return self.H * self.groups if self.groups > 1 else None

    @property
    def given(self) -> dict[str, Argument]:
        """The tensors that every call is given, by name."""
        kind = MECHANISMS[self.mechanism]
        return {x.name: x for x in kind.arguments if not x.optional}

    def shape(self, x: Argument) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in x.axes.split())

    def dtype_of(self, x: Argument) -> torch.dtype:
        """Models make KDA's gates and strengths in float32, and so do those that time it."""
        dtype = getattr(torch, self.dtype)
        wide = self.mechanism == "kda" and x.role != "token"
        return torch.promote_types(dtype, torch.float32) if wide else dtype

    def __str__(self):
        packed = f" packed x{len(self.lengths)}" if self.lengths else ""
        packed += " with a state" if self.state else ""
        gates = f" gates {self.gates}" if self.gates else ""
        heads = f"{self.H}/{self.value_heads}" if self.value_heads else self.H
        return f"{self.mechanism} ({self.B}, {self.T}, {heads}, {self.K}/{self.V}) {self.dtype}{gates}{packed}"


def trained(x: Tensor) -> Tensor:
    """Gates with the half-lives of the book's largest trained GLA: x moves a token's about its channel's.

    They are the last evaluation's of the last run `main/40M/gla` in the record of language models on an H100.
    """
    runs = results.read(results.file("nvidia-h100-80gb-hbm3-language"), "language")
    (*_, run) = (r for r in runs if r["name"].startswith("main/40M/gla"))
    layers = [layer["half-life"] for layer in run["evaluations"][-1]["gates"]]
    shares = [float(share) for share in layers[0]]
    lives = [math.log(median(layer[share] for layer in layers)) for share in layers[0]]
    channels = (np.arange(x.shape[-1]) + 0.5) / x.shape[-1]
    life = torch.from_numpy(np.exp(np.interp(channels, shares, lives))).to(x)
    return -math.log(2) / life * (x / 2).exp()


# how g [B, T, H] or [B, T, H, K] is drawn, from a standard normal x of its shape
GATES = {
    "logsigmoid/16": lambda x: logsigmoid(x) / 16,
    "retnet": lambda x: (
        torch.log1p(-torch.exp2(-5.0 - torch.arange(x.shape[2], device=x.device)))
        .view(1, 1, -1, *[1] * (x.ndim - 3))
        .expand_as(x)
        .contiguous()
    ),
    "mamba2": lambda x: -torch.nn.functional.softplus(x),
    "-2": lambda x: torch.full_like(x, -2.0),
    "1 % at -1e3": lambda x: torch.where(
        torch.arange(x.shape[-1], device=x.device) % 100 == 50, -1e3, logsigmoid(x) / 16
    ),
    # bounded at -5, as KDA's models have them; on average -0.05, as in trained models, -0.5 and -2.5
    "weak": lambda x: -5 * torch.sigmoid(x - 5),
    "middle": lambda x: -5 * torch.sigmoid(x - 2.5),
    "strong": lambda x: -5 * torch.sigmoid(x),
    "trained": trained,
    "-20": lambda x: torch.full_like(x, -20.0),
    "1 % of chunks at -20": lambda x: torch.where(
        (torch.arange(x.shape[1], device=x.device) // 64 % 100 == 50).view(1, -1, *[1] * (x.ndim - 2)),
        -20.0,
        logsigmoid(x) / 16,
    ),
    "copies": lambda x: torch.full_like(x, -2.5),  # but for two channels: see `copied`
}


def copied(x: dict[str, Tensor]) -> None:
    """Erase channels 0 and 1 in turn, for 8 tokens each; before that a key copies half of one into the other.

    A kernel that drops a state where all channels have been closed is wrong here.
    """
    t = torch.arange(x["k"].shape[1], device=x["k"].device)
    for channel in (0, 1):
        x["g"][..., channel] = torch.where(t // 8 % 2 == channel, -4.95, -1e-3)[:, None]
    x["q"][..., :2] *= 3
    x["k"][..., :2] = 0
    x["k"][:, t % 8 == 7] = 0
    x["k"][:, t % 8 == 7, :, :2] = 0.5**0.5
    x["beta"][:, t % 8 == 7] = 0.99


def inputs(case: Case, seed: int, device="cuda") -> dict[str, Tensor]:
    """The mechanism's tensors, the gradient `do` of the output, and cu_seqlens when packed."""
    rng = torch.Generator(device).manual_seed(seed)
    dtype, given = getattr(torch, case.dtype), case.given

    def normal(x: Argument) -> Tensor:
        return torch.randn(case.shape(x), generator=rng, device=device, dtype=dtype)

    x = {n: normal(a) for n, a in given.items() if a.role == "token"}
    x["do"] = normal(given["v"])
    for n, a in given.items():
        if a.role == "gate":
            x[n] = GATES[case.gates](normal(a).float()).to(case.dtype_of(a))
        if a.role == "strength":
            x[n] = normal(a).float().sigmoid().to(case.dtype_of(a))
            x["k"] = normalize(x["k"].float(), dim=-1).to(dtype)
    if case.gates == "copies":
        copied(x)
    if case.state:
        (state,) = MECHANISMS[case.mechanism].states
        x["initial_state"] = torch.randn(case.shape(state), generator=rng, device=device)
    if case.lengths:
        ends = torch.tensor([0, *case.lengths]).cumsum(0)
        x["cu_seqlens"] = ends.to(device, torch.int32)
    for name in given:
        x[name].requires_grad_()
    return x


def memory_floor_bytes(case: Case, direction: str) -> int:
    """Each input read once, each output written once (states are small and left out, but not when decoding)."""
    if direction == "both":
        return memory_floor_bytes(case, "forward") + memory_floor_bytes(case, "backward")
    given = {n: math.prod(case.shape(x)) * case.dtype_of(x).itemsize for n, x in case.given.items()}
    leaves, o = sum(given.values()), given["v"]
    # forward: leaves in, o out; backward: leaves and do in (and softmax's o), gradients of the leaves out
    extra = o if case.mechanism == "softmax_attention" else 0
    moved = leaves + o if direction == "forward" else 2 * leaves + o + extra
    states = 0
    if case.decode:  # a token: read and written, float32
        state = sum(math.prod(case.shape(x)) for x in MECHANISMS[case.mechanism].states)
        states = 2 * 4 * case.T * state
    return moved + states


def flop_floor(case: Case, direction: str) -> float:
    """Matrix FLOPs that the mechanism needs.

    Softmax: the causal half, 2 products forward, 5 backward. Linear: the state's own products, of
    which there are 2 forward and 5 backward (S, dq, dS, dk, dv); chunks cost more.
    """
    if direction == "both":
        return flop_floor(case, "forward") + flop_floor(case, "backward")
    if case.mechanism == "softmax_attention":
        pairs = sum(n * (n + 1) / 2 for n in case.lengths or (case.T,))
        width = case.K + case.V if direction == "forward" else 3 * case.K + 2 * case.V
        return case.B * case.H * pairs * 2 * width
    products = 2 if direction == "forward" else 5
    return case.B * case.H * case.groups * case.T * products * 2 * case.K * case.V


def log_uniform(n: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """n lengths, log-uniform in [low, high]."""
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return tuple(int(math.exp(x)) for x in math.log(low) + u * math.log(high / low))


def figure2() -> list[Case]:
    """The setting of the GLA paper's Figure 2: batch 32, 16 heads, head size 64."""
    return [
        Case(m, 32, T, 16, 64, 64)
        for T in (512, 1024, 2048, 4096, 8192, 16384)
        for m in ("softmax_attention", "linear_attention")
    ]


def flash() -> list[Case]:
    """Softmax attention where the target is set: T = 8192, B * H = 128."""
    return [Case("softmax_attention", 8, 8192, 16, D, D) for D in (64, 128)]


def linear() -> list[Case]:
    """Linear attention from narrow to wide heads and from many to few, and scalar gates at one shape."""
    shapes = [(32, T, 16, 64, 64) for T in (512, 1024, 2048, 4096, 8192)]
    shapes += [(8, 8192, 16, 128, 128), (1, 65536, 16, 128, 128), (1, 65536, 4, 128, 128), (32, 2048, 4, 256, 512)]
    gated = [Case("simple_gla", 8, 8192, 16, 128, 128, gates=g) for g in ("retnet", "mamba2")]
    return [Case("linear_attention", *shape) for shape in shapes] + gated


def paths() -> list[Case]:
    """The paths that the rule of linear attention chooses from: each of them, from 2 heads to 128, forward."""
    names = ("triton_fused", "triton_segmented", "triton_materialised")
    case = Case("linear_attention", 1, 16384, 1, 128, 128, only=names, directions=("forward",))
    return [replace(case, H=H) for H in (2, 4, 8, 16, 32, 64, 96, 128)]


def gla() -> list[Case]:
    """Gated linear attention where the targets are set, and at gates too strong for one product a chunk."""
    shapes = [(8, 8192, 16, 128, 128), (32, 2048, 16, 64, 64), (1, 65536, 16, 128, 128), (32, 2048, 4, 256, 512)]
    cases = [Case("gla", *shape, gates="logsigmoid/16") for shape in shapes]
    return cases + [Case("gla", *shapes[0], gates=g) for g in ("-2", "1 % at -1e3")]


def hopper() -> list[Case]:
    """Gated linear attention: the Hopper kernels, the page of the forward and the portable kernels."""
    names = ("triton_hopper", "page_hopper", "triton_portable", "fla_chunk_gla")
    shapes = [(8, 8192, 16, 128, 128), (4, 4096, 64, 128, 128), (1, 8192, 96, 128, 128), (1, 65536, 16, 128, 128)]
    shapes += [(32, 2048, 16, 64, 64), (2, 16384, 4, 64, 64)]
    return [Case("gla", *shape, gates="logsigmoid/16", only=names) for shape in shapes]


def decode() -> list[Case]:
    """Eight tokens of gated linear attention, one call a token, from one sequence to many."""
    names = ("triton_recurrent_steps", "page_recurrent_steps", "fla_fused_recurrent_steps")
    case = Case("gla", 1, 8, 16, 128, 128, gates="logsigmoid/16", only=names, decode=True)
    case = replace(case, directions=("forward",))
    wide = replace(case, B=64, H=4, K=256, V=512, only=(names[0], names[2]))
    return [*(replace(case, B=B) for B in (1, 8, 64, 256)), wide]


def host() -> list[Case]:
    """The cost of a call outside the GPU: small problems and decoding; fla, whose searches take minutes, at B = 2."""
    gates = {"simple_gla": "logsigmoid/16", "gla": "logsigmoid/16"}
    peers = {
        "softmax_attention": ("sdpa_flash", "sdpa_cudnn"),
        "linear_attention": ("fla_chunk_linear_attn",),
        "simple_gla": ("fla_chunk_simple_gla",),
        "gla": ("fla_chunk_gla",),
    }
    shapes = [(1, 64, 2, 64, 64), *((2, T, 4, 64, 64) for T in (2048, 16384)), (8, 2048, 16, 64, 64)]
    cases = [
        Case(
            m,
            *shape,
            gates=gates.get(m),
            only=("triton", *(n for n in theirs if shape[0] == 2 or n.startswith("sdpa"))),
            directions=("forward", "both"),
            clock=True,
        )
        for shape in shapes
        for m, theirs in peers.items()
    ]
    packed = [
        replace(case, lengths=(20, 44), state=True, directions=("forward",))
        for case in cases[: len(peers)]
        if case.mechanism != "softmax_attention"
    ]
    steps = [replace(case, clock=True) for case in decode() if case.B <= 64 and case.H == 16]
    return cases + packed + steps


def delta() -> list[Case]:
    """The delta rule where the targets are set, and one head of two long sequences."""
    shapes = [(8, 8192, 16, 128, 128), (1, 8192, 16, 128, 128), (2, 32768, 1, 128, 128)]
    return [Case("delta_rule", *shape) for shape in shapes]


def gated_delta() -> list[Case]:
    """The gated delta rule at the sizes of models that use it: 16 key heads, 16 to 64 value heads, and few heads.

    Two of them at weak and at strong gates too: where a text is cut, some libraries drop a state that has decayed.
    """
    shapes = [(1, 8192, 16, 2), (1, 32768, 16, 2), (4, 8192, 16, 2), (1, 32768, 2, 4), (8, 8192, 16, 1)]
    shapes += [(1, 32768, 16, 4), (4, 8192, 16, 4), (1, 2048, 16, 2), (2, 8192, 16, 2), (8, 8192, 16, 2)]
    names = ("triton", "fla_chunk_gated_delta_rule", "flash_qla", "flashinfer_gdn")
    ours = ("triton_portable", "page", "page_hopper")
    cases = [
        Case("gated_delta_rule", B, T, H, 128, 128, gates="logsigmoid/16", groups=groups, only=(*names, *ours))
        for B, T, H, groups in shapes
    ]
    return cases + [replace(case, gates=gates, only=names) for gates in ("retnet", "-2") for case in cases[2:4]]


def unseen() -> list[Case]:
    """The gated delta rule at five sizes that its plan was not fitted to: both Hopper kernels, and which is chosen."""
    names = ("triton", "triton_hopper_fused", "triton_hopper_ahead", "flash_qla", "flashinfer_gdn")
    shapes = [(2, 4096, 16, 2), (3, 4992, 8, 4), (16, 2048, 16, 1), (1, 16384, 8, 3), (1, 65536, 4, 2)]
    case = replace(gated_delta()[0], only=names, directions=("forward",))
    return [replace(case, B=B, T=T, H=H, groups=groups) for B, T, H, groups in shapes]


def training() -> list[Case]:
    """A training step of the gated delta rule: its memory at full size, and what a small one costs on the host."""
    names = ("triton", "fla_chunk_gated_delta_rule", "flash_qla", "flashinfer_gdn")
    case = replace(gated_delta()[0], only=names, directions=("forward", "both"))
    return [replace(case, B=4), replace(case, T=2048, clock=True)]


def decode_delta() -> list[Case]:
    """Eight tokens of the gated delta rule and of KDA, one call a token, from one sequence to many."""
    names = ("triton_recurrent_steps", "fla_fused_recurrent_steps")
    case = Case("gated_delta_rule", 1, 8, 16, 128, 128, gates="logsigmoid/16", groups=2, only=names, decode=True)
    cases = case, replace(case, mechanism="kda", groups=1)
    return [replace(case, B=B, directions=("forward",)) for case in cases for B in (1, 8, 64, 256)]


def kda() -> list[Case]:
    """Kimi Delta Attention at gates of three strengths and beyond a bound, both ways; a state that cuts miss."""
    shapes = [(1, 2048, 12), (1, 8192, 16), (1, 8192, 24), (4, 2048, 12), (1, 32768, 16), (8, 8192, 16)]
    names = ("triton", "triton_portable", "triton_hopper", "page", "fla_chunk_kda", "cudnn_kda", "cudnn_kda_uncut")
    case = Case("kda", *shapes[1], 128, 128, only=names, directions=("forward", "both"))
    cases = [replace(case, B=B, T=T, H=H, gates=gates) for B, T, H in shapes for gates in ("weak", "middle", "strong")]
    beyond = replace(case, only=("triton", "fla_chunk_kda"))
    cases += [replace(beyond, gates=gates) for gates in ("1 % of chunks at -20", "-20")]
    cases += [replace(case, gates="trained")]
    return [*cases, replace(case, gates="copies", directions=("forward",))]


def prefill() -> list[Case]:
    """One long prompt and few heads: B = 1, H in {4, 16, 64}, forward only."""
    return [
        Case(m, 1, 16384, H, 128, 128, directions=("forward",))
        for H in (4, 16, 64)
        for m in ("softmax_attention", "linear_attention")
    ]


def packed() -> list[Case]:
    """32 sequences of log-uniform length in one launch against a Python loop of launches."""
    lengths = log_uniform(32, 64, 8192)
    case = Case("softmax_attention", 1, sum(lengths), 16, 128, 128, lengths=lengths)
    return [replace(case, mechanism=m, directions=("forward",)) for m in ("softmax_attention", "linear_attention")]


def scoreboard() -> list[Case]:
    """Every kernel of the book's scoreboard at one shape, forward."""
    gates = dict.fromkeys(("simple_gla", "gla", "gated_delta_rule", "kda"), "logsigmoid/16")
    mechanisms = "softmax_attention", "linear_attention", *gates, "delta_rule"
    only = {"gla": ("triton", "gla_chunk_fuse")}
    shape, forward = (8, 8192, 16, 128, 128), ("forward",)
    return [Case(m, *shape, gates=gates.get(m), only=only.get(m, ("triton",)), directions=forward) for m in mechanisms]


SUITES = {
    f.__name__: f
    for f in (figure2, flash, linear, gla, hopper, delta, gated_delta, unseen, training, kda)
    + (decode, decode_delta, host, paths, prefill, packed, scoreboard)
}
