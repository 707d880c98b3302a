"""What the cases that fail share, and how far the cases go (appendix "Check your kernel")."""

from __future__ import annotations

from collections.abc import Sequence

from ._cases import Case

MOST = 4  # values of one kind that are worth a line


def longest(case: Case) -> int:
    """The tokens of a case's longest sequence."""
    ends = case.ends or (0, case.T)
    return max(b - a for a, b in zip(ends, ends[1:], strict=False))


NUMBERS = {
    "tokens in a sequence": longest,
    "packed sequences": lambda case: len(case.ends or (0,)) - 1,
    "heads": lambda case: case.H,
    "value heads of a key head": lambda case: case.groups,
    "keys' channels": lambda case: case.K,
    "values' channels": lambda case: case.V,
}
KINDS = {
    "initial state": lambda case: "yes" if case.state else "no",
    "scale given": lambda case: "no" if case.scale is None else "yes",
    "gates": lambda case: case.gate,
    "strengths below": lambda case: f"{case.strength:g}",
    "strides": lambda case: case.strides,
    "loss of": lambda case: case.loss,
    "values of size": lambda case: f"{case.size:g}",
    "dtype of cu_seqlens": lambda case: case.index if case.ends else None,
    "K = V": lambda case: "yes" if case.K == case.V else "no",
}


def common(failing: Sequence[Case], passing: Sequence[Case]) -> list[str]:
    """Each trait that all of the failing cases have and none of the passing ones, in a few words."""
    found = []
    for name, of in NUMBERS.items() if passing else ():
        wrong, right = [of(c) for c in failing], [of(c) for c in passing]
        if min(wrong) > max(right):
            found.append(f"{name}: {f'more than {max(right)}' if max(right) else 'any'}")
        if max(wrong) < min(right):
            found.append(f"{name}: fewer than {min(right)}")
    for name, of in KINDS.items() if passing else ():
        wrong, right = (list(dict.fromkeys(of(c) for c in some)) for some in (failing, passing))
        told = None not in wrong and any(right) and not set(wrong) & set(right)
        if told and len(wrong) <= MOST:
            found.append(f"{name}: {', '.join(wrong)}")
    return found


def reach(cases: Sequence[Case]) -> str:
    """The largest sizes among cases."""
    sizes = ", ".join(f"{n} = {max(getattr(c, n) for c in cases)}" for n in "BTHKV")
    packs = [len(c.ends) - 1 for c in cases if c.ends]
    return f"up to {sizes}" + (f", {max(packs)} packed sequences" if packs else "")
