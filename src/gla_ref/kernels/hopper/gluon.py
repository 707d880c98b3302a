"""What the kernels for Hopper use of Gluon's Hopper functions, by one name for all versions of Triton (chapter 22)."""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_names import RENAMED, named

barrier, copy_in, copy_out, reinterpret = map(named, RENAMED)

__all__ = [*RENAMED, "fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]
