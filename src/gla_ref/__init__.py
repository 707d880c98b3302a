"""gla_ref: exact references for softmax, linear and gated linear attention and the delta rule (chapters 1 to 25).

`FORMS[mechanism][form]` is a function `o, state = form(q, k, v, ..., *, scale=None, initial_state=None,
cu_seqlens=None, **options)`. On paper every form of a mechanism computes the same thing; one that strong gates break
says so. Importing the package needs neither Triton nor a GPU.
"""

import sys

from . import (
    chunks,
    delta_rule,
    gated_delta_rule,
    gates,
    gla,
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
from .kernels.exhibits import reference as gla_chunk_fuse

__version__ = "0.1.0"
__all__ = [
    "FORMS",
    "chunks",
    "delta_rule",
    "gated_delta_rule",
    "gates",
    "gla",
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


class _Kernel:
    """A form that imports its kernel in the first call: `import gla_ref` needs no Triton.

    Attributes:
        function: its name in kernels/forms.py.
        options: of each call, unless the caller gives others.
    """

    def __init__(self, function: str, sentence: str, **options):
        self.function, self.options, self.__doc__ = function, options, f"Triton, {sentence} (:mod:`gla_ref.kernels`)."

    def __call__(self, *args, **kwargs):
        try:  # torch.compile(fullgraph=True) can trace an import statement, but not importlib
            from .kernels import forms
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            from .kernels import NO_TRITON

            others = [name for name, form in FORMS[self.mechanism].items() if not isinstance(form, _Kernel)]
            sentence = f"{NO_TRITON}; references of {self.mechanism} run without it: {', '.join(others)}"
            raise ModuleNotFoundError(sentence, name="triton") from error
        return getattr(forms, self.function)(*args, **{**self.options, **kwargs})

    def __reduce__(self):  # a copy and an unpickled kernel are the same object
        return _form, (self.mechanism, self.__name__)

    def __repr__(self):
        return f"<form {self.__name__} of {self.mechanism}>"


def _form(mechanism: str, form: str):
    return FORMS[mechanism][form]


sys.modules[f"{__name__}.gla_chunk_fuse"] = gla_chunk_fuse  # `from gla_ref.gla_chunk_fuse import steps` works too

# kernels: functions of kernels/gla.py, delta.py, kda.py, linear_attention.py, flash_attention.py and steps.py
_CHOSEN, _STEPS = "the kernel that a plan chooses", "token by token, forward only"
_PORTABLE = "the kernel for every GPU, where a plan would choose another"
FORMS = {
    "softmax_attention": {
        "recurrent": softmax_attention.recurrent,
        "parallel": softmax_attention.parallel,
        "two_pass": softmax_attention.two_pass,
        "flash": softmax_attention.flash,
        "triton": _Kernel("flash_attention", _CHOSEN),
    },
    "linear_attention": {
        "recurrent": linear_attention.recurrent,
        "parallel": linear_attention.parallel,
        "chunkwise": linear_attention.chunkwise,
        "scan": linear_attention.scan,
        "triton": _Kernel("linear_attention", _CHOSEN),
        "triton_materialised": _Kernel("linear_attention", "every chunk's state in memory", path="materialised"),
    },
    "simple_gla": {
        "recurrent": simple_gla.recurrent,
        "parallel": simple_gla.parallel,
        "chunkwise": simple_gla.chunkwise,
        "triton": _Kernel("simple_gla", _CHOSEN),
    },
    "gla": {
        "recurrent": gla.recurrent,
        "parallel": gla.parallel,
        "parallel_log": gla.parallel_log,
        "scan": gla.scan,
        "chunkwise": gla.chunkwise,
        "chunkwise_two_level": gla.chunkwise_two_level,
        "triton": _Kernel("gla", _CHOSEN),
        "triton_portable": _Kernel("gla", _PORTABLE, kernel="portable"),
        "triton_hopper": _Kernel("gla", "the kernel for Hopper", kernel="hopper"),
        "triton_chunk_fuse": _Kernel("gla_chunk_fuse", "the original's four kernels, forward only"),
        "triton_recurrent": _Kernel("gla_step", _STEPS),
    },
    "delta_rule": {
        "recurrent": delta_rule.recurrent,
        "parallel": delta_rule.parallel,
        "chunkwise": delta_rule.chunkwise,
        "chunkwise_substitution": delta_rule.chunkwise_substitution,
        "scan": delta_rule.scan,
        "triton": _Kernel("delta_rule", _CHOSEN),
        "triton_portable": _Kernel("delta_rule", _PORTABLE, kernel="portable"),
        "triton_recurrent": _Kernel("delta_rule_step", _STEPS),
    },
    "gated_delta_rule": {
        "recurrent": gated_delta_rule.recurrent,
        "parallel": gated_delta_rule.parallel,
        "chunkwise": gated_delta_rule.chunkwise,
        "chunkwise_substitution": gated_delta_rule.chunkwise_substitution,
        "scan": gated_delta_rule.scan,
        "triton": _Kernel("gated_delta_rule", _CHOSEN),
        "triton_portable": _Kernel("gated_delta_rule", _PORTABLE, kernel="portable"),
        "triton_recurrent": _Kernel("gated_delta_rule_step", _STEPS),
    },
    "kda": {
        "recurrent": kda.recurrent,
        "chunkwise": kda.chunkwise,
        "chunkwise_two_level": kda.chunkwise_two_level,
        "triton": _Kernel("kda", _CHOSEN),
        "triton_portable": _Kernel("kda", _PORTABLE, kernel="portable"),
        "triton_recurrent": _Kernel("kda_step", _STEPS),
    },
}
for _mechanism, _forms in FORMS.items():
    for _name, _function in _forms.items():
        if isinstance(_function, _Kernel):
            _function.mechanism, _function.__name__ = _mechanism, _name
