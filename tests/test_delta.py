"""The delta family: keys that are alike, the closed form of its gradient, the triangle (the oracle rule)."""

from __future__ import annotations

import pytest
import torch
from cases import CORRELATIONS, F64, LADDER, STRENGTHS, alike, autograd_gradients, error, inputs, options, pairs, thin

from gla_ref import delta_rule, gated_delta_rule, gla, kda, linear_attention, triangular
from gla_ref.book.viz import inverses, overwrite, two_clerks
from gla_ref.gradients import delta_rule as delta_backward
from gla_ref.rounding import products_in

MODULES = {"delta_rule": delta_rule, "gated_delta_rule": gated_delta_rule, "kda": kda}
SIZES = {"B": 2, "H": 3, "K": 5, "V": 7}
INVERSES = (triangular.substitution, triangular.elimination, triangular.blocked, triangular.halves, triangular.doubling)


def ladder(mechanism, T, kind="logsigmoid/16", correlation=0.0, strength=None):
    args, named = inputs(mechanism, T=T, kind=kind, **SIZES)
    args[1] = alike(args[1], correlation)
    if strength is not None:
        args[-1] = torch.full_like(args[-1], strength)
    return args, named


@pytest.mark.parametrize("mechanism, form", pairs(*MODULES))
def test_forms_equal_the_recurrence_on_the_key_ladder(mechanism, form):
    for correlation in CORRELATIONS:
        for strength in STRENGTHS:
            args, named = ladder(mechanism, 37, correlation=correlation, strength=strength)
            exact_o, exact_S = MODULES[mechanism].recurrent(*args, **named)
            o, S = getattr(MODULES[mechanism], form)(*args, **named, **options(form))
            assert max(error(o, exact_o), error(S, exact_S)) < 1e-9, (correlation, strength)


@pytest.mark.parametrize("kind", thin(LADDER, "logsigmoid/16", "many resets", "mild and strong chunks"))
@pytest.mark.parametrize("mechanism", ("delta_rule", "gated_delta_rule"))
def test_closed_form_gradients_equal_autograd(mechanism, kind):
    for correlation in (0.0, 0.99, 1.0):
        args, named = ladder(mechanism, 37, kind, correlation)
        do, dS = torch.randn_like(args[2]), torch.randn_like(named["initial_state"])
        want = autograd_gradients(mechanism, "recurrent", args, named, do, dS)
        gated = args if mechanism == "gated_delta_rule" else [*args[:3], None, args[3]]
        got = [x for x in delta_backward.backward(*gated, do, dS, **named, C=16) if x is not None]
        for x, (name, exact) in zip(got, want.items(), strict=True):
            exact = torch.where(args[3] == -torch.inf, 0, exact) if name == "dg" else exact
            assert error(x, exact) < 1e-8, (name, correlation)


def test_where_gates_and_strengths_end_the_mechanisms_meet():
    """Without a gate the gated rule is the delta rule; equal gates make KDA of it; with orthonormal keys it adds."""
    (q, k, v, g, beta), named = inputs("gated_delta_rule", T=37, **SIZES)
    o, S = delta_rule.recurrent(q, k, v, beta, **named)
    assert error(gated_delta_rule.recurrent(q, k, v, 0 * g, beta, **named)[0], o) < 1e-12
    wide = g[..., None].expand(*g.shape, k.shape[-1])
    o, S = gated_delta_rule.recurrent(q, k, v, g, beta, **named)
    assert max(map(error, kda.recurrent(q, k, v, wide, beta, **named), (o, S))) < 1e-12
    k = torch.eye(5, dtype=F64)[None, :, None].expand(2, 5, 3, 5)
    o, _ = delta_rule.chunkwise(q[:, :5], k, v[:, :5, :3], torch.ones(2, 5, 3, dtype=F64))
    assert error(o, linear_attention.recurrent(q[:, :5], k, v[:, :5, :3])[0]) < 1e-12


def test_with_no_strength_nothing_is_written():
    (q, k, v, g, beta), named = inputs("kda", T=21, **SIZES)
    o, S = kda.chunkwise(q, k, v, g, 0 * beta, **named)
    heads = [x.repeat_interleave(2, 2) for x in (q, k)]
    exact_o, exact_S = gla.recurrent(*heads, 0 * v, g, **named)
    assert max(error(o, exact_o), error(S, exact_S)) < 1e-12


def test_with_strength_one_a_key_finds_what_was_last_written_under_it():
    key = torch.tensor([0.6, 0.8], dtype=F64)
    k, v = key.expand(1, 3, 1, 2), torch.randn(1, 3, 1, 4, dtype=F64)
    _, S = delta_rule.recurrent(k, k, v, torch.ones(1, 3, 1, dtype=F64))
    assert error(key @ S[0, 0], v[0, 2, 0]) < 1e-12


@pytest.mark.parametrize("mechanism", MODULES)
def test_what_does_not_fit_is_refused(mechanism):
    args, named = inputs(mechanism, T=5, **SIZES)
    with pytest.raises(ValueError, match=r"v: expected HV a multiple of H = 3 as in q, got 5"):
        MODULES[mechanism].recurrent(*args[:2], *(x[:, :, :5] for x in args[2:]))
    with pytest.raises(ValueError, match=r"beta: write strengths must lie in \[0, 2\]"):
        MODULES[mechanism].recurrent(*args[:-1], args[-1] + 2)


# -- the triangle ------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", INVERSES, ids=lambda f: f.__name__)
def test_inverses_invert(inverse):
    for n in (1, 2, 7, 16, 33, 64):
        A = 0.3 * torch.randn(2, n, n, generator=torch.Generator().manual_seed(n), dtype=F64).tril(-1)
        assert error(inverse(A) @ (torch.eye(n, dtype=F64) + A), torch.eye(n, dtype=F64).expand(2, n, n)) < 1e-10


def test_doubling_breaks_with_keys_that_are_alike_and_the_others_do_not():
    k = alike(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), 0.99)
    A = (k @ k.mT).tril(-1)
    exact = triangular.substitution(A.double())
    errors = {f.__name__: (f(A) - exact).abs().max().item() for f in INVERSES}
    assert errors.pop("doubling") > 1e6 and max(errors.values()) < 2e-6, errors


def test_inverses_refuse_what_is_no_triangle():
    for inverse in INVERSES:
        with pytest.raises(ValueError, match=r"A: expected shape \[\.\.\., n, n\], got \[3, 4\]"):
            inverse(torch.zeros(3, 4))
        with pytest.raises(ValueError, match="A: expected zeros on and above the diagonal"):
            inverse(torch.eye(3))
    with pytest.raises(ValueError, match="c: expected a chunk length of at least 1"):
        triangular.blocked(torch.zeros(3, 3), 0)


# -- the picture (chapter 20) ------------------------------------------------------------------


@pytest.mark.parametrize("alike", overwrite.ALIKE)
def test_the_picture_shows_what_each_rule_answers(alike):
    tea, rain, jazz = overwrite.VALUES
    ada, bob = overwrite.asked(overwrite.states("add", alike)[-1], alike)
    assert error(ada, tea + alike * rain + jazz) < 1e-12 and error(bob, rain + alike * (tea + jazz)) < 1e-12
    *_, found, erased, written = overwrite.states("correct (β = 1)", alike)
    found, erased, written = (overwrite.asked(S, alike) for S in (found, erased, written))
    assert erased[0].abs().max() < 1e-12 and error(written[0], jazz) < 1e-12
    assert error(written[1], found[1] + alike * (jazz - found[0])) < 1e-12  # Bob's answer moves with Ada's
    S = overwrite.states("overshoot (β = 2)", alike)
    before, after = (overwrite.asked(x, alike)[0] for x in (S[4], S[6]))
    assert error(after, 2 * jazz - before) < 1e-12
    said = overwrite.overwrite().frames[2][overwrite.ALIKE.index(alike)][-1].readout.replace("−", "-")
    assert said.endswith(
        f"Ada's answer: (0, 0, 1), Bob's: ({', '.join(f'{round(x, 2) + 0.0:g}' for x in written[1].tolist())})."
    )


@pytest.mark.parametrize("gate", two_clerks.GATES)
def test_only_kda_fades_a_row_and_replaces_an_entry(gate):
    """The table after the story is right but for what the gate leaves of today's row, and by no other rule."""
    right, left = two_clerks.wanted(len(two_clerks.STORY)), torch.zeros(2, 3, dtype=torch.float64)
    left[1, 1] = gate**2
    off = {rule: (two_clerks.states(rule, gate)[-1] - right - left).norm().item() for rule in two_clerks.RULES}
    assert off.pop("Kimi Delta Attention") < 1e-12
    assert off.pop("GLA") == pytest.approx(1) and (gate == 1 or min(off.values()) > 0.5)


# -- the laboratory's picture (chapter 21) -----------------------------------------------------


@pytest.mark.parametrize("n, beta", [(16, 1.0), (64, 2.0)])
def test_the_laboratory_shows_the_errors_of_the_inverse(n, beta):
    (largest, found), b = inverses.errors(n), inverses.STRENGTHS.index(beta)
    row = inverses.inverses().frames[b][inverses.ROWS.index(n)]
    assert largest[b].max() <= max(1, beta) + 1e-9  # what no key can exceed
    for i, A in enumerate(inverses.triangles(n)[b]):
        exact = triangular.elimination(A)
        for way, precision in (("halves", "tf32"), ("doubling", "ieee"), ("blocks of 16", "bf16")):
            with products_in(precision):
                got = (inverses.WAYS[way](A.float()).double() - exact).abs().max().item()
            assert got == pytest.approx(found[way, precision][b, i].item(), rel=1e-6, abs=1e-12)
            digit = f"{got:.0e}"[0] if got else "0"
            assert f"{way}, {inverses.NAMES[precision]}: {digit}" in "".join(row[i].pieces)


def test_doubling_in_half_precision_is_not_a_number():
    """Powers beyond 65504 become infinite, and infinities cancel to NaN."""
    A = torch.ones(64, 64).tril(-1)
    with products_in("fp16"):
        assert triangular.doubling(A).isnan().any() and triangular.blocked(A).equal(triangular.substitution(A))
