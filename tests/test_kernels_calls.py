"""Between a call and the GPU: signatures, plans and programs; interpreted here, for real on a GPU."""

import contextlib
import functools
import gc
import threading
import time
import weakref

import pytest
import torch
from cases import CHOSEN, F64, error, inputs, thin
from harness import CUDA, HERE, interpreted
from torch.autograd import forward_ad

from gla_ref import FORMS, mechanisms
from gla_ref import check as kit

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import linear_attention, steps
from gla_ref.kernels._explain import PLANNERS as PLANNED
from gla_ref.kernels.launch import program
from gla_ref.kernels.launch.hardware import CLASSES

MECHANISMS = ("softmax_attention", "linear_attention", "simple_gla", "gla")
FEW = thin((*MECHANISMS, "gated_delta_rule"), "softmax_attention", "linear_attention")
gpu = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("here")


def tokens(mechanism, B=2, T=20, H=2, K=16, V=16, dtype=torch.float32, seed=0):
    args, _ = inputs(mechanism, B, T, H, K, V, seed=seed)
    return [x.to(HERE, dtype) for x in args]


def both(mechanism, x, **options):
    """o and the gradients of its sum of squares."""
    leaves = [y.detach().requires_grad_() for y in x]
    o, _ = FORMS[mechanism]["triton"](*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def assert_right(mechanism, x, found, tolerance=1e-3):
    """Within float32's reach of the recurrence: these tests are about calls, those of each kernel about digits."""
    leaves = [y.detach().to(F64).requires_grad_() for y in x]
    o, _ = FORMS[mechanism]["recurrent"](*leaves)
    exact = [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]
    worst = max(error(y, z) for y, z in zip(found, exact, strict=True))
    assert worst < tolerance, worst


@pytest.mark.parametrize("mechanism", FEW)
def test_a_signature_is_planned_and_checked_once(mechanism, monkeypatch):
    """The second call of a kind neither plans nor checks; another shape, stride, alignment or option does."""
    x, form, planned = tokens(mechanism), FORMS[mechanism]["triton"], PLANNED[mechanism].forward
    seen = []
    monkeypatch.setattr(planned, "programs", {})
    monkeypatch.setattr(planned, "remember", lambda key, call: seen.append(key) or remember(key, call))
    remember = type(planned).remember.__get__(planned)
    form(*x), form(*x), form(*(y.clone() for y in x))
    assert len(seen) == 1
    apart = torch.empty(x[0].numel() + 1, dtype=x[0].dtype, device=HERE)[1:].view(x[0].shape)
    turned = x[0].transpose(1, 2).contiguous().transpose(1, 2)
    for other in ([y[:, :-1] for y in x], [turned, *x[1:]], [apart.copy_(x[0]), *x[1:]]):
        before = len(seen)
        form(*other), form(*other)
        assert len(seen) == before + 1
    form(*x, scale=0.5), form(*x, scale=0.5)
    assert len(set(seen)) == len(seen) == 5


@pytest.mark.parametrize("mechanism", FEW)
def test_contiguous_transposed_and_expanded_inputs_in_turn(mechanism):
    """Each has a signature of its own, and gets its own results."""
    x = tokens(mechanism, B=1)
    turned = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    shared = [y[:, :, :1].expand_as(y) for y in x]
    for _ in range(2):
        for z in (x, turned, shared):
            assert_right(mechanism, z, both(mechanism, z))


def test_programs_are_bounded(monkeypatch):
    monkeypatch.setattr(program, "MOST", 3)
    monkeypatch.setattr(linear_attention.forward, "programs", {})
    for T in range(1, 8):
        x = tokens("linear_attention", T=T)
        with torch.no_grad():
            o, _ = FORMS["linear_attention"]["triton"](*x)
        assert o.shape[1] == T and len(linear_attention.forward.programs) <= 3
    latest = {key[0][0][1] for key in linear_attention.forward.programs}
    assert latest == {5, 6, 7}


def test_a_program_keeps_no_tensor():
    """Not its inputs, outputs or what it made in between; not in the first call either."""
    x = [y.requires_grad_() for y in tokens("gla")]
    o, S = FORMS["gla"]["triton"](*x)
    o.square().sum().backward()
    refs = [weakref.ref(y) for y in (*x, o, S)]
    del x, o, S
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("mechanism", FEW)
def test_threads_at_once(mechanism, monkeypatch):
    """Each gets its own results, also of signatures that another thread is planning."""
    for planned in (PLANNED[mechanism].forward, PLANNED[mechanism].backward):
        monkeypatch.setattr(planned, "programs", {})
    count = 4 if CUDA else 2
    x = [tokens(mechanism, B=1, T=17 + i % 2, seed=i) for i in range(count)]
    found = [None] * count

    def work(i):
        for _ in range(3):
            found[i] = both(mechanism, x[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y, z in zip(x, found, strict=True):
        assert_right(mechanism, y, z)


def test_launchers_are_loaded_one_at_a_time(monkeypatch):
    """Python keeps one module for all of them: two threads that load at once may get one another's function."""
    loading = []

    class Kernel:
        @property
        def run(self):
            loading.append(self)
            time.sleep(0.01)
            assert loading == [self]
            loading.clear()

    monkeypatch.setattr(program, "COMPILED", {})
    monkeypatch.setattr(program, "variant", lambda launch, device: launch)
    monkeypatch.setattr(program, "compile_launch", lambda launch: Kernel())
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    assert len({*program.compiled(list(range(8)), None, list)}) == 8


def test_a_kernel_that_does_not_fit_says_so_in_every_call():
    class Kernel:  # as Triton's, whose `run` raises once
        launcher = None

        @property
        def run(self):
            if self.launcher is None:
                self.launcher = functools.partial(self.refuse)
                self.refuse()
            return self.launcher

        def refuse(self):
            raise MemoryError("out of resource: shared memory")

    kernel = Kernel()
    for _ in range(3):
        with pytest.raises(MemoryError, match="shared memory"):
            program.loaded(kernel)


def test_a_second_derivative_is_refused():
    x = [y.requires_grad_() for y in tokens("gla")]
    o, _ = FORMS["gla"]["triton"](*x)
    (dq,) = torch.autograd.grad(o.square().sum(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


COMPILED = [(m, "triton", False) for m in PLANNED] + [("gla", "triton", True), ("gla", "triton_recurrent", False)]


@pytest.mark.parametrize("mechanism, form, two_sided", thin(COMPILED, *COMPILED[:1], *COMPILED[2:4], COMPILED[-1]))
def test_compiled_equals_eager(mechanism, form, two_sided):
    """With a state and all gradients, where there are any."""
    soft, step = mechanism == "softmax_attention", form == "triton_recurrent"
    args, named = inputs(mechanism, 2, 19, 1, 5, 7, g_v=two_sided)
    leaves = [x.to(HERE, torch.float32).requires_grad_(not step) for x in (*named.values(), *args)]

    def f(*x):
        o, S = FORMS[mechanism][form](*x[len(named) :], **dict(zip(named, x, strict=False)))
        return 2 * o, S[0] if soft else S

    torch._dynamo.reset()  # all cases share the code of f, and Dynamo compiles one code eight times at most
    results = [g(*leaves) for g in (f, torch.compile(f, fullgraph=True, backend="inductor" if CUDA else "aot_eager"))]
    if not step:
        results = [(o, S, *torch.autograd.grad((o.sum(), S.sum()), leaves)) for o, S in results]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def zeros(*shape):
    return torch.zeros(shape, device=HERE)


def declared(name):
    """The names of the tensors that a mechanism or its step requires."""
    return mechanisms.MECHANISMS[name.removesuffix("_step")].required


def named_tokens(name, T=20):
    return dict(zip(declared(name), tokens(name.removesuffix("_step"), B=1, T=T, V=12), strict=True))


def widened(x, D):
    """Zeros with D channels for every tensor of channels."""
    return {n: zeros(*y.shape[:3], D) for n, y in x.items() if y.ndim == 4}


def heads(x, H, *names):
    """The first heads of some tensors."""
    return {n: x[n][:, :, :H] for n in names if n in x}


def ends(*values):
    return {"cu_seqlens": torch.tensor(values, device=HERE)}


STEPS = {name: getattr(steps, name) for name in steps.__all__}
FORM = {name: FORMS[name]["triton"] for name in PLANNED} | STEPS
EVERY, CACHED, STATED = tuple(FORM), tuple(FORM)[:1], tuple(FORM)[1:]
GATED = [name for name in EVERY if "g" in declared(name)]
DELTA, TWO_SIDED = [name for name in EVERY if "beta" in declared(name)], ("gla", "gla_step")
WRONG = [  # (functions, error, message, changes of the tensors x by name: B = 1, T = 20, H = 2, K = 16, V = 12)
    (EVERY, TypeError, "q: expected a torch.Tensor of shape .*, got list", lambda x: {"q": [1.0]}),
    (EVERY, TypeError, "v: expected a torch.Tensor of shape .*, got None", lambda x: {"v": None}),
    (GATED, TypeError, "g: expected a torch.Tensor of shape .*, got None", lambda x: {"g": None}),
    (EVERY, TypeError, "q: expected a floating", lambda x: {"q": x["q"].long()}),
    (EVERY, TypeError, "q: expected float32, float16 or bfloat16", lambda x: {n: y.double() for n, y in x.items()}),
    (EVERY, TypeError, "k: expected dtype .* as for q", lambda x: {"k": x["k"].half()}),
    (EVERY, ValueError, "k: expected shape .* K = 16 as in q", lambda x: {"k": x["k"][..., 1:]}),
    (EVERY, ValueError, "v: expected 4 axes", lambda x: {"v": x["v"][0]}),
    (GATED, ValueError, "g: expected [34] axes", lambda x: {"g": x["g"][..., 0]}),
    (TWO_SIDED, ValueError, "g_v: expected shape", lambda x: {"g_v": x["g"]}),
    (EVERY, ValueError, "q: .* most 256, got 257", lambda x: widened(x, 257)),
    (CACHED, ValueError, "v: expected V of at most 256, got 257", lambda x: {"v": widened(x, 257)["v"]}),
    (STATED, ValueError, "v: expected V of at most 512, got 513", lambda x: {"v": widened(x, 513)["v"]}),
    (EVERY, TypeError, "scale: expected a finite number", lambda x: {"scale": "1"}),
    (EVERY, TypeError, "scale: expected a finite number", lambda x: {"scale": float("nan")}),
    (CHOSEN, ValueError, "kernel: expected one of portable.* or None, got 'fast'", lambda x: {"kernel": "fast"}),
    ([*PLANNED][1:], ValueError, "path: expected one of fused", lambda x: {"path": "fast"}),
    (DELTA, ValueError, "v: expected HV a multiple of H = 2 as in q, got 3", lambda x: heads(x, 3, "v", "g", "beta")),
    (DELTA, ValueError, r"beta: expected shape \[B T HV\] with HV = 4 as in v", lambda x: heads(x, 2, "beta")),
    (STATED, ValueError, "initial_state: expected shape", lambda x: {"initial_state": zeros(2, 2, 16, 12)}),
    (STATED[:1], TypeError, "initial_state: expected", lambda x: {"initial_state": x["k"], "normalize": True}),
    (CACHED, TypeError, "initial_state: expected a pair .* got Tensor$", lambda x: {"initial_state": x["k"]}),
    (CACHED, TypeError, r"initial_state\[1\]: expected dtype", lambda x: {"initial_state": (x["k"], x["v"].half())}),
    (CACHED, ValueError, "initial_state: expected None", lambda x: {"initial_state": (x["k"], x["v"])} | ends(0, 20)),
    (EVERY, TypeError, "cu_seqlens: expected an int32", lambda x: ends(0.0, 20.0)),
    (EVERY, ValueError, "cu_seqlens: expected shape", lambda x: ends(0)),
    (EVERY, ValueError, "cu_seqlens: .* B = 1", lambda x: {n: torch.cat([y, y]) for n, y in x.items()} | ends(0, 20)),
]
VALUES = [  # of which a GPU is asked under GLA_REF_DEBUG=1 only
    (DELTA, ValueError, r"beta: write strengths must lie in \[0, 2\]", lambda x: {"beta": x["beta"] + 3}),
    (GATED, ValueError, "g: log gates must lie in", lambda x: {"g": -x["g"]}),
    (EVERY, ValueError, r"cu_seqlens: expected to rise from 0 to T = 20 .*, got \[0, 5\]", lambda x: ends(0, 5)),
    (EVERY, ValueError, r"cu_seqlens: expected to rise from 0 .*, got \[0, 64\]", lambda x: ends(0, 64)),
    (EVERY, ValueError, r"cu_seqlens: expected to rise from 0 .*, got \[3, 20\]", lambda x: ends(3, 20)),
    (EVERY, ValueError, r"cu_seqlens: expected to rise from 0 .*, got \[0, 9, 4, 20\]", lambda x: ends(0, 9, 4, 20)),
]
if not CUDA:
    message = "q: expected float32 or float16 on the CPU"
    WRONG.append((EVERY, TypeError, message, lambda x: {n: y.bfloat16() for n, y in x.items()}))


@pytest.mark.parametrize("name, kind, message, change", [(who, *row[1:]) for row in WRONG + VALUES for who in row[0]])
def test_what_is_wrong_is_named(name, kind, message, change, monkeypatch):
    form, x = FORM[name], named_tokens(name)
    if CUDA and change in [row[-1] for row in VALUES]:
        monkeypatch.setenv("GLA_REF_DEBUG", "1")
    with pytest.raises(kind, match="^" + message):
        form(**(x | change(x)))


@interpreted
@pytest.mark.parametrize("name", EVERY)
def test_values_are_checked_at_every_call_on_a_cpu(name):
    """Not only of a new signature: there is no GPU to wait for, and a wrong boundary would write anywhere."""
    form, x = FORM[name], named_tokens(name, T=3)
    cu = torch.tensor([0, 1, 3])
    form(**x, cu_seqlens=cu)
    for wrong in ([0, 1, 64], [0, 5, 3], [1, 1, 3], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"^cu_seqlens: expected to rise from 0 to T = 3 .*, got \["):
            form(**x, cu_seqlens=cu.copy_(torch.tensor(wrong)))
    compiled = torch.compile(lambda **x: form(**x)[0], backend="eager") if name == "gla" else form
    for argument, value in (("g", 0.5), ("beta", -1.0)):
        if argument in x:
            with pytest.raises(ValueError, match=f"^{argument}: .* must lie in"):
                compiled(**(x | {argument: torch.full_like(x[argument], value)}))


@interpreted
@pytest.mark.parametrize("far", [2**27 + 8, 2**28 - 8])
@pytest.mark.parametrize("mechanism", ["gla", "kda"])
def test_tokens_far_apart(mechanism, far):
    """Plans make 16 n + 8 of such a stride n, from 2^31 up to 2^32; only memory that is touched is taken."""
    q, *x = tokens(mechanism, B=1, T=5, H=1, dtype=torch.float16)
    apart = torch.empty(4 * far + 16, dtype=q.dtype).as_strided(q.shape, (16, far, 16, 1)).copy_(q)
    found, right = (FORMS[mechanism]["triton"](y, *x)[0] for y in (apart, q))
    assert torch.equal(found, right)


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
}
CALLABLE = [(m, f) for m, forms in FORMS.items() for f in forms if f.startswith("triton") and f != "triton_hopper"]


@pytest.mark.parametrize("mechanism, form", thin(CALLABLE, *((m, f) for m, f in CALLABLE if f != "triton_portable")))
def test_derivatives_that_kernels_lack_are_refused(mechanism, form):
    """They would be 0, since a launch reads memory; of every tensor, and at every call."""
    x, function = tokens(mechanism, B=1, T=3, H=1), FORMS[mechanism][form]
    message = "got one that they do; .* supports"
    right = function(*x)[0].sum()
    for i, name in enumerate(mechanisms.MECHANISMS[mechanism].required):

        def loss(y, i=i):
            return function(*x[:i], y, *x[i + 1 :])[0].sum()

        for transform in TRANSFORMS.values():
            with pytest.raises(NotImplementedError, match=f"^{name}: .*{message}"):
                transform(loss, x[i])
        with forward_ad.dual_level():
            assert torch.equal(loss(x[i]), right)  # no dual number
            for y in (forward_ad.make_dual(x[i], x[i]), forward_ad.make_dual(x[i].clone().requires_grad_(), x[i])):
                with pytest.raises(NotImplementedError, match=f"^{name}: .*{message}"):
                    loss(y)


@pytest.mark.parametrize("form", thin(["triton", "triton_recurrent"], "triton"))
def test_compiled_derivatives_that_kernels_lack_are_refused(form):
    x = tokens("gla", B=1, T=3)

    def loss(v):
        return FORMS["gla"][form](*x[:2], v, *x[3:])[0].sum()

    with pytest.raises(NotImplementedError, match="^v: .*got one that they do"):
        torch.compile(lambda v: torch.func.jvp(loss, (v,), (v,))[1], backend="eager")(x[2])
    torch.compiler.reset()  # PyTorch remembers where the graph broke
    with pytest.raises(RuntimeError, match="got one that they do|setup_context"):  # our words, or PyTorch's
        torch.compile(torch.func.grad(loss), backend="eager")(x[2])
    torch.compiler.reset()
    if form == "triton_recurrent":
        with pytest.raises(NotImplementedError, match="^gla_step: .* forward only"):
            torch.compile(loss, backend="eager")(x[2].requires_grad_()).backward()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_true_is_no_scale(mechanism):
    """It is equal to 1.0, of which a program is remembered."""
    x, form = tokens(mechanism, B=1, H=1, T=3), FORMS[mechanism]["triton"]
    form(*x, scale=1.0)
    with pytest.raises(TypeError, match="^scale: expected a finite number"):
        form(*x, scale=True)


@pytest.mark.parametrize("name", STEPS)
def test_decoding_refuses_gradients_in_every_call(name):
    step, x = STEPS[name], named_tokens(name, T=1)
    step(**x)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="^v: expected a tensor that needs no gradient.*forward only"):
        step(**x)
    with torch.no_grad():
        step(**x)


@gpu
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_autocast(mechanism):
    """Tokens that autocast has made 16-bit, gates that it has left in float32; backward outside of it."""
    x = tokens(mechanism, T=100, K=64, V=64)
    weights = [torch.randn(64, 64, device=HERE).mul_(0.125).requires_grad_() for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16):
        q, k, v = (y @ w for y, w in zip(x, weights, strict=False))
        o, _ = FORMS[mechanism]["triton"](q, k, v, *x[3:])
    assert q.dtype == o.dtype == torch.bfloat16
    grads = torch.autograd.grad(o.float().square().sum(), weights)
    assert all(d.dtype == torch.float32 and d.isfinite().all() and d.any() for d in grads)


@gpu
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_streams(mechanism):
    """A call launches on the stream that is current, and its backward pass on the same."""
    x = tokens(mechanism, T=4096, K=64, V=64, dtype=torch.bfloat16)
    right, side = both(mechanism, x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # on another stream the kernels would be done before this
        y = [z.clone() for z in x]
        found = both(mechanism, y)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@gpu
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_graphs_with_gradients(mechanism):
    """Captured once, replayed on other values."""
    x = [tokens(mechanism, T=130, K=64, V=64, dtype=torch.bfloat16, seed=i) for i in range(2)]
    right = both(mechanism, x[1])
    held = [y.clone().requires_grad_() for y in x[0]]
    form, stream = FORMS[mechanism]["triton"], torch.cuda.Stream()

    def work():
        o, _ = form(*held)
        return [o, *torch.autograd.grad(o.square().sum(), held)]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    with torch.no_grad():
        for y, z in zip(held, x[1], strict=True):
            y.copy_(z)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_several_gpus_in_turn(mechanism):
    """Whatever device is current."""
    x = tokens(mechanism, T=130, K=64, V=64, dtype=torch.bfloat16)
    right = both(mechanism, x)
    for device in (1, 0, 1):
        found = both(mechanism, [y.to(f"cuda:{device}") for y in x])
        assert all(y.device.index == device for y in found)
        assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(found, right, strict=True))


@gpu
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_new_length_compiles_nothing(mechanism, monkeypatch):
    """Whatever it is modulo 16; also backward."""
    both(mechanism, tokens(mechanism, T=64, K=64, V=64, dtype=torch.bfloat16))
    both(mechanism, tokens(mechanism, T=3000, K=64, V=64, dtype=torch.bfloat16))
    known = len(program.COMPILED)
    # attention of a single query is compiled apart: decoding with a cache
    for T in (1,) * (mechanism != "softmax_attention") + (65, 80, 100, 127, 3001, 3008):
        both(mechanism, tokens(mechanism, T=T, K=64, V=64, dtype=torch.bfloat16))
    assert len(program.COMPILED) == known


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_tiles_of_other_classes(mechanism, name, dtype, monkeypatch):
    """Plans for other GPUs are right on this one: tiles, pointers in place of descriptors, paths."""
    monkeypatch.setattr(program, "hardware_of", lambda device: CLASSES[name])
    for planned in (PLANNED[mechanism].forward, PLANNED[mechanism].backward):
        monkeypatch.setattr(planned, "programs", {})
    state = mechanism != "softmax_attention"
    for T, K, V, gate in ((150, 128, 128, kit.Case.gate), (90, 60, 64, "many resets")):
        case, form = kit.Case(B=1, T=T, H=2, K=K, V=V, gate=gate, state=state), FORMS[mechanism]["triton"]
        kit.kernel(mechanism, form, device="cuda", dtype=dtype, only=case).raise_if_failed()


@gpu
def test_other_addresses_than_a_descriptor_was_made_for(monkeypatch):
    """More tensors than addresses are kept, each read where it is."""
    monkeypatch.setattr(program, "ADDRESSES", 3)
    x = [tokens("gla", T=70, K=64, V=64, dtype=torch.bfloat16, seed=i) for i in range(8)]
    for _ in range(2):
        found = [both("gla", y) for y in x]
    for y, z in zip(x, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(both("gla", [t.clone() for t in y]), z, strict=True))


@gpu
def test_a_profiler_sees_the_launches():
    """Triton's hooks are called, although launches take a shorter way without them."""
    import triton

    x, names = tokens("gla", T=70, K=64, V=64, dtype=torch.bfloat16), []
    both("gla", x)
    hooks = triton.knobs.runtime.launch_enter_hook

    def hook(metadata):
        names.append(metadata.get()["name"])

    hooks.add(hook)
    try:
        both("gla", x)
    finally:
        hooks.remove(hook)
    assert {"walk", "mend"} <= set(names) and len({"gradients", "unwind"} & set(names)) == 1  # portable, or Hopper's
