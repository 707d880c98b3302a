"""Our calls and the fastest library's, case by case, over all suites of a record (appendix "Benchmarks")."""

from statistics import quantiles
from typing import NamedTuple

__all__ = ["KINDS", "LOOPS", "TIE", "Case", "cases", "steps", "unsteady"]

#: times that differ by less, as a share of the library's, are level
TIE = 0.03
KINDS = "forward", "gradient", "one token at a time"
SIZES = "B", "T", "H", "value_heads", "K", "V", "gates", "lengths"
OURS = "triton", "triton_recurrent_steps"
#: peers that are loops of benchmarks/contenders.py, and no library's call
LOOPS = "torch_chunkwise", "sdpa_flash_loop"
#: the suite of small calls: they wait for Python, so the clock compares them, and not the GPU's time
SMALL = "host"


class Case(NamedTuple):
    """One mechanism at one shape, with one kind of gates, in one direction: two records."""

    ours: dict
    theirs: dict

    @property
    def ratio(self) -> float:
        """Our time divided by theirs."""
        return self.ours["ms"] / self.theirs["ms"]

    @property
    def kind(self) -> str:
        """One of KINDS; the gradient with or without the forward pass."""
        stepwise = self.ours["contender"] == OURS[1]
        return KINDS[2] if stepwise else KINDS[self.ours["direction"] != "forward"]

    @property
    def at(self) -> tuple:
        """What the two records share, and other records of this case have, too."""
        r, steps = self.ours, "recurrent" in self.ours["contender"]
        return r["mechanism"], r["direction"], steps, *(str(r.get(n)) for n in SIZES)


def unsteady(record: dict) -> bool:
    """Whether the middle half of a record's samples spreads over more than a tenth of their median."""
    low, middle, high = quantiles(record["samples_ms"], n=4)
    return high - low > 0.1 * middle


def cases(data: dict) -> list[Case]:
    """Return the cases of a record in which a library was right, each with the fastest library that was.

    Both times are steady, of one suite and of one Triton. Of two such pairs for a case the one that is worse for us
    counts.
    """
    runs, worst = {}, {}
    for r in data["records"]:
        called = r["contender"] in OURS or (r["peer"] and r["contender"] not in LOOPS)
        if called and r["ms"] and r["correct"] and r["suite"] != SMALL and not unsteady(r):
            fastest = runs.setdefault((Case(r, r).at, r["suite"], r["triton"]), {})
            fastest[r["peer"]] = min(r, fastest.get(r["peer"], r), key=lambda r: r["ms"])
    for (at, *_), fastest in runs.items():
        if len(fastest) == 2:
            case = Case(fastest[False], fastest[True])
            worst[at] = max(case, worst.get(at, case), key=lambda c: c.ratio)
    return [*worst.values()]


def steps(data: dict) -> list[dict]:
    """Return a record's training steps: both passes timed together, or their medians' sum, `unsteady` if one is."""
    passes, found = {}, []
    for r in data["records"]:
        at = r["suite"], r["triton"], r["contender"], r["mechanism"], *(str(r.get(n)) for n in SIZES)
        passes.setdefault(at, {})[r["direction"]] = r
    for those in passes.values():
        halves = [r for way, r in those.items() if way != "both" and r["ms"] and r["correct"]]
        if "both" in those:
            found.append(those["both"])
        elif len(halves) == 2:
            quarters = zip(*(quantiles(r["samples_ms"], n=4) for r in halves), strict=True)
            total = {"ms": sum(r["ms"] for r in halves), "unsteady": any(map(unsteady, halves)), "direction": "both"}
            found.append(those["backward"] | total | {"samples_ms": [*map(sum, quarters)]})
    return found
