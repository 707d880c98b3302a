"""The pages against the float64 recurrence, interpreted here, compiled on a GPU; and what they refuse."""

import ast
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from cases import F64, LADDER, error, in_process, inputs, tensors_in, thin
from harness import CUDA, HERE, allowed, anywhere, budgets, compare

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
from problems import problem

from gla_ref._commands.page import run
from gla_ref.check import oracle
from gla_ref.pages import (
    first,
    flash_attention,
    gated_delta_rule,
    gla,
    gla_gradient,
    gla_levels,
    gla_step,
    kda,
    linear_attention,
    linear_attention_segments,
)

FILES = sorted(Path(gla.__file__).parent.glob("[!_]*.py"))
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LIMITS = {F32: (-4.0, 16), BF16: (-80.0, 64)}  # nats of a mild chunk, tokens of a chunk

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")]
# B, T, H, K, V and dtype; the interpreter gets products of bfloat16 wrong
SIZES = [
    ((1, 1, 1, 16, 16), F32),
    ((2, 35, 3, 16, 32), F32),
    ((1, 33, 2, 128, 16), F32),
    *(
        pytest.param(size, dtype, marks=on_gpu)
        for size in [(2, 1, 3, 64, 128), (3, 150, 2, 128, 64), (2, 77, 3, 16, 32), (1, 256, 2, 128, 128)]
        for dtype in (F32, BF16)
    ),
]
sizes = pytest.mark.parametrize("size, dtype", SIZES, ids=str)


def mild(kind: str, dtype, C=None) -> str:
    """The gates of a rung; "edge" is just inside of what a chunk may decay by."""
    limit, tokens = LIMITS[dtype]
    return str(limit / (C or tokens) * (1 - 1 / 128)) if kind == "edge" else kind


def tensors(size, dtype, kind="logsigmoid/16", seed=0):
    """q, k, v, g and do, as a page is given them."""
    (q, k, v, g), _ = inputs("gla", *size, kind=kind, seed=seed)
    do = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return [x.to(HERE, dtype) for x in (q, k, v, g, do)]


def judged(x):
    """{quantity: (exact, budget)} without states, by the worst of the emulated runs.

    In a single chunk S is k' v e^r, and the two exponentials err most; in several the decays of S err as much.
    """
    q, k, v, g, do = (y.cpu().double() for y in x)
    S = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=F64)
    wide = {"q": q, "k": k, "v": v, "g": g, "g_v": None, "S": S, "do": do, "dS": S}
    given = dict.fromkeys(wide, x[0].dtype) | {"S": F32, "dS": F32}
    return budgets("gla", wide, given, options={"halves": True} if q.shape[1] <= LIMITS[F32][1] else None)[1]


def named(results):
    names = ("o", "S") if len(results) == 2 else ("dq", "dk", "dv", "dg")
    return dict(zip(names, results, strict=True))


@anywhere
@sizes
@pytest.mark.parametrize("kind", ["logsigmoid/16", "edge"])
def test_gla_and_its_gradient(size, dtype, kind):
    x = tensors(size, dtype, mild(kind, dtype))
    compare(named(gla.gla(*x[:4])) | named(gla_gradient.gla_gradient(*x)), judged(x))


@anywhere
@sizes
def test_gla_levels(size, dtype):
    *x, do = tensors(size, dtype, "mild and strong chunks")
    compare(named(gla_levels.gla(*x)), judged([*x, do]))


@anywhere
@pytest.mark.parametrize("kind", LADDER)
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=on_gpu)], ids=str)
def test_gate_ladder(kind, dtype):
    *x, do = tensors((1, 150 if CUDA else 37, 1, 32, 16), dtype, kind)
    compare(named(gla_levels.gla(*x)), judged([*x, do]))


@anywhere
@sizes
@pytest.mark.parametrize("segment", [None, 1, 2])
def test_linear_attention(size, dtype, segment):
    q, k, v, _, do = tensors(size, dtype)
    chosen = {"segment": 2 * LIMITS[dtype][1]} if segment == 2 else {}
    page = linear_attention_segments if segment else linear_attention
    compare(named(page.linear_attention(q, k, v, **chosen)), judged([q, k, v, torch.zeros_like(q), do]))


@anywhere
@pytest.mark.parametrize("page", [flash_attention.flash_attention, first.attend])
@pytest.mark.parametrize(
    "size, dtype", [*SIZES, ((2, 35, 3, 16, 32), F16), pytest.param((1, 64, 2, 128, 64), F16, marks=on_gpu)], ids=str
)
def test_softmax_attention(page, size, dtype):
    x = dict(zip("qkv", tensors(size, dtype)[:3], strict=True))
    if page is first.attend and size[1] > 64:
        with pytest.raises(ValueError, match="T <= 64"):
            page(**x)
        return
    o = page(**x)
    right, runs = oracle.exact("softmax_attention", x), oracle.emulated("softmax_attention", x, copies=4)
    e, budget = oracle.judge("softmax_attention", {"o": o}, right, runs)["o"]
    assert e <= budget, f"{e:.2g} > {budget:.2g}"


@anywhere
@pytest.mark.parametrize("dtype", [F32, F16, pytest.param(BF16, marks=on_gpu)], ids=str)
@pytest.mark.parametrize("kind", ["logsigmoid/16", "-1e3", "many resets"])
def test_gla_step(kind, dtype):
    """Token by token, of tensors whose tokens are strides apart."""
    (q, k, v, g), more = inputs("gla", 2, 3, 3, 32, 64, kind=kind)
    x, S = [y.to(HERE, dtype) for y in (q, k, v, g)], more["initial_state"].to(HERE, F32)
    given = dict(zip("qkvgS", (*x, S), strict=True))
    _, right = budgets("gla", given, {n: y.dtype for n, y in given.items()}, products=F32)
    before, start, o = S.clone(), S, []
    for t in range(3):
        o_t, S = gla_step.gla_step(*(y[:, t] for y in x), S)
        o.append(o_t)
    assert torch.equal(before, start)
    compare({"o": torch.stack(o, 1), "S": S}, right)


@anywhere
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_vectors_and_rows(dtype):
    x, y = torch.randn(2, 3, 700, generator=torch.Generator().manual_seed(0)).to(HERE, dtype)
    assert torch.equal(first.add(x, y), x + y)
    rows = x[:, :77]  # a stride of 700
    for x in (rows, 100 * rows, torch.full_like(rows[:, :1], -50.0)):
        exact, low = x.double().softmax(1), x.float().softmax(1).to(dtype)
        assert error(first.softmax_rows(x), exact) <= allowed(low, exact)


RULES = [("many resets", 0.99, 1.0), ("logsigmoid/16", 0.0, None), ("resets at chunk ends", 1.0, 2.0)]
WIDE = [pytest.param((2, 200, 2, D, 128), BF16, marks=on_gpu) for D in (64, 128)]


@anywhere
@pytest.mark.parametrize("size, dtype", [((1, 70, 1, 16, 32), F32), *WIDE])
@pytest.mark.parametrize("kind, correlation, strength", thin(RULES, RULES[0]))
def test_gated_delta_rule(size, dtype, kind, correlation, strength):
    """In chunks of 64 or 32 tokens, two value heads to a key head."""
    options = {"kind": kind, "correlation": correlation, "strength": strength, "dtype": dtype, "S": 0.0}
    x, right = problem("gated_delta_rule", *size, **options)
    found = gated_delta_rule.gated_delta_rule(*(x[n] for n in ("q", "k", "v", "g", "beta")))
    compare(named(found), right)


@anywhere
@pytest.mark.parametrize("size, dtype", [((1, 70, 2, 16, 32), F32), *WIDE])
@pytest.mark.parametrize("kind, correlation, strength", [("logsigmoid/16", 0.99, 1.0), ("edge", 0.0, None)])
def test_kda(size, dtype, kind, correlation, strength):
    """Two value heads to a key head; at the edge all channels of all blocks of 16 tokens are just mild."""
    options = {"kind": mild(kind, dtype, 16), "correlation": correlation, "strength": strength, "dtype": dtype}
    x, right = problem("kda", *size, **options, S=0.0)
    compare(named(kda.kda(*(x[n] for n in ("q", "k", "v", "g", "beta")))), right)


@anywhere
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # minus infinity minus itself
@pytest.mark.parametrize("gate", [1.01, float("inf")])
@pytest.mark.parametrize("dtype, C", [(F32, 32), pytest.param(BF16, 64, marks=on_gpu)], ids=str)
def test_a_strong_block_of_kda_is_marked(dtype, C, gate):
    """One channel of one value head, in the second of three chunks."""
    options = {"kind": "logsigmoid/16", "correlation": 0.0, "dtype": dtype, "S": 0.0}
    x, right = problem("kda", 1, 2 * C + 3, 1, 16, 16, **options)
    x["g"][0, C + 5, 1, 7] = gate * LIMITS[dtype][0]
    o, S = kda.kda(*(x[n] for n in ("q", "k", "v", "g", "beta")))
    assert o[:, C:, 1].isnan().all() and S[:, 1].isnan().all()
    compare({"o": o}, right, (slice(None), slice(0, C)))
    compare({"o": o}, right, (slice(None), slice(None), 0))
    compare({"S": S}, right, (slice(None), 0))


def strong_chunk(dtype):
    """One channel of one head is beyond the limit in the second of three chunks: (tensors, chunk, head, channel)."""
    limit, C = LIMITS[dtype]
    x = tensors((1, 2 * C + 3, 2, 16, 16), dtype)
    x[3][0, C + 5, 1, 7] = 1.01 * limit
    return x, slice(C, 2 * C), 1, 7


strong_dtypes = pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=on_gpu)], ids=str)


@anywhere
@strong_dtypes
def test_a_strong_chunk_is_marked(dtype):
    x, chunk, h, channel = strong_chunk(dtype)
    right, (o, S) = judged(x), gla.gla(*x[:4])
    assert o[:, chunk.start :, h].isnan().all() and S[:, h, channel].isnan().all()
    compare({"o": o}, right, (slice(None), slice(0, chunk.start)))
    others = [i for i in range(x[0].shape[-1]) if i != channel]
    compare({"o": o}, right, (slice(None), slice(None), 0))
    compare({"S": S}, right, (slice(None), slice(None), others))


@anywhere
@strong_dtypes
def test_gradients_of_a_strong_chunk_are_marked(dtype):
    x, chunk, h, channel = strong_chunk(dtype)
    right, d = judged(x), named(gla_gradient.gla_gradient(*x))
    every, early, late = slice(None), slice(0, chunk.start), slice(chunk.stop, None)
    assert d["dq"][:, chunk.start :, h, channel].isnan().all()
    assert d["dk"][:, : chunk.stop, h, channel].isnan().all()
    assert d["dg"][:, :, h, channel].isnan().all() and d["dv"][:, : chunk.stop, h].isnan().all()
    others = [i for i in range(x[0].shape[-1]) if i != channel]
    for name in ("dq", "dk", "dg"):
        compare({name: d[name]}, right, (every, every, every, others))
    compare({"dv": d["dv"]}, right, (every, every, 0))
    compare({"dq": d["dq"]}, right, (every, early))
    compare({"dk": d["dk"], "dv": d["dv"]}, right, (every, late))


CALLS = {  # page: (its function, the tensors that it is given)
    "flash_attention": (flash_attention.flash_attention, "q k v"),
    "linear_attention": (linear_attention.linear_attention, "q k v"),
    "linear_attention_segments": (linear_attention_segments.linear_attention, "q k v"),
    "gla": (gla.gla, "q k v g"),
    "gla_levels": (gla_levels.gla, "q k v g"),
    "gla_gradient": (gla_gradient.gla_gradient, "q k v g do"),
    "gla_step": (gla_step.gla_step, "q k v g S"),
    "gated_delta_rule": (gated_delta_rule.gated_delta_rule, "q k v g beta"),
    "kda": (kda.kda, "q k v g beta"),
    "attend": (first.attend, "q k v"),
    "add": (first.add, "x y"),
    "softmax_rows": (first.softmax_rows, "x"),
}
HEADS = [page for page, (_, names) in CALLS.items() if "q" in names]


def arguments(page):
    """Small tensors that a page takes, by name."""
    x = dict(zip(("q", "k", "v", "g", "do"), tensors((1, 19, 2, 16, 32), F32, "-0.01"), strict=True))
    if page == "gla_step":
        x = {n: y[:, 0].contiguous() for n, y in x.items()}
    if page == "gated_delta_rule":
        x["g"] = x["g"][..., 0].contiguous()
    x["beta"] = torch.full((1, 19, 2), 0.5, device=HERE)
    x["S"] = torch.ones(1, 2, 16, 32, device=HERE)
    x |= dict.fromkeys("xy", torch.arange(70.0, device=HERE).view(7, 10) / 70)
    return {n: x[n] for n in CALLS[page][1].split()}


@anywhere
@pytest.mark.parametrize("page", CALLS)
def test_all_is_written_and_runs_are_equal(page, request):
    function, x = CALLS[page][0], arguments(page)
    expected = tensors_in(function(**x))
    request.getfixturevalue("poisoned")
    for a, b in zip(tensors_in(function(**x)), expected, strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b)


def refused(page, kind, message, **changed):
    function, x = CALLS[page][0], arguments(page)
    with pytest.raises(kind, match=message):
        function(**(x | changed))


def turned(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@anywhere
@pytest.mark.parametrize("page", CALLS)
def test_tensors_that_are_refused(page):
    for name, x in arguments(page).items():
        alone = name in ("q", "x")  # the others are held against it
        if not alone:
            refused(page, ValueError, rf"^{name}: expected .*got \(", **{name: torch.cat([x, x])})
            if name != "S":
                refused(page, ValueError, f"^{name}: expected .*got meta", **{name: x.to("meta")})
        dtype = "torch.int64" if alone or page == "gla_step" else "torch.float64"
        wrong = x.long() if dtype == "torch.int64" else x.double()
        refused(page, TypeError, f"^{name}: expected .*got {dtype}", **{name: wrong})
        refused(page, ValueError, f"^{name}: expected .*(strides|N <= 8192)", **{name: turned(x)})
        grad = x.clone().requires_grad_()
        refused(page, ValueError, f"^{name}: expected no gradient", **{name: grad})
    with torch.no_grad():
        CALLS[page][0](**(arguments(page) | {name: grad}))


@anywhere
@pytest.mark.parametrize("page", HEADS)
def test_sizes_that_are_refused(page):
    x = arguments(page)
    refused(page, ValueError, r"^q, v: expected \[B, .*got \(", q=x["q"][0])
    refused(page, ValueError, r"^q, v: expected \[B, .*got \(", v=x["v"][0])
    narrow = {n: x[n][..., :12].contiguous() for n in "qkg" if n in x}
    narrow |= {"S": x["S"][:, :, :12].contiguous()} if "S" in x else {}
    refused(page, ValueError, "^q: expected .*16, 32, 64.*12", **narrow)
    refused(page, ValueError, "^q: expected", **{n: y[:0] for n, y in x.items()})
    if x["q"].ndim == 4:
        refused(page, ValueError, "^q: expected", **{n: y[:, :0] for n, y in x.items()})


@anywhere
@pytest.mark.parametrize("page", [page for page in HEADS if page not in ("gla_step", "attend")])
def test_addresses_that_the_copy_engine_cannot_take(page):
    k = arguments(page)["k"]
    odd = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape)
    refused(page, ValueError, "^k: expected contiguous, 16-byte aligned, got strides", k=odd)


@anywhere
def test_options_that_are_refused():
    for scale in (0.0, -1.0, float("nan")):
        refused("flash_attention", ValueError, "^scale: expected more than 0, got", scale=scale)
    for n in (-16, 0, 17):
        message = f"^segment: expected a multiple of 16 tokens, got {n}"
        refused("linear_attention_segments", ValueError, message, segment=n)
    x = torch.zeros(1, 8193, device=HERE)
    refused("softmax_rows", ValueError, r"^x: expected \[rows, N <= 8192\]", x=x)
    refused("softmax_rows", ValueError, r"^x: expected \[rows, N <= 8192\]", x=x[0])
    refused("softmax_rows", ValueError, "^x: expected .*not empty", x=x[:, :0])


@pytest.mark.skipif(CUDA, reason="on a CPU, which needs the interpreter")
@pytest.mark.parametrize("page", CALLS)
def test_a_cpu_is_refused_without_the_interpreter(page, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    refused(page, ValueError, "^[qx]: expected all tensors on one GPU, got cpu")


@anywhere
def test_scale():
    """It has any sign but for softmax, and is K^-0.5 unless given."""
    q, k, v, g, do = tensors((1, 19, 1, 16, 16), F32, "-0.01")
    for page, x in (("gla", (q, k, v, g)), ("gla_levels", (q, k, v, g)), ("linear_attention", (q, k, v))):
        function = CALLS[page][0]
        assert torch.equal(function(*x)[0], function(*x, scale=0.25)[0])
        assert torch.equal(function(*x, scale=-0.5)[0], -2 * function(*x)[0])
    x = q, k, v, g, do
    assert torch.equal(gla_gradient.gla_gradient(*x, -0.5)[0], -2 * gla_gradient.gla_gradient(*x)[0])


# lines of pages whose warps have roles
LONGER = {"gla_hopper": 220, "gated_delta_rule_hopper": 320}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_is_a_page(file):
    """About a hundred lines, blank ones not counted, and nothing imported but PyTorch and Triton.

    Warps that meet at barriers need more words: why nobody waits for ever is part of the kernel. The last lines, which
    run the page by itself, do not count.
    """
    text, last = file.read_text().split('\n\nif __name__ == "__main__":')
    assert f"python -m gla_ref.pages.{file.stem}:" in last
    assert sum(bool(line.strip()) for line in text.splitlines()) <= LONGER.get(file.stem, 140)
    nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Import | ast.ImportFrom)]
    modules = [x.module if isinstance(x, ast.ImportFrom) else y.name for x in nodes for y in x.names]
    assert {name.split(".")[0] for name in modules} <= {"torch", "triton"}


@pytest.mark.skipif(CUDA, reason="about a host without a GPU")
@pytest.mark.parametrize("name", thin([file.stem for file in FILES], "gla", "gla_hopper"))
def test_a_page_runs_by_itself(name, monkeypatch, capsys):
    """In a process that asks Triton to interpret before it imports it. Hopper's ask for their GPU."""

    def program():
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(Path(gla.__file__).with_stem(name)), run_name="__main__")
        return ended.value.code

    if name.endswith("_hopper"):
        assert "expected a GPU of compute capability 9.0" in program()
        return
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        patch.setattr(os, "execve", lambda *command: sys.exit(command))
        python, command, environment = program()
    assert python == command[0] == sys.executable and environment["TRITON_INTERPRET"] == "1"
    assert program() == 0
    *errors, last = capsys.readouterr().out.splitlines()
    assert errors and all("of its budget" in line for line in errors) and "interpreted" in last
    if name == "first":
        assert [line.split()[0] for line in errors] == ["o", "add", "softmax_rows"]


@pytest.mark.deep
def test_a_page_is_a_program():
    """On a GPU it says how long it took; without one, that it was interpreted."""
    said = in_process("-m", "gla_ref.pages.gla")
    assert (" ms at B = " if CUDA else "interpreted") in said


def test_a_wrong_page_says_so(capsys):
    code, made = "def page(q, k, v, g):\n    o, S = right(q, k, v, g)\n    return o, 1.01 * S", {"right": gla.gla}
    exec(compile(code, "gla.py", "exec"), made)
    with pytest.raises(SystemExit) as ended:
        run(made["page"])
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and "WRONG" in said[1] and "WRONG" not in said[0]
