"""The check that barriers keep their bytes (tools/barriers.py), on programs that are wrong in one way each."""

import re
import sys

import pytest
from cases import ROOT, in_process

sys.path.append(str(ROOT / "tools"))
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
import barriers

# two slots of barriers, both used by both roles and invalidated after them; then a sum, which needs scratch
RIGHT = """
#line = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#smem = #ttg.shared_memory
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90"} {
  tt.func public @program(%out: !tt.ptr<f32>, %n: i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %yes = arith.constant true
    %x = arith.constant dense<1.000000e+00> : tensor<128xf32, #blocked>
    %bars = ttg.local_alloc : () -> !BARS loc("bars")
    %outer_0 = ttg.memdesc_index %bars[%c0] : !BARS -> !BAR
    %outer_1 = ttg.memdesc_index %bars[%c1] : !BARS -> !BAR
    ttng.init_barrier %outer_0, 1 : !BAR
    ttng.init_barrier %outer_1, 1 : !BAR
    // BEFORE
    ttg.warp_specialize(%bars, %out, %n)
    default {
      ttng.wait_barrier %outer_0, %c0 : !BAR
      ttng.wait_barrier %outer_1, %c0 : !BAR
      ttg.warp_yield
    }
    partition0(%their_bars: !BARS, %to: !tt.ptr<f32>, %m: i32) num_warps(4) {
      %i0 = arith.constant 0 : i32
      %i1 = arith.constant 1 : i32
      %one = arith.constant 1.000000e+00 : f32
      tt.store %to, %one : !tt.ptr<f32>
      %inner_0 = ttg.memdesc_index %their_bars[%i0] : !BARS -> !BAR
      %inner_1 = ttg.memdesc_index %their_bars[%i1] : !BARS -> !BAR
      %any = ttg.memdesc_index %their_bars[%m] : !BARS -> !BAR
      ttng.arrive_barrier %inner_0, 1 : !BAR
      ttng.arrive_barrier %inner_1, 1 : !BAR
      // INSIDE
      ttg.warp_return
    } : (!BARS, !tt.ptr<f32>, i32) -> ()
    ttng.inval_barrier %outer_0 : !BAR
    ttng.inval_barrier %outer_1 : !BAR
    %sum = "tt.reduce"(%x) <{axis = 0 : i32}> ({
    ^bb0(%a: f32, %b: f32):
      %c = arith.addf %a, %b : f32
      tt.reduce.return %c : f32
    }) : (tensor<128xf32, #blocked>) -> f32
    tt.store %out, %sum : !tt.ptr<f32>
    // AFTER
    tt.return
  }
}
"""
TILE = """
    %tile = ttg.local_alloc : () -> !ttg.memdesc<128xf32, #line, #smem, mutable> loc("tile")
    ttg.local_store %x, %tile : tensor<128xf32, #blocked> -> !ttg.memdesc<128xf32, #line, #smem, mutable>
"""


# in each round a wait, and then scratch of a size that the check can only bound
LOOP = """
    scf.for %i = %c0 to %n step %c1 : i32 {
      ttng.wait_barrier %outer_0, %c0 : !BAR
      %sums = "tt.scan"(%x) <{axis = 0 : i32, reverse = false}> ({
      ^bb0(%d: f32, %e: f32):
        %f = arith.addf %d, %e : f32
        tt.scan.return %f : f32
      }) : (tensor<128xf32, #blocked>) -> tensor<128xf32, #blocked>
      %kept = ttg.local_alloc : () -> !ttg.memdesc<128xf32, #line, #smem, mutable>
      ttg.local_store %sums, %kept : tensor<128xf32, #blocked> -> !ttg.memdesc<128xf32, #line, #smem, mutable>
    }
"""
USES = ("wait_", "inner_", "%any")  # of the barriers, by words of their lines


def program(*without: str, captures: bool = True, **instead: str) -> str:
    """`RIGHT` less the lines that have one of these words, and with lines in the place of some comments."""
    text = "\n".join(x for x in RIGHT.splitlines() if not any(word in x for word in without))
    for place, more in instead.items():
        text = text.replace(f"// {place}", more)
    if not captures:  # of the barriers
        text = text.replace("(%bars, ", "(").replace("%their_bars: !BARS, ", "").replace("(!BARS, ", "(")
    for name, shape in (("BARS", "2x1xi64"), ("BAR", "1xi64")):
        text = text.replace(f"!{name}", f"!ttg.memdesc<{shape}, #line, #smem, mutable>")
    return text


def said(text: str) -> list[str]:
    return barriers.unkept(text, 90, ".version 8.6")


def unused(*slots: int) -> list[str]:
    return [f"barrier %bars[{slot}] is initialised and no role uses it" for slot in slots]


def test_barriers_that_roles_use_and_that_are_invalidated_pass():
    assert said(program()) == []
    any_slot = "ttng.arrive_barrier %any, 1 : !BAR"
    assert said(program("wait_", "inner_", INSIDE=any_slot)) == []  # it may be either
    assert said(program("inner_", "%any", captures=False)) == []  # the first role captures nothing


@pytest.mark.parametrize("slot", (0, 1))
def test_one_slot_of_several_that_no_role_uses_is_named(slot):
    assert said(program(f"wait_barrier %outer_{slot}", f"inner_{slot}")) == unused(slot)


def test_a_barrier_that_nobody_uses_lies_below_captured_values():
    found = said(program(*USES, "inval_", captures=False))
    assert [x for x in found if "no role uses it" in x] == unused(0, 1)
    shared = "barrier %bars[0]: its bytes 0..8 are also those of the values that ttg.warp_specialize captures"
    assert any(x.startswith(shared) for x in found)
    kept = program(*USES, captures=False)
    assert said(kept) == unused(0, 1)  # useless, but its bytes are its own


def test_a_use_before_the_roles_is_not_one_by_a_role():
    early = "ttng.wait_barrier %outer_0, %c0 : !BAR\n    ttng.wait_barrier %outer_1, %c0 : !BAR"
    found = said(program(*USES, "inval_", captures=False, BEFORE=early))
    assert [x for x in found if "no role uses it" in x] == unused(0, 1)
    assert any("also those of the values that ttg.warp_specialize captures" in x for x in found)
    over = early + "\n    ttng.inval_barrier %outer_0 : !BAR\n    ttng.inval_barrier %outer_1 : !BAR"
    assert said(program(*USES, "inval_", captures=False, BEFORE=over)) == []  # and then invalidated: rightly another's


def test_bytes_that_another_has_before_the_barrier_is_invalidated():
    never = said(program("inval_", AFTER=TILE))
    assert never == [
        f"barrier %bars[{slot}]: its bytes {32 + 8 * slot}..{40 + 8 * slot} are also those of %tile; "
        "it is never invalidated"
        for slot in (0, 1)
    ]
    # no Triton known to us lays barriers that are invalidated at the end below others; here it is made to
    laid_out = barriers.allocated(program(), 90, 86)
    place = barriers.offset(next(x for x in laid_out.splitlines() if "%bars = ttg.local_alloc" in x))
    moved, times = re.subn(r"(ttg\.warp_specialize.*allocation\.offset = )0\b", rf"\g<1>{place}", laid_out)
    assert times == 1
    found = barriers.Function(moved[moved.index("  tt.func") :], 4, {}).unkept()
    assert len(found) == 2 and all(x.endswith("captures before it is invalidated") for x in found)


def test_a_barrier_keeps_its_bytes_to_the_end_of_a_loop_that_waits_for_it():
    assert said(program("inval_", AFTER=LOOP)) == []


COMPILED = """
import barriers, sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def add_up(out, rounds):
    numbers = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    total = rounds * 0
    for i in range(rounds):
        total += gl.sum(numbers + i, 0)
    gl.store(out, total)

@gluon.jit
def kernel(out, places, bounds, INVALIDATE: gl.constexpr):
    unused = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(unused, count=1)
    out += gl.load(places + gl.program_id(0))
    rounds = gl.load(bounds + gl.program_id(0))
    gl.warp_specialize([(add_up, (out, rounds)), (add_up, (out + 1, rounds))], [4], [32])
    if INVALIDATE:
        mbarrier.invalidate(unused)

for invalidate in (False, True):
    signature = {"out": "*i32", "places": "*i32", "bounds": "*i32", "INVALIDATE": "constexpr"}
    source = GluonASTSource(kernel, signature, {"INVALIDATE": invalidate})
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm
    print(*barriers.unkept(asm["ttgir"], 90, asm["ptx"]), sep="\\n", end="\\n---\\n")
"""


def test_a_kernel_with_a_barrier_that_nobody_uses_is_refused(tmp_path):
    """As it is compiled: its barrier has no use, and the values that its roles capture lie on the barrier's bytes."""
    (tmp_path / "unused_barrier.py").write_text(COMPILED)
    unused, invalidated, _ = in_process(tmp_path / "unused_barrier.py").split("---\n")
    idle, shared = unused.splitlines()
    assert idle.startswith("barrier %unused (unused_barrier.py:") and idle.endswith("no role uses it")
    assert "the values that ttg.warp_specialize captures" in shared
    assert invalidated.splitlines() == [idle]


@pytest.mark.deep
def test_the_kernels_for_hopper_pass():
    cases = [
        "gla hopper",
        "gla hopper float32 gates",
        "gla hopper frozen gates",
        "gla hopper page",
        "gla hopper plain",
        "delta hopper page",
    ]
    in_process("tools/compile_kernels.py", *cases, "--arch", "90")
