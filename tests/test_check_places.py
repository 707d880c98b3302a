"""What the check kit says of mistakes that some places, sizes or options alone meet: it names them and their bounds."""

import pytest
import torch
from cases import thin

from gla_ref import FORMS, check
from gla_ref.check import Case, mistakes
from gla_ref.check._claims import Claim
from gla_ref.check._examine import Examiner
from gla_ref.check._kernel import SECONDS, Convention, Kernel

F32 = torch.float32
LINEAR, GATED = FORMS["linear_attention"]["chunkwise"], FORMS["gla"]["chunkwise"]
NAMED = [  # a mechanism, a mistake, and the cases that are enough to tell
    ("softmax_attention", "dq left out", "length 65"),
    ("linear_attention", "initial state ignored", ["length 6*", "packed*"]),
    ("gated_delta_rule", "Gamma left out of the scores: pairs not decayed", "gate -0.2"),
]
LOST = mistakes.Mistake("dq left out", "", lambda c: c.run(q=c.q.detach() + 0 * c.q), ("softmax_attention",))


@pytest.mark.parametrize("mechanism, name, only", NAMED, ids=[x[1] for x in NAMED])
def test_a_mistake_is_named(mechanism, name, only):
    """The whole quick level is held against every named mistake in test_check_named.py."""
    m = next(m for m in (*mistakes.MISTAKES, LOST) if m.name == name and mechanism in m.mechanisms)
    report = check.kernel(mechanism, mistakes.apply(mechanism, m), only=only)
    assert report.failures and any(match["mistake"].startswith(name) for match in report.diagnosis), str(report)


def made(mechanism, name, C=64):
    m = next(m for m in mistakes.MISTAKES if m.name == name and mechanism in m.mechanisms)
    return mistakes.apply(mechanism, m, C)


def some(wrong, right, where):
    """A kernel that makes a mistake where a call, or a part of its results, is of some kind."""

    def fn(q, k, v, *gates, scale=None, initial_state=None, cu_seqlens=None):
        named = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        (o, S), (o_wrong, S_wrong) = right(q, k, v, *gates, **named), wrong(q, k, v, *gates, **named)
        return where(q, cu_seqlens, (o, S), (o_wrong, S_wrong))

    return fn


def whole(condition):
    return lambda q, cu, right, wrong: wrong if condition(q, cu) else right


def wide(q, cu, right, wrong):
    """Columns of the state beyond 32 are wrong."""
    (o, S), (_, S_wrong) = right, wrong
    return o, torch.cat([S[..., :32], S_wrong[..., 32:]], -1)


PLACES = {  # a mistake, where it is made, the cases, and the words that the report must have
    "one packed sequence": (
        ("linear_attention", "initial state ignored"),
        whole(lambda q, cu: cu is not None and len(cu) == 2),
        "[ow]*",
        ["initial state ignored", "wrong with cu_seqlens, right without"],
    ),
    "short sequences": (
        ("linear_attention", "initial state read but not carried to the end"),
        whole(lambda q, cu: q.shape[1] <= 40),
        "length*",
        ["initial state read but not carried to the end", "wrong up to 40 tokens, right with 41"],
    ),
    "one token more than a chunk": (
        ("linear_attention", "final state without the last partial chunk"),
        whole(lambda q, cu: q.shape[1] % 64 == 1 and q.shape[1] > 1),
        "length*",
        ["final state without the last partial chunk", "wrong with 65 and 129 tokens, right with 64, 66"],
    ),
    "wide values": (
        ("simple_gla", "final state not decayed through the last chunk"),
        wide,
        "[lw]*",
        ["final state not decayed through the last chunk, only in columns 32 to", "right with 32"],
    ),
    "many heads": (
        ("linear_attention", "mask strict instead of inclusive: a token does not see itself"),
        whole(lambda q, cu: q.shape[2] > 6),
        "[lm]*",
        ["mask strict instead of inclusive", "wrong from 7 heads on, right with 6"],
    ),
}


@pytest.mark.parametrize("name", thin(PLACES, "one packed sequence"))
def test_a_mistake_of_some_places_is_named_with_them(name):
    (mechanism, mistake), where, only, words = PLACES[name]
    report = check.kernel(
        mechanism, some(made(mechanism, mistake, 16), FORMS[mechanism]["chunkwise"], where), only=only
    )
    said = " ".join(str(report).split())
    assert report.failures and all(some in said for some in words), str(report)
    assert any(match["mistake"].startswith(mistake) for match in report.diagnosis), str(report)


@pytest.mark.deep
def test_gates_of_many_tokens_and_heads_have_a_place_and_a_bound():
    wrong, right = made("simple_gla", "running sum of gates in bfloat16"), FORMS["simple_gla"]["chunkwise"]
    many = some(wrong, right, whole(lambda q, cu: q.shape[1] * q.shape[2] > 8192))
    report = check.kernel("simple_gla", many, only=["length 65", "many tokens and heads"])
    said = " ".join(str(report).split())
    assert report.failing == ["many tokens and heads"], str(report)
    assert "wrong from 1025 tokens on, right with 1024" in said, str(report)
    assert "wrong from 8 heads on, right with 7" in said, str(report)
    assert any("running sum of gates in bfloat16" in match["mistake"] for match in report.diagnosis), str(report)


def programs(q, k, v, g, **named):
    """GLA whose gates are those of the head that the index b * 3 + h finds, whatever the number of heads."""
    B, _, H, _ = q.shape
    index = (torch.arange(B)[:, None] * 3 + torch.arange(H)).flatten()
    moved = g.transpose(1, 2).flatten(0, 1)[index].unflatten(0, (B, H)).transpose(1, 2)
    return GATED(q, k, v, moved, **named)


@pytest.mark.deep
def test_a_head_read_at_a_wrong_index_is_found():
    report = check.kernel("gla", programs, only=["length *", "loss of some*", "many [hst]*"])
    said = " ".join(str(report).split())
    assert "g of another head: head 0 of batch entry 1 reads head 3 of batch entry 0" in said, str(report)
    assert "read program b 3 + h instead of b H + h" in said, str(report)


def only_strided(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """Wrong, and not as if v were contiguous, where v is not."""
    o, S = LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return (o if v.is_contiguous() else 1.01 * o), S


@pytest.mark.deep
def test_the_tensor_whose_strides_matter_is_found():
    report = check.kernel("linear_attention", only_strided, only="[ls]*")
    said = " ".join(str(report).split())
    assert "wrong where v alone has strided strides and all else is contiguous" in said, str(report)


@pytest.mark.deep
def test_errors_that_grow_have_no_bound():
    def drifting(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        return o * (1 + 1e-7 * torch.arange(q.shape[1])[:, None, None] ** 1.5), S

    report = check.kernel("linear_attention", drifting, only="l*")
    assert report.failures and not any("tokens" in line for line in report.measured), str(report)


@pytest.mark.deep
def test_packed_attention_is_measured_without_a_cache():
    def moved(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
        """dk of each packed sequence but the first goes to the next head."""
        o, cached = FORMS["softmax_attention"]["two_pass"](
            q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
        if k.requires_grad and cu_seqlens is not None and len(cu_seqlens) > 2:
            a = int(cu_seqlens[1])
            k.register_hook(lambda dk: torch.cat([dk[:, :a], dk[:, a:].roll(1, 2)], 1))
        return o, cached

    report = check.kernel("softmax_attention", moved, only="[lp]*")
    assert report.failures and report.measured, str(report)


def test_a_call_with_fewer_tokens_and_the_telling_cases_give_one_case_its_name():
    m = next(m for m in mistakes.known("gla", F32) if m.name == "state not decayed from chunk to chunk")
    fn = mistakes.apply("gla", m)
    it = Examiner(Kernel(fn, "gla", Convention(), torch.device("cpu"), SECONDS, Claim.dtypes), F32, 0)
    found = it.light([it.called(Case(B=2, T=300, H=3, K=5, V=7))])
    cases = [s.problem.case for s in found]
    assert [(case.B, case.T, case.H) for case in cases] == [(1, 65, 1)]  # shorter calls are right in o
    assert not it.light([it.called(Case(B=1, T=7, H=1, K=5, V=7))])
    # within one chunk the final state is all that is wrong: another mistake does the same
    report = check.kernel("gla", fn, only="many heads")
    assert [match["mistake"] for match in report.diagnosis] == [m.name], str(report)
