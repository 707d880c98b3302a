"""Every explorable by name, and the shapes that a frame draws."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import pytest

from gla_ref import results
from gla_ref.book import viz
from gla_ref.book.viz import Explorable, Frame
from gla_ref.book.viz.gate_strength import gate_strength
from gla_ref.book.viz.prefix_sum import prefix_sum
from gla_ref.book.viz.recall_by_state import recall_by_state

bs4 = pytest.importorskip("bs4", reason="the book's tools are not installed")


DATA = {  # explorables of an argument
    "prefix_sum_states": lambda: prefix_sum(states=True),
    "gate_strength_ratio": lambda: gate_strength(ratio_only=True),
    "recall_by_state": lambda: recall_by_state(
        [r for r in results.load("cpu", kind="mqar")["mqar"] if not r["about"]["overwritten"]]
    ),
}
MODULES = [m.name for m in pkgutil.iter_modules(viz.__path__) if m.name[0] != "_"]
EXPLORABLES = {  # a module's function has the module's name
    name: cache(DATA.get(name) or getattr(importlib.import_module(f"{viz.__name__}.{name}"), name))
    for name in dict.fromkeys([*MODULES, *DATA])
    if name not in ("cards", "playable_state")
}


def frames(node) -> list[Frame]:
    return [node] if isinstance(node, Frame) else [f for child in node for f in frames(child)]


def at(explorable: Explorable, indices) -> Frame:
    node = explorable.frames
    for i in indices:
        node = node[i]
    return node


def area(d: str) -> float:
    """The area of a closed path made of straight lines, positive if it runs clockwise."""
    corners = [tuple(map(float, pair.split())) for pair in d.strip("MZ").split("L")]
    return sum(a * y - b * x for (a, b), (x, y) in zip(corners, corners[1:] + corners[:1], strict=True)) / 2


def texts(frame: Frame, kind: str | None = None) -> list[str]:
    drawing = bs4.BeautifulSoup("".join(frame.pieces), "html.parser")
    return [t.text for t in drawing.find_all("text") if kind is None or kind in (t.get("class") or [])]


def rects(frame: Frame, *kinds: str) -> list[dict[str, float]]:
    drawing = bs4.BeautifulSoup("".join(frame.pieces), "html.parser")
    found = [r for r in drawing.find_all("rect") if " ".join(r.get("class") or []) in kinds]
    return [{a: float(r[a]) for a in ("x", "y", "width", "height")} for r in found]
