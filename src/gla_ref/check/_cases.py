"""Inputs that tell right from wrong: ladders of lengths, gates, states and strides (appendix "Check your kernel")."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ._mechanisms import MECHANISMS

F64 = torch.float64
LN2 = math.log(2)
C, SUB = (
    64,
    16,
)  # the chunk and sub-chunk that lengths and gates aim at, and that findings are located in
MILD = "logsigmoid/16"
GATES = (
    "zero", "-1e-4", MILD, "-1", "-20", "-1e3", "-inf", "one strong channel", "mild and strong chunks",
    "switch - 1e-3", "switch + 1e-3", "resets at chunk ends", "many resets",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One problem: sizes, gates, states, strides; `telling` ones are what the diagnosis looks at first."""

    name: str
    B: int = 2
    T: int = 70
    H: int = 3
    K: int = 5
    V: int = 7
    gate: str = MILD
    scale: float | None = None
    ends: tuple[int, ...] | None = None
    state: bool = True
    strides: str = "contiguous"
    size: float = 1.0
    telling: bool = False

    @property
    def sizes(self) -> str:
        return " ".join(f"{n}={getattr(self, n)}" for n in "BTHKV")


def cases(mechanism: str) -> list[Case]:
    """The cases of a mechanism: lengths, gates, sizes, packing, strides, states."""
    kind = MECHANISMS[mechanism]
    lengths = (1, C - 1, C, C + 1, 2 * C + SUB + 1)
    found = [Case(f"length {T}", T=T, telling=T == lengths[-1]) for T in lengths]
    if kind.gate:
        found += [
            Case(f"gate {g}", T=C + SUB + 3, H=2, gate=g, telling=g == "many resets") for g in GATES
        ]
    packed = (0, 0, 33, 33, 40, 120, 130, 130)
    found += [
        Case("square", K=6, V=6, T=C + 7, telling=True),
        Case("wide", B=1, H=2, K=64, V=48, T=C + SUB + 1),
        Case("scale given", scale=-0.3, T=C + 3, telling=True),
        Case("no initial state", state=False),
        Case("packed", B=1, T=packed[-1], ends=packed, state=not kind.cache, telling=True),
        Case("strided", strides="strided", telling=True),
        Case("misaligned", strides="misaligned"),
        Case("large", size=30.0, telling=True),
        Case("long", B=1, H=2, T=300),
    ]
    return found


def gate(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """A rung of the gate ladder, float64 `[B, T, H, ...]`."""
    t = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    mild = logsigmoid(torch.randn(shape, generator=rng, dtype=F64)) / 16
    if kind == MILD:
        return mild
    if kind == "one strong channel":
        channel = torch.arange(shape[-1]) == shape[-1] // 2
        return torch.where(channel, -1e3, 0.0).to(F64).expand(shape).clone()
    if kind == "mild and strong chunks":
        return torch.where(t // SUB % 2 == 1, -30.0, mild)
    if kind.startswith(
        "switch"
    ):  # a chunk's total decay where kernels change their way of computing
        return torch.full(shape, (-80.0 + float(kind[7] + "1e-3")) / C, dtype=F64)
    if kind == "resets at chunk ends":
        return torch.where((t % C == 0) | (t % C == C - 1), -torch.inf, mild)
    if kind == "many resets":
        return torch.where(torch.rand(shape, generator=rng) < 0.1, -torch.inf, 4 * mild)
    return torch.full(shape, 0.0 if kind == "zero" else float(kind), dtype=F64)


def convert(g: Tensor, gate: str) -> Tensor:
    """Natural log gates as a kernel wants them."""
    return {"log": lambda g: g, "log2": lambda g: g / LN2, "alpha": torch.exp}[gate](g)


def representable(g: Tensor, gate: str, dtype: torch.dtype) -> Tensor:
    """The log gates that a kernel is given when it holds them in its own convention and dtype."""
    held = convert(g, gate).to(dtype).to(F64)
    return {"log": lambda x: x, "log2": lambda x: x * LN2, "alpha": torch.log}[gate](held)


def inputs(
    mechanism: str, case: Case, dtype: torch.dtype, seed: int, form: str = "log"
) -> dict[str, Tensor]:
    """Random-sign tensors of a case in float64, holding values that the kernel's dtype holds exactly.

    Named as tokens and states of the mechanism; what the loss puts on o and on each state is named
    "d " + its name. `form` is the kernel's convention for gates: log, log2 or alpha.
    """
    kind, rng = MECHANISMS[mechanism], torch.Generator().manual_seed(1000 + seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=F64)

    x = {
        "q": case.size * normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": case.size * normal(B, T, H, V),
    }
    if kind.gate:
        x["g"] = gate(case.gate, (B, T, H, K)[: len(kind.gate.split())], rng)
    x["d o"] = normal(B, T, H, V)
    N, past = B if case.ends is None else len(case.ends) - 1, 9 if case.state else 0
    if kind.cache:
        x |= {"k0": normal(B, past, H, K), "v0": case.size * normal(B, past, H, V)}
        x |= {"d k_cache": normal(B, past + T, H, K), "d v_cache": normal(B, past + T, H, V)}
    else:
        x |= {"S0": case.size * normal(N, H, K, V), "d S": normal(N, H, K, V)}
    if not case.state:
        for name in kind.states:
            del x[name]
    wide = {n for n in x if n.endswith("S") or n == "S0"}
    exact = {n: y.to(torch.float32 if n in wide else dtype).to(F64) for n, y in x.items()}
    return exact | ({"g": representable(x["g"], form, dtype)} if kind.gate else {})
