"""gla_ref: exact references for softmax, linear and gated linear attention (chapters 1 to 9).

`FORMS[mechanism][form]` is a function `o, state = form(q, k, v, ..., *, scale=None, initial_state=None,
cu_seqlens=None, **options)`; every form of a mechanism computes the same thing. Importing the
package needs neither Triton nor a GPU.
"""

import importlib
import sys
from collections.abc import Callable

import torch

from . import (
    costs,
    gates,
    gla,
    gla_backward,
    linear_attention,
    prefix_sum,
    simple_gla,
    softmax,
    softmax_attention,
)

__version__ = "0.1.0"
__all__ = [
    "FORMS",
    "costs",
    "gates",
    "gla",
    "gla_backward",
    "linear_attention",
    "prefix_sum",
    "simple_gla",
    "softmax",
    "softmax_attention",
]


@torch.compiler.assume_constant_result  # torch.compile cannot trace an import; this runs it instead
def _import(path: str) -> bool:
    return bool(importlib.import_module(path))


def _kernel(module: str, name: str) -> Callable:
    """The function `name` of kernels/`module`.py, imported (and Triton with it) by the first call."""
    path = f"gla_ref.kernels.{module}"

    def call(*args, **kwargs):
        _import(path)
        return getattr(sys.modules[path], name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"See `gla_ref.kernels.{module}.{name}`."
    return call


FORMS = {
    "softmax_attention": {
        "recurrent": softmax_attention.recurrent,
        "parallel": softmax_attention.parallel,
        "two_pass": softmax_attention.two_pass,
        "flash": softmax_attention.flash,
        "triton": _kernel("flash_attention", "flash_attention"),
    },
    "linear_attention": {
        "recurrent": linear_attention.recurrent,
        "parallel": linear_attention.parallel,
        "chunkwise": linear_attention.chunkwise,
        "scan": linear_attention.scan,
    },
    "simple_gla": {
        "recurrent": simple_gla.recurrent,
        "parallel": simple_gla.parallel,
        "chunkwise": simple_gla.chunkwise,
    },
    "gla": {
        "recurrent": gla.recurrent,
        "parallel": gla.parallel,
        "parallel_log": gla.parallel_log,
        "scan": gla.scan,
        "chunkwise": gla.chunkwise,
        "chunkwise_two_level": gla.chunkwise_two_level,
    },
}
