"""Named mistakes that kernels make, each a small wrong variant of the reference (appendix "Check your kernel").

A mistake is a function of a call, one sequence (or batch) in the book's notation, that returns o and the
state as the wrong kernel would (of attention: that kernel itself); autograd carries it to the gradients. In float64
it is what a diagnosis compares with; in a kernel's dtype it is a wrong kernel to test the tests with. The list has what
public libraries shipped, and what kernels written without knowledge of it were wrong by.
"""

import torch

from . import _delta, _rounding, _shipped, _states
from ._calls import LINEAR, MISTAKES, Call, Mistake, apply, attention

__all__ = ["LINEAR", "MISTAKES", "Call", "Mistake", "apply", "attention", "known"]

MODULES = (_states, _shipped, _rounding, _delta)  # each adds its mistakes to MISTAKES


def known(mechanism: str, dtype: torch.dtype) -> list[Mistake]:
    """The mistakes that a kernel of this mechanism and dtype can be seen to make."""
    shows = {torch.float32: lambda m: True, torch.bfloat16: lambda m: not (m.rounding or m.fine)}
    fits = shows.get(dtype, lambda m: not (m.right_on_paper or m.fine))
    return [m for m in MISTAKES if mechanism in m.mechanisms and fits(m)]
