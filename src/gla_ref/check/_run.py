"""One case of a stranger's kernel: every way of calling it, within its time (appendix "Check your kernel")."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ._budgets import Problem
from ._cases import SUB, held, optional
from ._kernel import Finding, Kernel, NotClaimed
from ._memory import placed, poisoned
from .oracle import evaluate

KIT = Path(__file__).parent
LIBRARIES = tuple(Path(torch.__file__).parents[1] / name for name in ("torch", "triton", "einops"))
AGAIN = 8  # more calls as usual before a failure in another way is believed
REPEATED = 4  # more calls in that other way
BETWEEN = 8  # other calls between a forward pass and its backward pass: of a ring of so many buffers none is left
STOPS, ENDS = 0.2, 2.0  # seconds that a thread may take to stop, and that all may take together when Python ends
LEFT: list[threading.Thread] = []  # those that did not stop
VARIES = "equal calls give different results{}: a race, memory not written, or something kept between calls"
WROTE = "the kernel wrote into what it was given"
Found = dict[str, Tensor | None]  # what a kernel made of each quantity of a case


def within(seconds: float, work: Callable, *args):
    """work(*args) in a thread that is stopped when its time is up, or left behind where it cannot be stopped."""
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
        stop(thread)
        raise Finding("hangs", f"no result after {seconds:g} s")
    result, reason = box[0]
    if reason is not None:
        raise reason
    return result


def stop(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread: it comes when the thread is next in Python code, not in a library's.

    A thread that takes Python's lock when Python is ending aborts the process.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    thread.join(STOPS)
    if thread.is_alive():
        LEFT.append(thread)


@atexit.register
def wait() -> None:
    """Give the threads left behind a moment more to end before Python does."""
    end = time.monotonic() + ENDS
    for thread in LEFT:
        thread.join(max(0.0, end - time.monotonic()))


def attempt(seconds: float, work: Callable, *args):
    """What work(*args) returns, or the Finding that it gives instead."""
    try:
        return within(seconds, work, *args)
    except Finding as finding:
        return finding
    except NotClaimed as reason:
        return Finding("not covered", str(reason))
    except KeyboardInterrupt:  # a reader's, which comes to this thread; no kernel's
        raise
    except BaseException as reason:
        if "written-to tensor" in str(reason):  # one with strides of 0, which nobody may write to
            return Finding("modified", f"{WROTE}: {reason}")
        return Finding("raises", f"{type(reason).__name__}: {reason} ({raised_at(reason)})")


def raised_at(reason: BaseException) -> str:
    """The last line of the kernel's author that led there: not of a library, which they only called, nor of the kit."""
    frames = [(Path(f.filename), f) for f in traceback.extract_tb(reason.__traceback__)]
    libraries = [path for path, _ in frames if any(path.is_relative_to(library) for library in LIBRARIES)]
    own = [(path, f) for path, f in frames if path.parent != KIT and path not in libraries]
    if not own:
        return "in the backward pass" if any("autograd" in path.parts for path in libraries) else "in the call"
    path, f = own[-1]
    return f"{f.name}, line {f.lineno} of {path.name}"


def same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are missing, or equal in every element; NaN equals NaN."""
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and bool(((x == y) | x.isnan() & y.isnan()).all())


def only_then(p: Problem, usual: Found, found: Found) -> list[str]:
    """The quantities of `found` that are missing or beyond their budget, and within it in the usual run."""

    def right(n, x):
        if x is None:
            return False
        error, budget = p.judge(n, x)
        return error <= budget

    return [n for n, x in found.items() if not right(n, x) and right(n, usual[n])]


@dataclass(frozen=True)
class Way:
    """Another way in which training or inference calls a kernel; where it is right as usual, it must be right so too.

    Attributes:
        kind: the word for a finding.
        when: the same in a message.
        options: of `evaluate`.
        besides: options of a call that must be right where the way is to blame; none for the usual call.
        gradients: whether they are recorded.
        lacks: quantities that it does not return.
        may_raise: what is not covered where it raises; empty where it must not.
    """

    kind: str
    when: str
    options: dict = field(default_factory=dict)
    besides: dict | None = None
    gradients: bool = True
    lacks: tuple[str, ...] = ()
    may_raise: str = ""


class Trial:
    """A case as one kernel meets it: the tensors that it is given, and its calls.

    Where a tensor is set `apart`, it alone has the case's strides, and the others are contiguous.
    """

    def __init__(self, kernel: Kernel, p: Problem, apart: str | None = None):
        self.kernel, self.kind, self.p = kernel, kernel.kind, p
        self.names = [n for n in (*self.kind.arguments, *self.kind.states) if n in p.inputs]
        dtypes = {n: held(self.kind, n, p.case, p.dtypes["o"]) for n in p.inputs}
        gates = {n: dtypes[n] for n in self.kind.named("gate")}
        if kernel.how.gate != "log":  # kept finer until the kernel's own convention is made of them
            dtypes |= dict.fromkeys(gates, torch.float32)
        self.x = {}
        for i, (n, y) in enumerate(p.inputs.items()):
            y = kernel.own(n, y.to(dtypes[n]).to(kernel.device)).contiguous()
            strides = p.case.strides if apart in (None, n) else "contiguous"
            self.x[n] = kernel.own(n, placed(y, strides, i))
        self.other = {n: y.roll(1, 1) for n, y in self.x.items()} if p.case.frozen else {}
        self.call = partial(kernel.call, gates)
        # activations need no gradients in inference
        self.inference = {"frozen": self.names}
        self.usual = self.inference if kernel.how.forward_only else {}

    def run(self, gradients: bool, options: dict) -> Found:
        """Every quantity of one call, on the CPU."""
        device = self.kernel.device
        with poisoned(str(device)), torch.set_grad_enabled(gradients):
            given = {"fn": self.call, "kind": self.kind, "x": self.x, "case": self.p.case}
            found = evaluate(**given | options)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return {n: y if y is None else y.to("cpu", copy=True) for n, y in found.items()}

    def another(self) -> torch.dtype | None:
        """The dtype of a call before the usual ones, if the kernel claims another one."""
        usual = self.p.dtypes["o"]
        low = torch.bfloat16 if usual == torch.float32 else torch.float32
        over_ranks = hasattr(self.kernel.fn, "mistakes")
        return low if low in self.kernel.dtypes and not over_ranks else None

    def more(self, n: str, y: Tensor, entries: int) -> Tensor:
        """A tensor with so many more batch entries, the first one again."""
        y = self.kernel.own(n, y)
        return self.kernel.own(n, torch.cat([y, *[y[:1].detach()] * entries]))

    def larger(self, entries: int, low: torch.dtype | None, *tokens, initial_state, **options):
        """The results of a call with so many more batch entries, if a dtype is given after a call in that dtype.

        No case has a batch of such a size, so no earlier call had these shapes.
        """
        kind, case = self.kind, self.p.case
        if low:
            x = {n: self.more(n, y, entries).to(held(kind, n, case, low)) for n, y in self.x.items()}
            call = partial(self.kernel.call, dict.fromkeys(kind.named("gate"), low))
            with suppress(Exception):  # a kernel may refuse a dtype
                evaluate(call, kind, x, case)
        past = () if initial_state is None else initial_state if kind.cache else (initial_state,)
        past = tuple(self.more(n, y, entries) for n, y in zip(kind.states, past, strict=False))
        given = [self.more(n, y, entries) for n, y in zip(kind.arguments, tokens, strict=True)]
        past = None if not past else past if kind.cache else past[0]
        o, state = self.call(*given, initial_state=past, **options)
        B = len(tokens[0])
        if state is None:
            return o[:B], None
        return o[:B], tuple(y[:B] for y in state) if kind.cache else state[:B]

    def others(self) -> None:
        """Several calls of the same sizes, on the inputs moved along by one, every second with its backward pass."""
        for i in range(BETWEEN):
            evaluate(self.call, self.kind, self.other, self.p.case, backwards=i % 2)

    def overwritten(self, gradients: bool) -> list[str]:
        """Which results of a call are not what they were after another one, on the inputs moved along by one."""
        with torch.set_grad_enabled(gradients):
            found = evaluate(self.call, self.kind, self.x, self.p.case)
            kept = {n: y if y is None else y.clone() for n, y in found.items()}
            evaluate(self.call, self.kind, self.other, self.p.case)
            return [n for n, y in found.items() if not same(y, kept[n])]

    def ways(self, differentiable: bool) -> Iterator[Way]:
        """Those that a case has; a kernel that is forward only is called without gradients throughout."""
        case, takes, states = self.p.case, self.kernel.takes, tuple(self.kind.states.values())
        forward_only = self.kernel.how.forward_only
        if not forward_only:
            yield Way("no_grad", "under torch.no_grad()", self.inference, gradients=False)
        if case.ends and "cu_seqlens" in takes:
            when = "where the boundaries in cu_seqlens have changed since a call before"
            yield Way("moved", when, self.usual | {"moved": True}, gradients=not forward_only)
        if case.frozen and (low := self.another()):
            when = f"after a call of the same sizes in {str(low).removeprefix('torch.')}"
            after, fresh = ({"fn": partial(self.larger, *how)} for how in ((1, low), (2, None)))
            yield Way("dtype before", when, self.usual | after, self.usual | fresh, gradients=not forward_only)
        if forward_only or not differentiable:
            return
        when = "in a second backward pass"  # a kernel may refuse it: it says so, nobody is misled
        yield Way("twice", when, {"backwards": 2}, may_raise="second backward pass")
        if case.frozen:
            when = f"where {BETWEEN} other calls come before the backward pass"
            yield Way("interleaved", when, {"between": self.others})
            when = f"in a second backward pass before which come {BETWEEN} other calls"
            nested = {"backwards": 2, "amid": self.others}
            yield Way("nested", when, nested, may_raise="second backward pass")
        if case.loss == "o" and "output_final_state" in takes:
            without = {"fn": partial(self.call, final=False)}
            yield Way("stateless", "where output_final_state is False", without, lacks=states)
        for n in self.names if case.frozen else ():
            rest = [other for other in self.names if other != n]
            yield Way("frozen", f"where {n} requires no gradient", {"frozen": [n]})
            yield Way("frozen", f"where only {n} requires a gradient", {"frozen": rest})

    def believed(self, way: Way, usual: Found, found: Found) -> Iterator[Finding]:
        """Findings of a way of calling that fails every time; one that fails at times is a race."""

        def wrong(found: Found) -> list[str]:
            return only_then(self.p, usual, {n: x for n, x in found.items() if n not in way.lacks})

        names = wrong(found)
        if names and way.besides:
            usually = attempt(self.kernel.seconds, self.run, way.gradients, way.besides)
            names = [] if isinstance(usually, Finding) else [n for n in names if n not in wrong(usually)]
        if not names:
            return
        again = [attempt(self.kernel.seconds, self.run, way.gradients, way.options) for _ in range(REPEATED)]
        calls = [names, *(wrong(found) for found in again if not isinstance(found, Finding))]
        for n in names:
            times = sum(n in those for those in calls)
            if times < len(calls):
                yield Finding("differs", VARIES.format(f" (wrong in {times} of {len(calls)} calls {way.when})"), n)
            else:
                yield Finding(way.kind, f"wrong {way.when}, right otherwise", n)

    def rare(self, usual: Found) -> tuple[Found | None, int, int]:
        """The first of many calls that differs from the usual one, how many differ, and how many were made."""
        forward = self.p.case.T < SUB
        options = self.usual | {"backwards": int(not forward)}
        state: dict = {"other": None, "differ": 0, "calls": 0}
        gradients = not self.kernel.how.forward_only

        def calls() -> None:  # in one thread, whose start would take as long as a call
            for _ in range(self.kernel.races):
                found = self.run(gradients, options)
                state["calls"] += 1
                made = usual | {name: y for name, y in found.items() if not (forward and name.startswith("d"))}
                if any(not same(y, usual[name]) for name, y in made.items()):
                    state["other"] = state["other"] or made
                    state["differ"] += 1

        attempt(self.kernel.seconds * self.kernel.races, calls)
        return state["other"], state["differ"], state["calls"]

    def tried(self, usual: Found) -> Iterator[Finding]:
        """What is wrong in the other ways and right, or there, as usual."""
        written, failed = self.written(), set()
        for way in self.ways(usual["dq"] is not None):
            if way.kind == "nested" and failed & {"twice", "interleaved"}:
                continue
            found = attempt(self.kernel.seconds, self.run, way.gradients, way.options)
            if not isinstance(found, Finding):
                between = way.kind in ("interleaved", "nested")
                for f in self.believed(way, usual, found):
                    if not between or f.quantity not in written:
                        failed.add(way.kind)
                        yield f
            elif way.may_raise and found.kind == "raises":
                failed.add(way.kind)
                yield Finding("not covered", way.may_raise)
            else:
                yield Finding(found.kind, f"{way.when}: {found}", found.quantity)
                if found.kind == "hangs":  # the next ones would, too
                    break
        for n in written:
            yield Finding("overwritten", "another call writes into the results", n)

    def written(self) -> list[str]:
        """Which results another call writes into."""
        names: dict[str, None] = {}
        for gradients in (False, True) if self.p.case.frozen else ():
            if gradients and self.kernel.how.forward_only:
                continue
            found = attempt(self.kernel.seconds, self.overwritten, gradients)
            names |= dict.fromkeys([] if isinstance(found, Finding) else found)
        return [*names]


def nearest(p: Problem, n: str, runs: list[Found]) -> Tensor | None:
    """Of several results the one with the least error."""
    given = [found[n] for found in runs if found[n] is not None]
    return min(given, key=lambda x: p.judge(n, x)[0], default=None)


def observe(kernel: Kernel, p: Problem) -> tuple[Found, list[Finding]]:
    """What the kernel made of each quantity of a case (nothing where it gave no result), and what is wrong with calls.

    Two runs must be the same, and many more in a case that is called `often`. Then come the other ways of calling it.
    A failure in another way may come in any call now and then: several more calls are made as usual. If they differ,
    the report says only that, and judges the best of them. A kernel that writes into its inputs sees other inputs ever
    after, so no other finding counts.
    """
    trial = Trial(kernel, p)
    before = {n: y.clone() for n, y in trial.x.items()}
    none = {f"d{n}": None for n in trial.names} if kernel.how.forward_only else {}

    def calls(n: int) -> Iterator[Found | Finding]:
        for _ in range(n):
            found = attempt(kernel.seconds, trial.run, not kernel.how.forward_only, trial.usual)
            failed = isinstance(found, Finding)
            yield found if failed else found | none
            if failed and found.kind in ("hangs", "not covered"):
                return

    runs, findings = [*calls(2)], []
    if all(isinstance(found, Finding) for found in runs):
        may = optional(kernel.kind, p.case)
        refused = may and runs[0].kind in ("raises", "dtype")
        return {}, [Finding("not covered", may) if refused else runs[0]]
    rate = ""
    if not varying(runs) and p.case.often:
        other, differ, n = trial.rare(runs[0])
        runs += [other | none] if other else []
        rate = f" (in {differ} of {n} calls)" if other else ""
    if not varying(runs):
        findings = [*trial.tried(runs[0])]
        if any(f.kind != "not covered" for f in findings):
            runs += calls(AGAIN)
    differ = varying(runs)
    if differ:
        said = VARIES.format(rate)
        findings = [Finding("differs", f"{said}{f': {differ[n]}' if differ[n] else ''}", n) for n in differ]
    runs = [found for found in runs if not isinstance(found, Finding)]
    usual = runs[0] | {n: nearest(p, n, runs) for n in differ if n in runs[0]}
    changed = [n for n, y in trial.x.items() if not torch.equal(y, before[n])]
    if changed:
        return usual, [Finding("modified", WROTE, n.replace("d ", "d")) for n in changed]
    if usual["dq"] is None and any(usual[f"d{n}"] is not None for n in trial.names):
        findings.append(Finding("gradient", "no gradient reaches q", "dq"))
    return usual, findings


def varying(runs: list[Found | Finding]) -> dict[str, str]:
    """The quantities in which equal calls differ; or that some of them gave none, and why."""
    first, *rest = (found for found in runs if not isinstance(found, Finding))
    failed = [found for found in runs if isinstance(found, Finding)]
    found = {n: "" for n, y in first.items() if not all(same(y, other[n]) for other in rest)}
    return found | {failure.quantity: str(failure) for failure in failed[:1]}
