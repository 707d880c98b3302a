"""One case of a stranger's kernel: its tensors, and every way of calling it in time (appendix "Check your kernel")."""

import atexit
import contextlib
import ctypes
import math
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ._cases import SUB, held, optional
from ._kernel import Finding, Kernel, NotClaimed, OfWay
from .oracle import Problem, evaluate

KIT = Path(__file__).parent
LIBRARIES = tuple(Path(torch.__file__).parents[1] / name for name in ("torch", "triton", "einops"))
AGAIN = 8  # more calls as usual before a failure in another way is believed
REPEATED = 4  # more calls in that other way
BETWEEN = 8  # other calls between a forward pass and its backward pass: of a ring of so many buffers none is left
STOPS, ENDS = 0.2, 2.0  # seconds that a thread may take to stop, and that all may take together when Python ends
STUCK: list[threading.Thread] = []  # those that did not stop
VARIES = "equal calls give different results{}: a race, memory not written, or something kept between calls"
WROTE = "the kernel wrote into what it was given"
OVERLAPS = "written-to tensor"  # in PyTorch's error, which has no type of its own, on writing where strides are 0
NO_GRAD = "under torch.no_grad()"
AROUND = 2**16  # elements of NaN before and behind a tensor: of a tile that reaches beyond its last row, too
FUSED = 3  # tensors that a projection makes at once: q, k and v, the first of a call
Results = dict[str, Tensor | None]  # a kernel's result for each quantity of a case


def within(seconds: float, work: Callable, *args):
    """work(*args) in a thread that is stopped when its time is up, or left behind where it cannot be stopped."""
    box: list = []
    mode = torch.get_deterministic_debug_mode()

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
        torch.set_deterministic_debug_mode(mode)  # it may stop with this set, and before it would reset it
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
        STUCK.append(thread)


@atexit.register
def wait() -> None:
    """Give the threads left behind a moment more to end before Python does."""
    end = time.monotonic() + ENDS
    for thread in STUCK:
        thread.join(max(0.0, end - time.monotonic()))


def attempt(seconds: float, work: Callable, *args):
    """Return the result of work(*args), or the Finding that it gives instead."""
    try:
        return within(seconds, work, *args)
    except Finding as finding:
        return finding
    except NotClaimed as reason:
        return Finding("not covered", str(reason))
    except KeyboardInterrupt:  # a reader's, which comes to this thread; no kernel's
        raise
    except BaseException as reason:
        if OVERLAPS in str(reason):
            return Finding("modified", f"{WROTE}: {reason}")
        return Finding("raises", f"{type(reason).__name__}: {reason} ({raised_at(reason)})")


def broken(device: torch.device) -> str:
    """The error that ends all use of a device in this process, as a fault in a CUDA context does; empty if none."""
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError as reason:
        return "" if isinstance(reason, torch.OutOfMemoryError) else f"{type(reason).__name__}: {reason}".split("\n")[0]
    return ""


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


@dataclass(frozen=True)
class Way:
    """A second way to call a kernel, as training or inference does. If the usual call is right, this one must be.

    Attributes:
        kind: the word for a finding.
        when: the same in a message.
        options: of `evaluate`.
        control: options of a control call, which must be right for this way to be blamed; none for the usual call.
        gradients: whether they are recorded.
        lacks: quantities that it does not return.
        may_raise: what is not covered where it raises; empty where it must not.
    """

    kind: OfWay
    when: str
    options: dict = field(default_factory=dict)
    control: dict | None = None
    gradients: bool = True
    lacks: tuple[str, ...] = ()
    may_raise: str = ""


# -- memory ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def poisoned(device: str):
    """Uninitialised memory holds NaN: through PyTorch's own switch, and on a GPU in freed blocks too."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import PyTorch's compiler
        if torch.device(device).type == "cuda":
            blocks = [torch.full((n,), math.nan, device=device) for n in (1 << 10, 1 << 16, 1 << 22, 1 << 26)]
            del blocks
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def placed(x: Tensor, strides: str, i: int) -> Tensor:
    """Place these values in the midst of NaN: in order, rows apart (NaN between them), tokens apart, one element off a
    16-byte boundary, channels apart, or all along an axis of equal values at one address.

    How far apart, an odd number, differs for every tensor i of a call: one that takes another's strides reads NaN.
    """
    order, sizes, extra = [*range(x.ndim)], [*x.shape], 0
    if strides == "strided":
        order[:2], extra = [1, 0], x.shape[-1] + 2 * i + 1
    elif strides == "transposed":
        order[1], order[-1] = order[-1], order[1]
    elif strides == "expanded":
        sizes = [1 if x.narrow(d, 0, 1).expand_as(x).equal(x) else n for d, n in enumerate(sizes)]
    steps, n = [0] * x.ndim, 1
    for d in reversed(order):
        steps[d] = n
        n = n * sizes[d] + extra * (d == order[-1])
        n *= FUSED if strides == "fused" and d == 2 and i < FUSED else 1
    room = x.new_full((AROUND + n + AROUND,), math.nan)
    view = room.as_strided(sizes, steps, AROUND + (strides == "misaligned"))
    return view.copy_(x[tuple(slice(n) for n in sizes)]).expand_as(x)


# -- calls ----------------------------------------------------------------------------------------
class Trial:
    """A case as one kernel meets it: the tensors that it is given, and its calls.

    Where a tensor is set `apart`, it alone has the case's strides, and the others are contiguous.
    """

    def __init__(self, kernel: Kernel, p: Problem, apart: str | None = None):
        self.kernel, self.kind, self.p = kernel, kernel.kind, p
        self.names = [n for n in p.inputs if not n.startswith("d ")]
        dtypes = {n: held(self.kind, n, p.case, p.dtype) for n in p.inputs}
        gates = {n: dtypes[n] for n in self.kind.mechanism.named("gate") if n in dtypes}
        if kernel.how.gate != "log":  # kept finer until the kernel's own convention is made of them
            dtypes |= dict.fromkeys(gates, torch.float32)
        self.x = {}
        for i, (n, y) in enumerate(p.inputs.items()):
            y = kernel.reordered(n, y.to(dtypes[n]).to(kernel.device)).contiguous()
            strides = p.case.strides if apart in (None, n) else "contiguous"
            self.x[n] = kernel.reordered(n, placed(y, strides, i))
        self.other = {n: y.roll(1, 1) for n, y in self.x.items()} if p.case.frozen else {}
        self.call = partial(kernel.call, gates)
        # activations need no gradients in inference
        self.inference = {"frozen": self.names}
        self.forward_only = kernel.how.forward_only
        self.usual = self.inference if self.forward_only else {}

    def run(self, gradients: bool, options: dict) -> Results:
        """Every quantity of one call, on the CPU."""
        device = self.kernel.device
        with poisoned(str(device)), torch.set_grad_enabled(gradients):
            given = {"fn": self.call, "kind": self.kind, "x": self.x, "case": self.p.case}
            results = evaluate(**given | options)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            lacking = {f"d{n}": None for n in self.names if self.forward_only}
            return {n: y if y is None else y.to("cpu", copy=True) for n, y in results.items()} | lacking

    def attempt(self, gradients: bool, options: dict) -> Results | Finding:
        """The call's results within its time, or the finding that it gives instead."""
        return attempt(self.kernel.seconds, self.run, gradients, options)

    def as_usual(self) -> Results | Finding:
        """The call that all other ways are compared with."""
        return self.attempt(not self.forward_only, self.usual)

    def usual_calls(self, n: int) -> Iterator[Results | Finding]:
        """Usual calls, so many of them unless one hangs or is not claimed."""
        for _ in range(n):
            yield (results := self.as_usual())
            if isinstance(results, Finding) and results.kind in ("hangs", "not covered"):
                return

    def another(self) -> torch.dtype | None:
        """The dtype of a call before the usual ones, if the kernel claims another one."""
        low = torch.bfloat16 if self.p.dtype == torch.float32 else torch.float32
        return low if low in self.kernel.dtypes and not getattr(self.kernel.fn, "over_ranks", False) else None

    def more(self, n: str, y: Tensor, entries: int) -> Tensor:
        """A tensor with so many more batch entries, the first one again."""
        y = self.kernel.reordered(n, y)
        return self.kernel.reordered(n, torch.cat([y, *[y[:1].detach()] * entries]))

    def larger(self, entries: int, low: torch.dtype | None, *tokens, initial_state, **options):
        """The results of a call with so many more batch entries, if a dtype is given after a call in that dtype.

        No case has a batch of such a size, so no earlier call had these shapes.
        """
        kind, case = self.kind, self.p.case
        if low:
            x = {n: self.more(n, y, entries).to(held(kind, n, case, low)) for n, y in self.x.items()}
            call = partial(self.kernel.call, dict.fromkeys(kind.named("gate"), low))
            with contextlib.suppress(Exception):  # a kernel may refuse a dtype
                evaluate(call, kind, x, case)
        past = kind.parts(initial_state)
        past = tuple(self.more(n, y, entries) for n, y in zip(kind.states, past, strict=False))
        given = [self.more(n, y, entries) for n, y in zip(kind.arguments, tokens, strict=True)]
        o, state = self.call(*given, initial_state=kind.whole(past), **options)
        B = len(tokens[0])
        return o[:B], kind.whole([y[:B] for y in kind.parts(state)])

    def others(self) -> None:
        """Several calls of the same sizes, on the inputs moved along by one, every second with its backward pass."""
        for i in range(BETWEEN):
            evaluate(self.call, self.kind, self.other, self.p.case, backwards=i % 2)

    def overwritten(self, gradients: bool) -> list[str]:
        """The results of a call that another one changes, which is on the inputs moved along by one."""
        with torch.set_grad_enabled(gradients):
            results = evaluate(self.call, self.kind, self.x, self.p.case)
            kept = {n: y if y is None else y.clone() for n, y in results.items()}
            evaluate(self.call, self.kind, self.other, self.p.case)
            return [n for n, y in results.items() if not same(y, kept[n])]

    def ways(self, differentiable: bool) -> Iterator[Way]:
        """The other ways of calling a case; a kernel that is forward only is called without gradients throughout."""
        case, takes, states = self.p.case, self.kernel.takes, tuple(self.kind.states.values())
        if not self.forward_only:
            yield Way("no_grad", NO_GRAD, self.inference, gradients=False)
        if case.ends and "cu_seqlens" in takes:
            when = "where the boundaries in cu_seqlens have changed since a call before"
            yield Way("moved", when, self.usual | {"moved": True}, gradients=not self.forward_only)
        if case.frozen and (low := self.another()):
            when = f"after a call of the same sizes in {str(low).removeprefix('torch.')}"
            after, fresh = ({"fn": partial(self.larger, *how)} for how in ((1, low), (2, None)))
            yield Way("dtype before", when, self.usual | after, self.usual | fresh, gradients=not self.forward_only)
        if self.forward_only or not differentiable:
            return
        when = "in a second backward pass"  # a kernel may refuse it: it says so, nobody is misled
        yield Way("twice", when, {"backwards": 2}, may_raise="second backward pass")
        if case.frozen:
            when = f"where {BETWEEN} other calls come before the backward pass"
            yield Way("interleaved", when, {"between": self.others})
            when = f"in a second backward pass before which come {BETWEEN} other calls"
            nested = {"backwards": 2, "between": self.others}
            yield Way("nested", when, nested, may_raise="second backward pass")
        if case.loss == "o" and "output_final_state" in takes:
            without = {"fn": partial(self.call, final=False)}
            yield Way("stateless", "where output_final_state is False", without, lacks=states)
        for n in self.names if case.frozen else ():
            rest = [other for other in self.names if other != n]
            yield Way("frozen", f"where {n} requires no gradient", {"frozen": [n]})
            yield Way("frozen", f"where only {n} requires a gradient", {"frozen": rest})

    def wrong(self, way: Way, usual: Results, results: Results) -> list[str]:
        """The quantities that are right in the usual call, and in another way of calling wrong or missing."""

        def right(n, x):
            return x is not None and self.p.in_budgets(n, x) <= 1

        due = {n: x for n, x in results.items() if n not in way.lacks}
        return [n for n, x in due.items() if not right(n, x) and right(n, usual[n])]

    def blamed(self, way: Way, usual: Results, names: list[str]) -> list[str]:
        """Wrong quantities that the control call of the way, if it has one, makes right."""
        if not names or not way.control:
            return names
        control = self.attempt(way.gradients, way.control)
        return [] if isinstance(control, Finding) else [n for n in names if n not in self.wrong(way, usual, control)]

    def repeated(self, way: Way, usual: Results, names: list[str]) -> Iterator[Finding]:
        """Findings on wrong quantities: of the way if more such calls are all wrong, else of a race."""
        again = [self.attempt(way.gradients, way.options) for _ in range(REPEATED if names else 0)]
        calls = [names, *(self.wrong(way, usual, results) for results in again if not isinstance(results, Finding))]
        for n in names:
            times = sum(n in those for those in calls)
            if times < len(calls):
                yield Finding("differs", VARIES.format(f" (wrong in {times} of {len(calls)} calls {way.when})"), n)
            else:
                yield Finding(way.kind, quantity=n, when=way.when)

    def rare(self, usual: Results) -> tuple[list[Results], str]:
        """The first of hundreds of calls that differs from the usual one, if one does, and words for how many do."""
        forward = self.p.case.T < SUB
        options = self.usual | {"backwards": int(not forward)}
        others, differ = [], []

        def calls() -> None:  # in one thread, whose start would take as long as a call
            for _ in range(self.kernel.races):
                results = self.run(not self.forward_only, options)
                made = usual | {name: y for name, y in results.items() if not (forward and name.startswith("d"))}
                differ.append(any(not same(y, usual[name]) for name, y in made.items()))
                others.extend([made] * (differ[-1] and not others))

        attempt(self.kernel.seconds * self.kernel.races, calls)
        return others, f" (in {sum(differ)} of {len(differ)} calls)" if others else ""

    def other_ways(self, usual: Results) -> Iterator[Finding]:
        """Findings on results that are wrong or missing in another way of calling, and right in the usual one."""
        written, failed = self.written(), set()
        for way in self.ways(usual["dq"] is not None):
            if way.kind == "nested" and failed & {"twice", "interleaved"}:
                continue
            results = self.attempt(way.gradients, way.options)
            if not isinstance(results, Finding):
                between = way.kind in ("interleaved", "nested")
                names = self.blamed(way, usual, self.wrong(way, usual, results))
                for f in self.repeated(way, usual, names):
                    if not between or f.quantity not in written:
                        failed.add(way.kind)
                        yield f
            elif way.may_raise and results.kind == "raises":
                failed.add(way.kind)
                yield Finding("not covered", way.may_raise)
            else:
                yield Finding(results.kind, f"{way.when}: {results}", results.quantity)
                if results.kind == "hangs":  # the next ones would, too
                    break
        for n in written:
            yield Finding("overwritten", "another call writes into the results", n)

    def written(self) -> list[str]:
        """The results that another call writes into."""
        names: dict[str, None] = {}
        modes = (False,) if self.forward_only else (False, True)
        for gradients in modes if self.p.case.frozen else ():
            results = attempt(self.kernel.seconds, self.overwritten, gradients)
            names |= dict.fromkeys([] if isinstance(results, Finding) else results)
        return [*names]


def nearest(p: Problem, n: str, runs: list[Results]) -> Tensor | None:
    """The result with the least error, of several."""
    given = [results[n] for results in runs if results[n] is not None]
    return min(given, key=lambda x: p.judge(n, x)[0], default=None)


def observe(kernel: Kernel, p: Problem) -> tuple[Results, list[Finding]]:
    """The kernel's results on a case (none if it gave none), and findings on its calls.

    Once usual calls differ, no other way of calling is tried: the report says that they do, and judges the best.
    """
    trial, findings, rate = Trial(kernel, p), [], ""
    before = {n: y.clone() for n, y in trial.x.items()}
    runs = [*trial.usual_calls(2)]
    if all(isinstance(results, Finding) for results in runs):
        may = optional(kernel.kind, p.case)
        refused = may and runs[0].kind in ("raises", "dtype")
        return {}, [Finding("not covered", may) if refused else runs[0]]
    if p.case.often and not varying(runs):
        others, rate = trial.rare(runs[0])
        runs += others
    if not varying(runs):
        findings = [*trial.other_ways(runs[0])]
        if any(f.kind != "not covered" for f in findings):  # such a failure may come in any call now and then
            runs += trial.usual_calls(AGAIN)
    if differ := varying(runs):
        said = VARIES.format(rate)
        findings = [Finding("differs", f"{said}{why and f': {why}'}", n) for n, why in differ.items()]
    runs = [results for results in runs if not isinstance(results, Finding)]
    usual = runs[0] | {n: nearest(p, n, runs) for n in differ if n in runs[0]}
    changed = [n for n, y in trial.x.items() if not torch.equal(y, before[n])]
    if changed:  # it saw other inputs ever after, so no other finding counts
        return usual, [Finding("modified", WROTE, n.replace("d ", "d")) for n in changed]
    if usual["dq"] is None and any(usual[f"d{n}"] is not None for n in trial.names):
        findings.append(Finding("gradient", "no gradient reaches q", "dq"))
    return usual, findings


def varying(runs: list[Results | Finding]) -> dict[str, str]:
    """The quantities in which equal calls differ; or that some of them gave none, and why."""
    first, *rest = (run for run in runs if not isinstance(run, Finding))
    failed = [run for run in runs if isinstance(run, Finding)]
    differ = {n: "" for n, y in first.items() if not all(same(y, other[n]) for other in rest)}
    return differ | {failure.quantity: str(failure) for failure in failed[:1]}
