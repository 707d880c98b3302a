"""Clocks inside Gluon kernels: what copies of kernels call (parts.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clock():
    """Half the clocks of this multiprocessor, modulo 2^32."""
    # halves need both words of the clock, which come by CS2R; the low word alone comes by S2UR, which is slower and
    # takes uniform registers, where products have their descriptors
    x = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], gl.int64, is_pure=False, pack=1)
    return (x >> 1).to(gl.uint32)


@gluon.jit
def nanoseconds():
    """The GPU's time in ns, which advances in larger steps than the clock."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, is_pure=False, pack=1)


@gluon.jit
def place(role, n, LOG: gl.constexpr, ROLES: gl.constexpr, WORDS: gl.constexpr):
    """The address of word n of this program and role."""
    word = (gl.program_id(0) * ROLES + role) * WORDS + n
    return gl.to_tensor(LOG).to(gl.int64).to(gl.pointer_type(gl.int64), bitcast=True) + word


@gluon.jit
def note(began, role, n, LOG: gl.constexpr, ROLES: gl.constexpr, WORDS: gl.constexpr):
    """Store when something began and that it ended now, as one word."""
    ended = clock()
    gl.store(place(role, n, LOG, ROLES, WORDS), (ended.to(gl.int64) << 32) | began.to(gl.int64))


@gluon.jit
def stamp(role, n, LOG: gl.constexpr, ROLES: gl.constexpr, WORDS: gl.constexpr):
    """Store the clock and the GPU's time as two words."""
    p = place(role, n, LOG, ROLES, WORDS)
    gl.store(p, clock().to(gl.int64))
    gl.store(p + 1, nanoseconds())
