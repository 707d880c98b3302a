"""Costs: both FLOP counts are those of the references; bad arguments are named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from cases import meta_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gla_ref import FORMS
from gla_ref.book.costs import FORMS as COUNTED
from gla_ref.book.costs import cost

CASES = [(mechanism, form) for mechanism, forms in COUNTED.items() for form in forms]
# B, T, H, K, V, C, c
SHAPES = [(2, 1, 3, 4, 5, 8, 4), (1, 16, 2, 3, 7, 8, 4), (2, 37, 3, 5, 4, 16, 4), (1, 33, 1, 8, 2, 32, 8)]
SHAPES += [(1, 9, 2, 1, 1, 4, 1)]
WRITES = {"add", "add_", "sub", "rsub", "neg", "mul", "div", "exp", "maximum"}
READS = {"sum", "amax", "cumsum"}
MATMULS = {"mm", "bmm"}
FREE = set(  # masks, comparisons, and what only moves or views numbers
    """_local_scalar_dense _unsafe_view alias all arange cat clone constant_pad_nd copy_ count_nonzero eq expand
    eye flip full_like ge gt index_select le masked_fill new_zeros ones_like permute promote_types repeat
    scalar_tensor select slice split stack transpose tril triu unbind unsqueeze view where zeros_like""".split()
)


class ElementwiseCounter(TorchDispatchMode):
    """Numbers written by element-wise operators, and read by reductions: the rule of `cost`."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if torch.is_tensor(result) and not result.is_floating_point():
            return result  # indices and masks
        if name in WRITES:
            self.flops += result.numel()
        elif name in READS:
            self.flops += args[0].numel()
        else:
            assert name in MATMULS | FREE, f"is {name} free?"
        return result


def prepare(mechanism, form, B, T, H, K, V, C, c):
    """The form, its tensors and its options."""
    options = {"flash": {"block_q": C, "block_k": C}, "chunkwise": {"C": C}, "chunkwise_two_level": {"C": C, "c": c}}
    options["chunkwise_substitution"] = {"C": C}
    drawn = {name: torch.rand(x.shape) for name, x in meta_tokens(mechanism, T, B, H, K, V).items()}
    tensors = [-x if name == "g" else x for name, x in drawn.items()]
    return FORMS[mechanism][form], tensors, options.get(form, {})


def sizes(shape):
    return dict(zip("BTHKVCc", shape, strict=True))


def test_every_reference_has_a_cost():
    """Kernels compute a form that is counted already; nothing else is left out."""
    assert set(CASES) == {(m, form) for m, forms in FORMS.items() for form in forms if not form.startswith("triton")}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mechanism, form", CASES)
def test_flops_are_those_of_the_reference(mechanism, form, shape):
    function, tensors, options = prepare(mechanism, form, *shape)
    with FlopCounterMode(display=False) as products, ElementwiseCounter() as others:
        function(*tensors, **options)
    count = cost(mechanism, form, **sizes(shape))
    assert (count.matmul_flops, count.elementwise_flops) == (products.get_total_flops(), others.flops)


def test_steps_by_hand():
    """Steps of T = 4 tokens in chunks of 2; FLOPs and bytes are held to the references."""
    steps = {("softmax_attention", "flash"): 2, ("linear_attention", "chunkwise"): 2}  # tiles of keys, chunks
    steps |= {("gla", "scan"): 2, ("gla", "recurrent"): 4}  # rounds, tokens
    assert {form: cost(*form, B=1, T=4, H=1, K=2, V=3, C=2, c=1).steps for form in steps} == steps


@pytest.mark.parametrize("mechanism, form", CASES)
def test_heads_add_up(mechanism, form):
    one = cost(mechanism, form, B=1, T=37, H=1, K=5, V=3, C=16, c=4)
    all_heads = cost(mechanism, form, B=2, T=37, H=3, K=5, V=3, C=16, c=4)
    assert all_heads == type(one)(*(6 * x for x in list(vars(one).values())[:-1]), one.steps)


@pytest.mark.parametrize("mechanism, form", CASES)
def test_state_and_least_bytes_are_those_of_the_tensors(mechanism, form):
    B, T, H, K, V, C, c = SHAPES[2]
    function, tensors, options = prepare(mechanism, form, *SHAPES[2])
    o, state = function(*tensors, **options)
    state = sum(x.nbytes for x in (state if isinstance(state, tuple) else [state]))
    count = cost(mechanism, form, **sizes(SHAPES[2]), itemsize=4)
    assert count.state_bytes == state * (T if form == "scan" else 1)
    least = sum(x.nbytes for x in tensors) + o.nbytes
    least += 2 * state if mechanism != "softmax_attention" else 0
    on_chip = form in ("flash", "chunkwise", "chunkwise_two_level", "chunkwise_substitution")
    if on_chip or (form == "recurrent" and mechanism != "softmax_attention"):
        assert count.bytes == least
    else:
        assert count.bytes > least


GOOD = dict(mechanism="gla", form="chunkwise_two_level", B=1, T=8, H=2, K=4, V=4)
BAD = [("mechanism", "attention"), ("form", "flash"), ("T", 8.0), ("K", True), ("B", "1"), ("c", 48)]


@pytest.mark.parametrize("name, value", [*BAD, *((name, 0) for name in (*"BTHKVCc", "itemsize"))])
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        cost(**{**GOOD, name: value})


def test_a_cost_is_frozen():
    with pytest.raises(FrozenInstanceError):
        cost(**GOOD).steps = 1
