"""The contract of every form, apart from its mathematics: checks, precision, scale, states and packed sequences.

A form is written for a batch of equally long sequences, in one precision, with `scale` and the
state given, and its signature says so. `@form(...)` turns that body into a function that keeps the whole contract;
:func:`signature_of_form` is how that function is called.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .mechanisms import MECHANISMS, Argument, Mechanism


def check_tensors(
    tensors: dict[str, Tensor | None], arguments: Iterable[Argument], multiples: Iterable[tuple[str, str]] = ()
) -> dict[str, int]:
    """Check kinds, devices, dtypes and shapes; return the size of every axis.

    Args:
        tensors: the tensors given, by argument name; None stands for an argument left out.
        arguments: the declared arguments, all but states and optional ones required; an axis keeps one size
            throughout, and tokens have one dtype.
        multiples: pairs of axes, of which the first is a multiple of the second.

    Raises:
        TypeError: something is no tensor, or has a dtype that is not floating, or tokens differ in dtype, or a
            required tensor is missing.
        ValueError: a shape or device does not fit.
    """
    sizes: dict[str, tuple[int, str]] = {}
    first = None  # (name, tensor) of the first one given
    for name, shape, role, optional in arguments:
        x = tensors.get(name)
        if x is None and (optional or role == "state"):
            continue
        if not isinstance(x, Tensor):
            got = x if x is None else type(x).__name__
            raise TypeError(f"{name}: expected a torch.Tensor of shape [{shape}], got {got}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}")
        axes = shape.split()
        if x.ndim != len(axes):
            raise ValueError(f"{name}: expected {len(axes)} axes [{shape}], got shape {list(x.shape)}")
        for axis, size in zip(axes, x.shape, strict=True):
            if size == 0:
                raise ValueError(f"{name}: axis {axis} must not be empty, got shape {list(x.shape)}")
            want, source = sizes.setdefault(axis, (size, name))
            if size != want:
                raise ValueError(
                    f"{name}: expected shape [{shape}] with {axis} = {want} as in {source}, got {list(x.shape)}"
                )
        first = first or (name, x)
        if x.device != first[1].device:
            raise ValueError(f"{name}: expected device {first[1].device} as for {first[0]}, got {x.device}")
        if role == "token" and x.dtype != first[1].dtype:
            raise TypeError(f"{name}: expected dtype {first[1].dtype} as for {first[0]}, got {x.dtype}")
    for many, few in multiples:
        if sizes[many][0] % sizes[few][0]:
            (n, name), (m, source) = sizes[many], sizes[few]
            raise ValueError(f"{name}: expected {many} a multiple of {few} = {m} as in {source}, got {n}")
    return {axis: size for axis, (size, _) in sizes.items()}


def watched(x) -> bool:
    """Whether a part of PyTorch other than autograd follows operations on x: a compiler, a transform, a subclass."""
    return (
        torch.compiler.is_compiling()
        or isinstance(x, Tensor)
        and type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
    )


def has_values(x: Tensor | None) -> bool:
    """Whether the values of x can be checked: not of meta and fake tensors, nor where a tracer or vmap looks on."""
    if x is None or watched(x) or x.is_meta or torch.jit.is_tracing():
        return False
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # by make_fx
    return not traced and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_gate(name: str, g: Tensor | None) -> None:
    """Log gates lie in [-inf, 0]; anything else (NaN too) is a ValueError."""
    if has_values(g) and not (g <= 0).all():
        raise ValueError(f"{name}: log gates must lie in [-inf, 0], got a largest value of {g.max().item()}")


def check_strength(name: str, beta: Tensor | None) -> None:
    """Write strengths lie in [0, 2]; anything else (NaN too) is a ValueError."""
    if has_values(beta) and not ((beta >= 0) & (beta <= 2)).all():
        raise ValueError(f"{name}: write strengths must lie in [0, 2], got {beta.min().item()} to {beta.max().item()}")


def check_chunk(**sizes: int) -> None:
    """Chunk lengths are positive integers, each a multiple of the next (`C=64, c=16`)."""
    outer = None
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: expected a chunk length of at least 1, got {size!r}")
        if outer and outer[1] % size:
            raise ValueError(f"{name}: expected a divisor of {outer[0]} = {outer[1]}, got {size}")
        outer = name, size


def check_cu_seqlens(cu_seqlens: Tensor | None, B: int, T: int, *, values: bool = True) -> list[int] | None:
    """Return the sequence boundaries `[0, ..., T]` of a packed batch as integers, or None.

    With `values=False` they are not looked at (that would wait for a GPU), and None is returned.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor, got {got}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [N_seq + 1], N_seq >= 1, got {list(cu_seqlens.shape)}")
    if B != 1:
        raise ValueError(f"cu_seqlens: packed sequences need batch size B = 1, got B = {B}")
    if not values:
        return None
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or any(b < a for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cu_seqlens: expected to rise from 0 to T = {T} without falling, got {ends}")
    return ends


def check_scale(scale: float | None, K: int) -> float:
    """Return `scale`, or K^-0.5 when it is None."""
    return K**-0.5 if scale is None else check_number(scale)


def check_number(scale: float) -> float:
    """Return a scale that is not None."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise TypeError(f"scale: expected a finite number or None, got {scale!r}")
    return float(scale)


def outside_autocast(*tensors) -> contextlib.AbstractContextManager:
    """A context without torch.autocast, which would multiply matrices in 16 bits, for the device of these tensors."""
    kind = next((x.device.type for x in tensors if isinstance(x, Tensor)), "meta")
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The precision that a reference works in: that of its widest input, and at least float32."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors if x is not None), torch.float32)


def check_state(name: str, state: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A state is float32 or float64, of this shape `[N_seq, H, K, V]`, on the device of the other tensors."""
    if not isinstance(state, Tensor) or state.dtype not in (torch.float32, torch.float64):
        got = state.dtype if isinstance(state, Tensor) else type(state).__name__
        raise TypeError(f"{name}: expected a float32 or float64 tensor, got {got}")
    if tuple(state.shape) != shape:
        raise ValueError(f"{name}: expected shape [N_seq, H, K, V] = {list(shape)}, got {list(state.shape)}")
    if state.device != device:
        raise ValueError(f"{name}: expected device {device}, got {state.device}")


def state_or_zeros(name: str, state: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The state, checked, in the precision of `like`: zeros when None was given."""
    if state is None:
        return like.new_zeros(shape)
    check_state(name, state, shape, like.device)
    return state.to(like.dtype)


def state_shape(mechanism: Mechanism, sizes: dict[str, int], N: int) -> tuple[int, ...]:
    """The sizes of the one state of a linear mechanism, of N sequences."""
    (state,) = mechanism.states
    return tuple((sizes | {"N": N})[axis] for axis in state.axes.split())


def per_sequence(body: Callable, ends: list[int] | None, tokens: dict, states: dict) -> tuple[tuple, tuple]:
    """Call `body` once for the batch or, when packed, once for each sequence, and join what it returns.

    `tokens` are tensors `[B, T, ...]`, `states` tensors `[N_seq, ...]`; `body` returns a tuple of token
    tensors and a tuple of state tensors (an entry may be None). An empty sequence is not computed: its
    state, the last of `states`, comes out as it went in.
    """
    if ends is None:
        return body(**tokens, **states)
    outs, finals = [], []
    for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        here = {name: x[n : n + 1] for name, x in states.items()}
        if a == b:
            finals.append(tuple(here.values())[-1:])
            continue
        out, final = body(**{name: x if x is None else x[:, a:b] for name, x in tokens.items()}, **here)
        outs.append(out)
        finals.append(final)

    def join(parts, dim):
        return tuple(None if xs[0] is None else torch.cat(xs, dim) for xs in zip(*parts, strict=True))

    return join(outs, 1), join(finals, 0)


def run(
    kind: Mechanism, body: Callable, given: dict, states: Iterable[str] = ("initial_state",)
) -> tuple[tuple, tuple]:
    """Check the arguments of a call, then call `body` as :func:`per_sequence` does.

    It gets every tensor in the compute precision, `states` as tensors, `scale` as a number, and the other options.
    """
    tokens = {x.name: given.pop(x.name) for x in kind.arguments}
    sizes = check_tensors(tokens, kind.arguments, kind.multiples)
    for name in kind.named("gate"):
        check_gate(name, tokens[name])
    for name in kind.named("strength"):
        check_strength(name, tokens[name])
    check_chunk(**{name: given[name] for name in ("C", "c") if name in given})
    given["scale"] = check_scale(given["scale"], sizes["K"])
    ends = check_cu_seqlens(given.pop("cu_seqlens"), sizes["B"], sizes["T"])
    states = {name: given.pop(name) for name in states}
    dtype = compute_dtype(*tokens.values(), *(x for x in states.values() if isinstance(x, Tensor)))
    tokens = {name: x if x is None else x.to(dtype) for name, x in tokens.items()}
    shape = state_shape(kind, sizes, sizes["B"] if ends is None else len(ends) - 1)
    states = {name: state_or_zeros(name, x, shape, tokens["v"]) for name, x in states.items()}
    return per_sequence(functools.partial(body, **given), ends, tokens, states)


def signature_of_form(body: Callable, **unseen) -> inspect.Signature:
    """How a form is called whose mathematics is `body`.

    A keyword that the body has no default for may be left out and is None then. `unseen` has further keywords with
    their defaults, which the body does not get.
    """
    own = inspect.signature(body)
    typed = own.return_annotation is not own.empty

    def keyword(name: str, default, annotation) -> inspect.Parameter:
        annotation = annotation | None if typed else own.empty
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    parameters = list(own.parameters.values())
    for n, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            parameters[n], last = keyword(p.name, None, p.annotation), n + 1
    parameters[last:last] = [keyword(name, default, Tensor) for name, default in unseen.items()]
    return own.replace(parameters=parameters)


def form(mechanism: str | Mechanism) -> Callable:
    """Make a form of a linear mechanism keep the contract (one state `[N_seq, H, K, V]`).

    The decorated body gets every tensor of the mechanism in the compute precision, `scale` as a number and
    `initial_state` as a tensor; it never sees `cu_seqlens`. It is called once for each packed sequence.
    """
    kind = MECHANISMS[mechanism] if isinstance(mechanism, str) else mechanism

    def decorate(body: Callable) -> Callable:
        signature = signature_of_form(body, cu_seqlens=None)

        @functools.wraps(body)
        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)

            def one(**given):
                o, S = body(**given)
                return (o,), (S,)

            with outside_autocast(*given.values()):
                (o,), (S,) = run(kind, one, dict(given))
            return o.to(given["v"].dtype), S

        wrapper.__signature__ = signature
        return wrapper

    return decorate
