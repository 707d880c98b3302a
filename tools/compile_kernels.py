"""Compile the kernels for a GPU that is not there: registers, spills, shared memory, and a rule of pipelining.

    python tools/compile_kernels.py [CASE ...]        # default: all; needs no GPU, a few minutes
    PYTHONPATH=DIR python tools/compile_kernels.py    # another Triton: pip install --no-deps --target DIR triton==3.6.0

Triton's compiler needs a target, not a device; the assembler comes with Triton. Every launch of forward and backward
is compiled for sm_90 as its launcher would have it. The rule that is checked on the compiled loops was learnt from
wrong results (benchmarks/LAB.md): a product on tensor cores is waited for, and with it its operands, before shared
memory is written again; and no product in a branch takes an operand from a buffer that a pipelined loop refills.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CASES = {  # kernel, K, V, dtype, dtype of gates, and what else the call has
    "gla 128": ("gla", 128, 128, "bfloat16", "bfloat16", ()),
    "gla 64": ("gla", 64, 64, "bfloat16", "bfloat16", ()),
    "gla 256/512": ("gla", 256, 512, "bfloat16", "bfloat16", ()),
    "gla segments": ("gla", 64, 128, "bfloat16", "bfloat16", ("segmented",)),
    "gla packed": ("gla", 64, 128, "bfloat16", "bfloat16", ("packed",)),
    "gla packed 128": ("gla", 128, 64, "bfloat16", "bfloat16", ("packed",)),
    "gla two-sided": ("gla", 64, 128, "bfloat16", "bfloat16", ("g_v",)),
    "gla two-sided 128": ("gla", 128, 64, "bfloat16", "bfloat16", ("g_v",)),
    "gla float32 gates": ("gla", 64, 128, "bfloat16", "float32", ()),
    "gla float16": ("gla", 64, 64, "float16", "float16", ()),
    "gla float16 128": ("gla", 128, 128, "float16", "float16", ()),
    "gla float16 256/512": ("gla", 256, 512, "float16", "float16", ()),
    "gla float32": ("gla", 64, 64, "float32", "float32", ()),
    "gla float32 two-sided": ("gla", 64, 128, "float32", "float32", ("g_v",)),
    "step": ("gla_step", 128, 128, "bfloat16", "bfloat16", ()),
    "step 256/512": ("gla_step", 256, 512, "bfloat16", "float32", ("g_v", "packed")),
    "linear 64": ("linear_attention", 64, 64, "bfloat16", None, ()),
    "linear 128": ("linear_attention", 128, 128, "bfloat16", None, ()),
    "linear 256/512": ("linear_attention", 256, 512, "bfloat16", None, ()),
    "linear segments": ("linear_attention", 128, 128, "bfloat16", None, ("segmented",)),
    "linear materialised": ("linear_attention", 64, 64, "bfloat16", None, ("materialised",)),
    "linear packed": ("linear_attention", 64, 128, "bfloat16", None, ("packed",)),
    "linear gated": ("linear_attention", 128, 128, "bfloat16", "float32", ()),
    "linear float32": ("linear_attention", 64, 64, "float32", "float32", ()),
    "flash 64": ("flash_attention", 64, 64, "bfloat16", None, ()),
    "flash 128": ("flash_attention", 128, 128, "bfloat16", None, ()),
    "flash packed": ("flash_attention", 128, 64, "bfloat16", None, ("packed",)),
    "flash float32": ("flash_attention", 64, 64, "float32", None, ()),
}
REFILL = re.compile(r"async_copy_global_to_local|async_tma_copy_global_to_local|ttg\.local_store")


class Target:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def broken(ttgir: str) -> list[str]:
    """Lines of a kernel's TTGIR that break the rule."""
    lines = [line for line in ttgir.splitlines() if line.strip()]
    regions: list[tuple[int, str]] = []  # (indentation, kind) of what is open
    slots: dict[
        str, str
    ] = {}  # a view of a buffer that a pipelined loop refills: which slot of which
    found = []
    for n, line in enumerate(lines):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        while regions and indent <= regions[-1][0] and not text.startswith("} else"):
            regions.pop()
        if view := re.match(r"(%\w+) = ttg\.memdesc_index (%\w+\[%[\w-]+\])", text):
            slots[view[1]] = view[2]
            if "<1x" in text:  # one slot, whatever it is called
                slots[view[1]] = view[2].split("[")[0]
        if view := re.match(r"(%\w+) = ttg\.memdesc_trans (%\w+)", text):
            slots |= {view[1]: slots[view[2]]} if view[2] in slots else {}
        if product := re.match(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+)", text):
            inside, operands = [kind for _, kind in regions], {product[2], product[3]}
            # a first operand in registers is the assembler's concern
            if re.search(r" : tensor<.*> \* !ttg", text):
                operands = {product[3]}
            branch = "if" in inside and "for" in inside[: inside.index("if")]
            if branch and operands & set(slots):
                found.append(f"in a branch, from a pipelined buffer: {text[:90]}")
            if "isAsync = true" in text and refilled(product[1], operands, lines[n + 1 :], slots):
                found.append(f"in flight when its memory is written: {text[:90]}")
        if opens := re.search(r"scf\.(if|for|while)\b.*\{$", text):
            regions.append((indent, "if" if opens[1] == "if" else "for"))
    return found


def refilled(product: str, operands: set[str], later: list[str], slots: dict[str, str]) -> bool:
    """Whether memory that holds an operand may be written while the product is in flight.

    It may stay in flight into the next round only if all operands are slots that the copies of this round leave alone.
    """
    views, issued = dict(slots), 0
    for line in later:
        issued += " = ttng.warp_group_dot " in line
        if "warp_group_dot_wait" in line:
            if int(re.search(r"pendings = (\d+)", line)[1]) <= issued:  # products end in order
                return False
            if re.search(rf"{product}\b", line) and not operands <= set(slots):
                return True  # a passing copy, whose memory counts as free from here on
        if view := re.search(r"(%\w+) = ttg\.memdesc_index (%\w+\[%[\w-]+\])", line):
            views[view[1]] = view[2].split("[")[0] if "<1x" in line else view[2]
        written = (
            {views.get(x, x) for x in re.findall(r"%\w+", line)} if REFILL.search(line) else set()
        )
        if written & {slots.get(x, x) for x in operands}:
            return True
        if "scf.yield" in line:
            break
    return not operands <= set(slots)


def resources(kernel) -> tuple[str, str, int]:
    """(registers a thread, bytes spilled, bytes of shared memory)."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+)", said), re.search(r"(\d+) bytes spill st", said)
    return registers[1], spilled[1], kernel.metadata.shared


def compile_case(kernel, K, V, dtype, gates, extra) -> None:
    """Every launch of one call, forward and backward."""
    module = importlib.import_module(f"gla_ref.kernels.{kernel}")
    B, T, H = 1 if "packed" in extra else 2, 256, 4
    q, k, v, do = (torch.zeros(B, T, H, D, dtype=getattr(torch, dtype)) for D in (K, K, V, V))
    cu = torch.tensor([0, 100, T], dtype=torch.int32) if "packed" in extra else None
    S, dS = torch.zeros(2, H, K, V), torch.zeros(2, H, K, V)
    if kernel == "flash_attention":
        o, lse = module._forward.function(q, k, v, cu, 0.1)
        module._backward.function(q, k, v, o, lse, do, cu, 0.1)
        return
    path = next((x for x in ("segmented", "materialised") if x in extra), "fused")
    shape = (B, T, H) if kernel == "linear_attention" else (B, T, H, K)
    g = None if gates is None else torch.zeros(shape, dtype=getattr(torch, gates))
    if kernel == "linear_attention":
        module._forward.function(q, k, v, g, S, cu, 0.1, path)
        narrow = (
            q.dtype in module.UNWOUND and g is None and max(K, V) <= 64
        )  # as the launcher has it
        S_T = torch.zeros_like(S) if narrow else None
        module._backward.function(q, k, v, g, S, S_T, cu, do, dS, 0.1, path, g is not None)
        return
    g_v = torch.zeros(B, T, H, V, dtype=getattr(torch, gates)) if "g_v" in extra else None
    if kernel == "gla_step":
        module._step.function(q[:, :1], k[:, :1], v[:, :1], g[:, :1], g_v, S, cu, 0.1)
        return
    module._forward.function(q, k, v, g, g_v, None, cu, 0.1, path)
    module._backward.function(q, k, v, g, g_v, None, cu, do, dS, 0.1, path, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"cases {sorted(unknown)}: expected some of {', '.join(CASES)}")
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET: expected it to be unset, since nothing is compiled with it")
    triton.runtime.driver.set_active(Target())
    from gla_ref.kernels import flash_attention, gla, linear_attention

    def describable(x):
        """The package's own says no to a tensor on a CPU; here it stands for one on a Hopper."""
        strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
        aligned = x.shape[-1] % 8 == 0 and all(s > 0 and s % 8 == 0 for s in strides)
        return x.element_size() == 2 and x.stride(-1) == 1 and aligned

    flash_attention._hopper = lambda x: True
    gla.describable = linear_attention.describable = flash_attention._describable = describable
    launched, run = [], JITFunction.run

    def compiled(self, *arguments, grid=None, warmup=False, **options):
        kernel = run(self, *arguments, grid=(1,), warmup=True, **options)
        launched.append((self.fn.__name__, kernel, options))

    JITFunction.run = compiled
    rows, wrong = [], []
    for case in args.cases or CASES:
        compile_case(*CASES[case])
        for name, kernel, options in launched:
            bad = broken(kernel.asm["ttgir"])
            wrong += [f"{case}, {name}: {text}" for text in bad]
            way = "back" if options.get("REVERSE") else ""
            rows.append([case, name, way, *resources(kernel), len(bad) or "no"])
        launched.clear()
    print(f"Triton {triton.__version__}, sm_90")
    head = ["case", "kernel", "", "registers", "spilled", "shared", "broken"]
    print(tabulate(rows, head))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
