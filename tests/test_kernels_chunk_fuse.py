"""The four kernels of the original GLA: the whole against the recurrence, where it drifts, and where it breaks."""

import importlib
import math

import numpy as np
import pytest
import torch
from cases import F64, LADDER, error, gate, inputs, thin
from harness import CUDA, EVERY_DTYPE, HERE, anywhere, interpreted
from torch.utils.flop_counter import FlopCounterMode

from gla_ref import gates, gla, prefix_sum
from gla_ref import gla_chunk_fuse as reference
from gla_ref.kernels.exhibits.reference import combine, steps

pytest.importorskip("triton", reason="Triton exists for Linux only")

from gla_ref.kernels.exhibits import gla_chunk_fuse as kernels
from gla_ref.kernels.exhibits.gla_chunk_fuse import decay_cumsum, gla_chunk_fuse
from gla_ref.rounding import budget

RESETS = ("-inf", "resets at chunk ends", "many resets")
FINITE = [kind for kind in LADDER if kind not in RESETS]


def test_the_reference_has_its_public_name():
    assert importlib.import_module("gla_ref.gla_chunk_fuse") is reference


def given(B, T, H, K, V, dtype=torch.float32, kind="logsigmoid/16", seed=0):
    """q, k, v, g in float64 but exact in dtype (gates in float32), an initial state, and the same for the kernels."""
    args, named = inputs("gla", B, T, H, K, V, kind=kind, seed=seed)
    low = [x.to(HERE, dtype) for x in args[:3]]
    low += [args[3].to(HERE, torch.float32), named["initial_state"].to(HERE, torch.float32)]
    return [x.to(F64) for x in low], low


# where it drifts and where it breaks


def emulated(args, C, dtype):
    """The steps in float32 with the operands of products rounded to dtype, by two orders of the running sums.

    Both differ from the kernels in nothing but the order of additions: their error is the algorithm's. A state takes
    its writes a chunk at a time, or as a GPU adds them: one token after the other in float32, else 16 at a time, and
    what the sum's last bit cannot hold is cut off.
    """
    q, k, v, g, S = (x.float() for x in args)
    scale = q.shape[-1] ** -0.5
    for running_sum, on_gpu in ((torch.Tensor.cumsum, False), (in_a_tree, True)):
        n, cut = (1 if dtype == torch.float32 else 16, dtype != torch.float32) if on_gpu else (C, False)
        b = torch.cat([running_sum(g_n, 1) for g_n in g.split(C, 1)], 1) / math.log(2)
        q_g, k_g = (x.to(dtype).float() for x in reference.prepare_qg_kg(q, k, b, scale, C))
        o, S_n = [], S
        for parts in zip(*(x.split(C, 1) for x in (q_g, k_g, v, b)), strict=True):
            o.append(reference.fused_chunk_gla_fwd(*parts, S_n.to(dtype).float(), C)[0])
            S_n = parts[3][:, -1, :, :, None].exp2() * S_n
            for k_n, v_n in zip(*(x.split(n, 1) for x in parts[1:3]), strict=True):
                exact = S_n.double() + torch.einsum("bchk,bchv->bhkv", k_n.double(), v_n.double())
                S_n = exact.float()
                if cut:
                    S_n = torch.where(S_n.abs() > exact.abs(), S_n.nextafter(torch.zeros_like(S_n)), S_n)
        A = reference.fwd_inner_chunk(q, k, b, scale, C).to(dtype).float()
        yield combine(torch.cat(o, 1)[None], A[None], v).to(dtype), S_n


def in_a_tree(x, axis):
    add = prefix_sum.hillis_steele(lambda x, y: (x[0] + y[0],), (x.movedim(axis, 1),))[0]
    return add.movedim(1, axis)


def check(B, T, H, K, V, *, C=16, dtype=torch.float32, kind="logsigmoid/16"):
    """Within twice the larger error of the emulated runs, plus 4 eps."""
    args, low = given(B, T, H, K, V, dtype, kind)
    exact = gla.recurrent(*args[:4], initial_state=args[4])
    found = gla_chunk_fuse(*low[:4], initial_state=low[4], C=C)
    runs = list(emulated(args, C, dtype))
    for n, (x, y, result) in enumerate(zip(found, exact, (dtype, torch.float32), strict=True)):
        allowed = budget(max(error(run[n], y) for run in runs), result)
        assert error(x, y) <= allowed, (n, error(x, y), allowed)


SHAPES = [(1, 3, 5, 16), (70, 20, 36, 32), (65, 5, 20, 64)]
MORE_SHAPES = [(15, 5, 3, 16), (16, 20, 36, 16), (17, 80, 20, 16), (49, 7, 70, 16)]
LARGE = [(*size, C) for size in ((1000, 64, 64), (777, 100, 130), (513, 256, 512)) for C in (16, 32, 64)]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("kind", thin(["zero", "-1e-4", "logsigmoid/16"], "logsigmoid/16"))
@pytest.mark.parametrize("T, K, V, C", LARGE if CUDA else thin(SHAPES + MORE_SHAPES, *SHAPES))
def test_mild_gates(T, K, V, C, kind, dtype):
    check(1, T, 2, K, V, C=C, kind=kind, dtype=dtype)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("kind", thin(FINITE, "one strong channel"))
def test_finite_gates_drift_as_the_algorithm_does(kind, dtype):
    for C in (16, 64):
        check(1, 70, 2, 20, 9, C=C, dtype=dtype, kind=kind)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered")
@anywhere
@pytest.mark.parametrize("reset", [-torch.inf, -3e38])  # 3e38 / ln 2 is beyond float32
@pytest.mark.parametrize("t", [0, 5, 15])
def test_a_reset_makes_nan_from_its_token_on(t, reset):
    (q, k, v, g, S), low = given(1, 40, 1, 4, 3)
    low[3][0, 16 + t, 0, 2] = reset
    o, S_out = gla_chunk_fuse(*low[:4], initial_state=low[4])
    assert o[0, : 16 + t].isfinite().all() and o[0, 16 + t :].isnan().all()
    assert S_out[0, 0, 2].isnan().all() and S_out[0, 0, [0, 1, 3]].isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@anywhere
def test_float16_cannot_read_a_state_beyond_65504():
    """q_g has the inputs' dtype and so must the state that it multiplies: float16 overflows, though o would not."""
    T = 64
    k = torch.full((1, T, 1, 4), 64.0, device=HERE)
    q, v, g = k / 2**14, k, torch.zeros_like(k)
    for dtype, finite in ((torch.float16, False), (torch.bfloat16, True), (torch.float32, True)):
        if dtype == torch.bfloat16 and not CUDA:
            continue  # the interpreter's product is wrong
        o, S = gla_chunk_fuse(*(x.to(dtype) for x in (q, k, v, g)))
        exact, _ = gla.recurrent(*(x.double() for x in (q, k, v, g)))
        assert S.max() == T * 64**2 and exact.max() == T * 32
        assert o[0, :16].isfinite().all() and o.isfinite().all() == finite


# states, memory, contract


@anywhere
def test_strides_poison_and_equal_runs(poisoned):
    _, (*args, S0) = given(1, 20, 2, 70, 20)
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args]
    odd[0] = torch.stack([odd[0], odd[0]], -1)[..., 0]  # a last stride of 2
    S_odd = S0.mT.contiguous().mT
    before = [x.clone() for x in (*odd, S_odd)]
    first = gla_chunk_fuse(*args, initial_state=S0)
    assert all(x.isfinite().all() for x in first)
    for given_to in ((*args, S0), (*odd, S_odd)):
        again = gla_chunk_fuse(*given_to[:4], initial_state=given_to[4])
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, (*odd, S_odd), strict=True))


@anywhere
def test_wrong_input_is_named():
    _, (q, k, v, g, S) = given(2, 5, 1, 4, 3)
    for message, change in {
        "^k: expected dtype": {"k": k.half()},
        "^q: expected float32, float16 or bfloat16": dict(q=q.double(), k=k.double(), v=v.double()),
        "^g: expected 4 axes": {"g": g[..., 0]},
        "^C: expected 16, 32 or 64, got 8": {"C": 8},
        "^g_v: expected None": {"g_v": g[..., :3]},
        "^cu_seqlens: expected None": {"cu_seqlens": torch.tensor([0, 5])},
        "^initial_state: expected shape": {"initial_state": S[:1]},
        "^initial_state: .*forward only": {"initial_state": S.clone().requires_grad_()},
        "^v: .*forward only": {"v": v.clone().requires_grad_()},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            gla_chunk_fuse(**{"q": q, "k": k, "v": v, "g": g, **change})
    with torch.no_grad():
        gla_chunk_fuse(q, k, v.clone().requires_grad_(), g)
    for step, args in (("qg_kg", (q, k, g, 1.0)), ("read_states", (q, k, v, g)), ("inner_scores", (q, k, g, 1.0))):
        with pytest.raises(ValueError, match="^C: expected 16, 32 or 64, got 8"):
            getattr(kernels, step)(*args, C=8)


# costs


@interpreted
def test_grids_and_bytes_are_those_of_the_kernels(monkeypatch):
    """The interpreter's programs are counted, and what they load and store, element by element.

    Once as often as they ask, and once each element of memory that they ask for.
    """
    from triton.runtime import interpreter

    moved, once, grids, builder = [0], {}, [], interpreter.InterpreterBuilder

    def count(name, values):
        original = getattr(builder, name)

        def counted(self, ptrs, *args, **kwargs):
            mask, size = args[1] if values else args[0], ptrs.dtype.element_ty.primitive_bitwidth // 8
            moved[0] += int(mask.data.sum()) * size
            at, wanted = np.broadcast_arrays(ptrs.data, mask.data)
            once.update(dict.fromkeys(at[wanted.astype(bool)].tolist(), size))
            return original(self, ptrs, *args, **kwargs)

        monkeypatch.setattr(builder, name, counted)

    def watch(name, module):
        kernel = getattr(module, name)

        class Watched:
            def __getitem__(self, grid):
                def launch(*args, **kwargs):
                    moved[0] = 0
                    once.clear()
                    kernel[grid](*args, **kwargs)
                    grids.append((name, grid, moved[0], sum(once.values())))

                return launch

        monkeypatch.setattr(module, name, Watched())

    count("create_masked_load", values=False)
    count("create_masked_store", values=True)
    sizes = dict(B=1, T=37, H=2, K=80, V=70)
    expected = steps(**sizes, itemsize=4)[:4]
    for step in expected:
        watch(step.name, kernels)
    _, (*args, S) = given(**sizes)
    gla_chunk_fuse(*args, initial_state=S)
    assert sorted(grids) == sorted((s.name, s.grid, s.bytes, s.memory) for s in expected)


def test_flops_of_products():
    sizes = dict(B=2, T=32, H=3, K=5, V=7)
    (q, k, v, g, S), _ = given(**sizes)
    b = gates.chunk_cumsum(g, 16, base2=True)
    expected = {s.name: s.matmul_flops for s in steps(**sizes)}
    with FlopCounterMode(display=False) as counted:
        o, _ = reference.fused_chunk_gla_fwd(q, k, v, b, S, 16)
    assert counted.get_total_flops() == expected["fused_chunk_gla_fwd_kernel"]
    A = reference.fwd_inner_chunk(q, k, b, 1.0, 16)
    with FlopCounterMode(display=False) as counted:
        combine(o[None], A[None], v)
    assert counted.get_total_flops() == expected["combine"]


# the first kernel


def assert_within_rounding(b, g, C):
    """Band of a float32 sum of n <= C terms: n roundings of partial sums no larger than sum |g|, and the product."""
    exact = gates.chunk_cumsum(g.to(F64), C, base2=True)
    reset = exact == -torch.inf
    assert torch.equal(b == -torch.inf, reset.to(b.device))
    band = C * torch.finfo(torch.float32).eps * exact.abs()
    worst = (b.to(F64) - exact).abs() - band
    assert b.dtype == torch.float32 and (worst[~reset] <= 0).all(), worst[~reset].max()


@anywhere
@pytest.mark.parametrize("T", thin([1, 15, 16, 17, 37], 17))
@pytest.mark.parametrize("kind", LADDER)
def test_decay_cumsum_on_the_ladder(T, kind):
    g = gate(kind, 2, T, 3, 5).to(HERE, torch.float32)
    for C in (16, 5, 64):
        assert_within_rounding(decay_cumsum(g, C=C), g, C)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, C", [(63, 16), (257, 64), (1000, 16), (4097, 64), (4096, 256)])
def test_decay_cumsum_at_size(dtype, T, C):
    g = gate("logsigmoid/16", 4, T, 8, 128).to("cuda", dtype)
    assert_within_rounding(decay_cumsum(g, C=C), g, C)


@pytest.mark.gpu
def test_decay_cumsum_beyond_2_to_the_31_elements():
    g = torch.full((1, 1 << 17, 130, 128), -0.5, dtype=torch.float16, device="cuda")
    b = decay_cumsum(g)
    assert_within_rounding(b[:, -32:, -1:], g[:, -32:, -1:], 16)
    assert_within_rounding(b[:, :32, :1], g[:, :32, :1], 16)


def test_decay_cumsum_names_bad_arguments(monkeypatch):
    g = gate("-1", 1, 4, 2, 3).float().to(HERE)
    with pytest.raises(TypeError, match="^g: expected float32, float16 or bfloat16"):
        decay_cumsum(g.double())
    with pytest.raises(ValueError, match="^g: expected 4 axes"):
        decay_cumsum(g[0])
    with pytest.raises(ValueError, match="^g: .*requires_grad=True"):
        decay_cumsum(g.clone().requires_grad_())
    for C in (0, 257, 1.5):
        with pytest.raises(ValueError, match="^C: expected"):
            decay_cumsum(g, C=C)
    monkeypatch.setenv("GLA_REF_DEBUG", "1")
    with pytest.raises(ValueError, match="^g: log gates must lie in"):
        decay_cumsum(-g)


def test_cpu_tensors_are_refused_outside_the_interpreter(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="^g: expected a CUDA tensor, got one on cpu; .*TRITON_INTERPRET"):
        decay_cumsum(gate("-1", 1, 4, 2, 3).float())
