"""Barriers between the roles of a Hopper kernel, why no role waits for ever, and four rules (chapter 22).

All roles of a program go through the same rounds in order: chunks, turns, key heads. What belongs to round n lies in
stage s = n % STAGES of shared memory, and each kind of barrier has one for each stage, whose phase in round n is
j = n // STAGES. wait(bar, p) returns if the last phase that ended has parity p; in a fresh barrier that is phase -1, of
parity 1. So a role waits for this round at parity j & 1, and for round n - STAGES, whose stage it wants, at the other.

A kernel's docstring or its `Barriers` has the kinds of barriers in an order such that

(a) whoever ends a phase of round n has, in round n, waited only at kinds above it, or for earlier rounds;
(b) whoever ends the next phase, that of round n + STAGES, has waited, itself or by way of those whom it waited for, for
    something that each role that waits for round n does after that wait. As a rule that is `done` of round n.

*No role waits for ever*: if any did, look at the first phase, by round and by kind, that never ends. Whoever should end
it waits, by (a), for one that comes before, and that one ends. *No role is two phases late*, where parity would
deceive: that is (b).

*Arrivals.* One thread arrives for its role. Before that the compiler lets all warps of the role meet (`bar.sync`), and
`make compile` checks that it does.

*Barriers own their bytes.* Between `init` and `invalidate` the hardware may write a barrier's state to its bytes at any
time, while Gluon gives bytes away after the last use that it sees in the program. A barrier that no role waits for
would be free at once, and its bytes would go to the addresses that roles share. So a variant makes only the barriers
that its roles use, and invalidates them after the roles.

*Proxies.* The copy engine and WGMMA see what threads have written to shared memory only after a fence of these threads.
So a fence stands between every store into a tile that they read or overwrite, or load from a tile that they overwrite,
and the arrival.

*Products.* With is_async a product runs while threads go on; warpgroup_mma_wait(n, [x]) waits until x is there and at
most n products run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import mbarrier


@gluon.jit
def new_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each stage. A phase ends with so many arrivals; if copies end it, with the announced bytes."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit
def invalidate_stages(bars):
    STAGES: gl.constexpr = bars.shape[0]
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@gluon.jit
def invalidate(kinds):
    """End the barriers of all kinds, after all roles."""
    for i in gl.static_range(len(kinds)):
        invalidate_stages(kinds[i])
