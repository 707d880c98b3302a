"""Kernels in Triton, and the functions that launch them (chapter 4); they need Triton, and a GPU or TRITON_INTERPRET=1.

Of this package `import gla_ref` loads only what needs no Triton.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .launch.versions import not_interpreted, too_old

__all__ = ["Device", "explain", "find_device", "plan"]

NO_TRITON = "the kernels need Triton, which is not installed (pip install triton, on Linux)"


def refusal() -> str | None:
    """The reason that the kernels cannot be used with the installed versions, and a remedy; None if they can."""
    if find_spec("triton") is None:
        return NO_TRITON
    installed = version("triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
    return too_old(installed) or (not_interpreted(installed, np.__version__) if interpreted else None)


class Device(NamedTuple):
    """The device that kernels run on."""

    device: str  # "cuda" or "cpu"
    dtype: torch.dtype  # the half precision of a GPU; float32 in the interpreter
    sentence: str  # which GPU, or that there is none


def find_device() -> Device:
    """Find out where this machine runs kernels, and with which inputs; call it before Triton is imported.

    On a GPU they are compiled. Without one, or under TRITON_INTERPRET=1, Triton's interpreter executes
    them on the CPU; it is told so here, which it only hears when it is imported. GPUs older than Ampere,
    such as a T4, have no bfloat16 in their matrix units; float16 takes its place there.
    """
    # for kernels that a page or a cell launches; the package's own ask for it (launch/program.py)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        if find_spec("triton"):
            from .launch.interpreter import mend

            mend()
        reason = "No GPU" if not torch.cuda.is_available() else "GPU not used"
        sentence = f"{reason}: TRITON_INTERPRET=1 is set, kernels are interpreted, in float32."
        return Device("cpu", torch.float32, sentence)
    name, (major, _) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if major < 8:
        sentence = f"Kernels run on {name}, in float16 (it has no bfloat16) and float32."
        return Device("cuda", torch.float16, sentence)
    return Device("cuda", torch.bfloat16, f"Kernels run on {name}, in bfloat16 and float32.")


def plan(mechanism: str, *tensors: Tensor, direction: str = "forward", hardware=None, **options):
    """The steps of a call of a mechanism's kernels, as data: nothing is compiled or launched, no value is read.

    Args:
        mechanism: a key of `gla_ref.FORMS`.
        tensors: all that the mechanism requires, in the order of its call; on any device, "meta" too.
        direction: "forward", or "backward" (for the gradients of everything, of a loss of o).
        hardware: the class of GPU to plan for, such as "sm_80"; None for that of the tensors.
        options: as in a call: `g_v`, `scale`, `initial_state`, `cu_seqlens`, `path`, `kernel`.

    Returns:
        a frozen `Plan`: its `launches`, the tensors that they make, and `why`.

    Raises:
        TypeError, ValueError: an argument does not fit, or the sizes do not fit the GPU; the message names it.
        ModuleNotFoundError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise ModuleNotFoundError(NO_TRITON, name="triton")
    from ._explain import plan

    return plan(mechanism, *tensors, direction=direction, hardware=hardware, **options)


def explain(mechanism: str, *tensors: Tensor, hardware=None, **options) -> str:
    """:func:`plan` in words, forward and backward: kernels, programs, tiles, warps, bytes, and why."""
    directions = ("forward", "backward")
    plans = [plan(mechanism, *tensors, direction=d, hardware=hardware, **options) for d in directions]
    from ._explain import describe

    return "\n\n".join(f"{d}: {describe(p)}" for d, p in zip(directions, plans, strict=True))
