"""No kind of call is left out; what is wrong in some calls only (wrong_calls.py) is caught, and reports say where."""

import functools
import itertools
import random
import re
from fnmatch import fnmatch

import pytest
import torch
from cases import thin, with_o
from wrong_calls import GATED, LARGE, LINEAR, MISTAKES, Unlike, changed, neighbours, pulled

from gla_ref import FORMS, check
from gla_ref.check import Case
from gla_ref.check._cases import BY_CHUNKS
from gla_ref.check._claims import Claim
from gla_ref.check._examine import Examiner, reproduction
from gla_ref.check._kernel import SECONDS, Convention, Kernel
from gla_ref.check._run import AROUND, placed, same
from gla_ref.check._where import common

KINDS = {  # calls that a kernel may treat apart
    "one head": lambda c: c.H == 1,
    "two whole chunks": lambda c: c.T == 128,
    "less than a sub-chunk": lambda c: 1 < c.T < 16,
    "a carry at 2048": lambda c: c.T > 2048,
    "two batch entries from chunk 4 on": lambda c: c.B > 1 and c.T > 256,
    "packed without a state": lambda c: c.ends and not c.state,
    "packed with a scale": lambda c: c.ends and c.scale is not None,
    "one token with a scale": lambda c: c.T == 1 and c.scale is not None,
    "one token without a state": lambda c: c.T == 1 and not c.state,
    "a scale without a state": lambda c: c.scale is not None and not c.state,
    "whole chunks in a pack": lambda c: any(b - a == 64 for a, b in itertools.pairwise(c.ends or ())),
    "more sequences than a warp has lanes": lambda c: len(c.ends or ()) > 33,
    "more packed states than a block has": lambda c: c.H > 1 and (len(c.ends or (0,)) - 1) * c.H > 64,
    "heads that a block of 64 does not hold": lambda c: c.H > 64 and c.H % 4,
    "more programs than multiprocessors": lambda c: c.B * c.H > 148,
    "many programs of many chunks": lambda c: c.H >= 16 and c.T >= 200,
    "the tail of a tile of 32 keys": lambda c: 32 < c.K < 64,
    "the tail of a tile of 64 keys": lambda c: 64 < c.K < 128,
    "the tail of a tile of 64 values": lambda c: 64 < c.V < 128,
    "the tail of a tile of 128 keys": lambda c: c.K > 128,
    "a split of 128 keys past the fourth chunk": lambda c: c.K == 128 and c.T > 256,
    "a split of 128 keys in a pack": lambda c: c.K == 128 and c.ends,
    "one packed sequence with a state": lambda c: len(c.ends or ()) == 2 and c.state,
    "a state of many channels in a pack": lambda c: c.ends and c.state and c.K > 32,
    "more than 8 heads with a state": lambda c: 8 < c.H < 16 and c.state and c.T > 128,
    "strong gates and keys by sixteens": lambda c: c.gate == BY_CHUNKS and c.K % 16 == 0 and not c.ends,
    "K = V and whole chunks": lambda c: c.K == c.V and c.T % 64 == 0,
    "views of one tensor": lambda c: c.strides == "fused",
    "a loss of o alone": lambda c: c.loss == "o" and c.state and c.T > 128,
    "boundaries of int64": lambda c: c.ends and c.index == "int64",
    "a state of float64": lambda c: c.other == "S0",
}


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_of_call_is_left_out(name):
    assert any(map(KINDS[name], check.cases("gla")))


def caught(wrong):
    """(quantity, kind) of what is wrong in the cases; no mistake is looked for."""
    mechanism, fn = wrong.kernel
    it = Examiner(Kernel(fn, mechanism, Convention(), torch.device("cpu"), SECONDS, Claim.dtypes), torch.float32, 0)
    cases = (case for case in check.cases(mechanism) if fnmatch(case.name, wrong.case))
    rows = [row for case in cases for row in it.run(it.pose([case])[0]).rows if row.status == "failed"]
    return {(row.quantity, row.kind if row.error is None else "number") for row in rows}


@pytest.mark.parametrize("name", thin(MISTAKES, *(n for n in MISTAKES if n not in LARGE)))
def test_a_kind_of_mistake_is_caught(name):
    wrong = MISTAKES[name]
    assert (wrong.quantity, wrong.kind) in caught(wrong)


def test_a_gradient_that_other_cases_have_is_missed():
    _, fn = changed(lambda x: {"S0": x["S0"] if x["S0"].any() else x["S0"].detach()})
    report = check.kernel("linear_attention", fn, only="state of*")
    assert [(row.case, row.quantity, row.kind) for row in report.failures] == [("state of zeros", "dS0", "missing")]
    assert check.kernel("linear_attention", fn, only="state of*", waive={"dS0": "known"}).ok


def in_dtypes(seen, refused=(), most=9):
    """A right form that notes the dtypes of its calls, refuses some, and is wrong with larger batches."""

    def fn(q, k, v, **named):
        seen.add(q.dtype)
        if q.dtype in refused:
            raise TypeError("q: expected another dtype")
        o, S = LINEAR(q, k, v, **named)
        return o if len(q) <= most else 1.01 * o, S

    return fn


def test_a_call_in_another_dtype_comes_before_where_one_is_claimed():
    seen = set()
    check.kernel("linear_attention", in_dtypes(seen), only="frozen inputs").raise_if_failed()
    assert seen == {torch.float32, torch.bfloat16}
    refused = in_dtypes(set(), {torch.bfloat16})
    check.kernel("linear_attention", refused, only="frozen inputs").raise_if_failed()
    seen.clear()
    claim = {"dtypes": ("fp32",)}
    check.kernel("linear_attention", in_dtypes(seen), only="frozen inputs", supports=claim).raise_if_failed()
    assert seen == {torch.float32}
    check.kernel("linear_attention", in_dtypes(set(), most=2), only="frozen inputs").raise_if_failed()


@pytest.mark.parametrize("name", thin(["expanded", "transposed", "packed strided"], "transposed"))
def test_every_stride_is_tried(name):
    """A kernel that reads channels as neighbours is right where they are, and wrong for gates that they share."""

    def fn(q, k, v, g, **named):
        return GATED(q, k, v, Unlike.apply(g, neighbours, lambda d, passes: d), **named)

    assert check.kernel("gla", fn, only=name).ok == (name == "packed strided")


def test_gates_may_be_finer_than_the_rest_or_refused():
    def misread(q, k, v, g):
        read = g.view(q.dtype)[..., : q.shape[-1]]
        return GATED(q, k, v, -read.abs().nan_to_num())

    def refuses(q, k, v, g, g_v=None):
        if g.dtype != q.dtype or g_v is not None:
            raise TypeError("g: expected the dtype of q, and no g_v")
        return GATED(q, k, v, g)

    options = {"dtype": torch.bfloat16, "only": "gates *"}
    assert check.kernel("gla", misread, **options).failures
    report = check.kernel("gla", refuses, **options)  # says so: nobody is misled
    assert not report.failures and report.not_covered["gates in float32"] == report.not_covered["gates on values"] == 1
    check.kernel("gla", refuses, only="gates in float32").raise_if_failed()


@pytest.mark.deep
def test_how_far_all_cases_go_is_said():
    def few(q, k, v, *, C=64):
        return LINEAR(q, k, v)[0]

    report = check.kernel("linear_attention", few, only="length ?")
    assert report.common == [] and report.tried == "Tried up to B = 2, T = 7, H = 3, K = 5, V = 7; C not given."


@pytest.mark.deep
def test_a_sum_over_later_tokens_in_sixteen_bits_is_caught():
    def pull(d, passes):
        terms, d, rest = d - torch.cat([d[:, 1:], 0 * d[:, :1]], 1), d.clone(), 0
        for t in reversed(range(d.shape[1])):
            d[:, t] = rest = (rest + terms[:, t]).bfloat16()
        return d

    def fn(q, k, v, g, **named):
        g = Unlike.apply(g.float(), torch.clone, pull)
        o, S = GATED(q.float(), k.float(), v.float(), g, **named)
        return o.to(v.dtype), S

    report = check.kernel("gla", fn, dtype=torch.bfloat16, only="gate -1e-4 long")
    assert [row.quantity for row in report.failures] == ["dg"]


def test_strides_are_those_of_the_own_order_of_axes():
    """What is contiguous, and what is not, is what the kernel sees, and the layout and the gates are its own."""
    seen = {}

    def note(d, passes):
        seen.setdefault("backward", set()).add(d.is_contiguous())
        return d

    def fn(q, k, v, g, *, initial_state=None):
        S = initial_state
        seen["forward"] = {x.is_contiguous() for x in (q, k, v, g, S)}
        o, S = GATED(*(x.transpose(1, 2) for x in (q, k, v, 0.6931471805599453 * g)), initial_state=S.mT)
        return tuple(pulled(x.contiguous(), note) for x in (o.transpose(1, 2), S.mT))

    for case, contiguous in (("square", True), ("strided", False)):
        seen.clear()
        check.kernel("gla", fn, layout="bhtd", state="vk", gate="log2", only=case).raise_if_failed()
        assert seen == {"forward": {contiguous}, "backward": {contiguous}}


def test_a_kernel_that_refuses_a_second_backward_pass_is_not_covered_there():
    def once(d, passes):
        if passes > 1:
            raise RuntimeError("called twice")
        return d

    report = check.kernel("linear_attention", with_o(LINEAR, lambda o: pulled(o, once)), only="length 6?")
    assert report.ok and report.not_covered == {"second backward pass": 3}


@pytest.mark.parametrize("way", ["no_grad", "frozen"])
def test_what_goes_wrong_in_one_way_only_says_in_which(way):
    def fn(q, *tokens, **named):
        if way == "no_grad" and not torch.is_grad_enabled():
            return None
        if way == "frozen" and not q.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("q has no gradient")
        return LINEAR(q, *tokens, **named)

    report = check.kernel("linear_attention", fn, only="frozen inputs")
    said = {"no_grad": "under torch.no_grad(): the function returned None"}
    said["frozen"] = "where q requires no gradient: RuntimeError: q has no gradient"
    assert report.failures[0].message.startswith(said[way]) and not report.undiagnosed


NO_STATE = [(m, only) for m in ("linear_attention", "softmax_attention") for only in ("length 65", "l*")]


@pytest.mark.parametrize("mechanism, only", thin(NO_STATE, ("linear_attention", "length 65")))
def test_without_a_final_state_gradients_are_those_of_o(mechanism, only):
    def fn(q, k, v, *, scale=None):
        return FORMS[mechanism]["parallel"](q, k, v, scale=scale)[0]

    report = check.kernel(mechanism, fn, only=only)
    report.raise_if_failed()
    assert {"dq", "dk", "dv"} <= {row.quantity for row in report.rows if row.status == "passed"}


def test_a_result_that_varies_is_not_blamed_on_a_way_of_calling():
    calls = itertools.count(1)
    fn = with_o(LINEAR, lambda o: 2 * o if next(calls) % 5 == 0 else o)
    report = check.kernel("linear_attention", fn, only="[ln]*[!g]")
    assert report.failures and {row.kind for row in report.failures} == {"differs"}, str(report)
    assert not report.first_wrong and not report.diagnosis


def racing(share, seed):
    """A right form that is off by a thousandth in a share of its calls."""
    rng = random.Random(seed)
    return with_o(LINEAR, lambda o: 1.001 * o if rng.random() < share else o)


def test_a_race_is_called_by_its_rate():
    report = check.kernel("linear_attention", racing(0.02, 0), only="length 1*", races=600)
    assert report.failures and {row.kind for row in report.failures} == {"differs"}, str(report)
    assert re.search(r"equal calls give different results \(in \d+ of \d+ calls\)", " ".join(str(report).split()))


def test_what_a_way_of_calling_does_at_times_only_is_a_race():
    rng = random.Random(1)
    fn = with_o(LINEAR, lambda o: 2 * o if not torch.is_grad_enabled() and rng.random() < 0.5 else o)
    report = check.kernel("linear_attention", fn, only="length 6*")
    assert {row.kind for row in report.failures} == {"differs"}, str(report)
    assert re.search(r"wrong in \d of 5 calls under torch.no_grad", " ".join(str(report).split()))


@pytest.mark.deep
def test_a_race_of_half_a_percent_is_found():
    options = {"only": "[lmn]*", "races": 600}
    found = [bool(check.kernel("linear_attention", racing(0.005, seed), **options).failures) for seed in range(20)]
    assert sum(found) >= 19, found


BOUNDARIES = {}  # of all packs, wrongly: by number of sequences and tokens


def remembering(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    if cu_seqlens is not None:
        cu_seqlens = BOUNDARIES.setdefault((len(cu_seqlens) - 1, q.shape[1]), cu_seqlens.clone())
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("known", thin([True, False], True))
def test_a_failure_in_company_is_told(known):
    BOUNDARIES.clear()
    fn = remembering if known else lambda q, k, v, cu_seqlens=None: remembering(q, k, v, cu_seqlens=cu_seqlens)
    report = check.kernel("linear_attention", fn, only=("packed", "packed with other*"))
    assert report.failing == ["packed with other boundaries"] and report.alone == report.failing * known
    said = "packed with other boundaries passes alone, in a new process: the kernel kept state from an earlier case"
    assert (said in " ".join(str(report).split())) == (said in report._repr_html_()) == known


def test_it_is_said_which_chunks_and_heads_are_wrong_and_in_a_case_where_some_are_right():
    def fn(q, k, v, *, initial_state=None):
        o, S = LINEAR(q, k, v, initial_state=initial_state)
        wrong = (torch.arange(o.shape[1]) < 64)[:, None, None] & (torch.arange(o.shape[2]) != 1)[:, None]
        return torch.where(wrong & (initial_state is not None), 1.01 * o, o), S

    report = check.kernel("linear_attention", fn, only="[ln]*[!g]")
    first = report.first_wrong[0]
    assert (first.quantity, first.case, first.only) == ("o", "length 65", "chunk 0 of 2; heads 0, 2 of 3")
    assert "\n    only in chunk 0 of 2; heads 0, 2 of 3\n" in str(report)
    assert report.common == ["Only these have an initial state"]


def test_what_failing_cases_hardly_share_by_chance_is_said():
    failing = [Case(T=n) for n in range(1, 21)]
    passing = [Case(T=n, state=n > 10) for n in range(1, 21)]
    assert common(failing, passing) == ["All failing cases have an initial state"]
    assert common(failing[:5], passing) == []
    assert common(passing[:4], failing) == ["Only these have no initial state"]
    packed = [Case(ends=(0, 70))]
    assert common(failing[:1], packed)[0] == "Only these have fewer than 70 tokens in a sequence; no packed sequences"


@pytest.mark.parametrize("strides", ["contiguous", "strided", "fused", "misaligned", "transposed", "expanded"])
def test_nan_lies_before_and_behind_every_tensor(strides):
    x = torch.randn(2, 1, 3, 5).expand(2, 4, 3, 5)
    y = placed(x, strides, 1)
    assert torch.equal(y, x)
    n = y.untyped_storage().nbytes() // y.element_size()
    nan = y.as_strided((n,), (1,), 0).isnan()
    assert nan[:AROUND].all() and nan[1 - AROUND :].all() and n - nan.sum() <= y.numel()


def test_a_shared_gradient_written_to_is_no_refusal():
    fn = with_o(LINEAR, lambda o: pulled(o, lambda d, passes: d.mul_(2) / 2))
    report = check.kernel("linear_attention", fn, only="expanded")
    assert [row.kind for row in report.failures] == ["modified"] and not report.not_covered


def test_an_error_names_the_authors_line():
    def fn(q, k, v):
        return torch.einsum("bthk,bshk->bths", q, k[..., :-1])  # raises inside of PyTorch

    (row,) = check.kernel("linear_attention", fn, only="length 7").failures
    line = fn.__code__.co_firstlineno + 1
    assert row.message.endswith(f"(fn, line {line} of test_check_calls.py)"), row.message


def test_lines_to_run_import_what_was_checked_or_say_that_nothing_does():
    @functools.wraps(remembering)
    def fn(*tokens, **named):
        return remembering(*tokens, **named)

    assert "from test_check_calls import remembering\n" in reproduction("linear_attention", remembering, Case(), None)
    assert "# fn: the function that was checked\n" in reproduction("linear_attention", fn, Case(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_equal_results_are_the_same(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 0.0], dtype=dtype)
    assert same(x, x.clone()) and same(None, None)
    for i, other in enumerate([torch.nan, 1e30, largest, -largest, 1.0]):
        y = x.clone()
        y[i] = other
        assert not same(x, y) and not same(y, x)
    assert not same(x, None) and not same(x, x[:1])
