"""Our kernels under fla's names and signatures (appendix "Check your kernel").

    from gla_ref.compat.fla import chunk_gla            # was: from fla.ops.gla import chunk_gla

    with install():             # or install(), for good: in fla's own layers and models
        loss = model(tokens)

The functions have the signatures of fla-core 0.6.0. Every function returns `(o, final_state)`; the state is None
without `output_final_state`. Like all our kernels they run on a GPU, or interpreted under TRITON_INTERPRET=1, and never
fall back to a reference. Tensors that fla accepts and our kernels want wider are widened: states of 16 bits, tokens
that differ in dtype. An argument that asks for more than our kernels do, such as `reverse` or heads before time, raises
an error that names the argument. Functions that differ in their algorithm alone (chunk, fused chunk, fused recurrent)
are one here: one token without gradients runs `triton_recurrent` where the mechanism has it, any other call `triton`.
"""

import importlib
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .. import FORMS
from .._contract import check_cu_seqlens
from ..gates import softplus_gate
from .libraries import FROM_FLA

# modules of fla's functions: of all its kernels but one, which has no states
MODULES = {it.name: it.module for it in FROM_FLA if it.devices == ("cuda",) and "initial_state" in it.takes}
__all__ = [*MODULES, "Installed", "install"]


def install(*names: str) -> "Installed":
    """Have fla's layers and models call our kernels: `install()` for good, `with install():` for a block.

    Each function of this module takes the place of fla's function of the same name, in every module of fla that has
    it: in those that are loaded, and by way of `fla.ops` in those that are loaded later.

    Args:
        names: functions of this module, such as "chunk_gla"; by default, all functions that fla has.

    Raises:
        ImportError: fla is not installed.
        ValueError: this module has no such function.
    """
    pairs = []
    for name in names or MODULES:
        if name not in MODULES:
            raise ValueError(f"name: expected one of {', '.join(sorted(MODULES))}; got {name!r}")
        try:
            module = importlib.import_module(MODULES[name])
        except ModuleNotFoundError as error:
            if names or error.name != MODULES[name]:
                raise
            continue  # a mechanism that this fla does not have
        own, ours = getattr(module, name, None), globals()[name]
        if own not in (None, ours):
            pairs.append((name, own, ours))
    _replace(pairs)
    return Installed(pairs)


class Installed:
    """The functions that :func:`install` has replaced.

    Attributes:
        pairs: (name, fla's function, our function) of each.
    """

    def __init__(self, pairs: list[tuple[str, Callable, Callable]]):
        self.pairs = pairs

    def undo(self) -> None:
        """Have fla call its own functions again."""
        _replace([(name, ours, own) for name, own, ours in self.pairs])

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *_) -> None:
        self.undo()


def _replace(pairs: list[tuple[str, Callable, Callable]]) -> None:
    """Replace old functions by new ones, (name, old, new), in all modules of fla, under all names that they have."""
    replaced = {id(old): new for _, old, new in pairs}
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] == "fla":
            for name, x in list(vars(module).items()):
                if id(x) in replaced:
                    setattr(module, name, replaced[id(x)])


REFUSED = {
    "head_first": "False: tokens are [B, T, H, D] with time before heads",
    "reverse": "False: the recurrence runs forward in time",
    "gv": "None: the delta rules have no gate on values here",
    "cp_context": "None: gla_ref.context_parallel splits tokens over ranks",
    "use_graph": "False: boundaries are not padded for a graph here",
    "max_num_seqs": "None: boundaries are not padded for a graph here",
}


def _refuse(**given) -> None:
    """Raise an error for every argument that is not at its default; no argument is ignored."""
    for name, value in given.items():
        if name not in REFUSED:
            raise TypeError(f"{name}: expected an argument of fla-core 0.6.0, got {name}={value!r}")
        if isinstance(value, Tensor) or value not in (None, False):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: expected {REFUSED[name]}; got {got}")


def _state_v_first(state_v_first: bool, transpose_state_layout=None, chunk_size=None, sizes=(), **rest) -> bool:
    """Return whether states are `[N, H, V, K]`, by the new name or the older one; refuse all other arguments.

    `chunk_size` is a hint: no result depends on it, and our kernels choose a chunk size themselves. With `sizes`,
    all others are refused, in fla's words.
    """
    _refuse(**rest)
    if sizes and chunk_size not in (None, *sizes):
        raise ValueError(f"`chunk_size` must be either {' or '.join(map(str, sizes))}, got {chunk_size}")
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout: expected no older name beside state_v_first, got both")
    warnings.warn("transpose_state_layout is called state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def _ours(
    mechanism, tokens, scale, initial_state, output_final_state, cu_seqlens, state_v_first=False, o_dtype=None, **more
):
    """Call our kernel by fla's conventions: transpose states `[N, H, V, K]`, and return no state unless asked to.

    States of 16 bits, and q, k and v of different dtypes, are widened; o has `o_dtype`, by default q's, as in fla.
    """
    states = initial_state if isinstance(initial_state, tuple) else (initial_state,)
    states = [x.float() if isinstance(x, Tensor) and x.dtype.itemsize == 2 else x for x in states]
    if state_v_first and initial_state is not None:
        states = [x.mT for x in states]
    initial_state = tuple(states) if isinstance(initial_state, tuple) else states[0]
    q, k, v, *rest = tokens
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    options = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens} | more
    forms, given = FORMS[mechanism], (*tokens, *states, *more.values())
    trains = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
    step = q.shape[1:2] == (1,) and not trains and "triton_recurrent" in forms
    form = forms["triton_recurrent" if step else "triton"]
    if q.shape[-1] > WIDEST and mechanism in APART and not options.get("normalize"):
        o, S = _in_parts(form, q, k, v, *rest, **options)
    else:
        o, S = form(q.to(wide), k.to(wide), v.to(wide), *rest, **options)
    o = o.to(o_dtype or q.dtype)
    if not output_final_state:
        return o, None
    return o, S.mT.contiguous() if state_v_first else S


WIDEST = 256  # K of our kernels
APART = ("linear_attention", "simple_gla", "gla")  # no channel of a key reads another one's row of the state


def _in_parts(form, q, k, v, *gate, scale, initial_state, **options):
    """Keys wider than our kernels take, part by part in float32: o is the sum, the state the parts' rows in turn."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, states = 0, []
    for first in range(0, q.shape[-1], WIDEST):
        part = slice(first, first + WIDEST)
        S = None if initial_state is None else initial_state[..., part, :]
        tokens = q[..., part].float(), k[..., part].float(), v.float()
        gates = (g[..., part] if g.ndim == 4 else g for g in gate)
        o_n, S_n = form(*tokens, *gates, scale=scale, initial_state=S, **options)
        o = o + o_n
        states.append(S_n)
    return o, torch.cat(states, -2)


def _check_copy(cu_seqlens, cu_seqlens_cpu) -> None:
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens: expected the boundaries that cu_seqlens_cpu copies, got None")


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated linear attention by :func:`gla_ref.kernels.gla.gla`.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: natural log gates `[B, T, H, K]`.
        scale: factor on q, K^-0.5 when None.
        initial_state: float32 `[N, H, K, V]`, zeros when None.
        output_final_state: whether to return the final state instead of None.
        state_v_first: states are `[N, H, V, K]`.
        cu_seqlens: boundaries of packed sequences `[N + 1]`, B = 1.
        cu_seqlens_cpu: a copy of the boundaries on the CPU, not needed here: no launch waits for the GPU.

    Returns:
        o `[B, T, H, V]`, and the final state in float32 or None.

    Raises:
        TypeError, ValueError: an argument does not fit, or our kernels do not support its value.
    """
    _check_copy(cu_seqlens, cu_seqlens_cpu)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    return _ours("gla", (q, k, v, g), *rest, o_dtype=v.dtype)


def fused_recurrent_gla(
    q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    """Call :func:`chunk_gla` with gates on keys (`gk`), on values (`gv`, `[B, T, H, V]`), both or neither."""
    state_v_first = _state_v_first(state_v_first, reverse=reverse, **kwargs)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    if gk is None and gv is None:
        return _ours("linear_attention", (q, k, v), *rest)
    gk = q.new_zeros(()).expand(q.shape) if gk is None else gk
    return _ours("gla", (q, k, v, gk), *rest, g_v=gv)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    """Simple GLA, one gate per head: `g` `[B, T, H]`, or `g_gamma` `[H]`, the same for all tokens.

    Without gates this is linear attention. The kernel is :func:`gla_ref.kernels.linear_attention.simple_gla`. All other
    arguments are as in :func:`chunk_gla`.
    """
    _check_copy(cu_seqlens, cu_seqlens_cpu)
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: expected None beside g, got both")
    rest = scale, initial_state, output_final_state, cu_seqlens, _state_v_first(state_v_first, **kwargs)
    g = g if g_gamma is None else g_gamma.expand(q.shape[:3])
    return _ours("linear_attention", (q, k, v), *rest) if g is None else _ours("simple_gla", (q, k, v, g), *rest)


def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    """Linear attention by :func:`gla_ref.kernels.linear_attention.linear_attention`.

    With `normalize`, o is divided by q z, where z is the sum of all keys so far (fla adds 1e-10 to q z, we do not).
    Then the state is `(S, z)`, z `[N, 1, H, K]`; an `initial_state` of S alone starts from z = 0. All other arguments
    are as in :func:`chunk_gla`.
    """
    if not normalize:
        return _ours("linear_attention", (q, k, v), scale, initial_state, output_final_state, cu_seqlens)
    if isinstance(initial_state, Tensor):
        initial_state = initial_state, initial_state.new_zeros(initial_state[:, None, ..., 0].shape)
    if initial_state is not None:
        S, z = initial_state
        if z.ndim != 4 or z.shape[1] != 1:
            raise ValueError(f"initial_state: expected z as [N, 1, H, K], got {list(z.shape)}")
        initial_state = S, z[:, 0]
    o, both = _ours("linear_attention", (q, k, v), scale, initial_state, output_final_state, cu_seqlens, normalize=True)
    return o, None if both is None else (both[0], both[1][:, None])


# fla's other algorithms are the same kernel here


def fused_chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """Call :func:`chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    """Call :func:`chunk_simple_gla`."""
    state_v_first = _state_v_first(state_v_first, reverse=reverse, **kwargs)
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fused_chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    """Call :func:`chunk_linear_attn`."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, normalize=False, cu_seqlens=None
):
    """Call :func:`chunk_linear_attn`."""
    _refuse(reverse=reverse)
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


# the delta rules


def _normalised(x: Tensor) -> Tensor:
    """Normalise vectors to length 1 as fla does: add 1e-6 to the square of the length."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _delta(mechanism, q, k, v, g, beta, normalise, *rest, o_dtype=None):
    """Call our kernel of a mechanism of the delta family, with g None for the delta rule."""
    if normalise:
        q, k = _normalised(q), _normalised(k)
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    tokens = (q, k, v, beta) if mechanism == "delta_rule" else (q, k, v, g, beta)
    return _ours(mechanism, tokens, *rest, o_dtype=o_dtype)


def _strength(beta: Tensor | None, sigmoid: bool, negative: bool) -> Tensor | None:
    """Return write strengths: beta itself, or the float32 sigmoid of logits, doubled for negative eigenvalues.

    Raises:
        ValueError: `negative` without `sigmoid`, as in fla.
    """
    if negative and not sigmoid:
        raise ValueError("allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")
    if not sigmoid or beta is None:
        return beta
    return beta.float().sigmoid() * (2 if negative else 1)


def _log_gate(
    g: Tensor | None, raw: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor | None:
    """Return log gates: g itself or, if `raw`, those of :func:`gla_ref.gates.softplus_gate` in float32.

    Raises:
        ValueError: `raw` without g or A_log.
    """
    if not raw:
        return g  # fla reads neither A_log nor dt_bias then
    if g is None or (A_log is None and lower_bound is None):
        raise ValueError(f"{'g' if g is None else 'A_log'}: expected a tensor with use_gate_in_kernel, got None")
    return softplus_gate(g.float(), A_log, dt_bias, lower_bound=lower_bound)


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rule by :func:`gla_ref.kernels.delta.delta_rule`; all arguments not listed are as in :func:`chunk_gla`.

    Args:
        beta: write strengths `[B, T, H]`.
        use_qk_l2norm_in_kernel: give q and k length 1; here PyTorch does it before the kernel.
        kwargs: only `chunk_size`, a hint, and the older name of `state_v_first`.
    """
    _check_copy(cu_seqlens, cu_seqlens_cpu)
    state_v_first = _state_v_first(False, sizes=(16, 32, 64), **kwargs)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    return _delta("delta_rule", q, k, v, None, beta, use_qk_l2norm_in_kernel, *rest)


def fused_recurrent_delta_rule(
    q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    """Call :func:`chunk_delta_rule`; without beta, write strengths are 1."""
    rest = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return chunk_delta_rule(q, k, v, beta, *rest)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context=None, **kwargs,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule by :func:`gla_ref.kernels.delta.gated_delta_rule`; see also :func:`chunk_delta_rule`.

    Args:
        v: values `[B, T, HV, V]`, HV a multiple of H; o and states have HV heads too.
        g: natural log gates `[B, T, HV]`.
        beta: write strengths `[B, T, HV]`.
        use_beta_sigmoid_in_kernel: beta are logits; their sigmoid is the write strength.
        allow_neg_eigval: with `use_beta_sigmoid_in_kernel`, the strength is twice the sigmoid.
        chunk_indices: not needed here.
        cp_context: refused.
        kwargs: with `use_gate_in_kernel` the log gates are -e^A_log softplus(g + dt_bias), from `A_log` and `dt_bias`
            `[HV]`; here PyTorch makes them before the kernel. Otherwise as in :func:`chunk_delta_rule`.
    """
    _check_copy(cu_seqlens, cu_seqlens_cpu)
    raw, A_log, dt_bias = (kwargs.pop(n, None) for n in ("use_gate_in_kernel", "A_log", "dt_bias"))
    g = _log_gate(g, raw, A_log, dt_bias)
    state_v_first = _state_v_first(state_v_first, sizes=(16, 32, 64), cp_context=cp_context, **kwargs)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    return _delta("delta_rule" if g is None else "gated_delta_rule", q, k, v, g, beta, use_qk_l2norm_in_kernel, *rest)


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    """Call the kernel of :func:`chunk_gated_delta_rule`; without g this is the delta rule; without beta, beta is 1.

    With `gk`, log gates for channels `[B, T, HV, K]`, alone or added to g, this is KDA.
    """
    state_v_first = _state_v_first(state_v_first, gv=gv, **kwargs)
    g = _log_gate(g, use_gate_in_kernel, A_log, dt_bias)
    mechanism = "kda" if gk is not None else "delta_rule" if g is None else "gated_delta_rule"
    if gk is not None:
        g = gk if g is None else g[..., None] + gk
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    return _delta(mechanism, q, k, v, g, beta, use_qk_l2norm_in_kernel, *rest, o_dtype=v.dtype)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context=None, use_graph: bool = False, max_num_seqs: int | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Kimi Delta Attention by :func:`gla_ref.kernels.kda.kda`; other arguments as in :func:`chunk_gated_delta_rule`.

    Args:
        g: natural log gates `[B, T, HV, K]`.
        use_gate_in_kernel: g are logits; the log gates are those of :func:`gla_ref.gates.softplus_gate` with `A_log`
            `[HV]` and, if given, `dt_bias` `[HV K]` among `kwargs`; here PyTorch makes them before the kernel.
        safe_gate: a hint, as `disable_recompute` is: our kernels look at the gates and are right for all.
        lower_bound: of gates from logits, which then need no `A_log`; without logits a hint.
        return_intermediate_states: return a third result, the states before each chunk of `chunk_size` tokens (by
            default 64) in k's dtype, `[B, chunks, HV, K, V]`, of packed sequences one after the other. The kernel then
            runs chunk by chunk; cu_seqlens are read, which waits for the GPU.
        use_graph: refused, as `max_num_seqs` is.
    """
    _check_copy(cu_seqlens, cu_seqlens_cpu)
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: expected one in [-5, 0) with safe_gate on logits, got {lower_bound}")
    A_log, dt_bias, C = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), kwargs.get("chunk_size", 64)
    kwargs |= {"cp_context": cp_context, "use_graph": use_graph, "max_num_seqs": max_num_seqs}
    state_v_first = _state_v_first(state_v_first, sizes=(32, 64), **kwargs)
    g = _log_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    if return_intermediate_states:
        return _chunk_by_chunk(C, (q, k, v, g, beta), use_qk_l2norm_in_kernel, *rest)
    return _delta("kda", q, k, v, g, beta, use_qk_l2norm_in_kernel, *rest)


def _chunk_by_chunk(C, tokens, normalise, scale, S, output_final_state, cu_seqlens, state_v_first):
    """KDA with the states before each chunk of C tokens: each chunk starts from the state that the last one left."""
    B, T, H, K = tokens[0].shape
    *_, HV, V = tokens[2].shape
    ends = check_cu_seqlens(cu_seqlens, B, T) or [0, T]
    N = B if cu_seqlens is None else len(ends) - 1
    if S is None:
        S = tokens[0].new_zeros(N, HV, *((V, K) if state_v_first else (K, V)), dtype=torch.float32)
    o, before, last = [], [], []
    for S_n, start, end in zip([S] if cu_seqlens is None else S.split(1), ends, ends[1:], strict=False):
        for t in range(start, end, C):
            chunk = (x[:, t : min(t + C, end)] for x in tokens)
            before.append(S_n)
            o_n, S_n = _delta("kda", *chunk, normalise, scale, S_n, True, None, state_v_first)
            o.append(o_n)
        last.append(S_n)
    return torch.cat(o, 1), torch.cat(last) if output_final_state else None, torch.stack(before, 1).to(tokens[1])


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    """Call the kernel of :func:`chunk_kda`."""
    state_v_first = _state_v_first(state_v_first, **kwargs)
    g = _log_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rest = scale, initial_state, output_final_state, cu_seqlens, state_v_first
    return _delta("kda", q, k, v, g, beta, use_qk_l2norm_in_kernel, *rest, o_dtype=v.dtype)
