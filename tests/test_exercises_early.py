"""Exercises: right answers are accepted, typical wrong ones are told what is wrong with them.

The answers of chapters 1 to 8 stand here, the kernels of chapters 4 and 14 in test_exercises_first.py, of 9 to 16 in
test_exercises_late.py, of 17 and 18 in test_exercises_models.py, of 20 to 24 in test_exercises_delta.py. And every
exercise of the book has a judge, a cell to answer it in, and a solution that passes.
"""

from __future__ import annotations

import math
import re
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import test_exercises_delta as delta
import test_exercises_first as first
import test_exercises_late as late
import test_exercises_models as models
import torch
from answers import answer_to
from torch.nn import functional as F

from gla_ref import gla
from gla_ref.book import exercises
from gla_ref.book.exercises import _compare, _predict, check
from gla_ref.book.notebook import chapters
from gla_ref.prefix_sum import blelloch, hillis_steele

BOOK = Path(__file__).resolve().parents[1] / "book"
CHAPTERS = [BOOK / f"{page}.md" for page in chapters(BOOK)]

exercises.load()
LABELS = sorted(exercises.JUDGES)


# -- the book: a judge, a starting cell and a checked solution for every exercise --------------------


def boxes(text: str) -> dict[str, str]:
    """Label -> the text from its exercise to the next one, or to the end of its section."""
    parts = re.split(r"(?m)^:::+\{exercise\}.*\n:label: (\S+)$", text)
    ends = (re.split(r"(?m)^## ", part)[0] for part in parts[2::2])
    return dict(zip(parts[1::2], ends, strict=True))


def test_every_exercise_of_the_book_is_checked():
    found = {path.stem: boxes(path.read_text()) for path in CHAPTERS}
    labels = [label for chapter in found.values() for label in chapter]
    assert len(labels) == len(set(labels))
    assert set(labels) == set(exercises.JUDGES)
    for chapter, of in found.items():
        for label, text in of.items():
            start, solution = re.split(r"(?m)^:::+\{solution-start\} " + label + "$", text)
            assert f'\ncheck("{label}", ' in start, f"{label}: no cell to answer it in"
            assert f'assert check("{label}", ' in solution, f"{label}: its solution is not checked"
        assert {exercises.JUDGES[label][0] for label in of} == {"predict", "derive", "implement"}, chapter
    assert len(labels) >= 40


def test_unfinished_answers_are_open():
    for label, (kind, _) in exercises.JUDGES.items():
        assert check(label, ...).status == "open"
        if kind == "implement":
            assert check(label, lambda *_: None).status == "open", label
    assert check("ex-prefix-sqrt", [64, ..., ...]).status == "open"


@pytest.mark.parametrize("label", LABELS)
def test_nonsense_is_wrong_and_raises_nothing(label):
    nonsense = [True, -3.5, math.nan, "x", "", [], [[]], [None, None], {}, {"k": "x"}, torch.zeros(3)]
    nonsense += [lambda: 0, lambda *_: "x", lambda *_: [], lambda *x: x[0], lambda *_: math.nan]
    nonsense += [lambda *x: tuple(x), lambda *_: torch.full((2, 2), math.nan), dict]
    for answer in nonsense:
        verdict = check(label, answer)
        assert verdict.status == "wrong" and len(verdict.message) > 10, (answer, verdict)


def test_unknown_label():
    with pytest.raises(ValueError, match="label: expected one of"):
        check("ex-nothing", 1)


# -- the judges: whoever makes a mistake that they know gets its sentence ---------------------------


@pytest.mark.parametrize("label", sorted(set(LABELS) - set(exercises.QUESTIONS)))
def test_every_known_mistake_is_told_apart(label, monkeypatch):
    """Each mistake shows on the judge's cases, and no sentence before it takes it for another one."""
    seen, (_, judge) = [], exercises.JUDGES[label]
    if not hasattr(module := sys.modules[judge.__module__], "hold"):
        return
    with monkeypatch.context() as patch:
        patch.setattr(module, "hold", lambda answer, *args: seen.append(args))
        judge(RIGHT[label][0])
    for cases, right, mistakes, *axes in seen:
        cases = list(cases)
        for sentence, mistake in mistakes.items():
            with pytest.raises(exercises.Wrong) as wrong:
                _compare.hold(mistake, cases, right, mistakes, *axes)
            assert str(wrong.value) == sentence


@pytest.mark.parametrize("label", sorted(exercises.QUESTIONS))
def test_every_rule_speaks(label):
    """No rule stands in another's shadow, the first is the right answer, and the last fits whatever is left."""
    question = exercises.QUESTIONS[label]()
    assert question.rules[0][1] == _predict.RIGHT
    silent = [n for n, _ in enumerate(question.rules) if answer_to(question, n) is None]
    unoffered = {"ex-parallel-padding", "ex-gradients-stored"}  # where a page offers no other answers
    assert silent == ([len(question.rules) - 1] if label in unoffered else [])
    assert question.say([math.nan] * len(question.rules[0][0])) == question.rules[-1][1]


def test_tolerances_of_predicted_numbers():
    """A float may be off by its tolerance and no more; an int is met exactly."""
    for right, tolerance, off in ((284.0, 0.01, 2.8), (-0.5, 1e-3, 4.9e-4), (0.0, 1e-3, 0.99e-9), (17, 1e-3, 1.69e-8)):
        question = _predict.numbers("x", right, [], "hint", tolerance)
        assert [question.say([right + x]) for x in (-1.05 * off, -off, off, 1.2 * off)] == (
            ["hint", "Right.", "Right.", "hint"]
        ), right


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


# -- chapter 1 ---------------------------------------------------------------------------------------


def after_cache(shift=None, scaled=True):
    """Tokens one by one; `shift` says how many more or fewer keys than it may a token sees."""

    def form(q, k, v, keys, values, scale):
        keys, values, rows = torch.cat([keys, k]), torch.cat([values, v]), []
        for t in range(len(q)):
            n = len(keys) - len(q) + t + 1 if shift is None else shift(len(keys) - len(q), t)
            x = keys[:n] @ q[t] * (scale if scaled else 1)
            a = x.exp() / x.exp().sum()
            rows.append(sum(a[j] * values[j] for j in range(len(a))))
        return torch.stack(rows)

    return form


def only_new(q, k, v, keys, values, scale):
    x = (scale * q @ k.T).masked_fill(torch.ones(len(q), len(q)).triu(1) > 0, -math.inf)
    return x.softmax(-1) @ v


# -- chapter 2 ---------------------------------------------------------------------------------------


def merged(L1, o1, L2, o2):
    top = max(L1, L2)
    a, b = math.exp(L1 - top), math.exp(L2 - top)
    return top + math.log(a + b), (a * o1 + b * o2) / (a + b)


def merged_unsafe(L1, o1, L2, o2):
    a, b = L1.exp(), L2.exp()
    return (a + b).log(), (a * o1 + b * o2) / (a + b)


# -- chapter 3 ---------------------------------------------------------------------------------------


def attention_gradients(mask=True, delta=True, scaled=True, softmax=True):
    def form(q, k, v, o, L, do, scale):
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(len(q)):
            for j in range(i + 1 if mask else len(k)):
                p = torch.exp(scale * q[i] @ k[j] - L[i])
                dx = do[i] @ v[j] - (do[i] @ o[i] if delta else 0)
                dx = dx * (p if softmax else 1) * (scale if scaled else 1)
                dv[j] += p * do[i]
                dq[i] += dx * k[j]
                dk[j] += dx * q[i]
        return dq, dk, dv

    return form


# -- chapter 5 ---------------------------------------------------------------------------------------


def features(constant=1.0, pairs=0.5**0.5, squares_only=False):
    def phi(x):
        products = torch.einsum("...a,...b->...ab", x, x)
        products = products.diagonal(dim1=-2, dim2=-1) if squares_only else products.flatten(-2)
        return torch.cat([constant * torch.ones_like(x[..., :1]), x, pairs * products], -1)

    return phi


def windowed(start=lambda t, w: max(0, t - w + 1), end=lambda t: t + 1):
    """The sum over a range of tokens, straight from the definition."""

    def form(q, k, v, w):
        rows = []
        for t in range(len(q)):
            span = slice(start(t, w), end(t))
            rows.append((k[span] @ q[t]) @ v[span])
        return torch.stack(rows)

    return form


def unguarded(q, k, v, w):
    S, o = 0, []
    for t in range(len(q)):
        S = S + torch.outer(k[t], v[t]) - torch.outer(k[t - w], v[t - w])
        o.append(q[t] @ S)
    return torch.stack(o)


def one_late(q, k, v, w):
    S, o = 0, []
    for t in range(len(q)):
        S = S + torch.outer(k[t], v[t])
        if t > w:
            S = S - torch.outer(k[t - w], v[t - w])
        o.append(q[t] @ S)
    return torch.stack(o)


# -- chapter 6 ---------------------------------------------------------------------------------------


def suffixes(turn=True, exchange=True, back=True):
    def form(combine, xs):
        xs = tuple(x.flip(1) for x in xs) if turn else xs
        operator = (lambda a, b: combine(b, a)) if exchange else combine
        ys = hillis_steele(operator, xs)
        return tuple(y.flip(1) for y in ys) if back else ys

    return form


def restart(flag=torch.maximum, number=lambda r1, x1, r2, x2: torch.where(r2 > 0, x2, x1 + x2)):
    return lambda a, b: (flag(a[0], b[0]), number(*a, *b))


# -- chapter 7 ---------------------------------------------------------------------------------------


def turned(into=True, back=True, exchange=False):
    def form(walk, q, k, v, do):
        q, k, v, do = [x.flip(0) for x in (q, k, v, do)] if into else (q, k, v, do)
        dk, dv = walk(v, do, q), walk(k, q, do)
        dk, dv = (dk.flip(0), dv.flip(0)) if back else (dk, dv)
        return (dv, dk) if exchange else (dk, dv)

    return form


def mended(scaled=True, late=False, first=True, running=True):
    def form(walk, q, k, v, S0, L, scale):
        starts, o = [S0 if first else 0 * S0], []
        for i in range(0, len(q), L):
            local, added = walk(q[i : i + L], k[i : i + L], v[i : i + L])
            starts.append(starts[-1] * running + added)
            o.append(local + q[i : i + L] @ starts[-1 if late else -2] * (scale if scaled else 1))
        return torch.cat(o), starts[-1]

    return form


RIGHT = {
    "ex-softmax-dominates": [lambda d, H: 8 * d**2 / (4 * H * (d / H))],
    "ex-softmax-afterwards": [[0.125, 0.5, 0.625, 1], torch.tensor([1 / 8, 3 / 6, 5 / 8, 12 / 12])],
    "ex-softmax-order": [{1, 2}, [2, 1]],
    "ex-softmax-cache": [after_cache()],
    "ex-online-first": ["be", "B, E", ["b", "e"]],
    "ex-online-rescale": [[3, 2, 1], (3, 2, 1)],
    "ex-online-divide": [lambda m, new, x: (math.exp(m) / math.exp(new), math.exp(x) / math.exp(new))],
    "ex-online-lse": [merged],
    "ex-flash-rows": [256],
    "ex-flash-order": [[6, 5]],
    "ex-flash-split": [lambda L: 1 / (L[None] - L[:, None]).exp().sum(-1), lambda L: torch.softmax(L, 0).tolist()],
    "ex-flash-gradients": [attention_gradients()],
    "ex-linear-rank": [[3, 5, 5]],
    "ex-linear-capacity": [17, 17.0],
    "ex-linear-taylor": [features()],
    "ex-linear-window": [windowed()],
    "ex-prefix-sqrt": [[64, 126, 8064]],
    "ex-prefix-associative": ["acdf", "f, d, c, a"],
    "ex-prefix-reverse": [suffixes()],
    "ex-prefix-segments": [restart(), lambda a, b: (a[0] + b[0] - a[0] * b[0], a[1] * (1 - b[0]) + b[1])],
    "ex-fla-programs": [[32, 4096, 128]],
    "ex-fla-chunk": [[284, 1], [285, 1.0]],
    "ex-fla-flip": [turned()],
    "ex-fla-packed": [lambda c, n, L: c // L + n],
    "ex-fla-mend": [mended()],
    "ex-fla-traffic": [[4608, 3840, 2816], (4608, 3840, 2816.0)],
    "ex-fla-scale": [lambda o, do, scale: (do * o).sum() / scale],
    "ex-fla-bits": [[512, 9, 15]],
}

#: label -> wrong answers that the judge does not list itself, each with words that name its mistake
WRONG = {
    "ex-softmax-dominates": [
        (lambda d, H: 2 * d / H, "their number cancels"),
        (lambda d, H: 4 * d, "two products with T^2"),
        (lambda d, H: d + d / 2, "four projections"),
        (lambda d, H: d, "a multiplication and an addition"),
        (lambda d, H: d * H, "instead of 192 for the arguments 96, 3"),
        (3, "Expected a function, got int"),
    ],
    "ex-softmax-afterwards": [
        ([0.5, 0.5], "Expected a list of 4, got list of 2"),
        ([0.125, 0.5, 0.6, 1], "Answer 3 of 4"),
    ],
    "ex-softmax-order": [([0, 1], "Expected some of 1, 2, 3, 4"), (2, "1 is missing"), (5, "as a list, got 5")],
    "ex-softmax-cache": [
        (after_cache(lambda P, t: t + 1), "does not know of the cache"),
        (after_cache(lambda P, t: None), "New tokens see later ones"),
        (after_cache(lambda P, t: P + t), "No new token sees itself"),
        (only_new, "cache is not read"),
        (lambda q, k, v, keys, values, scale: (scale * q @ keys.T).softmax(-1) @ values, "new keys are not read"),
        (after_cache(scaled=False), "scale is forgotten"),
        (lambda q, k, v, *_: after_cache()(q, k, v, *_)[:2], "o: expected shape [4, 2], got [2, 2]"),
        (lambda q, k, v, *_: v.float(), "torch.float32"),
        (lambda q, k, v, *_: v / 0, "infinity"),
        (lambda q, k, v, *_: v, "The first difference is at token 1, o[0, 0]"),
        (lambda q, k, v, *_: q @ v, "It stopped with RuntimeError"),
        (lambda q, k, v, *_: torch.einsum("tk,tk->", q, v), "of <lambda>)."),  # not of einsum
    ],
    "ex-online-rescale": [([0, 0, 0], "count how often it rises")],
    "ex-online-divide": [
        (lambda m, n, x: ((n - m).exp(), (x - n).exp()), "upside down"),
        (lambda m, n, x: (1, (x - n).exp()), "brought to the new one"),
        (lambda m, n, x: ((m - n).exp(), (x - m).exp()), "relative to the old maximum"),
        (lambda m, n, x: ((m - n).exp(), 1), "only when it is the largest"),
        (lambda m, n, x: (m - n).exp(), "Expected 2 result(s), a, b; got 1"),
    ],
    "ex-online-lse": [
        (lambda L1, o1, L2, o2: (torch.logaddexp(L1, L2), 0.5 * o1 + 0.5 * o2), "count alike"),
        (lambda L1, o1, L2, o2: (torch.logaddexp(L1, L2), o1 + o2), "Two averages are added"),
        (lambda L1, o1, L2, o2: (L1 + L2, merged(L1, o1, L2, o2)[1]), "do not add"),
        (lambda L1, o1, L2, o2: (max(L1, L2), merged(L1, o1, L2, o2)[1]), "maximum is not enough"),
        (lambda L1, o1, L2, o2: merged(L1, o2, L2, o1), "shares are exchanged"),
        (merged_unsafe, "e^1000 overflows"),
        (lambda *x: (merged(*x)[0] + 1, merged(*x)[1]), "for the arguments 0.3, -1.2"),
        (lambda *x: (torch.logaddexp(x[0], x[2]), merged_unsafe(*x)[1]), "in the shares e^1000 overflows"),
    ],
    "ex-flash-split": [
        (lambda L: torch.ones_like(L) / len(L), "do not count alike"),
        (lambda L: L / L.sum(), "L is a logarithm"),
        (lambda L: L.exp(), "must sum to 1"),
        (lambda L: (L - L.max()).exp(), "after subtracting the largest"),
        (lambda L: L.exp() / L.exp().sum(), "e^1000 overflows"),
    ],
    "ex-flash-gradients": [
        (attention_gradients(mask=False), "future is not masked"),
        (attention_gradients(delta=False), "row sum is missing"),
        (attention_gradients(scaled=False), "scale is missing in dq and dk"),
        (attention_gradients(softmax=False), "factor p is missing"),
        (lambda *x: [2 * y for y in attention_gradients()(*x)], "token 2, dq[1, 0]"),
    ],
    "ex-linear-capacity": [(20, "solve for N"), ({}, "Expected a number, got dict")],
    "ex-linear-taylor": [
        (features(pairs=1), "both sides together"),
        (features(pairs=0.5), "1 / sqrt(2)"),
        (features(constant=0), "needs a feature"),
        (features(pairs=0), "quadratic term is missing"),
        (features(squares_only=True), "Only squares"),
        (lambda x: None, "returns nothing yet"),
    ],
    "ex-linear-window": [
        (windowed(lambda t, w: 0), "Nothing leaves the window"),
        (windowed(lambda t, w: max(0, t - w)), "holds w + 1 tokens"),
        (windowed(lambda t, w: max(0, t - w + 2)), "holds w - 1 tokens"),
        (windowed(lambda t, w: max(0, t - w), lambda t: t), "read before it is written"),
        (unguarded, "Python counts from the end"),
        (one_late, "At t = w the first token"),
        (lambda q, k, v, w: windowed()(q, k, v, w) / 3**0.5, "the scale is 1"),
    ],
    "ex-prefix-sqrt": [([32, 158, 8064], "its derivative is zero")],
    "ex-prefix-reverse": [
        (suffixes(turn=False, exchange=False, back=False), "These are prefixes"),
        (suffixes(exchange=False), "operands must be exchanged"),
        (suffixes(back=False), "not turned back: its first element"),
        (suffixes(exchange=False, back=False), "and the operands are not exchanged"),
        (suffixes(turn=False, back=False), "the sequence is not"),
    ],
    "ex-prefix-segments": [
        (restart(lambda r1, r2: r2), "must keep the left flag"),
        (restart(lambda r1, r2: r1 * r2), "joined with `and`"),
        (restart(number=lambda r1, x1, r2, x2: torch.where(r1 > 0, x2, x1 + x2)), "not the left part's"),
        (restart(number=lambda r1, x1, r2, x2: x1 + x2), "never starts anew"),
        (restart(number=lambda r1, x1, r2, x2: (1 - r2) * (x1 + x2)), "first number of a text is lost"),
        (lambda a, b: (a[0] + b[0], (1 - b[0]) * a[1] + b[1]), "two starts make 2"),
    ],
    "ex-fla-chunk": [([100, 1], "Solve (C + d) / e")],
    "ex-fla-flip": [
        (turned(into=False, back=False), "turn the tokens round first"),
        (turned(back=False), "not turned back"),
        (turned(into=False), "only the results"),
        (turned(exchange=True), "dk and dv are exchanged"),
        (lambda walk, q, k, v, do: turned()(walk, do, k, v, q), "have changed places"),
    ],
    "ex-fla-packed": [
        (lambda c, n, L: c // L, "floor(c / L) has not grown"),
        (lambda c, n, L: -(-c // L), "inside one multiple of L"),
        (lambda c, n, L: -(-c // L) + n, "1 more than floor(T / L) + N"),
        (lambda c, n, L: c + n, "more than floor(T / L) + N"),
        (lambda c, n, L: n, "slot(s) are its own"),
        (lambda c, n, L: c // L + n - 1, "counted from 0"),
    ],
    "ex-fla-mend": [
        (mended(scaled=False), "needs the scale as well"),
        (mended(late=True), "in its outputs already"),
        (mended(first=False), "The text begins with a state S0"),
        (mended(running=False), "not of the last one alone"),
        (lambda walk, q, k, v, S0, L, scale: (mended()(walk, q, k, v, S0, L, scale)[0], k.T @ v), "contains S0, too"),
    ],
    "ex-fla-traffic": [
        ([2304, 1920, 1408], "two bytes"),
        ([4608, 4608, 2816], "reads q, k, v and do only once"),
        ([4608, 3840, 2560], "q, k, dq and dk have K columns"),
        ([4608, 3840, 3584], "V is not K here"),
        ([3072, 3840, 2816], "four tensors, not three"),
        ([4608, 3840, 1], "List the tensors"),
    ],
    "ex-fla-scale": [
        (lambda o, do, scale: (do * o).sum(), "contains the scale already"),
        (lambda o, do, scale: (do * o).sum() * scale, "must be divided"),
        (lambda o, do, scale: (do * o).sum(0) / scale, "over the channels"),
        (lambda o, do, scale: do.sum() / scale, "o is missing"),
    ],
    "ex-fla-bits": [
        ([512, 512, 15], "logarithm to base 2"),
        ([32768, 15, 9], "contains 64 tokens itself"),
        ([512, 9, 24], "9 bits further down"),
        ([512, 8, 15], "each doubling is a bit"),
    ],
}


RIGHT |= first.RIGHT | late.RIGHT | models.RIGHT | delta.RIGHT
WRONG |= first.WRONG | late.WRONG | models.WRONG | delta.WRONG


@pytest.mark.parametrize("label", RIGHT)
def test_right_answers(label):
    for answer in RIGHT[label]:
        state = torch.get_rng_state()
        verdict = check(label, answer)
        assert verdict and verdict.status == "right", verdict
        assert torch.equal(state, torch.get_rng_state()), "a judge must leave the global generator"


@pytest.mark.deep
def test_how_long_a_reader_waits_for_a_judge(record_property):
    def seconds(label):
        begin = time.process_time()
        check(label, RIGHT[label][0])
        return time.process_time() - begin

    slowest = max(RIGHT, key=seconds)
    record_property(f"the slowest judge, {slowest}", round(seconds(slowest), 3))


@pytest.mark.parametrize("label", RIGHT)
def test_wrong_answers_are_named(label):
    own = len(exercises.QUESTIONS[label]().rules) - 1 if label in exercises.QUESTIONS else 0
    answers = WRONG.get(label, [])
    assert own + len(answers) >= (3 if exercises.JUDGES[label][0] == "implement" else 2)
    for answer, words in answers:
        verdict = check(label, answer)
        assert not verdict and words in verdict.message, (words, verdict)


def test_every_exercise_is_tried():
    assert set(RIGHT) == set(exercises.JUDGES) and set(WRONG) <= set(RIGHT)


def test_a_function_may_change_what_it_gets():
    """Judges hand out copies."""

    def in_place(q, k, v, w):
        o = windowed()(q, k, v, w)
        return o, q.zero_(), k.zero_()

    assert check("ex-linear-window", lambda *x: in_place(*x)[0])


def test_default_dtype_does_not_matter():
    """Some chapters set it to float64, others do not."""
    try:
        torch.set_default_dtype(torch.float64)
        for label, answers in RIGHT.items():
            assert check(label, answers[0]), label
    finally:
        torch.set_default_dtype(torch.float32)


def test_scans_are_the_books():
    """The judge of a segmented sum runs both trees of the chapter."""
    r = torch.tensor([[1.0, 0, 1, 0, 0]])
    for scan in (hillis_steele, blelloch):
        assert scan(restart(), (r, torch.ones(1, 5)))[1].tolist() == [[1, 2, 1, 2, 3]]
