"""The tables of appendix "Who passes": other libraries' functions under the check kit's cases.

Every function of ``gla_ref.compat.libraries.FUNCTIONS`` has a row in each dtype that its library claims, also where it
was not run.
"""

import re
from functools import cache
from html import escape
from typing import NamedTuple

from .. import results
from ..compat.libraries import FUNCTIONS
from ..mechanisms import MECHANISMS

__all__ = ["WRONG", "Row", "claimed", "details", "family", "matrix", "own", "refusals", "rows"]

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# a direction's verdicts, the worst first
VERDICTS = "breaks", "NaN", "wrong", "off", "refuses", "right", "no gradient", "undecided"
WRONG = VERDICTS[:4]
NEAR = 10  # budgets: below it, and on adversarial inputs, a wrong number is only "off"
PLAIN = "zero", "-1e-4", "logsigmoid/16", "-0.2", "-1"  # gates as a model's may be
BREAKS = {"breaks", "hangs"}  # kinds of failures after which the process is lost
REFUSES = {"raises", "none", "type", "shape", "dtype", "device"}  # without a number to judge
REASONS = {  # what a function refuses, by a part of its message
    "No available kernel": "a single query token",
    "shared memory": "wide heads",
    "Backward pass": "any gradient, as the message says",
    "scale must be positive": "a scale of 0 or less, as an assertion says",
    "no kernel found": "tensors whose strides are off 16 bytes",
    "not correctly aligned": "tensors at addresses off 16 bytes",
    "'NoneType' object": "gradients where the state needs none",
}
FAMILIES = {"torch": "PyTorch's attention", "transformers": "references", "fla.naive": "references"}
FAMILIES |= {"fla.delta_rule": "references", "fla": "fla's kernels", "gla_ref": "this book's kernels"}
IMPORTS = "from gla_ref import check\nfrom gla_ref.compat import libraries\n"
QUANTITY = re.compile(r"o|S|d\w+|[kv]_cache")  # what may be missing of a case that was judged


class Row(NamedTuple):
    """A check: one function in one dtype, and its record, if there is one.

    Where it refuses every gradient, the `record` is of its forward pass, and `whole` the one with gradients.
    """

    function: str  # a key of FUNCTIONS
    dtype: str
    gpu: str = ""
    record: dict | None = None
    whole: dict | None = None

    @property
    def name(self) -> str:
        return f"{self.function} {self.dtype}"

    @property
    def finished(self) -> bool:
        return bool(self.record) and self.record["ok"] is not None

    @property
    def failures(self) -> list[dict]:
        return (self.record or {}).get("failures", [])

    @property
    def cases(self) -> int:
        """The number of cases that were called, however many seeds each had."""
        return self.record["cases"] // self.record["seeds"] if self.record and "cases" in self.record else 0

    @property
    def left(self) -> int:
        """The number of cases that were left out, because the function lacks an argument or cannot take an input."""
        lacks = (self.record or {}).get("not_covered", {})
        return sum(n for name, n in lacks.items() if not QUANTITY.fullmatch(name))

    @property
    def state(self) -> str:
        """How many cases were called, in an unfinished check out of how many, or why none was called."""
        r = self.record or {"ok": None, "message": "not run"}
        if r["ok"] is not None:
            return str(self.cases)
        return f"{self.cases}/{r['of']}" if "of" in r else r["message"].split(":")[0]

    def worst(self, direction: str) -> dict[str, str]:
        """The worst verdict on each case that fails in a direction."""
        found = {}
        for f in self.failures:
            if _direction(f) == direction:
                found[f["case"]] = _worst(self.judge(f), found.get(f["case"], "right"))
        return found

    def made(self, case: str) -> bool:
        """Whether a case has adversarial inputs: strong or mixed gates, a loud passage, no positive scale."""
        c = _cases(FUNCTIONS[self.function].mechanism).get(case)
        return c is not None and bool(c.loud or c.gate not in PLAIN or (c.scale is not None and c.scale <= 0))

    def judge(self, failure: dict) -> str:
        """The verdict of a failure."""
        verdict = _verdict(failure)
        return "off" if verdict == "wrong" and (_budgets(failure) < NEAR or self.made(failure["case"])) else verdict

    def extent(self, *directions: str) -> str:
        """The worst error in these directions on ordinary inputs and, in brackets, on adversarial ones."""
        found = [f for f in self.failures if _direction(f) in directions and _verdict(f) != "refuses"]
        plain, made = (_extent([f for f in found if self.made(f["case"]) == flag]) for flag in (False, True))
        return f"{plain} ({made})".removesuffix(" ()").strip()

    def verdict(self, direction: str) -> str:
        """The worst verdict in a direction; an unfinished check is undecided, unless a case is in `WRONG` already."""
        worst = _worst("right", *self.worst(direction).values())
        if not self.finished and worst not in WRONG:
            return "undecided"
        lacking = self.whole or self.record["not_covered"].get("dq", 0) + self.left >= self.cases
        return "no gradient" if direction == "backward" and worst == "right" and lacking else worst

    @property
    def refused(self) -> dict[str, set[str]]:
        """Cases that were refused, by the reason."""
        found, judged = {}, self.whole or self.record or {}
        for f in judged.get("failures", ()):
            if _verdict(f) == "refuses":
                found.setdefault(_reason(f), set()).add(f["case"])
        if found and self.finished and not self.record["worst"]:  # neither outputs nor gradients were ever given
            found = {f"all tokens in {DTYPES[self.dtype]}": set().union(*found.values())}
        return found


@cache
def _cases(mechanism: str) -> dict:
    """The kit's cases for a mechanism, by name."""
    from ..check import cases  # imported here, because the kit imports much

    return {c.name: c for c in cases(mechanism)}


def _worst(*verdicts: str) -> str:
    return min(verdicts, key=VERDICTS.index)


def _verdict(failure: dict) -> str:
    kind = failure["kind"]
    return "breaks" if kind in BREAKS else "refuses" if kind in REFUSES else "NaN" if kind == "not finite" else "wrong"


def _reason(failure: dict) -> str:
    return next((why for part, why in REASONS.items() if part in failure["message"]), "for another reason")


def _direction(failure: dict) -> str:
    """A failure's direction; where a call returns nothing, its message says whether its backward pass failed."""
    what, said = failure["quantity"], failure["message"] + _reason(failure)
    backward = "backward" in said or "gradient" in said if what == "call" else what[0] == "d"
    return "backward" if backward else "forward"


def _budgets(failure: dict) -> float:
    """A wrong number's error in budgets; infinity where the record has no finite error."""
    if _verdict(failure) != "wrong" or not failure.get("error"):
        return float("inf")
    return float(failure["error"]) / failure["budget"]


def rows() -> list[Row]:
    """Return the rows in the order of FUNCTIONS and dtypes, from a GPU's record or, where there is none, from a CPU's.

    A record that was made under another claim of the library does not count.
    """
    from ..check._claims import Claim  # imported here, because the kit imports much

    found = {}
    for data in (results.load(gpu, kind="checks") for gpu in ("cpu", "nvidia")):
        for r in data["checks"] if data else ():
            name, *forward = r["subject"].split()
            key = name, r["dtype"], *forward
            if name in FUNCTIONS and r["level"] == "quick" and claimed(name, r["dtype"]):
                current = r["ok"] is not None and r.get("claim") == str(Claim.of(FUNCTIONS[name].supports))
                if current or (r["ok"] is None and key not in found):
                    found[key] = data["environment"]["gpu"], r
    listed = []
    for name, dtype in ((name, dtype) for name in FUNCTIONS for dtype in DTYPES if claimed(name, dtype)):
        gpu, record = found.get((name, dtype), ("", None))
        again, forward = found.get((name, dtype, "forward"), ("", None))
        refuses = record and record.get("worst") == {} and again == gpu
        listed.append(Row(name, dtype, gpu, forward if refuses else record, record if refuses else None))
    return listed


def own() -> list[Row]:
    """Return the rows of this package's kernels, with the record of the most cases."""
    data, found = results.load("nvidia", kind="checks"), {}
    for r in sorted(data["checks"] if data else (), key=lambda r: r.get("cases") or 0):
        name, *_ = r["subject"].split()
        if name.split(".")[0] in MECHANISMS and r["level"] == "quick" and r["dtype"] in DTYPES:
            found[name, r["dtype"]] = r
    names = dict.fromkeys(name for m in MECHANISMS for name, _ in found if name.startswith(f"{m}.triton"))
    gpu = data["environment"]["gpu"] if data else ""
    return [Row(f"gla_ref.{name}", d, gpu, found.get((name, d))) for name in names for d in DTYPES]


def claimed(name: str, dtype: str) -> bool:
    """Return whether the library claims tokens of a dtype for a function; PyTorch sends cuDNN 16 bits only."""
    supports = FUNCTIONS[name].supports
    listed = callable(supports) or dtype in supports.get("dtypes", (dtype,))
    return listed and (name, dtype) != ("torch.sdpa_cudnn", "fp32")


def family(row: Row) -> str:
    """The title of a row's group: fla's kernels, references in plain PyTorch, or PyTorch's attention."""
    return next(title for start, title in FAMILIES.items() if row.name.startswith(start))


def matrix(rows: list[Row]) -> str:
    """Return, as HTML, a line for each function: by dtype and direction how badly it fails."""
    sides, lines, by = [(d, way) for d in DTYPES for way in ("forward", "backward")], [], {}
    for row in rows:
        by.setdefault(family(row), {}).setdefault(row.function, {})[row.dtype] = row
    for title, functions in by.items():
        lines.append(f'<tr><th colspan="{1 + len(sides)}">{escape(title)}</th></tr>')
        for function, own in functions.items():
            name = re.sub(r"([._])", r"\1<wbr>", escape(function))  # a phone may break it
            cells = "".join(f"<td>{_cell(own.get(d), way)}</td>" for d, way in sides)
            lines.append(f"<tr><th>{name}</th>{cells}</tr>")
    head = "".join(f"<th>{x}</th>" for x in ("function", *map(" ".join, sides)))
    return f'<table class="table verdicts"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _cell(row: Row | None, direction: str) -> str:
    """A direction's verdict, and its failed cases of those that ran; what is wrong leads to its place in `details`."""
    if row is None:
        return "·"
    verdict, triton = row.verdict(direction), (row.record or {}).get("triton")
    said = {"right": "✓", "refuses": "✓ (refuses)", "no gradient": "–"}.get(verdict, row.extent(direction))
    if verdict != "no gradient":
        failed = sum(v in WRONG for v in row.worst(direction).values())
        said = f"{said} {failed}/{row.cases}".strip() * bool(row.cases) + "…" * (not row.finished)
    said += " CPU" * (row.gpu == "CPU")
    kind = {"right": "right", "refuses": "right", "off": "refused"}.get(verdict, "wrong" * (verdict in WRONG))
    tip = f"{verdict}; cases: {row.state}; {row.gpu}" + f", Triton {triton}" * bool(triton)
    if verdict in WRONG:
        return f'<a class="{kind}" title="{escape(tip)}" style="color: inherit" href="#{_place(row)}">{said}</a>'
    return f'<span class="{kind}" title="{escape(tip)}">{said}</span>'


def _extent(failures: list[dict]) -> str:
    """How bad the worst of these failures is: a broken process, NaN, or the error in budgets."""
    worst = _worst("right", *map(_verdict, failures))
    error = max(map(_budgets, failures), default=0)
    return {"right": "", "wrong": f"{error:.{int(error < NEAR)}f}×"}.get(worst, worst)


def _place(row: Row) -> str:
    return re.sub(r"\W+", "-", row.name)


def refusals(rows: list[Row]) -> str:
    """Return, as HTML, a line for each kind of input that functions claim and refuse, with their names."""
    by = {}
    for row in rows:
        for reason, cases in row.refused.items():
            said = f"<code>{escape(row.name)}</code> ({len(cases)} of {(row.whole or row.record)['cases']} cases)"
            by.setdefault(reason, []).append(said)
    return "<ul>" + "".join(f"<li>{escape(reason)}: {', '.join(who)}</li>" for reason, who in by.items()) + "</ul>"


def _lines(row: Row) -> str:
    """Lines that call a case with a wrong number (shrunken, or the kit's worst), and a case that breaks the process.

    The shrunken case of a record fails as the record's first failure does, which may be a refusal.
    """
    load = f'from gla_ref.compat import libraries\nfn = libraries.function("{row.function}")'
    device = "" if row.record["device"] == "cpu" else f', device="{row.record["device"]}"'
    forward = ", forward_only=True" * bool(row.whole)

    def again(case: str) -> str:
        call = f'check.kernel("{FUNCTIONS[row.function].mechanism}", fn, dtype="{row.dtype}"{device}{forward},'
        return f'from gla_ref import check\n{load}\nprint({call}\n    only="{case}"))'

    found = [f for f in row.failures if _verdict(f) != "refuses"]
    shrunken = row.record["smallest"] if row.failures[0] is found[0] else ""
    worst = max(found, key=_budgets)["case"]
    lines = [shrunken.replace("# fn: the function that was checked", load) or again(worst)]
    breaks = [f["case"] for f in found if _verdict(f) == "breaks" and (shrunken or f["case"] != worst)]
    breaks = [f"# breaks the process:\n{again(case)}" for case in breaks]
    return "\n\n".join(lines + breaks[:1])


def details(rows: list[Row]) -> str:
    """Return a fold for each check with wrong numbers or a broken process: what is off, and lines that show it."""
    parts = [f"<pre>import torch\n{IMPORTS}</pre>"]
    for row in rows:
        found = [f for f in row.failures if _verdict(f) != "refuses"]
        said, lines = [], _lines(row).replace("import torch\n", "").replace(IMPORTS, "") if found else ""
        for verdict in WRONG:
            if own := [f for f in found if row.judge(f) == verdict]:
                what = ", ".join(dict.fromkeys(f["quantity"] for f in own if f["quantity"] != "call"))
                by = f", by up to {worst:.1f} budgets" if (worst := max(map(_budgets, own))) < float("inf") else ""
                where = ", ".join(dict.fromkeys(_told(row, f["case"]) for f in own))
                said.append(f"<li>{verdict}{f' in {what}' * bool(what)}{by}: {escape(where)}</li>")
        if found:
            parts.append(f"<details><summary><b>{escape(row.name)}</b></summary>")
            # a link to something inside a fold opens it
            of = f"{len({f['case'] for f in found})} of {row.cases} cases"
            parts.append(f'<ul id="{_place(row)}">{"".join(said)}</ul>{of}<pre>{escape(lines)}</pre></details>')
    return "".join(parts)


def _told(row: Row, case: str) -> str:
    """A case's name, with its scale and its layout in memory."""
    c = _cases(FUNCTIONS[row.function].mechanism).get(case)
    scale = f"scale {c.scale:g}" if c and c.scale is not None else ""
    said = ", ".join(filter(None, (scale, c.strides if c and c.strides not in ("contiguous", case) else "")))
    return f"{case} ({said})" if said else case
