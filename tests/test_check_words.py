"""Words of the check kit: a name only where it explains, a bound only where every known case agrees with it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import fresh_kernels
import pytest
import right_kernels
import torch
from cases import thin, with_o

from gla_ref import FORMS, check
from gla_ref.check import Case, mistakes
from gla_ref.check._where import affected, by_gates
from gla_ref.check.mistakes._calls import backward

F32 = torch.float32
ATTENTION, LINEAR = FORMS["softmax_attention"]["two_pass"], FORMS["linear_attention"]["chunkwise"]
SCALAR, GATED, DELTA = (FORMS[m]["chunkwise"] for m in ("simple_gla", "gla", "delta_rule"))


def words(report):
    return " ".join(str(report).split())


def named(report):
    return [match["mistake"] for match in report.diagnosis]


# wrong kernels


def off(form, where):
    """A right form whose output is one percent too large in some calls."""

    def fn(*tokens, **named):
        o, S = form(*tokens, **named)
        return (1.01 * o if where(*tokens, S) else o), S

    return fn


def made(mechanism, name, C=64):
    """A kernel that makes a mistake of the kit's own list, whatever the kit knows."""
    m = next(m for m in mistakes.MISTAKES if m.name.startswith(name) and mechanism in m.mechanisms)
    return mistakes.apply(mechanism, m, C)


def some(mechanism, name, where, C=16):
    """A kernel that makes such a mistake where a call, or a part of its results, is of some kind."""
    form, wrong = FORMS[mechanism]["chunkwise"], made(mechanism, name, C)

    def fn(q, k, v, *gates, scale=None, initial_state=None, cu_seqlens=None):
        named = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        return where(q, cu_seqlens, form(q, k, v, *gates, **named), wrong(q, k, v, *gates, **named))

    return fn


def whole(condition):
    return lambda q, cu, right, wrong: wrong if condition(q, cu) else right


def wide(q, cu, right, wrong):
    """Columns of the state beyond 32 are wrong."""
    (o, S), (_, S_wrong) = right, wrong
    return o, torch.cat([S[..., :32], S_wrong[..., 32:]], -1)


def skipping(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """The gradient of the output is 0 in every 32 tokens whose first has none."""
    o, cached = ATTENTION(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        o = backward(o, lambda do: torch.cat([x * x[:, :1].any() for x in do.split(32, 1)], 1))
    return o, cached


def odd(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """The last of an odd number of packed sequences begins with zeros."""
    N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None and N > 1 and N % 2:
        initial_state = torch.cat([initial_state[:-1], 0 * initial_state[-1:]])
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def behind_tiles(T, S):
    """The mask counts the cache as whole tiles of 32 keys, the rest of it not at all."""
    return (S - T) // 32 * 32


def blocks(q, k, v, **named):
    """Columns of v come in whole blocks of 8192 // K, the first one apart."""
    block = 8192 // q.shape[-1]
    known = max(1, v.shape[-1] // block) * block
    return LINEAR(q, k, v * (torch.arange(v.shape[-1]) < known), **named)


def few_tokens(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Wrong up to 3 tokens; the first is right without a state."""
    o, S = LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    first = initial_state is None
    factor = torch.ones(q.shape[1]) + 0.01 * (q.shape[1] <= 3) * (torch.arange(q.shape[1]) >= first)
    return o * factor[:, None, None], S


def lost_by_difference(s, q, k, g):
    """Decays from j to i are differences of running sums; NaN becomes a decay to nothing."""
    b = g.cumsum(-2)
    later = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool).triu(1)[..., None]
    between = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(later, -math.inf)
    return fresh_kernels.weighted(q, k, between.nan_to_num(nan=-math.inf, neginf=-math.inf).exp())


def padded(q, k, v, g, **named):
    """The final state decays too much where the last chunk of 64 is not whole."""
    o, S = SCALAR(q, k, v, g, **named)
    return o, 0.9 * S if q.shape[1] % 64 else S


def strong_backwards(q, k, v, g, **named):
    """The gradient of q is off by more the stronger the gates are."""
    factor = 1 + 1e-5 * g.detach().clamp_min(-20) ** 2
    return GATED(backward(q, lambda dq: dq * factor), k, v, g, **named)


def without_the_rest(s, k, *rest):
    """A chunk that is not whole leaves the state as it was."""
    return fresh_kernels.carry(s, k, *rest) if k.shape[2] == s.C else rest[-1]


POOL = {}


def pooled(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Without gradients and without an initial state the second call begins with the state of the first."""
    if torch.is_grad_enabled() or initial_state is not None or cu_seqlens is not None:
        return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    o, S = LINEAR(q, k, v, scale=scale, initial_state=POOL.get(k.shape[2:]))
    POOL[k.shape[2:]] = S
    return o, S


OLD = {}


def old_gates(q, k, v, g, **named):
    """The gates are those of the first call of the same sizes."""
    return GATED(q, k, v, OLD.setdefault(g.shape, g.detach()), **named)


def by_luck(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Wrong where the largest score of a row is far beyond the first one, which no size decides."""
    o, cached = ATTENTION(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    x = torch.einsum("bthk,bshk->bths", q, cached[0]).detach()
    return torch.where((x.amax(-1) - x[..., 0] < 1.0)[..., None], 1.01 * o, o), cached


def batches_of_four(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Four sequences of a batch at a time, all with the first four initial states."""
    if initial_state is not None and cu_seqlens is None and len(q) > 4:
        initial_state = initial_state[torch.arange(len(q)) % 4]
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def programs(q, k, v, g, **named):
    """GLA whose gates are those of the head that the index b * 3 + h finds, whatever the number of heads."""
    B, _, H, _ = q.shape
    index = (torch.arange(B)[:, None] * 3 + torch.arange(H)).flatten()
    moved = g.transpose(1, 2).flatten(0, 1)[index].unflatten(0, (B, H)).transpose(1, 2)
    return GATED(q, k, v, moved, **named)


def scaled_twice(q, k, v, g, *, scale=None, **named):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, S = GATED(q, k, v, g, scale=scale, **named)
    return scale * o, S


def backwards(wrong):
    """The values of GLA, and the gradients of a wrong kernel."""

    def fn(q, k, v, g, *, scale=None, initial_state=None):
        right, made = (f(q, k, v, g, scale=scale, initial_state=initial_state) for f in (GATED, wrong))
        return tuple(x.detach() + (y - y.detach()) for x, y in zip(right, made, strict=True))

    return fn


def by_hand(product):
    return right_kernels.kernel("gla", right_kernels.ByHand.apply, F32, 64, product)


def ten_bits(x):
    """What a tensor core takes of float32 by default."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(F32)


def without_scale(q, k, v, g, *, scale, initial_state):
    return GATED(q, k, v, g, initial_state=initial_state)


def ignoring_dS(*tokens, **named):
    o, S = GATED(*tokens, **named)
    return o, backward(S, torch.zeros_like)


def nudged(q, k, v, **named):
    """An error of two budgets in one number."""

    def nudge(d):
        d = d.clone()
        d[0, 5, 0, 0] += 8e-6 * d.square().mean().sqrt()
        return d

    return LINEAR(q, backward(k, nudge), v, **named)


# mechanisms, and sentences on wrong kernels

SOFTMAX, UNGATED, SIMPLE_GLA, GATED_DELTA = "softmax_attention", "linear_attention", "simple_gla", "gated_delta_rule"
STATE, SUMS = "initial state ignored", "running sum of gates in bfloat16"
STRICT, PAIRS = "mask strict instead of inclusive", "Gamma left out of the scores: pairs not decayed"
BASE_2 = "state's decay from chunk to chunk in base 2"
UNDECAYED, REST = "final state not decayed through the last chunk", "final state without the last partial chunk"
RESET, LOST = "NaN after a gate of -inf (-inf minus -inf) taken for a decay to nothing", "dq left out"
GATES = ("length 64", "gate zero", "gate -1", "gate -20", "gate -inf", "gate many resets", "gate resets*")
RESETS, TWICE = ("gate -inf", "gate many resets", "gate resets at chunk ends"), "o with scale twice"
LATER = fresh_kernels.case("gla", "", scores=lost_by_difference).fn
TAIL, CUT = fresh_kernels.case(UNGATED, "", C=64, carry=without_the_rest).fn, "running sums of gates cut off at -80"
TILES = fresh_kernels.case(SOFTMAX, "", earlier=behind_tiles).fn


class Told(NamedTuple):
    """A wrong kernel, the cases that are run, and what the report says of it."""

    mechanism: str
    fn: Callable
    only: str | tuple[str, ...]
    name: str | None = None  # how one of its names begins; "" where it gets none
    said: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()  # neither in a bound nor in a name


def somewhere(mechanism, name, where, only, *said):
    """A mistake of the kit's own list where a call, or a part of its results, is of some kind."""
    return Told(mechanism, some(mechanism, name, where), only, name, said)


# fmt: off
TOLD = {
    LOST: Told(SOFTMAX, lambda q, k, v, **named: ATTENTION(q.detach() + 0 * q, k, v, **named), "length 65", LOST),
    STATE: Told(UNGATED, made(UNGATED, STATE), ("length 6*", "packed*"), STATE),
    PAIRS: Told(GATED_DELTA, made(GATED_DELTA, PAIRS), "gate -0.2", PAIRS),
    "one packed sequence": somewhere(UNGATED, STATE, whole(lambda q, cu: cu is not None and len(cu) == 2), "[ow]*",
        "wrong with cu_seqlens, right without"),
    "short sequences": somewhere(UNGATED, STATE, whole(lambda q, cu: q.shape[1] <= 40), "length*",
        "wrong up to 40 tokens, right with 41"),
    "one token more than a chunk": somewhere(UNGATED, REST, whole(lambda q, cu: q.shape[1] % 64 == 1 < q.shape[1]),
        "length*", "wrong with 65 and 129 tokens, right with 64, 66"),
    "wide values": somewhere(SIMPLE_GLA, UNDECAYED, wide, "[lw]*",
        f"{UNDECAYED}, only in columns 32 to", "right with 32"),
    "many heads": somewhere(UNGATED, STRICT, whole(lambda q, cu: q.shape[2] > 6), "[lm]*",
        "wrong from 7 heads on, right with 6"),
    "many tokens and heads": Told(SIMPLE_GLA,  # calls of so many tokens are not compared with mistakes
        some(SIMPLE_GLA, SUMS, whole(lambda q, cu: q.shape[1] * q.shape[2] > 8192), 64),
        ("length 65", "many tokens and heads"), "",
        ("wrong from 1025 tokens on, right with 1024", "wrong from 8 heads on, right with 7")),
    # a term, a pass, a rounding
    TWICE: Told("gla", scaled_twice, "length *5", TWICE),
    "TF32": Told("gla", by_hand(lambda x, y: ten_bits(x) @ ten_bits(y)), "length 145", "products in TF32"),
    "operands": Told("gla", by_hand(lambda x, y: x.bfloat16().float() @ y.bfloat16().float()),
        ("length 145", "packed"), "operands of products in bfloat16"),
    "scale": Told("gla", backwards(without_scale), "scale given",
        "scale given by the caller ignored, in the backward pass only"),
    "dS": Told("gla", ignoring_dS, "length 145", "gradient of the final state ignored"),
    "a tail": Told(*fresh_kernels.WRONG["last_value_columns_forgotten"][:2], "wide",
        said=("66 and 67 channels of values, right with 32 and 64",)),
    "two budgets": Told(UNGATED, nudged, "length 65", ""),
    "another head": Told("gla", programs, ("length *", "loss of some*", "many [hst]*"), said=(
        "g of another head: head 0 of batch entry 1 reads head 3 of batch entry 0",
        "read program b 3 + h instead of b H + h")),
    # no name where it does not explain all, and no other one
    "skipped gradients": Told(SOFTMAX, skipping, ("length *", "loss *"), fails=("loss of some tokens",),
        said=("wrong with a loss of some tokens only, right without",), unsaid=("tokens on, right",)),
    "an odd number": Told(UNGATED, odd, ("length *", "packed*"), "",
        said=("wrong with 3 packed sequences, right with 2 and 4",),
        fails=("packed", "packed with scale"), passes=("packed strided",)),
    "behind tiles": Told(SOFTMAX, TILES, ("length *", "square", "long*"), "", ("tokens in the cache, right with 32",),
        fails=("length 7", "long cache")),
    "blocks": Told(UNGATED, blocks, "w*", said=("only in channels 102 to 135 of 136",), fails=("widest",),
        passes=("wide", "wider"), unsaid=("beyond the first 64",)),
    "after resets": Told("gla", LATER, GATES, RESET, fails=RESETS,
        said=("Wrong with gates -inf, right with gates -20 and weaker",), passes=("gate -20",)),
    CUT: Told(SIMPLE_GLA, made(SIMPLE_GLA, CUT), GATES, CUT, fails=("gate -20",), passes=("gate zero",)),
    "without the rest": Told(UNGATED, TAIL, ("length 6*", "packed"), REST, fails=("length 65", "packed"),
        passes=("length 64",), unsaid=("only in sequence",)),
    # bounds
    "gates of -1": Told(SIMPLE_GLA, off(SCALAR, lambda q, k, v, g, S: (g < -0.5).any()),
        ("length 6*", "gate -1", "gate -0.2"), said=("wrong with gates -1, right with gates logsigmoid/16",),
        unsaid=("gates -1, right without",)),
    "strengths": Told("delta_rule", off(DELTA, lambda q, k, v, beta, S: (beta > 1).any()),
        ("length 6*", "strength 2", "strengths up to 2"),
        said=("wrong with strengths of 2, right with random strengths below 1",)),
    "a long cache": Told(SOFTMAX, off(ATTENTION, lambda q, k, v, cached: cached[0].shape[1] > 256),
        ("length 1", "long cache*", "481 tokens"), fails=("481 tokens", "long cache"),
        unsaid=("in the cache", "initial state")),
    "few tokens": Told(UNGATED, few_tokens, ("length *", "one token*"), said=("wrong up to 3 tokens, right with 4",),
        unsaid=("with an initial state",)),
    "a case that is right": Told(UNGATED, off(LINEAR, lambda q, k, v, S: q.shape[1] >= 24 and q.shape[-1] != 40),
        ("length 6*", "wide", "square"), fails=("length 65", "square"), passes=("wide",),
        unsaid=("tokens on, right",)),  # of 67 tokens a case is right, whatever the number of channels
    "no whole tile": Told(SIMPLE_GLA, padded, ("length 6?", "length 128"), fails=("length 63", "length 65"),
        said=("wrong with 1, 63 and 65 tokens, right with 64 and 128 tokens",), passes=("length 64",)),
    "strong backwards": Told("gla", strong_backwards, ("length 64", "gate zero", "gate -0.2", "gate -1", "gate -20"),
        said=("and stronger, right with gates", "and weaker; only dq is wrong"), fails=("gate -1", "gate -20"),
        passes=("length 64",)),
    "a pool": Told(UNGATED, pooled, ("length 1", "*without state", "no initial state"), fails=("no initial state",),
        said=("right as the first such call of a new process: something is kept between calls",),
        unsaid=("right otherwise",)),
    "old gates": Told("gla", old_gates, "gate -[02i]*[02f]", fails=("gate -20", "gate -inf"), passes=("gate -0.2",),
        said=("gate -20, gate -inf pass alone, in a new process",)),
    "batches of four": Told(UNGATED, batches_of_four, ("length 7", "many*"), fails=("many batch entries",),
        said=("wrong from 5 batch entries on, right with 4",), passes=("many heads",)),
    "strides": Told(UNGATED, off(LINEAR, lambda q, k, v, S: not v.is_contiguous()), "[ls]*",
        said=("wrong where v alone has strided strides and all else is contiguous",)),
    # errors that grow from token to token, and have no bound
    "drifting": Told(UNGATED, with_o(LINEAR, lambda o: o * (1 + 1e-7 * torch.arange(o.shape[1])[:, None, None] ** 1.5)),
        "l*", unsaid=("tokens",)),
}
# fmt: on
QUICK = (LOST, STATE, "one packed sequence", TWICE, "two budgets", CUT, "a case that is right")


@pytest.mark.parametrize("kernel", thin(TOLD, *QUICK))
def test_a_wrong_kernel_is_told(kernel):
    """The whole quick level is held against every named mistake in test_check_named.py."""
    it = TOLD[kernel]
    report = check.kernel(it.mechanism, it.fn, only=it.only)
    names, text = named(report), words(report)
    assert report.failures and {*it.fails} <= {*report.failing} and not {*it.passes} & {*report.failing}, str(report)
    assert {*it.passes} <= {*report.cases} and all(said in text for said in it.said), str(report)
    assert not any(words in line for words in it.unsaid for line in (*report.measured, *names)), str(report)
    assert any(x.startswith(it.name) for x in names) if it.name else it.name is None or not names, str(report)


@pytest.mark.deep
def test_a_wrong_decay_is_no_name_where_calls_with_other_gates_contradict_it(monkeypatch):
    others = [m for m in mistakes.MISTAKES if m.name != RESET]
    monkeypatch.setattr(mistakes, "MISTAKES", others)
    report = check.kernel("gla", LATER, only=GATES)
    assert {*report.failing} == {*RESETS} and not report.diagnosis, str(report)


@pytest.mark.deep
def test_sizes_that_are_wrong_by_luck_are_no_bound():
    report = check.kernel(SOFTMAX, by_luck, only=["length 1", "length 7", "length 64", "long cache and*"])
    assert report.failing, str(report)
    assert not any("right with" in line and " and " in line and "wrong with" in line for line in report.measured)


@pytest.mark.deep
def test_packed_attention_is_measured_without_a_cache():
    def moved(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
        """dk of each packed sequence but the first goes to the next head."""
        o, cached = ATTENTION(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
        if k.requires_grad and cu_seqlens is not None and len(cu_seqlens) > 2:
            a = int(cu_seqlens[1])
            k.register_hook(lambda dk: torch.cat([dk[:, :a], dk[:, a:].roll(1, 2)], 1))
        return o, cached

    report = check.kernel(SOFTMAX, moved, only="[lp]*")
    assert report.failures and report.measured, str(report)


def test_the_telling_cases_give_one_case_its_name():
    # within one chunk the final state is all that is wrong: another mistake does the same
    report = check.kernel("gla", made("gla", BASE_2), only="many heads")
    assert named(report) == [BASE_2], str(report)


def test_sequences_without_tokens_are_no_place():
    wrong = torch.zeros(1, 6, 2, 3, dtype=torch.bool)
    ends, axes = (0, 0, 2, 2, 6), ["batch", "chunk", "head", "channel"]
    wrong[:, 1:] = True
    assert affected(wrong, axes, ends) == ""
    wrong[:, :2] = False
    assert affected(wrong, axes, ends) == "sequence 3 of 4"
    assert affected(wrong[..., :1, 0], axes[:3], (0,)) == ""


def test_gates_of_cases_that_differ_otherwise_are_not_compared():
    mild, strong = Case("a"), Case("b", gate="-1")
    said = "Wrong with gates -1 and stronger, right with gates logsigmoid/16 and weaker; only dq is wrong"
    assert by_gates([strong], [mild], ["dq"]) == said
    assert not by_gates([replace(strong, H=9)], [mild]) and not by_gates([strong], [mild, replace(strong, T=9)])


def test_the_table_says_that_equal_calls_differ():
    calls = itertools.count()
    at_times = with_o(LINEAR, lambda o: 1.01 * o if next(calls) % 9 == 8 else o)
    report = check.kernel(UNGATED, at_times, only="length 7")
    (row,) = [line for line in str(report).splitlines() if line.startswith("o  ")]
    assert row.split()[1:3] == ["1", "1"] and row.endswith("equal calls differ in 1 case"), str(report)
    assert "equal calls differ in 1 case" in report._repr_html_()


def test_the_search_says_when_it_was_cut(monkeypatch):
    monkeypatch.setattr("gla_ref.check._where.TRIALS", 1)
    monkeypatch.setattr("gla_ref.check._where.MORE", 0)
    report = check.kernel(UNGATED, odd, only="packed")
    assert report.failing == ["packed"] and not report.diagnosis and not report.measured, str(report)
    said = "The search for bounds was cut off: its calls were spent."
    assert said in words(report) and said in report._repr_html_()
