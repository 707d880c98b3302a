"""compat.fla: names and signatures of fla-core, our kernels behind them; fla's own as the check kit calls them."""

import ast
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from cases import error, thin

from gla_ref import check, delta_rule, gated_delta_rule, gla, kda, linear_attention, simple_gla
from gla_ref.compat import fla, libraries
from gla_ref.rounding import budget

if torch.cuda.is_available():
    pytest.skip("these run in Triton's interpreter", allow_module_level=True)

PACKED = "cu_seqlens"
TAIL = ["scale", "initial_state", "output_final_state"]
L2, BETA = "use_qk_l2norm_in_kernel", ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
SIGNATURES = {  # fla-core 0.6.0
    "chunk_gla": ["g", *TAIL, "state_v_first", PACKED, "cu_seqlens_cpu"],
    "fused_recurrent_gla": ["gk", "gv", *TAIL, "reverse", "state_v_first", PACKED, "kwargs"],
    "chunk_simple_gla": ["g", "g_gamma", *TAIL, "state_v_first", PACKED, "cu_seqlens_cpu", "kwargs"],
    "fused_chunk_simple_gla": ["g", "g_gamma", *TAIL, PACKED],
    "fused_recurrent_simple_gla": ["g", "g_gamma", *TAIL, "reverse", "state_v_first", PACKED, "kwargs"],
    "chunk_linear_attn": [*TAIL, "normalize", PACKED],
    "fused_chunk_linear_attn": [*TAIL, "normalize", PACKED],
    "fused_recurrent_linear_attn": [*TAIL, "reverse", "normalize", PACKED],
    "chunk_delta_rule": ["beta", *TAIL, L2, PACKED, "cu_seqlens_cpu", "kwargs"],
    "fused_recurrent_delta_rule": ["beta", *TAIL, L2, PACKED],
    "chunk_gated_delta_rule": [
        *("g", "beta", *TAIL, L2, *BETA, "state_v_first", PACKED),
        *("cu_seqlens_cpu", "chunk_indices", "cp_context", "kwargs"),
    ],
    "fused_recurrent_gated_delta_rule": [
        *("g", "gk", "gv", "beta", *TAIL, L2, "use_gate_in_kernel", "A_log", "dt_bias", *BETA),
        *("state_v_first", PACKED, "kwargs"),
    ],
    "chunk_kda": [
        *("g", "beta", *TAIL, L2, "use_gate_in_kernel", *BETA, "safe_gate", "lower_bound", "disable_recompute"),
        *("return_intermediate_states", "state_v_first", PACKED, "cu_seqlens_cpu", "cp_context", "use_graph"),
        *("max_num_seqs", "kwargs"),
    ],
    "fused_recurrent_kda": [
        *("g", "beta", "A_log", "dt_bias", *TAIL, L2, "use_gate_in_kernel", *BETA, "lower_bound", "state_v_first"),
        *(PACKED, "kwargs"),
    ],
}


def parameters(name: str) -> dict:
    """{argument: default} of ours, "..." where there is none."""
    found = inspect.signature(getattr(fla, name)).parameters.values()
    return {p.name: "..." if p.default is p.empty else repr(p.default) for p in found}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert list(parameters(name)) == ["q", "k", "v", *SIGNATURES[name]]
    assert set(SIGNATURES) == set(fla.__all__) - {"Installed", "install"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_library(name):
    """Read from its source, since importing it may need a GPU."""
    library = importlib.util.find_spec("fla")
    if library is None:
        pytest.skip("fla is not installed")
    way = "fused_recurrent" if name.startswith("fused_r") else "fused_chunk" if name.startswith("f") else "chunk"
    module = name.removeprefix(f"{way}_")
    path = Path(next(iter(library.submodule_search_locations))) / "ops" / module / f"{way}.py"
    (its,) = (n.args for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name)
    names = [a.arg for a in its.args]
    defaults = ["..."] * (len(names) - len(its.defaults)) + [ast.unparse(d) for d in its.defaults]
    expected = dict(zip(names, defaults, strict=True))
    assert parameters(name) == expected | ({its.kwarg.arg: "..."} if its.kwarg else {})


def tensors(gate: str | None = None, T: int = 9, N: int = 2, seed: int = 0):
    """q, k, v[, g] and a state, float32, K = 5 and V = 7."""
    rng = torch.Generator().manual_seed(seed)
    B = 1 if N == 3 else N
    q, k, x = torch.randn(3, B, T, 3, 5, generator=rng)
    v, S = torch.randn(B, T, 3, 7, generator=rng), torch.randn(N, 3, 5, 7, generator=rng)
    g = torch.nn.functional.logsigmoid(x) / 16
    return (q, k, v), {"vector": g, "scalar": g[..., 0], None: None}[gate], S


def double(x):
    """Float64 copies: tensors, pairs of them, None and options."""
    if isinstance(x, tuple):
        return tuple(map(double, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def quantities(result):
    o, S = result
    return (o, *S) if isinstance(S, tuple) else (o, S)


def close(found, form, *tokens, **named):
    """Within twice the worst error of float32 runs, one on shaken tokens, and 4 eps of the float64 recurrence."""
    shaken = [x * (1 + 0.01 * torch.rand(x.shape)) for x in tokens]
    runs = []
    for given in (tuple(shaken), tokens):
        true = quantities(form.recurrent(*double(given), **{n: double(x) for n, x in named.items()}))
        for run in (form.recurrent, form.chunkwise):
            low = quantities(run(*given, **named))
            runs.append([error(x, y) for x, y in zip(low, true, strict=True)])
    for x, y, *errors in zip(quantities(found), true, *runs, strict=True):
        allowed = budget(max(errors), torch.float32)
        assert x.dtype == torch.float32 and error(x, y) <= allowed, (error(x, y), allowed)


CU = torch.tensor([0, 4, 4, 9])
GATED = [f"{way}_{rule}" for way in ("chunk", "fused_recurrent") for rule in ("gated_delta_rule", "kda")]
FORMS = {"simple_gla": simple_gla, "gla": gla, "gated_delta_rule": gated_delta_rule, "kda": kda}
STATED = [(name, cu) for name in ("chunk_gla", "fused_recurrent_gla", "chunk_simple_gla", *GATED) for cu in (0, 1)]
KEPT = (*STATED[:6], ("fused_recurrent_gated_delta_rule", 0))


@pytest.mark.parametrize("name, packed", thin(STATED, *KEPT))
def test_gated_kernels_are_the_recurrence(name, packed):
    """With states as [N, V, K], or as ours; strengths may be logits, doubled."""
    N, cu = (3, CU) if packed else (2, None)
    options = {"output_final_state": True, "state_v_first": True}
    if name in GATED:
        qkv, g, beta, S = delta_tensors(name, N)
        more = {"beta": beta}
    else:
        qkv, g, S = tensors("scalar" if "simple" in name else "vector", N=N)
        more = {}
    ours, gate = getattr(fla, name), {"gk" if name == "fused_recurrent_gla" else "g": g}
    named = {"scale": -0.3, "cu_seqlens": cu}
    o, after = ours(*qkv, **gate, **more, **named, initial_state=S.mT, **options)
    assert after.is_contiguous()
    form = FORMS[re.sub("chunk_|fused_recurrent_", "", name)]
    close((o, after.mT), form, *qkv, g, *more.values(), initial_state=S, **named)
    found = ours(*qkv, **gate, **more, **named, initial_state=S, output_final_state=True)
    assert torch.equal(found[0], o) and torch.equal(found[1], after.mT)
    if cu is None:
        assert ours(*qkv, **gate, **more)[1] is None
    if more:
        logits = {"beta": beta.logit(), "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        doubled = {"beta": 2 * logits["beta"].sigmoid()}
        pair = (ours(*qkv, **gate, **x, cu_seqlens=cu)[0] for x in (logits, doubled))
        assert torch.equal(*pair)


@pytest.mark.parametrize("name", ["fused_chunk_linear_attn", "fused_recurrent_linear_attn"])
@pytest.mark.parametrize("cu", [None, CU], ids=["batch", "packed"])
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention_is_the_recurrence(name, cu, normalize):
    (q, k, v), _, S = tensors(N=2 if cu is None else 3)
    q, k, z = q.exp(), k.exp(), S.abs().sum(-1)  # a normaliser far from 0
    named = {"normalize": normalize, "cu_seqlens": cu}
    given = (S, z[:, None]) if normalize else S
    o, after = getattr(fla, name)(q, k, v, initial_state=given, output_final_state=True, **named)
    if normalize:
        assert after[1].shape == z[:, None].shape
        given, after = (S, z), (after[0], after[1][:, 0])
    close((o, after), linear_attention, q, k, v, initial_state=given, **named)


def test_linear_attention_is_normalised_by_default_and_starts_from_S_alone():
    (q, k, v), _, S = tensors()
    q, k = q.exp(), k.exp()
    o, (after, z) = fla.chunk_linear_attn(q, k, v, initial_state=S, output_final_state=True)
    start = S, torch.zeros(2, 3, 5)
    close((o, (after, z[:, 0])), linear_attention, q, k, v, initial_state=start, normalize=True)
    assert fla.chunk_linear_attn(q, k, v)[1] is None
    close(fla.fused_recurrent_linear_attn(q, k, v, output_final_state=True), linear_attention, q, k, v)


def test_other_gates():
    (q, k, v), g, S = tensors("vector")
    g_v, last = torch.nn.functional.logsigmoid(v) / 16, {"output_final_state": True}
    close(fla.fused_recurrent_gla(q, k, v, g, g_v, **last), gla, q, k, v, g, g_v=g_v)
    none = torch.zeros_like(g)
    close(fla.fused_recurrent_gla(q, k, v, gv=g_v, **last), gla, q, k, v, none, g_v=g_v)
    found = fla.fused_recurrent_gla(q, k, v, initial_state=S, **last)
    close(found, linear_attention, q, k, v, initial_state=S)
    found = fla.fused_chunk_simple_gla(q, k, v, None, None, None, S, True)
    close(found, linear_attention, q, k, v, initial_state=S)
    gamma = torch.tensor([-0.1, -0.5, -2.0])
    found = fla.fused_recurrent_simple_gla(q, k, v, g_gamma=gamma, **last)
    close(found, simple_gla, q, k, v, gamma.expand(q.shape[:3]))


def delta_tensors(name="", N=2):
    """q, k of length 1, v, g, beta and a state; two value heads to a key head. In KDA g has gates for channels."""
    (q, k, v), g, S = tensors("vector" if "kda" in name else "scalar", N=N)
    v, g, S = (x.repeat_interleave(2, axis) for x, axis in ((v, 2), (g, 2), (S, 1)))
    beta = torch.rand(v.shape[:3], generator=torch.Generator().manual_seed(2))
    return (q, torch.nn.functional.normalize(k, dim=-1), v), g, beta, S


@pytest.mark.deep
def test_delta_rules_are_the_recurrence():
    (q, k, v), _, beta, S = delta_tensors()
    last = {"output_final_state": True}
    close(fla.chunk_delta_rule(q, k, v, beta, 0.5, S, True), delta_rule, q, k, v, beta, scale=0.5, initial_state=S)
    close(fla.fused_recurrent_delta_rule(q, k, v, **last), delta_rule, q, k, v, torch.ones_like(beta))
    close(fla.fused_recurrent_gated_delta_rule(q, k, v, beta=beta, **last), delta_rule, q, k, v, beta)
    long = fla.chunk_delta_rule(3 * q, 2 * k, v, beta, **last, use_qk_l2norm_in_kernel=True)
    unit = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (3 * q, 2 * k))
    close(long, delta_rule, *unit, v, beta)


def test_gates_for_channels_make_kda_of_the_gated_rule():
    qkv, gk, beta, _ = delta_tensors("kda")
    g, fn = gk[..., 0], fla.fused_recurrent_gated_delta_rule
    for given, both in (({"gk": gk}, gk), ({"g": g, "gk": gk}, g[..., None] + gk)):
        hints = {"safe_gate": True, "lower_bound": -5.0, "disable_recompute": True}
        assert torch.equal(fn(*qkv, beta=beta, **given)[0], fla.chunk_kda(*qkv, both, beta, **hints)[0])
    for name, x in (("chunk_kda", g), ("chunk_gated_delta_rule", gk)):
        with pytest.raises(ValueError, match=f"^g: expected {7 - x.ndim} axes"):
            getattr(fla, name)(*qkv, x, beta)


@pytest.mark.parametrize("mechanism, name", [("gla", "fused_recurrent_gla"), ("kda", "chunk_kda")])
def test_one_token_runs_the_kernel_of_steps(mechanism, name, monkeypatch):
    """Not the kernel of chunks, which a call with gradients needs."""
    tokens, g, *beta, S = delta_tensors(name) if mechanism == "kda" else tensors("vector")
    tokens = [x[:, :1].contiguous() for x in (*tokens, g, *beta)]
    monkeypatch.setitem(fla.FORMS[mechanism], "triton", lambda *_, **__: pytest.fail("chunks"))
    found = getattr(fla, name)(*tokens, initial_state=S, output_final_state=True)
    close(found, FORMS[mechanism], *tokens, initial_state=S)
    with pytest.raises(pytest.fail.Exception, match="chunks"):
        getattr(fla, name)(*(x.requires_grad_() for x in tokens))


@pytest.mark.deep
def test_they_are_kernels_that_the_kit_calls_as_they_are():
    """Gradients and all, with a final state on request."""
    check.kernel("gla", fla.chunk_gla, only="length 1").raise_if_failed()


S_AND_z, GATE = (torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 5)), {"use_gate_in_kernel": True}
OLDER = {"transpose_state_layout": True, "state_v_first": True}
REFUSED = [
    ("fused_recurrent_gla", {"reverse": True}, "False"),
    ("fused_recurrent_linear_attn", {"reverse": True}, "False"),
    ("fused_recurrent_gla", {"head_first": True}, "False"),
    ("chunk_simple_gla", {"g_gamma": torch.zeros(3)}, "None beside g"),
    ("chunk_simple_gla", {"cu_seqlens_cpu": CU}, "the boundaries"),
    ("chunk_linear_attn", {"initial_state": S_AND_z}, r".*z as \[N, 1, H, K\], got \[2, 3, 5\]"),
    ("chunk_gla", {"initial_state": torch.zeros(2, 3, 7, 5)}, "shape"),
    *[(name, OLDER, "no older name beside state_v_first") for name in ("chunk_simple_gla", "chunk_kda")],
    ("chunk_gated_delta_rule", {"A_log": None, "use_gate_in_kernel": True}, ""),
    ("chunk_gated_delta_rule", {"cp_context": "ranks"}, ""),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ""),
    ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(2, 9, 6, 7)}, ""),
    *[("chunk_kda", {n: 1}, "") for n in ("use_graph", "max_num_seqs", "cp_context")],
    *[("chunk_kda", {"lower_bound": x, "safe_gate": True, "A_log": torch.zeros(6)} | GATE, "") for x in (None, -6.0)],
    ("fused_recurrent_kda", {"lower_bound": 5.0, "use_gate_in_kernel": True}, ""),
    ("fused_recurrent_kda", {"A_log": None, "use_gate_in_kernel": True}, ""),
]


@pytest.mark.parametrize("name, options, expected", REFUSED)
def test_what_we_cannot_do_is_refused(name, options, expected):
    if name in GATED:
        qkv, g, beta, _ = delta_tensors(name)
        gates = {"g": g, "beta": beta}
    else:
        qkv, g, _ = tensors("scalar" if "simple" in name else "vector")
        gates = {} if "linear" in name else {"gk" if name == "fused_recurrent_gla" else "g": g}
    argument = next(iter(options)).removesuffix("_cpu")
    with pytest.raises(ValueError, match=f"^{argument}: expected {expected}"):
        getattr(fla, name)(*qkv, **gates, **options)


BOUNDED = [(name, None) for name in GATED] + [(name, -5.0) for name in GATED if "kda" in name]


@pytest.mark.parametrize("name, bound", thin(BOUNDED, ("chunk_gated_delta_rule", None)))
@pytest.mark.parametrize("bias", thin([True, False], True))
def test_gates_from_their_inputs(name, bound, bias):
    """-e^A_log softplus(g + dt_bias), or the bound times a sigmoid, with gradients of all of it."""
    qkv, g, beta, _ = delta_tensors(name)
    rng = torch.Generator().manual_seed(1)
    A_log, dt_bias, x = (torch.randn(n, generator=rng, requires_grad=True) for n in (6, g[0, 0].numel(), g.shape))
    given, fn = {"A_log": A_log} | ({"dt_bias": dt_bias} if bias else {}), getattr(fla, name)
    o, _ = fn(*qkv, g=x, beta=beta, use_gate_in_kernel=True, **given, **({"lower_bound": bound} if bound else {}))
    logits, rate = x + (dt_bias.view(g.shape[2:]) if bias else 0), A_log.exp().view(-1, *[1] * (g.ndim - 3))
    made = bound * (rate * logits).sigmoid() if bound else -rate * torch.nn.functional.softplus(logits)
    right, _ = fn(*qkv, g=made, beta=beta)
    assert torch.equal(o, right)
    leaves = [x, *given.values()]
    pairs = (torch.autograd.grad(y.sum(), leaves, retain_graph=True) for y in (o, right))
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("name, sizes", [("chunk_delta_rule", (16, 32, 64)), ("chunk_kda", (32, 64))])
def test_chunk_sizes_that_fla_refuses_are_refused_in_its_words(name, sizes):
    (q, k, v), g, beta, _ = delta_tensors(name)
    given = (q, k, v, g, beta) if name == "chunk_kda" else (q, k, v[:, :, ::2], beta[:, :, ::2])
    for size in sizes:
        getattr(fla, name)(*given, chunk_size=size)
    with pytest.raises(ValueError, match=f"^`chunk_size` must be either {' or '.join(map(str, sizes))}, got 8"):
        getattr(fla, name)(*given, chunk_size=8)


OF_V = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "chunk_gla")  # o has v's dtype in fla 0.6.0


@pytest.mark.parametrize("name", ["fused_recurrent_gla", "chunk_linear_attn", "chunk_gated_delta_rule", *OF_V])
def test_what_differs_in_dtype_is_widened_and_loses_nothing(name):
    """States of 16 bits, v of 16 bits with q and k of 32, and strengths from logits of 16."""
    if name in GATED:
        (q, k, v), g, beta, S = delta_tensors(name)
        gates, half = {"g": g, "A_log": g[0, 0]}, beta.logit().half()  # without use_gate_in_kernel nothing reads A_log
        gates |= {"beta": half, "use_beta_sigmoid_in_kernel": True}
        wide = {"g": g, "beta": half.float().sigmoid()}
    else:
        (q, k, v), g, S = tensors("vector")
        wide = gates = {} if "linear" in name else {"g" if name == "chunk_gla" else "gk": g}
    q, k, S = (q.exp(), k.exp(), (S.half(), S[..., 0].abs().half()[:, None])) if "linear" in name else (q, k, S.half())
    fn, v = getattr(fla, name), v.half()
    o, after = fn(q, k, v, **gates, initial_state=S, output_final_state=True)
    S = tuple(x.float() for x in S) if isinstance(S, tuple) else S.float()
    right = fn(q, k, v.float(), **wide, initial_state=S, output_final_state=True)
    assert o.dtype == (v if name in OF_V else q).dtype
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(quantities((o, after)), quantities(right), strict=True))


def test_keys_wider_than_our_kernels_take_go_in_parts():
    rng = torch.Generator().manual_seed(0)
    q, k, g = torch.randn(3, 1, 3, 1, 260, generator=rng)
    v, S, g = torch.randn(1, 3, 1, 7, generator=rng), torch.randn(1, 1, 260, 7, generator=rng), g.sigmoid().log()
    named = {"initial_state": S, "output_final_state": True}
    close(fla.chunk_gla(q, k, v, g, **named), gla, q, k, v, g, initial_state=S)
    found = fla.fused_recurrent_simple_gla(q, k, v, g[..., 0], scale=0.5, **named)
    close(found, simple_gla, q, k, v, g[..., 0], scale=0.5, initial_state=S)
    with pytest.raises(ValueError, match="^q: expected K of at most 256, got 260"):
        fla.fused_recurrent_kda(q, k, v, g, g[..., 0].exp())


@pytest.mark.parametrize("packed", [False, True])
def test_states_inside_a_text_are_those_of_shorter_texts(packed):
    (q, k, v), g, S = tensors("vector", T=70, N=3 if packed else 2)
    beta, ends = g[..., 0].exp(), [0, 3, 3, 70] if packed else [0, 70]  # an empty text
    v = v.half()  # states have k's dtype, as in fla 0.6.0
    cu = {"cu_seqlens": torch.tensor(ends)} if packed else {}
    options = {"initial_state": S.mT, "output_final_state": True, "state_v_first": True} | cu
    o, after, states = fla.chunk_kda(q, k, v, g, beta, return_intermediate_states=True, **options)
    whole = fla.chunk_kda(q, k, v, g, beta, **options)
    assert torch.equal(o, whole[0]) and torch.equal(after, whole[1])
    starts = [(0, 0), (3, 2), (67, 2)] if packed else [(0, 0), (64, 0)]  # chunks' first tokens, and their texts
    assert states.shape == (1 if packed else 2, len(starts), 3, 7, 5)
    for n, (t, text) in enumerate(starts):
        S_n = S[text : text + 1] if packed else S
        if t > ends[text]:
            part = (x[:, ends[text] : t] for x in (q, k, v, g, beta))
            _, S_n = fla.chunk_kda(*part, initial_state=S_n, output_final_state=True)
        assert torch.equal(states[:, n], S_n.mT)


def test_unknown_arguments_are_errors():
    qkv, g, _ = tensors("scalar")
    with pytest.raises(TypeError, match="gate_logit: expected an argument of fla-core"):
        fla.chunk_simple_gla(*qkv, g, gate_logit=1)
    fla.chunk_simple_gla(*qkv, g, head_first=False)  # asks for what is done anyway


def test_an_older_name_warns_and_a_hint_changes_nothing():
    qkv, g, S = tensors("scalar")
    o, final = fla.chunk_simple_gla(*qkv, g, initial_state=S, output_final_state=True, chunk_size=32)
    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        options = {"initial_state": S.mT.contiguous(), "output_final_state": True, "transpose_state_layout": True}
        with pytest.warns(DeprecationWarning, match="called state_v_first") as warned:
            same, turned = getattr(fla, name)(*qkv, g, **options)
        assert torch.equal(same, o) and torch.equal(turned.mT, final)
        assert len(warned) == 1 and warned[0].filename == __file__


# -- fla's own --------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """A library of that name whose functions are the references, with the manners of fla's."""
    calls = []

    def function(form, name):
        def fn(*, scale, initial_state, output_final_state, cu_seqlens, **given):
            tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
            calls.append((name, {n: x for n, x in given.items() if n not in tensors}))
            assert output_final_state and (cu_seqlens is None or cu_seqlens.dtype == torch.int64)
            return form(**tensors, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)

        return fn

    forms = {"gla": gla, "simple_gla": simple_gla, "linear_attn": linear_attention}
    for name in ("fla", "fla.ops", *(f"fla.ops.{name}" for name in forms)):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, form in forms.items():
        setattr(sys.modules[f"fla.ops.{name}"], f"chunk_{name}", function(form.chunkwise, f"chunk_{name}"))
    return calls


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_simple_gla", "chunk_linear_attn"])
def test_their_functions_are_checked(library, name):
    entry = f"fla.{name}"
    report = check.kernel(libraries.FUNCTIONS[entry].mechanism, libraries.function(entry), only="packed")
    report.raise_if_failed()
    assert not report.not_covered
    assert library[0] == (name, {"normalize": False} if "linear" in name else {})


def test_their_functions_are_judged_on_what_they_claim(library):
    seen = []

    def fn(q, k, v, g, **options):
        seen.append(g.min().item())
        return gla.chunkwise(q, k, v, g, **options)

    fn.supports = libraries.function("fla.fused_recurrent_gla").supports
    report = check.kernel("gla", fn, only="gate r*")
    assert report.ok and not report.not_covered and "gate -inf" in report.left
    assert "gate resets at chunk ends" in report.cases and min(seen) == -1e3
    assert "Claimed: gates down to -1000." in str(report)
    assert libraries.function("fla.fused_chunk_linear_attn").supports == {}


def test_their_layers_call_our_kernels(library, monkeypatch):
    """Layers that are loaded before and after; as often as one likes, and back again."""
    (ops,) = (m for name, m in sys.modules.items() if name == "fla.ops.gla")
    own = ops.chunk_gla

    def layer(name):
        module = types.ModuleType(f"fla.layers.{name}")
        module.chunk_gla, module.chunk_linear_attn = ops.chunk_gla, len  # somebody else's function of that name
        module.attend = ops.chunk_gla  # another name
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    early = layer("early")
    with fla.install():
        late = layer("late")
        assert early.chunk_gla is late.chunk_gla is fla.chunk_gla and early.chunk_linear_attn is len
        assert early.attend is late.attend is fla.chunk_gla
        with fla.install("chunk_gla"):
            pass
        assert ops.chunk_gla is fla.chunk_gla, "what was installed around it stays"
    assert early.chunk_gla is late.chunk_gla is ops.chunk_gla is own
    ours = fla.install("chunk_simple_gla")
    assert sys.modules["fla.ops.simple_gla"].chunk_simple_gla is fla.chunk_simple_gla and ops.chunk_gla is own
    ours.undo()
    with pytest.raises(ValueError, match="name: expected one of"):
        fla.install("chunk_rwkv")
    with pytest.raises(ModuleNotFoundError, match="delta_rule"):
        fla.install("chunk_delta_rule")  # asked for by name, but not in this fla


def test_a_library_that_is_missing_takes_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ModuleNotFoundError):
        fla.install()


def test_their_forward_pass_alone(library):
    report = check.kernel("gla", libraries.function("fla.chunk_gla"), forward_only=True, only="length 65")
    assert report.ok and {r.quantity for r in report.rows if r.status == "passed"} == {"o", "S"}


def test_a_library_that_is_missing_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops", None)
    report = check.kernel("gla", libraries.function("fla.chunk_gla"), only="length 65")
    assert not report.ok and report.failures[0].kind == "raises"
