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

    facts = {"names": {"q": "query", "k": "key"}, "supports": {"packed": False, "state": False}}
    it, fn = own("linear_attention", attend, options={"loud": True}, heads_first=True, **facts)
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
    wanted = [(f, d) for f in libraries.FUNCTIONS for d in ("bf16", "fp32") if who_passes.claimed(f, d)]
    assert [(row.function, row.dtype) for row in rows] == wanted
    table, folds, refused = (make(rows) for make in (who_passes.matrix, who_passes.details, who_passes.refusals))
    for row in rows:
        assert f">{row.function}</th>" in table.replace("<wbr>", "")
        found = {row.verdict("forward"), row.verdict("backward")}
        assert (f"<b>{row.name}</b>" in folds) == bool(found & {*who_passes.WRONG})
        assert "refuses" not in found or f">{row.name}<" in refused
    none = [row for row in rows for way in ("forward", "backward") if row.verdict(way) == "undecided"]
    assert table.count("undecided; cases: ") == len(none), "each of them says why"
    assert all(row.verdict(way) in who_passes.VERDICTS for row in rows for way in ("forward", "backward"))


def row(ok, *failures, **more):
    """A row of the page, from a record with these failures."""
    record = {"ok": ok, "cases": 3, "seeds": 1, "of": 9, "failures": [*failures], "worst": {"o": 1}, "device": "cpu"}
    record |= {"not_covered": {"dq": 1, "scale": 1}, "smallest": "check.Case(T=3, K=1, V=2, gate='-1')"}
    return who_passes.Row("fla.chunk_gla", "fp32", "NVIDIA X", record | more)


def failure(case, kind, quantity="call", message="", **error):
    return {"case": case, "quantity": quantity, "kind": kind, "message": message} | error


REFUSED = failure("a", "raises", message="AssertionError: scale must be positive (f, line 3 of x.py)")
OFF = failure("b", "error", "dg", error=3e-5, budget=2e-5)
FAR = failure("length 7", "error", "dg", error=3e-4, budget=2e-5)
MADE = failure("narrow and long", "error", "dg", error=1e-3, budget=2e-5)
NAN = failure("b", "not finite", "dq", error="nan", budget=1.0)
ERROR = "CUDA error: misaligned address (in the backward pass)"
BROKE = failure("c", "breaks", message=f"{ERROR}; after that, nothing runs on cuda in this process")


@pytest.mark.parametrize(
    ("found", "forward", "backward", "cells"),
    [
        (row(True), "right", "right", {">✓ 0/3<"}),
        (row(True, not_covered={"dq": 3}, cases=6, seeds=2), "right", "no gradient", {">✓ 0/3<", ">–<"}),
        (row(False, REFUSED, OFF), "refuses", "off", {">✓ (refuses) 0/3<", ">1.5× 1/3<"}),
        (row(False, OFF, FAR, MADE), "right", "wrong", {">15× (50×) 3/3<"}),
        (row(False, MADE), "right", "off", {">(50×) 1/3<"}),
        (row(False, OFF, NAN, REFUSED, NAN | {"case": MADE["case"]}), "refuses", "NaN", {">NaN (NaN) 2/3<"}),
        (row(False, NAN, BROKE), "right", "breaks", {">breaks 2/3<"}),
        (row(False, BROKE | {"message": "(in the call)"}), "breaks", "right", {">breaks 1/3<"}),
        (row(False, failure("a", "hangs")), "breaks", "right", {">breaks 1/3<"}),
        (row(None), "undecided", "undecided", {">0/3…<", "cases: 3/9"}),
        (row(None, OFF, REFUSED), "undecided", "off", {"cases: 3/9", ">0/3…<", ">1.5× 1/3…<"}),
        (who_passes.Row("fla.chunk_gla", "fp32"), "undecided", "undecided", {">…<", "cases: not run"}),
    ],
)
def test_a_verdict_of_each_direction(found, forward, backward, cells):
    assert (found.verdict("forward"), found.verdict("backward")) == (forward, backward)
    assert all(cell in who_passes.matrix([found]) for cell in cells)


def test_who_passes_shows_what_a_failing_check_was_run_on():
    found = row(False, REFUSED, OFF)
    said = "<li>a scale of 0 or less, as an assertion says: <code>fla.chunk_gla fp32</code> (1 of 3 cases)</li>"
    assert said in who_passes.refusals([found])
    assert "only=&quot;b&quot;" in who_passes.details([found]), "the shrunken case fails as the first failure does"
    found = who_passes.details([row(False, OFF, REFUSED, BROKE)])
    assert "check.Case(T=3" in found
    assert "<li>breaks: c</li><li>off in dg, by up to 1.5 budgets: b</li>" in found
    assert found.index("# breaks the process:") < found.index("only=&quot;c&quot;")


def test_a_check_that_gives_nothing_refuses_its_dtype():
    found = row(False, failure("a", "raises", message="No available kernel."), worst={})
    assert "<li>all tokens in float32: " in who_passes.refusals([found])
    found = row(True)._replace(whole=row(False, failure("a", "raises", message="Backward pass")).record)
    assert found.verdict("backward") == "no gradient" and "<li>any gradient, " in who_passes.refusals([found])


def test_who_passes_names_every_refusal():
    for found in who_passes.rows():
        cases = {case.name: case for case in check.cases(libraries.FUNCTIONS[found.function].mechanism)}
        assert "for another reason" not in found.refused, found.name
        assert all(cases[name].T == 1 for name in found.refused.get("a single query token", ()))
