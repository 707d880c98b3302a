"""Run a page by itself: check its kernel against the float64 recurrence, and time it (chapter 4).

`python -m gla_ref.pages.gla` prints the largest error of each result as a share of its budget, and, on a GPU, the
median time at a size that models have. Without a GPU Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from .. import check
from ..check._cases import held
from ..check.oracle import problems
from ..mechanisms import MECHANISMS
from ..rounding import budget, error

# the mechanism of each file's kernel
KINDS = {
    "first": "softmax_attention",
    "flash_attention": "softmax_attention",
    "linear_attention": "linear_attention",
    "linear_attention_segments": "linear_attention",
    "gla": "gla",
    "gla_levels": "gla",
    "gla_hopper": "gla",
    "gla_gradient": "gla",
    "gla_step": "gla",
    "gated_delta_rule": "gated_delta_rule",
    "gated_delta_rule_hopper": "gated_delta_rule",
    "kda": "kda",
}
TIMED = {"B": 8, "T": 8192, "H": 16, "HV": 16, "K": 128, "V": 128}
FEWER = {"first": {"T": 64}, "gla_step": {"T": 1}}  # the most tokens that a page takes, in all or at a time


def case_of(name: str, compiled: bool) -> check.Case:
    """The case on which a page's results are judged."""
    T, sizes = (150, {"H": 3, "K": 128, "V": 128}) if compiled else (40, {"H": 2, "K": 32, "V": 16})
    T = {"first": 40, "gla_step": 3}.get(name, T)
    gate = "mild and strong chunks" if name == "gla_levels" else "logsigmoid/16"
    loss = "o" if name == "gla_gradient" else "both"
    return check.Case(name, B=2, T=T, **sizes, gate=gate, state=name == "gla_step", loss=loss)


def results(name: str, page: Callable, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a page and return its results by quantity."""
    tokens = [x[n] for n in MECHANISMS[KINDS[name]].required]
    if name == "gla_gradient":
        return dict(zip(("dq", "dk", "dv", "dg"), page(*tokens, x["d o"]), strict=True))
    if name == "gla_step":
        S, outs = x["S0"], []
        for one in zip(*(y.unbind(1) for y in tokens), strict=True):
            o, S = page(*(y.contiguous() for y in one), S)
            outs.append(o)
        return {"o": torch.stack(outs, 1), "S": S}
    returned = page(*tokens)
    return {"o": returned} if isinstance(returned, Tensor) else dict(zip(("o", "S"), returned, strict=True))


def timed(name: str, page: Callable, dtype: torch.dtype) -> str:
    """Return the median time of twenty calls, by events of the GPU."""
    sizes = TIMED | FEWER.get(name, {})
    x = {"S0": torch.zeros([sizes[a] for a in "BHKV"], device="cuda")}
    for argument in MECHANISMS[KINDS[name]].arguments:
        y = torch.randn([sizes[a] for a in argument.axes.split()], device="cuda")
        values = {"gate": logsigmoid(y) / 16, "strength": y.sigmoid()}.get(argument.role, y)
        x[argument.name] = (normalize(values, dim=-1) if argument.name == "k" else values).to(dtype)
    x["d o"] = torch.randn_like(x["v"])
    if "beta" in x:
        x["g"], x["beta"] = x["g"].float(), x["beta"].float()
    took = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        results(name, page, x)
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    shape = ", ".join(f"{n} = {sizes[n]}" for n in "BTHKV")
    return f"{median(took[3:]):.3f} ms at {shape} in {dtype} on {torch.cuda.get_device_name()}"


def run(page: Callable, **others: tuple[Callable, Callable, int]) -> None:
    """Judge the kernels of a page, time the first, and exit with 0 if all are right.

    Args:
        page: the function of the file that runs as a program.
        others: further functions of the file, each with PyTorch's and the number of matrices that both take.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as measured; Triton 3.10 will leave it out by default
    name = Path(page.__code__.co_filename).stem
    compiled = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if name.endswith("_hopper") and not (compiled and torch.cuda.get_device_capability() == (9, 0)):
        sys.exit(f"{name}: expected a GPU of compute capability 9.0 (H100, H200), which this page is for")
    if not compiled and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads the variable only when it is imported
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"TRITON_INTERPRET": "1"})
    dtype, device = (torch.bfloat16, "cuda") if compiled else (torch.float32, "cpu")
    (problem,) = problems(KINDS[name], [case_of(name, compiled)], dtype, seed=0)
    x = {n: y.to(device, held(problem.kind, n, problem.case, dtype)) for n, y in problem.inputs.items()}
    judged = {quantity: problem.judge(quantity, y.cpu()) for quantity, y in results(name, page, x).items()}
    for other, (function, reference, n) in others.items():
        matrices = torch.randn(n, 37, 1000, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
        exact, emulated = reference(*matrices.double()), reference(*matrices.float()).to(dtype)
        judged[other] = error(function(*matrices), exact), budget(error(emulated, exact), dtype)
    for quantity, (e, most) in judged.items():
        print(f"{quantity:3} error {e:.2g}, {e / most:.2f} of its budget{'' if e <= most else ': WRONG'}")
    print(timed(name, page, dtype) if compiled else "interpreted: the time on a CPU says nothing")
    sys.exit(0 if all(e <= most for e, most in judged.values()) else 1)
