"""compat.onnx: ONNX's operator LinearAttention against ONNX's own reference."""

import onnx
import pytest
import torch
from cases import error
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F

from gla_ref.compat.onnx import linear_attention

B, T, K, V = 2, 37, 5, 6
# rule and size of the gates
RULES = [("linear", 0), ("gated", K), ("gated", 1), ("delta", 0), ("gated_delta", K), ("gated_delta", 1)]


def given(rule, D, q_heads, kv_heads, past=True, dtype=torch.float64):
    """The operator's inputs by name."""
    rng = torch.Generator().manual_seed(0)

    def some(*sizes):
        return torch.randn(*sizes, generator=rng, dtype=torch.float64)

    x = {"query": some(B, T, q_heads * K), "key": F.normalize(some(B, T, kv_heads, K), dim=-1).flatten(2)}
    x |= {"value": some(B, T, kv_heads * V)}
    x |= {"past_state": some(B, kv_heads, K, V)} if past else {}
    x |= {"decay": F.logsigmoid(some(B, T, kv_heads * D))} if D else {}
    x |= {"beta": some(B, T, kv_heads).sigmoid()} if "delta" in rule else {}
    return {n: y.to(dtype) for n, y in x.items()}


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("q_heads, kv_heads, scale", [(3, 3, 0.0), (6, 2, -0.3), (4, 1, 0.0)])
@pytest.mark.parametrize("rule, D", RULES)
def test_it_conforms_to_the_reference_implementation(rule, D, q_heads, kv_heads, scale, past):
    x = given(rule, D, q_heads, kv_heads, past, torch.float32)
    attributes = {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "scale": scale, "update_rule": rule}
    names = [n if n in x else "" for n in ("query", "key", "value", "past_state", "decay", "beta")]
    results, info = ["output", "present_state"], onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("LinearAttention", names, results, **attributes)
    ends = [[info(n, onnx.TensorProto.FLOAT, None) for n in some] for some in (x, results)]
    opset = onnx.helper.make_opsetid("", 27)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "one", *ends), opset_imports=[opset])
    theirs = ReferenceEvaluator(model).run(None, {n: y.numpy() for n, y in x.items()})
    for ours, its in zip(linear_attention(**x, **attributes), theirs, strict=True):
        its = torch.from_numpy(its)
        assert ours.shape == its.shape and ours.dtype == its.dtype and error(ours, its.double()) < 1e-5


def test_gradients_and_dtypes():
    x = given("gated", K, 4, 2, dtype=torch.bfloat16)
    x["past_state"] = x["past_state"].float()
    leaves = {n: y.requires_grad_() for n, y in x.items()}
    output, present = linear_attention(**leaves, q_num_heads=4, kv_num_heads=2, update_rule="gated")
    assert output.dtype == torch.bfloat16 and present.dtype == torch.float32
    (output.float().sum() + present.sum()).backward()
    assert all(y.grad is not None and y.grad.isfinite().all() for y in leaves.values())
    del x["past_state"]
    assert linear_attention(**x, q_num_heads=4, kv_num_heads=2, update_rule="gated")[1].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule, D", RULES)
def test_it_takes_back_the_state_that_it_returned(rule, D, dtype):
    """Token by token in 16 bits, as far from float64 as a state of 16 bits is."""
    x = given(rule, D, 4, 2, past=False, dtype=dtype)
    attributes = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    whole, _ = linear_attention(**{n: y.double() for n, y in x.items()}, **attributes)
    state, outputs = None, []
    for t in range(5):
        token = {n: y[:, t : t + 1] for n, y in x.items()}
        o, state = linear_attention(**token, past_state=state, **attributes)
        assert state.dtype == dtype
        outputs.append(o)
    assert error(torch.cat(outputs, 1), whole[:, :5]) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "change, message",
    [
        ({"update_rule": "retain"}, "update_rule: expected one of linear, gated, delta, gated_delta"),
        ({"update_rule": "linear"}, "decay: expected None with update_rule='linear'"),
        ({"update_rule": "gated_delta"}, "beta: expected a tensor with update_rule='gated_delta'"),
        ({"update_rule": "gated_delta", "beta": torch.ones(B, T, 3)}, r"beta: expected \[2, 37, 2\] or \[2, 37, 1\]"),
        ({"kv_num_heads": 3}, "q_num_heads: expected a multiple of kv_num_heads = 3, got 4"),
        ({"query": torch.ones(B, T, 21)}, r"query: expected \[B, T, 4 \* D\], got \[2, 37, 21\]"),
        ({"decay": torch.zeros(B, T, 4)}, r"decay: expected \[2, 37, 2\] or \[2, 37, 10\]"),
        ({"decay": torch.ones(B, T, 2)}, r"decay: log gates must lie in \[-inf, 0\]"),
        ({"past_state": torch.ones(B, 2, V, K)}, r"past_state: expected shape .* with K = 5 as in query"),
        ({"past_state": torch.ones(B, 4, K, V)}, r"past_state: expected shape .* with kv_num_heads = 2 as in key"),
        ({"past_state": torch.ones(B, 2, K, V, dtype=torch.int64)}, "past_state: expected a floating-point dtype"),
        ({"past_state": torch.ones(B, 2, K, V).numpy()}, "past_state: expected a torch.Tensor, got ndarray"),
        (
            {"key": torch.ones(B, T, 2 * V, dtype=torch.float64), "decay": torch.zeros(B, T, 2)},
            "key: expected shape .* with K = 5 as in query",
        ),
        ({"value": torch.ones(B, T, 2 * V)}, "value: expected dtype torch.float64 as for query, got torch.float32"),
        ({"value": torch.ones(B, T + 1, 2 * V, dtype=torch.float64)}, "value: expected shape .* with T = 37"),
        ({"query": None}, "query: expected a torch.Tensor, got NoneType"),
        ({"decay": [0.0]}, "decay: expected a torch.Tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    options = given("gated", K, 4, 2) | {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "gated"}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        linear_attention(**options | change)
