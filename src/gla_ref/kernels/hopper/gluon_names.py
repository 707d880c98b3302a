"""The one place that knows which versions of Triton have the Gluon of these kernels (chapter 22).

Gluon is experimental: names come, go and change. The kernels use what Triton 3.6 to 3.9 have alike, and ask here for
what has been renamed. A name that is missing is named in what `explain` says.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

LANGUAGE = "triton.experimental.gluon.language"
TMA = f"{LANGUAGE}.nvidia.hopper.tma"
# renamed: the module or class, and the names, the newest first
RENAMED = {
    "barrier": (LANGUAGE, "barrier", "thread_barrier"),  # all warps of a role wait there; the second until 3.6
    "copy_in": (TMA, "async_load", "async_copy_global_to_shared"),  # a box to shared memory; the second until 3.8
    "copy_out": (TMA, "async_store", "async_copy_shared_to_global"),  # a box from shared memory
    # a tile of shared memory as another type and shape; the second until 3.8
    "reinterpret": (f"{LANGUAGE}.shared_memory_descriptor", "reinterpret", "_reinterpret"),
}
NEEDED = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
    LANGUAGE: tuple(
        "BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout NVMMASharedLayout SliceLayout "
        "SwizzledSharedLayout allocate_shared_memory associative_scan convert_layout join warp_specialize".split()
    ),
    f"{LANGUAGE}.nvidia.hopper": ("fence_async_shared", "mma_v2", "warpgroup_mma", "warpgroup_mma_wait"),
    f"{LANGUAGE}.nvidia.hopper.mbarrier": ("MBarrierLayout", "arrive", "expect", "init", "invalidate", "wait"),
    TMA: ("store_wait",),
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
    gone = [f"{home}.{names[0]}" for what, (home, *names) in RENAMED.items() if named(what) is None]
    return gone[0] if gone else None


def named(what: str):
    """An entry of RENAMED by the name that this Triton has for it; None where it has none."""
    home, *names = RENAMED[what]
    home = pkgutil.resolve_name(home)
    return next((getattr(home, name) for name in names if hasattr(home, name)), None)
