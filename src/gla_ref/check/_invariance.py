"""Does a text's result depend on the other texts of its call, or on where it is cut? (appendix "Who passes")"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._cases import C, Case, inputs
from ._claims import Claim, dtype_of, up
from ._kernel import SECONDS, Convention, Finding, Kernel, device_of
from ._mechanisms import MECHANISMS
from ._run import Results, Trial, same
from .oracle import problems

TEXT = Case("text", B=1, T=3 * C + 8, H=2, K=64, V=64)
BEFORE, AFTER = 37, 70  # tokens of packed neighbours, and of padding


@dataclass(frozen=True)
class Comparison:
    """A text's results, gradients among them, in one call and in another.

    Attributes:
        way: the other call: "again", "in a batch", "packed", "padded", "cut between chunks" or "cut inside a chunk".
        verdict: "equal bits", "equal within rounding", "different" or "not covered".
        quantity: the one that differs most in units of what is allowed; empty where all bits are equal.
        off: by how much, in rms of that quantity.
        allowed: twice its error budget, since either call may be off by one; rounding is no more.
        message: why it is not covered.
    """

    way: str
    verdict: str
    quantity: str = ""
    off: float = 0.0
    allowed: float = 0.0
    message: str = ""


@torch.inference_mode(False)
def invariance(
    mechanism: str,
    fn: Callable,
    *,
    device: str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    supports: Mapping | Callable[[Case], bool] | None = None,
    text: Case = TEXT,
    neighbours: int = 2,
    seed: int = 0,
    forward_only: bool = False,
    time_limit: float = SECONDS,
) -> list[Comparison]:
    """Compare a text alone with the same text among others, packed, padded and cut in two.

    Args:
        mechanism: a key of `gla_ref.check.MECHANISMS`, but softmax attention, whose state is a cache.
        fn: as for :func:`gla_ref.check.kernel`, as all arguments not listed are.
        text: one text, B = 1, with an initial state; it is made so that the kernel claims it.
        neighbours: how many other texts there are in the batch. A kernel may go another way for many than for few.

    Raises:
        ValueError: the claim has no such text.
    """
    claim, dtype = Claim.of(getattr(fn, "supports", None) if supports is None else supports), dtype_of(dtype)
    kind, how = MECHANISMS[mechanism], Convention(forward_only=forward_only or not claim.gradient)
    if kind.cache or dtype not in claim.dtypes or (case := claim.fit(text, kind)) is None:
        raise ValueError(f"supports: expected a claim of one text in {dtype} with a state of one size, got {claim}")
    kernel = Kernel(fn, mechanism, how, device_of(device), time_limit, claim.dtypes)
    (p,) = problems(mechanism, [case], dtype, seed, device=device)
    others = [inputs(mechanism, case, dtype, seed + n) for n in (1, 2)]
    multiple, T, axes = claim.multiples.get("T", 1), case.T, {n: "T" in kind.axes(n) for n in kind.tensors}

    def call(x: dict[str, Tensor], **changes) -> Results:
        now = replace(case, **changes)
        if claim.accepts and not claim.accepts(now) or now.ends and not claim.packed:
            raise Finding("not covered", "not claimed")
        results = Trial(kernel, replace(p, case=now, inputs=x)).as_usual()
        if isinstance(results, Finding):
            raise results
        return {n: y for n, y in results.items() if y is not None}

    def some(x: dict[str, Tensor], a: int, b: int | None, entry: int = 0) -> dict[str, Tensor]:
        """Tokens from a to b, and the states of one entry."""
        return {n: y[:, a:b] if axes[n] else y[entry : entry + 1] for n, y in x.items()}

    def batch() -> Results:
        i = neighbours // 2
        texts = [p.inputs if n == i else others[n % 2] for n in range(neighbours + 1)]
        results = call({n: torch.cat([x[n] for x in texts]) for n in p.inputs}, B=neighbours + 1)
        return {n: y[i : i + 1] for n, y in results.items()}

    def packed() -> Results:
        a, b = up(BEFORE, multiple), up(AFTER, multiple)
        three = some(others[0], 0, a), p.inputs, some(others[1], 0, b)
        x = {n: torch.cat([part[n] for part in three], int(axes[n])) for n in p.inputs}
        return some(call(x, T=a + T + b, ends=(0, a, a + T, a + T + b)), a, a + T, entry=1)

    def padded() -> Results:
        more = up(AFTER, multiple)
        nothing = some({n: 0 * y for n, y in others[0].items()}, 0, more)  # what neither writes nor decays
        x = {n: torch.cat([y, nothing[n]], 1) if axes[n] else y for n, y in p.inputs.items()}
        return some(call(x, T=T + more), 0, T)

    def cut(t: int) -> Results:
        if t % multiple or "initial_state" not in kernel.takes or not case.state:
            raise Finding("not covered", "not claimed")
        first, second = some(p.inputs, 0, t), some(p.inputs, t, None)
        S = call(first, T=t).get("S")
        if S is None:
            raise Finding("not covered", "no final state")
        late = call(second | {"S0": S.double()}, T=T - t)
        early = call(first | {"d S": late["dS0"].double()} if "dS0" in late else first, T=t)
        whole = {n: torch.cat([y, late[n]], 1) for n, y in early.items() if axes[n]}
        return whole | {n: part[n] for n, part in (("S", late), ("dS0", early)) if n in part}

    ways = {
        "again": lambda: call(p.inputs),
        "in a batch": batch,
        "packed": packed,
        "padded": padded,
        "cut between chunks": lambda: cut(2 * C),
        "cut inside a chunk": lambda: cut(2 * C - BEFORE),
    }

    def compared() -> Iterator[Comparison]:
        try:
            alone = call(p.inputs)
        except Finding as finding:
            yield from (Comparison(way, "not covered", message=str(finding)) for way in ways)
            return
        for way, other in ways.items():
            try:
                results = other()
            except Finding as finding:
                yield Comparison(way, "not covered", message=str(finding))
                continue
            off = {n: p.compared(n, results[n], y.double()) for n, y in alone.items() if not same(results[n], y)}
            if not off:
                yield Comparison(way, "equal bits")
                continue
            n = max(off, key=lambda n: off[n][0] / off[n][1])
            error, budget = off[n]
            yield Comparison(way, "equal within rounding" if error <= 2 * budget else "different", n, error, 2 * budget)

    return [*compared()]
