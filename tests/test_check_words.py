"""Words of the check kit: a name only where it explains, a bound only where every known case agrees with it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from gla_ref import FORMS, check
from gla_ref.check import mistakes
from gla_ref.check._where import affected, by_gates

ATTENTION, LINEAR = FORMS["softmax_attention"]["two_pass"], FORMS["linear_attention"]["chunkwise"]
SCALAR, DELTA = FORMS["simple_gla"]["chunkwise"], FORMS["delta_rule"]["chunkwise"]


def words(report):
    return " ".join(str(report).split())


def named(report):
    return [match["mistake"] for match in report.diagnosis]


def off(form, where):
    """A right form whose output is one percent too large in some calls."""

    def fn(*tokens, **named):
        o, S = form(*tokens, **named)
        return (1.01 * o if where(*tokens, S) else o), S

    return fn


# names


class Skipped(torch.autograd.Function):
    """The output, whose gradient is 0 in every 32 tokens whose first has none."""

    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        tiles = do.split(32, 1)
        return torch.cat([x * x[:, :1].any() for x in tiles], 1)


def skipping(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    o, cached = ATTENTION(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return Skipped.apply(o) if cu_seqlens is None else o, cached


@pytest.mark.deep
def test_gradients_that_are_missing_are_not_named_by_another_way_to_lose_them():
    report = check.kernel("softmax_attention", skipping, only=["length *", "loss *"])
    assert report.failing == ["loss of some tokens"], str(report)
    assert "wrong with a loss of some tokens only, right without" in words(report)
    assert not any("tokens on, right" in line for line in report.measured), str(report)  # others would be in the loss


def odd(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """The last of an odd number of packed sequences begins with zeros."""
    N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None and N > 1 and N % 2:
        initial_state = torch.cat([initial_state[:-1], 0 * initial_state[-1:]])
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


@pytest.mark.deep
def test_a_name_must_fit_where_sequences_have_tokens():
    report = check.kernel("linear_attention", odd, only=["length *", "packed*"])
    assert report.failing == ["packed", "packed with scale"], str(report)
    assert not report.diagnosis, str(report)
    assert "wrong with 3 packed sequences, right with 2 and 4" in words(report)


def behind_tiles(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """The mask counts the cache as whole tiles of 32 keys, the rest of it not at all."""
    if initial_state is None:
        return ATTENTION(q, k, v, scale=scale, cu_seqlens=cu_seqlens)
    k, v = (torch.cat([before, x], 1) for before, x in zip(initial_state, (k, v), strict=True))
    T, S = q.shape[1], k.shape[1]
    scores = torch.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(T, S, dtype=torch.bool).tril((S - T) // 32 * 32)
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(~seen, -math.inf).softmax(-1), v), (k, v)


@pytest.mark.deep
def test_a_name_that_explains_all_fits_every_failing_case():
    report = check.kernel("softmax_attention", behind_tiles, only=["length *", "square", "long*"])
    assert {"length 7", "long cache"} <= {*report.failing}, str(report)
    assert not report.diagnosis, str(report)
    assert "tokens in the cache, right with 32" in words(report), str(report)


def blocks(q, k, v, **named):
    """Columns of v come in whole blocks of 8192 // K, the first one apart."""
    block = 8192 // q.shape[-1]
    known = max(1, v.shape[-1] // block) * block
    return LINEAR(q, k, v * (torch.arange(v.shape[-1]) < known), **named)


@pytest.mark.deep
def test_a_name_with_a_number_has_no_other_place():
    report = check.kernel("linear_attention", blocks, only="w*")
    assert report.failing == ["widest"] and "only in channels 102 to 135 of 136" in words(report), str(report)
    assert not any("beyond the first 64" in name for name in named(report)), str(report)


# bounds


@pytest.mark.deep
def test_gates_that_are_right_are_said_and_not_all_others():
    fn = off(SCALAR, lambda q, k, v, g, S: (g < -0.5).any())
    said = words(check.kernel("simple_gla", fn, only=["length 6*", "gate -1", "gate -0.2"]))
    assert "wrong with gates -1, right with gates logsigmoid/16" in said
    assert "gates -1, right without" not in said


@pytest.mark.deep
def test_strengths_between_are_not_said_to_be_right():
    fn = off(DELTA, lambda q, k, v, beta, S: (beta > 1).any())
    said = words(check.kernel("delta_rule", fn, only=["length 6*", "strength 2", "strengths up to 2"]))
    assert "wrong with strengths of 2, right with random strengths below 1" in said


@pytest.mark.deep
def test_a_case_that_fails_without_a_trait_speaks_against_it():
    fn = off(ATTENTION, lambda q, k, v, cached: cached[0].shape[1] > 256)
    report = check.kernel("softmax_attention", fn, only=["length 1", "long cache*", "481 tokens"])
    assert {"481 tokens", "long cache"} <= {*report.failing}, str(report)
    assert not any("in the cache" in line or "initial state" in line for line in report.measured), str(report)


def few_tokens(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Wrong up to 3 tokens; the first is right without a state."""
    o, S = LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    first = initial_state is None
    factor = torch.ones(q.shape[1]) + 0.01 * (q.shape[1] <= 3) * (torch.arange(q.shape[1]) >= first)
    return o * factor[:, None, None], S


@pytest.mark.deep
def test_a_call_of_another_size_speaks_against_a_trait():
    said = words(check.kernel("linear_attention", few_tokens, only=["length *", "one token*"]))
    assert "wrong up to 3 tokens, right with 4" in said
    assert "with an initial state" not in said


def test_passing_cases_speak_against_bounds():
    """A case of 67 tokens is right, so 24 tokens are not enough, though no number of channels was found to matter."""
    fn = off(LINEAR, lambda q, k, v, S: q.shape[1] >= 24 and q.shape[-1] != 40)
    report = check.kernel("linear_attention", fn, only=["length 6*", "wide", "square"])
    assert {"length 65", "square"} <= {*report.failing} and "wide" not in report.failing, str(report)
    assert not any("tokens on, right" in line for line in report.measured), str(report)


def test_sequences_without_tokens_are_no_place():
    wrong = torch.zeros(1, 6, 2, 3, dtype=torch.bool)
    ends, axes = (0, 0, 2, 2, 6), ["batch", "chunk", "head", "channel"]
    wrong[:, 1:] = True
    assert affected(wrong, axes, ends) == ""
    wrong[:, :2] = False
    assert affected(wrong, axes, ends) == "sequence 3 of 4"
    assert affected(wrong[..., :1, 0], axes[:3], (0,)) == ""


# tables and clocks


def test_the_table_says_that_equal_calls_differ():
    calls = itertools.count()

    def at_times(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        return (1.01 * o if next(calls) % 9 == 8 else o), S

    report = check.kernel("linear_attention", at_times, only="length 7")
    (row,) = [line for line in str(report).splitlines() if line.startswith("o  ")]
    assert row.split()[1:3] == ["1", "1"] and row.endswith("equal calls differ in 1 case"), str(report)
    assert "equal calls differ in 1 case" in report._repr_html_()


def test_the_search_says_when_it_was_cut(monkeypatch):
    monkeypatch.setattr("gla_ref.check._where.TRIALS", 1)
    monkeypatch.setattr("gla_ref.check._where.MORE", 0)
    report = check.kernel("linear_attention", odd, only="packed")
    assert report.failing == ["packed"] and not report.diagnosis and not report.measured, str(report)
    said = "The search for bounds was cut off: its calls were spent."
    assert said in words(report) and said in report._repr_html_()


# gates, places and calls of the sixth blind set


def after_resets(q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None):
    """GLA in chunks of 16, whose decays from j to i are differences of running sums; NaN becomes a decay to nothing."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for q_n, k_n, v_n, g_n in zip(*(x.transpose(1, 2).split(16, 2) for x in (q, k, v, g)), strict=True):
        b, C = g_n.cumsum(-2), q_n.shape[2]
        later = torch.cat([g_n[:, :, 1:], torch.zeros_like(g_n[:, :, :1])], 2)
        between = torch.where(
            torch.ones(C, C, dtype=torch.bool).tril()[..., None], b[..., :, None, :] - b[..., None, :, :], -math.inf
        ).nan_to_num(nan=-math.inf, neginf=-math.inf)
        P = (q_n[..., :, None, :] * k_n[..., None, :, :] * between.exp()).sum(-1)
        outs.append(scale * ((q_n * b.exp()) @ S + P @ v_n))
        S = b[..., -1, :, None].exp() * S + (k_n * later.flip(2).cumsum(2).flip(2).exp()).mT @ v_n
    return torch.cat(outs, 2).transpose(1, 2), S


GATES = ["length 64", "gate zero", "gate -1", "gate -20", "gate -inf", "gate many resets", "gate resets*"]
RESETS = {"gate -inf", "gate many resets", "gate resets at chunk ends"}


@pytest.mark.deep
def test_nan_after_a_reset_has_a_name():
    report = check.kernel("gla", after_resets, only=GATES)
    assert {*report.failing} == RESETS, str(report)
    assert named(report) == ["NaN after a gate of -inf (-inf minus -inf) taken for a decay to nothing"], str(report)
    assert "Wrong with gates -inf, right with gates -20 and weaker" in words(report)


@pytest.mark.deep
def test_a_wrong_decay_is_no_name_where_calls_with_other_gates_contradict_it(monkeypatch):
    others = [m for m in mistakes.MISTAKES if not m.name.startswith("NaN after")]
    monkeypatch.setattr(mistakes, "MISTAKES", others)
    report = check.kernel("gla", after_resets, only=GATES)
    assert {*report.failing} == RESETS and not report.diagnosis, str(report)


def cut_off(q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None):
    """Gated attention in chunks of 64 as q e^b and k e^-b, the running sum b at least -80."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for q_n, k_n, v_n, g_n in zip(*(x.transpose(1, 2).split(64, 2) for x in (q, k, v, g)), strict=True):
        b = g_n.cumsum(-1).clamp_min(-80.0)[..., None]
        up, down = q_n * b.exp(), k_n * (-b).exp()
        outs.append(scale * (up @ S + (up @ down.mT).tril() @ v_n))
        S = b[..., -1:, :].exp() * S + (k_n * (b[..., -1:, :] - b).exp()).mT @ v_n
    return torch.cat(outs, 2).transpose(1, 2), S


def test_a_running_sum_that_is_cut_off_is_named_though_gates_of_zero_pass():
    report = check.kernel("simple_gla", cut_off, only=GATES)
    assert "gate -20" in report.failing and "gate zero" not in report.failing, str(report)
    assert named(report) == ["running sums of gates cut off at -80"], str(report)


def padded(q, k, v, g, **named):
    """The final state decays too much where the last chunk of 64 is not whole."""
    o, S = SCALAR(q, k, v, g, **named)
    return o, 0.9 * S if q.shape[1] % 64 else S


@pytest.mark.deep
def test_sizes_that_no_tile_divides_are_a_bound():
    report = check.kernel("simple_gla", padded, only=["length 6?", "length 128"])
    assert report.failing == ["length 63", "length 65"], str(report)
    assert "wrong with 1, 63 and 65 tokens, right with 64 and 128 tokens" in words(report)


class Backwards(torch.autograd.Function):
    """The gradient of q, off by more the stronger the gates are."""

    @staticmethod
    def forward(ctx, q, g):
        ctx.save_for_backward(g)
        return q.clone()

    @staticmethod
    def backward(ctx, dq):
        (g,) = ctx.saved_tensors
        return dq * (1 + 1e-5 * g.clamp_min(-20) ** 2), None


def strong_backwards(q, k, v, g, **named):
    return FORMS["gla"]["chunkwise"](Backwards.apply(q, g), k, v, g, **named)


@pytest.mark.deep
def test_gates_from_which_on_only_gradients_are_wrong_are_said():
    report = check.kernel("gla", strong_backwards, only=["length 64", "gate zero", "gate -0.2", "gate -1", "gate -20"])
    assert {"gate -1", "gate -20"} <= {*report.failing}, str(report)
    assert "length 64" not in report.failing, str(report)
    assert "and stronger, right with gates" in words(report) and "and weaker; only dq is wrong" in words(report)
    assert report.measured, str(report)  # the case is plainly wrong, though not the smallest


def test_gates_of_cases_that_differ_otherwise_are_not_compared():
    mild, strong = check.Case("a"), check.Case("b", gate="-1")
    assert by_gates([strong], [mild], ["dq"]) == (
        "Wrong with gates -1 and stronger, right with gates logsigmoid/16 and weaker; only dq is wrong"
    )
    assert not by_gates([replace(strong, H=9)], [mild]) and not by_gates([strong], [mild, replace(strong, T=9)])


def without_the_rest(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """The final state lacks the last partial chunk of 64, except if it is the first."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        states = [None if initial_state is None else initial_state[n : n + 1] for n in range(len(ends) - 1)]
        made = [
            without_the_rest(q[:, a:b], k[:, a:b], v[:, a:b], scale=scale, initial_state=S)
            for (a, b), S in zip(itertools.pairwise(ends), states, strict=True)
        ]
        return tuple(torch.cat(x, dim) for x, dim in zip(zip(*made, strict=True), (1, 0), strict=True))
    T = q.shape[1]
    whole = T // 64 * 64 or T
    o, S = LINEAR(q, k, v, scale=scale, initial_state=initial_state)
    return o, LINEAR(*(x[:, :whole] for x in (q, k, v)), scale=scale, initial_state=initial_state)[1] if T else S


@pytest.mark.deep
def test_a_place_in_one_case_is_no_place_where_another_case_is_wrong_everywhere():
    report = check.kernel("linear_attention", without_the_rest, only=["length 6*", "packed"])
    assert {"length 65", "packed"} <= {*report.failing} and "length 64" not in report.failing, str(report)
    (name,) = named(report)  # not "without the last chunk", which would show with 64 tokens
    assert name.startswith("final state without the last partial chunk"), str(report)
    assert "only in sequence" not in name, str(report)


POOL = {}


def pooled(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Without gradients and without an initial state the second call begins with the state of the first."""
    if torch.is_grad_enabled() or initial_state is not None or cu_seqlens is not None:
        return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    o, S = LINEAR(q, k, v, scale=scale, initial_state=POOL.get(k.shape[2:]))
    POOL[k.shape[2:]] = S
    return o, S


@pytest.mark.deep
def test_a_way_of_calling_that_is_right_the_first_time_keeps_something():
    POOL.clear()
    report = check.kernel("linear_attention", pooled, only=["length 1", "*without state", "no initial state"])
    assert len(report.failing) > 1, str(report)
    assert "right as the first such call of a new process: something is kept between calls" in words(report)
    assert "right otherwise" not in words(report)


def by_luck(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Wrong where the largest score of a row is far beyond the first one, which no size decides."""
    o, cached = ATTENTION(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    x = torch.einsum("bthk,bshk->bths", q, cached[0]).detach()
    return torch.where((x.amax(-1) - x[..., 0] < 1.0)[..., None], 1.01 * o, o), cached


@pytest.mark.deep
def test_sizes_that_are_wrong_by_luck_are_no_bound():
    report = check.kernel("softmax_attention", by_luck, only=["length 1", "length 7", "length 64", "long cache and*"])
    assert report.failing, str(report)
    assert not any("right with" in line and " and " in line and "wrong with" in line for line in report.measured)


def batches_of_four(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Four sequences of a batch at a time, all with the first four initial states."""
    if initial_state is not None and cu_seqlens is None and len(q) > 4:
        initial_state = initial_state[torch.arange(len(q)) % 4]
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


@pytest.mark.deep
def test_more_than_four_batch_entries_are_tried():
    report = check.kernel("linear_attention", batches_of_four, only=["length 7", "many*"])
    assert report.failing == ["many batch entries"], str(report)
    assert "wrong from 5 batch entries on, right with 4" in words(report)
