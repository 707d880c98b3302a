"""The one place that knows which versions of Triton have the Gluon that these kernels are written in.

Gluon is experimental: names come, go and change. The kernels use what Triton 3.6 and 3.7 have alike; a name that is
missing is looked for here once, and named in what `explain` says.
"""

from __future__ import annotations

import functools
import importlib

BARRIERS = "barrier", "thread_barrier"  # all warps of a role wait there: its name in Triton 3.7, in 3.6
NEEDED = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
    "triton.experimental.gluon.language": (
        "BlockedLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
        "allocate_shared_memory",
        "associative_scan",
        "convert_layout",
        "join",
        "warp_specialize",
    ),
    "triton.experimental.gluon.language.nvidia.hopper": (
        "fence_async_shared",
        "mma_v2",
        "warpgroup_mma",
        "warpgroup_mma_wait",
    ),
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier": (
        "MBarrierLayout",
        "arrive",
        "expect",
        "init",
        "invalidate",
        "wait",
    ),
    "triton.experimental.gluon.language.nvidia.hopper.tma": (
        "async_copy_global_to_shared",
        "async_copy_shared_to_global",
        "store_wait",
    ),
}


@functools.cache
def missing() -> str | None:
    """What this Triton lacks of Gluon; None if nothing."""
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            return module
        for name in names:
            if not hasattr(found, name):
                return f"{module}.{name}"
    return None if barrier_of_warps() else f"triton.experimental.gluon.language.{BARRIERS[0]}"


def descriptor(*args):
    """A tensor as the copy engine sees it, with the layout of its boxes in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(*args)


def barrier_of_warps():
    """What all warps of a role wait at; None where this Triton has nothing of the kind."""
    from triton.experimental.gluon import language

    return next((getattr(language, name) for name in BARRIERS if hasattr(language, name)), None)
