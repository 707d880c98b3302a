"""Names that modules had before release 1.0: importing one warns and gives the module under its new name.

This file goes with release 1.1.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "gla_ref.costs": "gla_ref.book.costs",
    "gla_ref.exercises": "gla_ref.book.exercises",
    "gla_ref.notebook": "gla_ref.book.notebook",
    "gla_ref.scaling": "gla_ref.book.scaling",
    "gla_ref.viz": "gla_ref.book.viz",
    "gla_ref.delta_backward": "gla_ref.gradients.delta_rule",
    "gla_ref.gla_backward": "gla_ref.gradients.gla",
    "gla_ref.kernels.border": "gla_ref.kernels.portable.border",
    "gla_ref.kernels.decay_cumsum": "gla_ref.kernels.original.decay_cumsum",
    "gla_ref.kernels.delta_forward": "gla_ref.kernels.portable.delta_forward",
    "gla_ref.kernels.delta_gradient": "gla_ref.kernels.portable.delta_gradient",
    "gla_ref.kernels.delta_step": "gla_ref.kernels.steps",
    "gla_ref.kernels.gla_chunk_fuse": "gla_ref.kernels.original.gla_chunk_fuse",
    "gla_ref.kernels.gla_forward": "gla_ref.kernels.portable.gla_forward",
    "gla_ref.kernels.gla_gradient": "gla_ref.kernels.portable.gla_gradient",
    "gla_ref.kernels.gla_step": "gla_ref.kernels.steps",
    "gla_ref.kernels.gla_two_sided": "gla_ref.kernels.portable.gla_two_sided",
    "gla_ref.models.over_ranks": "gla_ref.over_ranks.language_model",
}


def new_name(name: str) -> str | None:
    """The new name of a module; None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


class Finder(MetaPathFinder, Loader):
    """Finds a module by its old name."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if new_name(name) else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = new_name(old)
        warnings.warn(f"{old} is now {new}; the old name ends with release 1.1", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def install() -> None:
    """Let `import` know the old names."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # before that of files, which looks for submodules under the new package


def of_package(name: str) -> ModuleType:
    """`gla_ref.name`, for a module that `import gla_ref` used to import.

    Raises:
        AttributeError: there never was such a module.
    """
    if f"gla_ref.{name}" not in MOVED:
        raise AttributeError(f"module 'gla_ref' has no attribute {name!r}")
    return import_module(f"gla_ref.{name}")
