"""Our calls and the fastest library's, case by case, over all suites of a record (appendix "Benchmarks")."""

from typing import NamedTuple

__all__ = ["KINDS", "LOOPS", "TIE", "Case", "cases"]

#: times that differ by less, as a share of the library's, are level
TIE = 0.03
KINDS = "forward", "gradient", "one token at a time"
SIZES = "B", "T", "H", "value_heads", "K", "V", "gates", "lengths"
OURS = "triton", "triton_recurrent_steps"
#: peers that are loops of benchmarks/contenders.py, and no library's call
LOOPS = "torch_chunkwise", "sdpa_flash_loop"


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
        return _at(self.ours)


def _at(record: dict) -> tuple:
    steps = "recurrent" in record["contender"]
    return record["mechanism"], record["direction"], steps, *(str(record.get(n)) for n in SIZES)


def cases(data: dict) -> list[Case]:
    """Return the cases of a record in which a library was right, each with the fastest library that was.

    Both times are of one suite and one Triton. Of two such pairs for a case the one that is worse for us counts.
    """
    runs, worst = {}, {}
    for r in data["records"]:
        if r["ms"] and r["correct"] and (r["contender"] in OURS or (r["peer"] and r["contender"] not in LOOPS)):
            fastest = runs.setdefault((_at(r), r["suite"], r["triton"]), {})
            fastest[r["peer"]] = min(r, fastest.get(r["peer"], r), key=lambda r: r["ms"])
    for (at, *_), fastest in runs.items():
        if len(fastest) == 2:
            case = Case(fastest[False], fastest[True])
            worst[at] = max(case, worst.get(at, case), key=lambda c: c.ratio)
    return [*worst.values()]
