"""What the check kit says of wrong kernels that others wrote: most are named, and none by another's name."""

from functools import partial

import fresh_kernels
import pytest
import wrong_kernels
from cases import thin

from gla_ref import check, gla, linear_attention
from gla_ref.check._names import FOLLOWS
from gla_ref.check.mistakes._calls import backward

MADE = f"; {FOLLOWS}"
NAMES = {  # of each kernel, what the report says it behaves like; nothing, where no named mistake is what it does
    "ratio of running products": "decays as a ratio, e^b_i times e^-b_j: it overflows in strong chunks",
    "one anchor in the middle of a chunk of 64": (
        "one anchor for a whole chunk, in its middle: it overflows in strong chunks"
    ),
    "the growing exponential clipped": f"decays as a ratio whose growing exponential is cut off{MADE}",
    "running sums of gates clamped at -20": f"running sums of gates cut off at -20{MADE}",
    "running sums from the chunk's total, future gates included": (
        "running sums of gates made from the chunk's end: later gates change earlier tokens"
    ),
    "1.44 for log2(e)": f"1.44 taken for log2(e){MADE}",
    "tf32 in every product": "products in TF32, which Triton takes for float32 (or float16)",
    "operands cast to bfloat16": "operands of products in bfloat16",
    "states between chunks written as bfloat16, and their gradients": "state kept in bfloat16 between chunks",
    "states kept for the backward pass in float16": "state kept in float16 between chunks, in the backward pass only",
    "scale left out of dq": f"dq without scale{MADE}",
    "the backward pass takes the default scale": "scale given by the caller ignored, in the backward pass only",
    "scale left out of the gradient of the state": "gradient of the state without scale where a chunk reads it",
    "states recomputed from zero in the backward pass": "initial state ignored, in dg and dq only",
    "initial state left out of dq, not of the gates": "the first chunk does not read the initial state, in dq only",
    "the gradient of the final state ignored": "gradient of the final state ignored",
    "the gradient of the state not decayed between chunks": "gradient of the state not decayed from chunk to chunk",
    "the final state is that before the last chunk": "final state without the last chunk",
    "the gate's gradient summed over the whole sequence": (
        "gate's gradient summed to the end of the sequence, not of a chunk"
    ),
    "the gate's gradient without what the state at the chunk's end does": (
        "gate's gradient without what comes after its chunk"
    ),
    "the gate's gradient summed from the wrong end": "gate's gradient summed from its chunk's first token on",
    "gate applied after the write": f"gate applied after the update instead of before{MADE}",
    "a strict mask in the pairs": "mask strict instead of inclusive: a token does not see itself",
    "the last partial chunk never runs": "tail chunk lost",
    "boundaries of packed sequences one token late": "boundaries of packed sequences one token too late",
    "at most 64 channels of K": "channels of K beyond the first 64 left out",
    "the gate of the head before": "",
    "divided by the sum of the weights": (
        "o divided by a number that every token has of its own, such as a sum of its weights"
    ),
}
PARTLY = ", only ", ", but not in ", " of another head: "  # parts of names that do not explain all
QUICK = {
    "ratio of running products": "gate -20",
    "scale left out of dq": "length*",
    "the final state is that before the last chunk": "length*",  # in most lengths that is the last partial chunk
    "the last partial chunk never runs": "length*",
    "operands cast to bfloat16": "packed",  # its worst octave of dg, in budgets, is not that of the named mistake
}


def test_all_are_here():
    assert {*NAMES} == {*wrong_kernels.KERNELS}


@pytest.mark.parametrize("mechanism", thin(wrong_kernels.RIGHT, "linear_attention"))
def test_without_a_mistake_they_are_right(mechanism):
    only = "[ps]*" if mechanism == "linear_attention" else "*"
    check.kernel(mechanism, wrong_kernels.RIGHT[mechanism], only=only).raise_if_failed()


@pytest.mark.parametrize("name", QUICK)
def test_a_few_cases_are_enough(name):
    mechanism, fn = wrong_kernels.KERNELS[name]
    report = check.kernel(mechanism, fn, only=QUICK[name])
    assert max(map(len, str(report).splitlines()[1:-1])) <= 80, str(report)
    assert report.failures and [match["mistake"] for match in report.diagnosis] == [NAMES[name]], str(report)


def scaled_twice(q, k, v, g, *, scale=None, **named):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, S = gla.chunkwise(q, k, v, g, scale=scale, **named)
    return scale * o, S


def with_old_gates(kept, q, k, v, g, **named):
    return gla.chunkwise(q, k, v, kept.setdefault(g.shape, g.detach()), **named)


def without(name, what):
    """GLA whose gradient of o lacks the scale in one tensor, or what the initial state adds to it."""

    def fn(q, k, v, g, *, scale=None, initial_state=None):
        x, s = dict(q=q, k=k, v=v, g=g), q.shape[-1] ** -0.5 if scale is None else scale
        run = partial(gla.chunkwise, scale=s)
        if what == "scale":
            o, _ = run(**x | {name: backward(x[name], lambda d: d / s)}, initial_state=initial_state)
            return o, run(**x, initial_state=initial_state)[1]
        written, carried = run(**x), run(**x | {name: x[name].detach(), "v": 0 * v}, initial_state=initial_state)
        return tuple(a + b for a, b in zip(written, carried, strict=True))

    return fn


PROBED = {  # a name, the kernel that gets it, and the cases that tell
    "o with scale twice": (scaled_twice, "length *5"),
    "gates of an earlier call of the same sizes": (partial(with_old_gates, {}), "gate -[02i]*[02f]"),
    "dk without scale": (without("k", "scale"), "length 145"),
    "dv without scale": (without("v", "scale"), "length 145"),
    "gate's gradient without scale": (without("g", "scale"), "length 145"),
    "dq without what the initial state adds": (without("q", "state"), "length 145"),
    "gate's gradient without what the initial state adds": (without("g", "state"), "length 145"),
}


@pytest.mark.parametrize("name", thin(PROBED, "o with scale twice"))
def test_a_term_and_an_earlier_call_are_named(name):
    fn, only = PROBED[name]
    report = check.kernel("gla", fn, only=only)
    assert any(match["mistake"].startswith(name) for match in report.diagnosis), str(report)


def test_a_tail_that_is_left_out_has_a_bound():
    mechanism, fn, _ = fresh_kernels.WRONG["last_value_columns_forgotten"]
    said = " ".join(str(check.kernel(mechanism, fn, only="wide")).split())
    assert "66 and 67 channels of values, right with 32 and 64" in said


def test_an_error_of_two_budgets_is_given_no_name():
    def nudge(d):
        d = d.clone()
        d[0, 5, 0, 0] += 8e-6 * d.square().mean().sqrt()
        return d

    def nudged(q, k, v, **named):
        return linear_attention.chunkwise(q, backward(k, nudge), v, **named)

    report = check.kernel("linear_attention", nudged, only="length 65")
    assert [row.quantity for row in report.failures] == ["dk"] and not report.diagnosis, str(report)


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_it_is_caught_and_named(name):
    mechanism, fn = wrong_kernels.KERNELS[name]
    report = check.kernel(mechanism, fn)
    said = str(report)
    assert report.failures, said
    assert max(map(len, said.splitlines()[1:-1])) <= 80, said
    found = [match["mistake"] for match in report.diagnosis]
    if NAMES[name]:
        assert found == [NAMES[name]], said
    assert NAMES[name] or all(any(part in it for part in PARTLY) for it in found), said
    if not report.diagnosis:
        assert f'Run next: --only "{report.next_step.split(chr(34))[1]}"' in " ".join(said.split())
    assert said.splitlines()[-1] == report.head
