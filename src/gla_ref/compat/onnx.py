"""Our references as ONNX's operator LinearAttention, opset 27 (appendix "Check your kernel")::

    output, present_state = linear_attention(
        query, key, value, past_state, decay, q_num_heads=8, kv_num_heads=8, update_rule="gated"
    )

The function has the operator's names, axes and defaults, and takes PyTorch tensors. ONNX calls the log gate `decay`,
and lets several heads of queries read the state of one head of keys and values.
"""

from torch import Tensor

from .. import FORMS
from .._contract import check_gate, check_tensors, compute_dtype
from ..mechanisms import Argument

RULES = {  # update rule: whether it has (decay, beta)
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}
MECHANISMS = {  # mechanism by (gates for channels, gates for heads, write strengths)
    (False, False, False): "linear_attention",
    (False, True, False): "simple_gla",
    (True, False, False): "gla",
    (False, False, True): "delta_rule",
    (False, True, True): "gated_delta_rule",
    (True, False, True): "kda",
}
ARGUMENTS = {  # as linear_attention sees them, in heads
    "query": Argument("query", "B T q_num_heads K", "token"),
    "key": Argument("key", "B T kv_num_heads K", "token"),
    "value": Argument("value", "B T kv_num_heads V", "token"),
    "past_state": Argument("past_state", "B kv_num_heads K V", "state", optional=True),
    "decay": Argument("decay", "B T kv_num_heads", "gate", optional=True),
    "beta": Argument("beta", "B T kv_num_heads", "strength", optional=True),
}
__all__ = ["linear_attention"]


def _heads(name: str, x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * D]` to `[B, T, heads, D]`."""
    if x.ndim != 3 or x.shape[-1] % heads:
        raise ValueError(f"{name}: expected [B, T, {heads} * D], got {list(x.shape)}")
    return x.unflatten(-1, (heads, -1))


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """LinearAttention by the chunkwise references, differentiable; in float64 for float64 inputs.

    Args:
        query: `[B, T, q_num_heads * K]`.
        key: `[B, T, kv_num_heads * K]`.
        value: `[B, T, kv_num_heads * V]`.
        past_state: `[B, kv_num_heads, K, V]`, zeros when None.
        decay: natural log gates `[B, T, kv_num_heads]` or `[B, T, kv_num_heads * K]`; None if the rule has no gates.
        beta: write strengths `[B, T, kv_num_heads]` or `[B, T, 1]`; None if the rule has no strengths.
        q_num_heads: a multiple of `kv_num_heads`; q_num_heads / kv_num_heads neighbouring heads read one state.
        kv_num_heads: heads of keys, values, gates and states.
        scale: factor on the output, K^-0.5 when 0.
        update_rule: "linear", "gated", "delta" or "gated_delta".
        chunk_size: a hint; no result depends on it.

    Returns:
        output `[B, T, q_num_heads * V]` in the dtype of `query`, and the state after the last token, in the dtype of
        `past_state`, or of `query` without a `past_state`.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if update_rule not in RULES:
        raise ValueError(f"update_rule: expected one of {', '.join(RULES)}; got {update_rule!r}")
    for (name, x), needed in zip((("decay", decay), ("beta", beta)), RULES[update_rule], strict=True):
        if (x is not None) != needed:
            what, got = ("a tensor", "None") if needed else ("None", "a tensor")
            raise ValueError(f"{name}: expected {what} with update_rule={update_rule!r}, got {got}")
    if min(q_num_heads, kv_num_heads) < 1 or q_num_heads % kv_num_heads:
        raise ValueError(f"q_num_heads: expected a multiple of kv_num_heads = {kv_num_heads}, got {q_num_heads}")
    tensors = {"query": query, "key": key, "value": value, "past_state": past_state, "decay": decay, "beta": beta}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (x is None and ARGUMENTS[name].optional):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    heads = {"query": q_num_heads, "key": kv_num_heads, "value": kv_num_heads}
    tensors |= {name: _heads(name, tensors[name], n) for name, n in heads.items()}
    readers, (B, T, _) = q_num_heads // kv_num_heads, key.shape
    by_head = decay is not None and decay.shape[-1] == kv_num_heads
    if decay is not None:
        if decay.shape not in ((B, T, kv_num_heads), key.shape):
            raise ValueError(f"decay: expected {[B, T, kv_num_heads]} or {list(key.shape)}, got {list(decay.shape)}")
        check_gate("decay", decay)
        tensors["decay"] = decay if by_head else _heads("decay", decay, kv_num_heads)
    if beta is not None:
        if beta.shape not in ((B, T, kv_num_heads), (B, T, 1)):
            raise ValueError(f"beta: expected {[B, T, kv_num_heads]} or {[B, T, 1]}, got {list(beta.shape)}")
        tensors["beta"] = beta.expand(B, T, kv_num_heads)
    by_channel = {} if by_head else {"decay": ARGUMENTS["decay"]._replace(axes="B T kv_num_heads K")}
    check_tensors(tensors, (ARGUMENTS | by_channel).values())

    mechanism = MECHANISMS[decay is not None and not by_head, by_head, beta is not None]
    past = None if past_state is None else past_state.to(compute_dtype(past_state)).repeat_interleave(readers, 1)
    given = [tensors[n] for n in ("key", "value", "decay", "beta") if tensors[n] is not None]
    read = (x.repeat_interleave(readers, 2) for x in given)
    o, S = FORMS[mechanism]["chunkwise"](tensors["query"], *read, scale=scale or None, initial_state=past)
    kept = query.dtype if past_state is None else past_state.dtype
    return o.flatten(2).to(query.dtype), S[:, ::readers].to(kept)
