"""Wrong input is refused by every form with an error that names the argument, what was expected and what came."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from cases import DELTA, GATED, LINEAR, inputs, options, pairs, thin
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import gla_ref
from gla_ref import _contract, triangular
from gla_ref.mechanisms import MECHANISMS
from gla_ref.models import Config, LanguageModel
from gla_ref.models.mixers import MIXERS

FORMS = gla_ref.FORMS
ALL = pairs(*LINEAR, *DELTA)
SIZES = {"B": 1, "T": 6, "H": 2, "K": 3, "V": 4}


def call(mechanism, form, change):
    args, named = inputs(mechanism, **SIZES)
    given = dict(zip(MECHANISMS[mechanism].required, args, strict=True), **named)
    change(given)
    return FORMS[mechanism][form](**given, **options(form))


def test_a_form_and_its_mathematics_have_the_signatures_that_they_keep():
    """The caller may leave out what the body always gets; the body never sees boundaries of packed sequences."""
    got = {}

    @_contract.form("gla")
    def fn(q, k, v, g, *, g_v=None, scale, initial_state, C: int = 64):
        got.update(scale=scale, initial_state=initial_state, C=C)
        return v, initial_state

    public = "(q, k, v, g, *, g_v=None, scale=None, initial_state=None, cu_seqlens=None, C: int = 64)"
    assert str(inspect.signature(fn)) == public
    (q, k, v, g), _ = inputs("gla", **SIZES)
    fn(q, k, v, g, cu_seqlens=torch.tensor([0, 6]))
    assert got["scale"] == 3**-0.5 and got["initial_state"].shape == (1, 2, 3, 4) and got["C"] == 64
    for mechanism, name in REFERENCES:
        called = inspect.signature(FORMS[mechanism][name]).parameters
        body = inspect.signature(inspect.unwrap(FORMS[mechanism][name])).parameters
        assert all(called[x].default is None for x in ("scale", "initial_state", "cu_seqlens"))
        assert body["scale"].default is inspect.Parameter.empty and "cu_seqlens" not in body


BAD = {
    "q is no tensor": (TypeError, "q", lambda a: a.update(q=[1.0])),
    "k has too few axes": (ValueError, "k", lambda a: a.update(k=a["k"][0])),
    "k has another length": (ValueError, "k", lambda a: a.update(k=a["k"][:, 1:])),
    "k has another size": (ValueError, "k", lambda a: a.update(k=a["k"][..., 1:])),
    "v has other heads": (ValueError, "v", lambda a: a.update(v=a["v"][:, :, 1:])),
    "v has another dtype": (TypeError, "v", lambda a: a.update(v=a["v"].float())),
    "q holds integers": (TypeError, "q", lambda a: a.update(q=a["q"].long())),
    "v is empty": (ValueError, "v", lambda a: a.update(v=a["v"][..., :0])),
    "k is on another device": (ValueError, "k", lambda a: a.update(k=a["k"].to("meta"))),
    "state has another shape": (ValueError, "initial_state", lambda a: a.update(initial_state=torch.zeros(1, 2, 4, 3))),
    "state is half": (TypeError, "initial_state", lambda a: a.update(initial_state=a["initial_state"].half())),
    "state is no tensor": (TypeError, "initial_state", lambda a: a.update(initial_state=0)),
    "scale is a string": (TypeError, "scale", lambda a: a.update(scale="1")),
    "scale is infinite": (TypeError, "scale", lambda a: a.update(scale=float("inf"))),
    "cu_seqlens is a list": (TypeError, "cu_seqlens", lambda a: a.update(cu_seqlens=[0, 6])),
    "cu_seqlens is floating": (TypeError, "cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([0.0, 6.0]))),
    "cu_seqlens starts late": (ValueError, "cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([1, 6]))),
    "cu_seqlens stops early": (ValueError, "cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([0, 5]))),
    "cu_seqlens falls": (ValueError, "cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([0, 4, 2, 6]))),
    "cu_seqlens has one entry": (ValueError, "cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([6]))),
    "states do not match cu_seqlens": (ValueError, "initial_state", lambda a: a.update(cu_seqlens=torch.arange(7))),
}
BAD_GATE = {
    "g has another shape": (ValueError, "g", lambda a: a.update(g=a["g"][:, 1:])),
    "g is above 0": (ValueError, "g", lambda a: a["g"][:, 2].fill_(1e-3)),
    "g is NaN": (ValueError, "g", lambda a: a["g"][:, 2].fill_(float("nan"))),
}


REFERENCES = ALL + pairs("softmax_attention")
CACHED = [(*x, case) for x in pairs("softmax_attention") for case in BAD if "state" not in case]


@pytest.mark.parametrize("mechanism, form, case", [(*x, case) for x in ALL for case in BAD] + CACHED)
def test_bad_argument(mechanism, form, case):
    kind, name, change = BAD[case]
    if mechanism in DELTA and case == "v has other heads":
        name = "(g|beta)"  # v may have more heads than q, but as many as these
    with pytest.raises(kind, match=rf"^{name}: .*(got|empty)"):
        call(mechanism, form, change)


def plain(mechanism):
    """The tensors that a mechanism requires, in float32."""
    return [x.float() for x in inputs(mechanism, **SIZES)[0]]


@pytest.mark.parametrize("mechanism, form", REFERENCES)
def test_missing_tensors_are_named(mechanism, form):
    args = plain(mechanism)
    for i, name in enumerate(MECHANISMS[mechanism].required):
        with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor of shape .*, got None"):
            FORMS[mechanism][form](*args[:i], None, *args[i + 1 :])


@pytest.mark.parametrize("mechanism, form", REFERENCES)
def test_autocast_changes_nothing(mechanism, form):
    """References compute in at least float32 inside it, too; each bit of results and gradients is the same."""

    def results(enabled):
        leaves = [x.requires_grad_() for x in plain(mechanism)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, _ = FORMS[mechanism][form](*leaves, **options(form))
        return o.detach(), *torch.autograd.grad(o.square().sum(), leaves)

    for x, y in zip(results(True), results(False), strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


@pytest.mark.parametrize("form", [form for _, form in pairs("linear_attention")])
def test_feature_maps_step_out_of_autocast(form):
    W, (q, k, v) = torch.eye(SIZES["K"]) / 3, plain("linear_attention")

    def o():
        return FORMS["linear_attention"][form](q, k, v, feature_map=lambda x: (x @ W).exp(), normalize=True)[0]

    with torch.autocast("cpu", torch.bfloat16):
        inside = o()
    assert torch.equal(inside, o())


@pytest.mark.parametrize("mechanism, form", REFERENCES)
def test_no_values_are_checked_where_there_are_none(mechanism, form):
    """Meta and fake tensors have shapes only; vmap has values, but no single one to decide by."""
    args = plain(mechanism)

    def call(*args):
        return FORMS[mechanism][form](*args, **options(form))[0]

    o = call(*args)
    assert call(*(x.to("meta") for x in args)).shape == o.shape
    with FakeTensorMode() as fake:
        assert call(*map(fake.from_tensor, args)).shape == o.shape
    both = torch.func.vmap(call)(*(torch.stack([x, x.flip(1)]) for x in args))
    torch.testing.assert_close(both[0], o)
    grads = torch.func.vmap(torch.func.grad(lambda *x: call(*x).sum()))(*(x[None] for x in args))
    assert grads.shape == (1, *args[0].shape) and grads.any()
    with pytest.raises(ValueError, match="^k: expected shape"):
        call(*(x.to("meta")[..., i == 1 :] for i, x in enumerate(args)))


def test_a_triangle_is_checked_where_it_has_values():
    A = torch.ones(3, 3)
    with pytest.raises(ValueError, match="^A: expected zeros on and above"):
        triangular.blocked(A)
    assert triangular.blocked(A.to("meta")).shape == A.shape


@pytest.mark.parametrize("mixer", thin(MIXERS, "gated_delta"))
def test_models_export_compile_and_give_gradients_of_samples(mixer):
    """Their references check no values where a tracer looks on."""
    model = LanguageModel(Config(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_heads=2, mixer=mixer))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits, _ = model(tokens)
    exported = torch.export.export(model, (tokens,), strict=False).module()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for run in (exported, compiled):
        torch.testing.assert_close(run(tokens)[0], logits)

    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weights, tokens):
        return torch.func.functional_call(model, weights, (tokens[None],))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, tokens)
    logits.square().sum().backward()
    for name, x in model.named_parameters():
        torch.testing.assert_close(each[name].sum(0), x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("mechanism, form", [(m, f) for m, f in REFERENCES if f != "recurrent"])
def test_references_trace_whole(mechanism, form):
    torch.compiler.reset()  # forms share one wrapper, of which PyTorch keeps a few graphs
    args = plain(mechanism)
    compiled = torch.compile(lambda *x: FORMS[mechanism][form](*x)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args), FORMS[mechanism][form](*args)[0])


@pytest.mark.parametrize("case", BAD_GATE)
@pytest.mark.parametrize("mechanism, form", pairs(*GATED, "gated_delta_rule", "kda"))
def test_bad_gate(mechanism, form, case):
    kind, name, change = BAD_GATE[case]
    with pytest.raises(kind, match=rf"^{name}: .*got"):
        call(mechanism, form, change)


@pytest.mark.parametrize("form", [form for _, form in pairs("gla")])
def test_bad_gate_on_values(form):
    with pytest.raises(ValueError, match="^g_v: .*got"):
        call("gla", form, lambda a: a.update(g_v=torch.ones_like(a["v"])))
    with pytest.raises(ValueError, match="^g_v: .*got"):
        call("gla", form, lambda a: a.update(g_v=-torch.ones_like(a["q"])))


@pytest.mark.parametrize("C", [0, -1, 2.0, True, None])
@pytest.mark.parametrize("mechanism", [*LINEAR, *DELTA])
def test_bad_chunk_length(mechanism, C):
    args, _ = inputs(mechanism, **SIZES)
    with pytest.raises(ValueError, match="^C: .*got"):
        FORMS[mechanism]["chunkwise"](*args, C=C)


def test_sub_chunks_divide_chunks():
    args, _ = inputs("gla", **SIZES)
    with pytest.raises(ValueError, match="^c: expected a divisor of C = 16, got 3"):
        FORMS["gla"]["chunkwise_two_level"](*args, C=16, c=3)


def test_packed_batches_are_refused():
    args, _ = inputs("gla", B=2, T=6, H=1, K=2, V=2)
    with pytest.raises(ValueError, match="^cu_seqlens: .*B = 1, got B = 2"):
        FORMS["gla"]["chunkwise"](*args, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("form", FORMS["linear_attention"])
def test_normalised_state_is_a_pair(form):
    q, k, v = inputs("linear_attention", **SIZES)[0]
    S = torch.zeros(1, 2, 3, 4, dtype=q.dtype)
    function = FORMS["linear_attention"][form]
    for wrong, came in ((S, "Tensor"), (([0.0], [0.0]), r"\['list', 'list'\]"), ((S,), r"\['Tensor'\]")):
        with pytest.raises(TypeError, match=rf"^initial_state: expected \(S, z\) .*, got {came}$"):
            function(q, k, v, normalize=True, initial_state=wrong)
    with pytest.raises(ValueError, match="^initial_state: expected z of shape"):
        function(q, k, v, normalize=True, initial_state=(S, S[..., 0, :]))


@given(data=st.data())
def test_malformed_shapes_never_pass_silently(data):
    """A random axis of a random tensor is cut, repeated, dropped or added: always an error that names a tensor."""
    mechanism, form = data.draw(st.sampled_from(ALL))
    args, named = inputs(mechanism, B=2, T=6, H=2, K=3, V=4)
    tensors = dict(zip(MECHANISMS[mechanism].required, args, strict=True), **named)
    name = [*tensors][data.draw(st.integers(0, len(tensors) - 1))]
    x = tensors[name]
    axis = data.draw(st.integers(0, x.ndim - 1))
    how = data.draw(st.sampled_from(["cut", "repeat", "drop", "add"]))
    tensors[name] = {
        "cut": lambda: x.narrow(axis, 0, x.shape[axis] - 1),
        "repeat": lambda: torch.cat([x, x], axis),
        "drop": lambda: x.select(axis, 0),
        "add": lambda: x.unsqueeze(axis),
    }[how]()
    with pytest.raises(ValueError, match=rf"^({'|'.join(tensors)}): .*(got|empty)"):
        FORMS[mechanism][form](**tensors, **options(form))


def test_every_form_can_be_pickled_and_copied():
    """A module that keeps one can be saved whole, and sent to a process that is spawned."""
    for forms in FORMS.values():
        for form in forms.values():
            assert pickle.loads(pickle.dumps(form)) is form and copy.deepcopy(form) is form


def test_import_needs_neither_triton_nor_a_gpu_nor_a_call_the_compiler_of_pytorch():
    """In a fresh process where importing Triton fails; every form is callable, and kernels say what is missing.

    Where it does not fail, forward and backward of a kernel do not import torch.compile: it would add seconds.
    """
    code = (
        "import gla_ref.check, pickle, sys; assert 'triton' not in sys.modules\n"
        "sys.modules['triton'] = None; print(gla_ref.FORMS)\n"
        "assert all(callable(f) for forms in gla_ref.FORMS.values() for f in forms.values())\n"
        "form = pickle.loads(pickle.dumps(gla_ref.FORMS['delta_rule']['triton']))\n"
        "try: form(None, None, None, None)\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "import torch; del sys.modules['triton']\n"
        "if not torch.cuda.is_available():\n"
        "    x = [torch.randn(1, 3, 1, 4, requires_grad=True) for _ in 'qkv']\n"
        "    gla_ref.FORMS['linear_attention']['triton'](*x)[0].sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "chunkwise_two_level" in done.stdout, done.stderr
    *_, told = done.stdout.splitlines()
    assert told.startswith("the kernels need Triton, which is not installed"), done.stdout
    assert told.endswith("references of delta_rule run without it: " + ", ".join(f for _, f in pairs("delta_rule")))
