"""Forty wrong kernels, by someone who had not seen the kit: all are caught, most of what is named has its name."""

import fresh_kernels
import pytest
import torch
from cases import thin

from gla_ref import check
from gla_ref.check._kernel import SECONDS, Convention, Kernel

LOW = {  # wrong for inputs of 16 bits only
    "float16_scores_overflow_before_the_scale": torch.float16,
    "gate_sums_in_bfloat16": torch.bfloat16,
    "state_kept_in_16_bits": torch.bfloat16,
}
NEVER_GIVEN = {  # an argument of the function that no call of the kit has, and that a wrong kernel is wrong in
    "padding_counted_in_the_normaliser": "normalize",
    "scale_inside_the_feature_map": "feature_map",
}
WRONG = [name for name in fresh_kernels.WRONG if name not in NEVER_GIVEN]
CASES = (
    *("length 1", "length 65", "length 145", "gate -1", "gate -20", "gate -inf", "gate many resets", "many heads"),
    *("wide", "wider", "scale given", "no initial state", "strided", "equal keys", "value heads", "long cache"),
    *("packed", "packed with other boundaries", "one packed sequence", "frozen inputs"),
    *("loss of the state alone", "loss of o alone", "gates on values"),
)
NAMES = {  # what a kernel behaves like; of the others nothing, or a place
    "causal_mask_from_the_first_key": "mask counted from the cache's first key",
    "scaled_keys_in_the_cache": "k_cache with scale twice",
    "cached_tokens_get_no_gradient": "cache ignored, in dk0 and dv0 only",
    "state_decays_in_base_two": "state's decay from chunk to chunk in base 2",
    "decays_as_a_ratio_overflow": "decays as a ratio, e^b_i times e^-b_j: it overflows in strong chunks",
    "dg_without_the_final_state": "gate's gradient without S_T dS_T, with which its reverse sum begins",
    "dq_without_the_initial_state": "dq without what the initial state adds",
    "inverse_series_stops_early": "triangle inverted by its powers up to A^7 only",
    "value_heads_read_keys_in_turn": "value heads grouped wrongly: h reads key head h mod H",
    "dbeta_without_what_was_found": "gradient of beta without what is erased",
    "erases_before_the_decay": "keys find the state before the gate",
    "decays_by_difference_nan_after_a_reset": "decays as differences of running sums: not a number after a reset",
    "no_gradient_for_the_initial_state": "initial state ignored, in dS0 only",
    "dk_without_its_search": "dk without what the keys erase",
}
PLACE = ", only ", ", but not in ", " of another head: "  # parts of names that do not explain all


@pytest.mark.parametrize("name", thin(WRONG, "scaled_keys_in_the_cache"))
def test_a_wrong_kernel_is_caught_and_has_no_other_name(name):
    mechanism, fn, _ = fresh_kernels.WRONG[name]
    report = check.kernel(mechanism, fn, dtype=LOW.get(name, torch.float32), only=CASES)
    found = [match["mistake"] for match in report.diagnosis]
    assert report.failures, str(report)
    if name in NAMES:
        assert found == [NAMES[name]], str(report)
    assert name in NAMES or all(any(part in it for part in PLACE) for it in found), str(report)
    assert max(map(len, str(report).splitlines()[1:-1])) <= 80, str(report)


@pytest.mark.parametrize("name", NEVER_GIVEN)
def test_what_is_never_given_is_said(name):
    mechanism, fn, _ = fresh_kernels.WRONG[name]
    kernel = Kernel(fn, mechanism, Convention(), torch.device("cpu"), SECONDS)
    assert NEVER_GIVEN[name] in kernel.never_given
