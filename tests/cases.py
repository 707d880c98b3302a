"""The tests' common parts: random inputs, the gate ladder, and the measure of error (the oracle rule)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode

import gla_ref
from gla_ref import rounding
from gla_ref.mechanisms import MECHANISMS

ROOT = Path(__file__).resolve().parents[1]
F64 = torch.float64
LINEAR = ("linear_attention", "simple_gla", "gla")
GATED = tuple(m for m in LINEAR if MECHANISMS[m].named("gate"))
DELTA = ("delta_rule", "gated_delta_rule", "kda")
BREAK = ("simple_gla.parallel", "gla.parallel")  # ratio forms, which strong gates break
CHOSEN = tuple(m for m, forms in gla_ref.FORMS.items() if "triton_portable" in forms)  # with a choice of kernels

LADDER = (
    "zero",
    "-1e-4",
    "logsigmoid/16",
    "-1",
    "-20",
    "-1e3",
    "-inf",
    "one strong channel",
    "mild and strong chunks",
    "switch - 1e-3",
    "switch + 1e-3",
    "resets at chunk ends",
    "many resets",
)
CORRELATIONS, STRENGTHS = (0.0, 0.9, 0.99, 1.0), (0.0, 1.0, 2.0)  # keys of the delta rules; their write strengths
SMALL_MODEL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "gate_rank": 4}
SMALL_MODEL |= {"tau": 1.0, "intermediate_size": 24, "initializer_range": 0.3}
SWITCH = -80.0  # total decay of a chunk at which a kernel changes from one product to two levels


def in_process(*command) -> str:
    """The output of Python in a process that compiles kernels; this process may have told Triton to interpret them."""
    unset = "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"
    env = {n: x for n, x in os.environ.items() if n not in unset} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def thin(values, *kept):
    """Parameters of a sweep: `make test` takes those that are kept, `make test-deep` the others."""
    values = list(values)
    assert kept and all(x in values for x in kept)
    deep = [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.deep) for x in values]
    return [x if x in kept else param for x, param in zip(values, deep, strict=True)]


def gate(kind: str, *shape: int, C: int = 16, seed: int = 0) -> Tensor:
    """A rung of the gate ladder, or a number for all gates, float64 `[B, T, H, ...]`."""
    rng = torch.Generator().manual_seed(seed)
    T, mild = shape[1], logsigmoid(torch.randn(shape, generator=rng, dtype=F64)) / 16
    t = torch.arange(T).view(1, T, *[1] * (len(shape) - 2))
    if kind == "logsigmoid/16":
        return mild
    if kind == "one strong channel":
        return torch.where(torch.arange(shape[-1]) == shape[-1] // 2, -1e3, 0.0).to(F64).expand(shape).contiguous()
    if kind == "mild and strong chunks":
        return torch.where(t // C % 2 == 1, -30.0, mild)
    if kind.startswith("switch"):
        return torch.full(shape, (SWITCH + float(kind[7] + "1e-3")) / C, dtype=F64)
    if kind == "resets at chunk ends":
        return torch.where((t % C == 0) | (t % C == C - 1), -torch.inf, mild)
    if kind == "many resets":
        return torch.where(torch.rand(shape, generator=rng) < 0.3, -torch.inf, mild)
    return torch.full(shape, 0.0 if kind == "zero" else float(kind), dtype=F64)


def inputs(mechanism: str, B: int, T: int, H: int, K: int, V: int, *, kind="logsigmoid/16", g_v=False, seed=0):
    """Random-sign float64 inputs: (positional tensors, {initial_state, g_v}); softmax attention's without a cache."""
    rng, declared = torch.Generator().manual_seed(1000 + seed), MECHANISMS[mechanism]
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V, "N": B}
    sizes |= {many: 2 * sizes[few] for many, few in declared.multiples}

    def shape(x):
        return [sizes[axis] for axis in x.axes.split()]

    def normal(x):
        return torch.randn(shape(x), generator=rng, dtype=F64)

    made = {x.name: normal(x) for x in declared.arguments if x.role == "token"}
    *cache, state = declared.states
    named = {} if cache else {"initial_state": normal(state)}
    gates = [x for x in declared.arguments if x.role == "gate" and (g_v or not x.optional)]
    for i, x in enumerate(gates):
        made[x.name] = gate(kind, *shape(x), seed=seed + i)
    for x in declared.arguments:
        if x.role == "strength":
            made[x.name] = torch.rand(shape(x), generator=rng, dtype=F64)
            made["k"] = made["k"] / made["k"].norm(dim=-1, keepdim=True)
    named |= {x.name: made[x.name] for x in gates if x.optional}
    return [made[name] for name in declared.required], named


def alike(k, correlation):
    """Keys of length 1 whose expected products are `correlation`."""
    one = torch.randn(k.shape[-1], generator=torch.Generator().manual_seed(7), dtype=k.dtype)
    k = correlation**0.5 * one / one.norm() + (1 - correlation) ** 0.5 * k / k.norm(dim=-1, keepdim=True)
    return k / k.norm(dim=-1, keepdim=True)


def meta_tokens(mechanism, T=4096, B=1, H=16, K=128, V=128, dtype=torch.bfloat16, HV=None, gates=None):
    """Tensors of a call by name, without memory; gates and strengths have the dtype `gates`, or the tokens'."""
    sizes = dict(B=B, T=T, H=H, HV=HV or H, K=K, V=V)
    return {
        x.name: torch.empty(
            [sizes[a] for a in x.axes.split()], dtype=dtype if x.role == "token" else gates or dtype, device="meta"
        )
        for x in MECHANISMS[mechanism].arguments
        if not x.optional
    }


def error(x: Tensor, exact: Tensor) -> float:
    """The kit's error, but relative to x* however small: where gates are strong, dg is 1e-9, and has to be right."""
    assert x.shape == exact.shape, (x.shape, exact.shape)
    rms = exact.double().square().mean().sqrt() or 1.0
    return rounding.error(x.double() / rms, exact.double() / rms)


def tensors_in(x) -> list[Tensor]:
    """All tensors of nested tuples and lists."""
    if isinstance(x, Tensor):
        return [x]
    return [z for y in x for z in tensors_in(y)] if isinstance(x, tuple | list) else []  # None has no tensors


def options(form: str, C: int = 16, c: int = 4) -> dict[str, int]:
    """Lengths of chunks or blocks for the forms that have them."""
    of_form = {"chunkwise": {"C": C}, "chunkwise_two_level": {"C": C, "c": c}}
    return (of_form | {"flash": {"block_q": c, "block_k": c - 1}}).get(form, {})


def with_o(form, change):
    """A form whose o is changed."""

    def fn(*tokens, **named):
        o, S = form(*tokens, **named)
        return change(o), S

    return fn


def autograd_gradients(mechanism, form, args, named, do, dS, **extra):
    """Gradients of <o, do> + <S, dS> with respect to every tensor, by autograd."""
    function, names = gla_ref.FORMS[mechanism][form], MECHANISMS[mechanism].required
    leaves = [x.clone().requires_grad_() for x in (*args, *named.values())]
    o, S = function(*leaves[: len(args)], **dict(zip(named, leaves[len(args) :], strict=True)), **extra)
    grads = torch.autograd.grad((o, S), leaves, (do, dS))
    return dict(zip([f"d{n}" for n in names] + [f"d_{n}" for n in named], grads, strict=True))


def pairs(*mechanisms: str, without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Every (mechanism, form) but those named "mechanism.form" in `without`."""
    every = [(m, f) for m in mechanisms for f in gla_ref.FORMS[m] if not f.startswith("triton")]
    return [(m, f) for m, f in every if f"{m}.{f}" not in without]


class Dispatched(TorchDispatchMode):
    """The operators that run inside, each with its result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.calls.append((op, result))
        return result
