"""Answers to the questions of `exercises.QUESTIONS`, made of the rules that judge them."""

import math
from itertools import product

OTHER = 1234.5  # neither this nor its negative is any exercise's answer, right or wrong


def offered(question) -> list[list[float]]:
    """For each number of an answer the values that a page offers; none where any number may be entered."""
    made = []
    for part in question.parts:
        made += [[0.0, 1.0]] * len(part.options) if part.many else [list(part.options.values())]
    return made


def values(place, options: list[list[float]]):
    """For each number of an answer some values that fit."""
    for interval, offers in zip(place, options, strict=True):
        low, high = interval or (-math.inf, math.inf)
        between = low + 1 if math.isinf(high) else high - 1 if math.isinf(low) else (low + high) / 2
        yield [x for x in offers if low <= x <= high] or ([between] if interval else [OTHER, -OTHER])


def answer_to(question, rule: int) -> list[float] | None:
    """The numbers of an answer that a page takes and that this rule is the first to fit; None if there is none."""
    (right, _), (place, sentence) = question.rules[0], question.rules[rule]
    options = offered(question)
    mended = [i or r for i, r in zip(place, right, strict=True)]  # what the rule leaves free is right, or anything
    first = next((n for n, i in enumerate(place) if i is None), 0)
    spoilt = [*mended[:first], place[first], *mended[first + 1 :]]
    for tried in (mended, spoilt, place):
        for x in product(*values(tried, options)):
            if question.say(x) == sentence:
                return list(x)
    return None
