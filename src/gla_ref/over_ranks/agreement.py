"""Do all ranks of a process group make the same call? Asked through its store, not by a collective (chapter 24).

Collectives that do not fit each other hang, or end the process. So before the first call of a kind every rank writes
the facts of its call into the store and reads the facts of all other ranks. If a later exchange fails, the ranks that
are still alive find out from the store which rank is missing, or which rank makes another call.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from torch import distributed as dist

GRACE = 1.0  # seconds that ranks give each other to report after a failed exchange
EARLY = 0.85  # share of the time limit after which a lookout speaks, before NCCL ends the process


class Agreement:
    """The questions and answers of the ranks of one group; `count` numbers the questions."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size, self.count = dist.get_rank(group), dist.get_world_size(group), 0
        self.store = dist.PrefixStore("gla_ref.context_parallel", group.get_group_store())

    def reach(self, facts: dict[str, str]) -> None:
        """Return when every rank has stated the same facts, one for each argument by name.

        Raises:
            ValueError: a rank has stated another fact, or has refused its arguments; the same text on every rank.
            RuntimeError: a rank has stated nothing within the time limit of the process group and its store.
        """
        self._tell(facts)
        keys = [f"{self.count}/{r}" for r in range(self.size)]
        try:
            self.store.wait(keys)
        except RuntimeError as error:
            silent = [r for r, key in enumerate(keys) if not self.store.check([key])]
            raise RuntimeError(
                f"{_ranks(silent)} did not make this call within {self.store.timeout}: "
                "dead, hanging, or called with other arguments, which had been agreed upon before"
            ) from error
        told = [self._told(r) for r in range(self.size)]
        self.count += 1
        for r, theirs in enumerate(told):
            difference = compare(0, told[0], r, theirs)
            if difference:
                raise ValueError(difference)
        if self.count > 1:  # a rank that has answered this question has read all answers to the question before
            self.store.delete_key(f"{self.count - 2}/{self.rank}")

    def answer(self, facts: dict[str, str]) -> None:
        """Take part in the current question if another rank asks it; raise as `reach` does."""
        if any(self.store.check([f"{self.count}/{r}"]) for r in range(self.size) if r != self.rank):
            self.reach(facts)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank has refused its arguments."""
        self._tell({"error": f"{type(error).__name__}: {error}"})
        self.count += 1

    def lost(self, error: Exception, facts: dict[str, str], waited_for: list[int]) -> RuntimeError:
        """Return the error for an exchange that has failed while this rank waited for others."""
        self.give_up(f"waited for {_ranks(waited_for)}")
        others, stop = [r for r in range(self.size) if r != self.rank], time.monotonic() + GRACE
        while True:
            differences = [compare(self.rank, facts, r, told) for r in others if (told := self._told(r))]
            silent = [r for r in waited_for if not self.store.check([f"lost/{r}"])]
            if any(differences) or not silent or time.monotonic() > stop:
                break
            time.sleep(0.02)
        for difference in filter(None, differences):
            return RuntimeError(f"the ranks make different calls: {difference}")
        if silent:
            who = f"{_ranks(silent)} died or hangs"
        else:
            who = ", ".join(f"rank {r} gave up: {self.store.get(f'lost/{r}').decode()}" for r in waited_for)
        return RuntimeError(f"no state came across the border within the time limit: {who} ({error})")

    def give_up(self, why: str) -> None:
        """Say why this rank takes no further part in the current exchange."""
        self.store.set(f"lost/{self.rank}", why)

    def _tell(self, facts: dict[str, str]) -> None:
        self.store.set(f"{self.count}/{self.rank}", json.dumps(facts))

    def _told(self, rank: int) -> dict[str, str]:
        """The answer of a rank to the current question; {} before it answers."""
        key = f"{self.count}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else {}


class Lookout(threading.Thread):
    """Says why a GPU waits in vain for other ranks; the GPU's host does not notice.

    NCCL ends such a process by itself, but a minute after the time limit, and without naming a rank.

    Attributes:
        latest: the last exchange: its work, the facts of its call, and the ranks that this rank waits for.
    """

    def __init__(self, agreement: Agreement):
        super().__init__(daemon=True)
        self.agreement, self.latest = agreement, None
        self.start()

    def run(self) -> None:
        limit, seen, since = self.agreement.store.timeout.total_seconds(), None, 0.0
        while True:
            time.sleep(limit / 20)
            if self.latest is not seen:
                seen, since = self.latest, time.monotonic()
            elif seen and time.monotonic() - since > EARLY * limit:
                work, facts, ranks = seen
                if not work.is_completed():
                    error = self.agreement.lost(TimeoutError(f"{limit:g} s"), facts, ranks)
                    print(f"gla_ref.context_parallel, rank {self.agreement.rank}: {error}", file=sys.stderr, flush=True)
                    return
                since = time.monotonic()


def compare(a: int, facts: dict[str, str], b: int, others: dict[str, str]) -> str | None:
    """Describe the first difference between the facts of ranks a and b, or the arguments that one of them refused."""
    for rank, told in ((a, facts), (b, others)):
        if "error" in told:
            return f"rank {rank} was called with what does not fit: {told['error']}"
    for name, fact in facts.items():
        if others.get(name) != fact:
            return f"{name}: expected the same on every rank, got {fact} on rank {a} and {others.get(name)} on rank {b}"
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
