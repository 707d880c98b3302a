"""Kernels for Hopper in Gluon: warps with different jobs in one program (chapters 22 to 24).

A plan takes them for every call for which no function below, called `refusal...`, has a reason not to. The launches of
each file's plan, in their order, in brackets those of sequences in segments; (p) marks a kernel of ../portable/::

    gla_forward.py       [walk for ends, carry (p),] walk or the page's walk, mend (p)
    gla_backward.py      [walk for ends, carry (p),] walk for states, [walk reversed, carry (p),] unwind, mend_gradient
    delta_fused.py       fused, and for strong heads again: many heads
    delta_ahead.py       solve, [walk for maps, carry_maps (p),] walk: few heads
    delta_backward.py    solve, [walks for maps, carry_both,] walks, gradients
    kda_forward.py       prepare, mend, [walk for maps, carry_maps (p),] walk
    kda_gradients.py     prepare, mend, walks, gradients, mend_gradients (p)

`solve`, `prepare` and other kernels of several plans have files of their own. Read first: ring.py (barriers, and why no
role waits for ever), tiles.py, pages/gla_hopper.py, gla_forward.py; for delta rules delta_chunk.py, which has their
equations, and delta_inverse.py.
"""

from __future__ import annotations

import torch

from ..launch.hardware import Hardware
from ..launch.plan import Spec, describable
from ..launch.versions import release
from .gluon_names import missing

WIDEST = 128  # channels of a key: the state of as many rows, and two stages of all that it needs, fill a multiprocessor

# the Triton from which GLA's gradient takes 0.63 to 0.71 of the portable kernel's time; before, 0.86 to 1.04
FASTER = (3, 9)

WIDTHS = (64, 128)  # K and V of the delta rules
SCALES = 2.0**-20, 2.0**20  # of gradients that are divided by strengths: dv and w stay in bfloat16's range
DELTA_KERNELS = ("hopper", "hopper_fused", "hopper_ahead")  # the first: the one that models of their times prefer


def refusal_of_any(hardware: Hardware, call) -> str | None:
    """Why no Hopper kernel runs a call, whatever its sizes; None if they do."""
    if call.kernel == "portable":
        return "it was asked for"
    if hardware.name != "sm_90":
        return f"the Hopper kernel is for sm_90, not {hardware.name}"
    if name := missing():
        return f"this Triton has no {name}"
    return None


def refusal_of_box(hardware: Hardware, x: Spec) -> str | None:
    """Why the copy engine does not take a tensor; None if it does."""
    if not describable(x, hardware, x.dtype.itemsize):
        return f"{x.name} of shape {x.shape} and strides {x.strides} is not one that the copy engine reads"
    return None


def refusal_of_tokens(hardware: Hardware, *tokens: Spec) -> str | None:
    """Why a Hopper kernel does not take tokens; None if it does."""
    for x in tokens:
        if x.dtype.itemsize != 2:
            return f"the Hopper kernel takes tokens of 16 bits, and {x.name} is {x.dtype}"
        if reason := refusal_of_box(hardware, x):
            return reason
    return None


def refusal(hardware: Hardware, call) -> str | None:
    """Why the Hopper kernel of GLA does not take a call; None if it does."""
    if reason := refusal_of_any(hardware, call):
        return reason
    if call.g_v is not None:
        return "the Hopper kernel has no gates on values"
    if call.q.shape[-1] > WIDEST:
        return f"the Hopper kernel has K of at most {WIDEST}, not {call.q.shape[-1]}"
    return refusal_of_tokens(hardware, call.q, call.k, call.v) or refusal_of_box(hardware, call.g)


def refusal_of_gradient(hardware: Hardware, call) -> str | None:
    """Why the Hopper kernel of GLA's gradient does not take a call; None if it does."""
    if reason := refusal(hardware, call):
        return reason
    if call.q.dtype != torch.bfloat16:
        return f"the Hopper kernel makes gradients of tokens in bfloat16, not {call.q.dtype}"
    if call.g.dtype.itemsize != 2:
        return f"the Hopper kernel makes gradients with gates of 16 bits, not {call.g.dtype}"
    if call.v.shape[-1] > WIDEST:
        return f"the Hopper kernel makes gradients for V of at most {WIDEST}, not {call.v.shape[-1]}"
    if call.kernel != "hopper" and release() < FASTER:
        older = "a Triton before {}.{}".format(*FASTER)
        return f"by {older} the Hopper kernel's gradient is hardly faster: kernel='hopper' asks for it"
    return None


def refusal_of_delta(hardware: Hardware, call) -> str | None:
    """Why the Hopper kernels of the delta rules do not take a call; None if they do.

    A plan takes them unasked: they are faster than the portable kernel wherever they run (lab/delta_rules.md).
    """
    if reason := refusal_of_any(hardware, call):
        return reason
    for x, axis in ((call.q, "K"), (call.v, "V")):
        if x.shape[-1] not in WIDTHS:
            return f"the Hopper kernels have {axis} of {' or '.join(map(str, WIDTHS))}, not {x.shape[-1]}"
    if reason := refusal_of_tokens(hardware, call.q, call.k, call.v):
        return reason
    if call.path == "segmented" and call.kernel == "hopper_fused":
        return "this kernel walks over each sequence in one go, and path='segmented' was asked for"
    return None


def refusal_of_kda(hardware: Hardware, call) -> str | None:
    """Why the Hopper kernels of KDA do not take a call; None if they do."""
    if reason := refusal_of_delta(hardware, call):
        return reason
    if call.q.dtype != torch.bfloat16:
        return f"the Hopper kernels take tokens in bfloat16, not {call.q.dtype}"
    return refusal_of_box(hardware, call.g)


def refusal_of_kda_gradient(hardware: Hardware, call) -> str | None:
    """Why the Hopper kernels of KDA's gradient do not take a call; None if they do."""
    if reason := refusal_of_kda(hardware, call):
        return reason
    if call.path == "segmented":
        return "the Hopper kernels of the gradient have no segments, and path='segmented' was asked for"
    if call.scale and not SCALES[0] <= abs(call.scale) <= SCALES[1]:
        return f"the Hopper kernels make gradients for a scale of {SCALES[0]:.0e} to {SCALES[1]:.0e}, not {call.scale}"
    return None
