"""Rounding: imitation, measure and budget (chapters 11 and 21).

References are plain mathematics. What a kernel's number format does to them is a mode around them:

    with rounding.operands_in(torch.bfloat16):
        o, S = gla.chunkwise_two_level(q, k, v, g)
"""

from collections.abc import Callable
from math import log

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["PRODUCTS", "Luck", "Products", "budget", "error", "operands_in", "products_in", "unit"]

MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Products(TorchFunctionMode):
    """Inside, `product(x, y)` makes every matrix product `x @ y`; torch.einsum, which hides its own, is refused."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.einsum:
            raise NotImplementedError("einsum: expected products written x @ y where they are replaced")
        if function in MATMUL:
            function = self.product
        return function(*args, **(kwargs or {}))


def operands_in(dtype: torch.dtype) -> Products:
    """A mode that rounds both operands of every matrix product to a dtype, as tensor cores take them; sums stay."""
    return Products(lambda x, y: x.to(dtype).to(x.dtype) @ y.to(dtype).to(y.dtype))


def tf32(x: Tensor) -> Tensor:
    """float32 rounded to the nearest number with 10 bits after the point, ties to even."""
    i, cut = x.view(torch.int32), 23 - 10
    odd = (i >> cut) & 1
    return ((i + (1 << (cut - 1)) - 1 + odd) & -(1 << cut)).view(torch.float32)


def tf32_cut(x: Tensor) -> Tensor:
    """float32 without the bits that TF32 lacks: towards zero, up to twice as far as `tf32` goes."""
    return (x.view(torch.int32) & -(1 << (23 - 10))).view(torch.float32)


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rounding of float32 to a shorter format, and back."""
    return lambda x: x.to(dtype).float()


def rounded(low: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """One product, both operands rounded, sums in float32."""
    return lambda x, y: low(x) @ low(y)


def thrice(low: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Three products: of what `low` keeps of each operand, and of that with what it keeps of the other's rest."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        a, b = low(x), low(y)
        return (low(x - a) @ b + a @ low(y - b)) + a @ b

    return product


#: what GPUs and their compilers make of a product of float32 matrices, by Triton's names; "tf32-cut" is "tf32" on
#: hardware that cuts bits off instead of rounding
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ieee": torch.matmul,
    "tf32x3": thrice(tf32),
    "bf16x3": thrice(through(torch.bfloat16)),
    "tf32": rounded(tf32),
    "tf32-cut": rounded(tf32_cut),
    "fp16": rounded(through(torch.float16)),
    "bf16": rounded(through(torch.bfloat16)),
}


def products_in(precision: str) -> Products:
    """A mode that makes every product of float32 matrices in one of the ways of `PRODUCTS`.

    Raises:
        ValueError: there is no such precision.
    """
    if precision not in PRODUCTS:
        raise ValueError(f"precision: expected one of {', '.join(PRODUCTS)}, got {precision!r}")
    return Products(PRODUCTS[precision])


class Luck:
    """The order of a sum's terms, and the scale at which an operand is rounded, drawn anew for every product.

    Right kernels differ in both and are equally exact: a BLAS, a GPU's tiles and a backward pass that makes k q^T of
    q k^T add in orders of their own, and a scale, a strength or a row's maximum is applied before a product or after
    it. Tensors `[B, H, ...]` hold `copies` of the same inputs side by side as heads, and each copy has a luck of its
    own, the first one none: sixteen copies are sixteen kernels. Where products of float32 are made in three passes of
    TF32 (`thrice`), as Triton can, each number is two numbers, and a product has three times as many terms. Without
    `sizes` luck is in orders only. Kernels that are `sharp` bring operands into the range of float16, keep each number
    that fits into 16 bits as it is, and add up the gradients of gates pair by pair.
    """

    def __init__(
        self, copies: int = 1, *, thrice: bool = False, sizes: bool = True, seed: int = 0, sharp: bool = False
    ) -> None:
        self.copies, self.thrice, self.sizes, self.sharp = copies, thrice, sizes, sharp
        self.rng = torch.Generator().manual_seed(seed)

    def another(self, seed: int) -> "Luck":
        """Luck of the same kind that draws other numbers, and for the same seed the same ones."""
        return Luck(self.copies, thrice=self.thrice, sizes=self.sizes, seed=seed, sharp=self.sharp)

    def drawn(self, n: int, x: Tensor) -> Tensor:
        """n random numbers in [0, 1) for every copy, zeros for the first: `[copies, n]`, where x lies."""
        numbers = torch.rand(self.copies, n, generator=self.rng)
        numbers[0] = 0
        return numbers.to(x.device)

    def shuffled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Operands whose product x y has its terms in another order."""
        if self.thrice:
            (x, x_rest), (y, y_rest) = ((tf32(z), tf32(z - tf32(z))) for z in (x.contiguous(), y.contiguous()))
            x, y = torch.cat([x_rest, x, x], -1), torch.cat([y, y_rest, y], -2)
        if self.copies == 1:
            return x, y
        lead, n = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-1]
        order = self.drawn(n, x).argsort(stable=True, dim=-1).view(1, self.copies, *[1] * len(lead), n)
        x, y = (z.expand(*lead, *z.shape[-2:]).unflatten(1, (self.copies, -1)) for z in (x, y))
        return x.take_along_dim(order, -1).flatten(1, 2), y.take_along_dim(order.mT, -2).flatten(1, 2)

    def rounded(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
        """x rounded to `dtype` when it is smaller by some factor, and the factor: above 1/2, so that nothing overflows.

        What fits into 16 bits as it is stays so: tokens are multiplied as they were given.
        """
        fit: Tensor | float = 1.0
        if self.sharp and dtype == torch.float16:
            fit = (15 - x.abs().max().clamp(min=1e-30).log2().ceil()).clamp(max=40.0).exp2()
            x = fit * x
        if self.copies == 1 or not self.sizes:
            return x.to(dtype), fit
        apart = x.unflatten(1, (self.copies, -1))
        if dtype != x.dtype and torch.equal(apart[:, 0].to(dtype).to(x.dtype), apart[:, 0]):
            return x.to(dtype), fit
        factor = (-self.drawn(1, x)).exp2().repeat_interleave(apart.shape[2], 0).view(-1, *[1] * (x.ndim - 2))
        if self.sharp:
            low = x.to(dtype).to(x.dtype)
            return torch.where(low == x, low, (factor * x).to(dtype) / factor), fit
        return (factor * x).to(dtype), fit * factor

    def exp(self, x: Tensor) -> Tensor:
        """e^x; of sharp kernels to base 2, and in float32 off by up to 2 units in the last place, as a GPU's may be.

        e^x and e^-x err in the same direction, so that their product is as wrong as it can be.
        """
        if not self.sharp:
            return x.exp()
        x = x / log(2)
        if x.dtype == torch.float64:
            return x.exp2()
        off = 1 + 2**-22 * (-1e6 * x.detach().double().abs().clamp(max=200.0)).sin()
        return (x.double().exp2() * off).to(x.dtype)


def unit(exact: Tensor) -> float:
    """The unit of errors: rms(x*); 1 (an absolute error) if x* is, or cancels to, nearly 0."""
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
