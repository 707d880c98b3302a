"""What every launcher checks, how it is registered with PyTorch, and how its kernels are compiled side by side."""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor

from .._contract import check_cu_seqlens, check_gate, check_state, check_tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("gla_ref", "FRAGMENT")
PLAN = threading.local()  # .launches: those that a call would make, while it is planned


class Operator:
    """A function that changes none of its arguments as PyTorch's operator gla_ref::name, opaque to torch.compile.

    What `torch.library.custom_op` is, but that imports the whole of PyTorch's compiler in its first call, only to
    keep it out: two seconds and more.

    Triton compiles a kernel when it is first launched, one after the other. Here the first call of its kind (dtypes,
    sizes of heads, options) goes through the function once without launching anything, and has all the kernels
    compiled side by side.
    """

    def __init__(self, name: str, function):
        self.name, self.function, self.compiled = f"gla_ref::{name}", function, set()
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, self.run, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.gla_ref, name).default

    def __call__(self, *args):
        return self.overload(*args)

    def run(self, *args):
        device = args[0].device
        kind = device, *map(_kind, args)
        if kind not in self.compiled and device.type == "cuda":
            self.compile(device, args)
            self.compiled.add(kind)
        return self.function(*args)

    def compile(self, device: torch.device, args: tuple) -> None:
        """Side by side, what a call would launch; its tensors are let go before the call makes its own."""
        PLAN.launches = []
        try:
            self.function(*args)
        finally:
            launches, PLAN.launches = PLAN.launches, None
        with ThreadPoolExecutor() as pool:
            list(pool.map(functools.partial(_compile, device), launches))

    def register_fake(self, function):
        torch.library.register_fake(self.name, function, lib=LIBRARY)

    def register_autograd(self, backward, setup_context):
        torch.library.register_autograd(
            self.name, backward, setup_context=setup_context, lib=LIBRARY
        )


def operator(name: str):
    return functools.partial(Operator, name)


def _kind(x):
    """What of an argument chooses among kernels; a miss costs no more than compiling in a row."""
    if isinstance(x, Tensor):
        return (x.dtype, x.shape[-1]) if x.ndim == 4 else x.dtype
    return type(x) if isinstance(x, float) else x


def _compile(device: torch.device, warmup) -> None:
    """One kernel, and the C function that launches it: both wait for other programs, the assembler and the compiler."""
    with torch.cuda.device(device):
        _ = warmup().run


def launch(kernel, *grid: int):
    """kernel[grid], or, while a call is planned, a note of what it would launch."""
    launches = getattr(PLAN, "launches", None)
    if launches is None:
        return kernel[grid]
    return lambda *args, **options: launches.append(
        functools.partial(kernel.warmup, *args, grid=grid, **options)
    )


def check_launch(tensors: dict[str, Tensor]) -> None:
    """Kernels take float32, float16 and bfloat16 on a CUDA device, the first two in Triton's interpreter too.

    The values of gates (names that begin with g) are looked at under GLA_REF_DEBUG=1 only, because
    looking means waiting for the GPU.

    Raises:
        TypeError: a dtype that kernels do not take.
        ValueError: a device that they do not run on, or a gate above 0 (under GLA_REF_DEBUG=1).
    """
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
        if not x.is_cuda and not triton.knobs.runtime.interpret:
            raise ValueError(
                f"{name}: expected a CUDA tensor, got one on {x.device}; "
                "to interpret kernels on the CPU, set TRITON_INTERPRET=1 before importing triton"
            )
        if not x.is_cuda and name in "qkv" and x.dtype == torch.bfloat16:
            raise TypeError(
                f"{name}: expected float32 or float16 on the CPU, got bfloat16, "
                "whose products Triton's interpreter gets wrong"
            )
        if name.startswith("g") and os.environ.get("GLA_REF_DEBUG") == "1":
            check_gate(name, x)


def check_packed(cu_seqlens: Tensor | None, B: int, T: int, device: torch.device) -> None:
    """As `check_cu_seqlens`, on the device of the other tensors; the values under GLA_REF_DEBUG=1 only."""
    check_cu_seqlens(cu_seqlens, B, T, values=os.environ.get("GLA_REF_DEBUG") == "1")
    if cu_seqlens is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu_seqlens.device}")


def check_call(
    q: Tensor, k: Tensor, v: Tensor, gates: dict[str, tuple[Tensor | None, str]], S: Tensor | None,
    cu_seqlens: Tensor | None, path: str | None = None, paths: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """A whole call of a kernel with states: `gates` are (tensor or None, its axes) by name.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    given = {name: x for name, (x, _) in gates.items() if x is not None}
    axes = {name: shape for name, (_, shape) in gates.items()}
    tensors = {"q": q, "k": k, "v": v, **given}
    sizes = check_tensors(tensors, {"q": "B T H K", "k": "B T H K", "v": "B T H V", **axes})
    check_launch(tensors)
    for name, axis, most in (("q", "K", 256), ("v", "V", 512)):
        if sizes[axis] > most:
            raise ValueError(f"{name}: expected {axis} of at most {most}, got {sizes[axis]}")
    check_packed(cu_seqlens, sizes["B"], sizes["T"], q.device)
    if S is not None:
        N = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        check_state("initial_state", S, sizes, N, q.device)
    if path not in (None, *paths):
        raise ValueError(f"path: expected one of {', '.join(paths)} or None, got {path!r}")


def check_forward_only(tensors: dict[str, Tensor | None], who: str) -> None:
    """No tensor may need a gradient that nobody will compute; `who` is the message's subject and verb.

    Raises:
        ValueError: one does.
    """
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True; {who} forward only"
            )
