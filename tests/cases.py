"""What the tests share: random inputs, the gate ladder, and the measure of error (the oracle rule)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import gla_ref

F64 = torch.float64
GATED = ("simple_gla", "gla")
LINEAR = ("linear_attention", *GATED)

LADDER = (
    "zero", "-1e-4", "logsigmoid/16", "-1", "-20", "-1e3", "-inf",
    "one strong channel", "mild and strong chunks", "switch - 1e-3", "switch + 1e-3", "resets at chunk ends",
    "many resets",
)  # fmt: skip
SWITCH = -80.0  # total decay of a chunk at which a kernel changes from one product to two levels


def gate(kind: str, *shape: int, C: int = 16, seed: int = 0) -> Tensor:
    """A rung of the gate ladder, float64 `[B, T, H, ...]`."""
    rng = torch.Generator().manual_seed(seed)
    T, mild = shape[1], logsigmoid(torch.randn(shape, generator=rng, dtype=F64)) / 16
    t = torch.arange(T).view(1, T, *[1] * (len(shape) - 2))
    constant = {
        "zero": 0.0,
        "-1e-4": -1e-4,
        "-1": -1.0,
        "-20": -20.0,
        "-1e3": -1e3,
        "-inf": -torch.inf,
    }
    if kind in constant:
        return torch.full(shape, constant[kind], dtype=F64)
    if kind == "logsigmoid/16":
        return mild
    if kind == "one strong channel":
        return (
            torch.where(torch.arange(shape[-1]) == shape[-1] // 2, -1e3, 0.0)
            .to(F64)
            .expand(shape)
            .contiguous()
        )
    if kind == "mild and strong chunks":
        return torch.where(t // C % 2 == 1, -30.0, mild)
    if kind.startswith("switch"):
        return torch.full(shape, (SWITCH + float(kind[7] + "1e-3")) / C, dtype=F64)
    if kind == "resets at chunk ends":
        return torch.where((t % C == 0) | (t % C == C - 1), -torch.inf, mild)
    if kind == "many resets":
        return torch.where(torch.rand(shape, generator=rng) < 0.3, -torch.inf, mild)
    raise KeyError(kind)


def inputs(
    mechanism: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    kind="logsigmoid/16",
    g_v=False,
    seed=0,
):
    """Random-sign float64 inputs: (positional tensors, {initial_state, g_v})."""
    rng = torch.Generator().manual_seed(1000 + seed)
    q, k = (torch.randn(B, T, H, K, generator=rng, dtype=F64) for _ in "qk")
    v = torch.randn(B, T, H, V, generator=rng, dtype=F64)
    named = {"initial_state": torch.randn(B, H, K, V, generator=rng, dtype=F64)}
    args = [q, k, v]
    if mechanism == "simple_gla":
        args.append(gate(kind, B, T, H, seed=seed))
    if mechanism == "gla":
        args.append(gate(kind, B, T, H, K, seed=seed))
        if g_v:
            named["g_v"] = gate(kind, B, T, H, V, seed=seed + 1)
    return args, named


def error(x: Tensor, exact: Tensor) -> float:
    """max |x - x*| / rms(x*); 0 where both are 0, infinite where x is not finite."""
    if x.shape != exact.shape or not torch.isfinite(x).all():
        return float("inf")
    rms = exact.double().square().mean().sqrt().item()
    worst = (x.double() - exact.double()).abs().max().item()
    return worst / rms if rms else (0.0 if worst == 0 else float("inf"))


def options(form: str, C: int = 16, c: int = 4) -> dict[str, int]:
    """Chunk lengths for the forms that have them."""
    return {"chunkwise": {"C": C}, "chunkwise_two_level": {"C": C, "c": c}}.get(form, {})


def pairs(*mechanisms: str, without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Every (mechanism, form) but those named "mechanism.form" in `without`."""
    every = [(m, f) for m in mechanisms for f in gla_ref.FORMS[m] if not f.startswith("triton")]
    return [(m, f) for m, f in every if f"{m}.{f}" not in without]


BREAK = ("simple_gla.parallel", "gla.parallel")
