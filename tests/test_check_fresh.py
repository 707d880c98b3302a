"""Forty wrong kernels, by someone who had not seen the kit, are caught, or are wrong in what it never gives."""

import fresh_kernels
import pytest
import torch
from cases import thin

from gla_ref import check
from gla_ref.check._examine import Examiner
from gla_ref.check._kernel import SECONDS, Convention, Kernel

GATE = (
    "dk_without_the_scale",
    "state_decays_in_base_two",
    "gates_reshaped_not_transposed",
    "value_heads_read_keys_in_turn",
    "erases_before_the_decay",
)
LOW = {  # wrong for inputs of 16 bits only
    "float16_scores_overflow_before_the_scale": torch.float16,
    "gate_sums_in_bfloat16": torch.bfloat16,
    "state_kept_in_16_bits": torch.bfloat16,
}
NEVER_GIVEN = {  # an argument of the function that no call of the kit has, and that a wrong kernel is wrong in
    "padding_counted_in_the_normaliser": "normalize",
    "scale_inside_the_feature_map": "feature_map",
    "value_gate_left_out_of_the_state": "g_v",
}
WRONG = [name for name in fresh_kernels.WRONG if name not in NEVER_GIVEN]


def examiner(mechanism, fn, dtype):
    return Examiner(Kernel(fn, mechanism, Convention(), torch.device("cpu"), SECONDS), dtype, 0)


@pytest.mark.parametrize("name", thin(WRONG, *GATE))
def test_a_wrong_kernel_is_caught(name):
    """Cases are tried until one fails."""
    mechanism, fn, _ = fresh_kernels.WRONG[name]
    it = examiner(mechanism, fn, LOW.get(name, torch.float32))
    rows = (row for case in check.cases(mechanism) for row in it.run(it.pose([case])[0]).rows)
    assert any(row.status == "failed" for row in rows)


@pytest.mark.parametrize("name", NEVER_GIVEN)
def test_what_is_never_given_is_said(name):
    mechanism, fn, _ = fresh_kernels.WRONG[name]
    assert NEVER_GIVEN[name] in examiner(mechanism, fn, torch.float32).kernel.never_given
