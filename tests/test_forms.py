"""Every form of every mechanism with a state against its float64 recurrence: the oracle rule."""

import math

import pytest
import torch
from cases import BREAK, DELTA, F64, GATED, LADDER, LINEAR, error, gate, inputs, options, pairs
from hypothesis import given
from hypothesis import strategies as st

import gla_ref
from gla_ref import gla, linear_attention, simple_gla
from gla_ref.mechanisms import MECHANISMS
from gla_ref.rounding import operands_in

TOLERANCE = 1e-10
LENGTHS = (1, 15, 16, 17, 37)  # 1, C - 1, C, C + 1, 2 C + c + 1 for C = 16, c = 4
SIZES = {"B": 2, "H": 3, "K": 5, "V": 7}
FORMS = gla_ref.FORMS
ALL = pairs(*LINEAR, *DELTA)


def rungs(mechanism, form):
    """The gates that a form is right for: ratio forms only for mild ones."""
    if not MECHANISMS[mechanism].named("gate"):
        return ("zero",)
    return ("zero", "-1e-4", "logsigmoid/16", "-1") if f"{mechanism}.{form}" in BREAK else LADDER


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(
    "mechanism, form, g_v, kind",
    [(m, f, g_v, kind) for m, f in ALL for g_v in {False, m == "gla"} for kind in rungs(m, f)],
)
def test_forms_equal_the_recurrence_on_the_whole_ladder(mechanism, form, g_v, kind, T):
    args, named = inputs(mechanism, T=T, kind=kind, g_v=g_v, **SIZES)
    o, S = FORMS[mechanism][form](*args, **named, **options(form))
    exact_o, exact_S = FORMS[mechanism]["recurrent"](*args, **named)
    assert max(error(o, exact_o), error(S, exact_S)) < TOLERANCE


@pytest.mark.parametrize("mechanism, form", [tuple(name.split(".")) for name in BREAK])
def test_ratio_forms_break_once_the_total_decay_leaves_the_exponent_range(mechanism, form):
    """1 / b overflows past ln(max) = 709.78 nats in float64 and 88.72 in float32; the other forms stay right."""

    def breaks(total, dtype):
        T = 16
        (q, k, v, g), _ = inputs(mechanism, T=T, **SIZES)
        x = [t.to(dtype) for t in (q, k, v, torch.full_like(g, -total / T))]
        exact, _ = FORMS[mechanism]["recurrent"](*[t.double() for t in x])
        o, _ = FORMS[mechanism][form](*x)
        safe, _ = FORMS[mechanism]["chunkwise"](*x)
        assert error(safe, exact) < (1e-10 if dtype is F64 else 1e-4)
        return not error(o, exact) < (1e-6 if dtype is F64 else 1e-2)

    for dtype in (F64, torch.float32):
        limit = math.log(torch.finfo(dtype).max)
        assert not breaks(limit - 8, dtype) and breaks(limit + 20, dtype)


@pytest.mark.parametrize("mechanism", LINEAR)
def test_zero_gates_give_linear_attention(mechanism):
    args, named = inputs(mechanism, T=37, kind="zero", **SIZES)
    plain, _ = linear_attention.recurrent(*args[:3], **named)
    for _, form in pairs(mechanism):
        function = FORMS[mechanism][form]
        assert error(function(*args, **named, **options(form))[0], plain) < TOLERANCE, form


def test_scalar_gates_are_vector_gates_that_are_equal():
    (q, k, v, g), named = inputs("simple_gla", T=37, kind="many resets", **SIZES)
    o, S = simple_gla.chunkwise(q, k, v, g, **named, C=16)
    exact_o, exact_S = gla.recurrent(q, k, v, g[..., None].expand_as(k), **named)
    assert max(error(o, exact_o), error(S, exact_S)) < TOLERANCE


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["elu_plus_one", "exponential", "polynomial2"])
def test_feature_maps_and_normaliser(name, normalize):
    feature_map = getattr(linear_attention, name)
    (q, k, v), _ = inputs("linear_attention", T=17, **SIZES)
    phi_q, phi_k = feature_map(q), feature_map(k)
    weights = (torch.einsum("bihk,bjhk->bhij", phi_q, phi_k)).tril()
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    exact = torch.einsum("bhij,bjhv->bihv", weights, v) * (1 if normalize else q.shape[-1] ** -0.5)
    for _, form in pairs("linear_attention"):
        function = FORMS["linear_attention"][form]
        o, state = function(q, k, v, feature_map=feature_map, normalize=normalize, **options(form))
        assert error(o, exact) < TOLERANCE, form
        assert isinstance(state, tuple) == normalize
        mapped = {"feature_map": feature_map, "normalize": normalize}
        first, S = function(q[:, :9], k[:, :9], v[:, :9], **mapped)
        second, _ = function(q[:, 9:], k[:, 9:], v[:, 9:], initial_state=S, **mapped)
        assert error(torch.cat([first, second], 1), exact) < TOLERANCE, form


def test_polynomial_features_are_the_square_of_the_product():
    phi, (x, y) = linear_attention.polynomial2, torch.randn(2, 6, 4, dtype=F64)
    assert error((phi(x) * phi(y)).sum(-1), (x * y).sum(-1) ** 2) < 1e-12


@pytest.mark.parametrize("mechanism, form", ALL)
def test_splitting_and_carrying_the_state_equals_the_whole(mechanism, form):
    args, named = inputs(mechanism, T=37, g_v=mechanism == "gla", **SIZES)
    g_v, S0 = named.pop("g_v", None), named.pop("initial_state")
    function, extra = FORMS[mechanism][form], options(form)

    def run(t, S):
        more = {} if g_v is None else {"g_v": g_v[:, t]}
        return function(*(x[:, t] for x in args), initial_state=S, **more, **extra)

    whole, final = run(slice(None), S0)
    first, S = run(slice(0, 22), S0)
    second, S = run(slice(22, None), S)
    assert error(torch.cat([first, second], 1), whole) < TOLERANCE
    assert error(S, final) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mechanism, form", ALL)
def test_packed_sequences_equal_separate_ones(mechanism, form, dtype):
    ends = [0, 5, 5, 22, 23, 40]  # one of length 0, one of length 1
    args, named = inputs(mechanism, B=1, T=40, H=3, K=5, V=7, g_v=mechanism == "gla")
    named["initial_state"] = S0 = torch.randn(5, *named["initial_state"].shape[1:], dtype=F64)
    o, S = FORMS[mechanism][form](*args, **named, cu_seqlens=torch.tensor(ends, dtype=dtype), **options(form))
    assert S.shape == S0.shape and torch.equal(S[1], S0[1])
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        if a < b:
            own = {m: x[:, a:b] if m == "g_v" else x[n : n + 1] for m, x in named.items()}
            exact_o, exact_S = FORMS[mechanism]["recurrent"](*(x[:, a:b] for x in args), **own)
            assert max(error(o[:, a:b], exact_o), error(S[n : n + 1], exact_S)) < TOLERANCE


@pytest.mark.parametrize("mechanism, form", [*ALL, *pairs("softmax_attention")])
def test_precision_layout_and_scale(mechanism, form):
    """Half inputs are computed in float32, results have their dtype; strides do not matter; inputs stay unchanged."""
    args, named = inputs(mechanism, T=17, **SIZES)

    def run(args, name=form, scale=-0.7, number=torch.Tensor.double):
        state = {n: number(x) for n, x in named.items()}
        o, S = FORMS[mechanism][name](*args, scale=scale, **state, **options(name))
        return [o, *(S if isinstance(S, tuple) else [S])]

    whole = run(args)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args[:2]]
    strided += [torch.stack([x, -x], -1).flatten(-2)[..., ::2] for x in args[2:]]
    before = [x.clone() for x in strided]
    assert max(map(error, run(strided), whole)) < TOLERANCE
    assert all(torch.equal(x, y) for x, y in zip(strided, before, strict=True))
    assert error(run(args, scale=None)[0], run(args, scale=5**-0.5)[0]) < TOLERANCE
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        o, *state = run([x.to(dtype) for x in args], number=torch.Tensor.float)
        exact = run([x.to(dtype).double() for x in args], "recurrent", number=lambda x: x.float().double())
        kept = dtype if mechanism == "softmax_attention" else torch.float32  # a cache has the dtype of its keys
        assert (o.dtype, {S.dtype for S in state}) == (dtype, {kept})
        assert error(o, exact[0]) < 50 * torch.finfo(dtype).eps and max(map(error, state, exact[1:])) < 1e-4


@pytest.mark.parametrize("mechanism, form", ALL)
def test_a_sequence_does_not_notice_its_batch_and_runs_are_bitwise_equal(mechanism, form):
    args, named = inputs(mechanism, T=37, g_v=mechanism == "gla", **SIZES)
    function, extra = FORMS[mechanism][form], options(form)
    o, S = function(*args, **named, **extra)
    alone, alone_S = function(*(x[1:] for x in args), **{n: x[1:] for n, x in named.items()}, **extra)
    assert error(alone, o[1:]) < TOLERANCE and error(alone_S, S[1:]) < TOLERANCE
    again, again_S = function(*args, **named, **extra)
    assert torch.equal(again, o) and torch.equal(again_S, S)


@pytest.mark.parametrize("mechanism", GATED)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 40, 2, 6, 6))),
    C=st.integers(1, 20),
    sub=st.integers(1, 20),
    kind=st.sampled_from(LADDER),
    seed=st.integers(0, 9),
)
def test_any_shape_chunk_and_gate(mechanism, sizes, C, sub, kind, seed):
    args, named = inputs(mechanism, *sizes, kind=kind, seed=seed)
    exact_o, exact_S = FORMS[mechanism]["recurrent"](*args, **named)
    forms = {"chunkwise": {"C": C}}
    if mechanism == "gla":
        forms["chunkwise_two_level"] = {"C": C * sub, "c": sub}
    for form, extra in forms.items():
        o, S = FORMS[mechanism][form](*args, **named, **extra)
        assert max(error(o, exact_o), error(S, exact_S)) < TOLERANCE


def test_rounding_mode_imitates_a_kernel():
    """Operands in bfloat16 cost about its epsilon, and nothing else changes."""
    (q, k, v, g), named = inputs("gla", B=1, T=130, H=2, K=32, V=32)
    exact, _ = gla.recurrent(q, k, v, g, **named)
    fine, _ = gla.chunkwise_two_level(q, k, v, g, **named)
    with operands_in(torch.bfloat16):
        rounded, _ = gla.chunkwise_two_level(q, k, v, g, **named)
    eps = torch.finfo(torch.bfloat16).eps
    assert error(fine, exact) < TOLERANCE
    assert eps / 10 < error(rounded, exact) < 10 * eps


def test_the_blocks_of_two_levels_cover_the_causal_map_once():
    for T, C, c in [(1, 4, 2), (37, 16, 4), (40, 12, 3), (7, 8, 8), (9, 1, 1)]:
        seen = torch.zeros(T, T, dtype=torch.int)
        for _, rows, cols in gla.two_level_blocks(T, C, c):
            seen[rows, cols] += 1
        assert (seen.tril() == 1).logical_or(torch.ones(T, T).triu(1) == 1).all()


def test_float32_keeps_mild_gates_that_follow_a_strong_one():
    """b_i - b_j loses them: the reason why sums of gates are never subtracted."""
    g = gate("logsigmoid/16", 1, 32, 1, 4)
    g[:, 3] = -1e3
    b = g.float()[0, :, 0].cumsum(0)
    exact = gla_ref.gates.segment_sum(g[0, :, 0])[-1, 8]
    summed = gla_ref.gates.segment_sum(g.float()[0, :, 0])[-1, 8]
    assert ((b[-1] - b[8]) - exact).abs().max() > 1e-6
    assert (summed - exact).abs().max() < 1e-6
