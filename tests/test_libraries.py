"""Functions of other libraries under this book's contract: `gla_ref.compat.libraries`."""

import functools
import inspect
import sys
import types

import pytest
import torch
from cases import thin

from gla_ref import FORMS, check, results
from gla_ref.book import who_passes
from gla_ref.compat import libraries
from gla_ref.mechanisms import MECHANISMS


@pytest.mark.parametrize("name", libraries.FUNCTIONS)
def test_each_says_what_it_computes_and_claims(name):
    it = libraries.FUNCTIONS[name]
    assert name.startswith(it.library + ".") and it.source
    assert it.devices and {*it.devices} <= {"cpu", "cuda"}
    fn, required = libraries.function(name), MECHANISMS[it.mechanism].required
    assert tuple(inspect.signature(fn).parameters) == (*required, *it.takes)
    assert fn.supports == it.supports and {*it.names} <= {*required}


def test_an_unknown_function_is_an_error():
    with pytest.raises(ValueError, match="name: expected one of .*fla.chunk_gla.*; got 'fla.chunk_rwkv'"):
        libraries.function("fla.chunk_rwkv")


@pytest.mark.parametrize("name", thin(["torch.sdpa_math", "torch.sdpa_flash"], "torch.sdpa_flash"))
def test_pytorchs_attention_is_judged_as_far_as_it_claims(name):
    report = check.kernel("softmax_attention", libraries.function(name), only="length 6[35]")
    report.raise_if_failed()
    assert len(report.cases) == 2 and not any(case.state for case in report.cases.values())
    assert name != "torch.sdpa_flash" or all(case.K == case.V for case in report.cases.values())


@pytest.fixture
def own(monkeypatch):
    """Make a function of a library, with what is said of it."""

    def add(mechanism, fn, **facts):
        module = types.ModuleType("library")
        module.rule = fn
        monkeypatch.setitem(sys.modules, "library", module)
        it = libraries.Function(mechanism, "library", "rule", takes=("scale",), **facts)
        monkeypatch.setitem(libraries.FUNCTIONS, "library.rule", it)
        return it, libraries.function("library.rule")

    return add


def test_a_librarys_names_and_order_of_axes_are_kept_to(own):
    """A function with heads before time and names of its own; its second result is no state."""
    seen = []

    def attend(query, key, v, *, scale=None, loud):
        seen.append((tuple(query.shape), loud))
        o, _ = FORMS["linear_attention"]["chunkwise"](*(x.transpose(1, 2) for x in (query, key, v)), scale=scale)
        return o.transpose(1, 2), torch.ones(3)

    names, supports = {"q": "query", "k": "key"}, {"packed": False, "state": False}
    facts = {"names": names, "options": {"loud": True}, "heads_first": True, "supports": supports}
    it, fn = own("linear_attention", attend, **facts)
    check.kernel("linear_attention", fn, only="length 7").raise_if_failed()
    assert seen[0] == ((2, 3, 7, 5), True) and it.library == "library"


def test_what_a_library_does_not_group_is_not_claimed(own):
    """A function without its decorator, for one value head a key head; without a state no case is about one."""

    def rule(**named):
        return FORMS["delta_rule"]["chunkwise"](**named)

    @functools.wraps(rule)
    def elsewhere(*args, **named):
        raise AssertionError("another library was called")

    it, fn = own("delta_rule", elsewhere, grouped=False, bare=True, supports={"state": False})
    report = check.kernel("delta_rule", fn, only=("length 7", "value heads", "values that*"))
    assert report.ok and "values that keys find" in report.left
    assert it.claim.endswith("for each key head") and it.claim[0] != ","
    assert report.cases.keys() == {"length 7", "value heads"} and report.not_covered


@pytest.mark.parametrize("recorded", [True, False])
def test_every_function_has_a_row_in_who_passes(recorded, monkeypatch):
    monkeypatch.setattr(results, "load", functools.cache(results.load) if recorded else lambda *a, **k: None)
    rows = who_passes.rows()
    assert list(dict.fromkeys(row.function for row in rows)) == list(libraries.FUNCTIONS)
    table, tables = who_passes.matrix(rows).replace("<wbr>", ""), who_passes.refusals(rows) + who_passes.wrong(rows)
    for row in rows:
        assert f">{row.name}</th>" in table and (row.verdict in ("right", "none")) == (f">{row.name}<" not in tables)
    assert table.count("no verdict: ") == sum(row.verdict == "none" for row in rows), "each of them says why"
    assert {name for names in who_passes.verdicts(rows).values() for name in names} == {row.name for row in rows}


def test_a_refusal_is_no_wrong_number_in_who_passes():
    refused = {"case": "a", "kind": "raises", "message": "AssertionError: scale must be positive (f, line 3 of x.py)"}
    off = {"case": "b", "quantity": "o", "kind": "error", "error": 3e-5, "budget": 2e-5}
    record = {"ok": False, "cases": 3, "failures": [refused, off], "diagnosis": [], "not_covered": {"dq": 2}}
    record |= {"smallest": "check.Case(T=3, K=1, V=2, gate='-1')", "reproduction": "check.kernel(only='a')"}
    row = who_passes.Row("fla.chunk_gla", "fla.chunk_gla fp32", {"environment": {"gpu": "CPU"}}, record)
    assert row.counts == (3, 1, 1) and row.right == 1
    assert row.worst == 1.5 and who_passes.verdicts([row])["wrong"] == ["fla.chunk_gla fp32"]
    assert "<li>a scale of 0 or less: <code>fla.chunk_gla fp32</code> (1 of 3 cases)</li>" in who_passes.refusals([row])
    assert "the kit&#x27;s “b”" in who_passes.details([row])
    assert "only=&#x27;b&#x27;" in who_passes.details([row]), "the shrunken case fails as the first failure does"
    record["failures"].reverse()
    assert "check.Case(T=3" in (said := who_passes.details([row])) and "T 3, K 1, V 2, gates -1" in said
    assert "<td>CPU and CPU</td>" in who_passes.wrong([row, row]), "one row for a check, however many machines ran it"
    assert "<td>b</td><td>o</td><td>3.0e-05</td><td>2.0e-05</td><td>1.5</td>" in who_passes.wrong([row])
    record["failures"] += [refused | {"case": x, "message": "K >= 16"} for x in "ac"]
    assert row.counts == (1, 1, 0) and row.verdict == "none", "today's claim excludes the sizes of two cases of three"
    record["failures"].append({"case": "b", "quantity": "o", "kind": "not finite", "error": "nan", "budget": 1.0})
    assert row.worst == float("inf") and "<td>not finite</td>" in who_passes.wrong([row])


def test_who_passes_names_every_refusal_and_the_sizes_that_are_refused():
    """A refusal that the page calls one of sizes comes from them: the cases of all other sizes are not refused."""
    refused = {"K or V no multiple of 8": lambda n: n % 8, "K or V below 16": lambda n: n < 16}
    refused["K or V odd"] = lambda n: n % 2
    for row in who_passes.rows():
        cases = {case.name: case for case in check.cases(libraries.FUNCTIONS[row.function].mechanism)}
        for failure in (row.record or {}).get("failures", ()):
            if failure["kind"] in who_passes.NO_NUMBER:
                reasons = [why for part, why in who_passes.REASONS.items() if part in failure["message"]]
                assert reasons, f"{row.name}: {failure['message']}"
                if reasons[0] in refused and (case := cases.get(failure["case"])):
                    assert any(map(refused[reasons[0]], (case.K, case.V))), f"{row.name}: {case}"
