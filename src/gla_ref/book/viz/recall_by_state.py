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


def recall_by_state(records: Sequence[dict]) -> Explorable:
    """Right answers against numbers in the state, for a mixer and a number of steps.

    Args:
        records: records of :mod:`gla_ref.experiments.mqar`, with one number of steps and several sizes of states.
    """
    base, width = next((r["baselines"], r["about"]["width"]) for r in records)
    guess = 0, [base["chance"]]  # before the first step
    found = {m: {state: [guess, *of] for state, of in mixer.items()} for m, mixer in measured(records).items()}
    sizes = sorted({state for of in found.values() for state in of})
    low, high = math.log(sizes[0] / 1.25), math.log(sizes[-1] * 1.25)
    steps = [step for step, _ in next(iter(next(iter(found.values())).values()))]
    heads = {matrices(r): r["run"]["model"]["num_heads"] for r in records if r["about"]["mixer"] != "softmax"}

    small, more = sizes[:2]

    def x(state: float) -> float:
        return LEFT + WIDE * (math.log(state) - low) / (high - low)

    def ground(states: Sequence[int] = sizes) -> list[str]:
        pieces = [rect(LEFT, TOP, WIDE, TALL, "edge faint"), text(LEFT - 40, TOP - 14, "right answers", "start")]
        for share in (0, 0.5, 1):
            pieces.append(text(LEFT - 6, _y(share), f"{share:.0%}", "end"))
        for state in states:
            pieces.append(text(x(state), TOP + TALL + 12, f"{state:,}"))
            below = f"{heads[state]} head{'s' if heads[state] > 1 else ''}" if state in heads else "softmax"
            pieces.append(text(x(state), TOP + TALL + 27, below))
        pieces.append(text(LEFT + WIDE / 2, TOP + TALL + 45, "numbers in the state after a text (logarithmic)"))
        for share, kind, words in (
            (base["majority"], "line-grey dashed", "Naming any of the written values"),
            (base["chance"], "line-grey dotted", f"Naming any of {1 / base['chance']:.0f} values"),
        ):
            line = path([(LEFT, _y(share)), (LEFT + WIDE, _y(share))], kind)
            pieces.append(part(f"{words}: {share:.1%}", line))
        return pieces

    def labels(states: Sequence[int], n: int, scores: bool = False) -> list[str]:
        """Names of the mixers, with their scores if asked, right of their dots; a line joins each dot and name."""
        pieces = []
        for state in states:
            means = {m: fmean(of[state][n][1]) for m, of in found.items() if state in of}
            dots = [_y(mean) for mean in means.values()]
            for mixer, dot, y in zip(means, dots, _apart(dots), strict=True):
                pieces.append(path([(x(state) + 6, dot), (x(state) + 15, y)], "line-grey"))
                words = f"{SHORT[mixer]} {means[mixer]:.0%}" if scores else SHORT[mixer]
                pieces.append(text(x(state) + 17, y, words, "start"))
        return pieces

    def all_mixers(n: int) -> Frame:
        """All mixers with the number of heads that the question gives, and no other."""
        pieces = ground([*heads])
        for i, (mixer, of) in enumerate(found.items()):
            if more in of:
                mean = fmean(of[more][n][1])
                kind = "blue" if mixer == "linear" else "grey"
                dot = circle(x(more), _y(mean), 6 if mixer == "linear" else 4, kind)
                pieces.append(part(f"{NAMES[mixer]}, {more:,} numbers: {mean:.1%}", dot, choose={0: i}))
        pieces += labels([more], n, scores=True) if n else []
        pieces += [text(x(small), _y(share), "?") for share in (0.1, 0.3, 0.5, 0.7, 0.9)]  # no height is the answer's
        pieces.append(text(x(max(heads)), TOP - 14, "choose a mixer"))
        said = ", ".join(
            f"{NAMES[m]} {fmean(of[more][n][1]):.0%}" if n else f"{NAMES[m]} nothing yet"
            for m, of in found.items()
            if more in of
        )
        return Frame(pieces, f"{heads[more]} heads after {steps[n]} of {steps[-1]} steps. Right answers: {said}.")

    def frame(mixer: str, n: int) -> Frame:
        pieces = ground()
        order = [other for other in found if other != mixer] + [mixer]
        for other in order:
            mine = other == mixer
            if mine and len(found[other]) > 1:  # below its dots, so that a reader can point at a dot
                points = [(x(state), _y(fmean(scores[n][1]))) for state, scores in found[other].items()]
                pieces.append(path(points, "line-blue"))
            for state, scores in found[other].items():
                seeds, mean = scores[n][1], fmean(scores[n][1])
                at = (x(state), _y(mean))
                kind = "blue" if mine else "grey"
                words = f"{NAMES[other]}, {state:,} numbers: {mean:.1%}"
                words += f" (runs: {', '.join(f'{y:.0%}' for y in sorted(seeds))})" if n else ""
                shapes = [circle(at[0], _y(y), 2.5, kind) for y in seeds] if mine else []
                shapes.append(circle(*at, 6 if mine else 4, kind))
                pieces.append(part(words, *shapes, choose={0: list(found).index(other)}))
        pieces += labels(sizes[:2], n) if n else []
        said = ", ".join(
            f"{state:,}: {fmean(scores[n][1]):.0%}" if n else f"{state:,}: nothing yet"
            for state, scores in found[mixer].items()
        )
        when = f"{NAMES[mixer]} after {steps[n]} of {steps[-1]} steps"
        return Frame(pieces, f"{when}. Right answers by numbers in the state: {said}.")

    linear = {state: fmean(scores[-1][1]) for state, scores in found["linear"].items()}
    options = {"nearly all": 0.8, "about half": 0.3, "a quarter, like naming any of the written values": 0.0}
    right = next(words for words, least in options.items() if linear[small] >= least)
    fact = f"With {heads[small]} heads linear attention answers {linear[small]:.0%} correctly."

    return Explorable(
        title="Which mixer recalls, with how many heads?",
        notice="A small dot is one trained model, a large dot the mean of three seeds; "
        f"point at a dot without a name to read its mixer. All models have one layer of width {width} "
        "and saw the same texts. More heads make the state smaller, and every key too. "
        "Softmax attention keeps all keys and values.",
        alt="Right answers against the numbers in a state, one dot for each mixer and number of heads; a dashed and "
        "a dotted line near the bottom are the shares of answers that guessing gives.",
        controls=(
            Choice("Mixer", [*(NAMES[m] for m in found), f"all, {heads[more]} heads only"]),
            Slider("Steps of training", steps),
        ),
        frames=[
            *([frame(mixer, n) for n in range(len(steps))] for mixer in found),
            [all_mixers(n) for n in range(len(steps))],
        ],
        height=TOP + TALL + 57,
        start=(list(found).index("gla"), len(steps) - 2),
        legend=(
            Key("blue line-blue", "linear, or the mixer that you choose: mean of three models", "dot"),
            Key("grey line-grey", "the other mixers, also means", "dot"),
            Key("line-grey dashed", f"naming any of the written values: {base['majority']:.0%}", "line"),
            Key("line-grey dotted", f"naming any of {1 / base['chance']:.0f} values: {base['chance']:.0%}", "line"),
        ),
        question=Question(
            f"After {steps[-1]} steps of training, linear attention with {heads[more]} heads answers "
            f"{linear[more]:.0%} of the questions correctly; its state has {more:,} numbers. What share with "
            f"{heads[small]} heads and {small:,} numbers?",
            right,
            {
                words: fact if words == right else f"{'Fewer' if least > linear[small] else 'More'}: w{fact[1:]}"
                for words, least in options.items()
            },
            seen=(list(found).index("linear"), len(steps) - 1),
            before=(len(found), len(steps) - 1),  # the dots that the question names, without the answer
        ),
    )
