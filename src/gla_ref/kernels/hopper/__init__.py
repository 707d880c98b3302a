"""Kernels for Hopper in Gluon: warps with different jobs in one program (its algebra: chapter 14)."""

from __future__ import annotations

import torch

from .._hardware import Hardware
from .._plan import Spec, describable
from ._gluon import missing

WIDEST = 128  # channels of a key: the state of as many rows, and two stages of all that it needs, fill a multiprocessor


def refusal(hardware: Hardware, q: Spec, k: Spec, v: Spec, g: Spec, g_v: Spec | None) -> str | None:
    """Why the Hopper kernel of GLA does not take a call; None if it does."""
    if hardware.name != "sm_90":
        return f"the Hopper kernel is for sm_90, not {hardware.name}"
    if name := missing():
        return f"this Triton has no {name}"
    if g_v is not None:
        return "the Hopper kernel has no gates on values"
    if q.shape[-1] > WIDEST:
        return f"the Hopper kernel has K of at most {WIDEST}, not {q.shape[-1]}"
    for x in (q, k, v, g):
        if x is not g and x.dtype.itemsize != 2:
            return f"the Hopper kernel takes tokens of 16 bits, and {x.name} is {x.dtype}"
        if not describable(x, hardware, x.dtype.itemsize):
            return f"{x.name} of shape {x.shape} and strides {x.strides} is not one that the copy engine reads"
    return None


def refusal_of_gradient(hardware: Hardware, q: Spec, k: Spec, v: Spec, g: Spec, g_v: Spec | None, kernel) -> str | None:
    """Why the Hopper kernel of GLA's gradient does not take a call that asks for `kernel`; None if it does."""
    if kernel == "portable":
        return "it was asked for"
    if reason := refusal(hardware, q, k, v, g, g_v):
        return reason
    if q.dtype != torch.bfloat16:
        return f"the Hopper kernel makes gradients of tokens in bfloat16, not {q.dtype}"
    if g.dtype.itemsize != 2:
        return f"the Hopper kernel makes gradients with gates of 16 bits, not {g.dtype}"
    if v.shape[-1] > WIDEST:
        return f"the Hopper kernel makes gradients for V of at most {WIDEST}, not {v.shape[-1]}"
    if kernel != "hopper":
        return "the Hopper kernel's gradient is hardly faster: it has to be asked for, by kernel='hopper'"
    return None
