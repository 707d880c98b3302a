"""Functions of other libraries under this book's contract, and their claims, as data (appendix "Check your kernel").

Check one::

    fn = libraries.function("fla.chunk_gla")
    print(check.kernel("gla", fn, device="cuda"))

The appendix "Who passes" shows the check kit's findings on each function.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

from ..mechanisms import MECHANISMS

if TYPE_CHECKING:
    from ..check import Case

__all__ = ["FUNCTIONS", "Function", "function"]

LOWEST = -1e3  # gates of the check kit that are finite
OPTIONS = ("scale", "initial_state", "cu_seqlens")
FLA = {"linear_attention": "linear_attn"}  # modules of fla.ops whose names differ from the mechanism's
BOTH = ("cpu", "cuda")
IN_WORDS = {"q": "query", "k": "key", "v": "value"}
WITH_STATE = {"output_final_state": True}  # fla returns no state unless asked to
NOT_DIVIDED = {"normalize": False}  # linear attention, which fla normalises unless told not to
STATELESS = {"state": False}
HEADS_FIRST = {"heads_first": True, "grouped": False}  # tokens are [B, H, T, D], with as many value heads as key heads
FLOAT32 = {"dtypes": ("fp32",)}  # it returns float32, or cannot multiply it by other tokens
EVEN = {"multiples": {"K": 2, "V": 2}}  # as chunk_bwd_dv asserts
SIXTEENS = {"multiples": {"K": 16, "V": 16}}  # a backward kernel takes no fewer than 16 channels, and does not pad
EIGHTS = {"packed": False, "state": False, "multiples": {"K": 8, "V": 8}}  # as PyTorch's choice of a backend asks


@dataclass(frozen=True)
class Function:
    """A library's function: its mechanism, its call, and its library's claim.

    Attributes:
        mechanism: a key of `gla_ref.mechanisms.MECHANISMS`.
        module: the function's module.
        name: the function's name in the module.
        devices: "cpu", "cuda" or both.
        takes: the arguments that the function takes, among scale, initial_state and cu_seqlens.
        names: our argument names to the function's, where they differ.
        options: further arguments of each call.
        heads_first: tokens are `[B, H, T, D]`.
        grouped: several value heads may read one key head, if the mechanism allows it.
        bare: call the function without its decorators, which may call another library if that is installed.
        backend: of PyTorch's `scaled_dot_product_attention`, as `SDPBackend` names it.
        supports: the claim, as :func:`gla_ref.check.kernel` takes it; a function without `initial_state` has no state.
        source: the place of the claim.
    """

    mechanism: str
    module: str
    name: str
    devices: tuple[str, ...] = ("cuda",)
    takes: tuple[str, ...] = OPTIONS
    names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    heads_first: bool = False
    grouped: bool = True
    bare: bool = False
    backend: str = ""
    supports: Mapping[str, object] | Callable = field(default_factory=dict)
    source: str = ""

    @property
    def library(self) -> str:
        """The package to import, such as "fla", "transformers" or "torch"."""
        return self.module.split(".")[0]

    @property
    def claim(self) -> str:
        """The claim in words."""
        if callable(self.supports):
            return inspect.getdoc(self.supports).removesuffix(".")
        from ..check._claims import Claim  # imported here, because a call of the function does not need the kit

        words = (str(Claim.of(self.supports)), "" if self.grouped else "one value head for each key head")
        return ", ".join(filter(None, words)) or "everything"


def _fla(mechanism: str, name: str, **fields) -> Function:
    """A kernel of fla, for gates from logsigmoid, which are finite; `supports` says more of its claim."""
    module = FLA.get(mechanism, mechanism)
    supports = ({"min_gate": LOWEST} if MECHANISMS[mechanism].named("gate") else {}) | fields.pop("supports", {})
    fields = {"options": WITH_STATE, "source": "its docstring and assertions"} | fields
    return Function(mechanism, f"fla.ops.{module}", name, supports=supports, **fields)


def _naive(mechanism: str, name: str, multiple: int = 1, **fields) -> Function:
    """A reference of fla in PyTorch, which has neither documentation nor packed sequences."""
    supports = {"packed": False} | fields.pop("supports", {})
    supports |= {"multiples": {"T": multiple}} if multiple > 1 else {}
    fields = {"devices": BOTH, "takes": OPTIONS[:2], "source": "its signature and assertions"} | fields
    kernel = _fla(mechanism, name, supports=supports, **fields)
    return replace(kernel, module=f"{kernel.module}.naive")


def _transformers(name: str) -> Function:
    """The PyTorch code of a model that runs where fla is not installed."""
    return Function(
        "gated_delta_rule",
        "transformers.models.qwen3_next.modeling_qwen3_next",
        name,
        BOTH,
        takes=("initial_state",),
        names=IN_WORDS,
        options=WITH_STATE,
        grouped=False,
        bare=True,
        supports={"packed": False, "min_gate": LOWEST},
        source="its docstring",
    )


def equal_widths(case: Case) -> bool:
    """Values as wide as keys, no packed sequences, no initial state."""
    return case.K == case.V and not case.state and not case.ends


def _sdpa(backend: str, *devices: str, supports: Mapping | Callable | None = None) -> Function:
    return Function(
        "softmax_attention",
        "torch.nn.functional",
        "scaled_dot_product_attention",
        devices,
        takes=("scale",),
        names=IN_WORDS,
        options={"is_causal": True},
        heads_first=True,
        backend=backend,
        supports=supports or {"packed": False, "state": False},
        source="PyTorch's documentation",
    )


FROM_FLA = (
    _fla("gla", "chunk_gla", supports=SIXTEENS),
    _fla("gla", "fused_recurrent_gla", names={"g": "gk"}),
    _fla("simple_gla", "chunk_simple_gla", supports=EVEN),
    _fla("simple_gla", "fused_chunk_simple_gla"),
    _fla("simple_gla", "fused_recurrent_simple_gla"),
    _fla("simple_gla", "parallel_simple_gla", takes=("scale", "cu_seqlens"), options={}, supports=STATELESS | SIXTEENS),
    _fla("linear_attention", "fused_chunk_linear_attn", options=NOT_DIVIDED | WITH_STATE),
    _fla("linear_attention", "fused_recurrent_linear_attn", options=NOT_DIVIDED | WITH_STATE),
    _fla("linear_attention", "chunk_linear_attn", options=NOT_DIVIDED | WITH_STATE, supports=EVEN),
    _fla("delta_rule", "chunk_delta_rule", grouped=False, supports={"dtypes": ("bf16",)}),
    _fla("delta_rule", "fused_recurrent_delta_rule", grouped=False),
    _fla("gated_delta_rule", "chunk_gated_delta_rule"),
    _fla("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    _fla("kda", "chunk_kda"),
    _fla("kda", "fused_recurrent_kda"),
    _naive("gla", "naive_recurrent_gla", takes=("initial_state",), names={"g": "gk"}),
    _naive("simple_gla", "naive_recurrent_simple_gla"),
    _naive("simple_gla", "naive_chunk_simple_gla", supports=FLOAT32),
    _naive("simple_gla", "naive_parallel_simple_gla", takes=("scale",), options={}, supports=STATELESS | FLOAT32),
    _naive("linear_attention", "naive_recurrent_linear_attn"),
    _naive("linear_attention", "naive_chunk_linear_attn", 64, takes=("scale",), options={}, supports=STATELESS),
    _naive("delta_rule", "delta_rule_recurrence", takes=("initial_state",), **HEADS_FIRST),
    _naive("delta_rule", "delta_rule_chunkwise", 32, takes=(), options={}, supports=STATELESS | FLOAT32, **HEADS_FIRST),
    _naive("gated_delta_rule", "naive_recurrent_gated_delta_rule", supports=FLOAT32, grouped=False),
    _naive("gated_delta_rule", "naive_chunk_gated_delta_rule", supports=FLOAT32, grouped=False),
    _naive("kda", "naive_recurrent_kda"),
    _naive("kda", "naive_chunk_kda", 64),
)
FUNCTIONS = {f"fla.{entry.name}": entry for entry in FROM_FLA} | {
    "transformers.torch_recurrent_gated_delta_rule": _transformers("torch_recurrent_gated_delta_rule"),
    "transformers.torch_chunk_gated_delta_rule": _transformers("torch_chunk_gated_delta_rule"),
    "torch.sdpa_math": _sdpa("MATH", *BOTH),
    "torch.sdpa_flash": _sdpa("FLASH_ATTENTION", *BOTH, supports=equal_widths),
    "torch.sdpa_efficient": _sdpa("EFFICIENT_ATTENTION", "cuda", supports=EIGHTS),
    "torch.sdpa_cudnn": _sdpa("CUDNN_ATTENTION", "cuda", supports=EIGHTS),
}


def function(name: str) -> Callable:
    """Return a library's function under this book's contract; the first call imports the library.

    Args:
        name: a key of `FUNCTIONS`, such as "fla.chunk_gla".

    Returns:
        `o, state = fn(q, k, v[, g][, beta], *, scale=None, initial_state=None, cu_seqlens=None)`, without the options
        that the library does not take; the function's attribute `supports` is the claim.

    Raises:
        ValueError: the library has no such function here.
    """
    if name not in FUNCTIONS:
        raise ValueError(f"name: expected one of {', '.join(sorted(FUNCTIONS))}; got {name!r}")
    from ..check import NotClaimed  # imported here, so that importing fla's names stays fast

    entry = FUNCTIONS[name]
    required = MECHANISMS[entry.mechanism].required

    def fn(*tensors, **given):
        theirs = getattr(importlib.import_module(entry.module), entry.name)
        theirs = inspect.unwrap(theirs) if entry.bare else theirs
        if not entry.grouped and tensors[0].shape[2] != tensors[2].shape[2]:
            raise NotClaimed
        named = {entry.names.get(n, n): x for n, x in zip(required, tensors, strict=True)}
        if entry.heads_first:
            named = {n: x.transpose(1, 2) for n, x in named.items()}
        if given.get("cu_seqlens") is not None:
            given["cu_seqlens"] = given["cu_seqlens"].long()
        with _only(entry.backend):
            result = theirs(**named, **given, **entry.options)
        o, state = result[:2] if isinstance(result, tuple) else (result, None)
        return o.transpose(1, 2) if entry.heads_first else o, state if "initial_state" in entry.takes else None

    fn.__name__ = entry.name
    parameters = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in required]
    parameters += [Parameter(n, Parameter.KEYWORD_ONLY, default=None) for n in entry.takes]
    fn.__signature__ = Signature(parameters)
    fn.supports = entry.supports
    return fn


def _only(backend: str):
    """Limit PyTorch's attention to one backend, which refuses inputs that it cannot take; return others unchanged."""
    if not backend:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))
