"""gla_ref: exact references for softmax, linear and gated linear attention and the delta rule (chapters 1 to 24).

`FORMS[mechanism][form]` is a function `o, state = form(q, k, v, ..., *, scale=None, initial_state=None,
cu_seqlens=None, **options)`; every form of a mechanism computes the same thing. Importing the
package needs neither Triton nor a GPU.
"""

from . import (
    chunks,
    costs,
    delta_backward,
    delta_rule,
    gated_delta_rule,
    gates,
    gla,
    gla_backward,
    gla_chunk_fuse,
    kda,
    linear_attention,
    mechanisms,
    prefix_sum,
    rounding,
    simple_gla,
    softmax,
    softmax_attention,
    triangular,
)

__version__ = "0.1.0"
__all__ = [
    "FORMS",
    "chunks",
    "costs",
    "delta_backward",
    "delta_rule",
    "gated_delta_rule",
    "gates",
    "gla",
    "gla_backward",
    "gla_chunk_fuse",
    "kda",
    "linear_attention",
    "mechanisms",
    "prefix_sum",
    "rounding",
    "simple_gla",
    "softmax",
    "softmax_attention",
    "triangular",
]


# Kernels are imported by their first call. An import statement in a function, unlike importlib, is
# something that torch.compile(fullgraph=True) can trace.
def _flash_attention(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.flash_attention.flash_attention`."""
    from .kernels.flash_attention import flash_attention

    return flash_attention(*args, **kwargs)


def _linear_attention(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.linear_attention.linear_attention`."""
    from .kernels.linear_attention import linear_attention

    return linear_attention(*args, **kwargs)


def _linear_attention_materialised(*args, **kwargs):
    """Triton, every chunk's state in memory: :func:`gla_ref.kernels.linear_attention.linear_attention`."""
    return _linear_attention(*args, path="materialised", **kwargs)


def _simple_gla(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.linear_attention.simple_gla`."""
    from .kernels.linear_attention import simple_gla

    return simple_gla(*args, **kwargs)


def _gla_chunk_fuse(*args, **kwargs):
    """Triton, the original's four kernels, forward only: :func:`gla_ref.kernels.gla_chunk_fuse.gla_chunk_fuse`."""
    from .kernels.gla_chunk_fuse import gla_chunk_fuse

    return gla_chunk_fuse(*args, **kwargs)


def _gla(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.gla.gla`."""
    from .kernels.gla import gla

    return gla(*args, **kwargs)


def _forced(kernel, name):
    """The same by the kernel of this name, whatever a plan would choose."""

    def forced(*args, **kwargs):
        return kernel(*args, kernel=name, **kwargs)

    forced.__doc__ = f"{kernel.__doc__.rstrip('.')}, the {name} one."
    return forced


def _gla_step(*args, **kwargs):
    """Triton, token by token, forward only: :func:`gla_ref.kernels.gla_step.gla_step`."""
    from .kernels.gla_step import gla_step

    return gla_step(*args, **kwargs)


def _delta_rule(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.delta.delta_rule`."""
    from .kernels.delta import delta_rule

    return delta_rule(*args, **kwargs)


def _gated_delta_rule(*args, **kwargs):
    """Triton: :func:`gla_ref.kernels.delta.gated_delta_rule`."""
    from .kernels.delta import gated_delta_rule

    return gated_delta_rule(*args, **kwargs)


def _delta_rule_step(*args, **kwargs):
    """Triton, token by token, forward only: :func:`gla_ref.kernels.delta_step.delta_rule_step`."""
    from .kernels.delta_step import delta_rule_step

    return delta_rule_step(*args, **kwargs)


def _gated_delta_rule_step(*args, **kwargs):
    """Triton, token by token, forward only: :func:`gla_ref.kernels.delta_step.gated_delta_rule_step`."""
    from .kernels.delta_step import gated_delta_rule_step

    return gated_delta_rule_step(*args, **kwargs)


FORMS = {
    "softmax_attention": {
        "recurrent": softmax_attention.recurrent,
        "parallel": softmax_attention.parallel,
        "two_pass": softmax_attention.two_pass,
        "flash": softmax_attention.flash,
        "triton": _flash_attention,
        "triton_portable": _forced(_flash_attention, "portable"),
    },
    "linear_attention": {
        "recurrent": linear_attention.recurrent,
        "parallel": linear_attention.parallel,
        "chunkwise": linear_attention.chunkwise,
        "scan": linear_attention.scan,
        "triton": _linear_attention,
        "triton_portable": _forced(_linear_attention, "portable"),
        "triton_materialised": _linear_attention_materialised,
    },
    "simple_gla": {
        "recurrent": simple_gla.recurrent,
        "parallel": simple_gla.parallel,
        "chunkwise": simple_gla.chunkwise,
        "triton": _simple_gla,
        "triton_portable": _forced(_simple_gla, "portable"),
    },
    "gla": {
        "recurrent": gla.recurrent,
        "parallel": gla.parallel,
        "parallel_log": gla.parallel_log,
        "scan": gla.scan,
        "chunkwise": gla.chunkwise,
        "chunkwise_two_level": gla.chunkwise_two_level,
        "triton": _gla,
        "triton_portable": _forced(_gla, "portable"),
        "triton_hopper": _forced(_gla, "hopper"),
        "triton_chunk_fuse": _gla_chunk_fuse,
        "triton_recurrent": _gla_step,
    },
    "delta_rule": {
        "recurrent": delta_rule.recurrent,
        "parallel": delta_rule.parallel,
        "chunkwise": delta_rule.chunkwise,
        "chunkwise_substitution": delta_rule.chunkwise_substitution,
        "scan": delta_rule.scan,
        "triton": _delta_rule,
        "triton_portable": _forced(_delta_rule, "portable"),
        "triton_recurrent": _delta_rule_step,
    },
    "gated_delta_rule": {
        "recurrent": gated_delta_rule.recurrent,
        "parallel": gated_delta_rule.parallel,
        "chunkwise": gated_delta_rule.chunkwise,
        "chunkwise_substitution": gated_delta_rule.chunkwise_substitution,
        "scan": gated_delta_rule.scan,
        "triton": _gated_delta_rule,
        "triton_portable": _forced(_gated_delta_rule, "portable"),
        "triton_recurrent": _gated_delta_rule_step,
    },
    "kda": {"recurrent": kda.recurrent, "chunkwise": kda.chunkwise},
}
