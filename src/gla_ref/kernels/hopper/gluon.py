"""What the kernels for Hopper use of Gluon's Hopper functions, by one name for all versions of Triton (chapter 22)."""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait

from .gluon_names import RENAMED, named

barrier, copy_in, copy_out, reinterpret = map(named, RENAMED)
