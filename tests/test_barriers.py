"""The check that barriers keep their bytes (tools/barriers.py), on programs that are wrong in one way each."""

import sys

import pytest
from cases import ROOT, in_process

sys.path.append(str(ROOT / "tools"))
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
import barriers

# two slots of barriers, both used by both roles and invalidated after them
RIGHT = """
#line = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
#smem = #ttg.shared_memory
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90"} {
  tt.func public @program(%out: !tt.ptr<f32>, %n: i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
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
    tt.return
  }
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


def unused(*slots: int) -> list[str]:
    return [f"barrier %bars[{slot}] is initialised and no role uses it" for slot in slots]


def lost(*slots: int) -> list[str]:
    end = "is never invalidated: others may have its bytes while it is a barrier"
    return [f"barrier %bars[{slot}] {end}" for slot in slots]


def test_barriers_that_roles_use_and_that_are_invalidated_pass():
    assert barriers.broken(program()) == []
    any_slot = "ttng.arrive_barrier %any, 1 : !BAR"
    assert barriers.broken(program("wait_", "inner_", INSIDE=any_slot)) == []  # it may be either
    assert barriers.broken(program("inner_", "%any", captures=False)) == []  # the first role captures nothing


@pytest.mark.parametrize("slot", (0, 1))
def test_one_slot_of_several_that_no_role_uses_is_named(slot):
    assert barriers.broken(program(f"wait_barrier %outer_{slot}", f"inner_{slot}")) == unused(slot)


def test_a_barrier_that_nobody_uses_is_named_whether_it_is_invalidated_or_not():
    assert barriers.broken(program(*USES, captures=False)) == unused(0, 1)
    both = barriers.broken(program(*USES, "inval_", captures=False))
    assert sorted(both) == sorted(unused(0, 1) + lost(0, 1))


def test_a_use_before_the_roles_is_not_one_by_a_role():
    early = "ttng.wait_barrier %outer_0, %c0 : !BAR\n    ttng.wait_barrier %outer_1, %c0 : !BAR"
    assert barriers.broken(program(*USES, captures=False, BEFORE=early)) == unused(0, 1)
    over = early + "\n    ttng.inval_barrier %outer_0 : !BAR\n    ttng.inval_barrier %outer_1 : !BAR"
    # after `inval` the memory belongs to something else
    assert barriers.broken(program(*USES, "inval_", captures=False, BEFORE=over)) == []


def test_a_barrier_is_invalidated_slot_by_slot():
    assert barriers.broken(program("inval_")) == lost(0, 1)
    assert barriers.broken(program("inval_barrier %outer_1")) == lost(1)
    first = "ttng.inval_barrier %outer_0 : !BAR"
    early = barriers.broken(program("inval_barrier %outer_0", BEFORE=first))
    assert early == ["barrier %bars[0] is initialised and nothing uses it"]  # as long as it is one


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
    print(*barriers.broken(asm["ttgir"]), sep="\\n", end="\\n---\\n")
"""


def test_a_kernel_with_a_barrier_that_nobody_uses_is_refused(tmp_path):
    """As it is compiled: its barrier has no use; the values that its roles capture lay on the barrier's bytes."""
    (tmp_path / "unused_barrier.py").write_text(COMPILED)
    unused, invalidated, _ = in_process(tmp_path / "unused_barrier.py").split("---\n")
    idle, lost = unused.splitlines()
    assert idle.startswith("barrier %unused (unused_barrier.py:") and idle.endswith("no role uses it")
    assert "is never invalidated" in lost
    assert invalidated.splitlines() == [idle]


@pytest.mark.deep
def test_the_kernels_for_hopper_pass():
    cases = [f"gla hopper{which}" for which in ("", " float32 gates", " frozen gates", " page", " plain")]
    in_process("tools/compile_kernels.py", *cases, "delta hopper page", "--arch", "90")
