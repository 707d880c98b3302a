"""Gradients: gradcheck of every form, and the closed form of GLA against autograd of the float64 recurrence."""

import pytest
import torch
from cases import BREAK, DELTA, F64, GATED, LADDER, autograd_gradients, error, gate, inputs, options, pairs, thin

import gla_ref
from gla_ref.gradients.gla import backward
from gla_ref.mechanisms import MECHANISMS

TOLERANCE = 1e-9
FORMS = gla_ref.FORMS
FORWARD = [(m, f, g_v) for m, f in pairs("linear_attention", *GATED, *DELTA) for g_v in {False, m == "gla"}]
CHUNKED = [x for x in FORWARD if x[0] not in DELTA and x[1] == "chunkwise"]


@pytest.mark.parametrize("mechanism, form, g_v", thin(FORWARD, *CHUNKED))
def test_gradcheck(mechanism, form, g_v):
    args, named = inputs(mechanism, B=1, T=5, H=2, K=2, V=3, g_v=g_v)
    leaves = [x.requires_grad_() for x in (*named.values(), *args)]

    def run(*x):
        return FORMS[mechanism][form](*x[len(named) :], **dict(zip(named, x, strict=False)), **options(form, C=4, c=2))

    assert torch.autograd.gradcheck(run, leaves)


OTHERS = [(m, form) for m, form in pairs(*GATED, *DELTA, without=BREAK) if form != "recurrent"]
RUNGS = {m: [*LADDER, "-5"] if MECHANISMS[m].named("gate") else ["zero"] for m, _ in OTHERS}


@pytest.mark.parametrize("mechanism, form, kind", [(m, form, kind) for m, form in OTHERS for kind in RUNGS[m]])
def test_autograd_of_every_form_equals_that_of_the_recurrence(mechanism, form, kind):
    args, named = inputs(mechanism, B=2, T=37, H=3, K=4, V=5, kind=kind)
    do, dS = torch.randn_like(args[2]), torch.randn_like(named["initial_state"])
    exact = autograd_gradients(mechanism, "recurrent", args, named, do, dS)
    grads = autograd_gradients(mechanism, form, args, named, do, dS, **options(form))
    for name in exact:
        assert error(grads[name], exact[name]) < TOLERANCE, name


@pytest.mark.parametrize("T, C", thin([(1, 16), (15, 16), (16, 16), (17, 16), (37, 16), (37, 1), (37, 64)], (37, 16)))
@pytest.mark.parametrize("kind", LADDER)
@pytest.mark.parametrize("g_v", [False, True])
def test_closed_form_equals_autograd(g_v, kind, T, C):
    args, named = inputs("gla", B=2, T=T, H=3, K=4, V=5, kind=kind, g_v=g_v)
    do, dS = torch.randn_like(args[2]), torch.randn_like(named["initial_state"])
    exact = autograd_gradients("gla", "recurrent", args, named, do, dS)
    with torch.enable_grad():
        got = backward(*[x.requires_grad_() for x in args], do, dS, **named, C=C)
    assert not any(x.requires_grad for x in got if x is not None)
    for name, want in exact.items():
        assert error(getattr(got, name.replace("d_g_v", "dg_v")), want) < TOLERANCE, name
    assert (got.dg_v is None) == (not g_v)
    assert (got.dg[args[3] == -torch.inf] == 0).all()


@pytest.mark.parametrize("strength", [-5.0, -20.0])
def test_gate_gradient_keeps_its_digits_for_strong_gates(strength):
    """The chunk's four sums against the paper's one sum to the end of the sequence, in float32."""
    (q, k, v, _), _ = inputs("gla", B=1, T=256, H=1, K=8, V=8)
    g, do = torch.full_like(q, strength), torch.randn(1, 256, 1, 8, dtype=F64)
    exact = autograd_gradients("gla", "recurrent", [q, k, v, g], {}, do, torch.zeros(1, 1, 8, 8, dtype=F64))
    low = backward(*(x.float() for x in (q, k, v, g, do)))
    paper = (q * low.dq - k * low.dk).float().flip(1).cumsum(1).flip(1)
    ours, papers = error(low.dg, exact["dg"]), error(paper, exact["dg"])
    assert ours < 1e-4 < papers


def test_closed_form_with_packed_sequences():
    ends = [0, 5, 5, 22, 23, 40]
    args, named = inputs("gla", B=1, T=40, H=3, K=4, V=5, g_v=True)
    S0, dS = torch.randn(2, 5, 3, 4, 5, dtype=F64)
    do = torch.randn_like(args[2])
    got = backward(*args, do, dS, g_v=named["g_v"], initial_state=S0, cu_seqlens=torch.tensor(ends), C=8)
    assert torch.equal(got.d_initial_state[1], dS[1])
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        if a == b:
            continue
        *x, d, g_v = (x[:, a:b] for x in (*args, do, named["g_v"]))
        one = backward(*x, d, dS[n : n + 1], g_v=g_v, initial_state=S0[n : n + 1], C=8)
        for name in ("dq", "dk", "dv", "dg", "dg_v"):
            assert error(getattr(got, name)[:, a:b], getattr(one, name)) < TOLERANCE
        assert error(got.d_initial_state[n : n + 1], one.d_initial_state) < TOLERANCE


def test_no_gradient_of_the_final_state_means_zero():
    args, named = inputs("gla", B=1, T=20, H=1, K=3, V=2)
    do = torch.randn_like(args[2])
    with_zero = backward(*args, do, torch.zeros(1, 1, 3, 2, dtype=F64), **named)
    without = backward(*args, do, **named)
    assert all(torch.equal(x, y) for x, y in zip(with_zero, without, strict=True) if x is not None)


@pytest.mark.parametrize(
    "change, name, kind",
    [
        (lambda a: a.update(do=a["do"][:, 1:]), "do", ValueError),
        (lambda a: a.update(dS=a["dS"][..., :1]), "dS", ValueError),
        (lambda a: a.update(g=-a["g"]), "g", ValueError),
        (lambda a: a.update(do=a["do"].float()), "do", TypeError),
        (lambda a: a.update(initial_state=a["dS"].half()), "initial_state", TypeError),
        (lambda a: a.update(C=0), "C", ValueError),
    ],
)
def test_bad_arguments_are_named(change, name, kind):
    q, k, v = torch.randn(3, 1, 6, 2, 3, dtype=F64)
    given = {"q": q, "k": k, "v": v, "g": gate("-1", 1, 6, 2, 3)}
    given |= {"do": torch.randn_like(v), "dS": torch.zeros(1, 2, 3, 3, dtype=F64)}
    change(given)
    with pytest.raises(kind, match=rf"^{name}: expected|^{name}: log gates"):
        backward(**given)
