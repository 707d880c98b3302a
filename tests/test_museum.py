"""The museum: every bug that shipped passes an ordinary test, fails the kit, and is named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cases import LINEAR, thin

from gla_ref import check, results
from gla_ref.__main__ import main
from gla_ref.check import mistakes, museum
from gla_ref.check.museum import ROOMS, chunked, ordinary_test, room, visit

NUMBERS = [it.number for it in ROOMS]
FAST = (1, 6, 15)
PAGE = Path(__file__).parents[1] / "book" / "bugs_that_shipped.md"
NAMED = [m for m in mistakes.MISTAKES if any(m.name == it.name and it.mechanism in m.mechanisms for it in ROOMS)]


@pytest.mark.parametrize("mechanism", thin([*LINEAR, "gated_delta_rule", "kda"], *LINEAR))
def test_with_right_steps_the_kernel_is_right(mechanism):
    only = ("length 65", "square", "packed", "value heads", "gate -inf", "gate many resets", "keys alike 0.99")
    check.kernel(mechanism, chunked(), only=only).raise_if_failed()


@pytest.mark.parametrize("number", thin(NUMBERS, *FAST))
def test_a_room_is_caught_and_named(number):
    it = visit(room(number))
    assert it.ok, f"{it}\n{it.report}"
    record = it.to_json()
    assert record["case"] in record["failing"]
    assert set("".join(record["map"]["rows"])) & set("56789x"), "the picture shows no error"


@pytest.mark.parametrize("number", NUMBERS)
def test_the_ordinary_test_would_have_seen_it_on_a_case_of_the_kit(number):
    it = room(number)
    assert ordinary_test(it)
    cases = {case.name: case for case in check.cases(it.mechanism)}
    assert {*it.cases} <= {*cases} and it.shown[0] in it.cases
    assert not ordinary_test(replace(it, test=museum.Ordinary(cases[it.shown[0]])))


def test_a_right_kernel_is_not_caught_and_a_bug_by_another_name_is_not_named():
    it = visit(replace(room(7), fn=chunked(), cases=("length 7",)))
    assert not it.ok and it.passes and "NOT CAUGHT; named NOT NAMED" in str(it)
    it = visit(replace(room(7), name="another", cases=("length 1",)))
    assert not it.ok and str(it).endswith(f'named "{room(7).name}", NOT "another".')
    with pytest.raises(ValueError, match="number: expected one of .*, got 99"):
        room(99)


@pytest.mark.parametrize("name, status", [(room(15).name, 0), ("another", 1)])
def test_the_command_line_counts_rooms(monkeypatch, capsys, tmp_path, name, status):
    monkeypatch.setattr(museum, "ROOMS", (replace(room(15), name=name),))
    assert main(["check", "--museum", "--json", str(tmp_path / "museum.json")]) == status
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("15 It wanted α") and last.startswith(f"{1 - status} of 1 rooms")
    assert '"caught": "length 1: o, ' in (tmp_path / "museum.json").read_text()


def test_the_command_line_lists_rooms(monkeypatch, capsys):
    monkeypatch.setattr(museum, "visit", lambda *_: pytest.fail("a room was run"))
    assert main(["check", "--museum", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{it.number:2} {it.title}" for it in ROOMS]


def test_a_command_names_a_kernel_or_the_museum(capsys):
    with pytest.raises(SystemExit):
        main(["check"])
    assert "expected MECHANISM MODULE:FUNCTION, or --museum" in capsys.readouterr().err


@pytest.mark.deep
@pytest.mark.parametrize("m", NAMED, ids=[m.name for m in NAMED])
def test_its_name_is_given_to_a_kernel_with_chunks_of_128(m):
    it = next(it for it in ROOMS if it.name == m.name)
    report = check.kernel(it.mechanism, mistakes.apply(it.mechanism, m, 128), only=it.cases)
    assert m.name in [match["mistake"] for match in report.diagnosis], str(report)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_page_tells_its_story_with_its_threads(number):
    it = room(number)
    (story,) = re.findall(rf"(?ms)^## Room {number}: {it.title}$(.*?)(?=^## )", PAGE.read_text())
    assert re.search(r"\]\(https://github.com/[^)]+/(issues|pull)/\d+\)", story) and "**The price.** " in story
    assert f"picture({number})" in story and f"ordinary({number})" in story and f"verdict({number})" in story


def test_the_record_is_of_these_rooms():
    record = results.load(kind="museum")
    found = {r["number"]: (r["title"], r["named"], r["passes_ordinary_test"], r["case"]) for r in record["museum"]}
    assert found == {it.number: (it.title, it.name, True, it.shown[0]) for it in ROOMS}
