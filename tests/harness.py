"""Shared by the tests of kernels: where they run, and how results are held to the budgets of emulated runs.

Truth, emulated runs and the rule for budgets are the check kit's (`gla_ref.check.oracle`, `gla_ref.rounding`). The
worst of sixteen runs counts, which sum up every product in orders of their own (fewer, the larger the inputs): the
worst element of a single run is one rounding's luck. Where the kit judges octaves, and nearly nothing as an absolute
error, here a quantity is judged at once, or the part of it that a test names, and however small it is (`cases.error`).
"""

from functools import partial

import pytest
import torch
from cases import error

from gla_ref.check import oracle
from gla_ref.kernels import find_device
from gla_ref.rounding import budget

find_device()  # mends the interpreter, for pages too
CUDA = torch.cuda.is_available()
HERE = "cuda" if CUDA else "cpu"
DTYPES = F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RUNS, ROOM = 16, 2**29 if CUDA else 2**24  # emulated runs side by side; numbers of all their values' states
# the emulated runs of the linear mechanisms and the delta rules in chunks like the kernels', or longer ones
CHUNKS_OF_16, CHUNKS_OF_64 = (0,), (1, 2)
EPS = torch.finfo(torch.float32).eps
TOKENS = ("q", "k", "v", "g", "beta")
LEAVES = ("q", "k", "v", "g", "beta", "S", "g_v")
interpreted = pytest.mark.skipif(CUDA, reason="kernels are compiled here")
anywhere = pytest.mark.usefixtures("here")  # interpreted by `make test`, compiled by `make test-gpu`
compiled = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU")]
EVERY_DTYPE = [  # float32 interpreted, all three on a GPU
    pytest.param(F32, marks=interpreted, id="interpreted"),
    *(pytest.param(dtype, marks=compiled, id=f"{dtype}") for dtype in DTYPES),
]


def allowed(x, exact):
    """The budget that one emulated result gives."""
    return budget(error(x, exact), x.dtype)


def named(x):
    """Tensors by the names of the check kit."""
    names = {"S": "S0", "do": "d o", "dS": "d S"}
    return {names.get(n, n): y for n, y in x.items() if y is not None}


class Judged(dict):
    """{quantity: (exact, budget)}, worked out when a test asks for one: many need no gradients, or the inputs alone."""

    def __init__(self, work_out):
        super().__init__()
        self.work_out = work_out

    def __missing__(self, name):
        self |= self.work_out(forward=name in ("o", "S")) | self  # what a test has put there stays
        return self[name]


def budgets(mechanism, x, given, *, products=None, options=None, **how):
    """(inputs as the kernel is given them, their :class:`Judged`).

    Inputs x of float64 get the dtypes `given`; the kernel is given them, and they are no error of its own. `products`
    is the dtype of its operands, that of q unless given; `how` are the scale and the ends of packed sequences. In
    float32 runs with `options` count as well.
    """
    x = {n: None if y is None else y.to(given[n]).to(HERE) for n, y in x.items()}
    products = products or given["q"]
    chosen = CHUNKS_OF_16 if products == torch.float32 else CHUNKS_OF_64
    copies = min(RUNS, max(3, ROOM // (x["v"].numel() * x["q"].shape[-1])))
    tensors = named(x)
    emulate = partial(oracle.emulated, mechanism, dtype=products, copies=copies, chosen=chosen, **how)

    def work_out(forward):
        x = {n: y for n, y in tensors.items() if not (forward and n.startswith("d "))}
        right, runs = oracle.exact(mechanism, x, **how), emulate(x)
        if options and products == torch.float32:  # rounded operands hide the difference in 16 bits
            runs += emulate(x, options=options)
        return {n: (y, max(allowed(run[n], y) for run in runs)) for n, y in right.items()}

    return x, Judged(work_out)


def compare(found, judged, where=...):
    """Each quantity, or its part at these indices, is within its budget."""
    judged = {n: judged[n] for n in reversed(found)}  # gradients first: with them comes the rest
    errors = {n: (error(x.detach()[where], judged[n][0][where]), judged[n][1]) for n, x in found.items()}
    wrong = {n: f"{e:.3g} > {budget:.3g}" for n, (e, budget) in errors.items() if not e <= budget}
    assert not wrong, wrong
    assert all(budget < float("inf") for _, budget in judged.values())


def results(form, x, ends=None, frozen=(), **options):
    """o, the final state and the gradient of every tensor that is not frozen, by the kernels."""
    leaves = {n: x[n].detach().requires_grad_(n not in frozen) for n in LEAVES if x.get(n) is not None}
    tokens = [y for n, y in leaves.items() if n not in ("S", "g_v")]
    cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
    options |= {"g_v": leaves["g_v"]} if "g_v" in leaves else {}
    o, S = form(*tokens, initial_state=leaves.get("S"), cu_seqlens=cu, **options)
    leaves = {n: y for n, y in leaves.items() if n not in frozen}
    grads = torch.autograd.grad((o, S), list(leaves.values()), (x["do"], x["dS"]))
    names = ("dS0" if n == "S" else f"d{n}" for n in leaves)
    return {"o": o, "S": S, **dict(zip(names, grads, strict=True))}


def tokens(x, *where):
    """The tensors that a call takes by position, or a part of each."""
    return [x[n][where] for n in TOKENS if x.get(n) is not None]


def hold_in_parts(form, x, judged, cuts, **options):
    """The parts on both sides of each cut are as right as the whole."""
    for a in cuts:
        first, S = form(*tokens(x, slice(None), slice(a)), initial_state=x["S"], **options)
        second, S = form(*tokens(x, slice(None), slice(a, None)), initial_state=S, **options)
        compare({"o": torch.cat([first, second], 1), "S": S}, judged)


def hold_at_any_strides(form, x, judged, **options):
    """Right and bitwise equal from run to run; right from tensors with strides of their own, which stay unchanged."""
    x = {n: y for n, y in x.items() if y is not None}
    first, second = (results(form, x, **options) for _ in range(2))
    compare(first, judged)
    assert all(torch.equal(first[n], second[n]) for n in first), "bitwise, from run to run"

    odd = {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in x.items()}
    odd |= {n: x[n].mT.contiguous().mT for n in ("S", "dS")}
    odd["q"] = torch.stack([x["q"], x["q"]], -1)[..., 0]  # a last stride of 2
    odd["do"] = x["do"][:1, :1, :1, :1].expand_as(x["do"])  # as the gradient of a sum: strides of 0
    before = {n: y.clone() for n, y in odd.items()}
    same = results(form, {**x, "do": odd["do"].contiguous()}, **options)
    found = results(form, odd, **options)
    compare({n: found[n] for n in ("o", "S")}, judged)
    for n in same:  # an absolute band: the same sums of at most 36 * 19 terms, in whatever order
        band = 36 * 19 * EPS * same[n].abs().max()
        assert (found[n] - same[n]).abs().max() <= band, n
    assert all(torch.equal(odd[n], y) for n, y in before.items()), "inputs are left alone"
