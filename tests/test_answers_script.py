"""Exercises in the page: the numbers that `answers.js` reads from a form, by node, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gla_ref.book import exercises

SCRIPT = Path(__file__).resolve().parents[1] / "book" / "_static" / "answers.js"
#: forms of what `numbers` asks for: parts, and in each its inputs
STUB = """
const document = {querySelectorAll: () => []};
const part = inputs => ({querySelectorAll: () => inputs});
const form = parts => ({
  querySelectorAll: wanted => wanted.startsWith("input")
    ? parts.flat().filter(input => input.type === "checkbox") : parts.map(part),
});
"""

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node; the browser tests answer in the page")
POINT = "Expected a number, such as 0.5, 1/16 or 1e-3, with a point for the decimals."


def run(expression: str):
    code = f"{STUB}{SCRIPT.read_text()}\nconsole.log(JSON.stringify({expression}));"
    return json.loads(subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout)


@needs_node
def test_numbers_as_people_write_them():
    """NaN, which JSON writes as null, for what is no number; a comma groups thousands, and never follows a 0."""
    wanted = {
        "1/8": 0.125, ".625": 0.625, "1.": 1, "12.5e-2": 0.125, "1,000": 1000, "32,768": 32768,
        "-1,234,567.5": -1234567.5,
        "\N{MINUS SIGN}1": -1, "0,625": None, "0,5": None, "-0,625": None, "00,625": None, "1,5": None, "1/2/3": None,
        "a half": None, "": None,
    }  # fmt: skip
    assert run(f"{json.dumps(list(wanted))}.map(read)") == list(wanted.values())
    typed = [[{"type": "text", "value": "0,625"}]]
    assert run(f"numbers(form({json.dumps(typed)}))") == POINT


@needs_node
def test_nothing_ticked_is_no_answer():
    """A sentence about what is missing would tell the answer."""

    def boxes(*ticks):
        return [{"type": "checkbox", "checked": tick} for tick in ticks]

    untouched, some = [boxes(False, False), boxes(False)], [boxes(False, True), boxes(False)]
    assert run(f"numbers(form({json.dumps(untouched)}))").startswith("Your turn")
    assert run(f"numbers(form({json.dumps(some)}))") == [0, 1, 0]


def test_every_question_with_boxes_has_something_to_tick():
    """So that a form without a tick is never right."""
    exercises.load()
    asked = [make() for make in exercises.QUESTIONS.values()]
    asked = [question for question in asked if all(part.many for part in question.parts)]
    assert len(asked) > 8
    for question in asked:
        assert any(low == high == 1 for low, high in question.rules[0][0])
        assert all(place != question.rules[0][0] or sentence == "Right." for place, sentence in question.rules)


def test_an_empty_answer_is_told_nothing():
    for label in ("ex-softmax-order", "ex-online-first", "ex-first-wide"):
        for empty in ("", []):
            verdict = exercises.check(label, empty)
            assert verdict.status == "wrong" and "is missing" not in verdict.message
