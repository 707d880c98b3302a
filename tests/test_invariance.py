"""The bits of a text depend on nothing but the text: batches, packed neighbours, pieces, prefill and decode."""

from itertools import pairwise
from random import Random

import pytest
import torch
from cases import CHOSEN, inputs, meta_tokens, thin
from harness import HERE, anywhere

from gla_ref import FORMS
from gla_ref.mechanisms import MECHANISMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import plan, stream
from gla_ref.kernels.portable import gla_forward, scalar_gates

NAMES = ("linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
LONG = 150  # tokens: three chunks of 64, the last one short
KERNELS = ("portable", pytest.param(None, marks=pytest.mark.gpu))  # None: Hopper's, where the plan takes them
HALVES = [pytest.param(torch.float16, marks=pytest.mark.deep), pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
DTYPES = [torch.float32, *HALVES]


def text(name, T=LONG, seed=0, dtype=torch.float32):
    """One text of a mechanism's tensors, some of its gates strong."""
    args, _ = inputs(name, 1, T, 1, 32, 32, seed=seed)
    if "g" in MECHANISMS[name].required:
        g = args[MECHANISMS[name].required.index("g")]
        g[:, 70:75] = -30.0
    return [x.to(dtype).to(HERE) for x in args]


def call(name, args, kernel=None, **options):
    """A kernel's call, by the portable one or the plan's choice where a mechanism has a choice."""
    options |= {"kernel": kernel} if name in CHOSEN else {}
    return FORMS[name]["triton"](*args, path="fused", **options)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@anywhere
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", thin(NAMES, "gla", "gated_delta_rule"))
def test_neighbours_change_no_bit(name, dtype, kernel):
    """A text alone, in the middle of a batch, and packed between others."""
    one, others = text(name, dtype=dtype), [text(name, seed=n, dtype=dtype) for n in (1, 2)]
    alone = call(name, one, kernel=kernel)
    o, S = call(name, [torch.cat([a, x, b]) for a, x, b in zip(others[0], one, others[1], strict=True)], kernel=kernel)
    assert same((o[1:2], S[1:2]), alone)
    for first in (1, 67) if HERE == "cuda" else (67,):
        ends = torch.tensor([0, first, first + LONG, first + LONG + 70], device=HERE)
        packed = [torch.cat([a[:, :first], x, b[:, :70]], 1) for a, x, b in zip(others[0], one, others[1], strict=True)]
        o, S = call(name, packed, cu_seqlens=ends, kernel=kernel)
        assert same((o[:, first : first + LONG], S[1:2]), alone), first


@anywhere
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", thin(NAMES, "gla", "gated_delta_rule"))
def test_a_cut_between_chunks_changes_no_bit(name, dtype, kernel):
    args = text(name, dtype=dtype)
    whole = call(name, args, kernel=kernel)
    outs, S = [], None
    for a, b in pairwise((0, 64, 128, LONG)):
        o, S = call(name, [x[:, a:b] for x in args], initial_state=S, kernel=kernel)
        outs.append(o)
    assert same((torch.cat(outs, 1), S), whole)


@anywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", thin([name for name in NAMES if name not in stream.ANCHORED], "simple_gla"))
def test_a_stream_has_the_bits_of_one_call(name, dtype):
    """Cut in random places."""
    args, rng = text(name, dtype=dtype), Random(0)
    whole = call(name, args, kernel="portable")
    for _ in range(30 if HERE == "cuda" else 3):
        cuts = sorted(rng.sample(range(1, LONG), 3))
        it = stream.Stream(name)
        outs = [it(*(x[:, a:b] for x in args)) for a, b in pairwise((0, *cuts, LONG))]
        assert same((torch.cat(outs, 1), it.state), whole) and it.length == LONG, cuts


@anywhere
@pytest.mark.parametrize("name", thin(["simple_gla", "gated_delta_rule"], "simple_gla"))
def test_decoding_has_the_bits_of_prefill(name):
    """Token by token from a state, in a batch of two."""
    texts = [text(name, T=70, seed=n) for n in (3, 4)]
    args = [torch.cat(pair) for pair in zip(*texts, strict=True)]
    _, S = call(name, [x[:, :5] for x in args], kernel="portable")
    whole = call(name, args, initial_state=S, scale=0.3, kernel="portable")
    it = stream.Stream(name, scale=0.3, initial_state=S)
    outs = [it(*(x[:, :62] for x in args))]
    outs += [it(*(x[:, t : t + 1] for x in args)) for t in range(62, 70)]
    assert same((torch.cat(outs, 1), it.state), whole)


@anywhere
@pytest.mark.parametrize("name", ["gla", "delta_rule", "gated_delta_rule", "kda"])
def test_steps_have_the_bits_of_several_tokens_in_one_call(name):
    step, args = FORMS[name]["triton_recurrent"], text(name, T=9)
    S = torch.zeros_like(step(*args)[1])  # without a state a compiler may fuse the first token's operations otherwise
    whole = step(*args, initial_state=S)
    outs, S = [], torch.cat([S] * 3)
    for t in range(9):
        o, S = step(*(torch.cat([x[:, t : t + 1]] * 3) for x in args), initial_state=S)
        outs.append(o[1:2])
    assert same((torch.cat(outs, 1), S[1:2]), whole)


@pytest.mark.parametrize("name", stream.ANCHORED)
def test_a_stream_says_what_it_cannot_do(name):
    with pytest.raises(ValueError, match="mechanism: expected one of linear_attention, .*, got 'softmax_attention'"):
        stream.Stream("softmax_attention")
    args = text(name, T=140)
    it = stream.Stream(name)
    o = torch.cat([it(*(x[:, a:b] for x in args)) for a, b in ((0, 64), (64, 140))], 1)
    assert torch.equal(o, call(name, args, kernel="portable")[0])
    with pytest.raises(ValueError, match=f"multiple of 64 tokens for {name}, got one that ended at 140"):
        it(*(x[:, :1] for x in args))
    with pytest.raises(TypeError, match="tensors: expected q, k, v, g.*, got 3 tensors"):
        it(*args[:3])
    with pytest.raises(ValueError, match="q: expected B = 1 as in the pieces before, got 2"):
        it(*(torch.cat([x, x]) for x in args))


def test_before_the_first_piece_a_stream_has_the_state_it_was_given():
    S = torch.ones(1, 1, 32, 32, device=HERE)
    assert stream.Stream("gla", initial_state=S).state is S and stream.Stream("gla").state is None


@pytest.mark.parametrize("hardware", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", NAMES)
def test_no_plan_depends_on_the_batch(name, hardware):
    """One text or many, short or long: the same kernels with the same tiles along K and time."""

    def made(B, T):
        args, options = meta_tokens(name, T, B, 2, 64, 64, torch.float16).values(), {"path": "fused"}
        options |= {"kernel": "portable"} if name in CHOSEN else {}
        found = plan(name, *args, hardware=hardware, **options)
        return [(x.name, {n: y for n, y in x.options.items() if n != "BV"}) for x in found.launches]

    assert made(1, 40) == made(1, 5000) == made(64, 5000)


def test_whole_chunks_of_every_kernel_end_at_multiples_of_64():
    lengths = {*scalar_gates.CHUNK.values()}
    lengths |= {sizes[0] for table in gla_forward.WALK.values() for sizes in table.values()}
    assert all(stream.CHUNK % C == 0 for C in lengths)
