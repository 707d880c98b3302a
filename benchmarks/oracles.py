"""What is right, and how wrong a kernel may be, for one head of one sequence: q [T, K], v [T, V], g [T] or [T, K].

Of the delta rules it is a key head with all its value heads, where it has several: v [T, G, V], g and beta [T, G]. The
exact run and the emulated one are the check kit's (`gla_ref.check`): softmax attention with exponentials to base 2, all
others in chunks of 64. tests/test_bench.py checks them against the `recurrent` forms.
"""

import torch
from torch import Tensor

from gla_ref import check
from gla_ref.check._budgets import octaves
from gla_ref.rounding import budget, error

CHUNKS_OF_64 = 1  # the emulated run of the linear mechanisms and the delta rules
MECHANISMS = check.MECHANISMS


def run(mechanism: str, x: dict[str, Tensor], low: torch.dtype | None, scale: float | None = None) -> dict[str, Tensor]:
    """o and the gradients dq, dk, dv (and so on) of one head of one sequence: exact, or emulated in `low`."""
    return lucky_runs(mechanism, x, low, scale, 1)[0]


def lucky_runs(mechanism: str, x: dict[str, Tensor], low: torch.dtype | None, scale: float | None, copies: int) -> list:
    """What `run` gives, as many times as there are copies, each with its own luck; the first has none."""
    kind, wide = MECHANISMS[mechanism], torch.float64 if low is None else torch.float32
    S = x.get("initial_state")  # [K, V], or [G, K, V]
    state = S if S is None else S.to(wide)[(None,) * (4 - S.ndim)].repeat(1, copies, 1, 1)
    named = {"scale": scale, "initial_state": state, "cu_seqlens": None, "copies": copies}
    named |= {"dtype": low or wide, "run": 0 if kind.cache else CHUNKS_OF_64}

    def heads(n):  # with a batch of one and, unless it has several, one head, side by side
        y, n = x[n].detach().to(wide)[None], "v" if n == "do" else n
        return torch.cat([y if y.ndim == len(kind.axes(n)) else y.unsqueeze(2)] * copies, kind.head_axis(n))

    leaves = {n: heads(n).requires_grad_() for n in kind.arguments}
    with torch.enable_grad():
        o, _ = kind.emulate(*leaves.values(), **named)
        grads = torch.autograd.grad(o, list(leaves.values()), heads("do"))
    result = {"o": (o.detach(), x["v"])}  # each with a tensor of its dtype and shape
    result |= {f"d{n}": (d, x[n]) for n, d in zip(leaves, grads, strict=True)}
    apart = {n: (y.chunk(copies, 2), like, like.dtype if low else wide) for n, (y, like) in result.items()}
    return [{n: y[i].reshape(like.shape).to(dtype) for n, (y, like, dtype) in apart.items()} for i in range(copies)]


def runs(mechanism: str, x: dict[str, Tensor], low: torch.dtype, scale=None, times: int = 2) -> list:
    """[(exact run, emulated run), ...]: the worst of one is one rounding's luck, that of a few how bad luck gets."""
    exact = run(mechanism, x, None, scale)
    return [(exact, emulated) for emulated in lucky_runs(mechanism, x, low, scale, times)]


def judge(got: dict[str, Tensor], runs: list) -> dict[str, tuple[float, float]]:
    """{quantity: (error, budget)} of its worst octave; the budget is 2 x the emulated runs' error + 4 eps."""
    verdict = {}
    for name, x in got.items():
        pairs = []
        for s in octaves(len(x)):
            worst = max(error(low[name][s], exact[name][s]) for exact, low in runs)
            pairs.append((error(x[s], runs[0][0][name][s]), budget(worst, x.dtype)))
        verdict[name] = max(pairs, key=lambda p: p[0] / p[1])
    return verdict
