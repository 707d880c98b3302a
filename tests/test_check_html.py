"""The check kit's report as HTML: whole, escaped, readable by machines and by those who do not see the picture."""

import re
from dataclasses import replace

import pytest
import torch

from gla_ref import FORMS, check

bs4 = pytest.importorskip("bs4", reason="beautifulsoup4 is not installed")

GATED = FORMS["gla"]["chunkwise"]


def off(q, k, v, g, **named):
    """Wrong in one channel from token 20 on, and in one corner of the state."""
    o, S = GATED(q, k, v, g, **named)
    o, S = o.clone(), S.clone()
    o[1 % len(o), 20:40, 1, 3] += 1e-3
    S[0, 1, 2, 3:] += 1e-3
    return o, S


def page(report):
    return bs4.BeautifulSoup(report._repr_html_(), "html.parser")


def cells(svg) -> set[tuple[int, int]]:
    """(column, row) of every cell that the paths of a picture cover."""
    frame = svg.select_one(".first")
    w, h, left = (float(frame["width"]), float(frame["height"]), float(svg.select_one(".ground")["x"]))
    found = []
    for path in svg.select("path.wrong"):
        for x, y, n in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v[\d.]+h-[\d.]+z", path["d"]):
            first, row = round((float(x) - left) / w), round(float(y) / h)
            found += [(first + i, row) for i in range(round(float(n) / w))]
    assert len(found) == len(set(found)), "no cell has two shades"
    return set(found)


@pytest.fixture(scope="module")
def report():
    return check.kernel("gla", off, only="length 65")


def test_a_wrong_kernel(report):
    html = page(report)
    assert html.select_one("strong.out").text == "WRONG"
    rows = {tr.th.text: [td.text for td in tr.find_all("td")] for tr in html.select("tbody tr")}
    assert list(rows) == ["o", "S", "dq", "dk", "dv", "dg", "dS0"]
    measured = {row.quantity: row for row in report.rows}
    for name, (cases, failed, ratio, case) in rows.items():
        assert (cases, failed, case) == ("1", str(int(name in "oS")), "length 65")
        assert float(ratio.replace(",", "")) == pytest.approx(measured[name].ratio, rel=0.1, abs=0.01)
    o, S = html.find_all("svg")
    assert o["role"] == "img" and "Where o of case length 65 is wrong" in o.title.text
    assert "first at t 20, chunk 0, sub-chunk 1, batch 1, head 1, channel 3" in o.desc.text
    width = -(-65 // 64)
    assert cells(o) == {(t // width, 3) for t in range(20, 40)}
    assert cells(S) == {(column, 2) for column in range(3, 7)}
    assert "No named mistake" in html.text
    assert [line.count(" ") for line in report.failures[1].grid["cells"]] == [7, 7, 3, 7, 7]


def test_a_long_and_wide_map_is_made_smaller_and_keeps_its_worst():
    def wrong(q, k, v, **named):
        o, S = FORMS["linear_attention"]["chunkwise"](q, k, v, **named)
        o = o.clone()
        o[0, 63, 1, 47] = torch.nan
        return o, S

    failures = check.kernel("linear_attention", wrong, only="wider").failures
    (row,) = (row for row in failures if row.quantity == "o")
    assert row.grid["axes"] == ["t", "channel"] and row.grid["size"] == [81, 72]
    columns, lines = len(row.grid["cells"][0]), len(row.grid["cells"])
    assert columns <= 64 and lines <= 32
    assert row.grid["cells"][47 // 3][63 // 2] == "@" and row.map[63 // 2] == "@"
    assert sum(shade != " " for line in row.grid["cells"] for shade in line) == 1


@pytest.mark.deep
def test_gradients_of_scalar_gates_are_drawn_by_head_and_caches_by_time():
    def scalar(q, k, v, g, **named):
        g = g.clone()
        g[:, 7, 2] = g[:, 7, 2].detach()
        return FORMS["simple_gla"]["chunkwise"](q, k, v, g, **named)

    (row,) = check.kernel("simple_gla", scalar, only="length 63").failures
    assert row.quantity == "dg" and row.grid["axes"] == ["t", "head"] and row.where["head"] == 2
    assert {line.strip() != "" for line in row.grid["cells"][:2]} == {False}

    def attend(q, k, v, *, initial_state=None):
        o, (keys, values) = FORMS["softmax_attention"]["parallel"](q, k, v, initial_state=initial_state)
        keys = keys.clone()
        keys[:, 20:] = 0
        return o, (keys, values)

    report = check.kernel("softmax_attention", attend, only="length 63")
    (row,) = (row for row in report.failures if row.quantity == "k_cache")
    assert row.where["t"] == 20 and row.grid["axes"] == ["t", "channel"]
    assert "time |" in str(report) and "rows |" not in str(report).split("k_cache of")[1][:200]


def test_a_right_kernel_and_one_of_which_nothing_is_covered():
    right = page(check.kernel("gla", GATED, only="length 1"))
    assert right.select_one("strong.in").text == "right" and not right.find("svg")
    nothing = page(check.kernel("gla", lambda q, k, v, g: None, only="scale given"))
    assert nothing.strong.text == "NOTHING COVERED" and not nothing.find("table")
    assert "Not covered (cases): initial state (1); scale (1)" in nothing.text


def test_everything_from_outside_is_escaped_and_nothing_is_loaded(report):
    evil = '<script>alert("&")</script><img src=x>'

    def raising(q, k, v, g, **named):
        raise RuntimeError(evil)

    row = replace(report.failures[0], case=evil, quantity=evil)
    report = check.kernel("gla", raising, only="length 1")
    report.rows.append(row)
    report.diagnosis.append({"mistake": evil, "line": evil, "distance": 0.0})
    report.settings["mechanism"] = evil
    report.rows.append(check.Row(evil, evil, message=evil))
    html = page(report)
    assert not html.find_all(["script", "img", "link"]) and "http" not in str(html)
    assert html.text.count(evil) >= 6 and evil in html.svg.title.text
    assert not re.search(r"url\(|@import", html.style.text)
