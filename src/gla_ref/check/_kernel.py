"""A stranger's kernel under the contract: its conventions, results of the right kind (appendix "Check your kernel")."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ._cases import convert
from ._mechanisms import MECHANISMS, Kind

SECONDS = 60.0  # a call's time limit, unless one is given
OPTIONS = ("scale", "initial_state", "cu_seqlens")  # the contract's; a function may lack some


OfCall = Literal["not covered", "raises", "breaks", "hangs", "none", "type", "shape", "dtype", "device"]
OfResults = Literal["modified", "differs", "overwritten", "gradient"]
OfWay = Literal["no_grad", "moved", "dtype before", "twice", "interleaved", "nested", "stateless", "frozen"]


class Finding(Exception):
    """Something wrong with a call, its results or a way of calling; `quantity` is what it is about.

    `when` says in which way of calling alone a result is wrong; the report makes the message of that.
    """

    def __init__(self, kind: OfCall | OfResults | OfWay, message: str = "", quantity: str = "call", when: str = ""):
        super().__init__(message)
        self.kind, self.quantity, self.when = kind, quantity, when


class NotClaimed(Exception):
    """For an adapter to raise where its kernel makes no claim: the case is reported as not covered."""


def device_of(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: this machine has no such device, or this PyTorch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except Exception as reason:  # of many types, one a kind of device
        raise ValueError(f"device: expected one of this machine, such as cpu or cuda, got {name}") from reason
    return device


@dataclass(frozen=True)
class Convention:
    """How a kernel wants its arguments; results and gradients are turned back to the book's convention."""

    layout: str = "bthd"
    state: str = "kv"
    gate: str = "log"
    forward_only: bool = False

    def __post_init__(self):
        known = {"layout": ("bthd", "bhtd"), "state": ("kv", "vk"), "gate": ("log", "log2", "alpha")}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: expected one of {values}, got {getattr(self, name)!r}")

    def tokens(self, x: Tensor) -> Tensor:
        return x if self.layout == "bthd" else x.transpose(1, 2)

    def states(self, x: Tensor, kind: Kind) -> Tensor:
        if kind.cache:
            return self.tokens(x)
        return x if self.state == "kv" else x.mT

    def gates(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        return convert(g, self.gate).to(dtype)


def checked(name: str, x: object, shape: torch.Size, dtypes: list[torch.dtype], device: torch.device) -> Tensor:
    """Return a kernel's result x if its type, shape, dtype and device are those expected; raise a Finding if not."""
    if not isinstance(x, Tensor):
        raise Finding("type", f"expected a tensor, got {type(x).__name__}", name)
    if x.shape != shape:
        raise Finding("shape", f"expected {list(shape)}, got {list(x.shape)}", name)
    if x.dtype not in dtypes:
        raise Finding("dtype", f"expected {' or '.join(dict.fromkeys(map(str, dtypes)))}, got {x.dtype}", name)
    if x.device != device:
        raise Finding("device", f"expected {device}, got {x.device}", name)
    return x


@dataclass(frozen=True)
class Kernel:
    """A function, what it computes, how it wants to be called, where it runs, for how long, and in which dtypes.

    `races` is how many calls of one case look for a rare race.
    """

    fn: Callable
    mechanism: str
    how: Convention
    device: torch.device
    seconds: float
    dtypes: tuple[torch.dtype, ...] = ()
    races: int = 0

    @property
    def kind(self) -> Kind:
        return MECHANISMS[self.mechanism]

    @cached_property
    def parameters(self) -> list[inspect.Parameter] | None:
        """None where there is no signature to be had; then it is taken for the contract's own."""
        try:
            return list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError):
            return None

    @cached_property
    def takes(self) -> set[str]:
        """The options that it takes, optional tensors too; `output_final_state` only if it names that."""
        if self.parameters is None:
            return {*OPTIONS}
        known = {*OPTIONS, *(() if getattr(self.fn, "over_ranks", False) else self.kind.optional)}
        named = {p.name for p in self.parameters} & {*known, "output_final_state"}
        return named | known if any(p.kind == p.VAR_KEYWORD for p in self.parameters) else named

    @property
    def never_given(self) -> list[str]:
        """The arguments that no call of the kit gives it."""
        named = [p.name for p in self.parameters or () if p.kind != p.VAR_KEYWORD]
        return [name for name in named[len(self.kind.arguments) :] if name not in self.takes]

    def reordered(self, name: str, y: Tensor) -> Tensor:
        """A tensor of a problem in the kernel's own order of axes; applied again, from there back."""
        if self.kind.tensors[name].role == "state":
            return self.how.states(y, self.kind)
        return self.how.tokens(y)

    def call(self, gates: dict[str, torch.dtype], *tensors, scale, initial_state, cu_seqlens, final=True):
        """The function under the contract: called in its own convention, its results checked and turned back.

        It gets the mechanism's tensors in their order, whatever it calls them, and each of the `gates` in its dtype.
        """
        kind, how = self.kind, self.how
        x = kind.by_name(tensors)
        past = kind.parts(initial_state)
        given = tuple(how.states(y, kind) for y in past)
        options = {"scale": scale, "initial_state": kind.whole(given)}
        options |= {"cu_seqlens": cu_seqlens, "output_final_state": final}
        own = {n: how.tokens(how.gates(y, gates[n]) if n in gates else y) for n, y in x.items()}
        options |= {n: own.pop(n) for n in kind.optional if n in own}
        result = self.fn(*own.values(), **{n: y for n, y in options.items() if n in self.takes})
        if result is None:
            raise Finding("none", "the function returned None")
        if not isinstance(result, tuple | list):
            result = (result, None)
        if len(result) < 2:
            raise Finding("type", f"expected (o, state), got {len(result)} values")
        o, state = result[:2]
        v = x["v"]
        o = how.tokens(checked("o", o, how.tokens(v).shape, [v.dtype], v.device))
        if state is None:
            return o, None

        sizes = kind.sizes(x)
        sizes["N"] = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        sizes["T0"] = sizes["T"] + (past[0].shape[1] if past and kind.cache else 0)
        dtypes = [v.dtype] if kind.cache else [torch.float32, *(y.dtype for y in past)]
        after = []
        for declared, y in zip(kind.mechanism.states, kind.parts(state), strict=True):
            right = torch.empty([sizes[a] for a in declared.axes.split()], device="meta")
            y = checked(declared.name, y, how.states(right, kind).shape, dtypes, v.device)
            after.append(how.states(y, kind))
        return o, kind.whole(after)
