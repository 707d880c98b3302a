"""Rounding: imitated, measured, and how much of it is allowed (chapter 11).

References are plain mathematics. What a kernel's number format does to them is a mode around them:

    with rounding.operands_in(torch.bfloat16):
        o, S = gla.chunkwise_two_level(q, k, v, g)
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Products", "budget", "error", "operands_in", "unit"]

MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Products(TorchFunctionMode):
    """Inside, `product(x, y)` makes every matrix product `x @ y`."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in MATMUL:
            function = self.product
        return function(*args, **(kwargs or {}))


def operands_in(dtype: torch.dtype) -> Products:
    """A mode that rounds both operands of every matrix product to a dtype, as tensor cores take them; sums stay."""
    return Products(lambda x, y: x.to(dtype).to(x.dtype) @ y.to(dtype).to(y.dtype))


def unit(exact: Tensor) -> float:
    """What errors are divided by: rms(x*); 1 (an absolute error) where x* is, or cancels to, nearly 0."""
    rms = exact.double().square().mean().sqrt().item() if exact.numel() else 1.0
    return rms if rms > 1e-3 else 1.0


def error(x: Tensor, exact: Tensor) -> float:
    """max|x - x*| / rms(x*), infinite where x is not finite."""
    if not torch.isfinite(x).all():
        return float("inf")
    return (x.double() - exact.double()).abs().max().item() / unit(exact) if exact.numel() else 0.0


def budget(worst: float, dtype: torch.dtype) -> float:
    """The error allowed to a result of this dtype: 2 x the worst error of emulated runs + 4 eps."""
    return 2 * worst + 4 * torch.finfo(dtype).eps
