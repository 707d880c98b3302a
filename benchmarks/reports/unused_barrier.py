"""A barrier that nobody uses, and the values of `warp_specialize` on its bytes: a kernel to read, a count of deaths.

    python unused_barrier.py --addresses                       # compiles for sm_90; needs no GPU
    python unused_barrier.py --processes 14 --seconds 60       # a Hopper GPU, and nothing but torch and triton

unused_barrier.md says what is seen and why. Half of the processes run the kernel with its barrier left as it is, half
with the barrier invalidated at the end; all share one GPU, which changes between them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

VARIANTS = ["unused", "invalidated"]


@gluon.jit
def add_up(out, rounds):
    """A role of four warps: sums, each by way of scratch in shared memory, whose total goes to `out`."""
    numbers = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    total = rounds * 0
    for i in range(rounds):
        total += gl.sum(numbers + i, 0)
    gl.store(out, total)


@gluon.jit
def kernel(out, places, bounds, INVALIDATE: gl.constexpr):
    unused = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(unused, count=1)
    # read from memory, so that the second role cannot work them out again but gets them through shared memory
    out += gl.load(places + gl.program_id(0))
    rounds = gl.load(bounds + gl.program_id(0))
    gl.warp_specialize([(add_up, (out, rounds)), (add_up, (out + 1, rounds))], [4], [32])
    if INVALIDATE:
        mbarrier.invalidate(unused)


def compiled(invalidate: bool) -> dict:
    """What the compiler makes of the kernel for sm_90, with or without such a GPU."""
    signature = {"out": "*i32", "places": "*i32", "bounds": "*i32", "INVALIDATE": "constexpr"}
    source = GluonASTSource(kernel, signature, {"INVALIDATE": invalidate})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm


def addresses(invalidate: bool) -> str:
    """Where the barrier and the captured values lie: by Triton's allocation, and by the assembler's code."""
    from triton._C.libtriton import ir, nvidia, passes

    asm = compiled(invalidate)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ttgir")
        file.write_text(asm["ttgir"])
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(str(file), context)
        # the passes that lead from TTGIR, which has no offsets, to the allocation
        manager = ir.pass_manager(context)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 86)
        manager.run(module, "addresses")
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True).stdout if tool.exists() else ""
    found = re.findall(r"(ttg\.local_alloc|ttg\.warp_specialize).*allocation\.offset = (\d+)", str(module))
    lines = [f"  {name}: offset {offset}" for name, offset in found]
    return "\n".join(lines + ["  " + x for x in re.findall(r"(?:SYNCS\.\w+\.\w+|STS\.64) [^;]*", sass)])


def work(invalidate: bool, seconds: float, programs: int, rounds: int) -> None:
    """One process: launch and check until the time is over. Exits by 3 where a value was wrong."""
    right = (rounds * 127 * 64 + 64 * rounds * (rounds - 1) + 2**31) % 2**32 - 2**31
    places = 2 * torch.arange(programs, dtype=torch.int32, device="cuda")
    bounds = torch.full_like(places, rounds)
    end, launches = time.time() + seconds, 0
    while time.time() < end:
        out = torch.zeros(programs, 2, dtype=torch.int32, device="cuda")
        for _ in range(20):
            kernel[(programs,)](out, places, bounds, invalidate, num_warps=4)
        wrong = int((out != right).sum())
        if wrong:
            print(f"{wrong} of {2 * programs} values wrong after {launches} launches")
            sys.exit(3)
        launches += 20
    print(f"{launches} launches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--addresses", action="store_true", help="only print where things lie")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="that take turns")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--programs", type=int, default=132 * 64)
    parser.add_argument("--rounds", type=int, default=500, help="of a role")
    parser.add_argument("--as", dest="variant", choices=VARIANTS, help="be one of the processes")
    args = parser.parse_args()
    if args.variant:
        return work(args.variant == "invalidated", args.seconds, args.programs, args.rounds)
    print(f"Triton {triton.__version__}")
    for variant in args.variants:
        print(f"{variant}:\n{addresses(variant == 'invalidated')}")
    if args.addresses:
        return
    variants = [args.variants[i % len(args.variants)] for i in range(args.processes)]
    rest = [f"--{name}={getattr(args, name)}" for name in ("seconds", "programs", "rounds")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [(v, subprocess.Popen([sys.executable, __file__, "--as", v, *rest], **pipes)) for v in variants]
    ends = {v: {"right": 0, "wrong values": 0, "died": 0, "hung": 0} for v in args.variants}
    for variant, process in started:
        try:
            said, _ = process.communicate(timeout=args.seconds + 120)
            end = {0: "right", 3: "wrong values"}.get(process.returncode, "died")
        except subprocess.TimeoutExpired:
            process.kill()
            said, end = process.communicate()[0], "hung"
        ends[variant][end] += 1
        lines = said.strip().splitlines() or [""]
        print(f"{variant}: {end}: {next((x for x in lines if 'Error:' in x), lines[-1])[:150]}")
    for variant, counts in ends.items():
        print(f"{variant}: {counts}")


if __name__ == "__main__":
    main()
