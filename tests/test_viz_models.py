"""The map of models, to move: its states against the package's (chapter 18)."""

import pytest
import torch

from gla_ref import delta_rule, gated_delta_rule, gla, kda, linear_attention, simple_gla
from gla_ref.viz.model_map import GATES, K4, MODELS, V4, WRITES, model_map, states

ONE = torch.ones(1, 4, 1, dtype=torch.float64)


def final(form, *more, **options):
    """The state behind the four tokens."""
    k, v = K4[None, :, None], V4[None, :, None]
    return form(k, k, v, *more, **options)[1][0, 0]


def log(gate: str, *, row: bool = False):
    """Log gates [1, 4, 1] or [1, 4, 1, 2] of a shape whose columns are alike."""
    G = GATES[gate]
    return (G[:, :, 0][None, :, None] if row else G[:, 0, 0][None, :, None]).log()


CALLS = {
    ("nothing fades", "adds"): lambda: final(linear_attention.recurrent),
    ("nothing fades", "erases first"): lambda: final(delta_rule.recurrent, ONE),
    ("one constant", "adds"): lambda: final(simple_gla.recurrent, log("one constant")),
    ("a number per token", "adds"): lambda: final(simple_gla.recurrent, log("a number per token")),
    ("a number per token", "erases first"): lambda: final(gated_delta_rule.recurrent, log("a number per token"), ONE),
    ("a number per row", "adds"): lambda: final(gla.recurrent, log("a number per row", row=True)),
    ("a number per row", "erases first"): lambda: final(kda.recurrent, log("a number per row", row=True), ONE),
    ("rows times columns", "adds"): lambda: final(
        gla.recurrent,
        log("a number per row", row=True),
        g_v=torch.tensor([1, 0.5, 1], dtype=torch.float64).log().expand(1, 4, 1, 3),
    ),
}


@pytest.mark.parametrize("gate, writes", CALLS)
def test_states_are_those_of_the_package(gate, writes):
    assert torch.allclose(states(gate, writes)[-1], CALLS[gate, writes](), rtol=0, atol=1e-12)


def test_every_entry_its_own_is_no_outer_product():
    G = GATES["every entry its own"][2].log()
    assert (G[0, 0] - G[0, 1] - G[1, 0] + G[1, 1]).abs() > 0.5
    k = K4[None, :, None].expand(1, 4, 3, 2)  # as three heads of one value each
    g = GATES["every entry its own"].permute(0, 2, 1).log()[None]
    S = gla.recurrent(k, k, V4[None, :, :, None], g)[1][0, :, :, 0].T
    assert torch.allclose(states("every entry its own", "adds")[-1], S, rtol=0, atol=1e-12)


def test_answers_and_readouts_say_what_is_shown():
    explorable = model_map()
    question = explorable.question
    rows = {answer: states(list(GATES)[i], WRITES[j])[n][0] for answer, (i, j, n) in question.seen.items()}
    assert torch.equal(rows["token 4"], V4[3])
    assert torch.equal(rows["tokens 3 and 4"], V4[2] + V4[3])
    assert torch.equal(rows["tokens 1, 3 and 4"], V4[0] + V4[2] + V4[3])
    assert MODELS.keys() == GATES.keys()
    for i, gate in enumerate(GATES):
        for j, writes in enumerate(WRITES):
            for n, S in enumerate(states(gate, writes)):
                said = explorable.frames[i][j][n].readout
                assert all(f"{round(x, 2) + 0.0:g}" in said for x in S.flatten().tolist())
                assert MODELS[gate][j] in said and writes in said
