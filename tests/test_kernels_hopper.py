"""The Hopper kernel of GLA: what it takes and refuses, anywhere; that it is right, on a Hopper GPU (pytest -m gpu)."""

import threading
from functools import partial

import pytest
import torch
from cases import LADDER, error
from harness import CUDA, compare, results
from test_kernels_linear import problem, tokens

from gla_ref import FORMS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels import explain, plan  # noqa: E402
from gla_ref.kernels.gla import gla  # noqa: E402
from gla_ref.kernels.hopper import _gluon  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [BF16, F16]
MILD, PATHS = "logsigmoid/16", ("fused", "segmented")
hopper = FORMS["gla"]["triton_hopper"]


def on_hopper(test):
    """Of a GPU of compute capability 9.0."""
    here = CUDA and torch.cuda.get_device_capability() == (9, 0)
    return pytest.mark.gpu(pytest.mark.skipif(not here, reason="needs a Hopper GPU")(test))


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def check(*sizes, path=None, ends=None, scale=None, **kw):
    """Forward, and all gradients of it, within the budgets of the portable kernel."""
    ends = ends and tuple(ends)
    x, judged = problem("gla", *sizes, ends=ends, scale=scale, **kw)
    compare(results(hopper, x, ends, path=path, scale=scale), judged)


# the plan

ON_HOPPER = partial(plan, "gla", hardware="sm_90")
gluon = pytest.mark.skipif(_gluon.missing() is not None, reason=f"this Triton has no {_gluon.missing()}")


@gluon
def test_the_plan_takes_it_where_it_can():
    q, v = meta(2, 300, 3, 128), meta(2, 300, 3, 512)
    found = ON_HOPPER(q, q, v, q)
    walk, mend = found.launches
    assert (found.name, walk.name, mend.name) == ("hopper", "walk", "mend")
    assert walk.grid == (4 * 3 * 2,) and "Gluon" in found.why[0]
    assert ON_HOPPER(q, q, v, q, kernel="portable").name == "portable"


REFUSED = [
    ("K of at most 128, not 192", lambda q: ((q := meta(2, 300, 3, 192)), q, q, q), {}),
    ("q is torch.float32", lambda q: (q.float(), q.float(), q.float(), q), {}),
    ("no gates on values", lambda q: (q, q, q, q), {"g_v": meta(2, 300, 3, 64)}),
    ("k of shape .* is not one that the copy engine reads", lambda q: (q, q.mT.contiguous().mT, q, q), {}),
]


@gluon
@pytest.mark.parametrize("message, given, options", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_it_does_not_take_is_named(message, given, options):
    """By the error of who asked for it, and by the portable plan's first reason."""
    x = given(meta(2, 300, 3, 64))
    found = ON_HOPPER(*x, **options)
    assert found.name == "portable"
    with pytest.raises(ValueError, match=f"^kernel: .*{message}"):
        ON_HOPPER(*x, kernel="hopper", **options)


def test_other_gpus_and_other_tritons_are_told_why(monkeypatch):
    q = meta(2, 300, 3, 64)
    assert "the Hopper kernel is for sm_90, not sm_80" in explain("gla", q, q, q, q, hardware="sm_80")
    monkeypatch.setattr("gla_ref.kernels.hopper.missing", lambda: "gluon.something")
    found = ON_HOPPER(q, q, q, q)
    assert found.name == "portable" and "no gluon.something" in found.why[0]


@gluon
def test_states_of_segments_are_handed_on_only_if_the_gradient_cuts_alike():
    """It is the portable kernel's, which has twice as many programs here."""
    narrow, wide = meta(1, 65536, 4, 64), meta(1, 65536, 4, 128)
    *_, starts = ON_HOPPER(*[narrow] * 4).outputs
    assert starts is not None
    *_, starts = ON_HOPPER(*[wide] * 4).outputs
    assert starts is None
    assert plan("gla", *[wide] * 4, direction="backward", hardware="sm_90").name == "portable"


# on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129, 257, 1000])
def test_lengths(dtype, T):
    for n, path in enumerate(PATHS):
        check(2, T, 3, (64, 128)[n], 104 if n else 64, dtype=dtype, path=path)
    check(2, T, 3, 128, 128, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("V", [16, 64, 72, 128, 512])
@pytest.mark.parametrize("K", [16, 64, 72, 128])
def test_sizes(K, V, dtype):
    check(2, 193, 3, K, V, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", LADDER)
def test_the_gate_ladder(kind, dtype):
    check(2, 200, 3, 64, 104, kind=kind, dtype=dtype)
    check(2, 200, 3, 128, 128, kind=kind, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("kind", [MILD, "many resets"])
def test_packed(kind, path, dtype):
    options = {"dtype": dtype, "path": path, "kind": kind, "ends": [0, 0, 33, 33, 40, 300, 941, 1100, 1100]}
    check(1, 1100, 2, 64, 128, **options)
    check(1, 1100, 2, 128, 64, **options)


@on_hopper
def test_a_packed_sequence_does_not_see_its_neighbours():
    """Not even where they hold NaN."""
    x, _ = problem("gla", 1, 200, 2, 64, 64, dtype=BF16)
    x = [y.clone() for y in tokens(x)]
    for y in x:
        y[:, 70:130] = float("nan")
    cu = torch.tensor([0, 70, 130, 200], device="cuda", dtype=torch.int32)
    o, S = hopper(*x, cu_seqlens=cu)
    for a, b, n in ((0, 70, 0), (130, 200, 2)):
        one, state = hopper(*(y[:, a:b].contiguous() for y in x))
        assert torch.equal(o[:, a:b], one) and torch.equal(S[n], state[0])


@on_hopper
@pytest.mark.parametrize("dtype, gates", [(BF16, F16), (F16, BF16), (BF16, F32), (F16, F32)], ids=str)
@pytest.mark.parametrize("kind", [MILD, "many resets", "-20"])
def test_gates_in_other_precisions(kind, dtype, gates):
    check(2, 200, 3, 128, 128, kind=kind, dtype=dtype, gates=gates)
    check(2, 200, 3, 64, 64, kind=kind, dtype=dtype, gates=gates)
    check(1, 300, 2, 64, 128, kind=kind, dtype=dtype, gates=gates, ends=[0, 33, 33, 200, 300])


@on_hopper
@pytest.mark.parametrize("path", PATHS)
def test_split_and_carry(path):
    x, judged = problem("gla", 2, 300, 2, 128, 64, kind="mild and strong chunks", dtype=BF16)
    every = slice(None)
    for a in (1, 64, 150):
        first, S = hopper(*tokens(x, every, slice(a)), initial_state=x["S"], path=path)
        second, S = hopper(*tokens(x, every, slice(a, None)), initial_state=S, path=path)
        compare({"o": torch.cat([first, second], 1), "S": S}, judged)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_strides_poison_and_equal_runs(dtype, poisoned):
    x, judged = problem("gla", 2, 300, 3, 64, 64, kind="mild and strong chunks", dtype=dtype)
    first, second = (hopper(*tokens(x), initial_state=x["S"]) for _ in range(2))
    compare(dict(zip(("o", "S"), first, strict=True)), judged)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "bitwise, from run to run"
    turned = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in tokens(x)]
    turned[1] = torch.cat([x["k"], x["q"]], -1)[..., : x["k"].shape[-1]]  # rows apart
    found = hopper(*turned, initial_state=x["S"])
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@on_hopper
def test_gradients_of_segments():
    """One head: cut into segments, whose states the backward pass makes again where it cuts otherwise."""
    check(1, 3000, 1, 128, 128, dtype=BF16)
    check(1, 3000, 1, 64, 64, dtype=BF16)


@on_hopper
@pytest.mark.parametrize("size", [(2, 1, 3, 64, 128), (3, 150, 2, 128, 64), (2, 257, 3, 64, 64), (1, 256, 2, 128, 128)])
@pytest.mark.parametrize("kind", [MILD, "zero", "-1"])
def test_the_page(size, kind):
    """Bit for bit what the kernel gives, which the tests above hold to the recurrence: the same steps."""
    from gla_ref.pages import gla_hopper

    x, _ = problem("gla", *size, kind=kind, dtype=BF16)
    found, right = gla_hopper.gla(*tokens(x)), hopper(*tokens(x))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@on_hopper
def test_the_page_marks_what_it_leaves_out():
    """Beyond the mild limit o is NaN from that chunk on, and nowhere before."""
    from gla_ref.pages import gla_hopper

    x, _ = problem("gla", 1, 300, 2, 64, 64, dtype=BF16)
    q, k, v, g = (y.clone() for y in tokens(x))
    g[:, 130, 1, 3] = -torch.inf
    o, S = gla_hopper.gla(q, k, v, g)
    assert o[:, 128:, 1].isnan().all() and S[:, 1, 3].isnan().all()
    assert o[:, :128].isfinite().all() and o[:, :, 0].isfinite().all() and S[:, 0].isfinite().all()


@gluon
@pytest.mark.skipif(CUDA, reason="on a CPU")
def test_the_page_needs_a_hopper_gpu():
    from gla_ref.pages import gla_hopper

    x = [torch.zeros(1, 3, 1, 64, dtype=BF16)] * 4
    with pytest.raises(ValueError, match="^q: expected a tensor on a GPU of compute capability 9.0, got one on cpu"):
        gla_hopper.gla(*x)
    with pytest.raises(TypeError, match="^q: expected bfloat16, got torch.float32"):
        gla_hopper.gla(x[0].float(), *x[1:])


@on_hopper
def test_float16_of_large_scores_and_states():
    check(1, 200, 2, 64, 64, kind="mild and strong chunks", dtype=F16, large=1e6, scale=1e-3)


@on_hopper
def test_threads_streams_and_graphs():
    x, _ = problem("gla", 2, 1000, 4, 128, 128, dtype=BF16)
    x = tokens(x)
    right, found = hopper(*x), [None] * 4

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found[i] = hopper(*x)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(hopper(*x))
    graph.replay()
    torch.cuda.synchronize()
    for o, S in found:
        assert torch.equal(o, right[0]) and torch.equal(S, right[1])


@on_hopper
def test_more_than_2_to_the_31_elements():
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=BF16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    o, S = gla(q, q, q, torch.zeros_like(q), scale=1.0, path="fused", kernel="hopper")
    x = tail.double()
    # an absolute band in units of the result: bf16 rounds the scores and o, float32 sums 64 products
    assert error(o[0, -64:, -1], (x @ x.mT).tril() @ x) < 0.05
    assert error(S[0, -1], x.mT @ x) < 1e-4
    assert not o[0, :-64].any()
