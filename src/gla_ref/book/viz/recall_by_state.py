"""Recall against the size of the state, mixer by mixer, as measured on a CPU (chapter 19)."""

import math
from collections.abc import Sequence
from statistics import fmean

from ...models import Config
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, rect, text

__all__ = ["NAMES", "matrices", "measured", "recall_by_state"]

#: mixers in the order of their scores' story, with the words of the book
NAMES = {
    "softmax": "softmax",
    "linear": "linear",
    "retnet": "RetNet-like",
    "mamba2": "Mamba-2-like",
    "gla": "GLA",
    "gated_delta": "gated delta rule",
}


def matrices(record: dict) -> int:
    """Numbers in the mixers' states or caches after the longest text, without the inputs kept by short convolutions."""
    run = record["run"]
    T = max(T for T, _ in run["settings"]["lengths"])
    return Config(**run["model"] | {"use_short_conv": False}).state_size(T)


def measured(records: Sequence[dict]) -> dict[str, dict[int, list[tuple[int, list[float]]]]]:
    """For each mixer and size of its state (:func:`matrices`): (steps, accuracy of each seed) of each evaluation.

    Trials are left out.
    """
    found: dict[str, dict[int, list]] = {}
    for r in records:
        if r["about"]["stage"] == "main":
            found.setdefault(r["about"]["mixer"], {}).setdefault(matrices(r), []).append(r["evaluations"])
    return {
        mixer: {
            state: [(each[0]["step"], [e["accuracy"] for e in each]) for each in zip(*seeds, strict=True)]
            for state, seeds in sorted(found[mixer].items())
        }
        for mixer in NAMES
        if mixer in found
    }


#: names that fit between two columns of dots
SHORT = NAMES | {"gated_delta": "gated delta"}

LEFT, WIDE, TOP, TALL = 46, 340, 26, 200


def _y(share: float) -> float:
    return TOP + TALL * (1 - min(max(share, 0.0), 1.0))


def _apart(heights: Sequence[float], least: float = 13) -> list[float]:
    """Heights of labels in the order given: near their dots, at least some units from each other, inside the frame."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    found = list(heights)
    for n, i in enumerate(order[1:]):  # downwards, then upwards from the frame's lower edge
        found[i] = max(found[i], found[order[n]] + least)
    room = TOP + TALL - 6
    for i in reversed(order):
        found[i] = min(found[i], room)
        room = found[i] - least
    return found


class Scores:
    """What the records say, and the picture of it after a number of evaluations.

    Attributes:
        found: as :func:`measured` has it, with guessing before the first step.
        base: the shares of right answers that guessing gives.
        heads: the number of heads by the size of a state; softmax attention has none.
        sizes: the sizes of all states, the smallest first.
        steps: the steps of training after which models were evaluated.
    """

    def __init__(self, records: Sequence[dict]):
        self.base = next(r["baselines"] for r in records)
        guess = 0, [self.base["chance"]]
        self.found = {m: {n: [guess, *every] for n, every in of.items()} for m, of in measured(records).items()}
        self.heads = {matrices(r): r["run"]["model"]["num_heads"] for r in records if r["about"]["mixer"] != "softmax"}
        self.sizes = sorted({state for of in self.found.values() for state in of})
        self.steps = [step for step, _ in next(iter(next(iter(self.found.values())).values()))]

    def mean(self, mixer: str, state: int, n: int) -> float:
        """The share of right answers after evaluation n, over the seeds."""
        return fmean(self.found[mixer][state][n][1])

    def said(self, mixer: str, state: int, n: int) -> str:
        """The same in words."""
        return f"{self.mean(mixer, state, n):.0%}" if n else "nothing yet"

    def x(self, state: float) -> float:
        low, high = math.log(self.sizes[0] / 1.25), math.log(self.sizes[-1] * 1.25)
        return LEFT + WIDE * (math.log(state) - low) / (high - low)

    def ground(self, states: Sequence[int]) -> list[str]:
        """The axes, with a mark for each of these states, and the lines of guessing."""
        pieces = [rect(LEFT, TOP, WIDE, TALL, "edge faint"), text(LEFT - 40, TOP - 14, "right answers", "start")]
        for share in (0, 0.5, 1):
            pieces.append(text(LEFT - 6, _y(share), f"{share:.0%}", "end"))
        for state in states:
            pieces.append(text(self.x(state), TOP + TALL + 12, f"{state:,}"))
            heads = self.heads.get(state)
            below = f"{heads} head{'s' if heads > 1 else ''}" if heads else "softmax"
            pieces.append(text(self.x(state), TOP + TALL + 27, below))
        pieces.append(text(LEFT + WIDE / 2, TOP + TALL + 45, "numbers in the state after a text (logarithmic)"))
        for share, kind, words in (
            (self.base["majority"], "line-grey dashed", "Naming any of the written values"),
            (self.base["chance"], "line-grey dotted", f"Naming any of {1 / self.base['chance']:.0f} values"),
        ):
            line = path([(LEFT, _y(share)), (LEFT + WIDE, _y(share))], kind)
            pieces.append(part(f"{words}: {share:.1%}", line))
        return pieces

    def labels(self, states: Sequence[int], n: int, scores: bool = False) -> list[str]:
        """Names of the mixers, with their scores if asked, right of their dots; a line joins each dot and name."""
        pieces = []
        for state in states:
            x, means = self.x(state), {m: self.mean(m, state, n) for m, of in self.found.items() if state in of}
            dots = [_y(mean) for mean in means.values()]
            for mixer, dot, y in zip(means, dots, _apart(dots), strict=True):
                pieces.append(path([(x + 6, dot), (x + 15, y)], "line-grey"))
                words = f"{SHORT[mixer]} {means[mixer]:.0%}" if scores else SHORT[mixer]
                pieces.append(text(x + 17, y, words, "start"))
        return pieces

    def dots(self, mixer: str, n: int, chosen: bool) -> list[str]:
        """A dot for each size of a mixer's state: of the chosen mixer larger, joined, and with a dot for each seed."""
        of, kind, pieces = self.found[mixer], "blue" if chosen else "grey", []
        if chosen and len(of) > 1:  # below its dots, so that a reader can point at a dot
            pieces.append(path([(self.x(state), _y(self.mean(mixer, state, n))) for state in of], "line-blue"))
        for state, every in of.items():
            x, mean, seeds = self.x(state), self.mean(mixer, state, n), every[n][1]
            words = f"{NAMES[mixer]}, {state:,} numbers: {mean:.1%}"
            words += f" (runs: {', '.join(f'{y:.0%}' for y in sorted(seeds))})" if n else ""
            shapes = [circle(x, _y(y), 2.5, kind) for y in seeds] if chosen else []
            shapes.append(circle(x, _y(mean), 6 if chosen else 4, kind))
            pieces.append(part(words, *shapes, choose={0: list(self.found).index(mixer)}))
        return pieces

    def frame(self, mixer: str, n: int) -> Frame:
        """All states of all mixers, this one's in front."""
        pieces = self.ground(self.sizes)
        for other in [*(other for other in self.found if other != mixer), mixer]:
            pieces += self.dots(other, n, other == mixer)
        pieces += self.labels(self.sizes[:2], n) if n else []
        said = ", ".join(f"{state:,}: {self.said(mixer, state, n)}" for state in self.found[mixer])
        when = f"{NAMES[mixer]} after {self.steps[n]} of {self.steps[-1]} steps"
        return Frame(pieces, f"{when}. Right answers by numbers in the state: {said}.")

    def asked(self, n: int) -> Frame:
        """The mixers at the second smallest state, which the question names; a question mark for its answer."""
        small, more = self.sizes[:2]
        pieces, there = self.ground([*self.heads]), [m for m, of in self.found.items() if more in of]
        for mixer in there:
            linear, mean = mixer == "linear", self.mean(mixer, more, n)
            dot = circle(self.x(more), _y(mean), 6 if linear else 4, "blue" if linear else "grey")
            words = f"{NAMES[mixer]}, {more:,} numbers: {mean:.1%}"
            pieces.append(part(words, dot, choose={0: list(self.found).index(mixer)}))
        pieces += self.labels([more], n, scores=True) if n else []
        pieces += [text(self.x(small), _y(share), "?") for share in (0.1, 0.3, 0.5, 0.7, 0.9)]  # any height
        pieces.append(text(self.x(max(self.heads)), TOP - 14, "choose a mixer"))
        said = ", ".join(f"{NAMES[m]} {self.said(m, more, n)}" for m in there)
        when = f"{self.heads[more]} heads after {self.steps[n]} of {self.steps[-1]} steps"
        return Frame(pieces, f"{when}. Right answers: {said}.")


def _question(s: Scores) -> Question:
    """What share linear attention answers with the smallest state, given its share with the next one."""
    (small, more), last = s.sizes[:2], len(s.steps) - 1
    share = s.mean("linear", small, last)
    options = {"nearly all": 0.8, "about half": 0.3, "a quarter, like naming any of the written values": 0.0}
    right = next(words for words, least in options.items() if share >= least)
    fact = f"ith {s.heads[small]} heads linear attention answers {share:.0%} correctly."
    return Question(
        f"After {s.steps[-1]} steps of training, linear attention with {s.heads[more]} heads answers "
        f"{s.mean('linear', more, last):.0%} of the questions correctly; its state has {more:,} numbers. What share "
        f"with {s.heads[small]} heads and {small:,} numbers?",
        right,
        {
            words: f"W{fact}" if words == right else f"{'Fewer' if least > share else 'More'}: w{fact}"
            for words, least in options.items()
        },
        seen=(list(s.found).index("linear"), last),
        before=(len(s.found), last),  # the dots that the question names, without the answer
    )


def recall_by_state(records: Sequence[dict]) -> Explorable:
    """Right answers against numbers in the state, for a mixer and a number of steps.

    Args:
        records: records of :mod:`gla_ref.experiments.mqar`, with one number of steps and several sizes of states.
    """
    s, width = Scores(records), records[0]["about"]["width"]
    every = range(len(s.steps))
    return Explorable(
        title="Which mixer recalls, with how many heads?",
        notice="A small dot is one trained model, a large dot the mean of three seeds; "
        f"point at a dot without a name to read its mixer. All models have one layer of width {width} "
        "and saw the same texts. More heads make the state smaller, and every key too. "
        "Softmax attention keeps all keys and values.",
        alt="Right answers against the numbers in a state, one dot for each mixer and number of heads; a dashed and "
        "a dotted line near the bottom are the shares of answers that guessing gives.",
        controls=(
            Choice("Mixer", [*(NAMES[m] for m in s.found), f"all, {s.heads[s.sizes[1]]} heads only"]),
            Slider("Steps of training", s.steps),
        ),
        frames=[*([s.frame(mixer, n) for n in every] for mixer in s.found), [s.asked(n) for n in every]],
        height=TOP + TALL + 57,
        start=(list(s.found).index("gla"), len(s.steps) - 2),
        legend=(
            Key("blue line-blue", "linear, or the mixer that you choose: mean of three models", "dot"),
            Key("grey line-grey", "the other mixers, also means", "dot"),
            Key("line-grey dashed", f"naming any of the written values: {s.base['majority']:.0%}", "line"),
            Key("line-grey dotted", f"naming any of {1 / s.base['chance']:.0f} values: {s.base['chance']:.0%}", "line"),
        ),
        question=_question(s),
    )
