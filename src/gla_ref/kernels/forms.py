"""The functions behind the kernels of `gla_ref.FORMS`, imported together (chapters 3 to 24)."""

from __future__ import annotations

from .delta import delta_rule, gated_delta_rule
from .exhibits.gla_chunk_fuse import gla_chunk_fuse
from .flash_attention import flash_attention
from .gla import gla
from .kda import kda
from .linear_attention import linear_attention, simple_gla
from .steps import delta_rule_step, gated_delta_rule_step, gla_step, kda_step

__all__ = [
    "delta_rule",
    "delta_rule_step",
    "flash_attention",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gla",
    "gla_chunk_fuse",
    "gla_step",
    "kda",
    "kda_step",
    "linear_attention",
    "simple_gla",
]
