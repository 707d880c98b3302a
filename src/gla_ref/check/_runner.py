"""Calling a stranger's kernel: its conventions, its time limit, and what may be wrong before any number is."""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._contract import state_shape
from ._budgets import Problem, evaluate
from ._cases import convert, held, optional
from ._mechanisms import Kind
from ._memory import placed, poisoned


class Finding(Exception):
    """Something wrong with the call itself; `kind` is one word for it, `quantity` what it is about."""

    def __init__(self, kind: str, message: str, quantity: str = "call"):
        super().__init__(message)
        self.kind, self.quantity = kind, quantity


class NotClaimed(Exception):
    """For an adapter to raise where its kernel makes no claim: the case is reported as not covered."""


@dataclass(frozen=True)
class Convention:
    """How a kernel wants its arguments; results and gradients are turned back to the book's convention."""

    layout: str = "bthd"
    state: str = "kv"
    gate: str = "log"
    forward_only: bool = False

    def __post_init__(self):
        known = {
            "layout": ("bthd", "bhtd"),
            "state": ("kv", "vk"),
            "gate": ("log", "log2", "alpha"),
        }
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


def accepted(fn: Callable) -> set[str]:
    """Which of the contract's options a function takes."""
    options = {"scale", "initial_state", "cu_seqlens", "output_final_state"}
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no signature to be had: the contract's own
        return options - {"output_final_state"}
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return options - {"output_final_state"} | options & {p.name for p in parameters}
    return options & {p.name for p in parameters}


def never_given(fn: Callable, kind: Kind) -> list[str]:
    """Which of a function's arguments no call of the kit has."""
    try:
        named = [p for p in inspect.signature(fn).parameters.values() if p.kind != p.VAR_KEYWORD]
    except (TypeError, ValueError):
        return []
    return [p.name for p in named[len(kind.arguments) :] if p.name not in accepted(fn)]


def adapt(
    fn: Callable, kind: Kind, how: Convention, takes: set[str], gates: dict[str, torch.dtype]
) -> Callable:
    """`fn` under the contract: called in its own convention, its results checked and turned back.

    It gets the mechanism's tensors in their order, whatever it calls them, and each of the `gates` in its dtype.
    """

    def checked(name, x, shape, dtypes, device):
        if not isinstance(x, Tensor):
            raise Finding("type", f"expected a tensor, got {type(x).__name__}", name)
        if tuple(x.shape) != tuple(shape):
            raise Finding("shape", f"expected {list(shape)}, got {list(x.shape)}", name)
        if x.dtype not in dtypes:
            raise Finding("dtype", f"expected {' or '.join(map(str, dtypes))}, got {x.dtype}", name)
        if x.device != device:
            raise Finding("device", f"expected {device}, got {x.device}", name)
        return x

    def call(*tokens, scale, initial_state, cu_seqlens, final=True):
        x = dict(zip(kind.arguments, tokens, strict=True))
        k, v = x["k"], x["v"]
        own = [how.gates(y, gates[n]) if n in gates else y for n, y in x.items()]
        named = {"scale": scale, "cu_seqlens": cu_seqlens, "output_final_state": final}
        if isinstance(initial_state, tuple):
            named["initial_state"] = tuple(how.states(x, kind) for x in initial_state)
        else:
            named["initial_state"] = (
                initial_state if initial_state is None else how.states(initial_state, kind)
            )
        result = fn(*map(how.tokens, own), **{n: x for n, x in named.items() if n in takes})
        if result is None:
            raise Finding("none", "the function returned None")
        if not isinstance(result, tuple | list):
            result = (result, None)
        if len(result) < 2:
            raise Finding("type", f"expected (o, state), got {len(result)} values")
        o, state = result[:2]
        checked("o", o, how.tokens(v).shape, [v.dtype], v.device)
        o = how.tokens(o)
        if state is None:
            return o, None
        if kind.cache:
            caches = zip(
                kind.states.values(),
                state,
                (k, v),
                initial_state or (k[:, :0], v[:, :0]),
                strict=True,
            )
            state = tuple(
                how.states(
                    checked(
                        n, y, how.states(torch.cat([p, x], 1), kind).shape, [x.dtype], x.device
                    ),
                    kind,
                )
                for n, y, x, p in caches
            )
            return o, state
        N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
        shape = state_shape(kind.mechanism, kind.sizes(x), N)
        shape = shape if how.state == "kv" else (*shape[:2], *shape[:1:-1])
        dtypes = [torch.float32]
        dtypes += [] if initial_state is None else [initial_state.dtype]
        (name,) = kind.states.values()
        return o, how.states(checked(name, state, shape, dtypes, v.device), kind)

    return call


def within(seconds: float, work: Callable, *args):
    """work(*args) in a thread that is left behind when its time is up."""
    box: list = []

    def target():
        try:
            box.append((work(*args), None))
        except BaseException as reason:  # a stranger's code may raise anything, SystemExit too
            box.append((None, reason))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise Finding("hangs", f"no result after {seconds:g} s")
    result, reason = box[0]
    if reason is not None:
        raise reason
    return result


def attempt(seconds: float, work: Callable, *args):
    """What work(*args) returns, or the Finding that it gives instead."""
    try:
        return within(seconds, work, *args)
    except Finding as finding:
        return finding
    except NotClaimed as reason:
        return Finding("not covered", str(reason))
    except BaseException as reason:
        where = traceback.extract_tb(reason.__traceback__)[-1]
        message = f"{type(reason).__name__}: {reason} ({where.name}, line {where.lineno})"
        return Finding("raises", message)


def same(x: Tensor | None, y: Tensor | None) -> bool:
    """Equal bit for bit, NaN to NaN, or both missing."""
    if x is None or y is None:
        return x is y
    return torch.equal(x.nan_to_num(nan=1e30), y.nan_to_num(nan=1e30))


def only_then(p: Problem, usual: dict, found: dict) -> list[str]:
    """The quantities of `found` that are missing or beyond their budget, and within it in the usual run."""

    def right(n, x):
        if x is None:
            return False
        error, budget = p.judge(n, x)
        return error <= budget

    return [n for n, x in found.items() if right(n, usual[n]) and not right(n, x)]


def observe(
    fn: Callable, kind: Kind, how: Convention, takes: set[str], p: Problem, seconds: float,
    device: torch.device,
) -> tuple:  # fmt: skip
    """({quantity: what the kernel made of it, on the CPU, or None}, [Finding, ...]) of one case.

    Two runs must be the same. Then come the other ways in which training and inference call a kernel: without
    gradients, with boundaries of sequences that have moved in their tensor, through its graph a second time, with
    inputs that need no gradient, without the final state, with another call before the backward pass, and once more
    before the results of the first call are used. A kernel that is forward only is called without gradients
    throughout; one whose runs differ in no other way, since it would differ there too.
    """
    names = [n for n in (*kind.arguments, *kind.states) if n in p.inputs]
    dtypes = {n: held(kind, n, p.case, p.dtypes["o"]) for n in p.inputs}
    gates = {n: dtypes[n] for n in kind.named("gate")}
    if how.gate != "log":  # kept finer until the kernel's own convention is made of them
        dtypes |= dict.fromkeys(gates, torch.float32)
    x = {n: y.to(dtypes[n]) for n, y in p.inputs.items()}

    def own(n, y):
        """In the kernel's own order of axes, and from there back."""
        return how.states(y, kind) if kind.tensors[n].role == "state" else how.tokens(y)

    x = {n: y.to(device) for n, y in x.items()}
    x = {
        n: own(n, placed(own(n, y).contiguous(), p.case.strides, i))
        for i, (n, y) in enumerate(x.items())
    }
    before = {n: y.clone() for n, y in x.items()}
    call, findings = adapt(fn, kind, how, takes, gates), []
    other = {n: y.roll(1, 1) for n, y in x.items()} if p.case.frozen else {}

    def work(gradients: bool, options: dict):
        with poisoned(str(device)), torch.set_grad_enabled(gradients):
            found = evaluate(**{"fn": call, "kind": kind, "x": x, "case": p.case} | options)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return {n: y if y is None else y.to("cpu", copy=True) for n, y in found.items()}

    def overwritten(gradients: bool):
        """Which results of a call are not what they were after another one, on the inputs moved along by one."""
        with torch.set_grad_enabled(gradients):
            found = evaluate(call, kind, x, p.case)
            kept = {n: y if y is None else y.clone() for n, y in found.items()}
            evaluate(call, kind, other, p.case)
            return [n for n, y in found.items() if not same(y, kept[n])]

    inference = {"frozen": names}  # activations need no gradients then
    runs, options = [], inference if how.forward_only else {}
    for _ in range(2):
        runs.append(attempt(seconds, work, not how.forward_only, options))
        if isinstance(runs[-1], Finding):
            may = optional(kind, p.case)
            if may and runs[-1].kind in ("raises", "dtype"):
                return {}, [Finding("not covered", may)]
            return {}, runs[-1:]
    usual, again = runs
    differ = [n for n, y in usual.items() if not same(y, again[n])]
    if how.forward_only:
        usual |= {f"d{n}": None for n in names}
    once = how.forward_only or differ
    ways = [] if once else [("no_grad", "under torch.no_grad()", False, inference)]
    if p.case.ends and "cu_seqlens" in takes and not differ:
        when = "where the boundaries in cu_seqlens have changed since a call before"
        ways.append(("moved", when, not how.forward_only, options | {"moved": True}))
    if usual["dq"] is not None and not once:
        ways.append(("twice", "in a second backward pass", True, {"backwards": 2}))
        if p.case.frozen:
            when = "where another call comes before the backward pass"
            between = functools.partial(evaluate, call, kind, other, p.case)
            ways.append(("interleaved", when, True, {"between": between}))
        if p.case.loss == "o" and "output_final_state" in takes:
            when = "where output_final_state is False"
            ways.append(("stateless", when, True, {"fn": functools.partial(call, final=False)}))
        for n in names if p.case.frozen else ():
            ways.append(("frozen", f"where {n} requires no gradient", True, {"frozen": [n]}))
            rest = [other for other in names if other != n]
            ways.append(("frozen", f"where only {n} requires a gradient", True, {"frozen": rest}))
    for way, when, gradients, options in ways:
        found = attempt(seconds, work, gradients, options)
        if isinstance(found, Finding):
            if (way, found.kind) == ("twice", "raises"):  # it says so: nobody is misled
                findings.append(Finding("not covered", "second backward pass"))
            else:
                findings.append(Finding(found.kind, f"{when}: {found}", found.quantity))
            if found.kind == "hangs":
                break
            continue
        if not gradients:
            found = {n: y for n, y in found.items() if n == "o" or n in kind.states.values()}
        if way == "stateless":
            found = {n: y for n, y in found.items() if n not in kind.states.values()}
        for n in only_then(p, usual, found):
            findings.append(Finding(way, f"wrong {when}, right otherwise", n))
    for gradients in {not how.forward_only, False} if p.case.frozen and not differ else ():
        found = attempt(seconds, overwritten, gradients)
        for n in [] if isinstance(found, Finding) else found:
            findings.append(Finding("overwritten", "another call writes into the results", n))
    changed = [n.replace("d ", "d") for n, y in x.items() if not torch.equal(y, before[n])]
    if changed:
        what = "the kernel wrote into what it was given"
        return usual, [Finding("modified", what, n) for n in changed]
    findings += [Finding("differs", "two runs on the same inputs differ", n) for n in differ]
    if usual["dq"] is None and any(usual[f"d{n}"] is not None for n in names):
        findings.append(Finding("gradient", "no gradient reaches q", "dq"))
    return usual, findings
