"""Whether results of the bench are right: some heads are held against the float64 oracle. run.py uses it."""

import itertools
import random

import torch
from suites import Case
from torch import Tensor

from gla_ref.check import MECHANISMS, oracle


class Truth:
    """Oracle and emulated runs of a case for some random (b, h) pairs over the full T, made once.

    As many runs as the kit's: twice the error of the worse of two is less than that of a third in 1 % of octaves.
    """

    def __init__(self, case: Case, x: dict[str, Tensor], pairs: int = 2):
        rng, self.few = random.Random(str(case)), case.H
        self.pairs = [(rng.randrange(case.B), rng.randrange(case.H)) for _ in range(pairs)]
        ends = itertools.accumulate(case.lengths or (case.T,), initial=0)
        self.spans = list(itertools.starmap(slice, itertools.pairwise(ends)))
        self.mechanism, self.made = case.mechanism, []
        run = 0 if MECHANISMS[case.mechanism].cache else 1  # exponentials to base 2; chunks of 64
        for b, h in self.pairs:
            for n, s in enumerate(self.spans):
                one = self.head(x, b, h, s, n)
                right = oracle.exact(self.mechanism, one)
                self.made.append((right, oracle.emulated(self.mechanism, one, chosen=[run], sharp=False)))

    def head(self, x, b, h, span, sequence=0):
        """One head of one sequence, the n-th of a pack (else of the batch) for its initial state.

        Where value heads share key heads, a key head with all of them.
        """

        def of(many):
            return slice(h * many // self.few, (h + 1) * many // self.few)

        one = {n: y[b : b + 1, span, of(y.shape[2])] for n, y in x.items() if n not in ("cu_seqlens", "initial_state")}
        one = {"d o" if n == "do" else n: y for n, y in one.items()}
        if "initial_state" in x:
            n, S = sequence + b, x["initial_state"]
            one["S0"] = S[n : n + 1, of(S.shape[1])]
        return one

    def judge(self, got: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The error and the budget of each quantity, in the head where it is worst."""
        worst: dict[str, tuple[float, float]] = {}
        places = [(b, h, s) for b, h in self.pairs for s in self.spans]
        for (b, h, s), made in zip(places, self.made, strict=True):
            for n, v in oracle.judge(self.mechanism, self.head(got, b, h, s), *made).items():
                if n not in worst or v[0] / v[1] > worst[n][0] / worst[n][1]:
                    worst[n] = v
        return worst


def fingerprint(got: dict[str, Tensor]) -> str:
    """A number in 16 digits that is the same for equal bits, and otherwise hardly ever."""
    total = 0
    for x in got.values():
        words = x.detach().contiguous().flatten().view(torch.int16)
        for n, part in enumerate(words.split(1 << 26)):  # sums modulo 2^64
            total = total * 31 + int((part.long() * (2 * torch.arange(len(part), device=part.device) + 1)).sum()) + n
    return f"{total % 2**64:016x}"
