"""Exercises: each has a judge, a cell to answer it in and a solution; a known mistake gets its own sentence.

Right answers stand in the chapters: `make book` runs every solution cell, which asserts that the judge accepts it. The
kernels of chapters 4 and 13 are in test_exercises_first.py. What each known mistake computes is in
exercise_mistakes.json; at commit 14bf296 a second implementation of each, as readers write it, got the same sentence.
"""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from answers import answer_to
from torch.nn import functional as F

from gla_ref import gla
from gla_ref.book import exercises
from gla_ref.book.exercises import _compare, _predict, check, first_kernels
from gla_ref.book.notebook import chapters

HERE = Path(__file__).parent
BOOK = HERE.parent / "book"
PAGES = [BOOK / f"{page}.md" for page in (*chapters(BOOK), "training_attention")]

exercises.load()
LABELS = sorted(exercises.JUDGES)
#: label -> a number of each mistake that the judge knows, in order: see `number`
MISTAKES = json.loads((HERE / "exercise_mistakes.json").read_text())


# -- the book: a judge, a starting cell and a checked solution for every exercise --------------------


def boxes(text: str) -> dict[str, str]:
    """Label -> the text from its exercise to the next one, or to the end of its section."""
    parts = re.split(r"(?m)^:::+\{exercise\}.*\n:label: (\S+)$", text)
    ends = (re.split(r"(?m)^## ", part)[0] for part in parts[2::2])
    return dict(zip(parts[1::2], ends, strict=True))


def test_every_exercise_of_the_book_is_checked():
    found = {path.stem: boxes(path.read_text()) for path in PAGES}
    labels = [label for chapter in found.values() for label in chapter]
    assert len(labels) == len(set(labels))
    assert set(labels) == set(exercises.JUDGES)
    for chapter, of in found.items():
        for label, text in of.items():
            start, solution = re.split(r"(?m)^:::+\{solution-start\} " + label + "$", text)
            assert f'\ncheck("{label}", ' in start, f"{label}: no cell to answer it in"
            assert f'assert check("{label}", ' in solution, f"{label}: its solution is not checked"
        kinds = {exercises.JUDGES[label][0] for label in of}
        assert len(of) == 1 or ("predict" in kinds and len(kinds) > 1), chapter
    assert len(labels) >= 40


def test_unfinished_answers_are_open():
    for label, (kind, _) in exercises.JUDGES.items():
        assert check(label, ...).status == "open"
        if kind == "implement":
            assert check(label, lambda *_: None).status == "open", label
    assert check("ex-prefix-sqrt", [64, ..., ...]).status == "open"
    for label, empty in product(("ex-softmax-order", "ex-online-first", "ex-first-wide"), ("", [])):
        verdict = check(label, empty)  # which is told nothing of what is missing
        assert verdict.status == "wrong" and "is missing" not in verdict.message


@pytest.mark.parametrize("label", LABELS)
def test_nonsense_is_wrong_and_raises_nothing(label):
    nonsense = [True, -3.5, math.nan, "x", "", [], [[]], [None, None], {}, {"k": "x"}, torch.zeros(3)]
    nonsense += [lambda: 0, lambda *_: "x", lambda *_: [], lambda *x: x[0], lambda *_: math.nan]
    nonsense += [lambda *x: tuple(x), lambda *_: torch.full((2, 2), math.nan), dict]
    state = torch.get_rng_state()
    for answer in nonsense:
        verdict = check(label, answer)
        assert verdict.status == "wrong" and len(verdict.message) > 10, (answer, verdict)
    assert torch.equal(state, torch.get_rng_state()), "a judge must leave the global generator"


def test_unknown_label():
    with pytest.raises(ValueError, match="label: expected one of"):
        check("ex-nothing", 1)


# -- the judges: whoever makes a mistake that they know gets its sentence ---------------------------


def compared(label: str, patch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of each comparison of a judge after the answer: cases, right, mistakes, axes."""
    seen, (_, judge) = [], exercises.JUDGES[label]

    def compare(answer, cases, *args):
        seen.append((list(cases), *args))

    for name in ("hold", "kernel"):
        patch.setattr(sys.modules[judge.__module__], name, compare, raising=False)
    with suppress(exercises.Open, exercises.Wrong):
        judge(lambda *_: None)
    return seen


def number(mistake, cases: list) -> float:
    """All results of a mistake on a judge's cases, each number times its place, summed; NaN and infinity count as 0."""
    total = 0.0
    for case in cases:
        with suppress(RuntimeError, IndexError):  # the mistake has no result here
            made = mistake(case) if isinstance(case, first_kernels.Launch) else mistake(*case)
            for x in made if isinstance(made, tuple) else (made,):
                x = torch.as_tensor(x, dtype=torch.float64).flatten().nan_to_num(0, 0, 0)
                total += (x @ torch.arange(1, len(x) + 1, dtype=torch.float64)).item()
    return total


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request):
    """Some chapters set it to float64, others do not."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("label", sorted(MISTAKES.keys() - {"ex-kernel-walk"}))  # which launches kernels
def test_every_known_mistake_is_told_apart(label, default_dtype, monkeypatch):
    """Each shows on the judge's cases, no sentence before its own takes it for another, and it computes what it did."""
    with monkeypatch.context() as patch:
        seen = compared(label, patch)
    monkeypatch.setattr(first_kernels, "launch", lambda answer, case: answer(case))
    numbers = []
    for cases, right, mistakes, *axes in seen:
        compare = first_kernels.kernel if isinstance(cases[0], first_kernels.Launch) else _compare.hold
        compare(right, cases, right, mistakes, *axes)
        for sentence, mistake in mistakes.items():
            with pytest.raises(exercises.Wrong) as wrong:
                compare(mistake, cases, right, mistakes, *axes)
            assert str(wrong.value) == sentence
            numbers.append(number(mistake, cases))
    assert numbers == pytest.approx(MISTAKES[label], rel=1e-6, abs=1e-9), str([float(f"{x:.9g}") for x in numbers])


def test_every_judge_knows_some_mistakes():
    assert set(MISTAKES) == set(LABELS) - set(exercises.QUESTIONS)
    for label, numbers in MISTAKES.items():
        assert len(numbers) >= (3 if exercises.JUDGES[label][0] == "implement" else 2), label


@pytest.mark.parametrize("label", sorted(exercises.QUESTIONS))
def test_every_rule_speaks(label):
    """No rule stands in another's shadow, the first is the right answer, and the last fits whatever is left."""
    question = exercises.QUESTIONS[label]()
    assert question.rules[0][1] == _predict.RIGHT and len(question.rules) > 2
    silent = [n for n, _ in enumerate(question.rules) if answer_to(question, n) is None]
    unoffered = {"ex-parallel-padding", "ex-gradients-stored"}  # where a page offers no other answers
    assert silent == ([len(question.rules) - 1] if label in unoffered else [])
    assert question.say([math.nan] * len(question.rules[0][0])) == question.rules[-1][1]


def test_every_question_with_boxes_has_something_to_tick():
    """So that a form without a tick is never right."""
    asked = [make() for make in exercises.QUESTIONS.values()]
    asked = [question for question in asked if all(part.many for part in question.parts)]
    assert len(asked) > 8
    for question in asked:
        assert any(low == high == 1 for low, high in question.rules[0][0])
        assert all(place != question.rules[0][0] or sentence == "Right." for place, sentence in question.rules)


def test_tolerances_of_predicted_numbers():
    """A float may be off by its tolerance and no more; an int is met exactly."""
    for right, tolerance, off in ((284.0, 0.01, 2.8), (-0.5, 1e-3, 4.9e-4), (0.0, 1e-3, 0.99e-9), (17, 1e-3, 1.69e-8)):
        question = _predict.numbers("x", right, [], "hint", tolerance)
        said = [question.say([right + x]) for x in (-1.05 * off, -off, off, 1.2 * off)]
        assert said == ["hint", "Right.", "Right.", "hint"], right


def test_padding_is_right_where_the_state_stays():
    """The rules of that exercise against the recurrence."""
    k, v, g = _compare.draw(0, (5, 3), (5, 4), (5, 3))

    def state(key, value, gate):
        padded = (F.pad(x, (0, 0, 0, 3), value=n) for x, n in ((k, key), (v, value), (-g.abs(), gate)))
        return _compare.one_head(gla.recurrent, k.new_zeros(8, 3), *padded)[1]

    whole = state(0, 0, 0)
    for key, value, gate in product((0, 1, -2), (0, 1, 3), (0, -1, -math.inf)):
        stays = _compare.close(state(key, value, gate), whole)
        assert bool(check("ex-parallel-padding", dict(k=key, v=value, g=gate))) == stays


# -- answers that no list has ------------------------------------------------------------------------


def chunk_pairs(inside=lambda x: x, low=lambda low: low):
    """The gradient of a chunk's gates; `inside` changes the factors outside of the products."""

    def form(q, k, g, dP, rounded):
        b, r = g.cumsum(0), g.sum(0) / 2
        x, y = q * (b - r).exp(), k * (r - b).exp()
        x_low, y_low, dP = map(low(rounded), (x, y, dP))
        return _compare.reverse_sum(inside(x) * (dP @ y_low) - inside(y) * (dP.T @ x_low))

    return form


def parity(beta=2.0, results=3):
    return lambda bits: ([1.0] * len(bits), [0.0] * len(bits), [beta * b for b in bits.tolist()])[:results]


@pytest.mark.parametrize(
    "label, answer",
    [
        ("ex-softmax-afterwards", torch.tensor([1 / 8, 3 / 6, 5 / 8, 12 / 12])),
        ("ex-softmax-order", {1, 2}),
        ("ex-online-first", "B, E"),
        ("ex-online-rescale", (3, 2, 1)),
        ("ex-flash-split", lambda L: L.softmax(0).tolist()),
        ("ex-linear-capacity", 17.0),
        ("ex-gates-reset", [{1}, {2, 1}, (1, 2, 3), {2, 3, 4}]),
        ("ex-parallel-padding", dict(k=0, v=7, g=-0.0)),
        ("ex-fuse-sum", 2.4),
        ("ex-adaptive-level", [[1, 6], (5, 32), [2, 28]]),
        ("ex-delta-parity", parity()),
        ("ex-delta-parity", lambda bits: (bits, 0 * bits, 2 + 0 * bits)),
    ],
)
def test_right_answers_of_another_kind(label, answer):
    """Than the solution in the chapter."""
    assert check(label, answer)


@pytest.mark.parametrize(
    "label, answer, words",
    [
        ("ex-softmax-dominates", 3, "Expected a function, got int"),
        ("ex-softmax-dominates", lambda d, H: d * H, "T is 288 instead of 192 for the arguments 96, 3"),
        ("ex-softmax-afterwards", [0.5, 0.5], "Expected a list of 4 numbers, got list of 2"),
        ("ex-softmax-order", [0, 1], "Expected some of 1, 2, 3, 4"),
        ("ex-softmax-order", 5, "as a list, got 5"),
        ("ex-softmax-cache", lambda q, k, v, *_: v[:2], "o: expected shape [4, 2], got [2, 2]"),
        ("ex-softmax-cache", lambda q, k, v, *_: v.float(), "torch.float32"),
        ("ex-softmax-cache", lambda q, k, v, *_: v / 0, "infinity"),
        ("ex-softmax-cache", lambda q, k, v, *_: v, "The first difference is at token 1, o[0, 0]"),
        ("ex-softmax-cache", lambda q, k, v, *_: q @ v, "It stopped with RuntimeError"),
        ("ex-softmax-cache", lambda q, k, v, *_: torch.einsum("tk,tk->", q, v), "of <lambda>)."),  # not of einsum
        ("ex-softmax-cache", len, "The judge stopped with TypeError"),  # no line of the reader's
        ("ex-online-divide", lambda m, new, x: (m - new).exp(), "Expected 2 result(s), a, b; got 1"),
        ("ex-linear-capacity", {}, "Expected a number, got dict"),
        ("ex-linear-taylor", lambda x: None, "returns nothing yet"),
        ("ex-gates-reset", [1, 2, 3, 4], "Expected a list of four lists"),
        ("ex-parallel-padding", dict(k=0), "Expected dict(k=..., v=..., g=...)"),
        ("ex-fuse-sum", "many", "Expected a number, got 'many'"),
        ("ex-adaptive-level", [6, 32, 28], "Expected a list of 6 numbers, got list of 3"),
        ("ex-gradients-stored", 3, "Expected a word"),
        ("ex-gradients-same", chunk_pairs(low=lambda low: lambda x: x), "Nothing is rounded"),
        ("ex-gradients-same", chunk_pairs(), "All pairs lie after token 1"),
        ("ex-delta-parity", parity(beta=3.0), "beta: write strengths must lie in [0, 2]"),
        ("ex-delta-parity", parity(results=2), "Expected three results"),
        ("ex-delta-parity", lambda bits: ([1.0], [0.0], [2.0]), "a number for each of the 8 tokens"),
    ],
)
def test_wrong_answers_of_another_kind(label, answer, words):
    """Than the mistakes that the judge lists."""
    verdict = check(label, answer)
    assert not verdict and words in verdict.message, verdict


def test_a_function_may_change_what_it_gets():
    """Judges hand out copies: the mistake is still found on their own numbers."""

    def in_place(xs, t):
        result = xs.mean(), xs.std() / len(xs) ** 0.5
        xs.zero_()
        return result

    assert check("ex-learns-interval", in_place).message == "Multiply by t."
