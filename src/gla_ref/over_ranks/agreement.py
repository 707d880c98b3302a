"""Do all ranks of a process group make the same call? Asked through its store, not by a collective (chapter 25).

Collectives that do not fit each other hang, or end the process. So before the first call of a kind the ranks ask a
question, which every rank answers in the store: with the facts of its call, or with a refusal of its arguments. A rank

    whose arguments do not fit              refuses the question at hand                          `checking`
    that makes a call of a new kind         answers it, and waits for all other answers           `reach`
    that waits in an exchange, on a CPU     answers it too, if another rank has                   `answer`
    for which an exchange has failed        asks who else has given up, or makes another call     `waiting`
    that has taken part in an exchange      says that its refusals and reasons are over           `took_part`

A rank on a GPU does not look while it waits: a message of another call becomes NaN there, and without a message it
waits until the time limit (`Lookout`). After a question that ended in a ValueError the group can be used further.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import distributed as dist

GRACE = 1.0  # seconds that ranks give each other to report after a failed exchange
EARLY = 0.85  # share of the time limit after which a lookout speaks, before NCCL ends the process


class Answer(NamedTuple):
    """A rank's answer to a question, as it stands in the store: the facts of its call, or a refusal."""

    facts: dict[str, str]  # by the names of arguments; none of a refusal
    refusal: str = ""  # the error of a rank whose arguments do not fit
    exchanges: int = 0  # how many exchanges of all ranks the rank had completed when it refused
    over: bool = False  # whether the rank has taken part in an exchange since it refused


class Agreement:
    """Questions that the ranks of one group answer through its store.

    Keys of the store: `n/r` is the answer of rank r to question n, `lost/r` the reason for which rank r has given up an
    exchange. A rank that has not read a refusal goes on without it once it is over. It learns that from the store or,
    where that word comes late, by counting: if an exchange of all ranks has ended since, the rank that had refused took
    part in it. In a pipeline a rank may be ahead of those after it, and then it believes their refusals.

    Attributes:
        question: the number of this rank's next question.
        agreed: facts that all ranks have agreed upon, of each kind of call.
        exchanges: how many exchanges of all ranks this rank has completed.
        refusals: its refusals by question, until every rank has read them or they are over.
        gave_up: whether this rank's reason for giving up an exchange is in the store.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.store = dist.PrefixStore("gla_ref.context_parallel", group.get_group_store())
        self.question, self.exchanges, self.gave_up = 0, 0, False
        self.agreed: set[tuple[str, ...]] = set()
        self.refusals: dict[int, Answer] = {}

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check arguments: an error in here is told to the other ranks, too."""
        try:
            yield
        except (TypeError, ValueError) as error:
            n = self._at_hand()
            self.refusals[n] = Answer({}, f"{type(error).__name__}: {error}", self.exchanges)
            self._write(n, self.refusals[n])
            self.question = n + 1
            raise

    def reach_once(self, facts: dict[str, str]) -> None:
        """`reach` unless all ranks have agreed upon the same facts before."""
        common = tuple(facts.values())
        if common not in self.agreed:
            self.reach(facts)
            self.agreed.add(common)

    def reach(self, facts: dict[str, str]) -> None:
        """Return when every rank has stated the same facts, one for each argument by name.

        Raises:
            ValueError: a rank has stated another fact, or has refused its arguments; the same text on every rank.
            RuntimeError: a rank has stated nothing within the time limit of the process group and its store.
        """
        n = self.question = self._at_hand()
        self._write(n, Answer(facts))
        try:
            self.store.wait([f"{n}/{r}" for r in range(self.size)])
        except RuntimeError as error:
            silent = [r for r in range(self.size) if not self._read(n, r)]
            raise RuntimeError(
                f"{_ranks(silent)} did not make this call within {self.store.timeout}: "
                "dead, hanging, or called with other arguments, which had been agreed upon before"
            ) from error
        answers = [self._read(n, r) for r in range(self.size)]
        # every rank has answered this question, so every rank has read the answers to the questions before it
        for old in {n - 1, *self.refusals}:
            self.store.delete_key(f"{old}/{self.rank}")
        self.refusals.clear()
        self.question += 1
        for r, answer in enumerate(answers):
            if different := difference(0, answers[0], r, answer):
                raise ValueError(different)

    def answer(self, facts: dict[str, str]) -> None:
        """Take part in the question at hand if another rank asks it; as `reach`."""
        if self._is_asked(self.question) and self._is_asked(self._at_hand()):
            self.reach(facts)

    def took_part(self, of_all: bool) -> None:
        """Tell the other ranks, after an exchange, that this rank's earlier refusals and reasons are over.

        An exchange `of_all` ranks ends only where every rank has taken part in it.
        """
        self.exchanges += of_all
        for n, refusal in self.refusals.items():
            self._write(n, refusal._replace(over=True))
        self.refusals.clear()
        if self.gave_up:
            self.give_up("")

    def give_up(self, why: str) -> None:
        """Say why this rank takes no further part in the current exchange; empty once it takes part again."""
        self.store.set(f"lost/{self.rank}", why)
        self.gave_up = bool(why)

    @contextmanager
    def waiting(self, facts: dict[str, str], ranks: list[int]) -> Iterator[None]:
        """Wait for these ranks in an exchange; the error of a failure says which of them is missing, and why."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost(error, facts, ranks) from error

    def lost(self, error: Exception, facts: dict[str, str], waited_for: list[int]) -> RuntimeError:
        """Return the error for an exchange that has failed while this rank waited for others."""
        self.give_up(f"waited for {_ranks(waited_for)}")
        stop, own = time.monotonic() + GRACE, Answer(facts)
        while True:
            n = self._at_hand()
            answers = {r: self._read(n, r) for r in range(self.size) if r != self.rank}
            differences = [difference(self.rank, own, r, answer) for r, answer in answers.items() if answer]
            reasons = {r: self._text(f"lost/{r}") for r in waited_for}
            silent = [r for r, why in reasons.items() if not why]
            if any(differences) or not silent or time.monotonic() > stop:
                break
            time.sleep(0.02)
        for different in filter(None, differences):
            return RuntimeError(f"the ranks make different calls: {different}")
        if silent:
            who = f"{_ranks(silent)} died or hangs"
        else:
            who = ", ".join(f"rank {r} gave up: {why}" for r, why in reasons.items())
        return RuntimeError(f"no state came across the border within the time limit: {who} ({error})")

    def _at_hand(self) -> int:
        """The number of the question at hand: the first from `question` on without a refusal that is over."""
        n = self.question
        while any(self._is_over(self._read(n, r)) for r in range(self.size)):
            n += 1
        return n

    def _is_over(self, answer: Answer | None) -> bool:
        """Whether an answer is a refusal, and its rank has taken part in an exchange since."""
        return bool(answer and answer.refusal) and (answer.over or answer.exchanges < self.exchanges)

    def _is_asked(self, n: int) -> bool:
        """Whether another rank has answered question n."""
        return any(self.store.check([f"{n}/{r}"]) for r in range(self.size) if r != self.rank)

    def _write(self, n: int, answer: Answer) -> None:
        self.store.set(f"{n}/{self.rank}", json.dumps(answer))

    def _read(self, n: int, rank: int) -> Answer | None:
        """A rank's answer to question n, if there is one yet."""
        text = self._text(f"{n}/{rank}")
        return Answer(*json.loads(text)) if text else None

    def _text(self, key: str) -> str:
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


def difference(a: int, one: Answer, b: int, other: Answer) -> str | None:
    """Describe a refusal by rank a or b or, if both have stated facts, the first that differs."""
    for rank, answer in ((a, one), (b, other)):
        if answer.refusal:
            return f"rank {rank} rejected its arguments: {answer.refusal}"
    for name, fact in one.facts.items():
        theirs = other.facts.get(name)
        if theirs != fact:
            return f"{name}: expected the same on every rank, got {fact} on rank {a} and {theirs} on rank {b}"
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
