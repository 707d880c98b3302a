"""Do all ranks of a process group make the same call? Asked through its store, not by a collective (chapter 25).

Collectives that do not fit each other hang, or end the process. So before the first call of a kind every rank writes
what it was called with into the store and reads what the others have written. When a later exchange fails, the store
is also where the ranks that are still alive find out who is missing, or who makes another call.

A rank on a CPU answers questions while it waits in an exchange, and then raises the same error as the rank that asks. A
rank on a GPU does not look: a message of another call becomes NaN there, and without a message it waits until the time
limit (`Lookout`). After a question that ended in a ValueError the group can be used further.
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
    """Questions that the ranks of one group answer through its store.

    Keys of the store: `n/r` is the answer of rank r to question n, its facts or a refusal; `lost/r` is the reason for
    which rank r has given up an exchange, or empty. A refusal and a reason are over once their rank has taken part in
    a later exchange: a rank that has not read them goes on without them. It learns that a refusal is over from the
    store or, where that word comes late, by counting: an exchange of all ranks has ended since, so the rank that had
    refused took part in it. In a pipeline a rank may be ahead of those after it, and then it believes their refusals.

    Attributes:
        count: the number of this rank's next question.
        exchanges: how many exchanges of all ranks this rank has completed.
        refusals: its refusals by question, until every rank has read them or they are over.
        gave_up: whether its `lost/r` has a reason.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.store = dist.PrefixStore("gla_ref.context_parallel", group.get_group_store())
        self.count, self.exchanges, self.gave_up = 0, 0, False
        self.refusals: dict[int, dict[str, str | int]] = {}

    def reach(self, facts: dict[str, str]) -> None:
        """Return when every rank has stated the same facts, one for each argument by name.

        Raises:
            ValueError: a rank has stated another fact, or has refused its arguments; the same text on every rank.
            RuntimeError: a rank has stated nothing within the time limit of the process group and its store.
        """
        self.count = self._question()
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
        told = [self._told(r, self.count) for r in range(self.size)]
        # every rank has answered this question, so every rank has read the answers to the questions before it
        for n in {self.count - 1, *self.refusals}:
            self.store.delete_key(f"{n}/{self.rank}")
        self.refusals.clear()
        self.count += 1
        for r, theirs in enumerate(told):
            difference = compare(0, told[0], r, theirs)
            if difference:
                raise ValueError(difference)

    def answer(self, facts: dict[str, str]) -> None:
        """Take part in the question at hand if another rank asks it; as `reach`."""
        if self._is_asked(self.count) and self._is_asked(self._question()):
            self.reach(facts)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one was called with arguments that do not fit."""
        self.count = self._question()
        facts = {"error": f"{type(error).__name__}: {error}", "exchanges": self.exchanges}
        self.refusals[self.count] = facts
        self._tell(facts)
        self.count += 1

    def took_part(self, of_all: bool) -> None:
        """Tell the other ranks, after an exchange, that this rank's earlier refusals and reasons are over.

        Args:
            of_all: whether the exchange ends only where every rank has taken part in it.
        """
        self.exchanges += of_all
        for n, facts in self.refusals.items():
            self.store.set(f"{n}/{self.rank}", json.dumps(facts | {"over": "an exchange followed"}))
        self.refusals.clear()
        if self.gave_up:
            self.store.set(f"lost/{self.rank}", "")
            self.gave_up = False

    def lost(self, error: Exception, facts: dict[str, str], waited_for: list[int]) -> RuntimeError:
        """Return the error for an exchange that has failed while this rank waited for others."""
        self.give_up(f"waited for {_ranks(waited_for)}")
        others, stop = [r for r in range(self.size) if r != self.rank], time.monotonic() + GRACE
        while True:
            n = self._question()
            differences = [compare(self.rank, facts, r, told) for r in others if (told := self._told(r, n))]
            reasons = {r: self._read(f"lost/{r}") for r in waited_for}
            silent = [r for r, why in reasons.items() if not why]
            if any(differences) or not silent or time.monotonic() > stop:
                break
            time.sleep(0.02)
        for difference in filter(None, differences):
            return RuntimeError(f"the ranks make different calls: {difference}")
        if silent:
            who = f"{_ranks(silent)} died or hangs"
        else:
            who = ", ".join(f"rank {r} gave up: {why}" for r, why in reasons.items())
        return RuntimeError(f"no state came across the border within the time limit: {who} ({error})")

    def give_up(self, why: str) -> None:
        """Say why this rank takes no further part in the current exchange."""
        self.store.set(f"lost/{self.rank}", why)
        self.gave_up = True

    def _question(self) -> int:
        """The number of the question at hand: the first from `count` on without a refusal that is over."""
        n = self.count
        while any(self._is_over(self._told(r, n)) for r in range(self.size)):
            n += 1
        return n

    def _is_over(self, told: dict[str, str | int]) -> bool:
        """Whether an answer is a refusal, and its rank has taken part in an exchange since."""
        return "over" in told or told.get("exchanges", self.exchanges) < self.exchanges

    def _is_asked(self, n: int) -> bool:
        """Whether another rank has answered question n."""
        return any(self.store.check([f"{n}/{r}"]) for r in range(self.size) if r != self.rank)

    def _tell(self, facts: dict[str, str | int]) -> None:
        self.store.set(f"{self.count}/{self.rank}", json.dumps(facts))

    def _told(self, rank: int, n: int) -> dict[str, str | int]:
        """A rank's answer to question n; {} if there is none yet."""
        return json.loads(self._read(f"{n}/{rank}") or "{}")

    def _read(self, key: str) -> str:
        """The text under a key; empty without it."""
        return self.store.get(key).decode() if self.store.check([key]) else ""


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


def compare(a: int, facts: dict[str, str | int], b: int, others: dict[str, str | int]) -> str | None:
    """Describe the first difference between the facts of ranks a and b, or the arguments that one of them refused."""
    for rank, told in ((a, facts), (b, others)):
        if "error" in told:
            return f"rank {rank} rejected its arguments: {told['error']}"
    for name, fact in facts.items():
        if others.get(name) != fact:
            return f"{name}: expected the same on every rank, got {fact} on rank {a} and {others.get(name)} on rank {b}"
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
