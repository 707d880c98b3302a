"""Arguments of a launch by the names of the kernel's parameters."""

from ..launch.plan import Spec
from .tiles import patterns


def launch(call, kernel, grid: int, **named) -> None:
    """Launch a kernel; a parameter that is not `named` is the field of the call, or of its `same`, with that name."""
    own = call._asdict() | call.same
    call.draft.launch(kernel, grid, **{name: own[name] for name in kernel.arg_names if name in own} | named)


def strides(**tensors: Spec | None) -> dict[str, tuple[int, ...] | None]:
    """The strides of tensors: s_q of q."""
    return {f"s_{name}": x and x.strides for name, x in tensors.items()}


def stride_patterns(**tensors: Spec | None) -> dict[str, tuple[int, ...] | None]:
    """`patterns` of tensors: s_q of q."""
    return dict(zip(strides(**tensors), patterns(*tensors.values()), strict=True))


def token_strides(**tensors: Spec | None) -> dict[str, int]:
    """The strides of tensors [B, T, H], one number a parameter: s_gb, s_gt and s_gh of g; zeros without g."""
    every = {name: x.strides if x else (0, 0, 0) for name, x in tensors.items()}
    return {f"s_{name}{axis}": n for name, s in every.items() for axis, n in zip("bth", s, strict=True)}
