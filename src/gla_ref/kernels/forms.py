"""The function behind each form of `gla_ref.FORMS` that is a kernel (chapter 4)."""

from __future__ import annotations

from functools import partial

from .delta import delta_rule, gated_delta_rule
from .flash_attention import flash_attention
from .gla import gla
from .linear_attention import linear_attention, simple_gla
from .original.gla_chunk_fuse import gla_chunk_fuse
from .steps import delta_rule_step, gated_delta_rule_step, gla_step

FUNCTIONS = {
    "softmax_attention": {"triton": flash_attention},
    "linear_attention": {
        "triton": linear_attention,
        "triton_materialised": partial(linear_attention, path="materialised"),
    },
    "simple_gla": {"triton": simple_gla},
    "gla": {
        "triton": gla,
        "triton_portable": partial(gla, kernel="portable"),
        "triton_hopper": partial(gla, kernel="hopper"),
        "triton_chunk_fuse": gla_chunk_fuse,
        "triton_recurrent": gla_step,
    },
    "delta_rule": {
        "triton": delta_rule,
        "triton_portable": partial(delta_rule, kernel="portable"),
        "triton_recurrent": delta_rule_step,
    },
    "gated_delta_rule": {
        "triton": gated_delta_rule,
        "triton_portable": partial(gated_delta_rule, kernel="portable"),
        "triton_recurrent": gated_delta_rule_step,
    },
}
